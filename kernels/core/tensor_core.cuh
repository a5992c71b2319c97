// All instructions that C++ has no words for: tensor cores' products of float16 or bfloat16 fragments, copies
// to shared memory in the background, barriers there. From sm_80 on, matrices of shared memory from sm_75 on;
// those of sm_90a alone, where TENSOR_CORE_WGMMA is 1, are in core/wgmma.cuh. tests/emulation has a version
// without a GPU.
//
// Fragments of D (16×8) += A (16×16)·B (16×8), lane = 4 g + t; a register holds two neighbours, the first in
// its low half:
//   A   0: row g, k 2t    1: row g + 8, k 2t    2: row g, k 2t + 8    3: row g + 8, k 2t + 8
//   B   0: k 2t, column g    1: k 2t + 8, column g
//   D   0, 1: row g, columns 2t, 2t + 1    2, 3: row g + 8, the same
#pragma once
#include <type_traits>

#include "core/scalar.h"

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
#define TENSOR_CORE_WGMMA 1
#else
#define TENSOR_CORE_WGMMA 0
#endif

namespace tensor_core {

// --------------------------------------------------------------------------------------------- shared memory

__device__ __forceinline__ uint32_t shared_address(const void* pointer) {
  return uint32_t(__cvta_generic_to_shared(pointer));
}

// One word from there, two or four.
template <int kCount> __device__ __forceinline__ void load_shared(uint32_t* to, uint32_t address) {
  static_assert(kCount == 1 || kCount == 2 || kCount == 4);
  if constexpr (kCount == 1) asm volatile("ld.shared.u32 %0, [%1];" : "=r"(to[0]) : "r"(address) : "memory");
  else if constexpr (kCount == 2)
    asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];" : "=r"(to[0]), "=r"(to[1]) : "r"(address) : "memory");
  else
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
                 : "r"(address)
                 : "memory");
}

// Four 8×8 matrices of 16-bit elements; lane 8 i + r gives the address of row r (16 bytes) of matrix i. Rows
// that are columns of B make a register of its fragment.
__device__ __forceinline__ void load_matrices(uint32_t (&registers)[4], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(registers[0]), "=r"(registers[1]), "=r"(registers[2]), "=r"(registers[3])
               : "r"(address)
               : "memory");
}

// The same, each transposed: rows that are rows of B, or columns of A, make a register of its fragment.
__device__ __forceinline__ void load_matrices_transposed(uint32_t (&registers)[4], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(registers[0]), "=r"(registers[1]), "=r"(registers[2]), "=r"(registers[3])
               : "r"(address)
               : "memory");
}
// Two of them, whose rows are lanes 0-15's.
__device__ __forceinline__ void load_matrices_transposed(uint32_t (&registers)[2], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {%0, %1}, [%2];"
               : "=r"(registers[0]), "=r"(registers[1])
               : "r"(address)
               : "memory");
}

#if __CUDA_ARCH__ >= 800 || !defined(__CUDA_ARCH__)

// kBytes to shared memory in the background: 4 or 8, or 16, which bypass the L1 cache.
template <int kBytes> __device__ __forceinline__ void copy_async(void* to, const void* from) {
  if constexpr (kBytes == 16)
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(shared_address(to)), "l"(from) : "memory");
  else
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2;" ::"r"(shared_address(to)), "l"(from), "n"(kBytes)
                 : "memory");
}
// 16 bytes likewise; zeros where `real` is false.
__device__ __forceinline__ void copy_async_or_zero(void* to, const void* from, bool real) {
  const int bytes = real ? 16 : 0;
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(to)), "l"(from),
               "r"(bytes)
               : "memory");
}
// What a thread, or another, will read soon comes into the L2 cache: of `count` elements, if any, the whole
// 16 bytes; from Hopper on.
template <class T> __device__ __forceinline__ void fetch_ahead(const T* from, int count) {
#if __CUDA_ARCH__ >= 900
  const uint64_t first = (uint64_t(from) + 15) / 16 * 16, last = uint64_t(from + count) / 16 * 16;
  if (last > first)
    asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(first), "r"(uint32_t(last - first))
                 : "memory");
#endif
}
__device__ __forceinline__ void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int kPending> __device__ __forceinline__ void await_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

// -------------------------------------------------------------------------------------------------- mma.sync

// Operand: half_t or bfloat16_t.
#define MMA(type)                                                                \
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32." type "." type            \
               ".f32 "                                                           \
               "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};" \
               : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])                  \
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1))
template <class Operand = half_t>
__device__ __forceinline__ void multiply_add(float (&d)[4], const uint32_t (&a)[4], uint32_t b0,
                                             uint32_t b1) {
  if constexpr (std::is_same_v<Operand, half_t>) MMA("f16");
  else MMA("bf16");
}
#undef MMA

// The same with k = 8: registers 0 and 1 of A, 0 of B.
#define MMA(type)                                                    \
  asm volatile("mma.sync.aligned.m16n8k8.row.col.f32." type "." type \
               ".f32 "                                               \
               "{%0, %1, %2, %3}, {%4, %5}, {%6}, {%0, %1, %2, %3};" \
               : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])      \
               : "r"(a0), "r"(a1), "r"(b0))
template <class Operand = half_t>
__device__ __forceinline__ void multiply_add(float (&d)[4], uint32_t a0, uint32_t a1, uint32_t b0) {
  if constexpr (std::is_same_v<Operand, half_t>) MMA("f16");
  else MMA("bf16");
}
#undef MMA

// The same of TF32, with k = 8: float32 whose last 13 bits do not count.
//   A   0: row g, k t    1: row g + 8, k t    2: row g, k t + 4    3: row g + 8, k t + 4
//   B   0: k t, column g    1: k t + 4, column g
__device__ __forceinline__ void multiply_add_tf32(float (&d)[4], const uint32_t (&a)[4], uint32_t b0,
                                                  uint32_t b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 "
      "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// The same with k = 32, B's register i from k 8 i on, and of A two of every four neighbours in a row, k 4 i …
// 4 i + 3, in the place of k 2 i and 2 i + 1. `selectors` has four bits for each two: the first one's place
// among the four, and the second one's, which is larger. Lanes with t = 0 give those of k 0-15, lanes with
// t = 1 those of k 16-31; row g's in the low half, row g + 8's in the high one.
__device__ __forceinline__ void multiply_add_sparse(float (&d)[4], const uint32_t (&a)[4],
                                                    const uint32_t (&b)[4], uint32_t selectors) {
  asm volatile(
      "mma.sp::ordered_metadata.sync.aligned.m16n8k32.row.col.f32.f16.f16.f32 "
      "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9, %10, %11}, {%0, %1, %2, %3}, %12, 0x0;"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]), "r"(b[2]), "r"(b[3]),
        "r"(selectors));
}

// threadIdx.x, read anew: what was computed from it before need not wait in registers for being used again.
__device__ __forceinline__ int thread_index_anew() {
  int index;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(index));
  return index;
}

// -------------------------------------------------------------------------------------------------- barriers

// A barrier in shared memory: a phase is complete after so many arrivals.
__device__ __forceinline__ void initialize(uint64_t* barrier, int arrivals) {
  asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(shared_address(barrier)), "r"(arrivals) : "memory");
}
// Nobody waits there any more: its memory may become a barrier again.
__device__ __forceinline__ void invalidate(uint64_t* barrier) {
  asm volatile("mbarrier.inval.shared.b64 [%0];" ::"r"(shared_address(barrier)) : "memory");
}
__device__ __forceinline__ void arrive(uint64_t* barrier) {
  asm volatile(
      "{\n.reg .b64 state;\nmbarrier.arrive.shared.b64 state, [%0];\n}" ::"r"(shared_address(barrier))
      : "memory");
}
// Until the phase of this parity is complete.
__device__ __forceinline__ void await(uint64_t* barrier, uint32_t parity) {
#if __CUDA_ARCH__ >= 900
#define WAIT "mbarrier.try_wait.parity.shared.b64"
#else
#define WAIT "mbarrier.test_wait.parity.shared.b64"
#endif
  asm volatile("{\n.reg .pred done;\nagain:\n" WAIT
               " done, [%0], %1;\n@!done bra again;\n}" ::"r"(shared_address(barrier)),
               "r"(parity)
               : "memory");
#undef WAIT
}

// Barriers by number, from 1 to 15, of kCount threads, some of which only signal that they have come.
template <int kCount> __device__ __forceinline__ void sync_threads(int barrier) {
  asm volatile("bar.sync %0, %1;" ::"r"(barrier), "n"(kCount) : "memory");
}
template <int kCount> __device__ __forceinline__ void signal_threads(int barrier) {
  asm volatile("bar.arrive %0, %1;" ::"r"(barrier), "n"(kCount) : "memory");
}

#if __CUDA_ARCH__ >= 900
// The copy engine sees barriers that were initialised before.
__device__ __forceinline__ void publish_barriers() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}
// An arrival that announces bytes; and a copy of so many, which completes them: a multiple of 16, from and to
// such places.
__device__ __forceinline__ void arrive(uint64_t* barrier, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" ::"r"(shared_address(barrier)), "r"(bytes)
               : "memory");
}
__device__ __forceinline__ void copy_bulk(void* shared, const void* global, int bytes, uint64_t* barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
          shared_address(shared)),
      "l"(global), "r"(bytes), "r"(shared_address(barrier))
      : "memory");
}
// The same to the same place in every block of a cluster that `blocks` has a bit for, and to its barrier.
__device__ __forceinline__ void copy_bulk(void* shared, const void* global, int bytes, uint64_t* barrier,
                                          uint16_t blocks) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster "
      "[%0], [%1], %2, [%3], %4;" ::"r"(shared_address(shared)),
      "l"(global), "r"(bytes), "r"(shared_address(barrier)), "h"(blocks)
      : "memory");
}
// Which of its cluster's blocks this is; an arrival at a barrier of another; and a meeting of all their
// threads.
__device__ __forceinline__ int cluster_rank() {
  int rank;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}
__device__ __forceinline__ void arrive_at(uint64_t* barrier, int rank) {
  asm volatile(
      "{\n.reg .b32 there;\nmapa.shared::cluster.u32 there, %0, %1;\n"
      "mbarrier.arrive.shared::cluster.b64 _, [there];\n}" ::"r"(shared_address(barrier)),
      "r"(rank)
      : "memory");
}
__device__ __forceinline__ void meet_cluster() {
  asm volatile("barrier.cluster.arrive.aligned;\nbarrier.cluster.wait.aligned;" ::: "memory");
}
// The other way, from shared to global memory.
__device__ __forceinline__ void copy_bulk_out(void* global, const void* shared, int bytes) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(global),
               "r"(shared_address(shared)), "r"(bytes)
               : "memory");
}
__device__ __forceinline__ void commit_bulk_copies() {
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}
// Until this thread's bulk copies have read their source.
__device__ __forceinline__ void await_bulk_reads() {
  asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
}
#endif

// -------------------------------------------------------------------------------------------- floating point

// min and max as PyTorch: NaN wins. One instruction where core/numerics.h's need two.
__device__ __forceinline__ float min_nan(float a, float b) {
  float result;
  asm("min.NaN.f32 %0, %1, %2;" : "=f"(result) : "f"(a), "f"(b));
  return result;
}
__device__ __forceinline__ float max_nan(float a, float b) {
  float result;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(result) : "f"(a), "f"(b));
  return result;
}

// 8 or 16 bytes to global memory, unless `valid` is false: a predicate in place of a branch, which would keep
// the instructions around it from being scheduled together.
__device__ __forceinline__ void store_if(bool valid, void* to, uint2 v) {
  asm volatile(
      "{ .reg .pred valid; setp.ne.s32 valid, %0, 0; @valid st.global.v2.u32 [%1], {%2, %3}; }" ::"r"(
          int(valid)),
      "l"(to), "r"(v.x), "r"(v.y)
      : "memory");
}
__device__ __forceinline__ void store_if(bool valid, void* to, float4 v) {
  asm volatile(
      "{ .reg .pred valid; setp.ne.s32 valid, %0, 0; "
      "@valid st.global.v4.f32 [%1], {%2, %3, %4, %5}; }" ::"r"(int(valid)),
      "l"(to), "f"(v.x), "f"(v.y), "f"(v.z), "f"(v.w)
      : "memory");
}

// 2, 4 or 8 bytes from there likewise, and zero where `valid` is false.
template <int kBytes> __device__ __forceinline__ uint2 load_if(bool valid, const void* from) {
  uint2 v{0, 0};
  if constexpr (kBytes == 8)
    asm volatile("{ .reg .pred valid; setp.ne.s32 valid, %2, 0; @valid ld.global.v2.u32 {%0, %1}, [%3]; }"
                 : "+r"(v.x), "+r"(v.y)
                 : "r"(int(valid)), "l"(from));
  else if constexpr (kBytes == 4)
    asm volatile("{ .reg .pred valid; setp.ne.s32 valid, %1, 0; @valid ld.global.u32 %0, [%2]; }"
                 : "+r"(v.x)
                 : "r"(int(valid)), "l"(from));
  else
    asm volatile("{ .reg .pred valid; setp.ne.s32 valid, %1, 0; @valid ld.global.u16 %0, [%2]; }"
                 : "+r"(v.x)
                 : "r"(int(valid)), "l"(from));
  return v;
}

#endif  // sm_80

}  // namespace tensor_core
