// A 2-D or 3-D convolution of one tap and few channels, that moves by single pixels over an image without
// zeros around it, so that planes are runs of positions: tails of v, which is never written, stored. Sums are
// float32's, of one product behind the other, as exact as eager's; inf and NaN stay where they are.
//
// It takes what its bytes take, as long as a multiprocessor's 128 products a cycle are fewer than that: of 8
// channels to 16, in float32, 96 bytes a position, 5 cycles, and 128 products, 1 cycle. Tensor cores would
// want x converted first, and compute 64 channels for 16.
//
// A block has kOneTapThreads · kOwn positions of a sample, all channels out, kAtOnce of them at a time, and
// reads x again for the next, from its cache; weights are in shared memory, where all lanes read the same.
//
// Bytes at (64, 8, 145, 94), 16 channels out, float32: 28 MB read, 56 MB written: 0.021 ms.
#pragma once
#include "conv/exact.cuh"
#include "conv/shape.h"
#include "core/launch.cuh"

namespace conv {

constexpr int kOneTapThreads = 128, kOneTapMost = 4096;  // products of a position

// A result as a kernel has it.
template <class T, class Tail> struct Result {
  T* y;
  Tail tail;
};

template <class Filter> struct OneTap {
  static constexpr int kIn = Filter::kIn, kOut = Filter::kOut, kOwn = 4;
  static constexpr int kTimes = (kOut + 15) / 16, kAtOnce = ((kOut + kTimes - 1) / kTimes + 3) / 4 * 4;
  static constexpr int kPadded = kTimes * kAtOnce, kPositions = kOneTapThreads * kOwn;
  static_assert(Filter::kTaps == 1 && kIn * kPadded <= kOneTapMost);
};

// Blocks: of each sample, its tiles.
template <class Conv, class... Each>
__global__ void __launch_bounds__(kOneTapThreads)
    one_tap_kernel(const value_t* x, const value_t* weight, int tiles, int64_t S, Each... results) {
  await_previous_kernel();
  constexpr int kIn = Conv::kIn, kOut = Conv::kOut, kOwn = Conv::kOwn, kAtOnce = Conv::kAtOnce;
  __shared__ float4 weights[kIn][Conv::kPadded / 4];
  for (int i = threadIdx.x; i < kIn * Conv::kPadded; i += kOneTapThreads) {
    const int c = i % Conv::kPadded, k = i / Conv::kPadded;
    reinterpret_cast<float*>(weights[k])[c] = c < kOut ? float(weight[c * kIn + k]) : 0.f;
  }
  __syncthreads();  // all are there
  const int64_t n = blockIdx.x / tiles, first = blockIdx.x % tiles * int64_t(Conv::kPositions) + threadIdx.x;
  if (first >= S) return;
  const auto real = [&](int i) { return first + i * kOneTapThreads < S; };
#pragma unroll 1
  for (int from = 0; from < kOut; from += kAtOnce) {
    float sums[kOwn][kAtOnce] = {};
#pragma unroll 4
    for (int k = 0; k < kIn; k++) {
      float value[kOwn];
#pragma unroll
      for (int i = 0; i < kOwn; i++)
        value[i] = real(i) ? float(x[(n * kIn + k) * S + first + i * kOneTapThreads]) : 0.f;
#pragma unroll
      for (int c = 0; c < kAtOnce; c += 4) {
        const float4 four = weights[k][(from + c) / 4];
#pragma unroll
        for (int i = 0; i < kOwn; i++) {
          float* const own = sums[i] + c;
          own[0] = fmaf(value[i], four.x, own[0]), own[1] = fmaf(value[i], four.y, own[1]);
          own[2] = fmaf(value[i], four.z, own[2]), own[3] = fmaf(value[i], four.w, own[3]);
        }
      }
    }
    const auto store = [&](const auto& to) {
#pragma unroll
      for (int c = 0; c < kAtOnce; c++) {
        if (from + c >= kOut) break;
        const auto channel = to.tail.channel(n, from + c);
#pragma unroll
        for (int i = 0; i < kOwn; i++) {
          const int64_t at = (n * kOut + from + c) * S + first + i * kOneTapThreads;
          if (real(i)) to.y[at] = std::decay_t<decltype(*to.y)>(tail_of(to.tail, sums[i][c], channel, at));
        }
      }
    };
    (store(results), ...);
  }
}

// Each stored.to = stored.tail(conv(x, weight)), x in planes. Throws std::runtime_error for other sizes.
template <class Filter, class... T, class... Tails>
void one_tap(const In<value_t>& x, const In<value_t>& weight, cudaStream_t stream,
             const Stored<T, Tails>&... stored) {
  using Conv = OneTap<Filter>;
  const int64_t N = x.size(0), all = x.numel();
  expect_elements("weight", weight, Conv::kIn * Conv::kOut);
  if (all == 0) return;
  const int64_t S = all / (N * Conv::kIn), tiles = (S + Conv::kPositions - 1) / Conv::kPositions;
  expect_elements("x", x, N * Conv::kIn * S);
  (expect_elements("a result", stored.to, N * Conv::kOut * S), ...);
  if (N * tiles >= int64_t(1) << 31) throw std::runtime_error("expected fewer positions");
  launch_early(one_tap_kernel<Conv, Result<T, Tails>...>, N * tiles, kOneTapThreads, stream, x.data,
               weight.data, int(tiles), S, Result<T, Tails>{stored.to, stored.tail}...);
}

}  // namespace conv
