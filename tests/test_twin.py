"""A twin does what its reference does with the same modules, whatever a user changes, before the first call and after it.

A change is made to a reference model. Its twin, which shares the submodules, gets the same, as a user would assign it.
"""

from __future__ import annotations

import contextlib
import functools
import os
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import pytest
import torch
from torch import nn
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx
from torch.overrides import TorchFunctionMode

import inline_loader
import models
import numerics
from inline_kernels.engine import operators
from loading import ROOT
from numerics import DROPOUT, INSTANCE_NORM, MIN_ADD, NAMES, POOL, every_name, pair, results

every_moment = pytest.mark.parametrize("moment", ["before the first call", "after calls"])


def hand_over(model: nn.Module, twin: nn.Module) -> None:
    """What has been assigned to `model` is assigned to its twin."""
    for kind in ("_modules", "_parameters"):
        for name, value in getattr(model, kind).items():
            if getattr(twin, kind).get(name) is not value:
                setattr(twin, name, value)
    for name, value in vars(model).items():
        if not name.startswith("_") and vars(twin).get(name) is not value:
            setattr(twin, name, value)


def assert_same(twin: nn.Module, model: nn.Module, x: torch.Tensor, exact: bool) -> None:
    """Results and gradients, or the error. exact: to the bit."""
    torch.manual_seed(0)
    try:
        theirs = results(model, x)
    except Exception as error:
        for ways in (contextlib.nullcontext, torch.no_grad):
            with pytest.raises(type(error)) as ours, ways():
                twin(x)
            assert str(ours.value) == str(error)
        return
    torch.manual_seed(0)
    ours = results(twin, x)
    torch.manual_seed(0)
    with torch.no_grad():
        quiet = {"output": twin(x)}
    if exact:
        numerics.assert_equal(ours, theirs)
        return numerics.assert_equal(quiet, theirs)
    for key, value in [*ours.items(), *quiet.items()]:
        torch.testing.assert_close(value, theirs[key], rtol=1e-4, atol=1e-4, equal_nan=True, msg=key)


# -------------------------------------------------------------------------------------------------------- changed modules


class Doubled(nn.Module):
    """Around a module, as LoRA's layers are: its result and something that was learnt."""

    def __init__(self, inner: nn.Module):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return self.inner(x) * 2

    def __getattr__(self, name):
        return super().__getattr__(name) if name == "inner" else getattr(self.inner, name)


def subclassed(module: nn.Module) -> None:
    """Of a class derived from its own, with another forward."""
    own = type(module)
    module.__class__ = type(
        f"My{own.__name__}", (own,), {"forward": lambda self, x: own.forward(self, x) * 2}
    )


def with_forward(module: nn.Module) -> None:
    """As accelerate does: the instance's forward around the one it had."""
    module.forward = functools.partial(lambda forward, x: forward(x) * 2, module.forward)


def replaced(part: str, make: Callable) -> Callable:
    return lambda model: setattr(model, part, make(getattr(model, part)))


def edited(path: str, value) -> Callable:
    *owners, name = path.split(".")
    return lambda model: setattr(model.get_submodule(".".join(owners)), name, value)


def padded_otherwise(model: nn.Module) -> None:
    """Its padding without the size in conv.padding, as for pictures that go on at their other edge."""
    conv = model.conv
    conv.padding_mode, conv._reversed_padding_repeated_twice = "circular", (1, 1) * (conv.weight.dim() - 2)


def convolution(model: nn.Module, **options) -> None:
    old = model.conv
    options = {"kernel_size": old.kernel_size, **options}
    torch.manual_seed(5)
    model.conv = type(old)(old.in_channels, old.out_channels, **options).eval()


class Change(NamedTuple):
    """Of a reference model: what is done, on what, and what the plan then says; where nothing, the kernels run as before."""

    make: Callable[[nn.Module], object]
    reason: str = ""
    names: tuple[str, ...] = tuple(NAMES)


def of_every_part(label: str, make: Callable, reason: str) -> dict[str, Change]:
    """One change of each submodule of each problem; `reason` may name its {part} and {kind}."""
    found = {}
    for name in NAMES:
        for part, kind in models.PROBLEMS[name].ModelNew.submodules.items():
            said = reason.format(part=part, kind=kind.__name__)
            found[f"{part} of {name}, {label}"] = Change(functools.partial(make, part), said, (name,))
    return found


CHANGES = {
    **of_every_part("subclass", lambda part, m: subclassed(getattr(m, part)), "{part} is a My{kind}"),
    **of_every_part("wrapped", lambda part, m: replaced(part, Doubled)(m), "{part} is a Doubled, and"),
    **of_every_part(
        "another class", lambda part, m: replaced(part, nn.Sequential)(m), "{part} is a Sequential, and"
    ),
    **of_every_part("its forward", lambda part, m: with_forward(getattr(m, part)), "{part} has a forward of"),
    **of_every_part(
        "hook", lambda part, m: getattr(m, part).register_forward_hook(lambda *a: a[2] * 2), "{part} has hooks"
    ),
    **of_every_part(
        "pre-hook",
        lambda part, m: getattr(m, part).register_forward_pre_hook(lambda module, given: given[0] * 2),
        "{part} has hooks",
    ),
    **of_every_part(
        "backward hook",
        lambda part, m: getattr(m, part).register_full_backward_hook(lambda *a: (a[1][0] * 2,)),
        "{part} has hooks",
    ),
    **of_every_part(
        "compiled", lambda part, m: getattr(m, part).compile(backend="eager"), "{part} has a _compiled_call_impl"
    ),
    "stride edited": Change(lambda m: setattr(m.conv, "stride", (2,) * len(m.conv.stride)), "stride, padding"),
    "stride, a number": Change(edited("conv.stride", 2), "stride, padding"),
    "padding edited": Change(lambda m: setattr(m.conv, "padding", (1,) * len(m.conv.padding)), "padding"),
    "padding, a number": Change(edited("conv.padding", 1), "padding"),
    "padding, the number 0": Change(edited("conv.padding", 0)),
    "padding, a word": Change(lambda m: convolution(m, padding="same"), "padding"),
    "padding mode": Change(padded_otherwise, "padding"),
    "dilation, a number": Change(edited("conv.dilation", 2), "dilation"),
    "another convolution": Change(convolution),
    "another kernel size": Change(lambda m: convolution(m, kernel_size=2)),
    "no bias": Change(lambda m: convolution(m, bias=False), "no bias"),
    "bias taken away": Change(edited("conv.bias", None), "no bias"),
    "parametrized convolution": Change(
        lambda m: nn.utils.parametrizations.weight_norm(m.conv), "conv is a ParametrizedConv"
    ),
    "a bias for each position": Change(
        lambda m: setattr(m, "bias", nn.Parameter(torch.randn(20, 9, 11))), "bias holds neither", (MIN_ADD,)
    ),
    "batch norm": Change(
        replaced("instance_norm", lambda old: nn.BatchNorm3d(old.num_features)),
        "instance_norm is a BatchNorm3d, and the kernels replace a InstanceNorm3d",
        (INSTANCE_NORM,),
    ),
    "affine": Change(
        replaced("instance_norm", lambda old: nn.InstanceNorm3d(old.num_features, affine=True)),
        "instance_norm has an affine",
        (INSTANCE_NORM,),
    ),
    "a weight for a norm without": Change(
        lambda m: setattr(m.instance_norm, "weight", nn.Parameter(torch.randn(20))),
        "instance_norm has an affine",
        (INSTANCE_NORM,),
    ),
    "running statistics": Change(
        replaced("instance_norm", lambda old: nn.InstanceNorm3d(old.num_features, track_running_stats=True)),
        "running statistics",
        (INSTANCE_NORM,),
    ),
    "batch norm for groups": Change(
        replaced("norm", lambda old: nn.BatchNorm3d(old.num_channels).eval()), "norm is a BatchNorm3d", (DROPOUT,)
    ),
    "dropped volumes": Change(
        replaced("dropout", lambda old: nn.Dropout3d(0.5)), "dropout is a Dropout3d", (DROPOUT,)
    ),
    "dropped to saturation": Change(
        replaced("dropout", lambda old: nn.AlphaDropout(0.5)), "dropout is a AlphaDropout", (DROPOUT,)
    ),
    "nothing dropped": Change(
        replaced("dropout", lambda old: nn.Identity()), "dropout is a Identity", (DROPOUT,)
    ),
    "mean instead of maximum": Change(
        replaced("maxpool", lambda old: nn.AvgPool2d(old.kernel_size)), "maxpool is a AvgPool2d", (POOL,)
    ),
    "pool's stride": Change(edited("maxpool.stride", (1, 1)), "maxpool has another stride", (POOL,)),
    "pool's ceil_mode": Change(edited("maxpool.ceil_mode", True), "maxpool has another stride", (POOL,)),
    "pool's padding": Change(edited("maxpool.padding", 1), "maxpool has another stride", (POOL,)),
    "pool's indices": Change(edited("maxpool.return_indices", True), "maxpool has another stride", (POOL,)),
    "pool's size and stride": Change(replaced("maxpool", lambda old: nn.MaxPool2d(3)), "", (POOL,)),
    "pool's size in a tuple of one": Change(replaced("maxpool", lambda old: nn.MaxPool2d((3,))), "", (POOL,)),
    "pool's size, too many": Change(
        replaced("maxpool", lambda old: nn.MaxPool2d((2, 3, 4))), "does not fit", (POOL,)
    ),
    "pool's size, none": Change(replaced("maxpool", lambda old: nn.MaxPool2d(None)), "does not fit", (POOL,)),
    "groups that don't divide": Change(edited("norm.num_groups", 5), "does not fit", (DROPOUT,)),
    "groups below one": Change(edited("group_norm.num_groups", -4), "does not fit", (POOL,)),
    "other groups": Change(edited("group_norm.num_groups", 2), "", (POOL,)),
    "no number of groups": Change(edited("norm.num_groups", 2.0), "norm.num_groups is not a num", (DROPOUT,)),
    "a norm without affine": Change(edited("norm.bias", None), "no affine", (DROPOUT,)),
    "no probability": Change(edited("dropout.p", 1.5), "does not fit", (DROPOUT,)),
    "in place": Change(edited("dropout.inplace", True), "", (DROPOUT,)),
}  # fmt: skip
CONSTANTS = [
    (name, constant)
    for name in NAMES
    for constant, convert in models.PROBLEMS[name].ModelNew.constants.items()
    if convert is float
]


@every_moment
@pytest.mark.parametrize(
    "name, label", [(name, label) for label, change in CHANGES.items() for name in change.names]
)
def test_changed_modules(name, label, moment):
    change = CHANGES[label]
    model, twin, x = pair(name, called="after" in moment)
    change.make(model)
    hand_over(model, twin)
    plan = twin.plan(x)
    assert plan.variant == ("eager" if change.reason else "epilogue") and change.reason in plan.reason
    assert_same(twin, model, x, exact=bool(change.reason))
    if change.reason and "does not fit" not in change.reason:
        twin.variant = "epilogue"
        with pytest.raises(RuntimeError, match="variant 'epilogue' can't run"):
            twin(x)


@every_name
def test_lazy_convolution(name):
    """Eager gives it its shape; then the kernels run."""
    model, twin, x = pair(name)
    kind = nn.LazyConv2d if x.dim() == 4 else nn.LazyConv3d
    twin.conv = kind(twin.conv.out_channels, 3)
    assert twin(x).isfinite().all()
    model.conv = twin.conv
    assert twin.plan(x).variant == "epilogue"
    assert_same(twin, model, x, exact=False)


@pytest.mark.parametrize(
    "value", [None, torch.tensor(0.25), float("nan"), float("inf"), -0.75, 1, True], ids=str
)
@every_moment
@pytest.mark.parametrize("name, constant", CONSTANTS)
def test_changed_constants(name, constant, value, moment):
    """Numbers reach the kernels, but NaN, whose comparisons are eager's; what is no number goes to eager, or to its error."""
    if (
        constant.endswith("eps")
        and value == float("inf")
        or constant.endswith(".p")
        and value in (-0.75, float("inf"))
    ):
        pytest.skip("nothing to divide by, no probability")
    model, twin, x = pair(name, called="after" in moment)
    edited(constant, value)(model)
    hand_over(model, twin)
    left = value is None or isinstance(value, torch.Tensor) or value != value
    assert twin.plan(x).variant == ("eager" if left else "epilogue")
    assert not left or f"{constant} is " in twin.plan(x).reason
    assert_same(twin, model, x, exact=left)


@every_name
def test_changed_for_all_modules(name):
    """Hooks on all modules and a class's forward replaced: seen at once, and gone when they are."""
    model, twin, x = pair(name)
    handle = nn.modules.module.register_module_forward_hook(
        lambda *a: a[2] * 2 if a[0] is model.conv else None
    )
    assert twin.plan(x) == ("eager", "there are hooks on all modules")
    assert_same(twin, model, x, exact=True)
    handle.remove()
    assert twin.plan(x).variant == "epilogue"
    assert_same(twin, model, x, exact=False)
    kind = type(model.conv)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kind, "forward", lambda self, x, forward=kind.forward: forward(self, x) * 2)
        assert twin.plan(x) == ("eager", f"{kind.__name__}.forward has been replaced")
        assert_same(twin, model, x, exact=True)
    assert_same(twin, model, x, exact=False)


class Doubling(TorchFunctionMode):
    def __torch_function__(self, function, types, args=(), kwargs=None):
        y = function(*args, **kwargs or {})
        return y * 2 if function in (torch.conv2d, torch.conv3d) else y


@contextlib.contextmanager
def doubled(owner, name: str):
    """What `owner` calls `name` gives twice as much."""
    with pytest.MonkeyPatch.context() as patch:
        before = getattr(owner, name)
        patch.setattr(owner, name, lambda *a, **keywords: before(*a, **keywords) * 2)
        yield


INTERCEPTED = {
    "a mode": (lambda conv: Doubling(), "TorchFunctionMode"),
    "the class's _conv_forward": (lambda conv: doubled(type(conv), "_conv_forward"), "a function that"),
    "its function": (lambda conv: doubled(nn.functional, f"conv{conv.weight.dim() - 2}d"), "a function that"),
    "all calls": (lambda conv: doubled(nn.Module, "__call__"), "a function that"),
}


@pytest.mark.parametrize("how", INTERCEPTED)
@every_moment
@every_name
def test_intercepted_calls(name, moment, how):
    """For as long as they are. torch's own modes leave the functions what they are."""
    model, twin, x = pair(name, called="after" in moment)
    make, reason = INTERCEPTED[how]
    with torch.device("cpu"):
        for _ in range(2):
            with make(model.conv):
                plan = twin.plan(x)
                assert plan.variant == "eager" and reason in plan.reason
                assert_same(twin, model, x, exact=True)
            assert twin.plan(x).variant == "epilogue"
            assert_same(twin, model, x, exact=False)


@every_moment
@pytest.mark.parametrize("name, constant", [each for each in CONSTANTS if "." not in each[1]])
def test_constant_of_the_class(name, constant, moment):
    """A property, which may give another number each time."""
    model, twin, x = pair(name, called="after" in moment)
    numbers = [getattr(model, constant)]
    for module in (model, twin):
        del vars(module)[constant]
        own = {constant: property(lambda self: numbers[0])}
        module.__class__ = type(f"My{type(module).__name__}", (type(module),), own)
    for numbers[0] in (-0.75, 0.25):
        assert twin.plan(x).variant == "epilogue"
        assert_same(twin, model, x, exact=False)


@every_moment
@every_name
def test_attributes_replaced_as_a_whole(name, moment):
    """A submodule's, and the twin's own."""
    model, twin, x = pair(name, called="after" in moment)
    model.conv.__dict__ = vars(model.conv) | {"stride": (2,) * len(model.conv.stride)}
    assert "stride" in twin.plan(x).reason
    assert_same(twin, model, x, exact=True)
    other, _ = numerics.small(name, seed=7)
    twin.__dict__ = vars(models.PROBLEMS[name].ModelNew.from_eager(other))
    assert twin.plan(x).variant == "epilogue"
    assert_same(twin, other, x, exact=False)


@pytest.mark.parametrize("how", ["registered", "its forward"])
@every_name
def test_hook_taken_away(name, how):
    """A handle removed, the own forward deleted: the kernels run again."""
    model, twin, x = pair(name)
    if how == "registered":
        undo = model.conv.register_forward_hook(lambda *a: a[2] * 2).remove
    else:
        with_forward(model.conv)
        undo = functools.partial(delattr, model.conv, "forward")
    assert twin.plan(x).variant == "eager"
    assert_same(twin, model, x, exact=True)
    undo()
    assert twin.plan(x).variant == "epilogue"
    assert_same(twin, model, x, exact=False)


def test_list_changed_in_place():
    """As a pool's size, which is its stride, too."""
    size = [2, 3]
    model, x = numerics.small(POOL)
    model.maxpool = nn.MaxPool2d(size)
    twin = numerics.twin_of(model, "auto")
    for rows, columns in ((2, 3), (3, 3), (2, 3)):
        size[:] = rows, columns
        assert twin.plan(x).variant == "epilogue"
        assert_same(twin, model, x, exact=False)


@pytest.mark.parametrize("value", ["a number", torch.tensor([2, 3])], ids=str)
def test_pool_of_a_size_that_is_none(value):
    model, twin, x = pair(POOL)
    model.maxpool.kernel_size = model.maxpool.stride = value
    assert_same(twin, model, x, exact=True)


@every_name
def test_parametrized_twin(name):
    """Eager, because reading a parametrized parameter may change it; a reference of such parameters has no twin."""

    class Counted(nn.Module):
        reads = 0

        def forward(self, parameter):
            Counted.reads += 1
            return parameter * 2

    model, twin, x = pair(name)
    own = next((key for key in model._parameters), None)
    if own is None:
        return
    nn.utils.parametrize.register_parametrization(model, own, Counted())
    with pytest.raises(TypeError, match="parametrize its twin"):
        models.PROBLEMS[name].ModelNew.from_eager(model)
    nn.utils.parametrize.register_parametrization(twin, own, Counted())
    assert twin.plan(x) == ("eager", "the model has parametrizations")
    assert_same(twin, model, x, exact=True)
    Counted.reads = 0
    model(x)
    expected, Counted.reads = Counted.reads, 0
    twin(x)
    assert Counted.reads == expected > 0


@every_name
def test_from_eager_wants_the_reference_s_forward(name):
    problem = models.PROBLEMS[name]
    model, x = numerics.small(name)

    class Other(problem.Model):
        def forward(self, x):
            return super().forward(x) + 1

    class Same(problem.Model):
        def extra(self):
            return 1

    arguments = numerics.size_of(name).arguments
    for wrong in (Other(*arguments), Same(*arguments)):
        if type(wrong) is Same:
            wrong.forward = lambda x: x
        with pytest.raises(TypeError, match=f"expected {problem.Model.__name__}'s forward, got a "):
            problem.ModelNew.from_eager(wrong)
    same = Same(*arguments).eval()
    assert problem.ModelNew.from_eager(same).plan(x).variant == "epilogue"
    assert_same(problem.ModelNew.from_eager(same), same, x, exact=False)
    again = problem.ModelNew.from_eager(problem.ModelNew.from_eager(model))
    assert_same(again, model, x, exact=False)


# ----------------------------------------------------------------------------------------------- changed between two calls


@every_name
def test_weights_count_at_once(name):
    """Replaced, in place, by .data, loaded; in one order with gradients first and in the other without."""
    model, twin, x = pair(name)
    changes = [
        lambda parameter: parameter.detach().mul_(-0.5),
        lambda parameter: setattr(parameter, "data", torch.randn_like(parameter)),
        lambda parameter: parameter.data.add_(0.25),
    ]
    for change in changes:
        for parameter in model.parameters():
            change(parameter)
        assert_same(twin, model, x, exact=False)
    for key, parameter in list(model.named_parameters()):
        *path, last = key.split(".")
        setattr(model.get_submodule(".".join(path)), last, nn.Parameter(torch.randn_like(parameter)))
        hand_over(model, twin)
        with torch.no_grad():
            torch.testing.assert_close(twin(x), model(x), rtol=1e-4, atol=1e-4)
        assert_same(twin, model, x, exact=False)
    fresh = numerics.build(name, numerics.size_of(name).arguments, seed=3)
    twin.load_state_dict(fresh.state_dict())
    assert torch.equal(model.conv.weight, fresh.conv.weight)
    assert_same(twin, model, x, exact=False)
    assert twin.plan(x).variant == "epilogue"


@pytest.mark.parametrize("size", ["small", "winograd"])
@every_name
def test_biases_count_as_they_were_in_forward(name, size):
    """Changed through .data, which autograd doesn't see, before backward: eager's reads neither the convolution's nor a norm's."""
    if (sized := getattr(numerics.known(name), size)) is None:
        pytest.skip("Winograd's way is not taken")
    model, x = numerics.sized(name, sized)
    numerics.give_gradients(model, x)
    twin, biases = (
        numerics.twin_of(model),
        [p for key, p in model.named_parameters() if key.endswith(".bias")],
    )
    changes = (
        lambda bias: bias.data.add_(0.5),
        lambda bias: setattr(bias, "data", torch.full_like(bias, float("nan"))),
    )
    for change in changes:
        found = []
        for module in (model, twin):
            given, before = x.clone().requires_grad_(), [bias.detach().clone() for bias in biases]
            torch.manual_seed(0)
            y = module(given)
            for bias in biases:
                change(bias)
            found.append(torch.autograd.grad(y.square().sum(), [given, *module.parameters()]))
            for bias, values in zip(biases, before):
                bias.data = values
        for theirs, ours in zip(*found):
            torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-3 + 1e-3 * theirs.abs().max().item())


@every_name
def test_parameter_of_another_class(name):
    """Which may give operators a meaning of its own: eager, where torch asks it."""

    class Asked(torch.Tensor):
        functions = []

        @classmethod
        def __torch_function__(cls, function, types, args=(), kwargs=None):
            cls.functions.append(getattr(function, "__name__", ""))
            return super().__torch_function__(function, types, args, kwargs)

    model, twin, x = pair(name)
    model.conv.weight = nn.Parameter(model.conv.weight.detach().as_subclass(Asked))
    assert type(twin.conv.weight) is Asked and "subclass of Tensor" in twin.plan(x).reason
    Asked.functions.clear()
    with torch.no_grad():
        assert torch.equal(twin(x), model(x))
    assert Asked.functions.count(f"conv{x.dim() - 2}d") == 2


FREED = """
import sys

import torch

from numerics import give_gradients, known, sized, small, twin_of

_, name, own = sys.argv
import fifth.registered  # for its name
for winograd in (False, True) if known(name).winograd else (False,):
    model, x = sized(name, known(name).winograd) if winograd else small(name)
    give_gradients(model, x)
    given, twin = {"x": x, **dict(model.named_parameters())}, twin_of(model, "auto")
    for key, t in given.items():
        for moved in (t.detach(), torch.cat([t.detach().flatten()] * 2)[t.numel() :].view_as(t)):  # a view
            torch.manual_seed(0)
            t.data = moved
            y, whole = twin(x), t.untyped_storage()
            held, size = t.detach().clone(), whole.nbytes()
            whole.resize_(0)
            for wanted in (True, False):
                with torch.set_grad_enabled(wanted):
                    try:
                        twin(x)
                    except RuntimeError:
                        continue
                raise SystemExit(f"{key} was read")
            try:
                y.sum().backward()
            except RuntimeError:
                assert key not in own.split(","), f"eager's backward goes without {key}"
            else:
                assert key != "x"
            whole.resize_(size)
            t.detach().copy_(held)
"""


@every_name
def test_memory_that_was_freed(name):
    """An error as eager's, in a process of its own, since it may crash. Backward needs no bias, as eager's."""
    biases = [key for key, _ in numerics.small(name)[0].named_parameters() if key.endswith("bias")]
    call = [sys.executable, "-c", FREED, name, ",".join(biases)]
    paths = os.pathsep.join([str(ROOT), str(ROOT / "tests")])
    done = subprocess.run(call, env=os.environ | {"PYTHONPATH": paths}, capture_output=True, text=True)
    assert done.returncode == 0, (done.returncode, done.stderr[-1000:])


@every_name
def test_requires_grad_is_toggled(name):
    model, twin, x = pair(name)
    for wanted in (False, True, False):
        model.requires_grad_(wanted)
        assert twin(x).requires_grad == wanted
        assert twin(x.clone().requires_grad_()).requires_grad
        model.conv.bias.requires_grad_(True)
        assert twin(x).requires_grad
    with torch.no_grad():
        assert not twin(x).requires_grad


@every_name
def test_dtype_and_autocast_are_toggled(name):
    """Of one module, back and forth."""
    model, twin, x = pair(name)
    for convert in (nn.Module.double, nn.Module.float, nn.Module.half, nn.Module.float):
        convert(model), convert(twin)
        dtype = model.conv.weight.dtype
        theirs, ours = model(x.to(dtype)), twin(x.to(dtype))
        assert ours.dtype == theirs.dtype
        torch.testing.assert_close(ours, theirs, rtol=1e-2, atol=2e-2)
        for mismatched in (torch.float64, torch.float32):
            if mismatched != dtype:
                with pytest.raises(RuntimeError):
                    twin(x.to(mismatched))
    for dtype in (torch.bfloat16, None, torch.bfloat16, None):
        with torch.autocast("cpu", dtype=dtype or torch.bfloat16, enabled=dtype is not None):
            theirs, ours = model(x), twin(x)
        assert ours.dtype == theirs.dtype
        torch.testing.assert_close(ours, theirs, rtol=5e-2, atol=0.1)


def test_dropout_is_toggled():
    """By the module's mode, the submodule's, and its probability; a mode of the whole leaves nothing behind."""
    model, twin, x = pair(DROPOUT)

    def dropped():
        return bool((twin(x) == 0).any())

    assert not dropped()
    twin.train()
    assert dropped()
    twin.dropout.eval()
    assert not dropped()
    twin.dropout.train()
    assert dropped()
    twin.dropout.p = 0.0
    assert not dropped()
    twin.dropout.p = 1.0
    assert not twin(x).any()
    twin.eval()
    assert not dropped()


@every_name
def test_variant_is_toggled(name):
    model, twin, x = pair(name)
    kind, ran = type(twin), []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(models.PROBLEMS[name].Model, "forward", lambda self, x: ran.append("eager"))
        twin(x)
        assert not ran
        twin.variant = "eager"
        twin(x)
        assert ran.pop()
        del twin.variant
        twin(x)
        assert not ran
        patch.setattr(kind, "variant", "eager")  # for all of them
        twin(x)
        assert ran.pop()
    twin.variant = "no such variant"
    with pytest.raises(ValueError, match="expected variant to be 'auto' or one of"):
        twin(x)


@every_name
def test_inference_mode_and_back(name):
    model, twin, x = pair(name, called=False)
    with torch.inference_mode():
        inside = twin(x)
        assert inside.is_inference() and torch.equal(twin(x.clone()), inside)
    assert_same(twin, model, x, exact=False)
    with torch.inference_mode():
        assert torch.equal(twin(x), inside)


@every_name
def test_a_plan_made_in_inference_mode_serves_outside(name):
    _, twin, x = pair(name, called=False)
    inline_loader.forget()  # the plans of other tests
    with torch.inference_mode():
        inside = twin(x)
    with torch.no_grad():
        assert torch.equal(twin(x), inside)


@every_name
def test_threads_with_different_shapes(name):
    """On one module, whose kept plans they share, some with gradients."""
    _, twin, x = pair(name)
    parts = [x, x[:1], x[..., :-1].contiguous(), torch.cat([x, x])]
    expected = [twin(part).detach() for part in parts]
    twin._kept.situations.clear()

    def run(number):
        part, right = parts[number % 4], expected[number % 4]
        with torch.set_grad_enabled(number % 3 == 0):
            y = twin(part)
        return y.requires_grad == (number % 3 == 0) and torch.equal(y, right)

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(run, range(200)))


@every_name
def test_odd_tensors(name):
    """What is no plain strided tensor is eager's, or in eager's way."""
    model, twin, x = pair(name)
    assert_same(twin, model, x.to_sparse(), exact=True)
    negative = torch.complex(x, -x).conj().imag  # whose sign is a flag
    assert negative.is_neg()
    assert_same(twin, model, negative, exact=False)
    twin(nn.Parameter(x)).sum().backward()
    operators.rounded.cache_clear()
    with torch.device("meta"):  # where new tensors are made unless a device is given
        torch.testing.assert_close(twin(x), twin(x.clone()))
        assert twin(x).device == x.device


# ------------------------------------------------------------------------------------- transformations, after plain calls


@pytest.mark.parametrize("dual", ["x", "parameters", "both"])
@every_moment
@every_name
def test_forward_mode_ad(name, dual, moment):
    """Eager's tangent; without one, the kernels run."""
    model, twin, x = pair(name, called="after" in moment)
    tangents = {key: torch.randn_like(p) for key, p in model.named_parameters()}
    answers = []
    with forward_ad.dual_level():
        assert twin.plan(x).variant == "epilogue"
        for module in (model, twin):
            given = forward_ad.make_dual(x, torch.ones_like(x)) if dual != "parameters" else x
            pairs = {key: forward_ad.make_dual(p, tangents[key]) for key, p in module.named_parameters()}
            with torch.no_grad():
                y = torch.func.functional_call(module, pairs if dual != "x" else {}, given)
            answers.append(forward_ad.unpack_dual(y))
            if dual != "parameters":
                assert module is model or "forward-mode AD" in twin.plan(given).reason
    assert answers[0].tangent is not None and answers[1].tangent is not None
    for theirs, ours in zip(*answers):
        assert torch.equal(ours, theirs)
    assert_same(twin, model, x, exact=False)


@every_name
def test_transformations_of_torch_func(name):
    model, twin, x = pair(name)
    parameters = {key: p.detach() for key, p in model.named_parameters()}

    def loss(module):
        return lambda values, x: torch.func.functional_call(module, values, x).square().mean()

    transformed = (
        lambda run, module: torch.func.grad(run)(parameters, x),
        lambda run, module: torch.func.vmap(lambda x: run(parameters, x))(torch.stack([x, 2 * x])),
        lambda run, module: torch.func.jvp(lambda x: run(parameters, x), (x,), (torch.ones_like(x),)),
        lambda run, module: torch.func.vmap(torch.func.grad(run), in_dims=(None, 0))(
            parameters, torch.stack([x, 2 * x])
        ),
    )
    for transform in transformed:
        theirs, ours = (transform(loss(module), module) for module in (model, twin))
        torch.testing.assert_close(ours, theirs)
    assert_same(twin, model, x, exact=False)


@every_name
def test_a_batch_of_gradients(name):
    """As torch.autograd.functional.jacobian(vectorize=True) asks for: the same as one by one."""
    _, twin, x = pair(name)
    y, inputs = twin(x.requires_grad_()), [x, *twin.parameters()]
    batch = torch.randn(3, *y.shape)
    single = [torch.autograd.grad(y, inputs, dy, retain_graph=True) for dy in batch]
    together = torch.autograd.grad(y, inputs, batch, retain_graph=True, is_grads_batched=True)
    for gradients, expected in zip(together, zip(*single)):
        assert torch.equal(gradients, torch.stack(expected))
    [alone] = torch.autograd.grad(y, [twin.conv.bias], batch, is_grads_batched=True)  # no other is asked for
    [bias] = [g for g, tensor in zip(together, inputs) if tensor is twin.conv.bias]
    assert torch.equal(alone, bias)


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning", "ignore::DeprecationWarning")
@every_name
def test_fake_tensors_and_traces(name):
    """A dispatch mode sees the operator, not what it is made of; so do traces, which therefore hold for other sizes."""
    model, twin, x = pair(name)
    with torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad():
        fake = twin(torch.empty(x.shape))
    assert type(fake) is not torch.Tensor and fake.shape == twin(x).shape
    with torch.no_grad():
        graph = make_fx(twin)(x)
    assert any(node.target is twin.epilogue.registered for node in graph.graph.nodes)
    torch.testing.assert_close(graph(x * 2), twin(x * 2))
    for wanted in (True, False):
        with torch.set_grad_enabled(wanted):
            traced = torch.jit.trace(twin, x)
            torch.testing.assert_close(traced(x[:1] * 2), twin(x[:1] * 2))


@every_name
def test_saved_tensors_may_be_packed(name):
    """As torch.autograd.graph.save_on_cpu does."""
    model, twin, x = pair(name)
    expected, packed = results(twin, x), []

    def pack(t):
        packed.append(t)
        return t.clone()

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        numerics.assert_equal(results(twin, x), expected)
    assert packed
