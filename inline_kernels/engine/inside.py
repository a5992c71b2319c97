"""A tail that a GPU's library runs inside its convolution: y = relu(v + bias + another tensor), channels last, or in planes where the library
convolves so; or channels last in 16 bits y = v + bias of filters of one place, which is a product of matrices. Where a gradient follows, it is what
backward makes of y that decides (programs.py): in 16 bits a ReLU's mask.

Then no pass over v is left, and y mostly takes no longer than v alone (benchmarks/NOTES.md). PyTorch has it as cudnn_convolution_relu,
cudnn_convolution_add_relu and addmm. Whether the library has a kernel for the very sizes and settings that is as exact as eager, keeps NaN as
eager's relu does and is faster than a pass behind the convolution, it is asked once, as precision.py does.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from inline_kernels.loader.operators import is_watched

from . import between, depthwise, layouts, library, programs, support
from .cases import Case
from .graph import ELEMENTS, Node, Space

_relu = getattr(torch, "cudnn_convolution_relu", None)
_add_relu = getattr(torch, "cudnn_convolution_add_relu", None)
_CHANNELS = Space(False, True, "")
_DTYPES = torch.float32, torch.float16, torch.bfloat16
_SLACK = 1.1  # of eager's error, as norms
_answers: dict[tuple, bool] = {}
_lock = threading.Lock()

WORDS = "the library's convolution with the tail inside, v is never written"


class Tail(NamedTuple):
    """The places of its tensors among a segment's arguments; None: there is none."""

    bias: int | None
    added: int | None
    has_relu: bool


def tail_of(segment) -> Tail | None:
    """The segment's, if it is such a one."""
    y, spaces = segment.outputs[0], {"z": ELEMENTS, "parameter": _CHANNELS, "input": ELEMENTS}
    has_relu = y.op == "relu"
    if segment.random or segment.updates:
        return None
    found: dict[str, int] = {}
    for term in _terms(y.args[0] if has_relu else y):
        name, kind = term.attr if term.op == "leaf" else ("", "")
        if kind in found or spaces.get(kind) != term.space:
            return None
        found[kind] = 0 if kind == "z" else segment.tensors.index(name)
    bias, added = found.get("parameter"), found.get("input")
    fits = "z" in found and (has_relu or bias is not None and added is None)
    return Tail(bias, added, has_relu) if fits else None


def _terms(node: Node) -> list[Node]:
    return [*_terms(node.args[0]), *_terms(node.args[1])] if node.op == "add" else [node]


def runs(case: Case) -> bool:
    """Does the library run it so, with arguments like these? False, too, where it can't be asked and hasn't been: while a graph is captured or code
    is traced, or where there is no memory for it; and in deterministic mode, for it is timed, too."""
    known = _relu and case.device == "cuda" and not case.exact_order
    tail = tail_of(case.segment) if known and torch.backends.cudnn.enabled else None
    if tail and case.saving and not _gives_all(case):
        return False
    if tail is None or torch.are_deterministic_algorithms_enabled() or not _fits(case, tail):
        return False
    if tail.bias is None and support.capturing():  # zeros stand for it, which would be written at each replay
        return False
    conv, cudnn, x, weight = case.segment.conv, torch.backends.cudnn, case.x, case.weight
    how, kind = library.Convolution.of(conv, weight).settings, (tail.added is not None, tail.has_relu)
    flags = library.may_run_tf32(x), cudnn.version(), cudnn.benchmark, cudnn.deterministic, _reductions()
    key = x.device, *x.shape, *weight.shape, x.dtype, _format(x), how, kind, flags
    with _lock:
        if key not in _answers:
            if is_watched() or support.capturing():
                return False
            _answers[key] = _asked(x, weight, how, *kind)
        return _answers[key]


def _gives_all(case: Case) -> bool:
    """Does backward need nothing of forward but y?"""
    composed = programs.composed_of(case.segment, programs.kind_for(case))
    return composed.reads_y and not composed.saved


def _reductions() -> tuple[bool, bool]:
    """May products of matrices be added up in 16 bits?"""
    matmul = torch.backends.cuda.matmul
    return matmul.allow_fp16_reduced_precision_reduction, matmul.allow_bf16_reduced_precision_reduction


def _fits(case: Case, tail: Tail) -> bool:
    segment, x, weight = case.segment, case.x, case.weight
    known = all(type(size) is int for size in (*x.shape, *weight.shape))
    if not known or weight.dim() != 4 or segment.conv.is_nothing or x.dtype not in _DTYPES:
        return False
    if between.rounds(segment, x) or case.last != library.is_channels_last(x):
        return False
    if depthwise.obstacle(segment, x, weight) is None:
        return False
    if not case.last and not _stays_in_planes(case):
        return False
    how = library.Convolution.of(segment.conv, weight)
    if how.around or {weight.dtype, case.dtype} != {x.dtype}:
        return False
    is_product = case.last and x.dtype != torch.float32 and _is_product(how, weight)
    if not (tail.has_relu or is_product):
        return False
    sizes, shapes = case.sizes, {}
    if tail.bias is not None:
        shapes[tail.bias] = [sizes.C]
    if tail.added is not None:
        shapes[tail.added] = [sizes.N, sizes.C, *sizes.levels["e"][1:]]
    for place, shape in shapes.items():
        t = case.arguments[place]
        layout = torch.contiguous_format if len(shape) == 1 else _format(x)
        if [*t.shape] != shape or t.dtype != x.dtype or not t.is_contiguous(memory_format=layout):
            return False
    return True


def _stays_in_planes(case: Case) -> bool:
    x, weight = case.x, case.weight
    lie = all(t.is_contiguous() for t in (x, weight))
    return (
        lie
        and not case.convolves_last
        and layouts.fastest(case.segment, x, weight, "forward") == layouts.PLANES
    )


def _format(x: Tensor) -> torch.memory_format:
    return torch.channels_last if library.is_channels_last(x) else torch.contiguous_format


def _is_product(how: library.Convolution, weight: Tensor) -> bool:
    """Is the convolution one of matrices, of x at some positions?"""
    _, inside, _, groups = how.settings
    return {*weight.shape[2:], groups} == {1} and not any(inside)


def _asked(x: Tensor, weight: Tensor, how: Sequence, added: bool, has_relu: bool) -> bool:
    """Only the first sample has values: a kernel isn't chosen by them. NaN and infinities stand in one row: some kernels spread them."""
    generator, layout = torch.Generator(x.device).manual_seed(0), _format(x)

    def operand(shape: Sequence[int], samples: int | None = None) -> Tensor:
        t = torch.zeros(shape, dtype=x.dtype, device=x.device)
        t[:samples].normal_(generator=generator)
        return t.contiguous(memory_format=layout) if t.dim() == 4 else t

    def eagers(image: Tensor, filters: Tensor, bias: Tensor, other: Tensor | None) -> Tensor:
        v = torch.conv2d(image, filters, bias, *how)
        v = v if other is None else v + other
        return v.relu() if has_relu else v

    def is_right(image: Tensor) -> bool:
        given = filters, bias, other
        ours, theirs = _run(image, *given, how, has_relu), eagers(image, *given)
        exact = eagers(
            *[
                t if t is None else t.double()
                for t in (image[:1], *given[:2], other if other is None else other[:1])
            ]
        )
        finite = theirs[:1].isfinite()
        errors = [(t[:1].double() - exact)[finite].norm() for t in (ours, theirs)]
        special = [torch.equal(getattr(ours, each)(), getattr(theirs, each)()) for each in ("isnan", "isinf")]
        return all(special) and ours.stride() == theirs.stride() and bool(errors[0] <= _SLACK * errors[1])

    try:
        with torch.no_grad(), torch.autocast(x.device.type, enabled=False):
            image, filters, bias = operand(x.shape, 1), operand(weight.shape), operand(weight.shape[:1])
            filters[::2, :1].abs_()  # so that sums of infinities aren't all NaN
            y_shape = torch.conv2d(image.to("meta"), filters.to("meta"), None, *how).shape
            other = operand(y_shape, 1) if added else None
            found = is_right(image)
            for odd in (float("nan"), float("inf")):
                image[:1, :1, x.shape[2] // 2] = odd
                if other is not None:
                    other[:1, :, y_shape[2] // 2] = odd
                found = found and is_right(image)
            ours = functools.partial(_run, image, filters, bias, other, how, has_relu)

            def behind() -> Tensor:  # a pass, whatever it computes
                return torch.conv2d(image, filters, None, *how).relu_()

            return found and _least_ms(ours, x.device) <= _least_ms(behind, x.device)
    except RuntimeError:  # there is none, or no memory
        return False


def _least_ms(call: Callable, device: torch.device) -> float:
    with torch.cuda.device(device):
        return min([library.milliseconds(call) for _ in range(4)])


def _run(
    x: Tensor, weight: Tensor, bias: Tensor, added: Tensor | None, how: Sequence, has_relu: bool
) -> Tensor:
    if not has_relu:
        down, across = how[0]
        N, C, *size = (x := x[:, :, ::down, ::across]).shape
        y = torch.addmm(bias, x.movedim(1, -1).reshape(-1, C), weight.reshape(-1, C).t())
        return y.view(N, *size, -1).movedim(-1, 1)
    return _relu(x, weight, bias, *how) if added is None else _add_relu(x, weight, added, 1.0, bias, *how)


def planned(plan, case: Case) -> Callable[..., list[Tensor]]:
    """Gives [y] of arguments like the case's; turned: the filters as `plan.filters` turns them."""
    tail, weight_at, layout = tail_of(case.segment), len(case.segment.inputs), _format(case.x)
    how, operands = plan.convolution, layouts.Operands(layouts.itself, layouts.itself)
    if case.last:
        how, operands = layouts.operands_of(plan, case.x, case.weight, plan.runs)
    nothing = case.x.new_zeros(case.sizes.C) if tail.bias is None else None
    if nothing is not None and nothing.is_cuda:  # other streams read it, too
        torch.cuda.current_stream(nothing.device).synchronize()

    def run(a: Sequence, turned: Tensor | None = None) -> list[Tensor]:
        x, weight = operands(a[0], a[weight_at], turned)
        bias = nothing if tail.bias is None else a[tail.bias]
        y = _run(x, weight, bias, None if tail.added is None else a[tail.added], how.settings, tail.has_relu)
        return [y.contiguous(memory_format=layout)]

    return run
