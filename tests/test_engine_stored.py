"""The schedule `stored`: a convolution of our own and `load`'s passes, run in the emulation of a GPU, against float64."""

from __future__ import annotations

import copy
import gc
import math
import weakref

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import numerics
from inline_kernels import fuse
from inline_kernels.bench import checks
from inline_kernels.engine import (
    between,
    costs,
    direct,
    library,
    part,
    precision,
    schedule,
    sinks,
    stored,
)
from inline_kernels.engine.cases import Case
from test_emulated import folder, gpu, guarded, pytestmark, remembers_nothing  # noqa: F401
from test_engine_direct import device, full_size, given, h200, of_11_bits, only_through, random_model  # noqa: F401
from test_engine_sinks import TAILS as REDUCING
from test_engine_sinks import model_of, normed

POOLS = {2: F.max_pool2d, 3: F.max_pool3d}


def pooled(m: nn.Module, v: torch.Tensor) -> torch.Tensor:
    pool = POOLS[len(m.conv.kernel_size)]
    return torch.tanh(pool(pool(torch.softmax(v, 1), 2), 2))


def least(m: nn.Module, v: torch.Tensor) -> torch.Tensor:
    return torch.softmax(v.amin(2), 1)


def largest(m: nn.Module, v: torch.Tensor) -> torch.Tensor:
    """Of a plane, and behind it channels."""
    return torch.softmax(torch.tanh(v).flatten(2).amax(2), 1)


# Tails that neither direct nor sinks takes.
TAILS = {"two pools": pooled, "an axis": least, "planes": largest}


def mean(m: nn.Module, v: torch.Tensor) -> torch.Tensor:
    """As smooth as 16 bits of v need to be: they make ties of what is nearly the same."""
    return torch.softmax(v.mean(2) * m.number, 1)


def across(m: nn.Module, v: torch.Tensor) -> torch.Tensor:
    """Without channels."""
    return torch.tanh(v.amin(2) * m.number).mean(1)


# By mainloop: who plans its convolution, the architecture; filters, the image's size, settings.
LAYERS = {
    "narrow2d": (800, (24, 5, 2, 3), (9, 134), {}),
    "narrow3d": (800, (24, 3, 3, 3, 3), (6, 6, 9), {}),
    "wide": (900, (40, 24, 3, 3), (8, 21), {}),
    "stream": (900, (40, 24, 3, 2), (8, 9), {"padding": 1}),
}
DTYPES = {
    "narrow2d": torch.bfloat16,
    "narrow3d": torch.float16,
    "wide": torch.float16,
    "stream": torch.bfloat16,
}


@pytest.fixture
def layer(device, monkeypatch):  # noqa: F811
    """layer(mainloop, tail, dtype): a model whose convolution that mainloop computes, and an input."""

    def build(mainloop: str, tail=pooled, dtype: torch.dtype = torch.float32):
        architecture, filters, size, settings = LAYERS[mainloop]
        device(architecture), only_through(mainloop, monkeypatch)
        model = random_model(filters, tail, **settings).to(dtype)
        return model, numerics.random_input((2, filters[1], *size), dtype=dtype)

    return build


def answers(model: nn.Module, x: torch.Tensor, saving: bool) -> dict[str, torch.Tensor]:
    """The result; and where backward follows, gradients."""
    if not saving:
        with torch.no_grad():
            return {"output": model(x)}
    leaves = {"x": x.detach().clone(memory_format=torch.preserve_format).requires_grad_()}
    leaves |= {name: model.get_parameter(name) for name in ("conv.weight", "conv.bias")}
    y = model(leaves["x"])
    dy = torch.linspace(-1, 2, y.numel(), dtype=torch.float64).view(y.shape).to(y.dtype)
    return {"output": y.detach(), **dict(zip(leaves, torch.autograd.grad(y, [*leaves.values()], dy)))}


def assert_rule(fast: nn.Module, model: nn.Module, x: torch.Tensor, saving: bool) -> None:
    ours, eager = answers(fast, x, saving), answers(model, x, saving)
    exact = answers(copy.deepcopy(model).double(), x.double(), saving)
    for name, value in ours.items():
        assert value.shape == exact[name].shape and value.dtype == x.dtype
        error = checks.judged("", name, exact[name], eager[name], value, x.dtype)
        assert error.share <= 1, error


def assert_plan(fast: nn.Module, x: torch.Tensor, mainloop: str) -> None:
    (plan,) = fast.plan(x)
    how = plan.reason.split(" writes v, then ")[0].removesuffix(" by views of patches")
    assert (plan.runs, how) == ("stored", mainloop), plan


# ------------------------------------------------------------------------------------------------------------------- results


@pytest.mark.parametrize("saving", [False, True], ids=["forward", "backward"])
@pytest.mark.parametrize("mainloop", LAYERS)
@pytest.mark.parametrize("tail", TAILS)
def test_tails(tail, mainloop, saving, layer):
    model, x = layer(mainloop, TAILS[tail])
    fast = fuse(copy.deepcopy(model))
    with torch.set_grad_enabled(saving):
        assert_plan(fast, x, mainloop)
    assert_rule(fast, model, x, saving)


@pytest.mark.parametrize("mainloop", LAYERS)
def test_16_bits(mainloop, layer):
    model, x = layer(mainloop, mean, DTYPES[mainloop])
    fast = fuse(copy.deepcopy(model))
    assert_plan(fast, x, mainloop)
    for saving in (False, True):
        assert_rule(fast, model, x, saving)


@pytest.mark.parametrize("tail", [mean, least, across])
@pytest.mark.parametrize("mainloop", ["narrow2d", "wide"])
def test_channels_last_where_operands_are_planes(mainloop, tail, layer, monkeypatch):
    """It is turned where the library has no tensor cores for it either."""
    model, x = layer(mainloop, tail, DTYPES[mainloop])
    x = x.contiguous(memory_format=torch.channels_last)
    assert fuse(copy.deepcopy(model)).plan(x)[0].runs == "load"
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    fast = fuse(copy.deepcopy(model.float()))
    assert_plan(fast, x.float(), mainloop)
    assert_rule(fast, model, x.float(), True)


@pytest.mark.parametrize("saving", [False, True], ids=["forward", "backward"])
@pytest.mark.parametrize("views", [False, True])
def test_v_channels_last(views, saving, layer, monkeypatch):
    """As x lies, and what passes make of it."""
    monkeypatch.setattr(costs, "stream_views", lambda *_: 0.0 if views else math.inf)
    model, x = layer("stream", REDUCING["norm"][0], torch.bfloat16)
    x = x.contiguous(memory_format=torch.channels_last)
    fast = fuse(copy.deepcopy(model))
    with torch.set_grad_enabled(saving):
        (plan,) = fast.plan(x)
    assert plan.runs == "stored" and "writes v, channels last" in plan.reason
    assert ("by views" in plan.reason) == views
    assert_rule(fast, model, x, saving)
    assert fast(x).is_contiguous(memory_format=torch.channels_last)


def test_x_channels_last_and_v_in_planes(layer):
    """Where passes can't read it otherwise."""
    model, x = layer("stream", least, torch.bfloat16)
    x = x.contiguous(memory_format=torch.channels_last)
    fast = fuse(copy.deepcopy(model))
    assert_plan(fast, x, "stream")
    assert_rule(fast, model, x, True)


@pytest.mark.parametrize("mainloop", ["narrow2d", "narrow3d"])
def test_exact_order(mainloop, layer):
    model, x = layer(mainloop)
    fast = fuse(copy.deepcopy(model), exact_order=True)
    assert_plan(fast, x, mainloop)
    assert_rule(fast, model, x, True)


@pytest.mark.parametrize("saving", [False, True], ids=["forward", "backward"])
def test_a_second_input(saving, layer):
    """It stands before the weight among the arguments, and the convolution has none of it."""
    model, x = layer("narrow2d", lambda m, v, other: least(m, v * other))
    fast = fuse(copy.deepcopy(model))
    with torch.set_grad_enabled(saving):
        assert_plan(fast, x, "narrow2d")
    assert_rule(fast, model, x, saving)


def test_deterministic_algorithms(layer, monkeypatch):
    """They change nothing: no sum hangs on who comes first."""
    model, x = layer("narrow2d")
    fast = fuse(copy.deepcopy(model))
    known = answers(fast, x, True)
    torch.use_deterministic_algorithms(True)
    try:
        assert_plan(fast, x, "narrow2d")
        numerics.assert_equal(answers(fast, x, True), known)
    finally:
        torch.use_deterministic_algorithms(False)


def test_weights_and_inputs_of_each_call(layer):
    """What is planned once keeps none of them."""
    model, x = layer("narrow2d", least)
    fast = fuse(model)
    for number in (1.0, -2.0):
        with torch.no_grad():
            model.conv.weight.mul_(number)
            torch.testing.assert_close(fast(x * number), model(x * number), rtol=1e-4, atol=1e-5)


# ----------------------------------------------------------------------------------------- the first pass beside v, for backward


def batch_norm(m: nn.Module, v: torch.Tensor) -> torch.Tensor:
    return m.norm(F.mish(v)) * m.number


def dropped(m: nn.Module, v: torch.Tensor) -> torch.Tensor:
    return F.dropout(normed(m, v), 0.0, m.training)


NAMES = ["global mean", "norm", "nonlinear norm", "instance norm", "norm, mean", "norm, logsumexp"]
FIRST = {name: REDUCING[name][0] for name in NAMES} | {"batch norm": batch_norm, "norm, dropout": dropped}
POINTWISE = {"pointwise": lambda m, v: F.gelu(v * m.number)}  # y itself is beside v; direct would take it


@pytest.fixture
def beside(device, monkeypatch):  # noqa: F811
    """beside(mainloop, name): such a model in training, and an input."""

    def build(mainloop: str, name: str) -> tuple[nn.Module, torch.Tensor]:
        architecture, filters, size, settings = LAYERS[mainloop]
        device(architecture), only_through(mainloop, monkeypatch)
        monkeypatch.setattr(sinks, "MOST_BESIDE", 1000)
        model = model_of(filters, {**FIRST, **POINTWISE}[name], **settings).train()
        return model, numerics.random_input((3, filters[1], *size))

    return build


@pytest.mark.parametrize(
    "mainloop, name",
    [
        *(("narrow2d", name) for name in FIRST),
        *((each, name) for each in ("narrow3d", "wide") for name in ("norm", "batch norm")),
    ],
)
def test_the_first_pass_beside_v(name, mainloop, beside):
    model, x = beside(mainloop, name)
    fast = fuse(copy.deepcopy(model))
    (plan,) = fast.plan(x)
    assert plan.reason.startswith(f"{mainloop} writes v and sums, "), plan
    assert_rule(fast, model, x, True)
    for own, theirs in zip(fast.buffers(), model.buffers()):  # running statistics
        torch.testing.assert_close(own, theirs, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    "mainloop, name",
    [
        ("narrow2d", "norm, logsumexp"),
        ("narrow2d", "pointwise"),
        ("narrow3d", "pointwise"),
        ("wide", "norm"),
        ("wide", "pointwise"),
    ],
)
def test_what_is_kept_beside_v_is_what_load_keeps(mainloop, name, beside, device):  # noqa: F811
    model, x = beside(mainloop, name)
    device(900)  # has room for the rows of two results
    case = Case(*given(model, x), True, x.dtype)
    (load, own), found = stored.requests(case), stored.plan(case)
    assert load == schedule.requests(case)[0] and own["name"].startswith("sinks_")
    _, *kept = schedule.forward(found, case.arguments)
    assert [(list(t.shape), t.dtype) for t in kept] == [each[:2] for each in stored.saved(case)]
    _, *expected = schedule.forward(schedule.plan(case), case.arguments)
    assert kept[1].data_ptr() != expected[1].data_ptr()
    torch.testing.assert_close(kept[0], expected[0], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("filters, size", [((130, 17, 1, 3), (4, 256)), ((40, 24, 3, 3), (7, 37))], ids=str)
@pytest.mark.parametrize("name", ["norm", "over channels"])
def test_v_beside_what_is_reduced_by_wgmma(name, filters, size, device, monkeypatch):  # noqa: F811
    """By the same staging, in rows that tiles share, and in those of one tile."""
    device(900), only_through("wide", monkeypatch)
    monkeypatch.setattr(precision, "runs_tf32", lambda *_, **__: True)
    model = model_of(filters, FIRST["norm"] if name == "norm" else lambda m, v: (v * v).mean(1)).train()
    model.conv.weight.data.copy_(of_11_bits(model.conv.weight))
    x = of_11_bits(numerics.random_input((3, filters[1], *size)))
    case = Case(*given(model, x), True, x.dtype)
    assert stored.describe(case).startswith("wide writes v and ")
    found, expected = (schedule.forward(by.plan(case), case.arguments) for by in (stored, schedule))
    for ours, theirs in zip(found, expected, strict=True):
        if ours.dtype != torch.float64:  # small values, with room between them
            torch.testing.assert_close(ours, theirs.view(ours.shape), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("of", ["a large mean", "what isn't finite"])
def test_values_beside_v(of, beside):
    model, x = beside("narrow2d", "norm")
    if of == "a large mean":
        return assert_rule(fuse(copy.deepcopy(model)), model, x + 300, True)
    x[1, 0, 4, 60], x[2, 1, 5, 70] = float("inf"), float("nan")
    found, expected = answers(fuse(copy.deepcopy(model)), x, True), answers(model, x, True)
    for name, value in expected.items():
        assert torch.equal(found[name].isfinite(), value.isfinite()), name


# -------------------------------------------------------------------------------------------------------------------- plans


@pytest.mark.parametrize("saving", [False, True])
@pytest.mark.parametrize("mainloop", LAYERS)
def test_what_is_built(mainloop, saving, layer):
    """load's kernels first, as load has them; and what is kept for backward is the same."""
    model, x = layer(mainloop)
    case = Case(*given(model, x), saving, x.dtype)
    for each in (direct, sinks):
        with pytest.raises(stored.Unsupported):
            each.requests(case)
    assert stored.requests(case) == schedule.requests(case) + direct.requests(stored.alone(case))
    assert stored.saved(case) == schedule.saved(case)


def test_an_edited_text_runs_by_load(layer, monkeypatch):
    """source() gives load's text; v of an edited one is the library's."""
    model, x = layer("narrow2d")
    fast = fuse(copy.deepcopy(model))
    with monkeypatch.context() as patch:
        patch.setattr(part, "SCHEDULES", {k: each for k, each in part.SCHEDULES.items() if k != "stored"})
        by_load = fuse(copy.deepcopy(model))
        assert by_load.plan(x)[0].runs == "load"
    for saving in (False, True):
        with torch.set_grad_enabled(saving):
            text = fast.source(x)
            assert text == by_load.source(x)
            forward, *backward = text.split("struct Backward", 1)
            assert forward.count("math::tanh(") == 1
            edited = "struct Backward".join([forward.replace("math::tanh(", "-math::tanh("), *backward])
            fast.edit(x, edited)
            (plan,) = fast.plan(x)
            assert plan.runs == "load" and plan.reason.startswith("edited, with the gradient of its lines: ")
        ours, theirs = answers(fast, x, True), answers(model, x, True)
        for name, value in theirs.items():
            torch.testing.assert_close(ours[name], -value, rtol=1e-4, atol=1e-5)
        fast.edit(x, None)
        assert_plan(fast, x, "narrow2d")


# Of KernelBench's problems those that direct and sinks leave.
FORWARD = {
    4: "wide",
    6: "narrow3d",
    21: "narrow2d",
    24: "narrow3d",
    35: "wide",
    43: "stream",
    46: "wide",
    52: "wide",
}
TRAINED = {21: "narrow2d", 43: "stream"}
# Of these the convolution's kernel does the first pass, too.
BESIDE = {17: "wide", 23: "narrow3d", 27: "narrow3d", 67: "narrow2d", 73: "narrow2d", 92: "narrow2d"}


@pytest.mark.parametrize(
    "number, saving",
    [*[(n, False) for n in FORWARD], *[(n, True) for n in TRAINED | BESIDE]],
    ids=str,
)
def test_problems_at_their_full_sizes(number, saving, h200):  # noqa: F811
    case = Case(*full_size(number), saving, torch.float32)
    for each in (direct, sinks):
        with pytest.raises(stored.Unsupported):
            each.describe(case)
    by, _, rest = stored.describe(case).partition(" writes v")
    assert by.split()[0] == (TRAINED | BESIDE if saving else FORWARD)[number]
    assert rest.startswith(" and sums, " if saving and number in BESIDE else ", ")


@pytest.mark.parametrize("saving", [False, True])
@pytest.mark.parametrize("mainloop", ["narrow2d", "stream"])
def test_y_stays_channels_last(mainloop, saving, layer, monkeypatch):
    """Rounded, for a convolution that reads it next. v lies in planes, as our own writes it, and passes turn y and its gradient."""
    monkeypatch.setattr(precision, "runs_tf32", lambda *_, **__: False)
    model, x = layer(mainloop, lambda m, v: F.silu(F.group_norm(v, 4)))
    segment, arguments = given(model, x)
    segment = segment.with_result(between.OPERAND, False, (), True)
    case = Case(segment, arguments, saving, x.dtype, last=True)
    assert stored.describe(case).split(" writes v, ")[1].startswith("y channels last for what follows")
    plan = stored.plan(case)
    y, *saved = stored.forward(plan, arguments)
    leaves = [x, model.conv.weight, model.conv.bias]
    exact = copy.deepcopy(model).double()
    of_exact = [x.double().requires_grad_(), exact.conv.weight, exact.conv.bias]
    wanted = exact(of_exact[0])
    assert library.is_channels_last(y) and not y.contiguous().view(torch.int32).bitwise_and(0x1FFF).any()
    torch.testing.assert_close(y.double(), wanted.detach(), rtol=2**-10, atol=1e-4)
    if not saving:
        return
    dy = torch.linspace(-1, 2, y.numel()).view(y.shape).contiguous(memory_format=torch.channels_last)
    found = stored.backward(plan, dy, arguments, saved, [True] * len(arguments))
    for t, ours, of_eager in zip(leaves, found, torch.autograd.grad(wanted, of_exact, dy.double())):
        assert ours.shape == t.shape
        torch.testing.assert_close(ours.double(), of_eager, rtol=1e-4, atol=2e-3)


def test_on_a_cpu():
    model, x = random_model((24, 5, 2, 3), pooled), torch.randn(2, 5, 90, 80)
    with pytest.raises(stored.Unsupported, match="run on GPUs"):
        stored.requests(Case(*given(model, x), False, x.dtype))
    assert fuse(model).plan(x)[0].runs == "load"


def test_where_no_mainloop_takes_the_convolution(layer):
    model, x = layer("narrow2d")
    model.conv.stride = 2, 2
    with pytest.raises(stored.Unsupported, match="stride"):
        stored.requests(Case(*given(model, x), False, x.dtype))
    assert fuse(model).plan(x)[0].runs == "load"


def test_what_is_refused_keeps_no_tensor(layer):
    """The reasons are kept, of the first pass beside v, too; the exceptions would keep who called."""
    model, x = layer("wide", least)
    arguments = given(model, x)
    seen = weakref.ref(x)
    with pytest.raises(stored.Unsupported):
        sinks.beside_v(Case(*arguments, True, x.dtype))
    with pytest.raises(stored.Unsupported):
        sinks.requests(Case(*arguments, False, x.dtype))
    del x, arguments
    gc.collect()
    assert seen() is None
