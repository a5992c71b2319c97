// The gradient of conv2d_min_add_multiply's input: dx = conv_transpose2d(g, weight), where g is made of dy
// and the gates that forward saved.
//
// The transposed convolution is forward's, of flipped filters over a g that zeros surround: so in this
// build CHANNELS_IN are those of g, CHANNELS_OUT those of x. dy and g (N, CHANNELS_IN, H', W'), weight
// (CHANNELS_IN, CHANNELS_OUT, KERNEL_H, KERNEL_W), dx (N, CHANNELS_OUT, H, W), all contiguous.
//
// By wgmma (WGMMA=1) the mainloop makes g itself, row by row, under the power of two that fits each sample.
// By mma.sync g is packed before as that mainloop's operand, a piece of so many samples at a time: all of
// it would take 520 MB at the default size. A piece that fits in the L2 cache is hardly written to memory.
//
// Bytes: 1040 MB of dy and 66 MB of gates, and 537 MB of dx written. Bound: memory 0.38 ms, 300 GFLOP 0.34
// ms by wgmma where nothing has to be loaded; by mma.sync memory 0.26 ms to pack, products 0.46 ms, one
// after the other.
#include <algorithm>
#include <utility>

#ifndef TRANSPOSED  // as the plan says; else what a source needs that compiles alone
#define TRANSPOSED 1
#endif
#include "conv2d_min_add_multiply.cuh"
#if WGMMA
#include "conv/wide_sm90.cuh"
#else
#include "grad/wide.cuh"
#include "conv/wide_sm80.cuh"
#endif

namespace {

static_assert(TRANSPOSED, "what the headers above must have been told");

#if !WGMMA
constexpr int kPackWarps = kPackThreads / 32;  // a plane of 8 channels each

// g to packed (samples, kPlanes, kParts, S, 8). dy, gates and largest from the first of the samples on. Grid:
// strips of a sample, planes, samples.
__global__ void __launch_bounds__(kPackThreads)
pack_gradient_kernel(uint4* packed, const output_t* dy, const uint32_t* gates, const uint32_t* largest,
                     float scale, int64_t height, int64_t width) {
#if __CUDA_ARCH__ >= 800
  const int plane = blockIdx.y * kPackWarps + threadIdx.x / 32, lane = threadIdx.x % 32;
  if (plane >= kPlanes) return;
  const Strips strips(height, width);
  const unsigned of_row = strips.of_row;
  const StripPlace place{blockIdx.z, int(blockIdx.x / of_row), int(blockIdx.x % of_row) * kStrip};
  GradientStrip<CHANNELS_IN> gradient;
  gradient.load(dy, gates, place, strips, plane);
  const float to_operand = power_of_two(kScaled ? sample_exponent(largest[place.n]) : 0);
  float values[kLanePixels][8];
  gradient.for_each(
      scale, [&](int i, int c, float, float g) { values[i][c] = kScaled ? scaled(g, to_operand) : g; });
  const int64_t S = height * width;
  uint4* const to = packed + (place.n * kPlanes + plane) * kParts * S + place.row * width + place.column;
#pragma unroll
  for (int i = 0; i < kLanePixels; i++)
    if (place.column + lane + i * 32 < width) pack_pixel(to + lane + i * 32, S, values[i]);
#endif
}
#endif

}  // namespace

// workspace, in bytes: exponents 4·P, packed weights 2·kParts·P·K, each rounded up to 256, and packed g
// 2·kParts·piece·C·H'·W', with C, P and K as in conv2d_min_add_multiply_fused.cu. The launch fails if that is
// not workspace_bytes, which Python planned. 1 ≤ piece < 2^16.
EXPORT void input_gradient(value_t* dx, uint8_t* workspace, const output_t* dy, const value_t* weight,
                           const int32_t* saved, const int32_t* largest_g, double scale, int64_t piece,
                           int64_t workspace_bytes, int64_t N, int64_t H, int64_t W, cudaStream_t stream) {
  const int64_t height = H - KERNEL_H + 1, width = W - KERNEL_W + 1;
  uint8_t* next = workspace;
  const auto take = [&](int64_t bytes) { return std::exchange(next, next + (bytes + 255) / 256 * 256); };
  int32_t* exponents = reinterpret_cast<int32_t*>(take(kPaddedOut * 4));
  const int64_t weight_units = int64_t(kChannelBlocks) * kGroups * kTaps * kTapWeights;
  uint4* packed_weight = reinterpret_cast<uint4*>(take(weight_units * 16));
  uint4* packed = reinterpret_cast<uint4*>(next);
  const bool agreed = next - workspace + packed_input_bytes(piece, height * width) == workspace_bytes;
  // If not, a grid without blocks makes the launch fail, which is reported.
  pack_weight_kernel<<<agreed ? kPaddedOut : 0, 128, 0, stream>>>(
      reinterpret_cast<operand_t*>(packed_weight), exponents, nullptr, weight, 0);
  uint32_t* const largest = const_cast<uint32_t*>(reinterpret_cast<const uint32_t*>(largest_g));
  uint32_t* const gates = saved_gates(const_cast<uint32_t*>(reinterpret_cast<const uint32_t*>(saved)), N);
#if WGMMA
  const Arguments args{dx,      gates, nullptr,      packed_weight, exponents, largest, nullptr,
                       nullptr, 0.f,   float(scale), N,             height,    width,   dy};
  if (agreed && N > 0) convolve(args, packed, stream);
#else
  for (int64_t first = 0; agreed && first < N; first += piece) {
    const int64_t samples = std::min(piece, N - first);
    const Strips strips(height, width);
    const dim3 grid(strips.count(1), ceil_div(kPlanes, kPackWarps), samples);
    pack_gradient_kernel<<<grid, kPackThreads, 0, stream>>>(
        packed, dy + first * CHANNELS_IN * height * width,
        gates + gate_index(first, 0, 0, 0, height, width, CHANNELS_IN), largest + first, float(scale), height,
        width);
    value_t* const out = dx + first * CHANNELS_OUT * H * W;
    const Arguments args{out,     nullptr, nullptr, packed_weight, exponents, largest + first, nullptr,
                         nullptr, 0.f,     0.f,     samples,       height,    width};
    convolve_packed(args, packed, stream);
  }
#endif
}
