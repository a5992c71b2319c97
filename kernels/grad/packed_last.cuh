// Packs x or g that lies channels last, (N, S, C), to the units that grad/packed_weight.cuh takes, (N, parts, C / 8, pixels), with
// zeros around it where there are some: what conv/stream_views.cuh does of planes, under the same scales.
#pragma once
#include "conv/stream_views.cuh"

namespace grad {

// A warp packs 8 pixels of 4 neighbouring units, 32 channels: it reads and writes whole lines of 128 bytes (of 16 bits reads half ones).
constexpr int kLastUnits = 4, kLastPixels = 32 / kLastUnits;

// As conv's look_ahead_kernel: of every kLooksAt positions one, with all of its channels; in the next row of so many columns another one.
template <class Conv>
__global__ void __launch_bounds__(conv::kImageThreads)
look_ahead_last_kernel(conv::Scales<typename Conv::Operands> scales, const float* x, int64_t S) {
#if __CUDA_ARCH__ >= 800
  constexpr int C = Conv::kChannelsIn;
  const int64_t step = min(S, int64_t(conv::kLooksAt)), looks = (S + step - 1) / step;
  for (int64_t n = blockIdx.y; n < scales.N; n += gridDim.y) {
    float largest = 0.f;
#pragma unroll 4
    for (int64_t i = int64_t(blockIdx.x) * conv::kImageThreads + threadIdx.x; i < looks * C; i += gridDim.x * conv::kImageThreads) {
      const int64_t look = i / C, position = look * step + look % step;
      if (position < S) largest = conv::larger_magnitude(largest, x[(n * S + position) * C + i % C]);
    }
    conv::raise_largest(scales.seen() + n, largest);
  }
#endif
}

// 8 neighbouring channels, as they lie: `at` is a multiple of 16 bytes where C is a multiple of 8. Those from `count` on aren't there.
template <bool kWhole, class T> __device__ __forceinline__ void load_eight(T (&eight)[8], const T* at, int count) {
  if constexpr (kWhole) {
    union { uint4 words[sizeof(T) / 2]; T values[8]; } pack;
#pragma unroll
    for (int i = 0; i < int(sizeof(T) / 2); i++) pack.words[i] = reinterpret_cast<const uint4*>(at)[i];
#pragma unroll
    for (int c = 0; c < 8; c++) eight[c] = pack.values[c];
  } else {
#pragma unroll
    for (int c = 0; c < 8; c++) eight[c] = c < count ? at[c] : T(0.f);
  }
}

// As conv's pack_views_kernel. Grid: shares of a sample, samples.
template <class Conv, bool kAgain>
__global__ void __launch_bounds__(conv::kImageThreads)
    pack_last_kernel(uint4* packed, conv::Scales<typename Conv::Operands> scales, const typename Conv::value_t* x, conv::Lattice at) {
#if __CUDA_ARCH__ >= 800
  using value_t = typename Conv::value_t;
  constexpr int C = Conv::kChannelsIn, kAcross = conv::ceil_div(Conv::kEights, kLastUnits), kOfWarp = conv::kImageThreads / 32;
  const int64_t S = int64_t(at.extents[0]) * at.extents[1] * at.extents[2];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, patches = conv::ceil_div(at.sample, kLastPixels) * kAcross;
  for (int64_t n = blockIdx.y; n < scales.N; n += gridDim.y) {
    int exponent;
    if (!scales.template packs<kAgain>(n, exponent)) continue;
    float largest = 0.f;
    for (int i = blockIdx.x * kOfWarp + warp; i < patches; i += gridDim.x * kOfWarp) {
      const int eight = i % kAcross * kLastUnits + lane % kLastUnits, pixel = i / kAcross * kLastPixels + lane / kLastUnits;
      if (eight >= Conv::kEights || pixel >= at.sample) continue;
      const int depth = pixel / at.plane, of_plane = pixel - depth * at.plane, line = of_plane / at.row;
      const int place[] = {depth - at.before[0], line - at.before[1], of_plane - line * at.row - at.before[2]};
      const bool inside = unsigned(place[0]) < unsigned(at.extents[0]) && unsigned(place[1]) < unsigned(at.extents[1]) &&
                          unsigned(place[2]) < unsigned(at.extents[2]);
      const int64_t position = (int64_t(place[0]) * at.extents[1] + place[1]) * at.extents[2] + place[2];
      value_t values[8] = {};
      if (inside) load_eight<C % 8 == 0>(values, x + (n * S + position) * C + eight * 8, C - eight * 8);
      conv::pack_eight<Conv, !kAgain>(packed + (n * Conv::kUnits + eight) * int64_t(at.sample) + pixel, int64_t(Conv::kEights) * at.sample,
                                      values, 1, eight * 8, true, exponent, largest);
    }
    if constexpr (Conv::kScaled && !kAgain) conv::raise_largest(scales.largest + n, largest);
  }
#endif
}

// As conv::pack_views, of x channels last.
template <class Conv>
void pack_last(uint4* packed, const conv::Scales<typename Conv::Operands>& scales, const typename Conv::value_t* x,
               const conv::Lattice& at, cudaStream_t stream) {
  const int64_t N = scales.N, S = int64_t(at.extents[0]) * at.extents[1] * at.extents[2];
  const int64_t patches = int64_t(conv::ceil_div(at.sample, kLastPixels)) * conv::ceil_div(Conv::kEights, kLastUnits);
  if constexpr (Conv::kLooksAhead)
    look_ahead_last_kernel<Conv><<<conv::shares_of((S / conv::kLooksAt + 1) * Conv::kChannelsIn, N), conv::kImageThreads, 0, stream>>>(
        scales, x, S);
  pack_last_kernel<Conv, false><<<conv::shares_of(patches * 32, N), conv::kImageThreads, 0, stream>>>(packed, scales, x, at);
  if constexpr (Conv::kScaled)
    pack_last_kernel<Conv, true><<<dim3(32, unsigned(std::min(N, int64_t(65535)))), conv::kImageThreads, 0, stream>>>(packed, scales, x, at);
}

}  // namespace grad
