// A 2-D or 3-D convolution of few channels out, with padding, stride and dilation, from compute
// capability 8.0 on: each tap has channels of its own, so that x meets all weights at once, as it would those
// of a filter of one place (conv/stream.cuh), which reads it once; then an element of v is the sum of its
// taps' products with the pixels that they meet (conv/terms.cuh). Tensor cores compute 64 channels in any
// case: 3 of 9 taps as soon as 3.
//
// Bytes at (1, 128, 512, 512), 3×3, 3 channels out, bfloat16: 67 MB read; 28 MB of products written and read
// again, mostly from the L2 cache; 2 MB written: 0.02 ms. Bound: 4.3 GFLOP, of 64 channels, 0.005 ms.
#pragma once
#include "conv/stream.cuh"
#include "conv/terms.cuh"

namespace conv {

// The filter by which all of F's taps meet a pixel: channel c's tap has number c · kTaps + tap.
template <class F, int kDims = F::kDims> struct Spread : Filter<F::kIn, F::kOut * F::kTaps, 1, 1> {};
template <class F> struct Spread<F, 3> : Filter<F::kIn, F::kOut * F::kTaps, 1, 1, 1> {};
template <class F, int kDims> constexpr int kSpreadTaps<Spread<F, kDims>> = F::kTaps;

// v's element, of taps' products with all pixels: terms (N, kOut · kTaps, …), as x's extents are.
template <class Filter> struct Taps {
  const float* terms;
  int extents[3], OH, OW;
  Walk walk;
  __device__ __forceinline__ float operator()(int64_t, int64_t n, int c, int64_t s) const {
    const int line = int(s / OW), results[] = {line / OH, line % OH, int(s - int64_t(line) * OW)};
    const int64_t pixels = int64_t(extents[0]) * extents[1] * extents[2];
    const float* const own = terms + (n * Filter::kOut + c) * Filter::kTaps * pixels;
    float sum = 0.f;
#pragma unroll
    for (int tap = 0; tap < Filter::kTaps; tap++) {
      const int of[] = {tap / Filter::kWidth / Filter::kHeight, tap / Filter::kWidth % Filter::kHeight,
                        tap % Filter::kWidth};
      int pixel = 0;
      bool inside = true;
#pragma unroll
      for (int d = 3 - Filter::kDims; d < 3; d++) {
        const int place = results[d] * walk.stride[d] - walk.before[d] + of[d] * walk.dilation[d];
        inside &= unsigned(place) < unsigned(extents[d]);
        pixel = pixel * extents[d] + place;
      }
      sum += inside ? own[tap * pixels + pixel] : 0.f;
    }
    return sum;
  }
};

// As `streamed` below windows: y.to = y.tail(conv(x, weight)).
template <class Filter, class Operands, int kColumns, int kCluster, int kLead, int kSharedLimit, bool kLast,
          bool kResultsLast, bool kRounds, class T, class Tail>
void by_taps(const In<typename Operands::value_t>& x, const In<typename Operands::value_t>& weight,
             const Walk& walk, cudaStream_t stream, const Stored<T, Tail>& y) {
  using Values = Walked<Filter, typename Operands::value_t, kLast>;
  const Values v(x, weight, walk);
  const int64_t N = x.size(0), pixels = int64_t(v.extents[0]) * v.extents[1] * v.extents[2];
  expect(v.positions() > 0, "an image that the filter fits into");
  if (N == 0) return;
  const Scratch<uint32_t> largest(Scales<Operands>::kOfSample * N, stream);
  const Scratch<float> terms(N * Filter::kOut * Filter::kTaps * pixels, stream);
  const auto sum = [&] {
    const Taps<Filter> taps{terms, {v.extents[0], v.extents[1], v.extents[2]}, v.OH, v.OW, walk};
    const store::Positions<T, kResultsLast, kRounds> out{y.to};
    sum_terms<Filter::kOut>(taps, out, y.tail, N, v.positions(), stream);
  };
  conv::stream<Spread<Filter>, Operands, kColumns, kCluster, kLead, kSharedLimit, kLast, 1>(
      x, weight, Walk{{1, 1, 1}, {}, {}, {1, 1, 1}}, Identity{}, store::Positions<float, false>{terms},
      NoSink{}, largest, stream, [&](const Doubts& doubts) {
        sum();
        exact(doubts, N, each_stored<T, kResultsLast, kRounds>(v, y.to.data, y.tail), stream);
      });
  if constexpr (!Operands::kScaled) sum();
}

}  // namespace conv
