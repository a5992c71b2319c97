"""y = (min(conv2d(x), constant_value) + bias) * scaling_factor."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import NamedTuple

import torch
from torch import Tensor, nn

import inline_loader
import library
import operators
import tiling
from loader_operators import declare
from problems import Problem
from twin import Twin

NAME = "conv2d_min_add_multiply"


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


class Arguments(NamedTuple):
    """What the operators take. They return y (N, C, H', W') in bias's dtype."""

    x: Tensor  # (N, Cin, H, W)
    weight: Tensor  # (C, Cin, kh, kw)
    conv_bias: Tensor  # C elements
    bias: Tensor  # C elements or 1
    constant: float
    scale: float

    def by_channel(self, plan: SimpleNamespace | None = None) -> tuple[Tensor, ...]:
        if plan and plan.ready:
            return self[2:4]
        return operators.by_channel(self.x, self.weight, ("conv_bias", "bias?"), *self[2:4])

    def constants(self) -> tuple[float, float]:
        """constant as eager compares with it, and scale."""
        return operators.rounded(self.constant, self.x.dtype), self.scale


# ----------------------------------------------------------------- epilogue: the library's convolution, then our tail
# On a GPU it runs channels last where that is fastest, and the kernels transpose: v is (N, H', W', C) there, (N, C, H', W') on a CPU.


def _plan(a: Arguments, *, saving: bool) -> SimpleNamespace:
    """How such an input is convolved, and by what the rest is computed."""
    x, weight, on_gpu = a.x, a.weight, library.device_type(a.x) == "cuda"
    applies, size = library.is_channels_last, library.output_size(x, weight)
    applies = library.convolves_channels_last if on_gpu else applies
    return SimpleNamespace(
        ready=operators.are_ready(a.x, a.weight, *a[2:4]),
        kernels=operators.load(NAME, x, a.bias.dtype),
        on_gpu=on_gpu,
        winograd=library.winograd_applies(x, weight),
        layout=torch.channels_last if applies(x, weight) else torch.contiguous_format,  # of the convolution
        # In eager's layout the library rounds operands of TF32; channels last it cuts off, so they are rounded before.
        round_to_tf32=on_gpu and library.surely_runs_tf32(x, weight),
        y=(len(x), len(weight), *size),
        y_format=library.result_format(x, weight, True),
        sizes=(len(weight), math.prod(size)),
        samples=library.samples_per_piece(x, weight, saving),
    )


def _to_channels_last(x: Tensor, kernels: inline_loader.Operators, round_to_tf32: bool = False) -> Tensor:
    """x (N, C, H, W) with channels-last strides, by our own transposition: the library's takes twice as long."""
    if x.is_contiguous(memory_format=torch.channels_last):
        return x
    N, C, H, W = x.shape
    out = x.new_empty(N, H, W, C)
    kernels.transpose(out, x.contiguous(), N, C, H * W, round_to_tf32)
    return out.permute(0, 3, 1, 2)


def _convolved(x: Tensor, weight: Tensor, plan: SimpleNamespace) -> Tensor:
    """v, contiguous."""
    if not plan.on_gpu:
        return library.convolve(x, weight, plan.layout).contiguous()
    if plan.layout == torch.channels_last:
        operands = [_to_channels_last(t, plan.kernels, plan.round_to_tf32) for t in (x, weight)]
        return library.convolve(*operands, plan.layout).permute(0, 2, 3, 1)
    return _to_channels_last(library.convolve(x, weight), plan.kernels).permute(0, 2, 3, 1)


def _epilogue(a: Arguments, *, plan: SimpleNamespace, saving: bool) -> tuple[Tensor, ...]:
    parameters = *a.by_channel(plan), *a.constants()
    y = torch.empty(plan.y, dtype=a.bias.dtype, device=a.x.device)
    if plan.winograd:
        v = _by_winograd(y, a, parameters, plan, saving)
        return (y, v) if saving else (y,)
    for x, out in library.pieces(plan.samples, a.x, y):
        v = _convolved(x, a.weight, plan)
        plan.kernels.forward(out, v, *parameters, x.shape[0], *plan.sizes)
    y = y.contiguous(memory_format=plan.y_format)
    return (y, v) if saving else (y,)


def _by_winograd(y: Tensor, a: Arguments, parameters: tuple, plan: SimpleNamespace, saving: bool) -> Tensor:
    """Writes y, and gives v, without elements unless saving. The library repeats a sample whose convolution is not finite everywhere:
    direct sums say what is infinite and what NaN. (A normalisation makes NaN of both.)"""
    N, Cin, *of_x = a.x.shape
    v, finite = a.x.new_empty(y.shape if saving else 0), a.x.new_ones(N, dtype=torch.int32)
    operands = a.x.contiguous(), a.weight.contiguous()
    plan.kernels.convolve_forward(y, v, finite, *operands, *parameters, N, Cin, len(a.weight), *of_x)
    for n in (finite == 0).nonzero().flatten().tolist():
        direct = library.convolve(a.x[n : n + 1], a.weight)
        plan.kernels.forward(y[n : n + 1], direct, *parameters, 1, *plan.sizes)
        if saving:
            v[n] = direct[0]
    return v


def _shapes(a: Arguments, *, saving: bool) -> tuple[Tensor, ...]:
    N, C, (H, W) = a.x.shape[0], a.weight.shape[0], library.output_size(a.x, a.weight)
    y = a.x.new_empty((N, C, H, W), dtype=a.bias.dtype)
    y = y.contiguous(memory_format=library.result_format(a.x, a.weight, True))
    v = a.x.new_empty((N, C, H, W) if library.device_type(a.x) == "cpu" else (N, H, W, C))
    return (y, v) if saving else (y,)


def _backward(dy: Tensor, a: Arguments, v: Tensor, *, plan: SimpleNamespace, needs) -> tuple:
    parameters, N, (C, S) = a[2:4], v.shape[0], plan.sizes
    dv, gradients, chunks = (
        torch.empty_like(v),
        operators.gradients_of(a.x, *parameters),
        min(S, 8) if plan.on_gpu else 1,
    )
    sums = torch.empty((2, N * chunks, C), dtype=torch.float64, device=v.device)
    inputs, sizes = (
        (dy.contiguous(), v, a.by_channel(plan)[0], *a.constants()),
        (a.bias.numel(), N, C, S, chunks),
    )
    plan.kernels.backward(dv, *gradients, sums, *inputs, *sizes, plan.round_to_tf32)
    dv, operands = dv.permute(0, 3, 1, 2) if plan.on_gpu else dv, None
    if plan.on_gpu and plan.layout == torch.channels_last:
        operands = [_to_channels_last(t, plan.kernels, plan.round_to_tf32) for t in (a.x, a.weight)]
    dx, dw = library.convolve_backward(dv, a.x, a.weight, plan.layout, needs, operands)
    return dx, dw, *operators.as_parameters(gradients, *parameters)


def _gradients(a: Arguments) -> list[Tensor]:
    return library.gradient_shapes(*a[:4])


epilogue = declare(NAME, _epilogue, shapes=_shapes, backward=_backward, gradients=_gradients, plan=_plan)


# ------------------------------------------------------------------------------ fused: the convolution inside our kernels


def _plan_fused(a: Arguments, *, saving: bool) -> SimpleNamespace:
    x, weight = a.x.contiguous(), a.weight
    # A single float16 is as exact as TF32, which is what eager then runs.
    split = x.dtype == torch.float32 and not library.eager_runs_tf32(x, weight)
    tiles = tiling.plan_gemm(x, weight, a.bias.dtype, split=split, aligned=x.data_ptr() % 4 == 0)
    workspace = tiling.gemm_workspace(tiles, x, weight)
    return SimpleNamespace(
        ready=operators.are_ready(a.x, a.weight, *a[2:4]),
        kernels=operators.load(
            f"{NAME}_fused", x, a.bias.dtype, **tiling.spatial_defines(weight), **tiles.defines
        ),
        y=(len(x), len(weight), *library.output_size(x, weight)),
        y_format=library.result_format(a.x, weight, True),
        workspace=workspace,
        sizes=(workspace, len(x), *x.shape[2:]),
    )


def _fused(a: Arguments, *, plan: SimpleNamespace) -> Tensor:
    y = torch.empty(plan.y, dtype=a.bias.dtype, device=a.x.device)
    workspace = torch.empty(plan.workspace, dtype=torch.uint8, device=a.x.device)
    parameters = a.x.contiguous(), a.weight.contiguous(), *a.by_channel(plan), *a.constants()
    plan.kernels.forward(y, workspace, *parameters, *plan.sizes)
    return y.contiguous(memory_format=plan.y_format)


fused = operators.declare_fused(epilogue, _fused, _plan_fused)


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
        return tiling.gemm_obstacle(x, self.conv.weight, dtype)


PROBLEM = Problem(
    NAME,
    number=31,
    Model=Conv2dMinAddMultiply,
    ModelNew=Conv2dMinAddMultiplyNew,
    init_inputs=(64, 128, 3, 0.5, (128, 1, 1), 2.0),
    input_shape=(128, 64, 128, 128),
    cpu_batch_size=2,
)
