// The gradients of weight and of the parameters, of pool's fused backward, whose formulas are there.
//   strip_kernel    of a strip of a sample's tiles: what ΣXXᵀ and ΣX are made of, of x less its shift;
//                   Σ slope·dz·X; sums of dy, where it passes, and of dy·(v - mean)
//   sample_kernel   constant and linear; a sample's gradients
//   total_kernel    those added up
//
// ΣXXᵀ depends on the difference of two kernel rows only, but for the first and last rows of x. Let R(q) be
// the sum over the positions in row q alone, of all units and those in kernel row 0. Then
//   (ΣXXᵀ)[unit, kernel row a ≥ b][unit, kernel row b] = Σ R(q)[unit, kernel row a - b][unit, kernel row 0]
// over the rows q from b to b + OH - 1. Of most rows, which are the same for all b, the sum is enough; the
// others, KERNEL_H - 1 at either end, are kept one by one: the frame.
#pragma once
#include "conv2d_groupnorm_scale_maxpool_clamp_backward.cuh"

namespace {

// ----------------------------------------------------------------------------------------------------- tiles

// A tile has POOL_H rows of positions, a row of windows where there is one, and up to kTileColumns columns.
// The next one begins with a whole window.
constexpr int kPixels = columns_for(POOL_H), kTileColumns = kPixels - KERNEL_W + 1;
constexpr int kTileWindows = kTileColumns / POOL_W;
static_assert(kPixels <= 16 * kSteps, "a row of a tile is one sum of a tensor core");
using TileStage = Stage<POOL_H, kTileColumns>;

template <int kLanes> __device__ __forceinline__ double lanes_sum(double value) {
  for (int offset = kLanes / 2; offset; offset /= 2) value += __shfl_xor_sync(~0u, value, offset);
  return value;
}

constexpr int kSampled = 128;  // pixels of a plane

// Of each channel in, the mean of pixels that are spread evenly. Any constant near x would do.
__device__ __forceinline__ void find_shift(float* shift, const value_t* sample, int size) {
  const int lane = threadIdx.x % 32, count = min(size, kSampled);
  for (int c = threadIdx.x / 32; c < CHANNELS_IN; c += kWarps) {
    double sum = 0;
#pragma unroll
    for (int i = lane; i < kSampled; i += 32)
      if (i < count) sum += float(sample[int64_t(c) * size + int64_t(i) * size / count]);
    sum = lanes_sum<32>(sum);
    if (lane == 0) shift[c] = float(sum / count);
  }
}

// ----------------------------------------------------------------------------------------------- Gram matrix

// R has rows of all units, of ones, which give ΣX, and of zeros; its columns are those of kernel row 0. Its
// tiles have two units' rows and one unit's columns.
constexpr int kColumnUnits = kPlanes * KERNEL_W, kPairs = kUnits / 2 + 1;
constexpr int kGramTiles = kPairs * kColumnUnits, kGramSize = kGramTiles * 128;
constexpr int kFrameRows = 2 * (KERNEL_H - 1);
HOST_DEVICE constexpr int unit_of_column(int column) { return column / KERNEL_W * kTaps + column % KERNEL_W; }
// Where R(q) of a sample is kept by itself, if it is.
__device__ __forceinline__ int frame_row(int q, Geometry geometry) {
  const int height = geometry.height(), inner = height > KERNEL_H - 1 ? height - (KERNEL_H - 1) : 0;
  return q < KERNEL_H - 1 ? q : q >= height ? q - inner : -1;
}

// A role is up to kRoleTiles of those tiles, of whole pairs or within one; warps with the same role take
// turns with the rows. The blocks that see the same pixels share the roles.
constexpr int kRoleTiles = kColumnUnits <= 9 ? 9 / kColumnUnits * kColumnUnits : kColumnUnits / 2;
constexpr int kRoleColumns = kRoleTiles < kColumnUnits ? kRoleTiles : kColumnUnits;
constexpr int kRoles = (kGramTiles + kRoleTiles - 1) / kRoleTiles;
static_assert(kColumnUnits % kRoleColumns == 0 && kRoleTiles % kRoleColumns == 0, "no parts of two pairs");

// Adds the products of a role, of `columns` positions of a row of the stage, whose first is at `address`, to
// `total` of the lane; or puts them there. constants: a pixel of ones, and one of zeros.
template <int kRole>
__device__ __forceinline__ void multiply_gram(float4* total, bool add, uint32_t address, uint2 constants,
                                              int columns, float factor) {
  const int lane = thread_index_anew() % 32;
  const bool second = lane / 8 % 2;  // A: the first unit's positions 0-7, the second one's; 8-15 likewise
  constexpr int kLeft = kGramTiles - kRole * kRoleTiles, kOwn = kLeft < kRoleTiles ? kLeft : kRoleTiles;
  float d[kOwn][4];
#pragma unroll
  for (int i = 0; i < kOwn * 4; i++) (&d[0][0])[i] = 0;
  // The second unit's matrices lie so far behind the first one's.
  constexpr int kRolePairs = (kOwn + kRoleColumns - 1) / kRoleColumns;
  const auto unit_of = [](int pair) { return (kRole * kRoleTiles + pair * kRoleColumns) / kColumnUnits * 2; };
  uint32_t behind[kRolePairs];
#pragma unroll
  for (int i = 0; i < kRolePairs; i++)
    behind[i] = second ? TileStage::offset(unit_of(i) + 1) - TileStage::offset(unit_of(i)) : 0;
#pragma unroll 1
  for (int first = 0; first < columns; first += 16) {
    const int row_position = first + lane % 8 + lane / 16 * 8, position = first + lane % 16;
    const uint32_t row_pixel = address + (row_position < columns ? row_position * 16 : 0);
    const uint32_t pixel = address + lane / 16 * TileStage::kPartBytes + position * 16;
    // B: high halves of 16 positions, then low ones; zeros where there is no position.
    uint32_t of_column[kRoleColumns][4];
#pragma unroll
    for (int i = 0; i < kRoleColumns; i++) {
      const int unit = unit_of_column((kRole * kRoleTiles + i) % kColumnUnits);
      const uint32_t at = pixel + TileStage::offset(unit);
      load_matrices_transposed(of_column[i], position < columns ? at : constants.y);
    }
#pragma unroll
    for (int pair = 0; pair < kRolePairs; pair++) {
      const int unit = unit_of(pair), begin = pair * kRoleColumns;
      uint32_t row_halves[2][4];
#pragma unroll
      for (int part = 0; part < 2; part++) {
        const uint32_t of_ones = part ? constants.y : constants.x;
        uint32_t at = row_pixel + behind[pair] + TileStage::offset(unit) + part * TileStage::kPartBytes;
        if (unit == kUnits) at = second ? constants.y : of_ones;
        if (unit + 1 == kUnits && second) at = of_ones;
        load_matrices_transposed(row_halves[part], at);
      }
#pragma unroll
      for (int part = 0; part < 3; part++)  // small ones first, and none needs the result of the one before
#pragma unroll
        for (int i = 0; i < kRoleColumns; i++)
          multiply_add(d[begin + i], row_halves[part == 0], of_column[i][part == 1 ? 2 : 0],
                       of_column[i][part == 1 ? 3 : 1]);
    }
  }
#pragma unroll
  for (int i = 0; i < kOwn; i++) {
    const int first = (kRole * kRoleTiles + i) / kColumnUnits * 2;
    const float of_first = first == kUnits ? factor : factor * factor;
    const float of_second = first + 1 == kUnits ? factor : factor * factor;
    const float4 before = add ? total[i * 32] : make_float4(0, 0, 0, 0);
    total[i * 32] = make_float4(before.x + d[i][0] * of_first, before.y + d[i][1] * of_first,
                                before.z + d[i][2] * of_second, before.w + d[i][3] * of_second);
  }
}

// -------------------------------------------------------------------------------------------- sparse product

constexpr int kArea = POOL_H * POOL_W;
// One of a window's positions has a gradient, so that the tensor cores' sparse products serve, of 32
// positions each: some windows, or part of one. A window takes kPlaces there, so that no four neighbours are
// of two windows.
constexpr int kPlaces = kArea <= 4 ? 4 : kArea <= 8 ? 8 : (kArea + 15) / 16 * 16;
constexpr int kStepWindows = kPlaces < 32 ? 32 / kPlaces : 1, kWindowSteps = (kPlaces + 31) / 32;
constexpr int kRounds = (kTileWindows + 31) / 32;  // a lane has one window of each
constexpr int kHeldWindows = kRounds * 32;
constexpr int kWarpChannels = kBlockChannels / kWarps;  // whose gradients a warp selects
constexpr int kHeldPitch = kBlockChannels + 1;          // no bank conflicts

// Where in its window a gradient is: among which four neighbours; selectors of the 16 ones around it, by
// their difference from those of zeros; and how far it is shifted in a register.
struct Origin {
  uint16_t selectors;
  uint8_t four, bits;
};
constexpr unsigned kZeroSelectors = 0x4444;  // the first two of each four
__device__ __forceinline__ Origin origin_of(int place) {
  const int of_four = place % 4;  // 0 of (0, 1), 1 of (1, 2), 2 and 3 of (2, 3)
  const unsigned selectors = (0xee94 >> of_four * 4 & 0xf) ^ (kZeroSelectors & 0xf);
  return {uint16_t(selectors << place / 4 % 4 * 4), uint8_t(place / 4), uint8_t(of_four / 3 * 16)};
}

// The gradients that a tile's windows select, as elements of A: (high, low) by window and channel; and by
// channel what undoes its scale.
struct Held {
  uint2 halves[kHeldWindows][kHeldPitch];
  Origin origins[kHeldWindows][kHeldPitch];
  Origin origin_of_place[kArea];
  float unscale[kBlockChannels];
};

// A role is 32 channels out and up to kRoleUnits units; warps with the same role take turns with the windows.
constexpr int kUnitGroups = (kUnits + 4) / 5, kRoleUnits = (kUnits + kUnitGroups - 1) / kUnitGroups;
constexpr int kBlockUnits = kUnitGroups > 1 ? 2 : 1, kSparseGroups = 4 / kBlockUnits;
constexpr int kSparsePasses = (kUnitGroups + kBlockUnits - 1) / kBlockUnits;

// Adds a role's products of a tile's `windows` to `total`, of 32 channels from `first_channel` on.
template <int kGroupOfUnits>
__device__ __forceinline__ void multiply_sparse(float (&total)[2][kRoleUnits][4], uint32_t address,
                                                const Held& held, int first_channel, int windows, int group,
                                                float factor) {
  const int lane = thread_index_anew() % 32, g = lane / 4, t = lane % 4;
  const int steps = (windows + kStepWindows - 1) / kStepWindows * kWindowSteps;
  // Which of the step's windows a position belongs to.
  const auto window_of = [](int k) { return kStepWindows > 1 ? k / kPlaces : 0; };
  for (int first = group; first < steps; first += kSparseGroups * kSteps) {
    float d[2][kRoleUnits][4];
#pragma unroll
    for (int i = 0; i < 2 * kRoleUnits * 4; i++) (&d[0][0][0])[i] = 0;
#pragma unroll 1
    for (int step = first; step < min(steps, first + kSparseGroups * kSteps); step += kSparseGroups) {
      const int window = step / kWindowSteps * kStepWindows, begin = step % kWindowSteps * 32;
      uint32_t high[2][4], low[2][4], selectors[2] = {};
#pragma unroll
      for (int row = 0; row < 4; row++) {
        const int channel = first_channel + row * 8 + g;
#pragma unroll
        for (int half = 0; half < 2; half++) {
          const int k = 4 * t + 16 * half, own = window + window_of(k);
          const uint2 halves = held.halves[own][channel];
          const bool here = held.origins[own][channel].four == (begin + k) % kPlaces / 4;
          high[row / 2][row % 2 + 2 * half] = here ? halves.x : 0;
          low[row / 2][row % 2 + 2 * half] = here ? halves.y : 0;
        }
        unsigned of_row = 0;
#pragma unroll
        for (int k = 0; k < 16; k += kPlaces < 16 ? kPlaces : 16) {
          const int from = k + t % 2 * 16, own = window + window_of(from);
          const bool here = kPlaces <= 16 || held.origins[own][channel].four / 4 == (begin + from) / 16;
          if (here) of_row |= held.origins[own][channel].selectors << own * (kPlaces / 4) % 4 * 4;
        }
        selectors[row / 2] |= (of_row ^ kZeroSelectors) << row % 2 * 16;
      }
      const int own = window + window_of(lane), place = (begin + lane) % kPlaces;
      const bool real = place < kArea && own < windows;  // others meet zeros in A
      const uint32_t pixel =
          address + (real ? TileStage::offset(place / POOL_W, own * POOL_W + place % POOL_W) : 0);
      // By two units, so that no product needs the result of the one before.
      constexpr int kFirst = kGroupOfUnits * kRoleUnits, kLeft = kUnits - kFirst;
      constexpr int kOwn = kLeft < kRoleUnits ? kLeft : kRoleUnits;
#pragma unroll
      for (int batch = 0; batch < kOwn; batch += 2) {
        uint32_t unit[2][2][4];  // high, low
#pragma unroll
        for (int i = 0; i < 2 && batch + i < kOwn; i++)
#pragma unroll
          for (int part = 0; part < 2; part++)
            load_matrices_transposed(unit[i][part], pixel + part * TileStage::kPartBytes +
                                                        TileStage::offset(kFirst + batch + i));
#pragma unroll
        for (int part = 0; part < 3; part++)  // small ones first
#pragma unroll
          for (int i = 0; i < 2 && batch + i < kOwn; i++)
#pragma unroll
            for (int m = 0; m < 2; m++)
              multiply_add_sparse(d[m][batch + i], part ? high[m] : low[m], unit[i][part == 1], selectors[m]);
      }
    }
#pragma unroll
    for (int m = 0; m < 2; m++)
#pragma unroll
      for (int half = 0; half < 2; half++) {
        const float unscale = held.unscale[first_channel + m * 16 + half * 8 + g] * factor;
#pragma unroll
        for (int i = 0; i < kRoleUnits; i++)
#pragma unroll
          for (int j = 0; j < 2; j++) total[m][i][half * 2 + j] += d[m][i][half * 2 + j] * unscale;
      }
  }
}

// values[i] summed over the warp, in the lanes from 32 i / kCount on.
template <int kCount, int kOffset = 16> __device__ __forceinline__ float transposed_sum(float* values) {
  const bool upper = threadIdx.x & kOffset;
  constexpr int kHalf = kCount / 2;
#pragma unroll
  for (int i = 0; i < kHalf; i++) {
    const float given = upper ? values[i] : values[i + kHalf], kept = upper ? values[i + kHalf] : values[i];
    values[i] = kept + __shfl_xor_sync(~0u, given, kOffset);
  }
  if constexpr (kHalf == 0) values[0] += __shfl_xor_sync(~0u, values[0], kOffset);
  if constexpr (kOffset > 1) return transposed_sum<kHalf ? kHalf : 1, kOffset / 2>(values);
  else return values[0];
}

// What a lane needs of its windows, of the warp's channels.
struct Windows {
  float dy[kRounds][kWarpChannels], extreme[kRounds][kWarpChannels];
  int place[kRounds][kWarpChannels];

  // Of `windows` windows, the first of them element `first`; `count` channels, plane_size elements apart.
  __device__ __forceinline__ void load(const Saved& saved, int64_t first, int64_t plane_size, int count,
                                       int windows) {
#pragma unroll
    for (int round = 0; round < kRounds; round++) {
      const int window = round * 32 + threadIdx.x % 32;
      int64_t at = first + (window < windows ? window : 0);
#pragma unroll
      for (int i = 0; i < kWarpChannels; i++) {
        const bool there = CHANNELS_OUT % kBlockChannels == 0 || i < count;
        const float of_window = saved.dy[at];
        dy[round][i] = window < windows && there ? of_window : 0.f;
        extreme[round][i] = saved.extreme[at], place[round][i] = saved.index[at];
        if (CHANNELS_OUT % kBlockChannels == 0 || i + 1 < count) at += plane_size;
      }
    }
  }

  // Puts the gradients into `held`, from channel `own` on, the first of `channels`; lanes 4 i and 4 i + 2 get
  // the i-th channel's sums of dy, where it passes, and of dy·(v - mean).
  __device__ __forceinline__ float select(Held& held, const Saved& saved, const Channel* channels,
                                          int own) const {
    const int lane = threadIdx.x % 32;
    float sums[2 * kWarpChannels] = {};
#pragma unroll
    for (int i = 0; i < kWarpChannels; i++) {
      const Channel channel = channels[i];
      float gradient[kRounds], magnitude = 0;
#pragma unroll
      for (int round = 0; round < kRounds; round++) {
        const float v = extreme[round][i];
        const float passed = passed_gradient(saved, channel, dy[round][i], channel.normalise(v));
        sums[2 * i] += passed, sums[2 * i + 1] += passed * channel.normalise.centred(v);
        gradient[round] = passed * channel.scale * channel.normalise.slope;
        magnitude = fmaxf(magnitude, fabsf(gradient[round]));
      }
      const float factor = fitting_factor(__reduce_max_sync(~0u, __float_as_uint(magnitude)));
      if (lane == 0) held.unscale[own + i] = inverse_factor(factor);
#pragma unroll
      for (int round = 0; round < kRounds; round++) {
        const float scaled = gradient[round] * factor;
        const uint32_t high = pack(scaled, 0), low = pack(residual(scaled, 0, high).x, 0);
        const Origin origin = held.origin_of_place[place[round][i]];
        held.halves[round * 32 + lane][own + i] = make_uint2(high << origin.bits, low << origin.bits);
        held.origins[round * 32 + lane][own + i] = origin;
      }
    }
    return transposed_sum<2 * kWarpChannels>(sums);
  }
};

// ---------------------------------------------------------------------------------------------------- strips

// What is merged in double, one after the other.
struct Merged {
  double *constant, *linear, *gradients, *weight;
  Merged(double* from, int64_t N, int64_t G)
      : constant(from),                           // (N, CHANNELS_OUT)
        linear(constant + N * CHANNELS_OUT),      // (N, G)
        gradients(linear + N * G),                // (4, N, CHANNELS_OUT) of conv_bias, norm, scale
        weight(gradients + 4 * N * CHANNELS_OUT)  // (N, CHANNELS_OUT, kDepth)
  {}
};
// And what is merged: of each strip, in float32.
struct Partial {
  float *shift, *gram, *frame, *sparse, *sums;
  Partial(float* from, int64_t N, int64_t strips)
      : shift(from),                                  // (N, CHANNELS_IN)
        gram(shift + (N * CHANNELS_IN + 3) / 4 * 4),  // (N, strips, kGramSize)
        frame(gram + N * strips * kGramSize),         // (N, kFrameRows, kGramSize)
        sparse(frame + N * kFrameRows * kGramSize),   // (N, strips, CHANNELS_OUT, kDepth)
        sums(sparse + N * strips * CHANNELS_OUT * kDepth) {}  // (N, strips, CHANNELS_OUT, 2)
};

// Blocks of a strip share the channels out, the units and the roles.
constexpr int kStripBlocks = kChannelBlocks * kSparsePasses;
constexpr int kBlockRoles = (kRoles + kStripBlocks - 1) / kStripBlocks;
constexpr int kRoleWarps = kBlockRoles > 4 ? 8 : kBlockRoles > 2 ? 4 : kBlockRoles;  // with different roles
constexpr int kGramGroups = kWarps / kRoleWarps;
struct StripLayout {  // of shared memory: where each part begins
  static constexpr int kHeld = TileStage::kBytes, kGram = kHeld + (sizeof(Held) + 15) / 16 * 16;
  static constexpr int kRoleBytes = kRoleTiles * 512;  // of one group
  static constexpr int kOnes = kGram + kGramGroups * kBlockRoles * kRoleBytes, kBytes = kOnes + 16;
  static_assert(2 * kBlockUnits * kRoleUnits * 1024 <= kBytes, "room to merge groups");
};

// Grid: strips, samples, kStripBlocks, the first fastest.
__global__ void __launch_bounds__(kThreads, 2)
strip_kernel(Partial partial, const value_t* x, Saved saved, GroupShape shape, Geometry geometry) {
#if __CUDA_ARCH__ >= 800
  extern __shared__ __align__(128) unsigned char shared[];
  __shared__ int largest;
  __shared__ float shift[kPlanes * 8];
  __shared__ Channel channels[kBlockChannels];
  __shared__ float sums[kThreads];
  TileStage stage(shared, &largest);
  Held& held = *reinterpret_cast<Held*>(shared + StripLayout::kHeld);
  float4* const grams = reinterpret_cast<float4*>(shared + StripLayout::kGram);
  const int strip = blockIdx.x % geometry.strips, job = blockIdx.x / geometry.strips;
  const int n = job % geometry.N, own_block = job / geometry.N, slot = n * geometry.strips + strip;
  const int first_channel = own_block % kChannelBlocks * kBlockChannels, pass = own_block / kChannelBlocks;
  const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0), lane = threadIdx.x % 32;
  const int half = warp % 2, group = warp / 2 / kBlockUnits;
  // Warps that share a scheduler have different units, not equally many.
  const int of_block = (warp / 2 + group) % kBlockUnits, units = pass * kBlockUnits + of_block;
  const value_t* sample = x + int64_t(n) * CHANNELS_IN * geometry.H * geometry.W;
  const int pooled_width = geometry.pooled_width();
  const int64_t pooled_size = int64_t(geometry.pooled_height()) * pooled_width;
  const int own_channels = warp * kWarpChannels, first_own = first_channel + own_channels;
  // Those with most units of the sparse product have the shorter role of the Gram matrix.
  const int rank = kBlockUnits - 1 - of_block + kBlockUnits * (half + 2 * group);
  const int first_role = rank % kRoleWarps, gram_group = rank / kRoleWarps;
  const int row_end = min(geometry.tile_rows(), (strip + 1) * geometry.rows);
  sums[threadIdx.x] = 0;
  bool flat = false;
  if (const int c = threadIdx.x; c < kBlockChannels) {
    channels[c] = {};
    if (first_channel + c < CHANNELS_OUT) channels[c] = channel_of(saved, shape, n, first_channel + c);
    flat = channels[c].flat;
  }
  if (threadIdx.x < 4) reinterpret_cast<uint32_t*>(shared + StripLayout::kOnes)[threadIdx.x] = 0x3c003c00;
  if (threadIdx.x < kArea) held.origin_of_place[threadIdx.x] = origin_of(threadIdx.x);
  find_shift(shift, sample, geometry.H * geometry.W);
  for (int i = threadIdx.x; i < kGramGroups * kBlockRoles * kRoleTiles * 32; i += kThreads)
    grams[i] = make_float4(0, 0, 0, 0);
  const bool any_flat = __syncthreads_or(flat);  // the shift and the channels are there
  if (strip == 0 && own_block == 0 && threadIdx.x < CHANNELS_IN)
    partial.shift[n * CHANNELS_IN + threadIdx.x] = shift[threadIdx.x];

  const uint32_t address = shared_address(shared);
  const uint2 constants = make_uint2(address + StripLayout::kOnes, address + TileStage::kZeros);

  float total[2][kRoleUnits][4] = {};
  for (int row = strip * geometry.rows; row < row_end; row++)
    for (int column = 0, columns; column < geometry.width(); column += columns) {
      const int left = geometry.width() - column, window_column = column / POOL_W;
      columns = left <= kTileColumns ? left : kTileWindows * POOL_W;
      const int windows =
          row < geometry.pooled_height() ? max(0, min(kTileWindows, pooled_width - window_column)) : 0;
      TileStage::Pixels pixels;
      Windows own = {};
      stage.load(pixels, sample, shift, row * POOL_H, column, geometry);
      const int64_t first_window = int64_t(row) * pooled_width + window_column;
      if (windows && first_own < CHANNELS_OUT)
        own.load(saved, (int64_t(n) * CHANNELS_OUT + first_own) * pooled_size + first_window, pooled_size,
                 CHANNELS_OUT - first_own, windows);
      if (any_flat)
#pragma unroll 1
        for (int i = 0; i < kWarpChannels * kRounds; i++) {
          const int c = own_channels + i % kWarpChannels, window = i / kWarpChannels * 32 + lane;
          if (!channels[c].flat || window >= windows) continue;
          const float first =
              first_of_window(saved, sample, first_channel + c, row, window_column + window, geometry);
#pragma unroll
          for (int j = 0; j < kWarpChannels * kRounds; j++)
            if (j == i) own.extreme[j / kWarpChannels][j % kWarpChannels] = first;
        }
      __syncthreads();  // the stage and what is held have been read
      if (windows) sums[threadIdx.x] += own.select(held, saved, channels + own_channels, own_channels);
      const float factor = power_of_two(-stage.store(pixels));
      __syncthreads();  // they are complete
      if (windows)
        with_constant<kUnitGroups>(units, [&](auto constant) {
          multiply_sparse<decltype(constant)::value>(total, address, held, half * 32, windows, group, factor);
        });
      for (int of_role = first_role; of_role < kBlockRoles; of_role += kRoleWarps)
        for (int i = gram_group, q; i < POOL_H && (q = row * POOL_H + i) < geometry.H; i += kGramGroups) {
          const int role = own_block * kBlockRoles + of_role, frame = frame_row(q, geometry);
          float4* total_of_role = grams + (gram_group * kBlockRoles + of_role) * (kRoleTiles * 32) + lane;
          if (frame >= 0) {
            float* const kept = partial.frame + (int64_t(n) * kFrameRows + frame) * kGramSize;
            total_of_role = reinterpret_cast<float4*>(kept) + role * (kRoleTiles * 32) + lane;
          }
          with_constant<kRoles>(role, [&](auto constant) {
            multiply_gram<decltype(constant)::value>(total_of_role, frame < 0 || column > 0,
                                                     address + TileStage::offset(i, 0), constants, columns,
                                                     factor);
          });
        }
    }
  static_assert(kWarpChannels == 8, "a sum for every other lane");
  if (pass == 0 && lane % 2 == 0 && first_own + lane / 4 < CHANNELS_OUT)
    partial.sums[(int64_t(slot) * CHANNELS_OUT + first_own) * 2 + lane / 2] = sums[threadIdx.x];
  __syncthreads();  // all products are complete
  for (int i = threadIdx.x; i < kBlockRoles * kRoleTiles * 32; i += kThreads) {
    const int at = own_block * kBlockRoles * kRoleTiles * 32 + i;
    if (at >= kGramTiles * 32) continue;
    float4 merged = grams[i];
    for (int other = 1; other < kGramGroups; other++) {
      const float4 more = grams[other * (kBlockRoles * kRoleTiles * 32) + i];
      merged.x += more.x, merged.y += more.y, merged.z += more.z, merged.w += more.w;
    }
    reinterpret_cast<float4*>(partial.gram + int64_t(slot) * kGramSize)[at] = merged;
  }
  // Warps with the same role of the sparse product add up what they found, in order, in the first group.
  float* const own_sums =
      reinterpret_cast<float*>(shared) + (half * kBlockUnits + of_block) * (kRoleUnits * 256) + lane;
  for (int other = 1; other < kSparseGroups; other++) {
    __syncthreads();  // what was here has been read
    if (group == other)
#pragma unroll
      for (int i = 0; i < 2 * kRoleUnits * 4; i++) own_sums[i * 32] = (&total[0][0][0])[i];
    __syncthreads();  // it is there
    if (group == 0)
#pragma unroll
      for (int i = 0; i < 2 * kRoleUnits * 4; i++) (&total[0][0][0])[i] += own_sums[i * 32];
  }
  if (group == 0)
#pragma unroll
    for (int m = 0; m < 2; m++)
#pragma unroll
      for (int i = 0; i < kRoleUnits; i++)
#pragma unroll
        for (int j = 0; j < 2; j++) {
          const int c = first_channel + half * 32 + m * 16 + j * 8 + lane / 4, unit = units * kRoleUnits + i;
          if (c >= CHANNELS_OUT || unit >= kUnits) continue;
          float* const to = partial.sparse + (int64_t(slot) * CHANNELS_OUT + c) * kDepth + unit * 8;
          reinterpret_cast<float2*>(to)[lane % 4] = make_float2(total[m][i][2 * j], total[m][i][2 * j + 1]);
        }
#endif
}

// --------------------------------------------------------------------------------------------------- samples

constexpr int kSampleThreads = 512;
// Rows of ΣXXᵀ that are in shared memory at a time, with the filters' values that meet them.
constexpr int sample_bytes(int rows) {
  return rows * (kDepth + CHANNELS_OUT + 4) * 4 + kDepth * 8 + CHANNELS_OUT * 64;
}
constexpr int kSlab = sample_bytes(kDepth) <= 48 << 10 ? kDepth : 24;
constexpr int kOutputs = (CHANNELS_OUT / 4 * (kDepth / 4) + kSampleThreads - 1) / kSampleThreads;
static_assert(CHANNELS_OUT <= kSampleThreads, "a thread per channel");

// act(strip, does it count) of all strips, two side by side, so that their loads are under way together.
template <class Act> __device__ __forceinline__ void for_strips(int strips, const Act& act) {
  for (int first = 0; first < strips; first += 2)
#pragma unroll
    for (int i = 0; i < 2; i++) act(min(first + i, strips - 1), first + i < strips);
}

// act(a, b, value) of all elements (ΣXXᵀ)[a][b] of a sample and, where a is kDepth, of (ΣX)[b], in no order.
template <class Act>
__device__ __forceinline__ void for_gram(Partial partial, int n, Geometry geometry, const Act& act) {
  const int64_t gram = int64_t(n) * geometry.strips, frame = int64_t(n) * kFrameRows;
  const auto four = [](const float* from, int64_t slot, int at) {  // as a lane holds them
    return reinterpret_cast<const float4*>(from + slot * kGramSize)[at];
  };
  for (int at = threadIdx.x; at < kGramSize / 4; at += kSampleThreads) {
    float4 rows[kFrameRows + 1] = {};
#pragma unroll
    for (int i = 0; i < kFrameRows; i++)
      if (i < geometry.H) rows[i] = four(partial.frame, frame + i, at);
    float sums[4] = {};
    for_strips(geometry.strips, [&](int strip, bool real) {
      const float4 more = four(partial.gram, gram + strip, at);
      if (real) sums[0] += more.x, sums[1] += more.y, sums[2] += more.z, sums[3] += more.w;
    });
    const int tile = at / 32, lane = at % 32, column = tile % kColumnUnits;
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const int unit = tile / kColumnUnits * 2 + i / 2, row = unit < kUnits ? unit % kTaps / KERNEL_W : 0;
      if (unit > kUnits) continue;
      for (int b = 0; b < KERNEL_H - row; b++) {  // the upper one's kernel row
        float sum = sums[i];
#pragma unroll
        for (int j = 0; j < kFrameRows; j++) {
          const int q = j < KERNEL_H - 1 ? j : j - (KERNEL_H - 1) + max(geometry.height(), KERNEL_H - 1);
          const float of_row[] = {rows[j].x, rows[j].y, rows[j].z, rows[j].w};
          if (q >= b && q < b + geometry.height()) sum += of_row[i];
        }
        const int of_column = (unit_of_column(column) + b * KERNEL_W) * 8 + lane % 4 * 2 + i % 2;
        const int of_unit = unit < kUnits ? (unit + b * KERNEL_W) * 8 + lane / 4 : kDepth;
        if (unit < kUnits || lane / 4 == 0) act(of_unit, of_column, sum);
        if (unit < kUnits && row > 0) act(of_column, of_unit, sum);
      }
    }
  }
}

// dv = slope·dz·[selected] + constant + linear·(weight·X), X of x less its shift; and all gradients by
// sample. The group's mean is computed anew, because float32 holds little of it that is not shift, where that
// is large. A block per sample.
__global__ void __launch_bounds__(kSampleThreads, 1)
sample_kernel(Merged merged, Partial partial, Saved saved, GroupShape shape, Geometry geometry) {
  __shared__ __align__(16) float gram[kSlab][kDepth];
  __shared__ __align__(16) float filters[kSlab][CHANNELS_OUT + 4];  // fewer bank conflicts
  __shared__ double patches[kDepth];
  __shared__ double sums[2][CHANNELS_OUT];
  __shared__ double mean[CHANNELS_OUT];   // of weight·X
  __shared__ double level[CHANNELS_OUT];  // what the shift and the bias add to that
  __shared__ double slope[CHANNELS_OUT];  // of z·scale, but for rstd
  __shared__ double constant[CHANNELS_OUT];
  __shared__ double linear[CHANNELS_OUT];
  __shared__ double of_bias[CHANNELS_OUT];
  const int n = blockIdx.x, NC = shape.N * CHANNELS_OUT;
  const float* shift = partial.shift + n * CHANNELS_IN;
  const auto weight_at = [&](int c, int k) {
    const bool real = k < kDepth && input_channel(k) < CHANNELS_IN;
    return real ? float(saved.weight[c * (CHANNELS_IN * kTaps) + place_in_filter(k)]) : 0.f;
  };
  const auto load_slab = [&](int first) {
    for_gram(partial, n, geometry, [&](int a, int b, float value) {
      if (a == kDepth && first == 0) patches[b] = value;
      if (a >= first && a < first + kSlab) gram[a - first][b] = value;
    });
#pragma unroll 10
    for (int i = threadIdx.x; i < kSlab * CHANNELS_OUT; i += kSampleThreads)
      filters[i % kSlab][i / kSlab] = weight_at(i / kSlab, first + i % kSlab);
  };
  load_slab(0);
  for (int i = threadIdx.x; i < 2 * CHANNELS_OUT; i += kSampleThreads) {
    double sum = 0;
    for_strips(geometry.strips, [&](int strip, bool real) {
      const float more = partial.sums[(int64_t(n) * geometry.strips + strip) * CHANNELS_OUT * 2 + i];
      if (real) sum += more;
    });
    sums[i % 2][i / 2] = sum;
  }
  double rstd = 0, of_slope = 0, scale = 0, norm_bias = 0, saved_mean = 0;  // of the thread's channel
  const int own = threadIdx.x, first_of_group = own / shape.channels() * shape.channels();
  if (own < CHANNELS_OUT) {
    const int group = n * shape.G + own / shape.channels();
    rstd = saved.group_rstd[group], saved_mean = saved.group_mean[group];
    scale = saved.scale[own], norm_bias = saved.norm_bias[own];
    slope[own] = of_slope = saved.norm_weight[own] * scale;
  }
  __syncthreads();  // patches and sums are there
  for (int i = threadIdx.x; i < CHANNELS_OUT * 8; i += kSampleThreads) {  // eight lanes per channel
    const int c = i / 8;
    double of_patches = 0, of_shift = 0;
#pragma unroll
    for (int k = i % 8; k < kDepth; k += 8) {
      const double w = kSlab == kDepth ? filters[k % kSlab][c] : weight_at(c, k);
      of_patches += w * patches[k];
      if (input_channel(k) < CHANNELS_IN) of_shift += w * shift[input_channel(k)];
    }
    of_patches = lanes_sum<8>(of_patches), of_shift = lanes_sum<8>(of_shift);
    if (i % 8 == 0) mean[c] = of_patches / shape.S, level[c] = of_shift + saved.conv_bias[c];
  }
  __syncthreads();  // mean and level are there
  if (own < CHANNELS_OUT) {
    double group_mean = 0, gradient = 0, product = 0;
    for (int c = first_of_group; c < first_of_group + shape.channels(); c++) group_mean += mean[c] + level[c];
    group_mean /= shape.channels();
    const double moved = group_mean - saved_mean, count = double(shape.channels()) * shape.S;
    for (int c = first_of_group; c < first_of_group + shape.channels(); c++)
      gradient += slope[c] * sums[0][c], product += slope[c] * (sums[1][c] - moved * sums[0][c]);
    const double passed = sums[0][own], of_v = sums[1][own] - moved * passed;
    const double of_linear = -(rstd * product) / count * rstd * rstd;
    const double of_constant = -rstd * gradient / count + of_linear * (level[own] - group_mean);
    const int at = n * CHANNELS_OUT + own;
    merged.linear[n * shape.G + own / shape.channels()] = linear[own] = of_linear;
    merged.constant[at] = constant[own] = of_constant;
    merged.gradients[at] = of_bias[own] =
        rstd * of_slope * passed + double(shape.S) * (of_constant + of_linear * mean[own]);
    merged.gradients[NC + at] = rstd * scale * of_v;
    merged.gradients[2 * NC + at] = scale * passed;
    merged.gradients[3 * NC + at] = rstd * saved.norm_weight[own] * of_v + norm_bias * passed;
  }
  // weight·(ΣXXᵀ), by four channels out and four places in a patch.
  float d[kOutputs][4][4] = {};
  const auto for_outputs = [&](auto act) {
#pragma unroll
    for (int i = 0; i < kOutputs; i++) {
      const int output = i * kSampleThreads + threadIdx.x;
      const int c = output / (kDepth / 4) * 4, k = output % (kDepth / 4) * 4;
      if (c < CHANNELS_OUT) act(d[i], c, k);
    }
  };
  for (int slab = 0; slab < kDepth; slab += kSlab) {
    if (slab) {
      __syncthreads();  // the slab before has been read
      load_slab(slab);
    }
    __syncthreads();  // it is there; first, the coefficients are, too
    for_outputs([&](float(&product)[4][4], int c, int k) {
#pragma unroll 8
      for (int i = 0; i < kSlab; i++) {
        const float4 w = *reinterpret_cast<const float4*>(&filters[i][c]);
        const float4 with = *reinterpret_cast<const float4*>(&gram[i][k]);
        const float of_channel[] = {w.x, w.y, w.z, w.w}, of_place[] = {with.x, with.y, with.z, with.w};
#pragma unroll
        for (int j = 0; j < 4; j++)
#pragma unroll
          for (int l = 0; l < 4; l++) product[j][l] = fmaf(of_channel[j], of_place[l], product[j][l]);
      }
    });
  }
  for_outputs([&](float(&product)[4][4], int first, int k) {
    double sparse[4][4] = {};
    for_strips(geometry.strips, [&](int strip, bool real) {
      const float* from = partial.sparse + (int64_t(n) * geometry.strips + strip) * (CHANNELS_OUT * kDepth);
#pragma unroll
      for (int j = 0; j < 4; j++) {
        const float4 four = *reinterpret_cast<const float4*>(from + (first + j) * kDepth + k);
        if (!real) continue;
        sparse[j][0] += four.x, sparse[j][1] += four.y, sparse[j][2] += four.z, sparse[j][3] += four.w;
      }
    });
#pragma unroll
    for (int j = 0; j < 4; j++)
#pragma unroll
      for (int l = 0; l < 4; l++) {
        const int c = first + j;
        double value = sparse[j][l] + constant[c] * patches[k + l];
        if (linear[c] != 0) value += linear[c] * product[j][l];  // of zero, also where the squares overflow
        if (input_channel(k + l) < CHANNELS_IN) value += of_bias[c] * shift[input_channel(k + l)];
        merged.weight[(int64_t(n) * CHANNELS_OUT + c) * kDepth + k + l] = value;
      }
  });
}

// d_weight like weight; the parameters' gradients (CHANNELS_OUT), the last of them only if `scales`. A block
// has 32 of all these numbers.
__global__ void __launch_bounds__(kThreads)
total_kernel(value_t* d_weight, float* d_conv_bias, float* d_norm_weight, float* d_norm_bias, float* d_scale,
             Merged merged, bool scales, int N) {
  __shared__ double parts[kWarps][32];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, own = blockIdx.x * 32 + lane;
  constexpr int kWeights = CHANNELS_OUT * kDepth;
  const int parameter = (own - kWeights) / CHANNELS_OUT, c = (own - kWeights) % CHANNELS_OUT;
  const bool of_weight = own < kWeights;
  const double* from =
      of_weight ? merged.weight + own : merged.gradients + int64_t(parameter) * N * CHANNELS_OUT + c;
  const int step = of_weight ? kWeights : CHANNELS_OUT;
  double sum = 0;
  if (own < kWeights + 4 * CHANNELS_OUT)
#pragma unroll 8
    for (int n = warp; n < N; n += kWarps) sum += from[int64_t(n) * step];
  parts[warp][lane] = sum;
  __syncthreads();  // every warp's sums are there
  if (warp || own >= kWeights + (scales ? 4 : 3) * CHANNELS_OUT) return;
  for (int i = 1; i < kWarps; i++) sum += parts[i][lane];
  float* const totals[] = {d_conv_bias, d_norm_weight, d_norm_bias, d_scale};
  const int k = own % kDepth;
  if (!of_weight) totals[parameter][c] = float(sum);
  else if (input_channel(k) < CHANNELS_IN)
    d_weight[own / kDepth * (CHANNELS_IN * kTaps) + place_in_filter(k)] = value_t(float(sum));
}

}  // namespace
