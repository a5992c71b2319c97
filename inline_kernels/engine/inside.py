"""A tail that a GPU's library runs inside its convolution: y = relu(v + bias + another tensor), channels last, where no gradient follows.

Then no pass over v is left, and y takes no longer than v alone (benchmarks/NOTES.md). PyTorch has it as cudnn_convolution_relu and
cudnn_convolution_add_relu. Whether the library has a kernel for the very sizes and settings, and whether that keeps NaN as eager's relu does,
it is asked once, as precision.py does; elsewhere a pass runs behind the convolution.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from inline_kernels.loader.operators import is_watched

from . import between, layouts, library, support
from .cases import Case
from .graph import ELEMENTS, Node, Space

_relu = getattr(torch, "cudnn_convolution_relu", None)
_add_relu = getattr(torch, "cudnn_convolution_add_relu", None)
_CHANNELS = Space(False, True, "")
_DTYPES = torch.float32, torch.float16, torch.bfloat16
_LIMIT = 1e-2  # of the error over the result, both as norms: roundings to 16 bits make 3e-3
_answers: dict[tuple, bool] = {}
_lock = threading.Lock()

WORDS = "the library's convolution with the tail inside, channels last, v is never written"


class Tail(NamedTuple):
    """The places of its tensors among a segment's arguments; None: there is none."""

    bias: int | None
    added: int | None


def tail_of(segment) -> Tail | None:
    """The segment's, if it is such a one."""
    y, spaces = segment.outputs[0], {"z": ELEMENTS, "parameter": _CHANNELS, "input": ELEMENTS}
    if y.op != "relu" or segment.random or segment.updates:
        return None
    found: dict[str, int] = {}
    for term in _terms(y.args[0]):
        name, kind = term.attr if term.op == "leaf" else ("", "")
        if kind in found or spaces.get(kind) != term.space:
            return None
        found[kind] = 0 if kind == "z" else segment.tensors.index(name)
    return Tail(found.get("parameter"), found.get("input")) if "z" in found else None


def _terms(node: Node) -> list[Node]:
    return [*_terms(node.args[0]), *_terms(node.args[1])] if node.op == "add" else [node]


def runs(case: Case) -> bool:
    """Does the library run it so, with arguments like these? False, too, where it can't be asked and hasn't been: while a graph is captured or code
    is traced, or where there is no memory for it."""
    tail = None if case.saving or case.device != "cuda" or not _relu else tail_of(case.segment)
    if tail is None or not _fits(case, tail):
        return False
    conv, cudnn = case.segment.conv, torch.backends.cudnn
    flags = (
        cudnn.version(),
        cudnn.benchmark,
        cudnn.deterministic,
        torch.are_deterministic_algorithms_enabled(),
    )
    how = library.Convolution.of(conv, case.weight).settings
    x, weight, added = case.x, case.weight, tail.added is not None
    key = x.device, *x.shape, *weight.shape, x.dtype, how, added, library.may_run_tf32(x), *flags
    with _lock:
        if key not in _answers:
            if is_watched() or support.capturing():
                return False
            _answers[key] = _asked(x, weight, how, added)
        return _answers[key]


def _fits(case: Case, tail: Tail) -> bool:
    segment, x, weight = case.segment, case.x, case.weight
    known = all(type(size) is int for size in (*x.shape, *weight.shape))
    if not known or weight.dim() != 4 or segment.conv.is_nothing or x.dtype not in _DTYPES:
        return False
    if not case.last or between.rounds(segment, x) or not library.is_channels_last(x):
        return False
    if library.Convolution.of(segment.conv, weight).around or {weight.dtype, case.dtype} != {x.dtype}:
        return False
    sizes, shapes = case.sizes, {}
    if tail.bias is not None:
        shapes[tail.bias] = [sizes.C]
    if tail.added is not None:
        shapes[tail.added] = [sizes.N, sizes.C, *sizes.levels["e"][1:]]
    for place, shape in shapes.items():
        t = case.arguments[place]
        last = len(shape) == 1 or t.is_contiguous(memory_format=torch.channels_last)
        if [*t.shape] != shape or t.dtype != x.dtype or not last:
            return False
    return True


def _asked(x: Tensor, weight: Tensor, how: Sequence, added: bool) -> bool:
    """Has it a kernel, and is that right, for NaN and infinities, too? Only the first sample has values: a kernel isn't chosen by them."""
    generator = torch.Generator(x.device).manual_seed(0)

    def operand(shape: Sequence[int], samples: int | None = None) -> Tensor:
        t = torch.zeros(shape, dtype=x.dtype, device=x.device)
        t[:samples].normal_(generator=generator)
        return t.contiguous(memory_format=torch.channels_last) if t.dim() == 4 else t

    def is_right(image: Tensor) -> bool:
        v = torch.conv2d(image, filters, bias, *how)
        y = _run(image, filters, bias, other, how)
        ours, eagers = y[:1], (v if other is None else v + other)[:1].relu()
        finite = eagers.isfinite()
        alike = torch.equal(ours.isnan(), eagers.isnan()) and torch.equal(ours.isinf(), eagers.isinf())
        error, norm = [t[finite].float().norm() for t in (ours - eagers, eagers)]
        return alike and y.stride() == v.stride() and bool(error <= _LIMIT * norm)

    try:
        with torch.no_grad(), torch.autocast(x.device.type, enabled=False):
            image, filters, bias = operand(x.shape, 1), operand(weight.shape), operand(weight.shape[:1])
            y_shape = torch.conv2d(image.to("meta"), filters.to("meta"), None, *how).shape
            other = operand(y_shape, 1) if added else None
            found = is_right(image)
            for odd in (float("nan"), float("inf")):
                image[:1, :1] = odd
                found = found and is_right(image)
            return found
    except RuntimeError:  # there is none, or no memory
        return False


def _run(x: Tensor, weight: Tensor, bias: Tensor, added: Tensor | None, how: Sequence) -> Tensor:
    return _relu(x, weight, bias, *how) if added is None else _add_relu(x, weight, added, 1.0, bias, *how)


def planned(plan, case: Case) -> Callable[..., Tensor]:
    """Gives y of arguments like the case's; turned: the filters as `plan.filters` turns them."""
    tail, weight_at = tail_of(case.segment), len(case.segment.inputs)
    how, operands = layouts.operands_of(plan, case.x, case.weight, plan.runs)
    nothing = case.x.new_zeros(case.sizes.C) if tail.bias is None else None

    def run(a: Sequence, turned: Tensor | None = None) -> Tensor:
        x, weight = operands(a[0], a[weight_at], turned)
        bias = nothing if tail.bias is None else a[tail.bias]
        y = _run(x, weight, bias, None if tail.added is None else a[tail.added], how.settings)
        return y.contiguous(memory_format=torch.channels_last)

    return run
