"""Forward that keeps winners for backward in place of v (engine/sinks.py over channels, engine/direct.py over windows), in the emulation of a GPU:
what it keeps is what `load` keeps, ties and NaN among them, and its gradients are autograd's in float64."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import numerics
from inline_kernels.engine import direct, programs, schedule, sinks
from inline_kernels.engine.cases import Case
from test_emulated import folder, gpu, guarded, pytestmark, remembers_nothing  # noqa: F401
from test_engine_direct import WINDOWS, device, full_size, given  # noqa: F401
from test_engine_sinks import FILTERS, model_of, through  # noqa: F401

OVER_CHANNELS = {
    "min": lambda m, v: torch.tanh(torch.min(v * m.number, 1, keepdim=True)[0]),
    "max": lambda m, v: F.silu(torch.max(v, 1).values) * m.number,
    "max of sums": lambda m, v: torch.max(v + m.by_channel, 1).values,
}


def whole_numbers(shape: tuple[int, ...], most: int = 2) -> torch.Tensor:
    """Of which sums of products are exact, and often equal."""
    return torch.randint(-most, most + 1, shape).float()


def with_ties(model: nn.Module) -> nn.Module:
    with torch.no_grad():
        model.conv.weight.copy_(whole_numbers(model.conv.weight.shape, 1))
        model.conv.bias.zero_()
        model.by_channel.copy_(torch.randint(1, 3, model.by_channel.shape))
    return model


def saved_by(by, model: nn.Module, x: torch.Tensor):
    """The case, and what forward and backward of that schedule give."""
    segment, arguments = given(model, x)
    case = Case(segment, arguments, True, x.dtype)
    plan = by.plan(case)
    found = by.forward(plan, arguments)
    dy = torch.linspace(-1, 1, found[0].numel()).view(found[0].shape)
    return case, found, by.backward(plan, dy, arguments, found[1:], [True] * len(arguments)), dy


def assert_same_as_load(by, model: nn.Module, x: torch.Tensor) -> None:
    case, found, gradients, _ = saved_by(by, model, x)
    assert "v is never written" in by.describe(case)
    _, expected, theirs, _ = saved_by(schedule, model, x)
    assert len(found) > 1
    for ours, values in zip(found, expected, strict=True):
        if ours.dtype == torch.uint8:
            assert torch.equal(ours, values)
        elif ours.dtype == torch.float32:  # not copies of parameters, with room between them
            torch.testing.assert_close(ours, values, rtol=1e-6, atol=1e-6, equal_nan=True)
    for ours, values in zip(gradients, theirs, strict=True):
        torch.testing.assert_close(ours, values, rtol=1e-5, atol=1e-4, equal_nan=True)


PAIRS = [
    (mainloop, filters, size, name)
    for mainloop, sizes in FILTERS.items()
    for filters, size in sizes
    for name in (OVER_CHANNELS if mainloop == "narrow2d" else ("min",))
]


@pytest.mark.parametrize("mainloop, filters, size, name", PAIRS, ids=str)
def test_winners_of_channels(mainloop, filters, size, name, through):  # noqa: F811
    through(mainloop, 900)
    model = with_ties(model_of(filters, OVER_CHANNELS[name]))
    x = whole_numbers((2, filters[1], *size))
    assert_same_as_load(sinks, model, x)
    x[0, 0, 1:3, 2:5] = float("nan")
    x[1, 0, 2, 3] = float("inf")
    assert_same_as_load(sinks, model, x)


@pytest.mark.parametrize("mainloop", FILTERS)
def test_gradients_of_channels(mainloop, through):  # noqa: F811
    through(mainloop)
    filters, size = FILTERS[mainloop][0]
    model, x = model_of(filters, OVER_CHANNELS["max"]), numerics.random_input((2, filters[1], *size))
    assert_gradients(sinks, model, x)


# ------------------------------------------------------------------------------------------------------------------- windows

OVER_WINDOWS = {
    **{name: tail for name, tail in WINDOWS.items() if name != "mean"},
    "mean": lambda m, v: F.avg_pool2d(v * m.number + m.by_channel, (2, 3)).tanh(),
    "a parameter's gradient": lambda m, v: F.max_pool2d(torch.tanh(v * m.by_channel), 2) * m.scale,
    "values alone": lambda m, v: torch.sigmoid(F.max_pool2d(v, (2, 3))),
    "behind windows": lambda m, v: F.relu(F.max_pool2d(F.hardswish(v), 3)).mean((2, 3)),
}
SIZES = [((16, 3, 3, 3), (12, 23)), ((70, 9, 1, 2), (9, 139)), ((24, 5, 2, 3), (17, 300))]


@pytest.mark.parametrize("name", OVER_WINDOWS)
def test_winners_of_windows(name, device):  # noqa: F811
    filters, size = SIZES[[*OVER_WINDOWS].index(name) % 3]
    device(900)
    model = with_ties(model_of(filters, OVER_WINDOWS[name]))
    x = whole_numbers((2, filters[1], *size))
    assert_same_as_load(direct, model, x)
    x[0, 0, 1:5, 2:7] = float("nan")
    x[1, 0, 3, 3:5] = float("inf")
    assert_same_as_load(direct, model, x)


@pytest.mark.parametrize("name", OVER_WINDOWS)
def test_gradients_of_windows(name, device):  # noqa: F811
    device(900)
    filters, size = SIZES[([*OVER_WINDOWS].index(name) + 1) % 3]
    model = model_of(filters, OVER_WINDOWS[name])
    assert_gradients(direct, model, numerics.random_input((2, filters[1], *size)))


@pytest.mark.parametrize(
    "tail",
    [
        lambda m, v: F.gelu(F.avg_pool2d(v, 2)) + F.max_pool2d(v, 2),
        lambda m, v: F.max_pool2d(v, 3, 2),
        lambda m, v: F.avg_pool2d(torch.tanh(v), 2),
        lambda m, v: F.max_pool2d(v, 2).mean((2, 3)) + v.mean((2, 3)),
    ],
)
def test_what_winners_do_not_say(tail, device):  # noqa: F811
    device(900)
    model = model_of((16, 3, 3, 3), tail)
    segment, arguments = given(model, torch.randn(2, 3, 12, 23))
    with pytest.raises(direct.Unsupported):
        direct.plan(Case(segment, arguments, True, torch.float32))


@pytest.mark.parametrize(
    "number, by, mainloop",
    [(25, sinks, "narrow2d"), (32, sinks, "wide"), (65, direct, "narrow2d"), (82, direct, "narrow2d")],
)
def test_problems_at_their_full_sizes(number, by, mainloop, gpu):  # noqa: F811
    gpu(architecture=900, multiprocessors=132)
    line = by.describe(Case(*full_size(number), True, torch.float32))
    assert line.startswith(mainloop) and "v is never written" in line and "; backward: " in line


def assert_gradients(by, model: nn.Module, x: torch.Tensor) -> None:
    case, (y, *_), found, dy = saved_by(by, model, x)
    exact, leaf = copy.deepcopy(model).double(), x.double().requires_grad_()
    result = exact(leaf)
    parameters = [exact.get_parameter(name) for name in case.segment.parameters]
    expected = torch.autograd.grad(result, [leaf, *parameters], dy.double().view(result.shape))
    torch.testing.assert_close(y.double().view(result.shape), result.detach(), rtol=1e-5, atol=1e-5)
    for ours, theirs in zip(found, expected):
        atol = 1e-4 * float(theirs.abs().max())
        torch.testing.assert_close(ours.double(), theirs.view_as(ours), rtol=1e-4, atol=atol)


def test_an_extreme_is_computed_again_of_its_v(device):  # noqa: F811
    """Of a pool's winner v alone is kept, beside its place: what backward needs of its value is computed of that."""
    device(900)
    model = model_of((16, 3, 3, 3), lambda m, v: F.mish(F.max_pool2d(F.hardswish(v), 2)))
    segment, arguments = given(model, torch.randn(2, 3, 12, 23))
    case = Case(segment, arguments, True, torch.float32)
    saved = programs.composed_of(segment, programs.kind_for(case)).saved
    assert [array.name.rsplit("_", 1)[0] for array in saved] == ["kept_pick", "kept_take", "kept"]
    assert saved[1].kind == "value"
