// What a wide convolution's mainloops and its gradients share: a filter's sizes, the conversion of values to
// operands of tensor cores, the mainloops' arguments, and the packing of weights.
//
// Operands are float16, or bfloat16 where x is. float32 is scaled by powers of two, since float16's range is
// small: channel c of weight by 2^exponents[c], which brings its largest magnitude into [2^14, 2^15); a
// sample of x by 2^kFirstExponent, unless its largest magnitude asks for another power (sample_exponent).
#pragma once
#include <stdexcept>
#include <string>
#include <type_traits>

#include "conv/shape.h"
#include "core/launch.cuh"
#include "core/split.cuh"
#include "core/tensor_core.cuh"

namespace conv {

constexpr int kPackThreads = 256;  // of kernels that pack operands

using namespace tensor_core;

HOST_DEVICE constexpr int ceil_div(int a, int b) { return (a + b - 1) / b; }

// Throws std::runtime_error.
inline void expect(bool holds, const char* what) {
  if (!holds) throw std::runtime_error(std::string("expected ") + what);
}

// -------------------------------------------------------------------------------------------------- operands

// The exponent that brings a magnitude, given by its bits, into [2^kTop, 2^(kTop + 1)), but at most 127, the
// largest of a float32: under 2^127 even the smallest subnormal, 2^-149, is a float16, so that no digit is
// lost. 0 for zero.
__device__ __forceinline__ int top_exponent(uint32_t magnitude) {
  return magnitude == 0 ? 0 : min(kTop - ilogbf(__uint_as_float(magnitude)), 127);
}

__device__ __forceinline__ bool is_finite(float value) { return fabsf(value) < INFINITY; }

// max(largest, |value|), skipping inf and NaN.
__device__ __forceinline__ float larger_magnitude(float largest, float value) {
  return is_finite(value) ? fmaxf(largest, fabsf(value)) : largest;
}

#if __CUDA_ARCH__ >= 800

// Raises *largest, the bits of a magnitude, to the largest of the block's threads.
__device__ __forceinline__ void raise_largest(uint32_t* largest, float of_thread) {
  __shared__ uint32_t of_block;
  if (threadIdx.x == 0) of_block = 0;
  __syncthreads();  // cleared before anyone raises it
  const uint32_t of_warp = __reduce_max_sync(0xffffffffu, __float_as_uint(of_thread));
  if (threadIdx.x % 32 == 0) atomicMax(&of_block, of_warp);
  __syncthreads();  // complete before thread 0 reads it, and only thread 0 clears it again
  if (threadIdx.x == 0 && of_block > *(volatile uint32_t*)largest) atomicMax(largest, of_block);  // few do
}

#endif

// What a Value becomes: one operand, or, where kSplit, the sum of two float16, high and low.
template <class Value, bool kSplit_> struct Operands {
  using value_t = Value;
  using operand_t = std::conditional_t<std::is_same_v<Value, bfloat16_t>, bfloat16_t, half_t>;
  static constexpr bool kSplit = kSplit_, kLooksAhead = false,
                        kMarksInfinite = kSplit;                 // as a sample's largest magnitude
  static constexpr bool kScaled = std::is_same_v<Value, float>;  // others are operands as they are
  static constexpr int kParts = kSplit ? 2 : 1;
  static_assert(kScaled || !kSplit, "a value of 16 bits is one operand");

  // Samples are first scaled by 2^kFirstExponent. That is good enough where the largest scaled magnitude lies
  // in [2^kLowest, 2^(kTop + 1)): below 2^-14 float16 is subnormal and loses digits, so small values need
  // room above it.
  static constexpr int kFirstExponent = kSplit ? 10 : 4;
  static constexpr int kLowest = kSplit ? 8 : -4;

  // The exponent for a sample, from the bits of its largest finite magnitude.
  static __device__ __forceinline__ int sample_exponent(uint32_t largest) {
    const int fitting = top_exponent(largest), slack = fitting - kFirstExponent;
    return largest == 0 || (slack >= 0 && slack <= kTop - kLowest) ? kFirstExponent : fitting;
  }

  // value · scale, a power of two, to be converted to an operand. That conversion rounds a tie to even; the
  // library, for TF32, rounds it away from zero. A tie between two float16 ends in zeros, so with its last
  // bit set it lies beyond the middle, and is rounded away. Any other value stays on its side of the middle.
  // inf would become NaN, and is left alone. The two parts of a split operand hold all digits anyway.
  static __device__ __forceinline__ float scaled(float value, float scale) {
    const float product = value * scale;
    return !kSplit && is_finite(value) ? __uint_as_float(__float_as_uint(product) | 1) : product;
  }

  // inf and NaN go to the low part, which is multiplied by the other operand's high one alone; multiplied by
  // its low one, too, which may be zero or negative, inf would become NaN.
  struct Parts {
    operand_t part[kParts];
  };
  static __device__ __forceinline__ Parts split(float value) {
    Parts result;
    result.part[0] = operand_t(value);
    if constexpr (kSplit) {
      const float high = float(result.part[0]);
      const bool finite = high - high == 0.f;
      if (!finite) result.part[0] = operand_t(0.f);
      result.part[kParts - 1] = operand_t(finite ? value - high : value);
    }
    return result;
  }

  // Packs 8 channels of a pixel; their parts lie `part_pitch` units of 16 bytes apart.
  static __device__ __forceinline__ void pack_pixel(uint4* out, int64_t part_pitch, const float (&value)[8]) {
    union {
      operand_t operand[8];
      uint4 bits;
    } pack[kParts];
#pragma unroll
    for (int c = 0; c < 8; c++) {
      const Parts parts = split(value[c]);
#pragma unroll
      for (int part = 0; part < kParts; part++) pack[part].operand[c] = parts.part[part];
    }
#pragma unroll
    for (int part = 0; part < kParts; part++) out[part * part_pitch] = pack[part].bits;
  }
};

// --------------------------------------------------------------------------------------------- a convolution

constexpr int kTileWidth = 128;  // output pixels of a tile, part of a row

// How a convolution is cut into blocks: the input channels that are in shared memory at a time, a K block;
// the output channels of a block; and by mma.sync the output rows of a tile.
template <int kKBlock_, int kBlockChannels_, int kRows_ = 1> struct Tile {
  static constexpr int kKBlock = kKBlock_, kBlockChannels = kBlockChannels_, kRows = kRows_;
};

// A convolution as both mainloops see it. kTransposed: of flipped filters, over an input that zeros surround.
template <class Filter_, class Operands_, class Tile_, bool kTransposed_ = false> struct Wide : Operands_ {
  using Filter = Filter_;
  using Operands = Operands_;
  using Tile = Tile_;
  static constexpr bool kTransposed = kTransposed_;
  static constexpr int kChannelsIn = Filter::kIn, kChannelsOut = Filter::kOut;
  static constexpr int kKernelH = Filter::kHeight, kKernelW = Filter::kWidth, kTaps = Filter::kTaps;
  static constexpr int kKBlock = Tile::kKBlock, kKBlocks = ceil_div(kChannelsIn, kKBlock);
  static constexpr int kChannelGroups = kKBlocks * kKBlock / 8;  // of packed input: 16 bytes a pixel
  static constexpr int kTapSteps = kKBlock / 16;  // products of depth 16 for a tap and a K block
  static constexpr int kBlockChannels = Tile::kBlockChannels;
  static constexpr int kChannelBlocks = ceil_div(kChannelsOut, kBlockChannels);
  static constexpr int kPaddedOut = kChannelBlocks * kBlockChannels;
  static constexpr int kMTiles = kBlockChannels / 16;  // of a product: 16 output channels each
  // Of a tap and K block, in units of 16 bytes; and of all.
  static constexpr int kTapWeights = kTapSteps * Operands::kParts * kMTiles * 32;
  static constexpr int64_t kPackedWeights = int64_t(kChannelBlocks) * kKBlocks * kTaps * kTapWeights;
  static constexpr int kPitch = kTileWidth + kKernelW - 1;        // input pixels of a tile's row
  static constexpr int kRowBytes = kChannelGroups * kPitch * 16;  // of its operands [channel group][pixel]
  static constexpr int kPadRows = kTransposed ? kKernelH - 1 : 0;
  static constexpr int kPadColumns = kTransposed ? kKernelW - 1 : 0;
  static_assert(kKBlock % 16 == 0 && (kBlockChannels == 64 || kBlockChannels == 128));
};

// Does an `Out` take values with their place (reduce/wide.cuh), and not store them?
template <class Out, class = void> constexpr bool reduces = false;
template <class Out> constexpr bool reduces<Out, std::enable_if_t<Out::kReduces>> = true;

// What a convolution works on: where its input comes from, what it computes of each value v (a tail), and
// what becomes of v and of that (sinks). pack_weight_kernel makes packed_weight and exponents, and clears
// largest.
template <class Conv, class Source, class Tail, class Keep, class Out> struct Arguments {
  Out out;    // takes the tail's results
  Keep keep;  // takes what backward needs
  Source source;
  const uint4* packed_weight;
  const int32_t* exponents;  // (kPaddedOut): weights are scaled by 2^exponent
  uint32_t* largest;         // (N): the bits of each sample's largest finite magnitude
  Tail tail;
  int64_t N, H, W;  // of the input

  HOST_DEVICE int64_t height() const { return H + 2 * Conv::kPadRows - Conv::kKernelH + 1; }
  HOST_DEVICE int64_t width() const { return W + 2 * Conv::kPadColumns - Conv::kKernelW + 1; }
};

// A source: x (N, kChannelsIn, H, W). Its samples' largest magnitudes are found while it is read.
template <class Operands> struct Input {
  const typename Operands::value_t* x;
  static constexpr bool kGuessesScale = Operands::kScaled;
  static __device__ __forceinline__ int sample_exponent(uint32_t largest) {
    return Operands::sample_exponent(largest);
  }
};

// --------------------------------------------------------------------------------------------------- weights

#ifndef WEIGHT_LAST
#define WEIGHT_LAST 0
#endif
// Where a weight lies; a transposed convolution's are (kChannelsIn, kChannelsOut, kKernelH, kKernelW), and
// flipped. WEIGHT_LAST: channels in are its last axis, as channels last has it.
template <class Conv> __device__ __forceinline__ int64_t weight_index(int channel, int c, int tap) {
  constexpr int kTaps = Conv::kTaps;
  if (WEIGHT_LAST) return (int64_t(channel) * kTaps + tap) * Conv::kChannelsIn + c;
  return Conv::kTransposed ? (int64_t(c) * Conv::kChannelsOut + channel) * kTaps + kTaps - 1 - tap
                           : (int64_t(channel) * Conv::kChannelsIn + c) * kTaps + tap;
}

// The exponent for the block's channel, from its weights of(i); 0 for padding, not `real`. Clears `cleared`.
template <class Conv, class Of>
__device__ __forceinline__ int channel_exponent(int32_t* exponents, uint32_t* cleared, int64_t N, int channel,
                                                bool real, const Of& of) {
  for (int64_t n = int64_t(blockIdx.x) * blockDim.x + threadIdx.x; n < N;
       n += int64_t(gridDim.x) * blockDim.x)
    cleared[n] = 0;
  if constexpr (!Conv::kScaled) return 0;
  constexpr int kTaps = Conv::kTaps;
  __shared__ uint32_t largest;
  if (threadIdx.x == 0) largest = 0;
  __syncthreads();  // cleared before anyone raises it
  float mine = 0.f;
#pragma unroll 8
  for (int i = threadIdx.x; real && i < Conv::kChannelsIn * kTaps; i += blockDim.x)
    mine = larger_magnitude(mine, of(i));
  atomicMax(&largest, __float_as_uint(mine));
  __syncthreads();  // complete before anyone reads it
  const int exponent = top_exponent(largest);
  if (threadIdx.x == 0) exponents[channel] = exponent;
  return exponent;
}

// Weights as fragments of A (core/tensor_core.cuh), 4 registers each:
// [channel block][K block][tap][step][part][tile of 16 channels][lane]. A block per output channel; padding
// channels are 0. Also clears largest (N).
template <class Conv>
__global__ void __launch_bounds__(128)
    pack_weight_kernel(typename Conv::operand_t* packed, int32_t* exponents, uint32_t* largest,
                       const typename Conv::value_t* weight, int64_t N) {
  constexpr int kTaps = Conv::kTaps, kKBlock = Conv::kKBlock, kBlockChannels = Conv::kBlockChannels;
  const int channel = blockIdx.x;
  const bool real = channel < Conv::kChannelsOut;
  const int exponent = channel_exponent<Conv>(exponents, largest, N, channel, real, [&](int i) {
    return weight[weight_index<Conv>(channel, i / kTaps, i % kTaps)];
  });
  const int block = channel / kBlockChannels, tile = channel % kBlockChannels / 16, row = channel % 16;
  for (int i = threadIdx.x; i < Conv::kKBlocks * kKBlock * kTaps; i += blockDim.x) {
    const int c = i / kTaps, tap = i % kTaps, k_block = c / kKBlock, step = c % kKBlock / 16, k = c % 16;
    float value = real && c < Conv::kChannelsIn ? float(weight[weight_index<Conv>(channel, c, tap)]) : 0.f;
    if constexpr (Conv::kScaled) value = Conv::scaled(value, power_of_two(exponent));
    const auto parts = Conv::split(value);
    const int lane = row % 8 * 4 + k % 8 / 2, reg = row / 8 + k / 8 * 2;  // of the fragment
    const int64_t at = ((int64_t(block) * Conv::kKBlocks + k_block) * kTaps + tap) * Conv::kTapSteps + step;
#pragma unroll
    for (int part = 0; part < Conv::kParts; part++)
      packed[((((at * Conv::kParts + part) * Conv::kMTiles + tile) * 32 + lane) * 4 + reg) * 2 + k % 2] =
          parts.part[part];
  }
}

// N: of `largest`, or 0.
template <class Conv>
void pack_weight(uint4* packed, int32_t* exponents, uint32_t* largest, const typename Conv::value_t* weight,
                 int64_t N, cudaStream_t stream) {
  pack_weight_kernel<Conv><<<Conv::kPaddedOut, 128, 0, stream>>>(
      reinterpret_cast<typename Conv::operand_t*>(packed), exponents, largest, weight, N);
}

}  // namespace conv
