// The gradient of a convolution's weight, grad/wide_weight.cuh, from operands that are packed: whatever made
// g, and whatever x is, they are copied to the stages as they lie, and nobody converts them.
//
// Of images and of volumes, whose planes are images: a block has the taps of one plane of the filter, or of a few.
// x is packed with the zeros that are around it.
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
#include "grad/packed.cuh"
#include "grad/wide_weight.cuh"

namespace grad {

// So many powers of two are left for the sums of samples with larger products. A sample whose products are smaller
// yet counts as if its largest were 2^-60 of the largest of all.
constexpr int kMostSlack = 60;

// The scale of sums: that of the sample at hand, 2^slack of what is common to all.
template <int kTiles> struct OwnScale {
  int slack = 0;
  // What a step says: its pixels, and above them the slack.
  static __device__ __forceinline__ int word(int pixels, int slack) { return pixels | slack << 8; }
  __device__ __forceinline__ int pixels(int said, float (*sums)[4]) {
    if (said >> 8 != slack) to(said >> 8, sums);
    return said & 0xff;
  }
  __device__ __forceinline__ void undo(float (*sums)[4]) { if (slack) to(0, sums); }

 private:
  __device__ __forceinline__ void to(int next, float (*sums)[4]) {
    const float factor = power_of_two(next - slack);
    slack = next;
#if TENSOR_CORE_WGMMA
    hold(*reinterpret_cast<float (*)[kTiles][4]>(sums));
#endif
#pragma unroll
    for (int i = 0; i < kTiles * 4; i++) sums[i / 4][i % 4] *= factor;
  }
};

// A source: g (N, parts, kOut, planes, H', W') and x (N, parts, kIn, input_planes, H, W) in units, and their scales.
template <class Operands, int kOut_, class Scales> struct Packed {
  struct Strip {};
  struct Tail {};
  static constexpr int kStages = 6, kOut = kOut_;
  template <int kTiles> using SumScale = OwnScale<kTiles>;
  const uint4 *g, *x;
  Scales scales;
  conv::Scales<Finite<Operands>> input_scales;
  int planes, input_planes;
  static constexpr int kAhead = kStages - 2;  // steps: one is in use, and one is ready

  // What samples' products are scaled by.
  __device__ __forceinline__ int exponent(int64_t n) const {
    return input_scales.last(n) + scales.last(n);
  }
};

// x, to be packed.
template <class Filter, class Operands> struct PackedInput : Operands {
  static constexpr int kChannelsIn = Filter::kIn, kChannelGroups = ceil_div(Filter::kIn, 8);
};

// Either mainloop's walk and copies.
template <class Filter, class Base> struct PackedStages : Base {
  using Source = typename Base::Source;
  using typename Base::value_t;
  using Base::kBlock, Base::kChannelsIn, Base::kChannelsOut, Base::kInputPitch, Base::kKernelW, Base::kParts,
      Base::kScaled, Base::kTapColumns;
  static constexpr int kGroupsOut = ceil_div(kChannelsOut, 8), kGroupsIn = ceil_div(kChannelsIn, 8);

  // Of a volume's few channels in a block has those that kBeside planes of the filter meet, side by side, kOfPlane
  // of each: 2 of 24 for 20 channels.
  static constexpr int kKernelD = Filter::kDepth, kFitting = std::max(1, kBlock / (kGroupsIn * 8));
  static constexpr int kBeside = std::min(kFitting, kKernelD), kOfPlane = kBeside > 1 ? kGroupsIn * 8 : kBlock;
  static constexpr int kPlaneGroups = ceil_div(kKernelD, kBeside), kBlocks = Base::kBlocks * kPlaneGroups;

  struct BlockPlace : Base::BlockPlace {
    int kernel_plane;  // the first
    __device__ __forceinline__ explicit BlockPlace(int block)
        : Base::BlockPlace(block / kPlaneGroups), kernel_plane(block % kPlaneGroups * kBeside) {}
    // Does the block's channel `in` exist?
    __device__ __forceinline__ bool has(int in) const {
      return this->channel_in + in % kOfPlane < kChannelsIn && in < kBeside * kOfPlane &&
             kernel_plane + in / kOfPlane < kKernelD;
    }
  };
  static __device__ __forceinline__ int64_t plane_of(const BlockPlace& place, const SumPlace& sum) {
    const int out = place.channel_out + sum.out, in = place.channel_in + sum.in % kOfPlane;
    if (out >= kChannelsOut || !place.has(sum.in)) return -1;
    return (int64_t(out) * kChannelsIn + in) * kKernelD + place.kernel_plane + sum.in / kOfPlane;
  }

#if __CUDA_ARCH__ >= 800

  // The least of all samples' exponents, to all threads of the block; samples of zeros don't count, and where
  // there are no others it is 0.
  static __device__ __forceinline__ int common_exponent(const Source& source, int64_t N) {
    if constexpr (!kScaled) return 0;
    __shared__ int negative;
    if (threadIdx.x == 0) negative = -255;  // less than any
    __syncthreads();  // set before anyone raises it
    for (int64_t n = threadIdx.x; n < N; n += blockDim.x)
      if (source.input_scales.largest[n] && source.scales.largest[n]) atomicMax(&negative, -source.exponent(n));
    __syncthreads();  // complete before anyone reads it
    return negative == -255 ? 0 : -negative;
  }

  // As WideWeight's Walk.
  struct Walk {
    const Source& source;
    const Strips& strips;  // of g's planes
    const BlockPlace& place;
    const int common;
    const int64_t H, W, end;  // of x's planes
    int64_t tile;
    int slack = 0;
    int pixels, row, first, stop;
    const uint4 *g, *x;  // where the step's rows begin, of the block's first channel group

    __device__ __forceinline__ bool goes_on() const { return tile < end; }
    __device__ __forceinline__ bool ahead() const { return row < first; }
    __device__ __forceinline__ int across() const { return min(pixels, kStrip); }
    // What consumers are told of the step.
    __device__ __forceinline__ int word() const {
      return !goes_on() ? -1 : OwnScale<1>::word(ahead() ? 0 : across(), slack);
    }
    __device__ __forceinline__ void start() {
      const StripPlace at = Base::start_column(*this);  // n: the plane, of all
      const int64_t n = at.n / source.planes, plane = at.n - n * source.planes;
      if constexpr (kScaled) {
        const bool counts = source.input_scales.largest[n] && source.scales.largest[n];
        slack = counts ? max(0, min(source.exponent(n) - common, kMostSlack)) : slack;
      }
      const int64_t of_g = (n * kParts * kGroupsOut + place.channel_out / 8) * source.planes + plane;
      const int64_t of_x = (n * kParts * kGroupsIn + place.channel_in / 8) * source.input_planes + plane + place.kernel_plane;
      g = source.g + (of_g * strips.height + at.row) * strips.width + at.column;
      x = source.x + (of_x * H + first + place.kernel_row) * W + at.column + place.kernel_column;
    }
    __device__ __forceinline__ void next_row() { g += strips.width; }
  };

  // A channel group of the step's g, on its way to a stage: zeros past the end of the row.
  static __device__ __forceinline__ void copy_gradient(uint4* stage, const Walk& walk, int group) {
    if (walk.ahead() || walk.place.channel_out + group * 8 >= kChannelsOut) return;
    const int lane = threadIdx.x % 32;
    const int64_t pitch = int64_t(walk.source.planes) * walk.strips.height * walk.strips.width;
#pragma unroll
    for (int part = 0; part < kParts; part++) {
      const uint4* const from = walk.g + (part * kGroupsOut + group) * pitch;
      uint4* const to = stage + (part * kWarps + group) * kStrip;
#pragma unroll
      for (int i = lane; i < kStrip; i += 32)
        copy_async_or_zero(to + i, i < walk.pixels ? from + i : walk.source.g, i < walk.pixels);
    }
  }
  // Likewise of x, to a slot. Past the end of the row its values may be anything.
  static __device__ __forceinline__ void copy_input(uint4* slot, const Walk& walk, int group) {
    if (!walk.place.has(group * 8)) return;
    const int real = min(walk.pixels + kKernelW - 1 - walk.place.kernel_column, kStrip + kTapColumns - 1);
    const int of_plane = group * 8 % kOfPlane / 8, plane = group * 8 / kOfPlane;  // behind the block's first
#pragma unroll
    for (int part = 0; part < kParts; part++) {
      const int64_t before = int64_t(part * kGroupsIn + of_plane) * walk.source.input_planes + plane;
      const uint4* const from = walk.x + before * walk.H * walk.W;
      uint4* const to = slot + (part * kWarps + group) * kInputPitch;
#pragma unroll
      for (int i = threadIdx.x % 32; i < kInputPitch; i += 32)
        if (i < real) copy_async<16>(to + i, from + i);
    }
  }

#endif
};

template <class Filter, class Operands, class Target, class Source>
struct PackedWeightSm90 : PackedStages<Filter, WideWeightSm90<Filter, Operands, Target, Source>> {
  using Base = PackedStages<Filter, WideWeightSm90<Filter, Operands, Target, Source>>;
  using typename Base::BlockPlace;
  using Base::kBlocks, Base::kBlockThreads, Base::kConsumerRegisters, Base::kConsumerTaps, Base::kOperandBytes,
      Base::kProducerRegisters, Base::kSlot, Base::kSlots, Base::kSplit, Base::kStage, Base::kStages,
      Base::kTail, Base::kTailPixels, Base::kThreadSums;
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
    // Of the steps that are on their way, the last one last: of g what consumers are told, of x how far across
    // a step is, or -1 where the walk has ended.
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
      Walk walk{source, strips, place, common, H, W, count * (blockIdx.x + 1) / gridDim.x,
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
  using typename Base::BlockPlace;
  using Base::kBlocks, Base::kBlockTaps, Base::kChannelsIn, Base::kInputPitch, Base::kOutTiles, Base::kSlot,
      Base::kSlots, Base::kStage, Base::kStages, Base::kTapRows, Base::kThreadSums;

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
    Walk walk{source, strips, place, common, H, W, count * (blockIdx.x + 1) / gridDim.x,
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

// dweight, from the partial sums of all splits. Grid: sums of a thread, kBlocks.
template <class Loop>
__global__ void __launch_bounds__(kThreads)
merge_packed_kernel(typename Loop::value_t* dweight, const float* partial, typename Loop::Source source,
                    int64_t splits, int64_t N) {
#if __CUDA_ARCH__ >= 800
  merge_splits<Loop>(dweight, partial, splits, [&] { return Loop::common_exponent(source, N); });
#endif
}

constexpr int64_t kMostUnits = 1 << 30;  // of a sample: what goes through them in int goes on a little behind them

// Along an axis: x with what is around it, and g.
template <class Filter, class Around> struct PackedSizes {
  int64_t of_x[3] = {1, 1, 1}, of_g[3] = {1, 1, 1};  // planes, rows, columns
  conv::Lattice at{};
  template <class T> explicit PackedSizes(const In<T>& x) {
    constexpr int kDims = Filter::kDims;
    for (int i = 0; i < kDims; i++) {
      const int axis = 3 - kDims + i;
      of_x[axis] = x.size(2 + i) + 2 * Around::kBefore[i], of_g[axis] = of_x[axis] - Filter::kExtent[i] + 1;
      at.before[axis] = Around::kBefore[i], at.extents[axis] = int(x.size(2 + i));
    }
    if (kDims == 2) at.extents[0] = 1;
    conv::expect(of_g[0] > 0 && of_g[1] > 0 && of_g[2] > 0, "an image as large as the filter at least");
    conv::expect(of_x[0] * of_x[1] * of_x[2] * ((Filter::kIn + 7) / 8) <= kMostUnits, "a sample that is counted in int");
    at.row = int(of_x[2]), at.plane = int(of_x[1] * of_x[2]), at.sample = int(of_x[0] * of_x[1] * of_x[2]);
  }
  int64_t positions() const { return of_g[0] * of_g[1] * of_g[2]; }
  // Of g in planes, packed as it lies.
  conv::Lattice as_it_lies() const {
    return {int(of_g[2]), int(of_g[1] * of_g[2]), int(positions()), 0, {}, {int(of_g[0]), int(of_g[1]), int(of_g[2])}};
  }
};

// dweight, of g in units, of which that many parts a value has (N, parts, ⌈kOut / 8⌉, positions), and of x.
template <class Build, class Around, class Scales>
void of_units(const Out<typename Build::value_t>& dweight, const uint4* g, const Scales& scales,
              const In<typename Build::value_t>& x, const PackedSizes<typename Build::Filter, Around>& sizes, cudaStream_t stream) {
  using Filter = typename Build::Filter;
  using Operands = typename Build::Operands;
  using Target = typename Build::Target;
  using Input = PackedInput<Filter, Operands>;
  using Source = Packed<Operands, Filter::kOut, Scales>;
  using Sm90 = PackedWeightSm90<Filter, Operands, Target, Source>;
  constexpr bool kBySm90 = Target::kCapability == 90 && Sm90::fits(Target::kSharedLimit);
  using Loop = std::conditional_t<kBySm90, Sm90, PackedWeightSm80<Filter, Operands, Target, Source>>;
  conv::expect(x.dims == Filter::kDims + 2 && x.size(1) == Filter::kIn && dweight.numel() == Filter::kOut * Filter::kIn * Filter::kTaps,
               "the channels and the filter that are compiled for");
  const int64_t N = x.size(0), H = sizes.of_x[1], W = sizes.of_x[2];
  const Scratch<uint32_t> largest_x(N, stream);
  const Scratch<uint4> packed_x(N * Input::kChannelGroups * Operands::kParts * sizes.at.sample, stream);
  const conv::Scales<Finite<Operands>> input_scales{largest_x, N};
  cudaMemsetAsync(largest_x, 0, N * sizeof(uint32_t), stream);
  if constexpr (Around::kAny || Operands::kSplit) {
    conv::pack_views<conv::Views<Filter, Finite<Operands>>>(packed_x, input_scales, x, sizes.at, stream);
  } else {
    pack_input<Input>(packed_x, largest_x, x, N, sizes.at.sample, stream);
  }
  const Source source{g, packed_x, scales, input_scales, int(sizes.of_g[0]), int(sizes.of_x[0])};
  // A block fills a multiprocessor.
  const int64_t most = device_attribute(cudaDevAttrMultiProcessorCount) / Loop::kBlocks;
  const int64_t strips = Strips(sizes.of_g[1], sizes.of_g[2]).count(N * sizes.of_g[0]);
  const int64_t splits = std::max<int64_t>(1, std::min(most, strips));
  const Scratch<float> partial(splits * Loop::kBlocks * Loop::kThreadSums * kThreads, stream);
  allow_shared<packed_weight_kernel<Loop>>();
  const dim3 grid(splits, Loop::kBlocks), merged(Loop::kThreadSums, Loop::kBlocks);
  packed_weight_kernel<Loop><<<grid, Loop::kBlockThreads, Loop::kSharedBytes, stream>>>(partial, source, N, H, W);
  merge_packed_kernel<Loop><<<merged, kThreads, 0, stream>>>(dweight, partial, source, splits, N);
}

// dweight, of g (packed_size) in units of one part; or, kOfPlanes, in planes.
template <class Build, class Around, bool kOfPlanes>
void packed_weight(const Out<typename Build::value_t>& dweight, const In<typename Build::value_t>& g,
                   const In<typename Build::value_t>& x, cudaStream_t stream) {
  using value_t = typename Build::value_t;
  constexpr int kOut = Build::Filter::kOut;
  static_assert(kOut % 8 == 0, "whole units");
  const PackedSizes<typename Build::Filter, Around> sizes(x);
  const int64_t N = x.size(0), positions = sizes.positions();
  if constexpr (kOfPlanes) {
    using Operands = Finite<OfGradient<typename Build::Operands>>;
    conv::expect(g.numel() == N * kOut * positions && positions * (kOut / 8) <= kMostUnits, "g of the result's sizes");
    const Scratch<uint32_t> magnitudes(2 * N, stream);
    const Scratch<uint4> units(N * (kOut / 8) * Operands::kParts * positions, stream);
    cudaMemsetAsync(magnitudes, 0, 2 * N * sizeof(uint32_t), stream);
    const conv::Scales<Operands> scales{magnitudes, N};
    conv::pack_views<conv::Views<conv::Filter<kOut, 1, 1, 1>, Operands>>(units, scales, g, sizes.as_it_lies(), stream);
    of_units<Build>(dweight, units, scales, x, sizes, stream);
  } else {
    static_assert(!Build::Operands::kSplit, "units are of one part");
    conv::expect(g.numel() == packed_size<value_t>(N, kOut, positions), "g in units");
    value_t* const given = const_cast<value_t*>(g.data);
    of_units<Build>(dweight, reinterpret_cast<const uint4*>(given), scales_of(given, N, kOut, positions), x, sizes, stream);
  }
}

}  // namespace grad
