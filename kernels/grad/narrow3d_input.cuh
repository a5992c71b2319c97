// dx of a small 3-D convolution, from dv as grad/narrow3d_weight.cuh leaves it in scratch:
//   dx[i, p] = sum over channels c and taps of weight[c, i, tap]·dv[c, p - tap]
//
// A block computes a tile of dx, some rows and columns of some planes, and walks down dv's planes: one is in
// shared memory, the next on its way. A product's depth is 16 channels out, its columns are 8 neighbouring
// positions of dx, its rows the input channels of the kDepth planes of dx that a plane of dv reaches. So sums
// stay in registers, a warp's for a strip of kStrip rows, from a plane's first tap to its last. Planes take
// turns at the rows: when a plane's sums are complete, its rows are the next one's, and it is the weights
// whose rows move.
//
// Accuracy: dv and the weights are two float16 each, scaled by powers of two, dv by channel of the sample,
// which the weights make up for, and those by input channel. Sums are flushed after kRowTaps products.
#pragma once
#include "grad/narrow3d_input_operands.cuh"

namespace grad::narrow3d {

// A warp's sums, of kStrip rows and 8 columns.
template <class S> struct InputStrip {
  const InputBlock<S>& block;
  const bool idle;
  const int strip_row, column;  // of the tile
  float total[kInputTiles<S>][kStrip<S>][4] = {};

  __device__ explicit InputStrip(const InputBlock<S>& block)
      : block(block), idle(int(threadIdx.x / 32) >= block.tiling.rows / kStrip<S> * block.tiling.strips),
        strip_row(int(threadIdx.x / 32) / block.tiling.strips * kStrip<S>),
        column(int(threadIdx.x / 32) % block.tiling.strips * 8) {}

  // A pair of rows belongs to plane pair / kPlanePairs of dx, modulo kDepth. The weights' pair that meets it,
  // where a plane of dv is multiplied that is `turn`, modulo kDepth.
  __device__ __forceinline__ static int weight_pair(int pair, int turn) {
    const int own = pair - turn * kPlanePairs<S>;
    return pair >= kPairs<S> ? pair : own < 0 ? own + kPairs<S> : own;
  }

  // Adds the products of a plane of dv, 16 channels in `stage`, and of taps: of the column `tap`, and of a
  // group of rows.
  template <int kTile> __device__ __forceinline__ void add(const char* stage, int turn, int tap, int group) {
    const int lane = threadIdx.x % 32;
    const int first_tap = min(group * kRowTaps<S>, S::kHeight - kRowTaps<S>);
    const auto counted = [&](int u) {  // the last groups may overlap
      return S::kHeight % kRowTaps<S> == 0 || first_tap + u >= group * kRowTaps<S>;
    };
    const uint4* const weights = block.weights() + (tap * S::kHeight + first_tap) * kInputTiles<S> * 64 +
                                 weight_pair(kTile * 8 + lane / 4, turn) * 4 + lane % 4;
    uint32_t highs[kRowTaps<S>][4], lows[kRowTaps<S>][4];
#pragma unroll
    for (int u = 0; u < kRowTaps<S>; u++) {
      const uint4 both[2] = {weights[u * kInputTiles<S> * 64],
                             weights[u * kInputTiles<S> * 64 + kInputTiles<S> * 32]};
      highs[u][0] = both[0].x, highs[u][1] = both[0].y, highs[u][2] = both[0].z, highs[u][3] = both[0].w;
      lows[u][0] = both[1].x, lows[u][1] = both[1].y, lows[u][2] = both[1].z, lows[u][3] = both[1].w;
    }
    const int of_row = block.tiling.pitch * 64, first = strip_row + S::kHeight - kRowTaps<S> - first_tap;
    const int position = column + lane % 8 + S::kWidth - 1 - tap;
    const uint32_t place = InputBlock<S>::place(position) ^ lane / 8 * 16;
    const uint32_t at = shared_address(stage) + first * of_row + place;
    constexpr int kRows = kRowTaps<S> + 1;  // of dv in registers: those that reach a row of dx, and the next
    uint32_t b[kRows][4];                   // two words of highs, two of lows
#pragma unroll
    for (int row = 0; row < kRowTaps<S>; row++) load_matrices(b[row], at + row * of_row);
#pragma unroll
    for (int k = 0; k < kStrip<S>; k++) {
      if (k + 1 < kStrip<S>) load_matrices(b[(k + kRowTaps<S>) % kRows], at + (k + kRowTaps<S>)*of_row);
      // Two sums, since a product waits for the one before it: of low by high, and of high by high, which
      // begins with most of high by low.
      float low[4] = {}, high[4] = {};
      const auto of_tap = [&](int u) -> const uint32_t (&)[4] {
        return b[(k + kRowTaps<S> - 1 - u) % kRows];
      };
#pragma unroll
      for (int u = 0; u < kRowTaps<S>; u++) {
        if (!counted(u)) continue;
        multiply_add<half_t>(low, lows[u], of_tap(u)[0], of_tap(u)[1]);
        if (u > 0) multiply_add<half_t>(high, highs[u], of_tap(u)[2], of_tap(u)[3]);
      }
      if (counted(0)) multiply_add<half_t>(low, highs[0], of_tap(0)[2], of_tap(0)[3]);
#pragma unroll
      for (int u = 0; u < kRowTaps<S>; u++)
        if (counted(u)) multiply_add<half_t>(high, highs[u], of_tap(u)[0], of_tap(u)[1]);
#pragma unroll
      for (int i = 0; i < 4; i++) total[kTile][k][i] += low[i] + high[i];
    }
  }

  // Adds a plane of dv, while the next comes. Half of the warps of each scheduler split theirs before their
  // products, half after them, so that the tensor cores are busy meanwhile.
  template <int kTile = 0>
  __device__ __forceinline__ void add(const char* stage, int turn, InputStage<S>& next) {
#pragma unroll 1
    for (int pass = 0; pass < kPasses<S>; pass++) {
      const bool early = threadIdx.x / 128 % 2 == 0;
      if (early) next.exchange();
      if (!idle) add<kTile>(stage, turn, pass / kRowGroups<S>, pass % kRowGroups<S>);
      if (!early) next.exchange();
    }
    if constexpr (kTile + 1 < kInputTiles<S>) add<kTile + 1>(stage, turn, next);
  }

  // The sums of a plane to the sample's dx, if it is one of the tile's; they are zero from then on.
  __device__ __forceinline__ void put(typename S::value_t* dx, int plane, float unit) {
    const Convolution<S>& c = block.c;
    const int first_row = block.tile.first_row + strip_row;
    const int g = threadIdx.x % 32 / 4, first_column = block.tile.first_column + column + threadIdx.x % 4 * 2;
    const int rows = plane < block.tile.first_plane || idle ? 0 : block.tile.end_row - first_row;
    const int columns = block.tile.end_column - first_column;
#pragma unroll
    for (int tile = 0; tile < kInputTiles<S>; tile++) {
      const int pair = tile * 8 + g;
      if (pair / kPlanePairs<S> != plane % S::kDepth) continue;
#pragma unroll
      for (int half = 0; half < 2; half++) {
        const int i = pair % kPlanePairs<S> * 2 + half;
        if (i >= S::kIn) continue;
        const float channel_unit = block.storage.weight_unit[i];
        typename S::value_t* const to =
            dx + i * c.channel + (int64_t(plane) * c.H + first_row) * c.W + first_column;
        const bool vectors = c.W % 2 == 0 && columns >= 2;
#pragma unroll
        for (int k = 0; k < kStrip<S>; k++) {
          float* const own = total[tile][k] + half * 2;
          const float values[2] = {own[0] * unit * channel_unit, own[1] * unit * channel_unit};
          own[0] = own[1] = 0;
          if (vectors && k < rows) {
            void* const two = to + k * c.W;
            if constexpr (S::kSplit) *static_cast<float2*>(two) = make_float2(values[0], values[1]);
            else *static_cast<uint32_t*>(two) = pack<typename S::value_t>(values[0], values[1]);
          }
          if (!vectors && k < rows && columns >= 1) to[k * c.W] = typename S::value_t(values[0]);
          if (!vectors && k < rows && columns >= 2) to[k * c.W + 1] = typename S::value_t(values[1]);
        }
      }
    }
  }
};

// A tile of a sample that is not active; `dx` is the sample's.
template <class S>
__device__ void put_zeros(typename S::value_t* dx, const Convolution<S>& c, const InputTile& tile) {
  const int rows = tile.end_row - tile.first_row, planes = tile.end_plane - tile.first_plane;
  const bool whole = tile.first_column == 0 && tile.end_column == c.W;  // rows are neighbours
  const int size = whole ? rows * c.W : tile.end_column - tile.first_column;
#pragma unroll 1
  for (int k = threadIdx.x / 32; k < S::kIn * planes; k += kInputWarps) {
    typename S::value_t* to = dx + k / planes * c.channel + tile.first_column +
                              (int64_t(k % planes + tile.first_plane) * c.H + tile.first_row) * c.W;
#pragma unroll 1
    for (int row = 0; row < (whole ? 1 : rows); row++, to += c.W)
#pragma unroll 8
      for (int i = threadIdx.x % 32; i < size; i += 32) to[i] = typename S::value_t(0.f);
  }
}

// A tile of dx per block, of samples from `first_sample` on, whose dv is dv's first. A sample that is not
// active has a dx of zero.
template <class S, class Problem>
__global__ void __launch_bounds__(kInputBlock, 1)
    input_gradient_kernel(typename S::value_t* dx, const float4* dv, const float* most, Problem problem,
                          int64_t first_sample, const InputTiling<S> tiling, const Convolution<S> c) {
  extern __shared__ uint4 shared[];
  __shared__ InputStorage<S> storage;
  if (threadIdx.x == 0) storage.tile = InputTile(c, tiling, blockIdx.x);
  __syncthreads();
  const InputTile& tile = storage.tile;
  const InputBlock<S> block{c, tiling, tile, storage, reinterpret_cast<char*>(shared)};
  const int64_t n = first_sample + tile.sample;
  dx += n * S::kIn * c.channel, dv += tile.sample * c.slots() * kJobsPerTile<S> * DvLayout(c).of_job(c);
  if (!problem.active(n)) return put_zeros(dx, c, tile);
  InputStage<S> next(block, block.find_fragments());
  block.clear_margins();
  __syncthreads();
  constexpr int kGroups = S::kOut / 16;  // of channels out, a step each
  const int steps = (tile.dv_end_plane - tile.dv_plane) * kGroups;
  const auto set_off = [&](int step) {
    if (step < steps) next.begin(dv, tile.dv_plane + step / kGroups, step % kGroups * 16, block.stage(step));
    else next.end();
    next.load();
  };
  set_off(0);
  const float unit = 1 / block.find_scales(most, n);
  __syncthreads();
  while (next.more()) next.exchange();
  set_off(1);
  if (kGroups == 1) block.put_weights(0);
  InputStrip<S> strip(block);
#pragma unroll 1
  for (int step = 0; step < steps; step++) {
    const int plane = tile.dv_plane + step / kGroups, group = step % kGroups;
    if (kGroups > 1) block.put_weights(group * 16);
    __syncthreads();  // the stage is full, and the other one has been read
    strip.add(block.stage(step), plane % S::kDepth, next);
    while (next.more()) next.exchange();
    if (kGroups > 1) __syncthreads();  // the weights have been read
    set_off(step + 2);
    if (group == kGroups - 1) strip.put(dx, plane, unit);
  }
#pragma unroll 1
  for (int plane = tile.dv_end_plane; plane < tile.end_plane; plane++) strip.put(dx, plane, unit);
}

}  // namespace grad::narrow3d
