// What convolution a kernel is compiled for: channels in and out; a filter's extents, (planes,) rows, columns.
#pragma once

namespace conv {

template <int kIn_, int kOut_, int... kExtents> struct Filter {
  static constexpr int kDims = sizeof...(kExtents), kExtent[] = {kExtents...}, kTaps = (kExtents * ...);
  static constexpr int kIn = kIn_, kOut = kOut_, kDepth = kDims == 3 ? kExtent[0] : 1;
  static constexpr int kHeight = kExtent[kDims - 2], kWidth = kExtent[kDims - 1];
};

}  // namespace conv
