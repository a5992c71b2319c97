// y = (min(conv2d(x, weight) + conv_bias, constant) + bias) * scale in one pass: the convolution is never written.
//
// x (N, CHANNELS_IN, H, W), weight (CHANNELS_OUT, CHANNELS_IN, KERNEL_H, KERNEL_W), conv_bias and bias (CHANNELS_OUT),
// y (N, CHANNELS_OUT, H', W') with H' = H - KERNEL_H + 1, W' = W - KERNEL_W + 1; stride 1, no padding; all contiguous.
//
// An implicit GEMM on tensor cores: M = output channels, N = output pixels of one row, K = taps × input channels.
//   float32   operands are rounded to nearest float16 (11 bits of mantissa, as TF32), sums are float32. Powers of two bring
//             each sample of x and each output channel of weight into float16's range; the tail takes them out again, exactly.
//             What is more than 2^39 times smaller than the largest value of its sample counts as zero.
//   float32, SPLIT=1   each operand is a sum of two float16 (22 bits): three products give float32 accuracy.
//   float16, bfloat16  products of the type itself, unscaled.
// inf and NaN reach every output whose window holds them, as in PyTorch.
//
// Two ways, chosen by the launcher:
// - wgmma, on compute capability 9.0, where all weights find room on a multiprocessor (at most 64 input channels, at most 576
//   input channels × taps): x is converted on its way into shared memory, under a scale that fits almost all inputs, while the
//   largest magnitude of each sample is found; samples which it did not fit are computed again by a second launch, which
//   otherwise ends at once. Bytes at the default size (128, 64, 128, 128), 3×3, 128 channels out: 537 MB read, 1040 MB written.
//   Bound: memory 0.37 ms at 4.28 TB/s, 300 GFLOP 0.30 ms.
// - mma.sync, otherwise: a first pass packs x to float16 with 8 channels of a pixel side by side (537 MB read, 268 MB
//   written), a second one those samples again that need another scale, a third multiplies (268 MB read, 1040 MB written).
//   Bound: memory 0.49 ms, products 0.56 ms, one after the other.
// Compute capability 8.0 or later.
#include "scalar.h"

#ifdef __CUDACC__
#pragma nv_diag_suppress 177  // a build takes one of the two ways and leaves the other's helpers unused
#endif

#ifndef SPLIT
#define SPLIT 0
#endif
#ifndef CHANNELS_IN
#define CHANNELS_IN 64
#define CHANNELS_OUT 128
#define KERNEL_H 3
#define KERNEL_W 3
#endif

namespace {

template <class A, class B> constexpr bool kSame = false;
template <class A> constexpr bool kSame<A, A> = true;

constexpr bool kScaled = kSame<value_t, float>;  // half inputs need no scale
template <class T> struct OperandFor { using type = half_t; };
template <> struct OperandFor<bfloat16_t> { using type = bfloat16_t; };
using operand_t = OperandFor<value_t>::type;

constexpr int ceil_div(int a, int b) { return (a + b - 1) / b; }

constexpr int kTaps = KERNEL_H * KERNEL_W;
constexpr int kParts = SPLIT ? 2 : 1;  // high and low half of an operand
// Input channels come in groups: as many as a block keeps in shared memory at once, a multiple of 16.
constexpr int kChannels16 = ceil_div(CHANNELS_IN, 16) * 16;
constexpr int kGroup = kChannels16 < 64 / kParts ? kChannels16 : 64 / kParts;
constexpr int kGroups = ceil_div(CHANNELS_IN, kGroup);
constexpr int kPlanes = kGroups * kGroup / 8;  // 8 channels of a pixel, 16 bytes, are the unit of the packed input
constexpr int kSteps = kGroup / 16;            // products of depth 16 per tap and group
constexpr int kBlockChannels = CHANNELS_OUT > 64 ? 128 : 64;
constexpr int kChannelBlocks = ceil_div(CHANNELS_OUT, kBlockChannels);
constexpr int kMTiles = kBlockChannels / 16;

// ------------------------------------------------------------------------------------------------- powers of two as scales

// Scaled magnitudes stay below 2^15, half of float16's range.
constexpr int kTop = 14;
// The scale of the first packing, and the range of the largest scaled magnitude in which it is good enough: the smallest
// normal float16 is 2^-14, and all that lies below loses precision.
constexpr int kFirstExponent = SPLIT ? 10 : 4;
constexpr int kLowest = SPLIT ? 8 : -4;

__device__ __forceinline__ float power_of_two(int exponent) { return __int_as_float((exponent + 127) << 23); }  // -126 … 127

// value · 2^exponent for any exponent that a float32 magnitude can ask for; two factors, since one may not be a float32.
__device__ __forceinline__ float scale_by(float value, int exponent) {
  const int half = exponent / 2;
  return value * power_of_two(half) * power_of_two(exponent - half);
}

// The exponent that brings the magnitude with these bits to [2^14, 2^15); zero needs none.
__device__ __forceinline__ int fitting_exponent(uint32_t magnitude) {
  return magnitude == 0 ? 0 : kTop - ilogbf(__uint_as_float(magnitude));
}

// The exponent under which a sample is packed, from the bits of its largest finite magnitude.
__device__ __forceinline__ int sample_exponent(uint32_t largest) {
  const int fitting = fitting_exponent(largest), slack = fitting - kFirstExponent;
  return largest == 0 || (slack >= 0 && slack <= kTop - kLowest) ? kFirstExponent : fitting;
}

// max(largest, |value|) as bits, skipping inf and NaN.
__device__ __forceinline__ uint32_t larger_magnitude(uint32_t largest, float value) {
  const uint32_t magnitude = __float_as_uint(value) & 0x7fffffffu;
  return magnitude < 0x7f800000u && magnitude > largest ? magnitude : largest;
}

// The value as one operand, or as the sum of two.
struct Parts { operand_t part[kParts]; };
__device__ __forceinline__ Parts split(float value) {
  Parts result;
  result.part[0] = operand_t(value);
  if constexpr (SPLIT) {
    // inf and NaN go to the low part, which meets one part of the other operand only: one product, one sign.
    const float high = float(result.part[0]);
    const bool finite = high - high == 0.f;
    if (!finite) result.part[0] = operand_t(0.f);
    result.part[kParts - 1] = operand_t(finite ? value - high : value);
  }
  return result;
}

// ----------------------------------------------------------------------------------------------------------------- packing

constexpr int kPackThreads = 256;
constexpr int kPackPixels = 4;  // per thread: 8 × 4 loads in flight

// Weights as A fragments of the 16×16 product: [channel block][group][tap][step][part][tile of 16 channels][lane] of 4
// registers. A block per output channel; all of a padding channel is 0. Also clears largest[N].
__global__ void __launch_bounds__(128) pack_weight_kernel(operand_t* packed, int32_t* exponents, uint32_t* largest, const value_t* weight, int64_t N) {
  constexpr int kDepth = CHANNELS_IN * kTaps;
  __shared__ uint32_t shared_largest;
  const int channel = blockIdx.x;
  const bool real = channel < CHANNELS_OUT;
  for (int64_t n = int64_t(blockIdx.x) * blockDim.x + threadIdx.x; n < N; n += int64_t(gridDim.x) * blockDim.x) largest[n] = 0;
  int exponent = 0;
  if constexpr (kScaled) {
    if (threadIdx.x == 0) shared_largest = 0;
    __syncthreads();  // cleared before anyone adds to it
    uint32_t mine = 0;
    for (int i = threadIdx.x; real && i < kDepth; i += blockDim.x) mine = larger_magnitude(mine, weight[int64_t(channel) * kDepth + i]);
    atomicMax(&shared_largest, mine);
    __syncthreads();  // complete before anyone reads it
    exponent = fitting_exponent(shared_largest);
    if (threadIdx.x == 0) exponents[channel] = exponent;
  }
  const int block = channel / kBlockChannels, tile = channel % kBlockChannels / 16, row = channel % 16;
  for (int i = threadIdx.x; i < kGroups * kGroup * kTaps; i += blockDim.x) {
    const int c = i / kTaps, tap = i % kTaps, group = c / kGroup, step = c % kGroup / 16, k = c % 16;
    float value = real && c < CHANNELS_IN ? float(weight[(int64_t(channel) * CHANNELS_IN + c) * kTaps + tap]) : 0.f;
    if constexpr (kScaled) value = scale_by(value, exponent);
    const Parts parts = split(value);
    // Fragment A: register 0 holds (row g, k 2t), 1 (row g + 8, k 2t), 2 and 3 the same with k + 8; lane = 4 g + t.
    const int lane = row % 8 * 4 + k % 8 / 2, reg = row / 8 + k / 8 * 2;
    const int64_t chunk = ((int64_t(block) * kGroups + group) * kTaps + tap) * kSteps + step;
#pragma unroll
    for (int part = 0; part < kParts; part++)
      packed[((((chunk * kParts + part) * kMTiles + tile) * 32 + lane) * 4 + reg) * 2 + k % 2] = parts.part[part];
  }
}

// Packs one pixel of one plane, 8 channels; its parts lie S units of 16 bytes apart.
__device__ __forceinline__ void pack_pixel(uint4* out, int64_t S, const float (&value)[8]) {
  union { operand_t operand[8]; uint4 bits; } pack[kParts];
#pragma unroll
  for (int c = 0; c < 8; c++) {
    const Parts parts = split(value[c]);
#pragma unroll
    for (int part = 0; part < kParts; part++) pack[part].operand[c] = parts.part[part];
  }
#pragma unroll
  for (int part = 0; part < kParts; part++) out[part * S] = pack[part].bits;
}

// x (N, CHANNELS_IN, S) to packed (N, kPlanes, kParts, S, 8) under the scale 2^kFirstExponent, and largest[n] = the bits of
// the largest finite magnitude of sample n. Grid: pixels, planes, samples.
__global__ void __launch_bounds__(kPackThreads) pack_input_kernel(uint4* packed, uint32_t* largest, const value_t* x, int64_t N, int64_t S) {
  __shared__ uint32_t shared_largest;
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
    uint32_t mine = 0;
#pragma unroll
    for (int i = 0; i < kPackPixels; i++) {
#pragma unroll
      for (int c = 0; c < 8; c++) {
        if constexpr (kScaled) {
          mine = larger_magnitude(mine, value[i][c]);
          value[i][c] *= power_of_two(kFirstExponent);
        }
      }
      if (first + i * kPackThreads < S) pack_pixel(out + first + i * kPackThreads, S, value[i]);
    }
    if constexpr (kScaled) {
      if (threadIdx.x == 0) shared_largest = 0;
      __syncthreads();  // cleared before anyone adds to it
      mine = __reduce_max_sync(0xffffffffu, mine);
      if (threadIdx.x % 32 == 0) atomicMax(&shared_largest, mine);
      __syncthreads();  // complete before it is read; the next round clears it after this thread has read it
      if (threadIdx.x == 0) atomicMax(&largest[n], shared_largest);
    }
  }
}

// Packs again the samples to which the first scale does not fit. Grid: parts of a sample, samples.
__global__ void __launch_bounds__(kPackThreads) repack_input_kernel(uint4* packed, const uint32_t* largest, const value_t* x, int64_t N, int64_t S) {
  for (int64_t n = blockIdx.y; n < N; n += gridDim.y) {
    const int exponent = sample_exponent(largest[n]);
    if (exponent == kFirstExponent) continue;
    for (int64_t i = int64_t(blockIdx.x) * kPackThreads + threadIdx.x; i < kPlanes * S; i += int64_t(gridDim.x) * kPackThreads) {
      const int64_t plane = i / S, s = i % S;
      float value[8];
#pragma unroll
      for (int c = 0; c < 8; c++)
        value[c] = plane * 8 + c < CHANNELS_IN ? scale_by(float(x[(n * CHANNELS_IN + plane * 8 + c) * S + s]), exponent) : 0.f;
      pack_pixel(packed + (n * kPlanes + plane) * kParts * S + s, S, value);
    }
  }
}

// ---------------------------------------------------------------------------------------------------------------- the tail

// What the tail needs of one output channel.
struct Tail {
  float before, factor;  // together 2^exponent, which takes the scales out of a sum; one alone may not be a float32
  float conv_bias, bias;

  __device__ __forceinline__ void set_exponent(int exponent) {
    const int last = min(max(exponent, -126), 127);
    factor = power_of_two(last);
    before = power_of_two(min(max(exponent - last, -126), 127));  // nearly always 1
  }
};

__device__ __forceinline__ Tail make_tail(int channel, int exponent, const accumulate_t* conv_bias, const accumulate_t* bias) {
  const bool real = channel < CHANNELS_OUT;
  Tail tail{1.f, 1.f, real ? float(conv_bias[channel]) : 0.f, real ? float(bias[channel]) : 0.f};
  tail.set_exponent(exponent);
  return tail;
}

// min(a, b), NaN wins.
__device__ __forceinline__ float minimum_of(float a, float b) {
  float result;
  asm("min.NaN.f32 %0, %1, %2;" : "=f"(result) : "f"(a), "f"(b));
  return result;
}

// Turns a warp's sums of 16 channels × 8·kTiles pixels into results, in PyTorch's order of operations. Lane 4 g + t holds
// pixels 8 j + 2 t and the next: of channel g in [j][0] and [j][1], of channel g + 8 in [j][2] and [j][3].
template <int kTiles>
__device__ __forceinline__ void finish(float (&sums)[kTiles][4], const Tail& low, const Tail& high, float constant, float scale) {
  if (kScaled && __any_sync(0xffffffffu, low.before != 1.f || high.before != 1.f)) {
#pragma unroll
    for (int i = 0; i < kTiles * 4; i++) sums[i / 4][i % 4] *= i % 4 < 2 ? low.before : high.before;
  }
#pragma unroll
  for (int i = 0; i < kTiles * 4; i++) {
    const Tail& tail = i % 4 < 2 ? low : high;
    float& value = sums[i / 4][i % 4];
    value = (minimum_of(value * tail.factor + tail.conv_bias, constant) + tail.bias) * scale;
  }
}

struct alignas(2 * sizeof(output_t)) Pair { output_t at[2]; };

// --------------------------------------------------------------------------------------------------- products by mma.sync

#if __CUDA_ARCH__ >= 800 || !defined(__CUDA_ARCH__)

constexpr int kTileWidth = 128;  // output pixels of a block
constexpr int kPitch = kTileWidth + KERNEL_W - 1;
constexpr int kStages = 3;                             // of weights
constexpr int kChunk = kSteps * kParts * kMTiles * 32;  // weights of a tap and group, in 16 bytes
constexpr int kInput = kGroup / 8 * kParts * KERNEL_H * kPitch;
constexpr int kThreads = kBlockChannels / 64 * 64;  // a warp computes 64 channels × 64 pixels
constexpr int kStagingPitch = 72;                   // floats per channel
constexpr int kStaging = 16 * kStagingPitch;        // per warp
constexpr int kMainBytes = (kInput + kStages * kChunk) * 16 > kThreads / 32 * kStaging * 4 ? (kInput + kStages * kChunk) * 16 : kThreads / 32 * kStaging * 4;

// Copies 16 bytes to shared memory in the background, or writes zeros.
__device__ __forceinline__ void copy_async(void* to, const void* from, bool real) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(uint32_t(__cvta_generic_to_shared(to))), "l"(from), "r"(real ? 16 : 0) : "memory");
}
__device__ __forceinline__ void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int kPending> __device__ __forceinline__ void await_copies() { asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory"); }

__device__ __forceinline__ void load_matrices(uint32_t (&b)[4], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];" : "=r"(b[0]), "=r"(b[1]), "=r"(b[2]), "=r"(b[3]) : "r"(address) : "memory");
}

__device__ __forceinline__ void multiply_add(float (&d)[4], const uint4& a, uint32_t b0, uint32_t b1) {
  if constexpr (kSame<operand_t, half_t>)
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]) : "r"(a.x), "r"(a.y), "r"(a.z), "r"(a.w), "r"(b0), "r"(b1));
  else
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]) : "r"(a.x), "r"(a.y), "r"(a.z), "r"(a.w), "r"(b0), "r"(b1));
}

// A block computes kBlockChannels channels of up to 128 pixels of one output row. Grid: tiles of all samples, channel blocks.
__global__ void __launch_bounds__(kThreads) convolve_kernel(output_t* y, const uint4* packed_x, const uint4* packed_weight,
    const int32_t* exponents, const uint32_t* largest, const accumulate_t* conv_bias, const accumulate_t* bias, float constant, float scale, int64_t H, int64_t W) {
  extern __shared__ uint4 shared[];
  uint4* const input = shared;            // [plane][part][kernel row][pixel]
  uint4* const weights = shared + kInput;  // [stage][kChunk]
  const int64_t OH = H - KERNEL_H + 1, OW = W - KERNEL_W + 1, strips = (OW + kTileWidth - 1) / kTileWidth, S = H * W;
  const int64_t strip = blockIdx.x % strips, row = blockIdx.x / strips % OH, n = blockIdx.x / strips / OH;
  const int64_t column = strip * kTileWidth;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, warp_m = warp / 2, warp_n = warp % 2;

  const auto fetch_input = [&](int group) {
    for (int i = threadIdx.x; i < kInput; i += kThreads) {
      const int pixel = i % kPitch, kernel_row = i / kPitch % KERNEL_H, plane = i / (kPitch * KERNEL_H);
      const bool real = column + pixel < W;
      const int64_t source = ((n * kGroups + group) * (kGroup / 8 * kParts) + plane) * S + (row + kernel_row) * W + column + pixel;
      copy_async(input + i, packed_x + (real ? source : 0), real);
    }
  };
  constexpr int kIterations = kGroups * kTaps;
  const auto fetch_weights = [&](int iteration) {
    if (iteration < kIterations) {
      const uint4* from = packed_weight + (int64_t(blockIdx.y) * kIterations + iteration) * kChunk;
      uint4* to = weights + iteration % kStages * kChunk;
      for (int i = threadIdx.x; i < kChunk; i += kThreads) copy_async(to + i, from + i, true);
    }
    commit_copies();  // an empty group too, so that the count of pending groups stays the same
  };

  float sums[4][8][4] = {};
  // ldmatrix: lanes 0-7 address pixels 0-7 of a step's first plane, 8-15 those of its second, 16-31 pixels 8-15 likewise.
  const uint32_t input_address = uint32_t(__cvta_generic_to_shared(input)) +
      16 * (lane / 8 % 2 * kParts * KERNEL_H * kPitch + warp_n * 64 + lane / 16 * 8 + lane % 8);
  // Adds the products of one tap and group, of kCount tiles of 16 channels from `first` on, to `to`.
  const auto multiply = [&](auto& to, int first, int iteration, int a_part, int b_part) {
    constexpr int kCount = sizeof(to) / sizeof(to[0]);
    const int tap = iteration % kTaps;
    const uint4* a_from = weights + iteration % kStages * kChunk + (warp_m * 4 + first) * 32 + lane;
    const uint32_t b_from = input_address + 16 * ((b_part * KERNEL_H + tap / KERNEL_W) * kPitch + tap % KERNEL_W);
#pragma unroll
    for (int step = 0; step < kSteps; step++) {
      uint4 a[kCount];
#pragma unroll
      for (int i = 0; i < kCount; i++) a[i] = a_from[((step * kParts + a_part) * kMTiles + i) * 32];
#pragma unroll
      for (int j = 0; j < 4; j++) {
        uint32_t b[4];
        load_matrices(b, b_from + 16 * (step * 2 * kParts * KERNEL_H * kPitch + j * 16));
#pragma unroll
        for (int i = 0; i < kCount; i++) {
          multiply_add(to[i][j * 2], a[i], b[0], b[1]);
          multiply_add(to[i][j * 2 + 1], a[i], b[2], b[3]);
        }
      }
    }
  };

  fetch_input(0);
  fetch_weights(0);
  fetch_weights(1);
#pragma unroll 1
  for (int iteration = 0; iteration < kIterations; iteration++) {
    await_copies<1>();  // all but the newest group: this iteration's weights have arrived
    __syncthreads();    // for everyone; and everyone is done with the last iteration
    if (kGroups > 1 && iteration > 0 && iteration % kTaps == 0) {
      fetch_input(iteration / kTaps);
      commit_copies();
      await_copies<0>();
      __syncthreads();
    }
    fetch_weights(iteration + 2);
    if constexpr (SPLIT) {
      // Tensor cores truncate as they add. So the small products come first, and each tap's sum is added in float32.
#pragma unroll
      for (int first = 0; first < 4; first += 2) {
        float tap_sums[2][8][4] = {};
        multiply(tap_sums, first, iteration, kParts - 1, 0);
        multiply(tap_sums, first, iteration, 0, kParts - 1);
        multiply(tap_sums, first, iteration, 0, 0);
#pragma unroll
        for (int i = 0; i < 64; i++) sums[first + i / 32][i / 4 % 8][i % 4] += tap_sums[i / 32][i / 4 % 8][i % 4];
      }
    } else {
      multiply(sums, 0, iteration, 0, 0);
    }
  }
  __syncthreads();  // everyone is done with the shared memory that staging overwrites

  // By way of shared memory, so that stores are runs of pixels. 8 banks on from channel to channel: no conflicts.
  float* const staging = reinterpret_cast<float*>(shared) + warp * kStaging;
  const int64_t pixel = column + warp_n * 64, pixels = OW - pixel;
  const int g = lane / 4, t = lane % 4, sample = kScaled ? sample_exponent(largest[n]) : 0;
#pragma unroll
  for (int i = 0; i < 4; i++) {
    const int channel = blockIdx.y * kBlockChannels + warp_m * 64 + i * 16;
    Tail tails[2];
#pragma unroll
    for (int half = 0; half < 2; half++) {
      const int c = channel + half * 8 + g;
      tails[half] = make_tail(c, kScaled ? -exponents[c] - sample : 0, conv_bias, bias);
    }
    finish(sums[i], tails[0], tails[1], constant, scale);
    __syncwarp();  // the last 16 channels have been read
#pragma unroll
    for (int j = 0; j < 8; j++) {
      *reinterpret_cast<float2*>(staging + g * kStagingPitch + j * 8 + t * 2) = make_float2(sums[i][j][0], sums[i][j][1]);
      *reinterpret_cast<float2*>(staging + (g + 8) * kStagingPitch + j * 8 + t * 2) = make_float2(sums[i][j][2], sums[i][j][3]);
    }
    __syncwarp();  // these have been written
    output_t* to = y + ((n * CHANNELS_OUT + channel) * OH + row) * OW + pixel;
    const int channels = min(CHANNELS_OUT - channel, 16);
#pragma unroll 4
    for (int c = 0; c < channels; c++, to += OH * OW) {
#pragma unroll
      for (int j = lane; j < 64; j += 32)
        if (j < pixels) to[j] = output_t(staging[c * kStagingPitch + j]);
    }
  }
}

#endif

// ---------------------------------------------------------------------------------------------------- products by wgmma

namespace warpgroup {

constexpr int kDepth = kTaps * kSteps;            // products of depth 16 per sum
constexpr int kKept = kDepth < 30 ? kDepth : 30;  // of their weights stay in registers, the others in shared memory
constexpr int kConsumers = 2;                     // warpgroups that multiply, 64 channels × 128 pixels at a time
constexpr int kRows = kConsumers * 64 / kBlockChannels;  // consumers that share a channel range take turns at tiles
constexpr int kThreads = 128 * (1 + kConsumers);
constexpr bool kInTurns = kRows == 1;  // consumers of one tile multiply one after the other
constexpr int kRowBytes = kPlanes * kPitch * 16;  // a slot of the ring: one input row of a strip, [plane][pixel]
constexpr int kWordPixels = 4 / sizeof(value_t);                       // the unit of copies is 4 bytes
constexpr int kRawPitch = ceil_div(kPitch, kWordPixels);               // the same row as it comes: [channel][word]
constexpr int kRawBytes = ceil_div(CHANNELS_IN * kRawPitch, 4) * 16;
constexpr int kRawRows = 2;                          // under way at a time
constexpr int kSector = 32 / sizeof(output_t);        // elements of the unit in which memory is written
constexpr int kStagingPitch = kTileWidth + kSector;   // elements per channel: 8 banks on, no conflicts
constexpr int kStagingBytes = 16 * kStagingPitch * sizeof(output_t);  // per warp
constexpr int kWeightBytes = (kDepth - kKept) * 2 * 64 * 16;    // per consumer: [plane][channel]
constexpr int kRing = KERNEL_H + 1;  // the rows of a tile, and the next
constexpr int kTailBytes = kConsumers * 64 * sizeof(Tail);
constexpr int kBytes = kRing * kRowBytes + kRawRows * kRawBytes + kConsumers * (4 * kStagingBytes + kWeightBytes) + kTailBytes + 2 * kRing * 8;

// Compute capability 9.0 alone has it. All weights of a channel block must find room, most of them in registers.
#ifdef __CUDA_ARCH_LIST__
template <int...> struct Architectures;
constexpr bool kCompiled = kSame<Architectures<__CUDA_ARCH_LIST__>, Architectures<900>>;
#else
constexpr bool kCompiled = false;
#endif
constexpr bool kFits = kGroups == 1 && kDepth <= 36 && kBytes <= 227 * 1024;
constexpr bool kUsed = kCompiled && kFits && !SPLIT;

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

__device__ __forceinline__ uint32_t shared_address(const void* pointer) { return uint32_t(__cvta_generic_to_shared(pointer)); }

__device__ __forceinline__ void initialize(uint64_t* barrier, int arrivals) {
  asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(shared_address(barrier)), "r"(arrivals) : "memory");
}
__device__ __forceinline__ void arrive(uint64_t* barrier) {
  asm volatile("mbarrier.arrive.shared.b64 _, [%0];" ::"r"(shared_address(barrier)) : "memory");
}
__device__ __forceinline__ void await(uint64_t* barrier, uint32_t parity) {
  asm volatile("{\n.reg .pred done;\nagain:\nmbarrier.try_wait.parity.shared.b64 done, [%0], %1;\n@!done bra again;\n}" ::"r"(shared_address(barrier)), "r"(parity) : "memory");
}
__device__ __forceinline__ void copy_word(void* to, const void* from) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(shared_address(to)), "l"(from) : "memory");
}

// A position in the ring: a slot, and how often the ring has been gone through, modulo 2.
struct Position {
  int slot = 0;
  uint32_t parity = 0;
  __device__ __forceinline__ void advance() {
    if (++slot == kRing) slot = 0, parity ^= 1;
  }
};

// d (64 channels × 128 pixels) = a · b, or d + a · b. Lanes hold d, and a where it is in registers, as with mma.sync, 16
// channels per warp. b, and a where it is in shared memory: descriptors without swizzle, a core matrix is 8 pixels
// (channels) of one plane in a row, 8 × 16 bytes; so the pixels may start anywhere.
__device__ __forceinline__ void multiply_add(float (&d)[16][4], const uint32_t (&a)[4], uint64_t b, bool add) {
#define WGMMA(TYPE)  \
  asm volatile(                                                                                \
      "{.reg .pred add;\nsetp.ne.b32 add, %69, 0;\n"   \
      "wgmma.mma_async.sync.aligned.m64n128k16.f32." TYPE "." TYPE " {"   \
      "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, " \
      "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, " \
      "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, " \
      "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63}, " \
      "{%64, %65, %66, %67}, %68, add, 1, 1, 0;}"  \
      : "+f"(d[0][0]), "+f"(d[0][1]), "+f"(d[0][2]), "+f"(d[0][3]),  \
        "+f"(d[1][0]), "+f"(d[1][1]), "+f"(d[1][2]), "+f"(d[1][3]),  \
        "+f"(d[2][0]), "+f"(d[2][1]), "+f"(d[2][2]), "+f"(d[2][3]),  \
        "+f"(d[3][0]), "+f"(d[3][1]), "+f"(d[3][2]), "+f"(d[3][3]),  \
        "+f"(d[4][0]), "+f"(d[4][1]), "+f"(d[4][2]), "+f"(d[4][3]),  \
        "+f"(d[5][0]), "+f"(d[5][1]), "+f"(d[5][2]), "+f"(d[5][3]),  \
        "+f"(d[6][0]), "+f"(d[6][1]), "+f"(d[6][2]), "+f"(d[6][3]),  \
        "+f"(d[7][0]), "+f"(d[7][1]), "+f"(d[7][2]), "+f"(d[7][3]),  \
        "+f"(d[8][0]), "+f"(d[8][1]), "+f"(d[8][2]), "+f"(d[8][3]),  \
        "+f"(d[9][0]), "+f"(d[9][1]), "+f"(d[9][2]), "+f"(d[9][3]),  \
        "+f"(d[10][0]), "+f"(d[10][1]), "+f"(d[10][2]), "+f"(d[10][3]),  \
        "+f"(d[11][0]), "+f"(d[11][1]), "+f"(d[11][2]), "+f"(d[11][3]),  \
        "+f"(d[12][0]), "+f"(d[12][1]), "+f"(d[12][2]), "+f"(d[12][3]),  \
        "+f"(d[13][0]), "+f"(d[13][1]), "+f"(d[13][2]), "+f"(d[13][3]),  \
        "+f"(d[14][0]), "+f"(d[14][1]), "+f"(d[14][2]), "+f"(d[14][3]),  \
        "+f"(d[15][0]), "+f"(d[15][1]), "+f"(d[15][2]), "+f"(d[15][3])  \
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(int(add)))
  if constexpr (kSame<operand_t, half_t>) WGMMA("f16");
  else WGMMA("bf16");
#undef WGMMA
}
__device__ __forceinline__ void multiply_add(float (&d)[16][4], uint64_t a, uint64_t b, bool add) {
#define WGMMA(TYPE)  \
  asm volatile(                                                                                \
      "{.reg .pred add;\nsetp.ne.b32 add, %66, 0;\n"   \
      "wgmma.mma_async.sync.aligned.m64n128k16.f32." TYPE "." TYPE " {"   \
      "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, " \
      "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, " \
      "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, " \
      "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63}, " \
      "%64, %65, add, 1, 1, 0, 0;}"  \
      : "+f"(d[0][0]), "+f"(d[0][1]), "+f"(d[0][2]), "+f"(d[0][3]),  \
        "+f"(d[1][0]), "+f"(d[1][1]), "+f"(d[1][2]), "+f"(d[1][3]),  \
        "+f"(d[2][0]), "+f"(d[2][1]), "+f"(d[2][2]), "+f"(d[2][3]),  \
        "+f"(d[3][0]), "+f"(d[3][1]), "+f"(d[3][2]), "+f"(d[3][3]),  \
        "+f"(d[4][0]), "+f"(d[4][1]), "+f"(d[4][2]), "+f"(d[4][3]),  \
        "+f"(d[5][0]), "+f"(d[5][1]), "+f"(d[5][2]), "+f"(d[5][3]),  \
        "+f"(d[6][0]), "+f"(d[6][1]), "+f"(d[6][2]), "+f"(d[6][3]),  \
        "+f"(d[7][0]), "+f"(d[7][1]), "+f"(d[7][2]), "+f"(d[7][3]),  \
        "+f"(d[8][0]), "+f"(d[8][1]), "+f"(d[8][2]), "+f"(d[8][3]),  \
        "+f"(d[9][0]), "+f"(d[9][1]), "+f"(d[9][2]), "+f"(d[9][3]),  \
        "+f"(d[10][0]), "+f"(d[10][1]), "+f"(d[10][2]), "+f"(d[10][3]),  \
        "+f"(d[11][0]), "+f"(d[11][1]), "+f"(d[11][2]), "+f"(d[11][3]),  \
        "+f"(d[12][0]), "+f"(d[12][1]), "+f"(d[12][2]), "+f"(d[12][3]),  \
        "+f"(d[13][0]), "+f"(d[13][1]), "+f"(d[13][2]), "+f"(d[13][3]),  \
        "+f"(d[14][0]), "+f"(d[14][1]), "+f"(d[14][2]), "+f"(d[14][3]),  \
        "+f"(d[15][0]), "+f"(d[15][1]), "+f"(d[15][2]), "+f"(d[15][3])  \
      : "l"(a), "l"(b), "r"(int(add)))
  if constexpr (kSame<operand_t, half_t>) WGMMA("f16");
  else WGMMA("bf16");
#undef WGMMA
}

// A warp's 16 channels × 128 pixels, laid out as for finish(), to y at `to`, channels `stride` apart; of these `channels` and
// `pixels` exist. Memory is written in whole sectors (32 bytes) wherever possible, since stores are what bounds the kernel. So
// each channel lies in `staging` as far from a sector's start as in y, and the copy engine takes the whole sectors. Where the
// last row ended in a sector that this row continues (`continues`), its rest is still in staging and goes along; where the
// next row will continue (`continued`), the last part of a sector waits. Threads store what is left.
__device__ __forceinline__ void store_tile(output_t* to, output_t* staging, const float (&values)[16][4], int64_t stride, int channels,
                                           int pixels, bool continues, bool continued) {
  const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const auto shift_of = [&](int channel) { return int(reinterpret_cast<uintptr_t>(to + channel * stride) / sizeof(output_t) % kSector); };
  pixels = min(pixels, kTileWidth);
  // Lanes l and l + 16 see to channel l.
  const int channel = lane % 16, shift = shift_of(channel), end = shift + pixels;
  output_t* const mine = staging + channel * kStagingPitch;
  asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
  __syncwarp();  // the last row has left staging
  if (continues) {
    const int rest = ((shift - pixels + kTileWidth) % kSector + pixels) / kSector * kSector;  // where the last row's rest begins
#pragma unroll
    for (int i = lane / 16; i < kSector; i += 2)
      if (i < shift) mine[i] = mine[rest + i];
  }
  __syncwarp();  // the rest is saved
#pragma unroll
  for (int half = 0; half < 2; half++) {
    const int shift = shift_of(g + half * 8);
    output_t* row = staging + (g + half * 8) * kStagingPitch + shift + t * 2;
    if (__all_sync(0xffffffffu, shift % 2 == 0)) {
#pragma unroll
      for (int j = 0; j < 16; j++) *reinterpret_cast<Pair*>(row + j * 8) = Pair{output_t(values[j][half * 2]), output_t(values[j][half * 2 + 1])};
    } else {
#pragma unroll
      for (int j = 0; j < 16; j++) row[j * 8] = output_t(values[j][half * 2]), row[j * 8 + 1] = output_t(values[j][half * 2 + 1]);
    }
  }
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");  // the copy engine reads by the asynchronous proxy
  __syncwarp();                                                 // everyone has written
  const int first = continues || shift == 0 ? 0 : kSector, last = max(end / kSector * kSector, first);  // whole sectors
  const bool real = channel < channels;
  output_t* const out = to + channel * stride - shift;
  if (real && lane < 16 && first < last)
    asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(out + first), "r"(shared_address(mine + first)),
                 "r"((last - first) * int(sizeof(output_t))) : "memory");
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
  if (!continues || !continued) {
    const bool head = lane < 16;
    const int from = head ? shift : last, stop = head ? (continues ? 0 : min(first, end)) : (continued ? 0 : end);
    for (int i = from; i < stop; i++)
      if (real) out[i] = mine[i];
  }
}

#endif

// Blocks stay and share all tiles evenly; a tile is 128 pixels of an output row. A block walks down a strip of rows: each input
// row is copied into a ring once and serves KERNEL_H tiles. Warpgroup 0 copies, the others multiply with their weights in registers.
template <int kDepth>  // only instantiated where it is used
__global__ void __launch_bounds__(kThreads, 1) convolve_kernel(output_t* y, const value_t* x, const uint4* packed_weight,
    const int32_t* exponents, uint32_t* largest, const accumulate_t* conv_bias, const accumulate_t* bias, float constant, float scale, int64_t N, int64_t H, int64_t W, bool again) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  extern __shared__ uint4 shared[];
  uint8_t* const ring = reinterpret_cast<uint8_t*>(shared);
  uint8_t* const all_weights = ring + kRing * kRowBytes;
  uint8_t* const all_staging = all_weights + kConsumers * kWeightBytes;
  uint8_t* const all_tails = all_staging + kConsumers * 4 * kStagingBytes;
  uint32_t* const raw = reinterpret_cast<uint32_t*>(all_tails + kTailBytes);
  uint64_t* const full = reinterpret_cast<uint64_t*>(all_tails + kTailBytes + kRawRows * kRawBytes);
  uint64_t* const empty = full + kRing;
  const int OH = H - KERNEL_H + 1, OW = W - KERNEL_W + 1, strips = (OW + kTileWidth - 1) / kTileWidth;
  const int tiles = int(N) * strips * OH;
  const int begin = int64_t(tiles) * blockIdx.x / gridDim.x, end = int64_t(tiles) * (blockIdx.x + 1) / gridDim.x;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;

  if (threadIdx.x == 0) {
    for (int i = 0; i < kRing; i++) initialize(full + i, 128), initialize(empty + i, kConsumers);
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  __syncthreads();  // the barriers are there

  if (warp < 4) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 56;");
    // Each thread converts what it has copied itself, so that the raw rows need no barrier.
    Position next;
    for (int tile = begin; tile < end;) {
      const int n = tile / OH / strips, column = tile / OH % strips * kTileWidth, row = tile % OH;
      const int count = min(end - tile, OH - row), rows = count + KERNEL_H - 1;
      tile += count;
      const int exponent = again ? sample_exponent(largest[n]) : kFirstExponent;
      if (again && exponent == kFirstExponent) continue;
      const int words = min((int(W) - column + kWordPixels - 1) / kWordPixels, kRawPitch), plane_size = H * W;
      const value_t* from = x + (int64_t(n) * CHANNELS_IN * H + row) * W + column;
      // Calls work(word, its first plane): all planes of a word of float32, half the planes of a word of two halves.
      const auto for_each_word = [&](const auto& work) {
        for (int i = threadIdx.x; i < words * kWordPixels; i += 128) {
          if (kWordPixels == 1 || i < words) work(i, 0);
          else work(i - words, kPlanes / 2);
        }
      };
      const auto fetch = [&](int i) {
        if (i < rows) {
          for_each_word([&](int word, int plane) {
            const value_t* at = from + i * W + int64_t(plane) * 8 * plane_size + word * kWordPixels;
            uint32_t* to = raw + i % kRawRows * (kRawBytes / 4) + plane * 8 * kRawPitch + word;
#pragma unroll 4
            for (int c = 0; c < kPlanes * 8 / kWordPixels; c++, at += plane_size, to += kRawPitch)
              if (CHANNELS_IN % 16 == 0 || plane * 8 + c < CHANNELS_IN) copy_word(to, at);
          });
        }
        commit_copies();
      };
      const float first = power_of_two(exponent / 2), second = power_of_two(exponent - exponent / 2);
      float largest_here = 0.f;
      for (int i = 0; i < kRawRows - 1; i++) fetch(i);
      for (int i = 0; i < rows; i++) {
        fetch(i + kRawRows - 1);
        await(empty + next.slot, next.parity ^ 1);
        await_copies<kRawRows - 1>();
        for_each_word([&](int word, int first_plane) {
          const uint32_t* in = raw + i % kRawRows * (kRawBytes / 4) + word;
          uint4* out = reinterpret_cast<uint4*>(ring + next.slot * kRowBytes) + word * kWordPixels;
#pragma unroll 1
          for (int plane = first_plane; plane < first_plane + kPlanes / kWordPixels; plane++) {
            uint32_t raw_words[8];
#pragma unroll
            for (int c = 0; c < 8; c++) raw_words[c] = plane * 8 + c < CHANNELS_IN ? in[(plane * 8 + c) * kRawPitch] : 0;
            if constexpr (kScaled) {
              float value[8];
#pragma unroll
              for (int c = 0; c < 8; c++) {
                value[c] = __uint_as_float(raw_words[c]);
                if (fabsf(value[c]) < INFINITY) largest_here = fmaxf(largest_here, fabsf(value[c]));
                value[c] *= first;
                value[c] *= second;
              }
              pack_pixel(out + plane * kPitch, 0, value);
            } else {  // two pixels: the low and the high halves
              uint4 pixel[2];
#pragma unroll
              for (int p = 0; p < 2; p++)
                pixel[p] = make_uint4(__byte_perm(raw_words[0], raw_words[1], p ? 0x7632 : 0x5410), __byte_perm(raw_words[2], raw_words[3], p ? 0x7632 : 0x5410),
                                      __byte_perm(raw_words[4], raw_words[5], p ? 0x7632 : 0x5410), __byte_perm(raw_words[6], raw_words[7], p ? 0x7632 : 0x5410));
              out[plane * kPitch] = pixel[0];
              if (kPitch % 2 == 0 || word * 2 + 1 < kPitch) out[plane * kPitch + 1] = pixel[1];
            }
          }
        });
        asm volatile("fence.proxy.async.shared::cta;" ::: "memory");  // wgmma reads by the asynchronous proxy
        arrive(full + next.slot);
        next.advance();
      }
      if (kScaled && !again) {
        const uint32_t bits = __reduce_max_sync(0xffffffffu, __float_as_uint(largest_here));
        if (lane == 0) atomicMax(&largest[n], bits);
      }
    }
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 224;");
    const int consumer = warp / 4 - 1, turn = consumer % kRows, local_channel = consumer / kRows * 64 + warp % 4 * 16;
    const int channel = blockIdx.y * kBlockChannels + local_channel;
    output_t* const staging = reinterpret_cast<output_t*>(all_staging + (warp - 4) * kStagingBytes);
    Tail* const tails = reinterpret_cast<Tail*>(all_tails) + (warp - 4) * 16;
    uint8_t* const shared_weights = all_weights + consumer * kWeightBytes;
    uint32_t weights[kKept][4];
#pragma unroll
    for (int i = 0; i < kDepth; i++) {
      const uint4 four = packed_weight[((blockIdx.y * kDepth + i) * kMTiles + local_channel / 16) * 32 + lane];
      const uint32_t fragment[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
      for (int j = 0; j < 4; j++) {
        if (i < kKept) weights[min(i, kKept - 1)][j] = fragment[j];
        else *reinterpret_cast<uint32_t*>(shared_weights + (((i - kKept) * 2 + j / 2) * 64 + warp % 4 * 16 + j % 2 * 8 + lane / 4) * 16 + lane % 4 * 4) = fragment[j];
      }
    }
    if (kKept < kDepth) {
      asm volatile("fence.proxy.async.shared::cta;" ::: "memory");  // wgmma reads by the asynchronous proxy
      asm volatile("bar.sync %0, 128;" ::"r"(3 + consumer) : "memory");  // the weights of all four warps are there
    }
    // Offset of a core matrix's neighbour: in depth the next plane, in pixels 8 units on. No swizzle.
    constexpr uint64_t kLayout = uint64_t(kPitch) << 16 | uint64_t(8) << 32, kWeightLayout = uint64_t(64) << 16 | uint64_t(8) << 32;

    Position oldest, newest;  // the rows of the current tile; newest: the next to wait for
    const auto release = [&] {
      if (threadIdx.x % 128 == 0) arrive(empty + oldest.slot);
      oldest.advance();
    };
    const auto await_row = [&] {
      await(full + newest.slot, newest.parity);
      newest.advance();
    };
    const bool runs_on = kRows == 1 && strips == 1 && OW >= kSector;  // a channel's next row follows this one in memory
    // Consumers multiply in turns, so that one's tail and stores run beside the other's products.
    if (kInTurns && consumer == 1) asm volatile("bar.arrive 1, 256;" ::: "memory");
#pragma unroll 1
    for (int tile = begin; tile < end;) {
      const int n = tile / OH / strips, column = tile / OH % strips * kTileWidth, row = tile % OH;
      const int start = tile, stop = min(end, tile - row + OH);
      const int exponent = again ? sample_exponent(largest[n]) : kFirstExponent;
      if (again && exponent == kFirstExponent) {
        tile = stop;
        continue;
      }
      if (lane < 16) tails[lane] = make_tail(channel + lane, kScaled ? -exponents[channel + lane] - exponent : 0, conv_bias, bias);
      __syncwarp();  // the tails are there
      output_t* to = y + ((int64_t(n) * CHANNELS_OUT + channel) * OH + row) * OW + column;
#pragma unroll
      for (int i = 0; i < KERNEL_H - 1; i++) await_row();
#pragma unroll 1
      for (; tile < stop; tile++, to += OW) {
        await_row();
        if (kRows > 1 && tile % kRows != turn) {
          release();
          continue;
        }
        float sums[16][4];
        if (kInTurns) asm volatile("bar.sync %0, 256;" ::"r"(1 + consumer) : "memory");
        asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#pragma unroll
        for (int kernel_row = 0; kernel_row < KERNEL_H; kernel_row++) {
          const int slot = oldest.slot + kernel_row < kRing ? oldest.slot + kernel_row : oldest.slot + kernel_row - kRing;
          const uint64_t layout = kLayout | (shared_address(ring) / 16 + slot * (kRowBytes / 16));
#pragma unroll
          for (int j = 0; j < KERNEL_W * kSteps; j++) {
            const int i = kernel_row * KERNEL_W * kSteps + j;
            const uint64_t pixels = layout + j / kSteps + j % kSteps * 2 * kPitch;
            if (i < kKept) multiply_add(sums, weights[min(i, kKept - 1)], pixels, i > 0);
            else multiply_add(sums, kWeightLayout | (shared_address(shared_weights) / 16 + (i - kKept) * 128), pixels, true);
          }
        }
        asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
        if (kInTurns) asm volatile("bar.arrive %0, 256;" ::"r"(2 - consumer) : "memory");
        asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
        release();
        finish(sums, tails[lane / 4], tails[lane / 4 + 8], constant, scale);
        store_tile(to, staging, sums, int64_t(OH) * OW, CHANNELS_OUT - channel, OW - column, runs_on && tile != start, runs_on && tile + 1 != stop);
      }
#pragma unroll
      for (int i = 0; i < KERNEL_H - 1; i++) release();
      __syncwarp();  // everyone has read the tails of this sample
    }
    if (kInTurns && consumer == 0) asm volatile("bar.sync 1, 256;" ::: "memory");  // the other's last signal
    asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");  // shared memory must outlive the copies from it
  }
#endif
}

// Launches the convolution, if this way is open to x. Rows of halves must be whole words of 4 bytes; tiles are counted in int.
template <bool kOpen>
bool convolve(output_t* y, const value_t* x, const uint4* packed_weight, const int32_t* exponents, uint32_t* largest, const accumulate_t* conv_bias,
              const accumulate_t* bias, float constant, float scale, int64_t N, int64_t H, int64_t W, cudaStream_t stream) {
  if constexpr (kOpen) {
    const int64_t tiles = N * (H - KERNEL_H + 1) * ((W - KERNEL_W + kTileWidth) / kTileWidth);
    if ((W * sizeof(value_t) | reinterpret_cast<uintptr_t>(x)) % 4 != 0 || tiles > INT32_MAX || H * W > INT32_MAX) return false;
    int device = 0, multiprocessors = 0;
    cudaGetDevice(&device);
    cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device);
    const auto kernel = convolve_kernel<kDepth>;
    cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes);
    const dim3 grid(multiprocessors > kChannelBlocks ? multiprocessors / kChannelBlocks : 1, kChannelBlocks);
    for (int pass = 0; pass < (kScaled ? 2 : 1); pass++)
      kernel<<<grid, kThreads, kBytes, stream>>>(y, x, packed_weight, exponents, largest, conv_bias, bias, constant, scale, N, H, W, pass == 1);
    return true;
  }
  return false;
}

}  // namespace warpgroup

}  // namespace

// ----------------------------------------------------------------------------------------------------------- the launcher

// workspace, in bytes: exponents 4·P, largest 4·N, packed weights 2·kParts·P·K, each rounded up to 256, and for mma.sync
// packed x 2·kParts·N·C·H·W (the launch fails if it does not fit workspace_bytes); C = CHANNELS_IN rounded up to kGroup, P = CHANNELS_OUT rounded up to kBlockChannels, K = C·kTaps.
EXPORT void forward(output_t* y, uint8_t* workspace, const value_t* x, const value_t* weight, const accumulate_t* conv_bias,
                    const accumulate_t* bias, double constant, double scale, int64_t workspace_bytes, int64_t N, int64_t H, int64_t W,
                    cudaStream_t stream) {
  const int64_t S = H * W, OH = H - KERNEL_H + 1, OW = W - KERNEL_W + 1;
  if (N == 0) return;
  uint8_t* next = workspace;
  const auto take = [&](int64_t bytes) { uint8_t* taken = next; next += (bytes + 255) / 256 * 256; return taken; };
  int32_t* exponents = reinterpret_cast<int32_t*>(take(kChannelBlocks * kBlockChannels * 4));
  uint32_t* largest = reinterpret_cast<uint32_t*>(take(N * 4));
  uint4* packed_weight = reinterpret_cast<uint4*>(take(int64_t(kChannelBlocks) * kGroups * kTaps * kChunk * 16));
  uint4* packed_x = reinterpret_cast<uint4*>(next);

  pack_weight_kernel<<<kChannelBlocks * kBlockChannels, 128, 0, stream>>>(reinterpret_cast<operand_t*>(packed_weight), exponents, largest, weight, N);
  if (warpgroup::convolve<warpgroup::kUsed>(y, x, packed_weight, exponents, largest, conv_bias, bias, float(constant), float(scale), N, H, W, stream)) return;

  const int64_t needed = (next - workspace) + int64_t(kPlanes) * 8 * 2 * kParts * N * S;
  if (needed > workspace_bytes) return pack_input_kernel<<<0, 1, 0, stream>>>(packed_x, largest, x, N, S);  // fails, and says so
  const unsigned samples = N < 65535 ? N : 65535;
  const dim3 pack_grid((S + kPackThreads * kPackPixels - 1) / (kPackThreads * kPackPixels), kPlanes, samples);
  pack_input_kernel<<<pack_grid, kPackThreads, 0, stream>>>(packed_x, largest, x, N, S);
  if (kScaled) repack_input_kernel<<<dim3(32, samples), kPackThreads, 0, stream>>>(packed_x, largest, x, N, S);
  cudaFuncSetAttribute(convolve_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kMainBytes);
  const dim3 grid(N * OH * ((OW + kTileWidth - 1) / kTileWidth), kChannelBlocks);
  convolve_kernel<<<grid, kThreads, kMainBytes, stream>>>(y, packed_x, packed_weight, exponents, largest, conv_bias, bias, float(constant), float(scale), H, W);
}
