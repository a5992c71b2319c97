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

using winograd::kPixels, winograd::Line, winograd::padded, winograd::Sizes;

constexpr int64_t kTaps = 9;                    // of a plane of a filter
constexpr int64_t kRun = 2 * winograd::kChunk;  // positions: a few rows of a plane, or a part of one row
constexpr int64_t kRuns = 8;
constexpr int64_t kShares = 32;                 // of all runs: a thread takes one after the other

// sums (kTaps, kLanes) += Σ g[w] · pixels[i·W + w + j], for the taps (i, j) of one plane of a filter.
inline void add_run(accumulate_t* sums, const Lanes* g, const value_t* pixels, int64_t W, int64_t count) {
  const value_t* const rows[] = {pixels, pixels + W, pixels + 2 * W};
  Lanes sum[kTaps] = {};
  for (int64_t w = 0; w < count; w++) {
    asm("" : "+r"(w));  // or GCC carries pixels to the next positions, more than there are registers
    Lanes gradient = g[w];
    KEEP_IN_REGISTER(gradient);
    for (int64_t tap = 0; tap < kTaps; tap++)
      sum[tap] += accumulate_t(rows[tap / 3][w + tap % 3]) * gradient;
  }
  for (int64_t tap = 0; tap < kTaps; tap++) reinterpret_cast<Lanes*>(sums)[tap] += sum[tap];
}

// dweight (K, C, depth, 3, 3) from x. gradient(values, k, at, count) writes those of consecutive results of
// channel k, at most kRun of one plane, the first at index `at`: once for every result, from several threads.
template <class Gradient>
void filter_gradient(value_t* dweight, const value_t* x, const Sizes& sizes, const Gradient& gradient) {
  const int64_t K = padded(sizes.K), taps = sizes.terms() * kTaps, width = sizes.width();
  const int64_t rows = std::max<int64_t>(1, kRun / width), down = (sizes.height() + rows - 1) / rows;
  const int64_t across = (width + kRun - 1) / kRun, all = sizes.N * sizes.planes() * down * across;
  const int64_t shares = std::clamp<int64_t>(all, 1, kShares);
  std::vector<double> partial(shares * K * taps);  // (shares, K / kLanes, taps, kLanes)
  host::parallel_for(shares, 1, [=, &partial, &sizes, &gradient](int64_t begin, int64_t end) {
    std::vector<Line> memory(K * taps * sizeof(accumulate_t) / sizeof(Line) + 1);
    accumulate_t* const sums = memory[0].at;  // like a share's
    Lanes g[1][kPixels];
    for (int64_t share = begin; share < end; share++) {
      const int64_t first = share * all / shares, behind = (share + 1) * all / shares;
      for (int64_t run = first; run < behind; run++) {
        const int64_t plane = run / (down * across), n = plane / sizes.planes(), d = plane % sizes.planes();
        const int64_t top = run / across % down * rows, left = run % across * kRun;
        const int64_t height = std::min(rows, sizes.height() - top), count = std::min(kRun, width - left);
        for (int64_t k = 0; k < K; k += kLanes) {
          winograd::side_by_side(g, height * count, [&](int64_t lane, int64_t, accumulate_t* values) {
            if (k + lane >= sizes.K) return int64_t(0);
            const int64_t of_channel = (n * sizes.K + k + lane) * sizes.planes() + d;
            gradient(values, k + lane, (of_channel * sizes.height() + top) * width + left, height * count);
            return height * count;
          });
          for (int64_t term = 0; term < sizes.terms(); term++) {
            const int64_t c = term / sizes.depth, i = term % sizes.depth;
            const value_t* const pixels =
                x + (((n * sizes.C + c) * sizes.D + d + i) * sizes.H + top) * sizes.W + left;
            for (int64_t h = 0; h < height; h++)
              add_run(sums + k * taps + term * kTaps * kLanes, g[0] + h * count, pixels + h * sizes.W,
                      sizes.W, count);
          }
        }
        if ((run + 1 - first) % kRuns && run + 1 < behind) continue;
        double* const totals = partial.data() + share * K * taps;
        for (int64_t i = 0; i < K * taps; i++) totals[i] += sums[i], sums[i] = 0;
      }
    }
  });
  for (int64_t share = 1; share < shares; share++)
    for (int64_t i = 0; i < K * taps; i++) partial[i] += partial[share * K * taps + i];
  for (int64_t k = 0; k < sizes.K; k++)
    for (int64_t tap = 0; tap < taps; tap++)
      dweight[k * taps + tap] = value_t(partial[(k / kLanes * taps + tap) * kLanes + k % kLanes]);
}

}  // namespace direct
