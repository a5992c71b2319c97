"""What is known beforehand, put into a program of Python definitions, with all that follows from it.

A branch never taken goes, as does a name that nobody reads; what can be computed is; a function of one expression that is called in one
place is put there; a parameter that is the same in all calls becomes that value. It is for programs like ours: an expression has no side effect
but in a call that stands alone, and a function that uses only numbers (no torch, no os) gives the same for the same.
"""

from __future__ import annotations

import ast
import copy
import functools
import math
from collections.abc import Iterator, Mapping
from types import SimpleNamespace
from typing import NamedTuple

import torch

from export_python import copied, without_docstring

_COMPUTED = {
    "all",
    "any",
    "bool",
    "dict",
    "divmod",
    "enumerate",
    "float",
    "int",
    "len",
    "list",
    "max",
    "min",
    "range",
    "round",
    "str",
}
_COMPUTED |= {"sum", "tuple", "zip", "abs", "sorted", "set", "property", "isinstance", "type"}
MISSING = "_MISSING"  # the name of what is not in the program: a branch that asks for it raises
NOT_HERE = "ModelNew can't run: there is too little memory in a block of this GPU for that gradient"
_SCALARS = (int, float, str, bool)
_LOOSE = (*_SCALARS, type(None), torch.dtype, torch.memory_format)
_TORCH = SimpleNamespace(
    Tensor=torch.Tensor, **{k: v for k, v in vars(torch).items() if isinstance(v, _LOOSE[-2:])}
)


class Program:
    """Definitions by name, and facts: what stands for some expressions, text for text.

    roots: names that are needed from outside. as_they_are: definitions to which facts don't apply.
    """

    def __init__(
        self,
        definitions: Mapping[str, ast.stmt],
        facts: Mapping[str, str],
        roots: set[str],
        as_they_are: tuple[str, ...] = (),
    ):
        self.as_they_are = as_they_are
        self.definitions, self.facts, self.roots = dict(definitions), facts, roots
        self.namespace: dict[str, object] = {}
        self.attributes: dict[str, ast.Constant] = {}

    def fold(self) -> dict[str, ast.stmt]:
        """The definitions that are left."""
        before = None
        while before != (before := self._text()):
            self._find_computable()
            for name, node in self.definitions.items():
                if name not in self.as_they_are:
                    self.definitions[name] = copied(_Folder(self).visit(node))
            self._fold_plans()
            self._fold_parameters()
            self._fold_results()
            self._inline()
            self._splice()
            self._unfold()
            self._collect()
        return self.definitions

    def _text(self) -> str:
        return "\n".join(ast.unparse(ast.fix_missing_locations(node)) for node in self.definitions.values())

    def _names(self, node: ast.AST) -> set[str]:
        return {
            each.id
            for each in ast.walk(node)
            if isinstance(each, ast.Name) and isinstance(each.ctx, ast.Load)
        }

    def _find_computable(self) -> None:
        """The namespace in which functions of numbers can be called: those that use nothing from outside, and of torch the dtypes only."""
        kinds = ast.Assign, ast.ClassDef, ast.FunctionDef
        numbers = {
            name
            for name, node in self.definitions.items()
            if not isinstance(node, ast.ClassDef) or _is_tuple(node)
        }
        numbers -= {
            n
            for n in numbers
            if isinstance(getattr(self.definitions[n], "value", None), (ast.Dict, ast.List))
        }  # they change
        self.namespace = {"_math": math, "_functools": functools, "_NamedTuple": NamedTuple, "torch": _TORCH}
        while outside := {
            n
            for n in numbers
            if not _free(self.definitions[n]) <= _COMPUTED | numbers | self.namespace.keys()
        }:
            numbers -= outside
        for kind in kinds:
            for name in [name for name in numbers if isinstance(self.definitions[name], kind)]:
                exec(ast.unparse(self.definitions[name]), self.namespace)

    def value_of(self, node: ast.expr) -> ast.Constant | None:
        """What an expression of numbers is."""
        if (
            isinstance(node, ast.Constant)
            or not _free(node) <= _COMPUTED | self.namespace.keys()
            or _is_function(node)
        ):
            return None
        try:
            value = eval(ast.unparse(ast.fix_missing_locations(node)), dict(self.namespace))
        except Exception:  # it may be one that is never computed
            return None
        return ast.Constant(value) if _is_loose(value) else None

    # ------------------------------------------------------------------------------------------------ between definitions

    def _fold_plans(self) -> None:
        """Attributes of a plan that every plan which has them sets to the same."""
        calls = [
            each for each in self._walk() if isinstance(each, ast.Call) and ast.unparse(each.func) == "_Plan"
        ]
        given: dict[str, list[ast.expr]] = {}
        for call in calls:
            for keyword in call.keywords:
                given.setdefault(keyword.arg or "", []).append(keyword.value)
        assigned = [
            each
            for each in self._walk()
            if isinstance(each, ast.Assign) and ast.unparse(each.targets[0]).startswith("plan.")
        ]
        for each in assigned:
            given.setdefault(each.targets[0].attr, []).append(each.value)
        for name, values in given.items():
            if len({ast.unparse(value) for value in values}) == 1 and _is_steady(values[0]) and name:
                self.attributes[name] = values[0]
        read = {
            each.attr
            for each in self._walk()
            if isinstance(each, ast.Attribute) and isinstance(each.ctx, ast.Load)
        }
        unread = {each for each in given if each not in read and each not in ("defines", "outputs", "")}
        for call in calls:
            call.keywords = [
                each for each in call.keywords if each.arg not in self.attributes.keys() | unread
            ]

    def _walk(self) -> Iterator[ast.AST]:
        for node in self.definitions.values():
            yield from ast.walk(node)

    def _fold_parameters(self) -> None:
        """Parameters that are given the same value everywhere."""
        for name, node in self.definitions.items():
            if not isinstance(node, ast.FunctionDef) or node.args.vararg or node.args.kwarg:
                continue
            if any("lru_cache" not in ast.unparse(each) for each in node.decorator_list):
                continue
            calls = [
                each for each in self._walk() if isinstance(each, ast.Call) and ast.unparse(each.func) == name
            ]
            uses = sum(isinstance(each, ast.Name) and each.id == name for each in self._walk())
            if uses != len(calls) or name in self.roots or not calls:
                continue
            bound = [_bound(node, call) for call in calls]
            for argument in [*node.args.args, *node.args.kwonlyargs]:
                values = [each.get(argument.arg) if each is not None else None for each in bound]
                if _with_parts(node, argument, values, calls):
                    break
                if (
                    all(value is not None and _is_steady(value) for value in values)
                    and len({ast.unparse(v) for v in values}) == 1
                ):
                    _without_parameter(node, argument, values[0], calls)
                    break

    def _fold_results(self) -> None:
        """Of a list of results of which all calls take the same one, that one."""
        for name, node in self.definitions.items():
            if (
                not isinstance(node, ast.FunctionDef)
                or not isinstance(node.body[-1], ast.Return)
                or node.decorator_list
            ):
                continue
            value, returns = (
                node.body[-1].value,
                [each for each in ast.walk(node) if isinstance(each, ast.Return)],
            )
            uses = [each for each in self._walk() if isinstance(each, ast.Name) and each.id == name]
            taken = [
                each
                for each in self._walk()
                if isinstance(each, ast.Subscript)
                and isinstance(each.value, ast.Call)
                and each.value.func in uses
            ]
            numbers = {_number(each.slice) for each in taken}
            if (
                isinstance(value, (ast.List, ast.Tuple))
                and len(returns) == len(numbers) == 1
                and len(taken) == len(uses)
            ):
                number = numbers.pop()
                if number is not None and not any(isinstance(each, ast.Starred) for each in value.elts):
                    node.body[-1].value = value.elts[number]
                    for each in taken:
                        for key, owner in self.definitions.items():
                            self.definitions[key] = _Replace(each, each.value).visit(owner)
                    return

    def _inline(self) -> None:
        """Puts functions that are one expression, called in one place, into that place."""
        while found := next(self._inlined(), None):
            name, call, expression = found
            if sum(isinstance(each, ast.Name) and each.id == name for each in self._walk()) == 1:
                del self.definitions[name]
            for key, node in self.definitions.items():
                self.definitions[key] = ast.fix_missing_locations(_Replace(call, expression).visit(node))

    def _inlined(self) -> Iterator[tuple[str, ast.Call, ast.expr]]:
        nodes = [*self._walk()]
        for name, node in self.definitions.items():
            uses = [each for each in nodes if isinstance(each, ast.Name) and each.id == name]
            calls = [each for each in nodes if isinstance(each, ast.Call) and each.func in uses]
            once = len(uses) == 1 or self._is_short(node)
            if (
                name not in self.roots
                and calls
                and len(uses) == len(calls)
                and once
                and (expression := _applied(node, calls[0]))
            ):
                yield name, calls[0], expression

    def _is_short(self, node: ast.stmt) -> bool:
        """Is it a function of one tuple, mostly numbers?"""
        body = without_docstring(node.body) if isinstance(node, ast.FunctionDef) else []
        value = body[0].value if len(body) == 1 and isinstance(body[0], ast.Return) else None
        return isinstance(value, ast.Tuple) and sum(map(_is_steady, value.elts)) > len(value.elts) / 2

    def _splice(self) -> None:
        """Puts generators that one other alone yields from into its place; their names must be apart."""
        for name, node in self.definitions.items():
            for each in ast.walk(node):
                for index, statement in enumerate(
                    getattr(each, "body", None) or [] if isinstance(each, ast.FunctionDef) else []
                ):
                    call = (
                        statement.value.value
                        if isinstance(getattr(statement, "value", None), ast.YieldFrom)
                        else None
                    )
                    inner = (
                        self.definitions.get(ast.unparse(call.func)) if isinstance(call, ast.Call) else None
                    )
                    uses = [
                        n
                        for n in self._walk()
                        if isinstance(n, ast.Name) and inner is not None and n.id == inner.name
                    ]
                    if (
                        inner is None
                        or inner.name == name
                        or len(uses) != 1
                        or (bound := _bound(inner, call)) is None
                    ):
                        continue
                    same = all(ast.unparse(value) == key for key, value in bound.items())
                    stored = {
                        n.id
                        for n in ast.walk(inner)
                        if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)
                    }
                    if same and not stored & {n.id for n in ast.walk(node) if isinstance(n, ast.Name)}:
                        each.body[index : index + 1] = without_docstring(inner.body)
                        return

    def _unfold(self) -> None:
        """Puts the lines of a function that one line calls, `name = function(…)`, before it."""
        for name, node in self.definitions.items():
            for owner in [
                each for each in ast.walk(node) if isinstance(each, (ast.FunctionDef, ast.If, ast.With))
            ]:
                for index, line in enumerate(owner.body):
                    call = line.value if isinstance(line, (ast.Assign, ast.Return)) else None
                    function = (
                        self.definitions.get(ast.unparse(call.func)) if isinstance(call, ast.Call) else None
                    )
                    uses = [
                        n
                        for n in self._walk()
                        if isinstance(n, ast.Name) and function is not None and n.id == function.name
                    ]
                    if (
                        len(uses) == 1
                        and function.name != name
                        and name not in self.roots
                        and (lines := _unfolded(function, call, node)) is not None
                    ):
                        line.value = lines.pop().value
                        owner.body[index:index] = lines
                        return

    def _collect(self) -> None:
        """Leaves what is reached from the roots."""
        reached, pending = set(), [*self.roots]
        while pending:
            if (name := pending.pop()) not in reached and name in self.definitions:
                reached.add(name)
                pending += self._names(self.definitions[name])
        self.definitions = {name: node for name, node in self.definitions.items() if name in reached}


class _Replace(ast.NodeTransformer):
    def __init__(self, old: ast.AST, new: ast.AST):
        self.old, self.new = old, new

    def visit(self, node: ast.AST) -> ast.AST:
        return self.new if node is self.old else self.generic_visit(node)


# ---------------------------------------------------------------------------------------------------------- one definition


class _Folder(ast.NodeTransformer):
    """Folds one definition. `values`: those of its names that are known."""

    def __init__(self, program: Program):
        self.program, self.values, self.once, self.local = program, {}, set(), set()
        self.listed: set[str] = set()  # names that are read as *name only
        self.given: set[str] = set()  # parameters that nothing else is put into

    def visit(self, node: ast.AST) -> ast.AST:
        if isinstance(node, ast.expr) and isinstance(getattr(node, "ctx", ast.Load()), ast.Load):
            if (text := ast.unparse(node)) in self.program.facts:
                return ast.parse(self.program.facts[text], mode="eval").body
        node = super().visit(node)
        if isinstance(node, ast.expr) and isinstance(getattr(node, "ctx", ast.Load()), ast.Load):
            return self.program.value_of(node) or node
        return node

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.FunctionDef:
        values, once, local = self.values, self.once, self.local
        stored = [n.id for n in ast.walk(node) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)]
        parameters = {n.arg for n in ast.walk(node) if isinstance(n, ast.arg)}
        self.values = {
            name: value for name, value in values.items() if name not in stored and name not in parameters
        }
        used = [n for n in ast.walk(node) if isinstance(n, ast.Starred) and isinstance(n.value, ast.Name)]
        loads = [n.id for n in ast.walk(node) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Load)]
        self.listed = {
            n.value.id for n in used if loads.count(n.value.id) == sum(m.value.id == n.value.id for m in used)
        }
        self.given = parameters - set(stored)
        self.once = {name for name in stored if stored.count(name) == 1} - parameters
        self.local = local | {*stored, *parameters}
        documented, body = (
            node.body[: len(node.body) - len(without_docstring(node.body))],
            without_docstring(node.body),
        )
        node.args = self.generic_visit(node.args)
        body = self._visited(body) or [ast.Return(None)]
        node.body = [*documented, *body]
        while _without_unread(node) or _with_used_at_once(node):
            continue
        self.values, self.once, self.local = values, once, local
        self.listed = set()
        return node

    def _is_given(self, node: ast.expr) -> bool:
        """Is it a parameter, or the length of one or of its x?"""
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "len":
            node = node.args[0].value if isinstance(node.args[0], ast.Attribute) else node.args[0]
        return isinstance(node, ast.Name) and node.id in self.given

    def visit_Name(self, node: ast.Name) -> ast.expr:
        if not isinstance(node.ctx, ast.Load):
            return node
        if node.id in self.values:
            return copy.deepcopy(self.values[node.id])
        number = self.program.namespace.get(node.id)
        return ast.Constant(number) if node.id not in self.local and type(number) in _SCALARS else node

    def visit_Attribute(self, node: ast.Attribute) -> ast.expr:
        self.generic_visit(node)
        is_plan = (
            isinstance(node.value, ast.Name) and node.value.id == "plan" and isinstance(node.ctx, ast.Load)
        )
        return (
            copy.deepcopy(self.program.attributes[node.attr])
            if is_plan and node.attr in self.program.attributes
            else node
        )

    def visit_JoinedStr(self, node: ast.JoinedStr) -> ast.expr:
        self.generic_visit(node)
        for i, part in enumerate(node.values):
            if (
                isinstance(part, ast.FormattedValue)
                and isinstance(part.value, ast.Constant)
                and not part.format_spec
            ):
                node.values[i] = ast.Constant(str(part.value.value))
        return node

    def visit_Dict(self, node: ast.Dict) -> ast.expr:
        """With the items of those dicts in their places that are written out."""
        self.generic_visit(node)
        keys, values = [], []
        for key, value in zip(node.keys, node.values):
            known = value.value if key is None and isinstance(value, ast.Constant) else None
            inner = (
                zip(value.keys, value.values)
                if key is None and isinstance(value, ast.Dict)
                else [(key, value)]
            )
            inner = (
                [(ast.Constant(k), ast.Constant(v)) for k, v in known.items()]
                if isinstance(known, dict)
                else inner
            )
            for each, own in inner:
                keys, values = [*keys, each], [*values, own]
        return ast.Dict(keys, values)

    def visit_Subscript(self, node: ast.Subscript) -> ast.expr:
        """An element, or some, of what is written out."""
        self.generic_visit(node)
        parts = (
            [node.slice.lower, node.slice.upper, node.slice.step]
            if isinstance(node.slice, ast.Slice)
            else [node.slice]
        )
        written = isinstance(node.value, ast.Tuple) and not any(
            isinstance(each, ast.Starred) for each in node.value.elts
        )
        if not written or not all(part is None or _number(part) is not None for part in parts):
            return node
        found = node.value.elts[
            eval(ast.unparse(node.slice)) if len(parts) == 1 else slice(*map(_number, parts))
        ]
        return ast.Tuple(found, ast.Load()) if isinstance(found, list) else found

    def visit_Tuple(self, node: ast.Tuple | ast.List) -> ast.expr:
        self.generic_visit(node)
        node.elts = [each for element in node.elts for each in _unpacked(element)]
        return node

    visit_List = visit_Tuple

    def visit_Call(self, node: ast.Call) -> ast.expr:
        self.generic_visit(node)
        node.args = [each for argument in node.args for each in _unpacked(argument)]
        if ast.unparse(node.func) == "tuple" and isinstance(node.args[0], ast.Tuple):
            return node.args[0]
        node.keywords = [each for keyword in node.keywords for each in _spread(keyword)]
        if isinstance(node.func, ast.Name) and (function := self.program.definitions.get(node.func.id)):
            body = without_docstring(function.body) if isinstance(function, ast.FunctionDef) else []
            value = body[0].value if len(body) == 1 and isinstance(body[0], ast.Return) else None
            if value is not None and (
                _is_steady(value) or isinstance(value, (ast.List, ast.Dict)) and not _free(value)
            ):
                return copy.deepcopy(value)
        default = ast.unparse(node.keywords) if len(node.keywords) == 1 else ""
        if (
            isinstance(node.func, ast.Attribute)
            and node.func.attr == "contiguous"
            and default.endswith("=torch.contiguous_format")
        ):
            node.keywords = []
        return node

    def visit_BoolOp(self, node: ast.BoolOp) -> ast.expr:
        self.generic_visit(node)
        decisive, last = isinstance(node.op, ast.Or), node.values[-1]
        known = {
            each: each.value
            for each in node.values
            if isinstance(each, ast.Constant) and each.value in (True, False, None)
        }
        if any(bool(value) == decisive for value in known.values()):
            return ast.Constant(decisive)
        values = [each for each in node.values if each not in known]
        if values and isinstance(values[0], ast.Constant) and len(values) > 1:  # a text, or a number
            return last if bool(values[0].value) != decisive and len(values) == 2 else node
        return (
            ast.BoolOp(node.op, values)
            if len(values) > 1
            else values[0]
            if values
            else ast.Constant(not decisive)
        )

    def visit_IfExp(self, node: ast.IfExp) -> ast.expr:
        self.generic_visit(node)
        if isinstance(node.test, ast.Constant):
            return node.body if node.test.value else node.orelse
        return node.body if ast.unparse(node.body) == ast.unparse(node.orelse) else node

    def visit_If(self, node: ast.If) -> ast.stmt | list[ast.stmt]:
        node.test = self.visit(node.test)
        if isinstance(node.test, ast.Constant):
            return self._visited(node.body if node.test.value else node.orelse)
        node.body, node.orelse = self._visited(node.body), self._visited(node.orelse)
        if any(
            isinstance(each, ast.Name) and each.id == MISSING for part in node.body for each in ast.walk(part)
        ):
            node.body = ast.parse(f"raise RuntimeError({NOT_HERE!r})").body
        return node if node.body or node.orelse else []

    def visit_Expr(self, node: ast.Expr) -> ast.stmt | list:
        """Without an obstacle, (is it there?, what it is), that never is."""
        self.generic_visit(node)
        value = node.value.value if isinstance(node.value, ast.Yield) else None
        never = (
            isinstance(value, ast.Tuple)
            and isinstance(value.elts[0], ast.Constant)
            and not value.elts[0].value
        )
        if never or isinstance(value, ast.Constant) and not (value.value and value.value[0]):
            return []
        return node

    def _visited(self, body: list[ast.stmt]) -> list[ast.stmt]:
        """`body` folded, up to its first return."""
        found: list[ast.stmt] = []
        for statement in body:
            one = self.visit(statement)
            found += one if isinstance(one, list) else [one] if one else []
            if found and isinstance(found[-1], (ast.Return, ast.Raise)):
                break
        if len(found) > 1 and isinstance(found[-1], ast.Return) and isinstance(found[-2], ast.Assign):
            (*_, set_before, last), names = found, [ast.unparse(each) for each in found[-2].targets]
            if isinstance(last.value, ast.Name) and names == [last.value.id]:
                found[-2:] = [ast.Return(set_before.value)]
        return found

    def visit_Assign(self, node: ast.Assign) -> ast.stmt | list:
        """Without those names, set once, whose values are known: they go where the names stand."""
        node.value = self.visit(node.value)
        target = node.targets[0]
        if len(node.targets) > 1 or not self.local:  # of a module or a class
            return node
        if ast.unparse(target).startswith("plan.") and target.attr in self.program.attributes:
            return []
        node.targets = [self.visit(target)]
        pairs, kept = [*_pairs(target, node.value)], []
        for name, value in pairs:
            fixed = (
                _is_steady(value)
                or self._is_given(value)
                or isinstance(value, (ast.List, ast.Constant))
                and not _free(value)
                and _is_name_of(name, self.listed)
            )
            if isinstance(name, ast.Name) and name.id in self.once and fixed:
                self.values[name.id] = value
            elif ast.unparse(name) != ast.unparse(value):
                kept.append((name, value))
        return node if len(kept) == len(pairs) else [_assigned(kept)] if kept else []


def _is_name_of(node: ast.expr, names: set[str]) -> bool:
    return isinstance(node, ast.Name) and node.id in names


def _pairs(target: ast.expr, value: ast.expr) -> Iterator[tuple[ast.expr, ast.expr]]:
    """The names of an assignment with their values, as far as these are apart."""
    if (
        isinstance(target, ast.Tuple)
        and isinstance(value, ast.Constant)
        and isinstance(value.value, (tuple, list))
    ):
        value = ast.Tuple([ast.Constant(each) for each in value.value], ast.Load())
    if isinstance(target, ast.Tuple) and isinstance(value, ast.List):
        value = ast.Tuple(value.elts, ast.Load())
    if (
        not isinstance(target, ast.Tuple)
        or not isinstance(value, ast.Tuple)
        or any(isinstance(e, ast.Starred) for e in value.elts)
    ):
        yield target, value
        return
    starred = [i for i, each in enumerate(target.elts) if isinstance(each, ast.Starred)]
    if starred:
        i, after = starred[0], len(target.elts) - starred[0] - 1
        middle = value.elts[i : len(value.elts) - after]
        steady = all(isinstance(each, ast.Constant) for each in middle)
        rest = ast.Constant(tuple(each.value for each in middle)) if steady else ast.List(middle, ast.Load())
        names = [*target.elts[:i], target.elts[i].value, *target.elts[i + 1 :]]
        values = [*value.elts[:i], rest, *value.elts[len(value.elts) - after :]]
    else:
        names, values = target.elts, value.elts
    for each, own in zip(names, values):
        yield from _pairs(each, own)


def _assigned(pairs: list[tuple[ast.expr, ast.expr]]) -> ast.Assign:
    """The names of `pairs` set to their values, side by side."""
    names, values = [name for name, _ in pairs], [value for _, value in pairs]
    if len(pairs) == 1:
        return ast.Assign(names, values[0])
    return ast.Assign([ast.Tuple(names, ast.Store())], ast.Tuple(values, ast.Load()))


def _without_unread(function: ast.FunctionDef) -> bool:
    """Takes out the first assignment to a name that nobody reads; True if there was one."""
    nodes = [*ast.walk(function)]
    read = {each.id for each in nodes if isinstance(each, ast.Name) and isinstance(each.ctx, ast.Load)}
    for owner in nodes:
        for body in [
            value
            for value in (getattr(owner, "body", 0), getattr(owner, "orelse", 0))
            if isinstance(value, list)
        ]:
            for index, statement in enumerate(body):
                if not isinstance(statement, ast.Assign) or len(statement.targets) > 1:
                    continue
                pairs = [*_pairs(statement.targets[0], statement.value)]
                names = [
                    {each.id for each in ast.walk(name) if isinstance(each, ast.Name)} for name, _ in pairs
                ]
                plain = [
                    all(
                        isinstance(e, (ast.Name, ast.Tuple, ast.Starred, ast.expr_context))
                        for e in ast.walk(name)
                    )
                    for name, _ in pairs
                ]
                kept = [pair for pair, own, simple in zip(pairs, names, plain) if own & read or not simple]
                if len(kept) < len(pairs):
                    body[index : index + 1] = [_assigned(kept)] if kept else []
                    if not body:
                        body.append(ast.Expr(ast.Constant(...)))
                    return True
    return False


def _with_used_at_once(function: ast.FunctionDef) -> bool:
    """Puts a value that only the next line reads, once, in the place of its name; True if there was one, and the line stays short."""
    nodes = [*ast.walk(function)]
    for owner in nodes:
        for body in [
            value
            for value in (getattr(owner, "body", 0), getattr(owner, "orelse", 0))
            if isinstance(value, list)
        ]:
            for index, (first, then) in enumerate(zip(body, body[1:])):
                if (
                    not isinstance(first, ast.Assign)
                    or not isinstance(first.targets[0], ast.Name)
                    or len(first.targets) > 1
                ):
                    continue
                name, line = (
                    first.targets[0].id,
                    isinstance(then, (ast.Assign, ast.Return, ast.Expr, ast.AugAssign)),
                )
                uses = [
                    each
                    for each in nodes
                    if isinstance(each, ast.Name) and each.id == name and each is not first.targets[0]
                ]
                once = (
                    line
                    and len(uses) == 1
                    and isinstance(uses[0].ctx, ast.Load)
                    and any(uses[0] is n for n in _straight(then))
                )
                if not once or isinstance(first.value, (ast.IfExp, ast.BoolOp)):
                    continue
                merged = _Replace(uses[0], first.value).visit(copy.deepcopy(then, {id(uses[0]): uses[0]}))
                if len(ast.unparse(ast.fix_missing_locations(merged))) < 102:
                    body[index : index + 2] = [merged]
                    return True
    return False


def _straight(node: ast.AST) -> Iterator[ast.AST]:
    """The nodes that are computed once, and surely."""
    yield node
    if not isinstance(
        node, (ast.ListComp, ast.GeneratorExp, ast.DictComp, ast.SetComp, ast.Lambda, ast.IfExp, ast.BoolOp)
    ):
        for child in ast.iter_child_nodes(node):
            yield from _straight(child)


# ------------------------------------------------------------------------------------------------------------------ calls


def _bound(function: ast.FunctionDef, call: ast.Call) -> dict[str, ast.expr] | None:
    """The arguments of a call by name, with the defaults of those that are not given; without those that `*` may give; None where
    nothing can be said."""
    given, names = function.args, [each.arg for each in function.args.args]
    starred = [i for i, each in enumerate(call.args) if isinstance(each, ast.Starred)]
    known = starred[0] if starred else len(names)
    if any(each.arg is None for each in call.keywords):
        return None
    values = dict(zip(names[len(names) - len(given.defaults) :], given.defaults)) if not starred else {}
    values |= {
        each.arg: value for each, value in zip(given.kwonlyargs, given.kw_defaults) if value is not None
    }
    values |= dict(zip(names[:known], call.args)) | {each.arg: each.value for each in call.keywords}
    if given.vararg and known >= len(names):
        values[given.vararg.arg] = ast.Tuple(call.args[len(names) :], ast.Load())
    return values


def _without_parameter(
    function: ast.FunctionDef, argument: ast.arg, value: ast.expr, calls: list[ast.Call]
) -> None:
    """Makes a parameter a name that is set to `value` at the start."""
    given = function.args
    if argument in given.args:
        index, first_default = given.args.index(argument), len(given.args) - len(given.defaults)
        if index >= first_default:
            del given.defaults[index - first_default]
        given.args.remove(argument)
        for call in calls:
            if index < len(call.args):
                del call.args[index]
    else:
        index = given.kwonlyargs.index(argument)
        del given.kwonlyargs[index], given.kw_defaults[index]
    for call in calls:
        call.keywords = [each for each in call.keywords if each.arg != argument.arg]
    start = len(function.body) - len(without_docstring(function.body))
    function.body.insert(start, ast.Assign([ast.Name(argument.arg, ast.Store())], copy.deepcopy(value)))
    ast.fix_missing_locations(function)


def _unfolded(function: ast.stmt, call: ast.Call, caller: ast.stmt) -> list[ast.stmt] | None:
    """The lines of a call, the last a return."""
    if (
        not isinstance(function, ast.FunctionDef)
        or function.decorator_list
        or function.args.vararg
        or function.args.kwarg
    ):
        return None
    body, values = copy.deepcopy(without_docstring(function.body)), _bound(function, call)
    nodes = [each for line in body for each in ast.walk(line)]
    names = [each.arg for each in [*function.args.args, *function.args.kwonlyargs]]
    odd = [
        each
        for each in nodes
        if isinstance(each, (ast.Return, ast.Yield, ast.YieldFrom, ast.FunctionDef, ast.Lambda))
    ]
    if odd != [body[-1]] or values is None or any(name not in values for name in names):
        return None
    theirs = {each.id for each in ast.walk(caller) if isinstance(each, ast.Name)}
    theirs |= {each.arg for each in ast.walk(caller) if isinstance(each, ast.arg)}
    stored = {each.id for each in nodes if isinstance(each, ast.Name) and isinstance(each.ctx, ast.Store)}
    put = {name: value for name, value in values.items() if _is_plain(value) and name not in stored}
    first = [ast.Assign([ast.Name(name, ast.Store())], values[name]) for name in names if name not in put]
    mine = {name: f"{name}_" for name in (stored | {*names} - put.keys()) & theirs}

    class Put(ast.NodeTransformer):
        def visit_Name(self, node: ast.Name) -> ast.expr:
            if node.id in put:
                return copy.deepcopy(put[node.id])
            return ast.Name(mine.get(node.id, node.id), node.ctx)

    for line in first:
        line.targets[0].id = mine.get(line.targets[0].id, line.targets[0].id)
    return [ast.fix_missing_locations(each) for each in [*first, *[Put().visit(line) for line in body]]]


def _with_parts(function: ast.FunctionDef, argument: ast.arg, values: list, calls: list[ast.Call]) -> bool:
    """Makes of a parameter that is a tuple with one element that is not the same everywhere that element."""
    given = function.args.args
    if argument not in given or not all(isinstance(each, ast.Tuple) for each in values):
        return False
    index, first = given.index(argument), values[0].elts
    if any(len(each.elts) != len(first) for each in values) or any(len(call.args) <= index for call in calls):
        return False
    parts = [[each.elts[i] for each in values] for i in range(len(first))]
    open_ = [
        i
        for i, part in enumerate(parts)
        if not _is_steady(part[0]) or len({ast.unparse(each) for each in part}) > 1
    ]
    if len(open_) != 1 or any(isinstance(each, ast.Starred) for value in values for each in value.elts):
        return False
    for call, value in zip(calls, values):
        call.args[index] = value.elts[open_[0]]
    name = f"{argument.arg}_{open_[0]}"
    whole = [
        ast.Name(name, ast.Load()) if i in open_ else copy.deepcopy(each) for i, each in enumerate(first)
    ]
    start = len(function.body) - len(without_docstring(function.body))
    function.body.insert(
        start, ast.Assign([ast.Name(argument.arg, ast.Store())], ast.Tuple(whole, ast.Load()))
    )
    given[index] = ast.arg(name)
    ast.fix_missing_locations(function)
    return True


def _applied(function: ast.stmt, call: ast.Call) -> ast.expr | None:
    """The expression that a call of `function` is, if that can be said."""
    if not isinstance(function, ast.FunctionDef) or function.decorator_list or function.args.kwarg:
        return None
    body, values = without_docstring(function.body), _bound(function, call)
    if len(body) != 1 or not isinstance(body[0], ast.Return) or body[0].value is None or values is None:
        return None
    if any(each.arg not in values for each in ast.walk(function.args) if isinstance(each, ast.arg)):
        return None
    expression = copied(ast.Expr(body[0].value)).value
    nodes = [*ast.walk(expression)]
    bound = {each.id for each in nodes if isinstance(each, ast.Name) and not isinstance(each.ctx, ast.Load)}
    read = {each.id for value in values.values() for each in ast.walk(value) if isinstance(each, ast.Name)}
    times = {name: sum(isinstance(each, ast.Name) and each.id == name for each in nodes) for name in values}
    plain = all(times[name] < 2 or _is_plain(value) for name, value in values.items())
    if bound & read or not plain or any(isinstance(each, (ast.Lambda, ast.NamedExpr)) for each in nodes):
        return None

    class Put(ast.NodeTransformer):
        def visit_Name(self, node: ast.Name) -> ast.expr:
            return copy.deepcopy(values.get(node.id, node))

    return Put().visit(expression)


def _number(node: ast.expr | None) -> int | None:
    """The int that a node is."""
    if (
        isinstance(node, ast.UnaryOp)
        and isinstance(node.op, ast.USub)
        and (number := _number(node.operand)) is not None
    ):
        return -number
    return node.value if isinstance(node, ast.Constant) and type(node.value) is int else None


def _unpacked(node: ast.expr) -> list[ast.expr]:
    """The elements that `*(…)` stands for, where they are written out."""
    if not isinstance(node, ast.Starred):
        return [node]
    if isinstance(node.value, ast.Constant) and isinstance(node.value.value, (tuple, list)):
        return [ast.Constant(each) for each in node.value.value]
    return node.value.elts if isinstance(node.value, (ast.Tuple, ast.List)) else [node]


def _spread(keyword: ast.keyword) -> list[ast.keyword]:
    """The keywords that `**{…}` stands for, where that is a literal."""
    value = keyword.value
    if keyword.arg is None and isinstance(value, ast.Constant) and isinstance(value.value, dict):
        return [ast.keyword(name, ast.Constant(each)) for name, each in value.value.items()]
    return [keyword]


# ----------------------------------------------------------------------------------------------------------------- values


def _is_loose(value: object) -> bool:
    """Can `value` be written where it is used?"""
    if type(value) in (tuple, list):
        return all(map(_is_loose, value))
    return all(map(_is_loose, [*value, *value.values()])) if type(value) is dict else type(value) in _LOOSE


def _is_steady(node: ast.expr) -> bool:
    """Is it the same value wherever it stands?"""
    if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
        return node.value.id == "torch"
    if isinstance(node, ast.Tuple):
        return all(map(_is_steady, node.elts))
    if isinstance(node, ast.UnaryOp):
        return _is_steady(node.operand)
    return (
        isinstance(node, ast.Constant) and not isinstance(node.value, (list, dict)) and node.value is not ...
    )


def _is_plain(value: ast.expr) -> bool:
    while isinstance(value, ast.Attribute):
        value = value.value
    return isinstance(value, (ast.Name, ast.Constant))


def _is_function(node: ast.expr) -> bool:
    return isinstance(node, (ast.Name, ast.Starred, ast.Lambda))


def _is_tuple(node: ast.ClassDef) -> bool:
    return any(isinstance(base, ast.Name) and base.id == "_NamedTuple" for base in node.bases)


def _free(node: ast.AST) -> set[str]:
    """The names that a node reads and does not set itself."""
    nodes = [*ast.walk(node)]
    bound = {each.id for each in nodes if isinstance(each, ast.Name) and not isinstance(each.ctx, ast.Load)}
    bound |= {each.arg for each in nodes if isinstance(each, ast.arg)}
    bound |= {each.name for each in nodes if isinstance(each, (ast.FunctionDef, ast.ClassDef))}
    read = {each.id for each in nodes if isinstance(each, ast.Name) and isinstance(each.ctx, ast.Load)}
    return read - bound
