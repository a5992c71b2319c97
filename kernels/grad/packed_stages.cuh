// What the mainloops of grad/packed_weight.cuh share: samples' scales, a block's part of the filters, and how
// strips of rows of packed operands come to shared memory.
#pragma once
#include "conv/stream_operands.cuh"
#include "core/wgmma.cuh"
#include "grad/packed.cuh"
#include "grad/wide_weight.cuh"

namespace grad {

// So many powers of two are left for the sums of samples with larger products. A sample whose products are
// smaller yet counts as if its largest were 2^-60 of the largest of all.
constexpr int kMostSlack = 60;

// The scale of sums: that of the sample at hand, 2^slack of what is common to all.
template <int kTiles> struct OwnScale {
  int slack = 0;
  // What a step says: its pixels, and above them the slack.
  static __device__ __forceinline__ int word(int pixels, int slack) { return pixels | slack << 8; }
  __device__ __forceinline__ int pixels(int said, float (*sums)[4]) {
    if (said >> 8 != slack) to(said >> 8, sums);
    return said & 0xff;
  }
  __device__ __forceinline__ void undo(float (*sums)[4]) {
    if (slack) to(0, sums);
  }

 private:
  __device__ __forceinline__ void to(int next, float (*sums)[4]) {
    const float factor = power_of_two(next - slack);
    slack = next;
#if TENSOR_CORE_WGMMA
    hold(*reinterpret_cast<float (*)[kTiles][4]>(sums));
#endif
#pragma unroll
    for (int i = 0; i < kTiles * 4; i++) sums[i / 4][i % 4] *= factor;
  }
};

// A source: g (N, parts, kOut, planes, H', W') and x (N, parts, kIn, input_planes, H, W) in units, and their
// scales.
template <class Operands, int kOut_, class Scales> struct Packed {
  struct Strip {};
  struct Tail {};
  static constexpr int kStages = 6, kOut = kOut_;
  template <int kTiles> using SumScale = OwnScale<kTiles>;
  const uint4 *g, *x;
  Scales scales;
  conv::Scales<Finite<Operands>> input_scales;
  int planes, input_planes;
  static constexpr int kAhead = kStages - 2;  // steps: one is in use, and one is ready

  // What samples' products are scaled by.
  __device__ __forceinline__ int exponent(int64_t n) const { return input_scales.last(n) + scales.last(n); }
};

// What mainloops share: blocks, and of those that walk down strips of rows the walk and the copies.
template <class Filter, class Base> struct PackedStages : Base {
  using Source = typename Base::Source;
  using Base::kBlock, Base::kChannelsIn, Base::kChannelsOut, Base::kInputPitch, Base::kKernelW, Base::kParts,
      Base::kScaled, Base::kTapColumns;
  using typename Base::value_t;
  static constexpr int kGroupsOut = ceil_div(kChannelsOut, 8), kGroupsIn = ceil_div(kChannelsIn, 8);

  // Of a volume's few channels in a block has those that kBeside planes of the filter meet, side by side,
  // kOfPlane of each: 2 of 24 for 20 channels.
  static constexpr int kKernelD = Filter::kDepth, kFitting = std::max(1, kBlock / (kGroupsIn * 8));
  static constexpr int kBeside = std::min(kFitting, kKernelD),
                       kOfPlane = kBeside > 1 ? kGroupsIn * 8 : kBlock;
  static constexpr int kPlaneGroups = ceil_div(kKernelD, kBeside), kBlocks = Base::kBlocks * kPlaneGroups;

  struct BlockPlace : Base::BlockPlace {
    int kernel_plane;  // the first
    __device__ __forceinline__ explicit BlockPlace(int block)
        : Base::BlockPlace(block / kPlaneGroups), kernel_plane(block % kPlaneGroups * kBeside) {}
    // Does the block's channel `in` exist?
    __device__ __forceinline__ bool has(int in) const {
      return this->channel_in + in % kOfPlane < kChannelsIn && in < kBeside * kOfPlane &&
             kernel_plane + in / kOfPlane < kKernelD;
    }
  };
  static __device__ __forceinline__ int64_t plane_of(const BlockPlace& place, const SumPlace& sum) {
    const int out = place.channel_out + sum.out, in = place.channel_in + sum.in % kOfPlane;
    if (out >= kChannelsOut || !place.has(sum.in)) return -1;
    return (int64_t(out) * kChannelsIn + in) * kKernelD + place.kernel_plane + sum.in / kOfPlane;
  }

  // Steps of so many planes of g.
  static int64_t count(int64_t planes, int64_t height, int64_t width) {
    return Strips(height, width).count(planes);
  }

#if __CUDA_ARCH__ >= 800

  // The least of all samples' exponents, to all threads of the block; samples of zeros don't count, and where
  // there are no others it is 0.
  static __device__ __forceinline__ int common_exponent(const Source& source, int64_t N) {
    if constexpr (!kScaled) return 0;
    __shared__ int negative;
    if (threadIdx.x == 0) negative = -255;  // less than any
    __syncthreads();                        // set before anyone raises it
    for (int64_t n = threadIdx.x; n < N; n += blockDim.x)
      if (source.input_scales.largest[n] && source.scales.largest[n])
        atomicMax(&negative, -source.exponent(n));
    __syncthreads();  // complete before anyone reads it
    return negative == -255 ? 0 : -negative;
  }

  // As WideWeight's Walk.
  struct Walk {
    const Source& source;
    const Strips& strips;  // of g's planes
    const BlockPlace& place;
    const int common;
    const int64_t H, W, end;  // of x's planes
    int64_t tile;
    int slack = 0;
    int pixels, row, first, stop;
    const uint4 *g, *x;  // where the step's rows begin, of the block's first channel group

    __device__ __forceinline__ bool goes_on() const { return tile < end; }
    __device__ __forceinline__ bool ahead() const { return row < first; }
    __device__ __forceinline__ int across() const { return min(pixels, kStrip); }
    // What consumers are told of the step.
    __device__ __forceinline__ int word() const {
      return !goes_on() ? -1 : OwnScale<1>::word(ahead() ? 0 : across(), slack);
    }
    __device__ __forceinline__ void start() {
      const StripPlace at = Base::start_column(*this);  // n: the plane, of all
      const int64_t n = at.n / source.planes, plane = at.n - n * source.planes;
      if constexpr (kScaled) {
        const bool counts = source.input_scales.largest[n] && source.scales.largest[n];
        slack = counts ? max(0, min(source.exponent(n) - common, kMostSlack)) : slack;
      }
      const int64_t of_g = (n * kParts * kGroupsOut + place.channel_out / 8) * source.planes + plane;
      const int64_t of_x =
          (n * kParts * kGroupsIn + place.channel_in / 8) * source.input_planes + plane + place.kernel_plane;
      g = source.g + (of_g * strips.height + at.row) * strips.width + at.column;
      x = source.x + (of_x * H + first + place.kernel_row) * W + at.column + place.kernel_column;
    }
    __device__ __forceinline__ void next_row() { g += strips.width; }
  };

  // A channel group of the step's g, on its way to a stage: zeros past the end of the row.
  static __device__ __forceinline__ void copy_gradient(uint4* stage, const Walk& walk, int group) {
    if (walk.ahead() || walk.place.channel_out + group * 8 >= kChannelsOut) return;
    const int lane = threadIdx.x % 32;
    const int64_t pitch = int64_t(walk.source.planes) * walk.strips.height * walk.strips.width;
#pragma unroll
    for (int part = 0; part < kParts; part++) {
      const uint4* const from = walk.g + (part * kGroupsOut + group) * pitch;
      uint4* const to = stage + (part * kWarps + group) * kStrip;
#pragma unroll
      for (int i = lane; i < kStrip; i += 32)
        copy_async_or_zero(to + i, i < walk.pixels ? from + i : walk.source.g, i < walk.pixels);
    }
  }
  // Likewise of x, to a slot. Past the end of the row its values may be anything.
  static __device__ __forceinline__ void copy_input(uint4* slot, const Walk& walk, int group) {
    if (!walk.place.has(group * 8)) return;
    const int real = min(walk.pixels + kKernelW - 1 - walk.place.kernel_column, kStrip + kTapColumns - 1);
    const int of_plane = group * 8 % kOfPlane / 8, plane = group * 8 / kOfPlane;  // behind the block's first
#pragma unroll
    for (int part = 0; part < kParts; part++) {
      const int64_t before = int64_t(part * kGroupsIn + of_plane) * walk.source.input_planes + plane;
      const uint4* const from = walk.x + before * walk.H * walk.W;
      uint4* const to = slot + (part * kWarps + group) * kInputPitch;
#pragma unroll
      for (int i = threadIdx.x % 32; i < kInputPitch; i += 32)
        if (i < real) copy_async<16>(to + i, from + i);
    }
  }

#endif
};

}  // namespace grad
