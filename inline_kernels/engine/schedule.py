"""The schedule `load`: the library's convolution gives v, generated kernels do the rest of a segment, forward and backward.

    plan = schedule.plan(segment, arguments, saving=True, dtype=torch.float32)
    y, *saved = schedule.forward(plan, arguments)
    gradients = schedule.backward(plan, dy, arguments, saved, needs)

`arguments`: tensors (x and the second inputs, parameters, buffers that are read, two for each update of running statistics), then, where there
is dropout, a seed and a number, then the model's numbers. y and dy are contiguous; their shape is the caller's, what counts is the order of
their elements. Running statistics are written in place. What forward saves is v, or masks in its place where backward needs no more of
it, and small values in one tensor, source.KEPT.

passes.py decides what is computed in which pass, source.py writes it down; here is which arrays there are at given sizes, and who runs.
"""

from __future__ import annotations

import functools
import math
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from operator import itemgetter
from typing import NamedTuple

import torch
from torch import Tensor

import inline_loader
from inline_kernels.engine import library

from . import precision, source, strips
from .algebra import reordered
from .graph import ELEMENTS, Facts, Node, Space, down_to, order
from .passes import Array, Planes, Program, Root, Unsupported, kind_of, of_positions

__all__ = ["Unsupported", "backward", "describe", "forward", "plan", "requests", "saved"]

_CTYPES = {
    torch.float32: "float",
    torch.float64: "double",
    torch.float16: "half_t",
    torch.bfloat16: "bfloat16_t",
}
_MOST_MASKS = 3  # of a byte an element; more are not worth it, beside v of four
_lock = threading.Lock()
_convolution_backward = torch.ops.aten.convolution_backward.default


class Composed(NamedTuple):
    """A segment's passes and their text for one kind of arguments. `saved`: tensors from forward to backward, in their order; `gradients`: the
    root of each tensor's gradient, by leaf."""

    text: str
    forward: Program
    forward_names: source.Names
    backward: Program | None
    backward_names: source.Names | None
    saved: list[Array]
    gradients: dict[Node, Root | None]
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
    roots, back, saved, gradients = [Root("y", y, y.space, "output")], None, [], {}
    roots += running_statistics(segment, statistics_of)
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
    if kind.saving and (small := [array for array in saved if array.space.small]):
        ahead.kept = back.kept = small
        saved = [*[array for array in saved if array not in small], source.KEPT]
    if turns := kind.device == "cuda" and graph.dimensions == 2:
        ahead.turns = not any(array.name == "v" for array in saved)  # backward finds it in planes
        if back:
            back.turns = [root and root.name for root in gradients.values()].count("dz") == 1
    names, back_names = _names(segment, ahead), back and _names(segment, back)
    programs = {"forward": ahead} | ({"backward": back} if back else {})
    text = source.compose(
        programs, {"forward": names, "backward": back_names}, kind.device, segment.conv.name, turns, kind.own
    )
    return Composed(text, ahead, names, back, back_names, saved, gradients, kind.own)


def running_statistics(segment, statistics: Sequence[Node]) -> list[Root]:
    """What batch norms make of theirs, written over what is read, as nn.BatchNorm does. statistics: mean and biased variance of each."""
    graph, found = segment.graph, {}
    for update, mean, variance in zip(segment.updates, statistics[::2], statistics[1::2]):
        unbiased = variance * (update.count / (update.count - 1.0))
        for name, node in ((update.mean_buffer, mean), (update.variance_buffer, unbiased)):
            before = found[name] if name in found else graph.leaf(name, node.space, "buffer")
            found[name] = before * (1.0 - update.momentum) + node * update.momentum
    return [Root(source.identifier(name), node, node.space, "real") for name, node in found.items()]


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
        return Composed(text, None, None, back, names, saved, gradients, source.Own())


def _backward_program(graph, y: Node, z: Node, kind: Kind, only_v: bool = False):
    dy = graph.leaf("dy", y.space, "dy")
    leaves = [z, *[n for n in order([y]) if n.is_leaf("parameter", "input")]]
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
    return all(n.is_scalar_op or n.op == "detach" or n.is_leaf("z") for n in nodes)


def _reaches_dy(roots: Sequence[Node], without: Node) -> bool:
    return any(node.is_leaf("dy") for node in order(roots, [without]))


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

    def kept(without: set) -> list[Node]:
        found = down_to(roots, lambda node: node is z or facts.is_kept(node) not in without)
        return sorted(found, key=lambda node: node.id)

    found = kept({None, "input"})
    few = sum(node.is_boolean and facts.at_elements(node) for node in found) <= _MOST_MASKS
    return found if z not in found and few else kept({None, "input", "mask"})


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


def levels_of(segment, x: Tensor, weight: Tensor) -> dict[str, tuple[int, ...]]:
    """The positions of "e" and of each level, axis by axis."""
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
    return levels


def sizes_of(segment, x: Tensor, weight: Tensor) -> Sizes:
    levels = levels_of(segment, x, weight)
    padded = {name: ((1,) * (5 - weight.dim()) + size) for name, size in levels.items()}
    # One by one: of two sizes that may be symbolic the smaller is not asked.
    if any(each < 1 for size in ((x.shape[0],), *padded.values()) for each in size):
        raise Unsupported("there is nothing to compute")
    return Sizes(x.shape[0], weight.shape[0], padded)


# --------------------------------------------------------------------------------------------------------------- planning


ANYWHERE = 1 << 10  # an Entry's `aligned`: never


class Entry(NamedTuple):
    """A launcher's tensor: an argument (its number) in `dtype`, a new array of a shape, or, with neither, what is there by its name."""

    name: str
    dtype: torch.dtype
    argument: int | None = None
    shape: Sequence[int] | None = None
    written: bool = False
    channels: int = 0  # how many elements an argument has, as it is read: a parameter's only one stands for all; 0: its own
    aligned: int = 2  # from how many dimensions on an argument is read 16 bytes at a time


class Launch:
    """A launcher for arguments of one kind: `launch(arguments, *given)` allocates what is to be made, runs it, and returns that, of the
    names `made`. given: the names of what is there beside the arguments. number: of an argument, a number, behind the tensors."""

    def __init__(
        self,
        bound: Callable,
        table: Sequence[Entry],
        arguments: Sequence,
        given: Sequence[str] = (),
        number=None,
    ):
        none = [e for e in table if e.shape is not None and not math.prod(e.shape)]
        new = [e for e in table if e.shape is not None and e not in none]
        self.bound, self.made = bound, [*(e.name for e in new), *(e.name for e in none)]
        self.none = [arguments[0].new_empty(0, dtype=e.dtype) for e in none]
        self.like = [_without_memory(arguments[0], entry) for entry in new]
        places = [*[None] * len(arguments), *given, *self.made]
        of = [places.index(e.name) if e.argument is None else e.argument for e in table]
        self.pick = itemgetter(*of, *(() if number is None else (number,)))
        self.converted = [
            (at, e)
            for at, e in enumerate(table)
            if e.argument is not None and not _is_ready(arguments[e.argument], e)
        ]

    def __call__(self, arguments: Sequence, *given: Tensor) -> list[Tensor]:
        made = [*map(torch.empty_like, self.like), *self.none]
        taken = self.pick((*arguments, *given, *made))
        if self.converted:
            taken = [*taken]
            for at, entry in self.converted:
                taken[at] = _as_read(taken[at], entry)
        self.bound(*taken)
        for at, entry in self.converted:
            if entry.written:
                arguments[entry.argument].copy_(taken[at])
        return made


def picking(places: Sequence[int]) -> Callable:
    """Gives of a list the items at those places, as a list."""
    if [*places] == [*range(len(places))]:
        return itemgetter(slice(len(places)))
    return lambda items: [items[i] for i in places]


def _without_memory(x: Tensor, entry: Entry) -> Tensor:
    """A tensor on x's device to make others like it."""
    t = torch.empty(entry.shape, dtype=entry.dtype, device=x.device)
    t.untyped_storage().resize_(0)
    return t


def _is_ready(t: Tensor, entry: Entry) -> bool:
    alike = t.dtype == entry.dtype and t.is_contiguous() and entry.channels in (0, t.numel())
    return alike and (t.dim() < entry.aligned or t.data_ptr() % 16 == 0)


def _as_read(t: Tensor, entry: Entry) -> Tensor:
    """An argument as kernels read it."""
    t = t if t.dtype == entry.dtype else t.detach().to(entry.dtype)
    if entry.channels not in (0, t.numel()):
        return t.detach().reshape(-1).expand(entry.channels).contiguous()
    return library.aligned(t) if t.dim() >= entry.aligned else t.contiguous()


@dataclass
class Plan:
    """What is decided for arguments with the same shapes, dtypes and numbers."""

    segment: object
    composed: Composed
    sizes: Sizes
    value_dtype: torch.dtype
    dtype: torch.dtype
    saving: bool
    device: str
    kernels: object = None
    convolution: Convolution | None = None
    layout: int = 0  # of v in forward's passes, or of its gradient in backward's: kernels/load/turned.cuh
    runs: int = 0  # in what layout v is convolved
    launch: Launch | None = None
    in_place: bool = False
    results: Callable | None = None  # gives what forward returns, of what launch is given and makes
    backward: dict[tuple, Back] = field(default_factory=dict)  # by what is asked for
    turned: tuple | None = None  # of `_input_gradient`: the size of dx, and what is launched
    transposes: dict[tuple, Callable] = field(default_factory=dict)  # by their numbers
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
    piece: bool = False,
) -> Plan:
    """edited: in place of its own text. piece: only some samples of a batch, whose result is there. Raises Unsupported with the reason where
    the schedule can't do it."""
    x, weight = arguments[0], arguments[len(segment.inputs)]
    if x.dtype not in _CTYPES or dtype not in _CTYPES:
        raise Unsupported(f"there are kernels for {', '.join(_CTYPES.values())}")
    sizes = sizes_of(segment, x, weight)
    request = _build(segment, arguments, saving, dtype, exact_order)
    composed = _composed(segment, _kind(segment, arguments, saving, exact_order))
    kernels = inline_loader.load(**request | ({"source": edited} if edited else {}))
    found = Plan(segment, composed, sizes, x.dtype, dtype, saving, request["device"], kernels)
    found.convolution, found.runs = Convolution.of(segment, weight), _layout(segment, x, weight, "forward")
    found.layout = _turned(found, composed.forward, found.runs)
    _divide(found, arguments)
    found.pieces = () if piece else _pieces(found, arguments, exact_order, edited)
    _set_launch(found, arguments, piece)
    return found


def _places(segment) -> dict[str, int]:
    """The numbers of arguments that are tensors, by the names of arrays."""
    names = segment.tensors
    return {source.identifier(name): i for i, name in enumerate(names)} | {"seed": len(names)}


def _set_launch(plan: Plan, arguments: Sequence, piece: bool) -> None:
    """Forward's, and what it returns. piece: y is there."""
    composed, divided = plan.composed, plan.strips.get("forward")
    keeps_v = any(array.name == "v" for array in composed.saved)
    over = not (keeps_v or plan.layout or composed.own.convolution) and plan.value_dtype == plan.dtype
    plan.in_place = over and not piece and _may_write_over_v(composed)
    given, shapes = ("v", "y") if piece or plan.in_place else ("v",), {"y": plan.shape}
    if divided:
        given = "image", "filters"
        kept = keeps_v or source.keeps_v(composed.forward)
        of_v = _shape(plan, composed.forward, Array("v", "value", ELEMENTS))
        shapes["v"] = (divided.samples, *of_v[1:]) if kept else (0,)
    plan.launch = launch_of(
        plan, plan.kernels.forward, composed.forward, composed.forward_names, arguments, given, shapes, True
    )
    names = [*given, *plan.launch.made]
    plan.results = picking([names.index(name) for name in ("y", *[array.name for array in composed.saved])])


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
            plans[last - first] = globals()["plan"](
                segment, some, False, plan.dtype, exact_order, edited, True
            )
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
    return len(segment.tensors) + 2 * bool(segment.random)


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
    if array in (source.SCRATCH, source.KEPT):
        return [sum((_bytes(plan, program, a) + 15) // 16 * 2 for a in source.rooms(program)[array])]
    if array is source.PASSES:
        return [1]
    if array.name in ("v", "dz"):  # as the library gives it
        return [*shape[:2], *shape[5 - plan.segment.graph.dimensions :]]
    if array.parts is not None:
        shape = [*shape, _parts(plan, program, array.parts)]
    return [*shape, 3] if array.kind == "moments" else shape


def _bytes(plan: Plan, program: Program, array: Array) -> int:
    return math.prod(_shape(plan, program, array)) * _dtype(plan, array).itemsize


def launch_of(
    plan: Plan,
    launcher,
    program: Program,
    names: source.Names,
    arguments: Sequence,
    given: Sequence[str] = (),
    shapes: Mapping = {},
    trusting: bool = False,
) -> Launch:
    """given: what is there by name. shapes: of what isn't of its own. trusting: as in loader/launch.py; what backward is given may have been
    in others' hands."""
    at = _places(plan.segment)
    made, table = {*program.arrays.values()}, []
    for array in source.parameters(program, names):
        place = None if array.name in given else at.get(array.name)
        shape = None
        if place is None and array.name not in given:
            shape = shapes[array.name] if array.name in shapes else _shape(plan, program, array)
        table.append(Entry(array.name, _dtype(plan, array), place, shape, array in made))
    bound = launcher.bound(*_numbers(plan, program, names, arguments), trusting=trusting)
    return Launch(bound, table, arguments, given, at["seed"] + 1 if names.random else None)


# -------------------------------------------------------------------------------------------------------------- execution


def forward(plan: Plan, arguments: Sequence) -> Sequence[Tensor]:
    """y, and what backward needs."""
    if plan.pieces:
        return [_forward_in_pieces(plan, arguments)]
    x, weight = arguments[0], arguments[len(plan.segment.inputs)]
    if divided := plan.strips.get("forward"):
        given = divided.image.of(x), weight.contiguous()
    else:
        v = _laid_out(plan, x, weight) if plan.runs else convolve(plan.convolution, x, weight)
        given = (v, v) if plan.in_place else (v,)
    return plan.results([*given, *plan.launch(arguments, *given)])


def _forward_in_pieces(plan: Plan, arguments: Sequence) -> Tensor:
    y = arguments[0].new_empty(plan.shape, dtype=plan.dtype)
    for first, last, piece in plan.pieces:
        some = _of_samples(plan, arguments, first, last)
        piece.launch(some, convolve(plan.convolution, some[0], some[len(plan.segment.inputs)]), y[first:last])
    return y


class Back(NamedTuple):
    """Backward for what is asked for. Of what launch makes the places: gradients, of each input and parameter (None: there is none, or it is
    the convolution's), those that are `converted` then; dz; dweight, where it is our own; passes. The library is asked for (dx, dw), in `layout`."""

    launch: Launch | None
    gradients: Sequence[int | None]
    converted: Sequence[tuple[int, torch.Size, torch.dtype]]
    library: tuple[bool, bool]
    layout: int
    dz: int | None = None
    dweight: int | None = None
    passes: int | None = None


def backward(
    plan: Plan, dy: Tensor, arguments: Sequence, saved: Sequence[Tensor], needs: Sequence[bool]
) -> list[Tensor | None]:
    """The gradients of inputs, parameters and buffers (None), contiguous but for that of x."""
    weight_at = len(plan.segment.inputs)
    x, weight, asked = arguments[0], arguments[weight_at], (needs[0], needs[weight_at])
    back, made, passes = _back(plan, *asked, True, arguments), (), 1
    given = library.aligned(dy), *saved
    if back.launch:
        image = (plan.strips["backward"].image.of(x),) if back.passes is not None else ()
        made = back.launch(arguments, *given, *image)
        passes = 1 if back.passes is None else made[back.passes].item()
        if passes & 2:  # the library says what is infinite
            back = _back(plan, *asked, False, arguments)
            made = back.launch(arguments, *given, *image)
    found = [None if place is None else made[place] for place in back.gradients]
    for i, shape, dtype in back.converted:
        found[i] = found[i].view(shape).to(dtype)
    if not passes:
        found[0], found[weight_at] = (
            t.new_zeros(t.shape) if need else None for t, need in zip((x, weight), asked)
        )
    elif back.dz is not None:
        dz, both = made[back.dz], (None, None)
        if any(back.library):
            both = _convolution_gradients(plan, dz, x, weight, back.library, back.layout)
        found[0] = _input_gradient(plan, dz, weight) if needs[0] and not back.library[0] else both[0]
        found[weight_at] = both[1] if back.dweight is None else made[back.dweight]
    return found + [None] * len(plan.segment.buffers)


def _back(plan: Plan, dx: bool, dw: bool, own: bool, arguments: Sequence) -> Back:
    """own: the filters' gradient may be one of our own."""
    key = dx, dw, own
    if key not in plan.backward:
        plan.backward[key] = _planned_back(plan, dx, dw, own, arguments)
    return plan.backward[key]


def _planned_back(plan: Plan, dx: bool, dw: bool, own: bool, arguments: Sequence) -> Back:
    segment, composed, divided = plan.segment, plan.composed, plan.strips.get("backward")
    x, weight = arguments[0], arguments[len(segment.inputs)]
    of_library = dx and not composed.own.input_gradient, dw and not (divided and own)
    layouts = [_layout(segment, x, weight, of) for of, need in zip(("dx", "dw"), of_library) if need]
    layout = min(layouts, default=PLANES)
    program, roots = composed.backward, {leaf.attr[0]: root for leaf, root in composed.gradients.items()}
    if not (program and program.roots):
        return Back(None, [None] * (len(segment.inputs) + len(segment.parameters)), (), of_library, layout)
    own, given, shapes = bool(own and dw and divided), ["dy", *[array.name for array in composed.saved]], {}
    names, converted = [*[leaf.attr[0] for leaf in segment.inputs], *segment.parameters], []
    for i, (root, t) in enumerate(zip(map(roots.get, names), arguments)):
        if root and (shapes.setdefault(root.name, t.shape), _dtype(plan, root)) != (t.shape, t.dtype):
            converted.append((i, t.shape, t.dtype))
    if divided:
        given.append("image")
        shapes["dweight"] = weight.shape if own else (0,)
        if not any(of_library) and not dx:
            shapes.setdefault("dz", (0,))
    side = replace(plan, layout=_turned(plan, program, layout))
    launch = launch_of(
        side, plan.kernels.backward, program, composed.backward_names, arguments, given, shapes
    )
    place = {name: i for i, name in enumerate(launch.made)}
    gradients = [place[root.name] if root else None for root in map(roots.get, names)]
    dz, dweight = place["dz"] if roots["z"] else None, place["dweight"] if own else None
    return Back(launch, gradients, converted, of_library, layout, dz, dweight, place.get("passes"))


def _input_gradient(plan: Plan, dz: Tensor, weight: Tensor) -> Tensor:
    """That of x: dz, with so many zeros around it, convolved with the filters turned round."""
    turned = weight.flip(*range(2, weight.dim())).transpose(0, 1).contiguous()
    if plan.turned is None:
        image, numbers = strips.turned(plan.segment.conv, dz, turned)
        plan.turned = image.result, plan.kernels.convolve.bound(*numbers, trusting=True)
    size, launch = plan.turned
    dx = dz.new_empty(len(dz), len(turned), *size)
    launch(dx, dz, turned)
    return dx


# ---------------------------------------------------------------------------------------------- the library's convolution


class Convolution(NamedTuple):
    """The library's, as the model has it. around: what F.pad adds, in `mode`, where the convolution can't. behind: of its gradients, what comes
    behind the tensors."""

    run: Callable
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int
    around: Sequence[int]
    mode: str
    behind: tuple

    @classmethod
    def of(cls, segment, weight: Tensor) -> Convolution:
        conv, nd, around = segment.conv, weight.dim() - 2, strips.padding(segment.conv, weight)
        padding, mode, flat = tuple(before for before, _ in around), conv.padding_mode, []
        if mode != "zeros" or any(before != after for before, after in around):
            padding, flat = (0,) * nd, [each for pair in reversed(around) for each in pair]
        run, pair = torch.conv2d if nd == 2 else torch.conv3d, functools.partial(_pair, dimensions=nd)
        mode = "constant" if mode == "zeros" else mode
        stride, dilation = pair(conv.stride), pair(conv.dilation)
        behind = None, stride, padding, dilation, False, (0,) * nd, conv.groups
        return cls(run, stride, padding, dilation, conv.groups, flat, mode, behind)

    def image(self, x: Tensor) -> Tensor:
        return torch.nn.functional.pad(x, self.around, mode=self.mode)


def convolve(how: Convolution, x: Tensor, weight: Tensor, laid_out: Callable | None = None) -> Tensor:
    """v, contiguous; where its operands are to be laid_out, as the library gives it."""
    x = how.image(x) if how.around else x
    if laid_out:
        return how.run(laid_out(x), laid_out(weight), None, *how[1:5])
    return how.run(x, weight, None, *how[1:5]).contiguous()


def convolve_backward(
    how: Convolution,
    dz: Tensor,
    x: Tensor,
    weight: Tensor,
    needs: Sequence[bool],
    laid_out: Callable | None = None,
) -> tuple[Tensor | None, Tensor | None]:
    """The gradients of x and weight that are needed; that of weight is contiguous."""
    image = x
    if how.around:
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            padded = how.image(x)
        image = padded.detach()
    if laid_out:
        image, weight = laid_out(image), laid_out(weight)
    dx, dw, _ = _convolution_backward(dz, image, weight, *how.behind, (*needs, False))
    if needs[0] and how.around:
        (dx,) = torch.autograd.grad(padded, x, dx)
    return dx if needs[0] else None, dw.contiguous() if needs[1] else None


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


def _turned(plan: Plan, program: Program, layout: int) -> int:
    """The layout in which a program's passes have the convolution's side, where the library has it in that."""
    return layout if program.turned and plan.sizes.C % 8 == 0 else PLANES


def _laid_out(plan: Plan, x: Tensor, weight: Tensor) -> Tensor:
    """v, convolved channels last, as forward's passes read it, contiguous: (N, C, …) or, turned, (N, …, C)."""
    v = convolve(plan.convolution, x, weight, lambda t: _channels_last(plan, t, plan.runs))
    return v.permute(0, 2, 3, 1).contiguous() if plan.layout else _in_planes(plan, v)


def _convolution_gradients(
    plan: Plan, dz, x, weight, wanted, layout: int
) -> tuple[Tensor | None, Tensor | None]:
    if not layout:
        return convolve_backward(plan.convolution, dz, x, weight, wanted)
    N, C, (_, *size) = plan.sizes.N, plan.sizes.C, plan.sizes.levels["e"]
    if _turned(plan, plan.composed.backward, layout):
        dz = dz.view(N, *size, C).permute(0, 3, 1, 2)
    else:
        dz = _channels_last(plan, dz.view(N, C, *size), layout)
    dx, dw = convolve_backward(
        plan.convolution, dz, x, weight, wanted, lambda t: _channels_last(plan, t, layout)
    )
    if dx is not None and not library.is_channels_last(x, weight):
        dx = _in_planes(plan, dx)
    return dx, dw


def _channels_last(plan: Plan, t: Tensor, layout: int) -> Tensor:
    """t (N, C, H, W) with such strides, which it may have already. By our own kernel: PyTorch's takes twice as long. It rounds to TF32,
    because channels last the library cuts off what it rounds in eager's layout."""
    if library.is_channels_last(t):
        return t
    N, C, H, W = t.shape
    return _transposed(plan, t, (N, H, W, C), (N, C, H * W, layout == FOR_TF32)).permute(0, 3, 1, 2)


def _in_planes(plan: Plan, t: Tensor) -> Tensor:
    """t (N, C, H, W), channels last, contiguous."""
    N, C, H, W = t.shape
    return _transposed(plan, t.permute(0, 2, 3, 1), (N, C, H, W), (N, H * W, C, False))


def _transposed(plan: Plan, t: Tensor, shape: tuple[int, ...], numbers: tuple) -> Tensor:
    """numbers: the launcher's, behind its tensors."""
    if numbers not in plan.transposes:
        plan.transposes[numbers] = plan.kernels.transpose.bound(*numbers, trusting=True)
    out = t.new_empty(*shape)
    plan.transposes[numbers](out, t.contiguous())
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


def describe(
    segment, arguments: Sequence, saving: bool, dtype: torch.dtype, exact_order: bool = False
) -> str:
    """What a plan for such arguments runs, in words; nothing is built. Raises Unsupported."""
    x, weight = arguments[0], arguments[len(segment.inputs)]
    composed = _composed(segment, _kind(segment, arguments, saving, exact_order))
    sizes, device = sizes_of(segment, x, weight), library.device_type(x)
    found = Plan(segment, composed, sizes, x.dtype, dtype, saving, device)
    found.runs = _layout(segment, x, weight, "forward")
    _divide(found, arguments)
    return _words(found)


def _words(plan: Plan) -> str:
    """Each pass over positions, with the bytes that it reads and writes."""
    composed, words = plan.composed, ["the library's convolution"]
    words = ["Winograd's convolution"] if plan.strips.get("forward") else words
    words += [", channels last"] * bool(plan.runs)
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
