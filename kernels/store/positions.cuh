// Sinks that store a convolution's results as they are, position by position: y (N, C, S), or channels last,
// (N, S, C), S positions a sample; there, where kRounds, to TF32.
//
// A warp hands over 16 channels × 8·kTiles positions, which may run over samples, as products leave them:
// lane 4 g + t has positions 8 j + 2 t and the next, of channel g in [j][0] and [j][1], of channel g + 8 in
// [j][2] and [j][3]. They pass through a warp's staging, so that neighbouring lanes store neighbouring
// elements. `where(position)` says which result of which sample a position has.
#pragma once
#include "core/scalar.h"
#include "core/tf32.cuh"
#include "core/vector.cuh"

namespace store {

// Of a warp's results: the first position, of all samples', and how many exist; the first channel, and how
// many a warp has, the first 8 or all 16.
struct Patch {
  int position, columns, channel, channels = 16;
};

// Result s of sample n, if there is one.
struct Place {
  int n, s;
  bool real;
};
// Positions run over samples of S results.
struct Flat {
  int S;
  HOST_DEVICE int results() const { return S; }
  HOST_DEVICE Place operator()(int position) const {
    const int n = position / S;
    return {n, position - n * S, true};
  }
  HOST_DEVICE int64_t among_all(int position) const { return position; }  // samples' results, or -1
};

template <class T, bool kChannelsLast, bool kRounds = false> struct Positions {
  static_assert(kChannelsLast || !kRounds, "who takes operands in planes rounds them");
  T* y;
  using result_t = T;
  static constexpr bool kLast = kChannelsLast, kRounded = kRounds, kReduces = false;
  static constexpr int kPerWord = 4 / int(sizeof(T));                     // elements
  static constexpr int kTilesAtOnce = sizeof(T) == 1 ? 4 : 4 * kPerWord;  // through staging
  static constexpr int kLanes = kTilesAtOnce * 8 / kPerWord;              // that store a channel's words
  static constexpr int kBeside = 32 / kLanes;                             // channels
  // Staging: 16 channels × kLanes words of positions, or 32 positions × 16 channels of float32; without
  // conflicts, but where bytes are read.
  static constexpr int kPitch = kChannelsLast ? 20 : kPerWord == 1 ? 40 : kPerWord == 2 ? 36 : 12;
  static constexpr int kWarpBytes = (kChannelsLast ? 32 : 16) * kPitch * 4;
  struct alignas(4) Word {
    T at[kPerWord];
  };

  template <int kTiles, class Where>
  __device__ __forceinline__ void store(uint8_t* staging, const float (&values)[kTiles][4],
                                        const Patch& patch, const Where& where, int channels) const {
    if constexpr (kChannelsLast)
      store_last(reinterpret_cast<float*>(staging), values, patch, where, channels);
    else store_planes(reinterpret_cast<Word*>(staging), values, patch, where, channels);
  }

  // kLanes words of each of 16 channels at a time; a lane stores one of each kBeside-th channel.
  template <int kTiles, class Where>
  __device__ __forceinline__ void store_planes(Word* staging, const float (&values)[kTiles][4],
                                               const Patch& patch, const Where& where, int channels) const {
    static_assert(kTiles % kTilesAtOnce == 0);
    const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4, S = where.results();
    const int own = lane / kLanes;  // channel
#pragma unroll
    for (int first = 0; first < kTiles; first += kTilesAtOnce) {
      if (first * 8 >= patch.columns) break;
      __syncwarp();  // what was there has been read
#pragma unroll
      for (int i = 0; i < kTilesAtOnce * 2; i++) {
        const float* const two = values[first + i / 2] + i % 2 * 2;
        T* const to = staging[(g + i % 2 * 8) * kPitch].at + i / 2 * 8 + t * 2;
        *reinterpret_cast<Pair<T>*>(to) = Pair<T>{rounded<T>(two[0]), rounded<T>(two[1])};
      }
      __syncwarp();  // everyone has written
      const int column = first * 8 + lane % kLanes * kPerWord;
      T* to[kPerWord];
      bool real[kPerWord];
#pragma unroll
      for (int i = 0; i < kPerWord; i++) {
        const Place place = where(patch.position + column + i);
        to[i] = y + (int64_t(place.n) * channels + patch.channel + own) * S + place.s;
        real[i] = place.real && column + i < patch.columns;
      }
      bool any = real[0], whole = real[0];
#pragma unroll
      for (int i = 1; i < kPerWord; i++) any |= real[i], whole &= real[i] && to[i] == to[0] + i;
      if constexpr (kPerWord > 1) whole &= S % kPerWord == 0 && uintptr_t(to[0]) % 4 == 0;
      const int count = min(channels - patch.channel, patch.channels);
      constexpr int kOwn = 16 / kBeside, kRead = kOwn < 8 ? kOwn : 8;  // channels
#pragma unroll
      for (int part = 0; part < kOwn; part += kRead) {
        Word words[kRead];  // all are read before the first is stored: the compiler keeps a read behind an
                            // earlier store
#pragma unroll
        for (int c = 0; c < kRead; c++)
          words[c] = staging[((part + c) * kBeside + own) * kPitch + lane % kLanes];
        if (!any) continue;
#pragma unroll
        for (int c = 0; c < kRead; c++) {
          if ((part + c) * kBeside + own >= count) break;
          if (kPerWord == 1 || whole) {
            *reinterpret_cast<Word*>(to[0]) = words[c];
          } else {
#pragma unroll
            for (int i = 0; i < kPerWord; i++)
              if (real[i]) *to[i] = words[c].at[i];
          }
#pragma unroll
          for (int i = 0; i < kPerWord; i++) to[i] += kBeside * S;
        }
      }
    }
  }

  // 32 positions at a time; four lanes store a position's 16 channels.
  template <int kTiles, class Where>
  __device__ __forceinline__ void store_last(float* staging, const float (&values)[kTiles][4],
                                             const Patch& patch, const Where& where, int channels) const {
    const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    const int own = patch.channel + lane % 4 * 4;  // the first of the lane's four channels
    const bool whole = channels % kVector == 0 && uintptr_t(y) % sizeof(Vector<T>) == 0;
#pragma unroll
    for (int first = 0; first < kTiles; first += 4) {
      if (first * 8 >= patch.columns) break;
      __syncwarp();  // what was there has been read
#pragma unroll
      for (int i = 0; i < 16; i++)
        staging[(i / 4 * 8 + t * 2 + i % 2) * kPitch + g + i / 2 % 2 * 8] = values[first + i / 4][i % 4];
      __syncwarp();     // everyone has written
      float4 fours[4];  // all are read before the first is stored
#pragma unroll
      for (int i = 0; i < 4; i++)
        fours[i] = *reinterpret_cast<const float4*>(staging + (i * 8 + lane / 4) * kPitch + lane % 4 * 4);
#pragma unroll
      for (int i = 0; i < 4; i++) {
        const int column = i * 8 + lane / 4;
        float4 four = fours[i];
        if constexpr (kRounds)
          four = {nearest_tf32(four.x), nearest_tf32(four.y), nearest_tf32(four.z), nearest_tf32(four.w)};
        const int64_t at = where.among_all(patch.position + first * 8 + column);
        if (first * 8 + column >= patch.columns || own >= min(channels, patch.channel + patch.channels) ||
            at < 0)
          continue;
        T* const to = y + at * channels + own;
        const Vector<T> values{T(four.x), T(four.y), T(four.z), T(four.w)};
        if (whole) {
          put_vector(to, values);
        } else {
          for (int c = 0; c < min(channels - own, 4); c++) to[c] = values.at[c];
        }
      }
    }
  }
};

}  // namespace store
