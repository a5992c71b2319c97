// A small 3-D convolution on tensor cores at float32 accuracy, whose output a sink takes from the registers: what the fused kernels share.
//
// Stride 1, no padding, CHANNELS_IN ≤ 4; 16 output channels at a time. Each block owns some output rows of one sample and walks
// along depth, with a ring of KERNEL_D + 1 input planes in shared memory; the next plane arrives while one is computed.
//
// Accuracy: x - shift and the weights, scaled by powers of two, are each split into two halves of fp16, high + low;
// high·high + high·low + low·high, summed in float32, has float32's accuracy. The scale of x follows the data: a value that
// does not fit makes the block stage its planes again. `shift`, one value per (sample, input channel) taken from x, removes a
// large mean; the constant that it adds per output channel is left to whoever needs it.
//
// A pixel's 2·CHANNELS_IN halves (highs, then lows) form CHANNELS_IN words: those with a high in one array, the others in a
// second. They are the B fragment of m16n8k16 as they are: lane (g, t) holds pixel g of tap 4·step + t, and a warp's loads of 8
// neighbouring pixels × 4 taps are free of bank conflicts. The weights are the A fragment, in registers. Each word meets the
// weights' highs, and those with a high meet their lows too (and 0, where they hold a low): 17.5 products for 27 taps of 3 channels.
#pragma once
#include "reduce.cuh"

#ifndef CHANNELS_IN
#define CHANNELS_IN 3
#define CHANNELS_OUT 16
#define KERNEL_D 3
#define KERNEL_H 3
#define KERNEL_W 3
#endif
#ifndef STAGE_PIXELS
#define STAGE_PIXELS 3072  // capacity of the ring: (KERNEL_D + 1)·(rows + KERNEL_H - 1)·pitch_for(W) must fit
#endif
#ifndef BLOCK_THREADS
#define BLOCK_THREADS 128
#endif
#ifndef BLOCKS_PER_SM
#define BLOCKS_PER_SM 2
#endif
#ifndef TILES
#define TILES 4
#endif

constexpr int kIn = CHANNELS_IN, kOut = CHANNELS_OUT, kDepth = KERNEL_D, kHeight = KERNEL_H, kWidth = KERNEL_W;
constexpr int kTaps = kDepth * kHeight * kWidth, kSteps = (kTaps + 3) / 4;
constexpr int kMain = (kIn + 1) / 2, kRest = kIn - kMain;  // words per pixel that hold a high, and the others
constexpr int kTiles = TILES, kTurn = 8 * kTiles;  // of 8 positions, that a warp computes side by side
constexpr int kStage = STAGE_PIXELS, kBlock = BLOCK_THREADS, kBlockWarps = kBlock / 32;
static_assert(kIn >= 1 && kIn <= 4 && kOut % 16 == 0 && kBlock >= 128, "the sizes that this kernel serves");

// Pixels from one row to the next in the ring: rows of a tap group fall into different banks, and are 16-byte aligned.
inline int pitch_for(int64_t width) {
  const int padded = int(width + 3) / 4 * 4, r = padded % 32;
  return padded + (r <= 12 ? 12 - r : r <= 24 ? 24 - r : 44 - r);
}

struct Convolution {
  const float* x;       // (N, kIn, D, H, W)
  const float* weight;  // (kOut, kIn, kDepth, kHeight, kWidth)
  int64_t channel;      // D·H·W
  int D, H, W, OD, OH, OW;
  int rows, slabs, depth, chunks;  // a block's output rows and planes, and how many such parts there are
  int pitch, plane;                // pixels
  bool aligned;                    // rows start at 16-byte boundaries
  struct Step { int columns, address; } tile, stride;  // to the position 8 on, and from the end of a warp's turn to its next
  __host__ __device__ int slots() const { return slabs * chunks; }  // blocks of a sample
};

inline Convolution convolution(const float* x, const float* weight, int64_t D, int64_t H, int64_t W, int64_t rows, int64_t depth) {
  Convolution c{x, weight, D * H * W, int(D), int(H), int(W), int(D) - kDepth + 1, int(H) - kHeight + 1, int(W) - kWidth + 1};
  c.rows = int(rows), c.slabs = (c.OH + c.rows - 1) / c.rows;
  c.depth = int(depth), c.chunks = (c.OD + c.depth - 1) / c.depth;
  c.pitch = pitch_for(W), c.plane = (c.rows + kHeight - 1) * c.pitch;
  c.aligned = vectors_fit(x, W);
  auto step = [&](int q) { return Convolution::Step{q % c.OW, q / c.OW * c.pitch + q % c.OW}; };
  c.tile = step(8), c.stride = step(kTurn * (kBlockWarps - 1));
  return c;
}

inline int raw_floats(const Convolution& c) { return (c.rows + kHeight - 1) * ((c.W + 3) / 4 * 4) * kIn; }
inline int shared_bytes(const Convolution& c) { return (kIn * kStage + raw_floats(c)) * 4; }

// The part of the output that a block owns.
struct Part {
  int64_t n;
  int slot, first_row, row_count, first_plane, plane_count, limit;  // limit: output positions in a plane
  __device__ Part(const Convolution& c, int64_t job) {
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
__device__ __forceinline__ void multiply_16(float (&c)[4], const uint32_t* a, const uint32_t* b, uint32_t x, uint32_t y) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},{%0,%1,%2,%3};"
               : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]) : "r"(a[0]), "r"(a[1]), "r"(b[0]), "r"(b[1]), "r"(x), "r"(y));
}
__device__ __forceinline__ void multiply_8(float (&c)[4], const uint32_t* a, uint32_t x) {
  asm("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0,%1,%2,%3},{%4,%5},{%6},{%0,%1,%2,%3};"
               : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]) : "r"(a[0]), "r"(a[1]), "r"(x));
}
__device__ __forceinline__ uint32_t pack(float low, float high) {
  const __half2 h = __floats2half2_rn(low, high);
  return *reinterpret_cast<const uint32_t*>(&h);
}
__device__ __forceinline__ float rounded(float v) { return __half2float(__float2half_rn(v)); }
template <int kBytes> __device__ __forceinline__ void copy_async(void* shared, const void* global) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], %2;" ::"r"(uint32_t(__cvta_generic_to_shared(shared))), "l"(global), "n"(kBytes));
}
__device__ __forceinline__ void wait_copies() { asm volatile("cp.async.wait_all;" ::: "memory"); }
template <int kCount> struct Pixels { static constexpr int value = kCount; };
// Words [k][pixel] of four pixels, stored pixel by pixel.
template <int kWords> __device__ __forceinline__ void store_words(uint32_t* at, const uint32_t (*words)[4]) {
#pragma unroll
  for (int i = 0; i < kWords; i++)
    reinterpret_cast<uint4*>(at)[i] = make_uint4(words[4 * i % kWords][4 * i / kWords], words[(4 * i + 1) % kWords][(4 * i + 1) / kWords],
                                                 words[(4 * i + 2) % kWords][(4 * i + 2) / kWords],
                                                 words[(4 * i + 3) % kWords][(4 * i + 3) / kWords]);
}
template <int kWords> __device__ __forceinline__ void load_words(uint32_t* to, uint32_t at) {
  if constexpr (kWords == 2) {
    asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];" : "=r"(to[0]), "=r"(to[1]) : "r"(at));
  } else if constexpr (kWords == 1) {
    asm volatile("ld.shared.u32 %0, [%1];" : "=r"(to[0]) : "r"(at));
  }
}
// 2^k with largest·2^k in [2^target, 2^(target + 1)); 1 for zero.
__device__ inline float scale_for(float largest, int target) {
  if (!(largest > 0)) return 1;
  return exp2f(float(min(max(target - ilogbf(largest), -126), 108)));
}
// min and max as PyTorch: NaN wins. One instruction where numerics.h's need two.
__device__ __forceinline__ float min_nan(float a, float b) { float r; asm("min.NaN.f32 %0, %1, %2;" : "=f"(r) : "f"(a), "f"(b)); return r; }
__device__ __forceinline__ float max_nan(float a, float b) { float r; asm("max.NaN.f32 %0, %1, %2;" : "=f"(r) : "f"(a), "f"(b)); return r; }

__device__ inline float middle(float a, float b, float c) { return fmaxf(fminf(a, b), fminf(fmaxf(a, b), c)); }

// A sample's shifts: the middle one of three values of each input channel.
__device__ inline void find_shifts(float (&shift)[kIn], const Convolution& c, int64_t n) {
  for (int i = 0; i < kIn; i++) {
    const float* x = c.x + (n * kIn + i) * c.channel;
    const float value = middle(x[0], x[c.channel / 2], x[c.channel - 1]);
    shift[i] = fabsf(value) < 1e36f ? value : 0.f;
  }
}

// ---------------------------------------------------------------------------------------------------- the sweep
// Computes the convolution of a block's part, output channels first_channel … + 15, and hands it to `sink`, in units of
// 1 / (scale of x · weight_scale[channel]); lane (g, t) receives channels g and g + 8 of positions q + 2t, q + 2t + 1 of each
// 8: values[tile][0, 1] and [2, 3]. The sink's first(scale), rescale(scale), begin(sum) and take(values, plane, q, limit),
// of kTurn neighbouring positions from q on; meanwhile(step, plane, q, limit) is called between the products of a turn, for work
// that need not wait for them.
template <class Sink>
__device__ __forceinline__ void sweep(const Convolution& c, const Part& part, int first_channel, const float* weight_scale,
                                      uint32_t* shared, Sink& sink) {
  __shared__ float largest[kBlockWarps];
  const int tid = threadIdx.x, lane = tid % 32, warp = tid / 32, g = lane / 4, t = lane % 4;
  uint32_t *ring = shared, *second_ring = shared + kMain * kStage;
  float* raw = reinterpret_cast<float*>(shared + kIn * kStage);
  float shift[kIn];
  find_shifts(shift, c, part.n);

  // weights
  uint32_t main[kSteps * kMain][2], lows[kSteps * kMain][2], rest[kSteps * kRest + 1][2];
#pragma unroll
  for (int s = 0; s < kSteps; s++)
#pragma unroll
    for (int r = 0; r < 2; r++) {
      const int tap = 4 * s + t, row = g + r * 8;
      float high[kIn + 1], low[kIn + 1];
      high[kIn] = low[kIn] = 0;
#pragma unroll
      for (int i = 0; i < kIn; i++) {
        const float w = tap < kTaps ? c.weight[((first_channel + row) * kIn + i) * kTaps + tap] * weight_scale[row] : 0.f;
        high[i] = rounded(w), low[i] = w - high[i];
      }
#pragma unroll
      for (int k = 0; k < kIn; k++) {
        const uint32_t highs = pack(high[2 * k % kIn], high[(2 * k + 1) % kIn]);
        if (k < kMain) main[s * kMain + k][r] = highs, lows[s * kMain + k][r] = pack(low[2 * k], low[2 * k + 1]);
        else rest[s * kRest + k - kMain][r] = highs;
      }
    }

  // staging
  const int in_rows = part.row_count + kHeight - 1;
  const int quads = c.aligned ? c.W / 4 : c.W, items = in_rows * quads;  // an item: 4 pixels, or 1
  const int item_row = tid / quads, item_column = tid % quads, step_rows = kBlock / quads, step_columns = kBlock % quads;
  const float* origin = c.x + part.n * kIn * c.channel + (int64_t(part.first_plane) * c.H + part.first_row) * c.W;
  const int64_t plane_stride = int64_t(c.H) * c.W;
  float scale = 1;
  auto for_items = [&](auto body) {
    int row = item_row, column = item_column;
    for (int i = tid; i < items; i += kBlock) {
      body(i, row, column);
      row += step_rows, column += step_columns;
      if (column >= quads) column -= quads, row++;
    }
  };
  __half2 range;
  auto put = [&](int at, const float (&v)[kIn][4], auto count) {
    constexpr int kCount = decltype(count)::value;
    uint32_t words[kIn][4];
#pragma unroll
    for (int j = 0; j < kCount; j++) {
      float part_of[2 * kIn + 1];
#pragma unroll
      for (int i = 0; i < kIn; i++) part_of[i] = (v[i][j] - shift[i]) * scale;
#pragma unroll
      for (int k = 0; k < kIn; k++) {
#pragma unroll
        for (int e = 2 * k; e < 2 * k + 2; e++)
          if (e >= kIn) {  // a low: what rounding left of a high
            const __half2 h = *reinterpret_cast<const __half2*>(&words[(e - kIn) / 2][j]);
            if ((e - kIn) / 2 < k) part_of[e] = part_of[e - kIn] - ((e - kIn) % 2 ? __high2float(h) : __low2float(h));
            else part_of[e] = part_of[e - kIn] - rounded(part_of[e - kIn]);
          }
        words[k][j] = pack(part_of[2 * k], part_of[2 * k + 1]);
        if (k < kMain) range = __hmax2(range, __habs2(*reinterpret_cast<const __half2*>(&words[k][j])));
      }
    }
    if constexpr (kCount == 4) {
      store_words<kMain>(ring + at * kMain, words);
      if constexpr (kRest > 0) store_words<kRest>(second_ring + at * kRest, words + kMain);
    } else {
#pragma unroll
      for (int k = 0; k < kIn; k++) (k < kMain ? ring[at * kMain + k] : second_ring[at * kRest + k - kMain]) = words[k][0];
    }
  };
  auto stage_raw = [&](int plane) {  // the next plane's copies set off
    const float* from = origin + plane * plane_stride;
    for_items([&](int i, int row, int column) {
#pragma unroll
      for (int k = 0; k < kIn; k++) {
        const float* at = from + k * c.channel + row * c.W;
        if (c.aligned) copy_async<16>(raw + (k * items + i) * 4, at + column * 4);
        else copy_async<4>(raw + k * items + i, at + column);
      }
    });
  };
  auto convert = [&](int plane, bool from_raw) {
    const int slot = plane % (kDepth + 1) * c.plane;
    const float* from = origin + plane * plane_stride;
    for_items([&](int i, int row, int column) {
      float v[kIn][4];
      if (c.aligned) {
#pragma unroll
        for (int k = 0; k < kIn; k++) {
          const float4 four = from_raw ? reinterpret_cast<const float4*>(raw)[k * items + i]
                                       : *reinterpret_cast<const float4*>(from + k * c.channel + row * c.W + column * 4);
          v[k][0] = four.x, v[k][1] = four.y, v[k][2] = four.z, v[k][3] = four.w;
        }
        put(slot + row * c.pitch + column * 4, v, Pixels<4>{});
      } else {
#pragma unroll
        for (int k = 0; k < kIn; k++) v[k][0] = from_raw ? raw[k * items + i] : from[k * c.channel + row * c.W + column];
        put(slot + row * c.pitch + column, v, Pixels<1>{});
      }
    });
  };
  auto stage_all = [&](int plane, bool first) {  // kDepth planes, with a scale that suits them
    float most = 0;
    auto consider = [&](float v) {
      v = fabsf(v);
      if (v < INFINITY) most = fmaxf(most, v);
    };
    for_items([&](int, int row, int column) {
#pragma unroll
      for (int d = 0; d < kDepth; d++)
#pragma unroll
        for (int k = 0; k < kIn; k++) {
          const float* at = origin + (plane + d) * plane_stride + k * c.channel + row * c.W;
          if (c.aligned) {
            const float4 four = reinterpret_cast<const float4*>(at)[column];
            consider(four.x - shift[k]), consider(four.y - shift[k]), consider(four.z - shift[k]), consider(four.w - shift[k]);
          } else {
            consider(at[column] - shift[k]);
          }
        }
    });
    for (int m = 16; m; m /= 2) most = fmaxf(most, __shfl_xor_sync(~0u, most, m));
    if (lane == 0) largest[warp] = most;
    __syncthreads();
    for (int i = 0; i < kBlockWarps; i++) most = fmaxf(most, largest[i]);
    const float wanted = scale_for(most, 10);
    const float next = first ? wanted : fminf(scale, wanted);
    if (first) sink.first(next);
    else sink.rescale(next / scale, next);
    scale = next;
    range = __half2half2(__ushort_as_half(0));
    for (int d = plane; d < plane + kDepth; d++) convert(d, false);
    __syncthreads();
  };
  stage_all(0, true);

  // positions
  constexpr uint32_t kPixel = kMain * 4;  // bytes, in the first array
  const uint32_t ring_at = __cvta_generic_to_shared(ring), second_at = __cvta_generic_to_shared(second_ring);
  uint32_t offset[kSteps];  // bytes
#pragma unroll
  for (int s = 0; s < kSteps; s++) {
    const int tap = min(4 * s + t, kTaps - 1);
    offset[s] = (tap / (kHeight * kWidth) * c.plane + tap / kWidth % kHeight * c.pitch + tap % kWidth) * kPixel;
  }
  const uint32_t plane_bytes = c.plane * kPixel, ring_size = (kDepth + 1) * plane_bytes;
  const int wrap = c.pitch - c.OW;
  const int start = warp * kTurn + g, start_column = start % c.OW, start_address = start / c.OW * c.pitch + start_column;

#pragma unroll 1
  for (int plane = 0; plane < part.plane_count; plane++) {
    const bool more = plane + 1 < part.plane_count;
    if (more) stage_raw(plane + kDepth);
    int column = start_column, address = start_address;
#pragma unroll 1
    for (int q = warp * kTurn; q < part.limit; q += kTurn * kBlockWarps) {
      uint32_t pixel[kTiles];
#pragma unroll
      for (int j = 0; j < kTiles; j++) {
        pixel[j] = q + 8 * j + g < part.limit ? address * kPixel : 0u;
        column += c.tile.columns, address += c.tile.address;
        if (column >= c.OW) column -= c.OW, address += wrap;
      }
      column += c.stride.columns, address += c.stride.address;
      if (column >= c.OW) column -= c.OW, address += wrap;
      float sum[kTiles][4], low_sum[kTiles][4] = {};
      sink.begin(sum);
      uint32_t highs[kTiles][kSteps * kMain], others[kTiles][kSteps * kRest + 1];
#pragma unroll
      for (int s = 0; s < kSteps; s++) {
        sink.meanwhile(s, part.first_plane + plane, q, part.limit);
#pragma unroll
        for (int j = 0; j < kTiles; j++) {
          const uint32_t at = offset[s] + pixel[j];
          load_words<kMain>(&highs[j][s * kMain], ring_at + at);
          load_words<kRest>(&others[j][s * kRest], second_at + at * kRest / kMain);
        }
#pragma unroll
        for (int i = s * kMain | 1; i < (s + 1) * kMain; i += 2)
#pragma unroll
          for (int j = 0; j < kTiles; j++) {
            multiply_16(low_sum[j], lows[i - 1], lows[i], highs[j][i - 1], highs[j][i]);
            multiply_16(sum[j], main[i - 1], main[i], highs[j][i - 1], highs[j][i]);
          }
#pragma unroll
        for (int i = s * kRest | 1; i < (s + 1) * kRest; i += 2)
#pragma unroll
          for (int j = 0; j < kTiles; j++) multiply_16(low_sum[j], rest[i - 1], rest[i], others[j][i - 1], others[j][i]);
      }
#pragma unroll
      for (int j = 0; j < kTiles; j++) {
        constexpr int kLast = kSteps * kMain - 1;
        if (kLast % 2 == 0) multiply_8(low_sum[j], lows[kLast], highs[j][kLast]), multiply_8(sum[j], main[kLast], highs[j][kLast]);
        if (kSteps * kRest % 2) multiply_8(low_sum[j], rest[kSteps * kRest - 1], others[j][kSteps * kRest - 1]);
#pragma unroll
        for (int i = 0; i < 4; i++) sum[j][i] += low_sum[j][i];
      }
      sink.take(sum, part.first_plane + plane, q, part.limit);
    }
    if (more) {
      range = __half2half2(__ushort_as_half(0));
      wait_copies();
      convert(plane + kDepth, true);
#pragma unroll
      for (int s = 0; s < kSteps; s++) {
        offset[s] += plane_bytes;
        if (offset[s] >= ring_size) offset[s] -= ring_size;
      }
    }
    const bool overflow = more && (__hisinf(__low2half(range)) || __hisinf(__high2half(range)));
    if (__syncthreads_or(overflow)) stage_all(plane + 1, false);
  }
}

// weight_scale[16] of the channels first_channel … + 15.
__device__ inline void find_weight_scales(float* weight_scale, const Convolution& c, int first_channel) {
  const int channel = threadIdx.x / 8;
  float most = 0;
  if (channel < 16)
    for (int i = threadIdx.x % 8; i < kIn * kTaps; i += 8) {
      const float w = fabsf(c.weight[(first_channel + channel) * kIn * kTaps + i]);
      if (w < INFINITY) most = fmaxf(most, w);
    }
  for (int m = 1; m < 8; m *= 2) most = fmaxf(most, __shfl_xor_sync(~0u, most, m));
  if (channel < 16 && threadIdx.x % 8 == 0) weight_scale[channel] = scale_for(most, 10);
  __syncthreads();
}

// ---------------------------------------------------------------------------------------------------- statistics
// Of the convolution of x - shift, of one block's part and one output channel.
struct alignas(8) PartStatistics {
  float mean, m2;
};

struct StatisticsSink {
  float shift[2], sum[2], square[2], count;
  bool started;
  __device__ void first(float) {
    started = false, count = 0;
    for (int r = 0; r < 2; r++) shift[r] = sum[r] = square[r] = 0;
  }
  __device__ void rescale(float factor, float) {
    for (int r = 0; r < 2; r++) shift[r] *= factor, sum[r] *= factor, square[r] *= factor * factor;
  }
  __device__ __forceinline__ void begin(float (&c)[kTiles][4]) const {
#pragma unroll
    for (int j = 0; j < kTiles; j++) c[j][0] = c[j][1] = -shift[0], c[j][2] = c[j][3] = -shift[1];
  }
  __device__ __forceinline__ void meanwhile(int, int, int, int) {}
  __device__ __forceinline__ void add(int r, float v) { sum[r] += v, square[r] = fmaf(v, v, square[r]); }
  __device__ __forceinline__ void take(float (&v)[kTiles][4], int, int q, int limit) {
    if (!started) {
      started = true;
#pragma unroll
      for (int r = 0; r < 2; r++) {
        shift[r] = middle(v[0][2 * r], v[kTiles / 2][2 * r], v[kTiles - 1][2 * r]);  // one alone may be far from the mean
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
};

struct StatisticsWithScale : StatisticsSink {
  float scale;
  __device__ void first(float s) { scale = s, StatisticsSink::first(s); }
  __device__ void rescale(float factor, float s) { scale = s, StatisticsSink::rescale(factor, s); }
};

// Writes what a swept sink has summed up: statistics (N, slots, kOut). All threads call it.
__device__ inline void write_statistics(PartStatistics* statistics, const Convolution& c, const Part& part, int first_channel,
                                        const float* weight_scale, const StatisticsWithScale& sink) {
  __shared__ Moments<float> moments[kBlockWarps][16];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
#pragma unroll
  for (int r = 0; r < 2; r++) {
    Moments<float> own = Moments<float>::from_shifted(sink.count, sink.shift[r], sink.sum[r], sink.square[r]);
    for (int m = 1; m < 4; m *= 2)
      own = own.merge({__shfl_xor_sync(~0u, own.count, m), __shfl_xor_sync(~0u, own.mean, m), __shfl_xor_sync(~0u, own.m2, m)});
    if (lane % 4 == 0) moments[warp][lane / 4 + r * 8] = own;
  }
  __syncthreads();
  if (threadIdx.x < 16) {
    Moments<float> all = moments[0][threadIdx.x];
    for (int i = 1; i < kBlockWarps; i++) all = all.merge(moments[i][threadIdx.x]);
    const float x_unit = 1 / sink.scale, w_unit = 1 / weight_scale[threadIdx.x];
    statistics[(part.n * c.slots() + part.slot) * kOut + first_channel + threadIdx.x] = {all.mean * x_unit * w_unit,
                                                                                       all.m2 * x_unit * w_unit * x_unit * w_unit};
  }
}

// Grid (N · slots, kOut / 16).
__global__ void __launch_bounds__(kBlock, BLOCKS_PER_SM) statistics_kernel(PartStatistics* statistics, const Convolution c) {
  extern __shared__ uint4 shared[];
  __shared__ float weight_scale[16];
  const Part part(c, blockIdx.x);
  const int first_channel = blockIdx.y * 16;
  find_weight_scales(weight_scale, c, first_channel);
  StatisticsWithScale sink;
  sweep(c, part, first_channel, weight_scale, reinterpret_cast<uint32_t*>(shared), sink);
  write_statistics(statistics, c, part, first_channel, weight_scale, sink);
}

// The sizes of a sample's statistics merged over its blocks, in their order.
__device__ inline Moments<float> merge_slots(const PartStatistics* statistics, const Convolution& c, int64_t n, int channel) {
  Moments<float> all{0, 0, 0};
  for (int slot = 0; slot < c.slots(); slot++) {
    const PartStatistics s = statistics[(n * c.slots() + slot) * kOut + channel];
    const Moments<float> part{slot_count(c, slot), s.mean, s.m2};
    all = slot ? all.merge(part) : part;  // merging with nothing would be inf·0 where a square overflows
  }
  return all;
}

template <class Kernel> inline void allow_shared(Kernel kernel, int bytes) {
  cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
}

inline void launch_statistics(float* statistics, const Convolution& c, int64_t N, cudaStream_t stream) {
  const int bytes = shared_bytes(c);
  allow_shared(statistics_kernel, bytes);
  statistics_kernel<<<dim3(unsigned(N * c.slots()), kOut / 16), kBlock, bytes, stream>>>(reinterpret_cast<PartStatistics*>(statistics), c);
}
