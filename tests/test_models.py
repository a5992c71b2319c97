"""The four models against their references: results, gradients, layouts, bad input, and what a drop-in module must bear.

What PyTorch does at the edges (NaN, ties, bounds) is in test_semantics.py, torch.compile and its like in test_ecosystem.py.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import math
from types import SimpleNamespace
from typing import NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import inline_loader
import models
import numerics
from inline_kernels.engine import library, tiling
from inline_kernels.engine.fuse import fuse
from inline_kernels.engine.part import Part
from numerics import (
    DROPOUT,
    DTYPES,
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
from test_emulated import folder  # noqa: F401
from test_planning_min_add import asked

# What tiling.device_properties would say of one.
H200 = tiling.Device((9, 0), 227 << 10, 132)

# --------------------------------------------------------------------------------------------------------- the error rule

every_size = pytest.mark.parametrize(
    "name, size, is_fused",
    [
        pytest.param(name, size, is_fused, id=f"{name}-{size.reason}")
        for name in NAMES
        for sizes, is_fused in (
            (known(name).awkward + known(name).tiles, True),
            (known(name).not_fused, False),
        )
        for size in sizes
    ],
)


# Beside float32; min-add and dropout are in bfloat16 under autocast (test_ecosystem.py).
ON_CPU = {
    MIN_ADD: [torch.float64, torch.float16],
    INSTANCE_NORM: [torch.bfloat16],
    DROPOUT: [torch.float16],
    POOL: [torch.float64, torch.float16],
}


# What a CPU is given in training alone: it builds each text by itself, and results are judged there, too.
def in_training(device: str) -> tuple[str, ...]:
    return numerics.BOTH if device == "cuda" else ("train_dx",)


@every_variant
@every_size
def test_rule_at_awkward_sizes(name, size, is_fused, variant, device):
    if size in known(name).tiles and variant != "fused":
        pytest.skip("a matter of the fused kernels' tiles, or that of another problem")
    if size in known(name).not_fused and "swapped" in size.reason and device == "cpu":
        pytest.skip("on a CPU as with more channels")
    model, x = numerics.sized(name, size, device=device)
    if variant in models.PROBLEMS[name].variants and is_fused:
        numerics.twin_of(model, variant).plan(x)  # raises where assert_rule would skip
    numerics.assert_rule(model, x, variant, in_training(device))


@every_size
def test_sizes_are_fused_or_not(name, size, is_fused, monkeypatch):
    """By what the fused kernels say for an H200."""
    monkeypatch.setattr(tiling, "device_properties", lambda index: H200)
    model, x = numerics.sized(name, size)
    monkeypatch.setattr(library, "device_type", lambda x: "cuda")
    if "fused" in models.PROBLEMS[name].variants:
        assert numerics.takes(model, x) == is_fused


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@every_name
def test_small_sizes_are_fused(name, dtype, monkeypatch):
    """Or the tests of that variant would all skip themselves on a GPU."""
    monkeypatch.setattr(tiling, "device_properties", lambda index: H200)
    model, x = numerics.small(name, "fused", dtype=dtype)
    monkeypatch.setattr(library, "device_type", lambda x: "cuda")
    assert numerics.takes(model, x) or "fused" not in models.PROBLEMS[name].variants


@every_variant
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@every_name
def test_rule_in_every_dtype(name, dtype, variant, device):
    if device == "cpu" and dtype not in (torch.float32, *ON_CPU.get(name, DTYPES)):
        pytest.skip("on a CPU in some dtypes, as each is built by itself")
    phases = numerics.BOTH if dtype == torch.float32 else in_training(device)
    numerics.assert_rule(*numerics.small(name, variant, device=device, dtype=dtype), variant, phases)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("size", [numerics.HELD, numerics.HELD_IN_SCRATCH], ids=lambda size: size.reason)
def test_rule_where_sums_are_held(size, dtype):
    numerics.assert_rule(*numerics.sized(INSTANCE_NORM, size, device="cuda", dtype=dtype), "fused")


@every_variant
@pytest.mark.parametrize("dtype", [torch.float16], ids=str)
def test_gradient_of_one_bias_for_all_is_rounded_once(dtype, variant, device):
    """Not channel by channel before these are summed up, which leaves no digit where they cancel."""
    size = numerics.Size((5, 20, 3, 0.1, (), 2.0), (3, 5, 11, 13), "a number as bias")
    model, x = numerics.sized(MIN_ADD, size, device=device, dtype=dtype)
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
    """Samples of 1e15, 1 and 1e-15: the squares still fit, and the smallest variance is far below eps. What sums no squares takes
    more, and shows the smallest sample where no bias hides it."""
    (model, x), row = numerics.small(name, variant, device=device), known(name)
    x *= torch.tensor([row.large, 1, 1 / row.large], device=device).view(-1, *[1] * (x.dim() - 1))
    with torch.no_grad():
        for key in row.hiding:
            model.get_parameter(key).zero_()
    numerics.assert_rule_by_sample(model, x, variant)


@every_variant
@pytest.mark.parametrize(
    "low, high", [(-math.inf, 0.5), (-0.5, math.inf), (-math.inf, math.inf), (1.0, -1.0)]
)
def test_instance_norm_with_open_and_swapped_bounds(low, high, variant, device):
    """With multipliers of zero and below: no product of one and a bound may become NaN."""
    model, x = numerics.small(INSTANCE_NORM, variant, device=device)
    model.clamp_min, model.clamp_max = low, high
    with torch.no_grad():
        model.multiplier[::3], model.multiplier[1] = 0, -1
    numerics.assert_rule(model, x, variant)


@every_variant
def test_instance_norm_of_values_whose_squares_overflow(variant, device):
    """They count where the multiplier is small."""
    model, x = numerics.small(INSTANCE_NORM, variant, device=device)
    with torch.no_grad():
        model.multiplier /= 2.0**63
    numerics.assert_rule(model, x * 2.0**63, variant)


@every_variant
@pytest.mark.parametrize("name, slope", [(name, slope) for name in NAMES for slope in known(name).slopes])
def test_rule_with_zero_and_negative_slopes(name, slope, variant, device):
    model, x = numerics.small(name, variant, device=device)
    with torch.no_grad():
        values = model.get_parameter(slope)
        values[0::3], values[1::3] = 0, -values[1::3].abs()
    numerics.assert_rule(model, x, variant)


@every_variant
@pytest.mark.parametrize(
    "dtype, training", [(torch.float32, True), (torch.float32, False), (torch.bfloat16, True)]
)
def test_rule_where_min_ties(dtype, training, variant, device):
    """Slope 0 and bias min_value: every element ties, which is the one way to a gradient. The other groups have none."""
    model, x = numerics.small(DROPOUT, variant, device=device, dtype=dtype)
    with torch.no_grad():
        model.norm.weight[3:6], model.norm.bias[3:6] = 0, model.min_value
    numerics.assert_rule(
        model.train(training), x, variant, numerics.BOTH if dtype == torch.float32 else in_training(device)
    )


@pytest.fixture
def forgotten():
    """What has been planned is planned again, in the test and after it."""
    inline_loader.forget()
    yield
    inline_loader.forget()


@pytest.mark.parametrize("name", numerics.KNOWN)
def test_rule_in_pieces(name, forgotten, monkeypatch):
    """Without gradients the CPU works a few samples at a time."""
    pieces, convolve = [], library.convolve
    monkeypatch.setattr(library, "CPU_PIECE_BYTES", 1)
    monkeypatch.setattr(
        library, "convolve", lambda how, x, weight: pieces.append(len(x)) or convolve(how, x, weight)
    )
    model, x = numerics.small(name)
    with torch.no_grad():
        numerics.twin_of(model)(x)
    assert sum(pieces) == 3 and max(pieces) <= 2
    numerics.assert_rule(model, x)


every_winograd = pytest.mark.parametrize("name", [name for name in NAMES if known(name).winograd])


@pytest.mark.parametrize("scale, shift", [(1, 0), (1, 1e4), (1e15, 0)])
@every_winograd
def test_rule_by_winograd(name, scale, shift):
    model, x = numerics.sized(name, known(name).winograd)
    assert "load::convolved" in numerics.twin_of(model).source(x)
    numerics.assert_rule(model, x * scale + shift)


@settings(max_examples=12)
@given(
    st.integers(1, 2),
    st.integers(8, 12),
    st.sampled_from([32, 64]),
    st.integers(18, 40),
    st.integers(18, 150),
)
def test_rule_by_winograd_at_random_sizes(N, Cin, C, H, W):
    """The pool's, which works by rows; test_operators.py has the others' convolution."""
    size = numerics.Size((Cin, C, 3, 4, (C, 1, 1), (2, 3), -0.5, 1.0), (N, Cin, H, W))
    numerics.assert_rule(*numerics.sized(POOL, size))


def test_rule_in_long_rows():
    """The pool works by rows of windows, and a row's statistics are sums of many values."""
    size = numerics.Size((4, 8, 3, 4, (8, 1, 1), 2, 0.0, 1.0), (1, 4, 6, 30000))
    numerics.assert_rule(*numerics.sized(POOL, size), phases=in_training("cpu"))


@pytest.mark.parametrize("scale, shift", [(1, 0), (1, 1e2), (1e15, 0)])
@pytest.mark.parametrize("size", [numerics.WINOGRAD_DX, numerics.WINOGRAD_MANY], ids=lambda size: size.reason)
def test_rule_where_winograd_gives_the_gradient_of_x(size, scale, shift):
    model, x = numerics.sized(MIN_ADD, size)
    numerics.assert_rule(model, x * scale + shift)


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_gradients_by_winograd_are_bitwise_equal(threads):
    """With as many threads, whatever else is asked for; samples are more than one part's."""
    model, x = numerics.sized(MIN_ADD, numerics.WINOGRAD_DX)
    new, before = numerics.twin_of(model), torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        first = results(new, x)
        for _ in range(20):
            numerics.assert_equal(results(new, x), first)
        alone = torch.autograd.grad(new(x).sum(), new.conv.weight)
        numerics.assert_equal({"conv.weight": alone[0]}, first)
    finally:
        torch.set_num_threads(before)


# Pool's backward without the convolution's output. Bounds of 9 let nearly all gradients pass.
WITHOUT_OUTPUT = [
    numerics.Size((8, 64, 3, 16, (64, 1, 1), 4, -9.0, 9.0), (1, 8, 38, 66), "one sample"),
    numerics.Size(
        (24, 64, 3, 8, (1,), (16, 9), -9.0, 9.0), (2, 24, 24, 21), "one scale, two windows, a low strip"
    ),
    numerics.Size(
        (9, 32, 3, 1, (32, 1, 1), (2, 2), -9.0, 9.0), (1, 9, 153, 700), "several blocks in a share"
    ),
    numerics.Size((16, 32, 3, 4, (32, 1, 1), (2, 2), 0.5, -0.5), (2, 16, 18, 18), "bounds swapped"),
]
without_output = pytest.mark.parametrize("size", WITHOUT_OUTPUT, ids=lambda size: size.reason)


@without_output
def test_rule_without_the_convolutions_output(size):
    model, x = numerics.sized(POOL, size)
    numerics.assert_rule(model, x, phases=in_training("cpu"))


@pytest.mark.parametrize("slope", known(POOL).slopes)
def test_rule_without_the_convolutions_output_with_odd_slopes(slope):
    model, x = numerics.sized(POOL, WITHOUT_OUTPUT[0])
    with torch.no_grad():
        model.get_parameter(slope)[0::3], model.get_parameter(slope)[1::3] = 0, -1.5
    numerics.assert_rule(model, x, phases=in_training("cpu"))


def test_rule_without_the_convolutions_output_where_samples_and_channels_differ():
    """Means and magnitudes; squares of the pixels overflow, those of the convolution's output don't."""
    model, x = numerics.sized(POOL, known(POOL).winograd)
    x *= torch.tensor([3e20, 1, 1e-3]).view(-1, 1, 1, 1)
    x[1] += 1e3 * torch.arange(9.0).view(-1, 1, 1)
    with torch.no_grad():
        model.conv.weight *= 1e-6
        x[:, 0], model.conv.weight[:, 0] = x[:, 0] * 1e10, model.conv.weight[:, 0] * 1e-10
    numerics.assert_rule_by_sample(model, x)


@pytest.mark.parametrize("name", [INSTANCE_NORM, DROPOUT, POOL])
def test_our_own_gradient_of_filters_gives_each_gradient_by_itself(name):
    """The same bits, whatever else is asked for, and with however many threads."""
    model, x = numerics.sized(name, known(name).winograd)
    numerics.give_gradients(model, x)
    twin, y = numerics.twin_of(model), model(x)
    g, threads = torch.randn_like(y), torch.get_num_threads()
    leaves = {"x": x.clone().requires_grad_(), **dict(twin.named_parameters())}

    def gradients(asked):
        for key, leaf in leaves.items():
            leaf.requires_grad_(key in asked)
        torch.manual_seed(1)
        found = torch.autograd.grad(twin(leaves["x"]), [leaves[key] for key in asked], g)
        return dict(zip(asked, found))

    every = gradients([*leaves])
    try:
        for count, asked in ((1, [*leaves]), (3, [*leaves]), *((2, [key]) for key in leaves)):
            torch.set_num_threads(count)
            for key, gradient in gradients(asked).items():
                assert torch.equal(gradient, every[key]), f"{key} with {count} threads"
    finally:
        torch.set_num_threads(threads)
        model.requires_grad_()


def test_rule_by_winograd_a_few_planes_at_a_time():
    """As many terms as it may have: the transformed planes of a piece don't fit in cache together."""
    size = numerics.Size((64, 8, (2, 3, 3), (8, 1, 1, 1), -1.0, 1.0), (1, 64, 8, 18, 18))
    model, x = numerics.sized(INSTANCE_NORM, size)
    assert "load::convolved" in numerics.twin_of(model).source(x)
    numerics.assert_rule(model, x)


# Whose filters' gradients are direct sums (kernels/cpu/direct_gradient.h).
DIRECT = [
    (INSTANCE_NORM, (3, 24, (2, 3, 3), (24, 1, 1, 1), -1.0, 1.0), (2, 3, 4, 20, 141)),
    (INSTANCE_NORM, (7, 16, 3, (1,), -0.5, 0.7), (3, 7, 5, 19, 22)),
    (DROPOUT, (1, 8, (1, 3, 3), 2, -0.3, 1.0, 0.2), (3, 1, 3, 18, 33)),
    (DROPOUT, (4, 24, 3, 4, -0.3, 1.0, 0.2), (1, 4, 4, 20, 30)),
]
every_direct = pytest.mark.parametrize("name, arguments, shape", DIRECT)


@every_direct
@pytest.mark.parametrize("scale, shift", [(1, 0), (1, 1e2), (1e15, 0)])
def test_rule_where_gradients_of_filters_are_direct_sums(name, arguments, shape, scale, shift):
    model, x = numerics.sized(name, numerics.Size(arguments, shape))
    numerics.ties(model, x)
    numerics.assert_rule(model, x * scale + shift)


@every_direct
def test_direct_sums_lose_no_digits_to_their_number(name, arguments, shape, monkeypatch):
    """Eager's are less exact by more than twice, and its library is not asked for them."""
    model, x = numerics.sized(name, numerics.Size(arguments, (8, *shape[1:])))
    numerics.ties(model, x)
    model.eval()
    twin, g = numerics.twin_of(model), torch.rand_like(model(x))
    exact = results(copy.deepcopy(model).double(), x.double(), g.double())["conv.weight"]
    theirs = results(model, x, g)["conv.weight"]
    monkeypatch.setattr(torch.ops.aten, "convolution_backward", None)
    (ours,) = torch.autograd.grad(twin(x), twin.conv.weight, g)
    assert (ours - exact).norm() < (theirs - exact).norm() / 2


def test_dropout_without_ties_has_no_gradients_to_compute(monkeypatch):
    """Where no element lets one pass, all are zero, x's in eager's layout; a value that is not finite makes them NaN as in eager."""
    model, x = numerics.sized(DROPOUT, known(DROPOUT).winograd)
    twin, x = numerics.twin_of(model), x.contiguous(memory_format=torch.channels_last_3d)
    found, expected = results(twin, x), results(model, x)
    assert found["x"].stride() == expected["x"].stride()
    for key in found.keys() - {"output"}:
        assert not found[key].any() and found[key].shape == expected[key].shape, key
    x[1, 0, 2, 3, 4] = math.inf
    numerics.assert_equal({k: v for k, v in results(twin, x).items() if k != "output"}, results(model, x))
    monkeypatch.setattr(torch.ops.aten, "convolution_backward", None)
    results(twin, x.nan_to_num(0, 0, 0))


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
    for count in (0, 1):
        assert problem.get_inputs(batch_size=count)[0].shape == (count, *problem.input_shape[1:])


def test_registry_without_arguments():
    """What KernelBench calls: the first problem at its full size, and each problem by itself."""
    (x,) = models.get_inputs()
    assert x.shape == (128, 64, 128, 128)
    assert models.get_init_inputs() == [64, 128, 3, 0.5, (128, 1, 1), 2.0]
    assert type(models.get_model()) is models.PROBLEMS[MIN_ADD].ModelNew
    assert [problem.number for problem in models.PROBLEMS.values()][:4] == [31, 79, 83, 85]


def test_registry_knows_classes_and_refuses_a_taken_name():
    problem = models.PROBLEMS[MIN_ADD]
    assert models.Conv2dMinAddMultiply is problem.Model and models.Conv2dMinAddMultiplyNew is problem.ModelNew
    with pytest.raises(AttributeError, match="no attribute 'Conv4d'"):
        _ = models.Conv4d
    assert models.register(problem) is problem, "again the same"
    with pytest.raises(ValueError, match=f"there is a problem named {MIN_ADD} already"):
        models.register(dataclasses.replace(problem, number=0))


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
def test_from_eager_takes_over(name):
    problem = models.PROBLEMS[name]
    model, x = numerics.small(name)
    new = problem.ModelNew.from_eager(model)
    assert type(new) is problem.ModelNew and not new.training and new.variant == "auto"
    assert all(a is b for a, b in zip(new.parameters(), model.parameters()))
    new.variant = "eager"
    numerics.assert_equal(results(new, x), results(model, x))
    new.train()
    assert not model.training, "the reference's own mode is its own"
    with pytest.raises(TypeError, match=f"expected a {problem.Model.__name__}, got a Linear"):
        problem.ModelNew.from_eager(nn.Linear(1, 1))


@every_name
def test_variant_and_plan(name):
    model, x = numerics.small(name)
    new = models.PROBLEMS[name].ModelNew.from_eager(model)
    plan = new.plan(x)
    assert plan.variant == "epilogue" and plan.reason
    assert [each.runs for each in fuse(model).plan(x)] == ["load"], "all of it is one segment"
    assert str(plan) == f"epilogue: {plan.reason}" and "\n" not in str(plan)
    assert models.PROBLEMS[name].variants_on("cpu") == ("eager", "epilogue")
    for variant in models.PROBLEMS[name].variants_on("cpu"):
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
def test_fused_is_for_a_gpu(name):
    """On a CPU it raises, before the first call and after one that ran."""
    model, x = numerics.small(name)
    new = models.PROBLEMS[name].ModelNew.from_eager(model)
    if "fused" not in models.PROBLEMS[name].variants:
        pytest.skip("there is no such variant")
    for _ in range(2):
        new.variant = "fused"
        for call in (new, new.plan):
            with pytest.raises(RuntimeError, match="variant 'fused' can't run: on a CPU the convolution"):
                call(x)
        new.variant = "auto"
        new(x)


@every_name
def test_kernels_run(name, monkeypatch):
    """Neither 'auto' nor a variant by name may hand x to eager."""
    model, x = numerics.small(name)
    monkeypatch.setattr(Part, "eager", lambda *_: pytest.fail("eager ran"))
    for variant in ("auto", "epilogue"):
        new = numerics.twin_of(model, variant)
        assert new.plan(x).variant == "epilogue"
        new(x)


# -------------------------------------------------------------------------------------------------------------- bad input


@pytest.mark.parametrize("variant", ["auto", "epilogue"])
@pytest.mark.parametrize(
    "name, size",
    [pytest.param(name, size, id=size.reason) for name in NAMES for size in known(name).raising],
)
def test_sizes_that_raise_as_eager(name, size, variant):
    model, x = numerics.sized(name, size)
    _assert_same_error(model, numerics.twin_of(model, variant), x)


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


@every_name
def test_an_input_without_memory(name):
    """Parameters have some: either eager's error, or its output, which has none either."""
    model, x = numerics.small(name)
    new, x = numerics.twin_of(model, "auto"), x.to("meta")
    try:
        theirs = model(x)
    except (ValueError, RuntimeError):
        _assert_same_error(model, new, x)
    else:
        ours = new(x)
        assert (ours.device, ours.shape, ours.dtype) == (theirs.device, theirs.shape, theirs.dtype)


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


# ---------------------------------------------------------------------------------------------------------------- layouts

LAYOUTS = {
    "sliced": lambda x: torch.stack([x, x + 9], dim=-1)[..., 0],
    "every second sample": lambda x: x.repeat_interleave(2, 0)[::2],
    "transposed": lambda x: x.transpose(-1, -2).contiguous().transpose(-1, -2),
    "expanded": lambda x: x[:1].expand_as(x),
    "storage offset 1": lambda x: torch.cat([x.new_zeros(1), x.flatten()])[1:].view_as(x),
    "flipped copy of a permuted view": lambda x: x.movedim(1, -1).contiguous().movedim(-1, 1).flip(0),
    "channels last": lambda x: x.to(memory_format=library.channels_last(x)),
    "one sample, channels last": lambda x: x[:1].contiguous(memory_format=library.channels_last(x)),
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


@every_variant
@pytest.mark.parametrize("layout", ["storage offset 1", "channels last"])
@every_name
def test_layouts_of_the_model(name, layout, variant, device):
    model, x = numerics.small(name, variant, device=device)
    with torch.no_grad():
        if layout == "channels last":
            model.conv.to(memory_format=library.channels_last(x))
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
    numerics.give_gradients(model, x)
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
    if device == "cpu" and dtype == torch.float16:
        dtype = next(each for each in ON_CPU.get(name, [dtype]) if each.itemsize == 2)
    model, x = numerics.small(name, device=device, dtype=dtype)
    numerics.give_gradients(model, x)
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
    new, arguments = numerics.twin_of(model, variant, x), numerics.size_of(name, variant).arguments
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
    for constant, value in vars(model).items():
        if type(value) is float:
            setattr(model, constant, -0.4)
            setattr(new, constant, -0.4)
            numerics.assert_module_follows_rule(new, model, x)


@every_device
@every_name
def test_shapes_may_change_between_calls(name, device):
    model, x = numerics.small(name, device=device)
    new = numerics.twin_of(model)
    for part in (x, x[:1], x[..., 1:], x.repeat(2, *[1] * (x.dim() - 1)), x[..., 2:, :], x):
        theirs, ours = results(model, part), results(new, part)
        for key, value in theirs.items():
            torch.testing.assert_close(ours[key], value, rtol=1e-3, atol=1e-3, msg=key)


# ----------------------------------------------------------------------- min-add with channels enough for eager to run TF32

every_precision = pytest.mark.parametrize("allow_tf32", [True, False], ids=["TF32", "float32"])


class Many(NamedTuple):
    """A size, its dtype, and whether on Hopper wgmma convolves it, where float32 operands need one part only."""

    size: numerics.Size
    dtype: torch.dtype
    by_wgmma: bool
    tf32: bool = True  # does eager run it so, where it may?

    def __str__(self):
        return self.size.reason


def many(
    shape: tuple, reason: str, *, C=128, kernel=3, bias=None, scale=2.0, dtype=torch.float32, **columns
) -> Many:
    arguments = (shape[1], C, kernel, 0.1, (C, 1, 1) if bias is None else bias, scale)
    return Many(numerics.Size(arguments, shape, reason), dtype, **{"by_wgmma": True, **columns})


MANY_CHANNELS = [
    Many(numerics.WGMMA, torch.float32, True),
    many((1, 64, 3, 3), "one output position"),
    many((2, 64, 4, 130), "one whole tile"),
    many((2, 64, 9, 141), "odd width"),
    many((2, 64, 9, 140), "two channels more out", C=130),
    many((2, 65, 9, 140), "one channel more in", by_wgmma=False),
    many((2, 64, 5, 133), "rectangular kernel", kernel=(1, 4)),
    many((2, 64, 70, 66), "filter of one column", kernel=(3, 1), by_wgmma=False, tf32=False),
    many((1, 64, 515, 515), "backward in channels last"),
    many((2, 64, 9, 140), "one bias for all", bias=(1,), scale=-2.0),
    many((2, 64, 9, 140), "even width in half", dtype=torch.float16),
    many((2, 64, 9, 141), "odd width in half", dtype=torch.float16, by_wgmma=False),
    many((2, 64, 9, 262), "even width in bfloat16", C=130, dtype=torch.bfloat16),
    many((16, 64, 30, 130), "consumers that share many rows", C=40, dtype=torch.float16),
]
every_many = pytest.mark.parametrize("many", MANY_CHANNELS, ids=str)


@pytest.fixture
def watched_builds(folder):  # noqa: F811
    @contextlib.contextmanager
    def watched(many, allow_tf32):
        """Within, TF32 is as given; afterwards, all of forward's kernels that were called for convolve the right way for this GPU: that
        the kernels say themselves, compiled for the same."""
        load, built = inline_loader.load, []

        def watch(name, *, defines, launchers=None, **options):
            if name == MIN_ADD and launchers in (["forward"], ["forward_saving"]):
                built.append(defines)
            return load(name, defines=defines, launchers=launchers, **options)

        inline_loader.forget()
        with (
            pytest.MonkeyPatch.context() as patch,
            torch.backends.cudnn.flags(enabled=True, allow_tf32=allow_tf32),
        ):
            patch.setattr(inline_loader, "load", watch)
            yield
            on_hopper = tiling.device_properties(0).capability == (9, 0)
        split = many.dtype == torch.float32 and not (allow_tf32 and many.tf32)
        ways = {(bool(each["SPLIT"]), bool(asked(each, folder).by_sm90(0))) for each in built}
        assert ways == {(split, many.by_wgmma and not split and on_hopper)}

    return watched


@pytest.fixture
def made_up(forgotten, monkeypatch):
    """made_up(capability) makes the CPU's tensors those of a GPU like an H200, but of that capability."""

    def make_up(capability):
        monkeypatch.setattr(library, "device_type", lambda x: "cuda")
        monkeypatch.setattr(tiling, "device_properties", lambda index: H200._replace(capability=capability))

    return make_up


@every_precision
@pytest.mark.parametrize(  # (10, 0): test_planning_min_add.py
    "many, capability", [(each, (9, 0)) for each in MANY_CHANNELS] + [(MANY_CHANNELS[0], (8, 0))], ids=str
)
def test_way_with_many_channels(many, allow_tf32, capability, made_up, watched_builds, monkeypatch):
    """On GPUs whose kernels do nothing."""
    model, x = numerics.sized(MIN_ADD, many.size, dtype=many.dtype)
    made_up(capability)
    launcher = SimpleNamespace(bound=lambda *numbers, **how: lambda *arguments: None)
    monkeypatch.setattr(
        inline_loader, "load", lambda *arguments, **options: SimpleNamespace(forward=launcher)
    )
    monkeypatch.setattr(inline_loader, "load_all", lambda requests: None)
    assert numerics.takes(model, x)
    with watched_builds(many, allow_tf32), torch.no_grad():
        numerics.twin_of(model, "fused")(x)


class Sure(NamedTuple):
    """A convolution, a GPU and a setting; does the library surely run TF32?"""

    shape: tuple = (4, 64, 130, 130)
    weight: tuple = (128, 64, 3, 3)
    dtype: torch.dtype = torch.float32
    capability: tuple = (9, 0)
    setting: dict = {}
    expected: bool = False


@pytest.mark.parametrize("sure", [
    Sure(capability=(8, 0), expected=True),
    Sure(weight=(130, 64, 1, 2), expected=True),
    Sure(capability=(7, 5)),
    Sure(dtype=torch.float16),
    Sure(setting={"allow_tf32": False}),
    Sure(setting={"enabled": False}),
    Sure(shape=(3, 64, 130, 130)),
    Sure(shape=(4, 63, 130, 130), weight=(128, 63, 3, 3)),
    Sure(weight=(127, 64, 3, 3)),
    *(Sure(weight=(128, 64, *kernel)) for kernel in [(3, 1), (4, 3), (3, 4)]),
], ids=str)  # fmt: skip
def test_where_tf32_is_sure(sure, made_up, monkeypatch):
    """Only there may a result lose the digits that TF32 doesn't hold."""
    made_up(sure.capability)
    x = torch.empty(sure.shape, dtype=sure.dtype, device="meta")
    weight = torch.empty(sure.weight, dtype=sure.dtype, device="meta")
    with torch.backends.cudnn.flags(**{"enabled": True, **sure.setting}):
        assert library.surely_runs_tf32(x, weight) == sure.expected
        assert library.eager_runs_tf32(x, weight) >= sure.expected
        monkeypatch.setenv("NVIDIA_TF32_OVERRIDE", "0")
        assert not library.surely_runs_tf32(x, weight) and not library.eager_runs_tf32(x, weight)


@pytest.mark.gpu
@every_precision
@every_many
def test_rule_with_many_channels(many, allow_tf32, watched_builds):
    model, x = numerics.sized(MIN_ADD, many.size, device="cuda", dtype=many.dtype)
    with watched_builds(many, allow_tf32):
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
def test_again_with_many_channels(test, options, allow_tf32, watched_builds, monkeypatch):
    row = dataclasses.replace(known(MIN_ADD), fused=numerics.WGMMA)
    monkeypatch.setitem(numerics.KNOWN, MIN_ADD, row)
    monkeypatch.setattr(numerics, "steady_library", functools.partial(numerics.steady_library, allow_tf32))
    with watched_builds(MANY_CHANNELS[0], allow_tf32):
        test(name=MIN_ADD, variant="fused", device="cuda", **options)


@pytest.mark.gpu
@every_precision
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_special_value_with_many_channels(value, allow_tf32, watched_builds):
    """It spoils what it spoils in float64; the other samples don't notice. (Forward alone: backward is the library's convolution, and
    its algorithms spread what is not finite.)"""
    model, x = numerics.sized(MIN_ADD, numerics.WGMMA, device="cuda")
    new, spoilt = numerics.twin_of(model, "fused", x), x.clone()
    spoilt[1, 40, 5, 130] = value
    with watched_builds(MANY_CHANNELS[0], allow_tf32), torch.no_grad():
        ours, exact = new(spoilt), copy.deepcopy(model).cpu().double()(spoilt.cpu().double())
        kinds = [torch.where(t.isnan(), 2, t.sgn() * t.isinf()) for t in (ours.cpu().double(), exact)]
        assert torch.equal(*kinds) and kinds[0].any()
        assert torch.equal(ours[::2], new(x)[::2])
