// The weight's gradient of a small 3-D convolution that a normalisation follows, and dv for that of x
// (grad/narrow3d.cuh).
//
//   gradient_kernel        a job is a tile and 16 output channels: dv times the tile's patches, the weight's
//                          gradient of the job; and dv into scratch, where x needs a gradient
//   merge_kernel           the gradients of weight and parameters, from those of all jobs and samples, in a
//                          fixed order
//
// A warp's sums v are fragments D of one product and, two side by side, as dv fragments A of the next: dv
// stays in registers, the pixels in the ring serve both products, the weights lie in shared memory.
//
// Accuracy: as forward's (conv/narrow3d_operands.cuh), dv scaled by channel of a sample, sums flushed each
// turn. The scale comes from a bound of |dv|, which may be 2^10 times too large: halves then still hold 20
// bits of the largest dv, and smaller ones to the same absolute precision.
#pragma once
#include "grad/narrow3d.cuh"
#include "core/reduce.cuh"

namespace grad::narrow3d {

template <class S>
constexpr int kFilters = 16 * S::kIn * S::kTaps;  // elements of 16 output channels' weights

template <class S> struct BackwardStorage {
  static_assert(S::kOut % 16 == 0, "all of a job's channels are there");
  uint4 weights[S::kWeightWords / 2][32];
  float most[kBlockWarps][16];  // |dv|, by warp and channel
  MainloopStorage<S> mainloop;
};

// ---------------------------------------------------------------------------------------------- dv · patches

// The products dv · patches of a tile: rows are 16 channels out, columns 8 taps of a channel in, and the
// depth is positions, a turn's 32 in two steps. Fragments A are dv as the mainloop leaves its sums; a
// register of B, two neighbouring positions' halves, is put together from words of the ring's pixels.
template <class S> struct WeightProducts {
  static constexpr int kTiles = (S::kTaps + 7) / 8;
  static constexpr int kValues = S::kSplit ? 2 * S::kIn : S::kIn;  // halves of a pixel: highs, then lows
  const Block<S>& block;
  float sum[kTiles][S::kIn][4];
  uint32_t offset[kTiles];  // bytes, of this lane's tap, from a position's pixel
  int plane;                // that they are for

  __device__ __forceinline__ explicit WeightProducts(const Block<S>& block) : block(block) {}
  __device__ __forceinline__ void start() {
    plane = block.tile.first_plane;
#pragma unroll
    for (int k = 0; k < kTiles; k++) {
      offset[k] =
          block.storage.taps[min(8 * k + int(threadIdx.x) % 32 / 4, S::kTaps - 1)] * S::kHighWords * 4;
#pragma unroll
      for (int i = 0; i < S::kIn; i++) sum[k][i][0] = sum[k][i][1] = sum[k][i][2] = sum[k][i][3] = 0;
    }
  }
  __device__ __forceinline__ void go_to(int next) {
    const uint32_t bytes = block.c.plane * S::kHighWords * 4, ring = S::kRing * bytes;
    for (; plane < next; plane++)
#pragma unroll
      for (int k = 0; k < kTiles; k++) offset[k] = min(offset[k] + bytes, offset[k] + bytes - ring);
  }
  // Half `value` of two pixels, given their words.
  __device__ __forceinline__ static uint32_t pair(const uint32_t (&first)[S::kWords],
                                                  const uint32_t (&second)[S::kWords], int value) {
    return __byte_perm(first[value / 2], second[value / 2], value % 2 ? 0x7632 : 0x5410);
  }
  // dv, scaled, of a turn, from position q of its plane on.
  __device__ __forceinline__ void add(const float (&dv)[kFragments][4], int q) {
    const int t = thread_index_anew() % 4;
    const uint32_t ring = shared_address(block.ring);
    const uint32_t low_ring = shared_address(block.low_ring()) - ring / S::kHighWords * S::kLowWords;
    const uint16_t* const positions = block.positions() + q + 2 * t;
    Halves a[kFragments][2];
    uint32_t pixel[kFragments][2];
#pragma unroll
    for (int j = 0; j < kFragments; j++)
#pragma unroll
      for (int u = 0; u < 2; u++) {
        a[j][u] = split<typename S::operand_t>(dv[j][2 * u], dv[j][2 * u + 1]);
        pixel[j][u] = ring + positions[8 * j + u] * (S::kHighWords * 4);
      }
#pragma unroll
    for (int k = 0; k < kTiles; k++) {
      float turn[S::kIn][4] = {};
#pragma unroll
      for (int j = 0; j < kFragments; j += 2) {
        uint32_t words[2][2][S::kWords];
#pragma unroll
        for (int i = 0; i < 4; i++) {
          const uint32_t at = pixel[j + i / 2][i % 2] + offset[k];
          load_shared<S::kHighWords>(words[i / 2][i % 2], at);
          if constexpr (S::kLowWords > 0)
            load_shared<S::kLowWords>(words[i / 2][i % 2] + S::kHighWords,
                                      low_ring + at / S::kHighWords * S::kLowWords);
        }
        const uint32_t highs[4] = {a[j][0].high, a[j][1].high, a[j + 1][0].high, a[j + 1][1].high};
        const uint32_t lows[4] = {a[j][0].low, a[j][1].low, a[j + 1][0].low, a[j + 1][1].low};
        uint32_t b[kValues][2];
#pragma unroll
        for (int value = 0; value < kValues; value++)
#pragma unroll
          for (int half = 0; half < 2; half++) b[value][half] = pair(words[half][0], words[half][1], value);
#pragma unroll
        for (int i = 0; i < S::kIn; i++) multiply_add<typename S::operand_t>(turn[i], lows, b[i][0], b[i][1]);
#pragma unroll
        for (int i = 0; i < S::kIn; i++)
          multiply_add<typename S::operand_t>(turn[i], highs, b[i][0], b[i][1]);
        if constexpr (S::kSplit) {
#pragma unroll
          for (int i = 0; i < S::kIn; i++)
            multiply_add<typename S::operand_t>(turn[i], highs, b[S::kIn + i][0], b[S::kIn + i][1]);
        }
      }
#pragma unroll
      for (int i = 0; i < S::kIn; i++)
#pragma unroll
        for (int e = 0; e < 4; e++) sum[k][i][e] += turn[i][e];
    }
  }
  // All warps' sums, merged in their order, into `total` [tile][channel][lane] in shared memory, which nobody
  // uses. Starts and ends with a barrier.
  __device__ __forceinline__ void merge(float4* total) const {
    const int tid = thread_index_anew();
#pragma unroll 1
    for (int warp = 0; warp < kBlockWarps; warp++) {
      __syncthreads();
      if (warp == tid / 32)
#pragma unroll
        for (int k = 0; k < kTiles; k++)
#pragma unroll
          for (int i = 0; i < S::kIn; i++) {
            float4& all = total[(k * S::kIn + i) * 32 + tid % 32];
            const float* const own = sum[k][i];
            const float4 before = warp ? all : make_float4(0, 0, 0, 0);
            all = make_float4(before.x + own[0], before.y + own[1], before.z + own[2], before.w + own[3]);
          }
    }
    __syncthreads();
  }
  // Where element k of (16, kIn, kTaps) lies in `total`, in floats.
  __device__ __forceinline__ static int place(int k) {
    const int tap = k % S::kTaps, i = k / S::kTaps % S::kIn, row = k / (S::kTaps * S::kIn);
    const int lane = row % 8 * 4 + tap % 8 / 2, value = row / 8 * 2 + tap % 2;
    return ((tap / 8 * S::kIn + i) * 32 + lane) * 4 + value;
  }
};

// -------------------------------------------------------------------------------------------------------- dv

// A sink's Warp (conv/narrow3d.cuh) that forms dv; where they are wanted, stores it, with its largest
// magnitude, and multiplies it with the patches.
template <class S, class Selected> struct GradientWarp : SelectedWarp<Selected> {
  using Base = SelectedWarp<Selected>;
  BackwardStorage<S>& storage;
  const NormGradient* coefficients;  // of the 16 channels
  float4* dv;                        // of the job, or null
  const bool weight_wanted;
  const DvLayout layout;
  const int first_plane;
  WeightProducts<S> products;
  float slope[2], linear[2], constant[2], most[2], unscale[2];  // of dv, scaled; and back

  __device__ __forceinline__ GradientWarp(const Selected& selected, BackwardStorage<S>& storage,
                                          const NormGradient* coefficients, float4* dv, bool weight_wanted,
                                          const Block<S>& block)
      : Base(selected), storage(storage), coefficients(coefficients), dv(dv), weight_wanted(weight_wanted),
        layout(block.c), first_plane(block.tile.first_plane), products(block) {}
  __device__ __forceinline__ void begin(float x_scale) {
    Base::begin(x_scale, storage.mainloop.weight_scale);
#pragma unroll
    for (int r = 0; r < 2; r++) {
      const NormGradient own = coefficients[threadIdx.x % 32 / 4 + 8 * r];
      slope[r] = own.slope, linear[r] = own.linear, constant[r] = own.constant, Base::unit[r] *= own.unit;
      unscale[r] = 1 / own.scale, most[r] = 0;
    }
    products.start();
  }
  __device__ __forceinline__ void accept(Accumulators& v, const WarpTile& tile, const NoOffset&) {
    const int lane = threadIdx.x % 32;
    Accumulators dz;
    Base::select(dz, v, tile);
#pragma unroll
    for (int j = 0; j < kFragments; j++)
#pragma unroll
      for (int i = 0; i < 4; i++) {
        const int r = i / 2;
        const float value = fmaf(linear[r], v[j][i], fmaf(slope[r], dz[j][i], constant[r]));
        v[j][i] = tile.q + 8 * j + 2 * (lane % 4) + i % 2 < tile.positions ? value : 0.f;
      }
    if (dv) {
      float4* const to = dv + layout.turn(tile.plane - first_plane, tile.q / kTurn) + lane;
#pragma unroll
      for (int j = 0; j < kFragments; j++) {
        float own[4];
#pragma unroll
        for (int i = 0; i < 4; i++) own[i] = v[j][i] * unscale[i / 2], consider(most[i / 2], own[i]);
        to[j * 32] = make_float4(own[0], own[1], own[2], own[3]);
      }
    }
    if (!weight_wanted) return;
    products.go_to(tile.plane);
    products.add(v, tile.q);
  }
  __device__ __forceinline__ void end() const {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int r = 0; r < 2; r++) {
      const float all = channel_most(most[r]);
      if (lane % 4 == 0) storage.most[threadIdx.x / 32][lane / 4 + 8 * r] = all;
    }
  }
  // After the run: `most` (16) and `partial` (kFilters) of the job.
  __device__ __forceinline__ void write_most(float* job_most) const {
    if (threadIdx.x >= 16) return;
    float all = 0;
    for (int warp = 0; warp < kBlockWarps; warp++) all = fmaxf(all, storage.most[warp][threadIdx.x]);
    job_most[threadIdx.x] = all;
  }
  __device__ __forceinline__ void write_partial(float* partial) const {
    float* const total = reinterpret_cast<float*>(products.block.ring);
    products.merge(reinterpret_cast<float4*>(total));
#pragma unroll 1
    for (int k = threadIdx.x; k < kFilters<S>; k += kBlock) {
      const float x_scale = S::kSplit ? storage.mainloop.scaling[k / S::kTaps % S::kIn].scale : 1.f;
      const float own_scale = coefficients[k / (S::kIn * S::kTaps)].scale;
      partial[k] = total[WeightProducts<S>::place(k)] * (1 / own_scale) * (1 / x_scale);
    }
  }
};

// --------------------------------------------------------------------------------------------------- kernels

// Jobs first … end - 1, shared out among the blocks: of each, dv, from the first one's on, and `most` (jobs,
// 16), the largest |dv| by channel, or both null; `partial` (jobs, kFilters), or null.
template <class S, class Problem>
__global__ void __launch_bounds__(kBlock, 1)
    gradient_kernel(float4* dv, float* most, float* partial, Problem problem, unsigned first, unsigned end,
                    const Convolution<S> c) {
  extern __shared__ uint4 shared[];
  __shared__ BackwardStorage<S> storage;
#pragma unroll 1
  for (unsigned job = first + blockIdx.x; job < end; job += gridDim.x) {
    const Tile tile(c, job / kJobsPerTile<S>);
    const int first_channel = int(job % kJobsPerTile<S>) * 16;
    if (!problem.active(tile.n)) continue;
    Mainloop<S, SharedWeights> mainloop(c, tile, storage.mainloop, reinterpret_cast<uint32_t*>(shared),
                                        first_channel, SharedWeights(storage.weights[0]));
    GradientWarp warp(problem.selected(c, tile, first_channel), storage,
                      problem.coefficients + tile.n * S::kOut + first_channel,
                      dv ? dv + (job - first) * DvLayout(c).of_job(c) : nullptr, partial != nullptr,
                      mainloop.block);
    mainloop.run(warp, tile.planes * mainloop.turns());
    if (most) warp.write_most(most + int64_t(job) * 16);
    if (partial) warp.write_partial(partial + int64_t(job) * kFilters<S>);
    mainloop.retire();
  }
}

constexpr int kMergeColumns = 32, kMergeRows = 16;

// d_weight (kOut, kIn, kDepth, kHeight, kWidth), if it is not null, from `partial`, and the parameters'
// gradients, kOut or 1 of each, from those by sample, by_sample (kCount, N, kOut). What x is shifted by
// counts for as much as the gradient of the convolution's bias by sample, d_level (N, kOut); null if it is
// zero. Grid: elements of both, one after the other, / kMergeColumns; a thread per element and share of the
// samples.
template <class S, class Problem, int kCount>
__global__ void __launch_bounds__(kMergeColumns* kMergeRows)
    merge_kernel(typename S::value_t* d_weight, const ManyRowSums<kCount> parameters, const float* partial,
                 const float* by_sample, const float* d_level, Problem problem, int64_t N,
                 const Convolution<S> c) {
  __shared__ double sums[kMergeRows][kMergeColumns];
  constexpr int kWeights = S::kOut * S::kIn * S::kTaps;
  const int column = threadIdx.x % kMergeColumns, row = threadIdx.x / kMergeColumns;
  const int element = blockIdx.x * kMergeColumns + column;
  const bool of_weight = element < kWeights;
  const int parameter = (element - kWeights) / S::kOut;  // of the others, and whose channel that is
  const int channel = of_weight ? element / (S::kIn * S::kTaps) : (element - kWeights) % S::kOut;
  const bool is_own =
      of_weight ? d_weight != nullptr : parameter < kCount && channel < parameters.of[parameter].count;
  double sum = 0;
  if (is_own && of_weight) {
    for (int64_t n = row; n < N; n += kMergeRows) {
      if (!problem.active(n)) continue;
      const int64_t job = n * c.slots() * kJobsPerTile<S> + channel / 16;
      for (int slot = 0; slot < c.slots(); slot++)
        sum += double(partial[(job + slot * kJobsPerTile<S>)*kFilters<S> + element % kFilters<S>]);
      if (S::kSplit && d_level)
        sum += double(d_level[n * S::kOut + channel]) * double(shift_of(c, n, element / S::kTaps % S::kIn));
    }
  } else if (is_own) {
    const float* const values = by_sample + parameter * N * S::kOut + channel;
    const int64_t step = parameters.of[parameter].count == 1 ? 1 : S::kOut;
    for (int64_t i = row * step; i < N * S::kOut; i += kMergeRows * step) sum += double(values[i]);
  }
  sums[row][column] = sum;
  __syncthreads();
  if (row || !is_own) return;
  for (int i = 1; i < kMergeRows; i++) sum += sums[i][column];
  if (of_weight) d_weight[element] = typename S::value_t(float(sum));
  else parameters.of[parameter].at[channel] = float(sum);
}

}  // namespace grad::narrow3d
