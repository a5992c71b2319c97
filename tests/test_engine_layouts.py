"""The schedule `load` where arrays lie channels last, all of them or y alone, are turned on the way, or are rounded for TF32: generated kernels against
float64, in the emulation of a GPU and on a CPU (generated.py)."""

from __future__ import annotations

import functools
import itertools
import re

import pytest
import torch
from torch import nn

from generated import (  # noqa: F401
    INF,
    NAN,
    Gated,
    InFront,
    OfInFront,
    Run,
    arguments_of,
    assert_rule,
    attribute,
    device,
    reference,
    segment_of,
)
from inline_kernels.bench import checks
from inline_kernels.engine import between, costs, layouts, library, load_plan, schedule, source
from inline_kernels.engine.capture import capture
from inline_kernels.engine.cases import CTYPES, Case
from test_emulated import Emulated, folder, guarded, library_of, pytestmark  # noqa: F401


class Turned(nn.Module):
    """Tails of each kind: whose passes take v channels last, in one pass or two, and whose passes don't."""

    def __init__(self, tail: str, channels: int = 40):
        super().__init__()
        self.conv, self.tail = nn.Conv2d(3, channels, (3, 2), stride=(1, 2), padding=1), tail
        self.norm, self.p = nn.GroupNorm(4, channels), nn.Parameter(torch.randn(channels, 1, 1))

    def forward(self, x):
        x = self.conv(x)
        if self.tail == "gates":  # masks are kept, v is not
            return torch.clamp(x + self.p, -0.5, 0.5) * self.p
        if self.tail == "norm":
            return torch.tanh(self.norm(x) * self.p)
        if self.tail == "pool":
            return torch.nn.functional.max_pool2d(torch.relu(x * self.p), 2)
        if self.tail == "stem":
            return torch.nn.functional.max_pool2d(torch.relu(self.norm(x) * self.p), 3, 2, 1)
        return torch.logsumexp(torch.nn.functional.gelu(x), dim=1)


@pytest.mark.parametrize("shape", [(2, 3, 11, 30), (3, 3, 21, 13)], ids=["in fours", "odd"])
@pytest.mark.parametrize(
    "tail, dtype",
    [
        *((tail, torch.float32) for tail in ("gates", "norm", "pool", "stem", "channels")),
        ("norm", torch.bfloat16),
    ],
    ids=str,
)
def test_channels_last(tail, dtype, shape, monkeypatch, device):
    """Where the library convolves channels last, passes turn v and its gradient; all is as in planes."""
    if device == "cpu":
        pytest.skip("a GPU's way")
    monkeypatch.setattr(layouts, "fastest", lambda *given: layouts.TURNED)
    torch.manual_seed(0)
    model = Turned(tail).to(dtype)
    run = assert_rule(model, torch.randn(shape).to(dtype), label=tail)
    assert bool(run.plan.composed.backward.turned) and not run.plan.composed.forward.turned == (
        tail == "gates"
    )
    with torch.no_grad():
        x = torch.randn(shape).to(dtype)
        assert_rule(model, x, backward=False, label=tail)
        plan = Run(model, x).plan
        turned, last = bool(plan.layout), plan.last
        assert turned == (tail in ("gates", "norm", "channels"))
        assert last == (tail == "channels")  # whose result hangs on v alone: nothing is turned back


@pytest.mark.parametrize("dx", [False, True])
def test_filters_are_turned_for_the_gradient_of_x(dx, monkeypatch, device):
    """Alone: for their own the library reads none of their values."""
    if device == "cpu":
        pytest.skip("a GPU's way")
    monkeypatch.setattr(layouts, "fastest", lambda *given: layouts.TURNED)
    backward, given = library.convolve_backward, []

    def noted(how, dz, x, weight, needs, operands, turned=None):
        given.append(operands(x, weight, turned)[1])
        return backward(how, dz, x, weight, needs, operands, turned)

    monkeypatch.setattr(library, "convolve_backward", noted)
    monkeypatch.setattr(library, "making", lambda like: lambda: torch.full_like(like, NAN))
    run = Run(Turned("gates"), torch.randn(2, 3, 11, 30), saving=True)
    needs = [dx, *[True] * (len(run.arguments) - 1)]
    found = schedule.backward(run.plan, torch.ones_like(run.y), run.arguments, run.saved, needs)
    (filters,) = given
    assert filters.is_contiguous(memory_format=torch.channels_last) and filters.isnan().all() != dx
    assert not found[run.plan.weight_at].isnan().any()


SHIFTED = {  # tails behind which v's gradient is y's
    "a parameter": lambda m, v: v + m.p,
    "a number": lambda m, v: v + 1.0,
}
ALIKE = {  # … and where it only looks like that
    "twice": lambda m, v: (v + m.p) * 2.0,
    "channels": lambda m, v: torch.sum(v + m.p, 1),
    "positions": lambda m, v: torch.sum(v + m.p, (2, 3)),
    "flat": lambda m, v: (v + m.p).flatten(2),
    "an axis more": lambda m, v: (v + m.p).unsqueeze(1),
}


class Shifted(nn.Module):
    def __init__(self, nd: int, tail: str = "a parameter", bias: bool = True):
        super().__init__()
        convolution = (nn.Conv2d, nn.Conv3d)[nd - 2]
        self.conv = convolution(3, 40, (3, 2, 2)[:nd], stride=2, padding=1, bias=bias)
        self.p, self.tail = nn.Parameter(torch.randn(40, *[1] * nd)), (SHIFTED | ALIKE)[tail]

    def forward(self, x):
        return self.tail(self, self.conv(x))


OF_DZ = "gradient of x", "gradient of conv.weight"  # which TF32 is of


def lying_last(model: Shifted, x: torch.Tensor) -> torch.Tensor:
    model.conv.to(memory_format=library.channels_last(x))
    return x.to(memory_format=library.channels_last(x))


@pytest.mark.parametrize("layout", [layouts.TURNED, layouts.FOR_TF32], ids=["turned", "TF32"])
@pytest.mark.parametrize("nd, dtype", [(2, torch.float32), (2, torch.bfloat16), (3, torch.float32)], ids=str)
@pytest.mark.parametrize("tail, bias", [("a parameter", True), ("a number", False)], ids=str)
def test_the_gradient_of_v_may_be_that_of_y(tail, bias, nd, dtype, layout, monkeypatch, device):
    """Which no pass writes then; of whatever is asked for."""
    if device == "cpu":
        pytest.skip("a GPU's way")
    if dtype == torch.bfloat16 and layout == layouts.FOR_TF32:
        pytest.skip("TF32 is of float32")
    monkeypatch.setattr(layouts, "fastest", lambda *given: layout)
    backward, given = library.convolve_backward, []

    def noted(how, dz, *others):
        given.append(dz)
        return backward(how, dz, *others)

    monkeypatch.setattr(library, "convolve_backward", noted)
    torch.manual_seed(0)
    model, x = Shifted(nd, tail, bias).to(dtype), torch.randn((2, 3, 11, 30, 6)[: 2 + nd]).to(dtype)
    x = lying_last(model, x)
    dy = torch.randn_like(model(x)).detach()
    run, exact = Run(model, x, dy), reference(model, x, dy, torch.float64)
    composed = run.plan.composed
    assert composed.passes_dy and "dz" not in [array.name for array in composed.backward.arrays.values()]
    if layout == layouts.FOR_TF32:
        assert torch.equal(given[-1], rounded(dy)) and given[-1].data_ptr() != dy.data_ptr()
        exact |= {k: g for k, g in reference(model, x, rounded(dy), torch.float64).items() if k in OF_DZ}
        for name, gradient in exact.items():
            torch.testing.assert_close(run.results[name], gradient.float(), rtol=1e-5, atol=1e-4)
    else:
        assert given[-1].data_ptr() == dy.data_ptr()
        assert_rule(model, x)
    everything, count = [run.results[f"gradient of {n}"] for n in ("x", *run.segment.parameters)], len(given)
    for i, found in enumerate(everything):
        needs = [j == i for j in range(len(run.arguments))]
        gradients = schedule.backward(run.plan, dy, run.arguments, run.saved, needs)
        torch.testing.assert_close(gradients[i], found)
    assert len(given) == count + 2  # of x, and of the weight


@pytest.mark.parametrize("tail", ALIKE)
def test_what_only_looks_like_the_gradient_of_v(tail, monkeypatch, device):
    """It has other axes than v, or other values."""
    if device == "cpu":
        pytest.skip("a GPU's way")
    monkeypatch.setattr(layouts, "fastest", lambda *given: layouts.TURNED)
    torch.manual_seed(0)
    model = Shifted(2, tail)
    for x in (torch.randn(2, 3, 11, 30), lying_last(model, torch.randn(2, 3, 11, 30))):
        assert not assert_rule(model, x).plan.composed.passes_dy
    planes = Shifted(2)  # where a pass turns dz as it writes it
    assert not Run(planes, torch.randn(2, 3, 11, 30), saving=True).plan.composed.passes_dy


class Last(nn.Module):
    """Tails whose result is channels last where v is."""

    def __init__(self, tail: str, channels: int, nd: int):
        super().__init__()
        self.conv, self.tail = (nn.Conv2d, nn.Conv3d)[nd - 2](3, channels, (3, 2, 2)[:nd], padding=1), tail
        self.norm = (nn.BatchNorm2d, nn.BatchNorm3d)[nd - 2](channels)
        self.p, self.skip = nn.Parameter(torch.randn(channels, *[1] * nd)), nn.Dropout(0.0)
        self.pool = (torch.nn.functional.avg_pool2d, torch.nn.functional.max_pool3d)[nd - 2]

    def forward(self, x):
        x = self.conv(x)
        if self.tail == "gates":
            return torch.clamp(x + self.p, -0.5, 0.5) * self.p
        if self.tail == "norm":
            return torch.relu(self.norm(x)) * self.p
        if self.tail == "dropout":
            return self.skip(torch.tanh(x))
        if self.tail == "pool":
            return self.pool(torch.nn.functional.silu(x * self.p), 2) * 2.0
        x = x - x.mean((2, 3), keepdim=True) * self.p
        return x * torch.rsqrt(torch.square(x).mean((2, 3), keepdim=True) + 0.1)


@pytest.mark.parametrize("channels", [5, 12, 70, 96])  # behind a pack, in several rows of lanes, and both
@pytest.mark.parametrize(
    "tail, nd, dtype",
    [
        *[(tail, 2, torch.float32) for tail in ("gates", "norm", "pool", "sums")],
        *[(tail, 2, torch.bfloat16) for tail in ("norm", "pool")],
        ("dropout", 3, torch.float32),
        ("pool", 3, torch.bfloat16),
    ],
    ids=str,
)
def test_all_is_channels_last(tail, nd, channels, dtype, device):
    """Where eager's v and y are, ours are: nothing is turned, and y comes as eager's does."""
    if device == "cpu":
        pytest.skip("a GPU's way")
    torch.manual_seed(0)
    x = torch.randn(2, 3, *(6, 13, 18)[3 - nd :]).to(dtype)
    x = x.contiguous(memory_format=library.channels_last(x))
    run = assert_rule(Last(tail, channels, nd).to(dtype), x, label=tail)
    assert run.plan.last and library.is_channels_last(run.y)


@pytest.mark.parametrize("size", [(71, 70), (93, 67)], ids=str)
@pytest.mark.parametrize("last", [False, True])
def test_several_points_at_once(last, size, device):
    """A thread has so many points that it reads some before it writes the first, and a few that are left."""
    torch.manual_seed(0)
    x = torch.randn(1, 3, size[0] + 2, size[1] + 2)
    if last:
        x = x.contiguous(memory_format=torch.channels_last)
    run = assert_rule(nn.Sequential(nn.Conv2d(3, 12, 3), nn.BatchNorm2d(12), nn.ReLU()), x)
    assert run.plan.last == (last and device == "cuda")


class Across(nn.Module):
    """Tails that reduce channels at a position."""

    def __init__(self, tail: str, channels: int):
        super().__init__()
        self.conv, self.tail = nn.Conv2d(3, channels, 3, padding=1), tail
        self.p = nn.Parameter(torch.randn(channels, 1, 1))

    def forward(self, x):
        x = self.conv(x) * self.p
        if self.tail == "softmax":  # torch's own gives planes
            x = torch.exp(x - torch.amax(x, 1, keepdim=True))
            return x / x.sum(1, keepdim=True) * self.p
        if self.tail == "norm":
            x = x - x.mean(1, keepdim=True)
            return x * torch.rsqrt(torch.square(x).mean(1, keepdim=True) + 0.1)
        if self.tail == "least":
            return torch.min(x * 2.0, dim=1, keepdim=True)[0]
        if self.tail == "sums":  # of positions, by sample
            return torch.tanh(torch.logsumexp(x, 1).mean((1, 2)))
        return torch.nn.functional.max_pool2d(torch.max(x, dim=1, keepdim=True)[0], 2)


@pytest.mark.parametrize(
    "tail, dtype",
    [
        *((tail, torch.float32) for tail in ("softmax", "norm", "least", "sums", "pool")),
        *((tail, torch.bfloat16) for tail in ("softmax", "least")),
    ],
    ids=str,
)
def test_channels_are_reduced_channels_last(tail, dtype, device):
    """Lanes share a position's channels, of which there are some for each lane, or a few for all."""
    if device == "cpu":
        pytest.skip("a GPU's way")
    for channels, size in ((5, (6, 13)), (24, (5, 9)), (160, (3, 7)), (296, (3, 4))):
        torch.manual_seed(0)
        x = torch.randn(2, 3, *size).to(dtype).contiguous(memory_format=torch.channels_last)
        run = assert_rule(Across(tail, channels).to(dtype), x, label=f"{tail} of {channels}")
        assert run.plan.last and "by_sample" in run.plan.composed.text


@pytest.mark.parametrize("channels", [9, 72])
def test_ties_and_nan_between_lanes(channels, device):
    """The first of a position's largest channels has the gradient, and the first NaN, whichever lane it is in."""
    if device == "cpu":
        pytest.skip("a GPU's way")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(channels, channels, 1, bias=False), Largest())
    model[0].weight.data = torch.eye(channels)[:, :, None, None]
    x = torch.randint(-3, 3, (2, channels, 5, 8)).float()
    x = torch.where(torch.rand_like(x) < 0.03, NAN, x).contiguous(memory_format=torch.channels_last)
    dy = torch.randn(2, 5, 8)
    leaf = x.clone().requires_grad_()
    model[1](leaf).backward(dy)
    segment = segment_of(model, x)
    plan = schedule.plan(Case(segment, arguments := arguments_of(model, segment, x), True, x.dtype))
    plan.convolve = lambda x, *_: x  # where a product would spread NaN
    y, *saved = schedule.forward(plan, arguments)
    assert plan.last and checks.equal(y, model[1](x)).all() and y.isnan().any()
    *_, dz, _ = schedule._back(plan, False, True, True, arguments).launch.run(arguments, dy, *saved)
    assert torch.equal(dz, leaf.grad)


class Largest(nn.Module):
    def forward(self, x):
        return torch.max(x, dim=1)[0]


def test_small_arrays_stand_anywhere(device):
    """A model's parameters may be parts of one tensor; neighbouring channels are read together where that is allowed."""
    if device == "cpu":
        pytest.skip("a GPU's way")
    torch.manual_seed(0)
    model, x = Last("gates", 24, 2), torch.randn(2, 3, 6, 7).contiguous(memory_format=torch.channels_last)
    model.p.data = torch.randn(32)[3:27].view(24, 1, 1)
    assert model.p.data_ptr() % 16 and assert_rule(model, x).plan.last


@pytest.mark.parametrize("layout", ["planes", "turned", "turned in two parts", "last"])
def test_many_parts(layout, device, monkeypatch):
    """Then a pass of its own merges them. Turned, a block has many tiles."""
    if device == "cpu":
        pytest.skip("a GPU's way")
    turned = layout.startswith("turned")
    if turned:
        monkeypatch.setattr(layouts, "fastest", lambda *given: layouts.TURNED)
        monkeypatch.setattr(
            load_plan, "_shares", lambda most, planes, _: max(most, 33) if layout == "turned" else 2
        )
        monkeypatch.setattr(load_plan, "_in_few_waves", lambda *_: 33 if layout == "turned" else 2)
        monkeypatch.setattr(load_plan, "_FEW_PARTS", 1 << 20)  # who plans would have fewer
    else:
        monkeypatch.setattr(load_plan, "parts_of", lambda *given: 40)
    torch.manual_seed(0)
    x = torch.randn(1, 3, *((75, 60) if turned else (9, 20))) + 3.0
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.GroupNorm(4, 8), nn.SiLU())
    if layout == "last":
        model, x = Last("norm", 8, 2), x.contiguous(memory_format=torch.channels_last)
    assert_rule(model, x, label=layout)
    run = assert_rule(model, x, backward=False, label=layout)
    parts = [
        load_plan.parts_of(run.plan, run.plan.composed.forward, i)
        for i, each in enumerate(run.plan.composed.forward.passes)
        if hasattr(each, "level")
    ]
    assert parts[0] == 2 if layout == "turned in two parts" else parts[0] > 32


@pytest.mark.parametrize("parts", [3, 30])
def test_some_parts(parts, device, monkeypatch):
    """A small pass merges them, several a lane, whose means are far apart."""
    if device == "cpu":
        pytest.skip("a GPU's way")
    monkeypatch.setattr(load_plan, "parts_of", lambda *given: parts)
    torch.manual_seed(0)
    x = torch.randn(2, 3, 64, 62) + torch.linspace(-9, 9, 64)[:, None]
    model = Last("norm", 8, 2)
    run = assert_rule(model, x.contiguous(memory_format=torch.channels_last))
    assert run.plan.last


class OfSamples(nn.Module):
    """Sums over all samples, and what else reads a sample's own: nothing, a mean over positions, or a norm."""

    def __init__(self, besides: str):
        super().__init__()
        self.conv, self.besides = nn.Conv2d(3, 8, 3), besides
        self.norm, self.own = nn.BatchNorm2d(8), nn.InstanceNorm2d(8)

    def forward(self, x):
        v = self.conv(x)
        y = self.norm(v)
        if self.besides == "a mean":
            return y * v.mean((2, 3), keepdim=True)
        return y + self.own(v) if self.besides else y


@pytest.mark.parametrize("besides", ["", "a mean", "a norm"])
@pytest.mark.parametrize("parts", [1, 3, 40])
@pytest.mark.parametrize("last", [False, True])
def test_samples_are_merged_at_once(last, parts, besides, device, monkeypatch):
    """Parts of planes of all samples, where nobody asks for a sample's own. Samples' means are far apart."""
    if device == "cpu":
        pytest.skip("a GPU's way")
    monkeypatch.setattr(load_plan, "parts_of", lambda *given: parts)
    torch.manual_seed(0)
    x = torch.randn(5, 3, 34, 30) + torch.linspace(-9, 9, 5)[:, None, None, None]
    if last:
        x = x.contiguous(memory_format=torch.channels_last)
    run = assert_rule(OfSamples(besides).train(), x, label=besides)
    at_once = {key.what for key in run.plan.composed.forward.of_all_samples}
    assert at_once == (set() if besides else {"mean", "m2"})


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("batch, image", [(3, (4, 5)), (3, (7, 7)), (3, (9, 12)), (700, (13, 19))], ids=str)
def test_blocks_have_several_planes(batch, image, dtype, device):
    """Of small ones, 8, 16 or 32 lanes each; the last block has fewer. Of many, a lane has several packs."""
    if device == "cpu":
        pytest.skip("a GPU's way")
    torch.manual_seed(0)
    model = OfSamples("").train().to(dtype)
    x = (torch.randn(batch, 3, image[0] + 2, image[1] + 2) + 2.0).to(dtype)
    assert_rule(model, x, label=str(image))
    if batch < 700:
        with torch.no_grad():
            assert_rule(model, x, backward=False, label=str(image))


@pytest.mark.parametrize("norm, batch, channels", [("batch", 3, 2048), ("group", 40, 1024)])
def test_warps_have_small_values(norm, batch, channels, device):
    """Where they are many: a channel's, or some of a sample's."""
    if device == "cpu":
        pytest.skip("a GPU's way")
    torch.manual_seed(0)
    of = nn.BatchNorm2d(channels) if norm == "batch" else nn.GroupNorm(32, channels)
    model = nn.Sequential(nn.Conv2d(1, channels, 1), of, nn.ReLU()).train()
    x = torch.randn(batch, 1, 3, 3) + torch.linspace(-9, 9, batch)[:, None, None, None]
    assert_rule(model, x.contiguous(memory_format=torch.channels_last), label=norm)


def test_all_samples_are_a_channel_s_to_merge(device):
    """No block of a sample's merges what all samples share, though it is made beside its values."""
    if device == "cpu":
        pytest.skip("a GPU's way")

    class Beside(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.norm = nn.Conv2d(3, 8, 1), nn.GroupNorm(2, 8, affine=False)
            self.q = nn.Parameter(torch.rand(8, 1, 1))

        def forward(self, x):
            return torch.relu(self.norm(self.conv(x))) * self.q

    model, x = Beside(), torch.randn(3, 3, 5, 6)
    segment = segment_of(model, x)
    case = Case(segment, arguments_of(model, segment, x), True, torch.float32)
    program = load_plan.Plan.of(case).composed.backward
    assert program.of_all_samples
    for each in program.passes:
        merged = program.of_all_samples.intersection(each.targets)
        assert not merged or each.mode == "channel"


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last], ids=str)
def test_a_bias_alone(layout, device):
    """A convolution without a tail, as a segment on a GPU; without a bias nothing follows it."""
    if device == "cpu":
        pytest.skip("a GPU's way")
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1)), torch.randn(2, 3, 9, 10)
    model, x = model.to(memory_format=layout), x.contiguous(memory_format=layout)
    (segment,) = capture(model, True, 4, bare=True).segments
    assert not capture(model, True, 4).segments
    assert not capture(nn.Sequential(nn.Conv2d(3, 8, 3, bias=False)), True, 4, bare=True).segments
    arguments, last = arguments_of(model, segment, x), layout != torch.contiguous_format
    plan = schedule.plan(Case(segment, arguments, True, x.dtype, last=last))
    y, *saved = schedule.forward(plan, arguments)
    leaf, dy = x.detach().clone().requires_grad_(), torch.randn(2, 8, 9, 10)
    wanted = model(leaf)
    found = schedule.backward(plan, dy, arguments, saved, [True] * 3)
    assert y.stride() == wanted.stride()
    torch.testing.assert_close(y, wanted.detach())
    for ours, eager in zip(found, torch.autograd.grad(wanted, [leaf, *model.parameters()], dy)):
        assert ours.dim() < 4 or library.is_channels_last(ours) == last
        torch.testing.assert_close(ours, eager, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("groups", [1, 4, 12, 48], ids=str)
def test_blocks_share_small_values(groups, device):
    """Of many channels: each has whole groups."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(2, 96, 1), nn.GroupNorm(groups, 96), nn.SiLU())
    with torch.no_grad():
        model[1].weight.normal_(), model[1].bias.normal_()
    run = assert_rule(model, torch.randn(2, 2, 5, 6), label=str(groups))
    slices = [getattr(text, "slices", 1) for text in run.plan.composed.forward.texts]
    assert max(slices) == (1 if device == "cpu" else {1: 1, 4: 4, 12: 12, 48: 24}[groups])


class Skipping(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.side = nn.Conv2d(3, 12, 3), nn.Conv2d(3, 12, 3)
        self.p = nn.Parameter(torch.randn(12, 1, 1))

    def forward(self, x):
        v = self.conv(x) * self.p
        return torch.nn.functional.silu(v + self.side(x))

    def behind(self, x, other):
        return torch.nn.functional.silu(self.conv(x) * self.p + other)


@pytest.mark.parametrize("other_is_last", [False, True])
def test_a_second_input_channels_last(other_is_last, device):
    if device == "cpu":
        pytest.skip("a GPU's way")
    torch.manual_seed(0)
    model, x = Skipping(), torch.randn(2, 3, 9, 11).contiguous(memory_format=torch.channels_last)
    other = torch.randn(2, 12, 7, 9).contiguous(memory_format=torch.channels_last)
    other = other if other_is_last else other.contiguous()
    (segment,) = [each for each in capture(model, True, 4).segments if len(each.inputs) == 2]
    values = [attribute(model, name).detach() for name in segment.parameters]
    plan = schedule.plan(Case(segment, [x, other, *values], True, x.dtype, last=True))
    y, *saved = schedule.forward(plan, [x, other, *values])
    dy = torch.randn_like(y)
    found = schedule.backward(plan, dy, [x, other, *values], saved, [True] * (2 + len(values)))
    leaves = [x.requires_grad_(), other.requires_grad_(), *[attribute(model, n) for n in segment.parameters]]
    wanted = model.behind(x, other)
    assert library.is_channels_last(y) and plan.last
    torch.testing.assert_close(y, wanted.detach())
    for ours, eager in zip(found, torch.autograd.grad(wanted, leaves, dy)):
        torch.testing.assert_close(ours, eager, rtol=1e-4, atol=1e-5)


@pytest.fixture
def in_front(device, monkeypatch):
    if device == "cpu":
        pytest.skip("a GPU's way")
    monkeypatch.setattr(between, "FEWEST_CHANNELS", 4)
    monkeypatch.setattr(between, "rounds", lambda segment, x: False)


@pytest.mark.parametrize("size", [(16, 20), (11, 15)], ids=["in fours", "odd"])
@pytest.mark.parametrize(
    "tail, dtype", [("norm", torch.float32), ("norm", torch.bfloat16), ("batch", torch.float32), ("beside", torch.float32)], ids=str
)  # fmt: skip
def test_y_alone_is_channels_last(tail, dtype, size, in_front, monkeypatch):
    """In front of a convolution: x stays where it is, and its gradient comes so; passes turn y and dy on their way."""
    monkeypatch.setattr(
        load_plan, "_shares", lambda most, planes, _: min(most, 2)
    )  # a block has several tiles
    torch.manual_seed(0)
    model, x = InFront(tail, 40).to(dtype), torch.randn(2, 40, *size).to(dtype)
    run = assert_rule(model, x, label=tail, kind=OfInFront)
    assert run.plan.turns_y and not run.plan.turns.launches
    assert library.is_channels_last(run.y) and run.results["gradient of x"].is_contiguous()


def test_y_alone_is_rounded(in_front, monkeypatch):
    """To TF32, where a convolution reads it next; nothing else is, nor is x copied."""
    torch.manual_seed(0)
    model, x, found = InFront("norm", 16), torch.randn(2, 16, 7, 20), []
    dy = torch.randn(2, 16, 7, 20)
    for rounds in (False, True):
        monkeypatch.setattr(between, "rounds", lambda segment, x: rounds)
        run = OfInFront(model, x, dy)
        assert run.plan.turns_y and run.saved[0].data_ptr() == x.data_ptr()
        found.append(run.results)
    exact, ours = found
    assert torch.equal(rounded(exact.pop("output")), ours.pop("output"))
    assert len(ours) > 3 and all(torch.equal(t, ours[name]) for name, t in exact.items() if t is not None)


@pytest.mark.parametrize("what", ["channels", "a slice", "reduced channels"])
def test_y_alone_is_not_channels_last(what, in_front):
    """Then x is turned first."""
    torch.manual_seed(0)
    model = InFront("across" if what == "reduced channels" else "norm", 12 if what == "channels" else 16)
    x = torch.randn(2, len(model.p), 9, 20)[..., :14]
    run = OfInFront(model, x if what == "a slice" else x.contiguous(), torch.randn(x.shape))
    assert run.plan.last and not run.plan.turns_y
    exact = reference(model, x, None, torch.float64)["output"]
    torch.testing.assert_close(run.y, exact.float())


class Added(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.last = nn.GroupNorm(4, 16), nn.Conv2d(16, 16, 3)
        self.one, self.two = nn.Conv2d(16, 16, 1), nn.Conv2d(16, 16, 1)

    def forward(self, x):
        x, other = torch.tanh(self.one(x)), torch.tanh(self.two(x))
        return self.last(self.behind(x, other)) * (x.mean((2, 3)) * other.mean((2, 3)))[..., None, None]

    def behind(self, x, other):
        return torch.nn.functional.silu(self.norm(x) + other)


@pytest.mark.parametrize("other_is_last", [False, True])
def test_y_alone_with_a_second_input(other_is_last, in_front):
    """It lies as x does, or all is channels last."""
    torch.manual_seed(0)
    model, x, other = Added(), torch.randn(2, 16, 9, 14), torch.randn(2, 16, 9, 14)
    given = x, other.contiguous(memory_format=torch.channels_last) if other_is_last else other
    captured = capture(model, True, 4, bare=True)
    (segment,) = [each for each in between.laid_out(captured, model) if each.conv.is_nothing]
    assert len(segment.inputs) == 2 and segment.result == between.KEPT
    vars(model).update(captured.constants)
    arguments = [*given, *[attribute(model, name).detach() for name in segment.parameters]]
    plan = schedule.plan(Case(segment, arguments, True, x.dtype, last=True))
    y, *saved = schedule.forward(plan, arguments)
    dy = torch.randn_like(y)
    found = schedule.backward(plan, dy, arguments, saved, [True] * len(arguments))
    leaves = [x.requires_grad_(), other.requires_grad_(), *model.norm.parameters()]
    wanted = model.behind(x, other)
    assert library.is_channels_last(y) and bool(plan.turns_y) != other_is_last == plan.last
    torch.testing.assert_close(y, wanted.detach())
    for ours, eager in zip(
        [g for g in found if g is not None], torch.autograd.grad(wanted, leaves, dy), strict=True
    ):
        torch.testing.assert_close(ours, eager, rtol=1e-4, atol=1e-5)


def test_y_alone_is_told(in_front):
    """With the bytes of each pass, of which none copies x."""
    model, x = InFront("norm", 128), torch.empty(8, 128, 128, 128, device="meta")
    words = schedule.describe(Case(*OfInFront.asked(model, x)[:2], True, x.dtype, last=True))
    assert words.startswith("x as it is, y channels last for what follows, then sums (reads 67.1 MB")
    assert re.findall(r"(\w+) \(reads (67|13\d|20\d)\.\d MB", words) == [
        ("sums", "67"),
        ("y", "67"),
        ("sums", "134"),
    ]
    assert re.findall(r"(\w+) \([^)]*, writes 67\.1 MB", words) == ["y"]


@pytest.mark.parametrize("last", [False, True])
def test_no_gradient_of_what_is_given(last, in_front):
    """Then nothing is computed at positions for it."""
    torch.manual_seed(0)
    model, x, dy = InFront("norm", 16), torch.randn(2, 16, 7, 20), torch.randn(2, 16, 7, 20)
    x = x.contiguous(memory_format=torch.channels_last) if last else x
    run = OfInFront(model, x, dy)
    assert run.plan.last == last
    needs = [False, False, *[True] * (len(run.arguments) - 2)]
    _, _, *found = schedule.backward(run.plan, dy, run.arguments, run.saved, needs)
    wanted = [run.results[f"gradient of {name}"] for name in run.segment.parameters[1:]]
    assert len(found) == 3 and all(map(torch.equal, found, wanted))
    launch = schedule._back(run.plan, False, False, True, run.arguments).launch
    assert "dz" in launch.made[len(launch.like) :], "one without elements"


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last], ids=str)
@pytest.mark.parametrize("inference", [False, True])
def test_what_is_made_like_a_tensor(layout, inference):
    """Is what torch.empty_like makes, each time another."""
    like = library.without_memory(torch.empty(1), (2, 3, 4, 5), torch.float64, layout)
    make, strides = library.making(like), like.stride()  # which has no values to be shown
    with torch.inference_mode(inference):
        made, other, theirs = make(), make(), torch.empty_like(like)
    assert made.data_ptr() != other.data_ptr() and made.untyped_storage().nbytes() == 960
    for name in ("shape", "dtype", "device", "requires_grad"):
        assert getattr(made, name) == getattr(theirs, name)
    assert made.stride() == theirs.stride() == strides and made.is_inference() == inference


@pytest.mark.gpu
def test_what_is_made_on_a_gpu():
    """On the tensor's own, whichever is the current one."""
    for index in range(torch.cuda.device_count()):
        like = library.without_memory(torch.empty(1, device=f"cuda:{index}"), (2, 3), torch.float32)
        for current in range(torch.cuda.device_count()):
            with torch.cuda.device(current):
                made = library.making(like)()
            assert (made.device.index, made.shape, made.stride()) == (index, (2, 3), (3, 1))
            assert made.fill_(2).sum() == 12


def test_x_itself_in_planes(device):
    """Without a convolution behind it, of x that stands anywhere: nothing is turned there or back."""
    torch.manual_seed(0)
    model, x = InFront("norm", 16), torch.randn(2 * 16 * 45 + 1)[1:].view(2, 16, 5, 9)
    segment, arguments, _ = OfInFront.asked(model, x)
    plan = schedule.plan(Case(segment.with_result(None, False, (), False), arguments, True, x.dtype))
    assert x.data_ptr() % 16 and plan.convolve(*arguments[:2], None).data_ptr() % 16 == 0
    y, *saved = schedule.forward(plan, arguments)
    dy = torch.randn(x.shape)
    wanted = reference(model, x, dy, torch.float32)
    dx = schedule.backward(plan, dy, arguments, saved, [True] * len(arguments))[0]
    assert not plan.turns.launches
    torch.testing.assert_close(y, wanted["output"])
    torch.testing.assert_close(dx, wanted["gradient of x"], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("probability", [0.0, 1e-9])
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last], ids=str)
def test_planes_without_a_gradient(layout, probability, device):
    """They are not read where it is long to draw what else may drop it; values that are not finite make NaN of a group all the same."""
    torch.manual_seed(0)
    model, x = Gated(probability), torch.randn(2, 2, 9, 11).contiguous(memory_format=layout)
    run = assert_rule(model, x)
    assert run.plan.last == (device == "cuda" and layout == torch.channels_last)
    assert ("const bool idle" in run.plan.composed.text) == (probability > 0)
    assert (run.results["gradient of norm.weight"][[0, 1, 2, 7]] == 0).all()
    x[1, 0, 4, 4] = INF
    dy = torch.randn_like(run.y)
    ours, eager = Run(model, x, dy).results, reference(model, x, dy, x.dtype)
    for name, r in eager.items():
        assert torch.equal(ours[name].isnan(), r.isnan()), name


def rounded(t: torch.Tensor) -> torch.Tensor:
    """To TF32, ties away from zero."""
    return ((t.view(torch.int32) + 0x1000) & ~0x1FFF).view(torch.float32)


def test_where_the_library_has_x_turned():
    """Few channels out count, but of images of many in 16 bits, forward."""
    turns = functools.partial(costs.library_turns, itemsize=2, forward=True)
    assert turns((24, 384, 3, 3)) and turns((8, 128, 3, 3)) and turns((32, 32, 1, 1))
    for filters in ((7, 384, 3, 3), (31, 127, 3, 3), (24, 384, 1, 1), (24, 384, 3, 3, 3)):
        assert not turns(filters)
    assert not turns((24, 384, 3, 3), itemsize=4) and not turns((24, 384, 3, 3), forward=False)


def test_operands_of_tf32_are_rounded(monkeypatch, device):
    """Channels last the library would cut their last bits off. What is not finite stays."""
    if device == "cpu":
        pytest.skip("a GPU's way")
    monkeypatch.setattr(layouts, "fastest", lambda *given: layouts.FOR_TF32)
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Conv2d(3, 8, 3, bias=False), nn.ReLU()), torch.randn(2, 3, 9, 10)
    dy = torch.randn(2, 8, 7, 8)
    run = Run(model, x, dy)
    inner, weight = (rounded(t.detach()).double().requires_grad_() for t in (x, model[0].weight))
    v = torch.conv2d(inner, weight)
    close = {"rtol": 1e-5, "atol": 1e-5}
    torch.testing.assert_close(run.y, v.relu().float(), **close)
    v.backward(rounded(torch.where(v > 0, dy, 0.0)).double())
    torch.testing.assert_close(run.results["gradient of x"], inner.grad.float(), **close)
    torch.testing.assert_close(run.results["gradient of 0.weight"], weight.grad.float(), **close)
    x[0, 0, 0, 0], x[1, 0, 0, 0] = INF, NAN
    y = Run(model, x).y
    assert torch.equal(y.isnan(), model(x).isnan()) and torch.equal(y.isinf(), model(x).isinf())


SIDES = (1, 2, 3, 8, 13, 20, 49, 64, 67, 96, 127, 130)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16], ids=str)
def test_whole_arrays_are_turned(dtype, folder, guarded):  # noqa: F811
    """To the bit, at every size: where rows, columns or neither are vectors; in one tile, in some, in whole rows or columns."""
    text = '#include "load/load.h"\n#include "load/turned.cuh"\n' + source.TRANSPOSE
    defines = {"VALUE_T": CTYPES[dtype]}
    kernels = Emulated(text, library_of(text, 800, defines, (), folder))
    torch.manual_seed(0)
    sides = itertools.product(enumerate(SIDES), enumerate(SIDES))
    sizes = [(1 + (i + j) % 3, rows, columns) for (i, rows), (j, columns) in sides]
    for size in [
        *sizes,
        (2, 9, 1030),
        (1, 1030, 9),
        (1, 3, 4500),
        (1, 4500, 2),
        (1, 264, 72),
        (2, 40, 136),
        (3, 520, 9),
        (1, 1040, 25),
        (1, 512, 49),
        (2, 9, 1032),
        (1, 63, 264),
        (2, 8, 3),
        (0, 3, 4),
        (2, 0, 4),
    ]:
        t = torch.randn(size).to(dtype)
        for rounds in (False, True) if dtype == torch.float32 else (False,):
            out = torch.full((size[0], size[2], size[1]), NAN, dtype=dtype)
            kernels.transpose(out, t, *size, rounds)
            assert torch.equal(out, (rounded(t) if rounds else t).transpose(1, 2)), (size, rounds)
    ts = [torch.randn(size).to(dtype) for size in sizes]
    for one, other in [*zip(ts, ts[7:]), (ts[0][:0], ts[50]), (ts[50], ts[0][:0])]:
        outs = [torch.full_like(t, NAN).transpose(1, 2).contiguous() for t in (one, other)]
        kernels.transpose_both(*outs, one, other, *one.shape, *other.shape, False)
        assert all(torch.equal(out, t.transpose(1, 2)) for out, t in zip(outs, (one, other))), (
            one.shape,
            other.shape,
        )


@pytest.mark.parametrize("stride", [2, (1, 3), (2, 1)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("channels", [3, 40])
def test_positions_that_strides_meet(channels, dtype, stride, monkeypatch, device):
    """Filters of one place: no other positions are turned, and their gradient is zero."""
    if device == "cpu":
        pytest.skip("a GPU's way")
    monkeypatch.setattr(layouts, "fastest", lambda *given: layouts.TURNED)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(channels, 8, 1, stride), nn.SiLU()).to(dtype)
    for size in ((5, 8), (12, 13), (1, 2)):
        run = assert_rule(model, torch.randn(2, channels, *size).to(dtype), label=str(size))
        down, across = model[0].stride
        assert (
            "transpose_picked",
            (2, channels, *size, down, across, False),
            (0,),
        ) in run.plan.turns.launches
        dx = run.results["gradient of x"].clone()
        assert dx.count_nonzero() and dx.is_contiguous()
        dx[:, :, ::down, ::across] = 0
        assert not dx.count_nonzero()


@pytest.mark.parametrize("layout", [layouts.TURNED, layouts.FOR_TF32])
def test_filters_of_one_place(layout, monkeypatch, device):
    """They lie as channels last already; nothing is launched for them but to round."""
    if device == "cpu":
        pytest.skip("a GPU's way")
    monkeypatch.setattr(layouts, "fastest", lambda *given: layout)
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Conv2d(3, 8, 1, bias=False), nn.ReLU()), rounded(torch.randn(2, 3, 5, 7))
    model[0].weight.data = rounded(model[0].weight.data)
    run = assert_rule(model, x, backward=False)
    assert any(1 in numbers for _, numbers, _ in run.plan.turns.launches) == (layout == layouts.FOR_TF32)
