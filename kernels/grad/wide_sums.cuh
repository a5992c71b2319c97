// The gradients of a tail's parameters by channel, sums over samples and pixels; and the largest finite
// magnitude of g, the gradient of v, in each sample.
#pragma once
#include "core/reduce.cuh"
#include "grad/masked.cuh"

namespace grad {

// Sums over a share of all strips, in sums (kCount, splits, kChannels). A lane's few values of a strip are
// summed as they are, strips in double: what cancels leaves no rounding errors of large sums. Raises
// largest[n]. Grid: splits, blocks of channels.
template <class Source, int kChannels>
__global__ void __launch_bounds__(kThreads)
gradient_sums_kernel(double* sums, uint32_t* largest, Source source, int64_t N, int64_t height,
                     int64_t width) {
#if __CUDA_ARCH__ >= 800
  using Strip = typename Source::Strip;
  constexpr int kCount = decltype(source.tail.gradient(0.f, Mask{}))::kCount;
  const int lane = threadIdx.x % 32, group = blockIdx.y * kWarps + threadIdx.x / 32;
  const Strips strips(height, width);
  const int64_t end = strips.count(N) * (blockIdx.x + 1) / gridDim.x;
  int64_t strip = strips.count(N) * blockIdx.x / gridDim.x;
  StripPlace place = strips[strip];
  double own_sums[kCount][8] = {};
  Strip ahead;  // the strip at `place`, on its way while the one before is summed
  if (strip < end) ahead.load(source.dy, source.words, place, strips, group);
  while (strip < end) {
    const int64_t n = place.n;
    float largest_of_sample = 0.f;  // of finite magnitudes
    while (strip < end && place.n == n) {
      const Strip gradients = ahead;
      ahead = {}, strips.advance(place);
      if (++strip < end) ahead.load(source.dy, source.words, place, strips, group);
      float of_strip[kCount][8] = {}, largest_of_strip = 0.f;
      gradients.for_each(source.tail, [&](int, int c, const auto& gradient) {
#pragma unroll
        for (int k = 0; k < kCount; k++) of_strip[k][c] += gradient.of[k];
        largest_of_strip = fmaxf(largest_of_strip, fabsf(gradient.of[0]));  // skips NaN
      });
      if (__any_sync(0xffffffffu, largest_of_strip == INFINITY)) {
        gradients.for_each(source.tail, [&](int, int, const auto& gradient) {
          largest_of_sample = larger_magnitude(largest_of_sample, gradient.of[0]);
        });
      } else {
        largest_of_sample = fmaxf(largest_of_sample, largest_of_strip);
      }
#pragma unroll
      for (int c = 0; c < 8; c++)
#pragma unroll
        for (int k = 0; k < kCount; k++) own_sums[k][c] += of_strip[k][c];
    }
    const uint32_t bits = __reduce_max_sync(0xffffffffu, __float_as_uint(largest_of_sample));
    if (lane == 0) atomicMax(&largest[n], bits);
  }
#pragma unroll
  for (int c = 0; c < 8; c++) {
#pragma unroll
    for (int offset = 16; offset; offset /= 2)
#pragma unroll
      for (int k = 0; k < kCount; k++)
        own_sums[k][c] += __shfl_down_sync(0xffffffffu, own_sums[k][c], offset);
    const int channel = group * 8 + c;
    double* const to = sums + int64_t(blockIdx.x) * kChannels + channel;
    if (lane == 0 && channel < kChannels)
#pragma unroll
      for (int k = 0; k < kCount; k++) to[k * int64_t(gridDim.x) * kChannels] = own_sums[k][c];
  }
#endif
}

// The gradients of as many parameters as the tail gives, the first that of v's bias, each by channel or of
// all channels together: in double and in a fixed order. largest_g (N): the bits of each sample's largest
// finite magnitude of g.
template <class Source, class... Parameters>
void sum_gradients(const Gradients<Source>& g, int32_t* largest_g, cudaStream_t stream,
                   const Parameters&... d_parameters) {
  constexpr int kChannels = Source::kChannels, kBlocks = ceil_div(kChannels, kWarps * 8);
  constexpr int kCount = sizeof...(Parameters);
  using Gradient = decltype(g.source.tail.gradient(0.f, Mask{}));
  static_assert(kCount == Gradient::kCount, "a gradient for each parameter");
  const RowSums of_parameters[] = {{d_parameters.data, d_parameters.numel()}...};
  for (const RowSums& each : of_parameters)
    expect(each.count == 1 || each.count == kChannels, "a gradient for each channel, or one for all");
  const int64_t splits = splits_for(g, 8 * device_attribute(cudaDevAttrMultiProcessorCount) / kBlocks);
  const Scratch<double> sums(kCount * splits * kChannels, stream);
  cudaMemsetAsync(largest_g, 0, g.N * 4, stream);
  const dim3 grid(splits, kBlocks);
  gradient_sums_kernel<Source, kChannels><<<grid, kThreads, 0, stream>>>(
      sums, reinterpret_cast<uint32_t*>(largest_g), g.source, g.N, g.height, g.width);
  sum_rows(of_parameters, sums.data, splits, kChannels, stream);
}

}  // namespace grad
