// Σ slope·dz·X over the windows of a tile, for the weight's gradient: the gradients that windows
// select, as sparse operands, and their products with the stage's pixels.
#pragma once
#include "core/wgmma.cuh"
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
      Base::selected_gradient, Base::kSteps, Base::kTileWindows, Base::kOut, Base::kFilterW, Base::kPoolH,
      Base::kPoolW;
  using typename Base::Geometry, typename Base::Saved, typename Base::Channel, typename Base::Stage;

  static constexpr int kArea = kPoolH * kPoolW;
  // A sparse product takes two of every four neighbouring k of A, which is enough, since one of a window's
  // positions has a gradient. It has 32 positions: those of several windows, or a part of one window's. A
  // window takes kPlaces of them, so that no four neighbours are of two windows.
  static constexpr int kPlaces = kArea <= 4 ? 4 : kArea <= 8 ? 8 : (kArea + 15) / 16 * 16;
  static constexpr int kStepWindows = kPlaces < 32 ? 32 / kPlaces : 1, kWindowSteps = (kPlaces + 31) / 32;
  static constexpr int kRounds = (kTileWindows + 31) / 32;       // a lane has one window of each
  static constexpr int kWarpChannels = kBlockChannels / kWarps;  // whose gradients a warp selects

  // Where in its window a gradient is, as a sparse operand says it: a register holds the two that are taken
  // of four neighbours, selectors which two those are (multiply_add_sparse).
  struct alignas(4) Origin {
    uint16_t selectors;  // of the 16 positions that it is one of, XOR kZeroSelectors
    uint8_t four, bits;  // which four neighbours have it; its place in the register: 16 if it is the second
  };
  __device__ __forceinline__ static Origin origin_of(int place) {
    const int of_four = place % 4;  // 0 of (0, 1), 1 of (1, 2), 2 and 3 of (2, 3)
    const unsigned selectors = (0xee94 >> of_four * 4 & 0xf) ^ (kZeroSelectors & 0xf);
    return {uint16_t(selectors << place / 4 % 4 * 4), uint8_t(place / 4), uint8_t(of_four / 3 * 16)};
  }

  // Do four warps have their products together, by wgmma? Then a step has 32 neighbouring positions of a row,
  // whole fours of each window's. kFitsTogether: would they, if there is that? The host doesn't know.
  static constexpr bool kFitsTogether = kFilterW == 3 && kUnits <= 9 && kPoolW % 4 == 0;
  static constexpr bool kTogether = TENSOR_CORE_WGMMA && kFitsTogether;

  // The gradients that a tile's windows select, by `place` of a channel and window, as elements of A: (high,
  // low); and by channel what undoes its scale.
  struct Held {
    static constexpr int kWindows = kRounds * 32, kPitch = kWindows + 4;  // no bank conflicts
    static constexpr int kAlone = kWindows * (kBlockChannels + 1), kAll = kBlockChannels * kPitch;
    static constexpr int kSize = kFitsTogether && kAll > kAlone ? kAll : kAlone;
    __device__ __forceinline__ static int place(int channel, int window) {
      return kTogether ? channel * kPitch + window : window * (kBlockChannels + 1) + channel;
    }
    uint2 halves[kSize];
    Origin origins[kSize];
    Origin origin_of_place[kArea];
    float unscale[kBlockChannels];
  };

  // A role is 16 kRoleRows channels out and up to kRoleUnits units, as many as there are registers for; warps
  // with the same role take turns with the windows.
  static constexpr int kRoleRows = kTogether ? 1 : 2, kChannelRoles = kBlockChannels / 16 / kRoleRows;
  static constexpr int kUnitGroups = kTogether ? 1 : (kUnits + 4) / 5;
  static constexpr int kRoleUnits = (kUnits + kUnitGroups - 1) / kUnitGroups;
  static constexpr int kBlockUnits = kUnitGroups > 1 ? 2 : 1;
  static constexpr int kSparseGroups = kWarps / kChannelRoles / kBlockUnits;
  static constexpr int kSparsePasses = (kUnitGroups + kBlockUnits - 1) / kBlockUnits;
  using Totals = float[kRoleRows][kRoleUnits][4];

  // Adds a role's products for a tile's `windows` to `total`: of the stage at `address`, and of some of the
  // block's channels, from first_channel on. `factor` undoes the scale of x.
  template <int kGroupOfUnits>
  __device__ __forceinline__ static void multiply_sparse(Totals& total, uint32_t address, const Held& held,
                                                         int first_channel, int windows, int group,
                                                         float factor) {
    if constexpr (kTogether) multiply_together(total, address, held, first_channel, windows, group, factor);
    else multiply_alone<kGroupOfUnits>(total, address, held, first_channel, windows, group, factor);
  }

  // The same by four warps, of all units: a step for each row of the windows in 32 columns. A lane has the
  // gradients of four fours, of rows g and g + 8, from columns 4t and 4t + 16 on.
  __device__ __forceinline__ static void multiply_together(Totals& total, uint32_t address, const Held& held,
                                                           int first_channel, int windows, int group,
                                                           float factor) {
#if TENSOR_CORE_WGMMA
    constexpr int kFours = kPoolW / 4;  // of a window's row
    const int lane = thread_index_anew() % 32, channel = first_channel + lane / 4, t = lane % 4;
    const int steps = (windows * kPoolW + 31) / 32;
    float d[kUnits][4];
#pragma unroll
    for (int i = 0; i < kUnits * 4; i++) (&d[0][0])[i] = 0;
#pragma unroll 1
    for (int step = group; step < steps; step += kSparseGroups) {
      uint2 halves[4];
      int row_four[4];  // which four of its window has it, less the lane's of the window's first row
      uint32_t selectors[2] = {};
#pragma unroll
      for (int i = 0; i < 4; i++) {
        const int four = step * 8 + i / 2 * 4 + t, window = four / kFours;
        const Origin origin = held.origins[Held::place(channel + i % 2 * 8, window)];
        halves[i] = held.halves[Held::place(channel + i % 2 * 8, window)];
        row_four[i] = origin.four - four % kFours;
        selectors[i / 2] |= (origin.selectors >> origin.four % 4 * 4 & 0xf) << (t * 4 + i % 2 * 16);
      }
#pragma unroll
      for (int offset = 1; offset < 4; offset *= 2) {
        selectors[0] |= __shfl_xor_sync(~0u, selectors[0], offset);
        selectors[1] |= __shfl_xor_sync(~0u, selectors[1], offset);
      }
      const uint32_t own_selectors = (t % 2 ? selectors[1] : selectors[0]) ^ kZeroSelectors * 0x10001;
      const uint64_t pixels = describe_transposed(address + Stage::offset(0, step * 32), 16);
#pragma unroll
      for (int row = 0; row < kPoolH; row++) {
        uint32_t high[4], low[4];
#pragma unroll
        for (int i = 0; i < 4; i++) {
          const bool here = row_four[i] == row * kFours;
          high[i] = here ? halves[i].x : 0, low[i] = here ? halves[i].y : 0;
        }
        begin_products();
#pragma unroll
        for (int part = 0; part < 3; part++)  // small ones first
#pragma unroll
          for (int unit = 0; unit < kUnits; unit += 3)
            multiply_add_sparse(
                d + unit, part ? high : low,
                pixels + (Stage::offset(row, 0) + Stage::offset(unit) + (part == 1) * Stage::kPartBytes) / 16,
                own_selectors);
        commit_products();
        await_products<0>();
      }
    }
    hold(d);
#pragma unroll
    for (int half = 0; half < 2; half++) {
      const float unscale = held.unscale[channel + half * 8] * factor;
#pragma unroll
      for (int i = 0; i < kUnits; i++)
#pragma unroll
        for (int j = 0; j < 2; j++) total[0][i][half * 2 + j] += d[i][half * 2 + j] * unscale;
    }
#endif
  }

  // The same by each warp alone, of 32 channels.
  template <int kGroupOfUnits>
  __device__ __forceinline__ static void multiply_alone(Totals& total, uint32_t address, const Held& held,
                                                        int first_channel, int windows, int group,
                                                        float factor) {
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
            const uint2 halves = held.halves[Held::place(channel, own)];
            const bool here = held.origins[Held::place(channel, own)].four == (begin + k) % kPlaces / 4;
            high[row / 2][row % 2 + 2 * half] = here ? halves.x : 0;
            low[row / 2][row % 2 + 2 * half] = here ? halves.y : 0;
          }
          unsigned of_row = 0;
#pragma unroll
          for (int k = 0; k < 16; k += kPlaces < 16 ? kPlaces : 16) {
            const int from = k + t % 2 * 16, own = window + window_of(from);
            const bool here =
                kPlaces <= 16 || held.origins[Held::place(channel, own)].four / 4 == (begin + from) / 16;
            if (here)
              of_row |= held.origins[Held::place(channel, own)].selectors << own * (kPlaces / 4) % 4 * 4;
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
      float sums[2 * kWarpChannels] = {}, gradient[kRounds][kWarpChannels];
      unsigned magnitude[kWarpChannels];
#pragma unroll
      for (int i = 0; i < kWarpChannels; i++) {
        const Channel channel = channels[i];
        float largest = 0;
#pragma unroll
        for (int round = 0; round < kRounds; round++) {
          const float v = extreme[round][i];
          const float passed = passed_gradient(saved, channel, dy[round][i], v);
          sums[2 * i] += passed, sums[2 * i + 1] += passed * channel.normalise.centred(v);
          gradient[round][i] = selected_gradient(channel, passed);
          largest = fmaxf(largest, fabsf(gradient[round][i]));
        }
        magnitude[i] = __float_as_uint(largest);
      }
#pragma unroll
      for (int i = 0; i < kWarpChannels; i++) {
        const float factor = fitting_factor(__reduce_max_sync(~0u, magnitude[i]));
        if (lane == 0) held.unscale[own + i] = inverse_factor(factor);
#pragma unroll
        for (int round = 0; round < kRounds; round++) {
          const float scaled = gradient[round][i] * factor;
          const uint32_t high = pack(scaled, 0), low = pack(residual(scaled, 0, high).x, 0);
          const Origin origin = held.origin_of_place[place[round][i]];
          held.halves[Held::place(own + i, round * 32 + lane)] =
              make_uint2(high << origin.bits, low << origin.bits);
          held.origins[Held::place(own + i, round * 32 + lane)] = origin;
        }
      }
      return transposed_sum<2 * kWarpChannels>(sums);
    }
  };
};

}  // namespace grad::selected
