"""y = hardswish(relu(conv2d(x))): a problem of one's own, to copy. CONTRIBUTING.md goes through it, step by step.

Operator: x (N, Cin, H, W), weight (C, Cin, kh, kw), conv_bias (C); y (N, C, H', W') in x's dtype. For backward it keeps v, the
convolution without its bias, contiguous.
"""

from __future__ import annotations

import math
from pathlib import Path

import torch
from torch import Tensor, nn

import inline_loader
import library
import operators
from loader_operators import declare
from problems import Problem
from twin import Twin

NAME = "conv2d_relu_hardswish"
FOLDER = Path(__file__).resolve().parent  # of the kernels


class Conv2dReluHardswish(nn.Module):
    """y = hardswish(relu(conv(x))).

    x (N, in_channels, H, W) gives y (N, out_channels, H', W'), where H' = H - kernel height + 1 and W' likewise.
    """

    def __init__(self, in_channels, out_channels, kernel_size):
        super().__init__()
        self.conv = nn.Conv2d(in_channels, out_channels, kernel_size)

    def forward(self, x):
        x = self.conv(x)
        x = torch.relu(x)
        return x * torch.clamp((x + 3) / 6, 0, 1)


def _kernels(x: Tensor) -> inline_loader.Operators:
    return operators.load(NAME, x, x.dtype, FOLDER)


def _sizes(v: Tensor) -> tuple[int, int, int]:
    """N, C and the positions of a plane."""
    return *v.shape[:2], math.prod(v.shape[2:])


def _epilogue(x: Tensor, weight: Tensor, conv_bias: Tensor, *, saving: bool) -> tuple[Tensor, ...]:
    [inner] = operators.by_channel(x, weight, ("conv_bias",), conv_bias)
    v = library.convolve(x, weight)
    y = torch.empty_like(v)
    _kernels(x).forward(y, v, inner, *_sizes(v))
    y = y.contiguous(memory_format=library.result_format(x, weight, True))
    return (y, v) if saving else (y,)


def _shapes(x, weight, conv_bias, *, saving):
    v = x.new_empty(x.shape[0], weight.shape[0], *library.output_size(x, weight))
    y = torch.empty_like(v, memory_format=library.result_format(x, weight, True))
    return (y, v) if saving else (y,)


def _backward(dy, x, weight, conv_bias, v, *, needs):
    [inner] = operators.by_channel(x, weight, ("conv_bias",), conv_bias)
    [d_conv_bias] = operators.gradients_of(x, conv_bias)
    dv, sums = torch.empty_like(v), inner.new_empty(v.shape[:2])
    _kernels(x).backward(dv, d_conv_bias, sums, dy.contiguous(), v, inner, *_sizes(v))
    dx, dw = library.convolve_backward(dv, x, weight, torch.contiguous_format, needs)
    return dx, dw, *operators.as_parameters([d_conv_bias], conv_bias)


class Conv2dReluHardswishNew(Twin, Conv2dReluHardswish):
    __doc__ = Conv2dReluHardswish.__doc__
    submodules = {"conv": nn.Conv2d}
    operands = ("conv.weight", "conv.bias")
    constants = {}
    epilogue = declare(NAME, _epilogue, shapes=_shapes, backward=_backward, gradients=library.gradient_shapes)


PROBLEM = Problem(
    NAME,
    number=57,
    Model=Conv2dReluHardswish,
    ModelNew=Conv2dReluHardswishNew,
    init_inputs=(8, 64, 3),
    input_shape=(128, 8, 128, 128),
    cpu_batch_size=2,
    kernels=FOLDER,
)
