"""engine/strips.py and kernels/cpu/strips.h: convolutions and gradients by a CPU's own kernels, a strip at a time with what follows."""

from __future__ import annotations

import copy
import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import inline_loader
from fuzz_engine import STRIPS, check_fused
from inline_kernels import fuse
from inline_kernels.engine import cases, library, source, strips
from inline_kernels.engine.segment import Conv

pytestmark = pytest.mark.usefixtures("poisoned")
optimised = pytest.mark.usefixtures("optimised")


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


class LeastOfDepth(nn.Module):
    def forward(self, v):
        return v.amin(2)


class SoftmaxTimesV(nn.Module):
    """v is asked for again behind the softmax."""

    def forward(self, v):
        return F.max_pool2d(torch.softmax(v, 1) * v, 2)


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
    "windows that overlap": (
        nn.Conv2d(8, 16, 3),
        [nn.ReLU(), nn.MaxPool2d(3, 2, 1)],
        (2, 8, 34, 37),
    ),
    "windows, none in the last strip": (
        nn.Conv2d(8, 16, 3),
        [nn.AvgPool2d(4), nn.Sigmoid(), nn.GroupNorm(4, 16)],
        (1, 8, 20, 301),
    ),
    "windows in depth": (nn.Conv3d(4, 16, 3), [nn.ReLU(), nn.MaxPool3d(2)], (2, 4, 7, 25, 31)),
    "windows in depth, picked": (
        nn.Conv3d(9, 16, 3, padding=1),
        [nn.GELU(), nn.MaxPool3d(2)],
        (2, 9, 7, 25, 31),
    ),
    "a channel of few in, picked": (nn.Conv2d(3, 24, 3), [LargestChannel(24)], (2, 3, 24, 27)),
    "a position, picked": (
        nn.Conv3d(10, 16, 3),
        [nn.Hardswish(), nn.AdaptiveMaxPool3d(1)],
        (2, 10, 7, 24, 27),
    ),
    "windows that overlap, picked": (
        nn.Conv3d(8, 8, 3),
        [nn.MaxPool3d(3, 2, 1), nn.SiLU()],
        (2, 8, 7, 25, 31),
    ),
    "a whole axis": (nn.Conv3d(4, 16, 3), [LeastOfDepth(), nn.Softmax(1)], (2, 4, 7, 25, 31)),
    "windows of windows": (
        nn.Conv3d(4, 16, 3),
        [nn.Softmax(1), nn.MaxPool3d(2), nn.MaxPool3d(2)],
        (2, 4, 13, 25, 31),
    ),
    # Vectors of which a few values count, in windows.
    "windows behind a softmax": (nn.Conv2d(8, 16, 3), [nn.Softmax(1), nn.MaxPool2d(2)], (2, 8, 24, 28)),
    "v behind a softmax": (nn.Conv2d(8, 16, 3), [SoftmaxTimesV()], (2, 8, 24, 37)),
    "planes": (nn.Conv3d(8, 16, 3, padding=1), [nn.InstanceNorm3d(16), nn.ReLU()], (2, 8, 6, 25, 31)),
    "channels": (nn.Conv2d(8, 24, 3), [nn.InstanceNorm2d(24), LargestChannel(24)], (2, 8, 24, 27)),
    "over channels": (nn.Conv2d(8, 16, 3), [nn.Softmax(1)], (2, 8, 24, 27)),
}


def fused(name):
    torch.manual_seed(0)
    conv, tail, shape = MODELS[name]
    model, x = Model(copy.deepcopy(conv), *copy.deepcopy(tail)), torch.randn(shape)
    for (
        module
    ) in model.modules():  # the same weights in each process: of nearly equal maxima rounding chooses
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()
    with torch.no_grad():
        g = torch.randn_like(copy.deepcopy(model)(x))
    return model, fuse(copy.deepcopy(model)), x, g


@pytest.mark.parametrize("name", MODELS)
def test_twice_eagers_error_at_most(name):
    model, new, x, g = fused(name)
    alone = (
        name in ("pointwise", "windows", "windows that overlap", "windows of windows") or "softmax" in name
    )
    exact = results(copy.deepcopy(model).double(), x.double(), g.double(), alone)
    theirs, ours = results(model, x, g, alone), results(new, x, g, alone)
    if "few" not in name:
        assert "Winograd" in str(new.plan(x))
    if "picked" in name:
        with torch.enable_grad():
            assert "picked::FilterSums" in new.source(x)
    for i, (truth, eager, own) in enumerate(zip(exact, theirs, ours)):
        error, allowed = (own - truth).norm(), 2 * (eager - truth).norm() + 2e-7 * truth.norm()
        assert error <= allowed, f"result {i} of {len(exact)}: {error} where eager's half is {allowed}"


@pytest.mark.parametrize("name", ["a whole axis", "windows of windows"])
def test_passes_that_wait_for_strips_alone_run_in_them(name):
    """Nobody reads v outside."""
    _, new, x, _ = fused(name)
    with torch.no_grad():
        text = new.source(x)
    inside, outside = text.split("load::convolved<")[1].split("\n    });")
    assert inside.count("strip.planes(") == text.count("template <class Plane>") > 1
    assert "load::planes(" not in outside


@pytest.mark.parametrize("name, once", [("windows of windows", True), ("v behind a softmax", False)])
def test_what_takes_much_is_left_in_the_place_of_v_that_nobody_asks_for(name, once):
    """In training backward does."""
    _, new, x, g = fused(name)
    with torch.no_grad():
        text = new.source(x)
    assert text.count("math::exp(") == 2 - once and ("replace_v(exp" in text) == once
    assert text.count("largest_value()") == 2 + once and "largest()" not in text  # without a place, too
    new(x).backward(g)
    assert "replace_v(" not in new.source(x)


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
def test_what_is_not_finite_is_left_too(value):
    model, new, x, _ = fused("windows of windows")
    x[1, 2, 3, 4, 5] = value
    with torch.no_grad():
        assert torch.allclose(new(x), model(x), rtol=1e-4, equal_nan=True)


@optimised
def test_results_larger_than_caches():
    """… are stored past them, parts of vectors by way of them."""
    model = Model(nn.Conv2d(8, 56, 3), nn.Hardswish())
    x = torch.randn(8, 8, 127, 130)
    with torch.no_grad():
        y, truth = fuse(copy.deepcopy(model))(x), model.double()(x.double())
    assert y.nbytes > 24 << 20 and (y - truth).abs().max() < 1e-5


@pytest.mark.parametrize("seed", [0, 3])
def test_random_programs(seed):
    """More of them: tests/fuzz_engine.py --strips, with --as-used and without."""
    assert check_fused(seed, "cpu", STRIPS, as_used=seed > 1) == ""


@pytest.mark.parametrize("name", ["pointwise", "long rows, few channels in", "channels"])
def test_the_same_bits_whatever_else_is_asked_for(name):
    _, new, x, g = fused(name)
    every = results(new, x, g)
    for _ in range(3):
        assert all(map(torch.equal, results(new, x, g), every))
    (dw,) = torch.autograd.grad(new(x), [new.conv.weight], g)
    assert torch.equal(dw, every[2])


@pytest.mark.parametrize("needs_dx", [False, True])
@pytest.mark.parametrize("name", ["zeros around, batch norm", "windows in depth, picked"])
def test_frozen_filters_and_an_x_that_lies_otherwise(name, needs_dx):
    """… whose values no sum reads then: what the library gives of x rounds otherwise, all other gradients are the same to the bit."""
    _, new, x, g = fused(name)
    last = library.CHANNELS_LAST[x.dim()]
    every = results(new, x, g)[1:]
    new.zero_grad()
    new.conv.weight.requires_grad_(False)
    image = x.to(memory_format=last, copy=True).requires_grad_(needs_dx)
    new(image).backward(g)
    wanted = [t for t in (image, *new.parameters()) if t.requires_grad]
    dx, _, *others = every
    if needs_dx:
        torch.testing.assert_close(wanted.pop(0).grad, dx, rtol=1e-4, atol=1e-5)
    assert wanted and all(torch.equal(t.grad, expected) for t, expected in zip(wanted, others, strict=True))


@pytest.fixture(params=[1, 0], ids=["in registers", "in memory"])
def way(request, monkeypatch):
    """Where products wait until they are results; a processor has one way."""

    def load(name, *, load=inline_loader.load, defines=None, **given):
        return load(name, defines={**(defines or {}), "WINOGRAD_IN_REGISTERS": request.param}, **given)

    monkeypatch.setattr(inline_loader, "load", load)


@pytest.mark.parametrize("value", [float("inf"), float("-inf"), float("nan"), 3e38])
def test_what_is_not_finite_is_summed_directly(value, way):
    """Winograd's way would make NaN of infinities, and infinities of the largest numbers."""
    torch.manual_seed(0)
    padding = int(value == 3e38)
    model, x = Model(nn.Conv2d(8, 16, 3, padding=padding), nn.ReLU()), torch.randn(2, 8, 24, 27)
    x[0, 3, 5, 6], x[1, 2, 0, 26] = value, -value
    with torch.no_grad():
        expected, found = model(x), fuse(copy.deepcopy(model))(x)
    finite = expected.isfinite()
    assert torch.equal(found.isfinite(), finite) and (value == 3e38 or not finite.all())
    torch.testing.assert_close(found[~finite], expected[~finite], equal_nan=True)
    largest = expected[finite].abs().max()  # a pixel's rounding error is that of each sum that has it
    torch.testing.assert_close(found[finite] / largest, expected[finite] / largest, rtol=1e-5, atol=1e-6)


def test_what_is_not_finite_leaves_other_strips_alone(way):
    """A thread's last strip of a sample has fewer tiles than the one before it: what that left has no part in it, to the bit."""
    torch.manual_seed(0)
    fast, x = fuse(Model(nn.Conv2d(8, 16, 3), nn.ReLU())), torch.randn(1, 8, 30, 30)
    threads = torch.get_num_threads()
    with torch.no_grad():
        try:
            torch.set_num_threads(1)
            expected, x[0, 0, 21, 6] = fast(x), float("nan")
            found = fast(x)
        finally:
            torch.set_num_threads(threads)
    assert found.isnan().any() and torch.equal(found[:, :, 24:], expected[:, :, 24:])


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


# ------------------------------------------------------------------------------------------------- the parts by themselves

PARTS = """#include "load/load.h"
#include "cpu/strips.h"
struct Copy {
  const value_t* from;
  value_t* dz;
  template <class Plane> void operator()(Plane& plane) const {
    plane.each([&](const auto& at) { at.write(dz, at.read(from)); });
  }
};
EXPORT void gradient(value_t* dweight, value_t* dz, const value_t* dv, const value_t* image, int64_t by, int64_t N, int64_t C, int64_t image_C, int64_t image_D, int64_t image_H, int64_t image_W, int64_t kernel_D, int64_t before, int64_t above, int64_t left, int64_t planes, int64_t rows, int64_t columns, int64_t samples, int64_t shares) {
  const winograd::Sizes sizes{N, image_C, C, image_D, image_H, image_W, kernel_D, before, above, left};
  const int64_t D = sizes.planes(), H = sizes.height(), W = sizes.width();
  const load::Division strips{D, H, W, planes, rows, columns};
  const decltype(&load::differentiated<winograd::FilterSums, Copy>) runs[] = {load::differentiated<winograd::FilterSums, Copy>,
      load::differentiated<direct::FilterSums, Copy>, load::differentiated<picked::FilterSums, Copy>};
  uint8_t passes = 0;
  runs[by](Copy{dv}, load::Extent(N, C, D, H, W), {}, dz, dweight, image, sizes, strips, shares, &passes);
}
""" + "\n".join(source._CONVOLVE)


def drawn(data, flat: bool):
    """A convolution, its x and weight, a gradient of its result and the sizes; flat: in 2-D."""
    ranges = (1, 3), (1, 12), (1, 5), (1, 1 if flat else 3), (1, 3), (3, 40), (3, 150), (0, 2), (0, 2)
    N, channels, eighths, depth, planes, H, W, *padding = [data.draw(st.integers(*each)) for each in ranges]
    D, before = (1, 0) if flat else (planes + depth - 1, data.draw(st.integers(0, depth - 1)))
    conv = convolution(before, *padding)
    x, weight = torch.randn(N, channels, D, H, W), torch.randn(8 * eighths, channels, depth, 3, 3)
    dv = torch.randn_like(F.conv3d(x, weight, padding=conv.padding))
    return conv, x, weight, dv, sizes_of(dv)


def convolution(*padding: int) -> Conv:
    return Conv("", 3, (1, 1, 1), padding, (1, 1, 1), 1)


def sizes_of(v) -> cases.Sizes:
    return cases.Sizes(*v.shape[:2], {"e": tuple(v.shape[2:])})


def with_a_margin(like, shape):
    """A tensor, and what lies behind it."""
    memory = like.new_full((math.prod(shape) + 64,), math.pi)
    return memory[: len(memory) - 64].view(shape), memory[len(memory) - 64 :]


def assert_as_exact(own, run, *operands):
    exact, theirs = run(*(t.double() for t in operands)), run(*operands)
    assert (own - exact).norm() <= 2 * (theirs - exact).norm() + 4.8e-7 * exact.norm()


@optimised
@given(st.data())
def test_convolutions_at_random_sizes(way, data):
    """The convolution by itself; what lies behind its result stays as it was."""
    conv, x, weight, dv, sizes = drawn(data, False)
    v, behind = with_a_margin(x, dv.shape)
    numbers = strips.of_convolution(strips.Image(conv, x, weight), sizes, [], True).numbers[:10]
    inline_loader.load("parts", source=PARTS).convolve(v, x, weight, sizes.N, sizes.C, *numbers)
    assert (behind == math.pi).all()
    assert_as_exact(v, lambda x, weight: F.conv3d(x, weight, padding=conv.padding), x, weight)


BY = ["winograd", "direct", "picked"]


def filters_gradient(by, conv, x, weight, dv, sizes, with_dz=False, shares=2):
    image = strips.Image(conv, x, weight, by == "winograd")
    (dw, behind), (dz, behind_dz) = (
        with_a_margin(x, weight.shape),
        with_a_margin(x, dv.shape if with_dz else (0,)),
    )
    numbers = [*strips.of_gradient(image, sizes, by).numbers[:-1], shares]
    dz_or_nothing = dz if with_dz else x.new_empty(0)
    parts = inline_loader.load("parts", source=PARTS)
    parts.gradient(dw, dz_or_nothing, dv, image.of(x), BY.index(by), sizes.N, sizes.C, *numbers)
    assert (behind == math.pi).all() and (behind_dz == math.pi).all()
    assert not with_dz or torch.equal(dz, dv)
    return dw


@optimised
@pytest.mark.parametrize("by", BY)
@given(st.data())
def test_gradients_of_filters_at_random_sizes(by, data):
    """… by themselves, in any number of shares, with v's gradient or without; what lies behind a result stays as it was."""
    conv, x, weight, dv, sizes = drawn(data, by == "winograd")
    if by == "picked":
        dv *= torch.rand_like(dv) < data.draw(st.sampled_from([0.0, 0.1, 1.0]))
    with_dz, shares = data.draw(st.booleans()), data.draw(st.integers(1, 5))

    def by_library(x, dv):
        return torch.nn.grad.conv3d_weight(x, weight.shape, dv, padding=conv.padding)

    assert_as_exact(filters_gradient(by, conv, x, weight, dv, sizes, with_dz, shares), by_library, x, dv)


@optimised
def test_picked_sums_where_something_is_not_finite():
    """A gradient of NaN reaches the sums of its channel. A pixel meets zeros, too, which are left out: nothing is known then."""
    x, weight, dv = torch.randn(2, 9, 4, 20, 40), torch.randn(24, 9, 3, 3, 3), torch.zeros(2, 24, 2, 18, 38)
    dv[0, 5, 1, 17, 37], dv[1, 6, 0, 0, 0] = math.nan, 1.0
    dw = filters_gradient("picked", convolution(0, 0, 0), x, weight, dv, sizes_of(dv))
    assert (
        dw[5].isnan().all() and torch.equal(dw[6], x[1, :, :3, :3, :3]) and dw.isnan().sum() == dw[5].numel()
    )
    x[1, 8, 3, 19, 39] = math.inf
    assert filters_gradient("picked", convolution(0, 0, 0), x, weight, dv, sizes_of(dv)).isnan().all()


@optimised
def test_direct_sums_where_something_is_not_finite():
    """An infinite pixel and a gradient of NaN reach the sums that have them, and no others: of their channel, and of the taps that see the pixel."""
    x, weight, dv = torch.randn(2, 3, 4, 20, 40), torch.randn(24, 3, 3, 3, 3), torch.randn(2, 24, 2, 18, 38)
    x[1, 1, 0, 0, 7], dv[0, 5, 1, 17, 37] = math.inf, math.nan
    dw = filters_gradient("direct", convolution(0, 0, 0), x, weight, dv, sizes_of(dv))
    odd = torch.zeros_like(dw, dtype=torch.bool)
    odd[:, 1, 0, 0], odd[5] = True, True
    assert torch.equal(~dw.isfinite(), odd) and dw[5].isnan().all() and dw[4, 1, 0, 0].isinf().all()
