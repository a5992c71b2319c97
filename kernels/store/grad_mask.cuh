// What forward keeps of a value whose tail lets the gradient pass, half of it or nothing: two bits.
//
// They lie in words (N, H', strips of kStrip pixels, channels, 4). Of pixel 8 j + 2 t + i of a strip, bit
// 2 j + i of word t is set where no gradient passes, bit 16 + 2 j + i where half of it does. The lanes of a
// product have them side by side.
#pragma once
#include <stdint.h>

#include "core/scalar.h"

// What a tail says of one value.
struct Mask {
  bool blocked, half;
  // What passes of a gradient.
  __device__ __forceinline__ float operator()(float gradient) const {
    return blocked ? 0.f : half ? gradient / 2 : gradient;
  }
};

namespace store {

constexpr int kStrip = 64;

// Words of a row, and where those of a channel begin, from `column` of a row on. height, width: H', W'.
HOST_DEVICE int64_t mask_row(int64_t width, int channels) {
  return (width + kStrip - 1) / kStrip * channels * 4;
}
HOST_DEVICE int64_t mask_index(int64_t n, int64_t channel, int64_t row, int64_t column, int64_t height,
                               int64_t width, int channels) {
  return (n * height + row) * mask_row(width, channels) + (column / kStrip * channels + channel) * 4;
}

// A sink of masks.
struct GradMask {
  int32_t* words;
  static constexpr bool kKeeps = true, kStores = false;  // masks; rows (store/kept_rows.cuh)
  using Rows = void;
  static constexpr int kWarpBytes = 0;  // of staging

  // A lane's, of the values that a product leaves it: a word per channel and strip.
  template <int kTiles> struct Kept {
    uint32_t low[kTiles / 8] = {}, high[kTiles / 8] = {};
    // Of value i: [i / 4][i % 4] of the lane's.
    __device__ __forceinline__ void add(int i, const Mask& mask) {
      uint32_t& word = (i % 4 < 2 ? low : high)[i / 32];
      const int bit = i / 4 % 8 * 2 + i % 2;
      if (mask.blocked) word |= 1u << bit;
      if (mask.half) word |= 0x10000u << bit;
    }
  };

  template <int kChannels>
  __device__ __forceinline__ uint32_t* at(int64_t n, int64_t channel, int64_t row, int64_t column,
                                          int64_t height, int64_t width) const {
    return reinterpret_cast<uint32_t*>(words) + mask_index(n, channel, row, column, height, width, kChannels);
  }
  template <int kChannels> static __device__ __forceinline__ int64_t row_pitch(int64_t width) {
    return mask_row(width, kChannels);
  }

  // A warp's to `words`, those of its first channel and strip; so many of its channels and pixels exist.
  template <int kChannels, int kTiles>
  static __device__ __forceinline__ void store(uint32_t* words, const Kept<kTiles>& kept, int channels,
                                               int64_t pixels) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int i = 0; i < kTiles / 8; i++, words += kChannels * 4) {
      if (i * kStrip < pixels && lane / 4 < channels) words[lane] = kept.low[i];
      if (i * kStrip < pixels && lane / 4 + 8 < channels) words[lane + 32] = kept.high[i];
    }
  }
};

// In its place where nothing is kept, or no masks.
struct Nothing {
  int32_t* words;
  static constexpr bool kKeeps = false, kStores = false;
  using Rows = void;
  static constexpr int kWarpBytes = 0;
  template <int kTiles> struct Kept {};
  template <int kChannels>
  __device__ __forceinline__ uint32_t* at(int64_t, int64_t, int64_t, int64_t, int64_t, int64_t) const {
    return nullptr;
  }
  template <int kChannels> static __device__ __forceinline__ int64_t row_pitch(int64_t) { return 0; }
  template <int kChannels, int kTiles>
  static __device__ __forceinline__ void store(uint32_t*, const Kept<kTiles>&, int, int64_t) {}
};

}  // namespace store
