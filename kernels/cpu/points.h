// The points of a CPU's passes: what they read and write where they are, their windows, and the windows that
// hold them. load/load.h lists their words.
//
// A point is kLanes neighbouring positions (Row), the last of a part perhaps fewer, whose other lanes hold
// anything; or one (Single), which may have windows of whole rows (Rows). Points in windows, and those that
// were picked, are scattered: a position for each lane.
#pragma once
#include "core/philox.h"
#include "cpu/reductions.h"

namespace load {

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
    if (by.drawn_by != by_ || by.probability != probability_ || at < first_ || at + kLanes > first_ + kCount)
      draw(by, at);
    Integers mask;
    memcpy(&mask, masks_ + (at - first_), sizeof mask);
    return mask;
  }

 private:
  static constexpr int kDraws = 32, kCount = 4 * kDraws;
  void draw(const Dropout& by, int64_t at) {
    by_ = by.drawn_by, probability_ = by.probability, first_ = at / 4 * 4;
    uint32_t c0[kDraws], c1[kDraws], c2[kDraws] = {}, c3[kDraws] = {}, k0 = uint32_t(by_),
                                     k1 = uint32_t(by_ >> 32);
    for (int i = 0; i < kDraws; i++)
      c0[i] = uint32_t(first_ / 4 + i), c1[i] = uint32_t((first_ / 4 + i) >> 32);
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
  const value_t*
      values;  // the sample's, which the convolution gave, by position; its channels lie `step` apart
  int64_t step, n, c, C;
  int64_t first() const { return (n * C + c) * extent.positions(); }
  const value_t* convolved() const { return values + c * step; }
  // To be replaced by what is computed of it, where nobody needs it any more.
  template <class X> value_t* spent(const X&) const {
    static_assert(std::is_same_v<value_t, math::Element<X>>, "what is computed would be rounded");
    return const_cast<value_t*>(convolved());
  }
  Plane_ channel(int64_t of, int64_t channels) const { return {extent, values, step, n, of, channels}; }
};

// One position: of passes in which a channel is picked, because channels' own values are read by number, and
// of windows that lanes share.
struct Single : Plane_ {
  using T = real;
  int position, place = 0;
  bool inside = true;  // as of scattered points

  int64_t offset() const { return first() + position; }
  bool is_at(int place) const { return position == place; }
  template <class E> using One = std::conditional_t<std::is_integral_v<E>, int, real>;
  template <class E> One<E> read(const E* from) const { return One<E>(from[offset()]); }
  template <class E> One<E> shared(const E* from) const {
    return One<E>(from[n * extent.positions() + position]);
  }
  real v() const { return real(convolved()[position]); }
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
    const int x = P::left(fine, w.w) + which % kw, y = P::top(fine, w.h) + row % kh,
              z = P::front(fine, w.d) + row / kh;
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
  Total<real> total() const { return {}; }
  real all(Total<real> own) const { return own.value(); }
};

// A window that lanes share.
struct OneWindow : Single {
  Integers place;
};

// And those that have a position for each lane.
struct Lanes_ : Plane_ {
  Extreme<1, Lanes> largest() const { return {}; }
  Extreme<-1, Lanes> smallest() const { return {}; }
  ExtremeValue<1, Lanes> largest_value() const { return {}; }
  ExtremeValue<-1, Lanes> smallest_value() const { return {}; }
  Lanes zero() const { return Lanes{}; }
  Total<Lanes> total() const { return {}; }
  Lanes all(Total<Lanes> own) const { return own.value(); }
  template <class Mask, class F> Lanes lazily(const Mask& mask, const F& f) const {
    return any_of(mask) ? math::select(mask, f(), real(0)) : Lanes{};
  }
};

constexpr int kMostStrided = 12;  // further apart they are read one by one, which takes no longer; what is
                                  // read beside them is less than kBehind

// How lanes of scattered points lie: anywhere; side by side in a row, `stride` apart; or in ascending order
// within kLanes elements.
enum class Order { any, strided, near };

// A position for each lane. The first `count` count; the others repeat one of them. width: of the windows
// whose places are strided.
template <Order order, int stride, class Place, int width = stride> struct Scattered : Lanes_ {
  using T = Lanes;
  int count;
  Integers at;
  Place place;
  Integers inside = Integers{} - 1;  // of a window, where that has no position another stands for it

  Integers places() const { return at; }
  Integers is_at(int place) const { return at == place; }
  template <class E> Computed<E> read(const E* from) const { return gathered(from + first()); }
  template <class E> Computed<E> shared(const E* from) const {
    return gathered(from + n * extent.positions());
  }
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
  Scattered channel(int64_t of, int64_t channels) const {
    return {Plane_::channel(of, channels), count, at, place};
  }
  template <class F> void channels(int64_t many, const F& f) const {
    for (int64_t i = 0; i < many; i++) f(channel(i, many));
  }
  template <class P, class F> void window(P pool, const Extent& fine, const F& f) const;
  template <class P> auto chosen(P pool, const Extent& fine, const Integers& places) const;
  template <class P, class F> Lanes spread(P pool, const Extent& coarse, const F& f) const;

 private:
  template <class E> Computed<E> gathered(const E* plane) const {
    if constexpr (order == Order::strided) {
      const int k = width == stride ? place % stride : std::min(place % width, stride - 1),
                begin = int(at[0]) - k;
      const bool is_there = begin >= 0 && begin + stride * kLanes <= extent.positions();
      if (stride <= kMostStrided && is_there) return load_strided<stride>(plane + begin, k);
    }
    if constexpr (order == Order::near) {
      if (at[0] + kLanes <= extent.positions()) {
        const auto all = load_lanes(plane + at[0]);
        return shuffled(all, all, at - at[0]);
      }
    }
    Computed<E> result;
    for (int j = 0; j < kLanes; j++) result[j] = math::Element<Computed<E>>(plane[inside[j] ? at[j] : 0]);
    return result;
  }
};

// Where the lanes of a point lie in its level.
struct Places {
  Integers d, h, w;
  Places(const Extent& extent, const Integers& at) {
    const Integers row = divided(at, extent.W);
    d = divided(row, extent.H), h = row - d * extent.H, w = at - row * extent.W;
  }
};

// Calls f with the points of each lane's window, which begin at `corner`; count lanes.
template <class P, class F>
inline void walk_windows(P, const Plane_& plane, int count, const Integers& corner, const F& f) {
  const Extent& fine = plane.extent;
  const int kd = P::depth(fine), kh = P::height(fine), kw = P::width(fine);
  for (int i = 0; i < kd; i++)
    for (int j = 0; j < kh; j++) {
      const Integers row = corner + (i * fine.H + j) * fine.W;
      for (int k = 0; k < kw; k++)
        f(Scattered<Order::any, 1, int>{plane, count, row + k, (i * kh + j) * kw + k});
    }
}
// The same where windows are neighbours of one row, the first at `first`; what lies outside is left out.
template <class P, class F>
inline void walk_row_of_windows(P, const Plane_& plane, int count, const Coordinates& first, const F& f) {
  constexpr int stride = std::max(1, P::kStride), width = std::max(1, P::kWidth);
  const Extent& fine = plane.extent;
  const int kd = P::depth(fine), kh = P::height(fine), z = P::front(fine, first.d), y = P::top(fine, first.h);
  const Integers lane = count_up(), last = Integers{} + (count - 1),
                 x = P::left(fine, (lane < last ? lane : last) + first.w);
  const bool cuts =
      P::kPads && (P::left(fine, first.w) < 0 || P::left(fine, first.w + count - 1) + width > fine.W);
  const auto is_outside = [](int place, int size) { return P::kPads && (place < 0 || place >= size); };
  for (int i = 0; i < kd; i++)
#pragma GCC unroll 4
    for (int j = 0; j < kh; j++) {
      if (is_outside(z + i, fine.D) || is_outside(y + j, fine.H)) continue;
      const Integers row = x + ((z + i) * fine.H + y + j) * fine.W;
#pragma GCC unroll 4
      for (int k = 0; k < width; k++) {
        Scattered<Order::strided, stride, int, width> e{plane, count, row + k, (i * kh + j) * width + k};
        if (cuts) e.inside = (x + k >= 0) & (x + k < fine.W);
        f(e);
      }
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
    walk_windows(pool, plane, count, corner, [&](auto e) {
      const int kh = P::height(fine), kw = P::width(fine), row = e.place / kw;
      e.inside = is_in(z + row / kh, fine.D) & is_in(y + row % kh, fine.H) & is_in(x + e.place % kw, fine.W);
      e.at = e.inside ? e.at : Integers{};
      f(e);
    });
  } else {
    walk_windows(pool, plane, count, corner, f);
  }
}

// What was picked in the windows of `count` lanes.
template <class P>
inline auto chosen_in(P pool, const Plane_& plane, int count, const Places& at, const Integers& picked) {
  const Extent& fine = plane.extent;
  const int kh = P::height(fine), kw = P::width(fine);
  const Integers last = Integers{} + picked[count - 1], places = count_up() < count ? picked : last;
  const Integers place = places > 0 ? places : 0, row = divided(place, kw), deep = divided(row, kh);
  const Integers to = corners(pool, fine, at) + (deep * fine.H + row - deep * kh) * fine.W + place - row * kw;
  return Scattered<Order::any, 1, Integers>{plane, count, to, places};
}

// What f says of the windows that hold the lanes, summed, where they overlap.
template <class P, class F>
inline Lanes spread_over(P, const Plane_& coarse, int count, const Places& at, const F& f) {
  const Extent& windows = coarse.extent;
  const auto deep = P::deep(at.d, windows.D);
  const auto high = P::high(at.h, windows.H);
  const auto wide = P::wide(at.w, windows.W, 1);
  Lanes total{};
  for (int i = 0; i < deep.most(1); i++)
    for (int j = 0; j < high.most(1); j++)
      for (int k = 0; k < wide.most(1); k++) {
        const Integers inside = (deep.count > i) & (high.count > j) & (wide.count > k);
        const Integers to =
            inside ? ((deep.first + i) * windows.H + high.first + j) * windows.W + wide.first + k : 0;
        const Integers place =
            (deep.place(i) * P::height(windows) + high.place(j)) * P::kWidth + wide.place(k);
        const Lanes found = f(Scattered<Order::any, 1, Integers>{coarse, count, to, place});
        total += inside ? found : Lanes{};
      }
  return total;
}
// The same for neighbours of one row: of each the k-th window, where it has so many, counted from the first
// that holds any.
template <class P, class F>
inline Lanes spread_over_row(P, const Plane_& coarse, int count, const Coordinates& first, const F& f) {
  constexpr int S = P::kStride;
  const Extent& windows = coarse.extent;
  const auto deep = P::deep(first.d, windows.D);
  const auto high = P::high(first.h, windows.H);
  const auto wide = P::wide(first.w, windows.W, count);
  if (wide.count < 1) return Lanes{};
  const Integers own = count_up() + wide.place(0), last = Integers{} + (wide.count - 1);
  const Integers behind = own - (P::kWidth - S),
                 own_first =
                     divided<S>(behind > 0 ? behind : 0);  // of each lane the first window that holds it
  Lanes total{};
  for (int i = 0; i < deep.count; i++)
    for (int j = 0; j < high.count; j++)
      for (int k = 0; k < wide.most(1); k++) {
        const Integers x = own_first + k, in_row = own - x * S;
        const auto inside = (in_row >= 0) & (x <= last);
        const Integers to = (x < last ? x : last) +
                            (((deep.first + i) * windows.H + high.first + j) * windows.W + wide.first);
        const Integers place = in_row + (deep.place(i) * P::height(windows) + high.place(j)) * P::kWidth;
        const Lanes found = f(Scattered<Order::near, 1, Integers>{coarse, count, to, place});
        total += inside ? found : Lanes{};
      }
  return total;
}

// What f says of the windows that hold the lanes, 0 where none does.
template <class P, class F>
inline Lanes spread_from(P pool, const Plane_& coarse, const Extent& fine, int count, const Places& at,
                         const F& f) {
  if constexpr (!P::kApart) {
    return spread_over(pool, coarse, count, at, f);
  } else {
    const int kd = P::depth(fine), kh = P::height(fine), kw = P::width(fine);
    const Integers z = divided(at.d, kd), y = divided(at.h, kh), x = divided(at.w, kw);
    const Integers inside = (z < coarse.extent.D) & (y < coarse.extent.H) & (x < coarse.extent.W);
    const Integers to = inside ? (z * coarse.extent.H + y) * coarse.extent.W + x : 0;
    const Integers place = ((at.d - z * kd) * kh + at.h - y * kh) * kw + at.w - x * kw;
    const Lanes found = f(Scattered<Order::any, 1, Integers>{coarse, count, to, place});
    return inside ? found : Lanes{};
  }
}
// The same for neighbours of one row, w on.
template <class P, class F>
inline Lanes spread_along(P pool, const Plane_& coarse, const Extent& fine, int count,
                          const Coordinates& first, const F& f) {
  if constexpr (!P::kApart) return spread_over_row(pool, coarse, count, first, f);
  const int kd = P::depth(fine), kh = P::height(fine), kw = P::width(fine);
  const int z = first.d / kd, y = first.h / kh, begin = first.w / kw,
            row = (z * coarse.extent.H + y) * coarse.extent.W;
  if (z >= coarse.extent.D || y >= coarse.extent.H || begin >= coarse.extent.W) return Lanes{};
  const Integers w = count_up() + (first.w - begin * kw);  // from the first window's left
  const int row_in_window = (first.d - z * kd) * kh + first.h - y * kh;
  if constexpr (P::kWidth == 0) {
    return Lanes{} + f(OneWindow{{{coarse}, row}, w + row_in_window * kw});
  } else {
    const Integers x = divided<P::kWidth>(w), place = w - x * kw + row_in_window * kw;
    const auto inside = x < coarse.extent.W - begin;
    const Integers to = (inside ? x : Integers{}) + (row + begin);
    const Lanes found = f(Scattered<Order::near, 1, Integers>{coarse, count, to, place});
    return inside ? found : Lanes{};
  }
}

template <Order order, int stride, class Place, int width>
template <class P, class F>
void Scattered<order, stride, Place, width>::window(P pool, const Extent& fine, const F& f) const {
  const Places places(extent, at);
  walk_windows(pool, Plane_{fine, values, step, n, c, C}, count, places, f);
}
template <Order order, int stride, class Place, int width>
template <class P>
auto Scattered<order, stride, Place, width>::chosen(P pool, const Extent& fine, const Integers& which) const {
  const Places places(extent, at);
  return chosen_in(pool, Plane_{fine, values, step, n, c, C}, count, places, which);
}
template <Order order, int stride, class Place, int width>
template <class P, class F>
Lanes Scattered<order, stride, Place, width>::spread(P pool, const Extent& coarse, const F& f) const {
  const Places places(extent, at);
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
  template <class E> Computed<E> shared(const E* from) const {
    return loaded(from + n * extent.positions() + position);
  }
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
    const Plane_ plane{fine, values, step, n, c, C};
    const Coordinates here = coordinates(extent, position);
    if (P::kWidth && here.w + count <= extent.W) {
      walk_row_of_windows(pool, plane, count, here, f);
    } else {
      const Places places(extent, neighbours());
      walk_windows(pool, plane, count, places, f);
    }
  }
  template <class P> auto chosen(P pool, const Extent& fine, const Integers& which) const {
    const Places places(extent, neighbours());
    return chosen_in(pool, Plane_{fine, values, step, n, c, C}, count, places, which);
  }
  template <class P, class F> Lanes spread(P pool, const Extent& coarse, const F& f) const {
    const Plane_ plane{coarse, values, step, n, c, C};
    const Coordinates here = coordinates(extent, position);
    if (here.w + count <= extent.W) return spread_along(pool, plane, extent, count, here, f);
    const Places places(extent, neighbours());
    return spread_from(pool, plane, extent, count, places, f);
  }

 private:
  // Those that count; the others repeat the last.
  Integers neighbours() const {
    const Integers lane = count_up(), last = Integers{} + (count - 1);
    return (lane < last ? lane : last) + position;
  }
  template <class E> Computed<E> loaded(const E* from) const {
    if (kWhole || position + kLanes <= extent.positions()) return load_lanes(from);
    E all[kLanes];
    std::fill(std::copy_n(from, count, all), all + kLanes, E(0));
    return load_lanes(all);
  }
};

// Neighbours in a row of a window: where they lie in that, and which of them are there.
template <bool kWhole> struct OfRow : Row<kWhole> {
  Integers place, inside;
};

// A window that has whole rows: their values come as vectors. `all` merges what lanes have made of them.
struct Rows : Single {
  int* lanes;  // of the vector at hand
  template <class P, class F> void window(P, const Extent& fine, const F& f) const {
    static_assert(P::kWidth == 0 && P::kApart);
    constexpr int whole = P::kHeight ? 1 : P::kDepth ? 2 : 3;  // axes, whose positions are neighbours
    const Coordinates w = coordinates(extent, position);
    const int length = fine.W * (whole > 1 ? fine.H : 1) * (whole > 2 ? fine.D : 1);
    const int runs = P::depth(fine) * P::height(fine) * fine.W / length,
              high = whole > 1 ? 1 : P::height(fine);
    const int z = P::front(fine, w.d), y = P::top(fine, w.h);
    for (int run = 0; run < runs; run++) {
      const int first = ((z + run / high) * fine.H + y + run % high) * fine.W;
      const auto at = [&](auto fills, int k, int count) {
        const Integers lane = count_up();
        *lanes = count;
        f(OfRow<fills>{{{{fine, values, step, n, c, C}}, first + k, count, false, nullptr},
                       lane + (run * length + k),
                       lane < count});
      };
      int k = 0;
      for (; k + kLanes <= length; k += kLanes) at(std::true_type(), k, kLanes);
      if (k < length) at(std::false_type(), k, length - k);
    }
  }
  Extreme<1, Lanes> largest_row() const { return {}; }
  Extreme<-1, Lanes> smallest_row() const { return {}; }
  ExtremeValue<1, Lanes> largest_row_value() const { return {}; }
  ExtremeValue<-1, Lanes> smallest_row_value() const { return {}; }
  Total<Lanes> row_total() const { return {}; }
  real all(Total<Lanes> of_lanes) const {
    Lanes own = of_lanes.value();
    fold([&](const auto& other) { own += other(own); });
    return own[0];
  }
  template <int sign> ExtremeValue<sign, real> all(ExtremeValue<sign, Lanes> own) const {
    fold([&](const auto& other) { own.take(other(own.value), 0); });
    return {own.value[0]};
  }
  // The first among ties, and NaN.
  template <int sign> Extreme<sign, real> all(Extreme<sign, Lanes> own) const {
    fold([&](const auto& other) {
      const Lanes x = other(own.value), value = own.value;
      const Integers place = other(own.index), nan = x != x, own_nan = value != value;
      const Integers ties = ((x == value) | (nan & own_nan)) & (place < own.index);
      const Integers better =
          (own.index < 0) | (~own_nan & ((sign > 0 ? x > value : x < value) | nan)) | ties;
      own.value = better & (place >= 0) ? x : value;
      own.index = better & (place >= 0) ? place : own.index;
    });
    return {own.value[0], int(own.index[0])};
  }

 private:
  // f(other): of a vector, what lies as far away as half of the lanes that are left.
  template <class F> static void fold(const F& f) {
#pragma GCC unroll 8
    for (int step = kLanes / 2; step; step /= 2)
      f([&](const auto& x) { return shuffled(x, x, count_up() ^ step); });
  }
};

}  // namespace load
