// A tile of 16-bit elements, eights of rows by eights of columns, at most kMatrixRows × kMatrixColumns, which
// tensor cores' loads turn: a lane gets eight rows of one column. The eights of a row stand in an order of
// its own, so that the rows of which lanes give the addresses meet other banks. Rows may begin anywhere, and
// the last eight of columns have fewer.
#pragma once
#include "core/tensor_core.cuh"

constexpr int kMatrixRows = 128, kMatrixColumns = 64;

// 16 bytes from any even address on, of which aligned ones have the first, `low`, and the last, `high`.
__device__ __forceinline__ uint4 shifted(const uint4& low, const uint4& high, uintptr_t at) {
  uint32_t words[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
#pragma unroll
  for (int i = 0; i < 6; i++) words[i] = at & 8 ? words[i + 2] : words[i];
#pragma unroll
  for (int i = 0; i < 5; i++) words[i] = at & 4 ? words[i + 1] : words[i];
  const unsigned bits = at % 4 * 8;
  return make_uint4(__funnelshift_r(words[0], words[1], bits), __funnelshift_r(words[1], words[2], bits),
                    __funnelshift_r(words[2], words[3], bits), __funnelshift_r(words[3], words[4], bits));
}
template <class T> __device__ __forceinline__ uint4 aligned_around(const T* at) {
  return *reinterpret_cast<const uint4*>(uintptr_t(at) & ~uintptr_t(15));
}

// Of a block of kThreads threads; T has 16 bits. at: room for the largest tile; rows, columns: those that are
// there.
template <class T, int kThreads> struct MatrixTile {
  uint4* const at;
  const unsigned rows, columns;
  static constexpr int kEights = kMatrixColumns / 8, kAllEights = kMatrixRows * kEights,  // 16 bytes each
      kJobs = kAllEights / kThreads, kWarps = kThreads / 32;                              // of a thread
  static_assert(kMatrixRows / 32 * kEights == kJobs * kWarps);

  // Of rows at `from`, `pitch` elements apart.
  template <bool kAligned> __device__ __forceinline__ void load(const T* from, uint64_t pitch) const {
    uint4 low[kJobs], high[kJobs];
    const auto place_of = [&](unsigned row, unsigned eight) { return from + row * pitch + eight * 8; };
    each_eight([&](int k, unsigned row, unsigned eight) {
      const T* const first = place_of(row, eight);
      low[k] = aligned_around(first);
      if constexpr (!kAligned) high[k] = aligned_around(first + min(columns - eight * 8, 8u) - 1);
    });
    each_eight([&](int k, unsigned row, unsigned eight) {
      if constexpr (!kAligned) low[k] = shifted(low[k], high[k], uintptr_t(place_of(row, eight)) % 16);
      at[place(row, eight)] = low[k];
    });
  }
  // Columns to `to`, `pitch` elements apart: of `padded` rows, a multiple of 8, those that aren't there are
  // 0.
  __device__ __forceinline__ void store(T* to, unsigned pitch, unsigned padded) const {
    const unsigned lane = threadIdx.x % 32, quad = lane % 4 * 8, of_matrix = lane % 8;
#pragma unroll
    for (int k = 0; k < kJobs; k++) {
      const unsigned job = threadIdx.x / 32 + k * kWarps, eight = job % kEights, first = job / kEights * 32;
      if (first >= padded || eight * 8 >= columns) continue;
      // Row j of matrix m, which is rows 2m and 2m + 1 of eights.
      const unsigned row = first + of_matrix / 2 * 8 + lane / 8 * 2 + of_matrix % 2;
      uint32_t words[4];
      tensor_core::load_matrices_transposed(words, tensor_core::shared_address(at + place(row, eight)));
      if (padded > rows) {
#pragma unroll
        for (unsigned i = 0; i < 4; i++) {  // two rows each
          const unsigned pair = first + quad + 2 * i;
          if (pair + 1 >= rows) words[i] = pair >= rows ? 0 : words[i] & 0xffff;
        }
      }
      T* const column = to + uint64_t(eight * 8 + lane / 4) * pitch;
      if (first + quad < padded && eight * 8 + lane / 4 < columns)
        __stcg(reinterpret_cast<uint4*>(column + first + quad),
               make_uint4(words[0], words[1], words[2], words[3]));
    }
  }

 private:
  static __device__ __forceinline__ unsigned place(unsigned row, unsigned eight) {
    return row * kEights + (eight ^ (row / 8 * 2 + row % 2) % kEights);
  }
  template <class F> __device__ __forceinline__ void each_eight(const F& f) const {
#pragma unroll
    for (int k = 0; k < kJobs; k++) {
      const unsigned job = threadIdx.x + k * kThreads, row = job / kEights, eight = job % kEights;
      if (row < rows && eight * 8 < columns) f(k, row, eight);
    }
  }
};
