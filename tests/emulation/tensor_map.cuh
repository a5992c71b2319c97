// What kernels/core/tensor_map.cuh offers, in C++ for emulation/cuda.h.
#pragma once
#include <stdexcept>
#include <vector>

#include "core/tensor_core.cuh"

namespace tensor_core {

struct Walk {
  int stride[3], before[3], behind[3], dilation[3];
  bool pads() const {
    return before[0] || before[1] || before[2] || behind[0] || behind[1] || behind[2];
  }
};
inline void store_matrices_transposed(void* row, const uint32_t (&registers)[4]) {
  const uint64_t* const addresses = emulation::of_all_lanes(shared_address(row));
  const int g = emulation::lane() / 4, t = emulation::lane() % 4;
  for (int i = 0; i < 4; i++)
    for (int k = 0; k < 2; k++)
      memcpy(const_cast<char*>(of_row(addresses, 8 * i + 2 * t + k)) + 2 * g,
             reinterpret_cast<const char*>(registers + i) + 2 * k, 2);
}

template <int kDims, int kChannels> struct ImageMap {
  const uint16_t* x;
  int64_t size[5];  // N, D, H, W, C
  int taps[3], positions, folded;
  Walk walk;
};
struct Pixel {
  int n, plane, row, column;
};
struct Offset {
  uint16_t planes, rows, columns;
};

template <int kDims, int kChannels, class Operand>
ImageMap<kDims, kChannels> image_map(const Operand* x, int64_t N, int64_t D, int64_t H, int64_t W, int64_t C,
                                     const int (&taps)[3], const Walk& walk, int positions, int folded = 1) {
  bool known = C % 8 == 0 && uintptr_t(x) % 16 == 0 && positions <= 1024 && (kDims == 3 || (D == 1 && taps[0] == 1));
  const int most = kDims == 3 ? 15 : 127;
  for (int d = 3 - kDims; d < 3; d++) {
    const int reach = (taps[d] - 1) * walk.dilation[d];
    known &= walk.stride[d] <= 8 && walk.before[d] <= most && reach - walk.behind[d] <= most && walk.behind[d] <= most;
  }
  if (!known) throw std::runtime_error("an image that the copy engine can't read");
  return {reinterpret_cast<const uint16_t*>(x), {N, D, H, W, C}, {taps[0], taps[1], taps[2]}, positions, folded, walk};
}

template <int kDims, int kChannels>
void copy_image(void* shared, const ImageMap<kDims, kChannels>& image, uint64_t* barrier, int channel,
                const Pixel& first, const Offset& tap) {
  if (shared_address(shared) % (kChannels * 16)) emulation::failure = "a swizzled operand that is not aligned";
  const auto& [N, D, H, W, C] = image.size;
  const Walk& walk = image.walk;
  const auto last = [&](int d) {  // of a filter's first pixels
    return image.size[d + 1] - 1 - (d == 2) * (image.folded - 1) + walk.behind[d] - (image.taps[d] - 1) * walk.dilation[d];
  };
  std::vector<uint16_t> box(size_t(image.positions) * kChannels, 0);
  Pixel at = first;
  for (int i = 0; i < image.positions; i++) {
    const int64_t d = at.plane + tap.planes, h = at.row + tap.rows, w = at.column + tap.columns;
    const bool inside = at.n < N && d >= 0 && d < D && h >= 0 && h < H && w >= 0 && w <= W - image.folded;
    for (int c = 0; inside && c < kChannels && channel + c < C * image.folded; c++)
      box[i * kChannels + swizzled<kChannels>(i, c / 8) * 8 + c % 8] =
          image.x[(((at.n * D + d) * H + h) * W + w) * C + channel + c];
    if ((at.column += walk.stride[2]) <= last(2)) continue;
    at.column = -walk.before[2];
    if ((at.row += walk.stride[1]) <= last(1)) continue;
    at.row = -walk.before[1];
    if ((at.plane += walk.stride[0]) <= last(0)) continue;
    at.plane = -walk.before[0], at.n++;
  }
  emulation::copy_bulk(shared, box.data(), int(box.size() * 2), barrier);
}
template <int kDims, int kChannels>
void copy_image(void* shared, const ImageMap<kDims, kChannels>& image, uint64_t* barrier, int channel,
                const Pixel& first, const Offset& tap, uint16_t) {
  copy_image(shared, image, barrier, channel, first, tap);
}

struct PlanesMap {
  const uint16_t* x;
  int64_t N, C, S;
};
template <class Operand> PlanesMap planes_map(const Operand* x, int64_t N, int64_t C, int64_t S) {
  if (uintptr_t(x) % 16 || S % 8) throw std::runtime_error("planes that the copy engine can't read");
  return {reinterpret_cast<const uint16_t*>(x), N, C, S};
}
inline void copy_planes(void* shared, const PlanesMap& planes, uint64_t* barrier, int channel, int position, int n) {
  if (shared_address(shared) % 1024) emulation::failure = "a swizzled operand that is not aligned";
  if (position % 8) emulation::failure = "planes from no multiple of 16 bytes on";
  const auto& [x, N, C, S] = planes;
  std::vector<uint16_t> box(64 * 64, 0);
  for (int row = 0; row < 64; row++)
    for (int i = 0; i < 64; i++)
      if (n < N && channel + row < C && position + i < S)
        box[row * 64 + swizzled<64>(row, i / 8) * 8 + i % 8] = x[(n * C + channel + row) * S + position + i];
  emulation::copy_bulk(shared, box.data(), int(box.size() * 2), barrier);
}
inline void copy_planes(void* shared, const PlanesMap& planes, uint64_t* barrier, int channel, int position, int n,
                        uint16_t) {
  copy_planes(shared, planes, barrier, channel, position, n);
}

}  // namespace tensor_core
