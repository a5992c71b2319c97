// y = max over c of m[c]·clamp(instance_norm(conv·m[c]), low, high), and its gradient: what follows the
// library's convolution.
//
// v, dv (N, C, S)        the convolution without its bias, which instance normalisation removes again; S =
//                        D'·H'·W'
// y, dy (N, S)           the result
// index, winner (N, S)   which channel won, and its v; without elements where no gradient is wanted
// With mean and variance of v per (sample, channel): z = (v - mean)·a with a = m·rstd, rstd = 1 /
// sqrt(m²·variance + eps). Bound by memory: forward reads v twice (statistics, apply); backward reads v and
// writes dv once, the rest is 1/C of that.
#include "norm/statistics.cuh"

constexpr int kChannels = 256;  // channels whose coefficients a block holds at a time

struct Winner {
  accumulate_t best, value;
  index_t index;
};

// kPerThread neighbouring positions a thread; the loop over channels reads v along positions, so loads are
// coalesced.
template <int kPerThread>
__global__ void __launch_bounds__(kThreads)
    apply_kernel(output_t* y, index_t* index, value_t* winner, const value_t* v, const accumulate_t* mean,
                 const accumulate_t* deviation, const accumulate_t* multiplier, accumulate_t low,
                 accumulate_t high, accumulate_t eps, int64_t C, int64_t S, unsigned chunks) {
  __shared__ ScaledChannel channels[kChannels];
  const int64_t n = blockIdx.x / chunks;
  const int64_t s = (int64_t(blockIdx.x % chunks) * kThreads + threadIdx.x) * kPerThread;
  Winner winners[kPerThread];
  for (int64_t c0 = 0; c0 < C; c0 += kChannels) {
    __syncthreads();  // the previous channels have been used
    if (c0 + threadIdx.x < C && threadIdx.x < kChannels)
      channels[threadIdx.x] = scaled_channel(mean, deviation, multiplier, eps, n, c0 + threadIdx.x, C);
    __syncthreads();  // the coefficients are there
    if (s >= S) continue;
    const int count = int(min(C - c0, int64_t(kChannels)));
#pragma unroll 4
    for (int k = 0; k < count; k++) {
      const ScaledChannel channel = channels[k];
      const value_t* in = v + (n * C + c0 + k) * S + s;
      value_t values[kPerThread];
      if constexpr (kPerThread == kVector) {
        const auto four = load_vector(in);
#pragma unroll
        for (int j = 0; j < kPerThread; j++) values[j] = four.at[j];
      } else {
        values[0] = in[0];
      }
#pragma unroll
      for (int j = 0; j < kPerThread; j++) {
        const accumulate_t value = accumulate_t(values[j]);
        // The formula of conv3d_multiply_instancenorm_clamp_multiply_max.
        const accumulate_t candidate = clamp((value - channel.mean) * channel.a, low, high) * channel.m;
        if (c0 + k == 0 || replaces_maximum(candidate, winners[j].best))
          winners[j] = {candidate, value, index_t(c0 + k)};
      }
    }
  }
  if (s >= S) return;
#pragma unroll
  for (int j = 0; j < kPerThread; j++) {
    y[n * S + s + j] = output_t(winners[j].best);
    if (index) index[n * S + s + j] = winners[j].index, winner[n * S + s + j] = value_t(winners[j].value);
  }
}

// sums (3, N, C) over the positions that channel c won: of dz, dz·(v - mean) and dy·clamp(z). A block per
// (sample, channel).
__global__ void __launch_bounds__(kThreads)
    backward_sums_kernel(accumulate_t* sums, const output_t* dy, const index_t* index, const value_t* winner,
                         const accumulate_t* mean, const accumulate_t* deviation,
                         const accumulate_t* multiplier, accumulate_t low, accumulate_t high,
                         accumulate_t eps, int64_t N, int64_t C, int64_t S) {
  const int n = blockIdx.x / unsigned(C), c = blockIdx.x % unsigned(C);
  const ScaledChannel channel = scaled_channel(mean, deviation, multiplier, eps, n, c, C);
  accumulate_t sum[3] = {};
  for (int64_t s = threadIdx.x; s < S; s += kThreads) {
    if (index[n * S + s] != index_t(c)) continue;
    // The gradient of conv3d_multiply_instancenorm_clamp_multiply_max.
    const accumulate_t gradient = accumulate_t(dy[n * S + s]);
    const accumulate_t centred = accumulate_t(winner[n * S + s]) - channel.mean;
    const accumulate_t z = centred * channel.a;
    const accumulate_t dz = clamp_passes(z, low, high) ? gradient * channel.m : accumulate_t(0);
    sum[0] += dz, sum[1] += dz * centred, sum[2] += gradient * clamp(z, low, high);
  }
  block_sum(sum);
  if (threadIdx.x == 0)
    for (int i = 0; i < 3; i++) sums[(i * N + n) * C + c] = sum[i];
}

// gradients (N, C) of the multiplier by sample, and zeros, those of conv_bias, which normalising removes; NaN
// stays NaN. The multiplier's comes from its second use, and, through the normalised v·m, from its first, of
// which only the share of eps remains: normalising removes any other effect of a factor.
__global__ void multiplier_gradient_kernel(accumulate_t* gradients, accumulate_t* zeros,
                                           const accumulate_t* sums, const accumulate_t* mean,
                                           const accumulate_t* deviation, const accumulate_t* multiplier,
                                           accumulate_t eps, int64_t N, int64_t C, int64_t S) {
  const int64_t i = int64_t(blockIdx.x) * blockDim.x + threadIdx.x;
  if (i >= N * C) return;
  const ScaledChannel channel = scaled_channel(mean, deviation, multiplier, eps, i / C, i % C, C);
  const accumulate_t rstd = channel.rstd;
  // NaN in a channel counts even where another one wins.
  // The gradient of conv3d_multiply_instancenorm_clamp_multiply_max.
  const accumulate_t nothing = channel.mean - channel.mean;
  gradients[i] = sums[2 * N * C + i] + nothing + sums[N * C + i] * eps * rstd * rstd * rstd;
  zeros[i] = 0 * gradients[i];
}

// dv = a·(dz - mean of dz - z·mean of dz·z); a block per share of a plane.
__global__ void __launch_bounds__(kThreads)
    backward_kernel(value_t* dv, const output_t* dy, const value_t* v, const index_t* index,
                    const accumulate_t* sums, const accumulate_t* mean, const accumulate_t* deviation,
                    const accumulate_t* multiplier, accumulate_t low, accumulate_t high, accumulate_t eps,
                    int64_t N, int64_t C, int64_t S, unsigned chunks) {
  const unsigned plane = blockIdx.x / chunks, n = plane / unsigned(C), c = plane % unsigned(C);
  const ScaledChannel channel = scaled_channel(mean, deviation, multiplier, eps, n, c, C);
  const accumulate_t a = channel.a, constant = -sums[plane] / accumulate_t(S);
  const accumulate_t linear = -(a * sums[N * C + plane]) / accumulate_t(S);  // a³ may underflow
#pragma unroll 4
  for (int64_t s = int64_t(blockIdx.x % chunks) * kThreads + threadIdx.x; s < S; s += chunks * kThreads) {
    // The gradient of conv3d_multiply_instancenorm_clamp_multiply_max.
    const accumulate_t z = (accumulate_t(v[plane * S + s]) - channel.mean) * a;
    accumulate_t result = constant + linear * z;
    if (index[n * S + s] == index_t(c) && clamp_passes(z, low, high))
      result += channel.m * accumulate_t(dy[n * S + s]);
    dv[plane * S + s] = value_t(a * result);
  }
}

EXPORT void forward(output_t* y, index_t* index, value_t* winner, accumulate_t* statistics, const value_t* v,
                    const accumulate_t* conv_bias, const accumulate_t* multiplier, double low, double high,
                    double eps, int64_t N, int64_t C, int64_t S, cudaStream_t stream) {
  accumulate_t *mean = statistics, *deviation = mean + N * C;
  plane_statistics(mean, deviation, v, conv_bias, N * C, C, S, stream);
  if (vectors_fit(v, S)) {
    const unsigned chunks = blocks_for(S, kThreads * kVector);
    apply_kernel<kVector><<<N * chunks, kThreads, 0, stream>>>(y, index, winner, v, mean, deviation,
                                                               multiplier, low, high, eps, C, S, chunks);
  } else {
    const unsigned chunks = blocks_for(S, kThreads);
    apply_kernel<1><<<N * chunks, kThreads, 0, stream>>>(y, index, winner, v, mean, deviation, multiplier,
                                                         low, high, eps, C, S, chunks);
  }
}

// The gradients of v and, summed over the samples, of the parameters; d_multiplier has `multipliers`
// elements, C or 1. scratch holds the parameters' gradients by sample (2, N, C) and sums (3, N, C).
EXPORT void backward(value_t* dv, accumulate_t* d_conv_bias, accumulate_t* d_multiplier,
                     accumulate_t* scratch, const output_t* dy, const value_t* v, const index_t* index,
                     const value_t* winner, const accumulate_t* statistics,
                     const accumulate_t* multiplier, double low, double high, double eps, int64_t multipliers,
                     int64_t N, int64_t C, int64_t S, cudaStream_t stream) {
  const accumulate_t *mean = statistics, *deviation = mean + N * C;
  accumulate_t *gradients = scratch, *zeros = gradients + N * C, *sums = zeros + N * C;
  const unsigned chunks = chunks_for(S);
  backward_sums_kernel<<<N * C, kThreads, 0, stream>>>(sums, dy, index, winner, mean, deviation, multiplier,
                                                       low, high, eps, N, C, S);
  multiplier_gradient_kernel<<<blocks_for(N * C, 128), 128, 0, stream>>>(gradients, zeros, sums, mean,
                                                                         deviation, multiplier, eps, N, C, S);
  backward_kernel<<<N * C * chunks, kThreads, 0, stream>>>(dv, dy, v, index, sums, mean, deviation,
                                                           multiplier, low, high, eps, N, C, S, chunks);
  sum_rows({{d_multiplier, multipliers}, {d_conv_bias, C}}, gradients, N, C, stream);  // and zeros
}
