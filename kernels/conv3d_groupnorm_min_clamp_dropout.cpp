// y = dropout(clamp(min(group_norm(conv), low), low, high), p), and its gradient, on the CPU. The launchers
// and layouts of conv3d_groupnorm_min_clamp_dropout.cu; a thread takes whole planes, a piece of kPiece
// elements at a time.
#include "cpu/vector.h"
#include "cpu/direct_gradient.h"
#include "core/philox.h"
#include "cpu/winograd.h"
#include "conv3d_groupnorm_min_clamp_dropout.h"

constexpr int64_t kPiece = 1024;

using Tail = MinClamp<accumulate_t>;

constexpr int kDraws = 32;  // more than compilers unroll before they vectorise

// The lanes of philox(seed, first), …, philox(seed, first + kDraws - 1), one draw after the other: the
// arithmetic of core/philox.h side by side, in a form that compilers vectorise.
static void philox_block(uint32_t (&lanes)[4 * kDraws], uint64_t seed, uint64_t first) {
  uint32_t c0[kDraws], c1[kDraws], c2[kDraws] = {}, c3[kDraws] = {}, k0 = uint32_t(seed),
                                   k1 = uint32_t(seed >> 32);
  for (int i = 0; i < kDraws; i++) c0[i] = uint32_t(first + i), c1[i] = uint32_t((first + i) >> 32);
  for (int round = 0; round < 10; round++, k0 += 0x9E3779B9u, k1 += 0xBB67AE85u)
    for (int i = 0; i < kDraws; i++) {
      const uint32_t high0 = uint64_t(0xD2511F53u) * c0[i] >> 32, low0 = 0xD2511F53u * c0[i];
      const uint32_t high1 = uint64_t(0xCD9E8D57u) * c2[i] >> 32, low1 = 0xCD9E8D57u * c2[i];
      c0[i] = high1 ^ c1[i] ^ k0, c2[i] = high0 ^ c3[i] ^ k1;
      c1[i] = low1, c3[i] = low0;
    }
  for (int i = 0; i < kDraws; i++)
    lanes[4 * i] = c0[i], lanes[4 * i + 1] = c1[i], lanes[4 * i + 2] = c2[i], lanes[4 * i + 3] = c3[i];
}

// Dropout's factors of the elements begin … begin + count: `scale` if kept, else zero. All are one
// where p is 0.
static void dropout_factors(float* factor, uint64_t seed, double p, float scale, int64_t begin,
                            int64_t count) {
  if (p == 0) return std::fill(factor, factor + count, 1.0f);
  const int64_t skipped = begin % 4;  // of the first draw
  float drawn[kPiece + 2 * 4 * kDraws];
  for (int64_t i = 0; i < skipped + count; i += 4 * kDraws) {
    uint32_t lanes[4 * kDraws];
    philox_block(lanes, seed, begin / 4 + i / 4);
    for (int k = 0; k < 4 * kDraws; k++) drawn[i + k] = dropout_keeps(lanes[k], p) ? scale : 0.0f;
  }
  std::copy(drawn + skipped, drawn + skipped + count, factor);
}

// The convolution v (N, C, D', H', W') from x (N, Cin, D, H, W) and weight (C, Cin, depth, 3, 3).
EXPORT void convolve(value_t* v, const value_t* x, const value_t* weight, int64_t N, int64_t Cin, int64_t C,
                     int64_t D, int64_t H, int64_t W, int64_t depth) {
  winograd::convolve(v, x, weight, {N, Cin, C, D, H, W, depth});
}

EXPORT void forward(output_t* y, accumulate_t* statistics, int32_t* active, const value_t* v,
                    const accumulate_t* conv_bias, const accumulate_t* weight, const accumulate_t* bias,
                    const int64_t* seed, int64_t number, double low, double high, double p, double eps,
                    int64_t offset, int64_t N, int64_t C, int64_t G, int64_t S) {
  const GroupShape shape{N, C, G, S};
  Sums own(statistics ? 0 : 2 * N * (C + G) + 2 * C);  // where nobody keeps them
  const auto [mean, m2, group_mean, group_rstd, kept_conv_bias, kept_bias] =
      GroupStatistics(statistics ? statistics : own.data(), N, C, G);
  std::copy_n(conv_bias, C, kept_conv_bias), std::copy_n(bias, C, kept_bias);
  const Tail tail{accumulate_t(low), accumulate_t(high)};
  const float scale = p < 1 ? 1 / (1 - p) : 0;
  const uint64_t drawn_by = seed_of(seed, number);
  plane_statistics(mean, m2, v, N * C, S);
  merge_groups(group_mean, group_rstd, mean, m2, conv_bias, eps, shape);
  host::parallel_for(N * C, 1, [=](int64_t begin, int64_t end) {
    float factor[kPiece];
    for (int64_t plane = begin; plane < end; plane++) {
      const Normaliser normalise =
          normaliser(group_mean, group_rstd, conv_bias, weight, bias, shape, plane / C, plane % C);
      int any = !std::isfinite(normalise.offset * normalise.slope);
      for (int64_t s0 = 0; s0 < S; s0 += kPiece) {
        const int64_t count = std::min(kPiece, S - s0);
        const value_t* in = v + plane * S + s0;
        output_t* out = y + plane * S + s0;
        dropout_factors(factor, drawn_by, p, scale, offset + plane * S + s0, count);
        for (int64_t i = 0; i < count; i++) {
          const accumulate_t z = normalise(accumulate_t(in[i]));
          any |= tail.gradient(z) != 0;
          out[i] = output_t(tail(z) * factor[i]);
        }
      }
      if (active) active[plane] = any;
    }
  });
}

EXPORT void backward(value_t* dv, accumulate_t* d_conv_bias, accumulate_t* d_weight, accumulate_t* d_bias,
                     accumulate_t* scratch, const output_t* dy, const value_t* v,
                     const accumulate_t* statistics, const int32_t* active, const accumulate_t* weight,
                     const int64_t* seed, int64_t number, double low, double high, double p, int64_t N,
                     int64_t C, int64_t G, int64_t S) {
  const GroupShape shape{N, C, G, S};
  const auto [mean, m2, group_mean, group_rstd, conv_bias, bias] = GroupStatistics(statistics, N, C, G);
  accumulate_t *gradients = scratch, *sums = gradients + 3 * N * C, *coefficients = sums + 2 * N * C;
  const Tail tail{accumulate_t(low), accumulate_t(high)};
  const float scale = p < 1 ? 1 / (1 - p) : 0;
  const uint64_t drawn_by = seed_of(seed, number);
  // dz, the gradient of group_norm's result, of a plane, a piece at a time: body(first, count, dz).
  const auto for_each_piece = [=](int64_t plane, const Normaliser& normalise, const auto& body) {
    float factor[kPiece];
    accumulate_t dz[kPiece];
    for (int64_t s0 = 0; s0 < S; s0 += kPiece) {
      const int64_t count = std::min(kPiece, S - s0), first = plane * S + s0;
      if (active[plane]) dropout_factors(factor, drawn_by, p, scale, first, count);
      for (int64_t i = 0; i < count; i++) {
        // The gradient of conv3d_groupnorm_min_clamp_dropout.
        const accumulate_t gate = active[plane] ? tail.gradient(normalise(accumulate_t(v[first + i]))) : 0;
        dz[i] = gate != 0 ? accumulate_t(dy[first + i]) * factor[i] * gate : 0;
      }
      body(first, count, dz);
    }
  };
  host::parallel_for(N * C, 1, [=](int64_t begin, int64_t end) {
    for (int64_t plane = begin; plane < end; plane++) {
      const Normaliser normalise =
          normaliser(group_mean, group_rstd, conv_bias, weight, bias, shape, plane / C, plane % C);
      double gradient = 0, product = 0;
      if (active[plane])
        for_each_piece(plane, normalise, [&](int64_t first, int64_t count, const accumulate_t* dz) {
          const int64_t whole = count / kLanes * kLanes;
          Lanes sums = {}, products = {};  // float32 over a piece
          for (int64_t i = 0; i < whole; i += kLanes) {
            const Lanes gradients = load_lanes(dz + i);
            sums += gradients, products += gradients * (load_lanes(v + first + i) + normalise.offset);
          }
          for (int lane = 0; lane < kLanes; lane++) gradient += sums[lane], product += products[lane];
          for (int64_t i = whole; i < count; i++)
            gradient += dz[i], product += dz[i] * normalise.centred(accumulate_t(v[first + i]));
        });
      sums[plane] = gradient, sums[N * C + plane] = product;
    }
  });
  group_gradients(coefficients, gradients, sums, mean, group_mean, group_rstd, conv_bias, weight, shape);
  accumulate_t* const totals[] = {d_conv_bias, d_weight, d_bias};
  for (int i = 0; i < 3; i++) sum_rows(totals[i], C, gradients + i * N * C, N, C);
  host::parallel_for(N * C, 1, [=](int64_t begin, int64_t end) {
    for (int64_t plane = begin; plane < end; plane++) {
      const Normaliser normalise =
          normaliser(group_mean, group_rstd, conv_bias, weight, bias, shape, plane / C, plane % C);
      const int64_t group = plane / C * G + plane % C / shape.channels();
      const accumulate_t constant = coefficients[group], linear = coefficients[N * G + group];
      for_each_piece(plane, normalise, [&](int64_t first, int64_t count, const accumulate_t* dz) {
        for (int64_t i = 0; i < count; i++)
          dv[first + i] = value_t(dz[i] * normalise.slope + constant +
                                  linear * normalise.centred(accumulate_t(v[first + i])));
      });
    }
  });
}

// The gradient of the filters (C, Cin, depth, 3, 3) from that of v and x (N, Cin, D, H, W).
EXPORT void filter_gradient(value_t* dweight, const value_t* dv, const value_t* x, int64_t N, int64_t Cin,
                            int64_t C, int64_t D, int64_t H, int64_t W, int64_t depth) {
  direct::filter_gradient(dweight, x, {N, Cin, C, D, H, W, depth},
                          [=](accumulate_t* values, int64_t, int64_t at, int64_t count) {
                            for (int64_t i = 0; i < count; i++) values[i] = accumulate_t(dv[at + i]);
                          });
}
