"""What a mainloop is asked to do: how a filter goes over an image, and a job's sizes, on which tiles and expected times hang."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from . import between, costs, library, precision, tiling
from .cases import Case

# ------------------------------------------------------------------------------------------------------------------ the walk


class Walk(NamedTuple):
    """How a filter goes over an image, axis by axis; `before` and `behind` it, its padding."""

    stride: Sequence[int]
    before: Sequence[int]
    behind: Sequence[int]
    dilation: Sequence[int]

    @property
    def is_plain(self) -> bool:
        return self.is_dense and not any((*self.before, *self.behind))

    @property
    def is_dense(self) -> bool:
        return {*self.stride, *self.dilation} == {1}


def walk_of(segment, weight: Tensor) -> Walk:
    conv = segment.conv
    before, behind = zip(*library.padding(segment.conv, weight))
    return Walk(conv.stride, before, behind, conv.dilation)


def copies_obstacle(walk: Walk, taps: Sequence[int], window: Sequence[int]) -> str | None:
    """Why the copy engine can't gather what such taps meet, of windows of v; or None."""
    reach = [(k - 1) * dilation for k, dilation in zip(taps, walk.dilation)]
    most = 127 if len(taps) == 2 else 15
    steps = [stride * extent for stride, extent in zip(walk.stride, window)]
    ends = [*walk.before, *walk.behind, *[a + 2 * b for a, b in zip(reach, steps)]]
    if max(steps) > 8 or max(ends) > most:
        return f"the copy engine's strides go to 8, its offsets to {most}"
    return None


def walk_defines(walk: Walk) -> dict[str, int]:
    walk = walk._asdict().items()
    return {f"{name.upper()}_{axis}": n for name, each in walk for axis, n in zip("WHD", reversed(each))}


def walk_text(dimensions: int) -> str:
    """How a build's macros say it (`walk_defines`), as C++."""
    plain, axes = {"STRIDE": "1", "BEFORE": "0", "BEHIND": "0", "DILATION": "1"}, "DHW"[3 - dimensions :]
    lines = [[each] * (3 - dimensions) + [f"{name}_{axis}" for axis in axes] for name, each in plain.items()]
    own = ", ".join("{" + ", ".join(line) + "}" for line in lines)
    return f"const conv::Walk walk{{{own}}};"


def padded_text(dimensions: int) -> list[str]:
    """Lines of a launcher by which x gets what a mainloop that doesn't walk meets around it."""
    axes = "DHW"[3 - dimensions :]
    before, behind = (
        ", ".join(["0"] * (3 - dimensions) + [f"{side}_{axis}" for axis in axes])
        for side in ("BEFORE", "BEHIND")
    )
    return [
        f"const conv::Padded<value_t> padded(x, {{{before}}}, {{{behind}}}, stream);",
        "x = padded.x;",
    ]


# --------------------------------------------------------------------------------------------------------------- what is asked


class Image(NamedTuple):
    """What a mainloop's tiles hang on, of an x in planes."""

    shape: Sequence[int]
    dtype: torch.dtype
    device: torch.device

    def element_size(self) -> int:
        return self.dtype.itemsize


class Job(NamedTuple):
    """What a mainloop is asked to do. dtypes: of the results; front: direct.py's, or sinks: those of each pass; positions: v's, in all samples;
    settings: how its filter goes, or None where it is padded by more behind than before, and walk, too; pads: segment.Conv.pads; last: are results to lie channels
    last for the next convolution, and rounds: y be rounded to TF32? follows_x: are they where x does?"""

    x: Tensor
    weight: Tensor
    dtypes: Sequence[torch.dtype]
    front: object | None
    sinks: Sequence[Sequence]
    positions: int
    settings: precision.Settings | None
    walk: Walk
    pads: bool
    last: bool = False
    rounds: bool = False
    instructions: int = 0  # of an element's tails, about
    inside: bool = False  # would the library run the tail inside its convolution?
    follows_x: bool = False

    @property
    def window(self) -> int:
        """Elements of v that are pooled to one."""
        return math.prod(self.front.window) if self.front and self.front.pooled else 1

    @property
    def gathered(self) -> int:
        """Elements of v of which the result has one, at least: a window's, or a position's where sinks store nothing."""
        return self.weight.shape[0] if self.sinks and not self.is_stored else self.window

    @property
    def image(self) -> Image:
        """x, with zeros around it as the convolution has them."""
        around = zip(self.x.shape[2:], self.walk.before, self.walk.behind)
        return Image((*self.x.shape[:2], *map(sum, around)), self.x.dtype, self.x.device)

    @property
    def shapes(self) -> costs.Shapes:
        device = tiling.device_properties(self.x.device.index)
        return costs.Shapes(self.x.shape, self.weight.shape, self.positions, self.x.element_size(), device)

    @property
    def is_alone(self) -> bool:
        """Is v itself the only result?"""
        if self.front:
            return len(self.dtypes) == 1 and self.front.node.is_leaf("z")
        return not self.sinks or [(sink.kind, sink.tail) for own in self.sinks for sink in own] == [
            ("store", "conv::Identity")
        ]

    @property
    def runs_tf32(self) -> bool:
        """Does eager?"""
        return bool(self.settings and precision.runs_tf32(self.x, self.weight, settings=self.settings))

    @property
    def is_stored(self) -> bool:
        return any(sink.kind == "store" for own in self.sinks for sink in own)


def job_of(
    case: Case, dtypes: Sequence[torch.dtype], front=None, sinks: Sequence = (), instructions: int = 0
) -> Job:
    sizes, walk = case.sizes, walk_of(case.segment, case.weight)
    same = walk.before == walk.behind
    settings = precision.Settings(walk.stride, walk.before, walk.dilation) if same else None
    positions = sizes.N * sizes.positions("e")
    rounds = case.stays_last and case.segment.result == between.OPERAND and case.x.dtype == torch.float32
    how = settings, walk, case.segment.conv.pads, case.stays_last, rounds, instructions
    return Job(case.x, case.weight, dtypes, front, sinks, positions, *how, follows_x=case.last)
