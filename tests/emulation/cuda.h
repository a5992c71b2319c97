// CUDA C++ in the words of a C++ compiler, for tests without a GPU; emulation.h runs it.
#pragma once
#include <type_traits>
// Functions of the standard library that nobody calls here: what they are made of is instantiated again in each build.
#undef _GLIBCXX_USE_STD_SPEC_FUNCS
#undef _GLIBCXX_USE_C99_STDLIB
#undef _GLIBCXX_USE_C99_STDIO
#undef _GLIBCXX_USE_WCHAR_T

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime_api.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <stdexcept>
#include <string>
#include <vector>

#include "emulation.h"

#undef __align__
#undef __device__
#undef __forceinline__
#undef __global__
#undef __grid_constant__
#undef __host__
#undef __launch_bounds__
#undef __shared__
#define __align__(bytes) __attribute__((aligned(bytes)))
#define __device__
#define __forceinline__ inline
#define __global__ inline  // none is compiled that is not launched
#define __grid_constant__
#define __host__
#define __launch_bounds__(...)
#define threadIdx emulation::thread->index

namespace emulation {

alignas(1024) uint4 dynamic_shared[kSharedBytes / sizeof(uint4)];

template <class Kernel>
void launch(dim3 blocks, dim3 size, int64_t bytes, Kernel kernel, bool together = false) {
  const auto run = [](const void* kernel) { (*static_cast<const Kernel*>(kernel))(); };
  const Index grid{blocks.x, blocks.y, blocks.z}, block{size.x, size.y, size.z};
  launch(grid, block, bytes, run, &kernel, dynamic_shared, together);
}

}  // namespace emulation

// -------------------------------------------------------------------------------------- CUDA C++'s own words

using std::isfinite;
using std::isinf;
using std::isnan;
using std::max;
using std::min;

inline void __syncthreads() { emulation::meet_block(); }
inline bool __syncthreads_or(bool value) { return emulation::meet_block_or(value); }
inline void __syncwarp(unsigned = ~0u) { emulation::meet_warp(); }
template <class T> T __shfl_sync(unsigned, T value, int from) { return emulation::exchange(value, from); }
template <class T> T __shfl_xor_sync(unsigned, T value, int mask) {
  return emulation::exchange(value, emulation::lane() ^ mask);
}
template <class T> T __shfl_down_sync(unsigned, T value, int offset) {
  return emulation::exchange(
      value, emulation::lane() + offset < 32 ? emulation::lane() + offset : emulation::lane());
}
inline unsigned __reduce_max_sync(unsigned, unsigned value) {
  const uint64_t* const all = emulation::of_all_lanes(value);
  return unsigned(*std::max_element(all, all + 32));
}
inline bool __any_sync(unsigned, bool value) { return __reduce_max_sync(~0u, value); }
inline bool __all_sync(unsigned, bool value) { return !__any_sync(~0u, !value); }
inline float rsqrt(float x) { return float(1 / std::sqrt(double(x))); }
inline double rsqrt(double x) { return 1 / std::sqrt(x); }
inline void __threadfence() {}
template <class T, class U> T atomicAdd(T* at, U value) { return std::exchange(*at, *at + T(value)); }
template <class T, class U> T atomicMax(T* at, U value) { return std::exchange(*at, max(*at, T(value))); }
inline uint32_t __funnelshift_r(uint32_t low, uint32_t high, uint32_t bits) {
  return uint32_t((uint64_t(high) << 32 | low) >> (bits % 32));
}
template <class T> void __stcs(T* at, T value) { *at = value; }
template <class T> void __stcg(T* at, T value) { *at = value; }
template <class T> T __ldcg(const T* at) { return *at; }
inline unsigned __byte_perm(unsigned a, unsigned b, unsigned selector) {
  const uint64_t both = uint64_t(b) << 32 | a;
  unsigned result = 0;
  for (int i = 0; i < 4; i++) result |= unsigned(both >> (selector >> 4 * i & 7) * 8 & 0xff) << 8 * i;
  return result;
}
template <class To, class From> To emulated_bits(From from) {
  To to;
  memcpy(&to, &from, sizeof to);
  return to;
}
inline float __int_as_float(int bits) { return emulated_bits<float>(bits); }
inline float __uint_as_float(unsigned bits) { return emulated_bits<float>(bits); }
inline int __float_as_int(float value) { return emulated_bits<int>(value); }
inline unsigned __float_as_uint(float value) { return emulated_bits<unsigned>(value); }

// ------------------------------------------------------------------------------------------ the host's calls

// Known by its shared memory: what is kept of a device (core/launch.cuh) is not another's.
inline cudaError_t emulated_get_device(int* device) { return *device = emulation::shared_bytes, cudaSuccess; }
inline cudaError_t emulated_attribute(int* value, cudaDeviceAttr attribute, int) {
  *value = attribute == cudaDevAttrComputeCapabilityMajor ? __CUDA_ARCH__ / 100
           : attribute == cudaDevAttrCooperativeLaunch    ? 1
           : attribute == cudaDevAttrMultiProcessorCount  ? emulation::multiprocessors
           : attribute == cudaDevAttrL2CacheSize          ? emulation::l2_bytes
                                                          : emulation::shared_bytes;
  return cudaSuccess;
}
template <class... Arguments> cudaError_t emulated_nothing(Arguments...) { return cudaSuccess; }
template <class Kernel, class... Arguments>
cudaError_t emulated_launch(const cudaLaunchConfig_t* config, Kernel run, Arguments... arguments) {
  const bool together = config->numAttrs && config->attrs->id == cudaLaunchAttributeCooperative;
  emulation::launch(
      config->gridDim, config->blockDim, config->dynamicSmemBytes, [&] { run(arguments...); }, together);
  return cudaSuccess;
}
#define cudaGetDevice emulated_get_device
#define cudaDeviceGetAttribute emulated_attribute
#define cudaFuncGetAttributes emulated_nothing
#define cudaFuncSetAttribute emulated_nothing
#define cudaMemsetAsync(at, value, bytes, stream) memset(at, value, bytes)
#define cudaLaunchKernelEx emulated_launch
