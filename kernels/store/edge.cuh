// Elements that fill no sector of 32 bytes.
#pragma once
#include <stdint.h>
#include <type_traits>

namespace store {

// An unsigned word of so many bytes.
template <int kBytes>
using Bytes = std::conditional_t<
    kBytes == 16, uint4,
    std::conditional_t<
        kBytes == 8, uint2,
        std::conditional_t<kBytes == 4, uint32_t, std::conditional_t<kBytes == 2, uint16_t, uint8_t>>>>;

// `count` elements, fewer than fill 32 bytes, from element `first` on of `from` to `to`, where 32 bytes begin
// at element 0 in both. They end where 32 bytes end (`head`), or begin there. By as few stores as can be: a
// part of a sector costs memory as much as all of it.
template <class T, int kElements = 1>
__device__ __forceinline__ void store_edge(T* to, const T* from, int first, int count, bool head) {
  using Word = Bytes<kElements* int(sizeof(T))>;
  const int at = first + (head ? count & (kElements - 1) : count & (-2 * kElements));
  if (count & kElements) *reinterpret_cast<Word*>(to + at) = *reinterpret_cast<const Word*>(from + at);
  if constexpr (2 * kElements * sizeof(T) < 32) store_edge<T, 2 * kElements>(to, from, first, count, head);
}

}  // namespace store
