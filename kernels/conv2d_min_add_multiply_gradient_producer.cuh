// The producer of the transposed convolution by wgmma: rows of its input g, made of dy and the gates that
// forward saved, with zeros around it, straight to the stages of the pipeline
// (conv2d_min_add_multiply_mainloop_wgmma.cuh).
//
// A warp makes 8 channels × kStrip pixels at a time, and has the next ones under way meanwhile, in registers.
#pragma once
#include "conv2d_min_add_multiply_gradient.cuh"
#include "conv2d_min_add_multiply_pipeline.cuh"

namespace {

#if TENSOR_CORE_WGMMA

constexpr int kProducers = kWarpgroup / 32;  // warps
// A row's strips. A tile has whole rows.
constexpr int kRowStrips = ceil_div(kTileWidth - kPadColumns, kStrip);
// A warp's units of a row: every kProducers-th plane, of each the strips. In pairs, for two buffers.
constexpr int kUnits = ceil_div(ceil_div(kPlanes, kProducers) * kRowStrips, 2) * 2;
constexpr int kRowsAhead = 2;  // that are asked for
constexpr int kRowLines = kTileWidth * sizeof(output_t) / 128 + 1;  // of 128 bytes, in which a row of a channel lies

__device__ __forceinline__ void produce(const Arguments& args, const TileScheduler& tiles,
                                        const Pipeline& pipeline, uint8_t*, bool) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, width = int(args.W);
  // What no unit writes: the zeros on both sides of a row.
  for (int i = threadIdx.x; i < kStages * kStageBytes / 16; i += kWarpgroup)
    reinterpret_cast<uint4*>(pipeline.operands)[i] = make_uint4(0, 0, 0, 0);
  sync_threads<kWarpgroup>(4);
  const Strips strips(args.H, args.W);
  PipelineState next;
#pragma unroll 1
  for (int tile = tiles.begin; tile < tiles.end;) {
    const TilePlace place = tiles[tile];
    const int count = min(tiles.end - tile, tiles.OH - place.row), rows = count + KERNEL_H - 1;
    tile += count;
    const float to_operand = power_of_two(kScaled ? sample_exponent(args.largest[place.n]) : 0);
    // Rows are on their way to the L2 cache long before they are loaded: there are no registers for more loads at a time.
    const auto prefetch = [&](int i) {
      const int row = place.row + i - kPadRows, last = width * int(sizeof(output_t)) - 1;
      if (i >= rows || unsigned(row) >= unsigned(args.H)) return;
      const output_t* const dy = args.dy + (int64_t(place.n) * CHANNELS_IN * args.H + row) * width;
#pragma unroll 1
      for (int line = threadIdx.x; line < CHANNELS_IN * kRowLines; line += kWarpgroup)
        prefetch_line(reinterpret_cast<const uint8_t*>(dy + line / kRowLines * args.H * width) +
                      min(line % kRowLines * 128, last));
      const uint32_t* const gates =
          args.gates + gate_index(place.n, 0, row, 0, args.H, args.W, CHANNELS_IN);
      if (threadIdx.x < gate_row(args.W, CHANNELS_IN) / 32) prefetch_line(gates + threadIdx.x * 32);
    };
#pragma unroll 1
    for (int i = 0; i < kRowsAhead; i++) prefetch(i);
    const auto plane_of = [&](int unit) { return unit / kRowStrips * kProducers + warp; };
    const auto load = [&](GradientStrip<CHANNELS_IN>& strip, int i, int unit) {
      const int row = place.row + i - kPadRows, plane = plane_of(unit), column = unit % kRowStrips * kStrip;
      strip = {};
      if (i < rows && unsigned(row) < unsigned(args.H) && plane < kPlanes && column < width)
        strip.load(args.dy, args.gates, StripPlace{place.n, row, column}, strips, plane);
    };
    const auto convert = [&](uint4* stage, const GradientStrip<CHANNELS_IN>& strip, int unit) {
      const int plane = plane_of(unit), column = unit % kRowStrips * kStrip;
      float values[kLanePixels][8];
      strip.for_each(args.scale, [&](int i, int c, float, float g) {
        values[i][c] = kScaled ? scaled(g, to_operand) : g;
      });
      uint4* const to = stage + plane * kPitch + kPadColumns + column + lane;
#pragma unroll
      for (int i = 0; i < kLanePixels; i++)
        if (plane < kPlanes && column + lane + i * 32 < width) pack_pixel(to + i * 32, 0, values[i]);
    };
    GradientStrip<CHANNELS_IN> even, odd;
    load(even, 0, 0);
#pragma unroll 1
    for (int i = 0; i < rows; i++) {
      prefetch(i + kRowsAhead);
      await(pipeline.empty + next.stage, next.parity ^ 1);
      uint4* const stage = reinterpret_cast<uint4*>(pipeline.operands + next.stage * kStageBytes);
#pragma unroll 1
      for (int unit = 0; unit < kUnits; unit += 2) {
        load(odd, i, unit + 1);
        convert(stage, even, unit);
        load(even, unit + 2 < kUnits ? i : i + 1, unit + 2 < kUnits ? unit + 2 : 0);
        convert(stage, odd, unit + 1);
      }
      publish_shared();
      arrive(pipeline.full + next.stage);
      next.advance();
    }
  }
}

#endif

}  // namespace
