// conv2d_min_add_multiply_fused.cu by mma.sync, for any size, on compute capability 8.0 or later.
//
//   pack_input_kernel    x (N, CHANNELS_IN, H, W) to packed (N, kPlanes, kParts, H, W, 8): 8 channels of a pixel side by side
//   repack_input_kernel  once more, the samples which the first scale did not fit; ends at once where there are none
//   convolve_kernel      a block computes kBlockChannels channels of a tile, from shared memory: the packed pixels of a group
//                        of input channels under all taps, and in a ring the weights of a tap and group
//
// Bytes at the default size (128, 64, 128, 128), 3×3, 128 channels out: 537 MB read and 268 MB written to pack; 268 MB read and
// 1040 MB written to convolve. Bound: memory 0.49 ms at 4.28 TB/s, products 0.56 ms, one after the other.
#pragma once
#include "conv2d_min_add_multiply_fused.cuh"

namespace {

// ----------------------------------------------------------------------------------------------------------------- packing

constexpr int kPackThreads = 256;
constexpr int kPackPixels = 4;     // per thread: 8 × 4 loads in flight
constexpr int kRepackBlocks = 32;  // of a sample

#if __CUDA_ARCH__ >= 800

// Raises *largest, the bits of a magnitude, to what the block's threads found.
__device__ __forceinline__ void raise_largest(uint32_t* largest, float of_thread) {
  __shared__ uint32_t of_block;
  if (threadIdx.x == 0) of_block = 0;
  __syncthreads();  // cleared before anyone adds to it
  const uint32_t mine = __reduce_max_sync(0xffffffffu, __float_as_uint(of_thread));
  if (threadIdx.x % 32 == 0) atomicMax(&of_block, mine);
  __syncthreads();  // complete before it is read; the next round clears it after this thread has read it
  if (threadIdx.x == 0) atomicMax(largest, of_block);
}

#endif

// x (N, CHANNELS_IN, S) to packed (N, kPlanes, kParts, S, 8) under the scale 2^kFirstExponent, and largest[n] = the bits of
// the largest finite magnitude of sample n. Grid: pixels, planes, samples.
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
      for (int c = 0; c < 8; c++) value[i][c] = s < S && plane * 8 + c < CHANNELS_IN ? float(in[c * S + s]) : 0.f;
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

// Packs again the samples to which the first scale does not fit. Grid: parts of a sample, samples.
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
      for (int c = 0; c < 8; c++)
        value[c] = plane * 8 + c < CHANNELS_IN ? scaled(float(x[(n * CHANNELS_IN + plane * 8 + c) * S + s]), scale) : 0.f;
      pack_pixel(packed + (n * kPlanes + plane) * kParts * S + s, S, value);
    }
  }
}

// ------------------------------------------------------------------------------------------------------------- convolution

constexpr int kStages = STAGES;  // of weights: the current one's, and two on their way
constexpr int kInput = kGroup / 8 * kParts * KERNEL_H * kPitch;
constexpr int kThreads = kBlockChannels / 64 * 64;  // a warp computes 64 channels × 64 pixels
constexpr int kStagingPitch = 72;                   // floats per channel: 8 banks on from channel to channel, no conflicts
constexpr int kStaging = 16 * kStagingPitch;        // per warp
constexpr int kOperandBytes = (kInput + kStages * kChunk) * 16, kStagingBytes = kThreads / 32 * kStaging * 4;
constexpr int kBytes = kOperandBytes > kStagingBytes ? kOperandBytes : kStagingBytes;
constexpr int kIterations = kGroups * kTaps;
static_assert(kStages == 3 && kBytes == SHARED_BYTES, "Python planned another layout");

#if __CUDA_ARCH__ >= 800

// What a block computes: kBlockChannels channels of up to 128 pixels of an output row.
struct Tile {
  int64_t n, row, column;
  __device__ __forceinline__ explicit Tile(const Arguments& of) {
    const int64_t strips = of.strips(), strip = blockIdx.x % strips;
    row = blockIdx.x / strips % of.height(), n = blockIdx.x / strips / of.height(), column = strip * kTileWidth;
  }
};

// A group of input channels to shared memory, in the background: input [plane][part][kernel row][pixel].
__device__ __forceinline__ void fetch_input(
    uint4* input, const uint4* packed_x, const Arguments& of, const Tile& tile, int group) {
  const int64_t S = of.H * of.W;
  for (int i = threadIdx.x; i < kInput; i += kThreads) {
    const int pixel = i % kPitch, kernel_row = i / kPitch % KERNEL_H, plane = i / (kPitch * KERNEL_H);
    const bool real = tile.column + pixel < of.W;
    const int64_t first = ((tile.n * kGroups + group) * (kGroup / 8 * kParts) + plane) * S;
    const int64_t source = first + (tile.row + kernel_row) * of.W + tile.column + pixel;
    copy_async_or_zero(input + i, packed_x + (real ? source : 0), real);
  }
}

// The weights of a tap and group likewise, to their stage [kChunk]. A group of copies, be it an empty one, so that the count of
// pending groups stays the same.
__device__ __forceinline__ void fetch_weights(uint4* weights, const uint4* packed_weight, int iteration) {
  if (iteration < kIterations) {
    const uint4* from = packed_weight + (int64_t(blockIdx.y) * kIterations + iteration) * kChunk;
    uint4* to = weights + iteration % kStages * kChunk;
    for (int i = threadIdx.x; i < kChunk; i += kThreads) copy_async<16>(to + i, from + i);
  }
  commit_copies();
}

// Adds the products of one tap and group, of kCount tiles of 16 channels, to `sums`. `weights`: the lane's, of the first tile;
// `input`: the address that the lane gives to load_matrices at tap (0, 0).
template <int kCount>
__device__ __forceinline__ void multiply(
    float (&sums)[kCount][8][4], const uint4* weights, uint32_t input, int tap, int a_part, int b_part) {
  const uint32_t pixels = input + 16 * ((b_part * KERNEL_H + tap / KERNEL_W) * kPitch + tap % KERNEL_W);
#pragma unroll
  for (int step = 0; step < kSteps; step++) {
    uint32_t a[kCount][4];
#pragma unroll
    for (int i = 0; i < kCount; i++) {
      const uint4 fragment = weights[((step * kParts + a_part) * kMTiles + i) * 32];
      a[i][0] = fragment.x, a[i][1] = fragment.y, a[i][2] = fragment.z, a[i][3] = fragment.w;
    }
#pragma unroll
    for (int j = 0; j < 4; j++) {
      uint32_t b[4];
      load_matrices(b, pixels + 16 * (step * 2 * kParts * KERNEL_H * kPitch + j * 16));
#pragma unroll
      for (int i = 0; i < kCount; i++) {
        multiply_add<operand_t>(sums[i][j * 2], a[i], b[0], b[1]);
        multiply_add<operand_t>(sums[i][j * 2 + 1], a[i], b[2], b[3]);
      }
    }
  }
}

// Adds all products of one tap and group. Tensor cores truncate as they add: of split operands the small products come first,
// and each tap's sum is added in float32.
__device__ __forceinline__ void multiply_tap(float (&sums)[4][8][4], const uint4* weights, uint32_t input, int tap) {
  if constexpr (SPLIT) {
#pragma unroll
    for (int first = 0; first < 4; first += 2) {
      float tap_sums[2][8][4] = {};
      multiply(tap_sums, weights + first * 32, input, tap, kParts - 1, 0);
      multiply(tap_sums, weights + first * 32, input, tap, 0, kParts - 1);
      multiply(tap_sums, weights + first * 32, input, tap, 0, 0);
#pragma unroll
      for (int i = 0; i < 64; i++) sums[first + i / 32][i / 4 % 8][i % 4] += tap_sums[i / 32][i / 4 % 8][i % 4];
    }
  } else {
    multiply(sums, weights, input, tap, 0, 0);
  }
}

// A warp's results, 16 channels × 64 pixels, to `to`, channels `stride` apart; of these `channels` and `pixels` exist. By way
// of the warp's staging, so that stores are runs of pixels.
__device__ __forceinline__ void store(
    output_t* to, float* staging, const float (&values)[8][4], int64_t stride, int channels, int64_t pixels) {
  const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  __syncwarp();  // the last 16 channels have been read
#pragma unroll
  for (int j = 0; j < 8; j++) {
    *reinterpret_cast<float2*>(staging + g * kStagingPitch + j * 8 + t * 2) = make_float2(values[j][0], values[j][1]);
    *reinterpret_cast<float2*>(staging + (g + 8) * kStagingPitch + j * 8 + t * 2) = make_float2(values[j][2], values[j][3]);
  }
  __syncwarp();  // these have been written
#pragma unroll 4
  for (int c = 0; c < channels; c++, to += stride) {
#pragma unroll
    for (int j = lane; j < 64; j += 32)
      if (j < pixels) to[j] = output_t(staging[c * kStagingPitch + j]);
  }
}

#endif

// Grid: tiles of all samples, channel blocks.
__global__ void __launch_bounds__(kThreads) convolve_kernel(Arguments of, const uint4* packed_x) {
#if __CUDA_ARCH__ >= 800
  extern __shared__ uint4 shared[];
  uint4* const input = shared;
  uint4* const weights = shared + kInput;
  const Tile tile(of);
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, warp_m = warp / 2, warp_n = warp % 2;
  float sums[4][8][4] = {};
  // load_matrices: lanes 0-7 give pixels 0-7 of a step's first plane, 8-15 those of its second, 16-31 pixels 8-15 likewise.
  const uint32_t input_address =
      shared_address(input) + 16 * (lane / 8 % 2 * kParts * KERNEL_H * kPitch + warp_n * 64 + lane / 16 * 8 + lane % 8);

  fetch_input(input, packed_x, of, tile, 0);
  fetch_weights(weights, of.packed_weight, 0);
  fetch_weights(weights, of.packed_weight, 1);
#pragma unroll 1
  for (int iteration = 0; iteration < kIterations; iteration++) {
    await_copies<1>();  // all but the newest group: this iteration's weights have arrived
    __syncthreads();    // for everyone; and everyone is done with the last iteration
    if (kGroups > 1 && iteration > 0 && iteration % kTaps == 0) {
      fetch_input(input, packed_x, of, tile, iteration / kTaps);
      commit_copies();
      await_copies<0>();
      __syncthreads();  // the group's pixels are there
    }
    fetch_weights(weights, of.packed_weight, iteration + 2);
    multiply_tap(sums, weights + iteration % kStages * kChunk + warp_m * 4 * 32 + lane, input_address, iteration % kTaps);
  }
  __syncthreads();  // everyone is done with the shared memory that staging overwrites

  const int64_t pixel = tile.column + warp_n * 64, plane_size = of.height() * of.width();
  const int exponent = kScaled ? sample_exponent(of.largest[tile.n]) : 0;
#pragma unroll
  for (int i = 0; i < 4; i++) {
    const int channel = blockIdx.y * kBlockChannels + warp_m * 64 + i * 16;
    const Tail low = make_tail(of, channel + lane / 4, exponent), high = make_tail(of, channel + 8 + lane / 4, exponent);
    finish(sums[i], low, high, of.constant, of.scale);
    output_t* to = of.y + ((tile.n * CHANNELS_OUT + channel) * of.height() + tile.row) * of.width() + pixel;
    store(to, reinterpret_cast<float*>(shared) + warp * kStaging, sums[i], plane_size, min(CHANNELS_OUT - channel, 16),
          of.width() - pixel);
  }
#endif
}

// Bytes of packed x, which convolve() makes.
int64_t packed_input_bytes(int64_t N, int64_t S) { return int64_t(kPlanes) * 8 * 2 * kParts * N * S; }

void convolve(const Arguments& of, uint4* packed_x, cudaStream_t stream) {
  const int64_t S = of.H * of.W;
  const unsigned samples = of.N < 65535 ? of.N : 65535;
  const dim3 pack_grid((S + kPackThreads * kPackPixels - 1) / (kPackThreads * kPackPixels), kPlanes, samples);
  pack_input_kernel<<<pack_grid, kPackThreads, 0, stream>>>(packed_x, of.largest, of.x, of.N, S);
  const dim3 repack_grid(kRepackBlocks, samples);
  if (kScaled) repack_input_kernel<<<repack_grid, kPackThreads, 0, stream>>>(packed_x, of.largest, of.x, of.N, S);
  cudaFuncSetAttribute(convolve_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes);
  const dim3 grid(of.N * of.height() * of.strips(), kChannelBlocks);
  convolve_kernel<<<grid, kThreads, kBytes, stream>>>(of, packed_x);
}

}  // namespace
