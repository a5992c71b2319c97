"""engine/strips.py and kernels/cpu/strips.h: convolutions and gradients by a CPU's own kernels, a strip at a time with what follows."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from inline_kernels import fuse


class Model(nn.Module):
    def __init__(self, conv, *tail):
        super().__init__()
        self.conv, self.tail = conv, nn.Sequential(*tail)

    def forward(self, x):
        return self.tail(self.conv(x))


class LargestChannel(nn.Module):
    """… times a number of its channel's: what is kept of the channel that won is of vectors."""

    def __init__(self, channels):
        super().__init__()
        self.factor = nn.Parameter(torch.linspace(-1.5, 2, channels).view(-1, 1, 1))

    def forward(self, v):
        return torch.max(torch.tanh(v * self.factor) * self.factor, dim=1)[0]


class Unpassable(nn.Module):
    """No gradient passes the bounds but at a tie; a dropout is drawn behind them."""

    def forward(self, v):
        return F.dropout(torch.clamp(v.clamp(max=-0.25), -0.25, 1.0), 0.5, self.training)


def results(model, x, g, alone=False):
    """y, the gradients of x and of all parameters; alone: y without gradients, which is a build of its own."""
    x = x.clone().requires_grad_()
    torch.manual_seed(1)
    y = model(x)
    found = [y.detach(), *torch.autograd.grad(y, [x, *model.parameters()], g.to(y.dtype))]
    with torch.no_grad():
        return [*found, model(x)] if alone else found


# Sizes that fill neither a tile, a strip nor a vector; channels that fill no block.
MODELS = {
    "pointwise": (nn.Conv2d(16, 40, 3), [nn.Hardswish()], (2, 16, 21, 45)),
    "zeros around, batch norm": (
        nn.Conv2d(16, 24, 3, padding=1),
        [nn.BatchNorm2d(24), nn.ReLU()],
        (3, 16, 23, 37),
    ),
    "other padding": (nn.Conv2d(9, 16, 3, padding=1, padding_mode="reflect"), [nn.SiLU()], (2, 9, 19, 18)),
    "as much as a filter reaches": (nn.Conv2d(8, 24, 3, padding=2), [nn.SiLU()], (1, 8, 19, 33)),
    "long rows, few channels in": (nn.Conv2d(3, 16, 3, padding=1), [nn.ReLU()], (1, 3, 20, 301)),
    "long rows": (nn.Conv2d(16, 16, 3), [nn.ReLU()], (1, 16, 20, 301)),
    "windows": (nn.Conv2d(8, 16, 3), [nn.GroupNorm(4, 16), nn.MaxPool2d(3)], (2, 8, 34, 37)),
    "windows in depth": (nn.Conv3d(4, 16, 3), [nn.ReLU(), nn.MaxPool3d(2)], (2, 4, 7, 25, 31)),
    "planes": (nn.Conv3d(8, 16, 3, padding=1), [nn.InstanceNorm3d(16), nn.ReLU()], (2, 8, 6, 25, 31)),
    "channels": (nn.Conv2d(8, 24, 3), [nn.InstanceNorm2d(24), LargestChannel(24)], (2, 8, 24, 27)),
    "over channels": (nn.Conv2d(8, 16, 3), [nn.Softmax(1)], (2, 8, 24, 27)),
}


def fused(name):
    torch.manual_seed(0)
    conv, tail, shape = MODELS[name]
    model, x = Model(copy.deepcopy(conv), *copy.deepcopy(tail)), torch.randn(shape)
    with torch.no_grad():
        g = torch.randn_like(copy.deepcopy(model)(x))
    return model, fuse(copy.deepcopy(model)), x, g


@pytest.mark.parametrize("name", MODELS)
def test_twice_eagers_error_at_most(name):
    model, new, x, g = fused(name)
    alone = name in ("pointwise", "zeros around, batch norm", "windows", "channels")
    exact = results(copy.deepcopy(model).double(), x.double(), g.double(), alone)
    theirs, ours = results(model, x, g, alone), results(new, x, g, alone)
    if "few" not in name:
        assert "Winograd" in str(new.plan(x))
    for i, (truth, eager, own) in enumerate(zip(exact, theirs, ours)):
        error, allowed = (own - truth).norm(), 2 * (eager - truth).norm() + 2e-7 * truth.norm()
        assert error <= allowed, f"result {i} of {len(exact)}: {error} where eager's half is {allowed}"


@pytest.mark.parametrize("name", ["pointwise", "long rows, few channels in", "channels"])
def test_the_same_bits_whatever_else_is_asked_for(name):
    _, new, x, g = fused(name)
    every = results(new, x, g)
    for _ in range(3):
        assert all(map(torch.equal, results(new, x, g), every))
    (dw,) = torch.autograd.grad(new(x), [new.conv.weight], g)
    assert torch.equal(dw, every[2])


@pytest.mark.parametrize("value", [float("inf"), float("-inf"), float("nan"), 3e38])
@pytest.mark.parametrize("padding", [0, 1])
def test_what_is_not_finite_is_summed_directly(value, padding):
    """Winograd's way would make NaN of infinities, and infinities of the largest numbers."""
    torch.manual_seed(0)
    model, x = Model(nn.Conv2d(8, 16, 3, padding=padding), nn.ReLU()), torch.randn(2, 8, 24, 27)
    x[0, 3, 5, 6], x[1, 2, 0, 26] = value, -value
    with torch.no_grad():
        expected, found = model(x), fuse(copy.deepcopy(model))(x)
    finite = expected.isfinite()
    assert torch.equal(found.isfinite(), finite) and (value == 3e38 or not finite.all())
    torch.testing.assert_close(found[~finite], expected[~finite], equal_nan=True)
    largest = expected[finite].abs().max()  # a pixel's rounding error is that of each sum that has it
    torch.testing.assert_close(found[finite] / largest, expected[finite] / largest, rtol=1e-5, atol=1e-6)


def test_gradients_that_are_not_finite_are_eagers():
    torch.manual_seed(0)
    model, x = Model(nn.Conv2d(16, 16, 3), nn.ReLU()), torch.randn(2, 16, 24, 27)
    g = torch.randn(2, 16, 22, 25)
    g[0, 3, 4, 5] = float("inf")
    for own, theirs in zip(results(fuse(copy.deepcopy(model)), x, g), results(model, x, g)):
        torch.testing.assert_close(own, theirs, rtol=1e-3, atol=1e-4, equal_nan=True)


@pytest.mark.parametrize("tie", [False, True])
def test_where_nothing_passes_gradients_are_zero(tie):
    """… and at a tie, or where what isn't finite hides behind a closed gate, they are not."""
    torch.manual_seed(0)
    model = Model(nn.Conv2d(3, 16, 3), nn.GroupNorm(4, 16), Unpassable())
    x, g = torch.randn(2, 3, 20, 21), torch.randn(2, 16, 18, 19)
    if tie:
        with torch.no_grad():
            model.tail[0].weight[3], model.tail[0].bias[3] = 0, -0.25
    new = fuse(copy.deepcopy(model))
    _, dx, dw, *others = results(new, x, g)
    assert bool(others[-1].any()) == tie
    assert not dx.any() and not dw.any()
    x[1, 1, 4, 4] = float("nan")
    for own, theirs in zip(results(new, x, g)[2:4], results(model, x, g)[2:4]):
        assert torch.equal(own.isnan(), theirs.isnan()) and theirs.isnan().any()


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_other_dtypes_are_the_librarys(dtype):
    model = Model(nn.Conv2d(16, 16, 3), nn.ReLU()).to(dtype)
    x = torch.randn(1, 16, 20, 22).to(dtype)
    new = fuse(model)
    torch.testing.assert_close(new(x), model(x), rtol=0.02, atol=1e-3)
    assert "the library's" in str(new.plan(x))
