// What the CPU kernels share: vectors, and statistics made with them.
#pragma once
#include <algorithm>
#include <cmath>
#include <type_traits>
#include <vector>
#include "norm/formulas.h"
#include "host/host.h"

#if defined(__AVX512F__)
constexpr int kVectorBytes = 64;
#elif defined(__AVX2__)
constexpr int kVectorBytes = 32;
#else
constexpr int kVectorBytes = 16;
#endif
// a register: compilers split wider ones badly.
typedef accumulate_t Lanes __attribute__((vector_size(kVectorBytes), may_alias));
constexpr int kLanes = kVectorBytes / sizeof(accumulate_t);

using Sums = std::vector<accumulate_t>;

constexpr int kAccumulators = 4;  // independent sums, so that an addition need not wait for the one before
constexpr int64_t kBlock = 4096;  // values that share a shift
constexpr int64_t kFew = 16;      // values whose mean it is

// Compilers make a vector's load of the copy, not always of the loop.
template <class T> Lanes load_lanes(const T* values) {
  Lanes lanes;
  if constexpr (std::is_same_v<T, accumulate_t>) {
    __builtin_memcpy(&lanes, values, sizeof lanes);
  } else {
    for (int j = 0; j < kLanes; j++) lanes[j] = accumulate_t(values[j]);
  }
  return lanes;
}

inline void store_lanes(value_t* values, const Lanes& lanes) {
  if constexpr (std::is_same_v<value_t, accumulate_t>) {
    __builtin_memcpy(values, &lanes, sizeof lanes);
  } else {
    for (int j = 0; j < kLanes; j++) values[j] = value_t(lanes[j]);
  }
}

// Moments of `size` contiguous values: sums shifted by about each block's mean, merged by Chan's formula in
// order, in double so that the mean is rounded once.
inline Moments<double> moments_of(const value_t* values, int64_t size) {
  constexpr int64_t kStep = kLanes * kAccumulators;
  Moments<double> moments{0, 0, 0};
  for (int64_t begin = 0; begin < size; begin += kBlock) {
    const int64_t count = std::min(kBlock, size - begin), whole = count / kStep * kStep;
    const value_t* block = values + begin;
    // The mean of a few: a single value may lie far out, and digits are lost with its distance squared.
    double start = 0;
    const int64_t few = std::min(kFew, count);
    for (int64_t i = 0; i < few; i++) start += accumulate_t(block[i]);
    const accumulate_t shift = accumulate_t(start / few);
    Lanes sums[kAccumulators] = {}, squares[kAccumulators] = {};
    for (int64_t i = 0; i < whole; i += kStep)
      for (int j = 0; j < kAccumulators; j++) {
        const Lanes d = load_lanes(block + i + j * kLanes) - shift;
        sums[j] += d, squares[j] += d * d;
      }
    Lanes sum = sums[0], square = squares[0];
    for (int j = 1; j < kAccumulators; j++) sum += sums[j], square += squares[j];
    accumulate_t total = 0, total_square = 0;
    for (int lane = 0; lane < kLanes; lane++) total += sum[lane], total_square += square[lane];
    for (int64_t i = whole; i < count; i++) {
      const accumulate_t d = accumulate_t(block[i]) - shift;
      total += d, total_square += d * d;
    }
    moments = moments.merge(Moments<double>::from_shifted(count, shift, total, total_square));
  }
  return moments;
}

// mean and m2 (planes) of v (planes, size).
inline void plane_statistics(accumulate_t* mean, accumulate_t* m2, const value_t* v, int64_t planes,
                             int64_t size) {
  host::parallel_for(planes, 1, [=](int64_t begin, int64_t end) {
    for (int64_t plane = begin; plane < end; plane++) {
      const Moments<double> moments = moments_of(v + plane * size, size);
      mean[plane] = moments.mean, m2[plane] = moments.m2;
    }
  });
}

// mean and standard deviation (planes) of v (planes, size): of values whose squares overflow, too.
inline void plane_deviations(accumulate_t* mean, accumulate_t* deviation, const value_t* v, int64_t planes,
                             int64_t size) {
  host::parallel_for(planes, 1, [=](int64_t begin, int64_t end) {
    for (int64_t plane = begin; plane < end; plane++) {
      const value_t* const values = v + plane * size;
      Moments<double> moments = moments_of(values, size);
      if (!std::isfinite(moments.m2)) {
        double sum = 0, square = 0;  // less the first value
        for (int64_t i = 0; i < size; i++) {
          const double d = double(accumulate_t(values[i])) - double(accumulate_t(values[0]));
          sum += d, square += d * d;
        }
        moments = Moments<double>::from_shifted(double(size), accumulate_t(values[0]), sum, square);
      }
      mean[plane] = moments.mean, deviation[plane] = std::sqrt(moments.variance());
    }
  });
}

// totals (count), of C or 1 elements, from values (rows, C): summed over the rows, and over all where there
// is one.
template <class T>
void sum_rows(accumulate_t* totals, int64_t count, const T* values, int64_t rows, int64_t C) {
  std::vector<double> sums(count);
  for (int64_t i = 0; i < rows * C; i++) sums[count == 1 ? 0 : i % C] += values[i];
  for (int64_t c = 0; c < count; c++) totals[c] = accumulate_t(sums[c]);
}

inline void merge_groups(accumulate_t* group_mean, accumulate_t* group_rstd, const accumulate_t* mean,
                         const accumulate_t* m2, const accumulate_t* conv_bias, accumulate_t eps,
                         GroupShape shape) {
  for (int64_t i = 0; i < shape.N * shape.G; i++)
    merge_group(group_mean, group_rstd, mean, m2, conv_bias, eps, shape, i / shape.G, i % shape.G);
}

inline void group_gradients(accumulate_t* coefficients, accumulate_t* gradients, const accumulate_t* sums,
                            const accumulate_t* mean, const accumulate_t* group_mean,
                            const accumulate_t* group_rstd, const accumulate_t* conv_bias,
                            const accumulate_t* weight, GroupShape shape) {
  for (int64_t i = 0; i < shape.N * shape.G; i++)
    group_gradient(coefficients, gradients, sums, mean, group_mean, group_rstd, conv_bias, weight, shape,
                   i / shape.G, i % shape.G);
}
