"""The kernels of an exported cell as text for load_inline: their sources with every header of ours in its place, once, in order.

Both compilers are given the same text: CUDA's reads what the device runs, the host's what registers the launchers with PyTorch.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

from inline_loader import KERNELS, RESTORED
from loader_source import REGISTER, parse_launchers, registration

NAMESPACE = "_NAMESPACE_"  # on the host side, in the place of the build's name
REGISTERED = f"""extern "C" void {REGISTER}(const inline_loader::Host*);
static const bool registered = ({REGISTER}(&inline_loader::pytorch), true);
"""
FORMULA = "// THE FORMULA: edit the next line, run the cell again. (The gradient has lines of its own.)"
_INCLUDE = re.compile(r'[ \t]*#[ \t]*include[ \t]*"([^"]+)"')


def kernels(stems: list[str], device: str, folder: Path = KERNELS) -> dict[str, str]:
    """The text of each of `stems`, files <stem>.cu or <stem>.cpp in `folder`; headers that all include, and all in the same way, are the
    text of "", to be put in front.

    The formula's line is marked, in the first. Raises ValueError where no line of it is.
    """
    sources = [folder / (f"{stem}.cu" if device == "cuda" else f"{stem}.cpp") for stem in stems]
    closures = [_closure(source, folder) for source in sources]
    own = [path for source in sources for path in _headers_by_macro(source, folder)]
    common = [path for path in closures[0] if all(path in closure for closure in closures)]
    shared = [path for path in common if path not in own] if stems[1:] else []
    seen: set[Path] = set()
    scalar, host = [_inlined(KERNELS / name, folder, seen) for name in ("scalar.h", "host.h")]
    headers = [_inlined(path, folder, seen) for path in shared if path not in seen]
    texts = {
        "": _compiled_by(device, [scalar, host], headers, [_inlined(KERNELS / "pytorch.h", folder, seen)])
    }
    for stem, source in zip(stems, sources):
        launchers = parse_launchers(source.read_text(encoding="utf-8"), source.name)
        generated = [
            _title("generated: the launchers as operators"),
            registration(launchers, NAMESPACE, device),
        ]
        text = [_inlined(source, folder, set(seen)), *generated]
        texts[stem] = _compiled_by(device, [], text, [REGISTERED])
    if len(stems) == 1:
        texts = {stems[0]: "\n".join(texts.values())}
    first = next(iter(texts))
    texts[first] = _prologue(device) + texts[first]
    return _marked(texts, stems[0])


def _prologue(device: str) -> str:
    """The macros of a build for `device` that inline_loader.py sets."""
    lines = [
        "#include <torch/version.h>",
        "#define STABLE_ABI (TORCH_VERSION_MAJOR * 100 + TORCH_VERSION_MINOR >= 210)",
    ]
    if device == "cuda":
        lines = ["#ifndef __CUDACC__", *lines, "#define WITH_CUDA", "#endif"]
    lines.append("#define EXPORT static  // a launcher")
    if device == "cuda":
        lines += [f"#undef __CUDA_NO_{what}__  // load_inline's" for what in RESTORED]
    return "\n".join([*lines, ""])


def _compiled_by(device: str, both: list[str], kernels: list[str], host: list[str]) -> str:
    """What both compilers read, what the kernels' does, and what the host's does. On a CPU they are one, and the host side comes first."""
    if device == "cuda":
        return "\n".join([*both, "#ifdef __CUDACC__", *kernels, "#else", *host, "#endif", ""])
    return "\n".join([*both, *kernels, *host, ""])


def _marked(texts: dict[str, str], stem: str) -> dict[str, str]:
    """`texts` with the formula's line marked. The word `pass` becomes another: KernelBench's checker takes it for Python's statement."""
    problem = "|".join(re.escape(name) for name in (stem, stem.removesuffix("_fused")))
    mark = re.compile(rf"// The formula of ({problem})\.$", flags=re.M)
    name = next((name for name in (stem, "") if mark.search(texts.get(name, ""))), None)
    if name is None:
        raise ValueError(f"expected a line `// The formula of {stem}.` above the formula in its kernels")
    last = [*mark.finditer(texts[name])][-1]  # the kernels' own comes after what headers have
    texts[name] = texts[name][: last.start()] + FORMULA + texts[name][last.end() :]
    texts = {
        name: re.sub(r"^[ \t]*// The formula of \w+\.\n", "", text, flags=re.M)
        for name, text in texts.items()
    }
    return {name: re.sub(r"\bpass\b", "sweep", text) for name, text in texts.items()}


def _title(name: str) -> str:
    return f"// {f' {name}':->107}"


def _closure(path: Path, folder: Path) -> list[Path]:
    """The headers of ours that `path` includes, directly or not, each after what it includes."""
    found: dict[Path, None] = {}
    for line in path.read_text(encoding="utf-8").splitlines():
        if include := _INCLUDE.match(line):
            header = _header(include[1], folder)
            found |= dict.fromkeys([*_closure(header, folder), header])
    return list(found)


def _headers_by_macro(source: Path, folder: Path) -> list[Path]:
    """Of the headers of ours that `source` includes, directly or not, those that hang on a macro of its own, defined before they are
    included, and those that include one of these. A macro under its own #ifndef is the build's: there it is the same for all."""
    above = source.read_text(encoding="utf-8").split('#include "', 1)[0]
    guarded = re.findall(r"^#ifndef (\w+)", above, flags=re.M)
    macros = {*re.findall(r"^#(?:define|undef) (\w+)", above, flags=re.M)}.difference(guarded)
    word = re.compile(rf"\b({'|'.join(macros) or '(?!)'})\b")
    return [
        path
        for path in _closure(source, folder)
        if any(word.search(each.read_text(encoding="utf-8")) for each in (path, *_closure(path, folder)))
    ]


def _inlined(path: Path, folder: Path, seen: set[Path]) -> str:
    """The text of `path` with the headers of ours that it includes in their places, but for those `seen`."""
    seen.add(path)
    lines = [_title(path.name)]
    text = [line for line in path.read_text(encoding="utf-8").splitlines() if line != "#pragma once"]
    for number, line in enumerate(text):
        if re.match(r"#[ \t]*if", line):  # what a header of one branch includes, the others may need as well
            lines += _needed_by_branches(text[number:], folder, seen)
        lines += _included(line, folder, seen) if _INCLUDE.match(line) else [line]
    return "\n".join(lines)


def _included(line: str, folder: Path, seen: set[Path]) -> list[str]:
    """The header that an include asks for, if it is not there yet."""
    header = _header(_INCLUDE.match(line)[1], folder)
    return [] if header in seen else [_inlined(header, folder, seen)]


def _needed_by_branches(text: Iterable[str], folder: Path, seen: set[Path]) -> list[str]:
    """What those headers include that stand between the #if at the start of `text` and its #endif."""
    depth, lines = 0, []
    for line in text:
        depth += bool(re.match(r"[ \t]*#[ \t]*if", line)) - bool(re.match(r"[ \t]*#[ \t]*endif", line))
        if depth == 0:
            break
        if include := _INCLUDE.match(line):
            needed = [path for path in _closure(_header(include[1], folder), folder) if path not in seen]
            lines += [_inlined(path, folder, seen) for path in needed if path not in seen]
    return lines


def _header(name: str, folder: Path) -> Path:
    """The header `name`, beside the kernels or of ours."""
    found = [place / name for place in (folder, KERNELS) if (place / name).is_file()]
    if not found:
        raise FileNotFoundError(f"no header {name} in {folder} or {KERNELS}")
    return found[0]
