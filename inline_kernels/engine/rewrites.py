"""Rewritings of a tail that change no value but by rounding, and save work. Each is switched off by exact_order=True.

A function that rises (or falls) all the way moves behind an extreme over windows or channels: max f(x) = f(max x). It is then computed once a
window. Functions with flat pieces stay, but relu: the places of their ties matter to gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from .graph import Graph, Node

_RISING = {"tanh", "sigmoid", "exp", "log", "expm1", "softplus", "relu"}


def rewritten(graph: Graph, y: Node, signs: Mapping[str, int]) -> Node:
    """y with what moves moved. signs: of the model's numbers, by name."""
    known: dict[Node, Node] = {}
    for node in _with_paths(y):
        args = [known[a] for a in node.args]
        attr = known[node.attr] if isinstance(node.attr, Node) else node.attr
        if args == list(node.args) and attr is node.attr:
            new = node
        elif node.is_scalar_op:
            new = graph.scalar(node.op, *args)
        else:
            new = graph.make(node.op, *args, attr=attr, space=node.space)
        known[node] = _behind_extreme(graph, new, signs) if node.op == "take" else new
    return known[y]


def _with_paths(y: Node) -> list[Node]:
    seen: set[Node] = set()
    stack = [y]
    while stack:
        node = stack.pop()
        if node not in seen:
            seen.add(node)
            stack += node.args
            stack += [node.attr] if isinstance(node.attr, Node) else []
    return sorted(seen, key=lambda node: node.id)


def _behind_extreme(graph: Graph, node: Node, signs: Mapping[str, int]) -> Node:
    x, index = node.args
    if index.op != "pick" or index.args[0] is not x:
        return node
    axis, sign = index.attr
    outward: list[Callable[[Node], Node]] = []
    while step := _step(graph, x, axis, signs):
        x, direction, again = step
        sign *= direction
        outward.append(again)
    if not outward:
        return node
    found = graph.extreme(axis, x, sign)
    for again in reversed(outward):
        found = again(found)
    return found


def _step(graph: Graph, node: Node, axis: str, signs: Mapping[str, int]):
    """(x, +1 where node rises with x or -1 where it falls, node as a function of x), or None."""
    op = node.op
    if op in _RISING and all(a.is_const() for a in node.args[1:]):
        return node.args[0], 1, lambda x: graph.scalar(op, x, *node.args[1:])
    if op == "neg":
        return node.args[0], -1, lambda x: -x
    if op not in ("add", "sub", "mul", "div"):
        return None
    a, b = node.args
    if _is_same_along(b, axis) and not _is_same_along(a, axis):
        direction = 1 if op in ("add", "sub") else _sign(b, signs)
        return (a, direction, lambda x: graph.scalar(op, x, b)) if direction else None
    if _is_same_along(a, axis) and not _is_same_along(b, axis) and op != "div":
        direction = {"add": 1, "sub": -1}.get(op) or _sign(a, signs)
        return (b, direction, lambda x: graph.scalar(op, a, x)) if direction else None
    return None


def _is_same_along(node: Node, axis: str) -> bool:
    return not node.space.level and not (axis == "c" and node.space.c)


def _sign(node: Node, signs: Mapping[str, int]) -> int:
    if node.op == "const":
        return (node.attr > 0) - (node.attr < 0)
    return signs.get(node.attr[0], 0) if node.op == "leaf" and node.attr[1] == "scalar" else 0
