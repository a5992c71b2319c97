// A 2-D convolution of many channels as an implicit GEMM by mma.sync: for any size, on compute capability 8.0
// or later.
//
//   pack_input_kernel    x (N, kChannelsIn, H, W) to operands (N, kChannelGroups, kParts, H, W, 8)
//   repack_input_kernel  the samples which the first scale does not fit once more; mostly there are none
//   convolve_kernel      a block computes kBlockChannels channels of a tile: kTileRows rows of kTileWidth.
//                        In shared memory are the pixels that it needs under all taps, of a K block of input
//                        channels, and a pipeline of weights, tap by tap
//
// Bytes at (128, 64, 128, 128), 3×3, 128 channels out: 537 MB read and 268 MB written to pack; 268 MB read
// and 1040 MB written to convolve. Bound: memory 0.49 ms at 4.28 TB/s, products 0.56 ms, one after the other.
#pragma once
#include "conv/tail.cuh"
#include "conv/wide_operands.cuh"
#include "store/grad_mask.cuh"
#include "store/rows.cuh"

namespace conv {

// --------------------------------------------------------------------------------------------------- packing

constexpr int kPackPixels = 4;     // of a thread: 8 × 4 loads are under way at a time
constexpr int kRepackBlocks = 32;  // of a sample

// x (N, kChannelsIn, S) to packed (N, kChannelGroups, kParts, S, 8) under the scale 2^kFirstExponent, and
// largest[n] = the bits of the largest finite magnitude of sample n. Grid: pixels, channel groups, samples.
template <class Conv>
__global__ void __launch_bounds__(kPackThreads)
    pack_input_kernel(uint4* packed, uint32_t* largest, const typename Conv::value_t* x, int64_t N,
                      int64_t S) {
#if __CUDA_ARCH__ >= 800
  constexpr int kChannels = Conv::kChannelsIn, kGroups = Conv::kChannelGroups;
  const int group = blockIdx.y;
  const int64_t first = int64_t(blockIdx.x) * kPackThreads * kPackPixels + threadIdx.x;
  for (int64_t n = blockIdx.z; n < N; n += gridDim.z) {
    const auto* in = x + (n * kChannels + group * 8) * S;
    uint4* out = packed + (n * kGroups + group) * Conv::kParts * S;
    float value[kPackPixels][8];
#pragma unroll
    for (int i = 0; i < kPackPixels; i++) {
      const int64_t s = first + i * kPackThreads;
#pragma unroll
      for (int c = 0; c < 8; c++)
        value[i][c] = s < S && group * 8 + c < kChannels ? float(in[c * S + s]) : 0.f;
    }
    float mine = 0.f;
#pragma unroll
    for (int i = 0; i < kPackPixels; i++) {
#pragma unroll
      for (int c = 0; c < 8; c++) {
        if constexpr (Conv::kScaled) {
          mine = larger_magnitude(mine, value[i][c]);
          value[i][c] = Conv::scaled(value[i][c], power_of_two(Conv::kFirstExponent));
        }
      }
      if (first + i * kPackThreads < S) Conv::pack_pixel(out + first + i * kPackThreads, S, value[i]);
    }
    if constexpr (Conv::kScaled) raise_largest(&largest[n], mine);
  }
#endif
}

// Packs again the samples which the first scale does not fit. Grid: parts of a sample, samples.
template <class Conv>
__global__ void __launch_bounds__(kPackThreads)
    repack_input_kernel(uint4* packed, const uint32_t* largest, const typename Conv::value_t* x, int64_t N,
                        int64_t S) {
  constexpr int kChannels = Conv::kChannelsIn, kGroups = Conv::kChannelGroups;
  const int64_t first = int64_t(blockIdx.x) * kPackThreads + threadIdx.x;
  for (int64_t n = blockIdx.y; n < N; n += gridDim.y) {
    const int exponent = Conv::sample_exponent(largest[n]);
    if (exponent == Conv::kFirstExponent) continue;
    const float scale = power_of_two(exponent);
    for (int64_t i = first; i < kGroups * S; i += int64_t(gridDim.x) * kPackThreads) {
      const int64_t group = i / S, s = i % S;
      float value[8];
#pragma unroll
      for (int c = 0; c < 8; c++) {
        const bool real = group * 8 + c < kChannels;
        value[c] = real ? Conv::scaled(float(x[(n * kChannels + group * 8 + c) * S + s]), scale) : 0.f;
      }
      Conv::pack_pixel(packed + (n * kGroups + group) * Conv::kParts * S + s, S, value);
    }
  }
}

// -------------------------------------------------------------------------------------------------- mainloop

template <class Conv, class Source, class Tail, class Keep, class Out> struct WideSm80 : Conv {
  using Conv::kBlockChannels, Conv::kChannelBlocks, Conv::kChannelsOut, Conv::kKBlock, Conv::kKBlocks,
      Conv::kKernelH, Conv::kKernelW, Conv::kMTiles, Conv::kPadColumns, Conv::kPadRows, Conv::kParts,
      Conv::kPitch, Conv::kScaled, Conv::kSplit, Conv::kTapSteps, Conv::kTapWeights, Conv::kTaps,
      Conv::kTransposed;
  using typename Conv::operand_t, typename Conv::Tile;
  using Arguments = conv::Arguments<Conv, Source, Tail, Keep, Out>;

  static constexpr int kStages = 3;  // of weights: one in use, two on their way
  static constexpr int kTileRows = Tile::kRows;
  static constexpr int kRows = kKernelH + kTileRows - 1;  // of input
  // Of a tile and K block, in units of 16 bytes.
  static constexpr int kInput = kKBlock / 8 * kParts * kRows * kPitch;
  static constexpr int kMWarps = kBlockChannels / 64;  // a warp computes 64 channels × 64 pixels of a row
  static constexpr int kThreads = kMWarps * kTileRows * 64;
  static constexpr int kIterations = kKBlocks * kTaps;

  // Results pass through shared memory, in the operands' place: of a warp 16 channels at a time.
  static constexpr int kOperandBytes = (kInput + kStages * kTapWeights) * 16;
  static constexpr int kStagingBytes = kThreads / 32 * store::Staged::kBytes;
  static constexpr int kSharedBytes = kOperandBytes > kStagingBytes ? kOperandBytes : kStagingBytes;

  // Tiles on top of each other, and side by side.
  static HOST_DEVICE int64_t bands(const Arguments& args) {
    return (args.height() + kTileRows - 1) / kTileRows;
  }
  static HOST_DEVICE int64_t strips(const Arguments& args) {
    return (args.width() + kTileWidth - 1) / kTileWidth;
  }

#if __CUDA_ARCH__ >= 800

  // The pixels of a block: up to kTileWidth of up to kTileRows output rows.
  struct TilePlace {
    int64_t n, row, column;
    __device__ __forceinline__ explicit TilePlace(const Arguments& args) {
      const int64_t strips = WideSm80::strips(args), strip = blockIdx.x % strips;
      row = blockIdx.x / strips % bands(args) * kTileRows, n = blockIdx.x / strips / bands(args),
      column = strip * kTileWidth;
    }
  };

  // A K block of input channels to shared memory, in the background: input [channel group][part][row][pixel].
  static __device__ __forceinline__ void fetch_input(uint4* input, const uint4* packed_x,
                                                     const Arguments& args, const TilePlace& tile,
                                                     int k_block) {
    const int64_t S = args.H * args.W;
    for (int i = threadIdx.x; i < kInput; i += kThreads) {
      const int pixel = i % kPitch, tile_row = i / kPitch % kRows, group = i / (kPitch * kRows);
      const int64_t row = tile.row + tile_row - kPadRows, column = tile.column + pixel - kPadColumns;
      bool real = column < args.W;
      if constexpr (kTransposed) { real = real && column >= 0 && row >= 0; }
      if constexpr (kTransposed || kTileRows > 1) { real = real && row < args.H; }
      const int64_t first = ((tile.n * kKBlocks + k_block) * (kKBlock / 8 * kParts) + group) * S;
      const int64_t source = first + row * args.W + column;
      copy_async_or_zero(input + i, packed_x + (real ? source : 0), real);
    }
  }

  // The weights of an iteration, one tap and K block, to their stage [kTapWeights] likewise. Past the last
  // iteration nothing, but still a group of copies, so that a count of pending groups means the same each
  // time.
  static __device__ __forceinline__ void fetch_weights(uint4* weights, const uint4* packed_weight,
                                                       int iteration) {
    if (iteration < kIterations) {
      const uint4* from = packed_weight + (int64_t(blockIdx.y) * kIterations + iteration) * kTapWeights;
      uint4* to = weights + iteration % kStages * kTapWeights;
      for (int i = threadIdx.x; i < kTapWeights; i += kThreads) copy_async<16>(to + i, from + i);
    }
    commit_copies();
  }

  // sums += the products of one tap and K block, of a part of each operand, for kCount tiles of 16 channels.
  // `weights` are the lane's, of the first of these tiles; `input` is the address that the lane gives to
  // load_matrices at tap (0, 0).
  template <int kCount>
  static __device__ __forceinline__ void multiply(float (&sums)[kCount][8][4], const uint4* weights,
                                                  uint32_t input, int tap, int weight_part, int input_part) {
    const uint32_t pixels = input + 16 * ((input_part * kRows + tap / kKernelW) * kPitch + tap % kKernelW);
#pragma unroll
    for (int step = 0; step < kTapSteps; step++) {
      uint32_t a[kCount][4];
#pragma unroll
      for (int i = 0; i < kCount; i++) {
        const uint4 fragment = weights[((step * kParts + weight_part) * kMTiles + i) * 32];
        a[i][0] = fragment.x, a[i][1] = fragment.y, a[i][2] = fragment.z, a[i][3] = fragment.w;
      }
#pragma unroll
      for (int j = 0; j < 4; j++) {
        uint32_t b[4];
        load_matrices(b, pixels + 16 * (step * 2 * kParts * kRows * kPitch + j * 16));
#pragma unroll
        for (int i = 0; i < kCount; i++) {
          multiply_add<operand_t>(sums[i][j * 2], a[i], b[0], b[1]);
          multiply_add<operand_t>(sums[i][j * 2 + 1], a[i], b[2], b[3]);
        }
      }
    }
  }

  // sums += all products of one tap and K block. Tensor cores cut off as they add. So split operands' small
  // products come first, and each tap's sum is added to the others in float32.
  static __device__ __forceinline__ void multiply_tap(float (&sums)[4][8][4], const uint4* weights,
                                                      uint32_t input, int tap) {
    if constexpr (kSplit) {
#pragma unroll
      for (int first = 0; first < 4; first += 2) {
        float tap_sums[2][8][4] = {};
        multiply(tap_sums, weights + first * 32, input, tap, kParts - 1, 0);
        multiply(tap_sums, weights + first * 32, input, tap, 0, kParts - 1);
        multiply(tap_sums, weights + first * 32, input, tap, 0, 0);
#pragma unroll
        for (int i = 0; i < 64; i++)
          sums[first + i / 32][i / 4 % 8][i % 4] += tap_sums[i / 32][i / 4 % 8][i % 4];
      }
    } else {
      multiply(sums, weights, input, tap, 0, 0);
    }
  }

  static __device__ __forceinline__ void run(const Arguments& args, const uint4* packed_x) {
    extern __shared__ uint4 shared[];
    uint4* const input = shared;
    uint4* const weights = shared + kInput;
    const TilePlace tile(args);
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int warp_n = warp % 2, warp_row = kTileRows == 1 ? 0 : warp / 2 / kMWarps;
    const int warp_m = warp / 2 - warp_row * kMWarps;
    float sums[4][8][4] = {};
    // load_matrices: lanes 0-7 give pixels 0-7 of a step's first channel group, 8-15 those of its second,
    // 16-31 pixels 8-15 likewise.
    const uint32_t input_address =
        shared_address(input) +
        16 * (lane / 8 % 2 * kParts * kRows * kPitch + warp_n * 64 + lane / 16 * 8 + lane % 8) +
        16 * warp_row * kPitch;

    fetch_input(input, packed_x, args, tile, 0);
    fetch_weights(weights, args.packed_weight, 0);
    fetch_weights(weights, args.packed_weight, 1);
#pragma unroll 1
    for (int iteration = 0; iteration < kIterations; iteration++) {
      await_copies<1>();  // all but the newest group: this thread's share of the iteration's weights is there
      __syncthreads();    // everyone's share is; and everyone is done with the last iteration
      if (kKBlocks > 1 && iteration > 0 && iteration % kTaps == 0) {
        fetch_input(input, packed_x, args, tile, iteration / kTaps);
        commit_copies();
        await_copies<0>();
        __syncthreads();  // the K block's pixels are there
      }
      fetch_weights(weights, args.packed_weight, iteration + 2);
      const uint4* const stage = weights + iteration % kStages * kTapWeights;
      multiply_tap(sums, stage + warp_m * 4 * 32 + lane, input_address, iteration % kTaps);
    }
    __syncthreads();  // everyone is done with the operands, whose place staging takes

    const int64_t output_row = tile.row + warp_row;
    if (kTileRows > 1 && output_row >= args.height()) return;
    const int64_t column = tile.column + warp_n * 64, plane_size = args.height() * args.width();
    const int exponent = kScaled ? Source::sample_exponent(args.largest[tile.n]) : 0;
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const int channel = blockIdx.y * kBlockChannels + warp_m * 64 + i * 16;
      const auto constants = [&](int c) {
        ChannelConstants<Tail> constants(args.tail, tile.n, c, c < kChannelsOut);
        if (kScaled) constants.set_exponent(-args.exponents[c] - exponent);
        return constants;
      };
      const auto low = constants(channel + lane / 4), high = constants(channel + 8 + lane / 4);
      float* const staging = reinterpret_cast<float*>(shared) + warp * (store::Staged::kBytes / 4);
      const int64_t row = (tile.n * kChannelsOut + channel) * args.height() + output_row;
      const int64_t at = row * args.width() + column;
      if constexpr (Keep::kStores)
        args.keep.store_rows(at, staging, sums[i], tile.n, channel, plane_size, kChannelsOut - channel,
                             args.width() - column, low, high, 0);
      const auto kept = apply<Keep, kScaled>(args.tail, sums[i], low, high);
      if constexpr (Keep::kKeeps) {
        uint32_t* const words = args.keep.template at<kChannelsOut>(tile.n, channel, output_row, column,
                                                                    args.height(), args.width());
        Keep::template store<kChannelsOut>(words, kept, kChannelsOut - channel, args.width() - column);
      }
      if constexpr (reduces<Out>) {
        args.out.accept(
            sums[i], staging,
            {tile.n, output_row, channel, int(column), int(args.height()), int(args.width()), kChannelsOut});
      } else {
        store::Staged::store(args.out.y + at, staging, sums[i], plane_size, min(kChannelsOut - channel, 16),
                             args.width() - column);
      }
    }
  }

#endif
};

// Grid: tiles of all samples, channel blocks.
template <class Loop>
__global__ void __launch_bounds__(Loop::kThreads)
    convolve_kernel(typename Loop::Arguments args, const uint4* packed_x) {
#if __CUDA_ARCH__ >= 800
  Loop::run(args, packed_x);
#endif
}

// ---------------------------------------------------------------------------------------------------- launch

// Of packed x, in units of 16 bytes.
template <class Conv> int64_t packed_input_size(int64_t N, int64_t S) {
  return int64_t(Conv::kChannelGroups) * Conv::kParts * N * S;
}

template <class Loop>
void convolve_packed(const typename Loop::Arguments& args, const uint4* packed_x, cudaStream_t stream) {
  allow_shared<convolve_kernel<Loop>>();
  const dim3 grid(args.N * Loop::bands(args) * Loop::strips(args), Loop::kChannelBlocks);
  convolve_kernel<Loop><<<grid, Loop::kThreads, Loop::kSharedBytes, stream>>>(args, packed_x);
}

template <class Conv>
void pack_input(uint4* packed, uint32_t* largest, const typename Conv::value_t* x, int64_t N, int64_t S,
                cudaStream_t stream) {
  const unsigned samples = N < 65535 ? N : 65535;
  const dim3 grid((S + kPackThreads * kPackPixels - 1) / (kPackThreads * kPackPixels), Conv::kChannelGroups,
                  samples);
  pack_input_kernel<Conv><<<grid, kPackThreads, 0, stream>>>(packed, largest, x, N, S);
  const dim3 repack_grid(kRepackBlocks, samples);
  if constexpr (Conv::kScaled)
    repack_input_kernel<Conv><<<repack_grid, kPackThreads, 0, stream>>>(packed, largest, x, N, S);
}

}  // namespace conv
