"""A twin decides anew exactly when something that it depends on has changed, and what it keeps lives no longer than the twin."""

from __future__ import annotations

import copy
import functools
import gc
import io
import pickle
import weakref

import pytest
import torch
from torch import nn

import inline_loader
from inline_kernels.engine import twin as twins
from numerics import call_both, every_name, pair


@pytest.fixture
def decisions(monkeypatch):
    """decisions() is how many decisions there were since it was asked last."""
    count, choose = [0], twins.Twin.plan

    def counting(self, x):
        count[0] += 1
        return choose(self, x)

    def since():
        found, count[0] = count[0], 0
        return found

    monkeypatch.setattr(twins.Twin, "plan", counting)
    return since


@every_name
def test_decides_once_for_a_situation(name, decisions):
    _, twin, x = pair(name, called=False)
    for _ in range(3):
        for part in (x, x[:1]):
            call_both(twin, part)
    assert decisions() == 4, "two shapes, each with gradients and without"
    call_both(twin, x.flip(0))
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.mul_(2)
            parameter.data = parameter.data.clone()
    twin.conv.weight = nn.Parameter(torch.randn_like(twin.conv.weight))
    twin.load_state_dict(twin.state_dict())
    twin.history = ["a list", "that nothing depends on"]
    call_both(twin, x)
    assert decisions() == 2, "for the attribute; none for weights"
    twin.history.append("and more of it")
    call_both(twin, x)
    assert decisions() == 0


@every_name
def test_decides_anew_when_something_changed(name, decisions):
    """Once for each change, and not again for the next call."""
    _, twin, x = pair(name)
    own = [key for key, convert in twin.constants.items() if convert is float and "." not in key]
    last = list(twin.submodules)[-1]
    changes = [
        *[(1, functools.partial(setattr, twin, key, -0.4 - i)) for i, key in enumerate(own)],
        (1, lambda: twin.train()),
        (1, lambda: twin.eval()),
        (1, lambda: setattr(twin, "variant", "epilogue")),
        (1, lambda: setattr(twin, "variant", "auto")),
        (1, lambda: setattr(twin.conv, "stride", tuple([1] * len(twin.conv.stride)))),
        (1, lambda: setattr(twin, last, copy.deepcopy(getattr(twin, last)))),
        (1, lambda: setattr(twin.conv, "note", "anything")),
        (0, lambda: twin.conv.register_forward_hook(print).remove()),
        (1, lambda: setattr(twin, "step", 1)),
        (1, inline_loader.forget),
    ]
    with torch.no_grad():
        decisions()
        for place, (expected, change) in enumerate(changes):
            change()
            twin(x)
            assert decisions() == expected, place
            twin(x)
            assert decisions() == 0, place


@every_name
def test_what_a_situation_consists_of(name, decisions, monkeypatch):
    """Each of these is met for the first time once, and known the second time: also TF32's setting, which counts on a GPU."""
    model, twin, x = pair(name)
    setting = ["float32"]
    monkeypatch.setattr(twins, "precision", lambda x: setting[0])
    shifted = torch.empty(x.numel() + 1)[1:].view_as(x).copy_(x)
    frozen = [*twin.parameters()][-1]

    def frozen_call():
        frozen.requires_grad_(False)
        try:
            return twin(x)
        finally:
            frozen.requires_grad_(True)

    def cast_to(dtype):
        with torch.autocast("cpu", dtype=dtype):
            return twin(x), model(x)

    def tf32_call():
        setting[0] = "tf32"
        try:
            return twin(x)
        finally:
            setting[0] = "float32"

    calls = {
        "gradients": lambda: twin(x),
        "none": torch.no_grad()(lambda: twin(x)),
        "inference": torch.inference_mode()(lambda: twin(x)),
        "x's gradient": lambda: twin(x.clone().requires_grad_()),
        "a frozen parameter": frozen_call,
        "another alignment": lambda: twin(shifted),
        "other strides": lambda: twin(x.transpose(-1, -2).contiguous().transpose(-1, -2)),
        "autocast": lambda: cast_to(torch.bfloat16),
        "to another dtype": lambda: cast_to(torch.float16),
        "TF32": tf32_call,
    }
    twin._kept = None
    decisions()
    for label, call in calls.items():
        call()
        assert decisions() == 1, label
    for label, call in calls.items():
        call()
        assert decisions() == 0, label
    for dtype in (torch.bfloat16, torch.float16):
        ours, eager = cast_to(dtype)
        assert ours.dtype == eager.dtype
    assert twin(x).requires_grad and not calls["none"]().requires_grad


@every_name
def test_a_parameter_that_stands_for_two(name, decisions):
    """PyTorch's guards know no such situation, so it is decided at each call, and nothing is kept of it."""
    model, twin, x = pair(name, called=False)
    bound = [
        operand.rpartition(".") for operand in twin.operands if operand.endswith("bias") and "." in operand
    ]
    if len(bound) < 2:
        pytest.skip("it has one bias")
    for module in (model, twin):
        (first, _, last), (other, _, its) = bound[:2]
        setattr(module.get_submodule(other), its, getattr(module.get_submodule(first), last))
    for _ in range(3):
        torch.testing.assert_close(twin(x), model(x), rtol=1e-4, atol=1e-4)
        assert decisions() == 1 and not twin._kept.situations


@every_name
def test_keeps_the_situations_last_met(name, decisions, monkeypatch):
    """Three here: 2 is forgotten for 4, since 1 and 3 were met after it."""
    monkeypatch.setattr(twins, "_KEPT_SITUATIONS", 3)
    model, twin, x = pair(name, called=False)
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
            part = torch.cat([x, x])[:count]
            torch.testing.assert_close(twin(part), model(part), rtol=1e-4, atol=1e-4)
            assert decisions() == decided and len(twin._kept.situations) <= 3


@every_name
def test_memory_is_free_when_nobody_holds_the_module(name):
    """At once, without the garbage collector: what is kept leads nowhere back."""
    model, twin, x = pair(name)
    weight = weakref.ref(model.conv.weight)
    gc.disable()
    try:
        del model, twin
        assert weight() is None
    finally:
        gc.enable()


def replica_of(twin: nn.Module) -> nn.Module:
    """As nn.DataParallel makes them for its threads: parameters are plain attributes, which lead back to the module's."""
    replicas = {name: module._replicate_for_data_parallel() for name, module in twin.named_modules()}
    for name, module in twin.named_modules():
        for key, parameter in module._parameters.items():
            setattr(replicas[name], key, None if parameter is None else parameter.clone())
        for key in module._modules:
            setattr(replicas[name], key, replicas[f"{name}.{key}".removeprefix(".")])
    return replicas[""]


def saved(module: nn.Module) -> nn.Module:
    file = io.BytesIO()
    torch.save(module, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


COPIES = {
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "pickle": lambda module: pickle.loads(pickle.dumps(module)),
    "torch.save": saved,
    "replica": replica_of,
}


@pytest.mark.parametrize("how", COPIES)
@every_name
def test_copies_go_without_what_is_kept(name, how):
    """And are modules of their own: what is changed in one leaves the other as it was."""
    model, twin, x = pair(name)
    expected = twin(x)
    assert "_kept" not in vars(twin)
    other = COPIES[how](twin)
    assert type(other) is type(twin) and not hasattr(other, "_kept")
    assert torch.equal(other(x), expected) and other(x).requires_grad
    if how == "replica":
        other(x).sum().backward()
        assert all(p.grad is not None for p in twin.parameters())
    if how == "copy":  # shallow: of nn.Module's own dicts, too
        return
    other.conv = nn.Sequential(other.conv)
    assert other.plan(x).variant == "eager" and twin.plan(x).variant == "epilogue"
    torch.testing.assert_close(other(x), expected, rtol=1e-4, atol=1e-4)
    assert torch.equal(twin(x), expected)
