// The gradients of y = clamp(max_pool(group_norm(conv2d(x, weight) + conv_bias)·scale), low, high), from what
// the fused forward keeps: neither the convolution nor its gradient is ever written.
//
// x (N, CHANNELS_IN, H, W), weight (CHANNELS_OUT, CHANNELS_IN, KERNEL_H, KERNEL_W), dy (N, CHANNELS_OUT, PH,
// PW), contiguous. v (N, CHANNELS_OUT, OH, OW) is the convolution without its bias; kept is what forward left.
//
// With dz = dy·scale where the clamp lets it pass, every position's gradient is affine in v, and one of a
// window has something more:
//   dv = slope·dz·[selected] + constant + linear·v
// slope and linear are of a (sample, group), constant of a (sample, channel). Let X be a position's patch:
// the inputs of its filter, in units of 8 channels at a tap. Then v = weight·X, and
//   d_weight = Σ slope·dz·X + Σ constant·(ΣX) + weight·Σ linear·(ΣXXᵀ),
// where the first sum goes over windows, and the others over samples. So the dense part needs nothing of dy
// but its sums, and the sparse one none of them.
//   strip_kernel                     the sums, of a strip of a sample's rows (grad/selected/weight.cuh)
//   sample_kernel, total_kernel      the gradients that they make (grad/selected/merge.cuh)
// and only where x's gradient is asked for
//   compose_kernel, input_gradient_kernel, border_kernel    the transposed convolution of dv
//                                                (grad/selected/input.cuh)
// All that is shifted away is added again at the end, in double. Every sum has a fixed order.
//
// Products run on tensor cores (mma.sync), each operand a sum of two float16 (core/split.cuh), scaled by
// powers of two: x by the tile in shared memory, dz by channel and row of windows. No more than 8 steps are added up
// in a tensor core, which cuts off; the rest is in float32.
//
// At the default size (128, 8, 128, 128), 3×3, 64 channels, pool 4, an H200's tensor cores take 6 cycles for
// a product m16n8k16 (mma.sync) and 8 for a sparse m16n8k32, so that these times are the least, by
// arithmetic:
//   strip_kernel            45 products for 16 positions, 108 sparse ones for two windows, 138 MB: 0.10 ms
//   input_gradient_kernel   108 for the terms of 16 positions, 30 and 15 of half the depth for 16 pixels of
//                           dx, 206 MB: 0.12 ms
// Beside what forward keeps (39 MB), 16 MB of memory.
#include "conv2d_groupnorm_scale_maxpool_clamp.cuh"
#include "grad/selected/backward.cuh"

#ifndef INPUT_COLUMNS  // the plan, as tiling.py makes it; else one for which a source compiles alone
#define INPUT_COLUMNS 64
#define INPUT_SHARED Input::InputLayout::kBytes
#endif

namespace {

using Build = grad::selected::Units<Filter, Pool, Tail>;
using Input = grad::selected::Input<Build, INPUT_COLUMNS>;
static_assert(Input::InputLayout::kBytes == INPUT_SHARED, "what was planned with");

inline Build::Saved saved_by_forward(const value_t* weight, const output_t* dy, const float* kept,
                                     const float* norm_weight, Tail tail, Build::Geometry geometry,
                                     GroupShape shape) {
  const int64_t selected = int64_t(shape.N) * shape.C * geometry.pooled_size();
  const auto [window_max, statistics, argmax, flat] = Kept(const_cast<float*>(kept), selected, shape.N, shape.G);
  return {weight, dy, window_max, argmax, flat, statistics.group_mean, statistics.group_rstd, statistics.mean,
          norm_weight, statistics.m2, tail};
}

}  // namespace

// The gradients of weight and, summed over the samples, of the parameters; d_scale has `scales` elements,
// CHANNELS_OUT or 1. scratch has room for what Merged and then Partial say. Rows of x are cut into tiles of
// POOL_H, and those into `strips` of `rows`, the last of what is left; a plan that does not cover them makes no
// blocks, and the launch fails.
EXPORT void backward(value_t* d_weight, float* d_conv_bias, float* d_norm_weight, float* d_norm_bias,
                     float* d_scale, double* scratch, const output_t* dy, const value_t* x,
                     const value_t* weight, const float* kept, const float* norm_weight, const float* scale,
                     double low, double high, int64_t N, int64_t G, int64_t H, int64_t W, int64_t scales,
                     int64_t strips, int64_t rows, cudaStream_t stream) {
  const Build::Geometry geometry{int(N), int(H), int(W), int(strips), int(rows)};
  const GroupShape shape{N, CHANNELS_OUT, G, int64_t(geometry.height()) * geometry.width()};
  const auto saved = saved_by_forward(weight, dy, kept, norm_weight, {scale, float(low), float(high)}, geometry, shape);
  grad::selected::backward_weight<Build>(d_weight, {d_conv_bias, d_norm_weight, d_norm_bias, d_scale}, scales, scratch,
                                         x, saved, shape, geometry, stream);
}

// dx, after `backward`, whose scratch it takes; what is behind the shift in Partial is overwritten.
// Rows of x are cut into strips of `rows`, a multiple of POOL_H, and columns into tiles of `stride`. The
// first tile has as many columns of dx as of v, and so has the last; those between have kHaloW fewer.
EXPORT void backward_input(value_t* dx, double* scratch, const output_t* dy, const value_t* x,
                           const value_t* weight, const float* kept, const float* norm_weight,
                           const float* scale, double low, double high, int64_t N, int64_t G, int64_t H,
                           int64_t W, int64_t tiles, int64_t stride, int64_t strips, int64_t rows,
                           cudaStream_t stream) {
  const Build::Geometry geometry{int(N), int(H), int(W), int(strips), int(rows)};
  const GroupShape shape{N, CHANNELS_OUT, G, int64_t(geometry.height()) * geometry.width()};
  const auto saved = saved_by_forward(weight, dy, kept, norm_weight, {scale, float(low), float(high)}, geometry, shape);
  grad::selected::backward_input<Input>(dx, scratch, x, saved, shape, geometry, int(tiles), int(stride), stream);
}
