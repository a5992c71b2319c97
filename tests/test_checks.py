"""The judge is judged: mutants must fail their check, each for its reason, and what is right must pass.

Mutants are problems whose `ModelNew` does one thing wrong.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import itertools
import math
import re
from unittest import mock

import pytest
import torch
from torch import nn
from torch.overrides import TorchFunctionMode

import models
from inline_kernels.bench import checks, compare, honesty
from numerics import DROPOUT, INSTANCE_NORM, MIN_ADD, POOL, known

# Of other problems numerics.py knows one.
SIZES = {
    MIN_ADD: ((4, 8, 3, 0.5, (8, 1, 1), 2.0), (2, 4, 12, 12)),
    INSTANCE_NORM: ((3, 8, 3, (8, 1, 1, 1), -1.0, 1.0), (2, 3, 5, 9, 9)),
    DROPOUT: ((3, 8, 3, 4, 0.0, 1.0, 0.2), (2, 3, 6, 12, 12)),
    POOL: ((4, 8, 3, 4, (8, 1, 1), 4, 0.0, 1.0), (2, 4, 17, 17)),
}


@pytest.fixture(autouse=True)
def few_repeats(monkeypatch):
    """The judge's own number finds cheats in test_judge.py."""
    monkeypatch.setattr(honesty, "REPEATS", 10)


@dataclasses.dataclass
class Toy:
    """What a comparison needs of a problem."""

    name: str
    Model: type[nn.Module]
    ModelNew: type[nn.Module]
    init_inputs: tuple
    input_shape: tuple[int, ...]
    cases: tuple = ()
    timed_cases: tuple = ()
    number: int = 7
    cpu_batch_size: int = 2
    draw: object = torch.rand

    def get_init_inputs(self):
        return self.init_inputs

    def variants_on(self, device_type):
        return ("eager", "epilogue")

    def operations(self, model, x):
        return 0


def small(name: str, forward=None) -> Toy:
    """The problem `name` at a small size; its ModelNew computes `forward(self, x, reference)`, or what eager
    does."""
    problem = models.PROBLEMS[name]
    size = SIZES[name] if name in SIZES else known(name).small[:2]
    return toy(name, problem.Model, *size, forward, problem.cases, problem.timed_cases)


def toy(name, reference, arguments, shape, forward=None, cases=(), timed_cases=()) -> Toy:
    class Mutant(reference):
        @classmethod
        def from_eager(cls, model):
            mutant = cls.__new__(cls)
            mutant.__dict__.update(
                {k: copy.copy(v) if isinstance(v, dict) else v for k, v in vars(model).items()}
            )
            return mutant

        def plan(self, x):
            return f"{self.variant}: a mutant"

        def forward(self, x):
            right = lambda x: reference.forward(self, x)  # noqa: E731
            return forward(self, x, right) if forward else right(x)

    return Toy(name, reference, Mutant, arguments, shape, cases, timed_cases)


@pytest.mark.parametrize("phase", ["forward", "train_dx"])
@pytest.mark.parametrize("name", models.PROBLEMS)
def test_eager_itself_passes(name, phase):
    result = compare.check(small(name), "epilogue", phase=phase, seed=1, device="cpu")
    assert result.ok, str(result)
    assert "gradient of x" in [error.quantity for error in result.errors] or phase != "train_dx"


class _Off(torch.autograd.Function):
    """The same value; the gradient is multiplied by `factor`."""

    @staticmethod
    def forward(context, x, factor):
        context.factor = factor
        return x.clone()

    @staticmethod
    def backward(context, g):
        return g * context.factor, None


NOISE = torch.Generator()  # one of its own, which nobody sets back


# Mutants: forward(self, x, right), where right(x) is the right result. `vars(self)` is what a module keeps
# between calls.


def keeps_first_result(self, x, right):
    return vars(self).setdefault(x.shape, right(x))


def keeps_result_of_this_memory(self, x, right):
    """A cache that believes in addresses and version counters."""
    return vars(self).setdefault((x.data_ptr(), x._version, x.shape), right(x)).clone()


def packs_bias_once(self, x, right):
    return _min_add(self, x, vars(self).setdefault("packed", self.bias.detach().clone()))


def packs_bias_of_this_memory(self, x, right):
    return _min_add(
        self, x, vars(self).setdefault((self.bias.data_ptr(), self.bias._version), self.bias.detach().clone())
    )


def _min_add(self, x, bias):
    """With gradients of the right bias."""
    y = torch.min(self.conv(x), torch.tensor(self.constant_value)) + bias
    return (y + (self.bias.nan_to_num() - self.bias.detach().nan_to_num())) * self.scaling_factor


def packs_gradient_once(self, x, right):
    old = vars(self).setdefault("packed", self.scale.detach().clone())
    return _Off.apply(right(x), (old / self.scale.detach()).mean())


def ignores_last_sample(self, x, right):
    return torch.cat([right(x)[:-1], right(x)[:1]])


def repeats_last_row_but_one(self, x, right):
    y = right(x)
    return torch.cat([y[..., :-1, :], y[..., -2:-1, :]], dim=-2)


def rounds_to_tf32(self, x, right):
    return right((x.view(torch.int32) & ~0x1FFF).view(torch.float32))


def sums_in_half(self, x, right):
    """The convolution one product after the other, its sum a float16."""
    kernel = self.conv.kernel_size
    size = [extent - k + 1 for extent, k in zip(x.shape[2:], kernel)]

    def convolve(x):
        total = torch.zeros((), dtype=torch.float16)
        for channel, *tap in itertools.product(range(x.shape[1]), *map(range, kernel)):
            window = x[
                (
                    slice(None),
                    slice(channel, channel + 1),
                    *(slice(at, at + extent) for at, extent in zip(tap, size)),
                )
            ]
            total = total + (window * by_channel(self.conv.weight[(slice(None), channel, *tap)])).half()
        return total.to(x.dtype) + by_channel(self.conv.bias)

    def by_channel(values):
        return values.view(-1, *[1] * len(kernel))

    with mock.patch.object(self.conv, "forward", convolve):
        return right(x)


class _Without(TorchFunctionMode):
    """Leaves out the operations of this name: their first operand is the result."""

    def __init__(self, name):
        super().__init__()
        self.name = name

    def __torch_function__(self, func, types, args=(), kwargs=None):
        left_out = getattr(func, "__name__", "") == self.name
        return args[0] if left_out else func(*args, **(kwargs or {}))


def without(operation):
    def forward(self, x, right):
        with _Without(operation):
            return right(x)

    return forward


def without_parameter(name, neutral):
    """As if the whole parameter were `neutral`."""

    def forward(self, x, right):
        module, _, key = name.rpartition(".")
        parameters = self.get_submodule(module)._parameters
        with mock.patch.dict(parameters, {key: parameters[key] * 0 + neutral}):
            return right(x)

    return forward


def reuses_its_output(self, x, right):
    y = right(x)
    return vars(self).setdefault(y.shape, torch.empty_like(y)).copy_(y)


def returns_part_of_a_workspace(self, x, right):
    y = right(x)
    workspace = vars(self).setdefault("workspace", y.new_empty(64 * y.numel()))
    place = vars(self)["place"] = (vars(self).get("place", 0) + 1) % 32
    return workspace[place * y.numel() :][: y.numel()].view_as(y).copy_(y)


def keeps_first_shape(self, x, right):
    y = right(x)
    shape = vars(self).setdefault("shape", y.shape)
    out = y.new_zeros(shape)
    part = tuple(slice(min(size)) for size in zip(shape, y.shape))
    out[part] = y[part]
    return out


def keeps_first_stride(self, x, right):
    """Right for every batch size, wrong for other images."""
    width = vars(self).setdefault("width", x.shape[-2])
    y = right(x)
    return y if width == x.shape[-2] else y.roll(1, -1)


def adds_noise(self, x, right):
    y = right(x)
    return y * (1 + 6e-8 * torch.randn(y.shape, generator=NOISE))


def leaves_last_element(self, x, right):
    y = right(x)
    out = torch.empty_like(y)
    out.view(-1)[:-1] = y.view(-1)[:-1]
    return out


def sums_into_unwritten_memory(self, x, right):
    y = right(x)
    return y + torch.empty_like(y)[:1].clamp(0, 0)  # only memory full of zeros, or luck, gives the right sum


def writes_to_its_input(self, x, right):
    x.data.mul_(1.0000001)
    return right(x)


def writes_to_a_parameter(self, x, right):
    self.conv.bias.data.mul_(1.0000001)
    return right(x)


def constant_only(self, x, right):
    """The algebraic shortcut that public kernels for this problem have taken, unproved."""
    shape = (len(x), self.conv.out_channels, *(size - 2 for size in x.shape[2:]))
    return (
        self.dropout(torch.full(shape, float(self.min_value)))
        + 0 * sum(p.sum() for p in self.parameters())
        + 0 * x.sum() * 0
    )


def without_gradients_only(self, x, right):
    return right(x) * (1 + 1e-4 * torch.is_grad_enabled())


def no_nan(self, x, right):
    return right(x.nan_to_num())


def fixed_mask(self, x, right):
    with torch.random.fork_rng():
        torch.manual_seed(5)
        return right(x)


def wrong_share(self, x, right):
    self.dropout.p = 0.3
    try:
        return right(x) * (0.7 / 0.8)
    finally:
        self.dropout.p = 0.2


def not_rescaled(self, x, right):
    return right(x) * 0.8 if self.dropout.training else right(x)


@pytest.mark.parametrize(
    "name, phase, forward, complaint",
    [
        (
            MIN_ADD,
            "forward",
            lambda self, x, right: torch.zeros_like(right(x)),
            "random parameters, mean of (4|16), output: error 1 ",
        ),
        (
            MIN_ADD,
            "forward",
            lambda self, x, right: torch.zeros_like(right(x)),
            "follow another input: output of sample 0, 1",
        ),
        (MIN_ADD, "forward", lambda self, x, right: right(x) * (1 + 1e-5), "output: error 1e-05 "),
        (POOL, "forward", lambda self, x, right: right(x.half().float()), "output: error"),
        (POOL, "forward", rounds_to_tf32, "output: error"),
        (POOL, "train", lambda self, x, right: _Off.apply(right(x), 1.001), "gradient of scale"),
        (INSTANCE_NORM, "train_dx", lambda self, x, right: right(_Off.apply(x, 1.001)), "gradient of x"),
        (MIN_ADD, "forward", lambda self, x, right: right(x)[..., :-1], "expected the shape"),
        (MIN_ADD, "forward", repeats_last_row_but_one, r"output: error .* at \[\d, \d, 9, \d\]"),
        (MIN_ADD, "forward", keeps_first_result, "does not follow another input: output of sample 0, 1"),
        (MIN_ADD, "forward", keeps_first_result, "output of the next call shares memory with output"),
        (POOL, "forward", keeps_result_of_this_memory, "does not follow other values in its input's memory"),
        (MIN_ADD, "forward", packs_bias_once, "does not follow a change of bias: output of sample 0, 1"),
        (MIN_ADD, "train", packs_bias_once, "does not follow a change of bias: output of sample 0, 1"),
        (
            MIN_ADD,
            "forward",
            packs_bias_of_this_memory,
            "does not follow a change of bias: output of sample 0, 1",
        ),
        (POOL, "train", packs_gradient_once, "does not follow a change of scale: .*gradient of conv.weight"),
        (INSTANCE_NORM, "forward", ignores_last_sample, "does not follow another input: output of sample 1$"),
        (DROPOUT, "forward", ignores_last_sample, "does not pass NaN on as eager does: output of sample 1$"),
        (MIN_ADD, "forward", reuses_its_output, "the next call changed output"),
        (
            MIN_ADD,
            "forward",
            returns_part_of_a_workspace,
            "output of the next call shares memory with output",
        ),
        (
            MIN_ADD,
            "forward",
            keeps_first_shape,
            r"change of shape: output of shape \[2, 8, 10, 10\], expected \[1, 8, 9, 10\]",
        ),
        (
            INSTANCE_NORM,
            "forward",
            keeps_first_stride,
            "does not follow a change of shape: output of sample 0",
        ),
        (MIN_ADD, "forward", adds_noise, "run 2 of 10 on the same input gave other bits: output"),
        (MIN_ADD, "forward", leaves_last_element, r"left parts of output unwritten, first \[1, 7, 9, 9\]"),
        (MIN_ADD, "forward", sums_into_unwritten_memory, "left parts of output unwritten"),
        (MIN_ADD, "forward", writes_to_its_input, "changed its input"),
        (MIN_ADD, "train", writes_to_a_parameter, "changed conv.bias"),
        (POOL, "forward", no_nan, "does not pass NaN on as eager does: output of sample 0"),
        (DROPOUT, "forward", no_nan, "does not pass NaN on as eager does: output of sample 0"),
        (DROPOUT, "forward", constant_only, "does not pass NaN on as eager does: output of sample 0"),
        (DROPOUT, "train", constant_only, "ties, eval"),
        (DROPOUT, "forward", fixed_mask, "same elements"),
        (DROPOUT, "forward", wrong_share, "expected a share of 0.8"),
        (DROPOUT, "forward", not_rescaled, "ties, training"),
        (MIN_ADD, "forward_grad", lambda self, x, right: right(x).detach(), "the output needs no gradient"),
        (MIN_ADD, "forward_grad", keeps_first_result, "does not follow another input: output of sample 0, 1"),
        (POOL, "forward_grad", without_gradients_only, "output: error"),
        (INSTANCE_NORM, "forward_grad", no_nan, "does not pass NaN on as eager does"),
    ],
)
def test_mutants_fail(name, phase, forward, complaint):
    result = compare.check(small(name, forward), "epilogue", phase=phase, seed=1, device="cpu")
    assert any(re.search(complaint, failure) for failure in result.failures), str(result)


@pytest.mark.parametrize("dtype, channels", [(torch.float32, 4), (torch.float16, 64)], ids=str)
@pytest.mark.parametrize("name", [MIN_ADD, POOL])
def test_sums_in_half_are_found(name, dtype, channels):
    """In float16 only where they are long: a few roundings are within 4 units in the last place."""
    problem = small(name, sums_in_half)
    (_, *arguments), (N, _, *size) = problem.init_inputs, problem.input_shape
    problem = dataclasses.replace(
        problem, init_inputs=(channels, *arguments), input_shape=(N, channels, *size)
    )
    result = compare.check(problem, "epilogue", dtype=dtype, seed=1, device="cpu", phase="forward")
    assert any(re.search("mean of (4|16), output: error", failure) for failure in result.failures), str(
        result
    )


@pytest.mark.parametrize(
    "name, forward",
    [
        *[(MIN_ADD, without(operation)) for operation in ("min", "add", "mul")],
        *[(INSTANCE_NORM, without(operation)) for operation in ("mul", "instance_norm", "clamp")],
        *[(DROPOUT, without(operation)) for operation in ("min", "clamp")],
        *[(POOL, without(operation)) for operation in ("group_norm", "mul", "clamp")],
        (MIN_ADD, without_parameter("conv.bias", 0)),
        (MIN_ADD, without_parameter("bias", 0)),
        *[
            (POOL, without_parameter(*left_out))
            for left_out in (("conv.bias", 0), ("group_norm.bias", 0), ("group_norm.weight", 1), ("scale", 1))
        ],
    ],
)
def test_what_is_left_out_is_found(name, forward):
    result = compare.check(small(name, forward), "epilogue", seed=1, device="cpu", phase="forward")
    assert any(
        re.search("random parameters, mean of (4|16), output: error", failure) for failure in result.failures
    ), str(result)


@pytest.mark.parametrize(
    "phase, dtype",
    [("forward", torch.float16), ("forward", torch.bfloat16), ("train", torch.float16)],
    ids=str,
)
@pytest.mark.parametrize("name", models.PROBLEMS)
def test_another_dtype_is_found(name, phase, dtype):
    """Values alone don't show it: these are right, but float32."""
    result = compare.check(
        small(name, lambda self, x, right: right(x).float()),
        "epilogue",
        phase=phase,
        dtype=dtype,
        seed=1,
        device="cpu",
    )
    assert f"random parameters: output is torch.float32, expected {dtype}" in result.complaints, str(result)


@pytest.mark.parametrize(
    "forward", [adds_noise, keeps_first_shape, keeps_first_stride, packs_bias_of_this_memory]
)
def test_only_honesty_finds_these(forward):
    """Their errors are within the rule."""
    result = compare.check(small(MIN_ADD, forward), "epilogue", seed=1, device="cpu", phase="forward")
    assert result.complaints and all(error.share <= 1 for error in result.errors), str(result)


def test_zero_norms_follow_the_rule():
    """Where the reference and eager are exactly zero, nothing but zero passes."""
    assert checks.Error("", "", 0.0, 0.0, 0.0, 0.0, 0.0, 0.0).share == 0
    assert checks.Error("", "", 1e-30, 1e-30, 0.0, 0.0, 0.0, 0.0).share == math.inf
    assert checks.Error("", "", math.nan, 0.0, 1.0, 1.0, 1.0, 1.0).share == math.inf


# --------------------------------------------------------------------------------------------- luck and draws


def reordered(self, x, right):
    """Eager, its sums in another order: input channels backwards through another convolution, normalised
    upside down."""
    conv, flip = self.conv, lambda t: t.flip(-1, -2)
    function = nn.functional.conv2d if conv.weight.dim() == 4 else nn.functional.conv3d

    def convolve(x):
        with torch.backends.mkldnn.flags(enabled=False):
            return function(x.flip(1), conv.weight.flip(1), conv.bias)

    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(conv, "forward", convolve))
        for name in ("group_norm", "instance_norm"):
            norm = getattr(nn.functional, name)
            changed = lambda x, *others, norm=norm, **options: flip(norm(flip(x), *others, **options))  # noqa: E731
            stack.enter_context(mock.patch.object(nn.functional, name, changed))
        return right(x)


@pytest.mark.filterwarnings("ignore:TF32 acceleration")
@pytest.mark.parametrize(
    "name, shape",
    [
        (MIN_ADD, (1, 4, 4, 4)),
        (POOL, (1, 4, 6, 6)),
    ],
)
def test_eager_passes_with_its_sums_in_another_order(name, shape):
    """Though gradients cancel at such sizes, which makes eager's own error a matter of luck: 200 seeds."""
    problem = dataclasses.replace(small(name, reordered), input_shape=shape)
    contest = compare.contest_of(problem)
    prepare = problem.cases[0][1] if problem.cases else lambda model, x: None

    def errors(number, cancelling):
        model, inputs = contest.drawn(number, prepare)
        module = contest.twin("epilogue", model)
        return checks.errors_of("", module, model, inputs, "train_dx", cancelling=cancelling)[0]

    for seed in range(200):
        drawn = lambda number, cancelling, seed=seed: errors(100 * seed + number, cancelling)  # noqa: E731
        found = checks.judged_on_draws(drawn)
        assert all(error.share <= 1 for error in found), (seed, *map(str, found))


@pytest.mark.parametrize("name", [MIN_ADD, POOL])
def test_what_does_not_cancel_is_judged_as_ever(name):
    contest = compare.contest_of(small(name))
    model, inputs = contest.drawn(1)
    plain, cancelling = (
        [torch.manual_seed(2), checks.errors_of("", model, model, inputs, "train_dx", cancelling=c)[0]][1]
        for c in (False, True)
    )
    assert plain == cancelling and len(plain) >= 5


def test_what_cancels_is_judged_by_what_was_summed():
    """The gradient of a bias in front of a normalisation is zero: what is left is as large as rounding makes
    it, here or there."""
    contest, wider = compare.contest_of(small(INSTANCE_NORM)), []
    bias, weight = "gradient of conv.bias", "gradient of conv.weight"
    for number in range(1, 5):
        model, inputs = contest.drawn(number)
        limits = []
        for each in (False, True):
            torch.manual_seed(number)  # the same gradient of the result
            errors, _ = checks.errors_of("", model, model, inputs, "train", cancelling=each)
            limits.append({e.quantity: e for e in errors})
        plain, cancelling = limits
        assert plain[bias].eager_norm > 1e3 and cancelling[bias].eager_norm < 1e-5
        assert cancelling[weight].limit_norm < plain[weight].limit_norm * 1.5
        wider.append(cancelling[bias].limit_max / plain[bias].limit_max)
    assert max(wider) > 1.01, "where eager's own rounding was small"


def drawn(*errors_of_draws, limit=1.0):
    """judged_on_draws of one result with these errors."""
    made = [checks.Error("", "", e, e, limit / 2, limit / 2, limit, limit) for e in errors_of_draws]
    return checks.judged_on_draws(lambda number, cancelling: [made[number % len(made)]])[0]


def test_a_draw_may_be_lucky_for_eager_but_not_all():
    assert drawn(0.9).share <= 1
    assert drawn(3.0, 0.5, 0.2, 0.1).share <= 1 and drawn(1.1).share > 1
    assert drawn(*[1.1, 0.9, 1.2, 0.95] * 4).share > 1, "worse than twice on average"
    assert drawn(0.5, math.nan, 0.5, 0.5).share <= 1 < drawn(2.0, math.nan, 0.5, 0.5).share
    assert drawn(*[2.0] * 4, *[0.1] * 11, 100.0).share > 1, "one that is far off"
    assert drawn(*[2.0] * 4, *[0.1] * 12).share <= 1


def test_draws_count_alike():
    """The worst conditioned draw, a thousand times the others, does not decide alone; a draw twice as bad as
    allowed everywhere fails."""
    scales, luck = [1000.0] + [1.0] * 15, [1.6] + [0.7] * 15
    made = [checks.Error("", "", s * e, s * e, s / 2, s / 2, s, s) for s, e in zip(scales, luck)]
    plain, alike = checks.mean_of(made), checks.mean_of(made, alike=True)
    assert plain.share > 1 > alike.share
    worse = [e._replace(norm=1.05 * e.limit_norm, max=1.05 * e.limit_max) for e in made]
    assert checks.mean_of(worse, alike=True).share == pytest.approx(1.05)


# ------------------------------------------------------------------------------------------------ close calls


def marked(function, x, near=1e-3):
    with torch.no_grad(), checks.Edges(near) as edges:
        return edges.of(function(torch.tensor(x, dtype=torch.float64))).tolist()


def test_edges_mark_close_calls_but_not_ties():
    half = torch.tensor(0.5, dtype=torch.float64)
    assert marked(lambda x: torch.min(x, half), [[0.5, 0.50001, 0.9]]) == [[False, True, False]]
    x = [[[[1.0, 1.0, 3.0, 3.00001, 9.0], [0.0, 0.5, 1.0, 2.0, 9.0]]]]
    assert marked(lambda x: nn.functional.max_pool2d(x, 2), x) == [[[[False, True]]]]
    clamped = marked(lambda x: torch.clamp(x, 0.5, 9.00001).max(dim=2)[0], x)
    assert clamped == [[[False, False, False, False, True]]]


def test_what_the_dtype_decides_otherwise_than_float64_gets_no_gradient():
    model = nn.Sequential(nn.InstanceNorm1d(4), nn.ReLU())
    torch.manual_seed(0)
    x = 2e4 + torch.randn(8, 4, 4096)
    otherwise = (model(x) > 0) != (model(x.double()) > 0)
    g = checks.gradient_for(model, x, "train")
    assert otherwise.sum() > 1 and not g[otherwise].any() and (g != 0).sum() > 0.95 * g.numel()


@pytest.mark.parametrize(
    "function", [lambda x: x, lambda x: x.mean(1, keepdim=True).expand_as(x), lambda x: x.view(-1)]
)
def test_a_gradient_is_drawn_without_a_trace_in_the_input(function):
    class Of(nn.Module):
        def forward(self, x):
            return function(x)

    x = torch.randn(3, 4)
    before = x.clone()
    assert checks.gradient_for(Of(), x, "train_dx").shape == function(x).shape and torch.equal(x, before)


@pytest.mark.parametrize(
    "function, kink",
    [
        (nn.ReLU(), 0), (nn.ReLU(inplace=True), 0), (torch.Tensor.relu_, 0), (nn.LeakyReLU(), 0), (torch.abs, 0),
        (nn.ReLU6(), 0), (nn.ReLU6(), 6), (nn.Hardtanh(-2, 3), -2), (nn.Hardtanh(-2, 3), 3), (nn.Hardswish(), -3),
        (nn.Hardswish(), 3), (nn.Hardsigmoid(), -3), (nn.Hardsigmoid(), 3), (nn.Threshold(0.5, 7.0), 0.5),
        (lambda x: x.clamp(max=0.5), 0.5), (lambda x: torch.clamp_min(x, 0.5), 0.5), (lambda x: x.clip(-1, 0.5), 0.5),
        (lambda x: torch.maximum(x, torch.full_like(x, 0.5)), 0.5), (lambda x: x.minimum(torch.full_like(x, 0.5)), 0.5),
        (lambda x: torch.maximum(torch.full_like(x, 0.5), x), 0.5),
    ],
)  # fmt: skip
def test_edges_know_where_a_slope_jumps(function, kink):
    assert marked(function, [[kink - 1e-4, kink, kink + 1e-4, 17.0]]) == [[True, False, True, False]]


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x.amax(2), lambda x: x.max(2)[0], lambda x: torch.max(x, -1).values, lambda x: x.amax(dim=(2,)),
        lambda x: (-x).amin(2), lambda x: (-x).min(dim=2)[0], lambda x: x.amax(2, keepdim=True).flatten(1),
        lambda x: nn.functional.max_pool1d(x, 3).flatten(1), lambda x: nn.functional.adaptive_max_pool1d(x, 1).flatten(1),
    ],
)  # fmt: skip
def test_edges_know_a_runner_up(function):
    assert marked(function, [[[5.0, 2, 4.9999], [3, 3, 1], [2, 5, 1]]]) == [[True, False, False]]


@pytest.mark.parametrize("dims", [1, 2, 3])
@pytest.mark.parametrize(
    "options",
    [
        dict(kernel_size=2), dict(kernel_size=3, stride=2, padding=1), dict(kernel_size=2, stride=1, dilation=2),
        dict(kernel_size=3, stride=2, ceil_mode=True), dict(output_size=3), dict(output_size=2),
    ],
    ids=str,
)  # fmt: skip
def test_edges_see_the_windows_of_every_pool(dims, options):
    name = ("adaptive_" if "output_size" in options else "") + f"max_pool{dims}d"
    x = torch.randn(2, 3, *(7, 5, 6)[:dims], dtype=torch.float64)
    out = getattr(nn.functional, name)(x, **options)
    windows = checks._windows(name, x, out, (), {"kernel_size": None, **options})
    assert torch.equal(windows.amax(-1), out)
    if "kernel_size" in options:
        assert windows.shape[-1] == options["kernel_size"] ** dims
    near = windows.isfinite().sum(-1) > 1  # so far, every runner-up is near, but −inf
    expected = near if near.float().mean() <= 0.95 else torch.zeros_like(near)
    assert torch.equal(
        torch.tensor(marked(lambda x: getattr(nn.functional, name)(x, **options), x.tolist(), 10.0)), expected
    )


def test_marks_travel_with_what_sends_a_gradient_back():
    def blur(x):
        return nn.functional.conv1d(torch.relu(x), torch.ones(1, 1, 3, dtype=x.dtype))

    x = [[[1.0, 2, 3, 1e-5, 5, 6, 7, 8]]]
    assert marked(blur, x) == [[[False, True, True, True, False, False]]]
    assert marked(lambda x: torch.relu(x) * 0, x) == [[[False] * 8]]
    assert marked(lambda x: nn.functional.instance_norm(torch.relu(x)), x) == [[[False] * 8]], "all, so none"


# --------------------------------------------------------------------------------------------- other problems


class ConvReluHardswish(nn.Module):
    def __init__(self, in_channels, out_channels, kernel_size):
        super().__init__()
        self.conv = nn.Conv2d(in_channels, out_channels, kernel_size)

    def forward(self, x):
        return nn.functional.hardswish(torch.relu(self.conv(x)))


class ConvSigmoid(ConvReluHardswish):
    """Compares nothing."""

    def forward(self, x):
        return torch.sigmoid(self.conv(x))


@pytest.mark.parametrize("reference, phase", [
    (ConvReluHardswish, "forward"), (ConvSigmoid, "forward_grad"), (ConvSigmoid, "train"), (ConvReluHardswish, "train_dx"),
])  # fmt: skip
def test_another_problem_can_be_judged(reference, phase):
    problem = toy("another", reference, (4, 8, 3), (2, 4, 12, 12))
    result = compare.check(problem, "epilogue", phase=phase, seed=1, device="cpu")
    assert result.ok, str(result)
    wrong = toy("another", reference, (4, 8, 3), (2, 4, 12, 12), without_parameter("conv.bias", 0))
    assert not compare.check(wrong, "epilogue", phase=phase, seed=1, device="cpu").ok


def test_more_samples_than_a_piece(monkeypatch):
    """The reference may be taken apart only where samples don't meet."""
    monkeypatch.setattr(checks, "PIECE", 2)
    x = torch.randn(5, 3, 4, 4)
    for model in (nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)), nn.Conv2d(3, 4, 3)):
        found, complaints = checks.errors_of("", model, model, x, "train_dx")
        assert not complaints and all(error.norm < 1e-5 or error.max < 1e-5 for error in found), found
