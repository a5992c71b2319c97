// What conv/stream.cuh multiplies where a filter moves by single pixels and channels are few: views of a
// patch of x, which the copy engine would take as long to gather tap by tap (conv/stream_operands.cuh) as
// many channels.
//
// x lies in pixels one behind the other, with its padding: (N, unit, pixel), a unit being 8 operands, 16
// bytes. Then what a tap meets at the next position is the next pixel, and what the next tap meets there is
// one, a row or a plane behind. So positions are pixels, too; those in which a filter would leave the image
// have no result. A tile's patch is copied once, as it lies, and each product's operand is a view of it: rows
// of 16 bytes, 8 values of K, from the tap's first pixel on, and behind these 8 another's.
//
//   weights  [channel block][step][product][half][channel] units, as products take them; of a block all stay
//            in shared memory
#pragma once
#include "conv/stream_operands.cuh"
#include "store/positions.cuh"

namespace conv {

// 8 values of K: which eight of channels, high parts (0) or low ones (1) of the weight and of x, the tap in
// its plane. half: of the weight; the term is both of a product's.
struct Term {
  int eight, of_weight, of_image, tap;
  bool half;
};

// A convolution; sizes as in Stream. A step of K is a filter's plane.
template <class Filter_, class Operands_> struct Views : Operands_ {
  using Filter = Filter_;
  using Operands = Operands_;
  static constexpr bool kTransposed = false;
  static constexpr int kChannelsIn = Filter::kIn, kChannelsOut = Filter::kOut, kDims = Filter::kDims;
  static constexpr int kTaps = Filter::kTaps, kSteps = Filter::kDepth,
                       kTapsOfStep = Filter::kHeight * Filter::kWidth;
  static constexpr int kParts = Operands::kParts;
  static constexpr int kEights = ceil_div(kChannelsIn, 8),
                       kUnits = kEights * kParts;  // of a pixel: high parts first
  static constexpr int kBlockChannels = 64, kTilePositions = 128;
  // Of up to 32 channels each warp has 8, so that all four have tails to compute; else one has 16 side by
  // side.
  static constexpr bool kSpreads = kChannelsOut <= 32;
  static constexpr int kOfWarp = kSpreads ? 8 : 16;
  static HOST_DEVICE constexpr int row_of(int channel) {
    return kSpreads ? channel % 32 / 8 * 16 + channel / 32 * 8 + channel % 8 : channel;
  }
  static constexpr int kChannelBlocks = ceil_div(kChannelsOut, kBlockChannels);
  static constexpr int kPaddedOut = kChannelBlocks * kBlockChannels;

  // Products: of a tap's eights two by two, split of each with both parts of x; then of what is left tap by
  // tap.
  static constexpr int kPairs = kParts == 2 ? kEights : kEights / 2,
                       kLeft = kParts == 2 ? kEights : kEights % 2;
  static constexpr int kLeftProducts = ceil_div(kTapsOfStep, 2),
                       kProducts = kPairs * kTapsOfStep + kLeft * kLeftProducts;
  static constexpr int kWeightBytes = kProducts * 2 * kBlockChannels * 16;  // of a step
  static constexpr int64_t kPackedWeights = int64_t(kChannelBlocks) * kSteps * kWeightBytes / 16;  // uint4
  // x's second term lies behind its first one, or they are one.
  static HOST_DEVICE constexpr Term term(int product, int second) {
    if (product < kPairs * kTapsOfStep) {
      const int tap = product / kPairs, pair = product % kPairs;
      if (kParts == 2) return {pair, 0, second, tap, false};
      return {pair * 2 + second, 0, 0, tap, false};
    }
    const int left = product - kPairs * kTapsOfStep, first = left % kLeftProducts * 2;
    const bool alone = first + 1 == kTapsOfStep;
    const int eight = kParts == 2 ? left / kLeftProducts : kEights - 1;
    return {eight, kParts - 1, 0, alone ? first : first + second, alone};
  }
  static HOST_DEVICE constexpr int unit(const Term& term) { return term.of_image * kEights + term.eight; }
};

// Pixels of a sample: of a row, a plane, all of them; a plane's rows; where x begins and how large it is;
// results.
struct Lattice {
  int row, plane, sample, lines;
  int before[3], extents[3];
  int OD, OH, OW;
  int taps[3];  // pixels from a tap to the next: of planes, rows, columns
  int patch;    // pixels of a tile's positions and of the taps of a plane
  uint64_t of_row,
      of_lines;  // 2^32 / d, rounded up: a dividend's high half is i / d, as long as i · d < 2^32

  HOST_DEVICE int results() const { return OD * OH * OW; }
  // Positions, from the first result to the last.
  HOST_DEVICE int positions() const { return (OD - 1) * plane + (OH - 1) * row + OW; }
};

// Of a sample's positions the results.
struct Lattices : Lattice {
  static constexpr bool kRuns = false;
  int n;
  HOST_DEVICE store::Place operator()(int position) const {
    const int line = int(position * of_row >> 32), column = position - line * row;
    const int depth = int(line * of_lines >> 32), height = line - depth * lines;
    return {n, (depth * OH + height) * OW + column, column < OW && height < OH && depth < OD};
  }
  HOST_DEVICE int64_t among_all(int position) const {
    const store::Place place = (*this)(position);
    return place.real ? int64_t(n) * results() + place.s : -1;
  }
};

// As pack_stream_weight_kernel: a block per output channel.
template <class Conv>
__global__ void __launch_bounds__(kPackThreads)
    pack_views_weight_kernel(uint4* packed, int32_t* exponents, Scales<typename Conv::Operands> scales,
                             const typename Conv::value_t* weight) {
  await_previous_kernel();
  constexpr int kBlockChannels = Conv::kBlockChannels, kSteps = Conv::kSteps;
  const int channel = blockIdx.x, block = channel / kBlockChannels;
  const bool real = channel < Conv::kChannelsOut;
  constexpr int kTaps = Conv::kTaps;
  const auto of = [&](int i) { return weight[weight_index<Conv>(channel, i / kTaps, i % kTaps)]; };
  const int exponent =
      channel_exponent<Conv>(exponents, scales.largest, scales.kOfSample * scales.N, channel, real, of);
  for (int i = threadIdx.x; i < kSteps * Conv::kProducts * 2; i += kPackThreads) {
    const int step = i / (Conv::kProducts * 2);
    const Term term = Conv::term(i / 2 % Conv::kProducts, i % 2);
    union {
      typename Conv::operand_t values[8];
      uint4 all;
    } pack;
#pragma unroll
    for (int k = 0; k < 8; k++) {
      const int c = term.eight * 8 + k;
      const bool exists = real && c < Conv::kChannelsIn;
      float value =
          exists ? float(weight[weight_index<Conv>(channel, c, step * Conv::kTapsOfStep + term.tap)]) : 0.f;
      if constexpr (Conv::kScaled) value = Conv::scaled(value, power_of_two(exponent));
      const auto parts = Conv::split(value);
      typename Conv::operand_t part = parts.part[term.of_weight % Conv::kParts];
      if (term.half) {  // both halves are operands, and no product is by zero
        const typename Conv::operand_t first(float(part) * 0.5f);
        if (i % 2 == 0) part = first;
        else if (is_finite(float(part))) part = typename Conv::operand_t(float(part) - float(first));
      }
      pack.values[k] = part;
    }
    packed[(int64_t(block) * kSteps * Conv::kProducts * 2 + i) * kBlockChannels +
           Conv::row_of(channel % kBlockChannels)] = pack.all;
  }
}

// x (N, kChannelsIn, …), or channels last, to packed (N, kUnits, pixels), with zeros around it, as
// pack_image_kernel does it. Neighbouring threads have neighbouring pixels, or, channels last, channels.
// Grid: shares of a sample, samples.
template <class Conv, bool kAgain, bool kLast>
__global__ void __launch_bounds__(kImageThreads)
    pack_views_kernel(uint4* packed, Scales<typename Conv::Operands> scales, const typename Conv::value_t* x,
                      Lattice at) {
#if __CUDA_ARCH__ >= 800
  await_previous_kernel();
  const Lies<Conv, kLast> lies{int64_t(at.extents[0]) * at.extents[1] * at.extents[2]};
  for (int64_t n = blockIdx.y; n < scales.N; n += gridDim.y) {
    int exponent;
    if (!scales.template packs<kAgain>(n, exponent)) continue;
    float largest_magnitude = 0.f;
    for (int i = blockIdx.x * kImageThreads + threadIdx.x; i < at.sample * Conv::kEights;
         i += gridDim.x * kImageThreads) {
      const int eight = kLast ? i % Conv::kEights : i / at.sample;
      const int pixel = kLast ? i / Conv::kEights : i - eight * at.sample;
      const int depth = pixel / at.plane, of_plane = pixel - depth * at.plane, line = of_plane / at.row;
      const int place[] = {depth - at.before[0], line - at.before[1],
                           of_plane - line * at.row - at.before[2]};
      const bool inside = unsigned(place[0]) < unsigned(at.extents[0]) &&
                          unsigned(place[1]) < unsigned(at.extents[1]) &&
                          unsigned(place[2]) < unsigned(at.extents[2]);
      const int64_t position = (int64_t(place[0]) * at.extents[1] + place[1]) * at.extents[2] + place[2];
      pack_eight<Conv, !kAgain, kLast>(packed + (n * Conv::kUnits + eight) * int64_t(at.sample) + pixel,
                                       int64_t(Conv::kEights) * at.sample,
                                       x + lies.at(n, eight * 8, position), lies.pitch(), eight * 8, inside,
                                       exponent, largest_magnitude);
    }
    if constexpr (Conv::kScaled && !kAgain) raise_largest(scales.largest + n, largest_magnitude);
  }
#endif
}

template <class Conv, bool kLast = false>
void pack_views(uint4* packed, const Scales<typename Conv::Operands>& scales, const typename Conv::value_t* x,
                const Lattice& at, cudaStream_t stream) {
  const int64_t N = scales.N;
  static_assert(!(Conv::kLooksAhead && kLast), "a gradient in planes");
  if constexpr (Conv::kLooksAhead)
    look_ahead<Conv>(scales, x, int64_t(at.extents[0]) * at.extents[1] * at.extents[2], stream);
  const dim3 shares = shares_of(int64_t(at.sample) * Conv::kEights, N);
  launch_early(pack_views_kernel<Conv, false, kLast>, shares, kImageThreads, stream, packed, scales, x, at);
  if constexpr (Conv::kScaled)
    launch_early(pack_views_kernel<Conv, true, kLast>, dim3(32, unsigned(min(N, int64_t(65535)))),
                 kImageThreads, stream, packed, scales, x, at);
}

}  // namespace conv
