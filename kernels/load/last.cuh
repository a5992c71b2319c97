// A block's share of planes where arrays are channels last: lanes side by side have neighbouring channels.
#pragma once
#include "load/points.cuh"
#include "load/reduce.cuh"

namespace load {

// How many lanes have the channels of a position, K each, where these are summed: a power of two, so many
// that the fewest idle; of those, most.
inline unsigned lanes_across(int64_t C, int K) {
  const unsigned packs = unsigned((C + K - 1) / K);
  unsigned most = 1;
  while (most < packs && most < 32) most *= 2;
  unsigned best = most;
  for (unsigned lanes = most / 2; lanes >= 4; lanes /= 2)
    if ((packs + lanes - 1) / lanes * lanes < (packs + best - 1) / best * best) best = lanes;
  return best;
}

// … and where nothing is summed: as many as there are, in as few tiles as leave few threads of a block idle.
inline unsigned lanes_of_points(int64_t C, int K) {
  const unsigned packs = unsigned((C + K - 1) / K);
  unsigned best = 0;
  double most = 0;
  for (unsigned tiles = (packs + kPlaneThreads - 1) / kPlaneThreads; !best || packs >= 32 * tiles; tiles++) {
    const unsigned lanes = (packs + tiles - 1) / tiles;
    const double busy = double(packs) / tiles * (kPlaneThreads / lanes);
    if (busy > 1.05 * most) most = busy, best = lanes;
  }
  return best;
}

// A lane's sums and moments of K channels; see Sum and ShiftedSums. turn: a point's, of each Sum::kFew, known
// where loops are unrolled.
template <int K> struct SumsAcross {
  const int& turn;
  real few[K] = {};
  double total[K] = {};
  template <class X> __device__ __forceinline__ void add(const X& x) {
#pragma unroll
    for (int i = 0; i < K; i++) {
      few[i] += lane_of(x, i);
      if (turn == Sum::kFew - 1) total[i] += few[i], few[i] = 0;
    }
  }
};
template <int K> struct MomentsAcross {
  real count = 0, shift[K] = {}, sum[K] = {}, square[K] = {};
  template <class X> __device__ __forceinline__ void add(const X& x) {
#pragma unroll
    for (int i = 0; i < K; i++) {
      const real value = lane_of(x, i);
      if (count == 0) shift[i] = value;
      const real d = value - shift[i];
      sum[i] += d, square[i] += d * d;
    }
    count += 1;
  }
};

// … and its maxima, of points in ascending order.
template <int K, bool kPool> struct LargestAcross {
  LargestOf<kPool> own[K];
  template <class X, class At> __device__ __forceinline__ void add(const X& x, const At& at) {
#pragma unroll
    for (int i = 0; i < K; i++) own[i].add(real(lane_of(x, i)), at);
  }
};

template <class Pass, class = void> constexpr bool has_windows = false;
template <class Pass> constexpr bool has_windows<Pass, std::enable_if_t<Pass::kWindows>> = true;

// Channels last: registers are full of what a pass has by channel, kHeld small values and kSums sums, and of
// what it computes of a point in about kInstructions. kWrites: at positions. Such a pass has several points
// at once where it computes little, or its registers would spill: at most kMostAtOnce instructions, a sum
// counted as kOfASum.
constexpr int kMostAtOnce = 24, kOfASum = 8;
// A pass that doesn't say counts as one that has much.
template <class Pass, class = void> struct Last {
  static constexpr int channels = kPack, held = 99, at_once = 1,
                       blocks = channels * sizeof(real) > 16 ? 2 : 3;
  static constexpr bool writes = true, sums = true, is_much = true, is_long = true;
};
template <class Pass> struct Last<Pass, std::void_t<decltype(Pass::kHeld)>> {
  static constexpr bool few = !Pass::kSums && Pass::kHeld <= 4;
  static constexpr int held = Pass::kHeld + 3 * Pass::kSums;  // by a channel
  static constexpr bool writes = Pass::kWrites, sums = Pass::kSums > 0,
                        is_long = Pass::kInstructions > kMostAtOnce,
                        is_much = Pass::kInstructions + kOfASum * Pass::kSums > kMostAtOnce;
  static constexpr int channels = Pass::kSingle ? 1
                                  : few         ? kPack
                                                : 4,
                       at_once = held > 16 || (writes && (has_windows<Pass> || is_much)) ? 1 : Sum::kFew;
  static constexpr int blocks =
      (few ? channels : 4) * sizeof(real) > 16 || held > (at_once > 1 ? 7 : 9) ? 2 : 3;
};

// A lane's share of some planes, where arrays are channels last: K channels side by side at some positions. C
// is a multiple of K. Rows of `lanes` lanes take positions in turn. A lane behind the last channel stands for
// it and does nothing, nor does one behind the last row.
template <int K, int kAtOnce, bool kWrites, Order order> class LastPlane {
  static_assert(kAtOnce == 1 || kAtOnce == Sum::kFew);
  using ThePoint = Point<K, (K > 1)>;

 public:
  const int64_t n;
  const Channels<K> c;
  __device__ LastPlane(const Extent& extent, const value_t* values, unsigned parts, unsigned lanes)
      : LastPlane(extent, values, parts, lanes, (unsigned(extent.C) + lanes * K - 1) / (lanes * K)) {}

  // kAtOnce points are read before what is made of the first is written, or summed.
  template <class F> __device__ __forceinline__ void each(const F& f) {
    const int S = active_ ? extent_.positions() : 0, step = this->step();
    int i = first();
    if constexpr (kWrites && kAtOnce > 1) {
      for (; i + (kAtOnce - 1) * step < S; i += kAtOnce * step) {
        Later later[kAtOnce];
#pragma unroll
        for (int j = 0; j < kAtOnce; j++) {
          turn_ = j;
          f(point(extent_, i + j * step, &later[j]));
        }
#pragma unroll
        for (int j = 0; j < kAtOnce; j++) later[j].store();
      }
    } else if constexpr (kAtOnce > 1) {
      for (; i + (kAtOnce - 1) * step < S; i += kAtOnce * step)
#pragma unroll
        for (turn_ = 0; turn_ < kAtOnce; turn_++) f(point(extent_, i + turn_ * step));
    }
    turn_ = Sum::kFew - 1;
#pragma unroll 1
    for (; i < S; i += step) f(point(extent_, i));
  }
  // Positions of the finer level that lie in no window.
  template <class P, class F> __device__ __forceinline__ void rest(P, const Extent& fine, const F& f) {
    static_assert(P::kApart);
    const int D = extent_.D * P::depth(fine), H = extent_.H * P::height(fine), W = extent_.W * P::width(fine);
    turn_ = Sum::kFew - 1;
    for (int i = active_ ? first() : fine.positions(); i < fine.positions(); i += step()) {
      const Coordinates at = coordinates(fine, i);
      if (at.d >= D || at.h >= H || at.w >= W) f(point(fine, i));
    }
  }
  __device__ __forceinline__ SumsAcross<K> sum() const { return {turn_}; }
  __device__ __forceinline__ MomentsAcross<K> moments() const { return {}; }
  __device__ __forceinline__ LargestAcross<K, false> largest() const { return {}; }
  __device__ __forceinline__ LargestAcross<K, false> largest_value() const { return {}; }
  __device__ __forceinline__ LargestAcross<K, true> pool_largest() const { return {}; }
  // One of a plane's `parts` values.
  __device__ void reduce(double* out, const SumsAcross<K>& sums) const { put(out, added(sums.total)); }
  // All are shifted by the block's first shift, then added.
  __device__ void reduce(Moments<double>* out, const MomentsAcross<K>& own) const {
    __shared__ real shifts[32 * K];
    if (threadIdx.x < lanes_)
#pragma unroll
      for (int i = 0; i < K; i++) shifts[threadIdx.x * K + i] = own.shift[i];
    __syncthreads();  // the first lanes', which have seen values if any have
    double counts[K], sum[K], square[K];
#pragma unroll
    for (int i = 0; i < K; i++) {
      const double count = own.count, d = own.count == 0 ? 0 : own.shift[i] - double(shifts[lane() * K + i]);
      counts[i] = count, sum[i] = own.sum[i] + count * d,
      square[i] = own.square[i] + d * (2 * double(own.sum[i]) + count * d);
    }
    const double all[] = {added(counts), added(sum), added(square)};
    put(out, Moments<double>::from_shifted(all[0], shifts[threadIdx.x % (32 * K)], all[1], all[2]));
    __syncthreads();  // shifts may be written again
  }
  template <bool kPool>
  __device__ void reduce(Largest<kPool>* out, const LargestAcross<K, kPool>& across) const {
    constexpr int kWarps = kPlaneThreads / 32;
    __shared__ real most[kWarps * 32 * K];
    __shared__ int place[kWarps * 32 * K];
#pragma unroll
    for (int i = 0; i < K; i++) {
      Largest<kPool> own = across.own[i].value();
      for (unsigned d = 16; d >= lanes_; d /= 2) own.merge(of_lane_behind(own, int(d)));
      const unsigned at = (threadIdx.x / 32 * K + i) * lanes_ + lane();
      if (threadIdx.x % 32 < lanes_) most[at] = real(own.most), place[at] = int(own.place);
    }
    __syncthreads();  // every warp's are there
    Largest<kPool> value;
    const unsigned i = threadIdx.x % K, of = threadIdx.x / K;
    if (of < lanes_)
      for (unsigned warp = 0; warp < kWarps; warp++) {
        const unsigned at = (warp * K + i) * lanes_ + of;
        value.merge({double(most[at]), place[at]});
      }
    put(out, value);
    __syncthreads();  // they may be written again
  }

 private:
  __device__ LastPlane(const Extent& extent, const value_t* values, unsigned parts, unsigned lanes,
                       unsigned tiles)
      : n(block<order>() / tiles / parts), c{first_of(lanes, tiles, extent)}, extent_(extent),
        values_(values), tile_(block<order>() % tiles), part_(block<order>() / tiles % parts), parts_(parts),
        lanes_(lanes), rows_(kPlaneThreads / lanes),
        active_((block<order>() % tiles * lanes + threadIdx.x % lanes) * K < unsigned(extent.C) &&
                threadIdx.x < rows_ * lanes) {}
  static __device__ int64_t first_of(unsigned lanes, unsigned tiles, const Extent& extent) {
    const unsigned first = (block<order>() % tiles * lanes + threadIdx.x % lanes) * K;
    return first < unsigned(extent.C) ? first : extent.C - K;
  }
  __device__ __forceinline__ unsigned lane() const { return threadIdx.x % lanes_; }
  __device__ __forceinline__ int first() const { return int(part_ * rows_ + threadIdx.x / lanes_); }
  __device__ __forceinline__ int step() const { return int(parts_ * rows_); }
  __device__ __forceinline__ ThePoint point(const Extent& extent, int position,
                                            Later* later = nullptr) const {
    return {extent, values_, n, c, extent_.C, position, 0, true, true, later};
  }
  // The sum over all lanes of a channel, in a fixed order: in thread t that of the tile's channel t.
  __device__ double added(const double (&own)[K]) const {
    constexpr int kWarps = kPlaneThreads / 32;
    __shared__ double partial[kWarps * 32 * K];
#pragma unroll
    for (int i = 0; i < K; i++) {
      double value = own[i];
      for (unsigned d = 16; d >= lanes_; d /= 2) value += __shfl_down_sync(~0u, value, int(d));
      if (threadIdx.x % 32 < lanes_) partial[(threadIdx.x / 32 * K + i) * lanes_ + lane()] = value;
    }
    __syncthreads();  // every warp's are there
    double value = 0;
    const unsigned i = threadIdx.x % K, of = threadIdx.x / K;
    if (of < lanes_)
      for (int warp = 0; warp < kWarps; warp++) value += partial[(warp * K + i) * lanes_ + of];
    __syncthreads();  // partial may be written again
    return value;
  }
  template <class T> __device__ void put(T* out, const T& value) const {
    const unsigned channel = tile_ * lanes_ * K + threadIdx.x;
    if (threadIdx.x < lanes_ * K && channel < unsigned(extent_.C))
      out[(n * extent_.C + channel) * parts_ + part_] = value;
  }
  const Extent& extent_;
  const value_t* values_;
  const unsigned tile_, part_, parts_, lanes_, rows_;
  const bool active_;
  int turn_ = 0;
};

}  // namespace load
