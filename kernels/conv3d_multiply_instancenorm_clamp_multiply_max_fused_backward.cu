// The gradients of y = max over c of m[c]·clamp(instance_norm(conv(x)·m[c]), low, high), with the convolution
// inside: computed again from x, never written to memory as a whole.
//
// With mean and variance of v, the convolution of x - shift, per (sample, channel): z = (v - mean)·a with a =
// m·rstd, rstd = 1 / sqrt(m²·variance + eps). Of each position one channel gets a gradient, that of the
// maximum, which forward has left. Launches:
//   sums_kernel   of that gradient by (sample, channel); what dv needs of them, and the multiplier's gradient
//   gradient_kernel, merge_kernel, input_gradient_kernel   conv3d_backward.cuh
// Instance normalisation removes the convolution's bias, and what shifting x adds.
//
// At the default size (128, 3, 16, 32, 32): 25 MB of x, 15 of dy, index and centred; 2.1 G products of a
// weight and an element each for v, the weight's gradient and dx.
#include "conv3d_backward.cuh"
#include "normalisation.h"
#include "reduce.cuh"

struct InstanceNormProblem {
  const NormGradient* coefficients;
  const index_t* index;  // like y
  const float* winner;   // like y: dz of the channel that won

  __device__ bool active(int64_t) const { return true; }

  struct Selected {
    const index_t* index;  // of the sample's first plane, at the tile's first row
    const float* winner;
    const int plane_size, positions, channel;  // this lane's first one
    __device__ __forceinline__ void operator()(float (&dz)[kFragments][4], const float (&)[kFragments][4],
                                               int plane, int q) const {
      const int64_t of_plane = int64_t(plane) * plane_size;
      const int first = q + int(threadIdx.x % 4) * 2;
#pragma unroll
      for (int j = 0; j < kFragments; j++)
#pragma unroll
        for (int u = 0; u < 2; u++) {
          const int position = first + 8 * j + u;
          const bool inside = position < positions;
          const int won = inside ? int(index[of_plane + position]) : -1;
          const float value = inside ? winner[of_plane + position] : 0.f;
#pragma unroll
          for (int r = 0; r < 2; r++) dz[j][2 * r + u] = won == channel + 8 * r ? value : 0.f;
        }
    }
  };
  __device__ Selected selected(const Convolution& c, const Tile& tile, int first_channel) const {
    const int plane = c.OH * c.OW;
    const int64_t first = tile.n * c.OD * int64_t(plane) + tile.first_row * c.OW;
    return {index + first, winner + first, plane, tile.positions,
            first_channel + int(threadIdx.x % 32) / 4};
  }
};

// A block per (sample, channel), over the positions that the channel won: winner, dz there; from their sums
// coefficients (N, C), and by sample the gradients (N, C) of the multiplier and zeros, those of conv_bias; NaN
// stays NaN. The multiplier's comes from its second use, and, through the normalised v·m, from its first, of
// which only the share of eps remains: normalising removes any other effect of a factor.
__global__ void __launch_bounds__(kThreads)
sums_kernel(NormGradient* coefficients, float* gradients, float* zeros, float* winner, const output_t* dy,
            const index_t* index, const float* centred, const float* moments, const float* conv_bias,
            const float* multiplier, float low, float high, float eps, int64_t N, int64_t S) {
  constexpr int64_t C = kOut;
  const int64_t n = blockIdx.x / C, c = blockIdx.x % C;
  const ScaledChannel channel =
      scaled_channel(moments, moments + N * C, conv_bias, multiplier, eps, n, c, C, S);
  float sum[3] = {};  // of dz, dz·(v - mean) and dy·clamp(z)
#pragma unroll 4
  for (int64_t s = threadIdx.x; s < S; s += kThreads) {
    if (index[n * S + s] != index_t(c)) continue;
    const float gradient = float(dy[n * S + s]), own = centred[n * S + s], z = own * channel.a;
    const float dz = clamp_passes(z, low, high) ? gradient * channel.m : 0.f;
    winner[n * S + s] = dz;
    sum[0] += dz, sum[1] += dz * own, sum[2] += gradient * clamp(z, low, high);
  }
  block_sum(sum);
  if (threadIdx.x) return;
  const float a = channel.a, rstd = channel.rstd;
  // NaN in a channel counts even where another one wins.
  const float nothing = channel.mean - channel.mean;
  const float constant = -a * sum[0] / float(S);
  const float linear = -(a * sum[1]) / float(S) * a * a;  // a³ alone may underflow
  coefficients[blockIdx.x] = {-channel.mean, a, constant, linear};
  gradients[blockIdx.x] = sum[2] + nothing + sum[1] * eps * rstd * rstd * rstd;
  zeros[blockIdx.x] = 0 * gradients[blockIdx.x];
}

// dx (N, CHANNELS_IN, D, H, W) and d_weight, either without elements where it is not wanted; d_conv_bias
// (CHANNELS_OUT) and d_multiplier, `multipliers` elements, CHANNELS_OUT or 1. index, centred and moments as
// forward left them. scratch, one after the other: dv, a slot for each of `dv_slots` jobs; coefficients (N,
// CHANNELS_OUT, 4); gradients and zeros (N, CHANNELS_OUT); `partial` (jobs, elements of 16 channels' weights);
// `most` (jobs, 16); winner, like y. rows to shared are the plan (convolution()), input_rows and input_columns
// that of dx (InputTiling).
EXPORT void backward(value_t* dx, value_t* d_weight, float* d_conv_bias, float* d_multiplier, float* scratch,
                     const output_t* dy, const value_t* x, const value_t* weight, const index_t* index,
                     const float* centred, const float* moments, const float* conv_bias,
                     const float* multiplier, double low, double high, double eps, int64_t multipliers,
                     int64_t N, int64_t D, int64_t H, int64_t W, int64_t rows, int64_t depth, int64_t pitch,
                     int64_t raw, int64_t shared, int64_t dv_slots, int64_t input_rows, int64_t input_columns,
                     cudaStream_t stream) {
  const Convolution c = convolution(x, weight, D, H, W, rows, depth, pitch, raw, shared);
  const BackwardPlan plan(c, N, dv_slots);
  const int64_t S = int64_t(c.OD) * c.OH * c.OW;
  auto* const dv = reinterpret_cast<float4*>(scratch);
  auto* const coefficients = reinterpret_cast<NormGradient*>(dv + plan.dv_values);
  float* const gradients = reinterpret_cast<float*>(coefficients + N * kOut);
  float* const zeros = gradients + N * kOut;
  float* const partial = zeros + N * kOut;
  float* const most = partial + plan.jobs * kFilters;
  float* const winner = most + plan.jobs * 16;
  if (N > 0)
    sums_kernel<<<unsigned(N * kOut), kThreads, 0, stream>>>(coefficients, gradients, zeros, winner, dy, index,
                                                             centred, moments, conv_bias, multiplier, low,
                                                             high, eps, N, S);
  const InstanceNormProblem problem{coefficients, index, winner};
  convolution_backward(dx, d_weight, dv, most, partial, nullptr, problem, plan, input_rows, input_columns, c,
                       stream);
  sum_rows_kernel<<<kOut, kThreads, 0, stream>>>(d_conv_bias, zeros, N, kOut);
  sum_rows_kernel<<<unsigned(multipliers), kThreads, 0, stream>>>(d_multiplier, gradients, N, kOut);
}
