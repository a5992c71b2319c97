// The gradients of weight and of the parameters of pool from sums by strip (…_weight_gradient.cuh).
//   sample_kernel   constant and linear; a sample's gradients
//   total_kernel    those added up
#pragma once
#include "conv2d_groupnorm_scale_maxpool_clamp_weight_gradient.cuh"

namespace {

// What is merged in double, one after the other.
struct Merged {
  double *constant, *linear, *gradients, *weight;
  Merged(double* from, int64_t N, int64_t G)
      : constant(from),                           // (N, CHANNELS_OUT)
        linear(constant + N * CHANNELS_OUT),      // (N, G)
        gradients(linear + N * G),                // (4, N, CHANNELS_OUT) of conv_bias, norm, scale
        weight(gradients + 4 * N * CHANNELS_OUT)  // (N, CHANNELS_OUT, kDepth)
  {}
};

constexpr int kSampleThreads = 512;
// Rows of ΣXXᵀ that are in shared memory at a time, with the filters' values that meet them.
constexpr int sample_bytes(int rows) {
  return rows * (kDepth + CHANNELS_OUT + 4) * 4 + kDepth * 8 + CHANNELS_OUT * 64;
}
constexpr int kSlab = sample_bytes(kDepth) <= 48 << 10 ? kDepth : 24;
constexpr int kOutputs = (CHANNELS_OUT / 4 * (kDepth / 4) + kSampleThreads - 1) / kSampleThreads;
static_assert(CHANNELS_OUT <= kSampleThreads, "a thread per channel");

// act(strip, does it count) of all strips, two side by side, so that their loads are under way together.
template <class Act> __device__ __forceinline__ void for_strips(int strips, const Act& act) {
  for (int first = 0; first < strips; first += 2)
#pragma unroll
    for (int i = 0; i < 2; i++) act(min(first + i, strips - 1), first + i < strips);
}

// act(a, b, value) of all elements (ΣXXᵀ)[a][b] of a sample and, where a is kDepth, of (ΣX)[b], in no order.
template <class Act>
__device__ __forceinline__ void for_gram(Partial partial, int n, Geometry geometry, const Act& act) {
  const int64_t gram = int64_t(n) * geometry.strips, frame = int64_t(n) * kFrameRows;
  const auto four = [](const float* from, int64_t slot, int at) {  // as a lane holds them
    return reinterpret_cast<const float4*>(from + slot * kGramSize)[at];
  };
  for (int at = threadIdx.x; at < kGramSize / 4; at += kSampleThreads) {
    float4 rows[kFrameRows + 1] = {};
#pragma unroll
    for (int i = 0; i < kFrameRows; i++)
      if (i < geometry.H) rows[i] = four(partial.frame, frame + i, at);
    float sums[4] = {};
    for_strips(geometry.strips, [&](int strip, bool real) {
      const float4 more = four(partial.gram, gram + strip, at);
      if (real) sums[0] += more.x, sums[1] += more.y, sums[2] += more.z, sums[3] += more.w;
    });
    const int tile = at / 32, lane = at % 32, column = tile % kColumnUnits;
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const int unit = tile / kColumnUnits * 2 + i / 2, row = unit < kUnits ? unit % kTaps / KERNEL_W : 0;
      if (unit > kUnits) continue;
      for (int b = 0; b < KERNEL_H - row; b++) {  // the upper one's kernel row
        float sum = sums[i];
#pragma unroll
        for (int j = 0; j < kFrameRows; j++) {
          const int q = j < KERNEL_H - 1 ? j : j - (KERNEL_H - 1) + max(geometry.height(), KERNEL_H - 1);
          const float of_row[] = {rows[j].x, rows[j].y, rows[j].z, rows[j].w};
          if (q >= b && q < b + geometry.height()) sum += of_row[i];
        }
        const int of_column = (unit_of_column(column) + b * KERNEL_W) * 8 + lane % 4 * 2 + i % 2;
        const int of_unit = unit < kUnits ? (unit + b * KERNEL_W) * 8 + lane / 4 : kDepth;
        if (unit < kUnits || lane / 4 == 0) act(of_unit, of_column, sum);
        if (unit < kUnits && row > 0) act(of_column, of_unit, sum);
      }
    }
  }
}

// dv = slope·dz·[selected] + constant + linear·(weight·X), X of x less its shift; and all gradients by
// sample. The group's mean is computed anew, because float32 holds little of it that is not shift, where that
// is large. A block per sample.
__global__ void __launch_bounds__(kSampleThreads, 1)
sample_kernel(Merged merged, Partial partial, Saved saved, GroupShape shape, Geometry geometry) {
  __shared__ __align__(16) float gram[kSlab][kDepth];
  __shared__ __align__(16) float filters[kSlab][CHANNELS_OUT + 4];  // fewer bank conflicts
  __shared__ double patches[kDepth];
  __shared__ double sums[2][CHANNELS_OUT];
  __shared__ double mean[CHANNELS_OUT];   // of weight·X
  __shared__ double level[CHANNELS_OUT];  // what the shift and the bias add to that
  __shared__ double slope[CHANNELS_OUT];  // of z·scale, but for rstd
  __shared__ double constant[CHANNELS_OUT];
  __shared__ double linear[CHANNELS_OUT];
  __shared__ double of_bias[CHANNELS_OUT];
  const int n = blockIdx.x, NC = shape.N * CHANNELS_OUT;
  const float* shift = partial.shift + n * CHANNELS_IN;
  const auto weight_at = [&](int c, int k) {
    const bool real = k < kDepth && input_channel(k) < CHANNELS_IN;
    return real ? float(saved.weight[c * (CHANNELS_IN * kTaps) + place_in_filter(k)]) : 0.f;
  };
  const auto load_slab = [&](int first) {
    for_gram(partial, n, geometry, [&](int a, int b, float value) {
      if (a == kDepth && first == 0) patches[b] = value;
      if (a >= first && a < first + kSlab) gram[a - first][b] = value;
    });
#pragma unroll 10
    for (int i = threadIdx.x; i < kSlab * CHANNELS_OUT; i += kSampleThreads)
      filters[i % kSlab][i / kSlab] = weight_at(i / kSlab, first + i % kSlab);
  };
  load_slab(0);
  for (int i = threadIdx.x; i < 2 * CHANNELS_OUT; i += kSampleThreads) {
    double sum = 0;
    for_strips(geometry.strips, [&](int strip, bool real) {
      const float more = partial.sums[(int64_t(n) * geometry.strips + strip) * CHANNELS_OUT * 2 + i];
      if (real) sum += more;
    });
    sums[i % 2][i / 2] = sum;
  }
  double rstd = 0, of_slope = 0, scale = 0, norm_bias = 0, saved_mean = 0;  // of the thread's channel
  const int own = threadIdx.x, first_of_group = own / shape.channels() * shape.channels();
  if (own < CHANNELS_OUT) {
    const int group = n * shape.G + own / shape.channels();
    rstd = saved.group_rstd[group], saved_mean = saved.group_mean[group];
    scale = saved.scale[own], norm_bias = saved.norm_bias[own];
    slope[own] = of_slope = saved.norm_weight[own] * scale;
  }
  __syncthreads();  // patches and sums are there
  for (int i = threadIdx.x; i < CHANNELS_OUT * 8; i += kSampleThreads) {  // eight lanes per channel
    const int c = i / 8;
    double of_patches = 0, of_shift = 0;
#pragma unroll
    for (int k = i % 8; k < kDepth; k += 8) {
      const double w = kSlab == kDepth ? filters[k % kSlab][c] : weight_at(c, k);
      of_patches += w * patches[k];
      if (input_channel(k) < CHANNELS_IN) of_shift += w * shift[input_channel(k)];
    }
    of_patches = lanes_sum<8>(of_patches), of_shift = lanes_sum<8>(of_shift);
    if (i % 8 == 0) mean[c] = of_patches / shape.S, level[c] = of_shift + saved.conv_bias[c];
  }
  __syncthreads();  // mean and level are there
  if (own < CHANNELS_OUT) {
    double group_mean = 0, gradient = 0, product = 0;
    for (int c = first_of_group; c < first_of_group + shape.channels(); c++) group_mean += mean[c] + level[c];
    group_mean /= shape.channels();
    const double moved = group_mean - saved_mean, count = double(shape.channels()) * shape.S;
    for (int c = first_of_group; c < first_of_group + shape.channels(); c++)
      gradient += slope[c] * sums[0][c], product += slope[c] * (sums[1][c] - moved * sums[0][c]);
    const double passed = sums[0][own], of_v = sums[1][own] - moved * passed;
    const double of_linear = -(rstd * product) / count * rstd * rstd;
    const double of_constant = -rstd * gradient / count + of_linear * (level[own] - group_mean);
    const int at = n * CHANNELS_OUT + own;
    merged.linear[n * shape.G + own / shape.channels()] = linear[own] = of_linear;
    merged.constant[at] = constant[own] = of_constant;
    merged.gradients[at] = of_bias[own] =
        rstd * of_slope * passed + double(shape.S) * (of_constant + of_linear * mean[own]);
    merged.gradients[NC + at] = rstd * scale * of_v;
    merged.gradients[2 * NC + at] = scale * passed;
    merged.gradients[3 * NC + at] = rstd * saved.norm_weight[own] * of_v + norm_bias * passed;
  }
  // weight·(ΣXXᵀ), by four channels out and four places in a patch.
  float d[kOutputs][4][4] = {};
  const auto for_outputs = [&](auto act) {
#pragma unroll
    for (int i = 0; i < kOutputs; i++) {
      const int output = i * kSampleThreads + threadIdx.x;
      const int c = output / (kDepth / 4) * 4, k = output % (kDepth / 4) * 4;
      if (c < CHANNELS_OUT) act(d[i], c, k);
    }
  };
  for (int slab = 0; slab < kDepth; slab += kSlab) {
    if (slab) {
      __syncthreads();  // the slab before has been read
      load_slab(slab);
    }
    __syncthreads();  // it is there; first, the coefficients are, too
    for_outputs([&](float(&product)[4][4], int c, int k) {
#pragma unroll 8
      for (int i = 0; i < kSlab; i++) {
        const float4 w = *reinterpret_cast<const float4*>(&filters[i][c]);
        const float4 with = *reinterpret_cast<const float4*>(&gram[i][k]);
        const float of_channel[] = {w.x, w.y, w.z, w.w}, of_place[] = {with.x, with.y, with.z, with.w};
#pragma unroll
        for (int j = 0; j < 4; j++)
#pragma unroll
          for (int l = 0; l < 4; l++) product[j][l] = fmaf(of_channel[j], of_place[l], product[j][l]);
      }
    });
  }
  for_outputs([&](float(&product)[4][4], int first, int k) {
    double sparse[4][4] = {};
    for_strips(geometry.strips, [&](int strip, bool real) {
      const float* from = partial.sparse + (int64_t(n) * geometry.strips + strip) * (CHANNELS_OUT * kDepth);
#pragma unroll
      for (int j = 0; j < 4; j++) {
        const float4 four = *reinterpret_cast<const float4*>(from + (first + j) * kDepth + k);
        if (!real) continue;
        sparse[j][0] += four.x, sparse[j][1] += four.y, sparse[j][2] += four.z, sparse[j][3] += four.w;
      }
    });
#pragma unroll
    for (int j = 0; j < 4; j++)
#pragma unroll
      for (int l = 0; l < 4; l++) {
        const int c = first + j;
        double value = sparse[j][l] + constant[c] * patches[k + l];
        if (linear[c] != 0) value += linear[c] * product[j][l];  // of zero, also where the squares overflow
        if (input_channel(k + l) < CHANNELS_IN) value += of_bias[c] * shift[input_channel(k + l)];
        merged.weight[(int64_t(n) * CHANNELS_OUT + c) * kDepth + k + l] = value;
      }
  });
}

// d_weight like weight; the parameters' gradients (CHANNELS_OUT), the last of them only if `scales`. A block
// has 32 of all these numbers.
__global__ void __launch_bounds__(kThreads)
total_kernel(value_t* d_weight, float* d_conv_bias, float* d_norm_weight, float* d_norm_bias, float* d_scale,
             Merged merged, bool scales, int N) {
  __shared__ double parts[kWarps][32];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, own = blockIdx.x * 32 + lane;
  constexpr int kWeights = CHANNELS_OUT * kDepth;
  const int parameter = (own - kWeights) / CHANNELS_OUT, c = (own - kWeights) % CHANNELS_OUT;
  const bool of_weight = own < kWeights;
  const double* from =
      of_weight ? merged.weight + own : merged.gradients + int64_t(parameter) * N * CHANNELS_OUT + c;
  const int step = of_weight ? kWeights : CHANNELS_OUT;
  double sum = 0;
  if (own < kWeights + 4 * CHANNELS_OUT)
#pragma unroll 8
    for (int n = warp; n < N; n += kWarps) sum += from[int64_t(n) * step];
  parts[warp][lane] = sum;
  __syncthreads();  // every warp's sums are there
  if (warp || own >= kWeights + (scales ? 4 : 3) * CHANNELS_OUT) return;
  for (int i = 1; i < kWarps; i++) sum += parts[i][lane];
  float* const totals[] = {d_conv_bias, d_norm_weight, d_norm_bias, d_scale};
  const int k = own % kDepth;
  if (!of_weight) totals[parameter][c] = float(sum);
  else if (input_channel(k) < CHANNELS_IN)
    d_weight[own / kDepth * (CHANNELS_IN * kTaps) + place_in_filter(k)] = value_t(float(sum));
}

}  // namespace
