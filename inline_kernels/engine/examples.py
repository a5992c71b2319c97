"""What a traced model's values are for an example of its inputs, without memory: their types and shapes, as far as they can be had.

An example is taken from a call: batches are of two samples and images as large along each axis, so that a size of 1 says that a value is
broadcast along that axis. The model computes nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, fx, nn

_POSITIONS = {4: 224, 5: 64}  # along each axis of an image


class UNKNOWN:
    """Stands for a value that isn't known."""


def examples(x: Tensor, inputs: tuple, keywords: Mapping) -> tuple[tuple, dict]:
    """A call's arguments, by place and by name, as examples; x is the first tensor among them."""
    N, _, *size = [*_sizes(x), 0, 0][: max(2, x.dim())]
    tensors = [t for t in (*inputs, *keywords.values()) if isinstance(t, Tensor) and t.dim() == x.dim()]
    alike = x.dim() in _POSITIONS and all(_sizes(t)[2:] == size or {*t.shape[2:]} == {1} for t in tensors)

    def example(given: object) -> object:
        if not isinstance(given, Tensor):
            return given if given is None or type(given) in (bool, int, float, str) else UNKNOWN
        sizes = _sizes(given)
        if sizes and sizes[0] == N:
            sizes[0] = 2
        if alike and given.dim() == x.dim() and sizes[2:] == size:
            sizes[2:] = [_POSITIONS[x.dim()]] * len(size)
        return torch.empty(sizes, dtype=given.dtype, device="meta")

    return tuple(map(example, inputs)), {name: example(each) for name, each in keywords.items()}


def example_of(channels: int, x_dim: int) -> tuple[tuple, dict]:
    """Where there is no call: x alone, a batch of images of so many channels."""
    size = [_POSITIONS.get(x_dim, 2)] * (x_dim - 2)
    return (torch.empty([2, channels, *size][:x_dim], device="meta"),), {}


def _sizes(t: Tensor) -> list[int]:
    """Where PyTorch doesn't know them yet, those that it expects."""
    return [size if isinstance(size, int) else size.node.hint for size in t.shape]


def _drops_axes(node: fx.Node) -> bool:
    """As many as happen to have size 1?"""
    return node.target in (torch.squeeze, "squeeze") and len(node.args) + len(node.kwargs) == 1


class Values(fx.Interpreter):
    """`of(node)`, or UNKNOWN, of a graph that may grow. attribute: of the model, by its qualified name. Floating-point examples come in the type
    of the model's parameters."""

    def __init__(
        self, graph: fx.Graph, attribute: Callable[[str], Any], given: tuple[tuple, dict], dtype: torch.dtype
    ):
        super().__init__(nn.Module(), garbage_collect_values=False, graph=graph)
        self.graph, self.attribute, self.dtype = graph, attribute, dtype
        self.by_place, self.by_name = list(given[0]), given[1]

    def of(self, node: fx.Node) -> Any:
        with torch.no_grad(), torch._C.DisableTorchFunction():
            for each in self.graph.nodes:
                if each not in self.env and each.op != "output":
                    self.env[each] = self.run_node(each)
        return self.env[node]

    def run_node(self, node: fx.Node) -> Any:
        if any(self.env[a] is UNKNOWN for a in node.all_input_nodes) or _drops_axes(node):
            return UNKNOWN
        try:
            return super().run_node(node)
        except Exception:  # whatever can't be run on an example isn't known
            return UNKNOWN

    def placeholder(self, target, args, kwargs):
        given = self.by_place.pop(0) if self.by_place else self.by_name.get(target, UNKNOWN)
        return given.to(self.dtype) if isinstance(given, Tensor) and given.is_floating_point() else given

    def get_attr(self, target, args, kwargs):
        held = self.attribute(target)
        return held.detach().to("meta") if isinstance(held, Tensor) else held

    def call_module(self, target, args, kwargs):
        module = self.attribute(target)
        tensors = dict([*module.named_parameters(), *module.named_buffers()])
        on_meta = {name: t.detach().to("meta") for name, t in tensors.items()}
        return torch.func.functional_call(module, on_meta, args, kwargs)

    def call_function(self, target, args, kwargs):
        kwargs = {**kwargs, "device": "meta"} if "device" in kwargs else kwargs
        return super().call_function(target, args, kwargs)
