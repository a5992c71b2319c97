// The gradients of a wide convolution and of its tail.
#pragma once
#include "grad/packed_weight.cuh"
#include "grad/wide_input.cuh"
#include "grad/wide_sums.cuh"

namespace grad {

// largest_g and units: as sum_gradients gives them. x: forward's, with the bits of each sample's largest finite
// magnitude. Where units are taken and x can't be, as it is, x is packed, too.
template <class Build, class Source>
void wide_weight(Out<typename Build::value_t> dweight, const Gradients<Source>& g, In<int32_t> largest_g,
                 In<int32_t> units, In<typename Build::value_t> x, In<int32_t> largest_x, cudaStream_t stream) {
  const Scales scales = scales_of(largest_g.data, g.N);
  if constexpr (!kTakesUnits<Build>) {
    weight_of_masked<Build>(dweight, g, scales.largest, x, largest_x, stream);
  } else if constexpr (UnitsMainloop<Build>::kFits) {
    weight_of_units<Build>(dweight, g, units_of<Build>(g, units), scales, x, largest_x, stream);
  } else {
    using Alone = conv::Around<false, 0, 0>;
    using InPlanes = Lying<Lies::kUnits, Lies::kPlanes, Lies::kPlanes>;
    const PackedSizes<typename Build::Filter, Alone, Lies::kPlanes> sizes(x);
    Build::check(x, dweight);
    of_units<Build, Alone, InPlanes, Rows>(dweight, units_of<Build>(g, units), scales, x, sizes, stream);
  }
}

}  // namespace grad
