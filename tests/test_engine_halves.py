"""Backward by halves of the batch, run in the emulation of a GPU, against float64."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import numerics
from inline_kernels import fuse
from inline_kernels.bench import checks
from inline_kernels.engine import again, halves
from inline_kernels.engine import gradients as engine_gradients
from own_gradients import TAILS as OF_11_BITS
from own_gradients import assert_rule as assert_packed_rule
from own_gradients import ours  # noqa: F401
from test_emulated import folder, gpu, guarded, pytestmark, remembers_nothing  # noqa: F401
from test_engine_again import TAILS, model_of
from test_engine_direct import device, only_through, random_model  # noqa: F401
from test_engine_spent import freed_by

OF_DZ_ALONE = {  # v isn't kept for them
    "windows": lambda m, v: F.max_pool2d(torch.tanh(v * m.scale), 2),
    "a pick over channels": lambda m, v: (v + m.by_channel).amax(1, keepdim=True) * m.scale,
    "clamped": lambda m, v: torch.clamp(v * m.by_channel, -0.5, 0.5),
}
TAILS |= OF_DZ_ALONE
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
    """Those that are: their samples, each time. Any size is, where it can be, and ours give the weight's gradient."""
    ran = []

    def run(parts, *rest):
        ran.append([part[:2] for part in parts])
        return by_halves(parts, *rest)

    by_halves = halves.run
    device(900), only_through("narrow2d", monkeypatch)
    monkeypatch.setattr(again, "pays", lambda *_: True)
    monkeypatch.setattr(engine_gradients, "few_expected", lambda *_: (0.0, 1.0))
    monkeypatch.setattr(halves, "BYTES", 0)
    monkeypatch.setattr(halves, "run", run)
    return ran


def model_for(name: str) -> nn.Module:
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


WHOLE = (
    "batch norm",
    "an input",
    "x has a gradient",
    "one sample",
    "no weight's gradient",
    "the library's",
    "small",
)


@pytest.mark.parametrize("why", WHOLE)
def test_what_is_not_parted(why, parted, monkeypatch):
    """Where a sample's dz hangs on others' dy, where an input's gradient would be copied, or where nothing is saved."""
    torch.manual_seed(0)
    model = model_for(why if why in TAILS else "gelu")
    model.conv.weight.requires_grad_(why != "no weight's gradient")
    x = torch.randn(1 if why == "one sample" else 3, 3, 9, 34, requires_grad=why == "x has a gradient")
    if why == "small":
        monkeypatch.setattr(halves, "BYTES", 1 << 30)
    if why == "the library's":
        monkeypatch.setattr(engine_gradients, "few_expected", lambda *_: (1.0, 0.0))
    assert_rule(model, x)
    assert not parted


@pytest.mark.parametrize("samples, cuts", [(13, [(0, 8), (8, 13)]), (3, None)], ids=str)
def test_what_is_read_of_a_half_begins_at_16_bytes(samples, cuts, parted):
    """180 bytes are a sample of x: the second half begins at a multiple of four."""
    torch.manual_seed(0)
    assert_rule(model_for("gelu"), torch.randn(samples, 3, 3, 5))
    assert parted == ([cuts] if cuts else [])


def test_what_was_saved_is_freed_behind_both(parted, monkeypatch):
    torch.manual_seed(0)
    fast, x = fuse(model_for("windows")), torch.randn(4, 3, 9, 34)
    freed = freed_by(fast, x, monkeypatch)
    assert len(parted) == 4 and sum(freed) >= fast(x).numel()  # where each was picked


def test_it_runs_again_and_the_plan_says_so(parted):
    torch.manual_seed(0)
    model, x = fuse(model_for("two sums")), torch.randn(4, 3, 9, 34)
    y = model(x)
    first, second = (
        torch.autograd.grad(y.sum(), [*model.parameters()][:1], retain_graph=True)[0] for _ in range(2)
    )
    assert torch.equal(first, second) and len(parted) == 2
    assert "by halves of the batch where x has no gradient" in str(model.plan(x))


@pytest.mark.parametrize("architecture", [800, 900])
def test_dz_in_16_bits(architecture, ours, monkeypatch):
    """… under a scale for each sample."""
    ran, parts, by_halves = ours(architecture), [], halves.run
    monkeypatch.setattr(halves, "BYTES", 0)
    monkeypatch.setattr(halves, "run", lambda found, *rest: parts.extend(found) or by_halves(found, *rest))
    torch.manual_seed(0)
    model, x = random_model((24, 5, 3, 2), OF_11_BITS["gates"]), numerics.random_input((5, 5, 9, 70))
    x *= torch.tensor([1e-9, 1.0, 1e4, 3.0, 1e-3]).view(-1, 1, 1, 1)
    assert_packed_rule(model, x, ran)
    assert [part[:2] for part in parts] == [(0, 2), (2, 5)] and ran == [1, 1]
