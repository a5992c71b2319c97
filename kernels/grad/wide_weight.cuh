// The gradient of a wide convolution's weight: dweight[co][ci][kh][kw] = the sum over samples and pixels of
// g[co][p]·x[ci][p + (kh, kw)]. g, the gradient of the convolution's output, comes by wgmma in units (grad/
// wide_sums.cuh), by mma.sync it is made of dy and masks (grad/masked.cuh).
//
// A product on tensor cores, M = 64 channels out, N = 64 channels in × up to 9 taps (3 of split operands),
// K = pixels. A block keeps M × N sums in registers and walks down strips of rows, its share of all. Per row
// of a strip it stages g and the one row of x that is new, converted to operands, in shared memory; a
// circular buffer holds the rows that the other taps need. What comes next is on its way during the products,
// by mma.sync in registers, by wgmma in shared memory. Operands are those of forward
// (conv/wide_operands.cuh), under powers of two for each sample of g and x whose product is the same for all
// samples, since sums are over all (SampleScales).
//
// Where a row ends, zeros in g would not do, since 0·inf is NaN: x is zero there, too, for each tap's own
// end.
//
// Bytes at (128, 64, 128, 128), 3×3, 128 channels out: by mma.sync 1040 MB of dy, 66 MB of masks and 537 MB
// of x, by wgmma 520 MB of units and x twice, the second time mostly from the L2 cache. Bound: 300 GFLOP 0.46
// ms by mma.sync, memory 0.38 ms; 0.34 ms by wgmma, memory 0.25 ms.
#pragma once
#include "conv/wide.cuh"
#include "grad/wide_weight_sm80.cuh"
#include "grad/wide_weight_sm90.cuh"

namespace grad {

// A block's sums to partial [split][block][sum of a thread][thread]. Grid: splits of all strips, kBlocks.
template <class Loop>
__global__ void __launch_bounds__(Loop::kBlockThreads, 1)
    weight_gradient_kernel(float* partial, typename Loop::Source source, const typename Loop::value_t* x,
                           const uint32_t* largest_x, const uint32_t* largest_g, int64_t N, int64_t H,
                           int64_t W) {
#if __CUDA_ARCH__ >= 800
  Loop::run(partial, source, x, largest_x, largest_g, N, H, W);
#endif
}

// In filters in planes: where a tap lies, of all filters' planes in the plane-th.
template <class Loop> __device__ __forceinline__ int64_t place_of_tap(int64_t plane, int row, int column) {
  return (plane * Loop::kKernelH + row) * Loop::kKernelW + column;
}

// dweight, from the partial sums of all splits, under the scale 2^common(). Grid: sums of a thread, kBlocks.
template <class Loop, class PlaceOf, class Common>
__device__ __forceinline__ void merge_splits(typename Loop::value_t* dweight, const float* partial,
                                             int64_t splits, const PlaceOf& place_of, const Common& common) {
  const typename Loop::BlockPlace place(blockIdx.y);
  const SumPlace of_block = Loop::sum_place(blockIdx.x, threadIdx.x);
  const int row = place.kernel_row + of_block.tap / Loop::kTapColumns;
  const int column = place.kernel_column + of_block.tap % Loop::kTapColumns;
  const int exponent = -common();
  if (of_block.tap >= Loop::kBlockTaps || row >= Loop::kKernelH || column >= Loop::kKernelW) return;
  const int64_t plane = Loop::plane_of(place, of_block);
  if (plane < 0) return;
  double sum = 0;
  for (int64_t split = 0; split < splits; split++)
    sum += partial[((split * Loop::kBlocks + blockIdx.y) * Loop::kThreadSums + blockIdx.x) * kThreads +
                   threadIdx.x];
  dweight[place_of(plane, row, column)] = typename Loop::value_t(PowerOfTwo(exponent)(float(sum)));
}

template <class Loop>
__global__ void __launch_bounds__(kThreads)
    merge_splits_kernel(typename Loop::value_t* dweight, const float* partial, typename Loop::Source source,
                        const uint32_t* largest_x, const uint32_t* largest_g, int64_t splits, int64_t N) {
#if __CUDA_ARCH__ >= 800
  merge_splits<Loop>(dweight, partial, splits, place_of_tap<Loop>,
                     [&] { return Loop::common_exponent(source, largest_x, largest_g, N); });
#endif
}

// By a mainloop of source, which is of g. largest_x and largest_g: the bits of each sample's largest finite
// magnitude.
template <class Loop, class Build, class Source>
void weight_by(Out<typename Build::value_t> dweight, const Gradients<Source>& g,
               const typename Loop::Source& source, const uint32_t* largest_g, In<typename Build::value_t> x,
               In<int32_t> largest_x, cudaStream_t stream) {
  Build::check(x, dweight);
  const int64_t N = x.size(0), H = x.size(2), W = x.size(3);
  const auto* const bits_x = reinterpret_cast<const uint32_t*>(largest_x.data);
  // A block fills a multiprocessor.
  const int64_t splits = splits_for(g, device_attribute(cudaDevAttrMultiProcessorCount) / Loop::kBlocks);
  const Scratch<float> partial(splits * Loop::kBlocks * Loop::kThreadSums * kThreads, stream);
  allow_shared<weight_gradient_kernel<Loop>>();
  const dim3 grid(splits, Loop::kBlocks), merged(Loop::kThreadSums, Loop::kBlocks);
  weight_gradient_kernel<Loop><<<grid, Loop::kBlockThreads, Loop::kSharedBytes, stream>>>(
      partial, source, x, bits_x, largest_g, N, H, W);
  merge_splits_kernel<Loop>
      <<<merged, kThreads, 0, stream>>>(dweight, partial, source, bits_x, largest_g, splits, N);
}

// Of g in units: as many steps ahead as there is room for.
template <class Build> struct UnitsMainloop {
  template <int kAhead>
  using Of =
      UnitsWeightSm90<typename Build::Filter, typename Build::Operands, typename Build::Target, kAhead>;
  static constexpr int kRoom = Build::Target::kSharedLimit;
  using Loop =
      std::conditional_t<Of<3>::fits(kRoom), Of<3>, std::conditional_t<Of<2>::fits(kRoom), Of<2>, Of<1>>>;
  static constexpr bool kFits = Loop::fits(kRoom);
};

template <class Build, class Source>
void weight_of_units(Out<typename Build::value_t> dweight, const Gradients<Source>& g, const uint4* units,
                     const Scales& scales, In<typename Build::value_t> x, In<int32_t> largest_x,
                     cudaStream_t stream) {
  using Loop = typename UnitsMainloop<Build>::Loop;
  const bool x_aligned =
      Loop::kCopiedX == 1 || (x.size(3) % Loop::kCopiedX == 0 && uintptr_t(x.data) % 16 == 0);
  expect(x_aligned, "rows as aligned as is compiled for");
  weight_by<Loop, Build>(dweight, g, {units, scales}, scales.largest, x, largest_x, stream);
}

// Of dy and masks.
template <class Build, class Source>
void weight_of_masked(Out<typename Build::value_t> dweight, const Gradients<Source>& g,
                      const uint32_t* largest_g, In<typename Build::value_t> x, In<int32_t> largest_x,
                      cudaStream_t stream) {
  using Loop =
      WideWeightSm80<typename Build::Filter, typename Build::Operands, typename Build::Target, Source>;
  weight_by<Loop, Build>(dweight, g, g.source, largest_g, x, largest_x, stream);
}

}  // namespace grad
