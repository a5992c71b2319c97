// Group normalisation behind a small 3-D convolution, and what follows it, where v lies in y's place
// meanwhile:
//   convolve_kernel  once: v, rounded to y's type, in y's own place; and its statistics by tile
//   merge_kernel     merges a sample's statistics, in a fixed order: bitwise the same in each run
//   apply_kernel     normalises, and applies the tail in place
//
// A tail is a function of the normalised value z, with
//   mask                    dropout's
//   operator()(z, random)   the result; random: the element's lane of a draw
//   passes(z)               does the element get a gradient?
#pragma once
#include "core/dropout.cuh"
#include "norm/narrow3d_statistics.cuh"
#include "store/runs.cuh"

namespace norms::narrow3d {

struct GroupNorm {
  const float *conv_bias, *weight, *bias;  // (kOut)
  float eps;
  int groups;
};

// z = sum·slope + bias of a channel of a sample: slope = weight·rstd, and bias has the mean in it, as in
// eager: rounded like this, z is hardly ever exactly what it is compared with unless the numbers say so. v -
// mean = sum + offset.
struct alignas(16) Affine {
  float offset, slope, bias, rstd;
  __device__ __forceinline__ float operator()(float sum) const { return fmaf(sum, slope, bias); }
};

struct Channel {
  Moments<double> moments;
  double constant;  // what shifting x and the bias add
};

// affines (N, kOut), from the statistics of a sample's tiles, merged in a fixed order; active (N) becomes 0.
// Grid: N; eight threads for a channel.
template <class S>
__global__ void __launch_bounds__(kThreads)
    merge_kernel(Affine* affines, float* active, const TileStatistics* statistics, GroupNorm norm,
                 const Convolution<S> c) {
  __shared__ Channel channels[S::kOut];
  const int64_t n = blockIdx.x;
  const int eighth = threadIdx.x % 8;
  for (int channel = threadIdx.x / 8; channel < S::kOut; channel += kThreads / 8) {  // whole warps
    Moments<float> own{0, 0, 0};
    for (int slot = eighth; slot < c.slots(); slot += 8)
      own = own.merge(moments_of(statistics, c, n, slot, channel));
    own = merge_lanes<8>(own);
    const double level = level_of(c, n, channel) + norm.conv_bias[channel];
    if (eighth == 0)
      channels[channel] = {{double(c.OD) * c.OH * c.OW, double(own.mean) + level, double(own.m2)}, level};
  }
  __syncthreads();
  const int per_group = S::kOut / norm.groups;
  for (int channel = threadIdx.x; channel < S::kOut; channel += kThreads) {
    Moments<double> all{0, 0, 0};
    for (int i = 0; i < per_group; i++)
      all = all.merge(channels[channel / per_group * per_group + i].moments);
    const float deviation = sqrtf(float(all.variance()) + norm.eps);
    const double offset = channels[channel].constant - all.mean;
    const float slope = norm.weight[channel] / deviation, bias = float(offset * slope + norm.bias[channel]);
    affines[n * S::kOut + channel] = Affine{float(offset), slope, bias, 1 / deviation};
  }
  if (threadIdx.x == 0) active[n] = 0;
}

// Finishes y in place, four elements that share a draw at a time: as vectors where those are aligned and a
// channel has a multiple of four. Grid: N · kOut · chunks. The last samples come first: the cache still holds
// some of them. kFlags: `active` (N) becomes 1 where an element passes a gradient or statistics are not
// finite.
template <class S, class T, bool kVectors, bool kFlags, class Tail>
__global__ void __launch_bounds__(kThreads)
    apply_kernel(T* y, float* active, const Affine* affines, Tail tail, int64_t size, unsigned channels,
                 unsigned chunks) {
  constexpr int kAtOnce = 4;
  const unsigned channel = channels - 1 - blockIdx.x / chunks, chunk = blockIdx.x % chunks;
  const Affine affine = affines[channel];
  const uint64_t seed = seed_of(tail.mask.seed, tail.mask.number);
  const int64_t whole = channel * size;  // elements before this channel
  const int64_t first = whole / 4, count = (whole + size - 1) / 4 - first + 1;  // draws
  const int step = chunks * kThreads;
  bool any = !isfinite(affine.bias);
  y += channel * size;
#pragma unroll 1
  for (int64_t i = int64_t(chunk) * kThreads + threadIdx.x; i < count; i += kAtOnce * step) {
    Vector<T> four[kAtOnce];  // they arrive while the draws are computed
#pragma unroll
    for (int j = 0; j < kAtOnce; j++)
      if (kVectors && i + j * step < count) four[j] = load_vector(y + (i + j * step) * kVector);
    Philox4 draws[kAtOnce] = {};
    if (tail.mask.threshold) {
      uint64_t counters[kAtOnce];
#pragma unroll
      for (int j = 0; j < kAtOnce; j++) counters[j] = first + i + j * step;
      draw(draws, seed, counters);
    }
#pragma unroll
    for (int j = 0; j < kAtOnce; j++) {
      const int64_t at = i + j * step;
      const uint32_t (&random)[4] = draws[j].lane;
      if constexpr (kVectors) {
        Vector<T> finished;
#pragma unroll
        for (int k = 0; k < kVector; k++) {
          const float z = affine(float(four[j].at[k]));
          if (kFlags) any |= at < count && tail.passes(z);
          finished.at[k] = T(tail(z, random[k]));
        }
        if (at < count) store_vector(y + at * kVector, finished);
      } else {
#pragma unroll
        for (int k = 0; k < 4; k++) {
          const int64_t element = (first + at) * 4 + k - whole;
          if (element < 0 || element >= size) continue;
          const float z = affine(float(y[element]));
          if (kFlags) any = any || tail.passes(z);
          y[element] = T(tail(z, random[k]));
        }
      }
    }
  }
  if (kFlags && __syncthreads_or(any) && threadIdx.x == 0) active[channel / S::kOut] = 1;
}

// Bytes of static shared memory.
template <class S>
constexpr int kGroupNormShared =
    sizeof(SharedStorage<S, store::Runs<store::Identity, float, true, false>, Statistics<false>>);

// What is kept for backward, one after the other: affines (N, kOut); active (N), 1 where an element of a
// sample passes a gradient or statistics are not finite, else 0.
template <class S> struct GroupNormKept {
  Affine* affines;
  float* active;
  GroupNormKept(float* kept, int64_t N)
      : affines(reinterpret_cast<Affine*>(kept)),
        active(kept + N * S::kOut * (sizeof(Affine) / sizeof(float))) {}
  static int64_t count(int64_t N) { return N * (S::kOut * int(sizeof(Affine) / sizeof(float)) + 1); }
};

// y (N, kOut, D', H', W'). kept, as GroupNormKept, or without elements where no gradient is wanted.
template <class S, class T, class Tail>
void group_norm(Out<T> y, Out<float> kept, In<typename S::value_t> x, In<typename S::value_t> weight,
                const GroupNorm& norm, const Tail& tail, cudaStream_t stream) {
  const auto c = convolution<S>(x, weight, kGroupNormShared<S>, true, x.size(0));
  const int64_t N = c.N, size = c.size();
  expect(y, N * S::kOut * size);
  if (kept) expect(kept, GroupNormKept<S>::count(N));
  if (N == 0) return;
  const Scratch<TileStatistics> statistics(N * c.slots() * S::kOut, stream);  // (N, slots, kOut)
  const Scratch<float> unkept(kept ? 0 : GroupNormKept<S>::count(N), stream);
  const GroupNormKept<S> own(kept ? kept.data : unkept.data, N);
  const Statistics<false> sink{statistics};
  if (store::vectors_fit_runs(y.data, c)) {
    convolve(c, stream, store::Runs<store::Identity, T, true, false>{y}, sink);
  } else {
    convolve(c, stream, store::Runs<store::Identity, T, false, false>{y}, sink);
  }
  merge_kernel<S><<<unsigned(N), kThreads, 0, stream>>>(own.affines, own.active, statistics, norm, c);
  const bool aligned = vectors_fit(y.data, size);
  const auto apply =
      kept ? (aligned ? apply_kernel<S, T, true, true, Tail> : apply_kernel<S, T, false, true, Tail>)
           : (aligned ? apply_kernel<S, T, true, false, Tail> : apply_kernel<S, T, false, false, Tail>);
  const unsigned channels = unsigned(N * S::kOut), chunks = chunks_for(size);
  apply<<<channels * chunks, kThreads, 0, stream>>>(y, own.active, own.affines, tail, size, channels, chunks);
}

}  // namespace norms::narrow3d
