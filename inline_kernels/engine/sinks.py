"""The schedule `direct` where a tail reduces: a segment's passes (passes.py), those over v by mainloops with sinks, the others as `load`'s.

What a pass over v makes, its sinks take from the registers: moments and sums over positions, reductions over channels with what is pointwise
behind them, y itself. Where several passes read v,

- `recompute`: each of them forms the products again, and v is never written; or
- `store`: the first one writes v, or the value that is normalised, once, in y's place where y has its shape; the later ones are `load`'s.
  That is exact for float32 alone.

The cheaper one runs, by the time that products take and bytes take (`_recomputes`). Small values between passes are computed as `load` does.

Where backward follows, forward makes what `load`'s makes: here, if backward doesn't need v (of a reduction over channels it needs the winner alone); else
the schedule `stored` has the first pass done beside v (`beside_v`). Backward is `load`'s.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

import inline_loader

from . import (
    cases,
    choice,
    direct,
    jobs,
    load_plan,
    load_words,
    mainloops,
    naming,
    programs,
    schedule,
    source,
    tiling,
)
from .algebra import reordered, statistics_of_v
from .cases import Case
from .graph import ELEMENTS
from .jobs import Job
from .launching import Entry, Launch, new_of
from .passes import Array, Key, Planes, Program, Root, Small, Unsupported
from .sink_calls import local
from .sink_text import Pass, Sink

__all__ = ["Unsupported", "backward", "describe", "forward", "plan", "reads_y", "requests", "saved", "spends"]

BY_SIZES = True
BYTES_A_SECOND = 4.3e12  # an H200's, as rates are
INSTRUCTIONS_A_SECOND = 9e12  # of a tail inside a mainloop, of all threads
# An element, beside what is stored: 15 in mainloops of which half of the channels are missing (21) took longer than a pass behind v, 4.87 ms a step for
# 4.66 (results/fuse/2026-11-27-h100-gradients.json, trials/few_weights.json), and forward 2.33 for 2.14, with what backward needs
# (…-judged.json); 23 in full ones (67) were not measured, nor more.
MOST_BESIDE = 24
_OWN_NAMES = set(
    "x padded y weight stream number seed stored scratch next kept next_kept values geometry largest v".split()
)


# ---------------------------------------------------------------------------------------------------------------- composing


class Composed(NamedTuple):
    """A text, and what its launcher takes: `results` that are written; `tensors`, with the types in which they are read, and `numbers` by
    the names of leaves, in order; is a seed among them? `parts`: the passes over v by the mainloop; is v stored? incoming: arrays of backward, behind
    the tensors."""

    text: str
    results: list[Array]
    tensors: list[tuple[str, str]]
    numbers: list[str]
    random: bool
    parts: Mapping[int, object]
    stores: bool
    incoming: Sequence[Array] = ()

    @property
    def line(self) -> str:
        """In words."""
        sinks = [" and ".join(sink.kind for sink in own.sinks) for own in self.parts.values()]
        if self.stores:
            return f"the convolution with {sinks[0]} in its mainloop, v or what is normalised written once, and passes over that"
        again = (
            ""
            if len(sinks) == 1
            else "; ".join(["", *[f"its products again with {each}" for each in sinks[1:]]])
        )
        return f"the convolution with {sinks[0]} in its mainloop{again}; v is never written"


def composed(
    segment, mainloop, exact_order: bool, stores: bool, saving: programs.Composed | None = None
) -> Composed:
    """saving: of the schedule `load`, whose results are then those of forward; v only where it is stored. Made once. Raises Unsupported."""
    with programs.lock:
        known = vars(segment.graph).setdefault("with sinks", {})
        key = mainloop.name, exact_order, stores, saving and saving.text
        if key not in known:
            try:
                known[key] = _Composer(segment, mainloop, exact_order, stores, saving).composed()
            except Unsupported as error:
                known[key] = str(error)  # itself would keep its callers' tensors
        if isinstance(known[key], str):
            raise Unsupported(known[key])
        return known[key]


class _Composer:
    launcher, of_pass = "forward", Pass

    def __init__(self, segment, mainloop, exact_order: bool, stores: bool, saving: programs.Composed | None):
        self.segment, self.mainloop, self.stores, self.saving = segment, mainloop, stores, saving
        self.convolving, self.graph = mainloop.sinks, segment.graph
        if saving:
            self._save()
            return
        (y,) = segment.outputs
        found = [y, *[n for update in segment.updates for n in (update.mean, update.variance)]]
        if not exact_order:
            found = statistics_of_v(reordered(found))
        self.roots = [Root("y", found[0], found[0].space, "output")]
        self.roots += programs.running_statistics(segment, found[1:])
        self.program, self.stored = Program(self.graph, self.roots, {}), None
        self.reading = self._texts()
        if not self.reading:
            raise Unsupported("the tail doesn't read v")
        if stores:
            self._store()

    def _save(self) -> None:
        """The passes of load's forward, of which the first that reads v writes it, if it is stored."""
        ahead, z = self.saving.forward, self.graph.leaf("z", ELEMENTS, "z")
        self.stored = z if self.stores else None
        self.roots = ahead.roots
        self.program = Program(self.graph, self.roots, {}, ahead.channels, joins=True)
        self.reading = self._texts()
        if not self.reading:
            raise Unsupported("the tail doesn't read v")

    def _texts(self) -> list[int]:
        """Texts of all passes as `load` has them; the numbers of those that read v."""
        self.names = programs.names_of(self.segment, self.program)
        made = [
            source.struct(f"Pass{i}", self.program, self.names, i) for i in range(len(self.program.passes))
        ]
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
            self.program = Program(self.graph, [*self.roots, Root("stored", node, ELEMENTS, "value")], {})
            self.reading = self._texts()
            if len(self.reading) == 1:
                self.stored = node
                return
        self.program, self.reading = before
        self._texts()

    def composed(self) -> Composed:
        by_mainloop = self.reading[: 1 if self.stores else None]
        parts: dict[int, Pass] = {}
        for i in by_mainloop:
            if not isinstance(self.program.passes[i], Planes) or self.program.passes[i].level != "e":
                raise Unsupported("a pass over windows reads v")
            parts[i] = own = self.of_pass(self.segment, self.program, i, self.mainloop.has_places)
            own.add(self.program.passes[i].targets)
            if self.stored is not None and self.stored.op == "leaf":
                own.store(self.stored, Array("stored", "value", ELEMENTS))
            if len(own.sinks) > self.convolving.most:
                raise Unsupported("several sinks at once")
            own.arrange()
            if sum(sink.kind == "channels" for sink in own.sinks) > 1:
                raise Unsupported("several reductions over channels in one pass")
        return self._source(parts)

    # ---- the launcher
    def _source(self, parts: Mapping[int, Pass]) -> Composed:
        tensors, numbers, random = self._given()
        names = [naming.identifier(name) for name in [name for name, _ in tensors] + numbers]
        results, incoming = self._results(), self._incoming()
        own_names = _OWN_NAMES | {a.name for a in (*results, *incoming) if incoming}
        if len({*names}) < len(names) or own_names & {*names}:
            raise Unsupported("a parameter has a name that the kernel has itself")
        structs, planned, locals_, body = [], [], [], []
        for i in range(len(self.program.passes)):
            if i not in parts:
                structs += [*self.lines[i], ""]
                body += [self._loaded(i, parts), *source.merging(self.program, i)]
                continue
            structs += parts[i].lines
            locals_ += [
                f"const {name} {local(name)}{{{', '.join(given)}}};" for name, given in parts[i].given.items()
            ]
            own, launched = self.convolving.launch(i, parts[i].sinks)
            planned, body = planned + own, body + launched
            for sink in parts[i].sinks:
                if sink.kind == "channels":
                    planned += self._blocks(i, sink)
                    body += self._merged(i, sink)
            body += source.merging(self.program, i)
        declared = [f"Out<{naming.EXPORTED[a.kind]}> {a.name}" for a in results]
        headers, padding = self.mainloop.padding(self.segment)
        declared += ["In<value_t> x", "In<value_t> weight"]
        declared += [f"In<{kind}> {naming.identifier(name)}" for name, kind in tensors]
        declared += [f"In<{naming.EXPORTED[a.kind]}> {a.name}" for a in incoming]
        declared += ["In<int64_t> seed", "int64_t number"] * random
        declared += [f"double {naming.identifier(name)}_given" for name in numbers]
        launcher = [*padding, *self._sizes(numbers), *planned, *self._memory(results, parts), *locals_, *body]
        text = [
            f"// {self.segment.conv.name}",
            *[
                f'#include "{each}"'
                for each in ("load/load.h", *headers, *self.convolving.headers, "core/math.h")
            ],
            "",
            self.mainloop.declared,
            self.convolving.declared,
            "template <class T> T* pointer(T* of) { return of; }",
            "",
            *structs,
            f"EXPORT void {self.launcher}({', '.join(declared)}, cudaStream_t stream) {{",
            *[f"  {line}" for line in launcher],
            "}",
            "",
        ]
        text = "\n".join(text)
        return Composed(text, results, tensors, numbers, random, parts, self.stores, incoming)

    def _results(self) -> list[Array]:
        kept, arrays = self._kept(), self.program.arrays
        found = [arrays[Key("value", root.node)] for root in self.program.roots if root.name != "stored"]
        found = [a for a in found if a not in kept] + [naming.KEPT] * bool(kept)
        return found + [Array("v", "value", ELEMENTS)] * bool(self.saving and self.stores)

    def _incoming(self) -> list[Array]:
        """What forward leaves for the launcher, and dy."""
        return []

    def _kept(self) -> list[Array]:
        """Small values for backward, which share a room."""
        return [*self.saving.forward.kept] if self.saving else []

    def _given(self) -> tuple[list[tuple[str, str]], list[str], bool]:
        """Tensors and numbers behind x and weight, in the order of the segment's."""
        kinds = [leaf.attr for leaf in self.program.leaves()]
        names = [leaf.attr[0] for leaf in self.segment.inputs[1:]]
        names += [*self.segment.parameters[1:], *self.segment.buffers]
        used = {name: kind for name, kind in kinds if kind in ("parameter", "buffer", "input")}
        types = {"input": "value_t", "parameter": "parameter_t", "buffer": "parameter_t"}
        tensors = [(n, types[used[n]]) for n in names if n in used]
        numbers = [name for name in self.segment.scalars if (name, "scalar") in kinds]
        return tensors, numbers, any(kind == "drawn" for _, kind in kinds)

    def _sizes(self, numbers: Sequence[str]) -> list[str]:
        first = 3 - self.graph.dimensions
        extents = [f"e_{side} = x.size({2 + i}) - KERNEL_{side} + 1" for i, side in enumerate("DHW"[first:])]
        if self.mainloop.walks:
            sides = enumerate("DHW"[first:])
            extents = [
                f"e_{side} = conv::walked(walk, {first + i}, x.size({2 + i} - LAST), KERNEL_{side})"
                for i, side in sides
            ]
        lines = [
            *[jobs.walk_text(self.graph.dimensions)] * self.mainloop.walks,
            "const int64_t N = x.size(0), C = CHANNELS_OUT;",
            f"const int64_t {', '.join(['e_D = 1'] * first + extents)};",
        ]
        for name, level in self.graph.levels.items():
            axes = [(1,) * first + level.window, (1,) * first + level.stride, (0,) * first + level.padding]
            sizes = [
                f"{name}_{side} = {_windows(f'{level.parent}_{side}', *axis)}"
                for side, *axis in zip("DHW", *axes)
            ]
            lines.append(f"const int64_t {', '.join(sizes)};")
        levels = "e", *self.graph.levels
        lines += [f"const load::Extent extent_{name}(N, C, {name}_D, {name}_H, {name}_W);" for name in levels]
        lines += [f"const real {naming.identifier(n)} = real({naming.identifier(n)}_given);" for n in numbers]
        lines.append(f"const Values values(x, weight{', walk' * self.mainloop.walks});")
        return [*lines, *self.convolving.prepared]

    def _memory(self, results: Sequence[Array], parts: Mapping[int, Pass]) -> list[str]:
        lines = []
        for i, each in enumerate(self.program.passes):
            if isinstance(each, Planes) and i not in parts:
                of_block = 1024 if each.by_sample else 4096
                lines.append(f"const int64_t parts_{i} = extent_{each.level}.positions() / {of_block} + 1;")
        kept = self._kept()
        made = [a for a in self.program.arrays.values() if a not in (*results, *kept) and a.name != "stored"]
        made += [source.few(a) for a in made if a.parts is not None]
        sizes = [f"({source.size(a)}) * int64_t(sizeof({naming.TYPES[a.kind]}))" for a in made]
        if made:
            lines.append(
                f"const Scratch<double> scratch({' + '.join(f'({size} + 15) / 16 * 2' for size in sizes)}, stream);"
            )
            lines.append("double* next = scratch;")
        constant = "const " * (naming.KEPT not in results)  # it comes in
        lines += [f"{constant}double* next_kept = kept;"] * bool(kept)
        for of, next_, arrays in (("", "next", made), (constant, "next_kept", kept)):
            types = [f"{of}{naming.TYPES[a.kind]}" for a in arrays]
            lines += [
                f"{t}* const {a.name} = load::next<{t}>({next_}, {source.size(a)});"
                for t, a in zip(types, arrays)
            ]
        if self.saving and self.stores:
            lines.append("value_t* const stored = v;")
        elif self.stores:
            in_place = self._in_place()
            scratch = "const Scratch<value_t> stored(N * C * e_D * e_H * e_W, stream);"
            lines.append("value_t* const stored = y;" if in_place else scratch)
        return lines

    def _blocks(self, number: int, sink: Sink) -> list[str]:
        """What blocks of channels leave, where one hasn't all of them."""
        channels, all_ = self.convolving.channels, int(self.convolving.all)
        count = f"blocks_{number} > {all_} ? N * blocks_{number} * e_D * e_H * e_W : 0"
        return [
            f"constexpr int blocks_{number} = (CHANNELS_OUT + {channels - 1}) / {channels};",
            f"const Scratch<{sink.reduction}::Partial> partial_{number}({count}, stream);",
        ]

    def _merged(self, number: int, sink: Sink) -> list[str]:
        to, positions = f"pointer<{sink.element}>({sink.array.name})", "e_D * e_H * e_W"
        given = f"{to}, partial_{number}, {local(sink.after)}, N, blocks_{number}, {positions}, stream"
        condition = f"if (blocks_{number} > {int(self.convolving.all)}) "
        return [f"{condition}reduce::merge_channels<{sink.reduction}>({given});"]

    def _in_place(self) -> bool:
        """Does y's pass read what is stored at its own place alone, and no later one that?"""
        root = self.program.roots[0]
        if root.space != ELEMENTS:
            return False
        (own,) = [i for i, each in enumerate(self.program.passes) if Key("value", root.node) in each.targets]
        reads = [text.reads_v or "stored" in text.pointers for text in self.program.texts]
        text = self.program.texts[own]
        return not (text.scalar or "y" in text.before_v) and not any(reads[own + 1 :])

    def _loaded(self, number: int, parts: Mapping[int, Pass]) -> str:
        each, text = self.program.passes[number], self.program.texts[number]
        given = source.given_few(self.program) if isinstance(each, Small) else {}
        struct = f"Pass{number}{{{', '.join(given.get(m, m) for m in text.members)}}}"
        if isinstance(each, Planes):
            v = "stored" if text.reads_v else "nullptr"
            behind = 1 + max((i for i in parts if i < number), default=-1)  # the mainloop, which goes up
            return source.planes_call(self.program, number, struct, v, first=behind)
        return source.small_call(self.program, number, struct)


# ----------------------------------------------------------------------------------------------------------------- choosing


def _windows(size: str, window: int | None, stride: int | None, padding: int) -> str:
    """How many there are along an axis."""
    if window is None:
        return "1"
    if (stride, padding) == (window, 0):
        return f"{size} / {window}"
    return f"({size} - {window - 2 * padding}) / {stride} + 1"


def chosen(case: Case, mainloop) -> Composed:
    """Of what can run the cheaper one. Raises Unsupported."""
    found, reasons = {}, []
    if case.stays_last and len(case.segment.inputs) > 1:
        raise Unsupported("y lies channels last, other inputs may not")
    for stores in (False, True):
        try:
            if stores and case.stays_last:
                raise Unsupported("what is stored for later passes lies in planes")
            if stores and not case.x.dtype == case.dtype == torch.float32:
                raise Unsupported("v isn't written in 16 bits")
            found[stores] = composed(case.segment, mainloop, case.exact_order, stores)
        except Unsupported as error:
            reasons.append(str(error))
    if not found:
        raise Unsupported("; ".join(dict.fromkeys(reasons)))
    if False in found and _recomputes(case, mainloop, [*found[False].parts.values()], True in found):
        return found[False]
    if True not in found and not choice.is_silent():
        raise Unsupported("v's way to memory and back takes less time than its products again")
    if True in found and _is_better_behind(case, mainloop, *found[True].parts.values()):
        raise Behind
    return found.get(True, found.get(False))


class Behind(Unsupported):
    """A mainloop could, and no other one is asked."""

    def __init__(self) -> None:
        super().__init__("what the first pass computes takes longer beside what is stored than behind it")


def _is_better_behind(case: Case, mainloop, own: Pass) -> bool:
    """A block computes so many channels, though there be fewer."""
    C, block = case.weight.shape[0], mainloop.sinks.channels
    most = MOST_BESIDE * mainloop.sinks.beside
    sums = mainloop.sinks.sums if any(sink.kind in ("moments", "sums") for sink in own.sinks) else 0
    taken = (own.instructions + sums) * -(-C // block) * block / C
    return taken > most and not choice.is_silent()


def _recomputes(case: Case, mainloop, passes: Sequence[Pass], stores: bool) -> bool:
    """Do products again, and what the first pass makes of v, take less time than v's way to memory, or that of what is made of it (`stores`), and
    back? About equal, they save its memory."""
    if len(passes) == 1:
        return True
    job, results = jobs.job_of(case, ()), case.sizes.N * case.sizes.positions("e") * case.weight.shape[0]
    scale = tiling.device_properties(case.x.device.index).scale
    products, rate = 3 if mainloop.sinks.splits(job) else 1, mainloop.sinks.rate * scale.compute
    again = mainloop.sinks.packing(job) * 1e-6 / results  # seconds, of each result
    again += 2 * math.prod(case.weight.shape[1:]) * products / rate
    again += passes[0].instructions / (INSTRUCTIONS_A_SECOND * scale.compute)
    moved = (2 if stores else 1 + len(passes)) * case.x.element_size()
    return (len(passes) - 1) * again <= 1.1 * moved / (BYTES_A_SECOND * scale.memory)


def _chosen(case: Case):
    """(mainloop, Composed) of the first mainloop that can run it. Raises Unsupported."""
    return _saving(case, False) if case.saving else _first(case, functools.partial(chosen, case))


def beside_v(case: Case):
    """(mainloop, Composed) of the first mainloop that can do the first pass beside v, which it writes, as load's forward returns both. Raises
    Unsupported."""
    return _saving(case, True)


def _saving(case: Case, stores: bool):
    if not case.x.dtype == case.dtype == torch.float32:
        raise Unsupported("backward needs what hangs on v as the library rounds it")
    if case.turns_y or case.stays_last:
        raise Unsupported("passes turn y on the way, or it lies channels last")
    saving = programs.composed_of(case.segment, programs.kind_for(case))
    needed = any(array.name == "v" for array in saving.saved)
    if stores != needed:
        raise Unsupported("backward needs v, which is not kept" if needed else "backward doesn't need v")

    def made(mainloop) -> Composed:
        if stores and mainloop.walks:
            raise Unsupported("it may be slower than the library")
        found = composed(case.segment, mainloop, case.exact_order, stores, saving)
        own = [sink.kind for part in found.parts.values() for sink in part.sinks]
        if not stores and (len(found.parts) > 1 or "channels" not in own):
            raise Unsupported("several passes read v, or nothing is reduced")
        if stores and _is_better_behind(case, mainloop, *found.parts.values()):
            raise Behind
        return found

    return _first(case, made)


def _first(case: Case, made: Callable[..., Composed]):
    direct.check(case)
    refused = []
    for mainloop in mainloops.MAINLOOPS:
        if mainloop.dimensions != case.weight.dim() - 2 or mainloop.sinks is None:
            continue
        try:
            mainloop.check_walk(case.segment, case.weight)
            found = made(mainloop)
            if (reason := mainloop.refuses(job(found, case))) is None:
                return mainloop, found
            refused.append(f"{mainloop.name}: {reason}")
            if reason == mainloops.SLOWER_INSIDE:
                break
        except Unsupported as error:
            refused.append(f"{mainloop.name}: {error}")
            if isinstance(error, Behind):
                break
    raise Unsupported("; ".join(refused))


def job(found: Composed, case: Case) -> Job:
    parts = found.parts.values()
    most = max(own.instructions for own in parts)
    return jobs.job_of(case, [case.dtype], sinks=[own.sinks for own in parts], instructions=most)


def build(mainloop, found: Composed, case: Case) -> dict:
    defines = case.defines | mainloop.all_defines(job(found, case))
    name = f"sinks_{naming.identifier(case.segment.conv.name)}"
    return {"name": name, "source": found.text, "device": "cuda", "defines": defines}


def requests(case: Case) -> list[dict]:
    own = build(*_chosen(case), case)
    return [own, *schedule.requests(_in_planes(case))] if case.saving else [own]


def alone(case: Case) -> tuple[dict, list[Array]]:
    """What is built where backward follows, with its results. Raises Unsupported."""
    mainloop, found = _saving(case, False)
    if naming.KEPT in found.results:
        raise Unsupported("small values are kept, too")
    return build(mainloop, found, case), found.results


def describe(case: Case) -> str:
    mainloop, found = _chosen(case)
    line = f"{mainloop.in_words(job(found, case))}: {found.line}"
    if not case.saving:
        return line
    behind = load_plan.Plan.of(_in_planes(case))
    return line + load_words.backward_in_words(behind, case.x, case.weight)


def _in_planes(case: Case) -> Case:
    """For `load`, which finds all in planes."""
    return case._replace(last=False, in_planes=True)


# ------------------------------------------------------------------------------------------------------------------ running


def plan(case: Case) -> Launch | load_plan.Plan:
    """Raises Unsupported with the reason where the schedule can't do it, or has no cause to."""
    if case.saving:
        return plan_saving(_in_planes(case), *_chosen(case))

    def entry(array: Array, place: int | None) -> Entry:
        kind = case.dtype if array.name == "y" else torch.float32
        shape, last = case.sizes.shape(array.space) if place is None else None, False
        if case.stays_last and array.name == "y":  # as it is, since nobody lays it out
            shape, last = [*shape[:2], *shape[5 - case.segment.graph.dimensions :]], True
        return Entry(array.name, kind, place, shape, True, last=last)

    return launch_of(case, *_chosen(case), entry)


def launch_of(
    case: Case,
    mainloop,
    found: Composed,
    entry: Callable[[Array, int | None], Entry],
    request: Mapping | None = None,
    given: Sequence[str] = (),
    returned: Sequence[str | None] | None = None,
) -> Launch:
    """entry: of a result, and the number of the argument that it is written over, or None; or of what is incoming. request: in place of `build`'s;
    given: the names of what is incoming, as the launch is given it: that may have been in others' hands. returned: as a Launch has it."""
    segment, arguments = case.segment, case.arguments
    request = request or build(mainloop, found, case)
    kernels = inline_loader.load(**request)
    x, weight_at, at = case.x, len(segment.inputs), cases.places(segment)
    table = [entry(array, at.get(array.name)) for array in found.results]
    dtypes = {"value_t": x.dtype, "accumulate_t": torch.float32, "parameter_t": case.parameter_dtype}
    lasts = [bool(request["defines"].get(name)) for name in ("LAST", "WEIGHT_LAST")]
    table += [
        Entry(name, x.dtype, place, last=last)
        for name, place, last in zip(("x", "weight"), (0, weight_at), lasts)
    ]
    table += [Entry(name, dtypes[kind], at[naming.identifier(name)]) for name, kind in found.tensors]
    table += [entry(array, None) for array in found.incoming]
    if found.random:
        table.append(Entry("seed", torch.int64, at["seed"]))
    values = dict(zip(segment.scalars, arguments[cases.first_number(segment) :]))
    numbers = [float(values[name]) for name in found.numbers]
    launcher = kernels.backward if given else kernels.forward
    bind = functools.partial(launcher.bound, *numbers, trusting=not given, new=new_of(table))
    number = at["seed"] + 1 if found.random else None
    return Launch(bind, table, arguments, given, number, returned=returned)


def plan_saving(case: Case, mainloop, found: Composed) -> load_plan.Plan:
    """load's, whose forward that launcher stands for."""
    plan = schedule.plan(case, own=lambda *_: None)  # which is not called
    set_forward(plan, case, mainloop, found)
    return plan


def set_forward(
    plan: load_plan.Plan, case: Case, mainloop, found: Composed, request: Mapping | None = None
) -> None:
    """That launcher gives y and what is saved. request: as `launch_of` has it."""
    entry, returned = functools.partial(load_plan.entry_of, plan), [a.name for a in plan.composed.saved]
    launch = launch_of(case, mainloop, found, entry, request, returned=("y", *returned))
    plan.instead = lambda arguments, _: launch.run(arguments)


def forward(plan: Launch | load_plan.Plan, arguments: Sequence) -> list[Tensor]:
    """y, and what backward needs."""
    return plan.run(arguments) if isinstance(plan, Launch) else schedule.forward(plan, arguments)


backward, saved, spends, reads_y = schedule.backward, schedule.saved, schedule.spends, schedule.reads_y
