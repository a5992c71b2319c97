// The gradient of a depthwise convolution's filters, of images channels last (conv/depthwise.cuh): dz (N,
// rows, columns, C) and x (N, H, W, C) to dw (C, rows, columns).
//
// A block goes over tiles of dz, with what of x they meet, in shared memory. A thread has neighbouring
// channels and one row of taps, and sums over strips in float32. A block adds its threads' sums, and a second
// kernel those of all blocks, in double: in a fixed order, so that each call gives the same bits.
//
// Bytes at (32, 192, 56, 56), 3×3, float32: 154 MB read: 51 µs at 3 TB/s; 0.5 MB of sums. Shared memory: 7.5
// reads of 16 bytes a pack of dz, 20 µs.
#pragma once
#include "conv/depthwise.cuh"
#include "host/tensor.h"

namespace grad::depthwise {

using namespace conv::depthwise;

constexpr int kPitch =
    kMostThreads + 8;  // of all threads' sums of a number: four lanes' four channels are in 16 banks

// partial (chunks, taps, C), of `share` tiles each.
template <class Filter, class T>
__global__ void __launch_bounds__(kMostThreads, Filter::kBlocks)
    depthwise_weight_kernel(float* partial, const T* dz, const T* x, const Image image, const Tiles tiles,
                            unsigned share) {
  await_previous_kernel();
  using OfRows = Rows<Filter, false>;
  using OfColumns = Columns<Filter, false>;
  constexpr int kWidth = Filter::kWidth, kStrip = Filter::kStrip,
                kStrips = kMostThreads / kLanes<T> / Filter::kHeight;  // at a time
  extern __shared__ __align__(16) uint8_t memory[];
  const T* const tile = reinterpret_cast<const T*>(memory);
  const T* const gradients = reinterpret_cast<const T*>(memory + tiles.bytes);
  const int first = int(blockIdx.x % tiles.slices) * kSlice<T>, channels = min(image.C - first, kSlice<T>);
  const unsigned chunk = blockIdx.x / tiles.slices, end = min((chunk + 1) * share, tiles.count);
  const int channel = threadIdx.x % kLanes<T> * kPack, own = threadIdx.x / kLanes<T>;
  const int k = own % Filter::kHeight, columns = tiles.strips * kStrip;
  float sums[kWidth][kPack] = {};

#pragma unroll 1
  for (unsigned index = chunk * share; index < end; index++) {
    const Place at(tiles, index, kStrip);
    const int begin = OfColumns::first(at.column, image.left), line = OfRows::first(at.row, image.above);
    __syncthreads();  // the tile before has been read
    Copier<T>{x + image.x(at.n) + first, image.C, image.H, image.W, channels}.copy(
        memory, line, begin, tiles.lines, tiles.columns);
    Copier<T>{dz + image.v(at.n) + first, image.C, image.rows, image.columns, channels}.copy(
        memory + tiles.bytes, at.row, at.column, tiles.rows, columns);
    tensor_core::commit_copies();
    tensor_core::await_copies<0>();
    __syncthreads();  // all is there
    if (channel >= channels || own >= kStrips * Filter::kHeight) continue;
#pragma unroll 1
    for (int item = own / Filter::kHeight; item < tiles.items(); item += kStrips) {
      const int strip = item % tiles.strips, row = item / tiles.strips, met = OfRows::operand(row, k);
      if (at.row + row >= image.rows || unsigned(line + met) >= unsigned(image.H)) continue;
      const int own_begin = strip * OfColumns::apart(kStrip),
                count = image.columns - at.column - strip * kStrip;
      const T* const from = tile + (met * tiles.columns + own_begin) * kSlice<T> + channel;
      const T* const own_gradients = gradients + (row * columns + strip * kStrip) * kSlice<T> + channel;
      const auto strip_of = [&](auto inside) {
        constexpr bool kInside = decltype(inside)::value;
        Vector<T> dv[kStrip];
#pragma unroll
        for (int i = 0; i < kStrip; i++)
          if (kInside || i < count) dv[i] = load_vector(own_gradients + i * kSlice<T>);
#pragma unroll
        for (int j = 0; j < OfColumns::met(kStrip); j++) {
          if (!kInside && unsigned(begin + own_begin + j) >= unsigned(image.W)) continue;
          const Vector<T> read = load_vector(from + j * kSlice<T>);
          each_meeting<OfColumns, Filter>(j, [&](int i, int tap) {
            if (!kInside && i >= count) return;
#pragma unroll
            for (int c = 0; c < kPack; c++)
              sums[tap][c] = fmaf(float(read.at[c]), float(dv[i].at[c]), sums[tap][c]);
          });
        }
      };
      if (begin + own_begin >= 0 && begin + own_begin + OfColumns::met(kStrip) <= image.W && count >= kStrip)
        strip_of(std::true_type());
      else strip_of(std::false_type());
    }
  }

  float* const shared = reinterpret_cast<float*>(memory);
  __syncthreads();  // the last tile has been read
#pragma unroll
  for (int i = 0; i < kWidth * kPack; i++) shared[i * kPitch + threadIdx.x] = sums[i / kPack][i % kPack];
  __syncthreads();  // all threads' sums are there
  for (int i = threadIdx.x; i < kSlice<T> * Filter::kTaps; i += kMostThreads) {
    const int c = i % kSlice<T>, tap = i / kSlice<T>;
    if (c >= channels) continue;
    const float* const from =
        shared + (tap % kWidth * kPack + c % kPack) * kPitch + tap / kWidth * kLanes<T> + c / kPack;
    float sum = 0;
    for (int j = 0; j < kStrips; j++) sum += from[j * Filter::kHeight * kLanes<T>];
    partial[(int64_t(chunk) * Filter::kTaps + tap) * image.C + first + c] = sum;
  }
}

constexpr int kSumThreads = 512, kSumWarps = kSumThreads / 32;

// dw (C, taps) of partial (chunks, taps, C). A block has 32 neighbours of the latter, a warp every
// kSumWarps-th chunk.
template <class T>
__global__ void __launch_bounds__(kSumThreads)
    depthwise_sums_kernel(T* dw, const float* partial, unsigned chunks, int taps, int C) {
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

template <class Filter, class T>
void weight_gradient(T* dw, const T* dz, const T* x, const Image& image, cudaStream_t stream) {
  const Tiles tiles =
      Tiles::of<Filter, false>(image.N, image.rows, image.columns, slices_of<T>(image.C), true);
  const unsigned most = unsigned(
      std::max(device_attribute(cudaDevAttrMultiProcessorCount) * Filter::kBlocks / tiles.slices, 1));
  const unsigned share = (tiles.count + most - 1) / most, chunks = (tiles.count + share - 1) / share;
  const int64_t count = int64_t(Filter::kTaps) * image.C;
  const Scratch<float> partial(chunks * count, stream);
  allow_shared<depthwise_weight_kernel<Filter, T>>();
  const int gradients = tiles.items() * Filter::kStrip * kSliceBytes,
            sums = Filter::kWidth * kPack * kPitch * int(sizeof(float));
  launch_early_with(depthwise_weight_kernel<Filter, T>, int64_t(chunks) * tiles.slices, kMostThreads,
                    std::max(tiles.bytes + gradients, sums), stream, partial.data, dz, x, image, tiles,
                    share);
  launch_early(depthwise_sums_kernel<T>, (count + 31) / 32, kSumThreads, stream, dw, partial.data, chunks,
               Filter::kTaps, image.C);
}

}  // namespace grad::depthwise
