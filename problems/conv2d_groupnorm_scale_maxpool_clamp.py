"""y = clamp(max_pool2d(group_norm(conv2d(x)) * scale, maxpool_kernel_size), clamp_min, clamp_max).

Operators: x (N, Cin, H, W), weight (C, Cin, kh, kw), conv_bias and norm's weight and bias (C elements), scale (C or 1), pool
(height, width), the others are numbers; y (N, C, H' // pool height, W' // pool width) in scale's dtype. For backward: v, the
convolution's output, (N, C, H', W') on a GPU and (N, H', W', C) on a CPU, each where it is fastest; of each window the v that the
maximum of the normalised values selects, and its place there, like y; statistics by channel and by group, for the kernels.
"""

from __future__ import annotations

import math
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

NAME = "conv2d_groupnorm_scale_maxpool_clamp"
BY_CHANNEL = ("conv_bias", "norm_weight", "norm_bias", "scale?")


class Conv2dGroupNormScaleMaxPoolClamp(nn.Module):
    """y = clamp(max_pool2d(group_norm(conv(x)) * scale, maxpool_kernel_size), clamp_min, clamp_max).

    x (N, in_channels, H, W) gives y (N, out_channels, H' // pool height, W' // pool width).
    """

    def __init__(
        self, in_channels, out_channels, kernel_size, num_groups, scale_shape, maxpool_kernel_size, clamp_min, clamp_max
    ):  # fmt: skip
        super().__init__()
        self.conv = nn.Conv2d(in_channels, out_channels, kernel_size)
        self.group_norm = nn.GroupNorm(num_groups, out_channels)
        self.scale = nn.Parameter(torch.ones(scale_shape))
        self.maxpool = nn.MaxPool2d(kernel_size=maxpool_kernel_size)
        self.clamp_min = clamp_min
        self.clamp_max = clamp_max

    def forward(self, x):
        x = self.conv(x)
        x = self.group_norm(x)
        x = x * self.scale
        x = self.maxpool(x)
        return torch.clamp(x, self.clamp_min, self.clamp_max)


# ----------------------------------------------------------------- epilogue: the library's convolution, then our tail


class _Way(NamedTuple):
    """How such an input is convolved, and what the tail's kernels are."""

    kernels: inline_loader.Operators
    winograd: bool
    layout: torch.memory_format  # in which the library convolves
    v_format: torch.memory_format  # in which the kernels read v
    y_format: torch.memory_format
    size: list[int]  # H', W'
    samples: int  # convolved at a time
    nothing: tuple  # index and statistics where none are saved


@planned
def _way(x: Tensor, weight: Tensor, pool: tuple[int, int], out_dtype: torch.dtype, saving: bool) -> _Way:
    on_cpu, (index, index_dtype) = library.device_type(x) == "cpu", operators.index_type(math.prod(pool))
    v_format = torch.channels_last if on_cpu else torch.contiguous_format
    # On a CPU the library is faster in v's layout, too, but for inputs so small that the weight's conversion decides.
    layout = v_format if x.numel() >= weight.numel() else torch.contiguous_format
    return _Way(
        kernels=operators.load(NAME, x, out_dtype, POOL_H=pool[0], POOL_W=pool[1], INDEX_T=index),
        winograd=len(weight) % 32 == 0 and pool[0] % 2 == 0 and library.winograd_applies(x, weight),
        layout=layout,
        v_format=v_format,
        y_format=library.result_format(x, weight, False),
        size=library.output_size(x, weight),
        samples=library.samples_per_piece(x, weight, saving),
        nothing=(x.new_empty(0, dtype=index_dtype), operators.no_statistics(x)),
    )


def _epilogue(
    x: Tensor, weight: Tensor, conv_bias: Tensor, norm_weight: Tensor, norm_bias: Tensor, scale: Tensor,
    groups: int, pool: list[int], low: float, high: float, eps: float, *, saving: bool,
) -> tuple[Tensor, ...]:  # fmt: skip
    parameters = operators.by_channel(x, weight, BY_CHANNEL, conv_bias, norm_weight, norm_bias, scale)
    way, constants = _way(x, weight, tuple(pool), scale.dtype, saving), (low, high, eps)
    (N, Cin, *_), C, (H, W) = x.shape, weight.shape[0], way.size
    y, *others = _outputs(x, weight, scale.dtype, groups, pool, way.size, None if saving else way.nothing)
    if way.winograd:
        v = x.new_empty((N, H, W, C) if saving else 0)
        inputs, sizes = (v, x.contiguous(), weight.contiguous()), (N, Cin, C, groups, *x.shape[2:])
        way.kernels.convolve_forward(y, *others, *inputs, *parameters, *constants, *sizes)
    else:
        for part, *outputs in library.pieces(way.samples, x, y, *others):
            v = library.convolve(part, weight, way.layout).contiguous(memory_format=way.v_format)
            v = v.permute(0, 2, 3, 1) if way.v_format == torch.channels_last else v
            way.kernels.forward(*outputs, v, *parameters, *constants, v.shape[0], C, groups, H, W)
    y = y.contiguous(memory_format=way.y_format)
    return (y, v, *others) if saving else (y,)


def _outputs(
    x: Tensor, weight: Tensor, out_dtype, groups: int, pool, size, nothing: tuple | None
) -> tuple[Tensor, ...]:
    """y, extreme, index, statistics; the last two or what `nothing` has in their place, where they aren't saved."""
    (N, *_), (C, *_), device = x.shape, weight.shape, x.device
    y = torch.empty((N, C, size[0] // pool[0], size[1] // pool[1]), dtype=out_dtype, device=device)
    # Without index on a CPU the selected values become results where they are.
    in_place = nothing is not None and library.device_type(x) == "cpu" and out_dtype == x.dtype
    extreme, (index, statistics) = (
        y if in_place else torch.empty_like(y, dtype=x.dtype),
        nothing or (None, None),
    )
    if index is None:
        index = torch.empty_like(y, dtype=operators.index_type(pool[0] * pool[1])[1])
    if statistics is None:
        statistics = torch.empty(
            (N, 2 * (C + groups)), dtype=operators.accumulate_dtype(x.dtype), device=device
        )
    return y, extreme, index, statistics


def _epilogue_shapes(
    x, weight, conv_bias, norm_weight, norm_bias, scale, groups, pool, low, high, eps, *, saving
):  # fmt: skip
    N, C, (H, W) = x.shape[0], weight.shape[0], library.output_size(x, weight)
    y, *others = _outputs(x, weight, scale.dtype, groups, pool, (H, W), None)
    v = x.new_empty((N, H, W, C) if library.device_type(x) == "cpu" else (N, C, H, W))
    y = y.contiguous(memory_format=library.result_format(x, weight, False))
    return (y, v, *others) if saving else (y,)


def _epilogue_backward(
    dy, x, weight, conv_bias, norm_weight, norm_bias, scale, groups, pool, low, high, eps,
    v, extreme, index, statistics, *, needs,
):  # fmt: skip
    way, parameters = _way(x, weight, tuple(pool), dy.dtype, True), (conv_bias, norm_weight, norm_bias, scale)
    dv, gradients, N, C = torch.empty_like(v), operators.gradients_of(x, *parameters), len(x), len(weight)
    scratch = torch.empty(N * (6 * C + 2 * groups), dtype=statistics.dtype, device=x.device)
    inputs = (
        dy.contiguous(),
        v,
        extreme,
        index,
        statistics,
        *operators.by_channel(x, weight, BY_CHANNEL, *parameters),
    )
    sizes = scale.numel(), N, C, groups, *way.size
    way.kernels.backward(dv, *gradients, scratch, *inputs, low, high, *sizes)
    dv = dv.permute(0, 3, 1, 2) if way.v_format == torch.channels_last else dv
    dx, dw = library.convolve_backward(dv, x, weight, way.layout, needs)
    return dx, dw, *operators.as_parameters(gradients, *parameters)


def _gradient_shapes(x, weight, conv_bias, norm_weight, norm_bias, scale, *constants):
    return library.gradient_shapes(x, weight, conv_bias, norm_weight, norm_bias, scale)


epilogue = declare(
    NAME, _epilogue, shapes=_epilogue_shapes, backward=_epilogue_backward, gradients=_gradient_shapes
)

# ------------------------------------------------------------------------------ fused: the convolution inside our kernels


class _Launch(NamedTuple):
    """What a call of the fused kernels is made of."""

    kernels: inline_loader.Operators
    shape: tuple[int, ...]  # of y
    partial: tuple[int, ...]  # statistics of each strip
    y_format: torch.memory_format
    sizes: tuple[int, ...]


@planned
def _launch(x: Tensor, weight: Tensor, pool: tuple[int, int], groups: int, out_dtype: torch.dtype) -> _Launch:
    (N, _, *size), (C, *_) = x.shape, weight.shape
    plan, (H, W) = tiling.plan_strips(x, weight, pool), library.output_size(x, weight)
    return _Launch(
        kernels=operators.load(f"{NAME}_fused", x, out_dtype, **tiling.strip_defines(plan, weight, pool)),
        shape=(N, C, H // pool[0], W // pool[1]),
        partial=(N, C, plan.tiles * plan.strips, 3),
        y_format=library.result_format(x, weight, False),
        sizes=(N, groups, *size, *plan.launch),
    )


def _fused(
    x: Tensor, weight: Tensor, conv_bias: Tensor, norm_weight: Tensor, norm_bias: Tensor, scale: Tensor,
    groups: int, pool: list[int], low: float, high: float, eps: float,
) -> Tensor:  # fmt: skip
    parameters = operators.by_channel(x, weight, BY_CHANNEL, conv_bias, norm_weight, norm_bias, scale)
    launch = _launch(x, weight, tuple(pool), groups, scale.dtype)
    y, (N, C, *_) = torch.empty(launch.shape, dtype=scale.dtype, device=x.device), launch.shape
    extreme = torch.empty(launch.shape, dtype=torch.float32, device=x.device)
    mean, m2 = torch.empty((2, N, C), dtype=torch.float32, device=x.device).unbind()
    group_mean, group_rstd = torch.empty((2, N, groups), dtype=torch.float32, device=x.device).unbind()
    partial = torch.empty(launch.partial, dtype=torch.float32, device=x.device)
    outputs = y, extreme, mean, m2, group_mean, group_rstd, partial
    inputs = x.contiguous(), weight.contiguous(), *parameters
    launch.kernels.forward(*outputs, *inputs, low, high, eps, *launch.sizes)
    return y.contiguous(memory_format=launch.y_format)


fused = declare(
    f"{NAME}_fused",
    _fused,
    shapes=lambda *arguments: _epilogue_shapes(*arguments, saving=False)[0],
    backward=operators.by_recomputing(epilogue),
    gradients=_gradient_shapes,
)

# ------------------------------------------------------------------------------------------------------------- the model


def _pair(size) -> tuple[int, int]:
    return (size, size) if isinstance(size, int) else tuple(size)


class Conv2dGroupNormScaleMaxPoolClampNew(Twin, Conv2dGroupNormScaleMaxPoolClamp):
    __doc__ = Conv2dGroupNormScaleMaxPoolClamp.__doc__
    submodules = {"conv": nn.Conv2d, "group_norm": nn.GroupNorm, "maxpool": nn.MaxPool2d}
    operands = ("conv.weight", "conv.bias", "group_norm.weight", "group_norm.bias", "scale")
    constants = {
        "group_norm.num_groups": int,
        "maxpool.kernel_size": _pair,
        "clamp_min": float,
        "clamp_max": float,
        "group_norm.eps": float,
    }
    epilogue, fused = epilogue, fused

    def _tail_raises(self, x, size):
        if (
            x.dim() == 4
            and x.shape[0] * math.prod(size) * self.conv.out_channels // self.group_norm.num_groups == 1
        ):
            return True
        return any(extent < window for extent, window in zip(size, _pair(self.maxpool.kernel_size)))

    def _tail_obstacle(self):
        pool = self.maxpool
        if (
            pool.stride != pool.kernel_size
            or pool.padding
            or pool.dilation != 1
            or pool.ceil_mode
            or pool.return_indices
        ):
            return "maxpool has another stride than its size, padding, dilation, ceil_mode or return_indices"
        return self._not_by_channel("scale")

    def _fused_obstacle(self, x, dtype):
        return tiling.strips_obstacle(x, self.conv.weight, dtype, _pair(self.maxpool.kernel_size))

    @staticmethod
    def _autocast_tail(parameter, dtype):
        return torch.float32


PROBLEM = Problem(
    NAME,
    number=85,
    Model=Conv2dGroupNormScaleMaxPoolClamp,
    ModelNew=Conv2dGroupNormScaleMaxPoolClampNew,
    init_inputs=(8, 64, 3, 16, (64, 1, 1), 4, 0.0, 1.0),
    input_shape=(128, 8, 128, 128),
    cpu_batch_size=8,
)
