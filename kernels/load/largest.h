// The maximum of a plane, or of a part of it, and its place there.
#pragma once
#include <math.h>

#include "core/scalar.h"

namespace load {

// Among equal values the first; NaN before all: the first one, or, as in torch's pools (kPool), the last one.
// place < 0: of no values yet.
template <bool kPool> struct Largest {
  double most = -INFINITY;
  int64_t place = -1;
  HOST_DEVICE void merge(const Largest& other) {
    const bool is_nan = most != most, other_is = other.most != other.most,
               alike = is_nan ? other_is : other.most == most;
    const bool before = kPool && is_nan ? other.place > place : other.place < place;
    const bool further = other_is ? !is_nan : other.most > most;
    if (place < 0 || (other.place >= 0 && (further || (alike && before)))) *this = other;
  }
};

}  // namespace load
