"""The gradient of a convolution's weight by our own kernel behind any tail, in the emulation of a GPU, against float64."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import numerics
from benchmarks import level2
from inline_kernels import fuse
from inline_kernels.bench import checks
from inline_kernels.engine import choice, library, precision, schedule, stored, weights
from inline_kernels.engine.cases import Case
from test_emulated import INF, NAN, folder, gpu, guarded, pytestmark, remembers_nothing  # noqa: F401
from test_engine_direct import device, full_size, given, random_model  # noqa: F401
from test_kernels_compile import entries, needs_nvcc, nvcc

# By the class of dz in v: masks, a norm's, windows'; products of v's, and of what has no v.
TAILS = {
    "gates": lambda m, v: F.relu(v) + m.by_channel,
    "norm": lambda m, v: F.instance_norm(v) * m.by_channel,
    "pool": lambda m, v: F.max_pool2d(torch.tanh(v - 0.5), 2) * m.scale,
    "smooth": lambda m, v: F.mish(F.mish(v) * m.number),
    "mean": lambda m, v: (v * m.scale).mean((2, 3)) + m.by_channel.flatten(),
}
# (C, channels, kernel), the image: of channels that fill no block, several of them, rows of one strip and of more.
SIZES = [
    ((24, 5, 3, 2), (9, 70)),
    ((72, 24, 3, 3), (8, 21)),
    ((16, 70, 1, 4), (3, 140)),
    ((8, 17, 5, 5), (12, 12)),
]
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
        ran, planned = [], weights.planned
        monkeypatch.setattr(choice, "weight_gradient", lambda *_: (1.0, 2.0))
        monkeypatch.setattr(precision, "runs_tf32", lambda *_, **__: tf32)

        def noted(*given):
            run = planned(*given)
            return lambda *tensors: ran.append(1) or run(*tensors)

        monkeypatch.setattr(weights, "planned", noted)
        return ran

    return become


def gradients(model: nn.Module, x: torch.Tensor, dy: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
    y = model(x)
    if dy is None:
        dy = torch.linspace(-1, 2, y.numel(), dtype=torch.float64).view(y.shape)
    leaves = dict(model.named_parameters())
    found = torch.autograd.grad(y, [*leaves.values()], dy.to(y.dtype), allow_unused=True)
    return {name: value for name, value in zip(leaves, found) if value is not None}


class Tf32(torch.autograd.Function):
    """A convolution as eager's in TF32, but for sums."""

    @staticmethod
    def forward(ctx, x, weight, bias):
        ctx.save_for_backward(x, weight)
        return torch.conv2d(rounded(x), rounded(weight), bias)

    @staticmethod
    def backward(ctx, dz):
        x, weight = ctx.saved_tensors
        return None, torch.nn.grad.conv2d_weight(rounded(x), weight.shape, rounded(dz)), dz.sum((0, 2, 3))


def as_eager(model: nn.Module) -> nn.Module:
    model = copy.deepcopy(model)
    if model.conv.weight.dtype == torch.float32:
        model.conv.forward = lambda x: Tf32.apply(x, model.conv.weight, model.conv.bias)
    return model


def assert_rule(model: nn.Module, x: torch.Tensor, ran: list, dy: torch.Tensor | None = None) -> None:
    fast = fuse(copy.deepcopy(model))
    (plan,) = fast.plan(x)
    assert "the weight's gradient by a kernel of our own where x has none" in plan.reason, plan
    found, eager = gradients(fast, x, dy), gradients(as_eager(model), x, dy)
    assert ran
    exact = gradients(copy.deepcopy(model).double(), x.double(), dy)
    for name, value in found.items():
        error = checks.judged("", name, exact[name], eager[name], value, x.dtype)
        assert error.share <= 1, error


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("architecture", [800, 900])
@pytest.mark.parametrize("tail", TAILS)
def test_tails(tail, architecture, dtype, ours):
    """Each with one of the sizes."""
    filters, image = SIZES[([*TAILS].index(tail) + DTYPES.index(dtype)) % len(SIZES)]
    if tail in ("norm", "mean") and dtype != torch.float32:
        pytest.skip("what eager rounds between operations is no measure")
    ran = ours(architecture)
    torch.manual_seed(0)
    model = random_model(filters, TAILS[tail]).to(dtype)
    assert_rule(model, numerics.random_input((3, filters[1], *image), dtype=dtype), ran)
