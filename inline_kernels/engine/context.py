"""A traced model, as segments that grow ask it: attributes, the convolutions and norms at which they begin, and shapes for an example."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import fx, nn

from . import ops
from .ops import NotAccepted
from .segment import Conv
from .tracing import attribute, has_hooks


class Context:
    """What growths share."""

    def __init__(self, model: nn.Module, traced, x_dim: int, bare: bool):
        self.model, self.traced, self.x_dim, self.bare = model, traced, x_dim, bare
        self.nodes = list(traced.graph.nodes)
        self.place = {node: i for i, node in enumerate(self.nodes)}
        self.taken: set[fx.Node] = set()  # that segments have
        self.values: set[str] = set()

    def attribute(self, name: str) -> Any:
        return attribute(self.model, self.traced.constants, name)

    def is_parameter(self, name: str) -> bool:
        """Is it one by its place? torch.func.functional_call puts other tensors there."""
        path, _, last = name.rpartition(".")
        owner = self.attribute(path) if path else self.model
        return name not in self.traced.constants and last in getattr(owner, "_parameters", ())

    def ones(self, channels: int, nd: int) -> torch.Tensor:
        """Filters that leave x as it is, of the type and on the device of the model's."""
        like = next(t for t in self.model.parameters() if t.is_floating_point())
        return torch.ones(channels, *[1] * (nd + 1), dtype=like.dtype, device=like.device)

    def value_of(self, name: str) -> float:
        self.values.add(name)
        return self.attribute(name)

    def shape(self, node: fx.Node) -> tuple[int, ...] | None:
        """The shape of a node's value for examples; which axes have size 1 is taken from it. None: not known."""
        value = self.traced.examples.of(node)
        return tuple(value.shape) if isinstance(value, torch.Tensor) else None


# ---- the convolution
_CONVS: dict[Any, int] = {
    nn.Conv2d: 2,
    nn.Conv3d: 3,
    F.conv2d: 2,
    F.conv3d: 3,
    torch.conv2d: 2,
    torch.conv3d: 3,
}


def conv_arguments(context: Context, node: fx.Node) -> dict[str, Any] | None:
    """x, weight, bias (as fx nodes or qualified names), and the settings; None: no convolution."""
    if node.op == "call_module":
        module = context.attribute(node.target)
        if type(module) not in _CONVS or has_hooks(module):
            return None
        names = ("stride", "padding", "dilation", "groups", "padding_mode")
        settings = {name: getattr(module, name) for name in names}
        bias = None if module.bias is None else f"{node.target}.bias"
        return dict(
            x=node.args[0], weight=f"{node.target}.weight", bias=bias, nd=_CONVS[type(module)], **settings
        )
    if node.op != "call_function" or node.target not in _CONVS:
        return None
    defaults = dict(bias=None, stride=1, padding=0, dilation=1, groups=1)
    given = dict(zip(("input", "weight", *defaults), node.args), **node.kwargs)
    arguments = {**defaults, **given, "nd": _CONVS[node.target], "padding_mode": "zeros"}
    arguments["x"] = arguments.pop("input")
    for name in ("weight", "bias"):
        tensor = arguments[name]
        if tensor is not None:
            if not (isinstance(tensor, fx.Node) and tensor.op == "get_attr"):
                raise NotAccepted(f"its {name} is computed")
            arguments[name] = tensor.target
    return arguments


def _each(size: Any, nd: int) -> tuple[int, ...]:
    sizes = tuple(size) if isinstance(size, (tuple, list)) else (size,)
    if not all(isinstance(s, int) for s in sizes):
        raise NotAccepted("the convolution's settings are computed")
    return sizes * nd if len(sizes) == 1 else sizes


def conv_of(node: fx.Node, a: dict[str, Any]) -> Conv:
    nd, padding = a["nd"], a["padding"]
    if padding == "valid":
        padding = 0
    return Conv(
        name=node.target if node.op == "call_module" else "",
        nd=nd,
        stride=_each(a["stride"], nd),
        padding=padding if isinstance(padding, str) else _each(padding, nd),
        dilation=_each(a["dilation"], nd),
        groups=a["groups"],
        padding_mode=a["padding_mode"],
        is_nothing=a.get("is_nothing", False),
    )


_NORMS = {"group_norm", "instance_norm", "batch_norm"}


def is_norm(context: Context, node: fx.Node) -> bool:
    if node.op == "call_module":
        own = ops.MODULES.get(type(context.attribute(node.target)))
        return own is not None and own.row in _NORMS
    row = ops.find(node.target) if node.op == "call_function" else None
    return row is not None and row.name in _NORMS


def nothing_arguments(context: Context, norm: fx.Node) -> dict[str, Any]:
    """As of a convolution that gives what is normalised."""
    x = norm.args[0] if norm.args and isinstance(norm.args[0], fx.Node) else None
    if x is not None and x.op == "call_method" and x.target == "float":
        x = x.args[0]
    shape = x is not None and context.shape(x)
    if not shape or len(shape) != context.x_dim or len(shape) not in (4, 5):
        raise NotAccepted("its input isn't known to be a batch of images")
    channels, nd = shape[1], len(shape) - 2
    ones = f"ones_{channels}"
    context.traced.constants.setdefault(ones, context.ones(channels, nd))
    return dict(
        x=x,
        weight=ones,
        bias=None,
        nd=nd,
        stride=1,
        padding=0,
        dilation=1,
        groups=channels,
        padding_mode="zeros",
        is_nothing=True,
    )
