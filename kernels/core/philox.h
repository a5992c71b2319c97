// Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011): a dropout mask that
// is a function of (seed, element), so that the backward pass draws the same one again.
#pragma once
#include "core/scalar.h"

struct Philox4 {
  uint32_t lane[4];
};

HOST_DEVICE Philox4 philox(uint64_t seed, uint64_t counter) {
  uint32_t c0 = uint32_t(counter), c1 = uint32_t(counter >> 32), c2 = 0, c3 = 0;
  uint32_t k0 = uint32_t(seed), k1 = uint32_t(seed >> 32);
#ifdef __CUDACC__
#pragma unroll
#endif
  for (int round = 0; round < 10; round++) {
    uint64_t p0 = uint64_t(0xD2511F53u) * c0, p1 = uint64_t(0xCD9E8D57u) * c2;
    uint32_t n0 = uint32_t(p1 >> 32) ^ c1 ^ k0, n2 = uint32_t(p0 >> 32) ^ c3 ^ k1;
    c1 = uint32_t(p1), c3 = uint32_t(p0), c0 = n0, c2 = n2;
    k0 += 0x9E3779B9u, k1 += 0xBB67AE85u;
  }
  return {{c0, c1, c2, c3}};
}

// What a mask is drawn by: the seed that lies on the device, or where there is none (null) the number.
HOST_DEVICE uint64_t seed_of(const int64_t* seed, int64_t number) { return uint64_t(seed ? *seed : number); }

// Is an element kept, given its lane of philox(seed, element / 4)? True with probability 1 - p.
HOST_DEVICE bool dropout_keeps(uint32_t lane, double p) { return float(lane >> 8) * 0x1p-24f >= float(p); }
