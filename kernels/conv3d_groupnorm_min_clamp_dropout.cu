// y = dropout(clamp(min(group_norm(conv), low), low, high), p), and its gradient: what follows the library's
// convolution.
//
// v, dv (N, C, S)   the convolution without its bias; S = D'·H'·W' positions
// y, dy (N, C, S)   the result
// Bound by memory: forward reads v twice (statistics, apply) and writes y. Backward reads v and dy twice and
// writes dv, but where no element of a plane passes a gradient (`active` is 0; min and clamp pass one at an
// exact tie only) its sums are zero without reading.
#include "core/philox.h"
#include "norm/statistics.cuh"
#include "conv3d_groupnorm_min_clamp_dropout.h"

using Tail = MinClamp<accumulate_t>;

// Dropout of element i: times `scale` if kept, times zero if not (NaN stays NaN). Where p is 0 all are kept,
// and scale is 1.
struct Dropout {
  const int64_t* seed;
  int64_t number;  // seed_of(seed, number) is what is drawn by
  float p;
  accumulate_t scale;
  // factor[j] for the elements first … first + 3; first is a multiple of 4.
  __device__ void factors(accumulate_t (&factor)[4], int64_t first) const {
    const Philox4 random = p > 0 ? philox(seed_of(seed, number), first / 4) : Philox4{};
#pragma unroll
    for (int j = 0; j < 4; j++) factor[j] = dropout_keeps(random.lane[j], p) ? scale : accumulate_t(0);
  }
};

// Calls body(i, factor) for the elements i of a plane that are thread `own`'s of `threads`. Element i of the
// plane is element begin + i of the tensor, and four neighbours there share a draw.
template <class Body>
__device__ void for_each_element(int64_t size, int64_t own, unsigned threads, int64_t begin,
                                 const Dropout& dropout, const Body& body) {
  const int64_t first = begin / 4, last = (begin + size - 1) / 4;  // draws that touch the plane
  for (int64_t draw = first + own; draw <= last; draw += threads) {
    accumulate_t factor[4];
    dropout.factors(factor, draw * 4);
#pragma unroll
    for (int j = 0; j < 4; j++) {
      const int64_t i = draw * 4 + j - begin;
      if (i >= 0 && i < size) body(i, factor[j]);
    }
  }
}

// `active` (N, C) becomes 1 where an element passes a gradient or the statistics are not finite. A plane is
// `chunks` blocks', or, kSmall, a warp's.
template <bool kSmall>
__global__ void __launch_bounds__(kThreads)
    apply_kernel(output_t* y, int32_t* active, const value_t* v, const accumulate_t* group_mean,
                 const accumulate_t* group_rstd, const accumulate_t* conv_bias, const accumulate_t* weight,
                 const accumulate_t* bias, Tail tail, Dropout dropout, int64_t offset, GroupShape shape,
                 unsigned chunks, bool aligned) {
  const int plane = kSmall ? blockIdx.x * kWarps + threadIdx.x / 32 : blockIdx.x / chunks;
  if (kSmall && plane >= shape.N * shape.C) return;
  const int64_t own = kSmall ? threadIdx.x % 32 : int64_t(blockIdx.x % chunks) * kThreads + threadIdx.x;
  const unsigned threads = kSmall ? 32 : chunks * kThreads;
  const Normaliser normalise =
      normaliser(group_mean, group_rstd, conv_bias, weight, bias, shape, plane / shape.C, plane % shape.C);
  const value_t* in = v + plane * shape.S;
  output_t* out = y + plane * shape.S;
  bool any = !isfinite(normalise.offset * normalise.slope);
  if (aligned) {
    for (int64_t k = own; k < shape.S / kVector; k += threads) {
      const auto four = load_vector(in + k * kVector);
      accumulate_t factor[4];
      dropout.factors(factor, offset + plane * shape.S + k * kVector);
      Vector<output_t> result;
#pragma unroll
      for (int j = 0; j < kVector; j++) {
        const accumulate_t z = normalise(accumulate_t(four.at[j]));
        any |= tail.gradient(z) != 0;
        result.at[j] = output_t(tail(z) * factor[j]);
      }
      store_vector(out + k * kVector, result);
    }
  } else {
    for_each_element(shape.S, own, threads, offset + plane * shape.S, dropout,
                     [&](int64_t i, accumulate_t factor) {
                       const accumulate_t z = normalise(accumulate_t(in[i]));
                       any |= tail.gradient(z) != 0;
                       out[i] = output_t(tail(z) * factor);
                     });
  }
  if (!active) return;
  const bool found = kSmall ? __any_sync(~0u, any) : __syncthreads_or(any);
  if (found && threadIdx.x % (kSmall ? 32 : kThreads) == 0) active[plane] = 1;
}

// sums (2, N, C) of dz and dz·(u - mean); a block per plane.
__global__ void __launch_bounds__(kThreads)
backward_sums_kernel(accumulate_t* sums, const output_t* dy, const value_t* v, const int32_t* active,
                     const accumulate_t* group_mean, const accumulate_t* group_rstd,
                     const accumulate_t* conv_bias, const accumulate_t* weight, const accumulate_t* bias,
                     Tail tail, Dropout dropout, GroupShape shape) {
  const int plane = blockIdx.x;
  const int64_t base = plane * shape.S;
  accumulate_t sum[2] = {};
  if (active[plane]) {
    const Normaliser normalise =
        normaliser(group_mean, group_rstd, conv_bias, weight, bias, shape, plane / shape.C, plane % shape.C);
    for_each_element(shape.S, threadIdx.x, kThreads, base, dropout, [&](int64_t i, accumulate_t factor) {
      // The gradient of conv3d_groupnorm_min_clamp_dropout.
      const accumulate_t value = accumulate_t(v[base + i]), gate = tail.gradient(normalise(value));
      const accumulate_t dz = gate != 0 ? accumulate_t(dy[base + i]) * factor * gate : accumulate_t(0);
      sum[0] += dz, sum[1] += dz * normalise.centred(value);
    });
  }
  block_sum(sum);
  if (threadIdx.x == 0) sums[plane] = sum[0], sums[shape.N * shape.C + plane] = sum[1];
}

__global__ void __launch_bounds__(kThreads)
backward_kernel(value_t* dv, const output_t* dy, const value_t* v, const int32_t* active,
                const accumulate_t* coefficients, const accumulate_t* group_mean,
                const accumulate_t* group_rstd, const accumulate_t* conv_bias, const accumulate_t* weight,
                const accumulate_t* bias, Tail tail, Dropout dropout, GroupShape shape, unsigned chunks) {
  const int plane = blockIdx.x / chunks, chunk = blockIdx.x % chunks;
  const int n = plane / shape.C, c = plane % shape.C, group = n * shape.G + c / shape.channels();
  const int64_t base = plane * shape.S;
  const Normaliser normalise = normaliser(group_mean, group_rstd, conv_bias, weight, bias, shape, n, c);
  const accumulate_t constant = coefficients[group], linear = coefficients[shape.N * shape.G + group];
  const bool plane_active = active[plane];
  if (!plane_active && constant == 0 && linear == 0) {
    for (int64_t i = int64_t(chunk) * kThreads + threadIdx.x; i < shape.S; i += chunks * kThreads)
      dv[base + i] = value_t(0);
    return;
  }
  for_each_element(
      shape.S, int64_t(chunk) * kThreads + threadIdx.x, chunks * kThreads, base,
      plane_active ? dropout : Dropout{nullptr, 0, 0, 1}, [&](int64_t i, accumulate_t factor) {
        // The gradient of conv3d_groupnorm_min_clamp_dropout.
        const accumulate_t value = accumulate_t(v[base + i]), gate = tail.gradient(normalise(value));
        const accumulate_t dz = gate != 0 ? accumulate_t(dy[base + i]) * factor * gate : accumulate_t(0);
        dv[base + i] = value_t(dz * normalise.slope + constant + linear * normalise.centred(value));
      });
}

static Dropout dropout_from(const int64_t* seed, int64_t number, double p) {
  return {seed, number, float(p), accumulate_t(p < 1 ? 1 / (1 - p) : 0)};
}

// statistics as in GroupStatistics; active (N, C) zeroed by the caller, or without elements where no
// gradient is wanted; seed (1), or without elements where the number counts; offset is the number of elements
// before y in the whole.
EXPORT void forward(output_t* y, accumulate_t* statistics, int32_t* active, const value_t* v,
                    const accumulate_t* conv_bias, const accumulate_t* weight, const accumulate_t* bias,
                    const int64_t* seed, int64_t number, double low, double high, double p, double eps,
                    int64_t offset, int64_t N, int64_t C, int64_t G, int64_t S, cudaStream_t stream) {
  const GroupShape shape{N, C, G, S};
  const auto [mean, m2, group_mean, group_rstd, kept_conv_bias, kept_bias] =
      GroupStatistics(statistics, N, C, G);
  const unsigned chunks = chunks_for(S);
  plane_statistics(mean, m2, v, nullptr, N * C, C, S, stream);
  merge_groups_kernel<<<blocks_for(N * G, 128), 128, 0, stream>>>(group_mean, group_rstd, mean, m2, conv_bias,
                                                                  eps, shape, bias,
                                                                  kept_conv_bias, kept_bias);
  const auto apply = suits_a_warp(S) ? apply_kernel<true> : apply_kernel<false>;
  const unsigned blocks = suits_a_warp(S) ? blocks_for(N * C, kWarps) : unsigned(N * C * chunks);
  apply<<<blocks, kThreads, 0, stream>>>(y, active, v, group_mean, group_rstd, conv_bias, weight, bias,
                                         Tail{accumulate_t(low), accumulate_t(high)},
                                         dropout_from(seed, number, p), offset, shape, chunks,
                                         vectors_fit(v, S) && vectors_fit(y, S) && offset % kVector == 0);
}

// The gradients of v and, summed over the samples, of the parameters (C). scratch holds the parameters'
// gradients by sample (3, N, C), sums (2, N, C) and coefficients (2, N, G).
EXPORT void backward(value_t* dv, accumulate_t* d_conv_bias, accumulate_t* d_weight, accumulate_t* d_bias,
                     accumulate_t* scratch, const output_t* dy, const value_t* v,
                     const accumulate_t* statistics, const int32_t* active, const accumulate_t* weight,
                     const int64_t* seed, int64_t number, double low, double high, double p, int64_t N,
                     int64_t C, int64_t G, int64_t S, cudaStream_t stream) {
  const GroupShape shape{N, C, G, S};
  const auto [mean, m2, group_mean, group_rstd, conv_bias, bias] = GroupStatistics(statistics, N, C, G);
  accumulate_t *gradients = scratch, *sums = gradients + 3 * N * C, *coefficients = sums + 2 * N * C;
  const Tail tail{accumulate_t(low), accumulate_t(high)};
  const Dropout dropout = dropout_from(seed, number, p);
  const unsigned chunks = chunks_for(S);
  backward_sums_kernel<<<N * C, kThreads, 0, stream>>>(sums, dy, v, active, group_mean, group_rstd, conv_bias,
                                                       weight, bias, tail, dropout, shape);
  group_gradient_kernel<<<blocks_for(N * G, 128), 128, 0, stream>>>(
      coefficients, gradients, sums, mean, group_mean, group_rstd, conv_bias, weight, shape);
  backward_kernel<<<N * C * chunks, kThreads, 0, stream>>>(dv, dy, v, active, coefficients, group_mean,
                                                           group_rstd, conv_bias, weight, bias, tail, dropout,
                                                           shape, chunks);
  sum_rows({{d_conv_bias, C}, {d_weight, C}, {d_bias, C}}, gradients, N, C, stream);
}
