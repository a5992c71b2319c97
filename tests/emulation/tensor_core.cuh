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
  const bool valid = address % (4 * kCount) == 0 && address < emulation::kSharedBytes;
  if (!valid) emulation::failure = "a load that is not aligned, or not of shared memory";
  memcpy(to, shared_pointer(valid ? address : 0), 4 * kCount);
}

// Copies arrive when they are awaited, not before: until then there is NaN.
inline void copy_later(void* to, const void* from, int bytes) {
  if (uintptr_t(to) % bytes || uintptr_t(from) % bytes) emulation::failure = "a copy that is not aligned";
  memset(to, 0xff, bytes);
  emulation::self().copies.push_back({to, from, bytes, emulation::self().copy_groups});
}
template <int kBytes> void copy_async(void* to, const void* from) { copy_later(to, from, kBytes); }
inline void copy_async_or_zero(void* to, const void* from, bool real) {
  copy_later(to, real ? from : nullptr, 16);
}
inline void commit_copies() { emulation::self().copy_groups++; }
template <int kPending> void await_copies() {
  auto& copies = emulation::self().copies;
  const auto arrives = [](const emulation::Copy& copy) {
    return copy.group < emulation::self().copy_groups - kPending;
  };
  for (const emulation::Copy& copy : copies)
    if (arrives(copy)) copy.from ? memcpy(copy.to, copy.from, copy.bytes) : memset(copy.to, 0, copy.bytes);
  copies.erase(std::remove_if(copies.begin(), copies.end(), arrives), copies.end());
}

inline void load_matrices(uint32_t (&registers)[4], uint32_t address) {
  for (int i = 0; i < 4; i++) {
    const uint32_t row = emulation::exchange(address, 8 * i + emulation::lane() / 4);
    if (row % 16) emulation::failure = "a row of a matrix that is not aligned";
    memcpy(registers + i, shared_pointer(row) + emulation::lane() % 4 * 4, 4);
  }
}

template <int kCount> void load_matrices_transposed(uint32_t (&registers)[kCount], uint32_t address) {
  const int g = emulation::lane() / 4, t = emulation::lane() % 4;
  for (int i = 0; i < kCount; i++)
    for (int k = 0; k < 2; k++) {
      const uint32_t row = emulation::exchange(address, 8 * i + 2 * t + k);
      if (row % 16) emulation::failure = "a row of a matrix that is not aligned";
      memcpy(reinterpret_cast<char*>(registers + i) + 2 * k, shared_pointer(row) + 2 * g, 2);
    }
}

// -------------------------------------------------------------------------------------------------- products

template <class Operand> float half_of(uint32_t word, int i) {
  const uint16_t bits = uint16_t(word >> 16 * i);
  return float(emulated_bits<Operand>(bits));
}
// d += A·B of depth `depth` = 8 or 16, from all lanes' fragments. Sums are rounded once a product.
template <class Operand> void product(float (&d)[4], const uint32_t* a, const uint32_t* b, int depth) {
  static uint32_t fragments[emulation::kMostThreads / 32][32][6];
  const int g = emulation::lane() / 4, t = emulation::lane() % 4;
  auto& of_warp = fragments[emulation::warp()];
  std::copy(a, a + depth / 4, of_warp[emulation::lane()]);
  std::copy(b, b + depth / 8, of_warp[emulation::lane()] + 4);
  __syncwarp();
  for (int i = 0; i < 4; i++) {
    const int row = g + i / 2 * 8, column = 2 * t + i % 2;
    double sum = d[i];
    for (int k = 0; k < depth; k++) {
      const uint32_t of_a = of_warp[row % 8 * 4 + k % 8 / 2][row / 8 + k / 8 * 2];
      const uint32_t of_b = of_warp[column * 4 + k % 8 / 2][4 + k / 8];
      sum += double(half_of<Operand>(of_a, k % 2)) * half_of<Operand>(of_b, k % 2);
    }
    d[i] = float(sum);
  }
  __syncwarp();
}
template <class Operand = half_t>
void multiply_add(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  const uint32_t b[] = {b0, b1};
  product<Operand>(d, a, b, 16);
}
template <class Operand = half_t> void multiply_add(float (&d)[4], uint32_t a0, uint32_t a1, uint32_t b0) {
  const uint32_t a[] = {a0, a1};
  product<Operand>(d, a, &b0, 8);
}

inline void multiply_add_sparse(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[4],
                                uint32_t selectors) {
  static uint32_t fragments[emulation::kMostThreads / 32][32][9];
  const int g = emulation::lane() / 4, t = emulation::lane() % 4;
  auto& of_warp = fragments[emulation::warp()];
  std::copy(a, a + 4, of_warp[emulation::lane()]);
  std::copy(b, b + 4, of_warp[emulation::lane()] + 4);
  of_warp[emulation::lane()][8] = selectors;
  __syncwarp();
  for (int i = 0; i < 4; i++) {
    const int row = g + i / 2 * 8, column = 2 * t + i % 2;
    double sum = d[i];
    for (int four = 0; four < 8; four++) {
      const uint32_t of_a = of_warp[row % 8 * 4 + four % 4][row / 8 + four / 4 * 2];
      const uint32_t places = of_warp[row % 8 * 4 + four / 4][8] >> (row / 8 * 16 + four % 4 * 4);
      if ((places & 3) >= (places >> 2 & 3)) emulation::failure = "selectors that do not ascend";
      for (int j = 0; j < 2; j++) {
        const int k = four * 4 + (places >> 2 * j & 3);
        const uint32_t of_b = of_warp[column * 4 + k % 8 / 2][4 + k / 8];
        sum += double(half_of<half_t>(of_a, j)) * half_of<half_t>(of_b, k % 2);
      }
    }
    d[i] = float(sum);
  }
  __syncwarp();
}

inline int thread_index_anew() { return threadIdx.x; }

// -------------------------------------------------------------------------------------------------- barriers

// What lies in the barrier's memory.
struct Phases {
  uint32_t count : 12, missing : 12, parity : 1;
  int32_t bytes;  // announced and not yet copied
};
static_assert(sizeof(Phases) == sizeof(uint64_t));
inline Phases& phases_of(uint64_t* barrier) { return reinterpret_cast<Phases&>(*barrier); }
inline void advance(Phases& phases) {
  emulation::events++;
  if (phases.missing == 0 && phases.bytes == 0) phases.missing = phases.count, phases.parity ^= 1;
}
inline void initialize(uint64_t* barrier, int arrivals) {
  phases_of(barrier) = {unsigned(arrivals), unsigned(arrivals), 0, 0};
}
inline void invalidate(uint64_t* barrier) { memset(barrier, 0xff, sizeof *barrier); }
inline void arrive(uint64_t* barrier) {
  Phases& phases = phases_of(barrier);
  if (phases.missing-- == 0) emulation::failure = "an arrival too many";
  advance(phases);
}
inline void await(uint64_t* barrier, uint32_t parity) {
  while (phases_of(barrier).parity == parity) emulation::yield();
}
template <int kCount> void sync_threads(int barrier) {
  meet(emulation::block->named_barriers[barrier], kCount);
}
template <int kCount> void signal_threads(int barrier) {
  arrive(emulation::block->named_barriers[barrier], kCount);
}

inline void publish_barriers() {}
inline void arrive(uint64_t* barrier, int bytes) {
  phases_of(barrier).bytes += bytes;
  arrive(barrier);
}
// Takes its time: until then there is NaN.
inline void copy_bulk(void* shared, const void* global, int bytes, uint64_t* barrier) {
  if (bytes % 16 || uintptr_t(shared) % 16 || uintptr_t(global) % 16)
    emulation::failure = "a bulk copy that is not aligned";
  memset(shared, 0xff, bytes);
  for (int turns = emulation::random_order() % 4; turns; turns--) emulation::events++, emulation::yield();
  memcpy(shared, global, bytes);
  phases_of(barrier).bytes -= bytes;
  advance(phases_of(barrier));
}
inline void await_previous_kernel() {}

// -------------------------------------------------------------------------------------------- floating point

inline float min_nan(float a, float b) { return a != a || b != b ? NAN : min(a, b); }
inline float max_nan(float a, float b) { return a != a || b != b ? NAN : max(a, b); }
template <class T> void store_if(bool valid, void* to, T value) {
  if (uintptr_t(to) % sizeof(T) && valid) emulation::failure = "a store that is not aligned";
  if (valid) memcpy(to, &value, sizeof value);
}

}  // namespace tensor_core
