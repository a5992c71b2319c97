"""The backward pass of a 3-D convolution inside our kernels (kernels/grad/narrow3d_backward.cuh): what problems with one share."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from inline_kernels.engine import library, tiling


def plan_backward(plan, name: str, a: tuple, *numbers, of_sample, of_job=0, **defines) -> tuple[tuple, tuple]:
    """What `backward` needs, without the gradient of x and with it: what gives the launcher of the kernels `name`, and how many float32
    of scratch it takes. numbers: the problem's own, which come first. of_sample, of_job: the problem's own share of scratch, for a
    sample and for a tile's 16 channels."""
    room = of_sample, of_job + 16 * math.prod(a.weight.shape[1:]) + 16  # weights' gradients, dv's largest
    return tuple([_planned(plan, name, a, numbers, room, defines, dx) for dx in (False, True)])


def _planned(plan, name, a, numbers, room, defines, dx: bool) -> tuple[Callable, int]:
    (N, _, *size), (of_sample, of_job) = a.x.shape, room
    of_tiles, tiles = tiling.plan_volume_backward(a.x, a.weight, dx=dx)
    last = *numbers, N, *size, *tiles.launch
    launcher = plan.when_needed(name, of_tiles | defines, "backward", *last, launchers=("backward",))
    return launcher, tiles.dv + N * of_sample + tiles.jobs * of_job


def backward(plan, a: tuple, inputs: tuple, needs) -> tuple:
    """The gradients of x, weight and the parameters by channel, by `plan.by_dx`, whose kernels take the problem's own `inputs`."""
    (launcher, scratch), new = plan.by_dx[needs[0]], a.x.new_empty
    dx = new(*a.x.shape) if needs[0] else plan.none
    dw = new(*a.weight.shape) if needs[1] else plan.none
    gradients = plan.gradients(a)
    launcher()(dx, dw, *gradients, new(scratch, dtype=torch.float32), *inputs)
    dx = dx.contiguous(memory_format=library.result_format(a.x, a.weight, True)) if needs[0] else dx
    return dx, dw, *plan.as_parameters(a, gradients)
