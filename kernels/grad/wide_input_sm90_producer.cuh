// The producer of the transposed convolution by wgmma: rows of its input g, made of dy and the gates that
// forward saved, with zeros around it, straight to the stages of the pipeline (conv/wide_sm90.cuh).
//
// A warp makes 8 channels × kStrip pixels at a time, units, which come in pairs. Of a pair one is on its
// way in registers, the other in shared memory, where there is room for no more. (Two in registers would
// arrive one after the other: nvcc lets both wait for all loads.)
#pragma once
#include "grad/wide.cuh"
#include "conv/wide_sm90_pipeline.cuh"

namespace {

#if TENSOR_CORE_WGMMA

// A warp's units of a row: every kProducers-th plane, of each the strips. A tile has whole rows.
constexpr int kUnits = ceil_div(ceil_div(kPlanes, kProducers) * kRowStrips, 2) * 2;

// A unit of a plane from `column` of g on, under a scale, to a stage.
__device__ __forceinline__ void convert_unit(uint4* stage, const GradientStrip<CHANNELS_IN>& strip, int plane,
                                             int column, const Arguments& args, float to_operand) {
  const int lane = threadIdx.x % 32, width = int(args.W);
  float values[kLanePixels][8];
  strip.for_each(args.scale, [&](int i, int c, float, float g) {
    values[i][c] = kScaled ? scaled(g, to_operand) : g;
  });
  uint4* const to = stage + plane * kPitch + kPadColumns + column + lane;
#pragma unroll
  for (int i = 0; i < kLanePixels; i++)
    if (plane < kPlanes && column + lane + i * 32 < width) pack_pixel(to + i * 32, 0, values[i]);
}

// What a warp of the producer knows throughout.
struct ProducerWarp {
  const Arguments& args;
  const Strips& strips;
  const Pipeline<kStages>& pipeline;
  uint8_t* const shared;
  const int warp, lane, width;
  output_t (&raw)[8][kRawPitch];  // the warp's unit in shared memory
  PipelineState<kStages> next = {};

  // The rows of g that tiles from `place` on need, one below the other, into the pipeline.
  __device__ __forceinline__ void produce_rows(const TilePlace& place, int rows) {
    const float to_operand = power_of_two(kScaled ? sample_exponent(args.largest[place.n]) : 0);
    const auto plane_of = [&](int unit) { return unit / kRowStrips * kProducers + warp; };
    const auto column_of = [](int unit) { return unit % kRowStrips * kStrip; };
    const auto place_of = [&](int row, int unit) {
      return StripPlace{place.n, place.row + row - kPadRows, column_of(unit)};
    };
    // How many pixels of g a unit has.
    const auto pixels_of = [&](int row, int unit) {
      const StripPlace at = place_of(row, unit);
      return row < rows && unsigned(at.row) < unsigned(args.H) && plane_of(unit) < kPlanes ? width - at.column
                                                                                         : 0;
    };
    const auto word_of = [&](int row, int unit) -> uint32_t {
      const StripPlace at = place_of(row, unit);
      const int channel = plane_of(unit) * 8;
      if (pixels_of(row, unit) <= 0 || channel + lane / 4 >= CHANNELS_IN) return 0;
      return args.gates[gate_index(at.n, channel, at.row, at.column, args.H, args.W, CHANNELS_IN) + lane];
    };
    const auto dy_of = [&](int row, int unit) {
      return args.dy + GradientStrip<CHANNELS_IN>::index(place_of(row, unit), strips, plane_of(unit));
    };
    const int64_t plane_size = args.H * args.W;
    GradientStrip<CHANNELS_IN> even;
    uint32_t odd_word;  // the gates of the unit in shared memory
    const auto load_even = [&](int row, int unit) {
      const int pixels = pixels_of(row, unit);
      even = {};
      load_strip<CHANNELS_IN>(even.dy, dy_of(row, unit), plane_of(unit), plane_size, pixels);
      even.word = word_of(row, unit), odd_word = word_of(row, unit + 1);
      even.end_after(pixels);
    };
    const auto copy_odd = [&](int row, int unit) {
      copy_strip<CHANNELS_IN>(raw, dy_of(row, unit), plane_of(unit), plane_size, pixels_of(row, unit));
      commit_copies();
    };
    load_even(0, 0), copy_odd(0, 1);
#pragma unroll 1
    for (int row = 0; row < rows; row++) {
      pipeline.producer_acquire(next);
      uint4* const stage = reinterpret_cast<uint4*>(shared + next.stage * kStageBytes);
#pragma unroll 1
      for (int unit = 0; unit < kUnits; unit += 2) {
        const bool same_row = unit + 2 < kUnits;
        const int next_row = same_row ? row : row + 1, next_unit = same_row ? unit + 2 : 0;
        convert_unit(stage, even, plane_of(unit), column_of(unit), args, to_operand);
        GradientStrip<CHANNELS_IN> odd;
        odd.word = odd_word;
        load_even(next_row, next_unit);
        await_copies<0>();
        const int pixels = pixels_of(row, unit + 1);
        load_strip<CHANNELS_IN>(odd.dy, &raw[0][0], plane_of(unit + 1), kRawPitch, pixels);
        odd.end_after(pixels);
        convert_unit(stage, odd, plane_of(unit + 1), column_of(unit + 1), args, to_operand);
        copy_odd(next_row, next_unit + 1);
      }
      pipeline.producer_commit(next);
      next.advance();
    }
  }
};

// Fills the pipeline, row by row.
__device__ __forceinline__ void produce(const Arguments& args, const TileScheduler& tiles,
                                        const Pipeline<kStages>& pipeline, uint8_t* shared, bool) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  // What no unit writes: the zeros on both sides of a row.
  for (int i = threadIdx.x; i < kStages * kStageBytes / 16; i += kWarpgroup)
    reinterpret_cast<uint4*>(shared)[i] = make_uint4(0, 0, 0, 0);
  sync_threads<kWarpgroup>(4);
  auto& raw = reinterpret_cast<output_t (*)[8][kRawPitch]>(shared + kRawAt)[warp];
  const Strips strips(args.H, args.W);
  ProducerWarp producer{args, strips, pipeline, shared, warp, lane, int(args.W), raw};
#pragma unroll 1
  for (int tile = tiles.begin; tile < tiles.end;) {
    const TilePlace place = tiles[tile];
    const int count = min(tiles.end - tile, tiles.OH - place.row), rows = count + KERNEL_H - 1;
    tile += count;
    producer.produce_rows(place, rows);
  }
}

#endif

}  // namespace
