// A convolution with 3×3 or depth×3×3 filters on the CPU, without bias or stride: Winograd's F(2×2,
// 3×3). From a tile d of 4×4 pixels and a filter g come 2×2 outputs
//   Aᵀ ((G g Gᵀ) ∘ (Bᵀ d B)) A,
// where ∘, summed over channels in and depth, is 16 products of matrices: 2.25 times fewer multiplications
// than in direct sums. A thread takes kChunk tiles from pixels to results, so that all it makes on the way
// stays in its core's cache.
//
// An output depends on the pixels of its own window only, here as in direct sums: what is not finite spreads
// no further. But it may be NaN where direct sums give an infinity, and pixels near the largest number may
// overflow on the way.
#pragma once
#include <algorithm>
#include <vector>
#include "cpu/lanes.h"
#include "host/host.h"

namespace winograd {

using load::kLanes;
template <class T> using Vector __attribute__((vector_size(load::kRegister), may_alias)) = T;
using Lanes = Vector<accumulate_t>;

// Vectors side by side: kTogether·kAcross sums and what they need fit the registers, and hide an addition's
// latency.
#if defined(__AVX512F__) || defined(__aarch64__)
constexpr int kAcross = 2;
#else
constexpr int kAcross = 1;
#endif
// 1: the products of kAtOnce channels and of a column of tiles, four elements, stay in registers until they
// are results. Each sum then takes filters of its own. Where those have to be loaded before they are
// multiplied, as on AVX2, that takes twice as long (benchmarks/NOTES.md), and they wait in memory.
#ifndef WINOGRAD_IN_REGISTERS
#ifdef __AVX512F__
#define WINOGRAD_IN_REGISTERS 1
#else
#define WINOGRAD_IN_REGISTERS 0
#endif
#endif
constexpr int kAtOnce = 4;
// GCC would load a vector anew for each product, and loads are what bounds them.
#if defined(__x86_64__)
#define KEEP_IN_REGISTER(vector) asm("" : "+v"(vector))
#else
#define KEEP_IN_REGISTER(vector)
#endif
struct alignas(64) Line {
  accumulate_t at[64 / sizeof(accumulate_t)];
};  // of a cache

constexpr int64_t kChunk = 64;             // tiles of a plane
constexpr int64_t kOutputs = 32;           // channels out whose products wait for each other
constexpr int64_t kTogether = 8;           // rows of products that are summed together
constexpr int64_t kTerms = 32;             // of a sum, that are summed by themselves
constexpr int64_t kRow = kChunk + kLanes;  // a row of tiles, and room for the last vector of a run
constexpr int64_t kApart =
    sizeof(Line) /
    sizeof(
        accumulate_t);  // between elements, so that the rows of 16 do not fall into the same sets of a cache

// x (N, C, D, H, W), weight (K, C, depth, 3, 3), results (N, K, planes, height, width); in 2-D D = depth = 1.
// So many zeros lie around x: before, above and left of it, and as many on the other sides.
struct Sizes {
  int64_t N, C, K, D, H, W, depth, before = 0, above = 0, left = 0;
  int64_t terms() const { return C * depth; }  // of an output's sum
  int64_t planes() const { return D + 2 * before - depth + 1; }
  int64_t height() const { return H + 2 * above - 2; }
  int64_t width() const { return W + 2 * left - 2; }
  int64_t across() const { return (width() + 1) / 2; }  // tiles
};

// Consecutive tiles of one row of tiles: the first's row and column, their number, and their place in the
// chunk.
struct Run {
  int64_t row, column, count, at;
};
inline std::vector<Run> runs_of(int64_t first, int64_t count, int64_t across) {
  std::vector<Run> runs;
  for (int64_t at = 0; at < count; at += runs.back().count) {
    const int64_t row = (first + at) / across, column = (first + at) % across;
    runs.push_back({row, column, std::min(count - at, across - column), at});
  }
  return runs;
}

// G g Gᵀ of all filters, (16, K / kTogether, depth, C, kTogether), in double precision but for the last
// rounding.
inline std::vector<Line> transformed(const value_t* weight, const Sizes& sizes) {
  constexpr int64_t block = kTogether;
  const int64_t terms = sizes.terms();
  std::vector<Line> memory(16 * sizes.K * terms * sizeof(accumulate_t) / sizeof(Line) + 1);
  accumulate_t* const out = memory[0].at;
  const auto times_g = [](double (&result)[4], double a, double b, double c) {
    result[0] = a, result[1] = (a + b + c) / 2, result[2] = (a - b + c) / 2, result[3] = c;
  };
  host::parallel_for(sizes.K, 8, [=](int64_t begin, int64_t end) {
    for (int64_t k = begin; k < end; k++)
      for (int64_t r = 0; r < terms; r++) {
        const value_t* g = weight + ((k * sizes.C + r % sizes.C) * sizes.depth + r / sizes.C) * 9;
        double columns[3][4], row[4];
        for (int j = 0; j < 3; j++) times_g(columns[j], double(g[j]), double(g[3 + j]), double(g[6 + j]));
        for (int i = 0; i < 4; i++) {
          times_g(row, columns[0][i], columns[1][i], columns[2][i]);
          for (int j = 0; j < 4; j++)
            out[(((4 * i + j) * (sizes.K / block) + k / block) * terms + r) * block + k % block] =
                accumulate_t(row[j]);
        }
      }
  });
  return memory;
}

// Bᵀ times (a, b, c, d), for `count` neighbours at `step`.
inline void times_b(accumulate_t* __restrict out0, accumulate_t* __restrict out1,
                    accumulate_t* __restrict out2, accumulate_t* __restrict out3, const accumulate_t* a,
                    const accumulate_t* b, const accumulate_t* c, const accumulate_t* d, int64_t count,
                    int64_t step) {
  for (int64_t i = 0; i < count; i++) {
    const accumulate_t p = a[i * step], q = b[i * step], r = c[i * step], s = d[i * step];
    out0[i] = p - r, out1[i] = q + r, out2[i] = r - q, out3[i] = q - s;
  }
}

// values[i] = row[left + i] for i below count; what lies outside the row's W is zero, up to `width`.
inline void read_row(accumulate_t* values, const value_t* row, int64_t W, int64_t left, int64_t count,
                     int64_t width) {
  const int64_t first = std::clamp<int64_t>(-left, 0, count),
                last = std::clamp<int64_t>(W - left, first, count);
  for (int64_t w = 0; w < first; w++) values[w] = 0;
  for (int64_t w = first; w < last; w++) values[w] = accumulate_t(row[left + w]);
  for (int64_t w = last; w < width; w++) values[w] = 0;
}

// Bᵀ d B of a run's tiles in one plane: element e of a tile to tiles[e·stride + its place]. Pixels outside
// the plane are zero; the first tile's begin `above` and `left` of it. Whole vectors are written; what lies
// behind the run belongs to the next one, which comes later, or to nobody.
inline void transform_input(accumulate_t* tiles, int64_t stride, const value_t* plane, int64_t H, int64_t W,
                            const Run& run, int64_t above = 0, int64_t left = 0) {
  const int64_t count = (run.count + kLanes - 1) / kLanes * kLanes, width = 2 * count + kLanes;
  accumulate_t pixels[4][2 * kChunk + kLanes], half[4][2 * kChunk + kLanes];
  for (int64_t i = 0; i < 4; i++) {
    const int64_t h = 2 * run.row + i - above, real = 0 <= h && h < H ? 2 * run.count + 2 : 0;
    read_row(pixels[i], plane + h * W, W, 2 * run.column - left, real, width);
  }
  times_b(half[0], half[1], half[2], half[3], pixels[0], pixels[1], pixels[2], pixels[3], width, 1);
  for (int64_t i = 0; i < 4; i++) {
    accumulate_t* out = tiles + 4 * i * stride + run.at;
    times_b(out, out + stride, out + 2 * stride, out + 3 * stride, half[i], half[i] + 1, half[i] + 2,
            half[i] + 3, count, 2);
  }
}

// A matrix's rows lie `stride` apart.
template <class T> struct Matrix {
  T* at;
  int64_t stride;
};

using Factor = Matrix<const accumulate_t>;

// products (kTogether, kVectors) = a (terms, kTogether) · b (terms, kVectors), summed over the terms; in
// vectors, those of b need not be aligned. kAdds: it is added to what products hold.
template <class T, bool kAdds, int kVectors>
inline void multiply_vectors(Matrix<T> products, Matrix<const T> a, Matrix<const T> b, int64_t terms) {
  constexpr int kSize = sizeof(Vector<T>) / sizeof(T);
  Vector<T> sum[kTogether][kVectors] = {};
  for (int64_t r = 0; r < terms; r++) {
    Vector<T> row[kVectors];
    for (int j = 0; j < kVectors; j++) {
      __builtin_memcpy(&row[j], b.at + r * b.stride + j * kSize, sizeof row[j]);
      KEEP_IN_REGISTER(row[j]);
    }
    for (int k = 0; k < kTogether; k++)
      for (int j = 0; j < kVectors; j++) sum[k][j] += a.at[r * a.stride + k] * row[j];
  }
  for (int k = 0; k < kTogether; k++)
    for (int j = 0; j < kVectors; j++) {
      Vector<T>& product = reinterpret_cast<Vector<T>*>(products.at + k * products.stride)[j];
      product = kAdds ? product + sum[k][j] : sum[k][j];
    }
}

// The same for any width in whole vectors.
template <class T, bool kAdds>
inline void multiply_block(Matrix<T> products, Matrix<const T> a, Matrix<const T> b, int64_t width,
                           int64_t terms) {
  constexpr int kSize = sizeof(Vector<T>) / sizeof(T), kWide = kAcross * kSize;
  const int64_t even = width / kWide * kWide;
  for (int64_t t = 0; t < even; t += kWide)
    multiply_vectors<T, kAdds, kAcross>({products.at + t, products.stride}, a, {b.at + t, b.stride}, terms);
  for (int64_t t = even; t < width; t += kSize)
    multiply_vectors<T, kAdds, 1>({products.at + t, products.stride}, a, {b.at + t, b.stride}, terms);
}

// Products whose terms are summed in blocks, and then the blocks: the error hardly grows with their number.
inline void multiply(Matrix<accumulate_t> products, Factor a, Factor b, int64_t width, int64_t terms) {
  multiply_block<accumulate_t, false>(products, a, b, width, std::min(kTerms, terms));
  for (int64_t r = kTerms; r < terms; r += kTerms)
    multiply_block<accumulate_t, true>(products, {a.at + r * a.stride, a.stride},
                                       {b.at + r * b.stride, b.stride}, width, std::min(kTerms, terms - r));
}

// Aᵀ m A of one channel's tiles, two rows of outputs each. Element e of a tile is m[e·stride + its place].
inline void transform_output(accumulate_t (&rows)[2][2 * kChunk], const accumulate_t* m, int64_t stride) {
  accumulate_t half[2][4][kChunk];
  for (int64_t k = 0; k < 4; k++) {
    const accumulate_t *a = m + k * stride, *b = a + 4 * stride, *c = a + 8 * stride, *d = a + 12 * stride;
    for (int64_t j = 0; j < kChunk; j++)
      half[0][k][j] = a[j] + b[j] + c[j], half[1][k][j] = b[j] - c[j] - d[j];
  }
  for (int64_t i = 0; i < 2; i++)
    for (int64_t j = 0; j < kChunk; j++) {
      rows[i][2 * j] = half[i][0][j] + half[i][1][j] + half[i][2][j];
      rows[i][2 * j + 1] = half[i][1][j] - half[i][2][j] - half[i][3][j];
    }
}

// Of a vector of tiles: kAtOnce channels' two rows of results, whose even and odd columns are apart.
using Outputs = Lanes[2][2][kAtOnce];

// Sums of `terms` products for the four elements in a column of the tiles, filters and tiles `of_filters` and
// `of_tiles` apart.
inline void sum_terms(Lanes (&sum)[4][kAtOnce], const accumulate_t* filters, int64_t of_filters,
                      const accumulate_t* tiles, int64_t of_tiles, int64_t terms) {
  for (auto& row : sum)
    for (Lanes& each : row) each = Lanes{};
  for (int64_t r = 0; r < terms; r++)
    for (int i = 0; i < 4; i++) {
      Lanes pixels;
      __builtin_memcpy(&pixels, tiles + i * of_tiles + r * kRow, sizeof pixels);
      KEEP_IN_REGISTER(pixels);
      for (int k = 0; k < kAtOnce; k++) sum[i][k] += filters[i * of_filters + r * kTogether + k] * pixels;
    }
}

// Aᵀ m A, where m is the sum over the terms of filters (16, …, terms, kTogether), elements `of_filters`
// apart, times tiles (16, …, terms, kRow), `of_tiles` apart. Column by column, so that of m no more than a
// column is there at a time, in registers. Terms are summed in blocks, and then the blocks: the error hardly
// grows with their number.
inline void outputs_of(Outputs& outputs, const accumulate_t* filters, int64_t of_filters,
                       const accumulate_t* tiles, int64_t of_tiles, int64_t terms) {
  Lanes half[4][2][kAtOnce];
  for (int column = 0; column < 4; column++) {
    const accumulate_t *const f = filters + column * of_filters, *const t = tiles + column * of_tiles;
    Lanes m[4][kAtOnce];
    sum_terms(m, f, 4 * of_filters, t, 4 * of_tiles, std::min(kTerms, terms));
    for (int64_t r = kTerms; r < terms; r += kTerms) {
      Lanes block[4][kAtOnce];
      sum_terms(block, f + r * kTogether, 4 * of_filters, t + r * kRow, 4 * of_tiles,
                std::min(kTerms, terms - r));
      for (int i = 0; i < 4; i++)
        for (int k = 0; k < kAtOnce; k++) m[i][k] += block[i][k];
    }
    for (int k = 0; k < kAtOnce; k++) {
      half[column][0][k] = m[0][k] + m[1][k] + m[2][k];
      half[column][1][k] = m[1][k] - m[2][k] - m[3][k];
    }
  }
  for (int i = 0; i < 2; i++)
    for (int k = 0; k < kAtOnce; k++) {
      outputs[i][0][k] = half[0][i][k] + half[1][i][k] + half[2][i][k];
      outputs[i][1][k] = half[1][i][k] - half[2][i][k] - half[3][i][k];
    }
}

}  // namespace winograd
