// What forward of this model with the convolution inside keeps for backward.
#pragma once
#include "conv/narrow3d_tile.cuh"
#include "grad/narrow3d.cuh"
#include "norm/narrow3d_statistics.cuh"

#ifndef CHANNELS_IN
#define CHANNELS_IN 3
#define CHANNELS_OUT 16
#define KERNEL_D 3
#define KERNEL_H 3
#define KERNEL_W 3
#endif
#ifndef STAGE_PIXELS  // the plan, as tiling.py makes it; else one with which a source compiles alone
#define STAGE_PIXELS 8704
#define PIXEL_WORDS Conv::kWords
#define RING_PLANES Conv::kRing
#define RAW_PLANES kRaw
#define TURN_POSITIONS kTurn
#define STATIC_SHARED (33 << 10)
#endif

using namespace grad::narrow3d;
using namespace norms::narrow3d;
using Conv = Shape<value_t, CHANNELS_IN, CHANNELS_OUT, KERNEL_D, KERNEL_H, KERNEL_W, STAGE_PIXELS>;
static_assert(PIXEL_WORDS == Conv::kWords && RING_PLANES == Conv::kRing && RAW_PLANES == kRaw && TURN_POSITIONS == kTurn,
              "what was planned with");
template <class SharedStorage> constexpr bool kPlanned = sizeof(SharedStorage) <= STATIC_SHARED;

// One after the other: v - mean of the channels that won, like y (N, S); moments (2, N, kOut) of v, the
// convolution of x - shift: mean and standard deviation; which channel won, like y.
struct Kept {
  float *centred, *moments;
  index_t* index;
  Kept(float* kept, int64_t N, int64_t S)
      : centred(kept), moments(kept + N * S), index(reinterpret_cast<index_t*>(moments + 2 * N * Conv::kOut)) {}
};
