"""Backward by halves of the batch, run in the emulation of a GPU, against float64."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from inline_kernels import fuse
from inline_kernels.bench import checks
from inline_kernels.engine import again, halves
from test_emulated import folder, gpu, guarded, pytestmark, remembers_nothing  # noqa: F401
from test_engine_again import TAILS, model_of
from test_engine_direct import device, only_through  # noqa: F401

OF_DZ_ALONE = {  # v isn't kept for them
    "windows": lambda m, v: F.max_pool2d(torch.tanh(v * m.scale), 2),
    "a pick over channels": lambda m, v: (v + m.by_channel).amax(1, keepdim=True) * m.scale,
    "clamped": lambda m, v: torch.clamp(v * m.by_channel, -0.5, 0.5),
}
IN_HALVES = (
    "gelu",
    "two sums",
    "mean over channels",
    "global mean",
    "group norm",
    "instance norm",
    *OF_DZ_ALONE,
)


@pytest.fixture
def parted(device, monkeypatch):  # noqa: F811
    """Those that are: their samples, each time. Any size is, where it can be."""
    ran = []

    def backward(run, plan, *rest):
        ran.append([part[:2] for part in plan.halves])
        return by_halves(run, plan, *rest)

    by_halves = halves.backward
    device(900), only_through("narrow2d", monkeypatch)
    monkeypatch.setattr(again, "pays", lambda *_: True)
    monkeypatch.setattr(halves, "BYTES", 0)
    monkeypatch.setattr(halves, "backward", backward)
    return ran


def model_for(name: str) -> nn.Module:
    TAILS.update(OF_DZ_ALONE)
    return model_of((32, 3, 3, 3), name)


def gradients(model: nn.Module, x: torch.Tensor) -> dict[str, torch.Tensor]:
    """Of what asks for one."""
    y, leaves = model(x), {"x": x} | dict(model.named_parameters())
    leaves = {name: t for name, t in leaves.items() if t.requires_grad}
    dy = torch.linspace(-1, 2, y.numel(), dtype=torch.float64).view(y.shape).to(y.dtype)
    found = torch.autograd.grad(y, [*leaves.values()], dy, allow_unused=True)
    return {name: g for name, g in zip(leaves, found) if g is not None}


def assert_rule(model: nn.Module, x: torch.Tensor) -> None:
    found = gradients(fuse(copy.deepcopy(model)), x)
    eager = gradients(copy.deepcopy(model), x)
    exact = gradients(model.double(), x.detach().double().requires_grad_(x.requires_grad))
    assert found.keys() == exact.keys()
    for name, value in found.items():
        error = checks.judged("", name, exact[name], eager[name], value, x.dtype)
        assert error.share <= 1, error


@pytest.mark.parametrize("name", IN_HALVES)
def test_gradients_of_two_halves_are_added(name, parted):
    torch.manual_seed(0)
    assert_rule(model_for(name), torch.randn(5, 3, 9, 34))
    assert parted == [[(0, 2), (2, 5)]]


@pytest.mark.parametrize(
    "why", ["batch norm", "x has a gradient", "one sample", "no weight's gradient", "small"]
)
def test_what_is_not_parted(why, parted, monkeypatch):
    """Where a sample's dz hangs on others' dy, where dx would be copied, or where nothing is saved."""
    torch.manual_seed(0)
    model, x = model_for("batch norm" if why == "batch norm" else "gelu"), torch.randn(3, 3, 9, 34)
    model.conv.weight.requires_grad_(why != "no weight's gradient")
    if why == "small":
        monkeypatch.setattr(halves, "BYTES", 1 << 28)
    x = x[:1] if why == "one sample" else x
    assert_rule(model, x.requires_grad_(why == "x has a gradient"))
    assert not parted


def test_arrays_of_halves_begin_at_16_bytes(parted):
    """… if there are samples enough: what doesn't would be copied."""
    torch.manual_seed(0)
    assert_rule(model_for("gelu"), torch.randn(13, 3, 4, 5))
    assert parted == [[(0, 4), (4, 13)]]


def test_it_runs_again_and_the_plan_says_so(parted):
    torch.manual_seed(0)
    model, x = fuse(model_for("two sums")), torch.randn(4, 3, 9, 34)
    y = model(x)
    first, second = (
        torch.autograd.grad(y.sum(), [*model.parameters()][:1], retain_graph=True)[0] for _ in range(2)
    )
    assert torch.equal(first, second) and len(parted) == 2
    assert "by halves of the batch where x has no gradient" in str(model.plan(x))
