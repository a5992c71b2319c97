// A convolution and a generated tail, a strip at a time: some rows of some planes of all channels of a
// sample. What a thread convolves its passes find in its core's cache, and what a pass makes of a gradient is
// there for that of the filters.
//
// Stride 1, 3×3 filters in a plane, one group. Sums are made by strip, in an order that sizes alone fix.
#pragma once
#include <memory>
#include "cpu/direct_gradient.h"
#include "cpu/load.h"
#include "cpu/picked_gradient.h"
#include "cpu/winograd_gradient.h"

namespace load {

using Filters = std::vector<winograd::Line>;

// [row, row + rows) × [column, column + columns) of each of some planes of sample n's results: part `number`
// of them.
struct Strip {
  int64_t n, number, plane, planes, row, rows, column, columns;
};

// Results of D planes of H rows of W, in strips of at most so many planes, rows and columns; rows and columns
// are even, or all. Several planes, or pools of them, have whole rows; pools in depth whole planes, unless
// they are one window in depth.
struct Division {
  int64_t D, H, W, planes, rows, columns;
  int64_t deep() const { return (D + planes - 1) / planes; }
  int64_t down() const { return (H + rows - 1) / rows; }
  int64_t across() const { return (W + columns - 1) / columns; }
  int64_t parts() const { return deep() * down() * across(); }
  Strip strip(int64_t i) const {
    const int64_t n = i / parts(), number = i % parts();
    const int64_t w = number % across() * columns, h = number / across() % down() * rows;
    const int64_t d = number / across() / down() * planes;
    return {n, number, d, std::min(planes, D - d), h, std::min(rows, H - h), w, std::min(columns, W - w)};
  }
  int64_t first(const Strip& strip) const { return (strip.plane * H + strip.row) * W + strip.column; }
  int64_t pitch(const Strip& strip) const { return strip.columns < W ? W : H * W; }  // of its segments
  int64_t length(const Strip& strip) const { return strip.columns < W ? strip.columns : strip.rows * W; }
  int64_t segments(const Strip& strip) const { return strip.columns < W ? strip.rows : strip.planes; }
};

struct Convolution {
  const value_t* image;
  const value_t* weight;
  winograd::Sizes sizes;
  Filters filters;
  Convolution(const value_t* image, const value_t* weight, const winograd::Sizes& sizes)
      : image(image), weight(weight), sizes(sizes), filters(winograd::transformed(weight, sizes)) {}
};

// One thread's: some planes' rows of all channels, by Winograd's products.
class Convolver {
 public:
  Convolver(const Convolution& of, int64_t planes)
      : of_(of), sizes_(of.sizes), planes_(std::min(planes, fitting())),
        stride_((planes_ + sizes_.depth - 1) * sizes_.C * winograd::kRow + winograd::kApart),
        memory_((16 * stride_ + (kInRegisters ? 0 : 16 * kPlane)) * sizeof(accumulate_t) /
                    sizeof(winograd::Line) +
                1),
        tiles_(memory_[0].at) {}

  // out[k·step + d·pitch + …] = channel k's rows of the strip's d-th plane. Where it isn't finite, direct
  // sums say what is infinite, and what NaN.
  void operator()(value_t* out, int64_t step, int64_t pitch, Strip strip) {
    const int64_t end = strip.plane + strip.planes;
    for (; strip.plane < end; strip.plane += planes_, out += planes_ * pitch) {
      strip.planes = std::min(planes_, end - strip.plane);
      convolve(out, step, pitch, strip);
    }
  }

 private:
  static constexpr bool kInRegisters = WINOGRAD_IN_REGISTERS;
  static constexpr int64_t kPlane = winograd::kOutputs * winograd::kRow + winograd::kApart;

  // The planes whose transformed input takes half of a usual cache of a core.
  int64_t fitting() const {
    const int64_t planes = (512 << 10) / int64_t(16 * sizes_.C * winograd::kRow * sizeof(accumulate_t));
    return std::max<int64_t>(1, planes - sizes_.depth + 1);
  }

  void convolve(value_t* out, int64_t step, int64_t pitch, const Strip& strip) {
    using namespace winograd;
    const int64_t C = sizes_.C, across = sizes_.across(), all = (strip.rows + 1) / 2 * across;
    bool odd = false;
    for (int64_t tile = 0; tile < all; tile += kChunk) {
      const std::vector<Run> runs = runs_of(tile, std::min(kChunk, all - tile), across);
      for (int64_t i = 0; i < strip.planes + sizes_.depth - 1; i++)
        for (int64_t c = 0; c < C; c++) read(tiles_ + (i * C + c) * kRow, c, strip, i, runs);
      for (int64_t d = 0; d < strip.planes; d++) {
        const accumulate_t* const of_plane = tiles_ + d * C * kRow;
        if constexpr (kInRegisters)
          odd |= multiply_at_once(out + d * pitch, step, of_plane, strip.rows, runs);
        else odd |= multiply_one_by_one(out + d * pitch, step, of_plane, strip.rows, runs);
      }
    }
    if (odd) sum_directly(out, step, pitch, strip);
  }

  void read(accumulate_t* tiles, int64_t c, const Strip& strip, int64_t i,
            const std::vector<winograd::Run>& runs) const {
    const int64_t d = strip.plane + i - sizes_.before, H = sizes_.H, W = sizes_.W;
    const bool inside = 0 <= d && d < sizes_.D;
    const value_t* const plane = of_.image + ((strip.n * sizes_.C + c) * sizes_.D + (inside ? d : 0)) * H * W;
    for (winograd::Run run : runs) {
      run.row += strip.row / 2;
      winograd::transform_input(tiles, stride_, plane, inside ? H : 0, W, run, sizes_.above, sizes_.left);
    }
  }

  using Runs = std::vector<winograd::Run>;

  // All channels' results of a plane's tiles, `tiles`; returns whether any isn't finite. Those of a vector of
  // tiles and some channels at once.
  bool multiply_at_once(value_t* out, int64_t step, const accumulate_t* tiles, int64_t height,
                        const Runs& runs) const {
    using namespace winograd;
    const int64_t terms = sizes_.terms(), count = runs.back().at + runs.back().count;
    bool odd = false;
    for (int64_t at = 0; at < count; at += kLanes) {
      Lanes check{};  // NaN where anything isn't finite; behind the last tile there are others', too
      for (int64_t k = 0; k < sizes_.K; k += kAtOnce) {
        Outputs outputs;
        const accumulate_t* const filters =
            of_.filters[0].at + k / kTogether * terms * kTogether + k % kTogether;
        outputs_of(outputs, filters, sizes_.K * terms, tiles + at, stride_, terms);
        for (const auto& row : outputs)
          for (const auto& columns : row)
            for (const Lanes& each : columns) check += each * 0;
        write(out + k * step, step, outputs, height, runs, at);
      }
      for (int64_t j = 0; j < std::min<int64_t>(kLanes, count - at); j++) odd |= std::isnan(check[j]);
    }
    return odd;
  }

  // `count` of a row's 2·kLanes values, from `first` on, whose even and odd ones are apart: two vectors from
  // either end, which may meet.
  struct InRow {
    int count;
    Integers head, tail;
    InRow(int first, int count) : count(count) {
      const auto places = [](const Integers& at) { return at / 2 + at % 2 * kLanes; };
      head = places(count_up() + first),
      tail = places(count_up() + first + (std::max(count, kLanes) - kLanes));
    }
    void store(value_t* to, const Lanes& even, const Lanes& odd) const {
      if (count >= kLanes) {
        store_lanes(to, shuffled(even, odd, head));
        store_lanes(to + count - kLanes, shuffled(even, odd, tail));
      } else {
        store_few(to, shuffled(even, odd, head), count);
      }
    }
  };

  // Those of the chunk's tiles from `first` on.
  void write(value_t* out, int64_t step, const winograd::Outputs& outputs, int64_t height, const Runs& runs,
             int64_t first) const {
    using namespace winograd;
    const int64_t W = sizes_.width();
    for (const Run& run : runs) {
      const int64_t from = std::max(first, run.at), until = std::min(first + kLanes, run.at + run.count);
      if (from >= until) continue;
      const int64_t column = 2 * (run.column + from - run.at),
                    count = std::min(2 * (until - from), W - column);
      const InRow in_row(2 * int(from - first), int(count));
      for (int i = 0; i < std::min<int64_t>(2, height - 2 * run.row); i++)
        for (int k = 0; k < kAtOnce; k++)
          in_row.store(out + k * step + (2 * run.row + i) * W + column, outputs[i][0][k], outputs[i][1][k]);
    }
  }

  // The same, of a chunk and some channels: their products wait in memory until those of all 16 elements are
  // there.
  bool multiply_one_by_one(value_t* out, int64_t step, const accumulate_t* tiles, int64_t height,
                           const Runs& runs) const {
    using namespace winograd;
    const int64_t K = sizes_.K, terms = sizes_.terms(), count = runs.back().at + runs.back().count;
    const int64_t width = (count + kLanes - 1) / kLanes * kLanes;
    accumulate_t* const products = tiles_ + 16 * stride_;
    bool odd = false;
    for (int64_t k0 = 0; k0 < K; k0 += kOutputs) {
      const int64_t outputs = std::min(kOutputs, K - k0);
      for (int64_t e = 0; e < 16; e++)
        for (int64_t k = 0; k < outputs; k += kTogether)
          multiply({products + e * kPlane + k * kRow, kRow},
                   {of_.filters[0].at + (e * K + k0 + k) * terms, kTogether}, {tiles + e * stride_, kRow},
                   width, terms);
      for (int64_t k = 0; k < outputs; k++)
        odd |= write_one(out + (k0 + k) * step, products + k * kRow, height, runs);
    }
    return odd;
  }

  bool write_one(value_t* out, const accumulate_t* products, int64_t height, const Runs& runs) const {
    accumulate_t rows[2][2 * winograd::kChunk];
    winograd::transform_output(rows, products, kPlane);
    const int64_t W = sizes_.width(), all = 2 * (runs.back().at + runs.back().count);
    int odd = 0;
    for (const auto& row : rows)
      for (int64_t j = 0; j < all; j++)
        odd |= !(std::abs(row[j]) <= std::numeric_limits<accumulate_t>::max());
    for (const winograd::Run& run : runs)
      for (int64_t i = 0; i < std::min<int64_t>(2, height - 2 * run.row); i++) {
        const accumulate_t* const values = rows[i] + 2 * run.at;
        const int64_t count = std::min(2 * run.count, W - 2 * run.column);
        value_t* const to = out + (2 * run.row + i) * W + 2 * run.column;
        for (int64_t j = 0; j < count; j++) to[j] = value_t(values[j]);
      }
    return odd;
  }

  void sum_directly(value_t* out, int64_t step, int64_t pitch, const Strip& strip) const {
    const int64_t taps = sizes_.depth * 9, W = sizes_.W, width = sizes_.width();
    std::vector<accumulate_t> sums(width);
    for (int64_t k = 0; k < sizes_.K; k++)
      for (int64_t row = 0; row < strip.planes * strip.rows; row++) {
        std::fill(sums.begin(), sums.end(), 0);
        for (int64_t term = 0; term < sizes_.C * taps; term++) {
          const int64_t c = term / taps, left = term % 3 - sizes_.left;
          const int64_t d = strip.plane + row / strip.rows + term % taps / 9 - sizes_.before;
          const int64_t h = strip.row + row % strip.rows + term % 9 / 3 - sizes_.above;
          if (d < 0 || d >= sizes_.D || h < 0 || h >= sizes_.H) continue;
          const value_t* const pixels =
              of_.image + (((strip.n * sizes_.C + c) * sizes_.D + d) * sizes_.H + h) * W;
          const accumulate_t factor = accumulate_t(of_.weight[k * sizes_.C * taps + term]);
          const int64_t first = std::max<int64_t>(0, -left), last = std::min(width, W - left);
          for (int64_t w = first; w < last; w++) sums[w] += factor * accumulate_t(pixels[left + w]);
        }
        value_t* const to = out + k * step + row / strip.rows * pitch + row % strip.rows * width;
        for (int64_t w = 0; w < width; w++) to[w] = value_t(sums[w]);
      }
  }

  const Convolution& of_;
  const winograd::Sizes& sizes_;
  const int64_t planes_;  // at most so many at a time
  const int64_t stride_;  // tiles (16, planes, C, kRow): the terms of an output plane follow one another
  Filters memory_;
  accumulate_t* const tiles_;  // products, where they wait, lie behind them: (16, kPlane)
};

// A strip whose values are there.
struct Convolved {
  const Division& division;
  const Strip& strip;
  const value_t* values;  // by position in the sample's channel; `shift` more from a segment to the next
  int64_t step, shift;

  // A pass over the windows of a pool that begin in the strip, perhaps none: its sums are then zeros. Pool<1,
  // 1, 1>: over its positions. may_stream: nobody reads its results here.
  template <class Pass, int KD, int KH, int KW>
  void planes(const Pass& pass, const Extent& extent, Pool<KD, KH, KW>, bool may_stream) const {
    const bool streams = may_stream && are_large(extent);
    const auto begins = [](int64_t at, int64_t count, int64_t all, int64_t window, int64_t windows) {
      return at + count == all ? windows : window ? (at + count) / window : 0;
    };
    const int64_t d = KD ? strip.plane / KD : 0, h = KH ? strip.row / KH : 0, W = extent.W;
    const int64_t deep = begins(strip.plane, strip.planes, division.D, KD, extent.D) - d;
    const int64_t down = begins(strip.row, strip.rows, division.H, KH, extent.H) - h;
    const Part part{int((d * extent.H + h) * W), int(down * W), int(extent.H * W), int(deep), shift};
    for (int64_t c = 0; c < extent.C; c++) {
      const int64_t at = (strip.n * extent.C + c) * division.parts() + strip.number;
      Plane<walk_of<Pass>> plane(extent, values, step, strip.n, c, at, part, streams);
      pass(plane);
    }
  }
};

// Convolves some samples to v, or where that is null nowhere, and calls passes(Convolved) in each strip's
// thread. kDeep: passes have windows of several planes, which then lie as far apart as v's, rows that nobody
// asks for between them.
template <bool kDeep, class F>
void convolved(const Convolution& of, value_t* v, const Division& division, const Samples& some,
               const F& passes) {
  const int64_t C = of.sizes.K, positions = division.D * division.H * division.W, parts = division.parts();
  host::parallel_for(some.count() * parts, 1, [&](int64_t begin, int64_t end) {
    Convolver convolve(of, division.planes);
    const int64_t plane = division.H * division.W,
                  size = division.planes * (kDeep ? plane : division.rows * division.W);
    const std::unique_ptr<value_t[]> memory(v ? nullptr : new value_t[C * size + kBehind]);
    for (int64_t i = begin; i < end; i++) {
      const Strip strip = division.strip(some.first * parts + i);
      const int64_t first = division.first(strip);
      value_t* const sample = v ? v + (strip.n - some.first) * C * positions : nullptr;
      value_t* const out = v ? sample + first : memory.get();
      const int64_t step = v ? positions : size, pitch = v || kDeep ? plane : strip.rows * division.W;
      convolve(out, step, pitch, strip);
      passes(Convolved{division, strip, out - first, step, pitch - plane});
    }
    end_streams();
  });
}

inline void convolve(value_t* v, const Convolution& of, int64_t planes, int64_t rows) {
  const winograd::Sizes& sizes = of.sizes;
  const Division division{sizes.planes(), sizes.height(), sizes.width(), planes, rows, sizes.width()};
  convolved<false>(of, v, division, {0, sizes.N}, [](const Convolved&) {});
}

// The pass that makes the gradient of the convolution's results, in its member dz, and that of the filters by
// Sums: summed up in `shares`. dz or dweight may be null: nobody wants it. passes gets a 2 where dweight
// isn't finite.
template <class Sums, class Pass>
void differentiated(const Pass& pass, const Extent& extent, const Values& values, value_t* dz,
                    value_t* dweight, const value_t* image, const winograd::Sizes& sizes,
                    const Division& division, int64_t shares, uint8_t* passes) {
  const int64_t C = sizes.K, positions = extent.positions(), all = sizes.N * division.parts();
  Sums sums(image, sizes, dweight ? shares : 0);
  host::parallel_for(shares, 1, [&](int64_t begin, int64_t end) {
    typename Sums::Thread own(sums);
    const int64_t size = division.rows * division.W;
    std::vector<value_t> memory(dz ? 0 : kLanes * size);
    Pass making = pass;
    for (int64_t share = begin; share < end; share++) {
      for (int64_t i = share * all / shares; i < (share + 1) * all / shares; i++) {
        const Strip strip = division.strip(i);
        const Part part{int(division.first(strip)), int(division.length(strip)), int(division.pitch(strip)),
                        int(division.segments(strip)), 0};
        int64_t first_channel = 0;
        const auto to = [&](int64_t c) {  // where the gradients are, by their place in all of them
          if (dz) return dz;
          return memory.data() + (c - first_channel) * size - ((strip.n * C + c) * positions + part.first);
        };
        const auto make = [&](int64_t k) {
          first_channel = k;
          for (int64_t c = k; c < std::min<int64_t>(k + kLanes, C); c++) {
            making.dz = to(c);
            const int64_t at = (strip.n * C + c) * division.parts() + strip.number;
            Plane<walk_of<Pass>> plane(extent, values.sample(strip.n), values.step, strip.n, c, at, part,
                                       false);
            making(plane);
          }
        };
        if (dweight) own.add(share, strip, make, to);
        else
          for (int64_t k = 0; k < C; k += kLanes) make(k);
      }
      if (dweight) own.end(share);
    }
  });
  if (!dweight) return;
  sums.merge(dweight);
  bool odd = false;
  for (int64_t i = 0; i < sizes.K * sizes.terms() * direct::kTaps; i++)
    odd |= !(std::abs(dweight[i]) <= std::numeric_limits<value_t>::max());
  if (odd) *passes |= 2;
}

// Where nothing passes the pass's sums are zeros; that its gradients are, too, the caller is told by
// `passes`.
inline void nothing_passes(std::initializer_list<double*> sums, int64_t of_each) {
  for (double* each : sums) std::fill_n(each, of_each, 0.0);
}

}  // namespace load

// ------------------------------------------------------------------------------------------------ gradients
// of filters

namespace winograd {

// A share's sums are float32; the shares' are merged in double.
class FilterSums {
 public:
  FilterSums(const value_t* x, const Sizes& sizes, int64_t shares)
      : x_(x), sizes_(sizes), shares_(shares), width_(padded(sizes.C)),
        memory_(shares * share() * sizeof(accumulate_t) / sizeof(Line) + 1) {}
  void merge(value_t* dweight) const { merge_parts(dweight, memory_[0].at, sizes_, shares_); }

  class Thread {
   public:
    explicit Thread(FilterSums& of)
        : of_(of),
          memory_((Tiles::size(of.width_) + Tiles::size(kOutputs)) * sizeof(accumulate_t) / sizeof(Line)),
          inputs_{memory_[0].at, of.width_}, gradients_{inputs_.at + Tiles::size(of.width_), kOutputs} {}

    // A strip of one plane, of at most kChunk tiles. make(k) makes the gradients of kLanes channels from k
    // on, which are then at to(channel)[their place in all].
    template <class Make, class To>
    void add(int64_t share, const load::Strip& strip, const Make& make, const To& to) {
      const Sizes& sizes = of_.sizes_;
      const int64_t K = sizes.K, width = of_.width_, across = (strip.columns + 1) / 2,
                    down = (strip.rows + 1) / 2;
      accumulate_t* const sum = of_.memory_[0].at + share * of_.share();
      std::vector<Run> runs;
      for (int64_t i = 0; i < down; i++)
        runs.push_back({strip.row / 2 + i, strip.column / 2, across, i * across});
      for (int64_t c = 0; c < width; c += kLanes)
        for (const Run& run : runs)
          transform_pixels(inputs_, of_.x_ + strip.n * sizes.C * sizes.H * sizes.W, sizes, c, run);
      for (int64_t k0 = 0; k0 < K; k0 += kOutputs) {
        const int64_t outputs = std::min(kOutputs, K - k0);
        for (int64_t k = 0; k < outputs; k += kLanes) {
          make(k0 + k);
          for (const Run& run : runs)
            transform_gradients(gradients_, sizes, strip.n, k0 + k, k, run,
                                [&](accumulate_t* values, int64_t channel, int64_t at, int64_t count) {
                                  const value_t* const from = to(channel) + at;
                                  for (int64_t i = 0; i < count; i++) values[i] = accumulate_t(from[i]);
                                });
        }
        for (int64_t e = 0; e < 16; e++)
          for (int64_t k = 0; k < outputs; k += kTogether)
            multiply_block<accumulate_t, true>({sum + (e * K + k0 + k) * width, width},
                                               {gradients_.element(e) + k, kOutputs},
                                               {inputs_.element(e), width}, width, down * across);
      }
    }
    void end(int64_t) {}

   private:
    FilterSums& of_;
    std::vector<Line> memory_;
    Tiles inputs_, gradients_;
  };

 private:
  int64_t share() const { return 16 * sizes_.K * width_; }
  const value_t* x_;
  const Sizes sizes_;
  const int64_t shares_, width_;
  std::vector<Line> memory_;  // (shares, 16, K, width)
};

}  // namespace winograd

namespace direct {

// Sums are float32 over kRuns runs of positions and more until a strip ends, and double beyond.
class FilterSums {
 public:
  FilterSums(const value_t* x, const Sizes& sizes, int64_t shares)
      : x_(x), sizes_(sizes), shares_(shares), taps_(sizes.terms() * kTaps), partial_(shares * share()) {}

  void merge(value_t* dweight) {
    for (int64_t i = share(); i < shares_ * share(); i++) partial_[i % share()] += partial_[i];
    for (int64_t k = 0; k < sizes_.K; k++)
      for (int64_t tap = 0; tap < taps_; tap++)
        dweight[k * taps_ + tap] = value_t(partial_[(k / kLanes * taps_ + tap) * kLanes + k % kLanes]);
  }

  class Thread {
   public:
    explicit Thread(FilterSums& of)
        : of_(of), memory_(of.share() * sizeof(accumulate_t) / sizeof(Line) + 1), sums_(memory_[0].at) {}

    // A strip of one plane, of at most kRun columns; as Winograd's.
    template <class Make, class To>
    void add(int64_t share, const load::Strip& strip, const Make& make, const To& to) {
      const Sizes& sizes = of_.sizes_;
      const int64_t rows = std::max<int64_t>(1, kRun / strip.columns), columns = strip.columns;
      for (int64_t k = 0; k < sizes.K; k += kLanes) {
        make(k);
        for (int64_t top = 0; top < strip.rows; top += rows)
          add_rows(strip, k, strip.row + top, std::min(rows, strip.rows - top), columns, to);
      }
      runs_ += (strip.rows + rows - 1) / rows;
      if (runs_ >= kRuns) end(share);
    }
    void end(int64_t share) {
      double* const totals = of_.partial_.data() + share * of_.share();
      for (int64_t i = 0; i < of_.share(); i++) totals[i] += sums_[i], sums_[i] = 0;
      runs_ = 0;
    }

   private:
    template <class To>
    void add_rows(const load::Strip& strip, int64_t k, int64_t top, int64_t height, int64_t columns,
                  const To& to) {
      const Sizes& sizes = of_.sizes_;
      const int64_t width = sizes.width();
      winograd::side_by_side(g_, height * columns, [&](int64_t lane, int64_t, accumulate_t* values) {
        if (k + lane >= sizes.K) return int64_t(0);
        const int64_t plane = (strip.n * sizes.K + k + lane) * sizes.planes() + strip.plane;
        const value_t* from = to(k + lane) + (plane * sizes.height() + top) * width + strip.column;
        const int64_t together = columns == width ? height : 1;  // rows
        for (int64_t h = 0; h < height; h += together, from += width)
          for (int64_t w = 0; w < together * columns; w++) values[h * columns + w] = accumulate_t(from[w]);
        return height * columns;
      });
      for (int64_t term = 0; term < sizes.terms(); term++) {
        const int64_t c = term / sizes.depth, d = strip.plane + term % sizes.depth;
        const value_t* const pixels =
            of_.x_ + (((strip.n * sizes.C + c) * sizes.D + d) * sizes.H + top) * sizes.W + strip.column;
        accumulate_t* const sums = sums_ + k * of_.taps_ + term * kTaps * kLanes;
        for (int64_t h = 0; h < height; h++)
          add_run(sums, g_[0] + h * columns, pixels + h * sizes.W, sizes.W, columns);
      }
    }
    FilterSums& of_;
    std::vector<Line> memory_;
    accumulate_t* sums_;  // (K / kLanes, taps, kLanes)
    Lanes g_[1][kPixels];
    int64_t runs_ = 0;
  };

 private:
  int64_t share() const { return padded(sizes_.K) * taps_; }
  const value_t* x_;
  const Sizes sizes_;
  const int64_t shares_, taps_;
  std::vector<double> partial_;  // (shares, K / kLanes, taps, kLanes)
};

}  // namespace direct
