// What forward of this model with the convolution inside keeps for backward.
#pragma once
#include "conv/narrow3d_tile.cuh"

// One after the other: v - mean of the channels that won, like y (N, S); moments (2, N, kOut) of v, the
// convolution of x - shift: mean and standard deviation; which channel won, like y.
struct Kept {
  float *centred, *moments;
  index_t* index;
  Kept(float* kept, int64_t N, int64_t S)
      : centred(kept), moments(kept + N * S), index(reinterpret_cast<index_t*>(moments + 2 * N * kOut)) {}
};
