// Normalisation of a convolution's output, from statistics per (sample, channel): the same code on CPU and
// GPU.
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
  HOST_DEVICE accumulate_t count() const { return accumulate_t(channels()) * accumulate_t(S); }
};

// mean and rstd of group g of sample n, merged in double so that each is rounded once, from the moments
// (mean, m2) of v per (sample, channel), each (N, C).
HOST_DEVICE void merge_group(accumulate_t* group_mean, accumulate_t* group_rstd, const accumulate_t* mean,
                             const accumulate_t* m2, const accumulate_t* conv_bias, accumulate_t eps,
                             GroupShape shape, int n, int g) {
  Moments<double> moments{0, 0, 0};
  for (int c = g * shape.channels(); c < (g + 1) * shape.channels(); c++)
    moments =
        moments.merge({double(shape.S), double(mean[n * shape.C + c]) + conv_bias[c], m2[n * shape.C + c]});
  group_mean[n * shape.G + g] = moments.mean;
  group_rstd[n * shape.G + g] = 1 / sqrt(moments.variance() + double(eps));
}

// What forward keeps of v, one after the other: mean and m2 (N, C), group_mean and group_rstd (N, G). And copies
// of the biases (C), the convolution's and group_norm's: eager's backward reads neither, whatever has become of
// them.
template <class T> struct GroupStatistics {
  T *mean, *m2, *group_mean, *group_rstd, *conv_bias, *bias;
  GroupStatistics(T* statistics, int64_t N, int64_t C, int64_t G)
      : mean(statistics), m2(mean + N * C), group_mean(m2 + N * C), group_rstd(group_mean + N * G),
        conv_bias(group_rstd + N * G), bias(conv_bias + C) {}
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

// Do all v of a channel of a sample become one and the same, as `behind` rounds what it makes of z? u, z: of v's mean, with
// conv_bias and normalised; m2: v's, from whose mean none is farther away than √m2, beside what m2 loses where it
// underflows; slope: of z in v.
template <class Behind>
HOST_DEVICE bool is_flat(accumulate_t u, accumulate_t m2, accumulate_t slope, accumulate_t z, const Behind& behind) {
  const accumulate_t spread = sqrt(m2) + accumulate_t(1e-18), moved = spread * slope;
  return u + spread == u - spread || behind(z + moved) == behind(z - moved);
}

// dv = dz * slope + constant + centred * linear: `constant` and `linear` are shared by a group.
//
// Reads sums (2, N, C) of dz and dz·(u - mean); writes coefficients (2, N, G) = constant, linear, and the
// parameters' gradients by sample, gradients (3, N, C): of conv_bias, weight, bias.
HOST_DEVICE void group_gradient(accumulate_t* coefficients, accumulate_t* gradients, const accumulate_t* sums,
                                const accumulate_t* mean, const accumulate_t* group_mean,
                                const accumulate_t* group_rstd, const accumulate_t* conv_bias,
                                const accumulate_t* weight, GroupShape shape, int n, int g) {
  const int group = n * shape.G + g, NC = shape.N * shape.C;
  const accumulate_t rstd = group_rstd[group];
  double gradient = 0, product = 0;
  for (int c = g * shape.channels(); c < (g + 1) * shape.channels(); c++) {
    gradient += weight[c] * sums[n * shape.C + c];
    product += weight[c] * sums[NC + n * shape.C + c];
  }
  const accumulate_t constant = -rstd * gradient / shape.count();
  const accumulate_t linear = -(rstd * product) / shape.count() * rstd * rstd;  // rstd³ alone may underflow
  coefficients[group] = constant;
  coefficients[shape.N * shape.G + group] = linear;
  for (int c = g * shape.channels(); c < (g + 1) * shape.channels(); c++) {
    const int i = n * shape.C + c;
    const accumulate_t centred_mean = mean[i] + conv_bias[c] - group_mean[group];
    gradients[i] = weight[c] * rstd * sums[i] + accumulate_t(shape.S) * (constant + linear * centred_mean);
    gradients[NC + i] = rstd * sums[NC + i];
    gradients[2 * NC + i] = sums[i];
  }
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
