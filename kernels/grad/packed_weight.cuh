// The gradient of a convolution's weight, grad/wide_weight.cuh, from operands that are packed: whatever made
// g, and whatever x is, they are copied to the stages as they lie, and nobody converts them.
//
// Of images and of volumes, whose planes are images: a block has the taps of one plane of the filter, or of a
// few. x is packed with the zeros that are around it. x, and g where it isn't packed yet, come in planes or
// channels last, each as it lies; so goes dweight.
//
// Positions go by in strips of rows; of short rows, on 9.0, in lines (grad/packed_lines.cuh).
//
// Samples have scales of their own. Sums are under that of the sample at hand, and are multiplied by a power
// of two where the next one has another.
//
// Bytes at (128, 64, 128, 128), 3×3, 128 channels out: 520 MB of g and twice 268 MB of x, the second time
// mostly from the L2 cache. Bound: 300 GFLOP 0.34 ms by wgmma, memory 0.24 ms; and before, 537 MB of x read
// and 268 MB written, 0.2 ms.
#pragma once
#include "conv/stream_views.cuh"
#include "conv/wide.cuh"
#include "grad/packed_last.cuh"
#include "grad/packed_lines.cuh"

namespace grad {

// How a tensor lies; g alone may be packed already, in units of one part. The launcher's array of one that
// lies kLast is (N, …, C).
enum class Lies { kUnits, kPlanes, kLast };
template <Lies kG_, Lies kX_, Lies kWeight_> struct Lying {
  static constexpr Lies kG = kG_, kX = kX_, kWeight = kWeight_;
};

// x, to be packed.
template <class Filter, class Operands> struct PackedInput : Operands {
  static constexpr int kChannelsIn = Filter::kIn, kChannelGroups = ceil_div(Filter::kIn, 8);
};

template <class Filter, class Operands, class Target, class Source>
struct PackedWeightSm90 : PackedStages<Filter, WideWeightSm90<Filter, Operands, Target, Source>> {
  using Base = PackedStages<Filter, WideWeightSm90<Filter, Operands, Target, Source>>;
  using Base::kBlocks, Base::kBlockThreads, Base::kConsumerRegisters, Base::kConsumerTaps,
      Base::kOperandBytes, Base::kProducerRegisters, Base::kSlot, Base::kSlots, Base::kSplit, Base::kStage,
      Base::kStages, Base::kTail, Base::kTailPixels, Base::kThreadSums;
  using typename Base::BlockPlace;
  static constexpr int kAhead = Source::kAhead, kGroupWarps = kWarps / 2;
  // Operands, zeros, barriers, and each stage's word.
  static constexpr int kSharedBytes = kOperandBytes + kTailPixels * 16 + kStages * (2 * 8 + 4);
  static constexpr bool fits(int room) { return !kSplit && kSharedBytes <= room; }

#if TENSOR_CORE_WGMMA

  using typename Base::StepPipeline, typename Base::Walk;

  // Copies a warp's channel groups of g, or of x, to the stages.
  template <bool kOfGradient>
  static __device__ __forceinline__ void produce(Walk& walk, const StepPipeline& pipeline, uint4* operands) {
    constexpr int kPlaces = kOfGradient ? kStages : kSlots, kPitch = kOfGradient ? kStage : kSlot;
    const int group = threadIdx.x / 32 % kGroupWarps;
    PipelineState<kStages> next, ready;
    // Of the steps that are on their way, the last one last: of g what consumers are told, of x how far
    // across a step is, or -1 where the walk has ended.
    int words[kAhead + 1];
    int place = 0, ready_place = 0;
#pragma unroll
    for (int i = 0; i <= kAhead; i++) words[i] = 0;
    if (walk.goes_on()) walk.start();
#pragma unroll 1
    for (int step = 0;; step++) {
#pragma unroll
      for (int i = 0; i < kAhead; i++) words[i] = words[i + 1];
      words[kAhead] = kOfGradient ? walk.word() : walk.goes_on() ? walk.across() : -1;
      if (words[kAhead - 1] >= 0) {
        pipeline.producer_acquire(next);
        uint4* const to = operands + place * kPitch;
        if (walk.goes_on()) {
#pragma unroll
          for (int i = group; i < kWarps; i += kGroupWarps)
            if constexpr (kOfGradient) Base::copy_gradient(to, walk, i);
            else Base::copy_input(to, walk, i);
          Base::advance(walk);
        }
        next.advance(), place = place + 1 == kPlaces ? 0 : place + 1;
      }
      commit_copies();  // an empty group too, so that a count of pending groups means the same each time
      if (step < kAhead) continue;
      await_copies<kAhead>();
      if (!kOfGradient && kTail > 0 && words[0] > 0 && words[0] % kTailPixels) {
#pragma unroll
        for (int i = group; i < kWarps; i += kGroupWarps)
          Base::StagedInput::store_tails(operands + ready_place * kPitch, i, words[0]);
      }
      if (threadIdx.x == 0) pipeline.pixels[ready.stage] = words[0];
      pipeline.producer_commit(ready);
      if (words[0] < 0) return;
      ready.advance(), ready_place = ready_place + 1 == kPlaces ? 0 : ready_place + 1;
    }
  }

  static __device__ __forceinline__ void run(float* partial, const Source& source, int64_t N, int64_t H,
                                             int64_t W) {
    extern __shared__ uint4 shared[];
    uint4* const gradients = shared + kSlots * kSlot;
    uint4* const zeros = gradients + kStages * kStage;
    const StepPipeline pipeline(zeros + kTailPixels);
    for (int i = threadIdx.x; i < kTailPixels; i += kBlockThreads) zeros[i] = make_uint4(0, 0, 0, 0);
    publish_shared();
    if (threadIdx.x == 0) pipeline.initialize(kThreads);
    const int common = Base::common_exponent(source, N);
    __syncthreads();  // the barriers are there
    if (threadIdx.x < kThreads) {
      give_registers_but<kProducerRegisters>();
      const Strips strips(H - Base::kKernelH + 1, W - Base::kKernelW + 1);
      const int64_t count = strips.count(N * source.planes);
      const BlockPlace place(blockIdx.y);
      Walk walk{source,
                strips,
                place,
                common,
                H,
                W,
                count * (blockIdx.x + 1) / gridDim.x,
                count * blockIdx.x / gridDim.x};
      if (threadIdx.x < kThreads / 2) produce<true>(walk, pipeline, gradients);
      else produce<false>(walk, pipeline, shared);
    } else {
      Base::consume(partial, pipeline, shared);
    }
  }

#else

  static __device__ __forceinline__ void run(float*, const Source&, int64_t, int64_t, int64_t) {}

#endif
};

template <class Filter, class Operands, class Target, class Source>
struct PackedWeightSm80 : PackedStages<Filter, WideWeightSm80<Filter, Operands, Target, Source>> {
  using Base = PackedStages<Filter, WideWeightSm80<Filter, Operands, Target, Source>>;
  using Base::kBlocks, Base::kBlockTaps, Base::kChannelsIn, Base::kInputPitch, Base::kOutTiles, Base::kSlot,
      Base::kSlots, Base::kStage, Base::kStages, Base::kTapRows, Base::kThreadSums;
  using typename Base::BlockPlace;

#if __CUDA_ARCH__ >= 800

  using typename Base::Walk;

  static __device__ __forceinline__ void run(float* partial, const Source& source, int64_t N, int64_t H,
                                             int64_t W) {
    extern __shared__ uint4 shared[];
    uint4* const gradients = shared + kSlots * kSlot;
    const int common = Base::common_exponent(source, N);
    const Strips strips(H - Base::kKernelH + 1, W - Base::kKernelW + 1);
    const int64_t count = strips.count(N * source.planes);
    const BlockPlace place(blockIdx.y);
    Walk walk{source,
              strips,
              place,
              common,
              H,
              W,
              count * (blockIdx.x + 1) / gridDim.x,
              count * blockIdx.x / gridDim.x};
    if (walk.goes_on()) walk.start();
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    // As WideWeightSm80's.
    const uint32_t gradient_address =
        shared_address(gradients) + 16 * (lane / 8 % 2 * kStrip + lane / 16 * 8 + lane % 8);
    const uint32_t input_address = shared_address(shared) + 16 * (warp * kInputPitch + lane % 16 + lane / 16);
    float sums[kBlockTaps][kOutTiles][4] = {};
    OwnScale<kBlockTaps * kOutTiles> scale;
    const auto copy = [&](int step) {
      const int word = walk.word();
      if (walk.goes_on()) {
        Base::copy_gradient(gradients + step % kStages * kStage, walk, warp);
        Base::copy_input(shared + step % kSlots * kSlot, walk, warp);
        Base::advance(walk);
      }
      commit_copies();
      return word;
    };
    int word = copy(0);
#pragma unroll 1
    for (int step = 0; word >= 0; step++) {
      await_copies<0>();
      __syncthreads();  // the step's operands are there; and everyone is done with the last step
      const int next = copy(step + 1);
      uint32_t rows[kTapRows];
#pragma unroll
      for (int r = 0; r < kTapRows; r++) rows[r] = input_address + 16 * kSlot * Base::slot_of(step, r);
      const int pixels = scale.pixels(word, &sums[0][0]);
      if (place.has(warp * 8))
        Base::multiply(sums, gradient_address + 16 * kStage * (step % kStages), rows, pixels);
      word = next;
    }
    scale.undo(&sums[0][0]);
    float* to = partial + (int64_t(blockIdx.x) * kBlocks + blockIdx.y) * kThreadSums * kThreads + threadIdx.x;
#pragma unroll
    for (int i = 0; i < kThreadSums; i++)
      to[i * kThreads] = sums[i / 4 / kOutTiles][i / 4 % kOutTiles][i % 4];
  }

#endif
};

template <class Loop>
__global__ void __launch_bounds__(Loop::kBlockThreads, 1)
    packed_weight_kernel(float* partial, typename Loop::Source source, int64_t N, int64_t H, int64_t W) {
#if __CUDA_ARCH__ >= 800
  Loop::run(partial, source, N, H, W);
#endif
}

// As place_of_tap, in filters channels last.
template <class Loop>
__device__ __forceinline__ int64_t last_place_of_tap(int64_t plane, int row, int column) {
  const int64_t of_channel = plane / Loop::kKernelD, out = of_channel / Loop::kChannelsIn,
                depth = plane - of_channel * Loop::kKernelD;
  const int64_t tap = ((out * Loop::kKernelD + depth) * Loop::kKernelH + row) * Loop::kKernelW + column;
  return tap * Loop::kChannelsIn + of_channel - out * Loop::kChannelsIn;
}

// dweight, from the partial sums of all splits. Grid: sums of a thread, kBlocks.
template <class Loop, bool kLast>
__global__ void __launch_bounds__(kThreads)
    merge_packed_kernel(typename Loop::value_t* dweight, const float* partial, typename Loop::Source source,
                        int64_t splits, int64_t N) {
#if __CUDA_ARCH__ >= 800
  const auto place_of = [](int64_t plane, int row, int column) {
    return kLast ? last_place_of_tap<Loop>(plane, row, column) : place_of_tap<Loop>(plane, row, column);
  };
  merge_splits<Loop>(dweight, partial, splits, place_of, [&] { return Loop::common_exponent(source, N); });
#endif
}

constexpr int64_t kMostUnits =
    1 << 30;  // of a sample: what goes through them in int goes on a little behind them

// Along an axis: x with what is around it, and g.
template <class Filter, class Around, Lies kX> struct PackedSizes {
  int64_t of_x[3] = {1, 1, 1}, of_g[3] = {1, 1, 1};  // planes, rows, columns
  conv::Lattice at{};
  template <class T> explicit PackedSizes(const In<T>& x) {
    constexpr int kDims = Filter::kDims, kFirst = kX == Lies::kLast ? 1 : 2;
    for (int i = 0; i < kDims; i++) {
      const int axis = 3 - kDims + i;
      of_x[axis] = x.size(kFirst + i) + 2 * Around::kBefore[i],
      of_g[axis] = of_x[axis] - Filter::kExtent[i] + 1;
      at.before[axis] = Around::kBefore[i], at.extents[axis] = int(x.size(kFirst + i));
    }
    conv::expect(x.dims == kDims + 2 && x.size(kX == Lies::kLast ? -1 : 1) == Filter::kIn,
                 "the channels that are compiled for");
    if (kDims == 2) at.extents[0] = 1;
    conv::expect(of_g[0] > 0 && of_g[1] > 0 && of_g[2] > 0, "an image as large as the filter at least");
    conv::expect(of_x[0] * of_x[1] * of_x[2] * ((Filter::kIn + 7) / 8) <= kMostUnits,
                 "a sample that is counted in int");
    at.row = int(of_x[2]), at.plane = int(of_x[1] * of_x[2]), at.sample = int(of_x[0] * of_x[1] * of_x[2]);
  }
  int64_t positions() const { return of_g[0] * of_g[1] * of_g[2]; }
  // Of g, which nothing is around.
  conv::Lattice of_result() const {
    return {int(of_g[2]),
            int(of_g[1] * of_g[2]),
            int(positions()),
            0,
            {},
            {int(of_g[0]), int(of_g[1]), int(of_g[2])}};
  }
};

template <class Filter, class Operands, class Target, class Source, class Cut> struct PackedLoop {
  using Sm90 = PackedWeightSm90<Filter, Operands, Target, Source>;
  static constexpr bool kBySm90 = Target::kCapability == 90 && Sm90::fits(Target::kSharedLimit);
  using Loop = std::conditional_t<kBySm90, Sm90, PackedWeightSm80<Filter, Operands, Target, Source>>;
};
template <class Filter, class Operands, class Target, class Source, int kLater>
struct PackedLoop<Filter, Operands, Target, Source, Lines<kLater>> {
  static_assert(Target::kCapability == 90, "lines go by wgmma");
  using Loop = PackedLinesSm90<Filter, Operands, Target, Source, kLater>;
};

// dweight, of g and x in units, of which that many parts a value has.
template <class Build, class Lying, class Cut, class Scales, class Sizes>
void of_units(const Out<typename Build::value_t>& dweight, const uint4* g, const Scales& scales,
              const uint4* x, const conv::Scales<Finite<typename Build::Operands>>& input_scales,
              const Sizes& sizes, cudaStream_t stream) {
  using Filter = typename Build::Filter;
  using Source = Packed<typename Build::Operands, Filter::kOut, Scales>;
  using Loop =
      typename PackedLoop<Filter, typename Build::Operands, typename Build::Target, Source, Cut>::Loop;
  constexpr bool kLast = Lying::kWeight == Lies::kLast;
  if constexpr (Cut::kLines)
    conv::expect((Loop::kTapRows - 1) * sizes.of_g[2] <= Cut::kLater * kStrip,
                 "rows as short as is compiled for");
  conv::expect(dweight.numel() == Filter::kOut * Filter::kIn * Filter::kTaps,
               "the filter that is compiled for");
  const int64_t N = input_scales.N, H = sizes.of_x[1], W = sizes.of_x[2];
  const Source source{g, x, scales, input_scales, int(sizes.of_g[0]), int(sizes.of_x[0])};
  // A block fills a multiprocessor.
  const int64_t most = device_attribute(cudaDevAttrMultiProcessorCount) / Loop::kBlocks;
  const int64_t steps = Loop::count(N * sizes.of_g[0], sizes.of_g[1], sizes.of_g[2]);
  const int64_t splits = std::max<int64_t>(1, std::min(most, steps));
  const Scratch<float> partial(splits * Loop::kBlocks * Loop::kThreadSums * kThreads, stream);
  allow_shared<packed_weight_kernel<Loop>>();
  const dim3 grid(splits, Loop::kBlocks), merged(Loop::kThreadSums, Loop::kBlocks);
  packed_weight_kernel<Loop>
      <<<grid, Loop::kBlockThreads, Loop::kSharedBytes, stream>>>(partial, source, N, H, W);
  merge_packed_kernel<Loop, kLast><<<merged, kThreads, 0, stream>>>(dweight, partial, source, splits, N);
}

// Packs x as it lies. scales: zeros.
template <class Build, class Around, Lies kX>
void pack_x(uint4* packed, const conv::Scales<Finite<typename Build::Operands>>& scales,
            const In<typename Build::value_t>& x, const conv::Lattice& at, cudaStream_t stream) {
  using Operands = typename Build::Operands;
  using OfX = conv::Views<typename Build::Filter, Finite<Operands>>;
  if constexpr (kX == Lies::kLast) pack_last(PackedLast<OfX>{packed, scales, x, at}, stream);
  else if constexpr (Around::kAny || Operands::kSplit) conv::pack_views<OfX>(packed, scales, x, at, stream);
  else
    conv::pack_input<PackedInput<typename Build::Filter, Operands>>(packed, scales.largest, x, scales.N,
                                                                    at.sample, stream);
}

// dweight, of g in units of one part or several, and of x as it lies.
template <class Build, class Around, class Lying, class Cut, class Scales>
void of_units(const Out<typename Build::value_t>& dweight, const uint4* g, const Scales& scales,
              const In<typename Build::value_t>& x,
              const PackedSizes<typename Build::Filter, Around, Lying::kX>& sizes, cudaStream_t stream) {
  using Operands = Finite<typename Build::Operands>;
  const int64_t N = x.size(0);
  const Scratch<uint32_t> magnitudes(N, stream);
  const Scratch<uint4> packed(N * conv::Views<typename Build::Filter, Operands>::kUnits * sizes.at.sample,
                              stream);
  const conv::Scales<Operands> of_x{magnitudes, N};
  cudaMemsetAsync(magnitudes, 0, N * sizeof(uint32_t), stream);
  pack_x<Build, Around, Lying::kX>(packed, of_x, x, sizes.at, stream);
  of_units<Build, Lying, Cut>(dweight, g, scales, packed, of_x, sizes, stream);
}

// dweight, of g as it lies: packed_size in units of one part, or a tensor.
template <class Build, class Around, class Lying, class Cut>
void packed_weight(const Out<typename Build::value_t>& dweight, const In<typename Build::value_t>& g,
                   const In<typename Build::value_t>& x, cudaStream_t stream) {
  using value_t = typename Build::value_t;
  using Filter = typename Build::Filter;
  using Operands = typename Build::Operands;
  using OfX = conv::Views<Filter, Finite<Operands>>;
  using OfG = conv::Views<conv::Filter<Filter::kOut, 1, 1, 1>, Finite<OfGradient<Operands>>>;
  static_assert(Filter::kOut % 8 == 0, "whole units");
  const PackedSizes<Filter, Around, Lying::kX> sizes(x);
  const int64_t N = x.size(0), positions = sizes.positions();
  if constexpr (Lying::kG == Lies::kUnits) {
    static_assert(!Operands::kSplit, "units are of one part");
    conv::expect(g.numel() == packed_size<value_t>(N, Filter::kOut, positions), "g in units");
    value_t* const given = const_cast<value_t*>(g.data);
    of_units<Build, Around, Lying, Cut>(dweight, reinterpret_cast<const uint4*>(given),
                                        scales_of(given, N, Filter::kOut, positions), x, sizes, stream);
  } else {
    conv::expect(g.numel() == N * Filter::kOut * positions && positions * (Filter::kOut / 8) <= kMostUnits,
                 "g of the result's sizes");
    const Scratch<uint32_t> magnitudes(3 * N, stream);  // of x; of g, and of what is seen of it
    const Scratch<uint4> packed_x(N * OfX::kUnits * sizes.at.sample, stream),
        packed_g(N * OfG::kUnits * positions, stream);
    const conv::Scales<Finite<Operands>> of_x{magnitudes, N};
    const conv::Scales<Finite<OfGradient<Operands>>> scales{magnitudes + N, N};
    const conv::Lattice at = sizes.of_result();
    cudaMemsetAsync(magnitudes, 0, 3 * N * sizeof(uint32_t), stream);
    if constexpr (Lying::kG == Lies::kLast && Lying::kX == Lies::kLast) {
      pack_both_last(PackedLast<OfG>{packed_g, scales, g, at}, PackedLast<OfX>{packed_x, of_x, x, sizes.at},
                     stream);
    } else {
      if constexpr (Lying::kG == Lies::kLast) pack_last(PackedLast<OfG>{packed_g, scales, g, at}, stream);
      else conv::pack_views<OfG>(packed_g, scales, g, at, stream);
      pack_x<Build, Around, Lying::kX>(packed_x, of_x, x, sizes.at, stream);
    }
    of_units<Build, Lying, Cut>(dweight, packed_g, scales, packed_x, of_x, sizes, stream);
  }
}

}  // namespace grad
