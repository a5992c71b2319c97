// The gradient of a depthwise convolution's filters, of images channels last (conv/depthwise.cuh): dz (N, rows, columns, C) and
// x (N, H, W, C) to dw (C, rows, columns).
//
// A thread has neighbouring channels and one row of taps, and sums over the strips of a chunk in float32. A block adds its threads' sums, and a second kernel those of all chunks, in double: in a fixed order, so that each call gives the same bits.
//
// Bytes at (32, 192, 56, 56), 3×3, float32: 154 MB read, 2 MB of sums: 52 µs at 3 TB/s.
#pragma once
#include "conv/depthwise.cuh"
#include "host/tensor.h"

namespace grad::depthwise {

using conv::depthwise::Image;
using conv::depthwise::kPack;
using conv::depthwise::kStrip;
using conv::depthwise::kThreads;
using conv::depthwise::Share;

constexpr int kLanes = 16;  // of a block: so that it has several strips for each row of taps

// partial (chunks, taps, C).
template <class Filter, class T>
__global__ void __launch_bounds__(kThreads, conv::depthwise::kBlocks)
depthwise_weight_kernel(float* partial, const T* dz, const T* x, const Image image, const Share all) {
  await_previous_kernel();
  using Own = conv::depthwise::Strip<Filter, false>;
  constexpr int kStride = Filter::kStride, kWidth = Filter::kWidth, kPitch = kThreads + 8;  // four lanes' four channels are in 16 banks
  __shared__ float shared[kWidth * kPack * kPitch];
  const int channel = all.first() + all.lane() * kPack, abreast = kThreads / all.lanes / Filter::kHeight;  // strips
  const int k = all.abreast() % Filter::kHeight, strip = all.abreast() / Filter::kHeight;
  float sums[kWidth][kPack] = {};

#pragma unroll 1
  for (unsigned index = all.begin() + strip; strip < abreast && channel < image.C && index < all.end(); index += abreast) {
    const conv::depthwise::Place at(all, index);
    const int row = at.row * kStride - image.above + k;
    if (unsigned(row) >= unsigned(image.H)) continue;
    const int left = at.strip * kStrip, begin = left * kStride - image.left, count = image.columns - left;
    const T* const sample = x + image.x(at.n) + channel;
    const T* const gradients = dz + image.v(at.n) + channel;
    const int line = (row * image.W + begin) * image.C, own_line = (at.row * image.columns + left) * image.C;
    const auto strip_of = [&](auto inside) {
      constexpr bool kInside = decltype(inside)::value;
      Vector<T> own[kStrip];
#pragma unroll
      for (int i = 0; i < kStrip; i++)
        if (kInside || i < count) own[i] = load_vector(gradients + (own_line + i * image.C));
#pragma unroll
      for (int j = 0; j < Own::kColumns; j++) {
        if (!kInside && unsigned(begin + j) >= unsigned(image.W)) continue;
        const Vector<T> read = load_vector(sample + (line + j * image.C));
        conv::depthwise::each_meeting<Own, Filter>(j, [&](int i, int tap) {
          if (!kInside && i >= count) return;
#pragma unroll
          for (int c = 0; c < kPack; c++) sums[tap][c] = fmaf(float(read.at[c]), float(own[i].at[c]), sums[tap][c]);
        });
      }
    };
    if (begin >= 0 && begin + Own::kColumns <= image.W && count >= kStrip) strip_of(std::true_type());
    else strip_of(std::false_type());
  }

#pragma unroll
  for (int i = 0; i < kWidth * kPack; i++) shared[i * kPitch + threadIdx.x] = sums[i / kPack][i % kPack];
  __syncthreads();  // all threads' sums are there
  const int channels = all.lanes * kPack;
  for (int i = threadIdx.x; i < channels * Filter::kTaps; i += kThreads) {
    const int own = i % channels, tap = i / channels;
    if (all.first() + own >= image.C) continue;
    const float* const from = shared + (tap % kWidth * kPack + own % kPack) * kPitch + own / kPack;
    float sum = 0;
    for (int j = 0; j < abreast; j++) sum += from[(j * Filter::kHeight + tap / kWidth) * all.lanes];
    partial[(int64_t(all.chunk()) * Filter::kTaps + tap) * image.C + all.first() + own] = sum;
  }
}

constexpr int kSumThreads = 512, kSumWarps = kSumThreads / 32;

// dw (C, taps) of partial (chunks, taps, C). A block has 32 neighbours of the latter, a warp every kSumWarps-th chunk.
template <class T>
__global__ void __launch_bounds__(kSumThreads) depthwise_sums_kernel(T* dw, const float* partial, unsigned chunks, int taps, int C) {
  await_previous_kernel();
  __shared__ double shared[kSumWarps * 32];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int64_t own = int64_t(blockIdx.x) * 32 + lane, count = int64_t(taps) * C;
  double sum = 0;
  if (own < count)
#pragma unroll 4
    for (unsigned chunk = warp; chunk < chunks; chunk += kSumWarps) sum += partial[chunk * count + own];
  shared[threadIdx.x] = sum;
  __syncthreads();  // all warps' sums are there
  if (warp != 0 || own >= count) return;
  sum = 0;
  for (int i = 0; i < kSumWarps; i++) sum += shared[i * 32 + lane];
  dw[own % C * taps + own / C] = T(float(sum));
}

template <class Filter, class T> void weight_gradient(T* dw, const T* dz, const T* x, const Image& image, cudaStream_t stream) {
  const Share all(image.N, image.rows, (image.columns + kStrip - 1) / kStrip, image.C, kLanes, Filter::kHeight);
  const int64_t count = int64_t(Filter::kTaps) * image.C;
  const Scratch<float> partial(all.chunks * count, stream);
  if (all.total)
    launch_early(depthwise_weight_kernel<Filter, T>, all.blocks(), kThreads, stream, partial.data, dz, x, image, all);
  launch_early(depthwise_sums_kernel<T>, (count + 31) / 32, kSumThreads, stream, dw, partial.data, all.chunks, Filter::kTaps, image.C);
}

}  // namespace grad::depthwise
