// A 2-D convolution of few channels in (conv/narrow2d.cuh) whose results are right for all values of x and
// weight.
#pragma once
#include "conv/exact.cuh"
#include "conv/narrow2d.cuh"

namespace conv::narrow2d {

// A sink that takes no v: a word of doubt a warp.
struct Doubt {
  uint32_t* words;
  const value_t* weight;

  static constexpr int kRowGroup = 1;
  template <class Loop> struct Shared : sinks::NoRoom<Doubt> {};
  template <class Loop> struct Warp : sinks::IdleWarp {
    using Place = typename Loop::Place;
    using Filter = typename Loop::Filter;
    const Doubt& sink;
    const Place& place;

    __device__ __forceinline__ Warp(const Doubt& sink, Shared<Loop>&, const Place& place)
        : sink(sink), place(place) {}
    template <int kTiles, class Offset>
    __device__ __forceinline__ void accept(Accumulators<kTiles>&, const Offset&) {}
    __device__ __forceinline__ void finish() const {
      const int lane = threadIdx.x % 32;
      bool doubt = __int_as_float(place.storage.largest) >= kLargest;
      if (lane < 16 && place.real(lane)) {
        const int exponent = place.storage.filter_exponent[place.first_own + lane];
        doubt = doubt || exponent < kLowestExponent || (exponent == 0 && is_infinite(place.channel(lane)));
      }
      doubt = __any_sync(~0u, doubt);
      const int warp = threadIdx.x / 32;
      if (lane == 0)
        sink.words[blockIdx.x * (Loop::kBlockThreads / 32) + warp] = doubt ? __float_as_uint(INFINITY) : 0;
    }

   private:
    // An infinite filter has the exponent of one that is zero.
    __device__ bool is_infinite(int channel) const {
      constexpr int kCount = Filter::kIn * Filter::kTaps;
      bool found = false;
#pragma unroll 1
      for (int i = 0; i < kCount; i++) found |= fabsf(float(sink.weight[channel * kCount + i])) == INFINITY;
      return found;
    }
  };
};

// As pointwise(), for sinks that want rows in groups of kRowGroup and tiles of kStride columns. `each`
// computes their results one by one (conv/exact.cuh).
template <class Own, class Each, class... Sinks>
void exact(const In<value_t>& x, const In<value_t>& weight, const Each& each, cudaStream_t stream,
           Sinks... given) {
  using Filter = typename Own::Filter;
  expect_elements("weight", weight, Filter::kOut * Filter::kIn * Filter::kTaps);
  if (x.size(0) == 0) return;
  const auto geometry = Own::Geometry::of(x);
  const int64_t words = geometry.blocks() * (Own::kBlockThreads / 32);
  const Scratch<uint32_t> doubts(words, stream);
  convolve<Own>(x, weight, AsGiven(), geometry, stream, given..., Doubt{doubts, weight});
  conv::exact(Doubts{doubts, words / geometry.N, nullptr, 0}, geometry.N, each, stream);
}

}  // namespace conv::narrow2d
