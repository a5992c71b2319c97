"""What `fuse(model)` keeps is made anew exactly when something that it hangs on has changed; copies, and classes of fused modules."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import weakref
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn

import inline_loader
from engine_stand_in import stand_in  # noqa: F401
from fused_pairs import (  # noqa: F401
    SEGMENTS,
    Block,
    Pointwise,
    PointwiseNew,
    Residual,
    ResidualNew,
    assert_same,
    backward,
    every_model,
    here,
    pair,
    patched,
    results,
    runs,
)
from inline_kernels.engine import composed, schedule, structure, support
from inline_kernels.engine import part as parts
from inline_kernels.engine.fuse import fuse

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
