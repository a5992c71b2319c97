"""y = dropout(clamp(min(group_norm(conv3d(x)), min_value), min_value, max_value), dropout_p)."""

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

NAME = "conv3d_groupnorm_min_clamp_dropout"
STATIC_SHARED = 33 << 10  # bytes of the fused kernels' own arrays


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
    """What the operators take. They return y (N, C, D', H', W') in norm's dtype. Which elements are dropped is a function of seed alone."""

    x: Tensor  # (N, Cin, D, H, W)
    weight: Tensor  # (C, Cin, kd, kh, kw)
    conv_bias: Tensor  # C elements
    norm_weight: Tensor
    norm_bias: Tensor
    seed: Tensor  # an int64, or without elements where p is 0
    groups: int
    low: float
    high: float
    p: float
    eps: float

    def by_channel(self, plan: SimpleNamespace | None = None) -> tuple[Tensor, ...]:
        if plan and plan.ready:
            return self[2:5]
        return operators.by_channel(
            self.x, self.weight, ("conv_bias", "norm_weight", "norm_bias"), *self[2:5]
        )

    def bounds(self) -> tuple[float, float]:
        """low as eager compares with it, and high."""
        return operators.rounded(self.low, self.norm_weight.dtype), self.high


# ----------------------------------------------------------------- epilogue: the library's convolution, then our tail


def _plan(a: Arguments, *, saving: bool) -> SimpleNamespace:
    """How such an input is convolved, and by what the rest is computed."""
    kernels, size = operators.load(NAME, a.x, a.norm_weight.dtype), library.output_size(a.x, a.weight)
    nothing = operators.no_statistics(a.x), a.x.new_empty(0, dtype=torch.int32)
    return SimpleNamespace(
        ready=operators.are_ready(a.x, a.weight, *a[2:5]),
        kernels=kernels,
        convolve=library.convolution(a.x, a.weight, kernels),
        y_format=library.result_format(a.x, a.weight, False),
        size=size,
        sizes=(len(a.weight), a.groups, math.prod(size)),
        samples=library.samples_per_piece(a.x, a.weight, saving),
        nothing=None if saving else nothing,  # in the places of statistics and active
    )


def _outputs(a: Arguments, size: list[int], nothing: tuple | None) -> tuple[Tensor, ...]:
    """y; v's statistics by channel and group; active, zeros: is any element of a plane tied or not finite? For backward, or `nothing`."""
    (N, *_), (C, *_), device = a.x.shape, a.weight.shape, a.x.device
    y = torch.empty((N, C, *size), dtype=a.norm_weight.dtype, device=device)
    statistics, active = nothing or (None, torch.zeros((N, C), dtype=torch.int32, device=device))
    if statistics is None:
        statistics = torch.empty(
            (N, 2 * (C + a.groups)), dtype=operators.accumulate_dtype(a.x.dtype), device=device
        )
    return y, statistics, active


def _epilogue(a: Arguments, *, plan: SimpleNamespace, saving: bool) -> tuple[Tensor, ...]:
    parameters, constants = a.by_channel(plan), (*a.bounds(), a.p, a.eps)
    y, *others = _outputs(a, plan.size, plan.nothing)
    for x, *outputs in library.pieces(plan.samples, a.x, y, *others):
        v, offset = plan.convolve(x, a.weight), outputs[0].storage_offset()
        plan.kernels.forward(*outputs, v, *parameters, a.seed, *constants, offset, x.shape[0], *plan.sizes)
    y = y.contiguous(memory_format=plan.y_format)
    return (y, v, *others) if saving else (y,)


def _shapes(a: Arguments, *, saving: bool) -> tuple[Tensor, ...]:
    y, *others = _outputs(a, library.output_size(a.x, a.weight), None)
    v, y_format = torch.empty_like(y, dtype=a.x.dtype), library.result_format(a.x, a.weight, False)
    y = y.contiguous(memory_format=y_format)
    return (y, v, *others) if saving else (y,)


def _backward(dy: Tensor, a: Arguments, v, statistics, active, *, plan, needs) -> tuple:
    parameters, N = a[2:5], v.shape[0]
    dv, gradients = torch.empty_like(v), operators.gradients_of(a.x, *parameters)
    scratch = torch.empty(N * (5 * len(a.weight) + 2 * a.groups), dtype=statistics.dtype, device=v.device)
    inputs = dy.contiguous(), v, statistics, active, *a.by_channel(plan), a.seed
    plan.kernels.backward(dv, *gradients, scratch, *inputs, *a.bounds(), a.p, N, *plan.sizes)
    dx, dw = library.convolve_backward(dv, a.x, a.weight, torch.contiguous_format, needs)
    return dx, dw, *operators.as_parameters(gradients, *parameters), None


def _gradient_shapes(a: Arguments) -> list[Tensor]:
    return [*library.gradient_shapes(*a[:5]), a.seed]


epilogue = declare(
    NAME, _epilogue, shapes=_shapes, backward=_backward, gradients=_gradient_shapes, plan=_plan
)


# ------------------------------------------------------------------------------ fused: the convolution inside our kernels


def _plan_fused(a: Arguments, *, saving: bool) -> SimpleNamespace:
    (N, _, *size), C = a.x.shape, len(a.weight)
    tiles = tiling.plan_volume(a.x, a.weight, STATIC_SHARED, vectors=True)
    defines = tiling.volume_defines(tiles, a.weight, a.x.element_size(), STATIC_SHARED)
    return SimpleNamespace(
        ready=operators.are_ready(a.x, a.weight, *a[2:5]),
        kernels=operators.load(f"{NAME}_fused", a.x, a.norm_weight.dtype, **defines),
        y=(N, C, *library.output_size(a.x, a.weight)),
        y_format=library.result_format(a.x, a.weight, False),
        scratch=N
        * (C * (2 * tiles.slots + 4) + 1),  # statistics of each block, affines, and which blocks are done
        sizes=(0, a.groups, N, *size, *tiles.launch),
    )


def _fused(a: Arguments, *, plan: SimpleNamespace) -> Tensor:
    y = torch.empty(plan.y, dtype=a.norm_weight.dtype, device=a.x.device)
    scratch = torch.empty(plan.scratch, dtype=torch.float32, device=a.x.device)
    inputs = a.x.contiguous(), a.weight.contiguous(), *a.by_channel(plan), a.seed
    plan.kernels.forward(y, scratch, *inputs, *a.bounds(), a.p, a.eps, *plan.sizes)
    return y.contiguous(memory_format=plan.y_format)


fused = operators.declare_fused(epilogue, _fused, _plan_fused)


# ------------------------------------------------------------------------------------------------------------- the model


class Conv3dGroupNormMinClampDropoutNew(Twin, Conv3dGroupNormMinClampDropout):
    __doc__ = Conv3dGroupNormMinClampDropout.__doc__
    submodules = {"conv": nn.Conv3d, "norm": nn.GroupNorm, "dropout": nn.Dropout}
    operands = ("conv.weight", "conv.bias", "norm.weight", "norm.bias")
    constants = {
        "norm.num_groups": int,
        "min_value": float,
        "max_value": float,
        "dropout.p": float,
        "norm.eps": float,
    }
    epilogue, fused = epilogue, fused

    def _constants(self):
        groups, low, high, p, eps = super()._constants()
        return groups, low, high, p if self.dropout.training else 0.0, eps

    def _drawn(self, x, constants):
        """The seed; without elements where nothing is dropped."""
        if constants[3] == 0 or not torch.compiler.is_compiling():
            seed = torch.empty(int(constants[3] > 0), dtype=torch.int64, device=x.device)
            return (seed.random_() if constants[3] else seed,)
        # inductor knows no larger bounds on a GPU
        return (torch.randint(2**31 - 1, (2,), dtype=torch.int32, device=x.device).view(torch.int64),)

    def _tail_raises(self, x, size):
        return not 0 <= self.dropout.p <= 1 or operators.group_norm_raises(
            x, self.conv.weight, self.norm, size
        )

    def _fused_obstacle(self, x, dtype):
        return tiling.volume_obstacle(x, self.conv.weight, dtype, STATIC_SHARED)

    @staticmethod
    def _autocast_tail(parameter, dtype):
        return torch.float32

    @staticmethod
    def _autocast_result(y, dtype):
        return (
            y.to(dtype) if library.device_type(y) == "cpu" else y
        )  # only on CUDA does autocast widen group_norm's result


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
