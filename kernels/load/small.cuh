// A pass over small values: by sample, by channel or one for all, a block each. Values of one loop are a warp's, and
// written to memory; the next loop may read them.
#pragma once
#include "core/launch.cuh"
#include "load/extreme.cuh"
#include "load/reduce.cuh"

namespace load {

constexpr int kSmallThreads = 256;

struct WarpLanes {
  const int lane = threadIdx.x % 32;
  template <class F> __device__ __forceinline__ double sum(int64_t count, const F& f) const {
    double value = 0;
    for (int64_t i = lane; i < count; i += 32) value += f(i);
    return __shfl_sync(~0u, warp_sum(value), 0);
  }
  __device__ Moments<double> merge(const Moments<double>* of, int64_t count) const {
    Moments<double> moments{0, 0, 0};
    for (int64_t i = lane; i < count; i += 32) moments = moments.merge(of[i]);
    moments = warp_merge(moments);
    return {__shfl_sync(~0u, moments.count, 0), __shfl_sync(~0u, moments.mean, 0), __shfl_sync(~0u, moments.m2, 0)};
  }
  // The place of an extreme; the first among ties, the first NaN before all. Every lane finds it.
  template <class F> __device__ int64_t largest(int64_t count, const F& f) const { return extreme<1>(count, f); }
  template <class F> __device__ int64_t smallest(int64_t count, const F& f) const { return extreme<-1>(count, f); }
  template <class E, class X> __device__ __forceinline__ void write(E* to, X x) const {
    if (lane == 0) *to = E(x);
  }

 private:
  template <int sign, class F> __device__ int64_t extreme(int64_t count, const F& f) const {
    Extreme<sign, double> best;
    for (int64_t i = 0; i < count; i++) best.take(f(i), i);
    return best.index;
  }
};

struct Block {
  const int64_t index = blockIdx.x;
  template <class F> __device__ __forceinline__ void each(int64_t count, const F& f) const {
    const WarpLanes lanes;
    for (int64_t i = threadIdx.x / 32; i < count; i += blockDim.x / 32) f(i, lanes);
    __syncthreads();  // what was written may be read
  }
};

template <class Pass> __global__ void __launch_bounds__(kSmallThreads, 2) small_kernel(const Pass pass) { pass(Block()); }

template <class Pass> void small(const Pass& pass, int64_t blocks, cudaStream_t stream) {
  if (blocks) small_kernel<Pass><<<unsigned(blocks), kSmallThreads, 0, stream>>>(pass);
}

}  // namespace load
