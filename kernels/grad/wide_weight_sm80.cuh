// The mainloop of a wide convolution's weights' gradient by mma.sync. Warps have 8 channels in each; all
// stage a step's operands, half of them before their products and half after them.
#pragma once
#include "grad/wide_weight_operands.cuh"

namespace grad {

template <class Filter, class Operands, class Target, class Source>
struct WideWeightSm80 : WideWeight<Filter, Operands, Target, Source, false> {
  using Base = WideWeight<Filter, Operands, Target, Source, false>;
  using Base::kBlock, Base::kBlocks, Base::kBlockTaps, Base::kChannelsIn, Base::kChannelsOut,
      Base::kInputPitch, Base::kOperandBytes, Base::kParts, Base::kSlot, Base::kSlots, Base::kSplit,
      Base::kStage, Base::kStages, Base::kTapColumns, Base::kTapRows;
  using typename Base::BlockPlace, typename Base::operand_t, typename Base::value_t;

  // Of 16 channels.
  static constexpr int kOutTiles = kChannelsOut < kBlock ? ceil_div(kChannelsOut, 16) : kBlock / 16;
  static constexpr int kBlockThreads = kThreads;
  static constexpr int kThreadSums = kBlockTaps * kOutTiles * 4;
  static constexpr int kSharedBytes = kOperandBytes;
  static_assert(kSharedBytes <= 99 << 10, "any device from compute capability 8.0 on has so much");

  // Which of a block's sums is sum i of a thread.
  static __device__ __forceinline__ SumPlace sum_place(int i, int thread) {
    const int lane = thread % 32, warp = thread / 32;
    return {i / 4 / kOutTiles, i / 4 % kOutTiles * 16 + i / 2 % 2 * 8 + lane / 4,
            warp * 8 + lane % 4 * 2 + i % 2};
  }

#if __CUDA_ARCH__ >= 800

  using typename Base::StagedGradient, typename Base::StagedInput, typename Base::Walk;

  // The halves of a register that holds two neighbouring k of which so many are before the end.
  static __device__ __forceinline__ uint32_t first_halves(int count) {
    return count >= 2 ? 0xffffffffu : count == 1 ? 0xffffu : 0u;
  }

  // sums += the product of 16 channels out, the warp's 8 channels in, one tap and 16 pixels. Tensor cores cut
  // off as they add. So split operands' small products come first, and their sum is added to the others in
  // float32.
  static __device__ __forceinline__ void multiply_tile(float (&sums)[4],
                                                       const uint32_t (&gradient)[kParts][4],
                                                       const uint32_t (&input)[kParts][2]) {
    if constexpr (kSplit) {
      float products[4] = {};
      multiply_add<operand_t>(products, gradient[kParts - 1], input[0][0], input[0][1]);
      multiply_add<operand_t>(products, gradient[0], input[kParts - 1][0], input[kParts - 1][1]);
      multiply_add<operand_t>(products, gradient[0], input[0][0], input[0][1]);
#pragma unroll
      for (int k = 0; k < 4; k++) sums[k] += products[k];
    } else {
      multiply_add<operand_t>(sums, gradient[0], input[0][0], input[0][1]);
    }
  }

  // A step's fragments of B, of 16 pixels and all taps. rows[r], for the block's tap row r, is the address
  // that the lane gives to load_matrices_transposed.
  static __device__ __forceinline__ void load_taps(uint32_t (&taps)[kBlockTaps][kParts][2],
                                                   const uint32_t (&rows)[kTapRows]) {
#pragma unroll
    for (int i = 0; i < kBlockTaps * kParts; i++) {
      // Two neighbouring taps at a time; the last of an odd number alone.
      const int tap = i / kParts, part = i % kParts, column = tap % kTapColumns;
      const uint32_t from = rows[tap / kTapColumns] + 16 * (part * kWarps * kInputPitch + column);
      if (column % 2 == 0 && column + 1 < kTapColumns) {
        uint32_t both[4];
        load_matrices_transposed(both, from);
#pragma unroll
        for (int k = 0; k < 4; k++) taps[min(tap + k / 2, kBlockTaps - 1)][part][k % 2] = both[k];
      } else if (column % 2 == 0) {
        load_matrices_transposed(taps[tap][part], from);
      }
    }
  }

  // Zeros in place of all but so many of the 16 pixels.
  static __device__ __forceinline__ void mask_taps(uint32_t (&taps)[kBlockTaps][kParts][2], int pixels) {
    const int left = pixels - threadIdx.x % 4 * 2;
    const uint32_t real[2] = {first_halves(left), first_halves(left - 8)};
#pragma unroll
    for (int i = 0; i < kBlockTaps * kParts * 2; i++)
      taps[i / 2 / kParts][i / 2 % kParts][i % 2] &= real[i % 2];
  }

  // sums += the products of a strip's first `pixels`, at least one. `gradient` and rows[r] are addresses as
  // in load_taps.
  static __device__ __forceinline__ void multiply(float (&sums)[kBlockTaps][kOutTiles][4], uint32_t gradient,
                                                  uint32_t (&rows)[kTapRows], int pixels) {
#pragma unroll 1
    for (; pixels > 0; pixels -= 16, gradient += 16 * 16) {
      uint32_t taps[kBlockTaps][kParts][2];
      load_taps(taps, rows);
#pragma unroll
      for (int r = 0; r < kTapRows; r++) rows[r] += 16 * 16;
      if (pixels < 16) mask_taps(taps, pixels);
      uint32_t tiles[kOutTiles][kParts][4];
#pragma unroll
      for (int i = 0; i < kOutTiles * kParts; i++)
        load_matrices_transposed(tiles[i / kParts][i % kParts],
                                 gradient + 16 * kStrip * (i % kParts * kWarps + i / kParts * 2));
#pragma unroll
      for (int i = 0; i < kOutTiles * kBlockTaps; i++)
        multiply_tile(sums[i % kBlockTaps][i / kBlockTaps], tiles[i / kBlockTaps], taps[i % kBlockTaps]);
    }
  }

  static __device__ __forceinline__ void run(float* partial, const Source& source, const value_t* x,
                                             const uint32_t* largest_x, const uint32_t* largest_g, int64_t N,
                                             int64_t H, int64_t W) {
    extern __shared__ uint4 shared[];
    uint4* const gradients = shared + kSlots * kSlot;
    const int common = Base::common_exponent(source, largest_x, largest_g, N);
    const Strips strips(H - Base::kKernelH + 1, W - Base::kKernelW + 1);
    const int64_t count = strips.count(N);
    const BlockPlace place(blockIdx.y);
    Walk walk{source,
              x,
              strips,
              place,
              largest_x,
              largest_g,
              common,
              int(threadIdx.x / 32),
              H,
              W,
              count * (blockIdx.x + 1) / gridDim.x,
              count * blockIdx.x / gridDim.x};
    if (walk.goes_on()) walk.start();
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    // load_matrices_transposed: lanes 0-7 give pixels 0-7, of g those of the first channel group, and so on.
    // g: 8-15 those of the second one, 16-31 pixels 8-15 likewise. x: 8-15 pixels 8-15, 16-31 those of the
    // next tap.
    const uint32_t gradient_address =
        shared_address(gradients) + 16 * (lane / 8 % 2 * kStrip + lane / 16 * 8 + lane % 8);
    const uint32_t input_address = shared_address(shared) + 16 * (warp * kInputPitch + lane % 16 + lane / 16);
    float sums[kBlockTaps][kOutTiles][4] = {};

    Step staged;
    StagedGradient gradient;
    StagedInput input;
    const auto load = [&] {
      staged = walk.step();
      if (staged.pixels < 0) return;
      gradient.load(walk), input.load(walk);
      Base::advance(walk);
    };
    const auto store = [&](int step) {
      if (staged.pixels < 0) return;
      gradient.store(gradients + step % kStages * kStage, warp, staged, source.tail);
      input.store(shared + step % kSlots * kSlot, warp, staged.across, staged.scales.input);
    };
    load();
    store(0);
    int pixels = staged.pixels;
    load();
    // Half of the warps convert the next step before their products, the others after them: so tensor cores
    // are busy meanwhile.
    const bool early = warp < kWarps / 2;
#pragma unroll 1
    for (int step = 0; pixels >= 0; step++) {
      __syncthreads();  // the step's operands are there; and everyone is done with the last step
      int next = staged.pixels;
      if (early) store(step + 1), load();
      uint32_t rows[kTapRows];
#pragma unroll
      for (int r = 0; r < kTapRows; r++) rows[r] = input_address + 16 * kSlot * Base::slot_of(step, r);
      if (place.channel_in + warp * 8 < kChannelsIn)
        multiply(sums, gradient_address + 16 * kStage * (step % kStages), rows, pixels);
      if (!early) store(step + 1), load();
      pixels = next;
    }
    float* to = partial + (int64_t(blockIdx.x) * kBlocks + blockIdx.y) * kThreadSums * kThreads + threadIdx.x;
#pragma unroll
    for (int i = 0; i < kThreadSums; i++)
      to[i * kThreads] = sums[i / 4 / kOutTiles][i / 4 % kOutTiles][i % 4];
  }

#endif
};

}  // namespace grad
