"""A model as a torch.fx graph in which each convolution with what follows it is one call: a Segment.

`capture(model, training, x_dim)` traces the forward (tracing.py) and lets a segment grow from each convolution (growth.py). A norm that no
convolution precedes begins one, too, on a GPU: its convolution gives x itself. Everything else stays PyTorch's.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import fx, nn

from .context import Context, conv_arguments, is_norm
from .graph import walk
from .growth import Growth, grown_from, name_of
from .ops import NotAccepted
from .segment import Segment
from .support import altered, convolved_dtype
from .tracing import NotCaptured, trace

__all__ = ["Captured", "NotCaptured", "capture"]


class Captured(NamedTuple):
    """`module`: its graph's nodes `call_function(segments[i])` take the values of the segment's inputs; get_attr and call_module targets
    are the model's qualified names, or `constants`'. `inlined`: modules that were traced through. `values`: qualified names of attributes
    whose value the capture used. `opaque`: modules that couldn't be traced through, with the reason. `optional`: arguments of forward
    that were left at their default. `remarks`: what became of convolutions without a segment. `passed_by`: modules that give what they are
    given, whose calls are left out."""

    module: fx.GraphModule
    segments: list[Segment]
    constants: dict[str, torch.Tensor]
    inlined: tuple[str, ...]
    values: frozenset[str]
    opaque: dict[str, str]
    optional: dict[str, Any]
    remarks: dict[str, str]
    passed_by: frozenset[str]


def capture(
    model: nn.Module, training: bool, x_dim: int, bare: bool = False, examples: tuple | None = None
) -> Captured:
    """bare: do convolutions with a bias alone become segments, and norms without one? On a GPU PyTorch's take passes of their own. examples: of
    forward's arguments (examples.py), if there is a call. Raises NotCaptured with the reason, and the line of the model's source where there is one."""
    if training != model.training:
        raise ValueError(f"training={training}, and the model's own is {model.training}")
    traced = trace(model, x_dim, examples)
    passed_by = _without_identities(traced.graph, model)
    _ask_for_types_ahead(traced.graph, model)
    _without_questions(traced.graph)
    context = Context(model, traced, x_dim, bare)
    remarks: dict[str, str] = {}
    grown: list[Growth] = []
    for node in traced.graph.nodes:
        try:
            if node not in context.taken and conv_arguments(context, node) is not None:
                grown.append(grown_from(context, node))
        except NotAccepted as reason:
            remarks[name_of(node)] = str(reason)
    for node in traced.graph.nodes if bare and grown else ():
        if node not in context.taken and is_norm(context, node):
            with contextlib.suppress(NotAccepted):
                grown.append(grown_from(context, node))
    grown.sort(key=lambda growth: context.place[growth.result])
    segments = [growth.segment(i) for i, growth in enumerate(grown)]
    graph = _replaced(context, grown, segments)
    attributes = {
        n.target: context.attribute(n.target) for n in graph.nodes if n.op in ("get_attr", "call_module")
    }
    return Captured(
        module=fx.GraphModule(attributes, graph, type(model).__name__),
        segments=segments,
        constants=traced.constants,
        inlined=traced.inlined,
        values=traced.values | context.values,
        opaque=traced.opaque,
        optional=traced.optional,
        remarks=remarks,
        passed_by=passed_by,
    )


def _without_identities(graph: fx.Graph, model: nn.Module) -> frozenset[str]:
    """Takes the calls of nn.Identity out of the graph, but of those that somebody changed; gives their names."""
    found = set()
    for node in graph.nodes:
        module = model.get_submodule(node.target) if node.op == "call_module" else None
        if type(module) is nn.Identity and not altered(node.target, module) and len(node.args) == 1:
            node.replace_all_uses_with(node.args[0])
            graph.erase_node(node)
            found.add(node.target)
    return frozenset(found)


def _ask_for_types_ahead(graph: fx.Graph, model: nn.Module) -> None:
    """What takes the type of a convolution's result needs not wait for the convolution: its filters say which it is."""
    for node in [node for node in graph.nodes if node.op == "call_method" and node.target in ("type", "to")]:
        query = node.args[1] if len(node.args) == 2 else None
        if not (isinstance(query, fx.Node) and query.target is getattr and query.args[1] == "dtype"):
            continue
        of = query.args[0]
        module = model.get_submodule(of.target) if of.op == "call_module" else None
        if type(module) not in (nn.Conv2d, nn.Conv3d) or of in _ancestors(node.args[0]):
            continue
        with graph.inserting_before(node):
            weight = graph.get_attr(f"{of.target}.weight")
            node.update_arg(1, graph.call_function(convolved_dtype, (weight,)))


def _ancestors(node: fx.Node) -> set[fx.Node]:
    return {*walk([node], lambda each: each.all_input_nodes)}


def _without_questions(graph: fx.Graph) -> None:
    """Takes what was asked of values, and nothing reads any more, out of the graph: numbers of axes are known while it is traced."""
    for node in reversed(graph.nodes):
        asks = node.target is getattr and node.args[1] in ("shape", "ndim", "dtype", "device", "is_cuda")
        asks = asks or (node.op == "call_method" and node.target in ("size", "dim"))
        if asks and not node.users:
            graph.erase_node(node)


def _replaced(context: Context, grown: Sequence[Growth], segments: Sequence[Segment]) -> fx.Graph:
    calls = {growth.result: (growth, segment) for growth, segment in zip(grown, segments)}
    graph, copies = fx.Graph(), {}
    for node in context.nodes:
        if node in calls:
            growth, segment = calls[node]
            copies[node] = graph.call_function(segment, tuple(copies[a] for a in growth.input_nodes()))
        elif node not in context.taken:
            copies[node] = graph.node_copy(node, copies.__getitem__)
    absorbed = {copies.get(a) for growth in grown for a in growth.of_parameters}
    for node in reversed(graph.nodes):  # what only members needed
        if not node.users and (node.op == "get_attr" or node in absorbed or _makes_a_number(node)):
            graph.erase_node(node)
    return graph


def _makes_a_number(node: fx.Node) -> bool:
    return node.op == "call_function" and node.target in (torch.tensor, torch.as_tensor, getattr)
