// The gradients of a small 3-D convolution, a factor by channel, instance normalisation, a tail and the
// maximum over channels (norm/narrow3d_instance.cuh), with the convolution inside: computed again from x,
// never written to memory as a whole.
//
// With mean and deviation of v, the convolution of x - shift, per (sample, channel): z = (v - mean)·a with a
// = m·rstd, rstd = 1 / sqrt((m·deviation)² + eps). Of each position one channel gets a gradient, that of the
// maximum, which forward has left. Launches:
//   sums_kernel          of that gradient by part of a sample and channel
//   coefficients_kernel  what dv needs of them, and the multiplier's gradient by sample
//   gradient_kernel, merge_kernel, input_gradient_kernel   (grad/narrow3d_backward.cuh)
// Instance normalisation removes the convolution's bias, and what shifting x adds.
//
// Of the tail, besides: gradient(dy, z, m) gives dz, and m's as a factor behind the norm.
#pragma once
#include "grad/narrow3d_backward.cuh"
#include "norm/narrow3d_instance.cuh"

namespace grad::narrow3d::instance_norm {

using namespace norms::narrow3d;

struct Gradient {
  float z, factor;
};

// dz of each element, which one channel of a position alone has.
template <class S, class Index> struct Problem {
  const NormGradient* coefficients;
  const Index* index;   // like y
  const float* winner;  // like y: dz of the channel that won

  __device__ bool active(int64_t) const { return true; }

  struct Selected {
    const Problem& problem;
    const int64_t before;  // positions before the tile's first row in the sample's first plane
    const int plane_size, first_channel;
    int won;  // of a turn's positions, a lane's, which channel
    float value;

    __device__ __forceinline__ void expect(const WarpTile& tile) {
      const int position = tile.q + int(threadIdx.x) % 32;
      const int64_t at = before + int64_t(tile.plane) * plane_size + position;
      const bool inside = position < tile.positions;
      won = inside ? int(problem.index[at]) : -1;
      value = inside ? problem.winner[at] : 0.f;
    }
    __device__ __forceinline__ void operator()(Accumulators& dz, const Accumulators&, const WarpTile&) const {
      const int channel = first_channel + int(threadIdx.x % 32) / 4;
#pragma unroll
      for (int j = 0; j < kFragments; j++)
#pragma unroll
        for (int u = 0; u < 2; u++) {
          const int lane = 8 * j + 2 * (threadIdx.x % 4) + u;
          const int own = __shfl_sync(~0u, won, lane) - channel;
          const float own_value = __shfl_sync(~0u, value, lane);
          dz[j][u] = own == 0 ? own_value : 0.f, dz[j][2 + u] = own == 8 ? own_value : 0.f;
        }
    }
  };
  __device__ Selected selected(const Convolution<S>& c, const Tile& tile, int first_channel) const {
    const int plane = c.OH * c.OW;
    return {*this, tile.n * c.OD * int64_t(plane) + tile.first_row * c.OW, plane, first_channel, -1, 0};
  }
};

// ------------------------------------------------------------------------------------------------------ sums

constexpr int kSumsBlock = 128, kOwn = 25;  // threads, and positions of each
constexpr int kPart = kSumsBlock * kOwn;

// Over the positions that a channel won: sums of dz, dz·(v - mean) and dy·clamp(z), and the largest |dz|.
struct Sums {
  float dz, product, bounded, most;
  __device__ __forceinline__ void add(const Sums& other) {
    dz += other.dz, product += other.product, bounded += other.bounded, most = fmaxf(most, other.most);
  }
};
struct SumsStorage {
  Sums own[16][kSumsBlock];  // a thread's, so that it needs no other's
  float slope[16], factor[16];
};

// winner, like y: dz of the channel that won; and sums (N, parts, kOut). Grid: N · parts.
template <class S, class T, class Index, class Tail>
__global__ void __launch_bounds__(kSumsBlock)
    sums_kernel(Sums* sums, float* winner, const T* dy, const Index* index, const float* centred,
                const float* moments, const Tail tail, float eps, int64_t N, int64_t size, unsigned parts) {
  __shared__ SumsStorage storage;
  const int tid = threadIdx.x, channel = tid / 8;
  const int64_t n = blockIdx.x / parts, first = int64_t(blockIdx.x % parts) * kPart;
  const int count = int(min(size - first, int64_t(kPart)));
#pragma unroll 1
  for (int first_channel = 0; first_channel < S::kOut; first_channel += 16) {
    if (tid < 16) {
      const ScaledChannel own = scaled_channel(moments, moments + N * S::kOut, tail.multiplier, eps, n,
                                               first_channel + tid, S::kOut);
      storage.slope[tid] = own.a, storage.factor[tid] = own.m;
    }
    for (int c = 0; c < 16; c++) storage.own[c][tid] = {0, 0, 0, 0};
    __syncthreads();
    int won[kOwn];
    float gradient[kOwn], own[kOwn];  // on their way together
#pragma unroll
    for (int i = 0; i < kOwn; i++) {
      const int64_t at = n * size + first + min(tid + i * kSumsBlock, count - 1);
      won[i] = int(index[at]) - first_channel, gradient[i] = float(dy[at]), own[i] = centred[at];
    }
#pragma unroll
    for (int i = 0; i < kOwn; i++) {
      const int c = won[i], s = tid + i * kSumsBlock;
      if (s >= count || unsigned(c) >= 16) continue;
      const auto [dz, factor] = tail.gradient(gradient[i], own[i] * storage.slope[c], storage.factor[c]);
      winner[n * size + first + s] = dz;
      storage.own[c][tid].add({dz, dz * own[i], factor, fabsf(dz)});
    }
    __syncthreads();
    Sums all{0, 0, 0, 0};  // eight threads a channel
#pragma unroll 4
    for (int i = tid % 8; i < kSumsBlock; i += 8) all.add(storage.own[channel][i]);
#pragma unroll
    for (int mask = 4; mask; mask /= 2)
      all.add({__shfl_xor_sync(~0u, all.dz, mask), __shfl_xor_sync(~0u, all.product, mask),
               __shfl_xor_sync(~0u, all.bounded, mask), __shfl_xor_sync(~0u, all.most, mask)});
    if (tid % 8 == 0) sums[int64_t(blockIdx.x) * S::kOut + first_channel + channel] = all;
    __syncthreads();
  }
}

// coefficients (N, kOut), and by sample the gradients (N, kOut) of the multiplier and zeros, those of
// conv_bias; NaN stays NaN. The multiplier's comes from its second use, and, through the normalised v·m, from
// its first, of which only the share of eps remains: normalising removes any other effect of a factor. A
// thread per (sample, channel).
template <class S>
__global__ void coefficients_kernel(NormGradient* coefficients, float* gradients, float* zeros,
                                    const Sums* sums, const float* moments, const float* multiplier,
                                    float eps, int64_t N, int64_t size, unsigned parts) {
  const int64_t i = int64_t(blockIdx.x) * blockDim.x + threadIdx.x, n = i / S::kOut, c = i % S::kOut;
  if (i >= N * S::kOut) return;
  const ScaledChannel channel =
      scaled_channel(moments, moments + N * S::kOut, multiplier, eps, n, c, S::kOut);
  double dz = 0, product = 0, bounded = 0;
  float most = 0;
  for (unsigned part = 0; part < parts; part++) {
    const Sums own = sums[(n * parts + part) * S::kOut + c];
    dz += own.dz, product += own.product, bounded += own.bounded, most = fmaxf(most, own.most);
  }
  const double a = channel.a, rstd = channel.rstd;
  // NaN in a channel counts even where another one wins.
  const double nothing = channel.mean - channel.mean;
  coefficients[i] = norm_gradient(a, -a * dz / size, -a * a * a * product / size, -channel.mean, most,
                                  double(moments[N * S::kOut + i]) * sqrt(double(size)),
                                  power_of_two(-fitting_exponent(channel.a, 0)));
  gradients[i] = float(bounded + nothing + product * eps * rstd * rstd * rstd);
  zeros[i] = 0 * gradients[i];
}

// Bytes of static shared memory, of what computes v again.
template <class S> constexpr int kShared = sizeof(BackwardStorage<S>);

// dx (N, kIn, D, H, W) and d_weight, either without elements where it is not wanted; d_conv_bias (kOut) and
// d_multiplier, kOut elements or 1. kept as forward left it. dv_bytes: as in
// backward_convolution().
template <class S, class Index, class T, class Tail>
void backward(Out<typename S::value_t> dx, Out<typename S::value_t> d_weight, Out<float> d_conv_bias,
              Out<float> d_multiplier, In<T> dy, In<float> kept, In<typename S::value_t> x,
              In<typename S::value_t> weight, const Tail& tail, float eps, int64_t dv_bytes,
              cudaStream_t stream) {
  static_assert(kShared<S> <= kBackwardShared);
  const auto c = backward_convolution<S>(x, weight, dv_bytes);
  const int64_t N = c.N, size = c.size();
  expect(dy, N * size), expect(kept, Kept<S, Index>::count(N, size));
  const Kept<S, Index> parts(const_cast<float*>(kept.data), N, size);
  const BackwardScratch<S> scratch(c, bool(dx), dv_bytes, stream);
  const unsigned count = blocks_for(size, kPart);
  const Scratch<float> gradients(2 * N * S::kOut,
                                 stream);         // of multiplier and conv_bias, by sample: (2, N, kOut)
  const Scratch<float> winner(N * size, stream);  // like y
  const Scratch<Sums> sums(N * count * S::kOut, stream);  // (N, parts, kOut)
  if (N > 0) {
    sums_kernel<S, T, Index, Tail><<<unsigned(N * count), kSumsBlock, 0, stream>>>(
        sums, winner, dy, parts.index, parts.centred, parts.moments, tail, eps, N, size, count);
    coefficients_kernel<S><<<blocks_for(N * S::kOut, 64), 64, 0, stream>>>(
        scratch.coefficients, gradients, gradients + N * S::kOut, sums, parts.moments, tail.multiplier, eps,
        N, size, count);
  }
  const Problem<S, Index> problem{scratch.coefficients, parts.index, winner};
  // The convolution's bias has no gradient: its sum is of zeros.
  const ManyRowSums<2> parameters{{{d_multiplier, d_multiplier.numel()}, {d_conv_bias, S::kOut}}};
  convolution_backward(dx, d_weight, parameters, scratch, gradients, nullptr, problem, c, stream);
}

}  // namespace grad::narrow3d::instance_norm
