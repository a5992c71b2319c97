// A 2-D convolution of many channels as an implicit GEMM by wgmma, on compute capability 9.0 (sm_90a), which
// reads its source itself.
//
// For one K block of input channels, operands of one part, and weights that find room on a multiprocessor: at
// most 36 products of depth 16 per sum, and kSharedBytes of shared memory (PipelineSm90::fits). x starts at a
// word of 4 bytes, and its rows are whole words. Tiles, and the pixels of a plane, are counted in int.
//
// Transposed it computes the gradient of x, from g, which other producers make or bring
// (grad/wide_input_sm90.cuh: a tile is then 64 channels of a whole row; grad/packed_input.cuh). Both
// consumers have the same channels, and take rows in turn. There are twice as many weights; one copy of most
// of them lies in shared memory, for both.
//
// Blocks are persistent: they share all tiles of 128 pixels evenly. A block walks down strips of rows, so
// that each row of input is read once and serves kKernelH tiles; where tiles of a row are joined, down a band
// of rows at a time. (Whole rows in the stages would take more shared memory than there is.) Its three
// warpgroups are specialised:
//   producer   makes rows of operands in the stages of a pipeline, [channel group][pixel] of 8 channels.
//              There a tap is an offset, because the descriptor of an operand may start at any pixel
//   consumers  two of them, multiply, with most weights in registers; then tail and sinks
//
// float32 is converted under the scale 2^kFirstExponent, which fits almost all inputs, while the largest
// magnitude of each sample is found. A second launch computes again the samples that it did not fit; mostly
// it ends at once.
//
// Bytes at (128, 64, 128, 128), 3×3, 128 channels out: 537 MB read, 1040 MB written. Bound: memory 0.37 ms at
// 4.28 TB/s, 300 GFLOP 0.30 ms.
#pragma once
#include "conv/wide_sm90_pipeline.cuh"
#include "store/grad_mask.cuh"
#include "store/rows.cuh"

namespace conv {

template <class Conv, class Source, class Tail, class Keep, class Out>
struct WideSm90 : PipelineSm90<Conv, Source, Tail, Keep, Out> {
  using Layout = PipelineSm90<Conv, Source, Tail, Keep, Out>;
  using Arguments = conv::Arguments<Conv, Source, Tail, Keep, Out>;
  using Constants = ChannelConstants<Tail>;
  using typename Conv::operand_t;
  using result_t = typename Out::result_t;
  static constexpr bool kJoins = joins<Out> || joins<typename Keep::Rows>;
  using Tiles = typename TilesOf<std::conditional_t<joins<Out>, Out, typename Keep::Rows>>::type;
  static constexpr bool kGuessesScale = Source::kGuessesScale;
  using Conv::kBlockChannels, Conv::kChannelsOut, Conv::kFirstExponent, Conv::kKernelH, Conv::kKernelW,
      Conv::kMTiles, Conv::kPitch, Conv::kRowBytes, Conv::kScaled, Conv::kTapSteps;
  using Layout::kConstantsAt, Layout::kInTurns, Layout::kRegisterSteps, Layout::kSharedConstants,
      Layout::kSharers, Layout::kStages, Layout::kStagingAt, Layout::kSteps, Layout::kWarpBytes,
      Layout::kWeightBytes, Layout::kWeightCopies;

#if TENSOR_CORE_WGMMA

  // Named barriers: consumer c waits on 1 + c for its turn with the tensor cores; its four warps meet on
  // 3 + c.
  static __device__ __forceinline__ void acquire_mma(int consumer) {
    if (kInTurns) sync_threads<2 * kWarpgroup>(1 + consumer);
  }
  static __device__ __forceinline__ void release_mma(int consumer) {
    if (kInTurns) signal_threads<2 * kWarpgroup>(2 - consumer);
  }

  // Consumers multiply in turns, so that one's tail and stores run beside the other's products. The first
  // signal is of the one whose turn it is not, and the last one is taken at the end. (Cases apart, because
  // else the first one spills registers.)
  static __device__ __forceinline__ void begin_turns(int consumer, int begin) {
    if constexpr (kSharers == 1) {
      if (consumer == 1) release_mma(1);
    } else {
      if (consumer == ((begin - 1) & 1)) release_mma(consumer);
    }
  }
  static __device__ __forceinline__ void end_turns(int consumer, int end) {
    if constexpr (kSharers == 1) {
      if (consumer == 0) acquire_mma(0);
    } else {
      if (consumer == (end & 1)) acquire_mma(consumer);
    }
  }

  // The weights of the warp's 16 channels, from `channel` of the block on: those of the first kRegisterSteps
  // products to registers, the others to the consumer's shared memory [step][channel group][channel].
  static __device__ __forceinline__ void load_weights(uint32_t (&in_registers)[kRegisterSteps][4],
                                                      uint8_t* in_shared, const uint4* packed, int channel) {
    const int lane = threadIdx.x % 32, row = channel % 64 + lane / 4;
    const bool writes = kWeightCopies > 1 || threadIdx.x / kWarpgroup == 1;
#pragma unroll
    for (int i = 0; i < kSteps; i++) {
      const uint4 four = packed[((blockIdx.y * kSteps + i) * kMTiles + channel / 16) * 32 + lane];
      const uint32_t fragment[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
      for (int j = 0; j < 4; j++) {
        uint8_t* to =
            in_shared + (((i - kRegisterSteps) * 2 + j / 2) * 64 + row + j % 2 * 8) * 16 + lane % 4 * 4;
        if (i < kRegisterSteps) in_registers[min(i, kRegisterSteps - 1)][j] = fragment[j];
        else if (writes) *reinterpret_cast<uint32_t*>(to) = fragment[j];
      }
    }
    if (kRegisterSteps < kSteps) {
      publish_shared();
      // The weights of all four warps are there.
      if constexpr (kWeightCopies == 1) sync_threads<2 * kWarpgroup>(3);
      else sync_threads<kWarpgroup>(2 + threadIdx.x / kWarpgroup);
    }
  }

  // sums = the products of a tile whose first row lies in stage `first`, in the background.
  static __device__ __forceinline__ void multiply_tile(float (&sums)[16][4],
                                                       const uint32_t (&in_registers)[kRegisterSteps][4],
                                                       const uint8_t* in_shared, const uint8_t* operands,
                                                       int first) {
    begin_products();
#pragma unroll
    for (int kernel_row = 0; kernel_row < kKernelH; kernel_row++) {
      const int stage = first + kernel_row < kStages ? first + kernel_row : first + kernel_row - kStages;
      const uint64_t row = describe(shared_address(operands) + stage * kRowBytes, kPitch * 16);
#pragma unroll
      for (int j = 0; j < kKernelW * kTapSteps; j++) {
        const int i = kernel_row * kKernelW * kTapSteps + j;
        const uint64_t pixels = row + j / kTapSteps + j % kTapSteps * 2 * kPitch;
        if (i < kRegisterSteps)
          multiply_add<operand_t>(sums, in_registers[min(i, kRegisterSteps - 1)], pixels, i > 0);
        else
          multiply_add<operand_t>(
              sums, describe(shared_address(in_shared), 64 * 16) + (i - kRegisterSteps) * 128, pixels);
      }
    }
    commit_products();
  }

  // Multiplies, finishes and hands on the tiles of a warpgroup's 64 channels.
  static __device__ __forceinline__ void consume(const Arguments& args, const Tiles& tiles,
                                                 const Pipeline<kStages>& pipeline, uint8_t* shared,
                                                 bool again) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 - 4;
    const int consumer = warp / 4, turn = consumer % kSharers;
    const int local_channel = consumer / kSharers * 64 + warp % 4 * 16;
    const int channel = blockIdx.y * kBlockChannels + local_channel;
    uint8_t* const staging = shared + kStagingAt + warp * kWarpBytes;
    Constants* const constants = reinterpret_cast<Constants*>(shared + kConstantsAt) + warp * 16;
    uint8_t* const in_shared = shared + kStages * kRowBytes + consumer % kWeightCopies * kWeightBytes;
    uint32_t in_registers[kRegisterSteps][4];
    load_weights(in_registers, in_shared, args.packed_weight, local_channel);

    PipelineState<kStages> oldest, newest;  // of the current tile's rows; newest: the next to wait for
    const auto release = [&] {
      pipeline.consumer_release(oldest);
      oldest.advance();
    };
    const auto await_row = [&] {
      pipeline.consumer_wait(newest);
      newest.advance();
    };
    const int OH = tiles.OH, OW = args.width();
    // Does a channel's next row follow this one in memory, and is it this consumer's?
    const bool runs_on = !Keep::kStores && kSharers == 1 && tiles.strips == 1 && OW >= Out::kSector;
    begin_turns(consumer, tiles.begin);
#pragma unroll 1
    for (int tile = tiles.begin; tile < tiles.end;) {
      const auto place = tiles[tile];
      const int start = tile, stop = tiles.stop(tile, place);
      const bool own_exponent = again || (kScaled && !kGuessesScale);
      const int exponent = own_exponent ? Source::sample_exponent(args.largest[place.n]) : kFirstExponent;
      if (again && exponent == kFirstExponent) {
        tile = stop;
        continue;
      }
      const auto constants_of = [&](int c) {
        Constants constants(args.tail, place.n, c, c < kChannelsOut);
        if (kScaled) constants.set_exponent(-args.exponents[c] - exponent);
        return constants;
      };
      if (kSharedConstants && lane < 16) constants[lane] = constants_of(channel + lane);
      __syncwarp();  // the constants are there
      const int64_t first =
          ((int64_t(place.n) * kChannelsOut + channel) * OH + place.row) * OW + place.column;
      result_t* to = args.out.y + first;
      const int pixels = OW - place.column;
      uint32_t* words =
          args.keep.template at<kChannelsOut>(place.n, channel, place.row, place.column, OH, OW);
#pragma unroll
      for (int i = 0; i < kKernelH - 1; i++) await_row();
#pragma unroll 1
      for (; tile < stop; tile++, to += OW, words += Keep::template row_pitch<kChannelsOut>(OW)) {
        await_row();
        // Joined tiles of a row are the same consumer's.
        if (kSharers > 1 && (kJoins ? place.row + tile - start : tile) % kSharers != turn) {
          release();
          continue;
        }
        float sums[16][4];
        acquire_mma(consumer);
        multiply_tile(sums, in_registers, in_shared, shared, oldest.stage);
        release_mma(consumer);
        const auto ends = [&](const auto& rows) {
          return rows.template ends<kBlockChannels, kSharers == 1>(place, tile - start, local_channel, OW);
        };
        const auto fetch = [&] {
          if constexpr (joins<Out>) Out::fetch(to, staging, int64_t(OH) * OW, pixels, ends(args.out));
        };
        if constexpr (!Keep::kStores) fetch();
        await_products<0>();
        hold(sums);
        release();
        const int low = lane / 4, high = low + 8;
        if constexpr (Keep::kStores) {
          args.keep.store_rows(first + int64_t(tile - start) * OW, staging, sums, place.n, channel,
                               int64_t(OH) * OW, kChannelsOut - channel, pixels, constants[low],
                               constants[high], ends);
          fetch();
        }
        if constexpr (!kSharedConstants) {
          apply<Keep, kScaled>(args.tail, sums, constants_of(channel + low), constants_of(channel + high));
        } else {
          const auto kept = apply<Keep, kScaled>(args.tail, sums, constants[low], constants[high]);
          Keep::template store<kChannelsOut>(words, kept, kChannelsOut - channel, pixels);
        }
        if constexpr (reduces<Out>) {
          if constexpr (Keep::kStores && Out::kWarpBytes > 0) await_bulk_reads();  // of that staging
          args.out.accept(sums, staging,
                          {place.n, place.row + tile - start, channel, place.column, OH, OW, kChannelsOut});
        } else if constexpr (joins<Out>) {
          Out::store(to, staging, sums, int64_t(OH) * OW, kChannelsOut - channel, pixels, ends(args.out));
        } else {
          Out::store(to, staging, sums, int64_t(OH) * OW, kChannelsOut - channel, pixels,
                     runs_on && tile != start, runs_on && tile + 1 != stop);
        }
      }
#pragma unroll
      for (int i = 0; i < kKernelH - 1; i++) release();
      __syncwarp();  // everyone has read the constants of this sample
    }
    end_turns(consumer, tiles.end);
    Out::finish();
    if constexpr (Keep::kStores) Keep::Rows::finish();
  }

  static __device__ __forceinline__ void run(const Arguments& args, bool again) {
    extern __shared__ uint4 all_shared[];
    uint8_t* const shared = reinterpret_cast<uint8_t*>(all_shared);
    const Pipeline<kStages> pipeline(shared + Layout::kBarriersAt);
    const Tiles tiles(args);
    if (threadIdx.x == 0) pipeline.initialize(kWarpgroup);
    __syncthreads();  // the barriers are there
    if (threadIdx.x < kWarpgroup) {
      give_registers_but<Layout::kProducerRegisters>();
      Producer<Conv, Source>::produce(args, tiles, pipeline, shared, shared + Layout::kProducerAt, again);
    } else {
      take_registers_to<Layout::kConsumerRegisters>();
      consume(args, tiles, pipeline, shared, again);
    }
  }

#endif
};

// again: see above.
template <class Loop>
__global__ void __launch_bounds__(Loop::kThreads, 1)
    convolve_rows_kernel(typename Loop::Arguments args, bool again) {
#if TENSOR_CORE_WGMMA
  Loop::run(args, again);
#endif
}

// ---------------------------------------------------------------------------------------------------- launch

// A block on each multiprocessor.
template <class Loop> dim3 rows_grid() {
  const int multiprocessors = device_attribute(cudaDevAttrMultiProcessorCount);
  constexpr int kChannelBlocks = Loop::kChannelBlocks;
  return dim3(multiprocessors > kChannelBlocks ? multiprocessors / kChannelBlocks : 1, kChannelBlocks);
}

template <class Loop> void convolve_rows(const typename Loop::Arguments& args, cudaStream_t stream) {
  const dim3 grid = rows_grid<Loop>();
  allow_shared<convolve_rows_kernel<Loop>>();
  for (int pass = 0; pass < (Loop::kGuessesScale ? 2 : 1); pass++)
    convolve_rows_kernel<Loop><<<grid, Loop::kThreads, Loop::kSharedBytes, stream>>>(args, pass == 1);
}

}  // namespace conv
