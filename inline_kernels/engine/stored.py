"""The schedule `stored`: a convolution of our own writes v, and the schedule `load` does the rest, forward and backward.

It runs on a GPU where a mainloop takes less time than the library, whatever the tail. What is kept for backward is the same as `load`'s, and so are
schedule.py's functions and signatures. The convolution is planned as a segment of its own that has no tail, by direct.py or sinks.py.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from . import direct, schedule, sinks
from .capture import Segment
from .graph import ELEMENTS, Graph
from .schedule import Unsupported, backward, forward, saved

__all__ = ["Unsupported", "backward", "describe", "forward", "plan", "requests", "saved"]

INFERENCE_ONLY = True
_BY = direct, sinks  # sinks has more channels out


def alone(segment) -> Segment:
    """The segment's convolution, of x and the weight. Made once; kept with the segment's graph."""
    with schedule._lock:
        known = vars(segment.graph)
        if "alone" not in known:
            graph, fields = Graph(segment.graph.dimensions), vars(segment)
            z = graph.leaf("z", ELEMENTS, "z")
            own = {"graph": graph, "outputs": [z], "inputs": segment.inputs[:1], "updates": [], "random": []}
            own |= {"parameters": segment.parameters[:1], "buffers": [], "scalars": {}}
            known["alone"] = Segment(**fields | own)
        return known["alone"]


def _convolution(segment, arguments: Sequence):
    """The schedule that convolves, and what it is given."""
    x, weight = arguments[0], arguments[len(segment.inputs)]
    given = alone(segment), (x, weight), False, x.dtype
    refused = []
    for by in _BY:
        try:
            by.requests(*given)
            return by, given
        except Unsupported as error:
            refused.append(str(error))
    raise Unsupported("; ".join(dict.fromkeys(refused)))


def requests(
    segment, arguments: Sequence, saving: bool, dtype: torch.dtype, exact_order: bool = False
) -> list[dict]:
    """The first one is load's."""
    by, given = _convolution(segment, arguments)
    return schedule.requests(segment, arguments, saving, dtype, exact_order) + by.requests(*given)


def describe(
    segment, arguments: Sequence, saving: bool, dtype: torch.dtype, exact_order: bool = False
) -> str:
    by, given = _convolution(segment, arguments)
    own = by.describe(*given).partition(":" if by is sinks else ",")[0]
    return schedule.describe(segment, arguments, saving, dtype, exact_order, own)


def plan(
    segment, arguments: Sequence, saving: bool, dtype: torch.dtype, exact_order: bool = False
) -> schedule.Plan:
    by, given = _convolution(segment, arguments)
    found, own = schedule.plan(segment, arguments, saving, dtype, exact_order, own=True), by.plan(*given)
    found.own = lambda x, weight: by.forward(own, (x, weight))[0]
    return found
