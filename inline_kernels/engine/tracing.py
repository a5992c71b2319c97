"""A model's forward as a torch.fx graph, without touching the model, torch's classes or other threads.

torch.fx's own tracer replaces nn.Module.__call__ for all threads while it runs. This one calls the forward of a shadow: for each module an
object of a class derived from the module's own, which shares its attributes and hands out proxies for tensors, `Named` floats for
attributes that are floats, and calls of leaf modules as nodes. Nothing is written to the model.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import inspect
import linecache
import operator
import random
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import fx, nn
from torch.fx.proxy import Scope, TracerBase
from torch.overrides import TorchFunctionMode

from . import asking
from .examples import FACTORIES, Values, example_of


class NotCaptured(Exception):
    """Why a model can't be captured: a sentence, with the line of its source where there is one."""


def watched() -> str | None:
    """Why no model can be captured now: who profiles this thread can't always be put back; or None."""
    return None if sys.getprofile() is None else "a profiler watches this thread, as tracing would"


class Named(float):
    """A float attribute of the model, that knows its qualified name. Whatever turns it into a plain number notes that."""

    name: str
    noted: set[str]

    def __new__(cls, value: float, name: str, noted: set[str]):
        self = super().__new__(cls, value)
        self.name, self.noted = name, noted
        return self

    def __reduce__(self):
        return float, (float(self),)


def _noting(name: str) -> Callable:
    plain = getattr(float, name)

    def method(self, *args):
        result = plain(self, *args)
        if result is not NotImplemented:
            self.noted.add(self.name)
        return result

    return method


for _name in (
    *("add", "sub", "mul", "truediv", "floordiv", "mod", "divmod", "pow"),
    *("radd", "rsub", "rmul", "rtruediv", "rfloordiv", "rmod", "rdivmod", "rpow"),
    *("neg", "pos", "abs", "bool", "int", "float", "round", "trunc", "floor", "ceil"),
    *("eq", "ne", "lt", "le", "gt", "ge", "hash", "format", "str", "repr"),
):
    setattr(Named, f"__{_name}__", _noting(f"__{_name}__"))
Named.is_integer, Named.as_integer_ratio, Named.hex = map(_noting, ("is_integer", "as_integer_ratio", "hex"))


class _Stopped(Exception):
    """Tracing can't go on, for this reason."""


class _Proxy(fx.Proxy):
    """torch.fx's records `x += y` as x + y, which is another thing where x is used again. To the user's code this one seems to be of the type of the value
    that it stands for, whose number of axes is known."""

    @property
    def __class__(self):
        here = sys._getframe(1)
        frame = asking.asker(here)
        return (
            type(self) if frame is None else self.tracer.seeming_class(self, frame, asking.is_pythons(here))
        )

    def __getattr__(self, name: str):
        if name == "_is_param":  # torch's isinstance of Parameter
            return getattr(self.__dict__.get("_tensor"), name, False)
        self.tracer.check(self, name, asking.asker(sys._getframe(1)))
        if name in ("ndim", "dim") and (axes := self.tracer.axes_of(self)) is not None:
            return axes if name == "ndim" else lambda: axes
        return _Attribute(self, name)

    @property
    def keys(self):  # which torch.fx's own proxies have
        self.tracer.check(self, "keys", asking.asker(sys._getframe(1)))
        return super().keys

    def __len__(self) -> int:
        """Of a shape."""
        axes = self.tracer.length_of(self)
        return super().__len__() if axes is None else axes


class _Attribute(_Proxy, fx.proxy.Attribute):
    """No node until it is used: as a method it is called."""


class _TensorProxy(_Proxy):
    """A parameter or buffer: its sizes are known, and may steer."""

    def __init__(self, node: fx.Node, tracer: _Tracer, tensor: torch.Tensor):
        super().__init__(node, tracer)
        self.__dict__["_tensor"] = tensor

    shape = property(lambda self: self._tensor.shape)
    ndim = property(lambda self: self._tensor.ndim)

    def size(self, *args):
        return self._tensor.size(*args)

    def dim(self):
        return self._tensor.dim()

    def numel(self):
        return self._tensor.numel()

    nelement = numel


def _in_place(target: Callable) -> Callable:
    return lambda self, other: self.tracer.create_proxy("call_function", target, (self, other), {})


for _name in ("iadd", "isub", "imul", "itruediv"):
    setattr(_Proxy, f"__{_name}__", _in_place(getattr(operator, _name)))


class _Tracer(TracerBase):
    def __init__(self, model: nn.Module, leaves: Collection[str], x_dim: int, examples: tuple | None):
        super().__init__()
        self.graph = fx.Graph()
        dtype = next((t.dtype for t in model.parameters() if t.is_floating_point()), torch.float32)
        given = examples or example_of(_channels(model), x_dim)
        self.values = Values(self.graph, lambda name: attribute(model, self.constants, name), given, dtype)
        self.stopped: _Stopped | None = None
        self.scope, self.module_stack, self.node_name_to_scope = (
            Scope("", None),
            {},
            {},
        )  # torch.fx's bookkeeping
        self.model, self.leaves = model, leaves
        self.names = {id(m): name for name, m in reversed(list(model.named_modules(remove_duplicate=False)))}
        self.tensors = {id(t): name for name, t in (*model.named_parameters(), *model.named_buffers())}
        self.constants: dict[str, torch.Tensor] = {}
        self.noted: set[str] = set()
        self.read: list[Named] = []
        self.inlined: list[str] = []
        self.stack: list[str] = []
        self.shadows: dict[int, nn.Module] = {}
        self.modes = _modes()

    # ---- what a forward asks of a value's type
    def stop(self, reason: str) -> None:
        """Whoever catches that, the trace isn't used."""
        self.stopped = self.stopped or _Stopped(reason)
        raise self.stopped

    def known(self, ask: Callable, node: fx.Node) -> Any:
        """What examples say; nobody looks meanwhile, which takes several times as long."""
        looks = sys.getprofile() == self.look
        if looks:
            sys.setprofile(None)
        try:
            return ask(node)
        finally:
            if looks:
                sys.setprofile(self.look)

    def seeming_class(self, proxy: _Proxy, frame, by_python: bool) -> type:
        """For isinstance, if that is what the user's frame calls. by_python: does code of Python's own ask, as functools.singledispatch does?"""
        asked = asking.classes(frame)
        if asked is None and not by_python:
            return type(proxy)
        kind = self.kind_of(proxy)
        if not asking.may_answer(asked or [], kind, type(proxy)):
            self.stop("its forward asks for the type of a value in a way that can't be followed")
        return kind

    def kind_of(self, proxy: _Proxy) -> type:
        if "_tensor" in proxy.__dict__:
            return type(proxy.__dict__["_tensor"])
        kind = self.known(self.values.kind_of, proxy.node)
        if kind is None:
            self.stop("its forward asks for the type of a value that isn't known beforehand")
        return kind

    def check(self, proxy: _Proxy, name: str, frame) -> None:
        """Raises AttributeError where the user's frame asks whether there is that attribute, and there is none."""
        if frame is not None and asking.asks_for(frame, name) and self.lacks(proxy, name):
            raise AttributeError(name)

    def lacks(self, proxy: _Proxy, name: str) -> bool:
        if "_tensor" in proxy.__dict__:
            return not hasattr(proxy.__dict__["_tensor"], name)
        found = asking.surely_lacks(self.kind_of(proxy), name)
        if found is None:
            self.stop(f"its forward asks whether a tensor has the attribute {name}")
        return found

    def axes_of(self, proxy: _Proxy) -> int | None:
        return self.known(self.values.axes_of, proxy.node)

    def length_of(self, proxy: _Proxy) -> int | None:
        """Of the shape of a tensor whose number of axes is known."""
        node = proxy.node
        if node.op != "call_function" or node.target is not getattr or node.args[1] != "shape":
            return None
        return self.known(self.values.axes_of, node.args[0])

    def look(self, frame, event: str, _) -> None:
        """As sys.setprofile calls it: may the user's code tell a proxy from what it stands for, unseen?"""
        if event == "call" and asking.is_users(frame) and (found := asking.obstacle(frame.f_code)):
            self.stop(f"{frame.f_code.co_name} {found}")

    def to_bool(self, proxy: fx.Proxy) -> bool:
        self.stopped = self.stopped or _Stopped(
            "symbolically traced variables cannot be used as inputs to control flow"
        )
        return super().to_bool(proxy)

    # ---- what torch.fx asks of a tracer
    def proxy(self, node: fx.Node) -> fx.Proxy:
        return _Proxy(node, self)

    def create_proxy(self, kind, target, args, kwargs, name=None, type_expr=None, proxy_factory_fn=None):
        if _modes() != self.modes:
            self.stop("gradients or autocast are switched inside of its forward")
        return super().create_proxy(kind, target, args, kwargs, name, type_expr, proxy_factory_fn)

    def create_arg(self, a):
        if isinstance(a, (Named, fx.Proxy)):
            return a if isinstance(a, Named) else a.node
        if isinstance(a, torch.Tensor):
            return self.get_attr(self.tensors.get(id(a)) or self.constant(a))
        if isinstance(a, nn.Module):
            self.stop("a module is passed as an argument")
        is_data = dataclasses.is_dataclass(a) and not isinstance(a, type)
        if is_data or isinstance(a, dict) and type(a) is not dict:
            return self.made_again(a)
        if (
            isinstance(a, (list, tuple))
            and type(a) not in (list, tuple, torch.Size)
            and not hasattr(a, "_fields")
        ):
            self.stop(f"its forward makes a {type(a).__name__}")
        return super().create_arg(a)

    def made_again(self, a: Any) -> fx.Node:
        """A call of the class of a dictionary, or of a dataclass, which makes an equal one. For torch.fx all dictionaries are of one class."""
        own = vars(a) if hasattr(a, "__dict__") else {}
        if dataclasses.is_dataclass(a):
            fields = [field.name for field in dataclasses.fields(a)]
            given = {name: getattr(a, name) for name in fields}
            if (
                {*own} <= {*fields}
                and all(field.init for field in dataclasses.fields(a))
                and _alike(type(a)(**given), a, fields)
            ):
                return self.create_node(
                    "call_function", type(a), (), {k: self.create_arg(v) for k, v in given.items()}
                )
        elif type(a) is collections.OrderedDict and not own:
            pairs = [(key, self.create_arg(value)) for key, value in a.items()]
            return self.create_node("call_function", type(a), (pairs,), {})
        self.stop(f"its forward makes a {type(a).__name__}")

    def constant(self, a: torch.Tensor) -> str:
        for name, known in self.constants.items():
            if known is a:
                return name
        name = f"_tensor_constant{len(self.constants)}"
        self.constants[name] = a
        return name

    def get_attr(self, name: str) -> fx.Node:
        return self.create_node("get_attr", name, (), {})

    # ---- shadows
    def shadow(self, module: nn.Module) -> nn.Module:
        found = self.shadows.get(id(module))
        if found is None:
            name = self.names.get(id(module), "")
            through = _SequenceShadow if type(module) in (nn.Sequential, nn.ModuleList) else _Shadow
            own = (_LeafShadow if self.is_leaf(module, name) else through, type(module))
            cls = type(type(module).__name__, own, {"__module__": type(module).__module__})
            found = self.shadows[id(module)] = cls.__new__(cls)
            found.__dict__.update(module.__dict__)
            found.__dict__["_shadow"] = _Known(self, module, name)
            found.__dict__["_modules"] = {
                k: None if m is None else self.shadow(m) for k, m in module._modules.items()
            }
        return found

    def is_leaf(self, module: nn.Module, name: str) -> bool:
        if name in self.leaves:
            return True
        if module is self.model:
            return False
        if isinstance(module, (nn.Sequential, nn.ModuleList, nn.ModuleDict)):
            return has_hooks(module)
        home = type(module).__module__
        return (
            home.startswith(("torch.nn.", "torch.ao.nn.", "torch._dynamo."))
            or isinstance(module, torch.jit.ScriptModule)
            or hasattr(module, "parametrizations")
            or "forward" in module.__dict__
            or has_hooks(module)
        )


def _channels(model: nn.Module) -> int:
    """Of the images that its first convolution takes."""
    first = next((m for m in model.modules() if isinstance(m, (nn.Conv2d, nn.Conv3d))), None)
    return first.in_channels if first else 2


def attribute(model: nn.Module, constants: Mapping[str, torch.Tensor], name: str) -> Any:
    """What a node get_attr or call_module is about."""
    return constants[name] if name in constants else operator.attrgetter(name)(model)


def _alike(one: Any, other: Any, fields: Sequence[str]) -> bool:
    """Have they the same objects, as attributes and, if they are dictionaries, as items?"""
    same = all(getattr(one, name) is getattr(other, name) for name in fields)
    if not isinstance(other, dict):
        return same
    return same and one.keys() == other.keys() and all(one[key] is other[key] for key in other)


def has_hooks(module: nn.Module) -> bool:
    return any(
        getattr(module, name, None)
        for name in ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    )


def _modes() -> tuple:
    return (
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        *(torch.is_autocast_enabled(d) for d in ("cpu", "cuda")),
    )


class _Known(NamedTuple):
    tracer: _Tracer
    module: nn.Module
    name: str

    def qualified(self, attribute: str) -> str:
        return f"{self.name}.{attribute}" if self.name else attribute


class _TensorsAreProxies(nn.Module):
    def __getattr__(self, name: str):
        value = super().__getattr__(name)
        if not isinstance(value, torch.Tensor):
            return value
        known = self.__dict__["_shadow"]
        node = known.tracer.get_attr(known.tracer.tensors.get(id(value)) or known.qualified(name))
        return _TensorProxy(node, known.tracer, value)


class _Shadow(_TensorsAreProxies):
    """Before a module's own class: a module that is traced through."""

    def __call__(self, *args, **kwargs):
        tracer, module, name = self.__dict__["_shadow"]
        tracer.stack.append(name)
        tracer.inlined.append(name)
        result = self.forward(*args, **kwargs)
        tracer.stack.pop()
        return result

    def __getattribute__(self, name: str):
        value = super().__getattribute__(name)
        if type(value) is float:
            known = super().__getattribute__("__dict__")["_shadow"]
            value = Named(value, known.qualified(name), known.tracer.noted)
            known.tracer.read.append(value)
        return value

    def __setattr__(self, name: str, value: Any):
        raise _Stopped(f"its forward writes self.{name}")

    def __delattr__(self, name: str):
        raise _Stopped(f"its forward deletes self.{name}")


class _SequenceShadow(_Shadow):
    """Whose slices are new ones with the same modules."""

    def __getitem__(self, index):
        found = [*self._modules.values()][index] if isinstance(index, slice) else None
        if found is None:
            return super().__getitem__(index)
        kind = type(self.__dict__["_shadow"].module)
        return kind(*found) if kind is nn.Sequential else kind(found)


class _LeafShadow(_TensorsAreProxies):
    """Before a module's own class: a module whose calls are nodes."""

    def __call__(self, *args, **kwargs):
        known = self.__dict__["_shadow"]
        return known.tracer.create_proxy("call_module", known.name, args, kwargs)

    forward = __call__


class _Mode(TorchFunctionMode):
    """Tensors made on the way are nodes, whether a proxy takes part or not."""

    def __init__(self, tracer: _Tracer):
        super().__init__()
        self.tracer = tracer

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func in FACTORIES:  # without a proxy they would be computed once, and drawn once
            return self.tracer.create_proxy("call_function", func, args, kwargs or {})
        return func(*args, **(kwargs or {}))


class Traced(NamedTuple):
    """`graph`: float attributes of the model are Named among its nodes' arguments; its get_attr and call_module targets are the model's names, or `constants`'. `values`: names of float attributes of which
    tracing used the value. `inlined`: names of the modules that were traced through. `opaque`: those of which that failed, with the
    reason. `optional`: arguments that were left at their default."""

    graph: fx.Graph
    constants: dict[str, torch.Tensor]
    values: frozenset[str]
    inlined: tuple[str, ...]
    opaque: dict[str, str]
    optional: dict[str, Any]
    examples: Values  # of its nodes


def trace(model: nn.Module, x_dim: int = 4, examples: tuple | None = None) -> Traced:
    """The model's forward as it is now, of examples (examples.py) if there is a call, else of an x of so many dimensions. A module that can't be traced
    through is called as a whole. Raises NotCaptured."""
    leaves: dict[str, str] = {}
    while True:
        tracer = _Tracer(model, leaves, x_dim, examples)
        drawn = _random_state()
        try:
            optional = _run(tracer)
        except Exception as error:
            if not tracer.stack or tracer.stack[-1] in leaves:
                raise NotCaptured(_sentence(model, error)) from error
            leaves[tracer.stack[-1]] = _sentence(model, error)
            continue
        if _random_state() != drawn:
            raise NotCaptured("its forward draws Python's or NumPy's random numbers")
        _name_results_of_writes(tracer.graph)
        values = tracer.noted | _used_by_value(tracer)
        inlined = tuple(dict.fromkeys(tracer.inlined))
        return Traced(
            tracer.graph, tracer.constants, frozenset(values), inlined, leaves, optional, tracer.values
        )


def _run(tracer: _Tracer) -> dict[str, Any]:
    if "forward" in tracer.model.__dict__:
        raise _Stopped("its forward was replaced on the object")
    optional, arguments = {}, []
    for name, parameter in inspect.signature(type(tracer.model).forward).parameters.items():
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD, parameter.KEYWORD_ONLY):
            if parameter.default is parameter.empty and parameter.kind == parameter.KEYWORD_ONLY:
                raise _Stopped(f"its forward needs the keyword {name}")
            continue
        arguments.append((name, parameter))
    inputs, keywords = [], {}
    count, names = len(tracer.values.by_place), {*tracer.values.by_name}  # of what the call gives
    for i, (name, parameter) in enumerate(arguments[1:]):
        if parameter.default is not parameter.empty and i >= max(count, 1) and name not in names:
            optional[name] = parameter.default
            continue
        proxy = tracer.create_proxy("placeholder", name, (), {})
        if tracer.values.kind_of(proxy.node) is type(None):  # which is all that it can be
            proxy = None
        if optional:  # which stand before it
            keywords[name] = proxy
        else:
            inputs.append(proxy)
    shadow = tracer.shadow(tracer.model)
    with _Mode(tracer), _looked_at(tracer):
        result = type(shadow).forward(shadow, *inputs, **keywords)
    if tracer.stopped:  # and the user's code went on
        raise tracer.stopped
    tracer.inlined.insert(0, "")
    tracer.create_node("output", "output", (tracer.create_arg(result),), {})
    return optional


@contextlib.contextmanager
def _looked_at(tracer: _Tracer) -> Iterator[None]:
    """The code that runs."""
    if reason := watched():
        raise _Stopped(reason)
    sys.setprofile(tracer.look)
    try:
        yield
    finally:
        sys.setprofile(None)


def _name_results_of_writes(graph: fx.Graph) -> None:
    """A method that works in place returns what it wrote: later uses of that are uses of the result."""
    place = {node: i for i, node in enumerate(graph.nodes)}
    for node in graph.nodes:
        in_place = node.op == "call_method" and node.target.endswith("_") and not node.target.endswith("__")
        if in_place and isinstance(node.args[0], fx.Node):
            later = [user for user in node.args[0].users if place[user] > place[node]]
            for user in later:
                user.replace_input_with(node.args[0], node)


def _used_by_value(tracer: _Tracer) -> set[str]:
    """Names of attributes of which no read reached the graph as a Named float."""
    reached: set[int] = set()

    def visit(a):
        if isinstance(a, Named):
            reached.add(id(a))
        return a

    for node in tracer.graph.nodes:
        fx.node.map_aggregate((node.args, node.kwargs), visit)
    return {a.name for a in tracer.read if id(a) not in reached}


def _random_state():
    numpy = sys.modules.get("numpy")
    legacy = numpy.random.get_state() if numpy is not None and hasattr(numpy, "random") else None
    return random.getstate(), legacy and (legacy[0], legacy[1].tobytes(), *legacy[2:])


def _sentence(model: nn.Module, error: Exception) -> str:
    """The error, and the line of the user's code that led to it."""
    line, at = "", error.__traceback__
    while at is not None:
        code = at.tb_frame.f_code
        name = code.co_filename
        if "/torch/" not in name and name != __file__:
            source = linecache.getline(name, at.tb_lineno).strip()
            line = f" at {name}:{at.tb_lineno}: {source}" if source else f" at {name}:{at.tb_lineno}"
        at = at.tb_next
    text = str(error).strip().split("\n")[0] or type(error).__name__
    return f"{type(model).__name__}{line}: {text}"
