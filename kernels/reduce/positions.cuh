// Sums over the positions of each channel of a sample: what mainloops' sinks (reduce/narrow2d.cuh,
// narrow3d.cuh, wide.cuh) make of a pointwise tail of v, as moments or as plain sums. In a row in float, over
// rows in double; parts are merged later, in their order.
#pragma once
#include "conv/exact.cuh"
#include "conv/tail.cuh"
#include "core/reduce.cuh"

namespace reduce {

// What is written of a part, from sums of (value - shift) and of its squares.
struct OfMoments {
  using Part = Moments<double>;
  static constexpr bool kShifts = true;
  static __device__ __forceinline__ Part of(double count, double shift, double sum, double square) {
    return Part::from_shifted(count, shift, sum, square);
  }
  // Of offset + slope·value, of so many values.
  static __device__ __forceinline__ Part affine(const Part& p, double, double slope, double offset) {
    return {p.count, p.mean * slope + offset, p.m2 * slope * slope};
  }
  static __device__ __forceinline__ Part merged(const Part& a, const Part& b) { return a.merge(b); }
};
struct OfSums {
  using Part = double;
  static constexpr bool kShifts = false;  // so that infinities stay what they are
  static __device__ __forceinline__ Part of(double, double, double sum, double) { return sum; }
  static __device__ __forceinline__ Part affine(Part p, double count, double slope, double offset) {
    return p * slope + count * offset;
  }
  static __device__ __forceinline__ Part merged(Part a, Part b) { return a + b; }
};

// `count` parts, `step` apart, in their order.
template <class What>
__device__ typename What::Part together(const typename What::Part* parts, int count, int step) {
  typename What::Part all = parts[0];
#pragma unroll 1
  for (int i = 1; i < count; i++) all = What::merged(all, parts[i * step]);
  return all;
}

// The sum of four neighbouring lanes.
template <class T> __device__ __forceinline__ T of_four(T value) {
  value += __shfl_xor_sync(~0u, value, 1);
  return value + __shfl_xor_sync(~0u, value, 2);
}

// A thread's sums of two channels' values. Where there are few, their only row need not end.
template <class What> struct Running {
  float shift[2], of_row[2], square_of_row[2];
  double sum[2], square[2];
  bool started;

  __device__ __forceinline__ void begin() {
    started = !What::kShifts;
#pragma unroll
    for (int half = 0; half < 2; half++)
      shift[half] = of_row[half] = square_of_row[half] = 0, sum[half] = square[half] = 0;
  }
  // The first value of four lanes' is the shift.
  __device__ __forceinline__ void start(float low, float high) {
    started = true;
    shift[0] = __shfl_sync(~0u, low, threadIdx.x % 32 & ~3),
    shift[1] = __shfl_sync(~0u, high, threadIdx.x % 32 & ~3);
  }
  __device__ __forceinline__ void add(int half, float value, bool real) {
    const float moved = real ? (What::kShifts ? value - shift[half] : value) : 0.f;
    of_row[half] += moved;
    if (What::kShifts) square_of_row[half] = fmaf(moved, moved, square_of_row[half]);
  }
  __device__ __forceinline__ void end_row() {
#pragma unroll
    for (int half = 0; half < 2; half++) {
      sum[half] += of_row[half], square[half] += square_of_row[half];
      of_row[half] = square_of_row[half] = 0;
    }
  }
  // Of the four lanes that share a channel, and its shift; count: of all their values.
  __device__ __forceinline__ typename What::Part part(int half, double count) const {
    const double all = of_four(sum[half] + of_row[half]);
    return What::of(count, shift[half], all, What::kShifts ? of_four(square[half] + square_of_row[half]) : 0);
  }
};

// partial (N, C, parts) one by one (conv/exact.cuh): a part has as many positions as another, whichever they
// are.
template <class Values, class What, class Tail> struct ExactPositions {
  Values v;
  typename What::Part* partial;
  Tail tail;
  int64_t parts;
  HOST_DEVICE int64_t results() const { return Values::kOut * parts; }  // of a sample
  __device__ void operator()(int64_t n, int64_t i) const {
    const int c = int(i / parts);
    const int64_t part = i % parts, size = v.positions(), first = part * size / parts,
                  last = (part + 1) * size / parts;
    const typename Tail::Channel channel = tail.channel(n, c);
    float shift = 0;
    double sum = 0, square = 0;
#pragma unroll 1
    for (int64_t position = first; position < last; position++) {
      const float value =
          conv::tail_of(tail, v(n, c, position), channel, (n * Values::kOut + c) * size + position);
      if (What::kShifts && position == first) shift = value;
      const float moved = What::kShifts ? value - shift : value;
      sum += moved, square += moved * moved;
    }
    partial[n * results() + i] = What::of(double(last - first), shift, sum, square);
  }
};
template <class What, class Values, class Tail>
ExactPositions<Values, What, Tail> each_part(const Values& v, typename What::Part* partial, const Tail& tail,
                                             int64_t parts) {
  return {v, partial, tail, parts};
}

}  // namespace reduce
