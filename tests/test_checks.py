"""The judge is judged: mutants must fail their check, each for its reason, and what is right must pass.

Mutants are problems whose `ModelNew` does one thing wrong.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import re
from unittest import mock

import pytest
import torch
from torch import nn
from torch.overrides import TorchFunctionMode

import checks
import inline_loader
import models

MIN_ADD, INSTANCE_NORM, DROPOUT, POOL = models.PROBLEMS
SIZES = {
    MIN_ADD: ((4, 8, 3, 0.5, (8, 1, 1), 2.0), (2, 4, 12, 12)),
    INSTANCE_NORM: ((3, 8, 3, (8, 1, 1, 1), -1.0, 1.0), (2, 3, 5, 9, 9)),
    DROPOUT: ((3, 8, 3, 4, 0.0, 1.0, 0.2), (2, 3, 6, 12, 12)),
    POOL: ((4, 8, 3, 4, (8, 1, 1), 4, 0.0, 1.0), (2, 4, 17, 17)),
}


def small(name: str, forward=None):
    """The problem `name` at a small size; its ModelNew computes `forward(self, x, reference)`, or what eager does."""
    problem = models.PROBLEMS[name]
    reference = problem.Model

    class Mutant(models.Fused, reference):
        variants = ("eager", "epilogue")

        def plan(self, x):
            return models.Plan(self.variant, "a mutant")

        def forward(self, x):
            right = lambda x: reference.forward(self, x)  # noqa: E731
            return forward(self, x, right) if forward else right(x)

    arguments, shape = SIZES[name]
    return dataclasses.replace(
        problem, ModelNew=Mutant, init_inputs=arguments, input_shape=shape, cpu_batch_size=2
    )


@pytest.mark.parametrize("phase", checks.PHASES)
@pytest.mark.parametrize("name", models.PROBLEMS)
def test_eager_itself_passes(name, phase):
    result = checks.check(small(name), "epilogue", phase=phase, seed=1)
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


# Mutants: forward(self, x, right), where right(x) is the right result. `vars(self)` is what a module keeps between calls.


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
    return y * (1 + 6e-8 * torch.randn_like(y))


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
            "random parameters, mean of 4, output: error 1 ",
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
        (MIN_ADD, "forward", adds_noise, "run 2 of 100 on the same input gave other bits: output"),
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
    ],
)
def test_mutants_fail(name, phase, forward, complaint):
    result = checks.check(small(name, forward), "epilogue", phase=phase, seed=1)
    assert any(re.search(complaint, failure) for failure in result.failures), str(result)


@pytest.mark.parametrize("dtype, channels", [(torch.float32, 4), (torch.float16, 64)], ids=str)
@pytest.mark.parametrize("name", [MIN_ADD, INSTANCE_NORM, POOL])  # 83's result does not depend on them
def test_sums_in_half_are_found(name, dtype, channels):
    """In float16 only where they are long: a few roundings are within 4 units in the last place."""
    problem = small(name, sums_in_half)
    (_, *arguments), (N, _, *size) = problem.init_inputs, problem.input_shape
    problem = dataclasses.replace(
        problem, init_inputs=(channels, *arguments), input_shape=(N, channels, *size)
    )
    result = checks.check(problem, "epilogue", dtype=dtype, seed=1)
    assert any(re.search("mean of 4, output: error", failure) for failure in result.failures), str(result)


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
    result = checks.check(small(name, forward), "epilogue", seed=1)
    assert any(
        re.search("random parameters, mean of 4, output: error", failure) for failure in result.failures
    ), str(result)


@pytest.mark.parametrize(
    "phase, dtype",
    [("forward", torch.float16), ("forward", torch.bfloat16), ("train", torch.float16)],
    ids=str,
)
@pytest.mark.parametrize("name", models.PROBLEMS)
def test_another_dtype_is_found(name, phase, dtype):
    """Values alone don't show it: these are right, but float32."""
    result = checks.check(
        small(name, lambda self, x, right: right(x).float()), "epilogue", phase=phase, dtype=dtype, seed=1
    )
    assert f"random parameters: output is torch.float32, expected {dtype}" in result.complaints, str(result)


@pytest.mark.parametrize(
    "forward", [adds_noise, keeps_first_shape, keeps_first_stride, packs_bias_of_this_memory]
)
def test_only_honesty_finds_these(forward):
    """Their errors are within the rule."""
    result = checks.check(small(MIN_ADD, forward), "epilogue", seed=1)
    assert result.complaints and all(error.share <= 1 for error in result.errors), str(result)


def test_parameters_and_library_are_as_before():
    problem = small(POOL, adds_noise)
    model, x = checks._random_problem(problem, "cpu", 2, torch.float32)
    before, memory = (
        [p.detach().clone() for p in model.parameters()],
        [p.data_ptr() for p in model.parameters()],
    )
    assert list(checks.dishonesty(checks.contestant(problem, "epilogue", model.eval()), model, x, "train_dx"))
    assert all(map(torch.equal, before, model.parameters())) and memory == [
        p.data_ptr() for p in model.parameters()
    ]
    assert not torch.are_deterministic_algorithms_enabled() and not torch.backends.cudnn.deterministic


@pytest.mark.gpu
def test_a_launch_on_another_stream_is_found():
    def forward(self, x, right):
        with torch.cuda.stream(torch.cuda.default_stream()):
            return right(x)

    for phase in checks.PHASES:
        result = checks.check(small(MIN_ADD, forward), "epilogue", device="cuda", phase=phase, seed=1)
        found = [
            text for text in result.complaints if "does not wait for its stream: output of sample" in text
        ]
        assert found and not any("follow" in text for text in result.complaints), str(result)
    assert checks.check(small(MIN_ADD), "epilogue", device="cuda", phase="train_dx", seed=1).ok


@pytest.mark.gpu
def test_unwritten_memory_is_found_on_a_gpu():
    """By what the allocator holds, too: this mutant writes everything while PyTorch fills new tensors."""

    def forward(self, x, right):
        out = x.new_empty(len(x), self.conv.out_channels, *(size - 2 for size in x.shape[2:]))
        written = slice(None if torch.are_deterministic_algorithms_enabled() else -1)
        out.view(-1)[written] = right(x).view(-1)[written]
        return out

    result = checks.check(small(MIN_ADD, forward), "epilogue", device="cuda", seed=1)
    assert any("unwritten" in text for text in result.complaints), str(result)


@pytest.mark.gpu
def test_unwritten_shared_memory_is_found():
    source = """// What shared memory held, times zero.
    __global__ void leftover_kernel(float* y, int64_t n) {
      __shared__ volatile float left[256];
      const int64_t i = int64_t(blockIdx.x) * 256 + threadIdx.x;
      if (i < n) y[i] = 0 * left[threadIdx.x];
    }
    EXPORT void leftover(float* y, int64_t n, cudaStream_t stream) { leftover_kernel<<<(n + 255) / 256, 256, 0, stream>>>(y, n); }
    """

    def forward(self, x, right):
        y = x.new_empty(len(x), self.conv.out_channels, *(size - 2 for size in x.shape[2:]))
        inline_loader.load("leftover", source=source, device="cuda")(y, y.numel())
        return right(x) + y.nan_to_num() if torch.are_deterministic_algorithms_enabled() else right(x) + y

    result = checks.check(small(MIN_ADD, forward), "epilogue", device="cuda", seed=1)
    assert any("left parts of output unwritten" in text for text in result.complaints), str(result)


def test_zero_norms_follow_the_rule():
    """Where the reference and eager are exactly zero, nothing but zero passes."""
    assert checks.Error("", "", 0.0, 0.0, 0.0, 0.0, 0.0, 0.0).share == 0
    assert checks.Error("", "", 1e-30, 1e-30, 0.0, 0.0, 0.0, 0.0).share == math.inf
    assert checks.Error("", "", math.nan, 0.0, 1.0, 1.0, 1.0, 1.0).share == math.inf


def test_edges_mark_close_calls_but_not_ties():
    with checks._Edges(1e-3) as edges:
        x = torch.tensor([[0.5, 0.50001, 0.9]], dtype=torch.float64)
        torch.min(x, torch.tensor(0.5, dtype=torch.float64))
    assert edges.found.tolist() == [[False, True, False]]
    with checks._Edges(1e-3) as edges:
        x = torch.tensor([[[[1.0, 1.0, 3.0, 3.00001, 9.0], [0.0, 0.5, 1.0, 2.0, 9.0]]]], dtype=torch.float64)
        nn.functional.max_pool2d(x, 2)
    assert edges.found.tolist() == [[[[False, True]]]]
    with checks._Edges(1e-3) as edges:
        torch.clamp(x, 0.5, 9.00001).max(dim=2)
    assert edges.found.tolist() == [[[False, False, False, False, True]]]


def test_honesty_sends_no_gradient_to_close_calls():
    """Rounding decides there whether 83 passes one on at all: eager's may be the only one that is not zero, or ours."""
    arguments, shape = SIZES[DROPOUT]
    model, x = models.PROBLEMS[DROPOUT].Model(*arguments).eval(), torch.rand(shape)
    with torch.no_grad():
        z = nn.Sequential(model.conv, model.norm).double()(x.double())
    model.float().min_value = z[1, 2, 3, 4, 5].item() + 1e-9
    g = checks.Probe(model, model, x, "train_dx", None).on(x).g
    assert g[1, 2, 3, 4, 5] == 0 and (g == 0).float().mean() < 0.05 and g.dtype == x.dtype
