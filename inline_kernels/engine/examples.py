"""What a traced model's values are for an example of its inputs, without memory: their types and shapes, as far as they can be had.

An example is taken from a call: batches are of two samples and images are as large along each axis, so that a size of 1 says that a value is
broadcast along that axis.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx, nn

_POSITIONS = {4: 224, 5: 64}  # along each axis of an image
FACTORIES = {
    getattr(torch, name)
    for name in (
        *(
            "tensor",
            "as_tensor",
            "scalar_tensor",
            "zeros",
            "ones",
            "full",
            "empty",
            "eye",
            "arange",
            "linspace",
        ),
        *("rand", "randn", "randint", "randperm", "normal", "bernoulli"),
    )
}
# After these the number of axes hangs on sizes.
_SQUEEZES = {torch.squeeze, "squeeze", "squeeze_"}


class UNKNOWN:
    """Stands for a value that isn't known."""


class Example(NamedTuple):
    """Of an argument: its type, and a tensor's shape. Numbers differ from call to call: theirs aren't known."""

    value: Any
    kind: type | None = None  # None: not known


def examples(x: Tensor, inputs: tuple, keywords: Mapping) -> tuple[tuple, dict]:
    """A call's arguments, by place and by name; x is the first tensor among them."""
    N, _, *size = [*_sizes(x), 0, 0][: max(2, x.dim())]
    tensors = [t for t in (*inputs, *keywords.values()) if isinstance(t, Tensor) and t.dim() == x.dim()]

    def example(given: object) -> Example:
        if not isinstance(given, Tensor):
            return Example(None if given is None else UNKNOWN, type(given))
        try:
            sizes = _sizes(given)
            alike = x.dim() in _POSITIONS and all(
                _sizes(t)[2:] == size or {*t.shape[2:]} == {1} for t in tensors
            )
            if sizes and sizes[0] == N:
                sizes[0] = 2
            if alike and given.dim() == x.dim() and sizes[2:] == size:
                sizes[2:] = [_POSITIONS[x.dim()]] * len(size)
            return Example(torch.empty(sizes, dtype=given.dtype, device="meta"), type(given))
        except Exception:  # nested or quantized, or of sizes that nobody expects
            return Example(UNKNOWN, type(given))

    return tuple(map(example, inputs)), {name: example(each) for name, each in keywords.items()}


def example_of(channels: int, x_dim: int) -> tuple[tuple, dict]:
    """Where there is no call: x alone, a batch of images of so many channels."""
    size = [_POSITIONS.get(x_dim, 2)] * (x_dim - 2)
    return (Example(torch.empty([2, channels, *size][:x_dim], device="meta"), Tensor),), {}


def described(inputs: tuple, keywords: Mapping) -> tuple:
    """All of arguments that what is known of examples hangs on."""
    return tuple([(key, *_described(each)) for key, each in (*enumerate(inputs), *keywords.items())])


def _described(given: object) -> tuple:
    if not isinstance(given, Tensor):
        return (type(given),)
    try:
        return type(given), given.dtype, tuple([type(size) is int and size == 1 for size in given.shape])
    except Exception:  # nested: without a shape
        return type(given), given.dtype


def _sizes(t: Tensor) -> list[int]:
    """Where PyTorch doesn't know them yet, those that it expects."""
    return [size if isinstance(size, int) else size.node.hint for size in t.shape]


class Values(fx.Interpreter):
    """`of(node)`, or UNKNOWN, of a graph that may grow. attribute: of the model, by its qualified name. Floating-point examples come in `dtype`, the
    model's."""

    def __init__(
        self, graph: fx.Graph, attribute: Callable[[str], Any], given: tuple[tuple, dict], dtype: torch.dtype
    ):
        super().__init__(nn.Module(), garbage_collect_values=False, graph=graph)
        self.graph, self.attribute, self.dtype = graph, attribute, dtype
        self.by_place, self.by_name = list(given[0]), given[1]
        self.kinds: dict[fx.Node, type | None] = {}  # of arguments
        self.loose: set[fx.Node] = set()  # whose number of axes hangs on sizes
        self.last = graph._root  # of the nodes that were run, in order

    def of(self, node: fx.Node) -> Any:
        with torch.no_grad(), torch._C.DisableTorchFunction():
            while node not in self.env:
                self.last = self.last.next
                if self.last.op == "root":
                    return UNKNOWN
                self.env[self.last] = self.run_node(self.last)
        return self.env[node]

    def kind_of(self, node: fx.Node) -> type | None:
        value = self.of(node)
        return self.kinds[node] if node in self.kinds else None if value is UNKNOWN else type(value)

    def axes_of(self, node: fx.Node) -> int | None:
        """How many axes has a tensor, whatever its sizes?"""
        value = self.of(node)
        return value.ndim if isinstance(value, Tensor) and node not in self.loose else None

    def run_node(self, node: fx.Node) -> Any:
        if node.target in _SQUEEZES or any(a in self.loose for a in node.all_input_nodes):
            self.loose.add(node)
        if any(self.env[a] is UNKNOWN for a in node.all_input_nodes):
            return UNKNOWN
        try:
            return super().run_node(node)
        except Exception:  # whatever can't be run on an example isn't known
            return UNKNOWN

    def placeholder(self, target, args, kwargs):
        given = self.by_place.pop(0) if self.by_place else self.by_name.get(target, Example(UNKNOWN))
        self.kinds[self.last] = given.kind
        value = given.value
        return value.to(self.dtype) if isinstance(value, Tensor) and value.is_floating_point() else value

    def get_attr(self, target, args, kwargs):
        held = self.attribute(target)
        return held.detach().to("meta") if isinstance(held, Tensor) else held

    def call_module(self, target, args, kwargs):
        module = self.attribute(target)
        if module._forward_hooks or module._forward_pre_hooks:  # which would see tensors without memory
            return UNKNOWN
        tensors = dict([*module.named_parameters(), *module.named_buffers()])
        on_meta = {name: t.detach().to("meta") for name, t in tensors.items()}
        return torch.func.functional_call(module, on_meta, args, kwargs)

    def call_function(self, target, args, kwargs):
        kwargs = {**kwargs, "device": "meta"} if "device" in kwargs or target in FACTORIES else kwargs
        return super().call_function(target, args, kwargs)
