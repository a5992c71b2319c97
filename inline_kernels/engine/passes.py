"""From roots of a graph to passes over memory, forward and backward alike.

Arrays hold only what is reduced (sums, moments, extremes with their index, channel and window sums), what leaves and what comes in; all
that is pointwise is computed again where it is used. Each array is written by one pass:

- a **planes** pass walks over the positions of one level, by (sample, channel) or by sample. Windows of the finer level are walked over
  inside it, channels inside a pass by sample; sums over positions leave it as one number a plane and part.
- a **small** pass makes values without positions, in double, a block by sample, by channel or one for all.

What is computed inside a pass and what becomes an array follows from where a node is used: a reduction over channels can be had in a pass by
sample alone, windows anywhere but inside a loop over channels, and nothing is reduced at the windows that a finer pass looks up. A pass comes
as early as its arrays allow; sums that no other pass waits for join a later pass over the same planes. On a GPU a pass over windows that are whole
axes walks over them as often as it takes (`walks_again`): for what is made of what it has reduced them to, and for y.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from .graph import Graph, Level, Node, Space, down_to, order, walk

# Channels at most: so that their sums may be made one after the other, that a byte counts them, or of any number.
FEW, OF_A_BYTE, MANY = 64, 256, 1 << 62


def bound_of(channels: int) -> int:
    """Of a compiler's sizes, too, a key."""
    return FEW if channels <= FEW else OF_A_BYTE if channels <= OF_A_BYTE else MANY


class Unsupported(Exception):
    """Why a schedule can't do this."""


class Root(NamedTuple):
    """What leaves: a node, and the space of its array, along all of which it is written. kind: of its elements, see `Array`."""

    name: str
    node: Node
    space: Space
    kind: str


class Array(NamedTuple):
    """kind of its elements: "value" (the convolution's), "output", "real" (in which is computed), "parameter" (its own), "double", "index", "byte",
    "mask"; "moments": three doubles; "largest": a value and its place, and as eager's pools have it "pool_largest". parts: the pass whose parts
    it has a value of, each, or None."""

    name: str
    kind: str
    space: Space
    parts: int | None = None


class Key(NamedTuple):
    """What an array holds: "value" of a node; by part of a plane: "sums" (of a node that is a sum over positions, or takes what is at a picked one:
    the sum of that, and zero elsewhere), "moments" (of a node), "largest" (of a pick over positions); and those merged: "sum", "mean", "m2",
    "most", "place"."""

    what: str
    node: Node

    @property
    def source(self) -> Node:
        """What is computed at positions for it."""
        if self.what in ("value", "moments", "mean", "m2"):
            return self.node
        if self.node.op == "take":
            return self.node.graph.picked(self.node.args[1]).where(self.node.args[0], 0.0)
        return self.node.args[0]


# By what is merged, parts of what.
PARTS = {"sum": "sums", "mean": "moments", "m2": "moments", "most": "largest", "place": "largest"}


@dataclass
class Planes:
    """A pass over the positions of `level`, by sample, or by channel of one. Of its targets, of the level below: finer, sums, whose windows it walks over
    anyway; within, what it writes in a last walk over them."""

    level: str
    by_sample: bool
    targets: list[Key] = field(default_factory=list)
    finer: list[Key] = field(default_factory=list)
    within: list[Key] = field(default_factory=list)


@dataclass
class Small:
    """Small values, in order; a block for each "sample" or "channel", or "one"."""

    mode: str
    targets: list[Key] = field(default_factory=list)


def over_channels(node: Node) -> bool:
    """Is it a reduction over channels?"""
    if node.op == "take":
        return node.args[1].attr[0] == "c"
    return (
        (node.op == "sum" and node.attr == "c")
        or (node.op == "pick" and node.attr[0] == "c")
        or (node.op == "variance" and set(node.attr) == {"c"})
    )


def over_windows(node: Node) -> bool:
    """Is it a reduction over windows?"""
    index = node.args[1] if node.op == "take" else node
    axis = index.attr[0] if index.op == "pick" else node.attr if node.op == "sum" else ""
    return axis in node.graph.levels


def of_positions(node: Node) -> Key | None:
    """By what a plane is to be summed up for this node."""
    if node.op == "sum" and node.attr == "s":
        return Key("sums", node)
    if node.op == "pick" and node.attr[0] == "s":
        return Key("largest", node)
    if node.op == "take" and node.args[1].attr[0] == "s":
        return Key("largest", node.args[1]) if node.is_extreme else Key("sums", node)
    if node.op == "variance" and node.args[0].space.level and "s" in node.attr:
        return Key("moments", node.args[0])
    return None


def kind_of(node: Node, few_channels: bool) -> str:
    """Of the elements of an array of this node's values at positions."""
    if node.op == "pick":
        window = (
            (257,)
            if node.attr[0] == "s"
            else ()
            if node.attr[0] == "c"
            else node.graph.levels[node.attr[0]].window
        )
        small = few_channels if node.attr[0] == "c" else None not in window and math.prod(window) <= 256
        return "byte" if small and node.space.level else "index"
    if node.space.small:
        return "double"
    return "mask" if node.is_boolean else "real"


@functools.lru_cache(1 << 16)
def is_static(node: Node) -> bool:
    """Is it pointwise in parameters and numbers alone?"""
    if node.op == "leaf":
        return node.attr[1] in ("parameter", "buffer", "scalar")
    if node.op in ("const", "count"):
        return True
    return node.space.small and node.is_scalar_op and all(is_static(a) for a in node.args)


class Program:
    """The passes that compute `roots`, given arrays of some nodes.

    `passes`; `arrays` by Key, that these write; `kept`: the small ones that forward leaves for backward. channels: at most, see `bound_of`. joins: on a GPU; on_cpu: points are vectors.
    turns: the array that may lie channels last alone, v or its gradient, or y or its gradient; or "". operand: the array that the next convolution reads, or "". By source.py: `texts` of the passes,
    and the numbers of those that then read or write it so (`turned`); does a CPU make v in strips (`convolves`); of those that it has in strips (`in_strips`,
    `differentiated`, by whose sums: `differentiated_by`), of the one that leaves a value in v's place for those behind it, with that value (`left`), and of the
    one that finds whether any gradient passes, with that gradient (`closes`). spends_v: may passes write over v, once none behind them reads it?"""

    kept: Sequence[Array] = ()
    gate: tuple[Node, Array] | None = (
        None  # a gradient, and of planes the number of positions where it isn't zero
    )
    turns = ""
    operand = ""
    turned: Sequence[int] = ()
    in_strips: Sequence[int] = ()
    convolves = False
    spends_v = False
    left: tuple[int, Node] | None = None
    differentiated: int | None = None
    differentiated_by = ""
    closes: tuple[int, Node] | None = None

    def __init__(
        self,
        graph: Graph,
        roots: Iterable[Root],
        given: Mapping[Node, Array],
        channels: int = OF_A_BYTE,
        joins: bool = False,
        on_cpu: bool = False,
    ):
        self.graph, self.given, self.channels, self.joins = graph, dict(given), channels, joins
        self.on_cpu = on_cpu
        self.roots = [self._written_anew(root) for root in roots]
        self.arrays: dict[Key, Array] = {}
        self.wanted: dict[Key, bool] = {}  # by sample?
        self.small: dict[Key, None] = {}
        self.root_of: dict[Key, Root] = {}
        self._seen: set = set()
        self._reached: dict[str, set[Node]] = {}
        nodes = order([r.node for r in self.roots])
        of = {n: key.node for n in nodes if (key := of_positions(n)) and key.what == "moments"}
        self.moments_of = {node for n, node in of.items() if n not in self.given}
        self.measured = {*of.values()}  # … here, or in a pass before
        self._channel_sums_meet = self._reaching_channels(nodes)
        for root in self.roots:
            self.root_of[Key("value", root.node)] = root
        for root in self.roots:
            self._want(root.node, root.space)
        if joins:
            self._want_windows(nodes)
        self.of_all_samples = self._merged_at_once()
        self._order()
        self._name()

    @property
    def mixes_samples(self) -> bool:
        """Is anything small made of several samples' values?"""
        return any(isinstance(each, Small) and each.mode != "sample" for each in self.passes)

    def leaves(self) -> list[Node]:
        """What has to come in beside the arrays that are given."""
        return [n for n in order([root.node for root in self.roots], self.given) if n.op == "leaf"]

    # ------------------------------------------------------------------------------------------- what becomes an array

    def _written_anew(self, root: Root) -> Root:
        """What is broadcast along its array, or comes in, is a value of its own there; and what may be rounded, to a parameter's type: nobody reads
        that again."""
        if (
            root.node.space == root.space
            and root.kind != "parameter"
            and root.node not in self.given
            and root.node.op not in ("leaf", "const")
        ):
            return root
        node = self.graph.make("spread", root.node, attr=(root.name, root.space.level), space=root.space)
        return root._replace(node=node)

    def _channels_in(self, node: Node) -> bool:
        """Does its value hang, point by point, on a reduction over channels of the same level that is not an array?"""
        return node in self._reach(node.space.level)

    def _reach(self, level: str) -> set[Node]:
        if level in self._reached:
            return self._reached[level]
        found = self._reached[level] = set()
        for node in order([r.node for r in self.roots]):
            if node in self.given or node.space.level != level:
                continue
            if over_channels(node) or (not over_windows(node) and any(a in found for a in node.args)):
                found.add(node)
        return found

    def _reaching_channels(self, nodes: Iterable[Node]) -> set[str]:
        """The levels where a sum over positions, by channel, hangs on a reduction over channels: that has to be had before."""
        return {
            n.args[0].space.level
            for n in nodes
            if n not in self.given
            and of_positions(n)
            and n.args[0].space.c
            and n.args[0] in self._reach(n.args[0].space.level)
        }

    def _want(self, node: Node, space: Space) -> None:
        """The node becomes an array."""
        if node in self.given:
            return
        if space.small:
            self._want_small(node, True)
            return
        key = Key("value", node)
        if key in self.wanted:
            return
        by_sample = not space.c
        if space.c and node.space.level == space.level and self._channels_in(node):
            by_sample = space.level not in self._channel_sums_meet
        self.wanted[key] = by_sample
        self._walk(node, "sample" if by_sample else "point")

    def parts_of(self, node: Node) -> Key | None:
        """By what a plane is summed up for this node: a sum, together with the moments, where those are had."""
        found = of_positions(node)
        if node.op == "sum" and found and node.args[0] in self.moments_of:
            return Key("moments", node.args[0])
        return found

    def merged(self, node: Node) -> list[Key]:
        """Of a node that planes are summed up for, what of them it is made of."""
        parts = self.parts_of(node)
        if parts.what == "moments":
            return [Key("mean", parts.node)] + [Key("m2", parts.node)] * (node.op == "variance")
        what = "sum" if parts.what == "sums" else "place" if node.op == "pick" else "most"
        return [Key(what, parts.node)]

    def _merged_at_once(self) -> set[Key]:
        """What a GPU merges of the planes of all samples, because a sample's own is nobody's to ask for: sums and moments."""
        if self.on_cpu:
            return set()
        nodes = walk(
            [key.node for key in (*self.small, *self.wanted)], lambda n: () if n in self.given else n.args
        )
        readers: dict[Node, list[Node]] = {}
        for node in nodes:
            for a in node.args:
                readers.setdefault(a, []).append(node)

        def is_at_once(node: Node) -> bool:
            if node.op == "variance":
                return {*node.attr} == {"n", "s"}
            is_read = Key("value", node) in self.small or Key("value", node) in self.root_of
            reads = [each.op == "sum" and each.attr == "n" for each in readers.get(node, ())]
            return node.op == "sum" and not is_read and bool(reads) and all(reads)

        asked: dict[Key, bool] = {}
        for node in nodes:
            if node not in self.given and (parts := self.parts_of(node)):
                space = parts.source.space
                asked[parts] = asked.get(parts, space.n and space.c) and is_at_once(node)
        at_once = {parts for parts, is_so in asked.items() if is_so}
        return {key for key in self.small if key.what in PARTS and Key(PARTS[key.what], key.node) in at_once}

    def has_place(self, pick: Node) -> bool:
        """Does anybody ask where a plane's maximum is?"""
        return Key("place", pick) in self.small

    def _want_planes(self, key: Key) -> None:
        if key in self.wanted:
            return
        node = key.source
        if not node.space.level:
            raise Unsupported(f"{key.what} over positions of a value that has none")
        by_sample = not node.space.c
        self.wanted[key] = by_sample
        self._walk(node, "sample" if by_sample else "point")

    def _want_small(self, node: Node, is_array: bool) -> None:
        """A small value is needed: as an array, or as a part of one in a small pass."""
        if node in self.given or is_static(node):
            if is_array and Key("value", node) in self.root_of:
                self.small[Key("value", node)] = None
            return
        if is_array and node.op not in ("leaf", "const", "count"):
            self.small[Key("value", node)] = None
        elif Key("value", node) in self.root_of:
            self.small[Key("value", node)] = None
        if (node, "small") in self._seen:
            return
        self._seen.add((node, "small"))
        if planes := self.parts_of(node):
            self._want_planes(planes)
            if planes.what == "moments":
                self.small |= {Key(what, planes.node): None for what in ("mean", "m2")}
            else:
                self.small[self.merged(node)[0]] = None
            if node.op == "variance":
                self._want_small(node.args[1], True)
                self.small[Key("value", node)] = None
            return
        if any(a.space.level for a in node.args):
            raise Unsupported(f"{node.op} of values at positions gives a value without them")
        reduces = node.op in ("sum", "group", "variance", "pick", "take")
        for a in node.args:
            self._want_small(a, False)
        if reduces:
            self.small[Key("value", node)] = None

    def _walk(self, node: Node, where: str) -> None:
        """Finds what has to be an array for `node` to be computed at a point: of a plane by "sample" or by channel ("point"), in a loop over
        "channels", in a "window" (or, of a point's window that is walked again, by that level's name), or at a window that is "looked up"."""
        if node in self.given or is_static(node) or node.op == "leaf":
            return
        if node.space.small:
            self._want_small(node, True)
            return
        if (node, where) in self._seen:
            return
        self._seen.add((node, where))
        if over_channels(node):
            if where not in ("sample", "channels"):
                self._want(node, node.space)
            elif node.op == "take":
                self._walk(node.args[1], where)
                self._walk(node.args[0], "channels")
            else:
                self._walk(node.args[0], "channels")
                for mean in node.args[1:]:
                    self._walk(mean, "sample")
        elif over_windows(node):
            is_loop = node.op != "take" or node.is_extreme
            scattered = self.on_cpu and where == "window" and is_loop  # these windows don't lie side by side
            if scattered or where in ("channels", "looked up") or (where == "sample" and node.space.c):
                self._want(node, node.space)
            else:
                inside = self._level_inside(node, where == "point") or "window"
                for a in node.args:
                    self._walk(a, where if a.op == "pick" else inside)
        elif node.op == "put":
            values, index = node.args
            if index.attr[0] == "c":
                self._walk(index, where)
                self._walk(values, where)
            elif index.attr[0] == "s":
                self._want_small(index, True)
                self._walk(values, where) if values.space.level else self._want_small(values, True)
            else:
                self._want(index, index.space)
                self._look_up(values)
        elif node.op == "upsample" and node.attr == where:  # the point's own
            self._walk(node.args[0], "point")
        elif node.op == "upsample":
            self._look_up(node.args[0])
        elif node.op in ("sum", "pick", "take", "group", "variance"):
            raise Unsupported(f"{node.op} over {node.attr}, of values {node.args[0].space}, at {node.space}")
        elif self.on_cpu and where == "point" and not node.space.c and self._reads_several(node):
            self._want(node, node.space)
        else:
            for a in node.args:
                self._walk(a, where)

    def walks_again(self, level: str) -> bool:
        """May a pass by channel over windows of the level read at their positions what it has made of them? Where lanes share a window."""
        return not self.on_cpu and level != "e" and None in self.graph.levels[level].window

    def _level_inside(self, node: Node, is_point: bool) -> str:
        """Of a reduction over windows of a point: their level, if they are walked again."""
        return node.space.level if is_point and self.walks_again(node.space.level) else ""

    def _look_up(self, node: Node) -> None:
        """Of a window's positions. A CPU would compute it again for each of them."""
        if self.on_cpu and self._reads_several(node):
            self._want(node, node.space)
        else:
            self._walk(node, "looked up")

    def _reads_several(self, node: Node) -> bool:
        """Is it more than an array's value? What is the same for all channels a pass by channel would compute once for each."""
        if node.op in ("spread", "detach"):
            return False
        read = down_to([node], lambda n: n in self.given or n.op == "leaf" or n.space.small)
        return sum(bool(n.space.level) for n in read) > 1

    def _want_windows(self, nodes: Iterable[Node]) -> None:
        """What windows are reduced to becomes an array where a pass for statistics walks over the same values: a later pass then needs no more."""
        statistics = [key for key in self.wanted if key.what != "value" and self._is_early(key.source)]
        levels = {key.source.space.level for key in statistics if not self.wanted[key]}
        levels -= {key.source.space.level for key in statistics if key.what == "largest"}  # see _joined
        for node in nodes:
            if node.op == "pick" or not over_windows(node) or not node.space.c or not self._is_early(node):
                continue
            level = self.graph.levels[node.space.level]
            if level.parent in levels and self._are_tiles(level) and self._waits(node):
                self._want(node, node.space)

    def _is_early(self, node: Node) -> bool:
        """Does it hang on no sum over positions?"""
        return not any(of_positions(n) or n in self.given for n in order([node]))

    def _waits(self, node: Node) -> bool:
        """Is it for a pass that hangs on such sums?"""
        keys = [key for key in self.wanted if key.what == "value" and not self._is_early(key.source)]
        return any(node in order([key.node]) for key in keys)

    # ------------------------------------------------------------------------------------------------- in which order

    def _space_of(self, key: Key) -> Space:
        """Of the planes or positions of an array."""
        if key.what == "value":
            return self.root_of[key].space if key in self.root_of else key.node.space
        space = key.source.space
        return space._replace(n=False) if key in self.of_all_samples else space

    def needs(self, key: Key, within: str = "") -> dict[Key, bool]:
        """The arrays that a planes pass reads for a target, or computes on the way; with it, is it looked up: another window's, or channel's,
        that an earlier pass has to have written? within: the level whose windows the pass walks over to make it."""
        found: dict[Key, bool] = {}
        seen: set[tuple[Node, bool, str]] = set()

        def visit(node: Node, top: bool, looks_up: bool, inside: str) -> None:
            if (node, looks_up, inside) in seen and not top:
                return
            seen.add((node, looks_up, inside))
            own = Key("value", node)
            if node in self.given or is_static(node) or node.op == "leaf":
                return
            if node.space.small or (not top and own in self.wanted):
                found[own] = found.get(own, False) or looks_up
                return
            is_own = node.op == "upsample" and node.attr == inside
            of_windows = node.op == "upsample" or (node.op == "put" and over_windows(node.args[1]))
            if over_windows(node):
                inside = self._level_inside(node, not (inside or looks_up or self.wanted[key])) or "window"
            for a in node.args:
                visit(a, False, looks_up or (of_windows and not is_own), "" if is_own else inside)

        visit(key.source, key.what == "value", False, within)
        return found

    def _order(self) -> None:
        stage: dict[Key, int] = {}
        domain = {key: (self._space_of(key).level, by_sample) for key, by_sample in self.wanted.items()}

        def planes_stage(key: Key) -> int:
            if key not in stage:
                stage[key] = 0
                for need, looks_up in self.needs(key).items():
                    if need in self.wanted:
                        apart = looks_up or domain[need] != domain[key]
                        stage[key] = max(stage[key], planes_stage(need) + apart)
                    else:
                        stage[key] = max(stage[key], small_stage(need.node) + 1)
            return stage[key]

        @functools.lru_cache(None)
        def small_stage(node: Node) -> int:
            if node in self.given or is_static(node) or node.op == "leaf":
                return -1
            if planes := self.parts_of(node):
                return max(planes_stage(planes), *(small_stage(a) for a in node.args[1:]), -1)
            return max((small_stage(a) for a in node.args), default=-1)

        for key in self.wanted:
            planes_stage(key)
        self._draw_in(stage, domain, small_stage)
        self._delay(stage, domain)
        small_stage.cache_clear()  # sums may have moved to a later pass, and what is made of them with them
        smalls = {
            key: small_stage(key.node) if key.what == "value" else stage[Key(PARTS[key.what], key.node)]
            for key in self.small
        }
        # Copies of parameters, which no pass waits for, need no pass of their own.
        first = min([stage for stage in smalls.values() if stage >= 0], default=-1)
        smalls |= {key: first for key, stage in smalls.items() if stage < 0 and key.node.op == "spread"}
        self.passes: list[Planes | Small] = []
        last = max([*stage.values(), *smalls.values(), 0])
        for now in range(-1, last + 1):
            groups: dict[tuple, Planes] = {}
            for key in self.wanted:
                if stage[key] == now:
                    each = groups.setdefault(domain[key], Planes(*domain[key]))
                    each.targets.append(key)
                    if self._space_of(key).level != each.level:
                        each.within.append(key)
            self.passes += self._joined(groups)
            self.passes += self._small_passes([key for key in self.small if smalls[key] == now])

    def _draw_in(self, stage: dict[Key, int], domain: dict[Key, tuple], small_stage) -> None:
        """y is written by the pass that makes the last of what it looks up, where its positions lie in the windows of that: then all is read there."""
        for key in [
            key for key, root in self.root_of.items() if root.kind == "output" and key in self.wanted
        ]:
            level, by_sample = domain[key]
            above = [
                name
                for name, of in self.graph.levels.items()
                if of.parent == level and self.walks_again(name)
            ]
            for name in above if not by_sample else ():
                now, made_there = (
                    0,
                    -1,
                )  # when it can be written, and when the last of that pass's own is made
                for need, looks_up in self.needs(key, within=name).items():
                    is_own = not looks_up and domain.get(need) == (name, False)
                    made = stage[need] if need in self.wanted else small_stage(need.node)
                    now = max(now, made + (not is_own))
                    made_there = max(made_there, made if is_own else -1)
                if now < stage[key] and made_there == now:
                    stage[key], domain[key] = now, (name, False)

    def _joined(self, groups: dict[tuple, Planes]) -> list[Planes]:
        """The passes of a stage: sums by channel are had by one that walks over windows of the same positions."""
        for (level, by_sample), each in groups.items() if self.joins and not self.on_cpu else ():
            below = self.graph.levels[level].parent if level in self.graph.levels else ""
            finer = None if by_sample else groups.get((below, False))
            if not finer or any(key.what in ("value", "largest") for key in finer.targets):
                continue  # places come in ascending order alone
            if any(self._walks_windows(key, level) for key in each.targets):
                each.finer, finer.targets = finer.targets, []
                each.targets = [*each.targets, *each.finer]
        return [each for each in groups.values() if each.targets]

    def _walks_windows(self, key: Key, level: str) -> bool:
        """Does a pass that makes it reduce windows of this level, in which a position is once at most?"""

        def is_known(node: Node) -> bool:
            return node in self.given or (node is not key.source and Key("value", node) in self.wanted)

        nodes = walk([key.source], lambda node: () if is_known(node) else node.args)
        return self._are_tiles(self.graph.levels[level]) and any(
            over_windows(node) and node.space.level == level for node in nodes
        )

    @staticmethod
    def _are_tiles(level: Level) -> bool:
        """Windows of known sizes, none of whose positions is another's, too."""
        return None not in level.window and level.is_apart

    def _delay(self, stage: dict[Key, int], domain: dict[Key, tuple]) -> None:
        """Sums that no pass over positions waits for join the next pass over the same planes, where they would have been alone."""
        waited: set[Node] = set()
        for key in self.wanted:
            for need in self.needs(key):
                waited.update(order([need.node]))

        def is_waited_for(key: Key) -> bool:
            if key.what == "value":
                return True
            return any(
                n in waited for n in self.graph.nodes if of_positions(n) and key.node in (n, n.args[0])
            )

        stages: dict[tuple, list[int]] = {}
        for key in self.wanted:
            stages.setdefault(domain[key], []).append(stage[key])
        for key in self.wanted:
            if is_waited_for(key):
                continue
            must = {stage[k] for k in self.wanted if domain[k] == domain[key] and is_waited_for(k)}
            later = [s for s in must if s >= stage[key]]
            if later:
                stage[key] = min(later)

    # ---------------------------------------------------------------------------------------------------- small passes

    def _modes(self, key: Key) -> set[str]:
        """In what blocks a small value can be made."""
        space = self._space_of(key)
        if key in self.of_all_samples:
            return {"channel"}
        if key.what != "value":
            return {"sample", "channel"} if space.c else {"sample", "one"}
        node, space = key.node, self.root_of[key].space if key in self.root_of else key.node.space
        own = {
            (True, True): {"sample", "channel"},
            (True, False): {"sample", "one"},
            (False, True): {"channel", "one"},
            (False, False): {"one"},
        }[space.n, space.c]
        if node.op == "spread" and is_static(node.args[0]) and not self.on_cpu:
            return {"sample", "channel", "one"} if space.c else own  # all that write it write the same
        modes = own
        for each in self._inside(node):
            modes = modes & self._reduction_modes(each)
        if not modes:
            raise Unsupported(f"small values {space} of {node.op}")
        return modes

    def _inside(self, node: Node) -> list[Node]:
        """The node and what is computed with it in one go: down to arrays."""

        def is_array(a: Node) -> bool:
            return a in self.given or is_static(a) or bool(a.space.level) or Key("value", a) in self.small

        return walk([node], lambda n: [a for a in n.args if not is_array(a)])

    def _reduction_modes(self, node: Node) -> set[str]:
        everywhere = {"sample", "channel", "one"}
        axes: list = []
        if node.op == "sum":
            axes = [node.attr]
        elif node.op == "group":
            axes = ["c"]
        elif node.op in ("pick", "take"):
            axes = [node.attr[0] if node.op == "pick" else node.args[1].attr[0]]
        elif node.op == "variance":
            axes = ["c" if isinstance(step, int) else step for step in node.attr]
        if "n" in axes:
            everywhere = everywhere & ({"one"} if "c" in axes else {"channel", "one"})
        if "c" in axes:
            everywhere = everywhere & {"sample", "one"}
        return everywhere

    def _small_passes(self, keys: list[Key]) -> list[Small]:
        passes, pending = [], list(dict.fromkeys(keys))
        pending.sort(key=lambda key: (key.what == "value", key.node.id))
        while pending:
            best: list[Key] = []
            for mode in ("sample", "channel", "one"):
                if len(found := self._closure(pending, mode)) > len(best):
                    best, best_mode = found, mode
            if not best:
                raise Unsupported("small values that wait for one another")
            passes.append(Small(best_mode, best))
            pending = [key for key in pending if key not in best]
        return passes

    def _closure(self, pending: list[Key], mode: str) -> list[Key]:
        """What a pass in this mode can make of what is pending."""
        made: list[Key] = []
        for key in pending:
            needs = [need for need in self.small_needs(key) if need in pending]
            if mode in self._modes(key) and all(need in made and self._is_own(need, mode) for need in needs):
                made.append(key)
        return made

    def _is_own(self, key: Key, mode: str) -> bool:
        """Does a block of the mode read no other block's values of this array?"""
        space = self._space_of(key)
        return mode == "one" or (space.n if mode == "sample" else space.c)

    def small_needs(self, key: Key) -> list[Key]:
        """The small arrays that a small value is made of."""
        if key.what != "value":
            return []
        found = []
        for node in self._inside(key.node):
            if of_positions(node):
                found += self.merged(node)
            found += [
                Key("value", a) for a in node.args if Key("value", a) in self.small and a not in self.given
            ]
        return found

    # -------------------------------------------------------------------------------------------------------- names

    def _name(self) -> None:
        for number, each in enumerate(self.passes):
            for key in each.targets:
                self.arrays[key] = self._array(key, number, isinstance(each, Small))

    def _array(self, key: Key, number: int, is_small: bool) -> Array:
        node, root = key.node, self.root_of.get(key)
        if root and key.what == "value":
            return Array(root.name, root.kind, root.space)
        # A sum's value has another name than its share of a plane, or of a sample, which may be there, too.
        name = f"{'total' if node.op == 'sum' else node.op}_{node.id}"
        if is_small:
            if key.what == "value":
                return Array(name, kind_of(node, self.channels <= OF_A_BYTE), node.space)
            kind = "index" if key.what == "place" else "double"
            return Array(f"{key.what}_{node.id}", kind, self._space_of(key)._replace(level=""))
        if key.what == "value":
            return Array(name, kind_of(node, self.channels <= OF_A_BYTE), node.space)
        kind = "double" if key.what == "sums" else key.what
        if key.what == "largest" and "pool" in node.attr and self.has_place(node):
            kind = "pool_largest"
        return Array(f"{key.what}_{node.id}", kind, key.source.space._replace(level=""), number)
