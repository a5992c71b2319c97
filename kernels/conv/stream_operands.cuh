// What the mainloop of conv/stream.cuh multiplies: sizes, and the packing of x and weights as the copy engine
// and tensor cores want them.
//
//   x        (N, (D,) H, W, kPixel) of operands: C padded to a multiple of 8; where x of 16 bits lies so
//            already, it is not packed; nor where it is read in planes as it lies. Split, 16 channels' high
//            parts and then their low ones, or 8 and 8 where that is all. Folded, rows have their padding
//   weights  [channel block][group of kGroup operands of a row][copy], kBlockChannels rows of kGroup values,
//            swizzled (core/tensor_map.cuh): as a row's; beside 8 and 8, [high, high], and then as many rows
//            of [low, 0]
// float32 is scaled as conv/wide_operands.cuh says, or where operands look ahead as Scales do; samples which
// the first scale does not fit are packed once more.
#pragma once
#include "conv/wide_operands.cuh"
#include "core/matrix_tile.cuh"
#include "core/tensor_map.cuh"
#include "core/vector.cuh"

namespace conv {

constexpr int kViews = 0, kPlanes = -1;  // as kFolded below

// A convolution, and how it is cut: a consumer computes 64 channels at kColumns positions, 128, 192 or 256.
// Its block's other consumer computes other channels at the same positions, where a block has kBlockChannels
// = 128 channels; where it has 64, the same channels at other positions. kCluster blocks, 1 or 2, share what
// both need. The first consumer is kLead steps ahead, so that one stores while the other still multiplies.
//
// A step of K is a copy of a group of kStep operands, 64 or 32, which a tap meets; of few channels it is
// kSlabs of them. Where tiles are too few for a GPU, each is computed kShares times, of a share of the steps.
//
// What the copy engine fetches takes it as long for a few channels as for 64. So, of few, a row of its
// operands may have kFolded neighbouring pixels, all that a filter's row meets: they lie one behind the other
// in x. Or kFolded is kPlanes: of a filter of one tap x may be in planes, which are read as they lie.
template <class Filter_, class Operands_, int kBlockChannels_, int kColumns_, int kCluster_, int kLead_,
          int kFolded_, int kShares_ = 1, int kStep_ = 64>
struct Stream : Operands_ {
  using Filter = Filter_;
  using Operands = Operands_;
  static constexpr bool kTransposed = false;
  static constexpr int kChannelsIn = Filter::kIn, kChannelsOut = Filter::kOut;
  static constexpr int kDims = Filter::kDims, kTaps = Filter::kTaps;
  static constexpr bool kInPlanes = kFolded_ == kPlanes;
  static constexpr int kFolded = kInPlanes ? 1 : kFolded_, kCopies = kTaps / kFolded,
                       kCopiesOfLine = Filter::kWidth / kFolded;
  // Of a part's neighbours; the operands of a pixel, a row and a group.
  static constexpr int kParts = Operands::kParts, kBeside = kParts == 1 || kChannelsIn <= 8 ? 8 : 16;
  static constexpr int kPixel = ceil_div(kChannelsIn, kBeside) * kBeside * kParts;
  static constexpr int kRow = kPixel * kFolded, kStep = kStep_,
                       kGroup = kInPlanes || (kRow > 32 && kStep > 32) ? 64
                                : kRow > 16                            ? 32
                                                                       : 16;
  static constexpr int kGroups = ceil_div(kRow, kGroup), kSlabs = kStep / kGroup;
  static_assert(kFolded == 1 || (kFolded == Filter::kWidth && kBeside == 8 && kRow <= 64),
                "rows of one group, or of two");
  static_assert(!kInPlanes || (kTaps == 1 && kParts == 1));
  static constexpr int kSteps = ceil_div(kGroups * kCopies, kSlabs);
  static constexpr int kLastSlabs = kGroups * kCopies - (kSteps - 1) * kSlabs;  // of the last step
  // Sixteens of channels of a group, and of the last one; products of depth 16 for each, and where their
  // operands lie, in units of 16 bytes: weights' and x's.
  static constexpr int kDepth = kParts == 1 || kBeside == 8 ? 16 : 32;
  static constexpr int kDeep = kGroup / kDepth, kLastDeep = ceil_div(kRow - (kGroups - 1) * kGroup, kDepth);
  static constexpr int kProducts = kParts == 1 ? 1 : kBeside == 8 ? 2 : 3;
  static constexpr int kBlockChannels = kBlockChannels_,
                       kWeightRows = kBlockChannels * (kProducts == 2 ? 2 : 1);
  static HOST_DEVICE constexpr int of_weight(int product) {
    return product != 1 ? 0 : kProducts == 2 ? kBlockChannels * kGroup / 8 : 2;
  }
  static HOST_DEVICE constexpr int of_image(int product) { return product == 2 ? 2 : 0; }
  static constexpr int kColumns = kColumns_, kCluster = kCluster_;
  static constexpr int kShares = kShares_;
  static_assert(kShares <= kSteps, "a step of each");
  static constexpr int kLead = kLead_ < kSteps / kShares ? kLead_ : kSteps / kShares;
  static constexpr int kChannelBlocks = ceil_div(kChannelsOut, kBlockChannels);
  static constexpr int kPaddedOut = kChannelBlocks * kBlockChannels;
  static constexpr int kTilePositions = kColumns * 128 / kBlockChannels;
  static constexpr int kWeightBytes = kWeightRows * kGroup * 2;    // of a copy of a group
  static constexpr int kImageBytes = kTilePositions * kGroup * 2;  // of that
  static constexpr int64_t kPackedWeights =
      int64_t(kChannelBlocks) * kGroups * kCopies * kWeightBytes / 16;  // uint4
  static_assert((kBlockChannels == 64 || kBlockChannels == 128) && kColumns % 64 == 0);

  // Eights of channels of a pixel; where the first part of one lies, in units of 16 bytes, and the next part.
  static constexpr int kEights = kPixel / kParts / 8, kPartPitch = kBeside / 8;
  static HOST_DEVICE constexpr int unit_of(int eight) {
    return eight / kPartPitch * (kPartPitch * kParts) + eight % kPartPitch;
  }
  // What a row of weights has at place k of a group: the channel, which part, or kParts for zero, and which
  // of a copy's taps. second: of the rows behind a block's first.
  struct Entry {
    int channel, part, tap;
  };
  static __device__ __forceinline__ Entry entry(int group, int k, bool second) {
    if (kProducts == 3) return {group * (kGroup / 2) + k / 32 * 16 + k % 16, k / 16 % 2, 0};
    const int tap = kFolded > 1 ? (group * kGroup + k) / kPixel : 0, at = group * kGroup + k - tap * kPixel;
    if (kFolded > 1 && tap >= kFolded) return {0, kParts, 0};
    if (kProducts == 2) return {at % 8, !second ? 0 : at < 8 ? 1 : kParts, tap};
    return {at, 0, tap};
  }
};

// The exponents of samples' scales, from the bits of magnitudes. Where operands look ahead
// (grad/stream_input.cuh) the first one is that of what was `seen` in a part of a sample, else the same for
// all. (grad::Scales are those of g that is packed for the weight's gradient.)
template <class Operands> struct Scales {
  static constexpr int kOfSample = Operands::kLooksAhead ? 2 : 1;  // words
  uint32_t* largest;                                               // (N); behind them what was seen (N)
  int64_t N;

  HOST_DEVICE uint32_t* seen() const { return largest + N; }
  __device__ __forceinline__ int first(int64_t n) const {
    if constexpr (Operands::kLooksAhead) return Operands::first_exponent(seen()[n]);
    else return Operands::kFirstExponent;
  }
  // An infinite magnitude marks a sample that is computed again.
  __device__ __forceinline__ int last(int64_t n) const {
    if (largest[n] >= __float_as_uint(INFINITY)) return first(n);
    if constexpr (Operands::kLooksAhead) return Operands::last_exponent(seen()[n], largest[n]);
    else return Operands::sample_exponent(largest[n]);
  }
  // Is sample n to be packed, or kAgain once more because its first scale doesn't fit? Then under this
  // exponent.
  template <bool kAgain> __device__ __forceinline__ bool packs(int64_t n, int& exponent) const {
    exponent = first(n);
    if constexpr (kAgain) {
      const int fitting = last(n);
      if (fitting == exponent) return false;
      exponent = fitting;
    }
    return true;
  }
};

// --------------------------------------------------------------------------------------------------- weights

// Taps that are channels out of their own (conv/taps.cuh).
template <class Filter> constexpr int kSpreadTaps = 1;

// A channel's weights, which lie one behind the other, are read once where shared memory has room for them.
template <class Conv>
constexpr bool kWeightsFit = kSpreadTaps<typename Conv::Filter> == 1 && !Conv::kTransposed &&
                             Conv::kChannelsIn * Conv::kTaps * sizeof(typename Conv::value_t) <= 47 << 10;

// A block per output channel, a thread per 8 operands of a copy; padding channels are 0. Also clears what
// Scales read.
template <class Conv>
__global__ void __launch_bounds__(kPackThreads)
    pack_stream_weight_kernel(uint4* packed, int32_t* exponents, Scales<typename Conv::Operands> scales,
                              const typename Conv::value_t* weight) {
  await_previous_kernel();
  constexpr int kCopies = Conv::kCopies, kTaps = Conv::kTaps, kBlockChannels = Conv::kBlockChannels;
  constexpr int kAll = Conv::kChannelsIn * kTaps;
  __shared__ typename Conv::value_t staged[kWeightsFit<Conv> ? kAll : 1];
  const int channel = blockIdx.x;
  const bool real = channel < Conv::kChannelsOut;
  const auto of = [&](int c, int tap) {
    constexpr int kSpread = kSpreadTaps<typename Conv::Filter>;
    if constexpr (kSpread > 1) {
      const int first = channel / kSpread, own = channel % kSpread;
      return weight[WEIGHT_LAST ? (int64_t(first) * kSpread + own) * Conv::kChannelsIn + c
                                : (int64_t(first) * Conv::kChannelsIn + c) * kSpread + own];
    }
    const int64_t at = weight_index<Conv>(channel, c, tap);
    return kWeightsFit<Conv> ? staged[at - int64_t(channel) * kAll] : weight[at];
  };
  if (kWeightsFit<Conv> && real) {
#pragma unroll 8
    for (int i = threadIdx.x; i < kAll; i += kPackThreads) staged[i] = weight[int64_t(channel) * kAll + i];
  }
  __syncthreads();  // all are there
  const int exponent = channel_exponent<Conv>(exponents, scales.largest, scales.kOfSample * scales.N, channel,
                                              real, [&](int i) { return of(i / kTaps, i % kTaps); });
  const int block = channel / kBlockChannels;
  constexpr int kUnits = Conv::kGroup / 8, kRows = Conv::kWeightRows;  // of a row; of a copy
  for (int i = threadIdx.x; i < Conv::kGroups * kCopies * kUnits * (kRows / kBlockChannels);
       i += kPackThreads) {
    const int unit = i % kUnits, copy = i / kUnits % kCopies, all = i / (kUnits * kCopies);
    const bool second = all >= Conv::kGroups;
    const int group = second ? all - Conv::kGroups : all;
    const int row = channel % kBlockChannels + (second ? kBlockChannels : 0);
    union {
      typename Conv::operand_t values[8];
      uint4 all;
    } pack;
#pragma unroll
    for (int k = 0; k < 8; k++) {
      const auto [c, part, tap] = Conv::entry(group, unit * 8 + k, second);
      float value = real && c < Conv::kChannelsIn && part < Conv::kParts
                        ? float(of(c, copy * Conv::kFolded + tap))
                        : 0.f;
      if constexpr (Conv::kScaled) value = Conv::scaled(value, power_of_two(exponent));
      pack.values[k] = Conv::split(value).part[part % Conv::kParts];
    }
    const int64_t first = (int64_t(block) * (Conv::kGroups * kCopies) + group * kCopies + copy) * kRows;
    packed[(first + row) * kUnits + swizzled<Conv::kGroup>(row, unit)] = pack.all;
  }
}

// --------------------------------------------------------------------------------------------------------- x

constexpr int kImageThreads = 256, kImagePatch = 64;  // channels and positions of a block
constexpr int kFewEights = 4;                         // of channels, which a thread has of a pixel

constexpr int kRun = 64, kLooksAt = 32;

// scales.seen()[n] = the bits of the largest finite magnitude in a part of sample n: of each channel every
// kLooksAt-th run of kRun positions, of neighbouring channels other ones. Grid: shares of a sample, samples.
template <class Conv>
__global__ void __launch_bounds__(kImageThreads)
    look_ahead_kernel(Scales<typename Conv::Operands> scales, const float* x, int64_t S) {
#if __CUDA_ARCH__ >= 800
  await_previous_kernel();
  constexpr int C = Conv::kChannelsIn;
  const int64_t all = (S + kRun - 1) / kRun, step = min(all, int64_t(kLooksAt)),
                runs = (all + step - 1) / step;
  for (int64_t n = blockIdx.y; n < scales.N; n += gridDim.y) {
    float largest = 0.f;
#pragma unroll 4
    for (int64_t i = int64_t(blockIdx.x) * kImageThreads + threadIdx.x; i < C * runs * kRun;
         i += gridDim.x * kImageThreads) {
      const int64_t run = i / kRun, c = run / runs,
                    position = (c % step + run % runs * step) * kRun + i % kRun;
      if (position < S) largest = larger_magnitude(largest, x[(n * C + c) * S + position]);
    }
    raise_largest(scales.seen() + n, largest);
  }
#endif
}

// Which pixels of x's planes are packed: all S; or those that a filter of one place meets on its walk, of
// rows and columns.
struct All {
  int64_t S;
  HOST_DEVICE int64_t plane() const { return S; }
  HOST_DEVICE int64_t at(int64_t pixel) const { return pixel; }
};
struct Met {
  int64_t S;
  int rows, columns, OH, OW, stride[3];
  int steps() const { return stride[0] * stride[1] * stride[2]; }
  HOST_DEVICE int64_t plane() const { return S; }
  HOST_DEVICE int64_t at(int64_t pixel) const {
    const int line = int(pixel) / OW, column = (int(pixel) - line * OW) * stride[2];
    return (int64_t(line / OH) * stride[0] * rows + line % OH * stride[1]) * columns + column;
  }
};

// Those of x (N, kChannelsIn, …) to packed (N, S, kPixel) under samples' first scales, and scales.largest[n]
// = the bits of the largest magnitude of sample n; without kMarksInfinite, the largest finite one. Or,
// kAgain, the samples which that scale does not fit. Grid: positions, channels, samples.
template <class Conv, bool kAgain, class Pixels>
__global__ void __launch_bounds__(kImageThreads)
    pack_image_kernel(uint4* packed, Scales<typename Conv::Operands> scales, const typename Conv::value_t* x,
                      Pixels pixels, int64_t S) {
#if __CUDA_ARCH__ >= 800
  await_previous_kernel();
  constexpr int kPitch = kImagePatch / 2 + 1;  // words of two channels; no conflicts
  constexpr int kParts = Conv::kParts;
  __shared__ uint32_t patch[kParts][kImagePatch * kPitch];
  using operand_t = typename Conv::operand_t;
  const int first_channel = blockIdx.y * kImagePatch, lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  for (int64_t n = blockIdx.z; n < scales.N; n += gridDim.z) {
    int exponent;
    if (!scales.template packs<kAgain>(n, exponent)) continue;
    float largest_magnitude = 0.f;
    for (int64_t first = int64_t(blockIdx.x) * kImagePatch; first < S;
         first += int64_t(gridDim.x) * kImagePatch) {
      const auto* const in = x + (n * Conv::kChannelsIn + first_channel) * pixels.plane();
      float value[16];  // of a lane: two channels of two positions, four times
#pragma unroll
      for (int i = 0; i < 16; i++) {
        const int channel = (i / 4 * 8 + warp) * 2 + i % 2, position = i / 2 % 2 * 32 + lane;
        const bool real = first_channel + channel < Conv::kChannelsIn && first + position < S;
        value[i] = real ? float(in[channel * pixels.plane() + pixels.at(first + position)]) : 0.f;
      }
#pragma unroll
      for (int i = 0; i < 16; i += 2) {
        union {
          operand_t two[2];
          uint32_t word;
        } pack[kParts];
#pragma unroll
        for (int half = 0; half < 2; half++) {
          float v = value[i + half];
          if constexpr (Conv::kScaled) {
            largest_magnitude = Conv::kMarksInfinite ? fmaxf(largest_magnitude, fabsf(v))
                                                     : larger_magnitude(largest_magnitude, v);
            v = Conv::scaled(v, power_of_two(exponent));
          }
          const auto parts = Conv::split(v);
#pragma unroll
          for (int part = 0; part < kParts; part++) pack[part].two[half] = parts.part[part];
        }
#pragma unroll
        for (int part = 0; part < kParts; part++)
          patch[part][(i / 2 % 2 * 32 + lane) * kPitch + i / 4 * 8 + warp] = pack[part].word;
      }
      __syncthreads();  // the patch is there
#pragma unroll
      for (int i = threadIdx.x; i < kImagePatch * 8; i += kImageThreads) {
        const int position = i / 8, eight = first_channel / 8 + i % 8;
        if (first + position >= S || eight >= Conv::kEights) continue;
        uint4* const to = packed + (n * S + first + position) * (Conv::kPixel / 8) + Conv::unit_of(eight);
#pragma unroll
        for (int part = 0; part < kParts; part++) {
          const uint32_t* const from = patch[part] + position * kPitch + i % 8 * 4;
          to[part * Conv::kPartPitch] = make_uint4(from[0], from[1], from[2], from[3]);
        }
      }
      __syncthreads();  // it has been read
    }
    if constexpr (Conv::kScaled && !kAgain) raise_largest(scales.largest + n, largest_magnitude);
  }
#endif
}

// All of x's pixels where values of 16 bits are operands, by tiles of core/matrix_tile.cuh. aligned: do
// planes begin at multiples of 16 bytes? Grid: positions, channels, samples.
template <class Conv> constexpr bool kPacksMatrices = sizeof(typename Conv::value_t) == 2 && !Conv::kScaled;
template <class Conv>
__global__ void __launch_bounds__(kImageThreads, 4)
    pack_matrices_kernel(typename Conv::operand_t* packed, const typename Conv::value_t* x, int64_t S,
                         int64_t N, bool aligned) {
  await_previous_kernel();
  using Tile = MatrixTile<typename Conv::value_t, kImageThreads>;
  __shared__ uint4 room[Tile::kAllEights];
  const int64_t position = int64_t(blockIdx.x) * kMatrixColumns;
  const int channel = blockIdx.y * kMatrixRows, padded = min(Conv::kPixel - channel, kMatrixRows);
  const Tile tile{room, unsigned(min(Conv::kChannelsIn - channel, kMatrixRows)),
                  unsigned(min(S - position, int64_t(kMatrixColumns)))};
  for (int64_t n = blockIdx.z; n < N; n += gridDim.z) {
    const auto* const from = x + (n * Conv::kChannelsIn + channel) * S + position;
    if (aligned) tile.template load<true>(from, S);
    else tile.template load<false>(from, S);
    __syncthreads();  // the tile is complete
    tile.store(packed + (n * S + position) * Conv::kPixel + channel, Conv::kPixel, padded);
    __syncthreads();  // it has been read
  }
}

// Rows of packed pixels: `width` of an image's, and zeros around them, `before` of `pitch`; S pixels of a
// sample.
struct Rows {
  int64_t S;
  int width, pitch, before;
};

// Where x (N, kChannelsIn, S) lies: in planes, or channels last, (N, S, kChannelsIn).
template <class Conv, bool kLast> struct Lies {
  int64_t S;
  __device__ __forceinline__ int64_t at(int64_t n, int channel, int64_t position) const {
    if (kLast) return (n * S + position) * Conv::kChannelsIn + channel;
    return (n * Conv::kChannelsIn + channel) * S + position;
  }
  __device__ __forceinline__ int64_t pitch() const { return kLast ? 1 : S; }  // from channel to channel
};

// 8 channels of a pixel from `channel` on, of which the first one is *at; zeros for those that aren't there,
// or where no pixel is `inside`.
template <class Conv, bool kLast>
__device__ __forceinline__ void read_eight(float (&value)[8], const typename Conv::value_t* at, int64_t pitch,
                                           int channel, bool inside) {
  if constexpr (kLast && Conv::kChannelsIn % 8 == 0) {
    if (uintptr_t(at) % sizeof(Vector<typename Conv::value_t>) == 0) {
      Vector<typename Conv::value_t> fours[2] = {};
      if (inside && channel < Conv::kChannelsIn)
        fours[0] = load_vector(at), fours[1] = load_vector(at + kVector);
#pragma unroll
      for (int c = 0; c < 8; c++) value[c] = float(fours[c / kVector].at[c % kVector]);
      return;
    }
  }
#pragma unroll
  for (int c = 0; c < 8; c++)
    value[c] = inside && channel + c < Conv::kChannelsIn ? float(at[c * pitch]) : 0.f;
}

// Packs them. exponent: of their scale. With kRaises largest becomes their largest magnitude, as above, if
// that is larger.
template <class Conv, bool kRaises, bool kLast>
__device__ __forceinline__ void pack_eight(uint4* packed, int64_t part_pitch,
                                           const typename Conv::value_t* at, int64_t pitch, int channel,
                                           bool inside, int exponent, float& largest) {
  float value[8];
  read_eight<Conv, kLast>(value, at, pitch, channel, inside);
#pragma unroll
  for (int c = 0; c < 8; c++) {
    if constexpr (Conv::kScaled) {
      if (kRaises)
        largest =
            Conv::kMarksInfinite ? fmaxf(largest, fabsf(value[c])) : larger_magnitude(largest, value[c]);
      value[c] = Conv::scaled(value[c], power_of_two(exponent));
    }
  }
  Conv::pack_pixel(packed, part_pitch, value);
}

// The same pixel by pixel, with padding where rows have that; or, kAgain, the samples which the first scale
// does not fit. A thread has all of a pixel's channels where they are few, else, of x channels last, 8.
// Grid: shares of a sample, samples.
template <class Conv, bool kAgain, bool kLast, class Pixels>
__global__ void __launch_bounds__(kImageThreads)
    pack_pixels_kernel(uint4* packed, Scales<typename Conv::Operands> scales, const typename Conv::value_t* x,
                       Pixels pixels, Rows rows) {
#if __CUDA_ARCH__ >= 800
  await_previous_kernel();
  constexpr int kOwn = Conv::kEights <= kFewEights ? Conv::kEights : 1, kThreads = Conv::kEights / kOwn;
  const Lies<Conv, kLast> lies{pixels.plane()};
  for (int64_t n = blockIdx.y; n < scales.N; n += gridDim.y) {
    int exponent;
    if (!scales.template packs<kAgain>(n, exponent)) continue;
    float largest_magnitude = 0.f;
    const int64_t stride = int64_t(gridDim.x) * kImageThreads;
    for (int64_t i = int64_t(blockIdx.x) * kImageThreads + threadIdx.x; i < rows.S * kThreads; i += stride) {
      const int64_t pixel = i / kThreads;
      const int first = i % kThreads * kOwn;
      int64_t position = pixel;
      bool inside = true;
      if constexpr (Conv::kFolded > 1) {
        const int column = int(pixel % rows.pitch) - rows.before;
        position = pixel / rows.pitch * rows.width + column, inside = column >= 0 && column < rows.width;
      }
#pragma unroll
      for (int eight = first; eight < first + kOwn; eight++)  // side by side in memory: whole sectors
        pack_eight<Conv, !kAgain, kLast>(
            packed + (n * rows.S + pixel) * (Conv::kPixel / 8) + Conv::unit_of(eight), Conv::kPartPitch,
            x + lies.at(n, eight * 8, pixels.at(position)), lies.pitch(), eight * 8, inside, exponent,
            largest_magnitude);
    }
    if constexpr (Conv::kScaled && !kAgain) raise_largest(scales.largest + n, largest_magnitude);
  }
#endif
}

// ---------------------------------------------------------------------------------------------------- launch

inline dim3 shares_of(int64_t threads, int64_t N) {
  // A sample's blocks are few, because each raises a word, but fill a GPU.
  return dim3(unsigned(min((threads + kImageThreads - 1) / kImageThreads, 4096 / N + 1)),
              unsigned(min(N, int64_t(65535))));
}

template <class Conv>
void look_ahead(const Scales<typename Conv::Operands>& scales, const float* x, int64_t S,
                cudaStream_t stream) {
  const dim3 blocks = shares_of(Conv::kChannelsIn * S / kLooksAt + kRun, scales.N);
  launch_early(look_ahead_kernel<Conv>, blocks, kImageThreads, stream, scales, x, S);
}

// kLast: does x lie channels last?
template <class Conv, bool kLast, class Pixels>
void pack_image(uint4* packed, const Scales<typename Conv::Operands>& scales, const typename Conv::value_t* x,
                const Pixels& pixels, const Rows& rows, cudaStream_t stream) {
  const unsigned samples = unsigned(min(scales.N, int64_t(65535)));
  static_assert(!(Conv::kLooksAhead && kLast), "a gradient in planes");
  if constexpr (Conv::kLooksAhead) look_ahead<Conv>(scales, x, pixels.plane(), stream);
  if constexpr (kLast || Conv::kEights <= kFewEights) {
    const int64_t threads = rows.S * (Conv::kEights <= kFewEights ? 1 : Conv::kEights);
    launch_early(pack_pixels_kernel<Conv, false, kLast, Pixels>, shares_of(threads, scales.N), kImageThreads,
                 stream, packed, scales, x, pixels, rows);
    if constexpr (Conv::kScaled)
      launch_early(pack_pixels_kernel<Conv, true, kLast, Pixels>, dim3(32, samples), kImageThreads, stream,
                   packed, scales, x, pixels, rows);
  } else if constexpr (kPacksMatrices<Conv> && std::is_same_v<Pixels, All>) {
    static_assert(Conv::kFolded == 1 && std::is_same_v<typename Conv::operand_t, typename Conv::value_t>);
    const dim3 blocks(blocks_for(rows.S, kMatrixColumns), ceil_div(Conv::kPixel, kMatrixRows), samples);
    launch_early(pack_matrices_kernel<Conv>, blocks, kImageThreads, stream,
                 reinterpret_cast<typename Conv::operand_t*>(packed), x, rows.S, scales.N,
                 rows.S % 8 == 0 && uintptr_t(x) % 16 == 0);
  } else {
    static_assert(Conv::kFolded == 1, "rows without padding");
    const unsigned channels = ceil_div(Conv::kEights * 8, kImagePatch),
                   patches = unsigned((rows.S + kImagePatch - 1) / kImagePatch);
    launch_early(pack_image_kernel<Conv, false, Pixels>, dim3(patches, channels, samples), kImageThreads,
                 stream, packed, scales, x, pixels, rows.S);
    if constexpr (Conv::kScaled)
      launch_early(pack_image_kernel<Conv, true, Pixels>, dim3(min(patches, 32u), channels, samples),
                   kImageThreads, stream, packed, scales, x, pixels, rows.S);
  }
}

}  // namespace conv
