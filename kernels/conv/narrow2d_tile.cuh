// A 2-D convolution of up to 16 channels in, row by row (conv/narrow2d.cuh): tiles of its result v, what a
// block and a warp compute of it, and the block's shared memory.
#pragma once
#include <algorithm>

#include "conv/shape.h"
#include "core/reduce.cuh"
#include "core/split.cuh"
#include "core/tensor_core.cuh"

namespace conv::narrow2d {

using namespace tensor_core;

// kStride: columns from one block's tile to the next; 0 where a block has whole rows, kRowTiles tiles each,
// side by side. kRowGroup: rows of v that belong together. kReadsOn: does a filter see columns behind those
// of the threads?
template <class Filter_, int kStride_, int kRowGroup_, int kRowTiles_ = 1,
          bool kReadsOn_ = (kStride_ + Filter_::kWidth - 1 > 128)>
struct Tile {
  using Filter = Filter_;
  static constexpr int kStride = kStride_, kRowGroup = kRowGroup_, kRowTiles = kRowTiles_;
  static_assert(kRowTiles == 1 || kStride == 0, "a row is cut among blocks, or is one block's");
  static constexpr int kColumns = 128;  // of a team
  static constexpr int kTiles = kColumns / 8;
  static constexpr int kTeamThreads = 128;  // a thread stages a column; a warp owns 16 channels
  static constexpr int kTeams = 2;          // three would leave 168 registers to a thread, which is too few
  static constexpr int kBlockThreads = kTeams * kTeamThreads;
  static constexpr int kBlockChannels = kTeamThreads / 32 * 16;
  static constexpr int kChannelBlocks = (Filter::kOut + kBlockChannels - 1) / kBlockChannels;
  static constexpr int kGroups = (Filter::kIn + 7) / 8;  // of 8 channels in each, zeros behind the last
  static constexpr int kRowColumns = kRowTiles * kColumns;
  static constexpr int kPixels = kRowColumns + 8;    // in shared memory; those behind the tiles stay zero
  static constexpr int kRing = Filter::kHeight + 1;  // rows in shared memory
  static_assert(kColumns == kTeamThreads, "a thread stages a column");
  static_assert(kStride <= kColumns && Filter::kWidth <= 9,
                "a tile's last column reads up to 8 pixels further");
  static constexpr bool kReadsOn = kReadsOn_;

  // Slices of K, 8 channels of a tap, in the order of their addresses; a product takes two. With an odd
  // number, the last is paired with itself: (high, low) of the filter meet the same pixels.
  static constexpr int kSlices = kGroups * Filter::kWidth;  // of a kernel row
  static constexpr int kPairs = kSlices / 2;
  static constexpr bool kOdd = kSlices % 2;
  static constexpr int kFragments = 2 * kPairs + kOdd;
  static constexpr int kPartBytes = kGroups * kPixels * 16;
  static constexpr int kRowBytes = 2 * kPartBytes;  // high, low
  HOST_DEVICE static constexpr int slice_offset(int slice) {
    return (slice / Filter::kWidth * kPixels + slice % Filter::kWidth) * 16;
  }

  // float16 holds a value of 16 bits, scaled: there is no low part, but of what is so small beside the
  // largest that its last bits don't count.
  static constexpr bool kOnePart = sizeof(value_t) == 2;

  struct Geometry {
    int N, H, W, row_tiles, strips, rows;  // a strip has `rows` groups of rows, the last one what is left
    HOST_DEVICE int tiles() const { return kStride ? row_tiles : 1; }
    HOST_DEVICE int strip_blocks() const { return (strips + kTeams - 1) / kTeams; }
    HOST_DEVICE int height() const { return H - Filter::kHeight + 1; }
    HOST_DEVICE int width() const { return W - Filter::kWidth + 1; }
    int64_t blocks() const { return int64_t(N) * kChannelBlocks * tiles() * strip_blocks(); }

    // Columns of v that a row's tile has, where a block has whole rows.
    __device__ __forceinline__ int columns_of(int tile) const {
      return min(kColumns, width() - tile * kColumns);
    }

    // Of x (N, kIn, H, W): what keeps all multiprocessors busy with the fewest rows read twice. Throws where
    // x is none for this build.
    template <class View> static Geometry of(const View& x) {
      const int64_t most = kRowColumns + (kReadsOn ? Filter::kWidth - 1 : 0);
      if (x.dims != 4 || x.size(1) != Filter::kIn || (!kStride && x.size(3) > most))
        throw std::invalid_argument(
            "expected x of the channels and the width that the kernels are compiled for");
      Geometry g{int(x.size(0)), int(x.size(2)), int(x.size(3)), 1, 1, 1};
      if constexpr (kStride > 0) g.row_tiles = (g.width() + kStride - 1) / kStride;
      const int multiprocessors = device_attribute(cudaDevAttrMultiProcessorCount);
      const int groups = g.height() / kRowGroup;
      const int64_t row = int64_t(g.N) * kChannelBlocks * g.tiles();  // blocks, if a block had all rows
      // Rows that the busiest multiprocessor reads, of `pairs` strips for each team.
      const auto rows_read = [&](int64_t pairs) {
        const int64_t strip = (groups + kTeams * pairs - 1) / (kTeams * pairs);
        return (row * pairs + multiprocessors - 1) / multiprocessors *
               (strip * kRowGroup + Filter::kHeight + 3);
      };
      int64_t pairs = 1;
      for (int64_t more = 2; row && more <= (kTeams * multiprocessors + row - 1) / row; more++)
        if (rows_read(more) < rows_read(pairs)) pairs = more;
      if (!groups) throw std::invalid_argument("expected an x with a whole group of rows of results");
      const int parts = int(std::min<int64_t>(groups, kTeams * pairs));
      g.rows = (groups + parts - 1) / parts, g.strips = (groups + g.rows - 1) / g.rows;
      return g;
    }
  };

  // What a block computes, a team's strip of it. Grid: strips by kTeams, tiles, channel blocks, samples, the
  // first fastest.
  struct Job {
    int strip, tile, first_channel, n;
    int row_begin, row_end, turns;  // rows of v; of the block's longest strip
    int column, columns;            // that are this tile's
    __device__ __forceinline__ Job(Geometry geometry, int team) {
      const int strip_blocks = geometry.strip_blocks(), tiles = geometry.tiles();
      const unsigned job = blockIdx.x / strip_blocks;
      strip = blockIdx.x % strip_blocks * kTeams + team, tile = job % tiles;
      first_channel = job / tiles % kChannelBlocks * kBlockChannels, n = job / tiles / kChannelBlocks;
      row_begin = strip * geometry.rows * kRowGroup;
      const int past_last = strip >= geometry.strips ? row_begin : row_begin + geometry.rows * kRowGroup;
      row_end = strip == geometry.strips - 1 ? geometry.height() : past_last;
      const bool last_strips = blockIdx.x % strip_blocks == strip_blocks - 1;
      turns = geometry.rows * kRowGroup + (last_strips ? geometry.height() % kRowGroup : 0);
      column = tile * kStride;
      columns = tile == tiles - 1 ? geometry.width() - column : kStride;
    }
  };

  struct Storage {  // beside the teams' dynamic shared memory
    // Of a channel: two factors of a power of two, the first with the filter's sign.
    float2 unscale[kBlockChannels];
    int filter_exponent[kBlockChannels];
    bool flipped[kBlockChannels];
    int largest;  // magnitude of x, as bits
  };

  // What a sink is told of a warp's 16 channels × its team's strip.
  struct Place {
    static constexpr int kChannels = Filter::kOut;
    const Storage& storage;
    const Geometry& geometry;
    const Job& job;
    const int first_own;  // of the block's channels
    const int64_t first;  // channel, counted through the samples
    int columns;          // of the tile that is accepted
    __device__ __forceinline__ Place(const Storage& storage, const Geometry& geometry, const Job& job,
                                     int first_own)
        : storage(storage), geometry(geometry), job(job), first_own(first_own),
          first(int64_t(job.n) * kChannels + job.first_channel + first_own), columns(job.columns) {}
    __device__ __forceinline__ int64_t sample() const { return job.n; }
    __device__ __forceinline__ int height() const { return geometry.height(); }  // of v
    __device__ __forceinline__ int width() const { return geometry.width(); }
    __device__ __forceinline__ int row() const { return job.row_begin; }  // the first
    __device__ __forceinline__ int rows() const { return job.row_end - job.row_begin; }
    __device__ __forceinline__ int column() const { return job.column; }
    __device__ __forceinline__ int channel(int own) const { return job.first_channel + first_own + own; }
    __device__ __forceinline__ bool real(int own) const {
      return kChannels % kBlockChannels == 0 || channel(own) < kChannels;
    }
    // What v of a channel is to be multiplied by: both.
    __device__ __forceinline__ float2 unscale(int own) const { return storage.unscale[first_own + own]; }
    // Waits for all threads of the team, in a sink's functions.
    __device__ __forceinline__ void sync_team() const {
      sync_threads<kTeamThreads>(1 + kTeams + threadIdx.x / kTeamThreads);
    }
    // Parts that each channel of a sample is computed in, and which this is, if it is one.
    __device__ __forceinline__ int parts() const { return geometry.tiles() * geometry.strips; }
    __device__ __forceinline__ int part() const { return job.tile * geometry.strips + job.strip; }
    __device__ __forceinline__ bool is_part() const { return job.strip < geometry.strips; }
  };
};

}  // namespace conv::narrow2d
