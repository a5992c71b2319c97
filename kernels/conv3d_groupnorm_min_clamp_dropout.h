// What the CPU and a GPU compute behind the normalisation, where the library convolves.
#pragma once
#include "core/numerics.h"

// clamp(min(z, low), low, high) and its derivative.
template <class T> struct MinClamp {
  T low, high;
  // The formula of conv3d_groupnorm_min_clamp_dropout.
  HOST_DEVICE T operator()(T z) const { return clamp(minimum(z, low), low, high); }
  // The gradient of conv3d_groupnorm_min_clamp_dropout.
  HOST_DEVICE T gradient(T z) const {
    return clamp_passes(minimum(z, low), low, high) ? minimum_backward(T(1), z, low) : T(0);
  }
};
