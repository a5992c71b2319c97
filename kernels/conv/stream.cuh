// A 2-D or 3-D convolution of any size, with padding, stride and dilation: a tail of v = conv(x, weight),
// which is never written, to a sink, on compute capability 9.0, or another from 8.0 on, as CAPABILITY says.
// Operands as in conv/wide.cuh.
//
//   conv/stream_operands.cuh, conv/stream_views.cuh   sizes, packing
//   conv/stream_sm90.cuh, conv/stream_views_sm90.cuh  the convolution, of operands that the copy engine
//                                                     gathers, or of views
//   conv/stream_sm80.cuh                              the same from compute capability 8.0 on, without views
//   conv/stream_tile.cuh                              from sums to results
//   store/positions.cuh, reduce/stream.cuh   sinks
//
// Bytes at (128, 256, 28, 28), 3×3, 256 channels out, bfloat16, channels last: 51 MB read, 51 MB written.
// Bound: 118 GFLOP, 0.15 ms at 800 TFLOP/s.
#pragma once
#include "conv/exact.cuh"
#include "conv/stream_sm80.cuh"
#include "conv/stream_views_sm90.cuh"
#include "conv/terms.cuh"
#include "host/tensor.h"

namespace conv {

// Results along an axis.
inline int walked(const Walk& walk, int axis, int64_t size, int taps) {
  const int64_t left = size + walk.before[axis] + walk.behind[axis] - (taps - 1) * walk.dilation[axis] - 1;
  return int(left < 0 ? 0 : left / walk.stride[axis] + 1);
}

// v (N, kOut, (OD,) OH, OW) one by one (conv/exact.cuh), of x (N, kIn, (D,) H, W), or, kLast, channels last.
// Extents: planes, rows, columns.
template <class Filter, class T, bool kLast = false> struct Walked {
  static constexpr int kOut = Filter::kOut;
  const T *x, *weight;
  int extents[3], OD, OH, OW;
  Walk walk;
  Walked(const In<T>& x, const In<T>& weight, const Walk& walk)
      : x(x), weight(weight),
        extents{x.dims == 5 ? int(x.size(2 - kLast)) : 1, int(x.size(-2 - kLast)), int(x.size(-1 - kLast))},
        OD(walked(walk, 0, extents[0], Filter::kDepth)), OH(walked(walk, 1, extents[1], Filter::kHeight)),
        OW(walked(walk, 2, extents[2], Filter::kWidth)), walk(walk) {}
  HOST_DEVICE int64_t positions() const { return int64_t(OD) * OH * OW; }
  __device__ float operator()(int64_t n, int c, int64_t position) const {
    const int64_t line = position / OW;
    const int first[] = {int(line / OH) * walk.stride[0] - walk.before[0],
                         int(line % OH) * walk.stride[1] - walk.before[1],
                         int(position % OW) * walk.stride[2] - walk.before[2]};
    const T* filter = weight + int64_t(c) * Filter::kIn * Filter::kTaps;
    float sum = 0.f;
#pragma unroll 1
    for (int k = 0; k < Filter::kIn; k++) {
      const T* of_tap = WEIGHT_LAST ? filter + k : filter + k * Filter::kTaps;
#pragma unroll 1
      for (int tap = 0; tap < Filter::kTaps; tap++, of_tap += WEIGHT_LAST ? Filter::kIn : 1) {
        const int of[] = {tap / Filter::kWidth / Filter::kHeight, tap / Filter::kWidth % Filter::kHeight,
                          tap % Filter::kWidth};
        int64_t at = kLast ? n : n * Filter::kIn + k;
        bool inside = true;
#pragma unroll
        for (int d = 0; d < 3; d++) {
          const int place = first[d] + of[d] * walk.dilation[d];
          inside &= place >= 0 && place < extents[d];
          at = at * extents[d] + place;
        }
        if (kLast) at = at * Filter::kIn + k;
        if (inside) sum = fmaf(float(x[at]), float(*of_tap), sum);
      }
    }
    return sum;
  }
};

// Results that a pointwise tail makes, one by one, as store::Positions stores them channels last: y (N, …,
// kOut).
template <class Values, class T, class Tail, bool kRounds> struct WalkedLast {
  Values v;
  T* y;
  Tail tail;
  HOST_DEVICE int64_t results() const { return Values::kOut * v.positions(); }  // of a sample
  __device__ void operator()(int64_t n, int64_t i) const {
    const int c = int(i % Values::kOut);
    const int64_t position = i / Values::kOut, at = n * results() + c * v.positions() + position;
    const float value = tail_of(tail, v(n, c, position), tail.channel(n, c), at);
    y[n * results() + i] = T(kRounds ? nearest_tf32(value) : value);
  }
};
template <class T, bool kLast, bool kRounds, class Values, class Tail>
auto each_stored(const Values& v, T* y, const Tail& tail) {
  if constexpr (kLast) return WalkedLast<Values, T, Tail, kRounds>{v, y, tail};
  else return each_value(v, y, tail);
}

// What a tail makes of windows of those: y (N, kOut, …), or, kLast, channels last.
template <class Values, class Pool, class T, class Tail, bool kLast, bool kRounds> struct WalkedWindows {
  Values v;
  T* y;
  Tail tail;
  int PD, PH, PW;
  HOST_DEVICE int64_t windows() const { return int64_t(PD) * PH * PW; }
  HOST_DEVICE int64_t results() const { return Values::kOut * windows(); }  // of a sample
  __device__ void operator()(int64_t n, int64_t i) const {
    const int c = int(kLast ? i % Values::kOut : i / windows()),
              at = int(kLast ? i / Values::kOut : i % windows()), line = at / PW;
    const auto channel = tail.channel(n, c);
    const auto of = [&](int plane, int row, int column) {
      return tail.before(v(n, c, (int64_t(plane) * v.OH + row) * v.OW + column), channel);
    };
    float pooled = 0;
#pragma unroll 1
    for (int element = 0; element < Pool::kArea; element++) {
      const int row = element / Pool::kWidth;
      const float value =
          of(line / PH * Pool::kDepth + row / Pool::kHeight, line % PH * Pool::kHeight + row % Pool::kHeight,
             at % PW * Pool::kWidth + element % Pool::kWidth);
      pooled = element == 0 ? value : Pool::Reduction::merge(pooled, value);
    }
    const float result = tail.after(pooled, channel);
    y[n * results() + i] = T(kRounds ? nearest_tf32(result) : result);
  }
};

// Columns of a consumer, or of a warp of conv/stream_sm80.cuh: else too few stages fit, or sums of a step
// beside those of all, or results beside sums.
template <class Filter, bool kBesides> constexpr int stream_columns(int columns) {
  if (!kStreamsBySm90) return kWarpColumns;
  const int most = kBesides ? kMostReduced : Filter::kOut > 64 ? 256 : 192;
  return columns < most ? columns : most;
}
// Warps' shares of a sample's positions, at most.
inline int64_t stream_parts(int64_t positions, int columns) {
  return (positions + columns - 1) / columns + 1;
}

// The same as `stream` below by views of patches, to a sink that stores.
template <class Filter, class Operands, int kSharedLimit, bool kLast, class Tail, class Out, class More,
          class Behind>
void views(In<typename Operands::value_t> x, In<typename Operands::value_t> weight, const Walk& walk,
           const Tail& tail, const Out& out, const More& more, uint32_t* largest, cudaStream_t stream,
           const Behind& behind) {
  using Conv = Views<Filter, Operands>;
  using Loop = ViewsSm90<Conv, Tail, Out, More, kSharedLimit>;
  expect(x.dims == Filter::kDims + 2 && x.size(kLast ? -1 : 1) == Filter::kIn,
         "an image of the channels that are compiled for");
  const int taps[] = {Filter::kDepth, Filter::kHeight, Filter::kWidth};
  const int64_t N = x.size(0);
  Lattice at;
  int64_t padded[3], results[3];
  for (int d = 0; d < 3; d++) {
    expect(walk.stride[d] == 1, "a filter that moves by single pixels");
    at.extents[d] = d >= 3 - Filter::kDims ? int(x.size(d - 3 - kLast)) : 1, at.before[d] = walk.before[d];
    padded[d] = at.extents[d] + walk.before[d] + walk.behind[d],
    results[d] = walked(walk, d, at.extents[d], taps[d]);
    expect(results[d] > 0, "an image that the filter fits into");
  }
  const int64_t pixels = padded[0] * padded[1] * padded[2], last = pixels + Conv::kTilePositions;
  expect(pixels * Conv::kUnits < (int64_t(1) << 30) && N * last < (int64_t(1) << 31) &&
             last * max(padded[1], padded[2]) < (int64_t(1) << 32),
         "sizes that are counted in int");
  const auto reciprocal = [](int64_t d) { return ((uint64_t(1) << 32) + d - 1) / d; };
  at.lines = int(padded[1]), at.of_row = reciprocal(padded[2]), at.of_lines = reciprocal(padded[1]);
  at.row = int(padded[2]), at.plane = int(padded[1] * padded[2]), at.sample = int(pixels);
  at.OD = int(results[0]), at.OH = int(results[1]), at.OW = int(results[2]);
  at.taps[0] = walk.dilation[0] * at.plane, at.taps[1] = walk.dilation[1] * at.row,
  at.taps[2] = walk.dilation[2];
  at.patch = Conv::kTilePositions + (taps[1] - 1) * at.taps[1] + (taps[2] - 1) * at.taps[2];
  const int teams = Loop::teams(at), stages = Loop::stages(at, teams);
  expect(stages > 0, "a patch of which shared memory has room for one");
  if (N == 0) return;

  const Scratch<int32_t> exponents(Conv::kPaddedOut, stream);
  const Scratch<uint4> packed_weight(Conv::kPackedWeights, stream);
  const Scales<Operands> scales{largest, N};
  launch_early(pack_views_weight_kernel<Conv>, Conv::kPaddedOut, kPackThreads, stream, packed_weight.data,
               exponents.data, scales, weight.data);
  // The last tile's patches end behind the last pixel.
  const Scratch<uint4> packed(N * pixels * Conv::kUnits + Conv::kTilePositions + at.patch, stream);
  pack_views<Conv, kLast>(packed, scales, x, at, stream);
  convolve_views<Loop>({out, more, packed_weight, packed, exponents, scales, tail, int(N), teams, stages, at},
                       stream);
  if constexpr (Operands::kScaled) behind(Doubts{largest, 1, exponents, Conv::kPaddedOut});
}

// x (N, C, (D,) H, W), or channels last, (N, (D,) H, W, C), where kLast; largest: Scales' words, of which the
// first N become the bits of each sample's largest magnitude, where operands are single its largest finite
// one. Channels last x is read as it lies where values are operands, and C a multiple of 8; else it is
// packed. kFolded: taps of a row whose pixels are one row of operands, all of it where columns are
// neighbours, or 1; or kViews; or kPlanes, of 8·n positions and 16 bits. That, and kShares, of K, more than
// one, where Out is a store::Positions.
// behind(Doubts) computes again what a float16 can't hold.
template <class Filter, class Operands, int kColumns, int kCluster, int kLead, int kSharedLimit, bool kLast,
          int kFolded, class Pool = Unpooled, int kShares = 1, class Tail, class Out, class More,
          class Behind>
void stream(In<typename Operands::value_t> x, In<typename Operands::value_t> weight, const Walk& walk,
            const Tail& tail, const Out& out, const More& more, uint32_t* largest, cudaStream_t stream,
            const Behind& behind) {
  constexpr int kBlockChannels = Filter::kOut > 64 ? 128 : 64;
  constexpr bool kBesides = Operands::kSplit || Pool::kArea > 1 || Out::kReduces || More::kExists;
  constexpr int kOwn = stream_columns<Filter, kBesides>(kColumns);
  using Conv =
      std::conditional_t<kStreamsBySm90,
                         Stream<Filter, Operands, kBlockChannels, kOwn, kCluster, kLead, kFolded, kShares>,
                         Gathered<Filter, Operands, kBlockChannels, kFolded, kShares>>;
  // Shares of K are stored as they are.
  using Of = std::conditional_t<(kShares > 1), Identity, Tail>;
  using To = std::conditional_t<(kShares > 1), store::Positions<float, Out::kLast>, Out>;
  using Loop = std::conditional_t<kStreamsBySm90, StreamSm90<Conv, Pool, Of, To, More, kSharedLimit>,
                                  StreamSm80<Conv, Pool, Of, To, More, kSharedLimit>>;
  using operand_t = typename Operands::operand_t;
  constexpr bool kInPlanes = kFolded == kPlanes;
  constexpr bool kPacks = !kInPlanes && (!kLast || Operands::kScaled || Filter::kIn % 8 != 0);
  static_assert(kPacks || kFolded <= 1, "its rows have no padding");
  static_assert(!kInPlanes || (!kLast && !Operands::kScaled && Pool::kArea == 1 && !Out::kReduces));
  expect(x.dims == Filter::kDims + 2 && x.size(kLast ? -1 : 1) == Filter::kIn,
         "an image of the channels that are compiled for");
  int taps[] = {Filter::kDepth, Filter::kHeight, Filter::kWidth};
  const int window[] = {Pool::kDepth, Pool::kHeight, Pool::kWidth};
  int64_t sizes[] = {1, 1, 1}, results[3];
  Walk outputs = walk;
  const int64_t N = x.size(0);
  for (int d = 0; d < 3; d++) {
    if (d >= 3 - Filter::kDims) sizes[d] = x.size(d - 3 - kLast);
    results[d] = walked(walk, d, sizes[d], taps[d]) / window[d];
    expect(results[d] > 0, "an image that the filter and a window fit into");
  }
  Rows rows{sizes[0] * sizes[1] * sizes[2], int(sizes[2]), int(sizes[2]), 0};
  const int64_t plane = rows.S;
  if (kFolded > 1) {  // into pixels of which a filter has one, and whose padding is theirs
    expect(walk.dilation[2] == 1, "columns that are neighbours");
    rows.before = walk.before[2], rows.pitch += rows.before + walk.behind[2];
    rows.S = sizes[0] * sizes[1] * rows.pitch;
    taps[2] = 1, outputs.before[2] = outputs.behind[2] = 0, sizes[2] = rows.pitch - (kFolded - 1);
  }
  for (int d = 0; d < 3; d++) {
    if (window[d] == 1) continue;
    // The last window's first element is the last pixel to begin at.
    outputs.stride[d] = walk.stride[d] * window[d];
    outputs.behind[d] = int((results[d] - 1) * outputs.stride[d] - outputs.before[d] - (sizes[d] - 1)) +
                        (taps[d] - 1) * walk.dilation[d];
  }
  const Met met{plane,           int(sizes[1]),  int(sizes[2]),  int(results[1]),
                int(results[2]), walk.stride[0], walk.stride[1], walk.stride[2]};
  constexpr bool kMeetsSome = kPacks && Filter::kTaps == 1 && Pool::kArea == 1;
  const bool meets_all = !kMeetsSome || met.steps() == 1 || walk.pads();
  if (!meets_all) {
    for (int d = 0; d < 3; d++) sizes[d] = results[d], outputs.stride[d] = 1;
    rows = {sizes[0] * sizes[1] * sizes[2], int(sizes[2]), int(sizes[2]), 0};
  }
  const auto [OD, OH, OW] = results;
  expect(!kInPlanes || (OD * OH * OW == plane && plane % 8 == 0 && !walk.pads()),
         "planes that begin at multiples of 16 bytes, and a filter that meets all of them");
  // Counted in int, two tiles beyond the last position, too.
  expect(N * OD * OH * OW < (int64_t(1) << 31) - 1024, "sizes that are counted in int");
  if (N == 0) return;

  const Scratch<int32_t> exponents(Loop::kPaddedOut, stream);
  const Scratch<uint4> packed_weight(Loop::kPackedWeights, stream);
  const Scales<Operands> scales{largest, N};
  launch_early(pack_stream_weight_kernel<Conv>, Loop::kPaddedOut, kPackThreads, stream, packed_weight.data,
               exponents.data, scales, weight.data);
  const Scratch<uint4> packed(kPacks ? N * rows.S * (Loop::kPixel / 8) : 0, stream);
  const operand_t* operands = reinterpret_cast<const operand_t*>(packed.data);
  if constexpr (!kPacks) operands = reinterpret_cast<const operand_t*>(x.data);
  else if (meets_all) pack_image<Conv, kLast>(packed, scales, x, All{plane}, rows, stream);
  if constexpr (kMeetsSome) {
    if (!meets_all) pack_image<Conv, kLast>(packed, scales, x, met, rows, stream);
  }
  const auto image = Loop::image(operands, N, sizes, rows.pitch, taps, outputs);
  const auto convolve = [&](const Of& of_v, const To& to) {
    const typename Loop::Arguments args{to,
                                        more,
                                        packed_weight,
                                        exponents,
                                        scales,
                                        of_v,
                                        int(N),
                                        int(results[0]),
                                        int(results[1]),
                                        int(results[2]),
                                        outputs,
                                        {walk.stride[0], walk.stride[1], walk.stride[2]}};
    if constexpr (kStreamsBySm90) convolve_stream<Loop>(image, args, stream);
    else convolve_gathered<Loop>(image, args, stream);
  };
  if constexpr (kShares > 1) {
    static_assert(!More::kExists);
    const int64_t S = OD * OH * OW, size = N * S * Filter::kOut;
    const Scratch<float> terms(kShares * size, stream);
    convolve(Identity{}, {terms});
    sum_terms<Filter::kOut>(Shares<kShares>{terms, size}, out, tail, N, S, stream);
  } else convolve(tail, out);
  if constexpr (Operands::kScaled) behind(Doubts{largest, 1, exponents, Loop::kPaddedOut});
}

// y.to = y.tail(conv(x, weight)), or what it makes of windows of that; where there is `more`, that, too.
// Right for all values of x and weight. kResultsLast: do they lie channels last? kRounds: and are rounded to
// TF32?
template <class Filter, class Operands, int kColumns, int kCluster, int kLead, int kSharedLimit, bool kLast,
          int kFolded, bool kResultsLast, bool kRounds, class Pool = Unpooled, int kShares = 1, class T,
          class Tail, class... Ts, class... Tails>
void streamed(const In<typename Operands::value_t>& x, const In<typename Operands::value_t>& weight,
              const Walk& walk, cudaStream_t stream, const Stored<T, Tail>& y,
              const Stored<Ts, Tails>&... more) {
  static_assert(sizeof...(more) == 0 || (sizeof...(more) == 1 && Pool::kArea == 1));
  using Values = Walked<Filter, typename Operands::value_t, kLast>;
  const Scratch<uint32_t> largest(Scales<Operands>::kOfSample * x.size(0), stream);
  const auto behind = [&](const Doubts& doubts) {
    const Values v(x, weight, walk);
    if constexpr (Pool::kArea > 1) {
      const int windows[] = {v.OD / Pool::kDepth, v.OH / Pool::kHeight, v.OW / Pool::kWidth};
      const WalkedWindows<Values, Pool, T, Tail, kResultsLast, kRounds> each{
          v, y.to.data, y.tail, windows[0], windows[1], windows[2]};
      exact(doubts, x.size(0), each, stream);
    } else {
      const auto each = all_of(each_stored<T, kResultsLast, kRounds>(v, y.to.data, y.tail),
                               each_stored<Ts, kResultsLast, false>(v, more.to.data, more.tail)...);
      exact(doubts, x.size(0), each, stream);
    }
  };
  const auto launch = [&](const auto& besides) {
    const store::Positions<T, kResultsLast, kRounds> out{y.to};
    static_assert(kStreamsBySm90 || kFolded > 0, "views and planes are wgmma's");
    if constexpr (kFolded == kViews)
      conv::views<Filter, Operands, kSharedLimit, kLast>(x, weight, walk, y.tail, out, besides, largest,
                                                         stream, behind);
    else
      conv::stream<Filter, Operands, kColumns, kCluster, kLead, kSharedLimit, kLast, kFolded, Pool, kShares>(
          x, weight, walk, y.tail, out, besides, largest, stream, behind);
  };
  if constexpr (sizeof...(more) == 0) launch(NoSink{});
  else launch(Sunk<Tails..., store::Positions<Ts..., kResultsLast>>{more.tail..., {more.to...}});
}

}  // namespace conv
