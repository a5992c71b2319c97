// A small 3-D convolution (conv/narrow3d.cuh) whose results are right for all values of x and weight.
#pragma once
#include "conv/exact.cuh"
#include "conv/narrow3d.cuh"

namespace conv::narrow3d {

// A sink that looks for what is not finite: a word of doubt a warp.
struct Doubt {
  uint32_t* words;

  template <class S> struct Shared : NoRoom {};
  template <class S> struct Warp : IdleWarp {
    const Doubt& sink;
    float nothing = 0;  // or NaN

    __device__ __forceinline__ Warp(const Doubt& sink, Shared<S>&, const Place<S>&) : sink(sink) {}
    __device__ __forceinline__ void begin(float) { nothing = 0; }
    template <class Offset>
    __device__ __forceinline__ void accept(const Accumulators& v, const WarpTile&, const Offset&) {
#pragma unroll
      for (int i = 0; i < 4 * kFragments; i++) nothing = fmaf(v[i / 4][i % 4], 0.f, nothing);
    }
    __device__ __forceinline__ void finish(const Place<S>& place) const {
      const int lane = threadIdx.x % 32;
      bool doubt = nothing != 0;
      if constexpr (S::kSplit) {  // what is scaled lies below 2^11 or, of x, below 2^16
        const float lowest = power_of_two(kLowestExponent);
        if (lane < 16) doubt |= place.storage.weight_scale[lane] < lowest / 16;
        if (lane < S::kIn) doubt |= place.storage.scaling[lane].scale < lowest;
      }
      doubt = __any_sync(~0u, doubt);
      const int64_t block = (place.tile.n * place.c.slots() + place.tile.slot) * gridDim.y + blockIdx.y;
      if (lane == 0)
        sink.words[block * kBlockWarps + threadIdx.x / 32] = doubt ? __float_as_uint(INFINITY) : 0;
    }
  };
};

// Does a sink leave other values in v's place? Then v is looked at before.
template <class Sink, class = void> constexpr bool leaves_values = false;
template <class Sink> constexpr bool leaves_values<Sink, std::enable_if_t<Sink::kLeavesValues>> = true;

// The convolution for sinks whose results `each` computes one by one (conv/exact.cuh).
template <class S, class Each, class... Sinks>
void exact(const Convolution<S>& c, const Each& each, cudaStream_t stream, const Sinks&... given) {
  const int64_t of_sample = int64_t(c.slots()) * ((S::kOut + 15) / 16) * kBlockWarps;
  const Scratch<uint32_t> doubts(c.N * of_sample, stream);
  if constexpr ((leaves_values<Sinks> || ...)) convolve(c, stream, Doubt{doubts}, given...);
  else convolve(c, stream, given..., Doubt{doubts});
  conv::exact(Doubts{doubts, of_sample, nullptr, 0}, c.N, each, stream);
}

}  // namespace conv::narrow3d
