// Where a wide convolution's results go (conv/wide.cuh) if they are reduced: over channels, or over
// positions. A warp hands over 16 channels × 8·kTiles pixels of a row, as products leave them; what it makes
// of them is merged by a later launch, in a fixed order.
#pragma once
#include "reduce/channels.cuh"
#include "reduce/positions.cuh"

namespace reduce {

// Where such values lie: of `channels` and `pixels` that exist.
struct WidePlace {
  int64_t n, row;
  int channel, column, height, width, channels_out;
  __device__ __forceinline__ int channels() const { return channels_out - channel; }
  __device__ __forceinline__ int pixels() const { return width - column; }
};

// partial (N, sixteens of channels, OH, OW).
template <class Reduction> struct WideChannels {
  using Partial = typename Reduction::Partial;
  template <int kTiles> using Room = Meeting<Partial, 8, 8 * kTiles>;
  static constexpr bool kReduces = true;
  static constexpr int kSector = 1, kWarpBytes = sizeof(Room<16>);  // kSector: no row runs on
  using result_t = Partial;
  Partial* y;

  template <int kTiles>
  __device__ __forceinline__ void accept(const float (&values)[kTiles][4], void* staging,
                                         const WidePlace& place) const {
    Room<kTiles>& room = *static_cast<Room<kTiles>*>(staging);
    meet<Reduction>(room, values, place.channel, place.channels());
    const int64_t plane = place.n * ((place.channels_out + 15) / 16) + place.channel / 16;
    Partial* const to = y + (plane * place.height + place.row) * place.width + place.column;
#pragma unroll
    for (int i = threadIdx.x % 32; i < 8 * kTiles; i += 32)
      if (i < place.pixels() && place.channels() > 0) to[i] = room.template all<Reduction>(i);
  }
  static __device__ __forceinline__ void finish() {}
};

// partial (N, C, OH, tiles of 8·kTiles pixels): parts of a channel.
template <class What> struct WidePositions {
  using result_t = typename What::Part;
  static constexpr bool kReduces = true;
  static constexpr int kSector = 1, kWarpBytes = 0;
  result_t* y;

  template <int kTiles>
  __device__ __forceinline__ void accept(const float (&values)[kTiles][4], void*,
                                         const WidePlace& place) const {
    const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4,
              tiles = (place.width + 8 * kTiles - 1) / (8 * kTiles);
    Running<What> running;
    running.begin();
    if (What::kShifts) running.start(values[0][0], values[0][2]);
    int count = 0;
#pragma unroll
    for (int j = 0; j < kTiles; j++)
#pragma unroll
      for (int i = 0; i < 2; i++) {
        const bool real = j * 8 + 2 * t + i < place.pixels();
        count += real;
        running.add(0, values[j][i], real), running.add(1, values[j][2 + i], real);
      }
    const int all = of_four(count);
#pragma unroll
    for (int half = 0; half < 2; half++) {
      const auto part = running.part(half, all);
      const int own = g + 8 * half;
      const int64_t channel = place.n * place.channels_out + place.channel + own;
      if (t == 0 && own < place.channels() && place.pixels() > 0)
        y[(channel * place.height + place.row) * tiles + place.column / (8 * kTiles)] = part;
    }
  }
  static __device__ __forceinline__ void finish() {}
};

}  // namespace reduce
