// Images in global memory as the copy engine sees them: it gathers what a filter's tap meets at many of its
// positions, across rows and samples, with zeros outside of an image. From sm_90 on. tests/emulation has a
// version without a GPU.
#pragma once
#include <cuda.h>

#include <stdexcept>
#include <string>

#include "core/scalar.h"
#include "core/tensor_core.cuh"

namespace tensor_core {

// A filter's stride, what of its padding lies before an image and behind it, and its dilation: of rows, of
// columns.
struct Walk {
  int stride[2], before[2], behind[2], dilation[2];
};

// An image (N, H, W, C) of Operand, half_t or bfloat16_t, C a multiple of 8, which begins at a multiple of 16
// bytes. A copy takes up to 64 channels, those of a swizzled operand (core/tensor_core.cuh), at `positions`.
struct ImageMap {
  CUtensorMap map;
};

template <class Operand>
ImageMap image_map(const Operand* x, int64_t N, int64_t H, int64_t W, int64_t C, const int (&taps)[2],
                   const Walk& walk, int positions) {
  void* found = nullptr;
  cudaDriverEntryPointQueryResult result;
#if CUDART_VERSION >= 12050
  cudaGetDriverEntryPointByVersion("cuTensorMapEncodeIm2col", &found, 12000, cudaEnableDefault, &result);
#else
  cudaGetDriverEntryPoint("cuTensorMapEncodeIm2col", &found, cudaEnableDefault, &result);
#endif
  if (!found) throw std::runtime_error("the driver knows no cuTensorMapEncodeIm2col");
  ImageMap image;
  const cuuint64_t sizes[] = {cuuint64_t(C), cuuint64_t(W), cuuint64_t(H), cuuint64_t(N)};
  const cuuint64_t pitches[] = {cuuint64_t(C * 2), cuuint64_t(W * C * 2), cuuint64_t(H * W * C * 2)};
  // Of the pixels that a filter's first tap meets: where they begin, and how far from the image's last they
  // end.
  const int first[] = {-walk.before[1], -walk.before[0]};
  const int last[] = {walk.behind[1] - (taps[1] - 1) * walk.dilation[1],
                      walk.behind[0] - (taps[0] - 1) * walk.dilation[0]};
  const cuuint32_t strides[] = {1, cuuint32_t(walk.stride[1]), cuuint32_t(walk.stride[0]), 1};
  const auto type = std::is_same_v<Operand, half_t> ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16
                                                    : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
  const CUresult status = reinterpret_cast<decltype(&cuTensorMapEncodeIm2col)>(found)(
      &image.map, type, 4, const_cast<Operand*>(x), sizes, pitches, first, last, 64, positions, strides,
      CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
      CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (status != CUDA_SUCCESS)
    throw std::runtime_error("cuTensorMapEncodeIm2col refuses the sizes: " + std::to_string(int(status)));
  // Drivers up to CUDA 13.1 mark small tensors wrongly; CUTLASS clears the same bit.
  int driver = 0;
  if (cudaDriverGetVersion(&driver) == cudaSuccess && driver <= 13010 && N * H * W * C * 2 < 131072)
    reinterpret_cast<uint64_t*>(&image.map)[1] &= ~(uint64_t(1) << 21);
  return image;
}

#if __CUDA_ARCH__ >= 900

// The pixel that a filter's first tap meets at a position; it may lie outside.
struct Pixel {
  int n, row, column;
};

// What tap (row, column) of a dilated filter meets at `positions`, from the one on whose first pixel is
// given: 64 channels from `channel` on, to `shared`, and so many bytes to the barrier: in this block, or in
// all blocks of a cluster that `blocks` has a bit for.
__device__ __forceinline__ void copy_image(void* shared, const ImageMap& image, uint64_t* barrier,
                                           int channel, const Pixel& first, int row, int column) {
  asm volatile("cp.async.bulk.tensor.4d.shared::cluster.global.im2col.mbarrier::complete_tx::bytes "
               "[%0], [%1, {%3, %4, %5, %6}], [%2], {%7, %8};"
               ::"r"(shared_address(shared)), "l"(&image.map), "r"(shared_address(barrier)), "r"(channel),
                 "r"(first.column), "r"(first.row), "r"(first.n), "h"(uint16_t(column)), "h"(uint16_t(row))
               : "memory");
}
__device__ __forceinline__ void copy_image(void* shared, const ImageMap& image, uint64_t* barrier,
                                           int channel, const Pixel& first, int row, int column,
                                           uint16_t blocks) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.im2col.mbarrier::complete_tx::bytes.multicast::cluster "
      "[%0], [%1, {%3, %4, %5, %6}], [%2], {%7, %8}, %9;" ::"r"(shared_address(shared)),
      "l"(&image.map), "r"(shared_address(barrier)), "r"(channel), "r"(first.column), "r"(first.row),
      "r"(first.n), "h"(uint16_t(column)), "h"(uint16_t(row)), "h"(blocks)
      : "memory");
}

#endif

}  // namespace tensor_core
