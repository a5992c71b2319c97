// The mainloop of grad/packed_weight.cuh by wgmma for short rows: a strip there has 64 pixels of one row, so
// that of rows of 14 three quarters of all products would be empty.
//
// Here the positions of a plane of g are one line, and a step has 64 that follow one another, in whichever
// rows they are. x is staged once for each of the taps' columns: those pixels of its rows that such a tap
// meets, as wide as g's rows. Then what the tap in row r meets lies r rows, r·width positions, further on in
// the same line.
//
// Past the end of a plane g is zero. So has x to be there, since 0·inf is NaN; but only for the taps' last
// row its line ends there, too. For the others the last, less than 16 positions are staged once more, with
// zeros behind them: tails.
#pragma once
#include "grad/packed_stages.cuh"

namespace grad {

// How positions are cut into steps: in strips of rows, or in lines, of which a step's taps meet up to kLater
// · 64 later positions.
struct Rows {
  static constexpr bool kLines = false;
};
template <int kLater_> struct Lines {
  static constexpr bool kLines = true;
  static constexpr int kLater = kLater_;
};

template <class Filter, class Operands, class Target, class Source, int kLater>
struct PackedLinesSm90 : PackedStages<Filter, WideWeightSm90<Filter, Operands, Target, Source>> {
  using Base = PackedStages<Filter, WideWeightSm90<Filter, Operands, Target, Source>>;
  using Base::kBlocks, Base::kBlockTaps, Base::kBlockThreads, Base::kChannelsOut, Base::kConsumerTaps,
      Base::kGroupsIn, Base::kGroupsOut, Base::kOfPlane, Base::kScaled, Base::kSplit, Base::kTapColumns,
      Base::kTapRows, Base::kThreadSums;
  using typename Base::BlockPlace, typename Base::operand_t;

  static constexpr int kProducerRegisters = 80, kConsumerRegisters[] = {192, 160};
  static_assert(kProducerRegisters * 2 + kConsumerRegisters[0] + kConsumerRegisters[1] <= 65536 / kWarpgroup);

  // Shared memory, in units: a ring of x [column][channel group][position], whose first positions lie behind
  // its end, too, so that a product's 16 are side by side everywhere; of each stage g [channel
  // group][position], and tails [tap][channel group][position].
  static constexpr int kDeep = 16, kTails = (kTapRows - 1) * kTapColumns, kOfTail = kWarps * kDeep;
  static constexpr int kStage = kWarps * kStrip + kTails * kOfTail;
  static HOST_DEVICE constexpr int ring(int stages) { return (kLater + stages) * kStrip; }
  static HOST_DEVICE constexpr int pitch(int stages) { return ring(stages) + (kLater > 0 ? kDeep : 0); }
  static HOST_DEVICE constexpr int bytes(int stages) {
    return (kTapColumns * kWarps * pitch(stages) + stages * kStage) * 16 +
           stages * (2 * 8 + 4);  // … barriers, and words
  }
  static HOST_DEVICE constexpr int stages(int room) {
    int most = 6;
    while (most > 0 && bytes(most) > room) most--;
    return most;
  }
  static constexpr int kStages = stages(Target::kSharedLimit), kSlots = kLater + kStages,
                       kAhead = kStages - 2;
  static constexpr int kRing = ring(kStages), kPitch = pitch(kStages), kSharedBytes = bytes(kStages);
  static_assert(kStages >= 3 && !kSplit, "room for lines");

  static int64_t count(int64_t planes, int64_t height, int64_t width) {
    return planes * ((height * width + kStrip - 1) / kStrip);
  }

#if TENSOR_CORE_WGMMA

  struct StepPipeline : Pipeline<kStages> {
    int* pixels;
    __device__ __forceinline__ explicit StepPipeline(uint4* behind_operands)
        : Pipeline<kStages>(behind_operands), pixels(reinterpret_cast<int*>(this->empty + kStages)) {}
  };

  // Of a block the steps tile … end - 1 of all planes'. One brings 64 positions of x's line, and those of g
  // that are kLater steps before them, unless they are another block's.
  struct Walk {
    const Source& source;
    const BlockPlace& place;
    const int common, height, width, positions, steps;  // of a plane of g
    const int64_t H, W, end;
    int64_t tile;
    int slack = 0;
    int chunk, first, stop;  // of x in this plane; of g those from first to stop - 1
    const uint4 *g, *x;      // the planes, of the block's first channel group

    __device__ __forceinline__ bool goes_on() const { return tile < end; }
    __device__ __forceinline__ bool ahead() const { return chunk - kLater < first; }
    __device__ __forceinline__ bool is_last() const { return chunk - kLater == steps - 1; }
    __device__ __forceinline__ int word() const {
      return !goes_on()
                 ? -1
                 : OwnScale<1>::word(ahead() ? 0 : min(positions - (chunk - kLater) * kStrip, kStrip), slack);
    }
    __device__ __forceinline__ void start() {
      const int64_t of_all = tile / steps, n = of_all / source.planes, plane = of_all - n * source.planes;
      first = chunk = int(tile - of_all * steps), stop = int(min(int64_t(steps), first + end - tile));
      if constexpr (kScaled) {
        const bool counts = source.input_scales.largest[n] && source.scales.largest[n];
        slack = counts ? max(0, min(source.exponent(n) - common, kMostSlack)) : slack;
      }
      g = source.g + ((n * kGroupsOut + place.channel_out / 8) * source.planes + plane) * positions;
      x = source.x +
          ((n * kGroupsIn + place.channel_in / 8) * source.input_planes + plane + place.kernel_plane) * H * W;
    }
    __device__ __forceinline__ void advance() {
      if (++chunk < stop + kLater) return;
      tile += stop - first;
      if (goes_on()) start();
    }
    // Of a channel group's x what the tap meets in that row and column of the block's taps, at a position's
    // line and column.
    __device__ __forceinline__ void copy(uint4* to, uint4* again, const uint4* plane, bool real, int line,
                                         int column) const {
      line += place.kernel_row, column += place.kernel_column;
      real = real && line < H && column < W;  // past that there are only taps that don't exist
      const uint4* const from = real ? plane + line * int(W) + column : source.x;
      copy_async_or_zero(to, from, real);
      if (again) copy_async_or_zero(again, from, real);
    }
  };

  // A channel group of a step, of g, and of x to a slot.
  static __device__ __forceinline__ void copy(const Walk& walk, uint4* ring, uint4* stage, int slot,
                                              int group) {
    const int lane = threadIdx.x % 32, before = (walk.chunk - kLater) * kStrip;
    if (!walk.ahead() && walk.place.channel_out + group * 8 < kChannelsOut) {
      const uint4* const from = walk.g + int64_t(group) * walk.source.planes * walk.positions + before;
#pragma unroll
      for (int i = lane; i < kStrip; i += 32)
        copy_async_or_zero(stage + group * kStrip + i, before + i < walk.positions ? from + i : walk.source.g,
                           before + i < walk.positions);
    }
    if (!walk.place.has(group * 8)) return;
    const int of_plane = group * 8 % kOfPlane / 8,
              behind = group * 8 / kOfPlane;  // the block's first plane of the filter
    const uint4* const plane =
        walk.x + (int64_t(of_plane) * walk.source.input_planes + behind) * walk.H * walk.W;
#pragma unroll
    for (int i = lane; i < kStrip; i += 32) {
      const int at = walk.chunk * kStrip + i, line = at / walk.width, column = at - line * walk.width;
      const bool real = line < walk.height + kTapRows - 1;
#pragma unroll
      for (int c = 0; c < kTapColumns; c++) {
        uint4* const to = ring + (c * kWarps + group) * kPitch + slot * kStrip + i;
        walk.copy(to, kLater > 0 && slot == 0 && i < kDeep ? to + kRing : nullptr, plane, real, line,
                  column + c);
      }
    }
    if (!walk.is_last() || walk.positions % kDeep == 0) return;
#pragma unroll
    for (int i = lane; i < kTails * kDeep; i += 32) {
      const int tap = i / kDeep, at = walk.positions / kDeep * kDeep + i % kDeep, line = at / walk.width;
      walk.copy(stage + kWarps * kStrip + tap * kOfTail + group * kDeep + i % kDeep, nullptr, plane,
                at < walk.positions, line + tap / kTapColumns, at - line * walk.width + tap % kTapColumns);
    }
  }

  // A warp has a channel group of g and of x.
  static __device__ __forceinline__ void produce(Walk& walk, const StepPipeline& pipeline, uint4* ring,
                                                 uint4* stages) {
    const int group = threadIdx.x / 32;
    PipelineState<kStages> next, ready;
    int words[kAhead + 1] = {};  // of the steps that are on their way, the last one last
    int slot = 0;
    if (walk.goes_on()) walk.start();
    bool over = false;
#pragma unroll 1
    for (int step = 0;; step++) {
#pragma unroll
      for (int i = 0; i < kAhead; i++) words[i] = words[i + 1];
      words[kAhead] = walk.word();
      if (!over) {
        pipeline.producer_acquire(next);
        over = !walk.goes_on();
        if (!over) copy(walk, ring, stages + next.stage * kStage, slot, group), walk.advance();
        next.advance(), slot = slot + 1 == kSlots ? 0 : slot + 1;
      }
      commit_copies();  // an empty group too, so that a count of pending groups means the same each time
      if (step < kAhead) continue;
      await_copies<kAhead>();
      if (threadIdx.x == 0) pipeline.pixels[ready.stage] = words[0];
      pipeline.producer_commit(ready);
      if (words[0] < 0) return;
      ready.advance();
    }
  }

  // As WideWeightSm90's.
  template <int kFirst>
  static __device__ __forceinline__ void consume(float* partial, const StepPipeline& pipeline, uint32_t ring,
                                                 uint32_t stages, int width) {
    constexpr int kTaps = kBlockTaps - kFirst < kConsumerTaps ? kBlockTaps - kFirst : kConsumerTaps;
    float sums[kConsumerTaps][8][4] = {};
    PipelineState<kStages> state;
    OwnScale<kConsumerTaps * 8> scale;
    int slot = kSlots - kLater;  // of the step's own positions
#pragma unroll 1
    for (;; state.advance(), slot++) {
      if (slot >= kSlots) slot -= kSlots;
      pipeline.consumer_wait(state);
      const int said = __shfl_sync(0xffffffffu, pipeline.pixels[state.stage], 0);
      if (said < 0) break;
      const int pixels = scale.pixels(said, &sums[0][0]);
      const uint32_t gradients = stages + 16 * kStage * state.stage, tails = gradients + 16 * kWarps * kStrip;
      if (kTaps > 0 && pixels > 0) {
#pragma unroll
        for (int k = 0; k < kStrip; k += kDeep) {
          if (k >= pixels) break;
          begin_products();
          const uint64_t gradient = describe_transposed(gradients + 16 * k, 16 * kStrip);
          const bool whole = pixels - k >= kDeep;
#pragma unroll
          for (int i = 0; i < kTaps; i++) {
            const int row = (kFirst + i) / kTapColumns, column = (kFirst + i) % kTapColumns;
            const int at = slot * kStrip + k + row * width;  // less than twice round
            uint32_t from = ring + 16 * (column * kWarps * kPitch + (at < kRing ? at : at - kRing)),
                     pitch = 16 * kPitch;
            if (row < kTapRows - 1 && !whole) from = tails + 16 * (kFirst + i) * kOfTail, pitch = 16 * kDeep;
            multiply_add_transposed<operand_t>(sums[i], gradient, describe_transposed(from, pitch));
          }
        }
        commit_products();
        await_products<0>();
      }
      __syncwarp();  // all lanes have read
      pipeline.consumer_release(state);
    }
    scale.undo(&sums[0][0]);
    Base::template store_sums<kTaps>(partial, sums);
  }

  static __device__ __forceinline__ void run(float* partial, const Source& source, int64_t N, int64_t H,
                                             int64_t W) {
    extern __shared__ uint4 shared[];
    uint4* const stages = shared + kTapColumns * kWarps * kPitch;
    const StepPipeline pipeline(stages + kStages * kStage);
    if (threadIdx.x == 0) pipeline.initialize(kThreads);
    const int common = Base::common_exponent(source, N);
    __syncthreads();  // the barriers are there
    const int height = int(H) - Base::kKernelH + 1, width = int(W) - Base::kKernelW + 1;
    if (threadIdx.x < kThreads) {
      give_registers_but<kProducerRegisters>();
      const int positions = height * width, steps = ceil_div(positions, kStrip);
      const int64_t all = N * source.planes * steps;
      const BlockPlace place(blockIdx.y);
      Walk walk{source,
                place,
                common,
                height,
                width,
                positions,
                steps,
                H,
                W,
                all * (blockIdx.x + 1) / gridDim.x,
                all * blockIdx.x / gridDim.x};
      produce(walk, pipeline, shared, stages);
    } else {
      partial += (int64_t(blockIdx.x) * kBlocks + blockIdx.y) * kThreadSums * kThreads;
      const uint32_t ring = shared_address(shared), of_stages = shared_address(stages);
      if (threadIdx.x < kThreads + kWarpgroup) {
        take_registers_to<kConsumerRegisters[0]>();
        consume<0>(partial, pipeline, ring, of_stages, width);
      } else {
        take_registers_to<kConsumerRegisters[1]>();
        consume<kConsumerTaps>(partial, pipeline, ring, of_stages, width);
      }
    }
  }

#else

  static __device__ __forceinline__ void run(float*, const Source&, int64_t, int64_t, int64_t) {}

#endif
};

}  // namespace grad
