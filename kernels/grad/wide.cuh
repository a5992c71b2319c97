// The gradients of a wide convolution and of its tail.
#pragma once
#include "grad/wide_input.cuh"
#include "grad/wide_sums.cuh"
#include "grad/wide_weight.cuh"

namespace grad {

// largest_g and units: as sum_gradients gives them. x: forward's, with the bits of each sample's largest
// finite magnitude. Units are taken where it is a float32.
template <class Build, class Source>
void wide_weight(Out<typename Build::value_t> dweight, const Gradients<Source>& g, In<int32_t> largest_g,
                 In<int32_t> units, In<typename Build::value_t> x, In<int32_t> largest_x,
                 cudaStream_t stream) {
  const Scales scales = scales_of(largest_g.data, g.N);
  if constexpr (kTakesUnits<Build> && UnitsMainloop<Build>::kFits)
    weight_of_units<Build>(dweight, g, units_of<Build>(g, units), scales, x, largest_x, stream);
  else weight_of_masked<Build>(dweight, g, scales.largest, x, largest_x, stream);
}

}  // namespace grad
