// Sinks (core/sinks.cuh) of a 2-D convolution of few channels in that reduce a pointwise tail of v: over all
// channels, or over the positions of each channel of a sample; in a fixed order. tail as store::Strips'.
#pragma once
#include "core/sinks.cuh"
#include "reduce/channels.cuh"
#include "reduce/positions.cuh"

namespace reduce {

// Values of several lanes meet in shared memory, where a thread then finds all of a position: without a
// shuffle, and with one barrier a row.
//
// y (N, OH, OW) = after(reduction over the channels of tail(v, channel, at), at of y). tail as
// store::Strips', its `at` an element of (N, C, OH, OW). Where a block hasn't all channels, partial (N,
// blocks, OH, OW) in y's place. It has to be the last sink.
template <class T, class Reduction, class Tail, class After = AsItIs> struct Channels {
  using Partial = typename Reduction::Partial;
  T* y;
  Tail tail;
  After after;
  Partial* partial = nullptr;

  static constexpr int kRowGroup = 1;
  template <class Loop> struct Shared {
    alignas(16) Meeting<Partial, Loop::kTeamThreads / 4, Loop::kColumns> meeting;
  };

  template <class Loop> struct Warp : sinks::IdleWarp {
    static constexpr int kTiles = Loop::kTiles, kColumns = Loop::kColumns;
    static constexpr bool kAll = Loop::kChannelBlocks == 1;
    static_assert(kColumns == Loop::kTeamThreads, "a thread finds a position");
    using Place = typename Loop::Place;
    const Place& place;
    const Channels& sink;
    Shared<Loop>& shared;
    int64_t out, behind;  // the next tile's first element: of the result, and of a plane
    int64_t before;       // of the result, where the tile that waits begins
    int waits;            // columns that wait to be reduced
    typename Tail::Channel channel[2];

    __device__ __forceinline__ Warp(const Channels& sink, Shared<Loop>& shared, const Place& place)
        : place(place), sink(sink), shared(shared) {
#pragma unroll
      for (int half = 0; half < 2; half++)
        channel[half] = sink.tail.channel(place.sample(), existing(half * 8 + threadIdx.x % 32 / 4));
    }
    __device__ __forceinline__ void begin() {
      const int64_t block = kAll ? 0 : (place.channel(0) - place.first_own) / Loop::kBlockChannels;
      const int64_t plane = place.sample() * Loop::kChannelBlocks + block;
      behind = int64_t(place.row()) * place.width() + place.column(), out = plane * this->plane() + behind;
      waits = 0;
    }
    template <class Offset>
    __device__ __forceinline__ void accept(Accumulators<kTiles>& v, const Offset& offset) {
      const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4, row = place.first_own / 2 + g;
      float factor[2];
      unscale(factor, v);
      if (waits) place.sync_team();  // the row before has been read
      const int64_t first = (place.sample() * Place::kChannels + existing(g)) * plane() + behind;
      const int64_t eighth = (existing(g + 8) - existing(g)) * plane();
      const bool real[2] = {place.channel(g) < Place::kChannels, place.channel(g + 8) < Place::kChannels};
#pragma unroll
      for (int j = 0; j < kTiles; j++) {
        Partial both[2];
#pragma unroll
        for (int i = 0; i < 2; i++) {
          float value[2];
#pragma unroll
          for (int half = 0; half < 2; half++) {
            const int64_t at = first + half * eighth + min(j * 8 + 2 * t + i, place.columns - 1);
            const float given = v[j][half * 2 + i] + (is_none<Offset> ? 0.f : offset[half]);
            value[half] = sink.tail(given * factor[half], channel[half], at);
          }
          both[i] = Merging<Reduction>::two(value[0], value[1], place.channel(g), place.channel(g + 8));
          if (Place::kChannels % Loop::kBlockChannels && !real[1])
            both[i] = real[0] ? Reduction::of(value[0], place.channel(g)) : Reduction::nothing();
        }
        shared.meeting.put(row, j * 8 + 2 * t, both[0], both[1]);
      }
      const int on = Loop::kStride == 0 ? place.columns : place.width();
      waits = place.columns, before = out, out += on, behind += on;
    }
    // All warps of the team have met since the last row.
    __device__ __forceinline__ void overlap() const {
      const int position = threadIdx.x % kColumns;
      if (position >= waits) return;
      const Partial all = shared.meeting.template all<Reduction>(position);
      const int64_t at = before + position;
      if constexpr (kAll) write<Reduction>(sink.y, sink.after, all, at);
      else sink.partial[at] = all;
    }
    __device__ __forceinline__ void end() const {
      place.sync_team();  // all warps' values are there
      overlap();
    }

   private:
    template <class Offset> static constexpr bool is_none = std::is_same_v<Offset, sinks::NoOffset>;
    __device__ __forceinline__ int64_t plane() const { return int64_t(place.height()) * place.width(); }
    __device__ __forceinline__ int existing(int own) const {
      return min(place.channel(own), Place::kChannels - 1);
    }
    // One factor, or two where their product is no float32.
    __device__ __forceinline__ void unscale(float (&factor)[2], Accumulators<kTiles>& v) const {
      bool twice = false;
      float first[2];
#pragma unroll
      for (int half = 0; half < 2; half++) {
        const float2 power = place.unscale(half * 8 + threadIdx.x % 32 / 4);
        factor[half] = power.x * power.y, first[half] = power.x;
        const bool fits = factor[half] != 0 && fabsf(factor[half]) < INFINITY;
        if (!fits) factor[half] = power.y, twice = true;
        else first[half] = 1.f;
      }
      if (!__any_sync(~0u, twice)) return;
#pragma unroll
      for (int i = 0; i < kTiles * 4; i++) v[i / 4][i % 4] *= first[i % 4 / 2];
    }
  };
};

// partial (N, C, parts). tail as store::Strips'; of conv::Identity sums are scaled at the end. kLeaves: v
// becomes what the tail makes of it, for the sinks behind, which are not to scale it.
template <class What, class Tail, bool kLeaves = false> struct Positions {
  typename What::Part* partial;
  Tail tail;

  static constexpr int kRowGroup = 1;
  template <class Loop> struct Shared : sinks::NoRoom<Positions> {};
  template <class Loop> struct Warp : sinks::IdleWarp {
    static constexpr bool kPlain = std::is_same_v<Tail, conv::Identity>;
    static constexpr int kTiles = Loop::kTiles;
    using Place = typename Loop::Place;
    const Positions& sink;
    const Place& place;
    Running<What> running;
    int64_t row;  // the tile's first element in a plane
    typename Tail::Channel channel[2];

    __device__ __forceinline__ Warp(const Positions& sink, Shared<Loop>&, const Place& place)
        : sink(sink), place(place) {
#pragma unroll
      for (int half = 0; half < 2; half++)
        channel[half] = sink.tail.channel(place.sample(), existing(half * 8 + threadIdx.x % 32 / 4));
    }
    __device__ __forceinline__ void begin() {
      running.begin(), row = int64_t(place.row()) * place.width() + place.column();
    }
    __device__ __forceinline__ void overlap() const { sinks::fetch_tile<Loop>(sink.tail, place, row); }
    template <class Offset>
    __device__ __forceinline__ void accept(Accumulators<kTiles>& v, const Offset& offset) {
      const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
      const float2 power[2] = {place.unscale(g), place.unscale(g + 8)};
      const int64_t plane = int64_t(place.height()) * place.width();
      const auto value = [&](int j, int i, int half) {
        const float given = v[j][half * 2 + i] + offset[half];
        if constexpr (kPlain) {
          return given;
        } else {
          const int64_t first = (place.sample() * Place::kChannels + existing(half * 8 + g)) * plane + row;
          const int column = min(j * 8 + 2 * t + i, place.columns - 1);
          return sink.tail(given * power[half].x * power[half].y, channel[half], first + column);
        }
      };
      if (!running.started) running.start(value(0, 0, 0), value(0, 0, 1));
#pragma unroll
      for (int j = 0; j < kTiles; j++)
#pragma unroll
        for (int i = 0; i < 2; i++)
#pragma unroll
          for (int half = 0; half < 2; half++) {
            const float own = value(j, i, half);
            running.add(half, own, j * 8 + 2 * t + i < place.columns);
            if constexpr (kLeaves) v[j][half * 2 + i] = own;
          }
      running.end_row(), row += Loop::kStride == 0 ? place.columns : place.width();
    }
    __device__ __forceinline__ void finish() const {
      const int t = threadIdx.x % 4, parts = place.parts();
      int mine = (Loop::kRowTiles - 1) * kTiles * 2;  // of a row; its last tile may have fewer
      for (int j = 0; j < kTiles; j++)
        mine += (j * 8 + t * 2 < place.columns) + (j * 8 + t * 2 + 1 < place.columns);
      const double count = double(of_four(mine)) * place.rows();
#pragma unroll
      for (int half = 0; half < 2; half++) {
        const int own = half * 8 + threadIdx.x % 32 / 4;
        const float2 power = place.unscale(own);
        auto part = running.part(half, count);
        if (kPlain) part = What::affine(part, count, double(power.x) * double(power.y), 0);
        if (t > 0 || place.channel(own) >= Place::kChannels || !place.is_part()) continue;
        sink.partial[(place.first + own) * parts + place.part()] = part;
      }
    }

   private:
    __device__ __forceinline__ int existing(int own) const {
      return min(place.channel(own), Place::kChannels - 1);
    }
  };
};

}  // namespace reduce
