// Packs x or g that lies channels last, (N, S, C), to the units that grad/packed_weight.cuh takes, (N, parts,
// C / 8, pixels), with zeros around it where there are some: what conv/stream_views.cuh does of planes, under
// the same scales.
#pragma once
#include "conv/stream_views.cuh"

namespace grad {

// A warp packs 8 pixels of 4 neighbouring units, 32 channels: it reads and writes whole lines of 128 bytes
// (of 16 bits reads half ones).
constexpr int kLastUnits = 4, kLastPixels = 32 / kLastUnits;

// As conv's look_ahead_kernel: of every kLooksAt positions one, with all of its channels; in the next row of
// so many columns another one.
template <class Conv>
__global__ void __launch_bounds__(conv::kImageThreads)
    look_ahead_last_kernel(conv::Scales<typename Conv::Operands> scales, const float* x, int64_t S) {
#if __CUDA_ARCH__ >= 800
  constexpr int C = Conv::kChannelsIn;
  const int64_t step = min(S, int64_t(conv::kLooksAt)), looks = (S + step - 1) / step;
  for (int64_t n = blockIdx.y; n < scales.N; n += gridDim.y) {
    float largest = 0.f;
#pragma unroll 4
    for (int64_t i = int64_t(blockIdx.x) * conv::kImageThreads + threadIdx.x; i < looks * C;
         i += gridDim.x * conv::kImageThreads) {
      const int64_t look = i / C, position = look * step + look % step;
      if (position < S) largest = conv::larger_magnitude(largest, x[(n * S + position) * C + i % C]);
    }
    conv::raise_largest(scales.seen() + n, largest);
  }
#endif
}

// 8 neighbouring channels, as they lie: `at` is a multiple of 16 bytes where C is a multiple of 8. Those from
// `count` on aren't there.
template <bool kWhole, class T>
__device__ __forceinline__ void load_eight(T (&eight)[8], const T* at, int count) {
  if constexpr (kWhole) {
    union {
      uint4 words[sizeof(T) / 2];
      T values[8];
    } pack;
#pragma unroll
    for (int i = 0; i < int(sizeof(T) / 2); i++) pack.words[i] = reinterpret_cast<const uint4*>(at)[i];
#pragma unroll
    for (int c = 0; c < 8; c++) eight[c] = pack.values[c];
  } else {
#pragma unroll
    for (int c = 0; c < 8; c++) eight[c] = c < count ? at[c] : T(0.f);
  }
}

// One that is packed: as conv::pack_views has it.
template <class Conv_> struct PackedLast {
  using Conv = Conv_;
  uint4* packed;
  conv::Scales<typename Conv::Operands> scales;
  const typename Conv::value_t* x;
  conv::Lattice at;

  int64_t positions() const { return int64_t(at.extents[0]) * at.extents[1] * at.extents[2]; }
  // Blocks, for which there is work; of samples that are packed again, which are few, if any.
  unsigned shares(bool again) const {
    const int64_t patches =
        int64_t(conv::ceil_div(at.sample, kLastPixels)) * conv::ceil_div(Conv::kEights, kLastUnits);
    return again ? 32 : conv::shares_of(patches * 32, scales.N).x;
  }

#if __CUDA_ARCH__ >= 800

  // A share of all samples' patches, of so many.
  template <bool kAgain> __device__ __forceinline__ void pack(int share, int shares) const {
    constexpr int C = Conv::kChannelsIn, kAcross = conv::ceil_div(Conv::kEights, kLastUnits),
                  kOfBlock = conv::kImageThreads / 32;
    const int64_t S = int64_t(at.extents[0]) * at.extents[1] * at.extents[2];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32,
              patches = conv::ceil_div(at.sample, kLastPixels) * kAcross;
    for (int64_t n = blockIdx.y; n < scales.N; n += gridDim.y) {
      int exponent;
      if (!scales.template packs<kAgain>(n, exponent)) continue;
      float largest = 0.f;
      for (int i = share * kOfBlock + warp; i < patches; i += shares * kOfBlock) {
        const int eight = i % kAcross * kLastUnits + lane % kLastUnits,
                  pixel = i / kAcross * kLastPixels + lane / kLastUnits;
        if (eight >= Conv::kEights || pixel >= at.sample) continue;
        const int depth = pixel / at.plane, of_plane = pixel - depth * at.plane, line = of_plane / at.row;
        const int place[] = {depth - at.before[0], line - at.before[1],
                             of_plane - line * at.row - at.before[2]};
        const bool inside = unsigned(place[0]) < unsigned(at.extents[0]) &&
                            unsigned(place[1]) < unsigned(at.extents[1]) &&
                            unsigned(place[2]) < unsigned(at.extents[2]);
        const int64_t position = (int64_t(place[0]) * at.extents[1] + place[1]) * at.extents[2] + place[2];
        typename Conv::value_t values[8] = {};
        if (inside) load_eight<C % 8 == 0>(values, x + (n * S + position) * C + eight * 8, C - eight * 8);
        conv::pack_eight<Conv, !kAgain, false>(
            packed + (n * Conv::kUnits + eight) * int64_t(at.sample) + pixel,
            int64_t(Conv::kEights) * at.sample, values, 1, eight * 8, true, exponent, largest);
      }
      if constexpr (Conv::kScaled && !kAgain) conv::raise_largest(scales.largest + n, largest);
    }
  }

#endif
};

template <bool kAgain, class One>
__global__ void __launch_bounds__(conv::kImageThreads) pack_last_kernel(One one) {
#if __CUDA_ARCH__ >= 800
  one.template pack<kAgain>(blockIdx.x, gridDim.x);
#endif
}

// The first so many blocks pack one, the others the other.
template <bool kAgain, class One, class Other>
__global__ void __launch_bounds__(conv::kImageThreads)
    pack_both_last_kernel(One one, Other other, unsigned first) {
#if __CUDA_ARCH__ >= 800
  if (blockIdx.x < first) one.template pack<kAgain>(blockIdx.x, first);
  else other.template pack<kAgain>(blockIdx.x - first, gridDim.x - first);
#endif
}

template <class One> void look_ahead_last(const One& one, cudaStream_t stream) {
  using Conv = typename One::Conv;
  if constexpr (Conv::kLooksAhead) {
    const dim3 grid =
        conv::shares_of((one.positions() / conv::kLooksAt + 1) * Conv::kChannelsIn, one.scales.N);
    look_ahead_last_kernel<Conv>
        <<<grid, conv::kImageThreads, 0, stream>>>(one.scales, one.x, one.positions());
  }
}

// Magnitudes have been cleared.
template <class One> void pack_last(const One& one, cudaStream_t stream) {
  const unsigned samples = unsigned(std::min(one.scales.N, int64_t(65535)));
  look_ahead_last(one, stream);
  pack_last_kernel<false><<<dim3(one.shares(false), samples), conv::kImageThreads, 0, stream>>>(one);
  if constexpr (One::Conv::kScaled)
    pack_last_kernel<true><<<dim3(one.shares(true), samples), conv::kImageThreads, 0, stream>>>(one);
}

// Two of as many samples, by launches for both.
template <class One, class Other>
void pack_both_last(const One& one, const Other& other, cudaStream_t stream) {
  const unsigned samples = unsigned(std::min(one.scales.N, int64_t(65535)));
  look_ahead_last(one, stream), look_ahead_last(other, stream);
  const dim3 all(one.shares(false) + other.shares(false), samples),
      again(one.shares(true) + other.shares(true), samples);
  pack_both_last_kernel<false><<<all, conv::kImageThreads, 0, stream>>>(one, other, one.shares(false));
  if constexpr (One::Conv::kScaled)
    pack_both_last_kernel<true><<<again, conv::kImageThreads, 0, stream>>>(one, other, one.shares(true));
}

}  // namespace grad
