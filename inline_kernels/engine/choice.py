"""What runs on a GPU where more than one schedule can: what was fastest at such sizes in a recorded grid of them.

A rule is a variant, or a question and two rules: [a property of the convolution, most, the rule where it is at most `most`, the rule where
it is more]. kernels/composed.json has them, of a source and of a mainloop, for a pass that backward will follow ("train") and for any other
("forward"). They are fitted to RECORD, by `python benchmarks/grid.py --fit RECORD`, which prints them: so that nothing in it takes a GPU
longer than eager does. Other GPUs than the record's are taken to be like it. Where there is no rule, the most fused variant runs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

Rule = str | Sequence  # "fused", "epilogue" or "eager"; [property, most, rule, rule]

# image (N, C_in, extents) and filters (C_out, C_in, extents) are the shapes, itemsize the bytes in which eager convolves a value.
PROPERTIES: dict[str, Callable[[Sequence[int], Sequence[int], int], int]] = {
    "channels in": lambda image, filters, itemsize: filters[1],
    "channels out": lambda image, filters, itemsize: filters[0],
    "taps": lambda image, filters, itemsize: math.prod(filters[2:]),
    "bytes a value": lambda image, filters, itemsize: itemsize,
    "columns": lambda image, filters, itemsize: image[-1] - filters[-1] + 1,  # of the result
    "positions": lambda image, filters, itemsize: _positions(image, filters),  # of all results
    "results": lambda image, filters, itemsize: _positions(image, filters) * filters[0],
    "products": lambda image, filters, itemsize: _positions(image, filters) * math.prod(filters),
}

_CALLED = {"epilogue": "the library's convolution with a pass of ours behind it", "eager": "eager"}
RECORD = "benchmarks/results/grid/2026-11-24-h200.json"


def _positions(image: Sequence[int], filters: Sequence[int]) -> int:
    return image[0] * math.prod([extent - taps + 1 for extent, taps in zip(image[2:], filters[2:])])


def fastest(rule: Rule, image: Sequence[int], filters: Sequence[int], itemsize: int) -> tuple[str, str]:
    """The variant that `rule` names, and what leads there. Sizes may be symbolic, so it asks for no more than it needs, and its words have
    the bounds."""
    bounds = {}
    while not isinstance(rule, str):
        name, most, low, high = rule
        within = PROPERTIES[name](image, filters, itemsize) <= most
        bounds[name, "at most" if within else "more than"] = most
        rule = low if within else high
    return rule, ", ".join([f"{side} {most} {name}" for (name, side), most in bounds.items()])


def instead(rule: Rule, x, weight) -> tuple[str, str] | None:
    """The variant that is faster than the fused one by `rule`, and the reason; or None."""
    variant, sizes = fastest(rule, x.shape, weight.shape, x.element_size())
    if variant == "fused":
        return None
    return variant, f"{_CALLED[variant]} was faster with {sizes or 'any sizes'} ({RECORD})"
