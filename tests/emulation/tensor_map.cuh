// What kernels/core/tensor_map.cuh offers, in C++ for emulation/cuda.h.
#pragma once
#include <stdexcept>
#include <vector>

#include "core/tensor_core.cuh"

namespace tensor_core {

struct Walk {
  int stride[2], before[2], behind[2], dilation[2];
};
struct ImageMap {
  const uint16_t* x;
  int64_t size[4];  // N, H, W, C
  int taps[2], positions;
  Walk walk;
};
struct Pixel {
  int n, row, column;
};

template <class Operand>
ImageMap image_map(const Operand* x, int64_t N, int64_t H, int64_t W, int64_t C, const int (&taps)[2],
                   const Walk& walk, int positions) {
  if (C % 8 || uintptr_t(x) % 16) throw std::runtime_error("an image that the copy engine can't read");
  return {reinterpret_cast<const uint16_t*>(x), {N, H, W, C}, {taps[0], taps[1]}, positions, walk};
}

inline void copy_image(void* shared, const ImageMap& image, uint64_t* barrier, int channel,
                       const Pixel& first, int row, int column) {
  if (shared_address(shared) % 1024) emulation::failure = "a swizzled operand that is not aligned";
  const auto& [N, H, W, C] = image.size;
  const Walk& walk = image.walk;
  const auto last = [&](int d, int64_t size) {  // of a filter's first pixels
    return size - 1 + walk.behind[d] - (image.taps[d] - 1) * walk.dilation[d];
  };
  std::vector<uint16_t> box(size_t(image.positions) * 64, 0);
  Pixel at = first;
  for (int i = 0; i < image.positions; i++) {
    const int64_t h = at.row + row, w = at.column + column;
    const bool inside = at.n < N && h >= 0 && h < H && w >= 0 && w < W;
    for (int c = 0; inside && c < 64 && channel + c < C; c++)
      box[i * 64 + ((c / 8) ^ i % 8) * 8 + c % 8] = image.x[((at.n * H + h) * W + w) * C + channel + c];
    if ((at.column += walk.stride[1]) <= last(1, W)) continue;
    at.column = -walk.before[1];
    if ((at.row += walk.stride[0]) <= last(0, H)) continue;
    at.row = -walk.before[0], at.n++;
  }
  emulation::copy_bulk(shared, box.data(), int(box.size() * 2), barrier);
}
inline void copy_image(void* shared, const ImageMap& image, uint64_t* barrier, int channel,
                       const Pixel& first, int row, int column, uint16_t) {
  copy_image(shared, image, barrier, channel, first, row, column);
}

}  // namespace tensor_core
