// A pass that writes v's gradient in units (grad/packed.cuh): 8 channels of a position side by side, where
// tensor cores multiply them next.
//
// float32 becomes float16 under a scale for each sample, which hangs on values that nobody knows before they
// are computed. So some tiles of each sample are computed first, of which only the largest magnitude counts;
// then all are packed under the scale that it suggests; and once more the samples that turn out not to fit
// it, mostly none. What else a pass writes is the same each time.
#pragma once
#include "grad/packed.cuh"
#include "load/turned.cuh"

namespace load {

constexpr unsigned kSeen = 32;         // one in so many tiles of a plane is looked at first
constexpr unsigned kAgainBlocks = 32;  // of a sample: they mostly end at once
HOST_DEVICE constexpr unsigned seen_of(unsigned tiles) { return (tiles + kSeen - 1) / kSeen; }

enum class Packing { kLooksAhead, kFirst, kAgain };

#if __CUDA_ARCH__ >= 800

// A tile's elements to units, float32 under a scale; and the largest finite magnitude of a thread's.
// `units`: those of the sample.
__device__ __forceinline__ float store_units(const Tile& tile, uint4* units, float scale, bool writes) {
  using Operands = conv::Operands<value_t, false>;
  // Of a warp's lanes kSpan neighbours have neighbouring positions of one channel group.
  constexpr int kGroups = kTileChannels / 8, kSpan = 32 / kGroups, kStep = kPlaneThreads / kGroups;
  const int lane = threadIdx.x % 32, group = lane / kSpan, C = int(tile.extent.C),
            S = tile.extent.positions();
  float largest = 0.f;
  if (tile.channel + group * 8 >= C) return largest;
#pragma unroll
  for (int k = 0; k < kTilePositions / kStep; k++) {
    const int row = int(threadIdx.x) / 32 * kSpan + lane % kSpan + k * kStep;
    if (tile.position + row >= S) continue;
    float values[8];
#pragma unroll
    for (int i = 0; i < 8; i++) {
      values[i] = float(tile.at[slot(row, group * 8 + i)]);
      if constexpr (Operands::kScaled) {
        largest = conv::larger_magnitude(largest, values[i]);
        values[i] = Operands::scaled(values[i], scale);
      }
    }
    if (writes)
      Operands::pack_pixel(units + int64_t(tile.channel / 8 + group) * S + tile.position + row, 0, values);
  }
  return largest;
}

#endif

// On a multiprocessor; where a pass has much by channel, registers are full of that.
template <class Pass> constexpr int kUnitsBlocks = Last<Pass>::held < 9 ? 4 : 3;

// Grid: blocks of each sample, which go through its tiles; ahead through each kSeen-th of a plane.
template <class Pass>
__global__ void __launch_bounds__(kPlaneThreads, kPack * sizeof(real) > 16 ? 2 : kUnitsBlocks<Pass>)
    units_kernel(const Pass pass, const Extent extent, const value_t* values, uint4* units,
                 grad::Scales scales, unsigned parts, unsigned channel_tiles, unsigned blocks,
                 Packing packing) {
#if __CUDA_ARCH__ >= 800
  await_previous_kernel();
  __shared__ __align__(16) value_t shared[kTilePositions * kTileChannels];
  constexpr bool kScaled = sizeof(value_t) == 4;
  const bool ahead = packing == Packing::kLooksAhead;
  const unsigned n = blockIdx.x / blocks, tiles = (ahead ? seen_of(parts) : parts) * channel_tiles;
  int exponent = 0;
  if (kScaled && !ahead) {
    exponent = packing == Packing::kFirst ? scales.first(n) : scales.last(n);
    if (packing == Packing::kAgain && exponent == scales.first(n)) return;
  }
  const int64_t of_sample = int64_t(extent.C / 8) * extent.positions();
#pragma unroll 1
  for (unsigned i = blockIdx.x % blocks; i < tiles; i += blocks) {
    const unsigned part = i / channel_tiles * (ahead ? kSeen : 1);
    const Tile tile(extent, shared, n, part, int(i % channel_tiles) * kTileChannels);
    TurnedPlane<Tiled::kWritten, kTurnedAtOnce<Pass>> plane(tile, values, parts);
    if (plane.is_there()) pass(plane);
    __syncthreads();  // all channels are there
    const float largest = store_units(tile, units + n * of_sample, conv::power_of_two(exponent), !ahead);
    if (kScaled && packing != Packing::kAgain)
      conv::raise_largest((ahead ? scales.seen : scales.largest) + n, largest);
    __syncthreads();  // the tile is read
  }
#endif
}

// gradient: of grad::packed_size elements.
template <class Pass>
void units(const Pass& pass, const Extent& extent, const value_t* values, value_t* gradient, int64_t parts,
           cudaStream_t stream) {
  if constexpr (sizeof(value_t) <= 4) {
    const unsigned tiles = unsigned((extent.C + kTileChannels - 1) / kTileChannels), N = unsigned(extent.N);
    const grad::Scales scales = grad::scales_of(gradient, extent.N, extent.C, extent.positions());
    const auto launch = [&](Packing packing, unsigned blocks) {
      launch_early(units_kernel<Pass>, N * blocks, kPlaneThreads, stream, pass, extent, values,
                   reinterpret_cast<uint4*>(gradient), scales, unsigned(parts), tiles, blocks, packing);
    };
    if (sizeof(value_t) == 4) {
      cudaMemsetAsync(scales.seen, 0, 2 * extent.N * sizeof(uint32_t), stream);
      launch(Packing::kLooksAhead, seen_of(unsigned(parts)) * tiles);
    }
    launch(Packing::kFirst, unsigned(parts) * tiles);
    if (sizeof(value_t) == 4) launch(Packing::kAgain, kAgainBlocks);
  }
}

}  // namespace load
