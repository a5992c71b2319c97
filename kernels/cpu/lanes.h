// Vectors of neighbouring values: how a CPU's passes load, store and gather them.
#pragma once
#include <string.h>

#include <algorithm>

#include "core/math.h"
#include "core/scalar.h"

namespace load {

using real = accumulate_t;

#if defined(__AVX512F__)
constexpr int kRegister = 64;  // bytes; compilers split wider vectors badly
#elif defined(__AVX2__)
constexpr int kRegister = 32;
#else
constexpr int kRegister = 16;
#endif
constexpr int kLanes = kRegister / sizeof(real);

template <class E> using VectorOf __attribute__((vector_size(sizeof(E) * kLanes))) = E;
using Lanes = VectorOf<real>;
using Integers = math::Integer<Lanes>;  // as wide as a real: masks, and what is read of integers
using Doubles = VectorOf<double>;

// What a pass computes with an array's elements.
template <class E> using Computed = std::conditional_t<std::is_integral_v<E>, Integers, Lanes>;

// 0, 1, 2, …
inline Integers count_up() {
  Integers lanes{};
#pragma GCC unroll 64
  for (int j = 0; j < kLanes; j++) lanes[j] = j;
  return lanes;
}

// x / by, of x from 0 on: processors divide no vectors of integers.
inline Integers divided(const Integers& x, int by) {
  return __builtin_convertvector((__builtin_convertvector(x, Doubles) + 0.5) * (1.0 / by), Integers);
}
template <int by> inline Integers divided(const Integers& x) {
  if constexpr ((by & (by - 1)) == 0) return x / by;
  else return divided(x, by);
}

inline bool any_of(const Integers& mask) {
  uint64_t words[sizeof mask / sizeof(uint64_t)], any = 0;
  memcpy(words, &mask, sizeof mask);
  for (uint64_t word : words) any |= word;
  return any != 0;
}

// GCC converts bytes one by one: here all lanes' at once.
#if defined(__AVX2__) && !defined(__AVX512F__) && !defined(__clang__)
template <class E> constexpr bool are_bytes = std::is_same_v<E, uint8_t> && sizeof(real) == 4;
template <class V> inline V widened(const uint8_t* from) {
  typedef int64_t Words __attribute__((vector_size(16)));
  typedef char Bytes __attribute__((vector_size(16)));
  int64_t word;
  memcpy(&word, from, sizeof word);
  return (V)__builtin_ia32_pmovzxbd256((Bytes)Words{word, 0});
}
template <class V> inline void store_bytes(uint8_t* to, const V& x) {
  typedef uint8_t Bytes __attribute__((vector_size(32)));
  const Bytes lowest = __builtin_shuffle((Bytes)x, Bytes{0, 4, 8, 12, 16, 20, 24, 28});
  memcpy(to, &lowest, 8);
}
#else
template <class E> constexpr bool are_bytes = false;
template <class V> V widened(const uint8_t* from);
template <class V> void store_bytes(uint8_t* to, const V& x);
#endif

template <class E> inline Computed<E> load_lanes(const E* from) {
  if constexpr (are_bytes<E>) {
    return widened<Integers>(from);
  } else if constexpr (std::is_arithmetic_v<E>) {
    VectorOf<E> lanes;
    memcpy(&lanes, from, sizeof lanes);
    return __builtin_convertvector(lanes, Computed<E>);
  } else {
    Lanes lanes;
    for (int j = 0; j < kLanes; j++) lanes[j] = real(from[j]);
    return lanes;
  }
}

// x is a vector, or a number for all lanes.
template <class E, class X> inline void store_lanes(E* to, const X& x) {
  if constexpr (std::is_arithmetic_v<X>) {
    std::fill_n(to, kLanes, E(x));
  } else if constexpr (are_bytes<E> && std::is_same_v<X, Integers>) {
    store_bytes(to, x);
  } else if constexpr (std::is_arithmetic_v<E>) {
    const VectorOf<E> lanes = __builtin_convertvector(x, VectorOf<E>);
    memcpy(to, &lanes, sizeof lanes);
  } else {
    for (int j = 0; j < kLanes; j++) to[j] = E(real(x[j]));
  }
}

// Up to two vectors' elements, by two copies of a known size, which may meet: a call for so few takes longer.
template <class E> inline void copy_few(E* to, const E* from, int64_t count) {
  const auto both_ends = [&](auto size) {
    memcpy(to, from, size * sizeof(E));
    memcpy(to + count - size, from + count - size, size * sizeof(E));
  };
  if (count >= kLanes) both_ends(std::integral_constant<int64_t, kLanes>());
  else if (count >= kLanes / 2) both_ends(std::integral_constant<int64_t, kLanes / 2>());
  else if (count >= kLanes / 4) both_ends(std::integral_constant<int64_t, kLanes / 4>());
  else std::copy_n(from, count, to);
}

// The first `count` lanes, straight from a register: a copy of part of what has just been stored may wait
// until that and all stores before it have left the core, which takes long for those past the caches.
template <class E, class X> inline void store_few(E* to, const X& x, int count) {
  if constexpr (std::is_same_v<E, float> && std::is_same_v<X, Lanes>) {
#if defined(__AVX512F__) && !defined(__clang__)
    return __builtin_ia32_storeups512_mask(to, x, uint16_t((1u << count) - 1));
#elif defined(__AVX2__) && !defined(__clang__)
    typedef float Floats __attribute__((vector_size(32)));
    typedef int Mask __attribute__((vector_size(32)));
    return __builtin_ia32_maskstoreps256((Floats*)to, (Mask)(count_up() < count), x);
#endif
  }
  E all[kLanes];
  store_lanes(all, x);
  copy_few(to, all, count);
}

// Past the caches, where `to` allows it.
template <class E, class X> inline void stream_lanes(E* to, const X& x) {
#if defined(__AVX512F__) && !defined(__clang__)
  if constexpr (std::is_same_v<E, real> && std::is_same_v<X, Lanes>) {
    if (uintptr_t(to) % kRegister == 0) {
      if constexpr (sizeof(real) == 4) __builtin_ia32_movntps512(reinterpret_cast<float*>(to), x);
      else __builtin_ia32_movntpd512(reinterpret_cast<double*>(to), x);
      return;
    }
  }
#elif defined(__AVX2__) && !defined(__clang__)
  if constexpr (std::is_same_v<E, real> && std::is_same_v<X, Lanes>) {
    if (uintptr_t(to) % kRegister == 0) {
      if constexpr (sizeof(real) == 4) __builtin_ia32_movntps256(reinterpret_cast<float*>(to), x);
      else __builtin_ia32_movntpd256(reinterpret_cast<double*>(to), x);
      return;
    }
  }
#elif defined(__clang__)
  if constexpr (std::is_same_v<E, real> && std::is_same_v<X, Lanes>) {
    if (uintptr_t(to) % kRegister == 0) {
      __builtin_nontemporal_store(x, reinterpret_cast<Lanes*>(to));
      return;
    }
  }
#endif
  store_lanes(to, x);
}

// What was streamed is there for other threads.
inline void end_streams() {
#if defined(__x86_64__)
  asm volatile("sfence" ::: "memory");
#endif
}

// Lane j of the result is lane (which[j] mod 2·kLanes) of a and b, one behind the other.
template <class V> inline V shuffled(const V& a, const V& b, const Integers& which) {
#ifdef __clang__
  V result;
  for (int j = 0; j < kLanes; j++) {
    const int from = int(which[j]) & (2 * kLanes - 1);
    result[j] = from < kLanes ? a[from] : b[from - kLanes];
  }
  return result;
#else
  return __builtin_shuffle(a, b, which);
#endif
}

// from[k + stride·j] for j in 0 to kLanes - 1; k < stride.
template <int stride, class E> inline Computed<E> load_strided(const E* from, int k) {
  if constexpr (stride == 1) return load_lanes(from);
  const Integers which = count_up() * stride + k;
  if constexpr (stride == 2) return shuffled(load_lanes(from), load_lanes(from + kLanes), which);
  Computed<E> result{};
#pragma GCC unroll 8
  for (int i = 0; i < stride; i += 2) {  // of each two vectors the lanes that they have
    const auto low = load_lanes(from + i * kLanes),
               high = i + 1 < stride ? load_lanes(from + (i + 1) * kLanes) : low;
    const auto lanes = shuffled(low, high, which);
    result = (which >= i * kLanes) ? lanes : result;
  }
  return result;
}

}  // namespace load
