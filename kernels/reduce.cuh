// Reductions over a block in a fixed order, so that results are bitwise equal from run to run; and statistics of planes.
#pragma once
#include "normalisation.h"
#include "vector.cuh"

constexpr int kThreads = 256;  // of every block that reduces
constexpr int kWarps = kThreads / 32;

// `values` summed over the block; the result is valid in thread 0. Ends with a barrier, so it may be called again.
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

// The block's moments merged, in double so that the mean is rounded once; valid in thread 0.
__device__ inline Moments<double> block_merge(Moments<double> moments) {
  __shared__ Moments<double> partial[kWarps];
  for (int offset = 16; offset; offset /= 2)
    moments = moments.merge({__shfl_down_sync(~0u, moments.count, offset), __shfl_down_sync(~0u, moments.mean, offset),
                             __shfl_down_sync(~0u, moments.m2, offset)});
  if (threadIdx.x % 32 == 0) partial[threadIdx.x / 32] = moments;
  __syncthreads();  // every warp's moments are there
  if (threadIdx.x == 0)
    for (int warp = 1; warp < kWarps; warp++) moments = moments.merge(partial[warp]);
  return moments;
}

// Running sums of one thread, shifted by the first value that it sees.
struct ShiftedSums {
  accumulate_t count = 0, shift = 0, sum = 0, square = 0;
  __device__ void add(accumulate_t v) {
    if (count == 0) shift = v;
    const accumulate_t d = v - shift;
    count += 1, sum += d, square += d * d;
  }
  __device__ Moments<double> moments() const { return Moments<double>::from_shifted(count, shift, sum, square); }
};

// mean and m2 (planes) of v (planes, size); a block per plane.
__global__ void __launch_bounds__(kThreads)
plane_statistics_kernel(accumulate_t* mean, accumulate_t* m2, const value_t* v, int64_t size, bool aligned) {
  const value_t* plane = v + int64_t(blockIdx.x) * size;
  ShiftedSums sums;
  if (aligned) {
#pragma unroll 4
    for (int64_t i = threadIdx.x; i < size / kVector; i += kThreads) {
      const auto four = load_vector(plane + i * kVector);
#pragma unroll
      for (int j = 0; j < kVector; j++) sums.add(accumulate_t(four.at[j]));
    }
  } else {
    for (int64_t i = threadIdx.x; i < size; i += kThreads) sums.add(accumulate_t(plane[i]));
  }
  const Moments<double> moments = block_merge(sums.moments());
  if (threadIdx.x == 0) mean[blockIdx.x] = moments.mean, m2[blockIdx.x] = moments.m2;
}

// group_mean and group_rstd (N, G); a thread per group.
__global__ void merge_groups_kernel(accumulate_t* group_mean, accumulate_t* group_rstd, const accumulate_t* mean,
                                    const accumulate_t* m2, const accumulate_t* conv_bias, accumulate_t eps,
                                    GroupShape shape) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < shape.N * shape.G) merge_group(group_mean, group_rstd, mean, m2, conv_bias, eps, shape, i / shape.G, i % shape.G);
}

// See group_gradient; a thread per group.
__global__ void group_gradient_kernel(accumulate_t* coefficients, accumulate_t* gradients, const accumulate_t* sums,
                                      const accumulate_t* mean, const accumulate_t* group_mean,
                                      const accumulate_t* group_rstd, const accumulate_t* conv_bias,
                                      const accumulate_t* weight, GroupShape shape) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < shape.N * shape.G)
    group_gradient(coefficients, gradients, sums, mean, group_mean, group_rstd, conv_bias, weight, shape, i / shape.G,
                   i % shape.G);
}

// totals (count), of C or 1 elements, from values (rows, C): summed over the rows, and over all where there is one, in double and in
// a fixed order. A block per total.
template <class T>
__global__ void __launch_bounds__(kThreads) sum_rows_kernel(accumulate_t* totals, const T* values, int64_t rows, int64_t C) {
  __shared__ double partial[kThreads];
  const bool all = gridDim.x == 1;
  const int64_t first = all ? 0 : blockIdx.x, step = all ? 1 : C, end = rows * C;
  double sum = 0;
  for (int64_t i = first + threadIdx.x * step; i < end; i += kThreads * step) sum += values[i];
  partial[threadIdx.x] = sum;
  for (int half = kThreads / 2; half; half /= 2) {
    __syncthreads();  // the sums of twice as many threads are there
    if (threadIdx.x < half) partial[threadIdx.x] += partial[threadIdx.x + half];
  }
  if (threadIdx.x == 0) totals[blockIdx.x] = accumulate_t(partial[0]);
}

inline unsigned blocks_for(int64_t work, int threads) { return unsigned((work + threads - 1) / threads); }

// Blocks that share a plane of `size` elements, so that each thread has 16 or so.
inline unsigned chunks_for(int64_t size) { return unsigned(size / (kThreads * 16) + 1); }
