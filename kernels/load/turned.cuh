// One array channels last (N, S, C), while all others are (N, C, S). It is on the side of a convolution,
// which a GPU's library runs fastest so where it runs on tensor cores: v or its gradient behind one, y or its
// gradient in front of one.
//
// A block turns tiles of positions and channels through shared memory, one after the other: all that are its
// part of some planes. A warp has kRowVector channels of a tile, and a lane of these kPack neighbouring
// positions at a time, or, where planes have no multiple of those, two or one. C is a multiple of kRowVector.
#pragma once
#include <algorithm>
#include <initializer_list>

#include "core/matrix_tile.cuh"
#include "core/vector.cuh"
#include "load/planes.cuh"

namespace load {

// Arrays' layouts, as launchers are told.
enum Layout : int64_t {
  kPlanes,   // all (N, C, S)
  kTurned,   // one, on a convolution's side, (N, S, C)
  kForTf32,  // … and that convolution's operands rounded to TF32, by nearest_tf32
  kUnits,    // the gradient of v in units, see load/units.cuh
};

constexpr int kTilePositions = 32 * kPack, kTileChannels = 128 / sizeof(value_t),
              kRowVector = 16 / sizeof(value_t);

// Where a tile has an element: a channel's positions side by side, kPack of them in 16 bytes, which are
// turned so that lanes at kRowVector channels of the same positions meet other banks, and lanes at a channel
// and the next where these have half of the banks each. What lies in one 32-bit word moves as one: kPair
// positions.
constexpr int kPair = sizeof(value_t) < 4 ? 2 : 1;
__device__ __forceinline__ int slot(int position, int channel) {
  const int aside = channel / kRowVector + (kPair > 1 ? channel % 2 * 4 : 0);
  return channel * kTilePositions + (position / kPack + aside) % 32 * kPack + position % kPack;
}
template <int K>
__device__ __forceinline__ Memory<value_t, K>& neighbours(value_t* tile, int position, int channel) {
  return *reinterpret_cast<Memory<value_t, K>*>(tile + slot(position, channel));
}

// Of sample n, the positions and channels from `position` and `channel` on. first: the first of the block's.
struct Tile {
  const Extent& extent;
  value_t* const at;
  const unsigned n, part;
  const int channel, position;
  const bool first;

  static constexpr int kLanes = kTileChannels / kRowVector, kStep = kPlaneThreads / kLanes,
                       kRows = kTilePositions / kStep;
  // number: of those of a block.
  __device__ Tile(unsigned block, const Extent& extent, value_t* at, unsigned parts, unsigned channel_tiles,
                  unsigned number)
      : extent(extent), at(at), n(block / channel_tiles / parts), part(block / channel_tiles % parts),
        channel(int(block % channel_tiles) * kTileChannels),
        position(int(part + number * parts) * kTilePositions), first(number == 0) {}
  __device__ Tile(const Extent& extent, value_t* at, unsigned n, unsigned part, int channel)
      : extent(extent), at(at), n(n), part(part), channel(channel), position(int(part) * kTilePositions),
        first(true) {}

  __device__ __forceinline__ void load(const value_t* from) const {
    Memory<value_t, kRowVector> rows[kRows];  // all loads are under way before the first is used
    each_row([&](int64_t offset, int k) {
      rows[k] = *reinterpret_cast<const Memory<value_t, kRowVector>*>(from + offset);
    });
    each_pair([&](int k) {
#pragma unroll
      for (int i = 0; i < kRowVector; i++) {
        Memory<value_t, kPair> pair;
#pragma unroll
        for (int j = 0; j < kPair; j++) pair.at[j] = rows[k + j].at[i];
        neighbours<kPair>(at, row(k), lane() + i) = pair;
      }
    });
  }
  __device__ __forceinline__ void store(value_t* to, bool for_tf32) const {
    Memory<value_t, kRowVector> rows[kRows];
    each_pair([&](int k) {
#pragma unroll
      for (int i = 0; i < kRowVector; i++) {
        const Memory<value_t, kPair> pair = neighbours<kPair>(at, row(k), lane() + i);
#pragma unroll
        for (int j = 0; j < kPair; j++) rows[k + j].at[i] = for_tf32 ? nearest_tf32(pair.at[j]) : pair.at[j];
      }
    });
    each_row([&](int64_t offset, int k) {
      *reinterpret_cast<Memory<value_t, kRowVector>*>(to + offset) = rows[k];
    });
  }

 private:
  __device__ __forceinline__ int lane() const { return threadIdx.x % kLanes * kRowVector; }
  __device__ __forceinline__ int row(int k) const {
    return (threadIdx.x / kLanes + k / kPair * kStep) * kPair + k % kPair;
  }
  __device__ __forceinline__ bool has(int k) const {
    return position + row(k) < extent.positions() && channel + lane() < int(extent.C);
  }
  template <class F> __device__ __forceinline__ void each_row(const F& f) const {
    const int S = extent.positions(), C = int(extent.C);
#pragma unroll
    for (int k = 0; k < kRows; k++)
      if (has(k)) f((int64_t(n) * S + position + row(k)) * C + channel + lane(), k);
  }
  // Of a pair the second may stand behind the last position.
  template <class F> __device__ __forceinline__ void each_pair(const F& f) const {
#pragma unroll
    for (int k = 0; k < kRows; k += kPair)
      if (has(k)) f(k);
  }
};

// Which array is the tile's.
enum class Tiled { kV, kRead, kWritten };

template <int K, Tiled tiled> struct TurnedPoint : Point<K> {
  value_t* tile;
  int row, column;  // of the tile; row: a multiple of K
  __device__ __forceinline__ typename Point<K>::T v() const {
    if constexpr (tiled == Tiled::kV) return of_tile();
    else return Point<K>::v();
  }
  __device__ __forceinline__ typename Point<K>::T turned(const value_t*) const { return of_tile(); }
  template <class X> __device__ __forceinline__ void write_turned(value_t*, const X& x) const {
    Memory<value_t, K> values;
#pragma unroll
    for (int i = 0; i < K; i++) values.at[i] = value_t(lane_of(x, i));
    neighbours<K>(tile, row, column) = values;
  }
  template <class E, class X> __device__ __forceinline__ void write_operand(E* to, const X& x) const {
    if constexpr (tiled == Tiled::kWritten) write_turned(to, x);
    else Point<K>::write_operand(to, x);
  }

 private:
  __device__ __forceinline__ typename Point<K>::T of_tile() const {
    const Memory<value_t, K> values = neighbours<K>(tile, row, column);
    if constexpr (K == 1) return real(values.at[0]);
    else return lanes<K>([&](int i) { return real(values.at[i]); });
  }
};

// A lane's share of a plane in a tile: of kRowVector channels of a warp one, and, kPack at a time, of its
// positions those that kLanes lanes have in turn. kAtOnce: of those, where registers hold them.
template <Tiled tiled, int kAtOnce> class TurnedPlane {
  static constexpr int kLanes = 32 / kRowVector;
  static_assert(kTileChannels == kPlaneThreads / kLanes);

 public:
  const int64_t n, c;
  __device__ TurnedPlane(const Tile& tile, const value_t* values, unsigned parts)
      : n(tile.n), c(tile.channel + int(threadIdx.x) / kLanes), tile_(tile), values_(values), parts_(parts) {}
  // The same for a warp.
  __device__ __forceinline__ bool is_there() const { return c < tile_.extent.C; }

  template <class F> __device__ __forceinline__ void each(const F& f) const {
    const int left = min(tile_.extent.positions() - tile_.position, kTilePositions);
    constexpr int kStep = kLanes * kPack;
    int row = int(threadIdx.x) % kLanes;
    if (tile_.extent.positions() % kPack) {
      if (kPair > 1 && tile_.extent.positions() % kPair == 0) {
        for (row *= kPair; row < left; row += kLanes * kPair) f(point<kPair>(row));
        return;
      }
      for (; row < left; row += kLanes) f(point<1>(row));
      return;
    }
    row *= kPack;
    if constexpr (kAtOnce > 1) {
#pragma unroll 1
      for (; row + (kAtOnce - 1) * kStep < left; row += kAtOnce * kStep)
#pragma unroll
        for (int i = 0; i < kAtOnce; i++) f(point<kPack>(row + i * kStep));
    }
#pragma unroll 1
    for (; row < left; row += kStep) f(point<kPack>(row));
  }
  __device__ __forceinline__ Sum sum() const { return {}; }
  __device__ __forceinline__ ShiftedSums moments() const { return {}; }
  __device__ __forceinline__ LargestOf<false> largest() const { return {}; }
  __device__ __forceinline__ LargestOf<false> largest_value() const { return {}; }
  __device__ __forceinline__ LargestOf<true> pool_largest() const { return {}; }
  __device__ void reduce(double* out, Sum& sum) const {
    const double value = of_lanes(sum.value(), kLanes);
    if (threadIdx.x % kLanes == 0) put(out[place()], value);
  }
  __device__ void reduce(Moments<double>* out, const ShiftedSums& sums) const {
    const Moments<double> value = of_lanes(sums, kLanes);
    if (threadIdx.x % kLanes == 0) put(out[place()], value);
  }
  template <bool kPool> __device__ void reduce(Largest<kPool>* out, const LargestOf<kPool>& own) const {
    const Largest<kPool> value = of_lanes(own.value(), kLanes);
    if (threadIdx.x % kLanes == 0) put(out[place()], value);
  }

 private:
  // One lane has a channel's in all tiles.
  template <class T> __device__ __forceinline__ void put(T& at, const T& value) const {
    if (tile_.first) at = value;
    else take(at, value);
  }
  __device__ __forceinline__ int64_t place() const { return (n * tile_.extent.C + c) * parts_ + tile_.part; }
  template <int K> __device__ __forceinline__ TurnedPoint<K, tiled> point(int row) const {
    return {{tile_.extent, values_, n, c, tile_.extent.C, tile_.position + row, 0, true},
            tile_.at,
            row,
            int(threadIdx.x) / kLanes};
  }
  const Tile& tile_;
  const value_t* values_;
  const unsigned parts_;
};

// Blocks of a multiprocessor, at least: more of a pass that computes little, and has little by channel. And
// of how many points a lane reads before it computes.
template <class Pass>
constexpr bool kIsLight = !Last<Pass>::is_much && Last<Pass>::held < 5 && !has_windows<Pass>;
template <class Pass>
constexpr int kTurnedBlocks = sizeof(real) > 4       ? 2
                              : kPack > 4            ? 2 + kIsLight<Pass>
                              : Last<Pass>::held < 9 ? 3 + kIsLight<Pass>
                                                     : 2;
template <class Pass> constexpr int kTurnedAtOnce = sizeof(real) == 4 && Last<Pass>::held < 10 ? 2 : 1;

// values: v in planes, where it is not the tile's. source, target: what is channels last.
template <class Pass, Tiled tiled, Order order>
__global__ void __launch_bounds__(kPlaneThreads, kTurnedBlocks<Pass>)
    turned_kernel(const Pass pass, const Extent extent, const value_t* values, const value_t* source,
                  value_t* target, unsigned parts, unsigned channel_tiles, bool for_tf32) {
  await_previous_kernel();
  constexpr bool kReads = tiled != Tiled::kWritten;
  __shared__ __align__(16) value_t shared[kTilePositions * kTileChannels];
  const unsigned tiles = (unsigned(extent.positions()) + kTilePositions - 1) / kTilePositions;
#pragma unroll 1
  for (unsigned number = 0; block<order>() / channel_tiles % parts + number * parts < tiles; number++) {
    const Tile tile(block<order>(), extent, shared, parts, channel_tiles, number);
    if (kReads) tile.load(source);
    if (kReads || number) __syncthreads();  // the tile is there, or the one before is written
    TurnedPlane<tiled, kTurnedAtOnce<Pass>> plane(tile, values, parts);
    if (plane.is_there()) pass(plane);
    __syncthreads();  // all channels are there, and nobody reads the tile any more
    if (!kReads) tile.store(target, for_tf32);
  }
}

template <Tiled tiled, class Pass, Order order>
void turned(const Pass& pass, const Extent& extent, const value_t* values, const value_t* source,
            value_t* target, Parts<order> parts, int64_t layout, cudaStream_t stream) {
  const int64_t tiles = (extent.C + kTileChannels - 1) / kTileChannels,
                blocks = extent.N * parts.count * tiles;
  if (kLast || layout == kPlanes) {
    planes(pass, extent, values, parts, stream);
  } else if constexpr (!kLast) {
    if (!blocks) return;
    launch_early(turned_kernel<Pass, tiled, order>, blocks, kPlaneThreads, stream, pass, extent, values,
                 source, target, unsigned(parts.count), unsigned(tiles), layout == kForTf32);
  }
}
template <class Pass>
void units(const Pass& pass, const Extent& extent, const value_t* v, value_t* gradient, int64_t parts,
           cudaStream_t stream);

// A pass that sums what it makes of v, and writes nothing at positions: turned, it needs no tiles.
template <class Pass, Order order>
void sums_of_v(const Pass& pass, const Extent& extent, const value_t* v, Parts<order> parts, int64_t layout,
               cudaStream_t stream) {
  if (kLast || layout == kPlanes) planes(pass, extent, v, parts, stream);
  else in_last_planes<Last<Pass>::channels>(pass, extent, v, parts, stream);
}

// Passes that read v, and one that writes its gradient. Turned, a plane has at most as many parts as
// kTilePositions.
template <class Pass, Order order>
void planes_of_v(const Pass& pass, const Extent& extent, const value_t* v, Parts<order> parts, int64_t layout,
                 cudaStream_t stream) {
  turned<Tiled::kV>(pass, extent, v, v, nullptr, parts, layout, stream);
}
template <class Pass, Order order>
void planes_to_v(const Pass& pass, const Extent& extent, const value_t* v, value_t* gradient,
                 Parts<order> parts, int64_t layout, cudaStream_t stream) {
  if constexpr (!kLast)
    if (layout == kUnits) return units(pass, extent, v, gradient, parts.count, stream);  // up
  turned<Tiled::kWritten>(pass, extent, v, nullptr, gradient, parts, layout, stream);
}

// In front of a convolution a pass that writes what that reads, and those that read its gradient.
template <class Pass, Order order>
void planes_to_y(const Pass& pass, const Extent& extent, const value_t* v, value_t* y, Parts<order> parts,
                 int64_t layout, cudaStream_t stream) {
  turned<Tiled::kWritten>(pass, extent, v, nullptr, y, parts, layout, stream);
}
template <class Pass, Order order>
void planes_of_dy(const Pass& pass, const Extent& extent, const value_t* v, const value_t* dy,
                  Parts<order> parts, int64_t layout, cudaStream_t stream) {
  turned<Tiled::kRead>(pass, extent, v, dy, nullptr, parts, layout, stream);
}

// ------------------------------------------------------------------------------- whole arrays, turned

// A tile has at most kWords words, each with kPair neighbouring columns: whole rows or whole columns where
// these are short, else at most kWide words by kTall rows. A thread has a few jobs: kVector neighbours of a
// row or a column, or one where they don't fit. kRoom: with a word behind each row. Few columns, as filters
// have, or few rows are one run of a tile's memory, which is read, or written, as it lies: an odd number of
// columns, since an even one would have lanes meet in few banks (in 16 bits more are turned by matrices); of
// rows that vectors don't fit.
constexpr int kWide = 64, kTall = kWide * kPair, kWords = kWide * kWide, kRoom = kWords + kTall,
              kFewRows = 63, kFewColumns = kPair > 1 ? 25 : 63;

// Of jobs, `size` in a row, the row: job / size, where neither is above 2^15.
struct Jobs {
  unsigned size = 0, inverse = 0;
  Jobs() = default;
  explicit Jobs(int64_t size) : size(unsigned(size)), inverse((1u << 31) / unsigned(size) + 1) {}
  __device__ __forceinline__ unsigned row(unsigned job) const {
    return unsigned(uint64_t(job) * inverse >> 31);
  }
};
// Which of a source's columns are turned: each, or of images of so many columns each `across`-th of each
// `down`-th row, `width` in a row.
struct Picked {
  unsigned columns = 0, image_columns = 0, width = 0, down = 0,
           across = 0;  // columns: of the source; width 0: each of them
  __device__ __forceinline__ unsigned column(unsigned c) const {
    return width ? c / width * down * image_columns + c % width * across : c;
  }
};
// height, width: of a tile; width and pitch in words. Rows and columns are below 2^32.
struct Turning {
  unsigned rows, columns, row_tiles, column_tiles, height, width, pitch;
  bool loads_vectors, stores_vectors, loads_runs, stores_runs, by_matrices;
  bool aligned;        // do eights of columns lie so?
  Jobs loads, stores;  // in a row of a tile, and in a column
  Picked picked;
};

// A tile, of which `rows` and `columns` are there. An odd pitch spreads a column over the banks. Some jobs at
// a time all read, before the first's result is used; those of none read the last element.
struct TurnedTile {
  using Word = Memory<value_t, kPair>;
  const Turning& turning;
  Word* const at;
  const unsigned rows, columns;

  // from: the tile's first row; the tile begins at its column `first`.
  template <int K> __device__ __forceinline__ void load(const value_t* from, unsigned first) const {
    constexpr int kPart = K < kPair ? K : kPair;
    using Part = Memory<value_t, kPart>;
    Memory<value_t, K> values[kLoads<K>];
    each<kLoads<K>>(
        turning.loads, rows,
        [&](int k, unsigned r, unsigned c) {
          const unsigned column = first + min(c * K, columns - K);
          const int64_t place = uint64_t(min(r, rows - 1)) * turning.picked.columns +
                                (K > 1 ? column : turning.picked.column(column));
          values[k] = *reinterpret_cast<const Memory<value_t, K>*>(from + place);
        },
        [&](int k, unsigned r, unsigned c) {
          if (r >= rows || c * K >= columns) return;
#pragma unroll
          for (int i = 0; i < K; i += kPart)
            reinterpret_cast<Part&>(at[r * turning.pitch].at[c * K + i]) =
                reinterpret_cast<const Part&>(values[k].at[i]);
        });
  }
  // The same of a run of memory, a vector of 16 bytes behind the other.
  __device__ __forceinline__ void load_run(const value_t* from) const {
    constexpr unsigned kAtOnce = 4;
    const unsigned count = rows * columns / kRowVector;
    uint4 values[kAtOnce];
#pragma unroll 1
    for (unsigned first = threadIdx.x; first < count; first += kAtOnce * kPlaneThreads) {
#pragma unroll
      for (unsigned k = 0; k < kAtOnce; k++)
        values[k] = reinterpret_cast<const uint4*>(from)[min(first + k * kPlaneThreads, count - 1)];
#pragma unroll
      for (unsigned k = 0; k < kAtOnce; k++)
        if (first + k * kPlaneThreads < count)
          reinterpret_cast<uint4*>(at)[first + k * kPlaneThreads] = values[k];
    }
  }
  // Columns of what a run was loaded to.
  __device__ __forceinline__ void store_columns(value_t* to, bool for_tf32) const {
    const value_t* const run = reinterpret_cast<const value_t*>(at);
#pragma unroll 1
    for (unsigned job = threadIdx.x; job < columns * turning.stores.size; job += kPlaneThreads) {
      const unsigned c = turning.stores.row(job), r = (job - c * turning.stores.size) * kRowVector;
      if (r < rows)
        put_rounded(to + uint64_t(c) * turning.rows + r, for_tf32,
                    [&](int i) { return run[(r + i) * columns + c]; });
    }
  }
  // All columns, of all rows that there are: a run of memory.
  __device__ __forceinline__ void store_run(value_t* to, bool for_tf32) const {
    const value_t* const tile = reinterpret_cast<const value_t*>(at);
#pragma unroll 1
    for (unsigned first = threadIdx.x * kRowVector; first < rows * columns;
         first += kPlaneThreads * kRowVector) {
      unsigned c = turning.stores.row(first), r = first - c * rows;
      put_rounded(to + first, for_tf32, [&](int) {
        const value_t value = tile[r * turning.pitch * kPair + c];
        if (++r == rows) r = 0, c++;
        return value;
      });
    }
  }
  template <int K> __device__ __forceinline__ void store(value_t* to, bool for_tf32) const {
    Memory<value_t, K> values[kStores][kPair];
    each<kStores>(
        turning.stores, (columns + kPair - 1) / kPair,
        [&](int k, unsigned c, unsigned r) {
          const Word* const from = at + min(r * K, rows - K) * turning.pitch + min(c, (columns - 1) / kPair);
#pragma unroll
          for (int i = 0; i < K; i++)
#pragma unroll
            for (int j = 0; j < kPair; j++) values[k][j].at[i] = from[i * turning.pitch].at[j];
        },
        [&](int k, unsigned c, unsigned r) {
#pragma unroll
          for (int j = 0; j < kPair; j++) {
            if (r * K >= rows || c * kPair + j >= columns) return;
            if (for_tf32)
#pragma unroll
              for (int i = 0; i < K; i++) values[k][j].at[i] = nearest_tf32(values[k][j].at[i]);
            put(to + uint64_t(c * kPair + j) * turning.rows + r * K, values[k][j]);
          }
        });
  }

 private:
  // A vector of value(0), value(1) …
  template <class F>
  static __device__ __forceinline__ void put_rounded(value_t* to, bool for_tf32, const F& value) {
    Memory<value_t, kRowVector> values;
#pragma unroll
    for (int i = 0; i < kRowVector; i++) {
      const value_t own = value(i);
      values.at[i] = for_tf32 ? nearest_tf32(own) : own;
    }
    put(to, values);
  }
  static constexpr int kStores = kPair;
  template <int K> static constexpr int kLoads = K == 1 && kPair == 1 ? 8 : 4;
  // reads(k, row, place in it) and then uses(…) of a thread's jobs, `count` rows of them, kAtOnce at a time.
  template <int kAtOnce, class F, class G>
  static __device__ __forceinline__ void each(const Jobs& jobs, unsigned count, const F& reads,
                                              const G& uses) {
    const auto all = [&](unsigned first, const auto& f) {
#pragma unroll
      for (int k = 0; k < kAtOnce; k++) {
        const unsigned job = first + k * kPlaneThreads, row = jobs.row(job);
        if (job - threadIdx.x < count * jobs.size) f(k, row, job - row * jobs.size);
      }
    };
#pragma unroll 1
    for (unsigned first = threadIdx.x; first < count * jobs.size; first += kAtOnce * kPlaneThreads)
      all(first, reads), all(first, uses);
  }
};

// source (N, rows, columns) -> out (N, columns, rows), by so many blocks.
struct Turn {
  value_t* out;
  const value_t* source;
  Turning turning;
  unsigned blocks;
};
constexpr int kTurns = 8;  // of a launch, at most
struct Turns {
  Turn of[kTurns];
};

__global__ void __launch_bounds__(kPlaneThreads, sizeof(value_t) > 4 ? 3 : 5)
    transpose_kernel(const __grid_constant__ Turns turns, bool for_tf32) {
  await_previous_kernel();
  __shared__ __align__(16) value_t shared[kRoom * kPair];
  unsigned which = 0, block = blockIdx.x;
  while (block >= turns.of[which].blocks) block -= turns.of[which++].blocks;
  const Turn& turn = turns.of[which];
  const Turning& turning = turn.turning;
  value_t* const out = turn.out;
  const value_t* const source = turn.source;
  const unsigned n =
      block / turning.column_tiles / turning.row_tiles;  // 32 bits: a division of 64 costs as much as a tile
  const int64_t row = int64_t(block / turning.column_tiles % turning.row_tiles) * turning.height;
  const int64_t column = int64_t(block % turning.column_tiles) * turning.width * kPair;
  const int64_t begin = int64_t(n) * turning.rows;
  const auto within = [](unsigned size, int64_t left) { return left < size ? unsigned(left) : size; };
  const unsigned rows = within(turning.height, turning.rows - row),
                 columns = within(turning.width * kPair, turning.columns - column);
  const value_t* const from = source + (begin + row) * turning.picked.columns;
  value_t* const to = out + begin * turning.columns + column * turning.rows + row;
  if constexpr (sizeof(value_t) == 2) {
    if (turning.by_matrices) {
      const MatrixTile<value_t, kPlaneThreads> tile{reinterpret_cast<uint4*>(shared), rows, columns};
      if (turning.aligned) tile.template load<true>(from + column, turning.columns);
      else tile.template load<false>(from + column, turning.columns);
      __syncthreads();  // the tile is complete
      tile.store(to, turning.rows, rows);
      return;
    }
  }
  const TurnedTile tile{turning, reinterpret_cast<TurnedTile::Word*>(shared), rows, columns};
  if (turning.loads_runs) {
    tile.load_run(from);
    __syncthreads();  // the tile is complete
    tile.store_columns(to, for_tf32);
    return;
  }
  if (turning.loads_vectors) tile.load<kVector>(from, unsigned(column));
  else tile.load<1>(from, unsigned(column));
  __syncthreads();  // the tile is complete
  if (turning.stores_runs) tile.store_run(to, for_tf32);
  else if (turning.stores_vectors) tile.store<kVector>(to, for_tf32);
  else tile.store<1>(to, for_tf32);
}

// A tile's part of a side: all, or, at most `most`, so that tiles are about alike, in multiples of `unit`.
inline int64_t share_of(int64_t size, int64_t most, int64_t unit) {
  if (size <= most) return size;
  const int64_t tiles = blocks_for(size, int(most / unit * unit));
  return ((size + tiles - 1) / tiles + unit - 1) / unit * unit;
}

inline Turn turn_of(value_t* out, const value_t* source, int64_t N, int64_t rows, int64_t columns,
                    Picked picked) {
  if (!(N * rows * columns)) return {};
  constexpr int kSector = 32 / sizeof(value_t);
  const bool loads_vectors = !picked.width && vectors_fit(source, columns),
             stores_vectors = vectors_fit(out, rows), whole = !picked.width && uint64_t(out) % 16 == 0,
             fits = whole && rows % kRowVector == 0,
             loads_runs = fits && columns <= kFewColumns && columns % 2 && uint64_t(source) % 16 == 0,
             by_matrices = fits && !loads_runs && sizeof(value_t) == 2,
             stores_runs = whole && rows <= kFewRows && rows % kVector && columns % kRowVector == 0;
  const int64_t words = (columns + kPair - 1) / kPair;
  const int64_t most = words > kWide ? kWords / std::min<int64_t>(rows, kTall) : kWide;
  const int64_t width = share_of(words, by_matrices ? kMatrixColumns / kPair : most, kSector / kPair),
                pitch = width | 1;
  const int64_t height = share_of(rows,
                                  loads_runs    ? kWords * kPair / columns
                                  : by_matrices ? kMatrixRows
                                                : std::min(kRoom / pitch, kWords / width),
                                  kSector);
  const unsigned row_tiles = blocks_for(rows, int(height)), column_tiles = blocks_for(words, int(width));
  const Jobs loads(width * kPair / (loads_vectors ? kVector : 1)),
      stores(loads_runs ? height / kRowVector : height / (stores_vectors ? kVector : 1));
  const Turning turning{unsigned(rows),
                        unsigned(columns),
                        row_tiles,
                        column_tiles,
                        unsigned(height),
                        unsigned(width),
                        unsigned(pitch),
                        loads_vectors,
                        stores_vectors,
                        loads_runs,
                        stores_runs,
                        by_matrices,
                        columns % 8 == 0 && uint64_t(source) % 16 == 0,
                        loads,
                        stores,
                        picked};
  return {out, source, turning, unsigned(N) * row_tiles * column_tiles};
}
inline Turn turn_of(value_t* out, const value_t* source, int64_t N, int64_t rows, int64_t columns) {
  if (rows == 1 || columns == 1) rows *= N * columns, N = columns = 1;  // elements stay where they are
  return turn_of(out, source, N, rows, columns, Picked{unsigned(columns)});
}
inline void turn(std::initializer_list<Turn> all, bool for_tf32, cudaStream_t stream) {
  Turns turns{};
  std::copy(all.begin(), all.end(), turns.of);
  unsigned blocks = 0;
  for (const Turn& each : all) blocks += each.blocks;
  if (blocks) launch_early(transpose_kernel, blocks, kPlaneThreads, stream, turns, for_tf32);
}
// source (N, rows, height, width) -> out (N, positions, rows), of each down-th row and each across-th column.
inline void transpose_picked(value_t* out, const value_t* source, int64_t N, int64_t rows, int64_t height,
                             int64_t width, int64_t down, int64_t across, bool for_tf32,
                             cudaStream_t stream) {
  const int64_t columns = (width - 1) / across + 1, positions = ((height - 1) / down + 1) * columns;
  const Picked picked{unsigned(height * width), unsigned(width), unsigned(columns), unsigned(down),
                      unsigned(across)};
  turn({turn_of(out, source, N, rows, positions, picked)}, for_tf32, stream);
}

}  // namespace load

#include "load/units.cuh"
