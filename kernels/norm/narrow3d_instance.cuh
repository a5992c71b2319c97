// Instance normalisation behind a small 3-D convolution and a factor by channel, a tail, and the maximum over
// channels:
//   y (N, D', H', W') = max over c of tail(z[c]), z = instance_norm(conv(x)·m[c])
//
// Two phases: statistics per (sample, tile, channel), then the convolution again, normalised and reduced over
// the channels. One launch where a block has a whole sample, or where all blocks run at the same time and can
// meet in between; else two. In one launch the sums at the last positions are held, not computed again: those
// that find room in shared memory, and before them those for which there is scratch, small enough to stay in
// the L2 cache. Instance normalisation removes what is constant over a channel: the convolution's bias and
// what shifting x adds.
//
// A tail is a clamped line, with
//   multiplier                  m (kOut)
//   line(channel)               its Line, from the channel's mean, a = m·rstd, and m
#pragma once
#include <cooperative_groups.h>

#include "norm/formulas.h"
#include "norm/narrow3d_statistics.cuh"

namespace norms::narrow3d {

// A channel's result: clamp((v + offset)·slope·factor, low, high); slope·factor may underflow. The maximum
// over channels of max(low, min(value, high)) is the larger one of their lows' and of their min(value,
// high)'s.
struct Line {
  float offset, slope, factor, low, high;
};
// m·bound; where 0 times infinity would stand, 0, which is what m·clamp(z) is.
__device__ inline float scaled_bound(float bound, float m) {
  return m == 0 && isinf(bound) ? 0.f : bound * m;
}

// What forward keeps, one after the other: v - mean of the channels that won, like y (N, S); moments (2, N,
// kOut) of v, the convolution of x - shift: mean and standard deviation; which channel won, like y.
template <class S, class Index> struct Kept {
  float *centred, *moments;
  Index* index;
  Kept(float* kept, int64_t N, int64_t size)
      : centred(kept), moments(kept + N * size), index(reinterpret_cast<Index*>(moments + 2 * N * S::kOut)) {}
  static int64_t count(int64_t N, int64_t size) {
    return N * size + 2 * N * S::kOut + (N * size * int64_t(sizeof(Index)) + 3) / 4;
  }
};

// Sums by channel in memory, of a turn's positions or of more. Stores of 8 channels meet no bank conflict,
// and fill sectors.
constexpr int kPad = 8;
constexpr int kStagedPitch = kTurn + kPad, kStaged = 16 * kStagedPitch;  // a warp's own, of one turn
constexpr int kStagedBytes = kBlockWarps * kStaged * int(sizeof(float));
__device__ __forceinline__ void put(float* values, int pitch, const Accumulators& v) {
  const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
#pragma unroll
  for (int j = 0; j < kFragments; j++)
#pragma unroll
    for (int r = 0; r < 2; r++)
      *reinterpret_cast<float2*>(values + (g + 8 * r) * pitch + 8 * j + 2 * t) =
          make_float2(v[j][2 * r], v[j][2 * r + 1]);
}

// Sums at `turns` of a tile's turns, from `first` on, where there is room for `most`.
struct Held {
  float* values;  // [16][pitch]
  int first, turns, pitch;
  __device__ static int pitch_of(int most) { return most * kTurn + kPad; }
  __device__ Held(float* values, int first, int turns, int most)
      : values(values), first(first), turns(turns), pitch(pitch_of(most)) {}
  __device__ __forceinline__ void take(const Accumulators& v, const float (&offset)[2], int turn) const {
    turn -= first;
    if (turn < 0 || turn >= turns) return;
    Accumulators shifted;
#pragma unroll
    for (int j = 0; j < kFragments; j++)
#pragma unroll
      for (int i = 0; i < 4; i++) shifted[j][i] = v[j][i] + offset[i / 2];
    put(values + turn * kTurn, pitch, shifted);
  }
};
// For how many turns have so many `values` room?
inline int held_turns(int64_t values) { return int(max(values / 16 - kPad, int64_t(0)) / kTurn); }

template <class S> struct InstanceStorage {
  float4 scaled[16];  // high, initial, factor, low (below)
  float units[16];    // of the sums
  Line lines[16];
  MainloopStorage<S> mainloop;
};

// ----------------------------------------------------------------------------------------------------- sinks

// Holds sums of a block's tiles.
struct Hold {
  const Held &in_scratch, &in_shared;
  int first_plane, plane_turns;

  template <class S> using Shared = NoRoom;
  template <class S> struct Warp : IdleWarp {
    const Hold& sink;
    __device__ __forceinline__ Warp(const Hold& sink, NoRoom&, const Place<S>&) : sink(sink) {}
    __device__ __forceinline__ void accept(const Accumulators& v, const WarpTile& tile,
                                           const float (&offset)[2]) {
      const int turn = (tile.plane - sink.first_plane) * sink.plane_turns + tile.q / kTurn;
      sink.in_scratch.take(v, offset, turn), sink.in_shared.take(v, offset, turn);
    }
  };
};

// What backward wants of the maximum: the first channel that attains it, and its v - mean.
template <class Index> struct Winners {
  Index* index;  // both of the sample's first plane, at the tile's first row
  float* centred;
};

// The maxima of the 8 lanes g that share t, at 8 positions, where a lane has its own channels' maxima: a lane
// gets that of its own position.
__device__ __forceinline__ float combined_maximum(float (&best)[8]) {
  const int g = threadIdx.x % 32 / 4;
#pragma unroll
  for (int step = 0, count = 4; step < 3; step++, count /= 2) {  // each halves the positions that a lane has
    const bool upper = g >> step & 1;
#pragma unroll
    for (int i = 0; i < count; i++) {
      const float mine = upper ? best[count + i] : best[i], other = upper ? best[i] : best[count + i];
      best[i] = max_nan(mine, __shfl_xor_sync(~0u, other, 4 << step));
    }
  }
  return best[0];
}
// Lane g's own one of 8 positions: g's bits in reverse.
static_assert(kFragments == 4, "as many positions as there are lanes g");
HOST_DEVICE constexpr int own_position(int g) { return g % 2 * 4 + g / 2 % 2 * 2 + g / 4; }

// The largest of some channels' values, and the first that has it; NaN, and the first such, where there is
// one.
struct Winner {
  float value;
  int channel;
  Winner() = default;
  __device__ __forceinline__ explicit Winner(const float (&values)[8]) {
    float pairs[4], fours[2];
#pragma unroll
    for (int i = 0; i < 4; i++) pairs[i] = max_nan(values[2 * i], values[2 * i + 1]);
#pragma unroll
    for (int i = 0; i < 2; i++) fours[i] = max_nan(pairs[2 * i], pairs[2 * i + 1]);
    value = max_nan(fours[0], fours[1]);
    // Down again: into the first half wherever the winner is there, which first halves' maxima say.
    const bool four = !is_largest(fours[0]), pair = !is_largest(four ? pairs[2] : pairs[0]);
    const float first = four ? values[4] : values[0], third = four ? values[6] : values[2];
    const bool odd = !is_largest(pair ? third : first);
    channel = four * 4 + pair * 2 + odd;
  }
  // Channels from `from` on come behind these.
  __device__ __forceinline__ void join(const Winner& other, int from) {
    if (!replaces_maximum(other.value, value)) return;
    value = other.value, channel = from + other.channel;
  }

 private:
  // A NaN makes the maximum NaN.
  __device__ __forceinline__ bool is_largest(float of) const { return of == value || of != of; }
};

// Applies the tail's lines, and takes the maximum over channels.
template <class S, class T, class Index, bool kSaving> struct MaximumWarp : IdleWarp {
  InstanceStorage<S>& storage;
  float* staged;  // in shared memory, kStaged for each warp, where the winner is saved
  T* y;           // of the sample's first plane, at the tile's first row
  Winners<Index> winners;
  int plane_size, first_channel;
  float low;                           // the largest of all channels
  float high[2], start[2], factor[2];  // of channels g, g + 8; the last two in units of the sums
  __device__ MaximumWarp(InstanceStorage<S>& storage, float* staged) : storage(storage), staged(staged) {}
  __device__ void begin(float scale) {
    low = -INFINITY;
#pragma unroll
    for (int r = 0; r < 2; r++) {
      const Line own = storage.lines[threadIdx.x % 32 / 4 + 8 * r];
      low = max_nan(low, own.low), high[r] = own.high;
      const float w_scale = storage.mainloop.weight_scale[threadIdx.x % 32 / 4 + 8 * r];
      start[r] = own.offset * scale * w_scale,
      factor[r] = own.slope * (1 / scale) * own.factor * (1 / w_scale);
      if (threadIdx.x < 32 && threadIdx.x % 4 == 0) {
        storage.scaled[threadIdx.x / 4 + 8 * r] = make_float4(high[r], start[r], factor[r], own.low);
        if (kSaving) storage.units[threadIdx.x / 4 + 8 * r] = 1 / scale * (1 / w_scale);
      }
    }
    for (int m = 4; m < 32; m *= 2) low = max_nan(low, __shfl_xor_sync(~0u, low, m));
    if (kSaving) __syncthreads();  // what take() reads is there
  }
  // Of kCount neighbouring positions, of which the first `real` count, the first being element `at` of y: the
  // maximum over channels of their sums [16][pitch], which are less the mean already if kCentred.
  template <int kCount, bool kCentred>
  __device__ __forceinline__ void reduce(const float* sums, int pitch, int64_t at, int real) const {
    struct alignas(4 * kCount) Positions {
      float at[kCount];
    };
    Winner largest[kCount];
    float best[kCount];
#pragma unroll
    for (int u = 0; u < kCount; u++) best[u] = low;
#pragma unroll
    for (int from = 0; from < 16; from += 8) {
      float values[kCount][8];
#pragma unroll
      for (int i = 0; i < 8; i++) {
        const Positions v = *reinterpret_cast<const Positions*>(sums + (from + i) * pitch);
        const float4 own = storage.scaled[from + i];
#pragma unroll
        for (int u = 0; u < kCount; u++) {
          const float value = min_nan((kCentred ? v.at[u] : v.at[u] + own.y) * own.z, own.x);
          values[u][i] = max_nan(value, own.w), best[u] = max_nan(best[u], value);
        }
      }
#pragma unroll
      for (int u = 0; u < kCount; u++) {
        const Winner of_half(values[u]);
        if (from == 0) largest[u] = of_half;
        else largest[u].join(of_half, from);
      }
    }
#pragma unroll
    for (int u = 0; u < kCount; u++) {
      if (u >= real) continue;
      if constexpr (kSaving) {
        const int channel = largest[u].channel;
        const float sum = sums[channel * pitch + u];
        save(at + u, largest[u], kCentred ? sum : sum + storage.scaled[channel].y);
      } else {
        y[at + u] = T(best[u]);
      }
    }
  }
  // The best of 16 channels, and its v - mean in units of its sums, unless one before them is as good.
  __device__ __forceinline__ void save(int64_t at, const Winner& winner, float centred) const {
    const T value = T(winner.value);
    if (first_channel > 0 && !replaces_maximum(float(value), float(y[at]))) return;
    y[at] = value, winners.index[at] = Index(first_channel + winner.channel);
    winners.centred[at] = centred * storage.units[winner.channel];
  }
  // What is held, a thread per two positions.
  __device__ __forceinline__ void take_held(const Held& held, const Tile& tile, int plane_turns) const {
#pragma unroll 1
    for (int i = 2 * thread_index_anew(); i < held.turns * kTurn; i += 2 * kBlock) {
      const int turn = held.first + i / kTurn, plane = turn / plane_turns;
      const int q = turn % plane_turns * kTurn + i % kTurn;
      const int64_t at = int64_t(tile.first_plane + plane) * plane_size + q;
      reduce<2, false>(held.values + i, held.pitch, at, tile.positions - q);
    }
  }
  __device__ __forceinline__ void initial(Accumulators& v) const {
#pragma unroll
    for (int j = 0; j < kFragments; j++) v[j][0] = v[j][1] = start[0], v[j][2] = v[j][3] = start[1];
  }
  __device__ __forceinline__ float value(int r, float v) const { return min_nan(v * factor[r], high[r]); }
  __device__ __forceinline__ void accept(Accumulators& v, const WarpTile& tile, const NoOffset&) {
    const int64_t at = int64_t(tile.plane) * plane_size + tile.q;
    if constexpr (kSaving) {  // by way of memory: a thread then has a position's 16 channels
      const int lane = thread_index_anew() % 32;
      float* const own = staged + thread_index_anew() / 32 * kStaged;
      __syncwarp();  // the turn before has been read
      put(own, kStagedPitch, v);
      __syncwarp();  // this one is there
      reduce<1, true>(own + lane, kStagedPitch, at + lane, tile.positions - tile.q - lane);
    } else {
      const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4, own = own_position(g);
      float best[8];  // of both channels, at positions 2t, 2t + 1 of each 8
#pragma unroll
      for (int i = 0; i < 8; i++) best[i] = max_nan(value(0, v[i / 2][i % 2]), value(1, v[i / 2][i % 2 + 2]));
      const float all = max_nan(combined_maximum(best), low);
      const int position = own / 2 * 8 + 2 * t + own % 2;
      T& to = y[at + position];
      if (tile.q + position < tile.positions) to = T(first_channel == 0 ? all : max_nan(all, float(to)));
    }
  }
};

// ---------------------------------------------------------------------------------------------------- kernel

enum Phases { kStatistics = 1, kApply = 2 };

// The statistics of a channel of sample n, from those of all its tiles.
template <class S>
__device__ TileStatistics channel_statistics(const TileStatistics* statistics, const Convolution<S>& c,
                                             int64_t n, int channel, float conv_bias) {
  const auto merged = merged_moments<float>(statistics, c, n, channel);
  TileStatistics all = {merged.mean, sqrtf(merged.variance())};
  if (!isfinite(all.deviation)) {  // squares overflow
    const auto in_double = merged_moments<double>(statistics, c, n, channel);
    all = {float(in_double.mean), float(sqrt(in_double.variance()))};
  }
  all.mean = mean_with(conv_bias, all.mean);
  return all;
}

// Grid: N · slots. The channels come 16 at a time; y holds the maximum so far, which the same thread reads
// again. kSaving: for backward also index and centred, like y, and moments (2, N, kOut), mean and deviation.
template <class S, class T, class Index, bool kSaving, class Tail>
__global__ void __launch_bounds__(kBlock, 1)
    fused_kernel(T* y, Index* index, float* centred, float* moments, TileStatistics* statistics,
                 float* scratch, int64_t N, const float* conv_bias, const Tail tail, float eps, int phases,
                 int scratch_turns, int shared_turns, const Convolution<S> c) {
  extern __shared__ uint4 shared[];
  __shared__ InstanceStorage<S> storage;
  const Tile tile(c, blockIdx.x);
  Mainloop<S> mainloop(c, tile, storage.mainloop, reinterpret_cast<uint32_t*>(shared), 0);
  // At the edges few for what has room.
  const int plane_turns = mainloop.turns(), turns = tile.planes * plane_turns;
  const int in_shared_turns = min(shared_turns, turns);
  const int in_scratch_turns = min(scratch_turns, turns - in_shared_turns);
  const int unheld = turns - in_scratch_turns - in_shared_turns;
  float* const own_scratch = scratch + int64_t(blockIdx.x) * 16 * Held::pitch_of(scratch_turns);
  float* const staged = reinterpret_cast<float*>(shared + (c.shared + 15) / 16);
  float* const rest_of_shared = staged + (kSaving ? kBlockWarps * kStaged : 0);
  const Held in_scratch(own_scratch, unheld, in_scratch_turns, scratch_turns);
  const Held in_shared(rest_of_shared, unheld + in_scratch_turns, in_shared_turns, shared_turns);
#pragma unroll 1
  for (int first_channel = 0; first_channel < S::kOut; first_channel += 16) {
    if (first_channel > 0) {
      mainloop.operands.fetch_weights(first_channel);
      __syncthreads();  // they are there, and weight_scale has been read
    }
    if (phases & kStatistics) {
      const Place<S> place{c, tile, storage.mainloop, first_channel};
      const Statistics<true> taken{statistics};
      const Hold hold{in_scratch, in_shared, tile.first_plane, plane_turns};
      Rooms<S, Statistics<true>, Hold> rooms;
      Warps<S, Statistics<true>, Hold> warps(rooms, place, taken, hold);
      mainloop.run(warps, turns);
      warps.finish(place);
    }
    // All statistics are there.
    if (phases == (kStatistics | kApply) && c.slots() > 1) cooperative_groups::this_grid().sync();
    if (phases & kApply) {
      const int own = threadIdx.x / 8, channel = first_channel + own;
      // The thread that wrote the tile's own statistics of this channel.
      if (threadIdx.x % 8 == 0 && own < 16) {
        const TileStatistics all = channel_statistics(statistics, c, tile.n, channel, conv_bias[channel]);
        storage.lines[own] =
            tail.line(scaled_channel(&all.mean, &all.deviation, tail.multiplier + channel, eps, 0, 0, 1));
        if (kSaving && tile.slot == 0)
          moments[tile.n * S::kOut + channel] = all.mean,
                                     moments[(N + tile.n) * S::kOut + channel] = all.deviation;
      }
      MaximumWarp<S, T, Index, kSaving> maximum(storage, staged);
      maximum.plane_size = c.OH * c.OW, maximum.first_channel = first_channel;
      const int64_t first = tile.n * c.OD * int64_t(maximum.plane_size) + tile.first_row * c.OW;
      maximum.y = y + first, maximum.winners = {index + first, centred + first};
      mainloop.run(maximum, unheld);
#pragma unroll 1
      for (int i = 0; i < 2; i++) {
        Held held = in_scratch;
        if (i) held = in_shared;
        maximum.take_held(held, tile, plane_turns);
      }
    }
  }
}

// Bytes of static shared memory.
template <class S> constexpr int kInstanceNormShared = sizeof(InstanceStorage<S>);

// y (N, D', H', W'). kept for backward, as Kept, or without elements where no gradient is wanted. cache:
// bytes of the L2 cache for sums that are then not computed again.
template <class S, class Index, class T, class Tail>
void instance_norm_maximum(Out<T> y, Out<float> kept, In<typename S::value_t> x,
                           In<typename S::value_t> weight, const float* conv_bias, const Tail& tail,
                           float eps, int64_t cache, cudaStream_t stream) {
  const int own = kInstanceNormShared<S> + (kept ? kStagedBytes : 0);
  const auto c = convolution<S>(x, weight, own, false, x.size(0));
  const int64_t N = c.N;
  expect(y, N * c.size());
  if (kept) expect(kept, Kept<S, Index>::count(N, c.size()));
  if (N == 0) return;
  const Scratch<TileStatistics> statistics(N * c.slots() * S::kOut, stream);  // (N, slots, kOut)
  const Kept<S, Index> parts(kept, N, c.size());                              // written to where there is one
  const int64_t blocks = N * c.slots();
  const bool meet = c.slots() > 1 && run_together(blocks), one_launch = meet || c.slots() == 1;
  const bool holds = one_launch && S::kOut == 16;
  const int64_t held = holds ? min(cache / int64_t(sizeof(float)), 16 * N * c.channel) : 0;
  const Scratch<float> sums(held, stream);
  constexpr auto saving = fused_kernel<S, T, Index, true, Tail>,
                 plain = fused_kernel<S, T, Index, false, Tail>;
  const auto kernel = kept ? saving : plain;
  const int all = kept ? allow_shared<saving>() : allow_shared<plain>();
  const int64_t laid_out = (int64_t(c.shared) + 15) / 16 * 16 + (kept ? kStagedBytes : 0);
  int shared_turns = 0, scratch_turns = 0;
  if (holds) {
    const int most = c.depth * c.turns();
    shared_turns = min(held_turns((all - laid_out) / int(sizeof(float))), most);
    scratch_turns = min(held_turns(held / blocks), most - shared_turns);
    const int last_round = (most - shared_turns - scratch_turns) % kBlockWarps;  // of turns that are not held
    if (last_round) scratch_turns -= min(scratch_turns, kBlockWarps - last_round);
  }
  cudaLaunchAttribute cooperative{};
  cooperative.id = cudaLaunchAttributeCooperative;
  cooperative.val.cooperative = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = unsigned(blocks), config.blockDim = kBlock, config.stream = stream;
  config.dynamicSmemBytes = shared_turns ? all : laid_out;
  config.attrs = &cooperative, config.numAttrs = meet;
  const auto launch = [&](int phases) {
    cudaLaunchKernelEx(&config, kernel, y.data, parts.index, parts.centred, parts.moments, statistics.data,
                       sums.data, N, conv_bias, tail, eps, phases, scratch_turns, shared_turns, c);
  };
  if (one_launch) launch(kStatistics | kApply);
  else launch(kStatistics), launch(kApply);
}

}  // namespace norms::narrow3d
