// What kernels/tensor_core.cuh offers from sm_80 on, but for wgmma, in C++ for emulation/cuda.h.
#pragma once
#include <type_traits>

#include "scalar.h"

#define TENSOR_CORE_WGMMA 0

namespace tensor_core {

// An address in shared memory counts from the start of the dynamic part.
inline uint32_t shared_address(const void* at) {
  return uint32_t(static_cast<const char*>(at) - reinterpret_cast<char*>(emulation::dynamic_shared));
}
inline char* shared_pointer(uint32_t address) {
  return reinterpret_cast<char*>(emulation::dynamic_shared) + int32_t(address);
}
template <int kCount> void load_shared(uint32_t* to, uint32_t address) {
  const void* const from = shared_pointer(address);
  const bool aligned = uintptr_t(from) % (4 * kCount) == 0;
  if (aligned && emulation::is_shared(from, 4 * kCount)) memcpy(to, from, 4 * kCount);
  else emulation::failure = "a load that is not aligned, or not of shared memory";
}

template <int kBytes> void copy_async(void* to, const void* from) { emulation::copy_later(to, from, kBytes); }
inline void copy_async_or_zero(void* to, const void* from, bool real) {
  emulation::copy_later(to, real ? from : nullptr, 16);
}
inline void commit_copies() { emulation::commit_copies(); }
template <int kPending> void await_copies() { emulation::await_copies(kPending); }

// The word at `column` bytes of row `row` of the warp's, whose addresses its lanes have given.
inline const char* of_row(const uint64_t* addresses, int row) {
  if (addresses[row] % 16) emulation::failure = "a row of a matrix that is not aligned";
  return shared_pointer(uint32_t(addresses[row]));
}
inline void load_matrices(uint32_t (&registers)[4], uint32_t address) {
  const uint64_t* const addresses = emulation::of_all_lanes(address);
  const int g = emulation::lane() / 4, t = emulation::lane() % 4;
  for (int i = 0; i < 4; i++) memcpy(registers + i, of_row(addresses, 8 * i + g) + 4 * t, 4);
}

template <int kCount> void load_matrices_transposed(uint32_t (&registers)[kCount], uint32_t address) {
  const uint64_t* const addresses = emulation::of_all_lanes(address);
  const int g = emulation::lane() / 4, t = emulation::lane() % 4;
  for (int i = 0; i < kCount; i++)
    for (int k = 0; k < 2; k++)
      memcpy(reinterpret_cast<char*>(registers + i) + 2 * k, of_row(addresses, 8 * i + 2 * t + k) + 2 * g, 2);
}

// -------------------------------------------------------------------------------------------------- products

template <class Operand = half_t>
void multiply_add(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  const uint32_t b[] = {b0, b1};
  emulation::product(d, a, b, 16, std::is_same_v<Operand, bfloat16_t>);
}
template <class Operand = half_t> void multiply_add(float (&d)[4], uint32_t a0, uint32_t a1, uint32_t b0) {
  const uint32_t a[] = {a0, a1};
  emulation::product(d, a, &b0, 8, std::is_same_v<Operand, bfloat16_t>);
}
inline void multiply_add_sparse(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[4],
                                uint32_t selectors) {
  emulation::product_sparse(d, a, b, selectors);
}

inline int thread_index_anew() { return threadIdx.x; }

// -------------------------------------------------------------------------------------------------- barriers

using emulation::arrive, emulation::await, emulation::copy_bulk, emulation::initialize;
inline void invalidate(uint64_t* barrier) { memset(barrier, 0xff, sizeof *barrier); }
template <int kCount> void sync_threads(int barrier) { emulation::meet_at(barrier, kCount); }
template <int kCount> void signal_threads(int barrier) { emulation::arrive_at(barrier, kCount); }
inline void publish_barriers() {}
inline void await_previous_kernel() {}

// -------------------------------------------------------------------------------------------- floating point

inline float min_nan(float a, float b) { return a != a || b != b ? NAN : min(a, b); }
inline float max_nan(float a, float b) { return a != a || b != b ? NAN : max(a, b); }
template <int kBytes> uint2 load_if(bool valid, const void* from) {
  uint2 v{0, 0};
  if (valid && uintptr_t(from) % kBytes) emulation::failure = "a load that is not aligned";
  if (valid) memcpy(&v, from, kBytes);
  return v;
}
template <class T> void store_if(bool valid, void* to, T value) {
  if (uintptr_t(to) % sizeof(T) && valid) emulation::failure = "a store that is not aligned";
  if (valid) memcpy(to, &value, sizeof value);
}

}  // namespace tensor_core
