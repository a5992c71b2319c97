"""What stands, where results lie channels last, in the place of PyTorch's calls between segments: operators of our own (joining.py, pooling.py)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor, fx, nn

from inline_kernels.loader import operators as loader_operators
from inline_kernels.loader.operators import check_memory

from . import library, support
from .chain import Place
from .part import building
from .support import Keeping

DTYPES = torch.float32, torch.float16, torch.bfloat16
_MODULES = nn.ConvTranspose2d, nn.MaxPool2d, nn.AvgPool2d


def replaced(captured, model: nn.Module) -> set[str]:
    """The modules whose calls may be replaced."""
    found = {node.target for node in captured.module.graph.nodes if node.op == "call_module"}
    modules = {name: model.get_submodule(name) for name in found}
    return {
        name for name, each in modules.items() if type(each) in _MODULES and not support.altered(name, each)
    }


def placed(
    graph: fx.Graph, found: Mapping[fx.Node, tuple[Replacement, Sequence[fx.Node]]]
) -> tuple[fx.Graph, list[Place]]:
    """graph with places for replacements, and these, in found's order. found: of a call its replacement, and of which values."""
    made, values, places = fx.Graph(), {}, {}
    for node in graph.nodes:
        if node not in found:
            values[node] = made.node_copy(node, values.__getitem__)
            continue
        replacement, given = found[node]
        replacement.guard_once(given)
        places[node] = Place()
        values[node] = made.call_function(places[node], tuple(values[x] for x in given))
    for node in found:
        for value in node.all_input_nodes:
            if not values[value].users:  # what the replacement does itself
                made.erase_node(values[value])
    return made, [places[node] for node in found]


class Replacement(Keeping):
    """Called with the inputs of a call. What it decided in a situation it keeps."""

    def request(self, dtype: torch.dtype) -> list[dict]:
        """What inline_loader has to build for it, in a model whose first input is of that type."""
        may_run = dtype in DTYPES and (dtype != torch.float32 or library.allows_tf32())
        return [self.source(dtype)] if may_run else []

    def __call__(self, *given: Tensor) -> Tensor:
        tensors = (*given, *[table[last] for table, last in self.sources])
        situation, epoch = self.situation(tensors), self.epoch
        if situation is None:
            return self._decided(tensors)(*tensors)
        if not situation.decided:
            situation.run, situation.decided = self._decided(tensors), True
            if epoch == self.epoch:
                self.keep(situation)
        return situation.run(*tensors)

    def _decided(self, tensors: tuple[Tensor, ...]) -> Callable:
        """What runs for such tensors."""
        if not self.fits(tensors):
            return self.eager
        check_memory(*tensors)
        needs_gradient = torch.is_grad_enabled() and any([t.requires_grad for t in tensors])
        operator = self.operator()
        with building(tensors[0].device.type) as built:
            plan = operator.plan(tensors, saving=needs_gradient)
        return operator.bound(plan, (), needs_gradient) if built else self.eager

    # ---- what each has of its own
    def fits(self, tensors: tuple[Tensor, ...]) -> bool:
        """May the operator run?"""
        raise NotImplementedError

    def operator(self) -> loader_operators.Operator:
        """Of such tensors."""
        raise NotImplementedError

    def eager(self, *tensors: Tensor) -> Tensor:
        """PyTorch's own call."""
        raise NotImplementedError

    def source(self, dtype: torch.dtype) -> dict:
        """What `inline_loader.load` takes."""
        raise NotImplementedError


def are_plain(tensors: Sequence[Tensor]) -> bool:
    """Are they plain ones on a GPU, alike, and with elements, of a type that there are kernels for?"""
    x = tensors[0]
    if not all(
        type(t) in loader_operators.PLAIN and t.layout is torch.strided and not t.is_meta for t in tensors
    ):
        return False
    if library.device_type(x) != "cuda" or x.dtype not in DTYPES:
        return False
    return not any(
        (t.device, t.dtype) != (x.device, x.dtype) or not t.numel() or support.odd("", t) for t in tensors
    )


def lie_last(images: Sequence[Tensor]) -> bool:
    """Are they images channels last? Of one channel, or one position, they lie in planes, too: not all of them."""
    all_are = all(t.dim() == 4 and t.is_contiguous(memory_format=torch.channels_last) for t in images)
    return all_are and any(map(library.is_channels_last, images))
