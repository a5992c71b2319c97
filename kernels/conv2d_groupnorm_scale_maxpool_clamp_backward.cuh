// What the kernels of pool's fused backward share: the stage of x, and the gradients of selected positions.
#pragma once
#include "conv2d_groupnorm_scale_maxpool_clamp.cuh"
#include "normalisation.h"
#include "operands.cuh"
#include "reduce.cuh"
#include "tensor_core.cuh"

namespace {

using namespace tensor_core;

constexpr int kPlanes = (CHANNELS_IN + 7) / 8;  // of 8 input channels each, zeros behind the last
constexpr int kTaps = KERNEL_H * KERNEL_W;
constexpr int kUnits = kPlanes * kTaps;  // unit = plane · kTaps + tap
constexpr int kDepth = kUnits * 8;       // of a patch
constexpr int kBlockChannels = 64;
constexpr int kChannelBlocks = (CHANNELS_OUT + kBlockChannels - 1) / kBlockChannels;
constexpr int kSteps = 8;  // products that one sum takes in a tensor core

// Where a value of a patch belongs: its input channel, and its place in a filter.
HOST_DEVICE constexpr int input_channel(int depth) { return depth / 8 / kTaps * 8 + depth % 8; }
HOST_DEVICE constexpr int place_in_filter(int depth) {
  return input_channel(depth) * kTaps + depth / 8 % kTaps;
}

struct Geometry {
  int N, H, W, strips, rows;  // a strip has `rows` rows of tiles or of x, the last one what is left
  HOST_DEVICE int tile_rows() const { return (H + POOL_H - 1) / POOL_H; }
  HOST_DEVICE int height() const { return H - KERNEL_H + 1; }
  HOST_DEVICE int width() const { return W - KERNEL_W + 1; }
  HOST_DEVICE int pooled_height() const { return height() / POOL_H; }
  HOST_DEVICE int pooled_width() const { return width() / POOL_W; }
  // Do the strips cover that many rows, and none of them nothing?
  bool cover(int all) const { return (strips - 1) * rows < all && all <= strips * rows; }
};

// act(std::integral_constant) for 0 … kCount - 1, one after the other; and for one of them.
template <int kCount, int kFirst = 0, class Act>
__device__ __forceinline__ void for_constants(const Act& act) {
  if constexpr (kFirst < kCount) {
    act(std::integral_constant<int, kFirst>());
    for_constants<kCount, kFirst + 1>(act);
  }
}
template <int kCount, int kFirst = 0, class Act>
__device__ __forceinline__ void with_constant(int value, const Act& act) {
  if constexpr (kFirst < kCount) {
    if (value == kFirst) act(std::integral_constant<int, kFirst>());
    else with_constant<kCount, kFirst + 1>(value, act);
  }
}

// ----------------------------------------------------------------------------------------------------- stage

// The pixels of x under kRows × kColumns positions of v, in shared memory: a pixel's 8 channels side by side,
// so that a tap is an offset; first all their high halves, then the low ones, then a pixel of zeros, which
// stands for positions that don't count. Rows are 4 pixels more than a multiple of 8 apart, so that two
// halves of a matrix from neighbouring rows lie in different banks.
template <int kRows, int kColumns, int kBlock = kThreads> struct Stage {
  static constexpr int kHeight = kRows + KERNEL_H - 1, kWidth = kColumns + KERNEL_W - 1;
  static constexpr int kPitch = kWidth + (12 - kWidth % 8) % 8;
  static constexpr int kPlaneBytes = kHeight * kPitch * 16, kPartBytes = kPlanes * kPlaneBytes;
  static constexpr int kZeros = 2 * kPartBytes, kBytes = kZeros + 16;
  HOST_DEVICE static constexpr int offset(int row, int column) { return (row * kPitch + column) * 16; }
  HOST_DEVICE static constexpr int offset(int unit) {
    return unit / kTaps * kPlaneBytes + offset(unit % kTaps / KERNEL_W, unit % kTaps % KERNEL_W);
  }

  unsigned char* const shared;
  int* const largest;  // magnitude of x in the tile, as bits, in shared memory

  __device__ Stage(unsigned char* shared, int* largest) : shared(shared), largest(largest) {
    if (threadIdx.x < 4) reinterpret_cast<uint32_t*>(shared + kZeros)[threadIdx.x] = 0;
  }

  // The pixels that a thread stages, in registers.
  static constexpr int kPixels = (kHeight * kWidth + kBlock - 1) / kBlock;
  using Pixels = float[kPixels][kPlanes * 8];
  __device__ static bool staged(unsigned at) {  // is there such a one?
    return kHeight * kWidth % kBlock == 0 || at < kHeight * kWidth;
  }

  // Pixels from (row, column) on of a sample's x, less `shift`. Those outside of x are zeros.
  __device__ __forceinline__ void load(Pixels& pixels, const value_t* x, const float* shift, int row,
                                       int column, Geometry geometry) {
    if (threadIdx.x == 0) *largest = 0;
    const int H = geometry.H, W = geometry.W;
    const int64_t plane_bytes = int64_t(H) * W * sizeof(value_t);
#pragma unroll
    for (int i = 0; i < kPixels; i++) {
      const unsigned at = i * kBlock + threadIdx.x;
      const int h = row + at / kWidth, w = column + at % kWidth;
      const bool inside = staged(at) && h < H && unsigned(w) < unsigned(W);
      const char* from = reinterpret_cast<const char*>(x + (inside ? h * W + w : 0));
#pragma unroll
      for (int c = 0; c < kPlanes * 8; c++, from += plane_bytes)
        pixels[i][c] = c < CHANNELS_IN ? float(*reinterpret_cast<const value_t*>(from)) : 0.f;
#pragma unroll
      for (int c = 0; c < CHANNELS_IN; c++) pixels[i][c] = inside ? pixels[i][c] - shift[c] : 0.f;
    }
  }

  // Puts them into shared memory, times the same power of two; its exponent. A barrier stands between `load`
  // and this, what was there having been read, and another one before it is read.
  __device__ __forceinline__ int store(const Pixels& pixels) {
    float magnitude = 0;
#pragma unroll
    for (int i = 0; i < kPixels; i++)
#pragma unroll
      for (int c = 0; c < kPlanes * 8; c++) magnitude = fmaxf(magnitude, fabsf(pixels[i][c]));
    const unsigned of_warp = __reduce_max_sync(~0u, __float_as_uint(magnitude));
    if (threadIdx.x % 32 == 0) atomicMax(largest, int(of_warp));
    __syncthreads();  // complete
    const int exponent = fitting_exponent(__int_as_float(*largest));
    const float factor = power_of_two(exponent);
#pragma unroll
    for (int i = 0; i < kPixels; i++) {
      const unsigned at = i * kBlock + threadIdx.x;
      if (!staged(at)) break;
#pragma unroll
      for (int plane = 0; plane < kPlanes; plane++) {
        Halves halves[4];
#pragma unroll
        for (int j = 0; j < 4; j++)
          halves[j] = split(pixels[i][plane * 8 + 2 * j] * factor, pixels[i][plane * 8 + 2 * j + 1] * factor);
        unsigned char* to = shared + plane * kPlaneBytes + offset(at / kWidth, at % kWidth);
        *reinterpret_cast<uint4*>(to) =
            make_uint4(halves[0].high, halves[1].high, halves[2].high, halves[3].high);
        *reinterpret_cast<uint4*>(to + kPartBytes) =
            make_uint4(halves[0].low, halves[1].low, halves[2].low, halves[3].low);
      }
    }
    return exponent;
  }

  // Both; begins and ends with a barrier.
  __device__ int fill(const value_t* x, const float* shift, int row, int column, Geometry geometry) {
    Pixels pixels;
    load(pixels, x, shift, row, column, geometry);
    __syncthreads();  // what was here has been read
    const int exponent = store(pixels);
    __syncthreads();  // complete
    return exponent;
  }
};

// Columns of a tile, so that it fits in shared memory twice.
constexpr int columns_for(int rows) {
  return 2 * kPlanes * (rows + KERNEL_H - 1) * (128 + KERNEL_W + 7) * 16 <= 80 << 10 ? 128 : 64;
}

// ----------------------------------------------------------------------------- selected positions' gradients

// What forward was given and kept.
struct Saved {
  const value_t* weight;
  const output_t* dy;
  const float* extreme;
  const uint8_t* index;
  const float *group_mean, *group_rstd, *conv_bias, *norm_weight, *norm_bias, *scale;
  float low, high;
};

// Of a channel of one sample.
struct alignas(16) Channel {
  Normaliser normalise;
  float scale;
  bool flat;  // all of a window's values tie, and the first is selected
};
__device__ __forceinline__ Channel channel_of(const Saved& saved, GroupShape shape, int n, int c) {
  return {normaliser(saved.group_mean, saved.group_rstd, saved.conv_bias, saved.norm_weight, saved.norm_bias,
                     shape, n, c),
          saved.scale[c], saved.norm_weight[c] * saved.scale[c] == 0};
}

// The v that a window of a flat channel selects. Its place does not matter, for there slope·dz is zero; dz or
// dy·z may not be. `sample` is x's.
__device__ __forceinline__ float first_of_window(const Saved& saved, const value_t* sample, int c,
                                                 int window_row, int window_column, Geometry geometry) {
  const value_t* from = sample + int64_t(window_row) * POOL_H * geometry.W + window_column * POOL_W;
  const value_t* filter = saved.weight + c * (CHANNELS_IN * kTaps);
  float sum = 0;
  for (int i = 0; i < CHANNELS_IN; i++)
    for (int tap = 0; tap < kTaps; tap++)
      sum += float(filter[i * kTaps + tap]) *
             float(from[(int64_t(i) * geometry.H + tap / KERNEL_W) * geometry.W + tap % KERNEL_W]);
  return sum;
}

// dy, where the clamp lets it pass.
__device__ __forceinline__ float passed_gradient(const Saved& saved, const Channel& channel, float dy,
                                                 float z) {
  return clamp_passes(z * channel.scale, saved.low, saved.high) ? dy : 0.f;
}

// slope·dz at the selected position; adds dz, dz·(v - mean) and dy·z to `sums`.
__device__ __forceinline__ float selected_gradient(const Saved& saved, const Channel& channel, float dy,
                                                   float extreme, float (&sums)[3]) {
  const float z = channel.normalise(extreme), passed = passed_gradient(saved, channel, dy, z);
  const float dz = passed * channel.scale;
  sums[0] += dz, sums[1] += dz * channel.normalise.centred(extreme), sums[2] += passed * z;
  return dz * channel.normalise.slope;
}

}  // namespace
