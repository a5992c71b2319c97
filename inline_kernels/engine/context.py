"""A traced model, as segments that grow ask it: attributes, the convolutions and norms at which they begin, and shapes for an example."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import fx, nn

from . import ops
from .ops import NotAccepted
from .segment import Conv
from .tracing import has_hooks


class Context:
    """What growths share."""

    def __init__(self, model: nn.Module, traced, x_dim: int, bare: bool):
        self.model, self.traced, self.x_dim, self.bare = model, traced, x_dim, bare
        self.nodes = list(traced.graph.nodes)
        self.place = {node: i for i, node in enumerate(self.nodes)}
        self.taken: set[fx.Node] = set()  # that segments have
        self.values: set[str] = set()
        self._shapes: dict[fx.Node, tuple[int, ...]] | None = None

    def attribute(self, name: str) -> Any:
        if name in self.traced.constants:
            return self.traced.constants[name]
        value: Any = self.model
        for part in name.split("."):
            value = getattr(value, part)
        return value

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
        """The shape of a node's value for one example input; which axes have size 1 is taken from it. None: not known."""
        if self._shapes is None:
            self._shapes = _example_shapes(self)
        return self._shapes.get(node)


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


# ---- shapes of an example
class _Unknown(Exception):
    pass


class _Shapes(fx.Interpreter):
    """Runs the traced graph on meta tensors, as far as it goes."""

    def __init__(self, context: Context):
        super().__init__(nn.Module(), garbage_collect_values=False, graph=context.traced.graph)
        self.context = context
        self.shapes: dict[fx.Node, tuple[int, ...]] = {}

    def run_node(self, node: fx.Node) -> Any:
        try:
            result = super().run_node(node)
        except Exception:  # whatever can't be run on an example has no known shape
            return None
        if isinstance(result, torch.Tensor):
            self.shapes[node] = tuple(result.shape)
        return result

    def fetch_args_kwargs_from_env(self, node: fx.Node):
        if any(self.env.get(a) is None for a in node.all_input_nodes):
            raise _Unknown
        return super().fetch_args_kwargs_from_env(node)

    def get_attr(self, target, args, kwargs):
        held = self.context.attribute(target)
        return held.detach().to("meta") if isinstance(held, torch.Tensor) else held

    def call_module(self, target, args, kwargs):
        module = self.context.attribute(target)
        tensors = dict([*module.named_parameters(), *module.named_buffers()])
        on_meta = {name: t.detach().to("meta") for name, t in tensors.items()}
        return torch.func.functional_call(module, on_meta, args, kwargs)

    def call_function(self, target, args, kwargs):
        kwargs = {**kwargs, "device": "meta"} if "device" in kwargs else kwargs
        return super().call_function(target, args, kwargs)


def _example_shapes(context: Context) -> dict[fx.Node, tuple[int, ...]]:
    convs = [a for a in map(lambda n: _safe_conv(context, n), context.nodes) if a]
    if not convs:
        return {}
    weight = context.attribute(convs[0]["weight"])
    channels = weight.shape[1] * convs[0]["groups"]
    positions = {2: 224, 3: 64}[weight.dim() - 2]
    x = torch.empty(2, channels, *[positions] * (weight.dim() - 2), dtype=weight.dtype, device="meta")
    interpreter = _Shapes(context)
    others = sum(n.op == "placeholder" for n in context.nodes) - 1
    with torch.no_grad():
        interpreter.run(x, *[None] * others)
    return interpreter.shapes


def _safe_conv(context: Context, node: fx.Node) -> dict[str, Any] | None:
    try:
        return conv_arguments(context, node)
    except NotAccepted:
        return None
