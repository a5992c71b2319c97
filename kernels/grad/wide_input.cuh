// The gradient of a wide convolution's input: dx = conv_transpose2d(g, weight), where g, the gradient of its
// output, is never written as a whole (grad/masked.cuh).
//
// The transposed convolution is forward's, of flipped filters over a g that zeros surround, from the channels
// of g to those of x. By wgmma the mainloop makes g itself, row by row, under the power of two that fits each
// sample. By mma.sync g is packed before as that mainloop's operand, for a slice of the batch at a time: one
// that fits in the L2 cache is hardly written to memory.
//
// Bytes at (128, 64, 128, 128), 3×3, 128 channels out: 1040 MB of dy and 66 MB of masks, and 537 MB of dx
// written. Bound: memory 0.38 ms, 300 GFLOP 0.34 ms by wgmma where nothing has to be loaded; by mma.sync
// memory 0.26 ms to pack, products 0.46 ms, one after the other.
#pragma once
#include <algorithm>

#include "conv/wide.cuh"
#include "grad/wide_input_sm80.cuh"
#include "grad/wide_input_sm90.cuh"

namespace grad {

// Of packed g: what the L2 cache of a large GPU holds, or little more.
constexpr int64_t kSliceBytes = 64 << 20;

// A tile must have all channels of x, and be a whole row where the source has no others.
template <class Build, class Source>
using InputMainloop =
    Mainloop<Filter<Build::Filter::kOut, Build::Filter::kIn, Build::Filter::kHeight, Build::Filter::kWidth>,
             typename Build::Operands, typename Build::Target,
             Build::kCountsInInt && (Build::kOneTile || !Source::kWholeRows) && Build::Filter::kIn <= 64, true, Source,
             Identity, store::Nothing, store::DirectRows<typename Build::value_t>>;

// largest_g: the bits of each sample's largest finite magnitude.
template <class Build, class Source>
void wide_input(Out<typename Build::value_t> dx, const Gradients<Source>& g, In<int32_t> largest_g,
                In<typename Build::value_t> weight, cudaStream_t stream) {
  using Choice = InputMainloop<Build, Source>;
  using Loop = typename Choice::Loop;
  Build::check(dx, weight);
  const int64_t N = g.N, H = dx.size(2), W = dx.size(3);
  if (N == 0) return;
  uint32_t* const bits = reinterpret_cast<uint32_t*>(const_cast<int32_t*>(largest_g.data));
  const Scratch<int32_t> exponents(Loop::kPaddedOut, stream);
  const Scratch<uint4> packed_weight(Loop::kPackedWeights, stream);
  pack_weight<Loop>(packed_weight, exponents, nullptr, weight, 0, stream);
  if constexpr (Choice::kBySm90) {
    const bool counts_in_int = N * H < kMostCounted && g.height * g.width < kMostCounted;
    expect(W <= kTileWidth && counts_in_int, "sizes that are compiled for");
    convolve_rows<Loop>({{dx}, {}, g.source, packed_weight, exponents, bits, {}, N, g.height, g.width},
                        stream);
  } else {
    const int64_t of_sample = packed_input_size<Loop>(1, g.height * g.width);
    const int64_t most = std::clamp<int64_t>(kSliceBytes / 16 / of_sample, 1, std::min<int64_t>(N, 65535));
    const Scratch<uint4> packed(most * of_sample, stream);
    for (int64_t first = 0; first < N; first += most) {
      const int64_t count = std::min(most, N - first);
      const Source source = g.source.from(first, g.height, g.width);
      pack_gradient<Loop>(packed, source, bits + first, count, g.height, g.width, stream);
      convolve_packed<Loop>({{dx + first * Build::Filter::kIn * H * W}, {}, source, packed_weight, exponents,
                             bits + first, {}, count, g.height, g.width},
                            packed, stream);
    }
  }
}

}  // namespace grad
