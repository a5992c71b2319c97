// Planes of x on their way from global to shared memory: the stage of the mainloop that hides the former's
// latency. From sm_90 on the copy engine brings them, where their rows are aligned; else each thread the
// items that it will split itself.
#pragma once
#include "conv/narrow3d_tile.cuh"

namespace conv::narrow3d {

template <class S> struct Stage {
  const Block<S> block;
#if __CUDA_ARCH__ >= 900
  const bool bulk = S::kSplit ? block.c.aligned : block.c.bulk;  // the same, of float32
#else
  static constexpr bool bulk = false;
#endif

  __device__ __forceinline__ explicit Stage(const Block<S>& block) : block(block) {}

  __device__ __forceinline__ uint64_t* arrived(int plane) const {
    return block.storage.arrived + plane % kRaw;
  }
  __device__ __forceinline__ void initialize_barriers() const {  // by one thread
    for (int i = 0; i < kRaw; i++) initialize(arrived(i), 1);
  }

  // Copies of a plane set off, if there is one: of `planes`. Bulk copies are a warp's work, each time
  // another's.
  __device__ __forceinline__ void set_off(int plane, int planes) const {
    const int items = block.items;
    const int64_t channel = block.c.channel;
    const typename S::value_t* const from =
        block.origin + plane * block.plane_stride;  // rows follow one another
    typename S::value_t* const to = block.raw(plane);
#if __CUDA_ARCH__ >= 900
    if (bulk) {
      if (threadIdx.x != plane % kBlockWarps * 32 || plane >= planes) return;
      const int bytes = items * 4 * int(sizeof(typename S::value_t));
      arrive(arrived(plane), S::kIn * bytes);
      for (int k = 0; k < S::kIn; k++)
        copy_bulk(to + k * items * 4, from + k * channel, bytes, arrived(plane));
      return;
    }
#endif
    if (plane < planes) {
      block.for_items(plane, [&](int i) {
#pragma unroll
        for (int k = 0; k < S::kIn; k++) {
          if (block.c.aligned) {
            copy_async<4 * sizeof(typename S::value_t)>(to + (k * items + i) * 4, from + k * channel + i * 4);
          } else if constexpr (S::kSplit) {
            copy_async<4>(to + k * items + i, from + k * channel + i);
          } else {
            to[k * items + i] = from[k * channel + i];  // too few bytes for an asynchronous copy
          }
        }
      });
    }
    commit_copies();  // a group, empty where there is no plane
  }

  // Until the plane is there; the next one's copies have set off. `parities` has a bit for each of the
  // barriers `arrived`: the parity of the phase that is awaited next.
  __device__ __forceinline__ void await_plane(int plane, uint32_t& parities) const {
    const uint32_t bit = 1u << plane % kRaw;
    if (bulk) {
      await(arrived(plane), (parities & bit) != 0), parities ^= bit;
    } else {
      await_copies<1>();  // all groups but the newest
    }
  }
};

}  // namespace conv::narrow3d
