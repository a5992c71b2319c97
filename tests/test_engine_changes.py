"""`fuse(model)` does what the model does, whatever a user changes, before the first call and after it."""

from __future__ import annotations

import contextlib
import copy
import functools
import random
import types
from collections.abc import Callable
from typing import NamedTuple

import numpy
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrizations
from torch.overrides import TorchFunctionMode

from engine_stand_in import stand_in  # noqa: F401
from fused_pairs import (  # noqa: F401
    INPUTS,
    Block,
    Normed,
    Pointwise,
    Residual,
    assert_same,
    every_moment,
    here,
    pair,
    patched,
    runs,
)
from inline_kernels.engine.fuse import fuse, structure_of

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


SETTINGS = {"slope": 0.5, "more": {"scales": [1.0, 2.0]}}
ARRAY = numpy.array([0.5, 2.0])


class Options:
    shift = None


OPTIONS = Options()


MODULE = types.ModuleType("settings")
MODULE.power, MODULE.shifts, MODULE.inner = 2.0, [0.5], types.ModuleType("settings.inner")
MODULE.inner.gain = 1.5


@pytest.mark.parametrize(
    "what",
    [
        "dictionary",
        "list in it",
        "array",
        "object",
        "list that is enclosed",
        "module",
        "list of a module",
        "module in it",
    ],
)
def test_names_outside_that_change_in_place(what, monkeypatch):
    monkeypatch.setattr(OPTIONS, "shift", 0.25)
    monkeypatch.setitem(SETTINGS, "slope", 0.5)
    SETTINGS["more"]["scales"][1], ARRAY[1] = 2.0, 2.0
    enclosed = [3.0]

    class Outside(Pointwise):
        def forward(self, x):
            v = F.leaky_relu(self.conv(x), SETTINGS["slope"]) * SETTINGS["more"]["scales"][1]
            v = (v * float(ARRAY[1]) + OPTIONS.shift) * enclosed[0]
            return (v * MODULE.power + MODULE.shifts[0]) * MODULE.inner.gain

    monkeypatch.setitem(INPUTS, Outside, INPUTS[Pointwise])
    model, fast, x = pair(Outside)
    assert_same(fast, model, x)
    if what == "dictionary":
        SETTINGS["slope"] = 0.125
    elif what == "list in it":
        SETTINGS["more"]["scales"][1] = 5.0
    elif what == "array":
        ARRAY[1] = 7.0
    elif what == "object":
        OPTIONS.shift = 1.5
    elif what == "module":
        MODULE.power += 1
    elif what == "module in it":
        MODULE.inner.gain += 1
    elif what == "list of a module":
        MODULE.shifts[0] += 1
    else:
        enclosed[0] = -2.0
    assert_same(fast, model, x)
    assert runs(fast, x) == ["load"]


PAIR = torch.ones(2), torch.tensor(0.5)


def test_a_global_of_an_attribute_s_name_is_another(monkeypatch):
    """So that nothing is captured anew for it. Of a tuple that forward reads tensors are told apart by identity."""

    class Paired(Pointwise):
        def forward(self, x):
            return F.relu(self.conv(x)) * PAIR[1]

    monkeypatch.setitem(INPUTS, Paired, INPUTS[Pointwise])
    monkeypatch.setitem(globals(), "conv", (torch.ones(2), torch.ones(3)))
    model, fast, x = pair(Paired)
    assert_same(fast, model, x)
    before = structure_of(fast, (x,), {})
    monkeypatch.setitem(globals(), "conv", (torch.ones(2), torch.ones(3)))
    assert_same(fast, model, x)
    assert structure_of(fast, (x,), {}) is before
    monkeypatch.setitem(globals(), "PAIR", (torch.ones(2), torch.tensor(2.0)))
    assert_same(fast, model, x)


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


class Optional(Pointwise):
    def forward(self, x, scale=None, factor=1.0, shift=None, negative=False):
        y = torch.relu(self.conv(x)) * factor
        y = y if scale is None else y * scale
        y = y if shift is None else y + shift
        return -y if negative else y


def test_arguments_behind_defaults():
    """Those that a call leaves out may stand before those that it gives."""
    model = Optional().eval()
    fast, x = fuse(model), torch.randn(2, 3, 5, 5)
    scale, shift = torch.rand(2, 6, 5, 5), torch.rand(2, 6, 5, 5)
    calls = [
        ((x, None, 2.0), {}, "load"),
        ((x,), {"shift": shift}, "load"),
        ((x,), {"shift": shift, "scale": scale}, "load"),
        ((x, scale), {"shift": shift}, "load"),
        ((x,), {"factor": 3.0, "scale": scale}, "load"),
        ((x,), {"negative": True}, "eager"),
        ((x, scale, 1.0, shift, False), {}, "eager"),
        ((x,), {"shift": None}, "load"),
    ]
    for _ in range(2):
        for given, keywords, expected in calls:
            torch.testing.assert_close(fast(*given, **keywords), model(*given, **keywords))
            assert [each.runs for each in fast.plan(*given, **keywords)] == [expected]


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
            expected = ["eager" if "shift" in keywords else "load"]
            assert [each.runs for each in fast.plan(*given, **keywords)] == expected
    with pytest.raises(TypeError):
        fast(x, scale, x)
    with pytest.raises(TypeError):
        fast()
