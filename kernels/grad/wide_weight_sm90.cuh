// The mainloop of a wide convolution's weights' gradient by wgmma, on compute capability 9.0 (sm_90a), where
// of operands of one part.
//
// A block's warpgroups are specialised: two of them stage operands, row by row, in a pipeline; the other
// two, consumers, have half of the taps each, 64 × 64 sums of a tap in registers. g is A, x is B, both in
// shared memory as they were staged: a tap's column is an offset of so many pixels. Only the last, less
// than 16 pixels of a row differ from tap to tap (store_tails).
#pragma once
#include "conv/wide_sm90_stages.cuh"
#include "grad/wide_weight_operands.cuh"

namespace grad {

template <class Filter, class Operands, class Target, class Source>
struct WideWeightSm90 : WideWeight<Filter, Operands, Target, Source, true> {
  using Base = WideWeight<Filter, Operands, Target, Source, true>;
  using typename Base::BlockPlace, typename Base::operand_t, typename Base::value_t;
  using Base::kBlocks, Base::kBlockTaps, Base::kInputPitch, Base::kOperandBytes, Base::kSlot, Base::kSlots,
      Base::kSplit, Base::kStage, Base::kStages, Base::kTail, Base::kTailPixels, Base::kTapColumns;

  static constexpr int kBlockThreads = kThreads + kConsumers * kWarpgroup;
  // Of the producers half stage g, half x.
  static constexpr int kWarpGroups = 2, kGroupWarps = kWarps / kWarpGroups;
  static constexpr int kAhead = 2;  // steps
  // Of the first; the other has the rest.
  static constexpr int kConsumerTaps = ceil_div(kBlockTaps, kConsumers);
  // Registers of a thread; at first all have the same.
  static constexpr int kProducerRegisters = 80, kConsumerRegisters[kConsumers] = {192, 160};
  static_assert(kProducerRegisters * 2 + kConsumerRegisters[0] + kConsumerRegisters[1] <= 65536 / kWarpgroup);
  static constexpr int kThreadSums = kConsumerTaps * 8 * 4;
  // Shared memory: operands, zeros, raw groups, barriers, and each stage's pixels.
  static constexpr int kRawBytes = (kAhead + 1) * kWarpGroups * sizeof(RawGroup<float>);  // a warp's
  static constexpr int kSharedBytes =
      kOperandBytes + kTailPixels * 16 + kWarps * kRawBytes + kStages * (2 * 8 + 4);
  // Is it for such values? Those of 16 bits can't be copied in the background, which is what it wins by.
  static constexpr bool fits(int room) {
    return !kSplit && sizeof(value_t) == 4 && kSharedBytes <= room;
  }

  // Which of a block's sums is sum i of a consumers' thread.
  static __device__ __forceinline__ SumPlace sum_place(int i, int thread) {
    const int lane = thread % 32, warp = thread / 32;
    return {warp / 4 * kConsumerTaps + i / 32, warp % 4 * 16 + i / 2 % 2 * 8 + lane / 4,
            i / 4 % 8 * 8 + lane % 4 * 2 + i % 2};
  }

#if TENSOR_CORE_WGMMA

  using typename Base::StagedGradient, typename Base::StagedInput, typename Base::Walk;

  // Each stage's operands and the pixels of its g: 0 where there is none, -1 where the walk has ended. A
  // stage that is empty again leaves room for a row of x, too: the oldest is read for the last time with it.
  struct StepPipeline : Pipeline<Base::kStages> {
    int* pixels;
    __device__ __forceinline__ explicit StepPipeline(uint4* behind_operands)
        : Pipeline<Base::kStages>(behind_operands), pixels(reinterpret_cast<int*>(this->empty + kStages)) {}
  };

  // Stages a warp's channel groups of g or of x, every kGroupWarps-th, after copying them kAhead steps before
  // to raw, where a warp has [step][channel group].
  template <class Staged>
  static __device__ __forceinline__ void produce(Walk& walk, const StepPipeline& pipeline, uint4* operands,
                                                 int places, int pitch,
                                                 typename Staged::Raw (*raw)[kWarpGroups],
                                                 const typename Source::Tail& tail) {
    Step steps[kAhead + 1];  // that is staged, and those that are on their way
    int place = 0, slot = 0;
    PipelineState<kStages> state;
    const auto copy = [&](int slot) {
      const Step step = walk.step();
#pragma unroll
      for (int i = 0; i < kWarpGroups; i++)
        if (step.pixels >= 0) Staged::copy(raw[slot][i], walk, i * kGroupWarps);
      commit_copies();  // an empty group too, so that a count of pending groups means the same each time
      if (step.pixels >= 0) Base::advance(walk);
      return step;
    };
    if (walk.goes_on()) walk.start();
#pragma unroll
    for (int i = 0; i < kAhead; i++) steps[i] = copy(i);
#pragma unroll 1
    for (;; state.advance()) {
      __syncwarp();  // all lanes have read what is copied over
      steps[kAhead] = copy(slot == 0 ? kAhead : slot - 1);
      await_copies<kAhead>();
      __syncwarp();  // all lanes' copies are there
      pipeline.producer_acquire(state);
      const int pixels = steps[0].pixels;
      if (threadIdx.x == 0) pipeline.pixels[state.stage] = pixels;
#pragma unroll 1
      for (int i = 0; i < kWarpGroups && pixels >= 0; i++) {
        Staged staged;
        staged.load(raw[slot][i], steps[0]);
        staged.store(operands + place * pitch, walk.group + i * kGroupWarps, steps[0], tail);
      }
      pipeline.producer_commit(state);
      if (pixels < 0) return;
#pragma unroll
      for (int i = 0; i < kAhead; i++) steps[i] = steps[i + 1];
      slot = slot == kAhead ? 0 : slot + 1, place = place + 1 == places ? 0 : place + 1;
    }
  }

  // Where a step's 16 columns of x lie: whole ones as they are, those at the end of a row in its tails, and zeros past it.
  struct Columns {
    uint32_t pitch, column_pitch, slot_pitch, from;
    __device__ __forceinline__ Columns(int left, int k, uint32_t inputs, uint32_t zeros)
        : pitch(left >= 16 ? 16 * kInputPitch : left > 0 ? 16 * kTailPixels : 0),
          column_pitch(left >= 16 ? 16 : left > 0 ? 16 * kTail : 0), slot_pitch(left > 0 ? 16 * kSlot : 0),
          from(left >= 16 ? inputs + 16 * 16 * k : left > 0 ? inputs + 16 * kWarps * kInputPitch : zeros) {}
    __device__ __forceinline__ uint32_t at(int slot, int column) const { return from + slot_pitch * slot + column * column_pitch; }
  };
  // A consumer's sums of so many taps to its part of `partial`.
  template <int kTaps> static __device__ __forceinline__ void store_sums(float* partial, float (&sums)[kConsumerTaps][8][4]) {
    const int thread = threadIdx.x - kThreads;
#pragma unroll
    for (int i = 0; i < kTaps; i++) {
      hold(sums[i]);
#pragma unroll
      for (int j = 0; j < 32; j++) partial[(i * 32 + j) * kThreads + thread] = sums[i][j / 4][j % 4];
    }
  }

  // Sums of the taps from kFirst on, a consumer's.
  template <int kFirst>
  static __device__ __forceinline__ void consume(float* partial, const StepPipeline& pipeline,
                                                 uint32_t inputs, uint32_t gradients, uint32_t zeros) {
    constexpr int kTaps = kBlockTaps - kFirst < kConsumerTaps ? kBlockTaps - kFirst : kConsumerTaps;
    float sums[kConsumerTaps][8][4] = {};
    PipelineState<kStages> state;
    typename Source::template SumScale<kConsumerTaps * 8> scale;
#pragma unroll 1
    for (int step = 0;; step++, state.advance()) {
      pipeline.consumer_wait(state);
      const int said = __shfl_sync(0xffffffffu, pipeline.pixels[state.stage], 0);
      if (said < 0) break;
      const int pixels = scale.pixels(said, &sums[0][0]);
      if (pixels > 0 && kTaps > 0) {
        begin_products();
#pragma unroll
        for (int k = 0; k < kStrip / 16; k++) {
          const uint64_t gradient =
              describe_transposed(gradients + 16 * (state.stage * kStage + k * 16), 16 * kStrip);
          const Columns columns(pixels - k * 16, k, inputs, zeros);
#pragma unroll
          for (int i = 0; i < kTaps; i++) {
            const int row = (kFirst + i) / kTapColumns, column = (kFirst + i) % kTapColumns;
            const uint32_t at = columns.at(Base::slot_of(step, row), column);
            multiply_add_transposed<operand_t>(sums[i], gradient, describe_transposed(at, columns.pitch));
          }
        }
        commit_products();
        await_products<0>();
      }
      __syncwarp();  // all lanes have read
      pipeline.consumer_release(state);
    }
    scale.undo(&sums[0][0]);
    store_sums<kTaps>(partial, sums);
  }

  static __device__ __forceinline__ void run(float* partial, const Source& source, const value_t* x,
                                             const uint32_t* largest_x, const uint32_t* largest_g, int64_t N,
                                             int64_t H, int64_t W) {
    extern __shared__ uint4 shared[];
    uint4* const gradients = shared + kSlots * kSlot;
    uint4* const zeros = gradients + kStages * kStage;
    uint4* const raw = zeros + kTailPixels;
    const StepPipeline pipeline(raw + kWarps * kRawBytes / 16);
    // Channels that don't exist stay zero in raw.
    for (int i = threadIdx.x; i < kTailPixels + kWarps * kRawBytes / 16; i += kBlockThreads)
      zeros[i] = make_uint4(0, 0, 0, 0);
    publish_shared();
    if (threadIdx.x == 0) pipeline.initialize(kThreads);
    const int common = Base::common_exponent(largest_x, largest_g, N);
    __syncthreads();  // the barriers are there
    if (threadIdx.x < kThreads) {
      give_registers_but<kProducerRegisters>();
      const Strips strips(H - Base::kKernelH + 1, W - Base::kKernelW + 1);
      const int64_t count = strips.count(N);
      const BlockPlace place(blockIdx.y);
      const int group = threadIdx.x / 32 % kGroupWarps;
      Walk walk{source, x, strips, place, largest_x, largest_g, common, group, H, W,
                count * (blockIdx.x + 1) / gridDim.x, count * blockIdx.x / gridDim.x};
      uint4* const own = raw + threadIdx.x / 32 * (kRawBytes / 16);
      if (threadIdx.x < kThreads / 2)
        produce<StagedGradient>(walk, pipeline, gradients, kStages, kStage,
                                reinterpret_cast<RawGroup<output_t>(*)[kWarpGroups]>(own), source.tail);
      else
        produce<StagedInput>(walk, pipeline, shared, kSlots, kSlot,
                             reinterpret_cast<RawGroup<value_t>(*)[kWarpGroups]>(own), source.tail);
    } else {
      partial += (int64_t(blockIdx.x) * kBlocks + blockIdx.y) * kThreadSums * kThreads;
      const uint32_t inputs = shared_address(shared), of_gradients = shared_address(gradients);
      if (threadIdx.x < kThreads + kWarpgroup) {
        take_registers_to<kConsumerRegisters[0]>();
        consume<0>(partial, pipeline, inputs, of_gradients, shared_address(zeros));
      } else {
        take_registers_to<kConsumerRegisters[1]>();
        consume<kConsumerTaps>(partial, pipeline, inputs, of_gradients, shared_address(zeros));
      }
    }
  }

#else

  static __device__ __forceinline__ void run(
      float*, const Source&, const value_t*, const uint32_t*, const uint32_t*, int64_t, int64_t, int64_t) {}

#endif
};

}  // namespace grad
