// A sink (core/sinks.cuh) that stores a pointwise tail of v, rows of any length, in whole sectors.
//
// Rows of a channel, and the tiles of a row, follow one another in memory. They pass through shared memory,
// where an element lies as it does in its sector; what fills no sector waits there for the next tile. Only
// the first and the last sector of a strip, and of a row that is cut among blocks, are written by elements.
#pragma once
#include "conv/narrow2d_exact.cuh"
#include "core/sinks.cuh"
#include "store/edge.cuh"

namespace store {

// y (N, C, OH, OW) = tail(v, channel, at):
//   struct Channel                                                what is the same for a channel of a sample
//   Channel channel(int64_t n, int c) const                       c < C
//   T operator()(float v, const Channel&, int64_t at) const       at: an element of y, always one that exists
// kScaled: v comes as products leave it; else a sink in front has left its tail's values in v's place.
template <class T, class Tail, bool kScaled = true> struct Strips {
  T* y;
  Tail tail;

  static constexpr int kRowGroup = 1;
  static constexpr int kSector = 32 / sizeof(T), kVector = 16 / sizeof(T);  // elements
  template <class Loop>
  static constexpr int kPitch = Loop::kColumns + kSector;  // from channel to channel: 8 banks on
  template <class Loop> struct Shared {
    alignas(16) T rows[Loop::kBlockChannels][kPitch<Loop>];
  };

  template <class Loop> struct Warp : sinks::IdleWarp {
    static constexpr int kTiles = Loop::kTiles, kStagingPitch = kPitch<Loop>;
    static constexpr bool kWholeRows = Loop::kStride == 0;
    using Place = typename Loop::Place;
    const Place& place;
    const Tail& tail;
    T* const y;
    T* const staging;  // [16][kStagingPitch]
    T* out;            // the first element of the next tile, of the warp's first channel
    int left, behind;  // tiles that are still to come; elements of a channel since the strip, or the row's
                       // tile, began
    int staged;        // columns that wait to be written
    typename Tail::Channel channel[2];

    __device__ __forceinline__ Warp(const Strips& sink, Shared<Loop>& shared, const Place& place)
        : place(place), tail(sink.tail), y(sink.y),
          staging(&shared.rows[0][0] + place.first_own * kStagingPitch) {
#pragma unroll
      for (int half = 0; half < 2; half++)
        channel[half] = tail.channel(place.sample(), existing(half * 8 + threadIdx.x % 32 / 4));
    }
    __device__ __forceinline__ void begin() {
      out = y + (place.first * place.height() + place.row()) * place.width() + place.column();
      left = place.rows() * Loop::kRowTiles, behind = 0, staged = 0;
    }
    template <class Offset>
    __device__ __forceinline__ void accept(Accumulators<kTiles>& v, const Offset& offset) {
      const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
      __syncwarp();  // what waits lies where it belongs
#pragma unroll
      for (int half = 0; half < 2; half++) {
        const int own = half * 8 + g;
        const float2 power = kScaled ? place.unscale(own) : make_float2(1, 1);
        T* const row = staging + own * kStagingPitch + phase(own) + 2 * t;
        const int64_t at = out - y + (existing(own) - place.channel(0)) * plane();
#pragma unroll
        for (int i = 0; i < kTiles * 2; i++) {
          const int column = i / 2 * 8 + i % 2;
          float value = v[i / 2][half * 2 + i % 2];
          if constexpr (!std::is_same_v<Offset, sinks::NoOffset>) value += offset[half];
          row[column] =
              T(tail(value * power.x * power.y, channel[half], at + min(column + 2 * t, place.columns - 1)));
        }
      }
      staged = place.columns, left--;
    }
    __device__ __forceinline__ void overlap() {
      if (staged > 0) write_tile();
      if constexpr (sinks::fetches<Tail>)
        sinks::fetch_tile<Loop>(tail, place, out - y - place.first * plane());
    }
    __device__ __forceinline__ void end() { overlap(); }

   private:
    __device__ __forceinline__ int64_t plane() const { return int64_t(place.height()) * place.width(); }
    __device__ __forceinline__ int existing(int own) const {
      return min(place.channel(own), Place::kChannels - 1);
    }
    // Where in its sector the row begins.
    __device__ __forceinline__ int phase(int own) const {
      return int((uint32_t(uintptr_t(out) / sizeof(T)) + own * uint32_t(plane())) % kSector);
    }
    // Elements of a channel's staging that are to be written: whole sectors; all of them, if the row is the
    // strip's last or rows are cut into tiles.
    struct Span {
      int lead, from, until;
    };
    __device__ __forceinline__ Span span(int own, bool last) const {
      const int lead = phase(own), to = lead + staged;
      const bool real = place.channel(own) < Place::kChannels;
      return {lead, max(0, lead - behind), real ? (last ? to : to / kSector * kSector) : 0};
    }
    __device__ __forceinline__ void write_tile() {
      const bool last = left == 0 || !kWholeRows;
      __syncwarp();  // the tile is there
      write_vectors(last);
      if (last || behind < kSector) write_edges(last);
      if (!last) keep_rest();
      out += kWholeRows ? staged : place.width(), behind += kWholeRows ? staged : 0, staged = 0;
    }
    // Some are read before the first of them is written: a load's wait is that of all.
    __device__ __forceinline__ void write_vectors(bool last) {
      constexpr int kVectors = kStagingPitch / kVector, kAll = 16 * kVectors, kAtOnce = 6;
      const uint4* const waiting = reinterpret_cast<const uint4*>(staging);
#pragma unroll 1
      for (int first = threadIdx.x % 32; first < kAll; first += 32 * kAtOnce) {
        uint4 vectors[kAtOnce];
#pragma unroll
        for (int k = 0; k < kAtOnce; k++) vectors[k] = waiting[min(first + 32 * k, kAll - 1)];
#pragma unroll
        for (int k = 0; k < kAtOnce; k++) {
          const int i = first + 32 * k, own = i / kVectors, begin = i % kVectors * kVector;
          const Span own_span = span(min(own, 15), last);
          if (i < kAll && own_span.from <= begin && begin + kVector <= own_span.until)
            *reinterpret_cast<uint4*>(out + own * plane() - own_span.lead + begin) = vectors[k];
        }
      }
    }
    // A channel's elements before its first whole vector, and behind its last one: a lane each.
    __device__ __forceinline__ void write_edges(bool last) {
      const int own = threadIdx.x % 32 / 2;
      const auto [lead, from, until] = span(own, last);
      const int first = min((from + kVector - 1) / kVector * kVector, until);
      const bool head = threadIdx.x % 2 == 0;
      const int begin = head ? from : max(first, until / kVector * kVector), end = head ? first : until;
      T* const to = out + own * plane() - lead;
      const T* const row = staging + own * kStagingPitch;
      if (staged >= kVector) store_edge(to, row, begin, max(end - begin, 0), head);
      else
        for (int e = begin; e < end; e++) to[e] = row[e];
    }
    // What fills no sector comes first, where the next row's sectors begin.
    __device__ __forceinline__ void keep_rest() {
      constexpr int kOwn = 16 * kSector / 32;
      T rest[kOwn];
#pragma unroll
      for (int k = 0; k < kOwn; k++) rest[k] = rest_of(k)[0];
      __syncwarp();  // all has been read
#pragma unroll
      for (int k = 0; k < kOwn; k++)
        staging[(k * 32 + threadIdx.x % 32) / kSector * kStagingPitch + threadIdx.x % kSector] = rest[k];
    }
    __device__ __forceinline__ const T* rest_of(int k) const {
      const int own = (k * 32 + threadIdx.x % 32) / kSector, to = phase(own) + staged;
      return staging + own * kStagingPitch + to / kSector * kSector + threadIdx.x % kSector;
    }
  };
};

// Each stored.to = stored.tail(conv2d(x, weight)), without the convolution's bias.
template <class Tile, class... T, class... Tails>
void pointwise(const In<value_t>& x, const In<value_t>& weight, cudaStream_t stream,
               const conv::Stored<T, Tails>&... stored) {
  using Filter = typename Tile::Filter;
  using conv::narrow2d::kShared;
  static_assert(
      kShared<Tile, Strips<T, Tails>..., conv::narrow2d::Doubt> == kShared<Tile, Strips<T, Tails>...>,
      "as planned");
  const conv::Exact<Filter::kIn, Filter::kOut, 1, Filter::kHeight, Filter::kWidth> values(x, weight);
  const auto each = conv::all_of(conv::each_value<T>(values, stored.to, stored.tail)...);
  (expect_elements("a result", stored.to, x.size(0) * Filter::kOut * values.positions()), ...);
  conv::narrow2d::exact<Tile>(x, weight, each, stream, Strips<T, Tails>{stored.to, stored.tail}...);
}

}  // namespace store
