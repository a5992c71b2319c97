// Extremes as torch has them.
#pragma once
#include "load/pack.cuh"

namespace load {

// The largest (sign > 0) or smallest value and its place: the first among ties. NaN comes before all: the
// first with `take`, as torch has it in reductions, the last with `take_last`, as in its pools.
template <int sign, class T> struct Extreme {
  T value;
  int index = -1;
  // Both say whether x is now the value.
  __device__ __forceinline__ bool take(T x, int64_t place) { return set(x, place, x != x && value == value); }
  __device__ __forceinline__ bool take_last(T x, int64_t place, bool inside = true) {
    return set(x, place, x != x, inside);
  }
  // Of two that have taken other places in the same way.
  __device__ __forceinline__ void merge(const Extreme& other) {
    const bool is_nan = value != value, other_is = other.value != other.value;
    const bool before = other.index < index, alike = is_nan ? other_is : other.value == value;
    const bool further =
        other_is ? !is_nan : !is_nan && (sign > 0 ? other.value > value : other.value < value);
    if (index < 0 || (other.index >= 0 && (further || (alike && before)))) *this = other;
  }
  __device__ __forceinline__ Extreme of_lane(int) const { return *this; }

 private:
  __device__ __forceinline__ bool set(T x, int64_t place, bool is_nan, bool counts = true) {
    const bool better = counts && (index < 0 || (sign > 0 ? x > value : x < value) || is_nan);
    value = better ? x : value, index = better ? int(place) : index;
    return better;
  }
};
template <int sign, class E, int K> struct Extreme<sign, Pack<E, K>> {
  Pack<E, K> value;
  Pack<int, K> index = splat<K>(-1);
  // place: the same for all, or a pack.
  template <class X, class P> __device__ __forceinline__ Pack<bool, K> take(const X& x, const P& place) {
    return each([&](auto& one, int i) { return one.take(lane_of(x, i), lane_of(place, i)); });
  }
  template <class X, class P>
  __device__ __forceinline__ Pack<bool, K> take_last(const X& x, const P& place, bool inside = true) {
    return each([&](auto& one, int i) { return one.take_last(lane_of(x, i), lane_of(place, i), inside); });
  }
  __device__ __forceinline__ Extreme<sign, E> of_lane(int i) const {
    Extreme<sign, E> one;
    one.value = value.at[i], one.index = index.at[i];
    return one;
  }

 private:
  template <class F> __device__ __forceinline__ Pack<bool, K> each(const F& f) {
    return lanes<K>([&](int i) {
      Extreme<sign, E> one = of_lane(i);
      const bool better = f(one, i);
      value.at[i] = one.value, index.at[i] = one.index;
      return better;
    });
  }
};

}  // namespace load
