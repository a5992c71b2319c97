"""What is zero where a gate is: a choice between zero and something else at an element, as of a clamp's gradient, or a dropout's.

Such values need not be computed, or read, where the gate lets nothing pass; if all else is finite, as zero times infinity is not zero.
"""

from __future__ import annotations

from .graph import ELEMENTS, Node, order
from .passes import Planes, Program


def is_gate(node: Node) -> bool:
    return node.op == "where" and node.space == ELEMENTS and any(a.is_const(0.0) for a in node.args[1:])


def is_drawn(node: Node) -> bool:
    return any(n.is_leaf("drawn") for n in order([node]))


def zero_with(node: Node, gate: Node) -> list[Node] | None:
    """The small values with which a node is zero where the gate is, and all else finite; None: it isn't."""
    if node is gate or node.is_const(0.0):
        return []
    if node.space.small:
        return None if node.op == "const" else [node]
    found = [zero_with(a, gate) for a in node.args]
    if node.op in ("add", "sub"):
        return None if None in found else [each for part in found for each in part]
    if node.op == "mul":
        return min((part for part in found if part is not None), key=len, default=None)
    return found[0] if node.op in ("neg", "div", "detach", "spread") else None


def closing(program: Program) -> tuple[int, Node] | None:
    """A pass that makes sums for the one that makes dz, and a value there with which they and dz are zero everywhere, as where a clamp lets
    nothing pass. The pass sees v, so what isn't finite is seen."""
    made = {program.arrays[key].name: i for i, each in enumerate(program.passes) for key in each.targets}
    last = made.get("dz", 0)
    passes = [program.passes[i] for i in range(last + 1)]
    if not last or not all(isinstance(passes[i], Planes) and not passes[i].by_sample for i in (last,)):
        return None
    for i, each in enumerate(passes[:last]):
        if not isinstance(each, Planes) or each.by_sample or {key.what for key in each.targets} != {"sums"}:
            continue
        terms = [key.source for key in each.targets]
        below = order(terms)
        if not any(node.is_leaf("z") for node in below):
            continue
        sums_of = [key for key in passes[last].targets if key.what != "value"]
        if any(key.what != "sums" for key in sums_of):
            return None
        for cut in sorted((n for n in below if is_gate(n)), key=lambda n: -n.id):
            if all(_vanishes(key.source, cut) for key in (*each.targets, *passes[last].targets)):
                return i, cut
    return None


def _vanishes(node: Node, cut: Node) -> bool:
    """Is it zero where `cut` is zero everywhere, and all is finite?"""
    if node is cut or node.is_const(0.0):
        return True
    if node.op == "mul":
        return any(_vanishes(a, cut) for a in node.args)
    if node.op in ("neg", "sum", "group", "spread", "div"):
        return _vanishes(node.args[0], cut)
    return node.op in ("add", "sub") and all(_vanishes(a, cut) for a in node.args)
