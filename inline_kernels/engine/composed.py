"""The schedule `fused`: a composed source of kernels/, written for one formula, runs a segment that computes that formula.

kernels/composed.json (choice.py) says of each source which formula it is for: the digest of `formula`'s text, in which tensors and numbers have
places instead of names and values, and the names by which the source knows what is at those places. So any model with the formula gets it.

The protocol, which exported cells follow, too (export/cell_host.py). Of a launcher, Out tensors come first, then In tensors, then numbers, each
known by its name:

- x, weight (the convolution's), y, dy; other parameters by their attributes in the model that the source was written for, with underscores in
  the place of dots (norm_weight); by channel they have C elements, in the dtype that the launcher reads;
- `seed` and `number`, by which random numbers are drawn: a function of number alone where seed has no elements;
- numbers of the model likewise (norm_eps); what is written in capitals is a macro (POOL_H). Another number is asked of an int64_t function of
  its name;
- `v`, in x's place, is the library's convolution without its bias; backward then gives `dv`, and the library the rest.

forward(Out y, …) gives y; forward_saving, or where there is none forward, what backward needs, too: Out tensors of as many elements as
`EXPORT int64_t <name>_size(…) { return …; }` says, an expression that is Python's, too, but for `/`: it gives shapes where nothing is built.
Without gradients they have no elements. Launchers backward… run in the source's order, but for those that have no more than another one has of
what is wanted: they give dx and dweight, without elements where nobody wants them, a d_<name> of each parameter, of as many elements as that
has, and may give more to those behind them, which has no elements where none of those runs.
"""

from __future__ import annotations

import functools
import hashlib
import operator
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

import inline_loader
from inline_kernels.loader.source import Launcher, parse_launchers, read

from . import launching, library, mainloops
from .cases import Case
from .choice import known
from .graph import Node, order
from .passes import Unsupported

__all__ = ["Unsupported", "backward", "describe", "forward", "plan", "requests", "saved"]

NO_SOURCE = "there are no fused kernels for this formula"
AS_THEY_ARE = True  # under autocast, too: operands of a wider type


# ------------------------------------------------------------------------------------------------------------------- formulas


class Hole(NamedTuple):
    """A number at a place of a formula: an attribute's, by its name, or a `value`."""

    name: str | None
    value: float | int | None


def formula(segment) -> tuple[str, list[str], list[Hole]] | None:
    """What the segment computes, its tensors and its numbers by place: equal for segments that differ in names, numbers, channels, groups,
    windows, and in which parameters are one number for all channels. None where it is of a kind that no source is written for."""
    holes: list[Hole] = []

    def hole(value) -> str:
        holes.append(Hole(None, value))
        return "#"

    if len(segment.inputs) > 1 or segment.updates or len(segment.random) > 1:
        return None
    conv = segment.conv
    plain = {*conv.stride, *conv.dilation, conv.groups} == {1} and not conv.is_nothing
    if not plain or isinstance(conv.padding, str) or any(conv.padding):
        return None
    tensors = [*segment.parameters, *segment.buffers]
    lines = [f"{conv.nd} {segment.axes} {len(tensors)}"]
    for name, level in sorted(segment.graph.levels.items()):
        if not level.is_apart:
            return None
        lines.append(f"{name} {level.parent} {[w and hole(w) for w in level.window]}")
    nodes = order(segment.outputs)
    kept = {node for node in nodes if node.is_leaf("drawn")}
    factors = {a for node in nodes if kept & {*node.args} for a in node.args if a.op == "const"}
    as_numbers = {node: node.args[0] for node in nodes if _is_rounded_number(node)}
    nodes = [node for node in nodes if node not in as_numbers]
    place = {node: i for i, node in enumerate(nodes)}
    place |= {node: place[number] for node, number in as_numbers.items()}
    for node in nodes:
        name, kind = node.attr if node.op == "leaf" else ("", "")
        if node.op == "const" or kind == "scalar":
            what = "number"
            if node not in factors:
                holes.append(Hole(name or None, node.attr if node.op == "const" else None))
        elif kind == "drawn":
            what = f"kept by {hole(segment.random[0].p)}"
        elif kind:
            what = f"tensor {tensors.index(name)}" if name in tensors else kind
        elif node.op in ("group", "count", "variance"):
            parts = node.attr if isinstance(node.attr, tuple) else (node.attr,)
            what = f"{node.op} {[hole(each) if isinstance(each, int) else each for each in parts]}"
        else:
            what = f"{node.op} {node.attr}" + f" {node.space}" * (not node.space.small)
        lines.append(f"{what} {[place[a] for a in node.args]}")
    return "\n".join(lines), tensors, holes


def _is_rounded_number(node: Node) -> bool:
    """A number that was made a tensor, of whatever type. Beside a tensor with dimensions eager takes it in that one's type: a source does so, too."""
    of_type = node.op in ("narrow", "of_values", "of_results")
    return of_type and (node.args[0].op == "const" or node.args[0].is_leaf("scalar"))


class Written(NamedTuple):
    """A source for a segment. `tensors`: its names of the segment's tensors, in their order; `numbers` by name; `macros`."""

    name: str
    folder: Path
    mainloop: str
    shared: int  # bytes of shared memory that kernels take beside the mainloop's, at most
    tensors: list[str]
    numbers: dict[str, Hole]
    macros: dict[str, int]

    def path(self, device: str) -> Path:
        return self.folder / f"{self.name}.{'cu' if device == 'cuda' else 'cpp'}"


def written_for(segment) -> Written | None:
    """The source of the segment's formula. Found once; kept with its graph."""
    kept = vars(segment.graph)
    if "written" not in kept:
        kept["written"] = _written_for(segment)
    return kept["written"]


def digest_of(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _written_for(segment) -> Written | None:
    if (found := formula(segment)) is None:
        return None
    text, tensors, holes = found
    for name, row in known().items():
        for each in row.get("formulas", ()):
            if each["digest"] != digest_of(text):
                continue
            names, numbers = each["names"].split(), {}
            for key, value in [*zip(names[len(tensors) :], holes), *_given(each.get("given", {}))]:
                if numbers.setdefault(key, value) != value:
                    return None  # the source takes the two for one
            macros = {key: value.value for key, value in numbers.items() if key.isupper()}
            own = row.get("mainloop", ""), row.get("shared", 0)
            return Written(name, row["folder"], *own, names[: len(tensors)], numbers, macros)
    return None


def _given(numbers: Mapping[str, float]) -> list[tuple[str, Hole]]:
    return [(key, Hole(None, value)) for key, value in numbers.items()]


# ------------------------------------------------------------------------------------------------------------------- deciding

_TYPES = {"float": torch.float32, "double": torch.float64, "bool": torch.bool}
_TYPES |= {f"{name}_t": getattr(torch, name) for name in ("uint8", "int32", "int64")}
_parsed = functools.lru_cache(64)(lambda text: {each.name: each for each in parse_launchers(text)})


class Sized(NamedTuple):
    """What sizes are asked of."""

    shape: Sequence[int]

    def size(self, axis: int) -> int:
        return self.shape[axis]

    def numel(self) -> int:
        return functools.reduce(operator.mul, self.shape, 1)


class Call:
    """A source for a case. Raises Unsupported with the reason where there is none, or it can't run."""

    def __init__(self, case: Case, edited: str | None = None):
        segment, arguments, saving, dtype, exact_order = case[:5]
        x, weight = arguments[:2]
        self.case, self.segment, self.arguments, self.saving = case, segment, arguments, saving
        self.written, self.device = written_for(segment), case.device
        if self.written is None:
            raise Unsupported(NO_SOURCE)
        if self.device != "cuda":
            raise Unsupported("on a CPU the convolution is not inside our kernels")
        if exact_order:
            raise Unsupported("the fused kernels add in another order than eager")
        if dtype not in (torch.float32, torch.float16, torch.bfloat16):
            raise Unsupported(f"there are no fused kernels for results of {dtype}")
        if reason := mainloops.SOURCES[self.written.mainloop].obstacle(x, weight, saving, self.written):
            raise Unsupported(reason)
        self.text = edited or read(self.written.path(self.device))
        self.launchers = _parsed(self.text)
        wide = torch.float64 if x.dtype == torch.float64 else torch.float32
        self.types = {**_TYPES, "value_t": x.dtype, "output_t": dtype, "accumulate_t": wide}
        self.forward = self.launchers[
            "forward_saving" if saving and "forward_saving" in self.launchers else "forward"
        ]
        sizes = case.sizes
        positions = sizes.levels[segment.outputs[0].space.level][5 - weight.dim() :]
        of_axis = {"n": sizes.N, "c": sizes.C} | {str(i): size for i, size in enumerate(positions)}
        self.shape = [of_axis[axis] for axis in segment.axes]  # of y

    def defines(self, phase: str) -> dict:
        """Of a build of forward, forward_saving or backward."""
        x, weight, written = *self.arguments[:2], self.written
        own = self.case.defines | written.macros
        return own | mainloops.SOURCES[written.mainloop].defines(x, weight, phase, written)

    def request(self, names: Sequence[str], defines: dict) -> dict:
        """What inline_loader builds: launchers of those names, with what they ask."""
        asked = {p.name for each in names for p in self.launchers[each].parameters if not p.tensor}
        own = {
            "name": self.written.name,
            "source": self.text,
            "device": self.device,
            "folder": self.written.folder,
        }
        return own | {"defines": defines, "launchers": [*names, *sorted(asked & self.launchers.keys())]}

    def number(self, name: str) -> float | int | None:
        """A number of the model, now; None: the source is asked."""
        if (hole := self.written.numbers.get(name)) is None:
            return None
        if hole.name is None:
            return hole.value
        first = 1 + len(self.written.tensors) + 2 * bool(self.segment.random)
        return float(self.arguments[first + list(self.segment.scalars).index(hole.name)])

    def numbers(self, launcher: Launcher) -> list:
        """Of a launcher, but for what is drawn: a value, or the name of what is asked."""
        names = [p.name for p in launcher.parameters if not p.tensor]
        drawn = [] if self.segment.random else [0]
        known = [drawn if name == "number" else [self.number(name)] for name in names]
        return [name if each is None else each for name, own in zip(names, known) for each in own]

    def size(self, name: str) -> int:
        """Of how many elements is an Out tensor? By the text of its function."""
        found = re.search(rf"\b{name}_size\(([^)]*)\)\s*{{\s*return\s+([^;]*);", self.text)
        of = {
            "x": self.arguments[0].shape,
            "weight": self.arguments[1].shape,
            "y": self.shape,
            "dy": self.shape,
        }
        given = [each.split()[-1] for each in found[1].split(",")]
        values = {each: Sized(of[each]) if each in of else self.number(each) for each in given}
        return eval(
            " ".join(found[2].split()).replace("/", "//"),
            {"__builtins__": {}},
            values | self.defines("forward"),
        )

    def sizes(self, launcher: Launcher) -> dict[str, tuple[int, torch.dtype]]:
        """What it writes beside y and gradients."""
        own = [p for p in launcher.parameters if p.written and f"{p.name}_size" in self.launchers]
        return {p.name: (self.size(p.name), self.types[p.ctype]) for p in own}


def requests(case: Case) -> list[dict]:
    call = Call(case)
    return [call.request([call.forward.name], call.defines(call.forward.name))]


def describe(case: Case) -> str:
    Call(case)
    return "the convolution runs inside our kernels"


def saved(case: Case) -> list[tuple[list, torch.dtype, torch.memory_format]]:
    call = Call(case)
    return [([size], kind, torch.contiguous_format) for size, kind in call.sizes(call.forward).values()]


# -------------------------------------------------------------------------------------------------------------------- running


class Back(NamedTuple):
    """Backward where dx and dweight are wanted, or not. reads: of the arguments, the places of those that are read as they are. There are
    then dy, what is kept, those, and what `launches` make. Of that the places of the gradients, or None; those that are `converted` then, and dv,
    from which the library makes what is `missing` of (dx, dweight)."""

    reads: Sequence[int]
    launches: Sequence[launching.Launch]
    gradients: Sequence[int | None]
    converted: Sequence[tuple[int, torch.dtype]]
    dv: int | None
    missing: Sequence[bool]


class Plan:
    """What is decided for arguments with the same shapes, dtypes and numbers. `kept`: what forward leaves for backward, by name. `made`: the sizes of what launchers write beside y and gradients."""

    def __init__(self, call: Call):
        self.names, self.channels = ["x", *call.written.tensors], len(call.arguments[1])
        self.convolution = library.Convolution.of(call.segment.conv, call.arguments[1])
        self.seed = len(self.names) if call.segment.random else None  # its place; the number's is the next
        self.types, self.made = call.types, call.sizes(call.forward) if call.saving else {}
        self.convolves = ["v"] * any(p.name == "v" for p in call.forward.parameters)
        self.kept = [*self.made, *(self.convolves if call.saving else [])]
        kernels = inline_loader.load(**call.request([call.forward.name], call.defines(call.forward.name)))
        # A situation's arguments are alike, and what is written is new.
        bind = self._binding(kernels, call.forward, call.numbers(call.forward), trusting=True)
        shapes = {"y": call.shape, **{name: (size,) for name, (size, _) in self.made.items()}}
        self.launch = self._launch(
            bind, call.forward, call.arguments, self.convolves, shapes, launching.ANYWHERE, ("y", *self.kept)
        )
        self.backwards, self.backs = {}, {}
        if call.saving:
            self.request = functools.partial(call.request, defines=call.defines("backward"))
            for name, each in call.launchers.items():
                if name.startswith("backward") and not each.asked:
                    self.backwards[each] = call.numbers(each)
                    self.made |= call.sizes(each)
        call.case, call.arguments = None, ()  # which nothing here shall keep

    def _binding(self, kernels, launcher: Launcher, numbers: Sequence, trusting: bool = False) -> Callable:
        known = [getattr(kernels, each)() if isinstance(each, str) else each for each in numbers]
        new = sum(p.written for p in launcher.parameters)
        return functools.partial(getattr(kernels, launcher.name).bound, *known, trusting=trusting, new=new)

    def _launch(
        self,
        bind: Callable,
        launcher: Launcher,
        arguments: Sequence,
        given: Sequence[str],
        shapes: Mapping,
        aligned: int,
        returned: Sequence[str] | None = None,
    ) -> launching.Launch:
        """shapes: of what is written; nobody wants the rest. aligned: of an Entry. returned: as a Launch has it."""
        table, draws = [], False
        for p in launcher.parameters:
            if not p.tensor:
                draws |= p.name == "number" and self.seed is not None
                continue
            at, shape, channels = None, None, 0
            if p.written:
                shape = shapes.get(p.name, (0,))
            elif p.name == "seed":
                at, shape = self.seed, None if self.seed else (0,)
            elif p.name not in given:
                at = self.names.index(p.name)
                channels = self.channels if at > 1 else 0
            table.append(
                launching.Entry(p.name, self.types[p.ctype], at, shape, p.written, channels, aligned)
            )
        number = self.seed + 1 if draws else None
        return launching.Launch(bind, table, arguments, given, number, returned=returned)

    def planned_back(self, wanted: tuple[bool, bool], arguments: Sequence, saved: Sequence[Tensor]) -> Back:
        """Where dx, and dweight, are wanted or not."""
        shapes = {name: (size,) for name, (size, _) in self.made.items()}
        shapes |= {f"d{_}v": t.shape for name, t in zip(self.kept, saved) if name == "v" for _ in ("", "_")}
        for i, (name, t) in enumerate(zip(self.names, arguments)):
            if i > 1 or wanted[i]:
                shapes |= {f"d{name}": t.shape, f"d_{name}": t.shape}
        steps = self._steps(wanted)
        read = {
            p.name: self.types[p.ctype]
            for each, _ in steps
            for p in each.parameters
            if p.tensor and not p.written
        }
        for name in self.made.keys() - read.keys():
            shapes[name] = (0,)  # for launchers that do not run
        reads = [
            i
            for i, (name, t) in enumerate(zip(self.names, arguments))
            if name in read and self._is_ready(i, t, read[name])
        ]
        there, types, launches = ["dy", *self.kept, *[self.names[i] for i in reads]], {}, []
        for launcher, bind in steps:
            written = {p.name: self.types[p.ctype] for p in launcher.parameters if p.written}
            given = ["" if name in written else name for name in there]
            launches.append(self._launch(bind, launcher, arguments, given, shapes, 0))
            there, types = [*given, *launches[-1].made], types | written
        own = [
            next((d for d in (f"d{name}", f"d_{name}") if d in shapes and d in there), None)
            for name in self.names
        ]
        converted = [
            (i, t.dtype) for i, (d, t) in enumerate(zip(own, arguments)) if d and types[d] != t.dtype
        ]
        dv = next((there.index(d) for d in ("dv", "d_v") if d in there), None)
        missing = [dv is not None and want and not d for want, d in zip(wanted, own)]
        missing = missing if any(missing) else ()
        self.backs[wanted] = Back(
            reads, launches, [d and there.index(d) for d in own], converted, dv, missing
        )
        return self.backs[wanted]

    def _is_ready(self, i: int, t: Tensor, dtype: torch.dtype) -> bool:
        return t.dtype == dtype and (i < 2 or t.numel() == self.channels)

    def _steps(self, wanted: tuple[bool, bool]) -> list[tuple[Launcher, Callable]]:
        """What backward launches. Launchers of which another build has none are built alone."""
        chosen, others = self._chosen(wanted), self._chosen((False, wanted[1]))
        groups = [[each for each in chosen if (each in others) is shared] for shared in (True, False)]
        binding = {}
        for group in filter(None, groups):
            kernels = inline_loader.load(**self.request([each.name for each in group]))
            binding |= {each: self._binding(kernels, each, self.backwards[each]) for each in group}
        return [(each, binding[each]) for each in chosen]

    def _chosen(self, wanted: tuple[bool, bool]) -> list[Launcher]:
        unwanted = {
            f"{d}{name}" for name, want in zip(("x", "weight"), wanted) for d in ("d", "d_") if not want
        }
        made = {each: {p.name for p in each.parameters if p.written} for each in self.backwards}

        def better(other: set, own: set) -> bool:
            more, all_own = other - unwanted, own - unwanted
            return all_own <= more and (all_own != more or len(other) < len(own))

        return [
            each
            for each, own in made.items()
            if not any(better(other, own) for other in [set(), *made.values()])
        ]


def plan(case: Case, edited: str | None = None) -> Plan:
    return Plan(Call(case, edited))


def forward(plan: Plan, arguments: Sequence) -> list[Tensor]:
    """y, and what backward needs."""
    if not plan.convolves:
        return plan.launch.run(arguments)
    return plan.launch.run(arguments, library.convolve(plan.convolution, *arguments[:2]))


def backward(
    plan: Plan, dy: Tensor, arguments: Sequence, saved: Sequence[Tensor], needs: Sequence[bool]
) -> list[Tensor | None]:
    """The gradients of x, parameters and buffers (None)."""
    wanted = needs[0], needs[1]
    back = plan.backs.get(wanted) or plan.planned_back(wanted, arguments, saved)
    # A user's hooks may give arguments back in other strides.
    there = library.all_aligned(dy, *saved, *[arguments[i] for i in back.reads])
    for launch in back.launches:
        there += launch.run(arguments, *there)
    found = [None if place is None else there[place] for place in back.gradients]
    for i, dtype in back.converted:
        found[i] = found[i].to(dtype)
    if back.missing:
        both = library.convolve_backward(plan.convolution, there[back.dv], *arguments[:2], back.missing)
        found[:2] = [ours if ours is not None else theirs for ours, theirs in zip(found, both)]
    return found
