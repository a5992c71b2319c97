"""A segment: a convolution with its tail, as a graph, with what the model's code has to give for it. Nothing here depends on sizes but on the
convolution's channels: it serves any batch and image. That a second input has the shape that its leaf's space says is for the caller to check,
at each call."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import fx

from .graph import Graph, Node, order
from .ops import Random, Update


class Conv(NamedTuple):
    """The convolution. `name`: the module, or "" for a call of the function. `padding`: by axis, or "same". is_nothing: it gives x itself, and a tensor
    of ones stands for its filters."""

    name: str
    nd: int
    stride: tuple[int, ...]
    padding: tuple[int, ...] | str
    dilation: tuple[int, ...]
    groups: int
    padding_mode: str = "zeros"
    is_nothing: bool = False

    @property
    def pads(self) -> bool:
        """Does it, for some filters?"""
        return self.padding == "same" or any(self.padding)


class Segment:
    """A convolution and its tail. Read-only.

    `graph`, `outputs` (one node), `axes` (of the result's tensor: "n", "c", "0", "1", "2", "s" all positions in one, "" of size 1), `conv`,
    `inputs` (leaves; the first is the convolution's x, which the tail doesn't have), `parameters` (qualified names: weight, bias if there is
    one, the tail's), `buffers`, `scalars` (qualified attribute name -> leaf), `modules` (name -> class and the settings read from it),
    `random`, `updates` (batch norms in training), `channels`, `eager` (the calls that the segment stands for, as a graph: placeholders in
    the inputs' order), `stopped` (why it ends where it does), `digest` (equal for segments that differ in names alone), `result` (its layout, as
    between.py says; None: eager's), `of_operand` (is x an OPERAND?), `read_by` (filters' shapes and settings, of convolutions that read it as it is), `at_once` (does nothing else?)."""

    def __init__(self, **fields: Any):
        self.__dict__.update(fields)
        self.__name__ = f"segment_{self.index}"
        self.__module__ = "inline_kernels.engine"

    index: int
    graph: Graph
    outputs: list[Node]
    axes: tuple[str, ...]
    conv: Conv
    inputs: list[Node]
    parameters: list[str]
    buffers: list[str]
    scalars: dict[str, Node]
    modules: dict[str, tuple[type, dict[str, Any]]]
    random: list[Random]
    updates: list[Update]
    channels: int
    eager: fx.Graph
    stopped: str
    digest: str
    result: str | None = None
    of_operand: bool = False
    read_by: tuple = ()
    at_once: bool = False

    def with_result(self, result: str, of_operand: bool, read_by: tuple, at_once: bool) -> Segment:
        told = {"result": result, "of_operand": of_operand, "read_by": read_by, "at_once": at_once}
        digest = hashlib.sha256(repr(told).encode()).hexdigest()[:8]
        return Segment(**vars(self) | told | {"digest": f"{self.digest}_{digest}"})

    @property
    def tensors(self) -> list[str]:
        """The names of all that come in, in order; last those that are `updated`."""
        inputs = [leaf.attr[0] for leaf in self.inputs]
        return [*inputs, *self.parameters, *self.buffers, *self.updated]

    @property
    def updated(self) -> list[str]:
        """The running statistics that are written, each once."""
        return _updated(self.updates)

    def __call__(self, *inputs: torch.Tensor) -> torch.Tensor:
        raise TypeError("a segment is run by an operator, or by its eager graph")

    def __repr__(self) -> str:
        return f"<{self.__name__} of {self.conv.name or 'a convolution'}: {len(self.eager.nodes)} calls>"


def _updated(updates: Sequence[Update]) -> list[str]:
    """The buffers that are written."""
    return [*dict.fromkeys(name for update in updates for name in update[:2])]


def digest_of(fields: dict[str, Any]) -> str:
    """Of the structure, leaves by their place, and of the channels, which modules know: as instance and layer norms do."""
    kinds = ("inputs", "parameters", "buffers", "scalars")
    names = {**fields, "inputs": [leaf.attr[0] for leaf in fields["inputs"]]}
    places = {name: f"{kind}{i}" for kind in kinds for i, name in enumerate(names[kind])}
    updates = [n for u in fields["updates"] for n in (u.mean, u.variance, u.count)]
    nodes = order([*fields["outputs"], *updates])
    number = {node.id: i for i, node in enumerate(nodes)}
    lines = [
        repr(fields["conv"]._replace(name="")),
        repr((fields["axes"], fields["channels"])),
        repr(sorted(fields["graph"].levels.items())),
    ]
    lines += [f"{kind} {len(fields[kind])}" for kind in kinds] + [repr([*fields["random"]])]
    for u in fields["updates"]:
        own = [_updated(fields["updates"]).index(name) for name in u[:2]]
        lines.append(repr((number[u.mean.id], number[u.variance.id], number[u.count.id], u.momentum, *own)))
    for node in nodes:
        attr = (places.get(node.attr[0], node.attr[0]), node.attr[1]) if node.op == "leaf" else node.attr
        if node.op == "detach":
            attr = None
        lines.append(f"{node.op} {attr} {node.space} {[number[a.id] for a in node.args]}")
    lines.append(repr([number[n.id] for n in fields["outputs"]]))
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]
