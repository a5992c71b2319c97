// Group normalisation and a max pooling of a convolution that is never written, as two launches.
#pragma once
#include "conv/narrow2d.cuh"
#include "norm/apply.cuh"
#include "norm/moments.cuh"
#include "pool/kept.cuh"
#include "pool/window.cuh"

namespace norms {

// y (N, kOut, PH, PW) = tail(z of what max_pool selects), z = group_norm(conv2d(x, weight) + conv_bias). Of
// tail's `compared` the slope in z is `tail.scale`, by channel. kept: pool::Kept, where kSaving.
template <class Tile, class Pool, bool kSaving, class Tail>
void select(const Out<output_t>& y, float* kept, const In<value_t>& x, const In<value_t>& weight, Group norm,
            Tail tail, double eps, int64_t groups, cudaStream_t stream) {
  using Filter = typename Tile::Filter;
  using Window = pool::Window<Pool, kSaving>;
  constexpr int64_t C = Filter::kOut;
  const auto geometry = Tile::Geometry::of(x);
  const int64_t N = geometry.N, size = y.numel(), parts = geometry.tiles() * geometry.strips;
  expect_elements("weight", weight, C * Filter::kIn * Filter::kTaps);
  expect_elements("y", y, N * C * (geometry.height() / Pool::kHeight) * (geometry.width() / Pool::kWidth));
  const int64_t partial = N * C * parts * 3;
  const Scratch<float> scratch(partial + (kSaving ? 0 : pool::Kept::floats(size, N, C, groups)), stream);
  const pool::Kept own(kSaving ? kept : scratch + partial, size, N, C, groups);
  conv::narrow2d::convolve<Tile>(x, weight, conv::narrow2d::SignedBy{norm.weight, tail.scale}, geometry,
                                 stream, Moments{scratch}, Window{own.window_max, own.argmax});
  finish<C>(y, {own.conv_bias, own.bias, own.group_mean, own.group_rstd, kSaving ? own.flat : nullptr},
            own.window_max, scratch, int(parts), norm, tail, eps,
            {N, C, groups, int64_t(geometry.height()) * geometry.width()}, size / (N * C), stream);
}

}  // namespace norms
