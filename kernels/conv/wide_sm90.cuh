// A 2-D convolution of many channels as an implicit GEMM by wgmma, on compute capability 9.0 (sm_90a), which
// reads x itself. Sums are handed to the Epilogue that the source has included before.
//
// For one group of input channels, SPLIT=0, and weights that find room on a multiprocessor: at most 36
// products of depth 16 per sum, and kSharedBytes of shared memory. x starts at a word of 4 bytes, and its
// rows are whole words. Tiles, and the pixels of a plane, are counted in int.
//
// Where TRANSPOSED it computes the gradient of x instead, from g, which another producer makes
// (grad/wide_input_sm90_producer.cuh). A tile is then 64 channels of a whole row. Both consumers have the
// same channels, and take rows in turn. There are twice as many weights; one copy of most of them lies in
// shared memory, for both.
//
// Blocks are persistent: they share all tiles of 128 pixels evenly. A block walks down strips of rows, so
// that each row of input is read once and serves KERNEL_H tiles. Its three warpgroups are specialised:
//   producer   copies rows of x as they are, raw [channel][word], and converts them into the stages of a
//              pipeline, [plane][pixel] of 8 channels. There a tap is an offset, because the descriptor of an
//              operand may start at any pixel
//   consumers  two of them, multiply, with most weights in registers; then epilogue and stores
//
// float32 is converted under the scale 2^kFirstExponent, which fits almost all inputs, while the largest
// magnitude of each sample is found. A second launch computes again the samples that it did not fit; mostly
// it ends at once.
//
// Bytes at the default size (128, 64, 128, 128), 3×3, 128 channels out: 537 MB read, 1040 MB written. Bound:
// memory 0.37 ms at 4.28 TB/s, 300 GFLOP 0.30 ms.
#pragma once
#include "conv/wide_sm90_pipeline.cuh"
#if TRANSPOSED
#include "grad/wide_input_sm90_producer.cuh"
#else
#include "conv/wide_sm90_producer.cuh"
#endif

namespace {

#if TENSOR_CORE_WGMMA

// Named barriers: consumer c waits on 1 + c for its turn with the tensor cores; its four warps meet on 3 + c.
__device__ __forceinline__ void take_turn(int consumer) {
  if (kInTurns) sync_threads<2 * kWarpgroup>(1 + consumer);
}
__device__ __forceinline__ void hand_on(int consumer) {
  if (kInTurns) signal_threads<2 * kWarpgroup>(2 - consumer);
}

// Consumers multiply in turns, so that one's epilogue and stores run beside the other's products. The first
// signal is of the one whose turn it is not, and the last one is taken at the end. (Cases apart, because else
// the first one spills registers.)
__device__ __forceinline__ void begin_turns(int consumer, int begin) {
  if constexpr (kSharers == 1) {
    if (consumer == 1) hand_on(1);
  } else {
    if (consumer == ((begin - 1) & 1)) hand_on(consumer);
  }
}
__device__ __forceinline__ void end_turns(int consumer, int end) {
  if constexpr (kSharers == 1) {
    if (consumer == 0) take_turn(0);
  } else {
    if (consumer == (end & 1)) take_turn(consumer);
  }
}

// The weights of the warp's 16 channels, from `channel` of the block on: those of the first kRegisterSteps
// products to registers, the others to the consumer's shared memory [step][plane][channel].
__device__ __forceinline__ void load_weights(
    uint32_t (&in_registers)[kRegisterSteps][4], uint8_t* in_shared, const uint4* packed, int channel) {
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
__device__ __forceinline__ void multiply_tile(
    float (&sums)[16][4], const uint32_t (&in_registers)[kRegisterSteps][4], const uint8_t* in_shared,
    const uint8_t* operands, int first) {
  begin_products();
#pragma unroll
  for (int kernel_row = 0; kernel_row < KERNEL_H; kernel_row++) {
    const int stage = first + kernel_row < kStages ? first + kernel_row : first + kernel_row - kStages;
    const uint64_t row = describe(shared_address(operands) + stage * kStageBytes, kPitch * 16);
#pragma unroll
    for (int j = 0; j < KERNEL_W * kTapSteps; j++) {
      const int i = kernel_row * KERNEL_W * kTapSteps + j;
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

struct alignas(2 * sizeof(result_t)) Pair { result_t at[2]; };

// Half of a lane's results, those of channel g + 8·kHalf of the warp, to that channel's `row` of staging.
template <int kHalf>
__device__ __forceinline__ void write_staging(result_t* row, const float (&values)[16][4], bool aligned) {
  if (aligned) {
#pragma unroll
    for (int j = 0; j < 16; j++)
      *reinterpret_cast<Pair*>(row + j * 8) =
          Pair{result_t(values[j][kHalf * 2]), result_t(values[j][kHalf * 2 + 1])};
  } else {
#pragma unroll
    for (int j = 0; j < 16; j++)
      row[j * 8] = result_t(values[j][kHalf * 2]), row[j * 8 + 1] = result_t(values[j][kHalf * 2 + 1]);
  }
}

// A warp's 16 channels × 128 pixels, laid out as for apply_epilogue(), to y at `to`, channels `stride` apart;
// of these `channels` and `pixels` exist.
//
// Stores bound the kernel, so memory is written in whole sectors (32 bytes) wherever possible. Each channel
// lies in staging as far behind a sector's start as in y, and the copy engine takes its whole sectors. In
// memory the next row of a channel may follow this one. Where this row continues the last in that way
// (`continues`), the last one's rest, less than a sector, is still in staging and goes along; where the next
// row will continue this one (`continued`), this one's rest waits for it. Threads store what is left.
__device__ __forceinline__ void store_tile(result_t* to, result_t* staging, const float (&values)[16][4],
                                           int64_t stride, int channels, int pixels, bool continues,
                                           bool continued) {
  const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const auto shift_of = [&](int channel) {
    return int(reinterpret_cast<uintptr_t>(to + channel * stride) / sizeof(output_t) % kSector);
  };
  pixels = min(pixels, kTileWidth);
  // Lanes l and l + 16 see to channel l.
  const int channel = lane % 16, shift = shift_of(channel), end = shift + pixels;
  result_t* const mine = staging + channel * kStagingPitch;
  await_bulk_reads();
  __syncwarp();  // the last row's sectors have left staging
  if (continues) {
    // Where the last row's rest begins.
    const int rest = ((shift - pixels + kTileWidth) % kSector + pixels) / kSector * kSector;
#pragma unroll
    for (int i = lane / 16; i < kSector; i += 2)
      if (i < shift) mine[i] = mine[rest + i];
  }
  __syncwarp();  // the rest has moved to the front
  const int low = shift_of(g);
  write_staging<0>(staging + g * kStagingPitch + low + t * 2, values, __all_sync(0xffffffffu, low % 2 == 0));
  const int high = shift_of(g + 8);
  write_staging<1>(staging + (g + 8) * kStagingPitch + high + t * 2, values,
                   __all_sync(0xffffffffu, high % 2 == 0));
  publish_shared();  // the copy engine, too, reads by the asynchronous proxy
  __syncwarp();      // everyone has written
  // Whole sectors: first … last - 1.
  const int first = continues || shift == 0 ? 0 : kSector, last = max(end / kSector * kSector, first);
  const bool real = channel < channels;
  result_t* const out = to + channel * stride - shift;
  if (real && lane < 16 && first < last)
    copy_bulk_out(out + first, mine + first, (last - first) * int(sizeof(output_t)));
  commit_bulk_copies();
  if (!continues || !continued) {
    const bool head = lane < 16;  // stores what lies before the sectors; its partner, what lies behind them
    const int from = head ? shift : last;
    const int stop = head ? (continues ? 0 : min(first, end)) : (continued ? 0 : end);
    for (int i = from; i < (real ? stop : 0); i++) out[i] = mine[i];
  }
}

// The same, for rows of dx: straight from registers, 32 bytes of a channel side by side.
__device__ __forceinline__ void store_rows(result_t* to, const float (&values)[16][4], int64_t stride,
                                           int channels, int pixels) {
  const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const bool aligned = stride % 2 == 0 && uintptr_t(to) % sizeof(Pair) == 0;
#pragma unroll
  for (int half = 0; half < 2; half++) {
    if (g + 8 * half >= channels) continue;
    result_t* const row = to + (g + 8 * half) * stride + 2 * t;
#pragma unroll
    for (int j = 0; j < 16; j++) {
      const Pair pair{result_t(values[j][2 * half]), result_t(values[j][2 * half + 1])};
      const int pixel = 8 * j + 2 * t;
      if (aligned && pixel + 1 < pixels) {
        *reinterpret_cast<Pair*>(row + 8 * j) = pair;
      } else {
        if (pixel < pixels) row[8 * j] = pair.at[0];
        if (pixel + 1 < pixels) row[8 * j + 1] = pair.at[1];
      }
    }
  }
}

// Multiplies, finishes and stores the tiles of a warpgroup's 64 channels.
__device__ __forceinline__ void consume(const Arguments& args, const TileScheduler& tiles,
                                        const Pipeline<kStages>& pipeline, uint8_t* shared, bool again) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 - 4;
  const int consumer = warp / 4, turn = consumer % kSharers;
  const int local_channel = consumer / kSharers * 64 + warp % 4 * 16;
  const int channel = blockIdx.y * kBlockChannels + local_channel;
  result_t* const staging = reinterpret_cast<result_t*>(shared + kStagingAt + warp * kStagingBytes);
  Epilogue* const epilogues = reinterpret_cast<Epilogue*>(shared + kEpiloguesAt) + warp * 16;
  uint8_t* const in_shared = shared + kStages * kStageBytes + consumer % kWeightCopies * kWeightBytes;
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
  const bool runs_on = kSharers == 1 && tiles.strips == 1 && OW >= kSector;
  begin_turns(consumer, tiles.begin);
#pragma unroll 1
  for (int tile = tiles.begin; tile < tiles.end;) {
    const TilePlace place = tiles[tile];
    const int start = tile, stop = min(tiles.end, tile - place.row + OH);
    const bool own_exponent = again || (TRANSPOSED && kScaled);
    const int exponent = own_exponent ? sample_exponent(args.largest[place.n]) : kFirstExponent;
    if (again && exponent == kFirstExponent) {
      tile = stop;
      continue;
    }
    if (!TRANSPOSED && lane < 16) epilogues[lane] = make_epilogue(args, channel + lane, exponent);
    __syncwarp();  // the epilogues are there
    result_t* to =
        args.y + ((int64_t(place.n) * CHANNELS_OUT + channel) * OH + place.row) * OW + place.column;
    uint32_t* words =
        args.gates + gate_index(place.n, channel, place.row, place.column, OH, OW, CHANNELS_OUT);
#pragma unroll
    for (int i = 0; i < KERNEL_H - 1; i++) await_row();
#pragma unroll 1
    for (; tile < stop; tile++, to += OW, words += SAVES ? gate_row(OW, CHANNELS_OUT) : 0) {
      await_row();
      if (kSharers > 1 && tile % kSharers != turn) {
        release();
        continue;
      }
      float sums[16][4];
      take_turn(consumer);
      multiply_tile(sums, in_registers, in_shared, shared, oldest.stage);
      hand_on(consumer);
      await_products<0>();
      hold(sums);
      release();
      if constexpr (TRANSPOSED) {  // scales alone, read anew: shared memory has no room for them
        apply_epilogue(sums, make_epilogue(args, channel + lane / 4, exponent),
                       make_epilogue(args, channel + lane / 4 + 8, exponent), 0.f, 0.f);
        store_rows(to, sums, int64_t(OH) * OW, CHANNELS_OUT - channel, OW);
        continue;
      }
      const Gates<16> gates =
          apply_epilogue(sums, epilogues[lane / 4], epilogues[lane / 4 + 8], args.constant, args.scale);
      if constexpr (SAVES) store_gates(words, gates, CHANNELS_OUT - channel, OW - place.column);
      if constexpr (!TRANSPOSED)
        store_tile(to, staging, sums, int64_t(OH) * OW, CHANNELS_OUT - channel, OW - place.column,
                   runs_on && tile != start, runs_on && tile + 1 != stop);
    }
#pragma unroll
    for (int i = 0; i < KERNEL_H - 1; i++) release();
    __syncwarp();  // everyone has read the epilogues of this sample
  }
  end_turns(consumer, tiles.end);
  if (!TRANSPOSED) await_bulk_reads();  // shared memory must outlive the copies from it
}

#endif

__global__ void __launch_bounds__(kThreads, 1) convolve_kernel(Arguments args, bool again) {
#if TENSOR_CORE_WGMMA
  extern __shared__ uint4 all_shared[];
  uint8_t* const shared = reinterpret_cast<uint8_t*>(all_shared);
  const Pipeline<kStages> pipeline(shared + kBarriersAt);
  const TileScheduler tiles(args);
  if (threadIdx.x == 0) pipeline.initialize(kWarpgroup);
  __syncthreads();  // the barriers are there
  if (threadIdx.x < kWarpgroup) {
    give_registers_but<kProducerRegisters>();
    produce(args, tiles, pipeline, shared, again);
  } else {
    take_registers_to<kConsumerRegisters>();
    consume(args, tiles, pipeline, shared, again);
  }
#endif
}

// ---------------------------------------------------------------------------------------------------- launch

int64_t packed_input_bytes(int64_t, int64_t) { return 0; }  // x is read as it is

void convolve(const Arguments& args, uint4*, cudaStream_t stream) {
  const int multiprocessors = device_attribute(cudaDevAttrMultiProcessorCount);
  allow_shared<convolve_kernel>();
  const dim3 grid(multiprocessors > kChannelBlocks ? multiprocessors / kChannelBlocks : 1, kChannelBlocks);
  for (int pass = 0; pass < (kScaled && !TRANSPOSED ? 2 : 1); pass++)
    convolve_kernel<<<grid, kThreads, kSharedBytes, stream>>>(args, pass == 1);
}

}  // namespace
