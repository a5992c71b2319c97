"""The table of operations: which of torch's functions, methods and modules a tail may be made of, and what each is as nodes.

A row is a builder with the signature of the torch function that it stands for, after a `Tail`; what it is called with are `Value`s (what
the tail computes, parameters, scalars) and Python numbers. It returns the result as a `Value`, or raises `NotAccepted` with the reason
why this call isn't served; the call then stays PyTorch's. Ties, NaN, infinities and signed zeros are eager's, in value and gradient
(scalars.py; the few that are settled here say so).

`find(function or method or module)` gives the row. A module stands for its row with the arguments that `MODULES` reads off it.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from .graph import BY_CHANNEL, Graph, Node, Space


class NotAccepted(Exception):
    """Why a call isn't served."""


class Value(NamedTuple):
    """A node, and the axes of the tensor that it stands for: "n", "c", "0", "1", "2" (the spatial axes), "s" (all of them in one), or ""
    for an axis of size 1. A number has none."""

    node: Node
    axes: tuple[str, ...] = ()


class Pair(NamedTuple):
    """Values and indices, of which only the values may be used."""

    values: Value


class Update(NamedTuple):
    """What batch norm in training makes of its running statistics: buffers' qualified names, momentum, and nodes by channel; `variance`
    is the biased one, of `count` values."""

    mean_buffer: str
    variance_buffer: str
    momentum: float
    mean: Node
    variance: Node
    count: Node


class Random(NamedTuple):
    """A dropout: its leaf's name ("drawn"), and with which probability a value is dropped."""

    leaf: str
    p: float


class Tail:
    """What a segment's tail is built in. `channels`: how many the convolution has; `value_of(name)`: the number that an attribute of the
    model is, noted as used at capture."""

    def __init__(self, dimensions: int, channels: int, value_of: Callable[[str], float] | None = None):
        self.graph = Graph(dimensions)
        self.dimensions, self.channels = dimensions, channels
        self.updates: list[Update] = []
        self.random: list[Random] = []
        self._value_of = value_of

    @property
    def spatial(self) -> tuple[str, ...]:
        return tuple("012"[: self.dimensions])

    # ---- operands
    def value(self, x: Value | float | int) -> Value:
        if isinstance(x, Value):
            return x
        if isinstance(x, (int, float)) and not isinstance(x, bool):
            return Value(self.graph.const(x))
        raise NotAccepted(f"an operand is a {type(x).__name__}")

    def number(self, x: Value | float | int) -> float:
        """A number that shapes the program: known at capture."""
        if isinstance(x, Value):
            if x.node.is_leaf("scalar") and self._value_of:
                return self._value_of(x.node.attr[0])
            if x.node.is_const():
                return x.node.attr
            raise NotAccepted("a setting is a tensor")
        if isinstance(x, (int, float)):
            return x
        raise NotAccepted(f"a setting is a {type(x).__name__}")

    def parameter(self, name: str, kind: str, shape: Sequence[int]) -> Value:
        """A tensor of the model, one number or one by channel. Its axes are given where it meets a value (`aligned`)."""
        size = math.prod(shape)
        if size == 1:
            return Value(self.graph.leaf(name, Space(False, False, ""), kind), ("",) * len(shape))
        if size != self.channels or max(shape) != size:
            raise NotAccepted(f"{name} {tuple(shape)} is neither one number nor one by channel")
        axes = tuple("c" if n == size else "" for n in shape)
        return Value(self.graph.leaf(name, BY_CHANNEL, kind), axes)

    def by_channel(self, x: Value | None) -> Node | None:
        """A norm's weight or bias: (C)."""
        if x is None:
            return None
        if x.axes != ("c",) and not (self.channels == 1 and x.axes == ("",)):
            raise NotAccepted("a norm's weight isn't by channel")
        return x.node

    def need(self, x: Any) -> Value:
        if not isinstance(x, Value) or not x.axes:
            raise NotAccepted("its input isn't a tensor of this segment")
        return x

    # ---- pointwise
    def apply(self, op: str, *operands: Value | float) -> Value:
        """A scalar function, broadcast as torch does: axes are matched from the right."""
        values = [self.value(x) for x in operands]
        axes = _broadcast([v.axes for v in values])
        nodes = self._to_one_level([v.node for v in values])
        return Value(self.graph.scalar(op, *nodes), axes)

    def _to_one_level(self, nodes: list[Node]) -> list[Node]:
        """Values of whole axes are spread along them again."""
        levels = {n.space.level for n in nodes} - {""}
        while len(levels) > 1:
            coarse = max(levels, key=lambda name: len(self._ancestors(name)))
            level = self.graph.levels[coarse]
            whole = level.is_apart and all(w in (None, 1) for w in level.window)
            if not whole or not levels - {coarse} <= set(self._ancestors(coarse)):
                raise NotAccepted("values before and after a pool meet")
            nodes = [self.graph.upsample(n, coarse) if n.space.level == coarse else n for n in nodes]
            levels = {n.space.level for n in nodes} - {""}
        return nodes

    def _ancestors(self, level: str) -> list[str]:
        found = []
        while level != "e":
            level = self.graph.levels[level].parent
            found.append(level)
        return found

    # ---- axes
    def axes_of(self, x: Value, dim: int | Sequence[int] | None) -> tuple[int, ...]:
        dims = range(len(x.axes)) if dim is None or dim == () else (dim,) if isinstance(dim, int) else dim
        places = []
        for d in dims:
            if not isinstance(d, int) or not -len(x.axes) <= d < len(x.axes):
                raise NotAccepted(f"dim {d} of a tensor with {len(x.axes)}")
            places.append(d % len(x.axes))
        return tuple(sorted(set(places)))

    def steps_of(self, x: Value, places: tuple[int, ...]) -> list[str]:
        """Over what a reduction over those axes is: "s" or a level's name, then "c"; nothing for axes of size 1."""
        tags = {x.axes[i] for i in places} - {""}
        if "n" in tags:
            raise NotAccepted("a reduction over samples")
        own = {a for a in x.axes if a in (*self.spatial, "s")}
        positions = tags & own
        steps = []
        if positions:
            whole = positions == own or "s" in positions
            steps.append("s" if whole else self._whole_axes(x, positions))
        return steps + ["c"] * ("c" in tags)

    def _whole_axes(self, x: Value, positions: set[str]) -> str:
        return self.graph.level(x.node.space.level, [None if a in positions else 1 for a in self.spatial])

    def reduced_axes(self, x: Value, places: tuple[int, ...], keepdim: bool) -> tuple[str, ...]:
        if keepdim:
            return tuple("" if i in places else a for i, a in enumerate(x.axes))
        return tuple(a for i, a in enumerate(x.axes) if i not in places)

    def spread(self, node: Node, step: str) -> Node:
        """A reduction's result beside what was reduced."""
        return node if step in ("c", "s") else self.graph.upsample(node, step)

    def one_step(self, x: Value, dim) -> str | None:
        places = self.axes_of(x, dim)
        steps = self.steps_of(x, places)
        if len(steps) > 1:
            raise NotAccepted("it reduces over channels and positions together")
        return steps[0] if steps else None


def _broadcast(shapes: Sequence[tuple[str, ...]]) -> tuple[str, ...]:
    rank = max(map(len, shapes))
    result = []
    for i in range(rank):
        tags = {s[i - rank + len(s)] for s in shapes if i - rank + len(s) >= 0} - {""}
        if len(tags) > 1:
            raise NotAccepted(f"axes {' and '.join(sorted(tags))} meet")
        result.append(tags.pop() if tags else "")
    named = [a for a in result if a]
    if len(set(named)) < len(named):
        raise NotAccepted("an axis meets itself in another place")
    return tuple(result)


Builder = Callable[..., "Value | Pair"]


class Row(NamedTuple):
    """`functions` and `methods` stand for it with the builder's own arguments."""

    name: str
    build: Builder
    functions: tuple[Callable, ...] = ()
    methods: tuple[str, ...] = ()
    inplace: tuple[Callable | str, ...] = ()


ROWS: dict[str, Row] = {}
_BY_FUNCTION: dict[Callable, Row] = {}
_BY_METHOD: dict[str, Row] = {}
_IN_PLACE: set[Callable | str] = set()


def row(
    *functions: Callable, methods: Sequence[str] = (), inplace: Sequence[Callable | str] = (), name: str = ""
):
    """Registers a builder. `inplace`: functions and methods that write their result into their first operand."""

    def register(build: Builder) -> Builder:
        own = Row(name or build.__name__.strip("_"), build, functions, tuple(methods), tuple(inplace))
        ROWS[own.name] = own
        for f in (*functions, *(f for f in inplace if callable(f))):
            _BY_FUNCTION[f] = own
        for m in (*methods, *(m for m in inplace if isinstance(m, str))):
            _BY_METHOD[m] = own
        _IN_PLACE.update(inplace)
        return build

    return register


def find(target: Callable | str) -> Row | None:
    """The row of a function, or of a method by its name."""
    return _BY_METHOD.get(target) if isinstance(target, str) else _BY_FUNCTION.get(target)


def is_inplace(target: Callable | str, kwargs: dict[str, Any]) -> bool:
    return target in _IN_PLACE or bool(kwargs.get("inplace"))


def _refuse(**given: Any) -> None:
    """Arguments that have to be at their default."""
    for name, value in given.items():
        if value is not None and value is not False:
            raise NotAccepted(f"{name}={value!r}")


# ---- arithmetic
@row(
    torch.add,
    operator.add,
    operator.iadd,
    methods=("add", "__add__", "__radd__"),
    inplace=("add_", operator.iadd),
)
def add(t: Tail, input, other, *, alpha=1, out=None):
    _refuse(out=out)
    return t.apply("add", input, other if alpha == 1 else t.apply("mul", other, alpha))


@row(torch.sub, torch.subtract, operator.sub, methods=("sub", "subtract"), inplace=("sub_", operator.isub))
def sub(t: Tail, input, other, *, alpha=1, out=None):
    _refuse(out=out)
    return t.apply("sub", input, other if alpha == 1 else t.apply("mul", other, alpha))


@row(torch.rsub, methods=("rsub",))
def rsub(t: Tail, input, other, *, alpha=1):
    return sub(t, other, input, alpha=alpha)


@row(torch.mul, torch.multiply, operator.mul, methods=("mul", "multiply"), inplace=("mul_", operator.imul))
def mul(t: Tail, input, other, *, out=None):
    _refuse(out=out)
    return t.apply("mul", input, other)


@row(
    torch.div,
    torch.divide,
    torch.true_divide,
    operator.truediv,
    methods=("div", "divide", "true_divide"),
    inplace=("div_", operator.itruediv),
)
def div(t: Tail, input, other, *, rounding_mode=None, out=None):
    _refuse(rounding_mode=rounding_mode, out=out)
    return t.apply("div", input, other)


@row(torch.neg, torch.negative, operator.neg, methods=("neg", "negative"), inplace=("neg_", torch.neg_))
def neg(t: Tail, input):
    return t.apply("neg", input)


@row(torch.square, methods=("square",), inplace=("square_", torch.square_))
def square(t: Tail, input):
    return t.apply("mul", input, input)


@row(torch.pow, operator.pow, methods=("pow",), inplace=("pow_",), name="pow")
def power(t: Tail, input, exponent):
    if t.number(exponent) != 2:
        raise NotAccepted("a power other than 2")
    return square(t, input)


@row(torch.reciprocal, methods=("reciprocal",), inplace=("reciprocal_", torch.reciprocal_))
def reciprocal(t: Tail, input):
    return t.apply("div", 1.0, input)


# ---- functions of one operand
def _unary(
    op: str, *functions: Callable, methods: Sequence[str] = (), inplace: Sequence[Callable | str] = ()
) -> None:
    @row(*functions, methods=methods, inplace=inplace, name=op)
    def build(t: Tail, input, inplace=False, *, out=None):
        _refuse(out=out)
        return t.apply(op, t.need(input))


_unary("relu", torch.relu, F.relu, methods=("relu",), inplace=("relu_", torch.relu_, F.relu_))
_unary("silu", F.silu)
_unary("mish", F.mish)
_unary("hardswish", F.hardswish)
_unary("hardsigmoid", F.hardsigmoid)
_unary(
    "sigmoid",
    torch.sigmoid,
    F.sigmoid,
    torch.special.expit,
    methods=("sigmoid",),
    inplace=("sigmoid_", torch.sigmoid_),
)
_unary("tanh", torch.tanh, F.tanh, methods=("tanh",), inplace=("tanh_", torch.tanh_))
_unary("exp", torch.exp, methods=("exp",), inplace=("exp_", torch.exp_))
_unary("log", torch.log, methods=("log",), inplace=("log_", torch.log_))
_unary(
    "abs", torch.abs, torch.absolute, operator.abs, methods=("abs", "absolute"), inplace=("abs_", torch.abs_)
)
_unary("sqrt", torch.sqrt, methods=("sqrt",), inplace=("sqrt_", torch.sqrt_))
_unary("rsqrt", torch.rsqrt, methods=("rsqrt",), inplace=("rsqrt_", torch.rsqrt_))


@row(F.gelu, torch._C._nn.gelu)
def gelu(t: Tail, input, approximate="none"):
    if approximate not in ("none", "tanh"):
        raise NotAccepted(f"approximate={approximate!r}")
    return t.apply("gelu" if approximate == "none" else "gelu_tanh", t.need(input))


@row(F.leaky_relu, inplace=(F.leaky_relu_,))
def leaky_relu(t: Tail, input, negative_slope=0.01, inplace=False):
    return t.apply("leaky_relu", t.need(input), negative_slope)


@row(F.elu, inplace=(F.elu_,))
def elu(t: Tail, input, alpha=1.0, inplace=False):
    if t.number(alpha) < 0:
        raise NotAccepted("a negative alpha")
    return t.apply("elu", t.need(input), t.number(alpha))


@row(F.softplus, torch._C._nn.softplus)
def softplus(t: Tail, input, beta=1, threshold=20):
    return t.apply("softplus", t.need(input), t.number(beta), t.number(threshold))


@row(F.hardtanh, inplace=(F.hardtanh_,))
def hardtanh(t: Tail, input, min_val=-1.0, max_val=1.0, inplace=False):
    low, high = t.number(min_val), t.number(max_val)
    if low > high:
        raise NotAccepted("min_val above max_val")
    return t.apply("hardtanh", t.need(input), low, high)


@row(F.relu6)
def relu6(t: Tail, input, inplace=False):
    return hardtanh(t, input, 0.0, 6.0)


def _bound(t: Tail, bound):
    if isinstance(bound, Value) and (bound.axes or bound.node.is_leaf("parameter")):
        raise NotAccepted("a bound is a tensor")
    return bound


@row(
    torch.clamp,
    torch.clip,
    methods=("clamp", "clip"),
    inplace=("clamp_", "clip_", torch.clamp_, torch.clip_),
)
def clamp(t: Tail, input, min=None, max=None, *, out=None):
    _refuse(out=out)
    x, low, high = t.need(input), _bound(t, min), _bound(t, max)
    if low is None and high is None:
        raise NotAccepted("no bound")
    if low is None:
        return t.apply("clamp_max", x, high)
    return t.apply("clamp_min", x, low) if high is None else t.apply("clamp", x, low, high)


@row(torch.clamp_min, methods=("clamp_min",), inplace=("clamp_min_", torch.clamp_min_))
def clamp_min(t: Tail, input, min):
    return clamp(t, input, min=min)


@row(torch.clamp_max, methods=("clamp_max",), inplace=("clamp_max_", torch.clamp_max_))
def clamp_max(t: Tail, input, max):
    return clamp(t, input, max=max)


@row(torch.maximum, torch.fmax, methods=("maximum",), name="maximum")
def maximum(t: Tail, input, other, *, out=None):
    _refuse(out=out)
    return t.apply("max", input, other)


@row(torch.minimum, methods=("minimum",), name="minimum")
def minimum(t: Tail, input, other, *, out=None):
    _refuse(out=out)
    return t.apply("min", input, other)


_BY_FUNCTION.pop(torch.fmax)  # it ignores NaN


# ---- extremes over axes
def _extreme(t: Tail, sign: int, input, dim, keepdim, out, other=None):
    _refuse(out=out)
    if isinstance(dim, Value):
        other, dim = dim, None
    if other is not None:
        return t.apply("max" if sign > 0 else "min", input, other)
    x = t.need(input)
    if not isinstance(dim, int):
        raise NotAccepted("an extreme over all axes")
    step, places = t.one_step(x, dim), t.axes_of(x, dim)
    node = t.graph.extreme(step, x.node, sign) if step else x.node
    return Pair(Value(node, t.reduced_axes(x, places, keepdim)))


@row(torch.max, methods=("max",), name="max")
def max_(t: Tail, input, dim=None, keepdim=False, *, other=None, out=None):
    return _extreme(t, 1, input, dim, keepdim, out, other)


@row(torch.min, methods=("min",), name="min")
def min_(t: Tail, input, dim=None, keepdim=False, *, other=None, out=None):
    return _extreme(t, -1, input, dim, keepdim, out, other)


def _even_extreme(t: Tail, sign: int, input, dim, keepdim, out):
    """amax, amin: equal ones share the gradient evenly."""
    _refuse(out=out)
    x, g = t.need(input), t.graph
    places = t.axes_of(x, dim)
    steps, axes = t.steps_of(x, places), t.reduced_axes(x, places, keepdim)
    if not steps:
        return Value(x.node, axes)
    top, picks = x.node, []
    for step in steps:
        picks.append(g.pick(step, top, sign))
        top = g.extreme(step, top, sign)

    def spread(node: Node) -> Node:
        return functools.reduce(t.spread, reversed(steps), node)

    def total(node: Node) -> Node:
        return functools.reduce(lambda node, step: g.sum(step, node), steps, node)

    equal = x.node.eq(spread(top)).where(1.0, g.const(0.0))
    # The value that was picked is one of them, even where it is computed again with other roundings; a NaN equals nothing.
    picked = top.eq(top).where(1.0, g.const(0.0))
    for pick in reversed(picks):
        picked = g.put(pick, picked)
    ties = equal.apply("max", picked)
    share = ties / spread(total(ties))
    return Value(g.detach(top, path=total(x.node * g.detach(share))), axes)


@row(torch.amax, methods=("amax",))
def amax(t: Tail, input, dim=(), keepdim=False, *, out=None):
    return _even_extreme(t, 1, input, dim, keepdim, out)


@row(torch.amin, methods=("amin",))
def amin(t: Tail, input, dim=(), keepdim=False, *, out=None):
    return _even_extreme(t, -1, input, dim, keepdim, out)


# ---- sums over axes
@row(torch.sum, methods=("sum",), name="sum")
def sum_(t: Tail, input, dim=None, keepdim=False, *, dtype=None, out=None):
    _refuse(dtype=dtype, out=out)
    x = t.need(input)
    places = t.axes_of(x, dim)
    node = x.node
    for step in t.steps_of(x, places):
        node = t.graph.sum(step, node)
    return Value(node, t.reduced_axes(x, places, keepdim))


@row(torch.mean, methods=("mean",))
def mean(t: Tail, input, dim=None, keepdim=False, *, dtype=None, out=None):
    total = sum_(t, input, dim, keepdim, dtype=dtype, out=out)
    node, count = input.node, t.graph.const(1.0)
    for step in t.steps_of(input, t.axes_of(input, dim)):
        count = count * t.graph.count_along(step, node.space.level)
    return Value(total.node / count, total.axes)


def _finite_top(t: Tail, step: str, x: Node) -> Node:
    """What is taken off before exp: the maximum, 0 where it is infinite."""
    top = t.graph.extreme(step, x, 1)
    return t.graph.detach(top.apply("abs").eq(math.inf).where(0.0, top))


@row(torch.logsumexp, torch.special.logsumexp, methods=("logsumexp",))
def logsumexp(t: Tail, input, dim, keepdim=False, *, out=None):
    """Its gradient is g·exp(x − y): backward needs nothing but y."""
    _refuse(out=out)
    x, g = t.need(input), t.graph
    step, places = t.one_step(x, dim), t.axes_of(x, dim)
    axes = t.reduced_axes(x, places, keepdim)
    if step is None:
        return Value(x.node, axes)
    top = _finite_top(t, step, x.node)
    total = g.sum(step, (x.node - t.spread(top, step)).apply("exp"))
    y = g.detach(total.apply("log") + top)
    weights = g.detach((x.node - t.spread(y, step)).apply("exp"))
    return Value(g.detach(y, path=g.sum(step, weights * x.node)), axes)


@row(torch.softmax, F.softmax, torch.special.softmax, methods=("softmax",))
def softmax(t: Tail, input, dim=None, _stacklevel=3, dtype=None):
    """Its gradient is y·(g − Σ g·y)."""
    _refuse(dtype=dtype)
    x, g = t.need(input), t.graph
    if not isinstance(dim, int):
        raise NotAccepted("no dim")
    step = t.one_step(x, dim)
    if step is None:
        e = (x.node - x.node).apply("exp")
        return Value(e / e, x.axes)
    e = (x.node - t.spread(g.extreme(step, x.node, 1), step)).apply("exp")
    y = g.detach(e / t.spread(g.sum(step, e), step))
    weighted = y * x.node
    return Value(g.detach(y, path=weighted - y * t.spread(g.sum(step, weighted), step)), x.axes)


# ---- pools
def _pool_level(t: Tail, x: Value, kernel_size, stride, padding, ceil_mode) -> str | None:
    """None: each position is a window."""

    def each(size) -> tuple[int, ...]:
        sizes = size if isinstance(size, (tuple, list)) else (size,)
        sizes = tuple(int(t.number(s)) for s in sizes)
        return sizes * t.dimensions if len(sizes) == 1 else sizes

    if tuple(a for a in x.axes if a in t.spatial) != t.spatial or x.axes[-t.dimensions :] != t.spatial:
        raise NotAccepted("a pool of something without positions")
    _refuse(ceil_mode=ceil_mode)
    window = each(kernel_size)
    step = window if stride is None or stride == [] else each(stride)
    around = each(padding)
    if {*window, *step} == {1} and not any(around):
        return None
    return t.graph.level(x.node.space.level, window, step, around)


def _max_pool(
    t, input, kernel_size, stride=None, padding=0, dilation=1, ceil_mode=False, return_indices=False
):
    x = t.need(input)
    _refuse(return_indices=return_indices)
    if any(d != 1 for d in (dilation if isinstance(dilation, (tuple, list)) else (dilation,))):
        raise NotAccepted("a dilated pool")
    level = _pool_level(t, x, kernel_size, stride, padding, ceil_mode)
    return x if level is None else Value(t.graph.extreme(level, x.node, 1), x.axes)


def _average_pool(
    t,
    input,
    kernel_size,
    stride=None,
    padding=0,
    ceil_mode=False,
    count_include_pad=True,
    divisor_override=None,
):
    x = t.need(input)
    _refuse(divisor_override=divisor_override)
    level = _pool_level(t, x, kernel_size, stride, padding, ceil_mode)
    if level and any(t.graph.levels[level].padding) and not count_include_pad:
        raise NotAccepted("count_include_pad=False: an average of as many values as lie inside")
    return x if level is None else Value(t.graph.sum(level, x.node) / t.graph.count("window", level), x.axes)


def _of_dimensions(n: int, build: Builder) -> Builder:
    def own(t: Tail, *args, **kwargs):
        if t.dimensions != n:
            raise NotAccepted(f"a pool of {n} dimensions of one of {t.dimensions}")
        return build(t, *args, **kwargs)

    return own


row(F.max_pool2d, torch.max_pool2d, name="max_pool2d")(_of_dimensions(2, _max_pool))
row(F.max_pool3d, torch.max_pool3d, name="max_pool3d")(_of_dimensions(3, _max_pool))
row(F.avg_pool2d, torch._C._nn.avg_pool2d, name="avg_pool2d")(_of_dimensions(2, _average_pool))
row(F.avg_pool3d, torch._C._nn.avg_pool3d, name="avg_pool3d")(_of_dimensions(3, _average_pool))


def _over_all(t: Tail, input, output_size) -> Value:
    """What an adaptive pool to one position pools."""
    x = t.need(input)
    sizes = output_size if isinstance(output_size, (tuple, list)) else (output_size,)
    if any(s is None or t.number(s) != 1 for s in sizes):
        raise NotAccepted(f"an adaptive pool to {output_size}")
    if x.axes[-t.dimensions :] != t.spatial:
        raise NotAccepted("a pool of something without positions")
    return x


def _adaptive_average(t: Tail, input, output_size):
    return mean(t, _over_all(t, input, output_size), tuple(range(-t.dimensions, 0)), keepdim=True)


def _adaptive_max(t: Tail, input, output_size, return_indices=False):
    _refuse(return_indices=return_indices)
    x = _over_all(t, input, output_size)
    axes = t.reduced_axes(x, t.axes_of(x, tuple(range(-t.dimensions, 0))), keepdim=True)
    return Value(t.graph.extreme("s", x.node, 1, pools=True), axes)


row(F.adaptive_avg_pool2d, name="adaptive_avg_pool2d")(_of_dimensions(2, _adaptive_average))
row(F.adaptive_avg_pool3d, name="adaptive_avg_pool3d")(_of_dimensions(3, _adaptive_average))
row(F.adaptive_max_pool2d, name="adaptive_max_pool2d")(_of_dimensions(2, _adaptive_max))
row(F.adaptive_max_pool3d, name="adaptive_max_pool3d")(_of_dimensions(3, _adaptive_max))


# ---- norms
def _affine(
    t: Tail, x: Value, mean_: Node, variance: Node, eps, weight: Node | None, bias: Node | None
) -> Value:
    rstd = (variance + t.number(eps)).apply("rsqrt")
    node = (x.node - mean_) * rstd
    node = node if weight is None else node * weight
    return Value(node if bias is None else node + bias, x.axes)


def _normalised(
    t: Tail, x: Value, steps: tuple[str | int, ...], weight, bias, eps
) -> tuple[Value, Node, Node]:
    """With the mean and the biased variance."""
    weight, bias = t.by_channel(weight), t.by_channel(bias)
    mean_ = t.graph.mean(x.node, steps)
    variance = t.graph.variance(x.node, mean_, steps)
    return _affine(t, x, mean_, variance, eps, weight, bias), mean_, variance


def _channels_first(t: Tail, input) -> Value:
    x = t.need(input)
    if len(x.axes) < 2 or x.axes[1] != "c" or x.axes[0] != "n":
        raise NotAccepted("a norm of something whose second axis isn't the channels")
    return x


@row(F.group_norm, torch.group_norm)
def group_norm(t: Tail, input, num_groups, weight=None, bias=None, eps=1e-5, cudnn_enabled=True):
    x, groups = _channels_first(t, input), int(t.number(num_groups))
    if groups < 1 or t.channels % groups:
        raise NotAccepted(f"{t.channels} channels in {groups} groups")
    steps = ("s", groups) if x.node.space.level else (groups,)
    return _normalised(t, x, steps, weight, bias, eps)[0]


def _by_running_statistics(t: Tail, x: Value, running_mean, running_var, weight, bias, eps) -> Value:
    variance, mean_ = t.by_channel(running_var), t.by_channel(running_mean)
    return _affine(t, x, mean_, variance, eps, t.by_channel(weight), t.by_channel(bias))


@row(F.instance_norm)
def instance_norm(
    t,
    input,
    running_mean=None,
    running_var=None,
    weight=None,
    bias=None,
    use_input_stats=True,
    momentum=0.1,
    eps=1e-5,
):
    x = _channels_first(t, input)
    if not x.node.space.level:
        raise NotAccepted("an instance norm of one value a channel")
    if not use_input_stats:
        return _by_running_statistics(t, x, running_mean, running_var, weight, bias, eps)
    if running_mean is not None:
        raise NotAccepted("an instance norm that tracks running statistics")
    return _normalised(t, x, ("s",), weight, bias, eps)[0]


@row(F.batch_norm)
def batch_norm(
    t,
    input,
    running_mean=None,
    running_var=None,
    weight=None,
    bias=None,
    training=False,
    momentum=0.1,
    eps=1e-5,
):
    x = _channels_first(t, input)
    if not training:
        return _by_running_statistics(t, x, running_mean, running_var, weight, bias, eps)
    steps = ("s", "n") if x.node.space.level else ("n",)
    y, mean_, variance = _normalised(t, x, steps, weight, bias, eps)
    if running_mean is not None:
        if momentum is None:
            raise NotAccepted("momentum=None: a cumulative average")
        names = [t.by_channel(b).attr[0] for b in (running_mean, running_var)]
        count = t.graph.statistics_count(steps, x.node.space.level)
        t.updates.append(Update(*names, t.number(momentum), mean_, variance, count))
    return y


@row(F.layer_norm, torch.layer_norm)
def layer_norm(t: Tail, input, normalized_shape, weight=None, bias=None, eps=1e-5, cudnn_enable=True):
    x = t.need(input)
    sizes = (
        normalized_shape if isinstance(normalized_shape, (tuple, list, torch.Size)) else (normalized_shape,)
    )
    if tuple(sizes) != (t.channels,) or x.axes[-1] != "c":
        raise NotAccepted("a layer norm over other than channels, last")
    return _normalised(t, x, ("c",), weight, bias, eps)[0]


# ---- dropout, and what moves nothing
@row(F.dropout, torch.dropout)
def dropout(t: Tail, input, p=0.5, training=True, inplace=False):
    x, p = t.need(input), t.number(p)
    if not 0 <= p <= 1:
        raise NotAccepted(f"p={p}")
    if not training or p == 0:
        return x
    if p == 1:
        return t.apply("mul", x, 0.0)
    leaf = t.graph.leaf(f"keep{len(t.random)}", x.node.space, "drawn")
    t.random.append(Random(leaf.attr[0], p))
    return Value(x.node * (leaf * (1 / (1 - p))), x.axes)


@row(F.dropout2d, F.dropout3d, F.alpha_dropout, F.feature_alpha_dropout)
def other_dropout(t: Tail, input, p=0.5, training=True, inplace=False):
    if training and t.number(p):
        raise NotAccepted("a dropout of whole channels, or alpha dropout")
    return t.need(input)


@row(methods=("contiguous",))
def contiguous(t: Tail, input):
    return t.need(input)


@row(methods=("float",), name="float")
def float_(t: Tail, input, memory_format=None):
    _refuse(memory_format=memory_format)
    return t.need(input)  # kernels compute with no fewer digits, and results have eager's type


@row(methods=("type", "to"), name="type")
def type_(t: Tail, input, dtype=None):
    if dtype is not torch.float32:
        raise NotAccepted("another type")
    return t.need(input)


@row()
def identity(t: Tail, input, *args, **kwargs):
    return t.need(input)


@row(torch.squeeze, methods=("squeeze",))
def squeeze(t: Tail, input, dim=None):
    x = t.need(input)
    if dim is None:
        raise NotAccepted("squeeze without dim depends on sizes")
    places = t.axes_of(x, dim)
    if any(x.axes[i] for i in places):
        raise NotAccepted("squeeze of an axis whose size isn't known to be 1")
    return Value(x.node, tuple(a for i, a in enumerate(x.axes) if i not in places))


@row(torch.unsqueeze, methods=("unsqueeze",))
def unsqueeze(t: Tail, input, dim):
    x = t.need(input)
    if not isinstance(dim, int) or not -len(x.axes) - 1 <= dim <= len(x.axes):
        raise NotAccepted(f"unsqueeze({dim})")
    at = dim % (len(x.axes) + 1)
    return Value(x.node, (*x.axes[:at], "", *x.axes[at:]))


@row(torch.flatten, methods=("flatten",))
def flatten(t: Tail, input, start_dim=0, end_dim=-1):
    x = t.need(input)
    (first,), (last,) = t.axes_of(x, start_dim), t.axes_of(x, end_dim)
    merged = tuple(a for a in x.axes[first : last + 1] if a)
    if merged == t.spatial:
        merged = ("s",)
    if len(merged) > 1:
        raise NotAccepted("flatten of channels and positions together")
    return Value(x.node, (*x.axes[:first], *(merged or ("",)), *x.axes[last + 1 :]))


@row(torch.permute, methods=("permute",))
def permute(t: Tail, input, *dims):
    x = t.need(input)
    order = dims[0] if len(dims) == 1 and not isinstance(dims[0], int) else dims
    if sorted(d % len(x.axes) for d in order) != list(range(len(x.axes))):
        raise NotAccepted(f"permute{tuple(order)}")
    return Value(x.node, tuple(x.axes[d] for d in order))


def getitem(t: Tail, input, index):
    if isinstance(input, Pair) and index == 0:
        return input.values
    raise NotAccepted("indexing")


def get_attribute(t: Tail, input, name):
    if isinstance(input, Pair) and name == "values":
        return input.values
    raise NotAccepted(f"its {name}")


row(operator.getitem, name="getitem")(getitem)
row(getattr, name="getattr")(get_attribute)


# ---- modules
class ModuleRow(NamedTuple):
    """`settings`: attributes that are read at capture, by the builder's argument; `tensors`: parameters and buffers, likewise."""

    row: str
    settings: dict[str, str] = {}
    tensors: dict[str, str] = {}


def _same(*names: str) -> dict[str, str]:
    return {name: name for name in names}


_WINDOW = _same("kernel_size", "stride", "padding", "ceil_mode")
_MAX_WINDOW = {**_WINDOW, **_same("dilation", "return_indices")}
_RUNNING = {**_same("running_mean", "running_var"), **_same("weight", "bias")}
_NORM = {**_same("momentum", "eps", "training", "track_running_stats")}

MODULES: dict[type[nn.Module], ModuleRow] = {
    nn.ReLU: ModuleRow("relu", _same("inplace")),
    nn.ReLU6: ModuleRow("relu6", _same("inplace")),
    nn.LeakyReLU: ModuleRow("leaky_relu", _same("negative_slope", "inplace")),
    nn.ELU: ModuleRow("elu", _same("alpha", "inplace")),
    nn.GELU: ModuleRow("gelu", _same("approximate")),
    nn.SiLU: ModuleRow("silu", _same("inplace")),
    nn.Mish: ModuleRow("mish", _same("inplace")),
    nn.Softplus: ModuleRow("softplus", _same("beta", "threshold")),
    nn.Sigmoid: ModuleRow("sigmoid"),
    nn.Tanh: ModuleRow("tanh"),
    nn.Hardswish: ModuleRow("hardswish", _same("inplace")),
    nn.Hardsigmoid: ModuleRow("hardsigmoid", _same("inplace")),
    nn.Hardtanh: ModuleRow("hardtanh", _same("min_val", "max_val", "inplace")),
    nn.Softmax: ModuleRow("softmax", _same("dim")),
    nn.GroupNorm: ModuleRow("group_norm", _same("num_groups", "eps"), _same("weight", "bias")),
    nn.LayerNorm: ModuleRow("layer_norm", _same("normalized_shape", "eps"), _same("weight", "bias")),
    nn.InstanceNorm2d: ModuleRow("instance_norm", _NORM, _RUNNING),
    nn.InstanceNorm3d: ModuleRow("instance_norm", _NORM, _RUNNING),
    nn.BatchNorm2d: ModuleRow("batch_norm", _NORM, _RUNNING),
    nn.BatchNorm3d: ModuleRow("batch_norm", _NORM, _RUNNING),
    nn.MaxPool2d: ModuleRow("max_pool2d", _MAX_WINDOW),
    nn.MaxPool3d: ModuleRow("max_pool3d", _MAX_WINDOW),
    nn.AvgPool2d: ModuleRow("avg_pool2d", {**_WINDOW, **_same("count_include_pad", "divisor_override")}),
    nn.AvgPool3d: ModuleRow("avg_pool3d", {**_WINDOW, **_same("count_include_pad", "divisor_override")}),
    nn.AdaptiveAvgPool2d: ModuleRow("adaptive_avg_pool2d", _same("output_size")),
    nn.AdaptiveAvgPool3d: ModuleRow("adaptive_avg_pool3d", _same("output_size")),
    nn.AdaptiveMaxPool2d: ModuleRow("adaptive_max_pool2d", _same("output_size", "return_indices")),
    nn.AdaptiveMaxPool3d: ModuleRow("adaptive_max_pool3d", _same("output_size", "return_indices")),
    nn.Dropout: ModuleRow("dropout", _same("p", "training", "inplace")),
    nn.Dropout2d: ModuleRow("other_dropout", _same("p", "training", "inplace")),
    nn.Dropout3d: ModuleRow("other_dropout", _same("p", "training", "inplace")),
    nn.Flatten: ModuleRow("flatten", _same("start_dim", "end_dim")),
}


def module_arguments(module: nn.Module) -> dict[str, Any]:
    """The arguments that a module calls its row with, besides tensors and its input."""
    own = MODULES[type(module)]
    arguments = {argument: getattr(module, name) for argument, name in own.settings.items()}
    if own.row in ("batch_norm", "instance_norm"):  # as torch's modules decide it
        tracked = arguments.pop("track_running_stats")
        training = arguments.pop("training")
        if own.row == "batch_norm":
            has_statistics = module.running_mean is not None or module.running_var is not None
            arguments["training"] = training or not has_statistics
        else:
            arguments["use_input_stats"] = training or not tracked
    return arguments


def module_tensors(module: nn.Module) -> dict[str, str]:
    """The module's tensors that its row reads, by argument: their names within the module."""
    own = MODULES[type(module)]
    return {argument: name for argument, name in own.tensors.items() if getattr(module, name) is not None}
