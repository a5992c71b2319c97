// y = dropout(clamp(min(group_norm(conv(x)), low), low, high), p), forward, with the convolution inside.
//
// x (N, CHANNELS_IN, D, H, W), weight (CHANNELS_OUT, CHANNELS_IN, KERNEL_D, KERNEL_H, KERNEL_W); y (N,
// CHANNELS_OUT, D', H', W'). Three launches:
//   convolve_kernel   once: the sums, rounded to y's dtype, in y's own place; and their statistics by tile
//   merge_kernel      merges a sample's statistics, in a fixed order: bitwise the same in each run
//   finish_kernel     normalises, applies min, clamp and dropout in place
// Every value is computed, though min and clamp make most of them equal. The mask is that of
// conv3d_groupnorm_min_clamp_dropout.cu for the same seed.
//
// At the default size (128, 3, 16, 64, 64), 3×3×3, 16 channels: 101 MB in, 441 MB out, which the last
// launch reads and writes once more; bound by memory, 0.127 ms at 4.28 TB/s if it did not.
#include "conv3d_groupnorm_min_clamp_dropout.cuh"
#include "norm/narrow3d_statistics.cuh"

// Of a channel in shared memory: stores of 8 channels meet no bank conflict.
constexpr int kStagingPitch = kTurn + 8;

struct GroupNorm {
  const float *conv_bias, *weight, *bias;  // (kOut)
  float eps;
  int groups;
};

// -------------------------------------------------------------------------------- convolution and statistics

// Takes statistics, and writes the convolution of x - shift, in real units: four values at a time, or one by
// one where a tile's rows don't start at a multiple of four. A turn's results wait in `staging` until the
// next turn's products give time to store them.
template <bool kVectors> struct StoringEpilogue : StatisticsEpilogue<Conv> {
  static constexpr int kLanes = kTurn / 4;       // that store a channel's results of a turn
  static constexpr int kChannels = 32 / kLanes;  // that a warp stores at a time
  static constexpr int kStores = 16 / kChannels;
  float unit[2];
  float* staging;     // [16][kStagingPitch] of this warp
  output_t* y;        // the tile's first element
  int64_t channel;    // elements
  int plane;          // elements
  output_t* lane_at;  // y, of this lane's first element
  output_t* waiting;  // where the waiting results go, or null
  using StatisticsEpilogue::StatisticsEpilogue;

  __device__ void start(float s) {
    StatisticsEpilogue::start(s), waiting = nullptr;
#pragma unroll
    for (int r = 0; r < 2; r++)
      unit[r] = 1 / scale * (1 / storage.weight_scale[threadIdx.x % 32 / 4 + 8 * r]);
  }
  // Sums start at zero: values that started at an outlier would be as inexact as it is.
  __device__ __forceinline__ void begin(float (&c)[kFragments][4]) const { clear(c); }
  // Four elements of channel lane / kLanes + i·kChannels.
  __device__ __forceinline__ void store(int i) {
    const int lane = threadIdx.x % 32;
    const float* const from = staging + (lane / kLanes + i * kChannels) * kStagingPitch + lane % kLanes * 4;
    const float4 four = *reinterpret_cast<const float4*>(from);
    output_t* const to = waiting + i * kChannels * channel;
    if constexpr (sizeof(output_t) == 4) {
      store_if(waiting, to, four);
    } else {
      const Vector<output_t> rounded{output_t(four.x), output_t(four.y), output_t(four.z), output_t(four.w)};
      store_if(waiting, to, reinterpret_cast<const uint2&>(rounded));
    }
  }
  __device__ __forceinline__ void meanwhile(int step) {
    if constexpr (kVectors) {
#pragma unroll
      for (int i = step * kStores / Conv::kSteps; i < (step + 1) * kStores / Conv::kSteps; i++) store(i);
    }
  }
  __device__ __forceinline__ void take(float (&v)[kFragments][4], int at_plane, int q, int positions) {
    const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    __syncwarp();  // what waited has been read
#pragma unroll
    for (int j = 0; j < kFragments; j++)
#pragma unroll
      for (int r = 0; r < 2; r++)
        *reinterpret_cast<float2*>(staging + (g + 8 * r) * kStagingPitch + j * 8 + 2 * t) =
            make_float2(v[j][2 * r] * unit[r], v[j][2 * r + 1] * unit[r]);
    __syncwarp();
    if (started)
#pragma unroll
      for (int j = 0; j < kFragments; j++)
#pragma unroll
        for (int i = 0; i < 4; i++) v[j][i] -= shift[i / 2];
    StatisticsEpilogue::take(v, at_plane, q, positions);
    const int64_t at = int64_t(at_plane) * plane + q;
    if constexpr (kVectors) {
      waiting = q + lane % kLanes * 4 < positions ? lane_at + at : nullptr;
    } else {
#pragma unroll 1
      for (int row = 0; row < 16; row++)
        for (int i = lane; i < min(kTurn, positions - q); i += 32)
          y[row * channel + at + i] = output_t(staging[row * kStagingPitch + i]);
    }
  }
  __device__ __forceinline__ void finish() {
    if constexpr (kVectors) {
#pragma unroll
      for (int i = 0; i < kStores; i++) store(i);
    }
    StatisticsEpilogue::finish();
  }
};

struct SharedStorage {
  alignas(16) float staging[kBlockWarps][16 * kStagingPitch];
  MainloopStorage<Conv> mainloop;
};
static_assert(kPlanned<SharedStorage>);

// Grid (N · slots, kOut / 16).
template <bool kVectors>
__global__ void __launch_bounds__(kBlock, 1)
convolve_kernel(output_t* y, TileStatistics* statistics, const Convolution<Conv> c) {
  extern __shared__ uint4 shared[];
  __shared__ SharedStorage storage;
  const Tile tile(c, blockIdx.x);
  const int first_channel = blockIdx.y * 16, lane = threadIdx.x % 32;
  const int64_t plane = int64_t(c.OH) * c.OW;
  Mainloop<Conv> mainloop(c, tile, storage.mainloop, reinterpret_cast<uint32_t*>(shared), first_channel);
  StoringEpilogue<kVectors> epilogue(storage.mainloop);
  epilogue.plane = int(plane), epilogue.channel = c.OD * plane;
  epilogue.y = y + (tile.n * Conv::kOut + first_channel) * epilogue.channel + tile.first_row * c.OW;
  epilogue.lane_at = epilogue.y + lane / epilogue.kLanes * epilogue.channel + lane % epilogue.kLanes * 4;
  epilogue.staging = storage.staging[threadIdx.x / 32];
  mainloop.run(epilogue, tile.planes * mainloop.turns());
  epilogue.write(statistics, c, tile, first_channel);
}

struct Channel {
  Moments<double> moments;
  double constant;  // what shifting x and the bias add
};

// What shifting x and the bias add to a channel of sample n: in double, it may be many times the spread. Eight
// lanes share the work, and all have the result.
__device__ inline double constant_of(const Convolution<Conv>& c, const GroupNorm& norm, int64_t n, int channel) {
  double level = 0;
  for (int i = 0; i < Conv::kIn; i++) {
    double taps = 0;
    for (int tap = threadIdx.x % 8; tap < Conv::kTaps; tap += 8)
      taps += double(c.weight[(channel * Conv::kIn + i) * Conv::kTaps + tap]);
    level += taps * double(shift_of(c, n, i));
  }
#pragma unroll
  for (int lanes = 1; lanes < 8; lanes *= 2) level += __shfl_xor_sync(~0u, level, lanes);
  return level + norm.conv_bias[channel];
}

// affines (N, kOut), from the statistics of a sample's tiles, merged in a fixed order; active (N) becomes 0.
// Grid: N; eight threads for a channel.
__global__ void __launch_bounds__(kThreads)
merge_kernel(Affine* affines, float* active, const TileStatistics* statistics, GroupNorm norm,
             const Convolution<Conv> c) {
  __shared__ Channel channels[Conv::kOut];
  const int64_t n = blockIdx.x;
  const int eighth = threadIdx.x % 8;
  for (int channel = threadIdx.x / 8; channel < Conv::kOut; channel += kThreads / 8) {  // whole warps
    Moments<float> own{0, 0, 0};
    for (int slot = eighth; slot < c.slots(); slot += 8)
      own = own.merge(moments_of(statistics, c, n, slot, channel));
    own = merge_lanes<8>(own);
    const double level = constant_of(c, norm, n, channel);
    if (eighth == 0)
      channels[channel] = {{double(c.OD) * c.OH * c.OW, double(own.mean) + level, double(own.m2)}, level};
  }
  __syncthreads();
  const int per_group = Conv::kOut / norm.groups;
  for (int channel = threadIdx.x; channel < Conv::kOut; channel += kThreads) {
    Moments<double> all{0, 0, 0};
    for (int i = 0; i < per_group; i++)
      all = all.merge(channels[channel / per_group * per_group + i].moments);
    const float deviation = sqrtf(float(all.variance()) + norm.eps);
    const double offset = channels[channel].constant - all.mean;
    const float slope = norm.weight[channel] / deviation, bias = float(offset * slope + norm.bias[channel]);
    affines[n * Conv::kOut + channel] = {float(offset), slope, bias, 1 / deviation};
  }
  if (threadIdx.x == 0) active[n] = 0;
}

// ------------------------------------------------------------------------------------------- what follows it

struct Tail {
  float low, high;
  DropoutMask mask;
  float tied;  // z that pass a gradient
  __device__ __forceinline__ float operator()(float z, uint32_t random) const {
    // The formula of conv3d_groupnorm_min_clamp_dropout.
    const float value = min_nan(max_nan(min_nan(z, low), low), high);
    return value * (random >= mask.threshold ? mask.scale : 0.f);
  }
};

// Finishes y in place, four elements that share a draw at a time: as vectors where those are aligned and a
// channel has a multiple of four. Grid: N · kOut · chunks. The last samples come first: the cache still holds
// some of them. kFlags: `active` (N) becomes 1 where an element passes a gradient or statistics are not
// finite.
template <bool kVectors, bool kFlags>
__global__ void __launch_bounds__(kThreads)
finish_kernel(output_t* y, float* active, const Affine* affines, Tail tail, int64_t size, unsigned channels,
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
    Vector<output_t> four[kAtOnce];  // they arrive while the draws are computed
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
      const uint32_t(&random)[4] = draws[j].lane;
      if constexpr (kVectors) {
        Vector<output_t> finished;
#pragma unroll
        for (int k = 0; k < kVector; k++) {
          const float z = affine(float(four[j].at[k]));
          if (kFlags) any |= at < count && z == tail.tied;
          finished.at[k] = output_t(tail(z, random[k]));
        }
        if (at < count) store_vector(y + at * kVector, finished);
      } else {
#pragma unroll
        for (int k = 0; k < 4; k++) {
          const int64_t element = (first + at) * 4 + k - whole;
          if (element < 0 || element >= size) continue;
          const float z = affine(float(y[element]));
          if (kFlags) any |= z == tail.tied;
          y[element] = output_t(tail(z, random[k]));
        }
      }
    }
  }
  if (kFlags && __syncthreads_or(any) && threadIdx.x == 0) active[channel / Conv::kOut] = 1;
}

// y (N, CHANNELS_OUT, D', H', W'). saved, for backward, one after the other: affines (N, CHANNELS_OUT, 4);
// active (N), 1 where an element of a sample passes a gradient or statistics are not finite, else 0. Without
// elements where no gradient is wanted: they lie in scratch then, behind the statistics (N, slots,
// CHANNELS_OUT, 2) of the `slots` tiles of each sample.
// seed (1), or without elements where the number counts; rows to shared are the plan (convolution()).
EXPORT void forward(output_t* y, float* saved, float* scratch, const value_t* x, const value_t* weight,
                    const float* conv_bias, const float* norm_weight, const float* norm_bias,
                    const int64_t* seed, int64_t number, double low, double high, double p, double eps,
                    int64_t groups, int64_t N, int64_t D, int64_t H, int64_t W, int64_t rows, int64_t depth,
                    int64_t pitch, int64_t raw, int64_t shared, cudaStream_t stream) {
  if (N == 0) return;
  const Convolution<Conv> c = convolution<Conv>(x, weight, D, H, W, rows, depth, pitch, raw, shared);
  const int64_t plane = int64_t(c.OH) * c.OW, size = c.OD * plane;
  const bool vectors = vectors_fit(y, plane) && rows * c.OW % 4 == 0;
  const auto convolve = vectors ? convolve_kernel<true> : convolve_kernel<false>;
  const GroupNorm norm{conv_bias, norm_weight, norm_bias, float(eps), int(groups)};
  vectors ? allow_shared<convolve_kernel<true>>() : allow_shared<convolve_kernel<false>>();
  auto* const statistics = reinterpret_cast<TileStatistics*>(scratch);
  float* const kept = saved ? saved : scratch + N * c.slots() * Conv::kOut * 2;
  auto* const affines = reinterpret_cast<Affine*>(kept);
  float* const active = kept + N * Conv::kOut * 4;
  const dim3 grid(unsigned(N * c.slots()), Conv::kOut / 16);
  convolve<<<grid, kBlock, c.shared, stream>>>(y, statistics, c);
  merge_kernel<<<unsigned(N), kThreads, 0, stream>>>(affines, active, statistics, norm, c);
  const bool aligned = vectors_fit(y, size);
  const auto finish = saved ? (aligned ? finish_kernel<true, true> : finish_kernel<false, true>)
                            : (aligned ? finish_kernel<true, false> : finish_kernel<false, false>);
  const Tail tail{float(low), float(high), dropout_mask(seed, number, p), tied_value(low, high)};
  const unsigned channels = unsigned(N * Conv::kOut), chunks = chunks_for(size);
  finish<<<channels * chunks, kThreads, 0, stream>>>(y, active, affines, tail, size, channels, chunks);
}
