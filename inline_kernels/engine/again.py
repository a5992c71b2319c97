"""The schedule `again`: backward needs v, but forward doesn't keep it. A mainloop of few channels in forms it a second time, bit for bit, and
backward's passes over it take it from the registers, with dy read at their elements' places.

- Forward has the passes of `load`'s forward, all that read v by the mainloop (sinks.py): v is never written, and small values are kept as `load`
  keeps them. x and the weight are autograd's to keep, and to look at: what was changed in place meanwhile is an error, as in eager.
- Backward has the passes of `load`'s backward. In those that read v sinks store dz, in float32 and planes, and sum up other gradients; where dz and a sum are of
  one value, it is computed once. From dz on all is as in schedule.py, but that nobody is given it in 16 bits.
- v is the same bit for bit, so that masks and ties are: of the same operands in tiles of the same sizes (`Sinks.pinned`).

It runs where the products take less time than v's way to memory and back (`pays`); about equal, they save its memory.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch

import inline_loader

from . import (
    choice,
    costs,
    direct,
    gradients,
    halves,
    jobs,
    library,
    load_plan,
    load_words,
    mainloops,
    naming,
    programs,
    schedule,
    sink_text,
    sinks,
    stored,
    tiling,
)
from .cases import Case
from .graph import ELEMENTS, Node
from .launching import Entry, Launch
from .passes import Array, Key, Planes, Program, Unsupported
from .scalars import instructions
from .schedule import backward, forward, reads_y, spends

__all__ = ["Unsupported", "backward", "describe", "forward", "plan", "reads_y", "requests", "saved", "spends"]

BY_SIZES = True
_READING = 4  # instructions that take a value at an element's place
SUM = 1.9  # picoseconds of an element, where it is no stored value's, on an H200 (trials/again.json: 73)
ABOUT = 1.05  # times that are as good as equal: then v's memory is saved
_DY = Array("dy", "output", ELEMENTS)


# ------------------------------------------------------------------------------------------------------- the text of backward


class _Writer(sink_text.Writer):
    """It also reads dy, and what forward left, at positions: of an element, or of all channels there."""

    def _check_place(self, node: Node, name: str) -> None:
        if not self.has_places or node.space.level != "e" or not node.space.n:
            raise Unsupported(f"the tail reads {name} at {node.space}")

    def _places(self, nodes: Sequence[Node]) -> dict[str, str]:
        """What to take from an element's place for that of the same position in an array without channels, if any is read."""
        if not any(self._is_across(node) for node in self._nodes()):
            return {}
        self.members[_PLANE] = direct.Member("plane", "int64_t", -1, False)
        return {"channels_before": "(n * (CHANNELS_OUT - 1) + c) * plane"}

    def _is_across(self, node: Node) -> bool:
        """Is it read, and the same for all channels?"""
        reads = node in self.arrays or node.op == "leaf"
        return reads and bool(node.space.level) and not node.space.c

    def tail(self, name: str) -> list[str]:
        lines = super().tail(name)
        fetched = dict.fromkeys(re.findall(r"(\w+)\[at\]", " ".join(lines)))
        if not fetched:
            return lines
        body = [f"    tensor_core::fetch_ahead({each} + at, count);" for each in fetched]
        head = "  __device__ __forceinline__ void fetch(int64_t at, int count) const {"
        return [*lines[:-1], "  using Fetches = void;", head, *body, "  }", lines[-1]]

    def _stops(self, known: Mapping[Node, str]) -> Sequence[Node]:
        return [*self.arrays, *known]

    def _write(self, node: Node, known: dict[Node, str], lines: list[str]) -> None:
        array = self.arrays.get(node)
        if array is None or array.space.small or node in known:
            super()._write(node, known, lines)
        else:
            self.members.setdefault(array.name, direct.Member(array.name, naming.TYPES[array.kind], -1, True))
            known[node] = self._read(array.name, node)

    def _leaf(self, node: Node) -> str:
        if self._is_across(node):
            return self._read(self._member(node).name, node)
        return super()._leaf(node)

    def _read(self, name: str, node: Node) -> str:
        return f"real({name}[at - k.channels_before])" if self._is_across(node) else f"real({name}[at])"

    def _member(self, node: Node) -> direct.Member:
        if node.is_leaf("dy"):
            return self.members.setdefault("dy", direct.Member("dy", "output_t", -1, True))
        return super()._member(node)


_PLANE = "e_D * e_H * e_W"


class _Pass(sink_text.Pass):
    """Of backward. Instructions are counted with those by which places are read."""

    def _count(self, nodes: Iterable[Node]) -> int:
        return instructions(nodes, of_gradients=True)

    def _keep(self, name: str, writer: sink_text.Writer, lines: Sequence[str]) -> None:
        super()._keep(name, writer, lines)
        self.instructions += _READING * len({*re.findall(r"\w+\[at", " ".join(lines))})

    def _writer(self, node: Node, given: Mapping[Node, str]) -> _Writer:
        return _Writer(self.segment, node, self.has_places, self._arrays(), given)

    def _arrays(self) -> dict[Node, Array]:
        given = self.program.given
        if any(a.kind not in ("value", "real", "output") for a in given.values() if not a.space.small):
            raise Unsupported("backward reads masks, or places, beside v")
        return given | super()._arrays()

    def arrange(self) -> None:
        """What is stored comes last, and takes what sums of the same tail leave."""
        super().arrange()
        stored = [sink for sink in self.sinks if sink.kind == "store"]
        if len(stored) != 1 or any(sink.kind == "channels" for sink in self.sinks):
            return
        same = [s for s in self.sinks if s.kind in ("sums", "moments") and s.tail == stored[0].tail]
        if same and not stored[0].tail.startswith("conv::"):
            others = [sink for sink in self.sinks if sink not in (same[0], stored[0])]
            self.sinks = [*others, same[0]._replace(leaves=True), stored[0]._replace(takes=True)]


class _Backward(sinks._Composer):
    """The passes of load's backward."""

    launcher, of_pass = "backward", _Pass

    def __init__(self, segment, mainloop, saving: programs.Composed):
        self.segment, self.mainloop, self.stores, self.saving = segment, mainloop, False, None
        self.convolving, self.graph, self.stored = mainloop.sinks, segment.graph, None
        own, self.left = saving.backward, [a for a in saving.saved if a.name != "v"]
        if own.gate:
            raise Unsupported("a gradient that may not pass is looked for in front")
        self.program = Program(self.graph, own.roots, own.given, own.channels)
        self.program.kept, self.roots = own.kept, self.program.roots
        self.reading = self._texts()
        if not self.reading:
            raise Unsupported("backward reads no v")

    def _kept(self) -> list[Array]:
        return [*self.program.kept]

    def _results(self) -> list[Array]:
        return [self.program.arrays[Key("value", root.node)] for root in self.program.roots]

    def _incoming(self) -> list[Array]:
        return [_DY, *self.left]


def _composed(segment, mainloop, saving: programs.Composed) -> sinks.Composed:
    """Made once. Raises Unsupported."""
    with programs.lock:
        known = vars(segment.graph).setdefault("again", {})
        key = mainloop.name, saving.text
        if key not in known:
            try:
                made = _Backward(segment, mainloop, saving)
                known[key] = made.composed(), made.program
            except Unsupported as error:
                known[key] = str(error)  # itself would keep its callers' tensors
        if isinstance(known[key], str):
            raise Unsupported(known[key])
        return known[key]


# ------------------------------------------------------------------------------------------------------------------ choosing


class _Found(NamedTuple):
    """saving: of the schedule `load`; program: backward's, as its passes are here."""

    mainloop: mainloops.Mainloop
    saving: programs.Composed
    forward: sinks.Composed
    backward: sinks.Composed
    program: Program

    def build(self, case: Case, of: sinks.Composed) -> dict:
        request = sinks.build(self.mainloop, of, case)
        names = {"name": request["name"].replace("sinks", "again")} if of is self.backward else {}
        return request | names | {"defines": request["defines"] | self.mainloop.sinks.pinned}


def _chosen(case: Case) -> _Found:
    """Raises Unsupported."""
    if not case.saving:
        raise Unsupported("no backward follows")
    direct.check(case)
    if not case.x.dtype == case.dtype == torch.float32:
        raise Unsupported("in 16 bits v is kept as the library rounds it")
    if library.is_channels_last(case.x, case.weight) or case.last or case.turns_y:
        raise Unsupported("x, the weight or y lies channels last")
    if case.segment.random:
        raise Unsupported("the tail has dropout")
    saving = programs.composed_of(case.segment, programs.kind_for(case))
    if all(array.name != "v" for array in saving.saved):
        raise Unsupported("backward doesn't need v")
    if _wants_units(case):
        raise Unsupported("dz is wanted in 16 bits")
    refused = []
    for mainloop in mainloops.MAINLOOPS:
        if (
            mainloop.dimensions == case.weight.dim() - 2
            and mainloop.sinks
            and mainloop.sinks.pinned is not None
        ):
            try:
                return _through(case, mainloop, saving)
            except Unsupported as error:
                refused.append(f"{mainloop.name}: {error}")
    raise Unsupported("; ".join(refused) or "no mainloop of few channels in")


def _wants_units(case: Case) -> bool:
    """Would the gradients be of a dz in 16 bits?"""
    plan = load_plan.Plan.of(case)
    x, weight = case.x, case.weight
    asked = gradients.fastest(case.segment, x, weight, _requires_grad(x), True, load_plan.in_units(plan))
    return load_plan.gives_dz(plan) and gradients.PACKED in asked


def _requires_grad(x) -> bool:
    return bool(getattr(getattr(x, "tensor", x), "requires_grad", False))


def _through(case: Case, mainloop, saving: programs.Composed) -> _Found:
    mainloop.check_walk(case.segment, case.weight)
    ahead = sinks.composed(case.segment, mainloop, case.exact_order, False, saving)
    found = _Found(mainloop, saving, ahead, *_composed(case.segment, mainloop, saving))
    tiles = []
    for each in (found.forward, found.backward):
        if reason := mainloop.refuses(sinks.job(each, case)):
            raise Unsupported(reason)
        if max(map(_sums, each.parts.values())) > mainloop.sinks.pinned_sums:
            raise Unsupported("its sums take more shared memory than tiles leave in both directions")
        defines = found.build(case, each)["defines"].items()
        tiles.append({name: value for name, value in defines if not name.endswith("_SHARED")})
    if tiles[0] != tiles[1]:
        raise Unsupported("v would be formed in other tiles")
    if not choice.is_silent() and not pays(case, found):
        raise Unsupported("v's way to memory and back takes less time than its products again")
    return found


def pays(case: Case, found: _Found) -> bool:
    """Do products, tails and what is stored inside mainloops take less time than where v is kept: its way to memory and back, and what is stored inside
    then? In picoseconds of an element; tails in passes over v are hidden behind memory. A block computes all its channels, though there be fewer."""
    mainloop, scale = found.mainloop.sinks, tiling.device_properties(case.x.device.index).scale
    parts, (first, *later) = [*found.backward.parts.values()], found.forward.parts.values()
    C, block = case.weight.shape[0], mainloop.channels
    filled = -(-C // block) * block / C
    splits = mainloop.splits(jobs.job_of(case, ()))
    products = 2e12 * math.prod(case.weight.shape[1:]) * (3 if splits else 1) / mainloop.rate
    inside = _first_is_inside(case)
    behind = later if inside else [first, *later]  # passes of forward that would read v
    again = (len(later) + len(parts)) * products + costs.SECOND * _stores(first, *later, *parts)
    again += SUM * sum(sink.kind == "sums" and not sink.leaves for each in parts for sink in each.sinks)
    again += costs.INSTRUCTION * sum(each.instructions for each in (*parts, *behind))
    kept = costs.SECOND * (1 + (_stores(first) if inside else 0)) / scale.compute
    kept += 1e6 * (1 + len(behind) + len(parts)) * case.x.element_size() / (costs.PASS_BYTES * scale.memory)
    return filled * again / scale.compute <= ABOUT * kept


def _stores(*parts: sink_text.Pass) -> int:
    """How many results mainloops store, each of which takes as much as a second one beside a first."""
    return sum(sink.kind == "store" for each in parts for sink in each.sinks)


def _sums(part: sink_text.Pass) -> int:
    """Of a pass, moments as three."""
    return sum({"sums": 1, "moments": 3}.get(sink.kind, 0) for sink in part.sinks)


def _first_is_inside(case: Case) -> bool:
    """Is v stored beside what forward's first pass makes, where it is kept?"""
    try:
        direct.describe(case)
        return True
    except Unsupported:
        return stored.first_beside(case) is not None


# ------------------------------------------------------------------------------------------------------------------- running


def requests(case: Case) -> list[dict]:
    """The first one is load's, which an edited text starts from."""
    found = _chosen(case)
    return [*schedule.requests(case), found.build(case, found.forward), found.build(case, found.backward)]


def _without_v(composed: programs.Composed) -> programs.Composed:
    return composed._replace(saved=[array for array in composed.saved if array.name != "v"])


def plan(case: Case) -> load_plan.Plan:
    found = _chosen(case)
    made = schedule.plan(case, own=lambda *_: None)  # which is not called: `instead` stands for all
    made.composed = _without_v(made.composed)
    sinks.set_forward(made, case, found.mainloop, found.forward, found.build(case, found.forward))
    request = found.build(case, found.backward)
    inline_loader.load(**request)  # what can't be built is known before forward runs
    own = found.program, found.backward, found.mainloop, request, case.exact_order
    made.again = functools.partial(_launch_back, *own)
    return made


def _launch_back(
    program: Program,
    composed: sinks.Composed,
    mainloop,
    request: Mapping,
    exact_order: bool,
    made: load_plan.Plan,
    arguments: Sequence,
    given: Sequence[str],
    shapes: Mapping,
    returned: Sequence[str | None] | None = None,
) -> Launch:
    """Of a plan, for arguments like its own, of which it keeps none. shapes: of what isn't of its own. returned: as a Launch has it."""

    def entry(array: Array, place: int | None) -> Entry:
        shape = None
        if array.name not in given:
            shape = shapes[array.name] if array.name in shapes else load_plan.shape_of(made, program, array)
        return Entry(array.name, load_plan.dtype_of(made, array), None, shape, shape is not None)

    case = Case(made.segment, arguments, True, made.dtype, exact_order)
    return sinks.launch_of(case, mainloop, composed, entry, request, given, returned)


def saved(case: Case) -> list:
    """As schedule.saved, without v."""
    arrays = programs.composed_of(case.segment, programs.kind_for(case)).saved
    return [each for each, array in zip(schedule.saved(case), arrays) if array.name != "v"]


def describe(case: Case) -> str:
    found, whole = _chosen(case), load_plan.Plan.of(case)
    saving = found.saving
    ahead, back = (saving.forward, saving.forward_names), (saving.backward, saving.backward_names)
    kept = load_words.in_bytes(math.prod(whole.sizes.shape(ELEMENTS)) * case.x.element_size())
    again = [load_words.pass_words(whole, *back, i, reads_v=False) for i in found.backward.parts]
    by = found.mainloop.in_words(sinks.job(found.forward, case))
    words = [f"{by}: {found.forward.line}", *_others(whole, *ahead, found.forward)]
    words[-1] += f"; backward: v is formed again, {kept} are not kept, for {' and for '.join(again)}"
    made = replace(whole, composed=_without_v(saving))
    of_weight = load_plan.of_our_own(made, case.x, case.weight, False, True).weight
    words[-1] += halves.in_words(made, of_weight is not None)
    words += _others(whole, *back, found.backward)
    return ", ".join([*words, *gradients.in_words(case.segment, case.x, case.weight, False)])


def _others(whole: load_plan.Plan, program: Program, names: naming.Names, own: sinks.Composed) -> list[str]:
    """The passes over positions that aren't the mainloop's."""
    if not any(isinstance(each, Planes) for i, each in enumerate(program.passes) if i not in own.parts):
        return []
    return [load_words.passes_in_words(whole, program, names, own.parts)]
