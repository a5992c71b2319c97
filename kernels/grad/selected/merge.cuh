// The gradients of weight and of the parameters, from sums by strip (grad/selected/weight.cuh).
//   sample_kernel   constant and linear; a sample's gradients
//   total_kernel    those added up
#pragma once
#include "grad/selected/weight.cuh"

namespace grad::selected {

template <class P> struct Merging : Strips<P> {
  using Base = Strips<P>;
  using Base::kTaps, Base::kUnits, Base::kDepth, Base::input_channel, Base::place_in_filter,
      Base::kColumnUnits, Base::kGramSize, Base::kFrameRows, Base::unit_of_column, Base::kIn, Base::kOut,
      Base::kFilterH, Base::kFilterW;
  using typename Base::Geometry, typename Base::Saved, typename Base::Channel, typename Base::Partial;

  // What is merged in double, one after the other.
  struct Merged {
    double *constant, *linear, *gradients, *weight;
    Merged(double* from, int64_t N, int64_t G)
        : constant(from),                   // (N, kOut)
          linear(constant + N * kOut),      // (N, G)
          gradients(linear + N * G),        // (4, N, kOut) of conv_bias, norm, scale
          weight(gradients + 4 * N * kOut)  // (N, kOut, kDepth)
    {}
    // To a multiple of 16 bytes.
    static int64_t count(int64_t N, int64_t G) { return (N * (kOut * (kDepth + 5) + G) + 1) / 2 * 2; }
  };

  static constexpr int kSampleThreads = 512;
  // Bytes of shared memory: of a row of ΣXXᵀ with the filters' values that meet it; and of the rest.
  static constexpr int kRowBytes = (kDepth + kOut + 4) * 4, kOtherBytes = kDepth * 8 + kOut * 64;
  static constexpr int kSlab = kDepth * kRowBytes + kOtherBytes <= 48 << 10 ? kDepth : 24;
  static_assert(kOut <= kSampleThreads, "a thread per channel");

  // act(strip, does it count) of all strips, two side by side, so that their loads are under way together.
  template <class Act> __device__ __forceinline__ static void for_strips(int strips, const Act& act) {
    for (int first = 0; first < strips; first += 2)
#pragma unroll
      for (int i = 0; i < 2; i++) act(min(first + i, strips - 1), first + i < strips);
  }

  // act(a, b, value) of all elements (ΣXXᵀ)[a][b] of a sample and, where a is kDepth, of (ΣX)[b], in no
  // order.
  template <class Act>
  __device__ __forceinline__ static void for_gram(Partial partial, int n, Geometry geometry, const Act& act) {
    const int64_t gram = int64_t(n) * geometry.strips, frame = int64_t(n) * kFrameRows;
    const auto four = [](const float* from, int64_t slot, int at) {  // as a lane holds them
      return reinterpret_cast<const float4*>(from + slot * kGramSize)[at];
    };
    for (int at = threadIdx.x; at < kGramSize / 4; at += kSampleThreads) {
      float4 rows[kFrameRows + 1] = {};
#pragma unroll
      for (int i = 0; i < kFrameRows; i++)
        if (i < geometry.H) rows[i] = four(partial.frame, frame + i, at);
      float sums[4] = {};
      for_strips(geometry.strips, [&](int strip, bool real) {
        const float4 more = four(partial.gram, gram + strip, at);
        if (real) sums[0] += more.x, sums[1] += more.y, sums[2] += more.z, sums[3] += more.w;
      });
      const int tile = at / 32, lane = at % 32, column = tile % kColumnUnits;
#pragma unroll
      for (int i = 0; i < 4; i++) {
        const int unit = tile / kColumnUnits * 2 + i / 2, row = unit < kUnits ? unit % kTaps / kFilterW : 0;
        if (unit > kUnits) continue;
        for (int b = 0; b < kFilterH - row; b++) {  // the upper one's kernel row
          float sum = sums[i];
#pragma unroll
          for (int j = 0; j < kFrameRows; j++) {
            const int q = j < kFilterH - 1 ? j : j - (kFilterH - 1) + max(geometry.height(), kFilterH - 1);
            const float of_row[] = {rows[j].x, rows[j].y, rows[j].z, rows[j].w};
            if (q >= b && q < b + geometry.height()) sum += of_row[i];
          }
          const int of_column = (unit_of_column(column) + b * kFilterW) * 8 + lane % 4 * 2 + i % 2;
          const int of_unit = unit < kUnits ? (unit + b * kFilterW) * 8 + lane / 4 : kDepth;
          if (unit < kUnits || lane / 4 == 0) act(of_unit, of_column, sum);
          if (unit < kUnits && row > 0) act(of_column, of_unit, sum);
        }
      }
    }
  }

  struct SampleStorage {
    // A slab: some rows of ΣXXᵀ, and the filters' values that meet them.
    alignas(16) float gram[kSlab][kDepth];
    alignas(16) float filters[kSlab][kOut + 4];  // fewer bank conflicts
    double patches[kDepth];                      // ΣX
    double sums[2][kOut];                        // of dy, where it passes, and of dy·(v - mean)
    double mean[kOut];                           // of weight·X
    double level[kOut];                          // what the shift and the bias add to that
    double slope[kOut];                          // of z·scale, but for rstd
    double constant[kOut];
    double linear[kOut];
    double of_bias[kOut];  // the gradient of conv_bias
  };

  // What a block knows of its sample: dv = slope·dz·[selected] + constant + linear·(weight·X), X of x less
  // its shift.
  struct Sample {
    const Merged& merged;
    const Partial& partial;
    const Saved& saved;
    const GroupShape shape;
    const Geometry geometry;
    SampleStorage& storage;
    const int n = blockIdx.x;
    const float* const shift = partial.shift + n * kIn;

    // Of a thread's channel out, if it has one; fetched before they are needed.
    struct Channel {
      double rstd, slope, scale, norm_bias, mean;
    };
    __device__ __forceinline__ Channel load_channel() const {
      const int own = threadIdx.x;
      if (own >= kOut) return {};
      const int group = n * shape.G + own / shape.channels();
      Channel channel;
      channel.rstd = saved.group_rstd[group], channel.mean = saved.group_mean[group];
      channel.scale = saved.tail.channel(n, own).scale, channel.norm_bias = saved.norm_bias[own];
      storage.slope[own] = channel.slope = saved.norm_weight[own] * channel.scale;
      return channel;
    }

    __device__ __forceinline__ float weight_at(int c, int k) const {
      const bool real = k < kDepth && input_channel(k) < kIn;
      return real ? float(saved.weight[c * (kIn * kTaps) + place_in_filter(k)]) : 0.f;
    }
    // Rows of ΣXXᵀ from `first` on; with the first slab, ΣX.
    __device__ __forceinline__ void load_slab(int first) const {
      for_gram(partial, n, geometry, [&](int a, int b, float value) {
        if (a == kDepth && first == 0) storage.patches[b] = value;
        if (a >= first && a < first + kSlab) storage.gram[a - first][b] = value;
      });
#pragma unroll 10
      for (int i = threadIdx.x; i < kSlab * kOut; i += kSampleThreads)
        storage.filters[i % kSlab][i / kSlab] = weight_at(i / kSlab, first + i % kSlab);
    }
    __device__ __forceinline__ void load_sums() const {
      for (int i = threadIdx.x; i < 2 * kOut; i += kSampleThreads) {
        double sum = 0;
        for_strips(geometry.strips, [&](int strip, bool real) {
          const float more = partial.sums[(int64_t(n) * geometry.strips + strip) * kOut * 2 + i];
          if (real) sum += more;
        });
        storage.sums[i % 2][i / 2] = sum;
      }
    }

    // mean and level, from the first slab: eight lanes per channel.
    __device__ __forceinline__ void find_means() const {
      for (int i = threadIdx.x; i < kOut * 8; i += kSampleThreads) {
        const int c = i / 8;
        double of_patches = 0, of_shift = 0;
#pragma unroll
        for (int k = i % 8; k < kDepth; k += 8) {
          const double w = kSlab == kDepth ? storage.filters[k % kSlab][c] : weight_at(c, k);
          of_patches += w * storage.patches[k];
          if (input_channel(k) < kIn) of_shift += w * shift[input_channel(k)];
        }
        of_patches = lanes_sum<8>(of_patches), of_shift = lanes_sum<8>(of_shift);
        if (i % 8) continue;
        storage.mean[c] = of_patches / shape.S, storage.level[c] = of_shift + saved.conv_bias[c];
      }
    }

    // constant and linear, and the parameters' gradients: a thread per channel. The group's mean is computed
    // anew, because float32 holds little of it that is not shift, where that is large.
    __device__ __forceinline__ void find_coefficients(const Channel& channel) const {
      const int own = threadIdx.x, NC = shape.N * kOut;
      if (own >= kOut) return;
      const int first = own / shape.channels() * shape.channels(),
                end = first + shape.channels();  // its group
      double group_mean = 0, gradient = 0, product = 0;
      for (int c = first; c < end; c++) group_mean += storage.mean[c] + storage.level[c];
      group_mean /= shape.channels();
      const double moved = group_mean - channel.mean, count = double(shape.channels()) * shape.S;
      for (int c = first; c < end; c++) {
        gradient += storage.slope[c] * storage.sums[0][c];
        product += storage.slope[c] * (storage.sums[1][c] - moved * storage.sums[0][c]);
      }
      const double rstd = channel.rstd, passed = storage.sums[0][own];
      const double of_v = storage.sums[1][own] - moved * passed;
      const double linear = -(rstd * product) / count * rstd * rstd;
      const double constant = -rstd * gradient / count + linear * (storage.level[own] - group_mean);
      const double of_bias =
          rstd * channel.slope * passed + double(shape.S) * (constant + linear * storage.mean[own]);
      const int at = n * kOut + own;
      merged.linear[n * shape.G + own / shape.channels()] = storage.linear[own] = linear;
      merged.constant[at] = storage.constant[own] = constant;
      merged.gradients[at] = storage.of_bias[own] = of_bias;
      merged.gradients[NC + at] = rstd * channel.scale * of_v;
      merged.gradients[2 * NC + at] = channel.scale * passed;
      merged.gradients[3 * NC + at] = rstd * saved.norm_weight[own] * of_v + channel.norm_bias * passed;
    }

    // A thread's outputs of weight·(ΣXXᵀ): four channels out × four places in a patch each.
    static constexpr int kOutputs = (kOut / 4 * (kDepth / 4) + kSampleThreads - 1) / kSampleThreads;
    using Products = float[kOutputs][4][4];
    // act(products, first channel, first place) of each.
    template <class Act>
    __device__ __forceinline__ static void for_outputs(Products& products, const Act& act) {
#pragma unroll
      for (int i = 0; i < kOutputs; i++) {
        const int output = i * kSampleThreads + threadIdx.x;
        const int c = output / (kDepth / 4) * 4, k = output % (kDepth / 4) * 4;
        if (c < kOut) act(products[i], c, k);
      }
    }
    // Adds those of a slab.
    __device__ __forceinline__ void multiply_slab(Products& products) const {
      for_outputs(products, [&](float (&product)[4][4], int c, int k) {
#pragma unroll 8
        for (int i = 0; i < kSlab; i++) {
          const float4 w = *reinterpret_cast<const float4*>(&storage.filters[i][c]);
          const float4 with = *reinterpret_cast<const float4*>(&storage.gram[i][k]);
          const float of_channel[] = {w.x, w.y, w.z, w.w}, of_place[] = {with.x, with.y, with.z, with.w};
#pragma unroll
          for (int j = 0; j < 4; j++)
#pragma unroll
            for (int l = 0; l < 4; l++) product[j][l] = fmaf(of_channel[j], of_place[l], product[j][l]);
        }
      });
    }
    // The sample's gradient of weight.
    __device__ __forceinline__ void write_weight(Products& products) const {
      for_outputs(products, [&](float (&product)[4][4], int first, int k) {
        double sparse[4][4] = {};
        for_strips(geometry.strips, [&](int strip, bool real) {
          const float* from = partial.sparse + (int64_t(n) * geometry.strips + strip) * (kOut * kDepth);
#pragma unroll
          for (int j = 0; j < 4; j++) {
            const float4 four = *reinterpret_cast<const float4*>(from + (first + j) * kDepth + k);
            if (!real) continue;
            sparse[j][0] += four.x, sparse[j][1] += four.y, sparse[j][2] += four.z, sparse[j][3] += four.w;
          }
        });
#pragma unroll
        for (int j = 0; j < 4; j++)
#pragma unroll
          for (int l = 0; l < 4; l++) {
            const int c = first + j;
            const double linear = storage.linear[c];
            double value = sparse[j][l] + storage.constant[c] * storage.patches[k + l];
            if (linear != 0) value += linear * product[j][l];  // of zero, also where the squares overflow
            if (input_channel(k + l) < kIn) value += storage.of_bias[c] * shift[input_channel(k + l)];
            merged.weight[(int64_t(n) * kOut + c) * kDepth + k + l] = value;
          }
      });
    }
  };

  // A sample's coefficients, and all gradients by sample. A block per sample.
  __device__ __forceinline__ static void merge_sample(Merged merged, Partial partial, Saved saved,
                                                      GroupShape shape, Geometry geometry) {
    __shared__ SampleStorage storage;
    const Sample sample{merged, partial, saved, shape, geometry, storage};
    sample.load_slab(0);
    sample.load_sums();
    const auto channel = sample.load_channel();
    __syncthreads();  // patches and sums are there
    sample.find_means();
    __syncthreads();  // mean and level are there
    sample.find_coefficients(channel);
    typename Sample::Products products = {};
    for (int slab = 0; slab < kDepth; slab += kSlab) {
      if (slab) {
        __syncthreads();  // the slab before has been read
        sample.load_slab(slab);
      }
      __syncthreads();  // it is there; first, the coefficients are, too
      sample.multiply_slab(products);
    }
    sample.write_weight(products);
  }
};

template <class P>
__global__ void __launch_bounds__(P::kSampleThreads, 1)
    sample_kernel(typename P::Merged merged, typename P::Partial partial, typename P::Saved saved,
                  GroupShape shape, typename P::Geometry geometry) {
  await_previous_kernel();
  P::merge_sample(merged, partial, saved, shape, geometry);
}
// d_weight like weight; the parameters' gradients (kOut), the last of them only if `scales`. A block
// has 32 of all these numbers.
template <class P>
__global__ void __launch_bounds__(kThreads)
    total_kernel(value_t* d_weight, float* d_conv_bias, float* d_norm_weight, float* d_norm_bias,
                 float* d_scale, typename P::Merged merged, bool scales, int N) {
  await_previous_kernel();
  __shared__ double parts[kWarps][32];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, own = blockIdx.x * 32 + lane;
  constexpr int kWeights = P::kOut * P::kDepth;
  const int parameter = (own - kWeights) / P::kOut, c = (own - kWeights) % P::kOut;
  const bool of_weight = own < kWeights;
  const double* from =
      of_weight ? merged.weight + own : merged.gradients + int64_t(parameter) * N * P::kOut + c;
  const int step = of_weight ? kWeights : P::kOut;
  double sum = 0;
  if (own < kWeights + 4 * P::kOut)
#pragma unroll 8
    for (int n = warp; n < N; n += kWarps) sum += from[int64_t(n) * step];
  parts[warp][lane] = sum;
  __syncthreads();  // every warp's sums are there
  if (warp || own >= kWeights + (scales ? 4 : 3) * P::kOut) return;
  for (int i = 1; i < kWarps; i++) sum += parts[i][lane];
  float* const totals[] = {d_conv_bias, d_norm_weight, d_norm_bias, d_scale};
  const int k = own % P::kDepth;
  if (!of_weight) totals[parameter][c] = float(sum);
  else if (d_weight && P::input_channel(k) < P::kIn)
    d_weight[own / P::kDepth * (P::kIn * P::kTaps) + P::place_in_filter(k)] = value_t(float(sum));
}

}  // namespace grad::selected
