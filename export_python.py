"""Python functions of several modules as definitions of one file: what some of them reach, with private names.

Functions are taken from the sources as they are, but that annotations of parameters go, docstrings keep their first sentence, comments
are not there, and a method of a problem's ModelNew that others call is a function of a `model`. What is known beforehand is folded in
afterwards (export_folding.py).
"""

from __future__ import annotations

import ast
import builtins
import inspect
import re
import textwrap
from collections.abc import Mapping
from types import ModuleType

WIDTH = 110
_DROPPED = ("torch.compiler.assume_constant_result",)  # decorators

Place = tuple[str, str]  # a module's name, and a name in it; of a method "class.name"


class Module:
    """A module's definitions, by name, and what the names that it imports stand for."""

    def __init__(self, module: ModuleType):
        self.definitions: dict[str, ast.stmt] = {}
        self.imports: dict[str, tuple[str, str | None]] = {}
        for node in ast.parse(inspect.getsource(module)).body:
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
                methods = [each for each in node.body if isinstance(each, ast.FunctionDef)]
                self.definitions |= {
                    node.name: node,
                    **{f"{node.name}.{each.name}": each for each in methods},
                }
            elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
                self.definitions[node.targets[0].id] = node
            elif isinstance(node, ast.Import):
                self.imports |= {alias.asname or alias.name: (alias.name, None) for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                self.imports |= {
                    alias.asname or alias.name: (node.module, alias.name) for alias in node.names
                }


class Text:
    """The definitions that are reached from what `name_of` is asked for.

    modules: ours. bound: places that stand for others. known: the values of places. methods: the place of each method that becomes a
    function, by its name. replaced: calls in whose place something else stands.
    """

    def __init__(
        self,
        modules: list[ModuleType],
        bound: Mapping[Place, Place],
        known: Mapping[Place, object],
        methods: Mapping[str, Place],
        replaced: Mapping[str, str],
    ):
        self.modules = {module.__name__: Module(module) for module in modules}
        self.bound, self.known, self.methods, self.replaced = bound, known, methods, replaced
        self.names: dict[Place, str] = {}
        self.definitions: dict[str, ast.stmt] = {}
        self.imports: dict[str, str] = {}  # a private name's import

    def place(self, module: str, name: str) -> Place | None:
        """Where `name`, as read in `module`, is defined, if that is one of ours."""
        found = (module, name)
        if name not in self.modules[module].definitions:
            source, original = self.modules[module].imports.get(name, (None, None))
            if source in self.modules and original:
                return self.place(source, original)
            if not any(found in each for each in (self.bound, self.known, self.names)):
                return None
        while found in self.bound:
            found = self.bound[found]
        return found

    def name_of(self, place: Place) -> str:
        """The private name of a definition, which is then there."""
        if place not in self.names:
            name = "_" + place[1].rpartition(".")[2].lstrip("_")
            while name in self.names.values():
                name = f"_{place[0].rpartition('.')[2].rpartition('_')[2]}{name}"
            self.names[place] = name
            node = copied(self.modules[place[0]].definitions[place[1]])
            self.definitions[name] = node  # its place is before that of what it reaches
            self.definitions[name] = node = self.rewritten(node, place[0])
            if isinstance(node, ast.Assign):
                node.targets[0].id = name
            else:
                node.name = name
        return self.names[place]

    def rewritten(self, node: ast.stmt, module: str) -> ast.stmt:
        """A definition of `module` in the names of the text."""
        return ast.fix_missing_locations(_Rewriter(self, module, node).visit(node))

    def import_of(self, module: str, name: str | None) -> str:
        """The name by which something of a module that is not ours is known in the text."""
        if module == "torch":
            return "torch" if name is None else "nn" if name == "nn" else f"torch.{name}"
        private = "_" + (name or module)
        self.imports[private] = (
            f"from {module} import {name} as {private}" if name else f"import {module} as {private}"
        )
        return private


class _Final(ast.Name):
    """A name of the text already."""


class _Rewriter(ast.NodeTransformer):
    """Puts one definition of `module` into the names of the text."""

    def __init__(self, text: Text, module: str, definition: ast.stmt):
        self.text, self.module, nodes = text, module, [*ast.walk(definition)]
        self.is_method = isinstance(
            definition, ast.FunctionDef
        )  # if it has a `self`: one that becomes a function
        methods = getattr(definition, "body", []) if isinstance(definition, ast.ClassDef) else [definition]
        imports = [node for node in nodes if isinstance(node, (ast.Import, ast.ImportFrom))]
        self.local = {
            *[node.name for node in nodes if isinstance(node, ast.FunctionDef) and node not in methods],
            *[alias.asname or alias.name for node in imports for alias in node.names],
            *[node.arg for node in nodes if isinstance(node, ast.arg)],
        }
        if not isinstance(definition, ast.Assign):
            self.local |= {n.id for n in nodes if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}

    def resolve(self, node: ast.expr) -> Place | None:
        """The place of ours that an expression names."""
        if isinstance(node, ast.Name) and node.id not in self.local:
            return self.text.place(self.module, node.id)
        if (
            isinstance(node, ast.Attribute)
            and isinstance(node.value, ast.Name)
            and node.value.id not in self.local
        ):
            source, name = self.text.modules[self.module].imports.get(node.value.id, (None, ""))
            return (
                self.text.place(source, node.attr) if source in self.text.modules and name is None else None
            )
        return None

    def of_place(self, place: Place) -> ast.expr:
        if place in self.text.known:
            return ast.Constant(self.text.known[place])
        return ast.Name(self.text.name_of(place), ast.Load())

    def visit_Name(self, node: ast.Name) -> ast.expr:
        if node.id == "self" and self.is_method:
            return ast.Name("model", node.ctx)
        if node.id in self.local or not isinstance(node.ctx, ast.Load):
            return node
        if place := self.resolve(node):
            return self.of_place(place)
        source, name = self.text.modules[self.module].imports.get(node.id, (None, None))
        if source:
            return ast.parse(self.text.import_of(source, name), mode="eval").body
        if not hasattr(builtins, node.id):
            raise ValueError(f"{self.module}: {node.id} is neither defined nor imported at the top")
        return node

    def visit__Final(self, node: _Final) -> ast.Name:
        return ast.Name(node.id, node.ctx)

    def visit_Attribute(self, node: ast.Attribute) -> ast.expr:
        place = self.resolve(node)
        return self.of_place(place) if place else self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> ast.expr:
        if (text := self.text.replaced.get(ast.unparse(node))) is not None:
            return self.visit(ast.parse(text, mode="eval").body)
        function = node.func
        if (
            isinstance(function, ast.Attribute)
            and ast.unparse(function.value) == "self"
            and function.attr in self.text.methods
        ):
            name = self.text.name_of(self.text.methods[function.attr])
            node = ast.Call(_Final(name, ast.Load()), [function.value, *node.args], node.keywords)
        return self.generic_visit(node)

    def visit_arg(self, node: ast.arg) -> ast.arg:
        return ast.arg("model" if node.arg == "self" and self.is_method else node.arg)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.FunctionDef:
        node.returns = None
        node.decorator_list = [each for each in node.decorator_list if ast.unparse(each) not in _DROPPED]
        return self.visit_ClassDef(node)

    def visit_ClassDef(self, node: ast.ClassDef | ast.FunctionDef) -> ast.ClassDef | ast.FunctionDef:
        if text := ast.get_docstring(node):  # its first sentence
            sentence = re.match(r".*?[.?:](?=\s|$)", " ".join(text.split()))
            node.body[0] = ast.Expr(ast.Constant(re.sub(r":$", ".", sentence[0]) if sentence else text))
        return self.generic_visit(node)


def copied(node: ast.AST) -> ast.AST:
    return ast.parse(ast.unparse(ast.fix_missing_locations(node))).body[0]


def without_docstring(body: list[ast.stmt]) -> list[ast.stmt]:
    first = body[0]
    is_text = (
        isinstance(first, ast.Expr)
        and isinstance(first.value, ast.Constant)
        and type(first.value.value) is str
    )
    return body[1:] if is_text else body


# ----------------------------------------------------------------------------------------------------------------- layout


def source_of(node: ast.stmt, docstrings: bool) -> str:
    """The text of a definition."""
    if not docstrings:
        for each in ast.walk(node):
            if isinstance(each, (ast.FunctionDef, ast.ClassDef)):
                each.body = without_docstring(each.body) or each.body
    lines = ast.unparse(ast.fix_missing_locations(node)).splitlines()
    return "\n".join(wrapped(line) for line in lines if docstrings or line)


def as_namedtuple(node: ast.stmt) -> ast.stmt:
    """A NamedTuple in the shortest words."""
    if not isinstance(node, ast.ClassDef) or ast.unparse(node.bases) != "_NamedTuple":
        return node
    fields = [each for each in node.body if isinstance(each, ast.AnnAssign)]
    defaults = ", ".join(ast.unparse(each.value) for each in fields if each.value)
    names = " ".join(each.target.id for each in fields)
    base = f"_namedtuple('{node.name}', '{names}'{f', defaults=({defaults},)' if defaults else ''})"
    methods = [each for each in node.body if isinstance(each, ast.FunctionDef)]
    if not methods:
        return ast.parse(f"{node.name} = {base}").body[0]
    node.bases, node.body = [ast.parse(base, mode="eval").body], methods
    return node


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
