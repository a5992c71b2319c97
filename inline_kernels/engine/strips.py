"""Which convolutions a CPU's own kernels compute (kernels/cpu/strips.h), by their properties, and in what strips: some rows of some planes
of a sample, of all channels.

v is Winograd's where filters have 3×3 taps and enough terms a sum; the gradient of x likewise, as the convolution of v's with the filters
turned round. That of the filters is Winograd's in 2-D; where few channels come in direct sums, which save no fewer multiplications; where
most gradients of v are zero, as behind a pool, sums over the places where they aren't.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from . import library
from .source import Own

_TILES = 64  # of 2×2 results, that are computed together (winograd.h's kChunk)
_VALUE_BYTES = 256 << 10  # of a strip's results: a quarter of a usual cache of a core
_SHARES = 32  # of the gradient's sums but Winograd's: so many threads can make them
PICKED = 4  # places of which the gradient isn't zero at one, at least, where its sums are picked
_PICKED_BYTES = 1 << 20  # of a share's picked sums: more take longer than the library's


def own(conv, x: Tensor, weight: Tensor) -> Own:
    """What is not left to the library."""
    plain = {*conv.stride, *conv.dilation, conv.groups} == {1} and weight.shape[-2:] == (3, 3)
    if not plain or x.dtype != torch.float32 or weight.dtype != torch.float32:
        return Own()
    image = Image(conv, x, weight)
    C, channels, *taps = weight.shape
    wide = all(side >= library.WINOGRAD_SIDE for side in image.padded[-2:])
    convolution = wide and library.winograd_suits(channels * math.prod(taps[:-2]), C)
    if channels <= library.DIRECT_CHANNELS and C % 8 == 0:
        gradient = "direct"
    else:
        gradient = "winograd" if convolution and len(taps) == 2 else ""
    inside = image.inside and all(2 * p < k for p, k in zip(image.padding, image.taps))
    turned = inside and wide and library.winograd_suits(C * math.prod(taps[:-2]), channels)
    may_pick = min(C, PICKED) if 8 * math.prod(weight.shape) <= _PICKED_BYTES else 0
    return Own(bool(convolution), gradient, bool(turned), may_pick)


class Image:
    """What is convolved, in three dimensions: x, or where zeros around it don't do, or may not be left out, x and what lies around it."""

    def __init__(self, conv, x, weight, inside: bool = True):
        nd = len(weight.shape) - 2
        self.around, self.mode, self.dimensions = library.padding(conv, weight), conv.padding_mode, nd
        none = (0,) * (3 - nd)
        self.channels, self.taps = x.shape[1], (*[1] * (3 - nd), *weight.shape[2:])
        self.padded = [*[1] * (3 - nd), *[s + sum(p) for s, p in zip(x.shape[2:], self.around)]]
        self.result = [s - k + 1 for s, k in zip(self.padded, self.taps)][3 - nd :]
        self.inside = inside and conv.padding_mode == "zeros" and all(a == b for a, b in self.around)
        self.padding = (*none, *[before for before, _ in self.around]) if self.inside else (0, 0, 0)
        self.size = [s - 2 * p for s, p in zip(self.padded, self.padding)]

    def of(self, x: Tensor) -> Tensor:
        flat = [each for pair in reversed(self.around) for each in pair]
        if not self.inside and any(flat):
            x = F.pad(x, flat, mode="constant" if self.mode == "zeros" else self.mode)
        return library.contiguous(x)

    @property
    def numbers(self) -> tuple[int, ...]:
        """naming.py's `CONVOLUTION`."""
        return self.channels, *self.size, self.taps[0], *self.padding


class Strips(NamedTuple):
    """`parts` a sample. samples: those whose v is there at a time. numbers: the launcher's last."""

    image: Image
    parts: int
    samples: int
    numbers: tuple[int, ...]


def of_convolution(image: Image, sizes, windows: Sequence[tuple[int, ...]], whole: bool) -> Strips:
    """windows: the positions of v that those of a strip's passes have, 0: a whole axis. whole: all samples' v is kept, or none's."""
    D, H, W = sizes.levels["e"]
    planes, rows = _convolved(sizes.C, (D, H, W), windows)
    samples = sizes.N if whole else max(1, library.CPU_PIECE_BYTES // (4 * sizes.C * D * H * W))
    parts = -(-D // planes) * -(-H // rows)
    return Strips(image, parts, samples, (*image.numbers, planes, rows, W, samples, 0))


def _convolved(C: int, size: Sequence[int], windows: Sequence[tuple[int, ...]] = ()) -> tuple[int, int]:
    """Planes and rows of a strip: whole windows, about as many tiles as are computed together, and what a core's cache holds."""
    D, H, W = size
    deep, high = (functools.reduce(math.lcm, [w[i] for w in windows], 1 + i) for i in (0, 1))
    rows = max(2, 2 * (_TILES // -(-W // 2)))
    rows = min(H, -(-rows // high) * high) if deep < 2 and high else H
    if not deep:
        return D, rows
    fitting = max(1, min(D, _VALUE_BYTES // (4 * C * rows * W)))
    planes = -(-D // -(-D // fitting))  # evenly
    return min(D, -(-planes // deep) * deep), rows


def of_gradient(image: Image, sizes, by: str) -> Strips:
    """Of one plane, and of tiles, or positions, that are computed together."""
    D, H, W = sizes.levels["e"]
    columns = min(W, 2 * _TILES)
    rows = min(H, max(2, 2 * (_TILES // -(-W // 2)))) if columns == W else 2
    parts = D * -(-H // rows) * -(-W // columns)
    shares = min(sizes.N * parts, torch.get_num_threads() if by == "winograd" else _SHARES)
    return Strips(image, parts, sizes.N, (*image.numbers, 1, rows, columns, sizes.N, shares))


def turned(conv, dz: Tensor, filters: Tensor) -> tuple[Image, tuple[int, ...]]:
    """For the gradient of x: dz as the image, and the launcher's numbers. filters: turned round, (channels in, C, …)."""
    around = [k - 1 - before for k, (before, _) in zip(filters.shape[2:], library.padding(conv, filters))]
    dz = dz.view(*dz.shape[:2], *dz.shape[-len(around) :])
    image = Image(conv._replace(padding=tuple(around)), dz, filters)
    size = (*[1] * (3 - len(around)), *image.result)
    planes, rows = _convolved(len(filters), size)
    return image, (len(dz), len(filters), *image.numbers, planes, rows)
