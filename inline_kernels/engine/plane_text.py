"""The text of a pass over positions, plane by plane: what it writes at each of them, and its sums.

Reductions over channels, and over a window, are loops at a point (`_prepare`); values at picked places are computed there again (`_chosen`). On a CPU
a loop over channels finds what took an earlier one much in its core's cache (`_held`).
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from .gates import is_drawn, is_gate, zero_with
from .graph import ELEMENTS, Node, order, walk
from .naming import PASSES, Names, local, total_of
from .pass_text import PassText, Scope, indented
from .passes import FEW, Array, Key, Planes, Program, Unsupported, is_static, over_channels, over_windows
from .scalars import instructions

MUCH = 5  # instructions: an exponential's; to store a value and to load it again takes less
LIGHT = 16  # … of a walk over channels: more take longer than memory does (trials/axes.json)
_EXTREME = re.compile(r"auto (?:own_)?(best\d+) = \w+\.(?:largest|smallest)(?:_row)?\(\);$")


def _without_places(lines: Sequence[str]) -> list[str]:
    """Extremes whose place nobody asks for are looked for without it, which takes half the time."""
    text = "\n".join(lines)
    return [
        line if not (best := _EXTREME.search(line)) or f"{best[1]}.index" in text else f"{line[:-3]}_value();"
        for line in lines
    ]


class Last(NamedTuple):
    """How a pass goes over arrays that lie channels last, as kernels/load/last.cuh's struct of this name decides: of single positions? does it write
    at positions, or read windows? Small values by channel, sums, and instructions of a point."""

    single: bool
    writes: bool
    windows: bool
    held: int
    sums: int
    instructions: int

    MOST_AT_ONCE, OF_A_SUM, FEW = 24, 8, 4  # its kMostAtOnce and kOfASum; Sum::kFew

    @property
    def _is_few(self) -> bool:
        return not self.sums and self.held <= 4

    def channels(self, pack: int) -> int:
        """Of a lane. pack: in 16 bytes."""
        return 1 if self.single else pack if self._is_few else 4

    @property
    def at_once(self) -> int:
        """Positions that a lane reads before what is made of the first is written, or summed."""
        is_much = self.instructions + self.OF_A_SUM * self.sums > self.MOST_AT_ONCE
        alone = self.held + 3 * self.sums > 16 or self.writes and (self.windows or is_much)
        return 1 if alone else self.FEW

    def blocks(self, pack: int) -> int:
        """Of a multiprocessor, at least; values are float32."""
        holds = self.held + 3 * self.sums > (7 if self.at_once > 1 else 9)
        return 2 if (pack if self._is_few and not self.single else 4) > 4 or holds else 3


class PlaneText(PassText):
    def __init__(self, name: str, program: Program, names: Names, number: int):
        super().__init__(name, program, names, number)
        self.finer: list[Key] = []  # sums over the level below, that its windows' walk has yet to make
        self.picks_channel = False  # single positions at a channel of their own each?
        self.chooses = False  # … whose channels have positions of their own each?
        self.rows = ""  # the level whose windows are whole rows, if a CPU takes its points one by one, and vectors along their rows
        self.of_rows: Scope | None = None  # the last walk over those
        self.axis = ""  # the level whose windows are whole axes, if a GPU's lanes share them, and how many terms those have, which is found out here
        self.terms = ""
        self.last: Last | None = None  # of a pass by channel, on a GPU
        self.walks = 0  # over a point's channels, or its windows that are whole axes
        self.loops: list[Scope] = []  # over channels at a point of the pass
        self.held: list[Node] = []  # of what these compute, what later ones read again
        self.known_with_v: list[Node] = []  # what is computed of an element where v is read last
        before, left = program.left or (number, None)
        self.leaves = left if number == before else None  # in v's place
        self.finds = left if number > before else None  # … there
        self.takes: dict[
            Node, list[Node]
        ] = {}  # by an extreme: what is kept of its place while it is looked for

    def lines(self, each: Planes) -> list[str]:
        body: list[str] = []
        plane = Scope("plane", "plane", "", "plane.n", "plane.c", body)
        self.point = point = Scope(
            "point", "at", each.level, "at.n", "0" if each.by_sample else "at.c", [], plane
        )
        self.made = {key for key in self.targets if key.what == "value"}
        terms = {key: key.source for key in self.targets}
        finer = self.finer = list(each.finer)
        if self.program.on_cpu and self._is_of_rows(each, terms.values()):
            self.rows = each.level
        if self.program.walks_again(each.level) and not each.by_sample:
            self.axis = each.level
        within = [key.source for key in each.within]
        apart = {*finer, *each.within}
        self._prepare([node for key, node in terms.items() if key not in apart], point, within)
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
            if key in each.within:
                continue
            if key.what == "value":
                to = self.pointer(array, written=True)
                if each.by_sample and array.space.c:
                    if last is None:
                        last = Scope("channels", "e", each.level, "e.n", "e.c", [], point)
                    turned = array.name == self.program.turns == "dz"  # where all lies channels last
                    last.lines.append(
                        f"e.{self._writing(array, turned)}({to}, {self._broadcast(node, last)});"
                    )
                else:
                    turned = array.name == self.program.turns
                    self.turns |= turned
                    write = self._writing(array, turned)
                    point.lines.append(f"at.{write}({to}, {self._broadcast(node, point)});")
                continue
            name, term = total_of(key), self._broadcast(node, point) if key not in finer else ""
            totals.append(f"auto {name} = plane.{self._summing(key, array)}();")
            if key not in finer:
                point.lines.append(f"{name}.add({term}{', at' * (key.what == 'largest')});")
            ends.append(f"plane.reduce({self.pointer(array, written=True)}, {name});")
        self._leave(each, last)
        if within:
            parent = self.graph.levels[each.level].parent
            inner = Scope("point", "e", parent, "at.n", "at.c", [], point, axis=each.level)
            self.scalar = True
            self._prepare(within, inner)
            for key in each.within:
                array = self.program.arrays[key]
                to, value = self.pointer(array, written=True), self._broadcast(key.source, inner)
                inner.lines.append(f"e.{self._writing(array, False)}({to}, {value});")
            head = f"at.window({self.pool(each.level)}, {self.extent(parent)}, [&](const auto& e) {{"
            point.lines += [head, *indented(inner.lines), "});"]
        if last:
            point.lines += [
                f"at.channels({self.number('C')}, [&](const auto& e) {{",
                *indented(last.lines),
                "});",
            ]
        if self.held:
            totals.append(f"auto* const held = plane.held({self._room(len(self.held))});")
        walk = ["plane.each([&](const auto& at) {", *indented(point.lines), "});"]
        idle = self._idle(each, terms, plane)
        if idle:
            written = [line.strip() for line in indented(point.lines) if line.startswith("  at.write")]
            zeros = [re.sub(r", \w+\);", ", at.zero());", line) for line in written]
            body.append(idle)
            walk[0] = f"if (!idle) {walk[0]}"
            walk += [f"else plane.each([&](const auto& at) {{ {' '.join(zeros)} }});"] * bool(zeros)
        if finer:  # what lies in no window
            parent, self.finer = self.graph.levels[each.level].parent, finer
            rest = Scope("point", "e", parent, "plane.n", "plane.c", [], plane)
            self._add_finer(rest)
            head = f"plane.rest({self.pool(each.level)}, {self.extent(parent)}, [&](const auto& e) {{"
            walk += [head, *indented(rest.lines), "});"]
        walk = _without_places(walk) if self.program.on_cpu else walk
        text, own = "\n".join(walk), [name for name, kind in self.pointers.items() if kind[:6] != "const "]
        self.before_v = {name for name in own if -1 < text.find(f"({name}, ") < text.rfind(".v()")}
        constants = []
        if self.scalar:
            windows = ", kRows = true" if self.rows else ", kWindows = true"
            constants.append("bool kScalar = true" + windows * (not self.picks_channel))
        elif self.spreads:
            constants.append("bool kWindows = true")
        if not self.program.on_cpu and (each.by_sample or self.axis):
            again = self.walks + bool(last or within) > 1
            if each.by_sample:
                walks = [*self.loops, *[last] * bool(last)]
                computed = [node for each in walks for node in each.known if not node.space.small]
                again &= instructions(computed) <= LIGHT * len(walks)
            constants.append(f"bool kAgain = {str(again).lower()}")
        if each.by_sample and not self.program.on_cpu:
            constants.append(f"int kSums = {len(totals)}")
        elif not self.program.on_cpu:
            windows = any("kWindows" in each for each in constants)
            held = sum(node.space.c for node in plane.known)  # small values by channel
            takes = instructions(point.known)
            self.last = Last(self.chooses, bool(self.made), windows, held, len(totals), takes)
            single, writes = (str(each).lower() for each in self.last[:2])
            constants.append(f"bool kSingle = {single}, kWrites = {writes}")
            constants.append(f"int kHeld = {held}, kSums = {len(totals)}, kInstructions = {takes}")
        return self._struct("Plane", "Plane& plane", [*body, *totals, *walk, *ends], constants)

    def _writing(self, array: Array, turned: bool) -> str:
        """How it is written: what a convolution reads next may be rounded."""
        if array.name == self.program.operand:
            return "write_operand"
        return "write_turned" if turned else "write"

    def _summing(self, key: Key, array: Array) -> str:
        """What a plane is summed up by."""
        if key.what == "largest":
            return array.kind if self.program.has_place(key.node) else "largest_value"
        return "moments" if key.what == "moments" else "sum"

    def _is_of_rows(self, each: Planes, terms: Iterable[Node]) -> bool:
        """Are a point's windows whole rows, and its channels its own alone?"""
        level = self.graph.levels.get(each.level)
        if not level or level.window[-1] is not None or each.by_sample:
            return False
        known = walk(terms, lambda node: () if self._array(node) else node.args)
        return not any(over_channels(node) for node in known if not self._array(node))

    def _leave(self, each: Planes, last: Scope | None) -> None:
        """Sets `known_with_v`, if an element's v is read last where each element comes once; and leaves there what passes behind find."""
        if not self.scopes_of_v:
            return
        scope, once = self.scopes_of_v[-1], [self.point]
        if self.rows:  # a window's, or of a row each, that together have all
            has_all = {*self.graph.levels[each.level].window} <= {1, None} and not self.chooses
            once = [self.of_rows] if has_all else []
        elif each.level != "e" or self.scalar or any(s.kind == "looked up" for s in self.scopes_of_v):
            return
        elif each.by_sample:
            once = [loop for loop in [*self.loops, last] if loop and loop.parent is self.point]
        if not any(scope is one for one in once):
            return
        self.known_with_v = [
            n for n in scope.known if n.is_scalar_op and n.space == ELEMENTS and not n.is_boolean
        ]
        if self.leaves:
            scope.lines.append(f"{scope.at}.replace_v({scope.known[self.leaves]});")

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
        if any(key.what == "largest" for key in terms):
            return ""  # of zeros, too, the first one is to be found
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

    # --------------------------------------------------------------------------------------- reductions inside a point

    def _is_kept(self, of: Node, index: Node) -> bool:
        """Is a value kept while an extreme is looked for, and not computed again at its place? Of windows that overlap what their terms are made of:
        neighbouring channels would each read it at a place of their own."""
        if index.attr[0] == "c":
            return self.program.on_cpu
        level = self.graph.levels[index.attr[0]]
        known = walk(index.args, lambda node: () if self._array(node) else node.args)
        return not level.is_apart and of in known

    def _prepare(self, nodes: Sequence[Node], scope: Scope, within: Sequence[Node] = ()) -> None:
        """Makes the reductions over channels and windows that these nodes hang on at this point, loop by loop; within: nodes of positions in its window,
        if that is walked again (`Program.walks_again`)."""
        depth: dict[Node, int] = {}
        seen: dict[tuple[Node, str], int] = {}
        again = self.axis if scope is self.point else ""

        def visit(node: Node, inside: str = "") -> int:
            """The number of loops before the node is known. inside: the level of the window, in which it is met, that is walked again."""
            if (node, inside) in seen:
                return seen[node, inside]
            seen[node, inside] = 0
            if (
                self._array(node)
                or is_static(node)
                or node.op == "leaf"
                or node.space.small
                or node is self.finds
            ):
                return 0
            args, meets = node.args, inside
            reduces = over_channels(node) or over_windows(node)
            if reduces and inside:
                return 0  # a loop of each position's own
            if reduces and node.op != "take":
                if over_windows(node):
                    args, meets = (args, again) if again else ((), "")
                depth[node] = 1 + max((visit(a, meets) for a in args), default=0)
                found = depth[node]
            elif reduces:  # take
                of, index = node.args
                before = visit(of) if over_channels(node) else 0
                found = max(visit(index), before)
                if depth.get(index, 0) > before and of is not index.args[0] and self._is_kept(of, index):
                    self.takes.setdefault(index, []).append(node)
            else:
                if node.op == "put" and over_windows(node.args[1]):
                    args = ()
                elif node.op == "upsample":
                    args, meets = (args, "") if node.attr == inside else ((), "")
                found = max((visit(a, meets) for a in args), default=0)
            seen[node, inside] = found
            return found

        for node in nodes:
            visit(node)
        for node in within:
            visit(node, again)
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
            self.loops.append(inner)
            head = f"{scope.at}.channels({self.number('C')}, [&](const auto& e) {{"
        else:
            parent = self.graph.levels[axis].parent
            inner = Scope("point", "e", parent, scope.n, scope.c, [], scope, axis=axis)
            head = f"{scope.at}.window({self.pool(axis)}, {self.extent(parent)}, [&](const auto& e) {{"
            self.scalar = True
            self.of_rows = inner if axis == self.rows and scope is self.point else self.of_rows
            self._prepare([node.args[0] for node in nodes], inner)
            if axis == self.point.level:  # and no window inside that one's
                self._add_finer(inner)
        declared, ends = [], []
        self.walks += scope is self.point and axis in ("c", self.axis)
        # May lanes have some of the channels each, or some of a window?
        shared = "channel" if axis == "c" and not self.program.on_cpu else ""
        shared = "row" if axis == self.rows and scope is self.point else shared
        if axis == self.axis and scope is self.point:
            shared, self.terms = "axis", self._count("window", axis)
        of, begin = (f"_{shared}", f"{shared}_") if shared else ("", "")
        window = () if axis == "c" else self.graph.levels[axis].window
        few_channels = self.program.channels <= FEW and not self.program.on_cpu
        many = not few_channels if axis == "c" else None in window or math.prod(window) > FEW
        padded = axis != "c" and any(self.graph.levels[axis].padding)
        inside = "e.inside" if padded or shared == "row" else ""
        for node in nodes:
            name = local(node)
            term = self._broadcast(node.args[0], inner)
            if node.op == "pick":
                best = f"best{node.id}"
                word = "largest" if node.attr[1] > 0 else "smallest"
                own = f"own_{best}" if shared else best
                declared.append(f"auto {own} = {scope.at}.{word}{of}();")
                ends += [f"const auto {best} = {scope.at}.all({own});"] * bool(shared)
                last = axis != "c" and None not in self.graph.levels[axis].window
                place = "e.c" if axis == "c" else "e.place"
                of_place = ", ".join([term, place, *[inside] * bool(inside)])
                take = f"{own}.{'take_last' if last else 'take'}({of_place})"
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
            own = f"own_{name}" if shared or many else name
            declared.append(f"auto {own} = {scope.at}.{begin}{'total' if many else 'zero'}();")
            total = f"{scope.at}.all({own})" if own != name else name
            declares = "const auto " * (own != name)
            if node.op == "variance":
                mean = self.value(node.args[1], inner)
                square = f"math::square({self._operand(node.args[0], inner)} - {mean})"
                inner.lines.append(f"{own} += {square};")
                ends.append(f"{declares}{name} = {total} / real({self.number('C')});  // variance")
            else:
                term = f"math::select({inside}, {term}, real(0))" if inside else term
                inner.lines.append(f"{own} += {term};")
                ends += [f"{declares}{name} = {total};"] * (own != name)
            scope.known[node] = name
        scope.lines += [*declared, head, inner.lines, "});", *ends]

    def _text(self, node: Node, scope: Scope) -> tuple[str, str]:
        if node is self.finds:
            self.reads_v = True
            return f"{scope.at}.v()", "left in v's place"
        held = self._held(node, scope) if self.program.on_cpu and node.is_scalar_op else ""
        return (held, "") if held else super()._text(node, scope)

    def _held(self, node: Node, scope: Scope) -> str:
        """A channel's value of an earlier loop at the pass's point, which that has then kept; "" where there is none, or it took little."""
        loops = [loop for loop in self.loops if node in loop.known and loop is not scope]
        if node.is_boolean or scope.kind != "channels" or scope.parent is not self.point or not loops:
            return ""
        loop = loops[0]
        if loop.parent is not self.point:
            return ""
        computed = [each for each in loop.known.keys() & order([node]) if not each.space.small]
        if instructions(computed) < MUCH:
            return ""
        is_new = node not in self.held
        self.held += [node] * is_new
        number = self.held.index(node)
        place = f"held[{self._room(number) + ' + ' if number else ''}e.c]"
        loop.lines += [f"{place} = {loop.known[node]};"] * is_new
        return place

    def _room(self, values: int) -> str:
        """Of so many values of all channels."""
        return f"{values} * {self.number('C')}" if values > 1 else self.number("C")

    def _add_finer(self, inner: Scope) -> None:
        """The sums over the positions of a window: in the first walk over windows."""
        finer, self.finer = self.finer, []
        self._prepare([key.source for key in finer], inner)
        for key in finer:
            inner.lines.append(f"{total_of(key)}.add({self._broadcast(key.source, inner)});")

    def _reduction(self, node: Node, scope: Scope) -> str:
        if node.op == "take":
            return self._chosen(node, scope)
        raise Unsupported(f"{node.op} {node.attr} at {node.space} inside a pass")

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
        self._prepare([of], inner)
        value = self.value(of, inner)
        if made not in scope.lines:
            scope.lines.append(made)
        # Lines of another value at the same place have other names: a node has one.
        name = f"at_{known}_{of.id}"
        scope.lines += [
            f"const auto {name} = [&] {{",
            *indented(inner.lines),
            f"  return {value};",
            "}();",
        ]
        return name
