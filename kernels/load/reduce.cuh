// Reductions over the lanes of a warp and the threads of a block, in double and in a fixed order.
#pragma once
#include "core/launch.cuh"
#include "core/numerics.h"
#include "load/extreme.cuh"
#include "load/largest.h"
#include "load/pack.cuh"

namespace load {

constexpr int kMostWarps = 8;  // of a block

// Of some neighbouring lanes, a power of two, valid in the first.
__device__ __forceinline__ double of_lanes(double value, int lanes) {
  for (int offset = lanes / 2; offset; offset /= 2) value += __shfl_down_sync(~0u, value, offset);
  return value;
}

// Of `sharing` neighbouring threads, which are such lanes, or the block. Valid in the first. A block's ends
// with a barrier, so it may be called again.
__device__ inline double sum_of(double value, int sharing) {
  if (sharing <= 32) return of_lanes(value, sharing);
  __shared__ double partial[kMostWarps];
  value = of_lanes(value, 32);
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

// … of which the first has seen a value if any has: all sums are shifted by its shift, then added. So there
// are no divisions but the last.
__device__ __forceinline__ Moments<double> of_lanes(const ShiftedSums& own, int lanes) {
  const int first = int(threadIdx.x) % 32 / lanes * lanes;
  const double shift = __shfl_sync(~0u, own.shift, first), d = own.count == 0 ? 0 : own.shift - shift;
  double count = own.count, sum = own.sum + count * d,
         square = own.square + d * (2 * double(own.sum) + count * d);
  for (int offset = lanes / 2; offset; offset /= 2) {
    count += __shfl_down_sync(~0u, count, offset);
    sum += __shfl_down_sync(~0u, sum, offset);
    square += __shfl_down_sync(~0u, square, offset);
  }
  return Moments<double>::from_shifted(count, shift, sum, square);
}

// As sum_of; a warp's, then warp by warp.
__device__ inline Moments<double> moments_of(const ShiftedSums& own, int sharing) {
  if (sharing <= 32) return of_lanes(own, sharing);
  __shared__ Moments<double> partial[kMostWarps];
  Moments<double> moments = of_lanes(own, 32);
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
template <bool kPool> __device__ __forceinline__ Largest<kPool> of_lanes(Largest<kPool> own, int lanes) {
  for (int offset = lanes / 2; offset; offset /= 2) own.merge(of_lane_behind(own, offset));
  return own;
}
// As sum_of.
template <bool kPool> __device__ inline Largest<kPool> largest_of(Largest<kPool> own, int sharing) {
  if (sharing <= 32) return of_lanes(own, sharing);
  __shared__ double most[kMostWarps];
  __shared__ int place[kMostWarps];
  own = of_lanes(own, 32);
  if (threadIdx.x % 32 == 0) most[threadIdx.x / 32] = own.most, place[threadIdx.x / 32] = int(own.place);
  __syncthreads();  // every warp's is there
  if (threadIdx.x == 0)
    for (int warp = 1; warp < int(blockDim.x) / 32; warp++) own.merge({most[warp], place[warp]});
  __syncthreads();  // they may be written again
  return own;
}

__device__ inline void take(double& a, double b) { a += b; }
__device__ inline void take(Moments<double>& a, const Moments<double>& b) { a = a.merge(b); }
template <bool kPool> __device__ inline void take(Largest<kPool>& a, const Largest<kPool>& b) { a.merge(b); }

}  // namespace load
