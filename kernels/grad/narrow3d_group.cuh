// The gradients of a small 3-D convolution that a group normalisation and a tail follow
// (norm/narrow3d_group.cuh), with the convolution inside: computed again from x, never written to memory as a
// whole.
//   sums_kernel          of dz, dz·(v + offset) and v + offset by tile and channel, the convolution once
//   coefficients_kernel  what dv needs of them, and the parameters' gradients by sample
//   gradient_kernel, merge_kernel, input_gradient_kernel   (grad/narrow3d_backward.cuh), v once more
//
// Forward has left a flag per sample: does any of its elements pass a gradient (or are statistics not
// finite)? Where it is 0 all kernels leave at once, without reading dy. Those of dv leave where all of a
// sample's coefficients are zero, too: where all slopes are, as in a norm whose weight starts at zero.
//
// Of the tail, besides: mask, passes(z); slope(kept): d y / d z of an element that passes, kept by dropout or
// not.
#pragma once
#include "grad/narrow3d_backward.cuh"
#include "norm/narrow3d_group.cuh"

namespace grad::narrow3d::group_norm {

using namespace norms::narrow3d;

// dz of each element, by the tail, from y's gradient dy.
template <class S, class T, class Tail> struct Problem {
  const NormGradient* coefficients;
  const Affine* affines;
  const float* flags;  // (N)
  const T* dy;
  Tail tail;

  __device__ bool active(int64_t n) const { return flags[n] != 0; }

  struct Selected {
    const Problem& problem;
    const Affine affine[2];  // of this lane's channels
    const uint64_t seed;
    const int64_t channel, first;  // elements: of a channel, and before the tile's in this lane's first one
    const int plane_size;
    const bool pairs;         // do two neighbouring positions, from an even one on, lie at aligned places?
    uint2 dy[2][kFragments];  // of a channel and fragment, a pair's

    // What the sums were in y's place before the tail, where it compared them.
    __device__ __forceinline__ float stored(float v) const { return float(T(v)); }
    // A position's, in the first of this lane's two channels.
    __device__ __forceinline__ int64_t element(int plane, int q) const {
      return first + int64_t(plane) * plane_size + q;
    }
    __device__ __forceinline__ void expect(const WarpTile& tile) {
      constexpr int kBytes = sizeof(T);
      const int position = tile.q + int(threadIdx.x % 4) * 2;
      const T* const from = problem.dy + element(tile.plane, position);
      const auto for_words = [&](auto load) {
#pragma unroll
        for (int r = 0; r < 2; r++)
#pragma unroll
          for (int j = 0; j < kFragments; j++)
            dy[r][j] = load(tile.positions - position - 8 * j, from + 8 * r * channel + 8 * j);
      };
      if (pairs) {
        for_words([](int left, const T* at) { return load_if<2 * kBytes>(left > 0, at); });
      } else {
        for_words([](int left, const T* at) {
          const uint2 first = load_if<kBytes>(left > 0, at), second = load_if<kBytes>(left > 1, at + 1);
          return kBytes == 4 ? make_uint2(first.x, second.x) : make_uint2(first.x | second.x << 16, 0);
        });
      }
    }
    __device__ __forceinline__ float gradient(int r, int j, int u) const {
      Pair<T> both;
      memcpy(&both, &dy[r][j], sizeof both);
      return float(both.at[u]);
    }
    // Elements past the tile's have a dy of zero.
    __device__ __forceinline__ void operator()(Accumulators& dz, const Accumulators& v,
                                               const WarpTile& tile) const {
      bool any = false;
#pragma unroll
      for (int j = 0; j < kFragments; j++)
#pragma unroll
        for (int i = 0; i < 4; i++) {
          const bool passes = problem.tail.passes(affine[i / 2](stored(v[j][i])));
          dz[j][i] = passes ? gradient(i / 2, j, i % 2) : 0.f, any |= passes;
        }
      if (!__any_sync(~0u, any)) return;
      uint32_t kept[2];
      kept_elements(kept, problem.tail.mask, seed, element(tile.plane, tile.q), 2 * channel);
#pragma unroll
      for (int r = 0; r < 2; r++) kept[r] >>= 2 * (threadIdx.x % 4);
#pragma unroll
      for (int j = 0; j < kFragments; j++)
#pragma unroll
        for (int i = 0; i < 4; i++) dz[j][i] *= problem.tail.slope(kept[i / 2] & 1u << (8 * j + i % 2));
    }
  };
  __device__ Selected selected(const Convolution<S>& c, const Tile& tile, int first_channel) const {
    const int64_t plane = int64_t(c.OH) * c.OW, own = tile.n * S::kOut + first_channel + threadIdx.x % 32 / 4;
    const int before = tile.first_row * c.OW;
    const bool pairs = (plane | before | tile.positions) % 2 == 0 && uintptr_t(dy) % sizeof(Pair<T>) == 0;
    return {*this,        {affines[own], affines[own + 8]}, seed_of(tail.mask.seed, tail.mask.number),
            c.OD * plane, own * c.OD * plane + before,      int(plane),
            pairs};
  }
};

// ------------------------------------------------------------------------------------------------------ sums

// Of a tile and channel, or more of them: sums of dz, dz·(v + offset), v + offset, and the largest |dz|.
struct Sums {
  float dz, product, centred, most;
};

template <class S> struct SumsStorage {
  uint4 weights[S::kWeightWords / 2][32];
  Sums sums[kBlockWarps][16];
  MainloopStorage<S> mainloop;
};

template <class S, class Selected> struct SumsWarp : SelectedWarp<Selected> {
  using Base = SelectedWarp<Selected>;
  using Base::selected;
  SumsStorage<S>& storage;
  Sums sums[2];
  __device__ SumsWarp(const Selected& selected, SumsStorage<S>& storage) : Base(selected), storage(storage) {}
  __device__ void begin(float x_scale) {
    Base::begin(x_scale, storage.mainloop.weight_scale);
    sums[0] = sums[1] = {0, 0, 0, 0};
  }
  __device__ __forceinline__ void accept(Accumulators& v, const WarpTile& tile, const NoOffset&) {
    Accumulators dz;
    Base::select(dz, v, tile);
#pragma unroll
    for (int j = 0; j < kFragments; j++)
#pragma unroll
      for (int i = 0; i < 4; i++) {
        Sums& own = sums[i / 2];
        const float centred = selected.stored(v[j][i]) + selected.affine[i / 2].offset;
        own.dz += dz[j][i], own.product = fmaf(dz[j][i], centred, own.product);
        own.most = fmaxf(own.most, fabsf(dz[j][i]));
        own.centred += tile.q + 8 * j + int(threadIdx.x % 4) * 2 + i % 2 < tile.positions ? centred : 0.f;
      }
  }
  __device__ __forceinline__ void end() const {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int r = 0; r < 2; r++) {
      const float most = channel_most(sums[r].most);
      const Sums all{channel_sum(sums[r].dz), channel_sum(sums[r].product), channel_sum(sums[r].centred),
                     most};
      if (lane % 4 == 0) storage.sums[threadIdx.x / 32][lane / 4 + r * 8] = all;
    }
  }
};

// sums (jobs, 16); any (N), zeros for coefficients_kernel. The blocks share out the jobs.
template <class S, class Problem>
__global__ void __launch_bounds__(kBlock, 1)
    sums_kernel(Sums* sums, float* any, Problem problem, int64_t jobs, const Convolution<S> c) {
  extern __shared__ uint4 shared[];
  __shared__ SumsStorage<S> storage;
#pragma unroll 1
  for (int64_t job = blockIdx.x; job < jobs; job += gridDim.x) {
    const Tile tile(c, unsigned(job / kJobsPerTile<S>));
    const int first_channel = int(job % kJobsPerTile<S>) * 16;
    if (threadIdx.x == 0) any[tile.n] = 0;
    if (!problem.active(tile.n)) continue;
    Mainloop<S, SharedWeights> mainloop(c, tile, storage.mainloop, reinterpret_cast<uint32_t*>(shared),
                                        first_channel, SharedWeights(storage.weights[0]));
    SumsWarp warp(problem.selected(c, tile, first_channel), storage);
    mainloop.run(warp, tile.planes * mainloop.turns());
    if (threadIdx.x < 16) {
      double dz = 0, product = 0, centred = 0;
      float most = 0;
      for (int warp = 0; warp < kBlockWarps; warp++) {
        const Sums& own = storage.sums[warp][threadIdx.x];
        dz += own.dz, product += own.product, centred += own.centred, most = fmaxf(most, own.most);
      }
      sums[job * 16 + threadIdx.x] = {float(dz), float(product), float(centred), most};
    }
    mainloop.retire();
  }
}

// coefficients (N, kOut); any (N), zeros before: is any of a sample's not zero? Where slopes are zero
// elements may tie, and still no gradient gets through. And the parameters' gradients by sample, gradients
// (3, N, kOut): of conv_bias, weight, bias. A thread per (sample, group).
template <class S, class Problem>
__global__ void coefficients_kernel(NormGradient* coefficients, float* any, float* gradients,
                                    const Sums* sums, Problem problem, const float* weight, int64_t N,
                                    int groups, const Convolution<S> c) {
  const int64_t i = int64_t(blockIdx.x) * blockDim.x + threadIdx.x, n = i / groups, all = N * S::kOut;
  if (i >= N * groups) return;
  const int per_group = S::kOut / groups, first = int(i % groups) * per_group;
  struct Total {
    double dz = 0, product = 0, centred = 0, most = 0;
  };
  const auto total_of = [&](int channel) {
    Total total;
    for (int slot = 0; slot < c.slots(); slot++) {
      const int64_t job = (n * c.slots() + slot) * kJobsPerTile<S> + channel / 16;
      const Sums own = sums[job * 16 + channel % 16];
      total.dz += own.dz, total.product += own.product, total.centred += own.centred;
      total.most = fmax(total.most, double(own.most));
    }
    return total;
  };
  const bool active = problem.active(n);
  double gradient = 0, product = 0;
  for (int channel = first; active && channel < first + per_group; channel++) {
    const Total own = total_of(channel);
    gradient += weight[channel] * own.dz, product += weight[channel] * own.product;
  }
  const double size = double(c.OD) * c.OH * c.OW, count = per_group * size;
  for (int channel = first; channel < first + per_group; channel++) {
    const int64_t at = n * S::kOut + channel;
    const Affine affine = problem.affines[at];
    const Total own = active ? total_of(channel) : Total();
    const double rstd = affine.rstd, constant = -rstd * gradient / count;
    const double linear = -rstd * rstd * rstd * product / count;
    coefficients[at] =
        norm_gradient(affine.slope, constant, linear, affine.offset, own.most, sqrt(count) / rstd);
    if (active && !(affine.slope == 0 && constant == 0 && linear == 0)) any[n] = 1;
    gradients[at] =
        active ? float(weight[channel] * rstd * own.dz + size * constant + linear * own.centred) : 0.f;
    gradients[all + at] = active ? float(rstd * own.product) : 0.f;
    gradients[2 * all + at] = active ? float(own.dz) : 0.f;
  }
}

// Bytes of static shared memory that its kernels take at most.
template <class S>
constexpr int kShared = sizeof(SumsStorage<S>) > sizeof(BackwardStorage<S>) ? sizeof(SumsStorage<S>)
                                                                            : sizeof(BackwardStorage<S>);

// dx (N, kIn, D, H, W) and d_weight, either without elements where it is not wanted; of the other parameters
// (kOut). kept: forward's. dv_bytes: as in backward_convolution().
template <class S, class T, class Tail>
void backward(Out<typename S::value_t> dx, Out<typename S::value_t> d_weight, Out<float> d_conv_bias,
              Out<float> d_norm_weight, Out<float> d_norm_bias, In<T> dy, In<float> kept,
              In<float> norm_weight, In<typename S::value_t> x, In<typename S::value_t> weight,
              int64_t groups, const Tail& tail, int64_t dv_bytes, cudaStream_t stream) {
  static_assert(kShared<S> <= kBackwardShared);
  const auto c = backward_convolution<S>(x, weight, dv_bytes);
  const int64_t N = c.N;
  expect(dy, N * S::kOut * c.size()), expect(kept, GroupNormKept<S>::count(N));
  const BackwardScratch<S> scratch(c, bool(dx), dv_bytes, stream);
  const Scratch<float> gradients(3 * N * S::kOut, stream), any(N, stream);  // by sample: (3, N, kOut)
  const Scratch<Sums> sums(scratch.plan.jobs * 16, stream);                 // (jobs, 16)
  const GroupNormKept<S> own(const_cast<float*>(kept.data), N);
  using Own = Problem<S, T, Tail>;
  Own problem{scratch.coefficients, own.affines, own.active, dy, tail};
  allow_shared<sums_kernel<S, Own>>();
  if (N > 0) {
    const auto sum = sums_kernel<S, Own>;
    const BackwardPlan& plan = scratch.plan;
    sum<<<plan.blocks(), kBlock, c.shared, stream>>>(sums, any, problem, plan.jobs, c);
    coefficients_kernel<S, Own><<<blocks_for(N * groups, 64), 64, 0, stream>>>(
        scratch.coefficients, any, gradients, sums, problem, norm_weight, N, int(groups), c);
  }
  problem.flags = any;
  const ManyRowSums<3> parameters{{{d_conv_bias, S::kOut}, {d_norm_weight, S::kOut}, {d_norm_bias, S::kOut}}};
  convolution_backward(dx, d_weight, parameters, scratch, gradients, gradients, problem, c, stream);
}

}  // namespace grad::narrow3d::group_norm
