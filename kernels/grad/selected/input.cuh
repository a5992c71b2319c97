// x's gradient, from dv, that of v, the convolution without its bias; a unit is 8 channels in at a tap.
//
// dx is the transposed convolution of dv = slope·dz·[selected] + constant + linear·v. One position of a
// window is selected in a channel, but nearly all in some of 64 channels, so the first part goes through
// tensor cores like a dense one; its operand is made in registers, from a window's gradients and places. The
// rest needs nothing of dy: v is a convolution of x, so two convolutions in a row make one, of CHANNELS_IN
// channels to as many, whose filter reaches 2·KERNEL - 1 pixels and is of a sample.
//   compose_kernel          that filter, and the products of the filters' taps that make it up
//                           (compose.cuh)
//   input_gradient_kernel   both parts; of pixels at the border, only the first (input_operands.cuh: what
//                           is in shared memory)
//   border_kernel           the second one there, where only a share of the taps is (border.cuh)
//
// A warp has 8 columns of dv, all rows of windows one after the other, and all channels. A product's rows are
// 8 columns of two rows of v. A position of v reaches KERNEL_W columns of dx: what it adds there is a term.
// Terms add up in registers down a column of v and, across columns, in shared memory.
#pragma once
#include "core/wgmma.cuh"
#include "grad/selected/input_operands.cuh"

namespace grad::selected {

// d += a·b, each the sum of two halves.
__device__ __forceinline__ void multiply_add_split(float (&d)[4], const uint32_t (&high)[4],
                                                   const uint32_t (&low)[4], uint4 b) {
  multiply_add(d, low, b.x, b.y);
  multiply_add(d, high, b.z, b.w);
  multiply_add(d, high, b.x, b.y);
}

template <class P, int kInputColumns_> struct Input : InputOperands<P, kInputColumns_> {
  static constexpr bool kOfInput = true;
  using Base = InputOperands<P, kInputColumns_>;
  using Base::kPlanes, Base::kTaps, Base::kUnits, Base::channel_of, Base::kInputChannels, Base::kFilterSteps,
      Base::kHaloH, Base::kHaloW, Base::kReachH, Base::kReachW, Base::kInputThreads, Base::kSlotPitch,
      Base::kRing, Base::kRingColumns, Base::kRingRow, Base::kRingPlane, Base::kRingPart, Base::kSumRows,
      Base::kIn, Base::kOut, Base::kFilterH, Base::kFilterW, Base::kPoolH, Base::kPoolW;
  using typename Base::Geometry, typename Base::Saved, typename Base::Composed, typename Base::InputLayout,
      typename Base::InputStorage, typename Base::InputTile, typename Base::InputStage;

  static constexpr int kRowTiles = (kPoolH + 1) / 2;  // of products: two rows each
  // Of the filter's columns, and of products' tiles: those whose sums are in registers together.
  static constexpr int kGroupColumns = kFilterH > 9 ? 1 : 9 / kFilterH < kFilterW ? 9 / kFilterH : kFilterW;
  // Do four warps have their products together, of nine taps at once? Then the filters lie in shared memory
  // as [step][high, low][half of the step's channels][unit][channel in], eights of channels out side by side.
  static constexpr bool kByFours =
      TENSOR_CORE_WGMMA && kFilterH == 3 && kFilterW == 3 && kInputThreads % 128 == 0;
  static constexpr int kGroupTiles = kFilterH > 9 ? 1 : 2;
  static constexpr int kHalfStep = kUnits * 8 * 16;  // bytes

  // The products for a row of windows, and the rows of dx under it. A thread has one column of v, and of dx,
  // and two channels in of each plane.
  struct InputProducts {
    const InputTile& tile;
    const InputStage& operands;
    unsigned char* const shared;

    // Row r of terms from `row` on, of the filter's column kw, for this thread.
    __device__ __forceinline__ float2* term(int plane, int kw, int row, int r) const {
      float* const terms = reinterpret_cast<float*>(shared + InputLayout::kTerms);
      return reinterpret_cast<float2*>(terms + (plane * kFilterW + kw) * InputLayout::kTermPlane +
                                       wrapped<kSumRows>(row % kSumRows + r) * (kRingColumns * 8) +
                                       kHaloW * 8 + 2 * thread_index_anew());
    }

    // The terms of selected positions, from the row of windows at `row`.
    __device__ __forceinline__ void add_selected(int row) const {
      for_constants<kPlanes>([&](auto plane) {
        for_constants<(kFilterW + kGroupColumns - 1) / kGroupColumns>([&](auto group) {
          add_selected<decltype(plane)::value, decltype(group)::value * kGroupColumns>(row);
        });
      });
    }

    // The composed filter's share of as many rows of dx, on top of the terms that this thread reads, too.
    __device__ __forceinline__ void add_composed(int row) const {
      float dense[kPlanes][kRowTiles][4] = {};
      multiply_composed(dense, (row - kHaloH + kRing) % kRing);
      const PowerOfTwo unscale_dense(-(operands.x_exponent + operands.storage.composed_exponent));
      const int thread = thread_index_anew(), own_x = tile.first_column + tile.ahead + thread / 4;
      if (kHaloW <= own_x && own_x < tile.width)
#pragma unroll
        for (int plane = 0; plane < kPlanes; plane++)
#pragma unroll
          for (int r = 0; r < kPoolH; r++) {
            if (row + r < kHaloH || row + r >= tile.height) continue;
            float2* const to = term(plane, tile.ahead, row, r);
            const float* own = dense[plane][r / 2] + r % 2 * 2;
            const float* level = operands.storage.levels + plane * 8 + thread % 4 * 2;
            *to = make_float2(to->x + (unscale_dense(own[0]) + level[0]),
                              to->y + (unscale_dense(own[1]) + level[1]));
          }
    }

    // Those rows of dx, whose terms are complete.
    __device__ __forceinline__ void write(value_t* dx, int row) const {
      const Geometry& geometry = tile.geometry;
      const int thread = thread_index_anew(), own_x = tile.first_column + tile.ahead + thread / 4;
      if (own_x >= tile.column_end) return;
#pragma unroll
      for (int plane = 0; plane < kPlanes; plane++) {
        const int c = plane * 8 + thread % 4 * 2;
        const int64_t of_channel = (int64_t(tile.n) * kIn + c) * geometry.plane_size();
        value_t* to = dx + of_channel + int64_t(row) * geometry.W + own_x;
#pragma unroll
        for (int r = 0; r < kPoolH; r++, to += geometry.W) {
          float2 sum = make_float2(0, 0);
#pragma unroll
          for (int kw = 0; kw < kFilterW; kw++) {
            const float2 one = term(plane, kw, row, r)[(tile.ahead - kw) * 4];
            sum.x += one.x, sum.y += one.y;
          }
          if (row + r >= geometry.H) continue;
          if (c < kIn) to[0] = value_t(sum.x);
          if (c + 1 < kIn) to[geometry.plane_size()] = value_t(sum.y);
        }
      }
    }

   private:
    // Those of a plane of channels in, and of the filter's columns from kFirst on.
    template <int kPlane, int kFirst> __device__ __forceinline__ void add_selected(int row) const {
      constexpr int kCount = kFilterW - kFirst < kGroupColumns ? kFilterW - kFirst : kGroupColumns;
      const float unscale = power_of_two(-operands.exponent);
      float sums[kCount][kSumRows][2];
#pragma unroll
      for (int i = 0; i < kCount * kSumRows * 2; i++) (&sums[0][0][0])[i] = -0.f;  // adds nothing
      if (row / kPoolH < tile.geometry.pooled_height())
#pragma unroll
        for (int first = 0; first < kPoolH; first += 2 * kGroupTiles) {
          float d[kGroupTiles][kFilterH * kCount][4];
          if constexpr (kByFours) multiply_by_fours<kPlane>(d, first);
          else multiply_selected<kPlane, kFirst, kCount>(d, first);
#pragma unroll
          for (int kw = 0; kw < kCount; kw++)
#pragma unroll
            for (int kh = 0; kh < kFilterH; kh++)
#pragma unroll
              for (int i = 0; i < kGroupTiles * 4; i++) {
                const int of_window = first + i / 2;  // row
                if (of_window < kPoolH) sums[kw][of_window + kh][i % 2] += d[i / 4][kh * kCount + kw][i % 4];
              }
        }
#pragma unroll
      for (int kw = 0; kw < kCount; kw++)
#pragma unroll
        for (int r = 0; r < kSumRows; r++) {
          float2* const to = term(kPlane, kFirst + kw, row, r);
          const float2 before = r < kHaloH ? *to : make_float2(0, 0);  // by the last row of windows
          *to = make_float2(before.x + sums[kw][r][0] * unscale, before.y + sums[kw][r][1] * unscale);
        }
    }

    // A lane's windows' gradients, of four channels of a step each.
    struct Selected {
      const uint4* const values;
      const uint2* const places;
      const uint32_t place;
      __device__ __forceinline__ Selected(const InputTile& tile, unsigned char* shared, int column)
          : values(reinterpret_cast<const uint4*>(shared + InputLayout::kValues) + slot(tile, column)),
            places(reinterpret_cast<const uint2*>(shared + InputLayout::kPlaces) + slot(tile, column)),
            place(pair_of(column % kPoolW, column % kPoolW)) {}
      // As operands, where they are at pairs of rows of their window from `first` on, and at the lane's
      // column.
      __device__ __forceinline__ void operands(uint32_t (&high)[kGroupTiles][4],
                                               uint32_t (&low)[kGroupTiles][4], int step, int first) const {
        const uint4 value = values[step * 4];
        const uint2 at = places[step * 4];
#pragma unroll
        for (int m = 0; m < kGroupTiles; m++)
#pragma unroll
          for (int half = 0; half < 2; half++) {
            const uint32_t own = place + (first + 2 * m + half) * kPoolW * 0x10001;
            const uint32_t here = equal_halves(at.x, own), next = equal_halves(at.y, own);
            high[m][half] = value.x & here, high[m][half + 2] = value.y & next;
            low[m][half] = value.z & here, low[m][half + 2] = value.w & next;
          }
      }

     private:
      __device__ __forceinline__ static int slot(const InputTile& tile, int column) {
        return (column / kPoolW - tile.first_window) * kSlotPitch + thread_index_anew() % 4;
      }
    };

    // d = the products of the windows' gradients at their rows from `first` on, by pair of rows and tap.
    template <int kPlane>
    __device__ __forceinline__ void multiply_by_fours(float (&d)[kGroupTiles][kTaps][4], int first) const {
#if TENSOR_CORE_WGMMA
      const Selected selected(tile, shared, tile.first_column + thread_index_anew() / 4);
      const uint64_t filters = describe(shared_address(shared) + kPlane * kTaps * 128, kHalfStep);
      constexpr int kPart = 2 * kHalfStep / 16, kStep = 2 * kPart;  // of a description
// More at once take more registers than there are.
#pragma unroll 1
      for (int step = 0; step < kFilterSteps; step++) {
        uint32_t high[kGroupTiles][4], low[kGroupTiles][4];
        selected.operands(high, low, step, first);
        begin_products();
#pragma unroll
        for (int m = 0; m < kGroupTiles; m++) {
          if (first + 2 * m >= kPoolH) continue;
          multiply_add(d[m], low[m], filters + step * kStep, step > 0);
          multiply_add(d[m], high[m], filters + step * kStep + kPart);
          multiply_add(d[m], high[m], filters + step * kStep);
        }
        commit_products();
        await_products<0>();
      }
#pragma unroll
      for (int m = 0; m < kGroupTiles; m++) hold(d[m]);
#endif
    }

    // The same, of kCount columns of the filter.
    template <int kPlane, int kFirst, int kCount>
    __device__ __forceinline__ void multiply_selected(float (&d)[kGroupTiles][kFilterH * kCount][4],
                                                      int first) const {
      const uint4* const filters = reinterpret_cast<const uint4*>(shared);
      const int lane = thread_index_anew() % 32;
      const Selected selected(tile, shared, tile.first_column + thread_index_anew() / 4);
#pragma unroll
      for (int i = 0; i < kGroupTiles * kFilterH * kCount * 4; i++) (&d[0][0][0])[i] = 0;
#pragma unroll 1  // more take more registers than there are
      for (int step = 0; step < kFilterSteps; step++) {
        uint32_t high[kGroupTiles][4], low[kGroupTiles][4];
        selected.operands(high, low, step, first);
#pragma unroll
        for (int kw = 0; kw < kCount; kw++)
#pragma unroll
          for (int kh = 0; kh < kFilterH; kh++) {
            const int unit = kPlane * kTaps + kh * kFilterW + kFirst + kw;
            const uint4 b = filters[(step * kUnits + unit) * 32 + lane];
#pragma unroll
            for (int m = 0; m < kGroupTiles; m++)
              if (first + 2 * m < kPoolH) multiply_add(d[m][kh * kCount + kw], low[m], b.x, b.y);
#pragma unroll
            for (int m = 0; m < kGroupTiles; m++)
              if (first + 2 * m < kPoolH) multiply_add(d[m][kh * kCount + kw], high[m], b.z, b.w);
#pragma unroll
            for (int m = 0; m < kGroupTiles; m++)
              if (first + 2 * m < kPoolH) multiply_add(d[m][kh * kCount + kw], high[m], b.x, b.y);
          }
      }
    }

    // Adds the products of the composed filter and x for kPoolH rows of dx, the first of which needs x from
    // ring_row on.
    __device__ __forceinline__ void multiply_composed(float (&dense)[kPlanes][kRowTiles][4],
                                                      int ring_row) const {
      const uint4* const composed_filter = reinterpret_cast<const uint4*>(shared + InputLayout::kComposed);
      unsigned char* const pixels = shared + InputLayout::kPixels;
#pragma unroll
      for (int from = 0; from < kPlanes; from++) {
        constexpr int kRows = 2 * kRowTiles + 2 * kHaloH;
        const int thread = thread_index_anew(), matrix = thread % 32 / 8;
        // Lanes 0-15 have the addresses of two rows at one column, the others at the next: a fragment of A
        // with two rows of dx and two columns of the filter. Of the last column alone, high halves and low
        // ones.
        const uint32_t first =
            shared_address(pixels) + from * kRingPlane + (thread / 32 * 8 + thread % 8) * 16;
        const int second = matrix / 2 * 16, low = matrix / 2 * kRingPart;
#pragma unroll
        for (int column = 0; column < kReachW; column += 2) {
          const bool alone = column + 1 == kReachW;
          uint4 b[kPlanes][kReachH];
#pragma unroll
          for (int i = 0; i < kPlanes * kReachH; i++)
            b[i / kReachH][i % kReachH] =
                composed_filter[((i / kReachH * kPlanes + from) * (kHaloW + 1) + column / 2) * kReachH * 32 +
                                i % kReachH * 32 + thread % 32];
#pragma unroll
          for (int i = 0; i < kRows - 1; i++) {
            const int at = wrapped<kRing>(wrapped<kRing>(ring_row + i) + matrix % 2) * kRingRow + column * 16;
            uint32_t halves[2][4];  // of the last column, all in the first one
            if (alone) {
              load_matrices(halves[0], first + at + low);
            } else {
              load_matrices(halves[0], first + at + second);
              load_matrices(halves[1], first + at + second + kRingPart);
            }
#pragma unroll
            for (int plane = 0; plane < kPlanes; plane++)
#pragma unroll
              for (int m = 0; m < kRowTiles; m++) {
                if (unsigned(i - 2 * m) >= kReachH) continue;
                float (&d)[4] = dense[plane][m];
                const uint4 filter = b[plane][i - 2 * m];
                if (alone) {
                  multiply_add(d, halves[0][2], halves[0][3], filter.x);
                  multiply_add(d, halves[0][0], halves[0][1], filter.z);
                  multiply_add(d, halves[0][0], halves[0][1], filter.x);
                } else {
                  multiply_add_split(d, halves[0], halves[1], filter);
                }
              }
          }
        }
      }
    }
  };

  // Everything that stays in shared memory; zeros where no window is, and beside the tile's columns.
  __device__ __forceinline__ static void fill_shared(unsigned char* shared, InputStorage& storage,
                                                     const Composed& composed, const float* shift,
                                                     const Saved& saved, const GroupShape& shape, int n) {
    for (int i = threadIdx.x; i < Composed::kFilters; i += kInputThreads) {
      const uint4 fragment = composed.filters[i];
      if constexpr (kByFours) {
        const uint32_t parts[2][2] = {{fragment.x, fragment.y}, {fragment.z, fragment.w}};
        const int step = i / (kUnits * 32), column = i / 4 % (kUnits * 8), pair = i % 4;
#pragma unroll
        for (int k = 0; k < 4; k++)
          reinterpret_cast<uint32_t*>(shared + (step * 4 + k) * kHalfStep + column * 16)[pair] =
              parts[k / 2][k % 2];
      } else {
        reinterpret_cast<uint4*>(shared)[i] = fragment;
      }
    }
    for (int i = threadIdx.x; i < Composed::kOfSample; i += kInputThreads)
      reinterpret_cast<uint4*>(shared + InputLayout::kComposed)[i] =
          composed.composed[int64_t(n) * Composed::kOfSample + i];
    for (int c = threadIdx.x; c < kOut; c += kInputThreads)
      storage.channels[c] = channel_of(saved, shape, n, c), storage.unscale[c] = composed.unscale[c];
    for (int i = threadIdx.x; i < (InputLayout::kBytes - InputLayout::kValues) / 4; i += kInputThreads)
      reinterpret_cast<uint32_t*>(shared + InputLayout::kValues)[i] = 0;
    if (threadIdx.x < kInputChannels) {
      storage.levels[threadIdx.x] = composed.levels[n * kInputChannels + threadIdx.x];
      storage.shifts[threadIdx.x] = threadIdx.x < kIn ? shift[n * kIn + threadIdx.x] : 0.f;
    }
    if (threadIdx.x < 4) (&storage.largest[0][0])[threadIdx.x] = 0;
    if (threadIdx.x == 0) storage.composed_exponent = composed.exponents[n];
  }

  // dx like x, complete but for what border_kernel adds. Grid: strips of `rows` rows of x, a multiple of
  // kPoolH; tiles of `stride` columns; samples, the first fastest.
  __device__ __forceinline__ static void input_gradient(value_t* dx, const value_t* x, const float* shift,
                                                        Composed composed, Saved saved, GroupShape shape,
                                                        Geometry geometry, int tiles, int stride) {
#if __CUDA_ARCH__ >= 800
    extern __shared__ __align__(128) unsigned char shared[];
    __shared__ InputStorage storage;
    const InputTile tile(geometry, tiles, stride);
    fill_shared(shared, storage, composed, shift, saved, shape, tile.n);
#if TENSOR_CORE_WGMMA
    publish_shared();
#endif
    __syncthreads();  // all of that is there
    InputStage operands{tile, saved, x, storage, shared};
    const InputProducts products{tile, operands, shared};
    int row = tile.first_row();
    typename InputStage::Ahead next{operands.gradients_ahead(row), {}};
    operands.load_pixels_ahead(next, row);
    for (; row < tile.row_end; row += kPoolH) {
      operands.stage(row, next);
      __syncthreads();  // that is there; and terms have been read
      if (threadIdx.x < 2) storage.largest[(row / kPoolH + 1) % 2][threadIdx.x] = 0;
      operands.rescale(row);
      products.add_selected(row);
      next.gradients = operands.gradients_ahead(row + kPoolH);
      if (row >= tile.row_begin) products.add_composed(row);
      operands.load_pixels_ahead(next, row + kPoolH);
      __syncthreads();  // all terms are there, and what was staged has been read
      if (row >= tile.row_begin) products.write(dx, row);
    }
#endif
  }
};

template <class P>
__global__ void __launch_bounds__(P::kInputThreads, 2)
    input_gradient_kernel(value_t* dx, const value_t* x, const float* shift, typename P::Composed composed,
                          typename P::Saved saved, GroupShape shape, typename P::Geometry geometry, int tiles,
                          int stride) {
  P::input_gradient(dx, x, shift, composed, saved, shape, geometry, tiles, stride);
}

}  // namespace grad::selected
