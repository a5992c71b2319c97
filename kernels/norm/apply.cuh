// Group normalisation and what follows it, from partial moments of v (norm/moments.cuh): the statistics
// merged, then y of values that are far fewer than v's, or as many.
#pragma once
#include "core/reduce.cuh"
#include "core/tensor_core.cuh"
#include "core/vector.cuh"
#include "norm/formulas.h"

namespace norms {  // CUDA has a function `norm`

// What group normalisation takes, and its tail: z = (v + conv_bias - mean)·rstd·weight + bias; y = tail(z,
// channel). Where the squares of a group's values add up to more than float32 holds (from 1e17 or so on), the
// variance is infinite, its inverse root 0, and the bias is left, as in eager on a GPU.
struct Group {
  const accumulate_t *conv_bias, *weight, *bias;  // (C)
};

// What backward reads, a copy of the biases among it; each may be null, but for all of them at once.
struct Kept {
  accumulate_t *conv_bias, *bias;         // (N, C)
  accumulate_t *group_mean, *group_rstd;  // (N, G)
  uint8_t* flat;  // (N, C), or null: do all values of a channel tie behind the normalisation?
};

constexpr int kAhead = 4;  // vectors that a thread fetches before all else

// y (N, C, size) from v like it, and partial (N, C, parts, 3). `chunks` blocks per group. A channel's slope
// and what its tail needs are 16 bytes or more, of kChannels at most.
template <int kChannels, class Tail>
__global__ void __launch_bounds__(kThreads, 5)
    finish_kernel(output_t* y, Kept kept, const accumulate_t* partial, const float* v, Group group_norm,
                  Tail tail, accumulate_t eps, GroupShape shape, int64_t size_of_plane, int parts, int chunks,
                  bool aligned) {
  await_previous_kernel();
  struct alignas(16) Channel {
    float offset, slope, bias;
    typename Tail::Channel tail;
  };
  __shared__ Moments<accumulate_t> of_channel[kChannels];
  __shared__ Channel affine[kChannels];
  const int64_t group = blockIdx.x / chunks, n = group / shape.G, g = group % shape.G;
  const int channels = int(shape.channels()), chunk = int(blockIdx.x % chunks);
  const int64_t first = n * shape.C + g * channels;  // channel
  const float* in = v + first * size_of_plane;
  output_t* out = y + first * size_of_plane;
  const int size = int(channels * size_of_plane), plane = int(size_of_plane),
            begin = chunk * kThreads + threadIdx.x;
  const int step = chunks * kThreads;
  Vector<float> ahead[kAhead];  // on their way while the statistics are merged
#pragma unroll
  for (int k = 0; k < kAhead; k++)
    if (aligned && begin + k * step < size / kVector)
      ahead[k] = reinterpret_cast<const Vector<float>*>(in)[begin + k * step];
  // Every block of a group finds the same statistics; the first one writes them.
  for (int c = threadIdx.x; c < channels; c += kThreads) {
    const accumulate_t* from = partial + (first + c) * parts * 3;
    Moments<accumulate_t> moments{from[0], from[1], from[2]};
    for (int part = 1; part < parts; part++)
      moments = moments.merge({from[part * 3], from[part * 3 + 1], from[part * 3 + 2]});
    const accumulate_t own = group_norm.conv_bias[g * channels + c];
    if (chunk == 0) kept.conv_bias[first + c] = own, kept.bias[first + c] = group_norm.bias[g * channels + c];
    moments.mean += own;
    of_channel[c] = moments;
  }
  __syncthreads();  // the group's channels are there
  for (int c = threadIdx.x; c < channels; c += kThreads) {
    Moments<accumulate_t> moments = of_channel[0];
    for (int i = 1; i < channels; i++) moments = moments.merge(of_channel[i]);
    const accumulate_t rstd = 1 / sqrt(moments.variance() + eps);
    if (chunk == 0 && c == 0) kept.group_mean[group] = moments.mean, kept.group_rstd[group] = rstd;
    const int channel = int(g) * channels + c;
    affine[c] = {group_norm.conv_bias[channel] - moments.mean, rstd * group_norm.weight[channel],
                 group_norm.bias[channel], tail.channel(n, channel)};
  }
  __syncthreads();  // affine is complete
  const auto apply = [&](const Channel& a, float value) {
    return output_t(tail((value + a.offset) * a.slope + a.bias, a.tail));
  };
  if (aligned) {
    const auto apply_vector = [&](int i, const Vector<float>& four) {
      Vector<output_t> result;
      const int c = i * kVector / plane, next = (c + 1) * plane;
      const Channel mine = affine[c];
#pragma unroll
      for (int j = 0; j < kVector; j++) {
        const int s = i * kVector + j;
        result.at[j] = apply(s < next ? mine : affine[s / plane], four.at[j]);
      }
      reinterpret_cast<Vector<output_t>*>(out)[i] = result;
    };
#pragma unroll
    for (int k = 0; k < kAhead; k++)
      if (begin + k * step < size / kVector) apply_vector(begin + k * step, ahead[k]);
    for (int i = begin + kAhead * step; i < size / kVector; i += step)
      apply_vector(i, reinterpret_cast<const Vector<float>*>(in)[i]);
  } else {
    for (int i = begin; i < size; i += step) out[i] = apply(affine[i / plane], in[i]);
  }
  if (chunk > 0 || !kept.flat) return;
  for (int c = threadIdx.x; c < channels;
       c += kThreads) {  // here the vectors ahead take no registers any more
    const Channel& a = affine[c];
    kept.flat[first + c] =
        is_flat(of_channel[c].mean, of_channel[c].m2, a.slope,
                (of_channel[c].mean - group_norm.conv_bias[g * channels + c] + a.offset) * a.slope + a.bias,
                [&](accumulate_t z) { return tail.compared(z, a.tail); });
  }
}

// Launches it behind what made v and partial; from sm_90 on it starts while that still runs.
template <int kChannels, class Tail>
void finish(output_t* y, Kept kept, const float* v, const accumulate_t* partial, int parts, Group group_norm,
            Tail tail, double eps, GroupShape shape, int64_t size_of_plane, cudaStream_t stream) {
  const int64_t size = shape.channels() * size_of_plane;
  const int chunks = int(size / (kThreads * kVector * kAhead + 1) + 1);
  const bool aligned = vectors_fit(y, size) && vectors_fit(v, size);
  launch_early(finish_kernel<kChannels, Tail>, shape.N * shape.G * chunks, kThreads, stream, y, kept, partial,
               v, group_norm, tail, accumulate_t(eps), shape, size_of_plane, parts, chunks, aligned);
}

}  // namespace norms
