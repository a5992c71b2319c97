"""Pools of what lies channels last between segments (between.py), by an operator each: a window's largest value, or its average, as torch has them.

Forward reads x and writes y. For a gradient it keeps of each window the largest value's place, row by row, in a byte, where PyTorch keeps an
int64. Backward gathers: each element of dx adds up what the windows that hold it have for it, in their order. Where anything doesn't fit, PyTorch's
own call runs.
"""

from __future__ import annotations

import functools
import hashlib
import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

import inline_loader
from inline_kernels.loader import operators as loader_operators
from inline_kernels.loader.operators import check_memory

from . import between, support
from .cases import CTYPES
from .launching import ANYWHERE, Entry, Launch, new_of
from .replacing import Replacement, are_plain, lie_last

MOST_PLACES = 256  # of a window: a byte says which
_MOST = 2**31  # elements of an image, with what surrounds it; blocks of a launch


class Pool(NamedTuple):
    """rest: of the largest, its dilation; of an average, count_include_pad and divisor_override."""

    is_largest: bool
    kernel: tuple[int, int]
    stride: tuple[int, int]
    padding: tuple[int, int]
    ceil_mode: bool
    dilation: tuple[int, int] = (1, 1)
    counts_padding: bool = True
    divisor: int | None = None

    def eager(self, x: Tensor) -> Tensor:
        windows = self.kernel, self.stride, self.padding
        if self.is_largest:
            return F.max_pool2d(x, *windows, self.dilation, self.ceil_mode)
        return F.avg_pool2d(x, *windows, self.ceil_mode, self.counts_padding, self.divisor)


# ------------------------------------------------------------------------------------------------------------ which calls do


def poolers(captured, model: nn.Module, segments: Sequence) -> dict[fx.Node, tuple[Pooler, list[fx.Node]]]:
    """By the calls that they replace, with what they are given. segments: those that run."""
    pools = {node: _pool(node, model) for node in captured.module.graph.nodes}
    served = [node for node, pool in pools.items() if pool and len(node.all_input_nodes) == 1]
    found = between.lying_last(served, captured, model, segments)
    return {node: (Pooler(pools[node]), node.all_input_nodes) for node in found}


def _pool(node: fx.Node, model: nn.Module) -> Pool | None:
    """What a call computes, if it is a pool's with settings that are known."""
    try:
        if node.op == "call_function" and node.target in _SETTINGS:
            return _SETTINGS[node.target](*node.args, **node.kwargs)
        module = model.get_submodule(node.target) if node.op == "call_module" else None
        function = _FUNCTIONS.get(type(module))
        if function is None or len(node.args) != 1 or node.kwargs or support.altered(node.target, module):
            return None
        names = [name for name in type(module).__constants__ if hasattr(module, name)]
        return _SETTINGS[function](node.args[0], **{name: getattr(module, name) for name in names})
    except (TypeError, ValueError):  # eager's, or numbers that aren't known
        return None


def _largest(
    input, kernel_size, stride=None, padding=0, dilation=1, ceil_mode=False, return_indices=False
) -> Pool | None:
    if return_indices:
        return None
    windows = _windows(kernel_size, stride, padding)
    return Pool(True, *windows, bool(ceil_mode), _two(dilation, 1))


def _average(
    input, kernel_size, stride=None, padding=0, ceil_mode=False, count_include_pad=True, divisor_override=None
) -> Pool | None:
    if divisor_override is not None and (type(divisor_override) is not int or not divisor_override):
        return None
    windows = _windows(kernel_size, stride, padding)
    return Pool(False, *windows, bool(ceil_mode), (1, 1), bool(count_include_pad), divisor_override)


_SETTINGS = {F.max_pool2d: _largest, F.avg_pool2d: _average}
_FUNCTIONS = {nn.MaxPool2d: F.max_pool2d, nn.AvgPool2d: F.avg_pool2d}


def _windows(kernel_size, stride, padding) -> tuple:
    """Raises ValueError for what eager refuses, or has too many places."""
    kernel = _two(kernel_size, 1)
    if math.prod(kernel) > MOST_PLACES:
        raise ValueError(kernel)
    return kernel, kernel if stride is None or stride in ((), []) else _two(stride, 1), _two(padding, 0)


def _two(numbers, least: int) -> tuple[int, int]:
    """Raises ValueError for what isn't a number or two, or too small."""
    found = (*numbers,) if isinstance(numbers, (list, tuple)) else (numbers,)
    if len(found) not in (1, 2) or {*map(type, found)} != {int} or min(found) < least:
        raise ValueError(found)
    return found * 2 if len(found) == 1 else found


# -------------------------------------------------------------------------------------------------------------- what runs


class Pooler(Replacement):
    """A Pool of one model."""

    def __init__(self, pool: Pool):
        super().__init__()
        self.pool, self.eager = pool, pool.eager

    def source(self, dtype: torch.dtype) -> dict:
        return _request(self.pool, dtype)

    def operator(self) -> loader_operators.Operator:
        return _operator(self.pool)

    def fits(self, tensors: tuple[Tensor, ...]) -> bool:
        (x,) = tensors
        if not are_plain(tensors) or not lie_last(tensors):
            return False
        N, C, *size = x.shape
        elements = C * math.prod(map(sum, zip(size, self.pool.kernel, self.pool.padding)))
        if elements >= _MOST or N * (elements // 256 + 1) >= _MOST:
            return False
        try:
            return 0 not in _shape(self.pool, x)
        except RuntimeError:  # eager's, too
            return False


def _shape(pool: Pool, x: Tensor) -> torch.Size:
    """Of y. Raises RuntimeError where eager does."""
    return pool.eager(torch.empty(x.shape, device="meta")).shape


@functools.cache
def _operator(pool: Pool) -> loader_operators.Operator:
    def forward(x: Tensor, *, plan, saving):
        return plan.forward((x,), saving)

    def shapes(x, *, saving):
        y = x.new_empty(_shape(pool, x)).contiguous(memory_format=torch.channels_last)
        return [y, torch.empty_like(y, dtype=torch.uint8)] if saving and pool.is_largest else [y]

    def backward(dy, x, *places, plan, needs):
        return [plan.backward(dy, x, *places)]

    digest = hashlib.sha256(repr(pool).encode()).hexdigest()[:16]
    return loader_operators.declare(
        f"pool_{digest}",
        forward,
        shapes=shapes,
        backward=backward,
        plan=lambda x, *, saving: Plan(pool, x, saving),
    )


class Plan:
    """Of an x of one kind: its launches."""

    def __init__(self, pool: Pool, x: Tensor, saving: bool):
        self.kernels = inline_loader.load(**_request(pool, x.dtype))
        shape, keeps = _shape(pool, x), saving and pool.is_largest
        numbers = *x.shape, *shape[2:]
        # Launchers see for themselves how many bytes they can move at a time.
        entry = functools.partial(Entry, dtype=x.dtype, aligned=ANYWHERE, last=True)
        places = Entry("places", torch.uint8, shape=shape if keeps else (0,), last=True)
        table = [entry("y", shape=shape), places, entry("x", argument=0)]
        bind = functools.partial(self.kernels.pool.bound, *numbers, trusting=True, new=new_of(table))
        self.launch, self.keeps = Launch(bind, table, (x,)), keeps

        read = Entry("places", torch.uint8, argument=1, aligned=ANYWHERE, last=True) if keeps else places
        self.table = [entry("dx", shape=x.shape), entry("dy", argument=0), read]
        self.bind = functools.partial(self.kernels.pool_gradient.bound, *numbers, new=new_of(self.table))
        self.back: Launch | None = None  # once there is a dy

    def forward(self, a: tuple[Tensor], saving: bool) -> Sequence[Tensor]:
        return self.launch.run(a)[: 1 + self.keeps]

    def backward(self, dy: Tensor, x: Tensor, *places: Tensor) -> Tensor:
        given = [t.contiguous(memory_format=torch.channels_last) for t in (dy, *places)]
        check_memory(*given)
        if self.back is None:
            self.back = Launch(self.bind, self.table, given)
        return self.back.run(given)[0]


# ------------------------------------------------------------------------------------------------------------ its source


def _request(pool: Pool, dtype: torch.dtype) -> dict:
    return {"name": "pool", "source": text(pool), "device": "cuda", "defines": {"VALUE_T": CTYPES[dtype]}}


@functools.cache
def text(pool: Pool) -> str:
    """The source, for these windows."""

    def said(value: bool) -> str:
        return str(value).lower()

    windows = [
        f"load::Windows<{', '.join(map(str, each))}>"
        for each in zip(pool.kernel, pool.stride, pool.padding, pool.dilation)
    ]
    numbers = "int64_t N, int64_t C, int64_t H, int64_t W, int64_t rows, int64_t columns, cudaStream_t stream"
    given = "N, C, H, W, rows, columns, stream"
    return f"""// A pool of images channels last, and its gradient.
#include "load/load.h"
#include "load/pool.cuh"

struct Pool {{
  using Rows = {windows[0]};
  using Columns = {windows[1]};
  static constexpr bool kLargest = {said(pool.is_largest)}, kCountsPadding = {said(pool.counts_padding)};
  static constexpr bool kPads = {said(any(pool.padding) or pool.ceil_mode)};  // in ceil_mode a window may go beyond the image
  static constexpr int64_t kDivisor = {pool.divisor or 0};
}};
EXPORT void pool(value_t* y, uint8_t* places, const value_t* x, {numbers}) {{
  load::pool<Pool>(y, places, x, {given});
}}
EXPORT void pool_gradient(value_t* dx, const value_t* dy, const uint8_t* places, {numbers}) {{
  load::pool_gradient<Pool>(dx, dy, places, {given});
}}
"""
