// A 2-D convolution of many channels, stride 1, no padding: a tail of v = conv2d(x, weight), which need not
// be written, to sinks.
//
// An implicit GEMM on tensor cores: M = output channels, N = output pixels of one row, K = taps × input
// channels.
//   float32           an operand is one float16, which has as many digits as TF32 (11 bits), and is rounded
//                     as the library rounds for TF32: to the nearest, ties away from zero. Sums are float32.
//                     Powers of two bring each sample of x and each output channel of weight into float16's
//                     range; the channel's constants take them out again, exactly. A value that is more than
//                     2^39 times smaller than the largest of its sample counts as zero.
//   float32, split    an operand is the sum of two float16 (22 bits): three products give float32's accuracy.
//   float16, bfloat16 are operands as they are.
// inf and NaN reach every output whose window holds them, as in PyTorch.
//
//   conv/wide_operands.cuh  sizes, scales, conversion to operands, packed weights
//   conv/wide_sm90.cuh      the convolution on compute capability 9.0, where it fits; its stages and tiles
//                           are in …_stages.cuh, …_pipeline.cuh, who fills them in …_producer.cuh
//   conv/wide_sm80.cuh      the same from compute capability 8.0 on, for any size
//   conv/tail.cuh           from sums to results
#pragma once
#include "conv/exact.cuh"
#include "conv/wide_sm80.cuh"
#include "conv/wide_sm90.cuh"
#include "conv/wide_sm90_producer.cuh"
#include "host/tensor.h"
#include "store/joined_rows.cuh"
#include "store/kept_rows.cuh"

namespace conv {

constexpr int64_t kMostCounted = int64_t(1) << 31;  // where counts are int

// What a build knows of its GPU and of sizes: the compute capability, 90 of 9.0, and the bytes of shared
// memory that a block may ask for; at multiples of how many elements x's rows begin; are there fewer than
// kMostCounted tiles, and pixels of a plane; and are tiles of a row of v joined (store::JoinedRows)?
template <int kCapability_, int kShared, int kX, bool kInt, bool kJoins = false> struct Target {
  static constexpr int kCapability = kCapability_, kSharedLimit = kShared, kXAligned = kX;
  static constexpr bool kCountsInInt = kInt, kJoinsTiles = kJoins;
};

// What the kernels of a convolution and its gradients are compiled for.
template <class Filter_, class Operands_, class Target_> struct Build : Target_ {
  using Filter = Filter_;
  using Operands = Operands_;
  using Target = Target_;
  using value_t = typename Operands::value_t;

  // Throws std::runtime_error unless an image (x, dx) and a weight have those sizes.
  static void check(In<value_t> image, In<value_t> weight) {
    expect(image.dims == 4 && image.size(1) == Filter::kIn && image.size(2) >= Filter::kHeight &&
               image.size(3) >= Filter::kWidth,
           "an image of the channels that are compiled for, as large as the filter at least");
    expect(weight.dims == 4 && weight.size(0) == Filter::kOut && weight.size(1) == Filter::kIn &&
               weight.size(2) == Filter::kHeight && weight.size(3) == Filter::kWidth,
           "a weight of the sizes that are compiled for");
  }
};

constexpr int round_up(int size, int unit) { return ceil_div(size, unit) * unit; }

// The mainloop for a convolution: by wgmma where it may be and fits, else by mma.sync, whose tile then has
// fewer rows, or a smaller K block, until it fits.
template <class Filter, class Operands, class Target, bool kMayBySm90, bool kTransposed, class Source,
          class Tail, class Keep, class Out>
struct Mainloop {
  template <class T> using Conv = Wide<Filter, Operands, T, kTransposed>;
  static constexpr int kBlockChannels = Filter::kOut > 64 ? 128 : 64, kChannels = round_up(Filter::kIn, 16);

  using Sm90 = WideSm90<Conv<Tile<kChannels, kBlockChannels>>, Source, Tail, Keep, Out>;
  static constexpr bool by_sm90() {  // which not every source has a producer for
    if constexpr (kMayBySm90 && Target::kCapability == 90) return Sm90::fits(Target::kSharedLimit);
    else return false;
  }
  static constexpr bool kBySm90 = by_sm90();

  template <class T> using Sm80 = WideSm80<Conv<T>, Source, Tail, Keep, Out>;
  template <int kKBlock, int kRows> static constexpr auto fitting() {
    using T = Tile<kKBlock, kBlockChannels, kRows>;
    if constexpr (Sm80<T>::kSharedBytes <= Target::kSharedLimit) return Sm80<T>{};
    else if constexpr (kRows > 1) return fitting<kKBlock, 1>();
    else if constexpr (kKBlock > 16) return fitting<kKBlock - 16, 1>();
    else static_assert(kKBlock < 16, "the kernel's window does not fit in shared memory");
  }
  static constexpr int kMostOfKBlock = 64 / Operands::kParts;
  using Loop = std::conditional_t<
      kBySm90, Sm90,
      decltype(fitting<(kChannels < kMostOfKBlock ? kChannels : kMostOfKBlock), 128 / kBlockChannels>())>;
};

// Forward's: x's rows must be whole words.
template <class Build, class Tail, class Keep, class Out>
using ForwardMainloop =
    Mainloop<typename Build::Filter, typename Build::Operands, typename Build::Target,
             Build::kCountsInInt && Build::kXAligned * sizeof(typename Build::value_t) % 4 == 0, false,
             Input<typename Build::Operands>, Tail, Keep, Out>;

// largest (N) becomes the bits of each sample's largest finite magnitude. behind(Doubts) may launch more.
struct NothingBehind {
  void operator()(const Doubts&) const {}
};
template <class Build, class Tail, class Keep, class Out, class Behind = NothingBehind>
void wide(In<typename Build::value_t> x, In<typename Build::value_t> weight, const Tail& tail,
          const Keep& keep, const Out& out, int32_t* largest, cudaStream_t stream,
          const Behind& behind = {}) {
  using Choice = ForwardMainloop<Build, Tail, Keep, Out>;
  using Loop = typename Choice::Loop;
  Build::check(x, weight);
  const int64_t N = x.size(0), H = x.size(2), W = x.size(3);
  if (N == 0) return;
  const Scratch<int32_t> exponents(Loop::kPaddedOut, stream);
  const Scratch<uint4> packed_weight(Loop::kPackedWeights, stream);
  uint32_t* const bits = reinterpret_cast<uint32_t*>(largest);
  pack_weight<Loop>(packed_weight, exponents, bits, weight, N, stream);
  const typename Loop::Arguments args{out, keep, {x}, packed_weight, exponents, bits, tail, N, H, W};
  if constexpr (Choice::kBySm90) {
    const int64_t tiles = N * args.height() * ceil_div(int(args.width()), kTileWidth);
    const bool whole_words = W * sizeof(typename Build::value_t) % 4 == 0 && uintptr_t(x.data) % 4 == 0;
    expect(tiles < kMostCounted && H * W < kMostCounted && whole_words, "sizes that are compiled for");
    if constexpr (Loop::kJoins) {
      using Kept = typename Keep::Rows;
      using Joined = std::conditional_t<joins<Out>, Out, Kept>;
      const int64_t units =
          Joined::template units<Loop::kBlockChannels>(rows_grid<Loop>(), int(args.width()));
      const Scratch<uint4> waiting(units * (joins<Out> + joins<Kept>), stream);
      typename Loop::Arguments joined = args;
      if constexpr (joins<Out>) joined.out.waiting = waiting;
      if constexpr (joins<Kept>) joined.keep.rows.waiting = waiting + units * joins<Out>;
      convolve_rows<Loop>(joined, stream);
    } else {
      convolve_rows<Loop>(args, stream);
    }
  } else {
    const Scratch<uint4> packed(packed_input_size<Loop>(N, H * W), stream);
    pack_input<Loop>(packed, bits, x, N, H * W, stream);
    convolve_packed<Loop>(args, packed, stream);
  }
  behind(Doubts{bits, 1, exponents, Loop::kScaled ? Loop::kPaddedOut : 0});
}

// The rows of y as such a build stores them; where it joins tiles, there are elements of 2 bytes or more.
template <class Build, class T>
using RowsOf = std::conditional_t<Build::kJoinsTiles && sizeof(T) >= 2, store::JoinedRows<T>, store::Rows<T>>;
template <class Build, class T> RowsOf<Build, T> rows_of(T* y) {
  RowsOf<Build, T> rows{};
  rows.y = y;
  return rows;
}
template <class Build, class T, class Tail> using KeptRows = store::KeptRows<Tail, RowsOf<Build, T>>;
template <class Build, class T, class Tail> KeptRows<Build, T, Tail> kept_rows(T* to, const Tail& tail) {
  return {{}, tail, rows_of<Build>(to)};
}

// y.to = y.tail(conv2d(x, weight)), and likewise one that is kept beside it. Right for all values of x and
// weight.
template <class Build, class T, class Tail, class... Ts, class... Tails>
void pointwise(const In<typename Build::value_t>& x, const In<typename Build::value_t>& weight,
               cudaStream_t stream, const Stored<T, Tail>& y, const Stored<Ts, Tails>&... kept) {
  static_assert(sizeof...(kept) <= 1);
  using Filter = typename Build::Filter;
  const Exact<Filter::kIn, Filter::kOut, 1, Filter::kHeight, Filter::kWidth> values(x, weight);
  const Scratch<int32_t> largest(x.size(0), stream);
  const auto each =
      all_of(each_value<T>(values, y.to.data, y.tail), each_value<Ts>(values, kept.to.data, kept.tail)...);
  const auto launch = [&](const auto& keep) {
    wide<Build>(x, weight, y.tail, keep, rows_of<Build>(y.to.data), largest, stream,
                [&](const Doubts& doubts) { exact(doubts, x.size(0), each, stream); });
  };
  if constexpr (sizeof...(kept) == 0) launch(store::Nothing{});
  else launch(kept_rows<Build>(kept.to.data, kept.tail)...);
}

}  // namespace conv
