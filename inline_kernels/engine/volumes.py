"""The backward pass of a 3-D convolution inside our kernels (kernels/grad/narrow3d_backward.cuh): what problems with one share."""

from __future__ import annotations

from collections.abc import Callable

from inline_kernels.engine import library, tiling


def plan_backward(plan, name: str, defines: dict, *numbers) -> Callable:
    """What gives the launcher `backward` of the kernels `name`. numbers: the problem's own, which come first."""
    return plan.when_needed(
        name, defines, "backward", *numbers, tiling.SAMPLES_BYTES, launchers=("backward",)
    )


def backward(plan, a: tuple, inputs: tuple, needs) -> tuple:
    """The gradients of x, weight and the parameters by channel, by `plan.backward`, whose kernels take the problem's own `inputs`."""
    new, gradients = a.x.new_empty, plan.gradients(a)
    dx = new(*a.x.shape) if needs[0] else plan.none
    dw = new(*a.weight.shape) if needs[1] else plan.none
    plan.backward()(dx, dw, *gradients, *inputs)
    dx = dx.contiguous(memory_format=library.result_format(a.x, a.weight, True)) if needs[0] else dx
    return dx, dw, *plan.as_parameters(a, gradients)
