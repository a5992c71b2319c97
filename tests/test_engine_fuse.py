"""`fuse(model)` does what the model does, whatever a user changes, before the first call and after it; and what it keeps is made anew
exactly when something that it hangs on has changed.

All but the last part run with the graph evaluated by torch in the place of kernels (engine_stand_in.py).
"""

from __future__ import annotations

import contextlib
import copy
import functools
import gc
import io
import json
import os
import pickle
import random
import subprocess
import sys
import warnings
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.utils import parametrizations
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint

import inline_loader
import numerics
from engine_stand_in import stand_in  # noqa: F401
from inline_kernels.engine import composed, schedule, structure, support
from inline_kernels.engine import part as parts
from inline_kernels.engine.fuse import fuse
from inline_kernels.engine.variants import fused
from loading import ROOT

# --------------------------------------------------------------------------------------------------------------------- models


class Pointwise(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 6, 3, padding=1)
        self.bias = nn.Parameter(torch.randn(6, 1, 1))
        self.factor, self.low = 0.5, -0.25

    def forward(self, x):
        """y of x's positions."""
        x = F.gelu(self.conv(x)) * self.factor + self.bias
        return torch.clamp(x, self.low, 1.0)


class Normed(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 6, 3, stride=2)
        self.norm = nn.GroupNorm(2, 6)
        self.act = nn.SiLU()
        self.pool = nn.MaxPool2d(2)

    def forward(self, x):
        return self.pool(self.act(self.norm(self.conv(x))))


class Block(nn.Module):
    """A convolution, batch norm, and what came in."""

    def __init__(self, channels: int):
        super().__init__()
        self.conv = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(channels)

    def forward(self, x):
        return torch.relu(self.norm(self.conv(x)) + x)


class Residual(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 6, 3, padding=1), nn.ReLU())
        self.blocks = nn.Sequential(Block(6), Block(6), Block(6))
        self.head = nn.Linear(6, 4)

    def forward(self, x):
        return self.head(self.blocks(self.stem(x)).mean((2, 3)))


class Dropping(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 6, 3)
        self.dropout = nn.Dropout(0.5)

    def forward(self, x):
        return self.dropout(torch.sigmoid(self.conv(x)))


class Volume(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv3d(2, 6, 2)
        self.norm = nn.InstanceNorm3d(6)

    def forward(self, x):
        return torch.logsumexp(self.norm(self.conv(x)), dim=1)


INPUTS = {
    Pointwise: (2, 3, 5, 7),
    Normed: (2, 3, 11, 9),
    Residual: (2, 3, 6, 5),
    Dropping: (2, 3, 7, 6),
    Volume: (2, 2, 4, 5, 6),
}
SEGMENTS = {Pointwise: 1, Normed: 1, Residual: 4, Dropping: 1, Volume: 1}
every_model = pytest.mark.parametrize("kind", INPUTS, ids=lambda kind: kind.__name__)
every_moment = pytest.mark.parametrize("moment", ["before the first call", "after calls"])


@pytest.fixture(autouse=True)
def here(request):
    """On the stand-in, but for tests of kernels."""
    inline_loader.forget()
    if not request.node.originalname.startswith("test_kernels"):
        request.getfixturevalue("stand_in")
    yield
    inline_loader.forget()


def pair(
    kind: type[nn.Module], called: bool = True, training: bool = False
) -> tuple[nn.Module, nn.Module, torch.Tensor]:
    """A model, the same one fused with tensors of its own, and an input. Each has its own modules."""
    torch.manual_seed(3)
    model = kind().train(training)
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            nn.init.normal_(module.weight), nn.init.normal_(module.running_mean)
    fast, x = fuse(copy.deepcopy(model)), torch.randn(INPUTS[kind])
    if called:
        state = copy.deepcopy(model.state_dict())
        results(fast, x), fast(x)
        with torch.no_grad():
            fast(x)
        fast.load_state_dict(state)
    return model, fast, x


def results(module: nn.Module, x: torch.Tensor) -> dict[str, torch.Tensor]:
    """The result, gradients and buffers."""
    x = x.detach().requires_grad_(x.is_floating_point())
    leaves = {"x": x, **dict(module.named_parameters())}
    y = module(x)
    wanted = [t for t in leaves.values() if t.requires_grad]
    gradients = (
        torch.autograd.grad(y.square().sum(), wanted, allow_unused=True, materialize_grads=True)
        if wanted
        else []
    )
    names = [key for key, t in leaves.items() if t.requires_grad]
    buffers = {key: value.clone() for key, value in module.named_buffers()}
    return {"output": y.detach(), **dict(zip(names, gradients)), **buffers}


def assert_same(fast: nn.Module, model: nn.Module, x: torch.Tensor, tolerance: float = 1e-4) -> None:
    """Results, gradients and what is written to buffers; or the error."""
    try:
        theirs = results(model, x)
    except Exception as error:
        for ways in (contextlib.nullcontext, torch.no_grad):
            with pytest.raises(type(error)) as ours, ways():
                fast(x)
            assert str(ours.value) == str(error)
        return
    ours = results(fast, x)
    assert ours.keys() == theirs.keys()
    for key, value in theirs.items():
        scale = max(1.0, value.abs().max().item()) if value.numel() else 1.0
        torch.testing.assert_close(
            ours[key],
            value,
            rtol=tolerance,
            atol=tolerance * scale,
            equal_nan=True,
            msg=lambda text: f"{key}: {text}",
        )
        assert ours[key].stride() == value.stride() or key not in ("output", "x"), key
    if not model.training:
        with torch.no_grad():
            torch.testing.assert_close(fast(x), model(x), rtol=tolerance, atol=tolerance, equal_nan=True)


def runs(fast: nn.Module, x: torch.Tensor) -> list[str]:
    return [each.runs for each in fast.plan(x)]


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


# ------------------------------------------------------------------------------------------------------- changes by a user


class Doubled(nn.Module):
    def __init__(self, inner: nn.Module):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return self.inner(x) * 2


def subclassed(module: nn.Module) -> None:
    own = type(module)
    module.__class__ = type(
        f"My{own.__name__}", (own,), {"forward": lambda self, x: own.forward(self, x) * 2}
    )


def with_forward(module: nn.Module) -> None:
    module.forward = functools.partial(lambda forward, x: forward(x) * 2, module.forward)


def replaced(path: str, make: Callable) -> Callable:
    owner, _, name = path.rpartition(".")
    return lambda m: setattr(m.get_submodule(owner), name, make(m.get_submodule(path)))


def edited(path: str, value) -> Callable:
    owner, _, name = path.rpartition(".")
    return lambda m: setattr(m.get_submodule(owner), name, value)


def doubling_hook(m, given, y):
    return y * 2


class Change(NamedTuple):
    """What is done to a model, and what its segments then run: "load", "eager" or whatever."""

    kind: type[nn.Module]
    make: Callable[[nn.Module], object]
    runs: str = "load"


def with_other_fields(module):
    module.__dict__ = dict(vars(copy.deepcopy(module)))


CHANGES = {
    "a number": Change(Pointwise, edited("factor", 3.0)),
    "a number that becomes an int": Change(Pointwise, edited("factor", 3)),
    "a bound": Change(Pointwise, edited("low", 0.125)),
    "a bound that is NaN": Change(Pointwise, edited("low", float("nan")), "eager"),
    "a number that becomes a tensor": Change(Pointwise, edited("factor", torch.tensor(0.25)), "?"),
    "an infinite number": Change(Pointwise, edited("low", -float("inf"))),
    "stride": Change(Pointwise, edited("conv.stride", (2, 1))),
    "padding": Change(Pointwise, edited("conv.padding", (0, 2))),
    "dilation": Change(Pointwise, edited("conv.dilation", (2, 2))),
    "no bias": Change(Pointwise, edited("conv.bias", None)),
    "padding mode": Change(
        Pointwise, replaced("conv", lambda old: nn.Conv2d(3, 6, 3, padding=1, padding_mode="circular"))
    ),
    "padding, a word": Change(Pointwise, replaced("conv", lambda old: nn.Conv2d(3, 6, 3, padding="same"))),
    "more channels": Change(Pointwise, replaced("conv", lambda old: nn.Conv2d(3, 1, 3))),
    "groups": Change(Pointwise, replaced("conv", lambda old: nn.Conv2d(3, 6, 3, groups=3))),
    "a bias for each position": Change(Pointwise, edited("bias", nn.Parameter(torch.randn(6, 5, 7))), "?"),
    "a bias for all": Change(Pointwise, edited("bias", nn.Parameter(torch.randn(1)))),
    "a subclass": Change(Pointwise, lambda m: subclassed(m.conv), "?"),
    "a subclass in the tail": Change(Normed, lambda m: subclassed(m.norm), "?"),
    "a wrapper": Change(Pointwise, replaced("conv", Doubled)),
    "a wrapper in the tail": Change(Normed, replaced("act", Doubled)),
    "another activation": Change(Normed, replaced("act", lambda old: nn.Tanh())),
    "another norm": Change(Normed, replaced("norm", lambda old: nn.BatchNorm2d(6).eval())),
    "other groups of a norm": Change(Normed, edited("norm.num_groups", 3)),
    "groups that don't divide": Change(Normed, edited("norm.num_groups", 4), "?"),
    "eps": Change(Normed, edited("norm.eps", 0.25)),
    "a pool's size": Change(Normed, replaced("pool", lambda old: nn.MaxPool2d(3))),
    "a pool's stride": Change(Normed, edited("pool.stride", 1), "?"),
    "a forward of its own": Change(Pointwise, lambda m: with_forward(m.conv), "eager"),
    "a forward of its own in the tail": Change(Normed, lambda m: with_forward(m.act), "?"),
    "a forward of a block's own": Change(Residual, lambda m: with_forward(m.blocks[1]), "?"),
    "a hook": Change(Pointwise, lambda m: m.conv.register_forward_hook(doubling_hook), "eager"),
    "a hook in the tail": Change(Normed, lambda m: m.norm.register_forward_hook(doubling_hook), "?"),
    "a hook on a block": Change(Residual, lambda m: m.blocks[0].register_forward_hook(doubling_hook), "?"),
    "a hook on a container": Change(Residual, lambda m: m.blocks.register_forward_hook(doubling_hook), "?"),
    "a hook on the model": Change(Pointwise, lambda m: m.register_forward_hook(doubling_hook)),
    "a pre-hook": Change(
        Normed, lambda m: m.act.register_forward_pre_hook(lambda m, given: given[0] * 2), "?"
    ),
    "a backward hook": Change(
        Normed, lambda m: m.act.register_full_backward_hook(lambda m, i, o: (i[0] * 2,)), "?"
    ),
    "weight norm": Change(Pointwise, lambda m: parametrizations.weight_norm(m.conv), "eager"),
    "a block in another's place": Change(Residual, edited("blocks.1", nn.Identity())),
    "one block more": Change(Residual, lambda m: m.blocks.append(Block(6).eval())),
    "blocks swapped": Change(Residual, edited("blocks", nn.Sequential(Block(6).eval(), nn.Tanh()))),
    "no head": Change(Residual, edited("head", nn.Identity())),
    "a method replaced": Change(
        Pointwise, lambda m: setattr(m, "forward", lambda x: F.relu(m.conv(x))), "eager"
    ),
    "running statistics of one block": Change(Residual, lambda m: m.blocks[0].norm.train()),
    "no running statistics": Change(
        Residual, edited("blocks.0.norm", nn.BatchNorm2d(6, track_running_stats=False))
    ),
    "frozen": Change(Residual, lambda m: m.requires_grad_(False)),
    "a frozen part": Change(Residual, lambda m: m.blocks[0].requires_grad_(False)),
    "an attribute that nobody reads": Change(Pointwise, lambda m: setattr(m, "history", [1, 2])),
    "all that a module holds": Change(Pointwise, lambda m: with_other_fields(m.conv), "load"),
    "all that a module of the tail holds": Change(Normed, lambda m: with_other_fields(m.norm), "load"),
    "all that a block holds": Change(Residual, lambda m: with_other_fields(m.blocks[0])),
    "all that the model holds": Change(Pointwise, lambda m: with_other_fields(m), "load"),
    "compiled": Change(Normed, lambda m: m.act.compile(backend="eager"), "?"),
    "double": Change(Pointwise, lambda m: m.double(), "load"),
}


@every_moment
@pytest.mark.parametrize("label", CHANGES)
def test_changed(label, moment):
    change = CHANGES[label]
    model, fast, x = pair(change.kind, called="after" in moment)
    for each in (model, fast):
        torch.manual_seed(7)
        change.make(each)
    fast.load_state_dict(model.state_dict())
    if label == "double":
        x = x.double()
    if change.runs != "?":
        assert set(runs(fast, x)) == {change.runs}, fast.plan(x)
    assert_same(fast, model, x)
    assert_same(fast, model, x[:1])


def test_what_a_block_does_in_eager_leaves_the_others_fused():
    _, fast, x = pair(Residual)
    handle = fast.blocks[0].conv.register_forward_hook(doubling_hook)
    assert sorted(runs(fast, x)) == ["eager", "load", "load", "load"]
    assert "eager: blocks.0.conv has hooks" in str(fast.plan(x))
    handle.remove()
    assert runs(fast, x) == ["load"] * 4


class Doubling(TorchFunctionMode):
    def __torch_function__(self, function, types, args=(), kwargs=None):
        y = function(*args, **kwargs or {})
        return y * 2 if function in (torch.conv2d, torch.conv3d) else y


@contextlib.contextmanager
def patched(owner, name: str):
    with pytest.MonkeyPatch.context() as patch:
        before = getattr(owner, name)
        patch.setattr(owner, name, lambda *a, **keywords: before(*a, **keywords) * 2)
        yield


@contextlib.contextmanager
def hooked_everywhere():
    handle = nn.modules.module.register_module_forward_hook(
        lambda m, i, y: y * 2 if isinstance(m, nn.Conv2d) else None
    )
    yield
    handle.remove()


INTERCEPTED = {
    "a mode": Doubling,
    "a method": lambda: patched(nn.Conv2d, "_conv_forward"),
    "a function": lambda: patched(F, "conv2d"),
    "a function of the tail": lambda: patched(F, "group_norm"),
    "all calls": lambda: patched(nn.Module, "__call__"),
    "a class's forward": lambda: patched(nn.Conv2d, "forward"),
    "the model's forward": lambda: patched(Normed, "forward"),
    "hooks on all modules": hooked_everywhere,
}


@pytest.mark.parametrize("how", INTERCEPTED)
def test_intercepted(how):
    """For as long as it is, from the first call on or later."""
    model, fast, x = pair(Normed, called=False)
    for _ in range(2):
        with INTERCEPTED[how]():
            assert runs(fast, x) == ["eager"] or how == "the model's forward", fast.plan(x)
            with torch.no_grad():
                assert torch.equal(fast(x), model(x))
        assert runs(fast, x) == ["load"], fast.plan(x)
        assert_same(fast, model, x)


def test_attributes_of_classes_and_helpers():
    """Numbers and methods that a class holds count as they are now."""

    class Held(nn.Module):
        slope = 0.5

        def __init__(self):
            super().__init__()
            self.conv = nn.Conv2d(3, 6, 3)

        @property
        def doubled(self):
            return self.slope * 2

        def tail(self, x):
            return torch.relu(x) * self.doubled

        def forward(self, x):
            return self.tail(self.conv(x))

    INPUTS[Held] = (2, 3, 5, 5)
    try:
        model, fast, x = pair(Held)
        assert_same(fast, model, x)
        Held.slope = 2.0
        assert_same(fast, model, x)
        model.slope = fast.slope = 3.0
        assert_same(fast, model, x)
        Held.tail = lambda self, x: torch.tanh(x)
        assert_same(fast, model, x)
        Held.doubled = 5.0
        Held.tail = lambda self, x: torch.tanh(x) * self.doubled
        assert_same(fast, model, x)
    finally:
        del INPUTS[Held]


LEVEL = {"now": 2.0}


class Settings:
    def __init__(self):
        self.shift = 0.5


class Computed(nn.Module):
    """A number of a property that reads what belongs to nobody, and one of an object."""

    def __init__(self):
        super().__init__()
        self.conv, self.settings = nn.Conv2d(3, 6, 3), Settings()

    @property
    def level(self):
        return LEVEL["now"]

    @property
    def size(self):
        return 2 + (LEVEL["now"] > 2)

    def forward(self, x):
        y = torch.relu(self.conv(x)) * self.level + self.settings.shift
        return F.max_pool2d(y, self.size)


def test_properties_and_objects_count_at_each_call(monkeypatch):
    monkeypatch.setitem(INPUTS, Computed, (2, 3, 8, 8))
    model, fast, x = pair(Computed)
    assert_same(fast, model, x)
    for level in (1.5, 4.0, 2.0):
        monkeypatch.setitem(LEVEL, "now", level)
        assert_same(fast, model, x)
    for shift in (1.25, -3.0):
        model.settings.shift = fast.settings.shift = shift
        assert_same(fast, model, x)
    assert runs(fast, x) == ["load"]


def test_methods_of_modules_that_forward_calls():
    """Those of nn.Module, too, which whoever traces calls for itself."""

    class Asks(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = nn.Conv2d(3, 6, 3)
            self.other = nn.Conv2d(3, 6, 3)

        def forward(self, x):
            return torch.relu(self.get_submodule("conv")(x))

    INPUTS[Asks] = (2, 3, 5, 5)
    try:
        model, fast, x = pair(Asks)
        assert runs(fast, x) == ["load"]
        assert_same(fast, model, x)
        Asks.get_submodule = lambda self, path: self.other
        assert torch.equal(model(x), torch.relu(model.other(x)))
        assert_same(fast, model, x)
    finally:
        del INPUTS[Asks]


SLOPE = 0.5


def leaking(x):
    return F.leaky_relu(x, SLOPE)


def test_names_outside_of_the_class(monkeypatch):
    """Globals, also of a function that forward calls, and what it encloses."""
    power = 2.0

    class Outside(Pointwise):
        def forward(self, x):
            return leaking(self.conv(x)) * power

    monkeypatch.setitem(INPUTS, Outside, INPUTS[Pointwise])
    model, fast, x = pair(Outside)
    assert_same(fast, model, x)
    monkeypatch.setitem(globals(), "SLOPE", 0.125)
    assert_same(fast, model, x)
    power = 3.0
    assert_same(fast, model, x)
    monkeypatch.setitem(globals(), "leaking", torch.tanh)
    assert_same(fast, model, x)
    assert runs(fast, x) == ["load"]


def test_lists_that_forward_reads():
    class Listed(Pointwise):
        def __init__(self):
            super().__init__()
            self.slopes, self.note = [0.5, 0.25], []

        def forward(self, x):
            y = self.conv(x)
            for slope in self.slopes:
                y = F.leaky_relu(y, slope)
            return y * self.factor

    INPUTS[Listed] = INPUTS[Pointwise]
    try:
        model, fast, x = pair(Listed)
        known = fast._kept[0]
        fast.note.append("read by nobody")
        fast(x)
        assert fast._kept[0] is known
        model.slopes.append(2.0), fast.slopes.append(2.0)
        assert_same(fast, model, x)
        model.slopes[0] = fast.slopes[0] = 4.0
        assert_same(fast, model, x)
    finally:
        del INPUTS[Listed]


class Counting(Pointwise):
    """Its forward counts."""

    def __init__(self):
        super().__init__()
        self.calls = 0
        self.register_buffer("total", torch.zeros(()))

    def forward(self, x):
        self.calls += 1
        self.total += 1.0
        return super().forward(x)


class Noting(Pointwise):
    """Into a list that it has."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def forward(self, x):
        self.calls.append("a call")
        return super().forward(x)


class Drawing(Pointwise):
    """Of which a layer is skipped at random."""

    def forward(self, x):
        y = self.conv(x)
        return torch.relu(y) if random.random() < 0.5 else torch.tanh(y)


class Switching(Pointwise):
    def forward(self, x):
        with torch.no_grad():
            gate = torch.sigmoid(self.conv(x))
        return gate * self.conv(x)


@pytest.mark.parametrize("kind", [Counting, Noting, Drawing, Switching], ids=lambda kind: kind.__name__)
def test_forwards_that_do_more_than_compute(kind):
    """They do it as often as the model's own."""
    INPUTS[kind] = INPUTS[Pointwise]
    try:
        model, fast, x = pair(kind, called=False)
        for i in range(3):
            for grad in (True, False):
                with torch.set_grad_enabled(grad):
                    random.seed(i)
                    theirs = model(x)
                    random.seed(i)
                    ours = fast(x)
                torch.testing.assert_close(ours, theirs)
        random.seed(0)
        assert_same(fast, model, x) if kind is Switching else None
        if kind is Noting:
            assert fast.calls == model.calls and len(fast.calls) == 6
        if kind is Counting:
            assert fast.calls == model.calls == 6 and fast.total == model.total == 6
    finally:
        del INPUTS[kind]


class Several(Pointwise):
    def forward(self, x, scale=None, *, shift: float = 0.0):
        y = torch.relu(self.conv(x))
        return y + shift if scale is None else y * scale + shift


def test_arguments_of_forward():
    model = Several().eval()
    fast, x = fuse(model), torch.randn(2, 3, 5, 5)
    scale = torch.rand(2, 6, 5, 5)
    calls = [
        ((x,), {}),
        ((x, scale), {}),
        ((x,), {"scale": scale}),
        ((x,), {"shift": 2.0}),
        ((), {"x": x}),
        ((x, scale), {"shift": 1.0}),
    ]
    for _ in range(2):
        for given, keywords in calls:
            torch.testing.assert_close(fast(*given, **keywords), model(*given, **keywords))
            expected = ["eager" if "scale" in keywords or "shift" in keywords or len(given) > 1 else "load"]
            assert [each.runs for each in fast.plan(*given, **keywords)] == expected
    with pytest.raises(TypeError):
        fast(x, scale, x)
    with pytest.raises(TypeError):
        fast()


# ---------------------------------------------------------------------------------------------------------- what is kept


@pytest.fixture
def made(monkeypatch):
    """made() is how many captures and how many decisions there were since it was asked last."""
    counts = [0, 0]

    def counted(owner, name: str, which: int) -> None:
        call = getattr(owner, name)

        def called(*arguments):
            counts[which] += 1
            return call(*arguments)

        monkeypatch.setattr(owner, name, called)

    def since():
        found, counts[:] = tuple(counts), [0, 0]
        return found

    counted(structure, "_capture", 0)
    counted(parts.Part, "_decide", 1)
    counted(parts.Part, "foreseen", 1)  # for a chain
    return since


@every_model
def test_one_capture_and_a_decision_for_a_situation(kind, made):
    _, fast, x = pair(kind, called=False)
    count = SEGMENTS[kind]
    for _ in range(3):
        for part in (x, x[:1]):
            results(fast, part)
            with torch.no_grad():
                fast(part)
    # A decision is for shapes, for gradients of x or not, with gradients or not.
    assert made() == (1, 4 * count)
    with torch.no_grad():
        for parameter in fast.parameters():
            parameter.mul_(2)
            parameter.data = parameter.data.clone()
        fast(x)
    fast.conv_weight = None
    fast.load_state_dict(fast.state_dict())
    fast.history = ["a list", "that nothing depends on"]
    with torch.no_grad():
        fast(x)
    assert made() == (0, 0)


def test_captured_again_when_something_changed(made):
    _, fast, x = pair(Pointwise)
    changes = [
        ((0, 1), lambda: setattr(fast, "factor", 0.125)),
        ((0, 0), lambda: setattr(fast, "factor", 0.125)),
        ((0, 0), lambda: setattr(fast, "step", 1)),
        ((0, 0), lambda: setattr(fast.conv, "stride", (1, 1))),
        ((1, 1), lambda: setattr(fast.conv, "stride", (2, 2))),
        ((1, 1), lambda: setattr(fast, "conv", copy.deepcopy(fast.conv))),
        ((0, 0), lambda: fast.conv.register_forward_hook(print).remove()),
        (
            (0, 1),
            lambda: setattr(
                fast.conv,
                "weight",
                nn.Parameter(torch.randn(6, 3, 3, 3).to(memory_format=torch.channels_last)),
            ),
        ),
        ((0, 1), inline_loader.forget),
    ]
    with torch.no_grad():
        fast(x)
        made()
        for place, (expected, change) in enumerate(changes):
            change()
            fast(x)
            assert made() == expected, place
            fast(x)
            assert made() == (0, 0), place


def test_a_hook_that_keeps_something_on_a_pool(made):
    """Isn't a change of what runs."""
    pool = nn.MaxPool2d(2)
    pool.register_forward_hook(lambda module, inputs, y: setattr(module, "seen", y))
    convolutions = [nn.Conv2d(4, 4, 3) for _ in range(2)]
    fast = fuse(nn.Sequential(convolutions[0], nn.ReLU(), pool, convolutions[1], nn.ReLU()))
    for _ in range(3):
        fast(torch.randn(2, 4, 12, 13))
    assert made()[0] == 1


def test_train_and_eval_are_captured_apart_once(made):
    _, fast, x = pair(Residual, called=False)
    for _ in range(3):
        for training in (True, False):
            fast.train(training)
            fast(x)
    assert made() == (2, 8)


def test_situations_that_are_kept_are_few(made, monkeypatch):
    monkeypatch.setattr(support, "_KEPT_SITUATIONS", 3)
    _, fast, x = pair(Pointwise, called=False)
    with torch.no_grad():
        for count, decided in (
            (1, 1),
            (2, 1),
            (3, 1),
            (1, 0),
            (4, 1),
            (1, 0),
            (3, 0),
            (2, 1),
            (4, 1),
            (3, 0),
        ):
            fast(torch.cat([x, x])[:count])
            assert made()[1] == decided
    (part,) = fast._kept[0].parts
    assert len(part.situations) == 3


@every_model
def test_memory_is_free_when_nobody_holds_the_module(kind):
    """At once, without the garbage collector: what is kept leads nowhere back."""
    model, fast, x = pair(kind)
    weight = weakref.ref(next(fast.parameters()))
    gc.collect()
    gc.disable()
    try:
        del model, fast
        assert weight() is None
    finally:
        gc.enable()


def test_memory_of_modules_that_were_replaced_is_free():
    _, fast, x = pair(Pointwise)
    weight = weakref.ref(fast.conv.weight)
    fast.conv = nn.Conv2d(3, 6, 3)
    fast(x)
    gc.collect()
    assert weight() is None


def saved(module: nn.Module) -> nn.Module:
    file = io.BytesIO()
    torch.save(module, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def replica_of(fast: nn.Module) -> nn.Module:
    """As nn.DataParallel makes them for its threads."""
    replicas = {name: module._replicate_for_data_parallel() for name, module in fast.named_modules()}
    for name, module in fast.named_modules():
        for key, parameter in module._parameters.items():
            setattr(replicas[name], key, None if parameter is None else parameter.clone())
        for key, buffer in module._buffers.items():
            setattr(replicas[name], key, None if buffer is None else buffer.clone())
        for key in module._modules:
            setattr(replicas[name], key, replicas[f"{name}.{key}".removeprefix(".")])
    return replicas[""]


COPIES = {
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "pickle": lambda module: pickle.loads(pickle.dumps(module)),
    "torch.save": saved,
    "replica": replica_of,
}


@pytest.mark.parametrize("how", COPIES)
@every_model
def test_copies(kind, how):
    """Go without what is kept, and are modules of their own."""
    model, fast, x = pair(kind)
    expected = fast(x)
    other = COPIES[how](fast)
    assert type(other) is type(fast) and not hasattr(other, "_kept")
    torch.testing.assert_close(other(x), expected)
    if how == "replica":
        other(x).sum().backward()
        assert all(p.grad is not None for p in fast.parameters())
    if how in ("copy", "replica"):
        return
    assert runs(other, x) == ["load"] * SEGMENTS[kind]
    assert other._kept[0].parts[0].shared.operator is fast._kept[0].parts[0].shared.operator, (
        "one for equal segments"
    )
    with torch.no_grad():
        next(other.parameters()).zero_()
    assert torch.equal(fast(x), expected)
    assert_same(other, copy.deepcopy(other), x)


def test_exact_order_is_kept_by_copies():
    fast = fuse(Pointwise(), exact_order=True)
    for how in ("deepcopy", "pickle", "torch.save"):
        assert COPIES[how](fast)._options.exact_order is True
        assert COPIES[how](fuse(Pointwise()))._options.exact_order is False


def test_fused_modules_inside_of_others():
    """Their segments are the whole's."""
    model, fast, x = pair(Residual)
    inner = copy.deepcopy(model)
    inner.blocks[0], inner.blocks[1] = fuse(inner.blocks[0]), fuse(inner.blocks[1])
    assert_same(inner, model, x)
    whole = fuse(inner)
    assert runs(whole, x) == ["load"] * 4
    assert_same(whole, model, x)
    whole.blocks[1].conv.stride = model.blocks[1].conv.stride = (1, 1)
    with patched(Block, "forward"):
        assert_same(whole, model, x)
    assert_same(whole, model, x)


def test_equal_segments_share_an_operator():
    _, fast, x = pair(Residual)
    first, second = (part.shared.operator for part in fast._kept[0].parts[1:3])
    assert first is second and first is not fast._kept[0].parts[0].shared.operator


def test_state_dicts_go_both_ways():
    model, fast, x = pair(Residual)
    other = Residual().eval()
    fast.load_state_dict(other.state_dict())
    assert_same(fast, other, x)
    model.load_state_dict(fast.state_dict())
    assert_same(fast, model, x)


def test_threads_with_different_shapes():
    _, fast, x = pair(Residual, called=False)
    parts = [x, x[:1], x[..., :-1].contiguous(), torch.cat([x, x])]
    expected = [copy.deepcopy(fast)(part).detach() for part in parts]

    def run(number):
        part, right = parts[number % 4], expected[number % 4]
        with torch.set_grad_enabled(number % 3 == 0):
            y = fast(part)
        return y.requires_grad == (number % 3 == 0) and torch.allclose(y, right, atol=1e-6)

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(run, range(100)))


# --------------------------------------------------------------------------------------------------------- odd inputs


ODD = {
    "nothing": lambda x: x[:0],
    "not batched": lambda x: x[0],
    "too few dimensions": lambda x: x[0, 0],
    "another dtype": lambda x: x.double(),
    "an integer": lambda x: x.long(),
    "a boolean": lambda x: x.bool(),
    "one dimension too many": lambda x: x[None],
    "no rows": lambda x: x[..., :0, :],
    "no channels": lambda x: x[:, :0],
    "other channels": lambda x: x[:, :1],
    "too small": lambda x: x[..., :1, :1],
    "sparse": lambda x: x.to_sparse(),
    "a negative view": lambda x: torch.complex(x, -x).conj().imag,
    "transposed": lambda x: x.transpose(-1, -2).contiguous().transpose(-1, -2),
    "channels last": lambda x: x.contiguous(
        memory_format=torch.channels_last if x.dim() == 4 else torch.channels_last_3d
    ),
    "expanded": lambda x: x[:1].expand_as(x),
    "a view": lambda x: torch.cat([x.flatten(), x.flatten()])[1 : x.numel() + 1].view_as(x),
    "a Parameter": lambda x: nn.Parameter(x),
    "NaN": lambda x: x.clone().fill_(float("nan")),
    "infinities": lambda x: x / 0,
}


@pytest.mark.parametrize("how", ODD)
@every_model
def test_odd_inputs(kind, how):
    """Before other calls, and after."""
    model, fast, x = pair(kind, called=False)
    given = ODD[how](x)
    assert_same(fast, model, given)
    results(fast, x)
    with torch.no_grad():
        fast(x)
    assert_same(fast, model, given)
    if how in ("sparse", "a negative view"):
        assert set(runs(fast, given)) == {"eager"}
    elif how in ("transposed", "channels last", "expanded", "a view", "a Parameter"):
        assert set(runs(fast, given)) == {"load"}


@every_model
def test_a_subclass_of_tensor_is_eagers(kind):
    class Asked(torch.Tensor):
        functions = []

        @classmethod
        def __torch_function__(cls, function, types, args=(), kwargs=None):
            cls.functions.append(getattr(function, "__name__", ""))
            return super().__torch_function__(function, types, args, kwargs)

    model, fast, x = pair(kind)
    asked = x.as_subclass(Asked)
    assert "subclass of Tensor" in str(fast.plan(asked))
    with torch.no_grad():
        assert torch.equal(fast(asked), model(asked))
    assert any(name.startswith("conv") for name in Asked.functions)


class Tail(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.conv, self.function = nn.Conv2d(3, 6, 3), function

    def forward(self, x):
        return self.function(self.conv(x))


TAILS = {
    "instance norm": nn.InstanceNorm2d(6),
    "batch norm": nn.BatchNorm2d(6),
    "group norm": nn.GroupNorm(3, 6),
    "average pool": nn.AvgPool2d(2),
    "max pool": nn.MaxPool2d(2),
    "softmax": nn.Softmax(1),
    "logsumexp": functools.partial(torch.logsumexp, dim=1, keepdim=True),
    "maximum of channels": functools.partial(torch.amax, dim=1),
    "minimum along an axis": lambda x: torch.min(x, dim=2)[0],
    "mean": lambda x: x.mean((2, 3)),
    "activation": F.mish,
}


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last], ids=str)
@pytest.mark.parametrize("label", TAILS)
def test_results_are_laid_out_as_eagers(label, layout):
    """With x's layout or the weight's."""
    tail = TAILS[label]
    model = Tail(tail)
    x = torch.randn(2, 3, 8, 7)
    for given, module in (
        (x.contiguous(memory_format=layout), model),
        (x, copy.deepcopy(model).to(memory_format=layout)),
    ):
        fast, expected = fuse(copy.deepcopy(module)), module(given)
        assert runs(fast, given) == ["load"]
        for y in (fast(given), fast(given.clone().requires_grad_())):
            assert y.stride() == expected.stride()
            torch.testing.assert_close(y, expected, rtol=1e-4, atol=1e-4)


def test_results_share_no_memory_and_inputs_stay():
    _, fast, x = pair(Pointwise)
    before = x.clone()
    with torch.no_grad():
        first, second = fast(x), fast(x)
    assert torch.equal(first, second) and first.data_ptr() != second.data_ptr() and torch.equal(x, before)


# ---------------------------------------------------------------------------------------------------------- modes, dtypes


@every_model
def test_dtype_and_autocast_are_toggled(kind):
    model, fast, x = pair(kind)
    for convert in (nn.Module.double, nn.Module.float, nn.Module.bfloat16, nn.Module.float):
        convert(model), convert(fast)
        dtype = next(model.parameters()).dtype
        theirs, ours = model(x.to(dtype)), fast(x.to(dtype))
        assert ours.dtype == theirs.dtype and runs(fast, x.to(dtype)) == ["load"] * SEGMENTS[kind]
        torch.testing.assert_close(ours, theirs, rtol=1e-2, atol=3e-2)
    for dtype in (torch.bfloat16, None, torch.float16, torch.bfloat16):
        with torch.autocast("cpu", dtype=dtype or torch.bfloat16, enabled=dtype is not None):
            theirs, ours, inside = model(x), fast(x), runs(fast, x)
        assert ours.dtype == theirs.dtype and inside == ["load"] * SEGMENTS[kind]
        torch.testing.assert_close(ours, theirs, rtol=5e-2, atol=0.1)


@every_model
def test_autocast_gradients(kind):
    """In eager's dtypes."""
    model, fast, x = pair(kind)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        theirs, ours = results(model, x), results(fast, x)
    for key, value in theirs.items():
        assert ours[key].dtype == value.dtype, key
        torch.testing.assert_close(ours[key], value, rtol=0.1, atol=0.1 * max(1.0, value.abs().max().item()))
    with torch.autocast("cpu", dtype=torch.bfloat16), pytest.raises(RuntimeError):
        fast(x.double())


@every_model
def test_inference_mode_and_back(kind):
    model, fast, x = pair(kind, called=False)
    with torch.inference_mode():
        inside = fast(x)
        assert inside.is_inference()
        torch.testing.assert_close(fast(x.clone()), model(x))
    assert_same(fast, model, x)
    with torch.inference_mode():
        torch.testing.assert_close(fast(x), model(x))


def test_requires_grad_is_toggled():
    _, fast, x = pair(Normed)
    for wanted in (False, True, False):
        fast.requires_grad_(wanted)
        assert fast(x).requires_grad == wanted and fast(x.clone().requires_grad_()).requires_grad
        fast.conv.bias.requires_grad_(True)
        assert fast(x).requires_grad


def test_weights_count_at_once():
    model, fast, x = pair(Normed)
    for change in (
        lambda p: p.detach().mul_(-0.5),
        lambda p: setattr(p, "data", torch.ones_like(p) * 0.3),
        lambda p: p.data.add_(0.25),
    ):
        for parameter in (*model.parameters(), *fast.parameters()):
            change(parameter)
        assert_same(fast, model, x)
    for module in (model, fast):
        torch.manual_seed(1)
        module.conv.weight = nn.Parameter(torch.randn_like(module.conv.weight))
        module.norm.weight = nn.Parameter(torch.randn_like(module.norm.weight))
    assert_same(fast, model, x)
    for module in (model, fast):  # another number of channels in, through .data
        module.conv.weight.data = module.conv.weight.data[:, :2].contiguous()
    assert_same(fast, model, x[:, :2])
    assert runs(fast, x[:, :2]) == ["load"]


def test_a_parameter_that_stands_for_two():
    model, fast, x = pair(Normed)
    for module in (model, fast):
        module.norm.weight = module.norm.bias
    for _ in range(2):
        assert_same(fast, model, x)
    assert runs(fast, x) == ["load"]


def test_batch_norm_counts_its_batches():
    """And writes its running statistics as eager does, of which autograd isn't told."""
    model, fast, x = pair(Residual, training=True)
    before = [[t._version for t in module.buffers()] for module in (model, fast)]
    for _ in range(3):
        assert_same(fast, model, torch.randn_like(x))
    assert fast.blocks[0].norm.num_batches_tracked == model.blocks[0].norm.num_batches_tracked == 3
    for module, were in zip((model, fast), before):
        told = [t._version - was for t, was in zip(module.buffers(), were)]
        assert told == [0, 0, 3] * (len(told) // 3)
    model.eval(), fast.eval()
    assert_same(fast, model, x)


class Norms(nn.Module):
    """Three batch norms, of which the last one counts for two; behind the first stands what somebody may look from."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 4, 3), nn.Conv2d(4, 4, 3)
        self.third, self.look = nn.Conv2d(4, 4, 3), nn.MaxPool2d(2, 1)
        self.norm, self.own, self.twice = (nn.BatchNorm2d(4) for _ in range(3))

    def forward(self, x):
        x = self.look(F.relu(self.norm(self.first(x))))
        x = F.relu(self.own(self.second(x)))
        return F.relu(self.twice(self.third(F.relu(self.twice(x)))))

    def counted(self) -> list[int]:
        return [int(each.num_batches_tracked) for each in (self.norm, self.own, self.twice)]


def test_batches_are_counted_at_once(monkeypatch):
    """One launch for a model's counters: where it ends, and where it raises; and a counter that stands twice counts twice."""
    model, x = Norms(), torch.randn(2, 3, 12, 13)
    fast, raised, add = fuse(copy.deepcopy(model)), [], torch._foreach_add_
    monkeypatch.setattr(
        torch, "_foreach_add_", lambda tensors, one: (raised.append(len(tensors)), add(tensors, one))
    )
    for _ in range(2):
        assert_same(fast, model, x)
    assert fast.counted() == model.counted() == [2, 2, 4] and raised == []
    fast.twice = model.twice = nn.Identity()
    assert_same(fast, model, x)
    assert raised == [2] and fast.norm.num_batches_tracked == fast.own.num_batches_tracked == 3
    for module in (model, fast):
        with pytest.raises(RuntimeError):  # of the second convolution: the image is smaller than its filters
            module(torch.randn(2, 3, 5, 5))
        assert module.norm.num_batches_tracked == 4 and module.own.num_batches_tracked == 3


def test_who_looks_between_segments_sees_the_count():
    """A hook sees each norm's count as eager's; without it a call counts at its end."""
    found = {}
    for name, module in (("eager", model := Norms()), ("fused", fuse(copy.deepcopy(model)))):
        seen = found[name] = []
        module.look.register_forward_hook(
            lambda m, *_, seen=seen, module=module: seen.append(module.counted())
        )
        module(torch.randn(2, 3, 12, 13))
    assert found["fused"] == found["eager"] == [[1, 0, 0]]


def test_a_batch_norm_that_is_called_twice():
    norm = nn.BatchNorm2d(4)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), norm, nn.ReLU(), norm)
    fast, x = fuse(copy.deepcopy(model)), torch.randn(2, 3, 6, 7)
    for _ in range(2):
        assert_same(fast, model, x)
    assert runs(fast, x) == ["load"] and fast[1].num_batches_tracked == model[1].num_batches_tracked


def test_forward_twice_then_backward():
    """Running statistics change in between, and no gradient hangs on them."""
    model, fast, x = pair(Residual, training=True)
    found = []
    for module in (model, fast):
        (module(x).sum() + module(2 * x).square().sum()).backward()
        found.append([p.grad for p in module.parameters()])
    for theirs, ours in zip(*found):
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-3)


def test_a_batch_too_small_for_its_norm():
    for size in (1, 2):
        model, fast, x = pair(Residual, training=True)
        assert_same(fast, model, x[:1, :, :size, :size])


def test_dropout():
    _, fast, x = pair(Dropping)
    fast.train()
    torch.manual_seed(1)
    first, second = fast(x), fast(x)
    torch.manual_seed(1)
    again = fast(x)
    assert torch.equal(first, again) and not torch.equal(first, second)
    torch.testing.assert_close(first, torch.where(first == 0, 0.0, 2 * fast.eval()(x)))
    fast.train()
    fast.dropout.p = 0.0
    assert fast(x).all()
    fast.dropout.p = 1.5
    with pytest.raises(ValueError, match="probability"):
        fast(x)
    fast.dropout.p = 0.5
    fast.dropout.eval()
    assert fast(x).all()
    fast.train().eval()
    state = torch.get_rng_state()
    fast(x)
    assert torch.equal(torch.get_rng_state(), state), "nothing is drawn"


class Checkpointed(nn.Module):
    def __init__(self, module, reentrant):
        super().__init__()
        self.module, self.reentrant = module, reentrant

    def forward(self, x):
        return checkpoint(self.module, x, use_reentrant=self.reentrant)


@pytest.mark.parametrize("reentrant", [True, False])
@every_model
def test_checkpoint(kind, reentrant):
    _, fast, x = pair(kind)
    answers = []
    for module in (fast, Checkpointed(fast, reentrant)):
        torch.manual_seed(5)
        fast.train(kind is Dropping)
        answers.append({key.removeprefix("module."): value for key, value in backward(module, x).items()})
    for key, value in answers[0].items():
        assert torch.equal(answers[1][key], value), key


def backward(module, x):
    x = x.detach().requires_grad_()
    module.zero_grad()
    module(x).square().sum().backward()
    return {"x": x.grad, **{key: p.grad.clone() for key, p in module.named_parameters()}}


@every_model
def test_saved_tensors_may_be_packed(kind):
    model, fast, x = pair(kind)
    packed = []

    def pack(t):
        packed.append(t)
        return t.clone()

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        assert_same(fast, model, x)
    assert packed


def test_deterministic_algorithms():
    model, fast, x = pair(Residual)
    expected = results(fast, x)
    torch.use_deterministic_algorithms(True)
    try:
        for key, value in results(fast, x).items():
            assert torch.equal(value, expected[key]), key
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("loss", [torch.sum, lambda y: y.square().sum()], ids=["linear", "square"])
def test_differentiated_twice(loss):
    """An error that says so, in every way to ask for it, also where an unused input would be allowed."""
    _, fast, x = pair(Pointwise)
    (gradient,) = torch.autograd.grad(loss(fast(x.requires_grad_())), x, create_graph=True)
    total, retain = gradient.sum(), {"retain_graph": True}
    for twice in (
        lambda: torch.autograd.grad(total, x, **retain),
        lambda: torch.autograd.grad(total, x, allow_unused=True, **retain),
        lambda: total.backward(**retain),
    ):
        with pytest.raises(RuntimeError, match="can't be differentiated twice"):
            twice()


# --------------------------------------------------------------------------------------------------------- transformations


@every_model
def test_forward_mode_ad(kind):
    """Eager's tangent; without one, kernels run. Before other calls, and after."""
    model, fast, x = pair(kind, called=False)
    for _ in range(2):
        with forward_ad.dual_level():
            assert runs(fast, x) == ["load"] * SEGMENTS[kind]
            pairs = [
                forward_ad.unpack_dual(module(forward_ad.make_dual(x, torch.ones_like(x))))
                for module in (model, fast)
            ]
        assert pairs[1].tangent is not None
        for theirs, ours in zip(*pairs):
            torch.testing.assert_close(ours, theirs)
        assert_same(fast, model, x)


@every_model
def test_transformations_of_torch_func(kind):
    model, fast, x = pair(kind)
    parameters = {key: p.detach() for key, p in model.named_parameters()}

    def loss(module):
        return lambda values, x: torch.func.functional_call(module, values, x).square().mean()

    transformed = (
        lambda run: torch.func.grad(run)(parameters, x),
        lambda run: torch.func.vmap(lambda x: run(parameters, x))(torch.stack([x, 2 * x])),
        lambda run: torch.func.jvp(lambda x: run(parameters, x), (x,), (torch.ones_like(x),)),
    )
    for transform in transformed:
        torch.testing.assert_close(transform(loss(fast)), transform(loss(model)), rtol=1e-4, atol=1e-5)
    plans = []
    torch.func.vmap(lambda x: plans.append(str(fast.plan(x))) or x)(x[None])
    assert "eager" in plans[0] and "torch.func" in plans[0]
    assert_same(fast, model, x)


@every_model
def test_functional_call(kind):
    model, fast, x = pair(kind)
    other = {key: value.detach() * 0.5 for key, value in model.named_parameters()}
    torch.testing.assert_close(
        torch.func.functional_call(fast, other, x), torch.func.functional_call(model, other, x)
    )
    assert_same(fast, model, x)


@every_model
def test_fake_and_meta_tensors(kind):
    """Shape, dtype and strides are known without computing."""
    model, fast, x = pair(kind)
    expected = model(x)
    with torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad():
        fake = fast(torch.empty(x.shape))
    assert (fake.shape, fake.stride(), fake.dtype) == (expected.shape, expected.stride(), expected.dtype)
    meta = copy.deepcopy(fast).to("meta")(x.to("meta"))
    assert meta.shape == expected.shape and meta.device.type == "meta"
    assert_same(fast, model, x)


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning", "ignore::DeprecationWarning")
@every_model
def test_traces(kind):
    """A dispatch mode sees the operator, not what it is made of."""
    model, fast, x = pair(kind)
    with torch.no_grad():
        graph = make_fx(fast)(x)
    seen = [node.target for node in graph.graph.nodes if "inline_kernels" in str(node.target)]
    assert len(seen) == SEGMENTS[kind]
    torch.testing.assert_close(graph(x * 2), model(x * 2))
    for wanted in (True, False):
        with torch.set_grad_enabled(wanted):
            traced = torch.jit.trace(fast, x)
            torch.testing.assert_close(traced(x * 2), model(x * 2))


@pytest.mark.parametrize("kind, training", [*((kind, False) for kind in INPUTS), (Residual, True)])
def test_compile(kind, training):
    """One graph, forward and backward, with the operators in it; of a batch norm also while it counts."""
    torch._dynamo.reset()
    model, fast, x = pair(kind, called=False, training=training)
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph

    compiled = torch.compile(fast, fullgraph=True, backend=backend)
    torch.testing.assert_close(compiled(x), model(x), rtol=1e-4, atol=1e-4)
    with torch.no_grad():
        torch.testing.assert_close(compiled(x), model(x), rtol=1e-4, atol=1e-4)
    called = [node for node in graphs[0].graph.nodes if "fused_" in str(node.target)]
    # Running statistics are written by operators that torch.compile knows.
    assert len(called) == (1 if training else SEGMENTS[kind])
    if kind is Pointwise:  # one change at a time: each has to be seen
        model.conv.stride = fast.conv.stride = (2, 2)
        torch.testing.assert_close(compiled(x), model(x), rtol=1e-4, atol=1e-4)
        model.factor = fast.factor = 2.0
        torch.testing.assert_close(compiled(x), model(x), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", [Normed, Volume], ids=lambda kind: kind.__name__)
def test_compile_with_dynamic_shapes(kind):
    """One graph for all batch sizes."""
    torch._dynamo.reset()
    model, fast, x = pair(kind, called=False)
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph

    compiled = torch.compile(fast, fullgraph=True, dynamic=True, backend=backend)
    for size in (7, 9, 11, 13):
        part = x[:1].repeat(size, *[1] * (x.dim() - 1))
        torch.testing.assert_close(compiled(part), model(part), rtol=1e-4, atol=1e-4)
    assert len(graphs) == 1


@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")
def test_compile_under_autocast():
    torch._dynamo.reset()
    model, fast, x = pair(Normed, called=False)
    compiled = torch.compile(fast, fullgraph=True, backend="eager")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        ours, theirs = compiled(x), model(x)
    assert ours.dtype == theirs.dtype
    torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize(
    "kind, strict", [*((kind, True) for kind in INPUTS), (Residual, False), (Dropping, False)]
)
def test_export(kind, strict):
    model, fast, x = pair(kind, called=False)
    program = torch.export.export(fast, (x,), strict=strict)
    ours = [node for node in program.graph.nodes if "fused_" in str(node.target)]
    assert len(ours) == SEGMENTS[kind]
    torch.testing.assert_close(program.module()(x), model(x))


def test_parametrizations():
    class Symmetric(nn.Module):
        def forward(self, weight):
            return weight * 0.5

    model, fast, x = pair(Pointwise)
    for module in (model, fast):
        nn.utils.parametrize.register_parametrization(module, "bias", Symmetric())
    assert runs(fast, x) == ["eager"] and "parametrizations" in str(fast.plan(x))
    assert_same(fast, model, x)


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


# ----------------------------------------------------------------------------------------------- classes with variants


class Batches:
    """A schedule of its own, which takes batches of two."""

    ran = 0
    saved = staticmethod(lambda *given: schedule.saved(*given))
    backward = staticmethod(lambda *given: schedule.backward(*given))

    def describe(self, case):
        return "by two"

    def plan(self, case):
        return self._served(case.x) or schedule.plan(case)

    def requests(self, case):
        return self._served(case.x) or []

    def forward(self, plan, a):
        self.ran += 1
        return schedule.forward(plan, a)

    def _served(self, x):
        if x.shape[0] != 2:
            raise schedule.Unsupported(f"batches of {x.shape[0]}")


BY_TWO = Batches()
PointwiseNew, ResidualNew = fused(Pointwise), fused(Residual)


def test_a_class_of_fused_modules(monkeypatch):
    monkeypatch.setitem(parts.SCHEDULES, "fused", BY_TWO)
    monkeypatch.setattr(composed, "written_for", lambda segment: BY_TWO)
    model, x = PointwiseNew().eval(), torch.randn(2, 3, 5, 5)
    assert isinstance(model, Pointwise) and PointwiseNew.reference() is Pointwise
    assert PointwiseNew.variants() == ("eager", "epilogue", "fused")
    assert model.plan(x) == ("fused", "by two") and model.plan(x[:1])[0] == "epilogue"
    expected, BY_TWO.ran = Pointwise.forward(model, x), 0
    for variant, ran in (("auto", 1), ("eager", 0), ("epilogue", 0), ("fused", 1), ("auto", 1)):
        model.variant = variant
        for _ in range(2):
            torch.testing.assert_close(model(x), expected, rtol=1e-4, atol=1e-4)
        assert BY_TWO.ran == 2 * ran, variant
        assert variant == "auto" or model.plan(x) == (variant, "asked for")
        BY_TWO.ran = 0
    model.variant = "fused"
    for call in (model, model.plan):
        with pytest.raises(RuntimeError, match="variant 'fused' can't run: batches of 1"):
            call(x[:1])
    with pytest.raises(RuntimeError, match="channels"):  # eager's
        model(x[:, :1])
    model.variant = "no such variant"
    for call in (model, model.plan):
        with pytest.raises(
            ValueError, match="expected variant to be 'auto' or one of eager, epilogue, fused, got"
        ):
            call(x)


def test_a_fused_class_from_a_model():
    model, _, x = pair(Residual)
    fast = ResidualNew.from_eager(model)
    assert fast.head is model.head and fast.plan(x)[0] == "epilogue"
    assert_same(fast, model, x)
    fast.variant = "epilogue"
    for how in ("copy", "deepcopy", "pickle", "torch.save"):
        other = COPIES[how](fast)
        assert type(other) is ResidualNew and other.variant == "epilogue"
        torch.testing.assert_close(other(x), model(x), rtol=1e-4, atol=1e-4)
    with pytest.raises(TypeError, match="expected a Residual, got a Pointwise"):
        ResidualNew.from_eager(Pointwise())

    class Other(Residual):
        def forward(self, x):
            return x

    with pytest.raises(TypeError, match="expected Residual's forward, got a Other with its own"):
        ResidualNew.from_eager(Other())


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

from test_engine_fuse import Normed, Pointwise, pair

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
