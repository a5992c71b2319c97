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
// first among equal ones, as max_pool2d has it. (Where the slope is zero all are equal; that is left to
// backward.)
// Where the squares of a group's values add up to more than float32 holds (from 1e17 or so on), the variance
// is infinite, its inverse root 0, and norm_bias is left, as in eager on a GPU.
//
// A block computes 64 channels × 128 columns of v, row by row, as an implicit GEMM: M = channels, N =
// columns, K = taps × channels in.
// - Operands: each is a sum of two float16 (operands.cuh; one, if it has 16 bits), scaled by powers of two:
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
#include "conv2d_groupnorm_scale_maxpool_clamp.cuh"
#include "normalisation.h"
#include "operands.cuh"
#include "reduce.cuh"
#include "tensor_core.cuh"
#include "vector.cuh"

#ifndef TILE_STRIDE  // the plan, as tiling.py makes it; else one for which a source compiles alone
#define TILE_COLUMNS 128
#define TILE_STRIDE 0
#define BLOCK_CHANNELS 64
#define TEAMS 2
#define STATIC_SHARED (1 << 10)
#define DYNAMIC_SHARED (kTeams * kTeamBytes)
#endif
#ifndef SAVING
#define SAVING 0
#endif

namespace {

using namespace tensor_core;

constexpr int kTile = TILE_COLUMNS;   // columns of a team
constexpr int kStride = TILE_STRIDE;  // from one tile to the next; 0 where a row has only one
constexpr int kTiles = kTile / 8;
constexpr int kBlockChannels = BLOCK_CHANNELS;
constexpr int kChannelBlocks = (CHANNELS_OUT + kBlockChannels - 1) / kBlockChannels;
constexpr int kTeamThreads = 128;  // a thread stages a column; a warp owns 16 channels
constexpr int kTeams = TEAMS;      // three would leave 168 registers to a thread, which is too few
constexpr int kPlanes = (CHANNELS_IN + 7) / 8;  // of 8 input channels each, zeros behind the last
constexpr int kPixels = kTile + 8;              // in shared memory; those behind the tile stay zero
constexpr int kRing = KERNEL_H + 1;             // rows in shared memory
static_assert(kTile == kTeamThreads && kBlockChannels == kTeamThreads / 32 * 16, "what was planned with");
static_assert(kStride <= kTile && KERNEL_W <= 9, "a tile's last column reads up to 8 pixels further");
// Does a tile's filter see columns behind those of its threads?
constexpr bool kReadsOn = kStride + KERNEL_W - 1 > kTile;

// Units of K, 8 channels of a tap, in the order of their addresses; a product takes two. With an odd number,
// the last is paired with itself: (high, low) of the filter meet the same pixels.
constexpr int kUnits = kPlanes * KERNEL_W;  // of a kernel row
constexpr int kPairs = kUnits / 2;
constexpr bool kOdd = kUnits % 2;
constexpr int kFragments = 2 * kPairs + kOdd;
constexpr int kPartBytes = kPlanes * kPixels * 16;
constexpr int kRowBytes = 2 * kPartBytes;  // high, low
HOST_DEVICE constexpr int unit_offset(int unit) { return (unit / KERNEL_W * kPixels + unit % KERNEL_W) * 16; }

// float16 holds a value of 16 bits, scaled: there is no low part, but of what is so small beside the largest
// that its last bits don't count.
constexpr bool kOnePart = sizeof(value_t) == 2;

constexpr int kBatch = 8;  // channels whose windows are read together

// Until a window's rows are complete, a thread keeps of two neighbouring columns the larger value, or both
// where windows of an odd width may part them.
constexpr int kKept = POOL_W % 2 == 0 ? 1 : 2;                 // values
constexpr int kWidth = POOL_W % 2 == 0 ? POOL_W / 2 : POOL_W;  // kept values that a window has in a row
constexpr int kStagingPitch = kTile / 2 * kKept + 4 * kKept;   // kept values of a channel; no bank conflicts

// x is first scaled by 2^kFirstExponent, which fits magnitudes below 128. That is good enough where the
// largest one is 2^-6 at least, for which kSlack more would fit.
constexpr int kFirstExponent = 8;
constexpr int kSlack = 12;

constexpr bool kSaving = SAVING;
constexpr int kPacked = kKept == 1 ? 1 : 8;  // origins of kept values in a register
constexpr int kStagingBytes = kBlockChannels * kStagingPitch * 4;
// Behind the kept values, where each of them comes from.
constexpr int kOriginsBytes = kSaving ? kBlockChannels * kStagingPitch : 0;
constexpr int kTeamBytes = kRing * kRowBytes + kStagingBytes + kOriginsBytes;
static_assert(kTeams * kTeamBytes == DYNAMIC_SHARED, "what was planned with");

struct Geometry {
  int N, H, W, row_tiles, strips, rows;  // a strip has `rows` pooled rows, the last one what is left
  HOST_DEVICE int tiles() const { return kStride ? row_tiles : 1; }
  HOST_DEVICE int strip_blocks() const { return (strips + kTeams - 1) / kTeams; }
  HOST_DEVICE int height() const { return H - KERNEL_H + 1; }
  HOST_DEVICE int width() const { return W - KERNEL_W + 1; }
  HOST_DEVICE int pooled_height() const { return height() / POOL_H; }
  HOST_DEVICE int pooled_width() const { return width() / POOL_W; }
  // Do the strips and tiles cover v, and none of them nothing?
  bool complete() const {
    const bool in_rows = (strips - 1) * rows < pooled_height() && pooled_height() <= strips * rows;
    return in_rows &&
           (kStride ? (row_tiles - 1) * kStride < width() && width() <= row_tiles * kStride : W <= kTile);
  }
};

// The products of one row of v, in order: small ones first, since a tensor core cuts off what a sum's last
// bit can't hold. `act` gets the kernel row, the pixels' part (0 high, 1 low), the fragment, the first unit
// and the second.
template <class Act> __device__ __forceinline__ void for_products(Act act) {
#pragma unroll
  for (int small = kOnePart ? 0 : 1; small >= 0; small--)
#pragma unroll
    for (int kh = 0; kh < KERNEL_H; kh++) {
#pragma unroll
      for (int i = 0; i < kPairs; i++) {
        if (small) act(kh, 0, kPairs + i, 2 * i, 2 * i + 1);
        act(kh, small, i, 2 * i, 2 * i + 1);
      }
      if (kOdd) act(kh, small, kFragments - 1, kUnits - 1, kUnits - 1);
    }
}

// D = a row of v, in the background on sm_90a. `rows` holds the shared address of each kernel row's first
// pixel.
__device__ __forceinline__ void multiply_row(float (&d)[kTiles][4],
                                             const uint32_t (&fragments)[KERNEL_H][kFragments][4],
                                             const uint32_t (&rows)[KERNEL_H]) {
#if TENSOR_CORE_WGMMA
  bool accumulate = false;
  hold(d);
  begin_products();
  for_products([&](int kh, int part, int fragment, int unit, int second) {
    const uint32_t first = rows[kh] + part * kPartBytes + unit_offset(unit);
    const uint64_t pixels = describe(first, unit_offset(second) - unit_offset(unit));
    multiply_add(d, fragments[kh][fragment], pixels, accumulate);
    accumulate = true;
  });
  commit_products();
#elif __CUDA_ARCH__ >= 800
#pragma unroll
  for (int j = 0; j < kTiles; j++)
#pragma unroll
    for (int i = 0; i < 4; i++) d[j][i] = 0;
  const int lane = threadIdx.x % 32;
  for_products([&](int kh, int part, int fragment, int unit, int second) {
    const uint32_t row = rows[kh] + part * kPartBytes + lane % 8 * 16;
    if (unit != second) {
#pragma unroll
      for (int j = 0; j < kTiles; j += 2) {
        uint32_t b[4];
        const int own = lane / 8 % 2 ? unit_offset(second) : unit_offset(unit);
        load_matrices(b, row + own + (j + lane / 16) * 128);
        multiply_add(d[j], fragments[kh][fragment], b[0], b[1]);
        multiply_add(d[j + 1], fragments[kh][fragment], b[2], b[3]);
      }
    } else {
#pragma unroll
      for (int j = 0; j < kTiles; j += 4) {
        uint32_t b[4];
        load_matrices(b, row + unit_offset(unit) + (j + lane / 8) * 128);
#pragma unroll
        for (int k = 0; k < 4; k++) multiply_add(d[j + k], fragments[kh][fragment], b[k], b[k]);
      }
    }
  });
#endif
}

// On sm_90a: shared memory that this thread wrote may be read by products; all products are complete.
__device__ __forceinline__ void publish() {
#if TENSOR_CORE_WGMMA
  publish_shared();
#endif
}
__device__ __forceinline__ void await(float (&d)[kTiles][4]) {
#if TENSOR_CORE_WGMMA
  await_products<0>();
  hold(d);
#endif
}

// Waits for all threads of the team and, on sm_90a, until the tensor cores are its own; then hands them on to
// the next team.
__device__ __forceinline__ void take_turn(int team) {
  if (TENSOR_CORE_WGMMA && kTeams > 1) sync_threads<2 * kTeamThreads>(1 + team);
  else sync_threads<kTeamThreads>(1 + team);
}
__device__ __forceinline__ void hand_on(int team) {
  if (TENSOR_CORE_WGMMA && kTeams > 1)
    signal_threads<2 * kTeamThreads>(1 + (team == kTeams - 1 ? 0 : team + 1));
}

struct SharedStorage {
  // Of a channel: two factors of a power of two, the first with the filter's sign.
  float2 unscale[kBlockChannels];
  int filter_exponent[kBlockChannels];
  bool flipped[kBlockChannels];
  int largest;  // magnitude of x, as bits
};
static_assert(sizeof(SharedStorage) <= STATIC_SHARED, "what was planned with");

// extreme, index (N, CHANNELS_OUT, PH, PW); partial (N, CHANNELS_OUT, tiles·strips, 3): count, mean, m2 of v.
// Grid: strips by kTeams, tiles, channel blocks, samples, the first fastest.
__global__ void __launch_bounds__(kTeams * kTeamThreads, 1)
convolve_kernel(float* extreme, uint8_t* index, accumulate_t* partial, const value_t* x,
                const value_t* weight, const accumulate_t* norm_weight, const accumulate_t* scale,
                Geometry geometry) {
#if __CUDA_ARCH__ >= 800
  extern __shared__ __align__(128) unsigned char all_shared[];
  const int team = __shfl_sync(~0u, threadIdx.x / kTeamThreads, 0), thread = threadIdx.x % kTeamThreads;
  unsigned char* const shared = all_shared + team * kTeamBytes;
  __shared__ SharedStorage storage;
  const int H = geometry.H, W = geometry.W, strips = geometry.strips, tiles = geometry.tiles();
  const int strip_blocks = geometry.strip_blocks();
  const unsigned job = blockIdx.x / strip_blocks;
  const int strip = blockIdx.x % strip_blocks * kTeams + team, tile = job % tiles;
  const int first_channel = job / tiles % kChannelBlocks * kBlockChannels, n = job / tiles / kChannelBlocks;
  const int lane = thread % 32, warp = thread / 32, g = lane / 4, t = lane % 4;
  const int row_begin = strip * geometry.rows * POOL_H;
  const int past_last = strip >= strips ? row_begin : row_begin + geometry.rows * POOL_H;
  const int row_end = strip == strips - 1 ? geometry.height() : past_last;
  const bool last_strips = blockIdx.x % strip_blocks == strip_blocks - 1;
  // Of the longest strip.
  const int turns = geometry.rows * POOL_H + (last_strips ? geometry.height() % POOL_H : 0);
  const int column = tile * kStride;
  const int columns = tile == tiles - 1 ? geometry.width() - column : kStride;  // that are this tile's
  const int pooled_columns = columns / POOL_W;

  // The filters of channels g and g + 8 of the warp's 16, scaled, as fragments of A.
  uint32_t fragments[KERNEL_H][kFragments][4];
#pragma unroll
  for (int half = 0; half < 2; half++) {
    const int channel = first_channel + warp * 16 + half * 8 + g;
    const bool real = channel < CHANNELS_OUT;
    const value_t* filter = weight + int64_t(real ? channel : 0) * (CHANNELS_IN * KERNEL_H * KERNEL_W);
    const auto load = [&](int kh, int unit, int i) {
      const int c = unit / KERNEL_W * 8 + 2 * t + i;
      return real && c < CHANNELS_IN ? float(filter[(c * KERNEL_H + kh) * KERNEL_W + unit % KERNEL_W]) : 0.f;
    };
    float largest = 0;
#pragma unroll
    for (int kh = 0; kh < KERNEL_H; kh++)
#pragma unroll
      for (int unit = 0; unit < kUnits; unit++)
        largest = fmaxf(largest, fmaxf(fabsf(load(kh, unit, 0)), fabsf(load(kh, unit, 1))));
    for (int offset = 1; offset < 4; offset *= 2)
      largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, offset));
    const int exponent = fitting_exponent(largest);
    const bool flip = real && norm_weight[channel] * scale[channel] < 0;
    if (team == 0 && t == 0) {
      storage.filter_exponent[warp * 16 + half * 8 + g] = exponent;
      storage.flipped[warp * 16 + half * 8 + g] = flip;
    }
    const float factor = flip ? -power_of_two(exponent) : power_of_two(exponent);
#pragma unroll
    for (int kh = 0; kh < KERNEL_H; kh++)
#pragma unroll
      for (int unit = 0; unit < kUnits; unit++) {
        const Halves halves = split(load(kh, unit, 0) * factor, load(kh, unit, 1) * factor);
        if (kOdd && unit == kUnits - 1) {
          fragments[kh][kFragments - 1][half] = halves.high,
                                     fragments[kh][kFragments - 1][half + 2] = halves.low;
        } else {
          fragments[kh][unit / 2][half + unit % 2 * 2] = halves.high;
          fragments[kh][kPairs + unit / 2][half + unit % 2 * 2] = halves.low;
        }
      }
  }

  // This thread's pixel of each row of x; where there are several tiles, the first threads have another one
  // behind the tile.
  const int64_t plane_size = int64_t(H) * W;
  const bool inside = column + thread < W, two = kReadsOn && thread < KERNEL_W - 1;
  const bool second_inside = two && column + kTile + thread < W;
  const value_t* const source = x + int64_t(n) * CHANNELS_IN * plane_size + column + thread;
  value_t pixel[kPlanes * 8], second[kPlanes * 8];
  const auto fetch = [&](int row) {
    const value_t* from = source + int64_t(row) * W;
#pragma unroll
    for (int c = 0; c < kPlanes * 8; c++, from += plane_size) {
      pixel[c] = c < CHANNELS_IN && inside ? *from : value_t(0.f);
      if (kReadsOn) second[c] = c < CHANNELS_IN && second_inside ? from[kTile] : value_t(0.f);
    }
  };
  float largest;
  const auto convert_pixel = [&](const value_t(&values)[kPlanes * 8], int slot, int at, float factor) {
#pragma unroll
    for (int plane = 0; plane < kPlanes; plane++) {
      Halves halves[4];
#pragma unroll
      for (int i = 0; i < 4; i++) {
        const float a = float(values[plane * 8 + 2 * i]), b = float(values[plane * 8 + 2 * i + 1]);
        largest = fmaxf(largest, fmaxf(fabsf(a), fabsf(b)));
        halves[i] = split(a * factor, b * factor);
      }
      uint4* to = reinterpret_cast<uint4*>(shared + slot * kRowBytes) + plane * kPixels + at;
      to[0] = make_uint4(halves[0].high, halves[1].high, halves[2].high, halves[3].high);
      if (!kOnePart)
        to[kPlanes * kPixels] = make_uint4(halves[0].low, halves[1].low, halves[2].low, halves[3].low);
    }
  };
  const auto convert = [&](int slot, float factor) {
    convert_pixel(pixel, slot, thread, factor);
    if (two) convert_pixel(second, slot, kTile + thread, factor);
  };
  for (int i = thread; i < kRing * 2 * kPlanes * (kPixels - kTile); i += kTeamThreads)
    reinterpret_cast<uint4*>(shared)[i / (kPixels - kTile) * kPixels + kTile + i % (kPixels - kTile)] =
        make_uint4(0, 0, 0, 0);
  float* const staging = reinterpret_cast<float*>(shared + kRing * kRowBytes) + warp * 16 * kStagingPitch;
  uint8_t* const staged_origins = shared + kRing * kRowBytes + kStagingBytes + warp * 16 * kStagingPitch;

  __syncthreads();  // the filters' exponents are there
  int exponent = kFirstExponent;
  float shift[2], sum[2], square[2];
  for (bool again = false;; again = true) {
    const float factor = power_of_two(exponent);
    if (threadIdx.x < kBlockChannels) {
      const PowerOfTwo power(-exponent - storage.filter_exponent[threadIdx.x]);
      storage.unscale[threadIdx.x] =
          make_float2(storage.flipped[threadIdx.x] ? -power.first : power.first, power.second);
    }
    largest = 0;
    if (threadIdx.x == 0) storage.largest = 0;
    __syncthreads();  // unscale and largest are set
#pragma unroll
    for (int half = 0; half < 2; half++) shift[half] = sum[half] = square[half] = 0;
    float best[2][kTiles][kKept];
#pragma unroll
    for (int i = 0; i < 2 * kTiles * kKept; i++) (&best[0][0][0])[i] = -INFINITY;
    // Where they come from: the row of the window, doubled, and the column of the pair; or where both columns
    // are kept, the row alone, in four bits.
    uint32_t origins[kSaving ? 2 * kTiles * kKept / kPacked : 1] = {};
#pragma unroll 1
    for (int kh = 0; kh < KERNEL_H && row_begin < row_end; kh++) fetch(row_begin + kh), convert(kh, factor);
    if (row_begin + 1 < row_end) fetch(row_begin + KERNEL_H);
    int slot = 0, window_row = 0;
    float* out = extreme +
                 ((int64_t(n) * CHANNELS_OUT + first_channel + warp * 16) * geometry.pooled_height() +
                  row_begin / POOL_H) *
                     geometry.pooled_width() +
                 column / POOL_W;
    // Takes a row's sums into the statistics and the windows.
    const auto take = [&](float(&d)[kTiles][4]) {
#pragma unroll
      for (int j = 0; j < kTiles; j++)
#pragma unroll
        for (int i = 0; i < 4; i++) d[j][i] -= shift[i / 2];
      // Columns that are not this tile's count as their shift.
      if (columns <= kTile - 8) {
#pragma unroll
        for (int j = 0; j < kTiles; j++)
#pragma unroll
          for (int i = 0; i < 4; i++)
            if (j * 8 + t * 2 + i % 2 >= columns) d[j][i] = 0;
      } else {
#pragma unroll
        for (int i = 0; i < 4; i++)
          if (kTile - 8 + t * 2 + i % 2 >= columns) d[kTiles - 1][i] = 0;
      }
#pragma unroll
      for (int j = 0; j < kTiles; j++)
#pragma unroll
        for (int i = 0; i < 4; i++) sum[i / 2] += d[j][i], square[i / 2] += d[j][i] * d[j][i];
#pragma unroll
      for (int half = 0; half < 2; half++)
#pragma unroll
        for (int j = 0; j < kTiles; j++)
#pragma unroll
          for (int k = 0; k < kKept; k++) {
            const float value = kKept == 1 ? fmaxf(d[j][half * 2], d[j][half * 2 + 1]) : d[j][half * 2 + k];
            if (kSaving) {
              uint32_t& origin = origins[((half * kTiles + j) * kKept + k) / kPacked];
              const uint32_t own = 15u << (k + j * kKept) % kPacked * 4;
              const uint32_t changed = kKept == 1 ? 2 * window_row + (d[j][half * 2 + 1] > d[j][half * 2])
                                                  : (origin & ~own) | (window_row * 0x11111111u & own);
              origin = value > best[half][j][k] ? changed : origin;
            }
            best[half][j][k] = fmaxf(best[half][j][k], value);
          }
      if (window_row == POOL_H - 1) {
        __syncwarp();  // the last windows have been read
#pragma unroll
        for (int half = 0; half < 2; half++)
#pragma unroll
          for (int j = 0; j < kTiles; j++) {
            float* to = staging + (half * 8 + g) * kStagingPitch + (j * 4 + t) * kKept;
            if (kKept == 1) to[0] = best[half][j][0] + shift[half];
            else
              *reinterpret_cast<float2*>(to) =
                  make_float2(best[half][j][0] + shift[half], best[half][j][kKept - 1] + shift[half]);
#pragma unroll
            for (int k = 0; k < kKept; k++) {
              if (kSaving) {
                const uint32_t origin = origins[((half * kTiles + j) * kKept + k) / kPacked];
                staged_origins[to - staging + k] =
                    uint8_t(kKept == 1 ? origin : origin >> (k + j * kKept) % kPacked * 4 & 15);
              }
              best[half][j][k] = -INFINITY;
            }
          }
      }
    };

    // Writes the row of windows that is complete.
    const auto flush = [&] {
      window_row = 0;
      __syncwarp();  // these windows have been written
      const int64_t stride = int64_t(geometry.pooled_height()) * geometry.pooled_width();
#pragma unroll
      for (int p = 0; p < kTile / POOL_W; p += 32) {
        const bool wanted = p + lane < pooled_columns;
        float* to = out + p + lane;
#pragma unroll
        for (int first = 0; first < 16; first += kBatch) {
          float maximum[kBatch];
          int place[kBatch];
#pragma unroll
          for (int r = 0; r < kBatch; r++) {
            const float* from =
                staging + (first + r) * kStagingPitch + (p + lane < kTile / POOL_W ? p + lane : 0) * kWidth;
            if (kWidth == 2) {
              const float2 two = *reinterpret_cast<const float2*>(from);
              maximum[r] = fmaxf(two.x, two.y);
            } else {
              maximum[r] = from[0];
#pragma unroll
              for (int i = 1; i < kWidth; i++) maximum[r] = fmaxf(maximum[r], from[i]);
            }
            if (kSaving) {
              place[r] = POOL_H * POOL_W - 1;
#pragma unroll
              for (int i = kWidth - 1; i >= 0; i--) {
                const int origin = staged_origins[from - staging + i];
                const int own = kKept == 1 ? origin / 2 * POOL_W + 2 * i + origin % 2 : origin * POOL_W + i;
                if (from[i] == maximum[r]) place[r] = min(place[r], own);
              }
            }
          }
#pragma unroll
          for (int r = 0; r < kBatch; r++, to += stride) {
            const float2 power = storage.unscale[warp * 16 + first + r];
            if (wanted &&
                (CHANNELS_OUT % 64 == 0 || first_channel + warp * 16 + first + r < CHANNELS_OUT)) {
              *to = maximum[r] * power.x * power.y;
              if (kSaving) index[to - extreme] = uint8_t(place[r]);
            }
          }
        }
      }
      out += geometry.pooled_width();
    };

    float d[kTiles][4];  // v, scaled; then less the shift
    if (team == kTeams - 1) hand_on(team);
    publish();
#pragma unroll 1
    for (int turn = 0; turn < turns; turn++) {
      const int row = row_begin + turn;
      take_turn(team);  // the row's pixels are there, and the products of the row before it have been formed
      uint32_t rows[KERNEL_H];
#pragma unroll
      for (int kh = 0; kh < KERNEL_H; kh++)
        rows[kh] = shared_address(shared) + (slot + kh - (slot + kh >= kRing ? kRing : 0)) * kRowBytes;
      multiply_row(d, fragments, rows);  // after the last row, of stale pixels, for nobody
      if (team < kTeams - 1 || turn < turns - 1) hand_on(team);
      if (window_row == POOL_H) flush();
      if (row + 1 < row_end) {
        // Nobody reads the slot of the row before this one.
        convert(slot == 0 ? kRing - 1 : slot - 1, factor);
        if (row + 2 < row_end) fetch(row + 1 + KERNEL_H);
      }
      slot = slot == kRing - 1 ? 0 : slot + 1;
      publish();
      await(d);
      if (turn == 0) {
#pragma unroll
        for (int half = 0; half < 2; half++) shift[half] = __shfl_sync(~0u, d[0][half * 2], lane & ~3);
      }
      if (row < row_end) take(d), window_row++;
    }
    if (window_row == POOL_H) flush();

    atomicMax(&storage.largest, __float_as_int(largest));
    __syncthreads();  // complete
    const float magnitude = __int_as_float(storage.largest);
    const int fitting = fitting_exponent(magnitude);
    if (again || magnitude == 0.f || magnitude == INFINITY ||
        (fitting >= kFirstExponent && fitting <= kFirstExponent + kSlack))
      break;
    exponent = fitting;
    __syncthreads();  // storage.largest has been read
  }

#pragma unroll
  for (int half = 0; half < 2; half++) {
    int mine = 0;
    for (int j = 0; j < 16; j++) mine += (j * 8 + t * 2 < columns) + (j * 8 + t * 2 + 1 < columns);
    auto moments = Moments<float>::from_shifted(float(mine) * float(row_end - row_begin), shift[half],
                                                sum[half], square[half]);
    for (int offset = 1; offset < 4; offset *= 2)
      moments = moments.merge({__shfl_xor_sync(~0u, moments.count, offset),
                               __shfl_xor_sync(~0u, moments.mean, offset),
                               __shfl_xor_sync(~0u, moments.m2, offset)});
    const int channel = first_channel + warp * 16 + half * 8 + g;
    if (t == 0 && channel < CHANNELS_OUT && strip < strips) {
      const float2 power = storage.unscale[warp * 16 + half * 8 + g];
      accumulate_t* to =
          partial + (((int64_t(n) * CHANNELS_OUT + channel) * tiles + tile) * strips + strip) * 3;
      to[0] = moments.count, to[1] = moments.mean * power.x * power.y,
      to[2] = moments.m2 * power.x * power.y * power.x * power.y;
    }
  }
#endif
}

constexpr int kAhead = 4;  // vectors that a thread of finish_kernel fetches before all else

// mean, m2 (N, C), group_mean, group_rstd (N, G) from `slots` partial moments per channel; y from extreme.
// `chunks` blocks per group.
__global__ void __launch_bounds__(kThreads, 5)
finish_kernel(output_t* y, accumulate_t* mean, accumulate_t* m2, accumulate_t* group_mean,
              accumulate_t* group_rstd, const accumulate_t* partial, const float* extreme,
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
    if (chunk == 0) mean[first + c] = moments.mean, m2[first + c] = moments.m2;
    moments.mean += conv_bias[g * channels + c];
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

// kept, one after the other: extreme like y, then as GroupStatistics. index, like y, is written where SAVING.
// partial is scratch: (N, C, tiles·strips, 3).
// Columns of v are cut into tiles, and rows into strips of `rows` pooled rows, the last of what is left
// (tiling.py's StripTiling); a plan that does not cover v makes no blocks, and the launch fails.
EXPORT void forward(output_t* y, float* kept, uint8_t* index, float* partial, const value_t* x,
                    const value_t* weight, const accumulate_t* conv_bias, const accumulate_t* norm_weight,
                    const accumulate_t* norm_bias, const accumulate_t* scale, double low, double high,
                    double eps, int64_t N, int64_t G, int64_t H, int64_t W, int64_t tiles, int64_t strips,
                    int64_t rows, cudaStream_t stream) {
  const Geometry geometry{int(N), int(H), int(W), int(tiles), int(strips), int(rows)};
  const GroupShape shape{N, CHANNELS_OUT, G, int64_t(geometry.height()) * geometry.width()};
  const int64_t pooled = int64_t(geometry.pooled_height()) * geometry.pooled_width();
  float* const extreme = kept;
  const auto [mean, m2, group_mean, group_rstd] =
      GroupStatistics(extreme + N * CHANNELS_OUT * pooled, N, CHANNELS_OUT, G);
  cudaFuncSetAttribute(convolve_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kTeams * kTeamBytes);
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
  cudaLaunchKernelEx(&config, finish_kernel, y, mean, m2, group_mean, group_rstd, partial, extreme, conv_bias,
                     norm_weight, norm_bias, scale, accumulate_t(low), accumulate_t(high), accumulate_t(eps),
                     shape, pooled, int(geometry.tiles() * geometry.strips), chunks, aligned);
}
