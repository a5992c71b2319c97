// The nearest value of TF32's, ties away from zero (cvt.rna.tf32): so the library rounds operands in planes;
// from operands in channels last a tensor core cuts the other bits off. No other type runs in TF32.
#pragma once
#include <cstdint>

__device__ inline float nearest_tf32(float v) {
  const bool stays_finite = fabsf(v) < 0x1.ffep127f;  // and is not NaN
  return stays_finite ? __uint_as_float((__float_as_uint(v) + 0x1000) & ~0x1fffu) : v;
}
template <class T> __device__ T nearest_tf32(T v) { return v; }
