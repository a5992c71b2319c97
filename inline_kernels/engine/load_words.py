"""The schedule `load` in words, for `plan`: each pass over positions, with the bytes that it reads and writes."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from torch import Tensor

from . import depthwise, gradients, halves, naming
from .layouts import UNITS
from .load_plan import Plan, bytes_of, gives_dz, in_units, needs_no_dz, of_our_own, parts_of
from .passes import Array, Planes, Program


def backward_in_words(plan: Plan, x: Tensor, weight: Tensor) -> str:
    """The passes of backward where x has no gradient, and what our own kernels do then, and for x."""
    composed, way = plan.composed, of_our_own(plan, x, weight, False, True).weight
    layout = UNITS if way == gradients.PACKED else plan.turns_y
    plan = replace(plan, layout=layout, without_dz=needs_no_dz(plan))
    words = "; backward: " + "dz is dy, " * composed.passes_dy
    words += passes_in_words(plan, composed.backward, composed.backward_names)
    words += halves.in_words(plan, way is not None)
    ours = []
    if gives_dz(plan):
        ours = gradients.in_words(plan.segment, x, weight, in_units(plan), plan.last)
        ours += depthwise.gradients_in_words(plan.segment, x, weight)
    return ", ".join([words, *ours])


def in_words(plan: Plan, by: str, own: str | None, done: int | None, backward: str) -> str:
    """Each pass over positions, with the bytes that it reads and writes, behind what convolves."""
    composed, words = plan.composed, [by]
    if done is not None:
        words = [f"{own} writes v and {_made_words(composed.forward, done)}"]
    words = ["Winograd's convolution"] if plan.strips.get("forward") else words
    words = ["x as it is"] if plan.segment.conv.is_nothing else words
    words += [", channels last"] * bool(plan.runs)
    words += [" as y for what follows"] * bool(plan.last and plan.segment.result)
    words += [", y channels last for what follows"] * bool(plan.turns_y)
    but = () if done is None else (done,)
    words += [", then ", passes_in_words(plan, composed.forward, composed.forward_names, but), backward]
    return "".join(words)


def passes_in_words(plan: Plan, program: Program, names: naming.Names, but: Collection[int] = ()) -> str:
    """but: others do those."""
    passes = [
        i
        for i, one in enumerate(program.passes)
        if i not in but and isinstance(one, Planes) and parts_of(plan, program, i)
    ]
    return ", ".join(pass_words(plan, program, names, i) for i in passes) or "small values"


def _made_words(program: Program, number: int) -> str:
    """What a pass makes."""
    results = {root.name for root in program.roots}
    own = [program.arrays[key] for key in program.passes[number].targets]

    def called(array: Array) -> str:
        if array.name in results:
            return array.name
        return "reductions" if array.parts is None else "maxima" if "largest" in array.kind else "sums"

    made = dict.fromkeys(map(called, own))
    return " and ".join([name for name in made if not name.startswith("kept_")] or ["what is kept"])


def pass_words(plan: Plan, program: Program, names: naming.Names, number: int, reads_v: bool = True) -> str:
    """reads_v: if it does, is that from memory?"""
    text, own = program.texts[number], [program.arrays[key] for key in program.passes[number].targets]
    known = {a.name: a for a in (*program.arrays.values(), *program.given.values(), *names.incoming.values())}
    read = [known[name] for name, ctype in text.pointers.items() if ctype.startswith("const")]
    read += [known["v"]] if text.reads_v and reads_v else []
    reads, writes = [in_bytes(sum(bytes_of(plan, program, a) for a in arrays)) for arrays in (read, own)]
    return f"{_made_words(program, number)} (reads {reads}, writes {writes})"


def in_bytes(count: int) -> str:
    return f"{count / 1e6:.1f} MB" if count >= 50_000 else f"{count / 1e3:.1f} KB"
