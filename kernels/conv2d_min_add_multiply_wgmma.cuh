// conv2d_min_add_multiply_fused.cu by wgmma, on compute capability 9.0 (sm_90a), which reads x itself.
//
// For one group of input channels (at most 64, SPLIT=0) whose weights find room on a multiprocessor: at most 576 input channels
// × taps, and kBytes of shared memory. x starts at a word of 4 bytes and its rows are whole words; tiles, and the pixels of a
// plane, are counted in int.
//
// Blocks stay and share all tiles of 128 pixels evenly; a block walks down strips of rows, so that each input row is copied
// once and serves KERNEL_H tiles. Warpgroup 0, the producer, copies rows of x as they are, [channel][word], and converts them
// into a ring, [plane][pixel] of 8 channels, where a tap is an offset of the descriptor. Two warpgroups, the consumers,
// multiply, with most weights in registers, and store.
//
// float32 is converted under the scale 2^kFirstExponent, which fits almost all inputs, while the largest magnitude of each
// sample is found; a second launch computes again the samples that it did not fit, and otherwise ends at once.
//
// Bytes at the default size (128, 64, 128, 128), 3×3, 128 channels out: 537 MB read, 1040 MB written. Bound: memory 0.37 ms at
// 4.28 TB/s, 300 GFLOP 0.30 ms.
#pragma once
#include "conv2d_min_add_multiply_fused.cuh"

namespace {

constexpr int kProducts = kTaps * kSteps;  // of depth 16 per sum
// The weights of so many stay in registers, the others' in shared memory.
constexpr int kKept = kProducts < REGISTER_STEPS ? kProducts : REGISTER_STEPS;
constexpr int kTeam = 128;                              // threads of a warpgroup
constexpr int kConsumers = 2;                           // warpgroups that multiply, 64 channels × 128 pixels at a time
constexpr int kThreads = kTeam * (1 + kConsumers);
constexpr int kSharers = kConsumers * 64 / kBlockChannels;  // consumers of the same channels; each takes every kSharers-th tile
constexpr bool kInTurns = kSharers == 1;                    // consumers of one tile multiply one after the other

constexpr int kRing = STAGES;                     // rows in the ring: those of a tile, and those that come next
constexpr int kRowBytes = kPlanes * kPitch * 16;  // [plane][pixel]
constexpr int kRawRows = 2;                       // rows of x under way at a time
constexpr int kWordPixels = 4 / sizeof(value_t);  // the unit of copies is a word of 4 bytes
constexpr int kRawPitch = ceil_div(kPitch, kWordPixels);
constexpr int kRawBytes = ceil_div(CHANNELS_IN * kRawPitch, 4) * 16;  // [channel][word]
constexpr int kWeightBytes = (kProducts - kKept) * 2 * 64 * 16;       // per consumer: [product][plane][channel]
constexpr int kSector = 32 / sizeof(output_t);       // elements of the unit in which memory is written
constexpr int kStagingPitch = kTileWidth + kSector;  // elements per channel: 8 banks on, no conflicts
constexpr int kStagingBytes = 16 * kStagingPitch * sizeof(output_t);  // per warp
constexpr int kTailBytes = kConsumers * 64 * sizeof(Tail);

// Shared memory: ring, weights, staging, tails, raw, full, empty.
constexpr int kStagingAt = kRing * kRowBytes + kConsumers * kWeightBytes;
constexpr int kTailsAt = kStagingAt + kConsumers * 4 * kStagingBytes;
constexpr int kRawAt = kTailsAt + kTailBytes;
constexpr int kBarriersAt = kRawAt + kRawRows * kRawBytes;
constexpr int kBytes = kBarriersAt + 2 * kRing * 8;
static_assert(!SPLIT && kGroups == 1 && kRing > KERNEL_H && kProducts <= 36 && kBytes <= 227 << 10, "planned where it can't run");
static_assert(kBytes == SHARED_BYTES, "Python planned another layout");

#if TENSOR_CORE_WGMMA

// --------------------------------------------------------------------------------------------------------------- barriers

// Consumer c gets its turn with the tensor cores on barrier 1 + c; its warps meet on 3 + c.
__device__ __forceinline__ void take_turn(int consumer) {
  if (kInTurns) sync_threads<2 * kTeam>(1 + consumer);
}
__device__ __forceinline__ void hand_on(int consumer) {
  if (kInTurns) signal_threads<2 * kTeam>(2 - consumer);
}

// A position in the ring: a slot, and how often the ring has been gone through, modulo 2.
struct Position {
  int slot = 0;
  uint32_t parity = 0;
  __device__ __forceinline__ void advance() {
    if (++slot == kRing) slot = 0, parity ^= 1;
  }
};

// The two barriers of each slot of the ring: `full` once all producer threads have written it, `empty` once all consumers have
// read it.
struct Ring {
  uint8_t* rows;
  uint64_t *full, *empty;
  __device__ __forceinline__ explicit Ring(uint8_t* shared)
      : rows(shared), full(reinterpret_cast<uint64_t*>(shared + kBarriersAt)), empty(full + kRing) {}
};

// The tiles begin … end - 1 of a block, counted through samples, strips and rows, the last fastest; and where one lies.
struct Place { int n, column, row; };
struct Tiles {
  int OH, strips, begin, end;
  __device__ __forceinline__ explicit Tiles(const Arguments& of) : OH(of.height()), strips(ceil_div(of.width(), kTileWidth)) {
    const int tiles = int(of.N) * strips * OH;
    begin = int64_t(tiles) * blockIdx.x / gridDim.x, end = int64_t(tiles) * (blockIdx.x + 1) / gridDim.x;
  }
  __device__ __forceinline__ Place operator[](int tile) const {
    return {tile / OH / strips, tile / OH % strips * kTileWidth, tile % OH};
  }
};

// ------------------------------------------------------------------------------------------------------------ the producer

// Calls work(word, its first plane) for this thread's part of a row: all planes of a word of float32, half the planes of a word
// of two halves. What a thread converts it has copied itself, so that raw rows need no barrier.
template <class Work> __device__ __forceinline__ void for_each_word(int words, const Work& work) {
  for (int i = threadIdx.x; i < words * kWordPixels; i += kTeam) {
    if (kWordPixels == 1 || i < words) work(i, 0);
    else work(i - words, kPlanes / 2);
  }
}

// A row of x, from `from` on, into `raw` [channel][word], in the background.
__device__ __forceinline__ void fetch_row(uint32_t* raw, const value_t* from, int plane_size, int words) {
  for_each_word(words, [&](int word, int plane) {
    const value_t* at = from + int64_t(plane) * 8 * plane_size + word * kWordPixels;
    uint32_t* to = raw + plane * 8 * kRawPitch + word;
#pragma unroll 4
    for (int c = 0; c < kPlanes * 8 / kWordPixels; c++, at += plane_size, to += kRawPitch)
      if (CHANNELS_IN % 16 == 0 || plane * 8 + c < CHANNELS_IN) copy_async<4>(to, at);
  });
}

// A pixel of float32 under a scale, and the largest finite magnitude so far.
__device__ __forceinline__ void convert_pixel(uint4* out, const uint32_t (&words)[8], float scale, float& largest) {
  float value[8];
#pragma unroll
  for (int c = 0; c < 8; c++) {
    value[c] = __uint_as_float(words[c]);
    largest = larger_magnitude(largest, value[c]);
    value[c] = scaled(value[c], scale);
  }
  pack_pixel(out, 0, value);
}

// The low (kHigh = 0) or the high halves of 8 words: one of two pixels.
template <int kHigh> __device__ __forceinline__ uint4 halves_of(const uint32_t (&words)[8]) {
  constexpr int kSelector = kHigh ? 0x7632 : 0x5410;
  return make_uint4(__byte_perm(words[0], words[1], kSelector), __byte_perm(words[2], words[3], kSelector),
                    __byte_perm(words[4], words[5], kSelector), __byte_perm(words[6], words[7], kSelector));
}

// A raw row into a slot of the ring.
__device__ __forceinline__ void convert_row(
    uint8_t* slot, const uint32_t* raw, int words, float scale, float& largest) {
  for_each_word(words, [&](int word, int first_plane) {
    const uint32_t* in = raw + word;
    uint4* out = reinterpret_cast<uint4*>(slot) + word * kWordPixels;
#pragma unroll 1
    for (int plane = first_plane; plane < first_plane + kPlanes / kWordPixels; plane++) {
      uint32_t eight[8];
#pragma unroll
      for (int c = 0; c < 8; c++) eight[c] = plane * 8 + c < CHANNELS_IN ? in[(plane * 8 + c) * kRawPitch] : 0;
      if constexpr (kScaled) {
        convert_pixel(out + plane * kPitch, eight, scale, largest);
      } else {
        out[plane * kPitch] = halves_of<0>(eight);
        if (kPitch % 2 == 0 || word * 2 + 1 < kPitch) out[plane * kPitch + 1] = halves_of<1>(eight);
      }
    }
  });
}

// Fills the ring, row by row. again: with the samples that need another scale than the first alone.
__device__ __forceinline__ void produce(
    const Arguments& of, const Tiles& tiles, const Ring& ring, uint8_t* all_raw, bool again) {
  Position next;
  for (int tile = tiles.begin; tile < tiles.end;) {
    const Place place = tiles[tile];
    const int count = min(tiles.end - tile, tiles.OH - place.row), rows = count + KERNEL_H - 1;
    tile += count;
    const int exponent = again ? sample_exponent(of.largest[place.n]) : kFirstExponent;
    if (again && exponent == kFirstExponent) continue;
    const int words = min((int(of.W) - place.column + kWordPixels - 1) / kWordPixels, kRawPitch), plane_size = of.H * of.W;
    const value_t* from = of.x + (int64_t(place.n) * CHANNELS_IN * of.H + place.row) * of.W + place.column;
    const auto raw = [&](int i) { return reinterpret_cast<uint32_t*>(all_raw + i % kRawRows * kRawBytes); };
    const auto fetch = [&](int i) {
      if (i < rows) fetch_row(raw(i), from + i * of.W, plane_size, words);
      commit_copies();  // an empty group too, so that the count of pending groups stays the same
    };
    const float scale = power_of_two(exponent);
    float largest = 0.f;
    for (int i = 0; i < kRawRows - 1; i++) fetch(i);
    for (int i = 0; i < rows; i++) {
      fetch(i + kRawRows - 1);
      await(ring.empty + next.slot, next.parity ^ 1);
      await_copies<kRawRows - 1>();
      convert_row(ring.rows + next.slot * kRowBytes, raw(i), words, scale, largest);
      publish_shared();
      arrive(ring.full + next.slot);
      next.advance();
    }
    if (kScaled && !again) {
      const uint32_t bits = __reduce_max_sync(0xffffffffu, __float_as_uint(largest));
      if (threadIdx.x % 32 == 0) atomicMax(&of.largest[place.n], bits);
    }
  }
}

// ------------------------------------------------------------------------------------------------------------ the consumers

// The weights of the warp's 16 channels, from `channel` of the block on: to registers, and those of products beyond kKept to
// the consumer's shared memory [product][plane][channel].
__device__ __forceinline__ void load_weights(uint32_t (&kept)[kKept][4], uint8_t* others, const uint4* packed, int channel) {
  const int lane = threadIdx.x % 32, row = channel % 64 + lane / 4;
#pragma unroll
  for (int i = 0; i < kProducts; i++) {
    const uint4 four = packed[((blockIdx.y * kProducts + i) * kMTiles + channel / 16) * 32 + lane];
    const uint32_t fragment[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
    for (int j = 0; j < 4; j++) {
      uint8_t* to = others + (((i - kKept) * 2 + j / 2) * 64 + row + j % 2 * 8) * 16 + lane % 4 * 4;
      if (i < kKept) kept[min(i, kKept - 1)][j] = fragment[j];
      else *reinterpret_cast<uint32_t*>(to) = fragment[j];
    }
  }
  if (kKept < kProducts) {
    publish_shared();
    sync_threads<kTeam>(2 + threadIdx.x / kTeam);  // the weights of all four warps are there
  }
}

// sums = the products of a tile whose first row lies in slot `oldest`, in the background.
__device__ __forceinline__ void multiply_tile(float (&sums)[16][4], const uint32_t (&kept)[kKept][4], const uint8_t* others,
                                              const uint8_t* rows, int oldest) {
  begin_products();
#pragma unroll
  for (int kernel_row = 0; kernel_row < KERNEL_H; kernel_row++) {
    const int slot = oldest + kernel_row < kRing ? oldest + kernel_row : oldest + kernel_row - kRing;
    const uint64_t row = describe(shared_address(rows) + slot * kRowBytes, kPitch * 16);
#pragma unroll
    for (int j = 0; j < KERNEL_W * kSteps; j++) {
      const int i = kernel_row * KERNEL_W * kSteps + j;
      const uint64_t pixels = row + j / kSteps + j % kSteps * 2 * kPitch;
      if (i < kKept) multiply_add<operand_t>(sums, kept[min(i, kKept - 1)], pixels, i > 0);
      else multiply_add<operand_t>(sums, describe(shared_address(others), 64 * 16) + (i - kKept) * 128, pixels);
    }
  }
  commit_products();
}

struct alignas(2 * sizeof(output_t)) Pair { output_t at[2]; };

// Half of a warp's results, of the lane's channel g + 8·kHalf, to that channel's `row` of staging.
template <int kHalf> __device__ __forceinline__ void stage(output_t* row, const float (&values)[16][4], bool aligned) {
  if (aligned) {
#pragma unroll
    for (int j = 0; j < 16; j++)
      *reinterpret_cast<Pair*>(row + j * 8) = Pair{output_t(values[j][kHalf * 2]), output_t(values[j][kHalf * 2 + 1])};
  } else {
#pragma unroll
    for (int j = 0; j < 16; j++)
      row[j * 8] = output_t(values[j][kHalf * 2]), row[j * 8 + 1] = output_t(values[j][kHalf * 2 + 1]);
  }
}

// A warp's 16 channels × 128 pixels, laid out as for finish(), to y at `to`, channels `stride` apart; of these `channels` and
// `pixels` exist. Memory is written in whole sectors (32 bytes) wherever possible, since stores are what bounds the kernel. So
// each channel lies in `staging` as far from a sector's start as in y, and the copy engine takes the whole sectors. Where the
// last row ended in a sector that this row continues (`continues`), its rest is still in staging and goes along; where the
// next row will continue (`continued`), the last part of a sector waits. Threads store what is left.
__device__ __forceinline__ void store_tile(output_t* to, output_t* staging, const float (&values)[16][4], int64_t stride,
                                           int channels, int pixels, bool continues, bool continued) {
  const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const auto shift_of = [&](int channel) {
    return int(reinterpret_cast<uintptr_t>(to + channel * stride) / sizeof(output_t) % kSector);
  };
  pixels = min(pixels, kTileWidth);
  // Lanes l and l + 16 see to channel l.
  const int channel = lane % 16, shift = shift_of(channel), end = shift + pixels;
  output_t* const mine = staging + channel * kStagingPitch;
  await_bulk_reads();
  __syncwarp();  // the last row has left staging
  if (continues) {
    // Where the last row's rest begins.
    const int rest = ((shift - pixels + kTileWidth) % kSector + pixels) / kSector * kSector;
#pragma unroll
    for (int i = lane / 16; i < kSector; i += 2)
      if (i < shift) mine[i] = mine[rest + i];
  }
  __syncwarp();  // the rest is saved
  const int low = shift_of(g);
  stage<0>(staging + g * kStagingPitch + low + t * 2, values, __all_sync(0xffffffffu, low % 2 == 0));
  const int high = shift_of(g + 8);
  stage<1>(staging + (g + 8) * kStagingPitch + high + t * 2, values, __all_sync(0xffffffffu, high % 2 == 0));
  publish_shared();  // the copy engine, too, reads by the asynchronous proxy
  __syncwarp();      // everyone has written
  const int first = continues || shift == 0 ? 0 : kSector, last = max(end / kSector * kSector, first);  // whole sectors
  const bool real = channel < channels;
  output_t* const out = to + channel * stride - shift;
  if (real && lane < 16 && first < last) copy_bulk_out(out + first, mine + first, (last - first) * int(sizeof(output_t)));
  commit_bulk_copies();
  if (!continues || !continued) {
    const bool head = lane < 16;
    const int from = head ? shift : last, stop = head ? (continues ? 0 : min(first, end)) : (continued ? 0 : end);
    for (int i = from; i < (real ? stop : 0); i++) out[i] = mine[i];
  }
}

// Multiplies, finishes and stores the tiles of a warpgroup's 64 channels.
__device__ __forceinline__ void consume(
    const Arguments& of, const Tiles& tiles, const Ring& ring, uint8_t* shared, bool again) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 - 4, consumer = warp / 4, turn = consumer % kSharers;
  const int local_channel = consumer / kSharers * 64 + warp % 4 * 16, channel = blockIdx.y * kBlockChannels + local_channel;
  output_t* const staging = reinterpret_cast<output_t*>(shared + kStagingAt + warp * kStagingBytes);
  Tail* const tails = reinterpret_cast<Tail*>(shared + kTailsAt) + warp * 16;
  uint8_t* const others = shared + kRing * kRowBytes + consumer * kWeightBytes;
  uint32_t kept[kKept][4];
  load_weights(kept, others, of.packed_weight, local_channel);

  Position oldest, newest;  // the rows of the current tile; newest: the next to wait for
  const auto release = [&] {
    if (threadIdx.x % kTeam == 0) arrive(ring.empty + oldest.slot);
    oldest.advance();
  };
  const auto await_row = [&] {
    await(ring.full + newest.slot, newest.parity);
    newest.advance();
  };
  const int OH = tiles.OH, OW = of.width();
  const bool runs_on = kSharers == 1 && tiles.strips == 1 && OW >= kSector;  // a channel's next row follows this one in memory
  // Consumers multiply in turns, so that one's tail and stores run beside the other's products.
  if (consumer == 1) hand_on(1);
#pragma unroll 1
  for (int tile = tiles.begin; tile < tiles.end;) {
    const Place place = tiles[tile];
    const int start = tile, stop = min(tiles.end, tile - place.row + OH);
    const int exponent = again ? sample_exponent(of.largest[place.n]) : kFirstExponent;
    if (again && exponent == kFirstExponent) {
      tile = stop;
      continue;
    }
    if (lane < 16) tails[lane] = make_tail(of, channel + lane, exponent);
    __syncwarp();  // the tails are there
    output_t* to = of.y + ((int64_t(place.n) * CHANNELS_OUT + channel) * OH + place.row) * OW + place.column;
#pragma unroll
    for (int i = 0; i < KERNEL_H - 1; i++) await_row();
#pragma unroll 1
    for (; tile < stop; tile++, to += OW) {
      await_row();
      if (kSharers > 1 && tile % kSharers != turn) {
        release();
        continue;
      }
      float sums[16][4];
      take_turn(consumer);
      multiply_tile(sums, kept, others, ring.rows, oldest.slot);
      hand_on(consumer);
      await_products<0>();
      hold(sums);
      release();
      finish(sums, tails[lane / 4], tails[lane / 4 + 8], of.constant, of.scale);
      store_tile(to, staging, sums, int64_t(OH) * OW, CHANNELS_OUT - channel, OW - place.column, runs_on && tile != start,
                 runs_on && tile + 1 != stop);
    }
#pragma unroll
    for (int i = 0; i < KERNEL_H - 1; i++) release();
    __syncwarp();  // everyone has read the tails of this sample
  }
  if (consumer == 0) take_turn(0);  // the other's last signal
  await_bulk_reads();               // shared memory must outlive the copies from it
}

#endif

__global__ void __launch_bounds__(kThreads, 1) convolve_kernel(Arguments of, bool again) {
#if TENSOR_CORE_WGMMA
  extern __shared__ uint4 all_shared[];
  uint8_t* const shared = reinterpret_cast<uint8_t*>(all_shared);
  const Ring ring(shared);
  const Tiles tiles(of);
  if (threadIdx.x == 0) {
    for (int i = 0; i < kRing; i++) initialize(ring.full + i, kTeam), initialize(ring.empty + i, kConsumers);
    publish_barriers();
  }
  __syncthreads();  // the barriers are there
  if (threadIdx.x < kTeam) {
    give_registers_but<56>();
    produce(of, tiles, ring, shared + kRawAt, again);
  } else {
    take_registers_to<224>();
    consume(of, tiles, ring, shared, again);
  }
#endif
}

int64_t packed_input_bytes(int64_t, int64_t) { return 0; }  // x is read as it is

void convolve(const Arguments& of, uint4*, cudaStream_t stream) {
  int device = 0, multiprocessors = 0;
  cudaGetDevice(&device);
  cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device);
  cudaFuncSetAttribute(convolve_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes);
  const dim3 grid(multiprocessors > kChannelBlocks ? multiprocessors / kChannelBlocks : 1, kChannelBlocks);
  for (int pass = 0; pass < (kScaled ? 2 : 1); pass++) convolve_kernel<<<grid, kThreads, kBytes, stream>>>(of, pass == 1);
}

}  // namespace
