// The gradients of y = clamp(max_pool(group_norm(conv2d(x, weight) + conv_bias)·scale), low, high), from what
// the fused forward keeps: neither the convolution nor its gradient is ever written.
//
// x (N, CHANNELS_IN, H, W), weight (CHANNELS_OUT, CHANNELS_IN, KERNEL_H, KERNEL_W), dy (N, CHANNELS_OUT, PH,
// PW), contiguous. v (N, CHANNELS_OUT, OH, OW) is the convolution without its bias; extreme and index, like
// dy, are the v that each window selects and its place there, by rows; statistics as in GroupStatistics.
//
// With dz = dy·scale where the clamp lets it pass, every position's gradient is affine in v, and one of a
// window has something more:
//   dv = slope·dz·[selected] + constant + linear·v
// slope and linear are of a (sample, group), constant of a (sample, channel). Let X be a position's patch: the
// inputs of its filter, in units of 8 channels at a tap. Then v = weight·X, and
//   d_weight = Σ slope·dz·X + Σ constant·(ΣX) + weight·Σ linear·(ΣXXᵀ),
// where the first sum goes over windows, and the others over samples. So the dense part needs nothing of dy
// but its sums, and the sparse one none of them.
//   shift_kernel              about the mean of x by (sample, channel in)
//   gram_kernel               ΣXXᵀ and ΣX of x less its shift, of a strip of rows of a sample
//   sparse_kernel             Σ slope·dz·X of a strip; sums of dz, dz·(v - mean), dy·z
//   coefficients_kernel       constant and linear; the parameters' gradients by sample
//   mix_kernel                Σ linear·(ΣXXᵀ)
//   weight_gradient_kernel    d_weight, and the parameters' gradients
// and only where x's gradient is asked for
//   …_input_gradient.cuh      the transposed convolution of dv
// All that is shifted away is added again at the end, in double. Every sum has a fixed order.
//
// Products run on tensor cores (mma.sync), each operand a sum of two float16 (operands.cuh), scaled by powers
// of two: x by the tile in shared memory, dz by channel and row of windows. A product's sums go through no
// more than 8 steps of 16 positions in a tensor core, which cuts off, before they are added up in float32.
//
// At the default size (128, 8, 128, 128), 3×3, 64 channels, pool 4, an H200's tensor cores take 6 cycles for a
// product m16n8k16 (mma.sync), so that these times are the least, by arithmetic, not measured:
//   gram_kernel             85 products for 16 positions        0.07 ms
//   sparse_kernel           108 for a window, 138 MB            0.09 ms
//   input_gradient_kernel   228 for 16 positions, 206 MB        0.19 ms
// Beside what forward keeps (39 MB), 11 MB of memory.
#include "normalisation.h"
#include "operands.cuh"
#include "reduce.cuh"
#include "tensor_core.cuh"

#ifndef CHANNELS_IN
#define CHANNELS_IN 8
#define CHANNELS_OUT 64
#define KERNEL_H 3
#define KERNEL_W 3
#define POOL_H 4
#define POOL_W 4
#endif
#ifndef INPUT_COLUMNS  // the plan, as tiling.py makes it; else one for which a source compiles alone
#define INPUT_COLUMNS 64
#define INPUT_SHARED InputLayout::kBytes
#endif

namespace {

using namespace tensor_core;

constexpr int kPlanes = (CHANNELS_IN + 7) / 8;  // of 8 input channels each, zeros behind the last
constexpr int kTaps = KERNEL_H * KERNEL_W;
constexpr int kUnits = kPlanes * kTaps;  // unit = plane · kTaps + tap
constexpr int kDepth = kUnits * 8;       // of a patch
constexpr int kBlockChannels = 64;
constexpr int kChannelBlocks = (CHANNELS_OUT + kBlockChannels - 1) / kBlockChannels;
constexpr int kSteps = 8;  // products that one sum takes in a tensor core

// Where a value of a patch belongs: its input channel, and its place in a filter.
HOST_DEVICE constexpr int input_channel(int depth) { return depth / 8 / kTaps * 8 + depth % 8; }
HOST_DEVICE constexpr int place_in_filter(int depth) {
  return input_channel(depth) * kTaps + depth / 8 % kTaps;
}

struct Geometry {
  int N, H, W, strips, rows;  // a strip has `rows` rows of v or of windows, the last one what is left
  HOST_DEVICE int height() const { return H - KERNEL_H + 1; }
  HOST_DEVICE int width() const { return W - KERNEL_W + 1; }
  HOST_DEVICE int pooled_height() const { return height() / POOL_H; }
  HOST_DEVICE int pooled_width() const { return width() / POOL_W; }
  // Do the strips cover that many rows, and none of them nothing?
  bool cover(int all) const { return (strips - 1) * rows < all && all <= strips * rows; }
};

// act(std::integral_constant) for 0 … kCount - 1, one after the other; and for one of them.
template <int kCount, int kFirst = 0, class Act> __device__ __forceinline__ void for_constants(const Act& act) {
  if constexpr (kFirst < kCount) {
    act(std::integral_constant<int, kFirst>());
    for_constants<kCount, kFirst + 1>(act);
  }
}
template <int kCount, int kFirst = 0, class Act>
__device__ __forceinline__ void with_constant(int value, const Act& act) {
  if constexpr (kFirst < kCount) {
    if (value == kFirst) act(std::integral_constant<int, kFirst>());
    else with_constant<kCount, kFirst + 1>(value, act);
  }
}

// ------------------------------------------------------------------------------------------------------ stage

// The pixels of x under kRows × kColumns positions of v, in shared memory: a pixel's 8 channels side by side,
// so that a tap is an offset; first all their high halves, then the low ones, then a pixel of zeros, which
// stands for positions that don't count. Rows are 4 pixels more than a multiple of 8 apart, so that two
// halves of a matrix from neighbouring rows lie in different banks.
template <int kRows, int kColumns, int kBlock = kThreads> struct Stage {
  static constexpr int kHeight = kRows + KERNEL_H - 1, kWidth = kColumns + KERNEL_W - 1;
  static constexpr int kPitch = kWidth + (12 - kWidth % 8) % 8;
  static constexpr int kPlaneBytes = kHeight * kPitch * 16, kPartBytes = kPlanes * kPlaneBytes;
  static constexpr int kZeros = 2 * kPartBytes, kBytes = kZeros + 16;
  HOST_DEVICE static constexpr int offset(int row, int column) { return (row * kPitch + column) * 16; }
  HOST_DEVICE static constexpr int offset(int unit) {
    return unit / kTaps * kPlaneBytes + offset(unit % kTaps / KERNEL_W, unit % kTaps % KERNEL_W);
  }

  unsigned char* const shared;
  int* const largest;  // two magnitudes of x, as bits, in shared memory; the tiles take turns
  int turn = 0;

  __device__ Stage(unsigned char* shared, int* largest) : shared(shared), largest(largest) {
    if (threadIdx.x < 2) largest[threadIdx.x] = 0;
    if (threadIdx.x < 4) reinterpret_cast<uint32_t*>(shared + kZeros)[threadIdx.x] = 0;
  }

  // Pixels from (row, column) on of a sample's x, less `shift`, times the same power of two; its exponent.
  // Those outside of x are zeros.
  // Begins and ends with a barrier.
  __device__ int fill(const value_t* x, const float* shift, int row, int column, Geometry geometry) {
    const int H = geometry.H, W = geometry.W, plane_size = H * W;
    const auto for_pixels = [&](auto act) {
#pragma unroll 2
      for (int i = threadIdx.x; i < kHeight * kWidth; i += kBlock) {
        const int h = i / kWidth, w = i % kWidth;
        const bool inside = row + h < H && unsigned(column + w) < unsigned(W);
        const value_t* from = x + int64_t(row + h) * W + column + w;
        float values[kPlanes * 8];
#pragma unroll
        for (int c = 0; c < kPlanes * 8; c++)
          values[c] = inside && c < CHANNELS_IN ? float(from[int64_t(c) * plane_size]) - shift[c] : 0.f;
        act(offset(h, w), values);
      }
    };
    __syncthreads();  // what was here has been read
    float magnitude = 0;
    for_pixels([&](int, const float(&values)[kPlanes * 8]) {
#pragma unroll
      for (int c = 0; c < kPlanes * 8; c++) magnitude = fmaxf(magnitude, fabsf(values[c]));
    });
    const unsigned of_warp = __reduce_max_sync(~0u, __float_as_uint(magnitude));
    if (threadIdx.x % 32 == 0) atomicMax(&largest[turn], int(of_warp));
    __syncthreads();  // complete
    const int exponent = fitting_exponent(__int_as_float(largest[turn]));
    const float factor = power_of_two(exponent);
    turn ^= 1;
    if (threadIdx.x == 0) largest[turn] = 0;
    for_pixels([&](int at, const float(&values)[kPlanes * 8]) {
#pragma unroll
      for (int plane = 0; plane < kPlanes; plane++) {
        Halves halves[4];
#pragma unroll
        for (int i = 0; i < 4; i++)
          halves[i] = split(values[plane * 8 + 2 * i] * factor, values[plane * 8 + 2 * i + 1] * factor);
        unsigned char* to = shared + plane * kPlaneBytes + at;
        *reinterpret_cast<uint4*>(to) =
            make_uint4(halves[0].high, halves[1].high, halves[2].high, halves[3].high);
        *reinterpret_cast<uint4*>(to + kPartBytes) =
            make_uint4(halves[0].low, halves[1].low, halves[2].low, halves[3].low);
      }
    });
    __syncthreads();  // complete
    return exponent;
  }
};

// Columns of a tile, so that it fits in shared memory twice.
constexpr int columns_for(int rows) {
  return 2 * kPlanes * (rows + KERNEL_H - 1) * (128 + KERNEL_W + 7) * 16 <= 80 << 10 ? 128 : 64;
}

// Adds up what the groups of warps found, in order, in the first group. A group's warp writes kCount words a
// lane to `slot` of shared memory, which holds the warp's share.
template <int kGroups, int kCount>
__device__ __forceinline__ void merge_groups(float* total, float* slot, int group) {
  for (int other = 1; other < kGroups; other++) {
    __syncthreads();  // what was here has been read
    if (group == other)
#pragma unroll
      for (int i = 0; i < kCount; i++) slot[i * 32 + threadIdx.x % 32] = total[i];
    __syncthreads();  // it is there
    if (group == 0)
#pragma unroll
      for (int i = 0; i < kCount; i++) total[i] += slot[i * 32 + threadIdx.x % 32];
  }
}

// ------------------------------------------------------------------------------------------------------ shift

constexpr int kSampled = 1024;  // pixels of a plane

// shift (N, CHANNELS_IN): the mean of pixels that are spread evenly. Any constant near x would do. A block per
// plane.
__global__ void __launch_bounds__(kThreads)
shift_kernel(float* shift, const value_t* x, int64_t size) {
  __shared__ double partial[kThreads];
  const value_t* plane = x + blockIdx.x * size;
  const int count = size < kSampled ? int(size) : kSampled;
  double sum = 0;
  for (int i = threadIdx.x; i < count; i += kThreads) sum += double(float(plane[i * size / count]));
  partial[threadIdx.x] = sum;
  for (int half = kThreads / 2; half; half /= 2) {
    __syncthreads();  // the sums of twice as many threads are there
    if (threadIdx.x < half) partial[threadIdx.x] += partial[threadIdx.x + half];
  }
  if (threadIdx.x == 0) shift[blockIdx.x] = float(partial[0] / count);
}

// ------------------------------------------------------------------------------------------------ Gram matrix

// ΣXXᵀ is symmetric. Its tiles have two units' rows and one unit's columns, this one not before the first of
// those; a last tile for each pair of units has ΣX in all columns.
constexpr int kPairs = (kUnits + 1) / 2;
HOST_DEVICE constexpr int tiles_before(int pair) { return pair * (kUnits + 2 - pair); }
constexpr int kGramTiles = tiles_before(kPairs);
constexpr int kGramSize = kGramTiles * 128;
struct GramTile {
  int pair, unit;  // kUnits for ΣX
};
HOST_DEVICE constexpr GramTile gram_tile(int index) {
  int pair = 0;
  while (tiles_before(pair + 1) <= index) pair++;
  return {pair, 2 * pair + index - tiles_before(pair)};
}
// A tile's element among all, as lanes hold them.
HOST_DEVICE constexpr int gram_element(int tile, int row, int column) {
  return tile * 128 + (row % 8 * 4 + column / 2) * 4 + row / 8 * 2 + column % 2;
}
// Where (ΣXXᵀ)[a][b] is, and (ΣX)[a].
HOST_DEVICE constexpr int gram_at(int a, int b) {
  const bool direct = b / 8 >= a / 16 * 2;
  const int row = direct ? a : b, column = direct ? b : a;
  return gram_element(tiles_before(row / 16) + column / 8 - row / 16 * 2, row % 16, column % 8);
}
HOST_DEVICE constexpr int patch_sum_at(int a) {
  return gram_element(tiles_before(a / 16) + kUnits - a / 16 * 2, a % 16, 0);
}

constexpr int kGramRows = 4;  // of v in a tile
using GramStage = Stage<kGramRows, columns_for(kGramRows)>;
constexpr int kGramColumns = columns_for(kGramRows);

// A role is up to kRoleTiles of those tiles. Warps with the same role take turns with the positions.
constexpr int kRoleTiles = 8, kRoles = (kGramTiles + kRoleTiles - 1) / kRoleTiles;
constexpr int kBlockRoles = kRoles > 2 ? 4 : kRoles, kGramGroups = kWarps / kBlockRoles;
constexpr int kGramPasses = (kRoles + kBlockRoles - 1) / kBlockRoles;
static_assert(kBlockRoles * kRoleTiles * 128 * 4 <= GramStage::kBytes, "room to merge groups");

// Adds the products of a role, of `rows` × `columns` positions of the stage at `address`, to `total`.
template <int kRole>
__device__ __forceinline__ void multiply_gram(float (&total)[kRoleTiles][4], uint32_t address, int rows,
                                              int columns, int group, float factor) {
  const int lane = threadIdx.x % 32, pitch = (columns + 15) / 16 * 16;
  const uint32_t part = address + lane / 16 * GramStage::kPartBytes + lane % 16 * 16;
  const uint32_t zeros = address + GramStage::kZeros;
  int row = 0, column = group * 16;  // of the first of 16 positions
  const auto wrap = [&] {
    while (column >= pitch) column -= pitch, row++;
  };
  for (wrap(); row < rows;) {
    float d[kRoleTiles][4];
#pragma unroll
    for (int i = 0; i < kRoleTiles; i++)
#pragma unroll
      for (int j = 0; j < 4; j++) d[i][j] = 0;
#pragma unroll 1
    for (int step = 0; step < kSteps && row < rows; step++) {
      const uint32_t pixel = part + GramStage::offset(row, column);
      const bool real = column + lane % 16 < columns;
      // High halves of 16 positions, then low ones, as fragments of B; or half of A's.
      const auto load = [&](uint32_t(&unit)[4], int index) {
        load_matrices_transposed(unit, real ? pixel + GramStage::offset(index) : zeros);
      };
      uint32_t rows_of[2][4] = {};  // the pair's units
      for_constants<kRoleTiles>([&](auto constant) {
        constexpr int i = decltype(constant)::value, index = kRole * kRoleTiles + i;
        if constexpr (index < kGramTiles) {
          constexpr GramTile tile = gram_tile(index);
          if constexpr (i == 0 || tile.unit == 2 * tile.pair) {
            load(rows_of[0], 2 * tile.pair);
            if constexpr (2 * tile.pair + 1 < kUnits) {
              load(rows_of[1], 2 * tile.pair + 1);
            } else {
              rows_of[1][0] = rows_of[1][1] = rows_of[1][2] = rows_of[1][3] = 0;
            }
          }
          const uint32_t high[4] = {rows_of[0][0], rows_of[1][0], rows_of[0][1], rows_of[1][1]};
          const uint32_t low[4] = {rows_of[0][2], rows_of[1][2], rows_of[0][3], rows_of[1][3]};
          if constexpr (tile.unit == kUnits) {
            const uint32_t ones = 0x3c003c00;
            multiply_add(d[i], low, ones, ones);
            multiply_add(d[i], high, ones, ones);
          } else {
            uint32_t unit[4];
            if constexpr (tile.unit < 2 * tile.pair + 2) {
#pragma unroll
              for (int j = 0; j < 4; j++) unit[j] = rows_of[tile.unit % 2][j];
            } else {
              load(unit, tile.unit);
            }
            multiply_add(d[i], low, unit[0], unit[1]);
            multiply_add(d[i], high, unit[2], unit[3]);
            multiply_add(d[i], high, unit[0], unit[1]);
          }
        }
      });
      column += kGramGroups * 16, wrap();
    }
    for_constants<kRoleTiles>([&](auto constant) {
      constexpr int i = decltype(constant)::value, index = kRole * kRoleTiles + i;
      if constexpr (index < kGramTiles) {
        const float second = gram_tile(index).unit == kUnits ? 1.f : factor;
#pragma unroll
        for (int j = 0; j < 4; j++) total[i][j] += d[i][j] * factor * second;
      }
    });
  }
}

// gram (N, strips, kGramSize). Grid: strips, samples, passes, the first fastest.
__global__ void __launch_bounds__(kThreads, 2)
gram_kernel(float* gram, const value_t* x, const float* shift, Geometry geometry) {
#if __CUDA_ARCH__ >= 800
  extern __shared__ __align__(128) unsigned char shared[];
  __shared__ int largest[2];
  GramStage stage(shared, largest);
  const int strip = blockIdx.x % geometry.strips, job = blockIdx.x / geometry.strips;
  const int n = job % geometry.N, pass = job / geometry.N;
  const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0), group = warp / kBlockRoles;
  // Warps that share a scheduler have different roles, not equally long ones.
  const int of_block = group % 2 ? kBlockRoles - 1 - warp % kBlockRoles : warp % kBlockRoles;
  const int role = pass * kBlockRoles + of_block;
  const value_t* sample = x + int64_t(n) * CHANNELS_IN * geometry.H * geometry.W;
  const int row_end = min(geometry.height(), (strip + 1) * geometry.rows);

  float total[kRoleTiles][4] = {};
  for (int row = strip * geometry.rows; row < row_end; row += kGramRows)
    for (int column = 0; column < geometry.width(); column += kGramColumns) {
      const int exponent = stage.fill(sample, shift + n * CHANNELS_IN, row, column, geometry);
      with_constant<kRoles>(role, [&](auto constant) {
        multiply_gram<decltype(constant)::value>(total, shared_address(shared), min(kGramRows, row_end - row),
                                                 min(kGramColumns, geometry.width() - column), group,
                                                 power_of_two(-exponent));
      });
    }
  merge_groups<kGramGroups, kRoleTiles * 4>(
      &total[0][0], reinterpret_cast<float*>(shared) + of_block * (kRoleTiles * 128), group);
  float4* to = reinterpret_cast<float4*>(gram + (int64_t(n) * geometry.strips + strip) * kGramSize);
  if (group == 0)
#pragma unroll
    for (int i = 0; i < kRoleTiles; i++)
      if (role * kRoleTiles + i < kGramTiles)
        to[(role * kRoleTiles + i) * 32 + threadIdx.x % 32] =
            make_float4(total[i][0], total[i][1], total[i][2], total[i][3]);
#endif
}

// -------------------------------------------------------------------------------- selected positions' gradients

// What forward was given and kept.
struct Saved {
  const value_t* weight;
  const output_t* dy;
  const float* extreme;
  const uint8_t* index;
  const float *group_mean, *group_rstd, *conv_bias, *norm_weight, *norm_bias, *scale;
  float low, high;
};

// Of a channel of one sample.
struct Channel {
  Normaliser normalise;
  float scale;
  bool flat;  // all of a window's values tie, and the first is selected
};
__device__ __forceinline__ Channel channel_of(const Saved& saved, GroupShape shape, int n, int c) {
  return {normaliser(saved.group_mean, saved.group_rstd, saved.conv_bias, saved.norm_weight, saved.norm_bias,
                     shape, n, c),
          saved.scale[c], saved.norm_weight[c] * saved.scale[c] == 0};
}

// The v that a window of a flat channel selects. Its place does not matter, for there slope·dz is zero; dz or
// dy·z may not be. `sample` is x's.
__device__ __forceinline__ float first_of_window(const Saved& saved, const value_t* sample, int c,
                                                 int window_row, int window_column, Geometry geometry) {
  const value_t* from = sample + int64_t(window_row) * POOL_H * geometry.W + window_column * POOL_W;
  const value_t* filter = saved.weight + c * (CHANNELS_IN * kTaps);
  float sum = 0;
  for (int i = 0; i < CHANNELS_IN; i++)
    for (int tap = 0; tap < kTaps; tap++)
      sum += float(filter[i * kTaps + tap]) *
             float(from[(int64_t(i) * geometry.H + tap / KERNEL_W) * geometry.W + tap % KERNEL_W]);
  return sum;
}

// slope·dz at the selected position; adds dz, dz·(v - mean) and dy·z to `sums`.
__device__ __forceinline__ float selected_gradient(const Saved& saved, const Channel& channel, float dy,
                                                   float extreme, float (&sums)[3]) {
  const float z = channel.normalise(extreme);
  const float passed = clamp_passes(z * channel.scale, saved.low, saved.high) ? dy : 0.f;
  const float dz = passed * channel.scale;
  sums[0] += dz, sums[1] += dz * channel.normalise.centred(extreme), sums[2] += passed * z;
  return dz * channel.normalise.slope;
}

// values[i] summed over the warp, in lane i.
template <int kOffset = 16> __device__ __forceinline__ float transposed_sum(float (&values)[32]) {
  const bool upper = threadIdx.x & kOffset;
#pragma unroll
  for (int i = 0; i < kOffset; i++) {
    const float given = upper ? values[i] : values[i + kOffset];
    const float kept = upper ? values[i + kOffset] : values[i];
    values[i] = kept + __shfl_xor_sync(~0u, given, kOffset);
  }
  if constexpr (kOffset > 1) return transposed_sum<kOffset / 2>(values);
  else return values[0];
}

// ----------------------------------------------------------------------------------------------- sparse product

constexpr int kArea = POOL_H * POOL_W;
// A product takes 16 positions: some windows, or part of one.
constexpr int kStepWindows = kArea < 16 ? 16 / kArea : 1, kWindowSteps = (kArea + 15) / 16;
constexpr int kSparseColumns = columns_for(POOL_H);
using SparseStage = Stage<POOL_H, kSparseColumns>;
constexpr int kTileWindows = kSparseColumns / POOL_W;
constexpr int kHeldWindows = (kTileWindows + kStepWindows - 1) / kStepWindows * kStepWindows;
constexpr int kRounds = (kHeldWindows + 31) / 32;   // a lane has one window of each
constexpr int kWarpChannels = kBlockChannels / kWarps;  // whose gradients a warp selects
constexpr int kHeldPitch = kBlockChannels + 1;      // no bank conflicts

// A role is 32 channels out and up to kRoleUnits units; warps with the same role take turns with the windows.
constexpr int kUnitGroups = (kUnits + 4) / 5, kRoleUnits = (kUnits + kUnitGroups - 1) / kUnitGroups;
constexpr int kBlockUnits = kUnitGroups > 1 ? 2 : 1, kSparseGroups = 4 / kBlockUnits;
constexpr int kSparsePasses = (kUnitGroups + kBlockUnits - 1) / kBlockUnits;
constexpr int kSparseShared = SparseStage::kBytes + kHeldWindows * kHeldPitch * 8;
static_assert(2 * kBlockUnits * 2 * kRoleUnits * 128 * 4 <= kSparseShared, "room to merge groups");

// Adds a role's products of a tile's `windows` to `total`. held: (gradient's halves, place) by window, channel.
template <int kGroupOfUnits>
__device__ __forceinline__ void multiply_sparse(float (&total)[2][kRoleUnits][4], uint32_t address,
                                                const uint2* held, const float* unscale, int windows,
                                                int group, float factor) {
  const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const uint32_t part = address + lane / 16 * SparseStage::kPartBytes, zeros = address + SparseStage::kZeros;
  const int steps = (windows + kStepWindows - 1) / kStepWindows * kWindowSteps;
  // Which of the step's windows a position belongs to.
  const auto window_of = [](int k) { return kStepWindows > 1 ? k / kArea : 0; };
  const int own_window = window_of(lane % 16);
  for (int first = group; first < steps; first += kSparseGroups * kSteps) {
    float d[2][kRoleUnits][4];
#pragma unroll
    for (int i = 0; i < 2 * kRoleUnits * 4; i++) (&d[0][0][0])[i] = 0;
#pragma unroll 1
    for (int step = first; step < min(steps, first + kSparseGroups * kSteps); step += kSparseGroups) {
      const int window = step / kWindowSteps * kStepWindows, begin = step % kWindowSteps * 16;
      uint32_t high[2][4], low[2][4];
#pragma unroll
      for (int half = 0; half < 2; half++) {
        const int k = 2 * t + 8 * half, of_step = window_of(k), place = begin + k - of_step * kArea;
        const bool real = of_step < kStepWindows;
        const uint2* from = held + (window + (real ? of_step : 0)) * kHeldPitch + g;
#pragma unroll
        for (int row = 0; row < 4; row++) {
          const uint2 one = from[row * 8];
          const unsigned distance = one.y - place;
          const bool here = real && distance < 2;
          const int bits = distance * 16;
          high[row / 2][row % 2 + 2 * half] = here ? (one.x & 0xffff) << bits : 0;
          low[row / 2][row % 2 + 2 * half] = here ? one.x >> 16 << bits : 0;
        }
      }
      const int place = begin + lane % 16 - own_window * kArea;
      const bool real = own_window < kStepWindows && place < kArea && window + own_window < windows;
      const uint32_t pixel = part + SparseStage::offset(place / POOL_W, (window + own_window) * POOL_W +
                                                                            place % POOL_W);
      for_constants<kRoleUnits>([&](auto constant) {
        constexpr int i = decltype(constant)::value, index = kGroupOfUnits * kRoleUnits + i;
        if constexpr (index < kUnits) {
          uint32_t unit[4];
          load_matrices_transposed(unit, real ? pixel + SparseStage::offset(index) : zeros);
#pragma unroll
          for (int m = 0; m < 2; m++) {
            multiply_add(d[m][i], low[m], unit[0], unit[1]);
            multiply_add(d[m][i], high[m], unit[2], unit[3]);
            multiply_add(d[m][i], high[m], unit[0], unit[1]);
          }
        }
      });
    }
#pragma unroll
    for (int m = 0; m < 2; m++)
#pragma unroll
      for (int half = 0; half < 2; half++) {
        const float of_channel = unscale[m * 16 + half * 8 + g];
#pragma unroll
        for (int i = 0; i < kRoleUnits; i++)
#pragma unroll
          for (int j = 0; j < 2; j++)
            total[m][i][half * 2 + j] += d[m][i][half * 2 + j] * factor * of_channel;
      }
  }
}

// sparse (N, strips, CHANNELS_OUT, kDepth); sums (N, strips, CHANNELS_OUT, 3) as of `select`. Grid: strips,
// samples, blocks of channels, passes, the first fastest.
__global__ void __launch_bounds__(kThreads, 2)
sparse_kernel(float* sparse, float* sums, const value_t* x, const float* shift, Saved saved, GroupShape shape,
              Geometry geometry) {
#if __CUDA_ARCH__ >= 800
  extern __shared__ __align__(128) unsigned char shared[];
  __shared__ int largest[2];
  __shared__ Channel channels[kBlockChannels];
  __shared__ float unscale[kBlockChannels];
  SparseStage stage(shared, largest);
  uint2* const held = reinterpret_cast<uint2*>(shared + SparseStage::kBytes);
  const int strip = blockIdx.x % geometry.strips, job = blockIdx.x / geometry.strips;
  const int n = job % geometry.N, first_channel = job / geometry.N % kChannelBlocks * kBlockChannels;
  const int pass = job / geometry.N / kChannelBlocks;
  const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0), lane = threadIdx.x % 32;
  const int half = warp % 2, group = warp / 2 / kBlockUnits;
  // Warps that share a scheduler have different units, not equally many.
  const int of_block = (warp / 2 + group) % kBlockUnits, units = pass * kBlockUnits + of_block;
  const value_t* sample = x + int64_t(n) * CHANNELS_IN * geometry.H * geometry.W;
  const int64_t plane_size = int64_t(geometry.pooled_height()) * geometry.pooled_width();
  const int row_end = min(geometry.pooled_height(), (strip + 1) * geometry.rows);
  if (threadIdx.x < kBlockChannels && first_channel + threadIdx.x < CHANNELS_OUT)
    channels[threadIdx.x] = channel_of(saved, shape, n, first_channel + threadIdx.x);

  float total[2][kRoleUnits][4] = {}, sum = 0;
  for (int row = strip * geometry.rows; row < row_end; row++)
    for (int column = 0; column < geometry.pooled_width(); column += kTileWindows) {
      const int windows = min(kTileWindows, geometry.pooled_width() - column);
      // On their way while the pixels are staged.
      float dy[kRounds][kWarpChannels], extreme[kRounds][kWarpChannels];
      int place[kRounds][kWarpChannels];
#pragma unroll
      for (int round = 0; round < kRounds; round++)
#pragma unroll
        for (int i = 0; i < kWarpChannels; i++) {
          const int c = first_channel + warp * kWarpChannels + i, window = round * 32 + lane;
          const bool real = window < windows && c < CHANNELS_OUT;
          const int64_t at = (int64_t(n) * CHANNELS_OUT + c) * plane_size +
                             int64_t(row) * geometry.pooled_width() + column + window;
          dy[round][i] = real ? float(saved.dy[at]) : 0.f, extreme[round][i] = real ? saved.extreme[at] : 0.f;
          place[round][i] = real ? saved.index[at] : 0;
        }
      const int exponent = stage.fill(sample, shift + n * CHANNELS_IN, row * POOL_H, column * POOL_W, geometry);
#pragma unroll 1
      for (int flat = 0; flat < kWarpChannels * kRounds; flat++) {  // rarely any
        const int own = warp * kWarpChannels + flat % kWarpChannels, window = flat / kWarpChannels * 32 + lane;
        if (first_channel + own >= CHANNELS_OUT || !channels[own].flat || window >= windows) continue;
        const float first =
            first_of_window(saved, sample, first_channel + own, row, column + window, geometry);
#pragma unroll
        for (int i = 0; i < kWarpChannels * kRounds; i++)
          if (i == flat) extreme[i / kWarpChannels][i % kWarpChannels] = first;
      }
      float of_channels[32] = {};
#pragma unroll
      for (int i = 0; i < kWarpChannels; i++) {
        const int own = warp * kWarpChannels + i, c = first_channel + own;
        float gradient[kRounds], parts[3] = {}, magnitude = 0;
#pragma unroll
        for (int round = 0; round < kRounds; round++) {
          const int window = round * 32 + lane;
          gradient[round] = 0;
          if (window < windows && c < CHANNELS_OUT)
            gradient[round] =
                selected_gradient(saved, channels[own], dy[round][i], extreme[round][i], parts);
          magnitude = fmaxf(magnitude, fabsf(gradient[round]));
        }
#pragma unroll
        for (int j = 0; j < 3; j++) of_channels[i * 3 + j] = parts[j];
        const unsigned bits = __reduce_max_sync(~0u, __float_as_uint(magnitude));
        const int exponent = fitting_exponent(__uint_as_float(bits));
        if (lane == 0) unscale[own] = power_of_two(-exponent);
#pragma unroll
        for (int round = 0; round < kRounds; round++) {
          const float scaled = gradient[round] * power_of_two(exponent);
          const float rest = residual(scaled, 0, pack(scaled, 0)).x;
          if (round * 32 + lane < kHeldWindows)
            held[(round * 32 + lane) * kHeldPitch + own] = make_uint2(pack(scaled, rest), place[round][i]);
        }
      }
      sum += transposed_sum(of_channels);
      __syncthreads();  // all gradients are there
      with_constant<kUnitGroups>(units, [&](auto constant) {
        multiply_sparse<decltype(constant)::value>(total, shared_address(shared), held + half * 32,
                                                   unscale + half * 32, windows, group,
                                                   power_of_two(-exponent));
      });
    }
  const int64_t slot = int64_t(n) * geometry.strips + strip;
  const int of_warp = first_channel + warp * kWarpChannels + lane / 3;
  if (pass == 0 && lane < 3 * kWarpChannels && of_warp < CHANNELS_OUT)
    sums[(slot * CHANNELS_OUT + of_warp) * 3 + lane % 3] = sum;
  merge_groups<kSparseGroups, 2 * kRoleUnits * 4>(
      &total[0][0][0], reinterpret_cast<float*>(shared) + (half * kBlockUnits + of_block) * (kRoleUnits * 256),
      group);
  if (group == 0)
#pragma unroll
    for (int m = 0; m < 2; m++)
#pragma unroll
      for (int i = 0; i < kRoleUnits; i++)
#pragma unroll
        for (int j = 0; j < 4; j++) {
          const int c = first_channel + half * 32 + m * 16 + j / 2 * 8 + lane / 4;
          const int unit = units * kRoleUnits + i;
          if (c < CHANNELS_OUT && unit < kUnits)
            sparse[(slot * CHANNELS_OUT + c) * kDepth + unit * 8 + lane % 4 * 2 + j % 2] = total[m][i][j];
        }
#endif
}

// ---------------------------------------------------------------------------------------------------- the rest

constexpr int kSegments = 4;     // of the samples, whose Gram matrices are added up side by side
constexpr int kMixedGroups = 8;  // of a block

// What is merged in double, one after the other.
struct Merged {
  double *patches, *constant, *gradients, *linear, *mixed;
  Merged(double* from, int64_t N, int64_t G)
      : patches(from),                                  // (N, kDepth): ΣX
        constant(patches + N * kDepth),                 // (N, CHANNELS_OUT)
        gradients(constant + N * CHANNELS_OUT),         // (4, N, CHANNELS_OUT) of conv_bias, norm, scale
        linear(gradients + 4 * N * CHANNELS_OUT),       // (N, G)
        mixed(linear + N * G) {}                        // (kSegments, G, kGramSize)
};
// And what is merged: of each strip, in float32.
struct Partial {
  float *shift, *gram, *sparse, *sums;
  Partial(float* from, int64_t N, int64_t gram_strips, int64_t strips)
      : shift(from + 0),
        gram(shift + (N * CHANNELS_IN + 3) / 4 * 4),
        sparse(gram + N * gram_strips * kGramSize),
        sums(sparse + N * strips * CHANNELS_OUT * kDepth) {}
};

__device__ __forceinline__ double warp_sum(double value) {
  for (int offset = 16; offset; offset /= 2) value += __shfl_xor_sync(~0u, value, offset);
  return value;
}

// dv = slope·dz·[selected] + constant + linear·(weight·X), X of x less its shift; and the parameters'
// gradients by sample. The group's mean is computed anew, because float32 holds little of it that is not
// shift, where that is large. A block per sample.
__global__ void __launch_bounds__(kThreads)
coefficients_kernel(Merged merged, Partial partial, Saved saved, GroupShape shape, int gram_strips, int strips) {
  __shared__ double patches[kDepth];
  __shared__ double sums[3][CHANNELS_OUT];
  __shared__ double mean[CHANNELS_OUT];  // of weight·X
  __shared__ double level[CHANNELS_OUT];  // what the shift and the bias add to that
  __shared__ double constant[CHANNELS_OUT];  // by group, as the next ones
  __shared__ double linear[CHANNELS_OUT];
  __shared__ double group_mean[CHANNELS_OUT];
  const int n = blockIdx.x, warp = threadIdx.x / 32, lane = threadIdx.x % 32, NC = shape.N * CHANNELS_OUT;
  for (int k = threadIdx.x; k < kDepth; k += kThreads) {
    double sum = 0;
    for (int strip = 0; strip < gram_strips; strip++)
      sum += partial.gram[(int64_t(n) * gram_strips + strip) * kGramSize + patch_sum_at(k)];
    patches[k] = merged.patches[int64_t(n) * kDepth + k] = sum;
  }
  for (int i = threadIdx.x; i < 3 * CHANNELS_OUT; i += kThreads) {
    double sum = 0;
    for (int strip = 0; strip < strips; strip++)
      sum += partial.sums[(int64_t(n) * strips + strip) * CHANNELS_OUT * 3 + i];
    sums[i % 3][i / 3] = sum;
  }
  __syncthreads();  // patches and sums are there
  for (int c = warp; c < CHANNELS_OUT; c += kWarps) {
    double of_patches = 0, of_shift = 0;
    for (int k = lane; k < kDepth; k += 32)
      if (input_channel(k) < CHANNELS_IN) {
        const double w = float(saved.weight[c * (CHANNELS_IN * kTaps) + place_in_filter(k)]);
        of_patches += w * patches[k], of_shift += w * partial.shift[n * CHANNELS_IN + input_channel(k)];
      }
    of_patches = warp_sum(of_patches), of_shift = warp_sum(of_shift);
    if (lane == 0) mean[c] = of_patches / shape.S, level[c] = of_shift + saved.conv_bias[c];
  }
  __syncthreads();  // mean and level are there
  for (int g = threadIdx.x; g < shape.G; g += kThreads) {
    const int first = g * shape.channels();
    double total = 0, gradient = 0, product = 0;
    for (int c = first; c < first + shape.channels(); c++) total += mean[c] + level[c];
    group_mean[g] = total / shape.channels();
    const double moved = group_mean[g] - saved.group_mean[n * shape.G + g];
    for (int c = first; c < first + shape.channels(); c++) {
      sums[1][c] -= moved * sums[0][c];
      gradient += saved.norm_weight[c] * sums[0][c], product += saved.norm_weight[c] * sums[1][c];
    }
    const double rstd = saved.group_rstd[n * shape.G + g], count = double(shape.channels()) * shape.S;
    constant[g] = -rstd * gradient / count, linear[g] = -(rstd * product) / count * rstd * rstd;
    merged.linear[n * shape.G + g] = linear[g];
  }
  __syncthreads();  // the coefficients are there
  for (int c = threadIdx.x; c < CHANNELS_OUT; c += kThreads) {
    const int g = c / shape.channels(), at = n * CHANNELS_OUT + c;
    const double rstd = saved.group_rstd[n * shape.G + g];
    const double own = constant[g] + linear[g] * (level[c] - group_mean[g]);
    merged.constant[at] = own;
    merged.gradients[at] =
        rstd * saved.norm_weight[c] * sums[0][c] + double(shape.S) * (own + linear[g] * mean[c]);
    merged.gradients[NC + at] = rstd * sums[1][c];
    merged.gradients[2 * NC + at] = sums[0][c];
    merged.gradients[3 * NC + at] = sums[2][c];
  }
}

// mixed (kSegments, G, kGramSize). Grid: elements by kThreads, kMixedGroups groups, segments.
__global__ void __launch_bounds__(kThreads)
mix_kernel(Merged merged, const float* gram, int N, int G, int strips) {
  const int element = blockIdx.x * kThreads + threadIdx.x, first = blockIdx.y * kMixedGroups;
  const int segment = blockIdx.z;
  if (element >= kGramSize) return;
  double sum[kMixedGroups] = {};
#pragma unroll 4
  for (int n = int64_t(N) * segment / kSegments; n < int64_t(N) * (segment + 1) / kSegments; n++) {
    double of_sample = 0;
    for (int strip = 0; strip < strips; strip++)
      of_sample += gram[(int64_t(n) * strips + strip) * kGramSize + element];
#pragma unroll
    for (int i = 0; i < kMixedGroups; i++) {
      const double linear = first + i < G ? merged.linear[n * G + first + i] : 0;
      if (linear != 0) sum[i] += linear * of_sample;  // of zero, also where the squares overflow
    }
  }
#pragma unroll
  for (int i = 0; i < kMixedGroups; i++)
    if (first + i < G) merged.mixed[(int64_t(segment) * G + first + i) * kGramSize + element] = sum[i];
}

// A block per channel out. d_weight like weight; the parameters' gradients (CHANNELS_OUT), the last of them by
// channel only if `scales`.
__global__ void __launch_bounds__(kThreads)
weight_gradient_kernel(value_t* d_weight, float* d_conv_bias, float* d_norm_weight, float* d_norm_bias,
                       float* d_scale, Merged merged, Partial partial, const value_t* weight, bool scales,
                       GroupShape shape, int strips) {
  __shared__ double parts[kWarps][kDepth];
  const int c = blockIdx.x, g = c / shape.channels(), warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  constexpr int kOwn = (kDepth + 31) / 32;
  double sum[kOwn] = {};
  const auto for_own = [&](auto act) {
#pragma unroll
    for (int i = 0; i < kOwn; i++)
      if (i * 32 + lane < kDepth) act(i, i * 32 + lane);
  };
#pragma unroll 8
  for (int64_t slot = warp; slot < int64_t(shape.N) * strips; slot += kWarps)
    for_own([&](int i, int k) { sum[i] += partial.sparse[(slot * CHANNELS_OUT + c) * kDepth + k]; });
#pragma unroll 4
  for (int n = warp; n < shape.N; n += kWarps) {
    const double constant = merged.constant[n * CHANNELS_OUT + c];
    const double of_bias = merged.gradients[n * CHANNELS_OUT + c];
    for_own([&](int i, int k) {
      const bool real = input_channel(k) < CHANNELS_IN;
      sum[i] += constant * merged.patches[int64_t(n) * kDepth + k] +
                (real ? of_bias * partial.shift[n * CHANNELS_IN + input_channel(k)] : 0.);
    });
  }
#pragma unroll 2
  for (int k = warp; k < kDepth; k += kWarps) {
    if (input_channel(k) >= CHANNELS_IN) continue;
    const double w = float(weight[c * (CHANNELS_IN * kTaps) + place_in_filter(k)]);
    for_own([&](int i, int own) {
      double mixed = 0;
      for (int segment = 0; segment < kSegments; segment++)
        mixed += merged.mixed[(int64_t(segment) * shape.G + g) * kGramSize + gram_at(k, own)];
      sum[i] += w * mixed;
    });
  }
  for_own([&](int i, int k) { parts[warp][k] = sum[i]; });
  __syncthreads();  // every warp's sums are there
  for (int k = threadIdx.x; k < kDepth; k += kThreads) {
    double total = 0;
    for (int i = 0; i < kWarps; i++) total += parts[i][k];
    if (input_channel(k) < CHANNELS_IN)
      d_weight[c * (CHANNELS_IN * kTaps) + place_in_filter(k)] = value_t(float(total));
  }
  float* const totals[] = {d_conv_bias, d_norm_weight, d_norm_bias, d_scale};
  if (warp < (scales ? 4 : 3)) {
    const double* from = merged.gradients + int64_t(warp) * shape.N * CHANNELS_OUT + c;
    double total = 0;
    for (int n = lane; n < shape.N; n += 32) total += from[int64_t(n) * CHANNELS_OUT];
    total = warp_sum(total);
    if (lane == 0) totals[warp][c] = float(total);
  }
}

}  // namespace

#include "conv2d_groupnorm_scale_maxpool_clamp_input_gradient.cuh"

namespace {

inline Saved saved_by_forward(const value_t* weight, const output_t* dy, const float* kept,
                              const uint8_t* index, const float* conv_bias, const float* norm_weight,
                              const float* norm_bias, const float* scale, double low, double high,
                              Geometry geometry, GroupShape shape) {
  const float* behind = kept + int64_t(shape.N) * shape.C * geometry.pooled_height() * geometry.pooled_width();
  const auto [mean, m2, group_mean, group_rstd] = GroupStatistics(behind, shape.N, shape.C, shape.G);
  return {weight,    dy,          kept,      index, group_mean, group_rstd,
          conv_bias, norm_weight, norm_bias, scale, float(low), float(high)};
}

template <class Kernel> void allow(Kernel kernel, int bytes) {
  cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
}

}  // namespace

// The gradients of weight and, summed over the samples, of the parameters; d_scale has `scales` elements,
// CHANNELS_OUT or 1. kept and index are forward's. `merged` and `partial` have room for what Merged and Partial
// say. Rows of v are cut into gram_strips strips of gram_rows, and rows of windows into `strips` of `rows`, the
// last of what is left; a plan that does not cover them makes no blocks, and the launch fails.
EXPORT void backward(value_t* d_weight, float* d_conv_bias, float* d_norm_weight, float* d_norm_bias,
                     float* d_scale, double* merged, float* partial, const output_t* dy, const value_t* x,
                     const value_t* weight, const float* kept, const uint8_t* index, const float* conv_bias,
                     const float* norm_weight, const float* norm_bias, const float* scale, double low,
                     double high, int64_t scales,
                     int64_t N, int64_t G, int64_t H, int64_t W, int64_t gram_strips, int64_t gram_rows,
                     int64_t strips, int64_t rows, cudaStream_t stream) {
  const Geometry dense{int(N), int(H), int(W), int(gram_strips), int(gram_rows)};
  const Geometry geometry{int(N), int(H), int(W), int(strips), int(rows)};
  const GroupShape shape{N, CHANNELS_OUT, G, int64_t(dense.height()) * dense.width()};
  const Saved saved = saved_by_forward(weight, dy, kept, index, conv_bias, norm_weight, norm_bias, scale, low,
                                       high, geometry, shape);
  const Merged sums(merged, N, G);
  const Partial parts(partial, N, gram_strips, strips);
  const bool fits = dense.cover(dense.height()) && geometry.cover(geometry.pooled_height());
  const unsigned gram_blocks = fits ? unsigned(gram_strips * N * kGramPasses) : 0;
  const unsigned blocks = fits ? unsigned(strips * N * kChannelBlocks * kSparsePasses) : 0;
  allow(gram_kernel, GramStage::kBytes), allow(sparse_kernel, kSparseShared);
  shift_kernel<<<N * CHANNELS_IN, kThreads, 0, stream>>>(parts.shift, x, H * W);
  gram_kernel<<<gram_blocks, kThreads, GramStage::kBytes, stream>>>(parts.gram, x, parts.shift, dense);
  sparse_kernel<<<blocks, kThreads, kSparseShared, stream>>>(parts.sparse, parts.sums, x, parts.shift, saved,
                                                             shape, geometry);
  coefficients_kernel<<<N, kThreads, 0, stream>>>(sums, parts, saved, shape, int(gram_strips), int(strips));
  const dim3 mixing(blocks_for(kGramSize, kThreads), blocks_for(G, kMixedGroups), kSegments);
  mix_kernel<<<mixing, kThreads, 0, stream>>>(sums, parts.gram, int(N), int(G), int(gram_strips));
  weight_gradient_kernel<<<CHANNELS_OUT, kThreads, 0, stream>>>(d_weight, d_conv_bias, d_norm_weight,
                                                                d_norm_bias, d_scale, sums, parts, weight,
                                                                scales > 1, shape,
                                                                int(strips));
  if (scales == 1)
    sum_rows_kernel<<<1, kThreads, 0, stream>>>(d_scale, sums.gradients + 3 * N * CHANNELS_OUT, N, CHANNELS_OUT);
}

// dx, after `backward`, of which merged and partial are. Rows of x are cut into strips of `rows`, and columns
// into tiles of `stride`; the first tile has as many columns as a tile of v, and so does the last, but those
// between are narrower.
EXPORT void backward_input(value_t* dx, const double* merged, float* partial, const output_t* dy,
                           const value_t* x, const value_t* weight, const float* kept, const uint8_t* index,
                           const float* conv_bias, const float* norm_weight, const float* norm_bias,
                           const float* scale, double low, double high, int64_t N, int64_t G, int64_t H,
                           int64_t W, int64_t tiles, int64_t stride, int64_t strips, int64_t rows,
                           cudaStream_t stream) {
  const Geometry geometry{int(N), int(H), int(W), int(strips), int(rows)};
  const GroupShape shape{N, CHANNELS_OUT, G, int64_t(geometry.height()) * geometry.width()};
  const Saved saved = saved_by_forward(weight, dy, kept, index, conv_bias, norm_weight, norm_bias, scale, low,
                                       high, geometry, shape);
  const Composed composed(partial, N);
  const bool cut = (tiles - 1) * stride < W && W <= tiles * stride;
  const bool fits = stride + (tiles > 2 ? kHaloW : 0) <= kInputColumns && rows % POOL_H == 0;
  const unsigned blocks = geometry.cover(int(H)) && cut && fits ? unsigned(strips * tiles * N) : 0;
  allow(input_gradient_kernel, InputLayout::kBytes), allow(border_kernel, kBorderShared);
  compose_kernel<<<unsigned(N + 1), kComposeThreads, 0, stream>>>(
      composed, weight, Merged(const_cast<double*>(merged), N, G), shape);
  input_gradient_kernel<<<blocks, kInputThreads, InputLayout::kBytes, stream>>>(
      dx, x, partial, composed, saved, shape, geometry, int(tiles), int(stride));
  const dim3 edges(kEdges + 1, unsigned(N));
  border_kernel<<<edges, kBorderThreads, kBorderShared, stream>>>(dx, x, partial, composed, geometry);
}
