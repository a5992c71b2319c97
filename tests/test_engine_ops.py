"""Each row of the table of operations, value and gradient, against torch in float64: on ordinary values, at ties, NaN, infinities, signed
zeros and large values. The input goes through an identity convolution, so that a call is captured as users write it."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from inline_kernels.engine import ops
from inline_kernels.engine.capture import capture
from inline_kernels.engine.scalars import SCALARS
from reference_graph import Reference

C = 4
INF, NAN = math.inf, math.nan
SPECIAL = [-INF, INF, NAN, 0.0, -0.0, 1e30, -1e30, 40.0, -40.0]
TIES = [-3.0, -2.0, -1.0, -0.5, 0.0, 0.5, 1.0, 2.0, 3.0, 6.0, 20.0]


class Tail(nn.Module):
    """A call behind a convolution that changes nothing. `p`: a parameter by channel; `s`: a number; `module`: one that the call uses."""

    def __init__(self, call, dimensions: int, module: nn.Module | None):
        super().__init__()
        convolution = nn.Conv2d if dimensions == 2 else nn.Conv3d
        self.conv = convolution(C, C, 1, bias=False, groups=C)
        nn.init.ones_(self.conv.weight)
        self.p = nn.Parameter(torch.randn(C, *[1] * dimensions))
        self.s = 0.7
        self.call, self.module, self.nothing = call, module, nn.Identity()

    def forward(self, x):
        v = self.conv(x)
        return self.call(v, self) if self.call else self.module(v) * 2.0


def _inplace(f):
    def call(v, m):
        w = v + 0.0
        f(w, m)
        return w

    return call


# By row of the table: calls (v, the module), or modules. Those of POINTWISE meet special values, too.
POINTWISE = {
    "add": [lambda v, m: v + 1.5, lambda v, m: m.p + v, lambda v, m: torch.add(v, m.p, alpha=2), lambda v, m: v.add(m.s), _inplace(lambda w, m: w.add_(m.p))],
    "sub": [lambda v, m: v - m.p, lambda v, m: 1.5 - v, lambda v, m: torch.sub(v, m.s, alpha=0.5), _inplace(lambda w, m: w.sub_(1.0))],
    "rsub": [lambda v, m: torch.rsub(v, m.s)],
    "mul": [lambda v, m: v * m.p, lambda v, m: 2.0 * v, lambda v, m: torch.multiply(v, v), lambda v, m: v * m.s, _inplace(lambda w, m: w.mul_(m.p))],
    "div": [lambda v, m: v / m.p, lambda v, m: 2.0 / v, lambda v, m: torch.div(v, 3.0), lambda v, m: v / m.s, _inplace(lambda w, m: w.div_(m.p))],
    "neg": [lambda v, m: -v, lambda v, m: torch.neg(v)],
    "square": [lambda v, m: torch.square(v), lambda v, m: v.square()],
    "pow": [lambda v, m: v**2, lambda v, m: torch.pow(v, 2), lambda v, m: v.pow(2.0)],
    "reciprocal": [lambda v, m: torch.reciprocal(v)],
    "relu": [lambda v, m: torch.relu(v), lambda v, m: F.relu(v, inplace=True), lambda v, m: v.relu(), nn.ReLU(), nn.ReLU(inplace=True), _inplace(lambda w, m: w.relu_())],
    "relu6": [lambda v, m: F.relu6(v), nn.ReLU6()],
    "leaky_relu": [lambda v, m: F.leaky_relu(v, 0.2), lambda v, m: F.leaky_relu(v, negative_slope=m.s), nn.LeakyReLU(0.1, inplace=True), lambda v, m: F.leaky_relu(v, -0.3)],
    "gelu": [lambda v, m: F.gelu(v), lambda v, m: F.gelu(v, approximate="tanh"), nn.GELU("tanh")],
    "silu": [lambda v, m: F.silu(v), nn.SiLU()],
    "mish": [lambda v, m: F.mish(v), nn.Mish()],
    "softplus": [lambda v, m: F.softplus(v), lambda v, m: F.softplus(v, beta=2, threshold=3), nn.Softplus(beta=0.5)],
    "sigmoid": [lambda v, m: torch.sigmoid(v), lambda v, m: v.sigmoid(), nn.Sigmoid()],
    "tanh": [lambda v, m: torch.tanh(v), lambda v, m: v.tanh(), nn.Tanh()],
    "hardswish": [lambda v, m: F.hardswish(v), nn.Hardswish()],
    "hardsigmoid": [lambda v, m: F.hardsigmoid(v), nn.Hardsigmoid()],
    "hardtanh": [lambda v, m: F.hardtanh(v), lambda v, m: F.hardtanh(v, -0.5, 2.0), nn.Hardtanh(-3.0, 3.0)],
    "elu": [lambda v, m: F.elu(v), nn.ELU(0.5)],
    "clamp": [lambda v, m: torch.clamp(v, -1.0, 1.0), lambda v, m: v.clamp(min=m.s), lambda v, m: torch.clip(v, max=0.5), lambda v, m: torch.clamp(v, 1.0, -1.0), lambda v, m: v.clamp(-m.s, 2.0)],
    "clamp_min": [lambda v, m: torch.clamp_min(v, 0.5), lambda v, m: v.clamp_min(m.s)],
    "clamp_max": [lambda v, m: torch.clamp_max(v, 0.5)],
    "maximum": [lambda v, m: torch.maximum(v, m.p), lambda v, m: torch.maximum(v, v * 2.0)],
    "minimum": [lambda v, m: torch.minimum(v, m.p), lambda v, m: v.minimum(torch.tensor(0.5))],
    "min": [lambda v, m: torch.min(v, torch.tensor(0.5)), lambda v, m: torch.min(v, torch.tensor(m.s, device=v.device)), lambda v, m: torch.min(m.p, v)],
    "max": [lambda v, m: torch.max(v, torch.tensor(0.5)), lambda v, m: v.max(m.p)],
    "exp": [lambda v, m: torch.exp(v)],
    "log": [lambda v, m: torch.log(v), lambda v, m: v.log()],
    "abs": [lambda v, m: torch.abs(v), lambda v, m: abs(v), lambda v, m: v.abs()],
    "sqrt": [lambda v, m: torch.sqrt(v)],
    "rsqrt": [lambda v, m: torch.rsqrt(v)],
    "identity": [lambda v, m: m.nothing(v) * 2.0],
    "contiguous": [lambda v, m: v.contiguous() + 1.0],
    "float": [lambda v, m: (v + 1.0).float().type(v.dtype)],
    "type": [
        lambda v, m: (v + 1.0).to(torch.float32).type(v.dtype),
        lambda v, m: F.relu(v).type(v.dtype) + 1.0,
        lambda v, m: v.to(v.dtype) * 2.0,
    ],
}  # fmt: skip
STRUCTURED = {
    "max": [lambda v, m: torch.max(v, dim=1)[0], lambda v, m: v.max(1, keepdim=True).values, lambda v, m: torch.max(v, 2)[0], lambda v, m: v.flatten(2).max(-1)[0]],
    "min": [lambda v, m: torch.min(v, dim=1, keepdim=True)[0], lambda v, m: v.min(dim=3)[0]],
    "amax": [lambda v, m: torch.amax(v, dim=(2, 3)), lambda v, m: v.amax(1, keepdim=True), lambda v, m: torch.amax(v, 2), lambda v, m: torch.amax(v, (1, 2, 3))],
    "amin": [lambda v, m: torch.amin(v, dim=(2, 3), keepdim=True), lambda v, m: v.amin(-1), lambda v, m: v.amin((1, 3), keepdim=True) * v],
    "sum": [lambda v, m: torch.sum(v, dim=[1, 2, 3]), lambda v, m: v.sum(1), lambda v, m: v.sum((2, 3), keepdim=True) * v, lambda v, m: v * v.sum(dim=2, keepdim=True)],
    "mean": [lambda v, m: torch.mean(v, dim=[2, 3]), lambda v, m: v.mean(1, keepdim=True) - v, lambda v, m: v.mean(-1), lambda v, m: v.mean((1, 2, 3), keepdim=True)],
    "logsumexp": [lambda v, m: torch.logsumexp(v, dim=1, keepdim=True), lambda v, m: v.logsumexp(2), lambda v, m: torch.logsumexp(v, dim=(2, 3))],
    "softmax": [lambda v, m: torch.softmax(v, dim=1), lambda v, m: F.softmax(v, dim=3), lambda v, m: v.flatten(2).softmax(-1), nn.Softmax(dim=1), lambda v, m: v.sum(1, keepdim=True).softmax(1)],
    "max_pool2d": [lambda v, m: F.max_pool2d(v, 2), lambda v, m: F.max_pool2d(v, (2, 3), stride=(2, 3)), nn.MaxPool2d(3), lambda v, m: F.max_pool2d(F.max_pool2d(v, 2), 2), nn.MaxPool2d(3, 2, 1), lambda v, m: F.max_pool2d(v, (2, 3), 1, (1, 0)), lambda v, m: F.max_pool2d(v, 1, 2) * 2.0],
    "avg_pool2d": [lambda v, m: F.avg_pool2d(v, 2), nn.AvgPool2d((3, 2)), nn.AvgPool2d(3, 1, 1), lambda v, m: F.avg_pool2d(v, (3, 2), (2, 1), count_include_pad=False)],
    "adaptive_avg_pool2d": [lambda v, m: F.adaptive_avg_pool2d(v, 1), nn.AdaptiveAvgPool2d((1, 1))],
    "adaptive_max_pool2d": [lambda v, m: F.adaptive_max_pool2d(v, 1), nn.AdaptiveMaxPool2d((1, 1))],
    "squeeze": [lambda v, m: v.sum(1, keepdim=True).squeeze(1), lambda v, m: torch.squeeze(v.mean((2, 3), keepdim=True), (2, 3))],
    "unsqueeze": [lambda v, m: v.mean(1).unsqueeze(1) * v],
    "flatten": [lambda v, m: torch.flatten(F.adaptive_avg_pool2d(v, 1), 1), lambda v, m: v.flatten(2) * 2.0, nn.Flatten(2)],
    "getitem": [lambda v, m: torch.max(v, 1)[0]],
    "getattr": [lambda v, m: torch.max(v, 1).values],
}  # fmt: skip
# Norms are sums: special values poison a group as a whole, which has a test of its own.
NORMS = {
    "group_norm": [lambda v, m: F.group_norm(v, 2), nn.GroupNorm(4, C), nn.GroupNorm(1, C, affine=False)],
    "instance_norm": [lambda v, m: F.instance_norm(v, eps=1e-3), nn.InstanceNorm2d(C), nn.InstanceNorm2d(C, affine=True)],
    "batch_norm": [lambda v, m: F.batch_norm(v, None, None, training=True), nn.BatchNorm2d(C), nn.BatchNorm2d(C, track_running_stats=False)],
    "layer_norm": [lambda v, m: F.layer_norm(v.permute(0, 2, 3, 1), (C,)).permute(0, 3, 1, 2)],
    "permute": [lambda v, m: torch.permute(v + m.p, (0, 2, 3, 1)).permute(0, 3, 1, 2)],
    "dropout": [lambda v, m: F.dropout(v, 0.0) * 2.0, lambda v, m: F.dropout(v, 0.5, training=False) * 2.0, lambda v, m: F.dropout(v, 1.0)],
    "other_dropout": [nn.Dropout2d(0.0)],
}  # fmt: skip
VOLUMES = {
    "max_pool3d": [lambda v, m: F.max_pool3d(v, 2), nn.MaxPool3d((1, 2, 2)), nn.MaxPool3d(3, 2, 1)],
    "avg_pool3d": [lambda v, m: F.avg_pool3d(v, 2), nn.AvgPool3d(2), nn.AvgPool3d((1, 2, 3), 1, (0, 1, 1))],
    "adaptive_avg_pool3d": [lambda v, m: F.adaptive_avg_pool3d(v, (1, 1, 1)), nn.AdaptiveAvgPool3d(1)],
    "adaptive_max_pool3d": [
        lambda v, m: F.adaptive_max_pool3d(torch.tanh(v), 1),
        nn.AdaptiveMaxPool3d((1, 1, 1)),
    ],
    "instance_norm": [nn.InstanceNorm3d(C)],
    "batch_norm": [nn.BatchNorm3d(C)],
    "min": [lambda v, m: torch.min(v, dim=2)[0]],
    "softmax": [lambda v, m: torch.softmax(v, dim=2)],
    "other_dropout": [nn.Dropout3d(0.0)],
}


def cases(table):
    return [
        pytest.param(call, id=f"{name}-{i}") for name, calls in table.items() for i, call in enumerate(calls)
    ]


def tail_of(call, dimensions: int = 2) -> Tail:
    module = call if isinstance(call, nn.Module) else None
    model = Tail(None if module else call, dimensions, module).double()
    for p in model.module.parameters() if module else ():
        nn.init.normal_(p)
    return model


def compare(model: nn.Module, x: torch.Tensor, rounding: float = 1e-9, at_nan: bool = True):
    """Value and gradients of x and of p, NaN for NaN, infinity for infinity. `at_nan`: the gradients there, too."""
    captured = capture(model, model.training, x.dim())
    assert len(captured.segments) == 1, captured.remarks
    calls = {node.op for node in captured.module.graph.nodes} - {"placeholder", "output"}
    assert calls == {"call_function"} and len(captured.module.graph.nodes) == 3, captured.segments[0].stopped
    found = []
    for run in (model, Reference(model, captured).run):
        given = x.clone().requires_grad_()
        model.zero_grad()
        y = run(given)
        torch.manual_seed(2)
        y.backward(torch.randn(y.shape, dtype=y.dtype))
        gradient = given.grad if at_nan else given.grad.nan_to_num() * ~x.isnan()
        found.append([y.detach(), gradient, *([] if model.p.grad is None else [model.p.grad])])
    for got, want in zip(found[1], found[0], strict=True):
        torch.testing.assert_close(got, want, rtol=rounding, atol=rounding, equal_nan=True)


# In float64, eager multiplies hardsigmoid's gradient by a float32 sixth.
ROUNDING = {"hardsigmoid": 5e-8, "float": 2e-7, "type": 2e-7}
# Eager lets NaN's gradient of these pass on a GPU and in the scalar rest of a CPU's vectors, and not in the vectors.
UNLIKE_ITSELF_AT_NAN = {"hardtanh", "relu6"}


@pytest.mark.parametrize("name, call", [(name, call) for name, calls in POINTWISE.items() for call in calls])
def test_pointwise(name, call):
    torch.manual_seed(0)
    model = tail_of(call)
    rounding, at_nan = ROUNDING.get(name, 1e-9), name not in UNLIKE_ITSELF_AT_NAN
    compare(model, torch.randn(2, C, 5, 7, dtype=torch.float64), rounding)
    with torch.no_grad():
        model.p.copy_(torch.tensor([0.5, -1.0, 2.0, 3.0]).reshape(C, 1, 1))
    for values in (TIES, SPECIAL):
        x = torch.tensor(values, dtype=torch.float64).expand(1, C, 1, -1).contiguous()
        compare(model, x, rounding, at_nan)
        _signs(model, x)


def _signs(model: nn.Module, x: torch.Tensor):
    """The values' zeros have eager's signs."""
    captured = capture(model, model.training, 4)
    want, got = model(x.clone()), Reference(model, captured).run(x.clone())
    zeros = want == 0
    assert torch.equal(torch.signbit(got)[zeros], torch.signbit(want)[zeros])


@pytest.mark.parametrize("call", cases(STRUCTURED))
def test_structured(call):
    torch.manual_seed(0)
    model = tail_of(call)
    compare(model, torch.randn(2, C, 7, 9, dtype=torch.float64))
    compare(model, torch.randint(-2, 3, (2, C, 7, 9)).double())
    x = torch.randn(2, C, 7, 9, dtype=torch.float64)
    x[0, 1, 2, 3], x[1, 2, 0, 0], x[0, 3, 4, 4] = INF, -INF, NAN
    compare(model, x)
    x[0, 1, 2, 2] = x[1, 1, 2, 3] = NAN
    compare(model, x)


@pytest.mark.parametrize("call", cases(NORMS))
@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
def test_norms_and_what_moves_nothing(call, training):
    torch.manual_seed(0)
    model = tail_of(call).train(training)
    for mean in (0.0, 1e3):
        compare(model, torch.randn(3, C, 5, 7, dtype=torch.float64) + mean)


@pytest.mark.parametrize("call", cases(VOLUMES))
def test_volumes(call):
    torch.manual_seed(0)
    model = tail_of(call, 3)
    compare(model, torch.randn(2, C, 4, 5, 6, dtype=torch.float64))
    compare(model, torch.randint(-2, 3, (2, C, 4, 5, 6)).double())


def test_a_nan_poisons_its_group_alone():
    model = tail_of(nn.GroupNorm(2, C))
    x = torch.randn(2, C, 3, 3, dtype=torch.float64)
    x[0, 1, 0, 0] = NAN
    y = Reference(model, capture(model, True, 4)).run(x)
    assert y[0, :2].isnan().all() and not y[0, 2:].isnan().any() and not y[1].isnan().any()


def test_each_row_and_module_is_tested():
    tables = (POINTWISE, STRUCTURED, NORMS, VOLUMES)
    assert {name for table in tables for name in table} == set(ops.ROWS)
    modules = {
        type(call)
        for table in tables
        for calls in table.values()
        for call in calls
        if isinstance(call, nn.Module)
    }
    assert set(ops.MODULES) - {nn.Dropout, nn.LayerNorm} == modules


REFUSED = {
    "another type": lambda v, m: v.to(torch.float16),
    "copy": lambda v, m: v.to(torch.float32, copy=True),
    "rounding_mode": lambda v, m: torch.div(v, 2.0, rounding_mode="floor"),
    "power": lambda v, m: v**3,
    "bound": lambda v, m: torch.clamp(v, min=m.p),
    "over samples": lambda v, m: v.sum(0),
    "all axes": lambda v, m: v.max(),
    "shape": lambda v, m: v + m.conv.weight.flatten(),
    "dilated": lambda v, m: F.max_pool2d(v, 2, dilation=2),
    "count_include_pad": lambda v, m: F.avg_pool2d(v, 3, 2, 1, count_include_pad=False),
    "meet": lambda v, m: v + F.max_pool2d(v, 3, 1, 1),
    "ceil_mode": lambda v, m: F.avg_pool2d(v, 2, ceil_mode=True),
    "adaptive pool": lambda v, m: F.adaptive_avg_pool2d(v, 3),
    "squeeze without dim": lambda v, m: v.squeeze(),
    "channels and positions together": lambda v, m: v.flatten(1),
    "there are no kernels for": lambda v, m: torch.erf(v),
    "dtype": lambda v, m: torch.softmax(v, 1, dtype=torch.float32),
    "used later": _inplace(lambda w, m: (w * 2.0, w.add_(1.0), w.mul_(w * 2.0))),
}  # fmt: skip


@pytest.mark.parametrize("reason", REFUSED)
def test_what_isn_t_served_says_why(reason):
    def call(v, m):
        return REFUSED[reason](torch.relu(v), m)

    if reason == "used later":

        def call(v, m):  # noqa: F811
            w = torch.relu(v)
            u = w + 1.0
            w.mul_(2.0)
            return torch.erf(u) + w

    (segment,) = capture(tail_of(call), True, 4).segments
    assert reason in segment.stopped or reason == "used later", segment.stopped


def test_scalars_have_what_they_need():
    for name, scalar in SCALARS.items():
        differentiable = scalar.derivative or scalar.boolean or name.endswith("_gradient")
        assert differentiable or name in ("narrow", "of_values", "of_results", "rest"), name
