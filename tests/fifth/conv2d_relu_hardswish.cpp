// y = hardswish(relu(v + conv_bias)), and its gradient, on the CPU: what follows the library's convolution v.
// v, dv, y, dy (N, C, S) with S = H'·W', conv_bias (C). A thread takes whole planes.
#include "cpu/vector.h"
#include "relu_hardswish.h"

EXPORT void forward(output_t* y, const value_t* v, const accumulate_t* conv_bias, int64_t N, int64_t C, int64_t S) {
  host::parallel_for(N * C, 1, [=](int64_t begin, int64_t end) {
    for (int64_t plane = begin; plane < end; plane++)
      for (int64_t i = plane * S; i < (plane + 1) * S; i++)
        y[i] = output_t(relu_hardswish(accumulate_t(v[i]) + conv_bias[plane % C]));
  });
}

// The gradients of v and, summed over samples and positions, of conv_bias. sums (N, C) is scratch.
EXPORT void backward(value_t* dv, accumulate_t* d_conv_bias, accumulate_t* sums, const output_t* dy, const value_t* v,
                     const accumulate_t* conv_bias, int64_t N, int64_t C, int64_t S) {
  host::parallel_for(N * C, 1, [=](int64_t begin, int64_t end) {
    for (int64_t plane = begin; plane < end; plane++) {
      double sum = 0;
      for (int64_t i = plane * S; i < (plane + 1) * S; i++) {
        const accumulate_t slope = relu_hardswish_slope(accumulate_t(v[i]) + conv_bias[plane % C]);
        const accumulate_t gradient = accumulate_t(dy[i]) * slope;
        dv[i] = value_t(gradient), sum += gradient;
      }
      sums[plane] = accumulate_t(sum);
    }
  });
  sum_rows(d_conv_bias, C, sums, N, C);
}
