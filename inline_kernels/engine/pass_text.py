"""The text of a pass: a struct, whose operator() is the tail, a line an operation. Here what all passes have, members and values at a place;
plane_text.py is of those over positions, small_text.py of those over small values.

What the words of a pass mean (plane, point, lanes) stands in kernels/load/load.h. Operations have their texts from engine/scalars.py.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from .graph import Node, text_of
from .naming import TYPES, Names, identifier, index_of, literal, local
from .passes import Array, Key, Program, Unsupported
from .scalars import compared


def in_one_line(lines: Sequence[str]) -> str:
    return " ".join(line.split("  //")[0] for line in lines)


def indented(lines: Sequence[str | list]) -> list[str]:
    """A scope's lines, one step in."""
    each = [[line] if isinstance(line, str) else indented(line) for line in lines]
    return [f"  {line}" for found in each for line in found]


@dataclass
class Scope:
    """Where lines are written. at: the point of its elements. n, c: what it calls them. Values by node."""

    kind: str
    at: str
    level: str
    n: str
    c: str
    lines: list[str | list]  # a list: the lines of a loop, one step in
    parent: Scope | None = None
    known: dict[Node, str] = field(default_factory=dict)
    axis: str = ""  # what a loop runs along: lanes along small values' axis, a window's walk along its level

    def and_outer(self) -> Iterable[Scope]:
        scope = self
        while scope:
            yield scope
            scope = scope.parent

    def knows(self, node: Node) -> bool:
        return any(node in each.known for each in self.and_outer())


class PassText:
    """The struct of one pass."""

    def __init__(self, name: str, program: Program, names: Names, number: int):
        self.name, self.program, self.names = name, program, names
        self.graph = program.graph
        self.targets = program.passes[number].targets
        self.pointers: dict[str, str] = {}  # by name, its declaration's type
        self.numbers: dict[str, str] = {}
        self.scalar = False  # is it of single positions?
        self.spreads = False  # … do positions have values of the windows that hold them?
        self.reads_v = False
        self.scopes_of_v: list[Scope] = []  # where v is read, in this order
        self.before_v: set[str] = set()  # what is written before v's last value is read
        self.turns = False  # has it at its points what the program `turns`?
        self.made: set[Key] = set()  # arrays of this pass
        self.lazy: set[Node] = set()  # gates behind which alone something is drawn

    # ------------------------------------------------------------------------------------------------------ members

    def pointer(self, array: Array, written: bool = False) -> str:
        ctype = TYPES[array.kind]
        if written or not self.pointers.get(array.name):
            self.pointers[array.name] = f"{ctype}*" if written else f"const {ctype}*"
        return array.name

    def number(self, name: str, ctype: str = "int64_t") -> str:
        self.numbers[name] = ctype
        return name

    def extent(self, level: str) -> str:
        return self.number(f"extent_{level}", "load::Extent")

    def pool(self, level: str) -> str:
        known, before = self.graph.levels[level], 3 - self.graph.dimensions
        sizes = [*(1,) * before, *known.window]
        if not known.is_apart:
            sizes += [*(1,) * before, *known.stride, *(0,) * before, *known.padding]
        return f"load::Pool<{', '.join(str(size or 0) for size in sizes)}>()"

    def index(self, space, scope: Scope) -> str:
        """Of a small array."""
        return index_of(space, scope.n, scope.c, self.number("C") if space.n and space.c else "")

    def _struct(
        self, parameter: str, declared: str, body: list[str], constants: Sequence[str] = ()
    ) -> list[str]:
        members: dict[str, list[str]] = {}
        for name, ctype in {**self.pointers, **self.numbers}.items():
            members.setdefault(ctype, []).append(name)
        lines = [f"struct {self.name} {{"]
        for ctype, found in members.items():
            star = "*" if ctype.endswith("*") else ""
            lines.append(f"  {ctype.rstrip('*')} {', '.join(star + name for name in found)};")
        self.members = [name for found in members.values() for name in found]
        lines += [f"  static constexpr {each};" for each in constants]
        lines.append(f"  template <class {parameter}> ON_DEVICE void operator()({declared}) const {{")
        lines += [f"    {line}" for line in body]
        return [*lines, "  }", "};"]

    # ------------------------------------------------------------------------------------------------------- values

    def home(self, node: Node, scope: Scope) -> Scope:
        """The outermost scope that can have the node's value."""
        while scope.parent:
            if scope.kind == "lanes":
                if node.space.has(scope.axis):
                    break
            elif node.space.small:
                if node.space.c and scope.kind == "channels":
                    break
            elif scope.kind != "channels" or node.space.c:
                break
            scope = scope.parent
        return scope

    def real(self, scope: Scope) -> str:
        return "double" if scope.kind in ("small", "lanes") else "real"

    def value(self, node: Node, scope: Scope) -> str:
        scope = self.home(node, scope)
        for each in scope.and_outer():
            if node in each.known:
                return each.known[node]
            if each.kind == "lanes" and node.space.has(each.axis):
                break  # outside is another lane's
        if node.op == "const":
            return literal(node.attr, self.real(scope))
        if node.op in ("detach", "spread") and not self._array(node):
            return self.value(node.args[0], scope)
        text, comment = self._text(node, scope)
        if re.fullmatch(r"[\w.]+", text):
            scope.known[node] = text
            return text
        name = local(node)
        scope.lines.append(f"const auto {name} = {text};" + (f"  // {comment}" if comment else ""))
        scope.known[node] = name
        return name

    def _text(self, node: Node, scope: Scope) -> tuple[str, str]:
        array = self._array(node)
        if array:
            return self._read(array, scope), ""
        if node.op == "leaf":
            return self._leaf(node, scope)
        if node.op == "count":
            return f"{self.real(scope)}({self._count(*node.attr)})", ""
        if node in self.lazy and scope.kind == "point":
            return self._lazily(node, scope), "drawn where it counts"
        if node.is_scalar_op:
            args = [self._operand(a, scope) for a in node.args]
            rounded = node.op == "mul" and node in self.program.measured
            text = "math::product({0}, {1})" if rounded else text_of(node)
            return text.format(*compared(node.op, args, node.args)), ""
        if node.op in ("put", "upsample"):
            return self._spread(node, scope), ""
        if node.op == "picked":
            return self._is_picked(node.args[0], scope), ""
        return self._reduction(node, scope), ""

    def _reduction(self, node: Node, scope: Scope) -> str:
        """A value of others than those at its own place."""
        raise NotImplementedError

    def _lazily(self, node: Node, scope: Scope) -> str:
        """A choice between zero and what is computed only where a lane of the point has it."""
        mask, a, b = node.args
        is_first = b.op == "const"
        inner = Scope("point", scope.at, scope.level, scope.n, scope.c, [], scope)
        test, value = self._operand(mask, scope), self.value(a if is_first else b, inner)
        body = in_one_line([*inner.lines, f"return {value};"])
        return f"{scope.at}.lazily({test if is_first else f'!({test})'}, [&] {{ {body} }})"

    def _operand(self, node: Node, scope: Scope) -> str:
        text = self.value(node, scope)
        return f"({text})" if text.startswith("-") else text

    def _array(self, node: Node) -> Array | None:
        if node in self.program.given:
            return self.program.given[node]
        key = Key("value", node)
        return self.program.arrays.get(key) if key not in self.made else None

    def _read(self, array: Array, scope: Scope) -> str:
        name = self.pointer(array)
        if array.space.small:
            at = self.index(array.space, scope)
            if array.space.c and self._has_packs(scope):
                return f"load::of({name}, {at})"
            text = f"{name}[{at}]"
            return f"{self.real(scope)}({text})" if array.kind not in ("index", "byte") else text
        if array.name == self.program.turns:
            self.turns = True
            return f"{scope.at}.turned({name})"
        if array.space.c or (scope.kind == "point" and scope.c == "0"):
            text = f"{scope.at}.read({name})"
        else:
            text = f"{scope.at}.shared({name})"
        return f"{text} != 0" if array.kind == "mask" else text

    def _has_packs(self, scope: Scope) -> bool:
        """May a scope's channel be some neighbours? On a GPU, channels last."""
        return not self.program.on_cpu and scope.kind not in ("small", "lanes")

    def _channel(self, scope: Scope) -> str:
        """Its number, to be compared with an index."""
        return scope.c if self._has_packs(scope) else f"int({scope.c})"

    def _leaf(self, node: Node, scope: Scope) -> tuple[str, str]:
        name, kind = node.attr
        if kind == "z":
            self.reads_v = True
            self.scopes_of_v.append(scope)
            self.turns |= self.program.turns == "v"
            return f"{scope.at}.v()", "conv"
        if kind == "scalar":
            self.number(identifier(name), "real")
            return f"double({identifier(name)})" if self.real(scope) == "double" else identifier(name), name
        if kind == "drawn":
            return self._drawn(node, scope)
        return self._read(self.names.incoming[node], scope), name

    def _drawn(self, node: Node, scope: Scope) -> tuple[str, str]:
        if node.space.small:
            raise Unsupported("dropout of values without positions")
        which, probability = self.names.random[node.attr[0]]
        seed = self.pointer(Array("seed", "seed", node.space))
        self.number("number")
        mask = f"{scope.at}.kept({seed}, number, {which}, {probability!r})"
        real = self.real(scope)
        return f"math::select({mask}, {real}(1), {real}(0))", "dropout"

    def _count(self, axis: str, what) -> str:
        if axis == "group":
            return f"{self.number('C')} / {what}"
        if axis in ("n", "c"):
            return self.number(axis.upper())
        if axis == "s":
            return f"{self.extent(what)}.positions()"
        level = self.graph.levels[what]
        if None not in level.window:
            return str(math.prod(level.window))
        fine = self.extent(level.parent)
        sides = "DHW"[3 - len(level.window) :]
        return " * ".join(str(w) if w else f"{fine}.{side}" for w, side in zip(level.window, sides))

    def _is_picked(self, index: Node, scope: Scope) -> str:
        """Is this channel, or position, the one of that index?"""
        text = self.value(index, scope)
        return f"{scope.at}.is_at({text})" if index.attr[0] == "s" else f"{text} == {self._channel(scope)}"

    def _spread(self, node: Node, scope: Scope) -> str:
        """What lies at windows, or at picked channels, as a value of each position."""
        real = self.real(scope)
        if node.op == "put" and node.args[1].attr[0] in ("c", "s"):
            picked, values = self._is_picked(node.args[1], scope), self.value(node.args[0], scope)
            return f"math::select({picked}, {values}, {real}(0))"
        level = node.args[1].attr[0] if node.op == "put" else node.attr
        if scope.kind == "point" and scope.axis == level and self.graph.levels[level].is_apart:
            value = self.value(node.args[0], scope.parent)  # of the window that is walked
            return self._put(node, value, scope.parent, scope.at) if node.op == "put" else value
        inner = Scope("point", "w", level, scope.n, scope.c, [], scope)
        inner.kind, self.spreads = "looked up", True
        value = self.value(node.args[0], inner)
        if node.op == "put":
            value = self._put(node, value, inner, "w")
        body = in_one_line([*inner.lines, f"return w.zero() + {value};"])
        return f"{scope.at}.spread({self.pool(level)}, {self.extent(level)}, [&](const auto& w) {{ {body} }})"

    def _put(self, node: Node, value: str, window: Scope, at: str) -> str:
        """`value` where the point `at` has the place that was picked in the window."""
        return f"math::select({self.value(node.args[1], window)} == {at}.place, {value}, real(0))"
