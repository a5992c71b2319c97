"""Maxima and minima over all positions of a plane, as they are written: generated kernels, compiled for a CPU or run in the emulation of a GPU, against
float64, forward and backward."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from fuzz_engine import random_program
from generated import (  # noqa: F401
    INF,
    NAN,
    Run,
    assert_rule,
    device,
    reference,
)
from inline_kernels import fuse
from inline_kernels.engine import layouts, load_plan
from inline_kernels.engine.passes import Planes
from test_emulated import folder, guarded, pytestmark  # noqa: F401

ALL = 2, 3
TAILS = {
    "amax": lambda v: torch.amax(v, ALL, keepdim=True),
    "amin of a function": lambda v: torch.amin(torch.tanh(v) * v, ALL),
    "by place": lambda v: torch.max(F.gelu(v).flatten(2), -1)[0],
    "least by place": lambda v: torch.sigmoid(torch.min(v.flatten(2), -1)[0]),
    "a pool": lambda v: F.adaptive_max_pool2d(F.silu(v), 1),
    "of windows": lambda v: torch.amax(F.max_pool2d(v, 2) * 2.0, ALL, keepdim=True) * 3.0,
    "a pool of windows": lambda v: F.adaptive_max_pool2d(F.avg_pool2d(torch.relu(v), 3, 2, 1), 1),
    "behind a norm": lambda v: torch.amax(F.relu(F.instance_norm(v)), ALL, keepdim=True),
    "beside a norm": lambda v: F.instance_norm(v) + torch.amax(v, ALL, keepdim=True),
    "by place, behind a norm": lambda v: (
        F.adaptive_max_pool2d(F.group_norm(v, 1), 1) + v.mean(ALL, keepdim=True)
    ),
    "of a sample": lambda v: torch.amax(v.mean(1, keepdim=True), ALL, keepdim=True),
    "of a sample, by place": lambda v: torch.max(torch.max(v, 1)[0].flatten(1), 1)[0],
    "in front of channels": lambda v: torch.amax(v, ALL, keepdim=True) - v.sum(1, keepdim=True),
    "where it came from": lambda v: v * torch.amin(v, ALL, keepdim=True) + torch.amax(v, ALL, keepdim=True),
    "of all of a sample": lambda v: torch.amax(torch.tanh(v), (1, 2, 3), keepdim=True) * v,
    "least of all of a sample": lambda v: torch.amin(torch.relu(v), (1, 2, 3)),
    "softmax": lambda v: torch.softmax(v.flatten(2), -1),
    "logsumexp": lambda v: torch.logsumexp(v * 0.5, ALL),
}
VOLUMES = {
    "amax": lambda v: torch.amax(v, (2, 3, 4), keepdim=True),
    "a pool": lambda v: F.adaptive_max_pool3d(torch.tanh(v), 1),
}


class Tailed(nn.Module):
    def __init__(self, tail, inside: int = 2, channels: int = 5, dimensions: int = 2, exact: bool = False):
        """exact: v are the sums of x's few channels."""
        super().__init__()
        self.conv = (nn.Conv2d, nn.Conv3d)[dimensions - 2](inside, channels, 1, bias=not exact)
        self.tail = tail
        if exact:
            nn.init.ones_(self.conv.weight)

    def forward(self, x):
        return self.tail(self.conv(x))


@pytest.mark.parametrize("name", TAILS)
def test_any_function(name, device):
    """In odd planes, and in those of whole packs; without gradients the function may come behind the maximum."""
    if device == "cpu" and [*TAILS].index(name) % 2:
        pytest.skip("compiled for every other one")
    torch.manual_seed(0)
    model = Tailed(TAILS[name])
    for size in ((7, 9), (8, 12)) if device == "cuda" else ((7, 9),):
        assert_rule(model, torch.randn(3, 2, *size), label=name)
    if name != "softmax":  # whose y is flat, which a plan alone doesn't make it
        assert_rule(model, torch.randn(2, 2, 11, 13), backward=False, label=name)


@pytest.mark.parametrize("name", VOLUMES)
def test_volumes(name, device):
    torch.manual_seed(0)
    assert_rule(Tailed(VOLUMES[name], dimensions=3), torch.randn(2, 2, 5, 6, 7), label=name)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16], ids=str)
def test_dtypes(dtype, device):
    torch.manual_seed(0)
    for name in ("amax", "a pool") if device == "cuda" else ("a pool",):
        assert_rule(Tailed(TAILS[name]).to(dtype), torch.randn(2, 2, 7, 12).to(dtype), label=name)


def special(*size: int) -> torch.Tensor:
    """Whole numbers, of which many are equal; then with NaN, with infinities of one sign and of both, of one number alone, of nothing else than NaN."""
    x = torch.randint(-3, 4, (7, 1, *size)).float()
    x[1].view(-1)[5::7] = NAN
    x[2].view(-1)[-1] = NAN
    x[3] = -INF
    x[4].view(-1)[::3], x[4].view(-1)[1::3] = INF, -INF
    x[5] = 0.0
    x[5].view(-1)[1::2] = -0.0
    x[6] = NAN
    return x


@pytest.mark.parametrize(
    "name",
    ["amax", "amin", "by place", "least by place", "a pool", "of a sample", "of all", "of windows"],
)
def test_ties_and_what_is_not_finite(name, device):
    """Eager's: NaN wins, and equal ones share the gradient, or the first has it; of NaN the first, and in pools the last."""
    tail = {
        **TAILS,
        "amin": lambda v: torch.amin(v, ALL),
        "by place": lambda v: v.flatten(2).max(-1)[0],
        "least by place": lambda v: v.flatten(2).min(-1)[0],
        "a pool": lambda v: F.adaptive_max_pool2d(v, 1),
        "of a sample": lambda v: torch.max(torch.max(v, 1)[0].flatten(1), 1)[0],
        "of all": lambda v: torch.amax(v * v, (1, 2, 3)),
        "of windows": lambda v: torch.amax(F.max_pool2d(v, 2), ALL),
    }[name]
    torch.manual_seed(0)
    model = Tailed(tail, 1, 1, exact=True)
    for size in ((6, 7), (8, 40)) if device == "cuda" else ((6, 13),):
        x = special(*size)
        dy = torch.randint(1, 5, model(x).shape).float()
        run, eager = Run(model, x, dy), reference(model, x, dy, x.dtype)
        for each in ("output", "gradient of x"):
            torch.testing.assert_close(
                run.results[each],
                eager[each],
                rtol=1e-6,
                atol=0,
                equal_nan=True,
                msg=lambda m, n=each: f"{n}: {m}",
            )
        y = Run(model, x).y  # the value alone, where nobody asks for the place
        torch.testing.assert_close(y, eager["output"], rtol=0, atol=0, equal_nan=True)


def test_planes_of_one_position(device):
    torch.manual_seed(0)
    for name in ("amax", "a pool"):
        assert_rule(Tailed(TAILS[name]), torch.randn(3, 2, 1, 1), label=name)


LAYOUTS = ["planes", "turned", "last"]


@pytest.mark.parametrize("name", ["amax", "a pool", "of a sample, by place"])
@pytest.mark.parametrize("parts", [3, 40])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_blocks_share_a_plane(layout, parts, name, device, monkeypatch):
    """Equal ones, and NaN, in parts of several: what merges them goes by places, not by the order of blocks. Of many a launch of its own."""
    if device == "cpu" and (layout != "planes" or parts > 3):
        pytest.skip("a GPU's way")
    if layout == "turned":  # a part has a tile, or some
        monkeypatch.setattr(layouts, "fastest", lambda *given: layouts.TURNED)
        monkeypatch.setattr(load_plan, "_shares", lambda most, *_: min(most, parts))
        monkeypatch.setattr(load_plan, "_FEW_PARTS", 1 << 20)
    else:
        monkeypatch.setattr(load_plan, "parts_of", lambda *given: parts)
    height = 75 if layout == "turned" else 33
    torch.manual_seed(0)
    channels, tail = 8, {**TAILS, "a pool": lambda v: F.adaptive_max_pool2d(v, 1)}[name]
    model = Tailed(tail, 1, channels, exact=True)
    x = torch.randint(-9, 10, (3, 1, height, 60)).float()
    x[1].view(-1)[[77, 1500, 1930]] = NAN
    model.conv.weight.data[1::2] = -1.0
    x = x.contiguous(memory_format=torch.channels_last) if layout == "last" else x
    dy = torch.randint(1, 5, copy.deepcopy(model)(x).shape).float()
    run, eager = Run(model, x, dy), reference(model, x, dy, x.dtype)
    assert (run.results["output"].isnan() == eager["output"].isnan()).all() and eager["output"].isnan().any()
    for each in ("output", "gradient of x"):
        torch.testing.assert_close(run.results[each], eager[each], rtol=1e-6, atol=1e-6, equal_nan=True)
    assert_rule(Tailed(TAILS["behind a norm"], 3, channels), torch.randn(2, 3, height, 59), label=layout)


@pytest.mark.parametrize("channels", [5, 12, 70])
def test_all_is_channels_last(channels, device):
    if device == "cpu":
        pytest.skip("a GPU's way")
    torch.manual_seed(0)
    for name in ("amax", "a pool", "where it came from", "of windows", "of a sample"):
        x = torch.randn(2, 3, 9, 14).contiguous(memory_format=torch.channels_last)
        assert_rule(Tailed(TAILS[name], 3, channels), x, label=f"{name} of {channels}")
        assert_rule(Tailed(TAILS[name], 3, channels), x, backward=False, label=f"{name} of {channels}")


def passes_of(name: str) -> tuple[list[Planes], ...]:
    """Of a segment that is trained, those over positions, forward and backward."""
    composed = Run(Tailed(TAILS[name]), torch.randn(2, 2, 6, 8), saving=True).plan.composed
    programs = composed.forward, composed.backward
    return tuple([each for each in program.passes if isinstance(each, Planes)] for program in programs)


@pytest.mark.parametrize(
    "name, forward", [("amax", 2), ("least by place", 1), ("by place", 2), ("softmax", 3)]
)
def test_no_more_passes_than_values_wait_for(name, forward, device):
    """A maximum; then, of amax, the equal ones, whose shares add up to 1; of a function, what its derivative reads at the place. Backward has dz alone,
    and a softmax's sum."""
    ahead, back = passes_of(name)
    assert len(ahead) == forward and len(back) == 1 + (name == "softmax")


def test_backward_needs_no_v_of_a_pool(device):
    """But the place, for which forward alone does not look."""
    model, x = Tailed(TAILS["a pool"]), torch.randn(2, 2, 6, 8)
    saving, alone = (Run(model, x, saving=saving).plan.composed for saving in (True, False))
    assert all(array.space.small for array in saving.saved) and "pool_largest()" in saving.text
    assert "largest_value()" in alone.text and "place" not in alone.text


def test_maxima_do_not_join_the_walk_over_windows(device):
    """In which positions come in another order: a thread's windows may lie in one row."""
    torch.manual_seed(0)
    model = Tailed(
        lambda v: F.avg_pool2d(v, 2) * F.adaptive_max_pool2d(v, 1) + v.mean(ALL, keepdim=True), exact=True
    )
    run = assert_rule(model, torch.randint(-9, 10, (2, 2, 4, 1200)).float())
    assert not any(each.finer for each in run.plan.composed.forward.passes if isinstance(each, Planes))


@pytest.mark.parametrize("tail", ["values", "[0]"])
def test_a_pair(tail):
    torch.manual_seed(0)
    model = Tailed(lambda v: v.flatten(2).max(-1).values if tail == "values" else v.flatten(2).max(-1)[0])
    fast, x = fuse(copy.deepcopy(model)), torch.randn(2, 2, 6, 7, requires_grad=True)
    (plan,) = fast.plan(x)
    assert plan.runs == "load", plan
    torch.testing.assert_close(fast(x), model(x))


@pytest.mark.parametrize("seed", [6009, 6014, 6023, 6032, 6033])
def test_random_programs(seed, device):
    model, x = random_program(seed)
    assert "amax" in model.names
    assert_rule(model, x, label=f"{seed}: {', '.join(model.names)}")
