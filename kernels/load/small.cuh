// A pass over small values: by sample, by channel or one for all, a block each, or a warp. Values of one loop
// are a few lanes' each, and written to memory; the next loop may read them.
#pragma once
#include "core/launch.cuh"
#include "load/extreme.cuh"
#include "load/reduce.cuh"

namespace load {

constexpr int kSmallThreads = 768;     // so many leave 80 registers a thread
constexpr int kSmallAtOnce = 1 << 16;  // threads that a GPU runs at once, of such
constexpr int kWarpsOfSmall = 8;       // of a block, where each has an index of its own

// Those of a value: up to 2^kValueBits, so that a block's loop has one turn if it can; or where a block has
// one value alone, a warp. Of a warp all have some value to compute, and those that are not `active` write
// none. What takes time is to wait for memory, and to divide: a lane reads four terms at once, and divides
// once.
constexpr int kValueBits = 3;
struct ValueLanes {
  const bool active;
  const int width;
  const int lane = int(threadIdx.x) & (width - 1);
  template <class F> __device__ __forceinline__ double sum(int64_t count, const F& f) const {
    double value = 0;
    int64_t i = lane;
    for (; i + 3 * width < count; i += 4 * width) {
      const double a = f(i), b = f(i + width), c = f(i + 2 * width), d = f(i + 3 * width);
      value += (a + b) + (c + d);
    }
    for (; i < count; i += width) value += f(i);
    return of_all(value);
  }
  // Of `count` parts, or of so many of each of some samples, `pitch` apart.
  __device__ double merge(const double* of, int64_t count, int64_t samples = 1, int64_t pitch = 0) const {
    const Parts<double> parts{of, unsigned(count), samples > 1, pitch};
    return sum(count * samples, [&](int64_t i) { return parts[i]; });
  }
  // All about the first's mean, see Moments::from_shifted.
  __device__ Moments<double> merge(const Moments<double>* first, int64_t count, int64_t samples = 1,
                                   int64_t pitch = 0) const {
    const Parts<Moments<double>> of{first, unsigned(count), samples > 1, pitch};
    count *= samples;
    const double shift = of[0].mean;
    double all = 0, total = 0, square = 0;
    const auto take = [&](int64_t i, const Moments<double>& part) {
      const double d = i == 0 || part.count == 0 ? 0 : part.mean - shift;
      all += part.count, total += part.count * d, square += part.m2 + part.count * d * d;
    };
    int64_t i = lane;
    for (; i + 3 * width < count; i += 4 * width) {
      const Moments<double> parts[] = {of[i], of[i + width], of[i + 2 * width], of[i + 3 * width]};
#pragma unroll
      for (int j = 0; j < 4; j++) take(i + j * width, parts[j]);
    }
    for (; i < count; i += width) take(i, of[i]);
    return Moments<double>::from_shifted(of_all(all), shift, of_all(total), of_all(square));
  }
  template <bool kPool> __device__ Largest<kPool> merge(const Largest<kPool>* of, int64_t count) const {
    Largest<kPool> own;
    for (int64_t i = lane; i < count; i += width) own.merge(of[i]);
    for (int distance = 1; distance < width; distance *= 2)
      own.merge({__shfl_xor_sync(~0u, own.most, distance), __shfl_xor_sync(~0u, int(own.place), distance)});
    return own;
  }
  // The place of an extreme; the first among ties, the first NaN before all. Every lane finds it.
  template <class F> __device__ int64_t largest(int64_t count, const F& f) const {
    return extreme<1>(count, f);
  }
  template <class F> __device__ int64_t smallest(int64_t count, const F& f) const {
    return extreme<-1>(count, f);
  }
  template <class E, class X> __device__ __forceinline__ void write(E* to, X x) const {
    if (active && lane == 0) *to = E(x);
  }

 private:
  template <class T> struct Parts {
    const T* first;
    unsigned count;
    bool several;
    int64_t pitch;
    __device__ __forceinline__ const T& operator[](int64_t i) const {
      if (!several) return first[i];
      const unsigned sample = unsigned(i) / count;
      return first[sample * pitch + (unsigned(i) - sample * count)];
    }
  };
  __device__ __forceinline__ double of_all(double value) const {
    for (int distance = 1; distance < width; distance *= 2) value += __shfl_xor_sync(~0u, value, distance);
    return value;
  }
  template <int sign, class F> __device__ int64_t extreme(int64_t count, const F& f) const {
    Extreme<sign, double> best;
    for (int64_t i = 0; i < count; i++) best.take(f(i), i);
    return best.index;
  }
};

// A block's threads, or, by_warp, a warp's. slices: of such that share a sample's channels, each some
// neighbours, of whole groups.
struct Block {
  const unsigned slices;
  const bool by_warp;
  const unsigned number = by_warp ? blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32 : blockIdx.x;
  const int64_t index = number / slices;
  template <class F> __device__ __forceinline__ void each(int64_t count, const F& f) const {
    between(0, count, f);
  }
  template <class F> __device__ __forceinline__ void each_channel(int64_t C, const F& f) const {
    const unsigned slice = number % slices;
    between(C * slice / slices, C * (slice + 1) / slices, f);
  }

 private:
  template <class F> __device__ __forceinline__ void between(int64_t first, int64_t end, const F& f) const {
    const int threads = by_warp ? 32 : int(blockDim.x), warp = by_warp ? 0 : int(threadIdx.x) / 32;
    int bits = end - first == 1 ? 5 : kValueBits;  // of the lanes of a value
    while (bits && bits < 5 && end - first > threads >> bits) bits--;
    for (int64_t i = first + (warp << (5 - bits)); i < end; i += threads >> bits) {
      const int64_t own = i + (threadIdx.x % 32 >> bits);
      f(own < end ? own : end - 1, ValueLanes{own < end, 1 << bits});
    }
    if (by_warp) __syncwarp();
    else __syncthreads();  // what was written may be read
  }
};

template <class Pass>
__global__ void __launch_bounds__(kSmallThreads, 1)
    small_kernel(const Pass pass, unsigned slices, bool by_warp, unsigned all) {
  await_previous_kernel();
  const Block block{slices, by_warp};
  if (block.number < all) pass(block);
}

// most: slices, which may be halved.
template <class Pass>
void small(const Pass& pass, int64_t blocks, cudaStream_t stream, int64_t C = 0, unsigned most = 1) {
  while (most > 1 && C < 16 * int64_t(most)) most = most % 2 ? 1 : most / 2;
  const unsigned all = unsigned(blocks) * most;
  unsigned threads = kSmallThreads;
  if (all > 128)  // some share a multiprocessor
    for (threads = 256; threads > 32 && int64_t(all) * threads > kSmallAtOnce;) threads /= 2;
  if (!all) return;
  const bool by_warp = threads == 32;
  launch_early(small_kernel<Pass>, by_warp ? blocks_for(all, kWarpsOfSmall) : all,
               by_warp ? kWarpsOfSmall * 32 : threads, stream, pass, most, by_warp, all);
}

// Of many parts of a plane, which blocks made, the sum, the moments or the maximum: out (planes), of (planes,
// parts). A warp has a plane.
constexpr int kMergingThreads = 256, kFewParts = 32;
template <class T>
__global__ void __launch_bounds__(kMergingThreads)
    merge_parts_kernel(T* out, const T* of, int64_t planes, int64_t parts) {
  await_previous_kernel();
  const int64_t plane = (int64_t(blockIdx.x) * kMergingThreads + threadIdx.x) / 32;
  if (plane >= planes) return;
  const ValueLanes lanes{true, 32};
  const T all = lanes.merge(of + plane * parts, parts);
  if (lanes.lane == 0) out[plane] = all;
}

// How many parts of a plane's sums are left, merged into `out` where there are many.
inline int64_t few_parts(int64_t parts) { return parts > kFewParts ? 1 : parts; }
template <class T> void merge_parts(T* out, const T* of, int64_t planes, int64_t parts, cudaStream_t stream) {
  const int64_t blocks = (planes * 32 + kMergingThreads - 1) / kMergingThreads;
  if (parts > kFewParts && blocks)
    launch_early(merge_parts_kernel<T>, blocks, kMergingThreads, stream, out, of, planes, parts);
}

}  // namespace load
