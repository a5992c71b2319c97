// The operands of the weights' gradient of min-add (…_weight_gradient_fused.cu) in shared memory: which part
// of it a block has, the scales of a sample's g and x, the walk down strips, and a step of it on its way to
// shared memory.
#pragma once
#include "conv2d_min_add_multiply_gradient.cuh"
#include "reduce.cuh"

namespace {

constexpr int kBlock = kWarps * 8;  // channels of either kind in a block
constexpr int kBlocksOut = ceil_div(CHANNELS_OUT, kBlock), kBlocksIn = ceil_div(CHANNELS_IN, kBlock);

// A block's taps: kTapRows rows of the filter, kTapColumns pixels of each.
constexpr int kMostTaps = SPLIT ? 3 : 9;  // for so many sums there are registers
constexpr int kColumnGroups = ceil_div(KERNEL_W, kMostTaps);
constexpr int kTapColumns = ceil_div(KERNEL_W, kColumnGroups);
constexpr int kMostRows = kMostTaps / kTapColumns < 3 ? kMostTaps / kTapColumns : 3;
constexpr int kRowGroups = ceil_div(KERNEL_H, kMostRows);
constexpr int kTapRows = ceil_div(KERNEL_H, kRowGroups);
constexpr int kBlockTaps = kTapRows * kTapColumns;
constexpr int kOutTiles = CHANNELS_OUT < kBlock ? ceil_div(CHANNELS_OUT, 16) : kBlock / 16;  // of 16 channels
constexpr int kThreadSums = kBlockTaps * kOutTiles * 4;
constexpr int kBlocks = kBlocksOut * kBlocksIn * kRowGroups * kColumnGroups;

// Shared memory, in units of 16 bytes, 8 channels of a pixel: rows of x [slot][part][plane][pixel], and g
// [stage][part][plane][pixel].
constexpr int kInputPitch = kStrip + kTapColumns - 1;
constexpr int kSlots = kTapRows + 1, kStages = 2;  // the rows in use and the next; likewise g
constexpr int kSlot = kParts * kWarps * kInputPitch, kStage = kParts * kWarps * kStrip;
constexpr int kSharedBytes = (kSlots * kSlot + kStages * kStage) * 16;
static_assert(kSharedBytes <= 99 << 10, "any device from compute capability 8.0 on has so much");

// What is one of kBlocks.
struct BlockPlace {
  int channel_out, channel_in, kernel_row, kernel_column;
  __device__ __forceinline__ explicit BlockPlace(int block)
      : channel_out(block % kBlocksOut * kBlock),
        channel_in(block / kBlocksOut % kBlocksIn * kBlock),
        kernel_row(block / kBlocksOut / kBlocksIn % kRowGroups * kTapRows),
        kernel_column(block / kBlocksOut / kBlocksIn / kRowGroups * kTapColumns) {}
};

// The least exponent of a sample's products, where g and x are each scaled as far up as operands go; to all
// threads of the block. Samples of zeros don't count.
__device__ __forceinline__ int common_exponent(
    const uint32_t* largest_x, const uint32_t* largest_g, int64_t N) {
  __shared__ int negative;
  if (!kScaled) return 0;
  if (threadIdx.x == 0) negative = -254;
  __syncthreads();  // set before anyone raises it
  for (int64_t n = threadIdx.x; n < N; n += blockDim.x)
    if (largest_x[n] && largest_g[n])
      atomicMax(&negative, -(top_exponent(largest_x[n]) + top_exponent(largest_g[n])));
  __syncthreads();  // complete before anyone reads it
  return -negative;
}

// The scales of a sample, 2^common in all. The smaller its products, the further down go both: it is lost
// where it is nothing beside others.
struct SampleScales {
  float input = 1.f, gradient = 1.f;
  __device__ __forceinline__ void set(uint32_t largest_x, uint32_t largest_g, int common) {
    const int x = top_exponent(largest_x), g = top_exponent(largest_g), slack = max(x + g - common, 0);
    gradient = power_of_two(max(g - slack / 2, -126));
    input = power_of_two(max(x - (slack - slack / 2), -126));
  }
};

#if __CUDA_ARCH__ >= 800

// A walk down strips, rows begin … end - 1 of all, counted along columns of strips. A step brings a row of x,
// and g unless it is `ahead`: the first rows of a column of strips are other taps'.
struct Walk {
  const output_t* const all_dy;
  const uint32_t* const all_gates;
  const value_t* const all_x;
  const Strips& strips;
  const BlockPlace& place;
  const uint32_t *const largest_x, *const largest_g;
  const int common;
  const int64_t H, W, end;
  int64_t tile;
  SampleScales scales;
  int pixels, row, first, stop;  // of this column of strips: across, and the rows first … stop - 1
  // Of the warp's plane, where the step's rows begin.
  const output_t* dy;
  const uint32_t* gates;
  const value_t* x;

  __device__ __forceinline__ bool goes_on() const { return tile < end; }
  __device__ __forceinline__ bool ahead() const { return row < first; }
  __device__ __forceinline__ void start() {
    const int64_t column_of_strips = tile / strips.height, n = column_of_strips / strips.of_row;
    const int column = int(column_of_strips % strips.of_row) * kStrip, warp = threadIdx.x / 32;
    first = int(tile - column_of_strips * strips.height);
    stop = int(min(int64_t(strips.height), first + end - tile));
    row = first - (kTapRows - 1), pixels = strips.width - column;
    if constexpr (kScaled) { scales.set(largest_x[n], largest_g[n], common); }
    const int plane = place.channel_out / 8 + warp;
    dy = all_dy + GradientStrip<CHANNELS_OUT>::index({n, row, column}, strips, plane);
    gates = all_gates +
            gate_index(n, plane * 8, row, column, strips.height, strips.width, CHANNELS_OUT);
    x = all_x + ((n * CHANNELS_IN + place.channel_in + warp * 8) * H + first + place.kernel_row) * W;
    x += column + place.kernel_column;
  }
  __device__ __forceinline__ void advance() {
    if (++row == stop) {
      tile += stop - first;
      if (goes_on()) start();
      return;
    }
    dy += strips.width, gates += gate_row(strips.width, CHANNELS_OUT);
    // Past the last row of x there are only rows of the filter that don't exist.
    if (KERNEL_H == kRowGroups * kTapRows || row + kTapRows - 1 + place.kernel_row < H) x += W;
  }
};

// A step's values in registers, a plane of 8 channels of either kind in a warp: what they are, and where they
// go. Past the end of a row of x they may be anything: such pixels are masked (mask_taps).
struct Staged {
  GradientStrip<CHANNELS_OUT> gradient;
  value_t input[kLanePixels][8] = {};
  // Right of the strip: lane + 32 k is pixel·8 + channel.
  value_t edge[ceil_div((kTapColumns - 1) * 8, 32)] = {};
  int pixels = -1;                                         // of g; -1 where there is no such step
  SampleScales scales;

  // The walk's step, and moves on.
  __device__ __forceinline__ void load(Walk& walk) {
    pixels = -1;
    if (!walk.goes_on()) return;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    pixels = 0, scales = walk.scales;
    if (!walk.ahead()) {
      const int64_t plane_size = int64_t(walk.strips.height) * walk.strips.width;
      gradient.load(walk.dy, walk.gates, walk.place.channel_out / 8 + warp, plane_size, walk.pixels);
      pixels = min(walk.pixels, kStrip);
    }
    const int plane = walk.place.channel_in / 8 + warp;
    const int real = walk.pixels + KERNEL_W - 1 - walk.place.kernel_column;  // pixels of x
    load_strip<CHANNELS_IN>(input, walk.x, plane, walk.H * walk.W, real);
#pragma unroll
    for (int i = lane, k = 0; k < int(sizeof(edge) / sizeof(value_t)); i += 32, k++) {
      const bool exists =
          i < (kTapColumns - 1) * 8 && plane * 8 + i % 8 < CHANNELS_IN && kStrip + i / 8 < real;
      if (exists) edge[k] = walk.x[i % 8 * walk.H * walk.W + kStrip + i / 8];
    }
    walk.advance();
  }

  // To shared memory, as operands.
  __device__ __forceinline__ void store(uint4* input_slot, uint4* gradient_stage, float scale) const {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    float values[kLanePixels][8];
    if (pixels > 0) {
      gradient.for_each(scale, [&](int i, int c, float, float inner) {
        values[i][c] = kScaled ? scaled(inner, scales.gradient) : inner;
      });
#pragma unroll
      for (int i = 0; i < kLanePixels; i++)
        pack_pixel(gradient_stage + warp * kStrip + lane + i * 32, kWarps * kStrip, values[i]);
    }
    uint4* const to = input_slot + warp * kInputPitch;
#pragma unroll
    for (int i = 0; i < kLanePixels; i++) {
#pragma unroll
      for (int c = 0; c < 8; c++) {
        const float value = float(input[i][c]);
        values[i][c] = kScaled ? scaled(value, scales.input) : value;
      }
      pack_pixel(to + lane + i * 32, kWarps * kInputPitch, values[i]);
    }
#pragma unroll
    for (int i = lane, k = 0; k < int(sizeof(edge) / sizeof(value_t)); i += 32, k++) {
      if (i >= (kTapColumns - 1) * 8) continue;
      const float value = float(edge[k]);
      const Parts parts = split(kScaled ? scaled(value, scales.input) : value);
#pragma unroll
      for (int part = 0; part < kParts; part++)
        reinterpret_cast<operand_t*>(to + part * kWarps * kInputPitch + kStrip + i / 8)[i % 8] =
            parts.part[part];
    }
  }
};

#endif

}  // namespace
