// A convolution as an implicit GEMM by mma.sync, from compute capability 8.0 on, whose operands stream
// through shared memory: M = channels out, N = positions of all samples, one behind the other, K = groups of
// up to 32 operands × taps, 32 a step.
//
// A block computes a tile of 64 or 128 channels × 128 positions, a warp 32 channels × 64 positions of it, or
// 64 × 64 (kWarpSixteens): it has 128 or 256 threads. All threads fill the stages of a ring in the
// background: of a step the weights, as they are packed, and what the tap meets at the positions, 16 bytes a
// copy, with zeros where that is padding. A thread copies for the same few positions in all steps: it knows
// where they begin in x, and, a bit each, which places of the filter's along each axis lie inside. Rows are
// swizzled (core/tensor_map.cuh), so that neither copies nor load_matrices meet conflicts. Results pass
// through the stages' place.
//
// A step of 128 channels × 128 positions, 1/2 million products of two operands, copies 16 KB from the L2
// cache to shared memory, and warps read 48 KB there, or, of 64 × 64, 32 KB. Tensor cores of 8.0 take 512
// cycles for it, 8.6 and later 1024; 64 KB are 512 cycles of shared memory. A step of 64 channels copies 12
// KB, and reads 24 KB, for half of the products.
//
// Where windows of v are pooled, positions are windows, and a tile is computed once for each of a window's
// elements, all of which a thread then has.
//
// Positions, and units of 16 bytes of x, are counted in int.
#pragma once
#include "conv/exact.cuh"
#include "conv/stream_tile.cuh"
#include "core/launch.cuh"

namespace conv {

constexpr int kWarpColumns = 64, kTileColumns = 128;  // positions of a warp, of a block
constexpr int kGatheredStep = 32;                     // operands of K

// How such a convolution is cut: a tile has kTileColumns positions however many channels it has.
template <class Filter, class Operands, int kBlockChannels, int kFolded, int kShares>
using Gathered = Stream<Filter, Operands, kBlockChannels, kTileColumns * kBlockChannels / 128, 1, 0, kFolded,
                        kShares, kGatheredStep>;

// x (N, extents, kPixel) of operands, as units of 16 bytes; pitch: pixels from row to row.
struct GatheredImage {
  const uint4* x;
  int extents[3], pitch;
};

template <class Conv, class Pool, class Tail, class Out, class More, int kSharedLimit>
struct StreamSm80 : Conv {
  using Arguments = StreamArguments<Conv, Tail, Out, More>;
  using Image = GatheredImage;
  using Conv::kBlockChannels, Conv::kChannelBlocks, Conv::kChannelsOut, Conv::kCopies, Conv::kCopiesOfLine,
      Conv::kDeep, Conv::kDepth, Conv::kGroup, Conv::kGroups, Conv::kImageBytes, Conv::kLastDeep,
      Conv::kLastSlabs, Conv::kProducts, Conv::kShares, Conv::kSlabs, Conv::kSplit, Conv::kSteps,
      Conv::kTilePositions, Conv::kWeightBytes;
  using typename Conv::Filter, typename Conv::operand_t;

  static constexpr bool kPools = Pool::kArea > 1;
  static constexpr int kTiles = kWarpColumns / 8;  // of a warp, 8 positions each
  // Sixteens of a warp's channels. Where that much shared memory tells that tensor cores are 8.0's, they are
  // twice as fast as those of 8.6 and later, and wait for what warps read there, unless each of that has
  // three products; but sums take registers.
  static constexpr bool kFast = kSharedLimit >= 160 << 10, kSpare = !kPools && !More::kExists;
  static constexpr int kWarpSixteens = kFast && kSpare && !kSplit && kBlockChannels == 128 ? 4 : 2;
  static constexpr int kWarpsBeside = kTilePositions / kWarpColumns;
  static constexpr int kThreads = kBlockChannels / (kWarpSixteens * 16) * kWarpsBeside * 32;
  using Sums = float[kWarpSixteens][kTiles][4];

  // A row of a slab, of weights or of an image, has so many units of 16 bytes; of a slab a thread copies
  // those of kOwn positions, kApart from one another.
  static constexpr int kUnits = kGroup / 8, kApart = kThreads / kUnits, kOwn = kTilePositions / kApart;
  static constexpr int kWeightUnits = kWeightBytes / 16, kImageUnits = kImageBytes / 16;
  static_assert(kApart % 8 == 0 && kTilePositions % kApart == 0 && kWeightUnits % kThreads == 0);

  // Places along an axis that taps and windows' elements meet, a bit for each: planes, rows, columns.
  static constexpr int kPlanes = Pool::kDepth * Filter::kDepth, kLines = Pool::kHeight * Filter::kHeight,
                       kPlaces = kPlanes + kLines + Pool::kWidth * kCopiesOfLine;
  static_assert(kPlaces <= 64, "a bit for each place");
  using mask_t = std::conditional_t<kPlaces <= 32, uint32_t, uint64_t>;

  // Shared memory: stages of weights and image, kSlabs each; or staging. Of a multiprocessor's, which has 1
  // KB more than a block may ask for and takes 1 KB for each, as many blocks as registers have room for share
  // all, if that is enough for kFewStages.
  static constexpr int kFewStages = 3, kMostStages = 5;
  static constexpr int kImageAt = kSlabs * kWeightUnits;  // of a stage, in units
  static constexpr int kStageUnits = kImageAt + kSlabs * kImageUnits, kStageBytes = kStageUnits * 16;
  static constexpr int kWarpBytes =
      Out::kWarpBytes > More::Out::kWarpBytes ? Out::kWarpBytes : More::Out::kWarpBytes;
  static constexpr int kStagingBytes = kThreads / 32 * kWarpBytes;
  static constexpr int kReserved = 1024;
  static constexpr int room(int blocks) { return (kSharedLimit + kReserved) / blocks - kReserved; }
  static constexpr int most_blocks() {
    constexpr int kLeast =
        kStagingBytes > kFewStages * kStageBytes ? kStagingBytes : kFewStages * kStageBytes;
    int blocks = (kPools || kWarpSixteens > 2 ? 256 : 512) / kThreads;  // with 255 or 128 registers a thread
    while (blocks > 1 && room(blocks) < kLeast) blocks--;
    return blocks;
  }
  static constexpr int kBlocks = most_blocks(), kFitting = room(kBlocks) / kStageBytes;
  static constexpr int kStages = kFitting < kMostStages ? kFitting : kMostStages;
  static constexpr int kSharedBytes =
      kStages * kStageBytes > kStagingBytes ? kStages * kStageBytes : kStagingBytes;
  static_assert(kStages >= kFewStages && kSharedBytes <= kSharedLimit);

  // x, operands of extents `sizes`, a pixel of a row behind the other, `pitch` of them.
  static Image image(const operand_t* x, int64_t N, const int64_t (&sizes)[3], int pitch, const int (&)[3],
                     const Walk&) {
    expect(uintptr_t(x) % 16 == 0, "an image that begins at a multiple of 16 bytes");
    expect(N * sizes[0] * sizes[1] * pitch * (Conv::kPixel / 8) < (int64_t(1) << 31),
           "sizes that are counted in int");
    return {reinterpret_cast<const uint4*>(x), {int(sizes[0]), int(sizes[1]), int(sizes[2])}, pitch};
  }

  // Units of work, each a tile; channels first.
  static HOST_DEVICE int units(const Arguments& args) {
    return kChannelBlocks * kShares * ceil_div(args.positions(), kTilePositions);
  }

#if __CUDA_ARCH__ >= 800

  // The block's tile, and which share of its steps, `from` … `to`, of a window's elements one after the
  // other.
  struct Tile {
    int channel_block, share, position;
    __device__ __forceinline__ Tile()
        : channel_block(blockIdx.x % kChannelBlocks), share(blockIdx.x / kChannelBlocks % kShares),
          position(blockIdx.x / (kChannelBlocks * kShares) * kTilePositions) {}
    __device__ __forceinline__ int from() const { return share * kSteps / kShares; }
    __device__ __forceinline__ int to() const {
      return (Pool::kArea - 1) * kSteps + (share + 1) * kSteps / kShares;
    }
  };

  // Which place along an axis an element of a window and a tap meet, as bits of masks count them.
  static __device__ __forceinline__ int place_of(int first, int taps, int element, int tap) {
    return first + element * taps + tap;
  }

  // Of the positions that a thread copies for: where in x the unit lies that it copies of the first group of
  // the first pixel, and a bit for each place that is inside.
  struct Own {
    int first[kOwn];
    mask_t inside[kOwn];

    __device__ __forceinline__ Own(const Arguments& args, const Image& image, int position) {
      const int unit = threadIdx.x % kUnits;
#pragma unroll
      for (int i = 0; i < kOwn; i++) {
        const int at = position + int(threadIdx.x) / kUnits + i * kApart, row = at / args.OW,
                  plane = row / args.OH, n = plane / args.OD;
        const int results[] = {plane - n * args.OD, row - plane * args.OH, at - row * args.OW};
        int pixel = n;
        inside[i] = 0;
        const auto along = [&](int d, int elements, int taps, int bit) {
          const int begin = results[d] * args.walk.stride[d] - args.walk.before[d];
          pixel = pixel * (d < 2 ? image.extents[d] : image.pitch) + begin;
#pragma unroll
          for (int element = 0; element < elements; element++)
#pragma unroll
            for (int tap = 0; tap < taps; tap++) {
              const int place = begin + element * args.step[d] + tap * args.walk.dilation[d];
              const bool real = unsigned(place) < unsigned(image.extents[d]);
              inside[i] |= mask_t(real) << place_of(bit, taps, element, tap);
            }
        };
        along(0, Pool::kDepth, Filter::kDepth, 0);
        along(1, Pool::kHeight, Filter::kHeight, kPlanes);
        along(2, Pool::kWidth, kCopiesOfLine, kPlanes + kLines);
        first[i] = pixel * (Conv::kPixel / 8) + unit;
        if (at >= args.positions()) inside[i] = 0;
      }
    }
  };

  // From a position's first pixel to what a slab of a step has there: how many units on, and the bits of the
  // places where it lies.
  struct Reach {
    int units;
    mask_t places;

    __device__ __forceinline__ Reach(const Arguments& args, const Image& image, int element, int slab)
        : places(0) {
      const int copy = slab % kCopies, line = copy / kCopiesOfLine, row = element / Pool::kWidth;
      int pixels = 0;
      const auto along = [&](int d, int tap, int of_window, int taps, int bit) {
        pixels = pixels * (d < 2 ? image.extents[d] : image.pitch) + tap * args.walk.dilation[d] +
                 of_window * args.step[d];
        places |= mask_t(1) << place_of(bit, taps, of_window, tap);
      };
      if constexpr (kPlanes > 1) along(0, line / Filter::kHeight, row / Pool::kHeight, Filter::kDepth, 0);
      else places = 1;
      along(1, line % Filter::kHeight, row % Pool::kHeight, Filter::kHeight, kPlanes);
      along(2, copy % kCopiesOfLine, element % Pool::kWidth, kCopiesOfLine, kPlanes + kLines);
      units = pixels * (Conv::kPixel / 8) + slab / kCopies * kUnits;
    }
  };

  // Does slab j of a step exist?
  static __device__ __forceinline__ bool has_slab(int step, int j) {
    return kLastSlabs == kSlabs || j < kLastSlabs || step < kSteps - 1;
  }

  // Step i to a stage, in the background. Past the last one nothing, but still a group of copies, so that a
  // count of pending groups means the same each time. weights: of the tile's channels.
  static __device__ __forceinline__ void fetch(uint4* stage, const Arguments& args, const Image& image,
                                               const uint4* weights, const Own& own, int i, int to) {
    if (i < to) {
      const int element = kPools ? i / kSteps : 0, step = kPools ? i % kSteps : i;
      const int unit = threadIdx.x % kUnits, row = threadIdx.x / kUnits;
      const uint4* const of_step = weights + int64_t(step) * (kSlabs * kWeightUnits) + threadIdx.x;
      uint4* const to_image = stage + kImageAt + row * kUnits + swizzled<kGroup>(row, unit);
#pragma unroll
      for (int j = 0; j < kSlabs; j++) {
        if (!has_slab(step, j)) break;
#pragma unroll
        for (int k = j * kWeightUnits; k < (j + 1) * kWeightUnits; k += kThreads)
          copy_async<16>(stage + threadIdx.x + k, of_step + k);
        const int slab = step * kSlabs + j;
        const Reach reach(args, image, element, slab);
        const bool of_row = Conv::kRow % kGroup == 0 || slab / kCopies * kUnits + unit < Conv::kRow / 8;
#pragma unroll
        for (int k = 0; k < kOwn; k++) {
          const bool real = of_row && (own.inside[k] & reach.places) == reach.places;
          copy_async_or_zero(to_image + j * kImageUnits + k * kThreads,
                             image.x + (real ? own.first[k] + reach.units : 0), real);
        }
      }
    }
    commit_copies();
  }

  // The address of the unit that lies so many behind the one at `address` in its row, as rows are swizzled;
  // or in another row, a multiple of 8 rows on.
  static __device__ __forceinline__ uint32_t moved(uint32_t address, int units) {
    return units < kUnits ? address ^ uint32_t(units * 16) : address + units * 16;
  }

  // sums += a slab's products, of `deep` sixteens of channels. weights, image: the addresses that the lane
  // gives to load_matrices. Tensor cores cut off as they add. So split operands' small products come first,
  // and their sums are added to the others in float32.
  static __device__ __forceinline__ void multiply_slab(Sums& sums, uint32_t weights, uint32_t image,
                                                       int deep) {
    constexpr int kWeightParts = kProducts > 1 ? 2 : 1, kImageParts = kProducts > 2 ? 2 : 1;
#pragma unroll
    for (int i = 0; i < kDeep; i++) {
      if (i >= deep) break;
      uint32_t a[kWeightParts][kWarpSixteens][4];
#pragma unroll
      for (int part = 0; part < kWeightParts; part++)
#pragma unroll
        for (int m = 0; m < kWarpSixteens; m++)
          load_matrices(a[part][m], moved(moved(weights, i * (kDepth / 8)), Conv::of_weight(part)) +
                                        m * (16 * kGroup * 2));
#pragma unroll
      for (int j = 0; j < kTiles; j += 2) {
        uint32_t b[kImageParts][4];
#pragma unroll
        for (int part = 0; part < kImageParts; part++)
          load_matrices(b[part], moved(moved(image, i * (kDepth / 8)), Conv::of_image(2 * part)) +
                                     j * (8 * kGroup * 2));
#pragma unroll
        for (int m = 0; m < kWarpSixteens; m++) {
          float own[2][4] = {};
          float (&low)[4] = kSplit ? own[0] : sums[m][j];
          float (&high)[4] = kSplit ? own[1] : sums[m][j + 1];
#pragma unroll
          for (int product = kProducts - 1; product >= 0; product--) {
            const uint32_t (&of_a)[4] = a[product == 1][m];
            const uint32_t (&of_b)[4] = b[product == 2];
            multiply_add<operand_t>(low, of_a, of_b[0], of_b[1]);
            multiply_add<operand_t>(high, of_a, of_b[2], of_b[3]);
          }
          if constexpr (kSplit) {
#pragma unroll
            for (int k = 0; k < 4; k++) sums[m][j][k] += low[k], sums[m][j + 1][k] += high[k];
          }
        }
      }
    }
  }

  // Of a warp in a block: its first channel and position there.
  struct Warp {
    int channel, column;
    __device__ __forceinline__ Warp()
        : channel(threadIdx.x / 32 / kWarpsBeside * (kWarpSixteens * 16)),
          column(threadIdx.x / 32 % kWarpsBeside * kWarpColumns) {}
  };

  // The addresses that a lane gives to load_matrices in the first stage. Of weights: lanes 0-7 and 8-15 have
  // 16 channels' first unit, 16-31 their second one. Of an image: lanes 0-7 and 8-15 have both units of 8
  // positions, 16-31 those of the next 8.
  struct Operand {
    uint32_t weights, image;
    __device__ __forceinline__ Operand(const uint4* shared, const Warp& warp) {
      const int lane = threadIdx.x % 32, channel = warp.channel + lane % 16,
                position = warp.column + lane / 16 * 8 + lane % 8;
      const uint32_t first = shared_address(shared);
      weights = first + 16 * (channel * kUnits + swizzled<kGroup>(channel, lane / 16));
      image = first + 16 * (kImageAt + position * kUnits + swizzled<kGroup>(position, lane / 8 % 2));
    }
  };

  // sums += the products of a step, which lies in a stage.
  static __device__ __forceinline__ void multiply_step(Sums& sums, const Operand& operand, int stage,
                                                       int step) {
#pragma unroll
    for (int j = 0; j < kSlabs; j++) {
      if (!has_slab(step, j)) break;
      const bool last = kGroups == 1 || (step * kSlabs + j) / kCopies == kGroups - 1;
      multiply_slab(sums, operand.weights + stage * kStageBytes + j * kWeightBytes,
                    operand.image + stage * kStageBytes + j * kImageBytes,
                    kLastDeep < kDeep && last ? kLastDeep : kDeep);
    }
  }

  // take(patch, m) for each sixteen m of the warp's channels that exists.
  template <class Take>
  static __device__ __forceinline__ void each_sixteen(const Arguments& args, const Tile& tile,
                                                      const Warp& warp, const Take& take) {
#pragma unroll
    for (int m = 0; m < kWarpSixteens; m++) {
      store::Patch patch;
      patch.position = tile.position + warp.column;
      patch.columns = min(args.positions() - patch.position, kWarpColumns);
      patch.channel = tile.channel_block * kBlockChannels + warp.channel + m * 16;
      if (patch.channel < kChannelsOut) take(patch, m);
    }
  }

  static __device__ __forceinline__ void run(const Arguments& args, const Image& image) {
    extern __shared__ __align__(128) uint4 gathered_shared[];
    const Tile tile;
    const Warp warp;
    const Own own(args, image, tile.position);
    const Operand operand(gathered_shared, warp);
    const uint4* const weights =
        args.packed_weight + int64_t(tile.channel_block) * (kGroups * kCopies) * kWeightUnits;
    const int to = tile.to();
    const auto fetch_step = [&](int i, int stage) {
      fetch(gathered_shared + stage * kStageUnits, args, image, weights, own, i, to);
    };
    int next = tile.from(), stage = 0;
#pragma unroll
    for (int i = 0; i < kStages - 1; i++) fetch_step(next + i, i);
    Sums sums = {};
    // The sums of steps up to the one before `end`, which begin with `first`.
    const auto multiply = [&](int first, int end) {
#pragma unroll 1
      for (; next < end; next++) {
        await_copies<kStages - 2>();  // this thread's share of the step is there
        __syncthreads();              // everyone's is; and everyone is done with the stage before it
        fetch_step(next + kStages - 1, stage == 0 ? kStages - 1 : stage - 1);
        multiply_step(sums, operand, stage, next - first);
        stage = stage + 1 < kStages ? stage + 1 : 0;
      }
    };
    uint8_t* const staging = reinterpret_cast<uint8_t*>(gathered_shared) + threadIdx.x / 32 * kWarpBytes;
    if constexpr (!kPools) {
      multiply(0, to);
      __syncthreads();  // everyone is done with the operands, whose place staging takes
      each_sixteen(args, tile, warp, [&](const store::Patch& patch, int m) {
        if constexpr (More::kExists) {
          float results[kTiles][4] = {};
          apply_tail(args, args.more.tail, sums[m], results, patch);
          args.more.out.store(staging, results, patch, store::Flat{args.sample()}, kChannelsOut);
        }
        apply_tail(args, args.tail, sums[m], sums[m], patch);
        if constexpr (kShares > 1) {
          Out out = args.out;
          out.y += tile.share * (int64_t(args.positions()) * kChannelsOut);
          out.store(staging, sums[m], patch, store::Flat{args.sample()}, kChannelsOut);
        } else args.out.store(staging, sums[m], patch, store::Flat{args.sample()}, kChannelsOut);
      });
    } else {
      static_assert(kShares == 1, "windows of v, not of its terms");
      Sums results = {};
#pragma unroll 1
      for (int element = 0; element < Pool::kArea; element++) {
        multiply(element * kSteps, (element + 1) * kSteps);
        each_sixteen(args, tile, warp, [&](const store::Patch& patch, int m) {
          pool_tile<Pool>(args, sums[m], results[m], patch, element);
        });
#pragma unroll
        for (int i = 0; i < kWarpSixteens * kTiles * 4; i++)
          sums[i / (kTiles * 4)][i / 4 % kTiles][i % 4] = 0.f;
      }
      __syncthreads();  // as above
      each_sixteen(args, tile, warp, [&](const store::Patch& patch, int m) {
        args.out.store(staging, results[m], patch, store::Flat{args.sample()}, kChannelsOut);
      });
    }
  }

#endif
};

// Grid: units of work.
template <class Loop>
__global__ void __launch_bounds__(Loop::kThreads, Loop::kBlocks)
    convolve_gathered_kernel(const __grid_constant__ typename Loop::Image image,
                             const __grid_constant__ typename Loop::Arguments args) {
#if __CUDA_ARCH__ >= 800
  await_previous_kernel();
  Loop::run(args, image);
#endif
}

template <class Loop>
void convolve_gathered(const typename Loop::Image& image, const typename Loop::Arguments& args,
                       cudaStream_t stream) {
  allow_shared<convolve_gathered_kernel<Loop>>();
  launch_early_with(convolve_gathered_kernel<Loop>, Loop::units(args), Loop::kThreads, Loop::kSharedBytes,
                    stream, image, args);
}

}  // namespace conv
