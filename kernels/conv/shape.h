// What convolution a kernel is compiled for.
#pragma once

namespace conv {

// A 2-D one: channels in and out; rows and columns of a filter.
template <int kIn_, int kOut_, int kHeight_, int kWidth_> struct Filter {
  static constexpr int kIn = kIn_, kOut = kOut_, kHeight = kHeight_, kWidth = kWidth_, kTaps = kHeight * kWidth;
};

}  // namespace conv
