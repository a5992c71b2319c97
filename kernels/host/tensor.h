// A launcher's tensors with their sizes, and memory for as long as it runs.
//
//   EXPORT void forward(Out<output_t> y, In<value_t> x, In<value_t> weight, double scale,
//                       cudaStream_t stream) {
//     const Scratch<float> sums(x.size(0) * weight.size(0), stream);
//     kernel<<<blocks, threads, 0, stream>>>(y, sums, x, weight, float(scale), x.numel());
//   }
//
// They are the host's: a kernel takes pointers, into which they turn by themselves. Tensors are contiguous.
// One without elements is false and has no data: so is an output that nobody wants.
#pragma once
#include <stdexcept>
#include <string>
#include "host/host.h"

namespace inline_loader {

// A tensor's sizes, the first `dims`. By default those of a tensor without elements.
constexpr int kMostDims = 8;
struct Sizes {
  int64_t dims = 1, sizes[kMostDims] = {};
};

template <class T> struct View : Sizes {
  T* data = nullptr;

  // Of dimension `index`, from the last one on where it is negative. Throws std::out_of_range where there is
  // none.
  int64_t size(int index) const {
    const int64_t at = index < 0 ? index + dims : index;
    if (at < 0 || at >= dims)
      throw std::out_of_range("expected a tensor with a dimension " + std::to_string(index) +
                              ", got one of " + std::to_string(dims) + " dimensions");
    return sizes[at];
  }
  int64_t numel() const {
    int64_t count = 1;
    for (int i = 0; i < dims; i++) count *= sizes[i];
    return count;
  }
  bool empty() const { return !data; }
  explicit operator bool() const { return data; }
  operator T*() const { return data; }
};

}  // namespace inline_loader

// What a launcher reads.
template <class T> struct In : inline_loader::View<const T> {};

// What it writes to.
template <class T> struct Out : inline_loader::View<T> {
  operator In<T>() const { return {{static_cast<const inline_loader::Sizes&>(*this), this->data}}; }
};

// `count` values of a launcher's own, uninitialised, from PyTorch's allocator: in a CUDA graph's pool while
// it is captured. On a GPU they are ordered as `stream`, the launcher's, is: what was launched there before
// they are given back may use them. Throws std::runtime_error where there is no memory, or for a negative
// count.
template <class T> class Scratch {
 public:
#ifdef __CUDACC__
  Scratch(int64_t count, CUstream_st*) : Scratch(count, 0) {}
#else
  explicit Scratch(int64_t count) : Scratch(count, 0) {}
#endif
  Scratch(Scratch&& other) noexcept
      : data(std::exchange(other.data, nullptr)), memory_(std::exchange(other.memory_, nullptr)) {}
  Scratch& operator=(Scratch&&) = delete;
  ~Scratch() {
    if (memory_) inline_loader::host->release(memory_);
  }
  operator T*() const { return data; }

  T* data = nullptr;  // null for a count of 0

 private:
  Scratch(int64_t count, int) {
    if (count < 0 || count > INT64_MAX / int64_t(sizeof(T)))
      throw std::runtime_error("expected scratch memory for a number of values, got " +
                               std::to_string(count));
    if (count) data = static_cast<T*>(inline_loader::host->allocate(count * int64_t(sizeof(T)), &memory_));
  }

  void* memory_ = nullptr;
};
