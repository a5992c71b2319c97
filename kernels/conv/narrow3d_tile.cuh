// A small 3-D convolution on tensor cores at eager's accuracy, which fused kernels share: what a block
// computes of it, and where it keeps what in shared memory.
//
// x (N, kIn, D, H, W), weight (kOut, kIn, kDepth, kHeight, kWidth), result (N, kOut, D', H', W'); stride 1,
// no padding, kIn ≤ 4; 16 output channels at a time. A block fills a multiprocessor. It owns a tile: some
// output rows of some output planes of one sample. It walks along depth, with a ring of input planes in
// shared memory: kDepth that are in use, and three that come. Its warps share out each plane's positions and
// pixels, and may be two planes apart.
//
//   narrow3d_tile.cuh      sizes, tiles, the layout of shared memory
//   narrow3d_stage.cuh     planes of x on their way from global memory
//   narrow3d_operands.cuh  x and the weights, scaled, split and laid out as fragments
//   narrow3d.cuh           the products, whose sums an epilogue takes from the registers
//   norm/narrow3d_statistics.cuh  an epilogue that takes mean and variance
#pragma once
#include <limits.h>

#include "core/numerics.h"
#include "core/split.cuh"
#include "core/tensor_core.cuh"
#include "core/vector.cuh"

#ifndef CHANNELS_IN
#define CHANNELS_IN 3
#define CHANNELS_OUT 16
#define KERNEL_D 3
#define KERNEL_H 3
#define KERNEL_W 3
#endif
#ifndef STAGE_PIXELS  // the plan, as tiling.py makes it; else one with which a source compiles alone
#define STAGE_PIXELS 8704
#define PIXEL_WORDS kWords
#define RING_PLANES kRing
#define RAW_PLANES kRaw
#define TURN_POSITIONS kTurn
#define STATIC_SHARED (33 << 10)
#endif

using namespace tensor_core;

constexpr int kIn = CHANNELS_IN, kOut = CHANNELS_OUT, kDepth = KERNEL_D, kHeight = KERNEL_H;
constexpr int kWidth = KERNEL_W;
constexpr int kTaps = kDepth * kHeight * kWidth;
constexpr int kBlock = 384, kBlockWarps = kBlock / 32;  // 168 registers a thread

// float32 is split into two float16, high + low; 16 bits are an operand as they are, which is then `high`. A
// pixel is its channels' highs, then their lows, in words of two.
constexpr bool kSplit = std::is_same_v<value_t, float>;
using operand_t = std::conditional_t<kSplit, half_t, value_t>;
// With a high; where kIn is odd, the last of them has a low, too, or zero.
constexpr int kHighWords = (kIn + 1) / 2;
constexpr int kLowWords = kSplit ? kIn - kHighWords : 0;  // with lows alone
constexpr int kWords = kHighWords + kLowWords;

constexpr int kStage = STAGE_PIXELS;   // pixels that the ring has room for
constexpr int kRing = kDepth + 3;      // planes in it
constexpr int kRaw = 3;                // planes on their way
constexpr int kFragments = 4;          // of 8 positions, that a warp computes side by side
constexpr int kTurn = 8 * kFragments;  // positions that a warp computes at a time; warps take turns
static_assert(kIn >= 1 && kIn <= 4 && kOut % 16 == 0, "the sizes that this kernel serves");
static_assert(kWords * kStage >= 16 * kIn * kTaps, "the weights of 16 channels pass through the ring");
static_assert(PIXEL_WORDS == kWords && RING_PLANES == kRing && RAW_PLANES == kRaw && TURN_POSITIONS == kTurn,
              "what was planned with");

struct Convolution {
  const value_t* x;
  const value_t* weight;
  int64_t channel;  // D·H·W
  int D, H, W, OD, OH, OW;
  int rows, slabs, depth, chunks;  // of a tile: output rows and planes; of a sample: parts along either
  int pitch, plane, raw;           // pixels: of a row and a plane of the ring; of a raw plane
  int shared;                      // bytes of dynamic shared memory
  bool aligned;                    // rows of x start at multiples of four elements, 16 bytes of float32
  bool bulk;                       // rows of x start at multiples of 16 bytes
  HOST_DEVICE int slots() const { return slabs * chunks; }                            // tiles of a sample
  HOST_DEVICE int turns() const { return (min(rows, OH) * OW + kTurn - 1) / kTurn; }  // of a tile's plane

  // Dynamic shared memory: the ring; raw planes; `positions` and `places` (below). Each begins where the one
  // before it ends.
  HOST_DEVICE int laid_out_bytes() const {
    const int ring = kWords * kStage * 4, raw_planes = kRaw * kIn * raw * int(sizeof(value_t));
    return ring + raw_planes + (turns() * kTurn + raw) * 2;
  }
};

// `rows` to `shared` are the plan (tiling.py's VolumeTiling). One that has no room for the layout asks for
// more shared memory than there is, so that the launch fails.
inline Convolution convolution(const value_t* x, const value_t* weight, int64_t D, int64_t H, int64_t W,
                               int64_t rows, int64_t depth, int64_t pitch, int64_t raw, int64_t shared) {
  Convolution c{x, weight, D * H * W, int(D), int(H), int(W)};
  c.OD = c.D - kDepth + 1, c.OH = c.H - kHeight + 1, c.OW = c.W - kWidth + 1;
  c.rows = int(rows), c.slabs = (c.OH + c.rows - 1) / c.rows;
  c.depth = int(depth), c.chunks = (c.OD + c.depth - 1) / c.depth;
  const int rows_in = c.rows + kHeight - 1;
  c.pitch = int(pitch), c.plane = rows_in * c.pitch, c.raw = int(raw);
  const bool room = pitch >= W && kRing * c.plane <= kStage && rows_in * W <= raw;
  c.shared = room && c.laid_out_bytes() <= shared ? int(shared) : INT_MAX;
  c.aligned = vectors_fit(x, W), c.bulk = W * sizeof(value_t) % 16 == 0 && uintptr_t(x) % 16 == 0;
  return c;
}

// What a block computes.
struct Tile {
  int64_t n;
  int slot, first_row, rows, first_plane, planes;
  int positions;  // in a plane
  __device__ Tile(const Convolution& c, unsigned job) {
    n = job / c.slots(), slot = int(job % c.slots());
    first_row = slot % c.slabs * c.rows, rows = min(c.rows, c.OH - first_row);
    first_plane = slot / c.slabs * c.depth, planes = min(c.depth, c.OD - first_plane);
    positions = rows * c.OW;
  }
};

// Output positions of a sample's tile.
__device__ inline float slot_count(const Convolution& c, int slot) {
  const int rows = min(c.rows, c.OH - slot % c.slabs * c.rows);
  const int planes = min(c.depth, c.OD - slot / c.slabs * c.depth);
  return float(rows) * float(planes) * float(c.OW);
}

// What x needs, by input channel: it becomes (x - shift)·scale. Its weights are multiplied by `share`, which
// is the smallest of all channels' scales over this one.
struct Scaling {
  float shift, scale, share;
};

// A block's static shared memory, of which each kernel has some, and more of its own.
struct MainloopStorage {
  uint64_t done[2];                         // a barrier: all threads are through with a plane of output
  uint64_t arrived[kRaw];                   // and: a raw plane has been copied
  Moments<float> moments[kBlockWarps][16];  // statistics by warp and channel
  float weight_scale[16];
  float largest[kBlockWarps][kIn];  // magnitudes by warp
  Scaling scaling[kIn];
  uint32_t taps[(kTaps + 3) / 4 * 4];  // where a tap's pixel lies in the ring, from a position's
};
template <class SharedStorage> constexpr bool kPlanned = sizeof(SharedStorage) <= STATIC_SHARED;

// What a thread knows of its block: the tile, the planes of x that it needs, and shared memory. A plane's
// items, `width` neighbouring pixels each, are shared out among the threads.
struct Block {
  const Convolution& c;
  const Tile& tile;
  MainloopStorage& storage;
  uint32_t* const ring;  // of the words with a high
  const int turns = (tile.positions + kTurn - 1) / kTurn;
  const int width = c.aligned ? 4 : 1;
  const int row_items = c.aligned ? c.W / 4 : c.W;
  const int items = (tile.rows + kHeight - 1) * row_items;
  const int64_t plane_stride = int64_t(c.H) * c.W;
  const value_t* const sample = c.x + tile.n * kIn * c.channel;
  const value_t* const origin = sample + tile.first_plane * plane_stride + tile.first_row * c.W;

  __device__ __forceinline__ Block(const Convolution& c, const Tile& tile, MainloopStorage& storage,
                                   uint32_t* ring)
      : c(c), tile(tile), storage(storage), ring(ring) {}

  // Of the others.
  __device__ __forceinline__ uint32_t* low_ring() const { return ring + kHighWords * kStage; }
  __device__ __forceinline__ value_t* raw(int plane) const {
    return reinterpret_cast<value_t*>(ring + kWords * kStage) + plane % kRaw * kIn * c.raw;
  }
  // Where the pixel lies in a plane of the ring: of an output position, and the first of an item.
  __device__ __forceinline__ uint16_t* positions() const {
    return reinterpret_cast<uint16_t*>(raw(0) + kRaw * kIn * c.raw);
  }
  __device__ __forceinline__ uint16_t* places() const { return positions() + c.turns() * kTurn; }

  __device__ __forceinline__ void make_tables() const {
#pragma unroll 1
    for (int q = threadIdx.x; q < turns * kTurn; q += kBlock)
      positions()[q] = q < tile.positions ? q / c.OW * c.pitch + q % c.OW : 0;
#pragma unroll 1
    for (int i = threadIdx.x; i < items; i += kBlock)
      places()[i] = i / row_items * c.pitch + i % row_items * width;
    if (threadIdx.x < sizeof storage.taps / sizeof storage.taps[0]) {
      const int tap = min(int(threadIdx.x), kTaps - 1);
      const int plane = tap / (kHeight * kWidth), row = tap / kWidth % kHeight;
      storage.taps[threadIdx.x] = plane * c.plane + row * c.pitch + tap % kWidth;
    }
  }

  // body(i) for the items of a plane that this thread copies and splits. They change from plane to plane, but
  // not from one to the next in its place.
  template <class Body> __device__ __forceinline__ void for_items(int plane, Body body) const {
    int first = threadIdx.x + plane % kRaw * (kBlock / kRaw);
    if (first >= kBlock) first -= kBlock;
#pragma unroll 1
    for (int i = first; i < items; i += kBlock) body(i);
  }
};
