// Pools of images channels last, x (N, H, W, C) -> y (N, rows, columns, C) of windows, and their gradient. P
// says what the windows are: their Rows and Columns (`Windows`); kPads, has one a place outside of the
// image?; kLargest, or else averages; kCountsPadding and kDivisor, by what those are divided.
//
// The largest: of ties the first, of NaNs the last, as torch has it. Its place, row by row, is kept in a byte
// for the gradient, which each element of x gathers of the windows that hold it, in their order. A thread has
// neighbouring channels, as many as fit into 16 bytes.
#pragma once
#include "host/tensor.h"
#include "load/planes.cuh"

namespace load {

// Along an axis: `count` places, `apart` from one another; a window begins `step` behind the one before, the
// first `before` the axis.
template <int count, int step, int before, int apart> struct Windows {
  static constexpr int kCount = count, kStep = step, kBefore = before, kApart = apart;
  static constexpr int kHolding = (count - 1) * apart / step + 1;  // so many may hold a position
  static __device__ __forceinline__ int begin(int window) { return window * step - before; }
  // Of a window the places that count in an average, along an axis of that size.
  static __device__ __forceinline__ int counted(int window, int size, bool counts_padding) {
    const int around = counts_padding ? before : 0;
    return min(begin(window) + count, size + around) - max(begin(window), -around);
  }
};

// H, W: x's; rows, columns: of windows. An image is a job for so many blocks, of threads with `width`
// channels each.
struct Pooling {
  int64_t N;
  int C, H, W, rows, columns;
  unsigned width = kPack, blocks = 0;

  Pooling(int64_t N, int64_t C, int64_t H, int64_t W, int64_t rows, int64_t columns, const value_t* x,
          const value_t* y, const uint8_t* places)
      : N(N), C(int(C)), H(int(H)), W(int(W)), rows(int(rows)), columns(int(columns)) {
    while (C % width || (uintptr_t(x) | uintptr_t(y)) % (width * sizeof(value_t)) ||
           uintptr_t(places) % width)
      width /= 2;
  }
  // Blocks of all samples, of so many positions each.
  int64_t share(int64_t positions) {
    blocks = blocks_for(positions * (C / width), kPlaneThreads);
    return N * blocks;
  }
  __device__ __forceinline__ int x(int row, int column) const { return (row * W + column) * C; }
  __device__ __forceinline__ int y(int row, int column) const { return (row * columns + column) * C; }
};

// A thread's: an image, a place in a grid over it, the first of K channels.
template <int K> struct PoolJob {
  int64_t n;
  int row, column, channel;
  bool active;
  __device__ PoolJob(const Pooling& all, int rows, int columns) : n(blockIdx.x / all.blocks) {
    const unsigned packs = unsigned(all.C) / K, job = blockIdx.x % all.blocks * kPlaneThreads + threadIdx.x,
                   place = job / packs;
    row = int(place / unsigned(columns)), column = int(place % unsigned(columns)),
    channel = int(job % packs) * K;
    active = row < rows;
  }
  __device__ __forceinline__ int64_t x(const Pooling& all) const {
    return n * all.H * all.W * all.C + channel;
  }
  __device__ __forceinline__ int64_t y(const Pooling& all) const {
    return n * all.rows * all.columns * all.C + channel;
  }
};

template <int K> __device__ __forceinline__ Pack<real, K> neighbours(const value_t* from) {
  const Memory<value_t, K> values = *reinterpret_cast<const Memory<value_t, K>*>(from);
  return lanes<K>([&](int i) { return real(values.at[i]); });
}
template <class E, class T, int K> __device__ __forceinline__ void put_all(E* to, const Pack<T, K>& values) {
  Memory<E, K> memory;
#pragma unroll
  for (int i = 0; i < K; i++) memory.at[i] = E(values.at[i]);
  put(to, memory);
}

template <class P> __device__ __forceinline__ real divisor(const Pooling& all, int row, int column) {
  if constexpr (P::kDivisor) return real(P::kDivisor);
  else
    return real(P::Rows::counted(row, all.H, P::kCountsPadding) *
                P::Columns::counted(column, all.W, P::kCountsPadding));
}

// places: null, or those of the largest.
template <class P>
__global__ void __launch_bounds__(kPlaneThreads)
    pool_kernel(value_t* y, uint8_t* places, const value_t* x, const Pooling all) {
  await_previous_kernel();
  with_width<kPack>(all.width, [&](auto width) {
    constexpr int K = decltype(width)::value;
    using Rows = typename P::Rows;
    using Columns = typename P::Columns;
    constexpr int kPlaces = Rows::kCount * Columns::kCount, kAtOnce = kPlaces <= 16 ? kPlaces : 4;
    const PoolJob<K> job(all, all.rows, all.columns);
    if (!job.active) return;
    const int top = Rows::begin(job.row), left = Columns::begin(job.column);
    const value_t* const image = x + job.x(all);
    Extreme<1, Pack<real, K>> largest;
    largest.value = splat<K>(real(-INFINITY));
    Pack<real, K> sum = splat<K>(real(0));
#pragma unroll kAtOnce
    for (int i = 0; i < kPlaces; i++) {
      const int h = top + i / Columns::kCount * Rows::kApart,
                w = left + i % Columns::kCount * Columns::kApart;
      const bool inside = is_in<P>(h, all.H) && is_in<P>(w, all.W);
      const Pack<real, K> value =
          neighbours<K>(image + all.x(nearest_in<P>(h, all.H), nearest_in<P>(w, all.W)));
      if constexpr (P::kLargest) largest.take_last(value, i, inside);
      else sum += lanes<K>([&](int l) { return inside ? value.at[l] : real(0); });
    }
    const int64_t at = job.y(all) + all.y(job.row, job.column);
    if constexpr (P::kLargest) {
      put_all(y + at, largest.value);
      if (places)
        put_all(places + at, largest.index);  // of a window outside of the image one that is outside
    } else {
      put_all(y + at, sum / divisor<P>(all, job.row, job.column));
    }
  });
}

// A thread has the elements of x where a step of the windows goes, if these are few, or one. What several of
// them need is read once.
template <class P>
__global__ void __launch_bounds__(kPlaneThreads)
    pool_gradient_kernel(value_t* dx, const value_t* dy, const uint8_t* places, const Pooling all) {
  await_previous_kernel();
  with_width<kPack>(all.width, [&](auto width) {
    constexpr int K = decltype(width)::value;
    using Rows = typename P::Rows;
    using Columns = typename P::Columns;
    constexpr int kDown = Rows::kHolding, kAcross = Columns::kHolding, kHeight = P::kHeight,
                  kWidth = P::kWidth;
    constexpr bool kHolds = kDown * kAcross <= 4;
    constexpr int kElements = kHolds ? kHeight * kWidth : 1,
                  kWindows = kHolds ? kDown * kAcross : 4;  // at once
    const PoolJob<K> job(all, (all.H + Rows::kBefore + kHeight - 1) / kHeight,
                         (all.W + Columns::kBefore + kWidth - 1) / kWidth);
    if (!job.active) return;
    // The last windows that hold the first element, and its distance from where they begin.
    const int last_row = kHeight == 1 ? job.row / Rows::kStep : job.row,
              last_column = kWidth == 1 ? job.column / Columns::kStep : job.column;
    const int down = kHeight == 1 ? job.row % Rows::kStep : 0,
              across = kWidth == 1 ? job.column % Columns::kStep : 0;
    const value_t* const gradients = dy + job.y(all);
    const auto nearest = [](int at, int size) { return min(max(at, 0), size - 1); };
    struct Share {
      Pack<real, K> gradient;
      Memory<uint8_t, K> places;
    };
    // Of a window, or the nearest to one that there isn't.
    const auto read = [&](int back_rows, int back_columns) {
      const int row = nearest(last_row - back_rows, all.rows),
                column = nearest(last_column - back_columns, all.columns);
      const int at = all.y(row, column);
      Share share{neighbours<K>(gradients + at), {}};
      if constexpr (P::kLargest)
        share.places = *reinterpret_cast<const Memory<uint8_t, K>*>(places + job.y(all) + at);
      else share.gradient = share.gradient / divisor<P>(all, row, column);
      return share;
    };
    Share held[kHolds ? kDown * kAcross : 1];
    if constexpr (kHolds) {
#pragma unroll
      for (int k = 0; k < kDown * kAcross; k++) held[k] = read(k / kAcross, k % kAcross);
    }
#pragma unroll kElements
    for (int element = 0; element < kHeight * kWidth; element++) {
      const int r = down + element / kWidth, s = across + element % kWidth;
      const int h = Rows::begin(last_row) + r, w = Columns::begin(last_column) + s;
      if (unsigned(h) >= unsigned(all.H) || unsigned(w) >= unsigned(all.W)) continue;
      Pack<real, K> sum = splat<K>(real(0));
#pragma unroll kWindows
      for (int k = kDown * kAcross - 1; k >= 0; k--) {
        const int i = k / kAcross * Rows::kStep + r,
                  j = k % kAcross * Columns::kStep + s;  // from where the window begins
        if (i % Rows::kApart || i >= Rows::kCount * Rows::kApart || j % Columns::kApart ||
            j >= Columns::kCount * Columns::kApart)
          continue;
        const bool there = unsigned(last_row - k / kAcross) < unsigned(all.rows) &&
                           unsigned(last_column - k % kAcross) < unsigned(all.columns);
        const auto add = [&](const Share& share) {
          const int place = i / Rows::kApart * Columns::kCount + j / Columns::kApart;
          sum += lanes<K>([&](int l) {
            return there && (!P::kLargest || share.places.at[l] == place) ? share.gradient.at[l] : real(0);
          });
        };
        if constexpr (kHolds) add(held[k]);
        else add(read(k / kAcross, k % kAcross));
      }
      put_all(dx + job.x(all) + all.x(h, w), sum);
    }
  });
}

template <class P>
void pool(value_t* y, uint8_t* places, const value_t* x, int64_t N, int64_t C, int64_t H, int64_t W,
          int64_t rows, int64_t columns, cudaStream_t stream) {
  Pooling all(N, C, H, W, rows, columns, x, y, places);
  launch_early(pool_kernel<P>, all.share(rows * columns), kPlaneThreads, stream, y, places, x, all);
}

// Of elements in a step of the windows, or, where these are many, of one.
template <class Of> struct Stepping : Of {
  static constexpr bool kFew = Of::Rows::kStep * Of::Columns::kStep <= 16;
  static constexpr int kHeight = kFew ? Of::Rows::kStep : 1, kWidth = kFew ? Of::Columns::kStep : 1;
};
template <class P>
void pool_gradient(value_t* dx, const value_t* dy, const uint8_t* places, int64_t N, int64_t C, int64_t H,
                   int64_t W, int64_t rows, int64_t columns, cudaStream_t stream) {
  using S = Stepping<P>;
  const int64_t down = (H + P::Rows::kBefore + S::kHeight - 1) / S::kHeight,
                across = (W + P::Columns::kBefore + S::kWidth - 1) / S::kWidth;
  Pooling all(N, C, H, W, rows, columns, dx, dy, places);
  launch_early(pool_gradient_kernel<S>, all.share(down * across), kPlaneThreads, stream, dx, dy, places, all);
}

}  // namespace load
