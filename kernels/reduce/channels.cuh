// A sink (core/sinks.cuh) that reduces a pointwise tail of v over all channels, in a fixed order: in a lane,
// across the lanes that have the same positions, across a team's warps. One block has all channels.
#pragma once
#include "core/sinks.cuh"
#include "core/tensor_core.cuh"

namespace reduce {

// Reductions: what is made of one value; what two such make; the result. NaN, infinities as PyTorch's.
struct Sum {
  using Partial = float;
  static __device__ __forceinline__ Partial nothing() { return 0.f; }
  static __device__ __forceinline__ Partial of(float value) { return value; }
  static __device__ __forceinline__ Partial merge(Partial a, Partial b) { return a + b; }
  static __device__ __forceinline__ float result(Partial p) { return p; }
};
struct Max : Sum {
  static __device__ __forceinline__ Partial nothing() { return -INFINITY; }
  static __device__ __forceinline__ Partial merge(Partial a, Partial b) { return tensor_core::max_nan(a, b); }
};
struct Min : Sum {
  static __device__ __forceinline__ Partial nothing() { return INFINITY; }
  static __device__ __forceinline__ Partial merge(Partial a, Partial b) { return tensor_core::min_nan(a, b); }
};
struct LogSumExp {
  struct Partial {  // Σ exp(value - most)
    float most, sum;
  };
  static __device__ __forceinline__ Partial nothing() { return {-INFINITY, 0.f}; }
  static __device__ __forceinline__ Partial of(float value) {
    return value == value ? Partial{value, 1.f} : Partial{-INFINITY, value};
  }
  static __device__ __forceinline__ Partial merge(const Partial& a, const Partial& b) {
    const float most = fmaxf(a.most, b.most), less = expf(fminf(a.most, b.most) - most);
    const float other = a.most == b.most ? 1.f : less;  // also of two infinities
    return {most, a.most >= b.most ? a.sum + b.sum * other : a.sum * other + b.sum};
  }
  static __device__ __forceinline__ float result(const Partial& p) { return p.most + logf(p.sum); }
};

struct AsItIs {
  __device__ __forceinline__ float operator()(float value, int64_t) const { return value; }
};

// y (N, OH, OW) = after(reduction over the channels of tail(v, channel, at), at of y). tail as
// store::Strips', its `at` an element of (N, C, OH, OW).
template <class T, class Reduction, class Tail, class After = AsItIs> struct Channels {
  T* y;
  Tail tail;
  After after;

  using Partial = typename Reduction::Partial;
  static constexpr int kRowGroup = 1;
  template <class Loop> struct Shared {
    alignas(16) Partial of_warp[2][Loop::kTeamThreads / 32][Loop::kColumns];  // rows take turns
  };

  template <class Loop> struct Warp : sinks::IdleWarp {
    static constexpr int kTiles = Loop::kTiles, kColumns = Loop::kColumns, kWarps = Loop::kTeamThreads / 32;
    static_assert(Loop::kChannelBlocks == 1, "one block has all channels");
    static_assert(kColumns == Loop::kTeamThreads && kTiles == 16, "a thread writes a position");
    using Place = typename Loop::Place;
    const Place& place;
    const Channels& sink;
    Shared<Loop>& shared;
    T* out;  // the next row
    int turn;
    typename Tail::Channel channel[2];

    __device__ __forceinline__ Warp(const Channels& sink, Shared<Loop>& shared, const Place& place)
        : place(place), sink(sink), shared(shared) {
#pragma unroll
      for (int half = 0; half < 2; half++)
        channel[half] = sink.tail.channel(place.sample(), existing(half * 8 + threadIdx.x % 32 / 4));
    }
    __device__ __forceinline__ void begin() {
      out = sink.y + (place.sample() * place.height() + place.row()) * place.width() + place.column();
      turn = 0;
    }
    template <class Offset> __device__ __forceinline__ void accept(Accumulators<kTiles>& v, const Offset& offset) {
      const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
      Partial of_lane[2 * kTiles];  // positions 8 (i / 2) + 2t + i % 2
      const int64_t row = out - sink.y - place.sample() * plane();
#pragma unroll
      for (int i = 0; i < 2 * kTiles; i++) {
        const int column = min(i / 2 * 8 + 2 * t + i % 2, place.columns - 1);
#pragma unroll
        for (int half = 0; half < 2; half++) {
          const int own = half * 8 + g;
          const float2 power = place.unscale(own);
          float value = v[i / 2][half * 2 + i % 2];
          if constexpr (!std::is_same_v<Offset, sinks::NoOffset>) value += offset[half];
          const int64_t at = (place.sample() * Place::kChannels + existing(own)) * plane() + row + column;
          const float of_tail = sink.tail(value * power.x * power.y, channel[half], at);
          const Partial one = place.channel(own) < Place::kChannels ? Reduction::of(of_tail) : Reduction::nothing();
          of_lane[i] = half ? Reduction::merge(of_lane[i], one) : one;
        }
      }
      // Each step halves the positions that a lane has, and doubles their channels.
#pragma unroll
      for (int step = 0; step < 3; step++) {
        const int mask = 16 >> step, count = kTiles >> step;
        const bool upper = lane & mask;
#pragma unroll
        for (int i = 0; i < kTiles; i++) {
          if (i >= count) continue;
          const Partial given = upper ? of_lane[i] : of_lane[i + count], kept = upper ? of_lane[i + count] : of_lane[i];
          const Partial other = exchange(given, mask);
          of_lane[i] = upper ? Reduction::merge(other, kept) : Reduction::merge(kept, other);
        }
      }
      const int first = (lane & 16) + (lane & 8) + (lane & 4);  // of the lane's four
      auto& of_warp = shared.of_warp[turn % 2];
#pragma unroll
      for (int i = 0; i < 4; i++) of_warp[place.first_own / 16][(first + i) / 2 * 8 + 2 * t + i % 2] = of_lane[i];
      place.sync_team();  // all warps' are there
      const int position = threadIdx.x % kColumns;
      Partial all = of_warp[0][position];
#pragma unroll
      for (int warp = 1; warp < kWarps; warp++) all = Reduction::merge(all, of_warp[warp][position]);
      if (position < place.columns)
        out[position] = T(sink.after(Reduction::result(all), out + position - sink.y));
      out += place.width(), turn++;
    }

   private:
    __device__ __forceinline__ int64_t plane() const { return int64_t(place.height()) * place.width(); }
    __device__ __forceinline__ int existing(int own) const { return min(place.channel(own), Place::kChannels - 1); }
    static __device__ __forceinline__ Partial exchange(const Partial& p, int mask) {
      static_assert(sizeof(Partial) % 4 == 0, "words");
      Partial other;
#pragma unroll
      for (int i = 0; i < int(sizeof(Partial) / 4); i++)
        reinterpret_cast<uint32_t*>(&other)[i] =
            __shfl_xor_sync(~0u, reinterpret_cast<const uint32_t*>(&p)[i], mask);
      return other;
    }
  };
};

}  // namespace reduce
