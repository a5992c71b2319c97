// y = (min(conv2d(x, weight) + conv_bias, constant) + bias) * scale, and its gradients. Neither the
// convolution nor its gradient is ever written.
//
//   forward, forward_saving  wide convolution; each result is finished in registers and stored; for backward
//                            two bits of it are kept, mask, and each sample's largest magnitude, largest_x
//   backward_parameters      of conv_bias and bias, sums; and largest_g (2, N) and units of g for the other
//                            two
//   backward_weight, backward_input
//
// Units of g are half of y's size, and there only where tensor cores take them (grad/wide_sums.cuh).
//
// x (N, CHANNELS_IN, H, W), weight (CHANNELS_OUT, CHANNELS_IN, KERNEL_H, KERNEL_W), y (N, CHANNELS_OUT, H',
// W'), H' = H - KERNEL_H + 1, W' likewise; conv_bias, bias (CHANNELS_OUT), d_bias of so many elements or 1.
#include "conv/wide.cuh"
#include "grad/wide.cuh"

#ifndef CHANNELS_IN  // what it compiles for alone
#define CHANNELS_IN 64
#define CHANNELS_OUT 128
#define KERNEL_H 3
#define KERNEL_W 3
#define SPLIT 0  // is an operand the sum of two float16?
// Of the GPU and of sizes: see conv::Target.
#define CAPABILITY 80
#define SHARED_LIMIT (99 << 10)
#define X_ALIGNED 1
#define COUNTS_IN_INT 0
#endif

using Filter = conv::Filter<CHANNELS_IN, CHANNELS_OUT, KERNEL_H, KERNEL_W>;
using Target = conv::Target<CAPABILITY, SHARED_LIMIT, X_ALIGNED, COUNTS_IN_INT>;
using Build = conv::Build<Filter, conv::Operands<value_t, SPLIT>, Target>;

struct Tail {
  const float *conv_bias, *bias;  // (CHANNELS_OUT)
  float constant, scale;

  struct Channel {
    float conv_bias, bias;
  };
  __device__ __forceinline__ Channel channel(int64_t, int c) const { return {conv_bias[c], bias[c]}; }

  __device__ __forceinline__ float operator()(float v, const Channel& c) const {
    // The formula of conv2d_min_add_multiply.
    return (tensor_core::min_nan(v + c.conv_bias, constant) + c.bias) * scale;
  }
  __device__ __forceinline__ Mask mask(float v, const Channel& c) const {
    // The gradient of conv2d_min_add_multiply.
    return {v + c.conv_bias > constant, v + c.conv_bias == constant};
  }
  __device__ __forceinline__ Gradient<2> gradient(float dy, const Mask& mask) const {  // of v, of bias
    // The gradient of conv2d_min_add_multiply.
    return {mask(dy * scale), dy * scale};
  }
};

EXPORT void forward(Out<output_t> y, In<value_t> x, In<value_t> weight, In<float> conv_bias, In<float> bias,
                    double constant_value, double scaling_factor, cudaStream_t stream) {
  const Tail tail{conv_bias, bias, float(value_t(constant_value)), float(scaling_factor)};
  const Scratch<int32_t> largest_x(x.size(0), stream);
  conv::wide<Build>(x, weight, tail, store::Nothing{}, store::Rows<output_t>{y}, largest_x, stream);
}

EXPORT int64_t largest_x_size(In<value_t> x) { return x.size(0); }

EXPORT int64_t mask_size(In<output_t> y) {
  return y.size(0) * y.size(2) * ((y.size(3) + 63) / 64) * CHANNELS_OUT * 4;
}

EXPORT void forward_saving(Out<output_t> y, Out<int32_t> largest_x, Out<int32_t> mask, In<value_t> x,
                           In<value_t> weight, In<float> conv_bias, In<float> bias, double constant_value,
                           double scaling_factor, cudaStream_t stream) {
  const Tail tail{conv_bias, bias, float(value_t(constant_value)), float(scaling_factor)};
  expect_elements("mask", mask, y.size(0) * y.size(2) * store::mask_row(y.size(3), CHANNELS_OUT));
  conv::wide<Build>(x, weight, tail, store::GradMask{mask}, store::Rows<output_t>{y}, largest_x, stream);
}

EXPORT int64_t largest_g_size(In<output_t> dy) { return 2 * dy.size(0); }

// As grad::kTakesUnits: 8 channels of a pixel are 4 words.
EXPORT int64_t units_size(In<output_t> dy) {
  return (CAPABILITY == 90) * (1 - SPLIT) * ((CHANNELS_OUT + 7) / 8) * 4 * dy.size(0) * dy.size(2) *
         dy.size(3);
}

EXPORT void backward_parameters(Out<float> d_conv_bias, Out<float> d_bias, Out<int32_t> largest_g,
                                Out<int32_t> units, In<output_t> dy, In<int32_t> mask, double scaling_factor,
                                cudaStream_t stream) {
  const auto g = grad::masked<CHANNELS_OUT>(Tail{{}, {}, {}, float(scaling_factor)}, dy, mask);
  grad::sum_gradients<Build>(g, largest_g, units, stream, d_conv_bias, d_bias);
}

EXPORT void backward_weight(Out<value_t> dweight, In<output_t> dy, In<int32_t> mask, In<int32_t> largest_g,
                            In<int32_t> units, In<value_t> x, In<int32_t> largest_x, double scaling_factor,
                            cudaStream_t stream) {
  const auto g = grad::masked<CHANNELS_OUT>(Tail{{}, {}, {}, float(scaling_factor)}, dy, mask);
  grad::wide_weight<Build>(dweight, g, largest_g, units, x, largest_x, stream);
}

EXPORT void backward_input(Out<value_t> dx, In<output_t> dy, In<int32_t> mask, In<int32_t> largest_g,
                           In<int32_t> units, In<value_t> weight, double scaling_factor,
                           cudaStream_t stream) {
  const auto g = grad::masked<CHANNELS_OUT>(Tail{{}, {}, {}, float(scaling_factor)}, dy, mask);
  grad::wide_input<Build>(dx, g, largest_g, units, weight, stream);
}
