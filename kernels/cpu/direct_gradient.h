// The gradient of depth×3×3 filters on the CPU by direct sums, for winograd.h's convolution:
//   dweight[k, c, i, j, l] = Σ g[n, k, d, h, w] · x[n, c, d + i, h + j, w + l].
// With few channels in there is little that Winograd's transforms could save. The gradients g of kLanes
// channels out are a vector, by which a pixel is multiplied for each tap of a plane of a filter; those sums
// stay in registers. A thread forms g of a run of positions as it needs it, so that it need not be in memory.
//
// Sums are float32 over a row of a run, then over kRuns runs, and double beyond, in an order that the sizes
// alone fix. What is not finite in a pixel or a gradient reaches the sums that have it, and no others.
#pragma once
#include "cpu/winograd_gradient.h"

namespace direct {

using load::kLanes, winograd::kPixels, winograd::Lanes, winograd::Line, winograd::padded, winograd::Sizes;

constexpr int64_t kTaps = 9;                    // of a plane of a filter
constexpr int64_t kRun = 2 * winograd::kChunk;  // positions: a few rows of a plane, or a part of one row
constexpr int64_t kRuns = 8;

// sums (kTaps, kLanes) += Σ g[w] · pixels[i·W + w + j], for the taps (i, j) of one plane of a filter. Not
// inlined: GCC would keep `sums` in registers from a run to the next, and have none for the run's own.
__attribute__((noinline)) inline void add_run(accumulate_t* sums, const Lanes* g, const value_t* pixels,
                                              int64_t W, int64_t count) {
  const value_t* const rows[] = {pixels, pixels + W, pixels + 2 * W};
  Lanes sum[kTaps] = {};
  for (int64_t w = 0; w < count; w++) {
    asm("" : "+r"(w));  // or GCC carries pixels to the next positions, more than there are registers
    Lanes gradient = g[w];
    KEEP_IN_REGISTER(gradient);
    for (int64_t tap = 0; tap < kTaps; tap++) sum[tap] += accumulate_t(rows[tap / 3][w + tap % 3]) * gradient;
  }
  for (int64_t tap = 0; tap < kTaps; tap++) reinterpret_cast<Lanes*>(sums)[tap] += sum[tap];
}

}  // namespace direct
