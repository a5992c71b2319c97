// What the backward kernels of conv2d_min_add_multiply share: the gradient g of the convolution's output, made of
// dy and the gates that forward saved, and never written as a whole.
//
// A warp takes 8 channels × kStrip pixels of a row at a time: lane l has pixels l and l + 32.
#pragma once
#include "conv2d_min_add_multiply_operands.cuh"

namespace {

constexpr int kLanePixels = kStrip / 32;  // of a strip

// A strip of a row of one sample's pixels.
struct StripPlace { int64_t n, row, column; };

// The strips of so many samples of height × width pixels, counted along a row first.
struct Strips {
  int64_t height, width, of_row;
  HOST_DEVICE Strips(int64_t height, int64_t width)
      : height(height), width(width), of_row((width + kStrip - 1) / kStrip) {}
  HOST_DEVICE int64_t count(int64_t N) const { return N * height * of_row; }
  __device__ __forceinline__ StripPlace operator[](int64_t strip) const {
    return {strip / of_row / height, strip / of_row % height, strip % of_row * kStrip};
  }
  __device__ __forceinline__ void advance(StripPlace& place) const {
    if ((place.column += kStrip) < width) return;
    place.column = 0;
    if (++place.row == height) place.row = 0, place.n++;
  }
};

// A warp's 8 channels of a strip, from channel plane·8 of `channels` and the strip's first pixel on; 0 where there
// is no channel or pixel. `from` is that pixel of channel 0.
template <class T>
__device__ __forceinline__ void load_strip(T (&values)[kLanePixels][8], const T* from, int plane, int channels,
                                           int64_t plane_size, int64_t pixels) {
  const int lane = threadIdx.x % 32;
  from += plane * 8 * plane_size + lane;
#pragma unroll
  for (int c = 0; c < 8; c++, from += plane_size)
#pragma unroll
    for (int i = 0; i < kLanePixels; i++)
      values[i][c] = plane * 8 + c < channels && lane + i * 32 < pixels ? from[i * 32] : T(0.f);
}

// dy and gates of 8 channels of a strip, as a warp holds them.
template <int kChannels> struct GradientStrip {
  output_t dy[kLanePixels][8];
  uint32_t word;  // lane 4 c + t: word t of channel c

  __device__ __forceinline__ void load(const output_t* all_dy, const uint32_t* gates, const StripPlace& at,
                                       const Strips& strips, int plane) {
    const int64_t plane_size = strips.height * strips.width;
    const output_t* from =
        all_dy + at.n * kChannels * plane_size + at.row * strips.width + at.column;
    load_strip(dy, from, plane, kChannels, plane_size, strips.width - at.column);
    const int lane = threadIdx.x % 32;
    const int64_t first =
        gate_index(at.n, plane * 8, at.row, at.column, strips.height, strips.width, kChannels);
    word = plane * 8 + lane / 4 < kChannels ? gates[first + lane] : 0;
  }

  // Calls use(pixel of the lane, channel, dy·scale, g) for each element, channel by channel.
  template <class Use> __device__ __forceinline__ void for_each(float scale, const Use& use) const {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int c = 0; c < 8; c++) {
      const uint32_t gate = __shfl_sync(0xffffffffu, word, c * 4 + lane % 8 / 2) >> (lane / 8 * 2 + lane % 2);
#pragma unroll
      for (int i = 0; i < kLanePixels; i++) {
        const float outer = float(dy[i][c]) * scale, half = gate >> (16 + i * 8) & 1 ? outer / 2 : outer;
        use(i, c, outer, gate >> (i * 8) & 1 ? 0.f : half);
      }
    }
  }
};

// The largest of `largest` (N), to all threads of the block.
__device__ __forceinline__ uint32_t largest_of(const uint32_t* largest, int64_t N) {
  __shared__ uint32_t of_all;
  if (threadIdx.x == 0) of_all = 0;
  __syncthreads();  // cleared before anyone raises it
  for (int64_t n = threadIdx.x; n < N; n += blockDim.x) atomicMax(&of_all, largest[n]);
  __syncthreads();  // complete before anyone reads it
  const uint32_t result = of_all;
  __syncthreads();  // it may be cleared again
  return result;
}

}  // namespace
