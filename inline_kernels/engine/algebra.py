"""Rewriting a tail by facts of its nodes: the same function, by less work, in another order than the model's.

`reordered(roots)` gives the roots again, as nodes of the same graph. Exactly equal in exact arithmetic; in floating point a result may
differ by rounding, and where several values of a window are equal, or NaN, a gradient may go to another one of them. The rules:

- monotone: a function that rises or falls comes after a maximum or minimum, once a window instead of once an element. Of a factor whose
  sign only a call knows, the sign decides there whether the maximum or the minimum is wanted: the extreme is of ±x;
- valley: of a function that falls and then rises, the maximum is the greater of its values at the window's maximum and minimum;
- sums taken apart: where a sum over positions can be had from sums that are there earlier (a mean behind a norm), no pass is made for it;
- bounds: what can't happen is left out (relu behind relu; hardswish's clamp of what stays between -3 and 3).

`factored(roots)` is for a gradient: a statistic that is a factor of all terms of a sum comes after the sum.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from operator import is_

from .graph import ELEMENTS, Facts, Graph, Node, order
from .passes import is_static
from .scalars import SCALARS

Interval = tuple[float, float]
ALL: Interval = (-math.inf, math.inf)


def reordered(roots: Sequence[Node], exact_ties: bool = False) -> list[Node]:
    """The roots (of one graph), rewritten together. exact_ties: for a gradient, which hangs on which of equal values is picked: extremes are
    taken of the values that eager compares, since others may tie, or not, where rounding makes those equal."""
    rewriter = _Rewriter(roots, exact_ties)
    return [rewriter.of(root) for root in roots]


class _Rewriter:
    def __init__(self, roots: Sequence[Node], exact_ties: bool):
        self.graph: Graph = roots[0].graph
        self.exact_ties = exact_ties
        self.of_statistics = _sums_of_statistics(roots)
        self.known: dict[int, Node] = {}

    def of(self, node: Node) -> Node:
        found = self.known.get(node.id)
        if found is None:
            found = self.known[node.id] = self._rewritten(node, [self.of(a) for a in node.args])
        return found

    def _rewritten(self, node: Node, args: list[Node]) -> Node:
        if node.is_scalar_op:
            return _within_bounds(node.op, self.graph.scalar(node.op, *args))
        if node.is_extreme and not self.exact_ties:
            axis, sign = node.args[1].attr[:2]
            return self._extreme(axis, args[0], sign)
        if node.op == "sum":
            plain = self.graph.sum(node.attr, args[0])
            return plain if node.id in self.of_statistics else self._taken_apart(plain, args[0])
        if node.op == "detach":
            return self.graph.detach(args[0], node.attr and self.of(node.attr))
        return self.graph.make(node.op, *args, attr=node.attr, space=node.space)

    # ---- extremes
    def _extreme(self, axis: str, a: Node, sign: int) -> Node:
        chain, factors = _monotone_chain(a, axis)
        x = chain[-1][0].args[chain[-1][1]] if chain else a
        for function, at in chain:
            sign *= _direction(function, at) or 1
        if factors:
            product = factors[0]
            for each in factors[1:]:
                product = product * each
            result = self._by_sign(product, axis, x, sign)
        else:
            result = self._valley(axis, x, sign) or self.graph.extreme(axis, x, sign)
        for function, at in reversed(chain):
            result = self._replaced(function, at, result)
        return result

    def _by_sign(self, factor: Node, axis: str, x: Node, sign: int) -> Node:
        flipped = factor.lt(0.0)
        signed = flipped.where(-x, x)
        top = self.graph.extreme(axis, signed, sign)
        return flipped.where(-top, top)

    def _valley(self, axis: str, a: Node, sign: int) -> Node | None:
        if not (a.is_scalar_op and SCALARS[a.op].valley and sign > 0 and _operand_that_varies(a, axis) == 0):
            return None
        ends = (self._replaced(a, 0, self._extreme(axis, a.args[0], s)) for s in (1, -1))
        return self.graph.scalar("max", *ends)

    def _replaced(self, a: Node, at: int, operand: Node) -> Node:
        return self.graph.scalar(a.op, *a.args[:at], operand, *a.args[at + 1 :])

    # ---- sums
    def _taken_apart(self, plain: Node, a: Node) -> Node:
        """A sum over positions, from sums that are there earlier if that saves a pass."""
        if plain.op != "sum" or plain.attr != "s":
            return plain
        apart = self.graph.total("s", a)
        return apart if _level(apart) < _level(plain) else plain


def _sums_of_statistics(roots: Sequence[Node]) -> set[int]:
    """Means that are had together with their variance, whatever way they could be had."""
    found: set[int] = set()
    for node in order(roots):
        if node.op == "variance":
            within = {n.id for n in order([node.args[0]])}
            found |= {n.id for n in order([node.args[1]]) if n.op == "sum" and n.id not in within}
    return found


def _level(node: Node) -> int:
    return Facts([node], keeps=False).level[node.id]


# ---- common factors
def factored(roots: Sequence[Node]) -> list[Node]:
    """A gradient's roots with x·r + y·r as (x + y)·r, and Σ x·r as r·Σ x, where r is a statistic of forward's. A norm's gradient is r = 1/σ
    times what is left of dy when its means are taken off, which may be little: with few positions of a plane the rounding of dy·r
    would be most of it. Parameters stay with dy, as in eager's norms, but for sums over positions, as there, too. For the same reason
    deviations are from the mean as it is, not from what it is rounded to; but those that masks compare, which are forward's."""
    rewriter = _Factored(roots)
    deviations = _Deviations([rewriter.of(root) for root in roots])
    return [deviations.of(root) for root in deviations.roots]


class _Deviations:
    """Where dy is multiplied by a difference from a statistic, what that is rounded to in a pass is made up for."""

    def __init__(self, roots: Sequence[Node]):
        self.roots, self.facts = roots, Facts(roots, keeps=True)
        self.known: dict[Node, Node] = {}

    def of(self, node: Node) -> Node:
        if node.id not in self.facts.of_dy:
            return node
        if node not in self.known:
            args = [self.of(a) for a in node.args]
            if node.op == "mul":
                args = [self._unrounded(a) for a in args]
            again = node.graph.make(node.op, *args, attr=node.attr, space=node.space)
            self.known[node] = node if all(map(is_, args, node.args)) else again
        return self.known[node]

    def _unrounded(self, a: Node) -> Node:
        known = self.facts
        if a.op != "sub" or not a.space.level or a.id not in known.of_z or a.id in known.of_dy:
            return a
        mean = a.args[1]
        return a - mean.apply("rest") if mean.space.small and mean.id in known.of_z else a


class _Factored:
    def __init__(self, roots: Sequence[Node]):
        self.graph, self.facts = roots[0].graph, Facts(roots, keeps=True)
        self.known: dict[Node, Node] = {}

    def of(self, node: Node) -> Node:
        if node.id not in self.facts.of_dy:
            return node
        if node not in self.known:
            self.known[node] = self._rewritten(node, [self.of(a) for a in node.args])
        return self.known[node]

    def _rewritten(self, node: Node, terms: list[Node]) -> Node:
        graph, taken_out = self.graph, []
        if node.op in ("sum", "group") or (node.op in ("add", "sub") and node.space.level):
            of_all = node.op == "sum" and node.attr == "s"
            for factor in [f for each in terms for f in self._factors(each, of_all)]:
                found = [_without(each, factor) for each in terms]
                if None in found or not _may_leave(factor, node):
                    continue
                if not node.space.level or any(saves for _, saves in found):
                    terms = [left for left, _ in found]
                    taken_out.append(factor)
        if node.is_scalar_op:
            result = graph.scalar(node.op, *terms)
        elif node.op == "sum":
            result = graph.total(node.attr, terms[0])
        elif node.op == "group":
            result = graph.group(terms[0], node.attr)
        else:
            result = graph.make(node.op, *terms, attr=node.attr, space=node.space)
        for factor in taken_out:
            result = result * factor
        return result

    def _factors(self, a: Node, of_all: bool, index: Node | None = None) -> list[Node]:
        """The statistics among a's factors, or all without positions. index: a is put to those places."""
        if a.op == "put":
            return self._factors(a.args[0], of_all, a.args[1])
        whole, known = a if index is None else _untaken(a, index), self.facts
        if whole is not None and whole.space.small and whole.id not in known.of_dy:
            if whole.id in known.of_z or (of_all and whole.op != "const"):
                return [whole]
        if a.op == "mul":
            return [factor for each in a.args for factor in self._factors(each, of_all, index)]
        return self._factors(a.args[_LINEAR[a.op]], of_all, index) if a.op in _LINEAR else []


_LINEAR = {"div": 0, "neg": 0, "where": 1}  # in that operand; a choice where the other one is 0


def _may_leave(factor: Node, node: Node) -> bool:
    """Is it the same for all that a sum adds up?"""
    if node.op == "group":
        return _is_even(factor, node.attr)
    return node.op != "sum" or not factor.space.has(node.attr)


def _is_even(a: Node, groups: int) -> bool:
    """Have all channels of a group the same?"""
    if not a.space.c or (a.op == "group" and a.attr == groups) or (a.op == "variance" and groups in a.attr):
        return True
    return a.is_scalar_op and all(_is_even(each, groups) for each in a.args)


def _untaken(a: Node, index: Node) -> Node | None:
    """The value without positions that a was taken of; None: there is none."""
    if a.space.small:
        return a
    if a.op == "take" and a.args[1] is index:
        return _untaken(a.args[0], index)
    operands = [_untaken(each, index) for each in a.args] if a.is_scalar_op else [None]
    return None if None in operands else a.graph.scalar(a.op, *operands)


def _without(a: Node, factor: Node) -> tuple[Node, bool] | None:
    """a / factor, by leaving it out once, and whether that saves a product at positions; None where a hasn't it."""
    graph = a.graph
    if a is factor:
        return graph.const(1.0), False
    if a.op == "put":
        found = _without(a.args[0], graph.take(a.args[1], factor))
        return found and (graph.put(a.args[1], found[0]), found[1])
    if a.op == "where" and not a.args[2].is_const(0.0):
        return None
    for at in (0, 1) if a.op == "mul" else (_LINEAR[a.op],) if a.op in _LINEAR else ():
        if found := _without(a.args[at], factor):
            left = graph.scalar(a.op, *a.args[:at], found[0], *a.args[at + 1 :])
            return left, found[1] or (a.args[at] is factor and bool(a.space.level))
    return None


# ---- statistics
def statistics_of_v(roots: Sequence[Node]) -> list[Node]:
    """Statistics of what is affine in v, from v's own: no tail then has to be computed for them."""
    rewriter = _OfV(roots)
    return [rewriter.of(root) for root in roots]


class _OfV:
    def __init__(self, roots: Sequence[Node]):
        self.graph: Graph = roots[0].graph
        self.facts = Facts(roots, keeps=False)
        self.known: dict[Node, Node] = {}

    def of(self, node: Node) -> Node:
        if node not in self.known:
            self.known[node] = self._rewritten(node)
        return self.known[node]

    def _rewritten(self, node: Node) -> Node:
        if node.op == "sum" and node.attr == "s" and (affine := self._affine(node.args[0])):
            a, b, z = affine
            total = self.graph.sum("s", z) * b
            return total if a is None else total + a * self.graph.count("s", "e")
        if node.op == "variance" and "s" in node.attr and (affine := self._affine(node.args[0])):
            return self._variance(node, *affine)
        args = [self.of(a) for a in node.args]
        if node.is_scalar_op:
            return self.graph.scalar(node.op, *args)
        if node.op == "detach":
            return self.graph.detach(args[0])
        return self.graph.make(node.op, *args, attr=node.attr, space=node.space)

    def _affine(self, node: Node) -> tuple[Node | None, Node, Node] | None:
        """(a, b, v) of a + b·v, a and b of a channel."""
        if node.is_leaf("z") or node.space != ELEMENTS or self.facts.degree[node.id] != 1:
            return None
        a, b = self.facts.affine(node) or (None, None)
        if b is None or not is_static(b) or (a is not None and not (a.space.small and is_static(a))):
            return None
        return a, b, self.graph.leaf("z", ELEMENTS, "z")

    def _variance(self, node: Node, a: Node | None, b: Node, z: Node) -> Node:
        """Of planes' variances, and of their means about the mean of all (Chan)."""
        plane = self.graph.mean(z, ("s",))
        own = self.graph.variance(z, plane, ("s",)) * (b * b)
        others = [step for step in node.attr if step != "s"]
        if not others:
            return own
        apart = (plane * b if a is None else plane * b + a) - self.of(node.args[1])
        return self.graph.mean(own + apart * apart, others)


# ---- monotone functions
_CHEAP = {"add", "sub", "mul", "div", "neg"}


def _monotone_chain(a: Node, axis: str) -> tuple[list[tuple[Node, int]], list[Node]]:
    """The monotone functions that make a, outermost first, with the place of the operand that varies along the axis; and those factors
    among them whose sign isn't known. It ends with a function whose direction is; a choice by sign has to save more than it costs: a
    function that isn't cheap, or statistics."""
    chain: list[tuple[Node, int]] = []
    factors: list[Node] = []
    length, known_factors, saves = 0, 0, False
    while (at := _operand_that_varies(a, axis)) is not None:
        if _direction(a, at) == 0:
            if a.op != "mul" and (a.op, at) != ("div", 0):
                break
            factors.append(a.args[1 - at])
        chain.append((a, at))
        saves = saves or a.op not in _CHEAP or any(_level(x) for i, x in enumerate(a.args) if i != at)
        if _direction(a, at) and (saves or not factors):
            length, known_factors = len(chain), len(factors)
        a = a.args[at]
    return chain[:length], factors[:known_factors]


def _operand_that_varies(a: Node, axis: str) -> int | None:
    """The place of the one operand of a scalar function that varies along the axis."""
    if not a.is_scalar_op:
        return None
    places = [i for i, x in enumerate(a.args) if x.space.has(axis)]
    return places[0] if len(places) == 1 else None


def _direction(a: Node, at: int) -> int:
    """+1 if a function rises with that operand, -1 if it falls, 0 if neither is known."""
    if a.op == "add":
        return 1
    if a.op == "sub":
        return 1 if at == 0 else -1
    if a.op in ("mul", "div"):
        low, high = bounds(a.args[1 - at])
        if (a.op == "div" and at == 1) or (low, high) == (0.0, 0.0):
            return 0
        return (low >= 0) - (high <= 0)
    if a.op == "leaky_relu":
        return int(at == 0 and a.args[1].is_const() and a.args[1].attr >= 0)
    if a.op in ("max", "min"):
        return 1
    return SCALARS[a.op].monotone if at == 0 else 0


# ---- bounds
def bounds(node: Node, depth: int = 8) -> Interval:
    """Between what a node's values lie, NaN aside; looked into no deeper than `depth`."""
    if node.is_const():
        return node.attr, node.attr
    if depth == 0:
        return ALL
    if node.op in ("take", "detach"):
        return bounds(node.args[0], depth - 1)
    if not node.is_scalar_op or node.is_boolean:
        return ALL
    operands = [bounds(a, depth - 1) for a in node.args]
    if node.op in _INTERVALS:
        return _INTERVALS[node.op](*operands)
    return SCALARS[node.op].bounds


def _sum_of(a: Interval, b: Interval) -> Interval:
    ends = a[0] + b[0], a[1] + b[1]
    return ALL if any(map(math.isnan, ends)) else ends


def _negative(a: Interval) -> Interval:
    return -a[1], -a[0]


def _product(a: Interval, b: Interval) -> Interval:
    ends = [0.0 if 0.0 in (x, y) else x * y for x in a for y in b]
    return min(ends), max(ends)


def _quotient(a: Interval, b: Interval) -> Interval:
    return ALL if b[0] <= 0 <= b[1] else _product(a, (1 / b[1], 1 / b[0]))


def _clamped(x: Interval, low: Interval, high: Interval) -> Interval:
    return min(max(x[0], low[0]), high[0]), min(max(x[1], low[1]), high[1])


_INTERVALS = {
    "add": _sum_of,
    "sub": lambda a, b: _sum_of(a, _negative(b)),
    "mul": _product,
    "div": _quotient,
    "neg": _negative,
    "max": lambda a, b: (max(a[0], b[0]), max(a[1], b[1])),
    "min": lambda a, b: (min(a[0], b[0]), min(a[1], b[1])),
    "clamp_min": lambda x, low: (max(x[0], low[0]), max(x[1], low[1])),
    "clamp_max": lambda x, high: (min(x[0], high[0]), min(x[1], high[1])),
    "clamp": _clamped,
    "hardtanh": _clamped,
    "relu": lambda x: (max(x[0], 0.0), max(x[1], 0.0)),
}


def _within_bounds(op: str, node: Node) -> Node:
    """The function without what its operand's bounds rule out. Strictly inside, so that gradients at a bound stay as they are; what is 0
    by relu has no gradient already."""
    if node.op != op:
        return node
    x = node.args[0]
    low, high = bounds(x)
    if op == "relu" and (low > 0 or x.op == "relu"):
        return x
    if op == "leaky_relu" and (low > 0 or x.op == "relu"):
        return x
    if op in ("clamp", "hardtanh") and all(b.is_const() for b in node.args[1:]):
        return x if node.args[1].attr < low and high < node.args[2].attr else node
    if op == "hardswish" and -3 < low and high < 3:
        return x * (x + 3.0) / 6.0
    return node
