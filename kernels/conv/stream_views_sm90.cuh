// A convolution as an implicit GEMM by wgmma, as conv/stream_sm90.cuh's, of views of patches
// (conv/stream_views.cuh): M = channels out, N = positions of one sample, K = planes of a filter, each with
// all of its taps and channels.
//
// Blocks are persistent, and share all tiles; one keeps the weights of its 64 channels. Teams, a warpgroup
// each, take tiles in turn, so that some compute tails and store while another multiplies. For each team a
// thread has what a plane's taps meet at its tiles' positions copied to the stages of a pipeline of its own.
#pragma once
#include "conv/stream_sm90.cuh"
#include "conv/stream_views.cuh"

namespace conv {

template <class Operands, class Out, class More, class Tail> struct ViewsArguments {
  Out out;
  More more;
  const uint4 *packed_weight, *packed;
  const int32_t* exponents;  // (kPaddedOut): weights are scaled by 2^exponent
  Scales<Operands> scales;   // of samples
  Tail tail;
  int N, teams, stages;  // stages of a team
  Lattice at;
};

template <class Conv, class Tail, class Out, class More, int kSharedLimit> struct ViewsSm90 : Conv {
  using Arguments = ViewsArguments<typename Conv::Operands, Out, More, Tail>;
  using Conv::kBlockChannels, Conv::kChannelBlocks, Conv::kChannelsOut, Conv::kProducts, Conv::kScaled,
      Conv::kSplit, Conv::kSteps, Conv::kTapsOfStep, Conv::kTilePositions, Conv::kUnits, Conv::kWeightBytes;
  using typename Conv::Filter, typename Conv::operand_t;
  static_assert(!Out::kReduces && !More::Out::kReduces, "results that are stored");

  // Teams at most: as many as registers, and shared memory, have room for.
  static constexpr int kTeams = kSplit ? 2 : 4, kThreads = kWarpgroup * (1 + kTeams);
  // Together no more than a launch of so many threads gets, 65,536 shared out by eights; nor do fewer teams
  // take more than theirs.
  static constexpr int kProducerRegisters = kSplit ? 40 : 32, kTeamRegisters = kSplit ? 232 : 112;
  static_assert(kProducerRegisters + kTeams * kTeamRegisters <= (1 + kTeams) * (65536 / kThreads / 8 * 8),
                "or some wait for ever");
  static constexpr int kTiles = kTilePositions / 8;  // of 8 positions
  // A tensor core's sums lose digits, so that those of so many products are added by others, where operands
  // are split.
  static constexpr int kAtOnce = kSplit ? 12 : kProducts;

  // Shared memory: barriers, weights, staging, stages.
  static constexpr int kMostStages = 4;  // of a team
  static constexpr int kWarpBytes =
      Out::kWarpBytes > More::Out::kWarpBytes ? Out::kWarpBytes : More::Out::kWarpBytes;
  static constexpr int kWeightsAt = 512, kStagingAt = kWeightsAt + kSteps * kWeightBytes;
  static_assert((2 * kMostStages * kTeams + 1) * 8 <= kWeightsAt);
  static HOST_DEVICE int stages_at(int teams) {
    return kStagingAt + (teams * 4 * kWarpBytes + 127) / 128 * 128;
  }
  static HOST_DEVICE int stage_bytes(const Lattice& at) { return (kUnits * at.patch * 16 + 127) / 128 * 128; }
  // Of so many teams; 0: there is no room for one of each.
  static HOST_DEVICE int stages(const Lattice& at, int teams) {
    const int fit = (kSharedLimit - stages_at(teams)) / (stage_bytes(at) * teams);
    return fit < kMostStages ? max(fit, 0) : kMostStages;
  }
  static int teams(const Lattice& at) {
    int most = kTeams;
    while (most > 1 && stages(at, most) == 0) most--;
    return most;
  }

  static HOST_DEVICE int tiles(const Lattice& at) {
    return ceil_div(at.positions(), kTilePositions);
  }  // of a sample

#if TENSOR_CORE_WGMMA

  // A team's stages: `full` once a stage's bytes are there, `empty` once the team's warps have read it.
  struct Pipe {
    uint64_t* const barriers;
    const int count, bytes, first;
    int stage = 0;
    uint32_t parity = 0;
    __device__ __forceinline__ Pipe(const Arguments& args, uint8_t* shared, int team)
        : barriers(reinterpret_cast<uint64_t*>(shared) + 2 * kMostStages * team), count(args.stages),
          bytes(stage_bytes(args.at)), first(stages_at(args.teams) + team * count * bytes) {}
    __device__ __forceinline__ uint64_t* full() const { return barriers + stage; }
    __device__ __forceinline__ uint64_t* empty(int i) const { return barriers + kMostStages + i; }
    __device__ __forceinline__ int at() const { return first + stage * bytes; }
    __device__ __forceinline__ void initialize() const {
      for (int i = 0; i < count; i++)
        tensor_core::initialize(barriers + i, 1), tensor_core::initialize(empty(i), 4);
    }
    __device__ __forceinline__ void release(int i) const {
      if (threadIdx.x % 32 == 0) arrive(empty(i));
    }
    __device__ __forceinline__ void advance() {
      if (++stage == count) stage = 0, parity ^= 1;
    }
  };
  // Complete once the weights are there.
  static __device__ __forceinline__ uint64_t* weights_barrier(uint8_t* shared) {
    return reinterpret_cast<uint64_t*>(shared) + 2 * kMostStages * kTeams;
  }

  // The block's channels, and its tiles, one by one.
  struct Tile {
    int channel_block, index, n, position;
    __device__ __forceinline__ Tile(const Arguments& args, int number)
        : channel_block(blockIdx.x % kChannelBlocks) {
      index = blockIdx.x / kChannelBlocks + number * (gridDim.x / kChannelBlocks);
      const int of_sample = tiles(args.at);
      n = index / of_sample, position = (index - n * of_sample) * kTilePositions;
    }
    __device__ __forceinline__ bool exists(const Arguments& args) const { return n < args.N; }
  };

  // One thread.
  static __device__ __forceinline__ void fetch_weights(const Arguments& args, uint8_t* shared) {
    const int channel_block = blockIdx.x % kChannelBlocks;
    arrive(weights_barrier(shared), kSteps * kWeightBytes);
    for (int step = 0; step < kSteps; step++)
      copy_bulk(shared + kWeightsAt + step * kWeightBytes,
                args.packed_weight + int64_t(channel_block * kSteps + step) * (kWeightBytes / 16),
                kWeightBytes, weights_barrier(shared));
  }

  // One thread for a team: fills its stages, tile by tile, step by step.
  static __device__ __forceinline__ void produce(const Arguments& args, uint8_t* shared, int team) {
    const Lattice& at = args.at;
    Pipe next(args, shared, team);
    for (int number = team;; number += args.teams) {
      const Tile tile(args, number);
      if (!tile.exists(args)) break;
#pragma unroll 1
      for (int step = 0; step < kSteps; step++, next.advance()) {
        uint8_t* const stage = shared + next.at();
        await(next.empty(next.stage), next.parity ^ 1);
        arrive(next.full(), kUnits * at.patch * 16);
        const uint4* const from =
            args.packed + int64_t(tile.n) * kUnits * at.sample + tile.position + step * at.taps[0];
#pragma unroll 1
        for (int unit = 0; unit < kUnits; unit++)
          copy_bulk(stage + unit * at.patch * 16, from + int64_t(unit) * at.sample, at.patch * 16,
                    next.full());
      }
    }
  }

  // sums += products kFirst to kLast of a step, in the background.
  template <int kFirst, int kLast>
  static __device__ __forceinline__ void multiply(float (&sums)[kTiles][4], uint32_t weights, uint32_t patch,
                                                  const Lattice& at, bool accumulate) {
    int pixels = at.patch, down = at.taps[1], across = at.taps[2];
    asm volatile(""
                 : "+r"(pixels), "+r"(down), "+r"(across));  // else all addresses are kept from step to step
    begin_products();
#pragma unroll
    for (int product = kFirst; product < kLast; product++) {
      const auto address = [&](int second) {
        const Term term = Conv::term(product, second);
        return (Conv::unit(term) * pixels + term.tap / Filter::kWidth * down +
                term.tap % Filter::kWidth * across) *
               16;
      };
      const int first = address(0);
      multiply_add<operand_t>(sums,
                              describe(weights + product * (2 * kBlockChannels * 16), kBlockChannels * 16),
                              describe(patch + first, address(1) - first), accumulate || product > kFirst);
    }
    commit_products();
  }
  template <int kFirst>
  static __device__ __forceinline__ void multiply_split(float (&sums)[kTiles][4], uint32_t weights,
                                                        uint32_t patch, const Lattice& at, bool accumulate) {
    if constexpr (kFirst < kProducts) {
      constexpr int kLast = kFirst + kAtOnce < kProducts ? kFirst + kAtOnce : kProducts;
      float own[kTiles][4];
      multiply<kFirst, kLast>(own, weights, patch, at, false);
      await_products<0>();
      hold(own);
#pragma unroll
      for (int i = 0; i < kTiles * 4; i++) {
        float& sum = sums[i / 4][i % 4];
        sum = accumulate ? sum + own[i / 4][i % 4] : own[i / 4][i % 4];
      }
      multiply_split<kLast>(sums, weights, patch, at, true);
    }
  }

  // The sums of a tile, whose steps lie in the stages from `next` on.
  static __device__ __forceinline__ void multiply_tile(float (&sums)[kTiles][4], Pipe& next, uint32_t shared,
                                                       const Lattice& at) {
    int last = -1;  // the stage that products still read
#pragma unroll 1
    for (int step = 0; step < kSteps; step++, next.advance()) {
      await(next.full(), next.parity);
      const uint32_t weights = shared + kWeightsAt + step * kWeightBytes, patch = shared + next.at();
      if constexpr (kSplit) {
        multiply_split<0>(sums, weights, patch, at, step > 0);
        next.release(next.stage);
      } else {
        multiply<0, kProducts>(sums, weights, patch, at, step > 0);
        if (next.count == 1) {  // of which the next step waits for this one's products
          await_products<0>();
          next.release(0);
          continue;
        }
        await_products<1>();
        if (last >= 0) next.release(last);
        last = next.stage;
      }
    }
    if constexpr (!kSplit) {
      await_products<0>();
      hold(sums);
      if (last >= 0) next.release(last);
    }
  }

  // tail(v) of a warp's channels from patch.channel on, to a sink.
  template <class OfTail, class To>
  static __device__ __forceinline__ void finish_tile(const Arguments& args, const OfTail& tail, const To& to,
                                                     uint8_t* staging, const float (&sums)[kTiles][4],
                                                     const store::Patch& patch, const Lattices& where) {
    constexpr int kTilesAtOnce = To::kTilesAtOnce;
    const int lane = threadIdx.x % 32, channel = patch.channel + lane / 4;
    const auto constants_of = [&](int c) {
      ChannelConstants<OfTail> constants(tail, where.n, c, c < kChannelsOut);
      if (kScaled) constants.set_exponent(-args.exponents[c] - args.scales.last(where.n));
      return constants;
    };
    const auto low = constants_of(channel), high = constants_of(channel + 8);
#pragma unroll
    for (int first = 0; first < kTiles; first += kTilesAtOnce) {
      const store::Patch part{patch.position + first * 8, patch.columns - first * 8, patch.channel,
                              patch.channels};
      if (part.columns <= 0) break;
      float results[kTilesAtOnce][4] = {};
#pragma unroll
      for (int j = 0; j < kTilesAtOnce; j++) {
        // Four values at a time: for what a tail keeps of more there is no room in registers.
        float v[1][4], (&result)[1][4] = reinterpret_cast<float (&)[1][4]>(results[j]);
#pragma unroll
        for (int i = 0; i < 4; i++) v[0][i] = sums[first + j][i];
        hold(v);
#pragma unroll
        for (int i = 0; i < (Conv::kSpreads ? 2 : 4); i++) {  // other rows have no channel
          const auto& constants = i < 2 ? low : high;
          if constexpr (kScaled) v[0][i] = v[0][i] * constants.correction * constants.factor;
          if constexpr (reads_places<OfTail>) {
            const int column = j * 8 + lane % 4 * 2 + i % 2, c = channel + i / 2 * 8;
            const store::Place place = where(part.position + column);
            if (column >= part.columns || !place.real || c >= kChannelsOut) continue;
            const int64_t of = (int64_t(where.n) * kChannelsOut + c) * where.results() + place.s;
            result[0][i] = tail_of(tail, v[0][i], constants.channel, of);
          } else {
            result[0][i] = tail_of(tail, v[0][i], constants.channel, 0);
          }
        }
        hold(result);
      }
      to.store(staging, results, part, where, kChannelsOut);
    }
  }

  static __device__ __forceinline__ void compute(const Arguments& args, uint8_t* shared) {
    const int warp = threadIdx.x / 32 - 4, team = warp / 4;
    Pipe next(args, shared, team);
    uint8_t* const staging = shared + kStagingAt + warp * kWarpBytes;
    await(weights_barrier(shared), 0);
    for (int number = team;; number += args.teams) {
      const Tile tile(args, number);
      if (!tile.exists(args)) break;
      const Lattices where{args.at, tile.n};
      store::Patch patch;
      patch.position = tile.position,
      patch.columns = min(args.at.positions() - tile.position, kTilePositions);
      patch.channels = Conv::kOfWarp,
      patch.channel = tile.channel_block * kBlockChannels + warp % 4 * Conv::kOfWarp;
      float sums[kTiles][4];
      multiply_tile(sums, next, shared_address(shared), args.at);
      if (patch.channel >= kChannelsOut) continue;
      if constexpr (More::kExists)
        finish_tile(args, args.more.tail, args.more.out, staging, sums, patch, where);
      finish_tile(args, args.tail, args.out, staging, sums, patch, where);
    }
  }

  static __device__ __forceinline__ void run(const Arguments& args) {
    extern __shared__ __align__(1024) uint8_t stream_shared[];
    if (threadIdx.x == 0) {
      for (int team = 0; team < args.teams; team++) Pipe(args, stream_shared, team).initialize();
      tensor_core::initialize(weights_barrier(stream_shared), 1);
      publish_barriers();
    }
    __syncthreads();
    if (threadIdx.x < kWarpgroup) {
      give_registers_but<kProducerRegisters>();
      if (threadIdx.x == 0) fetch_weights(args, stream_shared);
      if (threadIdx.x % 32 == 0 && threadIdx.x / 32 < args.teams)
        produce(args, stream_shared, threadIdx.x / 32);
    } else {
      take_registers_to<kTeamRegisters>();
      compute(args, stream_shared);
    }
  }

#endif
};

template <class Loop>
__global__ void __launch_bounds__(Loop::kThreads, 1)
    convolve_views_kernel(const __grid_constant__ typename Loop::Arguments args) {
#if TENSOR_CORE_WGMMA
  await_previous_kernel();
  Loop::run(args);
#endif
}

template <class Loop> void convolve_views(const typename Loop::Arguments& args, cudaStream_t stream) {
  allow_shared<convolve_views_kernel<Loop>>();
  // As many for each block of channels.
  const int blocks = min(max(device_attribute(cudaDevAttrMultiProcessorCount) / Loop::kChannelBlocks, 1),
                         args.N * Loop::tiles(args.at));
  const int shared = Loop::stages_at(args.teams) + args.stages * args.teams * Loop::stage_bytes(args.at);
  launch_early_with(convolve_views_kernel<Loop>, blocks * Loop::kChannelBlocks, kWarpgroup * (1 + args.teams),
                    shared, stream, args);
}

}  // namespace conv
