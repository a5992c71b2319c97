// Dropout's mask: which elements are kept is a function of (seed, element) alone, four neighbours share a
// draw.
#pragma once
#include <math.h>

#include "core/philox.h"

struct DropoutMask {
  const int64_t* seed;
  int64_t number;      // seed_of(seed, number) is what is drawn by
  uint32_t threshold;  // kept: lane >= threshold, which is dropout_keeps in integers; 0: all are
  float scale;         // 1 where all are kept
  // By which an element is multiplied, given its lane of a draw: NaN stays NaN.
  __device__ __forceinline__ float factor(uint32_t random) const { return random >= threshold ? scale : 0.f; }
};

inline DropoutMask dropout_mask(const int64_t* seed, int64_t number, double p) {
  const double kept_from = ceil(double(float(p)) * 0x1p24) * 256;  // p = 1 drops everything: its scale is 0
  const uint32_t threshold = kept_from >= 0x1p32 ? 0xffffffffu : uint32_t(kept_from);
  return {seed, number, threshold, float(float(p) < 1 ? 1 / (1 - p) : 0)};
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
      uint32_t (&c)[4] = draws[i].lane;
      const uint64_t p0 = uint64_t(0xD2511F53u) * c[0], p1 = uint64_t(0xCD9E8D57u) * c[2];
      const uint32_t n0 = uint32_t(p1 >> 32) ^ c[1] ^ k0, n2 = uint32_t(p0 >> 32) ^ c[3] ^ k1;
      c[0] = n0, c[1] = uint32_t(p1), c[2] = n2, c[3] = uint32_t(p0);
    }
}

// Which of 32 elements are kept, a bit each: from `first` on, and 4·apart further. A draw serves four of
// them; the four lanes of a channel share theirs.
__device__ __forceinline__ void kept_elements(uint32_t (&kept)[2], const DropoutMask& mask, uint64_t seed,
                                              int64_t first, int64_t apart) {
  kept[0] = kept[1] = ~0u;
  if (!mask.threshold) return;
  const auto of_draw = [&](const Philox4& draw) {
    uint32_t bits = 0;
#pragma unroll
    for (int k = 0; k < 4; k++) bits |= uint32_t(draw.lane[k] >= mask.threshold) << k;
    return bits;
  };
  const int t = threadIdx.x % 4, shift = int(first % 4);
  const uint64_t own = first / 4 + t;
  Philox4 draws[4];
  draw(draws, seed, {own, own + 4, own + apart, own + apart + 4});
#pragma unroll
  for (int r = 0; r < 2; r++) {
    kept[r] = of_draw(draws[2 * r]) << 4 * t | of_draw(draws[2 * r + 1]) << (16 + 4 * t);
    kept[r] |= __shfl_xor_sync(~0u, kept[r], 1);
    kept[r] |= __shfl_xor_sync(~0u, kept[r], 2);
  }
  if (shift == 0) return;
  Philox4 last[2];
  draw(last, seed, {uint64_t(first / 4 + 8), uint64_t(first / 4 + apart + 8)});
#pragma unroll
  for (int r = 0; r < 2; r++) kept[r] = kept[r] >> shift | of_draw(last[r]) << (32 - shift);
}
