// What the sources of this model with the convolution inside share: for which sizes they are, unless a build
// says others, the default ones; and what forward keeps for backward.
#pragma once
#include "conv/shape.h"
#include "norm/formulas.h"
#include "pool/window.cuh"

#ifndef CHANNELS_IN
#define CHANNELS_IN 8
#define CHANNELS_OUT 64
#define KERNEL_H 3
#define KERNEL_W 3
#define POOL_H 4
#define POOL_W 4
#endif

using Filter = conv::Filter<CHANNELS_IN, CHANNELS_OUT, KERNEL_H, KERNEL_W>;
using Pool = pool::Max<POOL_H, POOL_W>;

// What becomes of the normalised z of what a window selects.
struct Tail {
  const accumulate_t* scale;  // (CHANNELS_OUT)
  accumulate_t low, high;

  struct Channel {
    accumulate_t scale;
  };
  HOST_DEVICE Channel channel(int64_t, int c) const { return {scale[c]}; }
  // What windows compare.
  HOST_DEVICE accumulate_t compared(accumulate_t z, const Channel& c) const { return z * c.scale; }
  HOST_DEVICE accumulate_t operator()(accumulate_t z, const Channel& c) const {
    // The formula of conv2d_groupnorm_scale_maxpool_clamp_fused.
    return clamp(compared(z, c), low, high);
  }
  // The gradient of what windows compare.
  HOST_DEVICE accumulate_t gradient(accumulate_t dy, accumulate_t z, const Channel& c) const {
    // The gradient of conv2d_groupnorm_scale_maxpool_clamp_fused.
    return clamp_passes(compared(z, c), low, high) ? dy : accumulate_t(0);
  }
};

// One after the other: v of the position that each window selects, like y, which has `count` elements; v's
// statistics, with the biases, a copy for each sample, in the places of mean and m2, which nobody reads; the
// selected position's place in the window, by rows, like y; (N, CHANNELS_OUT), is the channel flat: do all of its
// values tie behind the normalisation, so that each window selects its first?
struct Kept {
  float* window_max;
  GroupStatistics<float> statistics;
  uint8_t *argmax, *flat;
  Kept(float* kept, int64_t count, int64_t N, int64_t G)
      : window_max(kept), statistics(kept + count, N, CHANNELS_OUT, G),
        argmax(reinterpret_cast<uint8_t*>(statistics.group_rstd + N * G)), flat(argmax + count) {}
};
