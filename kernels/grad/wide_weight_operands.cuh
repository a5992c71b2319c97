// The operands of a wide convolution's weights' gradient in shared memory: which part of it a block has, the
// scales of a sample's g and x, the walk down strips, and a step of it on its way to shared memory.
#pragma once
#include "core/reduce.cuh"
#include "grad/masked.cuh"

namespace grad {

// One of a block's sums: the tap, and the channels out and in.
struct SumPlace {
  int tap, out, in;
};

// The least exponent of a sample's products, that of n being exponent_of(n); to all threads of the block.
// Samples of zeros don't count.
template <class Exponent>
__device__ __forceinline__ int common_exponent(const uint32_t* largest_x, const uint32_t* largest_g,
                                               int64_t N, const Exponent& exponent_of) {
  __shared__ int negative;
  if (threadIdx.x == 0) negative = -254;
  __syncthreads();  // set before anyone raises it
  for (int64_t n = threadIdx.x; n < N; n += blockDim.x)
    if (largest_x[n] && largest_g[n]) atomicMax(&negative, -exponent_of(n));
  __syncthreads();  // complete before anyone reads it
  return -negative;
}

// The scales of a sample, 2^common in all. The smaller its products, the further down go both: it is lost
// where it is nothing beside others.
struct SampleScales {
  float input = 1.f, gradient = 1.f;
  __device__ __forceinline__ void set(uint32_t largest_x, uint32_t largest_g, int common) {
    const int x = top_exponent(largest_x), g = top_exponent(largest_g), slack = max(x + g - common, 0);
    gradient = power_of_two(max(g - slack / 2, -126));
    input = power_of_two(max(x - (slack - slack / 2), -126));
  }
};

// What a walk says of a step: the pixels of g, 0 where there is no g, -1 where there is no such step; the
// pixels of the strip; and the scales.
struct Step {
  int pixels = -1, across = 0;
  SampleScales scales;
};

// By wgmma: 8 channels of a row of x as they are, on their way to shared memory in the background; and what a
// walk says of the step then.
template <class T> struct alignas(16) RawGroup {
  T values[8][kStrip];
  T edge[64];  // pixel·8 + channel
  int across;
  float scale;
};

// The source is g's.
template <class Filter, class Operands, class Target, class Source_, bool kWgmma_>
struct WideWeight : Operands {
  using Source = Source_;
  using Strip = typename Source::Strip;
  using Operands::kParts, Operands::kScaled, Operands::kSplit;
  using typename Operands::operand_t, typename Operands::value_t;
  static constexpr bool kWgmma = kWgmma_;
  static constexpr int kChannelsIn = Filter::kIn, kChannelsOut = Filter::kOut;
  static constexpr int kKernelH = Filter::kHeight, kKernelW = Filter::kWidth;

  static constexpr int kBlock = kWarps * 8;  // channels of either kind in a block
  static constexpr int kBlocksOut = ceil_div(kChannelsOut, kBlock), kBlocksIn = ceil_div(kChannelsIn, kBlock);

  // A block's taps: kTapRows rows of the filter, kTapColumns pixels of each.
  static constexpr int kMostTaps = kSplit ? 3 : 9;  // for so many sums there are registers
  static constexpr int kColumnGroups = ceil_div(kKernelW, kMostTaps);
  static constexpr int kTapColumns = ceil_div(kKernelW, kColumnGroups);
  static constexpr int kMostRows = kMostTaps / kTapColumns < 3 ? kMostTaps / kTapColumns : 3;
  static constexpr int kRowGroups = ceil_div(kKernelH, kMostRows);
  static constexpr int kTapRows = ceil_div(kKernelH, kRowGroups);
  static constexpr int kBlockTaps = kTapRows * kTapColumns;
  static constexpr int kBlocks = kBlocksOut * kBlocksIn * kRowGroups * kColumnGroups;

  // Pixels of a row that are copied at a time: all strips begin at a multiple of so many. (A block's first
  // column may be any where there are several groups of columns.)
  static constexpr int kCopiedX = kColumnGroups == 1 && Target::kXAligned % 4 == 0 ? 4 : 1;

  // Shared memory, in units of 16 bytes, 8 channels of a pixel: rows of x [slot][part][channel group][pixel],
  // and g [stage][part][channel group][pixel]. By wgmma a row of x ends with the last 16 pixels of the strip
  // as each tap's column sees them [column][channel group][pixel], zeros past the end.
  static constexpr int kTailPixels = 16;
  static constexpr int kInputPitch = kStrip + kTapColumns - 1;
  static constexpr int stages() {
    if constexpr (kWgmma) return Source::kStages;
    else return 2;
  }
  static constexpr int kStages = stages();                         // of g: the row in use and those to come
  static constexpr int kSlots = kTapRows - 1 + kStages;            // likewise of x, a circular buffer
  static constexpr int kTail = kWgmma ? kWarps * kTailPixels : 0;  // of a column
  static constexpr int kSlot = kParts * kWarps * kInputPitch + kTapColumns * kTail;
  static constexpr int kStage = kParts * kWarps * kStrip;
  static constexpr int kOperandBytes = (kSlots * kSlot + kStages * kStage) * 16;

  // The slot of x's row for the block's tap row r at a step.
  static __device__ __forceinline__ int slot_of(int step, int r) { return (step + kStages + r) % kSlots; }

  // What is one of kBlocks.
  struct BlockPlace {
    int channel_out, channel_in, kernel_row, kernel_column;
    __device__ __forceinline__ explicit BlockPlace(int block)
        : channel_out(block % kBlocksOut * kBlock), channel_in(block / kBlocksOut % kBlocksIn * kBlock),
          kernel_row(block / kBlocksOut / kBlocksIn % kRowGroups * kTapRows),
          kernel_column(block / kBlocksOut / kBlocksIn / kRowGroups * kTapColumns) {}
  };

  // Of all filters' planes that of a sum, or -1 where there is none.
  static __device__ __forceinline__ int64_t plane_of(const BlockPlace& place, const SumPlace& sum) {
    const int out = place.channel_out + sum.out, in = place.channel_in + sum.in;
    return out < kChannelsOut && in < kChannelsIn ? int64_t(out) * kChannelsIn + in : -1;
  }

  // Where g and x are each scaled as far up as operands go.
  static __device__ __forceinline__ int common_exponent(const Source&, const uint32_t* largest_x,
                                                        const uint32_t* largest_g, int64_t N) {
    if constexpr (!kScaled) return 0;
    return grad::common_exponent(largest_x, largest_g, N, [&](int64_t n) {
      return top_exponent(largest_x[n]) + top_exponent(largest_g[n]);
    });
  }

#if __CUDA_ARCH__ >= 800

  // A walk goes down strips: rows tile … end - 1 of all, along columns of strips. A step brings a row of x,
  // and g unless it is `ahead`: a column's first rows are other taps'. These two are any Walk's; in a base,
  // with the members, they would compile to other machine code. The place of a column's first step:
  template <class Walk> static __device__ __forceinline__ StripPlace start_column(Walk& walk) {
    const Strips& strips = walk.strips;
    const int64_t column_of_strips = walk.tile / strips.height, n = column_of_strips / strips.of_row;
    const int column = int(column_of_strips % strips.of_row) * kStrip;
    walk.first = int(walk.tile - column_of_strips * strips.height);
    walk.stop = int(min(int64_t(strips.height), walk.first + walk.end - walk.tile));
    walk.row = walk.first - (kTapRows - 1), walk.pixels = strips.width - column;
    return {n, walk.row, column};
  }
  template <class Walk> static __device__ __forceinline__ void advance(Walk& walk) {
    if (++walk.row == walk.stop) {
      walk.tile += walk.stop - walk.first;
      if (walk.goes_on()) walk.start();
      return;
    }
    walk.next_row();
    // Past the last row of x there are only rows of the filter that don't exist.
    if (kKernelH == kRowGroups * kTapRows || walk.row + kTapRows - 1 + walk.place.kernel_row < walk.H)
      walk.x += walk.W;
  }

  struct Walk {
    const Source& source;
    const value_t* const all_x;
    const Strips& strips;
    const BlockPlace& place;
    const uint32_t *const largest_x, *const largest_g;
    const int common, group;  // the channel group of the block's to which dy, words and x point
    const int64_t H, W, end;
    int64_t tile;
    SampleScales scales;
    int pixels, row, first, stop;  // of this column of strips: across, and the rows first … stop - 1
    // Where the step's rows begin.
    const output_t* dy;
    const uint32_t* words;
    const value_t* x;

    __device__ __forceinline__ bool goes_on() const { return tile < end; }
    __device__ __forceinline__ bool ahead() const { return row < first; }
    __device__ __forceinline__ Step step() const {
      if (!goes_on()) return {};
      const int across = min(pixels, kStrip);
      return {ahead() ? 0 : across, across, scales};
    }
    __device__ __forceinline__ void start() {
      const StripPlace at = start_column(*this);
      if constexpr (kScaled) { scales.set(largest_x[at.n], largest_g[at.n], common); }
      const int group_out = place.channel_out / 8 + group;
      dy = source.dy + Strip::index(at, strips, group_out);
      words = source.words + store::mask_index(at.n, group_out * 8, at.row, at.column, strips.height,
                                               strips.width, kChannelsOut);
      x = all_x + ((at.n * kChannelsIn + place.channel_in + group * 8) * H + first + place.kernel_row) * W;
      x += at.column + place.kernel_column;
    }
    __device__ __forceinline__ void next_row() {  // of g
      dy += strips.width, words += store::mask_row(strips.width, kChannelsOut);
    }
  };

  // 8 channels of a step's g on their way to shared memory, in a warp's registers.
  struct StagedGradient {
    Strip strip;

    __device__ __forceinline__ void load(const Walk& walk) {
      if (walk.ahead()) return;
      const int64_t plane_size = int64_t(walk.strips.height) * walk.strips.width;
      strip.load(walk.dy, walk.words, walk.place.channel_out / 8 + walk.group, plane_size, walk.pixels);
    }
    // To a stage, as operands.
    __device__ __forceinline__ void store(uint4* stage, int group, const Step& step,
                                          const typename Source::Tail& tail) const {
      if (step.pixels == 0) return;
      const int lane = threadIdx.x % 32;
      float values[kLanePixels][8];
      strip.for_each(tail, [&](int i, int c, const auto& gradient) {
        const float g = gradient.of[0];
        values[i][c] = kScaled ? Operands::scaled(g, step.scales.gradient) : g;
      });
#pragma unroll
      for (int i = 0; i < kLanePixels; i++)
        Operands::pack_pixel(stage + group * kStrip + lane + i * 32, kWarps * kStrip, values[i]);
    }
  };

  // Likewise of a row of x. Past the end of a row its values may be anything: such pixels don't count
  // (mask_taps, store_tails).
  struct StagedInput {
    value_t values[kLanePixels][8] = {};
    // Right of the strip: lane + 32 k is pixel·8 + channel.
    value_t edge[ceil_div((kTapColumns - 1) * 8, 32)] = {};

    __device__ __forceinline__ void load(const Walk& walk) {
      const int lane = threadIdx.x % 32, group = walk.place.channel_in / 8 + walk.group;
      const int real = walk.pixels + kKernelW - 1 - walk.place.kernel_column;  // pixels of x
      load_strip<kChannelsIn>(values, walk.x, group, walk.H * walk.W, real);
#pragma unroll
      for (int i = lane, k = 0; k < int(sizeof(edge) / sizeof(value_t)); i += 32, k++) {
        const bool exists =
            i < (kTapColumns - 1) * 8 && group * 8 + i % 8 < kChannelsIn && kStrip + i / 8 < real;
        if (exists) edge[k] = walk.x[i % 8 * walk.H * walk.W + kStrip + i / 8];
      }
    }
    // By way of raw.
    using Raw = RawGroup<value_t>;
    template <class Walk> static __device__ __forceinline__ void copy(Raw& to, const Walk& walk) {
      const int group = walk.place.channel_in / 8 + walk.group;
      const int real = walk.pixels + kKernelW - 1 - walk.place.kernel_column;
      copy_strip<kChannelsIn, kCopiedX>(to.values, walk.x, group, walk.H * walk.W, real);
#pragma unroll
      for (int i = threadIdx.x % 32; i < (kTapColumns - 1) * 8; i += 32)
        if (group * 8 + i % 8 < kChannelsIn && kStrip + i / 8 < real)
          copy_raw(to.edge + i, walk.x + i % 8 * walk.H * walk.W + kStrip + i / 8);
    }
    __device__ __forceinline__ void load(const Raw& from) {
      const int lane = threadIdx.x % 32;
      load_strip<64>(values, &from.values[0][0], 0, kStrip, kStrip);
#pragma unroll
      for (int k = 0; k < int(sizeof(edge) / sizeof(value_t)); k++) edge[k] = from.edge[(lane + k * 32) % 64];
    }
    // To a slot, as operands under a scale, of a strip that is so many pixels across.
    __device__ __forceinline__ void store(uint4* slot, int group, int across, float scale) const {
      const int lane = threadIdx.x % 32;
      const auto operand = [&](float value) { return kScaled ? Operands::scaled(value, scale) : value; };
      uint4* const to = slot + group * kInputPitch;
#pragma unroll
      for (int i = 0; i < kLanePixels; i++) {
        float of_pixel[8];
#pragma unroll
        for (int c = 0; c < 8; c++) of_pixel[c] = operand(float(values[i][c]));
        Operands::pack_pixel(to + lane + i * 32, kWarps * kInputPitch, of_pixel);
      }
#pragma unroll
      for (int i = lane, k = 0; k < int(sizeof(edge) / sizeof(value_t)); i += 32, k++) {
        if (i >= (kTapColumns - 1) * 8) continue;
        const auto parts = Operands::split(operand(float(edge[k])));
#pragma unroll
        for (int part = 0; part < kParts; part++)
          reinterpret_cast<operand_t*>(to + part * kWarps * kInputPitch + kStrip + i / 8)[i % 8] =
              parts.part[part];
      }
      if (kTail > 0 && across % kTailPixels) store_tails(slot, group, across);
    }

    // Each column's last pixels, from the channel group as it lies in the slot.
    static __device__ __forceinline__ void store_tails(uint4* slot, int group, int across) {
      const int lane = threadIdx.x % 32, first = across / kTailPixels * kTailPixels;
      const uint4* const from = slot + group * kInputPitch + first;
      uint4* const tails = slot + kWarps * kInputPitch + group * kTailPixels;
      __syncwarp();  // the channel group is there
#pragma unroll
      for (int i = lane; i < kTapColumns * kTailPixels; i += 32) {
        const int column = i / kTailPixels, pixel = i % kTailPixels;
        const uint4 zeros = make_uint4(0, 0, 0, 0);
        tails[column * kTail + pixel] = first + pixel < across ? from[pixel + column] : zeros;
      }
    }
  };

#endif
};

}  // namespace grad
