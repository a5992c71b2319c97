// Four neighbouring elements that move in one access, and two.
#pragma once
#include "core/scalar.h"

constexpr int kVector = 4;
template <class T> struct alignas(sizeof(T) * kVector) Vector {
  T at[kVector];
};

template <class T> struct alignas(sizeof(T) * 2) Pair {
  T at[2];
};

template <class T> __device__ __forceinline__ Vector<T> load_vector(const T* from) {
  return *reinterpret_cast<const Vector<T>*>(from);
}

// A streaming store: nothing here is read again soon. By intrinsic, because the compiler stores a struct
// member by member.
template <class T> __device__ __forceinline__ void store_vector(T* to, const Vector<T>& vector) {
  if constexpr (sizeof(Vector<T>) == sizeof(uint2)) {
    __stcs(reinterpret_cast<uint2*>(to), reinterpret_cast<const uint2&>(vector));
  } else {
#pragma unroll
    for (int k = 0; k < sizeof(Vector<T>) / sizeof(uint4); k++)
      __stcs(reinterpret_cast<uint4*>(to) + k, reinterpret_cast<const uint4*>(&vector)[k]);
  }
}

// Likewise of what is read soon.
template <class T> __device__ __forceinline__ void put_vector(T* to, const Vector<T>& vector) {
  using Half = std::conditional_t<sizeof(Vector<T>) == sizeof(uint2), uint2, uint32_t>;
  using Word = std::conditional_t<sizeof(Vector<T>) == sizeof(uint4), uint4, Half>;
  static_assert(sizeof(Vector<T>) == sizeof(Word));
  __stcg(reinterpret_cast<Word*>(to), reinterpret_cast<const Word&>(vector));
}

// May rows of `size` elements from `pointer` on be accessed as vectors?
template <class T> bool vectors_fit(const T* pointer, int64_t size) {
  return size % kVector == 0 && uintptr_t(pointer) % sizeof(Vector<T>) == 0;
}
