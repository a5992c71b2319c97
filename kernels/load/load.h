// What a generated source includes: the skeletons of its passes, for nvcc and for the host compiler alike.
//
// A pass is a struct of pointers and numbers whose operator() is the text; a skeleton (`planes`, `small`)
// says where it runs. Both devices have the same words; this list is their contract.
//
//   Plane   n, c; each(f); sum(), moments(); largest(), of a value and its place, pool_largest(), as torch's
//           pools find that, largest_value(), of the value alone; add(x), of these add(x, point); reduce(out,
//           of those)
//   point   T; n, c; is_at(place), is it that position of its plane?; v(), read(p), write(p, x), shared(p),
//           kept(…); channels(C, f), channel(c); window(pool, fine, f), chosen(pool, fine, place);
//           spread(pool, coarse, f), the sum over all windows that hold it; largest(), smallest(), zero();
//           total(), to begin a sum of many terms with, and all(that); of a padded pool's window inside, is
//           there such a position? On a CPU also lazily(mask, f): f's value where the mask is set, else 0;
//           replace_v(x), for passes behind that ask for v(); of its plane held(count), room for values of a
//           point; of windows of whole rows, whose positions come as vectors, row_total(), largest_row(),
//           smallest_row() and all(those)
//   Block   index; each(count, f) with lanes: sum(count, f), merge(sums, moments or maxima, count),
//           write(p, x)
// and on a GPU merge(sums or moments, count, samples, pitch), of parts of all samples at once; of(p, i), a
// small array's value of a channel or, channels last, of neighbours, as a plane and a point then have in the
// place of c; of a point largest_channel(), smallest_channel(), channel_zero() and channel_total() to begin
// with, and all(of those): what lanes that share channels, or by largest_axis(), smallest_axis() and
// axis_total() a window that is a whole axis, have made of them together; of a block, each_channel(C, f), of
// those that are its share; of a point, turned(p) and write_turned(p, x), of the array that may lie channels
// last alone, write_operand(p, x), of what is convolved next, mostly that array, too; of a plane rest(pool,
// fine, f), of positions in no window.
#pragma once
#include "core/numerics.h"
#include "core/philox.h"

using real = accumulate_t;

#include "load/extent.h"
#ifdef __CUDACC__
#include "load/planes.cuh"
#include "load/small.cuh"
#else
#include "cpu/load.h"
#endif
