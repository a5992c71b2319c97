"""The backward pass of a 3-D convolution inside our kernels (kernels/conv3d_backward.cuh): what problems with one share."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

import library
import tiling


def plan_backward(plan, name: str, a: tuple, *numbers, of_sample, of_job=0, **defines) -> tuple[tuple, tuple]:
    """For `backward`, without and with the gradient of x: what gives the launcher of the kernels `name`, a build with `defines`, which take the
    problem's own `numbers` first, and how many float32 of scratch they need: of_sample and of_job are the problem's own of them, for a
    sample and for a tile's 16 channels."""
    room = of_sample, of_job + 16 * math.prod(a.weight.shape[1:]) + 16  # weights' gradients, dv's largest
    return tuple([_planned(plan, name, a, numbers, room, defines, dx) for dx in (False, True)])


def _planned(plan, name, a, numbers, room, defines, dx: bool) -> tuple[Callable, int]:
    (N, _, *size), (of_sample, of_job) = a.x.shape, room
    of_tiles, tiles = tiling.plan_volume_backward(a.x, a.weight, dx=dx)
    last = *numbers, N, *size, *tiles.launch
    launch = plan.when_needed(name, of_tiles | defines, "backward", *last)
    return launch, tiles.dv + N * of_sample + tiles.jobs * of_job


def backward(plan, a: tuple, inputs: tuple, needs) -> tuple:
    """The gradients of x, weight and the parameters by channel, by `plan.backward`, whose kernels take the problem's own `inputs`."""
    (launch, scratch), new = plan.backward[needs[0]], a.x.new_empty
    dx = new(*a.x.shape) if needs[0] else plan.none
    dw = new(*a.weight.shape) if needs[1] else plan.none
    gradients = plan.gradients(a)
    launch()(dx, dw, *gradients, new(scratch, dtype=torch.float32), *inputs)
    dx = dx.contiguous(memory_format=library.result_format(a.x, a.weight, True)) if needs[0] else dx
    return dx, dw, *plan.as_parameters(a, gradients)
