// y = clamp(max_pool(group_norm(conv)·scale), low, high), and its gradient, on the CPU. The launchers of
// conv2d_groupnorm_scale_maxpool_clamp.cu, but v and dv are channels last, (N, H, W, C), where the CPU's
// library is fastest: a thread takes rows of windows, and the inner loops run over channels. y, dy, extreme,
// index are (N, C, PH, PW).
#include <cmath>
#include <vector>
#include "cpu/vector.h"
#include "cpu/gram.h"
#include "cpu/winograd.h"

#ifndef POOL_H
#define POOL_H 2
#define POOL_W 2
#endif

using Places = decltype(Lanes{} > Lanes{});  // integers of the same width: masks, and places in a window

// Running sums over some pixels, shifted by the first: a piece of about kPiece pixels in lanes, pieces in
// double, because an error in a variance grows with the number of values that are added one by one.
constexpr int64_t kPiece = 64;

struct LaneSums {
  Lanes shift, sum = {}, square = {};
  int64_t count = 0;
  double sums[kLanes] = {}, squares[kLanes] = {};
  void add(Lanes value) {
    const Lanes d = value - shift;
    count += 1, sum += d, square += d * d;
  }
  void end_piece() {
    for (int j = 0; j < kLanes; j++) sums[j] += sum[j], squares[j] += square[j];
    sum = square = Lanes{};
  }
  Moments<double> moments(int j) const {
    return Moments<double>::from_shifted(count, shift[j], sums[j], squares[j]);
  }
};

// One row of windows of one sample, POOL_H rows of pixels: selected values and places (C, plane), moments (C)
// of the pixels. The last row of windows may have fewer rows of pixels; these count for the moments alone, as
// do pixels right of the last window. Here for `lanes` channels, at most kLanes; load(i) gives them of the
// i-th pixel, and zeros behind them. Without places any value serves where the direction is zero; and NaN
// need not be selected, because it reaches the result by the moments.
template <bool kPlaces, class Load>
static void pool_lanes(value_t* extreme, index_t* index, Moments<double>* moments, const Load& load,
                       int lanes, int64_t height, int64_t W, int64_t plane, const accumulate_t* direction) {
  const int64_t windows = height < POOL_H ? 0 : W / POOL_W;
  constexpr int64_t kWindows = std::max<int64_t>(1, kPiece / (POOL_H * POOL_W));  // of a piece
  Lanes way = {};
  for (int j = 0; j < lanes; j++) way[j] = direction[j];
  LaneSums sums{load(0)};
  for (int64_t p = 0; p < windows; p++) {
    Lanes selected = load(p * POOL_W), best = selected * way;
    Places place = {};
    for (int h = 0; h < POOL_H; h++)
      for (int w = 0; w < POOL_W; w++) {
        const Lanes value = load(h * W + p * POOL_W + w), key = value * way;
        sums.add(value);
        if constexpr (kPlaces) {
          const Places replaces = (key > best) | ((key != key) & (best == best));  // as replaces_maximum
          best = replaces ? key : best;
          selected = replaces ? value : selected;
          place = replaces ? Places{} + (h * POOL_W + w) : place;
        } else {
          best = key > best ? key : best;
        }
      }
    if (!kPlaces) selected = best * way;
    for (int j = 0; j < lanes; j++) extreme[j * plane + p] = value_t(selected[j]);
    if (kPlaces)
      for (int j = 0; j < lanes; j++) index[j * plane + p] = index_t(place[j]);
    if ((p + 1) % kWindows == 0) sums.end_piece();
  }
  for (int64_t h = 0; h < height; h++)
    for (int64_t w = windows * POOL_W; w < W; w++) {
      sums.add(load(h * W + w));
      if ((w + 1) % kPiece == 0) sums.end_piece();
    }
  sums.end_piece();
  for (int j = 0; j < lanes; j++) moments[j] = sums.moments(j);
}

// The same for all channels; rows (height, W, C).
static void pool_row(value_t* extreme, index_t* index, Moments<double>* moments, const value_t* rows,
                     int64_t height, int64_t W, int64_t C, int64_t plane, const accumulate_t* direction) {
  for (int64_t c = 0; c < C; c += kLanes) {
    const int lanes = int(std::min<int64_t>(kLanes, C - c));
    const auto whole = [=](int64_t i) { return load_lanes(rows + i * C + c); };
    const auto some = [=](int64_t i) {
      Lanes channels = {};
      for (int j = 0; j < lanes; j++) channels[j] = accumulate_t(rows[i * C + c + j]);
      return channels;
    };
    const auto pool = [&](const auto& load) {
      index ? pool_lanes<true>(extreme + c * plane, index + c * plane, moments + c, load, lanes, height, W,
                               plane, direction + c)
            : pool_lanes<false>(extreme + c * plane, nullptr, moments + c, load, lanes, height, W, plane,
                                direction + c);
    };
    lanes == kLanes ? pool(whole) : pool(some);
  }
}

// Floats in a vector of eager's group_norm: AVX2's on every x86, for which alone it is compiled.
#if defined(__aarch64__)
constexpr int64_t kEagersLanes = 16 / sizeof(accumulate_t);
#else
constexpr int64_t kEagersLanes = 32 / sizeof(accumulate_t);
#endif

// The statistics of a sample whose running sums overflow: of its channels (C) once more, in double, and of
// its groups (G) from them. An infinite variance makes rstd 0, or NaN where eager has NaN: eager sums in the
// lanes of vectors (RowwiseMoments in ATen's moments_utils.h) and merges them into what filled no vector. If
// there was nothing, the square of the first lane's mean is multiplied by a count of zero, which is NaN if
// that square is infinite. rows(first, count) yields rows of v, (count, W, C).
template <class Rows>
static void repeat_statistics(accumulate_t* mean, accumulate_t* m2, accumulate_t* group_mean,
                              accumulate_t* group_rstd, const Rows& rows, const accumulate_t* conv_bias,
                              double eps, int64_t C, int64_t G, int64_t H, int64_t W) {
  constexpr int64_t kVector = sizeof(value_t) < sizeof(accumulate_t) ? 2 * kEagersLanes : kEagersLanes;
  const int64_t channels = C / G, plane = H * W, size = channels * plane;
  std::vector<double> means(C), squares(C), first_lane(G);
  for (int64_t h = 0; h < H; h += POOL_H) {
    const int64_t begin = h * W, end = std::min<int64_t>(h + POOL_H, H) * W;
    const value_t* v = rows(h, (end - begin) / W);
    for (int64_t i = begin; i < end; i++)
      for (int64_t c = 0; c < C; c++, v++) {
        const double value = accumulate_t(*v), delta = value - means[c];
        means[c] += delta / (i + 1), squares[c] += delta * (value - means[c]);
        const bool in_first_lane = (c % channels * plane + i) % kEagersLanes == 0;
        if (in_first_lane) first_lane[c / channels] += (value + conv_bias[c]) * kEagersLanes / size;
      }
  }
  for (int64_t c = 0; c < C; c++) mean[c] = means[c], m2[c] = squares[c];
  merge_groups(group_mean, group_rstd, mean, m2, conv_bias, eps, {1, C, G, plane});
  for (int64_t g = 0; g < G; g++) {
    const accumulate_t first = first_lane[g];
    if (group_rstd[g] == 0 && size % kVector == 0 && std::isinf(first * first)) group_rstd[g] = NAN;
  }
}

// What both ways forward share. `rows_of()`, called in each thread, gives a function of a sample, a first row
// and a number of rows that yields these rows of v, (rows, W, C).
template <class RowsOf>
static void pool_and_normalise(output_t* y, value_t* extreme, index_t* index, accumulate_t* statistics,
                               const RowsOf& rows_of, const accumulate_t* conv_bias,
                               const accumulate_t* weight, const accumulate_t* bias,
                               const accumulate_t* scale, double low, double high, double eps, int64_t N,
                               int64_t C, int64_t G, int64_t H, int64_t W) {
  const GroupShape shape{N, C, G, H * W};
  Sums own(statistics ? 0 : 2 * N * (C + G) + 2 * C);  // where nobody keeps them
  const auto [mean, m2, group_mean, group_rstd, kept_conv_bias, kept_bias] =
      GroupStatistics(statistics ? statistics : own.data(), N, C, G);
  std::copy_n(conv_bias, C, kept_conv_bias), std::copy_n(bias, C, kept_bias);
  const int64_t pooled_height = H / POOL_H, pooled_width = W / POOL_W, pooled = pooled_height * pooled_width;
  const int64_t strips = (H + POOL_H - 1) / POOL_H;  // the last may be too low for a window
  Sums direction(C);
  for (int64_t c = 0; c < C; c++)
    direction[c] = weight[c] * scale[c] > 0 ? 1 : weight[c] * scale[c] < 0 ? -1 : 0;
  std::vector<Moments<double>> moments(N * strips * C);
  host::parallel_for(N * strips, 1, [&](int64_t begin, int64_t end) {
    auto rows = rows_of();
    for (int64_t i = begin; i < end; i++) {
      const int64_t n = i / strips, strip = i % strips, first = n * C * pooled + strip * pooled_width;
      const int64_t height = std::min<int64_t>(POOL_H, H - strip * POOL_H);
      pool_row(extreme + first, index ? index + first : nullptr, moments.data() + i * C,
               rows(n, strip * POOL_H, height), height, W, C, pooled, direction.data());
    }
  });
  for (int64_t i = 0; i < N * C; i++) {
    Moments<double> total{0, 0, 0};
    for (int64_t strip = 0; strip < strips; strip++)
      total = total.merge(moments[(i / C * strips + strip) * C + i % C]);
    mean[i] = total.mean, m2[i] = total.m2;
  }
  merge_groups(group_mean, group_rstd, mean, m2, conv_bias, eps, shape);
  host::parallel_for(N, 1, [&](int64_t begin, int64_t end) {
    for (int64_t n = begin; n < end; n++) {
      const auto is_finite = [](accumulate_t value) { return std::isfinite(value); };
      if (std::all_of(m2 + n * C, m2 + (n + 1) * C, is_finite)) continue;
      auto rows = rows_of();
      const auto of_sample = [&](int64_t first, int64_t count) { return rows(n, first, count); };
      repeat_statistics(mean + n * C, m2 + n * C, group_mean + n * G, group_rstd + n * G, of_sample,
                        conv_bias, eps, C, G, H, W);
    }
  });
  // In a flat channel, all of whose values tie behind the normalisation, each window selects its first value,
  // as max_pool2d does. That counts for backward alone.
  if (index) host::parallel_for(N, 1, [&](int64_t begin, int64_t end) {
    std::vector<int64_t> flat;
    for (int64_t n = begin; n < end; n++) {
      flat.clear();
      for (int64_t c = 0; c < C; c++) {
        const Normaliser normalise = normaliser(group_mean, group_rstd, conv_bias, weight, bias, shape, n, c);
        const accumulate_t of_channel = mean[n * C + c];
        if (is_flat(of_channel + conv_bias[c], m2[n * C + c], normalise.slope, normalise(of_channel),
                    [&](accumulate_t z) { return z * scale[c]; }))
          flat.push_back(c);
      }
      if (flat.empty()) continue;
      auto rows = rows_of();
      for (int64_t row = 0; row < pooled_height; row++) {
        const value_t* const v = rows(n, row * POOL_H, POOL_H);
        for (int64_t p = 0; p < pooled_width; p++)
          for (const int64_t c : flat) {
            const int64_t at = (n * C + c) * pooled + row * pooled_width + p;
            extreme[at] = v[p * POOL_W * C + c], index[at] = 0;
          }
      }
    }
  });
  const accumulate_t lower = low, upper = high;
  host::parallel_for(N * C, 16, [=](int64_t begin, int64_t end) {
    for (int64_t plane = begin; plane < end; plane++) {
      const Normaliser normalise =
          normaliser(group_mean, group_rstd, conv_bias, weight, bias, shape, plane / C, plane % C);
      const accumulate_t factor = scale[plane % C];
      for (int64_t i = plane * pooled; i < (plane + 1) * pooled; i++)
        // The formula of conv2d_groupnorm_scale_maxpool_clamp.
        y[i] = output_t(clamp(normalise(accumulate_t(extreme[i])) * factor, lower, upper));
    }
  });
}

// The rows of a v that is there.
static auto rows_in(const value_t* v, int64_t C, int64_t H, int64_t W) {
  return [=] { return [=](int64_t n, int64_t first, int64_t) { return v + (n * H + first) * W * C; }; };
}

EXPORT void forward(output_t* y, value_t* extreme, index_t* index, accumulate_t* statistics, const value_t* v,
                    const accumulate_t* conv_bias, const accumulate_t* weight, const accumulate_t* bias,
                    const accumulate_t* scale, double low, double high, double eps, int64_t N, int64_t C,
                    int64_t G, int64_t H, int64_t W) {
  pool_and_normalise(y, extreme, index, statistics, rows_in(v, C, H, W), conv_bias, weight, bias, scale, low,
                     high, eps, N, C, G, H, W);
}

// v convolved a few rows at a time, for `pool_and_normalise` and others; kept where v has elements.
static auto convolved_rows(value_t* v, const value_t* x, const std::vector<winograd::Line>& transformed,
                           const winograd::Sizes& sizes) {
  return [=, &transformed, &sizes] {
    std::vector<value_t> memory(v ? 0 : POOL_H * sizes.width() * sizes.K);
    return [=, &sizes, convolve = winograd::Rows(x, transformed, sizes), memory = std::move(memory)](
               int64_t n, int64_t first, int64_t count) mutable -> const value_t* {
      value_t* const rows = v ? v + (n * sizes.height() + first) * sizes.width() * sizes.K : memory.data();
      convolve(rows, n, first, count);
      return rows;
    };
  };
}

// The convolution included, from x (N, Cin, H, W) and filters (C, Cin, 3, 3). v may have no elements: a row
// of windows then goes from pixels to selected values in cache.
EXPORT void convolve_forward(output_t* y, value_t* extreme, index_t* index, accumulate_t* statistics,
                             value_t* v, const value_t* x, const value_t* filters,
                             const accumulate_t* conv_bias, const accumulate_t* weight,
                             const accumulate_t* bias, const accumulate_t* scale, double low, double high,
                             double eps, int64_t N, int64_t Cin, int64_t C, int64_t G, int64_t H, int64_t W) {
  const winograd::Sizes sizes{N, Cin, C, 1, H, W, 1};
  const std::vector<winograd::Line> transformed = winograd::transformed(filters, sizes, winograd::kOutputs);
  pool_and_normalise(y, extreme, index, statistics, convolved_rows(v, x, transformed, sizes), conv_bias,
                     weight, bias, scale, low, high, eps, N, C, G, sizes.height(), sizes.width());
}

// ------------------------------------------------------------------------------------------------- backward

// dv = constant + linear·(v + offset) in each channel, and dy·scale·slope more where a window selects v and
// its result passes the clamp.
struct Dense {
  accumulate_t constant, linear, offset;
  accumulate_t operator()(accumulate_t v) const { return constant + linear * (v + offset); }
};

// What backward reads, and room for the parameters' gradients by sample (4, N, C), for what they are made of
// (2, N, C) and for coefficients (2, N, G). v has H rows of W.
struct Backward {
  const output_t* dy;
  const value_t* extreme;
  const index_t* index;
  const accumulate_t *statistics, *weight, *scale;
  accumulate_t low, high;
  GroupShape shape;
  int64_t H, W;
  accumulate_t* scratch;

  int64_t N() const { return shape.N; }
  int64_t C() const { return shape.C; }
  int64_t strips() const { return (H + POOL_H - 1) / POOL_H; }  // the last may be too low for a window
  int64_t across() const { return W / POOL_W; }
  int64_t pooled() const { return H / POOL_H * across(); }
  const accumulate_t* d_conv_bias() const { return scratch; }

  Normaliser normalise(int64_t n, int64_t c) const {
    const auto [mean, m2, group_mean, group_rstd, conv_bias, bias] =
        GroupStatistics(statistics, N(), C(), shape.G);
    return normaliser(group_mean, group_rstd, conv_bias, weight, bias, shape, n, c);
  }

  Dense dense(int64_t n, int64_t c) const {
    const accumulate_t* const constant = scratch + 6 * N() * C() + n * shape.G + c / shape.channels();
    return {constant[0], constant[N() * shape.G], normalise(n, c).offset};
  }

  // The pixels that one row of windows selects and that pass, counted from its first in rows of `width`, and
  // dy·scale·slope there; returns how many.
  int64_t selected(int64_t* pixels, accumulate_t* gradients, int64_t n, int64_t c, int64_t row,
                   int64_t width) const {
    if (row >= H / POOL_H) return 0;
    const Normaliser normalised = normalise(n, c);
    const accumulate_t factor = scale[c];
    int64_t count = 0, i = (n * C() + c) * pooled() + row * across();
    for (int64_t w = 0; w < across(); w++, i++) {
      // The gradient of conv2d_groupnorm_scale_maxpool_clamp.
      pixels[count] = index[i] / POOL_W * width + w * POOL_W + index[i] % POOL_W;
      gradients[count] = accumulate_t(dy[i]) * factor * normalised.slope;
      count += clamp_passes(normalised(accumulate_t(extreme[i])) * factor, low, high);
    }
    return count;
  }

  // The parameters' gradients, summed over the samples; d_scale has `scales` elements, C or 1.
  void of_parameters(accumulate_t* d_conv_bias, accumulate_t* d_weight, accumulate_t* d_bias,
                     accumulate_t* d_scale, int64_t scales) const {
    const int64_t planes = N() * C();
    accumulate_t *const gradients = scratch, *const sums = gradients + 4 * planes;
    host::parallel_for(planes, 1, [=, this](int64_t begin, int64_t end) {
      for (int64_t plane = begin; plane < end; plane++) {
        const Normaliser normalised = normalise(plane / C(), plane % C());
        const accumulate_t factor = scale[plane % C()];
        double gradient = 0, product = 0, scale_gradient = 0;
        for (int64_t i = plane * pooled(); i < (plane + 1) * pooled(); i++) {
          // The gradient of conv2d_groupnorm_scale_maxpool_clamp.
          const accumulate_t value = accumulate_t(extreme[i]), z = normalised(value);
          const accumulate_t passed = clamp_passes(z * factor, low, high) ? accumulate_t(dy[i]) : 0;
          gradient += passed * factor, product += passed * factor * normalised.centred(value);
          scale_gradient += passed * z;
        }
        sums[plane] = gradient, sums[planes + plane] = product;
        gradients[3 * planes + plane] = scale_gradient;
      }
    });
    const auto [mean, m2, group_mean, group_rstd, conv_bias, bias] =
        GroupStatistics(statistics, N(), C(), shape.G);
    group_gradients(sums + 2 * planes, gradients, sums, mean, group_mean, group_rstd, conv_bias, weight,
                    shape);
    accumulate_t* const totals[] = {d_conv_bias, d_weight, d_bias, d_scale};
    for (int i = 0; i < 4; i++) sum_rows(totals[i], i < 3 ? C() : scales, gradients + i * planes, N(), C());
  }

  // dv, from rows of v as `pool_and_normalise` takes them: what a group shares, then the selected pixels.
  template <class RowsOf> void of_v(value_t* dv, const RowsOf& rows_of) const {
    host::parallel_for(N() * strips(), 1, [&](int64_t begin, int64_t end) {
      auto rows = rows_of();
      Sums constant(C()), linear(C()), offset(C()), gradients(across() + 1);
      std::vector<int64_t> pixels(across() + 1);
      for (int64_t i = begin; i < end; i++) {
        const int64_t n = i / strips(), row = i % strips(), first = row * POOL_H;
        const int64_t height = std::min<int64_t>(POOL_H, H - first);
        const value_t* const in = rows(n, first, height);
        value_t* const out = dv + (n * H + first) * W * C();
        for (int64_t c = 0; c < C(); c++) {
          const Dense channel = dense(n, c);
          constant[c] = channel.constant, linear[c] = channel.linear, offset[c] = channel.offset;
        }
        for (int64_t pixel = 0; pixel < height * W * C(); pixel += C())
          for (int64_t c = 0; c < C(); c++)
            out[pixel + c] =
                value_t(constant[c] + linear[c] * (accumulate_t(in[pixel + c]) + offset[c]));
        for (int64_t c = 0; c < C(); c++) {
          const int64_t count = selected(pixels.data(), gradients.data(), n, c, row, W);
          const Dense channel = dense(n, c);
          for (int64_t j = 0; j < count; j++) {
            const int64_t at = pixels[j] * C() + c;
            out[at] = value_t(channel(accumulate_t(in[at])) + gradients[j]);
          }
        }
      }
    });
  }

  // dw of filters w (C, Cin, 3, 3) and x (N, Cin, H + 2, W + 2), without v: the pixels that are selected, and
  // the dense part by cpu/gram.h. Shares of the strips are summed one by one, then merged in order.
  void of_filters(value_t* dw, const value_t* x, const value_t* w, int64_t Cin) const {
    const gram::Sizes sizes{N(), Cin, H + 2, W + 2};
    const int64_t filled = sizes.channels(), patch = sizes.patch(), plane = sizes.H * sizes.W;
    std::vector<gram::Channel> channels(N() * filled);
    host::parallel_for(N() * Cin, 1, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; i++)
        channels[i / Cin * filled + i % Cin] = gram::channel_of(x + i * plane, sizes);
    });
    const int64_t all = N() * strips(), shares = std::min(kShares, all);
    const int64_t fitting = gram::kBlockBytes / (POOL_H * sizes.W * filled * int64_t(sizeof(accumulate_t)));
    const int64_t block = std::max<int64_t>(1, fitting);
    std::vector<double> partial(shares * C() * patch);
    host::parallel_for(shares, 1, [&](int64_t begin, int64_t end) {
      gram::Rows rows(sizes, block * POOL_H + 2);
      gram::Matrix products(sizes);
      Sums linear(C()), gradients(across() + 1);
      std::vector<int64_t> pixels(across() + 1);
      for (int64_t share = begin; share < end; share++) {
        const int64_t behind = (share + 1) * all / shares;
        for (int64_t i = share * all / shares, count; i < behind; i += count) {
          const int64_t n = i / strips(), row = i % strips();
          count = std::min({block, behind - i, strips() - row});
          const bool is_last = row + count == strips();
          const int64_t first = row * POOL_H, last = is_last ? sizes.H : first + count * POOL_H;
          const gram::Channel* const of_sample = channels.data() + n * filled;
          rows.fill(x + n * Cin * plane, of_sample, first, std::min(last + 2, sizes.H));
          products.add(rows, first, last);
          for (int64_t c = 0; c < C(); c++) {
            double* const gradient = partial.data() + (share * C() + c) * patch;
            for (int64_t strip = row; strip < row + count; strip++) {
              const int64_t found = selected(pixels.data(), gradients.data(), n, c, strip, sizes.W);
              rows.add_patches(gradient, strip * POOL_H, pixels.data(), gradients.data(), found);
            }
            linear[c] = dense(n, c).linear;
          }
          if (!is_last && i + count < behind) continue;
          products.multiply(partial.data() + share * C() * patch, w, linear.data(), of_sample, C());
          products.clear();
        }
      }
    });
    host::parallel_for(C(), 1, [&](int64_t begin, int64_t end) {
      for (int64_t c = begin; c < end; c++) {
        std::vector<double> total(patch);
        for (int64_t share = 0; share < shares; share++)
          for (int64_t i = 0; i < patch; i++) total[i] += partial[(share * C() + c) * patch + i];
        for (int64_t n = 0; n < N(); n++) {
          const gram::Channel* const of_sample = channels.data() + n * filled;
          const Dense channel = dense(n, c);
          double level = channel.offset;  // of a v made of what is left of x
          for (int64_t i = 0; i < Cin * gram::kTaps; i++)
            level += double(of_sample[i / gram::kTaps].shift) * w[c * Cin * gram::kTaps + i];
          const double constant = channel.constant + channel.linear * level;
          for (int64_t i = 0; i < patch; i++) {
            const gram::Channel& of_plane = of_sample[i % filled];
            total[i] += constant * of_plane.sums[i / filled] * of_plane.inverse +
                        double(d_conv_bias()[n * C() + c]) * of_plane.shift;
          }
        }
        for (int64_t i = 0; i < Cin * gram::kTaps; i++)
          dw[c * Cin * gram::kTaps + i] = value_t(total[i % gram::kTaps * filled + i / gram::kTaps]);
      }
    });
  }

  static constexpr int64_t kShares = 32;
};

// The gradients of v and, summed over the samples, of the parameters; d_scale has `scales` elements, C or 1.
EXPORT void backward(value_t* dv, accumulate_t* d_conv_bias, accumulate_t* d_weight, accumulate_t* d_bias,
                     accumulate_t* d_scale, accumulate_t* scratch, const output_t* dy, const value_t* v,
                     const value_t* extreme, const index_t* index, const accumulate_t* statistics,
                     const accumulate_t* weight, const accumulate_t* scale, double low, double high,
                     int64_t scales, int64_t N, int64_t C, int64_t G, int64_t H, int64_t W) {
  const Backward backward{dy, extreme, index, statistics, weight, scale, accumulate_t(low),
                          accumulate_t(high), GroupShape(N, C, G, H * W), H, W, scratch};
  backward.of_parameters(d_conv_bias, d_weight, d_bias, d_scale, scales);
  backward.of_v(dv, rows_in(v, C, H, W));
}

// The same from x and filters as `convolve_forward` takes them, and the gradient of the filters; v is
// convolved anew for its gradient. dv and dw may have no elements.
EXPORT void convolve_backward(value_t* dv, value_t* dw, accumulate_t* d_conv_bias, accumulate_t* d_weight,
                              accumulate_t* d_bias, accumulate_t* d_scale, accumulate_t* scratch,
                              const output_t* dy, const value_t* x, const value_t* filters,
                              const value_t* extreme, const index_t* index, const accumulate_t* statistics,
                              const accumulate_t* weight, const accumulate_t* scale, double low, double high,
                              int64_t scales, int64_t N, int64_t Cin, int64_t C, int64_t G, int64_t H,
                              int64_t W) {
  const winograd::Sizes sizes{N, Cin, C, 1, H, W, 1};
  const Backward backward{dy, extreme, index, statistics, weight, scale, accumulate_t(low),
                          accumulate_t(high), GroupShape(N, C, G, sizes.height() * sizes.width()),
                          sizes.height(), sizes.width(), scratch};
  backward.of_parameters(d_conv_bias, d_weight, d_bias, d_scale, scales);
  if (dw) backward.of_filters(dw, x, filters, Cin);
  if (!dv) return;
  const std::vector<winograd::Line> transformed = winograd::transformed(filters, sizes, winograd::kOutputs);
  backward.of_v(dv, convolved_rows(nullptr, x, transformed, sizes));
}
