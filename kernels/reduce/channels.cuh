// Reductions over channels, in a fixed order: what mainloops' sinks (reduce/narrow2d.cuh, narrow3d.cuh,
// wide.cuh) make of a pointwise tail of v, and what merges results of blocks of channels.
#pragma once
#include "conv/exact.cuh"
#include "core/math.h"
#include "core/tensor_core.cuh"

namespace reduce {

// Reductions: what is made of one value, a channel's; what two such make; the result. NaN, infinities as
// PyTorch's.
struct Sum {
  using Partial = float;
  static constexpr bool kHasWinner = false;
  static __device__ __forceinline__ Partial nothing() { return 0.f; }
  static __device__ __forceinline__ Partial of(float value, int) { return value; }
  static __device__ __forceinline__ Partial merge(Partial a, Partial b) { return a + b; }
  static __device__ __forceinline__ float result(Partial p) { return p; }
};
struct Max : Sum {
  static __device__ __forceinline__ bool holds(float a, float b) { return a >= b; }
  static __device__ __forceinline__ Partial nothing() { return -INFINITY; }
  static __device__ __forceinline__ Partial merge(Partial a, Partial b) { return tensor_core::max_nan(a, b); }
};
struct Min : Sum {
  static __device__ __forceinline__ bool holds(float a, float b) { return a <= b; }
  static __device__ __forceinline__ Partial nothing() { return INFINITY; }
  static __device__ __forceinline__ Partial merge(Partial a, Partial b) { return tensor_core::min_nan(a, b); }
};
// Of Max or Min: the result, and the first channel that has it.
template <class Extreme> struct Winner {
  struct Partial {
    float value;
    int channel;
  };
  static constexpr bool kHasWinner = true;
  static __device__ __forceinline__ Partial nothing() { return {Extreme::nothing(), 1 << 30}; }
  static __device__ __forceinline__ Partial of(float value, int channel) { return {value, channel}; }
  // Without branches: a compiler makes of && and || some, which warps then take apart.
  static __device__ __forceinline__ bool beats(float a, float b) {  // or a alone is NaN
    return !Extreme::holds(b, a) & (b == b);
  }
  static __device__ __forceinline__ Partial merge(const Partial& a, const Partial& b) {
    const bool second = beats(b.value, a.value) | (!beats(a.value, b.value) & (b.channel < a.channel));
    return {second ? b.value : a.value, second ? b.channel : a.channel};
  }
  static __device__ __forceinline__ float result(const Partial& p) { return p.value; }
};
struct LogSumExp {
  static constexpr bool kHasWinner = false;
  struct Partial {  // Σ exp(value - most); most is never NaN
    float most, sum;
  };
  static __device__ __forceinline__ Partial nothing() { return {-INFINITY, 0.f}; }
  static __device__ __forceinline__ Partial of(float value, int) {
    return value == value ? Partial{value, 1.f} : Partial{-INFINITY, value};
  }
  // exp(value - most) of a value that is no larger; also of two infinities.
  static __device__ __forceinline__ float share(float value, float most) {
    return value == most ? 1.f : math::fast_exp2((value - most) * 1.44269504f);
  }
  static __device__ __forceinline__ Partial merge(const Partial& a, const Partial& b) {
    const float most = fmaxf(a.most, b.most);
    return {most, a.sum * share(a.most, most) + b.sum * share(b.most, most)};
  }
  static __device__ __forceinline__ float result(const Partial& p) { return p.most + math::log(p.sum); }
};

// Of several at once.
template <class Reduction> struct Merging {
  using Partial = typename Reduction::Partial;
  static __device__ __forceinline__ Partial two(float a, float b, int of_a, int of_b) {
    return Reduction::merge(Reduction::of(a, of_a), Reduction::of(b, of_b));
  }
  template <int kCount> static __device__ __forceinline__ Partial all(const Partial (&p)[kCount]) {
    Partial found = p[0];
#pragma unroll
    for (int i = 1; i < kCount; i++) found = Reduction::merge(found, p[i]);
    return found;
  }
};
template <class Extreme> struct Merging<Winner<Extreme>> {
  using Partial = typename Winner<Extreme>::Partial;
  static __device__ __forceinline__ Partial two(float a, float b, int of_a, int of_b) {  // of_a < of_b
    const bool second = Winner<Extreme>::beats(b, a);
    return {second ? b : a, second ? of_b : of_a};
  }
  // The extreme first, then who has it.
  template <int kCount> static __device__ __forceinline__ Partial all(const Partial (&p)[kCount]) {
    Partial found = {p[0].value, 1 << 30};
#pragma unroll
    for (int i = 1; i < kCount; i++) found.value = Extreme::merge(found.value, p[i].value);
#pragma unroll
    for (int i = 0; i < kCount; i++)
      found.channel = min(found.channel,
                          (p[i].value == found.value) | (p[i].value != p[i].value) ? p[i].channel : 1 << 30);
    return found;
  }
};
template <> struct Merging<LogSumExp> {
  using Partial = LogSumExp::Partial;
  // One exponential: of NaN it is NaN.
  static __device__ __forceinline__ Partial two(float a, float b, int, int) {
    const float apart = a == b ? 0.f : -fabsf(a - b), most = fmaxf(a, b);
    return {most == most ? most : -INFINITY, 1.f + math::fast_exp2(apart * 1.44269504f)};
  }
  template <int kCount> static __device__ __forceinline__ Partial all(const Partial (&p)[kCount]) {
    float most = p[0].most, sum = 0;
#pragma unroll
    for (int i = 1; i < kCount; i++) most = fmaxf(most, p[i].most);
#pragma unroll
    for (int i = 0; i < kCount; i++) sum += p[i].sum * LogSumExp::share(p[i].most, most);
    return {most, sum};
  }
};

// [words of a Partial][rows of values that meet][positions]: a warp's eight of each position lie 8 banks
// apart.
template <class Partial, int kRows, int kPositions> struct Meeting {
  static constexpr int kWords = sizeof(Partial) / 4, kPitch = kPositions + 8;
  float words[kWords][kRows][kPitch];
  // Of two neighbours.
  __device__ __forceinline__ void put(int row, int position, const Partial& a, const Partial& b) {
#pragma unroll
    for (int i = 0; i < kWords; i++)
      *reinterpret_cast<float2*>(&words[i][row][position]) =
          make_float2(reinterpret_cast<const float*>(&a)[i], reinterpret_cast<const float*>(&b)[i]);
  }
  template <class Reduction> __device__ __forceinline__ Partial all(int position) const {
    Partial found[kRows];
#pragma unroll
    for (int row = 0; row < kRows; row++)
#pragma unroll
      for (int i = 0; i < kWords; i++) reinterpret_cast<float*>(&found[row])[i] = words[i][row][position];
    return Merging<Reduction>::all(found);
  }
};

// A warp's values of 16 channels from `first` on, of which so many exist, at 8·kTiles positions
// (core/sinks.cuh) meet in a room: two channels each, behind one another.
template <class Reduction, int kTiles, class Room>
__device__ __forceinline__ void meet(Room& room, const float (&values)[kTiles][4], int first, int channels) {
  const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  __syncwarp();  // what was there has been read
#pragma unroll
  for (int j = 0; j < kTiles; j++) {
    typename Reduction::Partial both[2];
#pragma unroll
    for (int i = 0; i < 2; i++) {
      both[i] = Merging<Reduction>::two(values[j][i], values[j][2 + i], first + g, first + g + 8);
      if (g + 8 >= channels)
        both[i] = g < channels ? Reduction::of(values[j][i], first + g) : Reduction::nothing();
    }
    room.put(g, j * 8 + 2 * t, both[0], both[1]);
  }
  __syncwarp();  // all lanes' are there
}

struct AsItIs {
  __device__ __forceinline__ float operator()(float value, int64_t) const { return value; }
};

// Writes what becomes of a reduction at an element of y; of a winner all that is wanted: after.keep(value,
// channel, at).
template <class Reduction, class T, class After>
__device__ __forceinline__ void write(T* y, const After& after, const typename Reduction::Partial& all,
                                      int64_t at) {
  y[at] = T(after(Reduction::result(all), at));
  if constexpr (Reduction::kHasWinner) after.keep(all.value, all.channel, at);
}

// y (N, positions) = after(reduction over the channels of tail(v, channel, at), at of y) one by one
// (conv/exact.cuh). Where there are `partial` values of several blocks, the first has all.
template <class Values, class T, class Reduction, class Tail, class After> struct ExactChannels {
  Values v;
  T* y;
  Tail tail;
  After after;
  typename Reduction::Partial* partial;
  int blocks;
  HOST_DEVICE int64_t results() const { return v.positions(); }  // of a sample
  __device__ void operator()(int64_t n, int64_t i) const {
    auto all = Reduction::nothing();
#pragma unroll 1
    for (int c = 0; c < Values::kOut; c++) {
      const int64_t at = (n * Values::kOut + c) * v.positions() + i;
      all = Reduction::merge(all, Reduction::of(conv::tail_of(tail, v(n, c, i), tail.channel(n, c), at), c));
    }
    if (!partial) write<Reduction>(y, after, all, n * v.positions() + i);
    for (int block = 0; partial && block < blocks; block++)
      partial[(n * blocks + block) * v.positions() + i] = block ? Reduction::nothing() : all;
  }
};
template <class Reduction, class T, class Values, class Tail, class After>
ExactChannels<Values, T, Reduction, Tail, After> each_position(const Values& v, T* y, const Tail& tail,
                                                               const After& after,
                                                               typename Reduction::Partial* partial,
                                                               int blocks) {
  return {v, y, tail, after, partial, blocks};
}

// y (N, positions) = after(what partial (N, blocks, positions) make together).
template <class T, class Reduction, class After>
__global__ void __launch_bounds__(256)
    merge_channels_kernel(T* y, const typename Reduction::Partial* partial, After after, int blocks,
                          int64_t positions, int64_t count) {
  await_previous_kernel();
  const int64_t i = int64_t(blockIdx.x) * 256 + threadIdx.x;
  if (i >= count) return;
  partial += i / positions * blocks * positions + i % positions;
  auto all = partial[0];
#pragma unroll 4
  for (int block = 1; block < blocks; block++) all = Reduction::merge(all, partial[block * positions]);
  write<Reduction>(y, after, all, i);
}

template <class Reduction, class T, class After>
void merge_channels(T* y, const typename Reduction::Partial* partial, const After& after, int64_t N,
                    int blocks, int64_t positions, cudaStream_t stream) {
  const int64_t count = N * positions;
  launch_early(merge_channels_kernel<T, Reduction, After>, blocks_for(count, 256), 256, stream, y, partial,
               after, blocks, positions, count);
}

}  // namespace reduce
