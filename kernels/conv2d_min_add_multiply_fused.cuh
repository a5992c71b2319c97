// What both ways of conv2d_min_add_multiply_fused.cu share: the build's channels and kernel, operands and the powers of two
// that bring them into range, packed weights, and the tail that turns sums into results.
//
// Operands are float16, or bfloat16 where x is. float32 is scaled: 2^exponents[c] brings channel c of weight to [2^14, 2^15); a
// sample of x has the scale 2^kFirstExponent unless its largest magnitude asks for another one (sample_exponent).
#pragma once
#include <type_traits>

#include "halves.cuh"
#include "tensor_core.cuh"

// The sizes of a build. Those from TILE_WIDTH on are planned in Python: the layout follows from them, and has to take SHARED_BYTES.
#ifndef SPLIT
#define SPLIT 0  // is an operand the sum of two float16?
#endif
#ifndef CHANNELS_IN  // as planned for the default problem
#define CHANNELS_IN 64
#define CHANNELS_OUT 128
#define KERNEL_H 3
#define KERNEL_W 3
#define TILE_WIDTH 128                     // output pixels of a tile, part of a row
#define GROUP (SPLIT ? 32 : 64)            // input channels that are in shared memory at a time
#define BLOCK_CHANNELS 128                 // output channels of a block
#define STAGES (WGMMA ? KERNEL_H + 1 : 3)  // of the pipeline: a tap's weights by mma.sync, rows of input by wgmma
#define REGISTER_STEPS 30                  // by wgmma: products of depth 16 whose weights are in registers
#define SHARED_BYTES kBytes                // dynamic shared memory of a block: whatever it is
#endif

namespace {

using namespace tensor_core;

constexpr bool kScaled = std::is_same_v<value_t, float>;  // half inputs need no scale
using operand_t = std::conditional_t<std::is_same_v<value_t, bfloat16_t>, bfloat16_t, half_t>;

HOST_DEVICE constexpr int ceil_div(int a, int b) { return (a + b - 1) / b; }

constexpr int kTaps = KERNEL_H * KERNEL_W;
constexpr int kParts = SPLIT ? 2 : 1;  // high and low half of an operand
// Input channels come in groups: as many as a block keeps in shared memory at once.
constexpr int kGroup = GROUP;
constexpr int kGroups = ceil_div(CHANNELS_IN, kGroup);
constexpr int kPlanes = kGroups * kGroup / 8;  // 8 channels of a pixel, 16 bytes, are the unit of the packed input
constexpr int kSteps = kGroup / 16;            // products of depth 16 per tap and group
constexpr int kBlockChannels = BLOCK_CHANNELS;
constexpr int kChannelBlocks = ceil_div(CHANNELS_OUT, kBlockChannels);
constexpr int kPaddedOut = kChannelBlocks * kBlockChannels;
constexpr int kMTiles = kBlockChannels / 16;
constexpr int kChunk = kSteps * kParts * kMTiles * 32;  // weights of a tap and group, in 16 bytes
constexpr int kTileWidth = TILE_WIDTH;                  // output pixels of a block: a tile is part of a row
constexpr int kPitch = kTileWidth + KERNEL_W - 1;       // input pixels of a tile's row
static_assert(kTileWidth == 128 && kGroup % 16 == 0 && (kBlockChannels == 64 || kBlockChannels == 128));

// What a convolution works on. packed_weight, exponents (kPaddedOut) and largest (N) are pack_weight_kernel's.
struct Arguments {
  output_t* y;
  const value_t* x;
  const uint4* packed_weight;
  const int32_t* exponents;
  uint32_t* largest;  // the bits of each sample's largest finite magnitude
  const accumulate_t *conv_bias, *bias;
  float constant, scale;
  int64_t N, H, W;

  HOST_DEVICE int64_t height() const { return H - KERNEL_H + 1; }
  HOST_DEVICE int64_t width() const { return W - KERNEL_W + 1; }
  HOST_DEVICE int64_t strips() const { return (width() + kTileWidth - 1) / kTileWidth; }
};

// ---------------------------------------------------------------------------------------------------------------- operands

// The scale of the first packing, and the range of the largest scaled magnitude in which it is good enough: the smallest
// normal float16 is 2^-14, and all that lies below loses precision.
constexpr int kFirstExponent = SPLIT ? 10 : 4;
constexpr int kLowest = SPLIT ? 8 : -4;

// The exponent that brings the magnitude with these bits to [2^kTop, 2^(kTop + 1)), at most 127, the largest of a float32. Zero
// needs none. (Under 2^127 even the smallest subnormal, 2^-149, is a float16, so that the limit costs no digits.)
__device__ __forceinline__ int top_exponent(uint32_t magnitude) {
  return magnitude == 0 ? 0 : min(kTop - ilogbf(__uint_as_float(magnitude)), 127);
}

// The exponent under which a sample is packed, from the bits of its largest finite magnitude.
__device__ __forceinline__ int sample_exponent(uint32_t largest) {
  const int fitting = top_exponent(largest), slack = fitting - kFirstExponent;
  return largest == 0 || (slack >= 0 && slack <= kTop - kLowest) ? kFirstExponent : fitting;
}

__device__ __forceinline__ bool is_finite(float value) { return fabsf(value) < INFINITY; }

// max(largest, |value|), skipping inf and NaN.
__device__ __forceinline__ float larger_magnitude(float largest, float value) {
  return is_finite(value) ? fmaxf(largest, fabsf(value)) : largest;
}

// value · 2^exponent, scale being that power, ready to become an operand. Conversion to float16 rounds to nearest and a tie to even;
// the library, for TF32, a tie away from zero. A float32 in the middle between two float16 ends in zeros: with its last bit set it
// lies beyond the middle, and any other value stays on its side of it. (inf would become NaN, and the halves of SPLIT need no ties.)
__device__ __forceinline__ float scaled(float value, float scale) {
  const float product = value * scale;
  return !SPLIT && is_finite(value) ? __uint_as_float(__float_as_uint(product) | 1) : product;
}

// The value as one operand, or as the sum of two. inf and NaN go to the low part, which meets one part of the other operand
// only: one product, one sign.
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

// Packs one pixel of one plane, 8 channels; its parts lie S units of 16 bytes apart.
__device__ __forceinline__ void pack_pixel(uint4* out, int64_t S, const float (&value)[8]) {
  union { operand_t operand[8]; uint4 bits; } pack[kParts];
#pragma unroll
  for (int c = 0; c < 8; c++) {
    const Parts parts = split(value[c]);
#pragma unroll
    for (int part = 0; part < kParts; part++) pack[part].operand[c] = parts.part[part];
  }
#pragma unroll
  for (int part = 0; part < kParts; part++) out[part * S] = pack[part].bits;
}

// ----------------------------------------------------------------------------------------------------------------- weights

constexpr int kChannelWeights = CHANNELS_IN * kTaps;  // weights of an output channel

// The exponent that brings these weights, those of the block's channel, into range.
__device__ __forceinline__ int channel_exponent(const value_t* weight, bool real) {
  __shared__ uint32_t largest;
  if (threadIdx.x == 0) largest = 0;
  __syncthreads();  // cleared before anyone adds to it
  float mine = 0.f;
  for (int i = threadIdx.x; real && i < kChannelWeights; i += blockDim.x) mine = larger_magnitude(mine, weight[i]);
  atomicMax(&largest, __float_as_uint(mine));
  __syncthreads();  // complete before anyone reads it
  return top_exponent(largest);
}

// Weights as fragments of A: [channel block][group][tap][step][part][tile of 16 channels][lane] of 4 registers. A block per
// output channel; all of a padding channel is 0. Also clears largest[N].
__global__ void __launch_bounds__(128)
pack_weight_kernel(operand_t* packed, int32_t* exponents, uint32_t* largest, const value_t* weight, int64_t N) {
  const int channel = blockIdx.x;
  const bool real = channel < CHANNELS_OUT;
  for (int64_t n = int64_t(blockIdx.x) * blockDim.x + threadIdx.x; n < N; n += int64_t(gridDim.x) * blockDim.x) largest[n] = 0;
  int exponent = 0;
  if constexpr (kScaled) {
    exponent = channel_exponent(weight + int64_t(channel) * kChannelWeights, real);
    if (threadIdx.x == 0) exponents[channel] = exponent;
  }
  const int block = channel / kBlockChannels, tile = channel % kBlockChannels / 16, row = channel % 16;
  for (int i = threadIdx.x; i < kGroups * kGroup * kTaps; i += blockDim.x) {
    const int c = i / kTaps, tap = i % kTaps, group = c / kGroup, step = c % kGroup / 16, k = c % 16;
    float value = real && c < CHANNELS_IN ? float(weight[(int64_t(channel) * CHANNELS_IN + c) * kTaps + tap]) : 0.f;
    if constexpr (kScaled) value = scaled(value, power_of_two(exponent));
    const Parts parts = split(value);
    const int lane = row % 8 * 4 + k % 8 / 2, reg = row / 8 + k / 8 * 2;  // of the fragment
    const int64_t chunk = ((int64_t(block) * kGroups + group) * kTaps + tap) * kSteps + step;
#pragma unroll
    for (int part = 0; part < kParts; part++)
      packed[((((chunk * kParts + part) * kMTiles + tile) * 32 + lane) * 4 + reg) * 2 + k % 2] = parts.part[part];
  }
}

// ---------------------------------------------------------------------------------------------------------------- the tail

// What the tail needs of one output channel.
struct Tail {
  float before, factor;  // together 2^exponent, which takes the scales out of a sum; one alone may not be a float32
  float conv_bias, bias;

  __device__ __forceinline__ void set_exponent(int exponent) {
    const int last = min(max(exponent, -126), 127);
    factor = power_of_two(last);
    before = power_of_two(min(max(exponent - last, -126), 127));  // nearly always 1
  }
};

// The tail of a channel; `exponent` is the sample's.
__device__ __forceinline__ Tail make_tail(const Arguments& of, int channel, int exponent) {
  const bool real = channel < CHANNELS_OUT;
  Tail tail{1.f, 1.f, real ? float(of.conv_bias[channel]) : 0.f, real ? float(of.bias[channel]) : 0.f};
  tail.set_exponent(kScaled ? -of.exponents[channel] - exponent : 0);
  return tail;
}

// Turns a warp's sums of 16 channels × 8·kTiles pixels into results, in PyTorch's order of operations. Lane 4 g + t holds
// pixels 8 j + 2 t and the next: of channel g in [j][0] and [j][1], of channel g + 8 in [j][2] and [j][3].
template <int kTiles>
__device__ __forceinline__ void finish(
    float (&sums)[kTiles][4], const Tail& low, const Tail& high, float constant, float scale) {
  if (kScaled && __any_sync(0xffffffffu, low.before != 1.f || high.before != 1.f)) {
#pragma unroll
    for (int i = 0; i < kTiles * 4; i++) sums[i / 4][i % 4] *= i % 4 < 2 ? low.before : high.before;
  }
#pragma unroll
  for (int i = 0; i < kTiles * 4; i++) {
    const Tail& tail = i % 4 < 2 ? low : high;
    float& value = sums[i / 4][i % 4];
    value = (min_nan(value * tail.factor + tail.conv_bias, constant) + tail.bias) * scale;
  }
}

}  // namespace
