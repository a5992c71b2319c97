"""Which results stay channels last between a model's convolutions: where a GPU's library convolves so, and nobody but it sees them.

In planes each result would be turned for the next convolution, and its gradient once more. A segment's result is an OPERAND if all that reads it,
over calls of PyTorch's that give the same values in either layout, are convolutions of 32 channels or more, segments that add it to theirs, and
means over positions. What such segments only add is KEPT as well, and so is what a norm of its own reads. Other results END it: they come in
planes, though x may not.

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

_MODULES = nn.MaxPool2d, nn.AvgPool2d, nn.ReLU, nn.LeakyReLU, nn.SiLU, nn.GELU, nn.Identity
_FUNCTIONS = {
    F.max_pool2d, F.avg_pool2d, F.relu, F.leaky_relu, F.silu, F.gelu, torch.relu, torch.add, torch.mul, operator.add, operator.mul
}  # fmt: skip
_METHODS = {"relu", "add", "mul"}


def laid_out(captured: Captured, model: nn.Module) -> list[Segment]:
    """The segments, with what they are to know of their results. The model's images come in planes, and so do its filters."""
    segments = captured.segments
    filters = {segment: _weight(model, captured, segment) for segment in segments}
    if any(library.is_channels_last(weight) for weight in filters.values()):
        return segments
    found: dict[Segment, str] = {}
    nodes = {node.target: node for node in captured.module.graph.nodes if node.target in filters}
    for segment in reversed(segments):  # what reads it is known
        found[segment] = _result(nodes[segment], filters, found, model) if _has_positions(segment) else ENDS
    if OPERAND not in found.values():
        return segments
    return [
        segment.with_result(found[segment], _readers(nodes[segment], filters, model)) for segment in segments
    ]


def is_kept(segment: Segment, x: Tensor, weight: Tensor) -> bool:
    """Does the result lie channels last, with an x and filters like these?"""
    if segment.result not in (OPERAND, KEPT) or library.device_type(x) != "cuda":
        return False
    if x.element_size() == 2 or segment.result == KEPT:
        return x.element_size() == 2 or library.may_run_tf32(x)
    if segment.conv.is_nothing:
        asked = [(torch.empty(shape, device="meta"), settings) for shape, settings in segment.read_by]
    else:
        asked = [(weight, _settings(segment, weight))]
    return bool(asked) and all(
        precision.runs_tf32(x, filters, "forward", settings, False) for filters, settings in asked
    )


def _settings(segment: Segment, weight: Tensor) -> precision.Settings:
    around = library.padding(segment.conv, weight)
    return precision.Settings(
        segment.conv.stride, tuple(before for before, _ in around), segment.conv.dilation
    )


def _weight(model: nn.Module, captured: Captured, segment: Segment) -> Tensor:
    name = segment.parameters[0]
    return captured.constants[name] if name in captured.constants else model.get_parameter(name)


def _readers(node: fx.Node, filters: dict[Segment, Tensor], model: nn.Module) -> tuple:
    """Of a norm: the filters' shapes, and settings, of the convolutions that read it at once."""
    if not node.target.conv.is_nothing:
        return ()
    found = []
    for user in node.users:
        if user.target in filters and not user.target.conv.is_nothing:
            weight = filters[user.target]
            found.append((tuple(weight.shape), _settings(user.target, weight)))
        elif (module := _module(user, model, nn.Conv2d)) and not isinstance(module.padding, str):
            settings = precision.Settings(module.stride, module.padding, module.dilation)
            found.append((tuple(module.weight.shape), settings))
    return tuple(found)


def _fits(segment: Segment, weight: Tensor) -> bool:
    """Is the library's convolution of an image in channels last a fast one?"""
    around = library.padding(segment.conv, weight)
    plain = segment.conv.padding_mode == "zeros" and all(before == behind for before, behind in around)
    return plain and weight.dim() == 4 and segment.conv.groups == 1 and weight.shape[1] >= FEWEST_CHANNELS


def _has_positions(segment: Segment) -> bool:
    return segment.axes == ("n", "c", "0", "1") and (segment.conv.groups == 1 or segment.conv.is_nothing)


def _result(
    node: fx.Node, filters: dict[Segment, Tensor], results: dict[Segment, str], model: nn.Module
) -> str:
    """results: of those behind."""
    ways, seen, uses = [node], {node}, set()
    while ways:
        value = ways.pop()
        for user in value.users:
            if user.target in filters:
                segment = user.target
                convolved = user.args[0] is value and not segment.conv.is_nothing
                if convolved and not _fits(segment, filters[segment]):
                    return ENDS
                turned = results[segment] == ENDS and _has_positions(segment)  # what it adds, once
                uses |= {OPERAND} if convolved else set() if turned else {KEPT}
            elif not (_is_mean(user) or _gives_the_same(user, model)):
                return ENDS
            elif user not in seen and not _is_mean(user):
                uses |= {OPERAND} if _module(user, model, nn.Conv2d, nn.ConvTranspose2d) else set()
                seen.add(user)
                ways.append(user)
    return OPERAND if OPERAND in uses else KEPT if uses else ENDS


def _module(node: fx.Node, model: nn.Module, *types: type) -> nn.Module | None:
    """What a node calls, if it is one of those."""
    module = model.get_submodule(node.target) if node.op == "call_module" else None
    return module if type(module) in types else None


def _gives_the_same(node: fx.Node, model: nn.Module) -> bool:
    """Does a call give the same values in either layout, in the layout that it is given?"""
    if module := _module(node, model, nn.Conv2d, nn.ConvTranspose2d):
        channels, plain = module.in_channels, module.groups == 1 and module.padding_mode == "zeros"
        return plain and channels >= FEWEST_CHANNELS and not has_hooks(module)
    if module := _module(node, model, *_MODULES):
        return not has_hooks(module) and not getattr(module, "inplace", False)
    if node.op == "call_function":
        joined = node.target is torch.cat and (node.args[1:] == (1,) or node.kwargs.get("dim") == 1)
        return joined or node.target in _FUNCTIONS and not node.kwargs.get("inplace", False)
    return node.op == "call_method" and node.target in _METHODS


def _is_mean(node: fx.Node) -> bool:
    """Over all positions."""
    axes = node.args[1] if len(node.args) > 1 else node.kwargs.get("dim")
    over_all = isinstance(axes, (tuple, list)) and [*axes] in ([2, 3], [-2, -1])
    return node.op in ("call_method", "call_function") and node.target in ("mean", torch.mean) and over_all
