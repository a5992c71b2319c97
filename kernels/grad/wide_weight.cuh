// The gradient of a wide convolution's weight: dweight[co][ci][kh][kw] = the sum over samples and pixels of
// g[co][p]·x[ci][p + (kh, kw)]. g, the gradient of the convolution's output, is never written
// (grad/masked.cuh).
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
// Bytes at (128, 64, 128, 128), 3×3, 128 channels out: 1040 MB of dy, 66 MB of masks and 537 MB of x. Bound:
// 300 GFLOP 0.46 ms by mma.sync, 0.34 ms by wgmma, memory 0.38 ms.
#pragma once
#include "conv/wide.cuh"
#include "grad/wide_weight_sm80.cuh"
#include "grad/wide_weight_sm90.cuh"

namespace grad {

// A block's sums to partial [split][block][sum of a thread][thread]. Grid: splits of all strips, kBlocks.
template <class Loop>
__global__ void __launch_bounds__(Loop::kBlockThreads, 1)
weight_gradient_kernel(float* partial, typename Loop::Source source, const typename Loop::value_t* x,
                       const uint32_t* largest_x, const uint32_t* largest_g, int64_t N, int64_t H, int64_t W) {
#if __CUDA_ARCH__ >= 800
  Loop::run(partial, source, x, largest_x, largest_g, N, H, W);
#endif
}

// In filters in planes: where a tap lies, of all filters' planes in the plane-th.
template <class Loop> __device__ __forceinline__ int64_t place_of_tap(int64_t plane, int row, int column) {
  return (plane * Loop::kKernelH + row) * Loop::kKernelW + column;
}

// dweight, from the partial sums of all splits, under the scale 2^common(). Grid: sums of a thread, kBlocks.
template <class Loop, class PlaceOf, class Common> __device__ __forceinline__
void merge_splits(typename Loop::value_t* dweight, const float* partial, int64_t splits, const PlaceOf& place_of, const Common& common) {
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
    sum += partial[((split * Loop::kBlocks + blockIdx.y) * Loop::kThreadSums + blockIdx.x) * kThreads + threadIdx.x];
  dweight[place_of(plane, row, column)] = typename Loop::value_t(PowerOfTwo(exponent)(float(sum)));
}

template <class Loop>
__global__ void __launch_bounds__(kThreads)
merge_splits_kernel(typename Loop::value_t* dweight, const float* partial, const uint32_t* largest_x,
                    const uint32_t* largest_g, int64_t splits, int64_t N) {
  merge_splits<Loop>(dweight, partial, splits, place_of_tap<Loop>, [&] { return Loop::common_exponent(largest_x, largest_g, N); });
}

template <class Build, class Source> struct WeightMainloop {
  using Filter = typename Build::Filter;
  using Operands = typename Build::Operands;
  using Target = typename Build::Target;
  using Sm90 = WideWeightSm90<Filter, Operands, Target, Source>;
  static constexpr bool kBySm90 = Target::kCapability == 90 && Sm90::fits(Target::kSharedLimit);
  using Loop = std::conditional_t<kBySm90, Sm90, WideWeightSm80<Filter, Operands, Target, Source>>;
};

// x: forward's; largest_x and largest_g: the bits of each sample's largest finite magnitude.
template <class Build, class Source>
void wide_weight(Out<typename Build::value_t> dweight, const Gradients<Source>& g, In<int32_t> largest_g,
                 In<typename Build::value_t> x, In<int32_t> largest_x, cudaStream_t stream) {
  constexpr bool kBySm90 = WeightMainloop<Build, Source>::kBySm90;
  using Loop = typename WeightMainloop<Build, Source>::Loop;
  Build::check(x, dweight);
  const int64_t N = x.size(0), H = x.size(2), W = x.size(3);
  const bool x_aligned = Loop::kCopiedX == 1 || (W % Loop::kCopiedX == 0 && uintptr_t(x.data) % 16 == 0);
  expect(!kBySm90 || (x_aligned && g.width % Loop::kCopiedDy == 0), "rows as aligned as is compiled for");
  const auto* const bits_x = reinterpret_cast<const uint32_t*>(largest_x.data);
  const auto* const bits_g = reinterpret_cast<const uint32_t*>(largest_g.data);
  // A block fills a multiprocessor.
  const int64_t splits = splits_for(g, device_attribute(cudaDevAttrMultiProcessorCount) / Loop::kBlocks);
  const Scratch<float> partial(splits * Loop::kBlocks * Loop::kThreadSums * kThreads, stream);
  allow_shared<weight_gradient_kernel<Loop>>();
  const dim3 grid(splits, Loop::kBlocks), merged(Loop::kThreadSums, Loop::kBlocks);
  weight_gradient_kernel<Loop><<<grid, Loop::kBlockThreads, Loop::kSharedBytes, stream>>>(
      partial, g.source, x, bits_x, bits_g, N, H, W);
  merge_splits_kernel<Loop><<<merged, kThreads, 0, stream>>>(dweight, partial, bits_x, bits_g, splits, N);
}

}  // namespace grad
