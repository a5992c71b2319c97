"""What a build is made of: a source with its headers, macros and launchers, and digests of all that its code depends on."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import platform
import re
import sys
import types
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch

from inline_kernels.loader import cache, toolchain
from inline_kernels.loader import source as loader_source
from inline_kernels.loader.messages import BuildError
from inline_kernels.loader.source import (
    GENERATED,
    Header,
    Launcher,
    code_of,
    gather,
    line_of,
    parse_launchers,
    read,
    registration,
    with_cells,
    without,
)
from inline_kernels.loader.toolchain import STABLE_ABI

PACKAGE = Path(__file__).resolve().parents[1]
INSTALLED = PACKAGE / "kernels"  # by pip
KERNELS = INSTALLED if INSTALLED.is_dir() else PACKAGE.parent / "kernels"


@dataclass(frozen=True)
class Unit:
    """One library to build. `parts` are digests of all that its code depends on, `key` is the digest of those. Without launchers it is
    PyTorch's side of the others.

    In `source` and in `headers` the names of headers are those of the build folder; `given` is the source as it was given, with
    the cells that it includes.
    """

    name: str
    device: str
    origin: str
    source: str
    first_line: int
    headers: tuple[Header, ...]
    defines: Mapping[str, str]
    cflags: tuple[str, ...]
    cuda_cflags: tuple[str, ...]
    launchers: tuple[Launcher, ...]
    parts: Mapping[str, str] = field(default_factory=dict)
    given: str = ""

    @property
    def key(self) -> str:
        return _digest(self.parts)

    @property
    def label(self) -> str:
        """What the user reads of it: its name, or its launchers if they were chosen."""
        chosen = "launchers" in self.parts
        return ", ".join(f"{self.name}.{each.name}" for each in self.launchers) if chosen else self.name

    @property
    def namespace(self) -> str:
        return f"{self.name}_{self.key}"

    def depending_on(self, files: Mapping[str, list]) -> Unit:
        """As it was built from `files`, too, which the compilers have found by themselves, with their fingerprints."""
        parts = {**self.parts, "dependencies": cache.content(files)}
        return dataclasses.replace(self, parts=parts) if files else self

    def files(self) -> dict[str, str]:
        """The files to compile, by their name in the build folder: what load_inline gets includes them."""
        lines = {self.origin: self.first_line}
        parts = {
            origin: f"{line_of(lines.get(origin, 1), origin)}{text}\n" for origin, text in self._texts.items()
        }
        files = {header.copy: parts[header.path] for header in self.headers}
        if not self.launchers:
            return {**files, self.compiled: self.source}
        # What is not the user's comes before the macros; scalar.h reads some of them.
        text = [INCLUDE_HOST, "#define EXPORT static\n", parts[self._macros]]
        if self._takes_sizes:
            text.insert(0, INCLUDE_SIZED)
        if self.device == "cpu":
            text += [*["#define WITHOUT_HALVES\n"] * (not self._has_halves), INCLUDE_SCALAR]
        return {**files, self.compiled: "".join([*text, parts[self.origin], parts[GENERATED]])}

    @property
    def compiled(self) -> str:
        """The one of `files` that includes the others."""
        return "kernels.cu" if self.device == "cuda" and self.launchers else "kernels.cpp"

    @property
    def _takes_sizes(self) -> bool:
        """Are there tensors with their sizes? Names of tensor.h are nobody else's."""
        sized = any(p.sized for launcher in self.launchers for p in launcher.parameters)
        return sized or any(INCLUDE_TENSOR[9:-1] in text for text in self._texts.values())

    @property
    def _has_halves(self) -> bool:
        """Is a type of 16 bits named anywhere? On a CPU their headers take half a second to compile."""
        headers = [header.text for header in self.headers if header.copy not in INCLUDE_SCALAR]
        texts = [self.source, *self.defines.values(), *headers]
        return any(re.search("half_t|bfloat16_t|c10", text) for text in texts)

    @property
    def _macros(self) -> str:
        return f"macros of {self.name}"

    @property
    def _texts(self) -> dict[str, str]:
        """The texts that are compiled, by the names that compilers give them."""
        return {
            **{header.path: header.text for header in self.headers},
            self.origin: self.source,
            self._macros: "".join(f"#define {name} {value}\n" for name, value in self.defines.items()),
            GENERATED: registration(self.launchers, self.device, self.defines, self._has_halves, self.origin),
        }

    def text_of(self, origin: str) -> str | None:
        """The text whose lines a compiler's message about `origin` counts."""
        text = self._texts.get(origin)
        return "\n" * (self.first_line - 1) + text if origin == self.origin else text


INCLUDE_HOST, INCLUDE_SCALAR = '#include "headers/0/host.h"\n', '#include "headers/0/scalar.h"\n'
INCLUDE_TENSOR, INCLUDE_SIZED = '#include "headers/0/tensor.h"\n', '#include "headers/0/sized.h"\n'


def _digest(value: object) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()[:16]


def unit_of(
    name: str,
    source: str | None,
    device: str,
    defines: Mapping[str, str],
    *,
    folder: Path | None = None,
    first_line: int = 1,
    only: tuple[str, ...] | None = None,
    cells: Mapping[str, str] = types.MappingProxyType({}),
) -> Unit:
    """only: the launchers that it has, by default all. cells: texts that it may include by their names; one that it includes may have
    launchers."""
    _check_device(device)
    check_name(name)
    if not isinstance(source or "", str):
        raise TypeError(f"expected the text of a source, got {source!r}")
    origin, folder = f"<{name}>", Path(folder or KERNELS)
    if source is None:
        path = folder / (f"{name}.cu" if device == "cuda" else f"{name}.cpp")
        if not path.is_file():
            raise FileNotFoundError(f"no {device} kernel named {name!r}: expected {path}")
        origin, source = str(path), read(path)
    given, headers = source, {}
    # Their copies are the first of their names.
    gather('#include "host/sized.h"\n#include "core/scalar.h"\n', KERNELS, [KERNELS], headers)
    source = gather(source.removeprefix("\ufeff"), folder, [folder, KERNELS], headers, cells)
    launchers = _launchers_of(given, origin, first_line, headers.values(), cells)
    parts = {}
    if only is not None:
        known = [launcher.name for launcher in launchers]
        if wrong := [each for each in only if each not in known] or [only] * (not only):
            raise ValueError(f"{name}: expected launchers out of {', '.join(known)}, got {wrong[0]!r}")
        source = without(source, {*known}.difference(only))
        launchers = tuple(launcher for launcher in launchers if launcher.name in only)
        parts["launchers"] = [launcher.name for launcher in launchers]
    parts |= {"source": [source, first_line], "defines": dict(defines), **_common_parts(device, headers)}
    if device == "cuda":
        cflags = ["-O1", "-fvisibility=hidden"]
        parts["GPU architecture"] = architectures = toolchain.cuda_architectures()
        flags = [f"-gencode=arch=compute_{number},code=sm_{number}" for number in architectures]
        flags += [f"-U__CUDA_NO_{what}__" for what in RESTORED]
        # --threads: the host's and the device's half side by side
        flags += ["-Xcompiler=-fvisibility=hidden", "--threads=2"]
    else:
        parts["processor"] = toolchain.processor()
        native = "-march=native" if platform.machine() in ("x86_64", "AMD64") else "-mcpu=native"
        cflags = ["-O3", "-fvisibility=hidden", "-fno-math-errno", "-fno-trapping-math", native]
        flags = []
    parts["flags"] = [device, cflags, flags, STABLE_ABI]
    digests = {part: _digest(value) for part, value in parts.items()}
    return Unit(
        name,
        device,
        origin,
        source,
        first_line,
        tuple(headers.values()),
        defines,
        tuple(cflags),
        tuple(flags),
        launchers,
        digests,
        with_cells(given, cells),
    )


def check_name(name: str) -> None:
    """Raises TypeError or ValueError for what can't name a source."""
    if not isinstance(name, str):
        raise TypeError(f"expected a name, got {name!r}")
    if not re.fullmatch(r"[A-Za-z]\w*", name, flags=re.A):
        raise ValueError(f"expected a name of ASCII letters, digits and underscores, got {name!r}")


def _launchers_of(
    given: str, origin: str, first_line: int, headers: Iterable[Header], cells: Mapping[str, str]
) -> tuple[Launcher, ...]:
    """Those of the source, and of the cells that it includes."""
    texts = [header.text for header in headers]
    own = [(cells[name], header.path, 1) for header in headers if (name := header.path[1:-1]) in cells]
    exporting = [each for each in [(given, origin, first_line), *own] if "EXPORT" in code_of(each[0])]
    found = [parse_launchers(*each, texts) for each in exporting or [(given, origin, first_line)]]
    launchers = [launcher for of_text in found for launcher in of_text]
    if twice := {each.name for each in launchers if sum(other.name == each.name for other in launchers) > 1}:
        raise BuildError(
            f"{origin}: {', '.join(sorted(twice))} is exported a second time by a cell that it includes"
        )
    return tuple(launchers)


def host_unit(device: str) -> Unit:
    """PyTorch's side of the launchers for `device`: kernels/host/pytorch.h, kernels/host/bound.h."""
    headers: dict[Path, Header] = {}
    text = f"""#define STABLE_ABI {int(STABLE_ABI)}
{"#define WITH_CUDA" * (device == "cuda")}
#include "host/bound.h"
extern "C" {{
__attribute__((visibility("default"))) extern const inline_loader::Host {HOST};
const inline_loader::Host {HOST} = inline_loader::pytorch;
__attribute__((visibility("default"))) const char* {LAUNCH}(inline_loader::Bound* bound, const inline_loader::Argument* first) {{
  return inline_loader::launch(*bound, first);
}}
}}
"""
    source = gather(text, KERNELS, [KERNELS], headers)
    cflags = ("-O1", "-fvisibility=hidden")
    parts = {"source": source, "flags": [device, cflags], **_common_parts(device, headers)}
    digests = {part: _digest(value) for part, value in parts.items()}
    return Unit(
        "host_side", device, "pytorch.h", source, 1, tuple(headers.values()), {}, cflags, (), (), digests
    )


HOST, LAUNCH = "inline_loader_pytorch", "inline_loader_launch"


def _common_parts(device: str, headers: Mapping[Path, Header]) -> dict[str, object]:
    """What any build for `device` depends on beyond its own source."""
    compilers = [toolchain.host_compiler(), *([toolchain.nvcc()] if device == "cuda" else [])]
    return {
        "headers": {header.copy: header.text for header in headers.values()},
        "environment": {variable: os.environ.get(variable) for variable in COMPILER_VARIABLES},
        "torch": [
            torch.__version__,
            torch.version.git_version,
            torch.version.cuda,
            torch._C._GLIBCXX_USE_CXX11_ABI,
        ],
        "compiler": [toolchain.version_of(compiler) for compiler in compilers],
        "loader": [
            sys.implementation.cache_tag,
            *[read(Path(file)) for file in (__file__, loader_source.__file__)],
        ],
    }


def _check_device(device: str) -> None:
    if device not in ("cpu", "cuda"):
        raise ValueError(f'expected device "cpu" or "cuda", got {device!r}')


# Operators of the halves that load_inline switches off.
RESTORED = ("HALF_OPERATORS", "HALF_CONVERSIONS", "HALF2_OPERATORS", "BFLOAT16_CONVERSIONS")
# What compilers read beyond their command line.
COMPILER_VARIABLES = (
    "CC",
    "CXX",
    *toolchain.INCLUDE_VARIABLES,
    "NVCC_PREPEND_FLAGS",
    "NVCC_APPEND_FLAGS",
    "NVCC_CCBIN",
)
