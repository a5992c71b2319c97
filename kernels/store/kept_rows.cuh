// A sink of what backward needs beside a wide convolution's results: what another tail makes of the same
// values, as rows (store/rows.cuh) that a warp stores before its results, by way of the same staging.
#pragma once
#include "conv/tail.cuh"
#include "conv/wide_sm90_pipeline.cuh"
#include "store/grad_mask.cuh"
#include "store/rows.cuh"

namespace store {

template <class Tail, class Rows_> struct KeptRows : Nothing {
  using Rows = Rows_;
  static constexpr bool kStores = true;
  static constexpr int kWarpBytes = Rows::kWarpBytes;
  using Constants = conv::ChannelConstants<Tail>;
  Tail tail;
  Rows rows;

  // The tail of sums that stay as they are, value by value.
  template <int kTiles> struct Values {
    const float (&sums)[kTiles][4];
    const Tail& tail;
    const Constants &low, &high;
    struct Tile {
      const Values& all;
      int j;
      __device__ __forceinline__ float operator[](int i) const {
        const Constants& own = i < 2 ? all.low : all.high;
        return all.tail(all.sums[j][i] * own.correction * own.factor, own.channel);
      }
    };
    __device__ __forceinline__ Tile operator[](int j) const { return {*this, j}; }
  };

  // Of a channel whose constants for y are `of_y`.
  template <class OfY>
  __device__ __forceinline__ Constants constants(int64_t n, int c, bool real, const OfY& of_y) const {
    Constants own(tail, n, c, real);
    own.correction = of_y.correction, own.factor = of_y.factor;
    return own;
  }

  // Of 16 channels × 8·kTiles pixels, from `channel` of sample n on, to element `at` of the rows, channels
  // `stride` apart; so many channels and pixels exist. low, high: as `apply` has them, for y. ends(rows):
  // where they are joined.
  template <int kTiles, class OfY, class Ends>
  __device__ __forceinline__ void store_rows(int64_t at, void* staging, const float (&sums)[kTiles][4],
                                             int64_t n, int channel, int64_t stride, int channels,
                                             int64_t pixels, const OfY& of_low, const OfY& of_high,
                                             const Ends& ends) const {
    const int low = threadIdx.x % 32 / 4, high = low + 8;
    const Constants own[] = {constants(n, channel + low, low < channels, of_low),
                             constants(n, channel + high, high < channels, of_high)};
    const Values<kTiles> values{sums, tail, own[0], own[1]};
    auto* const to = rows.y + at;
    if constexpr (kTiles == 8) {
      Staged::store(to, static_cast<float*>(staging), values, stride, channels < 16 ? channels : 16, pixels);
    } else {
      uint8_t* const of_warp = static_cast<uint8_t*>(staging);
      if constexpr (conv::joins<Rows>) {
        const auto own_ends = ends(rows);
        Rows::fetch(to, of_warp, stride, int(pixels), own_ends);
        Rows::store(to, of_warp, values, stride, channels, int(pixels), own_ends);
      } else {
        Rows::store(to, of_warp, values, stride, channels, int(pixels), false, false);
      }
    }
  }
};

}  // namespace store
