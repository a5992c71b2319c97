// y = (min(conv2d(x, weight) + conv_bias, constant) + bias) * scale in one pass: the convolution is never written.
//
// x (N, CHANNELS_IN, H, W), weight (CHANNELS_OUT, CHANNELS_IN, KERNEL_H, KERNEL_W), conv_bias and bias (CHANNELS_OUT),
// y (N, CHANNELS_OUT, H', W') with H' = H - KERNEL_H + 1, W' = W - KERNEL_W + 1; stride 1, no padding; all contiguous.
//
// An implicit GEMM on tensor cores: M = output channels, N = output pixels of one row, K = taps × input channels.
//   float32   operands are rounded to float16, which has as many digits as TF32 (11 bits), to the nearest, ties away from zero, as
//             the library rounds for TF32; sums are float32. Powers of two bring each sample of x and each output channel of
//             weight into float16's range; the tail takes them out again, exactly. What is more than 2^39 times smaller than the
//             largest value of its sample counts as zero.
//   float32, SPLIT=1   each operand is a sum of two float16 (22 bits): three products give float32 accuracy.
//   float16, bfloat16  products of the type itself, unscaled.
// inf and NaN reach every output whose window holds them, as in PyTorch.
//
// Two ways, of which a build takes one: with WGMMA=1 conv2d_min_add_multiply_wgmma.cuh, on compute capability 9.0; else
// conv2d_min_add_multiply_mma.cuh, from 8.0 on. fused.py alone decides, by the size and the GPU.
#ifndef WGMMA
#define WGMMA 0
#endif

#if WGMMA
#include "conv2d_min_add_multiply_wgmma.cuh"
#else
#include "conv2d_min_add_multiply_mma.cuh"
#endif

// workspace, in bytes: exponents 4·P, largest 4·N, packed weights 2·kParts·P·K, each rounded up to 256, and for mma.sync
// packed x 2·kParts·N·C·H·W; C = CHANNELS_IN rounded up to kGroup, P = CHANNELS_OUT rounded up to kBlockChannels, K = C·kTaps.
// The launch fails if that is not workspace_bytes: Python and this file count the same.
EXPORT void forward(output_t* y, uint8_t* workspace, const value_t* x, const value_t* weight, const accumulate_t* conv_bias,
                    const accumulate_t* bias, double constant, double scale, int64_t workspace_bytes, int64_t N, int64_t H,
                    int64_t W, cudaStream_t stream) {
  if (N == 0) return;
  uint8_t* next = workspace;
  const auto take = [&](int64_t bytes) { uint8_t* taken = next; next += (bytes + 255) / 256 * 256; return taken; };
  int32_t* exponents = reinterpret_cast<int32_t*>(take(kPaddedOut * 4));
  uint32_t* largest = reinterpret_cast<uint32_t*>(take(N * 4));
  uint4* packed_weight = reinterpret_cast<uint4*>(take(int64_t(kChannelBlocks) * kGroups * kTaps * kChunk * 16));
  const int64_t needed = next - workspace + packed_input_bytes(N, H * W);
  const bool agreed = needed == workspace_bytes;  // if not, a grid of nothing makes the launch fail, and say so

  pack_weight_kernel<<<agreed ? kPaddedOut : 0, 128, 0, stream>>>(
      reinterpret_cast<operand_t*>(packed_weight), exponents, largest, weight, N);
  if (!agreed) return;
  const Arguments of{y, x, packed_weight, exponents, largest, conv_bias, bias, float(constant), float(scale), N, H, W};
  convolve(of, reinterpret_cast<uint4*>(next), stream);
}
