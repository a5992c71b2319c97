// A small 3-D convolution on tensor cores at eager's accuracy, whose output a sink takes from the registers: what the fused kernels share.
//
// Stride 1, no padding, CHANNELS_IN ≤ 4; 16 output channels at a time. A block fills a multiprocessor. It owns some output rows of one
// sample and walks along depth, with a ring of input planes in shared memory: KERNEL_D that are in use, and three that come. Its warps
// share out each plane's positions and pixels, and may be two planes apart.
//
// Accuracy: of float32, x - shift and the weights, scaled by powers of two, are each split into two halves of float16, high + low;
// high·high + high·low + low·high, summed in float32, has float32's accuracy. x is scaled by input channel, which the weights make up
// for, and the weights by output channel. A block guesses the scales of x from a few planes, and starts again if the largest magnitude
// turns out to want others. `shift`, one value per (sample, input channel) taken from x, removes a large mean; the constant that it adds
// per output channel is left to whoever needs it. Halves, VALUE_T of 16 bits, are themselves.
//
// A pixel is some words of two halves: its highs, then its lows. Those words with a high lie in one array, the others in a second.
// They are the B fragment of m16n8k16 as they are: lane (g, t) holds pixel g of tap 4·step + t, and a warp's loads of 8
// neighbouring pixels × 4 taps are free of bank conflicts. The weights are the A fragment, in registers. Each word meets the
// weights' highs, and those with a high meet their lows too (and 0, where they hold a low): 17.5 products for 27 taps of 3 channels.
#pragma once
#include <limits.h>

#include "reduce.cuh"
#include "tensor_core.cuh"

#ifndef CHANNELS_IN
#define CHANNELS_IN 3
#define CHANNELS_OUT 16
#define KERNEL_D 3
#define KERNEL_H 3
#define KERNEL_W 3
#endif
#ifndef STAGE_PIXELS  // the plan, as tiling.py makes it; else room for any kernel's arrays, so that a source compiles alone
#define STAGE_PIXELS 8704
#define PIXEL_WORDS kWords
#define RING_PLANES kRing
#define RAW_PLANES kRaw
#define TURN_POSITIONS kTurn
#define STATIC_SHARED (33 << 10)
#endif

constexpr int kIn = CHANNELS_IN, kOut = CHANNELS_OUT, kDepth = KERNEL_D, kHeight = KERNEL_H, kWidth = KERNEL_W;
constexpr int kTaps = kDepth * kHeight * kWidth, kSteps = (kTaps + 3) / 4;
constexpr bool kSplit = std::is_same_v<value_t, float>;
using operand_t = std::conditional_t<kSplit, half_t, value_t>;
constexpr int kMain = (kIn + 1) / 2, kRest = kSplit ? kIn - kMain : 0, kWords = kMain + kRest;  // of a pixel: with a high, the others, all
constexpr int kTiles = 4, kTurn = 8 * kTiles;  // of 8 positions, that a warp computes side by side
constexpr int kStage = STAGE_PIXELS, kRing = kDepth + 3, kRaw = 3;  // planes: in the ring, and as they come
constexpr int kBlock = 384, kBlockWarps = kBlock / 32;  // 168 registers a thread
static_assert(kIn >= 1 && kIn <= 4 && kOut % 16 == 0 && kWords * kStage >= 16 * kIn * kTaps, "the sizes that this kernel serves");
static_assert(PIXEL_WORDS == kWords && RING_PLANES == kRing && RAW_PLANES == kRaw && TURN_POSITIONS == kTurn, "what was planned with");

struct Convolution {
  const value_t* x;                // (N, kIn, D, H, W)
  const value_t* weight;           // (kOut, kIn, kDepth, kHeight, kWidth)
  int64_t channel;                 // D·H·W
  int D, H, W, OD, OH, OW;
  int rows, slabs, depth, chunks;  // a block's output rows and planes, and how many such parts there are
  int pitch, plane, raw;           // pixels: of a row and a plane of the ring; of a raw plane
  int shared;                      // bytes of dynamic shared memory
  bool aligned, bulk;              // rows start at multiples of four elements, which of float32 are 16 bytes; of 16 bytes
  __host__ __device__ int slots() const { return slabs * chunks; }  // blocks of a sample
};

// A block's dynamic shared memory: the ring; planes of x as they come; where the output positions' pixels lie in a plane, and where
// the items'. Each part begins where the one before it ends.
HOST_DEVICE int turns(const Convolution& c) { return (min(c.rows, c.OH) * c.OW + kTurn - 1) / kTurn; }
HOST_DEVICE int laid_out_bytes(const Convolution& c) {
  return kWords * kStage * 4 + kRaw * kIn * c.raw * int(sizeof(value_t)) + (turns(c) * kTurn + c.raw) * 2;
}

// `rows` to `shared` are the plan (tiling.py's VolumeTiling). One that has no room for the layout asks for more than there is, so that
// the launch fails.
inline Convolution convolution(const value_t* x, const value_t* weight, int64_t D, int64_t H, int64_t W, int64_t rows, int64_t depth,
                               int64_t pitch, int64_t raw, int64_t shared) {
  Convolution c{x, weight, D * H * W, int(D), int(H), int(W), int(D) - kDepth + 1, int(H) - kHeight + 1, int(W) - kWidth + 1};
  c.rows = int(rows), c.slabs = (c.OH + c.rows - 1) / c.rows;
  c.depth = int(depth), c.chunks = (c.OD + c.depth - 1) / c.depth;
  c.pitch = int(pitch), c.plane = (c.rows + kHeight - 1) * c.pitch, c.raw = int(raw);
  const bool fits = c.pitch >= W && kRing * c.plane <= kStage && (c.rows + kHeight - 1) * W <= raw && laid_out_bytes(c) <= shared;
  c.shared = fits ? int(shared) : INT_MAX;
  c.aligned = vectors_fit(x, W), c.bulk = W * sizeof(value_t) % 16 == 0 && uintptr_t(x) % 16 == 0;
  return c;
}

// What x needs, by input channel: it becomes (x - shift)·scale, and its weights are multiplied by `share`, Sweep's scale over this one.
struct Input {
  float shift, scale, share;
};

// A block's static shared memory, of which each kernel has some and more of its own.
struct SweepStorage {
  uint64_t done[2];                      // a barrier: all threads are through with a plane of output
  uint64_t arrived[kRaw];                // and: a plane of x has been copied
  Moments<float> moments[kBlockWarps][16];  // by warp and channel
  float weight_scale[16];
  float largest[kBlockWarps][kIn];
  Input inputs[kIn];
  uint32_t taps[4 * kSteps];  // where a tap's pixel lies in the ring, from a position's
};
template <class Storage> constexpr bool kPlanned = sizeof(Storage) <= STATIC_SHARED;

// The part of the output that a block owns.
struct Part {
  int64_t n;
  int slot, first_row, row_count, first_plane, plane_count, limit;  // limit: output positions in a plane
  __device__ Part(const Convolution& c, unsigned job) {
    n = job / c.slots(), slot = int(job % c.slots());
    first_row = slot % c.slabs * c.rows, row_count = min(c.rows, c.OH - first_row);
    first_plane = slot / c.slabs * c.depth, plane_count = min(c.depth, c.OD - first_plane);
    limit = row_count * c.OW;
  }
};
__device__ inline float slot_count(const Convolution& c, int slot) {
  return float(min(c.rows, c.OH - slot % c.slabs * c.rows)) * float(min(c.depth, c.OD - slot / c.slabs * c.depth)) * float(c.OW);
}

// ---------------------------------------------------------------------------------------------------- primitives
using namespace tensor_core;
__device__ __forceinline__ uint32_t pack(float first, float second) {
  if constexpr (std::is_same_v<operand_t, half_t>) {
    const __half2 both = __floats2half2_rn(first, second);
    return reinterpret_cast<const uint32_t&>(both);
  } else {
    const __nv_bfloat162 both = __floats2bfloat162_rn(first, second);
    return reinterpret_cast<const uint32_t&>(both);
  }
}
__device__ __forceinline__ float rounded(float v) { return __half2float(__float2half_rn(v)); }
// Words [k][pixel] of four pixels, stored pixel by pixel.
template <int kCount> __device__ __forceinline__ void store_words(uint32_t* at, const uint32_t (*words)[4]) {
#pragma unroll
  for (int i = 0; i < kCount; i++)
    reinterpret_cast<uint4*>(at)[i] = make_uint4(words[4 * i % kCount][4 * i / kCount], words[(4 * i + 1) % kCount][(4 * i + 1) / kCount],
                                                 words[(4 * i + 2) % kCount][(4 * i + 2) / kCount],
                                                 words[(4 * i + 3) % kCount][(4 * i + 3) / kCount]);
}
// Scales are 2^k, of which only k is reckoned with, in [-126, 127].
__device__ inline float power_of_two(int k) { return __int_as_float((k + 127) << 23); }
// k with largest·2^k in [2^10, 2^11), for what is not negative; 0 for zero.
__device__ inline int scale_for(float largest) { return largest > 0 ? min(max(10 + 127 - (__float_as_int(largest) >> 23), -126), 127) : 0; }
__device__ inline float middle(float a, float b, float c) { return fmaxf(fminf(a, b), fminf(fmaxf(a, b), c)); }

// The shift of an input channel of a sample, from three of its elements.
__device__ inline float shift_from(float first, float central, float last) {
  const float value = middle(first, central, last);
  return fabsf(value) < 1e36f ? value : 0.f;
}
__device__ inline float shift_of(const Convolution& c, int64_t n, int k) {
  const value_t* const x = c.x + (n * kIn + k) * c.channel;
  return kSplit ? shift_from(x[0], x[c.channel / 2], x[c.channel - 1]) : 0.f;
}

// ---------------------------------------------------------------------------------------------------- the sweep
// The convolution of a block's part, 16 output channels at a time: run() as often as wanted, for the channels whose weights were fetched,
// by the constructor or by fetch_weights().
struct Sweep {
  static constexpr int kAhead = kDepth + 1;  // the plane of x that is split while an output plane is computed
  const Convolution& c;
  const Part& part;
  SweepStorage& storage;
  uint32_t* const shared;  // the ring: the words with a high, then the others; planes as they come; positions; places
  const int tid = threadIdx.x, lane = tid % 32, warp = tid / 32, g = lane / 4, t = lane % 4;
  const int turns = (part.limit + kTurn - 1) / kTurn;
  int planes = part.plane_count + kDepth - 1;  // of x, that a run needs
  uint32_t parities = 0;  // a bit each: of the barriers `arrived` as awaited next, of `done` as arrived at next
  const int width = c.aligned ? 4 : 1, quads = c.aligned ? c.W / 4 : c.W, items = (part.row_count + kHeight - 1) * quads;  // an item: pixels side by side
  const int64_t plane_stride = int64_t(c.H) * c.W;
  const value_t* const origin = c.x + part.n * kIn * c.channel + part.first_plane * plane_stride + part.first_row * c.W;
  int first_channel;          // of the weights
  bool fetched;               // and not yet taken
  float scale = 1;            // of x's largest channel, the smallest of all
  __half2 magnitude;          // the largest that this thread has scaled, of each of two
  bool scales_fit = !kSplit;  // the whole part, which the first run sees; until then they are a guess. Halves need none
  uint32_t main[kSteps * kMain][2], lows[kSteps * kMain][2], rest[kSteps * kRest + 1][2];  // the weights
#if __CUDA_ARCH__ >= 900
  const bool bulk = kSplit ? c.aligned : c.bulk;  // the same, of float32
#else
  static constexpr bool bulk = false;
#endif

  __device__ __forceinline__ Sweep(const Convolution& c, const Part& part, SweepStorage& storage, uint32_t* shared, int first_channel)
      : c(c), part(part), storage(storage), shared(shared) {
    if (tid == 0) {
      for (int i = 0; i < 2; i++) initialize(done(i), kBlock);
      for (int i = 0; i < kRaw; i++) initialize(arrived(i), 1);
#if __CUDA_ARCH__ >= 900
      publish_barriers();
#endif
    }
    float sample[3][kIn], end[3][kIn];  // of the part, and of the whole sample's channels
    if constexpr (kSplit) {
      const value_t* own = origin + min(tid, items - 1) * width;
      const value_t* whole = c.x + part.n * kIn * c.channel;
      const int64_t middle = (planes - 1) / 2 * plane_stride, last = (planes - 1) * plane_stride;
#pragma unroll
      for (int k = 0; k < kIn; k++, own += c.channel, whole += c.channel) {
        sample[0][k] = own[0], sample[1][k] = own[middle], sample[2][k] = own[last];
        end[0][k] = whole[0], end[1][k] = whole[c.channel / 2], end[2][k] = whole[c.channel - 1];
      }
    }
    fetch_weights(first_channel);
#pragma unroll 1
    for (int q = tid; q < turns * kTurn; q += kBlock) positions()[q] = q < part.limit ? q / c.OW * c.pitch + q % c.OW : 0;
#pragma unroll 1
    for (int i = tid; i < items; i += kBlock) places()[i] = i / quads * c.pitch + i % quads * width;
    if (tid < 4 * kSteps) {
      const int tap = min(tid, kTaps - 1);
      storage.taps[tid] = tap / (kHeight * kWidth) * c.plane + tap / kWidth % kHeight * c.pitch + tap % kWidth;
    }
    if constexpr (kSplit) {
      float shift[kIn], most[kIn] = {};
#pragma unroll
      for (int k = 0; k < kIn; k++) {
        shift[k] = shift_from(end[0][k], end[1][k], end[2][k]);
#pragma unroll
        for (int i = 0; i < 3; i++) consider(most[k], sample[i][k] - shift[k]);
      }
      set_scales(shift, most);
    } else {
      __syncthreads();  // the weights are there
    }
  }

  __device__ __forceinline__ uint32_t* second_ring() const { return shared + kMain * kStage; }
  __device__ __forceinline__ value_t* raw(int plane) const {
    return reinterpret_cast<value_t*>(shared + kWords * kStage) + plane % kRaw * kIn * c.raw;
  }
  __device__ __forceinline__ uint16_t* positions() const { return reinterpret_cast<uint16_t*>(raw(0) + kRaw * kIn * c.raw); }
  __device__ __forceinline__ uint16_t* places() const { return positions() + ::turns(c) * kTurn; }

  __device__ __forceinline__ static void consider(float& most, float v) {
    v = fabsf(v);
    if (v < INFINITY) most = fmaxf(most, v);
  }
  // Of all threads, which have met before, and whose values are not negative; ends behind a barrier.
  template <int kCount> __device__ __forceinline__ void block_most(float (&most)[kCount]) const {
    static_assert(kCount <= kIn);
    const int tid = thread_index_anew(), lane = tid % 32, warp = tid / 32;
    const auto warp_most = [](float v) { return __uint_as_float(__reduce_max_sync(~0u, __float_as_uint(v))); };
#pragma unroll
    for (int k = 0; k < kCount; k++) {
      most[k] = warp_most(most[k]);
      if (lane == 0) storage.largest[warp][k] = most[k];
    }
    __syncthreads();
#pragma unroll
    for (int k = 0; k < kCount; k++) most[k] = warp_most(storage.largest[min(lane, kBlockWarps - 1)][k]);
  }

  // From the largest |x - shift| that each thread has seen; ends with a barrier.
  __device__ __forceinline__ void set_scales(const float (&shift)[kIn], float (&most)[kIn]) {
    const int tid = thread_index_anew();
    block_most(most);
    float all = 0;
#pragma unroll
    for (int k = 0; k < kIn; k++) all = fmaxf(all, most[k]);
    const int smallest = scale_for(all);
    scale = power_of_two(smallest);
#pragma unroll
    for (int k = 0; k < kIn; k++) {
      const int more = most[k] > 0 ? min(scale_for(most[k]) - smallest, 24) : 0;
      if (tid == 0) storage.inputs[k] = {shift[k], power_of_two(smallest + more), power_of_two(-more)};
    }
    __syncthreads();
  }
  // The scales that fit; the weights are fetched for them. The ring is nobody's.
  __device__ void find_scales() {
    const int tid = thread_index_anew();
    float shift[kIn], most[kIn] = {};
#pragma unroll
    for (int k = 0; k < kIn; k++) shift[k] = storage.inputs[k].shift;
#pragma unroll 1
    for (int plane = 0; plane < planes; plane++)
#pragma unroll 1
      for (int i = tid; i < items * width; i += kBlock)
#pragma unroll
        for (int k = 0; k < kIn; k++) consider(most[k], float(origin[plane * plane_stride + k * c.channel + i]) - shift[k]);
    fetch_weights(first_channel);
    __syncthreads();
    set_scales(shift, most);
  }

  // d += the products of words i - 1 and i: weights of two rows each, and a pixel's.
  __device__ __forceinline__ static void multiply_pair(float (&d)[4], const uint32_t (*a)[2], const uint32_t* b) {
    multiply_add<operand_t>(d, {a[-1][0], a[-1][1], a[0][0], a[0][1]}, b[-1], b[0]);
  }

  // To shared memory, where the ring will be; a barrier follows.
  static constexpr int kFilter = kIn * kTaps;
  __device__ __forceinline__ void fetch_weights(int from_channel) {
    first_channel = from_channel, fetched = true;
    const int tid = thread_index_anew();
    constexpr int kLoads = (16 * kFilter + kBlock - 1) / kBlock;  // on their way together
    float own[kLoads];
#pragma unroll
    for (int j = 0; j < kLoads; j++) own[j] = tid + j * kBlock < 16 * kFilter ? float(c.weight[first_channel * kFilter + tid + j * kBlock]) : 0.f;
#pragma unroll
    for (int j = 0; j < kLoads; j++)
      if (tid + j * kBlock < 16 * kFilter) reinterpret_cast<float*>(shared)[tid + j * kBlock] = own[j];
  }
  // To registers, scaled, which weight_scale tells; ends with a barrier.
  __device__ __forceinline__ void take_weights() {
    const int tid = thread_index_anew(), g = tid % 32 / 4, t = tid % 4;
    const float* const weights = reinterpret_cast<float*>(shared);
    if (tid < 16 * 8) {
      float most = 0;
#pragma unroll
      for (int i = 0; i < kIn; i++)
#pragma unroll 4
        for (int tap = tid % 8; kSplit && tap < kTaps; tap += 8) consider(most, weights[tid / 8 * kFilter + i * kTaps + tap] * storage.inputs[i].share);
      for (int m = 1; m < 8; m *= 2) most = fmaxf(most, __shfl_xor_sync(~0u, most, m));
      if (tid % 8 == 0) storage.weight_scale[tid / 8] = power_of_two(scale_for(most));
    }
    __syncthreads();
#pragma unroll
    for (int s = 0; s < kSteps; s++)
#pragma unroll
      for (int r = 0; r < 2; r++) {
        const int tap = 4 * s + t, row = g + r * 8;
        float high[2 * kIn] = {}, low[2 * kIn] = {};
#pragma unroll
        for (int i = 0; i < kIn; i++) {
          float w = tap < kTaps ? weights[row * kFilter + i * kTaps + tap] : 0.f;
          if (kSplit) w = w * storage.inputs[i].share * storage.weight_scale[row];
          high[i] = kSplit ? rounded(w) : w, low[i] = w - high[i];
          if (kSplit) high[kIn + i] = high[i];  // for the lows of x
        }
#pragma unroll
        for (int k = 0; k < kWords; k++) {
          const uint32_t highs = pack(high[2 * k], high[2 * k + 1]);
          if (k < kMain) main[s * kMain + k][r] = highs, lows[s * kMain + k][r] = pack(low[2 * k], low[2 * k + 1]);
          else rest[s * kRest + k - kMain][r] = highs;
        }
      }
    __syncthreads();
  }

  __device__ __forceinline__ uint64_t* done(int plane) const { return storage.done + plane % 2; }
  __device__ __forceinline__ uint64_t* arrived(int plane) const { return storage.arrived + plane % kRaw; }
  // The items of a plane that this thread copies and splits. They change from plane to plane, but not from one to the next in its place.
  template <class Body> __device__ __forceinline__ void for_items(int plane, Body body) const {
    int first = tid + plane % kRaw * (kBlock / kRaw);
    if (first >= kBlock) first -= kBlock;
#pragma unroll 1
    for (int i = first; i < items; i += kBlock) body(i);
  }
  // A plane's copies set off; its rows follow one another in memory. Bulk copies are a warp's work, each time another's.
  __device__ __forceinline__ void stage(int plane) const {
    const value_t* const from = origin + plane * plane_stride;
    value_t* const to = raw(plane);
#if __CUDA_ARCH__ >= 900
    if (bulk) {
      if (tid != plane % kBlockWarps * 32 || plane >= planes) return;
      const int bytes = items * 4 * int(sizeof(value_t));
      arrive(arrived(plane), kIn * bytes);
      for (int k = 0; k < kIn; k++) copy_bulk(to + k * items * 4, from + k * c.channel, bytes, arrived(plane));
      return;
    }
#endif
    if (plane < planes) for_items(plane, [&](int i) {
#pragma unroll
      for (int k = 0; k < kIn; k++)
        if (c.aligned) copy_async<4 * sizeof(value_t)>(to + (k * items + i) * 4, from + k * c.channel + i * 4);
        else if constexpr (kSplit) copy_async<4>(to + k * items + i, from + k * c.channel + i);
        else to[k * items + i] = from[k * c.channel + i];  // too few bytes for an asynchronous copy
    });
    commit_copies();  // a group, empty where there is no plane
  }
  __device__ __forceinline__ void await_staged(int plane) {
    const uint32_t bit = 1u << plane % kRaw;
    if (bulk) await(arrived(plane), (parities & bit) != 0), parities ^= bit;
    else await_copies<1>();  // all groups but the newest, the next plane's
  }
  // Two values as halves, their highs, and what is left of each.
  __device__ __forceinline__ void split_two(uint32_t& highs, float first, float second, float& first_low, float& second_low) {
    highs = pack(first, second);
    const __half2 both = reinterpret_cast<const __half2&>(highs);
    first_low = first - __low2float(both), second_low = second - __high2float(both);
    magnitude = __hmax2(magnitude, __habs2(both));
  }
  // Splits pixels, from `at` on in the ring.
  template <int kCount> __device__ __forceinline__ void put(int at, const float (&v)[kIn][4]) {
    uint32_t words[kWords][4];
    if constexpr (kSplit) {
      float half[2 * kIn][kCount];  // highs, then lows
#pragma unroll
      for (int i = 0; i < kIn; i++) {
        const float shift = storage.inputs[i].shift, scale = storage.inputs[i].scale;
#pragma unroll
        for (int j = 0; j < kCount; j++) half[i][j] = (v[i][j] - shift) * scale;
      }
#pragma unroll
      for (int j = 0; j < kCount; j++)
#pragma unroll
        for (int i = 0; i + 1 < kIn; i += 2)
          split_two(words[i / 2][j], half[i][j], half[i + 1][j], half[kIn + i][j], half[kIn + i + 1][j]);
      if constexpr (kIn % 2) {  // the last channel has no neighbour in its word: its pixels are rounded two by two
#pragma unroll
        for (int j = 0; j < kCount; j += 2) {
          const int next = min(j + 1, kCount - 1);
          uint32_t highs;
          split_two(highs, half[kIn - 1][j], half[kIn - 1][next], half[2 * kIn - 1][j], half[2 * kIn - 1][next]);
        }
      }
#pragma unroll
      for (int j = 0; j < kCount; j++)
#pragma unroll
        for (int k = kIn / 2; k < kWords; k++) words[k][j] = pack(half[2 * k][j], half[2 * k + 1][j]);
    } else {
#pragma unroll
      for (int j = 0; j < kCount; j++)
#pragma unroll
        for (int k = 0; k < kWords; k++) words[k][j] = pack(v[2 * k][j], 2 * k + 1 < kIn ? v[min(2 * k + 1, kIn - 1)][j] : 0.f);
    }
    if constexpr (kCount == 4) {
      store_words<kMain>(shared + at * kMain, words);
      if constexpr (kRest > 0) store_words<kRest>(second_ring() + at * kRest, words + kMain);
    } else {
#pragma unroll
      for (int k = 0; k < kWords; k++) (k < kMain ? shared[at * kMain + k] : second_ring()[at * kRest + k - kMain]) = words[k][0];
    }
  }
  // A plane, of which an input channel begins at from + k·channel.
  __device__ __forceinline__ void split(int plane, const value_t* from, int64_t channel) {
    const int slot = plane % kRing * c.plane;
    const uint16_t* const places = this->places();
    for_items(plane, [&](int i) {
      const int at = slot + places[i];
      float v[kIn][4];
      if (c.aligned) {
#pragma unroll
        for (int k = 0; k < kIn; k++) {
          const Vector<value_t> four = load_vector(from + k * channel + i * 4);
#pragma unroll
          for (int j = 0; j < 4; j++) v[k][j] = four.at[j];
        }
        put<4>(at, v);
      } else {
#pragma unroll
        for (int k = 0; k < kIn; k++) v[k][0] = from[k * channel + i];
        put<1>(at, v);
      }
    });
  }

  // Hands the convolution to `sink`, in units of 1 / (scale of x · weight_scale[channel]); lane (g, t) receives channels g and g + 8 of
  // positions q + 2t, q + 2t + 1 of each 8: values[tile][0, 1] and [2, 3]. The sink's start(scale), behind a barrier, begin(sum) and
  // take(values, plane, q, limit), of kTurn neighbouring positions from q on; meanwhile(step) between the products of a turn, for work
  // that need not wait for them; finish(), in front of a barrier. Then it may have to start again. The run takes the first `count` of the
  // part's turns, plane by plane.
  template <class Sink> __device__ __forceinline__ void run(Sink& sink, int count) {
    planes = count ? (count + turns - 1) / turns + kDepth - 1 : 0;
    while (true) {
      if (fetched) take_weights(), fetched = false;
      magnitude = __half2(0, 0);
      run_once(sink, count);
      if (scales_fit) return __syncthreads();
      scales_fit = true;
      float most[1] = {fmaxf(__low2float(magnitude), __high2float(magnitude))};
      block_most(most);
      if (most[0] >= 16 && most[0] < 65520) return;  // float16 holds it, and its low part too
      find_scales();
    }
  }

  template <class Sink> __device__ __forceinline__ void run_once(Sink& sink, int count) {
    stage(kAhead);
#pragma unroll 1
    for (int plane = 0; plane < min(kAhead, planes); plane++) split(plane, origin + plane * plane_stride, c.channel);
    __syncthreads();
    sink.start(scale);

    constexpr uint32_t kPixel = kMain * 4;  // bytes, in the ring's first part
    const uint32_t plane_bytes = c.plane * kPixel, ring_bytes = kRing * plane_bytes;
    const uint32_t first_at = shared_address(shared), second_at = shared_address(second_ring()) - first_at / kMain * kRest;
    const uint16_t* const positions = this->positions();
    const int t = thread_index_anew() % 4;
    uint32_t offset[kSteps];  // of this lane's tap, from a position's pixel
#pragma unroll
    for (int s = 0; s < kSteps; s++) offset[s] = storage.taps[4 * s + t] * kPixel;
    int turn = warp;  // this warp's next
#pragma unroll 1
    for (int plane = 0; plane <= planes - kDepth; plane++) {
      const uint32_t done_bit = 1u << (kRaw + plane % 2);
      await(done(plane), (parities & done_bit) == 0);  // all threads are through with plane - 2
      stage(plane + kAhead + 1);  // where plane - 2 + kAhead was split from
      if (plane + kAhead < planes) await_staged(plane + kAhead), split(plane + kAhead, raw(plane + kAhead), items * width);
      const int plane_turns = min(turns, count - plane * turns);
#pragma unroll 1
      for (; turn < plane_turns; turn += kBlockWarps) {
        const int q = turn * kTurn;
        uint32_t pixel[kTiles];
#pragma unroll
        for (int j = 0; j < kTiles; j++) pixel[j] = first_at + positions[q + 8 * j + g] * kPixel;
        float sum[kTiles][4], low_sum[kTiles][4] = {};
        sink.begin(sum);
        uint32_t highs[kTiles][kSteps * kMain], others[kTiles][kSteps * kRest + 1];
#pragma unroll
        for (int s = 0; s < kSteps; s++) {
          sink.meanwhile(s);
#pragma unroll
          for (int j = 0; j < kTiles; j++) {
            const uint32_t at = offset[s] + pixel[j];
            load_shared<kMain>(&highs[j][s * kMain], at);
            if constexpr (kRest > 0) load_shared<kRest>(&others[j][s * kRest], second_at + at / kMain * kRest);
          }
#pragma unroll
          for (int i = s * kMain | 1; i < (s + 1) * kMain; i += 2)
#pragma unroll
            for (int j = 0; j < kTiles; j++) {
              multiply_pair(sum[j], main + i, highs[j] + i);
              if (kSplit) multiply_pair(low_sum[j], lows + i, highs[j] + i);
            }
#pragma unroll
          for (int i = s * kRest | 1; i < (s + 1) * kRest; i += 2)
#pragma unroll
            for (int j = 0; j < kTiles; j++) multiply_pair(low_sum[j], rest + i, others[j] + i);
        }
#pragma unroll
        for (int j = 0; j < kTiles; j++) {
          constexpr int kLast = kSteps * kMain - 1, kLastRest = kSteps * kRest - 1;
          if (kSplit && kLast % 2 == 0) multiply_add<operand_t>(low_sum[j], lows[kLast][0], lows[kLast][1], highs[j][kLast]);
          if (kLast % 2 == 0) multiply_add<operand_t>(sum[j], main[kLast][0], main[kLast][1], highs[j][kLast]);
          if constexpr (kLastRest >= 0 && kLastRest % 2 == 0)
            multiply_add<operand_t>(low_sum[j], rest[kLastRest][0], rest[kLastRest][1], others[j][kLastRest]);
          if (kSplit)
#pragma unroll
            for (int i = 0; i < 4; i++) sum[j][i] += low_sum[j][i];
        }
        sink.take(sum, part.first_plane + plane, q, part.limit);
      }
      turn -= turns;
#pragma unroll
      for (int s = 0; s < kSteps; s++) offset[s] = min(offset[s] + plane_bytes, offset[s] + plane_bytes - ring_bytes);  // what is negative is large
      arrive(done(plane));
      parities ^= done_bit;
    }
    sink.finish();
  }
};

// ---------------------------------------------------------------------------------------------------- statistics
// Of the convolution of x - shift, of one block's part and one output channel.
struct alignas(8) PartStatistics {
  float mean, m2;
};

struct StatisticsSink {
  SweepStorage& storage;
  float shift[2], sum[2], square[2], count;
  bool started;
  float scale;
  __device__ explicit StatisticsSink(SweepStorage& storage) : storage(storage) {}
  __device__ void start(float s) {
    scale = s, started = false, count = 0;
    for (int r = 0; r < 2; r++) shift[r] = sum[r] = square[r] = 0;
  }
  __device__ __forceinline__ void begin(float (&c)[kTiles][4]) const {
#pragma unroll
    for (int j = 0; j < kTiles; j++) c[j][0] = c[j][1] = -shift[0], c[j][2] = c[j][3] = -shift[1];
  }
  __device__ __forceinline__ void meanwhile(int) {}
  __device__ __forceinline__ void add(int r, float v) { sum[r] += v, square[r] = fmaf(v, v, square[r]); }
  __device__ __forceinline__ void take(float (&v)[kTiles][4], int, int q, int limit) {
    if (!started) {
      started = true;
#pragma unroll
      for (int r = 0; r < 2; r++) {
        const float own = middle(v[0][2 * r], v[kTiles / 2][2 * r], v[kTiles - 1][2 * r]);  // one alone may be far from the mean
        shift[r] = __shfl_sync(~0u, own, threadIdx.x % 32 & ~3);  // the same for all four lanes of a channel
#pragma unroll
        for (int j = 0; j < kTiles; j++) v[j][2 * r] -= shift[r], v[j][2 * r + 1] -= shift[r];
      }
    }
    if (q + kTurn <= limit) {
      count += 2 * kTiles;
#pragma unroll
      for (int j = 0; j < kTiles; j++)
#pragma unroll
        for (int i = 0; i < 4; i++) add(i / 2, v[j][i]);
    } else {
#pragma unroll
      for (int j = 0; j < kTiles; j++)
#pragma unroll
        for (int u = 0; u < 2; u++)
          if (q + 8 * j + int(threadIdx.x % 4) * 2 + u < limit) add(0, v[j][u]), add(1, v[j][2 + u]), count += 1;
    }
  }
  __device__ __forceinline__ void finish() const {
    const int lane = threadIdx.x % 32;
    const auto channel_sum = [](float v) { return v += __shfl_xor_sync(~0u, v, 1), v + __shfl_xor_sync(~0u, v, 2); };
    const float all = channel_sum(count);
#pragma unroll
    for (int r = 0; r < 2; r++) {
      const Moments<float> own = Moments<float>::from_shifted(all, shift[r], channel_sum(sum[r]), channel_sum(square[r]));
      if (lane % 4 == 0) storage.moments[threadIdx.x / 32][lane / 4 + r * 8] = own;
    }
  }
  // Behind the barrier: threads 8 i write statistics (N, slots, kOut) of channel first_channel + i, for i < 16. All threads call it.
  __device__ void write(PartStatistics* statistics, const Convolution& c, const Part& part, int first_channel) const {
    const int channel = threadIdx.x / 8, eighth = threadIdx.x % 8;
    if (channel >= 16) return;
    Moments<float> all = storage.moments[eighth][channel];
#pragma unroll 1
    for (int i = eighth + 8; i < kBlockWarps; i += 8) all = all.merge(storage.moments[i][channel]);
#pragma unroll 1
    for (int m = 1; m < 8; m *= 2)
      all = all.merge({__shfl_xor_sync(~0u, all.count, m), __shfl_xor_sync(~0u, all.mean, m), __shfl_xor_sync(~0u, all.m2, m)});
    if (eighth) return;
    const float unit = 1 / scale * (1 / storage.weight_scale[channel]);
    statistics[(part.n * c.slots() + part.slot) * kOut + first_channel + channel] = {all.mean * unit, all.m2 * unit * unit};
  }
};

// The moments of a channel of a sample: those of its blocks, merged in their order. Read past the L1 cache: in a launch whose blocks meet,
// others have just written them.
__device__ inline Moments<float> merge_slots(const PartStatistics* statistics, const Convolution& c, int64_t n, int channel) {
  Moments<float> all{0, 0, 0};
  for (int slot = 0; slot < c.slots(); slot++) {
    const float2 s = __ldcg(reinterpret_cast<const float2*>(statistics + (n * c.slots() + slot) * kOut + channel));
    const Moments<float> part{slot_count(c, slot), s.x, s.y};
    all = slot ? all.merge(part) : part;  // merging with nothing would be inf·0 where a square overflows
  }
  return all;
}

// Lets blocks of a kernel have as much shared memory as there is, and returns how much that is: less would not do for a thread that
// launches the kernel at the same time.
template <class Kernel> inline int allow_shared(Kernel kernel) {
  int device = 0, most = 0;
  cudaFuncAttributes attributes{};
  cudaGetDevice(&device), cudaDeviceGetAttribute(&most, cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
  cudaFuncGetAttributes(&attributes, kernel);
  most -= int(attributes.sharedSizeBytes);
  cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, most);
  return most;
}

// Can so many blocks, each of which fills a multiprocessor, run at the same time?
inline bool run_together(int64_t blocks) {
  int device = 0, multiprocessors = 0, cooperative = 0;
  cudaGetDevice(&device), cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device);
  cudaDeviceGetAttribute(&cooperative, cudaDevAttrCooperativeLaunch, device);
  return cooperative && blocks <= multiprocessors;
}
