"""The schedule `load` as it is written: generated kernels, compiled for a CPU or run in the emulation of a GPU, against float64.

Problems of benchmarks/level2.py and random tails, forward and backward, with random parameters and small odd sizes; and what the
kernels promise beside: nothing is written past an array's end, outputs are written whole, results are repeatable to the bit.
"""

from __future__ import annotations

import copy
import itertools
import re
import shutil
import subprocess
import warnings

import pytest
import torch
from torch import nn

import inline_loader
from benchmarks import level2
from fuzz_engine import random_program
from inline_kernels.bench import checks
from inline_kernels.engine import between, launching, layouts, library, passes, programs, schedule, source
from inline_kernels.engine.capture import capture
from inline_kernels.engine.cases import CTYPES, Case
from test_emulated import Emulated, folder, guarded, library_of, pytestmark  # noqa: F401
from test_engine_cpu import philox

NVCC = shutil.which("nvcc") or shutil.which("nvcc", path="/usr/local/cuda/bin")
NAN, INF = float("nan"), float("inf")
# A build takes seconds: for a CPU are every kind of pass, and each of them in some dtypes.
ON_CPU = 6, 24, 43, 52, 82, 92  # and the four models by themselves
# Of each kind of tail one or two: each function is by itself in test_engine_math.py, each operation in test_engine_ops.py.
NUMBERS = 6, 7, 8, 21, 24, 27, 43, 48, 52, 65, 79, 82, 85, 92
DTYPES_ON_CPU = [(52, torch.float64), (43, torch.float16), (92, torch.bfloat16)]


@pytest.fixture(params=["cuda", "cpu"])
def device(request, guarded, monkeypatch, folder):  # noqa: F811
    """CPU tensors are said to be on it."""
    if request.param == "cuda":

        def load(name, *, source, device, defines):
            kernels = Emulated(source, library_of(source, 800, defines, (), folder))
            kernels.library.emulation_device(4, 163 << 10)
            return kernels

        monkeypatch.setattr(inline_loader, "load", load)
        monkeypatch.setattr(library, "device_type", lambda x: "cuda")
    return request.param


# ------------------------------------------------------------------------------------------------------------- what is run


def attribute(model: nn.Module, name: str):
    for part in name.split("."):
        model = getattr(model, part)
    return model


def segment_of(model: nn.Module, x: torch.Tensor):
    captured = capture(model, model.training, x.dim())
    assert len(captured.segments) == 1
    assert sum(node.op.startswith("call") for node in captured.module.graph.nodes) == 1, captured.segments[
        0
    ].stopped
    return captured.segments[0]


def arguments_of(model: nn.Module, segment, x: torch.Tensor, seed: int = 5) -> list:
    found = [x, *[attribute(model, name).detach() for name in (*segment.parameters, *segment.buffers)]]
    found += [attribute(model, name) for update in segment.updates for name in update[:2]]
    if segment.random:
        found += [torch.tensor([seed]), 0]
    return found + [float(attribute(model, name)) for name in segment.scalars]


class Run:
    """A model's segment, run once, forward and, of a dy, backward; saving: with the kernels of both."""

    def __init__(
        self, model: nn.Module, x: torch.Tensor, dy: torch.Tensor | None = None, saving: bool = False
    ):
        self.segment, arguments, last = self.asked(model, x)
        self.arguments = arguments
        self.plan = schedule.plan(Case(self.segment, arguments, saving or dy is not None, x.dtype, last=last))
        self.y, *self.saved = schedule.forward(self.plan, arguments)
        self.results = {"output": self.y}
        if dy is not None:
            needs = [True] * len(arguments)
            gradients = schedule.backward(self.plan, dy, arguments, self.saved, needs)
            names = ["x", *self.segment.parameters]
            self.results |= {f"gradient of {name}": g for name, g in zip(names, gradients)}

    @staticmethod
    def asked(model: nn.Module, x: torch.Tensor) -> tuple:
        """The segment, its arguments, and whether y comes channels last."""
        segment, last = segment_of(model, x), False
        if library.is_channels_last(x) and library.device_type(x) == "cuda":
            like = copy.deepcopy(model)(x)
            last = like.dim() == x.dim() and library.is_channels_last(like)
        return segment, arguments_of(model, segment, x), last


def reference(
    model: nn.Module, x: torch.Tensor, dy: torch.Tensor | None, dtype: torch.dtype
) -> dict[str, torch.Tensor]:
    model, x = copy.deepcopy(model).to(dtype), x.detach().to(dtype, copy=True).requires_grad_()
    y = model(x)
    found = {"output": y.detach()}
    if dy is not None:
        y.backward(dy.to(dtype))
        found["gradient of x"] = x.grad
        found |= {f"gradient of {name}": p.grad for name, p in model.named_parameters() if p.grad is not None}
    return found


def assert_rule(
    model: nn.Module, x: torch.Tensor, backward: bool = True, label: str = "", kind: type[Run] = Run
) -> Run:
    """At most twice eager's error, by checks.py's limits, in one draw or, where rounding was lucky for eager, in the mean of some; NaN where
    float64 has it. float64 itself is held to a few units of what was summed."""
    run = None

    def errors(number: int, cancelling: bool) -> list[checks.Error]:
        nonlocal run
        torch.manual_seed(number)
        own = torch.randn_like(x) * x.std() + x.mean() if number else x
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            dy = (
                torch.randn_like(reference(model, own, None, torch.float64)["output"]).to(x.dtype)
                if backward
                else None
            )
            exact, eager = reference(model, own, dy, torch.float64), reference(model, own, dy, x.dtype)
        run = kind(model, own, dy)
        found = []
        for name, r in exact.items():
            ours = run.results[name]
            assert ours is not None and ours.shape == r.shape and ours.dtype == x.dtype, name
            assert torch.equal(ours.isnan(), r.isnan()), f"{name}: NaN where float64 has it"
            if x.dtype == torch.float64:
                torch.testing.assert_close(ours, r, rtol=1e-9, atol=1e-9)
            else:
                found.append(checks.judged(label, name, r, eager[name], ours, x.dtype))
        return found

    for error in checks.judged_on_draws(errors):
        assert error.share <= 1, error
    return run


def problem(number: int, dtype=torch.float32) -> tuple[nn.Module, torch.Tensor]:
    """Small, with random parameters, and dropout that keeps all: its mask is not eager's."""
    torch.manual_seed(number)
    known = level2.PROBLEMS[number]
    model = known.small_model().train()
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.3)
    return model.to(dtype), known.small_inputs()[0].to(dtype)


# ------------------------------------------------------------------------------------------------------------------ cases


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


@pytest.mark.parametrize(
    "seed", [seed for seed in range(21) if seed != 17]
)  # it has an extreme over all positions
def test_random_programs(seed, device):
    if device == "cpu" and seed % 5:
        pytest.skip("compiled for a CPU by `make fuzz`")
    model, x = random_program(seed)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert_rule(model, x, label=f"{seed}: {', '.join(model.names)}")


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
# Each in planes and channels last, of packs of one type or the other; in planes in 16 bits, too, one of each kind. Means of volumes a CPU's
# eager has in planes of float32 alone.
POOLS = [
    *((pool, torch.float32, "planes") for pool in SOME_POOLS),
    *((pool, torch.bfloat16, "planes") for pool in ("of a stem", "uneven mean", "of volumes")),
    *((pool, (torch.float32, torch.bfloat16)[i % 2], "channels last") for i, pool in enumerate([*SOME_POOLS][:-1])),
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
        (85, "half_t", "80", 0),
        (52, "float", "90a", 0),
        (92, "double", "90a", 0),
        (92, "float", "90a", 0),
        (85, "bfloat16_t", "90a", 1),
        (52, "bfloat16_t", "90a", 1),
        (92, "float", "90a", 1),
        ("of a stem", "float", "90a", 0),
        ("of a stem", "float", "90a", 1),
        ("of volumes", "bfloat16_t", "90a", 0),
        ("in front", "bfloat16_t", "90a", 0),
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
        assert bool(Run(model, x).plan.layout) == (tail in ("gates", "norm"))


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
    plan.convolve = lambda x, weight: x  # where a product would spread NaN
    y, *saved = schedule.forward(plan, arguments)
    assert plan.last and checks.equal(y, model[1](x)).all() and y.isnan().any()
    dz, *_ = schedule._back(plan, False, True, True, arguments).launch.run(arguments, dy, *saved)
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
            schedule, "_shares", lambda most, planes: max(most, 33) if layout == "turned" else 2
        )
        monkeypatch.setattr(schedule, "_FEW_PARTS", 1 << 20)  # who plans would have fewer
    else:
        monkeypatch.setattr(schedule, "_parts", lambda *given: 40)
    torch.manual_seed(0)
    x = torch.randn(1, 3, *((75, 60) if turned else (9, 20))) + 3.0
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.GroupNorm(4, 8), nn.SiLU())
    if layout == "last":
        model, x = Last("norm", 8, 2), x.contiguous(memory_format=torch.channels_last)
    assert_rule(model, x, label=layout)
    run = assert_rule(model, x, backward=False, label=layout)
    parts = [
        schedule._parts(run.plan, run.plan.composed.forward, i)
        for i, each in enumerate(run.plan.composed.forward.passes)
        if hasattr(each, "level")
    ]
    assert parts[0] == 2 if layout == "turned in two parts" else parts[0] > 32


@pytest.mark.parametrize("parts", [3, 30])
def test_some_parts(parts, device, monkeypatch):
    """A small pass merges them, several a lane, whose means are far apart."""
    if device == "cpu":
        pytest.skip("a GPU's way")
    monkeypatch.setattr(schedule, "_parts", lambda *given: parts)
    torch.manual_seed(0)
    x = torch.randn(2, 3, 64, 62) + torch.linspace(-9, 9, 64)[:, None]
    model = Last("norm", 8, 2)
    run = assert_rule(model, x.contiguous(memory_format=torch.channels_last))
    assert run.plan.last


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


class InFront(nn.Module):
    """Tails of norms, without the convolution that follows."""

    def __init__(self, tail: str, channels: int):
        super().__init__()
        self.tail, self.p = tail, nn.Parameter(torch.randn(channels, 1, 1))
        self.norm = nn.BatchNorm2d(channels) if tail == "batch" else nn.GroupNorm(4, channels)
        self.behind = nn.Identity()

    def forward(self, x):
        y = self.norm(x)
        if self.tail == "across":
            return self.behind(y * torch.sigmoid(y.sum(1, keepdim=True) * self.p))
        if self.tail == "beside":  # v at its own place, behind the norm
            return self.behind(torch.tanh(y * self.p) + x)
        return self.behind(torch.nn.functional.silu(y) * self.p)


class OfInFront(Run):
    """x in planes, and y channels last for a convolution."""

    @staticmethod
    def asked(model, x):
        whole = copy.copy(model)
        vars(whole)["_modules"] = model._modules | {"behind": nn.Conv2d(x.shape[1], 8, 3, dtype=x.dtype)}
        captured = capture(whole, model.training, 4, bare=True)
        vars(whole).update(captured.constants)
        segment = between.laid_out(captured, whole)[0]
        return segment, arguments_of(whole, segment, x), True


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
    monkeypatch.setattr(schedule, "_shares", lambda most, planes: min(most, 2))  # a block has several tiles
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
    made = dict(
        zip(launch.made, launch.run(run.arguments, schedule._lying(dy, torch.channels_last), *run.saved))
    )
    assert not made["dz"].numel()


def test_x_itself_in_planes(device):
    """Without a convolution behind it, of x that stands anywhere: nothing is turned there or back."""
    torch.manual_seed(0)
    model, x = InFront("norm", 16), torch.randn(2 * 16 * 45 + 1)[1:].view(2, 16, 5, 9)
    segment, arguments, _ = OfInFront.asked(model, x)
    plan = schedule.plan(Case(segment.with_result(None, False, (), False), arguments, True, x.dtype))
    assert x.data_ptr() % 16 and plan.convolve(*arguments[:2]).data_ptr() % 16 == 0
    y, *saved = schedule.forward(plan, arguments)
    dy = torch.randn(x.shape)
    wanted = reference(model, x, dy, torch.float32)
    dx = schedule.backward(plan, dy, arguments, saved, [True] * len(arguments))[0]
    assert not plan.turns.launches
    torch.testing.assert_close(y, wanted["output"])
    torch.testing.assert_close(dx, wanted["gradient of x"], rtol=1e-4, atol=1e-5)


class Gated(nn.Module):
    """A gradient that is zero in whole channels, of which some share a group with others, in front of sums over positions; with a dropout, that
    drops nothing but by a rare chance."""

    def __init__(self, probability: float):
        super().__init__()
        self.conv, self.norm, self.drop = nn.Conv2d(2, 8, 3), nn.GroupNorm(4, 8), nn.Dropout(probability)
        with torch.no_grad():
            self.norm.bias[[0, 1, 2, 7]] = -100.0

    def forward(self, x):
        return self.drop(torch.relu(self.norm(self.conv(x))))


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


@pytest.mark.parametrize(
    "norm", [nn.BatchNorm2d(8), nn.GroupNorm(4, 8), nn.InstanceNorm2d(8, affine=True)], ids=str
)
def test_gradients_of_parameters_are_read_by_nobody(norm):
    """They may be of 16 bits; what else needs such a sum has it as it was summed."""
    (segment,) = capture(nn.Sequential(nn.Conv2d(3, 8, 3), norm, nn.ReLU()), True, 4).segments
    for device in ("cpu", "cuda"):
        composed = programs.composed_of(segment, programs.Kind(device, True, True, False, source.Own()))
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
    composed = programs.composed_of(segment, programs.Kind("cuda", True, True, False, source.Own()))
    assert [type(each) for each in composed.forward.passes] == [passes.Planes, passes.Small, passes.Planes]
    assert type(composed.backward.passes[0]) is passes.Planes
    assert len(composed.backward.passes[0].targets) == 2


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
    for size in [*sizes, (2, 9, 1030), (1, 1030, 9), (1, 3, 4500), (1, 4500, 2), (0, 3, 4), (2, 0, 4)]:
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


@pytest.mark.parametrize("saving", [False, True])
def test_arrays_have_names_of_their_own(saving):
    """Also where a sum is wanted by planes and as a whole: one multiplier for all, before and behind a norm."""
    model = level2.PROBLEMS[79].Model(3, 16, 3, (1,), -1.0, 1.0)
    (segment,) = capture(model, True, 5).segments
    for device in ("cpu", "cuda"):
        composed = programs.composed_of(segment, programs.Kind(device, saving, True, False, source.Own()))
        for program in filter(None, (composed.forward, composed.backward)):
            names = [array.name for array in program.arrays.values()]
            assert len({*names}) == len(names)
