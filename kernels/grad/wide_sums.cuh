// The gradients of a tail's parameters by channel, sums over samples and pixels; the largest finite magnitude
// of g, the gradient of v, in each sample; and g itself in units (grad/packed.cuh), where the mainloops of
// the other gradients take it so (kTakesUnits). All of that in one pass over dy.
//
// The scale of a sample's units hangs on its largest magnitude, which nobody knows before. So every kSeen-th
// row is looked at first, which suggests a scale; the pass writes under that; and the samples that turn out
// not to fit it, mostly none, are written once more.
//
// Bytes at (128, 128, 126, 126): 1040 MB of dy and 66 MB of masks read, 520 MB of units written. Bound:
// memory 0.41 ms, of which 0.28 for the sums alone.
#pragma once
#include "core/reduce.cuh"
#include "grad/masked.cuh"
#include "grad/packed.cuh"

namespace grad {

// Do the mainloops of a build's gradients take g in units?
template <class Build> constexpr bool kTakesUnits = Build::kCapability == 90 && !Build::Operands::kSplit;

// g in units (N, kGroups, H', W'), of float32 under a scale for each sample. Channels that don't exist are
// zeros.
template <class Operands, int kChannels> struct Units {
  static constexpr int kGroups = ceil_div(kChannels, 8);
  static constexpr bool kScaled = Operands::kScaled;
  uint4* units;
  Scales scales;

#if __CUDA_ARCH__ >= 800
  __device__ __forceinline__ float first_scale(int64_t n) const {
    return power_of_two(kScaled ? scales.first(n) : 0);
  }
  // Of a strip: a lane's values of a channel group, under a scale.
  __device__ __forceinline__ void store(const float (&values)[kLanePixels][8], const StripPlace& at,
                                        const Strips& strips, int group) const {
    if (group >= kGroups) return;
    const int64_t row = ((at.n * kGroups + group) * strips.height + at.row) * strips.width;
#pragma unroll
    for (int i = 0, column = at.column + int(threadIdx.x % 32); i < kLanePixels; i++, column += 32)
      if (column < strips.width) Operands::pack_pixel(units + row + column, 0, values[i]);
  }
  static __device__ __forceinline__ float scaled(float g, float scale) {
    return kScaled ? Operands::scaled(g, scale) : g;
  }
#endif
};

// The units that a tensor has room for, which is as large as they are; and the scales that largest_g holds.
template <class Build, class Source, class Tensor>
uint4* units_of(const Gradients<Source>& g, const Tensor& units) {
  constexpr int kGroups = ceil_div(Source::kChannels, 8);
  expect(units.numel() == g.N * kGroups * g.height * g.width * 4, "units of g");
  return reinterpret_cast<uint4*>(const_cast<int32_t*>(&units.data[0]));
}
inline Scales scales_of(const int32_t* largest_g, int64_t N) {
  uint32_t* const largest = reinterpret_cast<uint32_t*>(const_cast<int32_t*>(largest_g));
  return {largest + N, largest};
}

// In its place where g is not written.
struct NoUnits {};

constexpr int kSeen = 32,
              kAgainBlocks = 8;  // of a sample's rows; of a sample that is mostly not written again

// Raises scales.seen by each kSeen-th row. Grid: strips of such rows of all samples, blocks of channels.
template <class Source, int kChannels>
__global__ void __launch_bounds__(kThreads)
    look_ahead_kernel(Scales scales, Source source, int64_t height, int64_t width) {
#if __CUDA_ARCH__ >= 800
  const Strips strips(height, width);
  const unsigned seen = unsigned(ceil_div(strips.height, kSeen) * strips.of_row);
  const int i = int(blockIdx.x % seen), group = blockIdx.y * kWarps + threadIdx.x / 32;
  const StripPlace place{blockIdx.x / seen, i / strips.of_row * kSeen, i % strips.of_row * kStrip};
  typename Source::Strip strip;
  strip.load(source.dy, source.words, place, strips, group);
  float largest = 0.f;
  strip.for_each(source.tail, [&](int, int, const auto& gradient) {
    largest = larger_magnitude(largest, gradient.of[0]);
  });
  raise_largest(scales.seen + place.n, largest);
#endif
}

// Writes again the samples that their first scale does not fit. Grid: kAgainBlocks of each, blocks of
// channels.
template <class Source, class Units>
__global__ void __launch_bounds__(kThreads)
    pack_again_kernel(Units units, Source source, int64_t height, int64_t width) {
#if __CUDA_ARCH__ >= 800
  const unsigned n = blockIdx.x / kAgainBlocks;
  const int exponent = units.scales.last(n), group = blockIdx.y * kWarps + threadIdx.x / 32;
  if (exponent == units.scales.first(n)) return;
  const Strips strips(height, width);
  const float scale = power_of_two(exponent);
#pragma unroll 1
  for (int i = blockIdx.x % kAgainBlocks; i < strips.height * strips.of_row; i += kAgainBlocks) {
    const StripPlace place{n, i / strips.of_row, i % strips.of_row * kStrip};
    typename Source::Strip strip;
    strip.load(source.dy, source.words, place, strips, group);
    float values[kLanePixels][8];
    strip.for_each(source.tail, [&](int i, int c, const auto& gradient) {
      values[i][c] = Units::scaled(gradient.of[0], scale);
    });
    units.store(values, place, strips, group);
  }
#endif
}

// Sums over a share of all strips, in sums (kCount, splits, kChannels). A lane's few values of a strip are
// summed as they are, strips in double: what cancels leaves no rounding errors of large sums. Raises
// largest[n], where it is there; and writes g, unless there are NoUnits. Grid: splits, blocks of channels.
template <class Source, int kChannels, class Units>
__global__ void __launch_bounds__(kThreads, 2)
    gradient_sums_kernel(double* sums, uint32_t* largest, Units units, Source source, int64_t N,
                         int64_t height, int64_t width) {
#if __CUDA_ARCH__ >= 800
  using Strip = typename Source::Strip;
  constexpr bool kPacks = !std::is_same_v<Units, NoUnits>;
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
    float scale = 1.f;
    if constexpr (kPacks) scale = units.first_scale(n);
    while (strip < end && place.n == n) {
      const Strip gradients = ahead;
      const StripPlace at = place;
      ahead = {}, strips.advance(place);
      if (++strip < end) ahead.load(source.dy, source.words, place, strips, group);
      float of_strip[kCount][8] = {}, largest_of_strip = 0.f, values[kLanePixels][8];
      gradients.for_each(source.tail, [&](int i, int c, const auto& gradient) {
        if constexpr (kPacks) values[i][c] = Units::scaled(gradient.of[0], scale);
#pragma unroll
        for (int k = 0; k < kCount; k++) of_strip[k][c] += gradient.of[k];
        largest_of_strip = fmaxf(largest_of_strip, fabsf(gradient.of[0]));  // skips NaN
      });
      if constexpr (kPacks) units.store(values, at, strips, group);
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
    if (lane == 0 && largest) atomicMax(&largest[n], bits);
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
// all channels together: in double and in a fixed order. largest_g (2, N): the bits of each sample's largest
// finite magnitude of g, and of what was seen of it ahead. units: of g, where the build takes them. Neither
// has elements where nobody wants them.
template <class Build, class Source, class... Parameters>
void sum_gradients(const Gradients<Source>& g, Out<int32_t> largest_g, Out<int32_t> units,
                   cudaStream_t stream, const Parameters&... d_parameters) {
  constexpr int kChannels = Source::kChannels, kBlocks = ceil_div(kChannels, kWarps * 8);
  constexpr int kCount = sizeof...(Parameters);
  using Gradient = decltype(g.source.tail.gradient(0.f, Mask{}));
  static_assert(kCount == Gradient::kCount, "a gradient for each parameter");
  const RowSums of_parameters[] = {{d_parameters.data, d_parameters.numel()}...};
  for (const RowSums& each : of_parameters)
    expect(each.count == 1 || each.count == kChannels, "a gradient for each channel, or one for all");
  expect(largest_g.numel() == (largest_g.empty() ? 0 : 2 * g.N), "two magnitudes of each sample");
  const int64_t splits = splits_for(g, 8 * device_attribute(cudaDevAttrMultiProcessorCount) / kBlocks);
  const Scratch<double> sums(kCount * splits * kChannels, stream);
  uint32_t* const largest = reinterpret_cast<uint32_t*>(largest_g.data);
  if (largest) cudaMemsetAsync(largest, 0, 2 * g.N * 4, stream);
  const auto sum = [&](const auto& written) {
    using Written = std::decay_t<decltype(written)>;
    gradient_sums_kernel<Source, kChannels, Written><<<dim3(splits, kBlocks), kThreads, 0, stream>>>(
        sums, largest, written, g.source, g.N, g.height, g.width);
  };
  if (!kTakesUnits<Build> || units.empty()) {
    sum(NoUnits{});
  } else if constexpr (kTakesUnits<Build>) {
    using Of = Units<typename Build::Operands, kChannels>;
    const Of written{units_of<Build>(g, units), scales_of(largest_g.data, g.N)};
    const dim3 seen(g.N * ceil_div(int(g.height), kSeen) * Strips(g.height, g.width).of_row, kBlocks);
    if (Of::kScaled && g.N > 0)
      look_ahead_kernel<Source, kChannels>
          <<<seen, kThreads, 0, stream>>>(written.scales, g.source, g.height, g.width);
    sum(written);
    if (Of::kScaled && g.N > 0)
      pack_again_kernel<Source, Of>
          <<<dim3(g.N * kAgainBlocks, kBlocks), kThreads, 0, stream>>>(written, g.source, g.height, g.width);
  }
  sum_rows(of_parameters, sums.data, splits, kChannels, stream);
}

}  // namespace grad
