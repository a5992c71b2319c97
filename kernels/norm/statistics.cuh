// Statistics of planes, and of groups of channels, in launches of their own.
#pragma once
#include "norm/formulas.h"
#include "core/reduce.cuh"
#include "core/vector.cuh"

// Running sums of one thread, shifted by the first value that it sees.
template <class T = accumulate_t>
struct ShiftedSums {
  T count = 0, shift = 0, sum = 0, square = 0;
  __device__ void add(T v) {
    if (count == 0) shift = v;
    const T d = v - shift;
    count += 1, sum += d, square += d * d;
  }
  __device__ Moments<double> moments() const {
    return Moments<double>::from_shifted(count, shift, sum, square);
  }
};

// The moments of a plane, summed in T by a team of threads: a warp's, or a block's, where thread 0 has them.
template <class T, int kTeam>
__device__ Moments<double> team_moments(const value_t* plane, int64_t size, bool aligned) {
  const int own = threadIdx.x % kTeam;
  ShiftedSums<T> sums;
  if (aligned) {
#pragma unroll 4
    for (int64_t i = own; i < size / kVector; i += kTeam) {
      const auto four = load_vector(plane + i * kVector);
#pragma unroll
      for (int j = 0; j < kVector; j++) sums.add(T(four.at[j]));
    }
  } else {
    for (int64_t i = own; i < size; i += kTeam) sums.add(T(plane[i]));
  }
  if constexpr (kTeam == 32)
    return merge_lanes<32>(sums.moments());
  else
    return block_merge(sums.moments());
}

// mean and m2 (planes) of v (planes, size), a team per plane. With a conv_bias (C) means are those of
// mean_with, and m2's place takes the standard deviation: of values whose squares overflow, too.
template <int kTeam>
__global__ void __launch_bounds__(kThreads)
    plane_statistics_kernel(accumulate_t* mean, accumulate_t* m2, const value_t* v,
                            const accumulate_t* conv_bias, int64_t planes, int64_t C, int64_t size,
                            bool aligned) {
  const int64_t plane = int64_t(blockIdx.x) * (kThreads / kTeam) + threadIdx.x / kTeam;
  if (plane >= planes) return;  // a whole team
  const bool leads = threadIdx.x % kTeam == 0;
  Moments<double> moments = team_moments<accumulate_t, kTeam>(v + plane * size, size, aligned);
  if (conv_bias) {
    const bool overflows = leads && !isfinite(moments.m2);
    if (kTeam == 32 ? __any_sync(~0u, overflows) : __syncthreads_or(overflows))
      moments = team_moments<double, kTeam>(v + plane * size, size, aligned);
  }
  if (!leads) return;
  const accumulate_t own = moments.mean;
  mean[plane] = conv_bias ? mean_with(conv_bias[plane % C], own) : own;
  m2[plane] = conv_bias ? sqrt(moments.variance()) : moments.m2;
}

// Is a plane so small that most of a block's threads would have none of its vectors?
inline bool suits_a_warp(int64_t size) { return size <= 32 * kVector * 8; }

inline void plane_statistics(accumulate_t* mean, accumulate_t* m2, const value_t* v,
                             const accumulate_t* conv_bias, int64_t planes, int64_t C, int64_t size,
                             cudaStream_t stream) {
  const auto kernel = suits_a_warp(size) ? plane_statistics_kernel<32> : plane_statistics_kernel<kThreads>;
  const unsigned blocks = suits_a_warp(size) ? blocks_for(planes, kWarps) : unsigned(planes);
  kernel<<<blocks, kThreads, 0, stream>>>(mean, m2, v, conv_bias, planes, C, size, vectors_fit(v, size));
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
