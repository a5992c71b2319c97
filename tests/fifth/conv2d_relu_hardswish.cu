// y = hardswish(relu(v + conv_bias)), and its gradient: what follows the library's convolution v.
// v, dv, y, dy (N, C, S) with S = H'·W', conv_bias (C). Bound by memory: forward reads v and writes y once, backward reads dy
// and v and writes dv once. A block takes a plane (n, c), so its sum needs no other block.
#include "core/reduce.cuh"
#include "relu_hardswish.h"

__global__ void __launch_bounds__(kThreads)
relu_hardswish_kernel(output_t* y, const value_t* v, const accumulate_t* conv_bias, int64_t C, int64_t S) {
  const int64_t plane = blockIdx.x;
  const accumulate_t inner = conv_bias[plane % C];
  for (int64_t i = threadIdx.x; i < S; i += kThreads)
    y[plane * S + i] = output_t(relu_hardswish(accumulate_t(v[plane * S + i]) + inner));
}

__global__ void __launch_bounds__(kThreads)
relu_hardswish_backward_kernel(value_t* dv, accumulate_t* sums, const output_t* dy, const value_t* v,
                               const accumulate_t* conv_bias, int64_t C, int64_t S) {
  const int64_t plane = blockIdx.x;
  const accumulate_t inner = conv_bias[plane % C];
  accumulate_t sum[1] = {0};
  for (int64_t i = threadIdx.x; i < S; i += kThreads) {
    const accumulate_t slope = relu_hardswish_slope(accumulate_t(v[plane * S + i]) + inner);
    const accumulate_t gradient = accumulate_t(dy[plane * S + i]) * slope;
    dv[plane * S + i] = value_t(gradient), sum[0] += gradient;
  }
  block_sum(sum);
  if (threadIdx.x == 0) sums[plane] = sum[0];
}

EXPORT void forward(output_t* y, const value_t* v, const accumulate_t* conv_bias, int64_t N, int64_t C, int64_t S,
                    cudaStream_t stream) {
  relu_hardswish_kernel<<<N * C, kThreads, 0, stream>>>(y, v, conv_bias, C, S);
}

// The gradients of v and, summed over samples and positions, of conv_bias. sums (N, C) is scratch.
EXPORT void backward(value_t* dv, accumulate_t* d_conv_bias, accumulate_t* sums, const output_t* dy, const value_t* v,
                     const accumulate_t* conv_bias, int64_t N, int64_t C, int64_t S, cudaStream_t stream) {
  relu_hardswish_backward_kernel<<<N * C, kThreads, 0, stream>>>(dv, sums, dy, v, conv_bias, C, S);
  sum_rows({{d_conv_bias, C}}, sums, N, C, stream);
}
