// What a build and PyTorch's side (pytorch.h) know of each other, in words that are no header's of PyTorch:
// those alone take a second to compile. That side is compiled once for all builds.
//
// An `Entry` is a launcher as an operator. `parallel_for` threads the CPU kernels with PyTorch's own thread
// pool. tensor.h has a launcher's tensors with their sizes, sized.h what `Entry` has to know of these.
#pragma once
#include <stddef.h>
#include <stdint.h>

#include <type_traits>
#include <utility>

#ifdef __CUDACC__
struct __half;
struct __nv_bfloat16;
#endif
struct CUstream_st;  // cudaStream_t points to it

namespace inline_loader {

// A launcher's argument. Of a tensor it is the data.
union Argument {
  void* data;
  int64_t integer;
  double real;
  bool flag;
};

struct Sizes;  // of a tensor, in tensor.h

// What a parameter is: one of these, or a tensor, whose kind is the number of its dtype in PyTorch.
enum : int8_t { kInteger = -4, kReal, kFlag, kStream };
template <class T> struct Element;
template <class T> struct Parameter;
template <class T> constexpr bool is_sized = false;  // does it take a tensor with its sizes?
#define INLINE_LOADER_ELEMENT(T, number)   \
  template <> struct Element<T> {          \
    static constexpr int8_t kind = number; \
  };
#define INLINE_LOADER_PARAMETER(T, number, member)                    \
  template <> struct Parameter<T> {                                   \
    static constexpr int8_t kind = number;                            \
    static T of(const Argument& argument) { return argument.member; } \
  };
INLINE_LOADER_ELEMENT(uint8_t, 0)
INLINE_LOADER_ELEMENT(int32_t, 3)
INLINE_LOADER_ELEMENT(int64_t, 4)
INLINE_LOADER_ELEMENT(float, 6)
INLINE_LOADER_ELEMENT(double, 7)
INLINE_LOADER_ELEMENT(bool, 11)
#ifdef __CUDACC__
INLINE_LOADER_ELEMENT(__half, 5)
INLINE_LOADER_ELEMENT(__nv_bfloat16, 15)
#endif
template <class T> struct Element<const T> : Element<T> {};
template <class T, class = void> constexpr bool is_element = false;
template <class T> constexpr bool is_element<T, decltype(void(Element<T>::kind))> = true;
INLINE_LOADER_PARAMETER(int64_t, kInteger, integer)
INLINE_LOADER_PARAMETER(double, kReal, real)
INLINE_LOADER_PARAMETER(bool, kFlag, flag)
template <class T> struct Parameter<T*> : Element<T> {
  static T* of(const Argument& argument) { return static_cast<T*>(argument.data); }
};
template <> struct Parameter<CUstream_st*> {
  static constexpr int8_t kind = kStream;
  static CUstream_st* of(const Argument& argument) { return static_cast<CUstream_st*>(argument.data); }
};

struct Launcher {
  const char* const* names;  // the operator's schema and name; the launcher's name, those of its parameters
  const int8_t* kinds;       // of the parameters
  int count;
  bool sized;  // does any parameter take a tensor's sizes?
  bool asked;  // does it return a number, and launch nothing? it is given sizes without data
  int64_t (*run)(const Argument* arguments,
                 const Sizes* sizes);                  // sizes: of each parameter, read where it takes them
  void (*boxed)(uint64_t* stack, uint64_t, uint64_t);  // as PyTorch's stable ABI calls it
};

// PyTorch, as a build needs it.
struct Host {
  void (*add)(const char* name_space, const char* dispatch_key, const Launcher* const* launchers, int count);
  void (*call)(const Launcher& launcher, uint64_t* stack);
  void (*parallel_for)(int64_t count, int64_t grain,
                       void (*body)(const void* context, int64_t begin, int64_t end), const void* context);
  // Memory on the current device, ordered as its current stream is: null for no bytes. `memory` is to be
  // given back.
  void* (*allocate)(int64_t bytes, void** memory);
  void (*release)(void* memory);
};
static const Host* host;  // of this build, from its registration on

template <class T> T argument(const Argument* arguments, const Sizes* sizes, size_t index) {
  if constexpr (is_sized<T>) return Parameter<T>::of(arguments[index], sizes, index);
  else return Parameter<T>::of(arguments[index]);
}

// Not by decltype(function): nvcc writes a launcher's name there, which may be overloaded.
template <auto function, const char* const* names> struct Entry;
template <class R, class... T, R (*function)(T...), const char* const* names> struct Entry<function, names> {
  template <size_t... I>
  static R run_with(const Argument* arguments, const Sizes* sizes, std::index_sequence<I...>) {
    return function(argument<T>(arguments, sizes, I)...);
  }
  static int64_t run(const Argument* arguments, const Sizes* sizes) {
    constexpr std::index_sequence_for<T...> all;
    if constexpr (std::is_void_v<R>) return run_with(arguments, sizes, all), 0;
    else return run_with(arguments, sizes, all);
  }
  static void boxed(uint64_t* stack, uint64_t, uint64_t) { host->call(launcher, stack); }
  static constexpr int8_t kinds[] = {Parameter<T>::kind..., 0};
  static constexpr Launcher launcher{names, kinds, sizeof...(T), (is_sized<T> || ...), !std::is_void_v<R>,
                                     run,   boxed};
};

}  // namespace inline_loader

#ifndef __CUDACC__
namespace host {

// body(begin, end) over [0, count) in parallel pieces of at least `grain`.
template <class Body> void parallel_for(int64_t count, int64_t grain, const Body& body) {
  if (count <= 0) return;
  const auto piece = [](const void* context, int64_t begin, int64_t end) {
    (*static_cast<const Body*>(context))(begin, end);
  };
  inline_loader::host->parallel_for(count, grain, piece, &body);
}

}  // namespace host
#endif
