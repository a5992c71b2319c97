// K neighbouring values that a thread treats alike, with a number's operations: loads and stores of 16 bytes,
// and as many chains of arithmetic that don't wait for one another.
#pragma once
#include "core/math.h"
#include "core/scalar.h"

namespace load {

template <class E, int K> struct Pack {
  using element = E;
  static constexpr int size = K;
  E at[K];
};

template <class T> struct IsPack {
  static constexpr bool value = false;
};
template <class E, int K> struct IsPack<Pack<E, K>> {
  static constexpr bool value = true;
};
template <class T> constexpr bool is_pack = IsPack<T>::value;

// An operand's value in lane i: a number is the same in all.
template <class T> __device__ __forceinline__ auto lane_of(const T& x, int i) {
  if constexpr (is_pack<T>) return x.at[i];
  else return x;
}

// f(i) in every lane.
template <int K, class F> __device__ __forceinline__ auto lanes(const F& f) {
  Pack<decltype(f(0)), K> result;
#pragma unroll
  for (int i = 0; i < K; i++) result.at[i] = f(i);
  return result;
}

template <int K, class E> __device__ __forceinline__ Pack<E, K> splat(E value) {
  Pack<E, K> result;
#pragma unroll
  for (int i = 0; i < K; i++) result.at[i] = value;
  return result;
}

#define LOAD_BINARY(symbol)                                                          \
  template <class E, int K, class B>                                                 \
  __device__ __forceinline__ auto operator symbol(const Pack<E, K>& a, const B& b) { \
    return lanes<K>([&](int i) { return a.at[i] symbol lane_of(b, i); });            \
  }                                                                                  \
  template <class A, class E, int K, class = std::enable_if_t<!is_pack<A>>>          \
  __device__ __forceinline__ auto operator symbol(const A& a, const Pack<E, K>& b) { \
    return lanes<K>([&](int i) { return a symbol b.at[i]; });                        \
  }
LOAD_BINARY(+)
LOAD_BINARY(-)
LOAD_BINARY(*)
LOAD_BINARY(/)
LOAD_BINARY(>)
LOAD_BINARY(>=)
LOAD_BINARY(<)
LOAD_BINARY(<=)
LOAD_BINARY(==)
LOAD_BINARY(!=)
LOAD_BINARY(&)
LOAD_BINARY(|)  // of truth values
#undef LOAD_BINARY
template <class E, int K> __device__ __forceinline__ auto operator!(const Pack<E, K>& a) {
  return lanes<K>([&](int i) { return !a.at[i]; });
}
template <class E, int K> __device__ __forceinline__ auto operator-(const Pack<E, K>& a) {
  return lanes<K>([&](int i) { return -a.at[i]; });
}
template <int K> __device__ __forceinline__ bool all(const Pack<bool, K>& a) {
  bool every = true;
#pragma unroll
  for (int i = 0; i < K; i++) every = every && a.at[i];
  return every;
}
template <class E, int K, class B>
__device__ __forceinline__ Pack<E, K>& operator+=(Pack<E, K>& a, const B& b) {
  return a = a + b;
}

}  // namespace load

// math.h's functions, lane by lane.
namespace math {

template <class E, int K> struct Traits<load::Pack<E, K>> {
  using Element = E;
  static constexpr int lanes = K;
};

#define LOAD_UNARY(name)                                                                           \
  template <class E, int K> __device__ __forceinline__ load::Pack<E, K> name(load::Pack<E, K> x) { \
    return load::lanes<K>([&](int i) { return E(name(x.at[i])); });                                \
  }
#define LOAD_WITH_NUMBER(name)                                                           \
  template <class E, int K, class A>                                                     \
  __device__ __forceinline__ load::Pack<E, K> name(load::Pack<E, K> x, A a) {            \
    return load::lanes<K>([&](int i) { return E(name(x.at[i], load::lane_of(a, i))); }); \
  }
#define LOAD_WITH_NUMBERS(name)                                                             \
  template <class E, int K, class A, class B>                                               \
  __device__ __forceinline__ load::Pack<E, K> name(load::Pack<E, K> x, A a, B b) {          \
    return load::lanes<K>(                                                                  \
        [&](int i) { return E(name(x.at[i], load::lane_of(a, i), load::lane_of(b, i))); }); \
  }
LOAD_WITH_NUMBER(product)
template <class A, class E, int K, class = std::enable_if_t<!load::is_pack<A>>>
__device__ __forceinline__ load::Pack<E, K> product(A a, load::Pack<E, K> x) {
  return product(x, a);
}
#define LOAD_WITH_GRADIENT(name) \
  LOAD_UNARY(name)               \
  LOAD_UNARY(name##_gradient)
LOAD_WITH_GRADIENT(exp)
LOAD_WITH_GRADIENT(exp2)
LOAD_WITH_GRADIENT(log)
LOAD_WITH_GRADIENT(log1p)
LOAD_WITH_GRADIENT(expm1)
LOAD_WITH_GRADIENT(tanh)
LOAD_WITH_GRADIENT(sigmoid)
LOAD_WITH_GRADIENT(silu)
LOAD_WITH_GRADIENT(mish)
LOAD_WITH_GRADIENT(erf)
LOAD_WITH_GRADIENT(gelu)
LOAD_WITH_GRADIENT(gelu_tanh)
LOAD_WITH_GRADIENT(hardswish)
LOAD_WITH_GRADIENT(hardsigmoid)
LOAD_WITH_GRADIENT(sqrt)
LOAD_WITH_GRADIENT(rsqrt)
LOAD_UNARY(rounded)
LOAD_UNARY(abs)
LOAD_UNARY(relu)
LOAD_UNARY(square)
LOAD_UNARY(reciprocal)
LOAD_WITH_NUMBER(elu)
LOAD_WITH_NUMBER(elu_gradient)
LOAD_WITH_NUMBERS(clamp)
LOAD_WITH_NUMBERS(softplus)
LOAD_WITH_NUMBERS(softplus_gradient)
#undef LOAD_UNARY
#undef LOAD_WITH_NUMBER
#undef LOAD_WITH_NUMBERS
#undef LOAD_WITH_GRADIENT

// Of a pack and a pack or a number. math.h's own templates take any two types, so each of these has to fit
// better.
#define LOAD_OF_TWO(name)                                                                    \
  template <class E, int K>                                                                  \
  __device__ __forceinline__ load::Pack<E, K> name(load::Pack<E, K> a, load::Pack<E, K> b) { \
    return load::lanes<K>([&](int i) { return E(name(a.at[i], b.at[i])); });                 \
  }                                                                                          \
  template <class E, int K, class B>                                                         \
  __device__ __forceinline__ load::Pack<E, K> name(load::Pack<E, K> a, B b) {                \
    return load::lanes<K>([&](int i) { return E(name(a.at[i], E(b))); });                    \
  }                                                                                          \
  template <class E, int K, class A>                                                         \
  __device__ __forceinline__ load::Pack<E, K> name(A a, load::Pack<E, K> b) {                \
    return load::lanes<K>([&](int i) { return E(name(E(a), b.at[i])); });                    \
  }
LOAD_OF_TWO(minimum)
LOAD_OF_TWO(maximum)
LOAD_OF_TWO(difference)
#undef LOAD_OF_TWO

// With a number as mask math.h's own select does.
template <class E, int K, class A, class B>
__device__ __forceinline__ auto select(const load::Pack<E, K>& mask, const A& a, const B& b) {
  return load::lanes<K>([&](int i) { return mask.at[i] ? load::lane_of(a, i) : load::lane_of(b, i); });
}

}  // namespace math
