"""Composed sources: which formula each is for, sizes that nothing has to be built for, and what runs when a model computes something else."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import models
import numerics
from benchmarks import level2
from inline_kernels.engine import capture, composed, tiling
from inline_kernels.engine.cases import Case
from inline_kernels.engine.fuse import fuse, structure_of
from inline_kernels.engine.variants import fused
from numerics import DROPOUT, INSTANCE_NORM, MIN_ADD, NAMES, POOL
from test_emulated import emulated, folder, gpu, guarded, remembers_nothing, small  # noqa: F401

COMPOSED = [name for name in NAMES if "fused" in models.PROBLEMS[name].variants]
every_source = pytest.mark.parametrize("name", COMPOSED)
SAME = {
    MIN_ADD: [(64, 128, (3, 2), 0.5, (1,), 2.0), (3, 5, 1, 2, (5, 1, 1), 3), (3, 1, 1, 2.0, (), 3.0)],
    INSTANCE_NORM: [(3, 20, 3, (1,), -1.0, 1.0), (3, 20, 2, (), -1, 1)],
    DROPOUT: [(3, 12, 3, 4, -0.3, 1.0, 0.5), (3, 12, 3, 1, 0, 1, 0.2)],
    POOL: [(5, 24, 3, 4, (1,), (2, 3), -0.5, 1.0), (5, 24, 3, 8, (), 2, 0.5, -0.5)],
}


def segment_of(model: nn.Module, dimensions: int):
    (segment,) = capture.capture(model, model.training, dimensions).segments
    return segment


@every_source
@pytest.mark.parametrize("training", [True, False])
def test_the_row_of_a_source(name, training):
    """What kernels/composed.json has to say of the model that a source was written for; and whatever its sizes are."""
    problem = models.PROBLEMS[name]
    segment = segment_of(problem.Model(*problem.init_inputs).train(training), len(problem.input_shape))
    text, tensors, holes = composed.formula(segment)
    rows = {each["digest"]: each for each in composed.known()[name]["formulas"]}
    assert composed.digest_of(text) in rows, (composed.digest_of(text), tensors, holes)
    names = rows[composed.digest_of(text)]["names"].split()
    paths = [each.removeprefix("conv.") if each == "conv.weight" else each for each in tensors]
    assert names[: len(tensors)] == [path.replace(".", "_") for path in paths]
    assert len(names) == len(tensors) + len(holes)
    given = [hole.name for hole in holes if hole.name]
    assert [each for each in names[len(tensors) :] if each in given] == given
    for arguments in SAME[name]:
        own = segment_of(problem.Model(*arguments).train(training), len(problem.input_shape))
        assert composed.written_for(own).name == name


class Relu(nn.Module):
    """31 with relu in the place of min."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(16, 16, 3)
        self.bias = nn.Parameter(torch.randn(16, 1, 1))

    def forward(self, x):
        return (torch.relu(self.conv(x)) + self.bias) * 2.0


class Gelu(models.Conv2dGroupNormScaleMaxPoolClamp):
    """85 with GELU behind its scale."""

    def forward(self, x):
        x = nn.functional.gelu(self.group_norm(self.conv(x)) * self.scale)
        return torch.clamp(self.maxpool(x), self.clamp_min, self.clamp_max)


class Stranger(nn.Module):
    """31 in other words."""

    def __init__(self):
        super().__init__()
        self.layer, self.offset = nn.Conv2d(5, 20, 3), nn.Parameter(torch.randn(20, 1, 1))

    def forward(self, x):
        y = self.layer(x)
        return (torch.min(y, torch.tensor(0.1, dtype=y.dtype, device=y.device)) + self.offset) * 2.0


class OfAnyType(nn.Module):
    """31, or 83, whose number is a tensor of float32 or of v's type."""

    def __init__(self, name, as_v):
        super().__init__()
        problem = models.PROBLEMS[name]
        self.own, self.as_v, self.bound = problem.Model(*problem.init_inputs), as_v, 0.1

    def least(self, y):
        as_y = {"dtype": y.dtype, "device": y.device} if self.as_v else {}
        return torch.min(y, torch.tensor(self.bound, **as_y))

    def forward(self, x):
        own = self.own
        if isinstance(own, models.PROBLEMS[MIN_ADD].Model):
            return (self.least(own.conv(x)) + own.bias) * own.scaling_factor
        y = self.least(own.norm(own.conv(x)))
        return own.dropout(torch.clamp(y, min=self.bound, max=own.max_value))


@pytest.mark.parametrize("as_v", [False, True])
@pytest.mark.parametrize("name", [MIN_ADD, DROPOUT])
def test_a_number_that_is_a_tensor_of_any_type(name, as_v):
    segment = segment_of(OfAnyType(name, as_v), len(models.PROBLEMS[name].input_shape))
    assert composed.written_for(segment).name == name


@pytest.mark.parametrize("number, name", [(31, MIN_ADD), (79, INSTANCE_NORM), (83, DROPOUT), (85, POOL)])
def test_kernelbenchs_own_words(number, name):
    problem = level2.PROBLEMS[number]
    for training in (True, False):
        segment = segment_of(problem.model().train(training), len(problem.input_shape))
        assert composed.written_for(segment).name == name


def test_windows_that_overlap_are_another_formula():
    problem = level2.PROBLEMS[85]
    model = problem.model()
    model.maxpool.stride = 2
    assert composed.written_for(segment_of(model, len(problem.input_shape))) is None


OTHERS = {
    "relu": (Relu, (2, 16, 9, 10)),
    "gelu": (lambda: Gelu(5, 16, 3, 4, (16, 1, 1), (2, 3), -0.5, 1.0), (3, 5, 9, 13)),
}


@pytest.mark.parametrize("which", OTHERS)
def test_another_formula_runs_otherwise(which, gpu):  # noqa: F811
    """Right, forward and backward; and plan says so."""
    make, shape = OTHERS[which]
    torch.manual_seed(0)
    model, x = make().eval(), torch.randn(shape)
    assert composed.written_for(segment_of(model, 4)) is None
    if which == "relu":  # GELU is not in the emulation's words
        gpu()
    fast = fuse(model)
    assert [each.runs for each in fast.plan(x)] == ["load"]
    exact = numerics.results(copy.deepcopy(model).double(), x.double())
    for key, value in numerics.results(fast, x).items():
        torch.testing.assert_close(value.double(), exact[key], rtol=1e-4, atol=1e-4, msg=key)
    new = fused(type(model)).from_eager(model)
    new.variant = "fused"
    with pytest.raises(
        RuntimeError, match="variant 'fused' can't run: there are no fused kernels for this formula"
    ):
        new(x)


def test_a_strangers_class_with_the_formula(gpu):  # noqa: F811
    torch.manual_seed(0)
    model, x = Stranger(), torch.randn(3, 5, 11, 13)
    gpu()
    fast = fuse(model)
    assert [tuple(each)[:2] for each in fast.plan(x)] == [("layer", "fused")]
    exact = numerics.results(copy.deepcopy(model).double(), x.double())
    for key, value in numerics.results(fast, x).items():
        torch.testing.assert_close(value.double(), exact[key], rtol=1e-4, atol=1e-3, msg=key)


@every_source
def test_sizes_are_those_of_the_functions(name, gpu):  # noqa: F811
    """What Python reads of an expression is what the compiled one gives; kernels refuse other sizes."""
    model, x = small(name)
    gpu()
    (part,) = structure_of(numerics.twin_of(model.train(), "fused"), (x,), {}).parts
    drawn = (torch.empty(0, dtype=torch.int64), 0) if part.segment.random else ()
    arguments = part.shared.arguments(x, *part.tensors(), *drawn, *part.numbers(), 0)
    call = composed.Call(Case(part.segment, arguments, True, x.dtype))
    launchers = [name for name, each in call.launchers.items() if each.asked and name.endswith("_size")]
    kernels = composed.inline_loader.load(**call.request(launchers, call.defines("forward_saving")))
    of = {"x": x, "y": x.new_empty(call.shape), "dy": x.new_empty(call.shape), "weight": part.tensors()[0]}
    for each in launchers:
        given = [
            of.get(p.name, call.number(p.name) if p.name not in of else 0)
            for p in call.launchers[each].parameters
        ]
        assert getattr(kernels, each)(*given) == call.size(each.removesuffix("_size")), each


@every_source
def test_obstacles_are_the_mainloops(name, gpu):  # noqa: F811
    """An older GPU has none of them; plan says why, and the library's convolution serves."""
    model, x = small(name)
    gpu(architecture=700)
    assert tiling.capability(x) < (8, 0)
    new = numerics.twin_of(model, "auto")
    assert new.plan(x).variant == "epilogue" and "capability 8.0" in new.plan(x).reason
