"""A captured graph as Python code that runs with a live model, or with one without memory."""

from __future__ import annotations

import builtins
import functools
import linecache
import types
import zlib
from collections.abc import Callable, Sequence

from torch import Tensor, fx, nn
from torch.fx.node import map_aggregate

from .operator import weightless
from .tracing import Named


class Code:
    """A captured graph as Python code that takes the live model as `self`: `function(calls)` runs it with calls[i] in segment i's place."""

    def __init__(self, graph: fx.Graph, constants: dict[str, Tensor], segments: Sequence = ()):
        places = [_place(i) for i in range(len(segments))]
        live = _live(graph, constants, segments, places)
        made = live.python_code("self")
        self._globals = dict(made.globals)
        self._places = {name: places.index(value) for name, value in made.globals.items() if value in places}
        # By its text: a tracer that begins anew compares places.
        name = f"<fused forward {zlib.crc32(made.src.encode()):08x}>"
        linecache.cache[name] = (len(made.src), None, made.src.splitlines(True), name)  # for tracebacks
        space = dict(self._globals)
        exec(compile(made.src, name, "exec"), space)
        self._function, self.text = space["forward"], made.src

    def function(self, calls: Sequence[Callable] = ()) -> Callable:
        space = {
            "__builtins__": builtins,
            **self._globals,
            **{name: calls[i] for name, i in self._places.items()},
        }
        made = types.FunctionType(self._function.__code__, space, "forward", self._function.__defaults__)
        made.__kwdefaults__ = self._function.__kwdefaults__
        return made


def _place(number: int) -> Callable:
    def place(*inputs):
        raise RuntimeError("a segment's place is empty")

    return _named(place, f"segment_{number}")


def _named(function: Callable, name: str) -> Callable:
    """As torch.fx wants what it writes calls of."""
    function.__name__ = function.__qualname__ = name
    function.__module__ = "inline_kernels"
    return function


def _live(
    graph: fx.Graph, constants: dict[str, Tensor], segments: Sequence, places: Sequence[Callable]
) -> fx.Graph:
    """A copy of `graph` with places instead of segments, the model's attributes instead of its numbers, and tensors that tracing made instead
    of their names."""
    live, values, numbers = fx.Graph(), {}, {}

    def read(value):
        if type(value) is not Named:
            return value
        if value.name not in numbers:
            numbers[value.name] = live.create_node("get_attr", value.name)
        return numbers[value.name]

    place_of = {id(segment): place for segment, place in zip(segments, places)}
    for node in graph.nodes:
        op, target = node.op, node.target
        args, kwargs = fx.map_arg((node.args, node.kwargs), values.__getitem__)
        args, kwargs = map_aggregate((args, kwargs), read)
        if op == "call_function":
            target = place_of.get(id(target), target)
        if op == "get_attr" and target in constants:
            get = functools.partial(_constant, constants[target])
            op, target = "call_function", _named(get, f"constant_{target}")
        values[node] = live.create_node(op, target, args, kwargs, node.name, node.type)
    return live


def _constant(t: Tensor) -> Tensor:
    return t


def without_memory(model: nn.Module) -> nn.Module:
    """A copy of `model` whose tensors have no memory."""
    return copy_of(model, weightless)


def copy_of(model: nn.Module, tensor_of: Callable[[Tensor], Tensor]) -> nn.Module:
    """A copy of `model` with other parameters and buffers, made of its own, on which nobody's hooks hang."""
    known: dict[int, nn.Module] = {}

    def copied(module: nn.Module | None) -> nn.Module | None:
        if module is None or id(module) in known:
            return known.get(id(module))
        made = known[id(module)] = object.__new__(type(module))
        fields = vars(module).copy()
        hooks = [key for key, value in fields.items() if "_hooks" in key and isinstance(value, dict)]
        fields |= {key: type(fields[key])() for key in hooks}
        fields["_modules"] = {key: copied(child) for key, child in module._modules.items()}
        for table in ("_parameters", "_buffers"):
            fields[table] = {key: t if t is None else tensor_of(t) for key, t in fields[table].items()}
        vars(made).update(fields)
        return made

    return copied(model)
