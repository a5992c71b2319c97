// The gradient of a wide convolution's input: dx = conv_transpose2d(g, weight), where g is the gradient of
// its output.
//
// The transposed convolution is forward's, of flipped filters over a g that zeros surround, from the channels
// of g to those of x. By wgmma it takes g in units, which the sums over positions have left
// (grad/wide_sums.cuh, grad/packed_input.cuh). By mma.sync g is packed before as that mainloop's operand, for
// a slice of the batch at a time: one that fits in the L2 cache is hardly written to memory.
//
// Bytes at (128, 64, 128, 128), 3×3, 128 channels out, by mma.sync: 1040 MB of dy and 66 MB of masks, and 537
// MB of dx written. Bound: memory 0.26 ms to pack, products 0.46 ms, one after the other.
#pragma once
#include <algorithm>

#include "grad/packed_input.cuh"
#include "grad/wide_input_sm80.cuh"
#include "grad/wide_sums.cuh"

namespace grad {

// Of packed g: what the L2 cache of a large GPU holds, or little more.
constexpr int64_t kSliceBytes = 64 << 20;

// dx by mma.sync of dy and masks. largest_g: the bits of each sample's largest finite magnitude.
template <class Build, class Source>
void input_of_masked(Out<typename Build::value_t> dx, const Gradients<Source>& g, const uint32_t* largest_g,
                     In<typename Build::value_t> weight, cudaStream_t stream) {
  using Loop = typename InputMainloop<Build, Source>::Loop;
  Build::check(dx, weight);
  const int64_t N = g.N, H = dx.size(2), W = dx.size(3);
  if (N == 0) return;
  uint32_t* const bits = const_cast<uint32_t*>(largest_g);
  const Scratch<int32_t> exponents(Loop::kPaddedOut, stream);
  const Scratch<uint4> packed_weight(Loop::kPackedWeights, stream);
  pack_weight<Loop>(packed_weight, exponents, nullptr, weight, 0, stream);
  const int64_t of_sample = packed_input_size<Loop>(1, g.height * g.width);
  const int64_t most = std::clamp<int64_t>(kSliceBytes / 16 / of_sample, 1, std::min<int64_t>(N, 65535));
  const Scratch<uint4> packed(most * of_sample, stream);
  for (int64_t first = 0; first < N; first += most) {
    const int64_t count = std::min(most, N - first);
    const Source source = g.source.from(first, g.height, g.width);
    pack_gradient<Loop>(packed, source, bits + first, count, g.height, g.width, stream);
    convolve_packed<Loop>({{dx + first * Build::Filter::kIn * H * W},
                           {},
                           source,
                           packed_weight,
                           exponents,
                           bits + first,
                           {},
                           count,
                           g.height,
                           g.width},
                          packed, stream);
  }
}

// largest_g and units: as sum_gradients gives them.
template <class Build, class Source>
void wide_input(Out<typename Build::value_t> dx, const Gradients<Source>& g, In<int32_t> largest_g,
                In<int32_t> units, In<typename Build::value_t> weight, cudaStream_t stream) {
  const Scales scales = scales_of(largest_g.data, g.N);
  if constexpr (kTakesUnits<Build> && kOfWholeUnits<Build>)
    input_of_units<Build>(dx, units_of<Build>(g, units), scales, weight, stream);
  else input_of_masked<Build>(dx, g, scales.largest, weight, stream);
}

}  // namespace grad
