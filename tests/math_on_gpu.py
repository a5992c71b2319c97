"""The functions of kernels/core/math.h against float64, in units in the last place: what the tests of the CPU and of the GPU's text
share, and as a program the same on a GPU:

    python tests/math_on_gpu.py        # a table: function, worst error, eager's worst error, where
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
from torch import Tensor
from torch.nn import functional as F

BETA, THRESHOLD, ALPHA = 1.75, 5.0, 0.75  # exact in float


class Function(NamedTuple):
    """exact: float64 -> float64, to about float64's accuracy. A derivative's eager is autograd's of `eager`."""

    eager: Callable[[Tensor], Tensor]
    exact: Callable[[Tensor], Tensor]
    gradient: Callable[[Tensor], Tensor] | None = None
    parameters: tuple[float, ...] = ()


def _normal(x):  # the normal distribution's integral
    return 0.5 * torch.erfc(-x * math.sqrt(0.5))


def _power(x):  # of the mish formulas: beyond, they are 1
    return x.clamp(max=40).exp()


def _mish(x):
    n = _power(x) * (_power(x) + 2)
    return x * (n / (n + 2))


def _mish_gradient(x):
    e = _power(x)
    n = e * (e + 2)
    return n / (n + 2) + x * torch.where(x < 40, 4 * e * (e + 1) / (n + 2) ** 2, 0.0)


def _both(x):
    """sigmoid(x), and 1 - sigmoid(x) without cancellation."""
    return x.sigmoid(), (-x).sigmoid()


def _silu_gradient(x):
    s, rest = _both(x)
    return s * (1 + x * rest)


def _softplus(x, beta=1.0, threshold=20.0):
    z = x * beta
    return torch.where(z > threshold, x, (z.clamp(min=0) + torch.log1p((-z.abs()).exp())) / beta)


def _softplus_gradient(x, beta=1.0, threshold=20.0):
    return torch.where(x * beta > threshold, 1.0, (x * beta).sigmoid())


CUBIC, FACTOR = 0.044715, 2 * math.sqrt(2 / math.pi)


def _gelu_tanh_gradient(x):
    s, rest = _both(FACTOR * (x + CUBIC * x**3))
    return s + x * (s * rest) * FACTOR * (1 + 3 * CUBIC * x * x)


def _hardswish_gradient(x):
    return torch.where(x <= -3, 0.0, torch.where(x < 3, x / 3 + 0.5, 1.0))


FUNCTIONS = {
    "exp": Function(torch.exp, torch.exp, torch.exp),
    "exp2": Function(torch.exp2, torch.exp2, lambda x: torch.exp2(x) * math.log(2)),
    "log": Function(torch.log, torch.log, lambda x: 1 / x),
    "log1p": Function(torch.log1p, torch.log1p, lambda x: 1 / (1 + x)),
    "expm1": Function(torch.expm1, torch.expm1, torch.exp),
    "tanh": Function(torch.tanh, torch.tanh, lambda x: torch.cosh(x.clamp(-300, 300)) ** -2),
    "sigmoid": Function(torch.sigmoid, torch.sigmoid, lambda x: math.prod(_both(x))),
    "silu": Function(F.silu, lambda x: x * x.sigmoid(), _silu_gradient),
    "mish": Function(F.mish, _mish, _mish_gradient),
    "softplus": Function(F.softplus, _softplus, _softplus_gradient, (1.0, 20.0)),
    "softplus with beta": Function(
        lambda x: F.softplus(x, BETA, THRESHOLD),
        lambda x: _softplus(x, BETA, THRESHOLD),
        lambda x: _softplus_gradient(x, BETA, THRESHOLD),
        (BETA, THRESHOLD),
    ),
    "erf": Function(torch.erf, torch.erf, lambda x: 2 / math.sqrt(math.pi) * (-x * x).exp()),
    "gelu": Function(
        F.gelu,
        lambda x: x * _normal(x),
        lambda x: _normal(x) + x * (-x * x / 2).exp() / math.sqrt(2 * math.pi),
    ),
    "gelu_tanh": Function(
        lambda x: F.gelu(x, approximate="tanh"),
        lambda x: x * (FACTOR * (x + CUBIC * x**3)).sigmoid(),
        _gelu_tanh_gradient,
    ),
    "hardswish": Function(F.hardswish, lambda x: x * (x + 3).clamp(0, 6) / 6, _hardswish_gradient),
    "hardsigmoid": Function(
        F.hardsigmoid, lambda x: (x + 3).clamp(0, 6) / 6, lambda x: (x.abs() < 3) * x.new_tensor(1 / 6)
    ),
    "elu": Function(
        lambda x: F.elu(x, ALPHA),
        lambda x: torch.where(x > 0, x, ALPHA * torch.expm1(x)),
        lambda x: torch.where(x <= 0, ALPHA * torch.exp(x), 1.0),
        (ALPHA,),
    ),
    "sqrt": Function(torch.sqrt, torch.sqrt, lambda x: 0.5 / x.sqrt()),
    "rsqrt": Function(torch.rsqrt, torch.rsqrt, lambda x: -0.5 * x**-1.5),
    "relu": Function(torch.relu, torch.relu),
    "abs": Function(torch.abs, torch.abs),
}
NAMES = [*FUNCTIONS, *[f"{name} gradient" for name, function in FUNCTIONS.items() if function.gradient]]


def launcher_of(name: str) -> str:
    return f"of_{name.replace(' ', '_')}"


def launchers(gpu: bool, scalar: bool = False, element: str = "float") -> str:
    """A source in which every function is a launcher (y, x, count): a thread an element, lanes, or one value after the other."""
    texts = ['#include "core/math.h"\n']
    if not gpu:
        texts += [f"typedef {element} Lanes __attribute__((vector_size(64), may_alias));\n"]
    for name in NAMES:
        call = f"math::{name.replace(' with beta', '').replace(' ', '_')}"
        numbers = "".join(f", {number}" for number in FUNCTIONS[name.removesuffix(" gradient")].parameters)
        label = launcher_of(name)
        if gpu:
            texts += [
                f"__global__ void {label}_kernel(float* y, const float* x, int64_t count) {{\n"
                "  const int64_t i = blockIdx.x * int64_t(blockDim.x) + threadIdx.x;\n"
                f"  if (i < count) y[i] = {call}(x[i]{numbers});\n}}\n"
                f"EXPORT void {label}(float* y, const float* x, int64_t count, cudaStream_t stream) {{\n"
                f"  {label}_kernel<<<unsigned((count + 255) / 256), 256, 0, stream>>>(y, x, count);\n}}\n"
            ]
        else:
            kind = element if scalar else "Lanes"
            texts += [
                f"EXPORT void {label}({element}* y, const {element}* x, int64_t count) {{\n"
                f"  for (int64_t i = 0; i < count; i += sizeof({kind}) / sizeof({element})) {{\n"
                f"    {kind} v;\n    __builtin_memcpy(&v, x + i, sizeof v);\n    v = {call}(v{numbers});\n"
                "    __builtin_memcpy(y + i, &v, sizeof v);\n  }\n}\n"
            ]
    return "".join(texts)


def arguments() -> Tensor:
    """float32: of every exponent and sign some in equal steps and some at random, more where functions bend, and what is special."""
    exponents = torch.arange(256).repeat_interleave(96)
    mantissas = torch.cat(
        [torch.arange(0, 2**23, 2**17).repeat(256).view(256, 64), torch.randint(2**23, (256, 32))], 1
    )
    bits = (exponents << 23) + mantissas.flatten()
    every = torch.cat([bits, bits + 2**31]).to(torch.uint32).view(torch.float32)
    near = torch.cat([torch.linspace(-limit, limit, 2**15) for limit in (0.7, 5, 20, 110)])
    special = [
        0.0,
        -0.0,
        math.inf,
        -math.inf,
        math.nan,
        1,
        -1,
        3,
        -3,
        6,
        20,
        -20,
        0.5,
        THRESHOLD / BETA,
        1e-45,
        -1e-45,
    ]
    x = torch.cat([every[every.isfinite()], near, torch.randn(2**15), torch.tensor(special)])
    return x[: len(x) // 16 * 16]


def exact(name: str, x: Tensor) -> Tensor:
    function = FUNCTIONS[name.removesuffix(" gradient")]
    return (function.gradient if name.endswith("gradient") else function.exact)(x.double())


def eager(name: str, x: Tensor) -> Tensor:
    function = FUNCTIONS[name.removesuffix(" gradient")].eager
    if not name.endswith("gradient"):
        return function(x)
    x = x.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(function(x).sum(), x)
    return gradient


def units(truth: Tensor) -> Tensor:
    """The unit in the last place of a float32."""
    return torch.pow(2.0, (torch.frexp(truth.abs().clamp(2.0**-126, 2.0**127))[1] - 24).double())


def errors(y: Tensor, truth: Tensor) -> Tensor:
    """In such units; beyond the largest number both are infinite. 0 where the truth isn't finite."""
    largest = torch.finfo(torch.float32).max
    error = (y.double().clamp(-largest, largest) - truth.clamp(-largest, largest)).abs() / units(truth)
    return torch.where(truth.isfinite(), error.nan_to_num(nan=math.inf), 0.0)


class Verdict(NamedTuple):
    """In units in the last place, where the rule is nearest to being broken: at x = `at`."""

    error: float
    allowed: float
    eager: float  # eager's worst in the binade
    at: float
    beyond: list[tuple[float, float, float]]  # (x, error, bound) where the rule is broken, the worst first
    special: list[
        tuple[float, float, float]
    ]  # (x, result, eager's) where one isn't finite and the other another


BOUND = 4.0  # units, or twice eager's worst in the same binade
# Derivatives with a zero where terms cancel: twice eager's worst absolute error in the binade will do.
CROSSING = {f"{name} gradient" for name in ("silu", "mish", "gelu", "gelu_tanh", "hardswish")}


def judge(name: str, x: Tensor, y: Tensor, of_eager: Tensor, bound: float = BOUND) -> Verdict:
    """All on the CPU. Binades are those of x, by sign."""
    truth = exact(name, x)
    ours, theirs = errors(y, truth), errors(of_eager, truth)
    binade = torch.frexp(x.nan_to_num(0, 0, 0))[1].long() + 200 + 400 * x.signbit()
    worst = torch.zeros(800, dtype=torch.float64).scatter_reduce(0, binade, theirs, "amax")
    bound = (2 * worst).clamp(min=BOUND)[binade] * (bound / BOUND)
    if name in CROSSING:
        unit = units(truth)
        largest = torch.zeros(800, dtype=torch.float64).scatter_reduce(0, binade, theirs * unit, "amax")
        bound = torch.maximum(bound, 2 * largest[binade] / unit)
    broken = (ours > bound).nonzero().flatten()
    broken = broken[ours[broken].argsort(descending=True)]
    # what is not finite, or wasn't to be
    odd = ~(y.isfinite() & of_eager.isfinite()) & ~((y == of_eager) | (y.isnan() & of_eager.isnan()))
    odd &= ~(ours <= bound) | ~truth.isfinite()
    odd &= ~(
        (name == "gelu") & (x == math.inf) & (y == math.inf)
    )  # as on a GPU; torch's vectors on a CPU give NaN
    nearest = (ours / bound).argmax()
    return Verdict(
        *(t[nearest].item() for t in (ours, bound, worst[binade], x)),
        [(x[i].item(), ours[i].item(), bound[i].item()) for i in broken[:5].tolist()],
        [(x[i].item(), y[i].item(), of_eager[i].item()) for i in odd.nonzero().flatten()[:5].tolist()],
    )


def main() -> int:
    import inline_loader

    kernels = inline_loader.load("math_on_gpu", source=launchers(gpu=True), device="cuda")
    x = arguments().cuda()
    print(
        "units in the last place, where the rule is nearest to being broken; eager's worst is of the same binade of x"
    )
    print(f"{'function':28}{'error':>10}{'allowed':>10}{'eager':>10}   at")
    failures = 0
    for name in NAMES:
        y = torch.full_like(x, math.nan)
        getattr(kernels, launcher_of(name))(y, x, x.numel())
        verdict = judge(name, x.cpu(), y.cpu(), eager(name, x).cpu())
        wrong = bool(verdict.beyond or verdict.special)
        failures += wrong
        numbers = "".join(f"{each:10.3g}" for each in verdict[:3])
        print(f"{name:28}{numbers}   {verdict.at:<14.7g}{'FAILS' * wrong}")
        for label, rows in (("error", verdict.beyond), ("special", verdict.special)):
            for row in rows:
                print(f"    {label}: x {row[0]!r}: {row[1]:.6g}, allowed or eager's {row[2]:.6g}")
    return failures > 0


if __name__ == "__main__":
    sys.exit(main())
