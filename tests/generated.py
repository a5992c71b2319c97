"""Generated kernels of the schedule `load`, compiled for a CPU or run in the emulation of a GPU, against float64: how they are run and judged."""

from __future__ import annotations

import copy
import shutil
import warnings

import pytest
import torch
from torch import nn

import inline_loader
from benchmarks import level2
from inline_kernels.bench import checks
from inline_kernels.engine import between, library, schedule
from inline_kernels.engine.capture import capture
from inline_kernels.engine.cases import Case
from test_emulated import Emulated, folder, guarded, library_of, pytestmark  # noqa: F401

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
        monkeypatch.setattr(inline_loader, "load_all", lambda requests: [load(**each) for each in requests])
        monkeypatch.setattr(library, "device_type", lambda x: "cuda")
    return request.param


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
        self.saved += [self.y] * self.plan.composed.reads_y
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
