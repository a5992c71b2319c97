// Σ slope·dz·X over the windows of a tile, for the weight's gradient: the gradients that windows
// select, as sparse operands, and their products with the stage's pixels.
#pragma once
#include "grad/selected/stage.cuh"

namespace grad::selected {

constexpr unsigned kZeroSelectors = 0x4444;  // the first two of each four: where all are zero
// values[i] summed over the warp, for the lanes from 32 i / kCount on: each step halves the values that a
// lane has.
template <int kCount, int kOffset = 16> __device__ __forceinline__ float transposed_sum(float* values) {
  const bool upper = threadIdx.x & kOffset;
  constexpr int kHalf = kCount / 2;
#pragma unroll
  for (int i = 0; i < kHalf; i++) {
    const float given = upper ? values[i] : values[i + kHalf], kept = upper ? values[i + kHalf] : values[i];
    values[i] = kept + __shfl_xor_sync(~0u, given, kOffset);
  }
  if constexpr (kHalf == 0) values[0] += __shfl_xor_sync(~0u, values[0], kOffset);
  if constexpr (kOffset > 1) return transposed_sum<kHalf ? kHalf : 1, kOffset / 2>(values);
  else return values[0];
}

template <class P> struct Sparse : Gram<P> {
  using Base = Gram<P>;
  using Base::kUnits, Base::kBlockChannels, Base::first_of_window, Base::passed_gradient,
      Base::selected_gradient, Base::kSteps, Base::kTileWindows, Base::kOut, Base::kPoolH, Base::kPoolW;
  using typename Base::Geometry, typename Base::Saved, typename Base::Channel, typename Base::Stage;

  static constexpr int kArea = kPoolH * kPoolW;
  // A sparse product takes two of every four neighbouring k of A, which is enough, since one of a window's
  // positions has a gradient. It has 32 positions: those of several windows, or a part of one window's. A
  // window takes kPlaces of them, so that no four neighbours are of two windows.
  static constexpr int kPlaces = kArea <= 4 ? 4 : kArea <= 8 ? 8 : (kArea + 15) / 16 * 16;
  static constexpr int kStepWindows = kPlaces < 32 ? 32 / kPlaces : 1, kWindowSteps = (kPlaces + 31) / 32;
  static constexpr int kRounds = (kTileWindows + 31) / 32;  // a lane has one window of each
  static constexpr int kHeldWindows = kRounds * 32;
  static constexpr int kWarpChannels = kBlockChannels / kWarps;  // whose gradients a warp selects
  static constexpr int kHeldPitch = kBlockChannels + 1;          // no bank conflicts

  // Where in its window a gradient is, as a sparse operand says it: a register holds the two that are taken
  // of four neighbours, selectors which two those are (multiply_add_sparse).
  struct Origin {
    uint16_t selectors;  // of the 16 positions that it is one of, XOR kZeroSelectors
    uint8_t four, bits;  // which four neighbours have it; its place in the register: 16 if it is the second
  };
  __device__ __forceinline__ static Origin origin_of(int place) {
    const int of_four = place % 4;  // 0 of (0, 1), 1 of (1, 2), 2 and 3 of (2, 3)
    const unsigned selectors = (0xee94 >> of_four * 4 & 0xf) ^ (kZeroSelectors & 0xf);
    return {uint16_t(selectors << place / 4 % 4 * 4), uint8_t(place / 4), uint8_t(of_four / 3 * 16)};
  }

  // The gradients that a tile's windows select, by window and channel, as elements of A: (high, low); and by
  // channel what undoes its scale.
  struct Held {
    uint2 halves[kHeldWindows][kHeldPitch];
    Origin origins[kHeldWindows][kHeldPitch];
    Origin origin_of_place[kArea];
    float unscale[kBlockChannels];
  };

  // A role is 32 channels out and up to kRoleUnits units, as many as there are registers for; warps with the
  // same role take turns with the windows.
  static constexpr int kUnitGroups = (kUnits + 4) / 5, kRoleUnits = (kUnits + kUnitGroups - 1) / kUnitGroups;
  static constexpr int kBlockUnits = kUnitGroups > 1 ? 2 : 1, kSparseGroups = 4 / kBlockUnits;
  static constexpr int kSparsePasses = (kUnitGroups + kBlockUnits - 1) / kBlockUnits;

  // Adds a role's products for a tile's `windows` to `total`: of the stage at `address`, and of 32 of the
  // block's channels, from first_channel on. `factor` undoes the scale of x.
  template <int kGroupOfUnits>
  __device__ __forceinline__ static void multiply_sparse(float (&total)[2][kRoleUnits][4], uint32_t address,
                                                         const Held& held, int first_channel, int windows,
                                                         int group, float factor) {
    const int lane = thread_index_anew() % 32, g = lane / 4, t = lane % 4;
    const int steps = (windows + kStepWindows - 1) / kStepWindows * kWindowSteps;
    // Which of the step's windows a position belongs to.
    const auto window_of = [](int k) { return kStepWindows > 1 ? k / kPlaces : 0; };
    for (int first = group; first < steps; first += kSparseGroups * kSteps) {
      float d[2][kRoleUnits][4];
#pragma unroll
      for (int i = 0; i < 2 * kRoleUnits * 4; i++) (&d[0][0][0])[i] = 0;
#pragma unroll 1
      for (int step = first; step < min(steps, first + kSparseGroups * kSteps); step += kSparseGroups) {
        const int window = step / kWindowSteps * kStepWindows, begin = step % kWindowSteps * 32;
        uint32_t high[2][4], low[2][4], selectors[2] = {};
#pragma unroll
        for (int row = 0; row < 4; row++) {
          const int channel = first_channel + row * 8 + g;
#pragma unroll
          for (int half = 0; half < 2; half++) {
            const int k = 4 * t + 16 * half, own = window + window_of(k);
            const uint2 halves = held.halves[own][channel];
            const bool here = held.origins[own][channel].four == (begin + k) % kPlaces / 4;
            high[row / 2][row % 2 + 2 * half] = here ? halves.x : 0;
            low[row / 2][row % 2 + 2 * half] = here ? halves.y : 0;
          }
          unsigned of_row = 0;
#pragma unroll
          for (int k = 0; k < 16; k += kPlaces < 16 ? kPlaces : 16) {
            const int from = k + t % 2 * 16, own = window + window_of(from);
            const bool here = kPlaces <= 16 || held.origins[own][channel].four / 4 == (begin + from) / 16;
            if (here) of_row |= held.origins[own][channel].selectors << own * (kPlaces / 4) % 4 * 4;
          }
          selectors[row / 2] |= (of_row ^ kZeroSelectors) << row % 2 * 16;
        }
        const int own = window + window_of(lane), place = (begin + lane) % kPlaces;
        const bool real = place < kArea && own < windows;  // others meet zeros in A
        const uint32_t pixel =
            address + (real ? Stage::offset(place / kPoolW, own * kPoolW + place % kPoolW) : 0);
        // By two units, so that no product needs the result of the one before.
        constexpr int kFirst = kGroupOfUnits * kRoleUnits, kLeft = kUnits - kFirst;
        constexpr int kOwn = kLeft < kRoleUnits ? kLeft : kRoleUnits;
#pragma unroll
        for (int batch = 0; batch < kOwn; batch += 2) {
          uint32_t unit[2][2][4];  // high, low
#pragma unroll
          for (int i = 0; i < 2 && batch + i < kOwn; i++)
#pragma unroll
            for (int part = 0; part < 2; part++)
              load_matrices_transposed(unit[i][part],
                                       pixel + part * Stage::kPartBytes + Stage::offset(kFirst + batch + i));
#pragma unroll
          for (int part = 0; part < 3; part++)  // small ones first
#pragma unroll
            for (int i = 0; i < 2 && batch + i < kOwn; i++)
#pragma unroll
              for (int m = 0; m < 2; m++)
                multiply_add_sparse(d[m][batch + i], part ? high[m] : low[m], unit[i][part == 1],
                                    selectors[m]);
        }
      }
#pragma unroll
      for (int m = 0; m < 2; m++)
#pragma unroll
        for (int half = 0; half < 2; half++) {
          const float unscale = held.unscale[first_channel + m * 16 + half * 8 + g] * factor;
#pragma unroll
          for (int i = 0; i < kRoleUnits; i++)
#pragma unroll
            for (int j = 0; j < 2; j++) total[m][i][half * 2 + j] += d[m][i][half * 2 + j] * unscale;
        }
    }
  }

  // What forward kept of a lane's windows, and dy, of the warp's channels; in registers, on their way.
  struct Windows {
    float dy[kRounds][kWarpChannels], extreme[kRounds][kWarpChannels];
    int place[kRounds][kWarpChannels];

    // Of `windows` windows, the first of them element `first`; `count` channels, plane_size elements apart.
    __device__ __forceinline__ void load(const Saved& saved, int64_t first, int64_t plane_size, int count,
                                         int windows) {
#pragma unroll
      for (int round = 0; round < kRounds; round++) {
        const int window = round * 32 + threadIdx.x % 32;
        int64_t at = first + (window < windows ? window : 0);
#pragma unroll
        for (int i = 0; i < kWarpChannels; i++) {
          const bool there = kOut % kBlockChannels == 0 || i < count;
          const float of_window = saved.dy[at];
          dy[round][i] = window < windows && there ? of_window : 0.f;
          extreme[round][i] = saved.extreme[at], place[round][i] = saved.index[at];
          if (kOut % kBlockChannels == 0 || i + 1 < count) at += plane_size;
        }
      }
    }

    // In flat channels, whose values all tie, each window's first v instead, which forward did not keep.
    __device__ __forceinline__ void take_first_of_flat(const Saved& saved, const Channel* channels,
                                                       const value_t* sample, int first_channel, int row,
                                                       int window_column, int windows, Geometry geometry) {
#pragma unroll 1
      for (int i = 0; i < kWarpChannels * kRounds; i++) {
        const int c = i % kWarpChannels, window = i / kWarpChannels * 32 + threadIdx.x % 32;
        if (!channels[c].flat || window >= windows) continue;
        const float first =
            first_of_window(saved, sample, first_channel + c, row, window_column + window, geometry);
#pragma unroll
        for (int j = 0; j < kWarpChannels * kRounds; j++)
          if (j == i)
            extreme[j / kWarpChannels][j % kWarpChannels] = first,
                                           place[j / kWarpChannels][j % kWarpChannels] = 0;
      }
    }

    // Puts the gradients into `held`, from channel `own` on, the first of `channels`. Lanes 4 i and 4 i + 2
    // return the i-th channel's sums of dy, where it passes, and of dy·(v - mean).
    __device__ __forceinline__ float select(Held& held, const Saved& saved, const Channel* channels,
                                            int own) const {
      const int lane = threadIdx.x % 32;
      float sums[2 * kWarpChannels] = {};
#pragma unroll
      for (int i = 0; i < kWarpChannels; i++) {
        const Channel channel = channels[i];
        float gradient[kRounds], magnitude = 0;
#pragma unroll
        for (int round = 0; round < kRounds; round++) {
          const float v = extreme[round][i];
          const float passed = passed_gradient(saved, channel, dy[round][i], v);
          sums[2 * i] += passed, sums[2 * i + 1] += passed * channel.normalise.centred(v);
          gradient[round] = selected_gradient(channel, passed);
          magnitude = fmaxf(magnitude, fabsf(gradient[round]));
        }
        const float factor = fitting_factor(__reduce_max_sync(~0u, __float_as_uint(magnitude)));
        if (lane == 0) held.unscale[own + i] = inverse_factor(factor);
#pragma unroll
        for (int round = 0; round < kRounds; round++) {
          const float scaled = gradient[round] * factor;
          const uint32_t high = pack(scaled, 0), low = pack(residual(scaled, 0, high).x, 0);
          const Origin origin = held.origin_of_place[place[round][i]];
          held.halves[round * 32 + lane][own + i] = make_uint2(high << origin.bits, low << origin.bits);
          held.origins[round * 32 + lane][own + i] = origin;
        }
      }
      return transposed_sum<2 * kWarpChannels>(sums);
    }
  };
};

}  // namespace grad::selected
