// From a product's sums to a tail's results: a mainloop's last step before its sinks.
//
// A tail is a pointwise function of the convolution's values v, without its bias:
//   struct Channel                               what it knows of an output channel of a sample
//   Channel channel(int64_t n, int c) const      reads that, of a channel that exists
//   float operator()(float v, const Channel&) const
//   Mask mask(float v, const Channel&) const     where masks are kept (store/grad_mask.cuh)
//   Gradient<n> gradient(float dy, const Mask&) const    where gradients are asked for (grad/masked.cuh)
#pragma once
#include "core/split.cuh"

namespace conv {

// The tail of a convolution that nothing follows.
struct Identity {
  struct Channel {};
  __device__ __forceinline__ Channel channel(int64_t, int) const { return {}; }
  __device__ __forceinline__ float operator()(float v, const Channel&, int64_t = 0) const { return v; }
};

// What is the same for all values of an output channel and sample. factor · correction undoes the scaling of
// the operands; where that power of two is a float32, as it nearly always is, correction is 1.
template <class Tail> struct ChannelConstants {
  float correction, factor;
  typename Tail::Channel channel;

  // Of channel c of sample n, if that is `real`.
  __device__ __forceinline__ ChannelConstants(const Tail& tail, int64_t n, int c, bool real)
      : correction(1.f), factor(1.f), channel(real ? tail.channel(n, c) : typename Tail::Channel{}) {}

  // Sums were scaled by 2^-exponent.
  __device__ __forceinline__ void set_exponent(int exponent) {
    const int last = min(max(exponent, -126), 127);
    factor = tensor_core::power_of_two(last);
    correction = tensor_core::power_of_two(min(max(exponent - last, -126), 127));
  }
};

// A warp's sums of 16 channels × 8·kTiles pixels to results, and what Keep takes of v. They lie as products
// leave them: lane 4 g + t has pixels 8 j + 2 t and the next, of channel g in [j][0] and [j][1], whose
// constants are `low`, of channel g + 8 in [j][2] and [j][3], whose constants are `high`.
template <class Keep, bool kScaled, class Tail, int kTiles>
__device__ __forceinline__ typename Keep::template Kept<kTiles> apply(const Tail& tail,
                                                                      float (&sums)[kTiles][4],
                                                                      const ChannelConstants<Tail>& low,
                                                                      const ChannelConstants<Tail>& high) {
  typename Keep::template Kept<kTiles> kept;
  if (kScaled && __any_sync(0xffffffffu, low.correction != 1.f || high.correction != 1.f)) {
#pragma unroll
    for (int i = 0; i < kTiles * 4; i++) sums[i / 4][i % 4] *= i % 4 < 2 ? low.correction : high.correction;
  }
#pragma unroll
  for (int i = 0; i < kTiles * 4; i++) {
    const ChannelConstants<Tail>& constants = i % 4 < 2 ? low : high;
    const float v = sums[i / 4][i % 4] * constants.factor;
    if constexpr (Keep::kKeeps) kept.add(i, tail.mask(v, constants.channel));
    sums[i / 4][i % 4] = tail(v, constants.channel);
  }
  return kept;
}

}  // namespace conv
