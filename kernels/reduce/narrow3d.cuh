// Sinks of a 3-D convolution (conv/narrow3d.cuh) that reduce a pointwise tail of v: over all channels, or
// over the positions of each channel of a sample; in a fixed order. tail as store::Runs'.
#pragma once
#include "conv/narrow3d.cuh"
#include "reduce/channels.cuh"
#include "reduce/positions.cuh"

namespace reduce::narrow3d {

using namespace conv::narrow3d;
using Accumulators = conv::narrow3d::Accumulators;  // and no other mainloop's

// What a warp knows of its lanes' channels g and g + 8, and v of the whole convolution from a sum.
template <class S> struct Levels {
  float level[16];
};
template <class S, class Tail> struct Values {
  const Tail& tail;
  const Place<S>& place;
  const Levels<S>& room;
  const int64_t plane;  // elements
  const int channels;   // of this block's that exist
  float unit[2], level[2];
  typename Tail::Channel own[2];

  // A barrier follows.
  __device__ __forceinline__ Values(const Tail& tail, Levels<S>& room, const Place<S>& place)
      : tail(tail), place(place), room(room), plane(place.c.OH * int64_t(place.c.OW)),
        channels(S::kOut % 16 ? min(S::kOut - place.first_channel, 16) : 16) {
    if (S::kSplit && threadIdx.x < 16 * 8) {
      const int c = threadIdx.x / 8;
      const double own =
          level_of(place.c, place.tile.n, place.first_channel + min(c, channels - 1));  // by whole warps
      if (threadIdx.x % 8 == 0) room.level[c] = float(own);
    }
  }
  __device__ __forceinline__ void begin(float scale) {
#pragma unroll
    for (int r = 0; r < 2; r++) {
      unit[r] = place.unit(scale, r), level[r] = S::kSplit ? room.level[threadIdx.x % 32 / 4 + 8 * r] : 0.f;
      own[r] = tail.channel(place.tile.n, place.first_channel + existing(r));
    }
  }
  __device__ __forceinline__ int existing(int r) const {
    return min(int(threadIdx.x % 32) / 4 + 8 * r, channels - 1);
  }
  // Of position q + 8 j + 2 t + u.
  __device__ __forceinline__ float operator()(const Accumulators& v, const WarpTile& tile, int j, int u,
                                              int r) const {
    const float sum = v[j][2 * r + u], value = S::kSplit ? fmaf(sum, unit[r], level[r]) : sum * unit[r];
    const int position = min(tile.q + 8 * j + 2 * int(threadIdx.x % 4) + u, tile.positions - 1);
    const int64_t at = place.before() + existing(r) * place.channel_size() + tile.plane * plane + position;
    return tail(value, own[r], at);
  }
};

// ------------------------------------------------------------------------------------------------------
// channels

// y (N, D', H', W') = after(reduction over channels, at of y); where a block hasn't all channels, partial (N,
// sixteens, D', H', W') in y's place.
template <class T, class Reduction, class Tail, class After = AsItIs> struct Channels {
  using Partial = typename Reduction::Partial;
  T* y;
  Tail tail;
  After after;
  Partial* partial = nullptr;

  template <class S> using Shared = Levels<S>;
  template <class S> struct Warp : IdleWarp {
    static constexpr bool kAll = S::kOut <= 16;
    const Channels& sink;
    Values<S, Tail> values;

    __device__ __forceinline__ Warp(const Channels& sink, Levels<S>& room, const Place<S>& place)
        : sink(sink), values(sink.tail, room, place) {}
    __device__ __forceinline__ void begin(float scale) { values.begin(scale); }
    __device__ __forceinline__ void accept(Accumulators& v, const WarpTile& tile, const NoOffset&) {
      const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4, channel = values.place.first_channel + g;
      Partial of_lane[2 * kFragments];  // of both channels, at positions 2t, 2t + 1 of each 8
#pragma unroll
      for (int i = 0; i < 2 * kFragments; i++) {
        const float low = values(v, tile, i / 2, i % 2, 0), high = values(v, tile, i / 2, i % 2, 1);
        of_lane[i] = Merging<Reduction>::two(low, high, channel, channel + 8);
        if (S::kOut % 16 && g + 8 >= values.channels)
          of_lane[i] = g < values.channels ? Reduction::of(low, channel) : Reduction::nothing();
      }
      // Each step halves the positions that a lane has, and doubles their channels.
#pragma unroll
      for (int step = 0, count = kFragments; step < 3; step++, count /= 2) {
        const bool upper = g >> step & 1;
#pragma unroll
        for (int i = 0; i < count; i++) {
          const Partial mine = upper ? of_lane[count + i] : of_lane[i],
                        given = upper ? of_lane[i] : of_lane[count + i];
          const Partial other = exchange(given, 4 << step);
          of_lane[i] = upper ? Reduction::merge(other, mine) : Reduction::merge(mine, other);
        }
      }
      static_assert(kFragments == 4, "a lane is left with a position");
      const int i = g % 2 * 4 + g / 2 % 2 * 2 + g / 4, position = tile.q + i / 2 * 8 + 2 * t + i % 2;
      if (position >= tile.positions) return;
      const Place<S>& place = values.place;
      const int64_t plane =
          place.tile.n * (kAll ? 1 : (S::kOut + 15) / 16) + (kAll ? 0 : place.first_channel / 16);
      const int64_t at = plane * place.channel_size() + int64_t(place.tile.first_row) * place.c.OW +
                         tile.plane * values.plane + position;
      if constexpr (kAll) write<Reduction>(sink.y, sink.after, of_lane[0], at);
      else sink.partial[at] = of_lane[0];
    }

   private:
    static __device__ __forceinline__ Partial exchange(const Partial& p, int mask) {
      Partial other;
#pragma unroll
      for (int i = 0; i < int(sizeof(Partial) / 4); i++)
        reinterpret_cast<float*>(&other)[i] =
            __shfl_xor_sync(~0u, reinterpret_cast<const float*>(&p)[i], mask);
      return other;
    }
  };
};

// -----------------------------------------------------------------------------------------------------
// positions

// partial (N, C, parts), a part a tile: reduce::Positions'. kLeaves: v becomes what the tail makes of it, for
// the sinks behind, which are not to scale it.
template <class What, class Tail, bool kLeaves = false> struct Positions {
  using Part = typename What::Part;
  static constexpr bool kLeavesValues = kLeaves;
  Part* partial;
  Tail tail;

  template <class S> struct Shared : Levels<S> {
    Part of_warp[kBlockWarps][16];
  };
  template <class S> struct Warp : IdleWarp {
    static constexpr bool kPlain =
        std::is_same_v<Tail, conv::Identity>;  // sums as they are, scaled at the end
    const Positions& sink;
    Shared<S>& room;
    Values<S, Tail> values;
    Running<What> running;
    int count;  // of this lane's positions

    __device__ __forceinline__ Warp(const Positions& sink, Shared<S>& room, const Place<S>& place)
        : sink(sink), room(room), values(sink.tail, room, place) {}
    __device__ __forceinline__ void begin(float scale) { values.begin(scale), running.begin(), count = 0; }
    __device__ __forceinline__ void accept(Accumulators& v, const WarpTile& tile, const NoOffset&) {
      const auto value = [&](int j, int u, int r) {
        if constexpr (kPlain) return v[j][2 * r + u];
        else return values(v, tile, j, u, r);
      };
      if (!running.started) running.start(value(0, 0, 0), value(0, 0, 1));
      const int t = threadIdx.x % 4;
#pragma unroll
      for (int j = 0; j < kFragments; j++)
#pragma unroll
        for (int u = 0; u < 2; u++) {
          const bool real = tile.q + 8 * j + 2 * t + u < tile.positions;
          count += real;
#pragma unroll
          for (int r = 0; r < 2; r++) {
            const float own = value(j, u, r);
            running.add(r, own, real);
            if constexpr (kLeaves) v[j][2 * r + u] = own;
          }
        }
    }
    __device__ __forceinline__ void end() const {
      const int lane = threadIdx.x % 32;
      const int all = of_four(count);
#pragma unroll
      for (int r = 0; r < 2; r++) {
        Part part = running.part(r, all);
        if constexpr (kPlain) part = What::affine(part, all, values.unit[r], values.level[r]);
        if (lane % 4 == 0) room.of_warp[threadIdx.x / 32][lane / 4 + r * 8] = part;
      }
    }
    // A thread a channel, the warps in their order.
    __device__ void finish(const Place<S>& place) const {
      if (threadIdx.x >= values.channels) return;
      const Part all = together<What>(&room.of_warp[0][threadIdx.x], kBlockWarps, 16);
      const int64_t channel = place.tile.n * S::kOut + place.first_channel + threadIdx.x;
      sink.partial[channel * place.c.slots() + place.tile.slot] = all;
    }
  };
};

}  // namespace reduce::narrow3d
