// Reductions over the lanes of a warp and the threads of a block, in double and in a fixed order.
#pragma once
#include "core/numerics.h"
#include "load/pack.cuh"

namespace load {

constexpr int kMostWarps = 8;  // of a block

// Valid in lane 0.
__device__ inline double warp_sum(double value) {
  for (int offset = 16; offset; offset /= 2) value += __shfl_down_sync(~0u, value, offset);
  return value;
}

__device__ inline Moments<double> warp_merge(Moments<double> moments) {
  for (int offset = 16; offset; offset /= 2)
    moments = moments.merge({__shfl_down_sync(~0u, moments.count, offset),
                             __shfl_down_sync(~0u, moments.mean, offset),
                             __shfl_down_sync(~0u, moments.m2, offset)});
  return moments;
}

// Valid in thread 0. Ends with a barrier, so it may be called again.
__device__ inline double block_sum(double value) {
  __shared__ double partial[kMostWarps];
  value = warp_sum(value);
  if (threadIdx.x % 32 == 0) partial[threadIdx.x / 32] = value;
  __syncthreads();  // every warp's sum is there
  if (threadIdx.x == 0)
    for (int warp = 1; warp < int(blockDim.x) / 32; warp++) value += partial[warp];
  __syncthreads();  // partial may be written again
  return value;
}

__device__ inline Moments<double> block_merge(Moments<double> moments) {
  __shared__ Moments<double> partial[kMostWarps];
  moments = warp_merge(moments);
  if (threadIdx.x % 32 == 0) partial[threadIdx.x / 32] = moments;
  __syncthreads();  // every warp's moments are there
  if (threadIdx.x == 0)
    for (int warp = 1; warp < int(blockDim.x) / 32; warp++) moments = moments.merge(partial[warp]);
  __syncthreads();  // partial may be written again
  return moments;
}

// A thread's sum of points. A pack, or a few, are summed as they are, those in double: what cancels leaves no rounding
// errors of large sums.
struct Sum {
  static constexpr int kFew = 4;
  double total = 0;
  real few = 0;
  int count = 0;
  template <class T> __device__ __forceinline__ void add(const T& x) {
    if constexpr (is_pack<T>) {
      typename T::element sum = x.at[0];
#pragma unroll
      for (int i = 1; i < T::size; i++) sum += x.at[i];
      total += sum;
    } else {
      few += x;
      if (++count == kFew) flush();
    }
  }
  __device__ __forceinline__ double value() {
    flush();
    return total;
  }

 private:
  __device__ __forceinline__ void flush() { total += few, few = 0, count = 0; }
};

// A thread's moments, from sums shifted by the first value that it sees.
struct ShiftedSums {
  real count = 0, shift = 0, sum = 0, square = 0;
  template <class T> __device__ __forceinline__ void add(const T& x) {
    if constexpr (is_pack<T>) {
#pragma unroll
      for (int i = 0; i < T::size; i++) add(x.at[i]);
    } else {
      if (count == 0) shift = x;
      const real d = x - shift;
      count += 1, sum += d, square += d * d;
    }
  }
  __device__ Moments<double> value() const { return Moments<double>::from_shifted(count, shift, sum, square); }
};

}  // namespace load
