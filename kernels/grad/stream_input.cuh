// The gradient of a convolution's input where its filter moves by single pixels, with padding and dilation,
// 2-D or 3-D: that of its output, dz, with zeros around it, convolved by conv/stream.cuh with the filters
// turned round.
//
// Bytes at (128, 8, 16, 64, 64), 3×3×3, 16 channels out: 441 MB of dz read, packed as 260 MB and read again,
// 268 MB of dx written: 0.4 ms. Bound: views multiply 64 rows of channels for 8, 27 products of 64 cycles for
// 128 positions: 0.5 ms.
#pragma once
#include "conv/stream.cuh"
#include "grad/packed.cuh"
#include "store/positions.cuh"

namespace grad {

// weight (rows, columns, taps) to turned (columns, rows, taps), in which the last tap is the first.
template <class T>
__global__ void turn_filters_kernel(T* turned, const T* weight, int rows, int columns, int taps) {
  const int stride = gridDim.x * blockDim.x;
  for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < rows * columns * taps; i += stride) {
    const int tap = i % taps, row = i / taps % rows, column = i / taps / rows;
    turned[i] = weight[(int64_t(row) * columns + column) * taps + taps - 1 - tap];
  }
}

// Filter, and the walk: those of the convolution of dz. dz, dx in planes.
template <class Filter, class Operands, int kColumns, int kCluster, int kLead, int kSharedLimit, int kFolded,
          class T>
void stream_input(const Out<T>& dx, const In<T>& dz, const In<T>& weight, const conv::Walk& walk,
                  cudaStream_t stream) {
  const int count = Filter::kIn * Filter::kOut * Filter::kTaps;
  conv::expect(weight.numel() == count, "the filters that are compiled for");
  const Scratch<T> turned(count, stream);
  turn_filters_kernel<<<(count + 255) / 256, 256, 0, stream>>>(turned.data, weight.data, Filter::kIn,
                                                               Filter::kOut, Filter::kTaps);
  In<T> filters = weight;
  filters.data = turned;
  conv::streamed<Filter, OfGradient<Operands>, kColumns, kCluster, kLead, kSharedLimit, false, kFolded, false,
                 false>(dz, filters, walk, stream, conv::Stored{dx, conv::Identity{}});
}

}  // namespace grad
