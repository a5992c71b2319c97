// An image with zeros around it, for a mainloop that takes none beside it: of few channels in, so that to
// copy it takes little of what the products take.
#pragma once
#include "core/launch.cuh"
#include "host/tensor.h"

namespace conv {

// Extents of planes, rows and columns, and zeros before the image.
struct Padding {
  int size[3], padded[3], before[3];
};

constexpr int kPaddingThreads = 256;

// A warp has a row of the result at a time.
template <class T>
__global__ void __launch_bounds__(kPaddingThreads)
    pad_kernel(T* to, const T* from, int64_t rows, const Padding padding) {
  await_previous_kernel();
  const int64_t row = int64_t(blockIdx.x) * (kPaddingThreads / 32) + threadIdx.x / 32;
  if (row >= rows) return;
  const auto& [size, padded, before] = padding;
  const int64_t plane = row / padded[1], volume = plane / padded[0];
  const int y = int(row - plane * padded[1]) - before[1], z = int(plane - volume * padded[0]) - before[0];
  const bool inside = unsigned(y) < unsigned(size[1]) && unsigned(z) < unsigned(size[0]);
  const T* const line = from + ((volume * size[0] + z) * size[1] + y) * int64_t(size[2]);
  for (int i = threadIdx.x % 32; i < padded[2]; i += 32) {
    const int x = i - before[2];
    to[row * padded[2] + i] = inside && unsigned(x) < unsigned(size[2]) ? line[x] : T(0);
  }
}

// Of x (N, C, (D,) H, W) for as long as a launcher runs. before, behind: zeros along planes, rows and
// columns.
template <class T> class Padded {
 public:
  Padded(const In<T>& image, const int (&before)[3], const int (&behind)[3], cudaStream_t stream)
      : x(around(image, before, behind)), memory_(x.numel(), stream) {
    x.data = memory_;
    const int dimensions = int(image.dims) - 2;
    Padding padding{{1, 1, 1}, {1, 1, 1}, {before[0], before[1], before[2]}};
    for (int axis = 3 - dimensions; axis < 3; axis++)
      padding.size[axis] = int(image.size(axis - 3)), padding.padded[axis] = int(x.size(axis - 3));
    const int64_t rows = x.numel() / padding.padded[2];
    if (rows)
      launch_early(pad_kernel<T>, (rows + kPaddingThreads / 32 - 1) / (kPaddingThreads / 32), kPaddingThreads,
                   stream, memory_.data, image.data, rows, padding);
  }
  In<T> x;

 private:
  static In<T> around(In<T> image, const int (&before)[3], const int (&behind)[3]) {
    for (int axis = int(5 - image.dims); axis < 3; axis++)
      image.sizes[image.dims + axis - 3] += before[axis] + behind[axis];
    return image;
  }
  Scratch<T> memory_;
};

}  // namespace conv
