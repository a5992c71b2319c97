// dx of a small 3-D convolution, from dv as conv3d_weight_gradient.cuh leaves it in scratch:
//   dx[i, p] = sum over channels c and taps of weight[c, i, tap]·dv[c, p - tap]
//
// A block computes tiles of dx, each some rows and columns of a plane. Of each plane of dv that reaches it, it brings what
// it needs to shared memory; a product's depth is 16 channels out, its columns are positions of dv, its rows
// the input channels times the taps along a row: D[(i, column's tap), position] is summed over the other taps,
// and at the end over the taps along the row, each shifted by its own.
//
// Accuracy: dv and the weights are two float16 each, scaled by powers of two, dv by channel of the sample,
// which the weights make up for, and those by input channel. Sums are flushed after each plane.
#pragma once
#include "conv3d_weight_gradient.cuh"

constexpr int kInputBlock = 256, kInputWarps = kInputBlock / 32;
constexpr int kInputBlocks = 2;  // that a multiprocessor has registers for
constexpr int kInputRows = kIn * kWidth, kInputTiles = (kInputRows + 15) / 16;  // of a product, and of 16 of them
constexpr int kInputTurns = kInputTiles == 1 ? 2 : 1;                            // that a warp computes
constexpr int kInputPositions = kInputWarps * kInputTurns * kTurn;                // of a block, at most
#ifndef INPUT_POSITIONS
#define INPUT_POSITIONS kInputPositions
#endif
static_assert(INPUT_POSITIONS == kInputPositions, "what was planned with");

// How blocks share out dx: `rows` and `columns` each. A row of dv has `pitch` positions in shared memory, from
// the first that reaches the block's columns on.
struct InputTiling {
  int rows, columns, row_blocks, column_blocks, pitch;
  InputTiling(const Convolution& c, int64_t rows, int64_t columns)
      : rows(int(rows)), columns(int(columns)), row_blocks((c.H + this->rows - 1) / this->rows),
        column_blocks((c.W + this->columns - 1) / this->columns),
        pitch((min(this->columns + kWidth - 1, c.OW) + 7) / 8 * 8) {}
  HOST_DEVICE int positions() const { return rows * pitch; }
  HOST_DEVICE int fragments_at() const {  // bytes: behind dv's words, and the sums that take their place
    const int words = ((rows + kHeight - 1) * pitch + kTurn) * 64, sums = kInputRows * positions() * 4;
    return max(words, sums);
  }
  int shared() const {  // one that has no room fails to launch
    const int fragments = kHeight * kInputTiles * 2 * 32 * int(sizeof(uint4));
    return positions() <= kInputPositions ? (fragments_at() + 15) / 16 * 16 + fragments : INT_MAX;
  }
};

struct InputStorage {
  float dv_share[kOut], dv_scale[kOut];  // the smallest of all scales over a channel's, and that; 0 where dv is
  float largest[kInputWarps][kIn];
  float weight_scale[kIn];
};

// The largest of all threads' values, which are not negative. Starts and ends with a barrier.
template <int kCount>
__device__ __forceinline__ void input_block_most(float (&most)[kCount], float (*largest)[kIn]) {
  __syncthreads();
#pragma unroll
  for (int k = 0; k < kCount; k++) {
    most[k] = __uint_as_float(__reduce_max_sync(~0u, __float_as_uint(most[k])));
    if (threadIdx.x % 32 == 0) largest[threadIdx.x / 32][k] = most[k];
  }
  __syncthreads();
#pragma unroll
  for (int k = 0; k < kCount; k++)
    for (int warp = 0; warp < kInputWarps; warp++) most[k] = fmaxf(most[k], largest[warp][k]);
}

// The scales of sample n, from `most` (jobs, 16), the largest |dv|. Returns dv's smallest.
__device__ inline float find_input_scales(InputStorage& storage, const float* most, const Convolution& c,
                                          int64_t n) {
  float all[1] = {0}, weights[kIn] = {};
  for (int channel = threadIdx.x; channel < kOut; channel += kInputBlock) {
    float own = 0;
    for (int slot = 0; slot < c.slots(); slot++)
      own = fmaxf(own, most[((n * c.slots() + slot) * kJobsPerTile + channel / 16) * 16 + channel % 16]);
    storage.dv_scale[channel] = own > 0 ? power_of_two(fitting_exponent(own)) : 0;
    all[0] = fmaxf(all[0], own);
  }
  input_block_most(all, storage.largest);
  const float smallest = power_of_two(fitting_exponent(all[0]));
  for (int channel = threadIdx.x; channel < kOut; channel += kInputBlock)
    storage.dv_share[channel] = storage.dv_scale[channel] > 0 ? smallest * (1 / storage.dv_scale[channel]) : 0;
  __syncthreads();
  for (int k = threadIdx.x; k < kOut * kIn * kTaps; k += kInputBlock) {
    const float own = float(c.weight[k]) * storage.dv_share[k / (kIn * kTaps)];
#pragma unroll
    for (int i = 0; i < kIn; i++)
      if (k / kTaps % kIn == i) consider(weights[i], own);
  }
  input_block_most(weights, storage.largest);
  if (threadIdx.x < kIn)
#pragma unroll
    for (int i = 0; i < kIn; i++)
      if (threadIdx.x == i) storage.weight_scale[i] = power_of_two(fitting_exponent(weights[i]));
  return smallest;
}

// The weights of a plane of taps and 16 channels out as fragments A [row of taps][tile][high, low][lane].
// Depth 2k, 2k + 1 of a product are channels k, k + 8.
__device__ inline void put_weights(uint4* fragments, const InputStorage& storage, const Convolution& c,
                                   int first_channel, int tap_plane) {
#pragma unroll 1
  for (int k = threadIdx.x; k < kHeight * kInputTiles * 32; k += kInputBlock) {
    const int lane = k % 32, tile = k / 32 % kInputTiles, tap_row = k / 32 / kInputTiles;
    const auto weight = [&](int row, int channel) {
      const int i = row / kWidth, tap = (tap_plane * kHeight + tap_row) * kWidth + row % kWidth;
      if (row >= kInputRows) return 0.f;
      const float own = float(c.weight[((first_channel + channel) * kIn + i) * kTaps + tap]);
      return own * storage.dv_share[first_channel + channel] * storage.weight_scale[i];
    };
    Halves own[4];
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const int row = tile * 16 + lane / 4 + i % 2 * 8, channel = lane % 4 + i / 2 * 4;
      own[i] = split(weight(row, channel), weight(row, channel + 8));
    }
    uint4* const to = fragments + (k / 32 * 2) * 32 + lane;
    to[0] = make_uint4(own[0].high, own[1].high, own[2].high, own[3].high);
    to[32] = make_uint4(own[0].low, own[1].low, own[2].low, own[3].low);
  }
}

// Of a plane of dv and 16 channels, what a block needs, into `words` [position][16]: of channels k, k + 8 (k <
// 8) word k % 4 · 4 + k / 4 has their highs and word k % 4 · 4 + 2 + k / 4 their lows, so that a lane finds its
// fragments B side by side. `dv`: of the sample's first job.
__device__ inline void put_dv(uint32_t* words, const float4* dv, const InputStorage& storage,
                              const Convolution& c, const InputTiling& tiling, int first_channel, int plane,
                              int first_row, int first_column) {
  const DvLayout layout(c);
  const int lane = threadIdx.x % 32, g = lane % 8, chunk = plane / c.depth;
  const float scale[2] = {storage.dv_scale[first_channel + g], storage.dv_scale[first_channel + g + 8]};
#pragma unroll 1
  for (int i = threadIdx.x / 32; i < tiling.rows + kHeight - 1; i += kInputWarps) {
    const int row = first_row + i, slab = row / c.rows, slot = chunk * c.slabs + slab;
    const bool inside = row >= 0 && row < c.OH;
    const int q_of_row = (row - slab * c.rows) * c.OW;
    const int64_t job = slot * kJobsPerTile + first_channel / 16;
    const float4* const from = dv + job * layout.of_job(c) + layout.turn(plane - chunk * c.depth, 0);
#pragma unroll 4
    for (int k = lane / 8; k < tiling.pitch; k += 4) {
      Halves own{0, 0};
      if (inside && first_column + k < c.OW) {
        const int q = q_of_row + first_column + k;  // of the job's plane
        const float* const at =
            reinterpret_cast<const float*>(from + q / 8 * 32 + g * 4 + q % 8 / 2) + q % 2;
        own = split(at[0] * scale[0], at[2] * scale[1]);
      }
      uint32_t* const to = words + (i * tiling.pitch + k) * 16 + g % 4 * 4 + g / 4;
      to[0] = own.high, to[2] = own.low;
    }
  }
}

// Where a tile of dx lies, and where dv begins that reaches it.
struct InputTile {
  int64_t sample;  // of the launch's
  int plane, first_row, rows, first_column, columns, dv_column;
  __device__ InputTile(const Convolution& c, const InputTiling& tiling, unsigned tile) {
    first_column = int(tile % tiling.column_blocks) * tiling.columns, tile /= tiling.column_blocks;
    first_row = int(tile % tiling.row_blocks) * tiling.rows, tile /= tiling.row_blocks;
    plane = int(tile % c.D), sample = tile / c.D;
    rows = min(tiling.rows, c.H - first_row), columns = min(tiling.columns, c.W - first_column);
    dv_column = max(first_column - kWidth + 1, 0);
  }
};

// A tile's sums, by row of a product, into shared memory, where dv's words were.
__device__ inline void put_input_sums(float* sums, InputStorage& storage, const float4* dv, uint4* shared,
                                      const Convolution& c, const InputTiling& tiling, const InputTile& tile) {
  const int tid = threadIdx.x, lane = tid % 32, warp = tid / 32, g = lane / 4, t = lane % 4;
  uint4* const fragments = shared + (tiling.fragments_at() + 15) / 16;
  float total[kInputTurns][kInputTiles][kFragments][4] = {};
#pragma unroll 1
  for (int first_channel = 0; first_channel < kOut; first_channel += 16)
#pragma unroll 1
    for (int tap_plane = 0; tap_plane < kDepth; tap_plane++) {
      const int plane = tile.plane - tap_plane;
      if (plane < 0 || plane >= c.OD) continue;
      __syncthreads();  // the scales are there; what was there before has been used
      put_weights(fragments, storage, c, first_channel, tap_plane);
      put_dv(reinterpret_cast<uint32_t*>(shared), dv, storage, c, tiling, first_channel, plane,
             tile.first_row - kHeight + 1, tile.dv_column);
      __syncthreads();
#pragma unroll
      for (int k = 0; k < kInputTurns; k++) {
        const int first = (warp + k * kInputWarps) * kTurn;
        if (first >= tiling.positions()) continue;
#pragma unroll
        for (int rows = 0; rows < kInputTiles; rows++) {
          float high[kFragments][4] = {}, low[kFragments][4] = {};
#pragma unroll 1
          for (int tap_row = 0; tap_row < kHeight; tap_row++) {
            const uint4* const own = fragments + (tap_row * kInputTiles + rows) * 64 + lane;
            const uint4 both[2] = {own[0], own[32]};
            const uint32_t highs[4] = {both[0].x, both[0].y, both[0].z, both[0].w};
            const uint32_t lows[4] = {both[1].x, both[1].y, both[1].z, both[1].w};
            const int at = first + (kHeight - 1 - tap_row) * tiling.pitch + g;
#pragma unroll
            for (int j = 0; j < kFragments; j++) {
              const uint4 b = shared[(at + 8 * j) * 4 + t];
              multiply_add<half_t>(low[j], lows, b.x, b.y);
              multiply_add<half_t>(high[j], highs, b.x, b.y);
              multiply_add<half_t>(low[j], highs, b.z, b.w);
            }
          }
#pragma unroll
          for (int j = 0; j < kFragments; j++)
#pragma unroll
            for (int i = 0; i < 4; i++) total[k][rows][j][i] += low[j][i] + high[j][i];
        }
      }
    }
  __syncthreads();
#pragma unroll
  for (int k = 0; k < kInputTurns; k++)
#pragma unroll
    for (int rows = 0; rows < kInputTiles; rows++)
#pragma unroll
      for (int j = 0; j < kFragments; j++)
#pragma unroll
        for (int i = 0; i < 4; i++) {
          const int row = rows * 16 + g + i / 2 * 8;
          const int at = (warp + k * kInputWarps) * kTurn + 8 * j + 2 * t + i % 2;
          if (row < kInputRows && at < tiling.positions())
            sums[row * tiling.positions() + at] = total[k][rows][j][i];
        }
  __syncthreads();
}

// The `tiles` of dx (samples · D · row_blocks · column_blocks, from sample `first_sample` on, whose dv is dv's
// first) are shared out among the blocks, neighbours to each, since they share dv. A sample that is not active
// has a dx of zero.
template <class Problem>
__global__ void __launch_bounds__(kInputBlock, kInputBlocks)
input_gradient_kernel(value_t* dx, const float4* dv, const float* most, Problem problem, int64_t first_sample,
                      unsigned tiles, InputTiling tiling, const Convolution c) {
  extern __shared__ uint4 shared[];
  __shared__ InputStorage storage;
  float* const sums = reinterpret_cast<float*>(shared);
  const unsigned share = (tiles + gridDim.x - 1) / gridDim.x;
  int64_t scaled = -1;  // the sample whose scales are known
  float smallest = 1;   // of them
#pragma unroll 1
  for (unsigned own = blockIdx.x * share; own < min((blockIdx.x + 1) * share, tiles); own++) {
    const InputTile tile(c, tiling, own);
    const int64_t n = first_sample + tile.sample;
    const bool active = problem.active(n);
    if (active) {
      if (n != scaled) smallest = find_input_scales(storage, most, c, n), scaled = n;
      const int64_t first_job = tile.sample * c.slots() * kJobsPerTile;
      put_input_sums(sums, storage, dv + first_job * DvLayout(c).of_job(c), shared, c, tiling, tile);
    }
    const int dv_columns = min(tiling.pitch, c.OW - tile.dv_column);
#pragma unroll 1
    for (int k = threadIdx.x / 32; k < kIn * tile.rows; k += kInputWarps) {
      const int i = k / tile.rows, row = k % tile.rows;
      const float first_unit = 1 / smallest, second_unit = active ? 1 / storage.weight_scale[i] : 0.f;
      value_t* const to = dx + (n * kIn + i) * c.channel +
                          (int64_t(tile.plane) * c.H + tile.first_row + row) * c.W + tile.first_column;
      for (int column = threadIdx.x % 32; column < tile.columns; column += 32) {
        const float* const from = sums + i * kWidth * tiling.positions() + row * tiling.pitch;
        float sum = 0;
#pragma unroll
        for (int tap = 0; tap < kWidth; tap++) {
          const int at = tile.first_column + column - tap - tile.dv_column;
          if (active && at >= 0 && at < dv_columns) sum += from[tap * tiling.positions() + at];
        }
        to[column] = value_t(sum * first_unit * second_unit);
      }
    }
  }
}
