"""Scalar functions: what a node of the graph computes for one element, one row each.

A row has the function's C++ text (`{0}`, `{1}`: its operands; functions are kernels/core/math.h's, for a GPU's floats and for a CPU's
vectors alike; numbers are written real(...)), its derivative, and the facts by which a schedule rewrites. `derivative(g, y, *x)` gets the adjoint g of the result, the
result y and the operands x as nodes, and returns the operands' adjoints as nodes, None where nothing passes. What it returns at ties, at
NaN and at infinities is what autograd returns there.

Nodes have operators (+, -, *, /, unary -, comparisons by `gt`, `ge`, `eq`), `where` and `apply(name)`, so this file needs no graph.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

INF = math.inf


class Scalar(NamedTuple):
    """`text` of operands; `derivative`; `boolean`: the result is a truth value; facts of the function of its first operand:
    `monotone` +1 rises, -1 falls (weakly, on all of its domain), 0 neither; `valley`: falls, then rises; `linear` in all operands
    together; `pieces`: linear between the places where a comparison changes; `bounds` of the result."""

    text: str
    derivative: Callable | None = None
    boolean: bool = False
    monotone: int = 0
    valley: bool = False
    linear: bool = False
    pieces: bool = False
    bounds: tuple[float, float] = (-INF, INF)


# Of what these compare, a number is rounded to the results' type, as eager does.
_COMPARING = frozenset({"max", "min", "clamp", "clamp_min", "clamp_max", "hardtanh", "gt", "ge", "eq"})
# These jump, so that all they compare is rounded; the others' results are rounded later, which is the same.
_JUMPING = frozenset({"gt", "ge", "eq", "hardswish_gradient"})


def compared(op: str, texts: list[str], operands: Sequence) -> list[str]:
    """C++ texts of operands as `op` gets them. Beside zero and infinities rounding would change but what a type has no exponent for."""
    jumps = op in _JUMPING and not any(a.op == "const" and a.attr in (0.0, INF, -INF) for a in operands)

    def text_of(text: str, a) -> str:
        if a.op == "const" or a.is_leaf("scalar"):
            return _bound(text, a.attr if a.op == "const" else None) if op in _COMPARING else text
        return f"math::rounded({text})" if jumps else text

    return [text_of(text, a) for text, a in zip(texts, operands)]


def _bound(text: str, number: float | None) -> str:
    """C++ text of a number that is compared: `text`, where the number is known and every type has it."""
    if number is not None:
        fraction, exponent = math.frexp(number) if math.isfinite(number) else (0.0, 0)
        if (fraction * 256).is_integer() and (number == 0 or -10 < exponent < 10):
            return text
    return f"real(output_t({text}))"


def _call(name: str, arity: int = 1) -> str:
    return f"math::{name}({', '.join('{%d}' % i for i in range(arity))})"


def _gradient(name: str) -> Callable:
    """The derivative of a function that has a hand-written one of its operand (and its parameters, which get none)."""
    return lambda g, y, x, *parameters: (
        g * x.apply(f"{name}_gradient", *parameters),
        *[None] * len(parameters),
    )


def _function(
    name: str, derivative: Callable | None = None, arity: int = 1, text: str = "", **facts
) -> tuple[str, Scalar]:
    return name, Scalar(text or _call(name, arity), derivative, **facts)


def _extreme_derivative(sign: int) -> Callable:
    """Of max (sign 1) and min (-1): the lesser operand gets nothing, equal ones get a half each, NaN passes to both."""

    def derivative(g, y, a, b):
        a_wins, b_wins = (a.gt(b), b.gt(a)) if sign > 0 else (b.gt(a), a.gt(b))
        shared = a.eq(b).where(g * 0.5, g)
        return b_wins.where(0.0, shared), a_wins.where(0.0, shared)

    return derivative


SCALARS: dict[str, Scalar] = dict(
    [
        # Arithmetic. Division by a number stays division, as on eager's CPU; a text may multiply by the reciprocal where that is as exact.
        ("add", Scalar("{0} + {1}", lambda g, y, a, b: (g, g), linear=True)),
        ("sub", Scalar("{0} - {1}", lambda g, y, a, b: (g, -g), linear=True)),
        ("mul", Scalar("{0} * {1}", lambda g, y, a, b: (g * b, g * a))),
        ("div", Scalar("{0} / {1}", lambda g, y, a, b: (g / b, -(g * y) / b))),
        ("neg", Scalar("-{0}", lambda g, y, a: (-g,), linear=True, monotone=-1)),
        # A number that has been through a tensor of torch's default type, where a segment computes in double.
        ("narrow", Scalar("real(float({0}))", monotone=1)),
        # … and one through a tensor of the convolution's type.
        ("of_values", Scalar("real(value_t(real({0})))", monotone=1)),
        ("of_results", Scalar("real(output_t(real({0})))", monotone=1)),
        # What rounding takes of a value without positions that passes over positions read.
        ("rest", Scalar("({0} - double(real({0})))")),
        # Truth values.
        ("gt", Scalar("{0} > {1}", boolean=True)),
        ("ge", Scalar("{0} >= {1}", boolean=True)),
        ("eq", Scalar("{0} == {1}", boolean=True)),
        ("and", Scalar("{0} & {1}", boolean=True)),
        ("or", Scalar("{0} | {1}", boolean=True)),
        ("where", Scalar(_call("select", 3), lambda g, y, m, a, b: (None, m.where(g, 0.0), m.where(0.0, g)))),
        # Pieces.
        _function("max", _extreme_derivative(1), 2, "math::maximum({0}, {1})", pieces=True, monotone=1),
        _function("min", _extreme_derivative(-1), 2, "math::minimum({0}, {1})", pieces=True, monotone=1),
        _function(
            "relu", lambda g, y, x: (x.le(0.0).where(0.0, g),), pieces=True, monotone=1, bounds=(0.0, INF)
        ),
        _function(
            "leaky_relu",
            lambda g, y, x, slope: (x.gt(0.0).where(g, g * slope), None),
            2,
            "math::select({0} > real(0), {0}, {0} * {1})",
            pieces=True,
        ),
        # A bound lets the gradient through at the bound itself, and not at NaN.
        _function(
            "clamp_min",
            lambda g, y, x, low: (x.ge(low).where(g, 0.0), None),
            2,
            "math::maximum({0}, {1})",
            pieces=True,
            monotone=1,
        ),
        _function(
            "clamp_max",
            lambda g, y, x, high: (x.le(high).where(g, 0.0), None),
            2,
            "math::minimum({0}, {1})",
            pieces=True,
            monotone=1,
        ),
        _function(
            "clamp",
            lambda g, y, x, low, high: ((x.ge(low) & x.le(high)).where(g, 0.0), None, None),
            3,
            pieces=True,
            monotone=1,
        ),
        # hardtanh's value is clamp's; it lets nothing through at the bounds, and everything at NaN.
        _function(
            "hardtanh",
            lambda g, y, x, low, high: ((x.le(low) | x.ge(high)).where(0.0, g), None, None),
            3,
            _call("clamp", 3),
            pieces=True,
            monotone=1,
        ),
        _function(
            "hardsigmoid",
            lambda g, y, x: ((x.gt(-3.0) & x.lt(3.0)).where(g / 6.0, 0.0),),
            pieces=True,
            monotone=1,
            bounds=(0.0, 1.0),
        ),
        _function(
            "abs",
            lambda g, y, x: (x.gt(0.0).where(g, x.lt(0.0).where(-g, g * 0.0)),),
            pieces=True,
            valley=True,
            bounds=(0.0, INF),
        ),
        # Derivatives from the result.
        _function("exp", lambda g, y, x: (g * y,), monotone=1, bounds=(0.0, INF)),
        _function("tanh", lambda g, y, x: (g * (1.0 - y * y),), monotone=1, bounds=(-1.0, 1.0)),
        _function("sigmoid", lambda g, y, x: (g * ((1.0 - y) * y),), monotone=1, bounds=(0.0, 1.0)),
        _function("sqrt", lambda g, y, x: (g / (2.0 * y),), monotone=1, bounds=(0.0, INF)),
        _function("rsqrt", lambda g, y, x: (g * (-0.5 * (y * y * y)),), monotone=-1, bounds=(0.0, INF)),
        # From the operand; what follows it are numbers, which get no gradient.
        _function("log", lambda g, y, x: (g / x,), monotone=1),
        _function("mish", _gradient("mish"), valley=True, bounds=(-0.3089, INF)),
        _function("silu", _gradient("silu"), valley=True, bounds=(-0.2785, INF)),
        _function("gelu", _gradient("gelu"), valley=True, bounds=(-0.1701, INF)),
        _function("gelu_tanh", _gradient("gelu_tanh"), valley=True, bounds=(-0.1701, INF)),
        _function("hardswish", _gradient("hardswish"), valley=True, bounds=(-0.3751, INF)),
        _function("softplus", _gradient("softplus"), 3, monotone=1),  # beta, threshold
        _function("elu", _gradient("elu"), 2, monotone=1),  # alpha, which is not negative
        _function("mish_gradient"),
        _function("silu_gradient"),
        _function("gelu_gradient"),
        _function("gelu_tanh_gradient"),
        _function("hardswish_gradient"),
        _function("softplus_gradient", arity=3),
        _function("elu_gradient", arity=2),
    ]
)


# Of operations that take more than one instruction, about how many.
_INSTRUCTIONS = {
    "exp": 5,
    "log": 8,
    "log1p": 12,
    "expm1": 12,
    "sqrt": 8,
    "rsqrt": 8,
    "div": 8,
    "sigmoid": 12,
    "silu": 13,
    "tanh": 14,
    "softplus": 18,
    "mish": 22,
    "gelu": 20,
    "erf": 18,
}


def instructions(nodes: Iterable, of_gradients: bool = False) -> int:
    """About how many their operations take. of_gradients: does a derivative take as many as its function?"""

    def function(op: str) -> str:
        return op.removesuffix("_gradient") if of_gradients else op

    return sum(_INSTRUCTIONS.get(function(node.op), node.op in SCALARS) for node in nodes)
