"""The schedule `direct`: tails of models inside convolutions of our own, run in the emulation of a GPU, against float64; what it leaves to
others; and what nvcc makes of its sources."""

from __future__ import annotations

import copy
import json
import math
import re
import statistics
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import inline_loader
import numerics
from benchmarks import level2
from generated import arguments_of, segment_of
from inline_kernels import fuse
from inline_kernels.bench import checks
from inline_kernels.engine import (
    again,
    between,
    choice,
    composed,
    costs,
    direct,
    jobs,
    library,
    mainloops,
    precision,
    schedule,
    sinks,
    stored,
    tiling,
)
from inline_kernels.engine.capture import capture
from inline_kernels.engine.cases import Case
from inline_kernels.engine.operator import Standing
from test_emulated import Emulated, folder, gpu, guarded, library_of, pytestmark, remembers_nothing  # noqa: F401
from test_kernels_compile import H200, needs_nvcc, nvcc

INF = float("inf")
TYPES = [torch.float32, torch.float16, torch.bfloat16]


class Tailed(nn.Module):
    """A convolution and a tail of it, a function of the model and v; `number` and `by_channel` are there for tails."""

    def __init__(self, filters, tail, bias=True, **settings):
        super().__init__()
        C, channels, *kernel = filters
        nd = len(kernel)
        self.conv = (nn.Conv2d, nn.Conv3d)[nd - 2](channels, C, kernel, bias=bias, **settings)
        self.number = 0.3
        self.by_channel = nn.Parameter(torch.randn(C, *[1] * nd))
        self.scale = nn.Parameter(torch.randn(C, *[1] * nd))
        self.norm = (nn.BatchNorm2d, nn.BatchNorm3d)[nd - 2](C)
        self.tail = tail

    def beside(self, x) -> list[torch.Tensor]:
        """What a tail of three arguments has beside v: values of v's shape, that no convolution makes."""
        if self.tail.__code__.co_argcount == 2:
            return []
        channels = [c % self.conv.in_channels for c in range(self.conv.out_channels)]
        return [x[(slice(None), channels, *[slice(taps - 1, None) for taps in self.conv.kernel_size])]]

    def forward(self, x):
        return self.tail(self, self.conv(x), *self.beside(x))


TAILS = {
    "relu, bias": lambda m, v: F.relu(v) + m.by_channel,
    "mish of mish": lambda m, v: F.mish(F.mish(v)),
    "leaky, gelu": lambda m, v: F.gelu(F.leaky_relu(v * m.by_channel, 0.1) / m.number),
    "hardswish by hand": lambda m, v: F.relu(v) * torch.clamp((F.relu(v) + 3) / 6, 0, 1),
    "tanh, sigmoid": lambda m, v: torch.sigmoid(torch.tanh(v * m.scale) * m.by_channel),
    "a channel's own": lambda m, v: v * torch.exp(m.by_channel) - torch.tanh(m.scale) * m.number,
}
FILTERS = {
    # Rows of one tile; of two, that a block has whole; of one and of two that see pixels behind those; cut among blocks.
    "narrow2d": [
        ((16, 3, 3, 3), (7, 19)),
        ((24, 5, 2, 3), (6, 34)),
        ((70, 9, 1, 2), (3, 131)),
        ((16, 3, 2, 3), (6, 130)),
        ((24, 5, 2, 3), (5, 258)),
        ((16, 3, 1, 2), (2, 515)),
    ],
    "narrow3d": [
        ((16, 3, 3, 3, 3), (5, 8, 11)),
        ((32, 2, 1, 2, 2), (4, 7, 9)),
        ((20, 1, 2, 3, 1), (4, 7, 9)),
        ((3, 4, 3, 5, 5), (4, 9, 12)),
    ],
    "one_tap": [
        ((20, 3, 1, 1), (5, 21)),
        ((33, 17, 1, 1, 1), (3, 5, 67)),
        ((6, 8, 1, 1), (25, 26)),
        ((16, 9, 1, 1), (1, 7)),
    ],
    "wide": [((40, 24, 3, 3), (5, 21)), ((130, 17, 1, 2), (3, 67))],
}
DEVICES = [(800, torch.float32), (900, torch.bfloat16), (900, torch.float32), (800, torch.float16)]
# Each mainloop in each of these, and with each size.
BUILDS = [
    (mainloop, *sizes[place % len(sizes)], *DEVICES[place % len(DEVICES)])
    for mainloop, sizes in FILTERS.items()
    for place in range(max(len(sizes), len(DEVICES)))
]


@pytest.fixture
def device(gpu, monkeypatch, folder):  # noqa: F811
    """device(architecture): CPU tensors are on such a GPU; small outputs, too, are ours."""

    def become(architecture=800):
        gpu(architecture=architecture)

        def load(name, *, source, device, defines):
            assert device == "cuda"
            kernels = Emulated(source, library_of(source, architecture, defines, (), folder))
            kernels.library.emulation_device(4, (227 if architecture >= 900 else 163) << 10)
            return kernels

        monkeypatch.setattr(inline_loader, "load", load)
        monkeypatch.setattr(inline_loader, "load_all", lambda requests: [load(**each) for each in requests])
        monkeypatch.setattr(direct, "FEWEST_RESULTS", 0)
        monkeypatch.setitem(composed.known()["wide"]["faster"], "forward", "fused")
        monkeypatch.setattr(choice, "stream_loses", lambda *_: None)
        monkeypatch.setattr(choice, "taps_lose", lambda *_, **__: None)
        monkeypatch.setattr(choice, "narrow_loses", lambda *_, **__: None)
        monkeypatch.setattr(choice, "wide_loses", lambda *_: False)
        monkeypatch.setattr(costs, "FEW_CHANNELS", 0)  # wide, too, takes those
        monkeypatch.setattr(choice, "inside_loses", lambda *_: False)
        monkeypatch.setattr(again, "pays", lambda *_: False)
        monkeypatch.setattr(tiling, "STREAM_CLUSTER", 1)  # of more the emulation knows nothing

    return become


def random_model(filters, tail, **settings) -> nn.Module:
    model = Tailed(filters, tail, **settings).eval()
    with torch.no_grad():
        for parameter in (model.norm.weight, model.norm.bias, model.norm.running_mean):
            parameter.copy_(torch.randn_like(parameter))
        model.norm.running_var.uniform_(0.5, 2)
    return model


def only_through(mainloop: str, monkeypatch) -> None:
    monkeypatch.setattr(
        mainloops, "MAINLOOPS", [each for each in mainloops.MAINLOOPS if each.name == mainloop]
    )


def given(model: nn.Module, x: torch.Tensor) -> tuple:
    (segment,) = capture(model, model.training, x.dim()).segments
    return segment, [x, *model.beside(x), *arguments_of(model, segment, x)[1:]]


def run(model: nn.Module, x: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
    segment, arguments = given(model, x)
    last = library.is_channels_last(x)
    plan = direct.plan(Case(segment, arguments, False, dtype or x.dtype, last=last))
    return direct.forward(plan, arguments)[0]


def assert_rule(model: nn.Module, x: torch.Tensor) -> None:
    dtype = x.dtype

    def of(kind: torch.dtype) -> torch.Tensor:
        with torch.no_grad():
            return copy.deepcopy(model).to(kind)(x.to(kind))

    ours, exact, eager = run(model, x), of(torch.float64), of(dtype)
    assert ours.shape == exact.shape and ours.dtype == dtype
    error = checks.judged("", "output", exact, eager, ours, dtype)
    assert error.share <= 1, error


# ------------------------------------------------------------------------------------------------------------------- results


@pytest.mark.parametrize(
    "mainloop, name",
    [(mainloop, name) for i, mainloop in enumerate(FILTERS) for name in [*TAILS][i % 2 :: 2]],
)
def test_tails(mainloop, name, device, monkeypatch):
    """A tail is the same text in each mainloop."""
    filters, size = FILTERS[mainloop][0]
    device(), only_through(mainloop, monkeypatch)
    assert_rule(random_model(filters, TAILS[name]), numerics.random_input((2, filters[1], *size)))


@pytest.mark.parametrize("mainloop", FILTERS)
def test_batch_norm_in_evaluation(mainloop, device, monkeypatch):
    """Its statistics are parameters like others; a reciprocal root is a channel's."""
    filters, size = FILTERS[mainloop][0]
    device(), only_through(mainloop, monkeypatch)
    model = random_model(filters, lambda m, v: F.relu(m.norm(v)), bias=False)
    assert_rule(model, numerics.random_input((3, filters[1], *size)))


def kinds_of(t: torch.Tensor) -> torch.Tensor:
    """Which are NaN, and which infinite, with their signs."""
    return torch.where(t.isnan(), 2, t.sgn() * t.isinf())


def assert_as_exact(model: nn.Module, x: torch.Tensor) -> None:
    """Each result by itself: of outliers an error in all others is small."""
    with torch.no_grad():
        ours, exact = run(model, x).double(), copy.deepcopy(model).double()(x.double())
        eager = model(x).double()
    assert torch.equal(kinds_of(ours), kinds_of(exact.to(x.dtype)))
    own = torch.where(x.isfinite(), x, 0).abs().double(), model.conv.weight.abs().double()
    terms = (torch.conv2d if x.dim() == 4 else torch.conv3d)(*own)  # of each sum, so much
    terms = terms + model.by_channel.abs() + model.conv.bias.abs().view_as(model.by_channel)
    finite = eager.isfinite() & exact.isfinite() & terms.isfinite()
    worst = ((ours - exact).abs() / terms)[finite].max()
    assert finite.any() and worst <= 2 * torch.finfo(x.dtype).eps, worst


OUTLIERS = {torch.float32: 1e30, torch.bfloat16: 1e30, torch.float16: 6e4}


@pytest.mark.parametrize("mainloop, filters, size, architecture, dtype", BUILDS, ids=str)
def test_sizes(mainloop, filters, size, architecture, dtype, device, monkeypatch):
    """And values that are not finite: an outlier's neighbours keep their digits; sample 0 has none, and is what the mainloop makes of it."""
    device(architecture), only_through(mainloop, monkeypatch)
    model = random_model(filters, TAILS["relu, bias"]).to(dtype)
    assert_rule(model, numerics.random_input((2, filters[1], *size), dtype=dtype))
    x = numerics.random_input((5, filters[1], *size), dtype=dtype)
    for n, value in enumerate([INF, float("nan"), -INF, OUTLIERS[dtype]], 1):
        x[(n, 0, *[extent // 2 for extent in size])] = value
        x[(n, -1, *[extent - 1 for extent in size])] = value
    assert kinds_of(model.conv(x)).unique().numel() == 4
    assert_as_exact(model, x)


@pytest.mark.parametrize("mainloop, filters, size, architecture, dtype", BUILDS[::2], ids=str)
def test_weights_and_parameters_that_are_not_finite(
    mainloop, filters, size, architecture, dtype, device, monkeypatch
):
    device(architecture), only_through(mainloop, monkeypatch)
    for value in (INF, -INF, float("nan"), OUTLIERS[dtype]):
        model = random_model(filters, TAILS["relu, bias"]).to(dtype)
        x = numerics.random_input((2, filters[1], *size), dtype=dtype)
        x[:, 0] = x[:, 0].relu()  # what an outlier is multiplied by may be zero
        with torch.no_grad():
            model.conv.weight[3, 0].view(-1)[-1] = value
            model.conv.bias[4] = value
            model.by_channel.view(-1)[5] = value
        assert_as_exact(model, x)


def of_11_bits(t: torch.Tensor) -> torch.Tensor:
    """Exact in TF32."""
    return t.half().float()


@pytest.mark.parametrize(
    "filters, size, samples, dtype",
    [
        ((130, 17, 1, 3), (9, 256), 3, torch.float32),  # bands of several rows of a sample, and of one
        ((128, 16, 2, 2), (15, 300), 2, torch.float16),  # three tiles
        ((70, 5, 3, 1), (8, 145), 1, torch.float32),  # the last tile is two sectors and an element
        ((40, 24, 1, 3), (11, 280), 2, torch.bfloat16),  # the two consumers have the same channels
        ((128, 3, 1, 1), (140, 151), 1, torch.float32),  # a block's rows are more than a band has
        (
            (128, 33, 2, 3),
            (6, 520),
            2,
            torch.float32,
        ),  # five tiles, the last of six columns: they aren't joined
    ],
    ids=str,
)
def test_tiles_that_share_sectors(filters, size, samples, dtype, device, monkeypatch):
    """A block joins them (store/rows.cuh); also in the pass for samples of another scale."""
    device(900), only_through("wide", monkeypatch)
    monkeypatch.setattr(precision, "runs_tf32", lambda *_, **__: True)
    model = random_model(filters, TAILS["relu, bias"]).to(dtype)
    model.conv.weight.data.copy_(of_11_bits(model.conv.weight))
    x = of_11_bits(numerics.random_input((samples, filters[1], *size))).to(dtype)
    x[-1] *= 2.0**-10 if dtype != torch.float16 else 1
    segment, arguments = given(model, x)
    (request,) = direct.requests(Case(segment, arguments, False, dtype))
    assert request["defines"]["JOINED"] == (size[1] != 520)
    assert_rule(model, x)


WINDOWS = {
    "largest": lambda m, v: F.max_pool2d(torch.tanh(v) * m.by_channel + m.scale, (3, 2)),
    "smallest": lambda m, v: -F.max_pool2d(-v, 4) / m.number,
    "a valley": lambda m, v: F.mish(F.max_pool2d(F.hardswish(v - m.number), 2)),
    "mean": lambda m, v: F.avg_pool2d(torch.tanh(v * m.scale) - m.number, (2, 3)) * m.by_channel,
    "and a sum": lambda m, v: torch.sigmoid(F.avg_pool2d(v, 2)).sum((1, 2, 3)),
}


@pytest.mark.parametrize("name", WINDOWS)
def test_windows(name, device):
    filters, size = [((16, 3, 3, 3), (12, 23)), ((70, 9, 1, 2), (9, 139))][[*WINDOWS].index(name) % 2]
    device(900 if filters[0] == 16 else 800)
    model, x = random_model(filters, WINDOWS[name]), numerics.random_input((2, filters[1], *size))
    assert_rule(model, x)
    x[1, 0, 3, 7], x[0, 1, 5, 5] = -INF, float("nan")
    assert torch.equal(kinds_of(run(model, x)), kinds_of(model(x).detach()))


@pytest.mark.parametrize("dtype", TYPES[1:], ids=str)
def test_windows_of_16_bits(dtype, device):
    device()
    model = random_model((16, 3, 3, 3), WINDOWS["mean"]).to(dtype)
    assert_rule(model, numerics.random_input((2, 3, 12, 23), dtype=dtype))


POOLED_BY_STREAM = {
    "largest": (
        (40, 24, 3, 2),
        {"padding": 1},
        (8, 13),
        lambda m, v: F.max_pool2d(torch.tanh(v) * m.by_channel, (3, 2)),
    ),
    "mean of a stride": (
        (24, 40, 2, 3),
        {"stride": 2},
        (13, 18),
        lambda m, v: F.avg_pool2d(F.relu(v) - m.number, 2) * m.by_channel,
    ),
    "volumes": (
        (70, 8, 2, 3, 1),
        {"padding": (0, 1, 0)},
        (6, 5, 7),
        lambda m, v: F.mish(F.max_pool3d(v / 2 + m.by_channel, 2)),
    ),
    "few channels": (
        (40, 6, 2, 3),
        {"padding": 1, "stride": 2},
        (9, 13),
        lambda m, v: F.max_pool2d(v.abs(), 2),
    ),
    "and a sum": ((40, 24, 1, 1), {}, (8, 9), lambda m, v: torch.sigmoid(F.avg_pool2d(v, 2)).sum((1, 2, 3))),
}


@pytest.mark.parametrize("name, dtype", list(zip(POOLED_BY_STREAM, [*TYPES, *TYPES])), ids=str)
def test_windows_by_stream(name, dtype, device, monkeypatch):
    filters, settings, size, tail = POOLED_BY_STREAM[name]
    device(900), only_through("stream", monkeypatch)
    model = random_model(filters, tail, **settings).to(dtype)
    x = numerics.random_input((3, filters[1], *size), dtype=dtype)
    assert_rule(model, x)
    x[1].view(-1)[30], x[0].view(-1)[7] = -INF, float("nan")
    assert torch.equal(kinds_of(run(model, x)), kinds_of(model(x).detach()))
    if x.dim() == 4 and "sum" not in name:
        last = x.contiguous(memory_format=torch.channels_last)
        assert torch.equal(kinds_of(run(model, last)), kinds_of(model(x).detach()))
        last[:, :, 0] = 0.0
        assert_rule(model, last.nan_to_num(0.0, 1.0, -1.0))


@pytest.mark.parametrize(
    "name, tail, dtype",
    [
        ("less its mean", lambda m, v: (p := F.avg_pool2d(v, 2)) - p.mean(1, keepdim=True), torch.float32),
        ("less its mean", lambda m, v: (p := F.avg_pool2d(v, 2)) - p.mean(1, keepdim=True), torch.bfloat16),
        ("a step", lambda m, v: F.relu(F.avg_pool2d(v, 2)), torch.float32),
        ("a step", lambda m, v: v + torch.exp(m.by_channel), torch.float32),
    ],
    ids=["float32", "bfloat16", "windows", "parameters"],
)
def test_x_channels_last_and_what_follows(name, tail, dtype, device, monkeypatch):
    """Passes behind a front read planes; what backward needs beside y is kept."""
    device(900), only_through("stream", monkeypatch)
    model = random_model((40, 24, 3, 3), tail, padding=1).to(dtype, memory_format=torch.channels_last)
    x = numerics.random_input((2, 24, 8, 8), dtype=dtype).contiguous(memory_format=torch.channels_last)
    found = []
    for each in (fuse(copy.deepcopy(model)), model):
        if name == "a step":
            y = each(x)
            found.append([y.detach(), *torch.autograd.grad(y.sum(), [*each.conv.parameters()])])
        else:
            with torch.no_grad():
                found.append([each(x)])
    few = 0.02 if dtype == torch.bfloat16 else 1e-5
    for ours, eagers in zip(*found):
        torch.testing.assert_close(ours, eagers, rtol=few, atol=few * float(eagers.detach().abs().max()))


def test_windows_for_the_next_convolution_are_rounded(device, monkeypatch):
    """Those that are computed again, too."""
    device(900), only_through("stream", monkeypatch)
    monkeypatch.setattr(precision, "runs_tf32", lambda *_, **__: True)
    model = random_model((40, 24, 3, 3), lambda m, v: F.max_pool2d(v.relu(), 2), padding=1)
    x = numerics.random_input((2, 24, 8, 8)).contiguous(memory_format=torch.channels_last)
    x[0, 0, 2, 3] = 1e30
    segment, arguments = given(model, x)
    case = Case(segment.with_result(between.OPERAND, False, (), True), arguments, False, x.dtype, last=True)
    y = direct.forward(direct.plan(case), arguments)[0]
    assert not (y.contiguous().view(torch.int32) & 0x1FFF).any()


def test_what_follows_windows_is_in_the_plan(device):
    device()
    segment, arguments = given(random_model((16, 3, 3, 3), WINDOWS["and a sum"]), torch.rand(2, 3, 12, 23))
    line = direct.describe(Case(segment, arguments, False, torch.float32))
    assert line == "narrow2d, the tail inside, v is never written, then sums (reads 6.4 KB, writes 0.3 KB)"


@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize(
    "filters, name, settings, dtype",
    [
        ((3, 72, 3, 3), "relu, bias", {"padding": 1}, torch.bfloat16),
        ((2, 17, 2, 3), "leaky, gelu", {"stride": 2, "dilation": 2}, torch.float32),
        ((5, 24, 1, 3, 2), "a channel's own", {"padding": (0, 1, 1)}, torch.float16),
    ],
    ids=str,
)
def test_a_channel_for_each_tap(filters, name, settings, dtype, last, device, monkeypatch):
    device(900), only_through("taps", monkeypatch)
    model = random_model(filters, TAILS[name], **settings).to(dtype)
    x = numerics.random_input((3, filters[1], *(4, 7, 9)[5 - len(filters) :]), dtype=dtype)
    if last:
        layout = torch.channels_last if x.dim() == 4 else torch.channels_last_3d
        model.conv.to(memory_format=layout)
        x = x.contiguous(memory_format=layout)
    assert_rule(model, x)
    y = run(model, x)
    assert y.is_contiguous(memory_format=layout if last else torch.contiguous_format)
    x[0, 0, ..., 2, 3] = INF
    assert torch.equal(kinds_of(run(model, x)), kinds_of(model(x).detach()))


def test_what_taps_leave(device, monkeypatch):
    device(900), only_through("taps", monkeypatch)
    for filters, says in [((15, 24, 3, 3), "up to 128"), ((3, 24, 1, 1), "more than one tap")]:
        model = random_model(filters, TAILS["relu, bias"])
        assert says in refused(model, numerics.random_input((2, 24, 7, 9)))
    monkeypatch.undo()
    for outputs, channels, says in ((3, 128, None), (14, 16, "stream is faster"), (3, 24, "the library")):
        sizes = (2, channels, 300, 300), (outputs, channels, 3, 3), 2 * 300 * 300, 2
        found = choice.taps_lose(costs.Shapes(*sizes, H200), costs.Streamed(packs=False, last=True))
        assert found is says or says in found


@pytest.mark.parametrize("mainloop", ["narrow2d", "narrow3d", "one_tap", "stream"])
def test_a_second_input(mainloop, device, monkeypatch):
    filters, size = FILTERS.get(mainloop, FILTERS["wide"])[1]
    device(900 if mainloop == "stream" else 800), only_through(mainloop, monkeypatch)
    model = random_model(filters, lambda m, v, other: F.relu(v + other) * m.by_channel)
    assert_rule(model, numerics.random_input((2, filters[1], *size)))


@pytest.mark.parametrize(
    "name, settings",
    list(
        zip(
            TAILS,
            [
                {"padding": 1},
                {"padding": "same"},
                {"stride": 2},
                {"dilation": 2},
                {"padding": (1, 2), "stride": (2, 1), "dilation": (1, 2)},
                {},
            ],
        )
    ),
    ids=str,
)
def test_stream(name, settings, device, monkeypatch):
    device(900), only_through("stream", monkeypatch)
    dtype = TYPES[1 + ("padding" in settings)]
    model = random_model((40, 24, 3, 2), TAILS[name], **settings).to(dtype)
    assert_rule(model, numerics.random_input((3, 24, 7, 9), dtype=dtype))


@pytest.mark.parametrize("filters_are_last", [False, True])
def test_stream_channels_last(filters_are_last, device, monkeypatch):
    """Operands as they lie, filters too, and y as eager's."""
    device(900), only_through("stream", monkeypatch)
    model = random_model((40, 24, 3, 2), TAILS["leaky, gelu"], padding=1).bfloat16()
    if filters_are_last:
        model.conv.to(memory_format=torch.channels_last)
    x = numerics.random_input((3, 24, 7, 9), dtype=torch.bfloat16).contiguous(
        memory_format=torch.channels_last
    )
    assert_rule(model, x)
    assert run(model, x).is_contiguous(memory_format=torch.channels_last)
    (request,) = direct.requests(Case(*given(model, x), False, x.dtype, last=True))
    assert request["defines"]["WEIGHT_LAST"] == filters_are_last
    case = Case(*given(model, x), False, x.dtype)  # as who reads planes asks
    y = direct.forward(direct.plan(case), case.arguments)[0]
    assert y.is_contiguous() and torch.equal(y, run(model, x))
    monkeypatch.setattr(precision, "runs_tf32", lambda *_, **__: True)
    model, x = model.float(), x.float()  # which is packed as it lies
    assert_rule(model, x)
    assert run(model, x).is_contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize(
    "filters, settings, dtype",
    [
        ((40, 8, 3, 2, 3), {}, torch.float16),
        (
            (24, 24, 2, 3, 1),
            {"padding": (1, 2, 0), "stride": (2, 1, 1), "dilation": (1, 1, 2)},
            torch.float32,
        ),
        ((70, 40, 1, 2, 2), {"padding": "same"}, torch.bfloat16),
    ],
    ids=str,
)
def test_stream_of_volumes(filters, settings, dtype, device, monkeypatch):
    device(900), only_through("stream", monkeypatch)
    model = random_model(filters, TAILS["leaky, gelu"], **settings).to(dtype)
    x = numerics.random_input((3, filters[1], 5, 4, 6), dtype=dtype)
    assert_rule(model, x)
    if filters[1] % 16 == 8 and dtype != torch.float32:
        assert_rule(model, x.contiguous(memory_format=torch.channels_last_3d))


@pytest.fixture
def by_views(device, monkeypatch):  # noqa: F811
    """stream takes views of patches wherever it can."""
    device(900), only_through("stream", monkeypatch)
    monkeypatch.setattr(costs, "stream_views", lambda *_: 0.0)


@pytest.mark.parametrize(
    "filters, size, settings, dtype",
    [
        ((40, 8, 3, 2, 3), (5, 4, 6), {}, torch.float16),
        ((70, 40, 1, 2, 2), (5, 4, 6), {"padding": "same"}, torch.bfloat16),
        ((24, 24, 3, 2), (7, 40), {"padding": (1, 2), "dilation": (1, 2)}, torch.float32),
        ((80, 3, 3, 3), (9, 70), {}, torch.float32),
    ],
    ids=str,
)
def test_stream_by_views(filters, size, settings, dtype, by_views):
    model = random_model(filters, TAILS["leaky, gelu"], **settings).to(dtype)
    x = numerics.random_input((3, filters[1], *size), dtype=dtype)
    assert_rule(model, x)
    (request,) = direct.requests(Case(*given(model, x), False, x.dtype))
    assert request["defines"]["FOLDED"] == costs.VIEWS


def test_views_with_a_second_input(by_views):
    """Which the tail reads where its result lies."""
    model = random_model((24, 8, 3, 3), lambda m, v, other: F.relu(v + other) * m.by_channel)
    assert_rule(model, numerics.random_input((2, 8, 9, 34)))


@pytest.mark.parametrize("last", [False, True])
def test_what_views_have_room_for(last, device, by_views, monkeypatch):
    """Python plans as the kernel does: the last size that it lets pass runs, and no larger one would."""
    known = tiling.device_properties(0)._replace(shared=100 << 10)
    monkeypatch.setattr(tiling, "device_properties", lambda *_: known)
    walk = jobs.Walk((1, 1), (0, 0), (0, 0), (1, 1))

    def fits(columns: int) -> bool:
        return tiling.views((1, 16, 4, columns), (24, 16, 3, 2), walk, False, known) is not None

    columns = max(each for each in range(4, 2000) if fits(each)) + (not last)
    model = random_model((24, 16, 3, 2), TAILS["leaky, gelu"])
    x = numerics.random_input((1, 16, 4, columns))
    monkeypatch.setattr(tiling, "views", lambda *_: tiling.Views(1, 1, 16, 4))
    monkeypatch.setattr(precision, "runs_tf32", lambda *_, **__: True)
    if last:
        assert run(model, x).isfinite().all()
        return
    with pytest.raises(AssertionError, match="a patch of which shared memory has room"):
        run(model, x)


@pytest.mark.parametrize("size", [(8, 11), (5, 4, 6)], ids=str)
@pytest.mark.parametrize("dtype", TYPES[1:], ids=str)
def test_planes_as_they_lie(dtype, size, device, monkeypatch):
    """Of a filter of one tap, in 16 bits, where they begin at multiples of 16 bytes."""
    device(900), only_through("stream", monkeypatch)
    monkeypatch.setattr(tiling, "views", lambda *_: None)  # which are faster at such sizes
    model = random_model((40, 136, *[1] * len(size)), TAILS["a channel's own"]).to(dtype)
    for more in (0, 1):
        x = numerics.random_input((3, 136, *size[:-1], size[-1] + more), dtype=dtype)
        segment, arguments = given(model, x)
        says = direct.describe(Case(segment, arguments, False, dtype))
        assert ("planes as they lie" in says) == (x[0, 0].numel() % 8 == 0)
        assert_rule(model, x)


def test_stream_in_tf32(device, monkeypatch):
    device(900), only_through("stream", monkeypatch)
    monkeypatch.setattr(precision, "runs_tf32", lambda *_, **__: True)
    model = random_model((40, 24, 3, 2), TAILS["tanh, sigmoid"], stride=2, padding=1)
    x = numerics.random_input((3, 24, 7, 9))
    x[1, 3, 2, 2] = 1e30
    ours, exact = run(model, x), copy.deepcopy(model).double()(x.double())
    torch.testing.assert_close(ours.double(), exact, rtol=0, atol=2e-2)


def record_of_stream():
    """(image, filters, positions of all results, bytes of a value, microseconds) of the recorded sizes."""
    rows = json.loads(
        (Path(__file__).resolve().parent.parent / "benchmarks/results/trials/stream.json").read_text()
    )["rows"]
    for row in rows:
        N, channels, C, extent, filter, stride, padding, dilation = [*row.values()][:8]
        to = (extent + 2 * padding - dilation * (filter - 1) - 1) // stride + 1
        for dtype, itemsize in (("bfloat16", 2), ("float32", 4)):
            image, filters = (N, channels, extent, extent), (C, channels, filter, filter)
            yield costs.Shapes(image, filters, N * to * to, itemsize, H200), row[dtype]


def test_stream_s_columns():
    """They are the fastest of those recorded, or nearly."""
    for sizes, times in record_of_stream():
        columns, *_ = costs.stream_tile(sizes, costs.Streamed())
        best = min(time for name, time in times.items() if name in ("256x2", "192x2", "128x2"))
        assert times[f"{columns}x2"] <= 1.04 * best, sizes


def test_stream_s_expected_times():
    """Whole calls' are recorded. With 64 channels in or out others ran, too; 16 bits in planes were packed in another way."""
    results = Path(__file__).resolve().parent.parent / "benchmarks/results"
    record = results / "sizes/2026-11-30-h200-alone-units.json"
    errors = []
    for row in json.loads(record.read_text())["rows"]:
        last = row["layout"] == "channels_last"
        if min(row["channels_in"], row["channels_out"]) <= 64 or not (last or row["dtype"] == "tf32"):
            continue
        n, c, o, k, stride, padding, dilation, image = [
            row[name]
            for name in "batch channels_in channels_out filter stride padding dilation image".split()
        ]
        extents = [(e + 2 * padding - dilation * (k - 1) - 1) // stride + 1 for e in image]
        itemsize, filters = 4 if row["dtype"] == "tf32" else 2, (o, c, *[k] * len(image))
        shapes = costs.Shapes((n, c, *image), filters, n * math.prod(extents), itemsize, H200)
        packs = not last or itemsize == 4 or c % 8 > 0
        how = costs.Streamed(packs, alone=True, shared=True, last=last, dilation=dilation)
        expected = costs.stream_microseconds(shapes, how)
        errors.append(math.log(expected / row["times"]["ours"][0] / 1000))
    assert len(errors) > 40 and max(map(abs, errors)) < math.log(1.35)
    assert statistics.fmean(map(abs, errors)) < math.log(1.08)


def test_where_stream_is_taken():
    """Surely where it was faster without what a pass costs; never where it took longer than the library's and a pass."""
    for sizes, times in record_of_stream():
        fastest = min(time for name, time in times.items() if name in ("256x2", "192x2", "128x2"))
        packing = sum(times["kernels"].values()) - times["kernels"]["products"]
        v = sizes.positions * sizes.filters[0] * sizes.itemsize
        theirs = times["library"] + 2 * v / costs.PASS_BYTES
        halves = sizes.itemsize == 2
        loses = choice.stream_loses(sizes, costs.Streamed(packs=not halves, last=halves))
        assert loses is None or fastest > 0.8 * theirs, sizes
        assert loses or fastest - packing < theirs, sizes


def test_what_stream_leaves(device, monkeypatch):
    device(900), only_through("stream", monkeypatch)
    for filters, dtype, settings, says in [
        ((40, 24, 3, 3), torch.float16, {"stride": 9}, "strides go to 8"),
        ((40, 24, 3, 3), torch.float16, {"padding": 128}, "offsets to 127"),
        ((40, 24, 3, 1, 3), torch.float16, {"padding": 16}, "offsets to 15"),
    ]:
        model = random_model(filters, TAILS["relu, bias"], **settings).to(dtype)
        size = (7, 8, 9)[5 - len(filters) :]
        assert says in refused(model, torch.randn(2, filters[1], *size, dtype=dtype))
    device(800)
    assert "meet 65 places" in refused(
        random_model((24, 3, 31, 33), TAILS["relu, bias"]), torch.randn(2, 3, 40, 40)
    )


def test_a_number_is_the_call_s(device):
    """A model's number isn't in the text."""
    device()
    model = random_model((16, 3, 3, 3), TAILS["leaky, gelu"])
    sources = []
    for number in (0.3, -1.7):
        model.number = number
        x = numerics.random_input((1, 3, 6, 9))
        assert_rule(model, x)
        segment, arguments = given(model, x)
        sources.append(direct.requests(Case(segment, arguments, False, x.dtype))[0]["source"])
    assert sources[0] == sources[1]


def test_names_that_the_text_has_itself(device):
    device()
    model = random_model((16, 3, 3, 3), lambda m, v: v * m.v + m.at * m.tail_ - m.auto)
    for name in ("v", "at", "auto", "tail_"):
        setattr(model, name, nn.Parameter(torch.randn(16, 1, 1)))
    assert_rule(model, numerics.random_input((2, 3, 6, 9)))


@pytest.mark.parametrize("mainloop", ["narrow2d", "narrow3d", "one_tap"])
def test_result_in_another_dtype(mainloop, device, monkeypatch):
    """As autocast has them."""
    filters, size = FILTERS[mainloop][0]
    device()
    model = random_model(filters, TAILS["relu, bias"])
    x, low = numerics.random_input((2, filters[1], *size)).half(), copy.deepcopy(model).half()
    y = run(low, x, dtype=torch.float32)
    assert y.dtype == torch.float32
    torch.testing.assert_close(y.double(), low.double()(x.double()).detach(), rtol=1e-5, atol=1e-5)


# ------------------------------------------------------------------------------------------------------------------ training


KEPT = {
    "v": (TAILS["leaky, gelu"], "v is stored beside"),
    "a mask": (lambda m, v: F.leaky_relu(v / m.number) + m.by_channel, "v is never written"),
    "an input": (lambda m, v, other: F.mish(v + other) * m.scale, "v is stored beside"),
}


@pytest.mark.parametrize(
    "name, filters, size",
    [
        ("v", (40, 24, 2, 3, 2), (4, 5, 7)),
        ("v", (24, 5, 2, 3), (6, 34)),
        ("a mask", (32, 2, 1, 2, 2), (4, 7, 9)),
        ("an input", (24, 5, 2, 3), (6, 34)),
        ("an input", (40, 24, 2, 3, 2), (4, 5, 7)),
        ("v", (40, 24, 3, 3), (8, 21)),
        ("a mask", (130, 17, 1, 2), (3, 67)),
        ("v", (20, 3, 1, 1), (5, 21)),
        ("a mask", (33, 17, 1, 1, 1), (3, 5, 67)),
        ("an input", (33, 17, 1, 1), (25, 26)),
    ],
    ids=str,
)
def test_backward(filters, size, name, device):
    """From what forward stored, and from parameters as they were: load's gradients, the library's for the convolution."""
    device(900)  # there rows of two results in float32 have room
    model, x = random_model(filters, KEPT[name][0]), numerics.random_input((2, filters[1], *size))
    assert_gradients(model, x, *saved_by(model, x, KEPT[name][1]))


@pytest.mark.parametrize(
    "name, filters, size",
    [
        ("v", (40, 24, 3, 3), (8, 21)),
        ("a mask", (128, 16, 3, 1), (9, 45)),  # rows that run on
        ("v", (130, 17, 1, 3), (9, 256)),  # tiles are joined, of both results
        ("a mask", (70, 5, 2, 2), (7, 300)),  # of those that are no bytes
    ],
    ids=str,
)
def test_two_results_by_wgmma(filters, size, name, device, monkeypatch):
    device(900), only_through("wide", monkeypatch)
    model = random_model(filters, KEPT[name][0])
    model.conv.weight.data.copy_(of_11_bits(model.conv.weight))
    x = of_11_bits(numerics.random_input((3, filters[1], *size)))
    x[-1] *= 2.0**-10  # another pass finds that sample's scale
    monkeypatch.setattr(precision, "runs_tf32", lambda *_, **__: True)
    case, _, (y, *kept) = saved_by(model, x, KEPT[name][1])
    expected, *theirs = schedule.forward(schedule.plan(case), case.arguments)
    for ours, values in zip((y, *kept), (expected, *theirs), strict=True):
        if ours.dtype != torch.float64:  # copies of parameters, with room between them
            torch.testing.assert_close(ours, values, rtol=1e-5, atol=1e-5)


def saved_by(model, x, says):
    """The case, its plan and what forward gives, of which the first one is y."""
    segment, arguments = given(model, x)
    case = Case(segment, arguments, True, x.dtype)
    assert says in direct.describe(case)
    plan = direct.plan(case)
    return case, plan, direct.forward(plan, [a.clone() if torch.is_tensor(a) else a for a in arguments])


def assert_gradients(model, x, case, plan, found):
    y, *saved = found
    segment, arguments = case.segment, case.arguments
    kept = direct.saved(case)
    assert [(list(t.shape), t.dtype) for t in saved] == [([*shape], dtype) for shape, dtype, _ in kept]

    exact = copy.deepcopy(model).double()
    leaves = [t.double().requires_grad_() for t in (x, *model.beside(x))]
    result, dy = exact.tail(exact, exact.conv(leaves[0]), *leaves[1:]), torch.randn_like(y)
    names = list(segment.parameters)
    expected = torch.autograd.grad(result, [*leaves, *[exact.get_parameter(n) for n in names]], dy.double())
    found = direct.backward(plan, dy, arguments, saved, [True] * len(arguments))
    torch.testing.assert_close(y.double(), result.detach(), rtol=1e-5, atol=1e-5)
    for ours, theirs in zip(found, expected):
        torch.testing.assert_close(ours.double(), theirs.view_as(ours), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("mainloop", ["narrow2d", "narrow3d", "one_tap", "stream", "wide"])
def test_a_relu_in_16_bits(mainloop, device, monkeypatch):
    """Nothing is kept but y, which is there anyway, and of which backward has the mask."""
    device(900), only_through(mainloop, monkeypatch)
    filters, size = FILTERS.get(mainloop, FILTERS["wide"])[1]
    model = random_model(filters, lambda m, v: F.relu(v + m.by_channel)).to(torch.bfloat16)
    x = numerics.random_input((2, filters[1], *size)).to(torch.bfloat16)
    case, plan, found = saved_by(model, x, "v is never written")
    assert len(found) == 1 and direct.saved(case) == [] and direct.reads_y(case)
    assert_rule(model, x)
    (y,) = found
    torch.testing.assert_close(y, run(model, x), rtol=0, atol=0)
    dy = torch.randn_like(y)
    dx, dw, *_ = direct.backward(plan, dy, case.arguments, [y], [True] * len(case.arguments))
    settings = model.conv.stride, model.conv.padding, model.conv.dilation, False, [0] * len(size), 1
    given = dy * (y > 0), x, model.conv.weight, None, *settings, [True, True, False]
    expected = torch.ops.aten.convolution_backward(*given)
    for ours, theirs in zip((dx, dw), expected):
        torch.testing.assert_close(ours, theirs, rtol=0.02, atol=0.02)


@pytest.mark.parametrize("channels, stride", [(3, 2), (8, 1), (20, 1)])
def test_a_relu_in_16_bits_channels_last(channels, stride, device, monkeypatch):
    """So are its gradient, and that of the convolution."""
    device(900), only_through("stream", monkeypatch)
    model = random_model((24, channels, 3, 3), lambda m, v: F.relu(v), padding=1, stride=stride)
    model = model.to(torch.bfloat16, memory_format=torch.channels_last)
    x = numerics.random_input((3, channels, 9, 8)).to(torch.bfloat16, memory_format=torch.channels_last)
    segment, arguments = given(model, x)
    case = Case(segment, arguments, True, x.dtype, last=True)
    plan = direct.plan(case)
    (y,) = direct.forward(plan, arguments)
    assert y.is_contiguous(memory_format=torch.channels_last) and plan.back.last
    torch.testing.assert_close(y, model(x), rtol=0.02, atol=0.02)
    dy = torch.randn_like(y)
    dx, dw, *_ = direct.backward(plan, dy, arguments, [y], [True] * len(arguments))
    settings = model.conv.stride, model.conv.padding, model.conv.dilation, False, [0, 0], 1
    given_all = dy * (y > 0), x, model.conv.weight, None, *settings, [True, True, False]
    for ours, theirs in zip((dx, dw), torch.ops.aten.convolution_backward(*given_all)):
        torch.testing.assert_close(ours, theirs, rtol=0.02, atol=0.02)


@pytest.mark.parametrize("name, size", [("v", (4, 5, 7)), ("an input", (4, 5, 7)), ("a mask", (4, 6, 7))])
def test_backward_behind_views(name, size, device, by_views):
    """Bytes go by words of four, but where a row's padding is among those (of that size words of all samples begin at multiples of four)."""
    test_backward((40, 24, 2, 3, 2), size, name, device)


# -------------------------------------------------------------------------------------------------------- what is left to load


def refused(model, x, saving=False):
    segment, arguments = given(model, x)
    with pytest.raises(direct.Unsupported) as raised:
        direct.plan(Case(segment, arguments, saving, x.dtype))
    return str(raised.value)


@pytest.mark.parametrize(
    "tail, reason",
    [
        (lambda m, v: F.relu(F.group_norm(v, 4)), "isn't pointwise"),
        (lambda m, v: torch.softmax(v, 1), "isn't pointwise"),
        (lambda m, v: v - v.mean((2, 3), keepdim=True), "isn't pointwise"),
        (lambda m, v: F.max_pool2d(F.relu(v), 9), "2 to 8 rows"),
        (lambda m, v: F.max_pool2d(F.relu(v), 3, 2), "side by side"),
        (lambda m, v: F.max_pool2d(v, 2) + F.avg_pool2d(v, 2), "v's shape"),
        (lambda m, v: F.relu(v).mean((2, 3)), "v's shape"),
        (lambda m, v: v.amin(1, keepdim=True).tanh(), "v's shape"),
    ],
)
def test_tails_that_are_not_pointwise(tail, reason, device):
    device()
    assert reason in refused(random_model((16, 3, 3, 3), tail), torch.randn(2, 3, 11, 12))


@pytest.mark.parametrize("padding", [1, (2, 0, 1), "same"], ids=str)
@pytest.mark.parametrize("mainloop", ["narrow2d", "narrow3d"])
def test_zeros_around_an_image(mainloop, padding, device, monkeypatch):
    """A mainloop that doesn't walk takes a copy with them; of a filter of one tap "same" adds none."""
    device(900), only_through(mainloop, monkeypatch)
    filters, size = FILTERS[mainloop][1]
    nd = len(size)
    padding = padding[:nd] if isinstance(padding, tuple) else padding
    dtype = torch.bfloat16 if padding == 1 else torch.float32
    for own in (filters, (*filters[:2], *[1] * nd)):
        model = random_model(own, TAILS["tanh, sigmoid"], padding=padding).to(dtype)
        x = numerics.random_input((2, filters[1], *size)).to(dtype)
        assert_rule(model, x)  # by this mainloop, or by none
    pooled = random_model(filters, WINDOWS["largest"], padding=padding)
    if mainloop == "narrow2d":
        assert_rule(pooled, numerics.random_input((2, filters[1], *size)))


def test_another_mode_that_pads_nothing(device, monkeypatch):
    device(900), only_through("narrow2d", monkeypatch)
    x = numerics.random_input((1, 3, 6, 9))
    assert_rule(random_model((16, 3, 3, 3), TAILS["relu, bias"], padding_mode="circular"), x)
    circular = random_model((16, 3, 3, 3), TAILS["relu, bias"], padding_mode="circular", padding=1)
    assert "other values than zeros" in refused(circular, x)


def test_more_columns_by_zeros_around(device, monkeypatch):
    """A row of 127, which has two tiles with them."""
    device(900), only_through("narrow2d", monkeypatch)
    assert_rule(
        random_model((16, 3, 1, 2), TAILS["relu, bias"], padding=1), numerics.random_input((1, 3, 2, 127))
    )


@pytest.mark.parametrize("settings", [{"stride": 2}, {"dilation": 2}, {"groups": 2}], ids=str)
def test_convolutions_that_are_not_plain(settings, device, monkeypatch):
    device(), only_through("narrow2d", monkeypatch)
    filters = (16, 4, 3, 3)
    reason = refused(random_model(filters, TAILS["relu, bias"], **settings), torch.randn(2, 4, 12, 13))
    assert ("groups" if "groups" in settings else "stride or dilation") in reason


def test_training_and_statistics(device):
    device()
    model, x = random_model((16, 3, 3, 3), lambda m, v: F.relu(m.norm(v))), torch.randn(2, 3, 8, 9)
    assert "rounds it" in refused(copy.deepcopy(model).half(), x.half(), saving=True)
    pooled = random_model((16, 3, 3, 3), WINDOWS["mean"])
    assert "backward needs v" in refused(pooled, x, saving=True)
    assert "statistics" in refused(model.train(), x)


def test_few_results(device, monkeypatch):
    device()
    model, x = random_model((16, 3, 3, 3), TAILS["relu, bias"]), torch.randn(2, 3, 8, 9)
    monkeypatch.setattr(direct, "FEWEST_RESULTS", 2 * 16 * 6 * 7)
    run(model, x)
    monkeypatch.setattr(direct, "FEWEST_RESULTS", 2 * 16 * 6 * 7 + 1)
    assert "pays from" in refused(model, x)


def test_on_a_cpu():
    assert "GPU" in refused(random_model((16, 3, 3, 3), TAILS["relu, bias"]), torch.randn(2, 3, 80, 90))


@pytest.mark.parametrize(
    "filters, size, says",
    [
        ((136, 17, 1, 2), (9, 9), "16 channels in"),  # and wide isn't faster by the rule that is set
        ((16, 3, 1, 10), (9, 19), "registers"),
        ((16, 16, 5, 5), (9, 19), "registers"),
        ((16, 5, 3, 3, 3), (5, 9, 9), "4 channels in"),
        ((33, 120, 1, 1), (9, 9), "4096 products"),  # of 36 channels out
    ],
)
def test_sizes_that_no_mainloop_takes(filters, size, says, device, monkeypatch):
    device()
    monkeypatch.setitem(composed.known()["wide"]["faster"], "forward", ["columns", 1000, "epilogue", "fused"])
    monkeypatch.setattr(choice, "stream_loses", lambda *_: "slower")
    assert says in refused(random_model(filters, TAILS["relu, bias"]), torch.randn(2, filters[1], *size))


@pytest.mark.parametrize(
    "filters, name, settings, size, dtype",
    [
        ((40, 24, 3, 3), "relu, bias", {"padding": 1, "stride": 2}, (9, 11), torch.float32),
        ((136, 40, 3, 1), "leaky, gelu", {"dilation": 2}, (9, 11), torch.float16),
        ((24, 8, 3, 2, 3), "a channel's own", {"padding": 1}, (5, 6, 7), torch.float32),
        ((3, 72, 3, 3), "relu, bias", {"padding": 1}, (9, 11), torch.bfloat16),
    ],
    ids=str,
)
def test_stream_from_capability_8(filters, name, settings, size, dtype, device):
    """By mma.sync."""
    device(800)
    model = random_model(filters, TAILS[name], **settings).to(dtype)
    x = numerics.random_input((3, filters[1], *size), dtype=dtype)
    case = Case(*given(model, x), False, dtype)
    (request,) = direct.requests(case)
    assert request["defines"]["CAPABILITY"] == 80 and request["defines"].get("FOLDED") != costs.VIEWS
    assert direct.describe(case).startswith("taps" if filters[0] == 3 else "stream")
    assert_rule(model, x)


def test_times_by_mma_sync():
    """Half of an H200's tensor cores take no longer than they are said to; a quarter, twice as long."""
    how = costs.Streamed(shared=True)

    def tile(positions: int, capability: tuple) -> costs.StreamTile:
        filters, device = (256, 256, 3, 3), H200._replace(capability=capability)
        return costs.stream_tile(costs.Shapes((), filters, positions, 2, device), how)

    times = [tile(1 << 17, capability).microseconds for capability in ((9, 0), (8, 0), (8, 6))]
    start = costs.GATHERED_TILES[0]
    assert times[0] < times[1] and 1.6 * (times[1] - start) < times[2] - start < 2 * (times[1] - start)
    assert tile(1 << 9, (8, 0)).shares > 1


def test_a_filter_that_fits_only_in_much_shared_memory(device, monkeypatch):
    """That tiling's bytes are the kernel's is asserted where it is compiled."""
    device()
    model, x = random_model((16, 3, 17, 1), TAILS["relu, bias"]), torch.randn(1, 3, 20, 9)
    needed = tiling.rows_shared(model.conv.weight, 1, 4) + (1 << 10)
    for shared in (needed, needed - 1):
        monkeypatch.setattr(tiling, "device_properties", lambda index: tiling.Device((8, 0), shared, 4))
        shared_memory = tiling.rows_shared(model.conv.weight, 1, 4)
        assert (tiling.rows_obstacle(x, model.conv.weight, shared_memory) is None) == (shared == needed)


# --------------------------------------------------------------------------------------------------------- KernelBench's sizes

BY_NUMBER = {
    65: "narrow2d",
    82: "narrow2d",
    57: "narrow2d",
    69: "narrow2d",
    71: "narrow2d",
    87: "narrow2d",
    48: "narrow3d",
}
BY_NUMBER |= {1: "wide", 54: "wide"} | dict.fromkeys((7, 47, 90), "stream by views of patches")


@pytest.fixture
def h200(gpu, monkeypatch):  # noqa: F811
    """… and its cuDNN says where eager runs TF32."""
    gpu(architecture=900, multiprocessors=132)
    monkeypatch.setattr(
        precision, "runs_tf32", lambda x, *_, **__: x.shape[1] % (16 if x.dim() == 4 else 4) == 0
    )


def full_size(number: int):
    problem = level2.PROBLEMS[number]
    model = problem.model()
    segment = segment_of(
        model, torch.empty(problem.small_input_shape[:1] + problem.input_shape[1:], device="meta")
    )
    x = torch.empty(problem.input_shape, device="meta")
    arguments = arguments_of(model, segment, x)
    arguments[0] = Standing(x, arguments[1].device)
    return segment, arguments


@pytest.mark.parametrize(
    "filters, image, padding, runs",
    [
        ((128, 64, 3, 3), (128, 128, 128), 0, "stream"),
        ((256, 256, 3, 3), (1, 256, 256), 0, "stream"),
        ((256, 256, 3, 3), (128, 28, 28), 1, "stream"),
        ((1280, 1280, 3, 3), (8, 16, 16), 1, "faster at such sizes"),
    ],
    ids=str,
)
def test_many_channels_at_full_sizes(filters, image, padding, runs, gpu):  # noqa: F811
    """What the records say."""
    gpu(architecture=900, multiprocessors=132)
    N, *size = image
    model = random_model(filters, TAILS["relu, bias"], padding=padding).bfloat16()
    x = torch.empty(N, filters[1], *size, device="meta", dtype=torch.bfloat16)
    segment = segment_of(model, x)
    arguments = arguments_of(model, segment, x)
    arguments[0] = Standing(x.contiguous(memory_format=torch.channels_last), arguments[1].device)
    try:
        found = direct.describe(Case(segment, arguments, False, torch.bfloat16))
    except direct.Unsupported as error:
        found = str(error)
    assert runs in found.split(", the tail")[0]


@pytest.mark.parametrize("number", level2.PROBLEMS)
def test_problems_at_their_full_sizes(number, h200):
    segment, arguments = full_size(number)
    if number in BY_NUMBER:
        line = direct.describe(Case(segment, arguments, False, torch.float32))
        assert line.startswith(f"{BY_NUMBER[number]}, the tail inside, v is never written")
    elif number != 31:  # its mainloop's own problem, as pointwise as they
        with pytest.raises(direct.Unsupported):
            direct.describe(Case(segment, arguments, False, torch.float32))


# Of pointwise tails, with gradients: which are computed inside, and which behind v.
INSIDE, BEHIND = (1, 57, 69, 71), (4, 7, 47, 48, 54, 87, 90)


@pytest.mark.parametrize("number", [*INSIDE, *BEHIND])
def test_what_a_tail_costs_inside(number, gpu, monkeypatch):  # noqa: F811
    """Beside v that is stored anyway, little; beside a mask much; two mish take longer than a pass over v in any case."""
    gpu(architecture=900, multiprocessors=132)
    if number in (1, 4, 47, 54):
        monkeypatch.setattr(precision, "runs_tf32", lambda *_, **__: True)
    case = Case(*full_size(number), True, torch.float32)
    if number in INSIDE:
        assert ", the tail inside, v is " in direct.describe(case)
        return
    with pytest.raises(direct.Unsupported, match=mainloops.SLOWER_INSIDE):
        direct.describe(case)
    assert " writes v, then y (" in stored.describe(case)


def test_two_mish_are_behind_v_without_gradients_too(gpu, monkeypatch):  # noqa: F811
    gpu(architecture=900, multiprocessors=132)
    monkeypatch.setattr(precision, "runs_tf32", lambda *_, **__: True)
    case = Case(*full_size(4), False, torch.float32)
    for by in (direct, sinks):
        with pytest.raises(direct.Unsupported, match=mainloops.SLOWER_INSIDE):
            by.describe(case)
    assert stored.describe(case).startswith("wide writes v, then y (")
    assert direct.describe(Case(*full_size(54), False, torch.float32)).startswith("wide, the tail inside")


@needs_nvcc
@pytest.mark.parametrize(
    "number, architecture",
    [(65, "80"), (82, "90a"), (48, "80"), (1, "80"), (54, "90a"), (7, "90a")],
)
def test_registers_spilled(number, architecture, gpu, tmp_path):  # noqa: F811
    """Few, if any, by each mainloop on each architecture that it is for."""
    gpu(architecture=900, multiprocessors=132)
    segment, arguments = full_size(number)
    (request,) = direct.requests(Case(segment, arguments, False, torch.float32))
    path = tmp_path / "tail.cu"
    path.write_text(request["source"])
    older = {"CAPABILITY": 80, "SHARED_LIMIT": 163 << 10} if architecture == "80" else {}
    defines = [f"{k}={v}" for k, v in (request["defines"] | older).items()]
    done = nvcc(path, architecture, defines, tmp_path / architecture)
    assert done.returncode == 0, done.stderr
    found = [int(each) for each in re.findall(r"(\d+) bytes spill stores", done.stderr)]
    assert found and max(found) <= 32, found


# ------------------------------------------------------------------------------------------------------------------ on a GPU


@pytest.mark.gpu
@numerics.steady_library()
@pytest.mark.parametrize("dtype", TYPES[1:], ids=str)
@pytest.mark.parametrize("width", [136, 254, 256])
def test_tiles_of_unlike_lengths(width, dtype, monkeypatch):
    """Were a thread's part of a row a matter of the row's length, as it once was, a thread that is ahead would copy the first row of a
    strip of another length over words of the last strip's that another thread has yet to convert: errors of 0.1, now and then."""
    only_through("wide", monkeypatch)
    monkeypatch.setitem(composed.known()["wide"]["faster"], "forward", "fused")
    model = random_model((128, 64, 3, 3), TAILS["relu, bias"]).to("cuda", dtype)
    x = torch.randn(64, 64, 132, width, device="cuda", dtype=dtype)
    with torch.no_grad():
        expected = copy.deepcopy(model).float()(x.float())
    segment, arguments = given(model, x)
    plan = direct.plan(Case(segment, arguments, False, dtype))
    for _ in range(5):
        y = direct.forward(plan, arguments)[0].float()
        torch.testing.assert_close(y, expected, rtol=torch.finfo(dtype).eps / 2, atol=1e-3)


@pytest.mark.gpu
@numerics.steady_library()
@pytest.mark.parametrize("width", [130, 131, 256, 258, 383, 514, 600])
def test_rows_of_several_tiles(width):
    """A block has rows of up to 512 columns of v; longer ones are cut among blocks."""
    model = random_model((64, 8, 3, 3), TAILS["relu, bias"]).cuda()
    fast, x = fuse(copy.deepcopy(model)), torch.randn(4, 8, 64, width, device="cuda")
    with torch.no_grad():
        (plan,) = fast.plan(x)
        assert plan.runs == "direct" and plan.reason.startswith("narrow2d, "), plan
        exact, eager, ours = copy.deepcopy(model).double()(x.double()), model(x), fast(x)
    error = checks.judged("", "output", exact, eager, ours, x.dtype)
    assert error.share <= 1, error
