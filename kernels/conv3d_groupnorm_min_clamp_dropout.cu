// y = dropout(clamp(min(group_norm(conv3d(x, weight) + conv_bias), low), low, high), p)
//
//   forward   v, and its statistics, in y's place; a sample's statistics are merged; the tail in place
//   backward  v again, tile by tile, for the sums that the norm needs; once more for dv, the weight's
//   gradient and dx
//
// Every value is computed, though min and clamp make most of them equal. The mask is that of
// core/philox.h for the same seed.
//
// At the default size (128, 3, 16, 64, 64), 3×3×3, 16 channels: 101 MB in, 441 MB out, which forward's last
// launch reads and writes once more; bound by memory, 0.127 ms at 4.28 TB/s if it did not. Backward with all
// elements tied: dy is 441 MB, read once, and twice where slopes are not zero.
#include "grad/narrow3d_group.cuh"
#include "norm/narrow3d_group.cuh"

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
using Conv = Shape<value_t, CHANNELS_IN, CHANNELS_OUT, KERNEL_D, KERNEL_H, KERNEL_W>;

struct Tail {  // of the normalised z
  float low, high;
  DropoutMask mask;
  float tied;  // the only z with a gradient: low; where the bounds are swapped NaN, which no z equals

  Tail(double low, double high, const DropoutMask& mask)
      : low(bound(low)), high(bound(high)), mask(mask), tied(this->low <= this->high ? this->low : NAN) {}

  __device__ __forceinline__ float operator()(float z, uint32_t random) const {
    // The formula of conv3d_groupnorm_min_clamp_dropout.
    const float value = min_nan(max_nan(min_nan(z, low), low), high);
    return value * mask.factor(random);
  }
  __device__ __forceinline__ bool passes(float z) const {
    // The gradient of conv3d_groupnorm_min_clamp_dropout.
    return z == tied;
  }
  // Of an element that passes: min and its bound share the gradient.
  __device__ __forceinline__ float slope(bool kept) const {
    // The gradient of conv3d_groupnorm_min_clamp_dropout.
    return kept ? 0.5f * mask.scale : 0.f;
  }
};

// y (N, CHANNELS_OUT, D', H', W'); kept: GroupNormKept. seed (1), or without elements where the number
// counts.
EXPORT int64_t kept_size(In<value_t> x) { return x.size(0) * (4 * CHANNELS_OUT + 1); }

EXPORT void forward(Out<output_t> y, Out<float> kept, In<value_t> x, In<value_t> weight, In<float> conv_bias,
                    In<float> norm_weight, In<float> norm_bias, In<int64_t> seed, int64_t number,
                    double min_value, double max_value, double dropout_p, double norm_eps,
                    int64_t norm_num_groups, cudaStream_t stream) {
  norms::narrow3d::group_norm<Conv>(
      y, kept, x, weight, {conv_bias, norm_weight, norm_bias, float(norm_eps), int(norm_num_groups)},
      Tail(min_value, max_value, dropout_mask(seed, number, dropout_p)), stream);
}

// dx (N, CHANNELS_IN, D, H, W), d_weight and the parameters' gradients. kept, seed and number: forward's.
// dv_bytes: of scratch for dv.
EXPORT int64_t dv_bytes() { return DV_BYTES; }

EXPORT void backward(Out<value_t> dx, Out<value_t> d_weight, Out<float> d_conv_bias, Out<float> d_norm_weight,
                     Out<float> d_norm_bias, In<output_t> dy, In<value_t> x, In<value_t> weight,
                     In<float> kept, In<float> norm_weight, In<int64_t> seed, int64_t number,
                     double min_value, double max_value, double dropout_p, int64_t norm_num_groups,
                     int64_t dv_bytes, cudaStream_t stream) {
  grad::narrow3d::group_norm::backward<Conv>(
      dx, d_weight, d_conv_bias, d_norm_weight, d_norm_bias, dy, kept, norm_weight, x, weight,
      norm_num_groups, Tail(min_value, max_value, dropout_mask(seed, number, dropout_p)), dv_bytes, stream);
}
