// What the sources of this model with the convolution inside share: for which sizes they are, unless a build
// says others, the default ones; and what forward keeps for backward.
#pragma once
#include "norm/formulas.h"

#ifndef CHANNELS_IN
#define CHANNELS_IN 8
#define CHANNELS_OUT 64
#define KERNEL_H 3
#define KERNEL_W 3
#define POOL_H 4
#define POOL_W 4
#endif

// One after the other: v of the position that each window selects, like y, which has `count` elements; v's
// statistics, with the biases, a copy for each sample, in the places of mean and m2, which nobody reads; the
// selected position's place in the window, by rows, like y; (N, CHANNELS_OUT), is the channel flat: do all of its
// values tie behind the normalisation, so that each window selects its first?
struct Kept {
  float* extreme;
  GroupStatistics<float> statistics;
  uint8_t *index, *flat;
  Kept(float* kept, int64_t count, int64_t N, int64_t G)
      : extreme(kept), statistics(kept + count, N, CHANNELS_OUT, G),
        index(reinterpret_cast<uint8_t*>(statistics.group_rstd + N * G)), flat(index + count) {}
};
