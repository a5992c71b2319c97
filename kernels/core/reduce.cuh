// Reductions over a block in a fixed order, so that results are bitwise equal from run to run.
#pragma once
#include "core/launch.cuh"
#include "core/numerics.h"

constexpr int kThreads = 256;  // of every block that reduces
constexpr int kWarps = kThreads / 32;

// Blocks that share a plane of `size` elements, so that each thread has 16 or so.
inline unsigned chunks_for(int64_t size) { return unsigned(size / (kThreads * 16) + 1); }

// `values` summed over the block; the result is valid in thread 0. Ends with a barrier, so it may be called
// again.
template <int kCount> __device__ void block_sum(accumulate_t (&values)[kCount]) {
  __shared__ accumulate_t partial[kWarps][kCount];
#pragma unroll
  for (int i = 0; i < kCount; i++)
    for (int offset = 16; offset; offset /= 2) values[i] += __shfl_down_sync(~0u, values[i], offset);
  if (threadIdx.x % 32 == 0)
    for (int i = 0; i < kCount; i++) partial[threadIdx.x / 32][i] = values[i];
  __syncthreads();  // every warp's sum is there
  if (threadIdx.x == 0)
    for (int i = 0; i < kCount; i++) {
      values[i] = 0;
      for (int warp = 0; warp < kWarps; warp++) values[i] += partial[warp][i];
    }
  __syncthreads();  // partial may be written again
}

// The moments of kLanes neighbouring lanes, a power of two, merged in each of them.
template <int kLanes, class T> __device__ __forceinline__ Moments<T> merge_lanes(Moments<T> moments) {
#pragma unroll 1
  for (int mask = 1; mask < kLanes; mask *= 2)
    moments =
        moments.merge({__shfl_xor_sync(~0u, moments.count, mask), __shfl_xor_sync(~0u, moments.mean, mask),
                       __shfl_xor_sync(~0u, moments.m2, mask)});
  return moments;
}

// The block's moments merged, in double so that the mean is rounded once; valid in thread 0.
__device__ inline Moments<double> block_merge(Moments<double> moments) {
  __shared__ Moments<double> partial[kWarps];
  for (int offset = 16; offset; offset /= 2)
    moments = moments.merge({__shfl_down_sync(~0u, moments.count, offset),
                             __shfl_down_sync(~0u, moments.mean, offset),
                             __shfl_down_sync(~0u, moments.m2, offset)});
  if (threadIdx.x % 32 == 0) partial[threadIdx.x / 32] = moments;
  __syncthreads();  // every warp's moments are there
  if (threadIdx.x == 0)
    for (int warp = 1; warp < kWarps; warp++) moments = moments.merge(partial[warp]);
  return moments;
}

// What values (rows, C) are summed to: C sums over the rows, or 1 over all.
struct RowSums {
  accumulate_t* at;
  int64_t count;
};
template <int kCount> struct ManyRowSums {
  RowSums of[kCount];
};

// Each of `sums` of its own of values (kCount, rows, C), in double and in a fixed order. A block per sum.
template <int kCount, class T>
__global__ void __launch_bounds__(kThreads)
    sum_rows_kernel(ManyRowSums<kCount> sums, const T* values, int64_t rows, int64_t C) {
  __shared__ double partial[kThreads];
  const RowSums own = sums.of[blockIdx.y];
  if (blockIdx.x >= own.count) return;
  values += blockIdx.y * rows * C;
  const bool all = own.count == 1;
  const int64_t first = all ? 0 : blockIdx.x, step = all ? 1 : C, end = rows * C;
  double sum = 0;
  for (int64_t i = first + threadIdx.x * step; i < end; i += kThreads * step) sum += values[i];
  partial[threadIdx.x] = sum;
  for (int half = kThreads / 2; half; half /= 2) {
    __syncthreads();  // the sums of twice as many threads are there
    if (threadIdx.x < half) partial[threadIdx.x] += partial[threadIdx.x + half];
  }
  if (threadIdx.x == 0) own.at[blockIdx.x] = accumulate_t(partial[0]);
}

template <int kCount, class T>
void sum_rows(const RowSums (&sums)[kCount], const T* values, int64_t rows, int64_t C, cudaStream_t stream) {
  ManyRowSums<kCount> all;
  for (int i = 0; i < kCount; i++) all.of[i] = sums[i];
  sum_rows_kernel<<<dim3(unsigned(C), kCount), kThreads, 0, stream>>>(all, values, rows, C);
}
