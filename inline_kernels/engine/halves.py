"""Backward for one half of a large batch after the other, so that dz is there of one half at a time.

It pays where dz takes memory of its own. (Where v is kept, dz is written over it.) It can be done where x has no gradient, of which a half would be copied;
where kernels of our own give the weight's gradient; and where no sample's dz hangs on another's dy, as it does behind batch norm in training. The gradients
of the weight and of parameters are then sums over samples, and those of both halves are added.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from . import naming, source
from .graph import ELEMENTS, Node, walk
from .launching import Launch
from .load_plan import Plan, bytes_of, gives_dz, of_samples, shape_of

# Of v in float32, from which on. A step takes 30 to 80 µs more, 1 to 2 % of it then (trials/halves.json).
BYTES = 1 << 30


class Half(NamedTuple):
    """Samples, the first and the one behind the last, their plan, and backward's launch for them."""

    first: int
    last: int
    plan: Plan
    launch: Launch


def planned(plan: Plan, arguments: Sequence, launch: Callable[[Plan, Sequence], Launch]) -> Sequence[Half]:
    """Both, or none where the batch is not parted. launch: backward's, of a plan and arguments for fewer samples."""
    N, cut = plan.sizes.N, _cut(plan, arguments[0]) if may_be_parted(plan) else 0
    found = []
    for first, last in ((0, cut), (cut, N)) if cut else ():
        half = replace(plan, sizes=plan.sizes._replace(N=last - first), backward={}, turned=None)
        found.append(Half(first, last, half, launch(half, of_samples(plan.segment, arguments, first, last))))
    return found


def may_be_parted(plan: Plan) -> bool:
    """Where what is asked for lets it, too."""
    sizes, segment = plan.sizes, plan.segment
    if plan.device != "cuda" or math.prod(sizes.shape(ELEMENTS)) * 4 < BYTES:
        return False
    of_float32 = {plan.value_dtype, plan.parameter_dtype, plan.dtype} == {torch.float32}
    by_sample = segment.axes[:1] == ("n",) and not (segment.random or plan.last or plan.turns_y)
    keeps_v = any(array.name == "v" for array in plan.composed.saved)
    alone = by_sample and len(segment.inputs) == 1
    writes_dz = gives_dz(plan) and not plan.composed.passes_dy
    return alone and of_float32 and not keeps_v and writes_dz and _are_sums_of_samples(plan)


def in_words(plan: Plan, by_our_own: bool) -> str:
    """by_our_own: do kernels of our own give the weight's gradient?"""
    return ", by halves of the batch where x has no gradient" * (by_our_own and may_be_parted(plan))


def run(
    halves: Sequence[Half], plan: Plan, ours: Callable, arguments: Sequence, dy: Tensor, *saved: Tensor
) -> list[Tensor | None]:
    """What schedule.Back's launch gives but dz, and the gradient of the weight, which `ours` makes of dz, x and the weight."""
    dy = dy.view(plan.shape)
    one, other = (_gradients(half, plan, ours, arguments, dy, saved) for half in halves)
    # Two parameters' may be one tensor.
    sums = {total.data_ptr(): (total, each) for total, each in zip(one, other) if total is not None}
    for total, each in sums.values():
        total.add_(each)
    return one


def _gradients(
    half: Half, plan: Plan, ours: Callable, arguments: Sequence, dy: Tensor, saved: Sequence
) -> list[Tensor | None]:
    first, last, *_ = half
    x, *others = of_samples(plan.segment, arguments, first, last)
    kept = [
        _kept(plan, half, t) if array is naming.KEPT else t[first:last] if array.space.n else t
        for array, t in zip(plan.composed.saved, saved)
    ]
    *found, dz, _ = half.launch.run([x, *others], dy[first:last], *kept)
    found[plan.weight_at] = ours(dz, x, others[plan.weight_at - 1])[1]
    return found


def _kept(plan: Plan, half: Half, kept: Tensor) -> Tensor:
    """Of several arrays, one behind the other, each from a multiple of 16 bytes on."""
    program = plan.composed.backward
    found = kept.new_empty(shape_of(half.plan, program, naming.KEPT))
    to, of, at, behind = found.view(torch.uint8), kept.contiguous().view(torch.uint8), 0, 0
    for array in source.rooms(program)[naming.KEPT]:
        whole, own = bytes_of(plan, program, array), bytes_of(half.plan, program, array)
        start = behind + (whole // plan.sizes.N * half.first if array.space.n else 0)
        to[at : at + own] = of[start : start + own]
        at, behind = at + -(-own // 16) * 16, behind + -(-whole // 16) * 16
    return found


def _cut(plan: Plan, x: Tensor) -> int:
    """The samples of the first half: about as many as of the other, and so many that what is read of the other begins at 16 bytes; 0 if there are too few."""
    N, program = plan.sizes.N, plan.composed.forward
    arrays = [array for array in plan.composed.saved if array is not naming.KEPT and array.space.n]
    sizes = [bytes_of(plan, program, array) for array in arrays]
    sizes += [x.numel() * x.element_size(), math.prod(plan.shape) * plan.dtype.itemsize]
    step = max(16 // math.gcd(16, size // N) for size in sizes)
    half = max(1, round(N / 2 / step)) * step
    return half if half < N else 0


def _are_sums_of_samples(plan: Plan) -> bool:
    """Is dz each sample's own, and is all else a sum over samples of what is?"""
    roots = {leaf.attr[0]: root.node for leaf, root in plan.composed.gradients.items() if root}
    summed = [a for node in walk(roots.values()) if _is_over_samples(node) for a in node.args]
    return not any(map(_is_over_samples, walk([roots["z"], *summed])))


def _is_over_samples(node: Node) -> bool:
    axes = [node.attr] if node.op == "sum" else node.attr if node.op in ("count", "variance") else ()
    return "n" in axes
