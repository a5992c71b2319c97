// What the producer and the consumers of conv/wide_sm90.cuh share: how a block's warpgroups and its shared
// memory are shared out, and the tiles that it goes through.
#pragma once
#include "conv/wide_operands.cuh"
#include "conv/wide_sm90_stages.cuh"

namespace {

constexpr int kSteps = kTaps * kTapSteps;  // products of depth 16 per sum
// The weights of so many stay in registers, the others' in shared memory.
constexpr int kRegisterSteps = kSteps < REGISTER_STEPS ? kSteps : REGISTER_STEPS;
// Each consumer multiplies 64 channels × 128 pixels at a time.
constexpr int kThreads = kWarpgroup * (1 + kConsumers);
// Registers of a thread. A block starts with the same for each; were there fewer than its warpgroups ask
// for then, they would wait for ever.
constexpr int kProducerRegisters = TRANSPOSED ? 72 : 56, kConsumerRegisters = TRANSPOSED ? 216 : 224;
constexpr int kStartRegisters = (64 << 10) / kThreads / 8 * 8;
static_assert(kProducerRegisters + kConsumers * kConsumerRegisters <= (1 + kConsumers) * kStartRegisters);
// So many consumers have the same channels, and each takes every kSharers-th tile. If it is one, the two
// compute different channels of the same tile, and multiply in turns.
constexpr int kSharers = kConsumers * 64 / kBlockChannels;
constexpr bool kInTurns = kSharers == 1 || TRANSPOSED;

constexpr int kStages = STAGES;  // rows of operands: those of a tile, and those that come next
constexpr int kStageBytes = kPlanes * kPitch * 16;  // [plane][pixel]
constexpr int kRawRows = TRANSPOSED ? 1 : 2;        // rows of x under way at a time
constexpr int kWordPixels = 4 / sizeof(value_t);    // x is copied by words of 4 bytes
// Of a row of g, in strips, every second unit is raw: with two strips, always of the second, shorter one.
constexpr int kProducers = kWarpgroup / 32;  // warps
constexpr int kRowStrips = ceil_div(kTileWidth - kPadColumns, kStrip);
constexpr int kRawPitch =
    TRANSPOSED ? kTileWidth - kPadColumns - (kRowStrips - 1) * kStrip : ceil_div(kPitch, kWordPixels);
constexpr int kRawBytes = TRANSPOSED ? kProducers * 8 * kRawPitch * 4  // a warp's [channel][pixel]
                                     : ceil_div(CHANNELS_IN * kRawPitch, 4) * 16;  // [channel][word]
constexpr int kWeightBytes = (kSteps - kRegisterSteps) * 2 * 64 * 16;  // a consumer's: [step][plane][channel]
constexpr int kSector = 32 / sizeof(output_t);                         // elements that are written at a time
constexpr int kStagingPitch = kTileWidth + kSector;                    // from channel to channel: 8 banks on
constexpr int kStagingBytes = TRANSPOSED ? 0 : 16 * kStagingPitch * int(sizeof(output_t));  // a warp's
constexpr int kWeightCopies = TRANSPOSED ? 1 : kConsumers;  // of weights in shared memory

// Shared memory: operands, weights, staging, epilogues, raw, full, empty.
constexpr int kStagingAt = kStages * kStageBytes + kWeightCopies * kWeightBytes;
constexpr int kEpiloguesAt = kStagingAt + kConsumers * 4 * kStagingBytes;
constexpr int kRawAt = kEpiloguesAt + (TRANSPOSED ? 0 : kConsumers * 64 * sizeof(Epilogue));
constexpr int kBarriersAt = kRawAt + kRawRows * kRawBytes;
constexpr int kSharedBytes = kBarriersAt + 2 * kStages * 8;
static_assert(!SPLIT && kGroups == 1 && (TRANSPOSED ? kBlockChannels == 64 : kSteps <= 36) &&
                  kStages > KERNEL_H && kSharedBytes <= 227 << 10,
              "planned where it can't run");
static_assert(kSharedBytes == SHARED_BYTES, "Python planned another layout");

// The block's tiles, begin … end - 1, counted through samples, strips and rows, the last fastest; and where
// one lies.
struct TilePlace { int n, column, row; };
struct TileScheduler {
  int OH, strips, begin, end;
  __device__ __forceinline__ explicit TileScheduler(const Arguments& args)
      : OH(args.height()), strips(ceil_div(args.width(), kTileWidth)) {
    const int tiles = int(args.N) * strips * OH;
    begin = int64_t(tiles) * blockIdx.x / gridDim.x, end = int64_t(tiles) * (blockIdx.x + 1) / gridDim.x;
  }
  __device__ __forceinline__ TilePlace operator[](int tile) const {
    return {tile / OH / strips, tile / OH % strips * kTileWidth, tile % OH};
  }
};

}  // namespace
