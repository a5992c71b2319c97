"""The backward pass of a 3-D convolution inside our kernels (kernels/conv3d_backward.cuh): what problems with one share."""

from __future__ import annotations

import math

import torch

import library
import tiling


def backward(plan, name: str, a: tuple, inputs, numbers, needs, *, of_sample, of_job=0, **defines) -> tuple:
    """The gradients of x, weight and the parameters by channel, where forward ran by `plan`: by the kernels `name`, which take the
    problem's `inputs`, `numbers` and `defines`. of_sample, of_job: float32 of its scratch, for a sample, and for a tile's 16 channels."""
    dx_wanted, kept = needs[0], vars(plan).setdefault("backward", {})
    if dx_wanted not in kept:
        (N, _, *size), (planned, tiles) = a.x.shape, tiling.plan_volume_backward(a.x, a.weight, dx=dx_wanted)
        of_filters = 16 * math.prod(a.weight.shape[1:]) + 16  # the weights' gradients, and dv's largest
        scratch = tiles.dv + N * of_sample + tiles.jobs * (of_job + of_filters)
        last = N, *size, *tiles.launch
        kept[dx_wanted] = plan.when_needed(name, planned | defines, "backward", *numbers, *last), scratch
    launch, scratch = kept[dx_wanted]
    dx, dw = [t.new_empty(*t.shape) if need else plan.none for t, need in zip(a[:2], needs)]
    gradients = plan.gradients(a)
    launch(dx, dw, *gradients, a.x.new_empty(scratch, dtype=torch.float32), *inputs)
    dx = dx.contiguous(memory_format=library.result_format(a.x, a.weight, True)) if dx_wanted else dx
    return dx, dw, *plan.as_parameters(a, gradients)
