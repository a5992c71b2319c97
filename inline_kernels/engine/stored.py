"""The schedule `stored`: a convolution of our own writes v, and the schedule `load` does the rest, forward and backward.

It runs on a GPU where a mainloop takes less time than the library, whatever the tail. What is kept for backward is the same as `load`'s, and so are
schedule.py's functions and signatures. The convolution is planned as a segment of its own that has no tail, by direct.py; or, where
backward follows, sinks.py has what the first pass over v makes, sums mostly, taken from the registers beside it.
"""

from __future__ import annotations

from . import choice, direct, inside, library, load_plan, programs, schedule, sinks
from .between import KEPT
from .cases import Case
from .graph import ELEMENTS, Graph
from .schedule import Unsupported, backward, forward, reads_y, saved, spends
from .segment import Segment

__all__ = ["Unsupported", "backward", "describe", "forward", "plan", "reads_y", "requests", "saved", "spends"]

BY_SIZES = True


def _composed(case: Case) -> programs.Composed:
    return programs.composed_of(case.segment, programs.kind_for(case))


def _writes_last(case: Case) -> bool:
    """Does v lie channels last, because y stays so, and passes can't turn that, or because all that is like it does?"""
    composed = _composed(case)
    if case.stays_last:
        return not load_plan.turns_y_alone(case, composed)
    tensor_cores = case.x.element_size() == 2 or library.may_run_tf32(case.x)  # else v in planes is no slower
    return library.is_channels_last(case.x) and tensor_cores and load_plan.is_last(case, composed)


def _behind(case: Case) -> Case:
    """For what follows the convolution, which writes v in planes, unless it lies channels last as y does."""
    return case if case.stays_last or _writes_last(case) else case._replace(last=False, in_planes=True)


def alone(case: Case) -> Case:
    """Its convolution, of x and the weight. The segment is made once; it is kept with the graph of the case's. v isn't rounded."""
    segment, last = case.segment, _writes_last(case)
    with programs.lock:
        known = vars(segment.graph).setdefault("alone", {})
        if last not in known:
            graph = Graph(segment.graph.dimensions)
            own = {"graph": graph, "outputs": [graph.leaf("z", ELEMENTS, "z")], "inputs": segment.inputs[:1]}
            own |= {
                "result": KEPT if last else None,
                "parameters": segment.parameters[:1],
                "buffers": [],
                "scalars": {},
                "random": [],
                "updates": [],
            }
            known[last] = Segment(**vars(segment) | own)
    return Case(known[last], (case.x, case.weight), False, case.x.dtype, last=last)


def of_convolution(case: Case) -> list[dict]:
    """What direct builds for the convolution alone. Raises Unsupported."""
    if not choice.is_silent() and inside.runs(case):
        raise Unsupported("the library runs the tail inside its convolution")
    if _writes_last(case) and not load_plan.is_last(case, _composed(case)):
        raise Unsupported("v would lie channels last, and passes read planes")
    return direct.requests(alone(case))


def first_beside(case: Case) -> tuple | None:
    """What does the first pass, too, as sinks.py says."""
    if not case.saving or _behind(case) is case:
        return None
    try:
        return sinks.beside_v(_behind(case))
    except Unsupported:
        return None


def requests(case: Case) -> list[dict]:
    """The first one is load's."""
    behind, beside = _behind(case), first_beside(case)
    own = [sinks.build(*beside, behind)] if beside else of_convolution(case)
    return schedule.requests(behind) + own


def describe(case: Case) -> str:
    behind = _behind(case)
    if beside := first_beside(case):
        mainloop, found = beside
        return schedule.describe(behind, mainloop.in_words(sinks.job(found, behind)), min(found.parts))
    of_convolution(case)
    return schedule.describe(behind, direct.describe(alone(case)).partition(",")[0])


def plan(case: Case) -> load_plan.Plan:
    behind = _behind(case)
    if beside := first_beside(case):
        return sinks.plan_saving(behind, *beside)
    of_convolution(case)
    own = direct.plan(alone(case))
    return schedule.plan(behind, own=lambda x, weight, _: direct.forward(own, (x, weight))[0])
