// A 2-D convolution of many channels as an implicit GEMM by mma.sync: for any size, on compute capability 8.0
// or later. Sums are handed to the Epilogue that the source has included before.
//
//   pack_input_kernel    x (N, CHANNELS_IN, H, W) to operands (N, kPlanes, kParts, H, W, 8)
//   repack_input_kernel  the samples which the first scale does not fit once more; mostly there are none
//   convolve_kernel      a block computes kBlockChannels channels of a tile: kTileRows rows of kTileWidth.
//                        In shared memory are the pixels that it needs under all taps, of a group of input
//                        channels, and a pipeline of weights, tap by tap
//
// Bytes at the default size (128, 64, 128, 128), 3×3, 128 channels out: 537 MB read and 268 MB written to
// pack; 268 MB read and 1040 MB written to convolve. Bound: memory 0.49 ms at 4.28 TB/s, products 0.56 ms,
// one after the other.
#pragma once
#include "conv/wide_operands.cuh"

namespace {

// --------------------------------------------------------------------------------------------------- packing

constexpr int kPackThreads = 256;
constexpr int kPackPixels = 4;     // of a thread: 8 × 4 loads are under way at a time
constexpr int kRepackBlocks = 32;  // of a sample

#if __CUDA_ARCH__ >= 800

// Raises *largest, the bits of a magnitude, to the largest of the block's threads.
__device__ __forceinline__ void raise_largest(uint32_t* largest, float of_thread) {
  __shared__ uint32_t of_block;
  if (threadIdx.x == 0) of_block = 0;
  __syncthreads();  // cleared before anyone raises it
  const uint32_t of_warp = __reduce_max_sync(0xffffffffu, __float_as_uint(of_thread));
  if (threadIdx.x % 32 == 0) atomicMax(&of_block, of_warp);
  __syncthreads();  // complete before thread 0 reads it, and only thread 0 clears it again
  if (threadIdx.x == 0) atomicMax(largest, of_block);
}

#endif

// x (N, CHANNELS_IN, S) to packed (N, kPlanes, kParts, S, 8) under the scale 2^kFirstExponent, and largest[n]
// = the bits of the largest finite magnitude of sample n. Grid: pixels, planes, samples.
__global__ void __launch_bounds__(kPackThreads)
pack_input_kernel(uint4* packed, uint32_t* largest, const value_t* x, int64_t N, int64_t S) {
#if __CUDA_ARCH__ >= 800
  const int plane = blockIdx.y;
  const int64_t first = int64_t(blockIdx.x) * kPackThreads * kPackPixels + threadIdx.x;
  for (int64_t n = blockIdx.z; n < N; n += gridDim.z) {
    const value_t* in = x + (n * CHANNELS_IN + plane * 8) * S;
    uint4* out = packed + (n * kPlanes + plane) * kParts * S;
    float value[kPackPixels][8];
#pragma unroll
    for (int i = 0; i < kPackPixels; i++) {
      const int64_t s = first + i * kPackThreads;
#pragma unroll
      for (int c = 0; c < 8; c++)
        value[i][c] = s < S && plane * 8 + c < CHANNELS_IN ? float(in[c * S + s]) : 0.f;
    }
    float mine = 0.f;
#pragma unroll
    for (int i = 0; i < kPackPixels; i++) {
#pragma unroll
      for (int c = 0; c < 8; c++) {
        if constexpr (kScaled) {
          mine = larger_magnitude(mine, value[i][c]);
          value[i][c] = scaled(value[i][c], power_of_two(kFirstExponent));
        }
      }
      if (first + i * kPackThreads < S) pack_pixel(out + first + i * kPackThreads, S, value[i]);
    }
    if constexpr (kScaled) raise_largest(&largest[n], mine);
  }
#endif
}

// Packs again the samples which the first scale does not fit. Grid: parts of a sample, samples.
__global__ void __launch_bounds__(kPackThreads)
repack_input_kernel(uint4* packed, const uint32_t* largest, const value_t* x, int64_t N, int64_t S) {
  const int64_t first = int64_t(blockIdx.x) * kPackThreads + threadIdx.x;
  for (int64_t n = blockIdx.y; n < N; n += gridDim.y) {
    const int exponent = sample_exponent(largest[n]);
    if (exponent == kFirstExponent) continue;
    const float scale = power_of_two(exponent);
    for (int64_t i = first; i < kPlanes * S; i += int64_t(gridDim.x) * kPackThreads) {
      const int64_t plane = i / S, s = i % S;
      float value[8];
#pragma unroll
      for (int c = 0; c < 8; c++) {
        const bool real = plane * 8 + c < CHANNELS_IN;
        value[c] = real ? scaled(float(x[(n * CHANNELS_IN + plane * 8 + c) * S + s]), scale) : 0.f;
      }
      pack_pixel(packed + (n * kPlanes + plane) * kParts * S + s, S, value);
    }
  }
}

// -------------------------------------------------------------------------------------------------- mainloop

constexpr int kStages = STAGES;  // of weights: one in use, two on their way
constexpr int kTileRows = TILE_ROWS;
constexpr int kRows = KERNEL_H + kTileRows - 1;               // of input
constexpr int kInput = kGroup / 8 * kParts * kRows * kPitch;  // of a tile and group, in units of 16 bytes
constexpr int kMWarps = kBlockChannels / 64;  // a warp computes 64 channels × 64 pixels of a row
constexpr int kThreads = kMWarps * kTileRows * 64;
constexpr int kIterations = kGroups * kTaps;

// Results pass through shared memory, in the operands' place: a warp has 16 channels of 64 floats at a time.
constexpr int kStagingPitch = 72;             // floats from channel to channel: 8 banks on, no conflicts
constexpr int kStaging = 16 * kStagingPitch;  // floats of a warp
constexpr int kOperandBytes = (kInput + kStages * kTapWeights) * 16;
constexpr int kStagingBytes = kThreads / 32 * kStaging * 4;
constexpr int kSharedBytes = kOperandBytes > kStagingBytes ? kOperandBytes : kStagingBytes;
static_assert(kStages == 3 && kSharedBytes == SHARED_BYTES, "Python planned another layout");

#if __CUDA_ARCH__ >= 800

// The pixels of a block: up to kTileWidth of up to kTileRows output rows.
struct Tile {
  int64_t n, row, column;
  __device__ __forceinline__ explicit Tile(const Arguments& args) {
    const int64_t strips = args.strips(), strip = blockIdx.x % strips;
    row = blockIdx.x / strips % args.bands() * kTileRows, n = blockIdx.x / strips / args.bands(),
    column = strip * kTileWidth;
  }
};

// A group of input channels to shared memory, in the background: input [plane][part][row][pixel].
__device__ __forceinline__ void fetch_input(
    uint4* input, const uint4* packed_x, const Arguments& args, const Tile& tile, int group) {
  const int64_t S = args.H * args.W;
  for (int i = threadIdx.x; i < kInput; i += kThreads) {
    const int pixel = i % kPitch, tile_row = i / kPitch % kRows, plane = i / (kPitch * kRows);
    const int64_t row = tile.row + tile_row - kPadRows, column = tile.column + pixel - kPadColumns;
    bool real = column < args.W;
    if constexpr (TRANSPOSED) { real = real && column >= 0 && row >= 0; }
    if constexpr (TRANSPOSED || kTileRows > 1) { real = real && row < args.H; }
    const int64_t first = ((tile.n * kGroups + group) * (kGroup / 8 * kParts) + plane) * S;
    const int64_t source = first + row * args.W + column;
    copy_async_or_zero(input + i, packed_x + (real ? source : 0), real);
  }
}

// The weights of an iteration, one tap and group, to their stage [kTapWeights] likewise. Past the last
// iteration nothing, but still a group of copies, so that a count of pending groups means the same each time.
__device__ __forceinline__ void fetch_weights(uint4* weights, const uint4* packed_weight, int iteration) {
  if (iteration < kIterations) {
    const uint4* from = packed_weight + (int64_t(blockIdx.y) * kIterations + iteration) * kTapWeights;
    uint4* to = weights + iteration % kStages * kTapWeights;
    for (int i = threadIdx.x; i < kTapWeights; i += kThreads) copy_async<16>(to + i, from + i);
  }
  commit_copies();
}

// sums += the products of one tap and group, of a part of each operand, for kCount tiles of 16 channels.
// `weights` are the lane's, of the first of these tiles; `input` is the address that the lane gives to
// load_matrices at tap (0, 0).
template <int kCount>
__device__ __forceinline__ void multiply(float (&sums)[kCount][8][4], const uint4* weights, uint32_t input,
                                         int tap, int weight_part, int input_part) {
  const uint32_t pixels = input + 16 * ((input_part * kRows + tap / KERNEL_W) * kPitch + tap % KERNEL_W);
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

// sums += all products of one tap and group. Tensor cores cut off as they add. So split operands' small
// products come first, and each tap's sum is added to the others in float32.
__device__ __forceinline__ void multiply_tap(
    float (&sums)[4][8][4], const uint4* weights, uint32_t input, int tap) {
  if constexpr (SPLIT) {
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

// A warp's results, 16 channels × 64 pixels, to y at `to`, channels `stride` apart; of these `channels` and
// `pixels` exist. They go by way of the warp's staging, so that neighbouring lanes store neighbouring pixels.
__device__ __forceinline__ void store(
    result_t* to, float* staging, const float (&values)[8][4], int64_t stride, int channels, int64_t pixels) {
  const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  __syncwarp();  // the last 16 channels have been read
#pragma unroll
  for (int j = 0; j < 8; j++) {
    const auto pair = [&](int channel) {
      return reinterpret_cast<float2*>(staging + channel * kStagingPitch + j * 8 + t * 2);
    };
    *pair(g) = make_float2(values[j][0], values[j][1]);
    *pair(g + 8) = make_float2(values[j][2], values[j][3]);
  }
  __syncwarp();  // these have been written
#pragma unroll 4
  for (int c = 0; c < channels; c++, to += stride) {
#pragma unroll
    for (int j = lane; j < 64; j += 32)
      if (j < pixels) to[j] = result_t(staging[c * kStagingPitch + j]);
  }
}

#endif

// Grid: tiles of all samples, channel blocks.
__global__ void __launch_bounds__(kThreads) convolve_kernel(Arguments args, const uint4* packed_x) {
#if __CUDA_ARCH__ >= 800
  extern __shared__ uint4 shared[];
  uint4* const input = shared;
  uint4* const weights = shared + kInput;
  const Tile tile(args);
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int warp_n = warp % 2, warp_row = kTileRows == 1 ? 0 : warp / 2 / kMWarps;
  const int warp_m = warp / 2 - warp_row * kMWarps;
  float sums[4][8][4] = {};
  // load_matrices: lanes 0-7 give pixels 0-7 of a step's first plane, 8-15 those of its second, 16-31 pixels
  // 8-15 likewise.
  const uint32_t input_address = shared_address(input) + 16 * (lane / 8 % 2 * kParts * kRows * kPitch +
                                                               warp_n * 64 + lane / 16 * 8 + lane % 8) +
                                 16 * warp_row * kPitch;

  fetch_input(input, packed_x, args, tile, 0);
  fetch_weights(weights, args.packed_weight, 0);
  fetch_weights(weights, args.packed_weight, 1);
#pragma unroll 1
  for (int iteration = 0; iteration < kIterations; iteration++) {
    await_copies<1>();  // all but the newest group: this thread's share of the iteration's weights is there
    __syncthreads();    // everyone's share is; and everyone is done with the last iteration
    if (kGroups > 1 && iteration > 0 && iteration % kTaps == 0) {
      fetch_input(input, packed_x, args, tile, iteration / kTaps);
      commit_copies();
      await_copies<0>();
      __syncthreads();  // the group's pixels are there
    }
    fetch_weights(weights, args.packed_weight, iteration + 2);
    const uint4* const stage = weights + iteration % kStages * kTapWeights;
    multiply_tap(sums, stage + warp_m * 4 * 32 + lane, input_address, iteration % kTaps);
  }
  __syncthreads();  // everyone is done with the operands, whose place staging takes

  const int64_t output_row = tile.row + warp_row;
  if (kTileRows > 1 && output_row >= args.height()) return;
  const int64_t column = tile.column + warp_n * 64, plane_size = args.height() * args.width();
  const int exponent = kScaled ? sample_exponent(args.largest[tile.n]) : 0;
#pragma unroll
  for (int i = 0; i < 4; i++) {
    const int channel = blockIdx.y * kBlockChannels + warp_m * 64 + i * 16;
    const Epilogue low = make_epilogue(args, channel + lane / 4, exponent);
    const Epilogue high = make_epilogue(args, channel + 8 + lane / 4, exponent);
    const Gates<8> gates = apply_epilogue(sums[i], low, high, args.constant, args.scale);
    if constexpr (SAVES) {
      const int64_t at =
          gate_index(tile.n, channel, output_row, column, args.height(), args.width(), CHANNELS_OUT);
      store_gates(args.gates + at, gates, CHANNELS_OUT - channel, args.width() - column);
    }
    const int64_t row = (tile.n * CHANNELS_OUT + channel) * args.height() + output_row;
    store(args.y + row * args.width() + column, reinterpret_cast<float*>(shared) + warp * kStaging, sums[i],
          plane_size, min(CHANNELS_OUT - channel, 16), args.width() - column);
  }
#endif
}

// ---------------------------------------------------------------------------------------------------- launch

// Bytes of packed x, which convolve() makes.
int64_t packed_input_bytes(int64_t N, int64_t S) { return int64_t(kPlanes) * 8 * 2 * kParts * N * S; }

void convolve_packed(const Arguments& args, const uint4* packed_x, cudaStream_t stream) {
  allow_shared<convolve_kernel>();
  const dim3 grid(args.N * args.bands() * args.strips(), kChannelBlocks);
  convolve_kernel<<<grid, kThreads, kSharedBytes, stream>>>(args, packed_x);
}

void convolve(const Arguments& args, uint4* packed_x, cudaStream_t stream) {
  const int64_t S = args.H * args.W;
  const unsigned samples = args.N < 65535 ? args.N : 65535;
  const dim3 pack_grid((S + kPackThreads * kPackPixels - 1) / (kPackThreads * kPackPixels), kPlanes, samples);
  pack_input_kernel<<<pack_grid, kPackThreads, 0, stream>>>(packed_x, args.largest, args.x, args.N, S);
  const dim3 repack_grid(kRepackBlocks, samples);
  if (kScaled)
    repack_input_kernel<<<repack_grid, kPackThreads, 0, stream>>>(packed_x, args.largest, args.x, args.N, S);
  convolve_packed(args, packed_x, stream);
}

}  // namespace
