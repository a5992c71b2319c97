// What a CPU's passes reduce: extremes of a point, and a plane's sums, moments and largest value, made in
// lanes, in double.
#pragma once
#include "core/numerics.h"
#include "load/extent.h"
#include "load/largest.h"

namespace load {

// The largest (sign > 0) or smallest value and its place: the first among ties. NaN comes before all: the
// first with `take`, as torch has it in reductions, the last with `take_last`, as in its pools.
template <int sign, class T> struct Extreme {
  T value{};
  math::Integer<T> index = math::Integer<T>{} - 1;
  // Both say where x is now the value; inside: where it may be. place: a number, or each lane's.
  template <class Place, class... Inside> auto take(const T& x, const Place& place, const Inside&... inside) {
    return set(x, place, (x != x) & (value == value), inside...);
  }
  template <class Place, class... Inside>
  auto take_last(const T& x, const Place& place, const Inside&... inside) {
    return set(x, place, x != x, inside...);
  }

 private:
  template <class Place, class Mask, class... Inside>
  auto set(const T& x, const Place& place, const Mask& is_nan, const Inside&... inside) {
    const auto better = (((index < 0) | (sign > 0 ? x > value : x < value) | is_nan) & ... & inside);
    value = better ? x : value;
    if constexpr (std::is_integral_v<Place>)
      index = better ? math::Integer<T>{} + math::Element<math::Integer<T>>(place) : index;
    else index = better ? place : index;
    return better;
  }
};

// The value alone.
template <int sign, class T> struct ExtremeValue {
  T value = T{} - sign * std::numeric_limits<math::Element<T>>::infinity();
  template <class Place, class... Inside> auto take(const T& x, const Place&, const Inside&... inside) {
    return set(x, inside...);
  }
  template <class Place, class... Inside> auto take_last(const T& x, const Place&, const Inside&... inside) {
    return set(x, inside...);
  }

 private:
  template <class... Inside> auto set(const T& x, const Inside&... inside) {
    const auto better = (((sign > 0 ? x > value : x < value) | (x != x)) & ... & inside);
    value = better ? x : value;
    return better;
  }
};

// A point's sum of many terms: a few as they are, these in double.
template <class T> class Total {
 public:
  void operator+=(const T& x) {
    few_ += x;
    if (++count_ == kFew) flush();
  }
  T value() {
    flush();
    if constexpr (std::is_arithmetic_v<T>) return T(total_);
    else return __builtin_convertvector(total_, T);
  }

 private:
  static constexpr int kFew = 16;
  using Double = std::conditional_t<std::is_arithmetic_v<T>, double, Doubles>;
  void flush() {
    if constexpr (std::is_arithmetic_v<T>) total_ += few_;
    else total_ += __builtin_convertvector(few_, Doubles);
    few_ = T{}, count_ = 0;
  }
  T few_{};
  Double total_{};
  int count_ = 0;
};

// Sums know of a point how many of its lanes count.
struct Counted {
  const int& lanes;
  template <class T> T masked(const T& x) const {
    if (lanes == kLanes) return x;
    return count_up() < lanes ? x : T{};
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

// The maximum of points, which come in ascending order, and, if asked for, its place, or that of torch's
// pools.
enum class Asked { value, place, pool_place };
template <Asked asked> class LargestOf {
 public:
  explicit LargestOf(const int& lanes) : lanes_(lanes) {}
  template <class At> void add(const Lanes& x, const At& at) {
    of_lanes_.take(x, at.places(), count_up() < lanes_);
  }
  template <class At> void add(real x, const At& at) {
    alone_.take(x, at.position, true);
  }  // of passes whose points are single positions
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

}  // namespace load
