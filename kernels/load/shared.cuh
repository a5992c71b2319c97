// Points that some threads of a block have together, each with some of a point's terms: of its channels, in
// either layout, or of a window that is a whole axis. What they make of those is merged between them, in a
// fixed order, and all have it; what is made at a point counts once.
#pragma once
#include "load/points.cuh"
#include "load/reduce.cuh"

namespace load {

// The threads of a block that share a point: `lanes`, each `apart`-th; so many neighbours have as many
// points, side by side in memory. Powers of two, of which the second is at most a warp.
struct Sharing {
  unsigned lanes, apart;
  __device__ __forceinline__ unsigned lane() const { return threadIdx.x / apart % lanes; }
  // Of a block, and the thread's.
  HOST_DEVICE unsigned points() const { return kPlaneThreads / lanes; }
  __device__ __forceinline__ unsigned point() const {
    return threadIdx.x / (lanes * apart) * apart + threadIdx.x % apart;
  }
  // Of all lanes, which get it; a block together.
  __device__ __forceinline__ real sum(real x) const {
    for (unsigned d = apart; d < min(lanes * apart, 32u); d *= 2) x += __shfl_xor_sync(~0u, x, int(d));
    if (lanes * apart <= 32) return x;
    __shared__ real of_warps[kPlaneThreads];
    of_warps[threadIdx.x] = x;
    __syncthreads();  // every warp's is there
    x = 0;
    for (unsigned t = first(); t < first() + lanes * apart; t += 32) x += of_warps[t];
    __syncthreads();  // they may be written again
    return x;
  }
  template <int K> __device__ __forceinline__ Pack<real, K> sum(const Pack<real, K>& x) const {
    return load::lanes<K>([&](int i) { return sum(x.at[i]); });
  }
  template <int sign> __device__ __forceinline__ Extreme<sign, real> best(Extreme<sign, real> x) const {
    for (unsigned d = apart; d < min(lanes * apart, 32u); d *= 2) {
      Extreme<sign, real> other;
      other.value = __shfl_xor_sync(~0u, x.value, int(d)),
      other.index = __shfl_xor_sync(~0u, x.index, int(d));
      x.merge(other);
    }
    if (lanes * apart <= 32) return x;
    __shared__ real of_warps[kPlaneThreads];
    __shared__ int places[kPlaneThreads];
    of_warps[threadIdx.x] = x.value, places[threadIdx.x] = x.index;
    __syncthreads();  // every warp's is there
    x = {};
    for (unsigned t = first(); t < first() + lanes * apart; t += 32) {
      Extreme<sign, real> other;
      other.value = of_warps[t], other.index = places[t];
      x.merge(other);
    }
    __syncthreads();  // they may be written again
    return x;
  }
  template <int sign, int K>
  __device__ __forceinline__ Extreme<sign, Pack<real, K>> best(Extreme<sign, Pack<real, K>> x) const {
#pragma unroll
    for (int i = 0; i < K; i++) {
      const Extreme<sign, real> one = best(x.of_lane(i));
      x.value.at[i] = one.value, x.index.at[i] = one.index;
    }
    return x;
  }

 private:
  // Of the point's threads, the first in its first warp.
  __device__ __forceinline__ unsigned first() const {
    return threadIdx.x / (lanes * apart) * (lanes * apart) + threadIdx.x % apart;
  }
};

// How lanes share points of so many terms, until threads fill a GPU, but not each with fewer than four.
// Neighbours in memory are some points. Where terms are walked over `again`, fewer threads fill it, but a
// lane has at most 32 terms: the L1 cache then still has those of a block. Where neighbours are a point's
// terms, a warp's lanes read those together.
constexpr int64_t kFill = 1 << 18, kFillAgain = kFill / 4;
inline Sharing shared_by(int64_t terms, int64_t points, int64_t neighbours, bool is_row, bool again) {
  constexpr unsigned kSector = 32 / sizeof(value_t);
  unsigned apart = 1, lanes = 1;
  const auto suffices = [&] {
    if (is_row) return lanes >= 32 && points * lanes >= kFill / 2;
    return again ? points * lanes >= kFillAgain && 32 * lanes > terms : points * lanes >= kFill;
  };
  while (!is_row && apart < kSector && apart < neighbours) apart *= 2;
  while (lanes * apart < kPlaneThreads && 8 * lanes <= terms && !suffices()) lanes *= 2;
  return {lanes, apart};
}

// … and packs of K points, if they are aligned and their terms walked over again: a lane has at most kOfALane
// bytes of terms, so that the L1 cache has a block's; it reads a pack at once, and what is the same for all
// points once a pack. One lane alone: there are too few packs to fill a GPU, or too few terms to share.
template <int K> Sharing packs_shared_by(int64_t terms, int64_t points) {
  constexpr unsigned kBytes = sizeof(value_t) * K, kSector = 32 / kBytes, kLine = 4 * kSector, kOfALane = 192;
  unsigned apart = kSector, lanes = 1;
  while (lanes * apart < kPlaneThreads && kOfALane / kBytes * lanes < terms) lanes *= 2;
  while (lanes * apart < 32 && apart < kLine) apart *= 2;
  return {points / K * lanes >= kFillAgain ? lanes : 1, apart};
}

// What is made of points, by one of a point's lanes: where it `counts`.
template <class Own> struct Once {
  const bool& counts;
  Own own;
  template <class... X> __device__ __forceinline__ void add(const X&... x) {
    if (counts) own.add(x...);
  }
};
template <Order order> class SharedPoints {
 public:
  __device__ __forceinline__ Once<Sum> sum() const { return {counts_, {}}; }
  __device__ __forceinline__ Once<ShiftedSums> moments() const { return {counts_, {}}; }
  __device__ __forceinline__ Once<LargestOf<false>> largest() const { return {counts_, {}}; }
  __device__ __forceinline__ Once<LargestOf<false>> largest_value() const { return {counts_, {}}; }
  __device__ __forceinline__ Once<LargestOf<true>> pool_largest() const { return {counts_, {}}; }
  // One of a plane's `parts` values.
  __device__ void reduce(double* out, Once<Sum>& sum) const {
    const double value = sum_of(sum.own.value(), kPlaneThreads);
    if (threadIdx.x == 0) out[block<order>()] = value;
  }
  __device__ void reduce(Moments<double>* out, const Once<ShiftedSums>& sums) const {
    const Moments<double> value = moments_of(sums.own, kPlaneThreads);
    if (threadIdx.x == 0) out[block<order>()] = value;
  }
  template <bool kPool>
  __device__ void reduce(Largest<kPool>* out, const Once<LargestOf<kPool>>& found) const {
    const Largest<kPool> value = largest_of(found.own.value(), kPlaneThreads);
    if (threadIdx.x == 0) out[block<order>()] = value;
  }

 protected:
  // f(position, active) of the thread's positions below S: a block's together, `step` of them, and then those
  // behind the other parts'. One that is not active stands in place of none, `beside` before the last.
  template <class F>
  __device__ __forceinline__ void share(int S, int own, int step, unsigned parts, unsigned part, int beside,
                                        const Sharing& sharing, const F& f) {
    for (int i = int(part) * step; i < S; i += int(parts) * step) {
      const bool active = i + own < S;
      counts_ = active && sharing.lane() == 0;
      f(active ? i + own : S - beside, active);
    }
  }
  bool counts_ = false;
};

// K neighbours that some lanes share. One that is not `active` has no terms, and one of its lanes writes.
template <int K> struct SharedPoint : Point<K> {
  Sharing sharing;
  bool active;
  template <class E, class X> __device__ __forceinline__ void write(E* to, const X& x) const {
    if (active && sharing.lane() == 0) Point<K>::write(to, x);
  }
  template <class E, class X> __device__ __forceinline__ void write_operand(E* to, const X& x) const {
    if (active && sharing.lane() == 0) Point<K>::write_operand(to, x);
  }
  template <class E, class X> __device__ __forceinline__ void write_turned(E* to, const X& x) const {
    if (active && sharing.lane() == 0) Point<K>::write_turned(to, x);
  }
};

// What a pass by sample has of a position, or a few, whose channels some lanes share: each has some in turn,
// and where there are many, kPacks times as many, which it reads together.
constexpr int kPacks = 4;
HOST_DEVICE unsigned lanes_of_row(int64_t C, int K) {
  const int64_t packs = (C + K - 1) / K;
  unsigned lanes = 1;
  while (lanes < 32 && (packs < 2 * kPacks ? lanes < packs : lanes * 2 * kPacks <= packs)) lanes *= 2;
  return lanes;
}
// `across`: K neighbouring channels of one position at a time; or else one channel of K neighbouring
// positions.
template <int K, bool across> struct RowPoint : SharedPoint<across ? 1 : K> {
  using Here = Point<across ? 1 : K>;
  using OfChannels = Point<K, (across && K > 1)>;
  using Terms = std::conditional_t<K == 1, real, Pack<real, K>>;
  __device__ __forceinline__ Here channel(int64_t of, int64_t channels) const {
    return Here::channel(of < 0 ? 0 : of, channels);  // of none: nobody sees it
  }
  template <class F> __device__ __forceinline__ void channels(int64_t count, const F& f) const {
    constexpr int kChannels = across ? K : 1;
    const int end = this->active ? int(count) : 0, step = int(this->sharing.lanes) * kChannels;
    const auto point = [&](int i) {
      f(OfChannels{this->extent, this->values, this->n, Channels<kChannels>{i}, count, this->position, 0,
                   true});
    };
    int i = int(this->sharing.lane()) * kChannels;
    for (; i + (kPacks - 1) * step < end; i += kPacks * step)
#pragma unroll
      for (int j = 0; j < kPacks; j++) point(i + j * step);
#pragma unroll 1
    for (; i < end; i += step) point(i);
  }
  using Here::all;
  __device__ __forceinline__ Terms channel_zero() const { return {}; }
  __device__ __forceinline__ Terms channel_total() const { return {}; }  // a lane's are few
  __device__ __forceinline__ Extreme<1, Terms> largest_channel() const { return {}; }
  __device__ __forceinline__ Extreme<-1, Terms> smallest_channel() const { return {}; }
  __device__ __forceinline__ typename Here::T all(const Terms& x) const {
    if constexpr (across && K > 1) {
      real sum = x.at[0];
#pragma unroll
      for (int i = 1; i < K; i++) sum += x.at[i];
      return this->sharing.sum(sum);
    } else {
      return this->sharing.sum(x);
    }
  }
  template <int sign>
  __device__ __forceinline__ Extreme<sign, typename Here::T> all(const Extreme<sign, Terms>& x) const {
    if constexpr (across && K > 1) {
      Extreme<sign, real> best = x.of_lane(0);
#pragma unroll
      for (int i = 1; i < K; i++) best.merge(x.of_lane(i));
      return this->sharing.best(best);
    } else {
      return this->sharing.best(x);
    }
  }
};

// Lanes' share of a sample.
template <int K, bool across, Order order> class Rows : public SharedPoints<order> {
 public:
  const int64_t n, c = 0;
  __device__ Rows(const Extent& extent, const value_t* values, unsigned parts, const Sharing& sharing)
      : n(block<order>() / parts), extent_(extent), values_(values), sharing_(sharing),
        part_(block<order>() % parts), parts_(parts) {}
  template <class F> __device__ __forceinline__ void each(const F& f) {
    constexpr int kBeside = across ? 1 : K;  // positions
    const int own = int(sharing_.point()) * kBeside, step = int(sharing_.points()) * kBeside;
    this->share(extent_.positions(), own, step, parts_, part_, kBeside, sharing_, [&](int at, bool active) {
      f(RowPoint<K, across>{{{extent_, values_, n, 0, 1, at, 0, true}, sharing_, active}});
    });
  }

 private:
  const Extent& extent_;
  const value_t* values_;
  const Sharing& sharing_;
  const unsigned part_, parts_;
};

// A point whose window is a whole axis.
struct AxisPoint : SharedPoint<1> {
  template <class P, class F>
  __device__ __forceinline__ void window(P, const Extent& fine, const F& f) const {
    static_assert(P::kApart);
    const Coordinates w = coordinates(extent, position);
    const int kd = P::depth(fine), kh = P::height(fine), kw = P::width(fine), end = active ? kd * kh * kw : 0;
    const int first = (P::front(fine, w.d) * fine.H + P::top(fine, w.h)) * fine.W + P::left(fine, w.w);
#pragma unroll 4
    for (int place = int(sharing.lane()); place < end; place += int(sharing.lanes)) {
      const int row = place / kw, j = P::kDepth == 1 ? row : row % kh, i = P::kDepth == 1 ? 0 : row / kh;
      f(Point<1>{fine, values, n, c, C, first + (i * fine.H + j) * fine.W + place % kw, place, true});
    }
  }
  template <class P> __device__ __forceinline__ Point<1> chosen(P pool, const Extent& fine, int at) const {
    return Point<1>::chosen(pool, fine, at < 0 ? 0 : at);  // of none: nobody sees it
  }
  __device__ __forceinline__ real all(const Total<real>& x) const { return sharing.sum(x.value()); }
  template <int sign> __device__ __forceinline__ Extreme<sign, real> all(const Extreme<sign, real>& x) const {
    return sharing.best(x);
  }
};

// A block's share of a plane, or, channels last, of `across` neighbouring ones; behind the last one that once
// more.
template <Order order> class AxisPlane : public SharedPoints<order> {
 public:
  const int64_t n, c;
  __device__ AxisPlane(const Extent& extent, const value_t* values, unsigned parts, const Sharing& sharing,
                       unsigned across)
      : AxisPlane(extent, values, parts, sharing, across, (unsigned(extent.C) + across - 1) / across) {}
  template <class F> __device__ __forceinline__ void each(const F& f) {
    const int own = int(sharing_.point() / across_), step = int(sharing_.points() / across_);
    this->share(extent_.positions(), own, step, parts_, part_, 1, sharing_, [&](int at, bool active) {
      f(AxisPoint{{{extent_, values_, n, c, extent_.C, at, 0, true}, sharing_, active}});
    });
  }

 private:
  __device__ AxisPlane(const Extent& extent, const value_t* values, unsigned parts, const Sharing& sharing,
                       unsigned across, unsigned tiles)
      : n(block<order>() / parts / tiles),
        c(min(block<order>() / parts % tiles * across + sharing.point() % across, unsigned(extent.C) - 1)),
        extent_(extent), values_(values), sharing_(sharing), part_(block<order>() % parts), parts_(parts),
        across_(across) {}
  const Extent& extent_;
  const value_t* values_;
  const Sharing& sharing_;
  const unsigned part_, parts_, across_;
};

}  // namespace load
