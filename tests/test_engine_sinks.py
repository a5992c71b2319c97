"""Reductions inside the mainloops (inline_kernels/engine/sinks.py), run in the emulation of a GPU, against float64; which schedule KernelBench's
problems get; and what nvcc makes of the sources."""

from __future__ import annotations

import copy
import random
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import numerics
from inline_kernels.bench import checks
from inline_kernels.engine import direct, mainloops, sinks, stored
from inline_kernels.engine.between import KEPT, OPERAND
from inline_kernels.engine.cases import Case
from test_emulated import folder, gpu, guarded, library_of, pytestmark, remembers_nothing  # noqa: F401
from test_engine_direct import device, full_size, given, h200, kinds_of, only_through, random_model  # noqa: F401

INF = float("inf")
POOLS = {2: F.max_pool2d, 3: F.max_pool3d}


def model_of(filters, tail, **settings) -> nn.Module:
    model = random_model(filters, tail, **settings)
    model.spatial = tuple(range(2, len(filters)))
    return model


def normed(m: nn.Module, v: torch.Tensor, groups: int = 4) -> torch.Tensor:
    return F.group_norm(v, groups, m.norm.weight, m.norm.bias)


def residual(m: nn.Module, v: torch.Tensor) -> torch.Tensor:
    return torch.logsumexp(v + F.hardswish(torch.tanh(normed(m, v))), 1, keepdim=True)


# By name: the tail, and the sinks of its passes over v.
TAILS = {
    "min": (lambda m, v: torch.tanh(v.amin(1, keepdim=True)), "channels"),
    "max": (lambda m, v: (torch.sigmoid(v * m.scale) * m.by_channel).amax(1), "channels"),
    "mean over channels": (lambda m, v: torch.square(v).mean(1) / m.number, "channels"),
    "logsumexp": (lambda m, v: torch.relu(torch.logsumexp(v * m.scale, 1)), "channels"),
    "global mean": (lambda m, v: F.gelu(v).mean(m.spatial), "sums"),
    "norm": (lambda m, v: F.relu(normed(m, v * m.scale)) / m.number, "moments; store"),
    "nonlinear norm": (
        lambda m, v: normed(m, torch.sigmoid((v + m.by_channel) * m.scale), 2),
        "moments; store",
    ),
    "instance norm": (lambda m, v: F.instance_norm(v) / 2.0, "moments; store"),
    "norm, mean": (lambda m, v: normed(m, F.hardswish(v)).mean(m.spatial), "moments"),
    "norm, logsumexp": (residual, "moments; channels"),
}
FILTERS = {
    "narrow2d": [((32, 3, 3, 3), (9, 34)), ((20, 5, 2, 3), (7, 150)), ((80, 2, 1, 2), (5, 11))],
    "narrow3d": [((16, 3, 3, 3, 3), (6, 9, 13)), ((32, 2, 1, 2, 2), (4, 7, 9))],
    "wide": [((40, 24, 3, 3), (5, 37)), ((144, 17, 1, 2), (3, 150))],
    "stream": [((40, 24, 3, 3), (5, 37)), ((144, 17, 1, 2, 2), (3, 5, 9))],
}


def run(model: nn.Module, *inputs) -> torch.Tensor:
    """y."""
    segment, arguments = given(model, *inputs)
    plan = sinks.plan(Case(segment, arguments, False, inputs[0].dtype))
    return sinks.forward(plan, arguments)[0]


def references(model: nn.Module, *inputs) -> list[torch.Tensor]:
    def of(kind: torch.dtype) -> torch.Tensor:
        with torch.no_grad():
            return copy.deepcopy(model).to(kind)(*[t.to(kind) for t in inputs])

    return [of(kind) for kind in (torch.float64, inputs[0].dtype)]


def assert_rule(model: nn.Module, *inputs) -> None:
    dtype = inputs[0].dtype
    y, (exact, eager) = run(model, *inputs), references(model, *inputs)
    y = y.view(exact.shape)
    assert y.dtype == dtype
    error = checks.judged("", "output", exact, eager, y, dtype)
    assert error.share <= 1, error
    assert torch.equal(y, run(model, *inputs).view(y.shape)), "it isn't repeatable"


def sinks_of(model: nn.Module, x: torch.Tensor, stores: bool = False) -> str:
    segment, arguments = given(model, x)
    nd = x.dim() - 2
    (mainloop,) = [m for m in mainloops.MAINLOOPS if (m.takes, m.dimensions) == ("elements", nd)]
    found = sinks.composed(segment, mainloop, False, stores)
    return "; ".join(" and ".join(sink.kind for sink in own.sinks) for own in found.parts.values())


@pytest.fixture
def through(device, monkeypatch):  # noqa: F811
    """through(mainloop, architecture, stores): where both can be had, v is stored or not."""

    def become(mainloop: str, architecture: int = 800, stores: bool = False) -> None:
        device(900 if mainloop == "stream" else architecture), only_through(mainloop, monkeypatch)
        monkeypatch.setattr(sinks, "_recomputes", lambda *given: not stores)
        monkeypatch.setattr(sinks, "MOST_BESIDE", 1000)

    return become


# Every tail behind one mainloop, every kind of sink behind all.
SINKS = ["max", "logsumexp", "global mean", "norm"]
PAIRS = [(mainloop, name) for mainloop in FILTERS for name in (TAILS if mainloop == "narrow2d" else SINKS)]


@pytest.mark.parametrize("mainloop, name", PAIRS)
def test_tails(mainloop, name, through):
    filters, size = FILTERS[mainloop][0]
    through(mainloop)
    tail, found = TAILS[name]
    model, x = model_of(filters, tail), numerics.random_input((2, filters[1], *size))
    assert sinks_of(model, x) == found
    assert_rule(model, x)


SIZES = [(mainloop, *sizes) for mainloop, all_sizes in FILTERS.items() for sizes in all_sizes]


@pytest.mark.parametrize(
    "mainloop, filters, size, name, dtype",
    [
        (*sizes, *[("logsumexp", torch.float32), ("nonlinear norm", torch.bfloat16)][i % 2])
        for i, sizes in enumerate(SIZES)
        if i  # narrow2d has three
    ],
    ids=str,
)
def test_sizes(name, mainloop, filters, size, dtype, through):
    """Channels that fill no block, or several; rows and planes that fill no tile, or several."""
    through(mainloop, 900 if dtype == torch.float32 else 800)
    model = model_of(filters, TAILS[name][0]).to(dtype)
    assert_rule(model, numerics.random_input((3, filters[1], *size), dtype=dtype))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_samples_that_share_a_tile(dtype, through):
    """Whose norms differ."""
    through("stream")
    model = model_of((40, 24, 3, 3), TAILS["instance norm"][0]).to(dtype)
    assert_rule(model, numerics.random_input((5, 24, 7, 11), dtype=dtype))


@pytest.mark.parametrize("name", ["logsumexp", "instance norm"])
def test_random_widths(name, through):
    """Strips of every length, and every place in a sector that a row may begin at."""
    through("narrow2d")
    model, draw = model_of((20, 5, 2, 3), TAILS[name][0]), random.Random(0)
    for _ in range(12):
        assert_rule(model, numerics.random_input((2, 5, draw.randint(3, 12), draw.randint(4, 60))))


@pytest.mark.parametrize("name", ["norm", "logsumexp"])
def test_padding_stride_and_dilation(name, through):
    through("stream", stores=name == "norm")
    model = model_of((40, 24, 3, 2), TAILS[name][0], padding=(1, 2), stride=(2, 1), dilation=(1, 2))
    assert_rule(model, numerics.random_input((3, 24, 8, 9)))


@pytest.mark.parametrize("mainloop", ["narrow2d", "narrow3d"])
@pytest.mark.parametrize("name, stores", [("norm", True), ("logsumexp", False), ("norm", False)])
def test_zeros_around_an_image(name, stores, mainloop, through):
    through(mainloop, stores=stores)
    filters, size = ((20, 5, 2, 3), (7, 40)) if mainloop == "narrow2d" else ((20, 3, 2, 3, 3), (4, 7, 11))
    model = model_of(filters, TAILS[name][0], padding=(1, 0, 2)[: len(size)])
    assert_rule(model, numerics.random_input((2, filters[1], *size)))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_channels_of_x_channels_last(dtype, through):
    """They are reduced as they come."""
    through("stream")
    model = model_of((40, 24, 3, 2), TAILS["logsumexp"][0], padding=1).to(
        dtype, memory_format=torch.channels_last
    )
    x = numerics.random_input((3, 24, 8, 9), dtype=dtype).contiguous(memory_format=torch.channels_last)
    assert_rule(model, x)
    x[0, 3, 2, 5] = INF
    segment, arguments = given(model, x)
    y = sinks.forward(sinks.plan(Case(segment, arguments, False, dtype)), arguments)[0]
    eager = model(x)
    assert torch.equal(y.view_as(eager).isfinite(), eager.isfinite())


def test_passes_in_planes_get_v_so(through):
    """As where another input has positions and channels, and no samples."""
    through("stream")
    model = model_of((40, 24, 3, 3), lambda m, v, other: F.relu(v + other.mean(0, keepdim=True)))
    segment, arguments = given(model, numerics.random_input((2, 24, 5, 34)))
    arguments[1] = arguments[1].mean(0, keepdim=True)
    case = Case(segment.with_result(KEPT, False, (), True), arguments, False, torch.float32, last=True)
    with pytest.raises(stored.Unsupported, match="passes read planes"):
        stored.plan(case)


def rounded(y: torch.Tensor) -> torch.Tensor:
    bits = y.contiguous().view(torch.int32)
    nearest = bits.add(0x1000).bitwise_and(~0x1FFF).view(torch.float32)
    return torch.where(y.isfinite(), nearest, y)


@pytest.mark.parametrize(
    "by, tail",
    [(direct, lambda m, v: F.silu(v * m.scale)), (sinks, TAILS["norm"][0]), (stored, TAILS["norm"][0])],
    ids=["direct", "sinks", "stored"],
)
@pytest.mark.parametrize("result", [OPERAND, KEPT])
def test_a_result_that_stays_channels_last(result, by, tail, through):
    """Is the same; an operand of the next convolution, rounded to TF32, also where it is computed again."""
    through("stream")
    model, x = model_of((40, 24, 3, 3), tail, padding=1), numerics.random_input((3, 24, 5, 37))
    x[0, 3, 2, 5] = INF
    segment, arguments = given(model, x)

    def of(segment, last: bool) -> torch.Tensor:
        case = Case(segment, arguments, False, x.dtype, last=last)
        plan = by.plan(case)
        assert not last or by is not stored or plan.last or plan.turns_y
        return by.forward(plan, arguments)[0]

    y = of(segment, False).view(3, 40, 5, 37)
    kept = of(segment.with_result(result, False, (), True), True)
    assert kept.shape == y.shape and kept.is_contiguous(memory_format=torch.channels_last)
    exact = (
        {"rtol": 0, "atol": 0} if by is not stored else {"rtol": 2**-10, "atol": 1e-5}
    )  # another order of sums
    torch.testing.assert_close(
        kept.contiguous(), rounded(y) if result == OPERAND else y, equal_nan=True, **exact
    )
    assert y.isnan().any() and y[1:].isfinite().all()


@pytest.mark.parametrize(
    "mainloop, filters, size", [(name, *FILTERS[name][0]) for name in ("narrow2d", "wide")]
)
def test_mainloops_that_write_planes(mainloop, filters, size, through):
    through(mainloop)
    for by, tail in ((direct, lambda m, v: F.silu(v)), (sinks, TAILS["norm"][0])):
        model, x = model_of(filters, tail), numerics.random_input((2, filters[1], *size))
        segment, arguments = given(model, x)
        case = Case(segment.with_result(KEPT, False, (), True), arguments, False, x.dtype, last=True)
        with pytest.raises(sinks.Unsupported, match=mainloops.STAYS_LAST):
            by.plan(case)


@pytest.mark.parametrize("name", ["norm", "norm, mean", "max"])
def test_filters_that_registers_have_no_room_for(name, through):
    through("narrow3d")
    model = model_of((24, 3, 4, 4, 4), TAILS[name][0])
    assert_rule(model, numerics.random_input((2, 3, 6, 7, 9)))


def dropped(m: nn.Module, v: torch.Tensor) -> torch.Tensor:
    return F.dropout(torch.clamp(normed(m, v), -0.5, 1.5), 0.0, m.training)


STORED = {
    "in y's place": (lambda m, v: F.relu(normed(m, v + m.by_channel)), "moments and store"),
    "what is normalised": (lambda m, v: normed(m, torch.sigmoid(v * m.scale)), "moments and store"),
    "before a pool": (lambda m, v: POOLS[len(m.spatial)](normed(m, v), 2), "moments and store"),
    "before overlapping windows": (
        lambda m, v: POOLS[len(m.spatial)](normed(m, v), 3, 2, 1),
        "moments and store",
    ),
    "before channels": (lambda m, v: torch.clamp(F.instance_norm(v), -1, 1).amax(1), "moments and store"),
    "dropout": (dropped, "moments and store"),
    "before a plane's maximum": (
        lambda m, v: (lambda u: u * torch.tanh(u))(normed(m, v)).amax(m.spatial),
        "moments and store",
    ),
}


@pytest.mark.parametrize(
    "mainloop, name",
    [
        (mainloop, name)
        for i, mainloop in enumerate(["narrow2d", "narrow3d", "stream", "wide"])
        for name in [*STORED][i % 2 :: 2]
    ],
)
def test_v_stored(mainloop, name, through):
    filters, size = FILTERS[mainloop][0]
    through(mainloop, stores=True)
    tail, found = STORED[name]
    model, x = model_of(filters, tail), numerics.random_input((2, filters[1], *size))
    assert sinks_of(model, x, stores=True) == found
    assert_rule(model, x)


@pytest.mark.parametrize("mainloop, stores", list(zip(FILTERS, [False, True, False, True])))
def test_batch_norm_in_training(mainloop, stores, through):
    filters, size = FILTERS[mainloop][0]
    through(mainloop, stores=stores)
    model, x = (
        model_of(filters, lambda m, v: m.norm(F.mish(v)) * m.number),
        numerics.random_input((3, filters[1], *size)),
    )
    exact, eager = copy.deepcopy(model.train()).double(), copy.deepcopy(model)
    y = run(model, x)
    with torch.no_grad():
        expected, eager = exact(x.double()), eager(x)
    for name in ("running_mean", "running_var"):
        own = getattr(model.norm, name)
        torch.testing.assert_close(own.double(), getattr(exact.norm, name), rtol=1e-5, atol=1e-6)
    error = checks.judged("", "output", expected, eager, y.view(expected.shape), x.dtype)
    assert error.share <= 1, error


@pytest.mark.parametrize("name", SINKS)
@pytest.mark.parametrize("mainloop", FILTERS)
def test_values_that_are_not_finite(mainloop, name, through):
    """Infinities and NaN of a sample are that sample's; they are where eager has them."""
    filters, size = FILTERS[mainloop][0]
    through(mainloop)
    model, x = model_of(filters, TAILS[name][0]), numerics.random_input((5, filters[1], *size))
    large = 1e15 if "norm" in name else 1e30  # of 1e30 eager's norm on a CPU makes NaN: it squares in float32
    for n, value in enumerate([INF, float("nan"), -INF, large], 1):
        x[(n, 0, *[extent // 2 for extent in size])] = value
    y, (_, eager) = run(model, x), references(model, x)
    assert torch.equal(kinds_of(y.view(eager.shape)), kinds_of(eager))
    torch.testing.assert_close(y.view(eager.shape)[0], eager[0], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("mainloop", FILTERS)
def test_large_means(mainloop, through):
    filters, size = FILTERS[mainloop][0]
    through(mainloop)
    model = model_of(filters, TAILS["norm"][0])
    assert_rule(model, numerics.random_input((2, filters[1], *size)) + 300)


def test_exact_order_takes_moments_of_the_model_s_values(through):
    filters, size = FILTERS["narrow2d"][0]
    through("narrow2d")
    model, x = model_of(filters, TAILS["norm"][0]), numerics.random_input((2, filters[1], *size))
    segment, arguments = given(model, x)
    texts = [
        sinks.requests(Case(segment, arguments, False, x.dtype, exact))[0]["source"]
        for exact in (False, True)
    ]
    assert ["conv::Identity" in text for text in texts] == [True, False]


def test_what_costs_less(through, monkeypatch):
    """Products again, or v's way to memory: by what they take, whatever the problem."""
    through("narrow2d")
    monkeypatch.undo()
    (mainloop,) = [
        each for each in mainloops.MAINLOOPS if each.takes == "elements" and each.name == "narrow2d"
    ]
    for taps, instructions, again in ((1, 0, True), (25, 0, False), (1, 30, False)):
        model = model_of((32, 16, taps, 1), TAILS["norm"][0])
        segment, arguments = given(model, torch.randn(2, 16, 40, 40))
        passes = [SimpleNamespace(instructions=instructions)] * 2
        case = Case(segment, arguments, False, torch.float32)
        assert sinks._recomputes(case, mainloop, passes, True) == again
        assert sinks._recomputes(case, mainloop, passes[:1], True)


# --------------------------------------------------------------------------------------------------------- KernelBench's sizes

RECOMPUTED = {17: "wide", 73: "narrow2d", 92: "narrow2d"}
ONCE = {23: "narrow3d", 25: "narrow2d", 27: "narrow3d", 32: "wide", 67: "narrow2d"}
STORING = {79: "narrow3d", 83: "narrow3d", 85: "narrow2d"}


@pytest.mark.parametrize("number", {**RECOMPUTED, **ONCE, **STORING})
def test_problems_at_their_full_sizes(number, h200):  # noqa: F811
    segment, arguments = full_size(number)
    line = sinks.describe(Case(segment, arguments, False, torch.float32))
    name = {**RECOMPUTED, **ONCE, **STORING}[number]
    assert line.startswith(f"{name}: ")
    assert ("v is never written" in line) == (number not in STORING)
    assert ("again" in line) == (number in RECOMPUTED)
