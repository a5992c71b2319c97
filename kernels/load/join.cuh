// Arrays channels last side by side: their channels, position by position, in one array (positions, C), or
// from there back. On the way there what is convolved next is rounded to TF32 and gets the bias that its own
// convolution left out; on the way back that bias's gradient is summed, in double and in a fixed order.
//
// A block moves some rows of one part: a thread has the same channels in each, as many as fit into 16 bytes
// where the part's place allows.
#pragma once
#include <algorithm>

#include "host/tensor.h"
#include "load/planes.cuh"

namespace load {

constexpr int kRowsAtOnce = 4;         // of a thread: all are read before the first is written
constexpr int64_t kJoinBlocks = 4096;  // so many, where there are rows for them

// own (positions, C): the part, or null where nobody wants its gradient. bias, bias_gradient (C), or null.
// The rest is found by `joined_of` and `split`: it stands from channel `first` on; partial (C, chunks) are of
// each chunk's rows the sums.
struct JoinPart {
  value_t* own;
  const value_t* bias;
  value_t* bias_gradient;
  int64_t C;
  bool rounds;
  unsigned width = 1, lanes = 1, tiles = 0;  // channels a thread; threads a row of a tile; tiles a row
  int64_t first = 0;
  double* partial = nullptr;
};
// joined (positions, C), in chunks of so many rows.
template <int kParts> struct Joined {
  value_t* joined;
  int64_t positions, C, rows, chunks;
  unsigned tiles;
  JoinPart of[kParts];
};

// A thread's share of a part's rows: f(k, where they stand in the part, where in `joined`) of some rows at a
// time, and then g(k, likewise).
template <int K, int kParts> struct JoinRows {
  const Joined<kParts>& all;
  const JoinPart& part;
  const int64_t channel, begin, end;
  const unsigned step;
  const bool active;

  __device__ JoinRows(const Joined<kParts>& all, const JoinPart& part, unsigned tile, int64_t chunk)
      : all(all), part(part), channel(int64_t(tile * part.lanes + threadIdx.x % part.lanes) * K),
        begin(chunk * all.rows + threadIdx.x / part.lanes), end(min((chunk + 1) * all.rows, all.positions)),
        step(kPlaneThreads / part.lanes), active(threadIdx.x / part.lanes < step && channel < part.C) {}
  template <class F, class G, class H>
  __device__ __forceinline__ void each(const F& f, const G& g, const H& after) const {
    if (!active) return;
    const auto some = [&](int64_t row, const auto& f) {
#pragma unroll
      for (int k = 0; k < kRowsAtOnce; k++) {
        const int64_t at = row + k * step;
        if (at < end) f(k, at * part.C + channel, at * all.C + part.first + channel);
      }
    };
#pragma unroll 1
    for (int64_t row = begin; row < end; row += kRowsAtOnce * step) some(row, f), some(row, g), after();
  }
};

template <int kParts>
__global__ void __launch_bounds__(kPlaneThreads, 3) join_kernel(const __grid_constant__ Joined<kParts> all) {
  await_previous_kernel();
  unsigned tile = blockIdx.x % all.tiles, which = 0;
  while (tile >= all.of[which].tiles) tile -= all.of[which++].tiles;
  const JoinPart& part = all.of[which];
  with_width<kPack>(part.width, [&](auto width) {
    constexpr int K = decltype(width)::value;
    const JoinRows<K, kParts> rows(all, part, tile, blockIdx.x / all.tiles);
    Memory<value_t, K> values[kRowsAtOnce];
    Memory<value_t, K> bias{};
    if (part.bias && rows.active)
#pragma unroll
      for (int i = 0; i < K; i++) bias.at[i] = part.bias[rows.channel + i];
    rows.each([&](int k, int64_t own,
                  int64_t) { values[k] = *reinterpret_cast<const Memory<value_t, K>*>(part.own + own); },
              [&](int k, int64_t, int64_t joined) {
#pragma unroll
                for (int i = 0; i < K; i++) {
                  if (part.bias)
                    values[k].at[i] = value_t(real(values[k].at[i]) + real(bias.at[i]));  // else -0 stays
                  if (part.rounds) values[k].at[i] = nearest_tf32(values[k].at[i]);
                }
                put(all.joined + joined, values[k]);
              },
              [] {});
  });
}

template <int kParts>
__global__ void __launch_bounds__(kPlaneThreads, 3) split_kernel(const __grid_constant__ Joined<kParts> all) {
  await_previous_kernel();
  __shared__ double shared[kPack][kPlaneThreads];  // a thread's sums
  unsigned tile = blockIdx.x % all.tiles, which = 0;
  while (tile >= all.of[which].tiles) tile -= all.of[which++].tiles;
  const JoinPart& part = all.of[which];
  const int64_t chunk = blockIdx.x / all.tiles;
  with_width<kPack>(part.width, [&](auto width) {
    constexpr int K = decltype(width)::value;
    const JoinRows<K, kParts> rows(all, part, tile, chunk);
    Memory<value_t, K> values[kRowsAtOnce];
    double sums[K] = {};
    real few[K] = {};  // of rows at once: what cancels leaves no rounding errors of large sums
    rows.each(
        [&](int k, int64_t, int64_t joined) {
          values[k] = *reinterpret_cast<const Memory<value_t, K>*>(all.joined + joined);
        },
        [&](int k, int64_t own, int64_t) {
#pragma unroll
          for (int i = 0; i < K; i++) {
            few[i] += real(values[k].at[i]);
            if (part.rounds) values[k].at[i] = nearest_tf32(values[k].at[i]);
          }
          if (part.own) put(part.own + own, values[k]);
        },
        [&] {
          if (part.partial)
#pragma unroll
            for (int i = 0; i < K; i++) sums[i] += few[i];
#pragma unroll
          for (int i = 0; i < K; i++) few[i] = 0;
        });
    if (!part.partial) return;  // the whole block
#pragma unroll
    for (int i = 0; i < K; i++) shared[i][threadIdx.x] = sums[i];
    for (unsigned count = rows.step, half; count > 1; count = half) {
      half = (count + 1) / 2;
      __syncthreads();  // twice as many threads' sums are there
      if (threadIdx.x / part.lanes + half < count)
#pragma unroll
        for (int i = 0; i < K; i++) shared[i][threadIdx.x] += shared[i][threadIdx.x + half * part.lanes];
    }
    if (threadIdx.x < part.lanes && rows.active)
#pragma unroll
      for (int i = 0; i < K; i++)
        part.partial[(rows.channel + i) * all.chunks + chunk] = shared[i][threadIdx.x];
  });
}

// out (C): of partial (C, chunks) the sums. A block has a channel.
__global__ void __launch_bounds__(kPlaneThreads)
    join_bias_kernel(value_t* out, const double* partial, int64_t chunks) {
  await_previous_kernel();
  double sum = 0;
  for (int64_t i = threadIdx.x; i < chunks; i += kPlaneThreads) sum += partial[blockIdx.x * chunks + i];
  sum = sum_of(sum, kPlaneThreads);
  if (threadIdx.x == 0) out[blockIdx.x] = value_t(sum);
}

// How many channels a thread may move at a time.
inline unsigned width_of(const JoinPart& part, const value_t* joined, int64_t C) {
  const auto fits = [&](unsigned width) {
    const auto bytes = uintptr_t(part.own) | uintptr_t(joined);
    return (C | part.C | part.first) % width == 0 && bytes % (width * sizeof(value_t)) == 0;
  };
  unsigned width = kPack;
  while (!fits(width)) width /= 2;
  return width;
}

template <int kParts>
Joined<kParts> joined_of(const value_t* joined, int64_t positions, const JoinPart (&parts)[kParts]) {
  Joined<kParts> all{const_cast<value_t*>(joined), positions, 0, 0, 0, 0, {}};
  for (const JoinPart& part : parts) all.C += part.C;
  int64_t first = 0, least = kPlaneThreads;  // rows that a block's threads have at a time
  for (int i = 0; i < kParts; i++) {
    JoinPart& part = all.of[i] = parts[i];
    part.first = first, first += part.C;
    part.width = width_of(part, joined, all.C);
    const int64_t packs = part.C / part.width, tiles = (packs + kPlaneThreads - 1) / kPlaneThreads;
    part.lanes = unsigned((packs + tiles - 1) / tiles);
    part.tiles = part.own || part.bias_gradient ? unsigned(tiles) : 0;
    if (part.tiles) least = std::min<int64_t>(least, kPlaneThreads / part.lanes);
    all.tiles += part.tiles;
  }
  if (!all.tiles) return all;
  const int64_t chunks = (kJoinBlocks + all.tiles - 1) / all.tiles;
  all.rows = std::max((positions + chunks - 1) / chunks, kRowsAtOnce * least);
  all.chunks = (positions + all.rows - 1) / all.rows;
  return all;
}

template <int kParts>
void join(value_t* out, int64_t positions, const JoinPart (&parts)[kParts], cudaStream_t stream) {
  const Joined<kParts> all = joined_of(out, positions, parts);
  if (all.chunks) launch_early(join_kernel<kParts>, all.chunks * all.tiles, kPlaneThreads, stream, all);
}

// from (positions, C) -> the parts' own.
template <int kParts>
void split(const value_t* from, int64_t positions, const JoinPart (&parts)[kParts], cudaStream_t stream) {
  Joined<kParts> all = joined_of(from, positions, parts);
  if (!all.chunks) return;
  int64_t summed = 0;
  for (const JoinPart& part : all.of) summed += part.bias_gradient ? part.C : 0;
  const Scratch<double> scratch(summed * all.chunks, stream);
  double* room = scratch;
  for (JoinPart& part : all.of)
    if (part.bias_gradient) part.partial = room, room += part.C * all.chunks;
  launch_early(split_kernel<kParts>, all.chunks * all.tiles, kPlaneThreads, stream, all);
  for (const JoinPart& part : all.of)
    if (part.partial)
      launch_early(join_bias_kernel, part.C, kPlaneThreads, stream, part.bias_gradient, part.partial,
                   all.chunks);
}

}  // namespace load
