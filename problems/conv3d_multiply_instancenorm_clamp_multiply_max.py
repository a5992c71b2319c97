"""y = max over channels of multiplier * clamp(instance_norm(conv3d(x) * multiplier), clamp_min, clamp_max).

Operators: x (N, Cin, D, H, W), weight (C, Cin, kd, kh, kw), conv_bias (C elements), multiplier (C or 1), the others are numbers;
y (N, D', H', W') in multiplier's dtype. For backward: v (N, C, D', H', W'), the convolution's output; the index of the channel
that won and its v (N, D', H', W'); v's statistics by channel, for the kernels.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn

import inline_loader
import library
import operators
import tiling
from loader_operators import declare, planned
from problems import Problem
from twin import Twin

NAME = "conv3d_multiply_instancenorm_clamp_multiply_max"
BY_CHANNEL = ("conv_bias", "multiplier?")
STATIC_SHARED = 4 << 10  # bytes of the fused kernels' own arrays


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


# ----------------------------------------------------------------- epilogue: the library's convolution, then our tail


class _Way(NamedTuple):
    """How such an input is convolved, and what the tail's kernels are."""

    kernels: inline_loader.Operators
    convolve: Callable[[Tensor, Tensor], Tensor]
    size: list[int]  # D', H', W'
    samples: int  # convolved at a time
    nothing: tuple  # index, winner and statistics where none are saved


@planned
def _way(x: Tensor, weight: Tensor, out_dtype: torch.dtype, saving: bool) -> _Way:
    index, index_dtype = operators.index_type(len(weight))
    kernels = operators.load(NAME, x, out_dtype, INDEX_T=index)
    return _Way(
        kernels=kernels,
        convolve=library.convolution(x, weight, kernels),
        size=library.output_size(x, weight),
        samples=library.samples_per_piece(x, weight, saving),
        nothing=(x.new_empty(0, dtype=index_dtype), x.new_empty(0), operators.no_statistics(x)),
    )


def _epilogue(
    x: Tensor,
    weight: Tensor,
    conv_bias: Tensor,
    multiplier: Tensor,
    low: float,
    high: float,
    eps: float,
    *,
    saving: bool,
) -> tuple[Tensor, ...]:
    parameters = operators.by_channel(x, weight, BY_CHANNEL, conv_bias, multiplier)
    way = _way(x, weight, multiplier.dtype, saving)
    y, *others = _outputs(x, weight, multiplier.dtype, way.size, None if saving else way.nothing)
    S = math.prod(way.size)
    for part, *outputs in library.pieces(way.samples, x, y, *others):
        v = way.convolve(part, weight)
        way.kernels.forward(*outputs, v, *parameters, low, high, eps, v.shape[0], v.shape[1], S)
    return (y, v, *others) if saving else (y,)


def _outputs(x: Tensor, weight: Tensor, out_dtype, size, nothing: tuple | None) -> tuple[Tensor, ...]:
    """y, index, winner, statistics; the last three or what `nothing` has in their place, where they aren't saved."""
    N, C, device = x.shape[0], weight.shape[0], x.device
    y = torch.empty((N, *size), dtype=out_dtype, device=device)
    index, winner, statistics = nothing or (None, None, None)
    if index is None:
        index, winner = (torch.empty_like(y, dtype=dtype) for dtype in (operators.index_type(C)[1], x.dtype))
    if statistics is None:
        statistics = torch.empty((N, 2 * C), dtype=operators.accumulate_dtype(x.dtype), device=device)
    return y, index, winner, statistics


def _epilogue_shapes(x, weight, conv_bias, multiplier, low, high, eps, *, saving):
    size = library.output_size(x, weight)
    y, *others = _outputs(x, weight, multiplier.dtype, size, None)
    return (y, x.new_empty(x.shape[0], weight.shape[0], *size), *others) if saving else (y,)


def _epilogue_backward(
    dy, x, weight, conv_bias, multiplier, low, high, eps, v, index, winner, statistics, *, needs
):
    way, (N, C, *size) = _way(x, weight, dy.dtype, True), v.shape
    dv, gradients = torch.empty_like(v), operators.gradients_of(x, conv_bias, multiplier)
    scratch = torch.empty((5, N, C), dtype=statistics.dtype, device=x.device)
    parameters = operators.by_channel(x, weight, BY_CHANNEL, conv_bias, multiplier)
    inputs, sizes = (
        (dy.contiguous(), v, index, winner, statistics, *parameters),
        (multiplier.numel(), N, C, math.prod(size)),
    )
    way.kernels.backward(dv, *gradients, scratch, *inputs, low, high, eps, *sizes)
    dx, dw = library.convolve_backward(dv, x, weight, torch.contiguous_format, needs)
    return dx, dw, *operators.as_parameters(gradients, conv_bias, multiplier)


def _gradient_shapes(x, weight, conv_bias, multiplier, low, high, eps):
    return library.gradient_shapes(x, weight, conv_bias, multiplier)


epilogue = declare(
    NAME, _epilogue, shapes=_epilogue_shapes, backward=_epilogue_backward, gradients=_gradient_shapes
)


# ------------------------------------------------------------------------------ fused: the convolution inside our kernels


class _Launch(NamedTuple):
    """What a call of the fused kernels is made of."""

    kernels: inline_loader.Operators
    shape: tuple[int, ...]  # of y
    statistics: tuple[int, ...]  # of each block
    held: int  # values of scratch for sums that then need not be computed twice
    sizes: tuple[int, ...]


@planned
def _launch(x: Tensor, weight: Tensor, out_dtype: torch.dtype) -> _Launch:
    (N, _, *size), (C, *_) = x.shape, weight.shape
    plan = tiling.plan_volume(x, weight, STATIC_SHARED, vectors=False)
    defines = tiling.volume_defines(plan, weight, x.element_size(), STATIC_SHARED)
    return _Launch(
        kernels=operators.load(f"{NAME}_fused", x, out_dtype, **defines),
        shape=(N, *library.output_size(x, weight)),
        statistics=(N, plan.slots, C, 2),
        held=tiling.held_values(plan, x, weight),
        sizes=(N, *size, *plan.launch),
    )


def _fused(
    x: Tensor, weight: Tensor, conv_bias: Tensor, multiplier: Tensor, low: float, high: float, eps: float
) -> Tensor:
    parameters = operators.by_channel(x, weight, BY_CHANNEL, conv_bias, multiplier)
    launch = _launch(x, weight, multiplier.dtype)
    y = torch.empty(launch.shape, dtype=multiplier.dtype, device=x.device)
    statistics = torch.empty(launch.statistics, dtype=torch.float32, device=x.device)
    scratch = torch.empty(launch.held, dtype=torch.float32, device=x.device)
    inputs = x.contiguous(), weight.contiguous(), *parameters
    launch.kernels.forward(y, statistics, scratch, *inputs, low, high, eps, launch.held, *launch.sizes)
    return y


fused = declare(
    f"{NAME}_fused",
    _fused,
    shapes=lambda *arguments: _epilogue_shapes(*arguments, saving=False)[0],
    backward=operators.by_recomputing(epilogue),
    gradients=_gradient_shapes,
)

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
        if self.instance_norm.affine or self.instance_norm.track_running_stats:
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
