// The producer of the transposed convolution by wgmma: rows of its input g, made of dy and the gates that
// forward saved, with zeros around it, straight to the stages of the pipeline
// (conv2d_min_add_multiply_mainloop_wgmma.cuh).
//
// A warp makes 8 channels × kStrip pixels at a time, units, which come in pairs. Of a pair one is on its
// way in registers, the other in shared memory, where there is room for no more. (Two in registers would
// arrive one after the other: nvcc lets both wait for all loads.)
#pragma once
#include "conv2d_min_add_multiply_gradient.cuh"
#include "conv2d_min_add_multiply_pipeline.cuh"

namespace {

#if TENSOR_CORE_WGMMA

// A warp's units of a row: every kProducers-th plane, of each the strips. A tile has whole rows.
constexpr int kUnits = ceil_div(ceil_div(kPlanes, kProducers) * kRowStrips, 2) * 2;

__device__ __forceinline__ void produce(const Arguments& args, const TileScheduler& tiles,
                                        const Pipeline<kStages>& pipeline, uint8_t* shared, bool) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, width = int(args.W);
  // What no unit writes: the zeros on both sides of a row.
  for (int i = threadIdx.x; i < kStages * kStageBytes / 16; i += kWarpgroup)
    reinterpret_cast<uint4*>(shared)[i] = make_uint4(0, 0, 0, 0);
  sync_threads<kWarpgroup>(4);
  auto& raw = reinterpret_cast<output_t (*)[8][kRawPitch]>(shared + kRawAt)[warp];
  const Strips strips(args.H, args.W);
  PipelineState<kStages> next;
#pragma unroll 1
  for (int tile = tiles.begin; tile < tiles.end;) {
    const TilePlace place = tiles[tile];
    const int count = min(tiles.end - tile, tiles.OH - place.row), rows = count + KERNEL_H - 1;
    tile += count;
    const float to_operand = power_of_two(kScaled ? sample_exponent(args.largest[place.n]) : 0);
    const auto plane_of = [&](int unit) { return unit / kRowStrips * kProducers + warp; };
    const auto column_of = [](int unit) { return unit % kRowStrips * kStrip; };
    const auto place_of = [&](int i, int unit) {
      return StripPlace{place.n, place.row + i - kPadRows, column_of(unit)};
    };
    // How many pixels of g a unit has.
    const auto pixels_of = [&](int i, int unit) {
      const StripPlace at = place_of(i, unit);
      return i < rows && unsigned(at.row) < unsigned(args.H) && plane_of(unit) < kPlanes ? width - at.column
                                                                                         : 0;
    };
    const auto word_of = [&](int i, int unit) -> uint32_t {
      const StripPlace at = place_of(i, unit);
      const int channel = plane_of(unit) * 8;
      if (pixels_of(i, unit) <= 0 || channel + lane / 4 >= CHANNELS_IN) return 0;
      return args.gates[gate_index(at.n, channel, at.row, at.column, args.H, args.W, CHANNELS_IN) + lane];
    };
    const auto from = [&](int i, int unit) {
      return args.dy + GradientStrip<CHANNELS_IN>::index(place_of(i, unit), strips, plane_of(unit));
    };
    const auto convert = [&](uint4* stage, const GradientStrip<CHANNELS_IN>& strip, int unit) {
      const int plane = plane_of(unit), column = column_of(unit);
      float values[kLanePixels][8];
      strip.for_each(args.scale, [&](int i, int c, float, float g) {
        values[i][c] = kScaled ? scaled(g, to_operand) : g;
      });
      uint4* const to = stage + plane * kPitch + kPadColumns + column + lane;
#pragma unroll
      for (int i = 0; i < kLanePixels; i++)
        if (plane < kPlanes && column + lane + i * 32 < width) pack_pixel(to + i * 32, 0, values[i]);
    };
    const int64_t plane_size = args.H * args.W;
    GradientStrip<CHANNELS_IN> even;
    uint32_t odd_word;  // that of the unit in shared memory
    const auto load_even = [&](int i, int unit) {
      const int pixels = pixels_of(i, unit);
      even = {};
      load_strip<CHANNELS_IN>(even.dy, from(i, unit), plane_of(unit), plane_size, pixels);
      even.word = word_of(i, unit), odd_word = word_of(i, unit + 1);
      even.end_after(pixels);
    };
    const auto copy_odd = [&](int i, int unit) {
      copy_strip<CHANNELS_IN>(raw, from(i, unit), plane_of(unit), plane_size, pixels_of(i, unit));
      commit_copies();
    };
    load_even(0, 0), copy_odd(0, 1);
#pragma unroll 1
    for (int i = 0; i < rows; i++) {
      pipeline.producer_acquire(next);
      uint4* const stage = reinterpret_cast<uint4*>(shared + next.stage * kStageBytes);
#pragma unroll 1
      for (int unit = 0; unit < kUnits; unit += 2) {
        const bool same_row = unit + 2 < kUnits;
        const int then_i = same_row ? i : i + 1, then_unit = same_row ? unit + 2 : 0;
        convert(stage, even, unit);
        GradientStrip<CHANNELS_IN> odd;
        odd.word = odd_word;
        load_even(then_i, then_unit);
        await_copies<0>();
        const int pixels = pixels_of(i, unit + 1);
        load_strip<CHANNELS_IN>(odd.dy, &raw[0][0], plane_of(unit + 1), kRawPitch, pixels);
        odd.end_after(pixels);
        convert(stage, odd, unit + 1);
        copy_odd(then_i, then_unit + 1);
      }
      pipeline.producer_commit(next);
      next.advance();
    }
  }
}

#endif

}  // namespace
