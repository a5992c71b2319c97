// y = (min(conv + conv_bias, constant) + bias) * scale, and its gradient, on the CPU. The launchers of
// conv2d_min_add_multiply.cu, but v and dv are (N, C, S) like y and dy: here the library's convolution is
// most exact in that layout, and no slower. A thread takes whole planes.
#include <cmath>
#include <limits>
#include "cpu.h"
#include "winograd.h"

EXPORT void forward(output_t* y, const value_t* v, const accumulate_t* conv_bias, const accumulate_t* bias,
                    double constant, double scale, int64_t N, int64_t C, int64_t S) {
  const accumulate_t bound = constant, factor = scale;
  host::parallel_for(N * C, 1, [=](int64_t begin, int64_t end) {
    for (int64_t plane = begin; plane < end; plane++) {
      const accumulate_t inner = conv_bias[plane % C], outer = bias[plane % C];
      for (int64_t i = plane * S; i < (plane + 1) * S; i++)
        y[i] = output_t((minimum(accumulate_t(v[i]) + inner, bound) + outer) * factor);
    }
  });
}

// The gradients of v and, summed over the samples, of the parameters; d_bias has `biases` elements, C or 1.
// sums (2, N·chunks, C) of dv and of dy·scale is scratch, with chunks = 1: a row per sample. There is no TF32
// here.
EXPORT void backward(value_t* dv, accumulate_t* d_conv_bias, accumulate_t* d_bias, double* sums,
                     const output_t* dy, const value_t* v, const accumulate_t* conv_bias, double constant,
                     double scale, int64_t biases, int64_t N, int64_t C, int64_t S, int64_t chunks,
                     bool tf32) {
  const accumulate_t bound = constant, factor = scale;
  host::parallel_for(N * C, 1, [=](int64_t begin, int64_t end) {
    for (int64_t plane = begin; plane < end; plane++) {
      double inner = 0, outer = 0;
      for (int64_t i = plane * S; i < (plane + 1) * S; i++) {
        const accumulate_t gradient = accumulate_t(dy[i]) * factor;
        const accumulate_t passed =
            minimum_backward(gradient, accumulate_t(v[i]) + conv_bias[plane % C], bound);
        outer += gradient, inner += passed;
        dv[i] = value_t(passed);
      }
      sums[plane] = inner, sums[N * chunks * C + plane] = outer;
    }
  });
  sum_rows(d_conv_bias, C, sums, N, C);
  sum_rows(d_bias, biases, sums + N * C, N, C);
}

// The whole problem: y (N, C, H', W') from x (N, Cin, H, W) and weight (C, Cin, 3, 3); v like y is the
// convolution, or has no elements. finite (N), ones before: 0 where a sample's convolution is not finite
// everywhere, so that direct sums may give something else.
EXPORT void convolve_forward(output_t* y, value_t* v, int32_t* finite, const value_t* x,
                             const value_t* weight, const accumulate_t* conv_bias, const accumulate_t* bias,
                             double constant, double scale, int64_t N, int64_t Cin, int64_t C, int64_t H,
                             int64_t W) {
  const accumulate_t bound = constant, factor = scale;
  const winograd::Sizes sizes{N, Cin, C, 1, H, W, 1};
  const int64_t sample = C * sizes.height() * sizes.width();
  winograd::convolve(x, weight, sizes, [=](int64_t c, int64_t at, const accumulate_t* values, int64_t count) {
    const accumulate_t inner = conv_bias[c], outer = bias[c];
    int odd = 0;
    for (int64_t i = 0; i < count; i++) {
      odd |= !(std::abs(values[i]) <= std::numeric_limits<accumulate_t>::max());
      y[at + i] = output_t((minimum(values[i] + inner, bound) + outer) * factor);
    }
    for (int64_t i = 0; v && i < count; i++) v[at + i] = value_t(values[i]);
    if (odd) __atomic_store_n(finite + at / sample, 0, __ATOMIC_RELAXED);
  });
}
