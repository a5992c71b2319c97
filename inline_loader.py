"""Turns kernel sources into PyTorch operators at run time, in seconds.

    kernels = load("conv2d_min_add_multiply", device="cuda", defines={"VALUE_T": "float"})
    kernels.forward(y, v, conv_bias, bias, 0.5, 2.0, ...)

A source file names its launchers with `EXPORT void name(float* out, const float* x, double a, int64_t n)`. For each one
the loader writes the host side (kernels/host.h): an operator that checks its tensors, sets the device, takes PyTorch's
current stream, calls the launcher and checks the launch. Pointers become tensors (those without const are written to),
int64_t becomes int, double becomes float; a last `cudaStream_t stream` is filled in.

kernels/<name>.cu holds the CUDA launchers and includes no torch header, kernels/<name>.cpp the CPU launchers. Everything is
compiled by `torch.utils.cpp_extension.load_inline` into a folder of its own, named by a hash of all that the result depends
on, and reused by every later process. This module knows no model.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import platform
import re
import shutil
import stat
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path

import filelock
import torch
from torch.utils import cpp_extension

KERNELS = Path(__file__).resolve().parent / "kernels"

# The stable ABI's headers are complete from torch 2.10 on; older releases get the ATen host side.
STABLE_ABI = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2]) >= (2, 10)
MINIMUM_CAPABILITY = (7, 5)


class BuildError(RuntimeError):
    """A kernel could not be compiled. The message starts with the compiler's first error at the source's own line."""


# ---------------------------------------------------------------------------------------------- launchers and host side


@dataclass(frozen=True)
class Parameter:
    """One parameter of a launcher: its C type without `const`, its name, and whether it is a pointer / written to."""

    ctype: str
    name: str
    pointer: bool
    const: bool

    @property
    def schema(self) -> str:
        if self.pointer:
            return f"Tensor {self.name}" if self.const else f"Tensor({self.name}!) {self.name}"
        return f"{ {'int64_t': 'int', 'double': 'float', 'bool': 'bool'}[self.ctype]} {self.name}"

    def read(self, index: int) -> str:
        if self.pointer:
            return f'call.pointer<{"const " if self.const else ""}{self.ctype}>({index}, "{self.name}")'
        return f"call.{ {'int64_t': 'integer', 'double': 'real', 'bool': 'boolean'}[self.ctype]}({index})"


@dataclass(frozen=True)
class Launcher:
    """A function marked EXPORT. `stream` says whether its last parameter is the CUDA stream."""

    name: str
    declaration: str
    parameters: tuple[Parameter, ...]
    stream: bool


def parse_launchers(source: str) -> list[Launcher]:
    """The launchers that `source` exports, in order.

    Raises BuildError where a declaration has a parameter that an operator can't have.
    """
    code = re.sub(r"//[^\n]*|/\*.*?\*/", " ", source, flags=re.S)
    launchers = []
    for match in re.finditer(r"^[ \t]*EXPORT\s+void\s+(\w+)\s*\(([^)]*)\)", code, flags=re.M):
        name, texts = match[1], [" ".join(text.split()) for text in match[2].split(",")]
        stream = texts[-1].startswith("cudaStream_t ")
        parameters = tuple(_parse_parameter(name, text) for text in (texts[:-1] if stream else texts))
        if not any(parameter.pointer for parameter in parameters):
            raise BuildError(f"{name}: expected at least one tensor (pointer) parameter, got ({match[2].strip()})")
        launchers.append(Launcher(name, " ".join(match[0].split()), parameters, stream))
    return launchers


def _parse_parameter(launcher: str, text: str) -> Parameter:
    match = re.fullmatch(r"(const )?(\w+) ?(\*)? ?(?:__restrict__ )?(\w+)", text)
    if not match or not (match[3] or match[2] in ("int64_t", "double", "bool")):
        raise BuildError(
            f"{launcher}: expected parameters like `float* y`, `const float* x`, `int64_t n`, `double a`, `bool b` "
            f"and a last `cudaStream_t stream`, got `{text}`"
        )
    return Parameter(match[2], match[4], bool(match[3]), bool(match[1]))


def host_source(launchers: list[Launcher], namespace: str, device: str) -> str:
    """The C++ that registers `launchers` as operators `namespace::name` for `device` ("cpu" or "cuda")."""
    parts = []
    for launcher in launchers:
        names = [parameter.name for parameter in launcher.parameters]
        reads = [f"  auto {p.name} = {p.read(i)};" for i, p in enumerate(launcher.parameters)]
        arguments = ", ".join(names + ["call.stream()"] * launcher.stream)
        body = [*reads, f"  {launcher.name}({arguments});"]
        if device == "cuda":
            body.insert(len(reads), "  host::DeviceGuard guard(call.device());")
            body.append("  call.check_launch();")
        parts += [f"{launcher.declaration};", f"static void {launcher.name}_call(host::Call& call) {{", *body, "}"]
        parts += [f"OPERATOR({launcher.name}, {len(names)})", ""]
    parts.append(f"LIBRARY({namespace}, library) {{")
    for launcher in launchers:
        schema = ", ".join(parameter.schema for parameter in launcher.parameters)
        parts.append(f'  library.def("{launcher.name}({schema}) -> ()");')
    parts += ["}", f"LIBRARY_IMPLEMENTATION({namespace}, {device.upper()}, library) {{"]
    parts += [f"  IMPLEMENT(library, {launcher.name});" for launcher in launchers] + ["}"]
    return "\n".join(parts) + "\n"


# ------------------------------------------------------------------------------------------------------- what to build


@dataclass(frozen=True)
class Unit:
    """One library to build: everything that its code depends on, and the name that follows from it."""

    name: str
    device: str
    source: str
    origin: str
    launchers: tuple[Launcher, ...]
    cflags: tuple[str, ...]
    cuda_cflags: tuple[str, ...]
    key: str

    @property
    def namespace(self) -> str:
        return f"{self.name}_{self.key}"


def _unit(name: str, device: str, defines: dict[str, object]) -> Unit:
    path = KERNELS / (f"{name}.cu" if device == "cuda" else f"{name}.cpp")
    if not path.is_file():
        raise FileNotFoundError(f"no {device} kernel named {name!r}: expected {path}")
    source = path.read_text(encoding="utf-8")
    launchers = tuple(parse_launchers(source))
    if not launchers:
        raise BuildError(f"{path}: expected at least one launcher, a function marked EXPORT")
    macros = [f"-D{key}={value}" for key, value in sorted(defines.items())] + [f"-DSTABLE_ABI={int(STABLE_ABI)}"]
    cflags = ["-O3", "-fvisibility=hidden", "-fno-math-errno", "-fno-trapping-math", *macros]
    cuda_cflags: list[str] = []
    if device == "cuda":
        architecture = _cuda_architecture()
        cuda_cflags = [f"-gencode=arch=compute_{architecture},code=sm_{architecture}", "-Xcompiler=-fvisibility=hidden"]
        cuda_cflags += [f"-U__CUDA_NO_{what}__" for what in _RESTORED_OPERATORS] + macros
        cflags.append("-DWITH_CUDA")
    else:
        cflags.append("-march=native" if platform.machine() in ("x86_64", "AMD64") else "-mcpu=native")
    depends_on = {
        "source": source,
        "headers": {header.name: header.read_text(encoding="utf-8") for header in _headers(source) | _headers('#include "host.h"')},
        "flags": cflags + cuda_cflags,
        "torch": [torch.__version__, torch.version.git_version, torch.version.cuda],
        "compilers": [_version(_host_compiler())] + ([_version(_nvcc())] if device == "cuda" else [_cpu()]),
        "loader": hashlib.sha256(Path(__file__).read_bytes()).hexdigest(),
    }
    key = hashlib.sha256(json.dumps(depends_on, sort_keys=True).encode()).hexdigest()[:16]
    return Unit(name, device, source, str(path), launchers, tuple(cflags), tuple(cuda_cflags), key)


# load_inline switches these off; the kernels use them.
_RESTORED_OPERATORS = ("HALF_OPERATORS", "HALF_CONVERSIONS", "BFLOAT16_CONVERSIONS", "HALF2_OPERATORS")


def _headers(source: str) -> set[Path]:
    """The headers of kernels/ that `source` includes, directly or not."""
    found: set[Path] = set()
    pending = [source]
    while pending:
        for name in re.findall(r'^\s*#include "([^"]+)"', pending.pop(), flags=re.M):
            header = KERNELS / name
            if header.is_file() and header not in found:
                found.add(header)
                pending.append(header.read_text(encoding="utf-8"))
    return found


def _host_compiler() -> str:
    return os.environ.get("CXX", "c++")


def _nvcc() -> str:
    home = cpp_extension.CUDA_HOME
    return os.path.join(home, "bin", "nvcc") if home else "nvcc"


@functools.lru_cache(None)
def _version(compiler: str) -> str:
    try:
        return subprocess.run([compiler, "--version"], capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError) as error:
        raise BuildError(f"the compiler {compiler!r} is needed to build kernels and does not run: {error}") from error


@functools.lru_cache(None)
def _cpu() -> str:
    """What -march=native depends on."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next((line for line in lines if line.startswith(("flags", "Features"))), platform.processor())
    except OSError:
        return platform.processor()


def _cuda_architecture() -> str:
    """Of the current device: "75", "80", "90a", …; from TORCH_CUDA_ARCH_LIST where no GPU is visible."""
    if torch.cuda.is_available():
        capability = torch.cuda.get_device_capability()
    else:
        listed = os.environ.get("TORCH_CUDA_ARCH_LIST", "").replace("+PTX", "").replace(";", " ").split()
        if not listed:
            raise BuildError("no GPU is visible: set TORCH_CUDA_ARCH_LIST to the compute capability to build for, e.g. 9.0")
        capability = tuple(int(part) for part in listed[-1].rstrip("af").split("."))
    if capability < MINIMUM_CAPABILITY:
        raise BuildError(f"expected a GPU of compute capability 7.5 or later, got {capability[0]}.{capability[1]}")
    return f"{capability[0]}{capability[1]}" + ("a" if capability >= (9, 0) else "")


# ---------------------------------------------------------------------------------------------------------- the cache


def cache_folder() -> Path:
    """Where builds are kept: $INLINE_LOADER_CACHE, else inline_kernels under the user's cache folder. Made if missing.

    Raises PermissionError where somebody else could write to it.
    """
    chosen = os.environ.get("INLINE_LOADER_CACHE")
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    folder = Path(chosen) if chosen else base / "inline_kernels"
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    status = folder.lstat()
    if stat.S_ISLNK(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & 0o077:
        raise PermissionError(
            f"{folder}: expected a folder of your own that nobody else can enter, because code is loaded from it; "
            f"fix it with: chmod 700 {folder}, or set INLINE_LOADER_CACHE to another folder"
        )
    return folder


def _verified(folder: Path) -> Path | None:
    """The library in `folder` if it is whole, else None."""
    try:
        record = json.loads((folder / "build.json").read_text())
        library = folder / record["library"]
        if hashlib.sha256(library.read_bytes()).hexdigest() == record["sha256"]:
            return library
    except (OSError, ValueError, KeyError):
        pass
    return None


# ------------------------------------------------------------------------------------------------------------ building

_loaded: dict[tuple, "Operators"] = {}
_loading = threading.RLock()


class Operators:
    """The operators of one loaded library, as attributes: `kernels.forward(y, x, …)`."""

    def __init__(self, unit: Unit):
        self.unit = unit
        for launcher in unit.launchers:
            setattr(self, launcher.name, getattr(getattr(torch.ops, unit.namespace), launcher.name).default)


def load(name: str, *, device: str = "cpu", defines: dict[str, object] | None = None) -> Operators:
    """The operators of kernels/<name>.cu (device "cuda") or kernels/<name>.cpp ("cpu"), compiled if need be.

    `defines` become -D flags; each combination is a build of its own.
    Raises BuildError if the source does not compile, FileNotFoundError if there is none.
    """
    slot = (name, device, tuple(sorted((defines or {}).items())))
    operators = _loaded.get(slot)
    if operators is None:
        with _loading:
            operators = _loaded.get(slot)
            if operators is None:
                operators = _loaded[slot] = _load_unit(_unit(name, device, defines or {}))
    return operators


def _load_unit(unit: Unit) -> Operators:
    cache = cache_folder()
    folder = cache / unit.namespace
    library = _verified(folder)
    if library is None:
        with filelock.FileLock(cache / f"{unit.namespace}.lock"):
            library = _verified(folder)
            if library is None:
                shutil.rmtree(folder, ignore_errors=True)
                library = _build(unit, folder)
                return Operators(unit)  # load_inline has loaded what it built
    torch.ops.load_library(str(library))
    return Operators(unit)


def _build(unit: Unit, folder: Path) -> Path:
    """Builds and loads `unit` in a temporary folder, then moves that to `folder` in one step."""
    work = Path(tempfile.mkdtemp(prefix=f"{folder.name}.building-", dir=folder.parent))
    source = f'#line 1 "{unit.origin}"\n{unit.source}\n'
    host = '#include "host.h"\n' + host_source(list(unit.launchers), unit.namespace, unit.device)
    try:
        with _progress(f"compiling {unit.name} for {unit.device}"):
            cpp_extension.load_inline(
                name=unit.namespace,
                cpp_sources=[host] if unit.device == "cuda" else ['#include "host.h"\n' + source + '#line 1 "host side"\n' + host],
                cuda_sources=[source] if unit.device == "cuda" else None,
                extra_cflags=list(unit.cflags),
                extra_cuda_cflags=list(unit.cuda_cflags),
                extra_include_paths=[str(KERNELS)],
                build_directory=str(work),
                is_python_module=False,
                no_implicit_headers=True,
            )
        library = next(work.glob(f"{unit.namespace}.*"))
        record = {"library": library.name, "sha256": hashlib.sha256(library.read_bytes()).hexdigest(), "name": unit.name}
        (work / "build.json").write_text(json.dumps(record))
        os.rename(work, folder)
    except RuntimeError as error:
        raise BuildError(f"{unit.name} ({unit.device}) does not compile:\n{error}") from error
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return folder / library.name


class _progress:
    """A line on stderr that says what is being built, and at the end how long it took."""

    def __init__(self, what: str):
        self.what = what

    def __enter__(self):
        self.start = time.monotonic()
        print(f"inline_loader: {self.what} …", end="", file=sys.stderr, flush=True)

    def __exit__(self, kind, *_):
        print(f" {'failed' if kind else 'done'} after {time.monotonic() - self.start:.1f} s", file=sys.stderr, flush=True)
