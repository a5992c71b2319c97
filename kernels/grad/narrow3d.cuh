// What the backward kernels of a small 3-D convolution (conv/narrow3d_tile.cuh) that a normalisation follows
// share. The convolution v of x - shift is computed again, tile by tile, and from it the gradient
//   dv = slope·dz + constant + linear·v
// by channel of a sample, where dz, the gradient of the normalised value, is the problem's.
//
// A problem is a class, copied to kernels, with
//   coefficients           NormGradient (N, kOut)
//   active(n)              does any element of sample n get a gradient? If not, its dv is zero
//   selected(tile, first_channel)   a functor: after expect(tile), (dz, v, tile) gives dz of a warp's tile
//                          (mainloop's layout), where v is in real units; elements past the block's get any
//                          number
#pragma once
#include <float.h>

#include "conv/narrow3d.cuh"

namespace grad::narrow3d {

using namespace conv::narrow3d;

struct alignas(16) NormGradient {
  float slope, constant, linear;  // times `scale`: they may be smaller than any float32, and then so is dv
  float scale;                    // a power of two that brings dv near float16's largest
  float unit;  // another: `linear` is for v·unit, since slope³ may underflow where v overflows
};
// From what it consists of: the largest |dz| and |v - mean|, and v - mean = v + offset.
__device__ inline NormGradient norm_gradient(double slope, double constant, double linear, double offset,
                                             double most_dz, double most_centred, float unit = 1) {
  const double bound = fabs(slope) * most_dz + fabs(constant) + fabs(linear) * most_centred;
  const double largest = fmax(fabs(slope), fabs(linear / unit));  // finite when scaled, however small dz is
  const int exponent =
      min(fitting_exponent(bound > FLT_MAX ? FLT_MAX : float(bound)), fitting_exponent(float(largest), 126));
  const double scale = power_of_two(exponent);
  return {float(slope * scale), float((constant + linear * offset) * scale), float(linear / unit * scale),
          float(scale), unit};
}

template <class S> constexpr int kJobsPerTile = S::kOut / 16;  // a job is a tile and 16 output channels

// dv of a job: [plane][turn][fragment][lane], four values each, as the mainloop's; zero past the tile's
// positions.
struct DvLayout {
  int turns;  // from plane to plane
  template <class S> HOST_DEVICE explicit DvLayout(const Convolution<S>& c) : turns(c.turns()) {}
  HOST_DEVICE int64_t turn(int plane, int turn) const {
    return (int64_t(plane) * turns + turn) * kFragments * 32;
  }
  template <class S> HOST_DEVICE int64_t of_job(const Convolution<S>& c) const {
    return turn(c.depth, 0);
  }  // float4
};

// Of a sink's Warp (conv/narrow3d.cuh) that needs dz: its first half.
template <class Selected> struct SelectedWarp : IdleWarp {
  Selected selected;
  float unit[2];  // of the sums of channels g and g + 8

  __device__ __forceinline__ explicit SelectedWarp(const Selected& selected) : selected(selected) {}
  __device__ __forceinline__ void begin(float x_scale, const float* weight_scale) {
#pragma unroll
    for (int r = 0; r < 2; r++) unit[r] = 1 / x_scale * (1 / weight_scale[threadIdx.x % 32 / 4 + 8 * r]);
  }
  __device__ __forceinline__ void expect(const WarpTile& tile) { selected.expect(tile); }
  // Brings v to real units, and finds dz.
  __device__ __forceinline__ void select(Accumulators& dz, Accumulators& v, const WarpTile& tile) const {
#pragma unroll
    for (int j = 0; j < kFragments; j++)
#pragma unroll
      for (int i = 0; i < 4; i++) v[j][i] *= unit[i / 2];
    selected(dz, v, tile);
  }
};

}  // namespace grad::narrow3d
