// The gradient of depth×3×3 filters on the CPU where most gradients g of results are zero, as behind a pool
// or an extreme over channels:
//   dweight[k, c, i, j, l] = Σ g[n, k, d, h, w] · x[n, c, d + i, h + j, w + l], over the places where g isn't
//   zero.
// At such a place a row of taps meets a run of pixels, channels side by side, all of which g multiplies. So x
// is turned, with its channels last, and a row's sums are vectors that stay in registers from place to place.
// What is not finite in x would meet zeros, too: then all is NaN, and the library says what it is.
//
// Sums are float32 over kStrips strips of positions, and double beyond, in an order that the sizes alone fix.
#pragma once
#include <cmath>
#include <cstring>
#include "cpu/winograd_gradient.h"

namespace picked {

using load::kLanes, winograd::Lanes, winograd::Line, winograd::Sizes;

constexpr int64_t kRows = 3, kStrips = 8;  // of a plane of a filter; of float32 sums
constexpr int kAcross = 8;  // vectors of sums at a time, so that additions don't wait for one another

// A gradient that isn't zero, and the first pixel that a filter meets there.
struct Place {
  accumulate_t g;
  const value_t* pixels;
};

// sums (kTogether rows, kVectors of their vectors) += Σ g · the vectors of pixels that lie `offset` on, a row
// `down` the last.
template <int kVectors, int kTogether = 1>
inline void add(accumulate_t* sums, int64_t row, const Place* places, int64_t count, int64_t offset,
                int64_t down) {
  Lanes sum[kTogether][kVectors];
  const auto own = [&](int i, int j) -> Lanes& {
    return *reinterpret_cast<Lanes*>(sums + i * row + j * kLanes);
  };
  for (int i = 0; i < kTogether; i++)
    for (int j = 0; j < kVectors; j++) sum[i][j] = own(i, j);
  for (int64_t place = 0; place < count; place++) {
    const value_t* const pixels = places[place].pixels + offset;
    const accumulate_t g = places[place].g;
    for (int i = 0; i < kTogether; i++)
      for (int j = 0; j < kVectors; j++) {
        Lanes values;
        memcpy(&values, pixels + i * down + j * kLanes, sizeof values);
        sum[i][j] += values * g;
      }
  }
  for (int i = 0; i < kTogether; i++)
    for (int j = 0; j < kVectors; j++) own(i, j) = sum[i][j];
}
template <int kVectors>
inline void add_at_most(int64_t vectors, accumulate_t* sums, const Place* places, int64_t count,
                        int64_t offset) {
  if (vectors >= kVectors) add<kVectors>(sums, 0, places, count, offset, 0);
  else if constexpr (kVectors > 1) add_at_most<kVectors - 1>(vectors, sums, places, count, offset);
}

inline bool are_zero(const value_t* from) {
  uint64_t words[kLanes * sizeof(value_t) / 8], any = 0;
  memcpy(words, from, sizeof words);
  for (const uint64_t each : words) any |= each;
  return !any;
}

class FilterSums {
 public:
  FilterSums(const value_t* x, const Sizes& sizes, int64_t shares)
      : sizes_(sizes), shares_(shares), row_((3 * sizes.C + kLanes - 1) / kLanes * kLanes),
        partial_(shares * share()) {
    if (shares) turn(x);
  }

  void merge(value_t* dweight) {
    const int64_t C = sizes_.C, rows = sizes_.depth * kRows;
    host::parallel_for(sizes_.K, kLanes, [&](int64_t begin, int64_t end) {
      for (int64_t k = begin; k < end; k++) {
        double* const sums = partial_.data() + k * rows * row_;
        for (int64_t other = 1; other < shares_; other++)
          for (int64_t i = 0; i < rows * row_; i++) sums[i] += sums[other * share() + i];
        for (int64_t c = 0; c < C; c++)
          for (int64_t row = 0; row < rows; row++)
            for (int64_t l = 0; l < 3; l++)
              dweight[((k * C + c) * rows + row) * 3 + l] =
                  finite_ ? value_t(sums[row * row_ + l * C + c]) : NAN;
      }
    });
  }

  class Thread {
   public:
    explicit Thread(FilterSums& of)
        : of_(of), memory_(of.share() * sizeof(accumulate_t) / sizeof(Line) + 1), sums_(memory_[0].at) {}

    // A strip of one plane; as Winograd's.
    template <class Strip, class Make, class To>
    void add(int64_t share, const Strip& strip, const Make& make, const To& to) {
      const int64_t K = of_.sizes_.K;
      for (int64_t k = 0; k < K; k += kLanes) {
        const int64_t count = std::min<int64_t>(kLanes, K - k);
        make(k);
        for (int64_t i = 0; i < count; i++) find(strip, k + i, to, found_[i]);
        add_places(k, count);
      }
      if (++strips_ == kStrips) end(share);
    }
    void end(int64_t share) {
      double* const totals = of_.partial_.data() + share * of_.share();
      for (int64_t i = 0; i < of_.share(); i++) totals[i] += sums_[i], sums_[i] = 0;
      strips_ = 0;
    }

   private:
    struct Found {
      std::vector<Place> places;
      int64_t count;
    };
    template <class Strip, class To> void find(const Strip& strip, int64_t k, const To& to, Found& found) {
      const Sizes& sizes = of_.sizes_;
      const int64_t width = sizes.width(), plane = (strip.n * sizes.K + k) * sizes.planes() + strip.plane;
      const value_t* const gradients = to(k) + plane * sizes.height() * width;
      found.places.resize(strip.rows * strip.columns + 1);
      int64_t at = 0;
      for (int64_t h = strip.row; h < strip.row + strip.rows; h++) {
        const value_t* const row =
            of_.turned() + ((strip.n * sizes.D + strip.plane) * sizes.H + h) * sizes.W * sizes.C;
        const int64_t end = strip.column + strip.columns;
        for (int64_t first = strip.column; first < end; first += kLanes) {
          const value_t* const from = gradients + h * width + first;
          const int64_t count = std::min<int64_t>(kLanes, end - first);
          if (count == kLanes && are_zero(from)) continue;
          for (int64_t w = 0; w < count; w++) {
            found.places[at] = {accumulate_t(from[w]), row + (first + w) * sizes.C};
            at += from[w] != 0;
          }
        }
      }
      found.count = at;
    }
    // Of `count` channels from k on, one row of taps after the other, so that the pixels that these meet are
    // near. Of few channels in, a plane's rows are summed together.
    void add_places(int64_t k, int64_t count) {
      const Sizes& sizes = of_.sizes_;
      const int64_t rows = sizes.depth * kRows, down = sizes.W * sizes.C, vectors = of_.row_ / kLanes;
      for (int64_t row = 0; row < rows; row += vectors > 2 ? 1 : kRows) {
        const int64_t pixels = row / kRows * sizes.H * down + row % kRows * down;
        for (int64_t i = 0; i < count; i++) {
          accumulate_t* const sums = sums_ + ((k + i) * rows + row) * of_.row_;
          const Place* const places = found_[i].places.data();
          const int64_t found = found_[i].count;
          if (vectors == 1) picked::add<1, kRows>(sums, of_.row_, places, found, pixels, down);
          else if (vectors == 2) picked::add<2, kRows>(sums, of_.row_, places, found, pixels, down);
          else
            for (int64_t at = 0; at < vectors; at += kAcross)
              add_at_most<kAcross>(vectors - at, sums + at * kLanes, places, found, pixels + at * kLanes);
        }
      }
    }
    FilterSums& of_;
    std::vector<Line> memory_;
    accumulate_t* const sums_;  // (K, depth·kRows, row_)
    Found found_[kLanes];
    int64_t strips_ = 0;
  };

 private:
  int64_t share() const { return sizes_.K * sizes_.depth * kRows * row_; }
  value_t* turned() { return x_[0].at; }

  // x (N, C, D, H, W) to (N, D, H, W, C), and is it finite?
  void turn(const value_t* x) {
    const int64_t C = sizes_.C, W = sizes_.W, plane = sizes_.D * sizes_.H * W,
                  rows = sizes_.N * sizes_.D * sizes_.H;
    x_.resize((rows * W * C + kLanes) * sizeof(value_t) / sizeof(Line) +
              1);  // a row's last vector may end behind the last pixel
    std::vector<uint8_t> odd(rows);
    host::parallel_for(rows, 16, [&](int64_t begin, int64_t end) {
      for (int64_t row = begin; row < end; row++) {
        const value_t* const from = x + row / (plane / W) * C * plane + row % (plane / W) * W;
        value_t* const to = turned() + row * W * C;
        accumulate_t zero = 0;
        for (int64_t c = 0; c < C; c++)
          for (int64_t w = 0; w < W; w++)
            to[w * C + c] = from[c * plane + w], zero += 0 * accumulate_t(from[c * plane + w]);
        odd[row] = zero != 0;
      }
    });
    for (const uint8_t each : odd) finite_ &= !each;
  }

  const Sizes sizes_;
  const int64_t shares_, row_;   // sums of a row of taps: channels in side by side, in whole vectors
  std::vector<double> partial_;  // (shares, K, depth·kRows, row_)
  std::vector<Line> x_;          // (N, D, H, W, C)
  bool finite_ = true;
};

}  // namespace picked
