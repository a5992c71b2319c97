// Statistics of planes, and of groups of channels, in launches of their own.
#pragma once
#include "norm/formulas.h"
#include "core/reduce.cuh"
#include "core/vector.cuh"

// Running sums of one thread, shifted by the first value that it sees.
struct ShiftedSums {
  accumulate_t count = 0, shift = 0, sum = 0, square = 0;
  __device__ void add(accumulate_t v) {
    if (count == 0) shift = v;
    const accumulate_t d = v - shift;
    count += 1, sum += d, square += d * d;
  }
  __device__ Moments<double> moments() const {
    return Moments<double>::from_shifted(count, shift, sum, square);
  }
};

// mean and m2 (planes) of v (planes, size); a block per plane. With a conv_bias (C) means are
// those of mean_with.
__global__ void __launch_bounds__(kThreads)
plane_statistics_kernel(accumulate_t* mean, accumulate_t* m2, const value_t* v,
                        const accumulate_t* conv_bias, int64_t C, int64_t size, bool aligned) {
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
  if (threadIdx.x == 0) {
    const accumulate_t own = moments.mean;
    mean[blockIdx.x] = conv_bias ? mean_with(conv_bias[blockIdx.x % C], own) : own;
    m2[blockIdx.x] = moments.m2;
  }
}

// group_mean and group_rstd (N, G), a thread per group; and the copies of the biases.
__global__ void merge_groups_kernel(accumulate_t* group_mean, accumulate_t* group_rstd,
                                    const accumulate_t* mean, const accumulate_t* m2,
                                    const accumulate_t* conv_bias, accumulate_t eps, GroupShape shape,
                                    const accumulate_t* bias, accumulate_t* kept_conv_bias,
                                    accumulate_t* kept_bias) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  for (int c = i; c < shape.C; c += gridDim.x * blockDim.x)
    kept_conv_bias[c] = conv_bias[c], kept_bias[c] = bias[c];
  if (i < shape.N * shape.G)
    merge_group(group_mean, group_rstd, mean, m2, conv_bias, eps, shape, i / shape.G, i % shape.G);
}

// See group_gradient; a thread per group.
__global__ void group_gradient_kernel(accumulate_t* coefficients, accumulate_t* gradients,
                                      const accumulate_t* sums, const accumulate_t* mean,
                                      const accumulate_t* group_mean, const accumulate_t* group_rstd,
                                      const accumulate_t* conv_bias, const accumulate_t* weight,
                                      GroupShape shape) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < shape.N * shape.G)
    group_gradient(coefficients, gradients, sums, mean, group_mean, group_rstd, conv_bias, weight, shape,
                   i / shape.G, i % shape.G);
}
