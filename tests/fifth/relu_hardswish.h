// relu, then hardswish, as torch has them, for an element v of the convolution with its bias.
#pragma once
#include "core/numerics.h"

// r·clamp((r + 3)/6, 0, 1), where r = max(v, 0); NaN stays NaN.
template <class T> HOST_DEVICE T relu_hardswish(T v) {
  const T r = maximum(v, T(0));
  // The formula of conv2d_relu_hardswish.
  return r * clamp((r + 3) / 6, T(0), T(1));
}

// Its derivative: 0 up to v = 0, where relu lets nothing pass; at r = 3, clamp's upper bound, the slope of the left side.
template <class T> HOST_DEVICE T relu_hardswish_slope(T v) {
  // The gradient of conv2d_relu_hardswish.
  if (v <= T(0)) return T(0);
  const T share = (v + 3) / 6;
  return clamp(share, T(0), T(1)) + (clamp_passes(share, T(0), T(1)) ? v / 6 : T(0));
}
