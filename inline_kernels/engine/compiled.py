"""A fused module's forward for torch.compile and torch.export: code that reads the model as eager's would, and calls registered operators.

PyTorch's tracer can't capture a model while it traces; it takes what `_function` gives for a constant, and traces that: the captured
code, with a segment's operator called on the model's own parameters. What the capture hangs on is looked at in that code, so that it is
traced again where something has changed.
"""

from __future__ import annotations

import itertools
import operator
import types
import weakref
from collections.abc import Callable

import torch
from torch import Tensor, fx, nn

from inline_kernels.loader.operators import constant_to_tracers

from . import support
from .code import Code
from .support import DTYPES

_models: weakref.WeakValueDictionary[int, nn.Module] = weakref.WeakValueDictionary()
_numbers = itertools.count(1)
_structure_of: Callable  # fuse.structure_of
_functions = types.ModuleType(
    "inline_kernels.engine.compiled.functions"
)  # by name: of a dictionary a tracer would keep a copy
_PLACES = {dtype: i for i, dtype in enumerate(DTYPES)}


def known(fused: nn.Module, structure_of: Callable) -> int:
    """A number by which `function_for` finds it."""
    global _structure_of
    _structure_of, number = structure_of, next(_numbers)
    _models[number] = fused
    return number


def function_for(fused: nn.Module, inputs: tuple, keywords: dict) -> Callable | None:
    """What gives the result as run(fused, *inputs), to be traced; None: eager's forward does."""
    if keywords or not inputs or not isinstance(inputs[0], Tensor):
        return None
    x = inputs[0]
    if torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda"):
        return None  # the tracer's own compiler follows autocast's dtypes
    device, name = x.device, ""
    if number := getattr(fused, "_number", 0):
        name = _name_of(number, len(inputs), x.dim(), device.type, device.index, x.dtype)
    return getattr(_functions, name) if name else None


@constant_to_tracers
def _name_of(
    number: int, count: int, dimensions: int, device: str, index: int | None, dtype: torch.dtype
) -> str:
    """Where in `_functions` there is one for such inputs of that model; "": there is none."""
    fused = _models.get(number)
    if fused is None or (support.may_be_foreign() and support.foreign()):
        return ""
    place = device if index is None else f"{device}:{index}"
    structure = _structure_of(fused, (torch.empty((0,) * dimensions, dtype=dtype, device=place),), {})
    if structure.run is None or len(structure.arguments) != count:
        return ""
    # Written anew each time: numbers aside, the tracer has looked at all that it hangs on.
    name = f"of_{next(_numbers)}"
    setattr(_functions, name, _traced(structure))
    weakref.finalize(structure, delattr, _functions, name)
    return name


def _traced(structure) -> Callable:
    graph = fx.Graph()
    values: dict[fx.Node, fx.Node] = {}
    parts = {id(segment): part for segment, part in zip(structure.segments, structure.plain)}
    for node in structure.graph.nodes:
        part = parts.get(id(node.target)) if node.op == "call_function" else None
        if part is None:
            values[node] = graph.node_copy(node, values.__getitem__)
            continue
        given = [values[each] for each in node.args]
        if _serves(part):
            tensors = [graph.create_node("get_attr", name) for name in part.names[part.inputs :]]
            numbers = [graph.create_node("get_attr", name) for name in part.own.numbers]
            values[node] = graph.call_function(_call_of(part), (*given, *tensors, *numbers))
        else:
            values[node] = _inlined(graph, part.segment.eager, given)
    looked_at = structure.guards.looked_at
    first = next(node for node in graph.nodes if node.op != "placeholder")
    with graph.inserting_before(first):
        for name, value in looked_at:
            graph.call_function(operator.eq, (graph.create_node("get_attr", name), value))
        for name in structure.guards.hooked_at:
            graph.call_function(len, (graph.create_node("get_attr", name),))
    return Code(graph, structure.constants).function()


def _serves(part) -> bool:
    """Can its operator run whatever the sizes?"""
    tensors = part.tensors()
    return not (
        part.altered
        or part.counters
        or len({t.dtype for t in tensors}) > 1
        or any([number != number for number in part.numbers()])
    )


def _call_of(part) -> Callable:
    """The registered operator, as a function that can be traced: of inputs, parameters and numbers."""
    registered, tensors, random = (
        part.for_all().operator.registered,
        len(part.names),
        bool(part.segment.random),
    )
    dropped = part._draws()

    def call(*given):
        x = given[0]
        dtype = _PLACES[x.dtype]
        numbers = [float(each) for each in given[tensors:]]
        if random:
            return registered(*given[:tensors], *_drawn(x, dropped), *numbers, dtype)
        return registered(*given[:tensors], *numbers, dtype)

    call.__name__ = call.__qualname__ = f"segment_{part.segment.index}"
    call.__module__ = "inline_kernels"
    return call


def _drawn(x: Tensor, wanted: bool) -> tuple:
    from .drawing import drawn

    return drawn(x, wanted, True)


def _inlined(graph: fx.Graph, inner: fx.Graph, given: list[fx.Node]) -> fx.Node:
    values, rest = {}, iter(given)
    for node in inner.nodes:
        if node.op == "placeholder":
            values[node] = next(rest)
        elif node.op == "output":
            return values[node.args[0]]
        else:
            values[node] = graph.node_copy(node, values.__getitem__)
    raise RuntimeError("a segment without an output")
