// The gradients of conv2d_min_add_multiply's parameters, from dy and what forward saved: neither the
// convolution's output nor its gradient g is ever written.
//
//   gradient_sums    d_bias = sum of dy·scale, d_conv_bias = sum of g, over samples and pixels; and the
//                    largest finite magnitude of g in each sample (grad/wide_sums.cuh)
//   weight_gradient  dweight[co][ci][kh][kw] = sum over samples and pixels of g[co][p]·x[ci][p + (kh, kw)]
//                    (operands: grad/wide_weight_operands.cuh, their products: grad/wide_weight_sm80.cuh;
//                    of float32 on compute capability 9.0, where not SPLIT: grad/wide_weight_sm90.cuh)
//
// x (N, CHANNELS_IN, H, W), dy (N, CHANNELS_OUT, H', W'), dweight (CHANNELS_OUT, CHANNELS_IN, KERNEL_H,
// KERNEL_W), all contiguous; saved as conv2d_min_add_multiply_fused.cu leaves it.
//
// The weights' gradient is a product on tensor cores, M = 64 channels out, N = 64 channels in × up to 9
// taps (3 where SPLIT), K = pixels. A block keeps M × N sums in registers and walks down strips of rows,
// its share of all. Per row of a strip it stages g and the one row of x that is new, converted to operands,
// in shared memory; a ring holds the rows that the other taps need. What comes next is on its way during
// the products, by mma.sync in registers, by wgmma in shared memory. Operands are those of forward
// (conv/wide_operands.cuh), under powers of two for each sample of g and x whose product is the same for all
// samples, since sums are over all (SampleScales).
//
// Where a row ends, zeros in g would not do, since 0·inf is NaN: x is zero there, too, for each tap's own
// end.
//
// Bytes at the default size: 1040 MB of dy and 66 MB of gates for each launch, 537 MB of x. Bound: memory
// 0.26 ms for the sums; for the weights' gradient 300 GFLOP 0.46 ms by mma.sync, 0.34 ms by wgmma, memory
// 0.38 ms.
#include "grad/wide_sums.cuh"
#if WGMMA
#include "grad/wide_weight_sm90.cuh"
#else
#include "grad/wide_weight_sm80.cuh"
#endif

namespace {

// dweight, from the slots of all shares. Grid: sums of a thread, kBlocks.
__global__ void __launch_bounds__(kThreads)
merge_slots_kernel(value_t* dweight, const float* slots, const uint32_t* largest_x, const uint32_t* largest_g,
                   int64_t shares, int64_t N) {
  const BlockPlace place(blockIdx.y);
  const SumPlace of_block = sum_place(blockIdx.x, threadIdx.x);
  const int out = place.channel_out + of_block.out, in = place.channel_in + of_block.in;
  const int row = place.kernel_row + of_block.tap / kTapColumns;
  const int column = place.kernel_column + of_block.tap % kTapColumns;
  const int exponent = -common_exponent(largest_x, largest_g, N);
  if (of_block.tap >= kBlockTaps || row >= KERNEL_H || column >= KERNEL_W) return;
  if (out >= CHANNELS_OUT || in >= CHANNELS_IN) return;
  double sum = 0;
  for (int64_t share = 0; share < shares; share++)
    sum += slots[((share * kBlocks + blockIdx.y) * kThreadSums + blockIdx.x) * kThreads + threadIdx.x];
  dweight[((int64_t(out) * CHANNELS_IN + in) * KERNEL_H + row) * KERNEL_W + column] =
      value_t(PowerOfTwo(exponent)(float(sum)));
}

}  // namespace

// d_bias has `biases` elements, CHANNELS_OUT or 1. largest_g (N) is for the other launchers; behind it, from a
// multiple of 8 bytes on, is scratch: sums (2, shares, CHANNELS_OUT) in double.
EXPORT void gradient_sums(accumulate_t* d_conv_bias, accumulate_t* d_bias, int32_t* largest_g,
                          const output_t* dy, const int32_t* saved, double scale, int64_t biases,
                          int64_t shares, int64_t N, int64_t H, int64_t W, cudaStream_t stream) {
  double* const sums = reinterpret_cast<double*>(largest_g + (N + 1) / 2 * 2);
  cudaMemsetAsync(largest_g, 0, N * 4, stream);
  gradient_sums_kernel<<<dim3(shares, kBlocksOut), kThreads, 0, stream>>>(
      sums, reinterpret_cast<uint32_t*>(largest_g), dy,
      reinterpret_cast<const uint32_t*>(saved_gates(saved, N)), float(scale), N, H - KERNEL_H + 1,
      W - KERNEL_W + 1);
  sum_rows({{d_conv_bias, CHANNELS_OUT}, {d_bias, biases}}, sums, shares, CHANNELS_OUT, stream);
}

// slots (shares, slot_elements) is scratch; the launch fails if that is not what a share takes.
EXPORT void weight_gradient(value_t* dweight, float* slots, const output_t* dy, const value_t* x,
                            const int32_t* saved, const int32_t* largest_g, double scale,
                            int64_t shares, int64_t slot_elements, int64_t N, int64_t H, int64_t W,
                            cudaStream_t stream) {
  const uint32_t* largest_x = reinterpret_cast<const uint32_t*>(saved);
  const uint32_t* largest = reinterpret_cast<const uint32_t*>(largest_g);
  const bool agreed = slot_elements == int64_t(kBlocks) * kThreadSums * kThreads;
  allow_shared<weight_gradient_kernel>();
  weight_gradient_kernel<<<dim3(agreed ? shares : 0, kBlocks), kBlockThreads, kSharedBytes, stream>>>(
      slots, dy, x, saved_gates(largest_x, N), largest_x, largest, float(scale), N, H, W);
  if (!agreed) return;
  merge_slots_kernel<<<dim3(kThreadSums, kBlocks), kThreads, 0, stream>>>(dweight, slots, largest_x, largest,
                                                                      shares, N);
}
