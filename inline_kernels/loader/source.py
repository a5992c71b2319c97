"""What the loader reads in a kernel's source, and what it adds: its launchers, headers and macros, the host side around them.

What compilers don't take for code is none here either: comments, strings, `#if 0`. `code_of` blanks it, so that positions in the
code are those in the source.
"""

from __future__ import annotations

import keyword
import math
import numbers
import re
import types
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from inline_kernels.loader.messages import BuildError, at_line

NUMBERS = {"int64_t": "int", "double": "float", "bool": "bool"}  # C type to the operator's


@dataclass(frozen=True)
class Parameter:
    """One parameter of a launcher: its C type without `const`, of a tensor that of its elements; its name; whether it is a tensor, is only
    read, and comes with its sizes."""

    ctype: str
    name: str
    tensor: bool
    const: bool
    sized: bool = False

    @property
    def written(self) -> bool:
        return self.tensor and not self.const

    @property
    def declared(self) -> str:
        if self.sized:
            return f"{'In' if self.const else 'Out'}<{self.ctype}>"
        return f"{'const ' if self.const else ''}{self.ctype}{'*' if self.tensor else ''}"

    @property
    def registered(self) -> str:
        return _registered(self.name)

    @property
    def schema(self) -> str:
        name = self.registered
        if self.tensor:
            return f"Tensor {name}" if self.const else f"Tensor({name}!) {name}"
        return f"{NUMBERS[self.ctype]} {name}"


@dataclass(frozen=True)
class Launcher:
    """A function marked EXPORT. `stream` says whether its last parameter is the CUDA stream; `place` is the line and the column of
    its name. One that is `asked` launches nothing: it returns an int64_t that depends on numbers and on tensors' sizes."""

    name: str
    parameters: tuple[Parameter, ...]
    stream: bool
    place: tuple[int, int] = field(default=(1, 1), compare=False)
    asked: bool = False

    @property
    def result(self) -> str:
        return "int64_t" if self.asked else "void"

    @property
    def types(self) -> str:
        return ", ".join([p.declared for p in self.parameters] + ["cudaStream_t"] * self.stream)

    @property
    def operator(self) -> str:
        return _registered(self.name)

    @property
    def schema(self) -> str:
        returned = " -> int" if self.asked else ""
        return f"{self.operator}({', '.join(p.schema for p in self.parameters)}){returned}"


def _registered(name: str) -> str:
    """What Python knows a launcher or a parameter by: its name, but where that can't be one there, or would start with "_"."""
    return f"cpp_{name}" if keyword.iskeyword(name) or name == "name" or name.startswith("_") else name


# ------------------------------------------------------------------------------------------------------------- the code

_NO_CODE = re.compile(
    r"""
    //(?:[^\\\n]|\\.)*
    | /\*.*?(?:\*/|\Z)
    | (?<!\w)(?:u8|[uUL])?R"(?P<mark>[^()\\\s]*)\(.*?\)(?P=mark)"
    | "(?:[^"\\\n]|\\.)*"
    | (?<!\w)(?:u8|[uUL])?'(?:[^'\\\n]|\\.)*'  # after a digit it is no quote: 1'000
    """,
    re.S | re.X,
)
_CONDITION = re.compile(r"\s*#\s*(if|el|endif)\w*\s*(.*?)\s*$")
_KNOWN = {"0": False, "false": False, "1": True, "true": True}
_DIRECTIVE = re.compile(r"^[ \t]*#(?:[^\\\n]|\\.)*", re.M | re.S)


def _blank(match: re.Match) -> str:
    return re.sub(r"[^\n]", " ", match[0])


def code_of(source: str) -> str:
    """`source` with blanks in the place of comments, strings, and branches that no compiler takes (#if 0)."""
    lines = []
    branches: list[
        tuple[bool, bool]
    ] = []  # of each #if around a line: may this one be taken? was one before?
    for line in _NO_CODE.sub(_blank, source).split("\n"):
        if condition := _CONDITION.match(line):
            known = _KNOWN.get(condition[2])
            _, before = branches.pop() if branches and condition[1] != "if" else (True, False)
            if condition[1] != "endif":
                branches.append((not before and known is not False, before or known is True))
        lines.append(line if all(live for live, _ in branches) else " " * len(line))
    return "\n".join(lines)


# ------------------------------------------------------------------------------------------------------------ launchers

_LAUNCHER = re.compile(r"EXPORT\s+(void|int64_t)\s+([A-Za-z_]\w*)\s*\(([^()]*)\)")
_TYPE = re.compile(r"(const )?([\w:]+)( const)?( \*)?( const)?")
_SIZED = re.compile(r"(?:const )?(In|Out) < ([\w:]+) >(?: const)?")


# What begins and ends a scope, and the preprocessor's branches: each is in the scopes of its #if.
_SCOPE = re.compile(
    r"""
    ^[ \t]*\#[ \t]*(?P<branch>if|el|endif)?(?:[^\\\n]|\\.)*
    | (?P<space>\bnamespace\b[^;{}()=]*){
    | (?P<brace>[{}])
    | (?P<mark>\bEXPORT\b)
    """,
    re.M | re.S | re.X,
)


def _marks(code: str) -> Iterator[tuple[int, str]]:
    """Where `code` has the word EXPORT, and in which namespace ("": in none)."""
    scopes: list[str] = []
    branches: list[list[str]] = []
    for found in _SCOPE.finditer(code):
        if found["mark"]:
            yield found.start(), next(filter(None, scopes), "")
        elif found["space"] or found["brace"] == "{":
            scopes.append(" ".join((found["space"] or "").split()))
        elif found["brace"]:
            del scopes[-1:]
        elif found["branch"] == "if":
            branches.append(scopes.copy())
        elif found["branch"] and branches:
            scopes = branches[-1].copy() if found["branch"] == "el" else scopes
            del branches[len(branches) - (found["branch"] == "endif") :]


def parse_launchers(
    source: str, origin: str = "source", first_line: int = 1, headers: Iterable[str] = ()
) -> list[Launcher]:
    """The launchers that `source`, which starts at `first_line` of `origin`, exports, in order. headers: the texts that it includes.

    Raises BuildError where there is none, or where what is marked EXPORT can't be one.
    """
    scoped, text = code_of(source), "\n" * (first_line - 1) + source
    code = _DIRECTIVE.sub(_blank, scoped)
    launchers: dict[str, Launcher] = {}
    bodies: set[str] = set()
    for mark, space in _marks(scoped):
        found = _LAUNCHER.match(code, mark)
        start = found.start(2) if found else mark
        place = code.count("\n", 0, start) + first_line, start - code.rfind("\n", 0, start)
        try:
            if not found:
                got = re.match(r"[^{};]{,200}", code[mark:])[0]
                raise ValueError(
                    "expected `EXPORT void name(parameters)`, or `EXPORT int64_t name(parameters)` of what depends on sizes alone, "
                    f"got `{' '.join(got.split())}`"
                )
            before = code[max(code.rfind(end, 0, mark) for end in ";{}") + 1 : mark]
            if template := re.search(r"\btemplate\b.*", before, re.S):
                got = f"`{' '.join(template[0].split())}` before it"
                raise ValueError(
                    f"{found[2]}: expected a launcher with types of its own, no template, got {got}"
                )
            if space:
                raise ValueError(
                    f"{found[2]}: expected a launcher outside of namespaces, got it in `{space}`"
                )
            launcher = _parse_launcher(*found.groups(), place)
            if launchers.setdefault(launcher.name, launcher) != launcher:
                raise ValueError(f"{launcher.name} is exported a second time, with other parameters")
            if not re.match(r"\s*;", code[found.end() :]):
                bodies.add(launcher.name)
        except ValueError as error:
            raise BuildError(at_line(origin, text, *place, str(error))) from None
    for name in launchers.keys() - bodies:
        body = re.compile(rf"\b{launchers[name].result}\s+{name}\s*\([^()]*\)[^;{{}}]*{{")
        if not any(body.search(each) for each in (code, *headers)):
            got = f"{name}: expected a body, `EXPORT {launchers[name].result} {name}(...) {{ ... }}`, got a declaration alone"
            raise BuildError(at_line(origin, text, *launchers[name].place, got))
    if not launchers:
        raise BuildError(
            f"{origin}: expected at least one launcher, `EXPORT void name(float* y, const float* x, int64_t n)`"
        )
    return list(launchers.values())


def _parse_launcher(result: str, name: str, text: str, place: tuple[int, int]) -> Launcher:
    texts = [" ".join(part.split()) for part in text.split(",")] if text.strip() else []
    stream = bool(texts and re.fullmatch(r"(const )?cudaStream_t( const)? \w+", texts[-1]))
    parameters = tuple(_parse_parameter(part) for part in (texts[:-1] if stream else texts))
    asked = result == "int64_t"
    wrong = [p.declared for p in parameters if p.tensor and not (p.sized and p.const)] + [
        "cudaStream_t"
    ] * stream
    if asked and wrong:
        raise ValueError(
            f"{name}: expected `In<T>` tensors and numbers where an int64_t is returned, got {wrong[0]}"
        )
    if not asked and not any(parameter.tensor for parameter in parameters):
        raise ValueError(f"{name}: expected at least one tensor (pointer) parameter, got ({text.strip()})")
    return Launcher(name, parameters, stream, place, asked)


# What a number of another type is to be written as.
_INSTEAD = dict.fromkeys(["int", "long", "short", "unsigned", "signed", "char", "size_t"], "int64_t")
_INSTEAD |= {f"{sign}int{bits}_t": "int64_t" for sign in ("", "u") for bits in (8, 16, 32, 64)}
_INSTEAD |= {"float": "double", "half_t": "double", "bfloat16_t": "double"}


def _parse_parameter(text: str) -> Parameter:
    *kind, name = re.findall(r"[\w:]+|\S", text) or [""]
    kind = [word for word in kind if word not in ("__restrict__", "__restrict")]
    match, sized = _TYPE.fullmatch(" ".join(kind)), _SIZED.fullmatch(" ".join(kind))
    if sized and name.isidentifier():
        return Parameter(sized[2], name, True, sized[1] == "In", sized=True)
    if not match or not name.isidentifier() or not (match[4] or match[2] in NUMBERS):
        instead = {_INSTEAD.get(word.removeprefix("std::")) for word in kind if word != "const"}
        hint = f": write `{instead.pop()} {name}`" if len(instead) == 1 and instead != {None} else ""
        raise ValueError(
            "expected parameters like `Out<float> y`, `In<float> x`, `float* y`, `const float* x`, `int64_t n`, `double a`, `bool b` "
            f"and a last `cudaStream_t stream`, got `{text}`{hint}"
        )
    return Parameter(match[2], name, bool(match[4]), bool(match[4] and (match[1] or match[3])))


def without(source: str, names: Iterable[str]) -> str:
    """`source` with blanks in the place of the launchers `names`, and all lines where they were. Directives among them stay."""
    scoped, names, blanked, end = code_of(source), {*names}, [], 0
    code = _DIRECTIVE.sub(_blank, scoped)
    # As code_of, but with the strings and branches that directives may have.
    written = _NO_CODE.sub(lambda match: _blank(match) if match[0][0] == "/" else match[0], source)
    for mark, _ in _marks(scoped):
        found = _LAUNCHER.match(code, mark)
        if not found or found[2] not in names:
            continue
        start = max(code.rfind(each, end, mark) for each in ";{}") + 1 or end
        stop = _end_of_function(scoped, found.end())
        text = list(re.sub(r"[^\n]", " ", source[start:stop]))
        for directive in _DIRECTIVE.finditer(_NO_CODE.sub(_blank, source), start, stop):
            text[directive.start() - start : directive.end() - start] = written[slice(*directive.span())]
        blanked += [source[end:start], "".join(text)]
        end = stop
    return "".join([*blanked, source[end:]])


def _end_of_function(scoped: str, start: int) -> int:
    """Where the function ends whose parameters end at `start` of what `code_of` gives: behind its body, or the `;` of a declaration."""
    if declared := re.compile(r"\s*;").match(scoped, start):
        return declared.end()
    depth, branches = 0, []
    for found in _SCOPE.finditer(scoped, start):
        if found["space"] or found["brace"] == "{":
            depth += 1
        elif found["brace"]:
            depth -= 1
            if depth <= 0:
                return found.end()
        elif found["branch"] == "if":
            branches.append(depth)
        elif found["branch"] and branches:
            depth = branches[-1] if found["branch"] == "el" else depth
            del branches[len(branches) - (found["branch"] == "endif") :]
    return len(scoped)


# -------------------------------------------------------------------------------------------------------------- headers

_INCLUDE = re.compile(r"(?:^[ \t]*#[ \t]*include|\b__has_include[ \t]*\()", re.M)
_HEADER = re.compile(r'[ \t]*("([^"\n]+)"|<([^>\n]+)>)')


@dataclass(frozen=True)
class Header:
    """A header that is compiled: where it was found, its text, and its name in the build folder."""

    path: str
    text: str
    copy: str


def read(path: Path) -> str:
    """A source's text; what is no UTF-8 comes back as it was when the text is written with `surrogateescape`."""
    return path.read_text(encoding="utf-8-sig", errors="surrogateescape")


def gather(
    source: str,
    place: Path,
    folders: Iterable[Path],
    found: dict[Path, Header],
    cells: Mapping[str, str] = types.MappingProxyType({}),
) -> str:
    """`source`, as of the folder `place`, with copies in the place of the headers that it includes, directly or not.

    A header is looked for as compilers do, in `place` and then in `folders`; `found` gets them. What it includes itself is looked for
    in its own one of `folders` first. The text names the copies, so that nothing but what is in `found` can be compiled, and no
    header hides another of its name. cells: texts that are headers, too, by the names that include them in quotes.
    """
    folders = list(folders)
    text, end = [], 0

    def add(key: Path, path: str, copy: str, content: str, place: Path, folders: list[Path]) -> None:
        found[key] = Header(path, "", copy)  # it may include itself
        found[key] = Header(path, gather(content, place, folders, found, cells), copy)

    for directive in _INCLUDE.finditer(code_of(source)):
        name = _HEADER.match(source, directive.end())
        places = [place, *folders] if name and name[2] else folders
        home = name and next((f for f in places if Path(f, name[2] or name[3]).is_file()), None)
        if name and name[2] in cells:
            if (key := Path(origin := f"<{name[2]}>")) not in found:
                add(key, origin, f"headers/cells/{name[2]}", cells[name[2]], place, folders)
        elif home is None:  # the compiler's own, or an error of its
            continue
        elif (key := (path := Path(home, name[2] or name[3])).resolve()) not in found:
            copy = f"headers/{sum(other.name == key.name for other in found)}/{key.name}"
            own = sorted(folders, key=lambda folder: folder != home)
            add(key, str(path), copy, read(path), path.parent, own)
        text += [source[end : name.start(1)], f'"{found[key].copy}"']
        end = name.end()
    return "".join([*text, source[end:]])


def with_cells(source: str, cells: Mapping[str, str]) -> str:
    """`source` with the texts that it includes by the names of `cells` in their places, each once, at the first."""
    there: set[str] = set()

    def text(include: re.Match) -> str:
        name = include[1]
        if name not in cells or name in there:
            return "" if name in there else include[0]
        there.add(name)
        own = re.sub(r"^[ \t]*#[ \t]*pragma once[ \t]*$", "", cells[name], flags=re.M)
        return _QUOTED.sub(text, own).strip("\n")

    return _QUOTED.sub(text, source)


def inlined(source: str, headers: Iterable[Header], known: Mapping[str, bool] | None = None) -> str:
    """`source`, as `gather` gives it with `headers`, with these in their places: each once, at the first. One that is included in a branch
    of an #if stands before that #if, where all branches have it. known: macros that are defined, or are not; of an #ifdef of one the live
    branch is left."""
    by_copy, known = {header.copy: header for header in headers}, known or {}

    def lines_of(text: str) -> list[str]:
        found: list[str] = []
        branches: list[bool | None] = []  # of each #if around a line: is this branch live? None: who knows
        opened = 0  # where the outermost of those begins
        for line in text.split("\n"):
            word, name = branch.groups() if (branch := _BRANCH.match(line)) else ("", "")
            left = line.strip() == "#pragma once"
            if word.startswith("if"):
                opened = opened if None in branches else len(found)
                branches.append(known[name] == (word == "ifdef") if name in known and word != "if" else None)
                left = branches[-1] is not None
            elif word:
                live = branches.pop()
                left = live is not None
                if word != "endif":
                    branches.append(not live if left else None)
            if left or False in branches:
                continue
            include = _QUOTED.match(line)
            if not include or include[1] not in copies:
                found.append(line)
            elif header := by_copy.pop(include[1], None):
                at = opened if None in branches else len(found)
                inner = lines_of(header.text.rstrip("\n"))
                found[at:at] = [f"// {f' {_shown(header.path)}':->107}", *inner]
                opened += len(inner) + 1
        return found

    copies = {*by_copy}
    return "\n".join(lines_of(source))


_BRANCH = re.compile(r"[ \t]*#[ \t]*(ifdef|ifndef|if|elif|else|endif)\b[ \t]*(\w*)")
_QUOTED = re.compile(r'^[ \t]*#[ \t]*include[ \t]*"([^"]+)"', re.M)


def _shown(path: str) -> str:
    """The last two parts of a header's path."""
    return "/".join(Path(path).parts[-2:])


_BINARY = re.compile(r'\.incbin\b(?:\s*(\\?")(/[^"\\]+)\1)?')


def assembled(origin: str, text: str) -> list[str]:
    """The files that the assembler puts into the library, by `.incbin` in a string of `text`; no compiler lists them.

    Raises BuildError for one that is named otherwise than by its absolute path, which can't be followed.
    """
    found = []
    for string in _NO_CODE.finditer(text) if ".incbin" in text else ():
        for name in _BINARY.finditer(string[0]) if string[0][0] != "/" else ():
            if not name[2]:
                start = string.start() + name.start()
                line, column = text.count("\n", 0, start) + 1, start - text.rfind("\n", 0, start)
                what = 'expected .incbin with an absolute path in the same string, `.incbin \\"/folder/file\\"`, so that a change of that file is seen'
                got = text[start : text.find("\n", start)]
                raise BuildError(at_line(origin, text, line, column, f"{what}, got `{got}`"))
            found.append(name[2])
    return found


# --------------------------------------------------------------------------------------------------------------- macros


def macros(defines: Mapping[str, object]) -> dict[str, str]:
    """The text of each macro. Raises TypeError for a value that is no text, number or bool, ValueError for what no macro can be."""
    return {name: _macro(name, value) for name, value in defines.items()}


def _macro(name: str, value: object) -> str:
    if not isinstance(name, str) or not re.fullmatch(r"[A-Za-z_]\w*(\([\w, .]*\))?", name, flags=re.A):
        raise ValueError(f"expected a macro's name in defines, got {name!r}")
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, numbers.Integral):
        return str(int(value))
    if isinstance(value, numbers.Real) and math.isfinite(value):
        return repr(float(value))
    if isinstance(value, str) and not re.search(r"[\n\r]|\\$", value):
        return value
    wrong = ValueError if isinstance(value, (str, numbers.Real)) else TypeError
    raise wrong(f"expected a line of text, a finite number or a bool for the macro {name}, got {value!r}")


# --------------------------------------------------------------------------------------------------------- registration


def registration(
    launchers: Iterable[Launcher],
    device: str,
    defines: Iterable[str] = (),
    halves: bool = True,
    origin: str = "",
) -> str:
    """The C++ behind the kernels that gives `launchers` to PyTorch as operators for `device` ("cpu" or "cuda"), as soon as it is
    called with PyTorch's side and with their namespace, and returns them.

    Their types are written with the macros `defines`, which end there. halves: has scalar.h its types of 16 bits? origin: where the
    launchers stand, for what compilers say of a pointer that can be no tensor.
    """
    launchers = list(launchers)
    parts = []
    if device == "cpu" and halves:
        elements = [f"INLINE_LOADER_ELEMENT(::{each}, {number})" for each, number in HALVES.items()]
        parts = ["namespace inline_loader {", *elements, "}"]
    known = TENSORS + ", half_t or bfloat16_t" * (device == "cuda" or halves)
    tensors = [(each, p) for each in launchers for p in each.parameters if p.tensor and origin]
    for index, (launcher, p) in enumerate(tensors):
        line, column = launcher.place
        word = f"inline_loader_is_tensor_{index}"
        what = "elements of" if p.sized else "a pointer to"
        problem = f"{launcher.name}: {p.name}: expected {what} {known}, got {p.declared}"
        parts += [f"constexpr bool {word} = inline_loader::is_element<{p.ctype}>;", "static_assert("]
        parts += [line_of(line, origin) + " " * (column - 1) + word + f', "{problem}");']
        parts += [line_of(len("\n".join(parts).split("\n")) + 2, GENERATED).rstrip()]
    for index, launcher in enumerate(launchers):
        schema = launcher.schema if launcher.asked else f"{launcher.schema} -> ()"
        words = [schema, launcher.operator, launcher.name]
        names = ", ".join(f'"{word}"' for word in [*words, *[p.name for p in launcher.parameters]])
        parts += [
            f"constexpr auto inline_loader_{index} = static_cast<{launcher.result} (*)({launcher.types})>(&::{launcher.name});",
            f"constexpr const char* inline_loader_names_{index}[] = {{{names}}};",
        ]
    numbers = range(len(launchers))
    entries = [
        f"&inline_loader::Entry<inline_loader_{i}, inline_loader_names_{i}>::launcher" for i in numbers
    ]
    return "\n".join(
        [
            *parts,
            *[f"#undef {name.partition('(')[0]}" for name in defines],
            f"constexpr const inline_loader::Launcher* inline_loader_entries[] = {{{', '.join(entries)}}};",
            f"{REGISTRATION} {{",
            "  inline_loader::host = given;",
            f'  given->add(name_space, "{device.upper()}", inline_loader_entries, {len(launchers)});',
            "  return inline_loader_entries;",
            "}",
            "",
        ]
    )


def line_of(number: int, origin: object) -> str:
    """Makes the compiler count lines from `number` and name `origin` in its messages."""
    return '#line {} "{}"\n'.format(number, str(origin).replace("\\", "\\\\").replace('"', '\\"'))


GENERATED = "generated registration"
TENSORS = "float, double, int64_t, int32_t, uint8_t, bool"
REGISTER = "inline_loader_register"
REGISTRATION = f"""extern "C" __attribute__((visibility("default")))
const inline_loader::Launcher* const* {REGISTER}(const inline_loader::Host* given, const char* name_space)"""
HALVES = {"half_t": 5, "bfloat16_t": 15}  # of scalar.h, on a CPU
