// The stages of shared memory through which the producers of the wide mainloops by wgmma, forward's and those
// of the gradients, pass operands to the consumers. All of a block's threads go through the stages in the
// same order.
#pragma once
#include "core/wgmma.cuh"

namespace conv {

constexpr int kWarpgroup = 128;  // threads
constexpr int kConsumers = 2;    // warpgroups that multiply

// A place in the pipeline: a stage, and the parity of how often all stages have been gone through.
template <int kStages> struct PipelineState {
  int stage = 0;
  uint32_t parity = 0;
  __device__ __forceinline__ void advance() {
    if (++stage == kStages) stage = 0, parity ^= 1;
  }
};

#if TENSOR_CORE_WGMMA

// Two barriers per stage: `full` once all producer threads have written it, `empty` once all consumers'
// warps have read it. (One warp's word for four would not do: another that still waits for the stage could
// miss it.)
template <int kStages> struct Pipeline {
  using State = PipelineState<kStages>;
  static constexpr int kCount = kStages;
  uint64_t *full, *empty;

  __device__ __forceinline__ explicit Pipeline(void* barriers)
      : full(static_cast<uint64_t*>(barriers)), empty(full + kStages) {}
  // By one thread, before the block's others come to the barriers.
  __device__ __forceinline__ void initialize(int producer_threads) const {
    for (int i = 0; i < kStages; i++)
      tensor_core::initialize(full + i, producer_threads),
          tensor_core::initialize(empty + i, kConsumers * kWarpgroup / 32);
    tensor_core::publish_barriers();
  }
  __device__ __forceinline__ void producer_acquire(const State& at) const {
    tensor_core::await(empty + at.stage, at.parity ^ 1);
  }
  __device__ __forceinline__ void producer_commit(const State& at) const {
    tensor_core::publish_shared();
    tensor_core::arrive(full + at.stage);
  }
  __device__ __forceinline__ void consumer_wait(const State& at) const {
    tensor_core::await(full + at.stage, at.parity);
  }
  __device__ __forceinline__ void consumer_release(const State& at) const {
    if (threadIdx.x % 32 == 0) tensor_core::arrive(empty + at.stage);
  }
};

#endif

}  // namespace conv
