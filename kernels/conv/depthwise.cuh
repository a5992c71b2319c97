// A depthwise convolution of images channels last, each channel by a filter of its own, and the gradient of its input: x (N, H, W, C),
// filters (C, rows, columns), v (N, rows, columns, C). Around x are zeros, which meet no tap: that is nothing, even if the tap is infinite.
//
// A thread has kPack neighbouring channels of a strip, kStrip results of a row; neighbouring lanes have neighbouring channels. It goes over the
// rows that the filter meets, and multiplies what it reads of each by all taps that meet it. Neighbouring threads of a block have the rows
// below, so that what filters share is read from memory once, and from L1 again. Filters stand in shared memory. Sums are float32.
//
// Bytes at (32, 192, 56, 56), 3×3, float32: 77 MB read, 77 MB written: 51 µs at 3 TB/s.
// Bound: that. Of 7×7 filters 98 reads and 1568 multiplications a strip of 4 channels: 0.5 GFMA at (32, 96, 56, 56), 16 µs.
#pragma once
#include <algorithm>

#include "core/launch.cuh"
#include "core/vector.cuh"

namespace conv::depthwise {

constexpr int kThreads = 256, kBlocks = 2;  // of a multiprocessor, at least
constexpr int kPack = kVector, kStrip = 8;

template <int kHeight_, int kWidth_, int kStride_> struct Filter {
  static constexpr int kHeight = kHeight_, kWidth = kWidth_, kTaps = kHeight * kWidth, kStride = kStride_;
  static_assert(kStrip % kStride == 0);
};

// Of the convolution: x's extents, v's, and the zeros before x.
struct Image {
  int64_t N;
  int C, H, W, rows, columns, above, left;
  Image(int64_t N, int64_t C, int64_t H, int64_t W, int64_t rows, int64_t columns, int64_t above, int64_t left)
      : N(N), C(int(C)), H(int(H)), W(int(W)), rows(int(rows)), columns(int(columns)), above(int(above)), left(int(left)) {}
  // A sample's first element; less than 2³¹ follow.
  __device__ __forceinline__ int64_t x(unsigned n) const { return int64_t(n) * (H * W * C); }
  __device__ __forceinline__ int64_t v(unsigned n) const { return int64_t(n) * (rows * columns * C); }
};

// How threads share packs of channels and strips, `strips` a row of as many `rows`: a block has `lanes` packs of one of the `tiles`, and for
// each of them several threads, of one of the chunks of `share` strips. Strips are counted down a column of them, then across, then by samples.
struct Share {
  int rows, strips, packs, tiles, lanes;
  unsigned total, share, chunks;
  // most: lanes of a block; threads: of a pack and a strip.
  Share(int64_t N, int rows, int strips, int C, int most, int threads = 1)
      : rows(rows), strips(strips), packs(C / kPack), tiles((packs + most - 1) / most), lanes((packs + tiles - 1) / tiles),
        total(unsigned(N * rows * strips)) {
    const int64_t blocks = std::max(int64_t(device_attribute(cudaDevAttrMultiProcessorCount)) * kBlocks / tiles, int64_t(1));
    const int64_t least = kThreads / lanes / threads;  // strips that a block has at a time
    share = unsigned(std::max((total + blocks - 1) / blocks, least));
    chunks = (total + share - 1) / share;
  }
  int64_t blocks() const { return int64_t(chunks) * tiles; }
  __device__ __forceinline__ int tile() const { return blockIdx.x % tiles; }
  __device__ __forceinline__ unsigned chunk() const { return blockIdx.x / tiles; }
  __device__ __forceinline__ unsigned begin() const { return chunk() * share; }
  __device__ __forceinline__ unsigned end() const { return min(begin() + share, total); }
  __device__ __forceinline__ int lane() const { return threadIdx.x % lanes; }
  __device__ __forceinline__ int abreast() const { return threadIdx.x / lanes; }  // whose strips they are
  __device__ __forceinline__ int first() const { return tile() * lanes * kPack; }  // channel
};
struct Place {
  unsigned n;
  int row, strip;
  __device__ Place(const Share& all, unsigned index)
      : n(index / all.rows / all.strips), row(index % all.rows), strip(index / all.rows % all.strips) {}
};

// What a strip's results meet: operands of a row, as many as `kColumns`. Of result i by a tap of a row it is the one of that number, or none,
// -1. Results are those of the convolution, or of its gradient, whose first then stands where a step of the filter begins.
template <class Filter, bool kGradient> struct Strip {
  static constexpr int kStride = Filter::kStride, kBehind = (Filter::kWidth - 1) / kStride;
  static constexpr int kColumns = kGradient ? kBehind + (kStrip - 1) / kStride + 1 : (kStrip - 1) * kStride + Filter::kWidth;
  static HOST_DEVICE constexpr int column(int i, int tap) {
    const int apart = i - tap + kBehind * kStride;
    return !kGradient ? i * kStride + tap : apart % kStride ? -1 : apart / kStride;
  }
};

// f(i, tap), of a result and a tap in reach of operand j.
template <class Strip, class Filter, class F> __device__ __forceinline__ void each_meeting(int j, const F& f) {
#pragma unroll
  for (int i = 0; i < kStrip; i++)
#pragma unroll
    for (int tap = 0; tap < Filter::kWidth; tap++)
      if (Strip::column(i, tap) == j) f(i, tap);
}

// out: v of x, or dx of dz.
template <bool kGradient, class Filter, class T>
__global__ void __launch_bounds__(kThreads, kBlocks)
depthwise_kernel(T* out, const T* in, const T* weight, const Image image, const Share all) {
  await_previous_kernel();
  using Own = Strip<Filter, kGradient>;
  constexpr int kStride = Filter::kStride, kMost = 32 * kPack;
  __shared__ __align__(16) float filters[Filter::kTaps * kMost];  // (taps, channels)
  const int channels = all.lanes * kPack, first = all.first();
  for (int i = threadIdx.x; i < channels * Filter::kTaps; i += kThreads) {
    const int channel = i / Filter::kTaps, tap = i % Filter::kTaps;
    if (first + channel < image.C) filters[tap * channels + channel] = float(weight[int64_t(first) * Filter::kTaps + i]);
  }
  __syncthreads();  // they are there
  const int channel = first + all.lane() * kPack, abreast = kThreads / all.lanes;
  if (channel >= image.C || all.abreast() >= abreast) return;
  const int height = kGradient ? image.rows : image.H, width = kGradient ? image.columns : image.W;  // of what is read
  const float* const own_filters = filters + all.lane() * kPack;

#pragma unroll 1
  for (unsigned index = all.begin() + all.abreast(); index < all.end(); index += abreast) {
    const Place at(all, index);
    const int left = at.strip * kStrip - (kGradient ? image.left % kStride : 0);
    const int begin = kGradient ? (left + image.left) / kStride - Own::kBehind : left * kStride - image.left;
    const T* const sample = in + (kGradient ? image.v(at.n) : image.x(at.n)) + channel;
    float sums[kStrip][kPack] = {};
    const auto all_rows = [&](auto inside) {
#pragma unroll 1
      for (int k = 0; k < Filter::kHeight; k++) {
        const int apart = kGradient ? at.row + image.above - k : at.row * kStride - image.above + k;
        const int row = kGradient ? apart / kStride : apart;
        if (unsigned(row) >= unsigned(height) || (kGradient && apart % kStride)) continue;
        const int line = (row * width + begin) * image.C;
        float taps[Filter::kWidth][kPack];
#pragma unroll
        for (int tap = 0; tap < Filter::kWidth; tap++)
          reinterpret_cast<float4&>(taps[tap]) =
              *reinterpret_cast<const float4*>(own_filters + (k * Filter::kWidth + tap) * channels);
#pragma unroll
        for (int j = 0; j < Own::kColumns; j++) {
          if (!decltype(inside)::value && unsigned(begin + j) >= unsigned(width)) continue;
          const Vector<T> read = load_vector(sample + (line + j * image.C));
          each_meeting<Own, Filter>(j, [&](int i, int tap) {
#pragma unroll
            for (int c = 0; c < kPack; c++) sums[i][c] = fmaf(float(read.at[c]), taps[tap][c], sums[i][c]);
          });
        }
      }
    };
    if (begin >= 0 && begin + Own::kColumns <= width) all_rows(std::true_type());
    else all_rows(std::false_type());
    T* const to = out + (kGradient ? image.x(at.n) : image.v(at.n)) + channel;
    const int columns = kGradient ? image.W : image.columns, line = (at.row * columns + left) * image.C;
#pragma unroll
    for (int i = 0; i < kStrip; i++) {
      if (unsigned(left + i) >= unsigned(columns)) continue;
      Vector<T> values;
#pragma unroll
      for (int c = 0; c < kPack; c++) values.at[c] = T(sums[i][c]);
      put_vector(to + (line + i * image.C), values);
    }
  }
}

template <class Filter, class T> void convolve(T* v, const T* x, const T* weight, const Image& image, cudaStream_t stream) {
  const Share all(image.N, image.rows, (image.columns + kStrip - 1) / kStrip, image.C, 32);
  if (all.total) launch_early(depthwise_kernel<false, Filter, T>, all.blocks(), kThreads, stream, v, x, weight, image, all);
}
// dx of dz.
template <class Filter, class T> void input_gradient(T* dx, const T* dz, const T* weight, const Image& image, cudaStream_t stream) {
  const Share all(image.N, image.H, (image.W + image.left % Filter::kStride + kStrip - 1) / kStrip, image.C, 32);
  if (all.total) launch_early(depthwise_kernel<true, Filter, T>, all.blocks(), kThreads, stream, dx, dz, weight, image, all);
}

}  // namespace conv::depthwise
