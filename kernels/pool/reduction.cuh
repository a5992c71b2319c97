// What a window is reduced to: windows of (planes,) rows and columns, which don't overlap.
#pragma once
#include "core/tensor_core.cuh"

namespace pool {

struct Largest {  // or NaN
  static constexpr float kFirst = -INFINITY;
  static __device__ __forceinline__ float merge(float a, float b) { return tensor_core::max_nan(a, b); }
  static __device__ __forceinline__ bool beats(float a, float b) { return a > b; }
};
struct Smallest {
  static constexpr float kFirst = INFINITY;
  static __device__ __forceinline__ float merge(float a, float b) { return tensor_core::min_nan(a, b); }
  static __device__ __forceinline__ bool beats(float a, float b) { return a < b; }
};
// Does a value of a later place take the earlier one's? The first among equal ones wins, and the last NaN, as
// in torch's pools.
template <class Reduction> __device__ __forceinline__ bool takes(float later, float earlier) {
  return (later != later) | Reduction::beats(later, earlier);
}
struct Sum {
  static constexpr float kFirst = 0;
  static __device__ __forceinline__ float merge(float a, float b) { return a + b; }
};

template <class Reduction_, int... kExtents> struct Windows {
  using Reduction = Reduction_;
  static constexpr int kDims = sizeof...(kExtents), kExtent[] = {kExtents...};
  static constexpr int kDepth = kDims == 3 ? kExtent[0] : 1, kHeight = kExtent[kDims - 2],
                       kWidth = kExtent[kDims - 1], kArea = (kExtents * ...);
};

}  // namespace pool
