// y = clamp(max_pool(group_norm(conv)·scale), low, high), and its gradient, on the CPU. The launchers of
// conv2d_groupnorm_scale_maxpool_clamp.cu, but v and dv are channels last, (N, H, W, C), where the CPU's library is fastest:
// a thread takes rows of windows, and the inner loops run over channels. y, dy, extreme, index are (N, C, PH, PW).
#include <vector>
#include "cpu.h"

#ifndef POOL_H
#define POOL_H 2
#define POOL_W 2
#endif
using Sums = std::vector<accumulate_t>;

using Places = decltype(Lanes{} > Lanes{});  // integers of the same width: masks, and places in a window

// Channels c0 … c0 + kLanes of a pixel; those past C are zero.
static Lanes load_channels(const value_t* pixel, int64_t c0, int64_t C) {
  if (c0 + kLanes <= C) return load_lanes(pixel + c0);
  Lanes lanes = {};
  for (int j = 0; c0 + j < C; j++) lanes[j] = accumulate_t(pixel[c0 + j]);
  return lanes;
}

// Running sums over some pixels, shifted by the first.
struct LaneSums {
  Lanes shift, sum = {}, square = {};
  accumulate_t count = 0;
  void add(Lanes value) {
    const Lanes d = value - shift;
    count += 1, sum += d, square += d * d;
  }
};

// One row of windows of one sample, POOL_H rows of pixels: selected values and places (C, plane), moments (C) of the pixels.
// The last row of windows may have fewer rows of pixels; these count for the moments alone, as do pixels right of the last
// window.
static void pool_row(value_t* extreme, index_t* index, Moments<double>* moments, const value_t* rows, int64_t height,
                     int64_t W, int64_t C, int64_t plane, const accumulate_t* direction) {
  const int64_t windows = height < POOL_H ? 0 : W / POOL_W;
  for (int64_t c0 = 0; c0 < C; c0 += kLanes) {
    const int lanes = int(std::min<int64_t>(kLanes, C - c0));
    Lanes way = {};
    for (int j = 0; j < lanes; j++) way[j] = direction[c0 + j];
    LaneSums sums{load_channels(rows, c0, C)};
    for (int64_t p = 0; p < windows; p++) {
      Lanes selected = load_channels(rows + p * POOL_W * C, c0, C), best = selected * way;
      Places place = {};
      for (int h = 0; h < POOL_H; h++)
        for (int w = 0; w < POOL_W; w++) {
          const Lanes value = load_channels(rows + (h * W + p * POOL_W + w) * C, c0, C), key = value * way;
          sums.add(value);
          const Places replaces = (key > best) | ((key != key) & (best == best));  // as replaces_maximum
          best = replaces ? key : best;
          selected = replaces ? value : selected;
          place = replaces ? Places{} + (h * POOL_W + w) : place;
        }
      for (int j = 0; j < lanes; j++) extreme[(c0 + j) * plane + p] = value_t(selected[j]);
      if (index)
        for (int j = 0; j < lanes; j++) index[(c0 + j) * plane + p] = index_t(place[j]);
    }
    for (int64_t h = 0; h < height; h++)
      for (int64_t w = windows * POOL_W; w < W; w++) sums.add(load_channels(rows + (h * W + w) * C, c0, C));
    for (int j = 0; j < lanes; j++)
      moments[c0 + j] = Moments<double>::from_shifted(sums.count, sums.shift[j], sums.sum[j], sums.square[j]);
  }
}

EXPORT void forward(output_t* y, value_t* extreme, index_t* index, accumulate_t* mean, accumulate_t* m2,
                    accumulate_t* group_mean, accumulate_t* group_rstd, const value_t* v, const accumulate_t* conv_bias,
                    const accumulate_t* weight, const accumulate_t* bias, const accumulate_t* scale, double low,
                    double high, double eps, int64_t N, int64_t C, int64_t G, int64_t H, int64_t W) {
  const GroupShape shape{N, C, G, H * W};
  const int64_t pooled_height = H / POOL_H, pooled_width = W / POOL_W, pooled = pooled_height * pooled_width;
  const int64_t strips = (H + POOL_H - 1) / POOL_H;  // the last may be too low for a window
  Sums direction(C);
  for (int64_t c = 0; c < C; c++) direction[c] = weight[c] * scale[c] > 0 ? 1 : weight[c] * scale[c] < 0 ? -1 : 0;
  std::vector<Moments<double>> moments(N * strips * C);
  host::parallel_for(N * strips, 1, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; i++) {
      const int64_t n = i / strips, strip = i % strips, first = n * C * pooled + strip * pooled_width;
      pool_row(extreme + first, index ? index + first : nullptr, moments.data() + i * C,
               v + (n * H + strip * POOL_H) * W * C, std::min<int64_t>(POOL_H, H - strip * POOL_H), W, C, pooled,
               direction.data());
    }
  });
  for (int64_t i = 0; i < N * C; i++) {
    Moments<double> total{0, 0, 0};
    for (int64_t strip = 0; strip < strips; strip++) total = total.merge(moments[(i / C * strips + strip) * C + i % C]);
    mean[i] = total.mean, m2[i] = total.m2;
  }
  merge_groups(group_mean, group_rstd, mean, m2, conv_bias, eps, shape);
  const accumulate_t lower = low, upper = high;
  host::parallel_for(N * C, 16, [=](int64_t begin, int64_t end) {
    for (int64_t plane = begin; plane < end; plane++) {
      const Normaliser normalise = normaliser(group_mean, group_rstd, conv_bias, weight, bias, shape, plane / C, plane % C);
      const accumulate_t factor = scale[plane % C];
      for (int64_t i = plane * pooled; i < (plane + 1) * pooled; i++)
        y[i] = output_t(clamp(normalise(accumulate_t(extreme[i])) * factor, lower, upper));
    }
  });
}

EXPORT void backward(value_t* dv, accumulate_t* gradients, accumulate_t* sums, accumulate_t* coefficients,
                     const output_t* dy, const value_t* v, const value_t* extreme, const index_t* index,
                     const accumulate_t* mean, const accumulate_t* group_mean, const accumulate_t* group_rstd,
                     const accumulate_t* conv_bias, const accumulate_t* weight, const accumulate_t* bias,
                     const accumulate_t* scale, double low, double high, int64_t N, int64_t C, int64_t G, int64_t H,
                     int64_t W) {
  const GroupShape shape{N, C, G, H * W};
  const int64_t pooled_width = W / POOL_W, pooled = H / POOL_H * pooled_width;
  const accumulate_t lower = low, upper = high;
  host::parallel_for(N * C, 1, [=](int64_t begin, int64_t end) {
    for (int64_t plane = begin; plane < end; plane++) {
      const Normaliser normalise = normaliser(group_mean, group_rstd, conv_bias, weight, bias, shape, plane / C, plane % C);
      const accumulate_t factor = scale[plane % C];
      double gradient = 0, product = 0, scale_gradient = 0;
      for (int64_t i = plane * pooled; i < (plane + 1) * pooled; i++) {
        const accumulate_t value = accumulate_t(extreme[i]), z = normalise(value);
        const accumulate_t passed = clamp_passes(z * factor, lower, upper) ? accumulate_t(dy[i]) : 0;
        gradient += passed * factor, product += passed * factor * normalise.centred(value);
        scale_gradient += passed * z;
      }
      sums[plane] = gradient, sums[N * C + plane] = product, gradients[3 * N * C + plane] = scale_gradient;
    }
  });
  group_gradients(coefficients, gradients, sums, mean, group_mean, group_rstd, conv_bias, weight, shape);
  // A row of pixels at a time: the part that a group shares, then the windows' selected pixels on top.
  host::parallel_for(N * H, 1, [=](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; row++) {
      const int64_t n = row / H, h = row % H, ph = h / POOL_H;
      std::vector<Normaliser> normalise(C);
      Sums constant(C), linear(C), offset(C);
      for (int64_t c = 0; c < C; c++) {
        const int64_t group = n * G + c / shape.channels();
        normalise[c] = normaliser(group_mean, group_rstd, conv_bias, weight, bias, shape, n, c);
        constant[c] = coefficients[group], linear[c] = coefficients[N * G + group], offset[c] = normalise[c].offset;
      }
      for (int64_t w = 0; w < W; w++) {
        const value_t* in = v + (row * W + w) * C;
        value_t* out = dv + (row * W + w) * C;
        for (int64_t c = 0; c < C; c++)
          out[c] = value_t(constant[c] + linear[c] * (accumulate_t(in[c]) + offset[c]));
      }
      if (ph >= H / POOL_H) continue;
      for (int64_t c = 0; c < C; c++)
        for (int64_t pw = 0; pw < pooled_width; pw++) {
          const int64_t i = (n * C + c) * pooled + ph * pooled_width + pw;
          if (index[i] / POOL_W != h % POOL_H) continue;
          const int64_t at = (row * W + pw * POOL_W + index[i] % POOL_W) * C + c;
          const accumulate_t value = accumulate_t(v[at]);
          if (!clamp_passes(normalise[c](value) * scale[c], lower, upper)) continue;
          dv[at] = value_t(constant[c] + linear[c] * (value + offset[c]) +
                           accumulate_t(dy[i]) * scale[c] * normalise[c].slope);
        }
    }
  });
}
