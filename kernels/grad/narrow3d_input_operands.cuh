// The operands of dx of a small 3-D convolution (grad/narrow3d_input.cuh) in shared memory: dv from scratch
// and the weights, scaled by powers of two and split into two float16 each.
//
//   InputTiling, InputTile   how blocks share out dx
//   InputBlock               the layout of shared memory, scales, the weights as fragments
//   InputStage               a plane of dv on its way to shared memory
#pragma once
#include "grad/narrow3d.cuh"

namespace grad::narrow3d {

constexpr int kInputBlock = 512, kInputWarps = kInputBlock / 32;
// Rows g and g + 8 of a product are a pair of channels in; of a plane, and of all.
template <class S> constexpr int kPlanePairs = (S::kIn + 1) / 2;
template <class S> constexpr int kPairs = S::kDepth * kPlanePairs<S>;
template <class S> constexpr int kInputTiles = (kPairs<S> + 7) / 8;                     // 16 rows each
template <class S> constexpr int kStrip = kInputTiles<S> < 8 ? 8 / kInputTiles<S> : 1;  // rows of dx
// Taps along a column, whose weights are in registers at a time.
template <class S> constexpr int kRowGroups = (S::kHeight + 2) / 3;
template <class S> constexpr int kRowTaps = (S::kHeight + kRowGroups<S> - 1) / kRowGroups<S>;
template <class S>
constexpr int kPasses = S::kWidth * kRowGroups<S>;  // through a strip; a pass has a column of the taps
constexpr int kLoads = 3;                           // fragments of dv on their way to a warp during a pass

// Eight positions of dv in scratch, and where in a stage they go, in bytes; negative: nowhere.
struct alignas(8) InputFragment {
  int places[8];
  int from;  // float4
};

// How blocks share out dx: `rows`, `columns` and `planes` each, in strips of 8 columns, a warp's. Of a plane
// of dv, `stage_rows` rows of `pitch` positions are in shared memory, all that reach the block's; zeros where
// dv has none.
template <class S> struct InputTiling {
  int rows, columns, planes, row_blocks, column_blocks, chunks, strips, pitch, stage_rows, fragments;
  // Whole rows where there is `room`, bytes of dynamic shared memory, and as many as they can be, a strip per
  // warp. Python has seen to it that there is room for one strip.
  InputTiling(const Convolution<S>& c, int64_t samples, int multiprocessors, int64_t room) {
    bool fits = false;
    for (int blocks = 1; blocks <= c.W && !fits; blocks++) {
      strips = ((c.W + blocks - 1) / blocks + 7) / 8;
      for (int high = min(kInputWarps / strips, (c.H + kStrip<S> - 1) / kStrip<S>); high > 0 && !fits;
           high--) {
        rows = high * kStrip<S>, columns = strips * 8, stage_rows = rows + S::kHeight - 1;
        pitch = (columns + S::kWidth - 1 + 7) / 8 * 8;
        fragments = stage_rows * min(pitch, c.OW) / 8 + 2 * stage_rows;  // each row begins and ends in one
        fits = shared() <= room;
      }
    }
    row_blocks = (c.H + rows - 1) / rows, column_blocks = (c.W + columns - 1) / columns;
    int64_t least = INT64_MAX;
    for (int count = 1; count <= c.D; count *= 2) {  // of chunks: with the fewest planes in turn
      const int own = (c.D + count - 1) / count, all = (c.D + own - 1) / own;
      const int64_t blocks = samples * row_blocks * column_blocks * all;
      const int64_t work = (blocks + multiprocessors - 1) / multiprocessors * (own + S::kDepth);
      if (work < least) least = work, planes = own, chunks = all;
    }
  }
  HOST_DEVICE unsigned tiles() const { return unsigned(row_blocks) * column_blocks * chunks; }  // of a sample
  // Of shared memory, in bytes: two stages of dv, [row][position][16 channels]; the weights; by channel of dv
  // its scale and share; fragments.
  HOST_DEVICE int stage() const { return stage_rows * pitch * 64; }
  HOST_DEVICE int scales_at() const { return 2 * stage() + S::kHeight * S::kWidth * kInputTiles<S> * 1024; }
  int shared() const { return scales_at() + S::kOut * 8 + fragments * int(sizeof(InputFragment)); }
};

// Where a tile of dx lies, and dv that reaches it.
struct InputTile {
  int64_t sample;  // of the launch's
  int first_plane, end_plane, first_row, end_row, first_column, end_column;
  int dv_plane, dv_end_plane, dv_row, dv_column;  // row and column may lie in front of dv's first
  InputTile() = default;
  template <class S>
  __device__ InputTile(const Convolution<S>& c, const InputTiling<S>& tiling, unsigned tile) {
    first_column = int(tile % tiling.column_blocks) * tiling.columns, tile /= tiling.column_blocks;
    first_row = int(tile % tiling.row_blocks) * tiling.rows, tile /= tiling.row_blocks;
    first_plane = int(tile % tiling.chunks) * tiling.planes, sample = tile / tiling.chunks;
    end_plane = min(first_plane + tiling.planes, c.D), end_row = min(first_row + tiling.rows, c.H);
    end_column = min(first_column + tiling.columns, c.W);
    dv_plane = max(first_plane - S::kDepth + 1, 0), dv_end_plane = min(end_plane, c.OD);
    dv_row = first_row - S::kHeight + 1, dv_column = first_column - S::kWidth + 1;
  }
};

template <class S> struct InputStorage {
  InputTile tile;
  float largest[kInputWarps][S::kIn];
  float weight_scale[S::kIn], weight_unit[S::kIn];  // and 1 over it
};

// What a thread knows of its block.
template <class S> struct InputBlock {
  const Convolution<S>& c;
  const InputTiling<S>& tiling;
  const InputTile& tile;
  InputStorage<S>& storage;
  char* const shared;

  __device__ __forceinline__ char* stage(int step) const { return shared + step % 2 * tiling.stage(); }
  __device__ uint4* weights() const { return reinterpret_cast<uint4*>(shared + 2 * tiling.stage()); }
  __device__ float* dv_scale() const { return reinterpret_cast<float*>(shared + tiling.scales_at()); }
  __device__ float* dv_share() const { return dv_scale() + S::kOut; }  // the smallest over it; 0 where dv is
  __device__ InputFragment* fragments() const {
    return reinterpret_cast<InputFragment*>(dv_share() + S::kOut);
  }

  // Where a position's first 16 bytes lie in a stage, in bytes; the other three at place ^ 16, 32, 48. The
  // highs of four pairs of channels each (k and k + 8, side by side), then their lows. Eight neighbours' are
  // in different banks, and so are two of theirs for every second one.
  __device__ __forceinline__ static int place(unsigned position) {
    const unsigned line = position / 2;
    return line * 128 + ((position % 2 * 64) ^ (line % 4 * 16) ^ (line % 2 * 64));
  }

  // Tells where dv's fragments are; returns how many. A barrier follows.
  __device__ int find_fragments() const {
    const int64_t of_slab = DvLayout(c).of_job(c) * kJobsPerTile<S>;
    const int first_column = max(tile.dv_column, 0), end_column = min(tile.dv_column + tiling.pitch, c.OW);
    const int end_row = min(tile.end_row, c.OH);
    const bool whole = end_column - first_column == c.OW;
    int count = 0;
#pragma unroll 1
    for (int row = max(tile.dv_row, 0); row < end_row;) {  // runs of neighbouring positions
      const int slab = row / c.rows, before = slab * c.rows;
      const int next = whole ? min(end_row, before + c.rows) : row + 1;
      const int first = (row - before) * c.OW + first_column, end = (next - 1 - before) * c.OW + end_column;
      const int start = first / 8 * 8, own = (end + 7) / 8 - first / 8;
#pragma unroll 1
      for (int k = threadIdx.x; k < own * 8; k += kInputBlock) {
        const int q = start + k, q_row = q / c.OW, column = q - q_row * c.OW;
        InputFragment& fragment = fragments()[count + k / 8];
        const int position = (before + q_row - tile.dv_row) * tiling.pitch + column - tile.dv_column;
        fragment.places[k % 8] = q >= first && q < end ? place(position) : -1;
        if (k % 8 == 0) fragment.from = int(slab * of_slab) + q / 8 * 32;
      }
      count += own, row = next;
    }
    return count;
  }

  // Zeros where a stage has rows and columns that dv has not.
  __device__ void clear_margins() const {
#pragma unroll 1
    for (int k = threadIdx.x; k < tiling.stage_rows * tiling.pitch; k += kInputBlock) {
      const int row = k / tiling.pitch + tile.dv_row, column = k % tiling.pitch + tile.dv_column;
      if (row >= 0 && row < min(tile.end_row, c.OH) && column >= 0 && column < c.OW) continue;
#pragma unroll
      for (int i = 0; i < 8; i++)
        *reinterpret_cast<uint4*>(shared + i / 4 * tiling.stage() + (place(k) ^ i % 4 * 16)) = uint4{};
    }
  }

  // The largest of all threads' values, which are not negative. Starts and ends with a barrier.
  template <int kCount> __device__ __forceinline__ void block_most(float (&most)[kCount]) const {
    __syncthreads();
#pragma unroll
    for (int k = 0; k < kCount; k++) {
      most[k] = __uint_as_float(__reduce_max_sync(~0u, __float_as_uint(most[k])));
      if (threadIdx.x % 32 == 0) storage.largest[threadIdx.x / 32][k] = most[k];
    }
    __syncthreads();
#pragma unroll
    for (int k = 0; k < kCount; k++) {
      const float own = storage.largest[threadIdx.x % kInputWarps][k];
      most[k] = __uint_as_float(__reduce_max_sync(~0u, __float_as_uint(own)));
    }
  }

  // Of sample n, from `most` (jobs, 16), the largest |dv|. Returns dv's smallest; a barrier follows.
  __device__ float find_scales(const float* most, int64_t n) const {
    float all[1] = {0}, weights[S::kIn] = {};
    for (int channel = threadIdx.x; channel < S::kOut; channel += kInputBlock) {
      float own = 0;
#pragma unroll 8
      for (int slot = 0; slot < c.slots(); slot++)
        own = fmaxf(own, most[((n * c.slots() + slot) * kJobsPerTile<S> + channel / 16) * 16 + channel % 16]);
      dv_scale()[channel] = own > 0 ? power_of_two(fitting_exponent(own)) : 0;
      all[0] = fmaxf(all[0], own);
    }
    block_most(all);
    const float smallest = power_of_two(fitting_exponent(all[0]));
    for (int channel = threadIdx.x; channel < S::kOut; channel += kInputBlock)
      dv_share()[channel] = dv_scale()[channel] > 0 ? smallest * (1 / dv_scale()[channel]) : 0;
    __syncthreads();
    for (int k = threadIdx.x; k < S::kOut * S::kIn * S::kTaps; k += kInputBlock) {
      const float own = float(c.weight[k]) * dv_share()[k / (S::kIn * S::kTaps)];
#pragma unroll
      for (int i = 0; i < S::kIn; i++)
        if (k / S::kTaps % S::kIn == i) consider(weights[i], own);
    }
    block_most(weights);
    if (threadIdx.x < S::kIn)
#pragma unroll
      for (int i = 0; i < S::kIn; i++)
        if (threadIdx.x == i) {
          const float scale = power_of_two(fitting_exponent(weights[i]));
          storage.weight_scale[i] = scale, storage.weight_unit[i] = 1 / scale;
        }
    return smallest;
  }

  // The weights of 16 channels out as fragments A [column of the taps][row of them][highs, lows][pair][t].
  // Depth 2k, 2k + 1 of a product are channels k, k + 8.
  __device__ void put_weights(int first_channel) const {
#pragma unroll 1
    for (int k = threadIdx.x; k < S::kHeight * S::kWidth * kInputTiles<S> * 32; k += kInputBlock) {
      const int t = k % 4, pair = k / 4 % (kInputTiles<S> * 8), tap = k / 32 / kInputTiles<S>;
      const int from = (pair / kPlanePairs<S> * S::kHeight + tap % S::kHeight) * S::kWidth + tap / S::kHeight;
      const auto weight = [&](int half, int channel) {
        const int i = pair % kPlanePairs<S> * 2 + half;
        if (pair >= kPairs<S> || i >= S::kIn) return 0.f;
        const float own = float(c.weight[((first_channel + channel) * S::kIn + i) * S::kTaps + from]);
        return own * dv_share()[first_channel + channel] * storage.weight_scale[i];
      };
      Halves own[4];
#pragma unroll
      for (int i = 0; i < 4; i++)
        own[i] = split(weight(i % 2, t + i / 2 * 4), weight(i % 2, t + i / 2 * 4 + 8));
      uint4* const to = weights() + tap * kInputTiles<S> * 64 + k % (kInputTiles<S> * 32);
      to[0] = make_uint4(own[0].high, own[1].high, own[2].high, own[3].high);
      to[kInputTiles<S> * 32] = make_uint4(own[0].low, own[1].low, own[2].low, own[3].low);
    }
  }
};

// Fragments of a plane of dv and 16 channels on their way to a stage: those of one warp at a time.
template <class S> struct InputStage {
  const InputBlock<S>& block;
  const float4* from;
  char* stage;
  int first_channel, next, count;  // fragments
  float4 values[kLoads];

  __device__ InputStage(const InputBlock<S>& block, int count) : block(block), count(count) {}
  // dv: of the sample.
  __device__ __forceinline__ void begin(const float4* dv, int plane, int channel, char* to) {
    const Convolution<S>& c = block.c;
    const DvLayout layout(c);
    const int chunk = plane / c.depth;
    const int64_t job = int64_t(chunk) * c.slabs * kJobsPerTile<S> + channel / 16;
    from = dv + job * layout.of_job(c) + layout.turn(plane - chunk * c.depth, 0) + threadIdx.x % 32;
    stage = to, first_channel = channel, next = threadIdx.x / 32;
  }
  __device__ __forceinline__ void end() { next = count; }
  __device__ __forceinline__ bool more() const { return next < count; }
  __device__ __forceinline__ void load() {
#pragma unroll
    for (int k = 0; k < kLoads; k++)
      if (next + k * kInputWarps < count) values[k] = from[block.fragments()[next + k * kInputWarps].from];
  }
  // To the stage with those that have come, and off with the next ones.
  __device__ __forceinline__ void exchange() {
    if (!more()) return;
    put(), load();
  }

 private:
  __device__ __forceinline__ void put() {
    const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    const float* const scale = block.dv_scale() + first_channel + g;
    const float first_scale = scale[0], second_scale = scale[8];
#pragma unroll
    for (int k = 0; k < kLoads; k++) {
      if (next + k * kInputWarps >= count) break;
      const int2 places = reinterpret_cast<const int2*>(block.fragments()[next + k * kInputWarps].places)[t];
      const float4 v = values[k];
      put(places.x, split(v.x * first_scale, v.z * second_scale));
      put(places.y, split(v.y * first_scale, v.w * second_scale));
    }
    next += kLoads * kInputWarps;
  }
  __device__ __forceinline__ void put(int place, Halves own) const {
    const int at = place ^ threadIdx.x % 32 / 4 * 4;  // word g % 4 of part g / 4
    if (place >= 0) {
      *reinterpret_cast<uint32_t*>(stage + at) = own.high;
      *reinterpret_cast<uint32_t*>(stage + (at ^ 32)) = own.low;
    }
  }
};

}  // namespace grad::narrow3d
