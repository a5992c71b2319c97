// PyTorch's scalar semantics, forward and backward, and numerically safe statistics: the same code on CPU and
// GPU.
#pragma once
#include "core/scalar.h"

// min(x, bound) and max(x, bound) as torch.min and torch.max: NaN in x wins.
template <class T> HOST_DEVICE T minimum(T x, T bound) { return x > bound ? bound : x; }
template <class T> HOST_DEVICE T maximum(T x, T bound) { return x < bound ? bound : x; }

// torch.clamp: NaN stays NaN; low > high gives high.
template <class T> HOST_DEVICE T clamp(T x, T low, T high) { return minimum(maximum(x, low), high); }

// Does d clamp(x, low, high) / dx let the gradient pass? Yes at either bound, no at NaN.
template <class T> HOST_DEVICE bool clamp_passes(T x, T low, T high) { return x >= low && x <= high; }

// Does `candidate` replace `best` in a running maximum? The first among ties and the first NaN stay.
template <class T> HOST_DEVICE bool replaces_maximum(T candidate, T best) {
  return candidate > best || (candidate != candidate && best == best);
}

// Count, mean and sum of squared deviations of a set of values.
template <class T> struct Moments {
  T count, mean, m2;

  // From sums of (v - shift) and (v - shift)²: exact at any mean as long as the shift is one of the values.
  // A square that overflows makes the variance infinite, as in a running (Welford) update.
  HOST_DEVICE static Moments from_shifted(T count, T shift, T sum, T square) {
    if (count == T(0)) return {T(0), T(0), T(0)};
    T mean = sum / count, m2 = square - sum * mean;
    if (square == square && square - square != T(0)) m2 = square;  // +inf
    return {count, shift + mean, m2 < T(0) ? T(0) : m2};
  }

  // Chan's formula: the moments of the union.
  HOST_DEVICE Moments merge(const Moments& other) const {
    if (count == T(0)) return other;  // a deviation that overflows, times no values, would be NaN
    if (other.count == T(0)) return *this;
    T total = count + other.count, delta = other.mean - mean, share = other.count / total;
    return {total, mean + delta * share, m2 + other.m2 + delta * delta * count * share};
  }

  HOST_DEVICE T variance() const { return m2 / count; }  // biased, as the normalisations use it
};
