"""Which results stay channels last between a model's convolutions: where a GPU's library convolves so, and nobody but it sees them.

In planes each result would be turned for the next convolution, and its gradient once more. A segment's result is KEPT if all that reads it, over
calls of PyTorch's that give the same values in either layout, are convolutions of 32 channels or more, segments that add it to theirs, norms, and
means over positions; an OPERAND, if it is of its own convolution alone. Other results END it: they come in planes, though x may not.

In float32 tensor cores cut operands off in channels last that the library rounds in planes. So operands are rounded to TF32: filters, gradients
of v, an OPERAND where it is written, what else is KEPT before it is convolved. And a convolution runs so only where eager's is in TF32, or where
its x is an OPERAND, which has an error of that size from its own convolution. Where its own isn't in TF32 in eager, a result is one only for
convolutions that read it at once, all in TF32 in eager; then v is computed in planes, and y written channels last. Gradients run so only where both
of eager's are in TF32. A depthwise convolution of our own (depthwise.py) is never in TF32, so that what it reads is KEPT, with all of its digits;
its result is an OPERAND if nothing but convolutions reads it.

What torch.cat joins of such results is a `Join`: with it goes a transposed convolution that nothing else reads. Its result is an OPERAND if all
parts are, a transposed convolution's because it runs so only where eager's is in TF32 (joining.py). Of such results pools are ours, too (pooling.py).
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Iterable, Sequence
from fractions import Fraction
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from . import depthwise, library, precision, support
from .capture import Captured
from .segment import Segment
from .tracing import has_hooks

OPERAND, KEPT, ENDS = "operand", "kept", "ends"
EXACT = "exact"  # of what reads a result: with all of its digits
FEWEST_CHANNELS = 32
MOST_PARTS = 32  # of a Join

_JOINS = torch.cat, torch.concat, torch.concatenate
_MODULES = nn.MaxPool2d, nn.AvgPool2d, nn.ReLU, nn.LeakyReLU, nn.SiLU, nn.GELU
_FUNCTIONS = {
    F.max_pool2d, F.avg_pool2d, F.relu, F.leaky_relu, F.silu, F.gelu, torch.relu, torch.add, torch.mul, operator.add, operator.mul
}  # fmt: skip
_METHODS = {"relu", "add", "mul"}


class Transposed(NamedTuple):
    """A transposed convolution. of_operand: is its x an OPERAND?"""

    name: str
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    output_padding: tuple[int, ...]
    dilation: tuple[int, ...]
    has_bias: bool
    of_operand: bool


class Join(NamedTuple):
    """Results that torch.cat joins by channels, where all lie channels last. parts: a transposed convolution that nothing else reads, or None. result,
    read_by: as a segment's."""

    parts: tuple[Transposed | None, ...]
    result: str
    read_by: tuple


def laid_out(captured: Captured, model: nn.Module) -> list[Segment]:
    """The segments, with what they are to know of their results. The model's images come in planes, and so do its filters."""
    segments = captured.segments
    filters = {segment: _weight(model, captured, segment) for segment in segments}
    if any(library.is_channels_last(weight) for weight in filters.values()):
        return segments
    found: dict[Segment, str] = {}
    nodes = {node.target: node for node in captured.module.graph.nodes if node.target in filters}
    for segment in reversed(segments):  # what reads it is known
        lies = _has_positions(segment, filters[segment])
        found[segment] = _result(nodes[segment], filters, found, model) if lies else ENDS
    if {*found.values()} == {ENDS}:
        return segments
    _joins(captured, filters, found, model)

    def told(segment: Segment) -> Segment:
        of_operand = _is_operand(nodes[segment].args[0], found, model)
        readers, node = _readers(nodes[segment], filters), nodes[segment]
        return segment.with_result(found[segment], of_operand, readers, _is_read_at_once(node, filters))

    return [*map(told, segments)]


def joins(captured: Captured, model: nn.Module, segments: Sequence[Segment]) -> dict[fx.Node, Join]:
    """By the calls of torch.cat for which they stand. segments: of `laid_out`."""
    results = _told(captured, segments)
    filters = {segment: _weight(model, captured, segment) for segment in results}
    return _joins(captured, filters, results, model)


def lying_last(
    nodes: Iterable[fx.Node], captured: Captured, model: nn.Module, segments: Sequence[Segment]
) -> list[fx.Node]:
    """Those that are made of results alone that are kept. segments: of `laid_out`."""
    results = _told(captured, segments)
    return [node for node in nodes if _lies_last(node, results, model)]


def _told(captured: Captured, segments: Sequence[Segment]) -> dict[Segment, str]:
    return {each: told.result for each, told in zip(captured.segments, segments) if told.result}


def rounds(segment: Segment | Join, x: Tensor) -> bool:
    """Are operands channels last that in eager are in planes, and TF32?"""
    return segment.result is not None and x.dtype == torch.float32


def is_kept(segment: Segment, x: Tensor, weight: Tensor, y: Tensor) -> bool:
    """Does the result y lie channels last, with an x and filters like these?"""
    if segment.result not in (OPERAND, KEPT) or library.device_type(x) != "cuda":
        return False
    if x.element_size() == 2:
        return True
    if not library.may_run_tf32(x):
        return False
    is_never = segment.conv.is_nothing or depthwise.suits(segment.conv, weight)  # in TF32
    is_exact = is_never or not runs_tf32(segment, x, weight)
    readers = [runs_tf32_behind(y, "forward", *reader) for reader in segment.read_by]
    if segment.result == KEPT:
        return any(readers) or not readers and (is_never or not is_exact)
    if is_exact and not (segment.at_once and all(readers)):
        return False
    return all(runs_tf32_behind(y, "dw", *reader) for reader in segment.read_by)  # which reads it, too


def runs_tf32(segment: Segment, x: Tensor, weight: Tensor, of: str = "forward") -> bool:
    """Does eager's convolution, in planes?"""
    if segment.conv.groups > 1:
        return False
    return precision.runs_tf32(x, weight, of, _settings(segment, weight), channels_last=False)


def convolves_last(segment: Segment, x: Tensor, weight: Tensor) -> bool:
    """May it convolve an x in channels last so, in TF32?"""
    return segment.of_operand or runs_tf32(segment, x, weight)


def rounds_for_library(segment: Segment, x: Tensor, weight: Tensor) -> bool:
    """Does the library round operands channels last that in eager are in planes?"""
    by_library = not segment.conv.is_nothing and depthwise.obstacle(segment, x, weight) is not None
    return by_library and rounds(segment, x)


def convolves_planes(segment: Segment, x: Tensor, weight: Tensor) -> bool:
    """Does the library make v in planes, though results stay channels last, because eager's isn't in TF32?"""
    return rounds_for_library(segment, x, weight) and not convolves_last(segment, x, weight)


def differentiates_last(segment: Segment, x: Tensor, weight: Tensor) -> bool:
    """May the gradients be those of channels last, in TF32?"""
    return all(runs_tf32(segment, x, weight, of) for of in ("dx", "dw"))


def runs_tf32_behind(
    y: Tensor, of: str, channels: Fraction, taps: Sequence[int], settings: precision.Settings
) -> bool:
    """Does eager's convolution of a result? channels: out, for each of its own."""
    filters = torch.empty(int(channels * y.shape[1]), y.shape[1], *taps, device="meta")
    return precision.runs_tf32(y, filters, of, settings, channels_last=False)


def _settings(segment: Segment, weight: Tensor) -> precision.Settings:
    around = library.padding(segment.conv, weight)
    return precision.Settings(
        segment.conv.stride, tuple(before for before, _ in around), segment.conv.dilation
    )


def _weight(model: nn.Module, captured: Captured, segment: Segment) -> Tensor:
    name = segment.parameters[0]
    if name in captured.constants:
        return captured.constants[name]
    return functools.reduce(getattr, name.split("."), model)  # no Parameter where others stand for those


def _readers(node: fx.Node, filters: dict[Segment, Tensor]) -> tuple:
    """What `runs_tf32_behind` asks of the convolutions that read a result at once. It is the same for a layer of other channels."""
    found = {}
    for user in (user.target for user in node.users if _convolves(user, node, filters)):
        if depthwise.suits(user.conv, filters[user]):  # never in TF32
            continue
        outputs, channels, *taps = filters[user].shape
        found[Fraction(outputs, channels), tuple(taps), _settings(user, filters[user])] = True
    return tuple(found)


def _convolves(user: fx.Node, node: fx.Node, filters: dict[Segment, Tensor]) -> bool:
    return user.target in filters and user.args[0] is node and not user.target.conv.is_nothing


def _joins(
    captured: Captured, filters: dict[Segment, Tensor], results: dict, model: nn.Module
) -> dict[fx.Node, Join]:
    """results: of segments; there will also be those of calls that give OPERANDs."""
    found = {}
    for node in captured.module.graph.nodes:
        parts = node.args[0] if _is_join(node) and node.args else ()
        if not (isinstance(parts, (list, tuple)) and 2 <= len(parts) <= MOST_PARTS):
            continue
        uses = _uses(node, filters, results, model)
        if not uses or not all(_lies_last(part, results, model) for part in parts):
            continue
        transposed = tuple(
            _transposed(part, results, model) if parts.count(part) == 1 else None for part in parts
        )
        are_operands = all(t or _is_operand(part, results, model) for t, part in zip(transposed, parts))
        result = OPERAND if OPERAND in uses and EXACT not in uses and are_operands else KEPT
        found[node] = Join(transposed, result, _readers(node, filters))
        if result == OPERAND:
            results[node] = OPERAND
    return found


def _is_join(node: fx.Node) -> bool:
    by_channels = node.args[1:] == (1,) or node.kwargs.get("dim") == 1
    return node.op == "call_function" and node.target in _JOINS and by_channels and "out" not in node.kwargs


def _lies_last(value: fx.Node, results: dict, model: nn.Module) -> bool:
    """Is all that it is made of kept?"""
    if value.target in results:
        return results[value.target] != ENDS
    given = value.all_input_nodes
    return bool(given) and _gives_the_same(value, model) and all(_lies_last(x, results, model) for x in given)


def _transposed(value: fx.Node, results: dict, model: nn.Module) -> Transposed | None:
    """A part of a Join that lies channels last, if it is one's result that nothing else reads."""
    module = _module(value, model, nn.ConvTranspose2d)
    if not module or len(value.users) > 1 or len(value.args) != 1 or value.kwargs:
        return None
    if support.altered(value.target, module):
        return None
    settings = module.stride, module.padding, module.output_padding, module.dilation
    has_bias = module.bias is not None
    return Transposed(value.target, *settings, has_bias, _is_operand(value.args[0], results, model))


def _is_operand(value: fx.Node, results: dict, model: nn.Module) -> bool:
    """Is all that an x is made of one?"""
    if known := results.get(value) or results.get(value.target):
        return known == OPERAND
    of_function = value.op == "call_function" and value.target in (F.max_pool2d, F.relu, torch.relu, *_JOINS)
    keeps = of_function or _module(value, model, nn.MaxPool2d, nn.ReLU)
    return bool(keeps) and all(_is_operand(each, results, model) for each in value.all_input_nodes)


def _fits(segment: Segment, weight: Tensor) -> bool:
    """Is the convolution of an image in channels last a fast one?"""
    if depthwise.suits(segment.conv, weight):
        return True
    around = library.padding(segment.conv, weight)
    plain = segment.conv.padding_mode == "zeros" and all(before == behind for before, behind in around)
    return plain and weight.dim() == 4 and segment.conv.groups == 1 and weight.shape[1] >= FEWEST_CHANNELS


def _has_positions(segment: Segment, weight: Tensor) -> bool:
    conv = segment.conv
    runs = conv.groups == 1 or conv.is_nothing or depthwise.suits(conv, weight)
    return segment.axes == ("n", "c", "0", "1") and runs


def _is_read_at_once(node: fx.Node, filters: dict[Segment, Tensor]) -> bool:
    """Does nothing but convolutions read a result?"""
    return all(_convolves(user, node, filters) and user.args.count(node) == 1 for user in node.users)


def _result(
    node: fx.Node, filters: dict[Segment, Tensor], results: dict[Segment, str], model: nn.Module
) -> str:
    """results: of those behind."""
    uses = _uses(node, filters, results, model)
    alone = len(node.args) == 1  # what is added would lose digits
    if depthwise.suits(node.target.conv, filters[node.target]):  # it has no error, which others may read
        alone = alone and _is_read_at_once(node, filters)
    rounds = uses and OPERAND in uses and EXACT not in uses and alone
    return ENDS if not uses else OPERAND if rounds else KEPT


def _uses(
    node: fx.Node, filters: dict[Segment, Tensor], results: dict[Segment, str], model: nn.Module
) -> set[str] | None:
    """What all that reads a result would have it; None: something has to have it in planes."""
    ways, seen, uses = [node], {node}, set()
    while ways:
        value = ways.pop()
        for user in value.users:
            if user.target in filters:
                segment = user.target
                convolved = user.args[0] is value and not segment.conv.is_nothing
                if convolved and not _fits(segment, filters[segment]):
                    return None
                if convolved:
                    uses |= {EXACT if depthwise.suits(segment.conv, filters[segment]) else OPERAND}
                elif results[segment] != ENDS or not _has_positions(segment, filters[segment]):
                    uses |= {KEPT}  # else what it adds is turned, once
            elif not (_is_mean(user, model) or _gives_the_same(user, model)):
                return None
            elif user not in seen and not _is_mean(user, model):
                uses |= {OPERAND} if _module(user, model, nn.ConvTranspose2d) else set()
                seen.add(user)
                ways.append(user)
    return uses


def _module(node: fx.Node, model: nn.Module, *types: type) -> nn.Module | None:
    """What a node calls, if it is one of those."""
    module = model.get_submodule(node.target) if node.op == "call_module" else None
    return module if type(module) in types else None


def _gives_the_same(node: fx.Node, model: nn.Module) -> bool:
    """Does a call give the same values in either layout, in the layout that it is given?"""
    if module := _module(node, model, nn.ConvTranspose2d):
        channels, plain = module.in_channels, module.groups == 1 and module.padding_mode == "zeros"
        return plain and channels >= FEWEST_CHANNELS and not has_hooks(module)
    if module := _module(node, model, *_MODULES):
        return not has_hooks(module) and not getattr(module, "inplace", False)
    if node.op == "call_function":
        return _is_join(node) or node.target in _FUNCTIONS and not node.kwargs.get("inplace", False)
    return node.op == "call_method" and node.target in _METHODS


def _is_mean(node: fx.Node, model: nn.Module) -> bool:
    """Over all positions."""
    if module := _module(node, model, nn.AdaptiveAvgPool2d):
        return module.output_size in (1, (1, 1)) and not has_hooks(module)
    if node.target is F.adaptive_avg_pool2d:
        return [*node.args[1:], *node.kwargs.values()] in ([1], [(1, 1)], [[1, 1]])
    axes = node.args[1] if len(node.args) > 1 else node.kwargs.get("dim")
    over_all = isinstance(axes, (tuple, list)) and [*axes] in ([2, 3], [-2, -1])
    return node.op in ("call_method", "call_function") and node.target in ("mean", torch.mean) and over_all
