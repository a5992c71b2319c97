// The gradients of a 2-D convolution of few channels in, behind which a normalisation and a max pooling
// stand: what the kernels share: sizes, units of a patch, and the gradients that windows select. The build,
// or else the source before, says the sizes, as for conv/narrow2d_tile.cuh.
#pragma once
#include "norm/formulas.h"
#include "core/split.cuh"
#include "core/reduce.cuh"
#include "core/tensor_core.cuh"

namespace {

using namespace tensor_core;

constexpr int kPlanes = (CHANNELS_IN + 7) / 8;  // of 8 input channels each, zeros behind the last
constexpr int kTaps = KERNEL_H * KERNEL_W;
constexpr int kUnits = kPlanes * kTaps;  // unit = plane · kTaps + tap
constexpr int kDepth = kUnits * 8;       // of a patch
constexpr int kBlockChannels = 64;
constexpr int kChannelBlocks = (CHANNELS_OUT + kBlockChannels - 1) / kBlockChannels;

// Where the value at `depth` of a patch belongs: its input channel, and its place in a filter.
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
  HOST_DEVICE int64_t plane_size() const { return int64_t(H) * W; }
  HOST_DEVICE int64_t pooled_size() const { return int64_t(pooled_height()) * pooled_width(); }
  // Do the strips cover that many rows, and none of them nothing?
  bool cover(int all) const { return (strips - 1) * rows < all && all <= strips * rows; }
};

// Calls act with the constants 0 … kCount - 1, one after the other; or with the one that equals `value`: as
// std::integral_constant, so that what depends on it is settled at compile time.
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

// ----------------------------------------------------------------------------- selected positions' gradients

// What forward was given and kept.
struct Saved {
  const value_t* weight;
  const output_t* dy;
  const float* extreme;
  const uint8_t *index, *flat;
  const float *group_mean, *group_rstd, *conv_bias, *norm_weight, *norm_bias, *scale;
  float low, high;
};

// Of a channel of one sample.
struct alignas(16) Channel {
  Normaliser normalise;
  float scale;
  bool flat;  // all of a window's values tie, and the first is selected: forward kept another
};
__device__ __forceinline__ Channel channel_of(const Saved& saved, GroupShape shape, int n, int c) {
  return {normaliser(saved.group_mean, saved.group_rstd, saved.conv_bias, saved.norm_weight, saved.norm_bias,
                     shape, n, c),
          saved.scale[c], saved.flat[n * shape.C + c] != 0};
}

// The v that a window of a flat channel selects, computed anew, since forward kept another of those that tie.
// `sample` is x's.
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

// dy of a window whose v is `extreme`, where the clamp lets it pass; and what that makes of slope·dz.
__device__ __forceinline__ float passed_gradient(const Saved& saved, const Channel& channel, float dy,
                                                 float extreme) {
  // The gradient of conv2d_groupnorm_scale_maxpool_clamp_fused.
  const float z = channel.normalise(extreme);
  return clamp_passes(z * channel.scale, saved.low, saved.high) ? dy : 0.f;
}
__device__ __forceinline__ float selected_gradient(const Channel& channel, float passed) {
  // The gradient of conv2d_groupnorm_scale_maxpool_clamp_fused.
  return passed * channel.scale * channel.normalise.slope;
}

}  // namespace
