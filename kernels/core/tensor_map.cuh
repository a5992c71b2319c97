// Arrays in global memory as the copy engine sees them: of images it gathers what a filter's tap meets at
// many of its positions, across rows and samples, with zeros outside of an image; of planes it takes runs.
// From sm_90 on. tests/emulation has a version without a GPU.
#pragma once
#include <cuda.h>

#include <stdexcept>
#include <string>

#include "core/scalar.h"
#include "core/tensor_core.cuh"

namespace tensor_core {

// Describes an operand of which a row of A, or a column of B, has kDepth values of k, 64, 32 or 16, the next
// behind it: unit u of 16 bytes of row r lies in the place of swizzled<kDepth>(r, u). The first row's address
// is a multiple of eight rows. Adding 2 moves on by 16 values of k.
template <int kDepth> HOST_DEVICE int swizzled(int row, int unit) {
  return unit ^ row / (64 / kDepth) % (kDepth / 8);
}
template <int kDepth> __device__ __forceinline__ uint64_t describe_swizzled(uint32_t address) {
  static_assert(kDepth == 64 || kDepth == 32 || kDepth == 16);
  constexpr uint64_t kKind = kDepth == 64 ? 1 : kDepth == 32 ? 2 : 3;
  return uint64_t((address & 0x3ffff) >> 4) | uint64_t(1) << 16 | uint64_t(kDepth * 16 >> 4) << 32 |
         kKind << 62;
}

// Describes B, of multiply_add<Operand, 1>, of which 64 columns of a value of k lie side by side, 128 bytes,
// those of the next k behind them, swizzled as above, and the next 64 columns behind so many of 64 k. Adding
// 128 moves on by 16 values of k.
__device__ __forceinline__ uint64_t describe_swizzled_transposed(uint32_t address) {
  return uint64_t((address & 0x3ffff) >> 4) | uint64_t(64 * 128 >> 4) << 16 | uint64_t(8 * 128 >> 4) << 32 |
         uint64_t(1) << 62;
}

// Four 8×8 matrices of 16-bit elements, as load_matrices_transposed gives them, back to shared memory; lane
// 8 i + r gives the place of row r (16 bytes) of matrix i.
__device__ __forceinline__ void store_matrices_transposed(void* row, const uint32_t (&registers)[4]) {
#if __CUDA_ARCH__ >= 900 && (!defined(CAPABILITY) || CAPABILITY == 90)
  asm volatile(
      "stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(shared_address(row)),
      "r"(registers[0]), "r"(registers[1]), "r"(registers[2]), "r"(registers[3])
      : "memory");
#else
#pragma unroll
  for (int i = 0; i < 4; i++) {
    const int lane = threadIdx.x % 32,
              of = __shfl_sync(0xffffffffu, int(shared_address(row)), 8 * i + lane / 4);
    uint32_t turned;
    asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(turned) : "r"(registers[i]));
    asm volatile("st.shared.b32 [%0], %1;" ::"r"(of + lane % 4 * 4), "r"(turned) : "memory");
  }
#endif
}

// A filter's stride, what of its padding lies before an image and behind it, and its dilation: of planes, of
// rows, of columns.
struct Walk {
  int stride[3], before[3], behind[3], dilation[3];
  bool pads() const { return before[0] || before[1] || before[2] || behind[0] || behind[1] || behind[2]; }
};

// An image (N, H, W, C), or volume (N, D, H, W, C), kDims = 3, of Operand, half_t or bfloat16_t, C a multiple
// of 8, which begins at a multiple of 16 bytes. A copy takes kChannels channels, those of a swizzled operand,
// at `positions`. Where pixels are folded, one has the channels of so many neighbours in its row, from itself
// on, and the last of a row that have too few are none.
template <int kDims, int kChannels> struct ImageMap {
  CUtensorMap map;
};

// A function of the driver by its name. Throws std::runtime_error.
template <class Function> Function* driver_function(const char* name) {
  void* found = nullptr;
  cudaDriverEntryPointQueryResult result;
#if CUDART_VERSION >= 12050
  cudaGetDriverEntryPointByVersion(name, &found, 12000, cudaEnableDefault, &result);
#else
  cudaGetDriverEntryPoint(name, &found, cudaEnableDefault, &result);
#endif
  if (!found) throw std::runtime_error(std::string("the driver knows no ") + name);
  return reinterpret_cast<Function*>(found);
}
template <class Operand>
constexpr auto kOperandType =
    std::is_same_v<Operand, half_t> ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16 : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;

// Throws std::runtime_error where `status` isn't success; else mends a map of an array of so many bytes:
// drivers up to CUDA 13.1 mark small ones wrongly. CUTLASS clears the same bit.
inline void finish_map(CUtensorMap& map, CUresult status, int64_t bytes) {
  if (status != CUDA_SUCCESS)
    throw std::runtime_error("the driver refuses an array's sizes: " + std::to_string(int(status)));
  int driver = 0;
  if (cudaDriverGetVersion(&driver) == cudaSuccess && driver <= 13010 && bytes < 131072)
    reinterpret_cast<uint64_t*>(&map)[1] &= ~(uint64_t(1) << 21);
}

template <int kDims, int kChannels, class Operand>
ImageMap<kDims, kChannels> image_map(const Operand* x, int64_t N, int64_t D, int64_t H, int64_t W, int64_t C,
                                     const int (&taps)[3], const Walk& walk, int positions, int folded = 1) {
  const auto encode = driver_function<decltype(cuTensorMapEncodeIm2col)>("cuTensorMapEncodeIm2col");
  ImageMap<kDims, kChannels> image;
  const int64_t extents[] = {D, H, W};
  // Channels, then columns, rows and planes, then samples. Of the pixels that a filter's first tap meets:
  // where they begin, and how far from the image's last they end.
  cuuint64_t sizes[kDims + 2] = {cuuint64_t(C * folded)}, pitches[kDims + 1] = {cuuint64_t(C * 2)};
  cuuint32_t strides[kDims + 2] = {1};
  int first[kDims], last[kDims];
  for (int i = 0; i < kDims; i++) {
    const int axis = 2 - i;
    sizes[i + 1] = extents[axis], pitches[i + 1] = pitches[i] * extents[axis],
              strides[i + 1] = walk.stride[axis];
    first[i] = -walk.before[axis], last[i] = walk.behind[axis] - (taps[axis] - 1) * walk.dilation[axis];
  }
  sizes[1] -= folded - 1, sizes[kDims + 1] = N, strides[kDims + 1] = 1;
  static_assert(kChannels == 64 || kChannels == 32 || kChannels == 16);
  constexpr auto kSwizzle = kChannels == 64   ? CU_TENSOR_MAP_SWIZZLE_128B
                            : kChannels == 32 ? CU_TENSOR_MAP_SWIZZLE_64B
                                              : CU_TENSOR_MAP_SWIZZLE_32B;
  const CUresult status =
      encode(&image.map, kOperandType<Operand>, kDims + 2, const_cast<Operand*>(x), sizes, pitches, first,
             last, kChannels, positions, strides, CU_TENSOR_MAP_INTERLEAVE_NONE, kSwizzle,
             CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  finish_map(image.map, status, N * D * H * W * C * 2);
  return image;
}

// Planes (N, C, S) of Operand, S a multiple of 8, which begin at a multiple of 16 bytes. A copy takes 64
// positions, from a multiple of 8 on, of 64 channels, as describe_swizzled_transposed has them.
struct PlanesMap {
  CUtensorMap map;
};

template <class Operand> PlanesMap planes_map(const Operand* x, int64_t N, int64_t C, int64_t S) {
  const auto encode = driver_function<decltype(cuTensorMapEncodeTiled)>("cuTensorMapEncodeTiled");
  PlanesMap planes;
  const cuuint64_t sizes[] = {cuuint64_t(S), cuuint64_t(C), cuuint64_t(N)},
                   pitches[] = {cuuint64_t(S * 2), cuuint64_t(C * S * 2)};
  const cuuint32_t box[] = {64, 64, 1}, strides[] = {1, 1, 1};
  const CUresult status =
      encode(&planes.map, kOperandType<Operand>, 3, const_cast<Operand*>(x), sizes, pitches, box, strides,
             CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
             CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  finish_map(planes.map, status, N * C * S * 2);
  return planes;
}

#if __CUDA_ARCH__ >= 900

// The pixel that a filter's first tap meets at a position; it may lie outside.
struct Pixel {
  int n, plane, row, column;
};

// From a filter's first tap to another.
struct Offset {
  uint16_t planes, rows, columns;
};

// What a tap of a filter meets at `positions`, from the one on whose first pixel is given: kChannels channels
// from `channel` on, to `shared`, and so many bytes to the barrier: in this block, or in all blocks of a
// cluster that `blocks` has a bit for.
template <int kChannels>
__device__ __forceinline__ void copy_image(void* shared, const ImageMap<2, kChannels>& image,
                                           uint64_t* barrier, int channel, const Pixel& first,
                                           const Offset& tap) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.im2col.mbarrier::complete_tx::bytes "
      "[%0], [%1, {%3, %4, %5, %6}], [%2], {%7, %8};" ::"r"(shared_address(shared)),
      "l"(&image.map), "r"(shared_address(barrier)), "r"(channel), "r"(first.column), "r"(first.row),
      "r"(first.n), "h"(tap.columns), "h"(tap.rows)
      : "memory");
}
template <int kChannels>
__device__ __forceinline__ void copy_image(void* shared, const ImageMap<2, kChannels>& image,
                                           uint64_t* barrier, int channel, const Pixel& first,
                                           const Offset& tap, uint16_t blocks) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.im2col.mbarrier::complete_tx::bytes.multicast::cluster "
      "[%0], [%1, {%3, %4, %5, %6}], [%2], {%7, %8}, %9;" ::"r"(shared_address(shared)),
      "l"(&image.map), "r"(shared_address(barrier)), "r"(channel), "r"(first.column), "r"(first.row),
      "r"(first.n), "h"(tap.columns), "h"(tap.rows), "h"(blocks)
      : "memory");
}
template <int kChannels>
__device__ __forceinline__ void copy_image(void* shared, const ImageMap<3, kChannels>& image,
                                           uint64_t* barrier, int channel, const Pixel& first,
                                           const Offset& tap) {
  asm volatile(
      "cp.async.bulk.tensor.5d.shared::cluster.global.im2col.mbarrier::complete_tx::bytes "
      "[%0], [%1, {%3, %4, %5, %6, %7}], [%2], {%8, %9, %10};" ::"r"(shared_address(shared)),
      "l"(&image.map), "r"(shared_address(barrier)), "r"(channel), "r"(first.column), "r"(first.row),
      "r"(first.plane), "r"(first.n), "h"(tap.columns), "h"(tap.rows), "h"(tap.planes)
      : "memory");
}
template <int kChannels>
__device__ __forceinline__ void copy_image(void* shared, const ImageMap<3, kChannels>& image,
                                           uint64_t* barrier, int channel, const Pixel& first,
                                           const Offset& tap, uint16_t blocks) {
  asm volatile(
      "cp.async.bulk.tensor.5d.shared::cluster.global.im2col.mbarrier::complete_tx::bytes.multicast::cluster "
      "[%0], [%1, {%3, %4, %5, %6, %7}], [%2], {%8, %9, %10}, %11;" ::"r"(shared_address(shared)),
      "l"(&image.map), "r"(shared_address(barrier)), "r"(channel), "r"(first.column), "r"(first.row),
      "r"(first.plane), "r"(first.n), "h"(tap.columns), "h"(tap.rows), "h"(tap.planes), "h"(blocks)
      : "memory");
}

// 64 positions of sample n, from `position` on, of 64 channels from `channel` on, to `shared`, as copy_image
// does; zeros for those that aren't there.
__device__ __forceinline__ void copy_planes(void* shared, const PlanesMap& planes, uint64_t* barrier,
                                            int channel, int position, int n) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
      "[%0], [%1, {%3, %4, %5}], [%2];" ::"r"(shared_address(shared)),
      "l"(&planes.map), "r"(shared_address(barrier)), "r"(position), "r"(channel), "r"(n)
      : "memory");
}
__device__ __forceinline__ void copy_planes(void* shared, const PlanesMap& planes, uint64_t* barrier,
                                            int channel, int position, int n, uint16_t blocks) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster "
      "[%0], [%1, {%3, %4, %5}], [%2], %6;" ::"r"(shared_address(shared)),
      "l"(&planes.map), "r"(shared_address(barrier)), "r"(position), "r"(channel), "r"(n), "h"(blocks)
      : "memory");
}

#endif

}  // namespace tensor_core
