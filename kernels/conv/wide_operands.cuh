// What a wide convolution's mainloops and its backward kernels share: a build's sizes, the kernels'
// arguments, the conversion of values to operands, and the packing of weights.
//
// Operands are float16, or bfloat16 where x is. float32 is scaled by powers of two, since float16's range is
// small: channel c of weight by 2^exponents[c], which brings its largest magnitude into [2^14, 2^15); a
// sample of x by 2^kFirstExponent, unless its largest magnitude asks for another power (sample_exponent).
#pragma once
#include <type_traits>

#include "core/launch.cuh"
#include "core/split.cuh"
#include "core/tensor_core.cuh"

// A build's sizes. Those from TILE_WIDTH on are Python's plan: the kernels' layout follows from them, and has
// to take SHARED_BYTES.
#ifndef SPLIT
#define SPLIT 0  // is an operand the sum of two float16?
#endif
#ifndef SAVES
#define SAVES 0  // does forward save what backward needs?
#endif
#ifndef TRANSPOSED
#define TRANSPOSED 0  // is it the transposed convolution, from CHANNELS_IN to CHANNELS_OUT?
#endif
#ifndef WGMMA
#define WGMMA 0  // does the mainloop multiply by wgmma?
#endif
#ifndef CHANNELS_IN  // sizes for which a source compiles alone
#define CHANNELS_IN (TRANSPOSED ? 128 : 64)
#define CHANNELS_OUT (TRANSPOSED ? 64 : 128)
#define KERNEL_H 3
#define KERNEL_W 3
#endif
#ifndef TILE_WIDTH  // and the plan for it
#define TILE_WIDTH 128                     // output pixels of a tile, part of a row
#define GROUP (SPLIT ? 32 : WGMMA && TRANSPOSED ? 128 : 64)  // input channels in shared memory at a time
#define BLOCK_CHANNELS (TRANSPOSED ? 64 : 128)               // output channels of a block
#define TILE_ROWS (128 / BLOCK_CHANNELS)                     // output rows of a tile by mma.sync
#define STAGES (WGMMA ? KERNEL_H + 1 : 3)  // of the pipeline: rows of input by wgmma, else a tap's weights
#define REGISTER_STEPS (TRANSPOSED ? 28 : 30)  // by wgmma: products of depth 16 with weights in registers
#define SHARED_BYTES kSharedBytes          // dynamic shared memory of a block: whatever it is
#endif

namespace {

using namespace tensor_core;

constexpr bool kScaled = std::is_same_v<value_t, float>;  // float16 and bfloat16 are operands as they are
using operand_t = std::conditional_t<std::is_same_v<value_t, bfloat16_t>, bfloat16_t, half_t>;
using result_t = std::conditional_t<TRANSPOSED, value_t, output_t>;  // of the convolution and what follows it

HOST_DEVICE constexpr int ceil_div(int a, int b) { return (a + b - 1) / b; }

constexpr int kTaps = KERNEL_H * KERNEL_W;  // the pixels of a filter
constexpr int kParts = SPLIT ? 2 : 1;       // of an operand: the high and the low float16
constexpr int kGroup = GROUP;
constexpr int kGroups = ceil_div(CHANNELS_IN, kGroup);
constexpr int kPlanes = kGroups * kGroup / 8;  // of packed input: 8 channels, 16 bytes a pixel
constexpr int kTapSteps = kGroup / 16;         // products of depth 16 for a tap and a group
constexpr int kBlockChannels = BLOCK_CHANNELS;
constexpr int kChannelBlocks = ceil_div(CHANNELS_OUT, kBlockChannels);
constexpr int kPaddedOut = kChannelBlocks * kBlockChannels;
constexpr int kMTiles = kBlockChannels / 16;                    // of a product: 16 output channels each
constexpr int kTapWeights = kTapSteps * kParts * kMTiles * 32;  // of a tap and group, in units of 16 bytes
constexpr int kTileWidth = TILE_WIDTH;
constexpr int kPitch = kTileWidth + KERNEL_W - 1;  // input pixels of a tile's row
// The transposed convolution is one of flipped filters over an input that zeros surround.
constexpr int kPadRows = TRANSPOSED ? KERNEL_H - 1 : 0, kPadColumns = TRANSPOSED ? KERNEL_W - 1 : 0;
static_assert(kTileWidth == 128 && kGroup % 16 == 0 && (kBlockChannels == 64 || kBlockChannels == 128));

// What a convolution works on. pack_weight_kernel makes packed_weight and exponents, and clears largest.
struct Arguments {
  result_t* y;
  uint32_t* gates;  // where SAVES
  const value_t* x;
  const uint4* packed_weight;
  const int32_t* exponents;  // (kPaddedOut): weights are scaled by 2^exponent
  uint32_t* largest;         // (N): the bits of each sample's largest finite magnitude
  const accumulate_t *conv_bias, *bias;
  float constant, scale;
  int64_t N, H, W;
  const output_t* dy;  // of which, and of the gates, a transposed convolution makes its input

  HOST_DEVICE int64_t height() const { return H + 2 * kPadRows - KERNEL_H + 1; }
  HOST_DEVICE int64_t width() const { return W + 2 * kPadColumns - KERNEL_W + 1; }
  // Tiles on top of each other.
  HOST_DEVICE int64_t bands() const { return (height() + TILE_ROWS - 1) / TILE_ROWS; }
  // Tiles side by side.
  HOST_DEVICE int64_t strips() const { return (width() + kTileWidth - 1) / kTileWidth; }
};

// ----------------------------------------------------------------------------------------------------- gates

// What forward saves for the gradient: two bits for each of the convolution's values, in words (N, H', strips
// of kStrip pixels, channels, 4). Of pixel 8 j + 2 t + i of a strip, bit 2 j + i of word t is set where the
// value exceeds the constant: no gradient passes; bit 16 + 2 j + i where it equals the constant: half of it
// does. The lanes of a product have them side by side.
constexpr int kStrip = 64;

// They lie behind `largest` (N) in what forward saves, from a sector's start on.
template <class Word> HOST_DEVICE Word* saved_gates(Word* saved, int64_t N) {
  return saved + (N + 31) / 32 * 32;
}

// Words of a row, and where those of a channel begin, from `column` of a row on. height, width: H', W'.
HOST_DEVICE int64_t gate_row(int64_t width, int channels) {
  return (width + kStrip - 1) / kStrip * channels * 4;
}
HOST_DEVICE int64_t gate_index(
    int64_t n, int64_t channel, int64_t row, int64_t column, int64_t height, int64_t width, int channels) {
  return (n * height + row) * gate_row(width, channels) + (column / kStrip * channels + channel) * 4;
}

// -------------------------------------------------------------------------------------------------- operands

// Samples are first scaled by 2^kFirstExponent. That is good enough where the largest scaled magnitude lies
// in [2^kLowest, 2^(kTop + 1)): below 2^-14 float16 is subnormal and loses digits, so small values need room
// above it.
constexpr int kFirstExponent = SPLIT ? 10 : 4;
constexpr int kLowest = SPLIT ? 8 : -4;

// The exponent that brings a magnitude, given by its bits, into [2^kTop, 2^(kTop + 1)), but at most 127, the
// largest of a float32: under 2^127 even the smallest subnormal, 2^-149, is a float16, so that no digit is
// lost. 0 for zero.
__device__ __forceinline__ int top_exponent(uint32_t magnitude) {
  return magnitude == 0 ? 0 : min(kTop - ilogbf(__uint_as_float(magnitude)), 127);
}

// The exponent for a sample, from the bits of its largest finite magnitude. A gradient's is known before it
// is converted.
__device__ __forceinline__ int sample_exponent(uint32_t largest) {
  const int fitting = top_exponent(largest), slack = fitting - kFirstExponent;
  if (TRANSPOSED) return fitting;
  return largest == 0 || (slack >= 0 && slack <= kTop - kLowest) ? kFirstExponent : fitting;
}

__device__ __forceinline__ bool is_finite(float value) { return fabsf(value) < INFINITY; }

// max(largest, |value|), skipping inf and NaN.
__device__ __forceinline__ float larger_magnitude(float largest, float value) {
  return is_finite(value) ? fmaxf(largest, fabsf(value)) : largest;
}

// value · scale, a power of two, to be converted to an operand. That conversion rounds a tie to even; the
// library, for TF32, rounds it away from zero. A tie between two float16 ends in zeros, so with its last bit
// set it lies beyond the middle, and is rounded away. Any other value stays on its side of the middle. inf
// would become NaN, and is left alone. The two halves of a split operand hold all digits anyway.
__device__ __forceinline__ float scaled(float value, float scale) {
  const float product = value * scale;
  return !SPLIT && is_finite(value) ? __uint_as_float(__float_as_uint(product) | 1) : product;
}

// A value as one operand, or as the sum of two, high and low. inf and NaN go to the low one, which is
// multiplied by the other operand's high one alone; multiplied by its low one, too, which may be zero or
// negative, inf would become NaN.
struct Parts { operand_t part[kParts]; };
__device__ __forceinline__ Parts split(float value) {
  Parts result;
  result.part[0] = operand_t(value);
  if constexpr (SPLIT) {
    const float high = float(result.part[0]);
    const bool finite = high - high == 0.f;
    if (!finite) result.part[0] = operand_t(0.f);
    result.part[kParts - 1] = operand_t(finite ? value - high : value);
  }
  return result;
}

// Packs 8 channels of a pixel; their parts lie `part_pitch` units of 16 bytes apart.
__device__ __forceinline__ void pack_pixel(uint4* out, int64_t part_pitch, const float (&value)[8]) {
  union { operand_t operand[8]; uint4 bits; } pack[kParts];
#pragma unroll
  for (int c = 0; c < 8; c++) {
    const Parts parts = split(value[c]);
#pragma unroll
    for (int part = 0; part < kParts; part++) pack[part].operand[c] = parts.part[part];
  }
#pragma unroll
  for (int part = 0; part < kParts; part++) out[part * part_pitch] = pack[part].bits;
}

// --------------------------------------------------------------------------------------------------- weights

constexpr int kFilter = CHANNELS_IN * kTaps;  // weights of an output channel

// Where a weight lies; a transposed convolution's are (CHANNELS_IN, CHANNELS_OUT, KERNEL_H, KERNEL_W), and
// flipped.
__device__ __forceinline__ int64_t weight_index(int channel, int c, int tap) {
  return TRANSPOSED ? (int64_t(c) * CHANNELS_OUT + channel) * kTaps + kTaps - 1 - tap
                    : (int64_t(channel) * CHANNELS_IN + c) * kTaps + tap;
}

// The exponent for the block's output channel, from its weights; 0 for padding, which is not `real`.
__device__ __forceinline__ int channel_exponent(const value_t* weight, int channel, bool real) {
  __shared__ uint32_t largest;
  if (threadIdx.x == 0) largest = 0;
  __syncthreads();  // cleared before anyone raises it
  float mine = 0.f;
  for (int i = threadIdx.x; real && i < kFilter; i += blockDim.x)
    mine = larger_magnitude(mine, weight[weight_index(channel, i / kTaps, i % kTaps)]);
  atomicMax(&largest, __float_as_uint(mine));
  __syncthreads();  // complete before anyone reads it
  return top_exponent(largest);
}

// Weights as fragments of A (core/tensor_core.cuh), 4 registers each:
// [channel block][group][tap][step][part][tile of 16 channels][lane]. A block per output channel; padding
// channels are 0. Also clears largest (N).
__global__ void __launch_bounds__(128)
pack_weight_kernel(operand_t* packed, int32_t* exponents, uint32_t* largest, const value_t* weight,
                   int64_t N) {
  const int channel = blockIdx.x;
  const bool real = channel < CHANNELS_OUT;
  for (int64_t n = int64_t(blockIdx.x) * blockDim.x + threadIdx.x; n < N;
       n += int64_t(gridDim.x) * blockDim.x)
    largest[n] = 0;
  int exponent = 0;
  if constexpr (kScaled) {
    exponent = channel_exponent(weight, channel, real);
    if (threadIdx.x == 0) exponents[channel] = exponent;
  }
  const int block = channel / kBlockChannels, tile = channel % kBlockChannels / 16, row = channel % 16;
  for (int i = threadIdx.x; i < kGroups * kGroup * kTaps; i += blockDim.x) {
    const int c = i / kTaps, tap = i % kTaps, group = c / kGroup, step = c % kGroup / 16, k = c % 16;
    float value = real && c < CHANNELS_IN ? float(weight[weight_index(channel, c, tap)]) : 0.f;
    if constexpr (kScaled) value = scaled(value, power_of_two(exponent));
    const Parts parts = split(value);
    const int lane = row % 8 * 4 + k % 8 / 2, reg = row / 8 + k / 8 * 2;  // of the fragment
    const int64_t at = ((int64_t(block) * kGroups + group) * kTaps + tap) * kTapSteps + step;
#pragma unroll
    for (int part = 0; part < kParts; part++)
      packed[((((at * kParts + part) * kMTiles + tile) * 32 + lane) * 4 + reg) * 2 + k % 2] =
          parts.part[part];
  }
}

}  // namespace
