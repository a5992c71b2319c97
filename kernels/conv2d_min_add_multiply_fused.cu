// y = (min(conv2d(x, weight) + conv_bias, constant) + bias) * scale in one pass: the convolution is never
// written.
//
// x (N, CHANNELS_IN, H, W), weight (CHANNELS_OUT, CHANNELS_IN, KERNEL_H, KERNEL_W), conv_bias and bias
// (CHANNELS_OUT), y (N, CHANNELS_OUT, H', W') with H' = H - KERNEL_H + 1, W' = W - KERNEL_W + 1; stride 1, no
// padding; all contiguous.
#include <utility>

#include "conv/wide_sm80.cuh"
#include "conv/wide_sm90.cuh"
#include "conv/wide_sm90_producer.cuh"
#include "conv2d_min_add_multiply.cuh"

#ifndef SPLIT
#define SPLIT 0
#endif
#ifndef SAVES
#define SAVES 0
#endif
#ifndef WGMMA
#define WGMMA 0
#endif
#ifndef CHANNELS_IN  // sizes for which a source compiles alone
#define CHANNELS_IN 64
#define CHANNELS_OUT 128
#define KERNEL_H 3
#define KERNEL_W 3
#endif
#ifndef TILE_WIDTH
#define GROUP (SPLIT ? 32 : 64)
#define BLOCK_CHANNELS 128
#define TILE_ROWS 1
#define STAGES (WGMMA ? KERNEL_H + 1 : 3)
#define REGISTER_STEPS 30
#endif

using Conv = conv::Wide<conv::Filter<CHANNELS_IN, CHANNELS_OUT, KERNEL_H, KERNEL_W>,
                        conv::Operands<value_t, bool(SPLIT)>, conv::Tile<GROUP, BLOCK_CHANNELS, TILE_ROWS, STAGES, REGISTER_STEPS>>;
using Keep = std::conditional_t<SAVES, store::GradMask<CHANNELS_OUT>, store::Nothing>;
template <template <class...> class Loop> using LoopOf = Loop<Conv, conv::Input<Conv::Operands>, Tail, Keep, store::Rows<output_t>>;
using Loop = std::conditional_t<WGMMA, LoopOf<conv::WideSm90>, LoopOf<conv::WideSm80>>;
#ifdef SHARED_BYTES
static_assert(Loop::kSharedBytes == SHARED_BYTES, "Python planned another layout");
#endif

EXPORT void forward(output_t* y, int32_t* saved, uint8_t* workspace, const value_t* x, const value_t* weight,
                    const accumulate_t* conv_bias, const accumulate_t* bias, double constant, double scale,
                    int64_t workspace_bytes, int64_t N, int64_t H, int64_t W, cudaStream_t stream) {
  if (N == 0) return;
  uint8_t* next = workspace;
  const auto take = [&](int64_t bytes) { return std::exchange(next, next + (bytes + 255) / 256 * 256); };
  int32_t* exponents = reinterpret_cast<int32_t*>(take(Conv::kPaddedOut * 4));
  uint32_t* largest = reinterpret_cast<uint32_t*>(SAVES ? saved : static_cast<void*>(take(N * 4)));
  uint4* packed_weight = reinterpret_cast<uint4*>(take(Conv::kPackedWeights * 16));
  const int64_t needed = next - workspace + (WGMMA ? 0 : conv::packed_input_bytes<Conv>(N, H * W));
  const bool agreed = needed == workspace_bytes;
  // If not, a grid without blocks makes the launch fail, which is reported.
  conv::pack_weight<Conv>(packed_weight, exponents, largest, weight, N, agreed, stream);
  if (!agreed) return;
  const Loop::Arguments args{{y}, {largest + (N + 31) / 32 * 32}, {x}, packed_weight, exponents, largest, {conv_bias, bias, float(constant), float(scale)}, N, H, W};
  if constexpr (WGMMA) {
    conv::convolve_rows<Loop>(args, Conv::kScaled, stream);
  } else {
    uint4* const packed = reinterpret_cast<uint4*>(next);
    conv::pack_input<Conv>(packed, largest, x, N, H * W, stream);
    conv::convolve_packed<Loop>(args, packed, stream);
  }
}
