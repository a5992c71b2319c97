// The skeletons of a generated source's passes on a CPU; load/load.h lists their words.
//
// A thread takes a part of a plane after the other; a point is kLanes neighbouring positions, the last of a part
// perhaps fewer, whose other lanes hold anything. Points in windows, and those that were picked, are scattered: a position
// for each lane. Sums are made in lanes, in double, in an order that sizes alone fix.
//
// A result larger than the last cache's share is stored past the caches: nobody finds it there.
#pragma once
#include <stdio.h>

#include <vector>

#include "core/numerics.h"
#include "core/philox.h"
#include "cpu/lanes.h"
#include "host/host.h"
#include "load/extent.h"
#include "load/largest.h"

namespace load {

// ------------------------------------------------------------------------------------------------------ reductions

// The largest (sign > 0) or smallest value and its place: the first among ties. NaN comes before all: the first with
// `take`, as torch has it in reductions, the last with `take_last`, as in its pools.
template <int sign, class T> struct Extreme {
  T value{};
  math::Integer<T> index = math::Integer<T>{} - 1;
  // Both say where x is now the value.
  auto take(const T& x, int64_t place) { return set(x, place, (x != x) & (value == value)); }
  auto take_last(const T& x, int64_t place) { return set(x, place, x != x); }
  // … where it is inside.
  template <class Mask> auto take_last(const T& x, int64_t place, const Mask& inside) { return set(x, place, x != x, inside); }

 private:
  template <class Mask, class... Inside> auto set(const T& x, int64_t place, const Mask& is_nan, const Inside&... inside) {
    const auto better = (((index < 0) | (sign > 0 ? x > value : x < value) | is_nan) & ... & inside);
    value = better ? x : value;
    index = better ? math::Integer<T>{} + math::Element<math::Integer<T>>(place) : index;
    return better;
  }
};

// The value alone.
template <int sign, class T> struct ExtremeValue {
  T value = T{} - sign * std::numeric_limits<math::Element<T>>::infinity();
  auto take(const T& x, int64_t) { return set(x); }
  auto take_last(const T& x, int64_t) { return set(x); }
  template <class Mask> auto take_last(const T& x, int64_t, const Mask& inside) { return set(x, inside); }

 private:
  template <class... Inside> auto set(const T& x, const Inside&... inside) {
    const auto better = (((sign > 0 ? x > value : x < value) | (x != x)) & ... & inside);
    value = better ? x : value;
    return better;
  }
};

// Sums know of a point how many of its lanes count.
struct Counted {
  const int& lanes;
  template <class T> T masked(const T& x) const {
    if (lanes == kLanes) return x;
    T rest = x;
    for (int j = lanes; j < kLanes; j++) rest[j] = 0;
    return rest;
  }
};

class Sum {
 public:
  explicit Sum(const int& lanes) : counted_{lanes} {}
  void add(const Lanes& x) {
    few_ += counted_.masked(x);
    if (++count_ == kFew) flush();
  }
  void add(real x) { alone_ += x; }  // of passes whose points are single positions
  double value() {
    flush();
    double total = alone_;
    for (int j = 0; j < kLanes; j++) total += totals_[j];
    return total;
  }

 private:
  static constexpr int kFew = 4;  // summed as they are; more would lose digits where terms cancel
  void flush() {
    totals_ += __builtin_convertvector(few_, Doubles);
    few_ = Lanes{}, count_ = 0;
  }
  Counted counted_;
  Doubles totals_{};
  double alone_ = 0;
  Lanes few_{};
  int count_ = 0;
};

// Is any value other than zero?
class Any {
 public:
  explicit Any(const int& lanes) : counted_{lanes} {}
  void add(const Lanes& x) { found_ |= counted_.masked(x) != 0; }
  void add(real x) { alone_ |= x != 0; }
  bool value() const {
    bool any = alone_;
    for (int j = 0; j < kLanes; j++) any |= found_[j] != 0;
    return any;
  }

 private:
  Counted counted_;
  Integers found_{};
  bool alone_ = false;
};

// The maximum of points, which come in ascending order, and, if asked for, its place, or that of torch's pools.
enum class Asked { value, place, pool_place };
template <Asked asked> class LargestOf {
 public:
  explicit LargestOf(const int& lanes) : lanes_(lanes) {}
  template <class At> void add(const Lanes& x, const At& at) { of_lanes_.take(x, at.places(), count_up() < lanes_); }
  template <class At> void add(real x, const At& at) { alone_.take(x, at.position, true); }  // of passes whose points are single positions
  template <bool kPool> Largest<kPool> value() const {
    Largest<kPool> all{double(alone_.value), alone_.place};
    for (int j = 0; j < kLanes; j++) all.merge({double(of_lanes_.value[j]), of_lanes_.place[j]});
    return all;
  }

 private:
  template <class T> struct Best {
    T value = T{} - std::numeric_limits<real>::infinity();
    math::Integer<T> place = math::Integer<T>{} - (asked != Asked::value);
    template <class Places, class Mask> void take(const T& x, const Places& places, const Mask& inside) {
      auto better = (x > value) | (x != x);
      if constexpr (asked == Asked::place) better = better & (value == value);
      if constexpr (asked != Asked::value) better = better | (place < 0);
      better = better & inside;
      value = better ? x : value;
      if constexpr (asked != Asked::value) place = better ? places : place;
    }
  };
  const int& lanes_;
  Best<Lanes> of_lanes_;
  Best<real> alone_;
};

// Moments from sums shifted by about the mean of their first values, a block of values at a time; again in
// double where a block's squares overflow.
class ShiftedSums {
 public:
  explicit ShiftedSums(const int& lanes) : counted_{lanes} {}
  void add(const Lanes& x) {
    const int lanes = counted_.lanes;
    if (count_ == 0) {
      double few = 0;
      for (int j = 0; j < lanes; j++) few += x[j];
      shift_ = real(few / lanes);
    }
    const Lanes d = block_[adds_] = counted_.masked(x - shift_);
    sum_ += d, square_ += d * d, count_ += lanes;
    if (++adds_ == kAdds) flush();
  }
  void add(real x) { total_ = total_.merge({1, double(x), 0}); }
  Moments<double> value() {
    flush();
    return total_;
  }

 private:
  static constexpr int kAdds = 64;  // a block
  void flush() {
    double sum = 0, square = 0;
    for (int j = 0; j < kLanes; j++) sum += sum_[j], square += square_[j];
    if (std::isinf(square)) square = squares_in_double();
    total_ = total_.merge(Moments<double>::from_shifted(count_, shift_, sum, square));
    sum_ = square_ = Lanes{}, count_ = adds_ = 0;
  }
  double squares_in_double() const {
    double square = 0;
    for (int i = 0; i < adds_; i++)
      for (int j = 0; j < kLanes; j++) square += double(block_[i][j]) * block_[i][j];
    return square;
  }
  Counted counted_;
  Moments<double> total_{0, 0, 0};
  Lanes sum_{}, square_{};
  Lanes block_[kAdds];  // v - shift
  real shift_ = 0;
  int count_ = 0, adds_ = 0;
};

// ---------------------------------------------------------------------------------------------------------- points

// A dropout's mask of the element `at`; which: of a pass's dropouts.
struct Dropout {
  uint64_t drawn_by;
  double probability;
  Dropout(const int64_t* seed, int64_t number, int which, double probability)
      : drawn_by(seed_of(seed, number) + which * 0x9E3779B97F4A7C15u), probability(probability) {}
  bool keeps(int64_t at) const { return dropout_keeps(philox(drawn_by, at / 4).lane[at % 4], probability); }
};

// Masks of neighbouring elements, drawn side by side: more draws than compilers unroll before they vectorise.
class Drawn {
 public:
  Integers operator()(const Dropout& by, int64_t at) {
    if (by.drawn_by != by_ || by.probability != probability_ || at < first_ || at + kLanes > first_ + kCount) draw(by, at);
    Integers mask;
    memcpy(&mask, masks_ + (at - first_), sizeof mask);
    return mask;
  }

 private:
  static constexpr int kDraws = 32, kCount = 4 * kDraws;
  void draw(const Dropout& by, int64_t at) {
    by_ = by.drawn_by, probability_ = by.probability, first_ = at / 4 * 4;
    uint32_t c0[kDraws], c1[kDraws], c2[kDraws] = {}, c3[kDraws] = {}, k0 = uint32_t(by_), k1 = uint32_t(by_ >> 32);
    for (int i = 0; i < kDraws; i++) c0[i] = uint32_t(first_ / 4 + i), c1[i] = uint32_t((first_ / 4 + i) >> 32);
    // The arithmetic of core/philox.h.
    for (int round = 0; round < 10; round++, k0 += 0x9E3779B9u, k1 += 0xBB67AE85u)
      for (int i = 0; i < kDraws; i++) {
        const uint32_t high0 = uint64_t(0xD2511F53u) * c0[i] >> 32, low0 = 0xD2511F53u * c0[i];
        const uint32_t high1 = uint64_t(0xCD9E8D57u) * c2[i] >> 32, low1 = 0xCD9E8D57u * c2[i];
        c0[i] = high1 ^ c1[i] ^ k0, c2[i] = high0 ^ c3[i] ^ k1, c1[i] = low1, c3[i] = low0;
      }
    const uint32_t* const lanes[] = {c0, c1, c2, c3};
    for (int j = 0; j < 4; j++)
      for (int i = 0; i < kDraws; i++)
        masks_[4 * i + j] = -math::Element<Integers>(dropout_keeps(lanes[j][i], probability_));
  }
  uint64_t by_ = 0;
  double probability_ = -1;
  int64_t first_ = 0;
  math::Element<Integers> masks_[kCount];
};

// What the points share: where they are. An array of planes has C channels.
struct Plane_ {
  const Extent& extent;
  const value_t* values;  // the sample's, which the convolution gave, by position; its channels lie `step` apart
  int64_t step, n, c, C;
  int64_t first() const { return (n * C + c) * extent.positions(); }
  const value_t* convolved() const { return values + c * step; }
  // To be replaced by what is computed of it, where it is a strip's own, and no longer asked for.
  template <class X> value_t* spent(const X&) const {
    static_assert(std::is_same_v<value_t, math::Element<X>>, "what is computed would be rounded");
    return const_cast<value_t*>(convolved());
  }
  Plane_ channel(int64_t of, int64_t channels) const { return {extent, values, step, n, of, channels}; }
};

// And those that have a position for each lane.
struct Lanes_ : Plane_ {
  Extreme<1, Lanes> largest() const { return {}; }
  Extreme<-1, Lanes> smallest() const { return {}; }
  ExtremeValue<1, Lanes> largest_value() const { return {}; }
  ExtremeValue<-1, Lanes> smallest_value() const { return {}; }
  Lanes zero() const { return Lanes{}; }
  template <class Mask, class F> Lanes lazily(const Mask& mask, const F& f) const {
    return any_of(mask) ? math::select(mask, f(), real(0)) : Lanes{};
  }
};

// How lanes of scattered points lie: anywhere; side by side in a row, `stride` apart; or in ascending order within
// kLanes elements.
enum class Order { any, strided, near };

// A position for each lane. The first `count` count; the others repeat one of them. width: of the windows whose places are strided.
template <Order order, int stride, class Place, int width = stride> struct Scattered : Lanes_ {
  using T = Lanes;
  int count;
  Integers at;
  Place place;
  Integers inside = Integers{} - 1;  // of a window, where that has no position another stands for it

  Integers places() const { return at; }
  Integers is_at(int place) const { return at == place; }
  template <class E> Computed<E> read(const E* from) const { return gathered(from + first()); }
  template <class E> Computed<E> shared(const E* from) const { return gathered(from + n * extent.positions()); }
  Lanes v() const { return gathered(convolved()); }
  template <class E, class X> void write(E* to, const X& x) const {
    E all[kLanes];
    store_lanes(all, x);
    for (int j = 0; j < count; j++) to[first() + at[j]] = all[j];
  }
  Integers kept(const int64_t* seed, int64_t number, int which, double probability) const {
    const Dropout dropout(seed, number, which, probability);
    Integers mask{};
    for (int j = 0; j < count; j++) mask[j] = -int(dropout.keeps(first() + at[j]));
    return mask;
  }
  Scattered channel(int64_t of, int64_t channels) const { return {Plane_::channel(of, channels), count, at, place}; }
  template <class F> void channels(int64_t many, const F& f) const {
    for (int64_t i = 0; i < many; i++) f(channel(i, many));
  }
  template <class P, class F> void window(P pool, const Extent& fine, const F& f) const;
  template <class P> auto chosen(P pool, const Extent& fine, const Integers& places) const;
  template <class P, class F> Lanes spread(P pool, const Extent& coarse, const F& f) const;

 private:
  template <class E> Computed<E> gathered(const E* plane) const {
    if constexpr (order == Order::strided) {
      const int k = width == stride ? place % stride : std::min(place % width, stride - 1), begin = int(at[0]) - k;
      const bool all = begin + stride * kLanes <= extent.positions();
      return load_strided<stride>(plane + begin, k, all ? kLanes : count);
    }
    if constexpr (order == Order::near) {
      if (at[0] + kLanes <= extent.positions()) {
        const auto all = load_lanes(plane + at[0]);
        return shuffled(all, all, at - at[0]);
      }
    }
    Computed<E> result;
    for (int j = 0; j < kLanes; j++) result[j] = math::Element<Computed<E>>(plane[at[j]]);
    return result;
  }
};

// Where the lanes of a point lie in its level.
struct Places {
  Integers d, h, w;
  template <class Position> Places(const Extent& extent, int count, const Position& position) {
    for (int j = 0; j < kLanes; j++) {
      const Coordinates here = coordinates(extent, position(std::min(j, count - 1)));
      d[j] = here.d, h[j] = here.h, w[j] = here.w;
    }
  }
};

// Calls f with the points of each lane's window, which begin at `corner`; count lanes.
template <Order order, int stride, int width = stride, class P, class F>
inline void walk_windows(P, const Plane_& plane, int count, const Integers& corner, const F& f) {
  const Extent& fine = plane.extent;
  const int kd = P::depth(fine), kh = P::height(fine), kw = P::width(fine);
  for (int i = 0; i < kd; i++)
#pragma GCC unroll 4
    for (int j = 0; j < kh; j++) {
      const Integers row = corner + (i * fine.H + j) * fine.W;
#pragma GCC unroll 4
      for (int k = 0; k < kw; k++) f(Scattered<order, stride, int, width>{plane, count, row + k, (i * kh + j) * kw + k});
    }
}

template <class P> inline Integers corners(P, const Extent& fine, const Places& at) {
  return (P::front(fine, at.d) * fine.H + P::top(fine, at.h)) * fine.W + P::left(fine, at.w);
}

// The same of windows that lie anywhere, some of whose places may be outside.
template <class P, class F>
inline void walk_windows(P pool, const Plane_& plane, int count, const Places& at, const F& f) {
  const Extent& fine = plane.extent;
  const Integers corner = corners(pool, fine, at);
  if constexpr (P::kPads) {
    const Integers z = P::front(fine, at.d), y = P::top(fine, at.h), x = P::left(fine, at.w);
    const auto is_in = [](const Integers& place, int size) { return (place >= 0) & (place < size); };
    walk_windows<Order::any, 1>(pool, plane, count, corner, [&](auto e) {
      const int kh = P::height(fine), kw = P::width(fine), row = e.place / kw;
      e.inside = is_in(z + row / kh, fine.D) & is_in(y + row % kh, fine.H) & is_in(x + e.place % kw, fine.W);
      e.at = e.inside ? e.at : Integers{};
      f(e);
    });
  } else {
    walk_windows<Order::any, 1>(pool, plane, count, corner, f);
  }
}

template <class P> inline auto chosen_in(P pool, const Plane_& plane, int count, const Places& at, const Integers& places) {
  const Extent& fine = plane.extent;
  const int kh = P::height(fine), kw = P::width(fine);
  Integers to = corners(pool, fine, at);
  for (int j = 0; j < kLanes; j++) {
    const int place = std::max(0, int(places[std::min(j, count - 1)])), row = place / kw;
    to[j] += (row / kh * fine.H + row % kh) * fine.W + place % kw;
  }
  return Scattered<Order::any, 1, Integers>{plane, count, to, places};
}

// What f says of the windows that hold the lanes, summed, where they overlap.
template <class P, class F>
inline Lanes spread_over(P, const Plane_& coarse, int count, const Places& at, const F& f) {
  const Extent& windows = coarse.extent;
  Lanes total{};
  for (int i = 0; i < decltype(P::deep(0, 1))::most(1); i++)
    for (int j = 0; j < decltype(P::high(0, 1))::most(1); j++)
      for (int k = 0; k < decltype(P::wide(0, 1, 1))::most(1); k++) {
        Integers to, place, inside;
        for (int lane = 0; lane < kLanes; lane++) {
          const auto deep = P::deep(int(at.d[lane]), windows.D);
          const auto high = P::high(int(at.h[lane]), windows.H);
          const auto wide = P::wide(int(at.w[lane]), windows.W, 1);
          const bool is_inside = i < deep.count && j < high.count && k < wide.count;
          inside[lane] = -int(is_inside);
          to[lane] = is_inside ? ((deep.first + i) * windows.H + high.first + j) * windows.W + wide.first + k : 0;
          place[lane] = (deep.place(i) * P::height(windows) + high.place(j)) * P::kWidth + wide.place(k);
        }
        const Lanes found = f(Scattered<Order::any, 1, Integers>{coarse, count, to, place});
        total += inside ? found : Lanes{};
      }
  return total;
}
// The same for neighbours of one row: of each the k-th window, where it has so many, counted from the first that holds any.
template <class P, class F>
inline Lanes spread_over_row(P, const Plane_& coarse, int count, const Coordinates& first, const F& f) {
  constexpr int S = P::kStride;
  const Extent& windows = coarse.extent;
  const auto deep = P::deep(first.d, windows.D);
  const auto high = P::high(first.h, windows.H);
  const auto wide = P::wide(first.w, windows.W, count);
  if (wide.count < 1) return Lanes{};
  const Integers own = count_up() + wide.place(0), last = Integers{} + (wide.count - 1);
  Integers own_first;  // of each lane the first window that holds it
  for (int j = 0; j < kLanes; j++) own_first[j] = own[j] < P::kWidth ? 0 : (own[j] - P::kWidth) / S + 1;
  Lanes total{};
  for (int i = 0; i < deep.count; i++)
    for (int j = 0; j < high.count; j++)
      for (int k = 0; k < wide.most(1); k++) {
        const Integers x = own_first + k, in_row = own - x * S;
        const auto inside = (in_row >= 0) & (x <= last);
        const Integers to = (x < last ? x : last) + (((deep.first + i) * windows.H + high.first + j) * windows.W + wide.first);
        const Integers place = in_row + (deep.place(i) * P::height(windows) + high.place(j)) * P::kWidth;
        const Lanes found = f(Scattered<Order::near, 1, Integers>{coarse, count, to, place});
        total += inside ? found : Lanes{};
      }
  return total;
}

// What f says of the windows that hold the lanes, 0 where none does.
template <class P, class F>
inline Lanes spread_from(P pool, const Plane_& coarse, const Extent& fine, int count, const Places& at, const F& f) {
  if constexpr (!P::kApart) return spread_over(pool, coarse, count, at, f);
  const int kd = P::depth(fine), kh = P::height(fine), kw = P::width(fine);
  Integers to, place, inside;
  for (int j = 0; j < kLanes; j++) {
    const int d = int(at.d[j]), h = int(at.h[j]), w = int(at.w[j]), z = d / kd, y = h / kh, x = w / kw;
    const bool is_inside = z < coarse.extent.D && y < coarse.extent.H && x < coarse.extent.W;
    inside[j] = -int(is_inside);
    to[j] = is_inside ? (z * coarse.extent.H + y) * coarse.extent.W + x : 0;
    place[j] = ((d - z * kd) * kh + h - y * kh) * kw + w - x * kw;
  }
  const Lanes found = f(Scattered<Order::any, 1, Integers>{coarse, count, to, place});
  return inside ? found : Lanes{};
}
// The same for neighbours of one row, w on.
template <class P, class F>
inline Lanes spread_along(P pool, const Plane_& coarse, const Extent& fine, int count, const Coordinates& first, const F& f) {
  if constexpr (!P::kApart) return spread_over_row(pool, coarse, count, first, f);
  constexpr int kWide = P::kWidth;
  const int kd = P::depth(fine), kh = P::height(fine), kw = P::width(fine);
  const int z = first.d / kd, y = first.h / kh, begin = first.w / kw;
  if (z >= coarse.extent.D || y >= coarse.extent.H || begin >= coarse.extent.W) return Lanes{};
  const Integers lane = count_up();
  const Integers w = lane + (first.w - begin * kw);  // from the first window's left
  Integers x;
  if constexpr (kWide == 1 || kWide == 2 || kWide == 4 || kWide == 8)
    x = w / kWide;
  else
    for (int j = 0; j < kLanes; j++) x[j] = w[j] / kw;
  const auto inside = x < coarse.extent.W - begin;
  const Integers place = w - x * kw + ((first.d - z * kd) * kh + first.h - y * kh) * kw;
  const Integers to = (inside ? x : Integers{}) + ((z * coarse.extent.H + y) * coarse.extent.W + begin);
  const Lanes found = f(Scattered<Order::near, 1, Integers>{coarse, count, to, place});
  return inside ? found : Lanes{};
}

template <Order order, int stride, class Place, int width>
template <class P, class F>
void Scattered<order, stride, Place, width>::window(P pool, const Extent& fine, const F& f) const {
  const Places places(extent, kLanes, [&](int j) { return int(at[j]); });
  walk_windows(pool, Plane_{fine, values, step, n, c, C}, count, places, f);
}
template <Order order, int stride, class Place, int width>
template <class P>
auto Scattered<order, stride, Place, width>::chosen(P pool, const Extent& fine, const Integers& which) const {
  const Places places(extent, kLanes, [&](int j) { return int(at[j]); });
  return chosen_in(pool, Plane_{fine, values, step, n, c, C}, count, places, which);
}
template <Order order, int stride, class Place, int width>
template <class P, class F>
Lanes Scattered<order, stride, Place, width>::spread(P pool, const Extent& coarse, const F& f) const {
  const Places places(extent, kLanes, [&](int j) { return int(at[j]); });
  return spread_from(pool, Plane_{coarse, values, step, n, c, C}, extent, count, places, f);
}

// Neighbours from `position` on: kLanes, or where not kWhole the first `count`.
template <bool kWhole> struct Row : Lanes_ {
  using T = Lanes;
  static constexpr int kAhead = 4;
  int position, count;
  bool streams;
  Drawn* drawn;  // null: a mask's neighbours aren't asked for
  int place = 0;

  int64_t offset() const { return first() + position; }
  Integers places() const { return count_up() + position; }
  Integers is_at(int place) const { return places() == place; }
  template <class E> Computed<E> read(const E* from) const { return loaded(from + offset()); }
  template <class E> Computed<E> shared(const E* from) const { return loaded(from + n * extent.positions() + position); }
  Lanes v() const { return loaded(convolved() + position); }
  template <class X> void replace_v(const X& x) const {
    kWhole ? store_lanes(spent(x) + position, x) : store_few(spent(x) + position, x, count);
  }
  template <class E, class X> void write(E* to, const X& x) const {
    if constexpr (kWhole) {
      streams ? stream_lanes(to + offset(), x) : store_lanes(to + offset(), x);
    } else {
      store_few(to + offset(), x, count);
    }
  }
  Integers kept(const int64_t* seed, int64_t number, int which, double probability) const {
    const Dropout dropout(seed, number, which, probability);
    if (drawn) return (*drawn)(dropout, offset());
    Integers mask{};
    for (int j = 0; j < count; j++) mask[j] = -int(dropout.keeps(offset() + j));
    return mask;
  }
  Row channel(int64_t of, int64_t channels) const {
    return {Plane_::channel(of, channels), position, count, streams, nullptr};
  }
  // Each channel's next values are fetched ahead: processors follow fewer rows by themselves.
  template <class F> void channels(int64_t many, const F& f) const {
    const value_t* ahead = values ? values + position + kAhead * kLanes : nullptr;
    for (int64_t i = 0; i < many; i++) {
      if (values) __builtin_prefetch(ahead + i * step);
      f(channel(i, many));
    }
  }
  // Neighbours in one row have their windows in one, too.
  template <class P, class F> void window(P pool, const Extent& fine, const F& f) const {
    constexpr int stride = std::max(1, P::kStride), width = std::max(1, P::kWidth);
    const Plane_ plane{fine, values, step, n, c, C};
    const Coordinates here = coordinates(extent, position);
    bool strided = width >= stride && P::width(fine) == width && here.w + count <= extent.W;
    if constexpr (P::kPads) {
      const auto whole = [](int first, int end, int size) { return first >= 0 && end <= size; };
      strided = strided && whole(P::front(fine, here.d), P::front(fine, here.d) + P::depth(fine), fine.D) &&
                whole(P::top(fine, here.h), P::top(fine, here.h) + P::height(fine), fine.H) &&
                whole(P::left(fine, here.w), P::left(fine, here.w + count - 1) + width, fine.W);
    }
    if (strided) {
      const int row = (P::front(fine, here.d) * fine.H + P::top(fine, here.h)) * fine.W;
      const Integers lane = count_up(), last = Integers{} + (count - 1);
      const Integers w = (lane < last ? lane : last) + here.w;
      walk_windows<Order::strided, stride, width>(pool, plane, count, row + P::left(fine, w), f);
    } else {
      const Places places(extent, count, [&](int j) { return position + j; });
      walk_windows(pool, plane, count, places, f);
    }
  }
  template <class P> auto chosen(P pool, const Extent& fine, const Integers& which) const {
    const Places places(extent, count, [&](int j) { return position + j; });
    return chosen_in(pool, Plane_{fine, values, step, n, c, C}, count, places, which);
  }
  template <class P, class F> Lanes spread(P pool, const Extent& coarse, const F& f) const {
    const Plane_ plane{coarse, values, step, n, c, C};
    const Coordinates here = coordinates(extent, position);
    if (here.w + count <= extent.W) return spread_along(pool, plane, extent, count, here, f);
    const Places places(extent, count, [&](int j) { return position + j; });
    return spread_from(pool, plane, extent, count, places, f);
  }

 private:
  template <class E> Computed<E> loaded(const E* from) const {
    if (kWhole || position + kLanes <= extent.positions()) return load_lanes(from);
    E all[kLanes];
    std::fill(std::copy_n(from, count, all), all + kLanes, E(0));
    return load_lanes(all);
  }
};

// One position: of passes in which a channel is picked, because channels' own values are read by number.
struct Single : Plane_ {
  using T = real;
  int position, place = 0;
  bool inside = true;  // as of scattered points

  int64_t offset() const { return first() + position; }
  bool is_at(int place) const { return position == place; }
  template <class E> using One = std::conditional_t<std::is_integral_v<E>, int, real>;
  template <class E> One<E> read(const E* from) const { return One<E>(from[offset()]); }
  template <class E> One<E> shared(const E* from) const { return One<E>(from[n * extent.positions() + position]); }
  real v() const { return real(convolved()[position]); }
  template <class X> void replace_v(X x) const { spent(x)[position] = value_t(x); }
  template <class E, class X> void write(E* to, const X& x) const { to[offset()] = E(x); }
  bool kept(const int64_t* seed, int64_t number, int which, double probability) const {
    return Dropout(seed, number, which, probability).keeps(offset());
  }
  Single channel(int64_t of, int64_t channels) const { return {Plane_::channel(of, channels), position}; }
  template <class F> void channels(int64_t many, const F& f) const {
    for (int64_t i = 0; i < many; i++) f(channel(i, many));
  }
  template <class P, class F> void window(P, const Extent& fine, const F& f) const {
    const Coordinates w = coordinates(extent, position);
    const int kd = P::depth(fine), kh = P::height(fine), kw = P::width(fine);
    for (int i = 0; i < kd; i++)
      for (int j = 0; j < kh; j++) {
        const int z = P::front(fine, w.d) + i, y = P::top(fine, w.h) + j, x = P::left(fine, w.w);
        for (int k = 0; k < kw; k++) {
          const auto is_in = [](int at, int size) { return at >= 0 && at < size; };
          const bool inside = !P::kPads || (is_in(z, fine.D) && is_in(y, fine.H) && is_in(x + k, fine.W));
          const int at = inside ? (z * fine.H + y) * fine.W + x + k : 0;
          f(Single{{fine, values, step, n, c, C}, at, (i * kh + j) * kw + k, inside});
        }
      }
  }
  template <class P> Single chosen(P, const Extent& fine, int which) const {
    const Coordinates w = coordinates(extent, position);
    const int kh = P::height(fine), kw = P::width(fine), row = which / kw;
    const int x = P::left(fine, w.w) + which % kw, y = P::top(fine, w.h) + row % kh, z = P::front(fine, w.d) + row / kh;
    return {{fine, values, step, n, c, C}, (z * fine.H + y) * fine.W + x, which};
  }
  template <class P, class F> real spread(P, const Extent& coarse, const F& f) const {
    const Coordinates here = coordinates(extent, position);
    if constexpr (P::kApart) {
      const int kd = P::depth(extent), kh = P::height(extent), kw = P::width(extent);
      const int z = here.d / kd, y = here.h / kh, x = here.w / kw;
      if (z >= coarse.D || y >= coarse.H || x >= coarse.W) return 0;
      const int in = ((here.d - z * kd) * kh + here.h - y * kh) * kw + here.w - x * kw;
      return f(Single{{coarse, values, step, n, c, C}, (z * coarse.H + y) * coarse.W + x, in});
    } else {
      real total = 0;
      each_holding<1, 1>(here, P(), coarse, [&](int window, int row, int first) {
        total += f(Single{{coarse, values, step, n, c, C}, window, row + first});
      });
      return total;
    }
  }
  Extreme<1, real> largest() const { return {}; }
  Extreme<-1, real> smallest() const { return {}; }
  ExtremeValue<1, real> largest_value() const { return {}; }
  ExtremeValue<-1, real> smallest_value() const { return {}; }
  real zero() const { return 0; }
  template <class F> real lazily(bool mask, const F& f) const { return mask ? f() : real(0); }
};

// ---------------------------------------------------------------------------------------------------------- passes

template <class Pass, class = void> constexpr bool is_scalar = false;
template <class Pass> constexpr bool is_scalar<Pass, std::enable_if_t<Pass::kScalar>> = true;
template <class Pass, class = void> constexpr bool has_windows = false;
template <class Pass> constexpr bool has_windows<Pass, std::enable_if_t<Pass::kWindows>> = true;
enum class Walk { rows, windows, single };
template <class Pass> constexpr Walk walk_of = has_windows<Pass> ? Walk::windows
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

// Positions of a plane: `segments` of so many, `pitch` apart. shift: what there is more from a segment to the next of the values.
struct Part {
  int first, length, pitch, segments;
  int64_t shift;
};

template <Walk walk> class Plane {
 public:
  const int64_t n, c;
  // at: the place of its sums.
  Plane(const Extent& extent, const value_t* values, int64_t step, int64_t n, int64_t c, int64_t at, const Part& part,
        bool streams)
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
  template <bool kPool, Asked asked> void reduce(Largest<kPool>* out, const LargestOf<asked>& own) const { out[at_] = own.template value<kPool>(); }

 private:
  template <class F> void segment(const F& f, const value_t* values, int first, int last) {
    if constexpr (walk == Walk::single) {
      for (int i = first; i < last; i++) f(Single{{extent_, values, step_, n, c, extent_.C}, i});
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

// Bytes of a core's last cache, or a usual one's. Linux says "32768K" of the one that some cores share; sysconf may have the sum of a processor's.
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
void planes(const Pass& pass, const Extent& extent, const Values& values, int64_t parts, const Samples& some) {
  constexpr int64_t kGrain = 1 << 12;  // positions: fewer are not worth a thread
  const int64_t C = extent.C, count = some.count() * C * parts, positions = extent.positions();
  if (!count || !positions) return;
  const bool streams = are_large(extent);
  host::parallel_for(count, std::max<int64_t>(1, kGrain * parts / positions), [&](int64_t begin, int64_t end) {
    for (int64_t i = some.first * C * parts + begin; i < some.first * C * parts + end; i++) {
      const int64_t n = i / parts / C, c = i / parts % C, part = i % parts;
      const int first = int(positions * part / parts), last = int(positions * (part + 1) / parts);
      Plane<walk_of<Pass>> plane(extent, values.sample(n), values.step, n, c, i, {first, last - first, 0, 1, 0}, streams);
      pass(plane);
    }
    if (streams) end_streams();
  });
}

// ----------------------------------------------------------------------------------------------------- small values

struct Alone {
  template <class F> double sum(int64_t count, const F& f) const {
    double total = 0;
    for (int64_t i = 0; i < count; i++) total += f(i);
    return total;
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
