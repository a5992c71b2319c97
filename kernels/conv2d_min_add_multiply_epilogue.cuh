// The epilogue of both mainloops of conv2d_min_add_multiply_fused.cu: from sums to results.
#pragma once
#include "conv2d_min_add_multiply_operands.cuh"

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
  const bool real = channel < CHANNELS_OUT;
  const float conv_bias = real ? float(args.conv_bias[channel]) : 0.f;
  const float bias = real ? float(args.bias[channel]) : 0.f;
  Epilogue epilogue{1.f, 1.f, conv_bias, bias};
  epilogue.set_exponent(kScaled ? -args.exponents[channel] - exponent : 0);
  return epilogue;
}

// A warp's sums of 16 channels × 8·kTiles pixels to results, in PyTorch's order of operations. They lie as
// products leave them: lane 4 g + t has pixels 8 j + 2 t and the next, of channel g in [j][0] and [j][1],
// whose constants are `low`, of channel g + 8 in [j][2] and [j][3], whose constants are `high`.
template <int kTiles>
__device__ __forceinline__ void apply_epilogue(
    float (&sums)[kTiles][4], const Epilogue& low, const Epilogue& high, float constant, float scale) {
  if (kScaled && __any_sync(0xffffffffu, low.correction != 1.f || high.correction != 1.f)) {
#pragma unroll
    for (int i = 0; i < kTiles * 4; i++) sums[i / 4][i % 4] *= i % 4 < 2 ? low.correction : high.correction;
  }
#pragma unroll
  for (int i = 0; i < kTiles * 4; i++) {
    const Epilogue& epilogue = i % 4 < 2 ? low : high;
    float& value = sums[i / 4][i % 4];
    value = (min_nan(value * epilogue.factor + epilogue.conv_bias, constant) + epilogue.bias) * scale;
  }
}

}  // namespace
