// Extremes as torch has them.
#pragma once
#include "load/pack.cuh"

namespace load {

// The largest (sign > 0) or smallest value and its place: the first among ties. NaN comes before all: the first with
// `take`, as torch has it in reductions, the last with `take_last`, as in its pools.
template <int sign, class T> struct Extreme {
  T value;
  int index = -1;
  __device__ __forceinline__ void take(T x, int64_t place) { set(x, place, x != x && value == value); }
  __device__ __forceinline__ void take_last(T x, int64_t place) { set(x, place, x != x); }

 private:
  __device__ __forceinline__ void set(T x, int64_t place, bool is_nan) {
    const bool better = index < 0 || (sign > 0 ? x > value : x < value) || is_nan;
    value = better ? x : value, index = better ? int(place) : index;
  }
};
template <int sign, class E, int K> struct Extreme<sign, Pack<E, K>> {
  Pack<E, K> value;
  Pack<int, K> index = splat<K>(-1);
  __device__ __forceinline__ void take(const Pack<E, K>& x, int64_t place) {
    each([&](auto& one, int i) { one.take(x.at[i], place); });
  }
  __device__ __forceinline__ void take_last(const Pack<E, K>& x, int64_t place) {
    each([&](auto& one, int i) { one.take_last(x.at[i], place); });
  }

 private:
  template <class F> __device__ __forceinline__ void each(const F& f) {
#pragma unroll
    for (int i = 0; i < K; i++) {
      Extreme<sign, E> one;
      one.value = value.at[i], one.index = index.at[i];
      f(one, i);
      value.at[i] = one.value, index.at[i] = one.index;
    }
  }
};

}  // namespace load
