#include "grad/wide_sums.cuh"
#include "grad/wide_weight_sm80.cuh"
#include "grad/wide_weight_sm90.cuh"
#include "conv2d_min_add_multiply.cuh"
#ifndef SPLIT
#define SPLIT 0
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
#ifndef COPIED_X
#define COPIED_X 1
#define COPIED_DY 1
#endif
using Source = grad::Masked<Tail, CHANNELS_OUT>;
template <template <class, class, class, int, int> class Loop> using LoopOf = Loop<conv::Filter<CHANNELS_IN, CHANNELS_OUT, KERNEL_H, KERNEL_W>, conv::Operands<value_t, bool(SPLIT)>, Source, COPIED_X, COPIED_DY>;
#if WGMMA
using Loop = LoopOf<grad::WideWeightSm90>;
#else
using Loop = LoopOf<grad::WideWeightSm80>;
#endif
// d_bias has `biases` elements, CHANNELS_OUT or 1. largest_g (N) is for the other launchers; behind it, from a
// multiple of 8 bytes on, is scratch: sums (2, shares, CHANNELS_OUT) in double.
EXPORT void gradient_sums(accumulate_t* d_conv_bias, accumulate_t* d_bias, int32_t* largest_g,
                          const output_t* dy, const int32_t* saved, double scale, int64_t biases,
                          int64_t shares, int64_t N, int64_t H, int64_t W, cudaStream_t stream) {
  double* const sums = reinterpret_cast<double*>(largest_g + (N + 1) / 2 * 2);
  const Source source{dy, reinterpret_cast<const uint32_t*>(saved) + (N + 31) / 32 * 32, {nullptr, nullptr, 0.f, float(scale)}};
  grad::sum_gradients<Source, CHANNELS_OUT>(sums, reinterpret_cast<uint32_t*>(largest_g), source, shares, N, H - KERNEL_H + 1, W - KERNEL_W + 1, stream);
  sum_rows({{d_conv_bias, CHANNELS_OUT}, {d_bias, biases}}, sums, shares, CHANNELS_OUT, stream);
}

// slots (shares, slot_elements) is scratch; the launch fails if that is not what a share takes.
EXPORT void weight_gradient(value_t* dweight, float* slots, const output_t* dy, const value_t* x,
                            const int32_t* saved, const int32_t* largest_g, double scale,
                            int64_t shares, int64_t slot_elements, int64_t N, int64_t H, int64_t W,
                            cudaStream_t stream) {
  const uint32_t* largest_x = reinterpret_cast<const uint32_t*>(saved);
  const uint32_t* largest = reinterpret_cast<const uint32_t*>(largest_g);
  const Source source{dy, largest_x + (N + 31) / 32 * 32, {nullptr, nullptr, 0.f, float(scale)}};
  const bool agreed = slot_elements == grad::kPartialSums<Loop>;
  grad::weight_gradient<Loop>(dweight, slots, source, x, largest_x, largest, agreed ? shares : 0, N, H, W, stream);
}
