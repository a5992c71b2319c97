// The gradient of a 3×3 convolution's filters w on the CPU, without the convolution's output v. Where the
// gradient of v is, beside a sparse part, a + b·v in each channel, this part's share is
//   Σ (a + b·v) X = a·P + b·w·G,  P = Σ X,  G = Σ X Xᵀ,
// X being the patches that w is multiplied with, summed over the positions of v. G hangs on how far two
// pixels are apart alone, but for the border: 13 lags of taps, the others being their mirror images.
//
// The channels of a sample are centred and scaled by powers of two: any constant may be taken from x, because
// v's part of it is in a. Products are summed in float32 over kTogetherRows rows, and in double beyond.
#pragma once
#include <cmath>
#include "cpu/winograd.h"

namespace gram {

constexpr int64_t kTaps = 9;
constexpr int64_t kRowsTogether = 4;                   // rows of pixels whose products are summed in float32
constexpr int64_t kBlockBytes = 128 << 10;             // of centred rows, in a core's cache
constexpr int64_t kStep = winograd::kAcross * kLanes;  // what winograd::multiply writes at a time

inline int64_t round_up(int64_t count, int64_t step) { return (count + step - 1) / step * step; }
// Zeros.
template <class T> std::vector<winograd::Line> lines(int64_t count) {
  return std::vector<winograd::Line>(count * sizeof(T) / sizeof(winograd::Line) + 1);
}

// x (N, C, H, W). A patch is 9 pixels, (3, 3, channels), with zeros in the channels that fill up.
struct Sizes {
  int64_t N, C, H, W;
  int64_t channels() const { return round_up(C, winograd::kTogether); }
  int64_t patch() const { return kTaps * channels(); }
  int64_t height() const { return H - 2; }  // of v
  int64_t width() const { return W - 2; }
};

// A channel of one sample counts as x·unit − shift·unit, at most 1 in magnitude where its variance is finite;
// sums: of that, over the pixels under each tap.
struct Channel {
  accumulate_t shift = 0, unit = 1;
  double inverse = 1;  // of unit
  double sums[kTaps] = {};
  accumulate_t operator()(value_t x) const { return accumulate_t(x) * unit - shift * unit; }
};

inline Channel channel_of(const value_t* plane, const Sizes& sizes) {
  const Moments<double> moments = moments_of(plane, sizes.H * sizes.W);
  Channel channel;
  channel.shift = accumulate_t(moments.mean);
  if (moments.m2 > 0) {  // no pixel is farther from the mean than its root
    const int exponent = std::isfinite(moments.m2) ? std::ilogb(std::sqrt(moments.m2)) + 1 : 120;
    channel.unit = std::ldexp(accumulate_t(1), -std::clamp(exponent, -120, 120));
    channel.inverse = 1 / double(channel.unit);
  }
  const int64_t W = sizes.W, vectors = W / kLanes * kLanes;
  for (int64_t h = 0; h < sizes.H; h++) {
    const value_t* row = plane + h * W;
    const auto at = [&](int64_t w) { return double(channel(row[w])); };
    Lanes partial = {};
    for (int64_t w = 0; w < vectors; w += kLanes)
      partial += load_lanes(row + w) * channel.unit - channel.shift * channel.unit;
    double sum = 0;
    for (int lane = 0; lane < kLanes; lane++) sum += partial[lane];
    for (int64_t w = vectors; w < W; w++) sum += at(w);
    const double under[3] = {sum - at(W - 2) - at(W - 1), sum - at(0) - at(W - 1), sum - at(0) - at(1)};
    for (int64_t tap = 0; tap < kTaps; tap++)
      if (h >= tap / 3 && h - tap / 3 < sizes.height()) channel.sums[tap] += under[tap % 3];
  }
  return channel;
}

// Some rows of one sample, centred, (rows, W, channels). Whole vectors may be read that begin in them.
class Rows {
 public:
  explicit Rows(const Sizes& sizes, int64_t rows)
      : sizes_(sizes), memory_(lines<accumulate_t>(rows * stride() + 4 * kStep)),
        inverse_(3 * sizes.channels()) {}
  int64_t stride() const { return sizes_.W * sizes_.channels(); }
  const accumulate_t* operator[](int64_t h) const { return memory_[0].at + (h - first_) * stride(); }

  // The rows [first, last) of a sample's planes x.
  void fill(const value_t* x, const Channel* channel, int64_t first, int64_t last) {
    first_ = first;
    const int64_t channels = sizes_.channels(), W = sizes_.W;
    for (int64_t i = 0; i < 3 * channels; i++) inverse_[i] = channel[i % channels].inverse;
    for (int64_t c = 0; c < sizes_.C; c++)
      for (int64_t h = first; h < last; h++) {
        const value_t* in = x + (c * sizes_.H + h) * W;
        accumulate_t* out = memory_[0].at + (h - first) * stride() + c;
        for (int64_t w = 0; w < W; w++) out[w * channels] = channel[c](in[w]);
      }
  }

  // gradient (patch) += Σ factors[i]·(the patch at pixels[i], counted from row h), of centred channels, but
  // in x's units.
  void add_patches(double* gradient, int64_t h, const int64_t* pixels, const accumulate_t* factors,
                   int64_t count) const {
    const int64_t channels = sizes_.channels(), row = 3 * channels;
    for (int64_t i = 0; i < row; i += 2 * kLanes) {
      Lanes sums[3][2] = {};
      for (int64_t j = 0; j < count; j++) {
        const accumulate_t* const patch = (*this)[h] + pixels[j] * channels + i;
        for (int64_t tap = 0; tap < 3; tap++)
          for (int64_t k = 0; k < 2; k++)
            sums[tap][k] += factors[j] * load_lanes(patch + tap * stride() + k * kLanes);
      }
      for (int64_t tap = 0; tap < 3; tap++) {
        accumulate_t values[2 * kLanes];
        __builtin_memcpy(values, sums[tap], sizeof values);
        for (int64_t k = 0; k < std::min<int64_t>(2 * kLanes, row - i); k++)
          gradient[tap * row + i + k] += values[k] * inverse_[i + k];
      }
    }
  }

 private:
  Sizes sizes_;
  int64_t first_ = 0;
  std::vector<winograd::Line> memory_;
  std::vector<double> inverse_;  // of the units, for three pixels
};

// G of one sample, or of some of its rows.
class Matrix {
 public:
  explicit Matrix(const Sizes& sizes)
      : sizes_(sizes), memory_(lines<double>(sizes.patch() * stride())),
        inner_(lines<accumulate_t>(sizes.channels() * lags())), edges_(3, inner_) {}

  void clear() { std::fill(at(), at() + sizes_.patch() * stride(), 0.0); }

  // Pairs of pixels whose upper one is in the rows [first, last); two rows more are looked at.
  void add(const Rows& rows, int64_t first, int64_t last) {
    const int64_t height = sizes_.height();
    for (int64_t h = first, count; h < last; h += count) {
      const bool under_all_taps = h >= 2 && h < height;
      count = under_all_taps ? std::min({kRowsTogether, height - h, last - h}) : 1;
      for (int64_t down = 0; down < 3; down++) {  // rows that the two are apart
        const int64_t top = std::max<int64_t>(0, h - height + 1), bottom = std::min(2 - down, h);
        if (top > bottom) continue;
        start();
        for (int64_t i = h; i < h + count; i++) add_row(rows[i], rows[i + down], down);
        for (int64_t tap = top; tap <= bottom; tap++) add_to_taps(tap, down);
      }
    }
  }

  // gradient (K, patch) += factor[k]·w[k]·G for filters w (K, C, 3, 3) of centred channels.
  void multiply(double* gradient, const value_t* w, const accumulate_t* factor, const Channel* channel,
                int64_t K) {
    const int64_t patch = sizes_.patch(), channels = sizes_.channels();
    constexpr int64_t kTogether = winograd::kTogether;
    for (int64_t i = 0; i < patch; i++)
      for (int64_t j = 0; j < i; j++) at()[i * stride() + j] = at()[j * stride() + i];
    std::vector<double> inverse(patch);
    for (int64_t i = 0; i < patch; i++) inverse[i] = channel[i % channels].inverse;
    auto memory = lines<double>(patch * kTogether + kTogether * stride());
    double* const filters = reinterpret_cast<double*>(memory.data());
    double* const products = filters + patch * kTogether;
    for (int64_t k = 0; k < K; k += kTogether) {
      for (int64_t i = 0; i < patch; i++) {
        const int64_t c = i % channels;
        for (int64_t j = 0; j < kTogether; j++)
          filters[i * kTogether + j] =
              c < sizes_.C ? w[((k + j) * sizes_.C + c) * kTaps + i / channels] * channel[c].inverse : 0;
      }
      winograd::multiply_block<double, false>({products, stride()}, {filters, kTogether}, {at(), stride()},
                                              stride(), patch);
      for (int64_t j = 0; j < kTogether; j++)
        for (int64_t i = 0; i < patch; i++)
          gradient[(k + j) * patch + i] += factor[k + j] * products[j * stride() + i] * inverse[i];
    }
  }

 private:
  double* at() { return reinterpret_cast<double*>(memory_.data()); }
  int64_t stride() const { return round_up(sizes_.patch(), kStep); }
  int64_t lags() const { return round_up(5 * sizes_.channels(), kStep); }

  void start() {
    std::fill(inner_.begin(), inner_.end(), winograd::Line{});
    for (auto& edge : edges_) std::fill(edge.begin(), edge.end(), winograd::Line{});
  }

  // Products of the pixels in `upper` with those up to two columns away in `lower`: once of the columns that
  // all three taps of a row see, and by tap of those that only it or two of them see.
  void add_row(const accumulate_t* upper, const accumulate_t* lower, int64_t down) {
    const int64_t channels = sizes_.channels(), width = sizes_.width();
    for (int64_t c = 0; c < channels; c += winograd::kTogether) {
      const int64_t left = first_lag(down);
      winograd::multiply_block<accumulate_t, true>(
          {inner_[0].at + c * lags(), lags()}, {upper + 2 * channels + c, channels},
          {lower + (2 + left) * channels, channels}, (3 - left) * channels, width - 2);
      for (int64_t tap = 0; tap < 3; tap++) {
        const int64_t column = tap < 2 ? tap : width, step = (tap == 1 ? width - 1 : 1) * channels;
        const int64_t from = first_tap(tap, down);
        winograd::multiply_block<accumulate_t, true>(
            {edges_[tap][0].at + c * lags(), lags()}, {upper + column * channels + c, step},
            {lower + (column + from - tap) * channels, step}, (3 - from) * channels, 2);
      }
    }
  }

  // In a row by itself, pairs are counted once, from the left.
  static int64_t first_lag(int64_t down) { return down ? -2 : 0; }
  static int64_t first_tap(int64_t tap, int64_t down) { return down ? 0 : tap; }

  void add_to_taps(int64_t row, int64_t down) {
    const int64_t channels = sizes_.channels();
    for (int64_t tap = 0; tap < 3; tap++) {
      const int64_t from = first_tap(tap, down), count = (3 - from) * channels;
      for (int64_t c = 0; c < channels; c++) {
        const int64_t upper = (3 * row + tap) * channels + c, lower = (3 * (row + down) + from) * channels;
        double* out = at() + upper * stride() + lower;
        const accumulate_t* inner = inner_[0].at + c * lags() + (from - tap - first_lag(down)) * channels;
        const accumulate_t* edge = edges_[tap][0].at + c * lags();
        for (int64_t i = 0; i < count; i++) out[i] += double(inner[i]) + double(edge[i]);
      }
    }
  }

  Sizes sizes_;
  std::vector<winograd::Line> memory_;              // (patch, stride)
  std::vector<winograd::Line> inner_;               // sums over a few rows, (channels, lags): under all taps,
  std::vector<std::vector<winograd::Line>> edges_;  // and what each of the three has beside them
};

}  // namespace gram
