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
//   narrow3d.cuh           the products, whose sums sinks take from the registers
//   norm/narrow3d_statistics.cuh, store/runs.cuh  sinks: mean and deviation; results of a pointwise tail
#pragma once
#include <stdexcept>

#include "core/launch.cuh"
#include "core/numerics.h"
#include "core/split.cuh"
#include "core/tensor_core.cuh"
#include "core/vector.cuh"
#include "host/tensor.h"

#ifndef LEAST_SHARED  // bytes set aside for sinks, so that builds with other sinks have the same tiles: v is
                      // then the same, bit for bit
#define LEAST_SHARED 0
#endif

namespace conv::narrow3d {

using namespace tensor_core;

constexpr int kBlock = 384, kBlockWarps = kBlock / 32;  // 168 registers a thread
constexpr int kRaw = 3;                                 // planes on their way
constexpr int kFragments = 4;                           // of 8 positions, that a warp computes side by side
constexpr int kTurn = 8 * kFragments;  // positions that a warp computes at a time; warps take turns

// What is compiled for: x's and the weights' type, and the sizes of the filters.
template <class Value, int kChannelsIn, int kChannelsOut, int kPlanes, int kRows, int kColumns> struct Shape {
  using value_t = Value;
  static constexpr int kIn = kChannelsIn, kOut = kChannelsOut, kDepth = kPlanes, kHeight = kRows;
  static constexpr int kWidth = kColumns, kTaps = kDepth * kHeight * kWidth;
  static constexpr int kSteps = (kTaps + 3) / 4;  // of four taps
  static constexpr int kRing = kDepth + 3;        // planes in the ring
  // float32 is split into two float16, high + low; 16 bits are an operand as they are, which is then `high`.
  // A pixel is its channels' highs, then their lows, in words of two.
  static constexpr bool kSplit = std::is_same_v<value_t, float>;
  using operand_t = std::conditional_t<kSplit, half_t, value_t>;
  // With a high; where kIn is odd, the last of them has a low, too, or zero.
  static constexpr int kHighWords = (kIn + 1) / 2;
  static constexpr int kLowWords = kSplit ? kIn - kHighWords : 0;  // with lows alone
  static constexpr int kWords = kHighWords + kLowWords;
  // Words of weights, of 16 output channels two rows each, which are two registers of fragment A: the highs
  // that meet the words with a high, from kHighs on; the lows that do, from kLows on; the highs that meet
  // words of lows, from kRest on. Two neighbours, from an even one on, are a fragment.
  static constexpr int kHighs = 0, kLows = (kSteps * kHighWords + 1) / 2 * 2, kRest = 2 * kLows;
  static constexpr int kWeightWords = kRest + (kSteps * kLowWords + 1) / 2 * 2;
  static_assert(kIn >= 1 && kIn <= 4, "the sizes that this kernel serves");
  // Pixels that a ring has room for at least: through it pass the weights of 16 channels, and their
  // gradients, taps in eights.
  static constexpr int kLeastStage = (16 * kIn * ((kTaps + 7) / 8 * 8) + kWords - 1) / kWords;
};

inline int64_t round_up(int64_t size, int64_t unit) { return (size + unit - 1) / unit * unit; }

// Throws where a tensor hasn't so many elements.
template <class T> void expect(const inline_loader::View<T>& tensor, int64_t count) {
  const int64_t found = tensor.numel();
  if (found != count)
    throw std::invalid_argument("expected a tensor of " + std::to_string(count) + " elements, got " +
                                std::to_string(found));
}

template <class S> struct Convolution {
  const typename S::value_t* x;
  const typename S::value_t* weight;
  int64_t channel;  // D·H·W
  int D, H, W, OD, OH, OW;
  int rows, slabs, depth, chunks;  // of a tile: output rows and planes; of a sample: parts along either
  int pitch, plane, raw;           // pixels: of a row and a plane of the ring; of a raw plane
  int stage;                       // pixels that the ring has room for
  int shared;                      // bytes of dynamic shared memory
  bool aligned;                    // rows of x start at multiples of four elements, 16 bytes of float32
  bool bulk;                       // rows of x start at multiples of 16 bytes
  int64_t N;                       // the host's
  HOST_DEVICE int slots() const { return slabs * chunks; }            // tiles of a sample
  HOST_DEVICE int64_t size() const { return int64_t(OD) * OH * OW; }  // of a channel of the result
  HOST_DEVICE int turns() const { return (min(rows, OH) * OW + kTurn - 1) / kTurn; }  // of a tile's plane

  // Tiles of `tile_rows`, if a block with `room` bytes of dynamic shared memory holds them: the ring; raw
  // planes; `positions` and `places` (below). Each begins where the one before it ends.
  bool lay_out(int tile_rows, int64_t room) {
    const int64_t rows_in = tile_rows + S::kHeight - 1, of_plane = rows_in * pitch,
                  of_raw = rows_in * round_up(W, 8);
    const int64_t pixels = round_up(max(S::kRing * of_plane, int64_t(S::kLeastStage)), 256);
    const int64_t bytes = 4 * S::kWords * pixels + kRaw * S::kIn * of_raw * int(sizeof(typename S::value_t)) +
                          2 * (round_up(int64_t(tile_rows) * OW, kTurn) + of_raw);
    if (bytes > room) return false;
    rows = tile_rows, slabs = (OH + rows - 1) / rows;
    plane = int(of_plane), raw = int(of_raw), stage = int(pixels), shared = int(bytes);
    return true;
  }
};

// Of x (N, kIn, D, H, W) and weight (kOut, kIn, kDepth, kHeight, kWidth): tiles that keep all multiprocessors
// busy with the fewest rows and planes read twice, where a launch has so many `samples`. own: bytes of shared
// memory that the kernel needs besides. vectors: are a tile's positions in a plane a multiple of 4 wherever
// H'·W' is? Throws std::invalid_argument where the tensors are others, or there is no room.
template <class S>
Convolution<S> convolution(const In<typename S::value_t>& x, const In<typename S::value_t>& weight, int own,
                           bool vectors, int64_t samples) {
  const int64_t filters[] = {S::kOut, S::kIn, S::kDepth, S::kHeight, S::kWidth};
  bool expected = x.dims == 5 && weight.dims == 5 && x.size(1) == S::kIn;
  for (int i = 0; i < 5; i++) expected = expected && weight.size(i) == filters[i];
  if (!expected)
    throw std::invalid_argument("expected the filters that the kernels are compiled for, and such an x");
  Convolution<S> c{
      x, weight, x.size(2) * x.size(3) * x.size(4), int(x.size(2)), int(x.size(3)), int(x.size(4))};
  c.N = x.size(0), c.OD = c.D - S::kDepth + 1, c.OH = c.H - S::kHeight + 1, c.OW = c.W - S::kWidth + 1;
  c.aligned = vectors_fit(c.x, c.W);
  c.bulk = c.W * sizeof(typename S::value_t) % 16 == 0 && uintptr_t(c.x) % 16 == 0;
  // The rows of a group of taps start in different banks: 12 or 24 modulo 32 pixels apart.
  const int padded = int(round_up(c.W, 4));
  c.pitch = padded + min((12 - padded % 32 + 32) % 32, (24 - padded % 32 + 32) % 32);
  if (LEAST_SHARED && own > LEAST_SHARED)
    throw std::invalid_argument("expected sinks with less shared memory");
  const int room = device_attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin) - max(own, LEAST_SHARED);
  const int64_t multiprocessors = device_attribute(cudaDevAttrMultiProcessorCount);
  int unit = 1;  // of rows
  while (vectors && int64_t(c.OH) * c.OW % 4 == 0 && unit * c.OW % 4) unit *= 2;
  int64_t least = -1;
  Convolution<S> best = c;
  for (int slabs = 1, last = 0; slabs <= c.OH; slabs++) {
    const int rows = int(round_up((c.OH + slabs - 1) / slabs, unit));
    if (rows == last || !c.lay_out(rows, room)) continue;
    last = rows;
    for (int chunks = 1; chunks <= 8; chunks *= 2) {
      c.depth = (c.OD + chunks - 1) / chunks, c.chunks = (c.OD + c.depth - 1) / c.depth;
      const int64_t rounds = (samples * c.slots() + multiprocessors - 1) / multiprocessors;
      const int64_t work = rounds * (rows + S::kHeight - 1) * (c.depth + S::kDepth + 1);
      if (least < 0 || work < least) least = work, best = c;
    }
  }
  if (least < 0)
    throw std::invalid_argument("expected planes of x that shared memory has room for, got larger ones");
  return best;
}

// What a block computes.
struct Tile {
  int64_t n;
  int slot, first_row, rows, first_plane, planes;
  int positions;  // in a plane
  template <class S> __device__ Tile(const Convolution<S>& c, unsigned job) {
    n = job / c.slots(), slot = int(job % c.slots());
    first_row = slot % c.slabs * c.rows, rows = min(c.rows, c.OH - first_row);
    first_plane = slot / c.slabs * c.depth, planes = min(c.depth, c.OD - first_plane);
    positions = rows * c.OW;
  }
};

// Output positions of a sample's tile.
template <class S> __device__ float slot_count(const Convolution<S>& c, int slot) {
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
template <class S> struct MainloopStorage {
  uint64_t done[2];                         // a barrier: all threads are through with a plane of output
  uint64_t arrived[kRaw];                   // and: a raw plane has been copied
  Moments<float> moments[kBlockWarps][16];  // statistics by warp and channel
  float weight_scale[16];
  float largest[kBlockWarps][S::kIn];  // magnitudes by warp
  Scaling scaling[S::kIn];
  uint32_t taps[(S::kTaps + 3) / 4 * 4];  // where a tap's pixel lies in the ring, from a position's
};

// What a thread knows of its block: the tile, the planes of x that it needs, and shared memory. A plane's
// items, `width` neighbouring pixels each, are shared out among the threads.
template <class S> struct Block {
  const Convolution<S>& c;
  const Tile& tile;
  MainloopStorage<S>& storage;
  uint32_t* const ring;  // of the words with a high
  const int turns = (tile.positions + kTurn - 1) / kTurn;
  const int width = c.aligned ? 4 : 1;
  const int row_items = c.aligned ? c.W / 4 : c.W;
  const int items = (tile.rows + S::kHeight - 1) * row_items;
  const int64_t plane_stride = int64_t(c.H) * c.W;
  const typename S::value_t* const sample = c.x + tile.n * S::kIn * c.channel;
  const typename S::value_t* const origin = sample + tile.first_plane * plane_stride + tile.first_row * c.W;

  __device__ __forceinline__ Block(const Convolution<S>& c, const Tile& tile, MainloopStorage<S>& storage,
                                   uint32_t* ring)
      : c(c), tile(tile), storage(storage), ring(ring) {}

  // Of the others.
  __device__ __forceinline__ uint32_t* low_ring() const { return ring + S::kHighWords * c.stage; }
  __device__ __forceinline__ typename S::value_t* raw(int plane) const {
    return reinterpret_cast<typename S::value_t*>(ring + S::kWords * c.stage) + plane % kRaw * S::kIn * c.raw;
  }
  // Where the pixel lies in a plane of the ring: of an output position, and the first of an item.
  __device__ __forceinline__ uint16_t* positions() const {
    return reinterpret_cast<uint16_t*>(raw(0) + kRaw * S::kIn * c.raw);
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
      const int tap = min(int(threadIdx.x), S::kTaps - 1);
      const int plane = tap / (S::kHeight * S::kWidth), row = tap / S::kWidth % S::kHeight;
      storage.taps[threadIdx.x] = plane * c.plane + row * c.pitch + tap % S::kWidth;
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

}  // namespace conv::narrow3d
