// The gradient of a convolution's weight, grad/wide_weight.cuh, from operands that are packed: whatever made
// g, and whatever x is, they are copied to the stages as they lie, and nobody converts them.
//
// Samples have scales of their own. Sums are under that of the sample at hand, and are multiplied by a power
// of two where the next one has another.
//
// Bytes at (128, 64, 128, 128), 3×3, 128 channels out: 520 MB of g and twice 268 MB of x, the second time
// mostly from the L2 cache. Bound: 300 GFLOP 0.34 ms by wgmma, memory 0.24 ms; and before, 537 MB of x read
// and 268 MB written, 0.2 ms.
#pragma once
#include "conv/wide.cuh"
#include "grad/packed.cuh"
#include "grad/wide_weight.cuh"

namespace grad {

constexpr int kMostSlack = 60;  // so many powers of two are left for the sums of samples with larger products

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

// A source: g (N, kOut, H', W') in units, and their Scales.
template <class Operands, int kOut_> struct Packed {
  struct Strip {};
  struct Tail {};
  static constexpr int kStages = 6, kOut = kOut_;
  template <int kTiles> using SumScale = OwnScale<kTiles>;
  const uint4 *g, *x;
  Scales scales;
  const uint32_t* largest_x;
  static constexpr int kAhead = kStages - 2;  // steps: one is in use, and one is ready

  // What samples' products are scaled by.
  __device__ __forceinline__ int exponent(int64_t n) const {
    return Operands::sample_exponent(largest_x[n]) + scales.last_of(n);
  }
};

// x, to be packed.
template <class Filter, class Operands> struct PackedInput : Operands {
  static constexpr int kChannelsIn = Filter::kIn, kChannelGroups = ceil_div(Filter::kIn, 8);
};

// Either mainloop's walk and copies.
template <class Base> struct PackedStages : Base {
  using Source = typename Base::Source;
  using typename Base::BlockPlace, typename Base::value_t;
  using Base::kChannelsIn, Base::kChannelsOut, Base::kInputPitch, Base::kKernelW, Base::kScaled,
      Base::kTapColumns;

#if __CUDA_ARCH__ >= 800

  // The least of all samples' exponents, to all threads of the block; samples of zeros don't count, and where
  // there are no others it is 0.
  static __device__ __forceinline__ int common_exponent(const Source& source, int64_t N) {
    if constexpr (!kScaled) return 0;
    __shared__ int negative;
    if (threadIdx.x == 0) negative = -254;
    __syncthreads();  // set before anyone raises it
    for (int64_t n = threadIdx.x; n < N; n += blockDim.x)
      if (source.largest_x[n] && source.scales.largest[n]) atomicMax(&negative, -source.exponent(n));
    __syncthreads();  // complete before anyone reads it
    return negative == -254 ? 0 : -negative;
  }

  // As WideWeight's Walk.
  struct Walk {
    const Source& source;
    const Strips& strips;
    const BlockPlace& place;
    const int common;
    const int64_t H, W, end;
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
      const StripPlace at = Base::start_column(*this);
      if constexpr (kScaled) {
        const bool counts = source.largest_x[at.n] && source.scales.largest[at.n];
        slack = counts ? max(0, min(source.exponent(at.n) - common, kMostSlack)) : slack;
      }
      const int64_t of_g = at.n * ceil_div(kChannelsOut, 8) + place.channel_out / 8;
      const int64_t of_x = at.n * ceil_div(kChannelsIn, 8) + place.channel_in / 8;
      g = source.g + (of_g * strips.height + at.row) * strips.width + at.column;
      x = source.x + (of_x * H + first + place.kernel_row) * W + at.column + place.kernel_column;
    }
    __device__ __forceinline__ void next_row() { g += strips.width; }
  };

  // A channel group of the step's g, on its way to a stage: zeros past the end of the row.
  static __device__ __forceinline__ void copy_gradient(uint4* stage, const Walk& walk, int group) {
    if (walk.ahead() || walk.place.channel_out + group * 8 >= kChannelsOut) return;
    const int lane = threadIdx.x % 32;
    const uint4* const from = walk.g + int64_t(group) * walk.strips.height * walk.strips.width;
#pragma unroll
    for (int i = lane; i < kStrip; i += 32)
      copy_async_or_zero(stage + group * kStrip + i, i < walk.pixels ? from + i : walk.source.g,
                         i < walk.pixels);
  }
  // Likewise of x, to a slot. Past the end of the row its values may be anything.
  static __device__ __forceinline__ void copy_input(uint4* slot, const Walk& walk, int group) {
    if (walk.place.channel_in + group * 8 >= kChannelsIn) return;
    const int real = min(walk.pixels + kKernelW - 1 - walk.place.kernel_column, kStrip + kTapColumns - 1);
    const uint4* const from = walk.x + int64_t(group) * walk.H * walk.W;
#pragma unroll
    for (int i = threadIdx.x % 32; i < kInputPitch; i += 32)
      if (i < real) copy_async<16>(slot + group * kInputPitch + i, from + i);
  }

#endif
};

template <class Filter, class Operands, class Target>
struct PackedWeightSm90
    : PackedStages<WideWeightSm90<Filter, Operands, Target, Packed<Operands, Filter::kOut>>> {
  using Base = PackedStages<WideWeightSm90<Filter, Operands, Target, Packed<Operands, Filter::kOut>>>;
  using typename Base::BlockPlace, typename Base::Source;
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
    int words[kAhead + 1], across[kAhead + 1];  // of the steps that are on their way, the last one last
    int place = 0, ready_place = 0;
#pragma unroll
    for (int i = 0; i <= kAhead; i++) words[i] = 0, across[i] = 0;
    if (walk.goes_on()) walk.start();
    bool over = false;
#pragma unroll 1
    for (int step = 0;; step++) {
#pragma unroll
      for (int i = 0; i < kAhead; i++) words[i] = words[i + 1], across[i] = across[i + 1];
      words[kAhead] = walk.word(), across[kAhead] = walk.goes_on() ? walk.across() : 0;
      if (!over) {
        pipeline.producer_acquire(next);
        uint4* const to = operands + place * kPitch;
        if (walk.goes_on()) {
#pragma unroll
          for (int i = group; i < kWarps; i += kGroupWarps)
            if constexpr (kOfGradient) Base::copy_gradient(to, walk, i);
            else Base::copy_input(to, walk, i);
          Base::advance(walk);
        } else {
          over = true;
        }
        next.advance(), place = place + 1 == kPlaces ? 0 : place + 1;
      }
      commit_copies();  // an empty group too, so that a count of pending groups means the same each time
      if (step < kAhead) continue;
      await_copies<kAhead>();
      if (!kOfGradient && kTail > 0 && across[0] % kTailPixels) {
#pragma unroll
        for (int i = group; i < kWarps; i += kGroupWarps)
          Base::StagedInput::store_tails(operands + ready_place * kPitch, i, across[0]);
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
      const int64_t count = strips.count(N);
      const BlockPlace place(blockIdx.y);
      Walk walk{source, strips, place, common, H, W, count * (blockIdx.x + 1) / gridDim.x,
                count * blockIdx.x / gridDim.x};
      if (threadIdx.x < kThreads / 2) produce<true>(walk, pipeline, gradients);
      else produce<false>(walk, pipeline, shared);
    } else {
      partial += (int64_t(blockIdx.x) * kBlocks + blockIdx.y) * kThreadSums * kThreads;
      const uint32_t inputs = shared_address(shared), of_gradients = shared_address(gradients);
      if (threadIdx.x < kThreads + kWarpgroup) {
        take_registers_to<kConsumerRegisters[0]>();
        Base::template consume<0>(partial, pipeline, inputs, of_gradients, shared_address(zeros));
      } else {
        take_registers_to<kConsumerRegisters[1]>();
        Base::template consume<kConsumerTaps>(partial, pipeline, inputs, of_gradients, shared_address(zeros));
      }
    }
  }

#else

  static __device__ __forceinline__ void run(float*, const Source&, int64_t, int64_t, int64_t) {}

#endif
};

template <class Filter, class Operands, class Target>
struct PackedWeightSm80
    : PackedStages<WideWeightSm80<Filter, Operands, Target, Packed<Operands, Filter::kOut>>> {
  using Base = PackedStages<WideWeightSm80<Filter, Operands, Target, Packed<Operands, Filter::kOut>>>;
  using typename Base::BlockPlace, typename Base::Source;
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
    const int64_t count = strips.count(N);
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
      if (place.channel_in + warp * 8 < kChannelsIn)
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

// dweight, of g (packed_size) in units and of x.
template <class Build>
void packed_weight(Out<typename Build::value_t> dweight, In<typename Build::value_t> g,
                   In<typename Build::value_t> x, cudaStream_t stream) {
  using value_t = typename Build::value_t;
  using Filter = typename Build::Filter;
  using Operands = typename Build::Operands;
  using Target = typename Build::Target;
  using Input = PackedInput<Filter, Operands>;
  using Sm90 = PackedWeightSm90<Filter, Operands, Target>;
  constexpr bool kBySm90 = Target::kCapability == 90 && Sm90::fits(Target::kSharedLimit);
  using Loop = std::conditional_t<kBySm90, Sm90, PackedWeightSm80<Filter, Operands, Target>>;
  Build::check(x, dweight);
  const int64_t N = x.size(0), H = x.size(2), W = x.size(3);
  const int64_t height = H - Filter::kHeight + 1, width = W - Filter::kWidth + 1;
  static_assert(Filter::kOut % 8 == 0, "whole units");
  expect(g.numel() == packed_size<value_t>(N, Filter::kOut, height * width), "g in units");
  const Scratch<uint32_t> largest_x(N, stream);
  const Scratch<uint4> packed_x(N * Input::kChannelGroups * H * W, stream);
  cudaMemsetAsync(largest_x, 0, N * sizeof(uint32_t), stream);
  pack_input<Input>(packed_x, largest_x, x, N, H * W, stream);
  value_t* const units = const_cast<value_t*>(g.data);
  const typename Loop::Source source{reinterpret_cast<const uint4*>(units), packed_x,
                                     scales_of(units, N, Filter::kOut, height * width), largest_x};
  // A block fills a multiprocessor.
  const int64_t most = device_attribute(cudaDevAttrMultiProcessorCount) / Loop::kBlocks;
  const int64_t splits = std::max<int64_t>(1, std::min(most, Strips(height, width).count(N)));
  const Scratch<float> partial(splits * Loop::kBlocks * Loop::kThreadSums * kThreads, stream);
  allow_shared<packed_weight_kernel<Loop>>();
  const dim3 grid(splits, Loop::kBlocks), merged(Loop::kThreadSums, Loop::kBlocks);
  packed_weight_kernel<Loop><<<grid, Loop::kBlockThreads, Loop::kSharedBytes, stream>>>(partial, source, N, H, W);
  merge_packed_kernel<Loop><<<merged, kThreads, 0, stream>>>(dweight, partial, source, splits, N);
}

}  // namespace grad
