// The gradients of conv2d_min_add_multiply's parameters, from dy and what forward saved: neither the
// convolution's output nor its gradient g is ever written.
//
//   gradient_sums    d_bias = sum of dy·scale, d_conv_bias = sum of g, over samples and pixels; and the
//                    largest
//                    finite magnitude of g in each sample
//   weight_gradient  dweight[co][ci][kh][kw] = sum over samples and pixels of g[co][p]·x[ci][p + (kh, kw)]
//
// x (N, CHANNELS_IN, H, W), dy (N, CHANNELS_OUT, H', W'), dweight (CHANNELS_OUT, CHANNELS_IN, KERNEL_H,
// KERNEL_W), all contiguous; saved as conv2d_min_add_multiply_fused.cu leaves it.
//
// The weights' gradient is a product on tensor cores, M = 64 channels out, N = 64 channels in × up to 9 taps
// (3 where SPLIT), K = pixels. A block keeps M × N sums in registers and walks down strips of rows, its share
// of all; warps have 8 channels in each. Per row of a strip it stages g and the one row of x that is new,
// converted to operands, in shared memory; a ring holds the rows that the other taps need. What comes next is
// on its way, in registers, during the products. Operands are those of forward (_operands.cuh), under powers
// of two for each sample of g and x whose product is the same for all samples, since sums are over all
// (SampleScales).
//
// Where a row ends, zeros in g would not do, since 0·inf is NaN: x is zero there, too, for each tap's own
// end.
//
// Bytes at the default size: 1040 MB of dy and 66 MB of gates for each launch, 537 MB of x. Bound: memory
// 0.26 ms for the sums; 300 GFLOP 0.46 ms by mma.sync for the weights' gradient, memory 0.38 ms.
#include "conv2d_min_add_multiply_gradient.cuh"
#include "reduce.cuh"

namespace {

constexpr int kBlock = kWarps * 8;  // channels of either kind in a block
constexpr int kBlocksOut = ceil_div(CHANNELS_OUT, kBlock), kBlocksIn = ceil_div(CHANNELS_IN, kBlock);

// ----------------------------------------------------------------------------------------------------- sums

// Sums over a share of all strips, in sums (2, shares, CHANNELS_OUT): of g, then of dy·scale. A lane's few
// values of a strip are summed as they are, strips in double: what cancels leaves no rounding errors of large
// sums. Raises largest[n]. Grid: shares, blocks of channels out.
__global__ void __launch_bounds__(kThreads)
gradient_sums_kernel(double* sums, uint32_t* largest, const output_t* dy, const uint32_t* gates, float scale,
                     int64_t N, int64_t height, int64_t width) {
#if __CUDA_ARCH__ >= 800
  const int lane = threadIdx.x % 32, plane = blockIdx.y * kWarps + threadIdx.x / 32;
  const Strips strips(height, width);
  const int64_t end = strips.count(N) * (blockIdx.x + 1) / gridDim.x;
  int64_t strip = strips.count(N) * blockIdx.x / gridDim.x;
  StripPlace place = strips[strip];
  double inner_sums[8] = {}, outer_sums[8] = {};
  while (strip < end) {
    const int64_t n = place.n;
    float largest_of_sample = 0.f;  // of finite magnitudes
    for (; strip < end && place.n == n; strip++, strips.advance(place)) {
      GradientStrip<CHANNELS_OUT> gradient;
      gradient.load(dy, gates, place, strips, plane);
      float inner_sum[8] = {}, outer_sum[8] = {}, largest_of_strip = 0.f;
      gradient.for_each(scale, [&](int, int c, float outer, float inner) {
        inner_sum[c] += inner, outer_sum[c] += outer;
        largest_of_strip = fmaxf(largest_of_strip, fabsf(inner));  // skips NaN
      });
      if (__any_sync(0xffffffffu, largest_of_strip == INFINITY)) {
        gradient.for_each(scale, [&](int, int, float, float inner) {
          largest_of_sample = larger_magnitude(largest_of_sample, inner);
        });
      } else {
        largest_of_sample = fmaxf(largest_of_sample, largest_of_strip);
      }
#pragma unroll
      for (int c = 0; c < 8; c++) inner_sums[c] += inner_sum[c], outer_sums[c] += outer_sum[c];
    }
    const uint32_t bits = __reduce_max_sync(0xffffffffu, __float_as_uint(largest_of_sample));
    if (lane == 0) atomicMax(&largest[n], bits);
  }
#pragma unroll
  for (int c = 0; c < 8; c++) {
#pragma unroll
    for (int offset = 16; offset; offset /= 2) {
      inner_sums[c] += __shfl_down_sync(0xffffffffu, inner_sums[c], offset);
      outer_sums[c] += __shfl_down_sync(0xffffffffu, outer_sums[c], offset);
    }
    const int channel = plane * 8 + c;
    double* const to = sums + int64_t(blockIdx.x) * CHANNELS_OUT + channel;
    if (lane == 0 && channel < CHANNELS_OUT)
      to[0] = inner_sums[c], to[int64_t(gridDim.x) * CHANNELS_OUT] = outer_sums[c];
  }
#endif
}

// ------------------------------------------------------------------------------------------------- products

// A block's taps: kTapRows rows of the filter, kTapColumns pixels of each.
constexpr int kMostTaps = SPLIT ? 3 : 9;  // for so many sums there are registers
constexpr int kColumnGroups = ceil_div(KERNEL_W, kMostTaps);
constexpr int kTapColumns = ceil_div(KERNEL_W, kColumnGroups);
constexpr int kMostRows = kMostTaps / kTapColumns < 3 ? kMostTaps / kTapColumns : 3;
constexpr int kRowGroups = ceil_div(KERNEL_H, kMostRows);
constexpr int kTapRows = ceil_div(KERNEL_H, kRowGroups);
constexpr int kBlockTaps = kTapRows * kTapColumns;
constexpr int kOutTiles = CHANNELS_OUT < kBlock ? ceil_div(CHANNELS_OUT, 16) : kBlock / 16;  // of 16 channels
constexpr int kThreadSums = kBlockTaps * kOutTiles * 4;
constexpr int kBlocks = kBlocksOut * kBlocksIn * kRowGroups * kColumnGroups;

// Shared memory, in units of 16 bytes, 8 channels of a pixel: rows of x [slot][part][plane][pixel], and g
// [stage][part][plane][pixel].
constexpr int kInputPitch = kStrip + kTapColumns - 1;
constexpr int kSlots = kTapRows + 1, kStages = 2;  // the rows in use and the next; likewise g
constexpr int kSlot = kParts * kWarps * kInputPitch, kStage = kParts * kWarps * kStrip;
constexpr int kSharedBytes = (kSlots * kSlot + kStages * kStage) * 16;
static_assert(kSharedBytes <= 99 << 10, "any device from compute capability 8.0 on has so much");

// What is one of kBlocks.
struct BlockPlace {
  int channel_out, channel_in, kernel_row, kernel_column;
  __device__ __forceinline__ explicit BlockPlace(int block)
      : channel_out(block % kBlocksOut * kBlock),
        channel_in(block / kBlocksOut % kBlocksIn * kBlock),
        kernel_row(block / kBlocksOut / kBlocksIn % kRowGroups * kTapRows),
        kernel_column(block / kBlocksOut / kBlocksIn / kRowGroups * kTapColumns) {}
};

// The least exponent of a sample's products, where g and x are each scaled as far up as operands go; to all
// threads of the block. Samples of zeros don't count.
__device__ __forceinline__ int common_exponent(
    const uint32_t* largest_x, const uint32_t* largest_g, int64_t N) {
  __shared__ int negative;
  if (!kScaled) return 0;
  if (threadIdx.x == 0) negative = -254;
  __syncthreads();  // set before anyone raises it
  for (int64_t n = threadIdx.x; n < N; n += blockDim.x)
    if (largest_x[n] && largest_g[n])
      atomicMax(&negative, -(top_exponent(largest_x[n]) + top_exponent(largest_g[n])));
  __syncthreads();  // complete before anyone reads it
  return -negative;
}

// The scales of a sample, 2^common in all. The smaller its products, the further down go both: it is lost
// where it is nothing beside others.
struct SampleScales {
  float input = 1.f, gradient = 1.f;
  __device__ __forceinline__ void set(uint32_t largest_x, uint32_t largest_g, int common) {
    const int x = top_exponent(largest_x), g = top_exponent(largest_g), slack = max(x + g - common, 0);
    gradient = power_of_two(max(g - slack / 2, -126));
    input = power_of_two(max(x - (slack - slack / 2), -126));
  }
};

#if __CUDA_ARCH__ >= 800

// A walk down strips, rows begin … end - 1 of all, counted along columns of strips. A step brings a row of x,
// and g unless it is `ahead`: the first rows of a column of strips are other taps'.
struct Walk {
  const output_t* const all_dy;
  const uint32_t* const all_gates;
  const value_t* const all_x;
  const Strips& strips;
  const BlockPlace& place;
  const uint32_t *const largest_x, *const largest_g;
  const int common;
  const int64_t H, W, end;
  int64_t tile;
  SampleScales scales;
  int pixels, row, first, stop;  // of this column of strips: across, and the rows first … stop - 1
  // Of the warp's plane, where the step's rows begin.
  const output_t* dy;
  const uint32_t* gates;
  const value_t* x;

  __device__ __forceinline__ bool goes_on() const { return tile < end; }
  __device__ __forceinline__ bool ahead() const { return row < first; }
  __device__ __forceinline__ void start() {
    const int64_t column_of_strips = tile / strips.height, n = column_of_strips / strips.of_row;
    const int column = int(column_of_strips % strips.of_row) * kStrip, warp = threadIdx.x / 32;
    first = int(tile - column_of_strips * strips.height);
    stop = int(min(int64_t(strips.height), first + end - tile));
    row = first - (kTapRows - 1), pixels = strips.width - column;
    if constexpr (kScaled) { scales.set(largest_x[n], largest_g[n], common); }
    const int plane = place.channel_out / 8 + warp;
    dy = all_dy + GradientStrip<CHANNELS_OUT>::index({n, row, column}, strips, plane);
    gates = all_gates +
            gate_index(n, plane * 8, row, column, strips.height, strips.width, CHANNELS_OUT);
    x = all_x + ((n * CHANNELS_IN + place.channel_in + warp * 8) * H + first + place.kernel_row) * W;
    x += column + place.kernel_column;
  }
  __device__ __forceinline__ void advance() {
    if (++row == stop) {
      tile += stop - first;
      if (goes_on()) start();
      return;
    }
    dy += strips.width, gates += gate_row(strips.width, CHANNELS_OUT);
    // Past the last row of x there are only rows of the filter that don't exist.
    if (KERNEL_H == kRowGroups * kTapRows || row + kTapRows - 1 + place.kernel_row < H) x += W;
  }
};

// A step's values in registers, a plane of 8 channels of either kind in a warp: what they are, and where they
// go. Past the end of a row of x they may be anything: such pixels are masked (mask_taps).
struct Staged {
  GradientStrip<CHANNELS_OUT> gradient;
  value_t input[kLanePixels][8] = {};
  // Right of the strip: lane + 32 k is pixel·8 + channel.
  value_t edge[ceil_div((kTapColumns - 1) * 8, 32)] = {};
  int pixels = -1;                                         // of g; -1 where there is no such step
  SampleScales scales;

  // The walk's step, and moves on.
  __device__ __forceinline__ void load(Walk& walk) {
    pixels = -1;
    if (!walk.goes_on()) return;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    pixels = 0, scales = walk.scales;
    if (!walk.ahead()) {
      const int64_t plane_size = int64_t(walk.strips.height) * walk.strips.width;
      gradient.load(walk.dy, walk.gates, walk.place.channel_out / 8 + warp, plane_size, walk.pixels);
      pixels = min(walk.pixels, kStrip);
    }
    const int plane = walk.place.channel_in / 8 + warp;
    const int real = walk.pixels + KERNEL_W - 1 - walk.place.kernel_column;  // pixels of x
    load_strip<CHANNELS_IN>(input, walk.x, plane, walk.H * walk.W, real);
#pragma unroll
    for (int i = lane, k = 0; k < int(sizeof(edge) / sizeof(value_t)); i += 32, k++) {
      const bool exists =
          i < (kTapColumns - 1) * 8 && plane * 8 + i % 8 < CHANNELS_IN && kStrip + i / 8 < real;
      if (exists) edge[k] = walk.x[i % 8 * walk.H * walk.W + kStrip + i / 8];
    }
    walk.advance();
  }

  // To shared memory, as operands.
  __device__ __forceinline__ void store(uint4* input_slot, uint4* gradient_stage, float scale) const {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    float values[kLanePixels][8];
    if (pixels > 0) {
      gradient.for_each(scale, [&](int i, int c, float, float inner) {
        values[i][c] = kScaled ? scaled(inner, scales.gradient) : inner;
      });
#pragma unroll
      for (int i = 0; i < kLanePixels; i++)
        pack_pixel(gradient_stage + warp * kStrip + lane + i * 32, kWarps * kStrip, values[i]);
    }
    uint4* const to = input_slot + warp * kInputPitch;
#pragma unroll
    for (int i = 0; i < kLanePixels; i++) {
#pragma unroll
      for (int c = 0; c < 8; c++) {
        const float value = float(input[i][c]);
        values[i][c] = kScaled ? scaled(value, scales.input) : value;
      }
      pack_pixel(to + lane + i * 32, kWarps * kInputPitch, values[i]);
    }
#pragma unroll
    for (int i = lane, k = 0; k < int(sizeof(edge) / sizeof(value_t)); i += 32, k++) {
      if (i >= (kTapColumns - 1) * 8) continue;
      const float value = float(edge[k]);
      const Parts parts = split(kScaled ? scaled(value, scales.input) : value);
#pragma unroll
      for (int part = 0; part < kParts; part++)
        reinterpret_cast<operand_t*>(to + part * kWarps * kInputPitch + kStrip + i / 8)[i % 8] =
            parts.part[part];
    }
  }
};

// The halves of a register that holds two neighbouring k of which so many are before the end.
__device__ __forceinline__ uint32_t first_halves(int count) {
  return count >= 2 ? 0xffffffffu : count == 1 ? 0xffffu : 0u;
}

// sums += the product of 16 channels out, the warp's 8 channels in, one tap and 16 pixels. Tensor cores cut
// off as they add. So split operands' small products come first, and their sum is added to the others in
// float32.
__device__ __forceinline__ void multiply_tile(
    float (&sums)[4], const uint32_t (&gradient)[kParts][4], const uint32_t (&input)[kParts][2]) {
  if constexpr (SPLIT) {
    float products[4] = {};
    multiply_add<operand_t>(products, gradient[kParts - 1], input[0][0], input[0][1]);
    multiply_add<operand_t>(products, gradient[0], input[kParts - 1][0], input[kParts - 1][1]);
    multiply_add<operand_t>(products, gradient[0], input[0][0], input[0][1]);
#pragma unroll
    for (int k = 0; k < 4; k++) sums[k] += products[k];
  } else {
    multiply_add<operand_t>(sums, gradient[0], input[0][0], input[0][1]);
  }
}

// A step's fragments of B, of 16 pixels and all taps. rows[r], for the block's tap row r, is the address that
// the lane gives to load_matrices_transposed.
__device__ __forceinline__ void load_taps(
    uint32_t (&taps)[kBlockTaps][kParts][2], const uint32_t (&rows)[kTapRows]) {
#pragma unroll
  for (int i = 0; i < kBlockTaps * kParts; i++) {
    // Two neighbouring taps at a time; the last of an odd number alone.
    const int tap = i / kParts, part = i % kParts, column = tap % kTapColumns;
    const uint32_t from = rows[tap / kTapColumns] + 16 * (part * kWarps * kInputPitch + column);
    if (column % 2 == 0 && column + 1 < kTapColumns) {
      uint32_t both[4];
      load_matrices_transposed(both, from);
#pragma unroll
      for (int k = 0; k < 4; k++) taps[min(tap + k / 2, kBlockTaps - 1)][part][k % 2] = both[k];
    } else if (column % 2 == 0) {
      load_matrices_transposed(taps[tap][part], from);
    }
  }
}

// Zeros in place of all but so many of the 16 pixels.
__device__ __forceinline__ void mask_taps(uint32_t (&taps)[kBlockTaps][kParts][2], int pixels) {
  const int left = pixels - threadIdx.x % 4 * 2;
  const uint32_t real[2] = {first_halves(left), first_halves(left - 8)};
#pragma unroll
  for (int i = 0; i < kBlockTaps * kParts * 2; i++)
    taps[i / 2 / kParts][i / 2 % kParts][i % 2] &= real[i % 2];
}

// sums += the products of a strip's first `pixels`, at least one. `gradient` and rows[r] are addresses as in
// load_taps.
__device__ __forceinline__ void multiply(float (&sums)[kBlockTaps][kOutTiles][4], uint32_t gradient,
                                         uint32_t (&rows)[kTapRows], int pixels) {
#pragma unroll 1
  for (; pixels > 0; pixels -= 16, gradient += 16 * 16) {
    uint32_t taps[kBlockTaps][kParts][2];
    load_taps(taps, rows);
#pragma unroll
    for (int r = 0; r < kTapRows; r++) rows[r] += 16 * 16;
    if (pixels < 16) mask_taps(taps, pixels);
    uint32_t tiles[kOutTiles][kParts][4];
#pragma unroll
    for (int i = 0; i < kOutTiles * kParts; i++)
      load_matrices_transposed(tiles[i / kParts][i % kParts],
                               gradient + 16 * kStrip * (i % kParts * kWarps + i / kParts * 2));
#pragma unroll
    for (int i = 0; i < kOutTiles * kBlockTaps; i++)
      multiply_tile(sums[i % kBlockTaps][i / kBlockTaps], tiles[i / kBlockTaps], taps[i % kBlockTaps]);
  }
}

#endif

// A block's sums to slots [share][block][sum of a thread][thread]. Grid: shares, kBlocks.
__global__ void __launch_bounds__(kThreads, 1)
weight_gradient_kernel(float* slots, const output_t* dy, const value_t* x, const uint32_t* gates,
                       const uint32_t* largest_x, const uint32_t* largest_g, float scale, int64_t N,
                       int64_t H, int64_t W) {
#if __CUDA_ARCH__ >= 800
  extern __shared__ uint4 shared[];
  uint4* const gradients = shared + kSlots * kSlot;
  const int common = common_exponent(largest_x, largest_g, N);
  const Strips strips(H - KERNEL_H + 1, W - KERNEL_W + 1);
  const int64_t count = strips.count(N);
  const BlockPlace place(blockIdx.y);
  Walk walk{dy, gates, x, strips, place, largest_x, largest_g, common, H, W,
            count * (blockIdx.x + 1) / gridDim.x, count * blockIdx.x / gridDim.x};
  if (walk.goes_on()) walk.start();
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  // load_matrices_transposed: lanes 0-7 give pixels 0-7, of g those of the first plane, and so on. g: 8-15
  // those of the second plane, 16-31 pixels 8-15 likewise. x: 8-15 pixels 8-15, 16-31 those of the next tap.
  const uint32_t gradient_address =
      shared_address(gradients) + 16 * (lane / 8 % 2 * kStrip + lane / 16 * 8 + lane % 8);
  const uint32_t input_address = shared_address(shared) + 16 * (warp * kInputPitch + lane % 16 + lane / 16);
  float sums[kBlockTaps][kOutTiles][4] = {};

  Staged staged;
  const auto load = [&] { staged.load(walk); };
  const auto store = [&](int step) {
    if (staged.pixels >= 0)
      staged.store(shared + step % kSlots * kSlot, gradients + step % kStages * kStage, scale);
  };
  load();
  store(0);
  int pixels = staged.pixels;
  load();
  // Half of the warps convert the next step before their products, the others after them: so tensor cores are
  // busy meanwhile.
  const bool early = warp < kWarps / 2;
#pragma unroll 1
  for (int step = 0; pixels >= 0; step++) {
    __syncthreads();  // the step's operands are there; and everyone is done with the last step
    int next = staged.pixels;
    if (early) store(step + 1), load();
    uint32_t rows[kTapRows];
#pragma unroll
    for (int r = 0; r < kTapRows; r++) rows[r] = input_address + 16 * kSlot * ((step + r + 2) % kSlots);
    if (place.channel_in + warp * 8 < CHANNELS_IN)
      multiply(sums, gradient_address + 16 * kStage * (step % kStages), rows, pixels);
    if (!early) store(step + 1), load();
    pixels = next;
  }
  float* to = slots + (int64_t(blockIdx.x) * kBlocks + blockIdx.y) * kThreadSums * kThreads + threadIdx.x;
#pragma unroll
  for (int i = 0; i < kThreadSums; i++) to[i * kThreads] = sums[i / 4 / kOutTiles][i / 4 % kOutTiles][i % 4];
#endif
}

// dweight, from the slots of all shares. Grid: sums of a thread, kBlocks.
__global__ void __launch_bounds__(kThreads)
merge_slots_kernel(value_t* dweight, const float* slots, const uint32_t* largest_x, const uint32_t* largest_g,
                   int64_t shares, int64_t N) {
  const int i = blockIdx.x, tap = i / 4 / kOutTiles, lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const BlockPlace place(blockIdx.y);
  const int out = place.channel_out + i / 4 % kOutTiles * 16 + i / 2 % 2 * 8 + lane / 4;
  const int in = place.channel_in + warp * 8 + lane % 4 * 2 + i % 2;
  const int row = place.kernel_row + tap / kTapColumns, column = place.kernel_column + tap % kTapColumns;
  const int exponent = -common_exponent(largest_x, largest_g, N);
  double sum = 0;
  for (int64_t share = 0; share < shares; share++)
    sum += slots[((share * kBlocks + blockIdx.y) * kThreadSums + i) * kThreads + threadIdx.x];
  if (out < CHANNELS_OUT && in < CHANNELS_IN && row < KERNEL_H && column < KERNEL_W)
    dweight[((int64_t(out) * CHANNELS_IN + in) * KERNEL_H + row) * KERNEL_W + column] =
        value_t(PowerOfTwo(exponent)(float(sum)));
}

}  // namespace

// d_bias has `biases` elements, CHANNELS_OUT or 1. largest_g (N) is for the other launchers. sums (2, shares,
// CHANNELS_OUT) is scratch.
EXPORT void gradient_sums(accumulate_t* d_conv_bias, accumulate_t* d_bias, int32_t* largest_g, double* sums,
                          const output_t* dy, const int32_t* saved, double scale, int64_t biases,
                          int64_t shares, int64_t N, int64_t H, int64_t W, cudaStream_t stream) {
  cudaMemsetAsync(largest_g, 0, N * 4, stream);
  gradient_sums_kernel<<<dim3(shares, kBlocksOut), kThreads, 0, stream>>>(
      sums, reinterpret_cast<uint32_t*>(largest_g), dy,
      reinterpret_cast<const uint32_t*>(saved_gates(saved, N)), float(scale), N, H - KERNEL_H + 1,
      W - KERNEL_W + 1);
  sum_rows_kernel<<<CHANNELS_OUT, kThreads, 0, stream>>>(d_conv_bias, sums, shares, int64_t(CHANNELS_OUT));
  sum_rows_kernel<<<biases, kThreads, 0, stream>>>(d_bias, sums + shares * CHANNELS_OUT, shares,
                                                   int64_t(CHANNELS_OUT));
}

// slots (shares, slot_elements) is scratch; the launch fails if that is not what a share takes.
EXPORT void weight_gradient(value_t* dweight, float* slots, const output_t* dy, const value_t* x,
                            const int32_t* saved, const int32_t* largest_g, double scale,
                            int64_t slot_elements, int64_t shares, int64_t N, int64_t H, int64_t W, cudaStream_t stream) {
  const uint32_t* largest_x = reinterpret_cast<const uint32_t*>(saved);
  const uint32_t* largest = reinterpret_cast<const uint32_t*>(largest_g);
  const bool agreed = slot_elements == int64_t(kBlocks) * kThreadSums * kThreads;
  cudaFuncSetAttribute(weight_gradient_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kSharedBytes);
  weight_gradient_kernel<<<dim3(agreed ? shares : 0, kBlocks), kThreads, kSharedBytes, stream>>>(
      slots, dy, x, saved_gates(largest_x, N), largest_x, largest, float(scale), N, H, W);
  if (!agreed) return;
  merge_slots_kernel<<<dim3(kThreadSums, kBlocks), kThreads, 0, stream>>>(dweight, slots, largest_x, largest,
                                                                      shares, N);
}
