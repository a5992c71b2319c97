// The producer of conv/wide_sm90.cuh: copies rows of x as they are, raw [channel][word], and converts them
// into the stages of the pipeline, [plane][pixel] of 8 channels.
#pragma once
#include "conv/wide_sm90_pipeline.cuh"

namespace {

#if TENSOR_CORE_WGMMA

// Calls work(word, its first plane) for this thread's part of a row: all planes of a word of float32, half
// the planes of a word of two halves. A thread converts what it has copied itself, so that raw rows need no
// barrier.
template <class Work> __device__ __forceinline__ void for_each_word(int words, const Work& work) {
  for (int i = threadIdx.x; i < words * kWordPixels; i += kWarpgroup) {
    if (kWordPixels == 1 || i < words) work(i, 0);
    else work(i - words, kPlanes / 2);
  }
}

// A row of x, from `from` on, into `raw` [channel][word], in the background.
__device__ __forceinline__ void fetch_row(uint32_t* raw, const value_t* from, int plane_size, int words) {
  for_each_word(words, [&](int word, int plane) {
    const value_t* at = from + int64_t(plane) * 8 * plane_size + word * kWordPixels;
    uint32_t* to = raw + plane * 8 * kRawPitch + word;
#pragma unroll 4
    for (int c = 0; c < kPlanes * 8 / kWordPixels; c++, at += plane_size, to += kRawPitch)
      if (CHANNELS_IN % 16 == 0 || plane * 8 + c < CHANNELS_IN) copy_async<4>(to, at);
  });
}

// 8 channels of a pixel of float32, under a scale, to operands; and the largest finite magnitude so far.
__device__ __forceinline__ void convert_pixel(
    uint4* out, const uint32_t (&words)[8], float scale, float& largest) {
  float value[8];
#pragma unroll
  for (int c = 0; c < 8; c++) {
    value[c] = __uint_as_float(words[c]);
    largest = larger_magnitude(largest, value[c]);
    value[c] = scaled(value[c], scale);
  }
  pack_pixel(out, 0, value);
}

// The low (kHigh = 0) or the high halves of 8 words, 8 channels of two pixels: one of the pixels.
template <int kHigh> __device__ __forceinline__ uint4 halves_of(const uint32_t (&words)[8]) {
  constexpr int kSelector = kHigh ? 0x7632 : 0x5410;
  return make_uint4(__byte_perm(words[0], words[1], kSelector), __byte_perm(words[2], words[3], kSelector),
                    __byte_perm(words[4], words[5], kSelector), __byte_perm(words[6], words[7], kSelector));
}

// A raw row to a stage of the pipeline.
__device__ __forceinline__ void convert_row(
    uint8_t* stage, const uint32_t* raw, int words, float scale, float& largest) {
  for_each_word(words, [&](int word, int first_plane) {
    const uint32_t* in = raw + word;
    uint4* out = reinterpret_cast<uint4*>(stage) + word * kWordPixels;
#pragma unroll 1
    for (int plane = first_plane; plane < first_plane + kPlanes / kWordPixels; plane++) {
      uint32_t eight[8];
#pragma unroll
      for (int c = 0; c < 8; c++)
        eight[c] = plane * 8 + c < CHANNELS_IN ? in[(plane * 8 + c) * kRawPitch] : 0;
      if constexpr (kScaled) {
        convert_pixel(out + plane * kPitch, eight, scale, largest);
      } else {
        out[plane * kPitch] = halves_of<0>(eight);
        if (kPitch % 2 == 0 || word * 2 + 1 < kPitch) out[plane * kPitch + 1] = halves_of<1>(eight);
      }
    }
  });
}

// Fills the pipeline, row by row. again: for the samples alone that need another scale than the first.
__device__ __forceinline__ void produce(const Arguments& args, const TileScheduler& tiles,
                                        const Pipeline<kStages>& pipeline, uint8_t* shared, bool again) {
  PipelineState<kStages> next;
  for (int tile = tiles.begin; tile < tiles.end;) {
    const TilePlace place = tiles[tile];
    const int count = min(tiles.end - tile, tiles.OH - place.row), rows = count + KERNEL_H - 1;
    tile += count;
    const int exponent = again ? sample_exponent(args.largest[place.n]) : kFirstExponent;
    if (again && exponent == kFirstExponent) continue;
    const int words = min((int(args.W) - place.column + kWordPixels - 1) / kWordPixels, kRawPitch);
    const int plane_size = args.H * args.W;
    const value_t* from =
        args.x + (int64_t(place.n) * CHANNELS_IN * args.H + place.row) * args.W + place.column;
    const auto raw = [&](int i) {
      return reinterpret_cast<uint32_t*>(shared + kRawAt + i % kRawRows * kRawBytes);
    };
    const auto fetch = [&](int i) {
      if (i < rows) fetch_row(raw(i), from + i * args.W, plane_size, words);
      commit_copies();  // an empty group too, so that a count of pending groups means the same each time
    };
    const float scale = power_of_two(exponent);
    float largest = 0.f;
    for (int i = 0; i < kRawRows - 1; i++) fetch(i);
    for (int i = 0; i < rows; i++) {
      fetch(i + kRawRows - 1);
      pipeline.producer_acquire(next);
      await_copies<kRawRows - 1>();  // row i has arrived
      convert_row(shared + next.stage * kStageBytes, raw(i), words, scale, largest);
      pipeline.producer_commit(next);
      next.advance();
    }
    if (kScaled && !again) {
      const uint32_t bits = __reduce_max_sync(0xffffffffu, __float_as_uint(largest));
      if (threadIdx.x % 32 == 0) atomicMax(&args.largest[place.n], bits);
    }
  }
}

#endif

}  // namespace
