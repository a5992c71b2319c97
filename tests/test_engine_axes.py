"""Reductions over an axis at a point, which a GPU's lanes share, and sums of many terms: generated kernels against float64, in the emulation of a GPU
and on a CPU (generated.py)."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from generated import INF, NAN, Run, assert_rule, device, reference  # noqa: F401
from inline_kernels.engine import library
from inline_kernels.engine.passes import Planes
from test_emulated import folder, guarded, pytestmark  # noqa: F401


class Tail(nn.Module):
    """Of a 1 x 1 convolution of so many channels."""

    def __init__(self, tail, channels: int, dimensions: int = 2, channels_in: int = 1):
        super().__init__()
        self.conv = (nn.Conv2d if dimensions == 2 else nn.Conv3d)(channels_in, channels, 1)
        self.norm = (nn.BatchNorm2d if dimensions == 2 else nn.BatchNorm3d)(channels)
        self.tail = tail

    def forward(self, x):
        return self.tail(self, self.conv(x))


def softmax(axis):
    def of_softmax(m, v):
        return v * torch.softmax(v, axis)

    return of_softmax


TAILS = {
    "row": ((5, 38), softmax(-1)),
    "short row": ((9, 7), softmax(-1)),
    "long row": ((3, 261), softmax(-1)),
    "column": ((38, 5), softmax(-2)),
    "long column": ((300, 3), softmax(-2)),
    "spread": (
        (9, 70),
        lambda m, v: torch.tanh(v - torch.square(v - v.mean(-1, keepdim=True)).mean(-1, keepdim=True)),
    ),
    "extremes": ((9, 70), lambda m, v: v.amax(-1) * v.min(-1).values),
    "sums behind": ((67, 2, 3), lambda m, v: v + m.norm(torch.sigmoid(v).mean(-3, keepdim=True))),
    "volume's rows": ((3, 4, 41), softmax(-1)),
    "volume's columns": ((3, 41, 4), softmax(-2)),
    "volume's depth": ((41, 3, 4), softmax(-3)),
    "volume's planes": ((3, 9, 11), lambda m, v: v * torch.sigmoid(v).mean((-1, -2), keepdim=True)),
    "of windows": ((8, 50), lambda m, v: torch.tanh(torch.softmax(F.max_pool2d(v, 3, 2, 1), -1))),
    "of windows that are a mean": ((6, 60), lambda m, v: F.relu(F.avg_pool2d(v, 2)).softmax(-2) + 1),
    "where it is least": ((5, 40), lambda m, v: torch.tanh(F.max_pool2d(v, 3, 2, 1)).min(-1).values),
    "of channels' own": ((4, 50), lambda m, v: v * torch.softmax(torch.softmax(v, 1), -1)),
}


# Eager's result isn't channels last.
IN_PLANES = "extremes", "of windows", "of windows that are a mean", "where it is least"


@pytest.mark.parametrize("layout", ["planes", "channels last"])
@pytest.mark.parametrize("what", TAILS)
def test_lanes_share_an_axis(what, layout, device):
    last, (size, tail) = layout == "channels last", TAILS[what]
    if device == "cpu" and (last or what not in ("row", "long column", "volume's planes", "sums behind")):
        pytest.skip("compiled for one of each kind")
    torch.manual_seed(0)
    model = Tail(tail, 12 if last else 5, len(size), 3 if last else 1)
    x = torch.randn(2, 3 if last else 1, *size)
    x = x.contiguous(memory_format=library.channels_last(x)) if last else x
    with torch.no_grad():
        assert_rule(model, x, backward=False, label=what)
    run = assert_rule(model, x, label=what)
    assert run.plan.last == last or what in IN_PLANES
    assert ("load::axes(" in run.plan.composed.text) == (device == "cuda")
    if device == "cuda" and tail.__name__ == "of_softmax":
        assert sum(isinstance(each, Planes) for each in run.plan.composed.forward.passes) == 1


OVER_CHANNELS = {
    "softmax": lambda m, v: torch.softmax(m.norm(v), 1),
    "reductions": lambda m, v: torch.logsumexp(v.abs(), 1, keepdim=True) * v.max(1, keepdim=True)[0],
}


MANY_POINTS = {  # (N, C, rows and columns) that a GPU is filled with
    "packs": (4, 40, (128, 132)),
    "points": (4, 40, (127, 133)),  # packs would not be aligned
    "packs that several warps share": (1, 200, (128, 128)),
}


@pytest.mark.parametrize("many", MANY_POINTS)
@pytest.mark.parametrize("what", OVER_CHANNELS)
def test_lanes_share_channels(what, many, device):
    """That "packs" are packs the faults of tests/faults.py say."""
    if device == "cpu":
        pytest.skip("a thread has a point's channels there")
    torch.manual_seed(0)
    samples, channels, size = MANY_POINTS[many]
    model, x = Tail(OVER_CHANNELS[what], channels), torch.randn(samples, 1, *size)
    if many == "packs that several warps share":
        model, x = model.half(), x.half()
    with torch.no_grad():
        run = assert_rule(model, x, backward=False, label=what)
    assert "load::by_sample(" in run.plan.composed.text and "kAgain = true" in run.plan.composed.text


def test_walks_that_compute_much_are_no_memorys(device):
    """Nobody shares channels then, for the cache's sake."""
    if device == "cpu":
        pytest.skip("a thread has a point's channels there")
    model = Tail(lambda m, v: torch.softmax(F.gelu(v), 1), 8)
    with torch.no_grad():
        assert "kAgain = false" in Run(model, torch.randn(1, 1, 5, 6)).plan.composed.text


def test_ties_and_nan_are_eagers(device):
    """Of an extreme over an axis: the first of the largest, the first NaN, in whatever lane it is."""
    torch.manual_seed(0)
    model = Tail(lambda m, v: v.max(-1).values, 1)
    with torch.no_grad():
        model.conv.weight.fill_(1), model.conv.bias.zero_()
    x = torch.randint(-2, 3, (4, 1, 6, 571)).float()
    x[1, 0, :, 40:50], x[2, 0, ::2, 33::7], x[3] = NAN, INF, -INF
    dy = torch.randint(1, 5, (4, 1, 6)).float()
    run, eager = Run(model, x, dy), reference(model, x, dy, x.dtype)
    for name in ("output", "gradient of x"):
        torch.testing.assert_close(run.results[name], eager[name], equal_nan=True, rtol=0, atol=0)


MANY = {
    "channels": (1024, (5, 9), lambda m, v: torch.sigmoid(v).mean(1)),
    "row": (2, (3, 4099), lambda m, v: torch.sigmoid(v).mean(-1)),
    "column": (2, (2049, 9), lambda m, v: torch.sigmoid(v).mean(-2)),
    "row of channels' softmax": (4, (3, 2050), lambda m, v: torch.softmax(torch.softmax(v, 1), -1)),
    "large windows": (2, (48, 140), lambda m, v: F.avg_pool2d(torch.sigmoid(v), (48, 70))),
}


@pytest.mark.parametrize("what", [*MANY, "large windows, last"])
def test_sums_of_many_terms_are_as_exact_as_eagers(what, device):
    """Made one after the other in float32 their error would grow with their number."""
    torch.manual_seed(0)
    what, last = what.split(",")[0], "last" in what
    channels, size, tail = MANY[what]
    model, x = Tail(tail, 4 * channels if last else channels, channels_in=3), torch.randn(2, 3, *size)
    x = x.contiguous(memory_format=library.channels_last(x)) if last else x
    with torch.no_grad():
        truth, eager, run = copy.deepcopy(model).double()(x.double()), model(x), Run(model, x)
    assert ("kRows" in run.plan.composed.text) == (device == "cpu" and what.startswith("row"))
    error = (run.y - truth).norm()
    assert error <= 2 * (eager - truth).norm() and error <= 3e-7 * truth.norm()
