"""y = dropout(clamp(min(group_norm(conv3d(x)), min_value), min_value, max_value), dropout_p)."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor, nn

from inline_kernels.engine import library, operators, tiling, volumes
from inline_kernels.engine.twin import Twin
from inline_kernels.loader.operators import Drawn
from inline_kernels.problems import Problem

NAME = "conv3d_groupnorm_min_clamp_dropout"
STATIC_SHARED = 33 << 10  # bytes of the fused kernels' own arrays, at most
PARAMETERS = "conv_bias", "norm_weight", "norm_bias"  # by channel


class Conv3dGroupNormMinClampDropout(nn.Module):
    """y = dropout(clamp(min(group_norm(conv(x)), min_value), min_value, max_value), dropout_p).

    x (N, in_channels, D, H, W) gives y (N, out_channels, D', H', W').
    """

    def __init__(self, in_channels, out_channels, kernel_size, groups, min_value, max_value, dropout_p):
        super().__init__()
        self.conv = nn.Conv3d(in_channels, out_channels, kernel_size)
        self.norm = nn.GroupNorm(groups, out_channels)
        self.dropout = nn.Dropout(dropout_p)
        self.min_value = min_value
        self.max_value = max_value

    def forward(self, x):
        x = self.conv(x)
        x = self.norm(x)
        x = torch.min(x, torch.tensor(self.min_value, dtype=x.dtype, device=x.device))
        x = torch.clamp(x, min=self.min_value, max=self.max_value)
        return self.dropout(x)


class Arguments(NamedTuple):
    """What the operators take. They return y (N, C, D', H', W') in norm's dtype. Which elements are dropped is a function of seed alone, or,
    where seed has no elements, of number alone."""

    x: Tensor  # (N, Cin, D, H, W)
    weight: Tensor  # (C, Cin, kd, kh, kw)
    conv_bias: Tensor  # C elements
    norm_weight: Tensor
    norm_bias: Tensor
    seed: Tensor  # an int64, or without elements
    number: Drawn  # of 63 bits
    groups: int
    low: float
    high: float
    p: float
    eps: float

    def bounds(self) -> tuple[float, float]:
        """low as eager compares with it, and high."""
        return operators.rounded(self.low, self.norm_weight.dtype), self.high


# ----------------------------------------------------------------- epilogue: the library's convolution, then our tail
def _outputs(a: Arguments, saving: bool) -> list[operators.Output]:
    """y; for backward v's statistics by channel and group, with the biases, active (is any element of a plane tied or not finite?), and v."""
    (N, *_), (C, *_) = a.x.shape, a.weight.shape
    v = N, C, *library.output_size(a.x, a.weight)
    return [
        (v, a.norm_weight.dtype, library.result_format(a.x, a.weight, False)),
        operators.statistics(a, 2 * (C + a.groups), 2 * C, saving),
        ((N, C) if saving else 0, torch.int32),
        (v, a.x.dtype),
    ]


def _plan(a: Arguments, *, saving: bool) -> operators.Plan:
    """How such an input is convolved, and by what the rest is computed."""
    plan = operators.Plan(NAME, a, PARAMETERS, _outputs(a, saving)[:-1])
    plan.convolve = library.convolution(a.x, a.weight, plan.kernels)
    plan.sizes = len(a.weight), a.groups, math.prod(library.output_size(a.x, a.weight))
    plan.samples = library.samples_per_piece(a.x, a.weight, saving)
    plan.direct = plan.kernels if library.sums_directly(a.x, a.weight) else None
    return plan


def _epilogue(a: Arguments, *, plan: operators.Plan, saving: bool) -> tuple[Tensor, ...]:
    y, statistics, active = plan.outputs(a)
    parameters = *plan.parameters(a), a.seed, a.number, *a.bounds(), a.p, a.eps
    active.zero_()
    for x, *outputs in library.pieces(plan.samples, a.x, y, statistics, active):
        v, offset = plan.convolve(x, a.weight), outputs[0].storage_offset()
        plan.kernels.forward(*outputs, v, *parameters, offset, x.shape[0], *plan.sizes)
    y = y.contiguous(memory_format=plan.y_format)
    return (y, statistics, active, v) if saving else (y,)


def _backward(dy: Tensor, a: Arguments, statistics, active, v, *, plan, needs) -> tuple:
    if library.device_type(v) == "cpu" and not active.any():  # every gradient is zero
        zeros = library.gradient_shapes(*a[:5])
        return *[t.zero_() if need else None for t, need in zip(zeros, needs)], None
    N, dv, gradients = v.shape[0], torch.empty_like(v), plan.gradients(a)
    scratch = torch.empty(N * (5 * len(a.weight) + 2 * a.groups), dtype=statistics.dtype, device=v.device)
    inputs = dy.contiguous(), v, statistics, active, plan.parameters(a)[1], a.seed, a.number
    plan.kernels.backward(dv, *gradients, scratch, *inputs, *a.bounds(), a.p, N, *plan.sizes)
    dx, dw = library.convolve_backward(dv, a.x, a.weight, torch.contiguous_format, needs, direct=plan.direct)
    return dx, dw, *plan.as_parameters(a, gradients), None


epilogue = operators.declare(NAME, _epilogue, outputs=_outputs, backward=_backward, plan=_plan)


# ------------------------------------------------------------------------------ fused: the convolution inside our kernels
def _fused_outputs(a: Arguments, saving: bool) -> list[operators.Output]:
    """y; for backward, in one: how each channel of a sample was normalised (N, C, 4), is any element of a sample tied or not finite (N)?"""
    kept = a.x.shape[0] * (4 * len(a.weight) + 1)
    return [_outputs(a, False)[0], (kept if saving else 0, torch.float32)]


def _plan_fused(a: Arguments, *, saving: bool) -> operators.Plan:
    name, defines = f"{NAME}_fused", tiling.spatial_defines(a.weight.shape)
    given = _fused_outputs(a, saving), defines
    numbers = *a.bounds(), a.p, a.eps, a.groups
    plan = operators.Plan(name, a, PARAMETERS, *given, numbers=numbers, launchers=("forward",))
    if saving:
        plan.backward = volumes.plan_backward(plan, name, defines, *a.bounds(), a.p, a.groups)
    return plan


def _fused_backward(dy: Tensor, a: Arguments, saved, *, plan, needs) -> tuple:
    operands = dy.contiguous(), a.x.contiguous(), a.weight.contiguous(), saved
    inputs = *operands, plan.parameters(a)[1], a.seed, a.number
    return *volumes.backward(plan, a, inputs, needs), None


fused = operators.declare_fused(
    NAME, outputs=_fused_outputs, backward=_fused_backward, plan=_plan_fused, scratch=False
)


class Conv3dGroupNormMinClampDropoutNew(Twin, Conv3dGroupNormMinClampDropout):
    """y = dropout(clamp(min(group_norm(conv(x)), min_value), min_value, max_value), dropout_p).

    Its mask is not nn.Dropout's. It is a function of an element's place and of the state of PyTorch's generator alone: the same after the same
    torch.manual_seed, in every dtype, with every variant, with gradients or without. CUDA graphs and compiled code, which draw on the device,
    follow the seed to other masks.
    """

    submodules = {"conv": nn.Conv3d, "norm": nn.GroupNorm, "dropout": nn.Dropout}
    operands = ("conv.weight", "conv.bias", "norm.weight", "norm.bias")
    constants = {"norm.num_groups": int}
    constants |= dict.fromkeys(("min_value", "max_value", "dropout.p", "norm.eps"), float)
    epilogue, fused, autocast_tail = epilogue, fused, torch.float32

    def _constants(self):
        groups, low, high, p, eps = super()._constants()
        return groups, low, high, p if self.dropout.training else 0.0, eps

    def _drawn(self, x, constants, watched):
        return operators.drawn(x, constants[3] > 0, watched)

    def _tail_raises(self, x, size):
        odd = not 0 <= self.dropout.p <= 1
        return odd or operators.group_norm_raises(x, self.conv.weight, self.norm, size)

    def _fused_obstacle(self, x, dtype):
        return tiling.volume_obstacle(x, self.conv.weight, dtype, STATIC_SHARED)

    def _fused_defines(self, x):
        return tiling.spatial_defines(self.conv.weight.shape) | {"DV_BYTES": tiling.SAMPLES_BYTES}

    @staticmethod
    def _autocast_result(y, dtype):
        # Only on CUDA does autocast widen group_norm's result.
        return y.to(dtype) if library.device_type(y) == "cpu" else y


def _every_value_ties(model, x):
    """Normalised values of exactly min_value, the one situation with gradients: all slopes are zero."""
    with torch.no_grad():
        model.norm.weight.zero_(), model.norm.bias.fill_(model.min_value)


def _ties(model, x):
    """In the first half of the groups because the convolution gives zero everywhere, in the rest because the slope is zero."""
    model.min_value = 0.25  # not 0, so that dropped elements can be told from kept ones
    half = (model.norm.num_groups + 1) // 2 * (model.norm.num_channels // model.norm.num_groups)
    with torch.no_grad():
        model.conv.weight[:half], model.conv.bias[:half], model.norm.weight[half:] = 0, 0, 0
        model.norm.bias.fill_(model.min_value)


PROBLEM = Problem(
    NAME,
    number=83,
    Model=Conv3dGroupNormMinClampDropout,
    ModelNew=Conv3dGroupNormMinClampDropoutNew,
    init_inputs=(3, 16, 3, 8, 0.0, 1.0, 0.2),
    input_shape=(128, 3, 16, 64, 64),
    cpu_batch_size=2,
    cases=(
        ("ties, training", _ties),
        ("ties, eval", lambda model, x: _ties(model.eval(), x)),
        ("no ties, eval", lambda model, x: setattr(model.eval(), "min_value", 0.25)),
    ),
    timed_cases=(("all ties", _every_value_ties),),
)
