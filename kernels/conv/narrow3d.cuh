// The products of a 3-D convolution, 16 output channels at a time, whose sums sinks take from the registers.
//
// A sink is a struct, an argument of the kernel, with
//   Shared<S>   its room in shared memory
//   Warp<S>     what a thread keeps of it, made of the sink, its room and the block's Place. It has
//     begin(scale)         behind a barrier, before a run, and again if the run starts again
//     initial(v)           what a tile's sums start with: the first sink of several says that
//     expect(tile)         before a tile's products: what accept() will need sets off
//     overlap(step)        between a tile's products, kSteps times: work that need not wait for them
//     accept(v, tile, offset)   the sums of kTurn neighbouring positions of a plane, less `offset` by
//     channel. It may
//                          change them for the sinks behind it; its member `offset`, where it has one, is
//                          theirs
//     accepted(tile)       when all sinks have accepted it
//     end()                after the run, in front of a barrier
//     finish(place)        behind that
// What a Warp has not, IdleWarp has for it. Sums are in units of 1 / (scale · weight_scale[channel]); lane
// (g, t) has those of channels g and g + 8, at positions q + 8·j + 2t and the next: v[j][0, 1] and v[j][2,
// 3].
#pragma once
#include "conv/narrow3d_operands.cuh"
#include "conv/narrow3d_stage.cuh"
#include "core/launch.cuh"

namespace conv::narrow3d {

using Accumulators = float[kFragments][4];

__device__ __forceinline__ void clear(Accumulators& v) {
#pragma unroll
  for (int j = 0; j < kFragments; j++) v[j][0] = v[j][1] = v[j][2] = v[j][3] = 0;
}
// Of a channel's values in its four lanes the sum and the largest magnitude, in each of them.
__device__ __forceinline__ float channel_sum(float v) {
  v += __shfl_xor_sync(~0u, v, 1);
  return v + __shfl_xor_sync(~0u, v, 2);
}
__device__ __forceinline__ float channel_most(float v) {
  v = fmaxf(v, __shfl_xor_sync(~0u, v, 1));
  return fmaxf(v, __shfl_xor_sync(~0u, v, 2));
}

// Where a warp's sums lie: from position q of the block's part of a plane of the result, of which `positions`
// are real. Those of a plane are neighbours in memory.
struct WarpTile {
  int plane, q, positions;
  __device__ __forceinline__ bool whole() const { return q + kTurn <= positions; }
};

// Where a block works.
template <class S> struct Place {
  const Convolution<S>& c;
  const Tile& tile;
  MainloopStorage<S>& storage;
  int first_channel;
  // What turns a sum of channel g + 8r of this lane into real units.
  __device__ __forceinline__ float unit(float scale, int r) const {
    return 1 / scale * (1 / storage.weight_scale[threadIdx.x % 32 / 4 + 8 * r]);
  }
  // Elements of a result (N, kOut, D', H', W'): a channel's, those before a tile's first one in this block's
  // first channel.
  __device__ __forceinline__ int64_t channel_size() const { return c.OD * (int64_t(c.OH) * c.OW); }
  __device__ __forceinline__ int64_t before() const {
    return (tile.n * S::kOut + first_channel) * channel_size() + tile.first_row * c.OW;
  }
};

struct NoOffset {
  __device__ __forceinline__ float operator[](int) const { return 0.f; }
};

struct IdleWarp {
  __device__ __forceinline__ void begin(float) {}
  __device__ __forceinline__ void initial(Accumulators& v) const { clear(v); }
  __device__ __forceinline__ void expect(const WarpTile&) {}
  __device__ __forceinline__ void overlap(int) {}
  __device__ __forceinline__ void accepted(const WarpTile&) {}
  __device__ __forceinline__ void end() {}
  template <class Place> __device__ __forceinline__ void finish(const Place&) {}
};
struct NoRoom {};

// The rooms of several sinks, one after the other.
template <class S, class Sink> struct Room : Sink::template Shared<S> {};
template <class S, class... Sinks> struct Rooms {};
template <class S, class First, class... Rest>
struct Rooms<S, First, Rest...> : Room<S, First>, Rooms<S, Rest...> {};

template <class Warp, class = void> constexpr bool has_offset = false;
template <class Warp> constexpr bool has_offset<Warp, std::void_t<decltype(Warp::offset)>> = true;

// Several sinks' warps as one.
template <class S, class... Sinks> struct Warps {
  __device__ __forceinline__ Warps(Rooms<S>&, const Place<S>&) {}
  __device__ __forceinline__ void begin(float) {}
  __device__ __forceinline__ void expect(const WarpTile&) {}
  __device__ __forceinline__ void overlap(int) {}
  template <class Offset>
  __device__ __forceinline__ void accept(Accumulators&, const WarpTile&, const Offset&) {}
  __device__ __forceinline__ void end() {}
  __device__ __forceinline__ void finish(const Place<S>&) {}
};
template <class S, class First, class... Rest> struct Warps<S, First, Rest...> {
  using Warp = typename First::template Warp<S>;
  Warp first;
  Warps<S, Rest...> rest;

  __device__ __forceinline__ Warps(Rooms<S, First, Rest...>& rooms, const Place<S>& place, const First& sink,
                                   const Rest&... more)
      : first(sink, static_cast<Room<S, First>&>(rooms), place), rest(rooms, place, more...) {}
  __device__ __forceinline__ void begin(float scale) { first.begin(scale), rest.begin(scale); }
  __device__ __forceinline__ void initial(Accumulators& v) const { first.initial(v); }
  __device__ __forceinline__ void expect(const WarpTile& tile) { first.expect(tile), rest.expect(tile); }
  __device__ __forceinline__ void overlap(int step) { first.overlap(step), rest.overlap(step); }
  template <class Offset>
  __device__ __forceinline__ void accept(Accumulators& v, const WarpTile& tile, const Offset& offset) {
    first.accept(v, tile, offset);
    if constexpr (has_offset<Warp>) rest.accept(v, tile, first.offset);
    else rest.accept(v, tile, offset);
    first.accepted(tile);
  }
  __device__ __forceinline__ void end() { first.end(), rest.end(); }
  __device__ __forceinline__ void finish(const Place<S>& place) { first.finish(place), rest.finish(place); }
};

template <class S, class Weights = RegisterWeights<S>> struct Mainloop {
  static constexpr int kAhead =
      S::kDepth + 1;  // the plane of x that is split while an output plane is computed
  const Block<S> block;
  Stage<S> stage;
  Operands<S, Weights> operands;
  // Of barriers' next phases, a bit each: of the stage's, then of `done` as arrived at.
  uint32_t parities = 0;

  // Weights from first_channel on are fetched, then and whenever operands.fetch_weights() is called.
  __device__ __forceinline__ Mainloop(const Convolution<S>& c, const Tile& tile, MainloopStorage<S>& storage,
                                      uint32_t* ring, int first_channel, const Weights& weights = {})
      : block(c, tile, storage, ring), stage(block), operands(block, weights) {
    if (threadIdx.x == 0) {
      for (int i = 0; i < 2; i++) initialize(done(i), kBlock);
      stage.initialize_barriers();
#if __CUDA_ARCH__ >= 900
      publish_barriers();
#endif
    }
    typename Operands<S, Weights>::Samples samples;  // on their way while the tables are made
    if constexpr (S::kSplit) operands.load(samples, tile.planes + S::kDepth - 1);
    operands.fetch_weights(first_channel);
    block.make_tables();
    if constexpr (S::kSplit) {
      operands.guess_scales(samples);
    } else {
      __syncthreads();  // the weights are there
    }
  }

  __device__ __forceinline__ int turns() const { return block.turns; }  // of a plane

  // All threads call it when they are through with shared memory: it may then serve another mainloop.
  __device__ __forceinline__ void retire() const {
    __syncthreads();
    if (threadIdx.x == 0) {
      for (uint64_t& barrier : block.storage.done) invalidate(&barrier);
      for (uint64_t& barrier : block.storage.arrived) invalidate(&barrier);
    }
    __syncthreads();
  }

  // Hands the first `count` of the tile's turns to `sink`, a Warp or several, plane by plane. It may have to
  // start again.
  template <class Sink> __device__ __forceinline__ void run(Sink& sink, int count) {
    const int planes = count ? (count + block.turns - 1) / block.turns + S::kDepth - 1 : 0;  // of x
    do {
      if (operands.fetched) operands.take_weights();
      operands.magnitude = __half2(0, 0);
      run_once(sink, count, planes);
    } while (!operands.scales_fit(planes));
  }

 private:
  __device__ __forceinline__ uint64_t* done(int plane) const { return block.storage.done + plane % 2; }

  template <class Sink> __device__ __forceinline__ void run_once(Sink& sink, int count, int planes) {
    const Convolution<S>& c = block.c;
    stage.set_off(kAhead, planes);
#pragma unroll 1
    for (int plane = 0; plane < min(kAhead, planes); plane++)
      operands.split_plane(plane, block.origin + plane * block.plane_stride, c.channel);
    __syncthreads();
    sink.begin(operands.scale);

    constexpr uint32_t kPixel = S::kHighWords * 4;  // bytes, in the ring of the words with a high
    const uint32_t plane_bytes = c.plane * kPixel, ring_bytes = S::kRing * plane_bytes;
    const uint32_t ring = shared_address(block.ring);
    const uint32_t low_ring = shared_address(block.low_ring()) - ring / S::kHighWords * S::kLowWords;
    const uint16_t* const positions = block.positions();
    const int warp = threadIdx.x / 32, g = threadIdx.x % 32 / 4, t = thread_index_anew() % 4;
    uint32_t offset[S::kSteps];  // of this lane's tap, from a position's pixel
#pragma unroll
    for (int s = 0; s < S::kSteps; s++) offset[s] = block.storage.taps[4 * s + t] * kPixel;
    int turn = warp;  // this warp's next
#pragma unroll 1
    for (int plane = 0; plane <= planes - S::kDepth; plane++) {
      const uint32_t done_bit = 1u << (kRaw + plane % 2);
      await(done(plane), (parities & done_bit) == 0);  // all threads are through with plane - 2
      const int ahead = plane + kAhead;
      stage.set_off(ahead + 1, planes);  // to where plane - 2 + kAhead was split from
      if (ahead < planes) {
        stage.await_plane(ahead, parities);
        operands.split_plane(ahead, block.raw(ahead), block.items * block.width);
      }
      const int plane_turns = min(block.turns, count - plane * block.turns);
#pragma unroll 1
      for (; turn < plane_turns; turn += kBlockWarps) {
        const int q = turn * kTurn;
        uint32_t pixel[kFragments];
#pragma unroll
        for (int j = 0; j < kFragments; j++) pixel[j] = ring + positions[q + 8 * j + g] * kPixel;
        Accumulators sum;
        const WarpTile tile{block.tile.first_plane + plane, q, block.tile.positions};
        sink.expect(tile);
        multiply_turn(sum, pixel, offset, low_ring, sink);
        sink.accept(sum, tile, NoOffset());
      }
      turn -= block.turns;
#pragma unroll
      // On by a plane, or back to the ring's first: what is negative is large.
      for (int s = 0; s < S::kSteps; s++)
        offset[s] = min(offset[s] + plane_bytes, offset[s] + plane_bytes - ring_bytes);
      arrive(done(plane));
      parities ^= done_bit;
    }
    sink.end();
  }

  // The sums of a turn, of positions whose pixels have the shared addresses `pixel`.
  template <class Sink>
  __device__ __forceinline__ void multiply_turn(Accumulators& sum, const uint32_t (&pixel)[kFragments],
                                                const uint32_t (&offset)[S::kSteps], uint32_t low_ring,
                                                Sink& sink) const {
    const Weights& weights = operands.weights;
    float low_sum[kFragments][4] = {};  // of products with a low: small ones add up by themselves
    uint32_t words[kFragments][S::kSteps * S::kHighWords],
        low_words[kFragments][S::kSteps * S::kLowWords + 1];
    sink.initial(sum);
#pragma unroll
    for (int s = 0; s < S::kSteps; s++) {
      sink.overlap(s);
#pragma unroll
      for (int j = 0; j < kFragments; j++) {
        const uint32_t at = offset[s] + pixel[j];
        load_shared<S::kHighWords>(&words[j][s * S::kHighWords], at);
        if constexpr (S::kLowWords > 0)
          load_shared<S::kLowWords>(&low_words[j][s * S::kLowWords],
                                    low_ring + at / S::kHighWords * S::kLowWords);
      }
#pragma unroll
      for (int i = s * S::kHighWords | 1; i < (s + 1) * S::kHighWords; i += 2) {
        uint32_t high[4], low[4];
        weights.template get<2>(high, S::kHighs + i - 1);
        if constexpr (S::kSplit) { weights.template get<2>(low, S::kLows + i - 1); }
#pragma unroll
        for (int j = 0; j < kFragments; j++) {
          multiply_add<typename S::operand_t>(sum[j], high, words[j][i - 1], words[j][i]);
          if (S::kSplit) multiply_add<typename S::operand_t>(low_sum[j], low, words[j][i - 1], words[j][i]);
        }
      }
#pragma unroll
      for (int i = s * S::kLowWords | 1; i < (s + 1) * S::kLowWords; i += 2) {
        uint32_t rest[4];
        weights.template get<2>(rest, S::kRest + i - 1);
#pragma unroll
        for (int j = 0; j < kFragments; j++)
          multiply_add<typename S::operand_t>(low_sum[j], rest, low_words[j][i - 1], low_words[j][i]);
      }
    }
    constexpr int kLast = S::kSteps * S::kHighWords - 1,
                  kLastLow = S::kSteps * S::kLowWords - 1;  // without a neighbour?
    constexpr bool kOne = kLast % 2 == 0, kOneLow = kLastLow >= 0 && kLastLow % 2 == 0;
    uint32_t high[2], low[2], rest[2];
    if constexpr (kOne) { weights.template get<1>(high, S::kHighs + kLast); }
    if constexpr (kOne && S::kSplit) { weights.template get<1>(low, S::kLows + kLast); }
    if constexpr (kOneLow) { weights.template get<1>(rest, S::kRest + kLastLow); }
#pragma unroll
    for (int j = 0; j < kFragments; j++) {
      if (kOne && S::kSplit) multiply_add<typename S::operand_t>(low_sum[j], low[0], low[1], words[j][kLast]);
      if (kOne) multiply_add<typename S::operand_t>(sum[j], high[0], high[1], words[j][kLast]);
      if constexpr (kOneLow) {
        multiply_add<typename S::operand_t>(low_sum[j], rest[0], rest[1], low_words[j][kLastLow]);
      }
      if (S::kSplit) {
#pragma unroll
        for (int i = 0; i < 4; i++) sum[j][i] += low_sum[j][i];
      }
    }
  }
};

// ---------------------------------------------------------------------------------------------------- kernel

// Weights that are too many for registers lie in shared memory.
template <class S> constexpr bool kWeightsFitRegisters = 2 * S::kWeightWords <= 96;
template <class S, bool kInRegisters = kWeightsFitRegisters<S>> struct WeightsRoom {
  __device__ __forceinline__ RegisterWeights<S> weights() const { return {}; }
};
template <class S> struct WeightsRoom<S, false> {
  alignas(16) uint4 fragments[S::kWeightWords / 2 * 32];
  __device__ __forceinline__ SharedWeights weights() { return SharedWeights(fragments); }
};

template <class S, class... Sinks> struct SharedStorage : WeightsRoom<S> {
  alignas(16) Rooms<S, Sinks...> rooms;
  MainloopStorage<S> mainloop;
};
// More than a block may have statically lies before the ring, in dynamic memory: so many units of 16 bytes.
template <class Storage>
constexpr int kStorageUnits = sizeof(Storage) <= (48 << 10) ? 0 : (int(sizeof(Storage)) + 15) / 16;
template <class Storage> __device__ __forceinline__ Storage& storage_in(uint4* dynamic) {
  if constexpr (kStorageUnits<Storage> > 0) {
    return *reinterpret_cast<Storage*>(dynamic);
  } else {
    __shared__ Storage storage;
    return storage;
  }
}

// The convolution once, for `sinks`. Grid (N · slots, sixteens of channels).
template <class S, class... Sinks>
__global__ void __launch_bounds__(kBlock, 1) convolve_kernel(const Convolution<S> c, Sinks... sinks) {
  using Storage = SharedStorage<S, Sinks...>;
  extern __shared__ uint4 shared[];
  Storage& storage = storage_in<Storage>(shared);
  const Tile tile(c, blockIdx.x);
  const int first_channel = blockIdx.y * 16;
  const auto weights = storage.weights();
  Mainloop<S, std::remove_const_t<decltype(weights)>> mainloop(
      c, tile, storage.mainloop, reinterpret_cast<uint32_t*>(shared + kStorageUnits<Storage>), first_channel,
      weights);
  const Place<S> place{c, tile, storage.mainloop, first_channel};
  Warps<S, Sinks...> warps(storage.rooms, place, sinks...);
  mainloop.run(warps, tile.planes * mainloop.turns());
  warps.finish(place);
}

template <class S, class... Sinks>
void convolve(const Convolution<S>& c, cudaStream_t stream, const Sinks&... sinks) {
  const auto kernel = convolve_kernel<S, Sinks...>;
  allow_shared<convolve_kernel<S, Sinks...>>();
  const dim3 grid(unsigned(c.N * c.slots()), (S::kOut + 15) / 16);
  kernel<<<grid, kBlock, kStorageUnits<SharedStorage<S, Sinks...>> * 16 + c.shared, stream>>>(c, sinks...);
}

}  // namespace conv::narrow3d
