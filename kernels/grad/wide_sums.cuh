// The gradients of the biases before and after the gates, sums of g and of dy·scale over samples and pixels;
// and the largest finite magnitude of g in each sample.
#pragma once
#include "grad/wide.cuh"
#include "core/reduce.cuh"

namespace {

// Sums over a share of all strips, in sums (2, shares, CHANNELS_OUT): of g, then of dy·scale. A lane's few
// values of a strip are summed as they are, strips in double: what cancels leaves no rounding errors of large
// sums. Raises largest[n]. Grid: shares, blocks of channels out.
__global__ void __launch_bounds__(kThreads)
gradient_sums_kernel(double* sums, uint32_t* largest, const output_t* dy, const uint32_t* gates, float scale,
                     int64_t N, int64_t height, int64_t width) {
#if __CUDA_ARCH__ >= 800
  const int lane = threadIdx.x % 32, plane = blockIdx.y * kWarps + threadIdx.x / 32;
  const Strips strips(height, width);
  const int64_t end = strips.count(N) * (blockIdx.x + 1) / gridDim.x;
  int64_t strip = strips.count(N) * blockIdx.x / gridDim.x;
  StripPlace place = strips[strip];
  double inner_sums[8] = {}, outer_sums[8] = {};
  GradientStrip<CHANNELS_OUT> ahead;  // the strip at `place`, on its way while the one before is summed
  if (strip < end) ahead.load(dy, gates, place, strips, plane);
  while (strip < end) {
    const int64_t n = place.n;
    float largest_of_sample = 0.f;  // of finite magnitudes
    while (strip < end && place.n == n) {
      const GradientStrip<CHANNELS_OUT> gradient = ahead;
      ahead = {}, strips.advance(place);
      if (++strip < end) ahead.load(dy, gates, place, strips, plane);
      float inner_sum[8] = {}, outer_sum[8] = {}, largest_of_strip = 0.f;
      gradient.for_each(scale, [&](int, int c, float outer, float inner) {
        // The gradient of conv2d_min_add_multiply_fused.
        inner_sum[c] += inner, outer_sum[c] += outer;
        largest_of_strip = fmaxf(largest_of_strip, fabsf(inner));  // skips NaN
      });
      if (__any_sync(0xffffffffu, largest_of_strip == INFINITY)) {
        gradient.for_each(scale, [&](int, int, float, float inner) {
          largest_of_sample = larger_magnitude(largest_of_sample, inner);
        });
      } else {
        largest_of_sample = fmaxf(largest_of_sample, largest_of_strip);
      }
#pragma unroll
      for (int c = 0; c < 8; c++) inner_sums[c] += inner_sum[c], outer_sums[c] += outer_sum[c];
    }
    const uint32_t bits = __reduce_max_sync(0xffffffffu, __float_as_uint(largest_of_sample));
    if (lane == 0) atomicMax(&largest[n], bits);
  }
#pragma unroll
  for (int c = 0; c < 8; c++) {
#pragma unroll
    for (int offset = 16; offset; offset /= 2) {
      inner_sums[c] += __shfl_down_sync(0xffffffffu, inner_sums[c], offset);
      outer_sums[c] += __shfl_down_sync(0xffffffffu, outer_sums[c], offset);
    }
    const int channel = plane * 8 + c;
    double* const to = sums + int64_t(blockIdx.x) * CHANNELS_OUT + channel;
    if (lane == 0 && channel < CHANNELS_OUT)
      to[0] = inner_sums[c], to[int64_t(gridDim.x) * CHANNELS_OUT] = outer_sums[c];
  }
#endif
}

}  // namespace
