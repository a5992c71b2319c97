// y = clamp(max_pool(group_norm(conv2d(x, weight) + conv_bias)·scale), low, high), the convolution never
// written.
//
// x (N, CHANNELS_IN, H, W), weight (CHANNELS_OUT, CHANNELS_IN, KERNEL_H, KERNEL_W), contiguous; y (N,
// CHANNELS_OUT, PH, PW) with PH = OH / POOL_H, PW = OW / POOL_W, floored. v (N, CHANNELS_OUT, OH, OW) is the
// convolution without its bias.
//
// The slope of group_norm(v)·scale has the sign of norm_weight·scale. With that sign in the filters every
// window wants its maximum. Two launches:
//   convolve_kernel   statistics of v per (sample, channel, tile, strip), and `extreme`, the v of each window
//   finish_kernel     the statistics merged; affine and clamp of `extreme`
// For backward (SAVING), convolve_kernel also writes `index`, the place of that v in its window, by rows; the
// first among equal ones, as max_pool2d has it; finish_kernel, which channels are flat, so that all are equal
// behind the normalisation: there backward finds the first anew.
// Where the squares of a group's values add up to more than float32 holds (from 1e17 or so on), the variance
// is infinite, its inverse root 0, and norm_bias is left, as in eager on a GPU.
//
// A block computes 64 channels × 128 columns of v, row by row, as an implicit GEMM: M = channels, N =
// columns, K = taps × channels in.
// - Operands: each is a sum of two float16 (core/split.cuh; one, if it has 16 bits), scaled by powers of two:
//   filters by channel; x by block, first by a scale that fits almost all inputs, then, where the block's
//   largest magnitude turns out not to fit, again by one that does. Filters stay in registers.
// - Stage: a ring of rows of x in shared memory. A pixel's 8 channels lie side by side there, so that a tap
//   is an offset, and B needs no im2col.
// - Mainloop: two teams of four warps, each with its own strip of rows, take turns with the tensor cores:
//   while one team's products are formed, the other sums up its own, converts the next row of x and fetches
//   the one after. (Teams that may all form products at once do everything else at once, too, and leave the
//   tensor cores idle meanwhile.)
//
// At the default size (128, 8, 128, 128), 3×3, 64 channels, pool 4: 67 MB in, 31.5 MB of extreme (mostly kept
// in L2), 31.5 MB out: 0.023 ms at 4.28 TB/s; 15 products of 64×128×16 a row, three in place of one for
// float32's accuracy: 0.06 ms. Measured on an H200: 0.127 ms; 0.103 to convolve, the tensor cores busy 74 %
// of it, and 0.02 to finish.
//
//   conv/narrow2d_tile.cuh   sizes, tiles, the layout of shared memory
//   conv/narrow2d_rows.cuh   rows of x on their way to shared memory
//   conv/narrow2d.cuh        filters and products
//   pool/windows.cuh         statistics and windows
#include "conv2d_groupnorm_scale_maxpool_clamp.cuh"
#include "pool/windows.cuh"
#include "conv/narrow2d.cuh"
#include "conv/narrow2d_rows.cuh"
#include "norm/formulas.h"
#include "core/vector.cuh"

namespace {

// What a block computes, a team's strip of it.
struct Job {
  int strip, tile, first_channel, n;
  int row_begin, row_end, turns;  // rows of v; of the block's longest strip
  int column, columns;            // that are this tile's
  __device__ __forceinline__ Job(Geometry geometry, int team) {
    const int strip_blocks = geometry.strip_blocks(), tiles = geometry.tiles();
    const unsigned job = blockIdx.x / strip_blocks;
    strip = blockIdx.x % strip_blocks * kTeams + team, tile = job % tiles;
    first_channel = job / tiles % kChannelBlocks * kBlockChannels, n = job / tiles / kChannelBlocks;
    row_begin = strip * geometry.rows * POOL_H;
    const int past_last = strip >= geometry.strips ? row_begin : row_begin + geometry.rows * POOL_H;
    row_end = strip == geometry.strips - 1 ? geometry.height() : past_last;
    const bool last_strips = blockIdx.x % strip_blocks == strip_blocks - 1;
    turns = geometry.rows * POOL_H + (last_strips ? geometry.height() % POOL_H : 0);
    column = tile * kStride;
    columns = tile == tiles - 1 ? geometry.width() - column : kStride;
  }
};

// All rows of a team's strip, x scaled by 2^exponent.
__device__ __forceinline__ void convolve_strip(WindowsEpilogue& epilogue, Rows& rows, const Filters& filters,
                                               const Job& job, int team, unsigned char* shared,
                                               int exponent) {
  const float factor = power_of_two(exponent);
#pragma unroll 1
  for (int kh = 0; kh < KERNEL_H && job.row_begin < job.row_end; kh++)
    rows.fetch(job.row_begin + kh), rows.convert(kh, factor);
  if (job.row_begin + 1 < job.row_end) rows.fetch(job.row_begin + KERNEL_H);
  int slot = 0;
  float d[kTiles][4];  // v, scaled; then less the shift
  if (team == kTeams - 1) hand_on(team);
  publish();
#pragma unroll 1
  for (int turn = 0; turn < job.turns; turn++) {
    const int row = job.row_begin + turn;
    take_turn(team);  // the row's pixels are there, and the products of the row before it have been formed
    uint32_t addresses[KERNEL_H];
#pragma unroll
    for (int kh = 0; kh < KERNEL_H; kh++)
      addresses[kh] = shared_address(shared) + (slot + kh - (slot + kh >= kRing ? kRing : 0)) * kRowBytes;
    multiply_row(d, filters.fragments, addresses);  // after the last row, of stale pixels, for nobody
    if (team < kTeams - 1 || turn < job.turns - 1) hand_on(team);
    if (epilogue.complete()) epilogue.flush();
    if (row + 1 < job.row_end) {
      // Nobody reads the slot of the row before this one.
      rows.convert(slot == 0 ? kRing - 1 : slot - 1, factor);
      if (row + 2 < job.row_end) rows.fetch(row + 1 + KERNEL_H);
    }
    slot = slot == kRing - 1 ? 0 : slot + 1;
    publish();
    await(d);
    if (turn == 0) epilogue.take_shift(d);
    if (row < job.row_end) epilogue.take(d);
  }
  if (epilogue.complete()) epilogue.flush();
}

// extreme, index (N, CHANNELS_OUT, PH, PW); partial (N, CHANNELS_OUT, tiles·strips, 3): count, mean, m2 of v.
// Grid: strips by kTeams, tiles, channel blocks, samples, the first fastest.
__global__ void __launch_bounds__(kTeams * kTeamThreads, 1)
convolve_kernel(float* extreme, uint8_t* index, accumulate_t* partial, const value_t* x,
                const value_t* weight, const accumulate_t* norm_weight, const accumulate_t* scale,
                Geometry geometry) {
#if __CUDA_ARCH__ >= 800
  extern __shared__ __align__(128) unsigned char all_shared[];
  __shared__ SharedStorage storage;
  const int team = __shfl_sync(~0u, threadIdx.x / kTeamThreads, 0), thread = threadIdx.x % kTeamThreads;
  unsigned char* const shared = all_shared + team * kTeamBytes;
  const Job job(geometry, team);
  const int warp = thread / 32, first_own = warp * 16;
  const int64_t first = int64_t(job.n) * CHANNELS_OUT + job.first_channel + first_own;  // the warp's channel
  const Filters filters(storage, weight, norm_weight, scale, job.first_channel, first_own, team == 0);
  Rows rows(x + int64_t(job.n) * CHANNELS_IN * geometry.H * geometry.W, geometry.H, geometry.W, job.column,
            shared, thread);
  rows.clear_behind_tile();
  float* const staging = reinterpret_cast<float*>(shared + kRing * kRowBytes) + first_own * kStagingPitch;
  uint8_t* const origins = shared + kRing * kRowBytes + kStagingBytes + first_own * kStagingPitch;
  WindowsEpilogue epilogue{storage, staging, origins, extreme, index, geometry, job.columns,
                           job.columns / POOL_W, job.first_channel, first_own};

  __syncthreads();  // the filters' exponents are there
  int exponent = kFirstExponent;
  for (bool again = false;; again = true) {
    if (threadIdx.x < kBlockChannels) {
      const PowerOfTwo power(-exponent - storage.filter_exponent[threadIdx.x]);
      storage.unscale[threadIdx.x] =
          make_float2(storage.flipped[threadIdx.x] ? -power.first : power.first, power.second);
    }
    rows.largest = 0;
    if (threadIdx.x == 0) storage.largest = 0;
    __syncthreads();  // unscale and largest are set
    epilogue.start(extreme +
                   (first * geometry.pooled_height() + job.row_begin / POOL_H) * geometry.pooled_width() +
                   job.column / POOL_W);
    convolve_strip(epilogue, rows, filters, job, team, shared, exponent);
    atomicMax(&storage.largest, __float_as_int(rows.largest));
    __syncthreads();  // complete
    const float magnitude = __int_as_float(storage.largest);
    const int fitting = fitting_exponent(magnitude);
    if (again || magnitude == 0.f || magnitude == INFINITY ||
        (fitting >= kFirstExponent && fitting <= kFirstExponent + kSlack))
      break;
    exponent = fitting;
    __syncthreads();  // storage.largest has been read
  }
  const int slots = geometry.tiles() * geometry.strips, slot = job.tile * geometry.strips + job.strip;
  epilogue.write_moments(partial + (first * slots + slot) * 3, slots, job.row_end - job.row_begin,
                         job.strip < geometry.strips);
#endif
}

constexpr int kAhead = 4;  // vectors that a thread of finish_kernel fetches before all else

// Copies of the biases (N, C); group_mean, group_rstd (N, G) from `slots` partial moments per channel; flat (N,
// C), or null; y from extreme.
// `chunks` blocks per group.
__global__ void __launch_bounds__(kThreads, 5)
finish_kernel(output_t* y, accumulate_t* kept_conv_bias, accumulate_t* kept_bias, accumulate_t* group_mean,
              accumulate_t* group_rstd, uint8_t* flat, const accumulate_t* partial, const float* extreme,
              const accumulate_t* conv_bias, const accumulate_t* norm_weight,
              const accumulate_t* norm_bias, const accumulate_t* scale, accumulate_t low,
              accumulate_t high, accumulate_t eps, GroupShape shape, int64_t pooled, int slots,
              int chunks, bool aligned) {
  __shared__ Moments<accumulate_t> of_channel[CHANNELS_OUT];
  __shared__ float4 affine[CHANNELS_OUT];  // offset, slope, bias, scale
  const int64_t group = blockIdx.x / chunks, n = group / shape.G, g = group % shape.G;
  const int channels = int(shape.channels()), chunk = int(blockIdx.x % chunks);
  const int64_t first = n * shape.C + g * channels;  // channel
  const float* in = extreme + first * pooled;
  output_t* out = y + first * pooled;
  const int size = int(channels * pooled), plane = int(pooled), begin = chunk * kThreads + threadIdx.x;
  const int step = chunks * kThreads;
#if __CUDA_ARCH__ >= 900
  await_previous_kernel();
#endif
  Vector<float> ahead[kAhead];  // on their way while the statistics are merged
#pragma unroll
  for (int k = 0; k < kAhead; k++)
    if (aligned && begin + k * step < size / kVector)
      ahead[k] = reinterpret_cast<const Vector<float>*>(in)[begin + k * step];
  // Every block of a group finds the same statistics; the first one writes them.
  for (int c = threadIdx.x; c < channels; c += kThreads) {
    const accumulate_t* from = partial + (first + c) * slots * 3;
    Moments<accumulate_t> moments{from[0], from[1], from[2]};
    for (int slot = 1; slot < slots; slot++)
      moments = moments.merge({from[slot * 3], from[slot * 3 + 1], from[slot * 3 + 2]});
    const accumulate_t own = conv_bias[g * channels + c];
    if (chunk == 0) kept_conv_bias[first + c] = own, kept_bias[first + c] = norm_bias[g * channels + c];
    moments.mean += own;
    of_channel[c] = moments;
  }
  __syncthreads();  // the group's channels are there
  for (int c = threadIdx.x; c < channels; c += kThreads) {
    Moments<accumulate_t> moments = of_channel[0];
    for (int i = 1; i < channels; i++) moments = moments.merge(of_channel[i]);
    const accumulate_t rstd = 1 / sqrt(moments.variance() + eps);
    if (chunk == 0 && c == 0) group_mean[group] = moments.mean, group_rstd[group] = rstd;
    const int64_t channel = g * channels + c;
    affine[c] = make_float4(conv_bias[channel] - moments.mean, rstd * norm_weight[channel],
                            norm_bias[channel], scale[channel]);
    if (chunk == 0 && flat)
      flat[first + c] = is_flat(of_channel[c].mean, of_channel[c].m2, moments.mean, affine[c].y, affine[c].z,
                                affine[c].w);
  }
  __syncthreads();  // affine is complete
  const auto apply = [&](const float4& a, float v) {
    // The formula of conv2d_groupnorm_scale_maxpool_clamp.
    return output_t(clamp(((v + a.x) * a.y + a.z) * a.w, low, high));
  };
  if (aligned) {
    const auto apply_vector = [&](int i, const Vector<float>& four) {
      Vector<output_t> result;
      const int c = i * kVector / plane, next = (c + 1) * plane;
      const float4 mine = affine[c];
#pragma unroll
      for (int j = 0; j < kVector; j++) {
        const int s = i * kVector + j;
        result.at[j] = apply(s < next ? mine : affine[s / plane], four.at[j]);
      }
      reinterpret_cast<Vector<output_t>*>(out)[i] = result;
    };
#pragma unroll
    for (int k = 0; k < kAhead; k++)
      if (begin + k * step < size / kVector) apply_vector(begin + k * step, ahead[k]);
    for (int i = begin + kAhead * step; i < size / kVector; i += step)
      apply_vector(i, reinterpret_cast<const Vector<float>*>(in)[i]);
  } else {
    for (int i = begin; i < size; i += step) out[i] = apply(affine[i / plane], in[i]);
  }
}

}  // namespace

// kept, as Kept: for backward, or without elements where nobody wants it. scratch: what is not kept, but the
// index, then partial (N, C, tiles·strips, 3).
// Columns of v are cut into tiles, and rows into strips of `rows` pooled rows, the last of what is left
// (tiling.py's StripTiling); a plan that does not cover v makes no blocks, and the launch fails.
EXPORT void forward(output_t* y, float* kept, float* scratch, const value_t* x, const value_t* weight,
                    const accumulate_t* conv_bias, const accumulate_t* norm_weight,
                    const accumulate_t* norm_bias, const accumulate_t* scale, double low, double high,
                    int64_t N, int64_t G, int64_t H, int64_t W, double eps, int64_t tiles, int64_t strips,
                    int64_t rows, cudaStream_t stream) {
  const Geometry geometry{int(N), int(H), int(W), int(tiles), int(strips), int(rows)};
  const GroupShape shape{N, CHANNELS_OUT, G, int64_t(geometry.height()) * geometry.width()};
  const int64_t pooled = int64_t(geometry.pooled_height()) * geometry.pooled_width();
  const auto [extreme, statistics, index, flat] =
      Kept(kept ? kept : scratch, N * CHANNELS_OUT * pooled, N, G);
  float* const partial = kept ? scratch : reinterpret_cast<float*>(index);
  allow_shared<convolve_kernel>();
  const int64_t blocks =
      geometry.complete() ? N * kChannelBlocks * geometry.tiles() * geometry.strip_blocks() : 0;
  convolve_kernel<<<unsigned(blocks), kTeams * kTeamThreads, kTeams * kTeamBytes, stream>>>(
      extreme, index, partial, x, weight, norm_weight, scale, geometry);
  const int64_t size = shape.channels() * pooled;
  const int chunks = int(size / (kThreads * kVector * kAhead + 1) + 1);
  const bool aligned = vectors_fit(y, size) && vectors_fit(extreme, size);
  cudaLaunchAttribute early{};
  early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  early.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = unsigned(N * G * chunks), config.blockDim = kThreads, config.stream = stream;
  config.attrs = &early, config.numAttrs = starts_early() ? 1 : 0;
  cudaLaunchKernelEx(&config, finish_kernel, y, statistics.mean, statistics.m2, statistics.group_mean,
                     statistics.group_rstd, kept ? flat : nullptr, partial, extreme, conv_bias, norm_weight, norm_bias, scale,
                     accumulate_t(low), accumulate_t(high), accumulate_t(eps), shape, pooled,
                     int(geometry.tiles() * geometry.strips), chunks, aligned);
}
