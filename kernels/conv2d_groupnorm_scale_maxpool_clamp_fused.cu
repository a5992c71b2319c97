// y = clamp(max_pool(group_norm(conv2d(x, weight) + conv_bias)·scale), low, high), the convolution never written.
//
// x (N, CHANNELS_IN, H, W), weight (CHANNELS_OUT, CHANNELS_IN, KERNEL_H, KERNEL_W), contiguous; y (N, CHANNELS_OUT, PH,
// PW) with PH = OH / POOL_H, PW = OW / POOL_W, floored. v (N, CHANNELS_OUT, OH, OW) is the convolution without its bias.
//
// The slope of group_norm(v)·scale has the sign of norm_weight·scale. With that sign in the filters every window wants its
// maximum, so that max_pool may come first. Two launches:
//   1  convolve   the moments of v by part of a channel; of each window the v that wins, and for backward its place, the
//                 first among equal ones, as max_pool2d has it
//   2  finish     the moments merged; affine and clamp of those v; for backward, which channels are flat, so that all
//                 values are equal behind the normalisation: there backward finds the first anew
//
// At the default size (128, 8, 128, 128), 3×3, 64 channels, pool 4: 67 MB in, 31.5 MB of window_max (mostly kept in L2),
// 31.5 MB out: 0.023 ms at 4.28 TB/s; 15 products of 64×128×16 a row, three in place of one for float32's accuracy: 0.06
// ms. Measured on an H200: 0.127 ms; 0.103 to convolve, the tensor cores busy 74 % of it, and 0.02 to finish.
#include "conv2d_groupnorm_scale_maxpool_clamp.cuh"
#include "conv/narrow2d.cuh"
#include "norm/apply.cuh"
#include "norm/moments.cuh"
#include "pool/window.cuh"

#ifndef TILE_STRIDE  // the plan, as tiling.py makes it; else one for which a source compiles alone
#define TILE_COLUMNS Tile::kColumns
#define TILE_STRIDE 0
#define BLOCK_CHANNELS Tile::kBlockChannels
#define TEAMS Tile::kTeams
#define STATIC_SHARED (1 << 10)
#define DYNAMIC_SHARED (Tile::kTeams * int(sizeof(TeamShared)))
#endif
#ifndef SAVING
#define SAVING 0
#endif

namespace {

using Tile = conv::narrow2d::Tile<Filter, TILE_STRIDE, POOL_H>;
using Window = pool::Window<Pool, SAVING>;
using TeamShared = conv::narrow2d::TeamShared<Tile, Window, norms::Moments>;
static_assert(Tile::kColumns == TILE_COLUMNS && Tile::kBlockChannels == BLOCK_CHANNELS && Tile::kTeams == TEAMS &&
                  sizeof(Tile::Storage) <= STATIC_SHARED && Tile::kTeams * sizeof(TeamShared) == DYNAMIC_SHARED,
              "what was planned with");

}  // namespace

// kept, as Kept: for backward, or without elements where nobody wants it. scratch: what is not kept, but the
// places, then partial (N, C, tiles·strips, 3).
// Columns of v are cut into tiles, and rows into strips of `rows` rows of windows, the last of what is left
// (tiling.py's StripTiling); a plan that does not cover v makes no blocks, and the launch fails.
EXPORT void forward(output_t* y, float* kept, float* scratch, const value_t* x, const value_t* weight,
                    const accumulate_t* conv_bias, const accumulate_t* norm_weight,
                    const accumulate_t* norm_bias, const accumulate_t* scale, double low, double high,
                    int64_t N, int64_t G, int64_t H, int64_t W, double eps, int64_t tiles, int64_t strips,
                    int64_t rows, cudaStream_t stream) {
  const Tile::Geometry geometry{int(N), int(H), int(W), int(tiles), int(strips), int(rows)};
  const GroupShape shape{N, CHANNELS_OUT, G, int64_t(geometry.height()) * geometry.width()};
  const int64_t pooled = int64_t(geometry.height() / POOL_H) * (geometry.width() / POOL_W);
  const auto [window_max, statistics, argmax, flat] =
      Kept(kept ? kept : scratch, N * CHANNELS_OUT * pooled, N, G);
  float* const partial = kept ? scratch : reinterpret_cast<float*>(argmax);
  conv::narrow2d::convolve<Tile>(x, weight, conv::narrow2d::SignedBy{norm_weight, scale}, geometry, stream,
                                 norms::Moments{partial}, Window{window_max, argmax});
  norms::finish<CHANNELS_OUT>(
      y, {statistics.mean, statistics.m2, statistics.group_mean, statistics.group_rstd, kept ? flat : nullptr},
      window_max, partial, int(geometry.tiles() * geometry.strips), {conv_bias, norm_weight, norm_bias},
      Tail{scale, accumulate_t(low), accumulate_t(high)}, eps, shape, pooled, stream);
}
