"""The schedule `direct` where a tail reduces: a segment's passes (passes.py), those over v by mainloops with sinks, the others as `load`'s.

What a pass over v makes, its sinks take from the registers: moments and sums over positions, reductions over channels with what is pointwise
behind them, y itself. Where several passes read v,

- `recompute`: each of them forms the products again, and v is never written; or
- `store`: the first one writes v, or the value that is normalised, once, in y's place where y has its shape; the later ones are `load`'s.
  That is exact for float32 alone.

The cheaper one runs, by the time that products take and bytes take (`_recomputes`). Small values between passes are computed as `load` does.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch

from . import schedule, source
from .algebra import reordered
from .graph import ELEMENTS, Facts, Graph, Node, order
from .passes import Array, Key, Planes, Program, Root, Unsupported, is_static, over_channels
from .tail import Member, Text, Writer

BYTES_A_SECOND = 4.3e12
_OWN_NAMES = {"x", "y", "weight", "stream", "number", "seed", "stored", "tail", "v"}


# --------------------------------------------------------------------------------------------------------------- rewriting


def of_v(roots: Sequence[Node]) -> list[Node]:
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
        if self.facts.is_z(node) or node.space != ELEMENTS or self.facts.degree[node.id] != 1:
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


# ----------------------------------------------------------------------------------------------------------- the sinks' text


class Sink(NamedTuple):
    """What a pass over v does with it. kind: "moments", "sums", "store" or "channels"; array: what it writes; type, of its elements; tail: the name
    of its struct, conv::Identity where v itself is taken; reduction, after: of channels."""

    kind: str
    array: Array
    tail: str
    reduction: str = ""
    after: str = ""


REDUCTIONS = {("pick", 1): "reduce::Max", ("pick", -1): "reduce::Min", ("sum", None): "reduce::Sum"}


class _Pass:
    """The sinks of one pass, their structs' lines and what those hold."""

    def __init__(self, segment, program: Program, number: int, has_places: bool):
        self.segment, self.program, self.number, self.has_places = segment, program, number, has_places
        self.lines: list[str] = []
        self.members: dict[str, list[tuple[str, Member]]] = {}  # of a struct: by the name of what is given
        self.sinks: list[Sink] = []

    def add(self, key: Key) -> None:
        node, array = key.source, self.program.arrays[key]
        if key.what == "value" and not array.space.c:
            self._channels(node, array)
        elif key.what == "value" and array.space != ELEMENTS:
            raise Unsupported("values of windows")
        else:
            self.store(node, array, {"value": "store", "moments": "moments", "sums": "sums"}[key.what])

    def store(self, node: Node, array: Array, kind: str = "store") -> None:
        if node.space != ELEMENTS:
            raise Unsupported(f"values that vary along {node.space}")
        self.sinks.append(Sink(kind, array, self._tail(node)))

    def _channels(self, node: Node, array: Array) -> None:
        if node.space.level != "e":
            raise Unsupported("reductions of windows over channels")
        reduced, of, kind = _reduction(node)
        after = self._write(f"After{self.number}", node, {reduced: "value"}, "float value")
        self.sinks.append(Sink("channels", array, self._tail(of), kind, after))

    def _tail(self, node: Node) -> str:
        if node.op == "leaf" and node.attr[1] == "z":
            return "conv::Identity"
        return self._write(f"Tail{self.number}_{node.id}", node, {}, "")

    def _write(self, name: str, node: Node, known: dict[Node, str], argument: str) -> str:
        writer = Writer(self.segment, node, self.has_places, self._arrays(), known)
        text = writer.text(name, argument)
        self.lines += [*text.lines, ""]
        self.members[name] = [*zip(writer.members, text.members)]
        return name

    def _arrays(self) -> dict[Node, Array]:
        return {key.node: a for key, a in self.program.arrays.items() if key.what == "value" and a.space.small}


def _reduction(node: Node) -> tuple[Node, Node, str]:
    """The one reduction over channels that a value by position is made of; of what; its name in C++."""
    if found := _logsumexp(node):
        return *found, "reduce::LogSumExp"
    own = [each for each in _down_to(node, lambda n: over_channels(n) and n.op != "pick")]
    if len(own) != 1:
        raise Unsupported(f"{len(own)} reductions over channels at once")
    (reduced,) = own
    if reduced.op == "sum":
        return reduced, reduced.args[0], REDUCTIONS["sum", None]
    if reduced.op != "take" or reduced.args[1].args[0] is not reduced.args[0]:
        raise Unsupported(f"{reduced.op} over channels")
    return reduced, reduced.args[0], REDUCTIONS["pick", reduced.args[1].attr[1]]


def _down_to(node: Node, stops) -> list[Node]:
    """The first nodes on each way down where it stops."""
    found, seen, stack = {}, set(), [node]
    while stack:
        each = stack.pop()
        if each in seen:
            continue
        seen.add(each)
        if stops(each):
            found[each] = None
        elif not each.space.small:
            stack += each.args
    return [*found]


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


# ---------------------------------------------------------------------------------------------------------------- mainloops


class Convolving(NamedTuple):
    """How a mainloop is launched with sinks. rate: products and sums a second, two of each multiplication; together: several sinks at once?"""

    headers: Sequence[str]
    rate: float
    together: bool
    own_channels: int  # of which a block makes one value by position
    launch: object  # (number of the pass, sinks with their values) to the lines that plan it, and to those that launch it


def _narrow2d(number: int, sinks: Sequence[tuple[Sink, str]]) -> tuple[list[str], list[str]]:
    types = [_type_of(sink, "store::Strips<{0}, {1}>", "reduce::") for sink, _ in sinks]
    planned = [
        f"const auto geometry_{number} = Tile::Geometry::of(x);",
        f"const int64_t parts_{number} = int64_t(geometry_{number}.tiles()) * geometry_{number}.strips;",
    ]
    values = ", ".join(f"{kind}{{{value}}}" for kind, (_, value) in zip(types, sinks))
    return planned, [f"conv::narrow2d::pointwise<Filter, LONG_ROWS>(x, weight, stream, {values});"]


def _narrow3d(number: int, sinks: Sequence[tuple[Sink, str]]) -> tuple[list[str], list[str]]:
    def types(vectors: str) -> list[str]:
        return [_type_of(sink, f"store::Runs<{{1}}, {{0}}, {vectors}>", "reduce::narrow3d::") for sink, _ in sinks]

    planned = [
        f"const auto planes_{number} = conv::narrow3d::convolution<Conv>(",
        f"    x, weight, sizeof(conv::narrow3d::SharedStorage<Conv, {', '.join(types('true'))}>), true, N);",
        f"const int64_t parts_{number} = planes_{number}.slots();",
    ]

    def launched(vectors: str) -> str:
        values = ", ".join(f"{kind}{{{value}}}" for kind, (_, value) in zip(types(vectors), sinks))
        return f"conv::narrow3d::convolve(planes_{number}, stream, {values});"

    stored = [sink.array.name for sink, _ in sinks if sink.kind == "store"]
    if not stored:
        return planned, [launched("true")]
    fits = f"store::vectors_fit_runs<Conv>(static_cast<{'output_t' if stored[0] == 'y' else 'value_t'}*>({stored[0]}), planes_{number})"
    return planned, [f"if ({fits}) {launched('true')}", f"else {launched('false')}"]


def _wide(number: int, sinks: Sequence[tuple[Sink, str]]) -> tuple[list[str], list[str]]:
    ((sink, value),) = sinks
    types = {
        "store": "store::Rows<output_t>",
        "channels": f"reduce::WideChannels<{sink.reduction}>",
        "moments": "reduce::WidePositions<reduce::OfMoments>",
        "sums": "reduce::WidePositions<reduce::OfSums>",
    }
    loop = f"conv::ForwardMainloop<Build, {sink.tail}, store::Nothing, {types[sink.kind]}>"
    to, tail = value.split(", ", 1)
    if sink.kind == "channels":
        to, tail = f"partial_{number}", tail.split("}", 1)[0] + "}"
    planned = [f"const int64_t tile_{number} = {loop}::kBySm90 ? 128 : 64;"]
    planned += [f"const int64_t parts_{number} = e_H * ((e_W + tile_{number} - 1) / tile_{number});"]
    return planned, [
        f"const Scratch<int32_t> largest_{number}(N, stream);",
        f"conv::wide<Build>(x, weight, {tail}, store::Nothing{{}}, {types[sink.kind]}{{{to}}}, largest_{number}, stream);",
    ]


def _type_of(sink: Sink, store: str, space: str) -> str:
    element = "output_t" if sink.array.name == "y" else "value_t"
    if sink.kind == "store":
        return store.format(element, sink.tail)
    if sink.kind == "channels":
        element = source.TYPES[sink.array.kind]
        return f"{space}Channels<{element}, {sink.reduction}, {sink.tail}, {sink.after}>"
    return f"{space}Positions<reduce::Of{sink.kind.title()}, {sink.tail}>"


CONVOLVING = {
    "narrow2d": Convolving(
        ("conv/narrow2d.cuh", "reduce/channels.cuh", "reduce/moments.cuh", "store/strips.cuh"), 600e12, True, 64, _narrow2d
    ),
    "narrow3d": Convolving(("reduce/narrow3d.cuh", "store/runs.cuh"), 180e12, True, 16, _narrow3d),
    "wide": Convolving(("conv/wide.cuh", "reduce/wide.cuh"), 650e12, False, 0, _wide),
}


# ---------------------------------------------------------------------------------------------------------------- composing


class Composed(NamedTuple):
    """A text, and what its launcher takes: `results` that are written; `tensors` and `numbers` by the names of leaves, in order; is a seed
    among them? `passes` over v by the mainloop; does it store v?"""

    text: str
    results: list[Array]
    statistics: list[tuple[str, str]]
    tensors: list[tuple[str, str]]  # of a leaf, and the type in which it is read
    numbers: list[str]
    random: bool
    passes: int
    stores: bool


def composed(segment, mainloop, exact_order: bool, stores: bool) -> Composed:
    """Made once. Raises Unsupported."""
    with schedule._lock:
        known = vars(segment.graph).setdefault("with sinks", {})
        key = mainloop.name, exact_order, stores
        if key not in known:
            try:
                known[key] = _Composer(segment, mainloop, exact_order, stores).composed()
            except Unsupported as error:
                known[key] = error
        if isinstance(known[key], Unsupported):
            raise known[key]
        return known[key]


class _Composer:
    def __init__(self, segment, mainloop, exact_order: bool, stores: bool):
        self.segment, self.mainloop, self.stores = segment, mainloop, stores
        self.convolving, self.graph = CONVOLVING[mainloop.name], segment.graph
        (y,) = segment.outputs
        found = [y, *[n for update in segment.updates for n in (update.mean, update.variance)]]
        if not exact_order:
            found = of_v(reordered(found))
        self.statistics = [(f"batch_mean_{i}", f"batch_variance_{i}") for i in range(len(segment.updates))]
        names = [name for pair in self.statistics for name in pair]
        self.roots = [Root("y", found[0], found[0].space, "output")]
        self.roots += [Root(name, node, node.space, "real") for name, node in zip(names, found[1:])]
        self.program, self.stored = Program(self.graph, self.roots), None
        self.reading = self._texts()
        if not self.reading:
            raise Unsupported("the tail doesn't read v")
        if stores:
            self._store()

    def _texts(self) -> list[int]:
        """Texts of all passes as `load` has them; the numbers of those that read v."""
        self.names = schedule._names(self.segment, self.program)
        made = [source.struct(f"Pass{i}", self.program, self.names, i) for i in range(len(self.program.passes))]
        self.lines, self.program.texts = [lines for lines, _ in made], [text for _, text in made]
        return [i for i, text in enumerate(self.program.texts) if text.reads_v]

    def _store(self) -> None:
        """What the first pass writes for the others: the value whose statistics it takes, if they need nothing else; or v."""
        if len(self.reading) < 2:
            raise Unsupported("v is read once")
        before = self.program, self.reading
        sources = {key.source for key in self.program.passes[self.reading[0]].targets if key.what != "value"}
        z = self.graph.leaf("z", ELEMENTS, "z")
        self.stored = z
        if len(sources) == 1 and z not in sources and (node := next(iter(sources))).space == ELEMENTS:
            self.program = Program(self.graph, [*self.roots, Root("stored", node, ELEMENTS, "value")])
            self.reading = self._texts()
            if len(self.reading) == 1:
                self.stored = node
                return
        self.program, self.reading = before
        self._texts()

    def composed(self) -> Composed:
        by_mainloop = self.reading[: 1 if self.stores else None]
        parts: dict[int, _Pass] = {}
        for i in by_mainloop:
            if not isinstance(self.program.passes[i], Planes) or self.program.passes[i].level != "e":
                raise Unsupported("a pass over windows reads v")
            parts[i] = own = _Pass(self.segment, self.program, i, self.mainloop.has_places)
            for key in self.program.passes[i].targets:
                own.add(key)
            if self.stored is not None and self.stored.op == "leaf":
                own.store(self.stored, Array("stored", "value", ELEMENTS))
            if len(own.sinks) > 1 and not self.convolving.together:
                raise Unsupported("several sinks at once")
            own.sinks.sort(key=lambda sink: sink.kind == "channels")  # which comes last
            if sum(sink.kind == "channels" for sink in own.sinks) > 1:
                raise Unsupported("several reductions over channels in one pass")
        return self._source(parts)

    # ---- the launcher
    def _source(self, parts: Mapping[int, _Pass]) -> Composed:
        tensors, numbers, random = self._given(parts)
        known = [name for name, _ in tensors] + numbers
        if len({source.identifier(name) for name in known}) < len(known) or _OWN_NAMES & set(known):
            raise Unsupported("names of parameters that the kernel has itself")
        results = [self.program.arrays[Key("value", root.node)] for root in self.program.roots if root.name != "stored"]
        structs, body, planned = [], [], []
        for i in range(len(self.program.passes)):
            if i in parts:
                structs += parts[i].lines
                own, lines = self._convolution(i, parts[i])
                planned += own
                body += lines
            else:
                structs += [*self.lines[i], ""]
                body.append(self._loaded(i))
        declared = [f"Out<{source.EXPORTED[a.kind]}> {a.name}" for a in results]
        declared += ["In<value_t> x", "In<value_t> weight"]
        declared += [f"In<{kind}> {source.identifier(name)}" for name, kind in tensors]
        declared += ["In<int64_t> seed", "int64_t number"] * random
        declared += [f"double {source.identifier(name)}_given" for name in numbers]
        text = [
            f"// {self.segment.conv.name}",
            '#include "load/load.h"',
            *[f'#include "{header}"' for header in (*self.convolving.headers, "core/math.h")],
            "",
            self.mainloop.declared,
            *["using Tile = conv::narrow2d::Tile<Filter, LONG_ROWS ? 128 : 0, 1>;"] * (self.mainloop.name == "narrow2d"),
            "",
            *structs,
            f"EXPORT void forward({', '.join(declared)}, cudaStream_t stream) {{",
            *[f"  {line}" for line in [*self._sizes(numbers), *planned, *self._memory(results, parts), *body]],
            "}",
            "",
        ]
        return Composed(
            "\n".join(text), results, self.statistics, tensors, numbers, random, len(parts), self.stores
        )

    def _given(self, parts: Mapping[int, _Pass]) -> tuple[list[tuple[str, str]], list[str], bool]:
        """Tensors and numbers behind x and weight, in the order of the segment's."""
        kinds = {n.attr: n for n in order([root.node for root in self.program.roots]) if n.op == "leaf"}
        names = [*[leaf.attr[0] for leaf in self.segment.inputs[1:]], *self.segment.parameters, *self.segment.buffers]
        used = {name: kind for name, kind in kinds if kind in ("parameter", "buffer", "input")}
        tensors = [(n, "value_t" if used[n] == "input" else "accumulate_t") for n in names if n in used]
        numbers = [name for name in self.segment.scalars if (name, "scalar") in kinds]
        return tensors, numbers, any(kind == "drawn" for _, kind in kinds)

    def _sizes(self, numbers: Sequence[str]) -> list[str]:
        first = 3 - self.graph.dimensions
        lines = ["const int64_t N = x.size(0), C = CHANNELS_OUT;"]
        extents = [f"e_{side} = x.size({2 + i}) - KERNEL_{side} + 1" for i, side in enumerate("DHW"[first:])]
        lines.append(f"const int64_t {', '.join(['e_D = 1'] * first + extents)};")
        for name, level in self.graph.levels.items():
            window = (1,) * first + level.window
            sizes = [
                f"{name}_{side} = {f'{level.parent}_{side} / {w}' if w else 1}" for side, w in zip("DHW", window)
            ]
            lines.append(f"const int64_t {', '.join(sizes)};")
        lines += [
            f"const load::Extent extent_{name}(N, C, {name}_D, {name}_H, {name}_W);" for name in ("e", *self.graph.levels)
        ]
        return lines + [f"const real {source.identifier(n)} = real({source.identifier(n)}_given);" for n in numbers]

    def _memory(self, results: Sequence[Array], parts: Mapping[int, _Pass]) -> list[str]:
        lines = []
        for i, each in enumerate(self.program.passes):
            if isinstance(each, Planes) and i not in parts:
                of_thread = 1024 if each.by_sample else 4096
                lines.append(f"const int64_t parts_{i} = extent_{each.level}.positions() / {of_thread} + 1;")
        for array in self.program.arrays.values():
            if array not in results and array.name != "stored":
                lines.append(f"const Scratch<{source.TYPES[array.kind]}> {array.name}({source._size(array)}, stream);")
        if self.stores:
            if self._in_place():
                lines.append("value_t* const stored = y;")
            else:
                lines.append("const Scratch<value_t> stored(N * C * e_D * e_H * e_W, stream);")
        for i, own in parts.items():
            for sink in own.sinks:
                if sink.kind == "channels":
                    lines += self._partial(i, sink)
        return lines

    def _partial(self, number: int, sink: Sink) -> list[str]:
        """What blocks of channels leave, where they aren't all of them in one."""
        blocks = f"(CHANNELS_OUT + {self.convolving.own_channels or 16} - 1) / {self.convolving.own_channels or 16}"
        least = 1 if self.convolving.own_channels else 0
        return [
            f"constexpr int blocks_{number} = {blocks};",
            f"const Scratch<{sink.reduction}::Partial> partial_{number}(",
            f"    blocks_{number} > {least} ? N * blocks_{number} * e_D * e_H * e_W : 0, stream);",
        ]

    def _in_place(self) -> bool:
        """Does y's pass read what is stored at its own place alone, and no later one that?"""
        root = self.program.roots[0]
        if root.space != ELEMENTS:
            return False
        (own,) = [i for i, each in enumerate(self.program.passes) if Key("value", root.node) in each.targets]
        reads = [text.reads_v or "stored" in text.pointers for text in self.program.texts]
        return not self.program.texts[own].scalar and not any(reads[own + 1 :])

    def _struct(self, own: _Pass, name: str) -> str:
        given = []
        for leaf, member in own.members.get(name, ()):
            given.append(source.identifier(leaf) if member.argument is not None else leaf)
        return f"{name}{{{', '.join(given)}}}"

    def _convolution(self, number: int, own: _Pass) -> tuple[list[str], list[str]]:
        sinks = []
        for sink in own.sinks:
            value = f"{sink.array.name}, {self._struct(own, sink.tail)}"
            if sink.kind == "channels":
                value += f", {self._struct(own, sink.after)}, partial_{number}"
            sinks.append((sink, value))
        planned, launched = self.convolving.launch(number, sinks)
        for sink in own.sinks:
            if sink.kind == "channels":
                least = 1 if self.convolving.own_channels else 0
                launched += [
                    f"if constexpr (blocks_{number} > {least})",
                    f"  reduce::merge_channels<{sink.reduction}>({source.TYPES[sink.array.kind]}_pointer({sink.array.name}), partial_{number}, "
                    f"{self._struct(own, sink.after)}, N, blocks_{number}, extent_e.positions(), stream);",
                ]
        return planned, [line.replace(f"{source.TYPES['output']}_pointer(", "static_cast<output_t*>(").replace("real_pointer(", "static_cast<real*>(") for line in launched]

    def _loaded(self, number: int) -> str:
        each, text = self.program.passes[number], self.program.texts[number]
        struct = f"Pass{number}{{{', '.join(text.members)}}}"
        if isinstance(each, Planes):
            level, channels = each.level, "1" if each.by_sample else "C"
            v = "stored" if text.reads_v else "nullptr"
            extent = f"load::Extent(N, {channels}, {level}_D, {level}_H, {level}_W)"
            return f"load::planes({struct}, {extent}, {v}, parts_{number}, stream);"
        blocks = {"sample": "N", "channel": "C", "one": "1"}[each.mode]
        return f"load::small({struct}, {blocks}, stream);"


# ----------------------------------------------------------------------------------------------------------------- choosing


def chosen(segment, mainloop, arguments: Sequence, dtype: torch.dtype, exact_order: bool) -> Composed:
    """Of what can run the cheaper one. Raises Unsupported."""
    x, weight = arguments[0], arguments[len(segment.inputs)]
    found, reasons = {}, []
    for stores in (False, True):
        try:
            if stores and not x.dtype == dtype == torch.float32:
                raise Unsupported("v isn't written in 16 bits")
            found[stores] = composed(segment, mainloop, exact_order, stores)
        except Unsupported as error:
            reasons.append(str(error))
    if len(found) == 2:
        return found[not _recomputes(segment, mainloop, found[False].passes, x, weight)]
    if not found:
        raise Unsupported("; ".join(dict.fromkeys(reasons)))
    return next(iter(found.values()))


def _recomputes(segment, mainloop, passes: int, x, weight) -> bool:
    """Do more passes of products take less time than v's way to memory and back? About equal, they save its memory."""
    sizes = schedule.sizes_of(segment, x, weight)
    values = sizes.N * sizes.C * sizes.positions("e")
    products = 3 if x.dtype == torch.float32 and mainloop.name != "wide" else 1
    again = (passes - 1) * 2 * values * math.prod(weight.shape[1:]) * products / CONVOLVING[mainloop.name].rate
    return again <= 1.1 * 2 * 4 * values / BYTES_A_SECOND
