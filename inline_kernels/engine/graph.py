"""A segment's tail as a graph of hash-consed nodes over typed index spaces, its adjoint as nodes of the same graph, and facts of both.

A node is (op, args, attr, space). Its **space** says along what it varies: samples (n), channels (c), and one spatial **level**: "" none,
"e" the convolution's positions, "w", "v", ... windows of them (`Graph.level`). A value is broadcast, silently, along what it doesn't vary
along; two levels never meet in one scalar operation (`upsample` goes down, `window sums` and `take` go up). Sizes are never in the graph:
a `count` node stands for a number of samples, channels of a group, positions of a level or positions of a window.

| op | args; attr | value |
|---|---|---|
| const | attr: float | a number of the program's text |
| leaf | attr: (name, kind) | given at run time; kinds in `LEAF_KINDS` |
| count | attr: (axis, what) | ("n", ""), ("c", ""), ("group", groups): channels of one, ("s", level): positions, ("window", level): positions of one of its windows |
| a scalar's name | operands | engine/scalars.py |
| sum | a; axis | over "n", over "c", over all positions "s", or over each window of a level (its name) |
| group | a; groups | each channel gets the sum over its group's channels (self-adjoint) |
| variance | a, mean; steps | the biased variance of a over `steps` ("s", "n", "c", or a number of groups), given its mean over them |
| pick | a; (axis, sign) | where a's maximum (+1) or minimum (-1) over "c", "s" or each window of a level is. Among equal ones the first; NaN wins: the first one, but the last one in windows without a whole axis, as in eager's pools, and over "s" where (axis, sign, "pool") says so. Over "s" the sign is +1: a minimum is a maximum of -a |
| take | a, pick | a's value there |
| put | a, pick | the adjoint of take: a there, the sum where several windows have picked a position, zero elsewhere |
| upsample | a; level | the adjoint of a window sum: at each position the sum of the values of those windows of that level that hold it, zero outside of all |
| spread | a; level | a, which has no positions, as a value of that level |
| detach | a; path | a's value; the adjoint goes to the node `path`, which is never evaluated, or nowhere (None) |

Reverse mode (`Graph.adjoints`) needs no rule for norms, softmax or logsumexp: they are built of these. An adjoint that is zero is no
node (None), so zeros times infinities never arise but where autograd has them, with one exception: values that are zero because they
were not picked stay zero when multiplied, where autograd's NaN·0 is NaN.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from .scalars import SCALARS

LEAF_KINDS = {
    "z": "the convolution's result without its bias",
    "dy": "the adjoint of the segment's result",
    "y": "the segment's result, which backward finds",
    "parameter": "a tensor with a gradient, by channel or one number",
    "buffer": "a tensor without one: running statistics",
    "input": "a tensor from outside the segment: a residual",
    "scalar": "an attribute of the model that is a number",
    "drawn": "1 where dropout keeps a value, 0 where it doesn't",
}
# "e", then windows in the order in which a program meets them.
LEVEL_NAMES = ("e", "w", "v", "u", "t", "r", "q", "p", "o", "m", "l", "k")


class Space(NamedTuple):
    """Along what a value varies."""

    n: bool
    c: bool
    level: str

    def union(self, other: Space) -> Space:
        if self.level and other.level and self.level != other.level:
            raise ValueError(f"values of the levels {self.level} and {other.level} meet in one operation")
        return Space(self.n or other.n, self.c or other.c, self.level or other.level)

    @property
    def small(self) -> bool:
        """No positions: a number a channel of a sample, or fewer."""
        return not self.level

    def has(self, axis: str) -> bool:
        """Does it vary along "n", "c" or positions ("s", or a level's name)?"""
        return self.n if axis == "n" else self.c if axis == "c" else bool(self.level)

    def __str__(self) -> str:
        return "n" * self.n + "c" * self.c + self.level or "1"


ONE = Space(False, False, "")
BY_CHANNEL = Space(False, True, "")
ELEMENTS = Space(True, True, "e")


class Level(NamedTuple):
    """Windows of the level `parent`, along each spatial axis: positions of one, None: all of that axis; how far they are apart; places that the
    first and the last may have outside of the axis, at most half of their own, which count for nothing. Behind the last window is a rest."""

    parent: str
    window: tuple[int | None, ...]
    stride: tuple[int | None, ...]
    padding: tuple[int, ...]

    @property
    def is_apart(self) -> bool:
        """Do the windows lie side by side, so that a position is in at most one, and all of a window's places are positions?"""
        return self.stride == self.window and not any(self.padding)

    def sizes(self, parent: Sequence[int]) -> tuple[int, ...]:
        """How many windows there are along axes of such sizes."""
        axes = zip(parent, self.window, self.stride, self.padding, strict=True)
        return tuple(
            1 if w is None else s // w if (step, around) == (w, 0) else (s + 2 * around - w) // step + 1
            for s, w, step, around in axes
        )


class Node:
    """Made by a Graph only; two nodes that compute the same are one object. `id`s rise from operands to results."""

    __slots__ = ("graph", "id", "op", "args", "attr", "space")

    def __init__(self, graph: Graph, number: int, op: str, args: tuple[Node, ...], attr, space: Space):
        self.graph, self.id, self.op, self.args, self.attr, self.space = graph, number, op, args, attr, space

    @property
    def is_boolean(self) -> bool:
        if self.op in ("take", "put", "where"):
            return self.args[1 if self.op == "where" else 0].is_boolean
        return self.op == "picked" or (self.op in SCALARS and SCALARS[self.op].boolean)

    @property
    def is_scalar_op(self) -> bool:
        return self.op in SCALARS

    @property
    def is_extreme(self) -> bool:
        """Is it the value at the place that was picked for it?"""
        return self.op == "take" and self.args[1].args[0] is self.args[0]

    def is_leaf(self, *kinds: str) -> bool:
        return self.op == "leaf" and self.attr[1] in kinds

    def is_const(self, *values: float) -> bool:
        return self.op == "const" and (not values or self.attr in values)

    def __repr__(self) -> str:
        return f"{self.op}#{self.id}:{self.space}"

    # Arithmetic, for derivatives that read like formulas.
    def apply(self, op: str, *others) -> Node:
        return self.graph.scalar(op, self, *others)

    def __add__(self, other):
        return self.apply("add", other)

    def __sub__(self, other):
        return self.apply("sub", other)

    def __mul__(self, other):
        return self.apply("mul", other)

    def __truediv__(self, other):
        return self.apply("div", other)

    def __radd__(self, other):
        return self.graph.scalar("add", other, self)

    def __rsub__(self, other):
        return self.graph.scalar("sub", other, self)

    def __rmul__(self, other):
        return self.graph.scalar("mul", other, self)

    def __rtruediv__(self, other):
        return self.graph.scalar("div", other, self)

    def __neg__(self):
        return self.apply("neg")

    def __and__(self, other):
        return self.apply("and", other)

    def __or__(self, other):
        return self.apply("or", other)

    def gt(self, other):
        return self.apply("gt", other)

    def ge(self, other):
        return self.apply("ge", other)

    def lt(self, other):
        return self.graph.scalar("gt", other, self)

    def le(self, other):
        return self.graph.scalar("ge", other, self)

    def eq(self, other):
        return self.apply("eq", other)

    def where(self, a, b):
        """a where this truth value holds, b elsewhere."""
        return self.graph.scalar("where", self, a, b)


class Graph:
    """The nodes of one segment, whose convolution has `dimensions` spatial axes. Not to be built by two threads at once; read by any."""

    def __init__(self, dimensions: int):
        self.dimensions = dimensions
        self.nodes: list[Node] = []
        self.levels: dict[str, Level] = {}
        self._table: dict[tuple, Node] = {}

    # ---- nodes
    def make(self, op: str, *args: Node, attr=None, space: Space) -> Node:
        """The node, new or found; nothing is simplified."""
        name = (attr.hex() if isinstance(attr, float) else attr, *(a.id for a in args))  # -0.0 isn't 0.0
        key = op, name, space
        found = self._table.get(key)
        if found is None:
            found = self._table[key] = Node(self, len(self.nodes), op, args, attr, space)
            self.nodes.append(found)
        return found

    def const(self, value: float) -> Node:
        return self.make("const", attr=float(value), space=ONE)

    def leaf(self, name: str, space: Space, kind: str) -> Node:
        if kind not in LEAF_KINDS:
            raise ValueError(f"a leaf is one of {', '.join(LEAF_KINDS)}, not {kind!r}")
        return self.make("leaf", attr=(name, kind), space=space)

    def count(self, axis: str, what: str | int = "") -> Node:
        return self.make("count", attr=(axis, what), space=ONE)

    def level(
        self,
        parent: str,
        window: Sequence[int | None],
        stride: Sequence[int | None] | None = None,
        padding: Sequence[int] | None = None,
    ) -> str:
        """The name of the level of those windows of `parent`: without a stride side by side."""
        around = (0,) * self.dimensions if padding is None else tuple(padding)
        level = Level(parent, tuple(window), tuple(window if stride is None else stride), around)
        for what, sizes in ("window", level.window), ("stride", level.stride):
            if len(sizes) != self.dimensions or any(size is not None and size < 1 for size in sizes):
                raise ValueError(f"a {what} of {self.dimensions} positive sizes was expected, not {sizes}")
        if len(around) != self.dimensions or any(
            p and not 0 < 2 * p <= w for p, w in zip(around, level.window)
        ):
            raise ValueError(
                f"a padding of at most half of the window {level.window} was expected, not {around}"
            )
        for name, known in self.levels.items():
            if known == level:
                return name
        if len(self.levels) + 1 == len(LEVEL_NAMES):
            raise ValueError(f"at most {len(LEVEL_NAMES) - 1} different windows in one segment")
        name = LEVEL_NAMES[len(self.levels) + 1]
        self.levels[name] = level
        return name

    def wrap(self, value: Node | float) -> Node:
        return value if isinstance(value, Node) else self.const(value)

    # ---- scalar operations, with the simplifications that adjoints need; each is exact, and keeps NaN and signed zeros
    def scalar(self, op: str, *operands: Node | float) -> Node:
        args = tuple(self.wrap(a) for a in operands)
        simpler = _fold(self, op, args) or _simplify(self, op, args) or _sparse(self, op, args)
        if simpler is not None:
            return simpler
        if op in ("add", "mul", "max", "min", "eq", "and", "or") and args[0].is_const():
            args = args[::-1]  # numbers last
        space = ONE
        for each in args:
            space = space.union(each.space)
        return self.make(op, *args, space=space)

    # ---- sums
    def sum(self, axis: str, a: Node) -> Node:
        """The sum as it stands, not taken apart: forward's, whose order of operations is the model's."""
        if not a.space.has(axis):
            return a * self.count_along(axis)
        return self.make("sum", a, attr=axis, space=self._summed(axis, a.space))

    def total(self, axis: str, a: Node) -> Node:
        """The sum, taken apart: factors and terms that don't vary along the axis are taken out, sums of sparse values are over what is
        there. Two terms that vary stay one sum: their own could cancel."""
        if not a.space.has(axis):
            return a * self.count_along(axis)
        if axis == "s" and a.op == "upsample" and not any(self.levels[a.attr].padding):
            return self.total("s", a.args[0] * self.count("window", a.args[0].space.level))
        if a.op == "put" and _axis_of(a.args[1]) == axis and self._is_apart(axis):
            return a.args[0]
        if axis == "s" and a.op == "put" and _axis_of(a.args[1]) != "c":
            return self._total_as("s", a.args[0], a.args[1].space.level)
        if a.op == "neg":
            return -self.total(axis, a.args[0])
        if a.op == "detach" and a.attr is None:
            return self.detach(self.total(axis, a.args[0]))
        if a.op == "mul":
            for x, y in (a.args, a.args[::-1]):
                if not x.space.has(axis):
                    return self.total(axis, y) * x
        if a.op == "div" and not a.args[1].space.has(axis):
            return self.total(axis, a.args[0]) / a.args[1]
        if a.op in ("add", "sub") and not all(x.space.has(axis) for x in a.args):
            return self.scalar(a.op, *(self._total_as(axis, x, a.space.level) for x in a.args))
        return self.make("sum", a, attr=axis, space=self._summed(axis, a.space))

    def group(self, a: Node, groups: int) -> Node:
        if a.op == "mul":
            for x, y in (a.args, a.args[::-1]):
                if not x.space.c:
                    return self.group(y, groups) * x
        if a.op == "div" and not a.args[1].space.c:
            return self.group(a.args[0], groups) / a.args[1]
        if not a.space.c:
            return a * self.count("group", groups)
        return self.make("group", a, attr=groups, space=a.space)

    def _total_as(self, axis: str, a: Node, level: str = "") -> Node:
        """The sum of a as a value of that level: where it doesn't vary along the axis, a multiple."""
        return self.total(axis, a) if a.space.has(axis) else a * self.count_along(axis, level)

    def count_along(self, axis: str, level: str = "") -> Node:
        """How many values a sum over an axis adds up; over "s", the positions of that level."""
        if axis in ("n", "c"):
            return self.count(axis)
        if axis == "s" and not level:
            raise ValueError("a sum over positions of a value that has none")
        return self.count("s", level) if axis == "s" else self.count("window", axis)

    def _is_apart(self, axis: str) -> bool:
        """Is nothing reduced twice along this axis?"""
        return axis not in self.levels or self.levels[axis].is_apart

    def _summed(self, axis: str, space: Space) -> Space:
        if axis == "n":
            return space._replace(n=False)
        if axis == "c":
            return space._replace(c=False)
        if axis == "s":
            return space._replace(level="")
        if self.levels[axis].parent != space.level:
            raise ValueError(
                f"windows of the level {self.levels[axis].parent} were expected, not of {space.level}"
            )
        return space._replace(level=axis)

    # ---- statistics, over steps: "s", "n", "c", or a number of groups
    def mean(self, a: Node, steps: Sequence[str | int]) -> Node:
        total, count = a, None
        for step in steps:
            if isinstance(step, int):
                total, n = self.group(total, step), self.count("group", step)
            elif step == "s" and not a.space.level:
                continue
            else:
                n = self.count_along(step, a.space.level)
                total = self.sum(step, total) if total.space.has(step) else total * n
            count = n if count is None else count * n
        return total if count is None else total / count

    def variance(self, a: Node, mean: Node, steps: Sequence[str | int]) -> Node:
        return self.make("variance", a, mean, attr=tuple(steps), space=mean.space)

    def statistics_count(self, steps: Sequence[str | int], level: str) -> Node:
        """How many values make one mean of values at that level."""
        count = self.const(1.0)
        for step in steps:
            if isinstance(step, int):
                count = count * self.count("group", step)
            elif step != "s" or level:
                count = count * self.count_along(step, level)
        return count

    # ---- selections
    def pick(self, axis: str, a: Node, sign: int, pools: bool = False) -> Node:
        a, sign = (-a, 1) if axis == "s" and sign < 0 else (a, sign)
        attr = (axis, sign, "pool") if pools else (axis, sign)
        return self.make("pick", a, attr=attr, space=self._summed(axis, a.space))

    def extreme(self, axis: str, a: Node, sign: int, pools: bool = False) -> Node:
        """a's maximum or minimum over the axis, with its adjoint to where it was first found. pools: as eager's pools find it, over "s"."""
        if axis == "s" and sign < 0:
            return -self.extreme(axis, -a, 1, pools)
        index = self.pick(axis, a, sign, pools)
        return self.make("take", a, index, space=index.space)

    def take(self, index: Node, a: Node) -> Node:
        """a's values at the picked places: through what is elementwise, down to what has to be kept."""
        source = index.args[0].space
        if not (a.space.c if _axis_of(index) == "c" else a.space.level):
            return a
        if a.op == "detach":
            return self.detach(self.take(index, a.args[0]))
        if a.is_scalar_op:
            return self.scalar(a.op, *(self.take(index, x) for x in a.args))
        if a.op == "put" and a.args[1] is index and self._is_apart(_axis_of(index)):
            return a.args[0]
        space = self._summed(_axis_of(index), a.space.union(Space(False, False, source.level)))
        return self.make("take", a, index, space=space.union(index.space))

    def put(self, index: Node, values: Node) -> Node:
        source = index.args[0].space
        return self.make("put", values, index, space=source._replace(n=source.n or values.space.n))

    def picked(self, index: Node) -> Node:
        """Is a channel, or a position, the picked one?"""
        return self.make("picked", index, space=index.args[0].space)

    def upsample(self, a: Node, level: str) -> Node:
        """a's windows' values at the positions of the parent level."""
        if self.levels[level].parent == "" or a.space.level not in ("", level):
            raise ValueError(f"values of windows {level} were expected, not of {a.space.level}")
        a = a if a.space.level else self.make("spread", a, attr=level, space=a.space._replace(level=level))
        return self.make("upsample", a, attr=level, space=a.space._replace(level=self.levels[level].parent))

    def detach(self, a: Node, path: Node | None = None) -> Node:
        """a's value. Its adjoint goes to `path` in a's place, or nowhere."""
        return self.make("detach", a, attr=path, space=a.space)

    # ---- reverse mode
    def fit(self, adjoint: Node, result: Space, operand: Space) -> Node:
        """The adjoint of an operand, summed over what the operand was broadcast along in making a result of that space. An adjoint that
        doesn't vary along such an axis counts as often as the axis is long."""
        level = adjoint.space.level or result.level
        if level and not operand.level:
            adjoint = self._total_as("s", adjoint, level)
        if (adjoint.space.n or result.n) and not operand.n:
            adjoint = self._total_as("n", adjoint)
        if (adjoint.space.c or result.c) and not operand.c:
            adjoint = self._total_as("c", adjoint)
        return adjoint

    def adjoints(
        self, y: Node, dy: Node, wanted: Sequence[Node], was: Callable[[Node], Node] = lambda node: node
    ) -> list[Node | None]:
        """The adjoints of the `wanted` leaves, given dy of y; None where y doesn't depend on one. was(node): what derivatives read in the
        place of a value of forward's, but for leaves."""
        nodes = _in_order(walk([y], lambda node: (*node.args, *differentiated(node))))
        ids = {w.id for w in wanted}
        needed: set[int] = set()
        for node in nodes:
            if node.id in ids or any(a.id in needed for a in differentiated(node)):
                needed.add(node.id)
        found: dict[int, Node] = {y.id: dy}
        for node in reversed(nodes):
            g = found.get(node.id)
            if g is None or node.id not in needed:
                continue
            for arg, part in zip(differentiated(node), self._parts(node, g, was), strict=True):
                if part is None or arg.id not in needed:
                    continue
                part = self.fit(part, node.space, arg.space)
                found[arg.id] = found[arg.id] + part if arg.id in found else part
        return [found.get(w.id) for w in wanted]

    def _parts(self, node: Node, g: Node, was: Callable[[Node], Node]) -> Sequence[Node | None]:
        """The adjoints of what `differentiated` names."""
        if node.op in SCALARS:
            if not (derivative := SCALARS[node.op].derivative):
                return [None] * len(node.args)
            return derivative(g, was(node), *[a if a.op == "leaf" else was(a) for a in node.args])
        if node.op == "sum":
            windows = node.attr not in ("n", "c", "s")
            return [self.upsample(g, node.attr) if windows else g]
        if node.op == "group":
            return [self.group(g, node.attr)]
        if node.op == "variance":  # the mean's adjoint is zero: deviations add up to nothing
            a, mean = map(was, node.args)
            for step in node.attr:
                g = self.group(g, step) if isinstance(step, int) else g
            return [(a - mean) * (g * 2.0 / self.statistics_count(node.attr, a.space.level)), None]
        if node.op == "take":
            return [self.put(was(node.args[1]), g), None]
        if node.op == "upsample":
            return [self.total(node.attr, g)]
        if node.op in ("detach", "spread"):
            return [g] * len(differentiated(node))
        if node.op in ("const", "leaf", "count", "pick"):
            return [None] * len(node.args)
        raise NotImplementedError(f"no adjoint of {node.op}")


def _axis_of(index: Node) -> str:
    return index.attr[0]


def differentiated(node: Node) -> tuple[Node, ...]:
    """To what a node's adjoint goes on."""
    if node.op == "detach":
        return () if node.attr is None else (node.attr,)
    return node.args


def walk(roots: Iterable, below: Callable[..., Iterable] = lambda node: node.args) -> list:
    """The roots and all on the ways down from them, each once: from a node on to what `below` gives, its operands or some of them."""
    found, stack = {}, [*roots]
    while stack:
        node = stack.pop()
        if node not in found:
            found[node] = None
            stack += below(node)
    return [*found]


def down_to(roots: Iterable[Node], stops: Callable[[Node], bool]) -> list[Node]:
    """The first nodes on each way down at which it stops."""
    return [node for node in walk(roots, lambda node: () if stops(node) else node.args) if stops(node)]


# ---- C++ of scalar operations
# Their result is no product; a function's may be, as its last step.
_SUMS_AND_CHOICES = frozenset(
    "add sub rest max min relu abs clamp clamp_min clamp_max hardtanh where".split()
)
_APART = {"add": "math::difference({0}, -{1})", "sub": "math::difference({0}, {1})"}


def text_of(node: Node) -> str:
    """… of operands {0}, {1}. A product and what was reduced of its like, as in a softmax and its gradient, may leave nothing but rounding: both
    are rounded then as when they were reduced, and no compiler makes a multiply-add of them."""
    return _APART[node.op] if node.op in _APART and _is_deviation(node) else SCALARS[node.op].text


def _is_deviation(node: Node) -> bool:
    """Is it of a product, and of what was reduced, which varies along fewer axes?"""
    a, b = map(_spread, node.args)
    if node.space.small or not any(map(_may_be_product, (a, b))):
        return False
    return any(x.space != node.space and any(map(_reduces, walk([x]))) for x in (a, b))


def _may_be_product(node: Node) -> bool:
    """What has no positions is read, or was made in double."""
    return node.is_scalar_op and node.op not in _SUMS_AND_CHOICES and not node.space.small


def _spread(node: Node) -> Node:
    """What it is but for its sign and for the places where it stands."""
    return _spread(node.args[0]) if node.op in ("neg", "detach", "spread", "upsample") else node


def _reduces(node: Node) -> bool:
    return node.op in ("sum", "group", "take")


def _in_order(nodes: Iterable[Node]) -> list[Node]:
    return sorted(nodes, key=lambda node: node.id)


def order(roots: Iterable[Node], known: Iterable[Node] = ()) -> list[Node]:
    """All that the roots are computed from, and themselves, operands first; without what is known, and what only that is computed from."""
    nodes = walk(roots, lambda node: () if node in known else node.args)
    return _in_order(node for node in nodes if node not in known)


# ---- rewrites
_FOLDED = {
    "add": lambda a, b: a + b,
    "sub": lambda a, b: a - b,
    "mul": lambda a, b: a * b,
    "neg": lambda a: -a,
}


def _fold(graph: Graph, op: str, args: tuple[Node, ...]) -> Node | None:
    """Numbers of numbers."""
    if not all(a.is_const() for a in args):
        return None
    values = [a.attr for a in args]
    if op in _FOLDED:
        return graph.const(_FOLDED[op](*values))
    if op == "div" and values[1] != 0:
        return graph.const(values[0] / values[1])
    return None


def _simplify(graph: Graph, op: str, args: tuple[Node, ...]) -> Node | None:
    if op == "sub" and args[1].is_const(0.0) and math.copysign(1.0, args[1].attr) > 0:
        return args[0]
    if op == "mul":
        for a, b in (args, args[::-1]):
            if a.is_const(1.0):
                return b
    if op == "div":
        a, b = args
        if b.is_const() and b.attr and math.isfinite(b.attr) and abs(math.frexp(b.attr)[0]) == 0.5:
            return a * (1.0 / b.attr)  # a power of two: as exact
    if op == "neg" and args[0].op == "neg":
        return args[0].args[0]
    if op == "where" and args[1] is args[2]:
        return args[1]
    return None


def _sparse(graph: Graph, op: str, args: tuple[Node, ...]) -> Node | None:
    """What is zero outside of the picked places stays that: the operation is done at the places."""
    if op == "neg" and args[0].op == "put":
        return graph.put(args[0].args[1], -args[0].args[0])
    if op == "add" and all(a.op == "put" for a in args) and args[0].args[1] is args[1].args[1]:
        return graph.put(args[0].args[1], args[0].args[0] + args[1].args[0])
    if op == "mul":
        for s, t in (args, args[::-1]):
            if s.op == "put" and _meets(s, t):
                return graph.put(s.args[1], s.args[0] * graph.take(s.args[1], t))
    if op == "div" and args[0].op == "put" and _meets(*args):
        s, t = args
        return graph.put(s.args[1], s.args[0] / graph.take(s.args[1], t))
    if op == "where":
        return _sparse_where(graph, *args)
    return None


def _sparse_where(graph: Graph, mask: Node, a: Node, b: Node) -> Node | None:
    sparse = a if a.op == "put" else b
    if sparse.op != "put" or not _meets(sparse, mask):
        return None
    index, values = sparse.args[1], []
    for branch in (a, b):
        if branch.op == "put" and branch.args[1] is index:
            values.append(branch.args[0])
        elif branch.is_const(0.0):
            values.append(branch)
        else:
            return None
    return graph.put(index, graph.scalar("where", graph.take(index, mask), *values))


def _meets(sparse: Node, other: Node) -> bool:
    """Does `other` vary only along what the sparse value's source varies along, so that it can be taken at the places?"""
    return other.space.level in ("", sparse.space.level) and (sparse.space.c or not other.space.c)


# ---- facts
NONLINEAR = 99


class Facts:
    """What a schedule asks of a set of roots, forward or backward.

    `nodes`: all of them, operands first. `of_dy`, `of_z`: ids of what depends on them. `degree[id]`: the degree in z at elements (0, 1, 2
    ...; `NONLINEAR`), where masks, picked places, windows', positions' and small values count as known. `level[id]`: the number of passes
    over positions that have to end before a node is known, where what forward `keeps` counts as known from the start."""

    def __init__(self, roots: Sequence[Node], keeps: bool):
        """`keeps`: the roots are a backward pass, which finds forward's small values, windows and places kept."""
        self.keeps, self.nodes = keeps, order(roots)
        self.of_dy = self._reached_by("dy")
        self.of_z = self._reached_by("z")
        self.degree: dict[int, int] = {}
        self.level: dict[int, int] = {}
        for node in self.nodes:
            self.degree[node.id] = self._degree(node)
            self.level[node.id] = self._level(node)

    def _reached_by(self, kind: str) -> set[int]:
        reached: set[int] = set()
        for node in self.nodes:
            if node.is_leaf(kind) or any(a.id in reached for a in node.args):
                reached.add(node.id)
        return reached

    def at_elements(self, node: Node) -> bool:
        return node.space.c and node.space.level == "e"

    def _degree(self, node: Node) -> int:
        if node.is_leaf("z"):
            return 1
        if node.id not in self.of_z or not self.at_elements(node) or node.is_boolean:
            return 0
        if node.op in ("pick", "take", "put", "upsample", "spread"):
            return 0
        degrees = [self.degree[a.id] for a in node.args]
        if node.op == "mul":
            return min(sum(degrees), NONLINEAR)
        if node.op == "div":
            return degrees[0] if degrees[1] == 0 else NONLINEAR
        if node.op == "where":
            return max(degrees[1:])
        linear = node.op == "detach" or (
            node.op in SCALARS and (SCALARS[node.op].linear or SCALARS[node.op].pieces)
        )
        if linear or not any(degrees):
            return max(degrees, default=0)
        return NONLINEAR

    def is_kept(self, node: Node) -> str | None:
        """As what forward can hand this value to backward: "small", "index" (a place in a window), "channel" (a place among channels),
        "window", "position", "mask", "input"; None: it is computed again."""
        if node.id in self.of_dy or node.op in ("const", "count"):
            return None
        if node.op == "leaf":
            return "input" if node.attr[1] == "input" else None
        if node.id not in self.of_z:
            return None
        if node.op == "pick":
            return "channel" if _axis_of(node) == "c" else "index"
        if node.is_scalar_op:  # computed again from what reductions gave
            return "mask" if node.is_boolean and self.at_elements(node) else None
        if node.space.small and node.op != "detach":
            return "small"
        if node.op == "take":
            return "position" if node.space.level == "e" else "window"
        if node.op == "sum" and node.attr not in ("n", "c", "s"):
            return "window"
        if node.op == "variance" or (node.op == "sum" and node.attr == "c"):
            return "position"
        if (
            node.op == "detach" and not node.space.c and not node.space.small
        ):  # logsumexp: its gradient needs nothing else
            return "position"
        return None

    def _level(self, node: Node) -> int:
        if self.keeps and self.is_kept(node) not in (None, "mask", "input"):
            return 0
        if node.op == "variance":  # is had together with its mean
            return self.level[node.args[0].id] + ("s" in node.attr)
        level = max((self.level[a.id] for a in node.args), default=0)
        if node.op == "pick":
            return level + (_axis_of(node) == "s")
        return level + (node.op == "sum" and node.attr not in ("n", "c"))

    def affine(self, node: Node) -> tuple[Node | None, Node | None] | None:
        """(A, B) with node = A + B·z, B small and A free of z's elements but for masks (None: zero); None if it is not that."""
        if self.degree[node.id] == 0:
            return node, None
        if node.is_leaf("z"):
            return None, node.graph.const(1.0)
        if node.op in ("add", "sub", "neg"):
            parts = [self.affine(a) for a in node.args]
            return None if None in parts else tuple(_combine(node.op, *p) for p in zip(*parts))
        if node.op == "mul":
            for x, y in (node.args, node.args[::-1]):
                if y.space.small:
                    return _each(self.affine(x), lambda part, y=y: part * y)
        if node.op == "div" and node.args[1].space.small:
            return _each(self.affine(node.args[0]), lambda part: part / node.args[1])
        return None


def _combine(op: str, a: Node | None, b: Node | None = None) -> Node | None:
    if op == "neg" or a is None:
        lone = a if op == "neg" else b
        return lone if lone is None or op == "add" else -lone
    return a if b is None else a.apply(op, b)


def _each(pair, f):
    return None if pair is None else tuple(None if part is None else f(part) for part in pair)
