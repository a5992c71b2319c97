// The convolution's side channels last, v or its gradient (N, S, C), while all other arrays are (N, C, S): there a GPU's library is
// fastest where it runs on tensor cores.
//
// A block turns tiles of positions and channels through shared memory, one after the other: all that are its part of some planes. A warp
// takes a channel of a tile after the other, kPack neighbouring positions a lane, or, in planes of odd sizes, one. C is a multiple of
// kRowVector.
#pragma once
#include "core/vector.cuh"
#include "load/planes.cuh"

namespace load {

// Arrays' layouts, as launchers are told.
enum Layout : int64_t {
  kPlanes,    // all (N, C, S)
  kTurned,    // the convolution's side (N, S, C)
  kForTf32,   // … and its operands rounded to TF32, see nearest_tf32
  kUnits,     // the gradient of v in units, see load/units.cuh
};

// The nearest value of TF32's, ties away from zero (cvt.rna.tf32): so the library rounds operands in eager's
// layout; from operands in channels last a tensor core cuts the other bits off. No other type runs in TF32.
__device__ inline float nearest_tf32(float v) {
  const bool stays_finite = fabsf(v) < 0x1.ffep127f;  // and is not NaN
  return stays_finite ? __uint_as_float((__float_as_uint(v) + 0x1000) & ~0x1fffu) : v;
}
template <class T> __device__ T nearest_tf32(T v) { return v; }

constexpr int kTilePositions = 32 * kPack, kTileChannels = 128 / sizeof(value_t), kRowVector = 16 / sizeof(value_t);

// Where a tile has an element: rows are turned so that a warp meets each bank once, be its lanes kPack positions of a channel apart, or
// at kRowVector channels of four positions.
__device__ __forceinline__ int slot(int position, int channel) {
  constexpr int kElements = sizeof(value_t) < 4 ? 4 / sizeof(value_t) : 1;  // of a bank
  const int turn = (position / kPack + position % kPack) * kElements;
  return position * kTileChannels + (channel + turn) % kTileChannels;
}

// Of sample n, the positions and channels from `position` and `channel` on. first: the first of the block's.
struct Tile {
  const Extent& extent;
  value_t* const at;
  const unsigned n, part;
  const int channel, position;
  const bool first;

  static constexpr int kLanes = kTileChannels / kRowVector, kStep = kPlaneThreads / kLanes, kRows = kTilePositions / kStep;
  __device__ Tile(const Extent& extent, value_t* at, unsigned parts, unsigned channel_tiles, unsigned number)
      : extent(extent), at(at), n(blockIdx.x / channel_tiles / parts), part(blockIdx.x / channel_tiles % parts),
        channel(int(blockIdx.x % channel_tiles) * kTileChannels), position(int(part + number * parts) * kTilePositions),
        first(number == 0) {}
  __device__ Tile(const Extent& extent, value_t* at, unsigned n, unsigned part, int channel)
      : extent(extent), at(at), n(n), part(part), channel(channel), position(int(part) * kTilePositions), first(true) {}

  __device__ __forceinline__ void load(const value_t* from) const {
    Memory<value_t, kRowVector> rows[kRows];  // all loads are under way before the first is used
    each_row([&](int64_t offset, int k) { rows[k] = *reinterpret_cast<const Memory<value_t, kRowVector>*>(from + offset); });
    each_row([&](int64_t, int k) {
#pragma unroll
      for (int i = 0; i < kRowVector; i++) at[slot(row(k), lane() + i)] = rows[k].at[i];
    });
  }
  __device__ __forceinline__ void store(value_t* to, bool for_tf32) const {
    each_row([&](int64_t offset, int k) {
      Memory<value_t, kRowVector> vector;
#pragma unroll
      for (int i = 0; i < kRowVector; i++) {
        const value_t x = at[slot(row(k), lane() + i)];
        vector.at[i] = for_tf32 ? nearest_tf32(x) : x;
      }
      *reinterpret_cast<Memory<value_t, kRowVector>*>(to + offset) = vector;
    });
  }

 private:
  __device__ __forceinline__ int lane() const { return threadIdx.x % kLanes * kRowVector; }
  __device__ __forceinline__ int row(int k) const { return threadIdx.x / kLanes + k * kStep; }
  template <class F> __device__ __forceinline__ void each_row(const F& f) const {
    const int S = extent.positions(), C = int(extent.C);
#pragma unroll
    for (int k = 0; k < kRows; k++)
      if (position + row(k) < S && channel + lane() < C)
        f((int64_t(n) * S + position + row(k)) * C + channel + lane(), k);
  }
};

template <int K, bool kReads> struct TurnedPoint : Point<K> {
  value_t* tile;
  int row, column;  // of the tile
  __device__ __forceinline__ typename Point<K>::T v() const {
    if constexpr (!kReads) return Point<K>::v();
    else if constexpr (K == 1) return real(tile[slot(row, column)]);
    else return lanes<K>([&](int i) { return real(tile[slot(row + i, column)]); });
  }
  template <class X> __device__ __forceinline__ void write_v(value_t*, const X& x) const {
#pragma unroll
    for (int i = 0; i < K; i++) tile[slot(row + i, column)] = value_t(lane_of(x, i));
  }
};

// A lane's share of a plane in a tile. kReads: v is the tile's, else its gradient.
template <bool kReads> class TurnedPlane {
 public:
  const int64_t n, c;
  __device__ TurnedPlane(const Tile& tile, const value_t* values, unsigned parts, int column)
      : n(tile.n), c(tile.channel + column), tile_(tile), values_(values), parts_(parts), column_(column) {}

  template <class F> __device__ __forceinline__ void each(const F& f) const {
    const int left = tile_.extent.positions() - tile_.position, lane = threadIdx.x % 32;
    if (tile_.extent.positions() % kPack == 0) {
      if (lane * kPack < left) f(point<kPack>(lane * kPack));
    } else {
      for (int row = lane; row < kTilePositions && row < left; row += 32) f(point<1>(row));
    }
  }
  __device__ __forceinline__ Sum sum() const { return {}; }
  __device__ __forceinline__ ShiftedSums moments() const { return {}; }
  __device__ void reduce(double* out, Sum& sum) const {
    const double value = warp_sum(sum.value());
    if (threadIdx.x % 32 == 0) put(out[place()], value);
  }
  __device__ void reduce(Moments<double>* out, const ShiftedSums& sums) const {
    const Moments<double> value = warp_moments(sums);
    if (threadIdx.x % 32 == 0) put(out[place()], value);
  }

 private:
  // One lane has a channel's in all tiles.
  template <class T> __device__ __forceinline__ void put(T& at, const T& value) const {
    if (tile_.first) at = value;
    else take(at, value);
  }
  __device__ __forceinline__ int64_t place() const { return (n * tile_.extent.C + c) * parts_ + tile_.part; }
  template <int K> __device__ __forceinline__ TurnedPoint<K, kReads> point(int row) const {
    return {{tile_.extent, values_, n, c, tile_.extent.C, tile_.position + row, 0, true}, tile_.at, row, column_};
  }
  const Tile& tile_;
  const value_t* values_;
  const unsigned parts_;
  const int column_;
};

// values: v, the tile's or in planes; gradient: where that of v goes.
template <class Pass, bool kReads>
__global__ void __launch_bounds__(kPlaneThreads, kPack * sizeof(real) > 16 ? 2 : 3)
turned_kernel(const Pass pass, const Extent extent, const value_t* values, value_t* gradient, unsigned parts,
              unsigned channel_tiles, bool for_tf32) {
  __shared__ value_t shared[kTilePositions * kTileChannels];
  const unsigned tiles = (unsigned(extent.positions()) + kTilePositions - 1) / kTilePositions;
#pragma unroll 1
  for (unsigned number = 0; blockIdx.x / channel_tiles % parts + number * parts < tiles; number++) {
    const Tile tile(extent, shared, parts, channel_tiles, number);
    if (kReads) tile.load(values);
    if (kReads || number) __syncthreads();  // the tile is there, or the one before is written
    for (int column = threadIdx.x / 32; column < kTileChannels && tile.channel + column < extent.C;
         column += kPlaneThreads / 32) {
      TurnedPlane<kReads> plane(tile, values, parts, column);
      pass(plane);
    }
    __syncthreads();  // all channels are there, and nobody reads the tile any more
    if (!kReads) tile.store(gradient, for_tf32);
  }
}

template <bool kReads, class Pass>
void turned(const Pass& pass, const Extent& extent, const value_t* values, value_t* gradient, int64_t parts, int64_t layout,
            cudaStream_t stream) {
  const int64_t tiles = (extent.C + kTileChannels - 1) / kTileChannels, blocks = extent.N * parts * tiles;
  if (kLast || layout == kPlanes) {
    planes(pass, extent, values, parts, stream);
  } else if constexpr (!kLast) {
    if (!blocks) return;
    turned_kernel<Pass, kReads><<<unsigned(blocks), kPlaneThreads, 0, stream>>>(
        pass, extent, values, gradient, unsigned(parts), unsigned(tiles), layout == kForTf32);
  }
}
template <class Pass>
void units(const Pass& pass, const Extent& extent, const value_t* v, value_t* gradient, int64_t parts, cudaStream_t stream);

// Where v alone is (N, S, C), K positions of it; of nothing else at positions.
template <int K> struct PointOfV : Point<K> {
  __device__ __forceinline__ typename Point<K>::T v() const {
    const value_t* const first = this->values + (this->n * this->extent.positions() + this->position) * this->C + this->c;
    if constexpr (K == 1) return real(*first);
    else return lanes<K>([&](int i) { return real(first[i * this->C]); });
  }
};

// A pass that sums what it makes of v, and writes nothing at positions: turned, it needs no tiles.
template <class Pass>
void sums_of_v(const Pass& pass, const Extent& extent, const value_t* v, int64_t parts, int64_t layout, cudaStream_t stream) {
  if (kLast || layout == kPlanes) planes(pass, extent, v, parts, stream);
  else in_planes<true, LastPlane<false, PointOfV>>(pass, extent, v, parts, stream);
}

// Passes that read v, and one that writes its gradient. Turned, a plane has at most as many parts as kTilePositions.
template <class Pass>
void planes_of_v(const Pass& pass, const Extent& extent, const value_t* v, int64_t parts, int64_t layout, cudaStream_t stream) {
  turned<true>(pass, extent, v, nullptr, parts, layout, stream);
}
template <class Pass>
void planes_to_v(const Pass& pass, const Extent& extent, const value_t* v, value_t* gradient, int64_t parts, int64_t layout,
                 cudaStream_t stream) {
  if constexpr (!kLast)
    if (layout == kUnits) return units(pass, extent, v, gradient, parts, stream);
  turned<false>(pass, extent, v, gradient, parts, layout, stream);
}

// ------------------------------------------------------------------------------------------------- whole arrays, turned
constexpr int kSquare = 64;

// source (N, rows, columns) -> out (N, columns, rows). aligned: rows, columns and both pointers are multiples of a Vector.
__global__ void __launch_bounds__(kPlaneThreads)
transpose_kernel(value_t* out, const value_t* source, int64_t rows, int64_t columns, unsigned row_tiles, unsigned column_tiles,
                 bool for_tf32, bool aligned) {
  constexpr int kLanes = kSquare / kVector, kStep = kPlaneThreads / kLanes, kLoads = kSquare / kStep;
  __shared__ value_t tile[kSquare][kSquare + 1];  // the odd pitch spreads a column over the banks
  const unsigned n = blockIdx.x / column_tiles / row_tiles;  // 32 bits: a division of 64 costs as much as a tile
  const int64_t row0 = int64_t(blockIdx.x / column_tiles % row_tiles) * kSquare;
  const int64_t column0 = int64_t(blockIdx.x % column_tiles) * kSquare, begin = n * rows * columns;
  const int lane = threadIdx.x % kLanes * kVector, step = threadIdx.x / kLanes;
  const bool whole = aligned && row0 + kSquare <= rows && column0 + kSquare <= columns;
  const value_t* const from = source + begin + row0 * columns + column0;
  value_t* const to = out + begin + column0 * rows + row0;
  if (whole) {
    Vector<value_t> four[kLoads];  // all loads are under way before the first is used
#pragma unroll
    for (int k = 0; k < kLoads; k++) four[k] = load_vector(from + (step + k * kStep) * columns + lane);
#pragma unroll
    for (int k = 0; k < kLoads; k++)
#pragma unroll
      for (int i = 0; i < kVector; i++) tile[step + k * kStep][lane + i] = four[k].at[i];
  } else {
    for (int r = step; r < kSquare && row0 + r < rows; r += kStep)
      for (int i = 0; i < kVector && column0 + lane + i < columns; i++) tile[r][lane + i] = from[r * columns + lane + i];
  }
  __syncthreads();  // the tile is complete
  const auto turned = [&](int r, int c) { return for_tf32 ? nearest_tf32(tile[r][c]) : tile[r][c]; };
  if (whole) {
#pragma unroll
    for (int k = 0; k < kLoads; k++) {
      const int c = step + k * kStep;
      Vector<value_t> four;
#pragma unroll
      for (int i = 0; i < kVector; i++) four.at[i] = turned(lane + i, c);
      store_vector(to + c * rows + lane, four);
    }
  } else {
    for (int c = step; c < kSquare && column0 + c < columns; c += kStep)
      for (int i = 0; i < kVector && row0 + lane + i < rows; i++) to[c * rows + lane + i] = turned(lane + i, c);
  }
}

inline void transpose(value_t* out, const value_t* source, int64_t N, int64_t rows, int64_t columns, bool for_tf32,
                      cudaStream_t stream) {
  const unsigned row_tiles = blocks_for(rows, kSquare), column_tiles = blocks_for(columns, kSquare);
  if (const unsigned blocks = unsigned(N) * row_tiles * column_tiles)
    transpose_kernel<<<blocks, kPlaneThreads, 0, stream>>>(out, source, rows, columns, row_tiles, column_tiles, for_tf32,
                                                           vectors_fit(out, rows) && vectors_fit(source, columns));
}

}  // namespace load

#include "load/units.cuh"
