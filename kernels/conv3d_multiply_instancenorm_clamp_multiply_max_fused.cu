// y = max over c of m[c]·clamp(instance_norm(conv(x)·m[c]), low, high), forward, with the convolution inside.
//
// x (N, CHANNELS_IN, D, H, W), weight (CHANNELS_OUT, CHANNELS_IN, KERNEL_D, KERNEL_H, KERNEL_W), m
// (CHANNELS_OUT); y (N, D', H', W').
//
// Two phases: statistics per (sample, tile, channel), then the convolution again, normalised and reduced over
// the channels. One launch where a block has a whole sample, or where all blocks run at the same time and can
// meet in between; else two. In one launch the sums at the last positions are held, not computed again: those
// that find room in shared memory, and before them those for which there is scratch, small enough to stay in
// the L2 cache. Instance normalisation removes what is constant over a channel: the convolution's bias and
// what shifting x adds.
//
// At the default size (128, 3, 16, 32, 32), 3×3×3, 16 channels: 25 MB in, 6.5 MB out, 0.007 ms at 4.28 TB/s.
#include <cooperative_groups.h>

#include "conv3d_statistics.cuh"
#include "normalisation.h"

// What a channel of a sample needs: m·clamp(z) = clamp((v + offset)·slope, low, high), with m in the bounds
// and, squared, in `slope`. The maximum over channels of max(low, min(value, high)) is the larger one of
// their lows' and of their min(value, high)'s.
struct Coefficients {
  float offset, slope, low, high;
};
// m·bound; where 0 times infinity would stand, 0, which is what m·clamp(z) is.
__device__ inline float scaled_bound(float bound, float m) {
  return m == 0 && isinf(bound) ? 0.f : bound * m;
}

// Sums at `turns` of a tile's turns, from `first` on, where there is room for `most`.
struct Held {
  static constexpr int kPad = 8;  // stores of 8 channels then meet no bank conflict, and fill sectors
  float* values;                  // [16][pitch]
  int first, turns, pitch;
  __device__ static int pitch_of(int most) { return most * kTurn + kPad; }
  __device__ Held(float* values, int first, int turns, int most)
      : values(values), first(first), turns(turns), pitch(pitch_of(most)) {}
  __device__ __forceinline__ void take(const float (&v)[kFragments][4], const float (&shift)[2],
                                       int turn) const {
    turn -= first;
    if (turn < 0 || turn >= turns) return;
    const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    float* const to = values + g * pitch + turn * kTurn + 2 * t;
#pragma unroll
    for (int j = 0; j < kFragments; j++)
#pragma unroll
      for (int r = 0; r < 2; r++)
        *reinterpret_cast<float2*>(to + 8 * r * pitch + 8 * j) =
            make_float2(v[j][2 * r] + shift[r], v[j][2 * r + 1] + shift[r]);
  }
};
// For how many turns have so many `values` room?
inline int held_turns(int64_t values) { return int(max(values / 16 - Held::kPad, int64_t(0)) / kTurn); }

// ------------------------------------------------------------------------------------------------- epilogues

// Takes statistics, and holds sums.
struct HoldingEpilogue : StatisticsEpilogue {
  const Held &in_scratch, &in_shared;
  const int first_plane, plane_turns;
  __device__ HoldingEpilogue(MainloopStorage& storage, const Held& in_scratch, const Held& in_shared,
                             int first_plane, int plane_turns)
      : StatisticsEpilogue(storage), in_scratch(in_scratch), in_shared(in_shared), first_plane(first_plane),
        plane_turns(plane_turns) {}
  __device__ __forceinline__ void take(float (&v)[kFragments][4], int plane, int q, int positions) {
    StatisticsEpilogue::take(v, plane, q, positions);
    const int turn = (plane - first_plane) * plane_turns + q / kTurn;
    in_scratch.take(v, shift, turn), in_shared.take(v, shift, turn);
  }
};

// What backward wants of the maximum: the first channel that attains it, and its v - mean.
struct Winners {
  index_t* index;  // both of the sample's first plane, at the tile's first row
  float* centred;
};

// The values at kCount positions of the 8 lanes g that share t, combined by `op`: a lane gets those at its
// own position. Each step halves the positions that a lane has, as long as there are two.
template <int kCount, class T, class Op>
__device__ __forceinline__ T combined(T (&values)[kCount], const Op& op) {
  const int g = threadIdx.x % 32 / 4;
#pragma unroll
  for (int step = 0, count = kCount; step < 3; step++, count = (count + 1) / 2) {
    const bool upper = g >> step & 1;
    if (count > 1) {
#pragma unroll
      for (int i = 0; i < count / 2; i++) {
        const T mine = upper ? values[count / 2 + i] : values[i];
        const T other = upper ? values[i] : values[count / 2 + i];
        values[i] = op(mine, __shfl_xor_sync(~0u, other, 4 << step));
      }
    } else {
      values[0] = op(values[0], __shfl_xor_sync(~0u, values[0], 4 << step));
    }
  }
  return values[0];
}
// Lane g's own one of 8 positions: g's bits in reverse, so that it is also the lane g that a position belongs
// to.
static_assert(kFragments == 4, "as many positions as there are lanes g");
HOST_DEVICE constexpr int own_position(int g) { return g % 2 * 4 + g / 2 % 2 * 2 + g / 4; }

// Normalises, and takes the maximum over channels.
template <bool kSaving> struct MaximumEpilogue {
  const Coefficients* coefficients;  // [16], in shared memory, as are the following
  const float* weight_scale;
  float4* scaled;  // high, initial, factor
  output_t* y;     // of the sample's first plane, at the tile's first row
  Winners winners;
  int plane_size, first_channel;
  float unit;                            // of the sums, but for the channel's
  float low;                             // the largest of all channels
  float own_low[2];                      // where the winner is saved
  float high[2], initial[2], factor[2];  // of channels g, g + 8; the last two in units of the sums
  __device__ void start(float scale) {
    low = -INFINITY, unit = 1 / scale;
#pragma unroll
    for (int r = 0; r < 2; r++) {
      const Coefficients own = coefficients[threadIdx.x % 32 / 4 + 8 * r];
      low = max_nan(low, own.low), high[r] = own.high, own_low[r] = own.low;
      const float w_scale = weight_scale[threadIdx.x % 32 / 4 + 8 * r];
      initial[r] = own.offset * scale * w_scale, factor[r] = own.slope * (1 / scale) * (1 / w_scale);
      if (threadIdx.x < 32 && threadIdx.x % 4 == 0)
        scaled[threadIdx.x / 4 + 8 * r] = make_float4(high[r], initial[r], factor[r], own.low);
    }
    for (int m = 4; m < 32; m *= 2) low = max_nan(low, __shfl_xor_sync(~0u, low, m));
  }
  // The best of 16 channels, with its v - mean in units of its sums, unless one before them is as good.
  __device__ __forceinline__ void store(int64_t at, float best, int channel, float v) const {
    const output_t value = output_t(best);
    if (first_channel > 0 && !replaces_maximum(float(value), float(y[at]))) return;
    y[at] = value, winners.index[at] = index_t(first_channel + channel);
    winners.centred[at] = v * unit * (1 / weight_scale[channel]);
  }
  // The first of the 16 channels that is as good as the best; where that is NaN, which equals nothing, the
  // first NaN.
  __device__ __forceinline__ static int first_best(const float (&values)[16], float best) {
    int channel = 16;
#pragma unroll
    for (int c = 15; c >= 0; c--) channel = values[c] == best ? c : channel;
    if (channel < 16) return channel;
#pragma unroll
    for (int c = 15; c >= 0; c--) channel = values[c] != values[c] ? c : channel;
    return channel;
  }
  // What is held, a thread per two positions.
  __device__ __forceinline__ void take_held(const Held& held, const Tile& tile, int plane_turns) const {
#pragma unroll 1
    for (int i = 2 * thread_index_anew(); i < held.turns * kTurn; i += 2 * kBlock) {
      float2 v[16];
#pragma unroll
      for (int channel = 0; channel < 16; channel++)
        v[channel] = *reinterpret_cast<const float2*>(held.values + channel * held.pitch + i);
      const int turn = held.first + i / kTurn, plane = turn / plane_turns;
      const int q = turn % plane_turns * kTurn + i % kTurn;
      const int64_t at = int64_t(tile.first_plane + plane) * plane_size + q;
      float best[2] = {low, low}, values[2][16];
#pragma unroll
      for (int channel = 0; channel < 16; channel++) {
        const float4 own = scaled[channel];
#pragma unroll
        for (int u = 0; u < 2; u++) {
          const float value = min_nan(((u ? v[channel].y : v[channel].x) + own.y) * own.z, own.x);
          values[u][channel] = kSaving ? max_nan(value, own.w) : value;
          best[u] = max_nan(best[u], values[u][channel]);
        }
      }
#pragma unroll
      for (int u = 0; u < 2; u++) {
        if (q + u >= tile.positions) continue;
        if constexpr (kSaving) {
          const int channel = first_best(values[u], best[u]);
          store(at + u, best[u], channel, held.values[channel * held.pitch + i + u] + scaled[channel].y);
        } else {
          y[at + u] = output_t(best[u]);
        }
      }
    }
  }
  __device__ __forceinline__ void begin(float (&c)[kFragments][4]) const {
#pragma unroll
    for (int j = 0; j < kFragments; j++) c[j][0] = c[j][1] = initial[0], c[j][2] = c[j][3] = initial[1];
  }
  __device__ __forceinline__ float value(int r, float v) const { return min_nan(v * factor[r], high[r]); }
  __device__ __forceinline__ void expect(int, int, int) {}
  __device__ __forceinline__ void meanwhile(int) {}
  __device__ __forceinline__ void finish() {}
  __device__ __forceinline__ void take(float (&v)[kFragments][4], int plane, int q, int positions) {
    const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4, own = own_position(g);
    float values[8][2], best[8];  // of both channels, at positions 2t, 2t + 1 of each 8; the larger
#pragma unroll
    for (int i = 0; i < 8; i++) {
#pragma unroll
      for (int r = 0; r < 2; r++) {
        values[i][r] = value(r, v[i / 2][i % 2 + 2 * r]);
        if (kSaving) values[i][r] = max_nan(values[i][r], own_low[r]);
      }
      best[i] = max_nan(values[i][0], values[i][1]);
    }
    float all = combined(best, [](float a, float b) { return max_nan(a, b); });
    if constexpr (!kSaving) {
      all = max_nan(all, low);
    }
    const int position = q + own / 2 * 8 + 2 * t + own % 2;
    const int64_t at = int64_t(plane) * plane_size + position;
    if constexpr (kSaving) {
      const int channel = winner(values, all);
      const float centred = value_of(v, channel);
      if (position < positions) store(at, all, channel, centred);
    } else if (position < positions) {
      y[at] = output_t(first_channel == 0 ? all : max_nan(all, float(y[at])));
    }
  }

 private:
  // The lane that has another's position of those with the same t.
  __device__ __forceinline__ static int owner(int i) { return own_position(i) * 4 + threadIdx.x % 4; }

  // Which of the 16 channels at the lane's position have a value for which `of(value, i)`, a bit each.
  template <class Of>
  __device__ __forceinline__ static uint32_t channels_with(const float (&values)[8][2], const Of& of) {
    const int g = threadIdx.x % 32 / 4;
    uint32_t masks[4];  // of two positions each
#pragma unroll
    for (int j = 0; j < 4; j++) {
      masks[j] = 0;
#pragma unroll
      for (int k = 0; k < 4; k++)
        if (of(values[2 * j + k / 2][k % 2], 2 * j + k / 2)) masks[j] |= 1u << (8 * k);
      masks[j] <<= g;
    }
    return combined(masks, [](uint32_t a, uint32_t b) { return a | b; }) >> g / 4 * 16 & 0xffff;
  }
  // The first channel at the lane's position that is as good as the best; where that is NaN, which equals
  // nothing, the first NaN.
  __device__ __forceinline__ static int winner(const float (&values)[8][2], float best) {
    float bests[8];
#pragma unroll
    for (int i = 0; i < 8; i++) bests[i] = __shfl_sync(~0u, best, owner(i));
    uint32_t mask = channels_with(values, [&](float value, int i) { return value == bests[i]; });
    if (__any_sync(~0u, mask == 0)) {
      const uint32_t nans = channels_with(values, [](float value, int) { return value != value; });
      mask = mask ? mask : nans;
    }
    return __ffs(mask) - 1;
  }
  // v of that channel at the lane's position.
  __device__ __forceinline__ static float value_of(const float (&v)[kFragments][4], int channel) {
    const uint32_t second = __ballot_sync(~0u, channel >= 8);  // of a lane's two channels
    const int from = channel % 8 * 4 + threadIdx.x % 4, own = own_position(threadIdx.x % 32 / 4);
    float result = 0;
#pragma unroll
    for (int i = 0; i < 8; i++) {
      const float given = second >> owner(i) & 1 ? v[i / 2][i % 2 + 2] : v[i / 2][i % 2];
      const float taken = __shfl_sync(~0u, given, from);
      result = i == own ? taken : result;
    }
    return result;
  }
};

// ---------------------------------------------------------------------------------------------------- kernel

enum Phases { kStatistics = 1, kApply = 2 };

struct SharedStorage {
  float4 scaled[16];
  Coefficients coefficients[16];
  MainloopStorage mainloop;
};
static_assert(kPlanned<SharedStorage>);

// Of a channel of sample n, from the statistics of all its tiles, merged in their order.
__device__ inline Coefficients coefficients_of(const TileStatistics* statistics, const Convolution& c,
                                               int64_t n, int channel, float conv_bias, float multiplier,
                                               float low, float high, float eps, Moments<float>& all) {
  all = {0, 0, 0};
  for (int slot = 0; slot < c.slots(); slot++) all = all.merge(moments_of(statistics, c, n, slot, channel));
  const int64_t size = int64_t(c.OD) * c.OH * c.OW;
  const ScaledChannel scaled =
      scaled_channel(&all.mean, &all.m2, &conv_bias, &multiplier, eps, 0, 0, 1, size);
  const float at_low = scaled_bound(low > high ? high : low, scaled.m);
  const float at_high = scaled_bound(high, scaled.m);
  const bool turned = scaled.m < 0;
  // The formula of conv3d_multiply_instancenorm_clamp_multiply_max.
  return {-scaled.mean, scaled.a * scaled.m, turned ? at_high : at_low, turned ? at_low : at_high};
}

// Grid: N · slots. The channels come 16 at a time; y holds the maximum so far, which the same thread reads
// again. kSaving: for backward also index and centred, like y, and moments (2, N, kOut), mean and m2.
template <bool kSaving>
__global__ void __launch_bounds__(kBlock, 1)
fused_kernel(output_t* y, index_t* index, float* centred, float* moments, TileStatistics* statistics,
             float* scratch, int64_t N, const float* conv_bias,
             const float* multiplier, float low, float high, float eps, int phases, int scratch_turns,
             int shared_turns, const Convolution c) {
  extern __shared__ uint4 shared[];
  __shared__ SharedStorage storage;
  const Tile tile(c, blockIdx.x);
  Mainloop<> mainloop(c, tile, storage.mainloop, reinterpret_cast<uint32_t*>(shared), 0);
  // At the edges few for what has room.
  const int plane_turns = mainloop.turns(), turns = tile.planes * plane_turns;
  const int in_shared_turns = min(shared_turns, turns);
  const int in_scratch_turns = min(scratch_turns, turns - in_shared_turns);
  const int unheld = turns - in_scratch_turns - in_shared_turns;
  float* const own_scratch = scratch + int64_t(blockIdx.x) * 16 * Held::pitch_of(scratch_turns);
  float* const rest_of_shared = reinterpret_cast<float*>(shared + (c.shared + 15) / 16);
  const Held in_scratch(own_scratch, unheld, in_scratch_turns, scratch_turns);
  const Held in_shared(rest_of_shared, unheld + in_scratch_turns, in_shared_turns, shared_turns);
#pragma unroll 1
  for (int first_channel = 0; first_channel < kOut; first_channel += 16) {
    if (first_channel > 0) {
      mainloop.operands.fetch_weights(first_channel);
      __syncthreads();  // they are there, and weight_scale has been read
    }
    if (phases & kStatistics) {
      HoldingEpilogue epilogue(storage.mainloop, in_scratch, in_shared, tile.first_plane, plane_turns);
      mainloop.run(epilogue, turns);
      epilogue.write(statistics, c, tile, first_channel);
    }
    // All statistics are there.
    if (phases == (kStatistics | kApply) && c.slots() > 1) cooperative_groups::this_grid().sync();
    if (phases & kApply) {
      const int own = threadIdx.x / 8, channel = first_channel + own;
      // The thread that wrote the tile's own statistics of this channel.
      if (threadIdx.x % 8 == 0 && own < 16) {
        Moments<float> all;
        storage.coefficients[own] = coefficients_of(statistics, c, tile.n, channel, conv_bias[channel],
                                                    multiplier[channel], low, high, eps, all);
        if (kSaving && tile.slot == 0)
          moments[tile.n * kOut + channel] = all.mean, moments[(N + tile.n) * kOut + channel] = all.m2;
      }
      MaximumEpilogue<kSaving> epilogue;
      epilogue.coefficients = storage.coefficients, epilogue.scaled = storage.scaled;
      epilogue.weight_scale = storage.mainloop.weight_scale;
      epilogue.plane_size = c.OH * c.OW, epilogue.first_channel = first_channel;
      const int64_t first = tile.n * c.OD * int64_t(epilogue.plane_size) + tile.first_row * c.OW;
      epilogue.y = y + first, epilogue.winners = {index + first, centred + first};
      mainloop.run(epilogue, unheld);
#pragma unroll 1
      for (int i = 0; i < 2; i++) {
        Held held = in_scratch;
        if (i) held = in_shared;
        epilogue.take_held(held, tile, plane_turns);
      }
    }
  }
}

// y (N, D', H', W'). For backward, or without elements where no gradient is wanted: index (N, D', H', W'),
// which channel won, and centred, its v - mean; moments (2, N, CHANNELS_OUT) of v, the convolution of x -
// shift: mean and sum of squared deviations. scratch: statistics (N, slots, CHANNELS_OUT, 2), where a sample
// has `slots` tiles; then `held` values, any number, where sums are held. rows to shared are the plan
// (convolution()).
EXPORT void forward(output_t* y, index_t* index, float* centred, float* moments, float* scratch,
                    const value_t* x, const value_t* weight, const float* conv_bias, const float* multiplier,
                    double low, double high, double eps, int64_t held, int64_t N, int64_t D, int64_t H,
                    int64_t W, int64_t rows, int64_t depth, int64_t pitch, int64_t raw, int64_t shared,
                    cudaStream_t stream) {
  if (N == 0) return;
  const Convolution c = convolution(x, weight, D, H, W, rows, depth, pitch, raw, shared);
  const int64_t blocks = N * c.slots();
  const auto kernel = index ? fused_kernel<true> : fused_kernel<false>;
  const int all = allow_shared(kernel);
  const bool meet = c.slots() > 1 && run_together(blocks), one_launch = meet || c.slots() == 1;
  int shared_turns = 0, scratch_turns = 0;
  if (one_launch && kOut == 16) {
    const int most = c.depth * c.turns();
    shared_turns = min(held_turns((all - (c.shared + 15) / 16 * 16) / int(sizeof(float))), most);
    scratch_turns = min(held_turns(held / blocks), most - shared_turns);
    const int last_round = (most - shared_turns - scratch_turns) % kBlockWarps;  // of turns that are not held
    if (last_round) scratch_turns -= min(scratch_turns, kBlockWarps - last_round);
  }
  cudaLaunchAttribute cooperative{};
  cooperative.id = cudaLaunchAttributeCooperative;
  cooperative.val.cooperative = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = unsigned(blocks), config.blockDim = kBlock, config.stream = stream;
  config.dynamicSmemBytes = shared_turns ? all : c.shared;
  config.attrs = &cooperative, config.numAttrs = meet;
  const auto launch = [&](int phases) {
    auto* const statistics = reinterpret_cast<TileStatistics*>(scratch);
    float* const sums = scratch + blocks * kOut * 2;
    cudaLaunchKernelEx(&config, kernel, y, index, centred, moments, statistics, sums, N, conv_bias,
                       multiplier, float(low), float(high), float(eps), phases, scratch_turns, shared_turns,
                       c);
  };
  if (one_launch) launch(kStatistics | kApply);
  else launch(kStatistics), launch(kApply);
}
