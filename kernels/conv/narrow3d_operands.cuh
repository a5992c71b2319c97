// The operands of a 3-D convolution's products: x in the ring, the weights in registers or beside it.
//
// Accuracy: of float32, x - shift and the weights, scaled by powers of two, are each split into two float16,
// high + low; high·high + high·low + low·high, summed in float32, has float32's accuracy. x is scaled by
// input channel, which the weights make up for, and the weights by output channel. A block guesses the scales
// of x from a few planes, and starts again if the largest magnitude turns out to want others. `shift`, one
// value per (sample, input channel) taken from x, removes a large mean; the constant that it adds per output
// channel is left to whoever needs it. Values of 16 bits are operands as they are.
//
// Layout: a pixel's words with a high lie in one ring, its words with lows alone in a second. A word is a
// register of m16n8k8's fragment B, and two are one of m16n8k16's, as they are: lane (g, t) holds pixel g of
// tap 4·step + t, and a warp's loads of 8 neighbouring pixels × 4 taps are free of bank conflicts. The
// weights are fragment A. A word with a high meets the weights' highs, and, its lows skipped, the weights'
// lows; a word of lows the weights' highs: 17.5 products for 27 taps of 3 channels.
#pragma once
#include "conv/narrow3d_tile.cuh"

namespace conv::narrow3d {

__device__ inline float middle(float a, float b, float c) {
  return fmaxf(fminf(a, b), fminf(fmaxf(a, b), c));
}

// The shift of an input channel of a sample, from three of its elements.
__device__ inline float shift_from(float first, float central, float last) {
  const float value = middle(first, central, last);
  return fabsf(value) < 1e36f ? value : 0.f;
}
template <class S> __device__ float shift_of(const Convolution<S>& c, int64_t n, int k) {
  const typename S::value_t* const x = c.x + (n * S::kIn + k) * c.channel;
  return S::kSplit ? shift_from(x[0], x[c.channel / 2], x[c.channel - 1]) : 0.f;
}

// What shifting x takes from a channel of sample n: in double, it may be many times the spread. Eight lanes
// share the work, and all have the result.
template <class S> __device__ double level_of(const Convolution<S>& c, int64_t n, int channel) {
  double level = 0;
  for (int i = 0; i < S::kIn; i++) {
    double taps = 0;
    for (int tap = threadIdx.x % 8; tap < S::kTaps; tap += 8)
      taps += double(c.weight[(channel * S::kIn + i) * S::kTaps + tap]);
    level += taps * double(shift_of(c, n, i));
  }
#pragma unroll
  for (int lanes = 1; lanes < 8; lanes *= 2) level += __shfl_xor_sync(~0u, level, lanes);
  return level;
}

// most = max(most, |v|), if v is finite.
__device__ __forceinline__ void consider(float& most, float v) {
  v = fabsf(v);
  if (v < INFINITY) most = fmaxf(most, v);
}

// Words [k][pixel] of four pixels, stored pixel by pixel.
template <int kCount> __device__ __forceinline__ void store_words(uint32_t* at, const uint32_t (*words)[4]) {
  const auto word = [&](int i) { return words[i % kCount][i / kCount]; };
#pragma unroll
  for (int i = 0; i < kCount; i++)
    reinterpret_cast<uint4*>(at)[i] =
        make_uint4(word(4 * i), word(4 * i + 1), word(4 * i + 2), word(4 * i + 3));
}

// Each warp has them all, in registers.
template <class S> struct RegisterWeights {
  uint32_t words[S::kWeightWords][2];
  static constexpr int kStepStride = 1;  // a warp makes the words of these steps, from first_step() on
  __device__ __forceinline__ static int first_step() { return 0; }
  __device__ __forceinline__ void put(int word, int row, uint32_t value) { words[word][row] = value; }
  // The two rows of a word, or of two neighbours, from an even one on.
  template <int kCount> __device__ __forceinline__ void get(uint32_t (&to)[2 * kCount], int word) const {
#pragma unroll
    for (int i = 0; i < 2 * kCount; i++) to[i] = words[word + i / 2][i % 2];
  }
};

// All warps have them in shared memory, where registers are needed for other things.
struct SharedWeights {
  static constexpr int kStepStride = kBlockWarps;
  uint4* const of_lane;  // [kWeightWords / 2][lane], from this lane's first on
  __device__ __forceinline__ explicit SharedWeights(uint4* fragments)
      : of_lane(fragments + threadIdx.x % 32) {}
  __device__ __forceinline__ static int first_step() { return thread_index_anew() / 32; }
  __device__ __forceinline__ void put(int word, int row, uint32_t value) const {
    reinterpret_cast<uint32_t*>(of_lane + word / 2 * 32)[word % 2 * 2 + row] = value;
  }
  template <int kCount> __device__ __forceinline__ void get(uint32_t (&to)[2 * kCount], int word) const {
    load_shared<2 * kCount>(to, shared_address(of_lane + word / 2 * 32));
  }
};

template <class S, class Weights> struct Operands {
  static constexpr int kFilter = S::kIn * S::kTaps;
  // What is scaled lies below 2^11: a guess that is 16 times too large still fits.
  static constexpr int kTop = 10;

  const Block<S> block;
  Weights weights;
  int first_channel;               // of the weights
  bool fetched;                    // are there weights in shared memory that are to be taken?
  float scale = 1;                 // of x's largest channel, the smallest of all
  bool scales_known = !S::kSplit;  // or a guess, until a run has seen the whole tile; 16 bits need none
  __half2 magnitude;               // the largest that this thread has scaled in a run, of each of two

  __device__ __forceinline__ Operands(const Block<S>& block, const Weights& weights)
      : block(block), weights(weights) {}

  // --------------------------------------------------------------------------------------------- scales of x

  // The largest of all threads' values, which are not negative. All have met before; ends behind a barrier.
  template <int kCount> __device__ __forceinline__ void block_most(float (&most)[kCount]) const {
    static_assert(kCount <= S::kIn);
    auto& largest = block.storage.largest;
    const int tid = thread_index_anew(), lane = tid % 32, warp = tid / 32;
    const auto warp_most = [](float v) {
      return __uint_as_float(__reduce_max_sync(~0u, __float_as_uint(v)));
    };
#pragma unroll
    for (int k = 0; k < kCount; k++) {
      most[k] = warp_most(most[k]);
      if (lane == 0) largest[warp][k] = most[k];
    }
    __syncthreads();
#pragma unroll
    for (int k = 0; k < kCount; k++) most[k] = warp_most(largest[min(lane, kBlockWarps - 1)][k]);
  }

  // From the largest |x - shift| that each thread has seen; ends with a barrier.
  __device__ __forceinline__ void set_scales(const float (&shift)[S::kIn], float (&most)[S::kIn]) {
    const int tid = thread_index_anew();
    block_most(most);
    float all = 0;
#pragma unroll
    for (int k = 0; k < S::kIn; k++) all = fmaxf(all, most[k]);
    const int smallest = fitting_exponent(all, kTop);
    scale = power_of_two(smallest);
#pragma unroll
    for (int k = 0; k < S::kIn; k++) {
      const int more = most[k] > 0 ? min(fitting_exponent(most[k], kTop) - smallest, 24) : 0;
      if (tid == 0) block.storage.scaling[k] = {shift[k], power_of_two(smallest + more), power_of_two(-more)};
    }
    __syncthreads();
  }

  // Elements of x that a thread guesses scales from: its tile's, and the whole sample's, for the shift.
  struct Samples {
    float of_tile[3][S::kIn], of_all[3][S::kIn];
  };
  __device__ __forceinline__ void load(Samples& samples, int planes) const {
    const int64_t middle = (planes - 1) / 2 * block.plane_stride, last = (planes - 1) * block.plane_stride;
    const int64_t channel = block.c.channel;
    const typename S::value_t* own = block.origin + min(int(threadIdx.x), block.items - 1) * block.width;
    const typename S::value_t* all = block.sample;
#pragma unroll
    for (int k = 0; k < S::kIn; k++, own += channel, all += channel) {
      samples.of_tile[0][k] = own[0], samples.of_tile[1][k] = own[middle], samples.of_tile[2][k] = own[last];
      samples.of_all[0][k] = all[0], samples.of_all[1][k] = all[channel / 2],
      samples.of_all[2][k] = all[channel - 1];
    }
  }
  // Ends with a barrier.
  __device__ __forceinline__ void guess_scales(const Samples& samples) {
    float shift[S::kIn], most[S::kIn] = {};
#pragma unroll
    for (int k = 0; k < S::kIn; k++) {
      shift[k] = shift_from(samples.of_all[0][k], samples.of_all[1][k], samples.of_all[2][k]);
#pragma unroll
      for (int i = 0; i < 3; i++) consider(most[k], samples.of_tile[i][k] - shift[k]);
    }
    set_scales(shift, most);
  }

  // The scales that fit, from all that a run of `planes` reads; the weights are fetched for them. The ring is
  // nobody's. Ends with a barrier.
  __device__ void find_scales(int planes) {
    const int tid = thread_index_anew();
    float shift[S::kIn], most[S::kIn] = {};
#pragma unroll
    for (int k = 0; k < S::kIn; k++) shift[k] = block.storage.scaling[k].shift;
#pragma unroll 1
    for (int plane = 0; plane < planes; plane++) {
      const typename S::value_t* const from = block.origin + plane * block.plane_stride;
#pragma unroll 1
      for (int i = tid; i < block.items * block.width; i += kBlock)
#pragma unroll
        for (int k = 0; k < S::kIn; k++) consider(most[k], float(from[k * block.c.channel + i]) - shift[k]);
    }
    fetch_weights(first_channel);
    __syncthreads();
    set_scales(shift, most);
  }

  // After a run: did x's scales fit? If not, now there are such. Ends with a barrier.
  __device__ __forceinline__ bool scales_fit(int planes) {
    if (scales_known) {
      __syncthreads();
      return true;
    }
    scales_known = true;
    float most[1] = {fmaxf(__low2float(magnitude), __high2float(magnitude))};
    block_most(most);
    if (most[0] >= 16 && most[0] < 65520) return true;  // float16 holds it, and its low part too
    find_scales(planes);
    return false;
  }

  // ------------------------------------------------------------------------------------------------- weights

  // To shared memory, where the ring will be; a barrier follows.
  __device__ __forceinline__ void fetch_weights(int from_channel) {
    first_channel = from_channel, fetched = true;
    const int tid = thread_index_anew();
    const typename S::value_t* const from = block.c.weight + first_channel * kFilter;
    float* const to = reinterpret_cast<float*>(block.ring);
    constexpr int kCount = 16 * kFilter, kLoads = (kCount + kBlock - 1) / kBlock;
    // Channels that are not there have weights of zero.
    const int there = S::kOut % 16 ? min((S::kOut - first_channel) * kFilter, kCount) : kCount;
    float own[kLoads];  // on their way together
#pragma unroll
    for (int j = 0; j < kLoads; j++) own[j] = tid + j * kBlock < there ? float(from[tid + j * kBlock]) : 0.f;
#pragma unroll
    for (int j = 0; j < kLoads; j++)
      if (tid + j * kBlock < kCount) to[tid + j * kBlock] = own[j];
  }

  // From there to their place, scaled, by weight_scale in shared memory; ends with a barrier.
  __device__ __forceinline__ void take_weights() {
    fetched = false;
    const int tid = thread_index_anew(), g = tid % 32 / 4, t = tid % 4;
    const float* const fetched_weights = reinterpret_cast<float*>(block.ring);
    const Scaling* const scaling = block.storage.scaling;
    float* const weight_scale = block.storage.weight_scale;
    if (tid < 16 * 8) {  // eight threads per channel
      float most = 0;
#pragma unroll
      for (int i = 0; i < S::kIn; i++)
#pragma unroll 4
        for (int tap = tid % 8; S::kSplit && tap < S::kTaps; tap += 8)
          consider(most, fetched_weights[tid / 8 * kFilter + i * S::kTaps + tap] * scaling[i].share);
      for (int m = 1; m < 8; m *= 2) most = fmaxf(most, __shfl_xor_sync(~0u, most, m));
      if (tid % 8 == 0) weight_scale[tid / 8] = power_of_two(fitting_exponent(most, kTop));
    }
    __syncthreads();
#pragma unroll
    for (int s = Weights::first_step(); s < S::kSteps; s += Weights::kStepStride)
#pragma unroll
      for (int r = 0; r < 2; r++) {
        const int tap = 4 * s + t, row = g + r * 8;
        float high[2 * S::kIn] = {}, low[2 * S::kIn] = {};  // what the highs of x meet, and then its lows
#pragma unroll
        for (int i = 0; i < S::kIn; i++) {
          float w = tap < S::kTaps ? fetched_weights[row * kFilter + i * S::kTaps + tap] : 0.f;
          if (S::kSplit) w = w * scaling[i].share * weight_scale[row];
          high[i] = S::kSplit ? __half2float(__float2half_rn(w)) : w, low[i] = w - high[i];
          if (S::kSplit) high[S::kIn + i] = high[i];
        }
#pragma unroll
        for (int k = 0; k < S::kWords; k++) {
          const uint32_t highs = pack<typename S::operand_t>(high[2 * k], high[2 * k + 1]);
          if (k < S::kHighWords) {
            weights.put(S::kHighs + s * S::kHighWords + k, r, highs);
            weights.put(S::kLows + s * S::kHighWords + k, r,
                        pack<typename S::operand_t>(low[2 * k], low[2 * k + 1]));
          } else {
            weights.put(S::kRest + s * S::kLowWords + k - S::kHighWords, r, highs);
          }
        }
      }
    __syncthreads();
  }

  // -------------------------------------------------------------------------------------------------- pixels

  // Two values as halves: their highs, and what is left of each.
  __device__ __forceinline__ uint32_t split_two(float first, float second, float& first_low,
                                                float& second_low) {
    const uint32_t highs = pack(first, second);
    const float2 lows = residual(first, second, highs);
    first_low = lows.x, second_low = lows.y;
    magnitude = __hmax2(magnitude, __habs2(reinterpret_cast<const __half2&>(highs)));
    return highs;
  }

  // Splits kCount (4 or 1) pixels v [channel][pixel], from `at` on in the ring.
  template <int kCount> __device__ __forceinline__ void put(int at, const float (&v)[S::kIn][4]) {
    uint32_t words[S::kWords][4];
    if constexpr (S::kSplit) {
      float half[2 * S::kIn][kCount];  // highs, before they are rounded, then lows
#pragma unroll
      for (int i = 0; i < S::kIn; i++) {
        const float shift = block.storage.scaling[i].shift, scale = block.storage.scaling[i].scale;
#pragma unroll
        for (int j = 0; j < kCount; j++) half[i][j] = (v[i][j] - shift) * scale;
      }
#pragma unroll
      for (int j = 0; j < kCount; j++)
#pragma unroll
        for (int i = 0; i + 1 < S::kIn; i += 2)
          words[i / 2][j] =
              split_two(half[i][j], half[i + 1][j], half[S::kIn + i][j], half[S::kIn + i + 1][j]);
      // The last channel has no neighbour in its word: its pixels are rounded two by two.
      if constexpr (S::kIn % 2) {
#pragma unroll
        for (int j = 0; j < kCount; j += 2) {
          const int next = min(j + 1, kCount - 1);
          split_two(half[S::kIn - 1][j], half[S::kIn - 1][next], half[2 * S::kIn - 1][j],
                    half[2 * S::kIn - 1][next]);
        }
      }
#pragma unroll
      for (int j = 0; j < kCount; j++)
#pragma unroll
        for (int k = S::kIn / 2; k < S::kWords; k++) words[k][j] = pack(half[2 * k][j], half[2 * k + 1][j]);
    } else {
#pragma unroll
      for (int j = 0; j < kCount; j++)
#pragma unroll
        for (int k = 0; k < S::kWords; k++)
          words[k][j] = pack<typename S::operand_t>(
              v[2 * k][j], 2 * k + 1 < S::kIn ? v[min(2 * k + 1, S::kIn - 1)][j] : 0.f);
    }
    uint32_t *const to = block.ring + at * S::kHighWords, *const low_to =
                                                              block.low_ring() + at * S::kLowWords;
    if constexpr (kCount == 4) {
      store_words<S::kHighWords>(to, words);
      if constexpr (S::kLowWords > 0) store_words<S::kLowWords>(low_to, words + S::kHighWords);
    } else {
#pragma unroll
      for (int k = 0; k < S::kWords; k++)
        (k < S::kHighWords ? to[k] : low_to[k - S::kHighWords]) = words[k][0];
    }
  }

  // Splits this thread's items of a plane, of which an input channel begins at from + k·channel.
  __device__ __forceinline__ void split_plane(int plane, const typename S::value_t* from, int64_t channel) {
    const int slot = plane % S::kRing * block.c.plane;
    const uint16_t* const places = block.places();
    block.for_items(plane, [&](int i) {
      const int at = slot + places[i];
      float v[S::kIn][4];
      if (block.c.aligned) {
#pragma unroll
        for (int k = 0; k < S::kIn; k++) {
          const Vector<typename S::value_t> four = load_vector(from + k * channel + i * 4);
#pragma unroll
          for (int j = 0; j < 4; j++) v[k][j] = four.at[j];
        }
        put<4>(at, v);
      } else {
#pragma unroll
        for (int k = 0; k < S::kIn; k++) v[k][0] = from[k * channel + i];
        put<1>(at, v);
      }
    });
  }
};

}  // namespace conv::narrow3d
