// The epilogue of this model's mainloops (conv/wide_sm80.cuh, conv/wide_sm90.cuh): from sums to results.
#pragma once
#include "conv/wide_operands.cuh"

namespace {

// The constants of one output channel and sample. factor · correction undoes the scaling of the operands;
// where that power of two is a float32, as it nearly always is, correction is 1.
struct Epilogue {
  float correction, factor;
  float conv_bias, bias;

  __device__ __forceinline__ void set_exponent(int exponent) {
    const int last = min(max(exponent, -126), 127);
    factor = power_of_two(last);
    correction = power_of_two(min(max(exponent - last, -126), 127));
  }
};

// `exponent` is the sample's.
__device__ __forceinline__ Epilogue make_epilogue(const Arguments& args, int channel, int exponent) {
  const bool real = channel < CHANNELS_OUT && !TRANSPOSED;
  const float conv_bias = real ? float(args.conv_bias[channel]) : 0.f;
  const float bias = real ? float(args.bias[channel]) : 0.f;
  Epilogue epilogue{1.f, 1.f, conv_bias, bias};
  epilogue.set_exponent(kScaled ? -args.exponents[channel] - exponent : 0);
  return epilogue;
}

// The gates (see conv/wide_operands.cuh) of a lane's results in apply_epilogue: a word per channel and strip.
template <int kTiles> struct Gates { uint32_t low[kTiles / 8] = {}, high[kTiles / 8] = {}; };

// A warp's sums of 16 channels × 8·kTiles pixels to results, in PyTorch's order of operations, and to gates
// where SAVES. They lie as products leave them: lane 4 g + t has pixels 8 j + 2 t and the next, of channel g
// in [j][0] and [j][1], whose constants are `low`, of channel g + 8 in [j][2] and [j][3], whose constants are
// `high`. A transposed convolution has no epilogue but the scales.
template <int kTiles>
__device__ __forceinline__ Gates<kTiles> apply_epilogue(
    float (&sums)[kTiles][4], const Epilogue& low, const Epilogue& high, float constant, float scale) {
  Gates<kTiles> gates;
  if (kScaled && __any_sync(0xffffffffu, low.correction != 1.f || high.correction != 1.f)) {
#pragma unroll
    for (int i = 0; i < kTiles * 4; i++) sums[i / 4][i % 4] *= i % 4 < 2 ? low.correction : high.correction;
  }
#pragma unroll
  for (int i = 0; i < kTiles * 4; i++) {
    const Epilogue& epilogue = i % 4 < 2 ? low : high;
    float& value = sums[i / 4][i % 4];
    value = value * epilogue.factor + epilogue.conv_bias;
    if constexpr (SAVES) {
      uint32_t& word = (i % 4 < 2 ? gates.low : gates.high)[i / 32];
      const int bit = i / 4 % 8 * 2 + i % 2;
      // The gradient of conv2d_min_add_multiply_fused.
      if (value > constant) word |= 1u << bit;
      if (value == constant) word |= 0x10000u << bit;
    }
    // The formula of conv2d_min_add_multiply.
    if constexpr (!TRANSPOSED) value = (min_nan(value, constant) + epilogue.bias) * scale;
  }
  return gates;
}

// The warp's gates to `words`, those of its first channel and strip; so many of its channels and pixels
// exist.
template <int kTiles>
__device__ __forceinline__ void store_gates(
    uint32_t* words, const Gates<kTiles>& gates, int channels, int64_t pixels) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int i = 0; i < kTiles / 8; i++, words += CHANNELS_OUT * 4) {
    if (i * kStrip < pixels && lane / 4 < channels) words[lane] = gates.low[i];
    if (i * kStrip < pixels && lane / 4 + 8 < channels) words[lane + 32] = gates.high[i];
  }
}

}  // namespace
