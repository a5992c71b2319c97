// y = dropout(clamp(min(group_norm(conv(x)), low), low, high), p), forward, with the convolution inside; its output is never written.
//
// Two launches: statistics per (sample, block, channel), then the convolution again, normalised. Every value is computed, though
// min and clamp make most of them equal. The mask is that of conv3d_groupnorm_min_clamp_dropout.cu for the same seed.
#include "convolution3d.cuh"
#include "philox.h"

constexpr int kRunPitch = kTurn + 8;  // of a warp's results in shared memory: stores of 8 channels meet no bank conflict

struct DropoutMask {
  const int64_t* seed;  // null: nothing is dropped
  uint32_t threshold;   // kept: lane >= threshold, which is dropout_keeps in integers
  float scale;
};

inline DropoutMask dropout_mask(const int64_t* seed, double p) {
  const double kept_from = ceil(double(float(p)) * 0x1p24) * 256;  // p = 1 drops everything: its scale is 0
  return {seed, kept_from >= 0x1p32 ? 0xffffffffu : uint32_t(kept_from), float(p < 1 ? 1 / (1 - p) : 0)};
}

// How results are stored: four at a time, with or without dropout, or one by one where they don't start at a multiple of four.
enum class Store { kVectors, kVectorsDropout, kSingle };

template <Store kStore> struct StoreSink {
  float low, high;
  float bias[2], offset[2], slope[2];     // real units: z = (v + offset)·slope + bias
  float start[2], factor[2], w_scale[2];  // in units of the sums
  float* run;                             // [16][kRunPitch] of this warp
  float* y;
  DropoutMask mask;
  uint64_t seed;
  int64_t origin, channel, before;  // index of the block's first element, of channels and planes; elements before y in the whole
  int plane_size;
  // kVectors: a turn's results wait in `run` until the next turn's products give time to store them.
  static constexpr int kLanes = kTurn / 4, kRows = 32 / kLanes, kDraws = 16 / kRows;  // lanes per channel, channels at a time
  int64_t lane_origin, waiting;  // index of this lane's first element in the part; where the waiting results go, or -1
  uint32_t keep, waiting_keep;   // a bit per element
  Philox4 draws[kDraws];
  __device__ void first(float scale) { rescale(1, scale); }
  __device__ void rescale(float, float scale) {
#pragma unroll
    for (int r = 0; r < 2; r++) start[r] = offset[r] * scale * w_scale[r], factor[r] = slope[r] * (1 / scale) * (1 / w_scale[r]);
  }
  __device__ __forceinline__ void begin(float (&c)[kTiles][4]) const {
#pragma unroll
    for (int j = 0; j < kTiles; j++) c[j][0] = c[j][1] = start[0], c[j][2] = c[j][3] = start[1];
  }
  __device__ __forceinline__ float value(int r, float v) const {
    const float z = fmaf(v, factor[r], bias[r]);
    return min_nan(max_nan(min_nan(z, low), low), high);
  }
  // Four elements of channel lane / kLanes + i·kRows.
  __device__ __forceinline__ void store(int i) {
    const int lane = threadIdx.x % 32;
    float4 four = *reinterpret_cast<const float4*>(run + (lane / kLanes + i * kRows) * kRunPitch + lane % kLanes * 4);
    if (kStore == Store::kVectorsDropout) {
      const uint32_t bits = waiting_keep >> 4 * i;
      four.x *= bits & 1 ? mask.scale : 0.f, four.y *= bits & 2 ? mask.scale : 0.f;
      four.z *= bits & 4 ? mask.scale : 0.f, four.w *= bits & 8 ? mask.scale : 0.f;
    }
    // A predicate in place of a branch, which would keep the products around it from being scheduled together.
    asm volatile("{ .reg .pred valid; setp.ne.s32 valid, %0, 0; @valid st.global.v4.f32 [%1], {%2, %3, %4, %5}; }"
                 :: "r"(int(waiting >= 0)), "l"(y + waiting + i * kRows * channel), "f"(four.x), "f"(four.y), "f"(four.z), "f"(four.w)
                 : "memory");
  }
  // A round of Philox, as in philox.h, for this turn's draws side by side.
  __device__ __forceinline__ void draw_round(int round) {
    const uint32_t k0 = uint32_t(seed) + round * 0x9E3779B9u, k1 = uint32_t(seed >> 32) + round * 0xBB67AE85u;
#pragma unroll
    for (int i = 0; i < kDraws; i++) {
      uint32_t(&c)[4] = draws[i].lane;
      const uint64_t p0 = uint64_t(0xD2511F53u) * c[0], p1 = uint64_t(0xCD9E8D57u) * c[2];
      const uint32_t n0 = uint32_t(p1 >> 32) ^ c[1] ^ k0, n2 = uint32_t(p0 >> 32) ^ c[3] ^ k1;
      c[0] = n0, c[1] = uint32_t(p1), c[2] = n2, c[3] = uint32_t(p0);
    }
  }
  __device__ __forceinline__ void meanwhile(int step, int plane, int q, int) {
    if constexpr (kStore != Store::kSingle)
#pragma unroll
      for (int i = step * kDraws / kSteps; i < (step + 1) * kDraws / kSteps; i++) store(i);
    if constexpr (kStore == Store::kVectorsDropout) {
      if (step == 0) {
        uint64_t counter = uint64_t(before + lane_origin + int64_t(plane) * plane_size + q) / 4;
#pragma unroll
        for (int i = 0; i < kDraws; i++, counter += uint64_t(kRows * channel) / 4)
          draws[i] = {{uint32_t(counter), uint32_t(counter >> 32), 0, 0}};
      }
#pragma unroll
      for (int round = step * 10 / kSteps; round < (step + 1) * 10 / kSteps; round++) draw_round(round);
      if (step == kSteps - 1) {
        keep = 0;
#pragma unroll
        for (int i = 0; i < 4 * kDraws; i++) keep |= draws[i / 4].lane[i % 4] >= mask.threshold ? 1u << i : 0u;
      }
    }
  }
  __device__ __forceinline__ void take(float (&v)[kTiles][4], int plane, int q, int limit) {
    const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    __syncwarp();  // what waited has been read
#pragma unroll
    for (int j = 0; j < kTiles; j++)
#pragma unroll
      for (int r = 0; r < 2; r++)
        *reinterpret_cast<float2*>(run + (g + 8 * r) * kRunPitch + j * 8 + 2 * t) =
            make_float2(value(r, v[j][2 * r]), value(r, v[j][2 * r + 1]));
    __syncwarp();
    waiting_keep = keep;
    waiting = q + lane % kLanes * 4 < limit ? lane_origin + int64_t(plane) * plane_size + q : -1;
    if constexpr (kStore == Store::kSingle) store_single(plane, q, min(kTurn, limit - q));
  }
  __device__ __forceinline__ void finish() {
    if constexpr (kStore != Store::kSingle)
#pragma unroll
      for (int i = 0; i < kDraws; i++) store(i);
  }
  __device__ void store_single(int plane, int q, int length) const {
    const int lane = threadIdx.x % 32;
#pragma unroll 1
    for (int row = lane / 16; row < 16; row += 2) {
      const int64_t begin = origin + row * channel + int64_t(plane) * plane_size + q, whole = before + begin;
#pragma unroll 1
      for (int64_t draw = whole / 4 + lane % 16; draw <= (whole + length - 1) / 4; draw += 16) {
        const Philox4 random = mask.seed ? philox(seed, draw) : Philox4{};
#pragma unroll
        for (int i = 0; i < 4; i++) {
          const int at = int(draw * 4 + i - whole);
          const float factor = !mask.seed ? 1.f : random.lane[i] >= mask.threshold ? mask.scale : 0.f;
          if (at >= 0 && at < length) y[begin + at] = run[row * kRunPitch + at] * factor;
        }
      }
    }
  }
};

template <Store kStore>
__global__ void __launch_bounds__(kBlock, BLOCKS_PER_SM)
apply_kernel(float* y, const PartStatistics* statistics, const float* conv_bias, const float* weight, const float* bias, float low,
             float high, float eps, DropoutMask mask, int64_t before, int groups, const Convolution c) {
  extern __shared__ uint4 shared[];
  __shared__ float weight_scale[16];
  __shared__ float coefficients[16][3];
  __shared__ __align__(16) float runs[kBlockWarps][16 * kRunPitch];
  const Part part(c, blockIdx.x);
  const int first_channel = blockIdx.y * 16, lane = threadIdx.x % 32, g = lane / 4;
  if (threadIdx.x < 16) {
    // In double: the shift's constant may be many times the spread.
    const int own = first_channel + threadIdx.x, per_group = kOut / groups, begin = own / per_group * per_group;
    const double size = double(c.OD) * c.OH * c.OW;
    Moments<double> all{0, 0, 0};
    double level = 0;
    for (int channel = begin; channel < begin + per_group; channel++) {
      const Moments<float> moments = merge_slots(statistics, c, part.n, channel);
      const PartStatistics s = statistics[part.n * c.slots() * kOut + channel];
      const double constant = double(s.constant) + double(s.constant_low) + double(conv_bias[channel]);
      if (channel == own) level = constant;
      all = all.merge({size, double(moments.mean) + constant, double(moments.m2)});
    }
    coefficients[threadIdx.x][0] = float(level - all.mean);
    coefficients[threadIdx.x][1] = weight[own] / sqrtf(float(all.variance()) + eps);
    coefficients[threadIdx.x][2] = bias[own];
  }
  find_weight_scales(weight_scale, c, first_channel);
  StoreSink<kStore> sink;
  sink.low = low, sink.high = high, sink.mask = mask, sink.seed = mask.seed ? uint64_t(*mask.seed) : 0;
  sink.plane_size = c.OH * c.OW, sink.channel = int64_t(c.OD) * sink.plane_size;
  sink.origin = (part.n * kOut + first_channel) * sink.channel + part.first_row * c.OW, sink.before = before, sink.y = y;
  sink.run = runs[threadIdx.x / 32], sink.waiting = -1, sink.keep = sink.waiting_keep = 0;
  sink.lane_origin = sink.origin + lane / sink.kLanes * sink.channel + lane % sink.kLanes * 4;
#pragma unroll
  for (int r = 0; r < 2; r++) {
    sink.offset[r] = coefficients[g + 8 * r][0], sink.slope[r] = coefficients[g + 8 * r][1];
    sink.bias[r] = coefficients[g + 8 * r][2], sink.w_scale[r] = weight_scale[g + 8 * r];
  }
  sweep(c, part, first_channel, weight_scale, reinterpret_cast<uint32_t*>(shared), sink);
  sink.finish();
}

// y (N, CHANNELS_OUT, D', H', W'); statistics (N, slots, CHANNELS_OUT, 4) is scratch, with slots = ceil(H' / rows)·ceil(D' / depth): a
// block computes `rows` output rows of `depth` output planes. seed (1), or without elements for no dropout; offset is the number
// of elements before y in the whole.
EXPORT void forward(float* y, float* statistics, const float* x, const float* weight, const float* conv_bias,
                    const float* norm_weight, const float* norm_bias, const int64_t* seed, double low, double high, double p,
                    double eps, int64_t offset, int64_t groups, int64_t N, int64_t D, int64_t H, int64_t W, int64_t rows,
                    int64_t depth, cudaStream_t stream) {
  launch_statistics(statistics, convolution(x, weight, D, H, W, rows, depth), N, stream);
  const Convolution c = convolution(x, weight, D, H, W, rows, depth);
  const int bytes = shared_bytes(c);
  const int64_t plane = int64_t(c.OH) * c.OW;
  const bool vectors = vectors_fit(y, plane) && rows * c.OW % 4 == 0 && offset % 4 == 0;
  const auto kernel = !vectors ? apply_kernel<Store::kSingle> : seed ? apply_kernel<Store::kVectorsDropout> : apply_kernel<Store::kVectors>;
  allow_shared(kernel, bytes);
  kernel<<<dim3(unsigned(N * c.slots()), kOut / 16), kBlock, bytes, stream>>>(
      y, reinterpret_cast<const PartStatistics*>(statistics), conv_bias, norm_weight, norm_bias, low, high, eps,
      dropout_mask(seed, p), offset, int(groups), c);
}
