"""What a convolution's kernel of our own computes of a tail, its front: what is pointwise in v, or windows of that and what is pointwise in them. What hangs
on the front alone, passes compute behind it.

Where backward follows, it must not need v itself, but of windows their sums, or the winners: their values, their places and their v (`of_windows`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from .graph import ELEMENTS, Node, order, walk
from .passes import Array, Root, Unsupported, kind_of, over_windows


class Front(NamedTuple):
    """What the convolution's kernel computes. pooled: the reduction of windows inside it, or None where it is pointwise in v."""

    node: Node
    pooled: Node | None = None

    @property
    def takes(self) -> str:
        return "windows" if self.pooled else "elements"

    @property
    def window(self) -> tuple[int | None, ...]:
        return self.node.graph.levels[self.pooled.space.level].window

    @property
    def reduction(self) -> str:
        if self.pooled.op == "sum":
            return "pool::Sum"
        return "pool::Largest" if self.pooled.args[1].attr[1] > 0 else "pool::Smallest"


def front_of(y: Node) -> Front:
    """Raises Unsupported."""
    if y.space == ELEMENTS:
        return Front(y)
    nodes = order([y])
    pools = [
        node for node in nodes if node.op != "pick" and over_windows(node) and node.args[0].space == ELEMENTS
    ]
    if len(pools) != 1:
        raise Unsupported("the tail's result isn't of v's shape, or one pool's")
    (pooled,) = pools
    _check(pooled)
    behind = _pointwise_in(pooled, nodes)
    used = {a for node in nodes if node not in behind for a in node.args if a in behind}
    if y not in behind and len(used) != 1:
        raise Unsupported("what follows the pool isn't pointwise in one value of its windows")
    front = Front(y if y in behind else used.pop(), pooled)
    if any(node.is_leaf("z") for node in order([y], [front.node])):
        raise Unsupported("what follows the pool reads v, too")
    return front


def _check(pooled: Node) -> None:
    if not pooled.graph.levels[pooled.space.level].is_apart:
        raise Unsupported("the pool's windows don't lie side by side")


def _pointwise_in(pooled: Node, nodes: Sequence[Node]) -> set[Node]:
    """With itself; nodes: operands first."""
    found = {pooled}
    for node in nodes:
        if (
            node.is_scalar_op
            and node.space == pooled.space
            and all(a in found or a.space.small for a in node.args)
        ):
            found.add(node)
    return found


class Windows(NamedTuple):
    """A front whose kernel writes `results`: what is in front (y, or what `given` knows), of winners places, and v. given: arrays that passes behind it start
    from, to compute the roots that are `left`."""

    front: Front
    results: list[Array]
    given: Mapping[Node, Array]
    left: list[Root]


def of_windows(roots: Sequence[Root]) -> Windows:
    """Of forward's roots, y and what backward needs. Raises Unsupported."""
    nodes = {root: _itself(root.node) for root in roots}
    pools = [n for n in order(nodes.values()) if over_windows(n) and n.args[0].space == ELEMENTS]
    values = [n for n in pools if n.op == "sum" or n.op == "take" and n.args[1].args[0] is n.args[0]]
    if len(values) != 1:
        raise Unsupported("the tail doesn't pool once")
    (pooled,) = values
    _check(pooled)
    made = {pooled: "real"}  # by its kind
    if pooled.op == "take" and (pick := pooled.args[1]) in nodes.values():
        made[pick] = kind_of(pick, False)
        made |= {n: "value" for n in pools if n.op == "take" and n is not pooled and n.args[0].is_leaf("z")}
    names = {node: root.name for root, node in nodes.items() if root.name != "y"}
    given = {node: Array(names.get(node, "front"), kind, pooled.space) for node, kind in made.items()}
    front, left = (
        Front(pooled, pooled),
        [root for root in roots if nodes[root] not in given or root.name == "y"],
    )
    y, *others = left
    if pooled not in names and pooled not in _reached(others, given):
        if nodes[y] in _pointwise_in(pooled, order([nodes[y]])):
            front, left = Front(nodes[y], pooled), others
            given[pooled] = Array("y", "output", pooled.space)
    if any(node.is_leaf("z") for node in _reached(left, given)):
        raise Unsupported("backward needs v, or more of it than winners have")
    return Windows(front, [*given.values()], given, left)


def _reached(roots: Sequence[Root], given: Mapping[Node, Array]) -> Sequence[Node]:
    """What is computed of given arrays, and those."""
    return walk([root.node for root in roots], lambda node: () if node in given else node.args)


def _itself(node: Node) -> Node:
    return node.args[0] if node.op == "spread" and node.args[0].space == node.space else node


def count_of(node: Node) -> int | None:
    """Of a window's positions, where it has the same in all."""
    axis, level = node.attr
    window = node.graph.levels[level].window if axis == "window" else (None,)
    return None if None in window else math.prod(window)
