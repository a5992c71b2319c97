// A convolution as an implicit GEMM by wgmma, on compute capability 9.0 (sm_90a), whose operands stream
// through shared memory: M = channels out, N = positions of all samples, one behind the other, K = groups of
// up to 64 channels in × taps.
//
// Blocks are persistent, and share all tiles. Three warpgroups of a block are specialised:
//   producer   one thread, which has the copy engine fill the stages of a pipeline: of a step of K the
//              weights, as they are packed, and what the tap meets at the positions. Padding, stride and
//              dilation are the copy engine's affair (core/tensor_map.cuh), which may take planes as they
//              lie, too, where a filter has one tap
//   consumers  two of them multiply: 64 channels each at all positions, or, of a block of 64 channels, half
//              of the positions each; then tail and sink
// Where two blocks are a cluster, they compute different channels at the same positions, or the same channels
// at different ones. Each fetches half of what both need, for both: what a multiprocessor reads of the L2
// cache is the limit otherwise, 48 bytes a cycle for 128 channels × 256 positions, with that 32 or 40.
//
// Where windows of v are pooled, positions are windows, and a tile is computed once for each of a window's
// elements, all of which a thread then has.
//
// Positions, and tiles, are counted in int.
#pragma once
#include "conv/exact.cuh"
#include "conv/stream_tile.cuh"
#include "conv/wide_sm90_stages.cuh"

namespace conv {

template <class Conv, class Pool, class Tail, class Out, class More, int kSharedLimit>
struct StreamSm90 : Conv {
  using Arguments = StreamArguments<Conv, Tail, Out, More>;
  using Conv::kBlockChannels, Conv::kChannelBlocks, Conv::kChannelsOut, Conv::kCluster, Conv::kColumns,
      Conv::kCopies, Conv::kCopiesOfLine, Conv::kDeep, Conv::kDepth, Conv::kGroup, Conv::kGroups,
      Conv::kImageBytes, Conv::kInPlanes, Conv::kLastDeep, Conv::kLastSlabs, Conv::kLead, Conv::kProducts,
      Conv::kScaled, Conv::kShares, Conv::kSlabs, Conv::kSteps, Conv::kTilePositions, Conv::kWeightBytes;
  using typename Conv::Filter, typename Conv::operand_t;
  using Image = std::conditional_t<kInPlanes, PlanesMap, ImageMap<Conv::kDims, kGroup>>;

  static constexpr int kThreads = kWarpgroup * (1 + kConsumers);
  static constexpr int kProducerRegisters = 40, kConsumerRegisters = 232;
  static constexpr bool kHalves = kBlockChannels == 64;  // has a consumer half of a tile's positions?
  static constexpr int kTiles = kColumns / 8;            // of a consumer, 8 positions each
  static constexpr bool kPools = Pool::kArea > 1;
  // Do a cluster's blocks differ in their channels? Else in their positions.
  static constexpr bool kByChannels = kCluster > 1 && kChannelBlocks % kCluster == 0;
  static constexpr int kChannelUnits = kByChannels ? kChannelBlocks / kCluster : kChannelBlocks;

  static constexpr int kFetched =
      kByChannels ? kTilePositions / kCluster : kTilePositions;  // by a block, of an image

  // Shared memory: stages of weights and image, kSlabs each; staging, barriers.
  static constexpr int kImageAt = kSlabs * kWeightBytes, kStageBytes = kImageAt + kSlabs * kImageBytes;
  static constexpr int kWarpBytes =
      Out::kWarpBytes > More::Out::kWarpBytes ? Out::kWarpBytes : More::Out::kWarpBytes;
  static constexpr int kStagingBytes = kConsumers * 4 * kWarpBytes;
  static constexpr int kStages = (kSharedLimit - kStagingBytes - 256) / kStageBytes;
  static constexpr int kStagingAt = kStages * kStageBytes, kBarriersAt = kStagingAt + kStagingBytes;
  static constexpr int kSharedBytes = kBarriersAt + 2 * kStages * 8;
  static_assert(kStages >= 3 && kStages <= 16 && kStageBytes % 1024 == 0 && kLead < kStages);

  // Barriers by number: the first consumer has a lead in a tile; the second one has begun it.
  static constexpr int kLeads = 1, kFollows = 2;

  // x, operands of extents `sizes`, a pixel of a row behind the other, `pitch` of them.
  static Image image(const operand_t* x, int64_t N, const int64_t (&sizes)[3], int pitch,
                     const int (&taps)[3], const Walk& walk) {
    if constexpr (kInPlanes) return planes_map(x, N, Conv::kChannelsIn, sizes[0] * sizes[1] * sizes[2]);
    else
      return image_map<Conv::kDims, kGroup>(x, N, sizes[0], sizes[1], pitch, Conv::kPixel, taps, walk,
                                            kFetched, Conv::kFolded);
  }

  // Units of work, each a tile for every block of a cluster; channels first. In planes none has positions of
  // two samples.
  static HOST_DEVICE int tiles_of_sample(const Arguments& args) {
    return ceil_div(args.sample(), kTilePositions);
  }
  static HOST_DEVICE int units(const Arguments& args) {
    const int tiles = kInPlanes ? args.N * tiles_of_sample(args) : ceil_div(args.positions(), kTilePositions);
    return kChannelUnits * kShares * ceil_div(tiles, kByChannels ? 1 : kCluster);
  }

#if TENSOR_CORE_WGMMA

  static constexpr uint16_t kAll = (1 << kCluster) - 1;  // blocks of a cluster

  // A block's tile, positions up to `end`, and which share of its steps, `from` … `to`. In planes: of sample
  // n, from in_sample on; maybe none.
  struct Tile {
    int channel_block, position, share, end, n = 0, in_sample = 0;
    __device__ __forceinline__ Tile(const Arguments& args, int unit, int rank)
        : channel_block(unit % kChannelUnits * (kByChannels ? kCluster : 1) + (kByChannels ? rank : 0)),
          share(unit / kChannelUnits % kShares), end(args.positions()) {
      const int tile =
          unit / (kChannelUnits * kShares) * (kByChannels ? 1 : kCluster) + (kByChannels ? 0 : rank);
      if constexpr (kInPlanes) {
        const int S = args.sample(), of_sample = tiles_of_sample(args);
        n = tile / of_sample, in_sample = (tile - n * of_sample) * kTilePositions;
        position = n * S + in_sample, end = n < args.N ? (n + 1) * S : 0;
      } else position = tile * kTilePositions;
    }
    __device__ __forceinline__ int from() const { return share * kSteps / kShares; }
    __device__ __forceinline__ int to() const { return (share + 1) * kSteps / kShares; }
  };

  // `full` once a stage's bytes are there, `empty` once the warps of all consumers of a cluster have read it.
  struct Barriers {
    uint64_t *full, *empty;
    __device__ __forceinline__ explicit Barriers(uint8_t* shared)
        : full(reinterpret_cast<uint64_t*>(shared + kBarriersAt)), empty(full + kStages) {}
    __device__ __forceinline__ void initialize() const {
      for (int i = 0; i < kStages; i++)
        tensor_core::initialize(full + i, 1), tensor_core::initialize(empty + i, kCluster * kConsumers * 4);
      publish_barriers();
    }
    __device__ __forceinline__ void release(int stage) const {
      const int lane = threadIdx.x % 32;
      if (kCluster == 1 && lane == 0) arrive(empty + stage);
      if (kCluster > 1 && lane < kCluster) arrive_at(empty + stage, lane);
    }
  };

  // Of a group of channels from `channel` on what a tile meets, 64 positions behind the other, or the block's
  // part of that, for all of a cluster.
  static __device__ __forceinline__ void fetch_planes(uint8_t* there, const Tile& tile, const Image& planes,
                                                      uint64_t* full, int channel, int rank) {
    constexpr int kFetchers = kByChannels ? kCluster : 1;
#pragma unroll 1
    for (int i = kByChannels ? rank : 0; i < kTilePositions / 64; i += kFetchers) {
      uint8_t* const to = there + i * 64 * kGroup * 2;
      if constexpr (kByChannels)
        copy_planes(to, planes, full, channel, tile.in_sample + i * 64, tile.n, kAll);
      else copy_planes(to, planes, full, channel, tile.in_sample + i * 64, tile.n);
    }
  }

  // One thread: a stage begins, with the weights of a step.
  static __device__ __forceinline__ void begin_stage(const Arguments& args, const Tile& tile, int step,
                                                     uint8_t* stage, uint64_t* full, int rank) {
    const int slabs = step < kSteps - 1 ? kSlabs : kLastSlabs, bytes = slabs * kWeightBytes;
    const uint8_t* const weights =
        reinterpret_cast<const uint8_t*>(args.packed_weight) +
        (int64_t(tile.channel_block) * (kGroups * kCopies) + int64_t(step) * kSlabs) * kWeightBytes;
    arrive(full, slabs * (kWeightBytes + kImageBytes));
    if constexpr (kCluster > 1 && !kByChannels)
      copy_bulk(stage + rank * (bytes / kCluster), weights + rank * (bytes / kCluster), bytes / kCluster,
                full, kAll);
    else copy_bulk(stage, weights, bytes, full);
  }

  // One thread: fills stages, tile by tile, step by step.
  static __device__ __forceinline__ void produce(const Arguments& args, const Image& image,
                                                 const Barriers& barriers, uint8_t* shared, int rank) {
    PipelineState<kStages> next;
    const int clusters = gridDim.x / kCluster, S = args.sample();
    for (int unit = blockIdx.x / kCluster; unit < units(args); unit += clusters) {
      const Tile tile(args, unit, rank);
      const int from = tile.position + (kByChannels ? rank * kFetched : 0), row = from / args.OW;
      const auto begins = [&](int d, int at) { return at * args.walk.stride[d] - args.walk.before[d]; };
      const Pixel first{from / S, begins(0, row / args.OH % args.OD), begins(1, row % args.OH),
                        begins(2, from % args.OW)};
#pragma unroll 1
      for (int i = tile.from(); i < (Pool::kArea - 1) * kSteps + tile.to(); i++, next.advance()) {
        const int element = i / kSteps, step = i % kSteps;
        uint8_t* const stage = shared + next.stage * kStageBytes;
        uint64_t* const full = barriers.full + next.stage;
        const int slabs = step < kSteps - 1 ? kSlabs : kLastSlabs;
        await(barriers.empty + next.stage, next.parity ^ 1);
        begin_stage(args, tile, step, stage, full, rank);
#pragma unroll 1
        for (int j = 0; j < slabs; j++) {
          const int slab = step * kSlabs + j, copy = slab % kCopies;
          const auto offset = [&](int d, int of_tap, int of_element) {
            return uint16_t(of_tap * args.walk.dilation[d] + of_element * args.step[d]);
          };
          const int line = copy / kCopiesOfLine, row = element / Pool::kWidth;
          const Offset to{offset(0, line / Filter::kHeight, row / Pool::kHeight),
                          offset(1, line % Filter::kHeight, row % Pool::kHeight),
                          offset(2, copy % kCopiesOfLine, element % Pool::kWidth)};
          uint8_t* const there = stage + kImageAt + j * kImageBytes;
          if constexpr (kInPlanes) fetch_planes(there, tile, image, full, slab * kGroup, rank);
          else if constexpr (kByChannels)
            copy_image(there + rank * kFetched * kGroup * 2, image, full, slab / kCopies * kGroup, first, to,
                       kAll);
          else copy_image(there, image, full, slab / kCopies * kGroup, first, to);
        }
      }
    }
  }

  // sums += a step's products, of kOfStep slabs of kOfSlab sixteens of channels each, in the background.
  template <int kOfSlab, int kOfStep>
  static __device__ __forceinline__ void multiply_step(float (&sums)[kTiles][4], uint64_t weights,
                                                       uint64_t image, bool accumulate) {
    begin_products();
#pragma unroll
    for (int i = 0; i < kOfStep * kOfSlab; i++)
#pragma unroll
      for (int product = 0; product < kProducts; product++) {
        const int slab = i / kOfSlab, at = i % kOfSlab * (kDepth / 8);  // units
        multiply_add<operand_t, kInPlanes>(
            sums, weights + slab * (kWeightBytes / 16) + at + Conv::of_weight(product),
            image + slab * (kImageBytes / 16) + (kInPlanes ? i % kOfSlab * 128 : at) +
                Conv::of_image(product),
            accumulate || i + product > 0);
      }
    commit_products();
  }

  // The sums of a tile, whose steps lie in the stages from `next` on.
  static __device__ __forceinline__ void multiply_tile(float (&sums)[kTiles][4], const Tile& tile,
                                                       const Barriers& barriers, PipelineState<kStages>& next,
                                                       uint64_t weights, uint64_t image, bool leads) {
    const int from = tile.from(), to = tile.to();
    int last = -1;                 // the stage that products still read
    int left = leads ? kLead : 0;  // steps until there is a lead
    if (kLead > 0 && !leads) {
      sync_threads<kConsumers * kWarpgroup>(kLeads);
      signal_threads<kConsumers * kWarpgroup>(kFollows);
    }
    const auto step = [&](auto deep, auto count, bool accumulate) {
      const int offset = next.stage * (kStageBytes / 16);
      await(barriers.full + next.stage, next.parity);
      constexpr int kOfSlab = decltype(deep)::value, kOfStep = decltype(count)::value;
      if constexpr (Conv::kSplit) {
        // A tensor core's sums lose digits, so that those of a step are added by others.
        float own[kTiles][4];
        multiply_step<kOfSlab, kOfStep>(own, weights + offset, image + offset, false);
        if (kLead > 0 && left > 0 && --left == 0) signal_threads<kConsumers * kWarpgroup>(kLeads);
        await_products<0>();
        hold(own);
        barriers.release(next.stage);
#pragma unroll
        for (int j = 0; j < kTiles; j++)
#pragma unroll
          for (int k = 0; k < 4; k++) sums[j][k] = accumulate ? sums[j][k] + own[j][k] : own[j][k];
        next.advance();
        return;
      }
      multiply_step<kOfSlab, kOfStep>(sums, weights + offset, image + offset, accumulate);
      if (kLead > 0 && left > 0 && --left == 0) signal_threads<kConsumers * kWarpgroup>(kLeads);
      await_products<1>();
      if (last >= 0) barriers.release(last);
      last = next.stage;
      next.advance();
    };
    // Steps of one kind, then those of the last group or the last taps.
    constexpr int kRest = kLastSlabs < kSlabs ? 1 : kSlabs == 1 && kLastDeep < kDeep ? kCopies : 0;
    using Deep = std::integral_constant<int, kSlabs == 1 ? kDeep : kLastDeep>;
    using Last = std::integral_constant<int, kLastDeep>;
#pragma unroll 1
    for (int i = from; i < min(to, kSteps - kRest); i++)
      step(Deep{}, std::integral_constant<int, kSlabs>{}, i > from);
    if constexpr (kRest > 0) {
#pragma unroll 1
      for (int i = max(from, kSteps - kRest); i < to; i++)
        step(Last{}, std::integral_constant<int, kLastSlabs>{}, i > from);
    }
    if constexpr (!Conv::kSplit) {
      await_products<0>();
      hold(sums);
      barriers.release(last);
    }
    // Else the lead could grow to two tiles.
    if (kLead > 0 && leads) sync_threads<kConsumers * kWarpgroup>(kFollows);
  }

  static __device__ __forceinline__ void consume(const Arguments& args, const Barriers& barriers,
                                                 uint8_t* shared, int rank) {
    const int warp = threadIdx.x / 32 - 4, consumer = warp / 4;
    constexpr int kRow = kGroup * 2;  // bytes
    const uint32_t address = shared_address(shared);
    const uint64_t weights = describe_swizzled<kGroup>(address + (kHalves ? 0 : consumer * 64 * kRow));
    const uint32_t own = address + kImageAt + (kHalves ? consumer * kColumns * kRow : 0);
    const uint64_t image = kInPlanes ? describe_swizzled_transposed(own) : describe_swizzled<kGroup>(own);
    PipelineState<kStages> next;
    uint8_t* const staging = shared + kStagingAt + warp * kWarpBytes;
    const int clusters = gridDim.x / kCluster;
#pragma unroll 1
    for (int unit = blockIdx.x / kCluster; unit < units(args); unit += clusters) {
      const Tile tile(args, unit, rank);
      store::Patch patch;
      patch.position = tile.position + (kHalves ? consumer * kColumns : 0);
      patch.columns = min(tile.end - patch.position, kColumns);
      patch.channel = tile.channel_block * kBlockChannels + (kHalves ? 0 : consumer * 64) + warp % 4 * 16;
      float sums[kTiles][4];
      if constexpr (!kPools) {
        multiply_tile(sums, tile, barriers, next, weights, image, consumer == 0);
        if (patch.channel >= kChannelsOut) continue;
        if constexpr (More::kExists) {
          float results[kTiles][4] = {};
          apply_tail(args, args.more.tail, sums, results, patch);
          args.more.out.store(staging, results, patch, store::Flat{args.sample()}, kChannelsOut);
        }
        apply_tail(args, args.tail, sums, sums, patch);
        if constexpr (kShares > 1) {
          Out out = args.out;
          out.y += tile.share * (int64_t(args.positions()) * kChannelsOut);
          out.store(staging, sums, patch, store::Flat{args.sample()}, kChannelsOut);
        } else args.out.store(staging, sums, patch, store::Flat{args.sample()}, kChannelsOut);
      } else {
        static_assert(kShares == 1, "windows of v, not of its terms");
        float results[kTiles][4] = {};
#pragma unroll 1
        for (int element = 0; element < Pool::kArea; element++) {
          multiply_tile(sums, tile, barriers, next, weights, image, consumer == 0);
          if (patch.channel >= kChannelsOut) continue;
          pool_tile<Pool>(args, sums, results, patch, element);
        }
        if (patch.channel < kChannelsOut)
          args.out.store(staging, results, patch, store::Flat{args.sample()}, kChannelsOut);
      }
    }
  }

  static __device__ __forceinline__ void run(const Arguments& args, const Image& image) {
    extern __shared__ __align__(1024) uint8_t stream_shared[];
    const Barriers barriers(stream_shared);
    const int rank = kCluster > 1 ? cluster_rank() : 0;
    if (threadIdx.x == 0) barriers.initialize();
    if constexpr (kCluster > 1) meet_cluster();
    else __syncthreads();
    if (threadIdx.x < kWarpgroup) {
      give_registers_but<kProducerRegisters>();
      if (threadIdx.x == 0) produce(args, image, barriers, stream_shared, rank);
      __syncwarp();
    } else {
      take_registers_to<kConsumerRegisters>();
      consume(args, barriers, stream_shared, rank);
    }
    // No block ends while another may still write to it.
    if constexpr (kCluster > 1) meet_cluster();
  }

#endif
};

template <class Loop>
__global__ void __launch_bounds__(Loop::kThreads, 1)
    convolve_stream_kernel(const __grid_constant__ typename Loop::Image image,
                           const __grid_constant__ typename Loop::Arguments args) {
#if TENSOR_CORE_WGMMA
  await_previous_kernel();
  Loop::run(args, image);
#endif
}

template <class Loop>
void convolve_stream(const typename Loop::Image& image, const typename Loop::Arguments& args,
                     cudaStream_t stream) {
  allow_shared<convolve_stream_kernel<Loop>>();
  const int clusters = max(device_attribute(cudaDevAttrMultiProcessorCount) / Loop::kCluster, 1);
  cudaLaunchAttribute how[2]{};
  how[0].id = cudaLaunchAttributeClusterDimension;
  how[0].val.clusterDim = {unsigned(Loop::kCluster), 1, 1};
  how[1].id = cudaLaunchAttributeProgrammaticStreamSerialization;
  how[1].val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(min(clusters, Loop::units(args)) * Loop::kCluster);
  config.blockDim = dim3(Loop::kThreads);
  config.dynamicSmemBytes = Loop::kSharedBytes, config.stream = stream;
  config.attrs = how, config.numAttrs = 2;
  cudaLaunchKernelEx(&config, convolve_stream_kernel<Loop>, image, args);
}

}  // namespace conv
