// The mainloop of a wide convolution's weights' gradient by wgmma, on compute capability 9.0 (sm_90a), where
// of operands of one part.
//
// A block's warpgroups are specialised: two of them, producers, stage operands, row by row, in a pipeline;
// the other two, consumers, have half of the taps each, 64 × 64 sums of a tap in registers. g is A, which a
// warp loads into registers, 16 channels × 16 pixels, once for all of its taps; x is B, in shared memory as
// it was staged: a tap's column is an offset of so many pixels. Only the last, less than 16 pixels of a row
// differ from tap to tap (store_tails).
#pragma once
#include "conv/wide_sm90_stages.cuh"
#include "grad/packed.cuh"
#include "grad/wide_weight_operands.cuh"

namespace grad {

// What all sources have in common: the pipeline, and its consumers.
template <class Filter, class Operands, class Target, class Source>
struct WideWeightSm90 : WideWeight<Filter, Operands, Target, Source, true> {
  using Base = WideWeight<Filter, Operands, Target, Source, true>;
  using Base::kBlocks, Base::kBlockTaps, Base::kInputPitch, Base::kOperandBytes, Base::kSlot, Base::kSlots,
      Base::kSplit, Base::kStage, Base::kStages, Base::kTail, Base::kTailPixels, Base::kTapColumns;
  using typename Base::BlockPlace, typename Base::operand_t, typename Base::value_t;

  static constexpr int kBlockThreads = kThreads + kConsumers * kWarpgroup;
  // Of the first; the other has the rest.
  static constexpr int kConsumerTaps = ceil_div(kBlockTaps, kConsumers);
  // Registers of a thread; at first all have the same.
  static constexpr int kProducerRegisters = 72, kConsumerRegisters[kConsumers] = {200, 168};
  static_assert(kProducerRegisters * 2 + kConsumerRegisters[0] + kConsumerRegisters[1] <= 65536 / kWarpgroup);
  static constexpr int kThreadSums = kConsumerTaps * 8 * 4;
  // Which of a block's sums is sum i of a consumers' thread.
  static __device__ __forceinline__ SumPlace sum_place(int i, int thread) {
    const int lane = thread % 32, warp = thread / 32;
    return {warp / 4 * kConsumerTaps + i / 32, warp % 4 * 16 + i / 2 % 2 * 8 + lane / 4,
            i / 4 % 8 * 8 + lane % 4 * 2 + i % 2};
  }

#if TENSOR_CORE_WGMMA

  // Each stage's operands and the pixels of its g: 0 where there is none, -1 where the walk has ended. A
  // stage that is empty again leaves room for a row of x, too: the oldest is read for the last time with it.
  struct StepPipeline : Pipeline<Base::kStages> {
    int* pixels;
    __device__ __forceinline__ explicit StepPipeline(uint4* behind_operands)
        : Pipeline<Base::kStages>(behind_operands), pixels(reinterpret_cast<int*>(this->empty + kStages)) {}
  };

  // Where a step's 16 columns of x lie: whole ones as they are, those at the end of a row in its tails, and
  // zeros past it.
  struct Columns {
    uint32_t pitch, column_pitch, slot_pitch, from;
    __device__ __forceinline__ Columns(int left, int k, uint32_t inputs, uint32_t zeros)
        : pitch(left >= 16 ? 16 * kInputPitch
                : left > 0 ? 16 * kTailPixels
                           : 0),
          column_pitch(left >= 16 ? 16
                       : left > 0 ? 16 * kTail
                                  : 0),
          slot_pitch(left > 0 ? 16 * kSlot : 0), from(left >= 16 ? inputs + 16 * 16 * k
                                                      : left > 0 ? inputs + 16 * kWarps * kInputPitch
                                                                 : zeros) {}
    __device__ __forceinline__ uint32_t at(int slot, int column) const {
      return from + slot_pitch * slot + column * column_pitch;
    }
  };
  // A consumer's sums of so many taps to its part of `partial`.
  template <int kTaps>
  static __device__ __forceinline__ void store_sums(float* partial, float (&sums)[kConsumerTaps][8][4]) {
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
    // load_matrices_transposed: lanes 0-7 give pixels 0-7 of the warp's first channel group, 8-15 those of
    // its second one, 16-31 pixels 8-15 likewise.
    const int lane = threadIdx.x % 32, group = threadIdx.x / 32 % 4 * 2 + lane / 8 % 2;
    const uint32_t of_lane = gradients + 16 * (group * kStrip + lane / 16 * 8 + lane % 8);
    typename Source::template SumScale<kConsumerTaps * 8> scale;
#pragma unroll 1
    for (int step = 0;; step++, state.advance()) {
      pipeline.consumer_wait(state);
      const int said = __shfl_sync(0xffffffffu, pipeline.pixels[state.stage], 0);
      if (said < 0) break;
      const int pixels = scale.pixels(said, &sums[0][0]);
      if (pixels > 0 && kTaps > 0) {
        uint32_t fragments[2][4];  // of 16 pixels, and of the next
        const auto load = [&](int k) {
          load_matrices_transposed(fragments[k % 2], of_lane + 16 * (state.stage * kStage + k * 16));
        };
        load(0);
#pragma unroll
        for (int k = 0; k < kStrip / 16; k++) {
          begin_products();
          const Columns columns(pixels - k * 16, k, inputs, zeros);
#pragma unroll
          for (int i = 0; i < kTaps; i++) {
            const int row = (kFirst + i) / kTapColumns, column = (kFirst + i) % kTapColumns;
            const uint32_t at = columns.at(Base::slot_of(step, row), column);
            multiply_add_transposed<operand_t>(sums[i], fragments[k % 2],
                                               describe_transposed(at, columns.pitch));
          }
          commit_products();
          if (k + 1 == kStrip / 16) break;
          await_products<1>();  // those that read the registers of the next but one
          load(k + 1);
        }
        await_products<0>();
      }
      __syncwarp();  // all lanes have read
      pipeline.consumer_release(state);
    }
    scale.undo(&sums[0][0]);
    store_sums<kTaps>(partial, sums);
  }

  // What a consumer's threads do of a block, its own part of `partial` behind them.
  static __device__ __forceinline__ void consume(float* partial, const StepPipeline& pipeline,
                                                 uint4* shared) {
    uint4 *const gradients = shared + kSlots * kSlot, *const zeros = gradients + kStages * kStage;
    partial += (int64_t(blockIdx.x) * gridDim.y + blockIdx.y) * kThreadSums * kThreads;
    const uint32_t inputs = shared_address(shared), of_gradients = shared_address(gradients);
    if (threadIdx.x < kThreads + kWarpgroup) {
      take_registers_to<kConsumerRegisters[0]>();
      consume<0>(partial, pipeline, inputs, of_gradients, shared_address(zeros));
    } else {
      take_registers_to<kConsumerRegisters[1]>();
      consume<kConsumerTaps>(partial, pipeline, inputs, of_gradients, shared_address(zeros));
    }
  }

#endif
};

// The scale of a consumer's sums, which is the same for all samples, since operands have it.
template <int kTiles> struct OneScale {
  __device__ __forceinline__ int pixels(int said, float (*)[4]) const { return said; }
  __device__ __forceinline__ void undo(float (*)[4]) const {}
};

// A source: g in units, under a scale for each sample. Steps that are on their way: one more is in use, and
// one is ready.
template <int kAhead_> struct GradientUnits {
  struct Strip {};
  struct Tail {};
  static constexpr int kAhead = kAhead_, kStages = kAhead + 2;
  template <int kTiles> using SumScale = OneScale<kTiles>;
  const uint4* units;
  Scales scales;
};

// Of g in units, which are copied to the stages as they lie, and of x in float32, which its producers
// convert. A warp of theirs has one channel group of each. x is scaled so that the product of a sample's two
// powers of two is the same for all samples.
template <class Filter, class Operands, class Target, int kAhead>
struct UnitsWeightSm90 : WideWeightSm90<Filter, Operands, Target, GradientUnits<kAhead>> {
  using Base = WideWeightSm90<Filter, Operands, Target, GradientUnits<kAhead>>;
  using Source = GradientUnits<kAhead>;
  using Base::kBlockThreads, Base::kChannelsIn, Base::kChannelsOut, Base::kOperandBytes,
      Base::kProducerRegisters, Base::kScaled, Base::kSlot, Base::kSlots, Base::kSplit, Base::kStage,
      Base::kStages, Base::kTailPixels;
  using typename Base::BlockPlace, typename Base::value_t;
  using Raw = RawGroup<value_t>;

  // Shared memory: operands, zeros, raw groups, barriers, and each stage's pixels.
  static constexpr int kRawBytes = (kAhead + 1) * sizeof(Raw);  // a warp's
  static constexpr int kSharedBytes =
      kOperandBytes + kTailPixels * 16 + kWarps * kRawBytes + kStages * (2 * 8 + 4);
  // Values of 16 bits can't be copied in the background one by one.
  static constexpr bool fits(int room) { return !kSplit && sizeof(value_t) == 4 && kSharedBytes <= room; }

#if __CUDA_ARCH__ >= 800
  using typename Base::StagedInput;

  static __device__ __forceinline__ int common_exponent(const Source& source, const uint32_t* largest_x,
                                                        const uint32_t* largest_g, int64_t N) {
    if constexpr (!kScaled) return 0;
    return grad::common_exponent(largest_x, largest_g, N, [&](int64_t n) {
      return top_exponent(largest_x[n]) + source.scales.last(n);
    });
  }

#endif
#if TENSOR_CORE_WGMMA

  using typename Base::StepPipeline;

  // As WideWeight's Walk.
  struct Walk {
    const Source& source;
    const value_t* const all_x;
    const Strips& strips;
    const BlockPlace& place;
    const uint32_t* const largest_x;
    const int common, group;
    const int64_t H, W, end;
    int64_t tile;
    float scale = 1.f;  // of the sample's x
    int pixels, row, first, stop;
    const uint4* g;
    const value_t* x;

    __device__ __forceinline__ bool goes_on() const { return tile < end; }
    __device__ __forceinline__ bool ahead() const { return row < first; }
    // How far across the step's strip is, and the negative of that where there is no g; 0 where there is no
    // step.
    __device__ __forceinline__ int across() const {
      return !goes_on() ? 0 : ahead() ? -min(pixels, kStrip) : min(pixels, kStrip);
    }
    __device__ __forceinline__ void start() {
      const StripPlace at = Base::start_column(*this);
      if constexpr (kScaled) {
        const int fitting = min(top_exponent(largest_x[at.n]), common - source.scales.last(at.n));
        scale = power_of_two(max(fitting, -126));
      }
      const int64_t of_g = at.n * ceil_div(kChannelsOut, 8) + place.channel_out / 8 + group;
      const int64_t of_x = at.n * kChannelsIn + place.channel_in + group * 8;
      g = source.units + (of_g * strips.height + at.row) * strips.width + at.column;
      x = all_x + (of_x * H + first + place.kernel_row) * W + at.column + place.kernel_column;
    }
    __device__ __forceinline__ void next_row() { g += strips.width; }
  };

  // A channel group of the step's g to a stage: zeros past the end of the row.
  static __device__ __forceinline__ void copy_gradient(uint4* stage, const Walk& walk) {
    if (walk.ahead() || walk.place.channel_out + walk.group * 8 >= kChannelsOut) return;
    uint4* const to = stage + walk.group * kStrip;
#pragma unroll
    for (int i = threadIdx.x % 32; i < kStrip; i += 32)
      copy_async_or_zero(to + i, i < walk.pixels ? walk.g + i : walk.source.units, i < walk.pixels);
  }

  // Fills the pipeline. raw: the warp's, a step's each.
  static __device__ __forceinline__ void produce(Walk& walk, const StepPipeline& pipeline, uint4* inputs,
                                                 uint4* gradients, Raw (&raw)[kAhead + 1]) {
    PipelineState<kStages> next, ready;
    int slot = 0, place = 0;  // of raw: the next step's; of x: that of the step that is staged
    bool over = false;
    if (walk.goes_on()) walk.start();
#pragma unroll 1
    for (int step = 0;; step++) {
      if (threadIdx.x % 32 == 0) raw[slot].across = walk.across(), raw[slot].scale = walk.scale;
      if (!over) {
        pipeline.producer_acquire(next);
        over = !walk.goes_on();
        if (!over) {
          copy_gradient(gradients + next.stage * kStage, walk);
          StagedInput::copy(raw[slot], walk);
          Base::advance(walk);
        }
        next.advance();
      }
      commit_copies();  // an empty group too, so that a count of pending groups means the same each time
      slot = slot == kAhead ? 0 : slot + 1;
      if (step < kAhead) continue;
      await_copies<kAhead>();
      __syncwarp();  // all lanes' copies are there, and the step's word
      const int across = raw[slot].across;
      if (threadIdx.x == 0) pipeline.pixels[ready.stage] = across == 0 ? -1 : max(across, 0);
      if (across != 0) {
        StagedInput staged;
        staged.load(raw[slot]);
        staged.store(inputs + place * kSlot, walk.group, abs(across), raw[slot].scale);
      }
      __syncwarp();  // all lanes have read what is copied over next
      pipeline.producer_commit(ready);
      if (across == 0) return;
      ready.advance(), place = place + 1 == kSlots ? 0 : place + 1;
    }
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
    const int common = common_exponent(source, largest_x, largest_g, N);
    __syncthreads();  // the barriers are there
    if (threadIdx.x < kThreads) {
      give_registers_but<kProducerRegisters>();
      const Strips strips(H - Base::kKernelH + 1, W - Base::kKernelW + 1);
      const int64_t count = strips.count(N);
      const BlockPlace place(blockIdx.y);
      const int warp = threadIdx.x / 32;
      Walk walk{source,
                x,
                strips,
                place,
                largest_x,
                common,
                warp,
                H,
                W,
                count * (blockIdx.x + 1) / gridDim.x,
                count * blockIdx.x / gridDim.x};
      produce(walk, pipeline, shared, gradients, reinterpret_cast<Raw(*)[kAhead + 1]>(raw)[warp]);
    } else {
      Base::consume(partial, pipeline, shared);
    }
  }

#else

  static __device__ __forceinline__ void run(float*, const Source&, const value_t*, const uint32_t*,
                                             const uint32_t*, int64_t, int64_t, int64_t) {}

#endif
};

}  // namespace grad
