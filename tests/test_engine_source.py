"""The schedule `load` as it is written: generated kernels, compiled for a CPU or run in the emulation of a GPU, against float64.

Problems of benchmarks/level2.py and random tails, forward and backward, with random parameters and small odd sizes; and what the
kernels promise beside: nothing is written past an array's end, outputs are written whole, results are repeatable to the bit.
"""

from __future__ import annotations

import copy
import re
import subprocess
import warnings

import pytest
import torch
from torch import nn

import inline_loader
from benchmarks import level2
from fuzz_engine import random_program
from generated import (  # noqa: F401
    DTYPES_ON_CPU,
    INF,
    NAN,
    NUMBERS,
    NVCC,
    ON_CPU,
    Gated,
    InFront,
    OfInFront,
    Run,
    arguments_of,
    assert_rule,
    device,
    problem,
    reference,
    segment_of,
)
from inline_kernels.bench import checks
from inline_kernels.engine import launching, library, passes, programs, schedule, source
from inline_kernels.engine.capture import capture
from inline_kernels.engine.cases import Case
from test_emulated import Emulated, folder, guarded, library_of, pytestmark  # noqa: F401
from test_engine_cpu import philox


def _skip_elsewhere(number: int, device: str) -> None:
    if device == "cpu" and number not in ON_CPU:
        pytest.skip("compiled for a CPU by `make fuzz`")


@pytest.mark.parametrize("number", NUMBERS)
def test_problems(number, device):
    """Then NaN and infinities in one sample, of results alone, as gradients of what is not finite are nobody's."""
    _skip_elsewhere(number, device)
    model, x = problem(number)
    assert_rule(model, x, label=str(number))
    for value in (NAN, INF, -INF):
        odd = x.clone()
        odd[1].view(-1)[odd[1].numel() // 2] = value
        run = Run(model, odd, saving=True)
        eager, exact = (reference(model, odd, None, dtype)["output"] for dtype in (x.dtype, torch.float64))
        like = [
            checks.equal(run.y, each.to(x.dtype)) for each in (eager, exact)
        ]  # eager's gelu of an infinity is NaN
        assert (like[0] | like[1] | run.y.isfinite() & exact.isfinite()).all()


@pytest.mark.parametrize("seed", [*range(30), 11007, 11057])  # sums of windows inside windows
def test_random_programs(seed, device):
    """Every other one channels last. Of one sample that is left out: PyTorch 2.13's gradient of its instance norm is wrong so, on a CPU."""
    if device == "cpu" and seed % 5:
        pytest.skip("compiled for a CPU by `make fuzz`")
    model, x = random_program(seed)
    if seed % 2 and len(x) > 1:
        x = x.contiguous(memory_format=library.CHANNELS_LAST[x.dim()])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for backward in (True, False):
            assert_rule(model, x, backward, f"{seed}: {', '.join(model.names)}")


class Even(nn.Module):
    """A gradient that goes to the largest of a row: the value is computed again, where it is sought and where it is compared."""

    def __init__(self):
        super().__init__()
        self.conv, self.p = nn.Conv2d(2, 3, 1), nn.Parameter(torch.tensor(0.3))

    def forward(self, x):
        v = self.conv(x)
        v = v + torch.sigmoid(v)
        return torch.amax(torch.sqrt(torch.square(self.p - 0.75 * v + v) + 0.1), 2)


class Summed(nn.Module):
    """A sum over the channels of a group, of what is needed of the own channel, too."""

    def __init__(self):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(1, 4, 1), nn.GroupNorm(1, 4)
        with torch.no_grad():
            self.norm.weight.normal_()

    def forward(self, x):
        return torch.sum(self.norm(torch.nn.functional.avg_pool2d(self.conv(x), (2, 3))), (2, 3))


class Shared(nn.Module):
    """A comparison of what all channels share, that chooses between what they don't."""

    def __init__(self):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(2, 5, 1), nn.InstanceNorm2d(5)
        self.p = nn.Parameter(torch.tensor([-0.7]))

    def forward(self, x):
        return torch.max(torch.clamp(self.norm(self.conv(x) * self.p), -0.5, 0.5) * self.p, 1)[0]


@pytest.mark.parametrize("kind", [Even, Summed, Shared], ids=lambda kind: kind.__name__)
def test_programs_that_were_wrong(kind, device):
    torch.manual_seed(0)
    model = kind()
    assert_rule(model, torch.randn(2, model.conv.in_channels, 12, 13), label=kind.__name__)


@pytest.mark.parametrize(
    "number, dtype",
    [
        *DTYPES_ON_CPU,
        (92, torch.float16),
    ],
    ids=str,
)
def test_dtypes(number, dtype, device):
    if device == "cpu" and (number, dtype) not in DTYPES_ON_CPU:
        pytest.skip("compiled for a CPU in some dtypes")
    assert_rule(*problem(number, dtype), label=str(number))


@pytest.mark.parametrize("number", [21, 52, 79, 85, 92])
def test_large_means(number, device):
    """A mean of a thousand spreads in front of a norm."""
    _skip_elsewhere(number, device)
    model, x = problem(number)
    with torch.no_grad():
        model.conv.bias.add_(300.0)
    assert_rule(model, x, label=str(number))


class OfMeans(nn.Module):
    """Sums, a norm and an extreme of more small values than a warp has lanes."""

    def __init__(self):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(2, 77, 3), nn.GroupNorm(1, 77)

    def forward(self, x):
        x = self.norm(torch.relu(self.conv(x)).mean((2, 3), keepdim=True))
        return torch.logsumexp(x, dim=1) * x.sum(dim=1)


def test_more_small_values_than_lanes(device):
    if device == "cpu":
        pytest.skip("which has no warps")
    torch.manual_seed(0)
    assert_rule(OfMeans(), torch.randn(3, 2, 7, 9))


class Ties(nn.Module):
    """Whole numbers that meet bounds, zeros and one another in windows and over channels."""

    def __init__(self, tail: str):
        super().__init__()
        self.conv = nn.Conv2d(1, 5, 1)
        self.tail = tail
        with torch.no_grad():
            self.conv.weight.fill_(1.0), self.conv.bias.zero_()

    def forward(self, x):
        x = self.conv(x)
        if self.tail == "clamp":
            return torch.clamp(x, -1.0, 1.0)
        if self.tail == "minimum":
            return torch.min(x, torch.tensor(1.0))
        if self.tail == "relu":
            return torch.relu(x) * torch.nn.functional.hardtanh(x, -2.0, 2.0)
        if self.tail == "hardswish":
            return torch.nn.functional.hardswish(x)
        if self.tail == "pool":
            return torch.nn.functional.max_pool2d(x, 2)
        return torch.max(x, dim=1)[0] if self.tail == "channels" else torch.logsumexp(x, dim=1)


@pytest.mark.parametrize("tail", ["clamp", "minimum", "relu", "hardswish", "pool", "channels", "logsumexp"])
def test_ties(tail, device):
    if device == "cpu" and tail not in ("clamp", "pool", "channels"):
        pytest.skip("for a CPU compiled for one of each kind of pass")
    torch.manual_seed(0)
    x = torch.randint(-3, 4, (2, 1, 6, 7)).float()
    assert_rule(Ties(tail), x, label=tail)


class Pooled(nn.Module):
    """What stands before a pool of any windows: a norm, as in a network's stem, or nothing that hides special values; behind it a norm, or nothing."""

    def __init__(self, pool, normed: bool, channels: int = 5):
        super().__init__()
        nd = 3 if isinstance(pool, (nn.MaxPool3d, nn.AvgPool3d)) else 2
        norm = (nn.BatchNorm2d, nn.BatchNorm3d)[nd - 2]
        self.conv, self.pool = (nn.Conv2d, nn.Conv3d)[nd - 2](1, channels, 1, bias=normed), pool
        self.front = nn.Sequential(norm(channels), nn.ReLU()) if normed else nn.Identity()
        self.behind = nn.GroupNorm(1, channels) if normed and nd == 2 else nn.Identity()
        if not normed:
            nn.init.ones_(self.conv.weight)

    def forward(self, x):
        return self.behind(self.pool(self.front(self.conv(x))))


SOME_POOLS = {
    "of a stem": nn.MaxPool2d(3, 2, 1),
    "at each position": nn.MaxPool2d(3, 1, 1),
    "overlapping": nn.MaxPool2d(2, 1),
    "uneven": nn.MaxPool2d((3, 2), (2, 1), (1, 0)),
    "with gaps": nn.MaxPool2d((1, 2), (2, 3)),
    "mean": nn.AvgPool2d(3, 2, 1),
    "uneven mean": nn.AvgPool2d((3, 2), (2, 1), (0, 1)),
    "of volumes": nn.MaxPool3d((2, 3, 3), (1, 2, 2), (1, 1, 0)),
    "mean of volumes": nn.AvgPool3d(3, (2, 1, 2), (1, 1, 0)),
}
POOLS_ON_CPU = {"of a stem", "uneven", "with gaps", "uneven mean", "of volumes"}
# Each in planes, every other one channels last, of packs of one type or the other; in planes in 16 bits, too, one of each kind. Means of volumes a CPU's
# eager has in planes of float32 alone.
POOLS = [
    *((pool, torch.float32, "planes") for pool in SOME_POOLS),
    *((pool, torch.bfloat16, "planes") for pool in ("of a stem", "uneven mean", "of volumes")),
    *((pool, (torch.float32, torch.bfloat16)[i % 2], "channels last") for i, pool in enumerate([*SOME_POOLS][:-1:2])),
]  # fmt: skip


@pytest.mark.parametrize("pool, dtype, layout", POOLS, ids=str)
def test_pools_of_any_windows(pool, dtype, layout, device):
    """Windows that overlap, lie apart, begin outside of the image: behind a norm, and of whole numbers, NaN and infinities that meet in them."""
    last = layout == "channels last"
    if device == "cpu" and (pool not in POOLS_ON_CPU or dtype != torch.float32 or last):
        pytest.skip("compiled for one of each kind")
    torch.manual_seed(0)
    size = (3, 7, 9) if "volumes" in pool else (11, 19)
    channels = 12 if last else 5

    x = torch.randn(2, 1 + 2 * last, *size).to(dtype)
    model = Pooled(SOME_POOLS[pool], True, channels)
    if last:
        model.conv, x = type(model.conv)(3, channels, 1), x.contiguous(memory_format=library.channels_last(x))
    run = assert_rule(model.to(dtype), x, label=pool)
    assert run.plan.last == last
    if last:
        return
    with (
        torch.no_grad()
    ):  # where a maximum of v may come before the norm, whose statistics take each position once
        assert_rule(model, x, backward=False, label=pool)
    special = torch.randint(-2, 3, (3, 1, *size)).to(dtype)
    special[0].view(-1)[::3] = -INF
    special[0].view(-1)[: special[0].numel() // 2] = -INF
    special[1].view(-1)[5::11] = NAN
    special[2] = 1.0
    assert_special(Pooled(SOME_POOLS[pool], False).to(dtype), special)


class OverAxis(nn.Module):
    """A softmax and a mean over an axis, behind a norm, with what they are taken off."""

    def __init__(self, axis: int):
        super().__init__()
        self.conv, self.norm, self.axis = nn.Conv2d(1, 5, (1, 2)), nn.InstanceNorm2d(5), axis

    def forward(self, x):
        v = torch.softmax(self.norm(self.conv(x)), self.axis)
        return torch.tanh(v - v.mean(self.axis, keepdim=True))


@pytest.mark.parametrize("axis", [-1, -2])
def test_values_of_the_window_that_is_walked_are_its_own_points(axis, device):
    """No position of it looks them up; a CPU takes whole rows as vectors along them."""
    torch.manual_seed(0)
    run = assert_rule(OverAxis(axis), torch.randn(2, 1, 11, 38), label=str(axis))
    text = run.plan.composed.text
    assert ".window(" in text and "e.spread(" not in text
    assert ("kRows" in text) == (device == "cpu" and axis == -1)


def assert_special(model: nn.Module, x: torch.Tensor) -> None:
    """Values that sums of a few of them keep: equal to eager's, with the gradient of what was chosen."""
    dy = torch.randint(1, 5, copy.deepcopy(model)(x).shape).to(x.dtype)
    run, eager = Run(model, x, dy), reference(model, x, dy, x.dtype)
    for name in ("output", "gradient of x"):
        close = {"rtol": 0.02 if x.dtype == torch.bfloat16 else 1e-6, "atol": 1e-6, "equal_nan": True}
        torch.testing.assert_close(run.results[name], eager[name], **close, msg=lambda m, n=name: f"{n}: {m}")


class Rounding(nn.Module):
    """Sums that meet a bound, or one another, where they are rounded to 16 bits, and only there."""

    def __init__(self, tail: str, middle: float):
        super().__init__()
        self.conv, self.p, self.tail = nn.Conv2d(1, 1, 1), nn.Parameter(torch.full((1, 1, 1), middle)), tail
        with torch.no_grad():
            self.conv.weight.fill_(1.0), self.conv.bias.zero_()

    def forward(self, x):
        x = self.conv(x)
        if self.tail == "two":
            return torch.max(self.p + x, self.p - x)
        if self.tail == "minimum":
            return torch.min(x + self.p, torch.tensor(-0.3))
        if self.tail == "clamp":
            return torch.clamp(x + self.p, min=-0.3)
        x = x + self.p
        return (
            torch.nn.functional.hardtanh(x, -0.3, 0.3)
            if self.tail == "hardtanh"
            else torch.nn.functional.hardswish(x)
        )


OF_16_BITS = {
    "clamp": torch.float16,
    "minimum": torch.bfloat16,
    "hardtanh": torch.float16,
    "hardswish": torch.float16,
    "two": torch.bfloat16,
}


@pytest.mark.parametrize("tail, dtype", OF_16_BITS.items(), ids=str)
def test_ties_of_16_bits(tail, dtype, device):
    """What is compared is rounded as eager's is, and so as often equal: gradients are eager's, which jump there."""
    if device == "cpu" and tail not in ("clamp", "two"):
        pytest.skip("for a CPU compiled for a bound and for two tensors")
    model = Rounding(tail, {"hardswish": 3.0, "two": 2.0}.get(tail, -0.3)).to(dtype)
    x = (torch.arange(-60, 60).view(2, 1, 6, 10) * (torch.finfo(dtype).eps / 40)).to(dtype)
    dy = torch.ones_like(x)
    ours, eager = Run(model, x, dy).results, reference(model, x, dy, dtype)
    assert len(eager["gradient of x"].unique()) > 1
    for name in ("output", "gradient of x"):
        torch.testing.assert_close(ours[name], eager[name], rtol=0, atol=4 * torch.finfo(dtype).eps)


@pytest.mark.parametrize(
    "number, dtype, saving",
    [(52, torch.float32, True), (52, torch.bfloat16, False), (73, torch.float32, False)],
    ids=str,
)
def test_running_statistics(number, dtype, saving, device):
    """They are written in place, as the dtype that they have, by their momentum."""
    _skip_elsewhere(number, device)
    model, x = problem(number)
    (norm,) = [module for module in model.modules() if isinstance(module, (nn.BatchNorm2d, nn.BatchNorm3d))]
    norm.momentum = 0.3
    model, x = model.to(dtype), x.to(dtype)
    eager = copy.deepcopy(model)
    for _ in range(2):
        y = eager(x)
        Run(model, x, torch.randn_like(y) if saving else None)
    close = {"rtol": 1e-5, "atol": 1e-6} if dtype == torch.float32 else {"rtol": 0.02, "atol": 0.02}
    for name, buffer in eager.named_buffers():
        if buffer.is_floating_point():
            torch.testing.assert_close(model.get_buffer(name), buffer, **close)


@pytest.mark.parametrize("training", [True, False], ids=["training", "eval"])
def test_statistics_of_16_bits_are_read_as_they_are(training, device, monkeypatch):
    """Copies of small tensors, back and forth, cost the host more than the convolution."""
    monkeypatch.setattr(launching, "_as_read", None)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU()).bfloat16().train(training)
    x = torch.randn(3, 3, 6, 7).bfloat16()
    run = Run(model, x, torch.randn(3, 4, 4, 5).bfloat16() if training else None)
    eager = copy.deepcopy(model)
    torch.testing.assert_close(run.results["output"], eager(x), rtol=0.02, atol=0.02)


def test_norms_in_eval_mode(device):
    for number in (52, 73) if device == "cuda" else (52,):
        model, x = problem(number)
        model(x)
        assert_rule(model.eval(), x, label=str(number))


def test_results_are_repeatable(device):
    for number in (21, 79, 85) if device == "cuda" else (52, 92):
        model, x = problem(number)
        dy = torch.randn_like(model(x))
        first, second = Run(model, x, dy), Run(model, x, dy)
        assert all(torch.equal(t, second.results[name]) for name, t in first.results.items())


def test_sizes_build_nothing(device):
    """Another batch and image give the same text."""
    model, x = problem(85 if device == "cuda" else 92)
    first = Run(model, x)
    again = assert_rule(model, torch.randn(5, x.shape[1], 23, 18))
    assert again.plan.sizes != first.plan.sizes
    segment, arguments = first.segment, arguments_of(model, first.segment, x)
    (one,) = schedule.requests(Case(segment, arguments, True, x.dtype))
    (other,) = schedule.requests(
        Case(segment, [torch.randn(1, x.shape[1], 40, 30), *arguments[1:]], True, x.dtype)
    )
    assert one == other


class Twice(nn.Module):
    """Parameters that eager's backward reads at its own time, as they were, and both."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(2, 3, 3)
        self.p, self.q, self.r = (nn.Parameter(torch.randn(3, 1, 1)) for _ in range(3))

    def forward(self, x):
        v = torch.tanh(self.conv(x) + self.p) * torch.sigmoid(self.p) * self.q
        return torch.nn.functional.gelu(torch.maximum(v + self.q, self.r) * torch.exp(self.r))


class Windowed(nn.Module):
    """Gradients of sums that are taken apart, and of what windows took, hang on parameters that eager's backward doesn't read."""

    def __init__(self):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(2, 6, 3), nn.GroupNorm(2, 6)
        self.scale = nn.Parameter(torch.randn(6, 1, 1))

    def forward(self, x):
        return torch.nn.functional.max_pool2d(self.norm(self.conv(x)) * self.scale, 2).clamp(-1.0, 1.0)


@pytest.mark.parametrize("kind", [Twice, Windowed])
def test_parameters_that_change_before_backward(kind, device):
    """By `.data`, which autograd does not see."""
    torch.manual_seed(0)
    model = kind().double()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, 0.2)
    x = torch.randn(2, 2, 8, 9, dtype=torch.float64)
    y = model(x.requires_grad_())
    dy = torch.randn_like(y)
    segment = segment_of(model, x)
    arguments = arguments_of(model, segment, x.detach())
    plan = schedule.plan(Case(segment, arguments, True, x.dtype))
    _, *saved = schedule.forward(plan, arguments)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.data.mul_(-0.7)
    found = schedule.backward(plan, dy, arguments, saved, [True] * len(arguments))
    y.backward(dy)
    wanted = {"x": x.grad} | {name: p.grad for name, p in model.named_parameters()}
    for name, gradient in zip(["x", *segment.parameters], found):
        torch.testing.assert_close(gradient, wanted[name], msg=lambda text: f"{name}: {text}")


class Deviating(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.p = nn.Conv2d(2, 6, 3), nn.Parameter(torch.randn(6, 1, 1))

    def forward(self, x):
        return torch.nn.functional.instance_norm(self.conv(x) * self.p).clamp(-2.0, 2.0) * self.p


def test_deviations_are_from_the_mean_as_it_is(device):
    """Of two positions' gradients a norm leaves so little that most of the error is what rounding takes of the mean: half of eager's at most."""
    errors = []
    for seed in range(20):
        torch.manual_seed(seed)
        model, x = Deviating(), torch.randn(3, 2, 3, 4, requires_grad=True)
        segment = segment_of(model, x)
        arguments = arguments_of(model, segment, x.detach())
        plan = schedule.plan(Case(segment, arguments, True, x.dtype))
        _, *saved = schedule.forward(plan, arguments)
        dy = torch.randn(3, 6, 1, 2)
        ours = schedule.backward(plan, dy, arguments, saved, [True] * len(arguments))[0]
        (theirs,) = torch.autograd.grad(model(x), x, dy)
        double = x.detach().double().requires_grad_()
        (exact,) = torch.autograd.grad(model.double()(double), double, dy.double())
        errors.append([((t - exact).norm() / exact.norm()).item() for t in (ours, theirs)])
    of_ours, of_eager = map(sum, zip(*errors))
    assert of_ours < of_eager / 2, (of_ours, of_eager)


class Dropped(nn.Module):
    def __init__(self, p: float):
        super().__init__()
        self.conv = nn.Conv2d(2, 6, 3)
        self.p = nn.Dropout(p)

    def forward(self, x):
        return torch.tanh(self.p(self.p(torch.relu(self.conv(x)) + 1.0)))


@pytest.mark.parametrize("shape", [(3, 2, 9, 10), (2, 2, 7, 7)], ids=str)
def test_dropout_is_drawn_again(shape, device):
    """Backward's mask is forward's; two have masks of their own; they keep what they promise."""
    torch.manual_seed(0)
    model, x = Dropped(0.25), torch.randn(shape)
    segment = segment_of(model, x)

    def run(dy=None, seed=5):
        arguments = arguments_of(model, segment, x, seed)
        plan = schedule.plan(Case(segment, arguments, dy is not None, x.dtype))
        y, *saved = schedule.forward(plan, arguments)
        found = dy is not None and schedule.backward(plan, dy, arguments, saved, [True] * len(arguments))
        return y, found

    y, _ = run()
    assert torch.equal(y, run()[0]) and not torch.equal(y, run(seed=6)[0])
    kept = y != 0
    assert 0.4 < kept.float().mean() < 0.7  # of 0.75²
    draws = [
        [
            lane >> 8
            for counter in range(-(-y.numel() // 4))
            for lane in philox(5 + which * 0x9E3779B97F4A7C15, counter)
        ]
        for which in range(2)
    ]
    drawn = (torch.tensor(draws)[:, : y.numel()] * 2.0**-24 >= 0.25).all(0)
    assert torch.equal(kept, drawn.view_as(kept)), "as its authors publish"
    with torch.no_grad():
        inner = torch.relu(model.conv(x)) + 1.0
    torch.testing.assert_close(y, torch.where(kept, torch.tanh(inner / 0.75**2), 0.0))
    again, gradients = run(torch.ones_like(y))
    assert torch.equal(again, y)
    slope = torch.where(kept & (inner > 1), (1 - y * y) / 0.75**2, 0.0)
    torch.testing.assert_close(gradients[2], slope.sum((0, 2, 3)), rtol=1e-4, atol=1e-4)


def test_exact_order_leaves_operations_where_they_are(monkeypatch):
    monkeypatch.setattr(library, "device_type", lambda x: "cuda")
    model, x = problem(82)
    segment = segment_of(model, x)
    arguments = arguments_of(model, segment, x)
    moved, exact = (
        schedule.requests(Case(segment, arguments, False, x.dtype, e))[0]["source"] for e in (False, True)
    )

    def in_window(text: str) -> str:
        return text[text.index("at.window(") : text.index("at.write(")].split("});")[0]

    assert "tanh" in in_window(exact) and "tanh" not in in_window(moved) and "tanh" in moved


class Taken(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(2, 5, 3, bias=False)

    def forward(self, x):
        return torch.nn.functional.mish(torch.nn.functional.max_pool2d(self.conv(x), 2))


def test_what_windows_take_of_v_is_kept_in_its_type():
    model, x = Taken().bfloat16(), torch.randn(2, 2, 9, 10).bfloat16()
    segment = segment_of(model, x)
    kept = schedule.saved(Case(segment, arguments_of(model, segment, x), True, x.dtype))
    assert {dtype for _, dtype, _ in kept} == {torch.uint8, torch.bfloat16}  # their places, too


def test_no_more_is_kept_than_eager_keeps():
    """But for a few numbers by channel of a sample."""
    for number in level2.PROBLEMS:
        model, x = problem(number)
        kept: dict[int, int] = {}

        def pack(t):
            if not isinstance(t, nn.Parameter) and t.data_ptr() != x.data_ptr():
                kept[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
            return t

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            y = model(x)
        segment = segment_of(model, x)
        ours = schedule.saved(Case(segment, arguments_of(model, segment, x), True, x.dtype))
        own = sum(torch.Size(shape).numel() * dtype.itemsize for shape, dtype, _ in ours if len(shape) > 2)
        # y is there anyway, in eager as in ours.
        theirs = sum(kept.values()) - (kept.get(y.untyped_storage().data_ptr(), 0))
        assert own <= theirs + y.nbytes, (number, own, theirs)


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last], ids=str)
def test_what_is_saved_lies_as_foreseen(layout, device):
    torch.manual_seed(0)
    model, x = Gated(0.0), torch.randn(2, 2, 9, 11).contiguous(memory_format=layout)
    run = Run(model, x, saving=True)
    case = Case(run.segment, arguments_of(model, run.segment, x), True, x.dtype, last=run.plan.last)
    foreseen = [
        torch.empty(shape, dtype=kind, memory_format=lies) for shape, kind, lies in schedule.saved(case)
    ]
    assert [(t.shape, t.stride(), t.dtype) for t in run.saved] == [
        (t.shape, t.stride(), t.dtype) for t in foreseen
    ]
    assert any(library.is_channels_last(t) for t in foreseen if t.dim() == 4) == run.plan.last


def test_each_pass_goes_the_other_way(monkeypatch):
    """Than the one before, and the first one of a launcher down."""
    monkeypatch.setattr(library, "device_type", lambda x: "cuda")
    segment, arguments, _ = Run.asked(*problem(52))
    (request,) = schedule.requests(Case(segment, arguments, True, torch.float32))
    for launcher in request["source"].split("EXPORT void ")[-2:]:
        ways = re.findall(r"load::(up|down)\(parts_\d+\)", launcher)
        assert ways == ["down", "up", "down"][: len(ways)] and len(ways) > 1


@pytest.mark.skipif(NVCC is None, reason="there is no nvcc")
@pytest.mark.parametrize(
    "number, value, architecture, last",
    [
        (52, "float", "90a", 0),
        (92, "float", "90a", 0),
        (85, "bfloat16_t", "90a", 1),
        (52, "bfloat16_t", "90a", 1),
        (92, "float", "90a", 1),
        ("of a stem", "float", "90a", 0),
        ("of volumes", "bfloat16_t", "90a", 0),
        ("in front", "bfloat16_t", "90a", 0),
        ("over an axis", "bfloat16_t", "90a", 0),
    ],
)
def test_kernels_compile_without_spills(number, value, architecture, last, monkeypatch, tmp_path):
    """Those of a model, or of a norm and a pool. Where windows overlap, too, lanes have several channels."""
    monkeypatch.setattr(library, "device_type", lambda x: "cuda")
    if pool := SOME_POOLS.get(number):
        model = Pooled(pool, True)
        model.behind = nn.Identity()
        x = torch.randn(2, 1, *(8,) * (3 if number == "of volumes" else 2))
    elif number == "in front":
        model, x = InFront("norm", 64), torch.randn(2, 64, 8, 8)
    elif number == "over an axis":
        model, x = OverAxis(-1), torch.randn(2, 1, 8, 8)
        model.norm = nn.Identity()
    else:
        model, x = problem(number)
    segment, arguments, of_y = (OfInFront if number == "in front" else Run).asked(model, x)
    (request,) = schedule.requests(Case(segment, arguments, True, x.dtype, last=of_y))
    assert ("planes_of_dy" in request["source"]) == (number == "in front")
    assert not (pool and "kSingle = true" in request["source"])
    source = tmp_path / "tail.cu"
    source.write_text(request["source"])
    command = [
        NVCC,
        "-std=c++17",
        "-O3",
        f"-arch=sm_{architecture}",
        "-cubin",
        "-Xptxas",
        "-v",
        "-I",
        inline_loader.KERNELS,
    ]
    command += [
        f"-DVALUE_T={value}",
        f"-DCHANNELS_LAST={last}",
        "-Werror",
        "all-warnings",
        source,
        "-o",
        tmp_path / "tail.cubin",
    ]
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    spills = [
        line for line in done.stderr.splitlines() if "spill" in line and " 0 bytes spill stores" not in line
    ]
    assert not spills and "registers" in done.stderr


@pytest.mark.parametrize(
    "norm", [nn.BatchNorm2d(8), nn.GroupNorm(4, 8), nn.InstanceNorm2d(8, affine=True)], ids=str
)
def test_gradients_of_parameters_are_read_by_nobody(norm):
    """They may be of 16 bits; what else needs such a sum has it as it was summed."""
    (segment,) = capture(nn.Sequential(nn.Conv2d(3, 8, 3), norm, nn.ReLU()), True, 4).segments
    for on in ("cpu", "cuda"):
        composed = programs.composed_of(segment, programs.Kind(on, True, passes.FEW, False, source.Own()))
        for text in composed.backward.texts:
            read = [name for name, ctype in text.pointers.items() if ctype == "const parameter_t*"]
            assert not [name for name in read if name.startswith("d_")]


@pytest.mark.parametrize(
    "norm", [nn.BatchNorm2d(8), nn.GroupNorm(4, 8), nn.InstanceNorm2d(8, affine=True)], ids=str
)
def test_no_pass_before_sums_over_positions(norm):
    """Small values come as positions read them, copies of parameters are written beside others; of dy there are two sums, whatever parameters
    they are then multiplied by."""
    (segment,) = capture(nn.Sequential(nn.Conv2d(3, 8, 3), norm, nn.ReLU()), True, 4).segments
    composed = programs.composed_of(segment, programs.Kind("cuda", True, passes.FEW, False, source.Own()))
    assert [type(each) for each in composed.forward.passes] == [passes.Planes, passes.Small, passes.Planes]
    assert type(composed.backward.passes[0]) is passes.Planes
    assert len(composed.backward.passes[0].targets) == 2


@pytest.mark.parametrize("saving", [False, True])
def test_arrays_have_names_of_their_own(saving):
    """Also where a sum is wanted by planes and as a whole: one multiplier for all, before and behind a norm."""
    model = level2.PROBLEMS[79].Model(3, 16, 3, (1,), -1.0, 1.0)
    (segment,) = capture(model, True, 5).segments
    for on in ("cpu", "cuda"):
        composed = programs.composed_of(segment, programs.Kind(on, saving, passes.FEW, False, source.Own()))
        for program in filter(None, (composed.forward, composed.backward)):
            names = [array.name for array in program.arrays.values()]
            assert len({*names}) == len(names)
