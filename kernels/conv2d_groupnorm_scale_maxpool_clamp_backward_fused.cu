// The gradients of y = clamp(max_pool(group_norm(conv2d(x, weight) + conv_bias)·scale), low, high), from what
// the fused forward keeps: neither the convolution nor its gradient is ever written.
//
// x (N, CHANNELS_IN, H, W), weight (CHANNELS_OUT, CHANNELS_IN, KERNEL_H, KERNEL_W), dy (N, CHANNELS_OUT, PH,
// PW), contiguous. v (N, CHANNELS_OUT, OH, OW) is the convolution without its bias; extreme and index, like
// dy, are the v that each window selects and its place there, by rows; statistics as in GroupStatistics.
//
// With dz = dy·scale where the clamp lets it pass, every position's gradient is affine in v, and one of a
// window has something more:
//   dv = slope·dz·[selected] + constant + linear·v
// slope and linear are of a (sample, group), constant of a (sample, channel). Let X be a position's patch: the
// inputs of its filter, in units of 8 channels at a tap. Then v = weight·X, and
//   d_weight = Σ slope·dz·X + Σ constant·(ΣX) + weight·Σ linear·(ΣXXᵀ),
// where the first sum goes over windows, and the others over samples. So the dense part needs nothing of dy
// but its sums, and the sparse one none of them.
//   strip_kernel, sample_kernel, total_kernel    all of that (…_weight_gradient.cuh)
// and only where x's gradient is asked for
//   input_gradient_kernel     v once more, dv from it in registers, and its transposed convolution
// All that is shifted away is added again at the end, in double. Every sum has a fixed order.
//
// Products run on tensor cores (mma.sync), each operand a sum of two float16 (operands.cuh), scaled by powers
// of two: x by the tile in shared memory, dz by channel and row of windows. No more than 8 steps are added up
// in a tensor core, which cuts off; the rest is in float32.
//
// At the default size (128, 8, 128, 128), 3×3, 64 channels, pool 4, an H200's tensor cores take 6 cycles for a
// product m16n8k16 (mma.sync) and 8 for a sparse m16n8k32, so that these times are the least, by arithmetic:
//   strip_kernel            45 products for 16 positions, 108 sparse ones for two windows, 138 MB: 0.10 ms
//   input_gradient_kernel   228 for 16 positions, 206 MB: 0.19 ms
// Beside what forward keeps (39 MB), 16 MB of memory.
#include "conv2d_groupnorm_scale_maxpool_clamp_weight_gradient.cuh"

#ifndef INPUT_COLUMNS  // the plan, as tiling.py makes it; else one for which a source compiles alone
#define INPUT_COLUMNS 128
#define INPUT_SHARED InputLayout::kBytes
#endif

namespace {

// ------------------------------------------------------------------------------------------- x's own gradient

// Rows of v are computed once more, a tile at a time, and made rows of dv in registers. Those times the filters
// are `terms`, what each position gives to the pixels under it; a pixel's are added up from shared memory.
constexpr int kInputColumns = INPUT_COLUMNS;  // of a tile of v
constexpr int kInputThreads = kInputColumns;  // a warp has 32 positions of a row of v; a thread adds up a column
constexpr int kFilterPitch = (kUnits + 1) / 2 * 2 + 1;  // units of a channel; odd, so no bank conflicts
constexpr int kFilterBytes = CHANNELS_OUT * kFilterPitch * 16;  // of the high halves, and of the low ones
constexpr int kTermPitch = kDepth + 1;
constexpr int kGradientPitch = CHANNELS_OUT + 2;
constexpr int kInputChannels = kPlanes * 8;
constexpr int kInputWindows = kInputColumns / POOL_W + 2;  // above a tile, which may cut the first and the last
using InputStage = Stage<POOL_H, kInputColumns, kInputThreads>;
struct InputLayout {  // of shared memory: where each part begins
  static constexpr int kFilters = InputStage::kBytes, kTerms = kFilters + 2 * kFilterBytes;
  static constexpr int kSums = kTerms + kInputColumns * kTermPitch * 4;
  static constexpr int kGradients = kSums + KERNEL_H * kInputChannels * kInputColumns * 4;
  static constexpr int kPlaces = kGradients + kInputWindows * kGradientPitch * 4;
  static constexpr int kBytes = kPlaces + kInputWindows * kGradientPitch;
};
static_assert(InputLayout::kBytes == INPUT_SHARED, "what was planned with");

// Of a channel of one sample: dv = constant + linear·(weight·X) + …, where weight·X is scaled like x and the
// filter; and what undoes the filter's scale.
struct Affine {
  float constant, linear, unscale, unused;
};

// The filters as halves, in units, scaled by channel; and what goes with them.
__device__ inline void stage_filters(unsigned char* filters, Affine* affine, const value_t* weight,
                                     Merged merged, GroupShape shape, int n) {
  const int lane = threadIdx.x % 32;
  for (int c = threadIdx.x / 32; c < CHANNELS_OUT; c += kInputThreads / 32) {
    const value_t* filter = weight + c * (CHANNELS_IN * kTaps);
    float largest = 0;
    for (int i = lane; i < CHANNELS_IN * kTaps; i += 32) largest = fmaxf(largest, fabsf(float(filter[i])));
    const int exponent =
        fitting_exponent(__uint_as_float(__reduce_max_sync(~0u, __float_as_uint(largest))));
    const auto value = [&](int k) {
      const bool real = k < kDepth && input_channel(k) < CHANNELS_IN;
      return real ? float(filter[place_in_filter(k)]) * power_of_two(exponent) : 0.f;
    };
    for (int pair = lane; pair < kFilterPitch * 4; pair += 32) {
      const Halves halves = split(value(2 * pair), value(2 * pair + 1));
      uint32_t* to = reinterpret_cast<uint32_t*>(filters) + c * kFilterPitch * 4 + pair;
      to[0] = halves.high, to[kFilterBytes / 4] = halves.low;
    }
    const float unscale = power_of_two(-exponent);
    if (lane == 0)
      affine[c] = {float(merged.constant[n * CHANNELS_OUT + c]),
                   float(merged.linear[n * shape.G + c / shape.channels()] * unscale), unscale, 0};
  }
}

// dx like x. Grid: strips of `rows` rows of x, tiles of `stride` columns (0: one tile, all of them), samples,
// the first fastest.
__global__ void __launch_bounds__(kInputThreads, 2)
input_gradient_kernel(value_t* dx, const value_t* x, const float* shift, Merged merged, Saved saved,
                      GroupShape shape, Geometry geometry, int tiles, int stride) {
#if __CUDA_ARCH__ >= 800
  extern __shared__ __align__(128) unsigned char shared[];
  __shared__ int largest[2];
  __shared__ Affine affine[CHANNELS_OUT];
  __shared__ Channel channels[CHANNELS_OUT];
  InputStage stage(shared, largest);
  unsigned char* const filters = shared + InputLayout::kFilters;
  float* const terms = reinterpret_cast<float*>(shared + InputLayout::kTerms);
  float* const sums = reinterpret_cast<float*>(shared + InputLayout::kSums);
  float* const gradients = reinterpret_cast<float*>(shared + InputLayout::kGradients);
  uint8_t* const places = shared + InputLayout::kPlaces;
  const int strip = blockIdx.x % geometry.strips, job = blockIdx.x / geometry.strips;
  const int tile = job % tiles, n = job / tiles, height = geometry.height(), width = geometry.width();
  const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0), lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const int64_t plane_size = int64_t(geometry.H) * geometry.W;
  const value_t* sample = x + int64_t(n) * CHANNELS_IN * plane_size;
  const int64_t pooled_size = int64_t(geometry.pooled_height()) * geometry.pooled_width();
  // Rows of x that are written, and the first row of v under them; likewise columns.
  const int row_begin = strip * geometry.rows, row_end = min(geometry.H, row_begin + geometry.rows);
  const int first_row = max(0, row_begin - KERNEL_H + 1);
  const int column_begin = tile * stride, first_column = stride ? column_begin - KERNEL_W + 1 : 0;
  const int column_end = stride ? min(geometry.W, column_begin + stride) : geometry.W;
  const int first_window = max(0, first_column) / POOL_W;

  for (int c = threadIdx.x; c < CHANNELS_OUT; c += kInputThreads)
    channels[c] = channel_of(saved, shape, n, c);
  stage_filters(filters, affine, saved.weight, merged, shape, n);
  for (int i = threadIdx.x; i < KERNEL_H * kInputChannels * kInputColumns; i += kInputThreads) sums[i] = 0;

  float x_unscale = 0;
  for (int row = first_row; row < row_end; row++) {
    const int window_row = row / POOL_H;
    const bool pooled = window_row < geometry.pooled_height();
    if (row == first_row || row % POOL_H == 0) {  // the next row of windows
      if (row < height)
        x_unscale = power_of_two(-stage.fill(sample, shift + n * CHANNELS_IN, window_row * POOL_H, first_column,
                                             geometry));
      const int windows = pooled ? min(kInputWindows, geometry.pooled_width() - first_window) : 0;
      for (int window = lane; window < kInputWindows; window += 32) {
#pragma unroll 8
        for (int c = warp; c < CHANNELS_OUT; c += kInputThreads / 32) {
          float gradient = 0, unused[3] = {};
          int place = 0;
          if (window < windows) {
            const int64_t at = (int64_t(n) * CHANNELS_OUT + c) * pooled_size +
                               int64_t(window_row) * geometry.pooled_width() + first_window + window;
            place = saved.index[at];
            gradient = selected_gradient(saved, channels[c], float(saved.dy[at]), saved.extreme[at], unused);
          }
          gradients[window * kGradientPitch + c] = gradient;
          places[window * kGradientPitch + c] = uint8_t(place);
        }
      }
      __syncthreads();  // all gradients are there
    }
    if (row < height) {
      const uint32_t address = shared_address(shared), of_filters = shared_address(filters);
      for_constants<kChannelBlocks>([&](auto constant) {
        constexpr int first = decltype(constant)::value * kBlockChannels;
        constexpr int kLeft = CHANNELS_OUT - first, kOut = (kLeft < kBlockChannels ? kLeft : kBlockChannels) / 8;
        // v: positions by channels.
        float d[2][kOut][4];
#pragma unroll
        for (int i = 0; i < 2 * kOut * 4; i++) (&d[0][0][0])[i] = 0;
#pragma unroll
        for (int unit = 0; unit < kUnits; unit += 2) {
          uint32_t a[2][2][4];  // of both halves of the warp's positions, high and low
#pragma unroll
          for (int m = 0; m < 2; m++)
#pragma unroll
            for (int part = 0; part < 2; part++) {
              const int own = unit + lane / 16;  // behind the last: zeros
              const int at = (row % POOL_H * InputStage::kPitch + warp * 32 + m * 16 + lane % 16) * 16;
              const int offset = lane < 16 ? InputStage::offset(unit) : InputStage::offset(unit + 1);
              load_matrices(a[m][part], own < kUnits ? address + part * InputStage::kPartBytes + at + offset
                                                     : address + InputStage::kZeros);
            }
#pragma unroll
          for (int j = 0; j < kOut; j++) {
            uint32_t b[4];  // two units, high and low
            const int at = (first + j * 8 + lane % 8) * kFilterPitch + unit + lane / 8 % 2;
            load_matrices(b, of_filters + lane / 16 * kFilterBytes + at * 16);
#pragma unroll
            for (int m = 0; m < 2; m++) {
              multiply_add(d[m][j], a[m][1], b[0], b[1]);
              multiply_add(d[m][j], a[m][0], b[2], b[3]);
              multiply_add(d[m][j], a[m][0], b[0], b[1]);
            }
          }
        }
        // dv, times what undoes the filters' scale.
        float magnitude = 0;
#pragma unroll
        for (int m = 0; m < 2; m++)
#pragma unroll
          for (int half = 0; half < 2; half++) {
            const int column = first_column + warp * 32 + m * 16 + half * 8 + g, window = column / POOL_W;
            const bool real = unsigned(column) < unsigned(width);
            const bool selects = real && pooled && window < geometry.pooled_width();
            const int place = row % POOL_H * POOL_W + column % POOL_W;
            const int from = (selects ? window - first_window : 0) * kGradientPitch + first + 2 * t;
#pragma unroll
            for (int j = 0; j < kOut; j++)
#pragma unroll
              for (int i = 0; i < 2; i++) {
                const Affine own = affine[first + j * 8 + 2 * t + i];
                float& v = d[m][j][half * 2 + i];
                float dv = own.constant + own.linear * (v * x_unscale);
                if (selects && places[from + j * 8 + i] == place) dv += gradients[from + j * 8 + i];
                v = real ? dv * own.unscale : 0.f;
                magnitude = fmaxf(magnitude, fabsf(v));
              }
          }
        const int exponent =
            fitting_exponent(__uint_as_float(__reduce_max_sync(~0u, __float_as_uint(magnitude))));
        const float factor = power_of_two(exponent), unscale = power_of_two(-exponent);
        // Terms: positions by units. Two fragments of D are one of A.
        float e[2][kUnits][4];
#pragma unroll
        for (int i = 0; i < 2 * kUnits * 4; i++) (&e[0][0][0])[i] = 0;
#pragma unroll
        for (int k = 0; k < kOut / 2; k++) {
          uint32_t high[2][4], low[2][4];
#pragma unroll
          for (int m = 0; m < 2; m++)
#pragma unroll
            for (int i = 0; i < 4; i++) {
              const float* pair = d[m][2 * k + i / 2] + i % 2 * 2;
              const Halves halves = split(pair[0] * factor, pair[1] * factor);
              high[m][i] = halves.high, low[m][i] = halves.low;
            }
#pragma unroll
          for (int unit = 0; unit < kUnits; unit++) {
            uint32_t b[4];  // 16 channels, high and low
            load_matrices_transposed(b, of_filters + lane / 16 * kFilterBytes +
                                            ((first + k * 16 + lane % 16) * kFilterPitch + unit) * 16);
#pragma unroll
            for (int m = 0; m < 2; m++) {
              multiply_add(e[m][unit], low[m], b[0], b[1]);
              multiply_add(e[m][unit], high[m], b[2], b[3]);
              multiply_add(e[m][unit], high[m], b[0], b[1]);
            }
          }
        }
#pragma unroll
        for (int m = 0; m < 2; m++)
#pragma unroll
          for (int unit = 0; unit < kUnits; unit++)
#pragma unroll
            for (int i = 0; i < 4; i++) {
              float& to = terms[(warp * 32 + m * 16 + i / 2 * 8 + g) * kTermPitch + unit * 8 + 2 * t + i % 2];
              to = (first ? to : 0.f) + e[m][unit][i] * unscale;
            }
      });
    }
    __syncthreads();  // the row's terms are there
    // A thread has a column; the row of x with this one's number is complete now.
    const int column = column_begin + threadIdx.x, position = column - first_column;
    if (column < column_end)
#pragma unroll 1
      for (int c = 0; c < kInputChannels; c++) {
        float* const own = sums + c * kInputColumns + threadIdx.x;
#pragma unroll
        for (int kh = 0; kh < KERNEL_H; kh++) {
          float* const sum = own + (row + kh) % KERNEL_H * (kInputChannels * kInputColumns);
          float total = *sum;
          if (row < height)
#pragma unroll
            for (int kw = 0; kw < KERNEL_W; kw++)
              if (unsigned(position - kw) < kInputColumns)
                total += terms[(position - kw) * kTermPitch +
                               (c / 8 * kTaps + kh * KERNEL_W + kw) * 8 + c % 8];
          *sum = kh == 0 ? 0.f : total;
          if (kh == 0 && row >= row_begin && c < CHANNELS_IN)
            dx[(int64_t(n) * CHANNELS_IN + c) * plane_size + int64_t(row) * geometry.W + column] =
                value_t(total);
        }
      }
    __syncthreads();  // terms have been read
  }
#endif
}

inline Saved saved_by_forward(const value_t* weight, const output_t* dy, const float* kept,
                              const uint8_t* index, const float* conv_bias, const float* norm_weight,
                              const float* norm_bias, const float* scale, double low, double high,
                              Geometry geometry, GroupShape shape) {
  const float* behind = kept + int64_t(shape.N) * shape.C * geometry.pooled_height() * geometry.pooled_width();
  const auto [mean, m2, group_mean, group_rstd] = GroupStatistics(behind, shape.N, shape.C, shape.G);
  return {weight,    dy,          kept,      index, group_mean, group_rstd,
          conv_bias, norm_weight, norm_bias, scale, float(low), float(high)};
}

template <class Kernel> void allow(Kernel kernel, int bytes) {
  cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
}

}  // namespace

// The gradients of weight and, summed over the samples, of the parameters; d_scale has `scales` elements,
// CHANNELS_OUT or 1. kept and index are forward's. `merged` and `partial` have room for what Merged and
// Partial say. Rows of x are cut into tiles of POOL_H, and those into `strips` of `rows`, the last of what is
// left; a plan that does not cover them makes no blocks, and the launch fails.
EXPORT void backward(value_t* d_weight, float* d_conv_bias, float* d_norm_weight, float* d_norm_bias,
                     float* d_scale, double* merged, float* partial, const output_t* dy, const value_t* x,
                     const value_t* weight, const float* kept, const uint8_t* index, const float* conv_bias,
                     const float* norm_weight, const float* norm_bias, const float* scale, double low,
                     double high, int64_t scales, int64_t N, int64_t G, int64_t H, int64_t W, int64_t strips,
                     int64_t rows, cudaStream_t stream) {
  const Geometry geometry{int(N), int(H), int(W), int(strips), int(rows)};
  const GroupShape shape{N, CHANNELS_OUT, G, int64_t(geometry.height()) * geometry.width()};
  const Saved saved = saved_by_forward(weight, dy, kept, index, conv_bias, norm_weight, norm_bias, scale, low,
                                       high, geometry, shape);
  const Merged sums(merged, N, G);
  const Partial parts(partial, N, strips);
  const unsigned blocks = geometry.cover(geometry.tile_rows()) ? unsigned(strips * N * kStripBlocks) : 0;
  allow(strip_kernel, StripLayout::kBytes);
  strip_kernel<<<blocks, kThreads, StripLayout::kBytes, stream>>>(parts, x, saved, shape, geometry);
  sample_kernel<<<N, kSampleThreads, 0, stream>>>(sums, parts, saved, shape, geometry);
  total_kernel<<<CHANNELS_OUT * (kDepth + 4) / 32, kThreads, 0, stream>>>(
      d_weight, d_conv_bias, d_norm_weight, d_norm_bias, d_scale, sums, scales > 1, int(N));
  if (scales == 1)
    sum_rows_kernel<<<1, kThreads, 0, stream>>>(d_scale, sums.gradients + 3 * N * CHANNELS_OUT, N,
                                                CHANNELS_OUT);
}

// dx, after `backward`, of which merged and partial are. Rows of x are cut into strips of `rows`, and columns
// into tiles of `stride`, 0 where there is one tile.
EXPORT void backward_input(value_t* dx, const double* merged, const float* partial, const output_t* dy,
                           const value_t* x, const value_t* weight, const float* kept, const uint8_t* index,
                           const float* conv_bias, const float* norm_weight, const float* norm_bias,
                           const float* scale, double low, double high, int64_t N, int64_t G, int64_t H,
                           int64_t W, int64_t tiles, int64_t stride, int64_t strips, int64_t rows,
                           cudaStream_t stream) {
  const Geometry geometry{int(N), int(H), int(W), int(strips), int(rows)};
  const GroupShape shape{N, CHANNELS_OUT, G, int64_t(geometry.height()) * geometry.width()};
  const Saved saved = saved_by_forward(weight, dy, kept, index, conv_bias, norm_weight, norm_bias, scale, low,
                                       high, geometry, shape);
  const bool one_tile = tiles == 1 && W <= kInputColumns;
  const bool cut = (tiles - 1) * stride < W && W <= tiles * stride && stride + KERNEL_W - 1 <= kInputColumns;
  const bool in_columns = stride ? cut : one_tile;
  const unsigned blocks = geometry.cover(int(H)) && in_columns ? unsigned(strips * tiles * N) : 0;
  allow(input_gradient_kernel, InputLayout::kBytes);
  input_gradient_kernel<<<blocks, kInputThreads, InputLayout::kBytes, stream>>>(
      dx, x, partial, Merged(const_cast<double*>(merged), N, G), saved, shape, geometry, int(tiles), int(stride));
}
