// float32 values as sums of two float16, and powers of two that bring them into float16's range.
#pragma once
#include "scalar.h"

namespace tensor_core {

constexpr int kTop = 14;  // a scaled magnitude lies in [2^14, 2^15), half of float16's range

__device__ __forceinline__ float power_of_two(int exponent) { return __int_as_float((exponent + 127) << 23); }  // -126 … 127

// The exponent that brings `magnitude` to [2^14, 2^15), one that power_of_two takes; 0 for zero, inf and NaN.
__device__ __forceinline__ int fitting_exponent(float magnitude) {
  const int exponent = (__float_as_int(magnitude) >> 23 & 0xff) - 127;
  return magnitude == 0.f || exponent == 128 ? 0 : min(kTop - exponent, 126);
}

// value · 2^exponent for -252 ≤ exponent ≤ 254: one factor may not be a float32.
struct PowerOfTwo {
  float first, second;
  __device__ __forceinline__ explicit PowerOfTwo(int exponent)
      : first(power_of_two(exponent / 2)), second(power_of_two(exponent - exponent / 2)) {}
  __device__ __forceinline__ float operator()(float value) const { return value * first * second; }
};

// Two values as the sum of two float16 each, high + low; the first value is in the low half of each register. 22 bits as long
// as low is normal. NaN, inf and what float16 can't hold make both halves not finite.
struct Halves { uint32_t high, low; };
__device__ __forceinline__ Halves split(float first, float second) {
  const __half2 high = __floats2half2_rn(first, second);
  const float2 back = __half22float2(high);
  const __half2 low = __floats2half2_rn(first - back.x, second - back.y);
  return {reinterpret_cast<const uint32_t&>(high), reinterpret_cast<const uint32_t&>(low)};
}

}  // namespace tensor_core
