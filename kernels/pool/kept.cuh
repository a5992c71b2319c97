// What forward keeps of normalised windows for backward.
#pragma once
#include "host/tensor.h"
#include "norm/formulas.h"

namespace pool {

// One after the other, as float32: v of the position that each window selects, like y, which has `count`
// elements; copies of the biases for each sample (2, N, C), the convolution's and the normalisation's, and
// the statistics by group (2, N, G); then bytes: the selected position's place in the window, by rows, like
// y; is a channel flat (N, C), so that all of its values tie behind the normalisation, and each window
// selects its first?
struct Kept {
  float *window_max, *conv_bias, *bias, *group_mean, *group_rstd;
  uint8_t *argmax, *flat;

  Kept(float* kept, int64_t count, int64_t N, int64_t C, int64_t G)
      : window_max(kept), conv_bias(kept + count), bias(conv_bias + N * C), group_mean(bias + N * C),
        group_rstd(group_mean + N * G), argmax(reinterpret_cast<uint8_t*>(group_rstd + N * G)),
        flat(argmax + count) {}

  // Of float32, with the bytes or without.
  static int64_t floats(int64_t count, int64_t N, int64_t C, int64_t G) { return count + 2 * N * (C + G); }
  static int64_t size(int64_t count, int64_t N, int64_t C, int64_t G) {
    return floats(count, N, C, G) + (count + N * C + 3) / 4;
  }
};

}  // namespace pool
