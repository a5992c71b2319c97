// Sinks that store a convolution's results as they are, position by position: y (N, C, S), or channels last,
// (N, S, C), S positions a sample; there, where kRounds, to TF32.
//
// A warp hands over 16 channels × 8·kTiles positions, which may run over samples, as products leave them:
// lane 4 g + t has positions 8 j + 2 t and the next, of channel g in [j][0] and [j][1], of channel g + 8 in
// [j][2] and [j][3]. They pass through a warp's staging, so that neighbouring lanes store neighbouring
// elements: units of 16 bytes, where y has such. `where(position)` says which result of which sample a
// position has.
#pragma once
#include "core/split.cuh"
#include "core/tensor_map.cuh"
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
  static constexpr bool kRuns = true;  // results of a sample's positions lie one behind the other
  int S;
  HOST_DEVICE int results() const { return S; }
  HOST_DEVICE Place operator()(int position) const {
    const int n = position / S;
    return {n, position - n * S, true};
  }
  HOST_DEVICE int64_t among_all(int position) const { return position; }  // samples' results, or -1
};

// Two results, in one access.
template <class T> __device__ __forceinline__ void put_pair(T* to, float first, float second) {
  if constexpr (sizeof(T) == 2) *reinterpret_cast<uint32_t*>(to) = tensor_core::pack<T>(first, second);
  else *reinterpret_cast<Pair<T>*>(to) = Pair<T>{rounded<T>(first), rounded<T>(second)};
}

template <class T, bool kChannelsLast, bool kRounds = false> struct Positions {
  static_assert(kChannelsLast || !kRounds, "who takes operands in planes rounds them");
  T* y;
  using result_t = T;
  static constexpr bool kLast = kChannelsLast, kRounded = kRounds, kReduces = false;
  static constexpr int kPerWord = 4 / int(sizeof(T));                     // elements
  static constexpr int kTilesAtOnce = sizeof(T) == 1 ? 4 : 4 * kPerWord;  // through staging
  static constexpr int kLanes = kTilesAtOnce * 8 / kPerWord;              // that store a channel's words
  static constexpr int kBeside = 32 / kLanes;                             // channels
  static constexpr int kOfUnit = 16 / int(sizeof(T));                     // elements
  // Staging, in words: 16 channels × kLanes of positions, or 32 positions × 16 channels of float32, or 64
  // positions × two units; without conflicts, but where bytes are read.
  static constexpr bool kByUnits = kChannelsLast && sizeof(T) == 2;
  static constexpr int kPitchOfPlanes = kPerWord == 1 ? 40 : kPerWord == 2 ? 36 : 12;
  static constexpr int kPitch = kByUnits ? 8 : kChannelsLast ? 20 : kPitchOfPlanes;
  static constexpr int kWarpBytes = (kByUnits ? 64 : kChannelsLast ? 32 : 16) * kPitch * 4;
  struct alignas(4) Word {
    T at[kPerWord];
  };

  template <int kTiles, class Where>
  __device__ __forceinline__ void store(uint8_t* staging, const float (&values)[kTiles][4],
                                        const Patch& patch, const Where& where, int channels) const {
    if constexpr (kByUnits) store_last_units(staging, values, patch, where, channels);
    else if constexpr (kChannelsLast)
      store_last(reinterpret_cast<float*>(staging), values, patch, where, channels);
    else store_planes(reinterpret_cast<Word*>(staging), values, patch, where, channels);
  }

  template <int kTiles, class Where>
  __device__ __forceinline__ void store_planes(Word* staging, const float (&values)[kTiles][4],
                                               const Patch& patch, const Where& where, int channels) const {
    static_assert(kTiles % kTilesAtOnce == 0);
    const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    const bool by_units =
        Where::kRuns && (where.results() | patch.position) % kOfUnit == 0 && uintptr_t(y) % 16 == 0;
#pragma unroll
    for (int first = 0; first < kTiles; first += kTilesAtOnce) {
      if (first * 8 >= patch.columns) break;
      __syncwarp();  // what was there has been read
#pragma unroll
      for (int i = 0; i < kTilesAtOnce * 2; i++) {
        const float* const two = values[first + i / 2] + i % 2 * 2;
        put_pair(staging[(g + i % 2 * 8) * kPitch].at + i / 2 * 8 + t * 2, two[0], two[1]);
      }
      __syncwarp();  // everyone has written
      const Patch part{patch.position + first * 8, patch.columns - first * 8, patch.channel,
                       min(channels - patch.channel, patch.channels)};
      if (by_units) put_units(staging, part, where, channels);
      else put_words(staging, part, where, channels);
    }
  }

  // What was staged, to y: a lane stores a unit of each kRows-th channel.
  template <class Where>
  __device__ __forceinline__ void put_units(const Word* staging, const Patch& part, const Where& where,
                                            int channels) const {
    constexpr int kUnits = kTilesAtOnce * 8 / kOfUnit, kRows = 32 / kUnits;  // of a channel; channels at once
    const int lane = threadIdx.x % 32, unit = lane % kUnits, own = lane / kUnits, S = where.results();
    const Place place = where(part.position + unit * kOfUnit);
    T* to = y + (int64_t(place.n) * channels + part.channel + own) * S + place.s;
    uint4 units[16 / kRows];  // all are read before the first is stored: the compiler keeps a read behind an
                              // earlier store
#pragma unroll
    for (int i = 0; i < 16 / kRows; i++)
      units[i] = *reinterpret_cast<const uint4*>(staging + (i * kRows + own) * kPitch + unit * 4);
    const int count = unit * kOfUnit < part.columns ? part.channels - own : 0;
#pragma unroll
    for (int i = 0; i < 16 / kRows; i++, to += kRows * int64_t(S))
      // By intrinsic: the compiler would store four words.
      if (i * kRows < count) __stcg(reinterpret_cast<uint4*>(to), units[i]);
  }

  // The same wherever y lies: a lane stores a word of each kBeside-th channel, as a whole or by elements.
  template <class Where>
  __device__ __forceinline__ void put_words(const Word* staging, const Patch& part, const Where& where,
                                            int channels) const {
    const int lane = threadIdx.x % 32, own = lane / kLanes, column = lane % kLanes * kPerWord;
    const int S = where.results();
    T* to[kPerWord];
    bool real[kPerWord];
#pragma unroll
    for (int i = 0; i < kPerWord; i++) {
      const Place place = where(part.position + column + i);
      to[i] = y + (int64_t(place.n) * channels + part.channel + own) * S + place.s;
      real[i] = place.real && column + i < part.columns;
    }
    bool whole = real[0];
#pragma unroll
    for (int i = 1; i < kPerWord; i++) whole &= real[i] && to[i] == to[0] + i;
    if constexpr (kPerWord > 1) whole &= S % kPerWord == 0 && uintptr_t(to[0]) % 4 == 0;
#pragma unroll
    for (int i = 0; i < kPerWord; i++) real[i] &= !whole;
    constexpr int kOwn = 16 / kBeside, kRead = kOwn < 8 ? kOwn : 8;  // channels
#pragma unroll
    for (int first = 0; first < kOwn; first += kRead) {
      Word words[kRead];  // as units are
#pragma unroll
      for (int c = 0; c < kRead; c++)
        words[c] = staging[((first + c) * kBeside + own) * kPitch + lane % kLanes];
#pragma unroll
      for (int c = 0; c < kRead; c++) {
        if ((first + c) * kBeside + own >= part.channels) break;
        if (whole) *reinterpret_cast<Word*>(to[0]) = words[c];
#pragma unroll
        for (int i = 0; i < kPerWord; i++) {
          if (real[i]) *to[i] = words[c].at[i];
          to[i] += kBeside * int64_t(S);
        }
      }
    }
  }

  // 64 positions at a time of 16 bits; two lanes store a position's 16 channels. Positions' units change
  // places, so that no bank is met twice.
  template <int kTiles, class Where>
  __device__ __forceinline__ void store_last_units(uint8_t* staging, const float (&values)[kTiles][4],
                                                   const Patch& patch, const Where& where,
                                                   int channels) const {
    static_assert(kTiles % 8 == 0);
    const auto place_of = [&](int position, int unit) {
      return staging + position * 32 + (unit ^ position / 4 % 2) * 16;
    };
    const int lane = threadIdx.x % 32, own = patch.channel + lane % 2 * 8;  // the first of the lane's eight
    const int count = min(min(channels, patch.channel + patch.channels) - own, 8);
#pragma unroll
    for (int first = 0; first < kTiles; first += 8) {
      if (first * 8 >= patch.columns) break;
      __syncwarp();  // what was there has been read
#pragma unroll
      for (int j = 0; j < 8; j += 2) {
        const auto& one = values[first + j];
        const auto& next = values[first + j + 1];
        const uint32_t matrices[] = {
            tensor_core::pack<T>(one[0], one[1]), tensor_core::pack<T>(one[2], one[3]),
            tensor_core::pack<T>(next[0], next[1]), tensor_core::pack<T>(next[2], next[3])};
        // A lane's row: position j·8 + lane % 8, or eight further, and a unit.
        tensor_core::store_matrices_transposed(place_of(j * 8 + lane / 16 * 8 + lane % 8, lane / 8 % 2),
                                               matrices);
      }
      __syncwarp();  // everyone has written
      uint4 units[4];
#pragma unroll
      for (int i = 0; i < 4; i++)
        units[i] = *reinterpret_cast<const uint4*>(place_of(i * 16 + lane / 2, lane % 2));
#pragma unroll
      for (int i = 0; i < 4; i++) {
        const int column = first * 8 + i * 16 + lane / 2;
        const int64_t at = where.among_all(patch.position + column);
        if (column < patch.columns && at >= 0) put_unit(y + at * channels + own, units[i], count, channels);
      }
    }
  }

  // The first `count` elements of a unit, channels of a position.
  static __device__ __forceinline__ void put_unit(T* to, const uint4& unit, int count, int channels) {
    if (channels % kOfUnit == 0 && uintptr_t(to) % 16 == 0) {
      if (count > 0) __stcg(reinterpret_cast<uint4*>(to), unit);
    } else if (channels % (kOfUnit / 2) == 0 && uintptr_t(to) % 8 == 0) {
      if (count > 0) __stcg(reinterpret_cast<uint2*>(to), make_uint2(unit.x, unit.y));
      if (count > kOfUnit / 2) __stcg(reinterpret_cast<uint2*>(to) + 1, make_uint2(unit.z, unit.w));
    } else {
#pragma unroll
      for (int c = 0; c < kOfUnit; c++)
        if (c < count) to[c] = reinterpret_cast<const T*>(&unit)[c];
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
