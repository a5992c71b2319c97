"""y = max over channels of multiplier * clamp(instance_norm(conv3d(x) * multiplier), clamp_min, clamp_max)."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import NamedTuple

import torch
from torch import Tensor, nn

import library
import operators
import tiling
from loader_operators import declare
from problems import Problem
from twin import Twin

NAME = "conv3d_multiply_instancenorm_clamp_multiply_max"
STATIC_SHARED = 3584  # bytes of the fused kernels' own arrays


class Conv3dMultiplyInstanceNormClampMultiplyMax(nn.Module):
    """y = max over channels of multiplier * clamp(instance_norm(conv(x) * multiplier), clamp_min, clamp_max).

    x (N, in_channels, D, H, W) gives y (N, D', H', W').
    """

    def __init__(self, in_channels, out_channels, kernel_size, multiplier_shape, clamp_min, clamp_max):
        super().__init__()
        self.conv = nn.Conv3d(in_channels, out_channels, kernel_size)
        self.multiplier = nn.Parameter(torch.randn(multiplier_shape))
        self.instance_norm = nn.InstanceNorm3d(out_channels)
        self.clamp_min = clamp_min
        self.clamp_max = clamp_max

    def forward(self, x):
        x = self.conv(x)
        x = x * self.multiplier
        x = self.instance_norm(x)
        x = torch.clamp(x, self.clamp_min, self.clamp_max)
        x = x * self.multiplier
        return torch.max(x, dim=1)[0]


class Arguments(NamedTuple):
    """What the operators take. They return y (N, D', H', W') in multiplier's dtype."""

    x: Tensor  # (N, Cin, D, H, W)
    weight: Tensor  # (C, Cin, kd, kh, kw)
    conv_bias: Tensor  # C elements
    multiplier: Tensor  # C elements or 1
    low: float
    high: float
    eps: float

    def by_channel(self, plan: SimpleNamespace | None = None) -> tuple[Tensor, ...]:
        if plan and plan.ready:
            return self[2:4]
        return operators.by_channel(self.x, self.weight, ("conv_bias", "multiplier?"), *self[2:4])


# ----------------------------------------------------------------- epilogue: the library's convolution, then our tail


def _plan(a: Arguments, *, saving: bool) -> SimpleNamespace:
    """How such an input is convolved, and by what the rest is computed."""
    ctype, index_dtype = operators.index_type(len(a.weight))
    kernels = operators.load(NAME, a.x, a.multiplier.dtype, INDEX_T=ctype)
    size, empty = library.output_size(a.x, a.weight), a.x.new_empty
    return SimpleNamespace(
        ready=operators.are_ready(a.x, a.weight, *a[2:4]),
        kernels=kernels,
        convolve=library.convolution(a.x, a.weight, kernels),
        size=size,
        sizes=(len(a.weight), math.prod(size)),
        samples=library.samples_per_piece(a.x, a.weight, saving),
        nothing=None if saving else (empty(0, dtype=index_dtype), empty(0), operators.no_statistics(a.x)),
    )


def _outputs(a: Arguments, size: list[int], nothing: tuple | None) -> tuple[Tensor, ...]:
    """y; the index and v of the channels that won, like y; v's statistics by channel; the last three for backward, or `nothing`."""
    N, C, device = a.x.shape[0], a.weight.shape[0], a.x.device
    y = torch.empty((N, *size), dtype=a.multiplier.dtype, device=device)
    index, winner, statistics = nothing or (None, None, None)
    if index is None:
        index, winner = (
            torch.empty_like(y, dtype=dtype) for dtype in (operators.index_type(C)[1], a.x.dtype)
        )
    if statistics is None:
        statistics = torch.empty((N, 2 * C), dtype=operators.accumulate_dtype(a.x.dtype), device=device)
    return y, index, winner, statistics


def _epilogue(a: Arguments, *, plan: SimpleNamespace, saving: bool) -> tuple[Tensor, ...]:
    parameters = a.by_channel(plan)
    y, *others = _outputs(a, plan.size, plan.nothing)
    for x, *outputs in library.pieces(plan.samples, a.x, y, *others):
        v = plan.convolve(x, a.weight)
        plan.kernels.forward(*outputs, v, *parameters, *a[4:], x.shape[0], *plan.sizes)
    return (y, v, *others) if saving else (y,)


def _shapes(a: Arguments, *, saving: bool) -> tuple[Tensor, ...]:
    size = library.output_size(a.x, a.weight)
    y, *others = _outputs(a, size, None)
    return (y, a.x.new_empty(a.x.shape[0], a.weight.shape[0], *size), *others) if saving else (y,)


def _backward(dy: Tensor, a: Arguments, v, index, winner, statistics, *, plan, needs) -> tuple:
    parameters, N, (C, S) = a[2:4], v.shape[0], plan.sizes
    dv, gradients = torch.empty_like(v), operators.gradients_of(a.x, *parameters)
    scratch = torch.empty((5, N, C), dtype=statistics.dtype, device=v.device)
    inputs = dy.contiguous(), v, index, winner, statistics, *a.by_channel(plan)
    plan.kernels.backward(dv, *gradients, scratch, *inputs, *a[4:], a.multiplier.numel(), N, C, S)
    dx, dw = library.convolve_backward(dv, a.x, a.weight, torch.contiguous_format, needs)
    return dx, dw, *operators.as_parameters(gradients, *parameters)


def _gradients(a: Arguments) -> list[Tensor]:
    return library.gradient_shapes(*a[:4])


epilogue = declare(NAME, _epilogue, shapes=_shapes, backward=_backward, gradients=_gradients, plan=_plan)


# ------------------------------------------------------------------------------ fused: the convolution inside our kernels


def _plan_fused(a: Arguments, *, saving: bool) -> SimpleNamespace:
    (N, _, *size), tiles = a.x.shape, tiling.plan_volume(a.x, a.weight, STATIC_SHARED, vectors=False)
    defines = tiling.volume_defines(tiles, a.weight, a.x.element_size(), STATIC_SHARED)
    held = tiling.held_values(tiles, a.x, a.weight)  # sums that then need not be computed twice
    return SimpleNamespace(
        ready=operators.are_ready(a.x, a.weight, *a[2:4]),
        kernels=operators.load(f"{NAME}_fused", a.x, a.multiplier.dtype, **defines),
        y=(N, *library.output_size(a.x, a.weight)),
        scratch=2 * N * tiles.slots * len(a.weight) + held,  # statistics of each block first
        sizes=(held, N, *size, *tiles.launch),
    )


def _fused(a: Arguments, *, plan: SimpleNamespace) -> Tensor:
    y = torch.empty(plan.y, dtype=a.multiplier.dtype, device=a.x.device)
    scratch = torch.empty(plan.scratch, dtype=torch.float32, device=a.x.device)
    inputs = a.x.contiguous(), a.weight.contiguous(), *a.by_channel(plan)
    plan.kernels.forward(y, scratch, *inputs, *a[4:], *plan.sizes)
    return y


fused = operators.declare_fused(epilogue, _fused, _plan_fused)


# ------------------------------------------------------------------------------------------------------------- the model


class Conv3dMultiplyInstanceNormClampMultiplyMaxNew(Twin, Conv3dMultiplyInstanceNormClampMultiplyMax):
    __doc__ = Conv3dMultiplyInstanceNormClampMultiplyMax.__doc__
    submodules = {"conv": nn.Conv3d, "instance_norm": nn.InstanceNorm3d}
    operands = ("conv.weight", "conv.bias", "multiplier")
    constants = {"clamp_min": float, "clamp_max": float, "instance_norm.eps": float}
    epilogue, fused = epilogue, fused

    def _tail_raises(self, x, size):
        return math.prod(size) == 1

    def _tail_obstacle(self):
        norm = self.instance_norm
        own = [*norm._parameters.values(), *norm._buffers.values()]
        if norm.track_running_stats or any(t is not None for t in own):
            return "instance_norm has an affine or running statistics"
        return self._not_by_channel("multiplier")

    def _fused_obstacle(self, x, dtype):
        return tiling.volume_obstacle(x, self.conv.weight, dtype, STATIC_SHARED)


PROBLEM = Problem(
    NAME,
    number=79,
    Model=Conv3dMultiplyInstanceNormClampMultiplyMax,
    ModelNew=Conv3dMultiplyInstanceNormClampMultiplyMaxNew,
    init_inputs=(3, 16, 3, (16, 1, 1, 1), -1.0, 1.0),
    input_shape=(128, 3, 16, 32, 32),
    cpu_batch_size=8,
)
