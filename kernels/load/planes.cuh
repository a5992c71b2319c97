// A pass over the positions of a level, by (sample, channel) or, without channels, by sample. Blocks share planes in
// `parts`; their sums are merged later, in their order.
//
// Arrays are contiguous and aligned to 16 bytes. A thread takes kPack neighbours at a time, at multiples of so many in
// the whole array; what stands before the first and after the last such in a plane goes alone.
//
// With CHANNELS_LAST, arrays of positions and channels are (N, S, C). Then a lane has kPack neighbouring channels, a point is these at one
// position, and what a plane has for a channel is a pack, too. A pass by sample takes positions whose channels are several lanes'. With
// ROUNDS_Y and ROUNDS_DZ these, which the library convolves next, are rounded to TF32.
#pragma once
#include "core/launch.cuh"
#include "core/tf32.cuh"
#include "load/extent.h"
#include "load/extreme.cuh"
#include "load/reduce.cuh"

namespace load {

#ifndef CHANNELS_LAST
#define CHANNELS_LAST 0
#endif
#ifndef ROUNDS_Y
#define ROUNDS_Y 0
#endif
#ifndef ROUNDS_DZ
#define ROUNDS_DZ 0
#endif
constexpr bool kLast = CHANNELS_LAST;
constexpr int kPlaneThreads = 256;
constexpr int kPack = sizeof(value_t) == 2 ? 8 : 4;

// Loads and stores of at most 16 bytes.
template <class E, int K> struct alignas(sizeof(E) * K < 16 ? sizeof(E) * K : 16) Memory {
  E at[K];
};
// Stores by intrinsic, because the compiler stores a struct member by member.
template <class E, int K> __device__ __forceinline__ void put(E* to, const Memory<E, K>& values) {
  constexpr int kBytes = sizeof values;
  using Few = std::conditional_t<kBytes == 4, unsigned, std::conditional_t<kBytes == 2, unsigned short, unsigned char>>;
  using Word = std::conditional_t<kBytes == 16, uint4, std::conditional_t<kBytes == 8, uint2, Few>>;
  __stcg(reinterpret_cast<Word*>(to), reinterpret_cast<const Word&>(values));
}

// What a pass writes at a point until points behind it are read: a load doesn't pass a store that it might meet, so that a thread would wait
// for memory point by point. Of several arrays the first; others are written at once. All this is registers.
class Later {
 public:
  template <class E, int K> __device__ __forceinline__ void take(E* to, const Memory<E, K>& values) {
    if (to_ || sizeof values > sizeof words_ || sizeof values % 4) {
      *reinterpret_cast<Memory<E, K>*>(to) = values;
    } else {
      to_ = to, bytes_ = sizeof values;
      memcpy(&words_, &values, sizeof values < sizeof words_ ? sizeof values : sizeof words_);
    }
  }
  __device__ __forceinline__ void store() const {
    if (!to_) return;
    if (bytes_ == 16) store<4>();
    else if (bytes_ == 8) store<2>();
    else store<1>();
  }

 private:
  template <int words> __device__ __forceinline__ void store() const {
    Memory<unsigned, words> values;
#pragma unroll
    for (int j = 0; j < words; j++) values.at[j] = words_.at[j];
    *reinterpret_cast<Memory<unsigned, words>*>(to_) = values;
  }
  void* to_ = nullptr;
  int bytes_;
  Memory<unsigned, 4> words_;
};

// f(K), for the greatest power of two up to K that `width` is.
template <int K, class F> __device__ __forceinline__ void with_width(unsigned width, const F& f) {
  if constexpr (K == 1) f(std::integral_constant<int, 1>());
  else if (width == K) f(std::integral_constant<int, K>());
  else with_width<K / 2>(width, f);
}

// The type in which a pass computes with an array's elements.
template <class E> using computed = std::conditional_t<std::is_integral_v<E>, int, real>;

// The numbers of K neighbouring channels, of which the first is a multiple of K; and places that far in a small array.
template <int K> struct Neighbours {
  int64_t first;
};
template <int K> __device__ __forceinline__ int64_t lane_of(const Neighbours<K>& at, int i) { return at.first + i; }
template <int K> __device__ __forceinline__ Neighbours<K> operator+(int64_t offset, const Neighbours<K>& at) { return {offset + at.first}; }
template <int K> __device__ __forceinline__ auto operator==(int64_t channel, const Neighbours<K>& at) {
  return lanes<K>([&](int i) { return channel == at.first + i; });
}
template <int K> using Channels = std::conditional_t<K == 1, int64_t, Neighbours<K>>;

// What a small array has for a channel, or for neighbours. Those of double are in a launcher's room, others may stand anywhere.
template <class E> __device__ __forceinline__ auto of(const E* from, int64_t at) { return computed<E>(from[at]); }
template <class E, int K> __device__ __forceinline__ auto of(const E* from, const Neighbours<K>& at) {
  const E* const first = from + at.first;
  if constexpr (sizeof(E) > sizeof(real)) {
    const Memory<E, K> memory = *reinterpret_cast<const Memory<E, K>*>(first);
    return lanes<K>([&](int i) { return computed<E>(memory.at[i]); });
  } else {
    return lanes<K>([&](int i) { return computed<E>(first[i]); });
  }
}

// Is a place of a window in its plane, along an axis? Which of the plane's is nearest to it?
template <class P> __device__ __forceinline__ bool is_in(int at, int size) { return !P::kPads || unsigned(at) < unsigned(size); }
template <class P> __device__ __forceinline__ int nearest_in(int at, int size) { return P::kPads ? min(max(at, 0), size - 1) : at; }

template <int K> struct OfSeveral;

// K neighbouring positions of plane (n, c) of a level with C channels; or, `across`, K neighbouring channels of one position.
template <int K, bool across = false> struct Point {
  static_assert(!across || K > 1);
  using T = std::conditional_t<K == 1, real, Pack<real, K>>;
  const Extent& extent;
  const value_t* values;  // the convolution's
  int64_t n;
  Channels<across ? K : 1> c;
  int64_t C;
  int position, place;
  bool aligned;  // is offset() a multiple of K?
  bool inside = true;  // or, of a window, where that has no position, and another stands for it
  Later* later = nullptr;  // takes what is written, if it is there

  // Of lane i.
  __device__ __forceinline__ int64_t place_in_planes(int i = 0) const {
    return (n * C + lane_of(c, i)) * extent.positions() + position + (across ? 0 : i);
  }
  __device__ __forceinline__ int64_t offset() const {
    return kLast || across ? (n * extent.positions() + position) * C + lane_of(c, 0) : place_in_planes();
  }
  __device__ __forceinline__ int place_of(int i) const { return position + (across ? 0 : i); }
  // Is it this position of its plane? Of a number, or of channels' own.
  template <class I> __device__ __forceinline__ auto is_at(const I& place) const {
    if constexpr (K == 1) return lane_of(place, 0) == position;
    else return lanes<K>([&](int i) { return lane_of(place, i) == place_of(i); });
  }
  template <class E> __device__ __forceinline__ auto read(const E* from) const { return load(from + offset(), across || aligned); }
  template <class E> __device__ __forceinline__ auto shared(const E* from) const {
    const int S = extent.positions();
    if constexpr (across) return computed<E>(from[n * S + position]);
    else return load(from + n * S + position, S % K == 0);
  }
  __device__ __forceinline__ T v() const { return read(values); }
  template <class E, class X> __device__ __forceinline__ void write(E* to, const X& x) const {
    if constexpr (K == 1) {
      to[offset()] = E(lane_of(x, 0));
    } else if (!across && !aligned) {
#pragma unroll
      for (int i = 0; i < K; i++) to[offset() + i] = E(lane_of(x, i));
    } else {
      Memory<E, K> memory;
#pragma unroll
      for (int i = 0; i < K; i++) memory.at[i] = E(lane_of(x, i));
      if (later) later->take(to + offset(), memory);
      else *reinterpret_cast<Memory<E, K>*>(to + offset()) = memory;
    }
  }
  template <class E, class X> __device__ __forceinline__ void write_operand(E* to, const X& x) const {
    if constexpr (ROUNDS_Y) write_nearest(to, x);
    else write(to, x);
  }
  // An array that lies as all others here: v's gradient, or y and its gradient. ROUNDS_DZ is defined for v's alone: what has no convolution has none.
  template <class E> __device__ __forceinline__ auto turned(const E* from) const { return read(from); }
  template <class E, class X> __device__ __forceinline__ void write_turned(E* to, const X& x) const {
    if constexpr (ROUNDS_DZ) write_nearest(to, x);
    else write(to, x);
  }
  // The mask of a dropout by an element's number, where arrays have it: four neighbours share a draw. which: of a pass's dropouts.
  __device__ __forceinline__ auto kept(const int64_t* seed, int64_t number, int which, double probability) const {
    const uint64_t drawn_by = seed_of(seed, number) + which * 0x9E3779B97F4A7C15u;
    const auto place = [&](int i) { return kLast ? offset() + i : place_in_planes(i); };
    const auto one = [&](int64_t i) { return dropout_keeps(philox(drawn_by, i / 4).lane[i % 4], probability); };
    const int64_t first = place(0);
    if constexpr (K == 1) {
      return one(first);
    } else {
      if ((!across && !aligned) || kLast != across || K % 4) return lanes<K>([&](int i) { return one(place(i)); });
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

  // ------------------------------------------------------------------------------- all channels; by sample, of no packs of them
  __device__ __forceinline__ Point channel(int64_t of, int64_t channels) const {
    return {extent, values, n, of, channels, position, 0, extent.positions() % K == 0};
  }
  template <class F> __device__ __forceinline__ void channels(int64_t count, const F& f) const {
#pragma unroll 4
    for (int64_t i = 0; i < count; i++) f(channel(i, count));
  }

  // What is made of them begins with these, and is what `all` gives of that.
  __device__ __forceinline__ T channel_zero() const { return zero(); }
  __device__ __forceinline__ auto largest_channel() const { return largest(); }
  __device__ __forceinline__ auto smallest_channel() const { return smallest(); }
  template <class X> __device__ __forceinline__ X all(const X& x) const { return x; }

  // ------------------------------------------------------------------------------- windows; of single positions
  // `at`: a place in this point's window; of a single channel.
  template <class P> __device__ __forceinline__ Point chosen(P, const Extent& fine, int at) const {
    const Coordinates w = coordinates(extent, position);
    const int kh = P::height(fine), kw = P::width(fine), row = at / kw;
    const int x = P::left(fine, w.w) + at % kw, y = P::top(fine, w.h) + row % kh, z = P::front(fine, w.d) + row / kh;
    return {fine, values, n, c, C, (z * fine.H + y) * fine.W + x, at, true};
  }
  template <class P, class F>
  __device__ __forceinline__ void window(P, const Extent& fine, const F& f) const {
    const Coordinates w = coordinates(extent, position);
    const int kd = P::depth(fine), kh = P::height(fine), kw = P::width(fine);
    constexpr bool kFew = K > 1 && !P::kApart;  // registers hold two of them at a time
    for (int i = 0; i < kd; i++)
#pragma unroll(kFew ? 1 : 4)
      for (int j = 0; j < kh; j++) {
        const int z = P::front(fine, w.d) + i, y = P::top(fine, w.h) + j;
        const int row = (nearest_in<P>(z, fine.D) * fine.H + nearest_in<P>(y, fine.H)) * fine.W + P::left(fine, w.w);
        const bool inside = is_in<P>(z, fine.D) && is_in<P>(y, fine.H);
#pragma unroll(kFew ? 2 : 4)
        for (int k = 0; k < kw; k++) {
          const int x = P::left(fine, w.w) + k, aside = nearest_in<P>(x, fine.W) - x;
          f(Point{fine, values, n, c, C, row + k + aside, (i * kh + j) * kw + k, true, inside && is_in<P>(x, fine.W)});
        }
      }
  }
  // The sum of what f says of the windows that hold this point.
  template <class P, class F> __device__ __forceinline__ T spread(P pool, const Extent& coarse, const F& f) const {
    const Coordinates here = coordinates(extent, position);
    if constexpr (K == 1 || across) {
      return spread_to(here, pool, coarse, f);
    } else if constexpr (!P::kApart) {
      if (here.w + K <= extent.W) return spread_along(here, pool, coarse, f);
      T values = zero();
#pragma unroll 1
      for (int i = 0; i < K; i++) {
#pragma unroll
        for (int j = 1; j < K; j++) values.at[j - 1] = values.at[j];
        values.at[K - 1] = spread_to(coordinates(extent, position + i), pool, coarse, f);
      }
      return values;
    } else {
      if constexpr (P::kWidth % 2 == 0)  // or 0: all of a row; two neighbours then have one window
        if (extent.W % 2 == 0 && here.w % 2 == 0) return spread_apart<2>(here, pool, coarse, f);
      return spread_apart<1>(here, pool, coarse, f);
    }
  }

  __device__ __forceinline__ Extreme<1, T> largest() const { return {}; }
  __device__ __forceinline__ Extreme<-1, T> smallest() const { return {}; }
  __device__ __forceinline__ T zero() const {
    if constexpr (K == 1) return 0;
    else return splat<K>(real(0));
  }

 private:
  template <class E, class X> __device__ __forceinline__ void write_nearest(E* to, const X& x) const {
    if constexpr (K == 1) write(to, nearest_tf32(lane_of(x, 0)));
    else write(to, lanes<K>([&](int i) { return nearest_tf32(lane_of(x, i)); }));
  }
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
  using OfWindow = std::conditional_t<across, Point, Point<1>>;
  // The window that a place lies in, where they lie side by side, and which of its places that is; none behind the last window.
  struct Own {
    int window, place;
    bool exists;
  };
  template <class P> __device__ __forceinline__ Own own_window(const Coordinates& here, P, const Extent& coarse) const {
    const int kd = P::depth(extent), kh = P::height(extent), kw = P::width(extent);
    const int z = here.d / kd, y = here.h / kh, x = here.w / kw;
    return {(z * coarse.H + y) * coarse.W + x, ((here.d - z * kd) * kh + here.h - y * kh) * kw + here.w - x * kw,
            z < coarse.D && y < coarse.H && x < coarse.W};
  }
  // kTogether neighbours lie in one window.
  template <int kTogether, class P, class F>
  __device__ __forceinline__ T spread_apart(Coordinates here, P pool, const Extent& coarse, const F& f) const {
    T found = zero();
#pragma unroll
    for (int i = 0; i < K; i += kTogether) {
      if constexpr (kTogether == 1) {
        found.at[i] = spread_to(here, pool, coarse, f);
      } else if (const Own own = own_window(here, pool, coarse); own.exists) {
        const auto places = lanes<kTogether>([&](int j) { return own.place + j; });
        const auto values = f(OfSeveral<kTogether>{{coarse, this->values, n, c, C, own.window, 0, true}, places});
#pragma unroll
        for (int j = 0; j < kTogether; j++) found.at[i + j] = lane_of(values, j);
      }
      here.w += kTogether;
      if (here.w == extent.W) here.w = 0, here.h++;  // dividing anew takes longer than all the rest
      if (here.h == extent.H) here.h = 0, here.d++;
    }
    return found;
  }
  template <class P, class F>
  __device__ __forceinline__ typename OfWindow::T spread_to(const Coordinates& here, P pool, const Extent& coarse, const F& f) const {
    if constexpr (P::kApart) {
      const Own own = own_window(here, pool, coarse);
      if (!own.exists) return typename OfWindow::T{};
      return f(OfWindow{coarse, values, n, c, C, own.window, own.place, true});
    } else {
      typename OfWindow::T total{};
      each_holding<1, across ? 2 : 1>(here, pool, coarse, [&](int window, int row, int first) {
        total += f(OfWindow{coarse, values, n, c, C, window, row + first, true});
      });
      return total;
    }
  }
  template <class P, class F>
  __device__ __forceinline__ T spread_along(const Coordinates& here, P pool, const Extent& coarse, const F& f) const {
    T total = zero();
    each_holding<K, 1>(here, pool, coarse, [&](int window, int row, int first) {
      const auto inside = lanes<K>([&](int i) { return unsigned(first + i) < unsigned(P::kWidth); });
      const auto place = lanes<K>([&](int i) { return row + first + i; });
      total += math::select(inside, f(OfSeveral<K>{{coarse, values, n, c, C, window, 0, true}, place}), real(0));
    });
    return total;
  }
};

// A window of several neighbours, and in which of its places each of them is.
template <int K> struct OfSeveral : Point<1> {
  Pack<int, K> place;
};

// In which order planes are walked over: the last ones first where the pass before went up, whose end the L2 cache still has; and the other way
// round. What is computed doesn't hang on it.
enum class Order { kUp, kDown };
template <Order order> __device__ __forceinline__ unsigned block() {
  return order == Order::kUp ? blockIdx.x : gridDim.x - 1 - blockIdx.x;
}

// A thread's share of a plane; see LastPlane of kAtOnce.
template <bool kScalar, int kAtOnce, Order order> class Plane {
 public:
  const int64_t n, c;
  __device__ Plane(const Extent& extent, const value_t* values, unsigned parts)
      : n(block<order>() / parts / unsigned(extent.C)), c(block<order>() / parts % unsigned(extent.C)), extent_(extent), values_(values),
        plane_(block<order>() / parts), part_(block<order>() % parts), parts_(parts) {}

  template <class F> __device__ __forceinline__ void each(const F& f) {
    const int S = extent_.positions();
    const int first = int(part_ * blockDim.x + threadIdx.x), step = int(parts_ * blockDim.x);
    if constexpr (kScalar) {
      for (int i = first; i < S; i += step) f(point<1>(i));
    } else {
      const int before = int(int64_t(plane_) * S % kPack), stride = step * kPack;  // before: of the plane's first pack
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
  __device__ __forceinline__ LargestOf<false> largest() const { return {}; }
  __device__ __forceinline__ LargestOf<false> largest_value() const { return {}; }
  __device__ __forceinline__ LargestOf<true> pool_largest() const { return {}; }
  // One of a plane's `parts` values.
  __device__ void reduce(double* out, Sum& sum) const {
    const double value = block_sum(sum.value());
    if (threadIdx.x == 0) out[block<order>()] = value;
  }
  __device__ void reduce(Moments<double>* out, const ShiftedSums& sums) const {
    const Moments<double> value = block_moments(sums);
    if (threadIdx.x == 0) out[block<order>()] = value;
  }
  template <bool kPool> __device__ void reduce(Largest<kPool>* out, const LargestOf<kPool>& own) const {
    const Largest<kPool> value = block_largest(own.value());
    if (threadIdx.x == 0) out[block<order>()] = value;
  }

 private:
  template <int K> __device__ __forceinline__ Point<K> point(int position) const {
    return {extent_, values_, n, c, extent_.C, position, 0, true};
  }
  const Extent& extent_;
  const value_t* values_;
  const unsigned plane_, part_, parts_;
};

// How many lanes have the channels of a position, K each: so many that the fewest idle; of those, most.
HOST_DEVICE unsigned lanes_across(int64_t C, int K) {
  const unsigned packs = unsigned((C + K - 1) / K);
  unsigned most = 1;
  while (most < packs && most < 32) most *= 2;
  unsigned best = most;
  for (unsigned lanes = most / 2; lanes >= 4; lanes /= 2)
    if ((packs + lanes - 1) / lanes * lanes < (packs + best - 1) / best * best) best = lanes;
  return best;
}

// A lane's sums and moments of K channels; see Sum and ShiftedSums. turn: a point's, of each Sum::kFew, known where loops are unrolled.
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

// Channels last: registers are full of what a pass has by channel, kHeld small values and kSums sums, and of what it computes of a point in
// about kInstructions. kWrites: at positions. Such a pass has several points at once where it computes little, or its registers would spill: at
// most kMostAtOnce instructions, a sum counted as kOfASum.
constexpr int kMostAtOnce = 24, kOfASum = 8;
template <class Pass, class = void> struct Last {
  static constexpr int channels = kPack, at_once = 1, blocks = channels * sizeof(real) > 16 ? 2 : 3;
  static constexpr bool writes = true;
};
template <class Pass> struct Last<Pass, std::void_t<decltype(Pass::kHeld)>> {
  static constexpr bool few = !Pass::kSums && Pass::kHeld <= 4;
  static constexpr int held = Pass::kHeld + 3 * Pass::kSums;  // by a channel
  static constexpr bool writes = Pass::kWrites, is_much = Pass::kInstructions + kOfASum * Pass::kSums > kMostAtOnce;
  static constexpr int channels = Pass::kSingle ? 1 : few ? kPack : 4, at_once = held > 16 || (writes && (has_windows<Pass> || is_much)) ? 1 : Sum::kFew;
  static constexpr int blocks = (few ? channels : 4) * sizeof(real) > 16 || held > (at_once > 1 ? 7 : 9) ? 2 : 3;
};

// A lane's share of some planes, where arrays are channels last: K channels side by side at some positions. C is a multiple of K. Rows of
// lanes_across lanes take positions in turn. A lane behind the last channel stands for it and does nothing.
template <int K, int kAtOnce, bool kWrites, Order order> class LastPlane {
  static_assert(kAtOnce == 1 || kAtOnce == Sum::kFew);
  using ThePoint = Point<K, (K > 1)>;

 public:
  const int64_t n;
  const Channels<K> c;
  __device__ LastPlane(const Extent& extent, const value_t* values, unsigned parts)
      : LastPlane(extent, values, parts, lanes_across(extent.C, K)) {}

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
  __device__ void reduce(double* out, const SumsAcross<K>& sums) const {
    put(out, added(sums.total));
  }
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
      counts[i] = count, sum[i] = own.sum[i] + count * d, square[i] = own.square[i] + d * (2 * double(own.sum[i]) + count * d);
    }
    const double all[] = {added(counts), added(sum), added(square)};
    put(out, Moments<double>::from_shifted(all[0], shifts[threadIdx.x % (32 * K)], all[1], all[2]));
    __syncthreads();  // shifts may be written again
  }
  template <bool kPool> __device__ void reduce(Largest<kPool>* out, const LargestAcross<K, kPool>& across) const {
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
  __device__ LastPlane(const Extent& extent, const value_t* values, unsigned parts, unsigned lanes)
      : LastPlane(extent, values, parts, lanes, (unsigned(extent.C) + lanes * K - 1) / (lanes * K)) {}
  __device__ LastPlane(const Extent& extent, const value_t* values, unsigned parts, unsigned lanes, unsigned tiles)
      : n(block<order>() / tiles / parts), c{first_of(lanes, tiles, extent)}, extent_(extent), values_(values),
        tile_(block<order>() % tiles), part_(block<order>() / tiles % parts), parts_(parts), lanes_(lanes),
        active_((block<order>() % tiles * lanes + threadIdx.x % lanes) * K < unsigned(extent.C)) {}
  static __device__ int64_t first_of(unsigned lanes, unsigned tiles, const Extent& extent) {
    const unsigned first = (block<order>() % tiles * lanes + threadIdx.x % lanes) * K;
    return first < unsigned(extent.C) ? first : extent.C - K;
  }
  __device__ __forceinline__ unsigned lane() const { return threadIdx.x % lanes_; }
  __device__ __forceinline__ int first() const { return int((part_ * kPlaneThreads + threadIdx.x) / lanes_); }
  __device__ __forceinline__ int step() const { return int(parts_ * kPlaneThreads / lanes_); }
  __device__ __forceinline__ ThePoint point(const Extent& extent, int position, Later* later = nullptr) const {
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
    if (threadIdx.x < lanes_ * K && channel < unsigned(extent_.C)) out[(n * extent_.C + channel) * parts_ + part_] = value;
  }
  const Extent& extent_;
  const value_t* values_;
  const unsigned tile_, part_, parts_, lanes_;
  const bool active_;
  int turn_ = 0;
};

// A position of a pass by sample, where arrays are channels last: `lanes` neighbours of a warp have K of its channels each, and then the next;
// where there are many, kPacks of them a lane, which it reads together.
// What is made of channels is merged between them, in a fixed order, and all have it. One that is not `active` has no channels.
constexpr int kPacks = 4;
HOST_DEVICE unsigned lanes_of_row(int64_t C, int K) {
  const int64_t packs = (C + K - 1) / K;
  unsigned lanes = 1;
  while (lanes < 32 && (packs < 2 * kPacks ? lanes < packs : lanes * 2 * kPacks <= packs)) lanes *= 2;
  return lanes;
}
template <int K> struct RowPoint : Point<1> {
  using Terms = std::conditional_t<K == 1, real, Pack<real, K>>;
  unsigned lanes;
  bool active;
  __device__ __forceinline__ unsigned lane() const { return threadIdx.x % lanes; }
  template <class E, class X> __device__ __forceinline__ void write(E* to, const X& x) const {
    if (active && lane() == 0) Point<1>::write(to, x);
  }
  __device__ __forceinline__ Point<1> channel(int64_t of, int64_t channels) const {
    return Point<1>::channel(of < 0 ? 0 : of, channels);  // of none: nobody sees it
  }
  template <class F> __device__ __forceinline__ void channels(int64_t count, const F& f) const {
    const int end = active ? int(count) : 0, step = int(lanes) * K;
    const auto point = [&](int i) { f(Point<K, (K > 1)>{extent, values, n, Channels<K>{i}, count, position, 0, true}); };
    int i = int(lane()) * K;
    for (; i + (kPacks - 1) * step < end; i += kPacks * step)
#pragma unroll
      for (int j = 0; j < kPacks; j++) point(i + j * step);
#pragma unroll 1
    for (; i < end; i += step) point(i);
  }
  __device__ __forceinline__ Terms channel_zero() const { return {}; }
  __device__ __forceinline__ Extreme<1, Terms> largest_channel() const { return {}; }
  __device__ __forceinline__ Extreme<-1, Terms> smallest_channel() const { return {}; }
  __device__ __forceinline__ real all(const Terms& x) const {
    real sum = lane_of(x, 0);
#pragma unroll
    for (int i = 1; i < K; i++) sum += lane_of(x, i);
    for (unsigned d = 1; d < lanes; d *= 2) sum += __shfl_xor_sync(~0u, sum, int(d));
    return sum;
  }
  template <int sign> __device__ __forceinline__ Extreme<sign, real> all(const Extreme<sign, Terms>& x) const {
    Extreme<sign, real> best = x.of_lane(0);
#pragma unroll
    for (int i = 1; i < K; i++) best.merge(x.of_lane(i));
    for (unsigned d = 1; d < lanes; d *= 2) {
      Extreme<sign, real> other;
      other.value = __shfl_xor_sync(~0u, best.value, int(d)), other.index = __shfl_xor_sync(~0u, best.index, int(d));
      best.merge(other);
    }
    return best;
  }
};

// Lanes' share of a sample, where arrays are channels last.
template <int K, Order order> class LastRows {
  // What is summed over positions, by one of a position's lanes.
  template <class Own> struct OfFirst {
    const bool& counts;
    Own own;
    template <class... X> __device__ __forceinline__ void add(const X&... x) {
      if (counts) own.add(x...);
    }
  };

 public:
  const int64_t n, c = 0;
  __device__ LastRows(const Extent& extent, const value_t* values, unsigned parts, unsigned lanes)
      : n(block<order>() / parts), extent_(extent), values_(values), part_(block<order>() % parts), parts_(parts), lanes_(lanes) {}
  template <class F> __device__ __forceinline__ void each(const F& f) {
    const int S = extent_.positions(), own = int(threadIdx.x % 32 / lanes_), step = int(parts_ * kPlaneThreads / lanes_);
    for (int i = int((part_ * kPlaneThreads + threadIdx.x / 32 * 32) / lanes_); i < S; i += step) {  // a warp together
      const bool active = i + own < S;
      counts_ = active && threadIdx.x % lanes_ == 0;
      f(RowPoint<K>{{extent_, values_, n, 0, 1, active ? i + own : S - 1, 0, true}, lanes_, active});
    }
  }
  __device__ __forceinline__ OfFirst<Sum> sum() const { return {counts_, {}}; }
  __device__ __forceinline__ OfFirst<ShiftedSums> moments() const { return {counts_, {}}; }
  __device__ __forceinline__ OfFirst<LargestOf<false>> largest() const { return {counts_, {}}; }
  __device__ __forceinline__ OfFirst<LargestOf<false>> largest_value() const { return {counts_, {}}; }
  __device__ __forceinline__ OfFirst<LargestOf<true>> pool_largest() const { return {counts_, {}}; }
  __device__ void reduce(double* out, OfFirst<Sum>& sum) const {
    const double value = block_sum(sum.own.value());
    if (threadIdx.x == 0) out[block<order>()] = value;
  }
  __device__ void reduce(Moments<double>* out, const OfFirst<ShiftedSums>& sums) const {
    const Moments<double> value = block_moments(sums.own);
    if (threadIdx.x == 0) out[block<order>()] = value;
  }
  template <bool kPool> __device__ void reduce(Largest<kPool>* out, const OfFirst<LargestOf<kPool>>& found) const {
    const Largest<kPool> value = block_largest(found.own.value());
    if (threadIdx.x == 0) out[block<order>()] = value;
  }

 private:
  const Extent& extent_;
  const value_t* values_;
  const unsigned part_, parts_, lanes_;
  bool counts_ = false;
};

template <class Pass, class = void> constexpr bool is_scalar = false;
template <class Pass> constexpr bool is_scalar<Pass, std::enable_if_t<Pass::kScalar>> = true;
template <class Pass, class = void> constexpr bool only_reads = false;
template <class Pass> constexpr bool only_reads<Pass, std::enable_if_t<!Pass::kWrites>> = true;

// kBlocks: of a multiprocessor, at least. Rows take more registers.
constexpr int kPlaneBlocks = kPack * sizeof(real) > 16 ? 2 : 4, kRowBlocks = kPack * sizeof(real) > 16 ? 2 : 3;
template <int kBlocks, class ThePlane, class Pass, class... Lanes>
__global__ void __launch_bounds__(kPlaneThreads, kBlocks)
planes_kernel(const Pass pass, const Extent extent, const value_t* values, unsigned parts, Lanes... lanes) {
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

// values: the convolution's, or null. A part has at most 2³¹ positions. K: channels a lane, or 1 where there is no multiple of K.
template <int K, class Pass, Order order>
void in_last_planes(const Pass& pass, const Extent& extent, const value_t* values, Parts<order> parts, cudaStream_t stream) {
  if constexpr (K > 1) {
    if (extent.C % K) return in_last_planes<1>(pass, extent, values, parts, stream);
  }
  using ThePlane = LastPlane<K, Last<Pass>::at_once, Last<Pass>::writes, order>;
  constexpr int kBlocks = Last<Pass>::blocks;
  const int64_t across = int64_t(K) * lanes_across(extent.C, K), blocks = extent.N * ((extent.C + across - 1) / across) * parts.count;
  if (!blocks || !extent.positions()) return;
  launch_early(planes_kernel<kBlocks, ThePlane, Pass>, blocks, kPlaneThreads, stream, pass, extent, values, unsigned(parts.count));
}
template <class Pass, Order order>
void planes(const Pass& pass, const Extent& extent, const value_t* values, Parts<order> parts, cudaStream_t stream) {
  if constexpr (kLast) {
    in_last_planes<Last<Pass>::channels>(pass, extent, values, parts, stream);
  } else {
    using ThePlane = Plane<is_scalar<Pass>, only_reads<Pass> ? 2 : 1, order>;
    const int64_t S = extent.positions(), blocks = extent.N * extent.C * parts.count;
    if (!blocks || !S) return;
    const int64_t packs = S / (is_scalar<Pass> ? 1 : kPack) / parts.count + 1;
    const unsigned threads = packs >= kPlaneThreads ? kPlaneThreads : unsigned((packs + 31) / 32 * 32);
    launch_early(planes_kernel<kPlaneBlocks, ThePlane, Pass>, blocks, threads, stream, pass, extent, values, unsigned(parts.count));
  }
}

// Of a pass by sample, whose extent has no channels; C: those of its arrays.
template <int K, class Pass, Order order>
void in_rows(const Pass& pass, const Extent& extent, int64_t C, const value_t* values, Parts<order> parts, cudaStream_t stream) {
  using ThePlane = LastRows<K, order>;
  const int64_t blocks = extent.N * parts.count;
  if (!blocks || !extent.positions()) return;
  launch_early(planes_kernel<kRowBlocks, ThePlane, Pass, unsigned>, blocks, kPlaneThreads, stream, pass, extent, values, unsigned(parts.count),
               lanes_of_row(C, K));
}
template <class Pass, Order order>
void by_sample(const Pass& pass, const Extent& extent, int64_t C, const value_t* values, Parts<order> parts, cudaStream_t stream) {
  if constexpr (!kLast) planes(pass, extent, values, parts, stream);
  else if (C % kPack) in_rows<1>(pass, extent, C, values, parts, stream);
  else in_rows<kPack>(pass, extent, C, values, parts, stream);
}

// How many parts of a plane's sums are left, merged into `out` where there are many.
inline int64_t few_parts(int64_t parts) { return parts > kFewParts ? 1 : parts; }
template <class T> void merge_parts(T* out, const T* of, int64_t planes, int64_t parts, cudaStream_t stream) {
  const int64_t blocks = (planes * 32 + kMergingThreads - 1) / kMergingThreads;
  if (parts > kFewParts && blocks) launch_early(merge_parts_kernel<T>, blocks, kMergingThreads, stream, out, of, planes, parts);
}

}  // namespace load
