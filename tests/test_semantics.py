"""What PyTorch does at the edges, and so must we: NaN, infinities, ties, bounds that are hit exactly, bounds in the wrong order.

The first part builds inputs on which every intermediate value is exact, so that ours and eager's results and gradients must
be equal to the bit or to a rounding. The second part compares with eager on random inputs with special values sprinkled in:
NaN and infinities lie where eager has them, and what is finite follows the rule of checks.py, sample by sample.
"""

from __future__ import annotations

import copy
import math

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

import models
import numerics
from inline_kernels.bench import checks
from numerics import (
    DROPOUT,
    INSTANCE_NORM,
    MIN_ADD,
    NAMES,
    POOL,
    every_device,
    every_name,
    every_variant,
    known,
    results,
)

NAN, INF = math.nan, math.inf


def identity(name, channels, *arguments, device="cpu", **parameters):
    """A model whose convolution gives its input, and its twin; its normalisation divides by the standard deviation alone."""
    kernel_channels = channels, channels, 1
    model = numerics.build(name, (*kernel_channels, *arguments), device=device)
    with torch.no_grad():
        torch.nn.init.dirac_(model.conv.weight)
        model.conv.bias.zero_()
        for key, value in parameters.items():
            target = model.get_parameter(key.replace("__", "."))
            target.copy_(
                torch.as_tensor(value, dtype=torch.float32, device=device).view(-1, *[1] * (target.dim() - 1))
            )
    for module in model.modules():
        if hasattr(module, "eps"):
            module.eps = 0.0
    return model, numerics.twin_of(model)


def planes(values, shape, device="cpu"):
    """(N, C, …) from N·C·… numbers."""
    return torch.tensor(values, dtype=torch.float32, device=device).view(shape)


def assert_as_eager(model, new, x, g=None, exact=True):
    """Output and gradients as eager's; not finite in the same places."""
    theirs, ours = results(model, x, g), results(new, x, g)
    for key, value in theirs.items():
        tolerance = 0 if exact else 1e-5
        torch.testing.assert_close(
            ours[key],
            value,
            equal_nan=True,
            rtol=tolerance,
            atol=tolerance,
            msg=lambda text: f"{key}: {text}",
        )
    with torch.no_grad():
        numerics.assert_equal({"output": new(x)}, ours)
    return ours


# ----------------------------------------------------------------------------------------------------------------- by hand


@every_device
def test_min_add_ties_share_their_gradient(device):
    model, new = identity(MIN_ADD, 1, 0.5, (1, 1, 1), 2.0, device=device, bias=1.0)
    ours = assert_as_eager(model, new, planes([0.25, 0.5, 0.75, -0.0], (1, 1, 2, 2), device))
    assert ours["output"].flatten().tolist() == [2.5, 3.0, 3.0, 2.0]
    assert ours["x"].flatten().tolist() == [2.0, 1.0, 0.0, 2.0]


@every_device
def test_min_add_bound_is_rounded_to_the_dtype(device):
    """0.1 in half precision is a tie with 0.1 of the input, and a bound past the largest half is infinite."""
    for dtype in (torch.float16, torch.bfloat16):
        for constant in (0.1, 1e6):
            model, new = identity(MIN_ADD, 1, constant, (1, 1, 1), 2.0, device=device, bias=1.0)
            model, x = (
                model.to(dtype),
                torch.tensor([0.1, 0.2, 6e4, INF], dtype=dtype, device=device).view(1, 1, 2, 2),
            )
            assert_as_eager(model, new, x)


@every_device
@pytest.mark.parametrize("constant", [0.5, INF, -INF])
def test_min_add_special_values(constant, device):
    model, new = identity(MIN_ADD, 1, constant, (1, 1, 1), -2.0, device=device, bias=1.0)
    ours = assert_as_eager(
        model, new, planes([NAN, INF, -INF, 0.5, 1e38, -1e38, 1e-45, 0.0], (1, 1, 2, 4), device)
    )
    assert ours["output"].isnan().flatten()[0] and ours["x"].flatten()[0] == -2.0


DENORMAL = [1e-40, -1e-40, 1e-45, -3e-45, 1.1e-38, -2e-41]


@every_device
@pytest.mark.parametrize("constant", [0.5, 1e-41, -1e-41])
@pytest.mark.parametrize("beside", [[0.0, -0.0], [1e-30, -1.0], [1e15, 2.0]])
def test_min_add_denormals_are_exact(constant, beside, device):
    """Neither input, nor bound, nor result is flushed to zero; as eager, to the bit."""
    model, new = identity(MIN_ADD, 1, constant, (1, 1, 1), 1.0, device=device, bias=0.0)
    x = planes(DENORMAL + beside, (1, 1, 2, 4), device)
    ours = assert_as_eager(model, new, x, x.abs())
    if device == "cpu":
        assert torch.equal(ours["output"], x.clamp(max=constant))


@every_variant
@pytest.mark.parametrize("size", ["small", "wgmma"])
def test_min_add_denormals_survive_a_convolution(size, variant, device):
    """Against float64. One sample holds nothing else; one 1e-36, too; and one 1, beside which min-add's fused kernel counts as zero
    what is 2^39 times smaller, so that it gets another 1e-36."""
    if size == "wgmma" and variant != "fused":
        pytest.skip("the epilogue has one way for both sizes")
    arguments, shape, _ = numerics.size_of(MIN_ADD, variant) if size == "small" else numerics.WGMMA
    model = numerics.build(MIN_ADD, (*arguments[:-1], 1.0), device=device)
    with torch.no_grad():
        torch.nn.init.dirac_(model.conv.weight)
        model.conv.bias.zero_(), model.bias.zero_()
    x = 1e-40 * numerics.random_input(shape, device=device)
    x[1:, ..., ::2], x[2, ..., ::4] = 1e-36, 1e-36 if variant == "fused" else 1.0
    new = numerics.twin_of(model, variant, x)
    assert_rule_where_finite(new, model, x)
    with torch.no_grad():
        lost = ((new(x) == 0) & (model(x) != 0)).sum()
    assert not lost, f"{lost} denormals became 0"


@every_variant
@pytest.mark.parametrize("name", [INSTANCE_NORM, DROPOUT, POOL])
def test_denormals_survive_normalisation(name, variant, device):
    """Values of 1e-42, which eps makes 1e-40, against float64: flushed, the error would be 1. The result is at times a bound, a denormal too."""
    model, x = numerics.small(name, variant, device=device)
    x = 1e-42 * x
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if key in ("conv.bias", "group_norm.bias"):
                parameter.zero_()
    if name == DROPOUT:
        model.min_value = 1e-40
    with torch.no_grad():
        assert 0 < model(x).abs().max() < torch.finfo(torch.float32).tiny
    errors = errors_where_finite(
        numerics.twin_of(model, variant, x), model, x, "forward"
    )  # gradients hang on comparisons of 3 digits
    assert all(error.share <= 1 for error in errors), "\n".join(["", *map(str, errors)])


@every_device
@pytest.mark.parametrize("bounds", [(-1.0, 1.0), (1.0, -1.0), (-INF, INF), (1.0, 1.0)])
def test_instance_norm_bounds_hit_exactly(bounds, device):
    """Values of ±1 normalise to ±1, and a gradient passes at a bound."""
    model, new = identity(INSTANCE_NORM, 2, (2, 1, 1, 1), *bounds, device=device, multiplier=[1.0, -2.0])
    x = planes([1, -1, 1, -1, -1, -1, 1, 1], (1, 2, 1, 2, 2), device)
    g = planes([1, 2, 4, 8], (1, 1, 2, 2), device)
    theirs = results(model, x, g)
    assert bounds != (-1.0, 1.0) or theirs["multiplier"].abs().max() > 0
    assert_as_eager(model, new, x, g, exact=False)


@every_device
def test_instance_norm_the_first_channel_wins_a_tie(device):
    model, new = identity(
        INSTANCE_NORM, 3, (3, 1, 1, 1), -0.5, 0.5, device=device, multiplier=[1.0, 1.0, 1.0]
    )
    x = planes([1, -1, 1, -1] * 3, (1, 3, 1, 2, 2), device)
    ours = assert_as_eager(model, new, x, planes([8, 4, 2, 1], (1, 1, 2, 2), device), exact=False)
    assert ours["multiplier"].flatten().tolist() == [2.5, 0.0, 0.0]


@every_device
@pytest.mark.parametrize(
    "multiplier",
    [
        [0.0, 0.0, 0.0],
        [0.0, -1.0, 0.0],
        [-1.0, -1.0, -2.0],
        [1e-4, 1e-3, -1e-5],
        [NAN, 1.0, 1.0],
        [1.0, INF, 1.0],
    ],
)
def test_instance_norm_odd_multipliers(multiplier, device):
    """Of zero: a slope of zero and ties between channels; tiny: eps rules the statistics."""
    model, new = identity(INSTANCE_NORM, 3, (3, 1, 1, 1), -1.0, 1.0, device=device, multiplier=multiplier)
    model.instance_norm.eps = 1e-5
    x = numerics.random_input((2, 3, 2, 3, 5), device=device)
    assert_not_finite_as_eager(model, x)
    if all(map(math.isfinite, multiplier)):
        numerics.assert_rule(model, x)


@every_device
@pytest.mark.parametrize(
    "low, high", [(0.0, 1.0), (-1.0, 1.0), (1.0, 2.0), (2.0, 1.0), (-1.0, -1.0), (-INF, 0.5), (0.25, INF)]
)
def test_dropout_ties_and_bounds(low, high, device):
    """Normalised values of exactly ±1, and of exactly the bias where the slope is zero, against bounds there."""
    affine = dict(norm__weight=[1, 1, 0, 0], norm__bias=[0, 0, low, low + 1])
    model, new = identity(DROPOUT, 4, 2, low, high, 0.3, device=device, **affine)
    x = planes([1, -1, 1, -1, -1, -1, 1, 1] * 2, (1, 4, 1, 2, 2), device)
    g = numerics.random_input((1, 4, 1, 2, 2), device=device)
    assert_as_eager(model, new, x, g, exact=False)


@every_device
def test_dropout_a_tie_halves_the_gradient(device):
    model, new = identity(
        DROPOUT, 2, 1, 0.25, 1.0, 0.3, device=device, norm__weight=[0, 0], norm__bias=[0.25, 0.5]
    )
    ours = assert_as_eager(model, new, numerics.random_input((3, 2, 1, 2, 2), device=device), exact=False)
    assert ours["norm.bias"].tolist() == [6.0, 0.0]


@every_device
def test_pool_the_first_of_a_window_wins_a_tie(device):
    """Also where the slope is negative, and where it is zero, so that the whole window ties."""
    affine = dict(scale=[1, -1, 0], group_norm__weight=[1, 2, 3], group_norm__bias=[0, 0, 0.5])
    model, new = identity(POOL, 3, 1, (3, 1, 1), (2, 3), -9.0, 9.0, device=device, **affine)
    x = planes([1, 1, 0, 1, 0, 0] + [0, 0, 1, 0, 1, 1] + [5, 6, 7, 8, 9, 4], (1, 3, 2, 3), device)
    ours = assert_as_eager(model, new, x, exact=False)
    assert ours["output"].shape == (1, 3, 1, 1)


@every_device
@pytest.mark.parametrize("low, high", [(-1.0, 1.0), (1.0, 2.0), (1.0, -1.0), (-INF, INF), (0.5, 0.5)])
def test_pool_bounds_hit_exactly(low, high, device):
    affine = dict(scale=[1, -1, 1, 0.5], group_norm__weight=[1, 1, 0, 1], group_norm__bias=[0, 0, 0.5, 0])
    model, new = identity(POOL, 4, 2, (4, 1, 1), (2, 3), low, high, device=device, **affine)
    x = planes([1, -1] * 3 + [-1, 1] * 3 + [1] * 6 + [-1] * 6, (1, 4, 2, 3), device)
    assert_as_eager(model, new, x, planes([1, 2, 4, 8], (1, 4, 1, 1), device), exact=False)


@every_variant
@pytest.mark.parametrize("value", [NAN, INF, -INF, 1e30, 1e-30])
@every_name
def test_one_special_value(name, value, variant, device):
    """In one sample of three: it must spoil what it spoils in eager, and nothing else."""
    model, x = numerics.small(name, variant, device=device)
    x[1].view(-1)[17] = value
    # Where a variance overflows, eager's batch statistics on a GPU give NaN; on a CPU they give what we give on both.
    overflows = name == INSTANCE_NORM and value == 1e30
    assert_not_finite_as_eager(model, x, variant, reference="cpu" if overflows else device)


every_min_add = pytest.mark.parametrize(
    "size", [known(MIN_ADD).winograd, numerics.WINOGRAD_DX], ids=["x's by the library", "x's by Winograd"]
)


@pytest.mark.parametrize(
    "name, size, value",
    [
        (name, known(name).winograd, value)
        for name in NAMES
        if known(name).winograd
        for value in (NAN, INF, -INF)
    ]
    + [(MIN_ADD, known(MIN_ADD).winograd, 3e38), (MIN_ADD, numerics.WINOGRAD_DX, NAN)],
)
def test_special_values_by_winograd(name, size, value):
    """Infinities, and 3e38 beside 3e38, meet otherwise in its sums than in direct ones. The other samples don't notice."""
    model, x = numerics.sized(name, size)
    spoilt = x.clone()
    spoilt[1, 0].view(-1, x.shape[-1])[1, 1:3] = value
    assert_not_finite_as_eager(model, spoilt)
    new = numerics.twin_of(model)
    parameters = dict(new.named_parameters())
    alone = torch.autograd.grad(new(spoilt).sum(), list(parameters.values()))  # not x's
    numerics.assert_equal(dict(zip(parameters, alone)), results(new, spoilt))
    with torch.no_grad():
        assert torch.equal(new(spoilt)[::2], new(x)[::2])


def test_min_add_ties_by_winograd():
    """Below, at and above the bound, all exactly: half of the gradient passes at a tie."""
    model = numerics.build(MIN_ADD, (16, 40, 3, 0.5, (40, 1, 1), 2.0))
    with torch.no_grad():
        model.conv.weight.zero_()[:, 0, 1, 1] = 1
        model.conv.bias.zero_()
    sign = numerics.random_input(numerics.WINOGRAD_DX.shape).sign()
    x = 0.5 + 0.5 * sign * (numerics.random_input(sign.shape, seed=5) > 0)
    assert set(x.unique().tolist()) >= {0.0, 0.5, 1.0}
    theirs, ours = results(model, x), results(numerics.twin_of(model), x)
    for key, value in theirs.items():
        torch.testing.assert_close(ours[key], value, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("value", [NAN, INF, -INF, 3e38])
@pytest.mark.parametrize("passes", [True, False])
@every_min_add
def test_special_gradient_by_winograd(size, value, passes):
    """Where min lets a gradient pass, and where it withholds it; with the gradient of x and without."""
    model, x = numerics.sized(MIN_ADD, size)
    with torch.no_grad():
        u = model.conv(x)
    places = ((u < model.constant_value) == passes).nonzero()
    g = torch.full_like(u, 0.5)
    g[tuple(places[len(places) // 2])] = value
    new = numerics.twin_of(model)
    theirs, ours = results(model, x, g), results(new, x, g)
    parameters = {key: p for key, p in new.named_parameters()}
    alone = torch.autograd.grad(new(x), list(parameters.values()), g)
    for key, gradient in [*ours.items(), *zip(parameters, alone)]:
        kinds = [torch.where(t.isnan(), 2, t.sgn() * t.isinf()) for t in (gradient, theirs[key])]
        assert torch.equal(*kinds), key
    assert passes or theirs["conv.weight"].isfinite().all()


# What convolves on a CPU, constructor arguments, input shape: groups of 4096 and 1536 elements fill whole vectors,
# of 1292 and 858 don't.
MAGNITUDES = {
    "winograd, whole vectors": ((8, 64, 3, 16, (64, 1, 1), (2, 3), 0.0, 1.0), (2, 8, 34, 34)),
    "winograd, a rest": ((8, 64, 3, 16, (64, 1, 1), (2, 3), 0.0, 1.0), (2, 8, 19, 21)),
    "library, whole vectors": ((5, 24, 3, 4, (24, 1, 1), (2, 3), -0.5, 1.0), (3, 5, 18, 18)),
    "library, a rest": ((5, 24, 3, 4, (24, 1, 1), (2, 3), -0.5, 1.0), (3, 5, 15, 13)),
}


@pytest.mark.parametrize("dtype, magnitudes, reason", [
    *((torch.float32, (1e15, 1e19, 1e20, 1e25, 1e30, 1e35), reason) for reason in MAGNITUDES),
    (torch.bfloat16, (1e15, 1e20, 1e30, 1e35), "library, a rest"),
    (torch.float16, (1e2, 1e3, 1e4, 6e4), "library, a rest"),
    (torch.float64, (1e120, 1e160, 1e300), "library, whole vectors"),
], ids=str)  # fmt: skip
def test_pool_of_large_magnitudes(reason, dtype, magnitudes):
    """Right, though squares overflow: moments are summed in double then. Eager leaves the bias alone in some sizes, as its variance is
    infinite, and NaN in others, where the square of a mean overflows, too. In float64 the bias alone is left."""
    arguments, shape = MAGNITUDES[reason]
    model, x = numerics.build(POOL, arguments, dtype=dtype), numerics.random_input(shape)
    new, near, met_nan = numerics.twin_of(model), 64 * torch.finfo(dtype).eps, False
    flat = copy.deepcopy(model).requires_grad_(False)
    flat.group_norm.weight.zero_()
    for magnitude in magnitudes:
        large = (x.double() * magnitude).to(dtype)
        with torch.no_grad():
            ours, theirs = new(large), model(large)
            exact = copy.deepcopy(model).double()(large.double()) if magnitude < 1e160 else flat(x.to(dtype))
        torch.testing.assert_close(ours, exact.to(dtype), rtol=0, atol=near, equal_nan=True)
        if not theirs.isnan().any():
            assert_not_finite_as_eager(model, large)
        met_nan |= bool(theirs.isnan().any())
    assert met_nan == ("whole" in reason or dtype == torch.float16)  # whose convolution overflows


@pytest.mark.parametrize("conv_bias", [True, False])
@pytest.mark.parametrize("magnitude", [1e-10, 1e-20, 1e-30])
@pytest.mark.parametrize("reason", ["winograd, a rest", "library, a rest"])
def test_pool_of_what_is_lost_beside_a_bias(reason, magnitude, conv_bias):
    """All of a window's values tie behind group_norm, so that the first is selected, whichever was the largest."""
    arguments, shape = MAGNITUDES[reason]
    model, x = numerics.build(POOL, arguments), numerics.random_input(shape) * magnitude
    if not conv_bias:
        with torch.no_grad():
            model.conv.bias.zero_()
    errors, _ = checks.errors_of("", numerics.twin_of(model), model, x, "train_dx")
    assert all(error.share <= 1 for error in errors), errors


@every_variant
@pytest.mark.parametrize("value", [NAN, INF])
@pytest.mark.parametrize(
    "name, parameter",
    [(name, key) for name in NAMES for key, _ in numerics.small(name)[0].named_parameters()],
)
def test_one_special_parameter(name, parameter, value, variant, device):
    if parameter.endswith("norm.weight") and value == INF:
        pytest.skip("eager subtracts infinities, which makes NaN of what is infinite")
    model, x = numerics.small(name, variant, device=device)
    with torch.no_grad():
        model.get_parameter(parameter).view(-1)[1] = value
    assert_not_finite_as_eager(model, x, variant)


@pytest.mark.parametrize("value", [NAN, INF, 0.0])
@pytest.mark.parametrize("parameter", [key for key, _ in numerics.small(POOL)[0].named_parameters()])
def test_one_special_parameter_without_the_convolutions_output(parameter, value):
    """Pool's backward forms the filters' gradient from products of pixels, not from each pixel's gradient."""
    if parameter.endswith("norm.weight") and value == INF:
        pytest.skip("eager subtracts infinities, which makes NaN of what is infinite")
    model, x = numerics.sized(POOL, known(POOL).winograd)
    with torch.no_grad():
        model.get_parameter(parameter).view(-1)[1] = value
    assert_not_finite_as_eager(model, x)


@pytest.mark.parametrize("value", [1e19, 1e30, 1e-30])
def test_one_large_pixel_without_the_convolutions_output(value):
    model, x = numerics.sized(POOL, known(POOL).winograd)
    x[1].view(-1)[17] = value
    # Squares of the largest overflow: eager's output is NaN.
    assert_not_finite_as_eager(model, x, or_right=value == 1e30)


@pytest.mark.parametrize("value", [NAN, INF, -INF])
def test_one_special_gradient_without_the_convolutions_output(value):
    model, x = numerics.sized(POOL, known(POOL).winograd)
    g = torch.randn_like(model(x))
    g[1, 2] = value
    theirs, ours = results(model, x, g), results(numerics.twin_of(model), x, g)
    for key, gradient in theirs.items():
        assert torch.equal(ours[key].isfinite(), gradient.isfinite()), key


def assert_not_finite_as_eager(
    model, x, variant="epilogue", reference=None, or_right=False, phases=numerics.BOTH, new=None
):
    """NaN and infinite in the same places as eager on the device `reference`, output and gradients; the output without gradients, whose sums
    may have another order, too.
    or_right: or near float64's results."""
    new, device = new or numerics.twin_of(model, variant, x), reference or x.device
    theirs, ours = results(copy.deepcopy(model).to(device), x.to(device)), results(new, x)
    exact = results(copy.deepcopy(model).double(), x.double()) if or_right else {}
    for key, value in theirs.items():
        kinds = [torch.where(t.isnan(), 2, t.sgn() * t.isinf()) for t in (ours[key].to(device), value)]
        if or_right and ours[key].isfinite().all():
            share = 1e-5 if key == "output" else 1e-2  # products with the large pixel cancel in a gradient
            error = (ours[key] - exact[key]).norm()
            assert error <= share * exact[key].norm(), f"{key}: an error of {error}"
            continue
        assert torch.equal(*kinds), (
            f"{key}: {(kinds[0] != kinds[1]).sum()} elements are NaN, infinite or finite unlike eager's"
        )
    if "forward" in phases:
        with torch.no_grad():
            numerics.assert_near({"output": new(x)}, {"output": ours["output"]})


def assert_rule_where_finite(new, model, x, phases=numerics.BOTH):
    """The rule for what is finite: output and x's gradient by themselves in each sample, and the parameters' gradients."""
    for phase in phases:
        numerics.assert_within_limits(lambda x: (errors_where_finite(new, model, x, phase), []), x)


def errors_where_finite(new, model, x, phase):
    """The errors by sample, of what is finite in eager and in float64; what is not gets no gradient."""
    leaves = dict(model.named_parameters())
    plain, _, edges = checks.reference_of(model, x, "forward", None, None)
    with torch.no_grad():
        spoilt = ~(plain.isfinite() & model(x).isfinite())
    g = None if phase == "forward" else torch.randn_like(plain, dtype=x.dtype).masked_fill_(edges | spoilt, 0)
    reference = checks.named(*checks.reference_of(model, x, phase, g, None)[:2])
    theirs, ours = (checks.named(*checks.call(run, leaves, x, phase, g)) for run in (model, new))
    errors = []
    for key, exact in reference.items():
        spoilt = ~(exact.isfinite() & theirs[key].isfinite())
        values = [t.masked_fill(spoilt, 0) for t in (exact, theirs[key], ours[key])]
        for part in zip(*(t.split(1) if key in ("output", "gradient of x") else [t] for t in values)):
            errors.append(checks.judged(phase, key, *part, x.dtype))
    return errors


class OffsetGradient(torch.autograd.Function):
    """The same; in backward a gradient one element behind its storage's start."""

    @staticmethod
    def forward(context, y):
        return y.view_as(y)

    @staticmethod
    def backward(context, g):
        return offset_by_one(g)


def offset_by_one(x):
    return torch.cat([x.new_zeros(1), x.flatten()])[1:].view_as(x)


# ------------------------------------------------------------------------------------------------------------------ at random

SPECIAL = [
    0.0,
    -0.0,
    1.0,
    -1.0,
    NAN,
    INF,
    -INF,
    1e-40,
    1e-20,
    1e15,
    65504.0,
]  # with 1e20 a variance overflows: see above
FINITE_SUMS = [
    value for value in SPECIAL if value != 65504.0
]  # without what overflows in a float16 convolution
numbers = st.one_of(st.sampled_from([0.0, 1.0, -1.0, 0.5, 1e4]), st.floats(-2, 2, width=32))
channels = st.integers(
    2, 6
)  # with one, a normalisation leaves the convolution no gradient but rounding errors


# What a CPU builds for, in training alone: a dtype, channels in a group (None: there is one group), and whether parameters are by channel.
BUILDS = [
    (torch.float32, 3, True),
    (torch.float32, None, False),
    (torch.float16, 2, False),
    (torch.bfloat16, 5, True),
]
OF_16_BITS = {MIN_ADD: BUILDS[2], INSTANCE_NORM: BUILDS[3], DROPOUT: BUILDS[3], POOL: BUILDS[2]}


@st.composite
def problems(draw, name, variant, device):
    """A model of `name`, an input, perhaps strided and perhaps with special values, and whether the gradient lies at an offset; small.

    Fused kernels are compiled for the filters' shape, which is therefore always the same; a CPU's are one of BUILDS. Fused sums are float32
    until the end: what a float16 convolution makes infinite is not tried on them.
    """
    row, largest = known(name), 7
    spatial = len(row.small.shape) - 2
    if variant == "fused":
        largest = 12  # the fused kernels take no fewer positions than 64
        dtype, by_channel = draw(st.sampled_from([each[0] for each in BUILDS[1:]])), draw(st.booleans())
        inputs, outputs, kernel, groups = *numerics.size_of(name, variant).arguments[:3], 4
        kernel = kernel if isinstance(kernel, tuple) else (kernel,) * spatial
    else:
        inputs, kernel = draw(channels), tuple(draw(st.integers(1, 3)) for _ in range(spatial))
        dtype, of_group, by_channel = draw(st.sampled_from([*BUILDS[:2], OF_16_BITS.get(name, BUILDS[2])]))
        groups = draw(st.integers(2, 3)) if of_group else 1
        outputs = groups * (of_group or draw(channels))
    shape = (outputs,) + (1,) * spatial if by_channel else draw(st.sampled_from([(1,), ()]))
    arguments = row.tail(lambda: draw(numbers), shape, groups)
    model = numerics.build(
        name, (inputs, outputs, kernel, *arguments), device=device, dtype=dtype, seed=draw(st.integers(0, 99))
    )
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if key != "conv.weight" and draw(st.booleans()):
                parameter.view(-1)[0] = draw(st.sampled_from([0.0, -1.0, 1e-6]))
    sizes = [k - 1 + draw(st.integers(row.least, largest)) for k in kernel]
    x = numerics.random_input(
        (draw(st.integers(1, 4)), inputs, *sizes), device=device, dtype=dtype, seed=draw(st.integers(0, 99))
    )
    if draw(st.booleans()):
        x = tie(model, x)
    else:
        x = (x + draw(st.sampled_from([0.0, 0.0, 100.0]))) * draw(st.sampled_from([1.0, 1e-3, 30.0]))
    special = st.sampled_from(FINITE_SUMS if variant == "fused" and dtype == torch.float16 else SPECIAL)
    for place, value in draw(st.lists(st.tuples(st.integers(0, x.numel() - 1), special), max_size=2)):
        x.view(-1)[place] = value
    layout = draw(st.sampled_from(["contiguous", "channels last", "transposed", "offset", "every second"]))
    x = {
        "contiguous": lambda: x,
        "channels last": lambda: x.movedim(1, -1).contiguous().movedim(-1, 1),
        "transposed": lambda: x.transpose(-1, -2).contiguous().transpose(-1, -2),
        "offset": lambda: offset_by_one(x),
        "every second": lambda: x.repeat_interleave(2, -1)[..., ::2],
    }[layout]()
    return model, x, draw(st.booleans())


@torch.no_grad()
def tie(model, x):
    """Whole numbers for x, and for the convolution, so that its values tie, also with a constant that is whole; behind a GroupNorm
    a channel that is equal to a bound. One bias for all channels, so that equal filters give equal bits.
    """
    model.conv.weight.copy_((model.conv.weight * 1e3).round() % 3 - 1)
    model.conv.bias.fill_(1.0)
    for norm, bound in (("norm", "min_value"), ("group_norm", "clamp_min")):
        if hasattr(model, norm):
            getattr(model, norm).weight[0], getattr(model, norm).bias[0] = 0.0, getattr(model, bound)
    if hasattr(model, "scale"):
        model.scale.fill_(1.0)
    return x.round()


@every_variant
@every_name
def test_random_problems(name, variant, device):
    if known(name).tail is None:
        pytest.skip("nothing is known of its arguments")
    if variant not in models.PROBLEMS[name].variants:
        pytest.skip(f"{name} has no variant {variant!r}")

    @settings(max_examples=10 if variant == "fused" else 40)  # each size may have to be compiled for
    @given(problems(name, variant, device))
    def run(problem):
        model, x, offset = problem
        twin = numerics.problem_of(model).ModelNew.from_eager(model)
        assume(variant != "fused" or twin.plan(x).variant == "fused")
        twin.variant = variant
        phases = numerics.BOTH if variant == "fused" else ("train_dx",)
        assert_not_finite_as_eager(model, x, variant, phases=phases, new=twin)
        assert_rule_where_finite(
            (lambda x: OffsetGradient.apply(twin(x))) if offset else twin, model, x, phases
        )

    run()
