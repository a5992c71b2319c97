// A pass over the positions of a level, by (sample, channel) or, without channels, by sample. Blocks share planes in
// `parts`; their sums are merged later, in their order.
//
// Arrays are contiguous and aligned to 16 bytes. A thread takes kPack neighbours at a time, at multiples of so many in
// the whole array; what stands before the first and after the last such in a plane goes alone.
//
// With CHANNELS_LAST, arrays of positions and channels are (N, S, C). Then lanes have neighbouring channels, and a block some planes. With
// FOR_TF32 what the library convolves next is rounded to that.
#pragma once
#include "load/extent.h"
#include "load/extreme.cuh"
#include "load/reduce.cuh"

namespace load {

#ifndef CHANNELS_LAST
#define CHANNELS_LAST 0
#endif
#ifndef FOR_TF32
#define FOR_TF32 0
#endif
constexpr bool kLast = CHANNELS_LAST, kRounds = FOR_TF32;
constexpr int kPlaneThreads = 256;
constexpr int kPack = sizeof(value_t) == 2 ? 8 : 4;

// The nearest value of TF32's, ties away from zero (cvt.rna.tf32): so the library rounds operands in planes; from operands in channels
// last a tensor core cuts the other bits off. No other type runs in TF32.
__device__ inline float nearest_tf32(float v) {
  const bool stays_finite = fabsf(v) < 0x1.ffep127f;  // and is not NaN
  return stays_finite ? __uint_as_float((__float_as_uint(v) + 0x1000) & ~0x1fffu) : v;
}
template <class T> __device__ T nearest_tf32(T v) { return v; }

// Loads and stores of at most 16 bytes.
template <class E, int K> struct alignas(sizeof(E) * K < 16 ? sizeof(E) * K : 16) Memory {
  E at[K];
};
// The type in which a pass computes with an array's elements.
template <class E> using computed = std::conditional_t<std::is_integral_v<E>, int, real>;

// K neighbouring positions of plane (n, c) of a level with C channels.
template <int K> struct Point {
  using T = std::conditional_t<K == 1, real, Pack<real, K>>;
  const Extent& extent;
  const value_t* values;  // the convolution's
  int64_t n, c, C;
  int position, place;
  bool aligned;  // is place_in_planes() a multiple of K?

  __device__ __forceinline__ int64_t place_in_planes() const { return (n * C + c) * extent.positions() + position; }
  __device__ __forceinline__ int64_t offset() const {
    return kLast ? (n * extent.positions() + position) * C + c : place_in_planes();
  }
  template <class E> __device__ __forceinline__ auto read(const E* from) const {
    if constexpr (kLast && K > 1) return lanes<K>([&](int i) { return computed<E>(from[offset() + i * C]); });
    else return load(from + offset(), aligned);
  }
  template <class E> __device__ __forceinline__ auto shared(const E* from) const {
    const int S = extent.positions();
    return load(from + n * S + position, S % K == 0);
  }
  __device__ __forceinline__ T v() const { return read(values); }
  template <class E, class X> __device__ __forceinline__ void write(E* to, const X& x) const {
    if constexpr (K == 1) {
      to[offset()] = E(lane_of(x, 0));
    } else if (kLast || !aligned) {
#pragma unroll
      for (int i = 0; i < K; i++) to[offset() + i * (kLast ? C : 1)] = E(lane_of(x, i));
    } else {
      Memory<E, K> memory;
#pragma unroll
      for (int i = 0; i < K; i++) memory.at[i] = E(lane_of(x, i));
      *reinterpret_cast<Memory<E, K>*>(to + offset()) = memory;
    }
  }
  // An operand of the library's.
  template <class E, class X> __device__ __forceinline__ void write_operand(E* to, const X& x) const {
    if constexpr (!kRounds) write(to, x);
    else if constexpr (K == 1) write(to, nearest_tf32(x));
    else write(to, lanes<K>([&](int i) { return nearest_tf32(lane_of(x, i)); }));
  }
  template <class X> __device__ __forceinline__ void write_v(value_t* to, const X& x) const { write_operand(to, x); }
  // The mask of a dropout by (sample, channel, position): four neighbours share a draw. which: of a pass's dropouts.
  __device__ __forceinline__ auto kept(const int64_t* seed, int64_t number, int which, double probability) const {
    const uint64_t drawn_by = seed_of(seed, number) + which * 0x9E3779B97F4A7C15u;
    const int64_t first = place_in_planes();
    const auto one = [&](int64_t i) { return dropout_keeps(philox(drawn_by, i / 4).lane[i % 4], probability); };
    if constexpr (K == 1) {
      return one(first);
    } else {
      if (!aligned) return lanes<K>([&](int i) { return one(first + i); });
      Pack<bool, K> mask;
#pragma unroll
      for (int i = 0; i < K; i += 4) {
        const Philox4 random = philox(drawn_by, first / 4 + i / 4);
#pragma unroll
        for (int j = 0; j < 4; j++) mask.at[i + j] = dropout_keeps(random.lane[j], probability);
      }
      return mask;
    }
  }

  __device__ __forceinline__ Point channel(int64_t of, int64_t channels) const {
    return {extent, values, n, of, channels, position, 0, extent.positions() % K == 0};
  }
  template <class F> __device__ __forceinline__ void channels(int64_t count, const F& f) const {
#pragma unroll 4
    for (int64_t i = 0; i < count; i++) f(channel(i, count));
  }

  // ------------------------------------------------------------------------------- windows; of single positions
  // `at`: a place in this point's window.
  template <class P> __device__ __forceinline__ Point chosen(P, const Extent& fine, int at) const {
    const Coordinates w = coordinates(extent, position);
    const int kh = P::height(fine), kw = P::width(fine), row = at / kw;
    const int x = w.w * kw + at % kw, y = w.h * kh + row % kh, z = w.d * P::depth(fine) + row / kh;
    return {fine, values, n, c, C, (z * fine.H + y) * fine.W + x, at, true};
  }
  template <class P, class F>
  __device__ __forceinline__ void window(P, const Extent& fine, const F& f) const {
    const Coordinates w = coordinates(extent, position);
    const int kd = P::depth(fine), kh = P::height(fine), kw = P::width(fine);
    for (int i = 0; i < kd; i++)
#pragma unroll 4
      for (int j = 0; j < kh; j++) {
        const int row = ((w.d * kd + i) * fine.H + w.h * kh + j) * fine.W + w.w * kw;
#pragma unroll 4
        for (int k = 0; k < kw; k++) f(Point{fine, values, n, c, C, row + k, (i * kh + j) * kw + k, true});
      }
  }
  // What f says of the window that holds this point; 0 where none does.
  template <class P, class F> __device__ __forceinline__ T spread(P pool, const Extent& coarse, const F& f) const {
    Coordinates here = coordinates(extent, position);
    if constexpr (K == 1) {
      return spread_to(here, pool, coarse, f);
    } else {
      return lanes<K>([&](int) {
        const real value = spread_to(here, pool, coarse, f);
        if (++here.w == extent.W) here.w = 0, here.h++;  // dividing anew takes longer than all the rest
        if (here.h == extent.H) here.h = 0, here.d++;
        return value;
      });
    }
  }

  __device__ __forceinline__ Extreme<1, T> largest() const { return {}; }
  __device__ __forceinline__ Extreme<-1, T> smallest() const { return {}; }
  __device__ __forceinline__ T zero() const {
    if constexpr (K == 1) return 0;
    else return splat<K>(real(0));
  }

 private:
  template <class E> __device__ __forceinline__ auto load(const E* from, bool aligned) const {
    using To = computed<E>;
    if constexpr (K == 1) {
      return To(*from);
    } else {
      if (!aligned) return lanes<K>([&](int i) { return To(from[i]); });
      const Memory<E, K> memory = *reinterpret_cast<const Memory<E, K>*>(from);
      return lanes<K>([&](int i) { return To(memory.at[i]); });
    }
  }
  template <class P, class F>
  __device__ __forceinline__ real spread_to(const Coordinates& here, P, const Extent& coarse, const F& f) const {
    const int kd = P::depth(extent), kh = P::height(extent), kw = P::width(extent);
    const int z = here.d / kd, y = here.h / kh, x = here.w / kw;
    if (z >= coarse.D || y >= coarse.H || x >= coarse.W) return 0;
    const int place = ((here.d - z * kd) * kh + here.h - y * kh) * kw + here.w - x * kw;
    return f(Point<1>{coarse, values, n, c, C, (z * coarse.H + y) * coarse.W + x, place, true});
  }
};

// A thread's share of a plane.
template <bool kScalar> class Plane {
 public:
  const int64_t n, c;
  __device__ Plane(const Extent& extent, const value_t* values, unsigned parts)
      : n(blockIdx.x / parts / unsigned(extent.C)), c(blockIdx.x / parts % unsigned(extent.C)), extent_(extent), values_(values),
        plane_(blockIdx.x / parts), part_(blockIdx.x % parts), parts_(parts) {}

  template <class F> __device__ __forceinline__ void each(const F& f) {
    const int S = extent_.positions();
    const int first = int(part_ * blockDim.x + threadIdx.x), step = int(parts_ * blockDim.x);
    if constexpr (kScalar) {
      for (int i = first; i < S; i += step) f(point<1>(i));
    } else {
      const int before = int(int64_t(plane_) * S % kPack);  // of the plane's first pack
      for (int i = first * kPack - before; i < S; i += step * kPack) {
        if (i >= 0 && i + kPack <= S) {
          f(point<kPack>(i));
        } else {
          for (int j = i < 0 ? 0 : i; j < i + kPack && j < S; j++) f(point<1>(j));
        }
      }
    }
  }
  // Positions of the finer level that lie in no window.
  template <class P, class F> __device__ __forceinline__ void rest(P, const Extent& fine, const F& f) const {
    const int D = extent_.D * P::depth(fine), H = extent_.H * P::height(fine), W = extent_.W * P::width(fine);
    const int right = fine.W - W, below = (fine.H - H) * fine.W, first = int(part_ * blockDim.x + threadIdx.x);
    const auto each_of = [&](int count, const auto& position) {
      for (int i = first; i < count; i += int(parts_ * blockDim.x))
        f(Point<1>{fine, values_, n, c, extent_.C, position(i), 0, true});
    };
    each_of(D * H * right, [&](int i) { return (i / right / H * fine.H + i / right % H) * fine.W + W + i % right; });
    each_of(D * below, [&](int i) { return (i / below * fine.H + H) * fine.W + i % below; });
    each_of((fine.D - D) * fine.H * fine.W, [&](int i) { return D * fine.H * fine.W + i; });
  }
  __device__ __forceinline__ Sum sum() const { return {}; }
  __device__ __forceinline__ ShiftedSums moments() const { return {}; }
  // One of a plane's `parts` values.
  __device__ void reduce(double* out, Sum& sum) const {
    const double value = block_sum(sum.value());
    if (threadIdx.x == 0) out[blockIdx.x] = value;
  }
  __device__ void reduce(Moments<double>* out, const ShiftedSums& sums) const {
    const Moments<double> value = block_moments(sums);
    if (threadIdx.x == 0) out[blockIdx.x] = value;
  }

 private:
  template <int K> __device__ __forceinline__ Point<K> point(int position) const {
    return {extent_, values_, n, c, extent_.C, position, 0, true};
  }
  const Extent& extent_;
  const value_t* values_;
  const unsigned plane_, part_, parts_;
};

// A lane's share of a plane, where arrays are channels last. A warp has 32 channels side by side, or 16 or 8 where there are no
// more; rows of so many lanes take positions in turn, kPack at a time. A lane behind the last channel stands for it and does
// nothing.
template <bool kScalar, template <int> class ItsPoint = Point> class LastPlane {
 public:
  const int64_t n, c;
  __device__ LastPlane(const Extent& extent, const value_t* values, unsigned parts)
      : LastPlane(extent, values, parts, lanes_of(extent.C), (unsigned(extent.C) + lanes_of(extent.C) - 1) / lanes_of(extent.C)) {}

  static HOST_DEVICE unsigned lanes_of(int64_t C) { return C > 16 ? 32 : C > 8 ? 16 : 8; }

  template <class F> __device__ __forceinline__ void each(const F& f) const {
    constexpr int K = kScalar ? 1 : kPack;
    const int S = extent_.positions();
    if (!active_) return;
    for (int i = first() * K; i < S; i += step() * K) {
      if (i + K <= S) f(point<K>(i));
      else
        for (int j = i; j < S; j++) f(point<1>(j));
    }
  }
  // Positions of the finer level that lie in no window.
  template <class P, class F> __device__ __forceinline__ void rest(P, const Extent& fine, const F& f) const {
    const int D = extent_.D * P::depth(fine), H = extent_.H * P::height(fine), W = extent_.W * P::width(fine);
    for (int i = active_ ? first() : fine.positions(); i < fine.positions(); i += step()) {
      const Coordinates at = coordinates(fine, i);
      if (at.d >= D || at.h >= H || at.w >= W) f(Point<1>{fine, values_, n, c, extent_.C, i, 0, true});
    }
  }
  __device__ __forceinline__ Sum sum() const { return {}; }
  __device__ __forceinline__ ShiftedSums moments() const { return {}; }
  // One of a plane's `parts` values.
  __device__ void reduce(double* out, Sum& sum) const {
    merged(out, sum.value(), [](double a, double b) { return a + b; }, [](double a, int d) { return __shfl_down_sync(~0u, a, d); });
  }
  __device__ void reduce(Moments<double>* out, const ShiftedSums& sums) const {
    using M = Moments<double>;
    merged(out, sums.value(), [](const M& a, const M& b) { return a.merge(b); }, [](const M& a, int d) {
      return M{__shfl_down_sync(~0u, a.count, d), __shfl_down_sync(~0u, a.mean, d), __shfl_down_sync(~0u, a.m2, d)};
    });
  }

 private:
  __device__ LastPlane(const Extent& extent, const value_t* values, unsigned parts, unsigned lanes, unsigned tiles)
      : n(blockIdx.x / tiles / parts), c(clamped(blockIdx.x % tiles * lanes + threadIdx.x % lanes, extent)), extent_(extent),
        values_(values), part_(blockIdx.x / tiles % parts), parts_(parts), lanes_(lanes),
        active_(blockIdx.x % tiles * lanes + threadIdx.x % lanes < unsigned(extent.C)) {}
  static __device__ int64_t clamped(unsigned c, const Extent& extent) { return c < unsigned(extent.C) ? c : extent.C - 1; }
  __device__ __forceinline__ int first() const { return int((part_ * kPlaneThreads + threadIdx.x) / lanes_); }
  __device__ __forceinline__ int step() const { return int(parts_ * kPlaneThreads / lanes_); }
  template <int K> __device__ __forceinline__ ItsPoint<K> point(int position) const {
    return {extent_, values_, n, c, extent_.C, position, 0, extent_.positions() % K == 0};
  }
  // Of the lanes of a channel, in their order.
  template <class T, class Merge, class Down>
  __device__ void merged(T* out, T value, const Merge& merge, const Down& down) const {
    __shared__ double partial[kMostWarps * 32 * (sizeof(T) / sizeof(double))];
    T* const of_warps = reinterpret_cast<T*>(partial);
    for (unsigned d = 16; d >= lanes_; d /= 2) value = merge(value, down(value, int(d)));
    if (threadIdx.x % 32 < lanes_) of_warps[threadIdx.x] = value;
    __syncthreads();  // every warp's are there
    if (threadIdx.x < lanes_ && active_) {
      for (int warp = 1; warp < kPlaneThreads / 32; warp++) value = merge(value, of_warps[warp * 32 + threadIdx.x]);
      out[(n * extent_.C + c) * parts_ + part_] = value;
    }
    __syncthreads();  // partial may be written again
  }
  const Extent& extent_;
  const value_t* values_;
  const unsigned part_, parts_, lanes_;
  const bool active_;
};

template <class Pass, class = void> constexpr bool is_scalar = false;
template <class Pass> constexpr bool is_scalar<Pass, std::enable_if_t<Pass::kScalar>> = true;

template <class ThePlane, class Pass>
__global__ void __launch_bounds__(kPlaneThreads, kPack * sizeof(real) > 16 ? 2 : 3)
planes_kernel(const Pass pass, const Extent extent, const value_t* values, unsigned parts) {
  ThePlane plane(extent, values, parts);
  pass(plane);
}

// values: the convolution's, or null. A part has at most 2³¹ positions.
template <bool kAreLast, class ThePlane, class Pass>
void in_planes(const Pass& pass, const Extent& extent, const value_t* values, int64_t parts, cudaStream_t stream) {
  const int64_t S = extent.positions(), lanes = kAreLast ? LastPlane<false>::lanes_of(extent.C) : 1;
  const int64_t blocks = extent.N * ((extent.C + lanes - 1) / lanes) * parts;
  if (!blocks || !S) return;
  const int64_t packs = S / (is_scalar<Pass> ? 1 : kPack) / parts + 1;
  const unsigned threads = kAreLast || packs >= kPlaneThreads ? kPlaneThreads : unsigned((packs + 31) / 32 * 32);
  planes_kernel<ThePlane><<<unsigned(blocks), threads, 0, stream>>>(pass, extent, values, unsigned(parts));
}
template <class Pass>
void planes(const Pass& pass, const Extent& extent, const value_t* values, int64_t parts, cudaStream_t stream) {
  using ThePlane = std::conditional_t<kLast, LastPlane<is_scalar<Pass>>, Plane<is_scalar<Pass>>>;
  in_planes<kLast, ThePlane>(pass, extent, values, parts, stream);
}

// How many parts of a plane's sums are left, merged into `out` where there are many.
inline int64_t few_parts(int64_t parts) { return parts > kFewParts ? 1 : parts; }
template <class T> void merge_parts(T* out, const T* of, int64_t planes, int64_t parts, cudaStream_t stream) {
  const int64_t blocks = (planes * 32 + kMergingThreads - 1) / kMergingThreads;
  if (parts > kFewParts && blocks) merge_parts_kernel<<<unsigned(blocks), kMergingThreads, 0, stream>>>(out, of, planes, parts);
}

}  // namespace load
