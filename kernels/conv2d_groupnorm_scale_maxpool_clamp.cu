// y = clamp(max_pool(group_norm(conv2d(x, weight) + conv_bias)·scale), low, high)
//
// group_norm(v)·scale is a line in v for each channel of a sample, and the sign of its slope,
// norm_weight·scale, is known before the statistics. With that sign in the filters every window wants its
// maximum, so that max_pool may come first: v, the convolution without its bias, is never written.
//   forward   1  convolve   moments of v by part of a channel; of each window the v that wins, and for
//             backward its place
//             2  finish     moments merged; the line and clamp, of y's size
//   backward  dv = slope·dz·[selected] + constant + linear·v, never written either
//             (grad/selected/backward.cuh)
//
// At the default size (128, 8, 128, 128), 3×3, 64 channels, pool 4: 67 MB in, 31.5 MB of window_max (mostly
// kept in L2), 31.5 MB out: 0.023 ms at 4.28 TB/s; 15 products of 64×128×16 a row, three in place of one for
// float32's accuracy: 0.06 ms. Measured on an H200: 0.127 ms; 0.103 to convolve, the tensor cores busy 74 %
// of it, and 0.02 to finish.
#include "grad/selected/backward.cuh"
#include "norm/windows.cuh"

#ifndef CHANNELS_IN
#define CHANNELS_IN 8
#define CHANNELS_OUT 64
#define KERNEL_H 3
#define KERNEL_W 3
#define POOL_H 4
#define POOL_W 4
#endif
#ifndef LONG_ROWS  // are rows of x longer than a tile?
#define LONG_ROWS 0
#endif
#ifndef INPUT_COLUMNS  // of a tile of x's gradient
#define INPUT_COLUMNS 64
#endif

using Filter = conv::Filter<CHANNELS_IN, CHANNELS_OUT, KERNEL_H, KERNEL_W>;
using Pool = pool::Max<POOL_H, POOL_W>;
using Tile = conv::narrow2d::Tile<Filter, LONG_ROWS ? 128 / POOL_W * POOL_W : 0, POOL_H>;

struct Tail {          // of the normalised z of what a window selects
  const float* scale;  // (CHANNELS_OUT)
  float low, high;

  struct Channel {
    float scale;
  };
  __device__ __forceinline__ Channel channel(int64_t, int c) const { return {scale[c]}; }
  // What windows compare.
  __device__ __forceinline__ float compared(float z, const Channel& c) const { return z * c.scale; }
  __device__ __forceinline__ float operator()(float z, const Channel& c) const {
    // The formula of conv2d_groupnorm_scale_maxpool_clamp.
    return clamp(compared(z, c), low, high);
  }
  // Of what windows compare.
  __device__ __forceinline__ float gradient(float dy, float z, const Channel& c) const {
    // The gradient of conv2d_groupnorm_scale_maxpool_clamp.
    return clamp_passes(compared(z, c), low, high) ? dy : 0.f;
  }
};

using Build = grad::selected::Units<Filter, Pool, Tail>;
using Input = grad::selected::Input<Build, INPUT_COLUMNS>;
using Sums = grad::selected::Merging<Build>;

// What Python was told of shared memory (tiling.py), where it says so.
#ifdef STRIPS_SHARED
static_assert(conv::narrow2d::kShared<Tile, norms::Moments, pool::Window<Pool, SAVING>> == STRIPS_SHARED,
              "what was planned with");
static_assert(sizeof(Tile::Storage) <= STATIC_SHARED, "what was planned with");
#endif
#ifdef INPUT_SHARED
static_assert(Input::InputLayout::kBytes == INPUT_SHARED, "what was planned with");
static_assert(Sums::StripLayout::kBytes == SUMS_SHARED, "what was planned with");
#endif

// kept: what backward needs (pool::Kept); forward leaves it alone.
EXPORT int64_t kept_size(In<output_t> y, int64_t group_norm_num_groups) {
  return y.numel() + 2 * y.size(0) * (CHANNELS_OUT + group_norm_num_groups) +
         (y.numel() + y.size(0) * CHANNELS_OUT + 3) / 4;
}
EXPORT void forward(Out<output_t> y, Out<float> kept, In<value_t> x, In<value_t> weight, In<float> conv_bias,
                    In<float> group_norm_weight, In<float> group_norm_bias, In<float> scale, double clamp_min,
                    double clamp_max, double group_norm_eps, int64_t group_norm_num_groups,
                    cudaStream_t stream) {
  norms::select<Tile, Pool, false>(y, nullptr, x, weight, {conv_bias, group_norm_weight, group_norm_bias},
                                   Tail{scale, bound(clamp_min), bound(clamp_max)}, group_norm_eps,
                                   group_norm_num_groups, stream);
}
EXPORT void forward_saving(Out<output_t> y, Out<float> kept, In<value_t> x, In<value_t> weight,
                           In<float> conv_bias, In<float> group_norm_weight, In<float> group_norm_bias,
                           In<float> scale, double clamp_min, double clamp_max, double group_norm_eps,
                           int64_t group_norm_num_groups, cudaStream_t stream) {
  expect_elements("kept", kept, pool::Kept::size(y.numel(), y.size(0), CHANNELS_OUT, group_norm_num_groups));
  norms::select<Tile, Pool, true>(y, kept, x, weight, {conv_bias, group_norm_weight, group_norm_bias},
                                  Tail{scale, bound(clamp_min), bound(clamp_max)}, group_norm_eps,
                                  group_norm_num_groups, stream);
}

// The gradients of weight, where it has elements, and of the parameters, d_scale of CHANNELS_OUT elements or
// 1; and x's, too.
EXPORT void backward(Out<value_t> d_weight, Out<float> d_conv_bias, Out<float> d_group_norm_weight,
                     Out<float> d_group_norm_bias, Out<float> d_scale, In<output_t> dy, In<value_t> x,
                     In<value_t> weight, In<float> kept, In<float> group_norm_weight, In<float> scale,
                     double clamp_min, double clamp_max, int64_t group_norm_num_groups, cudaStream_t stream) {
  grad::selected::backward<Sums>(
      {{}, d_weight, d_conv_bias, d_group_norm_weight, d_group_norm_bias, d_scale}, dy, x, weight, kept,
      group_norm_weight, Tail{scale, bound(clamp_min), bound(clamp_max)}, group_norm_num_groups, stream);
}
EXPORT void backward_input(Out<value_t> dx, Out<value_t> d_weight, Out<float> d_conv_bias,
                           Out<float> d_group_norm_weight, Out<float> d_group_norm_bias, Out<float> d_scale,
                           In<output_t> dy, In<value_t> x, In<value_t> weight, In<float> kept,
                           In<float> group_norm_weight, In<float> scale, double clamp_min, double clamp_max,
                           int64_t group_norm_num_groups, cudaStream_t stream) {
  grad::selected::backward<Input>(
      {dx, d_weight, d_conv_bias, d_group_norm_weight, d_group_norm_bias, d_scale}, dy, x, weight, kept,
      group_norm_weight, Tail{scale, bound(clamp_min), bound(clamp_max)}, group_norm_num_groups, stream);
}
