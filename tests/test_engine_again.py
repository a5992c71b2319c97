"""The schedule `again`: v isn't kept for backward, and formed again there, run in the emulation of a GPU, against float64."""

from __future__ import annotations

import copy
import random
import re

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import inline_loader
import numerics
from inline_kernels import fuse
from inline_kernels.bench import checks
from inline_kernels.engine import again, load_plan, schedule
from inline_kernels.engine.cases import Case
from test_emulated import folder, gpu, guarded, pytestmark, remembers_nothing  # noqa: F401
from test_engine_direct import device, full_size, given, kinds_of, only_through, random_model  # noqa: F401
from test_engine_stored import batch_norm
from test_kernels_compile import needs_nvcc, nvcc

INF = float("inf")
TAILS = {
    "gelu": lambda m, v: F.gelu(v * m.number),
    "relu, hardswish by hand": lambda m, v: F.relu(v) * torch.clamp((F.relu(v) + 3) / 6, 0, 1),
    "scales": lambda m, v: torch.sigmoid(torch.tanh(v * m.scale) * m.by_channel),
    "two sums": lambda m, v: F.mish(v) + F.relu(v) * m.by_channel,
    "an input": lambda m, v, other: F.mish(v + other) * m.scale,
    "mean over channels": lambda m, v: F.mish(v * m.scale).mean(1),
    "global mean": lambda m, v: F.gelu(v).mean(m.spatial),
    "batch norm": batch_norm,
    "group norm": lambda m, v: F.silu(F.group_norm(v, 4, m.norm.weight, m.norm.bias)),
    "instance norm": lambda m, v: F.instance_norm(v) / 2.0,
}
FILTERS = {
    "narrow2d": [((32, 3, 3, 3), (9, 34)), ((20, 5, 2, 3), (7, 150)), ((80, 2, 1, 2), (5, 11))],
    "narrow3d": [((16, 3, 3, 3, 3), (6, 9, 13)), ((32, 2, 1, 2, 2), (4, 7, 9))],
}


@pytest.fixture
def through(device, monkeypatch):  # noqa: F811
    """through(mainloop, architecture): v is formed again wherever it can be."""

    def become(mainloop: str, architecture: int = 900) -> None:
        device(architecture), only_through(mainloop, monkeypatch)
        monkeypatch.setattr(again, "pays", lambda *_: True)

    return become


def model_of(filters, name: str, **settings) -> nn.Module:
    model = random_model(filters, TAILS[name], **settings).train()
    model.spatial = tuple(range(2, len(filters)))
    return model


def gradients(model: nn.Module, x: torch.Tensor) -> dict[str, torch.Tensor]:
    """The result, and every gradient."""
    leaves = {"x": x.detach().clone().requires_grad_()} | dict(model.named_parameters())
    y = model(leaves["x"])
    dy = torch.linspace(-1, 2, y.numel(), dtype=torch.float64).view(y.shape).to(y.dtype)
    found = torch.autograd.grad(y, [*leaves.values()], dy, allow_unused=True)
    return {"output": y.detach()} | {name: g for name, g in zip(leaves, found) if g is not None}


def assert_rule(model: nn.Module, x: torch.Tensor) -> nn.Module:
    fast, exact, eager = fuse(copy.deepcopy(model)), copy.deepcopy(model).double(), copy.deepcopy(model)
    (plan,) = fast.plan(x)
    assert plan.runs == "again" and "; backward: v is formed again, " in plan.reason, plan
    found, expected, theirs = gradients(fast, x), gradients(exact, x.double()), gradients(eager, x)
    assert found.keys() == expected.keys()
    for name, value in found.items():
        assert value.shape == expected[name].shape and value.dtype == x.dtype
        error = checks.judged("", name, expected[name], theirs[name], value, x.dtype)
        assert error.share <= 1, error
    for own, other in zip(fast.buffers(), exact.buffers()):  # running statistics
        torch.testing.assert_close(own.double(), other.double(), rtol=1e-5, atol=1e-6)
    return fast


@pytest.mark.parametrize(
    "mainloop, name",
    [("narrow2d", name) for name in TAILS] + [("narrow3d", name) for name in [*TAILS][1::2]],
)
def test_tails(mainloop, name, through):
    filters, size = FILTERS[mainloop][0]
    through(mainloop)
    assert_rule(model_of(filters, name), numerics.random_input((3, filters[1], *size)))


SIZES = [
    (mainloop, *sizes, name)
    for mainloop, all_sizes in FILTERS.items()
    for sizes, name in zip(all_sizes[1:], ["scales", "batch norm"])
]


@pytest.mark.parametrize("mainloop, filters, size, name", SIZES, ids=str)
def test_sizes(mainloop, filters, size, name, through):
    """Channels that fill no block, or several; rows and planes that fill no tile, or several."""
    through(mainloop)
    assert_rule(model_of(filters, name), numerics.random_input((2, filters[1], *size)))


def test_random_widths(through):
    """Strips of every length, and every place in a sector that a row of dz may begin at."""
    through("narrow2d")
    model, draw = model_of((20, 5, 2, 3), "two sums"), random.Random(0)
    for _ in range(6):
        assert_rule(model, numerics.random_input((2, 5, draw.randint(3, 12), draw.randint(4, 60))))


def test_channels_that_fill_no_block(through):
    """Where dz hangs on a dy that has no channels, read at its place."""
    through("narrow3d")
    assert_rule(model_of((20, 3, 2, 3, 3), "mean over channels"), numerics.random_input((2, 3, 5, 7, 11)))


@pytest.mark.parametrize("padding", [1, "same"])
@pytest.mark.parametrize("mainloop", FILTERS)
def test_padding(mainloop, padding, through):
    """The image with zeros around it is a copy."""
    filters, size = FILTERS[mainloop][1]
    through(mainloop)
    model, x = model_of(filters, "batch norm", padding=padding), numerics.random_input((2, filters[1], *size))
    assert_rule(model, x)
    assert fuse(model).plan(x)[0].reason.startswith(f"{mainloop} of a padded copy: the convolution with ")


@pytest.mark.parametrize("mainloop", FILTERS)
def test_ties(mainloop, through):
    """Values at which a derivative jumps, exactly: zero of relu, three of the clamp."""
    (filters, size), name = FILTERS[mainloop][0], "relu, hardswish by hand"
    through(mainloop)
    model = model_of(filters, name)
    with torch.no_grad():
        model.conv.weight.copy_(model.conv.weight.sign())
        model.conv.bias.zero_()
    x = torch.randint(-1, 2, (2, filters[1], *size)).float()
    v = model.conv(x).detach().requires_grad_()
    assert all((v == tie).any() for tie in (0, 3))
    y, made = run(model, x)
    torch.testing.assert_close(y.view(v.shape), model.tail(model, v).detach())
    (expected,) = torch.autograd.grad(model.tail(model, v).sum(), v)
    torch.testing.assert_close(made["dz"].view(v.shape), expected)


# ------------------------------------------------------------------------------------------------------------- the same values


def squared(filters) -> nn.Module:
    """dz is v with its bias, twice, and y the square: both say what v was. Sums and what is stored are of one value."""
    return random_model(filters, lambda m, v: v.square())


def run(model: nn.Module, x: torch.Tensor, dy: torch.Tensor | None = None) -> tuple[torch.Tensor, dict]:
    """y, and by name what backward's launch makes. dy: by default ones."""
    segment, arguments = given(model, x)
    plan = again.plan(Case(segment, arguments, True, x.dtype))
    y, *kept = again.forward(plan, arguments)
    launch = plan.again(plan, arguments, ["dy", *[array.name for array in plan.composed.saved]], {})
    made = launch.run(arguments, torch.ones_like(y) if dy is None else dy, *kept)
    return y, dict(zip(launch.made, made))


@pytest.mark.parametrize("mainloop", FILTERS)
def test_v_is_the_same_bit_for_bit(mainloop, through):
    """Of any magnitude, by the mainloop, and where it leaves a sample to plain sums."""
    for filters, size in FILTERS[mainloop]:
        through(mainloop)
        x = numerics.random_input((5, filters[1], *size)) * torch.logspace(-3, 3, size[-1])
        x[1] *= 1e-9
        for n, value in enumerate([1e30, 2.0**24], 3):
            x[(n, 0, *[extent // 2 for extent in size])] = value
        y, made = run(squared(filters), x)
        assert y[:4].isfinite().any() and torch.equal((made["dz"].view(y.shape) / 2).square(), y)


def test_tiles_hang_on_no_sinks(through, monkeypatch):
    """Whatever room shared memory has: a tile of other rows would have another scale."""
    through("narrow3d")
    loaded, own = [], inline_loader.load
    monkeypatch.setattr(inline_loader, "load", lambda *a, **k: loaded.append(own(*a, **k)) or loaded[-1])
    model, x = squared((16, 3, 2, 3, 3)), numerics.random_input((4, 3, 3, 40, 9))
    x *= torch.logspace(-4, 4, 40)[:, None]
    run(model, x)
    by_name = dict(zip(["tail_conv", "sinks_conv", "again_conv"], loaded))
    monkeypatch.setattr(inline_loader, "load", lambda name, **_: by_name[name])
    for room in range(66 << 10, 100 << 10, 1 << 10):
        for each in loaded:
            each.library.emulation_device(4, room)
        y, made = run(model, x)
        assert torch.equal((made["dz"].view(y.shape) / 2).square(), y), room


def test_where_tiles_would_be_others_v_is_kept(through, monkeypatch):
    through("narrow2d")
    model, x = squared((32, 3, 3, 3)), numerics.random_input((2, 3, 9, 34))
    (mainloop,) = [each for each in again.mainloops.MAINLOOPS if each.takes == "elements"]
    tiles = iter([1, 2])
    other = mainloop._replace(defines=lambda job: mainloop.defines(job) | {"ROW_TILES": next(tiles)})
    monkeypatch.setattr(again.mainloops, "MAINLOOPS", [other])
    with pytest.raises(again.Unsupported, match="other tiles"):
        again.describe(Case(*given(model, x), True, x.dtype))


def bounded(m: nn.Module, v: torch.Tensor) -> torch.Tensor:
    """A gradient that is finite wherever dy is: zero of NaN, one of infinity."""
    return F.mish(torch.clamp(v, min=-2))


@pytest.mark.parametrize("mainloop", FILTERS)
@pytest.mark.parametrize("tail", [bounded, TAILS["gelu"]], ids=["bounded", "gelu"])
def test_values_that_are_not_finite(tail, mainloop, through):
    """An infinity's neighbours keep their values, and other samples."""
    filters, size = FILTERS[mainloop][0]
    through(mainloop)
    model, x = random_model(filters, tail), numerics.random_input((5, filters[1], *size))
    for n, value in enumerate([INF, float("nan"), -INF, 1e30], 1):
        x[(n, 0, *[extent // 2 for extent in size])] = value
    v = model.conv(x).detach().requires_grad_()
    y, made = run(model, x)
    (expected,) = torch.autograd.grad(model.tail(model, v).sum(), v)
    found = made["dz"].view(v.shape)
    assert torch.equal(kinds_of(found), kinds_of(expected))
    where = expected.isfinite() & (v.abs() < 1e6)
    torch.testing.assert_close(found[where], expected[where], rtol=1e-4, atol=1e-5)


# --------------------------------------------------------------------------------------------------------------- what users do


@pytest.fixture
def fused(through):
    """A model, fused, and an input with a gradient."""
    through("narrow2d")
    model = model_of((24, 5, 2, 3), "gelu")
    return model, fuse(copy.deepcopy(model)), numerics.random_input((2, 5, 6, 34)).requires_grad_()


def test_forward_keeps_small_values_alone(fused):
    _, fast, x = fused
    y = fast(x)
    kept = [t for t in y.grad_fn.saved_tensors if t.shape[:1] == x.shape[:1] and t.dim() == 4]
    assert [t.data_ptr() for t in kept] == [x.data_ptr()]
    assert not y.requires_grad or y.grad_fn.saved_tensors[-1].numel() < y.numel()


def test_a_graph_that_is_retained(fused):
    model, fast, x = fused
    y, leaves = fast(x), [x, fast.conv.weight, fast.conv.bias]
    first = torch.autograd.grad(y.square().sum(), leaves, retain_graph=True)
    second = torch.autograd.grad(y.square().sum(), leaves)
    assert all(map(torch.equal, first, second))
    expected = torch.autograd.grad(model(x).square().sum(), [x, model.conv.weight, model.conv.bias])
    torch.testing.assert_close(first, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("what", ["x", "the weight"])
def test_what_was_changed_in_place_is_an_error(what, fused):
    _, fast, x = fused
    own = x.detach().clone() if what == "x" else x
    y = fast(own)
    with torch.no_grad():
        (own if what == "x" else fast.conv.weight).mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_a_parameter_of_the_tail_that_is_changed_behind_autograd(through):
    """v is formed again of what it was formed of; the tail's parameters are those of forward where eager's are."""
    through("narrow2d")
    model, x = model_of((24, 5, 2, 3), "gelu"), numerics.random_input((2, 5, 6, 34))
    fast, found = fuse(copy.deepcopy(model)), []
    for each in (model, fast):
        y = each(x)
        each.conv.bias.data.add_(1)
        found.append(torch.autograd.grad(y.square().sum(), [each.conv.weight, each.conv.bias]))
    torch.testing.assert_close(*found[::-1], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("frozen", ["conv.weight", "conv.bias", "x"])
def test_what_is_frozen_gets_no_gradient(frozen, fused):
    model, fast, x = fused
    x.requires_grad_(frozen != "x")
    found = []
    for each in (model, fast):
        for name, p in each.named_parameters():
            p.requires_grad_(name != frozen)
        x.grad = None
        each(x).square().sum().backward()
        named = [("x", x), *each.named_parameters()]
        found.append({name: t.grad for name, t in named if t.grad is not None})
    assert found[0].keys() == found[1].keys() and frozen not in found[1]
    for name, value in found[0].items():
        torch.testing.assert_close(found[1][name], value, rtol=1e-4, atol=1e-4)


def test_checkpoints_and_second_derivatives(fused):
    model, fast, x = fused
    leaves = [x, fast.conv.weight]
    expected = torch.autograd.grad(fast(x).square().sum(), leaves)
    y = torch.utils.checkpoint.checkpoint(fast, x, use_reentrant=False)
    assert all(map(torch.equal, torch.autograd.grad(y.square().sum(), leaves), expected))
    found = torch.autograd.grad(fast(x).square().sum(), leaves, create_graph=True)
    with pytest.raises(RuntimeError, match="differentiated twice"):
        found[0].sum().backward()


def test_dy_of_any_strides(fused):
    model, fast, x = fused
    found = []
    for each in (model, fast):
        y = each(x)
        dy = torch.linspace(-1, 1, y.numel()).view(*y.shape[:2], *y.shape[:1:-1]).transpose(2, 3)
        found.append(torch.autograd.grad(y, [x, each.conv.weight], dy))
    torch.testing.assert_close(*found[::-1], rtol=1e-4, atol=1e-4)


def test_a_chain(through):
    through("narrow2d")
    model = nn.Sequential(nn.Conv2d(5, 8, (2, 3)), nn.GELU(), nn.Conv2d(8, 16, 3), nn.Mish())
    fast, x = fuse(copy.deepcopy(model)), numerics.random_input((2, 5, 9, 34)).requires_grad_()
    assert [each.runs for each in fast.plan(x)] == ["again", "again"]
    for _ in range(2):  # the first one decides
        found = torch.autograd.grad(fast(x).square().sum(), [x, fast[0].weight, fast[2].weight])
    expected = torch.autograd.grad(model(x).square().sum(), [x, model[0].weight, model[2].weight])
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def test_an_edited_text_runs_by_load(fused):
    model, fast, x = fused
    edited = fast.source(x).replace("math::gelu(", "-math::gelu(")
    fast.edit(x, edited)
    (plan,) = fast.plan(x)
    assert plan.runs == "load" and plan.reason.startswith("edited, with the gradient of its lines: ")
    torch.testing.assert_close(fast(x), -model(x), rtol=1e-4, atol=1e-4)


# -------------------------------------------------------------------------------------------------------------------- plans


def test_what_is_kept_and_built(fused):
    model, _, x = fused
    case = Case(*given(model, x.detach()), True, x.dtype)
    load, *own = again.requests(case)
    assert load == schedule.requests(case)[0]
    assert [each["name"] for each in own] == ["sinks_conv", "again_conv"]
    assert "tensor_core::fetch_ahead(dy + at, count);" in own[1]["source"]
    v, *kept = schedule.saved(case)
    assert again.saved(case) == kept and len(v[0]) == 4
    plan = again.plan(case)
    assert load_plan.in_units(schedule.plan(case)) and not load_plan.in_units(plan)
    found = again.forward(plan, case.arguments)[1:]
    assert [([*t.shape], t.dtype) for t in found] == [([*shape], dtype) for shape, dtype, _ in kept]


def dropped(m: nn.Module, v: torch.Tensor) -> torch.Tensor:
    return F.dropout(F.gelu(v), 0.5, m.training)


OTHERS = {
    "doesn't need v": (lambda m, v: F.relu(v), {}),
    "has dropout": (dropped, {}),
    "16 bits v is kept": (TAILS["gelu"], {"dtype": torch.bfloat16}),
    "lies channels last": (TAILS["gelu"], {"memory_format": torch.channels_last}),
    "dz is wanted in 16 bits": (TAILS["gelu"], {}),
    "takes less time": (TAILS["gelu"], {}),
}


@pytest.mark.parametrize("reason", OTHERS)
def test_what_is_left_to_others(reason, through, monkeypatch):
    through("narrow2d")
    tail, to = OTHERS[reason]
    model, x = random_model((32, 8, 3, 3), tail).train(), numerics.random_input((2, 8, 9, 34))
    model, x = model.to(**to) if "dtype" in to else model, x.to(**to)
    if "16 bits" in reason and "dz" in reason:
        ways = again.gradients.Ways(None, again.gradients.PACKED)
        monkeypatch.setattr(again.gradients, "fastest", lambda *_: ways)
    if "time" in reason:
        monkeypatch.setattr(again, "pays", lambda *_: False)
    with pytest.raises(again.Unsupported, match=reason):
        again.describe(Case(*given(model, x), True, x.dtype))


PAYS = {57: True, 69: True, 67: True, 73: False, 87: False, 48: False, 21: False, 23: False, 27: False}


@pytest.mark.parametrize("number", PAYS)
def test_problems_at_their_full_sizes(number, gpu):  # noqa: F811
    """By times, whatever the problem: with few products, and few instructions, v is formed again."""
    gpu(architecture=900, multiprocessors=132)
    case = Case(*full_size(number), True, torch.float32)
    if PAYS[number]:
        assert "; backward: v is formed again, " in again.describe(case)
    else:
        with pytest.raises(again.Unsupported, match="less time than its products|another mainloop is faster"):
            again.describe(case)


@needs_nvcc
@pytest.mark.parametrize("number, architecture", [(57, "90a"), (67, "80")])
def test_registers_spilled(number, architecture, gpu, tmp_path):  # noqa: F811
    """Few, if any, by what forms v again."""
    gpu(architecture=900, multiprocessors=132)
    request = again.requests(Case(*full_size(number), True, torch.float32))[-1]
    path = tmp_path / "again.cu"
    path.write_text(request["source"])
    done = nvcc(path, architecture, [f"{k}={v}" for k, v in request["defines"].items()], tmp_path / "out")
    assert done.returncode == 0, done.stderr
    found = [int(each) for each in re.findall(r"(\d+) bytes spill stores", done.stderr)]
    assert found and max(found) <= 32, found


def test_x_in_other_strides(through):
    """As a hook of saved tensors may give it back: in those, and at a place that no copy of 16 bytes begins at."""
    through("narrow2d")
    model, x = model_of((32, 3, 3, 3), "gelu"), numerics.random_input((2, 3, 9, 34))
    segment, arguments = given(model, x)
    plan = again.plan(Case(segment, arguments, True, x.dtype))
    y, *saved = again.forward(plan, arguments)
    needs, dy = [True] * len(arguments), torch.randn_like(y)
    expected = again.backward(plan, dy, arguments, saved, needs)
    elsewhere = torch.empty(x.numel() + 1)[1:].view(x.shape).copy_(x)
    for other in (x.contiguous(memory_format=torch.channels_last), elsewhere):
        found = again.backward(plan, dy, [other, *arguments[1:]], saved, needs)
        for ours, theirs in zip(found, expected):
            assert torch.equal(ours.contiguous(), theirs.contiguous())


def test_more_sums_than_tiles_leave_room_for(through):
    def scaled(m, v):
        for i in range(3):
            v = torch.tanh(v * getattr(m, f"factor{i}") + getattr(m, f"term{i}"))
        return v

    through("narrow3d")
    model = random_model((16, 3, 3, 3, 3), scaled).train()
    for i in range(6):
        model.register_parameter(
            f"{('factor', 'term')[i % 2]}{i // 2}", nn.Parameter(torch.randn(16, 1, 1, 1))
        )
    x = numerics.random_input((2, 3, 6, 9, 13))
    with pytest.raises(again.Unsupported, match="shared memory"):
        again.plan(Case(*given(model, x), True, x.dtype))
