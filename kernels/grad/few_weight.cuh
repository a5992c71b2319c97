// The gradient of the weight of a convolution of few channels in, of images and of volumes:
// dweight[co][ci][taps] = the sum over samples and pixels of g[co][p]·x[ci][p + taps - before]; g is that of
// the convolution's output. Both lie in planes, as everybody else reads and writes them. Stride 1; zeros may
// be around x.
//
// A product on tensor cores, M = channels out, N = taps × channels in, K = pixels. N is so small that a block
// has all of it, or much, so each g is read once, or few times, by copies in the background, and becomes
// operands in registers: lanes of A have neighbouring pixels of a channel, as planes have, and so have lanes
// of B, of which the taps in a line share what they read.
//
// A block walks along the outermost axis: down the rows of an image, along the depth of a volume. A step has
// of g a slab: part of a row of an image; of a volume as many rows as make up for their being short. It
// brings of x the slab that the last tap needs; a ring holds those of all taps. So an image's rows are a
// volume's planes, of one line each. Four warps copy, and turn x into operands; eight multiply.
//
// kSplit: float32's accuracy. An operand is the sum of two TF32, high + low, 22 bits at least, of any
// magnitude a float32 has: nothing is scaled. Three products, of the four that there are, add to zeros, small
// ones first, since tensor cores cut off as they add; their sums over 16 pixels are added in float32. Else an
// operand is one TF32, rounded to nearest, and tensor cores sum a warp's pixels of a slab before they are
// added in float32. Sums of all warps are added in double.
//
// Bytes and operations: of (128, 8, 128, 128), 3×3, 64 channels out, 520 MB of g and 67 MB of x, 0.2 ms of
// memory, and 19 GFLOP; of (128, 8, 16, 64, 64), 3×3×3, 64 out, 1763 MB and 268 MB twice, since slabs of two
// lines need four of x, 0.7 ms, and 190 GFLOP: at 6.1 cycles for a product of depth 8 by mma.sync 0.6 ms, or
// thrice that.
#pragma once
#include "conv/shape.h"
#include "conv/wide_operands.cuh"
#include "core/reduce.cuh"
#include "core/wgmma.cuh"
#include "host/tensor.h"

namespace grad::few {

using namespace tensor_core;
using conv::ceil_div, conv::expect;

HOST_DEVICE constexpr int power_of_two_from(int n) { return n <= 1 ? 1 : 2 * power_of_two_from((n + 1) / 2); }

// The least that is 16 more than a multiple of 32.
HOST_DEVICE constexpr int pitch_from(int words) { return ceil_div(words - 16, 32) * 32 + 16; }

constexpr int kDepth = 16;  // pixels of a line whose products are computed at once: a unit
constexpr int kFewestStages = 3, kMostStages = 6;
constexpr int kCopyingRegisters = 88, kMultiplyingRegisters = 208;  // of 168 that each thread has at first
constexpr int kCopying = 128;  // threads of a block that copy and convert, behind those that multiply

// kAligned: at multiples of how many elements, 1, 2 or 4, rows of g begin. kRow_: how many pixels a line of a
// slab has at most, a power of two.
template <class Filter_, class Around_, int kSharedLimit, int kAligned_, int kRow_, bool kSplit_>
struct Tile {
  using Filter = Filter_;
  static constexpr int kDims = Filter::kDims;
  static constexpr int kIn = Filter::kIn, kOut = Filter::kOut;
  // Taps along the walk, of lines and in a line; before them zeros.
  static constexpr int kAcross = Filter::kExtent[0], kKernelLines = kDims == 3 ? Filter::kHeight : 1;
  static constexpr int kKernelW = Filter::kWidth;
  static constexpr bool kPadded = Around_::kAny;
  static constexpr int kBeforeAcross = Around_::kBefore[0];
  static constexpr int kBeforeLines = kDims == 3 ? Around_::kBefore[1] : 0;
  static constexpr int kBeforeW = Around_::kBefore[kDims - 1];
  static constexpr int kLead = ceil_div(kBeforeW, 4) * 4;  // pixels stored before those that g has, in fours
  static constexpr int kAligned = kAligned_;
  static constexpr bool kSplit = kSplit_;
  static constexpr int kParts = kSplit ? 2 : 1;

  // Columns of the product: an item has those of eight inputs, (tap across, tap of lines, channel in), each
  // as kChunk taps in a line see it, [tap][input]: a lane has four neighbouring pixels, and kWords with those
  // behind them, of which each tap takes four.
  static constexpr int kInputs = kAcross * kKernelLines * kIn;
  static constexpr int kChunk = kKernelW <= 5 ? kKernelW : 4, kChunks = ceil_div(kKernelW, kChunk);
  static constexpr int kItems = ceil_div(kInputs, 8) * kChunks, kMostItems = std::max(1, 15 / kChunk);
  static constexpr int kSkip = kLead - kBeforeW, kWords = ceil_div(kSkip + kChunk + 3, 4) * 4;

  // A block's warps: groups of 16 rows, of columns, and of pixels.
  static constexpr int kRowGroups = std::min(4, power_of_two_from(ceil_div(kOut, 16)));
  static constexpr int kBlockRows = 16 * kRowGroups, kRowBlocks = ceil_div(kOut, kBlockRows);
  static constexpr int kAllGroups = ceil_div(kItems, kMostItems);
  static constexpr int kColumnGroups = std::min(kWarps / kRowGroups, power_of_two_from(kAllGroups));
  static constexpr int kColumnBlocks = ceil_div(kAllGroups, kColumnGroups);
  static constexpr int kGroupItems = ceil_div(kItems, kColumnBlocks* kColumnGroups);
  static constexpr int kDepthGroups = kWarps / kRowGroups / kColumnGroups;
  static constexpr int kPaddedOut = kRowBlocks * kBlockRows;
  static constexpr int kPaddedColumns = kColumnBlocks * kColumnGroups * kGroupItems * kChunk * 8;

  // Shared memory, of which a slab takes as much as there is: slabs of x as operands
  // [slot][part][channel][line][pixel]; of g [stage][channel][line][pixel], and of x likewise, as they are.
  // Pitches that are 16 words more than a multiple of 32 let eight lanes of two rows meet each bank once.
  // kPixels: of g, of a slab; kLines of kRow each, to which belong kInputLines of x.
  static constexpr int kWordBytes = 16;       // two words that say what a step has
  static constexpr int kSlots = kAcross + 1;  // of the ring: slabs in use, and the one to come
  template <int kPixels_> struct Slab {
    static constexpr int kPixels = kPixels_, kRow = std::min(kRow_, kPixels);
    static constexpr int kLines = kPixels / kRow, kInputLines = kLines + kKernelLines - 1;
    static constexpr int kLine = ceil_div(kSkip + kRow + kKernelW - 1, 4) * 4;
    static constexpr int kLinePitch = kIn % 2 && kKernelLines > 1 ? pitch_from(kLine) : kLine;
    static constexpr int kPitch = kPixels + 16, kInputPitch = pitch_from(kInputLines * kLinePitch);
    static constexpr int kPart = kIn * kInputPitch * 4, kSlot = kParts * kPart, kRing = kSlots * kSlot;
    static constexpr int kStage = (kBlockRows * kPitch + kIn * kInputLines * kLinePitch) * 4;
    static constexpr int kStages = std::min(kMostStages, (kSharedLimit - kWordBytes - kRing) / kStage);
    static constexpr int kSharedBytes = kWordBytes + kRing + kStages * kStage;
  };
  static constexpr int kFewest = kDims == 3 ? 64 : std::max(64, kDepth* kDepthGroups);  // pixels
  template <int kPixels> static constexpr auto slab() {
    if constexpr (kPixels <= kFewest || Slab<kPixels>::kStages >= kFewestStages) return Slab<kPixels>();
    else return slab<kPixels / 2>();
  }
  using Chosen = decltype(slab<kDims == 3 ? 512 : kRow_>());
  static constexpr int kPixels = Chosen::kPixels, kRow = Chosen::kRow, kLines = Chosen::kLines;
  static constexpr int kInputLines = Chosen::kInputLines, kLinePitch = Chosen::kLinePitch;
  static constexpr int kPitch = Chosen::kPitch, kInputPitch = Chosen::kInputPitch;
  static constexpr int kPart = Chosen::kPart, kSlot = Chosen::kSlot;
  static constexpr int kRing = Chosen::kRing, kStage = Chosen::kStage, kStages = Chosen::kStages;
  static constexpr int kSharedBytes = Chosen::kSharedBytes;
  static constexpr int kAhead = kStages - 1;  // steps whose copies are on their way, or there
  static_assert(kStages >= kFewestStages, "the slabs do not fit in shared memory");
  static_assert(kRing % 16 == 0 && kStage % 16 == 0 && kPitch % 4 == 0, "rows of 16 bytes");
};

// Of x or of g: planes along the walk, lines of each, pixels of a line.
struct Extents {
  int across, lines, pixels;
};

#if __CUDA_ARCH__ >= 800

// A value as so many TF32.
template <bool kSplit> struct Parts;

// The tensor core cuts off the last bits of low, at most 2^-23 of the value. Where a value is not finite high
// is ±1, so that its products with all parts of another one are what the value's would be.
template <> struct Parts<true> {
  uint32_t part[2];
  __device__ __forceinline__ explicit Parts(float value) {
    const uint32_t bits = __float_as_uint(value);
    const float rounded = __uint_as_float((bits + 0x1000) & ~0x1fffu);
    const bool finite = fabsf(rounded) < INFINITY;
    part[0] = finite ? __float_as_uint(rounded) : (bits & 0x80000000) | 0x3f800000;
    part[1] = __float_as_uint(finite ? value - rounded : value + 0.f);
  }
};

// The tensor core cuts off the last bits. What would be rounded to infinity is cut off, too; the sum with
// zero is of a NaN one that stays NaN without them.
template <> struct Parts<false> {
  uint32_t part[1];
  __device__ __forceinline__ explicit Parts(float value) {
    constexpr float kLimit = 0x1.ffep127f;
    part[0] = fabsf(value) < kLimit ? __float_as_uint(value) + 0x1000 : __float_as_uint(value + 0.f);
  }
};

// A walk along columns of slabs, slabs tile … end - 1 of all, counted along them. A step brings a slab of x,
// and one of g unless it is ahead: the first ones of a column are other taps'.
template <class T> struct Walk {
  const float *const all_g, *const all_x;
  const Extents in, out;  // of x and of g
  const int64_t end;
  const int of_lines, of_row;  // slabs side by side
  const bool in_fours;         // do x and its lines begin at multiples of 16 bytes?
  int64_t tile;
  int step = 0, first = 0, stop = 0, lines = 0, pixels = 0;  // of this column of slabs
  int line = 0, pixel = 0;                                   // of x, the first ones stored
  const float *g = nullptr, *x = nullptr;                    // where the step's slabs begin

  __device__ __forceinline__ bool goes_on() const { return tile < end; }
  __device__ __forceinline__ bool ahead() const { return step < first; }
  // The step's lines of g and their pixels; 0 where it has none, -1 where there is no step.
  __device__ __forceinline__ int word() const { return !goes_on() ? -1 : ahead() ? 0 : lines << 16 | pixels; }
  __device__ __forceinline__ int plane() const { return step + T::kAcross - 1 - T::kBeforeAcross; }  // of x
  __device__ __forceinline__ void start() {
    const int64_t column_of_slabs = tile / out.across, group = column_of_slabs / of_row, n = group / of_lines;
    const int column = int(column_of_slabs - group * of_row) * T::kRow;
    const int row = int(group - n * of_lines) * T::kLines;
    first = int(tile - column_of_slabs * out.across);
    stop = int(min(int64_t(out.across), first + end - tile));
    step = first - (T::kAcross - 1);
    lines = min(T::kLines, out.lines - row), pixels = min(T::kRow, out.pixels - column);
    line = row - T::kBeforeLines, pixel = column - T::kLead;
    g = all_g + ((n * T::kOut * out.across + step) * out.lines + row) * out.pixels + column;
    x = all_x + ((n * T::kIn * in.across + plane()) * in.lines + line) * in.pixels + pixel;
  }
  __device__ __forceinline__ void advance() {
    if (++step < stop) {
      g += out.lines * out.pixels, x += in.lines * in.pixels;
      return;
    }
    tile += stop - first;
    if (goes_on()) start();
  }
};

template <class T> struct Loop {
  static constexpr int kItems = T::kGroupItems, kChunk = T::kChunk, kParts = T::kParts;
  using Sums = float[kItems][kChunk][4];
  using Operand = Parts<T::kSplit>;
  Sums sums = {};

  // A step's slabs, to a stage. What lies past their ends stays as it was.
  static __device__ __forceinline__ void copy(float* stage, const Walk<T>& walk, int first_out) {
    if (!walk.ahead()) {
      constexpr int kOfChannel = T::kPixels / T::kAligned, kAtOnce = std::min(kOfChannel, kCopying);
      constexpr int kRows = kCopying / kAtOnce;  // copies side by side
      static_assert(kAtOnce * kRows == kCopying && T::kBlockRows % kRows == 0);
      const int64_t channel = int64_t(walk.out.across) * walk.out.lines * walk.out.pixels;
      const int thread = thread_index_anew() - kThreads, own = thread / kAtOnce;
#pragma unroll
      for (int piece = 0; piece < kOfChannel; piece += kAtOnce) {
        const int at = (piece + thread % kAtOnce) * T::kAligned, line = at / T::kRow, pixel = at % T::kRow;
        const float* const from = walk.g + (first_out + own) * channel + line * walk.out.pixels + pixel;
        float* const to = stage + own * T::kPitch + at;
        const bool inside = line < walk.lines && pixel < walk.pixels;
#pragma unroll
        for (int i = 0; i < T::kBlockRows; i += kRows)
          if (inside && (T::kPaddedOut == T::kOut || first_out + own + i < T::kOut))
            copy_async<4 * T::kAligned>(to + i * T::kPitch, from + i * channel);
      }
    }
    float* const inputs = stage + T::kBlockRows * T::kPitch;
    const int64_t channels = int64_t(walk.in.across) * walk.in.lines * walk.in.pixels;
    const int stop = walk.pixels + T::kLead - T::kBeforeW + T::kKernelW - 1, width = walk.in.pixels;
    const bool real = !T::kPadded || uint32_t(walk.plane()) < uint32_t(walk.in.across);
    each_input([&](int channel, int line, int pixel) {
      if (line >= walk.lines + T::kKernelLines - 1) return;
      float* const to = inputs + (channel * T::kInputLines + line) * T::kLinePitch + pixel;
      const float* const from = walk.x + channel * channels + line * width + pixel;
      const bool lies = !T::kPadded || (real && uint32_t(walk.line + line) < uint32_t(walk.in.lines));
      const auto is_there = [&](int k) {
        return !T::kPadded || (lies && uint32_t(walk.pixel + pixel + k) < uint32_t(width));
      };
      if (walk.in_fours) {
        if (pixel >= stop) return;
        if (is_there(0)) copy_async<16>(to, from);
        else *reinterpret_cast<float4*>(to) = make_float4(0, 0, 0, 0);
      } else {
#pragma unroll
        for (int k = 0; k < 4; k++) {
          if (pixel + k >= stop) continue;
          if (is_there(k)) copy_async<4>(to + k, from + k);
          else to[k] = 0;
        }
      }
    });
  }

  // The slab of x that this thread has copied, as operands.
  static __device__ __forceinline__ void convert(uint32_t* slot, const float* stage) {
    const float* const inputs = stage + T::kBlockRows * T::kPitch;
    each_input([&](int channel, int line, int pixel) {
      const float* const at = inputs + (channel * T::kInputLines + line) * T::kLinePitch + pixel;
      const float4 from = *reinterpret_cast<const float4*>(at);
      const Operand values[] = {Operand(from.x), Operand(from.y), Operand(from.z), Operand(from.w)};
      uint32_t* const to = slot + channel * T::kInputPitch + line * T::kLinePitch + pixel;
#pragma unroll
      for (int i = 0; i < kParts; i++)
        *reinterpret_cast<uint4*>(to + i * (T::kPart / 4)) =
            make_uint4(values[0].part[i], values[1].part[i], values[2].part[i], values[3].part[i]);
    });
  }

  // A thread's elements of a slab of x, four neighbours of a line each.
  template <class Act> static __device__ __forceinline__ void each_input(const Act& act) {
    constexpr int kOfLine = T::kLinePitch / 4, kAll = T::kIn * T::kInputLines * kOfLine;
    const int thread = thread_index_anew() - kThreads;
#pragma unroll
    for (int i = 0; i < kAll; i += kCopying) {
      const int own = i + thread, line = own / kOfLine;
      if (i + kCopying <= kAll || own < kAll)
        act(line / T::kInputLines, line % T::kInputLines, own % kOfLine * 4);
    }
  }

  // The products of a unit's pixels, of which so many are real, all if kWhole, to `to`. gradient: the address
  // of the lane's first pixel of its first row; inputs: of each item, `at` bytes before these. In the place
  // of k t and t + 4 of a product stand pixels 4 t and 4 t + 1, or two behind these.
  template <bool kWhole>
  static __device__ __forceinline__ void multiply(Sums& to, uint32_t gradient,
                                                  const uint32_t (&inputs)[kItems], uint32_t at, int pixels) {
    // Where registers can't be taken from the threads that copy, none is left for it.
    const int thread = TENSOR_CORE_WGMMA ? threadIdx.x : thread_index_anew(), first = thread % 4 * 4;
    bool real[4];
#pragma unroll
    for (int i = 0; i < 4; i++) real[i] = kWhole || first + i < pixels;
    uint32_t a[kParts][2][4];
#pragma unroll
    for (int half = 0; half < 2; half++) {
      uint32_t values[4];
      load_shared<4>(values, gradient + half * 8 * T::kPitch * 4);
#pragma unroll
      for (int i = 0; i < 4; i++) {
        const Operand parts(real[i] ? __uint_as_float(values[i]) : 0.f);
#pragma unroll
        for (int part = 0; part < kParts; part++) a[part][i / 2][i % 2 * 2 + half] = parts.part[part];
      }
    }
#pragma unroll
    for (int item = 0; item < kItems; item++) {
      uint32_t words[kParts][T::kWords];
#pragma unroll
      for (int i = 0; i < kParts * T::kWords; i += 4) {
        const int part = i / T::kWords, word = i % T::kWords;
        uint32_t four[4];
        load_shared<4>(four, inputs[item] + at + part * T::kPart + word * 4);
#pragma unroll
        for (int k = 0; k < 4; k++) words[part][word + k] = four[k];
      }
      float products[kChunk][4] = {};
      const auto add = [&](int part_a, int part_b) {
#pragma unroll
        for (int i = 0; i < 2 * kChunk; i++) {
          const int step = i / kChunk, tap = i % kChunk, word = T::kSkip + tap + 2 * step;
          const uint32_t b0 = real[2 * step] ? words[part_b][word] : 0;
          const uint32_t b1 = real[2 * step + 1] ? words[part_b][word + 1] : 0;
          multiply_add_tf32(T::kSplit ? products[tap] : to[item][tap], a[part_a][step], b0, b1);
        }
      };
      if (kParts > 1) add(kParts - 1, 0), add(0, kParts - 1);
      add(0, 0);
      if (!T::kSplit) continue;
#pragma unroll
      for (int i = 0; i < kChunk * 4; i++) to[item][i / 4][i % 4] += products[i / 4][i % 4];
    }
  }

  // Those of a slab; a warp has every kDepthGroups-th unit, first whole ones, then where lines end.
  static __device__ __forceinline__ void multiply_slab(Sums& to, uint32_t gradient,
                                                       const uint32_t (&inputs)[kItems], int lines,
                                                       int pixels, int depth_group) {
    const int whole = pixels / kDepth, rest = pixels % kDepth;
    const auto act = [&](auto all, int line, int group) {
      const uint32_t of_g = (line * T::kRow + group * kDepth) * 4;
      const uint32_t of_x = (line * T::kLinePitch + group * kDepth) * 4;
      multiply<all.value>(to, gradient + of_g, inputs, of_x, rest);
    };
    if (whole) {
      int line = 0, group = depth_group;
#pragma unroll 1
      while (true) {
        for (; group >= whole; group -= whole) line++;
        if (line >= lines) break;
        act(std::true_type(), line, group);
        group += T::kDepthGroups;
      }
    }
    if (!rest) return;
#pragma unroll 1
    for (int line = (depth_group - lines * whole) & (T::kDepthGroups - 1); line < lines;
         line += T::kDepthGroups)
      act(std::false_type(), line, whole);
  }

  // The same to the sums.
  __device__ __forceinline__ void add_slab(uint32_t gradient, const uint32_t (&inputs)[kItems], int lines,
                                           int pixels, int depth_group) {
    if constexpr (T::kSplit) {
      multiply_slab(sums, gradient, inputs, lines, pixels, depth_group);
    } else {
      Sums of_slab = {};
      multiply_slab(of_slab, gradient, inputs, lines, pixels, depth_group);
#pragma unroll
      for (int i = 0; i < kItems * kChunk * 4; i++) {
        const int item = i / 4 / kChunk, tap = i / 4 % kChunk;
        sums[item][tap][i % 4] += of_slab[item][tap][i % 4];
      }
    }
  }

  // Of the threads that copy: each step's slabs some steps ahead; the next step's of x as operands, and its
  // word to words[0] and words[1] in turn.
  static __device__ __forceinline__ void copy_all(volatile int* words, uint32_t* ring, float* stages,
                                                  Walk<T>& walk, int first_out) {
    const bool first = threadIdx.x == kThreads;
    int ahead[T::kAhead + 1] = {};  // of the steps that are on their way, the last one last
    if (walk.goes_on()) walk.start();
    const auto copy_next = [&](int stage) {
#pragma unroll
      for (int i = 0; i < T::kAhead; i++) ahead[i] = ahead[i + 1];
      ahead[T::kAhead] = walk.word();
      if (walk.goes_on()) {
        copy(stages + stage * (T::kStage / 4), walk, first_out);
        walk.advance();
      }
      commit_copies();  // an empty group too, so that a count of pending groups means the same each time
    };
#pragma unroll 1
    for (int i = 0; i < T::kAhead; i++) copy_next(i);
    await_copies<T::kAhead - 1>();
    convert(ring, stages);
    int stage = 0, slot = 0, turn = 0;  // the step's own, and that of its slab of x, and its word's
    if (first) words[0] = ahead[1];
#pragma unroll 1
    while (true) {
      await_copies<T::kAhead - 2>();  // the next step's, too, since its slab of x is converted now
      __syncthreads();  // the step's operands are there; and everyone is done with the last step
      if (ahead[1] < 0) return;
      const int next_stage = stage + 1 == T::kStages ? 0 : stage + 1;
      copy_next(stage == 0 ? T::kStages - 1 : stage - 1);
      stage = next_stage, slot = slot + 1 == T::kSlots ? 0 : slot + 1, turn ^= 1;
      if (first) words[turn] = ahead[1];
      convert(ring + slot * (T::kSlot / 4), stages + stage * (T::kStage / 4));
    }
  }

  // Of the others.
  __device__ __forceinline__ void multiply_all(const volatile int* words, const uint32_t* ring,
                                               const float* stages, int row_group, int first_item,
                                               int depth_group) {
    const int lane = threadIdx.x % 32;
    const uint32_t gradients =
        shared_address(stages) + ((row_group * 16 + lane / 4) * T::kPitch + lane % 4 * 4) * 4;
    const uint32_t inputs = shared_address(ring) + lane % 4 * 16;
    uint32_t rows[kItems];  // the lane's input of each item, in the slots of the step before
#pragma unroll
    for (int j = 0; j < kItems; j++) {
      const int given = (first_item + j) / T::kChunks * 8 + lane / 4, input = given < T::kInputs ? given : 0;
      const int tap = input / T::kIn, line = tap % T::kKernelLines, across = tap / T::kKernelLines;
      const int pixel = line * T::kLinePitch + (first_item + j) % T::kChunks * kChunk;
      rows[j] = inputs + (across + 1) % T::kSlots * T::kSlot + (input % T::kIn * T::kInputPitch + pixel) * 4;
    }
    int stage = 0, turn = 0;
#pragma unroll 1
    while (true) {
      __syncthreads();  // as above
      const int word = words[turn];
      if (word < 0) return;
#pragma unroll
      for (int j = 0; j < kItems; j++) {
        rows[j] += T::kSlot;
        if (rows[j] >= inputs + T::kRing) rows[j] -= T::kRing;
      }
      add_slab(gradients + stage * T::kStage, rows, word >> 16, word & 0xffff, depth_group);
      stage = stage + 1 == T::kStages ? 0 : stage + 1, turn ^= 1;
    }
  }

  __device__ __forceinline__ void run(float* partial, Walk<T>& walk) {
    extern __shared__ uint4 shared[];
    volatile int* const words = reinterpret_cast<int*>(shared);
    uint32_t* const ring = reinterpret_cast<uint32_t*>(shared + T::kWordBytes / 16);
    float* const stages = reinterpret_cast<float*>(shared + (T::kWordBytes + T::kRing) / 16);
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int row_group = warp % T::kRowGroups, column_group = warp / T::kRowGroups % T::kColumnGroups;
    const int depth_group = warp / T::kRowGroups / T::kColumnGroups;
    const int first_out = int(blockIdx.y) / T::kColumnBlocks * T::kBlockRows;
    const int first_item = (int(blockIdx.y) % T::kColumnBlocks * T::kColumnGroups + column_group) * kItems;
    if (warp >= kWarps) {
#if TENSOR_CORE_WGMMA
      give_registers_but<kCopyingRegisters>();
#endif
      return copy_all(words, ring, stages, walk, first_out);
    }
#if TENSOR_CORE_WGMMA
    take_registers_to<kMultiplyingRegisters>();
#endif
    multiply_all(words, ring, stages, row_group, first_item, depth_group);
    const int64_t split = int64_t(blockIdx.x) * T::kDepthGroups + depth_group;
    const int64_t row = split * T::kPaddedOut + first_out + row_group * 16 + lane / 4;
    float* const to = partial + row * T::kPaddedColumns + first_item * kChunk * 8 + lane % 4 * 2;
#pragma unroll
    for (int i = 0; i < kItems * kChunk * 2; i++) {
      const int item = i / 2 / kChunk, tap = i / 2 % kChunk, half = i % 2;
      *reinterpret_cast<float2*>(to + half * 8 * T::kPaddedColumns + (item * kChunk + tap) * 8) =
          make_float2(sums[item][tap][half * 2], sums[item][tap][half * 2 + 1]);
    }
  }
};

#endif

// Sums to partial [split · kDepthGroups + group][kPaddedOut][kPaddedColumns]. Grid: splits of all slabs,
// blocks of channels out and of columns.
template <class T>
__global__ void __launch_bounds__(kThreads + kCopying, 1)
    few_weight_kernel(float* partial, const float* g, const float* x, int64_t N, Extents in, Extents out) {
#if __CUDA_ARCH__ >= 800
  const int of_lines = ceil_div(out.lines, T::kLines), of_row = ceil_div(out.pixels, T::kRow);
  const int64_t count = N * of_lines * of_row * out.across;
  const int64_t begin = count * blockIdx.x / gridDim.x, end = count * (blockIdx.x + 1) / gridDim.x;
  const bool in_fours = in.pixels % 4 == 0 && reinterpret_cast<uintptr_t>(x) % 16 == 0;
  Walk<T> walk{g, x, in, out, end, of_lines, of_row, in_fours, begin};
  Loop<T> loop;
  loop.run(partial, walk);
#endif
}

// dweight, from so many partial sums: kMerged of it by a block, whose threads beside them have every so
// many-th part.
constexpr int kMerged = 8;
template <class T>
__global__ void __launch_bounds__(kThreads)
    merge_few_kernel(float* dweight, const float* partial, int64_t parts) {
  constexpr int kOthers = kThreads / kMerged;
  __shared__ double of_threads[kOthers][kMerged];
  const int own = threadIdx.x % kMerged, first = threadIdx.x / kMerged, i = int(blockIdx.x) * kMerged + own;
  const int out = i / T::kPaddedColumns, column = i % T::kPaddedColumns, item = column / (8 * T::kChunk);
  const int input = item / T::kChunks * 8 + column % 8;
  const int tap = item % T::kChunks * T::kChunk + column / 8 % T::kChunk;  // in a line
  const bool real = out < T::kOut && input < T::kInputs && tap < T::kKernelW;
  double sum = 0;
  if (real) {
#pragma unroll 8
    for (int64_t part = first; part < parts; part += kOthers)
      sum += partial[(part * T::kPaddedOut + out) * T::kPaddedColumns + column];
  }
  of_threads[first][own] = sum;
  __syncthreads();  // all are there
  if (first || !real) return;
  for (int other = 1; other < kOthers; other++) sum += of_threads[other][own];
  const int64_t line = (int64_t(out) * T::kIn + input % T::kIn) * (T::kInputs / T::kIn) + input / T::kIn;
  dweight[line * T::kKernelW + tap] = float(sum);
}

// dweight, of g (N, kOut, [D',] H', W') and x (N, kIn, [D,] H, W), contiguous.
template <class T> void weight(Out<float> dweight, In<float> g, In<float> x, cudaStream_t stream) {
  using Filter = typename T::Filter;
  constexpr int kDims = T::kDims;
  expect(x.dims == kDims + 2 && g.dims == x.dims && g.size(0) == x.size(0) && x.size(1) == T::kIn &&
             g.size(1) == T::kOut,
         "images or volumes of the channels that are compiled for");
  for (int i = 0; i < kDims; i++) {
    const int64_t without = x.size(i + 2) - Filter::kExtent[i] + 1, extent = g.size(i + 2);
    expect(extent >= 1 && (T::kPadded || extent == without), "gradients of the sizes that are compiled for");
  }
  expect(dweight.numel() == T::kOut * T::kIn * Filter::kTaps, "a weight of the sizes that are compiled for");
  const auto extents = [&](const In<float>& t) {
    return Extents{int(t.size(2)), kDims == 3 ? int(t.size(3)) : 1, int(t.size(kDims + 1))};
  };
  const Extents in = extents(x), out = extents(g);
  expect(out.pixels % T::kAligned == 0 && uintptr_t(g.data) % (4 * T::kAligned) == 0,
         "rows as aligned as is compiled for");
  constexpr int kBlocks = T::kRowBlocks * T::kColumnBlocks;
  const int64_t N = x.size(0), most = device_attribute(cudaDevAttrMultiProcessorCount) / kBlocks;
  const int64_t count = N * out.across * ceil_div(out.lines, T::kLines) * ceil_div(out.pixels, T::kRow);
  const int64_t splits = std::max<int64_t>(1, std::min(most, count)), parts = splits * T::kDepthGroups;
  const Scratch<float> partial(parts * T::kPaddedOut * T::kPaddedColumns, stream);
  allow_shared<few_weight_kernel<T>>();
  const dim3 grid(splits, kBlocks);
  few_weight_kernel<T><<<grid, kThreads + kCopying, T::kSharedBytes, stream>>>(partial, g, x, N, in, out);
  const unsigned merges = blocks_for(T::kOut * T::kPaddedColumns, kMerged);
  merge_few_kernel<T><<<merges, kThreads, 0, stream>>>(dweight, partial, parts);
}

}  // namespace grad::few
