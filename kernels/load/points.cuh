// A point of a pass (load/planes.cuh): some neighbours of a plane, what a pass reads and writes there, and
// the windows around it.
//
// Arrays are contiguous and aligned to 16 bytes. With CHANNELS_LAST, arrays of positions and channels are (N,
// S, C), and a point has kPack neighbouring channels of one position, and what a plane has for a channel is a
// pack, too. With ROUNDS_Y and ROUNDS_DZ these, which the library convolves next, are rounded to TF32.
#pragma once
#include "core/launch.cuh"
#include "core/tf32.cuh"
#include "load/extent.h"
#include "load/extreme.cuh"
#include "load/pack.cuh"

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
  using Few = std::conditional_t<kBytes == 4, unsigned,
                                 std::conditional_t<kBytes == 2, unsigned short, unsigned char>>;
  using Word = std::conditional_t<kBytes % 16 == 0, uint4, std::conditional_t<kBytes == 8, uint2, Few>>;
#pragma unroll
  for (int i = 0; i < kBytes / int(sizeof(Word)); i++)
    __stcg(reinterpret_cast<Word*>(to) + i, reinterpret_cast<const Word*>(&values)[i]);
}

// What a pass writes at a point until points behind it are read: a load doesn't pass a store that it might
// meet, so that a thread would wait for memory point by point. Of several arrays the first; others are
// written at once. All this is registers.
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

// The numbers of K neighbouring channels, of which the first is a multiple of K; and places that far in a
// small array.
template <int K> struct Neighbours {
  int64_t first;
};
template <int K> __device__ __forceinline__ int64_t lane_of(const Neighbours<K>& at, int i) {
  return at.first + i;
}
template <int K> __device__ __forceinline__ Neighbours<K> operator+(int64_t offset, const Neighbours<K>& at) {
  return {offset + at.first};
}
template <int K> __device__ __forceinline__ auto operator==(int64_t channel, const Neighbours<K>& at) {
  return lanes<K>([&](int i) { return channel == at.first + i; });
}
template <int K> using Channels = std::conditional_t<K == 1, int64_t, Neighbours<K>>;

// What a small array has for a channel, or for neighbours. Those of double are in a launcher's room, others
// may stand anywhere.
template <class E> __device__ __forceinline__ auto of(const E* from, int64_t at) {
  return computed<E>(from[at]);
}
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
template <class P> __device__ __forceinline__ bool is_in(int at, int size) {
  return !P::kPads || unsigned(at) < unsigned(size);
}
template <class P> __device__ __forceinline__ int nearest_in(int at, int size) {
  return P::kPads ? min(max(at, 0), size - 1) : at;
}

// A point's sum of many terms: a few as they are, these in double.
template <class T> class Total {
 public:
  template <class X> __device__ __forceinline__ void operator+=(const X& x) {
    few_ += x;
    if (++count_ % kFew == 0) all_ += few_, few_ = T{};
  }
  __device__ __forceinline__ T value() const {
    const auto all = all_ + few_;
    if constexpr (is_pack<T>) return lanes<T::size>([&](int i) { return real(all.at[i]); });
    else return T(all);
  }

 private:
  static constexpr unsigned kFew = 32;
  using Double = decltype(double() * T());
  T few_{};
  Double all_{};
  unsigned count_ = 0;
};

template <int K> struct OfSeveral;

// K neighbouring positions of plane (n, c) of a level with C channels; or, `across`, K neighbouring channels
// of one position.
template <int K, bool across = false> struct Point {
  static_assert(!across || K > 1);
  using T = std::conditional_t<K == 1, real, Pack<real, K>>;
  const Extent& extent;
  const value_t* values;  // the convolution's
  int64_t n;
  Channels<across ? K : 1> c;
  int64_t C;
  int position, place;
  bool aligned;            // is offset() a multiple of K?
  bool inside = true;      // or, of a window, where that has no position, and another stands for it
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
  template <class E> __device__ __forceinline__ auto read(const E* from) const {
    return load(from + offset(), across || aligned);
  }
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
  // An array that lies as all others here: v's gradient, or, in planes, y and its gradient. ROUNDS_DZ is
  // defined where all lies channels last, for v's alone.
  template <class E> __device__ __forceinline__ auto turned(const E* from) const { return read(from); }
  template <class E, class X> __device__ __forceinline__ void write_turned(E* to, const X& x) const {
    if constexpr (ROUNDS_DZ) write_nearest(to, x);
    else write(to, x);
  }
  // The mask of a dropout by an element's number, where arrays have it: four neighbours share a draw. which:
  // of a pass's dropouts.
  __device__ __forceinline__ auto kept(const int64_t* seed, int64_t number, int which,
                                       double probability) const {
    const uint64_t drawn_by = seed_of(seed, number) + which * 0x9E3779B97F4A7C15u;
    const auto place = [&](int i) { return kLast ? offset() + i : place_in_planes(i); };
    const auto one = [&](int64_t i) {
      return dropout_keeps(philox(drawn_by, i / 4).lane[i % 4], probability);
    };
    const int64_t first = place(0);
    if constexpr (K == 1) {
      return one(first);
    } else {
      if ((!across && !aligned) || kLast != across || K % 4)
        return lanes<K>([&](int i) { return one(place(i)); });
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

  // ------------------------------------------------------------------------------- all channels; by sample,
  // of no packs of them
  __device__ __forceinline__ Point channel(int64_t of, int64_t channels) const {
    return {extent, values, n, of, channels, position, 0, extent.positions() % K == 0};
  }
  template <class F> __device__ __forceinline__ void channels(int64_t count, const F& f) const {
#pragma unroll 4
    for (int64_t i = 0; i < count; i++) f(channel(i, count));
  }

  // What is made of them begins with these, and is what `all` gives of that.
  __device__ __forceinline__ T channel_zero() const { return zero(); }
  __device__ __forceinline__ Total<T> channel_total() const { return {}; }
  __device__ __forceinline__ auto largest_channel() const { return largest(); }
  __device__ __forceinline__ auto smallest_channel() const { return smallest(); }
  template <class X> __device__ __forceinline__ X all(const X& x) const { return x; }
  __device__ __forceinline__ T all(const Total<T>& x) const { return x.value(); }

  // ------------------------------------------------------------------------------- windows; of single
  // positions `at`: a place in this point's window; of a single channel.
  template <class P> __device__ __forceinline__ Point chosen(P, const Extent& fine, int at) const {
    const Coordinates w = coordinates(extent, position);
    const int kh = P::height(fine), kw = P::width(fine), row = at / kw;
    const int x = P::left(fine, w.w) + at % kw, y = P::top(fine, w.h) + row % kh,
              z = P::front(fine, w.d) + row / kh;
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
        const int row =
            (nearest_in<P>(z, fine.D) * fine.H + nearest_in<P>(y, fine.H)) * fine.W + P::left(fine, w.w);
        const bool inside = is_in<P>(z, fine.D) && is_in<P>(y, fine.H);
#pragma unroll(kFew ? 2 : 4)
        for (int k = 0; k < kw; k++) {
          const int x = P::left(fine, w.w) + k, aside = nearest_in<P>(x, fine.W) - x;
          f(Point{fine, values, n, c, C, row + k + aside, (i * kh + j) * kw + k, true,
                  inside && is_in<P>(x, fine.W)});
        }
      }
  }
  // The sum of what f says of the windows that hold this point.
  template <class P, class F>
  __device__ __forceinline__ T spread(P pool, const Extent& coarse, const F& f) const {
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
  __device__ __forceinline__ Total<T> total() const { return {}; }  // of many terms
  // Of a window that is a whole axis, which lanes may share (load/shared.cuh).
  __device__ __forceinline__ Total<T> axis_total() const { return {}; }
  __device__ __forceinline__ auto largest_axis() const { return largest(); }
  __device__ __forceinline__ auto smallest_axis() const { return smallest(); }
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
  // The window that a place lies in, where they lie side by side, and which of its places that is; none
  // behind the last window.
  struct Own {
    int window, place;
    bool exists;
  };
  template <class P>
  __device__ __forceinline__ Own own_window(const Coordinates& here, P, const Extent& coarse) const {
    const int kd = P::depth(extent), kh = P::height(extent), kw = P::width(extent);
    const int z = here.d / kd, y = here.h / kh, x = here.w / kw;
    return {(z * coarse.H + y) * coarse.W + x,
            ((here.d - z * kd) * kh + here.h - y * kh) * kw + here.w - x * kw,
            z < coarse.D && y < coarse.H && x < coarse.W};
  }
  // kTogether neighbours lie in one window.
  template <int kTogether, class P, class F>
  __device__ __forceinline__ T spread_apart(Coordinates here, P pool, const Extent& coarse,
                                            const F& f) const {
    T found = zero();
#pragma unroll
    for (int i = 0; i < K; i += kTogether) {
      if constexpr (kTogether == 1) {
        found.at[i] = spread_to(here, pool, coarse, f);
      } else if (const Own own = own_window(here, pool, coarse); own.exists) {
        const auto places = lanes<kTogether>([&](int j) { return own.place + j; });
        const auto values =
            f(OfSeveral<kTogether>{{coarse, this->values, n, c, C, own.window, 0, true}, places});
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
  __device__ __forceinline__ typename OfWindow::T spread_to(const Coordinates& here, P pool,
                                                            const Extent& coarse, const F& f) const {
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
  __device__ __forceinline__ T spread_along(const Coordinates& here, P pool, const Extent& coarse,
                                            const F& f) const {
    T total = zero();
    each_holding<K, 1>(here, pool, coarse, [&](int window, int row, int first) {
      const auto inside = lanes<K>([&](int i) { return unsigned(first + i) < unsigned(P::kWidth); });
      const auto place = lanes<K>([&](int i) { return row + first + i; });
      total +=
          math::select(inside, f(OfSeveral<K>{{coarse, values, n, c, C, window, 0, true}, place}), real(0));
    });
    return total;
  }
};

// A window of several neighbours, and in which of its places each of them is.
template <int K> struct OfSeveral : Point<1> {
  Pack<int, K> place;
};

// In which order planes are walked over: the last ones first where the pass before went up, whose end the L2
// cache still has; and the other way round. What is computed doesn't hang on it.
enum class Order { kUp, kDown };
template <Order order> __device__ __forceinline__ unsigned block() {
  return order == Order::kUp ? blockIdx.x : gridDim.x - 1 - blockIdx.x;
}

}  // namespace load
