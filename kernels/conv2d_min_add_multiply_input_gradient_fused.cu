#include <algorithm>
#include <utility>
#include "conv/wide_sm80.cuh"
#include "conv/wide_sm90.cuh"
#include "grad/wide_input_sm80.cuh"
#include "grad/wide_input_sm90_producer.cuh"
#include "conv2d_min_add_multiply.cuh"

#ifndef SPLIT
#define SPLIT 0
#endif
#ifndef WGMMA
#define WGMMA 0
#endif
#ifndef CHANNELS_IN  // sizes for which a source compiles alone: of g, and of x
#define CHANNELS_IN 128
#define CHANNELS_OUT 64
#define KERNEL_H 3
#define KERNEL_W 3
#endif
#ifndef TILE_WIDTH
#define GROUP (SPLIT ? 32 : WGMMA ? 128 : 64)
#define BLOCK_CHANNELS 64
#define TILE_ROWS 2
#define STAGES (WGMMA ? KERNEL_H + 1 : 3)
#define REGISTER_STEPS 28
#endif

using Conv = conv::Wide<conv::Filter<CHANNELS_IN, CHANNELS_OUT, KERNEL_H, KERNEL_W>,
                        conv::Operands<value_t, bool(SPLIT)>, conv::Tile<GROUP, BLOCK_CHANNELS, TILE_ROWS, STAGES, REGISTER_STEPS>, true>;
using Source = grad::Masked<Tail, CHANNELS_IN>;
template <template <class...> class Loop> using LoopOf = Loop<Conv, Source, conv::Identity, store::Nothing, store::DirectRows<value_t>>;
using Loop = std::conditional_t<WGMMA, LoopOf<conv::WideSm90>, LoopOf<conv::WideSm80>>;
#ifdef SHARED_BYTES
static_assert(Loop::kSharedBytes == SHARED_BYTES, "Python planned another layout");
#endif

EXPORT void input_gradient(value_t* dx, uint8_t* workspace, const output_t* dy, const value_t* weight,
                           const int32_t* saved, const int32_t* largest_g, double scale, int64_t piece,
                           int64_t workspace_bytes, int64_t N, int64_t H, int64_t W, cudaStream_t stream) {
  const int64_t height = H - KERNEL_H + 1, width = W - KERNEL_W + 1;
  uint8_t* next = workspace;
  const auto take = [&](int64_t bytes) { return std::exchange(next, next + (bytes + 255) / 256 * 256); };
  int32_t* exponents = reinterpret_cast<int32_t*>(take(Conv::kPaddedOut * 4));
  uint4* packed_weight = reinterpret_cast<uint4*>(take(Conv::kPackedWeights * 16));
  uint4* packed = reinterpret_cast<uint4*>(next);
  const bool agreed = next - workspace + (WGMMA ? 0 : conv::packed_input_bytes<Conv>(piece, height * width)) == workspace_bytes;
  // If not, a grid without blocks makes the launch fail, which is reported.
  conv::pack_weight<Conv>(packed_weight, exponents, nullptr, weight, 0, agreed, stream);
  uint32_t* const largest = const_cast<uint32_t*>(reinterpret_cast<const uint32_t*>(largest_g));
  const uint32_t* const words = reinterpret_cast<const uint32_t*>(saved) + (N + 31) / 32 * 32;
  const Tail tail{nullptr, nullptr, 0.f, float(scale)};
  if constexpr (WGMMA) {
    const Loop::Arguments args{{dx}, {}, {dy, words, tail}, packed_weight, exponents, largest, {}, N, height, width};
    if (agreed && N > 0) conv::convolve_rows<Loop>(args, false, stream);
  } else {
    for (int64_t first = 0; agreed && first < N; first += piece) {
      const int64_t samples = std::min(piece, N - first);
      const Source source{dy + first * CHANNELS_IN * height * width,
          words + store::mask_index(first, 0, 0, 0, height, width, CHANNELS_IN), tail};
      grad::pack_gradient<Conv>(packed, source, largest + first, samples, height, width, stream);
      const Loop::Arguments args{{dx + first * CHANNELS_OUT * H * W}, {}, source, packed_weight, exponents, largest + first, {}, samples, height, width};
      conv::convolve_packed<Loop>(args, packed, stream);
    }
  }
}
