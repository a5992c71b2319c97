// Tiles of v, for the weight's gradient, and the x that they need in shared memory: less its shift,
// scaled, split into two float16 (core/split.cuh).
#pragma once
#include "grad/selected/units.cuh"

namespace grad::selected {

template <int kLanes> __device__ __forceinline__ double lanes_sum(double value) {
  for (int offset = kLanes / 2; offset; offset /= 2) value += __shfl_xor_sync(~0u, value, offset);
  return value;
}

template <class P> struct Staging : P {
  using Base = P;
  using Base::kPlanes, Base::kTaps, Base::kIn, Base::kFilterH, Base::kFilterW, Base::kPoolH, Base::kPoolW;
  using typename Base::Geometry;

  static constexpr int kSteps = 8;  // products that one sum takes in a tensor core, which cuts off
  // A tile has kPoolH rows of positions, a row of windows where there is one, and up to kTileColumns columns.
  // The next one begins with a whole window. A row of it takes kPixels of x; so many that two blocks' stages
  // fit in shared memory.
  static constexpr int kWideStage =
      2 * kPlanes * (kPoolH + kFilterH - 1) * (128 + kFilterW + 7) * 16;  // bytes
  static constexpr int kPixels = kWideStage <= 80 << 10 ? 128 : 64;
  static constexpr int kTileColumns = kPixels - kFilterW + 1, kTileWindows = kTileColumns / kPoolW;
  static_assert(kPixels <= 16 * kSteps, "a row of a tile is one sum of a tensor core");

  static constexpr int kSampled = 128;  // pixels of a plane

  // The shift of each channel in: the mean of some pixels that are spread evenly. Any constant near x would
  // do.
  __device__ __forceinline__ static void find_shift(float* shift, const value_t* sample, int size) {
    const int lane = threadIdx.x % 32, count = min(size, kSampled);
    for (int c = threadIdx.x / 32; c < kIn; c += kWarps) {
      double sum = 0;
#pragma unroll
      for (int i = lane; i < kSampled; i += 32)
        if (i < count) sum += float(sample[int64_t(c) * size + int64_t(i) * size / count]);
      sum = lanes_sum<32>(sum);
      if (lane == 0) shift[c] = float(sum / count);
    }
  }

  // The pixels of x under a tile's positions, in shared memory: a pixel's 8 channels side by side,
  // so that a tap is an offset; first all their high halves, then the low ones, then a pixel of zeros, which
  // stands for positions that don't count. Rows are 4 pixels more than a multiple of 8 apart, so that two
  // halves of a matrix from neighbouring rows lie in different banks.
  struct Stage {
    static constexpr int kHeight = kPoolH + kFilterH - 1, kWidth = kPixels;
    static constexpr int kPitch = kWidth + (12 - kWidth % 8) % 8;
    static constexpr int kPlaneBytes = kHeight * kPitch * 16, kPartBytes = kPlanes * kPlaneBytes;
    static constexpr int kZeros = 2 * kPartBytes, kBytes = kZeros + 16;
    HOST_DEVICE static constexpr int offset(int row, int column) { return (row * kPitch + column) * 16; }
    HOST_DEVICE static constexpr int offset(int unit) {
      return unit / kTaps * kPlaneBytes + offset(unit % kTaps / kFilterW, unit % kTaps % kFilterW);
    }

    unsigned char* const shared;
    int* const largest;  // magnitude of x in this tile and in the next one, as bits, in shared memory
    int turn = 0;        // which of them is this tile's

    __device__ Stage(unsigned char* shared, int* largest) : shared(shared), largest(largest) {
      if (threadIdx.x < 4) reinterpret_cast<uint32_t*>(shared + kZeros)[threadIdx.x] = 0;
      if (threadIdx.x < 2) largest[threadIdx.x] = 0;
      constexpr int kBehind = kPitch - kWidth;  // a row's last; sparse products may multiply them by zeros
      for (int i = threadIdx.x; i < 2 * kPlanes * kHeight * kBehind; i += kThreads)
        reinterpret_cast<uint4*>(shared)[i / kBehind * kPitch + kWidth + i % kBehind] =
            make_uint4(0, 0, 0, 0);
    }

    // The pixels that a thread stages, in registers.
    static constexpr int kOwn = (kHeight * kWidth + kThreads - 1) / kThreads;
    using Pixels = float[kOwn][kPlanes * 8];
    __device__ static bool staged(unsigned at) {  // is there such a one?
      return kHeight * kWidth % kThreads == 0 || at < kHeight * kWidth;
    }

    // Pixels from (row, column) on of a sample's x, less `shift`. Those outside of x are zeros.
    __device__ __forceinline__ static void load(Pixels& pixels, const value_t* x, const float* shift, int row,
                                                int column, Geometry geometry) {
      const int H = geometry.H, W = geometry.W;
      const int64_t plane_bytes = int64_t(H) * W * sizeof(value_t);
#pragma unroll
      for (int i = 0; i < kOwn; i++) {
        const unsigned at = i * kThreads + threadIdx.x;
        const int h = row + at / kWidth, w = column + at % kWidth;
        const bool inside = staged(at) && h < H && unsigned(w) < unsigned(W);
        const char* from = reinterpret_cast<const char*>(x + (inside ? h * W + w : 0));
#pragma unroll
        for (int c = 0; c < kPlanes * 8; c++, from += plane_bytes)
          pixels[i][c] = c < kIn ? float(*reinterpret_cast<const value_t*>(from)) : 0.f;
#pragma unroll
        for (int c = 0; c < kIn; c++) pixels[i][c] = inside ? pixels[i][c] - shift[c] : 0.f;
      }
    }

    // Their magnitude becomes part of the tile's; between this and `store` stands a barrier.
    __device__ __forceinline__ void measure(const Pixels& pixels) {
      float magnitude = 0;
#pragma unroll
      for (int i = 0; i < kOwn; i++)
#pragma unroll
        for (int c = 0; c < kPlanes * 8; c++) magnitude = fmaxf(magnitude, fabsf(pixels[i][c]));
      const unsigned of_warp = __reduce_max_sync(~0u, __float_as_uint(magnitude));
      if (threadIdx.x % 32 == 0) atomicMax(largest + turn, int(of_warp));
    }

    // Puts them into shared memory, all times the same power of two, and returns its exponent. Nobody reads
    // the tile before any more, behind that barrier; another one has to follow.
    __device__ __forceinline__ int store(const Pixels& pixels) {
      const int exponent = fitting_exponent(__int_as_float(largest[turn]));
      turn ^= 1;
      if (threadIdx.x == 0) largest[turn] = 0;
      const float factor = power_of_two(exponent);
#pragma unroll
      for (int i = 0; i < kOwn; i++) {
        const unsigned at = i * kThreads + threadIdx.x;
        if (!staged(at)) break;
#pragma unroll
        for (int plane = 0; plane < kPlanes; plane++) {
          Halves halves[4];
#pragma unroll
          for (int j = 0; j < 4; j++)
            halves[j] =
                split(pixels[i][plane * 8 + 2 * j] * factor, pixels[i][plane * 8 + 2 * j + 1] * factor);
          unsigned char* to = shared + plane * kPlaneBytes + offset(at / kWidth, at % kWidth);
          *reinterpret_cast<uint4*>(to) =
              make_uint4(halves[0].high, halves[1].high, halves[2].high, halves[3].high);
          *reinterpret_cast<uint4*>(to + kPartBytes) =
              make_uint4(halves[0].low, halves[1].low, halves[2].low, halves[3].low);
        }
      }
      return exponent;
    }
  };
};

}  // namespace grad::selected
