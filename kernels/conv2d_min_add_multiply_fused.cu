// y = (min(conv2d(x, weight) + conv_bias, constant) + bias) * scale in one pass: the convolution is never
// written.
//
// x (N, CHANNELS_IN, H, W), weight (CHANNELS_OUT, CHANNELS_IN, KERNEL_H, KERNEL_W), conv_bias and bias
// (CHANNELS_OUT), y (N, CHANNELS_OUT, H', W') with H' = H - KERNEL_H + 1, W' = W - KERNEL_W + 1; stride 1, no
// padding; all contiguous.
//
// An implicit GEMM on tensor cores: M = output channels, N = output pixels of one row, K = taps × input
// channels.
//   float32   an operand is one float16, which has as many digits as TF32 (11 bits), and is rounded as the
//             library rounds for TF32: to the nearest, ties away from zero. Sums are float32. Powers of two
//             bring each sample of x and each output channel of weight into float16's range; the epilogue
//             takes them out again, exactly. A value that is more than 2^39 times smaller than the largest of
//             its sample counts as zero.
//   float32, SPLIT=1  an operand is the sum of two float16 (22 bits): three products give float32's accuracy.
//   float16, bfloat16  are operands as they are.
// inf and NaN reach every output whose window holds them, as in PyTorch.
//
//   conv/wide_operands.cuh       sizes, scales, conversion to operands, packed weights
//   conv/wide_sm90.cuh           the convolution and its launch on compute capability 9.0, where it fits:
//                                WGMMA=1
//   conv/wide_sm90_stages.cuh, …_pipeline.cuh, …_producer.cuh  its stages, its tiles, and who fills the stages
//   conv/wide_sm80.cuh           the same from compute capability 8.0 on, for any size
//   conv2d_min_add_multiply.cuh  from sums to results
// Which mainloop runs is planned in Python alone.
#include <utility>

#include "conv2d_min_add_multiply.cuh"
#if WGMMA  // 0 by default, as of conv/wide_operands.cuh
#include "conv/wide_sm90.cuh"
#else
#include "conv/wide_sm80.cuh"
#endif

// Where SAVES, saved becomes what backward needs: the bits of each sample's largest finite magnitude (N,
// rounded up to a multiple of 32), and the gates; see conv/wide_operands.cuh.
//
// workspace, in bytes: exponents 4·P, largest 4·N unless it is saved, packed weights 2·kParts·P·K, each
// rounded up to 256; and by mma.sync packed x 2·kParts·N·C·H·W. C = CHANNELS_IN rounded up to GROUP, P =
// CHANNELS_OUT to BLOCK_CHANNELS, K = C·kTaps. The launch fails if that is not workspace_bytes, which Python
// planned.
EXPORT void forward(output_t* y, int32_t* saved, uint8_t* workspace, const value_t* x, const value_t* weight,
                    const accumulate_t* conv_bias, const accumulate_t* bias, double constant, double scale,
                    int64_t workspace_bytes, int64_t N, int64_t H, int64_t W, cudaStream_t stream) {
  if (N == 0) return;
  uint8_t* next = workspace;
  const auto take = [&](int64_t bytes) { return std::exchange(next, next + (bytes + 255) / 256 * 256); };
  int32_t* exponents = reinterpret_cast<int32_t*>(take(kPaddedOut * 4));
  uint32_t* largest = reinterpret_cast<uint32_t*>(SAVES ? saved : static_cast<void*>(take(N * 4)));
  const int64_t weight_units = int64_t(kChannelBlocks) * kGroups * kTaps * kTapWeights;
  uint4* packed_weight = reinterpret_cast<uint4*>(take(weight_units * 16));
  const int64_t needed = next - workspace + packed_input_bytes(N, H * W);
  const bool agreed = needed == workspace_bytes;
  // If not, a grid without blocks makes the launch fail, which is reported.
  pack_weight_kernel<<<agreed ? kPaddedOut : 0, 128, 0, stream>>>(
      reinterpret_cast<operand_t*>(packed_weight), exponents, largest, weight, N);
  if (!agreed) return;
  const Arguments args{y,         saved_gates(largest, N), x, packed_weight,   exponents,    largest,
                       conv_bias, bias, float(constant), float(scale), N, H, W};
  convolve(args, reinterpret_cast<uint4*>(next), stream);
}
