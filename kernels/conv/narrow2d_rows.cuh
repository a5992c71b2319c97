// Rows of x (conv/narrow2d.cuh) on their way to a team's ring in shared memory: fetched into registers, and a
// row later scaled, split into two float16 and stored there.
#pragma once
#include "conv/narrow2d_tile.cuh"

namespace conv::narrow2d {

// x is first scaled by 2^kFirstExponent, which fits magnitudes below 128. That is good enough where the
// largest one is 2^-6 at least, for which kSlack more would fit.
constexpr int kFirstExponent = 8;
constexpr int kSlack = 12;

// A thread's pixel of each row's tile; where a tile isn't all of a row, the first threads have another one
// behind the last.
template <class Tile> struct Rows {
  static constexpr int kIn = Tile::Filter::kIn, kGroups = Tile::kGroups, kPixels = Tile::kPixels;
  using Pixel = value_t[kGroups * 8];
  const value_t* const source;
  const int W;
  const int64_t plane_size;
  unsigned char* const ring;
  const int thread;
  const int left;                         // pixels of the row from the thread's first on
  const bool inside, two, second_inside;  // of a row that is one tile
  Pixel pixel, second;
  float largest;  // magnitude of those that were converted

  // Of a sample's x, from `column` on.
  __device__ __forceinline__ Rows(const value_t* sample, int H, int W, int column, unsigned char* ring,
                                  int thread)
      : source(sample + column + thread), W(W), plane_size(int64_t(H) * W), ring(ring), thread(thread),
        left(W - column - thread), inside(column + thread < W),
        two(Tile::kReadsOn && thread < Tile::Filter::kWidth - 1),
        second_inside(two && column + Tile::kColumns + thread < W) {}

  __device__ __forceinline__ void clear_behind_tile() const {
    constexpr int kBehind = kPixels - Tile::kRowColumns;
    for (int i = thread; i < Tile::kRing * 2 * kGroups * kBehind; i += Tile::kTeamThreads)
      reinterpret_cast<uint4*>(ring)[i / kBehind * kPixels + Tile::kRowColumns + i % kBehind] =
          make_uint4(0, 0, 0, 0);
  }
  __device__ __forceinline__ void fetch(int row, int tile) {
    const int before = tile * Tile::kColumns;
    const value_t* from = source + int64_t(row) * W + before;
    constexpr bool kOne = Tile::kRowTiles == 1;
    const bool first_there = kOne ? inside : before < left;
    const bool second_there = kOne ? second_inside : is_last(tile) && two && before + Tile::kColumns < left;
#pragma unroll
    for (int c = 0; c < kGroups * 8; c++, from += plane_size) {
      pixel[c] = c < kIn && first_there ? *from : value_t(0.f);
      if (Tile::kReadsOn) second[c] = c < kIn && second_there ? from[Tile::kColumns] : value_t(0.f);
    }
  }
  // What was fetched, times a factor, to a slot of the ring.
  __device__ __forceinline__ void convert(int slot, int tile, float factor) {
    convert(pixel, slot, tile * Tile::kColumns + thread, factor);
    if (two && is_last(tile)) convert(second, slot, Tile::kRowColumns + thread, factor);
  }

 private:
  static __device__ __forceinline__ bool is_last(int tile) { return tile == Tile::kRowTiles - 1; }
  __device__ __forceinline__ void convert(const Pixel& values, int slot, int at, float factor) {
#pragma unroll
    for (int group = 0; group < kGroups; group++) {
      Halves halves[4];
#pragma unroll
      for (int i = 0; i < 4; i++) {
        const float a = float(values[group * 8 + 2 * i]), b = float(values[group * 8 + 2 * i + 1]);
        largest = fmaxf(largest, fmaxf(fabsf(a), fabsf(b)));
        halves[i] = split(a * factor, b * factor);
      }
      uint4* to = reinterpret_cast<uint4*>(ring + slot * Tile::kRowBytes) + group * kPixels + at;
      to[0] = make_uint4(halves[0].high, halves[1].high, halves[2].high, halves[3].high);
      if (!Tile::kOnePart)
        to[kGroups * kPixels] = make_uint4(halves[0].low, halves[1].low, halves[2].low, halves[3].low);
    }
  }
};

}  // namespace conv::narrow2d
