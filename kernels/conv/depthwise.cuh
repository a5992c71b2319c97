// A depthwise convolution of images channels last, each channel by a filter of its own, or a tail of it, or
// the gradient of its input: x (N, H, W, C), filters (C, rows, columns), v (N, rows, columns, C). Around x
// are zeros, which meet no tap: that is nothing, even if the tap is infinite.
//
// A block has a tile of some rows and columns of results, of 128 bytes of channels. What these meet it copies
// to shared memory in the background, while other blocks of its multiprocessor compute. A thread has kPack
// neighbouring channels of a strip, some results of a row. It goes over the rows that the filter meets, and
// multiplies what it reads of each by all taps that meet it. Sums are float32.
//
// Bytes at (32, 192, 56, 56), 3×3, float32: 77 MB read, half of it twice, for tiles of four rows, the second
// time from L2; 77 MB written: 51 µs at 3 TB/s. Shared memory: 6.8 reads of 16 bytes a pack of results, 18
// µs. Of 7×7 filters 0.5 GFMA at (32, 96, 56, 56), 16 µs, and 25 µs of shared memory.
#pragma once
#include <algorithm>

#include "conv/tail.cuh"
#include "core/launch.cuh"
#include "core/scalar.h"
#include "core/tensor_core.cuh"
#include "core/tf32.cuh"
#include "core/vector.cuh"
#include "host/tensor.h"

namespace conv::depthwise {

constexpr int kMostThreads = 256;
constexpr int kPack = kVector;
constexpr int kCopied = 8, kSliceBytes = 16 * kCopied;  // of a pixel: 16 bytes a copy
constexpr int kMostColumns = 64, kMostRows = 16;        // of a tile

template <class T> constexpr int kSlice = kSliceBytes / int(sizeof(T));  // channels
template <class T> constexpr int kLanes = kSlice<T> / kPack;             // packs
template <class T>
constexpr int kFilterPitch = kSlice<T> + kPack;  // of a tap: those of a channel stand in other banks

template <int kHeight_, int kWidth_, int kStride_> struct Filter {
  static constexpr int kHeight = kHeight_, kWidth = kWidth_, kTaps = kHeight * kWidth, kStride = kStride_;
  // Results of a strip, and blocks of a multiprocessor, at least; bytes of what a tile meets, and of a tile
  // and that. Of many taps registers and shared memory hold more, and what they are read for has to be more.
  static constexpr bool kFew = kTaps <= 9;
  static constexpr int kStrip = kFew ? 4 : 8, kBlocks = kTaps == 9 ? 4 : 2;
  static constexpr int kTileBytes = (kFew ? 46 : 32) << 10, kBothBytes = (kFew ? 46 : 60) << 10;
  static_assert(kStrip % kStride == 0);
};

// Of the convolution: x's extents, v's, and the zeros before x. A sample has less than 2³¹ elements.
struct Image {
  int64_t N;
  int C, H, W, rows, columns, above, left;
  Image(int64_t N, int64_t C, int64_t H, int64_t W, int64_t rows, int64_t columns, int64_t above,
        int64_t left)
      : N(N), C(int(C)), H(int(H)), W(int(W)), rows(int(rows)), columns(int(columns)), above(int(above)),
        left(int(left)) {}
  __device__ __forceinline__ int64_t x(unsigned n) const { return int64_t(n) * (H * W * C); }
  __device__ __forceinline__ int64_t v(unsigned n) const { return int64_t(n) * (rows * columns * C); }
};

// What results meet, along an axis with so many taps: operands, by their numbers. Results are those of the
// convolution; or of its gradient, of which the first then stands where a step of the filter begins, so that
// those that a strip meets are known to the compiler.
template <bool kGradient, int kTaps, int kStride> struct Axis {
  static constexpr int kBehind = (kTaps - 1) / kStride,
                       kStep = kGradient ? kStride : 1;  // results from one such beginning to the next
  // So many meet `count` neighbours, from `first` on; and so far apart are those that two results meet,
  // `count` from one another.
  static HOST_DEVICE constexpr int met(int count) {
    return kGradient ? kBehind + (count - 1) / kStride + 1 : (count - 1) * kStride + kTaps;
  }
  static HOST_DEVICE constexpr int first(int result, int before) {
    return kGradient ? (result + before) / kStride - kBehind : result * kStride - before;
  }
  static HOST_DEVICE constexpr int apart(int count) { return kGradient ? count / kStride : count * kStride; }
  // That of result i by a tap, counted from the first; or -1: there is none.
  static HOST_DEVICE constexpr int operand(int i, int tap) {
    const int apart = i - tap + kBehind * kStride;
    return !kGradient ? i * kStride + tap : apart % kStride ? -1 : apart / kStride;
  }
  // How far before the first result it begins.
  static HOST_DEVICE constexpr int shift(int before) { return kGradient ? before % kStride : 0; }
};
template <class Filter, bool kGradient> using Rows = Axis<kGradient, Filter::kHeight, Filter::kStride>;
template <class Filter, bool kGradient> using Columns = Axis<kGradient, Filter::kWidth, Filter::kStride>;

// f(i, tap), of a strip's result and a tap in reach of operand j.
template <class Columns, class Filter, class F>
__device__ __forceinline__ void each_meeting(int j, const F& f) {
#pragma unroll
  for (int i = 0; i < Filter::kStrip; i++)
#pragma unroll
    for (int tap = 0; tap < Filter::kWidth; tap++)
      if (Columns::operand(i, tap) == j) f(i, tap);
}

// Tiles of `rows` × `strips` strips of results, and what one meets: lines of so many `columns`. Blocks of a
// tile's slices are neighbours.
struct Tiles {
  int rows, strips, lines, columns, down, across, slices;
  unsigned count;
  int bytes, line_bytes;  // of what a tile meets, and of a line

  // rows, columns: of all results, and where they begin. besides: are as many results in shared memory, too?
  template <class Filter, bool kGradient>
  static Tiles of(int64_t N, int rows, int columns, int slices, bool besides) {
    using R = Rows<Filter, kGradient>;
    using C = Columns<Filter, kGradient>;
    constexpr int kStrip = Filter::kStrip;
    const auto up = [](int rows) { return (rows + R::kStep - 1) / R::kStep * R::kStep; };
    Tiles found{};
    found.slices = slices;
    for (found.across = (columns + kMostColumns - 1) / kMostColumns;; found.across *= 2) {
      found.strips = ((columns + found.across - 1) / found.across + kStrip - 1) / kStrip;
      found.columns = C::met(found.strips * kStrip), found.line_bytes = found.columns * kSliceBytes;
      const auto fits = [&](int rows) {
        const int met = R::met(rows) * found.line_bytes, own = rows * found.strips * kStrip * kSliceBytes;
        return besides ? met + own <= Filter::kBothBytes : met <= Filter::kTileBytes;
      };
      for (found.rows = up(std::min(rows, kMostRows)); found.rows > 0 && !fits(found.rows);)
        found.rows -= R::kStep;
      // Else most of what is copied is copied several times.
      if (found.rows >= std::min(rows, Filter::kHeight) || found.strips == 1) break;
    }
    found.across = (columns + found.strips * kStrip - 1) / (found.strips * kStrip);
    found.down = (rows + found.rows - 1) / found.rows, found.rows = up((rows + found.down - 1) / found.down);
    found.lines = R::met(found.rows), found.bytes = found.lines * found.line_bytes;
    found.count = unsigned(N * found.down * found.across);
    return found;
  }
  HOST_DEVICE int items() const { return rows * strips; }
  // Of a block whose items have so many threads each.
  unsigned threads(int lanes) const {
    return unsigned(std::min((items() * lanes + 31) / 32 * 32, kMostThreads));
  }
};
struct Place {
  unsigned n;
  int row, column;  // of the first result
  __device__ Place(const Tiles& tiles, unsigned index, int strip)
      : n(index / tiles.across / tiles.down), row(int(index / tiles.across % tiles.down) * tiles.rows),
        column(int(index % tiles.across) * tiles.strips * strip) {}
};

// Copies lines of an image channels last, from the pixel (row, column) on, in the background. Pixels that it
// doesn't have are left out.
template <class T> struct Copier {
  const T* image;  // at the slice's first channel
  int C, height, width;
  int channels;  // of the slice that there are

  __device__ __forceinline__ void copy(uint8_t* to, int row, int column, int lines, int columns) const {
    const int own = threadIdx.x % kCopied, step = blockDim.x / kCopied;
    if (own * (kSlice<T> / kCopied) >= channels) return;
    const T* const from = image + own * (kSlice<T> / kCopied);
    for (int line = 0; line < lines; line++) {
      if (unsigned(row + line) >= unsigned(height)) continue;
      const int first = (row + line) * width + column;
      for (int i = threadIdx.x / kCopied; i < columns; i += step)
        if (unsigned(column + i) < unsigned(width))
          tensor_core::copy_async<16>(to + ((line * columns + i) * kCopied + own) * 16,
                                      from + (first + i) * C);
    }
  }
};

// out: what a tail makes of v, of x, where kRounds to TF32; or dx of dz.
template <bool kGradient, class Filter, bool kRounds, class O, class T, class Tail>
__global__ void __launch_bounds__(kMostThreads, Filter::kBlocks)
    depthwise_kernel(O* out, const T* in, const T* weight, const Image image, const Tiles tiles,
                     const Tail tail) {
  await_previous_kernel();
  using OfRows = Rows<Filter, kGradient>;
  using OfColumns = Columns<Filter, kGradient>;
  constexpr int kWidth = Filter::kWidth, kStrip = Filter::kStrip;
  extern __shared__ __align__(16) uint8_t memory[];
  T* const tile = reinterpret_cast<T*>(memory);
  float* const filters = reinterpret_cast<float*>(memory + tiles.bytes);  // (taps, channels)
  const int first = int(blockIdx.x % tiles.slices) * kSlice<T>, channels = min(image.C - first, kSlice<T>);
  const Place at(tiles, blockIdx.x / tiles.slices, kStrip);
  const int height = kGradient ? image.rows : image.H,
            width = kGradient ? image.columns : image.W;  // of what is read
  const int left = at.column - OfColumns::shift(image.left), top = at.row - OfRows::shift(image.above);
  const int begin = OfColumns::first(left, image.left), line = OfRows::first(top, image.above);
  const Copier<T> copier{in + (kGradient ? image.v(at.n) : image.x(at.n)) + first, image.C, height, width,
                         channels};
  copier.copy(memory, line, begin, tiles.lines, tiles.columns);
  tensor_core::commit_copies();
  for (int i = threadIdx.x; i < channels * Filter::kTaps; i += blockDim.x)
    filters[i % Filter::kTaps * kFilterPitch<T> + i / Filter::kTaps] =
        float(weight[int64_t(first) * Filter::kTaps + i]);
  tensor_core::await_copies<0>();
  __syncthreads();  // all is there

  const int channel = threadIdx.x % kLanes<T> * kPack;
  if (channel >= channels) return;
  const int rows = kGradient ? image.H : image.rows,
            columns = kGradient ? image.W : image.columns;  // of results
  O* const to = out + (kGradient ? image.x(at.n) : image.v(at.n)) + first + channel;
#pragma unroll 1
  for (int item = threadIdx.x / kLanes<T>; item < tiles.items(); item += blockDim.x / kLanes<T>) {
    const int strip = item % tiles.strips, own = item / tiles.strips, row = top + own;
    if (unsigned(row) >= unsigned(rows)) continue;
    const int own_begin = strip * OfColumns::apart(kStrip);  // behind `begin`
    float sums[kStrip][kPack] = {};
    const auto all_rows = [&](auto inside) {
#pragma unroll 1
      for (int k = 0; k < Filter::kHeight; k++) {
        const int met = OfRows::operand(own, k);
        if (met < 0 || unsigned(line + met) >= unsigned(height)) continue;
        const T* const from = tile + (met * tiles.columns + own_begin) * kSlice<T> + channel;
        float taps[kWidth][kPack];
#pragma unroll
        for (int tap = 0; tap < kWidth; tap++)
          reinterpret_cast<float4&>(taps[tap]) =
              *reinterpret_cast<const float4*>(filters + (k * kWidth + tap) * kFilterPitch<T> + channel);
#pragma unroll
        for (int j = 0; j < OfColumns::met(kStrip); j++) {
          if (!decltype(inside)::value && unsigned(begin + own_begin + j) >= unsigned(width)) continue;
          const Vector<T> read = load_vector(from + j * kSlice<T>);
          each_meeting<OfColumns, Filter>(j, [&](int i, int tap) {
#pragma unroll
            for (int c = 0; c < kPack; c++) sums[i][c] = fmaf(float(read.at[c]), taps[tap][c], sums[i][c]);
          });
        }
      }
    };
    if (begin + own_begin >= 0 && begin + own_begin + OfColumns::met(kStrip) <= width)
      all_rows(std::true_type());
    else all_rows(std::false_type());
#pragma unroll
    for (int c = 0; c < kPack; c++) {
      const typename Tail::Channel constants = tail.channel(at.n, first + channel + c);
#pragma unroll
      for (int i = 0; i < kStrip; i++) {
        const float value = tail(sums[i][c], constants);
        sums[i][c] = kRounds ? nearest_tf32(value) : value;
      }
    }
    const int place = row * columns + left + strip * kStrip;
#pragma unroll
    for (int i = 0; i < kStrip; i++) {
      if (unsigned(left + strip * kStrip + i) >= unsigned(columns)) continue;
      Vector<O> values;
#pragma unroll
      for (int c = 0; c < kPack; c++) values.at[c] = O(sums[i][c]);
      put_vector(to + (place + i) * image.C, values);
    }
  }
}

template <class T> int slices_of(int C) { return (C + kSlice<T> - 1) / kSlice<T>; }

template <bool kGradient, class Filter, bool kRounds = false, class O, class T, class Tail = Identity>
void launch(O* out, const T* in, const T* weight, const Image& image, int rows, int columns,
            cudaStream_t stream, const Tail& tail = {}) {
  constexpr auto kernel = depthwise_kernel<kGradient, Filter, kRounds, O, T, Tail>;
  const Tiles tiles = Tiles::of<Filter, kGradient>(image.N, rows, columns, slices_of<T>(image.C), false);
  allow_shared<kernel>();
  const int shared = tiles.bytes + Filter::kTaps * kFilterPitch<T> * int(sizeof(float));
  launch_early_with(kernel, int64_t(tiles.count) * tiles.slices, tiles.threads(kLanes<T>), shared, stream,
                    out, in, weight, image, tiles, tail);
}

template <class Filter, class T>
void convolve(T* v, const T* x, const T* weight, const Image& image, cudaStream_t stream) {
  launch<false, Filter>(v, x, weight, image, image.rows, image.columns, stream);
}
// y (N, rows, columns, C) = tail(v) of x (N, H, W, C), with so many zeros above it and to its left.
template <class Filter, bool kRounds, class O, class T, class Tail>
void pointwise(const Out<O>& y, const In<T>& x, const In<T>& weight, int above, int left, const Tail& tail,
               cudaStream_t stream) {
  const Image image(x.size(0), x.size(3), x.size(1), x.size(2), y.size(1), y.size(2), above, left);
  launch<false, Filter, kRounds>(y.data, x.data, weight.data, image, image.rows, image.columns, stream, tail);
}
// dx of dz.
template <class Filter, class T>
void input_gradient(T* dx, const T* dz, const T* weight, const Image& image, cudaStream_t stream) {
  const int above = Rows<Filter, true>::shift(image.above), left = Columns<Filter, true>::shift(image.left);
  launch<true, Filter>(dx, dz, weight, image, image.H + above, image.W + left, stream);
}

}  // namespace conv::depthwise
