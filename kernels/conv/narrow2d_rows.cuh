// Rows of x (conv/narrow2d.cuh) on their way to a team's ring in shared memory: fetched into registers, and a
// row later scaled, split into two float16 and stored there.
#pragma once
#include "conv/narrow2d_tile.cuh"

namespace {

// x is first scaled by 2^kFirstExponent, which fits magnitudes below 128. That is good enough where the
// largest one is 2^-6 at least, for which kSlack more would fit.
constexpr int kFirstExponent = 8;
constexpr int kSlack = 12;

// A thread's pixel of each row; where there are several tiles, the first threads have another one behind the
// tile.
struct Rows {
  using Pixel = value_t[kPlanes * 8];
  const value_t* const source;
  const int W;
  const int64_t plane_size;
  unsigned char* const ring;
  const int thread;
  const bool inside, two, second_inside;
  Pixel pixel, second;
  float largest;  // magnitude of those that were converted

  // Of a sample's x, from `column` on.
  __device__ __forceinline__ Rows(const value_t* sample, int H, int W, int column, unsigned char* ring,
                                  int thread)
      : source(sample + column + thread), W(W), plane_size(int64_t(H) * W), ring(ring), thread(thread),
        inside(column + thread < W), two(kReadsOn && thread < KERNEL_W - 1),
        second_inside(two && column + kTile + thread < W) {}

  __device__ __forceinline__ void clear_behind_tile() const {
    constexpr int kBehind = kPixels - kTile;
    for (int i = thread; i < kRing * 2 * kPlanes * kBehind; i += kTeamThreads)
      reinterpret_cast<uint4*>(ring)[i / kBehind * kPixels + kTile + i % kBehind] = make_uint4(0, 0, 0, 0);
  }
  __device__ __forceinline__ void fetch(int row) {
    const value_t* from = source + int64_t(row) * W;
#pragma unroll
    for (int c = 0; c < kPlanes * 8; c++, from += plane_size) {
      pixel[c] = c < CHANNELS_IN && inside ? *from : value_t(0.f);
      if (kReadsOn) second[c] = c < CHANNELS_IN && second_inside ? from[kTile] : value_t(0.f);
    }
  }
  // The row that was fetched, times a factor, to a slot of the ring.
  __device__ __forceinline__ void convert(int slot, float factor) {
    convert(pixel, slot, thread, factor);
    if (two) convert(second, slot, kTile + thread, factor);
  }

 private:
  __device__ __forceinline__ void convert(const Pixel& values, int slot, int at, float factor) {
#pragma unroll
    for (int plane = 0; plane < kPlanes; plane++) {
      Halves halves[4];
#pragma unroll
      for (int i = 0; i < 4; i++) {
        const float a = float(values[plane * 8 + 2 * i]), b = float(values[plane * 8 + 2 * i + 1]);
        largest = fmaxf(largest, fmaxf(fabsf(a), fabsf(b)));
        halves[i] = split(a * factor, b * factor);
      }
      uint4* to = reinterpret_cast<uint4*>(ring + slot * kRowBytes) + plane * kPixels + at;
      to[0] = make_uint4(halves[0].high, halves[1].high, halves[2].high, halves[3].high);
      if (!kOnePart)
        to[kPlanes * kPixels] = make_uint4(halves[0].low, halves[1].low, halves[2].low, halves[3].low);
    }
  }
};

}  // namespace
