// What becomes of v, the convolution without its bias. A mainloop forms it tile by tile in registers, and
// hands each tile to its sinks, one after the other; nobody else sees it.
//
// A tile is a warp's: 16 channels × 8·kTiles positions side by side, as tensor cores leave it. Lane 4g + t
// holds channels g and g + 8 at positions 8j + 2t and 8j + 2t + 1: v[j][0], v[j][1] and v[j][2], v[j][3].
//
// A sink is a struct, an argument of the kernel, with
//   kRowGroup    rows of v that it takes together: what a warp computes begins with a whole group
//   Shared<Loop> its room in shared memory, of those warps that compute as many channels as a block
//   Warp<Loop>   what a warp keeps of it, made of the sink, its room and the warp's place (Loop::Place). It
//                has
//     begin()           before the first tile; again where all is computed again, because x's scale did not
//                       fit
//     shift(v)          the first tile, before it is accepted
//     accept(v, offset) a tile: its values are (v + offset[half])·place.unscale(own); positions from
//     place.columns on are
//                       not real. It may change v for the sinks behind it; `offset()` then says what they
//                       have to add
//     overlap()         between two tiles, while products of the next are under way
//     end()             behind the last tile
//     finish()          once, when all that was accepted counts
// Whatever a Warp has not, IdleWarp has for it.
#pragma once
#include <type_traits>

#include "core/scalar.h"

template <int kTiles> using Accumulators = float[kTiles][4];

namespace sinks {

// What is to be added to v, by channel g or g + 8: nothing.
struct NoOffset {
  __device__ __forceinline__ float operator[](int) const { return 0.f; }
};

struct IdleWarp {
  __device__ __forceinline__ void begin() {}
  template <int kTiles> __device__ __forceinline__ void shift(const Accumulators<kTiles>&) {}
  __device__ __forceinline__ void overlap() {}
  __device__ __forceinline__ void end() {}
  __device__ __forceinline__ void finish() {}
};

// Empty; one for each sink, since two of a kind would take different addresses.
template <class Sink> struct NoRoom {};

// The rooms of several sinks, one behind the other.
template <class Shared, int kBehind> struct Room : Shared {};
template <class Loop, class... Sinks> struct Rooms {};
template <class Loop, class First, class... Rest>
struct Rooms<Loop, First, Rest...> : Room<typename First::template Shared<Loop>, sizeof...(Rest)>,
                                     Rooms<Loop, Rest...> {};

// The rows of v that all sinks take together.
template <class... Sinks> constexpr int row_group() {
  int most = 1;
  ((most = Sinks::kRowGroup > most ? Sinks::kRowGroup : most), ...);
  static_assert(((1 == Sinks::kRowGroup) + ... + 0) >= int(sizeof...(Sinks)) - 1,
                "one sink that groups rows");
  return most;
}

// Does a tail read at places what its fetch(at, count) brings near?
template <class Tail, class = void> constexpr bool fetches = false;
template <class Tail> constexpr bool fetches<Tail, std::void_t<typename Tail::Fetches>> = true;

// … for a tile of a warp's channels, whose first element in a plane is `first`, while its products are under
// way: a lane a channel. Without that the tail waits for memory, and few warps have nothing else to do
// meanwhile.
template <class Loop, class Tail>
__device__ __forceinline__ void fetch_tile(const Tail& tail, const typename Loop::Place& place,
                                           int64_t first) {
  if constexpr (fetches<Tail>) {
    const int own = threadIdx.x % 32;
    const int64_t plane = int64_t(place.height()) * place.width();
    if (own >= 16 || !place.real(own)) return;
    const int64_t at = (place.sample() * Loop::Place::kChannels + place.channel(own)) * plane + first;
    tail.fetch(at, int(plane - first < Loop::kColumns ? plane - first : Loop::kColumns));
  }
}

// Does it change v for those behind it?
template <class Warp, class = void> constexpr bool has_offset = false;
template <class Warp> constexpr bool has_offset<Warp, std::void_t<decltype(&Warp::offset)>> = true;

// Several sinks' warps as one.
template <class Loop, class... Sinks> struct Chain;
template <class Loop> struct Chain<Loop> {
  using Place = typename Loop::Place;
  __device__ __forceinline__ Chain(Rooms<Loop>&, const Place&) {}
  __device__ __forceinline__ void begin() {}
  template <int kTiles> __device__ __forceinline__ void shift(const Accumulators<kTiles>&) {}
  template <int kTiles, class Offset>
  __device__ __forceinline__ void accept(Accumulators<kTiles>&, const Offset&) {}
  __device__ __forceinline__ void overlap() {}
  __device__ __forceinline__ void end() {}
  __device__ __forceinline__ void finish() {}
};
template <class Loop, class First, class... Rest> struct Chain<Loop, First, Rest...> {
  using Place = typename Loop::Place;
  using Warp = typename First::template Warp<Loop>;
  Warp first;
  Chain<Loop, Rest...> rest;

  __device__ __forceinline__ Chain(Rooms<Loop, First, Rest...>& rooms, const Place& place, const First& sink,
                                   const Rest&... more)
      : first(sink, static_cast<Room<typename First::template Shared<Loop>, sizeof...(Rest)>&>(rooms), place),
        rest(static_cast<Rooms<Loop, Rest...>&>(rooms), place, more...) {}
  __device__ __forceinline__ void begin() { first.begin(), rest.begin(); }
  template <int kTiles> __device__ __forceinline__ void shift(const Accumulators<kTiles>& v) {
    first.shift(v), rest.shift(v);
  }
  template <int kTiles, class Offset>
  __device__ __forceinline__ void accept(Accumulators<kTiles>& v, const Offset& offset) {
    first.accept(v, offset);
    if constexpr (has_offset<Warp>) rest.accept(v, first.offset());
    else rest.accept(v, offset);
  }
  __device__ __forceinline__ void overlap() { first.overlap(), rest.overlap(); }
  __device__ __forceinline__ void end() { first.end(), rest.end(); }
  __device__ __forceinline__ void finish() { first.finish(), rest.finish(); }
};

}  // namespace sinks
