// Tensors with their sizes as parameters of what host.h makes an operator.
#pragma once
#include "host/tensor.h"

namespace inline_loader {

template <class T> constexpr bool is_sized<In<T>> = true;
template <class T> constexpr bool is_sized<Out<T>> = true;
template <class T> struct Parameter<In<T>> : Element<T> {
  static In<T> of(const Argument& argument, const Sizes* sizes, size_t index) {
    return {{sizes[index], static_cast<const T*>(argument.data)}};
  }
};
template <class T> struct Parameter<Out<T>> : Element<T> {
  static Out<T> of(const Argument& argument, const Sizes* sizes, size_t index) {
    return {{sizes[index], static_cast<T*>(argument.data)}};
  }
};

}  // namespace inline_loader
