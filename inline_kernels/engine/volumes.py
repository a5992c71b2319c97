"""The backward pass of a 3-D convolution inside our kernels (kernels/grad/narrow3d_backward.cuh): what problems with one share."""

from __future__ import annotations

from collections.abc import Callable

from inline_kernels.engine import library, tiling


def plan_backward(plan, name: str, a: tuple, *numbers, **defines) -> tuple[Callable, Callable]:
    """What gives the launcher `backward` of the kernels `name`, without the gradient of x and with it. numbers: the problem's own, which
    come first."""
    return tuple([_planned(plan, name, a, numbers, defines, dx) for dx in (False, True)])


def _planned(plan, name, a, numbers, defines, dx: bool) -> Callable:
    of_tiles, tiles = tiling.plan_volume_backward(a.x, a.weight, dx=dx)
    last = *numbers, *tiles.launch
    return plan.when_needed(name, of_tiles | defines, "backward", *last, launchers=("backward",))


def backward(plan, a: tuple, inputs: tuple, needs) -> tuple:
    """The gradients of x, weight and the parameters by channel, by `plan.by_dx`, whose kernels take the problem's own `inputs`."""
    launcher, new = plan.by_dx[needs[0]], a.x.new_empty
    dx = new(*a.x.shape) if needs[0] else plan.none
    dw = new(*a.weight.shape) if needs[1] else plan.none
    gradients = plan.gradients(a)
    launcher()(dx, dw, *gradients, *inputs)
    dx = dx.contiguous(memory_format=library.result_format(a.x, a.weight, True)) if needs[0] else dx
    return dx, dw, *plan.as_parameters(a, gradients)
