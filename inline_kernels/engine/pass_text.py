"""The text of a pass: a struct, whose operator() is the tail, a line an operation.

What the words of a pass mean (plane, point, lanes) stands in kernels/load/load.h. Operations have their texts from engine/scalars.py.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from .gates import is_drawn, is_gate, zero_with
from .graph import Node, order, walk
from .naming import PASSES, TYPES, Names, identifier, index_of, literal, local
from .passes import (
    Array,
    Key,
    Planes,
    Program,
    Small,
    Unsupported,
    is_static,
    of_positions,
    over_channels,
    over_windows,
)
from .scalars import SCALARS, compared

_SLICES = 32  # of a sample's channels, among blocks of a pass over small values, at most


def _total_of(key: Key) -> str:
    return f"{'moments' if key.what == 'moments' else 'sum'}{key.node.id}"


def _in_one_line(lines: Sequence[str]) -> str:
    return " ".join(line.split("  //")[0] for line in lines)


@dataclass
class Scope:
    """Where lines are written. at: the point of its elements. n, c: what it calls them. Values by node."""

    kind: str
    at: str
    level: str
    n: str
    c: str
    lines: list[str]
    parent: Scope | None = None
    known: dict[Node, str] = field(default_factory=dict)
    axis: str = ""  # of small values: what a loop of lanes runs along

    def and_outer(self) -> Iterable[Scope]:
        scope = self
        while scope:
            yield scope
            scope = scope.parent

    def knows(self, node: Node) -> bool:
        return any(node in each.known for each in self.and_outer())


class _Text:
    """The struct of one pass."""

    def __init__(self, name: str, program: Program, names: Names, number: int):
        self.name, self.program, self.names = name, program, names
        self.graph = program.graph
        self.targets = program.passes[number].targets
        self.finer: list[Key] = []  # sums over the level below, that its windows' walk has yet to make
        self.slices, self.over_all_channels, self.groups = 1, False, set()  # of small values
        self.pointers: dict[str, str] = {}  # by name, its declaration's type
        self.numbers: dict[str, str] = {}
        self.scalar = False  # is it of single positions?
        self.picks_channel = False  # … at a channel of their own each?
        self.chooses = False  # … whose channels have positions of their own each?
        self.held: tuple[int, ...] = ()  # on a GPU: how many small values by channel, and sums, a plane has
        self.reads_v = self.writes_dz = False
        self.made: set[Key] = set()  # arrays of this pass
        self.fresh: dict[Key, str] = {}  # of the planes' merged, those of this loop's turn
        self.lazy: set[Node] = set()  # gates behind which alone something is drawn
        self.takes: dict[
            Node, list[Node]
        ] = {}  # by an extreme over channels: what is kept of its channel while it is looked for

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
        window = self.graph.levels[level].window
        return f"load::Pool<{', '.join(str(w or 0) for w in (1,) * (3 - len(window)) + window)}>()"

    def index(self, space, scope: Scope) -> str:
        """Of a small array."""
        return index_of(space, scope.n, scope.c, self.number("C") if space.n and space.c else "")

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
            text = "math::product({0}, {1})" if rounded else SCALARS[node.op].text
            return text.format(*compared(node.op, args, node.args)), ""
        if node.op in ("put", "upsample"):
            return self._spread(node, scope), ""
        if node.op == "picked":
            return f"{self.value(node.args[0], scope)} == {self._channel(scope)}", ""
        if scope.kind in ("small", "lanes"):
            return self._small_reduction(node, scope), ""
        if node.op == "take":
            return self._chosen(node, scope), ""
        raise Unsupported(f"{node.op} {node.attr} at {node.space} inside a pass")

    def _lazily(self, node: Node, scope: Scope) -> str:
        """A choice between zero and what is computed only where a lane of the point has it."""
        mask, a, b = node.args
        is_first = b.op == "const"
        inner = Scope("point", scope.at, scope.level, scope.n, scope.c, [], scope)
        test, value = self._operand(mask, scope), self.value(a if is_first else b, inner)
        body = _in_one_line([*inner.lines, f"return {value};"])
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

    # --------------------------------------------------------------------------------------- reductions inside a point

    def prepare(self, nodes: Sequence[Node], scope: Scope) -> None:
        """Makes the reductions over channels and windows that these nodes hang on at this point, loop by loop."""
        depth: dict[Node, int] = {}
        seen: dict[Node, int] = {}

        def visit(node: Node) -> int:
            """The number of loops before the node is known."""
            if node in seen:
                return seen[node]
            seen[node] = 0
            if self._array(node) or is_static(node) or node.op == "leaf" or node.space.small:
                return 0
            reduces = over_channels(node) or over_windows(node)
            if reduces and node.op != "take":
                inner = node.args if over_channels(node) else ()
                seen[node] = depth[node] = 1 + max((visit(a) for a in inner), default=0)
            elif reduces:  # take
                of, index = node.args
                inner = visit(of) if over_channels(node) else 0
                seen[node] = max(visit(index), inner)
                if (
                    self.program.on_cpu
                    and over_channels(node)
                    and depth.get(index, 0) > inner
                    and of is not index.args[0]
                ):
                    self.takes.setdefault(index, []).append(node)
            elif node.op in ("put", "upsample"):
                inner = node.args if node.op == "put" and node.args[1].attr[0] == "c" else ()
                seen[node] = max((visit(a) for a in inner), default=0)
            else:
                seen[node] = max((visit(a) for a in node.args), default=0)
            return seen[node]

        for node in nodes:
            visit(node)
        groups: dict[tuple, list[Node]] = {}
        for node, number in depth.items():
            if not scope.knows(node):
                axis = "c" if over_channels(node) else node.attr if node.op == "sum" else node.attr[0]
                groups.setdefault((number, axis), []).append(node)
        for (_, axis), together in sorted(groups.items()):
            self._loop(together, axis, scope)

    def _loop(self, nodes: list[Node], axis: str, scope: Scope) -> None:
        """One loop at a point over channels or a window, for several reductions."""
        if axis == "c":
            inner = Scope("channels", "e", scope.level, "e.n", "e.c", [], scope)
            head = f"{scope.at}.channels({self.number('C')}, [&](const auto& e) {{"
        else:
            parent = self.graph.levels[axis].parent
            inner = Scope("point", "e", parent, scope.n, scope.c, [], scope)
            head = f"{scope.at}.window({self.pool(axis)}, {self.extent(parent)}, [&](const auto& e) {{"
            self.scalar = True
            self.prepare([node.args[0] for node in nodes], inner)
            self._add_finer(inner)
        declared, ends = [], []
        shared = axis == "c" and not self.program.on_cpu  # may lanes have some of the channels each?
        own, of = ("own_", "_channel") if shared else ("", "")
        for node in nodes:
            name = local(node)
            term = self._broadcast(node.args[0], inner)
            if node.op == "pick":
                best = f"best{node.id}"
                word = "largest" if node.attr[1] > 0 else "smallest"
                declared.append(f"auto {own}{best} = {scope.at}.{word}{of}();")
                ends += [f"const auto {best} = {scope.at}.all({own}{best});"] * shared
                last = axis != "c" and None not in self.graph.levels[axis].window
                place = "e.c" if axis == "c" else "e.place"
                take = f"{own}{best}.{'take_last' if last else 'take'}({term}, {place})"
                takes = self.takes.get(node, ())
                inner.lines.append(f"const auto better{node.id} = {take};" if takes else f"{take};")
                for each in takes:
                    name = local(each)
                    declared.append(f"auto {name} = {scope.at}.zero();")
                    value = self.value(each.args[0], inner)
                    inner.lines.append(f"{name} = math::select(better{node.id}, {value}, {name});")
                    scope.known[each] = name
                scope.known[node] = f"best{node.id}.index"
                continue
            declared.append(f"auto {own}{name} = {scope.at}.{'channel_' * shared}zero();")
            total = f"{scope.at}.all({own}{name})" if shared else name
            declares = "const auto " * shared
            if node.op == "variance":
                mean = self.value(node.args[1], inner)
                square = f"math::square({self._operand(node.args[0], inner)} - {mean})"
                inner.lines.append(f"{own}{name} += {square};")
                ends.append(f"{declares}{name} = {total} / real({self.number('C')});  // variance")
            else:
                inner.lines.append(f"{own}{name} += {term};")
                ends += [f"{declares}{name} = {total};"] * shared
            scope.known[node] = name
        scope.lines += [*declared, head, *[f"  {line}" for line in inner.lines], "});", *ends]

    def _add_finer(self, inner: Scope) -> None:
        """The sums over the positions of a window: in the first walk over windows."""
        finer, self.finer = self.finer, []
        self.prepare([key.source for key in finer], inner)
        for key in finer:
            inner.lines.append(f"{_total_of(key)}.add({self._broadcast(key.source, inner)});")

    def _chosen(self, node: Node, scope: Scope) -> str:
        """A value at a picked place."""
        of, index = node.args
        if self._array(index) is None and of is index.args[0]:
            if not scope.knows(index):
                raise Unsupported("an extreme that no loop has found")
            return f"best{index.id}.value"
        self.scalar = self.chooses = True
        place, axis = self.value(index, scope), index.attr[0]
        known = f"chosen{index.id}"
        if axis == "c":
            self.picks_channel = True
            made = f"const auto {known} = {scope.at}.channel({place}, {self.number('C')});"
            inner = Scope("channels", known, scope.level, scope.n, f"{known}.c", [], scope)
        else:
            parent = self.graph.levels[axis].parent
            made = (
                f"const auto {known} = {scope.at}.chosen({self.pool(axis)}, {self.extent(parent)}, {place});"
            )
            inner = Scope("point", known, parent, scope.n, scope.c, [], scope)
        self.prepare([of], inner)
        value = self.value(of, inner)
        if made not in scope.lines:
            scope.lines.append(made)
        # Lines of another value at the same place have other names: a node has one.
        name = f"at_{known}_{of.id}"
        scope.lines += [
            f"const auto {name} = [&] {{",
            *[f"  {line}" for line in inner.lines],
            f"  return {value};",
            "}();",
        ]
        return name

    def _spread(self, node: Node, scope: Scope) -> str:
        """What lies at windows, or at picked channels, as a value of each position."""
        real = self.real(scope)
        if node.op == "put" and node.args[1].attr[0] == "c":
            index, values = self.value(node.args[1], scope), self.value(node.args[0], scope)
            return f"math::select({index} == {self._channel(scope)}, {values}, {real}(0))"
        if node.op == "put" and node.args[1].attr[0] == "s":
            raise Unsupported("an extreme over all positions")
        level = node.args[1].attr[0] if node.op == "put" else node.attr
        inner = Scope("point", "w", level, scope.n, scope.c, [], scope)
        inner.kind = "looked up"
        value = self.value(node.args[0], inner)
        if node.op == "put":
            value = f"math::select({self.value(node.args[1], inner)} == w.place, {value}, real(0))"
        body = _in_one_line([*inner.lines, f"return w.zero() + {value};"])
        return f"{scope.at}.spread({self.pool(level)}, {self.extent(level)}, [&](const auto& w) {{ {body} }})"

    # -------------------------------------------------------------------------------------------------- planes passes

    def planes(self, each: Planes) -> list[str]:
        body: list[str] = []
        plane = Scope("plane", "plane", "", "plane.n", "plane.c", body)
        point = Scope("point", "at", each.level, "at.n", "0" if each.by_sample else "at.c", [], plane)
        self.made = {key for key in self.targets if key.what == "value"}
        terms = {key: key.source for key in self.targets}
        finer = self.finer = list(each.finer)
        self.prepare([node for key, node in terms.items() if key not in finer], point)
        self.lazy = self._lazy(terms.values()) if self.program.on_cpu else set()
        totals, ends, last = [], [], None
        closes = self.program.closes
        if closes and self.program.passes[closes[0]] is each:
            self.pointer(PASSES, written=True)
            totals.append("auto any = plane.any();")
            point.lines.append(f"any.add({self._broadcast(closes[1], point)});")
            names = "".join(f", sum{key.node.id}" for key in self.targets)
            ends.append(f"plane.note(passes, any{names});")
        for key, node in terms.items():
            array = self.program.arrays[key]
            if key.what == "value":
                to = self.pointer(array, written=True)
                if each.by_sample and array.space.c:
                    if last is None:
                        last = Scope("channels", "e", each.level, "e.n", "e.c", [], point)
                    last.lines.append(f"e.write({to}, {self._broadcast(node, last)});")
                else:
                    self.writes_dz |= array.name == "dz"
                    write = "write_v" if self.program.turns and array.name == "dz" else "write"
                    write = "write_operand" if array.name == self.program.operand else write
                    point.lines.append(f"at.{write}({to}, {self._broadcast(node, point)});")
                continue
            name = _total_of(key)
            totals.append(f"auto {name} = plane.{'moments' if key.what == 'moments' else 'sum'}();")
            if key not in finer:
                point.lines.append(f"{name}.add({self._broadcast(node, point)});")
            ends.append(f"plane.reduce({self.pointer(array, written=True)}, {name});")
        if last:
            point.lines += [
                f"at.channels({self.number('C')}, [&](const auto& e) {{",
                *[f"  {line}" for line in last.lines],
                "});",
            ]
        walk = ["plane.each([&](const auto& at) {", *[f"  {line}" for line in point.lines], "});"]
        idle = self._idle(each, terms, plane)
        if idle:
            written = [line for line in point.lines if line.startswith("at.write")]
            zeros = [re.sub(r", \w+\);", ", at.zero());", line) for line in written]
            body.append(idle)
            walk[0] = f"if (!idle) {walk[0]}"
            walk += [f"else plane.each([&](const auto& at) {{ {' '.join(zeros)} }});"] * bool(zeros)
        if finer:  # what lies in no window
            parent, self.finer = self.graph.levels[each.level].parent, finer
            rest = Scope("point", "e", parent, "plane.n", "plane.c", [], plane)
            self._add_finer(rest)
            head = f"plane.rest({self.pool(each.level)}, {self.extent(parent)}, [&](const auto& e) {{"
            walk += [head, *[f"  {line}" for line in rest.lines], "});"]
        if not (each.by_sample or self.program.on_cpu):
            self.held = sum(node.space.c for node in plane.known), len(totals)
        return self._struct("Plane", "Plane& plane", [*body, *totals, *walk, *ends])

    def _lazy(self, roots: Iterable[Node]) -> set[Node]:
        def may_be(node: Node) -> bool:
            return is_gate(node) and is_drawn(node)

        def below(node: Node) -> Sequence[Node]:
            return () if self._array(node) else node.args[:1] if may_be(node) else node.args

        seen = [node for node in walk(roots, below) if not self._array(node)]
        gates = {gate for node in seen if may_be(node) for gate in order([node]) if may_be(gate)}
        return set() if any(node.is_leaf("drawn") for node in seen) else gates

    def _idle(self, each: Planes, terms: dict[Key, Node], plane: Scope) -> str:
        """When a plane's terms are all zero, because the gradient that they are made of is (`Program.gate`), and small values."""
        gate = self.program.gate
        if not gate or each.by_sample or each.level != "e" or self.scalar:
            return ""
        found = [zero_with(node, gate[0]) for node in terms.values()]
        if None in found:
            return ""
        zeros = [self.value(node, plane) for node in dict.fromkeys(n for nodes in found for n in nodes)]
        finite = [name for node, name in plane.known.items() if node.space.small and name not in zeros]
        count = self._read(gate[1], plane)
        tests = [f"load::zeros({', '.join([count, *zeros])})"] + [
            f"load::finite({', '.join(finite)})"
        ] * bool(finite)
        return f"const bool idle = {' && '.join(tests)};"

    def _broadcast(self, node: Node, scope: Scope) -> str:
        """A value for each position, of what may be the same at all of them."""
        text = self.value(node, scope)
        while node.op in ("spread", "detach"):
            node = node.args[0]
        return f"{scope.at}.zero() + {text}" if node.space.small else text

    def _struct(self, parameter: str, declared: str, body: list[str]) -> list[str]:
        members: dict[str, list[str]] = {}
        for name, ctype in {**self.pointers, **self.numbers}.items():
            members.setdefault(ctype, []).append(name)
        lines = [f"struct {self.name} {{"]
        for ctype, found in members.items():
            star = "*" if ctype.endswith("*") else ""
            lines.append(f"  {ctype.rstrip('*')} {', '.join(star + name for name in found)};")
        self.members = [name for found in members.values() for name in found]
        if self.scalar:
            windows = "" if self.picks_channel else ", kWindows = true"
            lines.append(f"  static constexpr bool kScalar = true{windows};")
        if self.held:
            single, writes = (str(each).lower() for each in (self.chooses, bool(self.made)))
            lines.append(f"  static constexpr bool kSingle = {single}, kWrites = {writes};")
            lines.append(f"  static constexpr int kHeld = {self.held[0]}, kSums = {self.held[1]};")
        lines.append(f"  template <class {parameter}> ON_DEVICE void operator()({declared}) const {{")
        lines += [f"    {line}" for line in body]
        return [*lines, "  }", "};"]

    # --------------------------------------------------------------------------------------------------- small passes

    def small(self, each: Small) -> list[str]:
        index = {"sample": "n", "channel": "c"}.get(each.mode)
        body = [f"const int64_t {index} = block.index;"] if index else []
        self.made = set(self.targets)
        done: set[Key] = set()
        pending = list(self.targets)
        while pending:
            first = self._loop_of(pending[0], each.mode)
            together: list[Key] = []
            for key in pending:
                known = {*done, *together} if self._of_own_lanes(key, first) else done
                needs = self.program.small_needs(key)
                waits = [need for need in needs if need in self.made and need not in known]
                if self._loop_of(key, each.mode) == first and not waits:
                    together.append(key)
            self.made -= done
            body += self._small_loop(together, first)
            done |= set(together)
            pending = [key for key in pending if key not in together]
        if (
            each.mode == "sample"
            and self._loop_of(each.targets[0], each.mode) == "c"
            and self._may_be_sliced(body)
        ):
            body = [line.replace("block.each(C,", "block.each_channel(C,", 1) for line in body]
        used = [line for line in body if not line.startswith("const int64_t")]
        if index and not re.search(rf"\b{index}\b", "\n".join(used)):
            body.pop(0)
        return self._struct("Block", "const Block& block", body)

    def _may_be_sliced(self, body: Sequence[str]) -> bool:
        """May blocks share a sample's channels? Where all that a value is made of is of its group. Sets `slices`, how many at most."""
        heads = [line for line in body if line.startswith("block.each(")]
        if (
            self.program.on_cpu
            or self.over_all_channels
            or not all(h.startswith("block.each(C,") for h in heads)
        ):
            return False
        common = math.gcd(*self.groups) or _SLICES
        self.slices = max(n for n in range(1, _SLICES + 1) if common % n == 0)
        return self.slices > 1

    def _of_own_lanes(self, key: Key, axis: str) -> bool:
        """Are of values made in the same loop, along this axis, only those of its own turn read, which its lanes have?"""
        reducing = [
            n for n in self.program._inside(key.node) if n.op in ("sum", "group", "variance", "pick", "take")
        ]
        return key.what == "value" and (not axis or all(n.op == "sum" and n.attr == "s" for n in reducing))

    def _loop_of(self, key: Key, mode: str) -> str:
        """Over what a block's loop runs: "n", "c" or one turn."""
        space = self.program.arrays[key].space
        if mode == "one" and space.n and space.c:
            raise Unsupported("values of all samples' channels in one block")
        if mode == "sample":
            return "c" if space.c else ""
        if mode == "channel":
            return "n" if space.n else ""
        return "n" if space.n else "c" if space.c else ""

    def _small_loop(self, keys: list[Key], axis: str) -> list[str]:
        scope = Scope("small", "", "", "n", "c", [], None)
        self.fresh.clear()
        writes = []  # behind all that is read: no read waits for another's result
        for key in keys:
            array = self.program.arrays[key]
            to = self.pointer(array, written=True)
            at = f"{to} + {self.index(array.space, scope)}" if self.index(array.space, scope) != "0" else to
            if key.what == "value":
                text = scope.known[key.node] = self.value(key.node, scope)
            else:
                text = self.fresh[key] = self._merged(key, scope)
            writes.append(f"lanes.write({at}, {text});")
        scope.lines += writes
        count = self.number(axis.upper()) if axis else "1"
        head = f"block.each({count}, [&](int64_t{' ' + axis if axis else ''}, const auto& lanes) {{"
        return [head, *[f"  {line}" for line in scope.lines], "});"]

    def _merged(self, key: Key, scope: Scope) -> str:
        """A plane's parts together. Of moments the mean or m2."""
        parts_key = Key("sums" if key.what == "sum" else "moments", key.node)
        array = self.program.arrays[parts_key]
        parts = self.number(f"parts_{array.parts}")
        index = self.index(key.source.space._replace(level=""), scope)
        first = f"({index}) * {parts}" if " " in index else f"{index} * {parts}"
        name = self.pointer(array)
        if key.what == "sum":
            sum = f"lanes.sum({parts}, [&](int64_t i) {{ return {name}[{first} + i]; }})"
            scope.lines.append(f"const double {_total_of(key)} = {sum};")
            scope.known[key.node] = _total_of(key)
            return _total_of(key)
        known = f"plane{key.node.id}"
        line = f"const Moments<double> {known} = lanes.merge({name} + {first}, {parts});"
        if line not in scope.lines:
            scope.lines.append(line)
        return f"{known}.{key.what}"

    def _small_array(self, key: Key, scope: Scope) -> str:
        if scope.kind == "small" and key in self.fresh:
            return self.fresh[key]
        array = self.program.arrays[key]
        return f"{self.pointer(array)}[{self.index(array.space, scope)}]"

    def _small_reduction(self, node: Node, scope: Scope) -> str:
        if of_positions(node):
            if node.op == "sum" and node.args[0] not in self.program.moments_of:
                return self._small_array(Key("sum", node), scope)
            of = node.args[0]
            count = f"double({self._count('s', of.space.level)})"
            if node.op == "sum":
                return f"{count} * {self._small_array(Key('mean', of), scope)}"
            return self._variance(node, scope, count)
        if node.op in ("sum", "group"):
            return self._lanes_sum([node.attr], scope, lambda inner: self.value(node.args[0], inner))
        if node.op == "variance":
            return self._variance(node, scope, "")
        if node.op in ("pick", "take"):
            self.over_all_channels = True
        if node.op == "pick":
            inner = self._lanes(scope, "c")
            term = self.value(node.args[0], inner)
            body = _in_one_line([*inner.lines, f"return {term};"])
            word = "largest" if node.attr[1] > 0 else "smallest"
            return f"lanes.{word}({self.number('C')}, [&](int64_t c) {{ {body} }})"
        if node.op == "take":
            inner = self._lanes(scope, "c")
            place = self.value(node.args[1], scope)
            term = self.value(node.args[0], inner)
            body = _in_one_line([f"const int64_t c = {place};", *inner.lines, f"return {term};"])
            return f"[&] {{ {body} }}()"
        raise Unsupported(f"{node.op} {node.attr} of small values")

    def _lanes(self, scope: Scope, axis: str) -> Scope:
        return Scope("lanes", "", "", "n", "c", [], scope, axis=axis)

    def _variance(self, node: Node, scope: Scope, count: str) -> str:
        """Of means and second moments of planes (Chan), or of small values, about the mean of all."""
        of, mean = node.args
        steps = [step for step in node.attr if step != "s"]

        def term(inner: Scope) -> str:
            about = self.value(mean, inner)
            if not count:
                return f"math::square({self.value(of, inner)} - {about})"
            own = f"{self._small_array(Key('mean', of), inner)} - {about}"
            return f"{self._small_array(Key('m2', of), inner)} + {count} * math::square({own})"

        total = term(scope) if not steps else self._lanes_sum(steps, scope, term)
        counts = [self._count("group", s) if isinstance(s, int) else self.number(s.upper()) for s in steps]
        divisor = " * ".join([count] * bool(count) + [f"double({each})" for each in counts])
        return f"({total}) / ({divisor})"

    def _lanes_sum(self, steps: list, scope: Scope, term) -> str:
        self.over_all_channels |= "c" in steps
        self.groups |= {step for step in steps if isinstance(step, int)}
        if len(steps) == 1:
            axis = "c" if isinstance(steps[0], int) else steps[0]
            inner = self._lanes(scope, axis)
            text = term(inner)
            lines = _in_one_line([*inner.lines, f"return {text};"])
            if isinstance(steps[0], int):
                size = f"({self.number('C')} / {steps[0]})"
                own = f"{scope.c} / {size} * {size}"
                return f"[&] {{ const int64_t first = {own}; return lanes.sum({size}, [&](int64_t i) {{ const int64_t c = first + i; {lines} }}); }}()"
            return f"lanes.sum({self.number(axis.upper())}, [&](int64_t {axis}) {{ {lines} }})"
        if set(steps) <= {"n", "c"}:
            inner = self._lanes(scope, "n")
            inner = self._lanes(inner, "c")
            text = term(inner)
            lines = _in_one_line([*inner.parent.lines, *inner.lines, f"return {text};"])
            N, C = self.number("N"), self.number("C")
            return (
                f"lanes.sum({N} * {C}, [&](int64_t i) {{ const int64_t n = i / {C}, c = i % {C}; {lines} }})"
            )
        raise Unsupported(f"statistics over {steps}")


def struct(name: str, program: Program, names: Names, number: int) -> tuple[list[str], _Text]:
    each, text = program.passes[number], _Text(name, program, names, number)
    lines = text.planes(each) if isinstance(each, Planes) else text.small(each)
    return lines, text
