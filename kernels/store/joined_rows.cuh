// A sink that stores a wide convolution's rows of several tiles (store/rows.cuh) where a block computes all
// of a row, but not one after the other: of a sector that two tiles share, the first one's part waits in
// global memory for the second one, which writes the sector. A warp's rows run on likewise, through a band.
// Only the other beginnings and ends of rows are written by elements.
#pragma once
#include "conv/wide_sm90_pipeline.cuh"
#include "host/tensor.h"
#include "store/rows.cuh"

namespace conv {

// As conv::TileScheduler, but blocks share all rows evenly, and tiles are counted through bands of up to
// kBandRows rows of a sample, strips of a band from right to left, and rows. Only the first tile of a strip
// is asked for.
constexpr int kBandRows = 32;
struct BandScheduler {
  int OH, strips, begin, end;
  template <class Arguments>
  __device__ __forceinline__ explicit BandScheduler(const Arguments& args)
      : OH(args.height()), strips(ceil_div(args.width(), kTileWidth)) {
    const int rows = int(args.N) * OH;
    begin = int(int64_t(rows) * blockIdx.x / gridDim.x) * strips;
    end = int(int64_t(rows) * (blockIdx.x + 1) / gridDim.x) * strips;
  }
  struct Place : TilePlace {
    int rows;
  };  // of the band
  __device__ __forceinline__ Place operator[](int tile) const {
    // A row of the tile's band, since bands have whole rows; and the band's first one.
    const int row = tile / strips, n = row / OH,
              first = row - (row - max(begin / strips, n * OH)) % kBandRows;
    const int rows = min(first + kBandRows, min((n + 1) * OH, end / strips)) - first;
    const int strip = strips - 1 - (tile - first * strips) / rows;
    return {{n, strip * kTileWidth, first - n * OH}, rows};
  }
  __device__ __forceinline__ int count(int, const Place& place) const { return place.rows; }
  __device__ __forceinline__ int stop(int tile, const Place& place) const { return tile + place.rows; }
};

}  // namespace conv

namespace store {

template <class T> struct JoinedRows : Rows<T> {
  // Whole sectors, too: [block][row of a band][16 channels][where its tiles meet; where the next row meets
  // it][channel] [half of a sector].
  uint4* waiting;
  static constexpr bool kJoins = true;
  using Tiles = conv::BandScheduler;
  using Rows<T>::kSector, Rows<T>::kPitch;
  static constexpr int kOfWarp = 2 * 32;  // in a row
  template <int kBlockChannels> static constexpr int kOfRow = kBlockChannels / 16 * kOfWarp;

  // What waits of a convolution's rows, so wide, in units.
  template <int kBlockChannels> static int64_t units(const dim3& grid, int width) {
    conv::expect((width - 1) % conv::kTileWidth + 1 >= kSector,
                 "a row whose last tile has a sector at least");
    return int64_t(grid.x) * grid.y * conv::kBandRows * kOfRow<kBlockChannels>;
  }

#if TENSOR_CORE_WGMMA
  // How the first or the last sector of a tile becomes whole: not at all; by a later tile, for which this
  // one's part waits in `at`; by this one, for which a part waits there. at: the lane's, half of its
  // channel's sector.
  enum Share { kAlone, kGives, kTakes };
  struct End {
    Share share;
    uint4* at;
  };
  struct Ends {
    End left, right;
  };

  // Of a warp's tile in row `line` of its band. kWhole: does a consumer have all rows, so that ends of rows
  // are joined, too?
  template <int kBlockChannels, bool kWhole>
  __device__ __forceinline__ Ends ends(const conv::BandScheduler::Place& place, int line, int local_channel,
                                       int OW) const {
    const int block = blockIdx.y * gridDim.x + blockIdx.x;
    const int lane = thread_index_anew() % 32, half = lane % 16 * 2 + lane / 16;
    const int of_warp = local_channel / 16 * kOfWarp + half;
    uint4* const meet = waiting + ((block * conv::kBandRows + line) * kOfRow<kBlockChannels> + of_warp);
    uint4* const below = meet + kOfWarp / 2;
    Ends ends{{kGives, meet}, {kTakes, meet}};
    const bool above = kWhole && line > 0, under = kWhole && line + 1 < place.rows;
    if (place.column == 0) ends.left = {above ? kTakes : kAlone, below - kOfRow<kBlockChannels>};
    if (place.column + conv::kTileWidth >= OW) ends.right = {under ? kGives : kAlone, below};
    return ends;
  }

  static __device__ __forceinline__ int shift_of(const T* to, int64_t stride, int channel) {
    return int(reinterpret_cast<uintptr_t>(to + channel * stride) / sizeof(T) % kSector);
  }
  // Lanes l and l + 16 see to channel l: at which element of a sector a tile begins in it, and where it ends.
  // (The lane is read anew, since what hangs on it would take registers while products are formed.)
  struct Span {
    int lane, channel, shift, end;
    T* row;  // of staging
    __device__ __forceinline__ Span(const T* to, uint8_t* of_warp, int64_t stride, int pixels)
        : lane(thread_index_anew() % 32), channel(lane % 16), shift(shift_of(to, stride, channel)),
          end(shift + min(pixels, 128)), row(reinterpret_cast<T*>(of_warp) + channel * kPitch) {}
    __device__ __forceinline__ bool shares_first() const { return shift > 0; }
    __device__ __forceinline__ bool shares_last() const { return end % kSector > 0; }
    // The lane's half of a sector.
    __device__ __forceinline__ uint4* half(int sector) const {
      return reinterpret_cast<uint4*>(row + sector * kSector) + lane / 16;
    }
    __device__ __forceinline__ uint4* first() const { return half(0); }
    __device__ __forceinline__ uint4* last() const { return half(end / kSector); }
  };

  // Brings to staging, in the background, what these lanes left waiting.
  static __device__ __forceinline__ void fetch(const T* to, uint8_t* of_warp, int64_t stride, int pixels,
                                               const Ends& ends) {
    const Span span(to, of_warp, stride, pixels);
    await_bulk_reads();
    __syncwarp();  // the last tile's sectors have left staging
    if (ends.left.share == kTakes && span.shares_first()) copy_async<16>(span.first(), ends.left.at);
    if (ends.right.share == kTakes && span.shares_last()) copy_async<16>(span.last(), ends.right.at);
    commit_copies();
  }
  // Likewise, after fetch. pixels: 128 where the last sector takes, else as many as fill a sector at least.
  template <class Values>
  static __device__ __forceinline__ void store(T* to, uint8_t* of_warp, const Values& values, int64_t stride,
                                               int channels, int pixels, const Ends& ends) {
    const Span span(to, of_warp, stride, pixels);
    T* const staging = reinterpret_cast<T*>(of_warp);
    const int g = span.lane / 4, t = span.lane % 4;
    await_copies<0>();
    __syncwarp();  // what waited is there
    const int low = shift_of(to, stride, g);
    Rows<T>::template write_staging<0>(staging + g * kPitch + low + t * 2, values,
                                       __all_sync(~0u, low % 2 == 0));
    const int high = shift_of(to, stride, g + 8);
    Rows<T>::template write_staging<1>(staging + (g + 8) * kPitch + high + t * 2, values,
                                       __all_sync(~0u, high % 2 == 0));
    publish_shared();
    __syncwarp();  // everyone has written
    const bool takes_last = ends.right.share == kTakes && span.shares_last();
    const int first = ends.left.share != kTakes && span.shares_first() ? kSector : 0;
    const int last = (span.end / kSector + takes_last) * kSector;
    const bool real = span.channel < channels;
    T* const out = to + span.channel * stride - span.shift;
    if (real && span.lane < 16 && first < last)
      copy_bulk_out(out + first, span.row + first, (last - first) * int(sizeof(T)));
    commit_bulk_copies();
    if (ends.left.share == kGives && span.shares_first()) *ends.left.at = *span.first();
    if (ends.right.share == kGives && span.shares_last()) *ends.right.at = *span.last();
    if (ends.left.share == kAlone || ends.right.share == kAlone) {
      const bool head = span.lane < 16;
      const int from = head ? span.shift : last, stop = head ? first : span.end;
      const bool alone = (head ? ends.left : ends.right).share == kAlone;
      store_edge(out, span.row, from, real && alone ? max(stop - from, 0) : 0, head);
    }
  }
#endif
};

}  // namespace store
