"""`fuse(model)` does what the model does, with kernels and where there is no compiler."""

from __future__ import annotations

import collections
import copy
import dataclasses
import functools
import json
import os
import subprocess
import sys
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import inline_loader
import numerics
from engine_stand_in import stand_in  # noqa: F401
from fused_pairs import SEGMENTS, Dropping, Pointwise, Residual, assert_same, every_model, here, pair, runs  # noqa: F401
from inline_kernels.engine import part as parts
from inline_kernels.engine import schedule
from inline_kernels.engine.fuse import fuse
from loading import ROOT

# ------------------------------------------------------------------------------------------------------------- what it returns


@every_model
def test_is_the_model(kind):
    model = kind()
    fast = fuse(model)
    assert isinstance(fast, kind) and type(fast) is not kind and type(fast) is type(fuse(kind()))
    assert type(model) is kind and "forward" not in vars(model)
    for name in ("named_parameters", "named_buffers", "named_children"):
        ours, theirs = dict(getattr(fast, name)()), dict(getattr(model, name)())
        assert list(ours) == list(theirs) and all(ours[key] is theirs[key] for key in theirs)
    assert list(fast.state_dict()) == list(model.state_dict())
    assert fast.training is model.training
    assert type(fuse(fast)) is type(fast)
    assert fast.forward.__doc__ == model.forward.__doc__


@every_model
@pytest.mark.parametrize("training", [True, False])
def test_computes_what_the_model_does(kind, training):
    model, fast, x = pair(kind, called=False, training=training)
    if kind is Dropping and training:
        y = fast(x)
        assert 0.3 < (y == 0).float().mean() < 0.7
        return
    assert runs(fast, x) == ["load"] * SEGMENTS[kind]
    assert_same(fast, model, x)
    assert_same(fast, model, torch.cat([x, x]))
    assert_same(fast, model, x[..., 1:, 1:])


NORMS = {
    "instance": lambda c: nn.InstanceNorm2d(c),
    "affine instance": lambda c: nn.InstanceNorm2d(c, affine=True),
    "group": lambda c: nn.GroupNorm(2, c),
    "batch": lambda c: nn.BatchNorm2d(c),
    "layer": lambda c: nn.LayerNorm(c),
}


class Wide(nn.Module):
    """A norm that may know how many channels there are."""

    def __init__(self, kind: str, channels: int):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, channels, 3), NORMS[kind](channels)

    def forward(self, x):
        v = self.conv(x)
        if isinstance(self.norm, nn.LayerNorm):
            return F.gelu(self.norm(v.permute(0, 2, 3, 1)).permute(0, 3, 1, 2))
        return F.gelu(self.norm(v))


@pytest.mark.parametrize("kind", NORMS)
def test_widths_beside_each_other(kind):
    """Equal models but for their channels, in one process."""
    x = torch.randn(2, 3, 9, 8)
    for channels in (4, 6):
        model = Wide(kind, channels)
        fast = fuse(copy.deepcopy(model))
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert runs(fast, x) == ["load"]
            assert_same(fast, model, x)


# ------------------------------------------------------------------------------------------------- what a forward asks of values


def doubled(x):
    return x * 2 if isinstance(x, torch.Tensor) else x


def swallowing(m, x):
    try:
        return 2.0 if isinstance(m.hooked(x), torch.Tensor) else 1.0
    except Exception:
        return 3.0


ASKED = {
    "is_tensor": lambda m, x: F.relu(m.conv(x * 2 if torch.is_tensor(x) else x)),
    "isinstance, elsewhere": lambda m, x: F.relu(m.conv(doubled(x))),
    "of a size": lambda m, x: F.relu(m.conv(x * 2 if isinstance(x.shape[0], int) else x)),
    "of a result": lambda m, x: F.relu(doubled(m.conv(x))),
    "of results": lambda m, x: F.relu(m.conv(x * 2 if isinstance(x.split(1, 1), tuple) else x)),
    "of a parameter": lambda m, x: F.relu(m.conv(x * 2 if isinstance(m.conv.weight, nn.Parameter) else x)),
    "hasattr": lambda m, x: F.relu(m.conv(x * 2 if hasattr(x, "ndim") and not hasattr(x, "keys") else x)),
    "axes": lambda m, x: F.relu(m.conv(x * 2 if x.ndim == x.dim() == len(x.shape) == 4 else x)),
    "axes behind": lambda m, x: F.relu(m.conv(x)).mean((2, 3) if m.conv(x).ndim == 4 else 1),
}


class Asking(nn.Module):
    def __init__(self, asks):
        super().__init__()
        self.conv, self.act, self.asks = nn.Conv2d(3, 4, 3), nn.ReLU(), asks
        self.act.register_forward_hook(lambda *_: None)

    def hooked(self, x):
        return self.act(x)

    def forward(self, x):
        return self.asks(self, x)


@pytest.mark.parametrize("asks", ASKED.values(), ids=ASKED)
def test_questions_are_answered_as_for_tensors(asks):
    model, x = Asking(asks), torch.randn(2, 3, 9, 8)
    fast = fuse(copy.deepcopy(model))
    assert "load" in runs(fast, x)
    assert_same(fast, model, x)


def matching(x):
    match x:
        case torch.Tensor():
            return x * 2
    return x


def tensors():
    return [torch.Tensor]


@functools.singledispatch
def dispatched(x):
    return x


@dispatched.register
def _(x: torch.Tensor):
    return x * 2


LEFT = {
    "what proxies have": (
        lambda m, x: F.relu(m.conv(x if hasattr(x, "node") else x * 2)),
        "asks for node",
    ),
    "singledispatch": (lambda m, x: F.relu(m.conv(dispatched(x))), "can't be followed"),
    "of a class that is computed": (
        lambda m, x: F.relu(m.conv(x * 2 if isinstance(x, tensors()[0]) else x)),
        "can't be followed",
    ),
    "patterns": (lambda m, x: F.relu(m.conv(matching(x))), "matches patterns"),
    "type": (lambda m, x: F.relu(m.conv(x * 2 if type(x) is torch.Tensor else x)), "compares type"),
    "axes that drop out": (
        lambda m, x: F.relu(m.conv(x.squeeze()) * (2 if x.squeeze().ndim == 3 else 1)),
        "",
    ),
    "of what a module with hooks gives": (
        lambda m, x: F.relu(m.conv(doubled(m.hooked(x)))),
        "isn't known beforehand",
    ),
    "__class__": (
        lambda m, x: F.relu(m.conv(x * 2 if x.__class__ is torch.Tensor else x)),
        "reads __class__",
    ),
    "callable": (lambda m, x: F.relu(m.conv(x if callable(x) else x * 2)), "names callable"),
    "dtype": (lambda m, x: F.relu(m.conv(x * 2 if x.dtype is torch.float32 else x)), "compares dtypes"),
    "an old type": (
        lambda m, x: F.relu(m.conv(x * 2 if isinstance(x, torch.FloatTensor) else x)),
        "can't be followed",
    ),
    "all": (
        lambda m, x: F.relu(m.conv(x * 2 if all(map(isinstance, [x], [torch.Tensor])) else x)),
        "names isinstance",
    ),
    "a mark": (lambda m, x: F.relu(m.conv(x * 2 if not hasattr(x, "mark") else x)), "has the attribute mark"),
    "swallowed": (lambda m, x: F.relu(m.conv(x * swallowing(m, x))), "isn't known beforehand"),
}


@pytest.mark.parametrize("name", LEFT)
def test_questions_without_an_answer_leave_it_eager(name):
    asks, reason = LEFT[name]
    model = Asking(asks)
    fast = fuse(copy.deepcopy(model))
    for batch in (2, 1):
        assert_same(fast, model, torch.randn(batch, 3, 9, 8))
    assert reason in fast.plan(torch.randn(2, 3, 9, 8))[0].reason


def test_nothing_is_captured_while_a_profiler_watches():
    """Which is there afterwards; then the model is captured."""
    model, x, seen = Asking(ASKED["is_tensor"]), torch.randn(2, 3, 9, 8), []
    fast = fuse(copy.deepcopy(model))
    look = lambda frame, event, _: seen.append(event)  # noqa: E731
    sys.setprofile(look)
    try:
        (plan,) = fast.plan(x)
        y = fast(x)
        assert sys.getprofile() is look and seen
    finally:
        sys.setprofile(None)
    assert plan.runs == "eager" and "a profiler watches" in plan.reason
    torch.testing.assert_close(y, model(x))
    assert "load" in runs(fast, x)


class Conditioned(nn.Module):
    """A residual block of a diffusion model: what conditions it may be a tensor or a number, a batch's or one for all."""

    def __init__(self):
        super().__init__()
        self.conv, self.other, self.project = (
            nn.Conv2d(3, 4, 3, padding=1),
            nn.Conv2d(4, 3, 1),
            nn.Linear(5, 4),
        )

    def forward(self, x, t):
        v = self.conv(x)
        if torch.is_tensor(t):
            v = v + self.project(t)[:, :, None, None] if t.ndim == 2 else v * t
        else:
            v = v * t
        return x + self.other(F.silu(v))


class NormInFloat32(nn.GroupNorm):
    def forward(self, x):
        return super().forward(x.float()).type(x.dtype)


class Told(nn.Module):
    """A residual block as diffusion models have it: parts of sequences, the convolution's type for what a time's layer gives, axes that are counted."""

    def __init__(self, channels: int, by_scale: bool):
        super().__init__()
        convolutions = [nn.Conv2d(channels, channels, 3, padding=1) for _ in range(2)]
        self.first = nn.Sequential(NormInFloat32(4, channels), nn.SiLU(), convolutions[0])
        self.time = nn.Sequential(nn.SiLU(), nn.Linear(6, channels * (1 + by_scale)))
        self.last = nn.Sequential(NormInFloat32(4, channels), nn.SiLU(), nn.Dropout(0.0), convolutions[1])
        self.by_scale = by_scale

    def forward(self, x, time):
        h = self.first[-1](self.first[:-1](x))
        told = self.time(time).type(h.dtype)
        while len(told.shape) < len(h.shape):
            told = told[..., None]
        if not self.by_scale:
            return x + self.last(h + told)
        scale, shift = torch.chunk(told, 2, dim=1)
        return x + self.last[1:](self.last[0](h) * (1 + scale) + shift)


class Diffusing(nn.Module):
    def __init__(self):
        super().__init__()
        self.inputs, self.one, self.other = nn.Conv2d(3, 8, 3), Told(8, True), Told(8, False)

    def forward(self, x, time=None, label=None):
        h = self.other(self.one(self.inputs(x), time), time)
        return h if label is None else h * label[:, :, None, None]


@pytest.mark.parametrize("kind", ["float32", "autocast", "bfloat16"])
def test_types_that_are_asked_and_parts_of_sequences(kind):
    model = Diffusing()
    x, time, label = torch.randn(2, 3, 9, 10), torch.randn(2, 6), torch.randn(2, 8)
    if kind == "bfloat16":
        x, time, label = x.bfloat16(), time.bfloat16(), label.bfloat16()
        [each.bfloat16() for each in model.modules() if isinstance(each, (nn.Conv2d, nn.Linear))]
    fast = fuse(copy.deepcopy(model))
    calls = [((x, time), {}), ((x, time, label), {}), ((x,), dict(time=time)), ((x, time), dict(label=label)), ((x,), dict(label=label, time=time))]  # fmt: skip
    with torch.autocast("cpu", torch.bfloat16, enabled=kind == "autocast"):
        for given, named in [*calls, ((x, time, None), {})]:
            ours, theirs = fast(*given, **named), model(*given, **named)
            close = dict(rtol=2e-2, atol=2e-2) if kind != "float32" else {}
            torch.testing.assert_close(ours, theirs, **close)
            assert [p.runs for p in fast.plan(*given, **named)].count("load") == 4, str(
                fast.plan(*given, **named)
            )
            of = [
                torch.autograd.grad(y.float().square().mean(), m.parameters())
                for y, m in ((ours, fast), (theirs, model))
            ]
            torch.testing.assert_close(*of, **close)


def test_a_type_is_eagers_under_autocast():
    class Asking(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = nn.Conv2d(3, 4, 3)

        def forward(self, x, t):
            h = self.conv(x)
            t = t.type(h.dtype)
            return F.relu(h + t[:, :, None, None]), t

    model, x, t = Asking(), torch.randn(2, 3, 9, 8), torch.randn(2, 4)
    fast = fuse(model)
    for enabled in (False, True, False):
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            ours, theirs = fast(x, t), model(x, t)
            assert "load" in [plan.runs for plan in fast.plan(x, t)]
        assert (
            [y.dtype for y in ours]
            == [y.dtype for y in theirs]
            == 2 * [(torch.float32, torch.bfloat16)[enabled]]
        )


def test_other_inputs_have_shapes():
    model = Conditioned()
    fast = fuse(copy.deepcopy(model))
    given = [
        (1, torch.randn(1, 5)),
        (4, torch.randn(4, 5)),
        (4, torch.randn(1, 5)),
        (2, torch.rand(2, 1, 6, 7)),
        (2, torch.rand(1, 6, 7)),
    ]
    for batch, t in [*given, (2, 0.5), (2, 3)]:
        x = torch.randn(batch, 3, 6, 7)
        torch.testing.assert_close(fast(x, t), model(x, t))
        torch.testing.assert_close(fast(x, t=t), model(x, t=t))
        if isinstance(t, torch.Tensor) and t.dim() in (2, 4) and len(t) == batch and t.shape[-1] != 7:
            assert [plan.runs for plan in fast.plan(x, t)] == ["load", "load"], str(fast.plan(x, t))


def test_inputs_without_a_shape_or_with_numbers_of_their_own():
    class Given(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = nn.Conv2d(3, 4, 3)

        def forward(self, x, t):
            return F.relu(self.conv(x.dequantize() if x.is_quantized else x))

    model, x = Given(), torch.randn(2, 3, 9, 8)
    fast, quantized = fuse(model), torch.quantize_per_tensor(x, 0.1, 0, torch.quint8)
    for given in (
        (x, torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])),
        (x, quantized),
        (quantized, x),
    ):
        torch.testing.assert_close(fast(*given), model(*given))


KINDS = {
    "keywords": (
        lambda m, x, a, b: m.conv(x) * (2 if isinstance(a, torch.Tensor) else 1),
        [dict(a=None, b=torch.ones(1)), dict(b=None, a=torch.ones(1))],
    ),
    "x twice": (
        lambda m, x, a, b: m.conv(x) * (2 if isinstance(a, torch.Tensor) else 1),
        [dict(a="x", b=None), dict(a=None, b="x")],
    ),
    "axes": (
        lambda m, x, a, b: m.conv(x) * (2 if a.ndim == 1 else 1),
        [dict(a=torch.ones(5), b=1), dict(a=torch.ones(2, 5), b=1)],
    ),
    "dtypes": (
        lambda m, x, a, b: m.conv(x) * (2 if x[a].ndim == 5 else 1),
        [dict(a=torch.zeros(2, 3).long(), b=1), dict(a=torch.ones(2, 3).bool(), b=1)],
    ),
    "numbers": (
        lambda m, x, a, b: m.conv(x) * (2 if x.flatten(a).ndim == 2 else 1),
        [dict(a=1, b=1), dict(a=2, b=1)],
    ),
    "None": (
        lambda m, x, a, b: m.conv(x) if a is None else m.conv(x) + a,
        [dict(a=None, b=1), dict(a=torch.ones(1), b=1)],
    ),
}


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_known_of_one_call_is_not_taken_for_another(kind):
    compute, calls = KINDS[kind]

    class Computing(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = nn.Conv2d(3, 4, 3)

        def forward(self, x, a, b):
            return F.relu(compute(self, x, a, b))

    model, x = Computing(), torch.randn(2, 3, 9, 8)
    fast = fuse(model)
    for given in calls:
        given = {name: x if isinstance(each, str) else each for name, each in given.items()}
        torch.testing.assert_close(fast(x, **given), model(x, **given))


@dataclasses.dataclass
class Result(collections.OrderedDict):
    y: torch.Tensor
    twice: torch.Tensor | None = None


@pytest.mark.parametrize(
    "make", [lambda y: Result(y, y * 2), lambda y: collections.OrderedDict(y=y, n=1), lambda y: {"y": [y]}]
)
def test_results_are_of_their_class(make):
    model, x = Asking(lambda m, x: make(F.relu(m.conv(x)))), torch.randn(2, 3, 9, 8)
    fast = fuse(model)
    assert runs(fast, x) == ["load"]
    ours, theirs = fast(x), model(x)
    assert (
        type(ours) is type(theirs) and vars(ours).keys() == vars(theirs).keys()
        if hasattr(theirs, "__dict__")
        else True
    )
    torch.testing.assert_close(
        *[[*(vars(each) or each).values()] if isinstance(each, Result) else each for each in (ours, theirs)]
    )


def test_filters_that_are_computed_are_left_alone():
    def standardised(m, x):
        weight = m.conv.weight
        return F.relu(m.other(F.conv2d(x, (weight - weight.mean()) / weight.std())))

    model, x = Asking(standardised), torch.randn(2, 3, 9, 8)
    model.other = nn.Conv2d(4, 5, 3)
    fast = fuse(copy.deepcopy(model))
    assert [plan.reason for plan in fast.plan(x) if plan.runs == "eager"] == ["its weight is computed"]
    assert_same(fast, model, x)


def test_says_what_runs():
    _, fast, x = pair(Residual)
    plans = fast.plan(x)
    assert [each.segment for each in plans] == ["stem.0", "blocks.0.conv", "blocks.1.conv", "blocks.2.conv"]
    assert str(plans).count("\n") == 3 and str(plans).startswith("stem.0: load: ")
    assert json.loads(fast.plan(x, json=True))[1] == {
        "segment": "blocks.0.conv",
        "runs": "load",
        "reason": plans[1].reason,
    }
    with pytest.raises(IndexError, match="expected a segment below 4, got 4"):
        fast.source(x, segment=4)


def test_model_that_is_no_eager_module():
    with pytest.raises(TypeError, match="expected a torch.nn.Module, got a function"):
        fuse(F.relu)
    with pytest.raises(TypeError, match="expected an eager module, got a OptimizedModule"):
        fuse(torch.compile(Pointwise(), backend="eager"))


@pytest.mark.filterwarnings("ignore:.*lazy.*")
def test_lazy_parts():
    """Eager runs until they have parameters; a lazy module itself could not become another class."""
    model, x = (
        nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Flatten(), nn.LazyLinear(3)),
        torch.randn(2, 3, 9, 9),
    )
    fast = fuse(model, example_inputs=x)
    assert str(fast.plan(x)) == "eager: 3 gets its parameters in its first call"
    torch.testing.assert_close(fast(x), model(x))
    assert fast.plan(x)[0].runs != "eager"
    torch.testing.assert_close(fast(x), model(x), rtol=1e-4, atol=1e-5)
    with pytest.raises(TypeError, match="expected a module with parameters, got a LazyConv2d"):
        fuse(nn.LazyConv2d(8, 3))


class Steered(nn.Module):
    """By a value of its input."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 6, 3)

    def forward(self, x):
        return torch.relu(self.conv(x)) if x.sum() > 0 else torch.tanh(self.conv(x))


def test_models_that_stay_eager():
    x = torch.randn(2, 3, 5, 5)
    linear = fuse(nn.Sequential(nn.Linear(5, 4), nn.ReLU()))
    assert runs(linear, x) == ["eager"] and "no Conv2d or Conv3d" in str(linear.plan(x))
    assert torch.equal(linear(x), nn.Sequential(*linear)(x))
    steered = fuse(Steered())
    assert runs(steered, x) == ["eager"] and "x.sum() > 0" in str(steered.plan(x)), "the line is named"
    for sign in (1, -1):
        assert_same(steered, copy.deepcopy(steered), x.abs() * sign)
    with pytest.raises(RuntimeError, match="eager runs: "):
        steered.source(x)


# ------------------------------------------------------------------------------------------------------------- no compiler


def test_without_a_compiler(monkeypatch):
    """Eager, the reason once as a warning, and in the plan."""

    def failing(*arguments):
        raise inline_loader.BuildError("no host compiler: install g++")

    monkeypatch.setattr(schedule, "plan", failing)
    monkeypatch.setattr(parts, "_said", set())
    inline_loader.forget()
    model, fast, x = pair(Residual, called=False)
    with pytest.warns(RuntimeWarning, match="no host compiler: install g") as caught:
        y = fast(x)
    assert len(caught) == 1
    torch.testing.assert_close(y, model(x))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert_same(fast, model, x)
        assert_same(fuse(model), model, x)
    assert runs(fast, x) == ["eager"] * 4 and "no host compiler" in str(fast.plan(x))


def test_what_kernels_cannot_do(monkeypatch):
    def unsupported(*arguments):
        raise schedule.Unsupported("eleven dimensions")

    monkeypatch.setattr(schedule, "requests", unsupported)
    model, fast, x = pair(Pointwise, called=False)
    plan = str(fast.plan(x))
    assert (
        plan.startswith("conv: eager: convolutions of our own run on GPUs; ") and "eleven dimensions" in plan
    )
    assert_same(fast, model, x)


def test_plan_of_a_frozen_model(monkeypatch):
    """Backward follows where a parameter or the input asks for a gradient."""
    asked = []
    monkeypatch.setattr(schedule, "describe", lambda case: asked.append(case.saving) or "")
    x, frozen = torch.randn(2, 3, 9, 9), fuse(Residual().requires_grad_(False))
    for fast, given, saving in (
        (frozen, x, False),
        (frozen, x.clone().requires_grad_(), True),
        (fuse(Residual()), x, True),
    ):
        asked.clear()
        fast.plan(given)
        assert {*asked} == {saving}


def test_all_kernels_are_built_at_once(monkeypatch):
    built = []
    monkeypatch.setattr(
        schedule, "requests", lambda case: [{"name": case.segment.digest, "saving": case.saving}]
    )
    monkeypatch.setattr(inline_loader, "load_all", lambda requests: built.append(list(requests)))
    _, fast, x = pair(Residual, called=False)
    with torch.no_grad():
        fast(x), fast(x)
    assert len(built) == 1 and len(built[0]) == 3 and not any(each["saving"] for each in built[0])
    built.clear()
    fuse(Residual().requires_grad_(False))(x)
    fuse(Residual())(x)
    assert [each["saving"] for requests in built for each in requests] == [False] * 3 + [True] * 3
    built.clear()
    fuse(Residual(), example_inputs=x)
    assert [each["saving"] for each in built[0]] == [False] * 3 + [True] * 3


# ----------------------------------------------------------------------------------------------------------------- kernels


@every_model
def test_kernels_follow_the_rule(kind):
    """At most twice eager's error, in all gradients and in the result, of a whole network also without gradients."""
    model, _, x = pair(kind, called=False)
    fast = fuse(model)
    assert runs(fast, x) == ["load"] * SEGMENTS[kind]
    numerics.assert_module_follows_rule(fast, model, x, numerics.BOTH if kind is Residual else ("train_dx",))
    assert "#include" in fast.source(x)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_kernels_of_a_number_of_the_values_type(dtype):
    """A tie with the number as that type has it: a tenth is neither's."""

    class Bounded(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.bound = nn.Conv2d(1, 1, 1, bias=False), 0.1

        def forward(self, x):
            v = self.conv(x)
            return torch.min(v, torch.tensor(self.bound, dtype=v.dtype, device=v.device)) * 3.0

    model = Bounded().to(dtype)
    model.conv.weight.data.fill_(1.0)
    fast, x = fuse(model), torch.full((1, 1, 4, 4), 0.1, dtype=dtype)
    assert runs(fast, x) == ["load"]
    assert_same(fast, model, x)


def test_kernels_of_batch_norm_in_training():
    model, fast, x = pair(Residual, called=False, training=True)
    for _ in range(2):
        assert_same(fast, model, x)


def test_kernels_draw_masks():
    _, fast, x = pair(Dropping)
    whole = 2 * fast(x)
    fast.train()
    torch.manual_seed(1)
    first, second = fast(x.requires_grad_()), fast(x)
    torch.manual_seed(1)
    assert torch.equal(first, fast(x)) and not torch.equal(first, second)
    torch.testing.assert_close(first, torch.where(first == 0, 0.0, whole))
    (gradient,) = torch.autograd.grad(first.sum(), fast.conv.bias)
    model = copy.deepcopy(fast).eval()
    kept = torch.sigmoid(model.conv(x))
    (expected,) = torch.autograd.grad((kept * 2 * (first != 0)).sum(), model.conv.bias)
    torch.testing.assert_close(gradient, expected, rtol=1e-4, atol=1e-4)


FREED = """
import torch

from fused_pairs import Normed, Pointwise, pair

for kind in (Normed, Pointwise):
    model, fast, x = pair(kind)
    for key, t in {"x": x, **dict(fast.named_parameters())}.items():
        for moved in (t.detach(), torch.cat([t.detach().flatten()] * 2)[t.numel() :].view_as(t)):  # a view
            t.data = moved
            y, whole = fast(x), t.untyped_storage()
            held, size = t.detach().clone(), whole.nbytes()
            whole.resize_(0)
            for wanted in (True, False):
                with torch.set_grad_enabled(wanted):
                    try:
                        fast(x)
                    except RuntimeError:
                        continue
                raise SystemExit(f"{key} was read")
            try:
                y.sum().backward()
            except RuntimeError:
                pass
            whole.resize_(size)
            t.detach().copy_(held)
"""


def test_kernels_and_memory_that_was_freed():
    """An error as eager's, in a process of its own, since it may crash."""
    paths = os.pathsep.join([str(ROOT), str(ROOT / "tests")])
    call = [sys.executable, "-c", FREED]
    done = subprocess.run(call, env=os.environ | {"PYTHONPATH": paths}, capture_output=True, text=True)
    assert done.returncode == 0, (done.returncode, done.stderr[-1000:])


def test_kernels_of_modules_that_numbers_name():
    """nn.Sequential's have names that no variable of C++ can have."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.GroupNorm(2, 8), nn.SiLU(), nn.MaxPool2d(2))
    fast, x = fuse(model), torch.rand(2, 3, 9, 9)
    assert [each.runs for each in fast.plan(x)] == ["load"]
    torch.testing.assert_close(fast(x), model(x), rtol=1e-5, atol=1e-5)
    assert [each.runs for each in fast.plan(x)] == ["load"], "the build did not fail"


class LeastOfChannels(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 5, 3)

    def forward(self, x):
        return torch.min(self.conv(x), dim=1, keepdim=True).values.sigmoid()


def test_a_field_of_a_result():
    """torch.min gives a value and a place, of which `values` is read by name."""
    model, x = LeastOfChannels(), torch.randn(2, 3, 9, 11)
    fast = fuse(model)
    assert fast.plan(x)[0].runs == "load"
    torch.testing.assert_close(fast(x), model(x))
