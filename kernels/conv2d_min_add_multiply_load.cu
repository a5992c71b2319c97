// y = (min(conv + conv_bias, constant) + bias) * scale, and its gradient: what follows the library's
// convolution.
//
//   v, dv (N, S, C)  the convolution without its bias, channels last, which is where the library is fastest
//   y, dy (N, C, S)  the result, in PyTorch's default layout; S = H'·W'
//
// Bound by memory: forward reads v and writes y once; backward reads dy and v and writes dv once. All passes
// transpose, so a block moves tiles through shared memory: both sides then run over 128 bytes or more in a
// row. Measured: rows of S floats start between two sectors, so tiles that are long along S waste less.
#include "core/numerics.h"
#include "core/reduce.cuh"
#include "core/vector.cuh"

// How a block's threads lie over rows of kWidth elements: `lane` along a row, `step` and every kStep-th row
// after it.
template <int kWidth> struct Layout {
  static constexpr int kLanes = kWidth / kVector, kStep = kThreads / kLanes;
  int lane = threadIdx.x % kLanes * kVector, step = threadIdx.x / kLanes;
};

// The place of a block: sample n, tile (row, column), from a grid of N · row_tiles · column_tiles blocks. 32
// bits, because a 64-bit division costs as much as a tile.
struct Place {
  unsigned n, row, column;
  __device__ Place(unsigned row_tiles, unsigned column_tiles)
      : n(blockIdx.x / column_tiles / row_tiles),
        row(blockIdx.x / column_tiles % row_tiles),
        column(blockIdx.x % column_tiles) {}
};

// source (rows, columns) -> out (columns, rows), for the tile at (row0, column0): out = apply(source, row,
// column, i), where i counts a thread's neighbours along a row of out. `aligned`: rows, columns and both
// pointers are multiples of a Vector.
template <int kRows, int kColumns, class Out, class In, class Apply>
__device__ __forceinline__ void transpose_tile(Out* out, const In* source, int64_t rows, int64_t columns,
                                               int64_t row0, int64_t column0, bool aligned,
                                               const Apply& apply) {
  __shared__ In tile[kRows][kColumns + 1];  // the odd pitch spreads a column over the banks
  const Layout<kColumns> from;
  const Layout<kRows> to;
  const bool whole = aligned && row0 + kRows <= rows && column0 + kColumns <= columns;
  __syncthreads();  // the previous tile has been read
  if (whole) {
    constexpr int kLoads = kRows / from.kStep;
    Vector<In> four[kLoads];  // all loads are under way before the first is used
#pragma unroll
    for (int k = 0; k < kLoads; k++)
      four[k] = load_vector(source + (row0 + from.step + k * from.kStep) * columns + column0 + from.lane);
#pragma unroll
    for (int k = 0; k < kLoads; k++)
#pragma unroll
      for (int i = 0; i < kVector; i++) tile[from.step + k * from.kStep][from.lane + i] = four[k].at[i];
  } else {
    for (int r = from.step; r < kRows && row0 + r < rows; r += from.kStep)
      for (int i = 0; i < kVector && column0 + from.lane + i < columns; i++)
        tile[r][from.lane + i] = source[(row0 + r) * columns + column0 + from.lane + i];
  }
  __syncthreads();  // the tile is complete
  if (whole) {
#pragma unroll
    for (int k = 0; k < kColumns / to.kStep; k++) {
      const int c = to.step + k * to.kStep;
      Vector<Out> four;
#pragma unroll
      for (int i = 0; i < kVector; i++)
        four.at[i] = apply(tile[to.lane + i][c], row0 + to.lane + i, column0 + c, i);
      store_vector(out + (column0 + c) * rows + row0 + to.lane, four);
    }
  } else {
    for (int c = to.step; c < kColumns && column0 + c < columns; c += to.kStep)
#pragma unroll
      for (int i = 0; i < kVector; i++)
        if (row0 + to.lane + i < rows)
          out[(column0 + c) * rows + row0 + to.lane + i] =
              apply(tile[to.lane + i][c], row0 + to.lane + i, column0 + c, i);
  }
}

// The nearest value of TF32's, ties away from zero (cvt.rna.tf32): so the library rounds operands in eager's
// layout; from operands in channels last a tensor core cuts the other bits off. No other type runs in TF32.
__device__ inline float nearest_tf32(float v) {
  const bool stays_finite = fabsf(v) < 0x1.ffep127f;  // and is not NaN
  return stays_finite ? __uint_as_float((__float_as_uint(v) + 0x1000) & ~0x1fffu) : v;
}
template <class T> __device__ T nearest_tf32(T v) { return v; }

constexpr int kSquare = 64;  // tiles of the plain transposition

__global__ void __launch_bounds__(kThreads)
transpose_kernel(value_t* out, const value_t* source, int64_t rows, int64_t columns, unsigned row_tiles,
                 unsigned column_tiles, bool tf32, bool aligned) {
  const Place at(row_tiles, column_tiles);
  const int64_t begin = at.n * rows * columns;
  transpose_tile<kSquare, kSquare>(
      out + begin, source + begin, rows, columns, int64_t(at.row) * kSquare, int64_t(at.column) * kSquare,
      aligned, [=](value_t value, int64_t, int64_t, int) { return tf32 ? nearest_tf32(value) : value; });
}

constexpr int kForwardPositions = 128, kForwardChannels = 32;

__global__ void __launch_bounds__(kThreads)
min_add_multiply_kernel(output_t* y, const value_t* v, const accumulate_t* conv_bias,
                        const accumulate_t* bias, accumulate_t constant, accumulate_t scale, int64_t C,
                        int64_t S, unsigned position_tiles, unsigned channel_tiles, bool aligned) {
  const Place at(position_tiles, channel_tiles);
  const int64_t begin = at.n * C * S;
  transpose_tile<kForwardPositions, kForwardChannels>(
      y + begin, v + begin, S, C, int64_t(at.row) * kForwardPositions, int64_t(at.column) * kForwardChannels,
      aligned, [=](value_t value, int64_t, int64_t c, int) {
        const accumulate_t convolved = accumulate_t(value) + conv_bias[c];
        // The formula of conv2d_min_add_multiply_load.
        return output_t((minimum(convolved, constant) + bias[c]) * scale);
      });
}

constexpr int kBackwardChannels = 32, kBackwardPositions = 64;

// A block walks over the position tiles chunk, chunk + chunks, … of one (sample, channel tile); its sums over
// positions go to row n·chunks + chunk of sums (2, N·chunks, C): of dv, the gradient of conv_bias, and of
// dy·scale, that of bias. A tile's few values are summed as they are, tiles in double: what cancels leaves no
// rounding errors of large sums.
__global__ void __launch_bounds__(kThreads)
min_add_multiply_backward_kernel(value_t* dv, double* sums, const output_t* dy, const value_t* v,
                                 const accumulate_t* conv_bias, accumulate_t constant, accumulate_t scale,
                                 int64_t N, int64_t C, int64_t S, unsigned position_tiles,
                                 unsigned channel_tiles, unsigned chunks, bool tf32, bool aligned) {
  const Place at(chunks, channel_tiles);
  const int64_t begin = at.n * C * S, c0 = int64_t(at.column) * kBackwardChannels;
  double conv_bias_sum[kVector] = {}, bias_sum[kVector] = {};
  const value_t* value = v + begin;
  for (unsigned tile = at.row; tile < position_tiles; tile += chunks) {
    accumulate_t inner_sum[kVector] = {}, outer_sum[kVector] = {};
    transpose_tile<kBackwardChannels, kBackwardPositions>(
        dv + begin, dy + begin, C, S, c0, int64_t(tile) * kBackwardPositions, aligned,
        [&](output_t gradient, int64_t c, int64_t s, int i) {
          // The gradient of conv2d_min_add_multiply_load.
          const accumulate_t outer = accumulate_t(gradient) * scale;
          const accumulate_t inner =
              minimum_backward(outer, accumulate_t(value[s * C + c]) + conv_bias[c], constant);
          outer_sum[i] += outer;
          inner_sum[i] += inner;
          return tf32 ? nearest_tf32(value_t(inner)) : value_t(inner);
        });
#pragma unroll
    for (int i = 0; i < kVector; i++) conv_bias_sum[i] += inner_sum[i], bias_sum[i] += outer_sum[i];
  }
  const Layout<kBackwardChannels> to;
  __shared__ double partial[2][to.kStep][kBackwardChannels];
#pragma unroll
  for (int i = 0; i < kVector; i++) {
    partial[0][to.step][to.lane + i] = conv_bias_sum[i];
    partial[1][to.step][to.lane + i] = bias_sum[i];
  }
  __syncthreads();  // every thread's sums are there
  if (threadIdx.x >= 2 * kBackwardChannels) return;
  const int which = threadIdx.x / kBackwardChannels, c = threadIdx.x % kBackwardChannels;
  if (c0 + c >= C) return;
  double sum = 0;
  for (int k = 0; k < to.kStep; k++) sum += partial[which][k][c];
  sums[((which * N + at.n) * chunks + at.row) * C + c0 + c] = sum;
}

static unsigned tiles(int64_t size, int tile) { return unsigned((size + tile - 1) / tile); }

// source (N, rows, columns) -> out (N, columns, rows): to channels last. tf32: as an operand of TF32, see
// nearest_tf32.
EXPORT void transpose(value_t* out, const value_t* source, int64_t N, int64_t rows, int64_t columns,
                      bool tf32, cudaStream_t stream) {
  const unsigned row_tiles = tiles(rows, kSquare), column_tiles = tiles(columns, kSquare);
  transpose_kernel<<<N * row_tiles * column_tiles, kThreads, 0, stream>>>(
      out, source, rows, columns, row_tiles, column_tiles, tf32,
      vectors_fit(out, rows) && vectors_fit(source, columns));
}

EXPORT void forward(output_t* y, const value_t* v, const accumulate_t* conv_bias, const accumulate_t* bias,
                    double constant, double scale, int64_t N, int64_t C, int64_t S, cudaStream_t stream) {
  const unsigned position_tiles = tiles(S, kForwardPositions), channel_tiles = tiles(C, kForwardChannels);
  min_add_multiply_kernel<<<N * position_tiles * channel_tiles, kThreads, 0, stream>>>(
      y, v, conv_bias, bias, constant, scale, C, S, position_tiles, channel_tiles,
      vectors_fit(y, S) && vectors_fit(v, C));
}

// The gradients of v and, summed over the samples, of the parameters; d_bias has `biases` elements, C or 1.
// sums (2, N·chunks, C) is scratch, 1 ≤ chunks ≤ S; see the kernel. tf32: dv as an operand of TF32.
EXPORT void backward(value_t* dv, accumulate_t* d_conv_bias, accumulate_t* d_bias, double* sums,
                     const output_t* dy, const value_t* v, const accumulate_t* conv_bias, double constant,
                     double scale, int64_t biases, int64_t N, int64_t C, int64_t S, int64_t chunks, bool tf32,
                     cudaStream_t stream) {
  const unsigned position_tiles = tiles(S, kBackwardPositions), channel_tiles = tiles(C, kBackwardChannels);
  min_add_multiply_backward_kernel<<<N * chunks * channel_tiles, kThreads, 0, stream>>>(
      dv, sums, dy, v, conv_bias, constant, scale, N, C, S, position_tiles, channel_tiles, unsigned(chunks),
      tf32, vectors_fit(dv, C) && vectors_fit(dy, S));
  sum_rows({{d_conv_bias, C}, {d_bias, biases}}, sums, N * chunks, C, stream);
}
