// An epilogue of conv/narrow2d.cuh for max pooling behind a normalisation: takes a row of v after the other
// into statistics and windows, and writes each row of windows when it is complete.
#pragma once
#include "conv/narrow2d_tile.cuh"

namespace {

constexpr int kBatch = 8;  // channels whose windows are read together

// A warp's, of 16 channels: a lane has channels g and g + 8, and of each 8 columns 2t and 2t + 1, as the sums
// of a product lie. Its windows pass through `staging`, since a window's columns are several lanes'.
struct WindowsEpilogue {
  const SharedStorage& storage;
  float* const staging;           // [16][kStagingPitch]: kept values
  uint8_t* const staged_origins;  // and where each comes from
  float* const extreme;
  uint8_t* const index;
  const Geometry& geometry;
  const int columns, pooled_columns, first_channel, first_own;  // of the tile; of the block, of the warp
  float* out;                                                   // the next row of windows
  int window_row;        // the next of the rows of a window
  uint32_t left, right;  // places of its first two columns; both are kept, so that to choose is one instruction
  float shift[2], sum[2], square[2];
  float best[2][kTiles][kKept];
  // Where they come from: the place in the window of the row and of the pair's column, as if the pair were the
  // first; or where both columns are kept, the row alone, in four bits.
  uint32_t origins[kSaving ? 2 * kTiles * kKept / kPacked : 1];

  // The first row of windows begins at first_out.
  __device__ __forceinline__ void start(float* first_out) {
    out = first_out, window_row = 0, left = 0, right = 1;
#pragma unroll
    for (int half = 0; half < 2; half++) shift[half] = sum[half] = square[half] = 0;
#pragma unroll
    for (int i = 0; i < 2 * kTiles * kKept; i++) (&best[0][0][0])[i] = -INFINITY;
#pragma unroll
    for (uint32_t& origin : origins) origin = 0;
  }
  // Any value near the mean: statistics are shifted by it.
  __device__ __forceinline__ void take_shift(const float (&d)[kTiles][4]) {
#pragma unroll
    for (int half = 0; half < 2; half++)
      shift[half] = __shfl_sync(~0u, d[0][half * 2], threadIdx.x % 32 & ~3);
  }
  __device__ __forceinline__ bool complete() const { return window_row == POOL_H; }  // a row of windows

  // A row's sums.
  __device__ __forceinline__ void take(float (&d)[kTiles][4]) {
#pragma unroll
    for (int j = 0; j < kTiles; j++)
#pragma unroll
      for (int i = 0; i < 4; i++) d[j][i] -= shift[i / 2];
    clear_other_columns(d);
#pragma unroll
    for (int j = 0; j < kTiles; j++)
#pragma unroll
      for (int i = 0; i < 4; i++) sum[i / 2] += d[j][i], square[i / 2] += d[j][i] * d[j][i];
    take_maxima(d);
    if (window_row == POOL_H - 1) stage_maxima();
    window_row++, left += POOL_W, right += POOL_W;
  }

  // Writes the row of windows that is complete.
  __device__ __forceinline__ void flush() {
    const int lane = threadIdx.x % 32;
    window_row = 0, left = 0, right = 1;
    __syncwarp();  // these windows have been written
#pragma unroll
    for (int p = 0; p < kTile / POOL_W; p += 32) {
      float* to = out + p + lane;
#pragma unroll
      for (int first = 0; first < 16; first += kBatch) {
        float maximum[kBatch];
        int place[kBatch];
#pragma unroll
        for (int r = 0; r < kBatch; r++) {
          const int window = p + lane < kTile / POOL_W ? p + lane : 0;
          read_window(maximum[r], place[r], (first + r) * kStagingPitch + window * kWidth);
        }
        write_windows(to, maximum, place, p + lane < pooled_columns, first);
      }
    }
    out += geometry.pooled_width();
  }

  // The moments of the strip's `rows` rows to `partial` (16, slots, 3), where it is one of v's.
  __device__ __forceinline__ void write_moments(accumulate_t* partial, int slots, int rows,
                                                bool wanted) const {
    const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
#pragma unroll
    for (int half = 0; half < 2; half++) {
      int mine = 0;
      for (int j = 0; j < 16; j++) mine += (j * 8 + t * 2 < columns) + (j * 8 + t * 2 + 1 < columns);
      auto moments = Moments<float>::from_shifted(float(mine) * float(rows), shift[half], sum[half],
                                                  square[half]);
      for (int offset = 1; offset < 4; offset *= 2)
        moments = moments.merge({__shfl_xor_sync(~0u, moments.count, offset),
                                 __shfl_xor_sync(~0u, moments.mean, offset),
                                 __shfl_xor_sync(~0u, moments.m2, offset)});
      const int own = half * 8 + g;
      if (t > 0 || first_channel + first_own + own >= CHANNELS_OUT || !wanted) continue;
      const float2 power = storage.unscale[first_own + own];
      accumulate_t* const to = partial + int64_t(own) * slots * 3;
      to[0] = moments.count, to[1] = moments.mean * power.x * power.y,
      to[2] = moments.m2 * power.x * power.y * power.x * power.y;
    }
  }

 private:
  // Columns that are not this tile's count as their shift.
  __device__ __forceinline__ void clear_other_columns(float (&d)[kTiles][4]) const {
    const int t = threadIdx.x % 4;
    if (columns <= kTile - 8) {
#pragma unroll
      for (int j = 0; j < kTiles; j++)
#pragma unroll
        for (int i = 0; i < 4; i++)
          if (j * 8 + t * 2 + i % 2 >= columns) d[j][i] = 0;
    } else {
#pragma unroll
      for (int i = 0; i < 4; i++)
        if (kTile - 8 + t * 2 + i % 2 >= columns) d[kTiles - 1][i] = 0;
    }
  }
  __device__ __forceinline__ void take_maxima(const float (&d)[kTiles][4]) {
#pragma unroll
    for (int half = 0; half < 2; half++)
#pragma unroll
      for (int j = 0; j < kTiles; j++)
#pragma unroll
        for (int k = 0; k < kKept; k++) {
          const float value = kKept == 1 ? fmaxf(d[j][half * 2], d[j][half * 2 + 1]) : d[j][half * 2 + k];
          if (kSaving) {
            uint32_t& origin = origins[((half * kTiles + j) * kKept + k) / kPacked];
            const uint32_t own = 15u << (k + j * kKept) % kPacked * 4;
            const uint32_t changed = kKept == 1 ? (d[j][half * 2 + 1] > d[j][half * 2] ? right : left)
                                                : (origin & ~own) | (window_row * 0x11111111u & own);
            origin = value > best[half][j][k] ? changed : origin;
          }
          best[half][j][k] = fmaxf(best[half][j][k], value);
        }
  }
  // The kept values of the row of windows to `staging`; the next one's start anew.
  __device__ __forceinline__ void stage_maxima() {
    const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
    __syncwarp();  // the last windows have been read
#pragma unroll
    for (int half = 0; half < 2; half++)
#pragma unroll
      for (int j = 0; j < kTiles; j++) {
        const int first = (half * 8 + g) * kStagingPitch + (j * 4 + t) * kKept;
        float* const to = staging + first;
        if (kKept == 1) to[0] = best[half][j][0] + shift[half];
        else
          *reinterpret_cast<float2*>(to) =
              make_float2(best[half][j][0] + shift[half], best[half][j][kKept - 1] + shift[half]);
#pragma unroll
        for (int k = 0; k < kKept; k++) {
          if (kSaving) {
            const uint32_t origin = origins[((half * kTiles + j) * kKept + k) / kPacked];
            staged_origins[first + k] =
                uint8_t(kKept == 1 ? origin : origin >> (k + j * kKept) % kPacked * 4 & 15);
          }
          best[half][j][k] = -INFINITY;
        }
      }
  }
  // The maximum of a window whose kept values begin with `first`, and the first place that has it.
  __device__ __forceinline__ void read_window(float& maximum, int& place, int first) const {
    const float* const from = staging + first;
    if (kWidth == 2) {
      const float2 two = *reinterpret_cast<const float2*>(from);
      maximum = fmaxf(two.x, two.y);
    } else {
      maximum = from[0];
#pragma unroll
      for (int i = 1; i < kWidth; i++) maximum = fmaxf(maximum, from[i]);
    }
    if (!kSaving) return;
    place = POOL_H * POOL_W - 1;
#pragma unroll
    for (int i = kWidth - 1; i >= 0; i--) {
      const int origin = staged_origins[first + i];
      const int own = kKept == 1 ? origin + 2 * i : origin * POOL_W + i;
      if (from[i] == maximum) place = i == kWidth - 1 ? own : min(place, own);
    }
  }
  // Of kBatch channels from the warp's `first` on, a window each, if it is `wanted`; moves `to` on.
  __device__ __forceinline__ void write_windows(float*& to, const float (&maximum)[kBatch],
                                                const int (&place)[kBatch], bool wanted, int first) const {
    const int64_t stride = int64_t(geometry.pooled_height()) * geometry.pooled_width();
    if (wanted) {
      float* value = to;
      uint8_t* origin = kSaving ? index + (to - extreme) : nullptr;
#pragma unroll
      for (int r = 0; r < kBatch; r++, value += stride, origin += stride) {
        const int own = first_own + first + r;
        if (CHANNELS_OUT % 64 && first_channel + own >= CHANNELS_OUT) break;
        const float2 power = storage.unscale[own];
        *value = maximum[r] * power.x * power.y;
        if (kSaving) *origin = uint8_t(place[r]);
      }
    }
    to += kBatch * stride;
  }
};

}  // namespace
