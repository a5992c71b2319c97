"""Models become segments: the 33 problems and real models' blocks, forward and every gradient against autograd; and what is not captured."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from benchmarks.level2 import PROBLEMS
from inline_kernels.engine.capture import capture, sizes
from reference_graph import Reference


def randomised(model: nn.Module) -> nn.Module:
    """In float64, its parameters away from their initial values."""
    model = model.double()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn_like(p) * 0.3)
    return model


class Masks:
    """The same dropout masks for eager and the reference."""

    def __init__(self, seed: int = 0):
        self.seed = seed
        self.restart()

    def restart(self):
        self.generator = torch.Generator().manual_seed(self.seed)

    def __call__(self, shape):
        return (torch.rand(shape, generator=self.generator) > 0.3).double()

    def dropout(self, x, p=0.5, training=True, inplace=False):
        return x * (self(x.shape) * (1 / (1 - p))) if training and p else x


def check(model: nn.Module, *inputs: torch.Tensor, monkeypatch=None):
    """Result, gradients of inputs and parameters, and running statistics: captured as eager. Returns what was captured."""
    captured = capture(model, model.training, inputs[0].dim())
    masks, twin = Masks(), copy.deepcopy(model)
    found = []
    for run, own in ((model, model), (Reference(twin, captured, masks).run, twin)):
        masks.restart()
        given = [x.clone().requires_grad_() for x in inputs]
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(F, "dropout", masks.dropout)
            y = run(*given)
        ys = y if isinstance(y, (tuple, list)) else [y]
        torch.manual_seed(1)
        torch.autograd.backward(ys, [torch.randn_like(each) for each in ys])
        gradients = {n: p.grad for n, p in own.named_parameters()} | {
            f"x{i}": x.grad for i, x in enumerate(given)
        }
        statistics = {n: b for n, b in own.named_buffers() if b.is_floating_point()}
        found.append({f"y{i}": each for i, each in enumerate(ys)} | gradients | statistics)
    want, got = found
    for name, value in want.items():
        if value is None:
            assert got[name] is None, name
            continue
        # Biases before norms have gradients of zero, and rounding.
        scale = max(value.norm().item(), 1e-3)
        assert (got[name] - value).norm().item() < 1e-9 * scale, name
    return captured


@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("number", PROBLEMS)
def test_the_33(number, training):
    torch.manual_seed(number)
    problem = PROBLEMS[number]
    model = randomised(problem.small_model()).train(training)
    captured = check(model, torch.randn(problem.small_input_shape, dtype=torch.float64))
    (segment,) = captured.segments
    calls = [node.op for node in captured.module.graph.nodes]
    assert calls == ["placeholder", "call_function", "output"], "all of the model is the segment"
    x, weight = problem.small_input_shape, model.conv.weight.shape
    with torch.device("meta"):
        z = type(model.conv)(*problem.small_init_inputs[:3], padding=model.conv.padding)(torch.empty(x))
    assert sizes(segment, x, weight)["e"] == z.shape[2:]
