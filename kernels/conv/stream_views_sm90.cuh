// A convolution as an implicit GEMM by wgmma, as conv/stream_sm90.cuh's, of views of patches (conv/stream_views.cuh): M = channels out,
// N = positions of one sample, K = planes of a filter, each with all of its taps and channels.
//
// Blocks are persistent, and share all tiles. One thread has a step's weights, and the patch that its taps meet, copied to the stages of a
// pipeline; two warpgroups multiply, 64 channels each at all positions, or, of a block of 64 channels, half of the positions each; then tail and
// sink.
#pragma once
#include "conv/stream_sm90.cuh"
#include "conv/stream_views.cuh"

namespace conv {

template <class Out, class More, class Tail> struct ViewsArguments {
  Out out;
  More more;
  const uint4 *packed_weight, *packed;
  const int32_t* exponents;  // (kPaddedOut): weights are scaled by 2^exponent
  const uint32_t* largest;   // (N): the bits of each sample's largest finite magnitude
  Tail tail;
  int N, stages;
  Lattice at;
};

template <class Conv, class Tail, class Out, class More, int kSharedLimit> struct ViewsSm90 : Conv {
  using Arguments = ViewsArguments<Out, More, Tail>;
  using Conv::kBlockChannels, Conv::kChannelBlocks, Conv::kChannelsOut, Conv::kColumns, Conv::kProducts, Conv::kScaled,
      Conv::kSteps, Conv::kTapsOfStep, Conv::kTilePositions, Conv::kUnits, Conv::kWeightBytes;
  using typename Conv::Filter, typename Conv::operand_t;
  static_assert(!Out::kReduces && !More::Out::kReduces, "results that are stored");

  static constexpr int kThreads = kWarpgroup * (1 + kConsumers);
  static constexpr int kProducerRegisters = 40, kConsumerRegisters = 232;
  static constexpr bool kHalves = kBlockChannels == 64;  // has a consumer half of a tile's positions?
  static constexpr int kTiles = kColumns / 8;            // of a consumer, 8 positions each
  // A tensor core's sums lose digits, so that those of so many products are added by others, where operands are split.
  static constexpr int kAtOnce = Conv::kSplit ? 12 : kProducts;

  // Shared memory: barriers and staging, then stages of weights and patch.
  static constexpr int kMostStages = 8;
  static constexpr int kWarpBytes = Out::kWarpBytes > More::Out::kWarpBytes ? Out::kWarpBytes : More::Out::kWarpBytes;
  static constexpr int kStagingAt = 128, kStagesAt = kStagingAt + (kConsumers * 4 * kWarpBytes + 127) / 128 * 128;
  static HOST_DEVICE int stage_bytes(const Lattice& at) { return kWeightBytes + (kUnits * at.patch * 16 + 127) / 128 * 128; }
  static HOST_DEVICE int stages(const Lattice& at) {
    const int fit = (kSharedLimit - kStagesAt) / stage_bytes(at);
    return fit < kMostStages ? fit : kMostStages;
  }
  static_assert(kMostStages * 16 <= kStagingAt);

  static HOST_DEVICE int tiles(const Lattice& at) { return ceil_div(at.positions(), kTilePositions); }  // of a sample
  static HOST_DEVICE int units(const Arguments& args) { return kChannelBlocks * args.N * tiles(args.at); }

#if TENSOR_CORE_WGMMA

  // `full` once a stage's bytes are there, `empty` once all consumers' warps have read it.
  struct Pipe {
    uint64_t* const barriers;
    const int count;
    int stage = 0;
    uint32_t parity = 0;
    __device__ __forceinline__ Pipe(uint8_t* shared, int count)
        : barriers(reinterpret_cast<uint64_t*>(shared)), count(count) {}
    __device__ __forceinline__ uint64_t* full(int i) const { return barriers + i; }
    __device__ __forceinline__ uint64_t* empty(int i) const { return barriers + kMostStages + i; }
    __device__ __forceinline__ void initialize() const {
      for (int i = 0; i < count; i++)
        tensor_core::initialize(full(i), 1), tensor_core::initialize(empty(i), kConsumers * 4);
      publish_barriers();
    }
    __device__ __forceinline__ void release(int i) const {
      if (threadIdx.x % 32 == 0) arrive(empty(i));
    }
    __device__ __forceinline__ void advance() {
      if (++stage == count) stage = 0, parity ^= 1;
    }
  };

  struct Tile {
    int channel_block, n, position;
    __device__ __forceinline__ Tile(const Lattice& at, int unit) {
      const int place = unit / kChannelBlocks, of_sample = tiles(at);
      channel_block = unit % kChannelBlocks, n = place / of_sample;
      position = (place - n * of_sample) * kTilePositions;
    }
  };

  // One thread: fills stages, tile by tile, step by step.
  static __device__ __forceinline__ void produce(const Arguments& args, Pipe next, uint8_t* shared) {
    const Lattice& at = args.at;
    const int bytes = stage_bytes(at);
    for (int unit = blockIdx.x; unit < units(args); unit += gridDim.x) {
      const Tile tile(at, unit);
      const uint4* const weights = args.packed_weight + int64_t(tile.channel_block) * (kSteps * kWeightBytes / 16);
#pragma unroll 1
      for (int step = 0; step < kSteps; step++, next.advance()) {
        uint8_t* const stage = shared + next.stage * bytes;
        uint64_t* const full = next.full(next.stage);
        await(next.empty(next.stage), next.parity ^ 1);
        arrive(full, kWeightBytes + kUnits * at.patch * 16);
        copy_bulk(stage, weights + step * (kWeightBytes / 16), kWeightBytes, full);
        const uint4* const from = args.packed + int64_t(tile.n) * kUnits * at.sample + tile.position + step * at.taps[0];
#pragma unroll 1
        for (int unit = 0; unit < kUnits; unit++)
          copy_bulk(stage + kWeightBytes + unit * at.patch * 16, from + int64_t(unit) * at.sample, at.patch * 16, full);
      }
    }
  }

  // sums += products kFirst to kLast of a step, in the background.
  template <int kFirst, int kLast>
  static __device__ __forceinline__ void multiply(float (&sums)[kTiles][4], uint32_t weights, uint32_t patch,
                                                  const Lattice& at, bool accumulate) {
    begin_products();
#pragma unroll
    for (int product = kFirst; product < kLast; product++) {
      const auto address = [&](int second) {
        const Term term = Conv::term(product, second);
        const int tap = term.tap / Filter::kWidth * at.taps[1] + term.tap % Filter::kWidth * at.taps[2];
        return (Conv::unit(term) * at.patch + tap) * 16;
      };
      const int first = address(0);
      multiply_add<operand_t>(sums, describe(weights + product * (2 * kBlockChannels * 16), kBlockChannels * 16),
                              describe(patch + first, address(1) - first), accumulate || product > kFirst);
    }
    commit_products();
  }
  template <int kFirst>
  static __device__ __forceinline__ void multiply_split(float (&sums)[kTiles][4], uint32_t weights, uint32_t patch,
                                                        const Lattice& at, bool accumulate) {
    if constexpr (kFirst < kProducts) {
      constexpr int kLast = kFirst + kAtOnce < kProducts ? kFirst + kAtOnce : kProducts;
      float own[kTiles][4];
      multiply<kFirst, kLast>(own, weights, patch, at, false);
      await_products<0>();
      hold(own);
#pragma unroll
      for (int i = 0; i < kTiles * 4; i++) sums[i / 4][i % 4] = accumulate ? sums[i / 4][i % 4] + own[i / 4][i % 4] : own[i / 4][i % 4];
      multiply_split<kLast>(sums, weights, patch, at, true);
    }
  }

  // The sums of a tile, whose steps lie in the stages from `next` on.
  static __device__ __forceinline__ void multiply_tile(float (&sums)[kTiles][4], Pipe& next, uint32_t shared,
                                                       int consumer, const Lattice& at) {
    const int bytes = stage_bytes(at);
    int last = -1;  // the stage that products still read
#pragma unroll 1
    for (int step = 0; step < kSteps; step++, next.advance()) {
      await(next.full(next.stage), next.parity);
      const uint32_t weights = shared + next.stage * bytes, patch = weights + kWeightBytes;
      const uint32_t own_weights = weights + (kHalves ? 0 : consumer * 64 * 16);
      const uint32_t own_patch = patch + (kHalves ? consumer * kColumns * 16 : 0);
      if constexpr (Conv::kSplit) {
        multiply_split<0>(sums, own_weights, own_patch, at, step > 0);
        next.release(next.stage);
      } else {
        multiply<0, kProducts>(sums, own_weights, own_patch, at, step > 0);
        await_products<1>();
        if (last >= 0) next.release(last);
        last = next.stage;
      }
    }
    if constexpr (!Conv::kSplit) {
      await_products<0>();
      hold(sums);
      next.release(last);
    }
  }

  // results = tail(v) of 16 channels from patch.channel on.
  template <class OfTail>
  static __device__ __forceinline__ void finish_tile(const Arguments& args, const OfTail& tail,
                                                     const float (&sums)[kTiles][4], float (&results)[kTiles][4],
                                                     const store::Patch& patch, const Lattices& where) {
    const int lane = threadIdx.x % 32, channel = patch.channel + lane / 4;
    const auto constants_of = [&](int c) {
      ChannelConstants<OfTail> constants(tail, where.n, c, c < kChannelsOut);
      if (kScaled) constants.set_exponent(-args.exponents[c] - Conv::sample_exponent(args.largest[where.n]));
      return constants;
    };
    const auto low = constants_of(channel), high = constants_of(channel + 8);
#pragma unroll
    for (int j = 0; j < kTiles; j++)
#pragma unroll
      for (int i = 0; i < 4; i++) {
        const auto& constants = i < 2 ? low : high;
        float v = sums[j][i];
        if constexpr (kScaled) v = v * constants.correction * constants.factor;
        if constexpr (reads_places<OfTail>) {
          const int column = j * 8 + lane % 4 * 2 + i % 2, c = channel + i / 2 * 8;
          const store::Place place = where(patch.position + column);
          if (column >= patch.columns || !place.real || c >= kChannelsOut) continue;
          const int64_t of = (int64_t(where.n) * kChannelsOut + c) * where.results() + place.s;
          results[j][i] = tail_of(tail, v, constants.channel, of);
        } else {
          results[j][i] = tail_of(tail, v, constants.channel, 0);
        }
      }
  }

  static __device__ __forceinline__ void consume(const Arguments& args, Pipe next, uint8_t* shared, uint8_t* stages) {
    const int warp = threadIdx.x / 32 - 4, consumer = warp / 4;
    uint8_t* const staging = shared + kStagingAt + warp * kWarpBytes;
#pragma unroll 1
    for (int unit = blockIdx.x; unit < units(args); unit += gridDim.x) {
      const Tile tile(args.at, unit);
      Lattices where{args.at, tile.n};
      store::Patch patch;
      patch.position = tile.position + (kHalves ? consumer * kColumns : 0);
      patch.columns = min(args.at.positions() - patch.position, kColumns);
      patch.channel = tile.channel_block * kBlockChannels + (kHalves ? 0 : consumer * 64) + warp % 4 * 16;
      float sums[kTiles][4];
      multiply_tile(sums, next, shared_address(stages), consumer, args.at);
      if (patch.channel >= kChannelsOut) continue;
      if constexpr (More::kExists) {
        float results[kTiles][4] = {};
        finish_tile(args, args.more.tail, sums, results, patch, where);
        args.more.out.store(staging, results, patch, where, kChannelsOut);
      }
      finish_tile(args, args.tail, sums, sums, patch, where);
      args.out.store(staging, sums, patch, where, kChannelsOut);
    }
  }

  static __device__ __forceinline__ void run(const Arguments& args) {
    extern __shared__ __align__(1024) uint8_t stream_shared[];
    const Pipe pipe(stream_shared, args.stages);
    if (threadIdx.x == 0) pipe.initialize();
    __syncthreads();
    if (threadIdx.x < kWarpgroup) {
      give_registers_but<kProducerRegisters>();
      if (threadIdx.x == 0) produce(args, pipe, stream_shared + kStagesAt);
    } else {
      take_registers_to<kConsumerRegisters>();
      consume(args, pipe, stream_shared, stream_shared + kStagesAt);
    }
  }

#endif
};

template <class Loop>
__global__ void __launch_bounds__(Loop::kThreads, 1)
    convolve_views_kernel(const __grid_constant__ typename Loop::Arguments args) {
#if TENSOR_CORE_WGMMA
  Loop::run(args);
#endif
}

template <class Loop> void convolve_views(const typename Loop::Arguments& args, cudaStream_t stream) {
  allow_shared<convolve_views_kernel<Loop>>();
  const int blocks = max(device_attribute(cudaDevAttrMultiProcessorCount), 1);
  const int shared = Loop::kStagesAt + args.stages * Loop::stage_bytes(args.at);
  convolve_views_kernel<Loop><<<min(blocks, Loop::units(args)), Loop::kThreads, shared, stream>>>(args);
}

}  // namespace conv
