// The operands of x's gradient in shared memory (grad/selected/input.cuh): the gradients that windows
// select, and x less its shift; each split into two float16, under a scale that fits the tile so far.
#pragma once
#include "grad/selected/compose.cuh"

namespace grad::selected {

// Known to be the same in all lanes, so that it takes no registers of threads.
__device__ __forceinline__ int uniform(int value) { return __shfl_sync(~0u, value, 0); }
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

template <class P, int kInputColumns_> struct InputOperands : Composing<P> {
  using Base = Composing<P>;
  using Base::kPlanes, Base::passed_gradient, Base::selected_gradient, Base::kPixels, Base::kPlaces,
      Base::kInputChannels, Base::kHaloH, Base::kHaloW, Base::kIn, Base::kOut, Base::kFilterW, Base::kPoolH,
      Base::kPoolW;
  using typename Base::Geometry, typename Base::Saved, typename Base::Channel, typename Base::Composed;

  static constexpr int kInputColumns = kInputColumns_;  // of a tile
  static constexpr int kInputWarps = kInputColumns / 8, kInputThreads = kInputWarps * 32;
  static constexpr int kInputWindows = kInputColumns / kPoolW + 2;  // above a tile, which may cut two of them
  static constexpr int kQuads = kOut / 4, kSlotPitch = kQuads + 1;  // odd, so no bank conflicts
  static constexpr int kSlots = kInputWindows * kSlotPitch;
  static constexpr int kRing = kPoolH + 2 * kHaloH;  // rows of x
  static constexpr int kRingColumns = kInputColumns + 2 * kHaloW;
  static constexpr int kRingRow = kRingColumns * 16, kRingPlane = kRing * kRingRow,
                       kRingPart = kPlanes * kRingPlane;
  static constexpr int kSumRows = kPoolH + kHaloH;  // of dx under a row of windows
  static constexpr int kNoItem = 1 << 20;           // of a tile's windows
  static constexpr int kOfZeros = 126;              // exponent

  // Dynamic shared memory, where each part begins, in bytes: the filters, as in Composed or as `kByFours` in
  // input.cuh says, and the sample's composed one, as in Composed; the ring of x [part][plane][row][column],
  // 8 channels each; of the windows' gradients the values and the places, [window][four channels]; the terms
  // of dx [plane][filter's column][row][column], 8 channels.
  struct InputLayout {
    static constexpr int kComposed = Composed::kFilters * 16, kPixels = kComposed + Composed::kOfSample * 16;
    static constexpr int kValues = kPixels + 2 * kRingPart;
    static constexpr int kPlaces = kValues + kSlots * 16, kTerms = kPlaces + kSlots * 8;
    static constexpr int kTermPlane =
        kSumRows * kRingColumns * 8;  // float32 of a plane and a filter's column
    static constexpr int kBytes = kTerms + kPlanes * kFilterW * kTermPlane * 4;
  };

  struct InputStorage {  // the rest of shared memory
    int largest[2][2];   // magnitudes of gradients and of x, as bits; rows of windows take turns
    Channel channels[kOut];
    float unscale[kOut];
    int composed_exponent;
    float levels[kInputChannels];
    float shifts[kInputChannels];
  };

  // Where a tile of dx lies.
  struct InputTile {
    const Geometry& geometry;
    const int strip, job, tile, n, height, width;
    // Rows of x that are written; columns likewise. The tile's first column of v, and how much further right
    // the first of x is: the first tile has all columns of v that it needs from its own on, others end with
    // them.
    const int row_begin, row_end, column_begin, column_end, ahead, first_column;
    const int first_window, last_window, windows;

    __device__ __forceinline__ InputTile(const Geometry& geometry, int tiles, int stride)
        : geometry(geometry), strip(blockIdx.x % geometry.strips), job(uniform(blockIdx.x / geometry.strips)),
          tile(uniform(job % tiles)), n(uniform(job / tiles)), height(geometry.height()),
          width(geometry.width()), row_begin(uniform(strip * geometry.rows)),
          row_end(min(geometry.H, row_begin + geometry.rows)), column_begin(tile * stride),
          column_end(min(geometry.W, column_begin + stride)), ahead(uniform(tile ? kHaloW : 0)),
          first_column(column_begin - ahead), first_window(first_column / kPoolW),
          last_window((first_column + kInputColumns - 1) / kPoolW),
          windows(min(last_window + 1, geometry.pooled_width()) - first_window) {}

    // Rows of windows, by their first row: the first that reaches the tile; is there one?
    __device__ __forceinline__ int first_row() const { return max(0, row_begin - kHaloH) / kPoolH * kPoolH; }
    __device__ __forceinline__ bool is_pooled(int row) const {
      return row < row_end && row / kPoolH < geometry.pooled_height();
    }
  };

  // Brings to shared memory what the products read for a row of windows: its gradients, and the rows of x
  // that the ring has not. All rows have the scales of those before, which few outgrow: then what is there is
  // staged anew. Items are shared out among the threads, whose first ones are loaded before the products of
  // the rows before, or between them, and held after them.
  struct InputStage {
    const InputTile& tile;
    const Saved& saved;
    const value_t* const x;
    InputStorage& storage;
    unsigned char* const shared;
    int exponent = kOfZeros, x_exponent = kOfZeros;  // of the gradients' scale, and of x's

    // Of four channels of a window: dy and what forward kept.
    struct Gradients {
      float dy[4], extreme[4];
      int place[4];
    };
    struct Pixel {
      float values[kInputChannels];
      bool inside;
    };
    struct Ahead {
      Gradients gradients;
      Pixel pixels[2];
    };

    __device__ __forceinline__ Gradients gradients_ahead(int row) const {
      return load_gradients(tile.is_pooled(row) ? thread_index_anew() : kNoItem, row / kPoolH);
    }
    __device__ __forceinline__ void load_pixels_ahead(Ahead& ahead, int row) const {
#pragma unroll
      for (int i = 0; i < 2; i++)
        ahead.pixels[i] = load_pixel(thread_index_anew() + i * kInputThreads, first_of_x(row));
    }

    // All that the row of windows at `row` needs, by the scales that there are.
    __device__ __forceinline__ void stage(int row, const Ahead& ahead) const {
      const int item = thread_index_anew(), turn = row / kPoolH % 2, begin = first_of_x(row);
      const int count = row >= tile.row_begin ? (row + kPoolH + kHaloH - begin) * kRingColumns : 0;
      const float factor = power_of_two(exponent), x_factor = power_of_two(x_exponent);
      float magnitude = 0, of_x = 0;
      if (tile.is_pooled(row))
        magnitude = fmaxf(hold_gradients(item, ahead.gradients, factor),
                          stage_gradients(item + kInputThreads, row / kPoolH, factor));
#pragma unroll
      for (int i = 0; i < 2; i++) {
        const int own = item + i * kInputThreads;
        if (own < count) of_x = fmaxf(of_x, hold_pixel(own, begin, ahead.pixels[i], x_factor));
      }
      of_x = fmaxf(of_x, stage_pixels(item + 2 * kInputThreads, begin, count, x_factor));
      publish(&storage.largest[turn][0], magnitude), publish(&storage.largest[turn][1], of_x);
    }

    // After a barrier: the same anew, where the row's values outgrow a scale.
    __device__ __forceinline__ void rescale(int row) {
      const int turn = row / kPoolH % 2, item = thread_index_anew();
      const bool again = outgrown(exponent, storage.largest[turn][0]);
      const bool x_again = outgrown(x_exponent, storage.largest[turn][1]);
      if (again) stage_gradients(item, row / kPoolH, power_of_two(exponent));
      if (x_again) stage_pixels(item, row - kHaloH, kRing * kRingColumns, power_of_two(x_exponent));
      if (again || x_again) __syncthreads();  // all of that is there
    }

   private:
    // The first row of x that the ring lacks.
    __device__ __forceinline__ int first_of_x(int row) const {
      return row <= tile.row_begin ? row - kHaloH : row + kHaloH;
    }

    // Items of a row of windows: 16 windows of four channels after one another.
    __device__ __forceinline__ static int window_of(int item) {
      return item % 16 + item / (16 * kQuads) * 16;
    }
    __device__ __forceinline__ static int quad_of(int item) { return item / 16 % kQuads; }
    __device__ __forceinline__ Gradients load_gradients(int item, int window_row) const {
      const int window = window_of(item);
      const int64_t first = (int64_t(tile.n) * kOut + quad_of(item) * 4) * tile.geometry.pooled_size() +
                            int64_t(window_row) * tile.geometry.pooled_width() + tile.first_window + window;
      Gradients raw;
#pragma unroll
      for (int i = 0; i < 4; i++) {
        const int64_t at = window < tile.windows ? first + i * tile.geometry.pooled_size() : 0;
        raw.dy[i] = float(saved.dy[at]), raw.extreme[i] = saved.extreme[at], raw.place[i] = saved.index[at];
      }
      return raw;
    }
    // To shared memory; returns the largest magnitude.
    __device__ __forceinline__ float hold_gradients(int item, const Gradients& raw, float factor) const {
      const int window = window_of(item), quad = quad_of(item);
      if (window >= tile.windows) return 0.f;
      float gradients[4], magnitude = 0;
#pragma unroll
      for (int i = 0; i < 4; i++) {
        const int c = quad * 4 + i;
        const float passed = passed_gradient(saved, storage.channels[c], raw.dy[i], raw.extreme[i]);
        gradients[i] = storage.unscale[c] * selected_gradient(storage.channels[c], passed);
        magnitude = fmaxf(magnitude, fabsf(gradients[i]));
      }
      const Halves halves[2] = {split(gradients[0] * factor, gradients[1] * factor),
                                split(gradients[2] * factor, gradients[3] * factor)};
      const int slot = window * kSlotPitch + quad;
      reinterpret_cast<uint4*>(shared + InputLayout::kValues)[slot] =
          make_uint4(halves[0].high, halves[1].high, halves[0].low, halves[1].low);
      const auto place = [&](int i) { return storage.channels[quad * 4 + i].flat ? 0 : raw.place[i]; };
      reinterpret_cast<uint2*>(shared + InputLayout::kPlaces)[slot] =
          make_uint2(pair_of(place(0), place(1)), pair_of(place(2), place(3)));
      return magnitude;
    }
    // All of a row of windows, from a thread's `item` on.
    __device__ __forceinline__ float stage_gradients(int item, int window_row, float factor) const {
      float magnitude = 0;
#pragma unroll 1
      for (; item < (tile.windows + 15) / 16 * 16 * kQuads; item += kInputThreads)
        magnitude = fmaxf(magnitude, hold_gradients(item, load_gradients(item, window_row), factor));
      return magnitude;
    }

    // Items of the rows of x from `begin` on: pixels. Outside of x they are zeros, when they are held.
    __device__ __forceinline__ Pixel load_pixel(int item, int begin) const {
      const int row = begin + item / kRingColumns, column = tile.column_begin - kHaloW + item % kRingColumns;
      const bool inside =
          unsigned(row) < unsigned(tile.geometry.H) && unsigned(column) < unsigned(tile.geometry.W);
      const int64_t plane_size = tile.geometry.plane_size();
      const value_t* const sample = x + int64_t(tile.n) * kIn * plane_size;
      const value_t* const from = sample + (inside ? int64_t(row) * tile.geometry.W + column : 0);
      Pixel pixel;
      pixel.inside = inside;
#pragma unroll
      for (int c = 0; c < kInputChannels; c++) pixel.values[c] = c < kIn ? float(from[c * plane_size]) : 0.f;
      return pixel;
    }
    __device__ __forceinline__ float hold_pixel(int item, int begin, const Pixel& pixel, float factor) const {
      const float* const shifts = storage.shifts;
      const int row = (begin + item / kRingColumns + kRing) % kRing;
      unsigned char* const to = shared + InputLayout::kPixels + row * kRingRow + item % kRingColumns * 16;
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
    }
    __device__ __forceinline__ float stage_pixels(int item, int begin, int count, float factor) const {
      float magnitude = 0;
#pragma unroll 1
      for (; item < count; item += kInputThreads)
        magnitude = fmaxf(magnitude, hold_pixel(item, begin, load_pixel(item, begin), factor));
      return magnitude;
    }

    __device__ __forceinline__ static void publish(int* to, float magnitude) {
      const unsigned of_warp = __reduce_max_sync(~0u, __float_as_uint(magnitude));
      if (threadIdx.x % 32 == 0) atomicMax(to, int(of_warp));
    }
    // Does a scale not hold what is that large? Then it becomes one that has room for more.
    __device__ __forceinline__ static bool outgrown(int& exponent, int magnitude) {
      const float largest = __int_as_float(magnitude);
      if (uniform(largest == 0 || fitting_exponent(largest) >= exponent)) return false;
      exponent = uniform(fitting_exponent(largest, kTop - 2));
      return true;
    }
  };
};

}  // namespace grad::selected
