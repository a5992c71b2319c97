// PyTorch's side of every operator (host.h), compiled once for all builds.
//
// A `Call` reads one operator call's arguments as the launcher's parameters say, checked: device, dtype and
// contiguity. It exists twice, behind the same names: on PyTorch's stable ABI (STABLE_ABI=1: torch 2.10 and
// later; compiles in about a second) and on ATen (older releases).
#pragma once
#include <cstdlib>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>
#include "host/room.h"
#include "host/tensor.h"
#ifdef WITH_CUDA
#define USE_CUDA  // the stable headers then declare aoti_torch_get_current_cuda_stream
#include <cuda_runtime_api.h>
#endif

#if STABLE_ABI
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>
#ifdef WITH_CUDA
extern "C" {  // not in every torch
__attribute__((weak, visibility("default"))) int32_t aoti_torch_cuda_caching_allocator_raw_alloc(uint64_t,
                                                                                                 void**);
__attribute__((weak, visibility("default"))) int32_t aoti_torch_cuda_caching_allocator_raw_delete(void*);
}
#endif
#else
#include <memory>
#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/stack.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>
#ifdef WITH_CUDA
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#endif
#endif

namespace inline_loader {

#if STABLE_ABI
using Tensor = torch::stable::Tensor;
using Stack = StableIValue*;
using DeviceGuard = torch::stable::accelerator::DeviceGuard;
template <class T> T read(Stack stack, int index, int) { return torch::stable::detail::to<T>(stack[index]); }
#else
using Tensor = at::Tensor;
using Stack = torch::jit::Stack*;
#ifdef WITH_CUDA
using DeviceGuard = c10::cuda::CUDAGuard;
#endif
template <class T> T read(Stack stack, int index, int count) {
  return torch::jit::peek(*stack, index, count).to<T>();
}
#endif

inline std::string dtype_name(int kind) {
  switch (kind) {
    case 0: return "uint8";
    case 3: return "int32";
    case 4: return "int64";
    case 5: return "float16";
    case 6: return "float32";
    case 7: return "float64";
    case 11: return "bool";
    case 15: return "bfloat16";
    default: return "dtype number " + std::to_string(kind);
  }
}

#ifdef WITH_CUDA
inline void* current_stream(int device) {
#if STABLE_ABI
  void* stream = nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(device, &stream));
  return stream;
#else
  return c10::cuda::getCurrentCUDAStream(device).stream();
#endif
}
#endif

// Of its storage, which somebody may have freed: a view then has an address all the same.
inline int64_t held_bytes(const Tensor& tensor) {
#if STABLE_ABI
  int64_t bytes = 0;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_storage_size(tensor.get(), &bytes));
  return bytes;
#else
  return int64_t(tensor.storage().nbytes());
#endif
}

#ifdef WITH_CUDA
// Where PyTorch shall keep no memory, as for who looks for accesses outside of it, each piece is by itself.
inline bool keeps_memory() {
  static const bool keeps = !std::getenv("PYTORCH_NO_CUDA_MEMORY_CACHING");
  return keeps;
}
#endif

// PyTorch's allocator, on the current device and stream.
struct Allocator {
#if STABLE_ABI && defined(WITH_CUDA)
  // Without a tensor around it: half of an allocation's time. Without PyTorch's cache there is no such way.
  static bool is_raw() { return aoti_torch_cuda_caching_allocator_raw_alloc && keeps_memory(); }
#else
  static constexpr bool is_raw() { return false; }
#endif
  [[noreturn]] static void fail(int64_t bytes) {
    throw std::runtime_error("out of memory: expected " + std::to_string(bytes) +
                             " bytes for a launcher's scratch");
  }

  static void* allocate(int64_t bytes, void** memory) {
#if STABLE_ABI && defined(WITH_CUDA)
    if (is_raw()) {
      if (aoti_torch_cuda_caching_allocator_raw_alloc(bytes, memory) != TORCH_SUCCESS) fail(bytes);
      return *memory;
    }
#endif
#ifdef WITH_CUDA
    int device = 0;
    cudaGetDevice(&device);
#endif
#if STABLE_ABI
#ifdef WITH_CUDA
    const int32_t type = aoti_torch_device_type_cuda();
#else
    const int32_t type = aoti_torch_device_type_cpu(), device = 0;
#endif
    const int64_t stride = 1;
    AtenTensorHandle tensor = nullptr;
    void* data = nullptr;
    if (aoti_torch_empty_strided(1, &bytes, &stride, aoti_torch_dtype_uint8(), type, device, &tensor) !=
        TORCH_SUCCESS)
      fail(bytes);
    *memory = tensor;
    TORCH_ERROR_CODE_CHECK(aoti_torch_get_data_ptr(tensor, &data));
    return data;
#else
#ifdef WITH_CUDA
    const at::Device place(at::kCUDA, device);
#else
    const at::Device place(at::kCPU);
#endif
    auto* tensor = new at::Tensor(at::empty({bytes}, at::TensorOptions(place).dtype(at::kByte)));
    *memory = tensor;
    return tensor->data_ptr();
#endif
  }
  static void release(void* memory) {
#if STABLE_ABI && defined(WITH_CUDA)
    if (is_raw()) return (void)aoti_torch_cuda_caching_allocator_raw_delete(memory);
#endif
#if STABLE_ABI
    aoti_torch_delete_tensor_object(static_cast<AtenTensorHandle>(memory));
#else
    delete static_cast<at::Tensor*>(memory);
#endif
  }
};

inline bool takes_stream(const Launcher& launcher) {
  return launcher.count > 0 && launcher.kinds[launcher.count - 1] == kStream;
}

// Runs a launcher on its tensors' device, on PyTorch's current stream there, which is its last argument where
// it takes one. sizes: of each of its tensors, where it takes them.
inline int64_t launch(const Launcher& launcher, int device, Argument* arguments, const Sizes* sizes) {
#ifdef WITH_CUDA
  if (launcher.asked && device < 0)
    return launcher.run(arguments, sizes);  // of no tensor on a GPU: of the current one
  int current = -1;
  std::optional<DeviceGuard> guard;
  if (cudaGetDevice(&current); current != device) guard.emplace(device);
  if (takes_stream(launcher)) arguments[launcher.count - 1].data = current_stream(device);
#endif
  const int64_t result = launcher.run(arguments, sizes);
#ifdef WITH_CUDA
  cudaError_t error = cudaGetLastError();
  if (error != cudaSuccess)
    throw std::runtime_error(std::string(launcher.names[2]) +
                             ": the launch failed: " + cudaGetErrorString(error));
#endif
  return result;
}

// One call of a launcher's operator.
class Call {
 public:
  Call(const Launcher& launcher, Stack stack)
      : launcher_(launcher), stack_(stack), count_(launcher.count - takes_stream(launcher)) {
    tensors_.reserve(count_);
    arguments_.resize(launcher.count);
    if (launcher.sized) sizes_.resize(count_);
    for (int i = 0; i < count_; i++) arguments_[i] = argument(i);
  }

  void run() {
    const int64_t result = launch(launcher_, device_, arguments_.data(), sizes_.data());
#if STABLE_ABI
    if (launcher_.asked) stack_[0] = torch::stable::detail::from(result);
#else
    torch::jit::drop(*stack_, count_);
    if (launcher_.asked) stack_->push_back(result);
#endif
  }

 private:
  Argument argument(int index) {
    Argument found;
    switch (launcher_.kinds[index]) {
      case kInteger: found.integer = read<int64_t>(stack_, index, count_); break;
      case kReal: found.real = read<double>(stack_, index, count_); break;
      case kFlag: found.flag = read<bool>(stack_, index, count_); break;
      default: found.data = data(index);
    }
    return found;
  }

  // Of a tensor; null if it has no elements, and for who asks about sizes alone, of tensors anywhere.
  void* data(int index) {
    tensors_.push_back(read<Tensor>(stack_, index, count_));
    const Tensor& tensor = tensors_.back();
    const int kind = launcher_.kinds[index], given = static_cast<int>(tensor.scalar_type());
    if (given != kind) fail(index, "expected a " + dtype_name(kind) + " tensor, got " + dtype_name(given));
    if (launcher_.sized) sizes_[index] = sizes_of(index, tensor);
    if (launcher_.asked) {
      if (tensor.is_cuda()) device_ = tensor.get_device();
      return nullptr;
    }
    if (!tensor.is_contiguous()) fail(index, "expected a contiguous tensor");
#ifdef WITH_CUDA
    if (!tensor.is_cuda())
      fail(index, std::string("expected a CUDA tensor, got one on ") +
                      (tensor.is_cpu() ? "the CPU" : "another kind of device"));
    int device = tensor.get_device();
    if (device_ >= 0 && device != device_)
      fail(index, "expected a tensor on cuda:" + std::to_string(device_) +
                      " like the others, got one on cuda:" + std::to_string(device));
    device_ = device;
#else
    if (!tensor.is_cpu())
      fail(index, tensor.is_cuda()
                      ? "expected a CPU tensor, got one on cuda:" + std::to_string(tensor.get_device())
                      : std::string("expected a CPU tensor, got one on another kind of device"));
#endif
    if (tensor.numel() == 0) return nullptr;
    if (held_bytes(tensor) == 0)
      fail(index, "expected a tensor with memory, got one whose storage was freed");
    return const_cast<void*>(static_cast<const void*>(tensor.data_ptr()));
  }

  Sizes sizes_of(int index, const Tensor& tensor) const {
    Sizes found;
    found.dims = tensor.dim();
    if (found.dims > kMostDims)
      fail(index, "expected at most " + std::to_string(kMostDims) + " dimensions, got " +
                      std::to_string(found.dims));
    for (int i = 0; i < found.dims; i++) found.sizes[i] = tensor.size(i);
    return found;
  }

  [[noreturn]] void fail(int index, const std::string& what) const {
    throw std::runtime_error(std::string(launcher_.names[2]) + ": " + launcher_.names[3 + index] + ": " +
                             what);
  }

  const Launcher& launcher_;
  Stack stack_;
  int count_;
  int device_ = -1;
  std::vector<Argument> arguments_;
  std::vector<Sizes> sizes_;
  std::vector<Tensor> tensors_;  // kept alive until the launch
};

#if STABLE_ABI
inline void call(const Launcher& launcher, uint64_t* stack) { Call(launcher, stack).run(); }
#else
struct Kernel : c10::OperatorKernel {
  explicit Kernel(const Launcher& launcher) : launcher(launcher) {}
  void operator()(const c10::OperatorHandle&, c10::DispatchKeySet, Stack stack) {
    Call(launcher, stack).run();
  }
  const Launcher& launcher;
};
#endif

// Registers operators for good: what would take them back at the end is never destroyed. Who asks about sizes
// alone may do so of tensors on any device.
inline void add(const char* name_space, const char* dispatch_key, const Launcher* const* launchers,
                int count) {
#if STABLE_ABI
  using Library = torch::stable::detail::StableLibrary;
  const auto library_of = [=](Library::Kind kind, const char* key) {
    return new Library(kind, name_space, key, __FILE__, __LINE__);
  };
  auto* library = library_of(Library::Kind::DEF, nullptr);
  auto* launching = library_of(Library::Kind::IMPL, dispatch_key);
  auto* asking = library_of(Library::Kind::IMPL, "CompositeExplicitAutograd");
#else
  using torch::Library;
  const auto library_of = [=](Library::Kind kind, c10::optional<c10::DispatchKey> key) {
    return new Library(kind, name_space, key, __FILE__, __LINE__);
  };
  auto* library = library_of(Library::DEF, c10::nullopt);
  auto* launching = library_of(Library::IMPL, c10::parseDispatchKey(dispatch_key));
  auto* asking = library_of(Library::IMPL, c10::DispatchKey::CompositeExplicitAutograd);
#endif
  for (int i = 0; i < count; i++) {
    const Launcher& launcher = *launchers[i];
    auto* implementation = launcher.asked ? asking : launching;
    library->def(launcher.names[0]);
#if STABLE_ABI
    implementation->impl(launcher.names[1], launcher.boxed);
#else
    implementation->impl(launcher.names[1],
                         torch::CppFunction::makeFromBoxedFunctor(std::make_unique<Kernel>(launcher)));
#endif
  }
}

inline void parallel_for(int64_t count, int64_t grain, void (*body)(const void*, int64_t, int64_t),
                         const void* context) {
  const auto piece = [=](int64_t begin, int64_t end) { body(context, begin, end); };
#if STABLE_ABI
  torch::stable::parallel_for(0, count, grain, piece);
#else
  at::parallel_for(0, count, grain, piece);
#endif
}

#if STABLE_ABI
constexpr Host pytorch{add, call, parallel_for, Room<Allocator>::allocate, Allocator::release};
#else
constexpr Host pytorch{add, nullptr, parallel_for, Room<Allocator>::allocate, Allocator::release};
#endif

}  // namespace inline_loader
