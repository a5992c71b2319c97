// x's gradient, for conv2d_groupnorm_scale_maxpool_clamp_backward_fused.cu, which explains v, dv and units.
//
// dx is the transposed convolution of dv = slope·dz·[selected] + constant + linear·v. One position of a window
// is selected in a channel, but nearly all in some of 64 channels, so the first part goes through tensor
// cores like a dense one; its operand is made in registers, from a window's gradients and places. The rest
// needs nothing of dy: v is a convolution of x, so two convolutions in a row make one, of CHANNELS_IN channels
// to as many, whose filter reaches 2·KERNEL - 1 pixels and is of a sample.
//   compose_kernel          that filter, and the products of the filters' taps that make it up
//   input_gradient_kernel   both parts; of pixels at the border, only the first
//   border_kernel           the second one there, where only a share of the taps is
// A warp has 8 columns of dv, all rows of windows one after the other, and all channels. A product's rows are
// 8 columns of two rows of v, so that terms of a column add up in registers; through shared memory go those
// for the columns beside it.
#pragma once
#include "conv2d_groupnorm_scale_maxpool_clamp_compose.cuh"

namespace {

constexpr int kInputColumns = INPUT_COLUMNS;  // of a tile
constexpr int kInputWarps = kInputColumns / 8, kInputThreads = kInputWarps * 32;
constexpr int kInputWindows = kInputColumns / POOL_W + 2;  // above a tile, which may cut two of them
constexpr int kQuads = CHANNELS_OUT / 4, kSlotPitch = kQuads + 1;  // odd, so no bank conflicts
constexpr int kRing = POOL_H + 2 * kHaloH;                      // rows of x
constexpr int kRingColumns = kInputColumns + 2 * kHaloW;
constexpr int kRingRow = kRingColumns * 16, kRingPlane = kRing * kRingRow, kRingPart = kPlanes * kRingPlane;
constexpr int kRowTiles = (POOL_H + 1) / 2;  // of products: two rows each
constexpr int kSumRows = POOL_H + kHaloH;    // of dx under a row of windows
constexpr int kGroupColumns = KERNEL_H > 9 ? 1 : 9 / KERNEL_H < KERNEL_W ? 9 / KERNEL_H : KERNEL_W;
constexpr int kGroupTiles = KERNEL_H > 9 ? 1 : 2;  // of products, whose sums are in registers together
constexpr int kNoItem = 1 << 20;                   // of a tile's windows
constexpr int kOfZeros = 126;                      // exponent

constexpr int kSlots = kInputWindows * kSlotPitch;

// d += a·b, each the sum of two halves.
__device__ __forceinline__ void multiply_add_split(float (&d)[4], const uint32_t (&high)[4],
                                                   const uint32_t (&low)[4], uint4 b) {
  multiply_add(d, low, b.x, b.y);
  multiply_add(d, high, b.z, b.w);
  multiply_add(d, high, b.x, b.y);
}

struct InputLayout {  // of shared memory: where each part begins
  static constexpr int kComposed = Composed::kFilters * 16, kPixels = kComposed + Composed::kOfSample * 16;
  static constexpr int kValues = kPixels + 2 * kRingPart;
  static constexpr int kPlaces = kValues + kSlots * 16, kTerms = kPlaces + kSlots * 8;
  static constexpr int kTermPlane = kSumRows * kRingColumns * 8;  // float32 of a plane and a filter's column
  static constexpr int kBytes = kTerms + kPlanes * KERNEL_W * kTermPlane * 4;
};
static_assert(InputLayout::kBytes == INPUT_SHARED, "what was planned with");

// A place in a ring, for one less than twice as large.
template <int kSize> __device__ __forceinline__ int wrapped(int at) {
  return int(min(unsigned(at), unsigned(at - kSize)));
}

// Two places as float16 that are not zero and normal, so that one instruction compares both.
__device__ __forceinline__ uint32_t pair_of(int first, int second) {
  return 0x3c003c00 | first | second << 16;
}
__device__ __forceinline__ uint32_t equal_halves(uint32_t a, uint32_t b) {
  return __heq2_mask(reinterpret_cast<const __half2&>(a), reinterpret_cast<const __half2&>(b));
}

// dx like x, complete but for what border_kernel adds. Grid: strips of `rows` rows of x, a multiple of
// POOL_H; tiles of `stride` columns; samples, the first fastest.
__global__ void __launch_bounds__(kInputThreads, 2)
input_gradient_kernel(value_t* dx, const value_t* x, const float* shift, Composed composed, Saved saved,
                      GroupShape shape, Geometry geometry, int tiles, int stride) {
#if __CUDA_ARCH__ >= 800
  extern __shared__ __align__(128) unsigned char shared[];
  __shared__ int largest[2][2];  // magnitudes of gradients and of x, as bits; rows of windows take turns
  __shared__ Channel channels[CHANNELS_OUT];
  __shared__ float unscale[CHANNELS_OUT];
  __shared__ int composed_exponent;
  __shared__ float levels[kInputChannels];
  __shared__ float shifts[kInputChannels];
  const uint4* const filters = reinterpret_cast<const uint4*>(shared);
  const uint4* const composed_filter = reinterpret_cast<const uint4*>(shared + InputLayout::kComposed);
  unsigned char* const pixels = shared + InputLayout::kPixels;
  uint4* const held_values = reinterpret_cast<uint4*>(shared + InputLayout::kValues);
  uint2* const held_places = reinterpret_cast<uint2*>(shared + InputLayout::kPlaces);
  float* const terms = reinterpret_cast<float*>(shared + InputLayout::kTerms);
  // Uniform, so that they take no registers of threads.
  const auto uniform = [](int value) { return __shfl_sync(~0u, value, 0); };
  const int strip = uniform(blockIdx.x % geometry.strips), job = uniform(blockIdx.x / geometry.strips);
  const int tile = uniform(job % tiles), n = uniform(job / tiles);
  const int height = geometry.height(), width = geometry.width();
  const int64_t plane_size = int64_t(geometry.H) * geometry.W;
  const value_t* sample = x + int64_t(n) * CHANNELS_IN * plane_size;
  const int64_t pooled_size = int64_t(geometry.pooled_height()) * geometry.pooled_width();
  // Rows of x that are written; columns likewise. The tile's first column of v, and how much further right
  // the first of x is: the first tile has all columns of v that it needs from its own on, others end with
  // them.
  const int row_begin = strip * geometry.rows, row_end = min(geometry.H, row_begin + geometry.rows);
  const int column_begin = tile * stride, column_end = min(geometry.W, column_begin + stride);
  const int ahead = tile ? kHaloW : 0, first_column = column_begin - ahead;
  const int first_window = first_column / POOL_W;
  const int last_window = (first_column + kInputColumns - 1) / POOL_W;
  const int windows = min(last_window + 1, geometry.pooled_width()) - first_window;

  for (int i = threadIdx.x; i < Composed::kFilters; i += kInputThreads)
    reinterpret_cast<uint4*>(shared)[i] = composed.filters[i];
  for (int i = threadIdx.x; i < Composed::kOfSample; i += kInputThreads)
    reinterpret_cast<uint4*>(shared + InputLayout::kComposed)[i] =
        composed.composed[int64_t(n) * Composed::kOfSample + i];
  for (int c = threadIdx.x; c < CHANNELS_OUT; c += kInputThreads)
    channels[c] = channel_of(saved, shape, n, c), unscale[c] = composed.unscale[c];
  // Zeros where no window is, and beside the tile's columns.
  for (int i = threadIdx.x; i < (InputLayout::kBytes - InputLayout::kValues) / 4; i += kInputThreads)
    reinterpret_cast<uint32_t*>(shared + InputLayout::kValues)[i] = 0;
  if (threadIdx.x < kInputChannels) {
    levels[threadIdx.x] = composed.levels[n * kInputChannels + threadIdx.x];
    shifts[threadIdx.x] = threadIdx.x < CHANNELS_IN ? shift[n * CHANNELS_IN + threadIdx.x] : 0.f;
  }
  if (threadIdx.x < 4) (&largest[0][0])[threadIdx.x] = 0;
  if (threadIdx.x == 0) composed_exponent = composed.exponents[n];
  __syncthreads();  // all of that is there

  // What a thread has of a row of windows: four channels of one. Its loads, and what becomes of it in shared
  // memory; returns the largest magnitude.
  struct Gradients {
    float dy[4], extreme[4];
    int place[4];
  };
  const auto load_gradients = [&](int item, int window_row) {
    const int window = item % 16 + item / (16 * kQuads) * 16, quad = item / 16 % kQuads;
    const int64_t first = (int64_t(n) * CHANNELS_OUT + quad * 4) * pooled_size +
                          int64_t(window_row) * geometry.pooled_width() + first_window + window;
    Gradients raw;
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const int64_t at = window < windows ? first + i * pooled_size : 0;
      raw.dy[i] = float(saved.dy[at]), raw.extreme[i] = saved.extreme[at], raw.place[i] = saved.index[at];
    }
    return raw;
  };
  const auto hold_gradients = [&](int item, const Gradients& raw, float factor) {
    const int window = item % 16 + item / (16 * kQuads) * 16, quad = item / 16 % kQuads;
    if (window >= windows) return 0.f;
    float gradients[4], magnitude = 0;
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const int c = quad * 4 + i;
      const float passed = passed_gradient(saved, channels[c], raw.dy[i], raw.extreme[i]);
      gradients[i] = unscale[c] * selected_gradient(channels[c], passed);
      magnitude = fmaxf(magnitude, fabsf(gradients[i]));
    }
    const Halves halves[2] = {split(gradients[0] * factor, gradients[1] * factor),
                              split(gradients[2] * factor, gradients[3] * factor)};
    const int slot = window * kSlotPitch + quad;
    held_values[slot] = make_uint4(halves[0].high, halves[1].high, halves[0].low, halves[1].low);
    held_places[slot] = make_uint2(pair_of(raw.place[0], raw.place[1]), pair_of(raw.place[2], raw.place[3]));
    return magnitude;
  };
  // Likewise the pixel `item` of the rows of x from `begin` on, less the shift; zeros outside of x.
  struct Pixel {
    float values[kInputChannels];
    bool inside;
  };
  const auto load_pixel = [&](int item, int begin) {
    const int row = begin + item / kRingColumns, column = column_begin - kHaloW + item % kRingColumns;
    const bool inside = unsigned(row) < unsigned(geometry.H) && unsigned(column) < unsigned(geometry.W);
    const value_t* from = sample + (inside ? int64_t(row) * geometry.W + column : 0);
    Pixel pixel;
    pixel.inside = inside;
#pragma unroll
    for (int c = 0; c < kInputChannels; c++)
      pixel.values[c] = c < CHANNELS_IN ? float(from[c * plane_size]) : 0.f;
    return pixel;
  };
  const auto hold_pixel = [&](int item, int begin, const Pixel& pixel, float factor) {
    unsigned char* const to =
        pixels + (begin + item / kRingColumns + kRing) % kRing * kRingRow + item % kRingColumns * 16;
    float magnitude = 0;
#pragma unroll
    for (int plane = 0; plane < kPlanes; plane++) {
      Halves halves[4];
#pragma unroll
      for (int i = 0; i < 4; i++) {
        const int c = plane * 8 + 2 * i;
        const float first = pixel.inside ? pixel.values[c] - shifts[c] : 0.f;
        const float second = pixel.inside ? pixel.values[c + 1] - shifts[c + 1] : 0.f;
        halves[i] = split(first * factor, second * factor);
        magnitude = fmaxf(magnitude, fmaxf(fabsf(first), fabsf(second)));
      }
      *reinterpret_cast<uint4*>(to + plane * kRingPlane) =
          make_uint4(halves[0].high, halves[1].high, halves[2].high, halves[3].high);
      *reinterpret_cast<uint4*>(to + plane * kRingPlane + kRingPart) =
          make_uint4(halves[0].low, halves[1].low, halves[2].low, halves[3].low);
    }
    return magnitude;
  };
  // All of a row of windows, or of the rows of x from `begin` on, from a thread's `item` on.
  const auto stage_gradients = [&](int item, int window_row, float factor) {
    float magnitude = 0;
#pragma unroll 1
    for (; item < (windows + 15) / 16 * 16 * kQuads; item += kInputThreads)
      magnitude = fmaxf(magnitude, hold_gradients(item, load_gradients(item, window_row), factor));
    return magnitude;
  };
  const auto stage_pixels = [&](int item, int begin, int count, float factor) {
    float magnitude = 0;
#pragma unroll 1
    for (; item < count; item += kInputThreads)
      magnitude = fmaxf(magnitude, hold_pixel(item, begin, load_pixel(item, begin), factor));
    return magnitude;
  };
  const auto publish = [&](int* to, float magnitude) {
    const unsigned of_warp = __reduce_max_sync(~0u, __float_as_uint(magnitude));
    if (threadIdx.x % 32 == 0) atomicMax(to, int(of_warp));
  };
  // Does the scale hold what is that large? If not, one that has room for more.
  const auto outgrown = [&](int& exponent, int magnitude) {
    const float largest = __int_as_float(magnitude);
    if (uniform(largest == 0 || fitting_exponent(largest) >= exponent)) return false;
    exponent = uniform(fitting_exponent(largest, kTop - 2));
    return true;
  };

  int exponent = kOfZeros, x_exponent = kOfZeros;
  const int first_row = max(0, row_begin - kHaloH) / POOL_H * POOL_H;
  // What products read for the rows from `row` on, by the scales that there are: few rows outgrow them. A
  // thread's first loads are under way before the products of the rows before have been added up.
  struct Ahead {
    Gradients gradients;
    Pixel pixels[2];
  };
  const auto is_pooled = [&](int row) { return row < row_end && row / POOL_H < geometry.pooled_height(); };
  const auto first_of_x = [&](int row) { return row <= row_begin ? row - kHaloH : row + kHaloH; };
  const auto load_ahead = [&](int row) {
    const int item = thread_index_anew(), begin = first_of_x(row);
    return Ahead{load_gradients(is_pooled(row) ? item : kNoItem, row / POOL_H),
                 {load_pixel(item, begin), load_pixel(item + kInputThreads, begin)}};
  };
  const auto stage = [&](int row, const Ahead& ahead) {
    const int item = thread_index_anew(), turn = row / POOL_H % 2, begin = first_of_x(row);
    const int count = row >= row_begin ? (row + POOL_H + kHaloH - begin) * kRingColumns : 0;
    const float factor = power_of_two(exponent), x_factor = power_of_two(x_exponent);
    float magnitude = 0, of_x = 0;
    if (is_pooled(row))
      magnitude = fmaxf(hold_gradients(item, ahead.gradients, factor),
                        stage_gradients(item + kInputThreads, row / POOL_H, factor));
#pragma unroll
    for (int i = 0; i < 2; i++) {
      const int own = item + i * kInputThreads;
      if (own < count) of_x = fmaxf(of_x, hold_pixel(own, begin, ahead.pixels[i], x_factor));
    }
    of_x = fmaxf(of_x, stage_pixels(item + 2 * kInputThreads, begin, count, x_factor));
    publish(&largest[turn][0], magnitude), publish(&largest[turn][1], of_x);
  };
  // After a barrier: the same anew if they did.
  const auto rescale = [&](int row) {
    const int turn = row / POOL_H % 2, item = thread_index_anew();
    const bool again = outgrown(exponent, largest[turn][0]), x_again = outgrown(x_exponent, largest[turn][1]);
    if (again) stage_gradients(item, row / POOL_H, power_of_two(exponent));
    if (x_again) stage_pixels(item, row - kHaloH, kRing * kRingColumns, power_of_two(x_exponent));
    if (again || x_again) __syncthreads();  // all of that is there
  };
  // Row r of terms from `row` on, of the filter's column kw, for this thread's column of v and two channels.
  const auto term = [&](int plane, int kw, int row, int r) {
    return reinterpret_cast<float2*>(terms + (plane * KERNEL_W + kw) * InputLayout::kTermPlane +
                                     wrapped<kSumRows>(row % kSumRows + r) * (kRingColumns * 8) + kHaloW * 8 +
                                     2 * thread_index_anew());
  };
  // Terms of selected positions, from the rows of windows at `row`.
  const auto add_selected = [&](int row) {
    const int window_row = row / POOL_H;
    const int lane = thread_index_anew() % 32, own_column = first_column + thread_index_anew() / 4;
    const int own_slot = (own_column / POOL_W - first_window) * kSlotPitch + lane % 4;
    const uint4* const own_values = held_values + own_slot;
    const uint2* const own_places = held_places + own_slot;
    const float unscale_terms = power_of_two(-exponent);
    for_constants<kPlanes>([&](auto plane_constant) {
      constexpr int plane = decltype(plane_constant)::value;
      for_constants<(KERNEL_W + kGroupColumns - 1) / kGroupColumns>([&](auto group_constant) {
        constexpr int first_kw = decltype(group_constant)::value * kGroupColumns;
        constexpr int kColumns = KERNEL_W - first_kw < kGroupColumns ? KERNEL_W - first_kw : kGroupColumns;
        float sums[kColumns][kSumRows][2];
#pragma unroll
        for (int i = 0; i < kColumns * kSumRows * 2; i++) (&sums[0][0][0])[i] = -0.f;  // adds nothing
        if (window_row < geometry.pooled_height())
#pragma unroll
          for (int first = 0; first < POOL_H; first += 2 * kGroupTiles) {
            float d[kColumns][KERNEL_H][kGroupTiles][4];
#pragma unroll
            for (int i = 0; i < kColumns * KERNEL_H * kGroupTiles * 4; i++) (&d[0][0][0][0])[i] = 0;
            const uint32_t place = pair_of(own_column % POOL_W, own_column % POOL_W);
#pragma unroll 1  // more take more registers than there are
            for (int step = 0; step < kFilterSteps; step++) {
              const uint4 values = own_values[step * 4];
              const uint2 places = own_places[step * 4];
              uint32_t high[kGroupTiles][4], low[kGroupTiles][4];
#pragma unroll
              for (int m = 0; m < kGroupTiles; m++)
#pragma unroll
                for (int half = 0; half < 2; half++) {
                  const uint32_t own = place + (first + 2 * m + half) * POOL_W * 0x10001;
                  const uint32_t here = equal_halves(places.x, own), next = equal_halves(places.y, own);
                  high[m][half] = values.x & here, high[m][half + 2] = values.y & next;
                  low[m][half] = values.z & here, low[m][half + 2] = values.w & next;
                }
#pragma unroll
              for (int kw = 0; kw < kColumns; kw++)
#pragma unroll
                for (int kh = 0; kh < KERNEL_H; kh++) {
                  const int unit = plane * kTaps + kh * KERNEL_W + first_kw + kw;
                  const uint4 b = filters[(step * kUnits + unit) * 32 + lane];
#pragma unroll
                  for (int m = 0; m < kGroupTiles; m++)
                    if (first + 2 * m < POOL_H) multiply_add(d[kw][kh][m], low[m], b.x, b.y);
#pragma unroll
                  for (int m = 0; m < kGroupTiles; m++)
                    if (first + 2 * m < POOL_H) multiply_add(d[kw][kh][m], high[m], b.z, b.w);
#pragma unroll
                  for (int m = 0; m < kGroupTiles; m++)
                    if (first + 2 * m < POOL_H) multiply_add(d[kw][kh][m], high[m], b.x, b.y);
                }
            }
#pragma unroll
            for (int kw = 0; kw < kColumns; kw++)
#pragma unroll
              for (int kh = 0; kh < KERNEL_H; kh++)
#pragma unroll
                for (int i = 0; i < kGroupTiles * 4; i++) {
                  const int of_window = first + i / 2;  // row
                  if (of_window < POOL_H) sums[kw][of_window + kh][i % 2] += d[kw][kh][i / 4][i % 4];
                }
          }
#pragma unroll
        for (int kw = 0; kw < kColumns; kw++)
#pragma unroll
          for (int r = 0; r < kSumRows; r++) {
            float2* const to = term(plane, first_kw + kw, row, r);
            const float2 before = r < kHaloH ? *to : make_float2(0, 0);  // by the last row of windows
            *to = make_float2(before.x + sums[kw][r][0] * unscale_terms,
                              before.y + sums[kw][r][1] * unscale_terms);
          }
      });
    });
  };
  // The composed filter's share of as many rows of dx, on top of the terms that this thread reads, too.
  const auto add_composed = [&](int row) {
    float dense[kPlanes][kRowTiles][4] = {};
    const int ring_row = (row - kHaloH + kRing) % kRing;  // where row - kHaloH is
#pragma unroll
    for (int from = 0; from < kPlanes; from++) {
      constexpr int kRows = 2 * kRowTiles + 2 * kHaloH;
      const int thread = thread_index_anew(), matrix = thread % 32 / 8;
      // Lanes 0-15 have the addresses of two rows at one column, the others at the next: a fragment of A with
      // two rows of dx and two columns of the filter. Of the last column alone, high halves and low ones.
      const uint32_t first = shared_address(pixels) + from * kRingPlane + (thread / 32 * 8 + thread % 8) * 16;
      const int second = matrix / 2 * 16, low = matrix / 2 * kRingPart;
#pragma unroll
      for (int column = 0; column < kReachW; column += 2) {
        const bool alone = column + 1 == kReachW;
        uint4 b[kPlanes][kReachH];
#pragma unroll
        for (int i = 0; i < kPlanes * kReachH; i++)
          b[i / kReachH][i % kReachH] =
              composed_filter[((i / kReachH * kPlanes + from) * (kHaloW + 1) + column / 2) * kReachH * 32 +
                              i % kReachH * 32 + thread % 32];
#pragma unroll
        for (int i = 0; i < kRows - 1; i++) {
          const int at = wrapped<kRing>(wrapped<kRing>(ring_row + i) + matrix % 2) * kRingRow + column * 16;
          uint32_t halves[2][4];  // of the last column, all in the first one
          if (alone) {
            load_matrices(halves[0], first + at + low);
          } else {
            load_matrices(halves[0], first + at + second);
            load_matrices(halves[1], first + at + second + kRingPart);
          }
#pragma unroll
          for (int plane = 0; plane < kPlanes; plane++)
#pragma unroll
            for (int m = 0; m < kRowTiles; m++) {
              if (unsigned(i - 2 * m) >= kReachH) continue;
              float(&d)[4] = dense[plane][m];
              const uint4 filter = b[plane][i - 2 * m];
              if (alone) {
                multiply_add(d, halves[0][2], halves[0][3], filter.x);
                multiply_add(d, halves[0][0], halves[0][1], filter.z);
                multiply_add(d, halves[0][0], halves[0][1], filter.x);
              } else {
                multiply_add_split(d, halves[0], halves[1], filter);
              }
            }
        }
      }
    }
    const PowerOfTwo unscale_dense(-(x_exponent + composed_exponent));
    const int thread = thread_index_anew(), own_x = first_column + ahead + thread / 4;
    if (kHaloW <= own_x && own_x < width)
#pragma unroll
      for (int plane = 0; plane < kPlanes; plane++)
#pragma unroll
        for (int r = 0; r < POOL_H; r++) {
          if (row + r < kHaloH || row + r >= height) continue;
          float2* const to = term(plane, ahead, row, r);
          const float* own = dense[plane][r / 2] + r % 2 * 2;
          const float* level = levels + plane * 8 + thread % 4 * 2;
          *to = make_float2(to->x + (unscale_dense(own[0]) + level[0]),
                            to->y + (unscale_dense(own[1]) + level[1]));
        }
  };
  const auto write = [&](int row) {
    const int thread = thread_index_anew(), own_x = first_column + ahead + thread / 4;
    if (own_x < column_end)
#pragma unroll
      for (int plane = 0; plane < kPlanes; plane++) {
        const int c = plane * 8 + thread % 4 * 2;
        value_t* to = dx + (int64_t(n) * CHANNELS_IN + c) * plane_size + int64_t(row) * geometry.W + own_x;
#pragma unroll
        for (int r = 0; r < POOL_H; r++, to += geometry.W) {
          float2 sum = make_float2(0, 0);
#pragma unroll
          for (int kw = 0; kw < KERNEL_W; kw++) {
            const float2 one = term(plane, kw, row, r)[(ahead - kw) * 4];
            sum.x += one.x, sum.y += one.y;
          }
          if (row + r >= geometry.H) continue;
          if (c < CHANNELS_IN) to[0] = value_t(sum.x);
          if (c + 1 < CHANNELS_IN) to[plane_size] = value_t(sum.y);
        }
      }
  };
  Ahead next = load_ahead(first_row);
  for (int row = first_row; row < row_end; row += POOL_H) {
    stage(row, next);
    __syncthreads();  // that is there; and terms have been read
    if (threadIdx.x < 2) largest[(row / POOL_H + 1) % 2][threadIdx.x] = 0;
    rescale(row);
    add_selected(row);
    if (row >= row_begin) add_composed(row);
    next = load_ahead(row + POOL_H);
    __syncthreads();  // all terms are there, and what was staged has been read
    if (row >= row_begin) write(row);
  }
#endif
}

}  // namespace
