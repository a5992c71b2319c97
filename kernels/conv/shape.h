// What convolution a kernel is compiled for: channels in and out; a filter's extents, (planes,) rows,
// columns; and what is around x.
#pragma once

namespace conv {

template <int kIn_, int kOut_, int... kExtents> struct Filter {
  static constexpr int kDims = sizeof...(kExtents), kExtent[] = {kExtents...}, kTaps = (kExtents * ...);
  static constexpr int kIn = kIn_, kOut = kOut_, kDepth = kDims == 3 ? kExtent[0] : 1;
  static constexpr int kHeight = kExtent[kDims - 2], kWidth = kExtent[kDims - 1];
};

// How many zeros are before x along each axis; kAny: are there any, there or behind?
template <bool kAny_, int... kBefore_> struct Around {
  static constexpr bool kAny = kAny_;
  static constexpr int kBefore[] = {kBefore_...};
};

}  // namespace conv
