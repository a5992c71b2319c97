// Launches what a small 3-D convolution's backward pass consists of (grad/narrow3d_weight.cuh,
// grad/narrow3d_input.cuh), once the problem knows its coefficients.
#pragma once
#include "grad/narrow3d_input.cuh"
#include "grad/narrow3d_weight.cuh"
#include "core/launch.cuh"

namespace grad::narrow3d {

// How `dv_slots` jobs' worth of scratch for dv are used: those of whole samples, where x needs a gradient.
struct BackwardPlan {
  int64_t N, jobs_of_sample, jobs, dv_slots, dv_values;  // float4
  int multiprocessors;
  template <class S>
  BackwardPlan(const Convolution<S>& c, int64_t dv_slots)
      : N(c.N),
        jobs_of_sample(int64_t(c.slots()) * kJobsPerTile<S>),
        jobs(N * jobs_of_sample),
        dv_slots(dv_slots),
        dv_values(dv_slots * DvLayout(c).of_job(c)),
        multiprocessors(device_attribute(cudaDevAttrMultiProcessorCount)) {}
  // That fill the GPU, and share out all jobs.
  unsigned blocks() const { return unsigned(min(jobs, int64_t(multiprocessors))); }
};

// What all kinds of it need while they run. By job: `partial`, the weight's gradient of 16 channels, and
// `most`, the largest |dv| by channel.
template <class S>
struct BackwardScratch {
  const BackwardPlan plan;
  const Scratch<float4> dv;
  const Scratch<NormGradient> coefficients;  // (N, kOut)
  const Scratch<float> partial, most;
  BackwardScratch(const Convolution<S>& c, int64_t dv_slots, cudaStream_t stream)
      : plan(c, dv_slots),
        dv(plan.dv_values, stream),
        coefficients(c.N * S::kOut, stream),
        partial(plan.jobs * kFilters<S>, stream),
        most(plan.jobs * 16, stream) {}
};

// dx and d_weight, where they have elements, and the parameters' gradients. by_sample and d_level as in
// merge_kernel, input_room as in InputTiling.
template <class S, class Problem, int kCount>
void convolution_backward(Out<typename S::value_t> dx, Out<typename S::value_t> d_weight,
                          const ManyRowSums<kCount>& parameters, const BackwardScratch<S>& scratch,
                          const float* by_sample, const float* d_level, const Problem& problem,
                          int64_t input_room, const Convolution<S>& c, cudaStream_t stream) {
  const BackwardPlan& plan = scratch.plan;
  if (dx) expect(dx, c.N * S::kIn * c.channel);
  if (d_weight) expect(d_weight, S::kOut * S::kIn * S::kTaps);
  float4* const dv = scratch.dv;
  float *const most = scratch.most, *const partial = scratch.partial;
  const int64_t samples = dx ? max(plan.dv_slots / plan.jobs_of_sample, int64_t(1)) : plan.N;  // at a time
  allow_shared<gradient_kernel<S, Problem>>(), allow_shared<input_gradient_kernel<S, Problem>>();
  for (int64_t first = 0; first < plan.N && (dx || d_weight); first += samples) {
    const int64_t count = min(samples, plan.N - first), jobs = count * plan.jobs_of_sample;
    const int64_t first_job = first * plan.jobs_of_sample;
    const unsigned gradient_blocks = dx ? unsigned(jobs) : plan.blocks();
    gradient_kernel<S, Problem><<<gradient_blocks, kBlock, c.shared, stream>>>(
        dx ? dv : nullptr, dx ? most : nullptr, d_weight ? partial : nullptr, problem, unsigned(first_job),
        unsigned(first_job + jobs), c);
    if (!dx) continue;
    const InputTiling<S> tiling(c, count, plan.multiprocessors, input_room);
    // Without room there are no blocks, and the launch fails.
    const unsigned blocks = tiling.shared() <= input_room ? unsigned(count) * tiling.tiles() : 0;
    const auto of_input = input_gradient_kernel<S, Problem>;
    of_input<<<blocks, kInputBlock, tiling.shared(), stream>>>(dx, dv, most, problem, first, tiling, c);
  }
  const unsigned blocks = blocks_for(S::kOut * S::kIn * S::kTaps + kCount * S::kOut, kMergeColumns);
  merge_kernel<<<blocks, kMergeColumns * kMergeRows, 0, stream>>>(d_weight, parameters, partial, by_sample,
                                                                  d_level, problem, plan.N, c);
}

}  // namespace grad::narrow3d
