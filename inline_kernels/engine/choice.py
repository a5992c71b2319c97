"""What runs on a GPU where more than one schedule can: what was fastest at such sizes in a recorded grid of them.

A rule is a variant, or a question and two rules: [a property of the convolution, most, the rule where it is at most `most`, the rule where
it is more]. kernels/composed.json has them, of a source and of a mainloop, for a pass that backward will follow ("train") and for any other
("forward"). They are fitted to RECORD, by `python benchmarks/grid.py --fit RECORD`, which prints them: so that nothing in it takes a GPU
longer than eager does. Where there is no rule, the most fused variant runs. On another GPU than an H200 the bounds of rules are scaled
(costs.py): with them it is as busy as an H200 with its own. Else the way runs that is expected to take the least time.
"""

from __future__ import annotations

import contextlib
import functools
import json
import math
import threading
import types
from collections.abc import Callable, Sequence
from pathlib import Path

from inline_loader import KERNELS

from . import costs

Rule = str | Sequence  # "fused", "epilogue" or "eager"; [property, most, rule, rule]

# image (N, C_in, extents) and filters (C_out, C_in, extents) are the shapes, itemsize the bytes in which eager convolves a value.
PROPERTIES: dict[str, Callable[[Sequence[int], Sequence[int], int], int]] = {
    "channels in": lambda image, filters, itemsize: filters[1],
    "channels out": lambda image, filters, itemsize: filters[0],
    "taps": lambda image, filters, itemsize: math.prod(filters[2:]),
    "bytes a value": lambda image, filters, itemsize: itemsize,
    "columns": lambda image, filters, itemsize: image[-1] - filters[-1] + 1,  # of the result
    "positions": lambda image, filters, itemsize: costs.positions_of(image, filters),  # of all results
    "results": lambda image, filters, itemsize: costs.positions_of(image, filters) * filters[0],
    "products": lambda image, filters, itemsize: costs.positions_of(image, filters) * math.prod(filters),
}


_folders = [KERNELS]


def add(folder: Path) -> None:
    """Sources of a folder with a composed.json serve, too."""
    if folder not in _folders and (folder / "composed.json").is_file():
        _folders.append(folder)
        known.cache_clear()


@functools.cache
def known() -> dict[str, dict]:
    """What each source's row in composed.json says, by its name; `folder` added."""
    found = {}
    for folder in _folders:
        rows = json.loads((folder / "composed.json").read_text(encoding="utf-8"))
        found |= {name: {**row, "folder": folder} for name, row in rows.items()}
    return found


def rule(name: str, phase: str) -> Rule:
    """What "auto" runs where the source, or mainloop, of that name could. phase: "forward" or "train"."""
    found = known()[name].get("faster", {}).get(phase, "fused")
    return rule(found, phase) if isinstance(found, str) and found in known() else found


SCALED = "by timings of an H200, scaled to this GPU"
# With which of them the bound of a property grows; the others' are shapes.
_BOUNDS = {"positions": "memory", "results": "memory", "products": "compute"}
_CALLED = {"epilogue": "the library's convolution with a pass of ours behind it", "eager": "eager"}
RECORD = "benchmarks/results/grid/2026-11-24-h200.json"


def stream_loses(shapes: costs.Shapes, how: costs.Streamed) -> str | None:
    """Why not stream, where the library's convolution and a pass over v behind it take no longer; or None."""
    ours = costs.stream_microseconds(shapes, how)
    products = costs.stream_tile(shapes, how).microseconds * how.passes
    reading = how.passes * costs.pass_microseconds(shapes)
    if how.folded != costs.VIEWS and how.views is not None and how.views + reading < products:
        return "v by views of patches, and passes over it, take less time"
    if how.beside_wide:  # a tile's time is of what is small
        ours += shapes.moving(shapes.positions * shapes.filters[0] / how.window)
    return library_wins(ours, shapes, how)


def taps_lose(shapes: costs.Shapes, how: costs.Streamed) -> str | None:
    """Why not taps; or None."""
    ours = costs.taps_microseconds(shapes, how)
    if costs.stream_microseconds(shapes, how) <= ours:
        return "stream is faster at such sizes"
    return library_wins(ours, shapes, how)


def library_wins(ours: float, shapes: costs.Shapes, how: costs.Streamed) -> str | None:
    """Why not a mainloop that takes so many microseconds in stream's place; or None. Nothing is refused where what can run is timed."""
    sure = costs.SURE_INSIDE if how.inside else 1
    if is_silent() or ours < sure * costs.by_library(shapes, how):
        return None
    behind = " is" if how.alone else " and a pass behind it are"
    return f"the library's convolution{behind} faster at such sizes"


def wide_loses(ours: float, by_stream: float) -> bool:
    """Microseconds as expected."""
    return by_stream < costs.WIDE_LOSES * ours


def narrow_loses(
    products: float,
    shapes: costs.Shapes,
    how: costs.Streamed,
    copied: float,
    others: float,
    margin: float = costs.FEW_LIBRARY,
) -> str | None:
    """Why not a mainloop of few channels in, whose products take so many microseconds; or None. how: of stream in its place. copied: those of copies
    of x and y. others: those by other mainloops. margin: so many times as fast the library must be expected to be."""
    ours, theirs = how.passes * products + copied, costs.by_library(shapes, how)
    if margin * theirs <= ours and not is_silent():
        return "the library's convolution is faster at such sizes"
    return "another mainloop is faster at such sizes" if others <= ours else None


def inside_loses(start: float, instructions: int, moved: int, scale) -> bool:
    """Does such a tail inside a mainloop take longer than a pass behind it, which moves so many bytes more of an element?"""
    inside = (start + costs.INSTRUCTION * instructions) / scale.compute
    return inside > 1e6 * moved / (costs.PASS_BYTES * scale.memory)


_silent = threading.local()


@functools.cache
def able(schedule: object) -> object:
    """A schedule that runs a segment wherever it can, as rules say, or, where they leave it to the library, though it be slower: for who times it. Of
    mainloops the one that is expected to be fastest runs, none by a copy of an x that lies channels last."""

    def silent(function: Callable) -> Callable:
        def called(*given, **keywords):
            with contextlib.suppress(schedule.Unsupported):
                return function(*given, **keywords)
            before, _silent.is_so = is_silent(), True
            try:
                return function(*given, **keywords)
            finally:
                _silent.is_so = before

        return called

    asked = {name: silent(getattr(schedule, name)) for name in ("requests", "describe", "plan", "saved")}
    return types.SimpleNamespace(**{**vars(schedule), **asked, "digest": "_able"})


def is_silent() -> bool:
    return getattr(_silent, "is_so", False)


def fastest(
    rule: Rule, image: Sequence[int], filters: Sequence[int], itemsize: int, scale: costs.Scale = costs.H200
) -> tuple[str, str]:
    """The variant that `rule` names, and what leads there. Sizes may be symbolic, so it asks for no more than it needs, and its words have
    the bounds."""
    bounds = {}
    while not isinstance(rule, str):
        name, most, low, high = rule
        most = most if scale == costs.H200 else int(most * getattr(scale, _BOUNDS.get(name, ""), 1))
        within = PROPERTIES[name](image, filters, itemsize) <= most
        bounds[name, "at most" if within else "more than"] = most
        rule = low if within else high
    return rule, ", ".join([f"{side} {most} {name}" for (name, side), most in bounds.items()])


def instead(rule: Rule, x, weight, scale: costs.Scale) -> tuple[str, str] | None:
    """The variant that is faster than the fused one by `rule`, and the reason; or None."""
    variant, sizes = fastest(rule, x.shape, weight.shape, x.element_size(), scale)
    if variant == "fused":
        return None
    return variant, f"{_CALLED[variant]} was faster with {sizes or 'any sizes'} ({RECORD})"
