// Sums by strip of x, for the gradients of weight and of the parameters. A strip is some rows of tiles of a
// sample.
//   stage.cuh       tiles, and x in shared memory
//   gram.cuh        ΣXXᵀ and ΣX, of x less its shift
//   sparse.cuh      Σ slope·dz·X; sums of dy, where it passes, and of dy·(v - mean)
//   strip_kernel    all of these, of a strip
#pragma once
#include "grad/selected/gram.cuh"
#include "grad/selected/sparse.cuh"

namespace grad::selected {

template <class P> struct Strips : Sparse<P> {
  using Base = Sparse<P>;
  using Base::kPlanes, Base::kUnits, Base::kDepth, Base::kBlockChannels, Base::kChannelBlocks,
      Base::channel_of, Base::kTileColumns, Base::kTileWindows, Base::find_shift, Base::kGramTiles,
      Base::kGramSize, Base::kFrameRows, Base::frame_row, Base::kRoleTiles, Base::kRoles, Base::multiply_gram,
      Base::kArea, Base::kWarpChannels, Base::origin_of, Base::kUnitGroups, Base::kRoleUnits,
      Base::kBlockUnits, Base::kTogether, Base::kRoleRows, Base::kChannelRoles, Base::kSparseGroups,
      Base::kSparsePasses, Base::multiply_sparse, Base::kIn, Base::kOut, Base::kPoolH, Base::kPoolW;
  using typename Base::Geometry, typename Base::Saved, typename Base::Channel, typename Base::Stage,
      typename Base::Held, typename Base::Totals, typename Base::Windows;

  // What all strips leave in memory, for merge.cuh.
  struct Partial {
    float *shift, *gram, *frame, *sparse, *sums;
    Partial(float* from, int64_t N, int64_t strips)
        : shift(from),                                  // (N, kIn)
          gram(shift + (N * kIn + 3) / 4 * 4),          // (N, strips, kGramSize)
          frame(gram + N * strips * kGramSize),         // (N, kFrameRows, kGramSize)
          sparse(frame + N * kFrameRows * kGramSize),   // (N, strips, kOut, kDepth)
          sums(sparse + N * strips * kOut * kDepth) {}  // (N, strips, kOut, 2)
    static int64_t count(int64_t N, int64_t strips) {
      return (N * kIn + 3) / 4 * 4 + N * (strips + kFrameRows) * kGramSize + N * strips * kOut * (kDepth + 2);
    }
  };

  // The blocks of a strip share its channels out, the units of the sparse product, and the roles of the Gram
  // matrix.
  static constexpr int kStripBlocks = kChannelBlocks * kSparsePasses;
  static constexpr int kBlockRoles = (kRoles + kStripBlocks - 1) / kStripBlocks;
  static constexpr int kRoleWarps = kBlockRoles > 4   ? 8
                                    : kBlockRoles > 2 ? 4
                                                      : kBlockRoles;  // with different roles
  static constexpr int kGramGroups = kWarps / kRoleWarps;
  static constexpr int kBlockGramSize = kBlockRoles * kRoleTiles * 32;  // float4, of a group of warps

  static constexpr int kRoleSums = kRoleRows * kRoleUnits * 4;  // of a lane, sparse ones

  // Dynamic shared memory, where each part begins, in bytes: the stage; the selected gradients; the block's
  // share of the Gram matrix, by group of warps; a pixel of ones.
  struct StripLayout {
    static constexpr int kHeld = Stage::kBytes, kGram = kHeld + (sizeof(Held) + 15) / 16 * 16;
    static constexpr int kOnes = kGram + kGramGroups * kBlockGramSize * 16, kBytes = kOnes + 16;
    static_assert(kChannelRoles * kBlockUnits * kRoleSums * 128 <= kBytes, "room to merge groups");
  };

  // What is a block's of the work, and a warp's of that.
  struct StripShare {
    const int strip, job, n, block, slot;  // slot: of the strip among all samples'
    const int first_channel, pass;         // of the block's channels out; which units of the sparse product
    const int warp, lane;
    // The sparse product: part of the block's channels, and units. Warps with the same role are in different
    // groups. Warps that share a scheduler have different units, not equally many.
    const int part, group, block_units, units;
    const int own_channels, first_own;  // whose gradients the warp selects: the first of the block's; of all
    // The Gram matrix: roles first_role, first_role + kRoleWarps … Warps with the most units of the sparse
    // product have the shorter role; where all have as many, two that share a scheduler have different roles.
    const int rank, first_role, gram_group;

    __device__ __forceinline__ explicit StripShare(Geometry geometry)
        : strip(blockIdx.x % geometry.strips), job(blockIdx.x / geometry.strips), n(job % geometry.N),
          block(job / geometry.N), slot(n * geometry.strips + strip),
          first_channel(block % kChannelBlocks * kBlockChannels), pass(block / kChannelBlocks),
          warp(__shfl_sync(~0u, threadIdx.x / 32, 0)), lane(threadIdx.x % 32), part(warp % kChannelRoles),
          group(warp / kChannelRoles / kBlockUnits),
          block_units((warp / kChannelRoles + group) % kBlockUnits), units(pass * kBlockUnits + block_units),
          own_channels(warp * kWarpChannels), first_own(first_channel + own_channels),
          rank(kBlockUnits > 1 ? kBlockUnits - 1 - block_units + kBlockUnits * (part + kChannelRoles * group)
                               : warp ^ warp / 4),
          first_role(rank % kRoleWarps), gram_group(rank / kRoleWarps) {}
  };

  // Adds row R(q) of the Gram matrix for each row q of a tile: to the block's share in shared memory, or, in
  // the frame, to its own place.
  __device__ __forceinline__ static void add_gram(const StripShare& share, float4* grams, float* frames,
                                                  int row, int column, int columns, uint32_t address,
                                                  uint2 constants, float factor, Geometry geometry) {
    for (int own_role = share.first_role; own_role < kBlockRoles; own_role += kRoleWarps)
      for (int i = share.gram_group, q; i < kPoolH && (q = row * kPoolH + i) < geometry.H; i += kGramGroups) {
        const int role = share.block * kBlockRoles + own_role, frame = frame_row(q, geometry);
        float4* total = grams + (share.gram_group * kBlockRoles + own_role) * (kRoleTiles * 32) + share.lane;
        if (frame >= 0) {
          float* const kept = frames + (int64_t(share.n) * kFrameRows + frame) * kGramSize;
          total = reinterpret_cast<float4*>(kept) + role * (kRoleTiles * 32) + share.lane;
        }
        with_constant<kRoles>(role, [&](auto constant) {
          Base::template multiply_gram<decltype(constant)::value>(
              total, frame < 0 || column > 0, address + Stage::offset(i, 0), constants, columns, factor);
        });
      }
  }

  // Writes the block's share of the strip's Gram matrix, summed over the groups of warps in their order.
  __device__ __forceinline__ static void write_gram(const StripShare& share, const float4* grams,
                                                    float* all) {
    for (int i = threadIdx.x; i < kBlockGramSize; i += kThreads) {
      const int at = share.block * kBlockGramSize + i;
      if (at >= kGramTiles * 32) continue;
      float4 merged = grams[i];
      for (int other = 1; other < kGramGroups; other++) {
        const float4 more = grams[other * kBlockGramSize + i];
        merged.x += more.x, merged.y += more.y, merged.z += more.z, merged.w += more.w;
      }
      reinterpret_cast<float4*>(all + int64_t(share.slot) * kGramSize)[at] = merged;
    }
  }

  // Writes the strip's sparse sums of the block, added up over the groups of warps in their order, in the
  // first one. shared: memory for them.
  __device__ __forceinline__ static void write_sparse(const StripShare& share, Totals& total,
                                                      unsigned char* shared, float* all) {
    float* const sums = reinterpret_cast<float*>(shared) +
                        (share.part * kBlockUnits + share.block_units) * (kRoleSums * 32) + share.lane;
    for (int other = 1; other < kSparseGroups; other++) {
      __syncthreads();  // what was here has been read
      if (share.group == other)
#pragma unroll
        for (int i = 0; i < kRoleSums; i++) sums[i * 32] = (&total[0][0][0])[i];
      __syncthreads();  // it is there
      if (share.group == 0)
#pragma unroll
        for (int i = 0; i < kRoleSums; i++) (&total[0][0][0])[i] += sums[i * 32];
    }
    if (share.group > 0) return;
#pragma unroll
    for (int m = 0; m < kRoleRows; m++)
#pragma unroll
      for (int i = 0; i < kRoleUnits; i++)
#pragma unroll
        for (int j = 0; j < 2; j++) {
          const int c = share.first_channel + (share.part * kRoleRows + m) * 16 + j * 8 + share.lane / 4;
          const int unit = share.units * kRoleUnits + i;
          if (c >= kOut || unit >= kUnits) continue;
          float* const to = all + (int64_t(share.slot) * kOut + c) * kDepth + unit * 8;
          reinterpret_cast<float2*>(to)[share.lane % 4] =
              make_float2(total[m][i][2 * j], total[m][i][2 * j + 1]);
        }
  }

  // Grid: strips, samples, kStripBlocks, the first fastest.
  __device__ __forceinline__ static void strip(Partial partial, const value_t* x, Saved saved,
                                               GroupShape shape, Geometry geometry) {
#if __CUDA_ARCH__ >= 800
    extern __shared__ __align__(128) unsigned char shared[];
    __shared__ int largest[2];
    __shared__ __align__(16) float shift[kPlanes * 8];  // read by 16 bytes: with no other array's
    __shared__ Channel channels[kBlockChannels];
    __shared__ float sums[kThreads];
    Stage stage(shared, largest);
    Held& held = *reinterpret_cast<Held*>(shared + StripLayout::kHeld);
    float4* const grams = reinterpret_cast<float4*>(shared + StripLayout::kGram);
    const StripShare share(geometry);
    const value_t* sample = x + int64_t(share.n) * kIn * geometry.H * geometry.W;
    const int pooled_width = geometry.pooled_width();
    const int64_t pooled_size = int64_t(geometry.pooled_height()) * pooled_width;
    const int row_end = min(geometry.tile_rows(), (share.strip + 1) * geometry.rows);
    sums[threadIdx.x] = 0;
    bool flat = false;
    if (const int c = threadIdx.x; c < kBlockChannels) {
      channels[c] = {};
      if (share.first_channel + c < kOut)
        channels[c] = channel_of(saved, shape, share.n, share.first_channel + c);
      flat = channels[c].flat;
    }
    if (threadIdx.x < 4) reinterpret_cast<uint32_t*>(shared + StripLayout::kOnes)[threadIdx.x] = 0x3c003c00;
    if (threadIdx.x < kArea) held.origin_of_place[threadIdx.x] = origin_of(threadIdx.x);
    find_shift(shift, sample, geometry.H * geometry.W);
    for (int i = threadIdx.x; i < kGramGroups * kBlockGramSize; i += kThreads)
      grams[i] = make_float4(0, 0, 0, 0);
    const bool any_flat = __syncthreads_or(flat);  // the shift and the channels are there
    if (share.strip == 0 && share.block == 0 && threadIdx.x < kIn)
      partial.shift[share.n * kIn + threadIdx.x] = shift[threadIdx.x];

    const uint32_t address = shared_address(shared);
    const uint2 constants = make_uint2(address + StripLayout::kOnes, address + Stage::kZeros);
    Totals total = {};
    for (int row = share.strip * geometry.rows; row < row_end; row++)
      for (int column = 0, columns; column < geometry.width(); column += columns) {
        const int left = geometry.width() - column, window_column = column / kPoolW;
        columns = left <= kTileColumns ? left : kTileWindows * kPoolW;
        const int windows =
            row < geometry.pooled_height() ? max(0, min(kTileWindows, pooled_width - window_column)) : 0;
        typename Stage::Pixels pixels;
        Windows own = {};
        stage.load(pixels, sample, shift, row * kPoolH, column, geometry);
        const int64_t first_window = int64_t(row) * pooled_width + window_column;
        if (windows && share.first_own < kOut)
          own.load(saved, (int64_t(share.n) * kOut + share.first_own) * pooled_size + first_window,
                   pooled_size, kOut - share.first_own, windows);
        if (any_flat)
          own.take_first_of_flat(saved, channels + share.own_channels, sample, share.first_own, row,
                                 window_column, windows, geometry);
        stage.measure(pixels);
        __syncthreads();  // the stage and what is held have been read
        if (windows)
          sums[threadIdx.x] += own.select(held, saved, channels + share.own_channels, share.own_channels);
        const float factor = power_of_two(-stage.store(pixels));
#if TENSOR_CORE_WGMMA
        if constexpr (kTogether) publish_shared();
#endif
        __syncthreads();  // they are complete
        if (windows)
          with_constant<kUnitGroups>(share.units, [&](auto constant) {
            Base::template multiply_sparse<decltype(constant)::value>(
                total, address, held, share.part * kRoleRows * 16, windows, share.group, factor);
          });
        add_gram(share, grams, partial.frame, row, column, columns, address, constants, factor, geometry);
      }
    static_assert(kWarpChannels == 8, "a sum for every other lane");
    if (share.pass == 0 && share.lane % 2 == 0 && share.first_own + share.lane / 4 < kOut)
      partial.sums[(int64_t(share.slot) * kOut + share.first_own) * 2 + share.lane / 2] = sums[threadIdx.x];
    __syncthreads();  // all products are complete
    write_gram(share, grams, partial.gram);
    write_sparse(share, total, shared, partial.sparse);
#endif
  }
};

template <class P>
__global__ void __launch_bounds__(kThreads, 2)
    strip_kernel(typename P::Partial partial, const value_t* x, typename P::Saved saved, GroupShape shape,
                 typename P::Geometry geometry) {
  P::strip(partial, x, saved, shape, geometry);
}

}  // namespace grad::selected
