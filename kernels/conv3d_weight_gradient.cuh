// The backward pass of a small 3-D convolution (conv3d_tile.cuh) that a normalisation follows. The
// convolution v of x - shift is computed again, tile by tile, and from it the gradient
//   dv = slope·dz + constant + linear·(v + offset)
// by channel of a sample, where dz, the gradient of the normalised value, is the problem's.
//
//   gradient_kernel        a job is a tile and 16 output channels: dv into scratch, then dv times the tile's
//                          patches, the weight's gradient of the job
//   merge_kernel           the weight's gradient, from that of all jobs, in a fixed order
//   input_gradient_kernel  dx, from dv of whole samples (conv3d_input_gradient.cuh)
//
// A problem is a class, copied to kernels, with
//   coefficients           NormGradient (N, kOut)
//   active(n)              does any element of sample n get a gradient? If not, its dv is zero
//   selected(tile, first_channel)   a functor: (dz, v, plane, q) gives dz of a turn's elements (mainloop's
//                          layout), where v is in real units; elements past the tile's get any number
//
// Where x needs no gradient, a block goes through several jobs, and its dv lies in the block's own slot of
// scratch, small enough for the L2 cache; else each job of a launch has a slot.
//
// Accuracy: as forward's (conv3d_operands.cuh), dv scaled by channel of a tile, sums flushed each turn.
#pragma once
#include "conv3d_mainloop.cuh"

struct alignas(16) NormGradient {
  float offset, slope, constant, linear;
};

constexpr int kFilters = 16 * kIn * kTaps;  // elements of 16 output channels' weights
constexpr int kJobsPerTile = kOut / 16;

// dv of a job: [plane][turn][fragment][lane], four values each, as the mainloop's; zero past the tile's
// positions.
struct DvLayout {
  int turns;  // from plane to plane
  HOST_DEVICE explicit DvLayout(const Convolution& c) : turns(c.turns()) {}
  HOST_DEVICE int64_t turn(int plane, int turn) const {
    return (int64_t(plane) * turns + turn) * kFragments * 32;
  }
  HOST_DEVICE int64_t of_job(const Convolution& c) const { return turn(c.depth, 0); }  // float4
};

struct BackwardStorage {
  float most[kBlockWarps][16];  // |dv|, by warp and channel
  float dv_scale[16];
  MainloopStorage mainloop;
};
static_assert(kPlanned<BackwardStorage>);

// -------------------------------------------------------------------------------------------------------- dv

// An epilogue (conv3d_mainloop.cuh) that forms dv, and its largest magnitude.
template <class Selected> struct GradientEpilogue {
  const Selected& selected;
  BackwardStorage& storage;
  const NormGradient* coefficients;  // of the 16 channels
  float4* dv;                        // of the job
  const DvLayout layout;
  const int first_plane;
  float unit[2], slope[2], linear[2], constant[2], most[2];

  __device__ GradientEpilogue(const Selected& selected, BackwardStorage& storage,
                              const NormGradient* coefficients, float4* dv, const Convolution& c,
                              const Tile& tile)
      : selected(selected), storage(storage), coefficients(coefficients), dv(dv), layout(c),
        first_plane(tile.first_plane) {}
  __device__ void start(float scale) {
#pragma unroll
    for (int r = 0; r < 2; r++) {
      const int channel = threadIdx.x % 32 / 4 + 8 * r;
      const NormGradient own = coefficients[channel];
      unit[r] = 1 / scale * (1 / storage.mainloop.weight_scale[channel]);
      slope[r] = own.slope, linear[r] = own.linear, constant[r] = fmaf(own.linear, own.offset, own.constant);
      most[r] = 0;
    }
  }
  __device__ __forceinline__ void begin(float (&c)[kFragments][4]) const {
#pragma unroll
    for (int j = 0; j < kFragments; j++) c[j][0] = c[j][1] = c[j][2] = c[j][3] = 0;
  }
  __device__ __forceinline__ void meanwhile(int) {}
  __device__ __forceinline__ void take(float (&v)[kFragments][4], int plane, int q, int positions) {
    const int lane = threadIdx.x % 32;
    float4* const to = dv + layout.turn(plane - first_plane, q / kTurn) + lane;
#pragma unroll
    for (int j = 0; j < kFragments; j++)
#pragma unroll
      for (int i = 0; i < 4; i++) v[j][i] *= unit[i / 2];
    float dz[kFragments][4];
    selected(dz, v, plane, q);
#pragma unroll
    for (int j = 0; j < kFragments; j++) {
#pragma unroll
      for (int i = 0; i < 4; i++) {
        const int r = i / 2;
        const float value = fmaf(linear[r], v[j][i], fmaf(slope[r], dz[j][i], constant[r]));
        v[j][i] = q + 8 * j + 2 * (lane % 4) + i % 2 < positions ? value : 0.f;
        consider(most[r], v[j][i]);
      }
      to[j * 32] = make_float4(v[j][0], v[j][1], v[j][2], v[j][3]);
    }
  }
  __device__ __forceinline__ void finish() const {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int r = 0; r < 2; r++) {
      float all = fmaxf(most[r], __shfl_xor_sync(~0u, most[r], 1));
      all = fmaxf(all, __shfl_xor_sync(~0u, all, 2));
      if (lane % 4 == 0) storage.most[threadIdx.x / 32][lane / 4 + 8 * r] = all;
    }
  }
};

// ---------------------------------------------------------------------------------------------- dv · patches

// A turn's 32 positions are two steps of a product's depth, its columns 8 taps of an input channel: fragments
// A are dv as it lies in scratch, fragments B words of the ring's pixels, halves of two neighbours put
// together.
struct WeightProducts {
  static constexpr int kTiles = (kTaps + 7) / 8;
  static constexpr int kValues = kSplit ? 2 * kIn : kIn;  // halves of a pixel: highs, then lows
  const Block& block;
  float sum[kTiles][kIn][4] = {};
  uint32_t offset[kTiles];  // bytes, of this lane's tap, from a position's pixel

  __device__ explicit WeightProducts(const Block& block) : block(block) {
#pragma unroll
    for (int k = 0; k < kTiles; k++)
      offset[k] = block.storage.taps[min(8 * k + int(threadIdx.x) % 32 / 4, kTaps - 1)] * kHighWords * 4;
  }
  __device__ __forceinline__ void next_plane() {
    const uint32_t plane = block.c.plane * kHighWords * 4, ring = kRing * plane;
#pragma unroll
    for (int k = 0; k < kTiles; k++) offset[k] = min(offset[k] + plane, offset[k] + plane - ring);
  }
  // Half `value` of two pixels, given their words.
  __device__ __forceinline__ static uint32_t pair(const uint32_t (&first)[kWords],
                                                  const uint32_t (&second)[kWords], int value) {
    return __byte_perm(first[value / 2], second[value / 2], value % 2 ? 0x7632 : 0x5410);
  }
  // dv of this lane's fragments at a turn, from position q of its plane on.
  __device__ __forceinline__ void add(const float4* dv, const float (&scale)[2], int q) {
    const int t = thread_index_anew() % 4;
    const uint32_t ring = shared_address(block.ring);
    const uint32_t low_ring = shared_address(block.low_ring()) - ring / kHighWords * kLowWords;
    const uint16_t* const positions = block.positions() + q + 2 * t;
    Halves a[kFragments][2];
    uint32_t pixel[kFragments][2];
#pragma unroll
    for (int j = 0; j < kFragments; j++) {
      const float4 own = dv[j * 32];
      a[j][0] = split<operand_t>(own.x * scale[0], own.y * scale[0]);
      a[j][1] = split<operand_t>(own.z * scale[1], own.w * scale[1]);
#pragma unroll
      for (int u = 0; u < 2; u++) pixel[j][u] = ring + positions[8 * j + u] * (kHighWords * 4);
    }
#pragma unroll
    for (int k = 0; k < kTiles; k++) {
      float turn[kIn][4] = {};
#pragma unroll
      for (int j = 0; j < kFragments; j += 2) {
        uint32_t words[2][2][kWords];
#pragma unroll
        for (int i = 0; i < 4; i++) {
          const uint32_t at = pixel[j + i / 2][i % 2] + offset[k];
          load_shared<kHighWords>(words[i / 2][i % 2], at);
          if constexpr (kLowWords > 0)
            load_shared<kLowWords>(words[i / 2][i % 2] + kHighWords, low_ring + at / kHighWords * kLowWords);
        }
        const uint32_t highs[4] = {a[j][0].high, a[j][1].high, a[j + 1][0].high, a[j + 1][1].high};
        const uint32_t lows[4] = {a[j][0].low, a[j][1].low, a[j + 1][0].low, a[j + 1][1].low};
        uint32_t b[kValues][2];
#pragma unroll
        for (int value = 0; value < kValues; value++)
#pragma unroll
          for (int half = 0; half < 2; half++) b[value][half] = pair(words[half][0], words[half][1], value);
#pragma unroll
        for (int i = 0; i < kIn; i++) {
          multiply_add<operand_t>(turn[i], lows, b[i][0], b[i][1]);
          if constexpr (kSplit) {
            multiply_add<operand_t>(turn[i], highs, b[kIn + i][0], b[kIn + i][1]);
          }
          multiply_add<operand_t>(turn[i], highs, b[i][0], b[i][1]);
        }
      }
#pragma unroll
      for (int i = 0; i < kIn; i++)
#pragma unroll
        for (int e = 0; e < 4; e++) sum[k][i][e] += turn[i][e];
    }
  }
  // All warps' sums, merged in their order, into `total`: (16, kIn, kTaps) in shared memory, which nobody
  // uses. Ends with a barrier.
  __device__ void merge(float* total) const {
    const int tid = thread_index_anew(), g = tid % 32 / 4, t = tid % 4;
#pragma unroll 1
    for (int warp = 0; warp < kBlockWarps; warp++) {
      if (warp == tid / 32)
#pragma unroll
        for (int k = 0; k < kTiles; k++)
#pragma unroll
          for (int i = 0; i < kIn; i++)
#pragma unroll
            for (int e = 0; e < 4; e++) {
              const int tap = 8 * k + 2 * t + e % 2;
              float& own = total[((g + e / 2 * 8) * kIn + i) * kTaps + min(tap, kTaps - 1)];
              if (tap < kTaps) own = warp ? own + sum[k][i][e] : sum[k][i][e];
            }
      __syncthreads();
    }
  }
};

// partial (kFilters): the weight's gradient of a job, whose dv all threads have written, as they have its
// magnitudes. Starts and ends with a barrier.
__device__ inline void weight_gradient(float* partial, const float4* dv, Operands& operands,
                                       BackwardStorage& storage) {
  constexpr int kBatch = kRing - kDepth + 1;  // output planes whose input the ring holds at a time
  const Block& block = operands.block;
  const Convolution& c = block.c;
  const DvLayout layout(c);
  const int tid = thread_index_anew();
  __syncthreads();
  if (tid < 16) {
    float most = 0;
    for (int warp = 0; warp < kBlockWarps; warp++) most = fmaxf(most, storage.most[warp][tid]);
    storage.dv_scale[tid] = power_of_two(fitting_exponent(most));
  }
  __syncthreads();
  const float scale[2] = {storage.dv_scale[tid % 32 / 4], storage.dv_scale[tid % 32 / 4 + 8]};
  WeightProducts products(block);
  int turn = tid / 32, plane_in = 0;
#pragma unroll 1
  for (int first = 0; first < block.tile.planes; first += kBatch) {
    const int last = min(first + kBatch, block.tile.planes);
    if (first) __syncthreads();  // the oldest planes have been read
#pragma unroll 1
    for (; plane_in < last + kDepth - 1; plane_in++)
      operands.split_plane(plane_in, block.origin + plane_in * block.plane_stride, c.channel);
    __syncthreads();
#pragma unroll 1
    for (int plane = first; plane < last; plane++) {
#pragma unroll 1
      for (; turn < block.turns; turn += kBlockWarps)
        products.add(dv + layout.turn(plane, turn) + tid % 32, scale, turn * kTurn);
      turn -= block.turns;
      products.next_plane();
    }
  }
  float* const total = reinterpret_cast<float*>(block.ring);
  __syncthreads();
  products.merge(total);
#pragma unroll 1
  for (int k = tid; k < kFilters; k += kBlock) {
    const float x_scale = kSplit ? block.storage.scaling[k / kTaps % kIn].scale : 1.f;
    partial[k] = total[k] * (1 / storage.dv_scale[k / (kIn * kTaps)]) * (1 / x_scale);
  }
}

// --------------------------------------------------------------------------------------------------- kernels

// Jobs first … end - 1, shared out among the blocks: of each, dv in the block's slot, `most` (jobs, 16), the
// largest |dv| by channel, and `partial` (jobs, kFilters), where they are wanted.
template <class Problem>
__global__ void __launch_bounds__(kBlock, 1)
gradient_kernel(float4* dv, float* most, float* partial, Problem problem, unsigned first, unsigned end,
                const Convolution c) {
  extern __shared__ uint4 shared[];
  __shared__ BackwardStorage storage;
  dv += blockIdx.x * DvLayout(c).of_job(c);
#pragma unroll 1
  for (unsigned job = first + blockIdx.x; job < end; job += gridDim.x) {
    const Tile tile(c, job / kJobsPerTile);
    const int first_channel = int(job % kJobsPerTile) * 16;
    if (!problem.active(tile.n)) continue;
    Mainloop mainloop(c, tile, storage.mainloop, reinterpret_cast<uint32_t*>(shared), first_channel);
    const auto selected = problem.selected(c, tile, first_channel);
    GradientEpilogue epilogue(selected, storage, problem.coefficients + tile.n * kOut + first_channel, dv, c,
                              tile);
    mainloop.run(epilogue, tile.planes * mainloop.turns());
    if (most && threadIdx.x < 16) {
      float all = 0;
      for (int warp = 0; warp < kBlockWarps; warp++) all = fmaxf(all, storage.most[warp][threadIdx.x]);
      most[int64_t(job) * 16 + threadIdx.x] = all;
    }
    if (partial) weight_gradient(partial + int64_t(job) * kFilters, dv, mainloop.operands, storage);
    mainloop.retire();
  }
}

constexpr int kMergeColumns = 32, kMergeRows = 16;

// d_weight (kOut, kIn, kDepth, kHeight, kWidth) from `partial`. What x is shifted by counts for as much as
// the gradient of the convolution's bias by sample, d_level (N, kOut); null if it is zero. Grid: elements /
// kMergeColumns, a thread per element and share of the samples.
template <class Problem>
__global__ void __launch_bounds__(kMergeColumns * kMergeRows)
merge_kernel(value_t* d_weight, const float* partial, const float* d_level, Problem problem, int64_t N,
             const Convolution c) {
  __shared__ double sums[kMergeRows][kMergeColumns];
  const int column = threadIdx.x % kMergeColumns, row = threadIdx.x / kMergeColumns;
  const int element = blockIdx.x * kMergeColumns + column, channel = element / (kIn * kTaps);
  double sum = 0;
  for (int64_t n = row; n < N && element < kOut * kIn * kTaps; n += kMergeRows) {
    if (!problem.active(n)) continue;
    const int64_t job = n * c.slots() * kJobsPerTile + channel / 16;
    for (int slot = 0; slot < c.slots(); slot++)
      sum += double(partial[(job + slot * kJobsPerTile) * kFilters + element % kFilters]);
    if (kSplit && d_level)
      sum += double(d_level[n * kOut + channel]) * double(shift_of(c, n, element / kTaps % kIn));
  }
  sums[row][column] = sum;
  __syncthreads();
  if (row || element >= kOut * kIn * kTaps) return;
  for (int i = 1; i < kMergeRows; i++) sum += sums[i][column];
  d_weight[element] = value_t(float(sum));
}
