// A sink (core/sinks.cuh) that pools a pointwise tail of v: the largest, the smallest or the sum of each
// window, and what the tail makes of that. Windows don't overlap; rows and columns that fill none are left
// out. Only they are written, and where backward asks for it the winner's place in each window, and its v.
//
//   struct Channel                                        what is the same for a channel of a sample
//   Channel channel(int64_t n, int c) const               c < C
//   float before(float v, const Channel&) const           what a window is of
//   float after(float pooled, const Channel&) const
#pragma once
#include "conv/narrow2d_exact.cuh"
#include "core/sinks.cuh"
#include "pool/reduction.cuh"

namespace pool {

// What is kept of winners, like y: places, by rows of a window, and v.
struct NoWinners {
  static constexpr bool kExist = false, kKeepV = false;
};
template <bool kKeepV_> struct Winners {
  static constexpr bool kExist = true, kKeepV = kKeepV_;
  uint8_t* place;
  float* v = nullptr;
};
inline NoWinners winners() { return {}; }
inline Winners<false> winners(uint8_t* place) { return {place}; }
inline Winners<true> winners(uint8_t* place, float* v) { return {place, v}; }

// y (N, C, PH, PW).
template <class T, class Pool, class Tail, class Kept> struct Pooled {
  T* y;
  Tail tail;
  Kept winners;

  using Reduction = typename Pool::Reduction;
  static constexpr int kRowGroup = Pool::kHeight;
  // Until a window's rows are complete, a thread keeps of two neighbouring columns one value, or both where
  // windows of an odd width may part them.
  static constexpr int kKept = Pool::kWidth % 2 == 0 ? 1 : 2;
  static constexpr int kWidth = Pool::kWidth / (3 - kKept);  // kept values that a window has in a row
  // Kept values of a channel in shared memory; no bank conflicts.
  template <class Loop> static constexpr int kPitch = Loop::kColumns / 2 * kKept + 4 * kKept;

  template <class Loop> struct Values {
    alignas(16) float kept[Loop::kBlockChannels][kPitch<Loop>];
  };
  template <class Loop> struct OfV {
    float v[Loop::kBlockChannels][kPitch<Loop>];
  };
  template <class Loop> struct Places {
    uint8_t places[Loop::kBlockChannels][kPitch<Loop>];
  };
  template <bool kHas, class Room> using If = std::conditional_t<kHas, Room, sinks::NoRoom<Room>>;
  template <class Loop>
  struct Shared : Values<Loop>, If<Kept::kKeepV, OfV<Loop>>, If<Kept::kExist, Places<Loop>> {};

  template <class Loop> struct Warp : sinks::IdleWarp {
    static constexpr int kTiles = Loop::kTiles, kColumns = 8 * kTiles, kStagingPitch = kPitch<Loop>;
    using Place = typename Loop::Place;
    const Place& place;
    const Pooled& sink;
    Shared<Loop>& shared;
    int64_t out;     // the next row of windows
    int window_row;  // the next of the rows of a window
    float kept[2][kTiles][kKept];
    // Of what is kept: its v, and four places to a register.
    float of_v[Kept::kKeepV ? 2 : 1][kTiles][kKept];
    uint32_t places[Kept::kExist ? 2 * kTiles * kKept / 4 : 1];
    typename Tail::Channel channel[2];

    __device__ __forceinline__ Warp(const Pooled& sink, Shared<Loop>& shared, const Place& place)
        : place(place), sink(sink), shared(shared) {
#pragma unroll
      for (int half = 0; half < 2; half++) channel[half] = channel_of(half * 8 + threadIdx.x % 32 / 4);
    }
    __device__ __forceinline__ int pooled_height() const { return place.height() / Pool::kHeight; }
    __device__ __forceinline__ int pooled_width() const { return place.width() / Pool::kWidth; }

    __device__ __forceinline__ void begin() {
      out = (place.first * pooled_height() + place.row() / Pool::kHeight) * pooled_width() +
            place.column() / Pool::kWidth;
      window_row = 0;
    }
    template <class Offset>
    __device__ __forceinline__ void accept(Accumulators<kTiles>& v, const Offset& offset) {
      const int g = threadIdx.x % 32 / 4;
#pragma unroll
      for (int half = 0; half < 2; half++) {
        const float2 power = place.unscale(half * 8 + g);
        const auto real = [&](float value) {
          if constexpr (!std::is_same_v<Offset, sinks::NoOffset>) value += offset[half];
          return value * power.x * power.y;
        };
#pragma unroll
        for (int j = 0; j < kTiles; j++) {
          const float own[2] = {real(v[j][half * 2]), real(v[j][half * 2 + 1])};
          const float two[2] = {sink.tail.before(own[0], channel[half]),
                                sink.tail.before(own[1], channel[half])};
#pragma unroll
          for (int k = 0; k < kKept; k++) {
            if constexpr (Kept::kExist) {
              const bool second = kKept == 1 ? takes<Reduction>(two[1], two[0]) : k;
              take(half, j, k, second ? two[1] : two[0], second ? own[1] : own[0],
                   window_row * Pool::kWidth + (kKept == 1 && second));
            } else {
              const float value = kKept == 1 ? Reduction::merge(two[0], two[1]) : two[k];
              float& so_far = kept[half][j][k];
              so_far = window_row == 0 ? value : Reduction::merge(so_far, value);
            }
          }
        }
      }
      if (++window_row == Pool::kHeight) stage();
    }
    __device__ __forceinline__ void overlap() {
      if (window_row == Pool::kHeight) write_row();
    }
    __device__ __forceinline__ void end() { overlap(); }

   private:
    __device__ __forceinline__ typename Tail::Channel channel_of(int own) const {
      return sink.tail.channel(place.sample(), min(place.channel(own), Place::kChannels - 1));
    }
    // A value of the row that is the window's next; its place as if its columns were the window's first.
    __device__ __forceinline__ void take(int half, int j, int k, float value, float own, int where) {
      float& so_far = kept[half][j][k];
      const bool wins = (window_row == 0) | takes<Reduction>(value, so_far);
      so_far = wins ? value : so_far;
      if constexpr (Kept::kKeepV) of_v[half][j][k] = wins ? own : of_v[half][j][k];
      const int index = (half * kTiles + j) * kKept + k;
      uint32_t& four = places[index / 4];
      const uint32_t with = (four & ~(255u << index % 4 * 8)) | uint32_t(where) << index % 4 * 8;
      four = wins ? with : four;
    }
    __device__ __forceinline__ void stage() const {
      const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
      __syncwarp();  // the last windows have been read
#pragma unroll
      for (int half = 0; half < 2; half++)
#pragma unroll
        for (int j = 0; j < kTiles; j++) {
          const int channel = place.first_own + half * 8 + g, first = (j * 4 + t) * kKept;
          put(&shared.kept[channel][first], kept[half][j]);
          if constexpr (Kept::kKeepV) put(&shared.v[channel][first], of_v[half][j]);
          if constexpr (Kept::kExist) {
#pragma unroll
            for (int k = 0; k < kKept; k++) {
              const int index = (half * kTiles + j) * kKept + k;
              shared.places[channel][first + k] = uint8_t(places[index / 4] >> index % 4 * 8);
            }
          }
        }
    }
    static __device__ __forceinline__ void put(float* to, const float (&values)[kKept]) {
      if (kKept == 1) to[0] = values[0];
      else *reinterpret_cast<float2*>(to) = make_float2(values[0], values[kKept - 1]);
    }
    // The row of windows that is complete: a lane has every 32nd of a channel.
    __device__ __forceinline__ void write_row() {
      const int lane = threadIdx.x % 32, windows = place.columns / Pool::kWidth;
      const int64_t plane = int64_t(pooled_height()) * pooled_width();
      window_row = 0;
      __syncwarp();  // these windows have been written
#pragma unroll
      for (int first = 0; first < kColumns / Pool::kWidth; first += 32) {
        const int window = first + lane, from = min(window, kColumns / Pool::kWidth - 1) * kWidth;
        int64_t to = out + window;
#pragma unroll 4
        for (int own = 0; own < 16; own++, to += plane) {
          const float* const values = &shared.kept[place.first_own + own][from];
          float pooled = values[0];
          int which = 0, where = 0;
          if constexpr (Kept::kExist) {
            find(pooled, which, where, values, &shared.places[place.first_own + own][from]);
          } else {
#pragma unroll
            for (int i = 1; i < kWidth; i++) pooled = Reduction::merge(pooled, values[i]);
          }
          if (window >= windows || !place.real(own)) continue;
          sink.y[to] = T(sink.tail.after(pooled, channel_of(own)));
          if constexpr (Kept::kExist) sink.winners.place[to] = uint8_t(where);
          if constexpr (Kept::kKeepV) sink.winners.v[to] = shared.v[place.first_own + own][from + which];
        }
      }
      out += pooled_width();
    }
    // Of a window's kept values the winner, which one it is, and its place.
    static __device__ __forceinline__ void find(float& pooled, int& which, int& where, const float* values,
                                                const uint8_t* places) {
      const auto place_of = [&](int i) { return places[i] + (kKept == 1 ? 2 * i : i); };
      where = place_of(0);
#pragma unroll
      for (int i = 1; i < kWidth; i++) {
        const float value = values[i];
        const int other = place_of(i);
        const bool later = other > where;
        if (later ? takes<Reduction>(value, pooled) : !takes<Reduction>(pooled, value))
          pooled = value, which = i, where = other;
      }
    }
  };
};

// The same windows one by one (conv/exact.cuh).
template <class Values, class T, class Pool, class Tail, class Kept> struct ExactWindows {
  Values v;
  T* y;
  Tail tail;
  Kept winners;
  HOST_DEVICE int columns() const { return v.width() / Pool::kWidth; }
  HOST_DEVICE int64_t windows() const { return int64_t(v.height() / Pool::kHeight) * columns(); }
  HOST_DEVICE int64_t results() const { return Values::kOut * windows(); }  // of a sample
  __device__ void operator()(int64_t n, int64_t i) const {
    const int c = int(i / windows()), row = int(i % windows() / columns()), column = int(i % columns());
    const typename Tail::Channel channel = tail.channel(n, c);
    float pooled = Pool::Reduction::kFirst, of_v = 0;
    int place = 0;
#pragma unroll 1
    for (int at = 0; at < Pool::kHeight * Pool::kWidth; at++) {
      const float own =
          v(n, c, 0, row * Pool::kHeight + at / Pool::kWidth, column * Pool::kWidth + at % Pool::kWidth);
      const float value = tail.before(own, channel);
      if constexpr (Kept::kExist) {
        if (at == 0 || takes<typename Pool::Reduction>(value, pooled)) pooled = value, of_v = own, place = at;
      } else {
        pooled = Pool::Reduction::merge(pooled, value);
      }
    }
    y[n * results() + i] = T(tail.after(pooled, channel));
    if constexpr (Kept::kExist) winners.place[n * results() + i] = uint8_t(place);
    if constexpr (Kept::kKeepV) winners.v[n * results() + i] = of_v;
  }
};

template <class Filter, class Pool, bool kLongRows>
using PooledTile =
    conv::narrow2d::Tile<Filter, kLongRows ? 128 / Pool::kWidth * Pool::kWidth : 0, Pool::kHeight>;

// y = tail.after(windows of tail.before(conv2d(x, weight))), without the convolution's bias. kLongRows: are
// rows of x longer than a tile?
template <class Filter, class Pool, bool kLongRows, class T, class Tail, class Kept>
void pooled(const Out<T>& y, const In<value_t>& x, const In<value_t>& weight, const Tail& tail,
            cudaStream_t stream, const Kept& winners) {
  using Values = conv::Exact<Filter::kIn, Filter::kOut, 1, Filter::kHeight, Filter::kWidth>;
  const ExactWindows<Values, T, Pool, Tail, Kept> each{{x, weight}, y, tail, winners};
  expect_elements("y", y, x.size(0) * each.results());
  const Pooled<T, Pool, Tail, Kept> sink{y, tail, winners};
  conv::narrow2d::exact<PooledTile<Filter, Pool, kLongRows>>(x, weight, each, stream, sink);
}

}  // namespace pool
