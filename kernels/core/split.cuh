// Operands of tensor cores, made of float32: scaled by powers of two into the middle of float16's range, and
// split, since the sum of two float16, high + low, holds 22 bits of the 24.
#pragma once
#include <type_traits>

#include "core/scalar.h"

namespace tensor_core {

// --------------------------------------------------------------------------------------------- powers of two

__device__ __forceinline__ float power_of_two(int exponent) {  // -126 … 127
  return __int_as_float((exponent + 127) << 23);
}

constexpr int kTop = 14;  // a scaled magnitude lies in [2^14, 2^15), half of float16's range

// The exponent that brings `magnitude` to [2^top, 2^(top + 1)), one that power_of_two takes; 0 for zero, inf
// and NaN.
__device__ __forceinline__ int fitting_exponent(float magnitude, int top = kTop) {
  const int exponent = (__float_as_int(magnitude) >> 23 & 0xff) - 127;
  return magnitude == 0.f || exponent == 128 ? 0 : min(top - exponent, 126);
}

// That power of two itself, by the magnitude's bits; and what undoes it.
__device__ __forceinline__ float fitting_factor(unsigned magnitude) {
  return __uint_as_float(min((254u + kTop << 23) - (magnitude & 0x7f800000), 253u << 23));
}
__device__ __forceinline__ float inverse_factor(float factor) {
  return __uint_as_float((254u << 23) - __float_as_uint(factor));
}

// value · 2^exponent for -252 ≤ exponent ≤ 254: one factor may not be a float32.
struct PowerOfTwo {
  float first, second;
  __device__ __forceinline__ explicit PowerOfTwo(int exponent)
      : first(power_of_two(exponent / 2)), second(power_of_two(exponent - exponent / 2)) {}
  __device__ __forceinline__ float operator()(float value) const { return value * first * second; }
};

// ---------------------------------------------------------------------------------------------------- halves

// Two values rounded to float16, or to bfloat16, in one register, the first in its low half.
template <class Operand = half_t> __device__ __forceinline__ uint32_t pack(float first, float second) {
  if constexpr (std::is_same_v<Operand, half_t>) {
    const __half2 both = __floats2half2_rn(first, second);
    return reinterpret_cast<const uint32_t&>(both);
  } else {
    const __nv_bfloat162 both = __floats2bfloat162_rn(first, second);
    return reinterpret_cast<const uint32_t&>(both);
  }
}

// What is left of two values that were packed.
template <class Operand = half_t>
__device__ __forceinline__ float2 residual(float first, float second, uint32_t packed) {
  if constexpr (std::is_same_v<Operand, half_t>) {
    const float2 high = __half22float2(reinterpret_cast<const __half2&>(packed));
    return make_float2(first - high.x, second - high.y);
  } else {
    const float2 high = __bfloat1622float2(reinterpret_cast<const __nv_bfloat162&>(packed));
    return make_float2(first - high.x, second - high.y);
  }
}

// Two values as the sum of two float16 each (or bfloat16), high + low; 22 bits (16) as long as low is normal.
// NaN, inf and what the type can't hold make both halves not finite.
struct Halves {
  uint32_t high, low;
};
template <class Operand = half_t> __device__ __forceinline__ Halves split(float first, float second) {
  const uint32_t high = pack<Operand>(first, second);
  const float2 low = residual<Operand>(first, second, high);
  return {high, pack<Operand>(low.x, low.y)};
}

}  // namespace tensor_core
