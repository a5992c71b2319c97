// The gradients of y = dropout(clamp(min(group_norm(conv(x)), low), low, high), p), with the convolution
// inside: computed again from x, never written to memory as a whole.
//
// A gradient passes at exact ties of z with `low` only (and NaN wherever statistics are not finite). Forward
// has left a flag per sample; where it is 0 all kernels leave at once, without reading dy. Those of dv leave
// where all of a sample's coefficients are zero, too: where all slopes are, as in a norm whose weight starts
// at zero. Launches:
//   sums_kernel          of dz, dz·(v + offset) and v + offset by tile and channel, the convolution once
//   coefficients_kernel  what dv needs of them, and the parameters' gradients by sample
//   gradient_kernel, merge_kernel, input_gradient_kernel   grad/narrow3d_backward.cuh, v once more
//
// At the default size (128, 3, 16, 64, 64) with all elements tied: dy is 441 MB, read once, and twice where
// slopes are not zero; 3.5 G products of a weight and an element each for v (twice), the weight's gradient
// and dx.
#include "grad/narrow3d_backward.cuh"
#include "conv3d_groupnorm_min_clamp_dropout.cuh"

// Which of 32 elements are kept, a bit each: from `first` on, and 4·apart further. A draw serves four of
// them; the four lanes of a channel share theirs.
__device__ __forceinline__ void kept_elements(uint32_t (&kept)[2], const DropoutMask& mask, uint64_t seed,
                                              int64_t first, int64_t apart) {
  kept[0] = kept[1] = ~0u;
  if (!mask.threshold) return;
  const auto of_draw = [&](const Philox4& draw) {
    uint32_t bits = 0;
#pragma unroll
    for (int k = 0; k < 4; k++) bits |= uint32_t(draw.lane[k] >= mask.threshold) << k;
    return bits;
  };
  const int t = threadIdx.x % 4, shift = int(first % 4);
  const uint64_t own = first / 4 + t;
  Philox4 draws[4];
  draw(draws, seed, {own, own + 4, own + apart, own + apart + 4});
#pragma unroll
  for (int r = 0; r < 2; r++) {
    kept[r] = of_draw(draws[2 * r]) << 4 * t | of_draw(draws[2 * r + 1]) << (16 + 4 * t);
    kept[r] |= __shfl_xor_sync(~0u, kept[r], 1);
    kept[r] |= __shfl_xor_sync(~0u, kept[r], 2);
  }
  if (shift == 0) return;
  Philox4 last[2];
  draw(last, seed, {uint64_t(first / 4 + 8), uint64_t(first / 4 + apart + 8)});
#pragma unroll
  for (int r = 0; r < 2; r++) kept[r] = kept[r] >> shift | of_draw(last[r]) << (32 - shift);
}

struct alignas(2 * sizeof(output_t)) Pair {
  output_t at[2];
};

struct DropoutProblem {
  const NormGradient* coefficients;
  const Affine* affines;
  const float* flags;  // (N)
  const output_t* dy;
  DropoutMask mask;
  float tied;

  __device__ bool active(int64_t n) const { return flags[n] != 0; }

  struct Selected {
    const DropoutProblem& problem;
    const Affine affine[2];  // of this lane's channels
    const uint64_t seed;
    const int64_t channel, first;  // elements: of a channel, and before the tile's in this lane's first one
    const int plane_size;
    const bool pairs;  // do two neighbouring positions, from an even one on, lie at aligned places?
    uint2 dy[2][kFragments];  // of a channel and fragment, a pair's

    // What the sums were in y's place before the tail, where it compared them.
    __device__ __forceinline__ float stored(float v) const { return float(output_t(v)); }
    // A position's, in the first of this lane's two channels.
    __device__ __forceinline__ int64_t element(int plane, int q) const {
      return first + int64_t(plane) * plane_size + q;
    }
    __device__ __forceinline__ void expect(int plane, int q, int positions) {
      constexpr int kBytes = sizeof(output_t);
      const int position = q + int(threadIdx.x % 4) * 2;
      const output_t* const from = problem.dy + element(plane, position);
      const auto for_words = [&](auto load) {
#pragma unroll
        for (int r = 0; r < 2; r++)
#pragma unroll
          for (int j = 0; j < kFragments; j++)
            dy[r][j] = load(positions - position - 8 * j, from + 8 * r * channel + 8 * j);
      };
      if (pairs) {
        for_words([](int left, const output_t* at) { return load_if<2 * kBytes>(left > 0, at); });
      } else {
        for_words([](int left, const output_t* at) {
          const uint2 first = load_if<kBytes>(left > 0, at), second = load_if<kBytes>(left > 1, at + 1);
          return kBytes == 4 ? make_uint2(first.x, second.x) : make_uint2(first.x | second.x << 16, 0);
        });
      }
    }
    __device__ __forceinline__ float gradient(int r, int j, int u) const {
      Pair both;
      memcpy(&both, &dy[r][j], sizeof both);
      return float(both.at[u]);
    }
    // Elements past the tile's have a dy of zero.
    __device__ __forceinline__ void operator()(float (&dz)[kFragments][4], const float (&v)[kFragments][4],
                                               int plane, int q) const {
      bool any = false;
#pragma unroll
      for (int j = 0; j < kFragments; j++)
#pragma unroll
        for (int i = 0; i < 4; i++) {
          // The gradient of conv3d_groupnorm_min_clamp_dropout_fused.
          const bool tie = affine[i / 2](stored(v[j][i])) == problem.tied;
          dz[j][i] = tie ? gradient(i / 2, j, i % 2) : 0.f, any |= tie;
        }
      if (!__any_sync(~0u, any)) return;
      uint32_t kept[2];
      kept_elements(kept, problem.mask, seed, element(plane, q), 2 * channel);
      // The gradient of conv3d_groupnorm_min_clamp_dropout_fused.
      const float factor = 0.5f * problem.mask.scale;
#pragma unroll
      for (int r = 0; r < 2; r++) kept[r] >>= 2 * (threadIdx.x % 4);
#pragma unroll
      for (int j = 0; j < kFragments; j++)
#pragma unroll
        for (int i = 0; i < 4; i++) dz[j][i] *= kept[i / 2] & 1u << (8 * j + i % 2) ? factor : 0.f;
    }
  };
  __device__ Selected selected(const Convolution<Conv>& c, const Tile& tile, int first_channel) const {
    const int64_t plane = int64_t(c.OH) * c.OW, own = tile.n * Conv::kOut + first_channel + threadIdx.x % 32 / 4;
    const int before = tile.first_row * c.OW;
    const bool pairs =
        (plane | before | tile.positions) % 2 == 0 && uintptr_t(dy) % sizeof(Pair) == 0;
    return {*this, {affines[own], affines[own + 8]}, seed_of(mask.seed, mask.number), c.OD * plane,
            own * c.OD * plane + before, int(plane), pairs};
  }
};

// ------------------------------------------------------------------------------------------------------ sums

// Of a tile and channel, or more of them: sums of dz, dz·(v + offset), v + offset, and the largest |dz|.
struct Sums {
  float dz, product, centred, most;
};

struct SumsStorage {
  uint4 weights[Conv::kWeightWords / 2][32];
  Sums sums[kBlockWarps][16];
  MainloopStorage<Conv> mainloop;
};
static_assert(kPlanned<SumsStorage>);

struct SumsEpilogue : SelectedEpilogue<DropoutProblem::Selected> {
  SumsStorage& storage;
  Sums sums[2];
  __device__ SumsEpilogue(const DropoutProblem::Selected& selected, SumsStorage& storage)
      : SelectedEpilogue(selected), storage(storage) {}
  __device__ void start(float x_scale) {
    SelectedEpilogue::start(x_scale, storage.mainloop.weight_scale);
    sums[0] = sums[1] = {0, 0, 0, 0};
  }
  __device__ __forceinline__ void take(float (&v)[kFragments][4], int plane, int q, int positions) {
    float dz[kFragments][4];
    select(dz, v, plane, q);
#pragma unroll
    for (int j = 0; j < kFragments; j++)
#pragma unroll
      for (int i = 0; i < 4; i++) {
        Sums& own = sums[i / 2];
        const float centred = selected.stored(v[j][i]) + selected.affine[i / 2].offset;
        own.dz += dz[j][i], own.product = fmaf(dz[j][i], centred, own.product);
        own.most = fmaxf(own.most, fabsf(dz[j][i]));
        own.centred += q + 8 * j + int(threadIdx.x % 4) * 2 + i % 2 < positions ? centred : 0.f;
      }
  }
  __device__ __forceinline__ void finish() const {
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
__global__ void __launch_bounds__(kBlock, 1)
sums_kernel(Sums* sums, float* any, DropoutProblem problem, int64_t jobs, const Convolution<Conv> c) {
  extern __shared__ uint4 shared[];
  __shared__ SumsStorage storage;
#pragma unroll 1
  for (int64_t job = blockIdx.x; job < jobs; job += gridDim.x) {
    const Tile tile(c, unsigned(job / kJobsPerTile<Conv>));
    const int first_channel = int(job % kJobsPerTile<Conv>) * 16;
    if (threadIdx.x == 0) any[tile.n] = 0;
    if (!problem.active(tile.n)) continue;
    Mainloop<Conv, SharedWeights> mainloop(c, tile, storage.mainloop, reinterpret_cast<uint32_t*>(shared),
                                     first_channel, SharedWeights(storage.weights[0]));
    SumsEpilogue epilogue(problem.selected(c, tile, first_channel), storage);
    mainloop.run(epilogue, tile.planes * mainloop.turns());
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

// coefficients (N, kOut); any (N), zeros before: is any of a sample's not zero? Where slopes are zero elements
// may tie, and still no gradient gets through. And the parameters' gradients by sample, gradients (3, N,
// kOut): of conv_bias, weight, bias. A thread per (sample, group).
__global__ void coefficients_kernel(NormGradient* coefficients, float* any, float* gradients,
                                    const Sums* sums, DropoutProblem problem, const float* weight, int64_t N,
                                    int groups, const Convolution<Conv> c) {
  const int64_t i = int64_t(blockIdx.x) * blockDim.x + threadIdx.x, n = i / groups, all = N * Conv::kOut;
  if (i >= N * groups) return;
  const int per_group = Conv::kOut / groups, first = int(i % groups) * per_group;
  struct Total {
    double dz = 0, product = 0, centred = 0, most = 0;
  };
  const auto total_of = [&](int channel) {
    Total total;
    for (int slot = 0; slot < c.slots(); slot++) {
      const int64_t job = (n * c.slots() + slot) * kJobsPerTile<Conv> + channel / 16;
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
    const int64_t at = n * Conv::kOut + channel;
    const Affine affine = problem.affines[at];
    const Total own = active ? total_of(channel) : Total();
    const double rstd = affine.rstd, constant = -rstd * gradient / count;
    const double linear = -rstd * rstd * rstd * product / count;
    coefficients[at] = norm_gradient(affine.slope, constant, linear, affine.offset, own.most,
                                     sqrt(count) / rstd);
    if (active && !(affine.slope == 0 && constant == 0 && linear == 0)) any[n] = 1;
    gradients[at] =
        active ? float(weight[channel] * rstd * own.dz + size * constant + linear * own.centred) : 0.f;
    gradients[all + at] = active ? float(rstd * own.product) : 0.f;
    gradients[2 * all + at] = active ? float(own.dz) : 0.f;
  }
}

// dx (N, CHANNELS_IN, D, H, W) and d_weight, either without elements where it is not wanted; of the other
// parameters (CHANNELS_OUT). saved, seed and number: forward's. scratch, one after the other: dv, a
// slot for each of `dv_slots` jobs; coefficients (N, CHANNELS_OUT, 8); gradients by sample (3, N,
// CHANNELS_OUT); sums (jobs, 16, 4), where a sample has slots · CHANNELS_OUT / 16 jobs; `partial` (jobs,
// elements of 16 channels' weights); `most` (jobs, 16); any (N). rows to shared are the plan (convolution()),
// input_room is for that of dx (InputTiling).
EXPORT void backward(value_t* dx, value_t* d_weight, float* d_conv_bias, float* d_norm_weight,
                     float* d_norm_bias, float* scratch, const output_t* dy, const value_t* x,
                     const value_t* weight, const float* saved, const float* norm_weight,
                     const int64_t* seed, int64_t number, double low, double high, double p, int64_t groups,
                     int64_t N, int64_t D, int64_t H, int64_t W, int64_t rows, int64_t depth, int64_t pitch,
                     int64_t raw, int64_t shared, int64_t dv_slots, int64_t input_room, cudaStream_t stream) {
  const Convolution<Conv> c = convolution<Conv>(x, weight, D, H, W, rows, depth, pitch, raw, shared);
  const BackwardPlan plan(c, N, dv_slots);
  auto* const dv = reinterpret_cast<float4*>(scratch);
  auto* const coefficients = reinterpret_cast<NormGradient*>(dv + plan.dv_values);
  float* const gradients = reinterpret_cast<float*>(coefficients + N * Conv::kOut);
  auto* const sums = reinterpret_cast<Sums*>(gradients + 3 * N * Conv::kOut);
  float* const partial = reinterpret_cast<float*>(sums + plan.jobs * 16);
  float* const most = partial + plan.jobs * kFilters<Conv>;
  float* const any = most + plan.jobs * 16;
  auto* const affines = reinterpret_cast<const Affine*>(saved);
  const float* const active = saved + N * Conv::kOut * 4;
  DropoutProblem problem{coefficients, affines, active, dy, dropout_mask(seed, number, p),
                         tied_value(low, high)};
  allow_shared<sums_kernel>();
  if (N > 0) {
    sums_kernel<<<plan.blocks(), kBlock, c.shared, stream>>>(sums, any, problem, plan.jobs, c);
    coefficients_kernel<<<blocks_for(N * groups, 64), 64, 0, stream>>>(
        coefficients, any, gradients, sums, problem, norm_weight, N, int(groups), c);
  }
  problem.flags = any;
  const ManyRowSums<3> parameters{{{d_conv_bias, Conv::kOut}, {d_norm_weight, Conv::kOut}, {d_norm_bias, Conv::kOut}}};
  convolution_backward(dx, d_weight, parameters, dv, most, partial, gradients, gradients, problem, plan,
                       input_room, c, stream);
}
