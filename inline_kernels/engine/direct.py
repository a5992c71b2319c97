"""The schedule `direct`: a GPU convolves in kernels of our own, mostly by its tensor cores, the tail is applied to v in registers, and v is never written.

It has schedule.py's functions and signatures, and runs a segment where

- the tail is pointwise: scalar operations on v, parameters by channel or single ones, second inputs and the model's numbers. What doesn't
  vary along positions is computed once a channel (`Tail::channel`); the rest, a line an operation, once an element (`Tail::operator()`);
- or windows of such a tail are pooled, and what is pointwise in those follows (`Tail::before`, `Tail::after`). Only that is written; what
  else the segment computes from it, the schedule `load` does in passes over windows;
- the convolution has one group, and one of the `MAINLOOPS` can run it: with a stride or dilation `stream` and `taps` alone, with zeros around x
  `narrow2d` and `narrow3d`, too.

Where backward follows, what it needs of v is stored beside y, in the same launch (float32; in 16 bits it may need y alone); backward is `load`'s,
which starts from that. A tail that takes longer so than in a pass behind v (choice.inside_loses) is left to the schedule `stored`.

For all else, Unsupported says why. A float32 operand is two float16 (float32's accuracy), but in `wide`, `stream` and `taps` one,
where eager runs TF32; `one_tap` multiplies float32 itself. What they can't hold, infinities and values of 2^20 and more beside smaller ones, a second launch computes again, sample
by sample, by plain sums and the same tail; where there is none it ends at once (kernels/conv/exact.cuh).
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

import inline_loader

from . import (
    cases,
    choice,
    depthwise,
    fronts,
    inside,
    jobs,
    library,
    load_plan,
    load_words,
    mainloops,
    naming,
    programs,
    schedule,
    source,
    tiling,
)
from .algebra import reordered
from .cases import Case
from .graph import ELEMENTS, Node, order, text_of
from .jobs import Job
from .launching import Entry, Launch, new_of
from .mainloops import Mainloop
from .passes import MANY, Array, Program, Root, Unsupported
from .scalars import compared, instructions

__all__ = ["Unsupported", "backward", "describe", "forward", "plan", "reads_y", "requests", "saved", "spends"]

# Fewer results are left to the library (on an H200): in them any kernel's start takes longest, and ours have some work more before their first product.
FEWEST_RESULTS = 1 << 18
BY_SIZES = True


# ------------------------------------------------------------------------------------------------------------- the tail's text


class Member(NamedTuple):
    """Of struct Tail: an argument of the segment (by its number), a tensor or a number, under this name."""

    name: str
    ctype: str  # as a launcher declares it: of tensors accumulate_t, parameter_t, value_t; of numbers double
    argument: int
    is_tensor: bool


class Text(NamedTuple):
    """A tail as it is written. `members` in the launcher's order."""

    lines: list[str]
    members: list[Member]


# Names that the text around the tail has, and words of the language that an attribute of a model may be called by.
_TAKEN = set(
    "v x padded y weight pooled before after channel tail Tail Channel Alike ReadsPlaces Filter Build Conv Target largest_x auto bool case char class const default delete do double else "
    "enum explicit export extern float for goto if inline int long namespace new operator private public register short signed sizeof static "
    "struct switch template this throw try typename union unsigned using virtual void volatile while and or not xor".split()
)


class _Writer:
    """Writes one tail: what is in front, as a function of v."""

    def __init__(self, segment, front: fronts.Front, has_places: bool):
        self.segment, self.front, self.has_places = segment, front, has_places and not front.pooled
        self.members: dict[str, Member] = {}
        self.names = set(_TAKEN)

    def text(self, name: str = "Tail") -> Text:
        nodes = self._checked()
        kept = self._kept(nodes)
        channel, fields = self._channel(order(kept), kept)
        if pooled := self.front.pooled:
            before = self._function("before", "v", fields, pooled.args[0])
            functions = before + self._function(
                "after", "pooled", fields | {pooled: "pooled"}, self.front.node
            )
        else:
            functions = self._function("operator()", "v", fields, self.front.node)
        return Text(self._struct(name, ["", *channel, *functions]), [*self.members.values()])

    def _struct(self, name: str, lines: Sequence[str]) -> list[str]:
        members = [f"  {_declared(member)};" for member in self.members.values()]
        return [f"struct {name} {{", *members, *lines, "};"]

    def _channel(self, nodes: Sequence[Node], kept: Sequence[Node]) -> tuple[list[str], dict[Node, str]]:
        """What is computed once a channel, of these nodes, and its names where elements are computed."""
        by_channel: dict[Node, str] = {}
        lines = self._lines(nodes, by_channel)
        declared = [f"{'bool' if node.is_boolean else 'real'} {self._field(node)};" for node in kept]
        more = self._places(nodes)
        declared += [f"int64_t {name};" for name in more]
        body = [
            *[f"    {line}" for line in lines],
            f"    return {{{', '.join([*[by_channel[node] for node in kept], *more.values()])}}};",
        ]
        alike = not re.search(r"\bn\b", "".join(body))
        text = [
            f"  struct Channel {{ {' '.join(declared)} }};",
            *["  using Alike = void;  // in all samples"] * alike,
            f"  __device__ __forceinline__ Channel channel(int64_t{' n' * (not alike)}, int c) const {{",
            *body,
            "  }",
        ]
        return text, {node: f"k.{self._field(node)}" for node in kept}

    def _places(self, nodes: Sequence[Node]) -> dict[str, str]:
        """Places that a channel keeps beside, by name, as texts."""
        return {}

    # ---- what it is made of
    def _checked(self) -> list[Node]:
        """All nodes, operands first."""
        nodes = order([self.front.node])
        pooled = self.front.pooled
        for node in nodes:
            if node.op in ("spread", "detach", "const") or node.is_scalar_op or node is pooled:
                continue
            if node.op == "count" and fronts.count_of(node) or pooled and node in pooled.args:
                continue
            if node.op != "leaf" or node.attr[1] == "drawn":
                name = "dropout" if node.op == "leaf" else node.op
                raise Unsupported(f"the tail isn't pointwise: it has {name}")
            of_positions = node.attr[1] != "z" and not node.space.small
            if of_positions and (node.space != ELEMENTS or not self.has_places):
                raise Unsupported(f"the tail reads {node.attr[0]} at positions")
        if not any(node.is_leaf("z") for node in nodes):
            raise Unsupported("the tail doesn't read v")
        return nodes

    def _kept(self, nodes: Sequence[Node]) -> list[Node]:
        """What a channel keeps: operands of elements' operations that don't vary along positions, and are no plain numbers."""
        found = dict.fromkeys(a for node in nodes if not node.space.small for a in node.args if a.space.small)
        return [node for node in found if not _is_number(node)]

    # ---- how it is written
    def _function(self, name: str, operand: str, known: Mapping[Node, str], result: Node) -> list[str]:
        known, place = dict(known), ", int64_t at" * self.has_places
        nodes = order([result], self._stops(known))
        lines = self._lines([node for node in nodes if not node.space.small], known)
        reads = any("[at]" in line for line in lines)
        return [
            *["  using ReadsPlaces = void;  // of y's elements"] * reads,
            f"  __device__ __forceinline__ float {name}(float {operand}, const Channel& k{place}) const {{",
            *[f"    {line}" for line in lines],
            f"    return {known[result]};",
            "  }",
        ]

    def _stops(self, known: Mapping[Node, str]) -> Sequence[Node]:
        """Of which nothing beneath is computed."""
        return [self.front.pooled] if self.front.pooled in known else ()

    def _lines(self, nodes: Sequence[Node], known: dict[Node, str]) -> list[str]:
        """Of those that aren't known; then they are."""
        lines: list[str] = []
        for node in nodes:
            self._write(node, known, lines)
        return lines

    def _write(self, node: Node, known: dict[Node, str], lines: list[str]) -> None:
        if node in known or _is_number(node):
            return
        if node.op in ("spread", "detach"):
            known[node] = self._value(node.args[0], known)
            return
        if node.op == "leaf":
            known[node] = self._leaf(node)
            return
        operands = [self._value(a, known) for a in node.args]
        operands = compared(node.op, operands, node.args)
        operands = [f"({text})" if text.startswith("-") else text for text in operands]
        name = known[node] = f"{node.op}{node.id}"
        # By a number eager's GPU multiplies.
        by_number = node.op == "div" and _is_number(node.args[1])
        text = "{0} * (real(1) / {1})" if by_number else text_of(node)
        lines.append(f"const auto {name} = {text.format(*operands)};")

    def _value(self, node: Node, known: dict[Node, str]) -> str:
        if node.op == "count":
            return f"real({fronts.count_of(node)})"
        if node.op == "const":
            return naming.literal(node.attr)
        return self._member(node).name if _is_number(node) else known[node]

    def _leaf(self, node: Node) -> str:
        if node.attr[1] == "z":
            return "v"
        member, space = self._member(node), node.space
        if not space.small:
            return f"real({member.name}[at])"
        return f"real({member.name}[{naming.index_of(space, 'n', 'c', 'CHANNELS_OUT')}])"

    def _member(self, node: Node) -> Member:
        name, kind = node.attr
        if name not in self.members:
            own = naming.identifier(name)
            while own in self.names:
                own += "_"
            self.names.add(own)
            if kind == "scalar":
                at = cases.first_number(self.segment) + list(self.segment.scalars).index(name)
                self.members[name] = Member(own, "double", at, False)
            else:
                ctype = "value_t" if kind == "input" else "parameter_t"
                self.members[name] = Member(own, ctype, self.segment.tensors.index(name), True)
        return self.members[name]

    def _field(self, node: Node) -> str:
        return self._member(node).name if node.op == "leaf" else f"{node.op}{node.id}"


def _is_number(node: Node) -> bool:
    return node.op in ("const", "count") or node.is_leaf("scalar")


def _declared(member: Member) -> str:
    if member.is_tensor:
        return f"const {member.ctype}* {member.name}"
    return f"{'int64_t' if member.ctype == 'int64_t' else 'real'} {member.name}"


class Stored(NamedTuple):
    """A result of the convolution's kernel: its name and element's type, and the text that makes it."""

    name: str
    ctype: str
    text: Text

    @property
    def struct(self) -> str:
        return "Tail" if self.name == "y" else f"Tail_{self.name}"


def _source(
    segment, mainloop: Mainloop, front: fronts.Front, results: Sequence[Stored], winners: Sequence[str] = ()
) -> str:
    """winners: of windows, results that have no text of their own."""
    members = _members(results)
    tensors = [f"In<{m.ctype}> {m.name}" for m in members if m.is_tensor]
    numbers = [f"double {m.name}" for m in members if not m.is_tensor]
    outputs = [f"Out<{each.ctype}> {each.name}" for each in results]
    outputs += [f"Out<{ctype}> {name}" for ctype, name in zip(("uint8_t", "value_t"), winners)]
    headers, padding = mainloop.padding(segment)
    parameters = [*outputs, "In<value_t> x", "In<value_t> weight", *tensors, *numbers]
    tails = {each.name: "tail" if each.name == "y" else f"tail_{each.name}" for each in results}
    made = []
    for each in results:
        given = [m.name if m.is_tensor else f"real({m.name})" for m in each.text.members]
        made.append(f"  const {each.struct} {tails[each.name]}{{{', '.join(given)}}};")
    sinks = ", ".join(f"store::Strips<{each.ctype}, {each.struct}>" for each in results)
    stored = ", ".join(f"conv::Stored{{{name}, {tail}}}" for name, tail in tails.items())
    words = {"{sinks}": sinks, "{stored}": stored, "{winners}": ", ".join(winners)}
    launch = [
        functools.reduce(lambda text, word: text.replace(*word), words.items(), line)
        for line in mainloop.launch
    ]
    pool = (
        f"using Pool = pool::Windows<{', '.join([front.reduction, *map(str, front.window)])}>;"
        if front.pooled
        else ""
    )
    return "\n".join(
        [
            f"// {segment.conv.name}",
            *[f'#include "{header}"' for header in (*headers, *mainloop.headers, "core/math.h")],
            "",
            "using real = accumulate_t;",
            mainloop.declared,
            *[pool] * bool(pool),
            "",
            *[line for each in results for line in (*each.text.lines, "")],
            f"EXPORT void forward({', '.join(parameters)}, cudaStream_t stream) {{",
            *made,
            *[f"  {line}" for line in (*padding, *launch)],
            "}",
        ]
    )


def _members(results: Sequence[Stored]) -> list[Member]:
    """Of all results' tails: the launcher's arguments."""
    return [*dict.fromkeys(member for each in results for member in each.text.members)]


# ------------------------------------------------------------------------------------------------------------------- deciding


class Written(NamedTuple):
    """A segment's source for a mainloop. Its launcher takes results (y, or what `front` is, and what backward needs), x, weight and `members`. rest: the
    passes behind, which compute what it doesn't; saving: what the schedule `load` composes where backward follows. `own`: the text of the
    mainloop's part, and `behind`, that of the passes."""

    mainloop: Mainloop
    front: fronts.Front
    own: str
    behind: str
    results: list[Array]
    members: list[Member]
    rest: programs.Composed | None
    saving: programs.Composed | None = None

    @property
    def source(self) -> str:
        return f"{self.own}\n{self.behind}"


def _written(segment, mainloop: Mainloop, exact_order: bool, composed: programs.Composed | None) -> Written:
    """composed: load's, where backward follows. Made once; kept with the segment's graph. Raises Unsupported."""
    with programs.lock:  # one at a time for a graph, whoever rewrites it
        known = vars(segment.graph).setdefault("direct", {})
        key = mainloop.name, mainloop.takes, exact_order, composed and composed.text
        if key not in known:
            make = (
                _write(segment, mainloop, exact_order)
                if composed is None
                else _write_saving(segment, mainloop, composed)
            )
            known[key] = make
        return known[key]


def _write(segment, mainloop: Mainloop, exact_order: bool) -> Written:
    (y,) = segment.outputs
    y, front = _fronted(y, exact_order)
    if front.takes != mainloop.takes:
        raise Unsupported(f"it takes {mainloop.takes}, not {front.takes}")
    text = _Writer(segment, front, mainloop.has_places).text()
    rest = None
    if front.node is not y:
        given = {front.node: Array("front", "real", front.node.space)}
        rest = _rest(segment, [Root("y", y, y.space, "output")], given)
    result = Stored("y", "accumulate_t" if rest else "output_t", text)
    own = _source(segment, mainloop, front, [result])
    array = Array("y", "real" if rest else "output", front.node.space)
    return Written(mainloop, front, own, rest.text if rest else "", [array], text.members, rest)


def _write_saving(segment, mainloop: Mainloop, composed: programs.Composed) -> Written:
    """y and what backward reads at positions, which is pointwise in v, too; copies of parameters are nobody's kernel's."""
    if mainloop.takes != "elements":
        return _write_windows(segment, mainloop, composed)
    nodes = {root.name: root.node for root in composed.forward.roots}
    nodes["v"] = segment.graph.leaf("z", ELEMENTS, "z")
    arrays = [
        Array("y", "output", nodes["y"].space),
        *[a for a in composed.saved if a is not naming.KEPT],
    ]
    known = all(_copied(nodes[array.name]) for array in composed.forward.kept)
    if len(arrays) > mainloop.most or not known or any(array.space != ELEMENTS for array in arrays):
        raise Unsupported("backward needs more than it stores")
    types = {"output": "output_t", **naming.TYPES, "real": "accumulate_t"}
    results = []
    for array in arrays:
        found = Stored(array.name, types[array.kind], Text([], []))
        writer = _Writer(segment, fronts.Front(nodes[array.name]), mainloop.has_places)
        results.append(found._replace(text=writer.text(found.struct)))
    named = {"backward": composed.backward_names}
    back = source.compose({"backward": composed.backward}, named, "cuda", "", turns=True)
    front = fronts.Front(nodes["y"])
    own = _source(segment, mainloop, front, results)
    return Written(mainloop, front, own, back, arrays, _members(results), None, composed)


def _write_windows(segment, mainloop: Mainloop, composed: programs.Composed) -> Written:
    """What is in front of windows, and what backward needs of them."""
    if any(array.name == "v" for array in composed.saved):
        raise Unsupported("backward needs v")
    found = fronts.of_windows(composed.forward.roots)
    if len(found.results) > mainloop.most:
        raise Unsupported("backward needs the winners of windows")
    front, *winners = found.results
    text = _Writer(segment, found.front, False).text()
    result = Stored("y", "output_t" if front.name == "y" else "accumulate_t", text)
    own = _source(segment, mainloop, found.front, [result], [array.name for array in winners])
    if front.name == "y" and not all(root.space.small and _copied(root.node) for root in found.left):
        raise Unsupported("passes behind y compute more of what it is made of")
    left = [] if all(root.space.small and _copied(root.node) for root in found.left) else found.left
    rest = _rest(segment, left, found.given, composed) if left else None
    given, named = {"backward": composed.backward}, {"backward": composed.backward_names}
    if rest:
        given, named = given | {"rest": rest.forward}, named | {"rest": rest.forward_names}
    behind = source.compose(given, named, "cuda", "", turns=True)
    return Written(mainloop, found.front, own, behind, found.results, text.members, rest, composed)


def _copied(node: Node) -> Node | None:
    """The parameter that is kept as it was."""
    return node.args[0] if node.op == "spread" and node.args[0].op == "leaf" and node.space.small else None


def _fronted(y: Node, exact_order: bool) -> tuple[Node, fronts.Front]:
    """The result as it is written, and its front. Where rules would pool twice, it stays the model's."""
    if not exact_order:
        try:
            again = reordered([y])[0]
            return again, fronts.front_of(again)
        except Unsupported:
            pass
    return y, fronts.front_of(y)


def _rest(
    segment, roots: list[Root], given: Mapping[Node, Array], saving: programs.Composed | None = None
) -> programs.Composed:
    """saving: of which those are some roots."""
    channels = saving.forward.channels if saving else MANY
    program = Program(segment.graph, roots, given, channels)
    if saving:
        names = [root.name for root in roots]
        program.kept = [array for array in saving.forward.kept if array.name in names]
    names = programs.names_of(segment, program)
    text = source.compose({"rest": program}, {"rest": names}, "cuda", "")
    return programs.Composed(text, program, names, None, None, [], {}, source.Own())


def _chosen(case: Case) -> Written:
    """The first mainloop that can run it. Raises Unsupported."""
    segment, weight = case.segment, case.weight
    by_depth = depthwise.obstacle(segment, case.x, weight) is None
    if by_depth and (case.saving or not case.last):
        raise Unsupported("backward needs v" if case.saving else "y lies in planes")
    check(case, by_depth)
    by_library = case.last and not choice.is_silent() and inside.runs(case)
    if segment.updates or segment.random:
        raise Unsupported("the tail has statistics or dropout")
    composed = programs.composed_of(segment, programs.kind_for(case)) if case.saving else None
    if composed and composed.saved and case.x.dtype != torch.float32:
        raise Unsupported("backward needs v as the library rounds it")
    refused = []
    for mainloop in [mainloops.DEPTHWISE] if by_depth else mainloops.MAINLOOPS:
        if mainloop.dimensions != weight.dim() - 2:
            continue
        try:
            written = _written(segment, mainloop, case.exact_order, composed)
            front = written.front
            mainloop.check_walk(segment, weight, front.window if front.pooled else None)
            takes_last = mainloop.takes_last(case.x)
            if mainloop.walks and len(segment.inputs) > 1 and (takes_last or case.stays_last):
                raise Unsupported("x or y lies channels last, other inputs may not")
            lies_last = mainloop.lies_last or case.last and (takes_last or case.stays_last)
            if lies_last and written.rest:
                raise Unsupported("its result lies channels last, and passes behind it read planes")
            job = _job(written, case)._replace(inside=by_library)
            if (reason := mainloop.refuses(job)) is None:
                return written
            refused.append(f"{mainloop.name}: {reason}")
            if reason == mainloops.SLOWER_INSIDE:  # by another mainloop, too, which is slower
                break
        except Unsupported as error:
            refused.append(f"{mainloop.name}: {error}")
    raise Unsupported("; ".join(refused))


def check(case: Case, by_depth: bool = False) -> None:
    """Can a convolution of our own be what runs? by_depth: it is a depthwise one of ours. Raises Unsupported."""
    if case.device != "cuda":
        raise Unsupported("convolutions of our own run on GPUs")
    if case.dtype not in (torch.float32, torch.float16, torch.bfloat16):
        raise Unsupported(f"there are no kernels for results of {case.dtype}")
    if case.segment.conv.is_nothing:
        raise Unsupported("there is no convolution")
    if case.segment.conv.groups != 1 and not by_depth:
        raise Unsupported("the convolution has groups")
    if case.stays_last and case.saving and not library.is_channels_last(case.x):
        raise Unsupported(mainloops.STAYS_LAST)
    sizes = case.sizes
    results = sizes.N * sizes.C * sizes.positions("e")
    fewest = int(FEWEST_RESULTS * tiling.device_properties(case.x.device.index).scale.memory)
    if results < fewest and not choice.is_silent():
        raise Unsupported(f"there are {results} results, and it pays from {fewest} on")


def _dtypes(written: Written, case: Case) -> list[torch.dtype]:
    """Of the results."""
    of_kind = {"output": case.dtype, "value": case.x.dtype, "real": torch.float32}
    of_kind |= {"mask": torch.uint8, "byte": torch.uint8}
    return [of_kind[array.kind] for array in written.results]


def _job(written: Written, case: Case) -> Job:
    count = instructions(node for node in order([written.front.node]) if not node.space.small)
    return jobs.job_of(case, _dtypes(written, case), written.front, instructions=count)


def _build(written: Written, case: Case) -> dict:
    defines = written.mainloop.all_defines(_job(written, case)) | case.defines
    if written.saving and defines.get("RESULTS_LAST") and load_plan.is_last(case, written.saving):
        defines["CHANNELS_LAST"] = "1"  # for backward's passes
    return {
        "name": f"direct_{naming.identifier(case.segment.conv.name)}",
        "source": written.source,
        "device": "cuda",
        "defines": defines,
    }


def requests(case: Case) -> list[dict]:
    return [_build(_chosen(case), case)]


def alone(case: Case) -> tuple[dict, list[Array]]:
    """What is built of its convolution with its results, and these: not backward. Raises Unsupported."""
    written = _chosen(case)
    if written.rest:
        raise Unsupported("another pass follows")
    return _build(written, case) | {"source": f"{written.own}\n"}, written.results


def describe(case: Case) -> str:
    written = _chosen(case)
    names = [array.name for array in written.results[1:]]
    line = f"{written.mainloop.in_words(_job(written, case))}, the tail inside, "
    line += "v is stored beside" if "v" in names else "v is never written"
    if rest := written.rest:
        plan = load_plan.Plan.of(case, rest)
        line += f", then {load_words.passes_in_words(plan, rest.forward, rest.forward_names)}"
    if back := _back(written, case):
        line += load_words.backward_in_words(back, case.x, case.weight)
    return line


def _back(written: Written, case: Case) -> load_plan.Plan | None:
    """What backward is planned with: with y channels last where it is stored so."""
    if written.saving is None:
        return None
    back = load_plan.Plan.of(case, written.saving)
    back.last = bool(_build(written, case)["defines"].get("CHANNELS_LAST"))
    return back


# ------------------------------------------------------------------------------------------------------------------ running


@dataclass
class Plan:
    """`rest` computes what is left from the launcher's results, and returns what forward does; `back` has backward. copies: of arguments, by number,
    in what forward saves behind the launcher's results, of `room` doubles: the first of their own, and how many numbers they have."""

    launch: Launch
    rest: load_plan.Plan | None
    back: load_plan.Plan | None
    copies: Sequence[tuple[int, int, int]]
    room: int = 0


def plan(case: Case, edited: str | None = None) -> Plan:
    """edited: in place of its own text. Raises Unsupported with the reason where the schedule can't do it, or has no cause to."""
    segment, arguments, saving = case[:3]
    written = _chosen(case)
    request = _build(written, case)
    kernels = inline_loader.load(**request | ({"source": edited} if edited else {}))
    x, weight_at = case.x, len(segment.inputs)
    dtypes = {"value_t": x.dtype, "accumulate_t": torch.float32, "parameter_t": case.parameter_dtype}
    behind = [Entry(m.name, dtypes[m.ctype], m.argument) for m in written.members if m.is_tensor]
    numbers = [float(arguments[m.argument]) for m in written.members if not m.is_tensor]
    rest, back = written.rest and load_plan.Plan.of(case, written.rest), _back(written, case)
    if back:
        back.kernels, back.convolution = kernels, library.Convolution.of(segment.conv, case.weight)
    if rest:
        _set_rest(rest, written, kernels, arguments)
    shape = case.sizes.shape(written.front.node.space)
    if written.results[0].name == "y":
        shape = [*shape[:2], *shape[5 - segment.graph.dimensions :]]
    defines = request["defines"]
    turned = [0] * bool(defines.get("LAST")) + [weight_at] * bool(defines.get("WEIGHT_LAST"))
    beside = [load_plan.shape_of(back, written.saving.forward, array) for array in written.results[1:]]
    made = zip(written.results, _dtypes(written, case), [shape, *beside])
    table = [Entry(array.name, kind, None, size) for array, kind, size in made]
    table[0] = table[0]._replace(last=bool(defines.get("RESULTS_LAST")))
    table += [Entry(name, x.dtype, at, last=at in turned) for name, at in (("x", 0), ("weight", weight_at))]
    bind = functools.partial(kernels.forward.bound, *numbers, trusting=True, new=new_of(table))
    launch = Launch(bind, [*table, *behind], arguments)
    return Plan(launch, rest, back, *_copies(segment, None if rest else back))


def _set_rest(rest: load_plan.Plan, written: Written, kernels, arguments: Sequence) -> None:
    """Its launch, of the launcher's results, returns y and what is saved, of those and what it makes."""
    given = ["front" if array.name == "y" else array.name for array in written.results]
    program = written.rest.forward, written.rest.forward_names
    returned = "y", *[array.name for array in (written.saving.saved if written.saving else ())]
    shapes = {"y": rest.shape}
    rest.launch = load_plan.launch_of(
        rest, kernels.rest, *program, arguments, given, shapes, returned=returned
    )


def _copies(segment, back: load_plan.Plan | None) -> tuple[list[tuple[int, int, int]], int]:
    found, room = [], 0
    if back is None:
        return found, room
    program = back.composed.forward
    parameters = {root.name: _copied(root.node) for root in program.roots}
    for array in program.kept:
        count = math.prod(load_plan.shape_of(back, program, array))
        found.append((segment.tensors.index(parameters[array.name].attr[0]), room, count))
        room += (4 * count + 15) // 16 * 2
    return found, room


def forward(plan: Plan, arguments: Sequence) -> list[Tensor]:
    """y, and what backward needs."""
    found = plan.launch.run(arguments)
    if plan.rest:
        return plan.rest.launch.run(arguments, *found)
    if plan.copies:
        found.append(arguments[0].new_empty(plan.room, dtype=torch.float64))
    for i, first, count in plan.copies:
        found[-1][first:].view(torch.float32)[:count].copy_(arguments[i].detach().reshape(-1))
    return found


def backward(plan: Plan, *given) -> list[Tensor | None]:
    """As schedule.backward, which starts from what was stored."""
    return schedule.backward(plan.back, *given)


def spends(plan: Plan) -> Sequence[int]:
    return schedule.spends(plan.back)


saved, reads_y = schedule.saved, schedule.reads_y  # the shapes and dtypes of what is kept
