"""The specialised definitions of a cell, made short, and as text.

tidied: definitions by name, as syntax trees, to those that a root reaches, what calls before what is called.
Until nothing changes any more,
- names, parameters, attributes and methods that nobody reads go;
- a value that only the next line reads moves into that line;
- a function that is one expression moves to where it is called, if that is one place or it but calls another.
What the definitions compute stays as it is. source_of: one of them as text, no line wider than WIDTH.
"""

from __future__ import annotations

import ast
import copy
import re
import textwrap
from collections import Counter
from collections.abc import Iterable

WIDTH = 110


def tidied(definitions: dict[str, ast.stmt], root: str) -> dict[str, ast.stmt]:
    """What `root` reaches, without what nobody reads."""
    before = None
    while before != (before := "\n".join(map(source_of, definitions.values()))):
        definitions = _reached(definitions, root)
        nodes = _nodes(definitions)
        _without_attributes(definitions, nodes)
        for function in [each for each in nodes if isinstance(each, ast.FunctionDef)]:
            while _without_names(function) or _joined(function):
                pass
        for name in [each for each in definitions if each != root]:
            _without_parameters(definitions[name], name, definitions)
        definitions = _inlined(definitions, root)
    for name, node in definitions.items():
        if name != root and arguments_of(node)[:1] == ["self"]:  # a model's method, once
            for each in ast.walk(node):
                field = {ast.arg: "arg", ast.Name: "id"}.get(type(each))
                if field and getattr(each, field) == "self":
                    setattr(each, field, "model")
    return definitions


def _nodes(definitions: dict[str, ast.stmt]) -> list[ast.AST]:
    return [each for node in definitions.values() for each in ast.walk(node)]


def _reached(definitions: dict[str, ast.stmt], root: str) -> dict[str, ast.stmt]:
    found, pending = {}, [root]
    while pending:
        if (name := pending.pop()) in definitions and name not in found:
            found[name] = definitions[name]
            names = [each.id for each in ast.walk(found[name]) if isinstance(each, ast.Name)]
            pending += reversed([*dict.fromkeys(names)])
    return found


def _without_attributes(definitions: dict[str, ast.stmt], nodes: list[ast.AST]) -> None:
    """Without methods of which nobody reads the name, and what is set, or given to a class, under such a
    name."""
    read = {each.attr for each in nodes if isinstance(each, ast.Attribute) and isinstance(each.ctx, ast.Load)}
    read |= {"__init__", None}

    def is_unread(node: ast.stmt) -> bool:
        targets = node.targets if isinstance(node, ast.Assign) else []
        return len(targets) == 1 and isinstance(targets[0], ast.Attribute) and targets[0].attr not in read

    for function in [each for each in nodes if isinstance(each, ast.FunctionDef)]:
        function.body = [each for each in function.body if not is_unread(each)]
    for cls in [each for each in definitions.values() if isinstance(each, ast.ClassDef)]:
        if ast.unparse(cls.bases) != "torch.autograd.Function":  # which PyTorch calls
            kept = [each for each in cls.body if not isinstance(each, ast.FunctionDef) or each.name in read]
            cls.body, own = kept, {name for each in kept for name in arguments_of(each)}
            for call in _calls(cls.name, nodes):
                call.keywords = [each for each in call.keywords if each.arg in own | read]


def _calls(name: str, nodes: Iterable[ast.AST]) -> list[ast.Call]:
    return [each for each in nodes if isinstance(each, ast.Call) and ast.unparse(each.func) == name]


def _without_parameters(node: ast.stmt, name: str, definitions: dict[str, ast.stmt]) -> None:
    """Without the parameters that a function, or a class's __init__, does not read, where all that is done
    with it is to call it."""
    methods = [each for each in getattr(node, "body", []) if getattr(each, "name", "") == "__init__"]
    function, skipped = (methods[0], 1) if methods else (node, 0)
    nodes = _nodes(definitions)
    calls, uses = _calls(name, nodes), sum(isinstance(each, ast.Name) and each.id == name for each in nodes)
    if not isinstance(function, ast.FunctionDef) or len(calls) < uses:
        return
    given, read = function.args, {name for each in function.body for name in free(each)}
    for i in reversed(range(skipped, len(given.args))):
        before = [each for call in calls for each in call.args[: i + 1 - skipped]]
        if given.args[i].arg not in read and not any(isinstance(each, ast.Starred) for each in before):
            first = len(given.args) - len(given.defaults)
            del given.defaults[max(i - first, 0) : max(i - first + 1, 0)]
            _take_away(calls, given.args.pop(i).arg, i - skipped)
    for i in reversed(range(len(given.kwonlyargs))):
        if given.kwonlyargs[i].arg not in read:
            del given.kw_defaults[i]
            _take_away(calls, given.kwonlyargs.pop(i).arg, None)


def _take_away(calls: list[ast.Call], name: str, position: int | None) -> None:
    for call in calls:
        call.keywords = [each for each in call.keywords if each.arg != name]
        if position is not None:
            del call.args[position : position + 1]


def _without_names(function: ast.FunctionDef) -> bool:
    """Takes out the assignments to names that nobody reads; True if there was one."""
    read, before = _read(function), ast.dump(function)

    def is_unread(target: ast.expr) -> bool:
        parts = [each for each in ast.walk(target) if isinstance(each, ast.expr)]
        names = {each.id for each in parts if isinstance(each, ast.Name)}
        are_names = all(isinstance(each, (ast.Name, ast.Tuple, ast.Starred)) for each in parts)
        return are_names and not names & read

    class Remove(ast.NodeTransformer):
        def visit_Assign(self, node):
            [target, *others], value = node.targets, node.value
            if others or not isinstance(target, ast.Tuple) or not isinstance(value, ast.Tuple):
                return [] if not others and is_unread(target) else node
            if any(isinstance(each, ast.Starred) for each in [*target.elts, *value.elts]):
                return node
            kept = [pair for pair in zip(target.elts, value.elts) if not is_unread(pair[0])]
            target.elts, value.elts = [name for name, _ in kept], [each for _, each in kept]
            return ast.Assign([target.elts[0]], value.elts[0]) if len(kept) == 1 else node if kept else []

        def visit_If(self, node):
            self.generic_visit(node)
            return branch(node.test, node.body, node.orelse)

    Remove().visit(function)
    return ast.dump(function) != before


def _joined(function: ast.FunctionDef) -> bool:
    """Puts a value that the next line alone reads, once, in the place of its name, where the line stays
    short; True if there was one."""
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


def _inlined(definitions: dict[str, ast.stmt], root: str) -> dict[str, ast.stmt]:
    """With one expression in the place of a call, if there is one: of a function called once, or that but
    calls another."""
    nodes = _nodes(definitions)
    uses = Counter(each.id for each in nodes if isinstance(each, ast.Name))
    for name in [each for each in definitions if each != root]:
        for call in _calls(name, nodes):
            expression = applied(definitions[name], call)
            if expression is not None and (uses[name] == 1 or _but_calls(definitions[name].body[-1].value)):
                put = _Replace(call, expression)
                return {key: ast.fix_missing_locations(put.visit(node)) for key, node in definitions.items()}
    return definitions


def _but_calls(node: ast.expr) -> bool:
    is_call = isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
    return is_call and all(map(_is_plain, [*node.args, *[each.value for each in node.keywords]]))


class _Replace(ast.NodeTransformer):
    def __init__(self, old: ast.AST, new: ast.AST):
        self.old, self.new = old, new

    def visit(self, node: ast.AST) -> ast.AST:
        is_item = (
            isinstance(node, ast.Subscript)
            and node.value is self.old
            and isinstance(node.slice, ast.Constant)
        )
        if is_item and isinstance(self.new, (ast.List, ast.Tuple)):
            return self.new.elts[node.slice.value]
        if node is self.old:
            return self.new
        self.generic_visit(node)
        if isinstance(node, ast.Call):
            node.keywords = [each for keyword in node.keywords for each in spread(keyword)]
        for items in [getattr(node, name, None) for name in ("args", "elts")]:
            if isinstance(items, list):  # of *[…], its items
                items[:] = [part for each in items for part in _opened(each)]
        return node


def _opened(node: ast.AST) -> list[ast.AST]:
    is_open = isinstance(node, ast.Starred) and isinstance(node.value, (ast.List, ast.Tuple))
    return node.value.elts if is_open else [node]


# -------------------------------------------------------------------------------------------------- functions


def arguments_of(node: ast.AST) -> list[str]:
    """The parameters of a function, but for *names and **names."""
    if not isinstance(node, ast.FunctionDef):
        return []
    return [each.arg for each in [*node.args.args, *node.args.kwonlyargs]]


def applied(function: ast.stmt, call: ast.Call) -> ast.expr | None:
    """The expression that a call of `function` is, if that can be said."""
    body = without_docstring(getattr(function, "body", []))
    is_one = isinstance(function, ast.FunctionDef) and len(body) == 1 and isinstance(body[0], ast.Return)
    if not is_one or function.decorator_list or function.args.vararg or function.args.kwarg:
        return None
    if is_open(call):
        return None
    given, names = function.args, [each.arg for each in function.args.args]
    values = dict(zip(names[len(names) - len(given.defaults) :], given.defaults))
    values |= dict(zip([each.arg for each in given.kwonlyargs], given.kw_defaults))
    values |= dict(zip(names, call.args)) | {each.arg: each.value for each in call.keywords}
    nodes = [*ast.walk(body[0])]
    reads = Counter(each.id for each in nodes if isinstance(each, ast.Name))
    is_repeated = any(isinstance(each, (ast.comprehension, ast.Lambda, ast.Yield)) for each in nodes)
    for name in arguments_of(function):
        is_once = not reads[name] or reads[name] == 1 and not is_repeated
        if values.get(name) is None or not (is_once or _is_plain(values[name])):
            return None

    class Put(ast.NodeTransformer):
        def visit_Name(self, node):
            return copied(values.get(node.id, node))

    return Put().visit(copied(body[0].value))


def is_open(call: ast.Call) -> bool:
    """Does it give *items or **keywords?"""
    starred = [each for each in call.args if isinstance(each, ast.Starred)]
    return bool(starred) or any(each.arg is None for each in call.keywords)


def copied(node: ast.AST) -> ast.AST:
    """A copy of a tree, of the same values."""
    new = copy.copy(node)
    for name, part in ast.iter_fields(node):
        if isinstance(part, list):
            setattr(new, name, [copied(each) if isinstance(each, ast.AST) else each for each in part])
        elif isinstance(part, ast.AST):
            setattr(new, name, copied(part))
    return new


def _is_plain(node: ast.expr) -> bool:
    while isinstance(node, ast.Attribute):
        node = node.value
    return isinstance(node, (ast.Name, ast.Constant))


def spread(keyword: ast.keyword) -> Iterable[ast.keyword]:
    """The keywords that `**{…}` stands for, where that is written out."""
    if keyword.arg is None and isinstance(keyword.value, ast.Dict) and None not in keyword.value.keys:
        return [ast.keyword(key.value, value) for key, value in zip(keyword.value.keys, keyword.value.values)]
    return [keyword]


def branch(test: ast.expr, body: list[ast.stmt], orelse: list[ast.stmt]) -> ast.If | list:
    """An `if`, some branch of which may be empty."""
    if not body and orelse:
        return ast.If(ast.UnaryOp(ast.Not(), test), orelse, [])
    return ast.If(test, body, orelse) if body else []


def free(node: ast.AST) -> set[str]:
    """The names that a node reads and does not set itself."""
    nodes = [*ast.walk(node)]
    bound = {each.id for each in nodes if isinstance(each, ast.Name) and not isinstance(each.ctx, ast.Load)}
    bound |= {each.arg for each in nodes if isinstance(each, ast.arg)}
    return _read(node) - bound


def _read(node: ast.AST) -> set[str]:
    names = [each for each in ast.walk(node) if isinstance(each, ast.Name)]
    return {each.id for each in names if isinstance(each.ctx, ast.Load)}


def without_docstring(body: list[ast.stmt]) -> list[ast.stmt]:
    first = body[0].value if body and isinstance(body[0], ast.Expr) else None
    return body[1:] if isinstance(first, ast.Constant) and type(first.value) is str else body


# ------------------------------------------------------------------------------------------------------- text


def source_of(node: ast.stmt, docstrings: bool = True) -> str:
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
    """Where to break: in the outermost brackets that are open, after the last comma that fits, or before the
    last word."""
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
