"""Tails that a GPU's library runs inside its convolution: which, where the library is trusted with them, and that all is right."""

from __future__ import annotations

import contextlib

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from inline_kernels import fuse
from inline_kernels.bench import checks, compare
from inline_kernels.engine import capture as capturing
from inline_kernels.engine import inside
from inline_kernels.engine.capture import capture
from test_emulated import folder, gpu, guarded, remembers_nothing  # noqa: F401
from test_engine_between import layouts  # noqa: F401


class Adds(nn.Module):
    """A residual block's end: relu(convolution + x), the terms in either order."""

    def __init__(self, bias: bool = True, x_first: bool = False):
        super().__init__()
        self.conv, self.x_first = nn.Conv2d(8, 8, 3, padding=1, bias=bias), x_first

    def forward(self, x):
        return F.relu(x + self.conv(x) if self.x_first else self.conv(x) + x)


def relued(*layers: nn.Module) -> nn.Module:
    return nn.Sequential(*layers, nn.ReLU())


MODELS = {
    "bias": lambda: relued(nn.Conv2d(8, 16, 3)),
    "no bias": lambda: relued(nn.Conv2d(8, 8, (3, 1), stride=2, padding=(1, 0), bias=False)),
    "groups": lambda: relued(nn.Conv2d(8, 16, 3, dilation=2, groups=2)),
    "added": Adds,
    "added first, no bias": lambda: Adds(bias=False, x_first=True),
    "a product": lambda: nn.Sequential(nn.Conv2d(8, 16, 1)).to(torch.bfloat16),
    "a product of some positions": lambda: nn.Sequential(nn.Conv2d(8, 16, 1, (2, 3))).to(torch.bfloat16),
    "two": lambda: nn.Sequential(nn.Conv2d(8, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 1), nn.ReLU()),
}
OTHERS = {
    "no relu": lambda: nn.Sequential(nn.Conv2d(8, 8, 3)),
    "no relu, in float32": lambda: nn.Sequential(nn.Conv2d(8, 8, 1)),
    "no relu, padding": lambda: nn.Sequential(nn.Conv2d(8, 8, 1, padding=1)).to(torch.bfloat16),
    "another function": lambda: nn.Sequential(nn.Conv2d(8, 8, 3), nn.GELU()),
    "a norm": lambda: relued(nn.Conv2d(8, 8, 3), nn.BatchNorm2d(8)),
    "a volume": lambda: relued(nn.Conv3d(8, 8, 3)),
    "reflected": lambda: relued(nn.Conv2d(8, 8, 3, padding=1, padding_mode="reflect")),
    "more on one side": lambda: relued(nn.Conv2d(8, 8, 2, padding="same")),
}


def tail(model: nn.Module, x_dim: int = 4) -> inside.Tail | None:
    (segment,) = capture(model.eval(), False, x_dim, bare=True).segments
    return inside.tail_of(segment)


def test_which_tails():
    assert tail(MODELS["bias"]()) == (2, None, True) and tail(MODELS["no bias"]()) == (None, None, True)
    assert tail(Adds()) == (3, 1, True) and tail(Adds(bias=False, x_first=True)) == (None, 1, True)
    assert tail(OTHERS["no relu"]()) == (2, None, False)
    assert tail(OTHERS["another function"]()) is tail(OTHERS["a norm"]()) is None

    class Twice(Adds):
        def forward(self, x):
            v = self.conv(x)
            return F.relu(v + v)

    class Wide(Adds):
        def forward(self, x):
            return F.relu(self.conv(x) + x.mean((2, 3), keepdim=True))

    assert tail(Twice()) is None and tail(Wide()) is None


class Library:
    """PyTorch's functions, on a CPU, where models are captured as for a GPU; keeps_nan: as relu does."""

    def __init__(self, monkeypatch, keeps_nan: bool = True, serves=lambda x: True):
        self.calls, self.keeps_nan, self.serves = [], keeps_nan, serves
        monkeypatch.setattr(inside, "_relu", self.relu)
        monkeypatch.setattr(inside, "_add_relu", self.add_relu)
        monkeypatch.setattr(inside, "_answers", {})
        monkeypatch.setattr(capturing, "capture", lambda *given, **_: capture(*given, bare=True))
        monkeypatch.setattr(inside, "_least_ms", lambda call, device: call() is None or self.times.pop())
        self.times = [1.0, 1.0] * 50  # of the library's convolution and a pass, and of it with the tail
        addmm = torch.addmm
        monkeypatch.setattr(torch, "addmm", lambda *given: self.calls.append(given) or addmm(*given))

    def relu(self, x, weight, bias, *how):
        return self.add_relu(x, weight, 0.0, 1.0, bias, *how)

    def add_relu(self, x, weight, z, alpha, bias, *how):
        if not self.serves(x):
            raise RuntimeError("no engine")
        self.calls.append(x)
        y = (torch.conv2d(x, weight, bias, *how) + alpha * z).relu()
        return y if self.keeps_nan else y.nan_to_num(0.0, float("inf"))


def pair(make) -> tuple[nn.Module, nn.Module, torch.Tensor]:
    """A model channels last, fused, and what it is given."""
    torch.manual_seed(0)
    model = make().to(memory_format=torch.channels_last)
    x = torch.randn(2, 8, 9, 10).to(next(model.parameters()).dtype, memory_format=torch.channels_last)
    return model, fuse(model), x


@pytest.mark.parametrize("name", MODELS)
def test_no_pass_is_left(name, gpu, monkeypatch):  # noqa: F811
    gpu()
    library = Library(monkeypatch)
    model, fast, x = pair(MODELS[name])
    with torch.no_grad():
        fast(x)
        library.calls.clear()
        for factor in (1.0, float("nan")):
            x[0, :, 4] *= factor
            y = fast(x)
            torch.testing.assert_close(y, model(x), equal_nan=True)
            assert y.stride() == model(x).stride()
        plans = fast.plan(x)
    assert len(library.calls) == 2 * len(plans) and {each.reason.split(";")[-1].strip() for each in plans} <= {inside.WORDS, "by timings of an H200, scaled to this GPU"}  # fmt: skip
    assert all(inside.WORDS in each.reason and each.runs == "load" for each in plans)


@pytest.mark.parametrize("name", OTHERS)
def test_others_are_left_to_passes(name, gpu, monkeypatch):  # noqa: F811
    gpu()
    library = Library(monkeypatch)
    if name == "a volume":
        model, x = OTHERS[name](), torch.randn(2, 8, 4, 5, 6).to(memory_format=torch.channels_last_3d)
        fast = fuse(model)
    else:
        model, fast, x = pair(OTHERS[name])
    with torch.no_grad():
        near = {"rtol": 0.02, "atol": 0.02} if x.dtype == torch.bfloat16 else {}
        torch.testing.assert_close(fast.eval()(x), model.eval()(x), **near)
    assert not library.calls


def test_not_where_gradients_follow(gpu, monkeypatch):  # noqa: F811
    gpu()
    library = Library(monkeypatch)
    model, fast, x = pair(MODELS["bias"])
    torch.testing.assert_close(fast(x), model(x))
    assert not library.calls


class Watching(TorchDispatchMode):
    """Sees operators by themselves."""

    def __torch_dispatch__(self, function, types, given=(), named=None):
        return function(*given, **(named or {}))


@pytest.mark.parametrize("watched", ["nothing", "forward and backward", "backward"])
@pytest.mark.parametrize("last", [True, False])
@pytest.mark.parametrize("name", ["bias", "no bias", "added first, no bias", "two"])
def test_in_16_bits_a_mask_is_read_from_y(name, last, watched, gpu, monkeypatch):  # noqa: F811
    """Which eager keeps, too: forward is the library's alone, and nothing else is kept. NaN passes, and what is changed in place is seen, as eager's is."""
    gpu()
    library = Library(monkeypatch)
    torch.manual_seed(0)
    layout = torch.channels_last if last else torch.contiguous_format
    if not last:
        monkeypatch.setattr(inside.layouts, "fastest", lambda *given: inside.layouts.TURNED)
    model = MODELS[name]().to(torch.bfloat16, memory_format=layout)
    x = torch.randn(2, 8, 9, 10).to(torch.bfloat16, memory_format=layout)
    x[0, :, 4] = float("nan")
    fast, kept = fuse(model), []
    fast(x)
    library.calls.clear()
    nobody = contextlib.nullcontext
    around = Watching if watched == "forward and backward" else nobody
    around_backward = nobody if watched == "nothing" else Watching
    found = []
    for each in (fast, model):
        own = x.clone(memory_format=torch.preserve_format).requires_grad_()
        with around():
            y = each(own)
        dy = torch.ones_like(y)
        dy[0, :, :, 3] = 2.0
        with around_backward():
            found.append(
                [y.clone(), *torch.autograd.grad(y, [own, *each.parameters()], dy, retain_graph=True)]
            )
        with torch.no_grad():
            y += 1.0
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            y.backward(dy)
    for ours, eagers in zip(*found):
        torch.testing.assert_close(ours, eagers, rtol=0.02, atol=0.02, equal_nan=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        fast(x.requires_grad_())
    assert {t.dtype for t in kept} == {torch.bfloat16}
    if watched != "forward and backward":
        assert bool(library.calls) == last
        assert (inside.WORDS in str(fast.plan(x))) == last


@pytest.mark.parametrize("layout", [inside.layouts.PLANES, inside.layouts.FOR_TF32])
@pytest.mark.parametrize("name", ["bias", "groups", "added", "a product"])
def test_in_planes(name, layout, gpu, monkeypatch):  # noqa: F811
    """Where the library convolves so."""
    gpu()
    Library(monkeypatch)
    monkeypatch.setattr(inside.layouts, "fastest", lambda *given: layout)
    torch.manual_seed(0)
    model, x = MODELS[name](), torch.randn(2, 8, 9, 10)
    fast, x = fuse(model), x.to(next(model.parameters()).dtype)
    with torch.no_grad():
        text = str(fast.plan(x))
        if not layout:
            near = {"rtol": 0.02, "atol": 0.02} if x.dtype == torch.bfloat16 else {}
            torch.testing.assert_close(y := fast(x), model(x), **near)
            assert y.is_contiguous()
    assert (inside.WORDS in text) == (layout == inside.layouts.PLANES and name != "a product")


@pytest.mark.parametrize("name", ["bias", "added"])
@pytest.mark.parametrize("fault", ["loses NaN", "has none", "is wrong", "is slow"])
def test_the_library_is_asked(name, fault, gpu, monkeypatch):  # noqa: F811
    """Once for each size; where it is not right a pass runs."""
    gpu()
    library = Library(monkeypatch, fault != "loses NaN", lambda x: fault != "has none")
    if fault == "is wrong":
        for function in ("_relu", "_add_relu"):
            right = getattr(inside, function)
            monkeypatch.setattr(inside, function, lambda *given, right=right: right(*given) * 1.1)
    if fault == "is slow":
        library.times = [1.0, 2.0]
    model, fast, x = pair(MODELS[name])
    x[0, 0, 3] = float("nan")
    with torch.no_grad():
        for _ in range(2):
            torch.testing.assert_close(fast(x), model(x), equal_nan=True)
        asked = len(library.calls)
        fast(torch.randn_like(x))
    assert len(library.calls) == asked and [*inside._answers.values()] == [False]


@pytest.mark.parametrize("where", ["capture", "deterministic mode"])
def test_not_asked(where, gpu, monkeypatch):  # noqa: F811
    gpu()
    library = Library(monkeypatch)
    model, fast, x = pair(MODELS["bias"])
    if where == "capture":
        monkeypatch.setattr(inside.support, "capturing", lambda: True)
    else:
        monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    with torch.no_grad():
        torch.testing.assert_close(fast(x), model(x))
    assert not library.calls and not inside._answers


def test_an_edited_text_runs(gpu, monkeypatch):  # noqa: F811
    gpu()
    Library(monkeypatch)
    model, fast, x = pair(MODELS["bias"])
    with torch.no_grad():
        text = fast.source(x)
        assert "relu" in text or "max" in text
        fast.edit(x, text)
        torch.testing.assert_close(fast(x), model(x))
        assert "edited" in str(fast.plan(x))


@pytest.mark.parametrize("dtype, count", [(torch.float32, 0), (torch.bfloat16, 1)])
def test_between_convolutions(dtype, count, layouts, monkeypatch):  # noqa: F811
    """Where results stay channels last though eager's don't: in float32 a pass rounds them for the next convolution; filters are turned."""
    library = Library(monkeypatch)
    torch.manual_seed(0)
    layers = [layer for channels in (3, 8, 8) for layer in (nn.Conv2d(channels, 8, 3), nn.ReLU())]
    model, x = nn.Sequential(*layers).to(dtype), torch.randn(2, 3, 9, 10).to(dtype)
    fast = fuse(model)
    with torch.no_grad():
        fast(x)
        library.calls.clear()
        torch.testing.assert_close(fast(x), model(x), rtol=0.02, atol=0.02)
    assert len(library.calls) == count


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", MODELS)
def test_on_a_gpu(name, dtype):
    torch.manual_seed(0)
    model = MODELS[name]().cuda().to(dtype, memory_format=torch.channels_last).eval()
    compare.randomize(model)
    x = torch.randn(4, 8, 33, 34, device="cuda").to(dtype, memory_format=torch.channels_last)
    fast = fuse(model)
    found, complaints = checks.errors_of("", fast, model, x, "forward", cancelling=False)
    assert not complaints and all(error.share <= 1 for error in found), [*map(str, found)]
    x[0, 0, 5] = float("nan")
    x[1, 0, 7] = float("inf")
    with torch.no_grad():
        y, expected = fast(x), model(x)
        plans = fast.plan(x)
    assert torch.equal(y.isnan(), expected.isnan()) and torch.equal(y.isinf(), expected.isinf())
    print(name, dtype, plans)
