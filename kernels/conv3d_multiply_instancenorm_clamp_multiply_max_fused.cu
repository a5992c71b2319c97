// y = max over c of m[c]·clamp(instance_norm(conv3d(x, weight)·m[c]), low, high)
//
//   forward   statistics of v; v again, where it is not held, normalised and reduced over the channels
//   backward  v again, tile by tile, for dv, the weight's gradient and dx
//
// At the default size (128, 3, 16, 32, 32), 3×3×3, 16 channels: 25 MB in, 6.5 MB out, 0.007 ms at 4.28 TB/s.
// Backward: 25 MB of x, 15 of dy, index and centred; 2.1 G products of a weight and an element each for v,
// the weight's gradient and dx.
#include "grad/narrow3d_instance.cuh"
#include "norm/narrow3d_instance.cuh"

using namespace conv::narrow3d;

#ifndef CHANNELS_IN
#define CHANNELS_IN 3
#define CHANNELS_OUT 16
#define KERNEL_D 3
#define KERNEL_H 3
#define KERNEL_W 3
#endif
#ifndef STAGE_PIXELS  // the plan, as tiling.py makes it; else one with which a source compiles alone
#define STAGE_PIXELS 8704
#define PIXEL_WORDS Conv::kWords
#define RING_PLANES Conv::kRing
#define RAW_PLANES kRaw
#define TURN_POSITIONS kTurn
#endif
#ifndef STATIC_SHARED  // bytes of forward's own arrays, and of backward's
#define STATIC_SHARED 3584
#endif
#ifndef BACKWARD_SHARED
#define BACKWARD_SHARED (18 << 10)
#endif
#ifndef STAGED_SHARED  // bytes of forward's, where backward follows
#define STAGED_SHARED (30 << 10)
#endif

using Conv = Shape<value_t, CHANNELS_IN, CHANNELS_OUT, KERNEL_D, KERNEL_H, KERNEL_W, STAGE_PIXELS>;
static_assert(Conv::planned(PIXEL_WORDS, RING_PLANES, RAW_PLANES, TURN_POSITIONS), "what was planned with");
static_assert(norms::narrow3d::kInstanceNormShared<Conv> <= STATIC_SHARED);
static_assert(norms::narrow3d::kStagedBytes == STAGED_SHARED);
static_assert(grad::narrow3d::instance_norm::kShared<Conv> <= BACKWARD_SHARED);

struct Tail {               // of the normalised z
  const float* multiplier;  // (CHANNELS_OUT)
  float low, high;

  // m·clamp(z) = clamp((v - mean)·a·m, …), with m in the bounds.
  __device__ norms::narrow3d::Line line(const ScaledChannel& channel) const {
    const float at_low = norms::narrow3d::scaled_bound(low > high ? high : low, channel.m);
    const float at_high = norms::narrow3d::scaled_bound(high, channel.m);
    const bool turned = channel.m < 0;
    // The formula of conv3d_multiply_instancenorm_clamp_multiply_max_fused.
    return {-channel.mean, channel.a, channel.m, turned ? at_high : at_low, turned ? at_low : at_high};
  }
  __device__ __forceinline__ grad::narrow3d::instance_norm::Gradient gradient(float dy, float z,
                                                                              float m) const {
    // The gradient of conv3d_multiply_instancenorm_clamp_multiply_max_fused.
    return {clamp_passes(z, low, high) ? dy * m : 0.f, dy * clamp(z, low, high)};
  }
};

// y (N, D', H', W'); kept: Kept; held: instance_norm_maximum(); rows to shared are the plan (convolution()).
EXPORT void forward(Out<output_t> y, Out<float> kept, In<value_t> x, In<value_t> weight, In<float> conv_bias,
                    In<float> multiplier, double low, double high, double eps, int64_t held, int64_t rows,
                    int64_t depth, int64_t pitch, int64_t raw, int64_t shared, cudaStream_t stream) {
  const auto c = convolution<Conv>(x, weight, rows, depth, pitch, raw, shared);
  norms::narrow3d::instance_norm_maximum<Conv, index_t>(
      y, kept, c, conv_bias, Tail{multiplier, float(low), float(high)}, float(eps), held, stream);
}

// dx (N, CHANNELS_IN, D, H, W), d_weight, d_conv_bias and d_multiplier, CHANNELS_OUT elements or 1. kept:
// forward's. dv_slots, input_room: grad/narrow3d_backward.cuh.
EXPORT void backward(Out<value_t> dx, Out<value_t> d_weight, Out<float> d_conv_bias, Out<float> d_multiplier,
                     In<output_t> dy, In<value_t> x, In<value_t> weight, In<float> kept, In<float> multiplier,
                     double low, double high, double eps, int64_t rows, int64_t depth, int64_t pitch,
                     int64_t raw, int64_t shared, int64_t dv_slots, int64_t input_room, cudaStream_t stream) {
  const auto c = convolution<Conv>(x, weight, rows, depth, pitch, raw, shared);
  grad::narrow3d::instance_norm::backward<Conv, index_t>(dx, d_weight, d_conv_bias, d_multiplier, dy, kept, c,
                                                         Tail{multiplier, float(low), float(high)},
                                                         float(eps), dv_slots, input_room, stream);
}
