// What the weights' gradient reads of x and of g, the gradient of v: both packed before, as tensor cores
// take them. A unit is 8 channels of a position, 16 bytes; units lie (N, channel groups, S).
//
// float32 is one float16 under a power of two for each sample: x as forward has it (conv/wide_operands.cuh),
// g as `Scales` say, which lie behind its units.
#pragma once
#include "conv/wide_operands.cuh"

namespace grad {

// A sample's first scale brings the largest magnitude that was seen of it, in a part of it, to 2^8: so may
// the whole of it be 2^7 times as large, and of what is 2^22 times smaller all digits count.
constexpr int kRoom = 6;

// Of g, by sample, as the bits of finite magnitudes: the largest in a part of it, and in all of it.
struct Scales {
  uint32_t *seen, *largest;  // (N)

  // The exponent under which a sample is packed first; and that under which it is packed at last. (By another
  // name than those of a number n, which an unsigned one would not find.)
  static __device__ __forceinline__ int first_of(uint32_t seen) {
    return max(conv::top_exponent(seen) - kRoom, -126);
  }
  static __device__ __forceinline__ int last_of(uint32_t seen, uint32_t largest) {
    constexpr int kLowest = conv::Operands<float, false>::kLowest;
    const int fitting = conv::top_exponent(largest), slack = fitting - first_of(seen);
    return largest == 0 || (slack >= 0 && slack <= tensor_core::kTop - kLowest) ? first_of(seen) : fitting;
  }
  __device__ __forceinline__ int first(int64_t n) const { return first_of(seen[n]); }
  __device__ __forceinline__ int last(int64_t n) const { return last_of(seen[n], largest[n]); }
};

// Elements of T that g takes, in units and, where they are scaled, Scales: of channels a multiple of 8.
template <class T> HOST_DEVICE constexpr int64_t packed_size(int64_t N, int64_t channels, int64_t S) {
  const int64_t units = N * (channels / 8) * S, scales = std::is_same_v<T, float> ? 2 * N : 0;
  return (units * 16 + scales * 4) / int64_t(sizeof(T));
}

template <class T> HOST_DEVICE Scales scales_of(T* packed, int64_t N, int64_t channels, int64_t S) {
  uint32_t* const seen = reinterpret_cast<uint32_t*>(packed) + N * (channels / 8) * S * 4;
  return {seen, seen + N};
}

// g in planes as operands, packed where it is needed (conv/stream_operands.cuh). Its magnitude may be any,
// and values far below the largest count where their filters are large. So a sample's first scale brings the
// largest magnitude that was seen of it ahead to 2^(kTop - kRoom): so much room is above it, and digits
// enough below it.
template <class Operands> struct OfGradient : Operands {
  static constexpr bool kLooksAhead = Operands::kScaled;
  static constexpr int kRoom = Operands::kSplit ? 2 : 6;
  static __device__ __forceinline__ int first_exponent(uint32_t seen) {
    const int top = conv::top_exponent(seen);
    return top == 127 ? top : max(top - kRoom, -126);  // so small that no digit may be lost
  }
  static __device__ __forceinline__ int last_exponent(uint32_t seen, uint32_t largest) {
    const int first = first_exponent(seen), fitting = conv::top_exponent(largest), slack = fitting - first;
    return largest == 0 || (slack >= 0 && slack <= kRoom) ? first : fitting;
  }
};

// Operands of which the largest finite magnitude counts, whatever else there is.
template <class Operands> struct Finite : Operands {
  static constexpr bool kMarksInfinite = false;
};

}  // namespace grad
