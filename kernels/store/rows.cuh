// Sinks that store a wide convolution's results as they are: y (N, C, H', W'), rows of contiguous pixels.
//
// A warp hands over 16 channels × 8·kTiles pixels of a row, as products leave them: lane 4 g + t has pixels
// 8 j + 2 t and the next, of channel g in [j][0] and [j][1], of channel g + 8 in [j][2] and [j][3].
#pragma once
#include "core/wgmma.cuh"
#include "core/vector.cuh"
#include "store/edge.cuh"

namespace store {

using namespace tensor_core;

// By way of a warp's staging, so that neighbouring lanes store neighbouring pixels.
struct Staged {
  static constexpr int kPitch = 72;               // floats from channel to channel: 8 banks on, no conflicts
  static constexpr int kBytes = 16 * kPitch * 4;  // of a warp

  // 16 channels × 64 pixels to y at `to`, channels `stride` apart; of these `channels` and `pixels` exist.
  template <class T, class Values>
  static __device__ __forceinline__ void store(T* to, float* staging, const Values& values, int64_t stride,
                                               int channels, int64_t pixels) {
    const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    __syncwarp();  // the last 16 channels have been read
#pragma unroll
    for (int j = 0; j < 8; j++) {
      const auto pair = [&](int channel) {
        return reinterpret_cast<float2*>(staging + channel * kPitch + j * 8 + t * 2);
      };
      *pair(g) = make_float2(values[j][0], values[j][1]);
      *pair(g + 8) = make_float2(values[j][2], values[j][3]);
    }
    __syncwarp();  // these have been written
#pragma unroll 4
    for (int c = 0; c < channels; c++, to += stride) {
#pragma unroll
      for (int j = lane; j < 64; j += 32)
        if (j < pixels) to[j] = rounded<T>(staging[c * kPitch + j]);
    }
  }
};

// y of a T. By wgmma whole sectors go by the copy engine, from a warp's staging.
template <class T> struct Rows {
  T* y;
  using result_t = T;
  static constexpr int kSector = 32 / sizeof(T);  // elements that are written at a time
  static constexpr int kPitch = 128 + kSector;    // from channel to channel: 8 banks on
  static constexpr int kWarpBytes = 16 * kPitch * int(sizeof(T));

#if TENSOR_CORE_WGMMA
  // Half of a lane's results, those of channel g + 8·kHalf of the warp, to that channel's `row` of staging.
  template <int kHalf, class Values>
  static __device__ __forceinline__ void write_staging(T* row, const Values& values, bool aligned) {
    if (aligned) {
#pragma unroll
      for (int j = 0; j < 16; j++)
        *reinterpret_cast<Pair<T>*>(row + j * 8) =
            Pair<T>{rounded<T>(values[j][kHalf * 2]), rounded<T>(values[j][kHalf * 2 + 1])};
    } else {
#pragma unroll
      for (int j = 0; j < 16; j++)
        row[j * 8] = rounded<T>(values[j][kHalf * 2]), row[j * 8 + 1] = rounded<T>(values[j][kHalf * 2 + 1]);
    }
  }

  // 16 channels × 128 pixels to y at `to`, channels `stride` apart; of these `channels` and `pixels` exist.
  //
  // Stores bound the kernel, so memory is written in whole sectors (32 bytes) wherever possible. Each channel
  // lies in staging as far behind a sector's start as in y, and the copy engine takes its whole sectors. In
  // memory the next row of a channel may follow this one. Where this row continues the last in that way
  // (`continues`), the last one's rest, less than a sector, is still in staging and goes along; where the
  // next row will continue this one (`continued`), this one's rest waits for it. Threads store what is left.
  template <class Values>
  static __device__ __forceinline__ void store(T* to, uint8_t* of_warp, const Values& values, int64_t stride,
                                               int channels, int pixels, bool continues, bool continued) {
    T* const staging = reinterpret_cast<T*>(of_warp);
    const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    const auto shift_of = [&](int channel) {
      return int(reinterpret_cast<uintptr_t>(to + channel * stride) / sizeof(T) % kSector);
    };
    pixels = min(pixels, 128);
    // Lanes l and l + 16 see to channel l.
    const int channel = lane % 16, shift = shift_of(channel), end = shift + pixels;
    T* const mine = staging + channel * kPitch;
    await_bulk_reads();
    __syncwarp();  // the last row's sectors have left staging
    if (continues) {
      // Where the last row's rest begins.
      const int rest = ((shift - pixels + 128) % kSector + pixels) / kSector * kSector;
#pragma unroll
      for (int i = lane / 16; i < kSector; i += 2)
        if (i < shift) mine[i] = mine[rest + i];
    }
    __syncwarp();  // the rest has moved to the front
    const int low = shift_of(g);
    write_staging<0>(staging + g * kPitch + low + t * 2, values, __all_sync(0xffffffffu, low % 2 == 0));
    const int high = shift_of(g + 8);
    write_staging<1>(staging + (g + 8) * kPitch + high + t * 2, values,
                     __all_sync(0xffffffffu, high % 2 == 0));
    publish_shared();  // the copy engine, too, reads by the asynchronous proxy
    __syncwarp();      // everyone has written
    // Whole sectors: first … last - 1.
    const int first = continues || shift == 0 ? 0 : kSector, last = max(end / kSector * kSector, first);
    const bool real = channel < channels;
    T* const out = to + channel * stride - shift;
    if (real && lane < 16 && first < last)
      copy_bulk_out(out + first, mine + first, (last - first) * int(sizeof(T)));
    commit_bulk_copies();
    if (!continues || !continued) {
      const bool head = lane < 16;  // stores what lies before the sectors; its partner, what lies behind them
      const int from = head ? shift : last;
      const int stop = head ? (continues ? 0 : min(first, end)) : (continued ? 0 : end);
      if (pixels >= kSector) store_edge(out, mine, from, real ? max(stop - from, 0) : 0, head);
      else
        for (int i = from; i < (real ? stop : 0); i++) out[i] = mine[i];
    }
  }
  // Shared memory must outlive the copies from it.
  static __device__ __forceinline__ void finish() { await_bulk_reads(); }
#endif
};

// The same where shared memory has no room for staging: straight from registers, 32 bytes of a channel side
// by side.
template <class T> struct DirectRows {
  T* y;
  using result_t = T;
  static constexpr int kSector = 1, kWarpBytes = 0;

  static __device__ __forceinline__ void store(T* to, uint8_t*, const float (&values)[16][4], int64_t stride,
                                               int channels, int pixels, bool, bool) {
    const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    const bool aligned = stride % 2 == 0 && uintptr_t(to) % sizeof(Pair<T>) == 0;
#pragma unroll
    for (int half = 0; half < 2; half++) {
      if (g + 8 * half >= channels) continue;
      T* const row = to + (g + 8 * half) * stride + 2 * t;
#pragma unroll
      for (int j = 0; j < 16; j++) {
        const Pair<T> pair{T(values[j][2 * half]), T(values[j][2 * half + 1])};
        const int pixel = 8 * j + 2 * t;
        if (aligned && pixel + 1 < pixels) {
          *reinterpret_cast<Pair<T>*>(row + 8 * j) = pair;
        } else {
          if (pixel < pixels) row[8 * j] = pair.at[0];
          if (pixel + 1 < pixels) row[8 * j + 1] = pair.at[1];
        }
      }
    }
  }
  static __device__ __forceinline__ void finish() {}
};

}  // namespace store
