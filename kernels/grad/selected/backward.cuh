// The gradients of a convolution behind which a normalisation and a max pooling stand: neither the convolution nor its
// gradient is ever written.
//
// x (N, kIn, H, W), weight (kOut, kIn, kFilterH, kFilterW), dy (N, kOut, PH, PW), contiguous. v (N, kOut, OH, OW) is the
// convolution without its bias.
//
// With dz the gradient of what windows compare, every position's gradient is affine in v, and one of a window has
// something more:
//   dv = slope·dz·[selected] + constant + linear·v
// slope and linear are of a (sample, group), constant of a (sample, channel). Let X be a position's patch: the inputs of
// its filter, in units of 8 channels at a tap. Then v = weight·X, and
//   d_weight = Σ slope·dz·X + Σ constant·(ΣX) + weight·Σ linear·(ΣXXᵀ),
// where the first sum goes over windows, and the others over samples. So the dense part needs nothing of dy but its sums,
// and the sparse one none of them.
//   strip_kernel                     the sums, of a strip of a sample's rows (grad/selected/weight.cuh)
//   sample_kernel, total_kernel      the gradients that they make (grad/selected/merge.cuh)
// and only where x's gradient is asked for
//   compose_kernel, input_gradient_kernel, border_kernel    the transposed convolution of dv (grad/selected/input.cuh)
// All that is shifted away is added again at the end, in double. Every sum has a fixed order.
//
// Products run on tensor cores (mma.sync), each operand a sum of two float16 (core/split.cuh), scaled by powers of two: x by
// the tile in shared memory, dz by channel and row of windows. No more than 8 steps are added up in a tensor core, which
// cuts off; the rest is in float32.
//
// For (128, 8, 128, 128), 3×3, 64 channels, pool 4, an H200's tensor cores take 6 cycles for a product m16n8k16 (mma.sync)
// and 8 for a sparse m16n8k32, so that these times are the least, by arithmetic:
//   strip_kernel            45 products for 16 positions, 108 sparse ones for two windows, 138 MB: 0.10 ms
//   input_gradient_kernel   108 for the terms of 16 positions, 30 and 15 of half the depth for 16 pixels of dx, 206 MB:
//                           0.12 ms
// Beside what forward keeps (39 MB), 16 MB of memory.
#pragma once
#include "grad/selected/border.cuh"
#include "grad/selected/input.cuh"
#include "grad/selected/merge.cuh"

namespace grad::selected {

// Summed over the samples: of the convolution's bias, the normalisation's weight and bias, the scale behind it.
struct ParameterGradients {
  float *conv_bias, *norm_weight, *norm_bias, *scale;
};

// The gradients of weight and of the parameters; that of the scale has `scales` elements, kOut or 1. scratch has room for
// what Merged and then Partial say. Rows of x are cut into tiles of kPoolH, and those into strips; a geometry that does not
// cover them makes no blocks, and the launch fails.
template <class Build>
void backward_weight(value_t* d_weight, ParameterGradients d, int64_t scales, double* scratch, const value_t* x,
                     typename Build::Saved saved, GroupShape shape, typename Build::Geometry geometry,
                     cudaStream_t stream) {
  using Parts = Merging<Build>;
  const int64_t N = shape.N, G = shape.G, strips = geometry.strips;
  const typename Parts::Merged sums(scratch, N, G);
  const typename Parts::Partial parts(Parts::Merged::end(scratch, N, G), N, strips);
  const unsigned blocks = geometry.cover(geometry.tile_rows()) ? unsigned(strips * N * Parts::kStripBlocks) : 0;
  constexpr auto strip = strip_kernel<Parts>;
  constexpr auto sample = sample_kernel<Parts>;
  constexpr auto total = total_kernel<Parts>;
  allow_shared<strip>();
  strip<<<blocks, kThreads, Parts::StripLayout::kBytes, stream>>>(parts, x, saved, shape, geometry);
  sample<<<unsigned(N), Parts::kSampleThreads, 0, stream>>>(sums, parts, saved, shape, geometry);
  total<<<Parts::kOut * (Parts::kDepth + 4) / 32, kThreads, 0, stream>>>(
      d_weight, d.conv_bias, d.norm_weight, d.norm_bias, d.scale, sums, scales > 1, int(N));
  if (scales == 1) sum_rows({{d.scale, 1}}, sums.gradients + 3 * N * Parts::kOut, N, Parts::kOut, stream);
}

// dx, after `backward_weight`, whose scratch it takes; what is behind the shift in Partial is overwritten. Rows of x are cut
// into strips of a multiple of kPoolH, and columns into tiles of `stride`. The first tile has as many columns of dx as of v,
// and so has the last; those between have kHaloW fewer.
template <class Parts>
void backward_input(value_t* dx, double* scratch, const value_t* x, typename Parts::Saved saved, GroupShape shape,
                    typename Parts::Geometry geometry, int tiles, int stride, cudaStream_t stream) {
  const int64_t N = shape.N, W = geometry.W;
  float* const partial = Parts::Merged::end(scratch, N, shape.G);
  const typename Parts::Composed composed(partial, N);
  const bool cut = (tiles - 1) * int64_t(stride) < W && W <= tiles * int64_t(stride);
  const bool fits = stride + (tiles > 2 ? Parts::kHaloW : 0) <= Parts::kInputColumns && geometry.rows % Parts::kPoolH == 0;
  const unsigned blocks = geometry.cover(geometry.H) && cut && fits ? unsigned(geometry.strips * tiles * N) : 0;
  constexpr auto compose = compose_kernel<Parts>;
  constexpr auto input_gradient = input_gradient_kernel<Parts>;
  using Borders = Bordering<typename Parts::Build>;
  constexpr auto add_border = border_kernel<Borders>;
  const dim3 border(unsigned(N), Borders::kEdges + 1);
  allow_shared<input_gradient>(), allow_shared<add_border>();
  compose<<<unsigned(N + 1), Parts::kComposeThreads, 0, stream>>>(
      composed, saved.weight, typename Parts::Merged(scratch, N, shape.G), shape);
  input_gradient<<<blocks, Parts::kInputThreads, Parts::InputLayout::kBytes, stream>>>(
      dx, x, partial, composed, saved, shape, geometry, tiles, stride);
  add_border<<<border, Borders::kBorderThreads, Borders::kBorderShared, stream>>>(dx, x, partial, composed, geometry);
}

}  // namespace grad::selected
