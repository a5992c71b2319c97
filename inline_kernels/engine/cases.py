"""What a plan is made for: a segment with arguments, at which places of these what is, and the sizes of what is computed.

`arguments`: tensors (x and the second inputs, parameters, buffers that are read, two for each update of running statistics), then, where there
is dropout, a seed and a number, then the model's numbers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from . import between, library, naming
from .graph import Space
from .passes import Unsupported

CTYPES = {
    torch.float32: "float",
    torch.float64: "double",
    torch.float16: "half_t",
    torch.bfloat16: "bfloat16_t",
}


class Case(NamedTuple):
    """What a plan is made for. saving: does backward follow? dtype: of y. exact_order: is nothing added in another order than eager's? last: are
    v and y channels last, as eager's, or as between.py says (y alone where passes turn it)? in_planes: is v none the less, as our own mainloop writes it?"""

    segment: object
    arguments: Sequence
    saving: bool
    dtype: torch.dtype
    exact_order: bool = False
    last: bool = False
    in_planes: bool = False

    @property
    def x(self) -> Tensor:
        return self.arguments[0]

    @property
    def weight(self) -> Tensor:
        return self.arguments[len(self.segment.inputs)]

    @property
    def device(self) -> str:
        return library.device_type(self.x)

    @property
    def convolves_last(self) -> bool:
        """Is eager's v channels last? On a GPU alone anybody asks."""
        if self.in_planes or self.device != "cuda":
            return False
        return library.result_format(self.x, self.weight, True) != torch.contiguous_format

    @property
    def stays_last(self) -> bool:
        """Does y lie channels last for the next convolution, though eager's doesn't?"""
        return self.last and self.segment.result in (between.OPERAND, between.KEPT)

    @property
    def turns_y(self) -> bool:
        """May passes turn y, and its gradient, on the way, where that stays channels last, but x, v and all that is like it lie in planes?"""
        if not (self.stays_last and self.dtype == self.x.dtype):
            return False
        if not (self.segment.conv.is_nothing or between.convolves_planes(self.segment, self.x, self.weight)):
            return False
        alike = zip(self.segment.inputs, self.arguments)
        alike = [self.x, *(t for leaf, t in alike if leaf.space.level and leaf.space.c)]
        return self.weight.shape[0] % 8 == 0 and all(t.is_contiguous() for t in alike)

    @property
    def sizes(self) -> Sizes:
        return sizes_of(self.segment, self.x, self.weight)

    @property
    def defines(self) -> dict[str, str]:
        """What every source is told."""
        types = {"VALUE_T": self.x.dtype, "OUTPUT_T": self.dtype, "PARAMETER_T": self.parameter_dtype}
        return {name: CTYPES[dtype] for name, dtype in types.items()}

    @property
    def parameter_dtype(self) -> torch.dtype:
        """In which the tail's parameters and running statistics are read, gradients and the latter written: all have it, or what is computed in."""
        own = self.arguments[len(self.segment.inputs) + 1 : len(self.segment.tensors)]
        accumulated = torch.float64 if self.x.dtype == torch.float64 else torch.float32
        return self.x.dtype if all(t.dtype == self.x.dtype for t in own) else accumulated


def places(segment) -> dict[str, int]:
    """The numbers of arguments that are tensors, by the names of arrays."""
    names = segment.tensors
    return {naming.identifier(name): i for i, name in enumerate(names)} | {"seed": len(names)}


def first_number(segment) -> int:
    return len(segment.tensors) + 2 * bool(segment.random)


class Sizes(NamedTuple):
    """N, C and each level's (D, H, W); D is 1 in two dimensions."""

    N: int
    C: int
    levels: dict[str, tuple[int, int, int]]

    def shape(self, space: Space) -> list[int]:
        own = [self.N] * space.n + [self.C] * space.c
        return [*own, *self.levels[space.level]] if space.level else own

    def positions(self, level: str) -> int:
        return math.prod(self.levels[level])


def levels_of(segment, x: Tensor, weight: Tensor) -> dict[str, tuple[int, ...]]:
    """The positions of "e" and of each level, axis by axis."""
    conv, nd = segment.conv, weight.dim() - 2
    found = []
    for i in range(nd):
        extent = conv.dilation[i] * (weight.shape[2 + i] - 1) + 1
        around = sum(library.padding(conv, weight)[i])
        found.append((x.shape[2 + i] + around - extent) // conv.stride[i] + 1)
    levels = {"e": tuple(found)}
    for name, level in segment.graph.levels.items():
        levels[name] = level.sizes(levels[level.parent])
    return levels


def sizes_of(segment, x: Tensor, weight: Tensor) -> Sizes:
    levels = levels_of(segment, x, weight)
    padded = {name: ((1,) * (5 - weight.dim()) + size) for name, size in levels.items()}
    # One by one: of two sizes that may be symbolic the smaller is not asked.
    if any(each < 1 for size in ((x.shape[0],), *padded.values()) for each in size):
        raise Unsupported("there is nothing to compute")
    return Sizes(x.shape[0], weight.shape[0], padded)
