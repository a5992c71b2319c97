"""What a captured forward hangs on: found while it is traced (`recorded`), and compared at each call (`Guards`)."""

from __future__ import annotations

import copy
import dis
import inspect
import itertools
import sys
import types
from collections.abc import Iterable, Sequence
from operator import attrgetter, is_, is_not

import numpy
import torch
from torch import Tensor, nn

from . import support
from .support import HAS_VERSIONS, dict_version

# What nn.Module itself keeps in an instance; the mode of it is for forward to read.
_INTERNAL = frozenset(vars(nn.Module())) - {"training"}
_METHODS = frozenset(vars(nn.Module)) - {"forward"}
_TABLES = "_parameters", "_buffers", "_modules"
_SMALL = 1 << 16  # elements of a tensor of which tracing gets a copy
_BY_VALUE = (bool, int, float, str, bytes, tuple, torch.Size)
_MOST_HELD = 10_000  # values of containers in containers that are watched


# ----------------------------------------------------------------------------------------------------------------- recording


def recorded(model: nn.Module, base: type) -> tuple[nn.Module, dict[str, set[str]]]:
    """A shadow of `model`, of the class `base`, to be traced, and what tracing will fill: by the path of each module whose forward may be
    traced through, the names of the attributes that were read.

    The shadow shares Parameters and torch.nn's modules with `model`. Whatever forward assigns, it assigns to the shadow, whose
    lists and small tensors are copies.
    """
    reads: dict[str, set[str]] = {}
    known: dict[int, nn.Module] = {}

    def shadow(module: nn.Module | None, path: str) -> nn.Module | None:
        if module is None or id(module) in known:
            return known.get(id(module))
        container = type(module) in (nn.Sequential, nn.ModuleList, nn.ModuleDict)
        if path and not container and is_torch_module(module):
            return known.setdefault(id(module), module)
        names = reads.setdefault(path, set())
        cls = plain_class(type(module)) if path else base
        made = known[id(module)] = object.__new__(cls if container else _recording(cls, names))
        inner = f"{path}." if path else ""
        fields = {key: _copied(value) for key, value in vars(module).items()}
        fields["_modules"] = {key: shadow(child, inner + key) for key, child in module._modules.items()}
        fields["_parameters"] = dict(module._parameters)
        fields["_buffers"] = {key: _copied(buffer) for key, buffer in module._buffers.items()}
        vars(made).update(fields)
        return made

    return shadow(model, ""), reads


def plain_class(cls: type) -> type:
    """The user's class of a fused module's; another one is its own."""
    return getattr(cls, "_unfused", cls)


def is_torch_module(module: nn.Module) -> bool:
    return _is_torchs(type(module))


def _recording(cls: type, names: set[str]) -> type:
    def __getattribute__(self, name):
        if name not in _INTERNAL and not name.startswith("__") and not _is_tracers(name):
            names.add(name)
        return super(made, self).__getattribute__(name)

    body = {
        "__getattribute__": __getattribute__,
        "__module__": cls.__module__,
        "__qualname__": cls.__qualname__,
    }
    made = types.new_class(cls.__name__, (cls,), {}, lambda namespace: namespace.update(body))
    return made


def _is_tracers(name: str) -> bool:
    """Is it the tracer that reads a method of nn.Module, as named_modules, for its own sake?"""
    if name not in _METHODS:
        return False
    frame = sys._getframe(2)
    while (
        frame.f_globals.get("__name__") == nn.Module.__module__ or frame.f_code.co_name == "__getattribute__"
    ):
        frame = frame.f_back
    return frame.f_globals.get("__name__", "").startswith(("torch.fx.", "inline_kernels."))


def _copied(value):
    """Of what a traced forward might change in place, a copy."""
    if type(value) in (list, dict, set):
        return copy.copy(value)
    if type(value) is Tensor and value.numel() <= _SMALL and not value.requires_grad:
        return value.detach().clone()
    return value


class SideEffects:
    """What tracing wrote to a shadow, whose modules' paths `reads` has, and tracing.py didn't refuse: into lists, dictionaries, tensors."""

    def __init__(self, shadow: nn.Module, reads: Iterable[str]):
        self.shadow, self.paths = shadow, tuple(reads)
        self.states = self._states()

    def found(self) -> str | None:
        """The first, as a reason to leave forward to eager; or None."""
        for path, now in self._states().items():
            before = self.states[path]
            for name in {**before, **now}:
                if before.get(name) != now.get(name):
                    return f"forward changes {path and path + '.'}{name}"
        return None

    def _states(self) -> dict[str, dict]:
        return {path: _state(self.shadow.get_submodule(path)) for path in self.paths}


def _state(module: nn.Module) -> dict[str, tuple]:
    fields = vars(module)
    tables = {
        **{k: v for k, v in fields.items() if k not in _INTERNAL},
        **fields["_buffers"],
        **fields["_parameters"],
    }
    return {name: (id(value), _content(value)) for name, value in tables.items()}


def _held(value) -> list | None:
    """What a list, a dictionary, a set, a small array or a plain object, as settings are kept in, holds; None: nothing that can change in place."""
    if isinstance(value, dict):
        return [*value, *value.values()]
    if isinstance(value, (list, set)):
        return [*value]
    if isinstance(value, numpy.ndarray):
        return [value.shape, value.tobytes()] if value.size <= _SMALL and not value.dtype.hasobject else None
    cls = type(value)
    plain = not (_is_torchs(cls) or issubclass(cls, (nn.Module, Tensor, type)) or callable(value))
    fields = getattr(value, "__dict__", None) if plain else None
    return [*fields, *fields.values()] if isinstance(fields, dict) else None


def _containers(values: Iterable) -> list[tuple[object, list]]:
    """Those of them, and of the lists, dictionaries, sets and arrays in them, that can change in place, each with what it holds."""
    found, seen, count, left = [], set(), 0, [*values]
    while left and count <= _MOST_HELD:
        value = left.pop()
        if id(value) not in seen and (held := _held(value)) is not None:
            seen.add(id(value))
            found.append((value, held))
            count += len(held)
            left += [each for each in held if isinstance(each, (dict, list, set, tuple, numpy.ndarray))]
        elif isinstance(value, tuple):
            left += value
    return found


def _content(value) -> object:
    """What can change in place of a list or tensor."""
    if isinstance(value, Tensor):
        return None if value.is_inference() else value._version
    if isinstance(value, dict):
        return [(key, id(each)) for key, each in value.items()]
    return [*map(id, value)] if isinstance(value, (list, set)) else None


# ----------------------------------------------------------------------------------------------------------------- comparing


class Guards:
    """A model as it was when it was captured. `holds(model)`: is it still that?

    Compared are: attributes that forward read, by identity or, numbers and tuples, by value, and what properties give; what lists,
    dictionaries and plain objects among them hold; of torch.nn's modules that kernels
    replace all attributes; which modules there are, which of them have hooks, their classes with their forwards; which parameters and
    buffers there are; global names and enclosed values that functions use. A version of each dictionary says that nothing in it was
    assigned, as long as it is the module's. `numbers` are read anew where something was; `changed` is called where they are others. There is no way from here to the
    model itself.
    """

    def __init__(
        self,
        model: nn.Module,
        base: type,
        reads: dict[str, set[str]],
        replaced: set[str],
        numbers: set[str],
    ):
        """reads: of `recorded`. replaced: paths of the modules that kernels replace. numbers: paths of attributes that only kernels read."""
        modules = dict(model.named_modules(remove_duplicate=False))
        self.cls = type(model)
        self.modules = [module for path, module in modules.items() if path]
        self.classes = [*map(type, self.modules)]
        self.fields = [vars(model), *map(vars, self.modules)]
        self._pairs = [*zip(self.modules, self.fields[1:])]
        self._values: list[tuple[dict, tuple, list]] = []  # a table, keys, what they were
        self._whole: list[tuple[dict, list, list]] = []  # a table, all of its keys, which of them are None
        self._contents: list[tuple[object, list]] = []
        self._properties: list[
            tuple[str, str, object]
        ] = []  # a module's path, a property's name, what it gave
        self._by_path = {path: module for path, module in modules.items() if path}
        self._of_classes = {plain_class(cls): set() for cls in {*self.classes, base}}
        self.looked_at: list[tuple[str, object]] = []  # for tracers: paths of attributes, and what they were
        self.hooked_at: list[str] = []
        tables = []  # of hooks: of all modules but the model itself, whose own run around forward
        for path, module in modules.items():
            inner, fields = f"{path}." if path else "", vars(module)
            tables += support.hooks_of(module) if path else ()
            if path in reads:
                names = [name for name in sorted(reads[path]) if inner + name not in numbers]
                cls = plain_class(type(module)) if path else base
                self._of_classes[cls] |= {name for name in names if name not in fields}
                made = [name for name in names if replaced and isinstance(getattr(cls, name, None), property)]
                values = [(path, name, getattr(module, name, None)) for name in made]
                self._properties += [each for each in values if _is_simple(each[2])]
            elif path in replaced:
                names = [name for name in fields if name not in _INTERNAL and inner + name not in numbers]
                self._whole.append((fields, [*fields], None))
            else:
                continue
            self._remember(fields, names)
            self.looked_at += [
                (inner + name, fields[name]) for name in names if _is_simple(fields.get(name, fields))
            ]
            self.hooked_at += [f"{inner}{name}" for name in ("_forward_hooks", "_forward_pre_hooks") if path]
            self._values.append((fields, _TABLES, [fields[table] for table in _TABLES]))
            if path in reads:  # what is added to them may count
                self._whole.append((module._modules, [*module._modules], None))
                self._values.append((module._modules, tuple(module._modules), [*module._modules.values()]))
            for table in filter(None, (module._parameters, module._buffers)):
                self._whole.append((table, [*table], [value is None for value in table.values()]))
        self._hooks, self._hooked = (
            tables,
            [*map(bool, tables)] if any(tables) else None,
        )  # None: there are none
        self._classes = [*self._of_classes]
        self._forwards = [cls.forward for cls in self._classes]
        self._of_classes = [*filter(None, map(_class_guard, self._of_classes, self._of_classes.values()))]
        self._sources = {
            name: (modules[(path := name.rpartition("."))[0]], path[2]) for name in sorted(numbers)
        }
        # The model's own numbers: its dictionary, so that there is no way to the model.
        own = {name for name in self._sources if "." not in name}
        self._sources = {
            name: source if name not in own else (None, name) for name, source in self._sources.items()
        }
        self.numbers = self._read(model)
        owners = [
            (type(owner if owner is not None else model), last) for owner, last in self._sources.values()
        ]
        self._computed = any(isinstance(getattr(cls, last, None), property) for cls, last in owners)
        functions = [cls.forward for cls in self._classes if not _is_torchs(cls)]
        functions += [f for _, _, values in self._of_classes for f in values if inspect.isfunction(f)]
        self._outside = [*_outside(functions).items()]
        self._contents += _containers(value for _, value in self._outside)
        tables = [table for table, *_ in [*self._values, *self._whole]]
        tables += [vars(owner if owner is not None else model) for owner, _ in self._sources.values()]
        self._tables = [*{id(table): table for table in tables}.values()]
        self._versions = HAS_VERSIONS and [*map(dict_version, self._tables)]

    def _remember(self, table: dict, keys: Sequence[str]) -> None:
        values = [table.get(key) for key in keys]
        self._values.append((table, tuple(keys), values))
        self._contents += _containers(values)

    def _at(self, path: str, model: nn.Module) -> nn.Module:
        return self._by_path[path] if path else model

    def _read(self, model: nn.Module) -> dict[str, float]:
        return {
            name: getattr(owner if owner is not None else model, last)
            for name, (owner, last) in self._sources.items()
        }

    def holds(self, model: nn.Module, changed) -> bool:
        if type(model) is not self.cls or [*map(type, self.modules)] != self.classes:
            return False
        if model.__dict__ is not self.fields[0]:
            return False
        for module, fields in self._pairs:  # three times as fast as vars
            if module.__dict__ is not fields:
                return False
        if any(self._hooks) if self._hooked is None else [*map(bool, self._hooks)] != self._hooked:
            return False
        if [cls.forward for cls in self._classes] != self._forwards:
            return False
        for cls, get, were in self._of_classes:
            if any(map(is_not, get(cls), were)):
                return False
        for (name, where), was in self._outside:
            if not _is_same(_value_of(name, where), was):
                return False
        for value, held in self._contents:
            now = _held(value)
            if len(now) != len(held) or not all(map(_is_same, now, held)):
                return False
        for path, name, was in self._properties:
            if not _is_same(getattr(self._at(path, model), name, None), was):
                return False
        versions = HAS_VERSIONS and [*map(dict_version, self._tables)]
        if versions and versions == self._versions and not self._computed:
            return True
        if not self._unchanged():
            return False
        numbers = self._read(model)
        if any([type(numbers[name]) is not type(was) for name, was in self.numbers.items()]):
            return False
        if any([numbers[name] != was for name, was in self.numbers.items()]):
            self.numbers = numbers
            changed()
        self._versions = versions
        return True

    def _unchanged(self) -> bool:
        for table, keys, values in self._values:
            now = [*map(table.get, keys)]
            if not all(map(is_, now, values)) and not all(map(_is_same, now, values)):
                return False
        for table, keys, nones in self._whole:
            if [*table] != keys or (nones and [value is None for value in table.values()] != nones):
                return False
        return True


def _is_same(now, was) -> bool:
    if now is was or type(now) is not type(was) or type(now) not in _BY_VALUE:
        return now is was
    if isinstance(now, tuple):  # of tensors, say, which compare to no truth
        return len(now) == len(was) and all(map(_is_same, now, was))
    return now == was


class _Where:
    """A module's names, or a cell; told apart by identity."""

    __slots__ = ("table",)

    def __init__(self, table):
        self.table = table

    def __hash__(self):
        return id(self.table)

    def __eq__(self, other):
        return self.table is other.table


def _value_of(name: str, where: _Where):
    if isinstance(where.table, dict):
        return where.table.get(name)
    try:
        return where.table.cell_contents
    except ValueError:  # an empty one
        return None


def _outside(functions: Sequence) -> dict[tuple[str, _Where], object]:
    """What those functions, and whatever of the user's they call by name, find outside: globals and what they enclose; of modules but Python's
    and torch's own, numbers, words and containers of names that the code has; nothing of classes."""
    found: dict[tuple[str, _Where], object] = {}
    seen, stack = set(), [f for f in functions if inspect.isfunction(f)]
    while stack:
        function = stack.pop()
        if function in seen or function.__module__.partition(".")[0] == "torch":
            continue
        seen.add(function)
        names = [(name, _Where(function.__globals__)) for name in _globals(function.__code__)]
        names += zip(function.__code__.co_freevars, map(_Where, function.__closure__ or ()))
        found |= _settings(function.__code__, [_value_of(*each) for each in names])
        for name, where in names:
            value = _value_of(name, where)
            if value is None or isinstance(value, (types.ModuleType, type, nn.Module)):
                continue
            found[name, where] = value
            if inspect.isfunction(value):
                stack.append(value)
    return found


def _settings(code: types.CodeType, values: Iterable) -> dict[tuple[str, _Where], object]:
    """Numbers, words and containers that the user's modules among the values, and in those, have by names of the code."""
    found, names, left, seen = {}, set().union(*[each.co_names for each in _codes(code)]), [*values], set()
    while left:
        module = left.pop()
        if not isinstance(module, types.ModuleType) or module in seen:
            continue
        if module.__name__.partition(".")[0] in ("torch", "numpy", *sys.stdlib_module_names):
            continue
        seen.add(module)
        having = {name: value for name in names if (value := vars(module).get(name)) is not None}
        left += having.values()
        for name, value in having.items():
            if _is_simple(value) or isinstance(value, (dict, list, set, numpy.ndarray)):
                found[name, _Where(vars(module))] = value
    return found


def _globals(code: types.CodeType) -> set[str]:
    """Names of those that it reads; co_names has those of attributes, too."""
    read = itertools.chain(*map(dis.get_instructions, _codes(code)))
    return {each.argval for each in read if each.opname in ("LOAD_GLOBAL", "LOAD_NAME")}


def _codes(code: types.CodeType) -> list[types.CodeType]:
    """It, and what is defined in it."""
    inner = [_codes(each) for each in code.co_consts if isinstance(each, types.CodeType)]
    return [code, *itertools.chain(*inner)]


def _is_torchs(cls: type) -> bool:
    return cls.__module__.partition(".")[0] == "torch"


def _is_simple(value) -> bool:
    return type(value) in (bool, int, float, str) or (type(value) is tuple and all(map(_is_simple, value)))


def _class_guard(cls: type, names: set[str]) -> tuple[type, attrgetter, tuple] | None:
    """The class, what gets its attributes of those names, and what they are; without those that it hasn't, or makes at each look. None:
    there is none left."""
    steady = [name for name in sorted(names) if getattr(cls, name, 0) is getattr(cls, name, 1)]
    if not steady:
        return None
    get = attrgetter(*steady, steady[0])  # of two at least it gives a tuple
    return cls, get, get(cls)
