"""A segment's passes and those of its gradients as programs, with their text: what the schedule `load` runs, and others in part.

passes.py decides what is computed in which pass, source.py writes it down; here is what backward needs, and what of that forward keeps: v, or masks
in its place where backward needs no more of it, and small values in one tensor, naming.KEPT.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Sequence
from typing import NamedTuple

import torch

from . import between, gates, naming, source, strips
from .algebra import factored, reordered
from .cases import Case
from .graph import ELEMENTS, Facts, Node, Space, down_to, order
from .passes import OF_A_BYTE, Array, Program, Root, bound_of, kind_of, of_positions

_ALL = 1 << 20  # places of an axis of any size, at least
_MOST_MASKS = 3  # of a byte an element; more are not worth it, beside v of four
lock = threading.Lock()  # one at a time for a graph, whoever rewrites it


class Composed(NamedTuple):
    """A segment's passes and their text for one kind of arguments. `saved`: tensors from forward to backward, in their order; `gradients`: the
    root of each tensor's gradient, by leaf; reads_y: does backward read y, which is there anyway, in a mask's place?"""

    text: str
    forward: Program
    forward_names: naming.Names
    backward: Program | None
    backward_names: naming.Names | None
    saved: list[Array]
    gradients: dict[Node, Root | None]
    own: source.Own
    reads_y: bool = False
    passes_dy: bool = False  # is the gradient of v that of y itself, which no pass writes?

    @property
    def given(self) -> list[Array]:
        """What backward finds behind dy."""
        return [*self.saved, *[naming.RESULT] * self.reads_y]

    @property
    def programs(self) -> list[Program]:
        return [program for program in (self.forward, self.backward) if program]


class Kind(NamedTuple):
    """What a text hangs on beside its segment."""

    device: str
    saving: bool
    channels: int  # at most, see passes.bound_of
    exact_order: bool
    own: source.Own
    operand: bool = False  # is y the next convolution's?
    spends_v: bool = False  # may forward write over v, once nobody needs that?
    turns_y: bool = False  # may passes turn y, as Case has it? If they all can, forward's `turns` is "y", and backward's "dy"
    reads_y: bool = False  # may backward read y in the place of a ReLU's mask? In 16 bits it reads a byte more of an element, and forward writes one less
    passes_dy: bool = False  # may the convolution's gradients be of dy itself, where it is v's gradient?


def kind_for(case: Case) -> Kind:
    own = strips.own(case.segment.conv, case.x, case.weight) if case.device == "cpu" else source.Own()
    channels = bound_of(case.weight.shape[0])
    operand = case.segment.result == between.OPERAND
    is_own = case.device == "cpu" and not case.segment.conv.is_nothing  # else v is x
    spends_v = is_own and case.x.dtype in (torch.float32, torch.float64)
    in_16_bits = case.x.dtype == case.dtype and case.dtype.itemsize == 2
    reads_y = case.device == "cuda" and case.saving and in_16_bits and not case.turns_y
    own_way = case.device, case.saving, channels, case.exact_order, own, operand, spends_v, case.turns_y
    return Kind(*own_way, reads_y, _may_pass_dy(case))


def _may_pass_dy(case: Case) -> bool:
    """May the convolution's gradients be of dy as it comes? It has v's axes and type then, and lies channels last: in planes a pass turns dz, or packs it, as it
    writes it."""
    segment = case.segment
    axes = "n", "c", *map(str, range(segment.graph.dimensions))
    alike = tuple(segment.axes) == axes and case.x.dtype == case.dtype
    lies_last = case.device == "cuda" and case.last and not case.turns_y
    return case.saving and alike and lies_last and not segment.conv.is_nothing


def composed_of(segment, kind: Kind) -> Composed:
    """Made once a segment and kind; kept with its graph."""
    with lock:
        known = vars(segment.graph).setdefault("composed", {})
        if kind not in known:
            known[kind] = _compose(segment, kind)
            if kind.turns_y and not all(each.turned and can_lie_last(each) for each in known[kind].programs):
                known[kind] = _compose(segment, kind._replace(turns_y=False))
        return known[kind]


def has_channels(space: Space) -> bool:
    """At positions."""
    return bool(space.level) and space.c


def can_lie_last(program: Program) -> bool:
    """Does all that has positions and channels come for each sample?"""
    return not any(has_channels(leaf.space) and not leaf.space.n for leaf in program.leaves())


def _compose(segment, kind: Kind) -> Composed:
    graph = segment.graph
    (y,) = segment.outputs
    statistics_of = [node for update in segment.updates for node in (update.mean, update.variance)]
    if not kind.exact_order:
        y, *statistics_of = reordered([y, *statistics_of], exact_ties=kind.saving)
    z = graph.leaf("z", ELEMENTS, "z")
    roots, back, saved, gradients = [Root("y", y, y.space, "output")], None, [], {}
    roots += running_statistics(segment, statistics_of)
    passes_dy = False
    if kind.saving:
        back, saved, gradients = _backward_program(graph, y, z, kind)
        passes_dy = _is_dy(gradients, z, kind)
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
        kind.channels,
        joins=kind.device == "cuda" or kind.own.convolution,
        on_cpu=kind.device == "cpu",
    )
    ahead.operand = "y" if kind.operand else ""
    ahead.spends_v = kind.spends_v and not any(array.name == "v" for array in saved)
    if kind.saving and (small := [array for array in saved if array.space.small]):
        ahead.kept = back.kept = small
        saved = [*[array for array in saved if array not in small], naming.KEPT]
    turns = kind.device == "cuda"
    if turns and not segment.conv.is_nothing:
        ahead.turns = "" if any(array.name == "v" for array in saved) else "v"  # backward finds it in planes
        if back and not passes_dy:
            back.turns = _turned_gradient(gradients)
    if kind.turns_y and y.space == ELEMENTS:
        ahead.turns = "y"
        if back:
            back.turns = "dy"
    names, back_names = names_of(segment, ahead), back and names_of(segment, back)
    programs = {"forward": ahead} | ({"backward": back} if back else {})
    own = _picking(kind.own, gradients[z]) if back else kind.own
    text = source.compose(
        programs, {"forward": names, "backward": back_names}, kind.device, segment.conv.name, turns, own
    )
    reads_y = bool(back) and any(leaf.is_leaf("y") for leaf in back.leaves())
    return Composed(text, ahead, names, back, back_names, saved, gradients, own, reads_y, passes_dy)


def _picking(own: source.Own, root: Root | None) -> source.Own:
    """The filters' gradient is picked where v's is zero but at one of some places. Winograd's takes no longer, since most time goes to v's gradient."""
    if not own.may_pick or own.gradient == "winograd" or not root or root.node.op != "put":
        return own
    axis = root.node.args[1].attr[0]
    level = root.node.graph.levels.get(axis)
    of_level = math.prod(step or _ALL for step in level.stride) if level else _ALL
    places = own.may_pick if axis == "c" else of_level
    return own._replace(gradient="picked") if places >= strips.PICKED else own


def _is_dy(gradients: dict[Node, Root | None], z: Node, kind: Kind) -> bool:
    """Is v's gradient, and nobody else's, that of y, and need nobody write it?"""
    root = gradients[z]
    alike = bool(kind.passes_dy and root and root.node.is_leaf("dy")) and root.node.space == ELEMENTS
    return alike and _turned_gradient(gradients) == "dz"


def _turned_gradient(gradients: dict[Node, Root | None]) -> str:
    return "dz" if [root and root.name for root in gradients.values()].count("dz") == 1 else ""


def running_statistics(segment, statistics: Sequence[Node]) -> list[Root]:
    """What batch norms make of theirs, written over what is read, as nn.BatchNorm does. statistics: mean and biased variance of each."""
    graph, found = segment.graph, {}
    for update, mean, variance in zip(segment.updates, statistics[::2], statistics[1::2]):
        unbiased = variance * (update.count / (update.count - 1.0))
        for name, node in ((update.mean_buffer, mean), (update.variance_buffer, unbiased)):
            before = found[name] if name in found else graph.leaf(name, node.space, "buffer")
            found[name] = before * (1.0 - update.momentum) + node * update.momentum
    return [Root(naming.identifier(name), node, node.space, "parameter") for name, node in found.items()]


def differentiated(segment, y: Node, kind: Kind) -> Composed:
    """Backward alone, of another result of the segment's graph than its own, from v and copies of parameters."""
    graph = segment.graph
    with lock:
        back, saved, gradients = _backward_program(
            graph, y, graph.leaf("z", ELEMENTS, "z"), kind, only_v=True
        )
        if turns := kind.device == "cuda":
            back.turns = _turned_gradient(gradients)
        names = names_of(segment, back)
        text = source.compose({"backward": back}, {"backward": names}, kind.device, segment.conv.name, turns)
        saved = [array for array, _ in saved]
        return Composed(text, None, None, back, names, saved, gradients, source.Own())


def _backward_program(graph, y: Node, z: Node, kind: Kind, only_v: bool = False):
    dy = graph.leaf("dy", y.space, "dy")
    leaves = [z, *[n for n in order([y]) if n.is_leaf("parameter", "input")]]
    past = _Past(graph)
    found = graph.adjoints(y, dy, leaves, past.was)
    roots: dict[tuple, Root] = {}
    gradients: dict[Node, Root | None] = {}
    for leaf, node in zip(leaves, found):
        if node is None:
            gradients[leaf] = None
            continue
        name, of = ("dz", "value") if leaf is z else (f"d_{naming.identifier(leaf.attr[0])}", "parameter")
        if leaf.attr[1] == "input":
            of = "value"
        gradients[leaf] = roots.setdefault((node, leaf.space, of), Root(name, node, leaf.space, of))
    if not only_v and _is_dy(gradients, z, kind):
        roots = {key: root for key, root in roots.items() if root is not gradients[z]}
    kept = _kept([root.node for root in roots.values()], z)
    if kind.reads_y and not only_v:
        known = _masks_by_result(y, past.was(y), kept)
        roots = {key: root._replace(node=_instead(root.node, known)) for key, root in roots.items()}
        kept = _kept([root.node for root in roots.values()], z)
    own = _OfPickedV(graph, z, kept)
    roots = {key: root._replace(node=own.seen(root.node)) for key, root in roots.items()}
    kept = _kept([root.node for root in roots.values()], z)
    if z in kept:  # a CPU computes what is at picked channels once, in its registers
        own = _OwnPlace(graph, "cs" if kind.device == "cuda" else "s")
        roots = {key: root._replace(node=own.seen(root.node)) for key, root in roots.items()}
    nodes = factored([root.node for root in roots.values()]) if roots else []
    if z in kept and kind.device == "cuda":
        nodes = [_of_own_positions(node) for node in nodes]
    roots = {key: root._replace(node=node) for (key, root), node in zip(roots.items(), nodes)}
    kept = _as_positions_read(nodes, _kept(nodes, z), past)
    if only_v:
        kept = [z] if z in order([root.node for root in roots.values()]) else []
    arrays: dict[
        Node, Array
    ] = {}  # by forward's node: kept parameters, taken at places, are both as they were and as they are
    given = {
        node: arrays.setdefault(past.now(node), _saved_array(node, z, kind.channels <= OF_A_BYTE))
        for node in kept
    }
    gate = _gate(graph, [root.node for root in roots.values()], z) if z in kept and not only_v else None
    if gate and not gates.is_drawn(gate[0]):
        gate = None  # counting costs as much as what it may save
    if gate:
        given[gate[1]] = Array("kept_alive", "double", gate[1].space)
    of_nodes = {node: array for node, array in given.items() if node is not z}
    read = down_to([root.node for root in roots.values()], lambda node: node in given or node in past.copies)
    of_nodes |= {then: Array(then.attr[0], "real", then.space) for then in past.copies if then in read}
    program = Program(graph, [*roots.values()], of_nodes, kind.channels, on_cpu=kind.device == "cpu")
    program.gate = gate and (gate[0], given[gate[1]])
    arrays |= {past.now(node): array for node, array in (given | of_nodes).items()}
    return program, [(array, node) for node, array in arrays.items()], gradients


def _masks_by_result(y: Node, then: Node, kept: Sequence[Node]) -> dict[Node, Node]:
    """Where a ReLU gives y: its mask, if that is kept, and the same said of y. then: y of parameters as they were."""
    if then.op != "relu" or then.space != ELEMENTS or (mask := then.args[0].le(0.0)) not in kept:
        return {}
    return {mask: y.graph.leaf("y", y.space, "y").le(0.0)}


def _instead(node: Node, known: dict[Node, Node]) -> Node:
    """The node, with what `known` gives in the place of some beneath; what is made for it is known from then on."""
    if known and node not in known:
        args = [_instead(a, known) for a in node.args]
        same = all(a is b for a, b in zip(args, node.args))
        known[node] = node if same else node.graph.make(node.op, *args, attr=node.attr, space=node.space)
    return known.get(node, node)


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


class _OfPickedV:
    """An extreme is computed again of v at its place, where that is kept anyway, instead of being kept beside it."""

    def __init__(self, graph, z: Node, kept: Sequence[Node]):
        self.graph = graph
        self.of_v = {node for node in kept if node.op == "take" and node.args[0] is z}
        self.indices = {node.args[1] for node in self.of_v}
        self._known: dict[Node, Node] = {}

    def seen(self, node: Node) -> Node:
        if not self.indices:
            return node
        if node not in self._known:
            self._known[node] = self._made(node)
        return self._known[node]

    def _made(self, node: Node) -> Node:
        if node.op == "take" and node.args[1] in self.indices and node not in self.of_v:
            again = self.graph.take(node.args[1], node.args[0])
            if all(n.op != "take" or n in self.of_v for n in order([again], [*self.of_v])):
                return again
        args = [self.seen(a) for a in node.args]
        if all(a is b for a, b in zip(args, node.args)):
            return node
        if node.is_scalar_op:
            return self.graph.scalar(node.op, *args)
        return self.graph.make(node.op, *args, attr=node.attr, space=node.space)


class _OwnPlace:
    """Where a gradient goes to picked channels, or positions ("s"), its values are computed at each of them, of its own, instead of at the picked place
    of what was taken there and would have to be kept beside v. axes: for which."""

    def __init__(self, graph, axes: Sequence[str]):
        self.graph, self.axes = graph, axes
        self._known: dict[tuple[Node, Node | None], Node] = {}

    def seen(self, node: Node, index: Node | None = None) -> Node:
        """index: what is taken by it is the own place's."""
        if node.op == "take" and node.args[1] is index:
            return node.args[0]
        key = node, index
        if key not in self._known:
            self._known[key] = self._made(node, index)
        return self._known[key]

    def _made(self, node: Node, index: Node | None) -> Node:
        if node.op == "put" and node.args[1].attr[0] in self.axes:
            values, picked = node.args
            return self.graph.picked(picked).where(self.seen(values, picked), 0.0)
        args = [self.seen(a, index) for a in node.args]
        if all(a is b for a, b in zip(args, node.args)):
            return node
        if node.is_scalar_op:
            return self.graph.scalar(node.op, *args)
        return node if index else self.graph.make(node.op, *args, attr=node.attr, space=node.space)


def _of_own_positions(node: Node) -> Node:
    """Where windows overlap, masks and factors of what they put to positions are computed at these once, not for each window that may hold one."""
    graph = node.graph
    if node.op == "put" and (level := graph.levels.get(node.args[1].attr[0])) and not level.is_apart:
        return _taken_out(*node.args)
    args = [_of_own_positions(a) for a in node.args] if node.is_scalar_op and node.space.level else node.args
    same = all(a is b for a, b in zip(args, node.args))
    return node if same else graph.make(node.op, *args, space=node.space)


def _taken_out(values: Node, index: Node) -> Node:
    """The put of values, of whose factors those that were taken at the places are what they are at each position."""
    graph, put = values.graph, values.graph.put(index, values)
    for at in {"neg": (0,), "mul": (0, 1), "div": (0,), "where": (1, 2)}.get(values.op, ()):
        own = (
            [_untaken(a, index) for a in values.args[:at]]
            + [None]
            + [_untaken(a, index) for a in values.args[at + 1 :]]
        )
        if None in own[:at] + own[at + 1 :] or (values.op == "where" and not own[3 - at].is_const(0.0)):
            continue
        own[at] = _taken_out(values.args[at], index)
        return graph.make(values.op, *own, space=put.space)
    return put


def _untaken(a: Node, index: Node) -> Node | None:
    """The value that a was taken of, at each position; None: there is none."""
    if a.space.small:
        return a
    if a.op == "take" and a.args[1] is index:
        return a.args[0]
    operands = [_untaken(each, index) for each in a.args] if a.is_scalar_op else [None]
    return None if None in operands else a.graph.scalar(a.op, *operands)


class _Past:
    """Forward's values, computed again in backward, are of the parameters as they were: of `copies` that forward makes. What a derivative
    itself reads of a parameter, eager's backward reads at its own time, too."""

    def __init__(self, graph):
        self.graph = graph
        self.copies: dict[Node, Node] = {}  # the parameters, by what stands for them as they were
        self._was: dict[Node, Node] = {}
        self._now: dict[Node, Node] = {}

    def was(self, node: Node) -> Node:
        """Forward's value, of copies in the place of parameters."""
        if node.is_leaf("parameter"):
            then = self.graph.leaf(f"kept_{naming.identifier(node.attr[0])}", node.space, "parameter")
            self.copies[then] = node
            return then
        if node not in self._was:
            self._was[node] = self._of(node, [*map(self.was, node.args)])
        return self._was[node]

    def now(self, node: Node) -> Node:
        """The same in forward, where parameters stand for themselves."""
        if node in self.copies:
            return self.copies[node]
        if node not in self._now:
            self._now[node] = self._of(node, [self.now(a) for a in node.args])
        return self._now[node]

    def _of(self, node: Node, args: list[Node]) -> Node:
        same = all(a is b for a, b in zip(args, node.args))
        return node if same else self.graph.make(node.op, *args, attr=node.attr, space=node.space)


def _kept(roots: Sequence[Node], z: Node) -> list[Node]:
    """What forward leaves for these: masks in place of v where v serves for nothing else."""
    facts = Facts(roots, keeps=True)

    def kept(without: set) -> list[Node]:
        found = down_to(roots, lambda node: node is z or facts.is_kept(node) not in without)
        return sorted(found, key=lambda node: node.id)

    found = kept({None, "input"})
    few = sum(node.is_boolean and facts.at_elements(node) for node in found) <= _MOST_MASKS
    return found if z not in found and few else kept({None, "input", "mask"})


def _as_positions_read(roots: Sequence[Node], kept: Sequence[Node], past: _Past) -> list[Node]:
    """What is kept, but small values as positions read them: no pass before theirs has to make them of what forward reduced."""
    small = {node for node in kept if node.space.small}
    known: dict[Node, bool] = {}  # is it made of those and numbers alone?

    def is_known(node: Node) -> bool:
        if node not in known:
            known[node] = node in small or node in past.copies or node.op in ("const", "count")
            known[node] = (
                known[node] or node.space.small and node.is_scalar_op and all(map(is_known, node.args))
            )
        return known[node]

    read = {a: None for node in order(roots, kept) if node.space.level for a in node.args if a.space.small}
    found = [node for node in read if is_known(node) and small & {*order([node])}]
    stops = {*found, *kept}
    return sorted({node for node in down_to(roots, stops.__contains__)}, key=lambda node: node.id)


def _saved_array(node: Node, z: Node, few_channels: bool) -> Array:
    if node is z:
        return Array("v", "value", ELEMENTS)
    of_z = node.op == "take" and node.args[0] is z
    kind = "value" if of_z else kind_of(node, few_channels)
    return Array(f"kept_{node.op}_{node.id}", kind, node.space)


def names_of(segment, program: Program) -> naming.Names:
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
            own = naming.identifier(name)
            array = {
                "z": ("v", "value"),
                "dy": ("dy", "output"),
                "y": ("y", "output"),
                "input": (own, "value"),
            }
            incoming[node] = Array(*array.get(kind, (own, "parameter")), node.space)
    return naming.Names(incoming, scalars, random)
