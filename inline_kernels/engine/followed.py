"""What an edited text of the schedule `load` computes, as a node of the segment's graph, from which a gradient is derived as of any other.

A line defines a value, `const auto name = expression;`. The generator's names end in their node's id, so that a line that somebody changed says what
that node now is, and all that hangs on it follows. An expression is made of names, numbers, + - * /, comparisons, & |, and functions that the
graph knows (engine/scalars.py). Where anything else differs from the generated text, NotFollowed has the lines.
"""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Mapping

from .graph import Graph, Node, differentiated, order, walk
from .naming import identifier, local
from .scalars import SCALARS

_DEFINED = re.compile(r"const auto (\w+) = (.*);")
_LOADED = re.compile(r"(real|double)\(\w+\[.*\]\)|held\[.*\]|\w+\.v\(\)|\w+\.(read|shared)\(\w+\)( != 0)?")
_FLOAT = re.compile(r"(?<![\w.])((?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?)[fF]\b")  # C++'s 0.5f
_WRITTEN = re.compile(r"(at|e)\.write\(y, (.*)\);")
_OPERATORS = {
    ast.Add: "add",
    ast.Sub: "sub",
    ast.Mult: "mul",
    ast.Div: "div",
    ast.BitAnd: "and",
    ast.BitOr: "or",
}
_COMPARED = {ast.Gt: Node.gt, ast.GtE: Node.ge, ast.Lt: Node.lt, ast.LtE: Node.le, ast.Eq: Node.eq}
_FUNCTIONS: dict[tuple[str, int], str] = {
    ("output_t", 1): "of_results",
    ("value_t", 1): "of_values",
    ("math_product", 2): "mul",
    ("math_difference", 2): "sub",
}
for _name, _row in SCALARS.items():
    if _match := re.fullmatch(r"math::(\w+)\((\{\d\}(?:, \{\d\})*)\)", _row.text):
        _FUNCTIONS.setdefault((f"math_{_match[1]}", _match[2].count("{")), _name)


class NotFollowed(Exception):
    """The lines."""

    def __init__(self, *lines: str):
        super().__init__("; ".join(lines))


def followed(y: Node, original: str, text: str) -> Node:
    """What `text` writes to y, where `original` writes that node. Raises NotFollowed."""
    (original, *backward), (text, *others) = (each.split("struct Backward", 1) for each in (original, text))
    (was, before), (now, after) = _parted(original), _parted(text)
    differ = [(a, b) for a, b in zip(before, after) if a != b]
    written = [_WRITTEN.fullmatch(line) for pair in differ for line in pair]
    if (
        len(before) != len(after)
        or len(differ) > 1
        or not all(written)
        or [*map(_lines, others)] != [*map(_lines, backward)]
        or "\\" in text  # at its end a comment goes on
    ):
        known = {*before, *_lines(*backward)}
        found = [line for line in [*after, *_lines(*others)] if line not in known]
        raise NotFollowed(*found or ["others where lines were, or none"])
    changed: dict[str, str] = {}
    for name, lines in now.items():
        fresh = lines - was.get(name, set())
        if not fresh:
            continue
        # Where a line made it, others may read it again; a second one may be hidden behind the first.
        made = [line for line in was.get(name, ()) if not _LOADED.fullmatch(line)]
        same = [line for line in lines - fresh if line in made or not made]
        alone = re.findall(rf"^\s*const auto {name} = [^;]*;\s*(?://.*)?$", text, flags=re.M)
        if len(fresh) > 1 or same or len(re.findall(rf"\bconst auto {name} =", text)) != len(alone):
            raise NotFollowed(*[f"const auto {name} = {line};" for line in sorted(lines)])
        (changed[name],) = fresh
    formula = _Formula(y, changed)
    found = formula.expression(written[1][2], y) if differ else formula.node(y)
    if unread := [f"const auto {name} = {changed[name]};" for name in changed if name not in formula.read]:
        raise NotFollowed(*unread)  # which may hide what unchanged lines read
    return found


def _lines(text: str = "") -> list[str]:
    """Without comments."""
    return [*filter(None, (" ".join(line.split("//")[0].split()) for line in text.splitlines()))]


def _parted(text: str) -> tuple[dict[str, set[str]], list[str]]:
    """Expressions by the name that they define, and all other lines."""
    defined: dict[str, set[str]] = {}
    others = []
    for line in _lines(text):
        if match := _DEFINED.fullmatch(line):
            defined.setdefault(match[1], set()).add(match[2])
        else:
            others.append(line)
    return defined, others


class _Formula:
    """The nodes that y is made of, with those changed of whose names there are expressions."""

    def __init__(self, y: Node, changed: Mapping[str, str]):
        self.graph: Graph = y.graph
        nodes = order([y])
        self.named = {local(node): node for node in nodes}
        self.named |= {identifier(n.attr[0]): n for n in nodes if n.is_leaf("scalar")}
        for n in [n for n in nodes if n.is_extreme]:
            self.named |= {f"best{n.args[1].id}.value": n, f"largest{n.args[1].id}.most": n}
        self.changed, self.known, self.read = changed, {}, set()

    def node(self, was: Node, plain: bool = False) -> Node:
        """What it is now. plain: with the derivative of what is computed, though the model's has a form of its own (`detach`), which holds for
        the model's formula alone."""
        if (was, plain) not in self.known:
            name, path = local(was), was.attr if was.op == "detach" else None
            if name in self.changed:
                self.read.add(name)
                found = self.expression(self.changed[name], was)
            elif was.op == "detach" and (plain or path is not None and self._is_inside(was)):
                found = self.node(was.args[0], True)
            else:
                self._check(was)
                args = [self.node(a, plain) for a in was.args]
                attr = was.attr if path is None else self.node(path)
                same = attr is was.attr and all(map(operator.is_, args, was.args))
                found = was if same else self.graph.make(was.op, *args, attr=attr, space=was.space)
            self.known[was, plain] = found
        return self.known[was, plain]

    def _is_inside(self, detached: Node) -> bool:
        """Is a line changed between what a detached value passes its adjoint to and the value?"""
        path = walk([detached.attr], differentiated)
        return any(local(node) in self.changed for node in order(detached.args) if node not in path)

    def _check(self, variance: Node) -> None:
        """Its derivative takes for granted that it is around the mean of what it is of."""
        if variance.op == "variance":
            a, mean = variance.args
            lines = {local(node) for node in {*order([mean])} - {*order([a])}} & self.changed.keys()
            if lines:
                raise NotFollowed(*[f"const auto {name} = {self.changed[name]};" for name in lines])

    def expression(self, text: str, was: Node | None) -> Node:
        """was: the node in whose place it stands, of the same kind."""
        try:
            python = _FLOAT.sub(r"\1", text.replace("math::", "math_")).strip()
            found = self._value(ast.parse(python, mode="eval").body)
        except (SyntaxError, _Unknown, RecursionError):
            raise NotFollowed(text) from None
        if was is not None and (found.space, found.is_boolean) != (was.space, was.is_boolean):
            raise NotFollowed(text)
        return found

    def _value(self, e: ast.expr) -> Node:
        if isinstance(e, ast.Constant) and type(e.value) in (int, float):
            return self.graph.const(e.value)
        if isinstance(e, ast.Name):
            return self._named(e.id)
        if isinstance(e, ast.Attribute) and isinstance(e.value, ast.Name):
            return self._named(f"{e.value.id}.{e.attr}")
        if isinstance(e, ast.UnaryOp) and isinstance(e.op, (ast.USub, ast.UAdd)):
            x = self._number(e.operand)
            return -x if isinstance(e.op, ast.USub) else x
        if isinstance(e, ast.BinOp) and type(e.op) in _OPERATORS:
            args, op = [self._value(e.left), self._value(e.right)], _OPERATORS[type(e.op)]
            whole = not (_varies(e.left) or _varies(e.right))  # of two whole numbers C++ makes another one
            if whole or any(a.is_boolean != (op in ("and", "or")) for a in args):
                raise _Unknown
            return self._made(op, args)
        if isinstance(e, ast.Compare) and len(e.ops) == 1 and type(e.ops[0]) in _COMPARED:
            return _COMPARED[type(e.ops[0])](self._number(e.left), self._number(e.comparators[0]))
        if isinstance(e, ast.Call) and isinstance(e.func, ast.Name) and not e.keywords:
            return self._call(e.func.id, [self._value(a) for a in e.args])
        raise _Unknown

    def _call(self, name: str, args: list[Node]) -> Node:
        if name in ("real", "double", "float") and len(args) == 1:
            return args[0]
        if name == "math_square" and len(args) == 1:
            return args[0] * args[0]
        op = _FUNCTIONS.get((name, len(args)))
        if op in ("max", "min"):  # by a number it is a clamp, whose bound itself has the whole gradient
            numbers = [a for a in args if _is_number(a)]
            if len(numbers) == 1:
                args = [a for a in args if a not in numbers] + numbers
                op = {"max": "clamp_min", "min": "clamp_max"}[op]
        if op is None or any(a.is_boolean != (op == "where" and i == 0) for i, a in enumerate(args)):
            raise _Unknown
        return self._made(op, args)

    def _made(self, op: str, args: list[Node]) -> Node:
        """Of what has a derivative in whatever it hangs on."""
        found, derivative = self.graph.scalar(op, *args), SCALARS[op].derivative
        if not SCALARS[op].boolean:
            parts = derivative(self.graph.const(1.0), found, *args) if derivative else [None] * len(args)
            if any(part is None and not (a.is_boolean or _is_number(a)) for part, a in zip(parts, args)):
                raise _Unknown
        return found

    def _number(self, e: ast.expr) -> Node:
        found = self._value(e)
        if found.is_boolean:
            raise _Unknown
        return found

    def _named(self, name: str) -> Node:
        if name in self.named:
            return self.node(self.named[name], True)
        if name not in self.changed:
            raise _Unknown
        self.read.add(name)
        return self.expression(self.changed[name], None)


class _Unknown(Exception):
    """Part of an expression that isn't known."""


def _varies(e: ast.expr) -> bool:
    """Is it more than whole numbers?"""
    return any(
        isinstance(t, (ast.Name, ast.Call)) or type(getattr(t, "value", 0)) is float for t in ast.walk(e)
    )


def _is_number(node: Node) -> bool:
    nodes = [each for each in order([node]) if each.op not in ("const", "count") and not each.is_scalar_op]
    return all(each.is_leaf("scalar") for each in nodes)
