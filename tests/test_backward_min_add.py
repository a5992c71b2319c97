# ruff: noqa: F811 (fixtures)
"""Min-add's fused backward pass without a GPU (tests/test_emulated.py), against float64."""

from __future__ import annotations

import copy
import functools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import inline_loader
import models
import numerics
from inline_kernels.engine import composed, library
from inline_kernels.engine.support import DTYPES
from numerics import MIN_ADD
from test_emulated import (  # noqa: F401
    INF,
    NAN,
    Emulated,
    folder,
    gpu,
    guarded,
    library_of,
    pytestmark,
    remembers_nothing,
    small,
)


def case(arguments: tuple, shape: tuple, **options) -> tuple[torch.nn.Module, torch.Tensor]:
    """(channels in, out, kernel size) and the input's shape."""
    return numerics.sized(
        MIN_ADD, numerics.Size((*arguments, 0.1, (arguments[1], 1, 1), 2.0), shape), **options
    )


def usual(rows: int = 7):
    """Two strips, the second with two pixels."""
    return case((5, 20, 3), (3, 5, rows, 68))


def tf32(t: torch.Tensor) -> torch.Tensor:
    """The nearest value of TF32's, ties away from zero."""
    return ((t.view(torch.int32) + 0x1000) & ~0x1FFF).view(torch.float32)


def gradients(model, x, dy, rounded=lambda t: t) -> dict[str, torch.Tensor]:
    """In float64, of products whose operands are `rounded`."""
    constant, scale, weight = model.constant_value, model.scaling_factor, model.conv.weight.detach()
    with torch.no_grad():
        v = copy.deepcopy(model).double().conv(x.double())
        passes = (v < constant).double() + 0.5 * (v == constant)
        outer = dy * scale
        g = rounded((outer * passes).float()).double()
        g = torch.where(passes > 0, g, 0.0)
        operands = rounded(x).double(), rounded(weight).double()
    return {
        "x": torch.nn.grad.conv2d_input(x.shape, operands[1], g),
        "conv.weight": torch.nn.grad.conv2d_weight(operands[0], weight.shape, g),
        "conv.bias": (outer.double() * passes).sum((0, 2, 3)),
        "bias": outer.double().sum((0, 2, 3)).view(model.bias.shape),
    }


def apart(model, x, dy):
    """dy without what rounding decides."""
    with torch.no_grad():
        v = copy.deepcopy(model).double().conv(x.double())
    return dy.masked_fill(
        (v - model.constant_value).abs() < 1e-2 * v.abs().mean((1, 2, 3), keepdim=True), 0.0
    )


def assert_near(ours, expected, limit, names=("x", "conv.weight", "conv.bias", "bias")):
    for name in names:
        error = (ours[name].double() - expected[name]).norm() / expected[name].norm()
        assert error < limit, f"{name}: {error:.1e}"


SIZES = [
    ((70, 100, 3), (1, 70, 4, 135), "more than a block of either kind of channels; three strips, the last with 5 pixels"),
    ((3, 7, (5, 11)), (2, 3, 9, 80), "groups of kernel rows and of columns, of unequal sizes"),
    ((5, 20, 1), (1, 5, 3, 64), "one tap, one sample, a whole strip"),
]  # fmt: skip


@pytest.mark.parametrize("arguments, shape, reason", SIZES, ids=lambda value: str(value)[:20])
def test_as_exact_as_float32_at_any_size(arguments, shape, reason, gpu):
    model, x = case(arguments, shape)
    dy = apart(model, x, torch.randn_like(model(x)))
    gpu()
    assert_near(numerics.results(numerics.twin_of(model, "fused"), x, dy), gradients(model, x, dy), 3e-7)


@pytest.mark.parametrize("multiprocessors", [1, 7, 40])
def test_splits_and_slices(multiprocessors, gpu):
    """Splits that begin anywhere in a column of strips; one, several and a part of a sample in each; slices of one sample."""
    model, x = usual(rows=11)
    dy = apart(model, x, torch.randn_like(model(x)))
    gpu(multiprocessors=multiprocessors, replaced=("kSliceBytes = 64 << 20", "kSliceBytes = 1"))
    assert_near(numerics.results(numerics.twin_of(model, "fused"), x, dy), gradients(model, x, dy), 3e-7)


@pytest.mark.parametrize("dtype, architecture", [(torch.float16, 800), (torch.bfloat16, 900)], ids=str)
def test_rule_in_16_bits(dtype, architecture, gpu):
    model, x = small(MIN_ADD, dtype=dtype)
    gpu(architecture=architecture)
    numerics.assert_rule(model, x, "fused")


# -------------------------------------------------------------------------------------------------------------- one float16


@pytest.fixture
def runs_tf32(monkeypatch):
    """As for sizes for which the library surely runs TF32; those are too large to be emulated."""
    monkeypatch.setattr(library, "eager_runs_tf32", lambda x, weight: True)
    monkeypatch.setattr(library, "surely_runs_tf32", lambda x, weight: True)


@pytest.mark.parametrize(
    "arguments, shape", [((64, 128, 3), (2, 64, 5, 37)), ((5, 20, 3), (3, 5, 11, 13))], ids=str
)
def test_operands_are_rounded_as_for_tf32(arguments, shape, gpu, runs_tf32):
    """And nothing else is: so the result is much nearer to that of rounded operands than those are to exact ones."""
    model, x = case(arguments, shape)
    gpu()
    new = numerics.twin_of(model, "fused")
    dy = apart(model, x, torch.randn_like(model(x)))
    ours = numerics.results(new, x, dy)
    assert_near(ours, gradients(model, x, dy, tf32), 2e-7)
    exact = gradients(model, x, dy)
    for name in ("x", "conv.weight"):
        assert 1e-4 < (ours[name] - exact[name]).norm() / exact[name].norm() < 5e-4


@pytest.mark.parametrize(
    "arguments, shape, reason, multiprocessors",
    [(*size, number) for size, number in zip(SIZES, (7, 1, 7))],
    ids=lambda value: str(value)[:20],
)
def test_by_wgmma_at_any_size(arguments, shape, reason, multiprocessors, gpu, runs_tf32):
    model, x = case(arguments, shape)
    gpu(architecture=900, multiprocessors=multiprocessors)
    dy = apart(model, x, torch.randn_like(model(x)))
    ours = numerics.results(numerics.twin_of(model, "fused"), x, dy)
    assert_near(ours, gradients(model, x, dy, tf32), 3e-7)


@pytest.mark.parametrize(
    "first_of_x, first_of_dy, dtype",
    [(1, 0, torch.float32), (2, 2, torch.float32), (4, 3, torch.float32), (0, 1, torch.float16)],
    ids=str,
)
def test_by_wgmma_wherever_x_and_dy_begin(first_of_x, first_of_dy, dtype, gpu, runs_tf32):
    """At any element of their memory: the same bits as where both are aligned. Of an x in float32 y may be in `dtype`."""

    def moved(t, first):
        return torch.cat([t.new_empty(first), t.flatten()])[first:].view(t.shape)

    model, x = usual()
    gpu(architecture=900)
    dy = apart(model, x, torch.randn_like(model(x))).to(dtype)
    weight, operands = model.conv.weight, (model.conv.weight, model.conv.bias, model.bias.to(dtype))

    _, operator = numerics.operator_of(numerics.twin_of(model, "fused"), x, "fused")

    def weight_gradient(x, dy):
        return torch.autograd.grad(operator(x, *operands, 0.1, 2.0, DTYPES.index(dtype)), weight, dy)[0]

    ours = weight_gradient(x, dy)
    assert torch.equal(weight_gradient(moved(x, first_of_x), moved(dy, first_of_dy)), ours)
    assert_near({"conv.weight": ours}, gradients(model, x, dy.float(), tf32), 3e-7, ["conv.weight"])


@pytest.mark.parametrize("architecture, width", [(800, 67), (900, 50)])
def test_what_lies_past_a_tap_s_row_does_not_count(width, architecture, gpu, runs_tf32):
    """The last columns of x are not every tap's: infinite there, they make NaN of the gradients of the taps that reach them alone."""
    model, x = case((5, 20, 3), (2, 5, 7, width))
    x[..., -2:] = float("inf")
    gpu(architecture=architecture)
    dy = torch.zeros(2, 20, 5, width - 2)
    dy[..., :5] = 1
    ours = numerics.results(numerics.twin_of(model, "fused"), x, dy)["conv.weight"]
    expected = gradients(model, x, dy)["conv.weight"]
    assert expected[..., 0].isfinite().all() and not expected[..., 1:].isfinite().any()
    assert torch.equal(ours.isfinite(), expected.isfinite())


@pytest.mark.parametrize(
    "arguments, shape, multiprocessors",
    [((5, 20, 3), (3, 5, 11, 68), 3), ((6, 100, (2, 5)), (2, 6, 6, 140), 1)],
    ids=str,
)
def test_what_forward_by_wgmma_saves(arguments, shape, multiprocessors, gpu, runs_tf32):
    """Two consumers that share tiles, and two that share channels; blocks that begin anywhere in a sample."""
    model, x = case(arguments, shape)
    gpu(architecture=900, multiprocessors=multiprocessors)
    dy = apart(model, x, torch.randn_like(model(x)))
    ours = numerics.results(numerics.twin_of(model, "fused"), x, dy)
    assert_near(ours, gradients(model, x, dy, tf32), 3e-7)
    assert (ours["output"] - model(x)).norm() < 5e-4 * ours["output"].norm()


@pytest.mark.parametrize(
    "of_x, of_dy, split, architecture",
    [
        (1e15, 1e-38, True, 800),
        (1e-15, 1e20, True, 800),
        ("apart", "apart", True, 800),
        ("apart", "apart", False, 800),
        ("apart", "apart", False, 900),
        (1e30, 1e-37, False, 900),
        (1e-30, 1e30, False, 900),
    ],
    ids=str,
)
def test_rule_at_any_magnitude(split, of_x, of_dy, architecture, gpu, request):
    """Sample by sample, for dx: its scale is the sample's."""
    if not split:
        request.getfixturevalue("runs_tf32")
    model, x = small(MIN_ADD)
    x = x * (torch.tensor([1e6, 1, 1e-6]).view(3, 1, 1, 1) if of_x == "apart" else of_x)
    with torch.no_grad():
        model.conv.bias.zero_()
    model.constant_value = 0.0
    gpu(architecture=architecture)
    dy = apart(model, x, torch.randn_like(model(x)))
    dy = dy * (torch.tensor([1e-6, 1, 1e6]).view(3, 1, 1, 1) if of_dy == "apart" else of_dy)
    ours, exact = numerics.results(numerics.twin_of(model, "fused"), x, dy), gradients(model, x, dy)
    limit = 1e-6 if split else 5e-4
    limit = max(limit, 1e-3) if of_dy == 1e-38 else limit  # subnormal: few digits are left
    assert_near(ours, exact, limit)
    for n in range(3):
        assert_near({"x": ours["x"][n]}, {"x": exact["x"][n]}, limit, ("x",))


@pytest.mark.parametrize("seen", [0.0, 1e-4, 1e-30])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_by_wgmma_what_was_not_seen_ahead(seen, dtype, gpu, runs_tf32):
    """Units of g have the scale that some rows of a sample suggest, the first one in 32: here all others are larger. The second sample's are
    not, the third one is all zeros: each is as exact as alone. The second sample's share of dweight is as large as the first one's."""
    model, x = case((5, 20, 3), (3, 5, 37, 68), dtype=dtype)
    gpu(architecture=900, multiprocessors=7)
    dy = apart(model, x, torch.randn_like(model(x)))
    dy[0, :, [0, 32]] *= seen
    dy[0] *= 1e3 if dtype == torch.float32 else 1
    x[0] /= 1e3 if dtype == torch.float32 else 1
    dy[2] = 0
    ours = numerics.results(numerics.twin_of(model, "fused"), x, dy)
    if dtype != torch.float32:
        exact = gradients(model.float(), x.float(), dy.float())
        assert_near(ours, exact, 1e-2)
        return
    exact = gradients(model, x, dy, tf32)
    assert_near(ours, exact, 3e-7)
    assert not ours["x"][2].any()
    for n in range(2):
        assert_near({"x": ours["x"][n]}, {"x": exact["x"][n]}, 3e-7, ("x",))


# ---------------------------------------------------------------------------------------------------------------- semantics


@pytest.mark.parametrize("split", [True, False])
def test_ties_pass_half(split, gpu, request):
    """Whole numbers, so that sums are exact: below the constant, at it and above it."""
    if not split:
        request.getfixturevalue("runs_tf32")
    model, x = usual()
    x = torch.randint(-2, 3, x.shape).float()
    with torch.no_grad():
        model.conv.weight.copy_(torch.randint(-1, 2, model.conv.weight.shape)), model.conv.bias.fill_(2.0)
    model.constant_value = 1.0
    dy = torch.randint(-8, 9, model(x).shape).float()
    expected = numerics.results(model, x, dy)
    v = model.conv(x)
    assert min((v == 1).sum(), (v < 1).sum(), (v > 1).sum()) > 500
    gpu()
    ours = numerics.results(numerics.twin_of(model, "fused"), x, dy)
    numerics.assert_equal(ours, expected)


# ------------------------------------------------------------------------------------------------------ random sizes, other tails


# Channels in and out, kernel size, is it split?, architecture: each is compiled for.
BUILDS = [
    (1, 66, (2, 5), True, 800),
    (70, 20, (1, 2), False, 900),
    (17, 130, (4, 1), True, 900),
    (5, 3, (3, 4), False, 800),
]


def test_random_sizes_and_devices(gpu, monkeypatch):
    """Forward and all gradients, by either mainloop, split or not, against float64."""

    @settings(max_examples=8, deadline=None)
    @given(st.data())
    def run(data):
        size, draw = (
            lambda low, high: data.draw(st.integers(low, high)),
            lambda *v: data.draw(st.sampled_from(v)),
        )  # noqa: E731
        inputs, outputs, kernel, split, architecture = draw(*BUILDS)
        device = dict(architecture=architecture, multiprocessors=size(1, 12))
        monkeypatch.setattr(library, "eager_runs_tf32", lambda x, weight: not split)
        monkeypatch.setattr(library, "surely_runs_tf32", lambda x, weight: not split)
        shape = size(1, 3), inputs, kernel[0] - 1 + size(1, 6), kernel[1] - 1 + draw(1, 7, 64, 65, 130)
        model, x = case((inputs, outputs, kernel), shape)
        dy = apart(model, x, torch.randn_like(model(x)))
        gpu(**device)
        ours = numerics.results(numerics.twin_of(model, "fused"), x, dy)
        rounded = (lambda t: t) if split else tf32
        assert_near(ours, gradients(model, x, dy, rounded), 1e-6)
        with torch.no_grad():
            v = torch.conv2d(rounded(x).double(), rounded(model.conv.weight).double())
            v = v + model.conv.bias.double().view(-1, 1, 1)
            exact = (v.clamp(max=model.constant_value) + model.bias.double()) * model.scaling_factor
        assert_near(ours, {"output": exact}, 1e-6, ["output"])

    run()


RELU = """
#include "conv/wide.cuh"
#include "grad/wide.cuh"
using Build = conv::Build<conv::Filter<5, 20, 3, 2>, conv::Operands<float, SPLIT>, conv::Target<CAPABILITY, 163 << 10, 1, true>>;
struct Tail {
  const float* conv_bias;
  struct Channel { float conv_bias; };
  __device__ Channel channel(int64_t, int c) const { return {conv_bias[c]}; }
  __device__ float operator()(float v, const Channel& c) const { return tensor_core::max_nan(v + c.conv_bias, 0.f); }
  __device__ Mask mask(float v, const Channel& c) const { return {v + c.conv_bias <= 0, false}; }
  __device__ Gradient<1> gradient(float dy, const Mask& mask) const { return {mask(dy)}; }
};
EXPORT void forward(Out<float> y, Out<int32_t> largest, Out<int32_t> mask, In<float> x, In<float> weight, In<float> conv_bias,
                    cudaStream_t stream) {
  conv::wide<Build>(x, weight, Tail{conv_bias}, store::GradMask{mask}, store::Rows<float>{y},
                    largest, stream);
}
EXPORT void backward(Out<float> dx, Out<float> dweight, Out<float> d_conv_bias, Out<int32_t> largest_g, Out<int32_t> units,
                     In<float> dy, In<int32_t> mask, In<float> x, In<int32_t> largest, In<float> weight, cudaStream_t stream) {
  const auto g = grad::masked<20>(Tail{nullptr}, dy, mask);
  grad::sum_gradients<Build>(g, largest_g, units, stream, d_conv_bias);
  grad::wide_weight<Build>(dweight, g, largest_g, units, x, largest, stream);
  grad::wide_input<Build>(dx, g, largest_g, units, weight, stream);
}
"""


@pytest.mark.parametrize("split, architecture", [(True, 800), (False, 900)])
def test_another_tail(split, architecture, guarded, folder):
    """relu in place of min: ten lines, forward and backward by the same mainloops."""
    defines = {"SPLIT": "true" if split else "false", "CAPABILITY": architecture // 10}
    kernels = Emulated(RELU, library_of(RELU, architecture, defines, (), folder))
    kernels.library.emulation_device(3, 227 << 10)
    x, weight, bias = torch.randn(3, 5, 9, 70), torch.randn(20, 5, 3, 2), torch.randn(20)
    y = x.new_empty(3, 20, 7, 69)
    mask = x.new_empty(3, 7, 2, 20, 4, dtype=torch.int32)  # (N, H, strips of 64 columns, C, 4): grad_mask.cuh
    largest, largest_g = x.new_empty(3, dtype=torch.int32), x.new_empty(6, dtype=torch.int32)
    units = x.new_empty(
        0 if split else 3 * 3 * 7 * 69 * 4, dtype=torch.int32
    )  # of 8 channels, the last 4 of which there aren't
    x[1, :, 2, 3], x[2, 1, 4, 5] = -INF, NAN
    kernels.forward(y, largest, mask, x, weight, bias)
    rounded = (lambda t: t) if split else tf32
    leaves = [rounded(t).double().requires_grad_() for t in (x, weight)] + [bias.double().requires_grad_()]
    expected = torch.conv2d(*leaves).relu()
    assert torch.equal(kinds(y), kinds(expected.float()))
    assert_near({"y": y.nan_to_num(0, 0, 0)}, {"y": expected.detach().nan_to_num(0, 0, 0)}, 5e-7, ["y"])
    dy = torch.randn_like(y).masked_fill(expected.detach().abs() < 1e-2, 0.0)
    dy = dy.masked_fill(~expected.isfinite(), 0.0)
    x[1, :, 2, 3], x[2, 1, 4, 5] = 0, 0  # 0 · inf would be NaN, as in eager
    with torch.no_grad():
        leaves[0].copy_(rounded(x).double())
        passes = (expected > 0).double()
        g = rounded((dy * passes).float()).double()
    found = [torch.empty_like(t) for t in (x, weight, bias)]
    kernels.backward(*found, largest_g, units, dy, mask, x, largest, weight)
    exact = (
        torch.nn.grad.conv2d_input(x.shape, leaves[1], g),
        torch.nn.grad.conv2d_weight(leaves[0], weight.shape, g),
        (dy * passes).sum((0, 2, 3)),
    )
    for ours, theirs in zip(found, exact):
        assert_near({"": ours}, {"": theirs.detach()}, 1e-6, [""])


def kinds(t: torch.Tensor) -> torch.Tensor:
    return torch.where(t.isnan(), 2, t.sgn() * t.isinf())


@pytest.mark.parametrize("split, architecture", [(True, 800), (False, 800), (False, 900)], ids=str)
@pytest.mark.parametrize("of_x", [True, False], ids=["in x", "in dy"])
def test_special_values(of_x, split, architecture, gpu, request):
    """At the start of a row, in its middle, and where it ends for one tap and goes on for others, each in a channel of its own: they
    spoil what they spoil in eager."""
    if not split:
        request.getfixturevalue("runs_tf32")
    model, x = usual()
    model.constant_value, dy = 0.0, torch.randn_like(model(x))
    spoilt = x if of_x else dy
    last = spoilt.shape[3] - 1
    for channel, (column, value) in enumerate(
        [(0, NAN), (33, -INF), (last, INF), (last - 1, INF), (last - 2, -INF)]
    ):
        spoilt[channel % 3, channel, 4, column] = value
    exact = numerics.results(copy.deepcopy(model).double(), x.double(), dy.double())
    gpu(architecture=architecture)
    ours = numerics.results(numerics.twin_of(model, "fused"), x, dy)
    for name in ours:
        assert torch.equal(kinds(ours[name]), kinds(exact[name])), name


@pytest.mark.parametrize("architecture", [800, 900])
def test_only_what_is_asked_for(architecture, gpu, runs_tf32, monkeypatch):
    """What nobody would read is not written: units of g where no gradient is asked for that takes them."""
    model, x = small(MIN_ADD)
    gpu(architecture=architecture)
    expected, ran, empty, launch = (
        numerics.results(numerics.twin_of(model, "fused"), x),
        [],
        [],
        composed.Plan._launch,
    )

    def launched(*given):
        made = launch(*given)
        empty.extend(made.made[len(made.like) :])
        return made

    monkeypatch.setattr(composed.Plan, "_launch", launched)

    def watched(load, **options):
        kernels = load(**options)
        return type(
            "", (), {"__getattr__": lambda _, launcher: ran.append(launcher) or getattr(kernels, launcher)}
        )()

    for frozen, launchers in (
        ({"x"}, ["forward_saving", "backward_parameters", "backward_weight"]),
        ({"x", "conv.weight"}, ["forward_saving", "backward_parameters"]),
        ({"conv.weight", "bias"}, ["forward_saving", "backward_parameters", "backward_input"]),
    ):
        gpu(architecture=architecture)
        monkeypatch.setattr(inline_loader, "load", functools.partial(watched, inline_loader.load))
        new, ran[:], empty[:] = numerics.twin_of(copy.deepcopy(model), "fused"), [], []
        for name, parameter in new.named_parameters():
            parameter.requires_grad_(name not in frozen)
        leaf = x.clone().requires_grad_("x" not in frozen)
        new(leaf).sum().backward()
        assert ran == launchers
        assert ("largest_g" in empty) == (launchers[-1] == "backward_parameters")
        assert ("units" in empty) == (launchers[-1] == "backward_parameters" or architecture < 900)
        for name, t in {"x": leaf, **dict(new.named_parameters())}.items():
            assert t.grad is None if name in frozen else torch.equal(t.grad, expected[name])


def test_layouts(gpu):
    """An expanded dy, x and dy in channels last, one bias for all: dx has eager's layout, and all are equal to the bit."""
    model, x = numerics.sized(MIN_ADD, numerics.Size((5, 20, 3, 0.1, (1,), 2.0), (3, 5, 11, 13)))
    gpu()
    new = numerics.twin_of(model, "fused")
    expected = numerics.results(new, x)
    assert expected["bias"].shape == (1,)
    numerics.assert_equal(numerics.results(new, x, torch.ones(()).expand_as(model(x))), expected)
    last = x.contiguous(memory_format=torch.channels_last)
    dy = torch.ones_like(model(x)).contiguous(memory_format=torch.channels_last)
    ours = numerics.results(new, last, dy)
    assert ours["x"].stride() == numerics.results(model, last, dy)["x"].stride() != expected["x"].stride()
    numerics.assert_equal(ours, expected)


def test_repeats_are_bitwise_equal(gpu):
    """Whichever warp comes first: the emulation's order is another one each time."""
    model, x = usual()
    gpu(multiprocessors=5)
    new, dy = numerics.twin_of(model, "fused"), torch.randn_like(model(x))
    first, *others = [numerics.results(new, x, dy) for _ in range(3)]
    for other in others:
        numerics.assert_equal(other, first)


def test_auto_trains_with_little_saved(gpu):
    """Two bits for an element, of rows of whole strips; y and x may be changed in place or freed."""
    model, x = case((5, 20, 3), (3, 5, 11, 66))
    gpu()
    new = models.Conv2dMinAddMultiplyNew.from_eager(model).train()
    assert new.plan(x).variant == "fused"
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        y = new(x)
    own = [t for t in saved if t.data_ptr() not in {p.data_ptr() for p in (x, *model.parameters())}]
    assert sum(t.nbytes for t in own) == len(x) * 4 + y.numel() * 2 // 8
    y.detach().zero_()
    dy = torch.randn_like(y)
    y.backward(dy)
    expected = numerics.results(numerics.twin_of(model, "fused"), x, dy)
    assert all(torch.equal(p.grad, expected[name]) for name, p in model.named_parameters())


def test_opcheck(gpu):
    """With its gradient, as torch.compile traces it."""
    model, x = small(MIN_ADD)
    gpu()
    _, operator = numerics.operator_of(numerics.twin_of(model, "fused"), x, "fused")
    leaves = [t.detach().requires_grad_() for t in (x, model.conv.weight, model.conv.bias, model.bias)]
    torch.library.opcheck(operator.registered, (*leaves, 0.1, 2.0, 0))
