"""The repository's own functions as definitions of one file, specialised: for a device, a dtype and sizes
that are known beforehand.

Program(is_ours, bound, known).build(root) gives the syntax trees of all of ours that `root` reaches, by name.
A _Specialiser goes through one function: a known value, an ast.Constant, stands in the place of its name;
what can be computed is; a branch never taken goes. A _Writer then writes the values that are left as text.
What a call gives is known in the function called, as far as all its calls agree: where a later one gives
something else, all is begun anew, with less known. (layout.py takes away what nobody reads then.)

What is known of an expression is
- a Value: all of it;
- a tuple: this of its items;
- a dict: this of its attributes and methods, by ".name" and ".name()", and of "len()"; "fields", its items'
  names; "class", whose methods become functions; "set", for a namespace that our functions fill;
- None: nothing.

It is for programs like ours. Expressions have no side effects, but for calls that stand alone; a parameter's
attributes stay what they are; our functions that have arguments, all of them known, give the same for the
same. A global of others is written as the place where Python finds it; Missing is raised where there is none.
"""

from __future__ import annotations

import ast
import builtins
import copy
import inspect
import itertools
import math
import re
import sys
import textwrap
from collections import Counter, namedtuple
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType, SimpleNamespace

import torch

from inline_kernels.export.layout import arguments_of, branch, copied, free, is_open, without_docstring

NOT_HERE = "ModelNew can't run: there is too little memory in a block of this GPU for that gradient"
_PLAIN = bool, int, float, str, type(None), type(...), torch.dtype, torch.memory_format
_PURE = {
    *map(vars(builtins).get, "abs all any bool dict divmod enumerate float int isinstance len list".split())
}
_PURE |= {*map(vars(builtins).get, "max min range round set sorted str sum tuple type zip".split())}
_PURE |= {each for each in vars(math).values() if callable(each)}
_DROPPED = ("torch.compiler.assume_constant_result",)  # decorators


class Missing(ValueError):
    """Something is needed that the file can't hold."""


class Name(str):
    """A value that is written as this name."""


@dataclass(frozen=True, eq=False)
class Value:
    value: object
    text: str = field(default="", repr=False)  # how an expression names it

    def __eq__(self, other):
        return type(other) is Value and type(self.value) is type(other.value) and self.value == other.value


class Program:
    """The definitions that a root function reaches.

    is_ours: is what a module of this name defines written out? bound: what stands for a global, by (module,
    name), or for a function. known: what is known of a function's parameters, by name, and of a class's instances.
    """

    def __init__(self, is_ours: Callable[[str], bool], bound: dict, known: dict[object, dict]):
        self.is_ours, self.bound, self.known = is_ours, bound, known
        self.given: dict[object, dict[str, object]] = {}  # of functions: in what all calls agree
        self.is_settled = False

    def build(self, root: Callable) -> dict[str, ast.stmt]:
        """The definitions, by their private names; `modules` are those to be imported."""
        while not self.is_settled:
            self.is_settled, self.names, self.definitions, self.results = True, {}, {}, {}
            self.name_of(root)
            written, self.modules = {}, set()
            while pending := [name for name in self.definitions if name not in written]:
                written |= {name: _Writer(self).visit(copied(self.definitions[name])) for name in pending}
        return {name: ast.fix_missing_locations(node) for name, node in written.items()}

    def name_of(self, thing: object, text: str = "") -> str:
        """The private name of a function, a class, or an object that changes; it is defined then."""
        if id(thing) not in self.names:
            name = "_" + (text or thing.__name__).lstrip("_")
            if name in self.definitions:
                name = f"_{thing.__module__.rpartition('.')[2]}{name}"
            self.names[id(thing)], self.definitions[name] = name, ast.Expr(ast.Constant(...))
            if inspect.isclass(thing):
                self.definitions[name] = self._class(thing, name)
            elif callable(thing):
                self.definitions[name] = self._function(thing, name, self.given.setdefault(thing, {}))
            else:
                self.definitions[name] = ast.Assign([ast.Name(name, ast.Store())], literal(thing))
        return self.names[id(thing)]

    # ------------------------------------------------------------------------------------------------ sources

    def source(self, function: Callable) -> ast.FunctionDef:
        text = getattr(function, "source", None) or inspect.getsource(inspect.unwrap(function))
        return ast.parse(textwrap.dedent(text)).body[0]

    def _function(self, function: Callable, name: str, given: dict[str, object]) -> ast.FunctionDef:
        node, known = self.source(function), {**given, **self.known.get(function, {})}
        node.name, node.returns = name, None
        node.decorator_list = [each for each in node.decorator_list if ast.unparse(each) not in _DROPPED]
        for _ in range(2):  # what a branch that went has set is known the second time
            node = _Specialiser(self, inspect.unwrap(function)).function(node, known)
        return node

    def _class(self, cls: type, name: str) -> ast.stmt:
        node, methods = ast.parse(inspect.getsource(cls)).body[0], []
        for each in [each for each in node.body if isinstance(each, ast.FunctionDef)]:
            method = vars(cls)[each.name]
            function = getattr(method, "__func__", None) or getattr(method, "fget", None) or method
            methods.append(self._function(function, each.name, self.given.get(function, {})))
        if hasattr(cls, "_fields"):
            defaults = [literal(each) for each in cls._field_defaults.values()]
            keywords = [ast.keyword("defaults", ast.Tuple(defaults, ast.Load()))] if defaults else []
            fields = [ast.Constant(name), ast.Constant(" ".join(cls._fields))]
            made = ast.Call(constant(namedtuple, "collections.namedtuple"), fields, keywords)
            if not methods:
                return ast.Assign([ast.Name(name, ast.Store())], made)
            bases = [made]
        else:
            scope = _Specialiser(self, SimpleNamespace(__globals__=vars(inspect.getmodule(cls))))
            bases = [scope.visit(each) for each in node.bases]
        return ast.ClassDef(name, bases, [], [*_sentence(node), *methods], [])

    def result(self, function: Callable, given: dict[str, object]) -> ast.expr | None:
        """What a call that gives this returns, if that is known."""
        key = function, repr(given)
        if key not in self.results:
            body = without_docstring(self._function(function, "", given).body)
            value = body[0].value if isinstance(body[0], ast.Return) else None
            self.results[key] = value if value is not None and is_literal(value) else None
        return self.results[key] and copied(self.results[key])

    def join(self, owner: dict, name: str, known: object) -> None:
        """Takes down what one more place gives for `name`."""
        common = _common(owner[name], known) if name in owner else known
        self.is_settled &= owner.get(name) == common
        owner[name] = common

    # ------------------------------------------------------------------------------------------------- values

    def resolve(self, names: dict, name: str) -> ast.Constant:
        """What a global name stands for, out of a module's."""
        value = self.bound.get((names["__name__"], name), names.get(name, getattr(builtins, name, Missing)))
        value = self.bound.get(value, value) if callable(value) else value
        if isinstance(value, (dict, list)):
            return constant(Name(self.name_of(value, name)))
        if isinstance(value, (ModuleType, Path)):  # the file has its kernels in itself
            return constant(value, value.__name__) if isinstance(value, ModuleType) else constant(None)
        text = "" if self.can_write(value) else qualified_name(value)
        if text is None:
            raise Missing(f"{names['__name__']}.{name} is nothing that the file can hold")
        return constant(value, text)

    def attribute(self, node: ast.Attribute) -> ast.expr:
        """An attribute of a known value. Of others' modules it is known where it is code or a dtype: settings
        may change."""
        owner = node.value.value
        value = getattr(owner, node.attr, Missing)
        if not isinstance(owner, ModuleType) or value is Missing:
            return constant(value) if self.can_write(value) and not callable(value) else node
        if self.is_ours(owner.__name__):
            return self.resolve(vars(owner), node.attr)
        value = self.bound.get(value, value) if callable(value) else value
        is_fixed = isinstance(value, (ModuleType, torch.dtype, torch.memory_format)) or owner is math
        return constant(value, f"{node.value.text}.{node.attr}") if callable(value) or is_fixed else node

    def is_code(self, value: object) -> bool:
        """Is it a function or a class of ours?"""
        is_code = inspect.isclass(value) or callable(value) and inspect.isfunction(inspect.unwrap(value))
        return is_code and self.is_ours(value.__module__)

    def can_write(self, value: object) -> bool:
        if isinstance(value, (tuple, list, dict)):
            return all(map(self.can_write, [*value, *(value.values() if isinstance(value, dict) else ())]))
        return type(value) in (*_PLAIN, Name) or self.is_code(value)

    def is_pure(self, node: ast.AST) -> bool:
        """Does a call of known values give the same whenever it is computed? Of methods this isn't known."""
        if not isinstance(node, ast.Call):
            return not isinstance(node, ast.Attribute)
        function = called(node)
        if self.is_code(function):
            return bool(node.args) and (hasattr(function, "_fields") or not inspect.isclass(function))
        return callable(function) and function in _PURE

    def value_of(self, node: ast.expr) -> ast.expr | None:
        """A node for what `node` gives, if all of it is known."""
        if free(node) or not all(map(self.is_pure, ast.walk(node))):
            return None
        names: dict[str, object] = {}

        class Lift(ast.NodeTransformer):
            def visit_Constant(self, node):
                names[f"_{len(names)}"] = node.value
                return ast.Name(f"_{len(names) - 1}", ast.Load())

        lifted = ast.fix_missing_locations(ast.Expression(Lift().visit(copied(node))))
        try:
            value = eval(compile(lifted, "known", "eval"), names)
        except Exception:  # it may be one that is never computed
            return None
        return literal(value) if self.can_write(value) else None

    def written(self, value: object, text: str = "") -> ast.expr:
        """The text of a known value, which others call `text`."""
        if isinstance(value, tuple):
            items = ast.Tuple([self.written(each) for each in value], ast.Load())
            return ast.Call(self.written(type(value)), items.elts, []) if hasattr(value, "_fields") else items
        if isinstance(value, float) and math.isinf(value):
            text = "math.inf"
        elif type(value) in _PLAIN[:-2]:
            return ast.Constant(value)
        elif isinstance(value, (torch.dtype, torch.memory_format)):
            text = repr(value)
        elif isinstance(value, Name) or self.is_code(value):
            return ast.Name(str(value) if isinstance(value, Name) else self.name_of(value), ast.Load())
        elif isinstance(value, ModuleType):
            text = value.__name__
        elif getattr(value, "__module__", None) == "builtins":
            text = value.__name__
        if text.partition(".")[0] != "torch" and ("." in text or isinstance(value, ModuleType)):
            self.modules.add(text.partition(".")[0])
            text = f"_{text}"
        return ast.parse(text, mode="eval").body


class _Writer(ast.NodeTransformer):
    """Writes known values as text."""

    def __init__(self, program: Program):
        self.program = program

    def visit_Call(self, node: ast.Call) -> ast.expr:
        if isinstance(node.func, ast.Constant):
            node.func = self.program.written(node.func.value, node.func.text)
        return self.generic_visit(node)

    def visit_Constant(self, node: ast.Constant) -> ast.expr:
        """Of a function that may be called from anywhere nothing is known."""
        if self.program.is_code(node.value) and not inspect.isclass(node.value):
            for parameter in inspect.signature(node.value).parameters:
                self.program.join(self.program.given.setdefault(node.value, {}), parameter, None)
        return self.program.written(node.value, getattr(node, "text", ""))


class _Specialiser(ast.NodeTransformer):
    """Goes through one function. `values`: what stands for a local name."""

    def __init__(self, program: Program, function: Callable):
        self.program, self.of = program, function
        self.values: dict[str, ast.expr] = {}
        self.local: set[str] = set()

    def function(self, node: ast.FunctionDef, known: dict[str, object]) -> ast.FunctionDef:
        """`node` with what is known of its parameters."""
        counts, given, nodes = stored(node), {*arguments_of(node)}, [*ast.walk(node)]
        self.local, self.once = {*counts}, {name for name, count in counts.items() if count == 1}
        self.steady = self.once & given  # parameters that stay what they are
        owners = [each.value for each in nodes if isinstance(each, (ast.Attribute, ast.Subscript))]
        self.changing = {each.id for each in owners if isinstance(each, ast.Name)}  # if they can be changed
        self.values = {name: at(ast.Name(name, ast.Load()), known.get(name)) for name in self.steady}
        node.decorator_list = [self.visit(each) for each in node.decorator_list]
        node.args = self.visit(node.args)
        node.body = [*_sentence(node), *(self.block(without_docstring(node.body)) or [ast.Return(None)])]
        return node

    def block(self, body: list[ast.stmt]) -> list[ast.stmt]:
        """`body`, up to its first return."""
        found: list[ast.stmt] = []
        for statement in body:
            one = self.visit(statement)
            found += one if isinstance(one, list) else [one] if one else []
            if found and isinstance(found[-1], (ast.Return, ast.Raise)):
                break
        return found

    def visit(self, node: ast.AST) -> ast.AST:
        node = super().visit(node)
        apart = ast.Constant, ast.Name, ast.Starred, ast.Lambda, ast.GeneratorExp
        if not isinstance(node, ast.expr) or isinstance(node, apart) or not is_read(node):
            return node
        return self.program.value_of(node) or node

    # --------------------------------------------------------------------------------------------- statements

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.FunctionDef:
        """One inside another."""
        node.returns, node.args = None, self.visit(node.args)
        node.body = self.block(without_docstring(node.body))
        return node

    def visit_arg(self, node: ast.arg) -> ast.arg:
        return ast.arg(node.arg)

    def visit_If(self, node: ast.If) -> ast.stmt | list[ast.stmt]:
        test = self.visit(node.test)
        if isinstance(test, ast.Constant):
            return self.block(node.body if test.value else node.orelse)
        try:
            body = self.block(node.body)
        except Missing:
            body = ast.parse(f"raise RuntimeError({NOT_HERE!r})").body
        return branch(test, body, self.block(node.orelse))

    def visit_For(self, node: ast.For) -> ast.stmt:
        return ast.For(self.visit(node.target), self.visit(node.iter), self.block(node.body), [])

    def visit_Expr(self, node: ast.Expr) -> ast.stmt | list:
        """Without an obstacle, alone or (is it there?, what it is), that never is."""
        self.generic_visit(node)
        if not isinstance(node.value, ast.Yield):
            return node
        test = (self.items(node.value.value) or [node.value.value])[0]
        return [] if isinstance(test, ast.Constant) and not test.value else node

    def visit_Assign(self, node: ast.Assign) -> ast.stmt | list:
        """Without those names, set once, whose values are known: these stand where the names do."""
        node.value = self.visit(node.value)
        if len(node.targets) > 1:
            node.targets = [self.visit(each) for each in node.targets]
            return node
        kept = []
        for target, value in self.pairs(node.targets[0], node.value):
            if isinstance(target, ast.Name) and target.id in self.once:
                if self.can_stand(target.id, value):
                    self.values[target.id] = value
                    continue
                self.values[target.id] = at(ast.Name(target.id, ast.Load()), getattr(value, "known", None))
            if isinstance(target, ast.Attribute):
                target = self.visit(target)
                self.set_attribute(getattr(target.value, "known", None), target.attr, value)
            if not isinstance(target, ast.Name) or target.id != getattr(value, "id", None):
                kept.append((target, value))
        if len(kept) < 2:
            return ast.Assign([kept[0][0]], kept[0][1]) if kept else []
        names, values = map(list, zip(*kept))
        return ast.Assign([ast.Tuple(names, ast.Store())], ast.Tuple(values, ast.Load()))

    def pairs(self, target: ast.expr, value: ast.expr) -> list[tuple[ast.expr, ast.expr]]:
        """The names of an assignment with their values, as far as these are apart."""
        values = self.items(value) if isinstance(target, (ast.Tuple, ast.List)) else None
        if values is None:
            return [(target, value)]
        names = [*target.elts]
        for i in [i for i, each in enumerate(names) if isinstance(each, ast.Starred)]:
            end = len(values) - (len(names) - i - 1)
            rest = ast.List(values[i:end], ast.Load())
            if all(isinstance(each, ast.Constant) for each in rest.elts):
                rest = constant(tuple([each.value for each in rest.elts]))
            names[i], values = names[i].value, [*values[:i], rest, *values[end:]]
        return [pair for each, own in zip(names, values, strict=True) for pair in self.pairs(each, own)]

    def can_stand(self, name: str, value: ast.expr) -> bool:
        """Can `value` be written wherever its name is? A module's would be longer; how many a parameter has,
        stays."""
        if isinstance(value, ast.List):
            return name not in self.changing and is_literal(value)
        if called(value) is len:
            value = getattr(value.args[0], "value", value.args[0])
        is_known = isinstance(value, ast.Constant) and not isinstance(value.value, ModuleType)
        return is_known or isinstance(value, ast.Name) and value.id in self.once

    def set_attribute(self, owner: object, name: str, value: ast.expr) -> None:
        """Takes down what an attribute of an instance of ours is set to."""
        if isinstance(owner, dict) and "set" in owner:
            known = known_of(value)
            self.program.join(owner, f".{name}", known if isinstance(known, Value) else None)

    # -------------------------------------------------------------------------------------------- expressions

    def visit_Name(self, node: ast.Name) -> ast.expr:
        if not is_read(node):
            return node
        if node.id in self.values:
            return copied(self.values[node.id])
        return node if node.id in self.local else self.program.resolve(self.of.__globals__, node.id)

    def visit_Attribute(self, node: ast.Attribute) -> ast.expr:
        node.value = self.visit(node.value)
        if isinstance(node.value, ast.Constant) and is_read(node):
            return self.program.attribute(node)
        known = details(node.value)
        return at(node, known.get(f".{node.attr}")) if known and is_read(node) else node

    def visit_Subscript(self, node: ast.Subscript) -> ast.expr:
        self.generic_visit(node)
        known, cut = details(node.value), node.slice
        parts = [cut.lower, cut.upper, cut.step] if isinstance(cut, ast.Slice) else [cut]
        if ".shape" in known and isinstance(cut, ast.Slice):
            return at(node, known) if known["len()"] is None else node  # some samples
        items = self.items(node.value)
        if items is None or not all(part is None or isinstance(part, ast.Constant) for part in parts):
            return node
        values = [part and part.value for part in parts]
        found = items[slice(*values)] if isinstance(cut, ast.Slice) else items[values[0]]
        if not isinstance(found, list):
            return found
        is_worse = known and any(getattr(each, "known", None) is None for each in found)
        return node if is_worse else ast.Tuple(found, ast.Load())

    def items(self, node: ast.expr) -> list[ast.expr] | None:
        """The items of what is a tuple or a list, as far as they are apart."""
        if isinstance(node, ast.Constant) and isinstance(node.value, tuple):
            return [literal(each) for each in node.value]
        if isinstance(node, (ast.Tuple, ast.List)):
            return None if any(isinstance(each, ast.Starred) for each in node.elts) else [*node.elts]
        known = getattr(node, "known", None)
        if isinstance(known, tuple):
            return [at(_item(node, i), each) for i, each in enumerate(known)]
        fields = details(node).get("fields")
        return fields and [
            at(ast.Attribute(node, each, ast.Load()), known.get(f".{each}")) for each in fields
        ]

    def visit_Tuple(self, node: ast.Tuple | ast.List) -> ast.expr:
        self.generic_visit(node)
        node.elts = self.unpacked(node.elts) if is_read(node) else node.elts
        return node

    visit_List = visit_Tuple

    def unpacked(self, nodes: list[ast.expr]) -> list[ast.expr]:
        """The items in the place of *(…), but of an instance."""
        found = []
        for node in nodes:
            is_many = isinstance(node, ast.Starred) and not details(node.value)
            items = self.items(node.value) if is_many else None
            found += [node] if items is None else items
        return found

    def visit_Dict(self, node: ast.Dict) -> ast.expr:
        """With the items of those dicts in their places that are written out."""
        self.generic_visit(node)
        pairs = []
        for key, value in zip(node.keys, node.values):
            is_open = key is None and isinstance(value, ast.Dict)
            pairs += zip(value.keys, value.values) if is_open else [(key, value)]
        return ast.Dict(*map(list, zip(*pairs))) if pairs else node

    def visit_BinOp(self, node: ast.BinOp) -> ast.expr:
        """Without a factor of 1 or a term of 0 on the right."""
        self.generic_visit(node)
        neutral = {ast.Mult: 1, ast.FloorDiv: 1, ast.Add: 0}.get(type(node.op))
        right = getattr(node.right, "value", None)
        return node.left if type(right) is int and right == neutral else node

    def visit_BoolOp(self, node: ast.BoolOp) -> ast.expr:
        """Up to what decides, without what doesn't."""
        decisive, values, last = isinstance(node.op, ast.Or), [], None
        for each in node.values:
            last = self.visit(each)
            is_known = isinstance(last, ast.Constant)
            if is_known and bool(last.value) == decisive and (not values or last.value is decisive):
                return last
            is_reason = each is node.values[-1] and is_known and type(last.value) is str
            if not is_known or bool(last.value) == decisive or is_reason:
                values.append(last)
            if is_known and bool(last.value) == decisive:
                break
        return ast.BoolOp(node.op, values) if len(values) > 1 else values[0] if values else last

    def visit_IfExp(self, node: ast.IfExp) -> ast.expr:
        test = self.visit(node.test)
        if isinstance(test, ast.Constant):
            return self.visit(node.body if test.value else node.orelse)
        return ast.IfExp(test, self.visit(node.body), self.visit(node.orelse))

    # -------------------------------------------------------------------------------------------------- calls

    def visit_Call(self, node: ast.Call) -> ast.expr:
        known, function = details(self.values.get("self")), node.func
        if isinstance(function, ast.Attribute) and ast.unparse(function.value) == "super()" and known:
            node.func = self.super_method(known["class"], function.attr)
            node.args.insert(0, ast.Name("self", ast.Load()))
        node.func = self.visit(node.func)
        node.args = self.unpacked([self.visit(each) for each in node.args])
        node.keywords = [self.visit(each) for each in node.keywords]
        if isinstance(node.func, ast.Attribute):
            return self.call_method(node)
        function, first = called(node), node.args[0] if node.args else None
        known = getattr(first, "known", None)
        if function is len and known is not None:
            return at(node, Value(len(known)) if isinstance(known, tuple) else known.get("len()"))
        if function is getattr and len(node.args) == 2 and isinstance(node.args[1], ast.Constant):
            return self.visit_Attribute(ast.Attribute(first, node.args[1].value, ast.Load()))
        if self.program.is_code(function) and not self.program.value_of(node):
            return self.call_class(node, function) if inspect.isclass(function) else self.call(node, function)
        return node

    def super_method(self, cls: type, name: str) -> ast.Constant:
        """What `super().name` is in a method of `cls`."""
        owner = next(i for i, each in enumerate(cls.__mro__) if self.of in vars(each).values())
        method = next(vars(each)[name] for each in cls.__mro__[owner + 1 :] if name in vars(each))
        return constant(self.program.bound.get(method, method))

    def call_method(self, node: ast.Call) -> ast.expr:
        known, name = details(node.func.value), node.func.attr
        if name == "contiguous":  # without the default
            node.keywords = [k for k in node.keywords if not is_value(k.value, torch.contiguous_format)]
        if not known:
            return node
        method = getattr(known.get("class"), name, None)
        method = self.program.bound.get(method, method)
        if self.program.is_code(method):
            return self.call(ast.Call(constant(method), [node.func.value, *node.args], node.keywords), method)
        return at(node, known if name == "contiguous" else known.get(f".{name}()"))

    def call_class(self, node: ast.Call, cls: type) -> ast.expr:
        """An instance. Of a namespace those attributes are known that are always set to the same."""
        if issubclass(cls, SimpleNamespace):
            instance = self.program.known.setdefault(cls, {"set": True})
            initial = vars(cls).get("__init__")
            own = inspect.signature(initial).parameters if initial else {None: None}
            for each in [each for each in node.keywords if each.arg not in own]:
                self.set_attribute(instance, each.arg, each.value)
            if initial:
                self.join(initial, self.note(node, initial, 1))
        return at(node, self.program.known.get(cls))

    def call(self, node: ast.Call, function: Callable) -> ast.expr:
        """A call of a function of ours; or what it returns, if that is known."""
        given = self.note(node, function)
        if (result := self.program.result(function, given)) is not None:
            return result
        self.join(function, given)
        self.program.name_of(function)
        return node

    def join(self, function: Callable, given: dict[str, object]) -> None:
        for name, known in given.items():
            self.program.join(self.program.given.setdefault(function, {}), name, known)

    def note(self, node: ast.Call, function: Callable, skipped: int = 0) -> dict[str, object]:
        """What is known of what a call gives for each parameter."""
        source, defaults = self.program.source(function), inspect.signature(function).parameters
        names, counts = arguments_of(source), stored(source)
        apart = itertools.takewhile(lambda each: not isinstance(each, ast.Starred), node.args)
        values = dict(zip([each.arg for each in source.args.args][skipped:], apart))
        values |= {each.arg: each.value for each in node.keywords}
        for each in () if is_open(node) else set(names) - set(values):
            if defaults[each].default is not inspect._empty:
                values[each] = constant(defaults[each].default)
        return {each: known_of(values.get(each)) if counts[each] == 1 else None for each in names}


# ----------------------------------------------------------------------------------------------------- values


def qualified_name(value: object) -> str | None:
    """Where others' function or class is found, whatever it is called here."""
    module, name = getattr(value, "__module__", None), getattr(value, "__name__", None)
    found = getattr(sys.modules.get(module), name or "", Missing)
    return f"{module}.{name}" if value is not Missing and found is value else None


def constant(value: object, text: str = "") -> ast.Constant:
    node = ast.Constant(value)
    node.text = text
    return node


def called(node: ast.AST) -> object:
    """The known function or class that `node` calls, or None."""
    return node.func.value if isinstance(node, ast.Call) and isinstance(node.func, ast.Constant) else None


def details(node: ast.AST) -> dict[str, object]:
    """What is known of a node's attributes and methods."""
    known = getattr(node, "known", None)
    return known if isinstance(known, dict) else {}


def literal(value: object) -> ast.expr:
    """A value as a node; what can be changed is written out."""
    if isinstance(value, dict):
        return ast.Dict([*map(literal, value)], [*map(literal, value.values())])
    if isinstance(value, list):
        return ast.List([*map(literal, value)], ast.Load())
    if isinstance(value, tuple) and any(isinstance(each, (list, dict)) for each in value):
        return ast.Tuple([*map(literal, value)], ast.Load())
    return constant(value)


def is_literal(node: ast.expr) -> bool:
    parts = [each for each in ast.walk(node) if isinstance(each, ast.expr)]
    return all(isinstance(each, (ast.Constant, ast.List, ast.Dict)) for each in parts)


def is_value(node: ast.expr, value: object) -> bool:
    return isinstance(node, ast.Constant) and node.value is value


def is_read(node: ast.expr) -> bool:
    return isinstance(getattr(node, "ctx", ast.Load()), ast.Load)


def at(node: ast.expr, known: object) -> ast.expr:
    """`node` with what is known of it."""
    if isinstance(known, Value):
        return constant(known.value, known.text)
    node = copy.copy(node)
    node.known = known
    return node


def known_of(node: ast.expr) -> object:
    if isinstance(node, ast.Constant):
        return Value(node.value, getattr(node, "text", ""))
    if isinstance(node, (ast.Tuple, ast.List)):
        is_open = any(isinstance(each, ast.Starred) for each in node.elts)
        return None if is_open or not any(map(known_of, node.elts)) else tuple(map(known_of, node.elts))
    return getattr(node, "known", None)


def _common(a: object, b: object) -> object:
    """What is known of both."""
    if a == b:
        return a
    if isinstance(a, dict) and isinstance(b, dict):
        return {name: common for name in a if (common := _common(a[name], b.get(name))) is not None}
    if isinstance(a, tuple) and isinstance(b, tuple) and len(a) == len(b):
        items = tuple(map(_common, a, b))
        return items if any(items) else None
    return None


def stored(node: ast.FunctionDef) -> Counter:
    """How often each local name is set, by a parameter, too."""
    nodes = [*ast.walk(node)]
    names = [each.id for each in nodes if isinstance(each, ast.Name) and not is_read(each)]
    names += [each.asname or each.name for each in nodes if isinstance(each, ast.alias)]
    names += [each.name for each in nodes if isinstance(each, ast.FunctionDef) and each is not node]
    return Counter(names + [each.arg for each in nodes if isinstance(each, ast.arg)])


def _item(node: ast.expr, index: int) -> ast.expr:
    if index == 0 and isinstance(node, ast.Attribute) and node.attr == "shape":
        return ast.Call(constant(len), [node.value], [])
    return ast.Subscript(node, ast.Constant(index), ast.Load())


def _sentence(node: ast.FunctionDef | ast.ClassDef) -> list[ast.stmt]:
    """The first sentence of a docstring."""
    text = " ".join((ast.get_docstring(node) or "").split())
    sentence = re.match(r".*?[.?:](?=\s|$)", text)
    return [ast.Expr(ast.Constant(re.sub(r":$", ".", sentence[0])))] if sentence else []
