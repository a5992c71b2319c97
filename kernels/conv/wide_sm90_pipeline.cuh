// What the producer and the consumers of conv/wide_sm90.cuh share: how a block's warpgroups and its shared
// memory are shared out, and the tiles that it goes through.
#pragma once
#include "conv/tail.cuh"
#include "conv/wide_operands.cuh"
#include "conv/wide_sm90_stages.cuh"

namespace conv {

// Makes operands of rows of the Source, for a Loop; each source has its own:
//   kRegisters                   of a thread
//   kSharedBytes                 its own part of shared memory
//   produce(args, tiles, pipeline, stages, own, again)       fills the stages, row by row; tiles: a scheduler
template <class Conv, class Source> struct Producer;

template <class Conv, class Source, class Tail, class Keep, class Out> struct PipelineSm90 : Conv {
  using Conv::kBlockChannels, Conv::kChannelsIn, Conv::kKBlocks, Conv::kKernelH, Conv::kRowBytes,
      Conv::kSplit, Conv::kTapSteps, Conv::kTaps, Conv::kTransposed;
  using OwnProducer = Producer<Conv, Source>;

  static constexpr int kSteps = kTaps * kTapSteps;  // products of depth 16 per sum
  // The weights of so many stay in registers, the others' in shared memory; of a transposed convolution
  // fewer, whose consumers have 8 registers less.
  static constexpr int kMostRegisterSteps = kTransposed ? 28 : 30;
  static constexpr int kRegisterSteps = kSteps < kMostRegisterSteps ? kSteps : kMostRegisterSteps;
  // Each consumer multiplies 64 channels × 128 pixels at a time.
  static constexpr int kThreads = kWarpgroup * (1 + kConsumers);
  // Registers of a thread. A block starts with the same for each; were there fewer than its warpgroups ask
  // for then, they would wait for ever.
  static constexpr int kStartRegisters = (64 << 10) / kThreads / 8 * 8;
  static constexpr int kProducerRegisters = OwnProducer::kRegisters;
  static constexpr int kConsumerRegisters =
      ((1 + kConsumers) * kStartRegisters - kProducerRegisters) / kConsumers / 8 * 8;
  // So many consumers have the same channels, and each takes every kSharers-th tile. If it is one, the two
  // compute different channels of the same tile, and multiply in turns.
  static constexpr int kSharers = kConsumers * 64 / kBlockChannels;
  static constexpr bool kInTurns = kSharers == 1 || kTransposed;

  static constexpr int kStages = kKernelH + 1;  // rows of operands: those of a tile, and the next
  // A consumer's: [step][channel group][channel]. A transposed convolution has one copy for both.
  static constexpr int kWeightBytes = (kSteps - kRegisterSteps) * 2 * 64 * 16;
  static constexpr int kWeightCopies = kTransposed ? 1 : kConsumers;
  static constexpr bool kSharedConstants = !kTransposed;  // else read anew for each tile: there is no room

  // Shared memory: operands, weights, the sinks', constants, the producer's, full, empty.
  static constexpr int kWarpBytes = Out::kWarpBytes > Keep::kWarpBytes ? Out::kWarpBytes : Keep::kWarpBytes;
  static constexpr int kStagingAt = kStages * kRowBytes + kWeightCopies * kWeightBytes;
  static constexpr int kConstantsAt = kStagingAt + kConsumers * 4 * kWarpBytes;
  static constexpr int kProducerAt =
      kConstantsAt + (kSharedConstants ? kConsumers * 64 * int(sizeof(ChannelConstants<Tail>)) : 0);
  static constexpr int kBarriersAt = kProducerAt + OwnProducer::kSharedBytes;
  static constexpr int kSharedBytes = kBarriersAt + 2 * kStages * 8;
  // Is it for such sizes, where a block may have so much shared memory?
  static constexpr bool fits(int room) {
    const bool sizes = kTransposed ? kBlockChannels == 64 : kChannelsIn <= 64 && kSteps <= 36;
    return !kSplit && kKBlocks == 1 && sizes && kSharedBytes <= room;
  }
};

// The block's tiles, begin … end - 1, counted through samples, strips and rows, the last fastest; and where
// one lies. `count` from there on lie one below the other, those before `stop`.
struct TilePlace {
  int n, column, row;
};
struct TileScheduler {
  int OH, strips, begin, end;
  template <class Arguments>
  __device__ __forceinline__ explicit TileScheduler(const Arguments& args)
      : OH(args.height()), strips(ceil_div(args.width(), kTileWidth)) {
    const int tiles = int(args.N) * strips * OH;
    begin = int64_t(tiles) * blockIdx.x / gridDim.x, end = int64_t(tiles) * (blockIdx.x + 1) / gridDim.x;
  }
  __device__ __forceinline__ TilePlace operator[](int tile) const {
    return {tile / OH / strips, tile / OH % strips * kTileWidth, tile % OH};
  }
  __device__ __forceinline__ int count(int tile, const TilePlace& place) const {
    return min(end - tile, OH - place.row);
  }
  __device__ __forceinline__ int stop(int tile, const TilePlace& place) const {
    return min(end, tile - place.row + OH);
  }
};

// Do rows join what tiles side by side store, so that a block is to have whole rows, in another order?
template <class Rows, class = void> constexpr bool joins = false;
template <class Rows> constexpr bool joins<Rows, std::enable_if_t<Rows::kJoins>> = true;
template <class Rows, bool = joins<Rows>> struct TilesOf {
  using type = TileScheduler;
};
template <class Rows> struct TilesOf<Rows, true> {
  using type = typename Rows::Tiles;
};

}  // namespace conv
