"""y = hardswish(relu(conv2d(x))): a problem of one's own, to copy. CONTRIBUTING.md goes through it, step by step."""

from __future__ import annotations

import math
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn

from inline_kernels.engine import library, operators
from inline_kernels.engine.twin import Twin
from inline_kernels.problems import Problem

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


class Arguments(NamedTuple):
    """What the operator takes. It returns y (N, C, H', W') in x's dtype."""

    x: Tensor  # (N, Cin, H, W)
    weight: Tensor  # (C, Cin, kh, kw)
    conv_bias: Tensor  # C elements


def _outputs(a: Arguments, saving: bool) -> list[operators.Output]:
    """y; for backward v, the convolution without its bias, and the bias as it was."""
    v = a.x.shape[0], len(a.weight), *library.output_size(a.x, a.weight)
    bias = len(a.weight), operators.accumulate_dtype(a.x.dtype)
    return [(v, a.x.dtype, library.result_format(a.x, a.weight, True)), (v, a.x.dtype), bias]


def _plan(a: Arguments, *, saving: bool) -> operators.Plan:
    (y, *_), sizes = _outputs(a, saving), (len(a.weight), math.prod(library.output_size(a.x, a.weight)))
    return operators.Plan(NAME, a, ("conv_bias",), [y], folder=FOLDER, sizes=sizes)


def _epilogue(a: Arguments, *, plan: operators.Plan, saving: bool) -> tuple[Tensor, ...]:
    [y], v = plan.outputs(a), library.convolve(a.x, a.weight)
    (conv_bias,) = plan.parameters(a)
    plan.kernels.forward(y, v, conv_bias, len(v), *plan.sizes)
    y = y.contiguous(memory_format=plan.y_format)
    return (y, v, conv_bias.clone()) if saving else (y,)


def _backward(dy: Tensor, a: Arguments, v: Tensor, conv_bias: Tensor, *, plan, needs) -> tuple:
    N, dv, gradients = len(v), torch.empty_like(v), plan.gradients(a)
    sums = v.new_empty((N, len(a.weight)), dtype=gradients[0].dtype)
    inputs = dy.contiguous(), v, conv_bias
    plan.kernels.backward(dv, *gradients, sums, *inputs, N, *plan.sizes)
    dx, dw = library.convolve_backward(dv, a.x, a.weight, torch.contiguous_format, needs)
    return dx, dw, *plan.as_parameters(a, gradients)


class Conv2dReluHardswishNew(Twin, Conv2dReluHardswish):
    submodules = {"conv": nn.Conv2d}
    operands = ("conv.weight", "conv.bias")
    constants = {}
    epilogue = operators.declare(NAME, _epilogue, outputs=_outputs, backward=_backward, plan=_plan)


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
