// The host side of every operator: what the code that inline_loader.py generates is made of.
//
// A `Call` reads one operator call's arguments as the launcher's parameters say, checked: device, dtype and contiguity.
// It exists twice, behind the same names: on PyTorch's stable ABI (STABLE_ABI=1: torch 2.10 and later; compiles in about
// a second) and on ATen (older releases). `parallel_for` threads the CPU kernels with PyTorch's own thread pool.
//
// A macro of the user's source must not reach what is included here: this header comes before it, and scalar.h, which reads
// such macros, after.
#pragma once
#include <stdexcept>
#include <string>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>
#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>
#ifdef WITH_CUDA
#define USE_CUDA  // the stable headers then declare aoti_torch_get_current_cuda_stream
#include <cuda_runtime_api.h>
#endif

#if STABLE_ABI
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>
#else
#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/stack.h>
#include <torch/library.h>
#ifdef WITH_CUDA
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#endif
#endif

namespace host {

#if STABLE_ABI
using Tensor = torch::stable::Tensor;
using Stack = StableIValue*;
using torch::headeronly::ScalarType;
using DeviceGuard = torch::stable::accelerator::DeviceGuard;
template <class T>
T argument(Stack stack, int index, int) {
  return torch::stable::detail::to<T>(stack[index]);
}
#else
using Tensor = at::Tensor;
using Stack = torch::jit::Stack*;
using at::ScalarType;
#ifdef WITH_CUDA
using DeviceGuard = c10::cuda::CUDAGuard;
#endif
template <class T>
T argument(Stack stack, int index, int count) {
  return torch::jit::peek(*stack, index, count).to<T>();
}
#endif

template <class T> struct Dtype;
#define HOST_DTYPE(T, scalar_type, text)                          \
  template <> struct Dtype<T> {                                   \
    static constexpr ScalarType value = ScalarType::scalar_type;  \
    static constexpr const char* name = text;                     \
  };
HOST_DTYPE(float, Float, "float32")
HOST_DTYPE(double, Double, "float64")
HOST_DTYPE(c10::Half, Half, "float16")
HOST_DTYPE(c10::BFloat16, BFloat16, "bfloat16")
HOST_DTYPE(uint8_t, Byte, "uint8")
HOST_DTYPE(int32_t, Int, "int32")
HOST_DTYPE(int64_t, Long, "int64")
HOST_DTYPE(bool, Bool, "bool")
#undef HOST_DTYPE

// One operator call. `operator_name` and the argument names appear in its messages.
class Call {
 public:
  Call(const char* operator_name, Stack stack, int count)
      : operator_name_(operator_name), stack_(stack), count_(count) {}

  // Argument `index` for a parameter of type T.
  template <class T> T read(int index, const char* name) {
    if constexpr (std::is_same_v<T, int64_t> || std::is_same_v<T, double> || std::is_same_v<T, bool>)
      return argument<T>(stack_, index, count_);
#ifdef WITH_CUDA
    else if constexpr (std::is_same_v<T, cudaStream_t>)
      return stream();  // the last parameter: the device is known
#endif
    else
      return pointer<std::remove_pointer_t<T>>(index, name);
  }

  // The data of tensor argument `index`; null for a tensor without elements.
  template <class T> T* pointer(int index, const char* name) {
    using Element = std::remove_const_t<T>;
    tensors_.push_back(argument<Tensor>(stack_, index, count_));
    const Tensor& tensor = tensors_.back();
    if (tensor.scalar_type() != Dtype<Element>::value)
      fail(name, std::string("expected a ") + Dtype<Element>::name + " tensor, got " +
                     scalar_type_name(tensor.scalar_type()));
    if (!tensor.is_contiguous()) fail(name, "expected a contiguous tensor");
#ifdef WITH_CUDA
    if (!tensor.is_cuda())
      fail(name, std::string("expected a CUDA tensor, got one on ") +
                     (tensor.is_cpu() ? "the CPU" : "another kind of device"));
    int device = tensor.get_device();
    if (device_ >= 0 && device != device_)
      fail(name, "expected a tensor on cuda:" + std::to_string(device_) +
                     " like the others, got one on cuda:" + std::to_string(device));
    device_ = device;
#else
    if (!tensor.is_cpu())
      fail(name, tensor.is_cuda()
                     ? "expected a CPU tensor, got one on cuda:" + std::to_string(tensor.get_device())
                     : std::string("expected a CPU tensor, got one on another kind of device"));
#endif
    return tensor.numel() == 0
               ? nullptr
               : static_cast<T*>(const_cast<void*>(static_cast<const void*>(tensor.data_ptr())));
  }

#ifdef WITH_CUDA
  int device() const { return device_; }

  cudaStream_t stream() const {
#if STABLE_ABI
    void* stream = nullptr;
    TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(device_, &stream));
    return static_cast<cudaStream_t>(stream);
#else
    return c10::cuda::getCurrentCUDAStream(device_).stream();
#endif
  }

  void check_launch() const {
    cudaError_t error = cudaGetLastError();
    if (error != cudaSuccess)
      throw std::runtime_error(std::string(operator_name_) +
                               ": the launch failed: " + cudaGetErrorString(error));
  }
#endif

 private:
  [[noreturn]] void fail(const char* name, const std::string& what) const {
    throw std::runtime_error(std::string(operator_name_) + ": " + name + ": " + what);
  }

  static std::string scalar_type_name(ScalarType type) {
    switch (type) {
      case ScalarType::Float: return "float32";
      case ScalarType::Double: return "float64";
      case ScalarType::Half: return "float16";
      case ScalarType::BFloat16: return "bfloat16";
      case ScalarType::Byte: return "uint8";
      case ScalarType::Int: return "int32";
      case ScalarType::Long: return "int64";
      case ScalarType::Bool: return "bool";
      default: return "dtype number " + std::to_string(static_cast<int>(type));
    }
  }

  const char* operator_name_;
  Stack stack_;
  int count_;
  int device_ = -1;
  std::vector<Tensor> tensors_;  // kept alive until the launch
};

// Calls `launcher` with the arguments on the stack. names: the operator's, then those of its parameters.
template <class... T, size_t... I>
void launch(void (*launcher)(T...), const char* const* names, Stack stack, std::index_sequence<I...>) {
#ifdef WITH_CUDA
  constexpr int count = sizeof...(T) - (std::is_same_v<T, cudaStream_t> || ...);
#else
  constexpr int count = sizeof...(T);
#endif
  Call call(names[0], stack, count);
  std::tuple<T...> arguments{call.read<T>(I, I < count ? names[I + 1] : "")...};  // in order
#ifdef WITH_CUDA
  DeviceGuard guard(call.device());
#endif
  std::apply(launcher, arguments);
#ifdef WITH_CUDA
  call.check_launch();
#endif
#if !STABLE_ABI
  torch::jit::drop(*stack, count);
#endif
}

template <class... T>
void launch(void (*launcher)(T...), const char* const* names, Stack stack) {
  launch(launcher, names, stack, std::index_sequence_for<T...>());
}

// A launcher as an operator takes it.
#if STABLE_ABI
template <auto launcher, const char* const* names>
void boxed(StableIValue* stack, uint64_t, uint64_t) { launch(launcher, names, stack); }
#else
template <auto launcher, const char* const* names>
void boxed(const c10::OperatorHandle&, c10::DispatchKeySet, Stack stack) { launch(launcher, names, stack); }
#endif

// body(begin, end) over [0, count) in parallel pieces of at least `grain`.
template <class Body> void parallel_for(int64_t count, int64_t grain, const Body& body) {
  if (count <= 0) return;
#if STABLE_ABI
  torch::stable::parallel_for(0, count, grain, body);
#else
  at::parallel_for(0, count, grain, body);
#endif
}

}  // namespace host

// Registration, the same words on either ABI.
#if STABLE_ABI
#define LIBRARY STABLE_TORCH_LIBRARY
#define LIBRARY_IMPLEMENTATION STABLE_TORCH_LIBRARY_IMPL
#define IMPLEMENT(library, name, launcher, names) library.impl(name, &host::boxed<host::launcher, host::names>)
#else
#define LIBRARY TORCH_LIBRARY
#define LIBRARY_IMPLEMENTATION TORCH_LIBRARY_IMPL
#define IMPLEMENT(library, name, launcher, names) \
  library.impl(name, torch::CppFunction::makeFromBoxedFunction<&host::boxed<host::launcher, host::names>>())
#endif
