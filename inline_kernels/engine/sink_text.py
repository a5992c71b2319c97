"""What a pass over v makes in a mainloop's sinks (engine/sinks.py): the structs that its sinks call, as text.

A sink's tail makes a value of each v (`Tail`, as direct.py's); where channels are reduced, `After` makes the result of that. What earlier
passes have made, by sample and channel, is read once a channel.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from . import direct, fronts, naming
from .graph import ELEMENTS, ONE, Node, down_to, order, walk
from .passes import Array, Key, Program, Unsupported, over_channels
from .scalars import instructions


class Writer(direct._Writer):
    """Writes a struct that makes `node` of v, or of what is known already; `arrays`: what earlier passes have made."""

    def __init__(
        self, segment, node: Node, has_places: bool, arrays: Mapping[Node, Array], given: Mapping[Node, str]
    ):
        super().__init__(segment, fronts.Front(node), has_places)
        self.arrays, self.given = arrays, given

    def tail(self, name: str) -> list[str]:
        """Of an element, in which what is small is a channel's."""
        nodes = self._nodes()
        channel, fields = self._channel([n for n in nodes if n.space.small], self._kept(nodes))
        return self._struct(name, [*channel, *self._function("operator()", "v", fields, self.front.node)])

    def after(self, name: str, kept: Mapping[Node, Array]) -> list[str]:
        """Of a reduction. kept: what a winner gives beside it, and where that goes."""
        known = dict(self.given)
        lines = self._behind(self.front.node, known)
        body = [
            "  __device__ __forceinline__ float operator()(float value, int64_t) const {",
            *[f"    {line}" for line in lines],
            f"    return {known[self.front.node]};",
            "  }",
        ]
        if kept:
            body = [f"  {naming.TYPES[array.kind]}* {array.name};" for array in kept.values()] + body
            body += self._keep(kept)
        return self._struct(name, body)

    def _keep(self, kept: Mapping[Node, Array]) -> list[str]:
        known, lines = dict(self.given), []
        for node, array in kept.items():
            lines += self._behind(node, known)
            lines.append(f"{array.name}[at] = {naming.TYPES[array.kind]}({known[node]});")
        return [
            "  __device__ __forceinline__ void keep(float value, int channel, int64_t at) const {",
            *[f"    {line}" for line in lines],
            "  }",
        ]

    def _behind(self, node: Node, known: dict[Node, str]) -> list[str]:
        nodes = self._nodes(node)
        if any(n.space.small and n.space != ONE for n in nodes):
            raise Unsupported("what follows a reduction over channels hangs on the sample")
        return self._lines([n for n in nodes if n not in known], known)

    def _nodes(self, node: Node | None = None) -> list[Node]:
        """All that is computed here, of what is in front or that one, operands first."""
        known = {*self.given, *self.arrays}
        nodes = walk([node or self.front.node], lambda node: () if node in known else node.args)
        for node in nodes:
            if node in known:
                continue
            if not (node.op in ("spread", "detach", "const", "count", "leaf") or node.is_scalar_op):
                raise Unsupported(f"the tail isn't pointwise: it has {node.op} over {node.attr}")
            if node.op == "count" and node.attr[0] not in ("c", "group"):
                raise Unsupported(f"the tail counts {node.attr}")
            if node.is_leaf("drawn"):
                raise Unsupported("the tail has dropout")
            if node.op == "leaf" and node.attr[1] != "z" and not node.space.small:
                self._check_place(node, node.attr[0])
        return sorted(nodes, key=lambda node: node.id)

    def _check_place(self, node: Node, name: str) -> None:
        """Can it be read at the place of an element?"""
        if node.space != ELEMENTS or not self.has_places:
            raise Unsupported(f"the tail reads {name} at positions")

    def _write(self, node: Node, known: dict[Node, str], lines: list[str]) -> None:
        if node in self.arrays and node not in known:
            array = self.arrays[node]
            self.members.setdefault(array.name, direct.Member(array.name, naming.TYPES[array.kind], -1, True))
            known[node] = f"real({array.name}[{naming.index_of(node.space, 'n', 'c', 'CHANNELS_OUT')}])"
        else:
            super()._write(node, known, lines)

    def _field(self, node: Node) -> str:
        return self.arrays[node].name if node in self.arrays else super()._field(node)

    def _value(self, node: Node, known: dict[Node, str]) -> str:
        if node.op == "count":
            return "real(CHANNELS_OUT)" if node.attr[0] == "c" else f"real(CHANNELS_OUT / {node.attr[1]})"
        return super()._value(node, known)


class Sink(NamedTuple):
    """What a pass over v does with it. kind: "moments", "sums", "store" or "channels"; array: what it writes; tail, after: types of the
    structs that make the values, and what becomes of a reduction over channels. leaves: what its tail makes of v stands in v's place for the next one,
    which `takes` it."""

    kind: str
    array: Array
    tail: str
    reduction: str = ""
    after: str = ""
    leaves: bool = False
    takes: bool = False

    @property
    def element(self) -> str:
        return {"output": "output_t", "value": "value_t"}.get(self.array.kind, naming.TYPES[self.array.kind])

    @property
    def what(self) -> str:
        return f"reduce::Of{self.kind.title()}"

    @property
    def words(self) -> int:
        """Of what a reduction has of one position."""
        return 1 if self.reduction in REDUCTIONS.values() else 2


REDUCTIONS = {("pick", 1): "reduce::Max", ("pick", -1): "reduce::Min", ("sum", None): "reduce::Sum"}


class Pass:
    """The sinks of one pass, their structs' lines and what those hold."""

    def __init__(self, segment, program: Program, number: int, has_places: bool):
        self.segment, self.program, self.number, self.has_places = segment, program, number, has_places
        self.lines: list[str] = []
        self.given: dict[str, list[str]] = {}  # of a struct: the names of its members' values in the launcher
        self.sinks: list[Sink] = []
        self.instructions = 0  # that its tails take, about, of an element

    def add(self, keys: Sequence[Key]) -> None:
        """The pass's targets."""
        of_channels: dict[Node, Array] = {}
        for key in keys:
            node, array = key.source, self.program.arrays[key]
            if key.what == "value" and not array.space.c:
                of_channels[node] = array
            elif key.what == "value" and array.space != ELEMENTS:
                raise Unsupported("values of windows")
            elif key.what == "largest":
                raise Unsupported("a plane's maximum")
            else:
                self.store(node, array, {"value": "store", "moments": "moments", "sums": "sums"}[key.what])
        if of_channels:
            self._channels(of_channels)

    def arrange(self) -> None:
        """The sinks in their order: channels come last."""
        self.sinks.sort(key=lambda sink: sink.kind == "channels")

    def store(self, node: Node, array: Array, kind: str = "store") -> None:
        if node.space != ELEMENTS:
            raise Unsupported(f"values that vary along {node.space}")
        self.sinks.append(Sink(kind, array, self._tail(node)))

    def _channels(self, found: Mapping[Node, Array]) -> None:
        """A value, and where there are more, what its winner gives."""
        if any(node.space.level != "e" for node in found):
            raise Unsupported("reductions of windows over channels")
        node, *others = sorted(found, key=lambda node: node.op == "pick")
        reduced, of, kind = _reduction(node)
        given = {reduced: "value"}
        if others:
            if reduced.op != "take" or any(_winner(each) is not reduced.args[1] for each in others):
                raise Unsupported("several reductions over channels in one pass")
            given, kind = given | {reduced.args[1]: "channel"}, f"reduce::Winner<{kind}>"
        after, name = self._writer(node, given), f"After{self.number}"
        self._keep(name, after, after.after(name, kept := {each: found[each] for each in others}))
        self.given[name] += [array.name for array in kept.values()]
        self.sinks.append(Sink("channels", found[node], self._tail(of), kind, name))

    def _tail(self, node: Node) -> str:
        itself = node.args[0] if node.op == "spread" and node.args[0].space == node.space else node
        if itself.is_leaf("z"):
            return "conv::Identity"
        name, writer = f"Tail{self.number}_{node.id}", self._writer(node, {})
        if name not in self.given:
            self._keep(name, writer, writer.tail(name))
            self.instructions += self._count(n for n in writer._nodes() if not n.space.small)
        return name

    def _count(self, nodes: Iterable[Node]) -> int:
        return instructions(nodes)

    def _writer(self, node: Node, given: Mapping[Node, str]) -> Writer:
        return Writer(self.segment, node, self.has_places, self._arrays(), given)

    def _keep(self, name: str, writer: Writer, lines: Sequence[str]) -> None:
        self.lines += [*lines, ""]
        members = writer.members.items()
        self.given[name] = [key if m.argument == -1 else naming.identifier(key) for key, m in members]

    def _arrays(self) -> dict[Node, Array]:
        return {
            key.node: a for key, a in self.program.arrays.items() if key.what == "value" and a.space.small
        }


def _reduction(node: Node) -> tuple[Node, Node, str]:
    """The one reduction over channels that a value by position is made of; of what; its name in C++."""
    if found := _logsumexp(node):
        return *found, "reduce::LogSumExp"

    def reduces(n: Node) -> bool:
        return over_channels(n) and n.op != "pick"

    own = [n for n in down_to([node], lambda n: reduces(n) or n.space.small) if reduces(n)]
    if len(own) != 1:
        raise Unsupported(f"{len(own)} reductions over channels at once")
    (reduced,) = own
    if reduced.op == "sum":
        return reduced, reduced.args[0], REDUCTIONS["sum", None]
    if reduced.op != "take" or reduced.args[1].args[0] is not reduced.args[0]:
        raise Unsupported(f"{reduced.op} over channels")
    return reduced, reduced.args[0], REDUCTIONS["pick", reduced.args[1].attr[1]]


def _winner(node: Node) -> Node:
    """The pick that it hangs on alone."""
    return node if node.op == "pick" else _reduction(node)[0].args[-1]


def _logsumexp(node: Node) -> tuple[Node, Node] | None:
    """log(Σ exp(a - m)) + m with m the maximum of a over channels, or 0 where that is infinite: (itself, a)."""
    for each in reversed(order([node])):
        if each.op != "add" or each.args[0].op != "log" or each.args[0].args[0].op != "sum":
            continue
        total, most = each.args[0].args[0], each.args[1]
        power = total.args[0]
        if total.attr != "c" or power.op != "exp" or power.args[0].op != "sub":
            continue
        a, subtracted = power.args[0].args
        inner = most.args[0] if most.op == "detach" else most
        if subtracted is not most or inner.op != "where" or inner.args[2].op != "take":
            continue
        if inner.args[2].args[0] is a and inner.args[2].args[1].attr == ("c", 1):
            return each, a
    return None
