"""Graphs by torch, node by node: the reference for everything that is generated from one, and a stand-in for it.

Values are kept broadcastable to (N, C, *positions): an axis that a node's space lacks has size 1. Works in any dtype; float64 for references.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence

import torch
import torch.fx
import torch.nn.functional as F

from inline_kernels.engine.capture import Captured
from inline_kernels.engine.graph import Graph, Node, Space, order
from inline_kernels.engine.segment import Segment

FUNCTIONS = {
    "add": torch.add,
    "sub": torch.sub,
    "mul": torch.mul,
    "div": torch.div,
    "neg": torch.neg,
    "gt": torch.gt,
    "ge": torch.ge,
    "eq": torch.eq,
    "and": torch.logical_and,
    "or": torch.logical_or,
    "where": torch.where,
    "max": torch.maximum,
    "min": torch.minimum,
    "narrow": lambda x: x.float().to(x.dtype),
    "of_values": lambda x: x,
    "of_results": lambda x: x,
    "relu": torch.relu,
    "leaky_relu": lambda x, slope: torch.where(x > 0, x, x * slope),
    "clamp_min": torch.clamp_min,
    "clamp_max": torch.clamp_max,
    "clamp": torch.clamp,
    "hardtanh": torch.clamp,
    "hardsigmoid": F.hardsigmoid,
    "abs": torch.abs,
    "exp": torch.exp,
    "tanh": torch.tanh,
    "sigmoid": torch.sigmoid,
    "sqrt": torch.sqrt,
    "rsqrt": torch.rsqrt,
    "rest": torch.zeros_like,
    "log": torch.log,
    "softplus": lambda x, beta, threshold: F.softplus(x, float(beta), float(threshold)),
    "elu": lambda x, alpha: F.elu(x, float(alpha)),
    "mish": F.mish,
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "hardswish": F.hardswish,
}


def _gradient_of(function):
    def gradient(x, *parameters):
        with torch.enable_grad():
            leaf = x.detach().requires_grad_()
            return torch.autograd.grad(function(leaf, *parameters).sum(), leaf)[0]

    return gradient


for _name in ("mish", "silu", "gelu", "gelu_tanh", "hardswish", "softplus", "elu"):
    FUNCTIONS[f"{_name}_gradient"] = _gradient_of(FUNCTIONS[_name])


class Sizes:
    """N, C and the positions of "e" and of every level of the graph."""

    def __init__(self, graph: Graph, n: int, c: int, positions: Sequence[int]):
        self.graph, self.n, self.c = graph, n, c
        self.levels = {"e": tuple(positions)}
        for name, level in graph.levels.items():
            axes = zip(self.levels[level.parent], level.window, level.stride, level.padding, strict=True)
            self.levels[name] = tuple(1 if w is None else (s + 2 * p - w) // t + 1 for s, w, t, p in axes)

    def shape(self, space: Space) -> tuple[int, ...]:
        positions = self.levels[space.level] if space.level else (1,) * self.graph.dimensions
        return self.n if space.n else 1, self.c if space.c else 1, *positions

    def window(self, level: str) -> tuple[int, ...]:
        return tuple(size for _, size, _, _ in self.axes(level))

    def axes(self, level: str) -> list[tuple[int, int, int, int]]:
        """By axis how many windows there are, their size, stride and padding."""
        known = self.graph.levels[level]
        sizes = zip(self.levels[level], self.levels[known.parent], known.window, known.stride, known.padding)
        return [(n, s, s, 0) if w is None else (n, w, t, p) for n, s, w, t, p in sizes]

    def count(self, axis: str, what: str | int) -> int:
        if axis == "group":
            return self.c // what
        if axis in ("n", "c"):
            return self.n if axis == "n" else self.c
        return math.prod(self.levels[what] if axis == "s" else self.window(what))


def evaluate(roots: Sequence[Node], leaves: Mapping[str, torch.Tensor], sizes: Sizes) -> list[torch.Tensor]:
    """The roots' values, broadcastable to their spaces' shapes. `leaves` by name, in shapes of their spaces."""
    dtype = next(iter(leaves.values())).dtype
    values: dict[int, torch.Tensor] = {}
    for node in order(roots):
        values[node.id] = _compute(node, [values[a.id] for a in node.args], leaves, sizes, dtype)
    return [values[r.id] for r in roots]


def _compute(node: Node, a: list[torch.Tensor], leaves, sizes: Sizes, dtype) -> torch.Tensor:
    op, attr, spatial = node.op, node.attr, tuple(range(2, 2 + sizes.graph.dimensions))
    if op == "const":
        return torch.tensor(attr, dtype=dtype).reshape([1] * (2 + len(spatial)))
    if op == "leaf":
        value = leaves[attr[0]]
        assert tuple(value.shape) == sizes.shape(node.space), (
            attr,
            tuple(value.shape),
            sizes.shape(node.space),
        )
        return value
    if op == "count":
        return torch.tensor(sizes.count(*attr), dtype=dtype).reshape([1] * (2 + len(spatial)))
    if op in FUNCTIONS:
        return FUNCTIONS[op](*a)
    full = a[0].expand(sizes.shape(node.args[0].space))
    if op == "sum":
        return _sum(full, attr, sizes)
    if op == "group":
        return _group(full, attr)
    if op == "variance":
        return _variance(full, a[1], attr)
    if op == "pick":
        return _pick(full, *attr, sizes)
    if op in ("take", "put"):
        return (_take if op == "take" else _put)(a[0], a[1], node, sizes)
    if op == "upsample":
        return _upsample(full, attr, sizes)
    if op == "spread":
        return full.expand(sizes.shape(node.space))
    if op == "detach":
        return a[0]
    raise NotImplementedError(op)


def _sum(a, axis, sizes):
    if axis in ("n", "c", "s"):
        return a.sum({"n": 0, "c": 1, "s": tuple(range(2, a.dim()))}[axis], keepdim=True)
    return _windows(a, axis, sizes).sum(-1)


def _windows(a, level, sizes, outside=0):
    """(N, C, *windows, places of a window), with a value of those outside of all positions."""
    axes = sizes.axes(level)
    a = F.pad(a, [p for *_, p in reversed(axes) for _ in range(2)], value=outside)
    for i, (n, w, t, _) in enumerate(axes):
        a = a.narrow(2 + i, 0, (n - 1) * t + w).unfold(2 + i, w, t)
    return a.flatten(2 + len(axes))


def _upsample(a, level, sizes):
    """Place by place of all windows at once."""
    parent, axes = sizes.levels[sizes.graph.levels[level].parent], sizes.axes(level)
    around = [s + 2 * p for s, (*_, p) in zip(parent, axes, strict=True)]
    total = a.new_zeros(*a.shape[:2], *around)
    for place in itertools.product(*[range(w) for _, w, _, _ in axes]):
        at = [slice(i, i + (n - 1) * t + 1, t) for i, (n, _, t, _) in zip(place, axes, strict=True)]
        total[(..., *at)] += a
    return total[(..., *[slice(p, p + s) for s, (*_, p) in zip(parent, axes, strict=True)])]


def _group(a, groups):
    parts = a.reshape(a.shape[0], groups, -1, *a.shape[2:])
    return parts.sum(2, keepdim=True).expand_as(parts).reshape(a.shape)


def _variance(a, mean, steps):
    total, count = (a - mean).square(), 1
    for step in steps:
        if isinstance(step, int):
            count *= total.shape[1] // step
            total = _group(total, step)
        else:
            axes = {"n": (0,), "c": (1,), "s": tuple(range(2, a.dim()))}[step]
            count *= math.prod(total.shape[i] for i in axes)
            total = total.sum(axes, keepdim=True)
    return total / count


def _pick(a, axis, sign, *more):
    """Indices: of a channel, or of a position of the parent level, row-major."""
    if axis == "c":
        return (a.max if sign > 0 else a.min)(1, keepdim=True)[1]
    if axis == "s":
        flat = a.flatten(2)
        last = flat.shape[2] - 1 - flat.isnan().flip(2).int().argmax(2)
        place = torch.where(flat.isnan().any(2), last, flat.max(2)[1]) if "pool" in more else flat.max(2)[1]
        return place.reshape(*a.shape[:2], *[1] * (a.dim() - 2))
    (sizes,) = more
    windows = _windows(a, axis, sizes, -sign * math.inf)
    if None not in sizes.graph.levels[axis].window:  # a pool: the last NaN wins
        windows = windows * sign
        last = windows.shape[-1] - 1 - windows.isnan().flip(-1).int().argmax(-1)
        counts = _windows(torch.ones_like(a), axis, sizes) > 0
        best = (counts & (windows == windows.amax(-1, keepdim=True))).int().argmax(-1)
        inside = torch.where(windows.isnan().any(-1), last, best)
    else:
        inside = (windows.max if sign > 0 else windows.min)(-1)[1]
    places = torch.arange(math.prod(a.shape[2:])).reshape(1, 1, *a.shape[2:]).expand(a.shape)
    return _windows(places, axis, sizes).gather(-1, inside.unsqueeze(-1)).squeeze(-1)


def _take(a, index, node, sizes):
    source = node.args[1].args[0].space
    own = node.args[0].space.union(source)
    a = a.expand(sizes.shape(own))
    if node.args[1].attr[0] == "c":
        index = index.expand(a.shape[0], 1, *a.shape[2:])
        return a.gather(1, index)
    index = index.expand(*a.shape[:2], *index.shape[2:])
    return a.flatten(2).gather(2, index.flatten(2)).reshape(index.shape)


def _put(a, index, node, sizes):
    shape = sizes.shape(node.space)
    out = torch.zeros(shape, dtype=a.dtype)
    if node.args[1].attr[0] == "c":
        at = (shape[0], 1, *shape[2:])
        return out.scatter_add(1, index.expand(at), a.expand(at))
    at = (*shape[:2], *index.shape[2:])
    return out.flatten(2).scatter_add(2, index.expand(at).flatten(2), a.expand(at).flatten(2)).reshape(shape)


# ---- segments, as their operators are to be
def attribute(model: torch.nn.Module, name: str):
    value = model
    for part in name.split("."):
        value = getattr(value, part)
    return value


def result_shape(segment: Segment, sizes: Sizes) -> tuple[int, ...]:
    """Of the segment's tensor."""
    positions = sizes.levels[segment.outputs[0].space.level or "e"]
    named = {"n": sizes.n, "c": sizes.c, "s": math.prod(positions), "": 1} | dict(
        zip("012", positions, strict=False)
    )
    return tuple(named[axis] for axis in segment.axes)


def convolve(segment: Segment, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Without bias."""
    conv = segment.conv
    function = F.conv2d if conv.nd == 2 else F.conv3d
    if conv.padding_mode != "zeros":
        padding = (
            _same_padding(conv, weight)
            if conv.padding == "same"
            else [q for p in conv.padding[::-1] for q in (p, p)]
        )
        x, conv = F.pad(x, padding, conv.padding_mode), conv._replace(padding=0)
    return function(x, weight, None, conv.stride, conv.padding, conv.dilation, conv.groups)


def _same_padding(conv, weight: torch.Tensor) -> list[int]:
    found = []
    for d, k in zip(conv.dilation[::-1], list(weight.shape[2:])[::-1], strict=True):
        found += [d * (k - 1) // 2, d * (k - 1) - d * (k - 1) // 2]
    return found


class _Operator(torch.autograd.Function):
    """A segment by the graph alone, backward by its adjoints; only the convolution's gradients are the library's."""

    @staticmethod
    def forward(
        ctx,
        segment: Segment,
        numbers: Mapping[str, float],
        masks: Sequence[torch.Tensor],
        *tensors: torch.Tensor,
    ):
        x, weight = tensors[0], tensors[len(segment.inputs)]
        z = convolve(segment, x, weight)
        sizes = Sizes(segment.graph, z.shape[0], z.shape[1], z.shape[2:])
        leaves = _leaves(segment, z, numbers, masks, tensors, sizes)
        roots = [*segment.outputs, *(n for u in segment.updates for n in (u.mean, u.variance, u.count))]
        y, *statistics = evaluate(roots, leaves, sizes)
        ctx.segment, ctx.leaves, ctx.sizes = segment, leaves, sizes
        ctx.save_for_backward(*tensors)
        y = y.expand(sizes.shape(segment.outputs[0].space)).reshape(result_shape(segment, sizes)).clone()
        ctx.mark_non_differentiable(*statistics)
        return y, *statistics

    @staticmethod
    def backward(ctx, dy, *_):
        segment, sizes, tensors = ctx.segment, ctx.sizes, ctx.saved_tensors
        graph, (y,) = segment.graph, segment.outputs
        own = {n.attr[0]: n for n in order([y]) if n.op == "leaf"}
        names = _names(segment)
        adjoint = graph.leaf("dy", y.space, "dy")
        wanted = [own[name] for name in ("z", *names) if name in own]
        nodes = graph.adjoints(y, adjoint, wanted)
        given = {**ctx.leaves, "dy": dy.reshape(sizes.shape(y.space))}
        found = dict(zip([w.attr[0] for w in wanted], nodes, strict=True))
        computed = [(name, node) for name, node in found.items() if node is not None]
        values = dict(
            zip([n for n, _ in computed], evaluate([n for _, n in computed], given, sizes), strict=True)
        )
        values = {name: v.expand(sizes.shape(own[name].space)) for name, v in values.items()}
        weight_at = len(segment.inputs)
        with torch.enable_grad():
            x, weight = (t.detach().requires_grad_() for t in (tensors[0], tensors[weight_at]))
            z = convolve(segment, x, weight)
        dz = values.get("z", torch.zeros_like(z)).to(z.dtype)
        dx, dw = torch.autograd.grad(z, (x, weight), dz.contiguous())
        gradients = [
            values[n].reshape(t.shape) if n in values else torch.zeros_like(t) for n, t in zip(names, tensors)
        ]
        gradients[0], gradients[weight_at] = dx, dw
        return None, None, None, *gradients


def _names(segment: Segment) -> list[str]:
    return [*(leaf.attr[0] for leaf in segment.inputs), *segment.parameters, *segment.buffers]


def _leaves(segment, z, numbers, masks, tensors, sizes) -> dict[str, torch.Tensor]:
    leaves = {"z": z}
    spaces = {n.attr[0]: n.space for n in segment.graph.nodes if n.op == "leaf"}
    for name, tensor in zip(_names(segment), tensors, strict=True):
        if name in spaces and name not in (segment.parameters[0], segment.inputs[0].attr[0]):
            leaves[name] = tensor.reshape(sizes.shape(spaces[name]))
    for name, number in numbers.items():
        leaves[name] = torch.full(sizes.shape(spaces[name]), number, dtype=z.dtype)
    for random, mask in zip(segment.random, masks, strict=True):
        leaves[random.leaf] = mask(sizes.shape(spaces[random.leaf])).to(z.dtype)
    return leaves


class Reference(torch.fx.Interpreter):
    """A captured model, its segments by the interpreter of graphs. `mask(shape)` draws what dropouts keep."""

    def __init__(self, model: torch.nn.Module, captured: Captured, mask=None):
        super().__init__(captured.module)
        self.model, self.mask, self.constants = model, mask, captured.constants

    def call_function(self, target, args, kwargs):
        if not isinstance(target, Segment):
            return super().call_function(target, args, kwargs)
        tensors = [attribute(self.model, name) for name in (*target.parameters, *target.buffers)]
        numbers = {name: attribute(self.model, name) for name in target.scalars}
        y, *statistics = _Operator.apply(target, numbers, [self.mask] * len(target.random), *args, *tensors)
        for i, update in enumerate(target.updates):
            self._update(update, *statistics[3 * i : 3 * i + 3])
        return y

    def call_module(self, target, args, kwargs):
        return attribute(self.model, target)(*args, **kwargs)

    def get_attr(self, target, args, kwargs):
        return self.constants[target] if target in self.constants else attribute(self.model, target)

    def _update(self, update, mean, variance, count):
        for name, value in (
            (update.mean_buffer, mean),
            (update.variance_buffer, variance * count / (count - 1)),
        ):
            attribute(self.model, name).lerp_(value.reshape(-1), update.momentum)
