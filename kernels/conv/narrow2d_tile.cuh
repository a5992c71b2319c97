// A 2-D convolution of up to 16 channels in, row by row (conv/narrow2d.cuh): tiles of its result v, the plan,
// and how a block's shared memory is laid out. The build, or else the source before, says the sizes:
// CHANNELS_IN, CHANNELS_OUT, KERNEL_H, KERNEL_W, and those of windows, POOL_H and POOL_W.
#pragma once
#include "core/split.cuh"
#include "core/reduce.cuh"
#include "core/tensor_core.cuh"

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

// Until a window's rows are complete, a thread keeps of two neighbouring columns the larger value, or both
// where windows of an odd width may part them.
constexpr int kKept = POOL_W % 2 == 0 ? 1 : 2;                 // values
constexpr int kWidth = POOL_W % 2 == 0 ? POOL_W / 2 : POOL_W;  // kept values that a window has in a row
constexpr int kStagingPitch = kTile / 2 * kKept + 4 * kKept;   // kept values of a channel; no bank conflicts

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

struct SharedStorage {
  // Of a channel: two factors of a power of two, the first with the filter's sign.
  float2 unscale[kBlockChannels];
  int filter_exponent[kBlockChannels];
  bool flipped[kBlockChannels];
  int largest;  // magnitude of x, as bits
};
static_assert(sizeof(SharedStorage) <= STATIC_SHARED, "what was planned with");

}  // namespace
