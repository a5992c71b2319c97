// What the mainloop of conv/stream.cuh multiplies: sizes, and the packing of x and weights as the copy engine
// and tensor cores want them.
//
//   x        (N, (D,) H, W, C) of operands, C padded to a multiple of 8; where it is that already, it is not
//            packed
//   weights  [channel block][group of kGroup channels in][tap], kBlockChannels rows of kGroup values, swizzled
//            (core/tensor_core.cuh)
// float32 is scaled as conv/wide_operands.cuh says; samples which the first scale does not fit are packed
// once more.
#pragma once
#include "conv/wide_operands.cuh"
#include "core/tensor_map.cuh"

namespace conv {

// A convolution, and how it is cut: a consumer computes 64 channels at kColumns positions, 128, 192 or 256.
// Its block's other consumer computes other channels at the same positions, where a block has kBlockChannels
// = 128 channels; where it has 64, the same channels at other positions. kCluster blocks, 1 or 2, share what
// both need. The first consumer is kLead steps ahead, so that one stores while the other still multiplies.
//
// A step of K is a tap of a group of 64 channels; of few channels it is kSlabs taps of all of them.
template <class Filter_, class Operands_, int kBlockChannels_, int kColumns_, int kCluster_, int kLead_>
struct Stream : Operands_ {
  using Filter = Filter_;
  using Operands = Operands_;
  static constexpr bool kTransposed = false;
  static constexpr int kChannelsIn = Filter::kIn, kChannelsOut = Filter::kOut;
  static constexpr int kDims = Filter::kDims, kTaps = Filter::kTaps;
  static constexpr int kGroup = kChannelsIn > 32 ? 64 : kChannelsIn > 16 ? 32 : 16;
  static constexpr int kGroups = ceil_div(kChannelsIn, kGroup), kSlabs = 64 / kGroup;
  static constexpr int kSteps = ceil_div(kGroups * kTaps, kSlabs);
  static constexpr int kLastSlabs = kGroups * kTaps - (kSteps - 1) * kSlabs;  // of the last step
  // Products of depth 16 for a tap: of a group, and of the last one.
  static constexpr int kProducts = kGroup / 16, kLastProducts = ceil_div(kChannelsIn - (kGroups - 1) * kGroup, 16);
  static constexpr int kBlockChannels = kBlockChannels_, kColumns = kColumns_, kCluster = kCluster_;
  static constexpr int kLead = kLead_ < kSteps ? kLead_ : kSteps;
  static constexpr int kChannelBlocks = ceil_div(kChannelsOut, kBlockChannels);
  static constexpr int kPaddedOut = kChannelBlocks * kBlockChannels;
  static constexpr int kPaddedIn = ceil_div(kChannelsIn, 8) * 8;
  static constexpr int kTilePositions = kColumns * 128 / kBlockChannels;
  static constexpr int kWeightBytes = kBlockChannels * kGroup * 2;   // of a tap of a group
  static constexpr int kImageBytes = kTilePositions * kGroup * 2;    // of that
  static constexpr int64_t kPackedWeights = int64_t(kChannelBlocks) * kGroups * kTaps * kWeightBytes / 16;  // uint4
  static_assert(!Operands::kSplit && (kBlockChannels == 64 || kBlockChannels == 128) && kColumns % 64 == 0);
};

// --------------------------------------------------------------------------------------------------- weights

// A block per output channel, a thread per 8 channels in of a tap; padding channels are 0. Also clears
// largest (N).
constexpr int kPackThreads = 256;
template <class Conv>
__global__ void __launch_bounds__(kPackThreads)
pack_stream_weight_kernel(uint4* packed, int32_t* exponents, uint32_t* largest,
                          const typename Conv::value_t* weight, int64_t N) {
  constexpr int kTaps = Conv::kTaps, kBlockChannels = Conv::kBlockChannels;
  const int channel = blockIdx.x;
  const bool real = channel < Conv::kChannelsOut;
  for (int64_t n = int64_t(blockIdx.x) * blockDim.x + threadIdx.x; n < N;
       n += int64_t(gridDim.x) * blockDim.x)
    largest[n] = 0;
  int exponent = 0;
  if constexpr (Conv::kScaled) {
    exponent = channel_exponent<Conv>(weight, channel, real);
    if (threadIdx.x == 0) exponents[channel] = exponent;
  }
  const int block = channel / kBlockChannels, row = channel % kBlockChannels;
  constexpr int kUnits = Conv::kGroup / 8;  // of a row
  for (int i = threadIdx.x; i < Conv::kGroups * kTaps * kUnits; i += kPackThreads) {
    const int unit = i / kTaps, tap = i % kTaps, slab = unit / kUnits * kTaps + tap;
    union { typename Conv::operand_t values[8]; uint4 all; } pack;
#pragma unroll
    for (int k = 0; k < 8; k++) {
      const int c = unit * 8 + k;
      float value =
          real && c < Conv::kChannelsIn ? float(weight[weight_index<Conv>(channel, c, tap)]) : 0.f;
      if constexpr (Conv::kScaled) value = Conv::scaled(value, power_of_two(exponent));
      pack.values[k] = typename Conv::operand_t(value);
    }
    const int64_t first = (int64_t(block) * (Conv::kGroups * kTaps) + slab) * kBlockChannels;
    packed[(first + row) * kUnits + swizzled<Conv::kGroup>(row, unit % kUnits)] = pack.all;
  }
}

// --------------------------------------------------------------------------------------------------------- x

constexpr int kImageThreads = 256, kImagePatch = 64;  // channels and positions of a block

// x (N, kChannelsIn, S) to packed (N, S, kPaddedIn) under the scale 2^kFirstExponent, and largest[n] = the
// bits of the largest finite magnitude of sample n. Grid: positions, channels, samples.
template <class Conv>
__global__ void __launch_bounds__(kImageThreads)
pack_image_kernel(uint4* packed, uint32_t* largest, const typename Conv::value_t* x, int64_t N, int64_t S) {
#if __CUDA_ARCH__ >= 800
  constexpr int kPitch = kImagePatch / 2 + 1;  // words of two channels; no conflicts
  __shared__ uint32_t patch[kImagePatch * kPitch];
  using operand_t = typename Conv::operand_t;
  const int first_channel = blockIdx.y * kImagePatch, lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int64_t first = int64_t(blockIdx.x) * kImagePatch;
  for (int64_t n = blockIdx.z; n < N; n += gridDim.z) {
    const auto* const in = x + (n * Conv::kChannelsIn + first_channel) * S + first;
    float value[16], largest_magnitude = 0.f;  // of a lane: two channels of two positions, four times
#pragma unroll
    for (int i = 0; i < 16; i++) {
      const int channel = (i / 4 * 8 + warp) * 2 + i % 2, position = i / 2 % 2 * 32 + lane;
      const bool real = first_channel + channel < Conv::kChannelsIn && first + position < S;
      value[i] = real ? float(in[channel * S + position]) : 0.f;
    }
#pragma unroll
    for (int i = 0; i < 16; i += 2) {
      union { operand_t two[2]; uint32_t word; } pack;
#pragma unroll
      for (int half = 0; half < 2; half++) {
        float v = value[i + half];
        if constexpr (Conv::kScaled) {
          largest_magnitude = larger_magnitude(largest_magnitude, v);
          v = Conv::scaled(v, power_of_two(Conv::kFirstExponent));
        }
        pack.two[half] = operand_t(v);
      }
      patch[(i / 2 % 2 * 32 + lane) * kPitch + i / 4 * 8 + warp] = pack.word;
    }
    if constexpr (Conv::kScaled) raise_largest(largest + n, largest_magnitude);
    __syncthreads();  // the patch is there
#pragma unroll
    for (int i = threadIdx.x; i < kImagePatch * 8; i += kImageThreads) {
      const int position = i / 8, unit = i % 8, channel = first_channel + unit * 8;
      const uint32_t* const from = patch + position * kPitch + unit * 4;
      if (first + position < S && channel < Conv::kPaddedIn)
        packed[((n * S + first + position) * Conv::kPaddedIn + channel) / 8] =
            make_uint4(from[0], from[1], from[2], from[3]);
    }
    __syncthreads();  // it has been read
  }
#endif
}

// The samples which the first scale does not fit. Grid: shares of a sample, samples.
template <class Conv>
__global__ void __launch_bounds__(kImageThreads)
    repack_image_kernel(uint4* packed, const uint32_t* largest, const typename Conv::value_t* x, int64_t N,
                        int64_t S) {
#if __CUDA_ARCH__ >= 800
  for (int64_t n = blockIdx.y; n < N; n += gridDim.y) {
    const int exponent = Conv::sample_exponent(largest[n]);
    if (exponent == Conv::kFirstExponent) continue;
    const int64_t units = S * Conv::kPaddedIn / 8, stride = int64_t(gridDim.x) * kImageThreads;
    for (int64_t i = int64_t(blockIdx.x) * kImageThreads + threadIdx.x; i < units; i += stride) {
      const int64_t channel = i / S * 8, position = i % S;
      float value[8];
#pragma unroll
      for (int c = 0; c < 8; c++) {
        const bool real = channel + c < Conv::kChannelsIn;
        const float v = real ? float(x[(n * Conv::kChannelsIn + channel + c) * S + position]) : 0.f;
        value[c] = Conv::scaled(v, power_of_two(exponent));
      }
      Conv::pack_pixel(packed + (n * S + position) * (Conv::kPaddedIn / 8) + channel / 8, 0, value);
    }
  }
#endif
}

// ---------------------------------------------------------------------------------------------------- launch

template <class Conv>
void pack_image(uint4* packed, uint32_t* largest, const typename Conv::value_t* x, int64_t N, int64_t S,
                cudaStream_t stream) {
  const unsigned samples = N < 65535 ? N : 65535;
  const dim3 grid((S + kImagePatch - 1) / kImagePatch, ceil_div(Conv::kPaddedIn, kImagePatch), samples);
  pack_image_kernel<Conv><<<grid, kImageThreads, 0, stream>>>(packed, largest, x, N, S);
  const dim3 repack_grid(32, samples);
  if constexpr (Conv::kScaled)
    repack_image_kernel<Conv><<<repack_grid, kImageThreads, 0, stream>>>(packed, largest, x, N, S);
}

}  // namespace conv
