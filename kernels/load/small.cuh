// A pass over small values: by sample, by channel or one for all, a block each. Values of one loop are a few lanes' each, and
// written to memory; the next loop may read them.
#pragma once
#include "core/launch.cuh"
#include "load/extreme.cuh"
#include "load/reduce.cuh"

namespace load {

constexpr int kSmallThreads = 768, kValueLanes = 8;  // so many leave 80 registers a thread

// Those of a value. Of a warp all have some value to compute, and those that are not `active` write none.
struct ValueLanes {
  const bool active;
  const int lane = threadIdx.x % kValueLanes, first = threadIdx.x % 32 - lane;
  template <class F> __device__ __forceinline__ double sum(int64_t count, const F& f) const {
    double value = 0;
    for (int64_t i = lane; i < count; i += kValueLanes) value += f(i);
    for (int offset = kValueLanes / 2; offset; offset /= 2) value += __shfl_down_sync(~0u, value, offset);
    return __shfl_sync(~0u, value, first);
  }
  __device__ Moments<double> merge(const Moments<double>* of, int64_t count) const {
    Moments<double> own{0, 0, 0};
    for (int64_t i = lane; i < count; i += kValueLanes) own = own.merge(of[i]);
    for (int offset = kValueLanes / 2; offset; offset /= 2) own = own.merge(shuffled(own, [&](double x) { return __shfl_down_sync(~0u, x, offset); }));
    return shuffled(own, [&](double x) { return __shfl_sync(~0u, x, first); });
  }
  // The place of an extreme; the first among ties, the first NaN before all. Every lane finds it.
  template <class F> __device__ int64_t largest(int64_t count, const F& f) const { return extreme<1>(count, f); }
  template <class F> __device__ int64_t smallest(int64_t count, const F& f) const { return extreme<-1>(count, f); }
  template <class E, class X> __device__ __forceinline__ void write(E* to, X x) const {
    if (active && lane == 0) *to = E(x);
  }

 private:
  template <class F> static __device__ __forceinline__ Moments<double> shuffled(const Moments<double>& a, const F& f) {
    return {f(a.count), f(a.mean), f(a.m2)};
  }
  template <int sign, class F> __device__ int64_t extreme(int64_t count, const F& f) const {
    Extreme<sign, double> best;
    for (int64_t i = 0; i < count; i++) best.take(f(i), i);
    return best.index;
  }
};

// slices: blocks that share a sample's channels, each some neighbours, of whole groups.
struct Block {
  const unsigned slices;
  const int64_t index = blockIdx.x / slices;
  template <class F> __device__ __forceinline__ void each(int64_t count, const F& f) const { between(0, count, f); }
  template <class F> __device__ __forceinline__ void each_channel(int64_t C, const F& f) const {
    const unsigned slice = blockIdx.x % slices;
    between(C * slice / slices, C * (slice + 1) / slices, f);
  }

 private:
  template <class F> __device__ __forceinline__ void between(int64_t first, int64_t end, const F& f) const {
    constexpr int kOfWarp = 32 / kValueLanes;
    for (int64_t i = first + threadIdx.x / 32 * kOfWarp; i < end; i += blockDim.x / kValueLanes) {
      const int64_t own = i + threadIdx.x % 32 / kValueLanes;
      f(own < end ? own : end - 1, ValueLanes{own < end});
    }
    __syncthreads();  // what was written may be read
  }
};

template <class Pass> __global__ void __launch_bounds__(kSmallThreads, 1) small_kernel(const Pass pass, unsigned slices) {
  pass(Block{slices});
}

// most: slices, which may be halved.
template <class Pass> void small(const Pass& pass, int64_t blocks, cudaStream_t stream, int64_t C = 0, unsigned most = 1) {
  while (most > 1 && C < 16 * int64_t(most)) most = most % 2 ? 1 : most / 2;
  const unsigned all = unsigned(blocks) * most, threads = all > 256 ? 128 : kSmallThreads;  // many blocks have little each
  if (blocks) small_kernel<Pass><<<all, threads, 0, stream>>>(pass, most);
}

}  // namespace load
