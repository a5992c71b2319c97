// The producer of conv/wide_sm90.cuh for a convolution of x: copies rows of x as they are, raw
// [channel][word], and converts them into the stages of the pipeline, [channel group][pixel] of 8 channels.
#pragma once
#include "conv/wide_sm90_pipeline.cuh"

namespace conv {

template <class Conv> struct Producer<Conv, Input<typename Conv::Operands>> : Conv {
  using Conv::kChannelGroups, Conv::kChannelsIn, Conv::kFirstExponent, Conv::kKernelH, Conv::kPitch,
      Conv::kScaled;
  using typename Conv::value_t;

  static constexpr int kRegisters = 56;
  static constexpr int kRawRows = 2;                       // of x under way at a time
  static constexpr int kWordPixels = 4 / sizeof(value_t);  // x is copied by words of 4 bytes
  static constexpr int kRawPitch = ceil_div(kPitch, kWordPixels);
  static constexpr int kRawBytes = ceil_div(kChannelsIn * kRawPitch, 4) * 16;  // [channel][word]
  static constexpr int kSharedBytes = kRawRows * kRawBytes;

#if TENSOR_CORE_WGMMA

  // Calls work(word, its first channel group) for this thread's part of a row: all channel groups of a word
  // of float32, half of them of a word of two halves. A thread converts what it has copied itself, so that
  // raw rows need no barrier; its part is the same for rows of any length, since others may still convert
  // the last strip's rows.
  template <class Work> static __device__ __forceinline__ void for_each_word(int words, const Work& work) {
    if constexpr (kWordPixels == 1) {
      for (int i = threadIdx.x; i < words; i += kWarpgroup) work(i, 0);
    } else {
      for (int i = threadIdx.x; i < kRawPitch * kWordPixels; i += kWarpgroup)
        if (i % kRawPitch < words) work(i % kRawPitch, i / kRawPitch * (kChannelGroups / 2));
    }
  }

  // A row of x, from `from` on, into `raw` [channel][word], in the background.
  static __device__ __forceinline__ void fetch_row(uint32_t* raw, const value_t* from, int plane_size,
                                                   int words) {
    for_each_word(words, [&](int word, int group) {
      const value_t* at = from + int64_t(group) * 8 * plane_size + word * kWordPixels;
      uint32_t* to = raw + group * 8 * kRawPitch + word;
#pragma unroll 4
      for (int c = 0; c < kChannelGroups * 8 / kWordPixels; c++, at += plane_size, to += kRawPitch)
        if (kChannelsIn % 16 == 0 || group * 8 + c < kChannelsIn) copy_async<4>(to, at);
    });
  }

  // 8 channels of a pixel of float32, under a scale, to operands; and the largest finite magnitude so far.
  static __device__ __forceinline__ void convert_pixel(uint4* out, const uint32_t (&words)[8], float scale,
                                                       float& largest) {
    float value[8];
#pragma unroll
    for (int c = 0; c < 8; c++) {
      value[c] = __uint_as_float(words[c]);
      largest = larger_magnitude(largest, value[c]);
      value[c] = Conv::scaled(value[c], scale);
    }
    Conv::pack_pixel(out, 0, value);
  }

  // The low (kHigh = 0) or the high halves of 8 words, 8 channels of two pixels: one of the pixels.
  template <int kHigh> static __device__ __forceinline__ uint4 halves_of(const uint32_t (&words)[8]) {
    constexpr int kSelector = kHigh ? 0x7632 : 0x5410;
    return make_uint4(__byte_perm(words[0], words[1], kSelector), __byte_perm(words[2], words[3], kSelector),
                      __byte_perm(words[4], words[5], kSelector), __byte_perm(words[6], words[7], kSelector));
  }

  // A raw row to a stage of the pipeline.
  static __device__ __forceinline__ void convert_row(uint8_t* stage, const uint32_t* raw, int words,
                                                     float scale, float& largest) {
    for_each_word(words, [&](int word, int first_group) {
      const uint32_t* in = raw + word;
      uint4* out = reinterpret_cast<uint4*>(stage) + word * kWordPixels;
#pragma unroll 1
      for (int group = first_group; group < first_group + kChannelGroups / kWordPixels; group++) {
        uint32_t eight[8];
#pragma unroll
        for (int c = 0; c < 8; c++)
          eight[c] = group * 8 + c < kChannelsIn ? in[(group * 8 + c) * kRawPitch] : 0;
        if constexpr (kScaled) {
          convert_pixel(out + group * kPitch, eight, scale, largest);
        } else {
          out[group * kPitch] = halves_of<0>(eight);
          if (kPitch % 2 == 0 || word * 2 + 1 < kPitch) out[group * kPitch + 1] = halves_of<1>(eight);
        }
      }
    });
  }

  // Fills the pipeline, row by row. own: the producer's part of shared memory. again: for the samples alone
  // that need another scale than the first.
  template <class Arguments, class Tiles, class Pipeline>
  static __device__ __forceinline__ void produce(const Arguments& args, const Tiles& tiles,
                                                 const Pipeline& pipeline, uint8_t* stages, uint8_t* own,
                                                 bool again) {
    typename Pipeline::State next;
    for (int tile = tiles.begin; tile < tiles.end;) {
      const auto place = tiles[tile];
      const int count = tiles.count(tile, place), rows = count + kKernelH - 1;
      tile += count;
      const int exponent = again ? Conv::sample_exponent(args.largest[place.n]) : kFirstExponent;
      if (again && exponent == kFirstExponent) continue;
      const int words = min((int(args.W) - place.column + kWordPixels - 1) / kWordPixels, kRawPitch);
      const int plane_size = args.H * args.W;
      const value_t* from =
          args.source.x + (int64_t(place.n) * kChannelsIn * args.H + place.row) * args.W + place.column;
      const auto raw = [&](int i) { return reinterpret_cast<uint32_t*>(own + i % kRawRows * kRawBytes); };
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
        convert_row(stages + next.stage * Conv::kRowBytes, raw(i), words, scale, largest);
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
};

}  // namespace conv
