// Mean and standard deviation of a 3-D convolution of x - shift, taken from the mainloop's registers.
#pragma once
#include "conv/narrow3d.cuh"
#include "core/reduce.cuh"

namespace norms::narrow3d {

using namespace conv::narrow3d;

// Of one tile and one output channel: mean and standard deviation, because squares may overflow.
struct alignas(8) TileStatistics {
  float mean, deviation;
};

// A sink (conv/narrow3d.cuh) that takes statistics (N, slots, kOut), shifted by a value near the mean. What
// stands behind it gets the sums less that shift. kFirst: it comes first, so that sums start with less than
// that.
template <bool kFirst> struct Statistics {
  TileStatistics* statistics;

  template <class S> using Shared = NoRoom;  // MainloopStorage has it
  template <class S> struct Warp : IdleWarp {
    static_assert(S::kOut % 16 == 0, "all of a block's channels are there");
    const Statistics& sink;
    MainloopStorage<S>& storage;
    float offset[2], sum[2], square[2], count;
    bool started;
    float scale;

    __device__ __forceinline__ Warp(const Statistics& sink, NoRoom&, const Place<S>& place)
        : sink(sink), storage(place.storage) {}
    __device__ void begin(float s) {
      scale = s, started = false, count = 0;
      for (int r = 0; r < 2; r++) offset[r] = sum[r] = square[r] = 0;
    }
    __device__ __forceinline__ void initial(Accumulators& v) const {
#pragma unroll
      for (int j = 0; j < kFragments; j++) v[j][0] = v[j][1] = -offset[0], v[j][2] = v[j][3] = -offset[1];
    }
    __device__ __forceinline__ void add(int r, float v) { sum[r] += v, square[r] = fmaf(v, v, square[r]); }
    __device__ __forceinline__ void accept(Accumulators& v, const WarpTile& tile, const NoOffset&) {
      if (!kFirst && started)
#pragma unroll
        for (int j = 0; j < kFragments; j++)
#pragma unroll
          for (int i = 0; i < 4; i++) v[j][i] -= offset[i / 2];
      if (!started) {
        started = true;
#pragma unroll
        for (int r = 0; r < 2; r++) {  // of three values, since one alone may be far from the mean
          const float own = middle(v[0][2 * r], v[kFragments / 2][2 * r], v[kFragments - 1][2 * r]);
          offset[r] =
              __shfl_sync(~0u, own, threadIdx.x % 32 & ~3);  // the same for all four lanes of a channel
#pragma unroll
          for (int j = 0; j < kFragments; j++) v[j][2 * r] -= offset[r], v[j][2 * r + 1] -= offset[r];
        }
      }
      if (tile.whole()) {
        count += 2 * kFragments;
#pragma unroll
        for (int j = 0; j < kFragments; j++)
#pragma unroll
          for (int i = 0; i < 4; i++) add(i / 2, v[j][i]);
      } else {
#pragma unroll
        for (int j = 0; j < kFragments; j++)
#pragma unroll
          for (int u = 0; u < 2; u++)
            if (tile.q + 8 * j + int(threadIdx.x % 4) * 2 + u < tile.positions)
              add(0, v[j][u]), add(1, v[j][2 + u]), count += 1;
      }
    }
    __device__ __forceinline__ void end() const {
      const int lane = threadIdx.x % 32;
      const float all = channel_sum(count);
#pragma unroll
      for (int r = 0; r < 2; r++) {
        const float all_sum = channel_sum(sum[r]), all_square = channel_sum(square[r]);
        const auto own = Moments<float>::from_shifted(all, offset[r], all_sum, all_square);
        if (lane % 4 == 0) storage.moments[threadIdx.x / 32][lane / 4 + r * 8] = own;
      }
    }
    // Threads 8 i write the statistics of channel first_channel + i, for i < 16.
    __device__ void finish(const Place<S>& place) const {
      const int channel = threadIdx.x / 8, eighth = threadIdx.x % 8;
      if (channel >= 16) return;
      Moments<float> all = storage.moments[eighth][channel];
#pragma unroll 1
      for (int i = eighth + 8; i < kBlockWarps; i += 8) all = all.merge(storage.moments[i][channel]);
      all = merge_lanes<8>(all);
      if (eighth) return;
      const float unit = 1 / scale * (1 / storage.weight_scale[channel]);
      const Tile& tile = place.tile;
      TileStatistics* const of_tile = sink.statistics + (tile.n * place.c.slots() + tile.slot) * S::kOut;
      of_tile[place.first_channel + channel] = {all.mean * unit, sqrtf(all.variance()) * unit};
    }
  };
};

// The statistics of a tile. Read past the L1 cache: in a launch whose blocks meet, others have just written
// them.
template <class T = float, class S>
__device__ __forceinline__ Moments<T> moments_of(const TileStatistics* statistics, const Convolution<S>& c,
                                                 int64_t n, int slot, int channel) {
  const TileStatistics* const at = statistics + (n * c.slots() + slot) * S::kOut + channel;
  const float2 both = __ldcg(reinterpret_cast<const float2*>(at));
  return {T(slot_count(c, slot)), T(both.x), T(slot_count(c, slot)) * T(both.y) * T(both.y)};
}
// Of all tiles of a sample, merged in their order.
template <class T, class S>
__device__ __forceinline__ Moments<T> merged_moments(const TileStatistics* statistics,
                                                     const Convolution<S>& c, int64_t n, int channel) {
  Moments<T> all{0, 0, 0};
#pragma unroll 1
  for (int slot = 0; slot < c.slots(); slot++)
    all = all.merge(moments_of<T>(statistics, c, n, slot, channel));
  return all;
}

}  // namespace norms::narrow3d
