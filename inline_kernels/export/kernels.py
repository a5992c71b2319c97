"""The kernels of an exported cell as text for load_inline: their sources with every header of ours in its place, once, in order.

Both compilers are given the same text: CUDA's reads what the device runs, the host's what registers the launchers with PyTorch.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from pathlib import Path

from inline_kernels.loader.source import REGISTER, REGISTRATION, parse_launchers, registration
from inline_kernels.loader.units import KERNELS, RESTORED

NAMESPACE = "_NAMESPACE_"  # on the host side, in the place of the build's name
REGISTERED = f"""{REGISTRATION};
static const bool registered = ({REGISTER}(&inline_loader::pytorch, "{NAMESPACE}"), true);
"""
FORMULA = "// THE FORMULA: edit the next line, run the cell again. (Backward then asks for its gradient.)"
GRADIENT = "// THE GRADIENT: of that formula, to be edited with it."
_INCLUDE = re.compile(r'[ \t]*#[ \t]*include[ \t]*"([^"]+)"')


def kernels(stems: list[str], device: str, folder: Path = KERNELS) -> dict[str, str]:
    """The text of each of `stems`, files <stem>.cu or <stem>.cpp in `folder`; headers that all include, and all in the same way, are the
    text of "", to be put in front.

    The formula's line is marked, in the first, and those of its gradient. Raises ValueError where no line of either is.
    """
    sources = [folder / (f"{stem}.cu" if device == "cuda" else f"{stem}.cpp") for stem in stems]
    homes = [_homes([source], folder) for source in sources]
    own = [path for source in sources for path in _headers_by_macro(source, folder)]
    common = [path for path in homes[0] if all(each.get(path) == () for each in homes)]
    shared = [path for path in common if path not in own] if stems[1:] else []
    seen: set[Path] = set()
    both = _inlined([KERNELS / "core/scalar.h", KERNELS / "host/host.h"], folder, seen, [])
    headers = _inlined(shared, folder, seen, sources)
    texts = {
        "": _compiled_by(device, both, headers, _inlined([KERNELS / "host/pytorch.h"], folder, seen, []))
    }
    for stem, source in zip(stems, sources):
        launchers = parse_launchers(source.read_text(encoding="utf-8"), source.name)
        generated = [
            _title("generated: the launchers as operators"),
            registration(launchers, device),
        ]
        text = [*_inlined([source], folder, set(seen), shared), *generated]
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
    """`texts` with the lines of the formula and of its gradient marked. The word `pass` becomes another: KernelBench's checker takes it for Python's statement."""
    mark = re.compile(rf"// The formula of {re.escape(stem)}\.$", flags=re.M)
    name = next((name for name in (stem, "") if mark.search(texts.get(name, ""))), None)
    if name is None:
        raise ValueError(f"expected a line `// The formula of {stem}.` above the formula in its kernels")
    last = [*mark.finditer(texts[name])][-1]  # the kernels' own comes after what headers have
    texts[name] = texts[name][: last.start()] + FORMULA + texts[name][last.end() :]
    texts = {
        key: text.replace(f"// The gradient of {stem}.\n", f"{GRADIENT}\n") for key, text in texts.items()
    }
    if not any(GRADIENT in text for text in texts.values()):
        raise ValueError(f"expected lines `// The gradient of {stem}.` above its gradient in its kernels")
    texts = {
        name: re.sub(r"^[ \t]*// The (formula|gradient) of \w+\.\n", "", text, flags=re.M)
        for name, text in texts.items()
    }
    return {name: re.sub(r"\bpass\b", "sweep", text) for name, text in texts.items()}


def _title(name: str) -> str:
    return f"// {f' {name}':->107}"


def _closure(path: Path, folder: Path) -> list[Path]:
    """The headers of ours that `path` includes, directly or not, each after what it includes."""
    return list(dict.fromkeys(header for header, _ in _places(path, folder)))


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


def _homes(paths: list[Path], folder: Path) -> dict[Path, tuple]:
    """The headers of ours that `paths` include, directly or not, each with the branches of #if in which all its includes stand."""
    homes: dict[Path, tuple] = {}
    for header, place in itertools.chain.from_iterable(_places(path, folder) for path in paths):
        both = zip(homes.get(header, place), place)
        homes[header] = tuple([a for a, _ in itertools.takewhile(lambda pair: pair[0] == pair[1], both)])
    return homes


def _inlined(paths: list[Path], folder: Path, seen: set[Path], others: list[Path]) -> list[str]:
    """The texts of `paths` with the headers of ours that they include in their places, but for those `seen`. others: who else includes
    them in the same build."""
    homes = _homes([*paths, *others], folder)
    return ["\n".join(_lines(path, folder, seen, homes)) for path in paths if path not in seen]


def _lines(path: Path, folder: Path, seen: set[Path], homes: dict[Path, tuple], at: tuple = ()) -> list[str]:
    """The lines of `path`, to which the branches `at` lead. What more than one branch of an #if needs comes before it."""
    seen.add(path)
    ours = path.is_relative_to(KERNELS)
    lines = [_title(path.relative_to(KERNELS).as_posix() if ours else path.name)]
    for number, (line, branches) in enumerate(_branched(path)):
        here, wanted = at + branches, []
        if include := _INCLUDE.match(line):
            wanted = [_header(include[1], folder)]
        elif re.match(r"[ \t]*#[ \t]*if", line):
            within = [h for h, place in _places(path, folder, at) if (path, number) in [b[:2] for b in place]]
            wanted = [header for header in within if len(homes[header]) <= len(here)]
        for header in wanted:
            lines += _lines(header, folder, seen, homes, here) if header not in seen else []
        lines += [] if include or line == "#pragma once" else [line]
    return lines


def _branched(path: Path) -> Iterator[tuple[str, tuple]]:
    """The lines of `path`, each with the branches of #if around it: (file, line of the #if, number of the branch)."""
    branches: list[tuple] = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines()):
        directive = re.match(r"[ \t]*#[ \t]*(if|el|endif)", line)
        kind = directive and directive[1]
        if kind in ("el", "endif"):
            *branches, (_, opened, branch) = branches
        yield line, tuple(branches)
        if kind in ("if", "el"):
            branches.append((path, number, 0) if kind == "if" else (path, opened, branch + 1))


def _places(path: Path, folder: Path, at: tuple = ()) -> Iterator[tuple[Path, tuple]]:
    """The headers of ours that `path` includes, directly or not, each after what it includes, with the branches that lead to it."""
    for line, branches in _branched(path):
        if include := _INCLUDE.match(line):
            header = _header(include[1], folder)
            yield from _places(header, folder, at + branches)
            yield header, at + branches


def _header(name: str, folder: Path) -> Path:
    """The header `name`, beside the kernels or of ours."""
    found = [place / name for place in (folder, KERNELS) if (place / name).is_file()]
    if not found:
        raise FileNotFoundError(f"no header {name} in {folder} or {KERNELS}")
    return found[0]
