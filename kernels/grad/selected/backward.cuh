// The gradients of a convolution behind which a normalisation and a max pooling stand: neither the
// convolution nor its gradient is ever written.
//
// x (N, kIn, H, W), weight (kOut, kIn, kFilterH, kFilterW), dy (N, kOut, PH, PW), contiguous. v (N, kOut, OH,
// OW) is the convolution without its bias.
//
// With dz the gradient of what windows compare, every position's gradient is affine in v, and one of a window
// has something more:
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
//                                                           (grad/selected/input.cuh)
// All that is shifted away is added again at the end, in double. Every sum has a fixed order.
//
// Products run on tensor cores (mma.sync; where there is wgmma, that for the terms of 3×3 filters and for
// sparse sums as kTogether says), each operand a sum of two float16 (core/split.cuh), scaled by powers of
// two: x by the tile in shared memory, dz by channel and row of windows. No more than 8 steps are added up in
// a tensor core, which cuts off, or 16 of wgmma's sparse ones, in most of which a channel has nothing; the
// rest is in float32.
//
// For (128, 8, 128, 128), 3×3, 64 channels, pool 4, an H200's tensor cores take 6 cycles for a product
// m16n8k16 (mma.sync; 4 by wgmma), and a multiprocessor's 18 for a sparse m64n24k32, so that these times are
// the least, by arithmetic:
//   strip_kernel            45 products for 16 positions, 36 sparse ones for eight windows, 138 MB: 0.08 ms
//   input_gradient_kernel   108 for the terms of 16 positions, 30 and 15 of half the depth for 16 pixels of
//                           dx, 206 MB: 0.10 ms
// Beside what forward keeps (39 MB), 16 MB of memory.
#pragma once
#include "grad/selected/border.cuh"
#include "grad/selected/input.cuh"
#include "grad/selected/merge.cuh"
#include "host/tensor.h"
#include "pool/kept.cuh"

namespace grad::selected {

// What is asked for, summed over the samples: of x and of the filters; of the convolution's bias, the
// normalisation's weight and bias, the scale behind it (kOut elements, or 1 for all channels).
struct Gradients {
  Out<value_t> x, weight;
  Out<float> conv_bias, norm_weight, norm_bias, scale;
};

// dx, from the sums and from the shift that `partial` begins with; what is behind that is overwritten.
template <class P>
void add_input(value_t* dx, const value_t* x, typename P::Saved saved, GroupShape shape,
               typename P::Geometry whole, typename P::Merged sums, float* partial, cudaStream_t stream) {
  using Borders = Bordering<typename P::Build>;
  const int64_t N = shape.N;
  const int stride = whole.W <= 2 * P::kInputColumns ? P::kInputColumns : P::kInputColumns - 8;
  static_assert(P::kHaloW <= 8 && P::kInputColumns > 8, "tiles between the first and the last");
  const int tiles = (whole.W + stride - 1) / stride;
  auto geometry = whole.shared_out(whole.tile_rows(), N * tiles);
  geometry.rows *= P::kPoolH;
  const typename P::Composed composed(partial, N);
  constexpr auto input_gradient = input_gradient_kernel<P>;
  constexpr auto add_border = border_kernel<Borders>;
  const dim3 border(unsigned(N), Borders::kPairs + 1);
  allow_shared<input_gradient>(), allow_shared<add_border>();
  launch_early(compose_kernel<P>, unsigned(N + 1), P::kComposeThreads, stream, composed, saved.weight, sums,
               shape);
  input_gradient<<<unsigned(geometry.strips * tiles * N), P::kInputThreads, P::InputLayout::kBytes, stream>>>(
      dx, x, partial, composed, saved, shape, geometry, tiles, stride);
  add_border<<<border, Borders::kBorderThreads, Borders::kBorderShared, stream>>>(dx, x, partial, composed,
                                                                                  geometry);
}

// The gradients: of x, too, where P is an Input, and else not, where it is a Merging. saved: what forward was
// given and kept. Rows of x are cut into tiles of kPoolH, and those into strips; for x's gradient, rows into
// strips of a multiple of kPoolH, and columns into tiles: the first has as many columns of dx as of v, and so
// has the last; those between have kHaloW fewer.
template <class P, class Tail>
void backward(const Gradients& d, const In<output_t>& dy, const In<value_t>& x, const In<value_t>& weight,
              const In<float>& kept, const float* norm_weight, Tail tail, int64_t G, cudaStream_t stream) {
  const typename P::Geometry whole{int(x.size(0)), int(x.size(2)), int(x.size(3)), 1, 1};
  const int64_t N = whole.N, selected = dy.numel();
  expect_elements("kept", kept, pool::Kept::size(selected, N, P::kOut, G));
  const pool::Kept own(const_cast<float*>(kept.data), selected, N, P::kOut, G);
  const typename P::Saved saved{
      weight,        dy,          own.window_max, own.argmax, own.flat, own.group_mean, own.group_rstd,
      own.conv_bias, norm_weight, own.bias,       tail};
  const auto geometry = whole.shared_out(whole.tile_rows(), N * P::kStripBlocks);
  const GroupShape shape{N, P::kOut, G, int64_t(whole.height()) * whole.width()};
  int64_t room = P::Partial::count(N, geometry.strips);
  if constexpr (P::kOfInput) room = std::max(room, P::Composed::count(N));
  const int64_t merged = P::Merged::count(N, G);
  const Scratch<double> scratch(merged + (room + 1) / 2, stream);
  const typename P::Merged sums(scratch, N, G);
  float* const partial = reinterpret_cast<float*>(scratch + merged);
  const typename P::Partial parts(partial, N, geometry.strips);
  using Sums = Merging<typename P::Build>;
  constexpr auto strip = strip_kernel<Sums>;
  const bool scales = d.scale.numel() > 1;
  allow_shared<strip>();
  strip<<<unsigned(geometry.strips * N * P::kStripBlocks), kThreads, P::StripLayout::kBytes, stream>>>(
      parts, x, saved, shape, geometry);
  launch_early(sample_kernel<Sums>, unsigned(N), P::kSampleThreads, stream, sums, parts, saved, shape,
               geometry);
  launch_early(total_kernel<Sums>, unsigned(P::kOut * (P::kDepth + 4) / 32), kThreads, stream, d.weight.data,
               d.conv_bias.data, d.norm_weight.data, d.norm_bias.data, d.scale.data, sums, scales, int(N));
  if (!scales) sum_rows({{d.scale, 1}}, sums.gradients + 3 * N * P::kOut, N, P::kOut, stream);
  if constexpr (P::kOfInput) add_input<P>(d.x, x, saved, shape, whole, sums, partial, stream);
}

}  // namespace grad::selected
