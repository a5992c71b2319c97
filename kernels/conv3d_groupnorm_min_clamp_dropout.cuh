// What forward and backward of this model with the convolution inside share: how an element of the
// convolution of x - shift becomes the normalised value z, which z pass a gradient, and the mask.
#pragma once
#include "conv/narrow3d_tile.cuh"
#include "core/philox.h"
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

// z = sum·slope + bias of a channel of a sample: slope = weight·rstd, and bias has the mean in it, as in
// eager: rounded like this, z is hardly ever exactly what it is compared with unless the numbers say so. v -
// mean = sum + offset.
struct alignas(16) Affine {
  float offset, slope, bias, rstd;
  __device__ __forceinline__ float operator()(float sum) const { return fmaf(sum, slope, bias); }
};

struct DropoutMask {
  const int64_t* seed;
  int64_t number;      // seed_of(seed, number) is what is drawn by
  uint32_t threshold;  // kept: lane >= threshold, which is dropout_keeps in integers; 0: all are
  float scale;         // 1 where all are kept
};

inline DropoutMask dropout_mask(const int64_t* seed, int64_t number, double p) {
  const double kept_from = ceil(double(float(p)) * 0x1p24) * 256;  // p = 1 drops everything: its scale is 0
  const uint32_t threshold = kept_from >= 0x1p32 ? 0xffffffffu : uint32_t(kept_from);
  return {seed, number, threshold, float(float(p) < 1 ? 1 / (1 - p) : 0)};
}

// The only z with a gradient behind min and clamp, half of the result's: low. NaN, which no z equals, where
// the bounds are swapped.
inline float tied_value(double low, double high) {
  // The gradient of conv3d_groupnorm_min_clamp_dropout_fused.
  return float(low) <= float(high) ? float(low) : NAN;
}

// philox(seed, counters[i]), as in core/philox.h, for several i side by side, which share the keys.
template <int kCount>
__device__ __forceinline__ void draw(Philox4 (&draws)[kCount], uint64_t seed,
                                     const uint64_t (&counters)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; i++) draws[i] = {{uint32_t(counters[i]), uint32_t(counters[i] >> 32), 0, 0}};
  uint32_t k0 = uint32_t(seed), k1 = uint32_t(seed >> 32);
#pragma unroll
  for (int round = 0; round < 10; round++, k0 += 0x9E3779B9u, k1 += 0xBB67AE85u)
#pragma unroll
    for (int i = 0; i < kCount; i++) {
      uint32_t(&c)[4] = draws[i].lane;
      const uint64_t p0 = uint64_t(0xD2511F53u) * c[0], p1 = uint64_t(0xCD9E8D57u) * c[2];
      const uint32_t n0 = uint32_t(p1 >> 32) ^ c[1] ^ k0, n2 = uint32_t(p0 >> 32) ^ c[3] ^ k1;
      c[0] = n0, c[1] = uint32_t(p1), c[2] = n2, c[3] = uint32_t(p0);
    }
}
