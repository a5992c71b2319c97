// A pass over the positions of a level, by (sample, channel) or, without channels, by sample. Blocks share
// planes in `parts`; their sums are merged later, in their order.
//
// A thread takes kPack neighbours (load/points.cuh) at a time, at multiples of so many in the whole array;
// what stands before the first and after the last such in a plane goes alone. Channels last shares are
// load/last.cuh's, and those of points of many terms load/shared.cuh's.
#pragma once
#include "load/last.cuh"
#include "load/points.cuh"
#include "load/reduce.cuh"
#include "load/shared.cuh"

namespace load {

// Which part of which plane is a thread's, of `all`; its place among the threads that share it, and how many
// those are: a block, or, if a block has 2^several parts, a few lanes of a warp. Behind the last part there
// may then be some that don't exist, in the place of which stands the last.
constexpr int kPlaneBits = 8;
static_assert(kPlaneThreads == 1 << kPlaneBits);
struct Share {
  unsigned number;
  int place, threads;
  bool exists;
  template <Order order> static __device__ __forceinline__ Share of_block() {
    return {block<order>(), int(threadIdx.x), int(blockDim.x), true};
  }
  template <Order order> static __device__ __forceinline__ Share of_lanes(unsigned several, unsigned all) {
    if (several == 0) return of_block<order>();
    const int bits = kPlaneBits - int(several);
    const unsigned number = (block<order>() << several) + (threadIdx.x >> bits);
    return {min(number, all - 1), int(threadIdx.x & ((1u << bits) - 1)), 1 << bits, number < all};
  }
};

// A thread's share of a plane; see LastPlane of kAtOnce. kSeveral: may a block have several?
template <bool kScalar, int kAtOnce, bool kSeveral, Order order> class Plane {
 public:
  const int64_t n, c;
  __device__ Plane(const Extent& extent, const value_t* values, unsigned parts, unsigned several)
      : Plane(extent, values, parts,
              kSeveral ? Share::of_lanes<order>(several, unsigned(extent.N * extent.C) * parts)
                       : Share::of_block<order>()) {}

  template <class F> __device__ __forceinline__ void each(const F& f) {
    const int S = share_.exists ? extent_.positions() : 0;
    const int first = this->first(), step = this->step();
    if constexpr (kScalar) {
      for (int i = first; i < S; i += step) f(point<1>(i));
    } else {
      const int before = int(int64_t(share_.number / parts_) * S % kPack),
                stride = step * kPack;  // before: of the plane's first pack
      const auto some = [&](int i) {
        if (i >= 0 && i + kPack <= S) {
          f(point<kPack>(i));
        } else {
          for (int j = i < 0 ? 0 : i; j < i + kPack && j < S; j++) f(point<1>(j));
        }
      };
      int i = first * kPack - before;
      if constexpr (kAtOnce > 1) {
        if (i < 0) some(i), i += stride;
        for (; i < S - (kAtOnce - 1) * stride - (kPack - 1); i += kAtOnce * stride)
#pragma unroll
          for (int j = 0; j < kAtOnce; j++) f(point<kPack>(i + j * stride));
      }
      for (; i < S; i += stride) some(i);
    }
  }
  // Positions of the finer level that lie in no window.
  template <class P, class F> __device__ __forceinline__ void rest(P, const Extent& fine, const F& f) const {
    static_assert(P::kApart);
    const int D = extent_.D * P::depth(fine), H = extent_.H * P::height(fine), W = extent_.W * P::width(fine);
    const int right = fine.W - W, below = (fine.H - H) * fine.W;
    const auto each_of = [&](int count, const auto& position) {
      for (int i = share_.exists ? first() : count; i < count; i += step())
        f(Point<1>{fine, values_, n, c, extent_.C, position(i), 0, true});
    };
    each_of(D * H * right,
            [&](int i) { return (i / right / H * fine.H + i / right % H) * fine.W + W + i % right; });
    each_of(D * below, [&](int i) { return (i / below * fine.H + H) * fine.W + i % below; });
    each_of((fine.D - D) * fine.H * fine.W, [&](int i) { return D * fine.H * fine.W + i; });
  }
  __device__ __forceinline__ Sum sum() const { return {}; }
  __device__ __forceinline__ ShiftedSums moments() const { return {}; }
  __device__ __forceinline__ LargestOf<false> largest() const { return {}; }
  __device__ __forceinline__ LargestOf<false> largest_value() const { return {}; }
  __device__ __forceinline__ LargestOf<true> pool_largest() const { return {}; }
  // One of a plane's `parts` values.
  __device__ void reduce(double* out, Sum& sum) const { put(out, sum_of(sum.value(), share_.threads)); }
  __device__ void reduce(Moments<double>* out, const ShiftedSums& sums) const {
    put(out, moments_of(sums, share_.threads));
  }
  template <bool kPool> __device__ void reduce(Largest<kPool>* out, const LargestOf<kPool>& own) const {
    put(out, largest_of(own.value(), share_.threads));
  }

 private:
  __device__ Plane(const Extent& extent, const value_t* values, unsigned parts, const Share& share)
      : n(share.number / parts / unsigned(extent.C)), c(share.number / parts % unsigned(extent.C)),
        extent_(extent), values_(values), share_(share), parts_(parts) {}
  template <int K> __device__ __forceinline__ Point<K> point(int position) const {
    return {extent_, values_, n, c, extent_.C, position, 0, true};
  }
  __device__ __forceinline__ int first() const {
    return int(share_.number % parts_) * share_.threads + share_.place;
  }
  __device__ __forceinline__ int step() const { return int(parts_) * share_.threads; }
  template <class T> __device__ __forceinline__ void put(T* out, const T& value) const {
    if (share_.place == 0 && share_.exists) out[share_.number] = value;
  }
  const Extent& extent_;
  const value_t* values_;
  const Share share_;
  const unsigned parts_;
};

template <class Pass, class = void> constexpr bool is_scalar = false;
template <class Pass> constexpr bool is_scalar<Pass, std::enable_if_t<Pass::kScalar>> = true;
template <class Pass, class = void> constexpr bool only_reads = false;
template <class Pass> constexpr bool only_reads<Pass, std::enable_if_t<!Pass::kWrites>> = true;

// kBlocks: of a multiprocessor, at least. Rows take more registers.
constexpr int kPlaneBlocks = kPack * sizeof(real) > 16 ? 2 : 4,
              kRowBlocks = kPack * sizeof(real) > 16 ? 2 : 3;
template <int kBlocks, class ThePlane, class Pass, class... Lanes>
__global__ void __launch_bounds__(kPlaneThreads, kBlocks)
    planes_kernel(const Pass pass, const Extent extent, const value_t* values, unsigned parts,
                  Lanes... lanes) {
  await_previous_kernel();
  ThePlane plane(extent, values, parts, lanes...);
  pass(plane);
}

// Blocks that share a plane, and in which order.
template <Order order> struct Parts {
  int64_t count;
};
inline Parts<Order::kUp> up(int64_t count) { return {count}; }
inline Parts<Order::kDown> down(int64_t count) { return {count}; }

// How many planes of so many packs a block has, as a power of two: one; or, where they are many and small, so
// that a few lanes have each, and a lane at most `most` packs. None waits for others then.
constexpr int64_t kFillingThreads = 1 << 17;
inline unsigned several_of_block(int64_t packs, int64_t planes, int64_t most) {
  if (planes >= int64_t(1) << 31) return 0;  // the launch fails
  int bits = 3;
  const auto too_few = [&](int64_t lanes) {
    return packs > lanes * most || (packs > lanes && planes * lanes < kFillingThreads);
  };
  while (too_few(int64_t(1) << bits)) bits++;
  return bits <= 5 ? kPlaneBits - bits : 0;
}

// values: the convolution's, or null. A part has at most 2³¹ positions. K: channels a lane, or 1 where there
// is no multiple of K.
template <int K, class Pass, Order order>
void in_last_planes(const Pass& pass, const Extent& extent, const value_t* values, Parts<order> parts,
                    cudaStream_t stream) {
  if constexpr (K > 1) {
    if (extent.C % K) return in_last_planes<1>(pass, extent, values, parts, stream);
  }
  using ThePlane = LastPlane<K, Last<Pass>::at_once, Last<Pass>::writes, order>;
  constexpr int kBlocks = Last<Pass>::blocks;
  const unsigned lanes = Last<Pass>::sums ? lanes_across(extent.C, K) : lanes_of_points(extent.C, K);
  const int64_t across = int64_t(K) * lanes,
                blocks = extent.N * ((extent.C + across - 1) / across) * parts.count;
  if (!blocks || !extent.positions()) return;
  launch_early(planes_kernel<kBlocks, ThePlane, Pass, unsigned>, blocks, kPlaneThreads, stream, pass, extent,
               values, unsigned(parts.count), lanes);
}
template <class Pass, Order order>
void planes(const Pass& pass, const Extent& extent, const value_t* values, Parts<order> parts,
            cudaStream_t stream) {
  if constexpr (kLast) {
    in_last_planes<Last<Pass>::channels>(pass, extent, values, parts, stream);
  } else {
    constexpr bool kSeveral =
        !Last<Pass>::is_long;  // else all of a plane in registers of its own would spill
    using ThePlane = Plane<is_scalar<Pass>, only_reads<Pass> ? 2 : 1, kSeveral, order>;
    const int64_t S = extent.positions(), planes = extent.N * extent.C * parts.count;
    if (!planes || !S) return;
    const int64_t packs = S / (is_scalar<Pass> ? 1 : kPack) / parts.count + 1;
    const unsigned several = kSeveral ? several_of_block(packs, planes, only_reads<Pass> ? 16 : 8) : 0,
                   threads = several || packs >= kPlaneThreads ? kPlaneThreads : (packs + 31) / 32 * 32;
    launch_early(planes_kernel<kPlaneBlocks, ThePlane, Pass, unsigned>,
                 (planes + (1 << several) - 1) >> several, threads, stream, pass, extent, values,
                 unsigned(parts.count), several);
  }
}

// Of a pass whose points' windows are whole axes, of so many terms, side by side in a plane if is_row.
template <class Pass, Order order>
void axes(const Pass& pass, const Extent& extent, int64_t terms, bool is_row, const value_t* values,
          Parts<order> parts, cudaStream_t stream) {
  const int64_t S = extent.positions();
  const Sharing sharing =
      shared_by(terms, extent.N * extent.C * S, kLast ? extent.C : S, is_row && !kLast, Pass::kAgain);
  if (sharing.lanes == 1) return planes(pass, extent, values, parts, stream);
  const unsigned points = sharing.points();
  unsigned across = 1;
  if (kLast && !Pass::kSums)
    while (across < points && across < extent.C) across *= 2;
  if (!Pass::kSums) parts.count = (S * across + points - 1) / points;
  const int64_t blocks = extent.N * ((extent.C + across - 1) / across) * parts.count;
  if (!blocks) return;
  launch_early(planes_kernel<kPlaneBlocks, AxisPlane<order>, Pass, Sharing, unsigned>, blocks, kPlaneThreads,
               stream, pass, extent, values, unsigned(parts.count), sharing, across);
}

// Of a pass by sample, whose extent has no channels; C: those of its arrays. See RowPoint.
template <int K, bool across, class Pass, Order order>
void in_rows(const Pass& pass, const Extent& extent, const value_t* values, Parts<order> parts,
             const Sharing& sharing, cudaStream_t stream) {
  const int64_t blocks = extent.N * parts.count;
  if (!blocks || !extent.positions()) return;
  launch_early(planes_kernel<kRowBlocks, Rows<K, across, order>, Pass, Sharing>, blocks, kPlaneThreads,
               stream, pass, extent, values, unsigned(parts.count), sharing);
}
// In planes lanes share packs of kPoints, or single points; or a thread has all channels of the points that a
// Plane gives it.
constexpr int kPoints = 4;
template <class Pass, Order order>
void by_sample(const Pass& pass, const Extent& extent, int64_t C, const value_t* values, Parts<order> parts,
               cudaStream_t stream) {
  if constexpr (kLast) {
    if (C % kPack) in_rows<1, true>(pass, extent, values, parts, {lanes_of_row(C, 1), 1}, stream);
    else in_rows<kPack, true>(pass, extent, values, parts, {lanes_of_row(C, kPack), 1}, stream);
  } else {
    const int64_t S = extent.positions();
    const auto shared = [&](auto K, const Sharing& sharing) {
      if (sharing.lanes == 1) return false;
      const unsigned points = sharing.points() * K;
      if (!Pass::kSums) parts.count = (S + points - 1) / points;
      in_rows<K, false>(pass, extent, values, parts, sharing, stream);
      return true;
    };
    if constexpr (Pass::kAgain && !is_scalar<Pass>) {
      const std::integral_constant<int, kPoints> packs;
      if (S % kPoints == 0 && shared(packs, packs_shared_by<kPoints>(C, extent.N * S))) return;
    }
    const std::integral_constant<int, 1> single;
    if (shared(single, shared_by(C, extent.N * S, S, false, Pass::kAgain))) return;
    planes(pass, extent, values, parts, stream);
  }
}

}  // namespace load
