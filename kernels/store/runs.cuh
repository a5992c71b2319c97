// A sink that stores a tail's results of a 3-D convolution (conv/narrow3d.cuh): y (N, kOut, D', H', W').
//
// A tail is a pointwise function of the convolution's values v, without its bias:
//   struct Channel                                   what it knows of a channel of a sample
//   Channel channel(int64_t n, int c) const          reads that
//   float operator()(float v, const Channel&, int64_t at) const   at: which element of y it is
#pragma once
#include "conv/narrow3d_exact.cuh"

namespace store {

using namespace conv::narrow3d;

// v itself.
struct Identity {
  struct Channel {};
  __device__ __forceinline__ Channel channel(int64_t, int) const { return {}; }
  __device__ __forceinline__ float operator()(float v, const Channel&, int64_t) const { return v; }
};

// Four results of a channel at a time, or one by one (kVectors false) where y or a tile's rows don't start at
// a multiple of four. A turn's results wait in shared memory until the next turn's products give time to
// store them. kWhole: v is the whole convolution; else that of x - shift, to which somebody adds what is
// missing. kScaled: v comes as products leave it; else a sink in front has left its tail's values in v's
// place.
template <class Tail, class T, bool kVectors, bool kWhole = true, bool kScaled = true> struct Runs {
  static constexpr int kPitch = kTurn + 8;       // of a channel: stores of 8 channels meet no bank conflict
  static constexpr int kLanes = kTurn / 4;       // that store a channel's results of a turn
  static constexpr int kChannels = 32 / kLanes;  // that a warp stores at a time
  static constexpr int kStores = 16 / kChannels;
  T* y;
  Tail tail;

  struct Staging {
    float staging[kBlockWarps][16 * kPitch];
  };
  struct WithLevels : Staging {
    float level[16];
  };
  template <class S> using Shared = std::conditional_t<kWhole && S::kSplit, WithLevels, Staging>;

  template <class S> struct Warp : IdleWarp {
    using Room = Shared<S>;
    static constexpr bool kAddsLevel = kWhole && S::kSplit;
    const Runs& sink;
    const Place<S>& place;
    const Room& room;
    const int64_t channel;  // elements
    const int plane;        // elements
    const int channels;     // of this block's that exist
    T* const from;          // y, of the tile's first element
    T* const lane_at;       // y, of this lane's first element
    T* waiting;             // where the waiting results go, or null
    float* const staging;   // of this warp
    float unit[2], level[2];
    typename Tail::Channel own[2];

    __device__ __forceinline__ Warp(const Runs& sink, Room& room, const Place<S>& place)
        : sink(sink), place(place), room(room), channel(place.channel_size()), plane(place.c.OH * place.c.OW),
          channels(S::kOut % 16 ? min(S::kOut - place.first_channel, 16) : 16), from(sink.y + place.before()),
          lane_at(from + int(threadIdx.x % 32) / kLanes * channel + int(threadIdx.x % 32) % kLanes * 4),
          staging(room.staging[threadIdx.x / 32]) {
      if constexpr (kAddsLevel) {
        if (threadIdx.x < 16 * 8) {
          const int c = threadIdx.x / 8;
          const int there = place.first_channel + min(c, channels - 1);
          const double own = level_of(place.c, place.tile.n, there);  // by whole warps
          if (threadIdx.x % 8 == 0) room.level[c] = float(own);
        }
      }
    }
    __device__ __forceinline__ void begin(float scale) {
      waiting = nullptr;
#pragma unroll
      for (int r = 0; r < 2; r++) {
        const int c = threadIdx.x % 32 / 4 + 8 * r;
        unit[r] = kScaled ? place.unit(scale, r) : 1.f;
        if constexpr (kAddsLevel) level[r] = room.level[c];
        own[r] = sink.tail.channel(place.tile.n, place.first_channel + min(c, channels - 1));
      }
    }
    // Four elements of channel lane / kLanes + i·kChannels.
    __device__ __forceinline__ void store(int i) {
      const int lane = threadIdx.x % 32, c = lane / kLanes + i * kChannels;
      const float4 four = *reinterpret_cast<const float4*>(staging + c * kPitch + lane % kLanes * 4);
      T* const to = waiting + i * kChannels * channel;
      const bool real = waiting && (S::kOut % 16 == 0 || c < channels);
      if constexpr (sizeof(T) == 4) {
        store_if(real, to, four);
      } else {
        const Vector<T> rounded{T(four.x), T(four.y), T(four.z), T(four.w)};
        store_if(real, to, reinterpret_cast<const uint2&>(rounded));
      }
    }
    __device__ __forceinline__ void overlap(int step) {
      if constexpr (kVectors) {
#pragma unroll
        for (int i = step * kStores / S::kSteps; i < (step + 1) * kStores / S::kSteps; i++) store(i);
      }
    }
    __device__ __forceinline__ float result(float sum, int r, int64_t at) const {
      const float v = kAddsLevel ? fmaf(sum, unit[r], level[r]) : sum * unit[r];
      return sink.tail(v, own[r], at);
    }
    __device__ __forceinline__ void accept(Accumulators& v, const WarpTile& tile, const NoOffset&) {
      const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
      const int64_t before = place.before() + int64_t(tile.plane) * plane;
      __syncwarp();  // what waited has been read
#pragma unroll
      for (int j = 0; j < kFragments; j++)
#pragma unroll
        for (int r = 0; r < 2; r++) {
          // A tail is asked for elements that are there alone.
          const int64_t first = before + min(g + 8 * r, channels - 1) * channel;
          const auto at_position = [&](int u) {
            return first + min(tile.q + 8 * j + 2 * t + u, tile.positions - 1);
          };
          *reinterpret_cast<float2*>(staging + (g + 8 * r) * kPitch + j * 8 + 2 * t) =
              make_float2(result(v[j][2 * r], r, at_position(0)), result(v[j][2 * r + 1], r, at_position(1)));
        }
      __syncwarp();
    }
    __device__ __forceinline__ void accepted(const WarpTile& tile) {
      const int lane = threadIdx.x % 32;
      const int64_t at = int64_t(tile.plane) * plane + tile.q;
      if constexpr (kVectors) {
        waiting = tile.q + lane % kLanes * 4 < tile.positions ? lane_at + at : nullptr;
      } else {
#pragma unroll 1
        for (int row = 0; row < channels; row++)
          for (int i = lane; i < min(kTurn, tile.positions - tile.q); i += 32)
            from[row * channel + at + i] = T(staging[row * kPitch + i]);
      }
    }
    __device__ __forceinline__ void end() {
      if constexpr (kVectors) {
#pragma unroll
        for (int i = 0; i < kStores; i++) store(i);
      }
    }
  };
};

// Results of another tail of the same values, straight from registers: eight of a channel side by side.
template <class Tail, class T> struct Beside {
  T* to;
  Tail tail;

  template <class S> struct Shared {
    float level[16];
  };
  template <class S> struct Warp : IdleWarp {
    const Beside& sink;
    const Place<S>& place;
    const Shared<S>& room;
    const int channels;  // of this block's that exist
    float unit[2], level[2];
    typename Tail::Channel own[2];

    __device__ __forceinline__ Warp(const Beside& sink, Shared<S>& room, const Place<S>& place)
        : sink(sink), place(place), room(room), channels(min(S::kOut - place.first_channel, 16)) {
      if (threadIdx.x < 16 * 8) {
        const int c = threadIdx.x / 8;
        const double own =
            S::kSplit ? level_of(place.c, place.tile.n, place.first_channel + min(c, channels - 1)) : 0;
        if (threadIdx.x % 8 == 0) room.level[c] = float(own);
      }
    }
    __device__ __forceinline__ void begin(float scale) {
#pragma unroll
      for (int r = 0; r < 2; r++) {
        const int c = threadIdx.x % 32 / 4 + 8 * r;
        unit[r] = place.unit(scale, r), level[r] = room.level[c];
        own[r] = sink.tail.channel(place.tile.n, place.first_channel + min(c, channels - 1));
      }
    }
    __device__ __forceinline__ void accept(Accumulators& v, const WarpTile& tile, const NoOffset&) {
      const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
#pragma unroll
      for (int r = 0; r < 2; r++) {
        if (g + 8 * r >= channels) continue;
        const int64_t plane = int64_t(place.c.OH) * place.c.OW;
        const int64_t first =
            place.before() + tile.plane * plane + (g + 8 * r) * place.channel_size() + tile.q;
#pragma unroll
        for (int j = 0; j < kFragments; j++) {
          const int q = 8 * j + 2 * t, left = tile.positions - tile.q - q;
          const auto result = [&](int u) {
            return T(sink.tail(fmaf(v[j][2 * r + u], unit[r], level[r]), own[r], first + q + u));
          };
          if (left > 1 && first % 2 == 0) {
            *reinterpret_cast<Pair<T>*>(sink.to + first + q) = Pair<T>{result(0), result(1)};
          } else {
            if (left > 0) sink.to[first + q] = result(0);
            if (left > 1) sink.to[first + q + 1] = result(1);
          }
        }
      }
    }
  };
};

// Are y's and a tile's rows such that Runs may store four results at a time?
template <class S, class T> bool vectors_fit_runs(const T* y, const Convolution<S>& c) {
  return vectors_fit(y, int64_t(c.OH) * c.OW) && int64_t(c.rows) * c.OW % 4 == 0;
}

// Each stored.to = stored.tail(conv3d(x, weight)), without the convolution's bias.
template <class S, class T, class Tail, class... More, class... Tails>
void pointwise(const In<typename S::value_t>& x, const In<typename S::value_t>& weight, cudaStream_t stream,
               const conv::Stored<T, Tail>& stored, const conv::Stored<More, Tails>&... beside) {
  using Storage = SharedStorage<S, Runs<Tail, T, true>, Beside<Tails, More>..., Doubt>;
  const auto c = convolution<S>(x, weight, sizeof(Storage), true, x.size(0));
  expect(stored.to, c.N * S::kOut * c.size());
  (expect(beside.to, c.N * S::kOut * c.size()), ...);
  if (c.N == 0) return;
  const conv::Exact<S::kIn, S::kOut, S::kDepth, S::kHeight, S::kWidth> values(x, weight);
  const auto each = conv::all_of(conv::each_value<T>(values, stored.to, stored.tail),
                                 conv::each_value<More>(values, beside.to, beside.tail)...);
  if (vectors_fit_runs(stored.to.data, c))
    exact(c, each, stream, Runs<Tail, T, true>{stored.to, stored.tail},
          Beside<Tails, More>{beside.to, beside.tail}...);
  else
    exact(c, each, stream, Runs<Tail, T, false>{stored.to, stored.tail},
          Beside<Tails, More>{beside.to, beside.tail}...);
}

}  // namespace store
