// Results that are computed again, by plain sums of float32, where x or weight has what a product of tensor
// cores can't take: infinities, or values so large that those beside them lose their digits. A mainloop says
// for which samples that may be (Doubts); mostly there are none, and the launch ends at once.
#pragma once
#include "core/launch.cuh"
#include "core/scalar.h"
#include "host/tensor.h"

namespace conv {

// Operands that share a scale have an error of 2^-39 of the largest of them, or less. Beside this magnitude
// that is 2^-19; beside larger ones it is a doubt.
constexpr float kLargest = 1 << 20;
constexpr int kLowestExponent = 14 - 20;  // of the scale that brings it into float16's range

// The convolution's values v (N, kOut, OD, OH, OW) one by one; in two dimensions D = kDepth = 1.
template <int kIn, int kOut_, int kDepth, int kHeight, int kWidth> struct Exact {
  static constexpr int kOut = kOut_;
  const value_t *x, *weight;
  int64_t N;
  int D, H, W;

  Exact(const In<value_t>& x, const In<value_t>& weight)
      : x(x), weight(weight), N(x.size(0)), D(x.dims == 5 ? int(x.size(2)) : 1), H(int(x.size(-2))),
        W(int(x.size(-1))) {}
  HOST_DEVICE int depth() const { return D - kDepth + 1; }
  HOST_DEVICE int height() const { return H - kHeight + 1; }
  HOST_DEVICE int width() const { return W - kWidth + 1; }
  HOST_DEVICE int64_t positions() const { return int64_t(depth()) * height() * width(); }

  __device__ float operator()(int64_t n, int c, int plane, int row, int column) const {
    const value_t* filter = weight + int64_t(c) * (kIn * kDepth * kHeight * kWidth);
    const value_t* first = x + ((n * kIn * D + plane) * H + row) * W + column;
    float sum = 0;
#pragma unroll 1
    for (int k = 0; k < kIn; k++, first += int64_t(D) * H * W)
#pragma unroll 1
      for (int d = 0; d < kDepth; d++)
#pragma unroll 1
        for (int h = 0; h < kHeight; h++, filter += kWidth) {
          const value_t* const from = first + (int64_t(d) * H + h) * W;
#pragma unroll
          for (int w = 0; w < kWidth; w++) sum = fmaf(float(from[w]), float(filter[w]), sum);
        }
    return sum;
  }
  // By its place among the positions.
  __device__ float operator()(int64_t n, int c, int64_t position) const {
    const int row = int(position / width() % height());
    return (*this)(n, c, int(position / width() / height()), row, int(position % width()));
  }
};

// What a tail makes of v; only some have to know where it lies.
template <class Tail>
__device__ __forceinline__ float tail_of(const Tail& tail, float v, const typename Tail::Channel& channel,
                                         int64_t at) {
  if constexpr (std::is_invocable_v<const Tail&, float, const typename Tail::Channel&, int64_t>)
    return tail(v, channel, at);
  else return tail(v, channel);
}

// Results that a pointwise tail makes, one by one: y (N, kOut, …).
template <class Values, class T, class Tail> struct Pointwise {
  Values v;
  T* y;
  Tail tail;
  HOST_DEVICE int64_t results() const { return Values::kOut * v.positions(); }  // of a sample
  __device__ void operator()(int64_t n, int64_t i) const {
    const int c = int(i / v.positions());
    const int64_t at = n * results() + i;
    y[at] = T(tail_of(tail, v(n, c, i % v.positions()), tail.channel(n, c), at));
  }
};

// Results of two kinds.
template <class First, class Second> struct Both {
  First first;
  Second second;
  HOST_DEVICE int64_t results() const { return first.results() + second.results(); }
  __device__ void operator()(int64_t n, int64_t i) const {
    if (i < first.results()) first(n, i);
    else second(n, i - first.results());
  }
};
template <class First> First all_of(const First& first) { return first; }
template <class First, class... Rest> auto all_of(const First& first, const Rest&... rest) {
  return Both<First, decltype(all_of(rest...))>{first, all_of(rest...)};
}
template <class T, class Values, class Tail>
Pointwise<Values, T, Tail> each_value(const Values& v, T* y, const Tail& tail) {
  return {v, y, tail};
}

// A result, and the tail that makes it.
template <class T, class Tail> struct Stored {
  Out<T> to;
  Tail tail;
};
template <class T, class Tail> Stored(Out<T>, Tail) -> Stored<T, Tail>;

// Magnitudes of x, as bits, `of_sample` for each sample; and the exponents that weights were scaled by, if
// they say anything: `channels` of them.
struct Doubts {
  const uint32_t* magnitudes;
  int64_t of_sample;
  const int32_t* exponents;
  int channels;
  __device__ bool weight(int c) const { return exponents[c] < kLowestExponent; }
  __device__ bool x(int64_t i) const { return magnitudes[i] >= __float_as_uint(kLargest); }
};

constexpr int kExactThreads = 256;

// each(n, i) for all i below each.results(), of the samples that are in doubt.
template <class Each>
__global__ void __launch_bounds__(kExactThreads) exact_kernel(Doubts doubts, int64_t N, Each each) {
  await_previous_kernel();
  bool own = false, all = false;
  for (int c = threadIdx.x; c < doubts.channels; c += kExactThreads) all |= doubts.weight(c);
  for (int64_t i = threadIdx.x; i < N * doubts.of_sample; i += kExactThreads) own |= doubts.x(i);
  all = __syncthreads_or(all);
  if (!__syncthreads_or(own) && !all) return;
#pragma unroll 1
  for (int64_t n = 0; n < N; n++) {
    own = all;
    for (int64_t i = threadIdx.x; i < doubts.of_sample; i += kExactThreads)
      own |= doubts.x(n * doubts.of_sample + i);
    if (!__syncthreads_or(own)) continue;
    const int64_t threads = int64_t(gridDim.x) * kExactThreads;
#pragma unroll 1
    for (int64_t i = int64_t(blockIdx.x) * kExactThreads + threadIdx.x; i < each.results(); i += threads)
      each(n, i);
  }
}

template <class Each> void exact(const Doubts& doubts, int64_t N, const Each& each, cudaStream_t stream) {
  const unsigned blocks = 4 * unsigned(device_attribute(cudaDevAttrMultiProcessorCount));
  launch_early(exact_kernel<Each>, blocks, kExactThreads, stream, doubts, N, each);
}

}  // namespace conv
