// What kernels/core/tensor_core.cuh offers, in C++ for emulation/cuda.h. A product by wgmma is complete at once.
#pragma once
#include <type_traits>

#include "core/scalar.h"

#define TENSOR_CORE_WGMMA (__CUDA_ARCH__ >= 900)

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
template <class T> void fetch_ahead(const T* from, int count) {
  for (int i = 0; i < count; i++) *const_cast<const volatile T*>(from + i);  // which has to be there
}
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
inline void multiply_add_tf32(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  const uint32_t b[] = {b0, b1};
  emulation::product_tf32(d, a, b);
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
inline void copy_bulk_out(void* global, const void* shared, int bytes) {
  const bool aligned = uintptr_t(global) % 16 == 0 && uintptr_t(shared) % 16 == 0 && bytes % 16 == 0;
  if (aligned && emulation::is_shared(shared, bytes)) emulation::copy_out_later(global, shared, bytes);
  else emulation::failure = "a copy that is not aligned, or not of shared memory";
}
// A cluster has one block.
inline void copy_bulk(void* shared, const void* global, int bytes, uint64_t* barrier, uint16_t) {
  copy_bulk(shared, global, bytes, barrier);
}
inline int cluster_rank() { return 0; }
inline void arrive_at(uint64_t* barrier, int) { arrive(barrier); }
inline void meet_cluster() { emulation::meet_block(); }
inline void commit_bulk_copies() {}
inline void await_bulk_reads() { emulation::await_reads(); }

// ----------------------------------------------------------------------------------------------------- wgmma

template <int kCount> void give_registers_but() {}
template <int kCount> void take_registers_to() {}
inline void publish_shared() {}
inline void begin_products() {}
inline void commit_products() {}
// The products of four warps end together.
template <int kPending> void await_products() {
  emulation::meet_at(12 + threadIdx.x / 128, 128);
}
template <int kTiles> void hold(float (&)[kTiles][4]) {}

// The address, and how far behind a column's first 8 values of k the second 8 lie.
inline uint64_t describe(uint32_t address, uint32_t k_stride) {
  return uint64_t(address >> 4) | uint64_t(k_stride >> 4) << 16;
}
// 64, 32 or 16 values of k in a row: 1, 2, 3 in the highest bits.
template <int kDepth> int swizzled(int row, int unit) { return unit ^ row / (64 / kDepth) % (kDepth / 8); }
template <int kDepth> uint64_t describe_swizzled(uint32_t address) {
  if (address % (kDepth * 16)) emulation::failure = "a swizzled operand that is not aligned";
  return uint64_t(address >> 4) | uint64_t(kDepth == 64 ? 1 : kDepth == 32 ? 2 : 3) << 62;
}
// Of an operand in shared memory: 2 k's values from 2t on, of the first (0) or the second (1) 8, of a column.
inline uint32_t described(uint64_t operand, int half, int column) {
  const int kind = int(operand >> 62);
  const uint32_t bytes = 256 >> kind, address = uint32_t(operand & 0xffff) * 16,
                 row = address + half * 16 + column * bytes;
  const char* const at = shared_pointer(address + half * uint32_t(operand >> 16 & 0x3fff) * 16 + column * 16);
  uint32_t word;
  const char* const from =
      (kind ? shared_pointer(row ^ (row >> 3 & (bytes - 16))) : at) + emulation::lane() % 4 * 4;
  if (emulation::is_shared(from, 4)) memcpy(&word, from, 4);
  else emulation::failure = "an operand that is not in shared memory";
  return word;
}
template <class Operand = half_t, int kTiles>
void multiply_add(float (&d)[kTiles][4], const uint32_t (&a)[4], uint64_t b, bool accumulate = true) {
  static_assert(kTiles <= emulation::kMostTiles);
  uint32_t of_b[kTiles][2];
  for (int j = 0; j < kTiles; j++) {
    const int column = 8 * j + emulation::lane() / 4;
    of_b[j][0] = described(b, 0, column), of_b[j][1] = described(b, 1, column);
    if (!accumulate) d[j][0] = d[j][1] = d[j][2] = d[j][3] = 0;
  }
  emulation::products(d, a, of_b[0], kTiles, std::is_same_v<Operand, bfloat16_t>);
}
// The same where 64 columns of a value of k lie side by side, 128 bytes, swizzled, and the next 64 behind 64 k.
inline uint64_t describe_swizzled_transposed(uint32_t address) {
  if (address % 1024) emulation::failure = "a swizzled operand that is not aligned";
  return address >> 4;
}
inline uint32_t described_swizzled_transposed(uint64_t operand, int half, int column) {
  uint16_t two[2] = {};
  for (int i = 0; i < 2; i++) {
    const uint32_t k = emulation::lane() % 4 * 2 + half * 8 + i,
                   at = uint32_t(operand) * 16 + column / 64 * 8192 + k * 128 + column % 64 * 2;
    const char* const from = shared_pointer(at ^ (at >> 3 & 112));
    if (emulation::is_shared(from, 2)) memcpy(two + i, from, 2);
    else emulation::failure = "an operand that is not in shared memory";
  }
  return two[0] | uint32_t(two[1]) << 16;
}
template <class Operand = half_t, int kTransposed = 0, int kTiles>
void multiply_add(float (&d)[kTiles][4], uint64_t a, uint64_t b, bool accumulate = true) {
  const int row = threadIdx.x / 32 % 4 * 16 + emulation::lane() / 4;
  const uint32_t of_a[] = {described(a, 0, row), described(a, 0, row + 8), described(a, 1, row),
                           described(a, 1, row + 8)};
  if constexpr (kTransposed) {
    uint32_t of_b[kTiles][2];
    for (int j = 0; j < kTiles; j++) {
      const int column = 8 * j + emulation::lane() / 4;
      of_b[j][0] = described_swizzled_transposed(b, 0, column);
      of_b[j][1] = described_swizzled_transposed(b, 1, column);
      if (!accumulate) d[j][0] = d[j][1] = d[j][2] = d[j][3] = 0;
    }
    emulation::products(d, of_a, of_b[0], kTiles, std::is_same_v<Operand, bfloat16_t>);
  } else {
    multiply_add<Operand>(d, of_a, b, accumulate);
  }
}

// Likewise where planes of 8 columns lie so far apart, in a plane those of each k side by side.
inline uint64_t describe_transposed(uint32_t address, uint32_t plane_pitch) {
  return uint64_t(address >> 4) | uint64_t(plane_pitch >> 4) << 16;
}
inline uint32_t described_transposed(uint64_t operand, int half, int column) {
  const int plane = column / 8, k = emulation::lane() % 4 * 2 + half * 8;
  const char* const at = shared_pointer(uint32_t(operand & 0xffff) * 16 + plane * uint32_t(operand >> 16) * 16);
  uint16_t two[2] = {};
  for (int i = 0; i < 2; i++) {
    const char* const from = at + (k + i) * 16 + column % 8 * 2;
    if (emulation::is_shared(from, 2)) memcpy(two + i, from, 2);
    else emulation::failure = "an operand that is not in shared memory";
  }
  return two[0] | uint32_t(two[1]) << 16;
}
template <class Operand = half_t, int kTiles>
void multiply_add_transposed(float (&d)[kTiles][4], const uint32_t (&a)[4], uint64_t b, bool accumulate = true) {
  static_assert(kTiles <= emulation::kMostTiles);
  uint32_t of_b[kTiles][2];
  for (int j = 0; j < kTiles; j++) {
    const int column = 8 * j + emulation::lane() / 4;
    of_b[j][0] = described_transposed(b, 0, column), of_b[j][1] = described_transposed(b, 1, column);
    if (!accumulate) d[j][0] = d[j][1] = d[j][2] = d[j][3] = 0;
  }
  emulation::products(d, a, of_b[0], kTiles, std::is_same_v<Operand, bfloat16_t>);
}
template <class Operand = half_t, int kTiles>
void multiply_add_transposed(float (&d)[kTiles][4], uint64_t a, uint64_t b, bool accumulate = true) {
  const int row = threadIdx.x / 32 % 4 * 16 + emulation::lane() / 4;
  const uint32_t of_a[] = {described_transposed(a, 0, row), described_transposed(a, 0, row + 8),
                           described_transposed(a, 1, row), described_transposed(a, 1, row + 8)};
  multiply_add_transposed<Operand>(d, of_a, b, accumulate);
}

inline void multiply_add_sparse(float (*d)[4], const uint32_t (&a)[4], uint64_t b, uint32_t selectors) {
  for (int j = 0; j < 3; j++) {
    uint32_t of_b[4];
    for (int i = 0; i < 4; i++) of_b[i] = described_transposed(b, i, 8 * j + emulation::lane() / 4);
    emulation::product_sparse(d[j], a, of_b, selectors);
  }
}

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
