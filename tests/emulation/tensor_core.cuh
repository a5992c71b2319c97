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

inline bool is_shared(uint32_t address) {
  const char* const at = shared_pointer(address);
  for (const auto& [first, content] : emulation::block->static_shared)
    if (at >= first && at < static_cast<char*>(first) + content.size()) return true;
  return address < emulation::kSharedBytes;
}
template <int kCount> void load_shared(uint32_t* to, uint32_t address) {
  const bool valid = uintptr_t(shared_pointer(address)) % (4 * kCount) == 0 && is_shared(address);
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

// `count` numbers from the halves of as many words as hold them.
template <class Operand> void unpack(float* to, const uint32_t* words, int count) {
  for (int i = 0; i < count; i++) to[i] = float(emulated_bits<Operand>(uint16_t(words[i / 2] >> i % 2 * 16)));
}
// d += A·B of depth `depth` = 8 or 16, from all lanes' fragments. Sums are rounded once a product.
template <class Operand> void product(float (&d)[4], const uint32_t* a, const uint32_t* b, int depth) {
  static float fragments[emulation::kMostThreads / 32][32][12];
  const int g = emulation::lane() / 4, t = emulation::lane() % 4;
  auto& of_warp = fragments[emulation::warp()];
  unpack<Operand>(of_warp[emulation::lane()], a, depth / 2);
  unpack<Operand>(of_warp[emulation::lane()] + 8, b, depth / 4);
  __syncwarp();
  for (int i = 0; i < 4; i++) {
    const int row = g + i / 2 * 8, column = 2 * t + i % 2;
    double sum = d[i];
    for (int k = 0; k < depth; k++) {
      const float of_a = of_warp[row % 8 * 4 + k % 8 / 2][row / 8 * 2 + k / 8 * 4 + k % 2];
      const float of_b = of_warp[column * 4 + k % 8 / 2][8 + k / 8 * 2 + k % 2];
      sum += double(of_a) * of_b;
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
  static float fragments[emulation::kMostThreads / 32][32][16];
  static uint32_t all_selectors[emulation::kMostThreads / 32][32];
  const int g = emulation::lane() / 4, t = emulation::lane() % 4;
  auto& of_warp = fragments[emulation::warp()];
  unpack<half_t>(of_warp[emulation::lane()], a, 8);
  unpack<half_t>(of_warp[emulation::lane()] + 8, b, 8);
  all_selectors[emulation::warp()][emulation::lane()] = selectors;
  __syncwarp();
  for (int i = 0; i < 4; i++) {
    const int row = g + i / 2 * 8, column = 2 * t + i % 2;
    double sum = d[i];
    for (int four = 0; four < 8; four++) {
      const float* of_a = of_warp[row % 8 * 4 + four % 4] + 2 * (row / 8 + four / 4 * 2);
      const uint32_t of_row = all_selectors[emulation::warp()][row % 8 * 4 + four / 4];
      const uint32_t places = of_row >> (row / 8 * 16 + four % 4 * 4);
      if ((places & 3) >= (places >> 2 & 3)) emulation::failure = "selectors that do not ascend";
      for (int j = 0; j < 2; j++) {
        const int k = four * 4 + (places >> 2 * j & 3);
        sum += double(of_a[j]) * of_warp[column * 4 + k % 8 / 2][8 + k / 8 * 2 + k % 2];
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
