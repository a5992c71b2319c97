"""A launcher of a loaded source with what it takes, decided once for arguments of one kind: which of them, what is made anew, in what dtypes."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from operator import itemgetter
from typing import NamedTuple

import torch
from torch import Tensor

from inline_kernels.loader.launch import compiled

from . import library

ANYWHERE = 1 << 10  # an Entry's `aligned`: never


class Entry(NamedTuple):
    """A launcher's tensor: an argument (its number) in `dtype`, a new array of a shape, or, with neither, what is there by its name."""

    name: str
    dtype: torch.dtype
    argument: int | None = None
    shape: Sequence[int] | None = None
    written: bool = False
    channels: int = 0  # how many elements an argument has, as it is read: a parameter's only one stands for all; 0: its own
    aligned: int = 2  # from how many dimensions on an argument is read 16 bytes at a time
    last: bool = False  # does it lie channels last, where the launcher's array is (N, …, C)?


class Launch:
    """A launcher for arguments of one kind: `run(arguments, *given)` allocates what is to be made, of the names `made`, runs it, and returns a list
    of what is `returned`, by names of what is made or given, and None; by default what is made. bind: gives what is run, of the tensors that lie
    channels last. given: the names of what is there beside the arguments. number: of an argument, a number, behind the tensors. turning: gives what
    turns a tensor like that one, to channels last or back, or None. `last`: does the first one lie channels last?"""

    def __init__(
        self,
        bind: Callable[..., Callable],
        table: Sequence[Entry],
        arguments: Sequence,
        given: Sequence[str] = (),
        number=None,
        turning: Callable[[Tensor, bool], Callable | None] | None = None,
        returned: Sequence[str | None] | None = None,
    ):
        self.last = table[0].last
        none = [e for e in table if e.shape is not None and not math.prod(e.shape)]
        new = [e for e in table if e.shape is not None and e not in none]
        self.bound = bind(last=[i for i, e in enumerate(table) if e.last and e not in none])
        self.made = [*(e.name for e in new), *(e.name for e in none)]
        self.none = [arguments[0].new_empty(0, dtype=e.dtype) for e in none]
        self.like = [_without_memory(arguments[0], entry) for entry in new]
        self.make = [*map(library.making, self.like)]
        names, count = [*given, *self.made], len(arguments)
        of = [count + names.index(e.name) if e.argument is None else e.argument for e in table]
        of += () if number is None else (number,)
        self.pick = itemgetter(*of, of[0])  # of two at least it gives a tuple
        self.returned = [*(self.made if returned is None else returned)]
        self.found = [None if name is None else names.index(name) for name in self.returned]
        self.converted = [
            (at, e, _reading(arguments[e.argument], e, turning))
            for at, e in enumerate(table)
            if e.argument is not None and not _is_ready(arguments[e.argument], e)
        ]
        self.run = self._converting if self.converted else self._written_out(of, count, len(given))

    def _written_out(self, of: Sequence[int], count: int, given: int) -> Callable:
        """`run` as code for these places: arguments, what is given, what is made. It takes a fifth less time than one that picks."""
        new = [f"m{i}" for i in range(len(self.like))]
        names = {"_bound": self.bound} | {f"_make_{m}": make for m, make in zip(new, self.make)}
        names |= {f"_none_{i}": t for i, t in enumerate(self.none)}
        own, made = [f"g{i}" for i in range(given)], [*new, *[f"_none_{i}" for i in range(len(self.none))]]
        there = [*own, *made]
        known = [*[f"arguments[{i}]" for i in range(count)], *there]
        found = ", ".join(["None" if i is None else there[i] for i in self.found])
        lines = [f"    {m} = _make_{m}()\n" for m in new]
        lines += [f"    _bound({', '.join([known[i] for i in of])})\n    return [{found}]\n"]
        exec(compiled(f"def run({', '.join(['arguments', *own])}):\n{''.join(lines)}"), names)
        return names["run"]

    def _converting(self, arguments: Sequence, *given: Tensor) -> list[Tensor | None]:
        there = [*given, *[make() for make in self.make], *self.none]
        *taken, _ = self.pick((*arguments, *there))
        for at, _, read in self.converted:
            taken[at] = read(taken[at])
        self.bound(*taken)
        for at, entry, _ in self.converted:
            if entry.written:
                arguments[entry.argument].data.copy_(taken[at])  # as launches that tell autograd nothing
        return [None if i is None else there[i] for i in self.found]


def new_of(table: Sequence[Entry], own: str = "") -> int:
    """How many of the first are made anew at each call, or are `own`."""
    return next((i for i, e in enumerate(table) if e.shape is None and e.name != own), len(table))


def _without_memory(x: Tensor, entry: Entry) -> Tensor:
    """A tensor on x's device to make others like it."""
    return library.without_memory(x, entry.shape, entry.dtype, _layout(entry, len(entry.shape)))


def _layout(entry: Entry, dimensions: int) -> torch.memory_format:
    return library.CHANNELS_LAST[dimensions] if entry.last else torch.contiguous_format


def _is_ready(t: Tensor, entry: Entry) -> bool:
    alike = t.dtype == entry.dtype and t.is_contiguous(memory_format=_layout(entry, t.dim()))
    alike = alike and entry.channels in (0, t.numel())
    return alike and (t.dim() < entry.aligned or t.data_ptr() % 16 == 0)


def _reading(t: Tensor, entry: Entry, turning: Callable | None) -> Callable[[Tensor], Tensor]:
    """What makes of an argument like t what kernels read."""
    turned = None
    if turning and t.dtype == entry.dtype and entry.channels in (0, t.numel()):
        turned = turning(t, entry.last)
    return turned or functools.partial(_as_read, entry=entry)


def _as_read(t: Tensor, entry: Entry) -> Tensor:
    t = t if t.dtype == entry.dtype else t.detach().to(entry.dtype)
    if entry.channels not in (0, t.numel()):
        return t.detach().reshape(-1).expand(entry.channels).contiguous()
    layout = _layout(entry, t.dim())
    return library.aligned(t, layout) if t.dim() >= entry.aligned else t.contiguous(memory_format=layout)
