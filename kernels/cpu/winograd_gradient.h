// The gradient of 3×3 filters on the CPU, for winograd.h's convolution in 2-D: the same tiles, transposed.
// From a tile d of 4×4 pixels and the gradients g of its 2×2 outputs comes
//   Gᵀ ((Bᵀ d B) ∘ (A g Aᵀ)) G,
// where ∘, summed over all tiles of all samples, is 16 products of matrices: 2.25 times fewer multiplications
// than in direct sums. As G comes last, it is applied once. A thread takes kChunk tiles at a time, and forms
// g as it needs it.
//
// Sums are float32 over a chunk's tiles, then over a part's chunks; those of the parts are double. So the
// result depends on the number of parts, and on nothing else that may change between two calls.
//
// What is not finite in a pixel or a gradient makes each sum not finite that has it in direct sums too; but
// it may reach others, and give NaN for an infinity.
#pragma once
#include <utility>
#include "cpu/winograd.h"

namespace winograd {

constexpr int64_t kPixels = 2 * kChunk + kLanes;  // of a row of pixels, in whole vectors

// Channels in are padded to whole vectors.
inline int64_t padded(int64_t C) { return (C + kLanes - 1) / kLanes * kLanes; }

// (a[first], b[first], a[first + 1], …)
template <size_t... I>
inline Lanes interleaved(const Lanes& a, const Lanes& b, size_t first, std::index_sequence<I...>) {
  return Lanes{(I % 2 ? b : a)[first + I / 2]...};
}

// A square of vectors. log2(kLanes) perfect shuffles of the rows are the transposition.
inline void transpose(Lanes (&square)[kLanes]) {
  constexpr std::make_index_sequence<kLanes> all{};
  for (int step = 1; step < kLanes; step *= 2) {
    Lanes next[kLanes];
    for (int i = 0; i < kLanes / 2; i++) {
      next[2 * i] = interleaved(square[i], square[i + kLanes / 2], 0, all);
      next[2 * i + 1] = interleaved(square[i], square[i + kLanes / 2], kLanes / 2, all);
    }
    for (int i = 0; i < kLanes; i++) square[i] = next[i];
  }
}

// Rows of pixels of kLanes channels, as a vector of channels for each pixel. read(channel, row, values) gives
// the first values of a channel's row and returns their number; the others, up to `count`, are zero.
template <int64_t kRows, class Read>
inline void side_by_side(Lanes (&pixels)[kRows][kPixels], int64_t count, const Read& read) {
  alignas(64) accumulate_t values[kRows][kLanes][kPixels];
  const int64_t whole = (count + kLanes - 1) / kLanes * kLanes;
  for (int64_t c = 0; c < kLanes; c++)
    for (int64_t i = 0; i < kRows; i++)
      for (int64_t w = read(c, i, values[i][c]); w < whole; w++) values[i][c][w] = 0;
  for (int64_t i = 0; i < kRows; i++)
    for (int64_t w = 0; w < whole; w += kLanes) {
      Lanes square[kLanes];
      for (int64_t c = 0; c < kLanes; c++) square[c] = *reinterpret_cast<Lanes*>(values[i][c] + w);
      transpose(square);
      for (int64_t c = 0; c < kLanes; c++) pixels[i][w + c] = square[c];
    }
}

struct Quadruple {
  Lanes at[4];
};
inline Quadruple times_b(const Lanes& a, const Lanes& b, const Lanes& c, const Lanes& d) {
  return {{a - c, b + c, c - b, b - d}};
}
inline Quadruple times_a(const Lanes& a, const Lanes& b) { return {{a, a + b, a - b, -b}}; }

// Tiles (16, kChunk, channels) of one operand, the elements a little apart so that they share no cache set.
struct Tiles {
  accumulate_t* at;
  int64_t channels;
  static int64_t size(int64_t channels) { return 16 * (kChunk * channels + kLanes); }
  accumulate_t* element(int64_t e) const { return at + e * (kChunk * channels + kLanes); }
  void store(const Quadruple& row, int64_t i, int64_t tile, int64_t channel) const {
    for (int64_t j = 0; j < 4; j++)
      *reinterpret_cast<Lanes*>(element(4 * i + j) + tile * channels + channel) = row.at[j];
  }
};

// Bᵀ d B of a run's tiles, for kLanes channels of sample x from c on.
inline void transform_pixels(const Tiles& tiles, const value_t* x, const Sizes& sizes, int64_t c,
                             const Run& run) {
  Lanes pixels[4][kPixels];
  const int64_t count = 2 * run.count + 2, left = 2 * run.column - sizes.left;
  side_by_side(pixels, count, [&](int64_t channel, int64_t i, accumulate_t* values) {
    const int64_t h = 2 * run.row + i - sizes.above;
    if (c + channel >= sizes.C || h < 0 || h >= sizes.H) return int64_t(0);
    read_row(values, x + ((c + channel) * sizes.H + h) * sizes.W, sizes.W, left, count, count);
    return count;
  });
  const auto column = [&](int64_t w) {
    return times_b(pixels[0][w], pixels[1][w], pixels[2][w], pixels[3][w]);
  };
  Quadruple first = column(0), second = column(1);
  for (int64_t j = 0; j < run.count; j++) {
    const Quadruple third = column(2 * j + 2), fourth = column(2 * j + 3);
    for (int64_t i = 0; i < 4; i++)
      tiles.store(times_b(first.at[i], second.at[i], third.at[i], fourth.at[i]), i, run.at + j, c);
    first = third, second = fourth;
  }
}

// A g Aᵀ of a run's tiles, for kLanes channels from k on of sample n, stored from channel `place` on.
template <class Gradient>
inline void transform_gradients(const Tiles& tiles, const Sizes& sizes, int64_t n, int64_t k, int64_t place,
                                const Run& run, const Gradient& gradient) {
  Lanes pixels[2][kPixels];
  side_by_side(pixels, 2 * run.count, [&](int64_t channel, int64_t i, accumulate_t* values) {
    const int64_t h = 2 * run.row + i, left = 2 * run.column;
    if (k + channel >= sizes.K || h >= sizes.height()) return int64_t(0);
    const int64_t real = std::min(2 * run.count, sizes.width() - left);
    const int64_t plane = n * sizes.K + k + channel;
    gradient(values, k + channel, (plane * sizes.height() + h) * sizes.width() + left, real);
    return real;
  });
  for (int64_t j = 0; j < run.count; j++) {
    const Quadruple left = times_a(pixels[0][2 * j], pixels[1][2 * j]);
    const Quadruple right = times_a(pixels[0][2 * j + 1], pixels[1][2 * j + 1]);
    for (int64_t i = 0; i < 4; i++) tiles.store(times_a(left.at[i], right.at[i]), i, run.at + j, place);
  }
}

// dweight (K, C, 3, 3): Gᵀ M G of the parts' sums M (parts, 16, K, padded C).
inline void merge_parts(value_t* dweight, const accumulate_t* sums, const Sizes& sizes, int64_t parts) {
  const int64_t width = padded(sizes.C), stride = sizes.K * width;
  const auto times_g = [](double (&result)[3], double a, double b, double c, double d) {
    result[0] = a + (b + c) / 2, result[1] = (b - c) / 2, result[2] = (b + c) / 2 + d;
  };
  host::parallel_for(sizes.K, 8, [=, &sizes](int64_t begin, int64_t end) {
    std::vector<double> totals(16 * width);
    for (int64_t k = begin; k < end; k++) {
      std::fill(totals.begin(), totals.end(), 0);
      for (int64_t part = 0; part < parts; part++)
        for (int64_t e = 0; e < 16; e++)
          for (int64_t c = 0; c < width; c++)
            totals[e * width + c] += sums[(part * 16 + e) * stride + k * width + c];
      for (int64_t c = 0; c < sizes.C; c++) {
        const double* const m = totals.data() + c;
        double columns[4][3], row[3];
        for (int64_t j = 0; j < 4; j++)
          times_g(columns[j], m[j * width], m[(4 + j) * width], m[(8 + j) * width], m[(12 + j) * width]);
        for (int64_t i = 0; i < 3; i++) {
          times_g(row, columns[0][i], columns[1][i], columns[2][i], columns[3][i]);
          for (int64_t j = 0; j < 3; j++) dweight[((k * sizes.C + c) * 3 + i) * 3 + j] = value_t(row[j]);
        }
      }
    }
  });
}

}  // namespace winograd
