"""The schedule `load` as it is written: generated kernels, compiled for a CPU or run in the emulation of a GPU, against float64.

Every problem of benchmarks/level2.py and random tails, forward and backward, with random parameters and small odd sizes; and what the
kernels promise beside: nothing is written past an array's end, outputs are written whole, results are repeatable to the bit.
"""

from __future__ import annotations

import copy
import shutil
import warnings

import pytest
import torch
from torch import nn

import inline_loader
from benchmarks import level2
from engine_fuzz import random_case
from inline_kernels.bench import checks
from inline_kernels.engine import library, schedule
from inline_kernels.engine.capture import capture
from test_emulated import Emulated, folder, guarded, library_of, pytestmark  # noqa: F401

NVCC = shutil.which("nvcc") or shutil.which("nvcc", path="/usr/local/cuda/bin")
NAN, INF = float("nan"), float("inf")


@pytest.fixture(params=["cuda"])
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
    """A model's segment, run once, forward and backward."""

    def __init__(self, model: nn.Module, x: torch.Tensor, dy: torch.Tensor | None = None):
        self.segment = segment_of(model, x)
        arguments = arguments_of(model, self.segment, x)
        self.plan = schedule.plan(self.segment, arguments, dy is not None, x.dtype)
        self.y, *rest = schedule.forward(self.plan, arguments)
        self.saved = rest[: len(self.plan.composed.saved)]
        self.statistics = [[(self.y, *rest)[i] for i in pair] for pair in self.plan.statistics]
        self.results = {"output": self.y}
        if dy is not None:
            needs = [True] * len(arguments)
            gradients = schedule.backward(self.plan, dy, arguments, self.saved, needs)
            names = ["x", *self.segment.parameters]
            self.results |= {f"gradient of {name}": g for name, g in zip(names, gradients)}


def reference(
    model: nn.Module, x: torch.Tensor, dy: torch.Tensor | None, dtype: torch.dtype
) -> dict[str, torch.Tensor]:
    model, x = copy.deepcopy(model).to(dtype), x.to(dtype).requires_grad_()
    y = model(x)
    found = {"output": y.detach()}
    if dy is not None:
        y.backward(dy.to(dtype))
        found["gradient of x"] = x.grad
        found |= {f"gradient of {name}": p.grad for name, p in model.named_parameters() if p.grad is not None}
    return found


def assert_rule(
    model: nn.Module, x: torch.Tensor, backward: bool = True, label: str = "", own: Run | None = None
) -> Run:
    """At most twice eager's error, by checks.py's limits; NaN where float64 has it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dy = (
            torch.randn_like(reference(model, x, None, torch.float64)["output"]).to(x.dtype)
            if backward
            else None
        )
        exact, eager = reference(model, x, dy, torch.float64), reference(model, x, dy, x.dtype)
    run = own or Run(model, x, dy)
    for name, r in exact.items():
        ours = run.results[name]
        assert ours is not None and ours.shape == r.shape and ours.dtype == x.dtype, name
        error = checks.judged(label, name, r, eager[name], ours, x.dtype)
        assert error.share <= 1, error
        assert torch.equal(ours.isnan(), r.isnan()), f"{name}: NaN where float64 has it"
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


@pytest.mark.parametrize("number", level2.PROBLEMS)
def test_problems(number, device):
    assert_rule(*problem(number), label=str(number))


@pytest.mark.parametrize("seed", [s for s in range(21) if s != 10])
def test_random_tails(seed, device):
    assert_rule(*random_case(seed), label=str(seed))
