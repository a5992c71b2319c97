"""y = max over channels of multiplier * clamp(instance_norm(conv3d(x) * multiplier), clamp_min, clamp_max)."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor, nn

from inline_kernels.engine import library, operators, tiling, volumes
from inline_kernels.engine.twin import Twin
from inline_kernels.problems import Problem

NAME = "conv3d_multiply_instancenorm_clamp_multiply_max"
STATIC_SHARED = 3584  # bytes of the fused kernels' own arrays, at most
# Bytes, where backward follows: each warp's sums, on their way to threads that have a position's channels.
STAGED_SHARED = 30 << 10
PARAMETERS = "conv_bias", "multiplier?"  # by channel; "?": or one for all channels


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


# ----------------------------------------------------------------- epilogue: the library's convolution, then our tail
def _outputs(a: Arguments, saving: bool) -> list[operators.Output]:
    """y; for backward the index and v of the channels that won, like y, v's statistics by channel, and v."""
    (N, *_), (C, *_), size = a.x.shape, a.weight.shape, library.output_size(a.x, a.weight)
    won = (N, *size) if saving else 0
    return [
        ((N, *size), a.multiplier.dtype),
        (won, operators.index_type(C)[1]),
        (won, a.x.dtype),
        operators.statistics(a, 2 * C, 0, saving),
        ((N, C, *size), a.x.dtype),
    ]


def _plan(a: Arguments, *, saving: bool) -> operators.Plan:
    """How such an input is convolved, and by what the rest is computed."""
    defines = {"INDEX_T": operators.index_type(len(a.weight))[0]}
    plan = operators.Plan(NAME, a, PARAMETERS, _outputs(a, saving)[:-1], defines)
    plan.convolve = library.convolution(a.x, a.weight, plan.kernels)
    plan.sizes = len(a.weight), math.prod(library.output_size(a.x, a.weight))
    plan.samples = library.samples_per_piece(a.x, a.weight, saving)
    plan.sums_directly = library.sums_directly(a.x, a.weight)
    return plan


def _epilogue(a: Arguments, *, plan: operators.Plan, saving: bool) -> tuple[Tensor, ...]:
    parameters, (y, *others) = plan.parameters(a), plan.outputs(a)
    for x, *outputs in library.pieces(plan.samples, a.x, y, *others):
        v = plan.convolve(x, a.weight)
        plan.kernels.forward(*outputs, v, *parameters, *a[4:], x.shape[0], *plan.sizes)
    return (y, *others, v) if saving else (y,)


def _backward(dy: Tensor, a: Arguments, index, winner, statistics, v, *, plan, needs) -> tuple:
    N, (C, S), gradients, directly = (
        v.shape[0],
        plan.sizes,
        plan.gradients(a),
        plan.sums_directly and needs[1],
    )
    dv = v.new_empty(v.shape if needs[0] or not directly else 0)
    scratch = torch.empty((5, N, C), dtype=statistics.dtype, device=v.device)
    inputs = (
        dy.contiguous(),
        v,
        index,
        winner,
        statistics,
        plan.parameters(a)[1],
        *a[4:],
        a.multiplier.numel(),
    )
    if directly:
        dw, sizes = a.weight.new_empty(a.weight.shape), library.filter_sizes(a.x, a.weight)
        plan.kernels.convolve_backward(dv, dw, *gradients, scratch, *inputs, library.contiguous(a.x), *sizes)
    else:
        plan.kernels.backward(dv, *gradients, scratch, *inputs, N, C, S)
    needs = [needs[0], needs[1] and not directly]
    dx, library_dw = library.convolve_backward(dv, a.x, a.weight, torch.contiguous_format, needs)
    return dx, dw if directly else library_dw, *plan.as_parameters(a, gradients)


epilogue = operators.declare(NAME, _epilogue, outputs=_outputs, backward=_backward, plan=_plan)


# ------------------------------------------------------------------------------ fused: the convolution inside our kernels
def _fused_outputs(a: Arguments, saving: bool) -> list[operators.Output]:
    """y; for backward, in one: v - mean of the channels that won, like y, v's mean and variance by channel, and those channels' indices."""
    y, (_, index_dtype), *_ = _outputs(a, False)
    won = math.prod(y[0])
    kept = won + 2 * a.x.shape[0] * len(a.weight) + tiling.ceil_div(won * index_dtype.itemsize, 4)
    return [y, (kept if saving else 0, torch.float32)]


def _defines(weight: Tensor) -> dict[str, object]:
    return {"INDEX_T": operators.index_type(len(weight))[0], **tiling.spatial_defines(weight.shape)}


def _plan_fused(a: Arguments, *, saving: bool) -> operators.Plan:
    name, constants = f"{NAME}_fused", (a.low, a.high, a.eps)
    defines = _defines(a.weight)
    given = _fused_outputs(a, saving), defines
    numbers = *constants, tiling.held_bytes(a.x)
    plan = operators.Plan(name, a, PARAMETERS, *given, numbers=numbers, launchers=("forward",))
    if saving:
        plan.backward = volumes.plan_backward(plan, name, defines, *constants)
    return plan


def _fused_backward(dy: Tensor, a: Arguments, kept, *, plan, needs) -> tuple:
    operands = dy.contiguous(), a.x.contiguous(), a.weight.contiguous(), kept
    return volumes.backward(plan, a, (*operands, plan.parameters(a)[1]), needs)


fused = operators.declare_fused(
    NAME, outputs=_fused_outputs, backward=_fused_backward, plan=_plan_fused, scratch=False
)


class Conv3dMultiplyInstanceNormClampMultiplyMaxNew(Twin, Conv3dMultiplyInstanceNormClampMultiplyMax):
    submodules = {"conv": nn.Conv3d, "instance_norm": nn.InstanceNorm3d}
    operands = ("conv.weight", "conv.bias", "multiplier")
    constants = {"clamp_min": float, "clamp_max": float, "instance_norm.eps": float}
    epilogue, fused = epilogue, fused

    def _tail_raises(self, x, size):
        return math.prod(size) == 1

    def _tail_obstacle(self):
        norm = self.instance_norm
        own = [*norm._parameters.values(), *norm._buffers.values()]
        if norm.track_running_stats or any([t is not None for t in own]):
            return "instance_norm has an affine or running statistics"

    def _fused_obstacle(self, x, dtype):
        own_shared = max(STATIC_SHARED + STAGED_SHARED, tiling.BACKWARD_SHARED)
        return tiling.volume_obstacle(x, self.conv.weight, dtype, own_shared)

    def _fused_defines(self, x):
        numbers = {"DV_BYTES": tiling.SAMPLES_BYTES, "CACHE_SHARE": tiling.HELD_SHARE}
        return _defines(self.conv.weight) | numbers


PROBLEM = Problem(
    NAME,
    number=79,
    Model=Conv3dMultiplyInstanceNormClampMultiplyMax,
    ModelNew=Conv3dMultiplyInstanceNormClampMultiplyMaxNew,
    init_inputs=(3, 16, 3, (16, 1, 1, 1), -1.0, 1.0),
    input_shape=(128, 3, 16, 32, 32),
    cpu_batch_size=8,
)
