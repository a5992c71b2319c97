// v as sums of terms, which an earlier launch left in float32: of shares of K (conv/stream.cuh), or of a
// filter's taps (conv/taps.cuh). What a tail makes of v is stored.
//
// Bytes at (16, 3, 512, 512) of 9 taps: 452 MB read, out of the L2 cache mostly, 25 MB written in bfloat16.
#pragma once
#include "conv/exact.cuh"
#include "core/launch.cuh"
#include "core/tf32.cuh"

namespace conv {

// v's element i is the sum of those of kTerms arrays of `size`, which lie as the results do.
template <int kTerms> struct Shares {
  const float* terms;
  int64_t size;
  __device__ __forceinline__ float operator()(int64_t i, int64_t, int, int64_t) const {
    float sum = terms[i];
#pragma unroll
    for (int k = 1; k < kTerms; k++) sum += terms[k * size + i];
    return sum;
  }
};

constexpr int kTermsThreads = 256;

// y = tail(v), of (N, kChannels, S) results, as Out, a store::Positions, has them.
template <int kChannels, class Terms, class Out, class Tail>
__global__ void __launch_bounds__(kTermsThreads)
    sum_terms_kernel(Terms v, Out out, Tail tail, int64_t N, int64_t S) {
  await_previous_kernel();
  const int64_t threads = int64_t(gridDim.x) * kTermsThreads;
#pragma unroll 1
  for (int64_t i = int64_t(blockIdx.x) * kTermsThreads + threadIdx.x; i < N * S * kChannels; i += threads) {
    const int64_t line = i / (Out::kLast ? kChannels : S);  // a position of all samples', or a plane
    const int64_t n = line / (Out::kLast ? S : kChannels);
    const int c = int(Out::kLast ? i - line * kChannels : line - n * kChannels);
    const int64_t s = Out::kLast ? line - n * S : i - line * S;
    const float y = tail_of(tail, v(i, n, c, s), tail.channel(n, c), (n * kChannels + c) * S + s);
    out.y[i] = typename Out::result_t(Out::kRounded ? nearest_tf32(y) : y);
  }
}

template <int kChannels, class Terms, class Out, class Tail>
void sum_terms(const Terms& v, const Out& out, const Tail& tail, int64_t N, int64_t S, cudaStream_t stream) {
  const int64_t blocks = (N * S * kChannels + kTermsThreads - 1) / kTermsThreads;
  const int64_t most = 16 * int64_t(device_attribute(cudaDevAttrMultiProcessorCount));
  launch_early(sum_terms_kernel<kChannels, Terms, Out, Tail>, min(blocks, most), kTermsThreads, stream, v,
               out, tail, N, S);
}

}  // namespace conv
