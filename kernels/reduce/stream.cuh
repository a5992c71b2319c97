// Where a streamed convolution's results go (conv/stream.cuh) if they are reduced: over channels, or over
// positions. A warp hands over 16 channels at 8·kTiles positions, which may run over samples, as products
// leave them; what it makes of them is merged by a later launch, in a fixed order.
#pragma once
#include "conv/stream.cuh"
#include "reduce/channels.cuh"
#include "reduce/positions.cuh"

namespace reduce {

// partial (N, sixteens of channels, S).
template <class Reduction> struct StreamChannels {
  using Partial = typename Reduction::Partial;
  template <int kTiles> using Room = Meeting<Partial, 8, 8 * kTiles>;
  static constexpr bool kReduces = true, kLast = false;
  static constexpr int kWarpBytes = sizeof(Room<conv::kMostReduced / 8>);
  Partial* y;

  template <int kTiles>
  __device__ __forceinline__ void store(uint8_t* staging, const float (&values)[kTiles][4],
                                        const store::Patch& patch, const store::Flat& where,
                                        int channels) const {
    const int S = where.S;
    Room<kTiles>& room = *reinterpret_cast<Room<kTiles>*>(staging);
    meet<Reduction>(room, values, patch.channel, channels - patch.channel);
    const int sixteens = (channels + 15) / 16;
#pragma unroll
    for (int i = threadIdx.x % 32; i < 8 * kTiles; i += 32) {
      const int position = patch.position + i, n = position / S;
      if (i < patch.columns)
        y[(int64_t(n) * sixteens + patch.channel / 16) * S + position % S] = room.template all<Reduction>(i);
    }
  }
};

// partial (N, C, parts): of what a sample's positions have in each warp's share; where there are fewer, the
// last are of nothing.
template <class What> struct StreamPositions {
  static constexpr bool kReduces = true, kLast = false;
  static constexpr int kWarpBytes = 0;
  typename What::Part* y;
  int parts;

  template <int kTiles>
  __device__ __forceinline__ void store(uint8_t*, const float (&values)[kTiles][4], const store::Patch& patch,
                                        const store::Flat& where, int channels) const {
    const int S = where.S;
    constexpr int kShare = 8 * kTiles;
    const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
    int n = patch.position / S, from = 0, to = S - patch.position % S;
#pragma unroll 1
    for (; from < patch.columns; n++, from = to, to += S) {
      const int end = min(to, patch.columns);
      const auto each = [&](const auto& take) {
#pragma unroll
        for (int j = 0; j < kTiles; j++)
#pragma unroll
          for (int i = 0; i < 2; i++) {
            const int column = j * 8 + 2 * t + i;
            take(values[j][i], values[j][2 + i], column >= from && column < end);
          }
      };
      Running<What> running;
      running.begin();
      if constexpr (What::kShifts) {  // by about the mean
        float sum[2] = {};
        each([&](float low, float high, bool real) {
          sum[0] += real ? low : 0.f, sum[1] += real ? high : 0.f;
        });
        for (int half = 0; half < 2; half++) running.shift[half] = of_four(sum[half]) / float(end - from);
      }
      each([&](float low, float high, bool real) { running.add(0, low, real), running.add(1, high, real); });
      const int first = n * S / kShare, slot = patch.position / kShare - first;
      const bool last = slot == (n * S + S - 1) / kShare - first;
#pragma unroll
      for (int half = 0; half < 2; half++) {
        const auto part = running.part(half, end - from);
        const int channel = patch.channel + g + 8 * half;
        if (t > 0 || channel >= channels) continue;
        auto* const own = y + (int64_t(n) * channels + channel) * parts;
        own[slot] = part;
        for (int i = slot + 1; last && i < parts; i++) own[i] = What::of(0, 0, 0, 0);
      }
    }
  }
};

}  // namespace reduce
