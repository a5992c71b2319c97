// The gradient of a convolution's input, grad/wide_input.cuh, from g that is packed: units (grad/packed.cuh)
// are what both mainloops take. By wgmma the copy engine brings rows of them, of tiles, to the stages.
//
// Bytes at (128, 64, 128, 128), 3×3, 128 channels out: 520 MB of g read, 537 MB of dx written. Bound: 300
// GFLOP 0.34 ms by wgmma, memory 0.25 ms.
#pragma once
#include "conv/wide.cuh"
#include "core/wgmma.cuh"
#include "grad/packed.cuh"

namespace grad {

using namespace conv;

// A tile must have all channels of x.
template <class Build, class Source>
using InputMainloop =
    Mainloop<Filter<Build::Filter::kOut, Build::Filter::kIn, Build::Filter::kHeight, Build::Filter::kWidth>,
             typename Build::Operands, typename Build::Target,
             Build::kCountsInInt && Source::kUnits && Build::Filter::kIn <= 64, true, Source, Identity,
             store::Nothing, store::DirectRows<typename Build::value_t>>;

// A source of the transposed convolution: g in units, of samples whose exponents stand in the place of
// largest magnitudes.
struct PackedGradient {
  const uint4* g;
  int groups;  // of channels
  static constexpr bool kGuessesScale = false, kUnits = true;
  static __device__ __forceinline__ int sample_exponent(uint32_t exponent) { return int(exponent); }
};

// The exponents of the samples, as they were packed at last. One block.
template <class Scales> __global__ void exponents_kernel(uint32_t* exponents, Scales scales, int64_t N) {
#if __CUDA_ARCH__ >= 800
  for (int64_t n = threadIdx.x; n < N; n += blockDim.x) exponents[n] = uint32_t(scales.last(n));
#endif
}

}  // namespace grad

namespace conv {

template <class Conv> struct Producer<Conv, grad::PackedGradient> : Conv {
  using Conv::kKernelH, Conv::kPadColumns, Conv::kPadRows, Conv::kPitch, Conv::kRowBytes;
  static constexpr int kRegisters = 56, kSharedBytes = 0;

#if TENSOR_CORE_WGMMA

  // Fills the pipeline, row by row; a thread brings a channel group. Zeros are on both sides of a row of g,
  // in channels that don't exist, and in the rows around g. Where a row is one tile those on its sides stay.
  template <class Arguments, class Pipeline>
  static __device__ __forceinline__ void produce(const Arguments& args, const TileScheduler& tiles,
                                                 const Pipeline& pipeline, uint8_t* stages, uint8_t*, bool) {
    const int width = int(args.W), groups = args.source.groups;
    for (int i = threadIdx.x; i < Pipeline::kCount * kRowBytes / 16; i += kWarpgroup)
      reinterpret_cast<uint4*>(stages)[i] = make_uint4(0, 0, 0, 0);
    publish_shared();
    sync_threads<kWarpgroup>(4);
    typename Pipeline::State next;
#pragma unroll 1
    for (int tile = tiles.begin; tile < tiles.end;) {
      const TilePlace place = tiles[tile];
      const int count = min(tiles.end - tile, tiles.OH - place.row), rows = count + kKernelH - 1;
      tile += count;
      // Pixels of g that the tile meets, and where they lie in a stage's row.
      const int first = place.column - kPadColumns, from = max(first, 0),
                pixels = min(first + kPitch, width) - from;
      const int before = from - first, around = tiles.strips > 1 ? kPitch - pixels : 0;
#pragma unroll 1
      for (int row = place.row - kPadRows; row < place.row - kPadRows + rows; row++) {
        pipeline.producer_acquire(next);
        uint4* const stage = reinterpret_cast<uint4*>(stages + next.stage * kRowBytes);
        const bool inside = unsigned(row) < unsigned(args.H);
        for (int i = threadIdx.x; i < groups * around; i += kWarpgroup) {
          const int pixel = i % around;
          stage[i / around * kPitch + pixel + (pixel < before ? 0 : pixels)] = make_uint4(0, 0, 0, 0);
        }
        if (!inside) {
          for (int i = threadIdx.x; i < groups * pixels; i += kWarpgroup)
            stage[i / pixels * kPitch + before + i % pixels] = make_uint4(0, 0, 0, 0);
          pipeline.producer_commit(next);
        } else {
          if (around) publish_shared();
          uint64_t* const full = pipeline.full + next.stage;
          // A thread announces all bytes that it brings before the first of them may come.
          const int left = groups - int(threadIdx.x);
          arrive(full, left > 0 ? ceil_div(left, kWarpgroup) * pixels * 16 : 0);
          for (int group = threadIdx.x; group < groups; group += kWarpgroup) {
            const int64_t at = ((int64_t(place.n) * groups + group) * args.H + row) * width + from;
            copy_bulk(stage + group * kPitch + before, args.source.g + at, pixels * 16, full);
          }
        }
        next.advance();
      }
    }
  }

#endif
};

}  // namespace conv

namespace grad {

// Does a mainloop take units of g as they lie?
template <class Build, class Choice = InputMainloop<Build, PackedGradient>>
constexpr bool kOfWholeUnits =
    Choice::kBySm90 || Choice::Loop::kChannelGroups == ceil_div(Build::Filter::kOut, 8);

// dx, of g in units under their scales.
template <class Build>
void input_of_units(Out<typename Build::value_t> dx, const uint4* units, const Scales& scales,
                    In<typename Build::value_t> weight, cudaStream_t stream) {
  using Filter = typename Build::Filter;
  using Choice = InputMainloop<Build, PackedGradient>;
  using Loop = typename Choice::Loop;
  static_assert(kOfWholeUnits<Build>, "whole units");
  Build::check(dx, weight);
  const int64_t N = dx.size(0), H = dx.size(2), W = dx.size(3);
  const int64_t height = H - Filter::kHeight + 1, width = W - Filter::kWidth + 1;
  if (N == 0) return;
  const Scratch<uint32_t> sample_exponents(N, stream);
  if (Build::Operands::kScaled) exponents_kernel<<<1, 128, 0, stream>>>(sample_exponents, scales, N);
  const Scratch<int32_t> exponents(Loop::kPaddedOut, stream);
  const Scratch<uint4> packed_weight(Loop::kPackedWeights, stream);
  pack_weight<Loop>(packed_weight, exponents, nullptr, weight, 0, stream);
  const PackedGradient source{units, ceil_div(Filter::kOut, 8)};
  const typename Loop::Arguments args{{dx}, {}, source, packed_weight, exponents, sample_exponents,
                                      {},   N,  height, width};
  if constexpr (Choice::kBySm90) {
    expect(N * H * ((W + kTileWidth - 1) / kTileWidth) < kMostCounted && height * width < kMostCounted,
           "sizes that are compiled for");
    convolve_rows<Loop>(args, stream);
  } else {
    convolve_packed<Loop>(args, units, stream);
  }
}

// dx, of g (packed_size) in units.
template <class Build>
void packed_input(Out<typename Build::value_t> dx, In<typename Build::value_t> g,
                  In<typename Build::value_t> weight, cudaStream_t stream) {
  using value_t = typename Build::value_t;
  using Filter = typename Build::Filter;
  static_assert(Filter::kOut % 8 == 0, "whole units");
  const int64_t N = dx.size(0), S = (dx.size(2) - Filter::kHeight + 1) * (dx.size(3) - Filter::kWidth + 1);
  expect(g.numel() == packed_size<value_t>(N, Filter::kOut, S), "g in units");
  value_t* const given = const_cast<value_t*>(g.data);
  const Scales scales = scales_of(given, N, Filter::kOut, S);
  input_of_units<Build>(dx, reinterpret_cast<const uint4*>(given), scales, weight, stream);
}

}  // namespace grad
