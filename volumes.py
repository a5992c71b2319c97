"""The backward pass of a 3-D convolution inside our kernels (kernels/conv3d_backward.cuh): what problems with one share."""

from __future__ import annotations

import math
from types import SimpleNamespace

import torch
from torch import Tensor

import library
import operators
import tiling

STATIC_SHARED = 18 << 10  # bytes of those kernels' own arrays


class BackwardPlan(SimpleNamespace):
    """How gradients are computed for arguments of one kind: the `kernels`, and `sizes`, the launcher's last arguments."""

    def scratch(self, a: tuple, *, of_sample: int, of_job: int) -> Tensor:
        """float32 for all that is kept between launches; so many of a sample and of a job are the problem's own."""
        of_job += 16 * math.prod(a.weight.shape[1:]) + 16  # the weights' gradients, and dv's largest
        count = self.tiles.dv + len(a.x) * of_sample + self.tiles.jobs * of_job
        return a.x.new_empty(count, dtype=torch.float32)

    def gradients(self, a: tuple, needs: list[bool]) -> list[Tensor]:
        """Where the kernels write the gradients of x and weight; without elements where they are not wanted."""
        return [t.new_empty(t.shape if need else 0) for t, need in zip(a[:2], needs)]

    def as_eager(self, a: tuple, dx: Tensor, dw: Tensor) -> tuple[Tensor, Tensor]:
        layout = library.result_format(*a[:2], True)
        return dx.contiguous(memory_format=layout) if dx.numel() else dx, dw


def defines_of(tiles: tiling.VolumeBackward, x: Tensor, weight: Tensor) -> dict[str, int]:
    """What a build takes from the plan."""
    positions = tiling.input_positions(x.shape[1], weight.shape[2])
    of_tiles = tiling.volume_defines(tiles.tiles, weight, x.element_size(), STATIC_SHARED)
    return {**of_tiles, "INPUT_POSITIONS": positions}


def backward_plan(plan: operators.Plan, name: str, a: tuple, dx: bool, defines: dict) -> BackwardPlan:
    """The plan by the kernels `name`, which take `defines`, too; dx: is the gradient of x wanted? Kept in forward's plan."""
    kept = vars(plan).setdefault("backward", {})
    if dx not in kept:
        tiles = tiling.plan_volume_backward(a.x, a.weight, STATIC_SHARED, dx=dx)
        kernels = operators.load(name, a.x, plan.y_dtype, **defines, **defines_of(tiles, *a[:2]))
        (N, _, *size), sizes = a.x.shape, tiles.launch
        kept[dx] = BackwardPlan(kernels=kernels, tiles=tiles, sizes=(N, *size, *sizes))
    return kept[dx]
