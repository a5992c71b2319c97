"""The gradients of a convolution by our own kernels: how they are run in the emulation of a GPU, and judged."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from inline_kernels import fuse
from inline_kernels.bench import checks
from inline_kernels.engine import costs, library, precision
from inline_kernels.engine import gradients as own
from test_emulated import INF, NAN, folder, gpu, guarded, pytestmark, remembers_nothing  # noqa: F401
from test_engine_direct import device, full_size, given, random_model  # noqa: F401

# By the class of dz in v: masks, a norm's, windows'; products of v's, and of what has no v.
TAILS = {
    "gates": lambda m, v: F.relu(v) + m.by_channel,
    "norm": lambda m, v: F.instance_norm(v) * m.by_channel,
    "pool": lambda m, v: F.max_pool2d(torch.tanh(v - 0.5), 2) * m.scale,
    "smooth": lambda m, v: F.mish(F.mish(v) * m.number),
    "mean": lambda m, v: (v * m.scale).mean((2, 3)) + m.by_channel.flatten(),
}


DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def rounded(t: torch.Tensor) -> torch.Tensor:
    """To TF32, ties away from zero."""
    bits = t.float().view(torch.int32)
    return torch.where(t.isfinite(), ((bits + 0x1000) & ~0x1FFF).view(torch.float32), t)


@pytest.fixture
def ours(device, monkeypatch):  # noqa: F811
    """ours(architecture): on such a GPU, whose library runs TF32, and is slower."""

    def become(architecture: int = 900, tf32: bool = True) -> list:
        device(architecture)
        ran, planned = [], own.planned
        for name in ("weight_gradient", "input_gradient"):
            monkeypatch.setattr(costs, name, lambda *_: (1.0, 2.0))
        monkeypatch.setattr(precision, "runs_tf32", lambda *_, **__: tf32)

        def noted(*given):
            run = planned(*given)
            return lambda *tensors: ran.append(1) or run(*tensors)

        monkeypatch.setattr(own, "planned", noted)
        return ran

    return become


def gradients(model: nn.Module, x: torch.Tensor, dy: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
    y = model(x)
    if dy is None:
        dy = torch.linspace(-1, 2, y.numel(), dtype=torch.float64, device=y.device).view(y.shape)
    leaves = dict(model.named_parameters()) | ({"x": x} if x.requires_grad else {})
    found = torch.autograd.grad(y, [*leaves.values()], dy.to(y.dtype), allow_unused=True)
    return {name: value for name, value in zip(leaves, found) if value is not None}


class Tf32(torch.autograd.Function):
    """A convolution as eager's in TF32, but for sums."""

    @staticmethod
    def forward(ctx, x, weight, conv):
        ctx.save_for_backward(x, weight)
        nothing = [0] * (x.dim() - 2)
        ctx.settings = conv.stride, conv.padding, conv.dilation, False, nothing, conv.groups
        return torch.convolution(rounded(x), rounded(weight), None, *ctx.settings)

    @staticmethod
    def backward(ctx, dz):
        operands = map(rounded, (dz, *ctx.saved_tensors))
        wanted = [True, True, False]
        dx, dw, _ = torch.ops.aten.convolution_backward(*operands, None, *ctx.settings, wanted)
        return dx, dw, None


def as_eager(model: nn.Module) -> nn.Module:
    model = copy.deepcopy(model)
    if model.conv.weight.dtype == torch.float32 and model.conv.padding != "same":
        conv, ones = model.conv, (1,) * (model.conv.weight.dim() - 2)
        conv.forward = lambda x: Tf32.apply(x, conv.weight, conv) + conv.bias.view(-1, *ones)
    return model


def assert_rule(
    model: nn.Module, x: torch.Tensor, ran: list, dy: torch.Tensor | None = None, tf32: bool = True
) -> None:
    """tf32: does eager run it?"""
    fast = fuse(copy.deepcopy(model))
    (plan,) = fast.plan(x)
    last = library.is_channels_last(x, model.conv.weight)
    both = x.requires_grad and tf32 and x.dim() == 4 and not last
    assert (" of weight and x by kernels of our own (" if both else " of our own (") in plan.reason, plan
    found, eager = gradients(fast, x, dy), gradients(as_eager(model) if tf32 else model, x, dy)
    assert ran
    exact = gradients(copy.deepcopy(model).double(), x.detach().double().requires_grad_(x.requires_grad), dy)
    for name, value in found.items():
        error = checks.judged("", name, exact[name], eager[name], value, x.dtype)
        assert error.share <= 1, error


def ways(things, in_float32=()) -> list[tuple]:
    """Each of them on 9.0 in float32 and in one type of 16 bits in turn, and on 8.0 in one of all types in turn."""
    in_16_bits = [thing for thing in things if thing not in in_float32]
    each = [(thing, 900, torch.float32) for thing in things]
    each += [(thing, 900, DTYPES[2 - i % 2]) for i, thing in enumerate(in_16_bits)]
    return each + [(thing, 800, DTYPES[i % 3 * (thing in in_16_bits)]) for i, thing in enumerate(things)]


def why(model: nn.Module, x: torch.Tensor, dx: bool = False, obstacle=own.obstacle) -> str | None:
    segment, arguments = given(model, x)
    return obstacle(segment, *arguments[:2], *[dx] * (obstacle is own.obstacle))
