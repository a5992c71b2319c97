// Launches what a small 3-D convolution's backward pass consists of (grad/narrow3d_weight.cuh,
// grad/narrow3d_input.cuh), once the problem knows its coefficients.
#pragma once
#include "grad/narrow3d_input.cuh"
#include "grad/narrow3d_weight.cuh"
#include "core/launch.cuh"

namespace grad::narrow3d {

constexpr int kBackwardShared =
    18 << 10;  // bytes of shared memory that all kernels of it have for their own arrays

// The tiles of a backward pass, which gives dv of as many whole samples a turn as `dv_bytes` hold, where x
// needs a gradient. (The others must not depend on that.)
template <class S>
Convolution<S> backward_convolution(const In<typename S::value_t>& x, const In<typename S::value_t>& weight,
                                    int64_t dv_bytes) {
  int64_t results = 4 * S::kOut;  // bytes of a sample's
  const int taps[] = {S::kDepth, S::kHeight, S::kWidth};
  for (int i = 0; i < 3; i++) results *= x.size(i - 3) - taps[i] + 1;
  const int64_t samples = min(x.size(0), max(dv_bytes / results, int64_t(1)));
  return convolution<S>(x, weight, kBackwardShared, false, samples);
}

// How scratch for dv is used: for jobs of so many whole samples, where x needs a gradient.
struct BackwardPlan {
  int64_t N, jobs_of_sample, jobs, samples, dv_values;  // samples at a time; float4
  int multiprocessors, input_room;                      // input_room: as in InputTiling
  template <class S>
  BackwardPlan(const Convolution<S>& c, bool dx, int64_t dv_bytes)
      : N(c.N), jobs_of_sample(int64_t(c.slots()) * kJobsPerTile<S>), jobs(N * jobs_of_sample),
        multiprocessors(device_attribute(cudaDevAttrMultiProcessorCount)),
        input_room(device_attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin) - kBackwardShared) {
    const int64_t of_sample = DvLayout(c).of_job(c) * jobs_of_sample;
    samples = dx ? min(N, max(dv_bytes / (int64_t(sizeof(float4)) * of_sample), int64_t(1))) : N;
    dv_values = dx ? samples * of_sample : 0;
  }
  // That fill the GPU, and share out all jobs.
  unsigned blocks() const { return unsigned(min(jobs, int64_t(multiprocessors))); }
};

// What all kinds of it need while they run. By job: `partial`, the weight's gradient of 16 channels, and
// `most`, the largest |dv| by channel.
template <class S> struct BackwardScratch {
  const BackwardPlan plan;
  const Scratch<float4> dv;
  const Scratch<NormGradient> coefficients;  // (N, kOut)
  const Scratch<float> partial, most;
  BackwardScratch(const Convolution<S>& c, bool dx, int64_t dv_bytes, cudaStream_t stream)
      : plan(c, dx, dv_bytes), dv(plan.dv_values, stream), coefficients(c.N * S::kOut, stream),
        partial(plan.jobs * kFilters<S>, stream), most(plan.jobs * 16, stream) {}
};

// dx and d_weight, where they have elements, and the parameters' gradients. by_sample and d_level as in
// merge_kernel.
template <class S, class Problem, int kCount>
void convolution_backward(Out<typename S::value_t> dx, Out<typename S::value_t> d_weight,
                          const ManyRowSums<kCount>& parameters, const BackwardScratch<S>& scratch,
                          const float* by_sample, const float* d_level, const Problem& problem,
                          const Convolution<S>& c, cudaStream_t stream) {
  const BackwardPlan& plan = scratch.plan;
  if (dx) expect(dx, c.N * S::kIn * c.channel);
  if (d_weight) expect(d_weight, S::kOut * S::kIn * S::kTaps);
  float4* const dv = scratch.dv;
  float *const most = scratch.most, *const partial = scratch.partial;
  const int64_t samples = plan.samples;
  allow_shared<gradient_kernel<S, Problem>>(), allow_shared<input_gradient_kernel<S, Problem>>();
  for (int64_t first = 0; first < plan.N && (dx || d_weight); first += samples) {
    const int64_t count = min(samples, plan.N - first), jobs = count * plan.jobs_of_sample;
    const int64_t first_job = first * plan.jobs_of_sample;
    const unsigned gradient_blocks = dx ? unsigned(jobs) : plan.blocks();
    gradient_kernel<S, Problem><<<gradient_blocks, kBlock, c.shared, stream>>>(
        dx ? dv : nullptr, dx ? most : nullptr, d_weight ? partial : nullptr, problem, unsigned(first_job),
        unsigned(first_job + jobs), c);
    if (!dx) continue;
    const InputTiling<S> tiling(c, count, plan.multiprocessors, plan.input_room);
    // Without room there are no blocks, and the launch fails.
    const unsigned blocks = tiling.shared() <= plan.input_room ? unsigned(count) * tiling.tiles() : 0;
    const auto of_input = input_gradient_kernel<S, Problem>;
    of_input<<<blocks, kInputBlock, tiling.shared(), stream>>>(dx, dv, most, problem, first, tiling, c);
  }
  const unsigned blocks = blocks_for(S::kOut * S::kIn * S::kTaps + kCount * S::kOut, kMergeColumns);
  merge_kernel<<<blocks, kMergeColumns * kMergeRows, 0, stream>>>(d_weight, parameters, partial, by_sample,
                                                                  d_level, problem, plan.N, c);
}

}  // namespace grad::narrow3d
