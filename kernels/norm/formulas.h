// Normalisation of a convolution's output, from statistics per (sample, channel).
//
// Group normalisation: v (N, C, S) is the convolution without its bias; u = v + conv_bias[c] is what PyTorch
// normalises, in G groups of C / G channels: z = (u - mean) * rstd * weight[c] + bias[c], with mean and rstd
// = 1 / sqrt(variance + eps) per (sample, group).
#pragma once
#include <math.h>
#include "core/numerics.h"

// Counts of planes have 32 bits, because a 64-bit division by them in every thread of a GPU is slow.
struct GroupShape {
  int N, C, G;
  int64_t S;
  HOST_DEVICE GroupShape(int64_t N, int64_t C, int64_t G, int64_t S)
      : N(int(N)), C(int(C)), G(int(G)), S(S) {}
  HOST_DEVICE int channels() const { return C / G; }
};

// What one channel of one sample needs to go back and forth: z = (v + offset) * slope + bias.
struct Normaliser {
  accumulate_t offset, rstd, slope, bias;
  HOST_DEVICE accumulate_t centred(accumulate_t v) const { return v + offset; }
  HOST_DEVICE accumulate_t operator()(accumulate_t v) const { return (v + offset) * slope + bias; }
};

HOST_DEVICE Normaliser normaliser(const accumulate_t* group_mean, const accumulate_t* group_rstd,
                                  const accumulate_t* conv_bias, const accumulate_t* weight,
                                  const accumulate_t* bias, GroupShape shape, int n, int c) {
  const int group = n * shape.G + c / shape.channels();
  return {conv_bias[c] - group_mean[group], group_rstd[group], group_rstd[group] * weight[c], bias[c]};
}

// Do all v of a channel of a sample become one and the same, as `behind` rounds what it makes of z? u, z: of
// v's mean, with conv_bias and normalised; m2: v's, from whose mean none is farther away than √m2, beside
// what m2 loses where it underflows; slope: of z in v.
template <class Behind>
HOST_DEVICE bool is_flat(accumulate_t u, accumulate_t m2, accumulate_t slope, accumulate_t z,
                         const Behind& behind) {
  const accumulate_t spread = sqrt(m2) + accumulate_t(1e-18), moved = spread * slope;
  return u + spread == u - spread || behind(z + moved) == behind(z - moved);
}

// Instance normalisation of v·m[c]: z = (v - mean)·a with a = m·rstd and rstd = 1 / sqrt((m·deviation)² +
// eps), the statistics being v's: mean and standard deviation, since v's variance may overflow where v·m's
// does not. It removes conv_bias; one that is not finite makes the mean NaN, and thus the channel, as it does
// in PyTorch.
HOST_DEVICE accumulate_t mean_with(accumulate_t conv_bias, accumulate_t mean) {
  return mean + (conv_bias - conv_bias);
}
struct ScaledChannel {
  accumulate_t mean, a, m, rstd;
};

// Of channel c of sample n, from the statistics (N, C).
HOST_DEVICE ScaledChannel scaled_channel(const accumulate_t* mean, const accumulate_t* deviation,
                                         const accumulate_t* multiplier, accumulate_t eps, int64_t n,
                                         int64_t c, int64_t C) {
  const accumulate_t m = multiplier[c], scaled = m * deviation[n * C + c];
  const accumulate_t rstd = 1 / sqrt(scaled * scaled + eps);
  return {mean[n * C + c], m * rstd, m, rstd};
}
