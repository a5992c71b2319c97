"""Which results stay channels last between a model's convolutions: where a GPU's library convolves so, and nobody but it sees them.

In planes each result would be turned for the next convolution, and its gradient once more. A segment's result is an OPERAND if all that reads it,
over calls of PyTorch's that give the same values in either layout, are convolutions of 32 channels or more, segments that add it to theirs, and
means over positions. What is only added there is KEPT as well. Other results END it: they come in planes, though x may not.

In float32 tensor cores cut operands off in channels last that the library rounds in planes. So an operand is rounded to TF32 where it is written, and
filters and gradients of v are, too. That costs nothing where eager runs the next convolution in TF32; else its error is the one that eager's own
convolution before it has: a result is such an operand only where that runs TF32 in eager.
"""

from __future__ import annotations

import operator

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from . import library, precision
from .capture import Captured, Segment
from .tracing import has_hooks

OPERAND, KEPT, ENDS = "operand", "kept", "ends"
FEWEST_CHANNELS = 32

_MODULES = (nn.MaxPool2d, nn.AvgPool2d, nn.ReLU, nn.LeakyReLU, nn.SiLU, nn.GELU, nn.Identity, nn.ConvTranspose2d)
_FUNCTIONS = {
    F.max_pool2d, F.avg_pool2d, F.relu, F.leaky_relu, F.silu, F.gelu, torch.relu, torch.add, torch.mul, operator.add, operator.mul
}  # fmt: skip
_METHODS = {"relu", "add", "mul"}


def results(captured: Captured, model: nn.Module) -> list[str | None]:
    """Of each segment: how its result lies; None: as eager's. The model's images come in planes, and so do its filters."""
    segments = captured.segments
    filters = [_weight(model, segment) for segment in segments]
    nothing = [None] * len(segments)
    if any(library.is_channels_last(weight) for weight in filters):
        return nothing
    fit = {segment: _fits(segment, weight) for segment, weight in zip(segments, filters)}
    found: dict[Segment, str] = {}
    for node in reversed(captured.module.graph.nodes):  # what reads it is known
        if node.target in fit:
            found[node.target] = _result(node, fit, found, model) if _has_positions(node.target) else ENDS
    return [found[segment] for segment in segments] if OPERAND in found.values() else nothing


def is_kept(segment: Segment, x: Tensor, weight: Tensor) -> bool:
    """Does the result lie channels last, with an x and filters like these?"""
    if segment.result not in (OPERAND, KEPT) or library.device_type(x) != "cuda":
        return False
    if x.element_size() == 2 or segment.result == KEPT:
        return x.element_size() == 2 or library.may_run_tf32(x)
    around = library.padding(segment.conv, weight)
    settings = precision.Settings(segment.conv.stride, [before for before, _ in around], segment.conv.dilation)
    return precision.runs_tf32(x, weight, "forward", settings, channels_last=False)


def _weight(model: nn.Module, segment: Segment) -> Tensor:
    return model.get_parameter(segment.parameters[0])


def _fits(segment: Segment, weight: Tensor) -> bool:
    """Is the library's convolution of an image in channels last a fast one?"""
    around = library.padding(segment.conv, weight)
    plain = segment.conv.padding_mode == "zeros" and all(before == behind for before, behind in around)
    return plain and weight.dim() == 4 and segment.conv.groups == 1 and weight.shape[1] >= FEWEST_CHANNELS


def _has_positions(segment: Segment) -> bool:
    return segment.axes == ("n", "c", "0", "1") and segment.conv.groups == 1


def _result(node: fx.Node, fit: dict[Segment, bool], results: dict[Segment, str], model: nn.Module) -> str:
    """fit: does a segment convolve images in channels last? results: of those behind."""
    ways, seen, uses = [node], {node}, set()
    while ways:
        value = ways.pop()
        for user in value.users:
            if user.target in fit:
                convolved, added = user.args[0] is value, value in user.args[1:]
                in_planes = results[user.target] == ENDS and _has_positions(user.target)
                if convolved and not fit[user.target] or added and in_planes:
                    return ENDS
                uses |= {OPERAND} if convolved else {KEPT}
            elif not (_is_mean(user) or _gives_the_same(user, model)):
                return ENDS
            elif user not in seen and not _is_mean(user):
                seen.add(user)
                ways.append(user)
    return OPERAND if OPERAND in uses else KEPT if uses else ENDS


def _gives_the_same(node: fx.Node, model: nn.Module) -> bool:
    """Does a call give the same values in either layout, in the layout that it is given?"""
    if node.op == "call_module":
        module = model.get_submodule(node.target)
        return type(module) in _MODULES and not has_hooks(module) and not getattr(module, "inplace", False)
    if node.op == "call_function":
        joined = node.target is torch.cat and (node.args[1:] == (1,) or node.kwargs.get("dim") == 1)
        return joined or node.target in _FUNCTIONS and not node.kwargs.get("inplace", False)
    return node.op == "call_method" and node.target in _METHODS


def _is_mean(node: fx.Node) -> bool:
    """Over all positions."""
    axes = [*node.args[1:], *node.kwargs.values()]
    return node.op in ("call_method", "call_function") and node.target in ("mean", torch.mean) and axes in ([(2, 3)], [[2, 3]], [(-2, -1)], [[-2, -1]])
