// x's gradient at its border (grad/selected/input.cuh): there some of a pixel's positions are outside of
// v, and the composed filter is another, of the taps that are left.
#pragma once
#include "grad/selected/compose.cuh"

namespace grad::selected {

template <class P> struct Bordering : Composing<P> {
  using Base = Composing<P>;
  using Base::kTaps, Base::kUnits, Base::kDepth, Base::kInputChannels, Base::kHaloH, Base::kHaloW,
      Base::kReachH, Base::kReachW, Base::kIn, Base::kFilterH, Base::kFilterW;
  using typename Base::Geometry, typename Base::Composed;

  // Pixels for which the same taps are left make a class, with a composed filter of its own: classes count
  // rows (or columns) before the first with all taps, all with all of them as one, and those behind.
  struct Range {
    int begin, end;           // rows of x
    int first_tap, last_tap;  // whose positions are in v
  };
  __device__ __forceinline__ static Range range_of(int own, int halo, int size) {
    const int inside = size - halo;  // positions
    if (own == halo) return {halo, inside, 0, halo};
    const int at = own < halo ? own : max(inside, halo) + own - halo - 1;
    return {at, min(at + 1, size), max(0, at - inside + 1), min(halo, at)};
  }

  // A block has two edges side by side, and a thread a pixel of one.
  static constexpr int kBorderPixels = kReachH > 5 || kReachW > 5 ? 32 : 128,
                       kBorderThreads = 2 * kBorderPixels;
  static constexpr int kPixelPitch = kInputChannels + 4;  // no bank conflicts
  static constexpr int kOfRow = (kReachH + 1) * (kBorderPixels + 2 * kHaloW);
  static constexpr int kOfColumn = (kBorderPixels + 2 * kHaloH) * (kReachW + 1);
  static constexpr int kBorderFilter =
      kReachH * kReachW * kInputChannels * kInputChannels;  // (row, column, in, out)
  static constexpr int kBorderShared =
      ((kOfRow > kOfColumn ? kOfRow : kOfColumn) * kPixelPitch + 2 * kBorderFilter) * 4;
  static constexpr int kPairsH = (kHaloH + 1) / 2, kPairsW = (kHaloW + 1) / 2;  // of edges, on a side
  static constexpr int kPairs = 2 * kPairsH + 2 * kPairsW;

  // What a block knows of its sample: adds to dx there.
  struct Border {
    value_t* const dx;
    const value_t* const x;
    const float* const shift;
    const Composed& composed;
    const Geometry& geometry;
    const int n = blockIdx.x;
    const value_t* const sample = x + int64_t(n) * kIn * geometry.plane_size();

    __device__ __forceinline__ void add(int channel, int row, int column, float value) const {
      value_t* const to =
          dx + (int64_t(n) * kIn + channel) * geometry.plane_size() + int64_t(row) * geometry.W + column;
      *to = value_t(float(*to) + value);
    }

    // All corners, a thread for a channel of a pixel.
    __device__ __forceinline__ void add_corners() const {
      for (int i = threadIdx.x; i < 4 * kHaloH * kHaloW * kIn; i += kBorderThreads) {
        constexpr int kOfRow = 2 * kHaloW + !kHaloW;  // corners
        const int h = i / kIn / kOfRow, w = i / kIn % kOfRow;
        const Range rows = range_of(h + (h >= kHaloH), kHaloH, geometry.H);
        const Range columns = range_of(w + (w >= kHaloW), kHaloW, geometry.W);
        if (rows.begin < rows.end && columns.begin < columns.end)
          add(i % kIn, rows.begin, columns.begin, corner_gradient(i % kIn, rows, columns));
      }
    }

   private:
    // What a pixel gets from the taps in `rows` and `columns`, for channel `out`.
    __device__ float corner_gradient(int out, Range rows, Range columns) const {
      const int H = geometry.H, W = geometry.W;
      float total = 0;
      for (int kh = rows.first_tap; kh <= rows.last_tap; kh++)
        for (int kw = columns.first_tap; kw <= columns.last_tap; kw++) {
          const int64_t tap = int64_t(n) * kTaps + kh * kFilterW + kw;
          const float* const products = composed.products + tap * (kDepth * kInputChannels) + out;
          float sum = composed.constants[tap * kInputChannels + out];
#pragma unroll 2
          for (int unit = 0; unit < kUnits; unit++) {
            const int row = rows.begin - kh + unit % kTaps / kFilterW;
            const int column = columns.begin - kw + unit % kFilterW;
#pragma unroll
            for (int i = 0; i < 8; i++) {
              const int c = unit / kTaps * 8 + i;
              if (c < kIn)
                sum += (float(sample[(int64_t(c) * H + row) * W + column]) - shift[n * kIn + c]) *
                       products[(unit * 8 + i) * kInputChannels];
            }
          }
          total += sum;
        }
      return total;
    }
  };

  // Two rows or, `down`, columns of pixels, side by side; the second one may be missing. Those of each have
  // the same taps; its composed filter is in shared memory.
  template <bool down> struct Edges {
    const Border& border;
    const Range own[2], along;  // rows and columns, or columns and rows
    float *const filters, *const pixels, *const levels;

    __device__ __forceinline__ Range of(int edge) const {  // number by number: in registers
      return {edge ? own[1].begin : own[0].begin, edge ? own[1].end : own[0].end,
              edge ? own[1].first_tap : own[0].first_tap, edge ? own[1].last_tap : own[0].last_tap};
    }
    __device__ __forceinline__ bool has(int edge) const {
      return of(edge).begin < of(edge).end && along.begin < along.end;
    }

    // The composed filters of the taps that are left, and the constants'.
    __device__ __forceinline__ void compose_filters() const {
      const float* const products = border.composed.products + int64_t(border.n) * kDepth * kDepth;
#pragma unroll 2
      for (int i = threadIdx.x; i < kBorderFilter; i += kBorderThreads) {
        const int out = i % kInputChannels, in = i / kInputChannels % kInputChannels;
        const int at = i / kInputChannels / kInputChannels;
        const int below = at / kReachW - kHaloH, right = at % kReachW - kHaloW;
        sum_of_taps(
            filters + i, kBorderFilter, products,
            [&](int kh, int kw) {
              return unsigned(kh + below) < kFilterH && unsigned(kw + right) < kFilterW;
            },
            [&](int tap, int kh, int kw) {
              const int unit = in / 8 * kTaps + (kh + below) * kFilterW + kw + right;
              return (tap * kDepth + unit * 8 + in % 8) * kInputChannels + out;
            });
      }
      if (threadIdx.x < kInputChannels)
        sum_of_taps(
            levels + threadIdx.x, kInputChannels, border.composed.constants + int64_t(border.n) * kDepth,
            [](int, int) { return true; },
            [](int tap, int, int) { return tap * kInputChannels + int(threadIdx.x); });
    }

    // x less its shift around the edges' pixels: height × pitch pixels from (top, left) on; zeros outside of
    // x.
    __device__ __forceinline__ void stage_pixels(int top, int left, int height, int pitch) const {
      const Geometry& geometry = border.geometry;
#pragma unroll 2
      for (int i = threadIdx.x; i < height * pitch; i += kBorderThreads) {
        const int row = top + i / pitch, column = left + i % pitch;
        const bool inside = unsigned(row) < unsigned(geometry.H) && unsigned(column) < unsigned(geometry.W);
        const value_t* from = border.sample + (inside ? int64_t(row) * geometry.W + column : 0);
#pragma unroll
        for (int c = 0; c < kInputChannels; c++) {
          const float value =
              c < kIn ? float(from[c * geometry.plane_size()]) - border.shift[border.n * kIn + c] : 0.f;
          pixels[i * kPixelPitch + c] = inside ? value : 0.f;
        }
      }
    }

    // The products for a pixel of an edge.
    __device__ __forceinline__ void multiply(float (&sum)[kInputChannels], int edge, int pixel,
                                             int pitch) const {
      const Range rows = down ? along : of(edge), columns = down ? of(edge) : along;
      const int row = down ? pixel : edge, column = down ? edge : pixel;
      for (int kh = kHaloH - rows.last_tap; kh < kReachH - rows.first_tap; kh++)
        for (int kw = kHaloW - columns.last_tap; kw < kReachW - columns.first_tap; kw++) {
          const float* from = pixels + ((row + kh) * pitch + column + kw) * kPixelPitch;
          const float* factors =
              filters + edge * kBorderFilter + (kh * kReachW + kw) * kInputChannels * kInputChannels;
#pragma unroll
          for (int c = 0; c < kInputChannels; c += 4) {
            const float4 four = *reinterpret_cast<const float4*>(from + c);
            const float of_pixel[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
            for (int k = 0; k < 4; k++)
#pragma unroll
              for (int i = 0; i < kInputChannels; i += 4) {
                const float4 factor =
                    *reinterpret_cast<const float4*>(factors + (c + k) * kInputChannels + i);
                sum[i] += of_pixel[k] * factor.x, sum[i + 1] += of_pixel[k] * factor.y;
                sum[i + 2] += of_pixel[k] * factor.z, sum[i + 3] += of_pixel[k] * factor.w;
              }
          }
        }
    }

   private:
    // For each edge, `pitch` elements apart, the sum over those of its taps of which `real` says so; all
    // loads are under way at once.
    template <class Real, class Index>
    __device__ __forceinline__ void sum_of_taps(float* to, int pitch, const float* from, const Real& real,
                                                const Index& index) const {
      const auto counts = [&](int edge, int kh, int kw) {
        const int at = down ? kw : kh, beside = down ? kh : kw;
        return own[edge].first_tap <= at && at <= own[edge].last_tap && along.first_tap <= beside &&
               beside <= along.last_tap;
      };
      float sums[2] = {};
#pragma unroll
      for (int tap = 0; tap < kTaps; tap++) {
        const int kh = tap / kFilterW, kw = tap % kFilterW;
        const bool is_real = real(kh, kw);
        const float one = from[is_real ? index(tap, kh, kw) : 0];
#pragma unroll
        for (int edge = 0; edge < 2; edge++) sums[edge] += is_real && counts(edge, kh, kw) ? one : 0.f;
      }
#pragma unroll
      for (int edge = 0; edge < 2; edge++) to[edge * pitch] = sums[edge];
    }
  };

  // Grid: samples, of which there may be more than a grid has rows; all corners, and pairs of edges. What
  // takes longest comes first, so that it is not what the others wait for: a thread of a corner's has one
  // load after the other, and a column's pixels lie in as many sectors.
  __device__ __forceinline__ static void add_border(value_t* dx, const value_t* x, const float* shift,
                                                    Composed composed, Geometry geometry) {
    extern __shared__ __align__(128) unsigned char shared[];
    __shared__ float levels[2 * kInputChannels];
    const Border border{dx, x, shift, composed, geometry};
    if (blockIdx.y == 0) return border.add_corners();
    const int at = int(blockIdx.y) - 1;  // of the columns, and the rows behind them
    if (at < 2 * kPairsW) add_pair<true>(border, at, shared, levels);
    else add_pair<false>(border, at - 2 * kPairsW, shared, levels);
  }

 private:
  template <bool down>
  __device__ __forceinline__ static void add_pair(const Border& border, int pair, unsigned char* shared,
                                                  float* levels) {
    constexpr int kHalo = down ? kHaloW : kHaloH, kOfSide = std::max(1, (kHalo + 1) / 2);  // pairs
    const Geometry& geometry = border.geometry;
    const auto own = [&](int number) {  // of a side's
      if (number >= kHalo) return Range{};
      return range_of(number + pair / kOfSide * (kHalo + 1), kHalo, down ? geometry.W : geometry.H);
    };
    const int first = pair % kOfSide * 2;
    float* const filters = reinterpret_cast<float*>(shared);
    const Edges<down> edges{
        border,
        {own(first), own(first + 1)},
        down ? range_of(kHaloH, kHaloH, geometry.H) : range_of(kHaloW, kHaloW, geometry.W),
        filters,
        filters + 2 * kBorderFilter,
        levels};
    if (!edges.has(0)) return;
    edges.compose_filters();

    const int own_pixel = threadIdx.x % kBorderPixels, edge = threadIdx.x / kBorderPixels;
    for (int begin = edges.along.begin; begin < edges.along.end; begin += kBorderPixels) {
      const int count = min(kBorderPixels, edges.along.end - begin);
      const int row = down ? begin : edges.own[0].begin, column = down ? edges.own[0].begin : begin;
      const int pitch = (down ? 2 : count) + 2 * kHaloW, height = (down ? count : 2) + 2 * kHaloH;
      __syncthreads();  // the pixels have been read
      edges.stage_pixels(row - kHaloH, column - kHaloW, height, pitch);
      __syncthreads();  // they are there, and the filters
      if (own_pixel >= count || !edges.has(edge)) continue;
      float sum[kInputChannels] = {};
      edges.multiply(sum, edge, own_pixel, pitch);
#pragma unroll
      for (int i = 0; i < kIn; i++)
        border.add(i, row + (down ? own_pixel : edge), column + (down ? edge : own_pixel),
                   levels[edge * kInputChannels + i] + sum[i]);
    }
  }
};

template <class P>
__global__ void __launch_bounds__(P::kBorderThreads, 3)
    border_kernel(value_t* dx, const value_t* x, const float* shift, typename P::Composed composed,
                  typename P::Geometry geometry) {
  P::add_border(dx, x, shift, composed, geometry);
}

}  // namespace grad::selected
