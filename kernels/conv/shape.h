// What convolution a kernel is compiled for.
#pragma once

namespace conv {

// Channels in and out; a filter's extents, (depth,) rows, columns.
template <int kIn_, int kOut_, int... kExtents> struct Filter {
  static constexpr int kDims = sizeof...(kExtents);
  static_assert(kDims == 2 || kDims == 3);
  static constexpr int kExtent[] = {kExtents...};
  static constexpr int kIn = kIn_, kOut = kOut_, kTaps = (kExtents * ...);
  static constexpr int kDepth = kDims == 3 ? kExtent[0] : 1, kHeight = kExtent[kDims - 2],
                       kWidth = kExtent[kDims - 1];
};

}  // namespace conv
