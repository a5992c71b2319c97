// A 2-D convolution of few channels in: its filters in registers, times rows of x in shared memory, by wgmma
// or by mma.sync; the result v goes to sinks (core/sinks.cuh), and is never written.
//
// x (N, kIn, H, W), weight (kOut, kIn, kHeight, kWidth), contiguous; v (N, kOut, OH, OW) is without a bias.
//
// A block computes 64 channels of v, row by row, by tiles of 128 columns, as an implicit GEMM: M = channels,
// N = columns, K = taps × channels in. Where shared memory has room for them rows are whole, so that a sink
// that stores writes whole sectors: where rows were cut, two blocks would write a part each (1.7 times as
// long).
// - Operands: each is a sum of two float16 (core/split.cuh; one, if it has 16 bits), scaled by powers of two:
//   filters by channel; x by block, first by a scale that fits almost all inputs, then, where the block's
//   largest magnitude turns out not to fit, again by one that does. Filters stay in registers.
// - Stage: a ring of rows of x in shared memory. A pixel's 8 channels lie side by side there, so that a tap
//   is an offset, and B needs no im2col.
// - Mainloop: two teams of four warps, each with its own strip of rows, take turns with the tensor cores:
//   while one team's products are formed, the other's sinks take its own, and it converts the next row of x
//   and fetches the one after. (Teams that may all form products at once do everything else at once, too, and
//   leave the tensor cores idle meanwhile.)
//
//   narrow2d_tile.cuh   sizes, tiles, the layout of shared memory
//   narrow2d_rows.cuh   rows of x on their way to shared memory
#pragma once
#include "conv/narrow2d_rows.cuh"
#include "core/sinks.cuh"
#include "core/wgmma.cuh"
#include "host/tensor.h"

namespace conv::narrow2d {

// Which filters are negated: none; or those of channels in which a product of two parameters is negative.
struct AsGiven {
  __device__ __forceinline__ bool operator()(int) const { return false; }
};
struct SignedBy {
  const accumulate_t *first, *second;
  __device__ __forceinline__ bool operator()(int channel) const {
    return first[channel] * second[channel] < 0;
  }
};

// The filters of channels g and g + 8 of a warp's 16, scaled and with their signs, as fragments of A, in
// registers.
template <class Tile> struct Filters {
  using Filter = typename Tile::Filter;
  static constexpr int kIn = Filter::kIn, kHeight = Filter::kHeight, kWidth = Filter::kWidth;
  static constexpr int kSlices = Tile::kSlices;
  using Fragments = uint32_t[kHeight][Tile::kFragments][4];
  Fragments fragments;

  // Of the warp's channels from first_channel + first_own on; their exponents and signs to `storage`, if
  // `tells`. A barrier follows.
  template <class Flipped>
  __device__ __forceinline__ Filters(typename Tile::Storage& storage, const value_t* weight,
                                     const Flipped& flipped, int first_channel, int first_own, bool tells) {
#pragma unroll
    for (int half = 0; half < 2; half++) {
      const int own = first_own + half * 8 + threadIdx.x % 32 / 4, channel = first_channel + own;
      const bool real = channel < Filter::kOut;
      const value_t* filter = weight + int64_t(real ? channel : 0) * (kIn * kHeight * kWidth);
      const auto load = [&](int kh, int slice, int i) {
        const int c = slice / kWidth * 8 + threadIdx.x % 4 * 2 + i;
        const int at = (c * kHeight + kh) * kWidth + slice % kWidth;
        return real && c < kIn ? float(filter[at]) : 0.f;
      };
      float largest = 0;
#pragma unroll
      for (int kh = 0; kh < kHeight; kh++)
#pragma unroll
        for (int slice = 0; slice < kSlices; slice++)
          largest = fmaxf(largest, fmaxf(fabsf(load(kh, slice, 0)), fabsf(load(kh, slice, 1))));
      for (int offset = 1; offset < 4; offset *= 2)
        largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, offset));
      const int exponent = fitting_exponent(largest);
      const bool flip = real && flipped(channel);
      if (tells && threadIdx.x % 4 == 0) {
        storage.filter_exponent[own] = exponent;
        storage.flipped[own] = flip;
      }
      const float factor = flip ? -power_of_two(exponent) : power_of_two(exponent);
#pragma unroll
      for (int kh = 0; kh < kHeight; kh++)
#pragma unroll
        for (int slice = 0; slice < kSlices; slice++)
          put(kh, slice, half, split(load(kh, slice, 0) * factor, load(kh, slice, 1) * factor));
    }
  }

 private:
  __device__ __forceinline__ void put(int kh, int slice, int half, Halves halves) {
    if (Tile::kOdd && slice == kSlices - 1) {
      constexpr int kLast = Tile::kFragments - 1;
      fragments[kh][kLast][half] = halves.high, fragments[kh][kLast][half + 2] = halves.low;
    } else {
      fragments[kh][slice / 2][half + slice % 2 * 2] = halves.high;
      fragments[kh][Tile::kPairs + slice / 2][half + slice % 2 * 2] = halves.low;
    }
  }
};

// The products of one row of v, in order: small ones first, since a tensor core cuts off what a sum's last
// bit can't hold. `act` gets the kernel row, the pixels' part (0 high, 1 low), the fragment, the first slice
// and the second.
template <class Tile, class Act> __device__ __forceinline__ void for_products(Act act) {
#pragma unroll
  for (int small = Tile::kOnePart ? 0 : 1; small >= 0; small--)
#pragma unroll
    for (int kh = 0; kh < Tile::Filter::kHeight; kh++) {
#pragma unroll
      for (int i = 0; i < Tile::kPairs; i++) {
        if (small) act(kh, 0, Tile::kPairs + i, 2 * i, 2 * i + 1);
        act(kh, small, i, 2 * i, 2 * i + 1);
      }
      if (Tile::kOdd) act(kh, small, Tile::kFragments - 1, Tile::kSlices - 1, Tile::kSlices - 1);
    }
}

// D = a row of v, in the background on sm_90a. `rows` holds the shared address of each kernel row's first
// pixel.
template <class Tile>
__device__ __forceinline__ void multiply_row(Accumulators<Tile::kTiles>& d,
                                             const typename Filters<Tile>::Fragments& fragments,
                                             const uint32_t (&rows)[Tile::Filter::kHeight]) {
#if TENSOR_CORE_WGMMA
  bool accumulate = false;
  hold(d);
  begin_products();
  for_products<Tile>([&](int kh, int part, int fragment, int slice, int second) {
    const uint32_t first = rows[kh] + part * Tile::kPartBytes + Tile::slice_offset(slice);
    const uint64_t pixels = describe(first, Tile::slice_offset(second) - Tile::slice_offset(slice));
    multiply_add(d, fragments[kh][fragment], pixels, accumulate);
    accumulate = true;
  });
  commit_products();
#elif __CUDA_ARCH__ >= 800
  constexpr int kTiles = Tile::kTiles;
#pragma unroll
  for (int j = 0; j < kTiles; j++)
#pragma unroll
    for (int i = 0; i < 4; i++) d[j][i] = 0;
  const int lane = threadIdx.x % 32;
  for_products<Tile>([&](int kh, int part, int fragment, int slice, int second) {
    const uint32_t row = rows[kh] + part * Tile::kPartBytes + lane % 8 * 16;
    if (slice != second) {
#pragma unroll
      for (int j = 0; j < kTiles; j += 2) {
        uint32_t b[4];
        const int own = lane / 8 % 2 ? Tile::slice_offset(second) : Tile::slice_offset(slice);
        load_matrices(b, row + own + (j + lane / 16) * 128);
        multiply_add(d[j], fragments[kh][fragment], b[0], b[1]);
        multiply_add(d[j + 1], fragments[kh][fragment], b[2], b[3]);
      }
    } else {
#pragma unroll
      for (int j = 0; j < kTiles; j += 4) {
        uint32_t b[4];
        load_matrices(b, row + Tile::slice_offset(slice) + (j + lane / 8) * 128);
#pragma unroll
        for (int k = 0; k < 4; k++) multiply_add(d[j + k], fragments[kh][fragment], b[k], b[k]);
      }
    }
  });
#endif
}

// On sm_90a: shared memory that this thread wrote may be read by products; all products are complete.
__device__ __forceinline__ void fence_shared() {
#if TENSOR_CORE_WGMMA
  publish_shared();
#endif
}
template <int kTiles> __device__ __forceinline__ void await(Accumulators<kTiles>& d) {
#if TENSOR_CORE_WGMMA
  await_products<0>();
  hold(d);
#endif
}

// Waits for all threads of the team and, on sm_90a, until the tensor cores are its own; then releases them to
// the next team.
template <class Tile> __device__ __forceinline__ void acquire_tensor_cores(int team) {
  if (TENSOR_CORE_WGMMA && Tile::kTeams > 1) sync_threads<2 * Tile::kTeamThreads>(1 + team);
  else sync_threads<Tile::kTeamThreads>(1 + team);
}
template <class Tile> __device__ __forceinline__ void release_tensor_cores(int team) {
  if (TENSOR_CORE_WGMMA && Tile::kTeams > 1)
    signal_threads<2 * Tile::kTeamThreads>(1 + (team == Tile::kTeams - 1 ? 0 : team + 1));
}

// All rows of a team's strip, x scaled by 2^exponent.
template <class Tile, class Sinks>
__device__ __forceinline__ void convolve_strip(Sinks& sinks, Rows<Tile>& rows, const Filters<Tile>& filters,
                                               const typename Tile::Job& job, typename Tile::Place& place,
                                               int team, unsigned char* shared, int exponent) {
  constexpr int kHeight = Tile::Filter::kHeight, kRing = Tile::kRing, kRowTiles = Tile::kRowTiles;
  const float factor = power_of_two(exponent);
#pragma unroll 1
  for (int i = 0; i < kHeight * kRowTiles && job.row_begin < job.row_end; i++)
    rows.fetch(job.row_begin + i / kRowTiles, i % kRowTiles),
        rows.convert(i / kRowTiles, i % kRowTiles, factor);
  if (job.row_begin + 1 < job.row_end) rows.fetch(job.row_begin + kHeight, 0);
  int slot = 0;
  Accumulators<Tile::kTiles> v;  // scaled
  if (team == Tile::kTeams - 1) release_tensor_cores<Tile>(team);
  fence_shared();
#pragma unroll 1
  for (int turn = 0; turn < job.turns * kRowTiles; turn++) {
    const int row = job.row_begin + turn / kRowTiles, tile = turn % kRowTiles;
    // Until the row's pixels are there, and the products of the row before it have been formed.
    acquire_tensor_cores<Tile>(team);
    uint32_t addresses[kHeight];
#pragma unroll
    for (int kh = 0; kh < kHeight; kh++)
      addresses[kh] = shared_address(shared) +
                      (slot + kh - (slot + kh >= kRing ? kRing : 0)) * Tile::kRowBytes +
                      tile * Tile::kColumns * 16;
    multiply_row<Tile>(v, filters.fragments,
                       addresses);  // after the last row, of stale pixels: result unused
    if (team < Tile::kTeams - 1 || turn < job.turns * kRowTiles - 1) release_tensor_cores<Tile>(team);
    sinks.overlap();
    if (row + 1 < job.row_end) {
      // Nobody reads the slot of the row before this one.
      rows.convert(slot == 0 ? kRing - 1 : slot - 1, tile, factor);
      if (tile + 1 < kRowTiles) rows.fetch(row + kHeight, tile + 1);
      else if (row + 2 < job.row_end) rows.fetch(row + 1 + kHeight, 0);
    }
    if (tile == kRowTiles - 1) slot = slot == kRing - 1 ? 0 : slot + 1;
    fence_shared();
    await(v);
    if (turn == 0) sinks.shift(v);
    if (kRowTiles > 1) place.columns = place.geometry.columns_of(tile);
    if (row < job.row_end) sinks.accept(v, sinks::NoOffset());
  }
  sinks.end();
}

template <class Tile, class... Sinks> struct TeamShared {
  alignas(128) unsigned char ring[Tile::kRing * Tile::kRowBytes];
  alignas(16) sinks::Rooms<Tile, Sinks...> sinks;
};

template <class Tile, class... Sinks>
constexpr int kShared =
    Tile::kTeams * int(sizeof(TeamShared<Tile, Sinks...>));  // bytes of dynamic shared memory

// Where x's largest magnitude turns out not to fit the scale, all is computed again, and the sinks begin
// anew.
template <class Tile, class Flipped, class... Sinks>
__global__ void __launch_bounds__(Tile::kBlockThreads, 1)
    convolve_kernel(Sinks... sinks, const value_t* x, const value_t* weight, Flipped flipped,
                    typename Tile::Geometry geometry) {
#if __CUDA_ARCH__ >= 800
  extern __shared__ __align__(128) unsigned char shared[];
  __shared__ typename Tile::Storage storage;
  using Shared = TeamShared<Tile, Sinks...>;
  const int team = __shfl_sync(~0u, threadIdx.x / Tile::kTeamThreads, 0);
  const int thread = threadIdx.x % Tile::kTeamThreads;
  auto& own = *reinterpret_cast<Shared*>(shared + team * int(sizeof(Shared)));
  const typename Tile::Job job(geometry, team);
  const int first_own = thread / 32 * 16;
  typename Tile::Place place(storage, geometry, job, first_own);
  const Filters<Tile> filters(storage, weight, flipped, job.first_channel, first_own, team == 0);
  Rows<Tile> rows(x + int64_t(job.n) * Tile::Filter::kIn * geometry.H * geometry.W, geometry.H, geometry.W,
                  job.column, own.ring, thread);
  rows.clear_behind_tile();
  sinks::Chain<Tile, Sinks...> chain(own.sinks, place, sinks...);

  __syncthreads();  // the filters' exponents are there
  int exponent = kFirstExponent;
  for (bool again = false;; again = true) {
    if (threadIdx.x < Tile::kBlockChannels) {
      const PowerOfTwo power(-exponent - storage.filter_exponent[threadIdx.x]);
      storage.unscale[threadIdx.x] =
          make_float2(storage.flipped[threadIdx.x] ? -power.first : power.first, power.second);
    }
    rows.largest = 0;
    if (threadIdx.x == 0) storage.largest = 0;
    __syncthreads();  // unscale and largest are set
    chain.begin();
    convolve_strip<Tile>(chain, rows, filters, job, place, team, own.ring, exponent);
    atomicMax(&storage.largest, __float_as_int(rows.largest));
    __syncthreads();  // complete
    const float magnitude = __int_as_float(storage.largest);
    const int fitting = fitting_exponent(magnitude);
    if (again || magnitude == 0.f || magnitude == INFINITY ||
        (fitting >= kFirstExponent && fitting <= kFirstExponent + kSlack))
      break;
    exponent = fitting;
    __syncthreads();  // storage.largest has been read
  }
  chain.finish();
#endif
}

// Launches it.
template <class Tile, class Flipped, class... Sinks>
void convolve(const value_t* x, const value_t* weight, Flipped flipped, typename Tile::Geometry geometry,
              cudaStream_t stream, Sinks... sinks) {
  constexpr auto kernel = convolve_kernel<Tile, Flipped, Sinks...>;
  allow_shared<kernel>();
  const unsigned blocks = unsigned(geometry.blocks());
  kernel<<<blocks, Tile::kBlockThreads, kShared<Tile, Sinks...>, stream>>>(sinks..., x, weight, flipped,
                                                                           geometry);
}

}  // namespace conv::narrow2d
