// Products of four warps together, for sm_90a: their operands lie in shared memory, but A may be in
// registers. Fragments as in core/tensor_core.cuh; who calls this stands under TENSOR_CORE_WGMMA.
#pragma once
#include "core/tensor_core.cuh"

namespace tensor_core {

#if TENSOR_CORE_WGMMA

// Registers of a thread, of all in a group of four warps, from one group to another.
template <int kCount> __device__ __forceinline__ void give_registers_but() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kCount));
}
template <int kCount> __device__ __forceinline__ void take_registers_to() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kCount));
}

// Wgmma reads shared memory by the asynchronous proxy: each thread that wrote some calls this before the
// barrier.
__device__ __forceinline__ void publish_shared() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}
__device__ __forceinline__ void begin_products() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void commit_products() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
template <int kPending> __device__ __forceinline__ void await_products() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}

// Describes B (16×n) in shared memory without a swizzle: columns are 16 bytes (8 values of k) and 16 bytes
// apart, the second 8 values of k lie k_stride bytes behind the first. Any multiple of 16 serves, so shifted
// views of one image may overlap. Likewise A (64×16), its rows for columns. Adding i to a description moves
// it on by 16 i bytes.
__device__ __forceinline__ uint64_t describe(uint32_t address, uint32_t k_stride) {
  return uint64_t((address & 0x3ffff) >> 4) | uint64_t(k_stride >> 4) << 16 | uint64_t(128 >> 4) << 32;
}

// Describes an operand of which 8 columns, of A 8 rows, lie side by side, 16 bytes, those of the next k
// behind them, and the next 8 plane_pitch bytes on. Any multiple of 16 serves here, too.
__device__ __forceinline__ uint64_t describe_transposed(uint32_t address, uint32_t plane_pitch) {
  return uint64_t((address & 0x3ffff) >> 4) | uint64_t(128 >> 4) << 16 | uint64_t(plane_pitch >> 4) << 32;
}

// After await_products, before the sums are read: keeps the compiler from reading them earlier.
template <int kTiles> __device__ __forceinline__ void hold(float (&d)[kTiles][4]) {
#pragma unroll
  for (int j = 0; j < kTiles; j++)
    asm volatile("" : "+f"(d[j][0]), "+f"(d[j][1]), "+f"(d[j][2]), "+f"(d[j][3])::"memory");
}

// D (64×n) += A (64×16) · B (16×n), n = 64, 72, 128, 192 or 256, by four warps: warp i has rows 16 i … 16 i +
// 15 of A and D, fragments as above. A lies in registers or in shared memory. Where `accumulate` is false,
// what D held before does not count. kTransposed: B as by describe_swizzled_transposed (core/tensor_map.cuh).
#define NAMES_64                                                           \
  "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, " \
  "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define NAMES_72 NAMES_64 ", %32, %33, %34, %35"
#define NAMES_128                                                                      \
  NAMES_64                                                                             \
  ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, " \
  "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define NAMES_192                                                                    \
  NAMES_128                                                                          \
  ", %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79" \
  ", %80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95"
#define NAMES_256                                                      \
  NAMES_192                                                            \
  ", %96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106"     \
  ", %107, %108, %109, %110, %111, %112, %113, %114, %115, %116, %117" \
  ", %118, %119, %120, %121, %122, %123, %124, %125, %126, %127"
#define FRAGMENT(a) "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3])
#define ROW(j) "+f"(d[j][0]), "+f"(d[j][1]), "+f"(d[j][2]), "+f"(d[j][3])
#define SUMS_64 ROW(0), ROW(1), ROW(2), ROW(3), ROW(4), ROW(5), ROW(6), ROW(7)
#define SUMS_72 SUMS_64, ROW(8)
#define SUMS_128 SUMS_64, ROW(8), ROW(9), ROW(10), ROW(11), ROW(12), ROW(13), ROW(14), ROW(15)
#define SUMS_192 SUMS_128, ROW(16), ROW(17), ROW(18), ROW(19), ROW(20), ROW(21), ROW(22), ROW(23)
#define SUMS_256 SUMS_192, ROW(24), ROW(25), ROW(26), ROW(27), ROW(28), ROW(29), ROW(30), ROW(31)
#define WGMMA_OF_TYPE(n, type, flag, operands, ...)                                                          \
  asm volatile("{\n.reg .pred accumulate;\nsetp.ne.b32 accumulate, " flag                                    \
               ", 0;\n"                                                                                      \
               "wgmma.mma_async.sync.aligned.m64n" #n "k16.f32." type "." type " {" NAMES_##n "}, " operands \
                                                                                              ";\n}"         \
               : SUMS_##n                                                                                    \
               : __VA_ARGS__, "r"(int(accumulate)))
#define WGMMA_OF_OPERAND(n, flag, operands, ...)                                                       \
  if constexpr (std::is_same_v<Operand, half_t>) WGMMA_OF_TYPE(n, "f16", flag, operands, __VA_ARGS__); \
  else WGMMA_OF_TYPE(n, "bf16", flag, operands, __VA_ARGS__)

template <class Operand = half_t>
__device__ __forceinline__ void multiply_add(float (&d)[8][4], const uint32_t (&a)[4], uint64_t b,
                                             bool accumulate = true) {
  WGMMA_OF_OPERAND(64, "%37", "{%32, %33, %34, %35}, %36, accumulate, 1, 1, 0", FRAGMENT(a), "l"(b));
}
// B, and A where it isn't in registers, as by describe_transposed.
template <class Operand = half_t>
__device__ __forceinline__ void multiply_add_transposed(float (&d)[8][4], uint64_t a, uint64_t b,
                                                        bool accumulate = true) {
  WGMMA_OF_OPERAND(64, "%34", "%32, %33, accumulate, 1, 1, 1, 1", "l"(a), "l"(b));
}
template <class Operand = half_t>
__device__ __forceinline__ void multiply_add_transposed(float (&d)[8][4], const uint32_t (&a)[4], uint64_t b,
                                                        bool accumulate = true) {
  WGMMA_OF_OPERAND(64, "%37", "{%32, %33, %34, %35}, %36, accumulate, 1, 1, 1", FRAGMENT(a), "l"(b));
}
template <class Operand = half_t>
__device__ __forceinline__ void multiply_add(float (&d)[9][4], const uint32_t (&a)[4], uint64_t b,
                                             bool accumulate = true) {
  WGMMA_OF_OPERAND(72, "%41", "{%36, %37, %38, %39}, %40, accumulate, 1, 1, 0", FRAGMENT(a), "l"(b));
}
template <class Operand = half_t>
__device__ __forceinline__ void multiply_add(float (&d)[16][4], const uint32_t (&a)[4], uint64_t b,
                                             bool accumulate = true) {
  WGMMA_OF_OPERAND(128, "%69", "{%64, %65, %66, %67}, %68, accumulate, 1, 1, 0", FRAGMENT(a), "l"(b));
}
template <class Operand = half_t, int kTransposed = 0>
__device__ __forceinline__ void multiply_add(float (&d)[16][4], uint64_t a, uint64_t b,
                                             bool accumulate = true) {
  WGMMA_OF_OPERAND(128, "%67", "%64, %65, accumulate, 1, 1, 0, %66", "l"(a), "l"(b), "n"(kTransposed));
}

template <class Operand = half_t, int kTransposed = 0>
__device__ __forceinline__ void multiply_add(float (&d)[24][4], uint64_t a, uint64_t b,
                                             bool accumulate = true) {
  WGMMA_OF_OPERAND(192, "%99", "%96, %97, accumulate, 1, 1, 0, %98", "l"(a), "l"(b), "n"(kTransposed));
}
template <class Operand = half_t, int kTransposed = 0>
__device__ __forceinline__ void multiply_add(float (&d)[32][4], uint64_t a, uint64_t b,
                                             bool accumulate = true) {
  WGMMA_OF_OPERAND(256, "%131", "%128, %129, accumulate, 1, 1, 0, %130", "l"(a), "l"(b), "n"(kTransposed));
}

// D (64×24) += A (64×32) · B (32×24), where A has two of every four neighbours in a row, as for the other
// multiply_add_sparse (core/tensor_core.cuh), and B is as by describe_transposed. D: three tiles, from d[0]
// on.
__device__ __forceinline__ void multiply_add_sparse(float (*d)[4], const uint32_t (&a)[4], uint64_t b,
                                                    uint32_t selectors) {
  asm volatile(
      "wgmma.mma_async.sp.sync.aligned.m64n24k32.f32.f16.f16 {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, "
      "%11}, {%12, %13, %14, %15}, %16, %17, 0, 1, 1, 1, 1;"
      : ROW(0), ROW(1), ROW(2)
      : FRAGMENT(a), "l"(b), "r"(selectors));
}

#undef WGMMA_OF_OPERAND
#undef WGMMA_OF_TYPE
#undef SUMS_256
#undef SUMS_192
#undef SUMS_128
#undef SUMS_72
#undef SUMS_64
#undef ROW
#undef FRAGMENT
#undef NAMES_256
#undef NAMES_192
#undef NAMES_128
#undef NAMES_72
#undef NAMES_64

#endif

}  // namespace tensor_core
