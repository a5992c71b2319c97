// y = max over c of m[c]·clamp(instance_norm(conv·m[c]), low, high), and its gradient, on the CPU. The
// launchers and layouts of conv3d_multiply_instancenorm_clamp_multiply_max.cu. A thread takes strips of
// positions over all channels.
#include <vector>
#include "cpu/vector.h"
#include "cpu/direct_gradient.h"
#include "cpu/winograd.h"

constexpr int64_t kStrip = 512;  // running maxima that stay in L1

// The convolution v (N, C, D', H', W') from x (N, Cin, D, H, W) and weight (C, Cin, depth, 3, 3).
EXPORT void convolve(value_t* v, const value_t* x, const value_t* weight, int64_t N, int64_t Cin, int64_t C,
                     int64_t D, int64_t H, int64_t W, int64_t depth) {
  winograd::convolve(v, x, weight, {N, Cin, C, D, H, W, depth});
}

EXPORT void forward(output_t* y, index_t* index, value_t* winner, accumulate_t* statistics, const value_t* v,
                    const accumulate_t* conv_bias, const accumulate_t* multiplier, double low, double high,
                    double eps, int64_t N, int64_t C, int64_t S) {
  Sums own(statistics ? 0 : 2 * N * C);  // where nobody keeps them
  accumulate_t *mean = statistics ? statistics : own.data(), *deviation = mean + N * C;
  const accumulate_t lower = low, upper = high;
  const int64_t strips = (S + kStrip - 1) / kStrip;
  plane_deviations(mean, deviation, v, N * C, S);
  for (int64_t i = 0; i < N * C; i++) mean[i] = mean_with(conv_bias[i % C], mean[i]);
  host::parallel_for(N * strips, 1, [=](int64_t begin, int64_t end) {
    accumulate_t best[kStrip];
    int32_t which[kStrip];
    for (int64_t strip = begin; strip < end; strip++) {
      const int64_t n = strip / strips, s0 = strip % strips * kStrip, count = std::min(kStrip, S - s0);
      for (int64_t c = 0; c < C; c++) {
        const ScaledChannel channel = scaled_channel(mean, deviation, multiplier, eps, n, c, C);
        const value_t* in = v + (n * C + c) * S + s0;
        for (int64_t i = 0; i < count; i++) {
          const accumulate_t z = (accumulate_t(in[i]) - channel.mean) * channel.a;
          // The formula of conv3d_multiply_instancenorm_clamp_multiply_max.
          const accumulate_t value = clamp(z, lower, upper) * channel.m;
          const bool replaces = c == 0 || replaces_maximum(value, best[i]);
          best[i] = replaces ? value : best[i];
          which[i] = replaces ? int32_t(c) : which[i];
        }
      }
      for (int64_t i = 0; i < count; i++) y[n * S + s0 + i] = output_t(best[i]);
      if (index)
        for (int64_t i = 0; i < count; i++) {
          index[n * S + s0 + i] = index_t(which[i]);
          winner[n * S + s0 + i] = v[(n * C + which[i]) * S + s0 + i];
        }
    }
  });
}

// The gradient of v: a·(constant + linear·z) in each channel of a sample, z = (v - mean)·a, and a·dz more
// where it won.
struct GradientOfV {
  struct Channel {
    accumulate_t mean, a, constant, linear;
  };
  std::vector<Channel> channels;  // (N, C)
  Sums dz;                        // (N, S), of the channels that won
  const value_t* v;
  const index_t* index;
  int64_t C, S;
  static constexpr int64_t kMost = kStrip;  // values at a time

  // values = those from index `at` on, all of one plane, which is channel c's.
  void operator()(accumulate_t* values, int64_t c, int64_t at, int64_t count) const {
    const int64_t plane = at / S, first = plane / C * S + at % S;
    const Channel channel = channels[plane];
    int32_t won[kMost];  // compilers compare in vectors only what is as wide as a value
    for (int64_t i = 0; i < count; i++) won[i] = index[first + i] == index_t(c);
    for (int64_t i = 0; i < count; i++) {
      // The gradient of conv3d_multiply_instancenorm_clamp_multiply_max.
      const accumulate_t z = (accumulate_t(v[at + i]) - channel.mean) * channel.a;
      const accumulate_t dense = channel.constant + channel.linear * z;
      values[i] = channel.a * (dense + (won[i] ? dz[first + i] : 0));
    }
  }
};

// What that is made of, and the gradients of the parameters, summed over the samples; d_multiplier has
// `multipliers` elements, C or 1. Normalising removes the convolution's bias, so its gradient is zero; times
// zero keeps NaN.
static GradientOfV gradients(accumulate_t* d_conv_bias, accumulate_t* d_multiplier, accumulate_t* scratch,
                             const output_t* dy, const value_t* v, const index_t* index,
                             const value_t* winner, const accumulate_t* statistics,
                             const accumulate_t* multiplier, double low, double high, double eps,
                             int64_t multipliers, int64_t N, int64_t C, int64_t S) {
  accumulate_t *const by_sample = scratch, *const zeros = by_sample + N * C;
  const accumulate_t lower = low, upper = high;
  GradientOfV of_v{std::vector<GradientOfV::Channel>(N * C), Sums(N * S), v, index, C, S};
  host::parallel_for(N, 1, [=, &of_v](int64_t begin, int64_t end) {
    std::vector<ScaledChannel> channels(C);
    for (int64_t n = begin; n < end; n++) {
      std::vector<double> gradient(C), product(C), clamped(C);
      for (int64_t c = 0; c < C; c++)
        channels[c] = scaled_channel(statistics, statistics + N * C, multiplier, eps, n, c, C);
      for (int64_t first = n * S, count; first < (n + 1) * S; first += count) {
        accumulate_t centred[kStrip], z[kStrip], whole[kStrip], of_clamped[kStrip];
        accumulate_t* const dz = of_v.dz.data() + first;
        count = std::min(kStrip, (n + 1) * S - first);
        for (int64_t i = 0; i < count; i++) {
          // The gradient of conv3d_multiply_instancenorm_clamp_multiply_max.
          const ScaledChannel& channel = channels[index[first + i]];
          centred[i] = accumulate_t(winner[first + i]) - channel.mean, z[i] = centred[i] * channel.a;
          whole[i] = accumulate_t(dy[first + i]) * channel.m;
        }
        // The gradient of conv3d_multiply_instancenorm_clamp_multiply_max.
        for (int64_t i = 0; i < count; i++) dz[i] = clamp_passes(z[i], lower, upper) ? whole[i] : 0;
        for (int64_t i = 0; i < count; i++)
          of_clamped[i] = accumulate_t(dy[first + i]) * clamp(z[i], lower, upper);
        for (int64_t i = 0; i < count; i++) {
          const int64_t c = index[first + i];
          gradient[c] += dz[i], product[c] += dz[i] * centred[i], clamped[c] += of_clamped[i];
        }
      }
      for (int64_t c = 0; c < C; c++) {
        // The gradient of conv3d_multiply_instancenorm_clamp_multiply_max.
        const auto [mean, a, m, rstd] = channels[c];
        const accumulate_t sum = gradient[c], with_centred = product[c];
        of_v.channels[n * C + c] = {mean, a, -sum / accumulate_t(S), -(a * with_centred) / accumulate_t(S)};
        // NaN in a channel counts even where another one wins.
        const accumulate_t nothing = mean - mean;
        by_sample[n * C + c] =
            accumulate_t(clamped[c]) + nothing + with_centred * accumulate_t(eps) * rstd * rstd * rstd;
        zeros[n * C + c] = 0 * by_sample[n * C + c];
      }
    }
  });
  sum_rows(d_conv_bias, C, zeros, N, C);
  sum_rows(d_multiplier, multipliers, by_sample, N, C);
  return of_v;
}

EXPORT void backward(value_t* dv, accumulate_t* d_conv_bias, accumulate_t* d_multiplier,
                     accumulate_t* scratch, const output_t* dy, const value_t* v, const index_t* index,
                     const value_t* winner, const accumulate_t* statistics, const accumulate_t* multiplier,
                     double low, double high, double eps, int64_t multipliers, int64_t N, int64_t C,
                     int64_t S) {
  const GradientOfV of_v = gradients(d_conv_bias, d_multiplier, scratch, dy, v, index, winner, statistics,
                                     multiplier, low, high, eps, multipliers, N, C, S);
  host::parallel_for(N * C, 1, [=, &of_v](int64_t begin, int64_t end) {
    accumulate_t values[GradientOfV::kMost];
    for (int64_t plane = begin; plane < end; plane++)
      for (int64_t s = 0; s < S; s += GradientOfV::kMost) {
        const int64_t at = plane * S + s, count = std::min(GradientOfV::kMost, S - s);
        of_v(values, plane % C, at, count);
        for (int64_t i = 0; i < count; i++) dv[at + i] = value_t(values[i]);
      }
  });
}

// The gradient of the filters (C, Cin, depth, 3, 3), too, from x (N, Cin, D, H, W). dv may have no elements:
// it is then formed a row at a time, in cache.
EXPORT void convolve_backward(value_t* dv, value_t* dweight, accumulate_t* d_conv_bias,
                              accumulate_t* d_multiplier, accumulate_t* scratch, const output_t* dy,
                              const value_t* v, const index_t* index, const value_t* winner,
                              const accumulate_t* statistics, const accumulate_t* multiplier, double low,
                              double high, double eps, int64_t multipliers, const value_t* x, int64_t N,
                              int64_t Cin, int64_t C, int64_t D, int64_t H, int64_t W, int64_t depth) {
  const winograd::Sizes sizes{N, Cin, C, D, H, W, depth};
  const GradientOfV of_v =
      gradients(d_conv_bias, d_multiplier, scratch, dy, v, index, winner, statistics, multiplier, low, high,
                eps, multipliers, N, C, sizes.planes() * sizes.height() * sizes.width());
  direct::filter_gradient(
      dweight, x, sizes, [=, &of_v](accumulate_t* values, int64_t c, int64_t at, int64_t count) {
        of_v(values, c, at, count);
        if (dv)
          for (int64_t i = 0; i < count; i++) dv[at + i] = value_t(values[i]);
      });
}
