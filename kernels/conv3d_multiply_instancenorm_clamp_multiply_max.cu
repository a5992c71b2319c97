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

#ifndef CHANNELS_IN  // those with which a source compiles alone
#define CHANNELS_IN 3
#define CHANNELS_OUT 16
#define KERNEL_D 3
#define KERNEL_H 3
#define KERNEL_W 3
#endif
#ifndef DV_BYTES  // of scratch for the gradient of the convolution, where x needs one
#define DV_BYTES 114000000
#endif
#ifndef CACHE_SHARE  // of the L2 cache, where cache() is asked: one of so many
#define CACHE_SHARE 4
#endif
using Index = std::conditional_t<CHANNELS_OUT <= 256, uint8_t, int32_t>;  // of a channel
using Conv = Shape<value_t, CHANNELS_IN, CHANNELS_OUT, KERNEL_D, KERNEL_H, KERNEL_W>;

struct Tail {               // of the normalised z
  const float* multiplier;  // (CHANNELS_OUT)
  float low, high;

  // m·clamp(z) = clamp((v - mean)·a·m, …), with m in the bounds.
  __device__ norms::narrow3d::Line line(const ScaledChannel& channel) const {
    const float at_low = norms::narrow3d::scaled_bound(low > high ? high : low, channel.m);
    const float at_high = norms::narrow3d::scaled_bound(high, channel.m);
    const bool turned = channel.m < 0;
    // The formula of conv3d_multiply_instancenorm_clamp_multiply_max.
    return {-channel.mean, channel.a, channel.m, turned ? at_high : at_low, turned ? at_low : at_high};
  }
  __device__ __forceinline__ grad::narrow3d::instance_norm::Gradient gradient(float dy, float z,
                                                                              float m) const {
    // The gradient of conv3d_multiply_instancenorm_clamp_multiply_max.
    return {clamp_passes(z, low, high) ? dy * m : 0.f, dy * clamp(z, low, high)};
  }
};

// y (N, D', H', W'); kept: Kept; cache: bytes of the L2 cache for sums that are held.
EXPORT int64_t kept_size(In<output_t> y) {
  return y.numel() + 2 * y.size(0) * CHANNELS_OUT + (y.numel() * (1 + 3 * (CHANNELS_OUT > 256)) + 3) / 4;
}

EXPORT int64_t cache() { return device_attribute(cudaDevAttrL2CacheSize) / CACHE_SHARE; }

EXPORT void forward(Out<output_t> y, Out<float> kept, In<value_t> x, In<value_t> weight, In<float> conv_bias,
                    In<float> multiplier, double clamp_min, double clamp_max, double instance_norm_eps,
                    int64_t cache, cudaStream_t stream) {
  norms::narrow3d::instance_norm_maximum<Conv, Index>(y, kept, x, weight, conv_bias,
                                                      Tail{multiplier, bound(clamp_min), bound(clamp_max)},
                                                      float(instance_norm_eps), cache, stream);
}

// dx (N, CHANNELS_IN, D, H, W), d_weight, d_conv_bias and d_multiplier, CHANNELS_OUT elements or 1. kept:
// forward's. dv_bytes: of scratch for dv.
EXPORT int64_t dv_bytes() { return DV_BYTES; }

EXPORT void backward(Out<value_t> dx, Out<value_t> d_weight, Out<float> d_conv_bias, Out<float> d_multiplier,
                     In<output_t> dy, In<value_t> x, In<value_t> weight, In<float> kept, In<float> multiplier,
                     double clamp_min, double clamp_max, double instance_norm_eps, int64_t dv_bytes,
                     cudaStream_t stream) {
  grad::narrow3d::instance_norm::backward<Conv, Index>(
      dx, d_weight, d_conv_bias, d_multiplier, dy, kept, x, weight,
      Tail{multiplier, bound(clamp_min), bound(clamp_max)}, float(instance_norm_eps), dv_bytes, stream);
}
