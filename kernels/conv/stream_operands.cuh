// What the mainloop of conv/stream.cuh multiplies: sizes, and the packing of x and weights as the copy engine
// and tensor cores want them.
//
//   x        (N, (D,) H, W, kPixel) of operands: C padded to a multiple of 8; where it is that already, it is
//            not packed. Split, 16 channels' high parts and then their low ones, or 8 and 8 where that is all
//   weights  [channel block][group of kGroup operands of a pixel][tap], kBlockChannels rows of kWeightRow
//            values, swizzled (core/tensor_map.cuh): as a pixel's; beside 8 and 8, [high, high, low, 0]
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
  // Of a part's neighbours; a pixel's operands, and those of a group.
  static constexpr int kParts = Operands::kParts, kBeside = kParts == 1 || kChannelsIn <= 8 ? 8 : 16;
  static constexpr int kPixel = ceil_div(kChannelsIn, kBeside) * kBeside * kParts;
  static constexpr int kGroup = kPixel > 32 ? 64 : kPixel > 16 ? 32 : 16;
  static constexpr int kGroups = ceil_div(kPixel, kGroup), kSlabs = 64 / kGroup;
  static constexpr int kSteps = ceil_div(kGroups * kTaps, kSlabs);
  static constexpr int kLastSlabs = kGroups * kTaps - (kSteps - 1) * kSlabs;  // of the last step
  // Sixteens of channels of a group, and of the last one; products of depth 16 for each, and where their
  // operands lie, in sixteens of values: weights' and x's.
  static constexpr int kDepth = kParts == 1 || kBeside == 8 ? 16 : 32;
  static constexpr int kDeep = kGroup / kDepth, kLastDeep = ceil_div(kPixel - (kGroups - 1) * kGroup, kDepth);
  static constexpr int kProducts = kParts == 1 ? 1 : kBeside == 8 ? 2 : 3;
  static HOST_DEVICE constexpr int of_weight(int product) { return product == 1; }
  static HOST_DEVICE constexpr int of_image(int product) { return product == 2; }
  static constexpr int kWeightRow = kParts == 2 && kBeside == 8 ? 2 * kGroup : kGroup;
  static constexpr int kBlockChannels = kBlockChannels_, kColumns = kColumns_, kCluster = kCluster_;
  static constexpr int kLead = kLead_ < kSteps ? kLead_ : kSteps;
  static constexpr int kChannelBlocks = ceil_div(kChannelsOut, kBlockChannels);
  static constexpr int kPaddedOut = kChannelBlocks * kBlockChannels;
  static constexpr int kTilePositions = kColumns * 128 / kBlockChannels;
  static constexpr int kWeightBytes = kBlockChannels * kWeightRow * 2;   // of a tap of a group
  static constexpr int kImageBytes = kTilePositions * kGroup * 2;    // of that
  static constexpr int64_t kPackedWeights = int64_t(kChannelBlocks) * kGroups * kTaps * kWeightBytes / 16;  // uint4
  static_assert((kBlockChannels == 64 || kBlockChannels == 128) && kColumns % 64 == 0);

  // Eights of channels of a pixel; where the first part of one lies, in units of 16 bytes, and the next part.
  static constexpr int kEights = kPixel / kParts / 8, kPartPitch = kBeside / 8;
  static HOST_DEVICE constexpr int unit_of(int eight) {
    return eight / kPartPitch * (kPartPitch * kParts) + eight % kPartPitch;
  }
  // What a row of weights has at place k of a group: the channel, and which part, or kParts for zero.
  struct Entry { int channel, part; };
  static __device__ __forceinline__ Entry entry(int group, int k) {
    if (kParts == 1) return {group * kGroup + k, 0};
    if (kBeside == 8) return {k % 8, k < 16 ? 0 : k < 24 ? 1 : 2};
    return {group * (kGroup / 2) + k / 32 * 16 + k % 16, k / 16 % 2};
  }
  // An infinite magnitude marks a sample that is computed again.
  static __device__ __forceinline__ int sample_exponent(uint32_t largest) {
    return largest >= __float_as_uint(INFINITY) ? Operands::kFirstExponent : Operands::sample_exponent(largest);
  }
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
  constexpr int kUnits = Conv::kWeightRow / 8;  // of a row
  for (int i = threadIdx.x; i < Conv::kGroups * kTaps * kUnits; i += kPackThreads) {
    const int unit = i / kTaps, tap = i % kTaps, group = unit / kUnits;
    union { typename Conv::operand_t values[8]; uint4 all; } pack;
#pragma unroll
    for (int k = 0; k < 8; k++) {
      const auto [c, part] = Conv::entry(group, unit % kUnits * 8 + k);
      float value = real && c < Conv::kChannelsIn && part < Conv::kParts
                        ? float(weight[weight_index<Conv>(channel, c, tap)])
                        : 0.f;
      if constexpr (Conv::kScaled) value = Conv::scaled(value, power_of_two(exponent));
      pack.values[k] = Conv::split(value).part[part % Conv::kParts];
    }
    const int64_t first = (int64_t(block) * (Conv::kGroups * kTaps) + group * kTaps + tap) * kBlockChannels;
    packed[(first + row) * kUnits + swizzled<Conv::kWeightRow>(row, unit % kUnits)] = pack.all;
  }
}

// --------------------------------------------------------------------------------------------------------- x

constexpr int kImageThreads = 256, kImagePatch = 64;  // channels and positions of a block

// x (N, kChannelsIn, S) to packed (N, S, kPixel) under the scale 2^kFirstExponent, and largest[n] = the bits of
// the largest magnitude of sample n; where operands are single, the largest finite one. Grid: positions, channels,
// samples.
template <class Conv>
__global__ void __launch_bounds__(kImageThreads)
pack_image_kernel(uint4* packed, uint32_t* largest, const typename Conv::value_t* x, int64_t N, int64_t S) {
#if __CUDA_ARCH__ >= 800
  constexpr int kPitch = kImagePatch / 2 + 1;  // words of two channels; no conflicts
  constexpr int kParts = Conv::kParts;
  __shared__ uint32_t patch[kParts][kImagePatch * kPitch];
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
      union { operand_t two[2]; uint32_t word; } pack[kParts];
#pragma unroll
      for (int half = 0; half < 2; half++) {
        float v = value[i + half];
        if constexpr (Conv::kScaled) {
          largest_magnitude = kParts == 1 ? larger_magnitude(largest_magnitude, v)
                                          : fmaxf(largest_magnitude, fabsf(v));
          v = Conv::scaled(v, power_of_two(Conv::kFirstExponent));
        }
        const auto parts = Conv::split(v);
#pragma unroll
        for (int part = 0; part < kParts; part++) pack[part].two[half] = parts.part[part];
      }
#pragma unroll
      for (int part = 0; part < kParts; part++)
        patch[part][(i / 2 % 2 * 32 + lane) * kPitch + i / 4 * 8 + warp] = pack[part].word;
    }
    if constexpr (Conv::kScaled) raise_largest(largest + n, largest_magnitude);
    __syncthreads();  // the patch is there
#pragma unroll
    for (int i = threadIdx.x; i < kImagePatch * 8; i += kImageThreads) {
      const int position = i / 8, eight = first_channel / 8 + i % 8;
      if (first + position >= S || eight >= Conv::kEights) continue;
      uint4* const to = packed + (n * S + first + position) * (Conv::kPixel / 8) + Conv::unit_of(eight);
#pragma unroll
      for (int part = 0; part < kParts; part++) {
        const uint32_t* const from = patch[part] + position * kPitch + i % 8 * 4;
        to[part * Conv::kPartPitch] = make_uint4(from[0], from[1], from[2], from[3]);
      }
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
    const int64_t eights = S * Conv::kEights, stride = int64_t(gridDim.x) * kImageThreads;
    for (int64_t i = int64_t(blockIdx.x) * kImageThreads + threadIdx.x; i < eights; i += stride) {
      const int64_t channel = i / S * 8, position = i % S;
      float value[8];
#pragma unroll
      for (int c = 0; c < 8; c++) {
        const bool real = channel + c < Conv::kChannelsIn;
        const float v = real ? float(x[(n * Conv::kChannelsIn + channel + c) * S + position]) : 0.f;
        value[c] = Conv::scaled(v, power_of_two(exponent));
      }
      Conv::pack_pixel(packed + (n * S + position) * (Conv::kPixel / 8) + Conv::unit_of(channel / 8),
                       Conv::kPartPitch, value);
    }
  }
#endif
}

// ---------------------------------------------------------------------------------------------------- launch

template <class Conv>
void pack_image(uint4* packed, uint32_t* largest, const typename Conv::value_t* x, int64_t N, int64_t S,
                cudaStream_t stream) {
  const unsigned samples = N < 65535 ? N : 65535;
  const dim3 grid((S + kImagePatch - 1) / kImagePatch, ceil_div(Conv::kEights * 8, kImagePatch), samples);
  pack_image_kernel<Conv><<<grid, kImageThreads, 0, stream>>>(packed, largest, x, N, S);
  const dim3 repack_grid(32, samples);
  if constexpr (Conv::kScaled)
    repack_image_kernel<Conv><<<repack_grid, kImageThreads, 0, stream>>>(packed, largest, x, N, S);
}

}  // namespace conv
