"""What of its headers a source uses: declarations whose names nobody reads are left out, with the comments above them."""

from __future__ import annotations

import re
from dataclasses import dataclass

from inline_kernels.loader.source import code_of

_SPACE = re.compile(r'(inline )?namespace\b[^;]*\{$|extern "C" \{$|\}$')  # what encloses declarations
_TYPE = re.compile(r"(?:struct|class|union)\s+(\w+)")
_FUNCTION = re.compile(
    r"(\w+)(?<!alignas)(?<!decltype)(?<!__launch_bounds__)(?<!__attribute__)(?<!__align__)\("
)
_MACRO = re.compile(
    r"\s*(?:[A-Z][A-Z_\d]*\(\w[^()]*\)\s*)+$"
)  # definitions by macros, which have names that begin so
_VALUE = re.compile(r"(\w+)(?:\[[^\]]*\])*(?: =|\{|;|,)")


@dataclass
class _Unit:
    """A declaration, a directive, or what encloses declarations. names: those that it declares; none: it stays. words: those in it."""

    lines: list[str]
    names: set[str]
    words: set[str]
    stays: bool = False


def used(headers: str, source: str) -> str:
    """`headers` without declarations at namespaces' level whose names neither `source` nor what stays reads. Of those with the same name
    all stay."""
    units, words = _units(headers), set(re.findall(r"\w+", code_of(source)))
    while found := [unit for unit in units if not unit.stays and (not unit.names or unit.names & words)]:
        for unit in found:
            unit.stays = True
            words |= unit.words
    text = "\n".join(line for unit in units if unit.stays for line in unit.lines)
    empty = re.compile(
        r"^(?:namespace [\w:]*\s?\{\n\s*\}.*|#if.*\n(?:#el.*\n)*\s*#endif.*|// -+ \S+\n(?=\s*(?:// -+ \S+$|\Z)))\n",
        flags=re.M,
    )
    while empty.search(text):
        text = empty.sub("", text)
    return re.sub(r"\n{3,}", "\n\n", text)


def _units(text: str) -> list[_Unit]:
    found: list[_Unit] = []
    lines, code = text.split("\n"), code_of(text).split("\n")
    every = set(re.findall(r"\w+", text))
    begin, at = 0, 0  # of a unit, with the comments above it
    while at < len(lines):
        if not code[at].strip():  # a comment, or blank
            at += 1
            if not lines[at - 1].strip():
                found.append(_Unit(lines[begin:at], set(), set()))
                begin = at
            continue
        end = at + 1
        if re.match(r"\s*#", code[at]):
            while code[end - 1].endswith("\\"):
                end += 1
        elif not _SPACE.match(code[at].rstrip()):
            while not _ends("\n".join(code[at:end])):
                end += 1
        own = "\n".join(code[at:end])
        names = _names(own)
        if _MACRO.match(own):
            names |= {word for word in every if word.startswith(tuple(names))}
        found.append(_Unit(lines[begin:end], names, set(re.findall(r"\w+", own))))
        begin = at = end
    return [*found, _Unit(lines[begin:], set(), set())]


def _ends(code: str) -> bool:
    flat = re.sub(r"^[ \t]*#.*$", "", code, flags=re.M).rstrip()
    depth = sum(flat.count(c) for c in "{([") - sum(flat.count(c) for c in "})]")
    return depth == 0 and (flat.endswith((";", "}")) or bool(_MACRO.match(flat)))


def _names(code: str) -> set[str]:
    if define := re.match(r"\s*#\s*define (\w+)", code):
        return {define[1]}
    if re.match(r"\s*#", code) or _SPACE.match(code.rstrip()) or code.startswith("static_assert"):
        return set()
    if _MACRO.match(code):
        return set(re.findall(r"\((\w+)", code))
    head = _without_template(code)
    if using := re.match(r"using (?!namespace)(\w+) *(?:=|__attribute__)", head):
        return {using[1]}
    if head.startswith("enum"):
        return set(re.findall(r"\w+", head)) - {"enum", "class"}
    if head.startswith(("struct", "class", "union")):
        while (flat := re.sub(r"\w*\([^()]*\)", "", head)) != head:  # alignas(2 * sizeof(T))
            head = flat
        return {_TYPE.match(head)[1]}
    until = re.split(r"[{;]| = ", head, maxsplit=1)[0]
    if "(" in until:
        function = _FUNCTION.search(until)
        return {function[1]} if function and "operator" not in until else set()
    return set(_VALUE.findall(re.sub(r"\{[^{}]*\}|\([^()]*\)", "", head)))


def _without_template(code: str) -> str:
    """What follows `template <…>`."""
    while code.startswith("template"):
        depth, end = 0, code.index("<")
        while end == code.index("<") or depth:
            depth += {"<": 1, ">": -1}.get(code[end], 0)
            end += 1
        code = code[end:].lstrip()
    return code
