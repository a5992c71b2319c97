// The gradient of the weight of a 2-D convolution of few channels in, in float32's accuracy:
// dweight[co][ci][kh][kw] = the sum over samples and pixels of g[co][p]·x[ci][p + (kh, kw)]; g is that of the
// convolution's output. Both lie in planes, as everybody else reads and writes them. Stride 1, no padding.
//
// A product on tensor cores, M = channels out, N = taps × channels in, side by side without a gap, K = pixels.
// N is so small that a block has all of it, so each g is read once, by copies in the background, and becomes
// operands in registers: lanes of A have neighbouring pixels of a channel, as planes have. A block walks down
// strips of rows; a ring holds the rows of x that all taps need, and each step brings one.
//
// An operand is the sum of two TF32, high + low, 22 bits at least, of any magnitude a float32 has: nothing is
// scaled. Three products, of the four that there are, add to zeros, small ones first, since tensor cores cut
// off as they add; their sums over 16 pixels are added in float32, and those of all warps in double.
//
// Bytes at (128, 8, 128, 128), 3×3, 64 channels out: 520 MB of g and 67 MB of x. Bound: 56 GFLOP 0.18 ms by
// mma.sync, a product of depth 8 every 6 cycles, memory 0.2 ms.
#pragma once
#include "conv/shape.h"
#include "conv/wide_operands.cuh"
#include "core/reduce.cuh"
#include "host/tensor.h"

namespace grad::narrow2d {

using namespace tensor_core;
using conv::ceil_div, conv::expect;

HOST_DEVICE constexpr int power_of_two_from(int n) { return n <= 1 ? 1 : 2 * power_of_two_from((n + 1) / 2); }

constexpr int kDepth = 16;         // pixels whose products are summed by a tensor core
constexpr int kMostTiles = 9;      // of 8 columns, of a warp
constexpr int kTilesTogether = 3;  // columns' products that do not wait for one another
constexpr int kFewestStages = 3, kMostStages = 6;

// kAligned: at multiples of how many elements, 1, 2 or 4, rows of g begin.
template <class Filter_, int kSharedLimit, int kAligned_> struct Tile {
  using Filter = Filter_;
  static constexpr int kIn = Filter::kIn, kOut = Filter::kOut;
  static constexpr int kKernelH = Filter::kHeight, kKernelW = Filter::kWidth;
  static constexpr int kColumns = Filter::kTaps * kIn;  // of the product: tap · kIn + channel in
  static constexpr int kAligned = kAligned_;

  // A block's warps: groups of rows, of columns, and of pixels. Sums of a warp are 16 kRowTiles × 8 kColumnTiles.
  static constexpr int kRowTiles = kOut > 16 ? 2 : 1;
  static constexpr int kRowGroups = std::min(4, power_of_two_from(ceil_div(kOut, 16 * kRowTiles)));
  static constexpr int kRowBlocks = ceil_div(kOut, 16 * kRowTiles * kRowGroups);
  static constexpr int kTiles = ceil_div(kColumns, 8), kAllGroups = ceil_div(kTiles, kMostTiles);
  static constexpr int kColumnGroups = std::min(kWarps / kRowGroups, power_of_two_from(kAllGroups));
  static constexpr int kColumnBlocks = ceil_div(kAllGroups, kColumnGroups);
  static constexpr int kColumnTiles = ceil_div(kTiles, kColumnBlocks * kColumnGroups);
  static constexpr int kDepthGroups = kWarps / kRowGroups / kColumnGroups;
  static constexpr int kBlockRows = 16 * kRowTiles * kRowGroups;
  static constexpr int kPaddedOut = kRowBlocks * kBlockRows;
  static constexpr int kPaddedColumns = kColumnBlocks * kColumnGroups * kColumnTiles * 8;

  // Shared memory, of which a strip takes as much as there is: rows of x as operands [slot][part][channel][pixel];
  // rows of g [stage][channel][pixel], and of x [stage][channel · kInput + pixel], as they are. Pitches let lanes
  // of a fragment meet each bank once.
  // kStrip: pixels of g that a step has, kInput those of x.
  static constexpr int kSlots = kKernelH + 1;  // of the ring: rows in use, and the one to come
  template <int kStrip_> struct Rows {
    static constexpr int kStrip = kStrip_, kInput = kStrip + kKernelW - 1;
    static constexpr int kPitch = kStrip + 4, kInputPitch = ceil_div(kInput - 4, 8) * 8 + 4;
    static constexpr int kPart = kIn * kInputPitch * 4, kSlot = 2 * kPart, kRing = kSlots * kSlot;
    static constexpr int kStage = (kBlockRows * kPitch + ceil_div(kIn * kInput, 4) * 4) * 4;
    static constexpr int kStages = std::min(kMostStages, (kSharedLimit - kRing) / kStage);
    static constexpr int kSharedBytes = kRing + kStages * kStage;
  };
  using Narrow = Rows<std::max(64, kDepth * kDepthGroups)>;
  using Chosen = std::conditional_t<(Rows<128>::kStages >= kFewestStages), Rows<128>, Narrow>;
  static constexpr int kStrip = Chosen::kStrip, kInput = Chosen::kInput, kPitch = Chosen::kPitch;
  static constexpr int kInputPitch = Chosen::kInputPitch, kPart = Chosen::kPart, kSlot = Chosen::kSlot;
  static constexpr int kRing = Chosen::kRing, kStage = Chosen::kStage, kStages = Chosen::kStages;
  static constexpr int kSharedBytes = Chosen::kSharedBytes;
  static constexpr int kAhead = kStages - 1;  // steps whose copies are on their way, or there
  static_assert(kStages >= kFewestStages, "the rows do not fit in shared memory");
  static_assert(kRing % 16 == 0 && kStage % 16 == 0 && kPitch % 4 == 0, "rows of 16 bytes");
};

#if __CUDA_ARCH__ >= 800

// A value as two TF32; the tensor core cuts off the last bits of low, at most 2^-23 of the value. Where a value is
// not finite high is ±1, so that its products with all parts of another one are what the value's would be.
struct Parts {
  uint32_t high, low;
  __device__ __forceinline__ explicit Parts(float value) {
    const uint32_t bits = __float_as_uint(value);
    const float rounded = __uint_as_float((bits + 0x1000) & ~0x1fffu);
    const bool finite = fabsf(rounded) < INFINITY;
    high = finite ? __float_as_uint(rounded) : (bits & 0x80000000) | 0x3f800000;
    low = __float_as_uint(finite ? value - rounded : value);
  }
};

// A walk down strips, rows tile … end - 1 of all, counted along columns of strips. A step brings a row of x, and
// one of g unless it is ahead: the first rows of a column of strips are other taps'.
template <class T> struct Walk {
  const float *const all_g, *const all_x;
  const int64_t H, W, end;
  const int height, width, of_row;  // of g, in pixels, and in strips
  int64_t tile;
  int row = 0, first = 0, stop = 0, pixels = 0;  // of this column of strips
  const float *g = nullptr, *x = nullptr;        // where the step's rows begin

  __device__ __forceinline__ bool goes_on() const { return tile < end; }
  __device__ __forceinline__ bool ahead() const { return row < first; }
  // The step's pixels of g; 0 where it has none, -1 where there is no step.
  __device__ __forceinline__ int word() const {
    return !goes_on() ? -1 : ahead() ? 0 : min(pixels, T::kStrip);
  }
  __device__ __forceinline__ void start() {
    const int64_t column_of_strips = tile / height, n = column_of_strips / of_row;
    const int column = int(column_of_strips % of_row) * T::kStrip;
    first = int(tile - column_of_strips * height), stop = int(min(int64_t(height), first + end - tile));
    row = first - (T::kKernelH - 1), pixels = width - column;
    g = all_g + (n * T::kOut * height + row) * width + column;
    x = all_x + (n * T::kIn * H + first) * W + column;
  }
  __device__ __forceinline__ void advance() {
    if (++row < stop) {
      g += width, x += W;
      return;
    }
    tile += stop - first;
    if (goes_on()) start();
  }
};

template <class T> struct Loop {
  static constexpr int kRowTiles = T::kRowTiles, kColumnTiles = T::kColumnTiles;
  float sums[kRowTiles][kColumnTiles][4] = {};

  // A step's rows, to a stage. What lies past their ends stays as it was.
  static __device__ __forceinline__ void copy(float* stage, const Walk<T>& walk, int first_out) {
    constexpr int kOfRow = T::kStrip / T::kAligned, kRows = kThreads / kOfRow;  // copies side by side
    static_assert(kOfRow * kRows == kThreads && T::kBlockRows % kRows == 0);
    if (!walk.ahead()) {
      const int plane = walk.height * walk.width;
      const int own = threadIdx.x / kOfRow, pixel = threadIdx.x % kOfRow * T::kAligned;
      const float* const from = walk.g + int64_t(first_out + own) * plane + pixel;
      float* const to = stage + own * T::kPitch + pixel;
      const bool inside = pixel < walk.pixels;
#pragma unroll
      for (int i = 0; i < T::kBlockRows; i += kRows)
        if (inside && (T::kPaddedOut == T::kOut || first_out + own + i < T::kOut))
          copy_async<4 * T::kAligned>(to + i * T::kPitch, from + int64_t(plane) * i);
    }
    float* const inputs = stage + T::kBlockRows * T::kPitch;
    each_input([&](int channel, int pixel) {
      if (pixel < walk.pixels + T::kKernelW - 1)
        copy_async<4>(inputs + channel * T::kInput + pixel, walk.x + channel * (walk.H * walk.W) + pixel);
    });
  }

  // The row of x that this thread has copied, as operands.
  static __device__ __forceinline__ void convert(uint32_t* slot, const float* stage) {
    const float* const inputs = stage + T::kBlockRows * T::kPitch;
    each_input([&](int channel, int pixel) {
      const Parts parts(inputs[channel * T::kInput + pixel]);
      uint32_t* const to = slot + channel * T::kInputPitch + pixel;
      to[0] = parts.high, to[T::kPart / 4] = parts.low;
    });
  }

  // A thread's elements of a row of x.
  template <class Act> static __device__ __forceinline__ void each_input(const Act& act) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
#pragma unroll
    for (int first = 0; first < T::kIn; first += kWarps)
#pragma unroll
      for (int pixel = 0; pixel < T::kInput; pixel += 32)
        if (first + warp < T::kIn && pixel + lane < T::kInput) act(first + warp, pixel + lane);
  }

  // The products of kDepth pixels, of which so many are real, all if kWhole. gradient: the lane's address for
  // load_matrices; inputs: of the lane's column of each tile the lane's first pixel, `at` bytes before these.
  template <bool kWhole>
  __device__ __forceinline__ void multiply(uint32_t gradient, const uint32_t (&inputs)[kColumnTiles],
                                           uint32_t at, int pixels) {
    constexpr int kSteps = kDepth / 8;
    const int t = threadIdx.x % 4;
    uint32_t high[kSteps][kRowTiles][4], low[kSteps][kRowTiles][4];
#pragma unroll
    for (int i = 0; i < kSteps * kRowTiles; i++) {
      const int step = i / kRowTiles, tile = i % kRowTiles;
      uint32_t values[4];
      load_matrices(values, gradient + (tile * 16 * T::kPitch + step * 8) * 4);
#pragma unroll
      for (int k = 0; k < 4; k++) {
        const bool real = kWhole || step * 8 + k / 2 * 4 + t < pixels;
        const Parts parts(real ? __uint_as_float(values[k]) : 0.f);
        high[step][tile][k] = parts.high, low[step][tile][k] = parts.low;
      }
    }
#pragma unroll
    for (int j0 = 0; j0 < kColumnTiles; j0 += kTilesTogether) {
      uint32_t b[kTilesTogether][kSteps][2][2];  // part, register
#pragma unroll
      for (int i = 0; i < kTilesTogether * kSteps * 4; i++) {
        const int j = i / (kSteps * 4), step = i / 4 % kSteps, part = i / 2 % 2, k = i % 2;
        if (j0 + j >= kColumnTiles) continue;
        uint32_t& to = b[j][step][part][k];
        load_shared<1>(&to, inputs[j0 + j] + at + part * T::kPart + (step * 8 + k * 4) * 4);
        if (!kWhole && step * 8 + k * 4 + t >= pixels) to = 0;
      }
      float products[kTilesTogether][kRowTiles][4] = {};
      const auto add = [&](const uint32_t (&a)[kSteps][kRowTiles][4], int part) {
#pragma unroll
        for (int i = 0; i < kSteps * kTilesTogether * kRowTiles; i++) {
          const int step = i / (kTilesTogether * kRowTiles), j = i / kRowTiles % kTilesTogether;
          const int tile = i % kRowTiles;
          if (j0 + j < kColumnTiles)
            multiply_add_tf32(products[j][tile], a[step][tile], b[j][step][part][0], b[j][step][part][1]);
        }
      };
      add(low, 0), add(high, 1), add(high, 0);
#pragma unroll
      for (int i = 0; i < kTilesTogether * kRowTiles * 4; i++) {
        const int j = i / (kRowTiles * 4), tile = i / 4 % kRowTiles;
        if (j0 + j < kColumnTiles) sums[tile][j0 + j][i % 4] += products[j][tile][i % 4];
      }
    }
  }

  __device__ __forceinline__ void run(float* partial, Walk<T>& walk) {
    extern __shared__ uint4 shared[];
    uint32_t* const ring = reinterpret_cast<uint32_t*>(shared);
    float* const stages = reinterpret_cast<float*>(shared + T::kRing / 16);
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int row_group = warp % T::kRowGroups, column_group = warp / T::kRowGroups % T::kColumnGroups;
    const int depth_group = warp / T::kRowGroups / T::kColumnGroups;
    const int first_out = int(blockIdx.y) / T::kColumnBlocks * T::kBlockRows;
    const int first_column =
        (int(blockIdx.y) % T::kColumnBlocks * T::kColumnGroups + column_group) * kColumnTiles * 8;
    // load_matrices: lanes 0-15 give rows of pixels 0-3, the others of pixels 4-7.
    const uint32_t gradients =
        shared_address(stages) +
        ((row_group * 16 * kRowTiles + lane % 16) * T::kPitch + lane / 16 * 4 + depth_group * kDepth) * 4;
    const uint32_t inputs = shared_address(ring) + (depth_group * kDepth + lane % 4) * 4;

    int words[T::kAhead + 1] = {};  // of the steps that are on their way, the last one last
    if (walk.goes_on()) walk.start();
    const auto copy_next = [&](int stage) {
#pragma unroll
      for (int i = 0; i < T::kAhead; i++) words[i] = words[i + 1];
      words[T::kAhead] = walk.word();
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
    int stage = 0, slot = 0;  // the step's own, and that of its row of x
#pragma unroll 1
    while (words[1] >= 0) {
      await_copies<T::kAhead - 2>();  // the next step's, too, since its row of x is converted now
      __syncthreads();  // the step's operands are there; and everyone is done with the last step
      const int pixels = words[1], next_stage = stage + 1 == T::kStages ? 0 : stage + 1;
      const int next_slot = slot + 1 == T::kSlots ? 0 : slot + 1;
      copy_next(stage == 0 ? T::kStages - 1 : stage - 1);
      convert(ring + next_slot * (T::kSlot / 4), stages + next_stage * (T::kStage / 4));
      uint32_t rows[kColumnTiles];
#pragma unroll
      for (int j = 0; j < kColumnTiles; j++) {
        const int given = first_column + 8 * j + lane / 4, column = given < T::kColumns ? given : 0;
        const int tap = column / T::kIn, of_tap = (next_slot + 1 + tap / T::kKernelW) % T::kSlots;
        const int pixel = column % T::kIn * T::kInputPitch + tap % T::kKernelW;
        rows[j] = inputs + of_tap * T::kSlot + pixel * 4;
      }
      int left = pixels - depth_group * kDepth;
      uint32_t at = 0;
#pragma unroll 1
      for (; left >= kDepth; left -= T::kDepthGroups * kDepth, at += T::kDepthGroups * kDepth * 4)
        multiply<true>(gradients + stage * T::kStage + at, rows, at, left);
      if (left > 0) multiply<false>(gradients + stage * T::kStage + at, rows, at, left);
      stage = next_stage, slot = next_slot;
    }
    const int64_t split = int64_t(blockIdx.x) * T::kDepthGroups + depth_group;
    float* const to = partial + (split * T::kPaddedOut + first_out + row_group * 16 * kRowTiles + lane / 4) *
                                    T::kPaddedColumns + first_column + lane % 4 * 2;
#pragma unroll
    for (int i = 0; i < kRowTiles * kColumnTiles * 2; i++) {
      const int tile = i / 2 / kColumnTiles, j = i / 2 % kColumnTiles, half = i % 2;
      *reinterpret_cast<float2*>(to + (tile * 16 + half * 8) * T::kPaddedColumns + j * 8) =
          make_float2(sums[tile][j][half * 2], sums[tile][j][half * 2 + 1]);
    }
  }
};

#endif

// Sums to partial [split · kDepthGroups + group][kPaddedOut][kPaddedColumns]. Grid: splits of all rows of strips,
// blocks of channels out and of columns.
template <class T>
__global__ void __launch_bounds__(kThreads, 1)
narrow_weight_kernel(float* partial, const float* g, const float* x, int64_t N, int64_t H, int64_t W) {
#if __CUDA_ARCH__ >= 800
  const int height = int(H) - T::kKernelH + 1, width = int(W) - T::kKernelW + 1;
  const int of_row = ceil_div(width, T::kStrip);
  const int64_t count = N * of_row * height;
  const int64_t begin = count * blockIdx.x / gridDim.x, end = count * (blockIdx.x + 1) / gridDim.x;
  Walk<T> walk{g, x, H, W, end, height, width, of_row, begin};
  Loop<T> loop;
  loop.run(partial, walk);
#endif
}

// dweight, from so many partial sums: 32 of it by a block, whose warps have every kWarps-th part.
template <class T>
__global__ void __launch_bounds__(kThreads)
merge_narrow_kernel(float* dweight, const float* partial, int64_t parts) {
  __shared__ double of_warps[kWarps][32];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, i = int(blockIdx.x) * 32 + lane;
  const int out = i / T::kColumns, column = i % T::kColumns;
  const bool real = out < T::kOut;
  double sum = 0;
  if (real)
    for (int64_t part = warp; part < parts; part += kWarps)
      sum += partial[(part * T::kPaddedOut + out) * T::kPaddedColumns + column];
  of_warps[warp][lane] = sum;
  __syncthreads();  // all are there
  if (warp || !real) return;
  for (int other = 1; other < kWarps; other++) sum += of_warps[other][lane];
  dweight[(int64_t(out) * T::kIn + column % T::kIn) * T::Filter::kTaps + column / T::kIn] = float(sum);
}

// dweight, of g (N, kOut, H', W') and x (N, kIn, H, W), contiguous.
template <class T> void weight(Out<float> dweight, In<float> g, In<float> x, cudaStream_t stream) {
  using Filter = typename T::Filter;
  expect(x.dims == 4 && x.size(1) == T::kIn && x.size(2) >= T::kKernelH && x.size(3) >= T::kKernelW,
         "an image of the channels that are compiled for, as large as the filter at least");
  const int64_t N = x.size(0), H = x.size(2), W = x.size(3);
  const int64_t height = H - T::kKernelH + 1, width = W - T::kKernelW + 1;
  expect(g.numel() == N * T::kOut * height * width && dweight.numel() == T::kOut * T::kColumns,
         "gradients of the sizes that are compiled for");
  expect(width % T::kAligned == 0 && uintptr_t(g.data) % (4 * T::kAligned) == 0,
         "rows as aligned as is compiled for");
  const int64_t most = device_attribute(cudaDevAttrMultiProcessorCount) / (T::kRowBlocks * T::kColumnBlocks);
  const int64_t count = N * height * ceil_div(int(width), T::kStrip);
  const int64_t splits = std::max<int64_t>(1, std::min(most, count)), parts = splits * T::kDepthGroups;
  const Scratch<float> partial(parts * T::kPaddedOut * T::kPaddedColumns, stream);
  allow_shared<narrow_weight_kernel<T>>();
  const dim3 grid(splits, T::kRowBlocks * T::kColumnBlocks);
  narrow_weight_kernel<T><<<grid, kThreads, T::kSharedBytes, stream>>>(partial, g, x, N, H, W);
  const unsigned merges = blocks_for(T::kOut * T::kColumns, 32);
  merge_narrow_kernel<T><<<merges, kThreads, 0, stream>>>(dweight, partial, parts);
}

}  // namespace grad::narrow2d
