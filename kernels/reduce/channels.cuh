// Reductions of a pointwise tail of v over all channels, in a fixed order; the sink (core/sinks.cuh) of
// narrow2d's, and what merges those of blocks of channels.
//
// Values of several lanes meet in shared memory, where a thread then finds all of a position: without a
// shuffle, and with one barrier a row.
#pragma once
#include "core/launch.cuh"
#include "core/math.h"
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
  struct Partial {  // Σ exp(value - most); most is never NaN
    float most, sum;
  };
  static __device__ __forceinline__ Partial nothing() { return {-INFINITY, 0.f}; }
  static __device__ __forceinline__ Partial of(float value) {
    return value == value ? Partial{value, 1.f} : Partial{-INFINITY, value};
  }
  // exp(value - most) of a value that is no larger; also of two infinities.
  static __device__ __forceinline__ float share(float value, float most) {
    return value == most ? 1.f : math::fast_exp2((value - most) * 1.44269504f);
  }
  static __device__ __forceinline__ Partial merge(const Partial& a, const Partial& b) {
    const float most = fmaxf(a.most, b.most);
    return {most, a.sum * share(a.most, most) + b.sum * share(b.most, most)};
  }
  static __device__ __forceinline__ float result(const Partial& p) { return p.most + math::log(p.sum); }
};

// Of several at once.
template <class Reduction> struct Merging {
  using Partial = typename Reduction::Partial;
  static __device__ __forceinline__ Partial two(float a, float b) {
    return Reduction::merge(Reduction::of(a), Reduction::of(b));
  }
  template <int kCount> static __device__ __forceinline__ Partial all(const Partial (&p)[kCount]) {
    Partial found = p[0];
#pragma unroll
    for (int i = 1; i < kCount; i++) found = Reduction::merge(found, p[i]);
    return found;
  }
};
template <> struct Merging<LogSumExp> {
  using Partial = LogSumExp::Partial;
  // One exponential: of NaN it is NaN.
  static __device__ __forceinline__ Partial two(float a, float b) {
    const float apart = a == b ? 0.f : -fabsf(a - b), most = fmaxf(a, b);
    return {most == most ? most : -INFINITY, 1.f + math::fast_exp2(apart * 1.44269504f)};
  }
  template <int kCount> static __device__ __forceinline__ Partial all(const Partial (&p)[kCount]) {
    float most = p[0].most, sum = 0;
#pragma unroll
    for (int i = 1; i < kCount; i++) most = fmaxf(most, p[i].most);
#pragma unroll
    for (int i = 0; i < kCount; i++) sum += p[i].sum * LogSumExp::share(p[i].most, most);
    return {most, sum};
  }
};

// [words of a Partial][rows of values that meet][positions]: a warp's eight of each position lie 8 banks apart.
template <class Partial, int kRows, int kPositions> struct Meeting {
  static constexpr int kWords = sizeof(Partial) / 4, kPitch = kPositions + 8;
  float words[kWords][kRows][kPitch];
  // Of two neighbours.
  __device__ __forceinline__ void put(int row, int position, const Partial& a, const Partial& b) {
#pragma unroll
    for (int i = 0; i < kWords; i++)
      *reinterpret_cast<float2*>(&words[i][row][position]) =
          make_float2(reinterpret_cast<const float*>(&a)[i], reinterpret_cast<const float*>(&b)[i]);
  }
  template <class Reduction> __device__ __forceinline__ Partial all(int position) const {
    Partial found[kRows];
#pragma unroll
    for (int row = 0; row < kRows; row++)
#pragma unroll
      for (int i = 0; i < kWords; i++) reinterpret_cast<float*>(&found[row])[i] = words[i][row][position];
    return Merging<Reduction>::all(found);
  }
};

struct AsItIs {
  __device__ __forceinline__ float operator()(float value, int64_t) const { return value; }
};

// y (N, OH, OW) = after(reduction over the channels of tail(v, channel, at), at of y). tail as
// store::Strips', its `at` an element of (N, C, OH, OW). Where a block hasn't all channels, partial (N, blocks, OH,
// OW) in y's place. It has to be the last sink.
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
    int64_t out, behind;  // the next row's first element: of the result, and of a plane
    bool waits;   // does a row wait to be reduced?
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
      waits = false;
    }
    template <class Offset> __device__ __forceinline__ void accept(Accumulators<kTiles>& v, const Offset& offset) {
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
          both[i] = Merging<Reduction>::two(value[0], value[1]);
          if (Place::kChannels % 16 && !real[1]) both[i] = real[0] ? Reduction::of(value[0]) : Reduction::nothing();
        }
        shared.meeting.put(row, j * 8 + 2 * t, both[0], both[1]);
      }
      waits = true, out += place.width(), behind += place.width();
    }
    // All warps of the team have met since the last row.
    __device__ __forceinline__ void overlap() const {
      const int position = threadIdx.x % kColumns;
      if (!waits || position >= place.columns) return;
      const Partial all = shared.meeting.template all<Reduction>(position);
      const int64_t at = out - place.width() + position;
      if constexpr (kAll) sink.y[at] = T(sink.after(Reduction::result(all), at));
      else sink.partial[at] = all;
    }
    __device__ __forceinline__ void end() const {
      place.sync_team();  // all warps' values are there
      overlap();
    }

   private:
    template <class Offset> static constexpr bool is_none = std::is_same_v<Offset, sinks::NoOffset>;
    __device__ __forceinline__ int64_t plane() const { return int64_t(place.height()) * place.width(); }
    __device__ __forceinline__ int existing(int own) const { return min(place.channel(own), Place::kChannels - 1); }
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

// y (N, positions) = after(what partial (N, blocks, positions) make together).
template <class T, class Reduction, class After>
__global__ void __launch_bounds__(256)
merge_channels_kernel(T* y, const typename Reduction::Partial* partial, After after, int blocks, int64_t positions,
                      int64_t count) {
  const int64_t i = int64_t(blockIdx.x) * 256 + threadIdx.x;
  if (i >= count) return;
  partial += i / positions * blocks * positions + i % positions;
  auto all = partial[0];
#pragma unroll 4
  for (int block = 1; block < blocks; block++) all = Reduction::merge(all, partial[block * positions]);
  y[i] = T(after(Reduction::result(all), i));
}

template <class Reduction, class T, class After>
void merge_channels(T* y, const typename Reduction::Partial* partial, const After& after, int64_t N, int blocks,
                    int64_t positions, cudaStream_t stream) {
  const int64_t count = N * positions;
  const auto kernel = merge_channels_kernel<T, Reduction, After>;
  kernel<<<blocks_for(count, 256), 256, 0, stream>>>(y, partial, after, blocks, positions, count);
}

}  // namespace reduce
