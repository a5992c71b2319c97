// Sums by strip of x, for the gradients of weight and of the parameters of pool, whose formulas are in
// …_backward_fused.cu. A strip is some rows of tiles of a sample.
//   …_stage.cuh     tiles, and x in shared memory
//   …_gram.cuh      ΣXXᵀ and ΣX, of x less its shift
//   …_sparse.cuh    Σ slope·dz·X; sums of dy, where it passes, and of dy·(v - mean)
//   strip_kernel    all of these, of a strip
#pragma once
#include "conv2d_groupnorm_scale_maxpool_clamp_gram.cuh"
#include "conv2d_groupnorm_scale_maxpool_clamp_sparse.cuh"

namespace {

// And what is merged: of each strip, in float32.
struct Partial {
  float *shift, *gram, *frame, *sparse, *sums;
  Partial(float* from, int64_t N, int64_t strips)
      : shift(from),                                  // (N, CHANNELS_IN)
        gram(shift + (N * CHANNELS_IN + 3) / 4 * 4),  // (N, strips, kGramSize)
        frame(gram + N * strips * kGramSize),         // (N, kFrameRows, kGramSize)
        sparse(frame + N * kFrameRows * kGramSize),   // (N, strips, CHANNELS_OUT, kDepth)
        sums(sparse + N * strips * CHANNELS_OUT * kDepth) {}  // (N, strips, CHANNELS_OUT, 2)
};

// Blocks of a strip share the channels out, the units and the roles.
constexpr int kStripBlocks = kChannelBlocks * kSparsePasses;
constexpr int kBlockRoles = (kRoles + kStripBlocks - 1) / kStripBlocks;
constexpr int kRoleWarps = kBlockRoles > 4 ? 8 : kBlockRoles > 2 ? 4 : kBlockRoles;  // with different roles
constexpr int kGramGroups = kWarps / kRoleWarps;
struct StripLayout {  // of shared memory: where each part begins
  static constexpr int kHeld = Stage::kBytes, kGram = kHeld + (sizeof(Held) + 15) / 16 * 16;
  static constexpr int kRoleBytes = kRoleTiles * 512;  // of one group
  static constexpr int kOnes = kGram + kGramGroups * kBlockRoles * kRoleBytes, kBytes = kOnes + 16;
  static_assert(2 * kBlockUnits * kRoleUnits * 1024 <= kBytes, "room to merge groups");
};

// Grid: strips, samples, kStripBlocks, the first fastest.
__global__ void __launch_bounds__(kThreads, 2)
strip_kernel(Partial partial, const value_t* x, Saved saved, GroupShape shape, Geometry geometry) {
#if __CUDA_ARCH__ >= 800
  extern __shared__ __align__(128) unsigned char shared[];
  __shared__ int largest;
  __shared__ float shift[kPlanes * 8];
  __shared__ Channel channels[kBlockChannels];
  __shared__ float sums[kThreads];
  Stage stage(shared, &largest);
  Held& held = *reinterpret_cast<Held*>(shared + StripLayout::kHeld);
  float4* const grams = reinterpret_cast<float4*>(shared + StripLayout::kGram);
  const int strip = blockIdx.x % geometry.strips, job = blockIdx.x / geometry.strips;
  const int n = job % geometry.N, own_block = job / geometry.N, slot = n * geometry.strips + strip;
  const int first_channel = own_block % kChannelBlocks * kBlockChannels, pass = own_block / kChannelBlocks;
  const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0), lane = threadIdx.x % 32;
  const int half = warp % 2, group = warp / 2 / kBlockUnits;
  // Warps that share a scheduler have different units, not equally many.
  const int of_block = (warp / 2 + group) % kBlockUnits, units = pass * kBlockUnits + of_block;
  const value_t* sample = x + int64_t(n) * CHANNELS_IN * geometry.H * geometry.W;
  const int pooled_width = geometry.pooled_width();
  const int64_t pooled_size = int64_t(geometry.pooled_height()) * pooled_width;
  const int own_channels = warp * kWarpChannels, first_own = first_channel + own_channels;
  // Those with most units of the sparse product have the shorter role of the Gram matrix.
  const int rank = kBlockUnits - 1 - of_block + kBlockUnits * (half + 2 * group);
  const int first_role = rank % kRoleWarps, gram_group = rank / kRoleWarps;
  const int row_end = min(geometry.tile_rows(), (strip + 1) * geometry.rows);
  sums[threadIdx.x] = 0;
  bool flat = false;
  if (const int c = threadIdx.x; c < kBlockChannels) {
    channels[c] = {};
    if (first_channel + c < CHANNELS_OUT) channels[c] = channel_of(saved, shape, n, first_channel + c);
    flat = channels[c].flat;
  }
  if (threadIdx.x < 4) reinterpret_cast<uint32_t*>(shared + StripLayout::kOnes)[threadIdx.x] = 0x3c003c00;
  if (threadIdx.x < kArea) held.origin_of_place[threadIdx.x] = origin_of(threadIdx.x);
  find_shift(shift, sample, geometry.H * geometry.W);
  for (int i = threadIdx.x; i < kGramGroups * kBlockRoles * kRoleTiles * 32; i += kThreads)
    grams[i] = make_float4(0, 0, 0, 0);
  const bool any_flat = __syncthreads_or(flat);  // the shift and the channels are there
  if (strip == 0 && own_block == 0 && threadIdx.x < CHANNELS_IN)
    partial.shift[n * CHANNELS_IN + threadIdx.x] = shift[threadIdx.x];

  const uint32_t address = shared_address(shared);
  const uint2 constants = make_uint2(address + StripLayout::kOnes, address + Stage::kZeros);

  float total[2][kRoleUnits][4] = {};
  for (int row = strip * geometry.rows; row < row_end; row++)
    for (int column = 0, columns; column < geometry.width(); column += columns) {
      const int left = geometry.width() - column, window_column = column / POOL_W;
      columns = left <= kTileColumns ? left : kTileWindows * POOL_W;
      const int windows =
          row < geometry.pooled_height() ? max(0, min(kTileWindows, pooled_width - window_column)) : 0;
      Stage::Pixels pixels;
      Windows own = {};
      stage.load(pixels, sample, shift, row * POOL_H, column, geometry);
      const int64_t first_window = int64_t(row) * pooled_width + window_column;
      if (windows && first_own < CHANNELS_OUT)
        own.load(saved, (int64_t(n) * CHANNELS_OUT + first_own) * pooled_size + first_window, pooled_size,
                 CHANNELS_OUT - first_own, windows);
      if (any_flat)
#pragma unroll 1
        for (int i = 0; i < kWarpChannels * kRounds; i++) {
          const int c = own_channels + i % kWarpChannels, window = i / kWarpChannels * 32 + lane;
          if (!channels[c].flat || window >= windows) continue;
          const float first =
              first_of_window(saved, sample, first_channel + c, row, window_column + window, geometry);
#pragma unroll
          for (int j = 0; j < kWarpChannels * kRounds; j++)
            if (j == i) own.extreme[j / kWarpChannels][j % kWarpChannels] = first;
        }
      __syncthreads();  // the stage and what is held have been read
      if (windows) sums[threadIdx.x] += own.select(held, saved, channels + own_channels, own_channels);
      const float factor = power_of_two(-stage.store(pixels));
      __syncthreads();  // they are complete
      if (windows)
        with_constant<kUnitGroups>(units, [&](auto constant) {
          multiply_sparse<decltype(constant)::value>(total, address, held, half * 32, windows, group, factor);
        });
      for (int of_role = first_role; of_role < kBlockRoles; of_role += kRoleWarps)
        for (int i = gram_group, q; i < POOL_H && (q = row * POOL_H + i) < geometry.H; i += kGramGroups) {
          const int role = own_block * kBlockRoles + of_role, frame = frame_row(q, geometry);
          float4* total_of_role = grams + (gram_group * kBlockRoles + of_role) * (kRoleTiles * 32) + lane;
          if (frame >= 0) {
            float* const kept = partial.frame + (int64_t(n) * kFrameRows + frame) * kGramSize;
            total_of_role = reinterpret_cast<float4*>(kept) + role * (kRoleTiles * 32) + lane;
          }
          with_constant<kRoles>(role, [&](auto constant) {
            multiply_gram<decltype(constant)::value>(total_of_role, frame < 0 || column > 0,
                                                     address + Stage::offset(i, 0), constants, columns,
                                                     factor);
          });
        }
    }
  static_assert(kWarpChannels == 8, "a sum for every other lane");
  if (pass == 0 && lane % 2 == 0 && first_own + lane / 4 < CHANNELS_OUT)
    partial.sums[(int64_t(slot) * CHANNELS_OUT + first_own) * 2 + lane / 2] = sums[threadIdx.x];
  __syncthreads();  // all products are complete
  for (int i = threadIdx.x; i < kBlockRoles * kRoleTiles * 32; i += kThreads) {
    const int at = own_block * kBlockRoles * kRoleTiles * 32 + i;
    if (at >= kGramTiles * 32) continue;
    float4 merged = grams[i];
    for (int other = 1; other < kGramGroups; other++) {
      const float4 more = grams[other * (kBlockRoles * kRoleTiles * 32) + i];
      merged.x += more.x, merged.y += more.y, merged.z += more.z, merged.w += more.w;
    }
    reinterpret_cast<float4*>(partial.gram + int64_t(slot) * kGramSize)[at] = merged;
  }
  // Warps with the same role of the sparse product add up what they found, in order, in the first group.
  float* const own_sums =
      reinterpret_cast<float*>(shared) + (half * kBlockUnits + of_block) * (kRoleUnits * 256) + lane;
  for (int other = 1; other < kSparseGroups; other++) {
    __syncthreads();  // what was here has been read
    if (group == other)
#pragma unroll
      for (int i = 0; i < 2 * kRoleUnits * 4; i++) own_sums[i * 32] = (&total[0][0][0])[i];
    __syncthreads();  // it is there
    if (group == 0)
#pragma unroll
      for (int i = 0; i < 2 * kRoleUnits * 4; i++) (&total[0][0][0])[i] += own_sums[i * 32];
  }
  if (group == 0)
#pragma unroll
    for (int m = 0; m < 2; m++)
#pragma unroll
      for (int i = 0; i < kRoleUnits; i++)
#pragma unroll
        for (int j = 0; j < 2; j++) {
          const int c = first_channel + half * 32 + m * 16 + j * 8 + lane / 4, unit = units * kRoleUnits + i;
          if (c >= CHANNELS_OUT || unit >= kUnits) continue;
          float* const to = partial.sparse + (int64_t(slot) * CHANNELS_OUT + c) * kDepth + unit * 8;
          reinterpret_cast<float2*>(to)[lane % 4] = make_float2(total[m][i][2 * j], total[m][i][2 * j + 1]);
        }
#endif
}

}  // namespace
