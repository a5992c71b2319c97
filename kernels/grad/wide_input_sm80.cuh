// The input of the transposed convolution by mma.sync: g, packed as that mainloop's operand, a batch slice at
// a time. One that fits in the L2 cache is hardly written to memory.
#pragma once
#include "conv/wide_sm80.cuh"
#include "grad/masked.cuh"

namespace grad {

constexpr int kPackWarps = kPackThreads / 32;  // a channel group each

// g to packed (samples, kChannelGroups, kParts, S, 8). The source and `largest` from the first of the samples
// on. Grid: strips of a sample, channel groups, samples.
template <class Conv, class Source>
__global__ void __launch_bounds__(kPackThreads)
    pack_gradient_kernel(uint4* packed, Source source, const uint32_t* largest, int64_t height,
                         int64_t width) {
#if __CUDA_ARCH__ >= 800
  constexpr int kGroups = Conv::kChannelGroups, kParts = Conv::kParts;
  const int group = blockIdx.y * kPackWarps + threadIdx.x / 32, lane = threadIdx.x % 32;
  if (group >= kGroups) return;
  const Strips strips(height, width);
  const unsigned of_row = strips.of_row;
  const StripPlace place{blockIdx.z, int(blockIdx.x / of_row), int(blockIdx.x % of_row) * kStrip};
  typename Source::Strip strip;
  strip.load(source.dy, source.words, place, strips, group);
  const float to_operand = power_of_two(Conv::kScaled ? Source::sample_exponent(largest[place.n]) : 0);
  float values[kLanePixels][8];
  strip.for_each(source.tail, [&](int i, int c, const auto& gradient) {
    values[i][c] = Conv::kScaled ? Conv::scaled(gradient.of[0], to_operand) : gradient.of[0];
  });
  const int64_t S = height * width;
  uint4* const to = packed + (place.n * kGroups + group) * kParts * S + place.row * width + place.column;
#pragma unroll
  for (int i = 0; i < kLanePixels; i++)
    if (place.column + lane + i * 32 < width) Conv::pack_pixel(to + lane + i * 32, S, values[i]);
#endif
}

template <class Conv, class Source>
void pack_gradient(uint4* packed, const Source& source, const uint32_t* largest, int64_t N, int64_t height,
                   int64_t width, cudaStream_t stream) {
  const dim3 grid(Strips(height, width).count(1), ceil_div(Conv::kChannelGroups, kPackWarps), N);
  pack_gradient_kernel<Conv><<<grid, kPackThreads, 0, stream>>>(packed, source, largest, height, width);
}

}  // namespace grad
