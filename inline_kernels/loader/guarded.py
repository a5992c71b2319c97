"""Launchers between guard zones: each gets copies of its tensors, with bytes before and behind them that nothing may write to.

    with guarded.zones() as found:
        model(x)
    print(found)  # ["relu.forward wrote 4 bytes past the end of y"]

Around tensors that are only read there is NaN, so that what is read there shows in the results; around the others a number that arithmetic
changes, because NaN plus one would be the NaN that was there. What lies further away than `ZONE` bytes is not guarded.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from inline_kernels.loader import launch
from inline_kernels.loader.source import Launcher

ZONE = 1 << 18  # bytes before a tensor and behind it
ALIGNED = 512  # a copy lies modulo this as its tensor does: a launcher may choose its kernels by that
OF_WRITTEN, OF_INTEGERS = -1234.5, 85


@contextlib.contextmanager
def zones() -> Iterator[list[str]]:
    """In its context all launchers run between guard zones. Gives a list, which gets a line for each that wrote into one."""
    found: list[str] = []
    with launch.through(lambda who, launcher, run: between_zones(who, launcher, run, found)):
        yield found


def between_zones(who: str, launcher: Launcher, run: Callable, found: list[str]) -> Callable:
    """`run`, which takes the launcher's arguments, on copies of the tensors among them. who: what `found` calls it."""

    def guarded(*arguments):
        given = [t for t in arguments if isinstance(t, Tensor)]
        if not all(t.is_contiguous() and t.layout == torch.strided for t in given):
            return run(*arguments)  # which refuses them
        written = {id(t) for p, t in zip(launcher.parameters, arguments) if p.written}
        groups = _overlapping([t for t in given if t.numel()])
        regions = [_Region.of(tensors, any(id(t) in written for t in tensors)) for tensors in groups]
        copies = {id(t): copy for region in regions for t, copy in zip(region.tensors, region.copies)}
        result = run(*[copies.get(id(t), t) for t in arguments])
        names = {}  # of the same tensor given twice the one that is written
        for p, t in zip(launcher.parameters, arguments):
            if p.written or id(t) not in names:
                names[id(t)] = p.name
            if p.written and id(t) in copies:
                t.data.copy_(copies[id(t)])
        for text in [text for region in regions for text in region.damage(names)]:
            if f"{who} {text}" not in found:
                found.append(f"{who} {text}")
        return result

    return guarded


def _overlapping(tensors: Sequence[Tensor]) -> list[list[Tensor]]:
    """The tensors in groups, each of those that share memory, in the order of their addresses."""
    groups, end = [], 0
    for t in sorted(tensors, key=Tensor.data_ptr):
        if t.data_ptr() < end:
            groups[-1].append(t)
        else:
            groups.append([t])
        end = max(end, _end(t))
    return groups


class _Region(NamedTuple):
    """Copies of tensors, in memory of their own that is a zone, them, and a zone."""

    tensors: list[Tensor]
    copies: list[Tensor]
    memory: Tensor  # bytes
    start: int  # of the first tensor, in `memory`
    end: int  # of the last
    before: Tensor  # the zones, as they have to be
    behind: Tensor

    @classmethod
    def of(cls, tensors: list[Tensor], written: bool) -> _Region:
        """Of tensors that share memory, in the order of their addresses. written: is one of them?"""
        first, device = tensors[0].data_ptr(), tensors[0].device
        last = max(tensors, key=_end)
        size = _end(last) - first
        memory = torch.empty(2 * ZONE + ALIGNED + size, dtype=torch.uint8, device=device)
        start = ZONE + (first - memory.data_ptr() - ZONE) % ALIGNED
        before = _numbers(tensors[0].dtype, written, device)[:start]
        behind = _numbers(last.dtype, written, device)[: len(memory) - start - size]
        memory[:start].copy_(before), memory[start + size :].copy_(behind)
        copies = []
        for t in tensors:
            place = start + t.data_ptr() - first
            copies.append(memory[place : place + t.nbytes].view(t.dtype).view(t.shape))
            copies[-1].copy_(t.data)
        return cls(tensors, copies, memory, start, start + size, before, behind)

    def damage(self, names: dict[int, str]) -> Iterator[str]:
        """What was written to the zones, in words; names: of the tensors, by their ids."""
        first, last = self.tensors[0], max(self.tensors, key=_end)
        before, behind = self.memory[: self.start] != self.before, self.memory[self.end :] != self.behind
        if _any(before):
            yield f"wrote {_whole(self.start - int(before.nonzero()[0]), first)} before the start of {names[id(first)]}"
        if _any(behind):
            yield f"wrote {_whole(int(behind.nonzero()[-1]) + 1, last)} past the end of {names[id(last)]}"


def _whole(count: int, t: Tensor) -> str:
    """So many bytes of t's elements, of which one may keep some bytes when it is written."""
    return f"{-(-count // t.element_size()) * t.element_size()} bytes"


def _end(t: Tensor) -> int:
    return t.data_ptr() + t.nbytes


@functools.cache
def _numbers(dtype: torch.dtype, written: bool, device: torch.device) -> Tensor:
    """What a zone beside a tensor of this type holds, bytes, as many as the largest has: numbers of the type."""
    number = (
        (OF_WRITTEN if written else math.nan) if dtype.is_floating_point or dtype.is_complex else OF_INTEGERS
    )
    each = torch.full((1,), number, dtype=dtype, device=device).view(torch.uint8)
    return each.repeat(-(-(2 * ZONE + ALIGNED) // len(each)))


def _any(found: Tensor) -> bool:
    """As `any` of booleans, which takes ten times as long on a CPU."""
    return bool(found.view(torch.uint8).max())
