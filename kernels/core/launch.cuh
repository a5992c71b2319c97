// What the host asks before it launches kernels.
#pragma once
#include <stdint.h>
#include <stdexcept>
#include <string>

// Throws where a launcher's tensor (host/tensor.h) hasn't so many elements.
template <class View> inline void expect_elements(const char* name, const View& tensor, int64_t count) {
  if (const int64_t found = tensor.numel(); found != count)
    throw std::invalid_argument(std::string(name) + ": expected " + std::to_string(count) +
                                " elements, got " + std::to_string(found));
}

inline unsigned blocks_for(int64_t work, int threads) { return unsigned((work + threads - 1) / threads); }

inline int device_attribute(cudaDeviceAttr attribute) {
  int device = 0, value = 0;
  cudaGetDevice(&device), cudaDeviceGetAttribute(&value, attribute, device);
  return value;
}

// Lets blocks of a kernel have as much shared memory as there is, and returns how much of it is dynamic. As
// much as one launch needs would not do for a thread that launches the same kernel at the same time. A thread
// asks once, until it turns to another device, since to ask takes microseconds.
template <auto kernel> inline int allow_shared() {
  thread_local int known = -1, most = 0;  // the device, and what there is
  int device = 0;
  cudaGetDevice(&device);
  if (device == known) return most;
  cudaFuncAttributes attributes{};
  cudaFuncGetAttributes(&attributes, kernel);
  most = device_attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin) - int(attributes.sharedSizeBytes);
  const bool allowed =
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, most) == cudaSuccess;
  known = allowed ? device : -1;
  return most;
}

// Can so many blocks, each of which fills a multiprocessor, run at the same time, and wait for one another?
inline bool run_together(int64_t blocks) {
  return device_attribute(cudaDevAttrCooperativeLaunch) &&
         blocks <= device_attribute(cudaDevAttrMultiProcessorCount);
}

// A kernel that begins with this may be launched early: it waits until all that the stream held before has
// ended, and lets the next one come early.
__device__ __forceinline__ void await_previous_kernel() {
#if defined(__CUDACC__) && __CUDA_ARCH__ >= 900  // the emulation runs one after the other
  asm volatile("griddepcontrol.launch_dependents;\ngriddepcontrol.wait;" ::: "memory");
#endif
}

// Launches such a kernel, with so many bytes of dynamic shared memory. From sm_90 on its blocks are on their
// multiprocessors by the time that the kernel before it ends.
template <class... P, class Blocks, class... Arguments>
void launch_early_with(void (*kernel)(P...), const Blocks& blocks, unsigned threads, int shared,
                       cudaStream_t stream, const Arguments&... arguments) {
  cudaLaunchAttribute early{};
  early.id = cudaLaunchAttributeProgrammaticStreamSerialization,
  early.val.programmaticStreamSerializationAllowed = 1;
  const cudaLaunchConfig_t config{dim3(blocks),   threads,
                                  size_t(shared), stream,
                                  &early,         device_attribute(cudaDevAttrComputeCapabilityMajor) >= 9};
  cudaLaunchKernelEx(&config, kernel, P(arguments)...);
}
template <class... P, class Blocks, class... Arguments>
void launch_early(void (*kernel)(P...), const Blocks& blocks, unsigned threads, cudaStream_t stream,
                  const Arguments&... arguments) {
  launch_early_with(kernel, blocks, threads, 0, stream, arguments...);
}
