"""The four models against their references: results, gradients, layouts, bad input, and what a drop-in module must bear.

What PyTorch does at the edges (NaN, ties, bounds) is in test_semantics.py, torch.compile and its like in test_ecosystem.py.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import io
import math
import pickle
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import fused
import models
import numerics
import operators
import tiling
from numerics import DEVICES, DROPOUT, DTYPES, INSTANCE_NORM, MIN_ADD, POOL, SMALL, results

NAMES = list(SMALL)
every_name = pytest.mark.parametrize("name", NAMES)
every_device = pytest.mark.parametrize("device", DEVICES)
every_variant = pytest.mark.parametrize("variant, device", numerics.VARIANTS)

# What tiling.device_properties would say of one.
H200 = (9, 0), 227 << 10, 132, 60 << 20

# --------------------------------------------------------------------------------------------------------- the error rule

# Constructor arguments and input shape, for every variant. 85's pools are few, because each is compiled for.
SIZES = {
    MIN_ADD: {
        "one output element": ((4, 8, 3, 0.1, (8, 1, 1), 2.0), (1, 4, 3, 3)),
        "one channel in and out": ((1, 1, 1, 0.1, (1, 1, 1), 2.0), (2, 1, 4, 5)),
        "rectangular kernel": ((3, 7, (1, 4), 0.1, (7, 1, 1), 2.0), (2, 3, 5, 9)),
        "whole tiles": ((4, 64, 1, 0.1, (64, 1, 1), 2.0), (2, 4, 8, 8)),
        "one more than a tile": ((3, 65, 2, 0.1, (65, 1, 1), 2.0), (1, 3, 14, 6)),
        "one bias for all": ((5, 20, 3, 0.1, (1,), -2.0), (3, 5, 11, 13)),
        "a number as bias": ((5, 20, 3, 0.1, (), 2.0), (3, 5, 11, 13)),
        "scaled by zero": ((5, 20, 3, 0.1, (20, 1, 1), 0.0), (3, 5, 11, 13)),
        "constant never reached": ((5, 20, 3, 1e9, (20, 1, 1), 2.0), (3, 5, 11, 13)),
    },
    INSTANCE_NORM: {
        "64 positions": ((3, 16, 3, (16, 1, 1, 1), -1.0, 1.0), (2, 3, 6, 6, 6)),
        "one multiplier for all": ((3, 32, (2, 3, 3), (1,), -1.0, 1.0), (3, 3, 5, 7, 9)),
        "a number as multiplier": ((3, 32, (2, 3, 3), (), -0.5, 0.7), (3, 3, 5, 7, 9)),
        "upper bound below the lower": ((3, 32, (2, 3, 3), (32, 1, 1, 1), 0.5, -0.5), (3, 3, 5, 7, 9)),
        "one channel in, long rows": ((1, 16, (1, 5, 5), (16, 1, 1, 1), -1.0, 1.0), (2, 1, 3, 37, 141)),
        "four channels in, one sample": ((4, 32, 2, (32, 1, 1, 1), -1.0, 1.0), (1, 4, 9, 6, 35)),
        "two channels in": ((2, 16, 3, (16, 1, 1, 1), -1.0, 1.0), (3, 2, 5, 7, 9)),
    },
    DROPOUT: {
        "64 positions": ((3, 16, 3, 4, -0.3, 1.0, 0.2), (2, 3, 6, 6, 6)),
        "one group": ((3, 48, 3, 1, -0.3, 1.0, 0.2), (3, 3, 5, 7, 9)),
        "a group per channel": ((3, 48, 3, 48, -0.3, 1.0, 0.2), (3, 3, 5, 7, 9)),
        "upper bound below the lower": ((3, 48, 3, 12, 0.5, -0.25, 0.2), (3, 3, 5, 7, 9)),
        "one channel in, long rows": ((1, 16, (1, 5, 5), 16, -0.3, 1.0, 0.2), (2, 1, 3, 37, 141)),
        "four channels in, one sample": ((4, 32, 2, 4, -0.3, 1.0, 0.2), (1, 4, 9, 6, 35)),
        "two channels in": ((2, 16, 3, 4, -0.3, 1.0, 0.2), (3, 2, 5, 7, 9)),
    },
    POOL: {
        "one group": ((5, 80, 3, 1, (80, 1, 1), (2, 3), -0.5, 1.0), (3, 5, 15, 13)),
        "a group per channel": ((5, 80, 3, 80, (80, 1, 1), (2, 3), -0.5, 1.0), (3, 5, 15, 13)),
        "one output position, batch 1": ((3, 16, (2, 1), 2, (16, 1, 1), (2, 3), -0.5, 1.0), (1, 3, 3, 3)),
        "one scale for all": ((5, 80, 3, 10, (1,), (2, 3), -0.5, 1.0), (3, 5, 15, 13)),
        "a number as scale": ((5, 80, 3, 10, (), (2, 3), -0.5, 1.0), (3, 5, 15, 13)),
        "upper bound below the lower": ((5, 80, 3, 10, (80, 1, 1), (2, 3), 0.5, -0.5), (3, 5, 15, 13)),
        "rows longer than a tile": ((12, 128, 3, 16, (128, 1, 1), (2, 3), -0.5, 1.0), (2, 12, 11, 261)),
    },
}

# And those that are too small or too odd for the fused kernels of a GPU.
NOT_FUSED = {
    INSTANCE_NORM: {
        "two positions": ((3, 4, 3, (4, 1, 1, 1), -1.0, 1.0), (1, 3, 3, 3, 4)),
        "one channel in and out": ((1, 1, 1, (1, 1, 1, 1), -1.0, 1.0), (2, 1, 2, 3, 5)),
        "more channels than a byte counts": ((2, 300, 1, (300, 1, 1, 1), -1.0, 1.0), (2, 2, 2, 3, 5)),
        "planes longer than a block of statistics": ((1, 4, 3, (4, 1, 1, 1), -1.0, 1.0), (2, 1, 19, 19, 19)),
        "20 channels, one multiplier": ((3, 20, 3, (1,), -1.0, 1.0), (3, 3, 5, 7, 9)),
        "20 channels, a number as multiplier": ((3, 20, 3, (), -0.5, 0.7), (3, 3, 5, 7, 9)),
        "20 channels, bounds swapped": ((3, 20, 3, (20, 1, 1, 1), 0.5, -0.5), (3, 3, 5, 7, 9)),
    },
    DROPOUT: {
        "12 channels, one group": ((3, 12, 3, 1, -0.3, 1.0, 0.2), (3, 3, 5, 7, 9)),
        "12 channels, as many groups": ((3, 12, 3, 12, -0.3, 1.0, 0.2), (3, 3, 5, 7, 9)),
        "one position, batch 1": ((3, 12, 3, 4, -0.3, 1.0, 0.2), (1, 3, 3, 3, 3)),
        "planes longer than a block of statistics": ((1, 4, 3, 2, -0.3, 1.0, 0.2), (2, 1, 19, 19, 19)),
        "12 channels, bounds swapped": ((3, 12, 3, 4, 0.5, -0.25, 0.2), (3, 3, 5, 7, 9)),
    },
    POOL: {
        "24 channels, one group": ((5, 24, 3, 1, (24, 1, 1), (2, 3), -0.5, 1.0), (3, 5, 15, 13)),
        "24 channels, as many groups": ((5, 24, 3, 24, (24, 1, 1), (2, 3), -0.5, 1.0), (3, 5, 15, 13)),
        "8 channels, one output position": ((3, 8, (2, 1), 2, (8, 1, 1), (2, 3), -0.5, 1.0), (1, 3, 3, 3)),
        "windows of more elements than a byte counts": (
            (2, 4, 1, 2, (4, 1, 1), (17, 16), -0.5, 1.0),
            (2, 2, 36, 37),
        ),
        "24 channels, one scale": ((5, 24, 3, 4, (1,), (2, 3), -0.5, 1.0), (3, 5, 15, 13)),
        "24 channels, a number as scale": ((5, 24, 3, 4, (), (2, 3), -0.5, 1.0), (3, 5, 15, 13)),
        "24 channels, bounds swapped": ((5, 24, 3, 4, (24, 1, 1), (2, 3), 0.5, -0.5), (3, 5, 15, 13)),
        "more rows of a filter than fit": (
            (16, 16, (12, 1), 2, (16, 1, 1), (2, 3), -0.5, 1.0),
            (2, 16, 15, 13),
        ),
    },
}
every_size = pytest.mark.parametrize(
    "name, reason",
    [(name, reason) for sizes in (SIZES, NOT_FUSED) for name in sizes for reason in sizes[name]],
)


def sized(name: str, reason: str, device="cpu") -> tuple[nn.Module, torch.Tensor]:
    arguments, shape = SIZES[name].get(reason) or NOT_FUSED[name][reason]
    return numerics.build(name, arguments, device=device), numerics.random_input(shape, device=device)


@every_variant
@every_size
def test_rule_at_awkward_sizes(name, reason, variant, device):
    model, x = sized(name, reason, device)
    if variant in models.PROBLEMS[name].variants and reason in SIZES[name]:
        numerics.twin_of(model, variant).plan(x)  # raises where assert_rule would skip
    numerics.assert_rule(model, x, variant)


@every_size
def test_sizes_are_fused_or_not(name, reason, monkeypatch):
    """By what the fused kernels say for an H200."""
    monkeypatch.setattr(tiling, "device_properties", lambda index: H200)
    model, x = sized(name, reason)
    assert (numerics.twin_of(model)._fused_obstacle(x) is None) == (reason in SIZES[name])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@every_name
def test_small_sizes_are_fused(name, dtype, monkeypatch):
    """Or the tests of that variant would all skip themselves on a GPU."""
    monkeypatch.setattr(tiling, "device_properties", lambda index: H200)
    model, x = numerics.small(name, "fused", dtype=dtype)
    assert numerics.twin_of(model)._fused_obstacle(x) is None


@every_variant
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@every_name
def test_rule_in_every_dtype(name, dtype, variant, device):
    numerics.assert_rule(*numerics.small(name, variant, device=device, dtype=dtype), variant)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize(
    "arguments, shape", [numerics.HELD, numerics.HELD_IN_SCRATCH], ids=["in shared memory", "in scratch"]
)
def test_rule_where_sums_are_held(arguments, shape, dtype):
    model = numerics.build(INSTANCE_NORM, arguments, device="cuda", dtype=dtype)
    numerics.assert_rule(model, numerics.random_input(shape, device="cuda", dtype=dtype), "fused")


@every_variant
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_gradient_of_one_bias_for_all_is_rounded_once(dtype, variant, device):
    """Not channel by channel before these are summed up, which leaves no digit where they cancel."""
    model, x = (
        numerics.build(MIN_ADD, SIZES[MIN_ADD]["a number as bias"][0], device=device, dtype=dtype),
        numerics.random_input((3, 5, 11, 13), device=device, dtype=dtype),
    )
    g = torch.randn(3, 20, 9, 11)
    g = (g - g.mean()).to(device, dtype)
    exact = model.scaling_factor * g.double().sum().item()
    assert results(numerics.twin_of(model, variant, x), x, g)["bias"].item() == pytest.approx(
        exact, rel=0.01, abs=1e-4
    )


@every_variant
@pytest.mark.parametrize("mean", [1e2, 1e4])
@every_name
def test_rule_with_a_large_mean(name, mean, variant, device):
    """A variance from squares that are not shifted loses all digits here."""
    model, x = numerics.small(name, variant, device=device)
    numerics.assert_rule(model, x + mean, variant)


@every_variant
@every_name
def test_rule_with_large_beside_small(name, variant, device):
    """Samples of 1e15, 1 and 1e-15: the squares still fit, and the smallest variance is far below eps. 31 has no squares, and shows
    the smallest sample where no bias hides it."""
    model, x = numerics.small(name, variant, device=device)
    large = 1e20 if name == MIN_ADD else 1e15
    x *= torch.tensor([large, 1, 1 / large], device=device).view(-1, *[1] * (x.dim() - 1))
    if name == MIN_ADD:
        with torch.no_grad():
            model.conv.bias.zero_(), model.bias.zero_()
    numerics.assert_rule_by_sample(model, x, variant)


@every_variant
@pytest.mark.parametrize(
    "low, high", [(-math.inf, 0.5), (-0.5, math.inf), (-math.inf, math.inf), (1.0, -1.0)]
)
def test_rule_with_open_and_swapped_bounds(low, high, variant, device):
    """With multipliers of zero and below: none of 79's products of them and a bound may become NaN."""
    model, x = numerics.small(INSTANCE_NORM, variant, device=device)
    model.clamp_min, model.clamp_max = low, high
    with torch.no_grad():
        model.multiplier[::3], model.multiplier[1] = 0, -1
    numerics.assert_rule(model, x, variant)


@every_variant
@pytest.mark.parametrize(
    "name, slope",
    [(INSTANCE_NORM, "multiplier"), (DROPOUT, "norm.weight"), (POOL, "scale"), (POOL, "group_norm.weight")],
)
def test_rule_with_zero_and_negative_slopes(name, slope, variant, device):
    model, x = numerics.small(name, variant, device=device)
    with torch.no_grad():
        values = model.get_parameter(slope)
        values[0::3], values[1::3] = 0, -values[1::3].abs()
    numerics.assert_rule(model, x, variant)


@every_variant
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rule_where_min_ties(dtype, training, variant, device):
    """Slope 0 and bias min_value: every element ties, which is the one way to a gradient. The other groups have none."""
    model, x = numerics.small(DROPOUT, variant, device=device, dtype=dtype)
    with torch.no_grad():
        model.norm.weight[3:6], model.norm.bias[3:6] = 0, model.min_value
    numerics.assert_rule(model.train(training), x, variant)


@every_name
def test_rule_in_pieces(name, monkeypatch):
    """Without gradients the CPU works a few samples at a time, the last piece being smaller."""
    monkeypatch.setattr(operators, "CPU_PIECE_BYTES", 1)
    model, x = numerics.small(name)
    pieces = []
    convolve = operators._convolve
    monkeypatch.setattr(
        operators, "_convolve", lambda x, *args, **kw: pieces.append(len(x)) or convolve(x, *args, **kw)
    )
    with torch.no_grad():
        numerics.twin_of(model)(x)
    assert pieces == [2, 1]
    numerics.assert_rule(model, x)


@pytest.mark.parametrize("scale, shift", [(1, 0), (1, 1e2), (1, 1e4), (1e15, 0), (1e-6, 0)])
@pytest.mark.parametrize("name", numerics.WINOGRAD)
def test_rule_by_winograd(name, scale, shift):
    arguments, shape = numerics.WINOGRAD[name]
    model, x = numerics.build(name, arguments), numerics.random_input(shape)
    assert operators._winograd_applies(x, model.conv.weight)
    numerics.assert_rule(model, x * scale + shift)


@settings(max_examples=20)
@given(
    st.integers(1, 3),
    st.integers(8, 12),
    st.sampled_from([32, 64]),
    st.integers(18, 40),
    st.integers(18, 150),
)
def test_rule_by_winograd_at_random_sizes(N, Cin, C, H, W):
    """85, which works by rows; test_operators.py has the others' convolution."""
    model, x = (
        numerics.build(POOL, (Cin, C, 3, 4, (C, 1, 1), (2, 3), -0.5, 1.0)),
        numerics.random_input((N, Cin, H, W)),
    )
    numerics.assert_rule(model, x)


def test_rule_by_winograd_a_few_planes_at_a_time():
    """As many terms as it may have: the transformed planes of a piece don't fit in cache together."""
    model = numerics.build(INSTANCE_NORM, (32, 8, (2, 3, 3), (8, 1, 1, 1), -1.0, 1.0))
    x = numerics.random_input((1, 32, 8, 18, 18))
    assert operators._winograd_applies(x, model.conv.weight)
    numerics.assert_rule(model, x)


# ---------------------------------------------------------------------------------------------------------- the contract


@every_name
def test_registry(name):
    problem = models.PROBLEMS[name]
    arguments = models.get_init_inputs(name)
    assert isinstance(arguments, list) and arguments == problem.get_init_inputs()
    model = models.get_model(name)
    assert type(model) is problem.ModelNew and type(problem.get_model()) is problem.ModelNew
    reference = problem.Model(*arguments)
    assert isinstance(reference, nn.Module) and not isinstance(reference, problem.ModelNew)
    (x,) = models.get_inputs(name, batch_size=2)
    assert x.shape == (2, *problem.input_shape[1:]) and x.device.type == "cpu" and x.dtype == torch.float32
    assert 0 <= x.min() and x.max() <= 1
    assert problem.get_inputs(batch_size=1)[0].shape == (1, *problem.input_shape[1:])


def test_registry_without_arguments():
    """What KernelBench calls: the first problem at its full size, and each problem by itself."""
    (x,) = models.get_inputs()
    assert x.shape == (128, 64, 128, 128)
    assert models.get_init_inputs() == [64, 128, 3, 0.5, (128, 1, 1), 2.0]
    assert type(models.get_model()) is models.PROBLEMS[MIN_ADD].ModelNew
    assert [problem.number for problem in models.PROBLEMS.values()] == [31, 79, 83, 85]


@pytest.mark.parametrize("device", ["meta", numerics.CUDA])
@every_name
def test_registry_takes_a_device(name, device):
    assert models.get_inputs(name, device=device, batch_size=1)[0].device.type == device
    assert {p.device.type for p in models.get_model(name, device=device).parameters()} == {device}


@pytest.mark.parametrize("function", [models.get_model, models.get_inputs, models.get_init_inputs])
def test_unknown_problem(function):
    with pytest.raises(KeyError, match="expected one of conv2d_min_add_multiply, .*, got 'conv4d'"):
        function("conv4d")


@every_name
def test_state_dict_loads_both_ways(name):
    problem, (arguments, _) = models.PROBLEMS[name], SMALL[name]
    old, new = problem.Model(*arguments), problem.ModelNew(*arguments)
    new.load_state_dict(old.state_dict(), strict=True)
    assert all(torch.equal(a, b) for a, b in zip(old.parameters(), new.parameters()))
    problem.Model(*arguments).load_state_dict(new.state_dict(), strict=True)
    assert [key for key, _ in old.named_modules()] == [key for key, _ in new.named_modules()]


@every_name
def test_from_eager_takes_over(name):
    problem = models.PROBLEMS[name]
    model, x = numerics.small(name)
    new = problem.ModelNew.from_eager(model)
    assert type(new) is problem.ModelNew and not new.training and new.variant == "auto"
    assert all(a is b for a, b in zip(new.parameters(), model.parameters()))
    new.variant = "eager"
    numerics.assert_equal(results(new, x), results(model, x))
    new.train()
    assert not model.training or name == DROPOUT, "the reference's own mode is its own"
    with pytest.raises(TypeError, match=f"expected a {problem.Model.__name__}, got a Linear"):
        problem.ModelNew.from_eager(nn.Linear(1, 1))


@every_name
def test_variant_and_plan(name):
    model, x = numerics.small(name)
    new = models.PROBLEMS[name].ModelNew.from_eager(model)
    assert models.PROBLEMS[name].variants[:3] == ("eager", "epilogue", "fused")
    plan = new.plan(x)
    assert (
        plan.variant == "epilogue"
        and plan.reason
        and str(plan) == f"epilogue: {plan.reason}"
        and "\n" not in str(plan)
    )
    for variant in models.PROBLEMS[name].variants:
        new.variant = variant
        assert new.plan(x).variant == variant
        torch.testing.assert_close(new(x), model(x))
    new.variant = "fastest"
    for call in (new, new.plan):
        with pytest.raises(
            ValueError, match="expected variant to be 'auto' or one of eager, epilogue.*, got 'fastest'"
        ):
            call(x)


@every_name
def test_kernels_run(name, monkeypatch):
    """Neither 'auto' nor a variant by name may hand x to the reference."""
    model, x = numerics.small(name)
    problem = models.PROBLEMS[name]
    monkeypatch.setattr(problem.Model, "forward", lambda self, x: pytest.fail("the reference ran"))
    for variant in ("auto", "epilogue"):
        numerics.twin_of(model, variant)(x)


# -------------------------------------------------------------------------------------------------------------- bad input


def _bad_inputs(name):
    _, shape = SMALL[name]
    spatial = len(shape) - 2
    yield "two dimensions", torch.rand(3, 4)
    yield "one dimension too many", torch.rand(1, *shape)
    yield "another number of channels", torch.rand(shape[0], shape[1] + 1, *shape[2:])
    yield "another dtype", torch.rand(shape, dtype=torch.float64)
    yield "integers", torch.ones(shape, dtype=torch.int64)
    yield "booleans", torch.ones(shape, dtype=torch.bool)
    yield "kernel larger than the input", torch.rand(*shape[:2], *[2] * spatial)
    yield "no rows", torch.rand(*shape[:2], *[0] * spatial)
    yield "no channels", torch.rand(shape[0], 0, *shape[2:])
    yield "no tensor", None
    if name == POOL:
        yield "window larger than its input", torch.rand(3, 5, 3, 13)
    if name == INSTANCE_NORM:
        yield "one position", torch.rand(3, 3, 2, 3, 3)


@pytest.mark.parametrize("variant", ["auto", "epilogue"])
@pytest.mark.parametrize("name, fault", [(name, fault) for name in NAMES for fault, _ in _bad_inputs(name)])
def test_bad_input_raises_as_eager(name, fault, variant):
    model, _ = numerics.small(name, variant)
    _assert_same_error(model, numerics.twin_of(model, variant), dict(_bad_inputs(name))[fault])


@pytest.mark.parametrize("name, arguments, shape", [
    (DROPOUT, (3, 4, 3, 4, 0.0, 1.0, 0.2), (1, 3, 3, 3, 3)),
    (POOL, (3, 4, 3, 4, (4, 1, 1), (1, 1), 0.0, 1.0), (1, 3, 3, 3)),
])  # fmt: skip
def test_one_element_per_group_raises_as_eager(name, arguments, shape):
    model = numerics.build(name, arguments)
    _assert_same_error(model, numerics.twin_of(model), torch.rand(shape))


@pytest.mark.parametrize(
    "name, parameter",
    [(name, key) for name in NAMES for key, _ in numerics.small(name)[0].named_parameters()],
)
def test_parameters_that_do_not_fit_raise_as_eager(name, parameter):
    """Kernels must not read past a parameter with too few elements, nor ignore one with too many."""
    for count in (7, 40):
        model, x = numerics.small(name)
        owner, values = (
            model.get_submodule(".".join(parameter.split(".")[:-1])),
            model.get_parameter(parameter),
        )
        setattr(owner, parameter.split(".")[-1], nn.Parameter(torch.ones(count, *values.shape[1:])))
        with pytest.raises(RuntimeError):
            model(x)
        with pytest.raises(RuntimeError):
            numerics.twin_of(model, "auto")(x)


def _assert_same_error(model, new, x):
    with pytest.raises(Exception) as theirs:
        model(x)
    with pytest.raises(type(theirs.value)) as ours:
        new(x)
    assert type(ours.value) is type(theirs.value) and str(ours.value) == str(theirs.value)


@pytest.mark.parametrize("name, arguments", [
    (DROPOUT, (3, 12, 3, 5, 0.0, 1.0, 0.2)),  # groups do not divide the channels
    (POOL, (5, 24, 3, 7, (24, 1, 1), 2, 0.0, 1.0)),
    (DROPOUT, (3, 12, 3, 4, 0.0, 1.0, 1.5)),  # no probability
    (DROPOUT, (3, 12, 3, 4, 0.0, 1.0, -0.1)),
])  # fmt: skip
def test_bad_constructor_arguments_raise_as_eager(name, arguments):
    with pytest.raises(ValueError) as theirs:
        models.PROBLEMS[name].Model(*arguments)
    with pytest.raises(ValueError) as ours:
        models.PROBLEMS[name].ModelNew(*arguments)
    assert str(ours.value) == str(theirs.value)


@every_device
@every_name
def test_no_channels_out_raises_as_eager(name, device):
    """The reduction over an empty dimension is never reached."""
    (inputs, _, *rest), shape = SMALL[name]
    arguments = [
        inputs,
        0,
        *(
            (0, *value[1:]) if isinstance(value, tuple) and value[1:] == (1,) * (len(shape) - 3) else value
            for value in rest
        ),
    ]
    model = models.PROBLEMS[name].Model(*arguments).to(device)
    _assert_same_error(model, numerics.twin_of(model, "auto"), torch.rand(shape, device=device))


@every_device
@every_name
def test_empty_batch(name, device):
    """Either eager's error, or its empty output and its zero gradients."""
    model, x = numerics.small(name, device=device)
    new = numerics.twin_of(model, "auto")
    try:
        theirs = results(model, x[:0])
    except (ValueError, RuntimeError):
        _assert_same_error(model, new, x[:0])
    else:
        numerics.assert_equal(results(new, x[:0]), theirs)


@every_name
def test_no_batch_dimension(name):
    model, x = numerics.small(name)
    new = numerics.twin_of(model, "auto")
    assert new.plan(x[0]).variant == "eager" and "batch dimension" in new.plan(x[0]).reason
    if name in (DROPOUT, POOL):  # group_norm takes the channels for the batch
        return _assert_same_error(model, new, x[0])
    numerics.assert_equal(results(new, x[0]), results(model, x[0]))
    new.variant = "epilogue"
    with pytest.raises(RuntimeError, match="variant 'epilogue' can't run: the input has no batch dimension"):
        new(x[0])


@pytest.mark.parametrize("device", ["meta", numerics.CUDA])
@pytest.mark.parametrize("parameter", ["conv.bias", "norm.weight", "norm.bias"])
def test_folded_names_a_parameter_on_another_device(parameter, device):
    """It reads them by torch's sums, which take a single number from any device."""
    model, x = numerics.small(DROPOUT, device="cpu" if device == "meta" else device)
    owner, key = parameter.split(".")
    setattr(
        getattr(model, owner),
        key,
        nn.Parameter(model.get_parameter(parameter).detach().to("meta" if device == "meta" else "cpu")),
    )
    with pytest.raises(
        RuntimeError, match=f"expected {owner}_{key} on {x.device}, where x is, got it on (meta|cpu)"
    ):
        numerics.twin_of(model, "folded")(x)


def test_folded_refuses_a_capture(monkeypatch):
    """A made-up one; a real one is in test_cuda.py."""
    model, x = numerics.small(DROPOUT)
    monkeypatch.setattr(operators, "_device_type", lambda x: "cuda")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(
        RuntimeError, match="'folded' looks at its input's values, so no CUDA graph can capture it"
    ):
        numerics.twin_of(model, "folded")(x)


@pytest.mark.parametrize("alter, reason", [
    (lambda model: setattr(model, "conv", nn.Conv2d(5, 20, 3, stride=2)), "stride"),
    (lambda model: setattr(model, "conv", nn.Conv2d(5, 20, 3, padding=1)), "padding"),
    (lambda model: setattr(model, "conv", nn.Conv2d(5, 20, 3, padding="same")), "padding"),
    (lambda model: setattr(model, "conv", nn.Conv2d(5, 20, 3, bias=False)), "no bias"),
    (lambda model: setattr(model, "conv", nn.Conv2d(5, 20, 3, dilation=2)), "dilation"),
    (lambda model: setattr(model, "conv", nn.Conv2d(5, 20, 3, padding=1, padding_mode="reflect")), "padding"),
    (lambda model: setattr(model, "bias", nn.Parameter(torch.randn(20, 9, 11))), "one value per channel"),
    (lambda model: model.conv.register_forward_hook(lambda *_: None), "hooks"),
])  # fmt: skip
def test_what_only_eager_can_do(alter, reason):
    model, x = numerics.small(MIN_ADD)
    alter(model)
    if reason == "padding" or reason in ("stride", "dilation"):
        model.bias = nn.Parameter(torch.randn(20, 1, 1))
    new = numerics.twin_of(model, "auto")
    assert new.plan(x).variant == "eager" and reason in new.plan(x).reason
    numerics.assert_equal(results(new, x), results(model, x))
    new.variant = "epilogue"
    with pytest.raises(RuntimeError, match=reason):
        new(x)


# ---------------------------------------------------------------------------------------------------------------- layouts

LAYOUTS = {
    "sliced": lambda x: torch.stack([x, x + 9], dim=-1)[..., 0],
    "every second sample": lambda x: x.repeat_interleave(2, 0)[::2],
    "transposed": lambda x: x.transpose(-1, -2).contiguous().transpose(-1, -2),
    "expanded": lambda x: x[:1].expand_as(x),
    "storage offset 1": lambda x: torch.cat([x.new_zeros(1), x.flatten()])[1:].view_as(x),
    "flipped copy of a permuted view": lambda x: x.movedim(1, -1).contiguous().movedim(-1, 1).flip(0),
    "channels last": lambda x: x.to(memory_format=operators._channels_last(x)),
}


def assert_strides_as_eager(model, x, variant):
    ours, theirs = results(numerics.twin_of(model, variant), x), results(model, x)
    for key in ("output", "x"):
        assert ours[key].stride() == theirs[key].stride(), key


@every_variant
@pytest.mark.parametrize("layout", LAYOUTS)
@every_name
def test_layouts(name, layout, variant, device):
    model, x = numerics.small(name, variant, device=device)
    x = LAYOUTS[layout](x)
    numerics.assert_rule(model, x, variant)
    assert_strides_as_eager(model, x, variant)


@every_device
@every_name
def test_channels_last_in_float64(name, device):
    """Some of the libraries have no such convolution, and answer contiguously."""
    model, x = numerics.small(name, device=device, dtype=torch.float64)
    assert_strides_as_eager(model, LAYOUTS["channels last"](x), "epilogue")


@every_variant
@pytest.mark.parametrize("layout", ["storage offset 1", "channels last"])
@every_name
def test_layouts_of_the_model(name, layout, variant, device):
    model, x = numerics.small(name, variant, device=device)
    with torch.no_grad():
        if layout == "channels last":
            model.conv.to(memory_format=operators._channels_last(x))
        else:
            for parameter in model.parameters():
                parameter.set_(LAYOUTS[layout](parameter.data))
    numerics.assert_rule(model, x, variant)
    assert_strides_as_eager(model, x, variant)


@every_device
@pytest.mark.parametrize(
    "reduce", [lambda y: y.sum(), lambda y: y.transpose(-1, -2).contiguous().view(-1)[::2].sum()]
)
@every_name
def test_gradient_that_is_not_contiguous(name, reduce, device):
    """sum() hands back one expanded number, a transposition a strided gradient."""
    model, x = numerics.small(name, device=device)
    if name == DROPOUT:
        with torch.no_grad():
            model.norm.weight.zero_(), model.norm.bias.fill_(model.min_value)
    new, leaves = numerics.twin_of(model), list(model.parameters())
    y = new(x)
    g = torch.autograd.grad(reduce(y), y, retain_graph=True)[0].contiguous()
    through = torch.autograd.grad(reduce(y), leaves, retain_graph=True)
    assert all(torch.equal(a, b) for a, b in zip(through, torch.autograd.grad(y, leaves, g)))
    assert any(t.abs().max() > 0 for t in through)


@every_device
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@every_name
@numerics.steady_library()
def test_gradient_that_is_not_aligned(name, dtype, device):
    """Its first element is the second of its storage, where no vector of several may be loaded."""
    model, x = numerics.small(name, device=device, dtype=dtype)
    if name == DROPOUT:
        with torch.no_grad():
            model.norm.weight.zero_(), model.norm.bias.fill_(model.min_value)
    new = numerics.twin_of(model)
    aligned = torch.randn_like(new(x))
    g = LAYOUTS["storage offset 1"](aligned)
    assert g.is_contiguous() and g.data_ptr() % (2 * g.element_size()) and not aligned.data_ptr() % 16
    theirs, ours = results(new, x, aligned), results(new, x, g)
    numerics.assert_equal(ours, theirs)
    assert any(t.abs().max() > 0 for key, t in ours.items() if key != "output")


# -------------------------------------------------------------------------------------------------------------- gradients


@every_variant
@every_name
def test_only_some_gradients(name, variant, device):
    """Each of x and the parameters alone, all but it, and none: the same gradients, and only those asked for."""
    model, x = numerics.small(name, variant, device=device)
    new = numerics.twin_of(model, variant, x)
    expected, leaves = results(new, x), {"x": x, **dict(new.named_parameters())}
    for chosen in [{key} for key in leaves] + [set(leaves) - {key} for key in leaves]:
        for key, leaf in leaves.items():
            leaf.requires_grad_(key in chosen).grad = None
        new(x).sum().backward()
        for key, leaf in leaves.items():
            assert (leaf.grad is not None) == (key in chosen), key
            if key in chosen:
                torch.testing.assert_close(leaf.grad, expected[key])
    for leaf in leaves.values():
        leaf.requires_grad_(False)
    assert not new(x).requires_grad


@every_name
def test_no_grad_and_inference_mode(name):
    model, x = numerics.small(name)
    new = numerics.twin_of(model)
    y = new(x)
    assert y.requires_grad
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            quiet = new(x)
            inside = new(x.clone())
        assert not quiet.requires_grad
        torch.testing.assert_close(quiet, y.detach())
        torch.testing.assert_close(inside, y.detach())


@every_name
def test_double_backward_is_refused(name):
    model, x = numerics.small(name)
    x.requires_grad_()
    (gradient,) = torch.autograd.grad(numerics.twin_of(model)(x).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="inline_kernels.*_backward.* no autograd formula"):
        torch.autograd.grad(gradient.sum(), x)


@every_name
def test_backward_twice(name):
    model, x = numerics.small(name)
    y = numerics.twin_of(model)(x)
    leaves, g = list(model.parameters()), torch.ones_like(y)
    first = torch.autograd.grad(y, leaves, g, retain_graph=True)
    assert all(torch.equal(a, b) for a, b in zip(first, torch.autograd.grad(y, leaves, g)))
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        torch.autograd.grad(y, leaves, g)


@every_name
def test_input_changed_before_backward_is_noticed(name):
    model, x = numerics.small(name)
    y = numerics.twin_of(model)(x)
    x.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


# ------------------------------------------------------------------------------------------------------- a well-behaved module


@every_variant
@every_name
def test_leaves_input_and_parameters_alone(name, variant, device):
    model, x = numerics.small(name, variant, device=device)
    new = numerics.twin_of(model, variant, x)
    before = [t.detach().clone() for t in (x, *new.parameters())]
    results(new.train(), x)
    with torch.no_grad():
        new.eval()(x)
    assert all(torch.equal(a, b) for a, b in zip(before, (x, *new.parameters())))


@every_device
@every_name
def test_outputs_share_no_memory(name, device):
    model, x = numerics.small(name, device=device)
    new = numerics.twin_of(model)
    tensors = [*results(new, x).values(), *results(new, x).values(), new(x).detach(), *new.parameters(), x]
    addresses = [t.untyped_storage().data_ptr() for t in tensors]
    assert len(set(addresses)) == len(addresses)


@every_variant
@every_name
def test_a_hundred_repeats_are_bitwise_equal(name, variant, device):
    model, x = numerics.small(name, variant, device=device)
    new = numerics.twin_of(model.train(), variant, x)
    with numerics.steady_library():
        answers = []
        for _ in range(100):
            torch.manual_seed(3)
            answers.append(results(new, x))
            numerics.assert_equal(answers[-1], answers[0])


@every_variant
@every_name
def test_new_weights_take_effect(name, variant, device):
    """In place, by .data, by load_state_dict, by another Parameter, by other constants."""
    model, x = numerics.small(name, variant, device=device)
    new, arguments = numerics.twin_of(model, variant, x), numerics.sizes_for(variant)[name][0]
    other = numerics.build(name, arguments, device=device, seed=7)
    new(x)
    with torch.no_grad():
        model.conv.weight.mul_(0.5)
    numerics.assert_module_follows_rule(new, model, x)
    for parameter, replacement in zip(new.parameters(), other.parameters()):
        parameter.data = replacement.data.clone()
    with numerics.steady_library():
        assert torch.equal(new(x), numerics.twin_of(other, variant)(x))
    new.load_state_dict(numerics.build(name, arguments, device=device, seed=9).state_dict())
    numerics.assert_module_follows_rule(new, model, x)
    new.conv.bias = nn.Parameter(torch.ones_like(model.conv.bias))
    model.conv.bias = new.conv.bias
    numerics.assert_module_follows_rule(new, model, x)
    for constant in ("constant_value", "clamp_max", "max_value"):
        if hasattr(model, constant):
            setattr(model, constant, -0.4)
            setattr(new, constant, -0.4)
            numerics.assert_module_follows_rule(new, model, x)


@every_device
@every_name
def test_shapes_may_change_between_calls(name, device):
    model, x = numerics.small(name, device=device)
    for part in (x, x[:1], x[..., 1:], x.repeat(2, *[1] * (x.dim() - 1)), x[..., 2:, :], x):
        numerics.assert_rule(model, part)


@every_name
def test_deepcopy_pickle_and_save(name):
    model, x = numerics.small(name)
    new = numerics.twin_of(model)
    buffer = io.BytesIO()
    torch.save(new, buffer)
    buffer.seek(0)
    for other in (
        copy.deepcopy(new),
        pickle.loads(pickle.dumps(new)),
        torch.load(buffer, weights_only=False),
    ):
        assert other.variant == "epilogue"
        assert torch.equal(other(x), new(x))
        assert not {id(p) for p in other.parameters()} & {id(p) for p in new.parameters()}


@every_name
def test_dtype_conversions_of_the_module(name):
    model, x = numerics.small(name)
    for convert in (nn.Module.double, nn.Module.half, nn.Module.bfloat16, nn.Module.float):
        new = convert(copy.deepcopy(numerics.twin_of(model)))
        dtype = new.conv.weight.dtype
        assert new(x.to(dtype)).dtype == dtype
        other, _ = numerics.small(name, dtype=dtype)
        assert torch.equal(new(x.to(dtype)), numerics.twin_of(other)(x.to(dtype)))


@every_name
def test_hooks(name):
    """Those of the model itself run around the kernels, those of a submodule make eager run."""
    model, x = numerics.small(name)
    new, calls = models.PROBLEMS[name].ModelNew.from_eager(model), []
    new.register_forward_hook(lambda module, args, out: calls.append("forward"))
    new.register_full_backward_hook(lambda module, *gradients: calls.append("backward"))
    assert new.plan(x).variant == "epilogue"
    new(x).sum().backward()
    assert calls == ["forward", "backward"]
    handle = new.conv.register_forward_hook(lambda module, args, out: out + 1)
    assert new.plan(x) == ("eager", "a submodule has hooks")
    assert torch.equal(new(x), model(x))  # the submodules are shared
    handle.remove()
    with nn.modules.module.register_module_forward_hook(
        lambda module, args, out: calls.append(type(module).__name__)
    ):
        new(x)
    assert "Conv2d" in calls or "Conv3d" in calls


@pytest.mark.parametrize(
    "parametrization", [nn.utils.parametrizations.weight_norm, nn.utils.parametrizations.spectral_norm]
)
@every_name
def test_parametrized_convolution(name, parametrization):
    """spectral_norm takes a step at each reading of the weight in training, so nobody else may read it."""
    model, x = numerics.small(name)
    parametrization(model.conv)
    model.train()
    if name == DROPOUT:
        model.dropout.eval()
    new = copy.deepcopy(models.PROBLEMS[name].ModelNew.from_eager(model))
    for _ in range(2):
        theirs, ours = results(model, x), results(new, x)
        for key in theirs:
            torch.testing.assert_close(ours[key], theirs[key], rtol=1e-4, atol=1e-4)


@every_name
def test_frozen_parts_learn_nothing(name):
    """A step of SGD on the model moves what requires a gradient and nothing else, and the loss falls as eager's does."""
    model, x = numerics.small(name)
    model.conv.requires_grad_(False)
    new = copy.deepcopy(numerics.twin_of(model))
    for module in (model, new):
        optimiser = torch.optim.SGD([p for p in module.parameters() if p.requires_grad], lr=0.1)
        for _ in range(2):
            optimiser.zero_grad()
            module(x).square().mean().backward()
            optimiser.step()
    for ours, theirs in zip(new.parameters(), model.parameters()):
        torch.testing.assert_close(ours, theirs)


# ------------------------------------------------------------------------------ 31 with channels enough for eager to run TF32

every_precision = pytest.mark.parametrize("allow_tf32", [True, False], ids=["TF32", "float32"])

# Constructor arguments, input shape, dtype, and whether wgmma convolves it on Hopper, where float32 operands need one part only.
MANY_CHANNELS = {
    "whole and part of a tile": (*numerics.WGMMA, torch.float32, True),
    "one output position": ((64, 128, 3, 0.1, (128, 1, 1), 2.0), (1, 64, 3, 3), torch.float32, True),
    "one whole tile": ((64, 128, 3, 0.1, (128, 1, 1), 2.0), (2, 64, 4, 130), torch.float32, True),
    "odd width": ((64, 128, 3, 0.1, (128, 1, 1), 2.0), (2, 64, 9, 141), torch.float32, True),
    "two channels more out": ((64, 130, 3, 0.1, (130, 1, 1), 2.0), (2, 64, 9, 140), torch.float32, True),
    "one channel more in": ((65, 128, 3, 0.1, (128, 1, 1), 2.0), (2, 65, 9, 140), torch.float32, False),
    "rectangular kernel": ((64, 128, (1, 4), 0.1, (128, 1, 1), 2.0), (2, 64, 5, 133), torch.float32, True),
    "filter of one column": ((64, 128, (3, 1), 0.1, (128, 1, 1), 2.0), (2, 64, 70, 66), torch.float32, False),
    "backward in channels last": (
        (64, 128, 3, 0.1, (128, 1, 1), 2.0),
        (1, 64, 515, 515),
        torch.float32,
        True,
    ),
    "one bias for all": ((64, 128, 3, 0.1, (1,), -2.0), (2, 64, 9, 140), torch.float32, True),
    "even width in half": ((64, 128, 3, 0.1, (128, 1, 1), 2.0), (2, 64, 9, 140), torch.float16, True),
    "odd width in half": ((64, 128, 3, 0.1, (128, 1, 1), 2.0), (2, 64, 9, 141), torch.float16, False),
    "even width in bfloat16": ((64, 130, 3, 0.1, (130, 1, 1), 2.0), (2, 64, 9, 262), torch.bfloat16, True),
}
every_many = pytest.mark.parametrize("reason", MANY_CHANNELS)


@contextlib.contextmanager
def watched_builds(reason, allow_tf32):
    """Within, TF32 is as given; afterwards, all fused kernels of 31 that were called for were of the right way for this GPU."""
    (*_, dtype, by_wgmma), load, built = MANY_CHANNELS[reason], fused._load, []
    with (
        pytest.MonkeyPatch.context() as patch,
        torch.backends.cudnn.flags(enabled=True, allow_tf32=allow_tf32),
    ):
        patch.setattr(
            fused,
            "_load",
            lambda name, **defines: (
                built.append((defines["SPLIT"], defines["WGMMA"])) or load(name, **defines)
            ),
        )
        yield
    split = dtype == torch.float32 and not (
        allow_tf32 and reason != "filter of one column"
    )  # which eager doesn't run in TF32
    assert set(built) == {(split, by_wgmma and not split and tiling.device_properties(0)[0] == (9, 0))}


@every_precision
@every_many
@pytest.mark.parametrize("capability", [(8, 0), (9, 0), (10, 0)], ids=str)
def test_way_with_many_channels(reason, allow_tf32, capability, monkeypatch):
    """On GPUs that are made up, whose kernels do nothing."""
    arguments, shape, dtype, _ = MANY_CHANNELS[reason]
    model, x = numerics.build(MIN_ADD, arguments, dtype=dtype), numerics.random_input(shape, dtype=dtype)
    monkeypatch.setattr(tiling, "device_properties", lambda index: (capability, *H200[1:]))
    monkeypatch.setattr(
        fused, "_load", lambda name, **defines: SimpleNamespace(forward=lambda *arguments: None)
    )
    with watched_builds(reason, allow_tf32):
        assert numerics.twin_of(model)._fused_obstacle(x) is None
        fused.conv2d_min_add_multiply(
            x, model.conv.weight, model.conv.bias, model.bias.flatten(), dtype, 0.1, 2.0
        )


SURE_SHAPE, SURE_WEIGHT = (4, 64, 130, 130), (128, 64, 3, 3)


@pytest.mark.parametrize("expected, shape, weight, dtype, capability, setting", [
    (True, SURE_SHAPE, SURE_WEIGHT, torch.float32, (8, 0), {}),
    (True, SURE_SHAPE, (130, 64, 1, 2), torch.float32, (9, 0), {}),
    (False, SURE_SHAPE, SURE_WEIGHT, torch.float32, (7, 5), {}),
    (False, SURE_SHAPE, SURE_WEIGHT, torch.float16, (9, 0), {}),
    (False, SURE_SHAPE, SURE_WEIGHT, torch.float32, (9, 0), {"allow_tf32": False}),
    (False, SURE_SHAPE, SURE_WEIGHT, torch.float32, (9, 0), {"enabled": False}),
    (False, (3, 64, 130, 130), SURE_WEIGHT, torch.float32, (9, 0), {}),
    (False, (4, 63, 130, 130), (128, 63, 3, 3), torch.float32, (9, 0), {}),
    (False, SURE_SHAPE, (127, 64, 3, 3), torch.float32, (9, 0), {}),
    *((False, SURE_SHAPE, (128, 64, *kernel), torch.float32, (9, 0), {}) for kernel in [(3, 1), (4, 3), (3, 4)]),
], ids=str)  # fmt: skip
def test_where_tf32_is_sure(expected, shape, weight, dtype, capability, setting, monkeypatch):
    """Only there may a result lose the digits that TF32 doesn't hold."""
    monkeypatch.setattr(tiling, "device_properties", lambda index: (capability, *H200[1:]))
    x, weight = (
        torch.empty(shape, dtype=dtype, device="meta"),
        torch.empty(weight, dtype=dtype, device="meta"),
    )
    with torch.backends.cudnn.flags(**{"enabled": True, **setting}):
        assert operators._surely_runs_tf32(x, weight) == expected
        assert fused._is_split(x, weight) <= (not expected)
        monkeypatch.setenv("NVIDIA_TF32_OVERRIDE", "0")
        assert not operators._surely_runs_tf32(x, weight) and fused._is_split(x, weight) == (
            dtype == torch.float32
        )


@pytest.mark.gpu
@every_precision
@every_many
def test_rule_with_many_channels(reason, allow_tf32):
    arguments, shape, dtype, _ = MANY_CHANNELS[reason]
    model, x = (
        numerics.build(MIN_ADD, arguments, device="cuda", dtype=dtype),
        numerics.random_input(shape, device="cuda", dtype=dtype),
    )
    with watched_builds(reason, allow_tf32):
        numerics.assert_rule(model, x, "fused")


@pytest.mark.gpu
@every_precision
@pytest.mark.parametrize("test, options", [
    *((test_layouts, {"layout": layout}) for layout in LAYOUTS),
    *((test_layouts_of_the_model, {"layout": layout}) for layout in ("storage offset 1", "channels last")),
    *((test_rule_with_a_large_mean, {"mean": mean}) for mean in (1e2, 1e4)),
    (test_rule_with_large_beside_small, {}),
    (test_leaves_input_and_parameters_alone, {}),
    (test_a_hundred_repeats_are_bitwise_equal, {}),
    (test_new_weights_take_effect, {}),
], ids=lambda value: value.__name__ if callable(value) else "".join(map(str, value.values())))  # fmt: skip
def test_again_with_many_channels(test, options, allow_tf32, monkeypatch):
    monkeypatch.setitem(numerics.FUSED, MIN_ADD, numerics.WGMMA)
    monkeypatch.setattr(numerics, "steady_library", functools.partial(numerics.steady_library, allow_tf32))
    with watched_builds("whole and part of a tile", allow_tf32):
        test(name=MIN_ADD, variant="fused", device="cuda", **options)


@pytest.mark.gpu
@every_precision
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_special_value_with_many_channels(value, allow_tf32):
    """It spoils what it spoils in float64; the other samples don't notice. (Forward alone: backward is the library's convolution, and
    its algorithms spread what is not finite.)"""
    arguments, shape = numerics.WGMMA
    model, x = numerics.build(MIN_ADD, arguments, device="cuda"), numerics.random_input(shape, device="cuda")
    new, spoilt = numerics.twin_of(model, "fused", x), x.clone()
    spoilt[1, 40, 5, 130] = value
    with watched_builds("whole and part of a tile", allow_tf32), torch.no_grad():
        ours, exact = new(spoilt), copy.deepcopy(model).cpu().double()(spoilt.cpu().double())
        kinds = [torch.where(t.isnan(), 2, t.sgn() * t.isinf()) for t in (ours.cpu().double(), exact)]
        assert torch.equal(*kinds) and kinds[0].any()
        assert torch.equal(ours[::2], new(x)[::2])
