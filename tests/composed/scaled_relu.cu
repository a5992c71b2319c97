// y = relu(v + conv_bias) * scale + bias, where v is the library's convolution
#include "core/numerics.h"
#include "core/reduce.cuh"
#include "host/tensor.h"

struct Tail {
  const accumulate_t *conv_bias, *bias;  // (C)
  accumulate_t scale;

  HOST_DEVICE accumulate_t operator()(accumulate_t v, int64_t c) const {
    return maximum(v + conv_bias[c], accumulate_t(0)) * scale + bias[c];
  }
  // Of v and conv_bias; that of bias is dy.
  HOST_DEVICE accumulate_t gradient(accumulate_t dy, accumulate_t v, int64_t c) const {
    return v + conv_bias[c] > 0 ? dy * scale : accumulate_t(0);
  }
};

// A block takes a plane of C planes a sample, of S elements.
__global__ void tail_kernel(value_t* y, const value_t* v, Tail tail, int64_t C, int64_t S) {
  for (int64_t i = threadIdx.x; i < S; i += blockDim.x)
    y[blockIdx.x * S + i] = value_t(tail(accumulate_t(v[blockIdx.x * S + i]), blockIdx.x % C));
}

// sums (2, N, C) of dv and of dy.
__global__ void gradient_kernel(value_t* dv, accumulate_t* sums, const value_t* dy, const value_t* v, Tail tail, int64_t C, int64_t S) {
  accumulate_t sum[2] = {0, 0};
  for (int64_t i = threadIdx.x; i < S; i += blockDim.x) {
    const accumulate_t given = accumulate_t(dy[blockIdx.x * S + i]);
    const accumulate_t found = tail.gradient(given, accumulate_t(v[blockIdx.x * S + i]), blockIdx.x % C);
    dv[blockIdx.x * S + i] = value_t(found), sum[0] += found, sum[1] += given;
  }
  block_sum(sum);
  if (threadIdx.x == 0) sums[blockIdx.x] = sum[0], sums[gridDim.x + blockIdx.x] = sum[1];
}

EXPORT void forward(Out<value_t> y, In<value_t> v, In<accumulate_t> conv_bias, In<accumulate_t> bias, double scale, cudaStream_t stream) {
  const int64_t N = v.size(0), C = v.size(1);
  tail_kernel<<<N * C, kThreads, 0, stream>>>(y, v, Tail{conv_bias, bias, accumulate_t(scale)}, C, v.numel() / (N * C));
}

EXPORT void backward(Out<value_t> dv, Out<accumulate_t> dconv_bias, Out<accumulate_t> dbias, In<value_t> dy, In<value_t> v,
                     In<accumulate_t> conv_bias, In<accumulate_t> bias, double scale, cudaStream_t stream) {
  const int64_t N = v.size(0), C = v.size(1);
  const Scratch<accumulate_t> sums(2 * N * C, stream);
  gradient_kernel<<<N * C, kThreads, 0, stream>>>(dv, sums, dy, v, Tail{conv_bias, bias, accumulate_t(scale)}, C, v.numel() / (N * C));
  sum_rows({{dconv_bias, C}, {dbias, C}}, sums.data, N, C, stream);
}
