// A sink (core/sinks.cuh) that sums up a pointwise tail of v over the positions of each channel of a sample: as
// moments, or as plain sums. In a row in float, over rows in double; parts are merged later, in their order.
#pragma once
#include "conv/tail.cuh"
#include "core/reduce.cuh"
#include "core/sinks.cuh"

namespace reduce {

// What is written of a part, from sums of (value - shift) and of its squares.
struct OfMoments {
  using Part = Moments<double>;
  static constexpr bool kShifts = true;
  static __device__ __forceinline__ Part of(double count, double shift, double sum, double square) {
    return Part::from_shifted(count, shift, sum, square);
  }
  static __device__ __forceinline__ Part scaled(const Part& p, double factor) {
    return {p.count, p.mean * factor, p.m2 * factor * factor};
  }
  static __device__ __forceinline__ Part merged(const Part& a, const Part& b) { return a.merge(b); }
  static __device__ __forceinline__ Part of_lane(const Part& p, int mask) {
    return {__shfl_xor_sync(~0u, p.count, mask), __shfl_xor_sync(~0u, p.mean, mask), __shfl_xor_sync(~0u, p.m2, mask)};
  }
};
struct OfSums {
  using Part = double;
  static constexpr bool kShifts = false;  // so that infinities stay what they are
  static __device__ __forceinline__ Part of(double, double, double sum, double) { return sum; }
  static __device__ __forceinline__ Part scaled(Part p, double factor) { return p * factor; }
  static __device__ __forceinline__ Part merged(Part a, Part b) { return a + b; }
  static __device__ __forceinline__ Part of_lane(Part p, int mask) { return __shfl_xor_sync(~0u, p, mask); }
};

// `count` parts, `step` apart, in their order.
template <class What> __device__ typename What::Part together(const typename What::Part* parts, int count, int step) {
  typename What::Part all = parts[0];
#pragma unroll 1
  for (int i = 1; i < count; i++) all = What::merged(all, parts[i * step]);
  return all;
}

// A thread's sums of two channels' values.
template <class What> struct Running {
  float shift[2], of_row[2], square_of_row[2];
  double sum[2], square[2];
  bool started;

  __device__ __forceinline__ void begin() {
    started = !What::kShifts;
#pragma unroll
    for (int half = 0; half < 2; half++)
      shift[half] = of_row[half] = square_of_row[half] = 0, sum[half] = square[half] = 0;
  }
  // The first value of four lanes' is the shift.
  __device__ __forceinline__ void start(float low, float high) {
    started = true;
    shift[0] = __shfl_sync(~0u, low, threadIdx.x % 32 & ~3), shift[1] = __shfl_sync(~0u, high, threadIdx.x % 32 & ~3);
  }
  __device__ __forceinline__ void add(int half, float value, bool real) {
    const float moved = real ? (What::kShifts ? value - shift[half] : value) : 0.f;
    of_row[half] += moved;
    if (What::kShifts) square_of_row[half] = fmaf(moved, moved, square_of_row[half]);
  }
  __device__ __forceinline__ void end_row() {
#pragma unroll
    for (int half = 0; half < 2; half++) {
      sum[half] += of_row[half], square[half] += square_of_row[half];
      of_row[half] = square_of_row[half] = 0;
    }
  }
  // Of the four lanes that share a channel; count: of this one's values.
  __device__ __forceinline__ typename What::Part part(int half, double count) const {
    auto part = What::of(count, shift[half], sum[half], square[half]);
    part = What::merged(part, What::of_lane(part, 1));
    return What::merged(part, What::of_lane(part, 2));
  }
};

// partial (N, C, parts). tail as store::Strips'; of conv::Identity sums are scaled at the end.
template <class What, class Tail> struct Positions {
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
    int64_t row;  // its first element in a plane
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
    template <class Offset> __device__ __forceinline__ void accept(Accumulators<kTiles>& v, const Offset& offset) {
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
          for (int half = 0; half < 2; half++)
            running.add(half, value(j, i, half), j * 8 + 2 * t + i < place.columns);
      running.end_row(), row += place.width();
    }
    __device__ __forceinline__ void finish() const {
      const int t = threadIdx.x % 4, parts = place.parts();
      int mine = 0;
      for (int j = 0; j < kTiles; j++)
        mine += (j * 8 + t * 2 < place.columns) + (j * 8 + t * 2 + 1 < place.columns);
#pragma unroll
      for (int half = 0; half < 2; half++) {
        const int own = half * 8 + threadIdx.x % 32 / 4;
        const float2 power = place.unscale(own);
        auto part = running.part(half, double(mine) * place.rows());
        if (kPlain) part = What::scaled(part, double(power.x) * double(power.y));
        if (t > 0 || place.channel(own) >= Place::kChannels || !place.is_part()) continue;
        sink.partial[(place.first + own) * parts + place.part()] = part;
      }
    }

   private:
    __device__ __forceinline__ int existing(int own) const { return min(place.channel(own), Place::kChannels - 1); }
  };
};

}  // namespace reduce
