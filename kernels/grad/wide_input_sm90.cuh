// The producer of the transposed convolution by wgmma: rows of its input g, made of dy and the masks that
// forward kept, with zeros around it, straight to the stages of the pipeline (conv/wide_sm90.cuh).
//
// A warp makes 8 channels × kStrip pixels at a time, units, which come in pairs. Of a pair one is on its
// way in registers, the other in shared memory, where there is room for no more. (Two in registers would
// arrive one after the other: nvcc lets both wait for all loads.)
#pragma once
#include "conv/wide_sm90_pipeline.cuh"
#include "grad/masked.cuh"

namespace conv {

template <class Conv, class Tail, int kChannels> struct Producer<Conv, grad::Masked<Tail, kChannels>> : Conv {
  using Source = grad::Masked<Tail, kChannels>;
  using Strip = typename Source::Strip;
  using Strips = grad::Strips;
  using StripPlace = grad::StripPlace;
  using Conv::kChannelGroups, Conv::kKernelH, Conv::kPadColumns, Conv::kPadRows, Conv::kPitch,
      Conv::kRowBytes, Conv::kScaled;
  static constexpr int kStrip = store::kStrip, kLanePixels = grad::kLanePixels;

  static constexpr int kRegisters = 72;
  static constexpr int kWarps = kWarpgroup / 32;
  static constexpr int kRowStrips = ceil_div(kTileWidth - kPadColumns, kStrip);
  // Of a row of g, in strips, every second unit is raw: with two strips, always of the second, shorter one.
  static constexpr int kRawPitch = kTileWidth - kPadColumns - (kRowStrips - 1) * kStrip;
  static constexpr int kSharedBytes = kWarps * 8 * kRawPitch * 4;  // a warp's [channel][pixel]
  // A warp's units of a row: every kWarps-th channel group, of each the strips. A tile has whole rows.
  static constexpr int kUnits = ceil_div(ceil_div(kChannelGroups, kWarps) * kRowStrips, 2) * 2;

#if TENSOR_CORE_WGMMA

  // A unit of a channel group from `column` of g on, under a scale, to a stage.
  static __device__ __forceinline__ void convert_unit(
      uint4* stage, const Strip& strip, int group, int column, const Tail& tail, int width,
      float to_operand) {
    const int lane = threadIdx.x % 32;
    float values[kLanePixels][8];
    strip.for_each(tail, [&](int i, int c, const auto& gradient) {
      values[i][c] = kScaled ? Conv::scaled(gradient.of[0], to_operand) : gradient.of[0];
    });
    uint4* const to = stage + group * kPitch + kPadColumns + column + lane;
#pragma unroll
    for (int i = 0; i < kLanePixels; i++)
      if (group < kChannelGroups && column + lane + i * 32 < width)
        Conv::pack_pixel(to + i * 32, 0, values[i]);
  }

  // What a warp of the producer knows throughout.
  template <class Arguments, class Pipeline> struct Warp {
    const Arguments& args;
    const Strips& strips;
    const Pipeline& pipeline;
    uint8_t* const stages;
    const int warp, lane, width;
    output_t (&raw)[8][kRawPitch];  // the warp's unit in shared memory
    typename Pipeline::State next = {};

    // The rows of g that tiles from `place` on need, one below the other, into the pipeline.
    __device__ __forceinline__ void produce_rows(const TilePlace& place, int rows) {
      const float to_operand = power_of_two(kScaled ? Source::sample_exponent(args.largest[place.n]) : 0);
      const auto group_of = [&](int unit) { return unit / kRowStrips * kWarps + warp; };
      const auto column_of = [](int unit) { return unit % kRowStrips * kStrip; };
      const auto place_of = [&](int row, int unit) {
        return StripPlace{place.n, place.row + row - kPadRows, column_of(unit)};
      };
      // How many pixels of g a unit has.
      const auto pixels_of = [&](int row, int unit) {
        const StripPlace at = place_of(row, unit);
        return row < rows && unsigned(at.row) < unsigned(args.H) && group_of(unit) < kChannelGroups
                   ? width - at.column
                   : 0;
      };
      const auto word_of = [&](int row, int unit) -> uint32_t {
        const StripPlace at = place_of(row, unit);
        const int channel = group_of(unit) * 8;
        if (pixels_of(row, unit) <= 0 || channel + lane / 4 >= kChannels) return 0;
        const int64_t words = store::mask_index(at.n, channel, at.row, at.column, args.H, args.W, kChannels);
        return args.source.words[words + lane];
      };
      const auto dy_of = [&](int row, int unit) {
        return args.source.dy + Strip::index(place_of(row, unit), strips, group_of(unit));
      };
      const int64_t plane_size = args.H * args.W;
      Strip even;
      uint32_t odd_word;  // the masks of the unit in shared memory
      const auto load_even = [&](int row, int unit) {
        const int pixels = pixels_of(row, unit);
        even = {};
        grad::load_strip<kChannels>(even.dy, dy_of(row, unit), group_of(unit), plane_size, pixels);
        even.word = word_of(row, unit), odd_word = word_of(row, unit + 1);
        even.end_after(pixels);
      };
      const auto copy_odd = [&](int row, int unit) {
        grad::copy_strip<kChannels>(raw, dy_of(row, unit), group_of(unit), plane_size, pixels_of(row, unit));
        commit_copies();
      };
      load_even(0, 0), copy_odd(0, 1);
#pragma unroll 1
      for (int row = 0; row < rows; row++) {
        pipeline.producer_acquire(next);
        uint4* const stage = reinterpret_cast<uint4*>(stages + next.stage * kRowBytes);
#pragma unroll 1
        for (int unit = 0; unit < kUnits; unit += 2) {
          const bool same_row = unit + 2 < kUnits;
          const int next_row = same_row ? row : row + 1, next_unit = same_row ? unit + 2 : 0;
          const auto convert = [&](const Strip& strip, int unit) {
            convert_unit(stage, strip, group_of(unit), column_of(unit), args.source.tail, int(args.W),
                         to_operand);
          };
          convert(even, unit);
          Strip odd;
          odd.word = odd_word;
          load_even(next_row, next_unit);
          await_copies<0>();
          const int pixels = pixels_of(row, unit + 1);
          grad::load_strip<kChannels>(odd.dy, &raw[0][0], group_of(unit + 1), kRawPitch, pixels);
          odd.end_after(pixels);
          convert(odd, unit + 1);
          copy_odd(next_row, next_unit + 1);
        }
        pipeline.producer_commit(next);
        next.advance();
      }
    }
  };

  // Fills the pipeline, row by row. own: the producer's part of shared memory.
  template <class Arguments, class Tiles, class Pipeline>
  static __device__ __forceinline__ void produce(const Arguments& args, const Tiles& tiles,
                                                 const Pipeline& pipeline, uint8_t* stages, uint8_t* own,
                                                 bool) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    // What no unit writes: the zeros on both sides of a row.
    for (int i = threadIdx.x; i < Pipeline::kCount * kRowBytes / 16; i += kWarpgroup)
      reinterpret_cast<uint4*>(stages)[i] = make_uint4(0, 0, 0, 0);
    sync_threads<kWarpgroup>(4);
    auto& raw = reinterpret_cast<output_t (*)[8][kRawPitch]>(own)[warp];
    const Strips strips(args.H, args.W);
    Warp<Arguments, Pipeline> producer{args, strips, pipeline, stages, warp, lane, int(args.W), raw};
#pragma unroll 1
    for (int tile = tiles.begin; tile < tiles.end;) {
      const TilePlace place = tiles[tile];
      const int count = tiles.count(tile, place), rows = count + kKernelH - 1;
      tile += count;
      producer.produce_rows(place, rows);
    }
  }

#endif
};

}  // namespace conv
