"""A segment in the making: from its convolution, or a norm, down over the calls that the table of operations takes (ops.py), values used twice among
them; then cut where one value alone leaves it, at the place that keeps the most calls. What comes from outside (residuals) is an input."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from . import ops
from .context import Context, conv_arguments, conv_of, nothing_arguments
from .graph import ELEMENTS, Space, order, walk
from .ops import NotAccepted, Random, Tail, Update, Value
from .segment import Segment, digest_of
from .tracing import Named, has_hooks

# A value's type, also under autocast.
_KEEPING = set("add sub mul min max clamp const of_results of_values".split())
_QUERIES = {"device", "dtype", "is_cuda"}  # of a tensor: attributes that no value depends on
_ALIASES = set(
    "contiguous identity dropout other_dropout squeeze unsqueeze flatten permute float type".split()
)


def grown_from(context: Context, node: fx.Node) -> Growth:
    growth = Growth(context, node)
    growth.cut()
    context.taken |= growth.members
    return growth


class Growth:
    """A segment in the making: from its convolution, or a norm, down over what the table takes."""

    def __init__(self, context: Context, first: fx.Node):
        self.context, self.first = context, first
        arguments = conv_arguments(context, first) or nothing_arguments(context, first)
        self.conv = conv_of(first, arguments)
        # Whose value is z: the convolution, or what is normalised.
        self.conv_node = arguments["x"] if self.conv.is_nothing else first
        if context.x_dim != self.conv.nd + 2:
            raise NotAccepted(
                f"the model's input has {context.x_dim} axes, a batch for it {self.conv.nd + 2}"
            )
        self.x: fx.Node = arguments["x"]
        weight = context.attribute(arguments["weight"])
        if not (self.conv.is_nothing or context.is_parameter(arguments["weight"])):
            raise NotAccepted("its weight is no parameter")
        self.channels = weight.shape[0]
        self.tail = Tail(self.conv.nd, self.channels, context.value_of)
        self.weight, self.bias = arguments["weight"], arguments["bias"]
        self.inputs: dict[fx.Node, Value] = {}
        self.of_parameters: dict[fx.Node, Value] = {}
        self.attributes: dict[str, Value] = {}
        self.modules: dict[str, tuple[type, dict[str, Any]]] = {}
        self.values: dict[fx.Node, Any] = {self.conv_node: self._start()}
        self.updates: dict[fx.Node, list[Update]] = {}
        self.random: dict[fx.Node, list[Random]] = {}
        self.stops: dict[fx.Node, str] = {}
        self.widened: list[tuple[fx.Node, set[str]]] = []  # whose type is read, and what may have widened it
        self.halt = "nothing follows that the table takes"
        self._grow()

    def _start(self) -> Value:
        z = Value(self.tail.graph.leaf("z", ELEMENTS, "z"), ("n", "c", *self.tail.spatial))
        if self.bias is None:
            return z
        value = self._attribute(self.bias)
        return Value(self.tail.graph.scalar("add", z.node, value.node), z.axes)

    def _grow(self) -> None:
        """Calls in their order. What depends on the convolution and isn't taken bars whatever depends on it."""
        barred: set[fx.Node] = set()
        for node in self.context.nodes[self.context.place[self.conv_node] + 1 :]:
            operands = set(node.all_input_nodes)
            if operands & barred:
                barred.add(node)
            elif operands & self.values.keys():
                try:
                    self.values[node] = self._taken(node)
                except NotAccepted as reason:
                    self.stops[node] = str(reason)
                    barred.add(node)
            elif self._writes_an_input(node):
                self.halt = f"{name_of(node)}: it writes one of the segment's inputs in place"
                return

    def _taken(self, node: fx.Node) -> Any:
        """The value of a call as part of this segment."""
        if node in self.context.taken:
            raise NotAccepted("another segment has it")
        if node.op == "output":
            raise NotAccepted("the model returns it")
        if node.op == "call_function" and node.target is getattr and node.args[1] in _QUERIES:
            return None
        if node.op == "call_function" and node.target in (torch.tensor, torch.as_tensor):
            return self._number_tensor(node)
        if self._takes_own_type(node):
            return self.values[node.args[0]]
        row, args, kwargs = self._call(node)
        if ops.is_inplace(row.name if node.op == "call_module" else node.target, kwargs):
            self._check_in_place(node)
        before = len(self.tail.updates), len(self.tail.random)
        try:
            result = row.build(self.tail, *args, **kwargs)
        except (TypeError, AttributeError, KeyError, IndexError) as error:
            raise NotAccepted(f"arguments that aren't served: {error}") from error
        except ValueError as error:
            raise NotAccepted(str(error)) from error
        self.updates[node], self.random[node] = self.tail.updates[before[0] :], self.tail.random[before[1] :]
        return result

    def _call(self, node: fx.Node) -> tuple[ops.Row, list[Any], dict[str, Any]]:
        if node.op == "call_module":
            return self._module_call(node)
        row = ops.find(node.target) if node.op in ("call_function", "call_method") else None
        if row is None:
            raise NotAccepted(f"there are no kernels for {name_of(node)}")
        beside = self._reference(node)
        args = fx.node.map_aggregate(node.args, lambda a: self._operand(a, beside))
        return row, list(args), dict(fx.node.map_aggregate(node.kwargs, lambda a: self._operand(a, beside)))

    def _module_call(self, node: fx.Node) -> tuple[ops.Row, list[Any], dict[str, Any]]:
        module = self.context.attribute(node.target)
        own = ops.MODULES.get(type(module))
        if own is None:
            raise NotAccepted(f"there are no kernels for {type(module).__name__}")
        if has_hooks(module):
            raise NotAccepted("it has hooks")
        if len(node.args) != 1 or node.kwargs:
            raise NotAccepted("arguments besides its input")
        settings = {name: getattr(module, name) for name in own.settings.values()}
        self.modules[node.target] = type(module), settings
        arguments = ops.module_arguments(module)
        for argument, name in ops.module_tensors(module).items():
            arguments[argument] = self._attribute(f"{node.target}.{name}")
        return ops.ROWS[own.row], [self._operand(node.args[0], None)], arguments

    # ---- operands
    def _reference(self, node: fx.Node) -> fx.Node | None:
        """The operand of this segment that others are broadcast against."""
        own = [
            a for a in node.all_input_nodes if isinstance(self.values.get(a), Value) and self.values[a].axes
        ]
        return max(own, key=lambda a: len(self.values[a].axes), default=None)

    def _operand(self, a: Any, beside: fx.Node | None) -> Any:
        if isinstance(a, Named):
            return self._attribute(a.name)
        if not isinstance(a, fx.Node):
            return a
        if a in self.values:
            return self.values[a]
        if a.op == "get_attr":
            return self._attribute(a.target)
        if a.op == "call_function" and a.target in (torch.tensor, torch.as_tensor):
            return self._number_tensor(a)
        value = self._of_parameters(a)
        return self._input(a, beside) if value is None else value

    def _of_parameters(self, a: fx.Node) -> Value | None:
        """A call on parameters and numbers alone is computed again in the segment."""
        if a in self.of_parameters:
            return self.of_parameters[a]
        sources = a.all_input_nodes
        if a.op not in ("call_function", "call_method") or not sources or a in self.context.taken:
            return None
        if any(s.op != "get_attr" and self._of_parameters(s) is None for s in sources):
            return None
        row = ops.find(a.target)
        if row is None or ops.is_inplace(a.target, a.kwargs):
            return None
        try:
            args = fx.node.map_aggregate(a.args, lambda b: self._operand(b, None))
            kwargs = fx.node.map_aggregate(a.kwargs, lambda b: self._operand(b, None))
            value = row.build(self.tail, *args, **kwargs)
        except (NotAccepted, TypeError, ValueError):
            return None
        if isinstance(value, Value) and value.node.op != "leaf":
            self.of_parameters[a] = value
        return self.of_parameters.get(a)

    def _attribute(self, name: str) -> Any:
        """A tensor or number of the model."""
        if name in self.attributes:
            return self.attributes[name]
        held = self.context.attribute(name)
        if isinstance(held, float):
            value = Value(self.tail.graph.leaf(name, Space(False, False, ""), "scalar"))
        elif name in self.context.traced.constants and held.numel() == 1 and not held.requires_grad:
            return Value(self.tail.graph.const(held.item()), ("",) * held.dim())
        elif isinstance(held, torch.Tensor) and name not in self.context.traced.constants:
            if not held.is_floating_point():
                raise NotAccepted(f"{name} is {held.dtype}")
            kind = "parameter" if self.context.is_parameter(name) else "buffer"
            value = self.tail.parameter(name, kind, held.shape)
        else:
            raise NotAccepted(f"{name} is neither a number nor a tensor of the model")
        self.attributes[name] = value
        return value

    def _number_tensor(self, node: fx.Node) -> Value:
        """torch.tensor(a number): no axes, and the other operand's type; or said to be of a value's own."""
        data = node.args[0] if node.args else node.kwargs.get("data")
        dtype = node.kwargs.get("dtype")
        kind = self._type_of(dtype)
        if node.kwargs.get("requires_grad") or (dtype is not None and kind is None):
            raise NotAccepted("a tensor of its own type")
        if isinstance(data, Named):
            value = self._attribute(data.name)
        elif type(data) is float or (type(data) is int and kind):
            value = Value(self.tail.graph.const(float(data)))
        else:
            raise NotAccepted("a tensor of more than a number")
        if kind:
            return Value(value.node.apply(kind))
        narrow = torch.get_default_dtype() == torch.float32
        if value.node.op == "const":
            return Value(self.tail.graph.const(torch.tensor(data).item()))
        return Value(value.node.apply("narrow")) if narrow else value

    def _takes_own_type(self, node: fx.Node) -> bool:
        """Does a value take another's type, or go where it is? Results have eager's type; between, values have as many digits as kernels have."""
        if (
            node.op != "call_method"
            or node.target not in ("type", "to")
            or len(node.args) != 2
            or node.kwargs
        ):
            return False
        value, asked = node.args
        of = asked.args[0] if isinstance(asked, fx.Node) and asked.target is getattr else None
        return isinstance(self.values.get(value), Value) and isinstance(self.values.get(of), Value)

    def _type_of(self, dtype: Any) -> str | None:
        """The function that rounds to a type which is read from a value: "of_values", the convolution's, whatever that is; "of_results",
        which a parameter or an input may have widened. None: it is another type."""
        of = dtype.args[0] if isinstance(dtype, fx.Node) and dtype in self.values and dtype.args else None
        value = self.values.get(of)
        if not isinstance(value, Value) or dtype.target is not getattr or dtype.args[1] != "dtype":
            return None
        if not (widening := self._widening(value)):
            return "of_values"
        self.widened.append((of, widening))
        return "of_results"

    def _widening(self, value: Value) -> set[str]:
        """What may make a value's type another than the convolution's."""
        kinds = ("parameter", "buffer", "input")
        leaves = [n.attr for n in order([value.node]) if n.op == "leaf"]
        return {name for name, kind in leaves if kind in kinds and name != self.bias}

    def _has_type_of_results(self, value: Value) -> bool:
        """Of a value that leaves: is its type that which `of_results` rounds to?"""
        for of, widening in self.widened:
            before = {*order([self.values[of].node])}
            behind = [node for node in order([value.node]) if node not in before and node.op != "leaf"]
            if self._widening(value) != widening or any(node.op not in _KEEPING for node in behind):
                return False
        return True

    def _input(self, a: fx.Node, beside: fx.Node | None) -> Value:
        """A value from outside, as a leaf: of the shape of the operand beside it, or broadcast along some of its axes."""
        if a in self.inputs:
            return self.inputs[a]
        shape = self.context.shape(a)
        against = beside and self.context.shape(beside)
        if shape is None or against is None:
            raise NotAccepted(f"the shape of {a.name} isn't known")
        value = self.values[beside]
        axes = [*value.axes[max(0, len(value.axes) - len(shape)) :]] if shape else []
        if len(shape) > len(axes):
            raise NotAccepted(f"{a.name} has more axes than what it meets")
        for i, (own, size) in enumerate(zip(shape, against[len(against) - len(shape) :])):
            if own == 1:
                axes[i] = ""
            elif own != size or not axes[i]:
                raise NotAccepted(f"{a.name} {shape} isn't of the shape that it meets, {against}")
        name = f"input{len(self.inputs) + 1}"
        leaf = self.tail.graph.leaf(name, self._space(axes, value), "input")
        self.inputs[a] = Value(leaf, tuple(axes))
        return self.inputs[a]

    def _space(self, axes: Sequence[str], beside: Value) -> Space:
        positions = [t for t in axes if t in (*self.tail.spatial, "s")]
        if positions and positions != [t for t in beside.axes if t in (*self.tail.spatial, "s")]:
            raise NotAccepted("an input that varies along some of the positions' axes only")
        return Space("n" in axes, "c" in axes, beside.node.space.level if positions else "")

    # ---- in place
    def _check_in_place(self, node: fx.Node) -> None:
        """Writing into a value is as good as making a new one if nobody reads the old one later."""
        written = node.args[0]
        if written not in self.values:
            raise NotAccepted("it writes a value from outside in place")
        for alias in self._aliases(written):
            if any(self.context.place[user] > self.context.place[node] for user in alias.users):
                raise NotAccepted("in place, and what it overwrites is used later")

    def _aliases(self, node: fx.Node) -> set[fx.Node]:
        """Calls of this segment whose results may share the node's memory."""

        def below(a: fx.Node) -> list[fx.Node]:
            near = [a.args[0]] * self._is_alias(a) + [user for user in a.users if self._is_alias(user)]
            return [each for each in near if each in self.values]

        return {*walk([node], below)}

    def _is_alias(self, node: fx.Node) -> bool:
        if node.op == "call_module":
            own = ops.MODULES.get(type(self.context.attribute(node.target)))
            return own is not None and own.row in _ALIASES
        row = ops.find(node.target) if node.op in ("call_function", "call_method") else None
        return row is not None and row.name in _ALIASES

    def _writes_an_input(self, node: fx.Node) -> bool:
        """Does a call from outside write what this segment reads (or may it)?"""
        if node.op not in ("call_function", "call_method", "call_module") or not node.args:
            return False
        inplace = ops.is_inplace(node.target, node.kwargs) or (
            node.op == "call_method" and node.target.endswith("_")
        )
        if node.op == "call_module":
            inplace = getattr(self.context.attribute(node.target), "inplace", False)
        at, read = node.args[0], {self.x, *self.inputs}
        while inplace and isinstance(at, fx.Node):
            if at in read:
                return True
            at = at.args[0] if at.args and at.op in ("call_method", "call_function") else None
        return False

    # ---- the cut
    def cut(self) -> None:
        """Chooses the value that leaves: the one that keeps the most calls, of those from which alone something goes on."""
        best: tuple[int, fx.Node, set[fx.Node]] | None = None
        for node, value in self.values.items():
            if not isinstance(value, Value) or not self._canonical(value.axes):
                continue
            if not self._has_type_of_results(value):
                continue
            members = self._members(node)
            if self.first not in members:
                continue
            leaks = any(user not in members for m in members if m is not node for user in m.users)
            if not leaks and (best is None or len(members) > best[0]):
                best = len(members), node, members
        if self.conv.is_nothing and (best is None or best[0] < 2):
            raise NotAccepted("nothing follows the norm")
        if best is None or self.values[best[1]].node is self.values[self.conv_node].node:
            if not (self.context.bare and self.bias):
                raise NotAccepted(self._why(self.conv_node))
            best = 1, self.conv_node, {self.conv_node}
        _, self.result, self.members = best

    def _members(self, result: fx.Node) -> set[fx.Node]:
        """What the result is computed from within this segment."""
        found = {*walk([result], lambda node: [a for a in node.all_input_nodes if a in self.values])}
        return found - {self.x} if self.conv.is_nothing else found

    def _canonical(self, axes: tuple[str, ...]) -> bool:
        """In the order in which a result is written."""
        named = [a for a in axes if a]
        return named == sorted(named, key=("n", "c", "0", "1", "2", "s").index)

    def _why(self, result: fx.Node) -> str:
        for user in result.users:
            if user in self.stops:
                return f"{name_of(user)}: {self.stops[user]}"
        return "its result is used in several places" if len(result.users) > 1 else self.halt

    # ---- the segment
    def segment(self, index: int) -> Segment:
        node = self.values[self.result].node
        updates = [u for m in self._in_order() for u in self.updates.get(m, ())]
        roots = [node, *(n for u in updates for n in (u.mean, u.variance))]
        leaves = [n.attr for n in order(roots) if n.op == "leaf"]
        named = [name for name in self.attributes if any(name == leaf for leaf, _ in leaves)]
        kinds = dict(leaves)
        parameters = [n for n in named if kinds[n] == "parameter" and n != self.bias]
        self.inputs = {a: v for a, v in self.inputs.items() if v.node.attr[0] in kinds}
        fields = dict(
            graph=self.tail.graph,
            outputs=[node],
            axes=self.values[self.result].axes,
            conv=self.conv,
            inputs=[self.tail.graph.leaf("x", ELEMENTS, "input"), *(v.node for v in self.inputs.values())],
            parameters=[self.weight, *([self.bias] if self.bias else []), *parameters],
            buffers=[n for n in named if kinds[n] == "buffer"],
            scalars={n: self.attributes[n].node for n in named if kinds[n] == "scalar"},
            modules={m.target: self.modules[m.target] for m in self._in_order() if m.target in self.modules},
            random=[r for m in self._in_order() for r in self.random.get(m, ())],
            updates=updates,
            channels=self.channels,
        )
        eager = self._eager()
        return Segment(
            index=index, **fields, eager=eager, stopped=self._why(self.result), digest=digest_of(fields)
        )

    def _in_order(self) -> list[fx.Node]:
        return sorted(self.members, key=self.context.place.__getitem__)

    def input_nodes(self) -> list[fx.Node]:
        return [self.x, *self.inputs]

    def _eager(self) -> fx.Graph:
        """The members as a graph of their own. A value that comes in twice has two placeholders."""
        graph, copies = fx.Graph(), {}
        names = ["x", *(v.node.attr[0] for v in self.inputs.values())]
        for name, node in zip(names, self.input_nodes()):
            copies[node] = graph.placeholder(name)

        def copy(node: fx.Node) -> fx.Node:
            if node not in copies:
                if node not in self.members and node.op not in ("get_attr", "call_function", "call_method"):
                    raise AssertionError(f"{node} is no part of the segment")
                for a in node.all_input_nodes:
                    copy(a)
                copies[node] = graph.node_copy(node, copies.__getitem__)
            return copies[node]

        for node in self._in_order():
            copy(node)
        graph.output(copies[self.result])
        return graph


def name_of(node: fx.Node) -> str:
    if node.op in ("call_module", "call_method", "get_attr", "output"):
        return str(node.target)
    return getattr(node.target, "__name__", str(node.target))
