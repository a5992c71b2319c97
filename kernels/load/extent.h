// The sizes of a level, and how a pool's windows lie over a finer one.
#pragma once
#include "core/scalar.h"

namespace load {

// Of arrays (N, C, D, H, W); of what has no channels C is 1. A plane has fewer than 2³¹ positions.
struct Extent {
  int64_t N, C;
  int D, H, W;
  HOST_DEVICE Extent(int64_t N, int64_t C, int64_t D, int64_t H, int64_t W)
      : N(N), C(C), D(int(D)), H(int(H)), W(int(W)) {}
  HOST_DEVICE int positions() const { return D * H * W; }
};

// The next array of so many elements in a launcher's room (of double, or const double), at a multiple of 16 bytes.
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
  return {int(row / unsigned(extent.H)), int(row % unsigned(extent.H)), int(unsigned(position) % unsigned(extent.W))};
}

// Windows that lie side by side: K positions an axis; 0: one window, the whole axis. What fills no window is in none.
template <int KD, int KH, int KW> struct Pool {
  static HOST_DEVICE int depth(const Extent& fine) { return KD ? KD : fine.D; }
  static HOST_DEVICE int height(const Extent& fine) { return KH ? KH : fine.H; }
  static HOST_DEVICE int width(const Extent& fine) { return KW ? KW : fine.W; }
};

// Are all of them zero? Finite? Of packs, too, whose lanes `all` sees.
HOST_DEVICE bool all(bool value) { return value; }
template <class... T> HOST_DEVICE bool zeros(T... values) { return (... && all(values == 0)); }
template <class... T> HOST_DEVICE bool finite(T... values) { return (... && all(values - values == 0)); }

}  // namespace load
