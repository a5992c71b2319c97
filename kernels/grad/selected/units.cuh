// The gradients of a 2-D convolution of few channels in, behind which a normalisation and a max pooling
// stand: what the kernels share: sizes, units of a patch, and the gradients that windows select. The build,
// or else the source before, says the sizes, as for conv/narrow2d_tile.cuh.
#pragma once
#include <algorithm>

#include "norm/formulas.h"
#include "core/split.cuh"
#include "core/reduce.cuh"
#include "core/tensor_core.cuh"

namespace grad::selected {

using namespace tensor_core;

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

// P: what a build is for. The convolution's filter, the windows behind it, and the tail, of what a window
// selects.
template <class Filter, class Pool, class Tail> struct Units {
  using Build = Units;
  static constexpr bool kOfInput = false;  // is x's gradient asked for, too?
  static constexpr int kIn = Filter::kIn, kOut = Filter::kOut;
  static constexpr int kFilterH = Filter::kHeight, kFilterW = Filter::kWidth;
  static constexpr int kPoolH = Pool::kHeight, kPoolW = Pool::kWidth;
  static constexpr int kPlanes = (kIn + 7) / 8;  // of 8 input channels each, zeros behind the last
  static constexpr int kTaps = kFilterH * kFilterW;
  static constexpr int kUnits = kPlanes * kTaps;  // unit = plane · kTaps + tap
  static constexpr int kDepth = kUnits * 8;       // of a patch
  static constexpr int kBlockChannels = 64;
  static constexpr int kChannelBlocks = (kOut + kBlockChannels - 1) / kBlockChannels;

  // Where the value at `depth` of a patch belongs: its input channel, and its place in a filter.
  HOST_DEVICE static constexpr int input_channel(int depth) { return depth / 8 / kTaps * 8 + depth % 8; }
  HOST_DEVICE static constexpr int place_in_filter(int depth) {
    return input_channel(depth) * kTaps + depth / 8 % kTaps;
  }

  struct Geometry {
    int N, H, W, strips, rows;  // a strip has `rows` rows of tiles or of x, the last one what is left
    HOST_DEVICE int tile_rows() const { return (H + kPoolH - 1) / kPoolH; }
    HOST_DEVICE int height() const { return H - kFilterH + 1; }
    HOST_DEVICE int width() const { return W - kFilterW + 1; }
    HOST_DEVICE int pooled_height() const { return height() / kPoolH; }
    HOST_DEVICE int pooled_width() const { return width() / kPoolW; }
    HOST_DEVICE int64_t plane_size() const { return int64_t(H) * W; }
    HOST_DEVICE int64_t pooled_size() const { return int64_t(pooled_height()) * pooled_width(); }
    // The same with `all` rows shared out among strips, of `images` at once: so that two blocks a
    // multiprocessor are busy for the shortest time.
    Geometry shared_out(int all, int64_t images) const {
      const int64_t blocks = 2 * device_attribute(cudaDevAttrMultiProcessorCount);
      const int64_t most =
          std::min<int64_t>(all, std::max<int64_t>(1, blocks / std::max<int64_t>(1, images)));
      const auto time = [&](int64_t count) {
        return (images * count + blocks - 1) / blocks * ((all + count - 1) / count);
      };
      int64_t count = 1;
      for (int64_t more = 2; more <= most; more++)
        if (time(more) < time(count)) count = more;
      Geometry other = *this;
      other.rows = int((all + count - 1) / count), other.strips = (all + other.rows - 1) / other.rows;
      return other;
    }
  };

  // ----------------------------------------------------------------------------- selected positions'
  // gradients

  // What forward was given and kept.
  struct Saved {
    const value_t* weight;
    const output_t* dy;
    const float* extreme;
    const uint8_t *index, *flat;
    const float *group_mean, *group_rstd, *conv_bias, *norm_weight, *norm_bias;
    Tail tail;
  };

  // Of a channel of one sample.
  struct alignas(16) Channel {
    Normaliser normalise;
    typename Tail::Channel tail;
    bool flat;  // all of a window's values tie, and the first is selected: forward kept another
  };
  __device__ __forceinline__ static Channel channel_of(const Saved& saved, GroupShape shape, int n, int c) {
    return {normaliser(saved.group_mean, saved.group_rstd, saved.conv_bias, saved.norm_weight,
                       saved.norm_bias, shape, n, c),
            saved.tail.channel(n, c), saved.flat[n * shape.C + c] != 0};
  }

  // The v that a window of a flat channel selects, computed anew, since forward kept another of those that
  // tie. `sample` is x's.
  __device__ __forceinline__ static float first_of_window(const Saved& saved, const value_t* sample, int c,
                                                          int window_row, int window_column,
                                                          Geometry geometry) {
    const value_t* from = sample + int64_t(window_row) * kPoolH * geometry.W + window_column * kPoolW;
    const value_t* filter = saved.weight + c * (kIn * kTaps);
    float sum = 0;
    for (int i = 0; i < kIn; i++)
      for (int tap = 0; tap < kTaps; tap++)
        sum += float(filter[i * kTaps + tap]) *
               float(from[(int64_t(i) * geometry.H + tap / kFilterW) * geometry.W + tap % kFilterW]);
    return sum;
  }

  // dy of a window whose v is `extreme`, where the clamp lets it pass; and what that makes of slope·dz.
  __device__ __forceinline__ static float passed_gradient(const Saved& saved, const Channel& channel,
                                                          float dy, float extreme) {
    return saved.tail.gradient(dy, channel.normalise(extreme), channel.tail);
  }
  __device__ __forceinline__ static float selected_gradient(const Channel& channel, float passed) {
    return passed * channel.tail.scale * channel.normalise.slope;
  }
};

}  // namespace grad::selected
