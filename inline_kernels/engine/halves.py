"""Backward by one half of a large batch after the other, so that there is never more than half of dz.

It runs where v isn't kept, over which dz could be written, and dz is large; where x has no gradient, of which a half would be copied; and where no sample's
dz hangs on another's dy, as behind batch norm in training. The gradients of the weight and of parameters are sums over samples, of each half, which are added.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from . import naming, source
from .graph import ELEMENTS, Node, walk
from .load_plan import Plan, bytes_of, gives_dz, shape_of

# Of v in float32, from which on. A step takes 50 µs more, of which launches are some 10: 1 to 2 % of it then (trials/halves.json).
BYTES = 1 << 30


def backward(
    run: Callable[..., list], plan: Plan, dy: Tensor, arguments: Sequence, saved: Sequence, needs: Sequence
) -> list[Tensor | None]:
    """What run, schedule.backward, gives of the same."""
    found, others = (
        run(part, *_of_samples(plan, part, first, last, dy, arguments, saved), needs)
        for first, last, part in plan.halves
    )
    # Two parameters' gradients may be one.
    each = {total.data_ptr(): (total, other) for total, other in zip(found, others) if total is not None}
    for total, other in each.values():
        total.add_(other)
    return found


def may_run(plan: Plan, dy: Tensor, needs: Sequence[bool]) -> bool:
    """Then the plan has its halves."""
    inputs, N = len(plan.segment.inputs), plan.sizes.N
    if any(needs[:inputs]) or not needs[plan.weight_at] or len(dy) != N:
        return False
    if plan.halves is None:
        half = N // 8 * 4 or N // 2  # whose arrays begin at 16 bytes, too
        parts = [(0, half), (half, N)] if may_be_parted(plan) else []
        plan.halves = [(first, last, _planned(plan, last - first)) for first, last in parts]
    return bool(plan.halves)


def _planned(plan: Plan, samples: int) -> Plan:
    return replace(plan, sizes=plan.sizes._replace(N=samples), backward={}, turned=None, halves=())


def may_be_parted(plan: Plan) -> bool:
    """Where the gradients of the weight and parameters are asked for."""
    sizes, segment = plan.sizes, plan.segment
    if plan.device != "cuda" or sizes.N < 2 or math.prod(sizes.shape(ELEMENTS)) * 4 < BYTES:
        return False
    of_float32 = {plan.value_dtype, plan.parameter_dtype, plan.dtype} == {torch.float32}
    by_sample = segment.axes[:1] == ("n",) and not (segment.random or plan.last or plan.turns_y)
    keeps_v = any(array.name == "v" for array in plan.composed.saved)
    return of_float32 and by_sample and not keeps_v and gives_dz(plan) and _are_sums_of_samples(plan)


def in_words(plan: Plan) -> str:
    return ", by halves of the batch where x has no gradient" * may_be_parted(plan)


def _are_sums_of_samples(plan: Plan) -> bool:
    """Is dz each sample's own, and is all else a sum over samples of what is?"""
    roots = {leaf.attr[0]: root.node for leaf, root in plan.composed.gradients.items() if root}
    summed = [a for node in walk(roots.values()) if _is_over_samples(node) for a in node.args]
    return not any(map(_is_over_samples, walk([roots["z"], *summed])))


def _is_over_samples(node: Node) -> bool:
    axes = [node.attr] if node.op == "sum" else node.attr if node.op in ("count", "variance") else ()
    return "n" in axes


def _of_samples(
    plan: Plan, part: Plan, first: int, last: int, dy: Tensor, arguments: Sequence, saved: Sequence[Tensor]
) -> tuple[Tensor, list, list[Tensor]]:
    """dy, the arguments and what forward saved, of these samples alone."""
    inputs, arrays = plan.segment.inputs, plan.composed.saved
    own = [t[first:last] if each.space.n else t for each, t in zip(inputs, arguments)]
    kept = [
        _kept(plan, part, t, first) if a is naming.KEPT else t[first:last] if a.space.n else t
        for a, t in zip(arrays, saved)
    ]
    return dy[first:last], [*own, *arguments[len(inputs) :]], kept


def _kept(plan: Plan, part: Plan, kept: Tensor, first: int) -> Tensor:
    """Of several arrays, one behind the other, each from a multiple of 16 bytes on."""
    program = plan.composed.backward
    found = kept.new_empty(shape_of(part, program, naming.KEPT))
    to, of, at, behind = found.view(torch.uint8), kept.view(torch.uint8), 0, 0
    for array in source.rooms(program)[naming.KEPT]:
        whole, own = bytes_of(plan, program, array), bytes_of(part, program, array)
        start = behind + (whole // plan.sizes.N * first if array.space.n else 0)
        to[at : at + own] = of[start : start + own]
        at, behind = at + -(-own // 16) * 16, behind + -(-whole // 16) * 16
    return found
