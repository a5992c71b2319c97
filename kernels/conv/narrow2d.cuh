// The products of a 2-D convolution of few channels in: filters in registers, times rows of x in shared
// memory, by wgmma or by mma.sync; and how teams take turns with the tensor cores.
#pragma once
#include "conv/narrow2d_tile.cuh"

namespace {

// The filters of channels g and g + 8 of a warp's 16, scaled and with their signs, as fragments of A, in
// registers.
struct Filters {
  uint32_t fragments[KERNEL_H][kFragments][4];

  // Of the warp's channels from first_channel + first_own on; their exponents and signs to `storage`, if
  // `tells`. A barrier follows.
  __device__ __forceinline__ Filters(SharedStorage& storage, const value_t* weight,
                                     const accumulate_t* norm_weight, const accumulate_t* scale,
                                     int first_channel, int first_own, bool tells) {
#pragma unroll
    for (int half = 0; half < 2; half++) {
      const int own = first_own + half * 8 + threadIdx.x % 32 / 4, channel = first_channel + own;
      const bool real = channel < CHANNELS_OUT;
      const value_t* filter = weight + int64_t(real ? channel : 0) * (CHANNELS_IN * KERNEL_H * KERNEL_W);
      const auto load = [&](int kh, int unit, int i) {
        const int c = unit / KERNEL_W * 8 + threadIdx.x % 4 * 2 + i;
        const int at = (c * KERNEL_H + kh) * KERNEL_W + unit % KERNEL_W;
        return real && c < CHANNELS_IN ? float(filter[at]) : 0.f;
      };
      float largest = 0;
#pragma unroll
      for (int kh = 0; kh < KERNEL_H; kh++)
#pragma unroll
        for (int unit = 0; unit < kUnits; unit++)
          largest = fmaxf(largest, fmaxf(fabsf(load(kh, unit, 0)), fabsf(load(kh, unit, 1))));
      for (int offset = 1; offset < 4; offset *= 2)
        largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, offset));
      const int exponent = fitting_exponent(largest);
      const bool flip = real && norm_weight[channel] * scale[channel] < 0;
      if (tells && threadIdx.x % 4 == 0) {
        storage.filter_exponent[own] = exponent;
        storage.flipped[own] = flip;
      }
      const float factor = flip ? -power_of_two(exponent) : power_of_two(exponent);
#pragma unroll
      for (int kh = 0; kh < KERNEL_H; kh++)
#pragma unroll
        for (int unit = 0; unit < kUnits; unit++)
          put(kh, unit, half, split(load(kh, unit, 0) * factor, load(kh, unit, 1) * factor));
    }
  }

 private:
  __device__ __forceinline__ void put(int kh, int unit, int half, Halves halves) {
    if (kOdd && unit == kUnits - 1) {
      fragments[kh][kFragments - 1][half] = halves.high, fragments[kh][kFragments - 1][half + 2] = halves.low;
    } else {
      fragments[kh][unit / 2][half + unit % 2 * 2] = halves.high;
      fragments[kh][kPairs + unit / 2][half + unit % 2 * 2] = halves.low;
    }
  }
};

// The products of one row of v, in order: small ones first, since a tensor core cuts off what a sum's last
// bit can't hold. `act` gets the kernel row, the pixels' part (0 high, 1 low), the fragment, the first unit
// and the second.
template <class Act> __device__ __forceinline__ void for_products(Act act) {
#pragma unroll
  for (int small = kOnePart ? 0 : 1; small >= 0; small--)
#pragma unroll
    for (int kh = 0; kh < KERNEL_H; kh++) {
#pragma unroll
      for (int i = 0; i < kPairs; i++) {
        if (small) act(kh, 0, kPairs + i, 2 * i, 2 * i + 1);
        act(kh, small, i, 2 * i, 2 * i + 1);
      }
      if (kOdd) act(kh, small, kFragments - 1, kUnits - 1, kUnits - 1);
    }
}

// D = a row of v, in the background on sm_90a. `rows` holds the shared address of each kernel row's first
// pixel.
__device__ __forceinline__ void multiply_row(float (&d)[kTiles][4],
                                             const uint32_t (&fragments)[KERNEL_H][kFragments][4],
                                             const uint32_t (&rows)[KERNEL_H]) {
#if TENSOR_CORE_WGMMA
  bool accumulate = false;
  hold(d);
  begin_products();
  for_products([&](int kh, int part, int fragment, int unit, int second) {
    const uint32_t first = rows[kh] + part * kPartBytes + unit_offset(unit);
    const uint64_t pixels = describe(first, unit_offset(second) - unit_offset(unit));
    multiply_add(d, fragments[kh][fragment], pixels, accumulate);
    accumulate = true;
  });
  commit_products();
#elif __CUDA_ARCH__ >= 800
#pragma unroll
  for (int j = 0; j < kTiles; j++)
#pragma unroll
    for (int i = 0; i < 4; i++) d[j][i] = 0;
  const int lane = threadIdx.x % 32;
  for_products([&](int kh, int part, int fragment, int unit, int second) {
    const uint32_t row = rows[kh] + part * kPartBytes + lane % 8 * 16;
    if (unit != second) {
#pragma unroll
      for (int j = 0; j < kTiles; j += 2) {
        uint32_t b[4];
        const int own = lane / 8 % 2 ? unit_offset(second) : unit_offset(unit);
        load_matrices(b, row + own + (j + lane / 16) * 128);
        multiply_add(d[j], fragments[kh][fragment], b[0], b[1]);
        multiply_add(d[j + 1], fragments[kh][fragment], b[2], b[3]);
      }
    } else {
#pragma unroll
      for (int j = 0; j < kTiles; j += 4) {
        uint32_t b[4];
        load_matrices(b, row + unit_offset(unit) + (j + lane / 8) * 128);
#pragma unroll
        for (int k = 0; k < 4; k++) multiply_add(d[j + k], fragments[kh][fragment], b[k], b[k]);
      }
    }
  });
#endif
}

// On sm_90a: shared memory that this thread wrote may be read by products; all products are complete.
__device__ __forceinline__ void publish() {
#if TENSOR_CORE_WGMMA
  publish_shared();
#endif
}
__device__ __forceinline__ void await(float (&d)[kTiles][4]) {
#if TENSOR_CORE_WGMMA
  await_products<0>();
  hold(d);
#endif
}

// Waits for all threads of the team and, on sm_90a, until the tensor cores are its own; then hands them on to
// the next team.
__device__ __forceinline__ void take_turn(int team) {
  if (TENSOR_CORE_WGMMA && kTeams > 1) sync_threads<2 * kTeamThreads>(1 + team);
  else sync_threads<kTeamThreads>(1 + team);
}
__device__ __forceinline__ void hand_on(int team) {
  if (TENSOR_CORE_WGMMA && kTeams > 1)
    signal_threads<2 * kTeamThreads>(1 + (team == kTeams - 1 ? 0 : team + 1));
}

}  // namespace
