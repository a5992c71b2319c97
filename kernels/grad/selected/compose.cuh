// The filters that x's gradient is a product with (grad/selected/input.cuh), as operands of tensor cores:
// weight itself; and of each sample the one that two convolutions in a row make, of x by linear·weight and of
// that by weight, transposed.
#pragma once
#include "grad/selected/merge.cuh"

namespace grad::selected {

// A lane's share of an operand B (16×8), as high and low halves, from its four values: those of depths 2t, 2t
// + 1, 2t + 8 and 2t + 9 in the lane's column.
__device__ __forceinline__ uint4 fragment(const float (&values)[4]) {
  const Halves first = split(values[0], values[1]), second = split(values[2], values[3]);
  return make_uint4(first.high, second.high, first.low, second.low);
}

template <class P> struct Composing : Merging<P> {
  using Base = Merging<P>;
  using Base::kPlanes, Base::kTaps, Base::kUnits, Base::kDepth, Base::input_channel, Base::place_in_filter,
      Base::kIn, Base::kOut, Base::kFilterH, Base::kFilterW;
  using typename Base::Merged;

  static constexpr int kInputChannels = kPlanes * 8;
  static constexpr int kFilterSteps = kOut / 16;                      // products of 16 channels
  static constexpr int kHaloH = kFilterH - 1, kHaloW = kFilterW - 1;  // of dx beyond v, and of x beyond dx
  static constexpr int kReachH = 2 * kHaloH + 1, kReachW = 2 * kHaloW + 1;  // of the composed filter

  // What compose_kernel makes, where `backward` had its sums: operands of products, in the order in which
  // lanes have them, and what the border needs.
  struct Composed {
    uint4* filters;    // (kFilterSteps, kUnits, 32): weight, scaled by channel out; see `fragment`
    uint4* composed;   // (N, kPlanes out, kPlanes in, kFilterW, kReachH, 32): the filter, scaled by sample
    float* products;   // (N, kTaps, kDepth, kInputChannels): Σ linear·(a tap's weight)·(a depth's weight)
    float* constants;  // (N, kTaps, kInputChannels): Σ constant·(a tap's weight)
    float* levels;     // (N, kInputChannels): those, of all taps
    float* unscale;    // (kOut): what undoes the scale of `filters`
    int* exponents;    // (N): the scale of `composed`
    static constexpr int kFilters = kFilterSteps * kUnits * 32;
    static constexpr int kOfSample = kPlanes * kPlanes * kFilterW * kReachH * 32;
    Composed(float* partial, int64_t N)
        : filters(reinterpret_cast<uint4*>(partial + (N * kIn + 3) / 4 * 4)),  // behind the shift
          composed(filters + kFilters), products(reinterpret_cast<float*>(composed + N * kOfSample)),
          constants(products + N * kDepth * kDepth), levels(constants + N * kDepth),
          unscale(levels + N * kInputChannels), exponents(reinterpret_cast<int*>(unscale + kOut)) {}
    // Of float32, with the shift that stays in front.
    static int64_t count(int64_t N) {
      const int64_t of_sample = 4 * kOfSample + kDepth * (kDepth + 1) + kInputChannels + 1;
      return (N * kIn + 3) / 4 * 4 + 4 * kFilters + N * of_sample + kOut;
    }
  };

  static constexpr int kComposeThreads = 768;
  // Channels out that are in shared memory at a time.
  static constexpr int kChunk = kOut <= 64 && kDepth <= 72 ? kOut : 16;

  __device__ __forceinline__ static float filter_value(const value_t* weight, int c, int depth) {
    const value_t* filter = weight + c * (kIn * kTaps);
    return input_channel(depth) < kIn ? float(filter[place_in_filter(depth)]) : 0.f;
  }

  // weight as operands. A lane's four channels of a step lie side by side: the depths of a product may come
  // in any order that is the same for both operands.
  __device__ static void pack_filters(Composed to, const value_t* weight, int* exponents) {
    const int lane = threadIdx.x % 32;
    for (int c = threadIdx.x / 32; c < kOut; c += kComposeThreads / 32) {
      float largest = 0;
      for (int i = lane; i < kIn * kTaps; i += 32)
        largest = fmaxf(largest, fabsf(float(weight[c * (kIn * kTaps) + i])));
      const unsigned bits = __reduce_max_sync(~0u, __float_as_uint(largest));
      exponents[c] = fitting_exponent(__uint_as_float(bits));
      if (lane == 0) to.unscale[c] = power_of_two(-exponents[c]);
    }
    __syncthreads();  // all exponents are there
    for (int i = threadIdx.x; i < Composed::kFilters; i += kComposeThreads) {
      const int own = i % 32, depth = i / 32 % kUnits * 8 + own / 4,
                first = i / 32 / kUnits * 16 + own % 4 * 4;
      float values[4];
#pragma unroll
      for (int k = 0; k < 4; k++)
        values[k] = filter_value(weight, first + k, depth) * power_of_two(exponents[first + k]);
      to.filters[i] = fragment(values);
    }
  }

  struct ComposeStorage {
    float chunk[kChunk][kDepth];  // weight, of some channels out, by depth of a patch
    float linear[kChunk];
    int exponents[kOut];
    int largest;  // magnitude in the composed filter, as bits
  };

  // What a block knows of its sample.
  struct Composition {
    const value_t* const weight;
    const Merged& merged;
    const GroupShape& shape;
    ComposeStorage& storage;
    const int n;
    float* const products;  // the sample's, as in Composed; likewise the next
    float* const constants;

    // The products of all taps and depths, an item of a thread each, and constants.
    __device__ __forceinline__ void multiply_taps() const {
      for (int first = 0; first < kTaps * kDepth; first += kComposeThreads) {
        const int item = first + threadIdx.x, depth = item % kDepth;
        double sum[kInputChannels] = {}, constant = 0;
        for (int c = 0; c < kOut; c += kChunk) {
          __syncthreads();  // the last chunk has been read
          load_chunk(c);
          __syncthreads();  // this one is there
          if (item >= kTaps * kDepth) continue;
          add_chunk(sum, item / kDepth, depth);
          if (item < kDepth)
            for (int k = 0; k < kChunk; k++)
              constant += merged.constant[n * kOut + c + k] * storage.chunk[k][depth];
        }
        if (item >= kTaps * kDepth) continue;
#pragma unroll
        for (int i = 0; i < kInputChannels; i++) products[item * kInputChannels + i] = float(sum[i]);
        if (item < kDepth)  // a unit's plane and tap
          constants[depth / 8 % kTaps * kInputChannels + depth / 8 / kTaps * 8 + depth % 8] = float(constant);
      }
    }

    __device__ __forceinline__ void sum_constants(float* levels) const {
      if (threadIdx.x >= kInputChannels) return;
      double level = 0;
      for (int tap = 0; tap < kTaps; tap++) level += constants[tap * kInputChannels + threadIdx.x];
      levels[threadIdx.x] = float(level);
    }

    // The composed filter as operands, and its exponent.
    __device__ __forceinline__ void pack_composed(uint4* composed, int* to_exponent) const {
      for_fragments([&](int, const float (&values)[4]) {
        float magnitude = 0;
        for (float each : values) magnitude = fmaxf(magnitude, fabsf(each));
        atomicMax(&storage.largest, __float_as_int(magnitude));
      });
      __syncthreads();  // complete
      const int exponent = fitting_exponent(__int_as_float(storage.largest));
      if (threadIdx.x == 0) *to_exponent = exponent;
      for_fragments([&](int i, float (&values)[4]) {
        for (float& each : values) each *= power_of_two(exponent);
        composed[i] = fragment(values);
      });
    }

   private:
    __device__ __forceinline__ void load_chunk(int c) const {
      for (int i = threadIdx.x; i < kChunk * kDepth; i += kComposeThreads)
        storage.chunk[i / kDepth][i % kDepth] = filter_value(weight, c + i / kDepth, i % kDepth);
      if (threadIdx.x < kChunk)
        storage.linear[threadIdx.x] =
            float(merged.linear[n * shape.G + (c + threadIdx.x) / shape.channels()]);
    }
    // Four channels are summed in float32, the rest in double.
    __device__ __forceinline__ void add_chunk(double (&sum)[kInputChannels], int tap, int depth) const {
#pragma unroll 4
      for (int begin = 0; begin < kChunk; begin += 4) {
        float part[kInputChannels] = {};
#pragma unroll
        for (int k = begin; k < begin + 4; k++) {
          const float factor = storage.linear[k] * storage.chunk[k][depth];
#pragma unroll
          for (int i = 0; i < kInputChannels; i++)
            part[i] += factor * storage.chunk[k][(i / 8 * kTaps + tap) * 8 + i % 8];
        }
#pragma unroll
        for (int i = 0; i < kInputChannels; i++) sum[i] += part[i];
      }
    }
    // The composed filter at (row, column): the products of all pairs of taps that are so far apart, less the
    // halo.
    __device__ __forceinline__ float value(int channel, int from, int row, int column) const {
      double sum = 0;
      for (int tap = 0; tap < kTaps; tap++) {
        const int h = tap / kFilterW + row - kHaloH, w = tap % kFilterW + column - kHaloW;
        if (unsigned(h) < kFilterH && unsigned(w) < kFilterW)
          sum += products[(tap * kDepth + (from / 8 * kTaps + h * kFilterW + w) * 8 + from % 8) *
                              kInputChannels +
                          channel];
      }
      return float(sum);
    }
    // act(i, values) of all lanes' fragments. Depths of a product: 8 channels at one column, and at the next.
    template <class Act> __device__ __forceinline__ void for_fragments(const Act& act) const {
      for (int i = threadIdx.x; i < Composed::kOfSample; i += kComposeThreads) {
        const int lane = i % 32, row = i / 32 % kReachH, column = i / 32 / kReachH % kFilterW * 2;
        const int planes = i / 32 / kReachH / kFilterW;
        const int channel = planes / kPlanes * 8 + lane / 4, from = planes % kPlanes * 8 + lane % 4 * 2;
        float values[4];
#pragma unroll
        for (int k = 0; k < 4; k++) values[k] = value(channel, from + k % 2, row, column + k / 2);
        act(i, values);
      }
    }
  };
};

// A block per sample, and one for what all of them share.
template <class P>
__global__ void __launch_bounds__(P::kComposeThreads)
    compose_kernel(typename P::Composed to, const value_t* weight, typename P::Merged merged,
                   GroupShape shape) {
  await_previous_kernel();
  __shared__ typename P::ComposeStorage storage;
  const int n = blockIdx.x;
  if (n == shape.N) {
    P::pack_filters(to, weight, storage.exponents);
    return;
  }
  if (threadIdx.x == 0) storage.largest = 0;
  const typename P::Composition composition{weight,
                                            merged,
                                            shape,
                                            storage,
                                            n,
                                            to.products + int64_t(n) * P::kDepth * P::kDepth,
                                            to.constants + int64_t(n) * P::kDepth};
  composition.multiply_taps();
  __syncthreads();  // all products are there, and constants
  composition.sum_constants(to.levels + n * P::kInputChannels);
  composition.pack_composed(to.composed + int64_t(n) * P::Composed::kOfSample, to.exponents + n);
}

}  // namespace grad::selected
