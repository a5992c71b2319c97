"""What forward saved is used up by backward where nobody else has it: dz is written over v, masks are freed; and stays where somebody has."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import numerics
from inline_kernels import fuse
from inline_kernels.engine import gradients, layouts
from test_emulated import folder, gpu, guarded, pytestmark, remembers_nothing  # noqa: F401
from test_engine_direct import KEPT, device, random_model  # noqa: F401

SMOOTH = (24, 5, 2, 3), lambda m, v: F.gelu(v * m.number)


@pytest.fixture
def smooth(device):
    """A model whose backward needs v, and an input; what forward saved lies where `dzs` then finds dz, if nobody else has it."""
    device(900)
    model = random_model(*SMOOTH)
    return model, fuse(copy.deepcopy(model)), numerics.random_input((2, 5, 6, 34)).requires_grad_()


@pytest.fixture
def dzs(monkeypatch):
    """The addresses of all dz."""
    found, own = [], layouts.differentiating

    def differentiating(*given):
        by_library, filters = own(*given)

        def gradients(dz, *operands):
            found.append(dz.data_ptr())
            return by_library(dz, *operands)

        return gradients, filters

    monkeypatch.setattr(layouts, "differentiating", differentiating)
    monkeypatch.setattr(gradients, "fastest", lambda *_: gradients.Ways())
    return found


def saved_v(y: torch.Tensor) -> torch.Tensor:
    return next(t for t in y.grad_fn.saved_tensors if t.shape == y.shape and t.dtype == y.dtype)


def test_dz_is_written_over_v_that_nobody_else_has(smooth, dzs):
    model, fast, x = smooth
    y = fast(x)
    place = saved_v(y).data_ptr()
    found = torch.autograd.grad(y.square().sum(), [x, fast.conv.weight])
    assert dzs == [place]
    expected = torch.autograd.grad(model(x).square().sum(), [x, model.conv.weight])
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def test_dz_that_is_another_input_s_gradient_too(device, dzs):
    """It is its own tensor then, of that input's shape."""
    device(900)
    model = random_model(SMOOTH[0], lambda m, v, other: F.gelu(v + other))
    fast, x = fuse(copy.deepcopy(model)), numerics.random_input((2, 5, 6, 34)).requires_grad_()
    y = fast(x)
    places = {t.data_ptr() for t in y.grad_fn.saved_tensors}
    found = torch.autograd.grad(y.square().sum(), [x, fast.conv.weight])
    assert len(dzs) == 1 and dzs[0] not in places
    expected = torch.autograd.grad(model(x).square().sum(), [x, model.conv.weight])
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def freed_by(fast: nn.Module, x: torch.Tensor, monkeypatch) -> list[int]:
    """The bytes of each memory that a step frees; it frees none where its graph is retained."""
    freed, own = [], torch.UntypedStorage.resize_
    monkeypatch.setattr(
        torch.UntypedStorage, "resize_", lambda self, size: freed.append(self.nbytes()) or own(self, size)
    )
    for _ in range(2):  # once to plan, with tensors that are freed, too
        freed.clear()
        y = fast(x)
        torch.autograd.grad(y.sum(), fast.conv.weight, retain_graph=True)
        retained = [*freed]
        torch.autograd.grad(y.sum(), fast.conv.weight)
    assert not retained
    return freed


def test_what_else_was_saved_is_freed(device, monkeypatch):
    """Behind the pass that reads it, unless the graph is retained."""
    device(900)
    fast, x = fuse(random_model(SMOOTH[0], KEPT["a mask"][0])), numerics.random_input((2, 5, 6, 34))
    assert freed_by(fast, x, monkeypatch) == [fast(x).numel()]  # a byte of each


def test_a_chain_writes_dz_over_v(device, dzs):
    device(900)
    model = nn.Sequential(nn.Conv2d(5, 24, (2, 3)), nn.GELU(), nn.Conv2d(24, 16, 3), nn.GELU())
    fast, x = fuse(copy.deepcopy(model)), numerics.random_input((2, 5, 9, 34)).requires_grad_()
    for _ in range(2):  # the first one decides
        dzs.clear()
        y = fast(x)
        saved = {t.data_ptr() for t in y.grad_fn.saved_tensors}
        found = torch.autograd.grad(y.square().sum(), [x, fast[0].weight, fast[2].weight])
    assert len(dzs) == 2 and saved.issuperset(dzs)
    expected = torch.autograd.grad(model(x).square().sum(), [x, model[0].weight, model[2].weight])
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def test_a_graph_that_is_retained_keeps_v(smooth, dzs):
    _, fast, x = smooth
    y = fast(x)
    place = saved_v(y).data_ptr()
    first, second = (
        torch.autograd.grad(y.square().sum(), [x, fast.conv.weight], retain_graph=again)
        for again in (True, False)
    )
    assert all(map(torch.equal, first, second))
    assert dzs[0] != place == dzs[1]


def through_numpy(t: torch.Tensor) -> torch.Tensor:
    """The same memory, of which another storage knows."""
    return torch.from_numpy(t.detach().numpy())


UNPACKED = {"read": None, "hooks": lambda t: t, "aliases": torch.Tensor.detach, "arrays": through_numpy}


@pytest.mark.parametrize("unpack", UNPACKED.values(), ids=UNPACKED)
def test_v_that_a_user_has_stays(unpack, smooth, dzs):
    """Who has read it, or whose hooks keep it, or something that shares its memory."""
    _, fast, x = smooth
    if unpack is None:
        y = fast(x)
        v = saved_v(y)
    else:
        kept = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, unpack):
            y = fast(x)
        v = next(t for t in kept if t.shape == y.shape and not t.requires_grad)
    before = v.clone()
    torch.autograd.grad(y.square().sum(), [x, fast.conv.weight])
    assert torch.equal(v, before) and dzs != [v.data_ptr()]
