"""The pool's fused backward, emulated: every gradient by the rule, beside eager's, at sizes, values and dtypes of all kinds."""

from __future__ import annotations

import pytest
import torch

import numerics
from inline_kernels.bench import checks
from inline_kernels.engine import tiling
from numerics import POOL
from test_emulated import Emulated, folder, gpu, guarded, pytestmark, remembers_nothing  # noqa: F401

SMALL = (5, 16, 3, 4, (16, 1, 1), (2, 3), -0.5, 1.0), (3, 5, 9, 13)


def assert_gradients(model, x, module=None):
    """All of them, by the rule. Where fewer are asked for they are the same: test_frozen_parameters."""
    module = module or numerics.twin_of(model, "fused")
    errors = checks.judged_on_draws(
        lambda number, cancelling: checks.errors_of("", module, model, x, "train_dx", cancelling=cancelling)[
            0
        ]
    )
    assert all(error.share <= 1 for error in errors), [e for e in errors if not e.share <= 1]


@pytest.mark.parametrize(
    "arguments, shape",
    [
        SMALL,
        ((8, 64, 3, 16, (64, 1, 1), 4, 0.0, 1.0), (2, 8, 15, 18)),
        ((8, 80, 3, 80, (80, 1, 1), 4, 0.0, 1.0), (1, 8, 11, 14)),  # a group per channel, two blocks
        ((3, 16, 1, 1, (1,), (8, 8), -0.5, 1.0), (2, 3, 17, 34)),  # windows of four products, one scale
        ((9, 16, (3, 4), 2, (16, 1, 1), (3, 5), 0.5, -0.5), (1, 9, 9, 12)),  # two planes, bounds swapped
        ((2, 32, (1, 4), 8, (32, 1, 1), (2, 2), -0.5, 1.0), (2, 2, 5, 140)),  # rows longer than a tile
        ((3, 16, (2, 1), 2, (16, 1, 1), (2, 3), -0.5, 1.0), (1, 3, 3, 3)),  # one window
        (
            (8, 16, 3, 4, (16, 1, 1), 4, -0.5, 1.0),
            (1, 8, 11, 150),
        ),  # eight windows at once, and a second tile
        ((3, 48, (2, 3), 8, (48, 1, 1), (3, 8), -0.5, 1.0), (1, 3, 11, 61)),  # windows of two fours a row
        ((12, 16, (1, 3), 4, (16, 1, 1), (8, 4), -0.5, 1.0), (1, 12, 17, 70)),  # two planes, tall windows
        ((9, 16, 3, 2, (16, 1, 1), (5, 2), 0.5, -0.5), (2, 9, 14, 13)),  # two planes, an odd number of rows
    ],
    ids=str,
)
@pytest.mark.parametrize("architecture", [800, 900])
def test_sizes(arguments, shape, architecture, gpu):  # noqa: F811
    model, x = numerics.build(POOL, arguments), numerics.random_input(shape)
    gpu(architecture=architecture, multiprocessors=1 if len(x) == 1 or arguments[1] == 32 else 9)
    assert_gradients(model, x)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_dtypes(dtype, gpu):  # noqa: F811
    model, x = numerics.build(POOL, SMALL[0], dtype=dtype), numerics.random_input(SMALL[1], dtype=dtype)
    gpu()
    assert_gradients(model, x)


def negative(model, x):
    model.group_norm.weight[::2] *= -1


def flat(model, x):
    """No slope, so that all of a window's values tie, and the first is selected; of two channels at a bound."""
    model.group_norm.weight[::3], model.scale[1] = 0, 0
    model.scale[:4:3], model.group_norm.bias[:4:3] = 1, torch.tensor([-0.5, 1.0])


def tied(model, x):
    """In whole windows, and across columns and rows of others."""
    x[1] = x[1].round()
    model.conv.weight.copy_(model.conv.weight.sign())
    x[2, :, :6] = 2


def large_mean(model, x):
    x += 1e3


def large(model, x):
    x *= 1e15


def small(model, x):
    x *= 1e-15


def lost(model, x):
    """Beside both biases, or beside the normalisation's: all of a window's values tie, and the first is selected."""
    model.conv.bias[:4] = 0
    x *= 1e-20


def nearly_lost(model, x):
    """In float32, though not in float64."""
    model.conv.bias[::2] = 0
    x *= 1e-10


def samples_apart(model, x):
    x *= torch.tensor([1e6, 1, 1e-6]).view(-1, 1, 1, 1)


def rows_apart(model, x):
    x[:, :, 1] *= 1e4


def channels_apart(model, x):
    x[:, 0] *= 1e4


def weights_apart(model, x):
    model.conv.weight[::2] *= 1e-6


def zeros(model, x):
    x[0] = 0


@pytest.mark.parametrize(
    "change",
    [
        negative,
        flat,
        tied,
        large_mean,
        large,
        small,
        lost,
        nearly_lost,
        samples_apart,
        rows_apart,
        channels_apart,
        weights_apart,
        zeros,
    ],
)
@pytest.mark.parametrize("architecture, window", [(800, (2, 3)), (900, (2, 3)), (900, (2, 4))])
def test_values(architecture, window, change, gpu):  # noqa: F811
    arguments = SMALL[0][:5] + (window,) + SMALL[0][6:]
    model, x = numerics.build(POOL, arguments), numerics.random_input(SMALL[1])
    with torch.no_grad():
        change(model, x)
    gpu(architecture=architecture)
    assert_gradients(model, x)


@pytest.mark.parametrize("change", [flat, lost, nearly_lost])
def test_flat_channels_of_the_epilogue_variant(change, gpu):  # noqa: F811
    model, x = numerics.build(POOL, SMALL[0]), numerics.random_input(SMALL[1])
    with torch.no_grad():
        change(model, x)
    gpu()
    assert_gradients(model, x, numerics.twin_of(model, "epilogue"))


def test_ties_in_even_windows(gpu):  # noqa: F811
    """Of which forward keeps one of two neighbours."""
    model = numerics.build(POOL, (5, 16, 3, 4, (16, 1, 1), (2, 4), -0.5, 1.0))
    x = numerics.random_input(SMALL[1])
    with torch.no_grad():
        tied(model, x)
    gpu()
    assert_gradients(model, x)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("of_dy", [True, False], ids=["in dy", "in x"])
def test_one_special_value(value, of_dy, gpu):  # noqa: F811
    """It makes NaN of what it makes NaN of in eager."""
    model, x = numerics.build(POOL, SMALL[0]), numerics.random_input(SMALL[1])
    dy = torch.randn_like(model(x).detach())
    (dy if of_dy else x)[1].view(-1)[17] = value
    eager = numerics.results(model, x, dy)
    gpu()
    ours = numerics.results(numerics.twin_of(model, "fused"), x, dy)
    for name, theirs in eager.items():
        assert torch.equal(ours[name].isfinite(), theirs.isfinite()), name


def test_repeats_are_bitwise_equal(gpu):  # noqa: F811
    """Whichever warp comes first: the emulation's order is another one each time."""
    model, x = numerics.build(POOL, SMALL[0]), numerics.random_input(SMALL[1])
    dy = torch.randn_like(model(x).detach())
    gpu()
    first, *others = [numerics.results(numerics.twin_of(model, "fused"), x, dy) for _ in range(4)]
    assert all(torch.equal(each[name], first[name]) for each in others for name in first)


def test_frozen_parameters(gpu):  # noqa: F811
    """Whatever else is asked for, a gradient is the same."""
    model, x = numerics.build(POOL, SMALL[0]), numerics.random_input(SMALL[1])
    gpu()
    everything = numerics.results(numerics.twin_of(model, "fused"), x)
    new = numerics.twin_of(model, "fused")
    leaves = {"x": x.detach().clone(), **dict(new.named_parameters())}
    for asked in (["conv.weight"], ["group_norm.bias"], ["x"], [name for name in leaves if name != "x"]):
        for name, leaf in leaves.items():
            leaf.requires_grad_(name in asked).grad = None
        new(leaves["x"]).sum().backward()
        assert all(torch.equal(leaves[name].grad, everything[name]) for name in asked)


def test_strided_dy(gpu):  # noqa: F811
    model, x = numerics.build(POOL, SMALL[0]), numerics.random_input(SMALL[1])
    dy = torch.randn_like(model(x).detach())
    gpu()
    for strided in (dy.transpose(2, 3).contiguous().transpose(2, 3), dy[:1, :, :1].expand_as(dy)):
        new = numerics.twin_of(model, "fused")
        found = [numerics.results(new, x, each) for each in (strided, strided.contiguous())]
        assert all(torch.equal(*pair) for pair in zip(*(each.values() for each in found)))


@pytest.mark.parametrize("launcher", ["forward_saving", "backward_input"])
def test_kept_of_another_size_is_not_launched(launcher, gpu, monkeypatch):  # noqa: F811
    model, x = numerics.build(POOL, SMALL[0]), numerics.random_input(SMALL[1])
    gpu()
    call = Emulated.__getattr__

    def shortened(kernels, name):
        found = call(kernels, name)
        if name != launcher:
            return found

        def bound(*last, **how):
            def run(*given):
                largest = max(given, key=lambda t: t.numel() * (t.dim() == 1))  # kept
                found(*[t[:-1] if t is largest else t for t in given], *last)

            return run

        found.bound = bound
        return found

    monkeypatch.setattr(Emulated, "__getattr__", shortened)
    with pytest.raises(AssertionError, match=r"kept: expected \d+ elements, got \d+"):
        numerics.results(numerics.twin_of(model, "fused"), x)


def test_longer_rows_than_compiled_for_are_not_launched(gpu, monkeypatch):  # noqa: F811
    model, x = numerics.build(POOL, SMALL[0]), numerics.random_input((1, 5, 9, 140))
    gpu()
    right = tiling.strips_defines
    monkeypatch.setattr(tiling, "strips_defines", lambda *a: right(*a) | {"LONG_ROWS": 0})
    with pytest.raises(AssertionError, match="the width that the kernels are compiled for"):
        numerics.results(numerics.twin_of(model, "fused"), x)


@pytest.mark.parametrize(
    "asked, planned", [("input_columns", "input_gradient_shared"), ("sums_fit", "selected_sums_shared")]
)
def test_filters_that_leave_no_room(asked, planned, gpu, monkeypatch):  # noqa: F811
    """The kernels don't take them; and a kernel whose shared memory is not what was planned does not compile."""
    model, x = numerics.build(POOL, SMALL[0]), numerics.random_input(SMALL[1])
    gpu()
    right = getattr(tiling, planned)
    monkeypatch.setattr(tiling, planned, lambda *a: right(*a) + 16)
    with pytest.raises(AssertionError, match="what was planned with"):
        numerics.results(numerics.twin_of(model, "fused"), x)
    monkeypatch.undo()
    gpu()
    assert numerics.takes(model, x)
    monkeypatch.setattr(tiling, asked, lambda *a: 0)
    assert not numerics.takes(model, x)


def test_sums_that_do_not_fit(gpu):  # noqa: F811
    """Of 63 windows a row, on a GPU with 99 KB of shared memory for a block; with fewer windows they do."""
    for window, fits in (((2, 2), False), ((4, 4), True)):
        model, x = (
            numerics.build(POOL, SMALL[0][:5] + (window,) + SMALL[0][6:]),
            numerics.random_input((1, 5, 9, 140)),
        )
        gpu(shared=99 << 10)
        assert numerics.takes(model, x) == fits


@pytest.mark.parametrize("dynamic", [None, True])
def test_compiled(dynamic, gpu):  # noqa: F811
    """With the fused operators in its graph, whose shapes are what they announce."""
    model, x = numerics.build(POOL, SMALL[0]), numerics.random_input(SMALL[1])
    dy = torch.randn_like(model(x).detach())
    gpu()
    new = numerics.twin_of(model, "fused")
    compiled = torch.compile(new, backend="aot_eager", dynamic=dynamic, fullgraph=True)
    eager, traced = numerics.results(new, x, dy), numerics.results(compiled, x, dy)
    assert all(torch.equal(traced[name], eager[name]) for name in eager)


def test_opcheck(gpu):  # noqa: F811
    model, x = numerics.build(POOL, SMALL[0]), numerics.random_input(SMALL[1])
    gpu()
    with numerics.Recorder() as recorder, torch.no_grad():
        numerics.twin_of(model, "fused")(x)
    ((forward, arguments),) = recorder.calls.items()
    given = [t.detach().requires_grad_() if isinstance(t, torch.Tensor) else t for t in arguments]
    torch.library.opcheck(forward, tuple(given))
