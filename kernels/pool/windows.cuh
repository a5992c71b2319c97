// A sink (core/sinks.cuh) that pools a pointwise tail of v: the largest, the smallest or the sum of each window, and
// what the tail makes of that. Windows don't overlap; rows and columns that fill none are left out. Only they are
// written.
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

// y (N, C, PH, PW).
template <class T, class Pool, class Tail> struct Pooled {
  T* y;
  Tail tail;

  using Reduction = typename Pool::Reduction;
  static constexpr int kRowGroup = Pool::kHeight;
  // Until a window's rows are complete, a thread keeps of two neighbouring columns one value, or both where windows
  // of an odd width may part them.
  static constexpr int kKept = Pool::kWidth % 2 == 0 ? 1 : 2;
  static constexpr int kWidth = Pool::kWidth / (3 - kKept);  // kept values that a window has in a row
  // Kept values of a channel in shared memory; no bank conflicts.
  template <class Loop> static constexpr int kPitch = Loop::kColumns / 2 * kKept + 4 * kKept;

  template <class Loop> struct Shared {
    alignas(16) float kept[Loop::kBlockChannels][kPitch<Loop>];
  };

  template <class Loop> struct Warp : sinks::IdleWarp {
    static constexpr int kTiles = Loop::kTiles, kColumns = 8 * kTiles, kStagingPitch = kPitch<Loop>;
    using Place = typename Loop::Place;
    const Place& place;
    const Tail& tail;
    float* const staging;  // [16][kStagingPitch]: kept values
    T* const y;
    T* out;                // the next row of windows
    int window_row;        // the next of the rows of a window
    float kept[2][kTiles][kKept];
    typename Tail::Channel channel[2];

    __device__ __forceinline__ Warp(const Pooled& sink, Shared<Loop>& shared, const Place& place)
        : place(place), tail(sink.tail), staging(&shared.kept[0][0] + place.first_own * kStagingPitch),
          y(sink.y) {
#pragma unroll
      for (int half = 0; half < 2; half++) channel[half] = channel_of(half * 8 + threadIdx.x % 32 / 4);
    }
    __device__ __forceinline__ int pooled_height() const { return place.height() / Pool::kHeight; }
    __device__ __forceinline__ int pooled_width() const { return place.width() / Pool::kWidth; }

    __device__ __forceinline__ void begin() {
      out = y + (place.first * pooled_height() + place.row() / Pool::kHeight) * pooled_width() +
            place.column() / Pool::kWidth;
      window_row = 0;
    }
    template <class Offset> __device__ __forceinline__ void accept(Accumulators<kTiles>& v, const Offset& offset) {
      const int g = threadIdx.x % 32 / 4;
#pragma unroll
      for (int half = 0; half < 2; half++) {
        const float2 power = place.unscale(half * 8 + g);
        const auto before = [&](float value) {
          if constexpr (!std::is_same_v<Offset, sinks::NoOffset>) value += offset[half];
          return tail.before(value * power.x * power.y, channel[half]);
        };
#pragma unroll
        for (int j = 0; j < kTiles; j++) {
          const float two[2] = {before(v[j][half * 2]), before(v[j][half * 2 + 1])};
#pragma unroll
          for (int k = 0; k < kKept; k++) {
            const float value = kKept == 1 ? Reduction::merge(two[0], two[1]) : two[k];
            float& so_far = kept[half][j][k];
            so_far = window_row == 0 ? value : Reduction::merge(so_far, value);
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
      return tail.channel(place.sample(), min(place.channel(own), Place::kChannels - 1));
    }
    __device__ __forceinline__ void stage() const {
      const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
      __syncwarp();  // the last windows have been read
#pragma unroll
      for (int half = 0; half < 2; half++)
#pragma unroll
        for (int j = 0; j < kTiles; j++) {
          float* const to = staging + (half * 8 + g) * kStagingPitch + (j * 4 + t) * kKept;
          if (kKept == 1) to[0] = kept[half][j][0];
          else *reinterpret_cast<float2*>(to) = make_float2(kept[half][j][0], kept[half][j][kKept - 1]);
        }
    }
    // The row of windows that is complete: a lane has every 32nd of a channel.
    __device__ __forceinline__ void write_row() {
      const int lane = threadIdx.x % 32, windows = place.columns / Pool::kWidth;
      const int64_t plane = int64_t(pooled_height()) * pooled_width();
      window_row = 0;
      __syncwarp();  // these windows have been written
#pragma unroll
      for (int first = 0; first < kColumns / Pool::kWidth; first += 32) {
        const int window = first + lane;
        const float* from = staging + min(window, kColumns / Pool::kWidth - 1) * kWidth;
        T* to = out + window;
#pragma unroll 4
        for (int own = 0; own < 16; own++, from += kStagingPitch, to += plane) {
          float pooled = from[0];
#pragma unroll
          for (int i = 1; i < kWidth; i++) pooled = Reduction::merge(pooled, from[i]);
          if (window < windows && place.real(own)) *to = T(tail.after(pooled, channel_of(own)));
        }
      }
      out += pooled_width();
    }
  };
};

// The same windows one by one (conv/exact.cuh).
template <class Values, class T, class Pool, class Tail> struct ExactWindows {
  Values v;
  T* y;
  Tail tail;
  HOST_DEVICE int columns() const { return v.width() / Pool::kWidth; }
  HOST_DEVICE int64_t windows() const { return int64_t(v.height() / Pool::kHeight) * columns(); }
  HOST_DEVICE int64_t results() const { return Values::kOut * windows(); }  // of a sample
  __device__ void operator()(int64_t n, int64_t i) const {
    const int c = int(i / windows()), row = int(i % windows() / columns()), column = int(i % columns());
    const typename Tail::Channel channel = tail.channel(n, c);
    float pooled = Pool::Reduction::kFirst;
#pragma unroll 1
    for (int at = 0; at < Pool::kHeight * Pool::kWidth; at++) {
      const float value = v(n, c, 0, row * Pool::kHeight + at / Pool::kWidth, column * Pool::kWidth + at % Pool::kWidth);
      pooled = Pool::Reduction::merge(pooled, tail.before(value, channel));
    }
    y[n * results() + i] = T(tail.after(pooled, channel));
  }
};

template <class Filter, class Pool, bool kLongRows>
using PooledTile = conv::narrow2d::Tile<Filter, kLongRows ? 128 / Pool::kWidth * Pool::kWidth : 0, Pool::kHeight>;

// y = tail.after(windows of tail.before(conv2d(x, weight))), without the convolution's bias. kLongRows: are rows of x
// longer than a tile?
template <class Filter, class Pool, bool kLongRows, class T, class Tail>
void pooled(const Out<T>& y, const In<value_t>& x, const In<value_t>& weight, const Tail& tail, cudaStream_t stream) {
  using Values = conv::Exact<Filter::kIn, Filter::kOut, 1, Filter::kHeight, Filter::kWidth>;
  const ExactWindows<Values, T, Pool, Tail> each{{x, weight}, y, tail};
  expect_elements("y", y, x.size(0) * each.results());
  conv::narrow2d::exact<PooledTile<Filter, Pool, kLongRows>>(x, weight, each, stream, Pooled<T, Pool, Tail>{y, tail});
}

}  // namespace pool
