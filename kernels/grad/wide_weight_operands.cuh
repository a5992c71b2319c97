// The operands of a wide convolution's weights' gradient in shared memory: which part of it a block has, the
// scales of a sample's g and x, the walk down strips, and a step of it on its way to shared memory.
#pragma once
#include "grad/wide.cuh"
#include "core/reduce.cuh"

// Pixels of a row of x and of dy that are copied at a time, by wgmma.
#ifndef COPIED_X  // as the plan says; else what a source needs that compiles alone
#define COPIED_X 1
#define COPIED_DY 1
#endif

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
constexpr int kBlocks = kBlocksOut * kBlocksIn * kRowGroups * kColumnGroups;

// Shared memory, in units of 16 bytes, 8 channels of a pixel: rows of x [slot][part][plane][pixel], and g
// [stage][part][plane][pixel]. By wgmma a row of x ends with the last 16 pixels of the strip as each tap's
// column sees them [column][plane][pixel], zeros past the end.
constexpr int kTailPixels = 16;
constexpr int kInputPitch = kStrip + kTapColumns - 1;
constexpr int kStages = WGMMA ? 3 : 2;          // of g: the row in use and those to come
constexpr int kSlots = kTapRows - 1 + kStages;  // likewise of x
constexpr int kTail = WGMMA ? kWarps * kTailPixels : 0;  // of a column
constexpr int kSlot = kParts * kWarps * kInputPitch + kTapColumns * kTail, kStage = kParts * kWarps * kStrip;
constexpr int kOperandBytes = (kSlots * kSlot + kStages * kStage) * 16;

// The slot of x's row for the block's tap row r at a step.
__device__ __forceinline__ int slot_of(int step, int r) { return (step + kStages + r) % kSlots; }

// What is one of kBlocks.
struct BlockPlace {
  int channel_out, channel_in, kernel_row, kernel_column;
  __device__ __forceinline__ explicit BlockPlace(int block)
      : channel_out(block % kBlocksOut * kBlock),
        channel_in(block / kBlocksOut % kBlocksIn * kBlock),
        kernel_row(block / kBlocksOut / kBlocksIn % kRowGroups * kTapRows),
        kernel_column(block / kBlocksOut / kBlocksIn / kRowGroups * kTapColumns) {}
};

// One of a block's sums: the tap, and the channels out and in.
struct SumPlace { int tap, out, in; };

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

// By wgmma: a plane of 8 channels of a row of g or x as it is, on its way to shared memory in the
// background.
template <class T> struct RawPlane {
  T values[8][kStrip];
  T edge[64];          // of x, pixel·8 + channel
  uint32_t words[32];  // of g's gates
};

#if __CUDA_ARCH__ >= 800

// What a walk says of a step: the pixels of g, 0 where there is no g, -1 where there is no such step; the
// pixels of the strip; and the scales.
struct Step {
  int pixels = -1, across = 0;
  SampleScales scales;
};

// A walk down strips, rows begin … end - 1 of all, counted along columns of strips. A step brings a row of x,
// and g unless it is `ahead`: the first rows of a column of strips are other taps'.
struct Walk {
  const output_t* const all_dy;
  const uint32_t* const all_gates;
  const value_t* const all_x;
  const Strips& strips;
  const BlockPlace& place;
  const uint32_t *const largest_x, *const largest_g;
  const int common, plane;  // the plane of the block's to which dy, gates and x point
  const int64_t H, W, end;
  int64_t tile;
  SampleScales scales;
  int pixels, row, first, stop;  // of this column of strips: across, and the rows first … stop - 1
  // Where the step's rows begin.
  const output_t* dy;
  const uint32_t* gates;
  const value_t* x;

  __device__ __forceinline__ bool goes_on() const { return tile < end; }
  __device__ __forceinline__ bool ahead() const { return row < first; }
  __device__ __forceinline__ Step step() const {
    if (!goes_on()) return {};
    const int across = min(pixels, kStrip);
    return {ahead() ? 0 : across, across, scales};
  }
  __device__ __forceinline__ void start() {
    const int64_t column_of_strips = tile / strips.height, n = column_of_strips / strips.of_row;
    const int column = int(column_of_strips % strips.of_row) * kStrip;
    first = int(tile - column_of_strips * strips.height);
    stop = int(min(int64_t(strips.height), first + end - tile));
    row = first - (kTapRows - 1), pixels = strips.width - column;
    if constexpr (kScaled) { scales.set(largest_x[n], largest_g[n], common); }
    const int plane_out = place.channel_out / 8 + plane;
    dy = all_dy + GradientStrip<CHANNELS_OUT>::index({n, row, column}, strips, plane_out);
    gates = all_gates +
            gate_index(n, plane_out * 8, row, column, strips.height, strips.width, CHANNELS_OUT);
    x = all_x + ((n * CHANNELS_IN + place.channel_in + plane * 8) * H + first + place.kernel_row) * W;
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

// A plane of 8 channels of a step's g on its way to shared memory, in a warp's registers: the walk's, or by
// way of raw the one that lies so many `planes` past it.
struct StagedGradient {
  GradientStrip<CHANNELS_OUT> strip;

  __device__ __forceinline__ void load(const Walk& walk) {
    if (walk.ahead()) return;
    const int64_t plane_size = int64_t(walk.strips.height) * walk.strips.width;
    strip.load(walk.dy, walk.gates, walk.place.channel_out / 8 + walk.plane, plane_size, walk.pixels);
  }
  using Raw = RawPlane<output_t>;
  static __device__ __forceinline__ void copy(Raw& to, const Walk& walk, int planes) {
    if (walk.ahead()) return;
    const int plane = walk.place.channel_out / 8 + walk.plane + planes, lane = threadIdx.x % 32;
    const int64_t plane_size = int64_t(walk.strips.height) * walk.strips.width;
    const output_t* const dy = walk.dy + planes * 8 * plane_size;
    copy_strip<CHANNELS_OUT, COPIED_DY>(to.values, dy, plane, plane_size, walk.pixels);
    if (CHANNELS_OUT % 64 == 0 || plane * 8 + lane / 4 < CHANNELS_OUT)
      copy_raw(to.words + lane, walk.gates + planes * 32 + lane);
  }
  __device__ __forceinline__ void load(const Raw& from, const Step& step) {
    strip.load(&from.values[0][0], from.words, 0, kStrip, step.pixels);
  }
  // To a stage, as operands.
  __device__ __forceinline__ void store(uint4* stage, int plane, const Step& step, float scale) const {
    if (step.pixels == 0) return;
    const int lane = threadIdx.x % 32;
    float values[kLanePixels][8];
    strip.for_each(scale, [&](int i, int c, float, float inner) {
      values[i][c] = kScaled ? scaled(inner, step.scales.gradient) : inner;
    });
#pragma unroll
    for (int i = 0; i < kLanePixels; i++)
      pack_pixel(stage + plane * kStrip + lane + i * 32, kWarps * kStrip, values[i]);
  }
};

// Likewise of a row of x. Past the end of a row its values may be anything: such pixels don't count
// (mask_taps, store_tails).
struct StagedInput {
  value_t values[kLanePixels][8] = {};
  // Right of the strip: lane + 32 k is pixel·8 + channel.
  value_t edge[ceil_div((kTapColumns - 1) * 8, 32)] = {};

  __device__ __forceinline__ void load(const Walk& walk) {
    const int lane = threadIdx.x % 32, plane = walk.place.channel_in / 8 + walk.plane;
    const int real = walk.pixels + KERNEL_W - 1 - walk.place.kernel_column;  // pixels of x
    load_strip<CHANNELS_IN>(values, walk.x, plane, walk.H * walk.W, real);
#pragma unroll
    for (int i = lane, k = 0; k < int(sizeof(edge) / sizeof(value_t)); i += 32, k++) {
      const bool exists =
          i < (kTapColumns - 1) * 8 && plane * 8 + i % 8 < CHANNELS_IN && kStrip + i / 8 < real;
      if (exists) edge[k] = walk.x[i % 8 * walk.H * walk.W + kStrip + i / 8];
    }
  }
  using Raw = RawPlane<value_t>;
  static __device__ __forceinline__ void copy(Raw& to, const Walk& walk, int planes) {
    const int plane = walk.place.channel_in / 8 + walk.plane + planes;
    const int real = walk.pixels + KERNEL_W - 1 - walk.place.kernel_column;
    const value_t* const x = walk.x + planes * 8 * walk.H * walk.W;
    copy_strip<CHANNELS_IN, COPIED_X>(to.values, x, plane, walk.H * walk.W, real);
#pragma unroll
    for (int i = threadIdx.x % 32; i < (kTapColumns - 1) * 8; i += 32)
      if (plane * 8 + i % 8 < CHANNELS_IN && kStrip + i / 8 < real)
        copy_raw(to.edge + i, x + i % 8 * walk.H * walk.W + kStrip + i / 8);
  }
  __device__ __forceinline__ void load(const Raw& from, const Step&) {
    const int lane = threadIdx.x % 32;
    load_strip<64>(values, &from.values[0][0], 0, kStrip, kStrip);
#pragma unroll
    for (int k = 0; k < int(sizeof(edge) / sizeof(value_t)); k++) edge[k] = from.edge[(lane + k * 32) % 64];
  }
  // To a slot, as operands.
  __device__ __forceinline__ void store(uint4* slot, int plane, const Step& step, float) const {
    const int lane = threadIdx.x % 32;
    const auto operand = [&](float value) { return kScaled ? scaled(value, step.scales.input) : value; };
    uint4* const to = slot + plane * kInputPitch;
#pragma unroll
    for (int i = 0; i < kLanePixels; i++) {
      float of_pixel[8];
#pragma unroll
      for (int c = 0; c < 8; c++) of_pixel[c] = operand(float(values[i][c]));
      pack_pixel(to + lane + i * 32, kWarps * kInputPitch, of_pixel);
    }
#pragma unroll
    for (int i = lane, k = 0; k < int(sizeof(edge) / sizeof(value_t)); i += 32, k++) {
      if (i >= (kTapColumns - 1) * 8) continue;
      const Parts parts = split(operand(float(edge[k])));
#pragma unroll
      for (int part = 0; part < kParts; part++)
        reinterpret_cast<operand_t*>(to + part * kWarps * kInputPitch + kStrip + i / 8)[i % 8] =
            parts.part[part];
    }
    if (kTail > 0 && step.across % kTailPixels) store_tails(slot, plane, step.across);
  }

  // Each column's last pixels, from the plane as it lies in the slot.
  static __device__ __forceinline__ void store_tails(uint4* slot, int plane, int across) {
    const int lane = threadIdx.x % 32, first = across / kTailPixels * kTailPixels;
    const uint4* const from = slot + plane * kInputPitch + first;
    uint4* const tails = slot + kWarps * kInputPitch + plane * kTailPixels;
    __syncwarp();  // the plane is there
#pragma unroll
    for (int i = lane; i < kTapColumns * kTailPixels; i += 32) {
      const int column = i / kTailPixels, pixel = i % kTailPixels;
      tails[column * kTail + pixel] = first + pixel < across ? from[pixel + column] : make_uint4(0, 0, 0, 0);
    }
  }
};

#endif

}  // namespace
