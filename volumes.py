"""The backward pass of a 3-D convolution inside our kernels (kernels/conv3d_backward.cuh): what problems with one share."""

from __future__ import annotations

import math

import torch

import library
import operators
import tiling


def backward(plan, name: str, a: tuple, inputs: tuple, needs, *, of_sample, of_job=0, **defines) -> tuple:
    """The gradients of x, weight and the parameters by channel, where forward ran by `plan`: by the kernels `name`, which take the
    problem's `inputs` and `defines`. of_sample, of_job: float32 of its scratch, for a sample, and for a tile's 16 channels."""
    dx_wanted, kept = needs[0], vars(plan).setdefault("backward", {})
    if dx_wanted not in kept:
        planned, tiles = tiling.plan_volume_backward(a.x, a.weight, dx=dx_wanted)
        kept[dx_wanted] = tiles, operators.load(name, a.x, plan.y_dtype, **planned, **defines)
    (tiles, kernels), (N, _, *size) = kept[dx_wanted], a.x.shape
    of_job += 16 * math.prod(a.weight.shape[1:]) + 16  # the weights' gradients, and dv's largest
    scratch = a.x.new_empty(tiles.dv + N * of_sample + tiles.jobs * of_job, dtype=torch.float32)
    dx, dw = [t.new_empty(t.shape if need else 0) for t, need in zip(a[:2], needs)]
    gradients, sizes = plan.gradients(a), (N, *size, *tiles.launch)
    kernels.backward(dx, dw, *gradients, scratch, *inputs, *sizes)
    dx = dx.contiguous(memory_format=library.result_format(a.x, a.weight, True)) if dx_wanted else dx
    return dx, dw, *plan.as_parameters(a, gradients)
