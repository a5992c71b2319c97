// A 2-D or 3-D convolution of any size, with padding, stride and dilation: a tail of v = conv(x, weight), which
// is never written, to a sink, on compute capability 9.0. Operands as in
// conv/wide.cuh.
//
//   conv/stream_operands.cuh  sizes, packing
//   conv/stream_sm90.cuh      the convolution
//   store/positions.cuh       sinks
//
// Bytes at (128, 256, 28, 28), 3×3, 256 channels out, bfloat16, channels last: 51 MB read, 51 MB written.
// Bound: 118 GFLOP, 0.15 ms at 800 TFLOP/s.
#pragma once
#include "conv/exact.cuh"
#include "conv/stream_sm90.cuh"
#include "host/tensor.h"

namespace conv {

// v (N, kOut, (OD,) OH, OW) one by one (conv/exact.cuh). Extents: planes, rows, columns.
template <class Filter, class T> struct Walked {
  static constexpr int kOut = Filter::kOut;
  const T *x, *weight;
  int extents[3], OD, OH, OW;
  Walk walk;
  HOST_DEVICE int64_t positions() const { return int64_t(OD) * OH * OW; }
  __device__ float operator()(int64_t n, int c, int64_t position) const {
    const int64_t line = position / OW;
    const int first[] = {int(line / OH) * walk.stride[0] - walk.before[0],
                         int(line % OH) * walk.stride[1] - walk.before[1],
                         int(position % OW) * walk.stride[2] - walk.before[2]};
    const T* filter = weight + int64_t(c) * Filter::kIn * Filter::kTaps;
    float sum = 0.f;
#pragma unroll 1
    for (int k = 0; k < Filter::kIn; k++)
#pragma unroll 1
      for (int tap = 0; tap < Filter::kTaps; tap++, filter++) {
        const int of[] = {tap / Filter::kWidth / Filter::kHeight, tap / Filter::kWidth % Filter::kHeight,
                          tap % Filter::kWidth};
        int64_t at = n * Filter::kIn + k;
        bool inside = true;
#pragma unroll
        for (int d = 0; d < 3; d++) {
          const int place = first[d] + of[d] * walk.dilation[d];
          inside &= place >= 0 && place < extents[d];
          at = at * extents[d] + place;
        }
        if (inside) sum = fmaf(float(x[at]), float(*filter), sum);
      }
    return sum;
  }
};

// What a tail makes of windows of those: y (N, kOut, …).
template <class Values, class Pool, class T, class Tail> struct WalkedWindows {
  Values v;
  T* y;
  Tail tail;
  int PD, PH, PW;
  HOST_DEVICE int64_t windows() const { return int64_t(PD) * PH * PW; }
  HOST_DEVICE int64_t results() const { return Values::kOut * windows(); }  // of a sample
  __device__ void operator()(int64_t n, int64_t i) const {
    const int c = int(i / windows()), at = int(i % windows()), line = at / PW;
    const auto channel = tail.channel(n, c);
    const auto of = [&](int plane, int row, int column) {
      return tail.before(v(n, c, (int64_t(plane) * v.OH + row) * v.OW + column), channel);
    };
    float pooled = 0;
#pragma unroll 1
    for (int element = 0; element < Pool::kArea; element++) {
      const int row = element / Pool::kWidth;
      const float value = of(line / PH * Pool::kDepth + row / Pool::kHeight,
                             line % PH * Pool::kHeight + row % Pool::kHeight,
                             at % PW * Pool::kWidth + element % Pool::kWidth);
      pooled = element == 0 ? value : Pool::Reduction::merge(pooled, value);
    }
    y[n * results() + i] = T(tail.after(pooled, channel));
  }
};

// Samples that a float16 can't hold are computed again, by plain sums (conv/exact.cuh). x (N, C, (D,) H, W),
// or channels last, (N, (D,) H, W, C), where kLast; largest (N) becomes the bits of each sample's
// largest finite magnitude. Where channels last values are operands as they are, C is a multiple of 8.
template <class Filter, class Operands, int kColumns, int kCluster, int kLead, int kSharedLimit, bool kLast,
          class Pool = Unpooled, class Tail, class Out>
void stream(In<typename Operands::value_t> x, In<typename Operands::value_t> weight, const Walk& walk,
            const Tail& tail, const Out& out, uint32_t* largest, cudaStream_t stream) {
  constexpr int kBlockChannels = Filter::kOut > 64 ? 128 : 64;
  // Else too few stages fit, or sums of a step beside those of all, or results beside sums.
  constexpr int kMost = Operands::kSplit || Pool::kArea > 1 ? 128 : kBlockChannels == 64 ? 192 : 256;
  constexpr int kOwn = kColumns < kMost ? kColumns : kMost;
  using Conv = Stream<Filter, Operands, kBlockChannels, kOwn, kCluster, kLead>;
  using Loop = StreamSm90<Conv, Pool, Tail, Out, kSharedLimit>;
  using operand_t = typename Operands::operand_t;
  static_assert(!kLast || (!Operands::kScaled && Filter::kIn % 8 == 0), "x that need not be packed");
  expect(x.dims == Filter::kDims + 2 && x.size(kLast ? -1 : 1) == Filter::kIn,
         "an image of the channels that are compiled for");
  const int taps[] = {Filter::kDepth, Filter::kHeight, Filter::kWidth};
  const int window[] = {Pool::kDepth, Pool::kHeight, Pool::kWidth};
  int64_t sizes[] = {1, 1, 1}, of_v[3], results[3];
  Walk outputs = walk;
  const int64_t N = x.size(0);
  for (int d = 0; d < 3; d++) {
    if (d >= 3 - Filter::kDims) sizes[d] = x.size(d - 3 - kLast);
    const int reach = (taps[d] - 1) * walk.dilation[d];
    of_v[d] = (sizes[d] + walk.before[d] + walk.behind[d] - reach - 1) / walk.stride[d] + 1;
    results[d] = of_v[d] / window[d];
    expect(results[d] > 0, "an image that the filter and a window fit into");
    if (window[d] == 1) continue;
    // The last window's first element is the last pixel to begin at.
    outputs.stride[d] = walk.stride[d] * window[d];
    outputs.behind[d] = int((results[d] - 1) * outputs.stride[d] - walk.before[d] - (sizes[d] - 1)) + reach;
  }
  const auto [D, H, W] = sizes;
  const auto [OD, OH, OW] = results;
  // Counted in int, two tiles beyond the last position, too.
  expect(N * OD * OH * OW < (int64_t(1) << 31) - 1024, "sizes that are counted in int");
  if (N == 0) return;

  const Scratch<int32_t> exponents(Loop::kPaddedOut, stream);
  const Scratch<uint4> packed_weight(Loop::kPackedWeights, stream);
  pack_stream_weight_kernel<Conv><<<Loop::kPaddedOut, kPackThreads, 0, stream>>>(
      packed_weight, exponents, largest, weight, N);
  const Scratch<uint4> packed(kLast ? 0 : N * D * H * W * (Loop::kPixel / 8), stream);
  const operand_t* operands = reinterpret_cast<const operand_t*>(packed.data);
  if constexpr (kLast) operands = reinterpret_cast<const operand_t*>(x.data);
  else pack_image<Conv>(packed, largest, x, N, D * H * W, stream);
  const auto image = image_map<Filter::kDims, Loop::kGroup>(operands, N, D, H, W, Loop::kPixel, taps, outputs,
                                                            Loop::kFetched);
  convolve_stream<Loop>(
      image, {out, packed_weight, exponents, largest, tail, int(N), int(OD), int(OH), int(OW), outputs,
              {walk.stride[0], walk.stride[1], walk.stride[2]}}, stream);
  if constexpr (Operands::kScaled) {
    static_assert(!kLast && !Out::kLast, "in planes");
    using Values = Walked<Filter, typename Operands::value_t>;
    const Values v{x.data, weight.data, {int(D), int(H), int(W)}, int(of_v[0]), int(of_v[1]), int(of_v[2]), walk};
    const Doubts doubts{largest, 1, exponents, Loop::kPaddedOut};
    if constexpr (Pool::kArea == 1) {
      exact(doubts, N, each_value(v, out.y, tail), stream);
    } else {
      using Each = WalkedWindows<Values, Pool, typename Out::result_t, Tail>;
      exact(doubts, N, Each{v, out.y, tail, int(OD), int(OH), int(OW)}, stream);
    }
  }
}

}  // namespace conv
