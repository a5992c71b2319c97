// What the mainloops of conv/stream.cuh share (conv/stream_sm90.cuh, conv/stream_sm80.cuh): their arguments,
// and the way from a warp's sums to what its sinks store, 16 channels × 8·kTiles positions, which may run
// over samples, as products leave them (store/positions.cuh).
#pragma once
#include "conv/stream_operands.cuh"
#include "conv/tail.cuh"
#include "pool/reduction.cuh"
#include "store/positions.cuh"

namespace conv {

// Windows of one element: tail(v, channel) is the result. Else the result is tail.after(windows of
// tail.before(v, channel), channel).
struct Unpooled {
  static constexpr int kDepth = 1, kHeight = 1, kWidth = 1, kArea = 1;
};

// A tail, and the sink that takes its results.
template <class Tail_, class Out_> struct Sunk {
  using Tail = Tail_;
  using Out = Out_;
  static constexpr bool kExists = true;
  Tail tail;
  Out out;
};
struct NoSink {
  struct Out {
    static constexpr int kWarpBytes = 0;
    static constexpr bool kReduces = false;
  };
  static constexpr bool kExists = false;
};
// Does a tail read something where its result lies? Then it says so.
template <class Tail, class = void> constexpr bool reads_places = false;
template <class Tail> constexpr bool reads_places<Tail, std::void_t<typename Tail::ReadsPlaces>> = true;

// Are a channel's constants the same for all samples? Then it says so, and of those in a tile channel() is
// asked once.
template <class Tail, class = void> constexpr bool is_alike = std::is_same_v<Tail, Identity>;
template <class Tail> constexpr bool is_alike<Tail, std::void_t<typename Tail::Alike>> = true;

// What the build is for: 90, of compute capability 9.0 (conv/stream_sm90.cuh), or another from 80 on
// (conv/stream_sm80.cuh).
#ifndef CAPABILITY
#define CAPABILITY 90
#endif
constexpr bool kStreamsBySm90 = CAPABILITY == 90;

// Of the columns that a warp has, where results are reduced or two tails have some.
constexpr int kMostReduced = kStreamsBySm90 ? 128 : 64;

// What a mainloop works on; `image`, a parameter of its own, is x. `more` takes v before `out`.
template <class Conv, class Tail, class Out, class More> struct StreamArguments {
  using Convolution = Conv;
  Out out;
  More more;
  const uint4* packed_weight;
  const int32_t* exponents;                // (kPaddedOut): weights are scaled by 2^exponent
  Scales<typename Conv::Operands> scales;  // of samples
  Tail tail;
  int N, OD, OH, OW;  // of the output
  Walk walk;          // from one output to the next
  int step[3];        // from one element of a window to the next

  HOST_DEVICE int sample() const { return OD * OH * OW; }  // positions
  HOST_DEVICE int positions() const { return N * sample(); }
};

// take(v, channel, to, at) of all sums, sample by sample where those differ: 16 channels from patch.channel
// on; `to` in results, at: the place in (N, kChannelsOut, S). Results of positions that don't exist may be
// anything.
template <class Arguments, class OfTail, int kTiles, class Take>
__device__ __forceinline__ void finish_tile(const Arguments& args, const OfTail& tail,
                                            const float (&sums)[kTiles][4], float (&results)[kTiles][4],
                                            const store::Patch& patch, const Take& take) {
  using Conv = typename Arguments::Convolution;
  constexpr int kChannelsOut = Conv::kChannelsOut;
  const int lane = threadIdx.x % 32, S = args.sample();
  constexpr bool kAlike = is_alike<OfTail> && !Conv::kScaled && !reads_places<OfTail>;
  int n = patch.position / S, from = 0, to = kAlike ? kTiles * 8 : S - patch.position % S;
#pragma unroll 1
  for (; from < patch.columns; n++, from = to, to += S) {
    const auto constants_of = [&](int c) {
      ChannelConstants<OfTail> constants(tail, n, c, c < kChannelsOut);
      if (Conv::kScaled) constants.set_exponent(-args.exponents[c] - args.scales.last(n));
      return constants;
    };
    const int channel = patch.channel + lane / 4;
    const auto low = constants_of(channel), high = constants_of(channel + 8);
    const int64_t place = (int64_t(n) * kChannelsOut + channel) * S + (patch.position - n * S);
#pragma unroll
    for (int j = 0; j < kTiles; j++) {
      if (!kAlike && (j * 8 >= to || j * 8 + 8 <= from)) continue;
#pragma unroll
      for (int i = 0; i < 4; i++) {
        const auto& constants = i < 2 ? low : high;
        const int column = j * 8 + lane % 4 * 2 + i % 2;
        float v = sums[j][i];
        if constexpr (Conv::kScaled) v = v * constants.correction * constants.factor;
        const bool real = (kAlike || (column >= from && column < to)) &&
                          (kChannelsOut % 16 == 0 || channel + i / 2 * 8 < kChannelsOut);
        const int64_t at = place + i / 2 * 8 * int64_t(S) + column;
        // Without a branch, so that four chains of arithmetic don't wait for one another.
        const auto taken = [&] { return take(v, constants.channel, results[j][i], at); };
        if constexpr (reads_places<OfTail>) results[j][i] = real ? taken() : results[j][i];
        else {
          const float value = taken();
          results[j][i] = real ? value : results[j][i];
        }
      }
    }
    if constexpr (kAlike) break;
  }
}

// results = tail(v), of all sums; results may be the sums.
template <class Arguments, class OfTail, int kTiles>
__device__ __forceinline__ void apply_tail(const Arguments& args, const OfTail& tail,
                                           const float (&sums)[kTiles][4], float (&results)[kTiles][4],
                                           const store::Patch& patch) {
  finish_tile(args, tail, sums, results, patch,
              [&](float v, const auto& channel, float, int64_t at) { return tail_of(tail, v, channel, at); });
}

// results = what a tail makes of windows, once their last element's sums are in.
template <class Pool, class Arguments, int kTiles>
__device__ __forceinline__ void pool_tile(const Arguments& args, const float (&sums)[kTiles][4],
                                          float (&results)[kTiles][4], const store::Patch& patch,
                                          int element) {
  finish_tile(args, args.tail, sums, results, patch,
              [&](float v, const auto& channel, float so_far, int64_t) {
                const float value = args.tail.before(v, channel);
                const float pooled = element == 0 ? value : Pool::Reduction::merge(so_far, value);
                return element < Pool::kArea - 1 ? pooled : args.tail.after(pooled, channel);
              });
}

}  // namespace conv
