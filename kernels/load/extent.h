// The sizes of a level, and how a pool's windows lie over a finer one.
#pragma once
#include "core/scalar.h"

#ifdef __CUDACC__
#define ON_DEVICE __device__ __forceinline__
#else
#include "cpu/lanes.h"
#define ON_DEVICE inline
#endif

namespace load {

// Of arrays (N, C, D, H, W); of what has no channels C is 1. A plane has fewer than 2³¹ positions.
struct Extent {
  int64_t N, C;
  int D, H, W;
  HOST_DEVICE Extent(int64_t N, int64_t C, int64_t D, int64_t H, int64_t W)
      : N(N), C(C), D(int(D)), H(int(H)), W(int(W)) {}
  HOST_DEVICE int positions() const { return D * H * W; }
};

// The next array of so many elements in a launcher's room (of double, or const double), at a multiple of 16
// bytes.
template <class T, class Room> T* next(Room*& room, int64_t count) {
  T* const array = reinterpret_cast<T*>(room);
  room += (count * int64_t(sizeof(T)) + 15) / 16 * 2;
  return array;
}

struct Coordinates {
  int d, h, w;
};

HOST_DEVICE Coordinates coordinates(const Extent& extent, int position) {
  const unsigned row = unsigned(position) / unsigned(extent.W);
  return {int(row / unsigned(extent.H)), int(row % unsigned(extent.H)),
          int(unsigned(position) % unsigned(extent.W))};
}

template <int by> HOST_DEVICE int divided(int x) { return x / by; }

// The windows along an axis that hold any of some neighbours from `position` on: `count` from `first` on, at
// most most(some). `position` is the place place(i) of window first + i, if that has so many.
template <int K, int S, int P, class I> struct Holding {
  I first, count, own;
  HOST_DEVICE Holding(I position, int windows, int some) {
    first = position + P < K ? I{} : divided<S>(position + P - K) + 1;
    own = position + P - first * S;
    const I behind = divided<S>(position + (some - 1 + P)) + 1;
    count = (behind < windows ? behind : windows) - first;
  }
  static HOST_DEVICE constexpr int most(int some) { return (some - 1 + K - 1) / S + 1; }
  HOST_DEVICE I place(int i) const { return own - i * S; }
};

// Windows of K positions an axis, S apart; 0: one window, the whole axis. The first begins O places outside
// of the axis: of its places those count for nothing, nor do the last one's. What fills no window is in none.
template <int KD, int KH, int KW, int SD = KD, int SH = KH, int SW = KW, int OD = 0, int OH = 0, int OW = 0>
struct Pool {
  static constexpr bool kPads = OD || OH || OW;
  static constexpr bool kApart =
      SD == KD && SH == KH && SW == KW && !kPads;  // side by side: no position is in two
  static constexpr int kDepth = KD, kHeight = KH, kWidth = KW, kStride = SW;
  static HOST_DEVICE int depth(const Extent& fine) { return KD ? KD : fine.D; }
  static HOST_DEVICE int height(const Extent& fine) { return KH ? KH : fine.H; }
  static HOST_DEVICE int width(const Extent& fine) { return KW ? KW : fine.W; }
  // Where windows begin; of one, or of a vector of them.
  template <class I> static HOST_DEVICE I front(const Extent& fine, I window) {
    return window * (SD ? SD : fine.D) - OD;
  }
  template <class I> static HOST_DEVICE I top(const Extent& fine, I window) {
    return window * (SH ? SH : fine.H) - OH;
  }
  template <class I> static HOST_DEVICE I left(const Extent& fine, I window) {
    return window * (SW ? SW : fine.W) - OW;
  }
  // Where they aren't apart, those that hold a position, each of a vector of them, or some of its neighbours
  // in a row.
  template <class I> static HOST_DEVICE auto deep(I position, int windows) {
    return Holding<KD, SD, OD, I>(position, windows, 1);
  }
  template <class I> static HOST_DEVICE auto high(I position, int windows) {
    return Holding<KH, SH, OH, I>(position, windows, 1);
  }
  template <class I> static HOST_DEVICE auto wide(I position, int windows, int some) {
    return Holding<KW, SW, OW, I>(position, windows, some);
  }
};

// Of neighbours in a row the windows that hold any: f(window, the place of its row, the first neighbour's
// place in that). kAtOnce: rows of windows, that registers hold.
template <int kSome, int kAtOnce, class P, class F>
ON_DEVICE void each_holding(const Coordinates& first, P, const Extent& coarse, const F& f) {
  const auto deep = P::deep(first.d, coarse.D);
  const auto high = P::high(first.h, coarse.H);
  const auto wide = P::wide(first.w, coarse.W, kSome);
  const int first_window = (deep.first * coarse.H + high.first) * coarse.W + wide.first;
#pragma unroll 1
  for (int i = 0; i < deep.most(1); i++)
#pragma unroll kAtOnce
    for (int j = 0; j < high.most(1); j++)
#pragma unroll 8
      for (int k = 0; k < wide.most(kSome); k++)
        if (i < deep.count && j < high.count && k < wide.count) {
          const int window = first_window + (i * coarse.H + j) * coarse.W + k;
          f(window, (deep.place(i) * P::height(coarse) + high.place(j)) * P::kWidth, wide.place(k));
        }
}

// Are all of them zero? Finite? Of packs, too, whose lanes `all` sees.
HOST_DEVICE bool all(bool value) { return value; }
template <class... T> HOST_DEVICE bool zeros(T... values) { return (... && all(values == 0)); }
template <class... T> HOST_DEVICE bool finite(T... values) { return (... && all(values - values == 0)); }

}  // namespace load
