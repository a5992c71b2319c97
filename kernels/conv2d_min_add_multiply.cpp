// y = (min(conv + conv_bias, constant) + bias) * scale, and its gradient, on the CPU. The launchers and layouts of
// conv2d_min_add_multiply.cu.
//
// v (N, S, C): the convolution without its bias, channels last; S = H'·W' positions.   y, dy (N, C, S).
// Bound by memory: v is read once and y written once, straight from cache where the caller works sample by sample.
#include <vector>
#include "cpu.h"

constexpr int64_t kPositions = 64;  // a tile of positions × channels stays in L1 while it is transposed
constexpr int64_t kChannels = 16;

// Calls body(n, s0, s1, c0, c1) for all tiles, strips of positions in parallel.
template <class Body> static void for_each_tile(int64_t N, int64_t C, int64_t S, const Body& body) {
  const int64_t strips = (S + kPositions - 1) / kPositions;
  host::parallel_for(N * strips, 1, [=](int64_t begin, int64_t end) {
    for (int64_t strip = begin; strip < end; strip++) {
      const int64_t s0 = strip % strips * kPositions, s1 = std::min(S, s0 + kPositions);
      for (int64_t c0 = 0; c0 < C; c0 += kChannels) body(strip / strips, s0, s1, c0, std::min(C, c0 + kChannels));
    }
  });
}

// source (N, rows, columns) -> out (N, columns, rows): to channels last.
EXPORT void transpose(value_t* out, const value_t* source, int64_t N, int64_t rows, int64_t columns) {
  for_each_tile(N, rows, columns, [=](int64_t n, int64_t s0, int64_t s1, int64_t c0, int64_t c1) {
    const value_t* from = source + n * rows * columns;
    value_t* to = out + n * rows * columns;
    for (int64_t s = s0; s < s1; s++)
      for (int64_t c = c0; c < c1; c++) to[s * rows + c] = from[c * columns + s];
  });
}

EXPORT void forward(output_t* y, const value_t* v, const accumulate_t* conv_bias, const accumulate_t* bias,
                    double constant, double scale, int64_t N, int64_t C, int64_t S) {
  const accumulate_t bound = constant, factor = scale;
  for_each_tile(N, C, S, [=](int64_t n, int64_t s0, int64_t s1, int64_t c0, int64_t c1) {
    const value_t* in = v + n * S * C;
    output_t* out = y + n * S * C;
    for (int64_t c = c0; c < c1; c++) {
      const accumulate_t inner = conv_bias[c], outer = bias[c];
      for (int64_t s = s0; s < s1; s++)
        out[c * S + s] = output_t((minimum(accumulate_t(in[s * C + c]) + inner, bound) + outer) * factor);
    }
  });
}

// sums (2, N·chunks, C) of dv and of dy·scale; chunk k of a sample holds the positions k·S / chunks to (k + 1)·S / chunks.
EXPORT void backward(value_t* dv, accumulate_t* sums, const output_t* dy, const value_t* v, const accumulate_t* conv_bias,
                     double constant, double scale, int64_t N, int64_t C, int64_t S, int64_t chunks) {
  const accumulate_t bound = constant, factor = scale;
  for_each_tile(N, C, S, [=](int64_t n, int64_t s0, int64_t s1, int64_t c0, int64_t c1) {
    const value_t* value = v + n * S * C;
    const output_t* gradient = dy + n * S * C;
    value_t* out = dv + n * S * C;
    for (int64_t c = c0; c < c1; c++)
      for (int64_t s = s0; s < s1; s++)
        out[s * C + c] = value_t(minimum_backward(accumulate_t(gradient[c * S + s]) * factor,
                                                  accumulate_t(value[s * C + c]) + conv_bias[c], bound));
  });
  host::parallel_for(N * chunks, 1, [=](int64_t begin, int64_t end) {
    std::vector<double> inner(C), outer(C);
    for (int64_t row = begin; row < end; row++) {
      const int64_t n = row / chunks, first = row % chunks * S / chunks, last = (row % chunks + 1) * S / chunks;
      std::fill(inner.begin(), inner.end(), 0), std::fill(outer.begin(), outer.end(), 0);
      for (int64_t c = 0; c < C; c++)
        for (int64_t s = first; s < last; s++) {
          const accumulate_t gradient = accumulate_t(dy[(n * C + c) * S + s]) * factor;
          outer[c] += gradient;
          inner[c] += minimum_backward(gradient, accumulate_t(v[(n * S + s) * C + c]) + conv_bias[c], bound);
        }
      for (int64_t c = 0; c < C; c++) sums[row * C + c] = inner[c], sums[(N * chunks + row) * C + c] = outer[c];
    }
  });
}
