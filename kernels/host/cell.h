// host.h's place in an exported cell, whose launchers Python calls by their addresses: PyTorch's memory and
// threads, by C functions of its libraries, so that none of its headers is compiled.
#pragma once
#include <stddef.h>
#include <stdint.h>

#include <exception>
#include <stdexcept>
#include <string>
#include <utility>

#pragma GCC visibility push(default)
extern "C" {
struct CUstream_st;
int32_t aoti_torch_device_type_cpu(), aoti_torch_device_type_cuda(), aoti_torch_dtype_uint8();
int32_t aoti_torch_empty_strided(int64_t, const int64_t*, const int64_t*, int32_t, int32_t, int32_t, void**);
int32_t aoti_torch_get_data_ptr(void*, void**), aoti_torch_delete_tensor_object(void*);
// From torch 2.10 on: before, kernels for a CPU take one thread.
int32_t torch_parallel_for(int64_t, int64_t, int64_t, void (*)(int64_t, int64_t, void*), void*)
    __attribute__((weak));
}
#pragma GCC visibility pop

namespace inline_loader {

struct Host {
  static void* allocate(int64_t bytes, void** memory) {
    int device = 0;
#ifdef __CUDACC__
    cudaGetDevice(&device);
    const int32_t type = aoti_torch_device_type_cuda();
#else
    const int32_t type = aoti_torch_device_type_cpu();
#endif
    const int64_t stride = 1;
    void* data = nullptr;
    if (aoti_torch_empty_strided(1, &bytes, &stride, aoti_torch_dtype_uint8(), type, device, memory) ||
        aoti_torch_get_data_ptr(*memory, &data))
      throw std::runtime_error("out of memory: " + std::to_string(bytes) + " bytes of scratch");
    return data;
  }
  static void release(void* memory) { aoti_torch_delete_tensor_object(memory); }
};
static const Host functions{}, *const host = &functions;

// A launcher that returns what went wrong, until the thread's next call, or null.
template <auto launcher, class = decltype(launcher)> struct Called;
template <auto launcher, class R, class... T> struct Called<launcher, R (*)(T...)> {
  static const char* call(int64_t* result, T... arguments) {
    thread_local std::string problem;
    try {
      if constexpr (std::is_void_v<R>) launcher(arguments...);
      else *result = launcher(arguments...);
#ifdef __CUDACC__
      if (const cudaError_t error = cudaGetLastError()) throw std::runtime_error(cudaGetErrorString(error));
#endif
      return nullptr;
    } catch (const std::exception& error) { problem = error.what(); }
    return problem.c_str();
  }
};

}  // namespace inline_loader

#define CELL(name)                                                            \
  extern "C" __attribute__((visibility("default"))) void* const cell_##name = \
      (void*)&inline_loader::Called<&name>::call;

#ifndef __CUDACC__
namespace host {

// body(begin, end) over [0, count) in parallel pieces of at least `grain`.
template <class Body> void parallel_for(int64_t count, int64_t grain, const Body& body) {
  const auto piece = [](int64_t begin, int64_t end, void* body) {
    (*static_cast<const Body*>(body))(begin, end);
  };
  if (!torch_parallel_for) body(0, count);
  else if (count > 0) torch_parallel_for(0, count, grain, piece, const_cast<Body*>(&body));
}

}  // namespace host
#endif
