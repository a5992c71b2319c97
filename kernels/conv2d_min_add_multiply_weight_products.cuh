// The products of the weights' gradient of min-add (…_weight_gradient_fused.cu): a step's operands, from
// shared memory to the sums in registers.
#pragma once
#include "conv2d_min_add_multiply_weight_operands.cuh"

namespace {

#if __CUDA_ARCH__ >= 800

// The halves of a register that holds two neighbouring k of which so many are before the end.
__device__ __forceinline__ uint32_t first_halves(int count) {
  return count >= 2 ? 0xffffffffu : count == 1 ? 0xffffu : 0u;
}

// sums += the product of 16 channels out, the warp's 8 channels in, one tap and 16 pixels. Tensor cores cut
// off as they add. So split operands' small products come first, and their sum is added to the others in
// float32.
__device__ __forceinline__ void multiply_tile(
    float (&sums)[4], const uint32_t (&gradient)[kParts][4], const uint32_t (&input)[kParts][2]) {
  if constexpr (SPLIT) {
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

// A step's fragments of B, of 16 pixels and all taps. rows[r], for the block's tap row r, is the address that
// the lane gives to load_matrices_transposed.
__device__ __forceinline__ void load_taps(
    uint32_t (&taps)[kBlockTaps][kParts][2], const uint32_t (&rows)[kTapRows]) {
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
__device__ __forceinline__ void mask_taps(uint32_t (&taps)[kBlockTaps][kParts][2], int pixels) {
  const int left = pixels - threadIdx.x % 4 * 2;
  const uint32_t real[2] = {first_halves(left), first_halves(left - 8)};
#pragma unroll
  for (int i = 0; i < kBlockTaps * kParts * 2; i++)
    taps[i / 2 / kParts][i / 2 % kParts][i % 2] &= real[i % 2];
}

// sums += the products of a strip's first `pixels`, at least one. `gradient` and rows[r] are addresses as in
// load_taps.
__device__ __forceinline__ void multiply(float (&sums)[kBlockTaps][kOutTiles][4], uint32_t gradient,
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

#endif

}  // namespace
