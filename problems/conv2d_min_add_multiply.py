"""y = (min(conv2d(x), constant_value) + bias) * scaling_factor.

Operators: x (N, Cin, H, W), weight (C, Cin, kh, kw), conv_bias (C elements), bias (C or 1), constant and scale are numbers; y
(N, C, H', W') in bias's dtype. The convolution's output v, as backward reads it, is (N, H', W', C) in memory on a GPU, where the
library is fastest so, and (N, C, H', W') on a CPU.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor, nn

import inline_loader
import library
import operators
from loader_operators import declare, planned
from problems import Problem
from twin import Twin

NAME = "conv2d_min_add_multiply"
BY_CHANNEL = ("conv_bias", "bias?")
plan_gemm = gemm_obstacle = None


class Conv2dMinAddMultiply(nn.Module):
    """y = (min(conv(x), constant_value) + bias) * scaling_factor.

    x (N, in_channels, H, W) gives y (N, out_channels, H', W'), where H' = H - kernel height + 1 and W' likewise.
    """

    def __init__(self, in_channels, out_channels, kernel_size, constant_value, bias_shape, scaling_factor):
        super().__init__()
        self.conv = nn.Conv2d(in_channels, out_channels, kernel_size)
        self.constant_value = constant_value
        self.bias = nn.Parameter(torch.randn(bias_shape))
        self.scaling_factor = scaling_factor

    def forward(self, x):
        x = self.conv(x)
        x = torch.min(x, torch.tensor(self.constant_value, dtype=x.dtype, device=x.device))
        x = x + self.bias
        return x * self.scaling_factor


# ----------------------------------------------------------------- epilogue: the library's convolution, then our tail


class _Way(NamedTuple):
    """How such an input is convolved, and what the tail's kernels are."""

    kernels: inline_loader.Operators
    winograd: bool
    layout: torch.memory_format  # in which the library convolves
    round_operands: bool  # to TF32, as the library does in eager's layout; channels last it cuts off
    y_format: torch.memory_format
    samples: int  # convolved at a time


@planned
def _way(x: Tensor, weight: Tensor, out_dtype: torch.dtype, saving: bool, allows_tf32: bool) -> _Way:
    on_gpu = library.device_type(x) == "cuda"
    applies = library.convolves_channels_last if on_gpu else library.is_channels_last
    return _Way(
        kernels=operators.load(NAME, x, out_dtype),
        winograd=library.winograd_applies(x, weight),
        layout=torch.channels_last if applies(x, weight) else torch.contiguous_format,
        round_operands=on_gpu and library.surely_runs_tf32(x, weight),
        y_format=library.result_format(x, weight, True),
        samples=library.samples_per_piece(x, weight, saving),
    )


def _tf32_allowed(x: Tensor) -> bool:
    return library.device_type(x) == "cuda" and library.allows_tf32()


def _to_channels_last(x: Tensor, kernels: inline_loader.Operators, round_to_tf32: bool = False) -> Tensor:
    """x (N, C, H, W) with channels-last strides, by our own transposition: the library's takes twice as long."""
    if x.is_contiguous(memory_format=torch.channels_last):
        return x
    N, C, H, W = x.shape
    out = x.new_empty(N, H, W, C)
    kernels.transpose(out, x.contiguous(), N, C, H * W, round_to_tf32)
    return out.permute(0, 3, 1, 2)


def _convolved(x: Tensor, weight: Tensor, way: _Way) -> Tensor:
    """The convolution as the kernels read it: contiguous, (N, H', W', C) on a GPU and (N, C, H', W') on a CPU."""
    if library.device_type(x) == "cpu":
        return library.convolve(x, weight, way.layout).contiguous()
    if way.layout == torch.channels_last:
        operands = [_to_channels_last(t, way.kernels, way.round_operands) for t in (x, weight)]
        return library.convolve(*operands, way.layout).permute(0, 2, 3, 1)
    return _to_channels_last(library.convolve(x, weight), way.kernels).permute(0, 2, 3, 1)


def _epilogue(
    x: Tensor, weight: Tensor, conv_bias: Tensor, bias: Tensor, constant: float, scale: float, *, saving: bool
) -> tuple[Tensor, ...]:
    parameters = operators.by_channel(x, weight, BY_CHANNEL, conv_bias, bias)
    way, constant = (
        _way(x, weight, bias.dtype, saving, _tf32_allowed(x)),
        operators.rounded(constant, x.dtype),
    )
    if way.winograd:
        y, v = _epilogue_by_winograd(x, weight, *parameters, constant, scale, way, bias.dtype, saving)
        return (y, v) if saving else (y,)
    (N, *_), (C, *_), (H, W) = x.shape, weight.shape, library.output_size(x, weight)
    y = torch.empty((N, C, H, W), dtype=bias.dtype, device=x.device)
    for part, out in library.pieces(way.samples, x, y):
        v = _convolved(part, weight, way)
        way.kernels.forward(out, v, *parameters, constant, scale, v.shape[0], C, H * W)
    y = y.contiguous(memory_format=way.y_format)
    return (y, v) if saving else (y,)


def _epilogue_by_winograd(x, weight, conv_bias, bias, constant, scale, way, out_dtype, saving):
    """y and v, tile by tile; v without elements unless saving. The library repeats a sample whose convolution is not finite
    everywhere: direct sums say what is infinite and what NaN. (A normalisation makes NaN of both.)"""
    (N, Cin, H, W), C, size = x.shape, len(weight), library.output_size(x, weight)
    x, weight, parameters = x.contiguous(), weight.contiguous(), (conv_bias, bias)
    y = x.new_empty(N, C, *size, dtype=out_dtype)
    v, finite = x.new_empty(y.shape if saving else 0), x.new_ones(N, dtype=torch.int32)
    way.kernels.convolve_forward(y, v, finite, x, weight, *parameters, constant, scale, N, Cin, C, H, W)
    for n, is_finite in enumerate(finite.tolist()):
        if not is_finite:
            direct = library.convolve(x[n : n + 1], weight)
            way.kernels.forward(y[n : n + 1], direct, *parameters, constant, scale, 1, C, math.prod(size))
            if saving:
                v[n] = direct[0]
    return y, v


def _epilogue_shapes(x, weight, conv_bias, bias, constant, scale, *, saving):
    (N, *_), (C, *_), (H, W) = x.shape, weight.shape, library.output_size(x, weight)
    y = x.new_empty((N, C, H, W), dtype=bias.dtype)
    y = y.contiguous(memory_format=library.result_format(x, weight, True))
    v = x.new_empty((N, C, H, W) if library.device_type(x) == "cpu" else (N, H, W, C))
    return (y, v) if saving else (y,)


def _epilogue_backward(dy, x, weight, conv_bias, bias, constant, scale, v, *, needs):
    way, on_gpu = _way(x, weight, dy.dtype, True, _tf32_allowed(x)), library.device_type(x) == "cuda"
    (N, C, H, W), constant, tf32 = dy.shape, operators.rounded(constant, x.dtype), way.round_operands
    chunks, (inner, _) = (
        min(H * W, 8) if on_gpu else 1,
        operators.by_channel(x, weight, BY_CHANNEL, conv_bias, bias),
    )
    dv, gradients = torch.empty_like(v), operators.gradients_of(x, conv_bias, bias)
    sums, sizes = (
        torch.empty((2, N * chunks, C), dtype=torch.float64, device=x.device),
        (N, C, H * W, chunks, tf32),
    )
    way.kernels.backward(
        dv, *gradients, sums, dy.contiguous(), v, inner, constant, scale, bias.numel(), *sizes
    )
    dv, operands = dv.permute(0, 3, 1, 2) if on_gpu else dv, (x, weight)
    if on_gpu and way.layout == torch.channels_last:
        operands = [_to_channels_last(t, way.kernels, tf32) for t in operands]
    dx, dw = library.convolve_backward(dv, x, weight, way.layout, needs, operands)
    return dx, dw, *operators.as_parameters(gradients, conv_bias, bias)


def _gradient_shapes(x, weight, conv_bias, bias, constant, scale):
    return library.gradient_shapes(x, weight, conv_bias, bias)


epilogue = declare(
    NAME, _epilogue, shapes=_epilogue_shapes, backward=_epilogue_backward, gradients=_gradient_shapes
)


# ------------------------------------------------------------------------------ fused: the convolution inside our kernels


class _Launch(NamedTuple):
    """What a call of the fused kernels is made of."""

    kernels: inline_loader.Operators
    shape: tuple[int, ...]  # of y
    workspace: (
        int  # bytes: scales, packed weights, and x packed to halves where the kernels don't read x itself
    )
    y_format: torch.memory_format


@planned
def _launch(x: Tensor, weight: Tensor, out_dtype: torch.dtype, aligned: bool, allows_tf32: bool) -> _Launch:
    split = x.dtype == torch.float32 and not library.eager_runs_tf32(x, weight)
    plan = plan_gemm(x, weight, out_dtype, split, aligned)
    (N, *_), (C, *_) = x.shape, weight.shape
    return _Launch(
        kernels=operators.load(f"{NAME}_fused", x, out_dtype, **plan.defines),
        shape=(N, C, *library.output_size(x, weight)),
        workspace=plan.workspace,
        y_format=library.result_format(x, weight, True),
    )


def _fused(
    x: Tensor, weight: Tensor, conv_bias: Tensor, bias: Tensor, constant: float, scale: float
) -> Tensor:
    parameters = operators.by_channel(x, weight, BY_CHANNEL, conv_bias, bias)
    x, weight, constant = x.contiguous(), weight.contiguous(), operators.rounded(constant, x.dtype)
    launch = _launch(x, weight, bias.dtype, x.data_ptr() % 4 == 0, _tf32_allowed(x))
    y = torch.empty(launch.shape, dtype=bias.dtype, device=x.device)
    workspace = torch.empty(launch.workspace, dtype=torch.uint8, device=x.device)
    (N, _, H, W), size = x.shape, launch.workspace
    launch.kernels.forward(y, workspace, x, weight, *parameters, constant, scale, size, N, H, W)
    return y.contiguous(memory_format=launch.y_format)


fused = declare(
    f"{NAME}_fused",
    _fused,
    shapes=lambda *arguments: _epilogue_shapes(*arguments, saving=False)[0],
    backward=operators.by_recomputing(epilogue),
    gradients=_gradient_shapes,
)


# ------------------------------------------------------------------------------------------------------------- the model


class Conv2dMinAddMultiplyNew(Twin, Conv2dMinAddMultiply):
    __doc__ = Conv2dMinAddMultiply.__doc__
    submodules = {"conv": nn.Conv2d}
    operands = ("conv.weight", "conv.bias", "bias")
    constants = {"constant_value": float, "scaling_factor": float}
    epilogue, fused = epilogue, fused

    def _tail_obstacle(self):
        return self._not_by_channel("bias")

    def _fused_obstacle(self, x, dtype):
        return gemm_obstacle(x, self.conv.weight, dtype)

    def _setting(self, x):
        return _tf32_allowed(x)


PROBLEM = Problem(
    NAME,
    number=31,
    Model=Conv2dMinAddMultiply,
    ModelNew=Conv2dMinAddMultiplyNew,
    init_inputs=(64, 128, 3, 0.5, (128, 1, 1), 2.0),
    input_shape=(128, 64, 128, 128),
    cpu_batch_size=2,
)
