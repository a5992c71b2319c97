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
#include "conv/narrow2d.cuh"
#include "grad/selected/backward.cuh"
#include "norm/apply.cuh"
#include "norm/moments.cuh"
#include "pool/kept.cuh"
#include "pool/window.cuh"

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

struct Tail {  // of the normalised z of what a window selects
  const float* scale;  // (CHANNELS_OUT)
  float low, high;

  struct Channel {
    float scale;
  };
  __device__ __forceinline__ Channel channel(int64_t, int c) const { return {scale[c]}; }
  // What windows compare.
  __device__ __forceinline__ float compared(float z, const Channel& c) const { return z * c.scale; }
  __device__ __forceinline__ float operator()(float z, const Channel& c) const {
    // The formula of conv2d_groupnorm_scale_maxpool_clamp_fused.
    return clamp(compared(z, c), low, high);
  }
  // Of what windows compare.
  __device__ __forceinline__ float gradient(float dy, float z, const Channel& c) const {
    // The gradient of conv2d_groupnorm_scale_maxpool_clamp_fused.
    return clamp_passes(compared(z, c), low, high) ? dy : 0.f;
  }
};

using Build = grad::selected::Units<Filter, Pool, Tail>;
using Input = grad::selected::Input<Build, INPUT_COLUMNS>;
template <bool kSaving> using Window = pool::Window<Pool, kSaving>;

// What Python was told of shared memory (tiling.py), where it says so.
#ifdef STRIPS_SHARED
static_assert(conv::narrow2d::kShared<Tile, norms::Moments, Window<SAVING>> == STRIPS_SHARED, "what was planned with");
static_assert(sizeof(Tile::Storage) <= STATIC_SHARED, "what was planned with");
#endif
#ifdef INPUT_SHARED
static_assert(Input::InputLayout::kBytes == INPUT_SHARED, "what was planned with");
#endif

// kept: pool::Kept, or none.
template <bool kSaving>
void run(Out<output_t> y, float* kept, In<value_t> x, In<value_t> weight, norms::Group norm, Tail tail, double eps,
         int64_t groups, cudaStream_t stream) {
  const auto geometry = Tile::Geometry::of(x);
  const int64_t N = geometry.N, size = y.numel(), parts = geometry.tiles() * geometry.strips;
  expect_elements("weight", weight, Filter::kOut * Filter::kIn * Filter::kTaps);
  expect_elements("y", y, N * Filter::kOut * (geometry.height() / POOL_H) * (geometry.width() / POOL_W));
  const int64_t partial = N * Filter::kOut * parts * 3;
  const Scratch<float> scratch(partial + (kSaving ? 0 : pool::Kept::floats(size, N, Filter::kOut, groups)), stream);
  const pool::Kept own(kSaving ? kept : scratch + partial, size, N, Filter::kOut, groups);
  conv::narrow2d::convolve<Tile>(x, weight, conv::narrow2d::SignedBy{norm.weight, tail.scale}, geometry, stream,
                                 norms::Moments{scratch}, Window<kSaving>{own.window_max, own.argmax});
  const norms::Kept statistics{own.conv_bias, own.bias, own.group_mean, own.group_rstd, kSaving ? own.flat : nullptr};
  norms::finish<Filter::kOut>(y, statistics, own.window_max, scratch, int(parts), norm, tail, eps,
                              {N, Filter::kOut, groups, int64_t(geometry.height()) * geometry.width()},
                              size / (N * Filter::kOut), stream);
}

// What backward needs is not kept.
EXPORT void forward(Out<output_t> y, Out<float> kept, In<value_t> x, In<value_t> weight, In<float> conv_bias,
                    In<float> norm_weight, In<float> norm_bias, In<float> scale, double low, double high, double eps,
                    int64_t groups, cudaStream_t stream) {
  run<false>(y, nullptr, x, weight, {conv_bias, norm_weight, norm_bias}, {scale, float(low), float(high)}, eps, groups,
             stream);
}

EXPORT void forward_saving(Out<output_t> y, Out<float> kept, In<value_t> x, In<value_t> weight, In<float> conv_bias,
                           In<float> norm_weight, In<float> norm_bias, In<float> scale, double low, double high,
                           double eps, int64_t groups, cudaStream_t stream) {
  expect_elements("kept", kept, pool::Kept::size(y.numel(), y.size(0), Filter::kOut, groups));
  run<true>(y, kept, x, weight, {conv_bias, norm_weight, norm_bias}, {scale, float(low), float(high)}, eps, groups, stream);
}

template <class P>
void run_backward(const grad::selected::Gradients& d, In<output_t> dy, In<value_t> x, In<value_t> weight, In<float> kept,
                  In<float> norm_weight, Tail tail, int64_t groups, cudaStream_t stream) {
  const int64_t N = x.size(0), size = dy.numel();
  expect_elements("kept", kept, pool::Kept::size(size, N, Filter::kOut, groups));
  const pool::Kept own(const_cast<float*>(kept.data), size, N, Filter::kOut, groups);
  grad::selected::backward<P>(d, x, {weight, dy, own.window_max, own.argmax, own.flat, own.group_mean, own.group_rstd,
                                     own.conv_bias, norm_weight, own.bias, tail}, groups, stream);
}

// The gradients of weight and of the parameters; d_scale has CHANNELS_OUT elements or 1.
EXPORT void backward(Out<value_t> d_weight, Out<float> d_conv_bias, Out<float> d_norm_weight, Out<float> d_norm_bias,
                     Out<float> d_scale, In<output_t> dy, In<value_t> x, In<value_t> weight, In<float> kept,
                     In<float> norm_weight, In<float> scale, double low, double high, int64_t groups, cudaStream_t stream) {
  run_backward<grad::selected::Merging<Build>>({{}, d_weight, d_conv_bias, d_norm_weight, d_norm_bias, d_scale}, dy, x,
                                               weight, kept, norm_weight, {scale, float(low), float(high)}, groups, stream);
}

// The same, and x's.
EXPORT void backward_input(Out<value_t> dx, Out<value_t> d_weight, Out<float> d_conv_bias, Out<float> d_norm_weight,
                           Out<float> d_norm_bias, Out<float> d_scale, In<output_t> dy, In<value_t> x, In<value_t> weight,
                           In<float> kept, In<float> norm_weight, In<float> scale, double low, double high, int64_t groups,
                           cudaStream_t stream) {
  run_backward<Input>({dx, d_weight, d_conv_bias, d_norm_weight, d_norm_bias, d_scale}, dy, x, weight, kept, norm_weight,
                      {scale, float(low), float(high)}, groups, stream);
}
