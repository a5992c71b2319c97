"""y = (min(conv2d(x), constant_value) + bias) * scaling_factor."""

from __future__ import annotations

from types import SimpleNamespace
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

    def by_channel(self) -> tuple[Tensor, ...]:
        return operators.by_channel(self.x, self.weight, ("conv_bias", "bias?"), *self[2:4])

    def constants(self) -> tuple[float, float]:
        """constant as eager compares with it, and scale."""
        return operators.rounded(self.constant, self.x.dtype), self.scale


# ----------------------------------------------------------------- epilogue: the library's convolution, then our tail
# On a GPU it runs channels last where that is fastest, and the kernels transpose: v is (N, H', W', C) there, (N, C, H', W') on a CPU.


@planned
def _way(
    x: Tensor, weight: Tensor, out_dtype: torch.dtype, saving: bool, allows_tf32: bool
) -> SimpleNamespace:
    """How such an input is convolved, and by what the rest is computed."""
    on_gpu = library.device_type(x) == "cuda"
    applies = library.convolves_channels_last if on_gpu else library.is_channels_last
    size = library.output_size(x, weight)
    return SimpleNamespace(
        kernels=operators.load(NAME, x, out_dtype),
        on_gpu=on_gpu,
        winograd=library.winograd_applies(x, weight),
        layout=torch.channels_last
        if applies(x, weight)
        else torch.contiguous_format,  # in which the library convolves
        # In eager's layout the library rounds operands of TF32; channels last it cuts off, so they are rounded before.
        round_to_tf32=on_gpu and library.surely_runs_tf32(x, weight),
        size=size,
        y=(x.shape[0], len(weight), *size),
        y_format=library.result_format(x, weight, True),
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


def _convolved(x: Tensor, weight: Tensor, way: SimpleNamespace) -> Tensor:
    """v, contiguous."""
    if not way.on_gpu:
        return library.convolve(x, weight, way.layout).contiguous()
    if way.layout == torch.channels_last:
        operands = [_to_channels_last(t, way.kernels, way.round_to_tf32) for t in (x, weight)]
        return library.convolve(*operands, way.layout).permute(0, 2, 3, 1)
    return _to_channels_last(library.convolve(x, weight), way.kernels).permute(0, 2, 3, 1)


def _epilogue(a: Arguments, *, saving: bool) -> tuple[Tensor, ...]:
    way, parameters = (
        _way(a.x, a.weight, a.bias.dtype, saving, _allows_tf32(a.x)),
        (*a.by_channel(), *a.constants()),
    )
    y = torch.empty(way.y, dtype=a.bias.dtype, device=a.x.device)
    C, (H, W) = a.weight.shape[0], way.size
    if way.winograd:
        v = _by_winograd(y, a, parameters, way, saving)
        return (y, v) if saving else (y,)
    for x, out in library.pieces(way.samples, a.x, y):
        v = _convolved(x, a.weight, way)
        way.kernels.forward(out, v, *parameters, x.shape[0], C, H * W)
    y = y.contiguous(memory_format=way.y_format)
    return (y, v) if saving else (y,)


def _by_winograd(y: Tensor, a: Arguments, parameters: tuple, way: SimpleNamespace, saving: bool) -> Tensor:
    """Writes y, and gives v, without elements unless saving. The library repeats a sample whose convolution is not finite everywhere:
    direct sums say what is infinite and what NaN. (A normalisation makes NaN of both.)"""
    (N, Cin, *of_x), C, (H, W) = a.x.shape, a.weight.shape[0], way.size
    v, finite = a.x.new_empty(y.shape if saving else 0), a.x.new_ones(N, dtype=torch.int32)
    operands = a.x.contiguous(), a.weight.contiguous()
    way.kernels.convolve_forward(y, v, finite, *operands, *parameters, N, Cin, C, *of_x)
    for n in (finite == 0).nonzero().flatten().tolist():
        direct = library.convolve(a.x[n : n + 1], a.weight)
        way.kernels.forward(y[n : n + 1], direct, *parameters, 1, C, H * W)
        if saving:
            v[n] = direct[0]
    return v


def _shapes(a: Arguments, *, saving: bool) -> tuple[Tensor, ...]:
    N, C, (H, W) = a.x.shape[0], a.weight.shape[0], library.output_size(a.x, a.weight)
    y = a.x.new_empty((N, C, H, W), dtype=a.bias.dtype)
    y = y.contiguous(memory_format=library.result_format(a.x, a.weight, True))
    v = a.x.new_empty((N, C, H, W) if library.device_type(a.x) == "cpu" else (N, H, W, C))
    return (y, v) if saving else (y,)


def _backward(dy: Tensor, a: Arguments, v: Tensor, *, needs: list[bool]) -> tuple:
    way, (N, C, H, W), parameters = _way(a.x, a.weight, dy.dtype, True, _allows_tf32(a.x)), dy.shape, a[2:4]
    dv, gradients, chunks = (
        torch.empty_like(v),
        operators.gradients_of(a.x, *parameters),
        min(H * W, 8) if way.on_gpu else 1,
    )
    sums = torch.empty((2, N * chunks, C), dtype=torch.float64, device=v.device)
    inputs, sizes = (dy.contiguous(), v, a.by_channel()[0]), (a.bias.numel(), N, C, H * W, chunks)
    way.kernels.backward(dv, *gradients, sums, *inputs, *a.constants(), *sizes, way.round_to_tf32)
    dv, operands = dv.permute(0, 3, 1, 2) if way.on_gpu else dv, None
    if way.on_gpu and way.layout == torch.channels_last:
        operands = [_to_channels_last(t, way.kernels, way.round_to_tf32) for t in (a.x, a.weight)]
    dx, dw = library.convolve_backward(dv, a.x, a.weight, way.layout, needs, operands)
    return dx, dw, *operators.as_parameters(gradients, *parameters)


def _allows_tf32(x: Tensor) -> bool:
    return library.device_type(x) == "cuda" and library.allows_tf32()


epilogue = declare(
    NAME, _epilogue, shapes=_shapes, backward=_backward, gradients=lambda a: library.gradient_shapes(*a[:4])
)


# ------------------------------------------------------------------------------ fused: the convolution inside our kernels


@planned
def _launch(
    x: Tensor, weight: Tensor, out_dtype: torch.dtype, aligned: bool, allows_tf32: bool
) -> SimpleNamespace:
    """For contiguous x and weight; aligned: does x start at a multiple of 4 bytes?"""
    # A single float16 is as exact as TF32, which is what eager then runs.
    split = x.dtype == torch.float32 and not library.eager_runs_tf32(x, weight)
    plan = tiling.plan_gemm(x, weight, out_dtype, split=split, aligned=aligned)
    return SimpleNamespace(
        kernels=operators.load(
            f"{NAME}_fused", x, out_dtype, **tiling.spatial_defines(weight), **plan.defines
        ),
        y=(x.shape[0], len(weight), *library.output_size(x, weight)),
        y_format=library.result_format(x, weight, True),
        workspace=tiling.gemm_workspace(plan, x, weight),
        sizes=(x.shape[0], *x.shape[2:]),
    )


def _fused(a: Arguments) -> Tensor:
    x, weight = a.x.contiguous(), a.weight.contiguous()
    launch = _launch(x, weight, a.bias.dtype, x.data_ptr() % 4 == 0, _allows_tf32(x))
    y = torch.empty(launch.y, dtype=a.bias.dtype, device=x.device)
    workspace = torch.empty(launch.workspace, dtype=torch.uint8, device=x.device)
    parameters = *a.by_channel(), *a.constants(), launch.workspace
    launch.kernels.forward(y, workspace, x, weight, *parameters, *launch.sizes)
    return y.contiguous(memory_format=launch.y_format)


fused = operators.declare_fused(epilogue, _fused)


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

    def _setting(self, x):
        return _allows_tf32(x)


PROBLEM = Problem(
    NAME,
    number=31,
    Model=Conv2dMinAddMultiply,
    ModelNew=Conv2dMinAddMultiplyNew,
    init_inputs=(64, 128, 3, 0.5, (128, 1, 1), 2.0),
    input_shape=(128, 64, 128, 128),
    cpu_batch_size=2,
)
