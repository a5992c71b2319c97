"""The repository's own functions as definitions of one file, specialised: for a device, a dtype and sizes that are known beforehand.

A function is taken from its source, and gone through once, with what is known of its parameters. A known value stands for the
name that had it; what can be computed is, by the functions themselves; a branch never taken goes, as does a name that nobody reads. What
a call gives is known in the function that it calls, as far as all calls give the same: where a later call gives something else, all is
begun anew, knowing less.

Of what isn't known itself something may be known: `known` of an expression is a Value; or a tuple of what is known of its items; or a dict of
what is known of its attributes and methods, by ".name" and ".name()"; or None.

It is for programs like ours: expressions have no side effects but in calls that stand alone or on torch, parameters' attributes stay what
they are, and our functions of numbers alone give the same for the same.
"""

from __future__ import annotations

import ast
import builtins
import copy
import inspect
import math
import re
import textwrap
from collections import Counter, namedtuple
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType, SimpleNamespace

import torch

WIDTH = 110
_PLAIN = bool, int, float, str, type(None), type(...), torch.dtype, torch.memory_format
_PURE = "abs all any bool dict divmod enumerate float getattr int isinstance len list max min range round set sorted str sum tuple type zip"
_PURE = {getattr(builtins, name) for name in _PURE.split()} | {
    each for each in vars(math).values() if callable(each)
}
_DROPPED = ("torch.compiler.assume_constant_result",)  # decorators


class Missing(Exception):
    """Something that a cell does not hold."""


class Name(str):
    """A value that is written as this name."""


NOT_HERE = "ModelNew can't run: there is too little memory in a block of this GPU for that gradient"


@dataclass(frozen=True)
class Value:
    value: object
    text: str = field(default="", compare=False)  # how an expression names it

    def __eq__(self, other):
        return type(other) is Value and type(self.value) is type(other.value) and self.value == other.value


class Program:
    """The definitions that a root function reaches.

    is_ours: is a function or class to be written out? bound: values of modules' globals, by module and name, for those that they have.
    sources: functions' sources in the place of their own. known: what is known of a parameter, by function and name, and of instances, by class.
    """

    def __init__(self, is_ours: Callable, bound: dict, sources: dict, known: dict):
        self.is_ours, self.bound, self.sources, self.known = is_ours, bound, sources, known
        self.given: dict[object, dict[str, object]] = {}  # what all calls of a function give it

    def build(self, root: Callable) -> dict[str, ast.stmt]:
        self.is_settled = False
        while not self.is_settled:
            self.is_settled, self.names, self.definitions, self.results, self.modules = (
                True,
                {},
                {},
                {},
                set(),
            )
            self.name_of(root)
            written = {}
            while pending := [name for name in self.definitions if name not in written]:
                for name in pending:
                    written[name] = ast.fix_missing_locations(
                        _Writer(self).visit(copied(self.definitions[name]))
                    )
        return _cleaned(written, self.name_of(root))

    def name_of(self, thing: object, text: str = "") -> str:
        """The private name of a function, a class, or an object that changes; it is defined then."""
        key = id(thing)
        if key not in self.names:
            name = "_" + (text or thing.__name__).lstrip("_")
            if name in self.definitions:
                name = f"_{thing.__module__.rpartition('.')[2]}{name}"
            self.names[key], self.definitions[name] = name, ast.Expr(ast.Constant(...))
            if inspect.isclass(thing):
                self.definitions[name] = self._class(thing, name)
            elif callable(thing):
                self.definitions[name] = self._function(thing, name)
            else:
                self.definitions[name] = ast.Assign([ast.Name(name, ast.Store())], literal(thing))
        return self.names[key]

    def definition(self, function: Callable) -> ast.FunctionDef:
        return self.definitions[self.name_of(function)]

    def applied(self, call: ast.Call) -> ast.expr | None:
        """The expression that a call of a function of ours is, if it is one."""
        function = call.func.value if isinstance(call.func, ast.Constant) else None
        if inspect.isclass(function) or not self.is_code(function):
            return None
        return applied(self.definition(function), self.stripped(call))

    def signature(self, called: Callable) -> tuple[Callable, list[str]]:
        """The function that runs when `called` is, and its positional parameters; without `self` of a class."""
        function = vars(called).get("__init__") if inspect.isclass(called) else called
        names = [each.arg for each in self.source(function).args.args] if function else []
        return function, names[inspect.isclass(called) :]

    def stripped(self, call: ast.Call) -> ast.Call:
        """A call without what it is known to give."""
        function, positional = self.signature(call.func.value)
        gone = {name for name, known in self.given.get(function, {}).items() if isinstance(known, Value)}
        starred = next(
            (i for i, each in enumerate(call.args) if isinstance(each, ast.Starred)), len(call.args)
        )
        kept = [
            i
            for i in range(len(call.args))
            if i >= min(starred, len(positional)) or positional[i] not in gone
        ]
        return ast.Call(
            call.func, [call.args[i] for i in kept], [each for each in call.keywords if each.arg not in gone]
        )

    # ------------------------------------------------------------------------------------------------------------ sources

    def source(self, function: Callable) -> ast.FunctionDef:
        text = self.sources.get(function) or inspect.getsource(inspect.unwrap(function))
        return ast.parse(textwrap.dedent(text)).body[0]

    def result(self, function: Callable, given: dict[str, object]) -> ast.expr | None:
        """What a call gives, if that is known, where these are given."""
        key = function, repr(given)
        if key not in self.results:
            body = without_docstring(self._function(function, function.__name__, given).body)
            value = body[0].value if len(body) == 1 and isinstance(body[0], ast.Return) else None
            self.results[key] = value if value is not None and is_literal(value) else None
        return self.results[key] and copied(self.results[key])

    def _function(self, function: Callable, name: str, given: dict | None = None) -> ast.FunctionDef:
        node, plain = self.source(function), inspect.unwrap(function)
        node.name, node.returns = name, None
        node.decorator_list = [each for each in node.decorator_list if ast.unparse(each) not in _DROPPED]
        given = self.given.setdefault(function, {}) if given is None else given
        known = {**given, **{key[1]: value for key, value in self.known.items() if key[:1] == (function,)}}
        once = _Specialiser(self, plain).function(node, known)
        return _Specialiser(self, plain).function(
            once, known
        )  # what a branch alone has set again is now known

    def _class(self, cls: type, name: str) -> ast.ClassDef:
        node = ast.parse(inspect.getsource(cls)).body[0]
        scope = _Specialiser(self, SimpleNamespace(__globals__=vars(inspect.getmodule(cls)), __qualname__=""))
        node.name, node.bases, methods = name, [scope.visit(each) for each in node.bases], []
        for each in node.body:
            if isinstance(each, ast.FunctionDef):
                method = vars(cls)[each.name]
                function = getattr(method, "__func__", None) or getattr(method, "fget", None) or method
                methods.append(self._function(function, each.name))
        if hasattr(cls, "_fields"):
            defaults = [literal(each) for each in cls._field_defaults.values()]
            arguments = [ast.Constant(name), ast.Constant(" ".join(cls._fields))]
            keywords = [ast.keyword("defaults", ast.Tuple(defaults, ast.Load()))] if defaults else []
            made = ast.Call(constant(namedtuple, "collections.namedtuple"), arguments, keywords)
            if not methods:
                return ast.Assign([ast.Name(name, ast.Store())], made)
            node.bases = [made]
        node.body = [*_sentence(node), *methods]
        return node

    # -------------------------------------------------------------------------------------------------------------- values

    def resolve(self, names: dict, name: str) -> ast.Constant:
        """What a global name stands for, out of a module's."""
        value = self.bound.get((names["__name__"], name), names.get(name, getattr(builtins, name, Missing)))
        value = self.bound.get(value, value) if callable(value) else value
        if isinstance(value, Path):
            value = None  # a cell has its kernels in itself
        if isinstance(value, (dict, list)):
            return constant(Name(self.name_of(value, name)))
        if isinstance(value, ModuleType):
            return constant(value, value.__name__)
        if value is Missing or not (self.can_write(value) or hasattr(value, "__name__")):
            raise Missing(f"{names['__name__']}.{name} is nothing that a cell holds")
        module = getattr(value, "__module__", None)
        return constant(value, name if module in (None, "builtins") else f"{module}.{name}")

    def attribute(self, node: ast.Attribute) -> ast.expr:
        """An attribute of a known value. Of a module of others it is known where it is code or a dtype: settings may change."""
        owner, name = node.value.value, node.attr
        if isinstance(owner, Name) or not hasattr(owner, name):
            return node
        if isinstance(owner, ModuleType) and self.is_ours(SimpleNamespace(__module__=owner.__name__)):
            return self.resolve(vars(owner), name)
        value = getattr(owner, name)
        if not isinstance(owner, ModuleType):
            return constant(value) if self.can_write(value) and not self.is_code(value) else node
        fixed = (
            callable(value)
            or owner is math
            or isinstance(value, (ModuleType, torch.dtype, torch.memory_format))
        )
        value = self.bound.get(value, value) if callable(value) else value
        return constant(value, f"{node.value.text}.{name}") if fixed else node

    def can_write(self, value: object) -> bool:
        if isinstance(value, (tuple, list)):
            return all(map(self.can_write, value))
        if isinstance(value, dict):
            return all(map(self.can_write, [*value, *value.values()]))
        return type(value) in _PLAIN or isinstance(value, Name) or self.is_code(value)

    def is_code(self, value: object) -> bool:
        return (
            (inspect.isfunction(inspect.unwrap(value)) or inspect.isclass(value)) and self.is_ours(value)
            if callable(value)
            else False
        )

    def is_pure(self, node: ast.AST) -> bool:
        """Does a call, or an attribute, of known values give the same whenever it is computed?"""
        if isinstance(node, ast.Attribute):
            of_tuple = isinstance(node.value, ast.Constant) and isinstance(node.value.value, (str, tuple))
            return of_tuple or node.attr in ("items", "values", "keys")
        if not isinstance(node, ast.Call) or isinstance(node.func, ast.Attribute):
            return True
        function = node.func.value if isinstance(node.func, ast.Constant) else None
        if self.is_code(function):
            return bool(node.args) and (hasattr(function, "_fields") or not inspect.isclass(function))
        return callable(function) and function in _PURE

    def value_of(self, node: ast.expr) -> ast.expr | None:
        """A node for what `node` gives, if all of it is known."""
        names: dict[str, object] = {}
        if free(node) or not all(map(self.is_pure, ast.walk(node))):
            return None

        class Lift(ast.NodeTransformer):
            def visit_Constant(self, node):
                names[f"_{len(names)}"] = node.value
                return ast.Name(f"_{len(names) - 1}", ast.Load())

        lifted = ast.fix_missing_locations(ast.Expression(Lift().visit(copied(node))))
        try:
            value = eval(compile(lifted, "known", "eval"), names)
        except Exception:  # it may be one that is never computed
            return None
        return literal(value) if self.can_write(value) and not inspect.isclass(value) else None

    def join(self, owner: dict, name: str, known: object) -> None:
        """Takes down what one more place gives for `name`."""
        if name not in owner:
            owner[name], self.is_settled = known, self.is_settled and known is None
        elif (common := _common(owner[name], known)) != owner[name]:
            owner[name], self.is_settled = common, False

    def written(self, node: ast.Constant) -> ast.expr:
        """The text of a known value."""
        value, text = node.value, getattr(node, "text", "")

        def write(each: object) -> ast.expr:
            return self.written(constant(each))

        if isinstance(value, Name):
            return ast.Name(str(value), ast.Load())
        if isinstance(value, float) and math.isinf(value):
            self.modules.add("math")
            return ast.parse("_math.inf" if value > 0 else "-_math.inf", mode="eval").body
        if isinstance(value, (torch.dtype, torch.memory_format)):
            return ast.parse(repr(value), mode="eval").body
        if type(value) in _PLAIN:
            return ast.Constant(value)
        if isinstance(value, tuple):
            items = [write(each) for each in value]
            return (
                ast.Call(write(type(value)), items, [])
                if hasattr(value, "_fields")
                else ast.Tuple(items, ast.Load())
            )
        if self.is_code(value):
            if inspect.isfunction(inspect.unwrap(value)) and not getattr(node, "is_called", False):
                for parameter in inspect.signature(value).parameters:
                    self.join(self.given.setdefault(value, {}), parameter, None)
            return ast.Name(self.name_of(value), ast.Load())
        root, _, rest = text.partition(".")
        if getattr(value, "__module__", None) == "builtins":
            return ast.Name(value.__name__, ast.Load())
        if root != "torch":
            self.modules.add(root)
            text = f"_{text}"
        return ast.parse(text, mode="eval").body


class _Specialiser(ast.NodeTransformer):
    """Goes through one function. `values`: what stands for a local name."""

    def __init__(self, program: Program, function: Callable):
        self.program, self.of = program, function
        self.values: dict[str, ast.expr] = {}
        self.local: set[str] = set()

    def function(self, node: ast.FunctionDef, known: dict[str, object]) -> ast.FunctionDef:
        """`node` with what is known of its parameters."""
        nodes, arguments = [*ast.walk(node)], node.args
        counts = _stored(node)
        self.local = {*counts}
        self.once = {name for name, count in counts.items() if count == 1}
        self.steady = self.once & {each.arg for each in ast.walk(arguments) if isinstance(each, ast.arg)}
        self.changing = {
            n.value.id
            for n in nodes
            if isinstance(n, (ast.Attribute, ast.Subscript)) and isinstance(n.value, ast.Name)
        }
        node.decorator_list = [self.visit(each) for each in node.decorator_list]
        for name in [each for each in self.steady if known.get(each) is not None]:
            self.values[name] = at(ast.Name(name, ast.Load()), known[name])
        for values in (arguments.defaults, arguments.kw_defaults):
            values[:] = [value and self.visit(value) for value in values]
        gone = {name for name in self.steady if isinstance(known.get(name), Value)}

        def keep(each: ast.arg) -> bool:
            return each.arg not in gone

        first = len(arguments.args) - len(arguments.defaults)
        arguments.defaults = [d for a, d in zip(arguments.args[first:], arguments.defaults) if keep(a)]
        arguments.kw_defaults = [d for a, d in zip(arguments.kwonlyargs, arguments.kw_defaults) if keep(a)]
        arguments.args, arguments.kwonlyargs = (
            [*filter(keep, arguments.args)],
            [*filter(keep, arguments.kwonlyargs)],
        )
        for each in [n for n in ast.walk(arguments) if isinstance(n, ast.arg)]:
            each.annotation = None
        body = without_docstring(node.body)
        node.body = [*_sentence(node), *(self.block(body) or [ast.Return(None)])]
        while _without_unread(node):
            pass
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
        is_read = isinstance(node, ast.expr) and isinstance(getattr(node, "ctx", ast.Load()), ast.Load)
        if not is_read or isinstance(
            node, (ast.Constant, ast.Name, ast.Starred, ast.Lambda, ast.GeneratorExp)
        ):
            return node
        return self.program.value_of(node) or node

    # --------------------------------------------------------------------------------------------------------- statements

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
        orelse = self.block(node.orelse)
        if not body:
            test, body, orelse = ast.UnaryOp(ast.Not(), test), orelse, []
        return ast.If(test, body, orelse) if body else []

    def visit_For(self, node: ast.For) -> ast.stmt | list[ast.stmt]:
        """A loop of one turn is its body."""
        node.iter = self.visit(node.iter)
        if isinstance(node.iter, ast.Tuple) and len(node.iter.elts) == 1:
            return self.block([ast.Assign([node.target], node.iter.elts[0]), *node.body])
        return ast.For(self.visit(node.target), node.iter, self.block(node.body), [])

    def visit_Expr(self, node: ast.Expr) -> ast.stmt | list:
        """Without an obstacle, alone or (is it there?, what it is), that never is."""
        self.generic_visit(node)
        value = node.value.value if isinstance(node.value, ast.Yield) else None
        test = value.elts[0] if isinstance(value, ast.Tuple) else value
        if isinstance(test, ast.Constant) and not (
            test.value[0] if isinstance(test.value, tuple) else test.value
        ):
            return []
        return node

    def visit_Assign(self, node: ast.Assign) -> ast.stmt | list:
        """Without those names, set once, whose values are known or have a name already: these stand where the names do."""
        node.value = self.visit(node.value)
        if len(node.targets) > 1:
            node.targets = [self.visit(each) for each in node.targets]
            return node
        kept = []
        for target, value in self.pairs(node.targets[0], node.value):
            if isinstance(target, ast.Name) and target.id in self.once and self.can_stand(target.id, value):
                self.values[target.id] = value
                continue
            if (
                isinstance(target, ast.Name)
                and target.id in self.once
                and getattr(value, "known", None) is not None
            ):
                self.values[target.id] = at(ast.Name(target.id, ast.Load()), value.known)
            if isinstance(target, ast.Attribute):
                target = self.visit(target)
                owner = getattr(target.value, "known", None)
                if isinstance(owner, dict) and ".()" in owner:
                    self.program.join(owner, f".{target.attr}", only_value(value))
            if ast.dump(target).replace("Store", "Load") != ast.dump(value):
                kept.append((target, value))
        return _assigned(kept)

    def pairs(self, target: ast.expr, value: ast.expr) -> Iterable[tuple[ast.expr, ast.expr]]:
        """The names of an assignment with their values, as far as these are apart."""
        items = self.items(value) if isinstance(target, (ast.Tuple, ast.List)) else None
        if items is None:
            return [(target, value)]
        names, values = [*target.elts], items
        starred = [i for i, each in enumerate(names) if isinstance(each, ast.Starred)]
        if starred:
            i, end = starred[0], len(values) - (len(names) - starred[0] - 1)
            rest = values[i:end]
            steady = all(isinstance(each, ast.Constant) for each in rest)
            whole = constant(tuple([each.value for each in rest])) if steady else ast.List(rest, ast.Load())
            names[i], values = names[i].value, [*values[:i], whole, *values[end:]]
        return [pair for each, own in zip(names, values, strict=True) for pair in self.pairs(each, own)]

    def can_stand(self, name: str, value: ast.expr) -> bool:
        if isinstance(value, ast.List):
            return name not in self.changing and all(isinstance(each, ast.Constant) for each in value.elts)
        if isinstance(value, ast.Call) and isinstance(value.func, ast.Constant) and value.func.value is len:
            value = getattr(value.args[0], "value", value.args[0])
        if isinstance(value, ast.Constant):
            return not isinstance(value.value, ModuleType)
        return isinstance(value, ast.Name) and value.id in self.steady

    # -------------------------------------------------------------------------------------------------------- expressions

    def visit_Name(self, node: ast.Name) -> ast.expr:
        if not isinstance(node.ctx, ast.Load):
            return node
        if node.id in self.values:
            return copied(self.values[node.id])
        return node if node.id in self.local else self.program.resolve(self.of.__globals__, node.id)

    def visit_Attribute(self, node: ast.Attribute) -> ast.expr:
        node.value = self.visit(node.value)
        if not isinstance(node.ctx, ast.Load):
            return node
        if isinstance(node.value, ast.Constant):
            return self.program.attribute(node)
        known = getattr(node.value, "known", None)
        return at(node, known.get(f".{node.attr}")) if isinstance(known, dict) else node

    def visit_Subscript(self, node: ast.Subscript) -> ast.expr:
        self.generic_visit(node)
        index, known = self.program.value_of(node.slice) or node.slice, getattr(node.value, "known", None)
        if isinstance(node.slice, ast.Slice):
            parts = [node.slice.lower, node.slice.upper, node.slice.step]
            index = slice(*[part and getattr(part, "value", None) for part in parts])
            if not all(part is None or isinstance(part, ast.Constant) for part in parts):
                return (
                    at(node, known)
                    if isinstance(known, dict) and ".shape" in known and known["len()"] is None
                    else node
                )
        elif isinstance(index, ast.Constant) and type(index.value) is int:
            index = index.value
        else:
            return node
        if (items := self.items(node.value)) is None:
            return node
        found = items[index]
        if not isinstance(found, list):
            return found
        if isinstance(known, dict) and any(getattr(each, "known", None) is None for each in found):
            return node
        return ast.Tuple(found, ast.Load())

    def items(self, node: ast.expr) -> list[ast.expr] | None:
        """The items of what is a tuple or a list, as far as they are apart."""
        if isinstance(node, ast.Constant) and isinstance(node.value, tuple):
            return [constant(each) for each in node.value]
        if isinstance(node, (ast.Tuple, ast.List)):
            return None if any(isinstance(each, ast.Starred) for each in node.elts) else [*node.elts]
        known = getattr(node, "known", None)
        if isinstance(known, dict) and "fields" in known:
            return [self.visit_Attribute(ast.Attribute(node, name, ast.Load())) for name in known["fields"]]
        if isinstance(known, tuple):
            return [at(_item(node, i), each) for i, each in enumerate(known)]
        if isinstance(node, ast.Call) and (whole := self.program.applied(node)) is not None:
            return self.items(whole)
        return None

    def unpacked(self, nodes: list[ast.expr]) -> list[ast.expr]:
        found = []
        for node in nodes:
            items = self.items(node.value) if isinstance(node, ast.Starred) else [node]
            whole = isinstance(node, ast.Starred) and isinstance(getattr(node.value, "known", None), dict)
            found += [node] if items is None or whole else items
        return found

    def visit_Tuple(self, node: ast.Tuple | ast.List) -> ast.expr:
        self.generic_visit(node)
        if isinstance(node.ctx, ast.Load):
            node.elts = self.unpacked(node.elts)
        return node

    visit_List = visit_Tuple

    def visit_Dict(self, node: ast.Dict) -> ast.expr:
        """With the items of those dicts in their places that are written out."""
        self.generic_visit(node)
        pairs = []
        for key, value in zip(node.keys, node.values):
            value = (
                self.program.applied(value) or value if key is None and isinstance(value, ast.Call) else value
            )
            pairs += (
                zip(value.keys, value.values)
                if key is None and isinstance(value, ast.Dict)
                else [(key, value)]
            )
        return ast.Dict([key for key, _ in pairs], [value for _, value in pairs])

    def visit_JoinedStr(self, node: ast.JoinedStr) -> ast.expr:
        self.generic_visit(node)
        for i, part in enumerate(node.values):
            value = getattr(part, "value", None) if isinstance(part, ast.FormattedValue) else None
            if isinstance(value, ast.Constant) and not part.format_spec and type(value.value) in _PLAIN:
                node.values[i] = ast.Constant(str(value.value))
        return node

    def visit_BinOp(self, node: ast.BinOp) -> ast.expr:
        """Without a factor of 1 or a term of 0."""
        self.generic_visit(node)
        left, right = (
            getattr(each, "value", None) if isinstance(each, ast.Constant) else None
            for each in (node.left, node.right)
        )
        neutral = {ast.Mult: 1, ast.FloorDiv: 1, ast.Add: 0, ast.Sub: 0}.get(type(node.op))
        if type(right) is int and right == neutral:
            return node.left
        return (
            node.right
            if type(left) is int and left == neutral and isinstance(node.op, (ast.Mult, ast.Add))
            else node
        )

    def visit_BoolOp(self, node: ast.BoolOp) -> ast.expr:
        decisive, values = isinstance(node.op, ast.Or), []
        for each in node.values:
            value = self.visit(each)
            if isinstance(value, ast.Constant) and bool(value.value) == decisive:
                return (
                    value if not values or value.value is decisive else ast.BoolOp(node.op, [*values, value])
                )
            if (
                not isinstance(value, ast.Constant)
                or each is node.values[-1]
                and value.value not in (True, False, None)
            ):
                values.append(value)
            last = value
        return ast.BoolOp(node.op, values) if len(values) > 1 else values[0] if values else last

    def visit_IfExp(self, node: ast.IfExp) -> ast.expr:
        test = self.visit(node.test)
        if isinstance(test, ast.Constant):
            return self.visit(node.body if test.value else node.orelse)
        return ast.IfExp(test, self.visit(node.body), self.visit(node.orelse))

    # -------------------------------------------------------------------------------------------------------------- calls

    def visit_Call(self, node: ast.Call) -> ast.expr:
        if (
            "self" in self.values
            and isinstance(node.func, ast.Attribute)
            and ast.unparse(node.func.value) == "super()"
        ):
            method = self.super_method(node.func.attr)
            node.func, node.args = (
                constant(self.program.bound.get(method, method)),
                [ast.Name("self", ast.Load()), *node.args],
            )
        node.func = self.visit(node.func)
        node.args = self.unpacked([self.visit(each) for each in node.args])
        node.keywords = [self.visit(each) for each in node.keywords]
        node.keywords = [each for keyword in node.keywords for each in _spread(keyword)]
        if isinstance(node.func, ast.Attribute):
            return self.method_call(node)
        if not isinstance(node.func, ast.Constant):
            return node
        function, first = node.func.value, node.args[0] if node.args else None
        if function is len and (items := getattr(first, "known", None)) is not None:
            count = Value(len(items)) if isinstance(items, tuple) else items.get("len()")
            return at(node, count)
        if function is tuple and isinstance(first, (ast.Tuple, ast.List)):
            return ast.Tuple(first.elts, ast.Load())
        if function is getattr and len(node.args) == 2 and isinstance(node.args[1], ast.Constant):
            return self.visit_Attribute(ast.Attribute(first, node.args[1].value, ast.Load()))
        if self.program.is_code(function) and not self.program.value_of(node):
            return self.call_class(node, function) if inspect.isclass(function) else self.call(node, function)
        return node

    def super_method(self, name: str) -> Callable:
        """What `super().name` is in a method of a model."""
        classes = self.values["self"].known["class"].__mro__
        owner = next(i for i, each in enumerate(classes) if self.of in vars(each).values())
        return next(vars(each)[name] for each in classes[owner + 1 :] if name in vars(each))

    def method_call(self, node: ast.Call) -> ast.expr:
        known, name = getattr(node.func.value, "known", None), node.func.attr
        if name == "contiguous" and all(
            getattr(each.value, "value", 0) is torch.contiguous_format for each in node.keywords
        ):
            node.keywords = []  # the default
        if not isinstance(known, dict):
            return node
        method = getattr(known.get("class"), name, None)
        method = self.program.bound.get(method, method)
        if inspect.isfunction(method) and self.program.is_code(method):
            node.func, node.args = constant(method), [node.func.value, *node.args]
            return self.call(node, method)
        return at(node, known if name == "contiguous" else known.get(f".{name}()"))

    def call_class(self, node: ast.Call, cls: type) -> ast.expr:
        instance = self.program.known.get((cls,))
        if issubclass(cls, SimpleNamespace):
            instance = self.program.known.setdefault((cls,), {".()": None})
            initial = vars(cls).get("__init__")
            taken = inspect.signature(initial).parameters if initial else ()
            for each in node.keywords:
                if each.arg and each.arg not in taken:
                    self.program.join(instance, f".{each.arg}", only_value(each.value))
            if initial:
                node = self.call(node, cls)
        node.known = instance
        return node

    def call(self, node: ast.Call, called: Callable) -> ast.expr:
        """What a call of a function of ours, or of a class with __init__, gives, if that is known; else it is noted what it is given."""
        function, positional = self.program.signature(called)
        source = self.program.source(function)
        counts, names = _stored(source), [*positional, *[each.arg for each in source.args.kwonlyargs]]
        given = self.program.given.setdefault(function, {})
        starred = next(
            (i for i, each in enumerate(node.args) if isinstance(each, ast.Starred)), len(node.args)
        )
        by_name = dict(zip(positional, node.args[:starred])) | {
            each.arg: each.value for each in node.keywords if each.arg
        }
        is_open = starred < len(node.args) or any(each.arg is None for each in node.keywords)
        defaults = inspect.signature(function).parameters
        known = {}
        for name in names:
            value = by_name.get(name)
            if value is None and not is_open and defaults[name].default is not inspect.Parameter.empty:
                value = constant(defaults[name].default)
            known[name] = None if value is None or counts[name] > 1 else known_of(value)
        if function is called and (result := self.program.result(function, known)) is not None:
            return result
        for name in names:
            self.program.join(given, name, known[name])
        if function is called:
            self.program.name_of(function)
        node.func.is_called = True
        return node


class _Writer(ast.NodeTransformer):
    """Writes known values as text."""

    def __init__(self, program: Program):
        self.program = program

    def visit_Constant(self, node: ast.Constant) -> ast.expr:
        return self.program.written(node)

    def visit_Call(self, node: ast.Call) -> ast.expr:
        is_ours = isinstance(node.func, ast.Constant) and self.program.is_code(node.func.value)
        return self.generic_visit(self.program.stripped(node) if is_ours else node)


# ------------------------------------------------------------------------------------------------------------------- values


def constant(value: object, text: str = "") -> ast.Constant:
    node = ast.Constant(value)
    node.text = text
    return node


def copied(node: ast.AST) -> ast.AST:
    """A copy, of the same values."""
    new = copy.copy(node)
    for name, part in ast.iter_fields(node):
        many = isinstance(part, list)
        parts = [copied(each) if isinstance(each, ast.AST) else each for each in (part if many else [part])]
        setattr(new, name, parts if many else parts[0])
    return new


def literal(value: object) -> ast.expr:
    """A value as a node; what can be changed is written out."""
    if isinstance(value, list):
        return ast.List([*map(literal, value)], ast.Load())
    if isinstance(value, dict):
        return ast.Dict([*map(literal, value)], [*map(literal, value.values())])
    if isinstance(value, tuple) and any(isinstance(each, (list, dict)) for each in value):
        return ast.Tuple([*map(literal, value)], ast.Load())
    return constant(value)


def is_literal(node: ast.expr) -> bool:
    parts = [each for each in ast.walk(node) if isinstance(each, ast.expr)]
    return all(isinstance(each, (ast.Constant, ast.List, ast.Dict)) for each in parts)


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
        items = [None if isinstance(each, ast.Starred) else known_of(each) for each in node.elts]
        return (
            None
            if any(isinstance(each, ast.Starred) for each in node.elts) or not any(items)
            else tuple(items)
        )
    return getattr(node, "known", None)


def _common(a: object, b: object) -> object:
    """What is known of both."""
    if a == b:
        return a
    if isinstance(a, dict) and isinstance(b, dict):
        return {name: common for name in a if (common := _common(a[name], b.get(name))) is not None}
    if not isinstance(a, tuple) or not isinstance(b, tuple) or len(a) != len(b):
        return None
    items = tuple(map(_common, a, b))
    return items if any(items) else None


def only_value(node: ast.expr) -> Value | None:
    known = known_of(node)
    return known if isinstance(known, Value) else None


def free(node: ast.AST) -> set[str]:
    """The names that a node reads and does not set itself."""
    nodes = [*ast.walk(node)]
    bound = {each.id for each in nodes if isinstance(each, ast.Name) and not isinstance(each.ctx, ast.Load)}
    bound |= {each.arg for each in nodes if isinstance(each, ast.arg)}
    return {
        each.id for each in nodes if isinstance(each, ast.Name) and isinstance(each.ctx, ast.Load)
    } - bound


def _stored(node: ast.FunctionDef) -> Counter:
    """How often each local name is set, by a parameter, too."""
    nodes = [*ast.walk(node)]
    stored = [n.id for n in nodes if isinstance(n, ast.Name) and not isinstance(n.ctx, ast.Load)]
    stored += [a.asname or a.name for n in nodes if isinstance(n, ast.ImportFrom) for a in n.names]
    stored += [n.name for n in nodes if isinstance(n, ast.FunctionDef) and n is not node]
    return Counter(stored + [n.arg for n in nodes if isinstance(n, ast.arg)])


def without_docstring(body: list[ast.stmt]) -> list[ast.stmt]:
    first = body[0].value if isinstance(body[0], ast.Expr) else None
    return body[1:] if isinstance(first, ast.Constant) and type(first.value) is str else body


def _sentence(node: ast.FunctionDef | ast.ClassDef) -> list[ast.stmt]:
    """The first sentence of a docstring."""
    text = " ".join((ast.get_docstring(node) or "").split())
    sentence = re.match(r".*?[.?:](?=\s|$)", text)
    return [ast.Expr(ast.Constant(re.sub(r":$", ".", sentence[0])))] if sentence else []


def _item(node: ast.expr, index: int) -> ast.expr:
    if index == 0 and isinstance(node, ast.Attribute) and node.attr == "shape":
        return ast.Call(constant(len), [node.value], [])
    return ast.Subscript(node, ast.Constant(index), ast.Load())


def _spread(keyword: ast.keyword) -> list[ast.keyword]:
    """The keywords that `**{…}` stands for, where that is written out."""
    if keyword.arg is None and isinstance(keyword.value, ast.Dict) and None not in keyword.value.keys:
        return [ast.keyword(key.value, value) for key, value in zip(keyword.value.keys, keyword.value.values)]
    return [keyword]


def _assigned(pairs: list[tuple[ast.expr, ast.expr]]) -> ast.Assign | list:
    """The names of `pairs` set to their values, side by side."""
    if len(pairs) < 2:
        return ast.Assign([pairs[0][0]], pairs[0][1]) if pairs else []
    names, values = zip(*pairs)
    return ast.Assign([ast.Tuple([*names], ast.Store())], ast.Tuple([*values], ast.Load()))


def _without_unread(function: ast.FunctionDef) -> bool:
    """Takes out the assignments to names that nobody reads; True if there was one."""
    read = {n.id for n in ast.walk(function) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Load)}
    found = False

    class Remove(ast.NodeTransformer):
        def visit_Assign(self, node):
            nonlocal found
            pairs = [(node.targets[0], node.value)]
            if isinstance(node.targets[0], ast.Tuple) and isinstance(node.value, ast.Tuple):
                pairs = [*zip(node.targets[0].elts, node.value.elts)]
            if len(node.targets) > 1 or any(isinstance(each, ast.Starred) for pair in pairs for each in pair):
                return node
            kept = [pair for pair in pairs if not is_unread(pair[0])]
            found = found or len(kept) < len(pairs)
            return _assigned(kept) if len(kept) < len(pairs) else node

        def visit_If(self, node):
            self.generic_visit(node)
            return node if node.body else []

    def is_unread(target):
        parts = [each for each in ast.walk(target) if isinstance(each, ast.expr)]
        names = {each.id for each in parts if isinstance(each, ast.Name)}
        return (
            all(isinstance(each, (ast.Name, ast.Tuple, ast.Starred)) for each in parts) and not names & read
        )

    Remove().visit(function)
    return found


# ------------------------------------------------------------------------------------------------ functions of one expression


def applied(function: ast.stmt, call: ast.Call) -> ast.expr | None:
    """The expression that a call of `function` is, if that can be said."""
    if not isinstance(function, ast.FunctionDef) or function.decorator_list:
        return None
    body, given = without_docstring(function.body), function.args
    names = [each.arg for each in given.args]
    if len(body) != 1 or not isinstance(body[0], ast.Return) or given.vararg or given.kwarg:
        return None
    if any(isinstance(each, ast.Starred) for each in call.args) or any(
        each.arg is None for each in call.keywords
    ):
        return None
    values = dict(zip(names[len(names) - len(given.defaults) :], given.defaults))
    values |= dict(zip([each.arg for each in given.kwonlyargs], given.kw_defaults))
    values |= dict(zip(names, call.args)) | {each.arg: each.value for each in call.keywords}
    names += [each.arg for each in given.kwonlyargs]
    used = Counter(each.id for each in ast.walk(body[0]) if isinstance(each, ast.Name))
    apart = any(isinstance(each, (ast.comprehension, ast.Lambda, ast.Yield)) for each in ast.walk(body[0]))
    for name in names:
        if values.get(name) is None or (used[name] > 1 or apart) and not _is_plain(values[name]):
            return None

    class Put(ast.NodeTransformer):
        def visit_Name(self, node):
            return copied(values.get(node.id, node))

    return Put().visit(copied(body[0].value))


def _is_plain(node: ast.expr) -> bool:
    while isinstance(node, ast.Attribute):
        node = node.value
    return isinstance(node, (ast.Name, ast.Constant))


def _cleaned(definitions: dict[str, ast.stmt], root: str) -> dict[str, ast.stmt]:
    """Without what nobody reads, and with functions of one expression in the one place where they are called."""
    while True:
        count, definitions = len(definitions), _reached(definitions, root)
        nodes = [each for node in definitions.values() for each in ast.walk(node)]
        read = {
            each.attr for each in nodes if isinstance(each, ast.Attribute) and isinstance(each.ctx, ast.Load)
        }
        uses = Counter(each.id for each in nodes if isinstance(each, ast.Name))
        classes = {
            n: d
            for n, d in definitions.items()
            if isinstance(d, ast.ClassDef) and "Function" not in ast.unparse(d.bases)
        }
        for name, node in classes.items():
            node.body = [
                e
                for e in node.body
                if not isinstance(e, ast.FunctionDef) or e.name in read or e.name[:2] == "__"
            ]
        for call in [
            each for each in nodes if isinstance(each, ast.Call) and ast.unparse(each.func) in classes
        ]:
            own = {
                a.arg
                for e in classes[call.func.id].body
                if isinstance(e, ast.FunctionDef)
                for a in ast.walk(e.args)
                if isinstance(a, ast.arg)
            }
            call.keywords = [each for each in call.keywords if each.arg in own | read | {None}]
        for node in [each for each in nodes if isinstance(each, ast.FunctionDef)]:
            node.body = [each for each in node.body if not _sets_unread(each, read)]
            while _joined(node) or _without_unread(node):
                pass
        for node in [
            each for each in definitions.values() if isinstance(each, ast.FunctionDef) and each.name != root
        ]:
            calls = [
                each for each in nodes if isinstance(each, ast.Call) and ast.unparse(each.func) == node.name
            ]
            if len(calls) == uses[node.name]:
                _without_parameters(node, calls)
        for call in [
            each for each in nodes if isinstance(each, ast.Call) and isinstance(each.func, ast.Name)
        ]:
            called = call.func.id
            expression = applied(definitions.get(called), call) if called != root else None
            if expression is not None and uses[called] > 1 and not _is_other_call(expression):
                expression = None
            if expression is not None:
                put = _Replace(call, expression)
                definitions = {
                    name: ast.fix_missing_locations(put.visit(node)) for name, node in definitions.items()
                }
                break
        else:
            if len(definitions) == count:
                return definitions


def _without_parameters(function: ast.FunctionDef, calls: list[ast.Call]) -> None:
    """Takes away the parameters that the function does not read; `calls` are all there are."""
    read = set().union(*map(free, function.body))
    for given in (function.args.args, function.args.kwonlyargs):
        for i, each in reversed([*enumerate(given)]):
            positions = [call.args[: i + 1] for call in calls] if given is function.args.args else []
            if (
                each.arg in read
                or function.args.defaults
                or any(isinstance(n, ast.Starred) for p in positions for n in p)
            ):
                continue
            del given[i]
            if given is function.args.kwonlyargs:
                del function.args.kw_defaults[i]
            for call in calls:
                del call.args[i : i + 1 if positions else i]
                call.keywords = [keyword for keyword in call.keywords if keyword.arg != each.arg]


def _sets_unread(node: ast.stmt, read: set[str]) -> bool:
    """Does it but set an attribute of which nobody reads the name?"""
    targets = node.targets if isinstance(node, ast.Assign) else []
    return len(targets) == 1 and isinstance(targets[0], ast.Attribute) and targets[0].attr not in read


def _is_other_call(node: ast.expr) -> bool:
    """Is it a call of one of our functions with nothing to compute?"""
    return (
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and all(map(_is_plain, node.args))
        and not node.keywords
    )


def _joined(function: ast.AST) -> bool:
    """Puts a value that the next line alone reads, once, in the place of its name; True if there was one, and the line stays short."""
    nodes = [*ast.walk(function)]
    uses = Counter(each.id for each in nodes if isinstance(each, ast.Name))
    bodies = [getattr(each, name, None) for each in nodes for name in ("body", "orelse")]
    for body in [each for each in bodies if isinstance(each, list)]:
        for i, (first, then) in enumerate(zip(body, body[1:])):
            target = first.targets[0] if isinstance(first, ast.Assign) and len(first.targets) == 1 else None
            if not isinstance(target, ast.Name) or uses[target.id] != 2 or isinstance(first.value, ast.IfExp):
                continue
            read = [each for each in _surely(then) if isinstance(each, ast.Name) and each.id == target.id]
            length = sum(len(ast.unparse(ast.fix_missing_locations(each))) for each in (first.value, then))
            if read and length < WIDTH - 8 + len(target.id):
                body[i : i + 2] = [_Replace(read[0], first.value).visit(then)]
                return True
    return False


def _surely(node: ast.AST) -> Iterable[ast.AST]:
    """The nodes that are computed once whenever a line is; of a line that has others under it, none."""
    yield node
    later = ast.ListComp, ast.GeneratorExp, ast.DictComp, ast.SetComp, ast.Lambda, ast.IfExp, ast.BoolOp
    if not isinstance(node, (*later, ast.For, ast.While, ast.If, ast.With, ast.FunctionDef)):
        for child in ast.iter_child_nodes(node):
            yield from _surely(child)


def _reached(definitions: dict[str, ast.stmt], root: str) -> dict[str, ast.stmt]:
    """What `root` reaches, each before what it calls."""
    found, pending = {}, [root]
    while pending:
        if (name := pending.pop()) in definitions and name not in found:
            found[name] = definitions[name]
            names = [each.id for each in ast.walk(found[name]) if isinstance(each, ast.Name)]
            pending += reversed([*dict.fromkeys(names)])
    return found


class _Replace(ast.NodeTransformer):
    def __init__(self, old: ast.AST, new: ast.AST):
        self.old, self.new = old, new

    def visit(self, node: ast.AST) -> ast.AST:
        return self.new if node is self.old else self.generic_visit(node)


# ----------------------------------------------------------------------------------------------------------------- layout


def source_of(node: ast.stmt, docstrings: bool) -> str:
    """The text of a definition."""
    if not docstrings:
        for each in ast.walk(node):
            if isinstance(each, (ast.FunctionDef, ast.ClassDef)):
                each.body = without_docstring(each.body) or each.body
    lines = ast.unparse(ast.fix_missing_locations(node)).splitlines()
    return "\n".join(wrapped(line) for line in lines if docstrings or line)


def wrapped(line: str) -> str:
    """A line of code, broken within brackets so that no part is wider than WIDTH where that can be."""
    indent, lines = re.match(r" *", line)[0], []
    inner = indent + (" " * 8 if line.rstrip().endswith(":") else " " * 4)
    if line.lstrip().startswith('"""'):
        return "\n".join(textwrap.wrap(line, WIDTH, subsequent_indent=indent))
    while len(line) > WIDTH and (end := _last_break(line, len(inner), inside=bool(lines))):
        lines.append(line[:end].rstrip())
        line = inner + line[end:].lstrip()
    return "\n".join([*lines, line])


def _last_break(line: str, least: int, inside: bool) -> int | None:
    """Where to break: in the outermost brackets that are open, after the last comma that fits, or before the last word."""
    commas, words = {}, {}
    depth, quote, skip = int(inside), "", False
    for i, char in enumerate(line[:WIDTH]):
        if quote:
            quote, skip = ("" if char == quote and not skip else quote), char == "\\" and not skip
        elif char in "'\"":
            quote = char
        elif char in "([{":
            depth += 1
        elif char in ")]}":
            depth -= 1
        elif depth > 0 and i > least + 30 and char == " ":
            if line[i - 1] == ",":
                commas[depth] = i + 1
            elif re.match(r" (?:and|or|if|for|else|[-+*]) ", line[i:]):
                words[depth] = i + 1
    best = min([*commas, *words], default=None)
    return commas.get(best) or words.get(best)
