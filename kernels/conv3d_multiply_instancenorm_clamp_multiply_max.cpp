// y = max over c of m[c]·clamp(instance_norm(conv·m[c]), low, high), and its gradient, on the CPU. The
// launchers and layouts of conv3d_multiply_instancenorm_clamp_multiply_max.cu. A thread takes strips of
// positions over all channels.
#include <vector>
#include "cpu.h"
#include "winograd.h"

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
  accumulate_t *mean = statistics ? statistics : own.data(), *m2 = mean + N * C;
  const accumulate_t lower = low, upper = high;
  const int64_t strips = (S + kStrip - 1) / kStrip;
  plane_statistics(mean, m2, v, N * C, S);
  host::parallel_for(N * strips, 1, [=](int64_t begin, int64_t end) {
    accumulate_t best[kStrip];
    int32_t which[kStrip];
    for (int64_t strip = begin; strip < end; strip++) {
      const int64_t n = strip / strips, s0 = strip % strips * kStrip, count = std::min(kStrip, S - s0);
      for (int64_t c = 0; c < C; c++) {
        const ScaledChannel channel = scaled_channel(mean, m2, conv_bias, multiplier, eps, n, c, C, S);
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

// The gradients of v and, summed over the samples, of the parameters; d_multiplier has `multipliers`
// elements, C or 1. Normalising removes the convolution's bias, so its gradient is zero; times zero keeps
// NaN.
EXPORT void backward(value_t* dv, accumulate_t* d_conv_bias, accumulate_t* d_multiplier,
                     accumulate_t* scratch, const output_t* dy, const value_t* v, const index_t* index,
                     const value_t* winner, const accumulate_t* statistics, const accumulate_t* conv_bias,
                     const accumulate_t* multiplier, double low, double high, double eps, int64_t multipliers,
                     int64_t N, int64_t C, int64_t S) {
  const accumulate_t *mean = statistics, *m2 = mean + N * C;
  accumulate_t *gradients = scratch, *zeros = gradients + N * C, *sums = zeros + N * C;
  const accumulate_t lower = low, upper = high;
  host::parallel_for(N, 1, [=](int64_t begin, int64_t end) {
    for (int64_t n = begin; n < end; n++) {
      std::vector<double> gradient(C), product(C), clamped(C);
      for (int64_t s = n * S; s < (n + 1) * S; s++) {
        const int64_t c = index[s];
        const ScaledChannel channel = scaled_channel(mean, m2, conv_bias, multiplier, eps, n, c, C, S);
        const accumulate_t centred = accumulate_t(winner[s]) - channel.mean, z = centred * channel.a;
        const accumulate_t dz = clamp_passes(z, lower, upper) ? accumulate_t(dy[s]) * channel.m : 0;
        gradient[c] += dz, product[c] += dz * centred,
            clamped[c] += accumulate_t(dy[s]) * clamp(z, lower, upper);
      }
      for (int64_t c = 0; c < C; c++)
        sums[n * C + c] = gradient[c], sums[(N + n) * C + c] = product[c],
                     sums[(2 * N + n) * C + c] = clamped[c];
    }
  });
  host::parallel_for(N * C, 1, [=](int64_t begin, int64_t end) {
    for (int64_t plane = begin; plane < end; plane++) {
      const int64_t n = plane / C, c = plane % C;
      const ScaledChannel channel = scaled_channel(mean, m2, conv_bias, multiplier, eps, n, c, C, S);
      const accumulate_t a = channel.a, constant = -a * sums[plane] / accumulate_t(S);
      // a³ alone may underflow.
      const accumulate_t linear = -(a * sums[N * C + plane]) / accumulate_t(S) * a * a;
      // NaN in a channel counts even where another one wins.
      const accumulate_t nothing = channel.mean - channel.mean;
      gradients[plane] = sums[2 * N * C + plane] + nothing +
                         sums[N * C + plane] * accumulate_t(eps) * channel.rstd * channel.rstd * channel.rstd;
      zeros[plane] = 0 * gradients[plane];
      for (int64_t s = 0; s < S; s++) {
        const accumulate_t centred = accumulate_t(v[plane * S + s]) - channel.mean;
        const bool passes = index[n * S + s] == index_t(c) && clamp_passes(centred * a, lower, upper);
        const accumulate_t gradient = passes ? a * channel.m * accumulate_t(dy[n * S + s]) : 0;
        dv[plane * S + s] = value_t(constant + linear * centred + gradient);
      }
    }
  });
  sum_rows(d_conv_bias, C, zeros, N, C);
  sum_rows(d_multiplier, multipliers, gradients, N, C);
}
