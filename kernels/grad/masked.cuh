// What the gradients of a wide convolution share: the gradient g of its output, made of dy and the masks that
// forward kept (store/grad_mask.cuh), and never written as a whole.
//
// A warp takes 8 channels × kStrip pixels of a row at a time: lane l has pixels l and l + 32.
#pragma once
#include <algorithm>

#include "conv/wide_operands.cuh"
#include "host/tensor.h"
#include "store/grad_mask.cuh"

// What a tail makes of one dy: the gradients of v, which is that of the convolution's bias, and of kCount - 1
// other parameters by channel.
template <int kCount_> struct Gradient {
  static constexpr int kCount = kCount_;
  float of[kCount];
};

namespace grad {

using namespace conv;
using store::kStrip;

constexpr int kLanePixels = kStrip / 32;  // of a strip

// A strip of a row of one sample's pixels.
struct StripPlace {
  int64_t n;
  int row, column;
};

// The strips of so many samples of height × width pixels, counted along a row first.
struct Strips {
  int height, width, of_row;
  HOST_DEVICE Strips(int64_t height, int64_t width)
      : height(int(height)), width(int(width)), of_row(ceil_div(int(width), kStrip)) {}
  HOST_DEVICE int64_t count(int64_t N) const { return N * height * of_row; }
  __device__ __forceinline__ StripPlace operator[](int64_t strip) const {
    return {strip / of_row / height, int(strip / of_row % height), int(strip % of_row) * kStrip};
  }
  __device__ __forceinline__ void advance(StripPlace& place) const {
    if ((place.column += kStrip) < width) return;
    place.column = 0;
    if (++place.row == height) place.row = 0, place.n++;
  }
};

// A warp's 8 channels of a strip, from channel group·8 of kChannels on, where the strip's first pixel lies at
// `from`. What has no channel or is none of `pixels` stays as it is.
template <int kChannels, class T>
__device__ __forceinline__ void load_strip(T (&values)[kLanePixels][8], const T* from, int group,
                                           int64_t plane_size, int pixels) {
  const int lane = threadIdx.x % 32;
  from += lane;
#pragma unroll
  for (int c = 0; c < 8; c++, from += plane_size) {
    const bool real = kChannels % 64 == 0 || group * 8 + c < kChannels;  // blocks have 64 channels
#pragma unroll
    for (int i = 0; i < kLanePixels; i++)
      if (real && lane + i * 32 < pixels) values[i][c] = from[i * 32];
  }
}

#if __CUDA_ARCH__ >= 800

// kCount values to shared memory, in the background; fewer than 4 bytes can't be, and are copied at once.
template <int kCount = 1, class T> __device__ __forceinline__ void copy_raw(T* to, const T* from) {
  constexpr int kBytes = kCount * sizeof(T);
  if constexpr (kBytes >= 4) copy_async<kBytes>(to, from);
  else *to = *from;
}

// Likewise load_strip, to [channel][pixel], kPixels at a time: `from`, plane_size and `pixels` are multiples
// of so many. A lane copies others' pixels, too.
template <int kChannels, int kPixels = 1, class T, int kPitch>
__device__ __forceinline__ void copy_strip(T (&to)[8][kPitch], const T* from, int group, int64_t plane_size,
                                           int pixels) {
  constexpr int kLanes = kStrip / kPixels < 32 ? kStrip / kPixels : 32;  // side by side in a row
  const int lane = threadIdx.x % 32, own = lane / kLanes, first = lane % kLanes * kPixels;
  from += first;
#pragma unroll
  for (int c = 0; c < 8; c += 32 / kLanes, from += 32 / kLanes * plane_size)
#pragma unroll
    for (int i = 0; i < kStrip; i += kLanes * kPixels)
      if ((kChannels % 64 == 0 || group * 8 + c + own < kChannels) && first + i < pixels)
        copy_raw<kPixels>(&to[c + own][first + i], from + own * plane_size + i);
}

#endif

// dy and masks of 8 channels of a strip, as a warp holds them.
template <int kChannels> struct MaskedStrip {
  output_t dy[kLanePixels][8] = {};
  uint32_t word = 0;    // lane 4 c + t: word t of channel c
  uint32_t past = ~0u;  // bits 0 and 8: do the lane's pixels lie past the end of the row?

  // Where a channel group of a strip lies in dy; see mask_index, too.
  static __device__ __forceinline__ int64_t index(const StripPlace& at, const Strips& strips, int group) {
    return ((at.n * kChannels + group * 8) * strips.height + at.row) * strips.width + at.column;
  }

  // From where a channel group of a strip lies in dy and in the masks. `pixels` of it exist.
  __device__ __forceinline__ void load(const output_t* from, const uint32_t* words, int group,
                                       int64_t plane_size, int pixels) {
    const int lane = threadIdx.x % 32;
    load_strip<kChannels>(dy, from, group, plane_size, pixels);
    if (kChannels % 64 == 0 || group * 8 + lane / 4 < kChannels) word = words[lane];
    end_after(pixels);
  }
  __device__ __forceinline__ void end_after(int pixels) {
    const int lane = threadIdx.x % 32;
    past = (lane < pixels ? 0 : 1) | (lane + 32 < pixels ? 0 : 0x100);
  }
  __device__ __forceinline__ void load(const output_t* all_dy, const uint32_t* all_words,
                                       const StripPlace& at, const Strips& strips, int group) {
    const int64_t words =
        store::mask_index(at.n, group * 8, at.row, at.column, strips.height, strips.width, kChannels);
    load(all_dy + index(at, strips, group), all_words + words, group, int64_t(strips.height) * strips.width,
         strips.width - at.column);
  }

  // Calls use(pixel of the lane, channel, the tail's Gradient) for each element, channel by channel; g is 0
  // past the end of a row.
  template <class Tail, class Use>
  __device__ __forceinline__ void for_each(const Tail& tail, const Use& use) const {
    // Hardly ever is there a tie.
    if (__any_sync(0xffffffffu, word >> 16)) for_each<true>(tail, use);
    else for_each<false>(tail, use);
  }
  template <bool kTies, class Tail, class Use>
  __device__ __forceinline__ void for_each(const Tail& tail, const Use& use) const {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int c = 0; c < 8; c++) {
      const uint32_t shared = __shfl_sync(0xffffffffu, word, c * 4 + lane % 8 / 2);
      const uint32_t bits = shared >> (lane / 8 * 2 + lane % 2);
#pragma unroll
      for (int i = 0; i < kLanePixels; i++) {
        const Mask mask{bool((bits | past) >> (i * 8) & 1), kTies && (bits >> (16 + i * 8) & 1)};
        use(i, c, tail.gradient(float(dy[i][c]), mask));
      }
    }
  }
};

// A source of a convolution: g (N, kChannels, H', W') of a tail, from dy and masks. Its samples' largest
// magnitudes are known before (grad/wide_sums.cuh).
template <class Tail_, int kChannels_> struct Masked {
  using Tail = Tail_;
  static constexpr int kChannels = kChannels_;
  using Strip = MaskedStrip<kChannels>;
  const output_t* dy;
  const uint32_t* words;
  Tail tail;
  static constexpr bool kGuessesScale = false, kUnits = false;
  static __device__ __forceinline__ int sample_exponent(uint32_t largest) { return top_exponent(largest); }
  // That of the samples from n on.
  Masked from(int64_t n, int64_t height, int64_t width) const {
    return {dy + n * kChannels * height * width,
            words + store::mask_index(n, 0, 0, 0, height, width, kChannels), tail};
  }
};

// A source and its sizes, as the host knows them.
template <class Source> struct Gradients {
  Source source;
  int64_t N, height, width;
};

template <int kChannels, class Tail>
Gradients<Masked<Tail, kChannels>> masked(const Tail& tail, In<output_t> dy, In<int32_t> mask) {
  const int64_t N = dy.size(0), height = dy.size(2), width = dy.size(3);
  expect(dy.size(1) == kChannels, "dy of the channels that are compiled for");
  expect(mask.numel() == N * height * store::mask_row(width, kChannels), "a mask for each element of dy");
  return {{dy, reinterpret_cast<const uint32_t*>(mask.data), tail}, N, height, width};
}

// How many shares sums over all strips have: up to `most`.
template <class Source> int64_t splits_for(const Gradients<Source>& g, int64_t most) {
  return std::max<int64_t>(1, std::min(most, Strips(g.height, g.width).count(g.N)));
}

}  // namespace grad
