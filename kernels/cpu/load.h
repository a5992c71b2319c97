// The skeletons of a generated source's passes on a CPU; load/load.h lists their words.
//
// A thread takes a part of a plane after the other, a point at a time (cpu/points.h). Sums are made in lanes,
// in double, in an order that sizes alone fix.
//
// A result larger than the last cache's share is stored past the caches: nobody finds it there.
#pragma once
#include <stdio.h>

#include <vector>

#include "cpu/points.h"
#include "host/host.h"

namespace load {

// ----------------------------------------------------------------------------------------------------------
// passes

template <class Pass, class = void> constexpr bool is_scalar = false;
template <class Pass> constexpr bool is_scalar<Pass, std::enable_if_t<Pass::kScalar>> = true;
template <class Pass, class = void> constexpr bool has_windows = false;
template <class Pass> constexpr bool has_windows<Pass, std::enable_if_t<Pass::kWindows>> = true;
template <class Pass, class = void> constexpr bool has_rows = false;
template <class Pass> constexpr bool has_rows<Pass, std::enable_if_t<Pass::kRows>> = true;
enum class Walk { rows, windows, whole_rows, single };
template <class Pass>
constexpr Walk walk_of = has_windows<Pass> ? Walk::windows
                         : has_rows<Pass>  ? Walk::whole_rows
                         : is_scalar<Pass> ? Walk::single
                                           : Walk::rows;

// Samples [first, last).
struct Samples {
  int64_t first, last;
  int64_t count() const { return last - first; }
};

// What the convolution gave (samples, C, positions), the first of sample `first`.
struct Values {
  const value_t* at = nullptr;
  int64_t first = 0, C = 0, step = 0;
  const value_t* sample(int64_t n) const { return at ? at + (n - first) * C * step : nullptr; }
};

constexpr int64_t kBehind = 256;  // elements that may be read behind those that count

// Positions of a plane: `segments` of so many, `pitch` apart. shift: what there is more from a segment to the
// next of the values.
struct Part {
  int first, length, pitch, segments;
  int64_t shift;
};

template <Walk walk> class Plane {
 public:
  const int64_t n, c;
  // at: the place of its sums.
  Plane(const Extent& extent, const value_t* values, int64_t step, int64_t n, int64_t c, int64_t at,
        const Part& part, bool streams)
      : n(n), c(c), extent_(extent), values_(values), step_(step), at_(at), part_(part), streams_(streams) {}

  template <class F> void each(const F& f) {
    for (int s = 0; s < part_.segments; s++) {
      const int first = part_.first + s * part_.pitch;
      segment(f, values_ ? values_ + s * part_.shift : nullptr, first, first + part_.length);
    }
  }
  Sum sum() const { return Sum(lanes_); }
  ShiftedSums moments() const { return ShiftedSums(lanes_); }
  LargestOf<Asked::value> largest_value() const { return LargestOf<Asked::value>(lanes_); }
  LargestOf<Asked::place> largest() const { return LargestOf<Asked::place>(lanes_); }
  LargestOf<Asked::pool_place> pool_largest() const { return LargestOf<Asked::pool_place>(lanes_); }
  Any any() const { return Any(lanes_); }
  // Room for so many values of the point at hand.
  auto* held(int64_t count) {
    held_.resize(count);
    return held_.data();
  }
  // Does anything pass, or may zeros in these sums stand for what is not finite?
  template <class... Sums> void note(uint8_t* passes, const Any& any, Sums&... sums) const {
    if (any.value() || !std::isfinite((sums.value() + ...))) __atomic_store_n(passes, 1, __ATOMIC_RELAXED);
  }
  void reduce(double* out, Sum& sum) const { out[at_] = sum.value(); }
  void reduce(Moments<double>* out, ShiftedSums& moments) const { out[at_] = moments.value(); }
  template <bool kPool, Asked asked> void reduce(Largest<kPool>* out, const LargestOf<asked>& own) const {
    out[at_] = own.template value<kPool>();
  }

 private:
  template <class F> void segment(const F& f, const value_t* values, int first, int last) {
    if constexpr (walk == Walk::single) {
      for (int i = first; i < last; i++) f(Single{{extent_, values, step_, n, c, extent_.C}, i});
    } else if constexpr (walk == Walk::whole_rows) {
      for (int i = first; i < last; i++) f(Rows{{{extent_, values, step_, n, c, extent_.C}, i}, &lanes_});
    } else {
      // Windows of neighbours, or those that hold them, lie side by side within a row.
      const bool by_row = walk == Walk::windows && extent_.W >= kLanes / 2;
      for (int i = first; i < last;) {
        const int end = by_row ? std::min(last, (i / extent_.W + 1) * extent_.W) : last;
        if (streams_) i = run(f, values, i, std::min(end, i + before_line(i)));
        i = run(f, values, i, end);
      }
    }
  }
  template <class F> int run(const F& f, const value_t* values, int i, int end) {
    lanes_ = kLanes;
    for (; i + kLanes <= end; i += kLanes) f(point<true>(values, i, kLanes));
    if (i < end) f(point<false>(values, i, lanes_ = end - i));
    return end;
  }
  // Positions before the next that stands at a whole register, as arrays begin at one.
  int before_line(int i) const {
    const int64_t at = (n * extent_.C + c) * extent_.positions() + i;
    return int((kLanes - at % kLanes) % kLanes);
  }
  template <bool kWhole> Row<kWhole> point(const value_t* values, int position, int count) {
    return {{extent_, values, step_, n, c, extent_.C}, position, count, streams_, &drawn_};
  }
  const Extent& extent_;
  const value_t* const values_;
  const int64_t step_, at_;
  const Part part_;
  const bool streams_;
  std::vector<std::conditional_t<walk == Walk::single, real, Lanes>> held_;
  Drawn drawn_;
  int lanes_ = kLanes;  // of the point at hand
};

// Bytes of a core's last cache, or a usual one's. Linux says "32768K" of the one that some cores share;
// sysconf may have the sum of a processor's.
inline int64_t last_cache() {
  static const int64_t found = [] {
    long kilobytes = 0;
    if (FILE* const file = fopen("/sys/devices/system/cpu/cpu0/cache/index3/size", "r")) {
      if (fscanf(file, "%ldK", &kilobytes) != 1) kilobytes = 0;
      fclose(file);
    }
    return int64_t(kilobytes) << 10;
  }();
  return found > 0 ? found : 32 << 20;
}

inline bool are_large(const Extent& extent) {
  return extent.N * extent.C * extent.positions() * int64_t(sizeof(real)) > last_cache() / 2;
}

// Of some samples' planes, each taken in `parts`.
template <class Pass>
void planes(const Pass& pass, const Extent& extent, const Values& values, int64_t parts,
            const Samples& some) {
  constexpr int64_t kGrain = 1 << 12;  // positions: fewer are not worth a thread
  const int64_t C = extent.C, count = some.count() * C * parts, positions = extent.positions();
  if (!count || !positions) return;
  const bool streams = are_large(extent);
  const int64_t seen = std::max<int64_t>(positions, values.step);  // of a plane, by way of windows, too
  host::parallel_for(count, std::max<int64_t>(1, kGrain * parts / seen), [&](int64_t begin, int64_t end) {
    for (int64_t i = some.first * C * parts + begin; i < some.first * C * parts + end; i++) {
      const int64_t n = i / parts / C, c = i / parts % C, part = i % parts;
      const int first = int(positions * part / parts), last = int(positions * (part + 1) / parts);
      Plane<walk_of<Pass>> plane(extent, values.sample(n), values.step, n, c, i,
                                 {first, last - first, 0, 1, 0}, streams);
      pass(plane);
    }
    if (streams) end_streams();
  });
}

// ----------------------------------------------------------------------------------------------------- small
// values

struct Alone {
  template <class F> double sum(int64_t count, const F& f) const {
    double total = 0;
    for (int64_t i = 0; i < count; i++) total += f(i);
    return total;
  }
  double merge(const double* of, int64_t count) const {
    return sum(count, [&](int64_t i) { return of[i]; });
  }
  Moments<double> merge(const Moments<double>* of, int64_t count) const {
    Moments<double> moments{0, 0, 0};
    for (int64_t i = 0; i < count; i++) moments = moments.merge(of[i]);
    return moments;
  }
  template <bool kPool> Largest<kPool> merge(const Largest<kPool>* of, int64_t count) const {
    Largest<kPool> largest;
    for (int64_t i = 0; i < count; i++) largest.merge(of[i]);
    return largest;
  }
  // The place of an extreme; the first among ties, the first NaN before all.
  template <class F> int64_t largest(int64_t count, const F& f) const { return extreme<1>(count, f); }
  template <class F> int64_t smallest(int64_t count, const F& f) const { return extreme<-1>(count, f); }
  template <class E, class X> void write(E* to, X x) const { *to = E(x); }

 private:
  template <int sign, class F> int64_t extreme(int64_t count, const F& f) const {
    Extreme<sign, double> best;
    for (int64_t i = 0; i < count; i++) best.take(f(i), i);
    return best.index;
  }
};

struct Block {
  int64_t index;
  template <class F> void each(int64_t count, const F& f) const {
    for (int64_t i = 0; i < count; i++) f(i, Alone());
  }
};

// Blocks [first, last).
template <class Pass> void small(const Pass& pass, int64_t first, int64_t last) {
  host::parallel_for(last - first, 16, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; i++) pass(Block{first + i});
  });
}

}  // namespace load
