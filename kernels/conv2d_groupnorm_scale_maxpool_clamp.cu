// y = clamp(max_pool(group_norm(conv)·scale), low, high), and its gradient: what follows the library's
// convolution.
//
// v, dv (N, C, H, W)         the convolution without its bias; S = H·W
// y, dy (N, C, PH, PW)       the result; PH = H / POOL_H, PW = W / POOL_W, floored
// extreme, index like y      the v that a window selects, and its place in the window
// The slope of group_norm(v)·scale has the sign of weight·scale, known beforehand. So one pass over v gives
// the statistics and each window's selected v (the largest, or for a negative slope the smallest); affine and
// clamp then see y's size only. Bound by memory: forward reads v once; backward reads v and writes dv once.
#include "norm/statistics.cuh"

#ifndef POOL_H
#define POOL_H 2
#define POOL_W 2
#endif

// A plane has fewer than 2³¹ elements, so that places in it have 32 bits.
struct Image {
  int H, W;
  HOST_DEVICE int pooled_height() const { return H / POOL_H; }
  HOST_DEVICE int pooled_width() const { return W / POOL_W; }
  HOST_DEVICE int pooled() const { return pooled_height() * pooled_width(); }
};

__device__ accumulate_t sign(accumulate_t x) {
  return x > 0 ? accumulate_t(1) : x < 0 ? accumulate_t(-1) : accumulate_t(0);
}

// Statistics and selected values of a plane; a block per (sample, channel). `index` may be null.
__global__ void __launch_bounds__(kThreads)
pool_statistics_kernel(value_t* extreme, index_t* index, accumulate_t* mean, accumulate_t* m2,
                       const value_t* v, const accumulate_t* weight, const accumulate_t* scale, int64_t C,
                       Image image) {
  const unsigned plane = blockIdx.x, c = plane % unsigned(C);
  const int W = image.W, pooled_width = image.pooled_width();
  const int64_t pooled = int64_t(plane) * image.pooled();
  const accumulate_t direction = sign(weight[c] * scale[c]);
  const value_t* in = v + int64_t(plane) * image.H * W;
  ShiftedSums sums;
  for (int p = threadIdx.x; p < image.pooled(); p += kThreads) {
    const value_t* window = in + p / pooled_width * POOL_H * W + p % pooled_width * POOL_W;
    accumulate_t best = 0, selected = 0;
    int where = 0;
#pragma unroll
    for (int h = 0; h < POOL_H; h++)
#pragma unroll
      for (int w = 0; w < POOL_W; w++) {
        const accumulate_t value = accumulate_t(window[h * W + w]);
        sums.add(value);
        if (h + w == 0 || replaces_maximum(value * direction, best))
          best = value * direction, selected = value, where = h * POOL_W + w;
      }
    extreme[pooled + p] = value_t(selected);
    if (index) index[pooled + p] = index_t(where);
  }
  // Rows and columns that fill no window count for the statistics alone.
  const int covered_height = image.pooled_height() * POOL_H, covered_width = pooled_width * POOL_W;
  const int right = W - covered_width, below = (image.H - covered_height) * W;
  for (int i = threadIdx.x; i < covered_height * right; i += kThreads)
    sums.add(accumulate_t(in[i / right * W + covered_width + i % right]));
  for (int i = threadIdx.x; i < below; i += kThreads) sums.add(accumulate_t(in[covered_height * W + i]));
  const Moments<double> moments = block_merge(sums.moments());
  if (threadIdx.x == 0) mean[plane] = moments.mean, m2[plane] = moments.m2;
}

// y from the selected values; a block per (sample, channel). In a flat channel, all of whose values tie
// behind the normalisation, each window selects its first value instead, as max_pool2d does; that counts for
// backward alone, so only where there is an index.
__global__ void __launch_bounds__(kThreads)
apply_kernel(output_t* y, value_t* extreme, index_t* index, const value_t* v, const accumulate_t* mean,
             const accumulate_t* m2, const accumulate_t* group_mean, const accumulate_t* group_rstd,
             const accumulate_t* conv_bias, const accumulate_t* weight, const accumulate_t* bias,
             const accumulate_t* scale, accumulate_t low, accumulate_t high, GroupShape shape, Image image) {
  const int plane = blockIdx.x, c = plane % shape.C, n = plane / shape.C;
  const int64_t pooled = image.pooled();
  const Normaliser normalise = normaliser(group_mean, group_rstd, conv_bias, weight, bias, shape, n, c);
  const bool flat = index && is_flat(mean[plane] + conv_bias[c], m2[plane], normalise.slope, normalise(mean[plane]),
                                     [&](accumulate_t z) { return z * scale[c]; });
  for (int64_t i = threadIdx.x; i < pooled; i += kThreads) {
    if (flat) {
      const int64_t row = i / image.pooled_width() * POOL_H, column = i % image.pooled_width() * POOL_W;
      extreme[plane * pooled + i] = v[plane * shape.S + row * image.W + column];
      index[plane * pooled + i] = 0;
    }
    const accumulate_t z = normalise(accumulate_t(extreme[plane * pooled + i]));
    // The formula of conv2d_groupnorm_scale_maxpool_clamp.
    y[plane * pooled + i] = output_t(clamp(z * scale[c], low, high));
  }
}

// sums (2, N, C) of dz and dz·(u - mean), and scale_gradient (N, C); a block per (sample, channel).
__global__ void __launch_bounds__(kThreads)
backward_sums_kernel(accumulate_t* sums, accumulate_t* scale_gradient, const output_t* dy,
                     const value_t* extreme, const accumulate_t* group_mean,
                     const accumulate_t* group_rstd, const accumulate_t* conv_bias,
                     const accumulate_t* weight, const accumulate_t* bias, const accumulate_t* scale,
                     accumulate_t low, accumulate_t high, GroupShape shape, int64_t pooled) {
  const int plane = blockIdx.x, c = plane % shape.C;
  const Normaliser normalise =
      normaliser(group_mean, group_rstd, conv_bias, weight, bias, shape, plane / shape.C, c);
  accumulate_t sum[3] = {};
  for (int64_t i = threadIdx.x; i < pooled; i += kThreads) {
    // The gradient of conv2d_groupnorm_scale_maxpool_clamp.
    const accumulate_t value = accumulate_t(extreme[plane * pooled + i]), z = normalise(value);
    const accumulate_t passed =
        clamp_passes(z * scale[c], low, high) ? accumulate_t(dy[plane * pooled + i]) : accumulate_t(0);
    sum[0] += passed * scale[c], sum[1] += passed * scale[c] * normalise.centred(value), sum[2] += passed * z;
  }
  block_sum(sum);
  if (threadIdx.x == 0) {
    sums[plane] = sum[0], sums[shape.N * shape.C + plane] = sum[1];
    scale_gradient[plane] = sum[2];
  }
}

// A warp per row of pixels.
__global__ void __launch_bounds__(kThreads)
backward_kernel(value_t* dv, const output_t* dy, const value_t* v, const index_t* index,
                const accumulate_t* coefficients, const accumulate_t* group_mean,
                const accumulate_t* group_rstd, const accumulate_t* conv_bias, const accumulate_t* weight,
                const accumulate_t* bias, const accumulate_t* scale, accumulate_t low, accumulate_t high,
                GroupShape shape, Image image, unsigned chunks) {
  const int plane = blockIdx.x / chunks, n = plane / shape.C, c = plane % shape.C;
  const int group = n * shape.G + c / shape.channels(), pooled_width = image.pooled_width();
  const Normaliser normalise = normaliser(group_mean, group_rstd, conv_bias, weight, bias, shape, n, c);
  const accumulate_t constant = coefficients[group], linear = coefficients[shape.N * shape.G + group];
  const accumulate_t factor = scale[c], selected = factor * normalise.slope;
  const int W = image.W, first_row = int(blockIdx.x % chunks) * kWarps + threadIdx.x / 32;
  for (int h = first_row; h < image.H; h += int(chunks) * kWarps) {
    const int64_t row = plane * shape.S + int64_t(h) * W;
    const int64_t windows = int64_t(plane) * image.pooled() + h / POOL_H * pooled_width;
    const int place = h % POOL_H * POOL_W;
    const bool row_pools = h / POOL_H < image.pooled_height();
#pragma unroll 4
    for (int w = threadIdx.x % 32; w < W; w += 32) {
      const accumulate_t value = accumulate_t(v[row + w]);
      // The gradient of conv2d_groupnorm_scale_maxpool_clamp.
      accumulate_t result = constant + linear * normalise.centred(value);
      const int64_t window = windows + w / POOL_W;
      if (row_pools && w / POOL_W < pooled_width && index[window] == index_t(place + w % POOL_W) &&
          clamp_passes(normalise(value) * factor, low, high))
        result += accumulate_t(dy[window]) * selected;
      dv[row + w] = value_t(result);
    }
  }
}

// statistics as in GroupStatistics; index without elements where no gradient is wanted.
EXPORT void forward(output_t* y, value_t* extreme, index_t* index, accumulate_t* statistics, const value_t* v,
                    const accumulate_t* conv_bias, const accumulate_t* weight, const accumulate_t* bias,
                    const accumulate_t* scale, double low, double high, double eps, int64_t N, int64_t C,
                    int64_t G, int64_t H, int64_t W, cudaStream_t stream) {
  const GroupShape shape{N, C, G, H * W};
  const Image image{int(H), int(W)};
  const auto [mean, m2, group_mean, group_rstd, kept_conv_bias, kept_bias] =
      GroupStatistics(statistics, N, C, G);
  pool_statistics_kernel<<<N * C, kThreads, 0, stream>>>(extreme, index, mean, m2, v, weight, scale, C,
                                                         image);
  merge_groups_kernel<<<blocks_for(N * G, 128), 128, 0, stream>>>(group_mean, group_rstd, mean, m2, conv_bias,
                                                                  eps, shape, bias,
                                                                  kept_conv_bias, kept_bias);
  apply_kernel<<<N * C, kThreads, 0, stream>>>(y, extreme, index, v, mean, m2, group_mean, group_rstd, conv_bias,
                                               weight, bias, scale, low, high, shape, image);
}

// The gradients of v and, summed over the samples, of the parameters; d_scale has `scales` elements, C or 1.
// scratch holds the parameters' gradients by sample (4, N, C), sums (2, N, C) and coefficients (2, N, G).
EXPORT void backward(value_t* dv, accumulate_t* d_conv_bias, accumulate_t* d_weight, accumulate_t* d_bias,
                     accumulate_t* d_scale, accumulate_t* scratch, const output_t* dy, const value_t* v,
                     const value_t* extreme, const index_t* index, const accumulate_t* statistics,
                     const accumulate_t* weight, const accumulate_t* scale, double low, double high,
                     int64_t scales, int64_t N, int64_t C, int64_t G, int64_t H, int64_t W,
                     cudaStream_t stream) {
  const GroupShape shape{N, C, G, H * W};
  const auto [mean, m2, group_mean, group_rstd, conv_bias, bias] = GroupStatistics(statistics, N, C, G);
  accumulate_t *gradients = scratch, *sums = gradients + 4 * N * C, *coefficients = sums + 2 * N * C;
  const Image image{int(H), int(W)};
  const unsigned chunks = blocks_for(H, kWarps * 8);  // 8 rows a warp
  backward_sums_kernel<<<N * C, kThreads, 0, stream>>>(sums, gradients + 3 * N * C, dy, extreme, group_mean,
                                                       group_rstd, conv_bias, weight, bias, scale, low, high,
                                                       shape, image.pooled());
  group_gradient_kernel<<<blocks_for(N * G, 128), 128, 0, stream>>>(
      coefficients, gradients, sums, mean, group_mean, group_rstd, conv_bias, weight, shape);
  backward_kernel<<<N * C * chunks, kThreads, 0, stream>>>(dv, dy, v, index, coefficients, group_mean,
                                                           group_rstd, conv_bias, weight, bias, scale, low,
                                                           high, shape, image, chunks);
  sum_rows({{d_conv_bias, C}, {d_weight, C}, {d_bias, C}, {d_scale, scales}}, gradients, N, C, stream);
}
