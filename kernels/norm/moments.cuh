// A sink (core/sinks.cuh) that takes the statistics of v, shifted by a value near its mean. Those behind it
// see v less that.
#pragma once
#include "core/numerics.h"
#include "core/sinks.cuh"

namespace norms {  // CUDA has a function `norm`

struct Moments {
  accumulate_t* partial;  // (N, C, parts, 3): count, mean, m2 of each part of a channel of a sample

  static constexpr int kRowGroup = 1;
  template <class Loop> struct Shared : sinks::NoRoom<Moments> {};
  template <class Loop> struct Warp : sinks::IdleWarp {
    static constexpr int kTiles = Loop::kTiles, kColumns = 8 * kTiles;
    using Place = typename Loop::Place;
    accumulate_t* const partial;
    const Place& place;
    float shift_[2], sum[2], square[2];

    __device__ __forceinline__ Warp(const Moments& sink, Shared<Loop>&, const Place& place)
        : partial(sink.partial), place(place) {}
    __device__ __forceinline__ void begin() {
#pragma unroll
      for (int half = 0; half < 2; half++) shift_[half] = sum[half] = square[half] = 0;
    }
    __device__ __forceinline__ void shift(const Accumulators<kTiles>& v) {
#pragma unroll
      for (int half = 0; half < 2; half++)
        shift_[half] = __shfl_sync(~0u, v[0][half * 2], threadIdx.x % 32 & ~3);
    }
    __device__ __forceinline__ const float (&offset() const)[2] { return shift_; }
    __device__ __forceinline__ void accept(Accumulators<kTiles>& v, sinks::NoOffset) {
#pragma unroll
      for (int j = 0; j < kTiles; j++)
#pragma unroll
        for (int i = 0; i < 4; i++) v[j][i] -= shift_[i / 2];
      clear_other_columns(v);
#pragma unroll
      for (int j = 0; j < kTiles; j++)
#pragma unroll
        for (int i = 0; i < 4; i++) sum[i / 2] += v[j][i], square[i / 2] += v[j][i] * v[j][i];
    }
    // Writes the moments of what was accepted, if it is a part of v.
    __device__ __forceinline__ void finish() const {
      const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4, parts = place.parts(), rows = place.rows();
#pragma unroll
      for (int half = 0; half < 2; half++) {
        int mine = 0;
        for (int j = 0; j < kTiles; j++)
          mine += (j * 8 + t * 2 < place.columns) + (j * 8 + t * 2 + 1 < place.columns);
        auto moments =
            ::Moments<float>::from_shifted(float(mine) * float(rows), shift_[half], sum[half], square[half]);
        for (int offset = 1; offset < 4; offset *= 2)
          moments = moments.merge({__shfl_xor_sync(~0u, moments.count, offset),
                                   __shfl_xor_sync(~0u, moments.mean, offset),
                                   __shfl_xor_sync(~0u, moments.m2, offset)});
        const int own = half * 8 + g;
        if (t > 0 || place.channel(own) >= Place::kChannels || !place.is_part()) continue;
        const float2 power = place.unscale(own);
        accumulate_t* const to =
            partial + (place.first * parts + place.part()) * 3 + int64_t(own) * parts * 3;
        to[0] = moments.count, to[1] = moments.mean * power.x * power.y,
        to[2] = moments.m2 * power.x * power.y * power.x * power.y;
      }
    }

   private:
    // Columns that are not this tile's count as their shift.
    __device__ __forceinline__ void clear_other_columns(Accumulators<kTiles>& v) const {
      const int t = threadIdx.x % 4;
      if (place.columns <= kColumns - 8) {
#pragma unroll
        for (int j = 0; j < kTiles; j++)
#pragma unroll
          for (int i = 0; i < 4; i++)
            if (j * 8 + t * 2 + i % 2 >= place.columns) v[j][i] = 0;
      } else {
#pragma unroll
        for (int i = 0; i < 4; i++)
          if (kColumns - 8 + t * 2 + i % 2 >= place.columns) v[kTiles - 1][i] = 0;
      }
    }
  };
};

}  // namespace norms
