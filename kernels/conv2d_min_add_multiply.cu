// y = (min(conv + conv_bias, constant) + bias) * scale, and its gradient: what follows the library's convolution.
//
// v, dv (N, S, C)   the convolution without its bias, channels last, which is where the library is fastest; S = H'·W'
// y, dy (N, C, S)   the result, in PyTorch's default layout
// Bound by memory: forward reads v and writes y once; backward reads dy and v and writes dv once. All passes transpose, so
// a block moves tiles of kTile × kTile through shared memory: both sides then run over 4·kTile bytes or more in a row.
#include "numerics.h"

constexpr int kTile = sizeof(value_t) > 4 ? 32 : 64;  // a tile fits in 48 KB of shared memory
constexpr int kThreads = 256;
constexpr int kVector = 4;                    // neighbours that one thread moves
constexpr int kLanes = kTile / kVector;       // threads along a tile's row
constexpr int kStep = kThreads / kLanes;      // tile rows that a block moves at a time

template <class T> struct alignas(sizeof(T) * kVector) Vector { T at[kVector]; };

// in (rows, columns) -> out (columns, rows), for the tile at (row0, column0): out = apply(in, row, column, i), where i
// counts a thread's neighbours along a row of out. `aligned`: rows, columns and both pointers are multiples of a Vector.
template <class Out, class In, class Apply>
__device__ __forceinline__ void transpose_tile(Out* out, const In* in, int64_t rows, int64_t columns, int64_t row0,
                                               int64_t column0, bool aligned, const Apply& apply) {
  __shared__ In tile[kTile][kTile + 1];  // the odd pitch spreads a column over the banks
  const int lane = threadIdx.x % kLanes * kVector, step = threadIdx.x / kLanes;
  const bool whole = aligned && row0 + kTile <= rows && column0 + kTile <= columns;
  __syncthreads();  // the previous tile has been read
  if (whole) {
    Vector<In> four[kTile / kStep];  // all loads are under way before the first is used
#pragma unroll
    for (int k = 0; k < kTile / kStep; k++)
      four[k] = *reinterpret_cast<const Vector<In>*>(in + (row0 + step + k * kStep) * columns + column0 + lane);
#pragma unroll
    for (int k = 0; k < kTile / kStep; k++)
#pragma unroll
      for (int i = 0; i < kVector; i++) tile[step + k * kStep][lane + i] = four[k].at[i];
  } else {
    for (int r = step; r < kTile && row0 + r < rows; r += kStep)
      for (int i = 0; i < kVector && column0 + lane + i < columns; i++)
        tile[r][lane + i] = in[(row0 + r) * columns + column0 + lane + i];
  }
  __syncthreads();  // the tile is complete
  if (whole) {
#pragma unroll
    for (int k = 0; k < kTile / kStep; k++) {
      const int c = step + k * kStep;
      Vector<Out> four;
#pragma unroll
      for (int i = 0; i < kVector; i++) four.at[i] = apply(tile[lane + i][c], row0 + lane + i, column0 + c, i);
      *reinterpret_cast<Vector<Out>*>(out + (column0 + c) * rows + row0 + lane) = four;
    }
  } else {
    for (int c = step; c < kTile && column0 + c < columns; c += kStep)
#pragma unroll
      for (int i = 0; i < kVector; i++)
        if (row0 + lane + i < rows)
          out[(column0 + c) * rows + row0 + lane + i] = apply(tile[lane + i][c], row0 + lane + i, column0 + c, i);
  }
}

__global__ void __launch_bounds__(kThreads)
transpose_kernel(value_t* out, const value_t* in, int64_t rows, int64_t columns, int64_t row_tiles, int64_t column_tiles,
                 bool aligned) {
  const int64_t column_tile = blockIdx.x % column_tiles, row_tile = blockIdx.x / column_tiles % row_tiles;
  const int64_t n = blockIdx.x / (column_tiles * row_tiles);
  transpose_tile(out + n * rows * columns, in + n * rows * columns, rows, columns, row_tile * kTile, column_tile * kTile,
                 aligned, [](value_t value, int64_t, int64_t, int) { return value; });
}

__global__ void __launch_bounds__(kThreads)
min_add_multiply_kernel(output_t* y, const value_t* v, const accumulate_t* conv_bias, const accumulate_t* bias,
                        accumulate_t constant, accumulate_t scale, int64_t C, int64_t S, int64_t position_tiles,
                        int64_t channel_tiles, bool aligned) {
  const int64_t channel_tile = blockIdx.x % channel_tiles, position_tile = blockIdx.x / channel_tiles % position_tiles;
  const int64_t n = blockIdx.x / (channel_tiles * position_tiles);
  transpose_tile(y + n * C * S, v + n * C * S, S, C, position_tile * kTile, channel_tile * kTile, aligned,
                 [=](value_t value, int64_t, int64_t c, int) {
                   const accumulate_t convolved = accumulate_t(value) + conv_bias[c];
                   return output_t((minimum(convolved, constant) + bias[c]) * scale);
                 });
}

// A block walks over the position tiles chunk, chunk + chunks, … of one (sample, channel tile); its sums over positions go
// to row n·chunks + chunk of sums (2, N·chunks, C): of dv, the gradient of conv_bias, and of dy·scale, that of bias.
__global__ void __launch_bounds__(kThreads)
min_add_multiply_backward_kernel(value_t* dv, accumulate_t* sums, const output_t* dy, const value_t* v,
                                 const accumulate_t* conv_bias, accumulate_t constant, accumulate_t scale, int64_t N,
                                 int64_t C, int64_t S, int64_t position_tiles, int64_t channel_tiles, int64_t chunks,
                                 bool aligned) {
  const int64_t channel_tile = blockIdx.x % channel_tiles, chunk = blockIdx.x / channel_tiles % chunks;
  const int64_t n = blockIdx.x / (channel_tiles * chunks), c0 = channel_tile * kTile;
  accumulate_t conv_bias_sum[kVector] = {}, bias_sum[kVector] = {};
  const value_t* value = v + n * S * C;
  for (int64_t tile = chunk; tile < position_tiles; tile += chunks) {
    transpose_tile(dv + n * S * C, dy + n * C * S, C, S, c0, tile * kTile, aligned,
                   [&](output_t gradient, int64_t c, int64_t s, int i) {
                     const accumulate_t outer = accumulate_t(gradient) * scale;
                     const accumulate_t inner =
                         outer * minimum_gradient(accumulate_t(value[s * C + c]) + conv_bias[c], constant);
                     bias_sum[i] += outer;
                     conv_bias_sum[i] += inner;
                     return value_t(inner);
                   });
  }
  __shared__ accumulate_t partial[2][kStep][kTile];
  const int lane = threadIdx.x % kLanes * kVector, step = threadIdx.x / kLanes;
#pragma unroll
  for (int i = 0; i < kVector; i++) {
    partial[0][step][lane + i] = conv_bias_sum[i];
    partial[1][step][lane + i] = bias_sum[i];
  }
  __syncthreads();  // every thread's sums are there
  for (int j = threadIdx.x; j < 2 * kTile; j += kThreads) {
    const int which = j / kTile, c = j % kTile;
    if (c0 + c >= C) continue;
    accumulate_t sum = 0;
    for (int k = 0; k < kStep; k++) sum += partial[which][k][c];
    sums[(which * N * chunks + n * chunks + chunk) * C + c0 + c] = sum;
  }
}

static int64_t tiles(int64_t size) { return (size + kTile - 1) / kTile; }

template <class A, class B> static bool vectors_fit(const A* a, const B* b, int64_t rows, int64_t columns) {
  return rows % kVector == 0 && columns % kVector == 0 && uintptr_t(a) % sizeof(Vector<A>) == 0 &&
         uintptr_t(b) % sizeof(Vector<B>) == 0;
}

// source (N, rows, columns) -> out (N, columns, rows): to channels last.
EXPORT void transpose(value_t* out, const value_t* source, int64_t N, int64_t rows, int64_t columns, cudaStream_t stream) {
  const int64_t row_tiles = tiles(rows), column_tiles = tiles(columns);
  transpose_kernel<<<N * row_tiles * column_tiles, kThreads, 0, stream>>>(out, source, rows, columns, row_tiles, column_tiles,
                                                                         vectors_fit(out, source, rows, columns));
}

EXPORT void forward(output_t* y, const value_t* v, const accumulate_t* conv_bias, const accumulate_t* bias,
                    double constant, double scale, int64_t N, int64_t C, int64_t S, cudaStream_t stream) {
  const int64_t position_tiles = tiles(S), channel_tiles = tiles(C);
  min_add_multiply_kernel<<<N * position_tiles * channel_tiles, kThreads, 0, stream>>>(
      y, v, conv_bias, bias, constant, scale, C, S, position_tiles, channel_tiles, vectors_fit(y, v, S, C));
}

// sums (2, N·chunks, C), 1 ≤ chunks ≤ S; see the kernel.
EXPORT void backward(value_t* dv, accumulate_t* sums, const output_t* dy, const value_t* v, const accumulate_t* conv_bias,
                     double constant, double scale, int64_t N, int64_t C, int64_t S, int64_t chunks, cudaStream_t stream) {
  const int64_t position_tiles = tiles(S), channel_tiles = tiles(C);
  min_add_multiply_backward_kernel<<<N * chunks * channel_tiles, kThreads, 0, stream>>>(
      dv, sums, dy, v, conv_bias, constant, scale, N, C, S, position_tiles, channel_tiles, chunks,
      vectors_fit(dv, dy, C, S));
}
