"""The schedule `load`: the library's convolution gives v, generated kernels do the rest of a segment, forward and backward.

    plan = schedule.plan(segment, arguments, saving=True, dtype=torch.float32)
    y, *saved = schedule.forward(plan, arguments)
    gradients = schedule.backward(plan, dy, arguments, saved, needs)

`arguments`: tensors (x and the second inputs, parameters, buffers that are read, two for each update of running statistics), then, where there
is dropout, a seed and a number, then the model's numbers. y and dy are contiguous; their shape is the caller's, what counts is the order of
their elements. What forward saves is v, or masks in its place where backward needs no more of it, and results of reductions.

passes.py decides what is computed in which pass, source.py writes it down; here is which arrays there are at given sizes, and who runs.
"""

from __future__ import annotations

import functools
import math
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch
from torch import Tensor

import inline_loader
from inline_kernels.engine import library

from . import precision, source, strips
from .algebra import reordered
from .graph import ELEMENTS, Facts, Node, Space, order
from .passes import Array, Planes, Program, Root, Unsupported, kind_of, of_positions

__all__ = ["Unsupported", "backward", "count", "describe", "forward", "plan", "requests", "saved", "text"]

_CTYPES = {
    torch.float32: "float",
    torch.float64: "double",
    torch.float16: "half_t",
    torch.bfloat16: "bfloat16_t",
}
_MOST_MASKS = 3  # of a byte an element; more are not worth it, beside v of four
_lock = threading.Lock()


class Composed(NamedTuple):
    """A segment's passes and their text for one kind of arguments. `saved`: arrays from forward to backward, in their order; `gradients`: the
    root of each tensor's gradient, by leaf; `updates`: names of arrays, (mean, variance) each; `dy`: the leaf."""

    text: str
    forward: Program
    forward_names: source.Names
    backward: Program | None
    backward_names: source.Names | None
    saved: list[Array]
    gradients: dict[Node, Root | None]
    statistics: list[tuple[str, str]]
    own: source.Own


# ---------------------------------------------------------------------------------------------------------------- composing


class Kind(NamedTuple):
    """What a text hangs on beside its segment."""

    device: str
    saving: bool
    few_channels: bool  # a byte counts them
    exact_order: bool
    own: source.Own


def _kind(segment, arguments: Sequence, saving: bool, exact_order: bool) -> Kind:
    x, weight = arguments[0], arguments[len(segment.inputs)]
    own = strips.own(segment.conv, x, weight) if library.device_type(x) == "cpu" else source.Own()
    few = bool(weight.shape[0] <= 256)  # of a compiler's sizes, too, a key
    return Kind(library.device_type(x), saving, few, exact_order, own)


def _composed(segment, kind: Kind) -> Composed:
    """Made once a segment and kind; kept with its graph."""
    with _lock:
        known = vars(segment.graph).setdefault("composed", {})
        if kind not in known:
            known[kind] = _compose(segment, kind)
        return known[kind]


def _compose(segment, kind: Kind) -> Composed:
    graph = segment.graph
    (y,) = segment.outputs
    statistics_of = [node for update in segment.updates for node in (update.mean, update.variance)]
    if not kind.exact_order:
        y, *statistics_of = reordered([y, *statistics_of], exact_ties=kind.saving)
    z = graph.leaf("z", ELEMENTS, "z")
    roots, statistics, back, saved, gradients = [Root("y", y, y.space, "output")], [], None, [], {}
    for i in range(len(segment.updates)):
        names = f"batch_mean_{i}", f"batch_variance_{i}"
        statistics.append(names)
        roots += [Root(name, node, node.space, "real") for name, node in zip(names, statistics_of[2 * i :])]
    if kind.saving:
        back, saved, gradients = _backward_program(graph, y, z, kind)
        known = {root.node for root in roots}
        for array, node in saved:
            if node is not z:  # what leaves already is written once more
                own = (
                    graph.make("spread", node, attr=(array.name, ""), space=node.space)
                    if node in known
                    else node
                )
                roots.append(Root(array.name, own, array.space, array.kind))
        saved = [array for array, _ in saved]
    ahead = Program(
        graph,
        roots,
        {},
        kind.few_channels,
        joins=kind.device == "cuda" or kind.own.convolution,
        on_cpu=kind.device == "cpu",
    )
    if turns := kind.device == "cuda" and graph.dimensions == 2:
        ahead.turns = not any(array.name == "v" for array in saved)  # backward finds it in planes
        if back:
            back.turns = [root and root.name for root in gradients.values()].count("dz") == 1
    names, back_names = _names(segment, ahead), back and _names(segment, back)
    programs = {"forward": ahead} | ({"backward": back} if back else {})
    text = source.compose(
        programs, {"forward": names, "backward": back_names}, kind.device, segment.conv.name, turns, kind.own
    )
    return Composed(text, ahead, names, back, back_names, saved, gradients, statistics, kind.own)


def differentiated(segment, y: Node, kind: Kind) -> Composed:
    """Backward alone, of another result of the segment's graph than its own, from v and copies of parameters."""
    graph = segment.graph
    with _lock:
        back, saved, gradients = _backward_program(
            graph, y, graph.leaf("z", ELEMENTS, "z"), kind, only_v=True
        )
        if turns := kind.device == "cuda" and graph.dimensions == 2:
            back.turns = [root and root.name for root in gradients.values()].count("dz") == 1
        names = _names(segment, back)
        text = source.compose({"backward": back}, {"backward": names}, kind.device, segment.conv.name, turns)
        saved = [array for array, _ in saved]
        return Composed(text, None, None, back, names, saved, gradients, [], source.Own())


def _backward_program(graph, y: Node, z: Node, kind: Kind, only_v: bool = False):
    dy = graph.leaf("dy", y.space, "dy")
    leaves = [z, *[n for n in order([y]) if n.op == "leaf" and n.attr[1] in ("parameter", "input")]]
    found = graph.adjoints(y, dy, leaves)
    roots: dict[tuple, Root] = {}
    gradients: dict[Node, Root | None] = {}
    for leaf, node in zip(leaves, found):
        if node is None:
            gradients[leaf] = None
            continue
        name, of = ("dz", "value") if leaf is z else (f"d_{source.identifier(leaf.attr[0])}", "real")
        if leaf.attr[1] == "input":
            of = "value"
        gradients[leaf] = roots.setdefault((node, leaf.space, of), Root(name, node, leaf.space, of))
    kept = _kept(graph, [root.node for root in roots.values()], z)
    if z in kept and kind.device == "cuda":
        own = _OwnChannel(graph)
        roots = {key: root._replace(node=own.seen(root.node)) for key, root in roots.items()}
        kept = _kept(graph, [root.node for root in roots.values()], z)
    if only_v:
        kept = [z] if z in order([root.node for root in roots.values()]) else []
    given = {node: _saved_array(node, z, kind.few_channels) for node in kept}
    gate = _gate(graph, [root.node for root in roots.values()], z) if z in kept and not only_v else None
    if gate and kind.device == "cpu" and not source.is_drawn(gate[0]):
        gate = None  # counting costs as much as what it may save
    if gate:
        given[gate[1]] = Array("kept_alive", "double", gate[1].space)
    past = _Past(graph, y, given)
    found = [root._replace(node=past.seen(root.node)) for root in roots.values()]
    of_nodes = {node: array for node, array in given.items() if node is not z}
    copies = {now: Array(then.attr[0], "real", then.space) for now, then in past.copies.items()}
    of_nodes |= {then: copies[now] for now, then in past.copies.items()}
    program = Program(graph, found, of_nodes, kind.few_channels, on_cpu=kind.device == "cpu")
    program.gate = gate and (past.seen(gate[0]), given[gate[1]])
    return program, [(array, node) for node, array in (given | copies).items()], gradients


def _gate(graph, roots: Sequence[Node], z: Node) -> tuple[Node, Node] | None:
    """What a gradient has to pass before positions are summed, if it is zero where masks of forward's say so; and a plane's number of
    positions where they don't, or v isn't finite: where that is zero, sums are zero, and nothing has to be read for them."""
    if not any(
        of_positions(node) and node.space.n and node.space.c
        for node in order([r for r in roots if r.space == ELEMENTS])
    ):
        return None

    def passes(node: Node) -> Node:
        """1 where it may be another number than zero."""
        if node.op == "where" and _is_of_forward(node.args[0]):
            return node.args[0].where(passes(node.args[1]), passes(node.args[2]))
        if node.op == "mul" and any(a.is_const() for a in node.args):
            return passes(node.args[node.args[0].is_const()])
        return passes(node.args[0]) if node.op == "neg" else graph.const(0.0 if node.is_const(0.0) else 1.0)

    for node in reversed(order(roots)):
        if node.op == "where" and node.space == ELEMENTS and not (found := passes(node)).is_const():
            if not _reaches_dy(roots, node):
                finite = (z - z).eq(0.0)
                return node, graph.total("s", finite.where(found, 1.0))
    return None


def _is_of_forward(mask: Node) -> bool:
    """Is it computed at an element alone, from what forward knows?"""
    nodes = [node for node in order([mask]) if node.space.level]
    return all(n.is_scalar_op or n.op == "detach" or (n.op == "leaf" and n.attr[1] == "z") for n in nodes)


def _reaches_dy(roots: Sequence[Node], without: Node) -> bool:
    seen, stack = {without}, [*roots]
    while stack:
        node = stack.pop()
        if node not in seen:
            seen.add(node)
            stack += node.args
    return any(node.op == "leaf" and node.attr[1] == "dy" for node in seen)


class _OwnChannel:
    """Where a gradient goes to picked channels, its values are computed at each channel, of that channel's own, instead of at the picked place of what
    was taken there and would have to be kept beside v."""

    def __init__(self, graph):
        self.graph = graph
        self._known: dict[tuple[Node, Node | None], Node] = {}

    def seen(self, node: Node, index: Node | None = None) -> Node:
        """index: what is taken by it is the own channel's."""
        if node.op == "take" and node.args[1] is index:
            return node.args[0]
        key = node, index
        if key not in self._known:
            self._known[key] = self._made(node, index)
        return self._known[key]

    def _made(self, node: Node, index: Node | None) -> Node:
        if node.op == "put" and node.args[1].attr[0] == "c":
            values, picked = node.args
            return self.graph.picked(picked).where(self.seen(values, picked), 0.0)
        args = [self.seen(a, index) for a in node.args]
        if all(a is b for a, b in zip(args, node.args)):
            return node
        if node.is_scalar_op:
            return self.graph.scalar(node.op, *args)
        return node if index else self.graph.make(node.op, *args, attr=node.attr, space=node.space)


class _Past:
    """Forward's values, computed again in backward, are of the parameters as they were: of `copies` that forward makes. What a derivative
    itself reads of a parameter, eager's backward reads at its own time, too."""

    def __init__(self, graph, y: Node, given: Mapping[Node, Array]):
        self.graph, self.given, self.forward = graph, given, set(order([y]))
        self.copies: dict[Node, Node] = {}
        self._known: dict[tuple[Node, bool], Node] = {}

    def seen(self, node: Node, was: bool = False) -> Node:
        """The node with copies where forward's values are made of parameters; was: it is one of those values, or a part."""
        if node in self.given:
            return node
        if node.op == "leaf":
            return self._copy(node) if was and node.attr[1] == "parameter" else node
        key = node, was or node in self.forward
        if key not in self._known:
            args = [self.seen(a, key[1]) for a in node.args]
            same = all(a is b for a, b in zip(args, node.args))
            self._known[key] = (
                node if same else self.graph.make(node.op, *args, attr=node.attr, space=node.space)
            )
        return self._known[key]

    def _copy(self, leaf: Node) -> Node:
        if leaf not in self.copies:
            name = f"kept_{source.identifier(leaf.attr[0])}"
            self.copies[leaf] = self.graph.leaf(name, leaf.space, "parameter")
        return self.copies[leaf]


def _kept(graph, roots: Sequence[Node], z: Node) -> list[Node]:
    """What forward leaves for these: masks in place of v where v serves for nothing else."""
    facts = Facts(roots, keeps=True)

    def walk(masks: bool) -> list[Node]:
        found, seen, stack = [], set(), list(roots)
        while stack:
            node = stack.pop()
            if node in seen:
                continue
            seen.add(node)
            kind = facts.is_kept(node)
            if node is z or (kind and kind != "input" and (masks or kind != "mask")):
                found.append(node)
            else:
                stack += node.args
        return sorted(found, key=lambda node: node.id)

    found = walk(True)
    few = sum(node.is_boolean and facts.at_elements(node) for node in found) <= _MOST_MASKS
    return found if z not in found and few else walk(False)


def _saved_array(node: Node, z: Node, few_channels: bool) -> Array:
    if node is z:
        return Array("v", "value", ELEMENTS)
    of_z = node.op == "take" and node.args[0] is z
    kind = "value" if of_z else kind_of(node, few_channels)
    return Array(f"kept_{node.op}_{node.id}", kind, node.space)


def _names(segment, program: Program) -> source.Names:
    """Of what comes into a program's launcher."""
    incoming: dict[Node, Array] = {}
    scalars, random = [], {}
    drawn = {each.leaf: (i, each.p) for i, each in enumerate(segment.random)}
    for node in program.leaves():
        name, kind = node.attr
        if kind == "scalar":
            scalars.append(name)
        elif kind == "drawn":
            random[name] = drawn[name]
            incoming[node] = Array("seed", "seed", Space(False, False, ""))
        else:
            array = {"z": ("v", "value"), "dy": ("dy", "output"), "input": (source.identifier(name), "value")}
            incoming[node] = Array(*array.get(kind, (source.identifier(name), "real")), node.space)
    return source.Names(incoming, scalars, random)


# ------------------------------------------------------------------------------------------------------------------ sizes


class Sizes(NamedTuple):
    """N, C and each level's (D, H, W); D is 1 in two dimensions."""

    N: int
    C: int
    levels: dict[str, tuple[int, int, int]]

    def shape(self, space: Space) -> list[int]:
        own = [self.N] * space.n + [self.C] * space.c
        return [*own, *self.levels[space.level]] if space.level else own

    def positions(self, level: str) -> int:
        return math.prod(self.levels[level])


def _pair(value, dimensions: int) -> tuple[int, ...]:
    return tuple(value) if isinstance(value, (tuple, list)) else (value,) * dimensions


def sizes_of(segment, x: Tensor, weight: Tensor) -> Sizes:
    conv, nd = segment.conv, weight.dim() - 2
    stride, dilation = _pair(conv.stride, nd), _pair(conv.dilation, nd)
    found = []
    for i in range(nd):
        extent = dilation[i] * (weight.shape[2 + i] - 1) + 1
        around = sum(strips.padding(segment.conv, weight)[i])
        found.append((x.shape[2 + i] + around - extent) // stride[i] + 1)
    levels = {"e": tuple(found)}
    for name, level in segment.graph.levels.items():
        levels[name] = tuple(1 if w is None else s // w for s, w in zip(levels[level.parent], level.window))
    padded = {name: ((1,) * (3 - nd) + size) for name, size in levels.items()}
    # One by one: of two sizes that may be symbolic the smaller is not asked.
    if any(each < 1 for size in ((x.shape[0],), *padded.values()) for each in size):
        raise Unsupported("there is nothing to compute")
    return Sizes(x.shape[0], weight.shape[0], padded)


# --------------------------------------------------------------------------------------------------------------- planning


class Entry(NamedTuple):
    """A launcher's tensor. It comes from what is there by its name, or is made: an argument (its number) in `dtype`, or a new array."""

    name: str
    dtype: torch.dtype
    argument: int | None
    shape: list[int] | None


@dataclass
class Plan:
    """What is decided for arguments with the same shapes, dtypes and numbers. `statistics`: of each update, where forward's results have mean
    and variance."""

    segment: object
    composed: Composed
    sizes: Sizes
    value_dtype: torch.dtype
    dtype: torch.dtype
    saving: bool
    device: str
    in_place: bool = False
    statistics: Sequence[tuple[int, int]] = ()
    kernels: object = None
    layout: int = 0  # of v in forward's passes, or of its gradient in backward's: kernels/load/turned.cuh
    runs: Mapping[str, int] = field(
        default_factory=dict
    )  # in what layout "forward", "dx" and "dw" are convolved
    launch: object = None
    table: Sequence[Entry] = ()
    backward: dict[int, Plan] = field(default_factory=dict)  # backward's own launch and table, by layout
    pieces: Sequence[
        tuple[int, int, Plan]
    ] = ()  # samples (first, behind the last), and their plan; none: all at once
    strips: Mapping[str, strips.Strips] = field(default_factory=dict)  # by launcher

    @functools.cached_property
    def shape(self) -> list[int]:
        """Eager's, of y."""
        segment, sizes = self.segment, self.sizes
        level = segment.outputs[0].space.level
        positions = sizes.levels[level][3 - segment.graph.dimensions :] if level else ()
        of_axis = {"n": sizes.N, "c": sizes.C, "s": math.prod(positions), "": 1}
        of_axis |= {str(i): s for i, s in enumerate(positions)}
        return [of_axis[axis] for axis in segment.axes]

    @functools.cached_property
    def results(self) -> list[str]:
        """The names of what forward returns: y, what is saved, what else norms' statistics are."""
        names = ["y", *[a.name for a in self.composed.saved]]
        return names + [each for pair in self.composed.statistics for each in pair if each not in names]

    @property
    def line(self) -> str:
        return _words(self)


def _defines(segment, x: Tensor, dtype: torch.dtype) -> dict[str, str]:
    return {"VALUE_T": _CTYPES[x.dtype], "OUTPUT_T": _CTYPES[dtype]}


def _build(segment, arguments: Sequence, saving: bool, dtype: torch.dtype, exact_order: bool) -> dict:
    x = arguments[0]
    kind = _kind(segment, arguments, saving, exact_order)
    name = "tail_" + source.identifier(segment.conv.name)
    return {
        "name": name,
        "source": _composed(segment, kind).text,
        "device": kind.device,
        "defines": _defines(segment, x, dtype),
    }


def requests(
    segment, arguments: Sequence, saving: bool, dtype: torch.dtype, exact_order: bool = False
) -> list[dict]:
    """What inline_loader builds for such arguments."""
    return [_build(segment, arguments, saving, dtype, exact_order)]


def plan(
    segment,
    arguments: Sequence,
    saving: bool,
    dtype: torch.dtype,
    exact_order: bool = False,
    edited: str | None = None,
) -> Plan:
    """edited: in place of its own text. Raises Unsupported with the reason where the schedule can't do it."""
    x, weight = arguments[0], arguments[len(segment.inputs)]
    if x.dtype not in _CTYPES or dtype not in _CTYPES:
        raise Unsupported(f"there are kernels for {', '.join(_CTYPES.values())}")
    sizes = sizes_of(segment, x, weight)
    request = _build(segment, arguments, saving, dtype, exact_order)
    composed = _composed(segment, _kind(segment, arguments, saving, exact_order))
    kernels = inline_loader.load(**request | ({"source": edited} if edited else {}))
    keeps_v = any(array.name == "v" for array in composed.saved)
    found = Plan(segment, composed, sizes, x.dtype, dtype, saving, request["device"])
    found.kernels, found.runs = kernels, {"forward": _layout(segment, x, weight, "forward")}
    found.layout = _turned(found, composed.forward, found.runs["forward"])
    _divide(found, arguments)
    over = not (keeps_v or found.layout or composed.own.convolution) and x.dtype == dtype
    found.in_place = over and _may_write_over_v(composed)
    names = found.results
    found.statistics = [tuple(names.index(each) for each in pair) for pair in composed.statistics]
    ahead = composed.forward, composed.forward_names
    found.table = _table(found, *ahead, arguments)
    found.launch = kernels.forward.bound(*_numbers(found, *ahead, arguments))
    found.pieces = _pieces(found, arguments, exact_order, edited)
    return found


def _divide(plan: Plan, arguments: Sequence) -> None:
    """Sets the strips of the launchers that have some."""
    composed, segment, saved = plan.composed, plan.segment, {array.name for array in plan.composed.saved}
    image = strips.Image(segment.conv, arguments[0], arguments[len(segment.inputs)])
    ahead, back = composed.forward, composed.backward
    if ahead.in_strips:
        levels = {ahead.passes[i].level for i in ahead.in_strips}
        windows = [plan.segment.graph.levels[level].window for level in levels if level != "e"]
        whole = "v" in saved or ahead.mixes_samples or not source.keeps_v(ahead)
        plan.strips["forward"] = strips.of_convolution(image, plan.sizes, windows, whole)
    if back and back.differentiated_by:
        by = back.differentiated_by
        image = strips.Image(segment.conv, arguments[0], arguments[len(segment.inputs)], by == "winograd")
        plan.strips["backward"] = strips.of_gradient(image, plan.sizes, by)


def _pieces(
    plan: Plan, arguments: Sequence, exact_order: bool, edited: str | None
) -> Sequence[tuple[int, int, Plan]]:
    """On a CPU a few samples are convolved at a time, as many as stay in its caches until their result is there; where nothing is kept
    and no sample's result hangs on another's."""
    segment, x, N = plan.segment, arguments[0], plan.sizes.N
    mixed = plan.composed.forward.mixes_samples or segment.random or not segment.outputs[0].space.n
    if plan.device != "cpu" or plan.saving or mixed or plan.strips:
        return ()
    positions = math.prod(plan.sizes.levels["e"])
    sample = plan.sizes.C * positions * x.element_size()
    samples = max(1, library.CPU_PIECE_BYTES // sample)
    if N <= samples:
        return ()
    plans: dict[int, Plan] = {}
    found = []
    for first in range(0, N, samples):
        last = min(first + samples, N)
        if last - first not in plans:
            some = _of_samples(plan, arguments, first, last)
            plans[last - first] = globals()["plan"](segment, some, False, plan.dtype, exact_order, edited)
            plans[last - first].in_place = False
        found.append((first, last, plans[last - first]))
    return found


def _of_samples(plan: Plan, arguments: Sequence, first: int, last: int) -> list:
    inputs = plan.segment.inputs
    own = [t[first:last] if each.space.n else t for each, t in zip(inputs, arguments)]
    return [*own, *arguments[len(inputs) :]]


def _may_write_over_v(composed: Composed) -> bool:
    """Does y's pass read v at its own place alone, and no later one v?"""
    program = composed.forward
    (own,) = [
        i for i, each in enumerate(program.passes) for key in each.targets if program.arrays[key].name == "y"
    ]
    reads = [each.reads_v for each in program.texts]
    return program.roots[0].space == ELEMENTS and not program.texts[own].scalar and not any(reads[own + 1 :])


def _numbers(plan: Plan, program: Program, names: source.Names, arguments: Sequence) -> list:
    segment, sizes = plan.segment, plan.sizes
    values = dict(zip(segment.scalars, arguments[_first_number(segment) :]))
    found: list = [float(values[name]) for name in names.scalars]
    found += [sizes.N, sizes.C]
    for level in ["e", *segment.graph.levels]:
        found += sizes.levels[level]
    passes = enumerate(program.passes)
    found += [_parts(plan, program, i) for i, each in passes if isinstance(each, Planes)]
    divided = plan.strips.get(_launcher(plan, program))
    return found + [plan.layout] * bool(program.turned) + ([*divided.numbers] if divided else [])


def _launcher(plan: Plan, program: Program) -> str:
    return "backward" if program is plan.composed.backward else "forward"


def _first_number(segment) -> int:
    tensors = len(segment.inputs) + len(segment.parameters) + len(segment.buffers) + 2 * len(segment.updates)
    return tensors + 2 * bool(segment.random)


def _parts(plan: Plan, program: Program, number: int) -> int:
    """Blocks that share a plane: of a few packs a thread on a GPU, or of a tile; strips that fill a core's cache on a CPU."""
    each, divided = program.passes[number], plan.strips.get(_launcher(plan, program))
    if divided and (number in program.in_strips or number == program.differentiated):
        return divided.parts
    positions = plan.sizes.positions(each.level)
    if plan.layout and number in program.turned:
        return -(
            -positions // (256 if plan.value_dtype.itemsize == 2 else 128)
        )  # turned.cuh's kTilePositions
    if plan.device == "cpu":
        return positions // (1 << 16 if not each.by_sample else 1 << 12) + 1
    return positions // (1024 if each.by_sample else 4096) + 1


# -------------------------------------------------------------------------------------------------------------- execution


def _dtype(plan: Plan, array: Array) -> torch.dtype:
    accumulated = torch.float64 if plan.value_dtype == torch.float64 else torch.float32
    return {
        "value": plan.value_dtype,
        "output": plan.dtype,
        "real": accumulated,
        "double": torch.float64,
        "moments": torch.float64,
        "index": torch.int32,
        "byte": torch.uint8,
        "mask": torch.uint8,
        "seed": torch.int64,
    }[array.kind]


def _shape(plan: Plan, program: Program, array: Array) -> list[int]:
    shape = plan.sizes.shape(array.space)
    if array.name == "v":  # as the library gives it
        return [*shape[:2], *shape[5 - plan.segment.graph.dimensions :]]
    if array.parts is not None:
        shape = [*shape, _parts(plan, program, array.parts)]
    return [*shape, 3] if array.kind == "moments" else shape


def _bytes(plan: Plan, program: Program, array: Array) -> int:
    return math.prod(_shape(plan, program, array)) * _dtype(plan, array).itemsize


def _table(plan: Plan, program: Program, names: source.Names, arguments: Sequence) -> list[Entry]:
    segment = plan.segment
    given = [_name(each) for each in segment.inputs] + [*segment.parameters, *segment.buffers]
    at = {source.identifier(name): i for i, name in enumerate(given)}
    at["seed"] = _first_number(segment) - 2
    made, found = set(program.arrays.values()), []
    for array in source.parameters(program, names):
        if array is source.SCRATCH:
            sizes = [_bytes(plan, program, a) for a in source.scratch(program)]
            found.append(
                Entry(array.name, torch.float64, None, [sum((size + 15) // 16 * 2 for size in sizes)])
            )
        elif array in made:
            found.append(Entry(array.name, _dtype(plan, array), None, _shape(plan, program, array)))
        else:
            found.append(Entry(array.name, _dtype(plan, array), at.get(array.name), None))
    return found


def _name(each) -> str:
    return each if isinstance(each, str) else each.attr[0]


def _run(plan: Plan, launch, table: Sequence[Entry], arrays: dict[str, Tensor], arguments: Sequence) -> None:
    """Allocates what is not there, and launches."""
    x, tensors = arguments[0], []
    for name, dtype, argument, shape in table:
        t = arrays.get(name)
        if t is None:
            t = x.new_empty(shape, dtype=dtype) if argument is None else _as_read(arguments[argument], dtype)
            arrays[name] = t
        tensors.append(t)
    if plan.segment.random:
        launch(*tensors, arguments[_first_number(plan.segment) - 1])
    else:
        launch(*tensors)


def _as_read(t: Tensor, dtype: torch.dtype) -> Tensor:
    """An argument as kernels read it."""
    t = t if t.dtype == dtype else t.detach().to(dtype)
    return library.aligned(t) if t.dim() > 1 else t.contiguous()


def forward(plan: Plan, arguments: Sequence) -> list[Tensor]:
    """y, what backward needs, and batch norms' statistics."""
    if plan.pieces:
        return [_forward_in_pieces(plan, arguments)]
    x, weight = arguments[0], arguments[len(plan.segment.inputs)]
    if divided := plan.strips.get("forward"):
        keeps_v = source.keeps_v(plan.composed.forward) or any(a.name == "v" for a in plan.composed.saved)
        shape = _shape(plan, plan.composed.forward, Array("v", "value", ELEMENTS))[1:]
        shape = (divided.samples, *shape) if keeps_v else (0,)
        arrays = {"v": x.new_empty(shape), "image": divided.image.of(x), "filters": weight.contiguous()}
        return finished(plan, arrays, arguments)
    v = _v(plan, x, weight)
    # In place, too, they are two tensors: a launch that knows one twice is looked at anew each time.
    return finished(plan, {"v": v, "y": v.view(plan.shape)} if plan.in_place else {"v": v}, arguments)


def finished(plan: Plan, arrays: dict[str, Tensor], arguments: Sequence) -> list[Tensor]:
    """What forward returns, by the kernels behind what is there: v, or what a kernel made of it."""
    _run(plan, plan.launch, plan.table, arrays, arguments)
    if not plan.in_place:
        arrays["y"] = arrays["y"].view(plan.shape)
    return [arrays[name] for name in plan.results]


def _forward_in_pieces(plan: Plan, arguments: Sequence) -> Tensor:
    y = arguments[0].new_empty(plan.shape, dtype=plan.dtype)
    for first, last, piece in plan.pieces:
        some = _of_samples(plan, arguments, first, last)
        v = convolve(plan.segment, some[0], arguments[len(plan.segment.inputs)])
        _run(piece, piece.launch, piece.table, {"v": v, "y": y[first:last]}, some)
    return y


def backward(
    plan: Plan, dy: Tensor, arguments: Sequence, saved: Sequence[Tensor], needs: Sequence[bool]
) -> list[Tensor | None]:
    """The gradients of inputs, parameters and buffers (None)."""
    composed, segment = plan.composed, plan.segment
    arrays = {a.name: t for a, t in zip(composed.saved, saved)} | {"dy": library.aligned(dy)}
    x, weight, weight_at = arguments[0], arguments[len(segment.inputs)], len(segment.inputs)
    wanted, divided = [needs[0], needs[weight_at]], plan.strips.get("backward")
    runs = _gradients_layout(plan, x, weight, wanted)
    if divided:
        none = x.new_empty(0)
        arrays |= {"image": divided.image.of(x)} | ({} if wanted[0] else {"dz": none})
        arrays["dweight"] = weight.new_empty(weight.shape) if wanted[1] else none
        if composed.backward.closes:
            arrays["passes"] = x.new_empty(1, dtype=torch.uint8)
    if composed.backward and composed.backward.roots:
        side = _backward_side(plan, _turned(plan, composed.backward, runs), arguments)
        _run(plan, side.launch, side.table, arrays, arguments)
    if divided and wanted[1] and _passes(arrays) and not arrays["dweight"].sum().isfinite():
        # The library says what is infinite.
        again = {name: t for name, t in arrays.items() if name != "dz"} | {"dweight": none}
        _run(plan, side.launch, side.table, again, arguments)
        arrays["dz"], divided = again["dz"], None
    by_name = {leaf.attr[0]: root and arrays[root.name] for leaf, root in composed.gradients.items()}
    dz, found, dx, dw = by_name.pop("z"), [], None, None
    if not _passes(arrays):
        dx, dw = (t.new_zeros(t.shape) if need else None for t, need in zip((x, weight), wanted))
        wanted = [False, False]
    elif divided:
        dw, wanted[1] = arrays["dweight"] if wanted[1] else None, False
    if dz is not None and wanted[0] and composed.own.input_gradient:
        dx, wanted[0] = _input_gradient(plan, dz, weight), False
    if dz is not None and any(wanted):
        theirs = _convolution_gradients(plan, dz, x, weight, wanted, runs)
        dx, dw = (own if own is not None else their for own, their in zip((dx, dw), theirs))
    names = [_name(each) for each in segment.inputs] + list(segment.parameters)
    for i, name in enumerate(names):
        gradient = dx if i == 0 else dw if i == weight_at else by_name.get(name)
        t = arguments[i]
        found.append(
            gradient if gradient is None or i in (0, weight_at) else gradient.to(t.dtype).reshape(t.shape)
        )
    return found + [None] * len(segment.buffers)


def _passes(arrays: Mapping[str, Tensor]) -> bool:
    """Is any gradient other than zero?"""
    return "passes" not in arrays or bool(arrays["passes"].item())


def _input_gradient(plan: Plan, dz: Tensor, weight: Tensor) -> Tensor:
    """That of x: dz, with so many zeros around it, convolved with the filters turned round."""
    turned = weight.flip(*range(2, weight.dim())).transpose(0, 1).contiguous()
    image, numbers = strips.turned(plan.segment.conv, dz, turned)
    dx = dz.new_empty(len(dz), len(turned), *image.result)
    plan.kernels.convolve(dx, dz, turned, *numbers)
    return dx


# ---------------------------------------------------------------------------------------------- the library's convolution


def _spread_around(segment, x: Tensor, weight: Tensor) -> tuple[Tensor, list[int]]:
    """x, with what lies around it where the convolution can't add that, and the padding that is left to the convolution."""
    around = strips.padding(segment.conv, weight)
    mode = segment.conv.padding_mode
    if mode == "zeros" and all(before == after for before, after in around):
        return x, [before for before, _ in around]
    flat = [each for pair in reversed(around) for each in pair]
    padded = torch.nn.functional.pad(x, flat, mode="constant" if mode == "zeros" else mode)
    return padded, [0] * len(around)


def convolve(segment, x: Tensor, weight: Tensor, laid_out: Callable | None = None) -> Tensor:
    """v, contiguous; where its operands are to be laid_out, as the library gives it."""
    conv, nd = segment.conv, weight.dim() - 2
    x, padding = _spread_around(segment, x, weight)
    run, operands = torch.conv2d if nd == 2 else torch.conv3d, map(laid_out or (lambda t: t), (x, weight))
    v = run(*operands, None, _pair(conv.stride, nd), padding, _pair(conv.dilation, nd), conv.groups)
    return v if laid_out else v.contiguous()


def convolve_backward(
    segment, dz: Tensor, x: Tensor, weight: Tensor, needs: Sequence[bool], laid_out: Callable | None = None
) -> list[Tensor | None]:
    """The gradients of x and weight that are needed."""
    conv, nd = segment.conv, weight.dim() - 2
    with torch.enable_grad():
        given = x.detach().requires_grad_()
        padded, padding = _spread_around(segment, given, weight)
    dz = dz.view(dz.shape[0], dz.shape[1], *dz.shape[5 - nd :]) if dz.dim() == 5 else dz
    operands = map(laid_out or (lambda t: t), (padded.detach(), weight))
    found = torch.ops.aten.convolution_backward(
        *(dz, *operands, None, _pair(conv.stride, nd), padding, _pair(conv.dilation, nd)),
        *(False, [0] * nd, conv.groups, [*needs, False]),
    )
    dx, dw = found[0], found[1]
    if needs[0] and padded is not given:
        (dx,) = torch.autograd.grad(padded, given, dx)
    return [dx if needs[0] else None, dw if needs[1] else None]


# ------------------------------------------------------------------------------- … and on a GPU, where it is channels last

PLANES, TURNED, FOR_TF32 = range(3)  # kernels/load/turned.cuh's


def _layout(segment, x: Tensor, weight: Tensor, of: str) -> int:
    """In which layout the library is fastest in "forward", for "dx" or for "dw", and as exact as in eager's."""
    served = library.device_type(x) == "cuda" and weight.dim() == 4 and x.dtype != torch.float64
    if not served or segment.conv.groups > 1:
        return PLANES
    if library.is_channels_last(x, weight):
        return TURNED
    around = strips.padding(segment.conv, weight)
    if segment.conv.padding_mode != "zeros" or any(before != after for before, after in around):
        return PLANES
    if min(weight.shape[:2]) < 32:
        return PLANES
    conv, padding = segment.conv, [before for before, _ in around]
    settings = precision.Settings(_pair(conv.stride, 2), padding, _pair(conv.dilation, 2))
    in_tf32 = x.dtype == torch.float32 and precision.runs_tf32(x, weight, of, settings)
    return FOR_TF32 if in_tf32 else TURNED if x.dtype != torch.float32 else PLANES


def _gradients_layout(plan: Plan, x: Tensor, weight: Tensor, wanted: Sequence[bool]) -> int:
    for of, need in zip(("dx", "dw"), wanted):
        if need and of not in plan.runs:
            plan.runs[of] = _layout(plan.segment, x, weight, of)
    return min((plan.runs[of] for of, need in zip(("dx", "dw"), wanted) if need), default=PLANES)


def _turned(plan: Plan, program: Program, layout: int) -> int:
    """The layout in which a program's passes have the convolution's side, where the library has it in that."""
    return layout if program.turned and plan.sizes.C % 8 == 0 else PLANES


def _backward_side(plan: Plan, layout: int, arguments: Sequence) -> Plan:
    if layout not in plan.backward:
        side, back = replace(plan, layout=layout), (plan.composed.backward, plan.composed.backward_names)
        side.table = _table(side, *back, arguments)
        side.launch = plan.kernels.backward.bound(*_numbers(side, *back, arguments))
        plan.backward[layout] = side
    return plan.backward[layout]


def _v(plan: Plan, x: Tensor, weight: Tensor) -> Tensor:
    """What forward's passes read, contiguous: (N, C, …) or, turned, (N, …, C)."""
    if not plan.runs["forward"]:
        return convolve(plan.segment, x, weight)
    v = convolve(plan.segment, x, weight, lambda t: _channels_last(plan, t, plan.runs["forward"]))
    return v.permute(0, 2, 3, 1).contiguous() if plan.layout else _in_planes(plan, v)


def _convolution_gradients(plan: Plan, dz, x, weight, wanted, layout: int) -> list[Tensor | None]:
    if not layout:
        return convolve_backward(plan.segment, dz, x, weight, wanted)
    N, C, (_, *size) = plan.sizes.N, plan.sizes.C, plan.sizes.levels["e"]
    if _turned(plan, plan.composed.backward, layout):
        dz = dz.view(N, *size, C).permute(0, 3, 1, 2)
    else:
        dz = _channels_last(plan, dz.view(N, C, *size), layout)
    dx, dw = convolve_backward(plan.segment, dz, x, weight, wanted, lambda t: _channels_last(plan, t, layout))
    if dx is not None and not library.is_channels_last(x, weight):
        dx = _in_planes(plan, dx)
    return [dx, dw]


def _channels_last(plan: Plan, t: Tensor, layout: int) -> Tensor:
    """t (N, C, H, W) with such strides, which it may have already. By our own kernel: PyTorch's takes twice as long. It rounds to TF32,
    because channels last the library cuts off what it rounds in eager's layout."""
    if library.is_channels_last(t):
        return t
    N, C, H, W = t.shape
    out = t.new_empty(N, H, W, C)
    plan.kernels.transpose(out, t.contiguous(), N, C, H * W, layout == FOR_TF32)
    return out.permute(0, 3, 1, 2)


def _in_planes(plan: Plan, t: Tensor) -> Tensor:
    """t (N, C, H, W), channels last, contiguous."""
    N, C, H, W = t.shape
    out = t.new_empty(N, C, H, W)
    plan.kernels.transpose(out, t.permute(0, 2, 3, 1).contiguous(), N, H * W, C, False)
    return out


# ------------------------------------------------------------------------------------------------------------ in words


def saved(
    segment, arguments: Sequence, dtype: torch.dtype, exact_order: bool = False
) -> list[tuple[list[int], torch.dtype]]:
    """Shapes and dtypes of what forward saves."""
    x, weight = arguments[0], arguments[len(segment.inputs)]
    composed = _composed(segment, _kind(segment, arguments, True, exact_order))
    found = Plan(
        segment, composed, sizes_of(segment, x, weight), x.dtype, dtype, True, library.device_type(x)
    )
    if any(a.parts is not None for a in composed.saved):
        _divide(found, arguments)
    return [(_shape(found, composed.forward, a), _dtype(found, a)) for a in composed.saved]


def count(segment, arguments: Sequence, node: Node) -> float:
    """A number of values: a node of counts."""
    sizes = sizes_of(segment, arguments[0], arguments[len(segment.inputs)])
    if node.op == "const":
        return node.attr
    if node.op == "count":
        axis, what = node.attr
        counts = {
            "n": lambda: sizes.N,
            "c": lambda: sizes.C,
            "group": lambda: sizes.C // what,
            "s": lambda: sizes.positions(what),
        }
        return float(counts[axis]())
    if node.op == "mul":
        return math.prod(count(segment, arguments, a) for a in node.args)
    raise Unsupported(f"a count made by {node.op}")


def text(plan: Plan) -> str:
    return plan.composed.text


def describe(
    segment, arguments: Sequence, saving: bool, dtype: torch.dtype, exact_order: bool = False
) -> str:
    """What a plan for such arguments runs, in words; nothing is built. Raises Unsupported."""
    x, weight = arguments[0], arguments[len(segment.inputs)]
    composed = _composed(segment, _kind(segment, arguments, saving, exact_order))
    sizes, device = sizes_of(segment, x, weight), library.device_type(x)
    found = Plan(segment, composed, sizes, x.dtype, dtype, saving, device)
    found.runs["forward"] = _layout(segment, x, weight, "forward")
    _divide(found, arguments)
    return _words(found)


def _words(plan: Plan) -> str:
    """Each pass over positions, with the bytes that it reads and writes."""
    composed, words = plan.composed, ["the library's convolution"]
    words = ["Winograd's convolution"] if plan.strips.get("forward") else words
    words += [", channels last"] * bool(plan.runs["forward"])
    of_text = ((composed.forward, composed.forward_names), (composed.backward, composed.backward_names))
    for program, names in of_text[: 1 + bool(composed.backward)]:
        words.append("; backward: " if program is composed.backward else ", then ")
        words.append(passes_in_words(plan, program, names))
    return "".join(words)


def passes_in_words(plan: Plan, program: Program, names: source.Names) -> str:
    passes = [i for i, one in enumerate(program.passes) if isinstance(one, Planes)]
    return ", ".join(_pass_words(plan, program, names, i) for i in passes) or "small values"


def _pass_words(plan: Plan, program: Program, names: source.Names, number: int) -> str:
    results = {root.name for root in program.roots}
    own = [program.arrays[key] for key in program.passes[number].targets]
    made = dict.fromkeys(
        a.name if a.name in results else "sums" if a.parts is not None else "reductions" for a in own
    )
    made = [name for name in made if not name.startswith("kept_")] or ["what is kept"]
    text = program.texts[number]
    known = {a.name: a for a in (*program.arrays.values(), *program.given.values(), *names.incoming.values())}
    read = [known[name] for name, ctype in text.pointers.items() if ctype.startswith("const")]
    read += [known["v"]] if text.reads_v else []
    megabytes = [sum(_bytes(plan, program, a) for a in arrays) / 1e6 for arrays in (read, own)]
    return f"{' and '.join(made)} (reads {megabytes[0]:.1f} MB, writes {megabytes[1]:.1f} MB)"
