"""y = dropout(clamp(min(group_norm(conv3d(x)), min_value), min_value, max_value), dropout_p).

Operators: x (N, Cin, D, H, W), weight (C, Cin, kd, kh, kw), conv_bias and norm's weight and bias (C elements), seed, the others are
numbers; y (N, C, D', H', W') in norm's dtype. Which elements are dropped is a function of seed alone, an int64 on x's device;
where p is 0 it needs no element. For backward: v, the convolution's output, (N, C, D', H', W'); active (N, C), is any element
of the plane tied or not finite?; statistics by channel and by group, for the kernels.
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

NAME = "conv3d_groupnorm_min_clamp_dropout"
BY_CHANNEL = ("conv_bias", "norm_weight", "norm_bias")
STATIC_SHARED = 4 << 10  # bytes of the fused kernels' own arrays


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


# ----------------------------------------------------------------- epilogue: the library's convolution, then our tail


class _Way(NamedTuple):
    """How such an input is convolved, and what the tail's kernels are."""

    kernels: inline_loader.Operators
    convolve: Callable[[Tensor, Tensor], Tensor]
    y_format: torch.memory_format
    size: list[int]  # D', H', W'
    samples: int  # convolved at a time
    nothing: tuple  # statistics and active where none are saved


@planned
def _way(x: Tensor, weight: Tensor, out_dtype: torch.dtype, saving: bool) -> _Way:
    kernels = operators.load(NAME, x, out_dtype)
    return _Way(
        kernels=kernels,
        convolve=library.convolution(x, weight, kernels),
        y_format=library.result_format(x, weight, False),
        size=library.output_size(x, weight),
        samples=library.samples_per_piece(x, weight, saving),
        nothing=(operators.no_statistics(x), x.new_empty(0, dtype=torch.int32)),
    )


def _epilogue(
    x: Tensor, weight: Tensor, conv_bias: Tensor, norm_weight: Tensor, norm_bias: Tensor, seed: Tensor,
    groups: int, low: float, high: float, p: float, eps: float, *, saving: bool,
) -> tuple[Tensor, ...]:  # fmt: skip
    parameters = operators.by_channel(x, weight, BY_CHANNEL, conv_bias, norm_weight, norm_bias)
    way, low = _way(x, weight, norm_weight.dtype, saving), operators.rounded(low, norm_weight.dtype)
    y, *others = _outputs(x, weight, norm_weight.dtype, groups, way.size, None if saving else way.nothing)
    sizes = weight.shape[0], groups, math.prod(way.size)
    for part, *outputs in library.pieces(way.samples, x, y, *others):
        v, offset = way.convolve(part, weight), outputs[0].storage_offset()
        way.kernels.forward(*outputs, v, *parameters, seed, low, high, p, eps, offset, v.shape[0], *sizes)
    y = y.contiguous(memory_format=way.y_format)
    return (y, v, *others) if saving else (y,)


def _outputs(
    x: Tensor, weight: Tensor, out_dtype, groups: int, size, nothing: tuple | None
) -> tuple[Tensor, ...]:
    """y, statistics, active (zeros); the last two or what `nothing` has in their place, where they aren't saved."""
    N, C, device = x.shape[0], weight.shape[0], x.device
    y = torch.empty((N, C, *size), dtype=out_dtype, device=device)
    statistics, active = nothing or (None, torch.zeros((N, C), dtype=torch.int32, device=device))
    if statistics is None:
        statistics = torch.empty(
            (N, 2 * (C + groups)), dtype=operators.accumulate_dtype(x.dtype), device=device
        )
    return y, statistics, active


def _epilogue_shapes(
    x, weight, conv_bias, norm_weight, norm_bias, seed, groups, low, high, p, eps, *, saving
):  # fmt: skip
    size = library.output_size(x, weight)
    y, *others = _outputs(x, weight, norm_weight.dtype, groups, size, None)
    v, y_format = torch.empty_like(y, dtype=x.dtype), library.result_format(x, weight, False)
    y = y.contiguous(memory_format=y_format)
    return (y, v, *others) if saving else (y,)


def _epilogue_backward(
    dy, x, weight, conv_bias, norm_weight, norm_bias, seed, groups, low, high, p, eps, v, statistics, active, *, needs
):  # fmt: skip
    way, (N, C, *size), low = _way(x, weight, dy.dtype, True), v.shape, operators.rounded(low, dy.dtype)
    dv, gradients = torch.empty_like(v), operators.gradients_of(x, conv_bias, norm_weight, norm_bias)
    scratch = torch.empty(N * (5 * C + 2 * groups), dtype=statistics.dtype, device=x.device)
    parameters = operators.by_channel(x, weight, BY_CHANNEL, conv_bias, norm_weight, norm_bias)
    inputs, sizes = (
        (dy.contiguous(), v, statistics, active, *parameters, seed),
        (N, C, groups, math.prod(size)),
    )
    way.kernels.backward(dv, *gradients, scratch, *inputs, low, high, p, *sizes)
    dx, dw = library.convolve_backward(dv, x, weight, torch.contiguous_format, needs)
    return dx, dw, *operators.as_parameters(gradients, conv_bias, norm_weight, norm_bias), None


def _gradient_shapes(x, weight, conv_bias, norm_weight, norm_bias, seed, *constants):
    return [*library.gradient_shapes(x, weight, conv_bias, norm_weight, norm_bias), seed]


epilogue = declare(
    NAME, _epilogue, shapes=_epilogue_shapes, backward=_epilogue_backward, gradients=_gradient_shapes
)

# ------------------------------------------------------------------------------ fused: the convolution inside our kernels


class _Launch(NamedTuple):
    """What a call of the fused kernels is made of."""

    kernels: inline_loader.Operators
    shape: tuple[int, ...]  # of y
    statistics: tuple[int, ...]  # of each block
    y_format: torch.memory_format
    sizes: tuple[int, ...]


@planned
def _launch(x: Tensor, weight: Tensor, out_dtype: torch.dtype) -> _Launch:
    (N, _, *size), (C, *_) = x.shape, weight.shape
    plan = tiling.plan_volume(x, weight, STATIC_SHARED, vectors=True)
    defines = tiling.volume_defines(plan, weight, x.element_size(), STATIC_SHARED)
    return _Launch(
        kernels=operators.load(f"{NAME}_fused", x, out_dtype, **defines),
        shape=(N, C, *library.output_size(x, weight)),
        statistics=(N, plan.slots, C, 2),
        y_format=library.result_format(x, weight, False),
        sizes=(N, *size, *plan.launch),
    )


def _fused(
    x: Tensor, weight: Tensor, conv_bias: Tensor, norm_weight: Tensor, norm_bias: Tensor, seed: Tensor,
    groups: int, low: float, high: float, p: float, eps: float,
) -> Tensor:  # fmt: skip
    parameters = operators.by_channel(x, weight, BY_CHANNEL, conv_bias, norm_weight, norm_bias)
    launch, N = _launch(x, weight, norm_weight.dtype), len(x)
    y = torch.empty(launch.shape, dtype=norm_weight.dtype, device=x.device)
    statistics = torch.empty(launch.statistics, dtype=torch.float32, device=x.device)
    affines = torch.empty((N, launch.shape[1], 4), dtype=torch.float32, device=x.device)
    parts_done = torch.empty(N, dtype=torch.int32, device=x.device)
    inputs = x.contiguous(), weight.contiguous(), *parameters, seed
    constants = operators.rounded(low, norm_weight.dtype), high, p, eps, 0, groups
    launch.kernels.forward(y, statistics, affines, parts_done, *inputs, *constants, *launch.sizes)
    return y.contiguous(memory_format=launch.y_format)


fused = declare(
    f"{NAME}_fused",
    _fused,
    shapes=lambda *arguments: _epilogue_shapes(*arguments, saving=False)[0],
    backward=operators.by_recomputing(epilogue),
    gradients=_gradient_shapes,
)

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
        """The seed, two halves of an int64: inductor expresses no larger bounds on a GPU. Without elements for no dropout."""
        if constants[3] == 0:
            return (torch.empty(0, dtype=torch.int64, device=x.device),)
        halves = torch.randint(2**31 - 1, (2,), dtype=torch.int32, device=x.device)
        return (halves.view(torch.int64),)

    def _tail_raises(self, x, size):
        if not 0 <= self.dropout.p <= 1:
            return True
        return (
            x.dim() == 5
            and x.shape[0] * math.prod(size) * self.conv.out_channels // self.norm.num_groups == 1
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
