// Reductions over the lanes of a warp and the threads of a block, in double and in a fixed order.
#pragma once
#include "core/launch.cuh"
#include "core/numerics.h"
#include "load/extreme.cuh"
#include "load/largest.h"
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

// A thread's sum of points. A pack, or a few, are summed as they are, those in double: what cancels leaves no
// rounding errors of large sums.
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
  __device__ Moments<double> value() const {
    return Moments<double>::from_shifted(count, shift, sum, square);
  }
};

// Of a warp's lanes, valid in lane 0, which has seen a value if any has: all sums are shifted by its shift,
// then added. So there are no divisions but the last.
__device__ inline Moments<double> warp_moments(const ShiftedSums& own) {
  const double shift = __shfl_sync(~0u, own.shift, 0), d = own.count == 0 ? 0 : own.shift - shift;
  double count = own.count, sum = own.sum + count * d,
         square = own.square + d * (2 * double(own.sum) + count * d);
  for (int offset = 16; offset; offset /= 2) {
    count += __shfl_down_sync(~0u, count, offset);
    sum += __shfl_down_sync(~0u, sum, offset);
    square += __shfl_down_sync(~0u, square, offset);
  }
  return Moments<double>::from_shifted(count, shift, sum, square);
}

// Valid in thread 0; as warp_moments, warp by warp.
__device__ inline Moments<double> block_moments(const ShiftedSums& own) {
  __shared__ Moments<double> partial[kMostWarps];
  Moments<double> moments = warp_moments(own);
  if (threadIdx.x % 32 == 0) partial[threadIdx.x / 32] = moments;
  __syncthreads();  // every warp's moments are there
  if (threadIdx.x == 0)
    for (int warp = 1; warp < int(blockDim.x) / 32; warp++) moments = moments.merge(partial[warp]);
  __syncthreads();  // partial may be written again
  return moments;
}

// A thread's maximum of points, which come in ascending order.
template <bool kPool> struct LargestOf {
  Extreme<1, real> best;
  template <class T, class At> __device__ __forceinline__ void add(const T& x, const At& at) {
#pragma unroll
    for (int i = 0; i < math::Traits<T>::lanes; i++) {
      if constexpr (kPool) best.take_last(lane_of(x, i), at.place_of(i));
      else best.take(lane_of(x, i), at.place_of(i));
    }
  }
  __device__ __forceinline__ Largest<kPool> value() const { return {best.value, best.index}; }
};

template <bool kPool> __device__ inline Largest<kPool> of_lane_behind(const Largest<kPool>& a, int offset) {
  return {__shfl_down_sync(~0u, a.most, offset), __shfl_down_sync(~0u, int(a.place), offset)};
}
// Valid in lane 0.
template <bool kPool> __device__ inline Largest<kPool> warp_largest(Largest<kPool> own) {
  for (int offset = 16; offset; offset /= 2) own.merge(of_lane_behind(own, offset));
  return own;
}
// Valid in thread 0; as block_sum.
template <bool kPool> __device__ inline Largest<kPool> block_largest(Largest<kPool> own) {
  __shared__ double most[kMostWarps];
  __shared__ int place[kMostWarps];
  own = warp_largest(own);
  if (threadIdx.x % 32 == 0) most[threadIdx.x / 32] = own.most, place[threadIdx.x / 32] = int(own.place);
  __syncthreads();  // every warp's is there
  if (threadIdx.x == 0)
    for (int warp = 1; warp < int(blockDim.x) / 32; warp++) own.merge({most[warp], place[warp]});
  __syncthreads();  // they may be written again
  return own;
}

// Of many parts of a plane, which blocks made, the sum, the moments or the maximum: out (planes), of (planes,
// parts). A warp has a plane.
constexpr int kMergingThreads = 256, kFewParts = 32;
__device__ inline double warp_merged(double a) { return warp_sum(a); }
__device__ inline Moments<double> warp_merged(const Moments<double>& a) { return warp_merge(a); }
template <bool kPool> __device__ inline Largest<kPool> warp_merged(const Largest<kPool>& a) {
  return warp_largest(a);
}
__device__ inline void take(double& a, double b) { a += b; }
__device__ inline void take(Moments<double>& a, const Moments<double>& b) { a = a.merge(b); }
template <bool kPool> __device__ inline void take(Largest<kPool>& a, const Largest<kPool>& b) { a.merge(b); }

template <class T>
__global__ void __launch_bounds__(kMergingThreads)
    merge_parts_kernel(T* out, const T* of, int64_t planes, int64_t parts) {
  await_previous_kernel();
  const int64_t plane = (int64_t(blockIdx.x) * kMergingThreads + threadIdx.x) / 32;
  if (plane >= planes) return;
  T own{};
  for (int64_t i = threadIdx.x % 32; i < parts; i += 32) take(own, of[plane * parts + i]);
  own = warp_merged(own);
  if (threadIdx.x % 32 == 0) out[plane] = own;
}

}  // namespace load
