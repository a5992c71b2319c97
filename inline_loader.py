"""Turns kernel sources into PyTorch operators at run time, in seconds.

    kernels = load("conv2d_min_add_multiply", device="cuda", defines={"VALUE_T": "float"})
    kernels.forward(y, v, conv_bias, bias, 0.5, 2.0, ...)

A source marks its launchers: `EXPORT void name(float* out, const float* x, double a, int64_t n)`. For each one the loader
adds an operator (kernels/host/host.h) that checks its tensors, sets the device, takes PyTorch's current stream, calls the launcher and
checks the launch. What that takes of PyTorch (kernels/host/pytorch.h) is compiled once on a machine, beside the first build. Pointers become tensors (those without const are written to), int64_t becomes
int, double becomes float; a last `cudaStream_t stream` is filled in. `Out<float> y` and `In<float> x` (kernels/host/tensor.h) are tensors
with their sizes, `Scratch<float>` is memory for as long as a launcher runs. What is launched again and again binds its last arguments:
`kernels.forward.bound(0.5, 2.0, ...)` (loader_launch.py). `EXPORT int64_t fits(In<float> x, int64_t n)` launches nothing: it answers,
as `kernels.fits(x, 3)`, what depends on numbers and on tensors' sizes, which is all that it sees of tensors on any device. It is to be
asked before what torch.compile compiles.

kernels/<name>.cu holds the CUDA launchers and includes no torch header, kernels/<name>.cpp the CPU launchers; `source=`
takes a string instead, and `%load_ext inline_loader` adds the cell magics %%cuda NAME and %%cpp NAME.

`torch.utils.cpp_extension.load_inline` compiles in a temporary folder that holds a copy of every file that was hashed, so
what is compiled is what the hash names. What the compilers find beyond that (by CPATH, by a macro's name), but for headers of the
system, CUDA and torch, is looked at before each use of a build: loader_cache.fingerprint. The result is moved in one step to a folder of the cache named by that hash, under
a lock that dies with its holder: one process builds, every other one waits and loads. This module knows no model.

`python inline_loader.py doctor` says what is wrong with a machine, `python inline_loader.py clear` empties the cache.
"""

from __future__ import annotations

import atexit
import builtins
import contextlib
import ctypes
import dataclasses
import functools
import hashlib
import json
import keyword
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import threading
import time
import types
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import torch

import loader_cache as cache
import loader_source
import loader_toolchain as toolchain
from loader_launch import Operators
from loader_machine_code import report  # noqa: F401, for whoever asks what a kernel is made of
from loader_report import BuildError, Status, first_error, in_notebook
from loader_source import (
    GENERATED,
    REGISTER,
    Header,
    Launcher,
    assembled,
    gather,
    line_of,
    macros,
    parse_launchers,
    read,
    registration,
    without,
)
from loader_toolchain import STABLE_ABI

HERE = Path(__file__).resolve().parent
INSTALLED = HERE / "inline_loader_headers"  # by pip: what every build takes alone
KERNELS = INSTALLED if INSTALLED.is_dir() else HERE / "kernels"


# ------------------------------------------------------------------------------------------------------- what to build


@dataclass(frozen=True)
class Unit:
    """One library to build. `parts` are digests of all that its code depends on, `key` is the digest of those. Without launchers it is
    PyTorch's side of the others.

    In `source` and in `headers` the names of headers are those of the build folder.
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


def _unit(
    name: str,
    source: str | None,
    device: str,
    defines: Mapping[str, str],
    *,
    folder: Path | None = None,
    first_line: int = 1,
    only: tuple[str, ...] | None = None,
) -> Unit:
    """only: the launchers that it has, by default all."""
    _check_device(device)
    for what, text in {"a name": name, "the text of a source": source or ""}.items():
        if not isinstance(text, str):
            raise TypeError(f"expected {what}, got {text!r}")
    if not re.fullmatch(r"[A-Za-z]\w*", name, flags=re.A):
        raise ValueError(f"expected a name of ASCII letters, digits and underscores, got {name!r}")
    origin, folder = f"<{name}>", Path(folder or KERNELS)
    if source is None:
        path = folder / (f"{name}.cu" if device == "cuda" else f"{name}.cpp")
        if not path.is_file():
            raise FileNotFoundError(f"no {device} kernel named {name!r}: expected {path}")
        origin, source = str(path), read(path)
    given, headers = source, {}
    # Their copies are the first of their names.
    gather('#include "host/sized.h"\n#include "core/scalar.h"\n', KERNELS, [KERNELS], headers)
    source = gather(source.removeprefix("\ufeff"), folder, [folder, KERNELS], headers)
    texts = [header.text for header in headers.values()]
    launchers = tuple(parse_launchers(given, origin, first_line, texts))
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
    )


def _host_unit(device: str) -> Unit:
    """PyTorch's side of the launchers for `device`: kernels/host/pytorch.h, kernels/host/bound.h."""
    headers: dict[Path, Header] = {}
    text = f"""#define STABLE_ABI {int(STABLE_ABI)}
{"#define WITH_CUDA" * (device == "cuda")}
#include "host/bound.h"
extern "C" {{
__attribute__((visibility("default"))) extern const inline_loader::Host {HOST};
const inline_loader::Host {HOST} = inline_loader::pytorch;
__attribute__((visibility("default"))) const char* {LAUNCH}(const inline_loader::Bound* bound, const inline_loader::Argument* first) {{
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


# ------------------------------------------------------------------------------------------------------------ building


class Library(NamedTuple):
    """A build that is loaded, and the fingerprints of its files that the key does not cover (loader_cache.fingerprint)."""

    code: ctypes.CDLL
    dependencies: Mapping[str, list]


def _build_once(unit: Unit, folder: Path, place: str) -> Library:
    """Builds and loads `unit` unless another process does so first; what fails there fails here with the same text."""
    reason, estimate = cache.why_missing(folder, unit.name, unit.device, unit.parts)
    with Status(f"{unit.label} ({unit.device}){place}, {reason}", estimate) as status:
        failure = cache.Failure(folder)
        with cache.lock(folder, status.say):
            if library := _load_cached(folder):
                status.say("built by another process")
                return library
            failure.raise_if_new()
            cache.sweep(folder.parent, held=folder)
            with cache.place_to_build(folder.parent, status.say):
                status.say("compiling")
                try:
                    library = _build(unit, folder)
                except BuildError as error:
                    failure.pass_on(error)
                    raise
    cache.trim(folder.parent, keep=folder)
    return library


def _build(unit: Unit, folder: Path) -> Library:
    """Builds and loads `unit` in a temporary folder, then makes that `folder`."""
    toolchain.find_ninja()
    start, started_at = time.monotonic(), time.time_ns()
    work = cache.new_build(folder)
    try:
        binaries = _assembled({origin: unit.text_of(origin) for origin in unit._texts})
        sources = work / "sources"
        for name, text in unit.files().items():
            (sources / name).parent.mkdir(parents=True, exist_ok=True)
            (sources / name).write_text(text, encoding="utf-8", errors="surrogateescape")
        code = _compile(unit, sources, folder)
        found = [*binaries, *_dependencies(unit, sources)]
        library = Library(code, {path: cache.fingerprint(path, started_at) for path in found})
        built = (sources / f"{work.name}.so").rename(work / "library")
        shutil.rmtree(sources)
        record = {
            "name": unit.name,
            "device": unit.device,
            "parts": unit.parts,
            "dependencies": library.dependencies,
            "seconds": time.monotonic() - start,
        }
        cache.publish(work, folder, built, record)
        return library
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _compile(unit: Unit, sources: Path, folder: Path) -> ctypes.CDLL:
    """Compiles `sources` and loads the library. Raises BuildError, with the log beside `folder`."""
    from torch.utils import cpp_extension  # imports setuptools, which what is cached can do without

    cpp_extension._TORCH_PATH = _plain(cpp_extension._TORCH_PATH)
    cpp_extension.TORCH_LIB_PATH = _plain(cpp_extension.TORCH_LIB_PATH)
    cpp_extension.get_cxx_compiler = lambda: _program(toolchain.host_compiler())
    directory, include = _plain(str(sources)), f'#include "{unit.compiled}"'
    os.environ["TORCH_EXTENSION_SKIP_NVCC_GEN_DEPENDENCIES"] = "0"  # _dependencies reads them
    if unit.device == "cuda":
        home = Path(toolchain.nvcc()).parent.parent
        cpp_extension.CUDA_HOME = _plain(str(home))
        runtime = next(home.glob("lib/libcudart.so.*"), None)
        if runtime and not any(
            home.glob("lib*/libcudart.so")
        ):  # pip installs it without the name that linkers look for
            (sources / "libcudart.so").symlink_to(runtime)
    try:
        cpp_extension.load_inline(
            name=sources.parent.name,  # never used before: load_inline numbers the builds of one name
            cpp_sources=[include if unit.compiled.endswith(".cpp") else ""],
            cuda_sources=[include] if unit.compiled.endswith(".cu") else None,
            # All that main.cpp includes; load_inline asks for what is in no folder of the system.
            extra_cflags=[*unit.cflags, "-Wp,-MD,main.o.d"],
            extra_cuda_cflags=list(unit.cuda_cflags),
            extra_ldflags=[f"-L{directory}"],
            extra_include_paths=[directory],
            build_directory=directory,
            with_cuda=unit.device == "cuda",
            is_python_module=False,
            no_implicit_headers=True,
        )
        return ctypes.CDLL(str(sources / f"{sources.parent.name}.so"))
    except OSError as error:  # from the dynamic linker
        text = str(error.__cause__ or error)
        problem = (
            cache.folder_problem(folder.parent, text) or f"{unit.name} ({unit.device}) does not load: {text}"
        )
        raise BuildError(problem, text) from error
    except UnicodeDecodeError as error:  # load_inline takes every compiler's words for UTF-8
        raise _compile_error(unit, error.object.decode(errors="replace"), Path(f"{folder}.log")) from None
    except RuntimeError as error:
        raise _compile_error(unit, str(error), Path(f"{folder}.log")) from None


def _dependencies(unit: Unit, sources: Path) -> list[str]:
    """The files that the compilers read and the key does not cover, neither their content nor a version; and what those name to the
    assembler."""
    command = [toolchain.find_ninja(), "-t", "deps"]
    listed = subprocess.run(command, cwd=sources, capture_output=True, check=True).stdout
    lines = re.findall(r"^    (.+)$", os.fsdecode(listed), flags=re.M)
    covered = {sources.resolve(), *toolchain.include_folders(unit.device)}
    named, found = {*toolchain.named_folders()}, []
    for path in [str(sources / line) for line in dict.fromkeys(lines)]:
        folders = {*Path(path).resolve().parents}
        if folders & named or not folders & covered:
            found.append(path)
    return [*found, *_assembled({path: read(Path(path)) for path in found})]


def _assembled(texts: Mapping[str, str]) -> list[str]:
    return [path for origin, text in texts.items() for path in assembled(origin, text)]


def _compile_error(unit: Unit, log: str, log_path: Path) -> BuildError:
    if "interrupted by user" in log:  # Ctrl-C reached ninja alone
        raise KeyboardInterrupt
    with contextlib.suppress(OSError):
        log_path.write_text(log, encoding="utf-8", errors="replace")
    first = first_error(log, unit.text_of)
    if full := re.search("^.*(No space left on device|Disk quota exceeded).*$", log, flags=re.M):
        first, temporary = cache.folder_problem(log_path.parent, log), os.environ.get("TMPDIR", "/tmp")
        if (
            os.path.isdir(temporary)
            and shutil.disk_usage(temporary).free < shutil.disk_usage(log_path.parent).free
        ):
            first = f"{temporary}: the folder for temporary files is full: free some space, or set TMPDIR to another\n{full[0]}"
    return BuildError(
        f"{first}\nwhile compiling {unit.name} ({unit.device}); the whole log: {log_path}", log, str(log_path)
    )


PLAIN = re.compile(r"[\w./+@=,-]+", flags=re.A)


@functools.lru_cache(None)
def _plain(path: str) -> str:
    """A name for `path` that a ninja file can hold ($, :, blanks and é can't stand there): itself, or a link to it."""
    if PLAIN.fullmatch(path):
        return path
    alias = _temporary()
    os.symlink(path, f"{alias}/link")
    return f"{alias}/link"


@functools.lru_cache(None)
def _program(command: str) -> str:
    """One program that runs `command`, which may be of several words."""
    if os.path.exists(command) or len(shlex.split(command)) == 1:
        return command
    script = Path(_temporary(), "c++")
    script.write_text(f'#!/bin/sh\nexec {command} "$@"\n')
    script.chmod(0o700)
    return str(script)


def _temporary() -> str:
    """A new folder for this process, with a plain name."""
    base = tempfile.gettempdir()
    folder = tempfile.mkdtemp(prefix="inline_loader-", dir=base if PLAIN.fullmatch(base) else "/tmp")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


# ------------------------------------------------------------------------------------------------------------- loading

_loaded: dict[tuple, Operators] = {}
_loading: dict[str, threading.Lock] = {}
# By a build's folder: of what is loaded from it, the files that its key does not cover.
_dependencies_of: dict[str, Mapping[str, list]] = {}
# Of a namespace: what launches by the address of a launcher, and those addresses.
_addresses: dict[str, tuple[Callable, list[int]]] = {}
generation = (
    0  # rises whenever what is loaded is forgotten, for whoever remembers something that depends on it
)


def forget() -> None:
    """The next `load` looks at the sources again; what is loaded keeps running."""
    global generation
    generation += 1
    _loaded.clear()


def load(
    name: str,
    *,
    source: str | None = None,
    folder: Path | None = None,
    device: str = "cpu",
    defines: Mapping[str, object] | None = None,
    launchers: Iterable[str] | None = None,
) -> Operators:
    """The operators of `source`, or of <name>.cu (device "cuda") or <name>.cpp ("cpu") in `folder`, by default kernels/; compiled
    if need be. Headers are found there and in kernels/.

    Each combination of `defines` (macros) is a build of its own, and so is each of `launchers`: the names of those to build, by default
    all. The text of the others is not compiled, nor what they alone instantiate.
    Raises BuildError if it can't be built, FileNotFoundError if there is no such source, ValueError for a bad name, device or
    launcher, TypeError for a name or source that is no text, PermissionError where the cache folder is not safe to load code from.
    """
    return _load(name, source, folder, device, defines or {}, launchers)


def load_all(requests: Iterable[Mapping[str, object]]) -> list[Operators]:
    """`load(**request)` for each of `requests`, side by side as far as processors and memory go. Raises as `load` does."""
    requests = list(requests)
    with ThreadPoolExecutor(min(toolchain.builds_at_once(), max(1, len(requests)))) as pool:
        futures = []
        for index, request in enumerate(requests, 1):
            arguments = {
                "source": None,
                "folder": None,
                "device": "cpu",
                "defines": {},
                "launchers": None,
                **request,
            }
            futures.append(pool.submit(_load, **arguments, place=f", {index} of {len(requests)}"))
        try:
            return [future.result() for future in futures]
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise


def _load(
    name: str,
    source: str | None,
    folder: Path | None,
    device: str,
    defines: Mapping[str, object],
    launchers: Iterable[str] | None,
    place: str = "",
) -> Operators:
    defines, folder = macros(defines), folder and Path(os.path.abspath(folder))
    if isinstance(launchers, str):
        raise TypeError(f"expected a sequence of launchers' names, got {launchers!r}")
    only = None if launchers is None else tuple(sorted({*launchers}))
    slot = (name, source, folder, device, only, tuple(sorted(defines.items())))
    operators = _loaded.get(slot)
    if operators is None:
        unit = _unit(name, source, device, defines, folder=folder, only=only)
        operators = _loaded[slot] = _load_unit(unit, place)
    return operators


def _load_unit(unit: Unit, place: str = "") -> Operators:
    with _loading.setdefault(unit.namespace, threading.Lock()):
        dependencies = _dependencies_of.get(unit.namespace, {})
        loaded = unit.depending_on(dependencies)
        if not _is_registered(loaded) or cache.changed(dependencies):
            if (
                unit.device == "cuda"
                and torch.cuda.is_available()
                and torch.cuda.is_current_stream_capturing()
            ):
                raise BuildError(
                    f"{unit.name} (cuda) is not loaded yet, and no kernel can be loaded while a CUDA graph is captured: "
                    "call what you capture once before, forward and backward"
                )
            with ThreadPoolExecutor(1) as pool:
                host = pool.submit(_host_side, unit.device)
                library, host = _library(unit, place), host.result()
            _dependencies_of[unit.namespace] = library.dependencies
            loaded = unit.depending_on(library.dependencies)
            if not _is_registered(loaded):
                _addresses[loaded.namespace] = _register(loaded, library.code, host)
    return Operators(loaded, *_addresses.get(loaded.namespace, ()))


def _is_registered(unit: Unit) -> bool:
    """Registering a namespace a second time would abort the process."""
    return hasattr(getattr(torch.ops, unit.namespace), unit.launchers[0].operator)


def _register(unit: Unit, library: ctypes.CDLL, host: ctypes.CDLL) -> tuple[Callable, list[int]]:
    register = getattr(library, REGISTER)
    register.restype = ctypes.POINTER(ctypes.c_void_p)
    addresses = register(ctypes.byref(ctypes.c_char.in_dll(host, HOST)), unit.namespace.encode())
    return ctypes.CFUNCTYPE(*[ctypes.c_char_p] * 3)((LAUNCH, host)), addresses[: len(unit.launchers)]


def _library(unit: Unit, place: str = "") -> Library:
    """The library of `unit`, from the cache or built. PyTorch does not know of its launchers yet."""
    folder = cache.cache_folder() / unit.namespace
    if library := _load_cached(folder):
        if unit.launchers:
            out = sys.stdout if in_notebook() else sys.stderr  # which a notebook shows as an error
            print(f"inline_loader: {unit.label} ({unit.device}){place}: cached", file=out)
        return library
    with cache.naming(folder.parent):
        return _build_once(unit, folder, place)


def _load_cached(folder: Path) -> Library | None:
    """The library of the build `folder` if it is whole and of today's files."""
    found = cache.verified(folder)
    try:
        return Library(ctypes.CDLL(str(found[0])), found[1]) if found else None
    except OSError:  # made for another machine, or on a noexec mount: the build says which
        return None


_host_sides: dict[str, Library] = {}


def _host_side(device: str) -> ctypes.CDLL:
    """PyTorch's side of the launchers for `device`. It is compiled if need be, once for all builds."""
    unit = _host_unit(device)
    with _loading.setdefault(unit.namespace, threading.Lock()):
        if unit.key not in _host_sides or cache.changed(_host_sides[unit.key].dependencies):
            _host_sides[unit.key] = _library(unit)
    return _host_sides[unit.key].code


def clear_cache() -> int:
    """Removes every build that no process is making right now; what is loaded keeps running. Returns the bytes freed."""
    forget()
    return cache.clear(cache.cache_folder())


# ----------------------------------------------------------------------------------------------- notebooks and machines


def load_ipython_extension(shell) -> None:
    """`%load_ext inline_loader`: the cell magics %%cuda NAME and %%cpp NAME, optionally with macros (NAME A=1 B=float).

    The cell becomes NAME, to be called as NAME(y, x, ...), or as NAME.launcher(...) where it exports several. Run again
    after an edit, it is the new code at once, also for who holds the old NAME, a launcher of it, or what was bound of one; edited files
    of kernels/ are seen as well.
    """

    def compile_cell(device: str, line: str, cell: str) -> None:
        name, *words = line.split() or [""]
        defines = macros(dict(word.partition("=")[::2] for word in words))
        known = shell.user_ns.get(name)
        if hasattr(builtins, name) or keyword.iskeyword(name) or isinstance(known, types.ModuleType):
            what = "an imported module" if isinstance(known, types.ModuleType) else "Python's own"
            raise ValueError(f"expected a name for the cell that is free, but {name} is {what}")
        unit = _unit(name, cell, device, defines, first_line=2)  # the magic is the cell's first line
        operators = _load_unit(unit)
        if isinstance(known, Operators):
            Operators._renew(known, operators)
        else:
            shell.push({name: operators})

    shell.register_magic_function(functools.partial(compile_cell, "cuda"), "cell", "cuda")
    shell.register_magic_function(functools.partial(compile_cell, "cpu"), "cell", "cpp")
    shell.events.register("pre_run_cell", lambda info: forget())


def doctor() -> bool:
    """Prints what building kernels needs and whether this machine has it, with the command that mends what is missing.

    False where something stops the main job.
    """
    healthy = True
    for what, check in {**toolchain.CHECKS, "cache folder": cache.check}.items():
        try:
            print(f"ok    {what}: {check()}")
        except (BuildError, OSError) as error:
            healthy = False
            print(f"FAIL  {what}: {error}")
    return healthy


def main(arguments: list[str]) -> int:
    if arguments == ["doctor"]:
        return 0 if doctor() else 1
    if arguments == ["clear"]:
        try:
            print(f"removed {clear_cache() >> 10} kB from {cache.cache_folder()}")
        except (BuildError, OSError) as error:
            print(error, file=sys.stderr)
            return 1
        return 0
    print("usage: python inline_loader.py doctor | clear", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.stdout.reconfigure(errors="backslashreplace")
    sys.exit(main(sys.argv[1:]))
