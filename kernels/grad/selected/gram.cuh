// The Gram matrix ΣXXᵀ of patches X, and ΣX, for the weight's gradient: by row of x, on tensor cores.
//
// ΣXXᵀ depends on the difference of two kernel rows only, but for the first and last rows of x. Let R(q) be
// the sum over the positions in row q alone, of all units and those in kernel row 0. Then
//   (ΣXXᵀ)[unit, kernel row a ≥ b][unit, kernel row b] = Σ R(q)[unit, kernel row a - b][unit, kernel row 0]
// over the rows q from b to b + OH - 1. Of most rows, which are the same for all b, the sum is enough; the
// others, KERNEL_H - 1 at either end, are kept one by one: the frame.
#pragma once
#include "grad/selected/stage.cuh"

namespace grad::selected {

template <class P> struct Gram : Staging<P> {
  using Base = Staging<P>;
  using Base::kPlanes, Base::kTaps, Base::kUnits, Base::kFilterH, Base::kFilterW;
  using typename Base::Geometry, typename Base::Stage;

  // The rows of R are the values of all units; then one unit of ones, whose products are ΣX, and one of
  // zeros, where the number of units is even. Its columns are the values of the units in kernel row 0. It is
  // cut into tiles as products have them: two units' rows (a pair, 16) × one unit's columns (8).
  static constexpr int kColumnUnits = kPlanes * kFilterW, kPairs = kUnits / 2 + 1;
  static constexpr int kGramTiles = kPairs * kColumnUnits, kGramSize = kGramTiles * 128;
  static constexpr int kFrameRows = 2 * (kFilterH - 1);
  HOST_DEVICE static constexpr int unit_of_column(int column) {
    return column / kFilterW * kTaps + column % kFilterW;
  }
  // Where R(q) of a sample is kept by itself: its row of the frame, or -1.
  __device__ __forceinline__ static int frame_row(int q, Geometry geometry) {
    const int height = geometry.height(), inner = height > kFilterH - 1 ? height - (kFilterH - 1) : 0;
    return q < kFilterH - 1 ? q : q >= height ? q - inner : -1;
  }

  // A role is as many tiles as a warp has registers for, all of some pairs or a part of one pair's. The
  // blocks that see the same pixels share out the roles; warps with the same role take turns with the rows of
  // x.
  static constexpr int kRoleTiles = kColumnUnits <= 9 ? 9 / kColumnUnits * kColumnUnits : kColumnUnits / 2;
  static constexpr int kRoleColumns = kRoleTiles < kColumnUnits ? kRoleTiles : kColumnUnits;
  static constexpr int kRoles = (kGramTiles + kRoleTiles - 1) / kRoleTiles;
  static_assert(kColumnUnits % kRoleColumns == 0 && kRoleTiles % kRoleColumns == 0, "no parts of two pairs");

  // The products of a role for `columns` positions of a row of the stage, whose first is at `address`: added
  // to the lane's `total` [tile][lane], or put there. constants: the addresses of a pixel of ones and one of
  // zeros.
  template <int kRole>
  __device__ __forceinline__ static void multiply_gram(float4* total, bool add, uint32_t address,
                                                       uint2 constants, int columns, float factor) {
    const int lane = thread_index_anew() % 32;
    const bool second = lane / 8 % 2;  // A: the first unit's positions 0-7, the second one's; 8-15 likewise
    constexpr int kLeft = kGramTiles - kRole * kRoleTiles, kOwn = kLeft < kRoleTiles ? kLeft : kRoleTiles;
    float d[kOwn][4];
#pragma unroll
    for (int i = 0; i < kOwn * 4; i++) (&d[0][0])[i] = 0;
    // The second unit's matrices lie so far behind the first one's.
    constexpr int kRolePairs = (kOwn + kRoleColumns - 1) / kRoleColumns;
    const auto unit_of = [](int pair) {
      return (kRole * kRoleTiles + pair * kRoleColumns) / kColumnUnits * 2;
    };
    uint32_t behind[kRolePairs];
#pragma unroll
    for (int i = 0; i < kRolePairs; i++)
      behind[i] = second ? Stage::offset(unit_of(i) + 1) - Stage::offset(unit_of(i)) : 0;
#pragma unroll 1
    for (int first = 0; first < columns; first += 16) {
      const int row_position = first + lane % 8 + lane / 16 * 8, position = first + lane % 16;
      const uint32_t row_pixel = address + (row_position < columns ? row_position * 16 : 0);
      const uint32_t pixel = address + lane / 16 * Stage::kPartBytes + position * 16;
      // B: high halves of 16 positions, then low ones; zeros where there is no position.
      uint32_t of_column[kRoleColumns][4];
#pragma unroll
      for (int i = 0; i < kRoleColumns; i++) {
        const int unit = unit_of_column((kRole * kRoleTiles + i) % kColumnUnits);
        const uint32_t at = pixel + Stage::offset(unit);
        load_matrices_transposed(of_column[i], position < columns ? at : constants.y);
      }
#pragma unroll
      for (int pair = 0; pair < kRolePairs; pair++) {
        const int unit = unit_of(pair), begin = pair * kRoleColumns;
        uint32_t row_halves[2][4];
#pragma unroll
        for (int part = 0; part < 2; part++) {
          const uint32_t of_ones = part ? constants.y : constants.x;
          uint32_t at = row_pixel + behind[pair] + Stage::offset(unit) + part * Stage::kPartBytes;
          if (unit == kUnits) at = second ? constants.y : of_ones;
          if (unit + 1 == kUnits && second) at = of_ones;
          load_matrices_transposed(row_halves[part], at);
        }
#pragma unroll
        for (int part = 0; part < 3; part++)  // small ones first, and none needs the result of the one before
#pragma unroll
          for (int i = 0; i < kRoleColumns; i++)
            multiply_add(d[begin + i], row_halves[part == 0], of_column[i][part == 1 ? 2 : 0],
                         of_column[i][part == 1 ? 3 : 1]);
      }
    }
#pragma unroll
    for (int i = 0; i < kOwn; i++) {
      const int first = (kRole * kRoleTiles + i) / kColumnUnits * 2;
      const float of_first = first == kUnits ? factor : factor * factor;
      const float of_second = first + 1 == kUnits ? factor : factor * factor;
      const float4 before = add ? total[i * 32] : make_float4(0, 0, 0, 0);
      total[i * 32] = make_float4(before.x + d[i][0] * of_first, before.y + d[i][1] * of_first,
                                  before.z + d[i][2] * of_second, before.w + d[i][3] * of_second);
    }
  }
};

}  // namespace grad::selected
