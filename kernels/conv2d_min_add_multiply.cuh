#pragma once
#include "core/tensor_core.cuh"
#include "grad/wide.cuh"
#include "store/grad_mask.cuh"
struct Tail {
  const float *conv_bias, *bias;  // (C)
  float constant, scale;

  struct Channel { float conv_bias, bias; };
  __device__ __forceinline__ Channel channel(int c, bool real) const {
    return {real ? conv_bias[c] : 0.f, real ? bias[c] : 0.f};
  }
  __device__ __forceinline__ float operator()(float v, const Channel& c) const {
    // The formula of conv2d_min_add_multiply.
    return (tensor_core::min_nan(v + c.conv_bias, constant) + c.bias) * scale;
  }
  __device__ __forceinline__ Mask mask(float v, const Channel& c) const {
    // The gradient of conv2d_min_add_multiply_fused.
    return {v + c.conv_bias > constant, v + c.conv_bias == constant};
  }
  __device__ __forceinline__ Gradient<2> gradient(float dy, const Mask& mask) const {
    // The gradient of conv2d_min_add_multiply_fused.
    const float outer = dy * scale;
    return {mask(outer), outer};
  }
};
