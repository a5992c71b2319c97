"""Turns kernel sources into PyTorch operators at run time, in seconds.

    kernels = load("conv2d_min_add_multiply", device="cuda", defines={"VALUE_T": "float"})
    kernels.forward(y, v, conv_bias, bias, 0.5, 2.0, ...)

A source marks its launchers: `EXPORT void name(float* out, const float* x, double a, int64_t n)`. For each one the loader
writes the host side (kernels/host.h): an operator that checks its tensors, sets the device, takes PyTorch's current stream,
calls the launcher and checks the launch. Pointers become tensors (those without const are written to), int64_t becomes
int, double becomes float; a last `cudaStream_t stream` is filled in.

kernels/<name>.cu holds the CUDA launchers and includes no torch header, kernels/<name>.cpp the CPU launchers; `source=`
takes a string instead, and `%load_ext inline_loader` adds the cell magics %%cuda NAME and %%cpp NAME.

`torch.utils.cpp_extension.load_inline` compiles in a temporary folder that holds a copy of every file that was hashed, so
what is compiled is what the hash names. The result is moved in one step to a folder of the cache named by that hash, under
a lock that dies with its holder: one process builds, every other one waits and loads. This module knows no model.

`python inline_loader.py doctor` says what is wrong with a machine, `python inline_loader.py clear` empties the cache.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import hashlib
import json
import os
import platform
import re
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import torch

import loader_cache as cache
import loader_toolchain as toolchain
from loader_machine_code import report  # noqa: F401, for whoever asks what a kernel is made of
from loader_report import BuildError, Status, at_line, first_error
from loader_toolchain import STABLE_ABI

KERNELS = Path(__file__).resolve().parent / "kernels"


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
        return f"{ {'int64_t': 'int', 'double': 'float', 'bool': 'bool'}[self.ctype] } {self.name}"

    def read(self, index: int) -> str:
        if self.pointer:
            return f'call.pointer<{"const " if self.const else ""}{self.ctype}>({index}, "{self.name}")'
        return f"call.{ {'int64_t': 'integer', 'double': 'real', 'bool': 'boolean'}[self.ctype] }({index})"


@dataclass(frozen=True)
class Launcher:
    """A function marked EXPORT. `stream` says whether its last parameter is the CUDA stream."""

    name: str
    declaration: str
    parameters: tuple[Parameter, ...]
    stream: bool


def parse_launchers(source: str, origin: str = "source") -> list[Launcher]:
    """The launchers that `source` exports, in order.

    Raises BuildError where there is none, or where one has a parameter that an operator can't have.
    """
    # Comments become blanks of the same shape, so that positions stay those of the source.
    code = re.sub(
        r"//[^\n]*|/\*.*?\*/", lambda comment: re.sub(r"[^\n]", " ", comment[0]), source, flags=re.S
    )
    launchers = []
    for match in re.finditer(r"^[ \t]*EXPORT\s+void\s+(\w+)\s*\(([^)]*)\)", code, flags=re.M):
        try:
            launchers.append(_parse_launcher(match))
        except ValueError as error:
            line = code.count("\n", 0, match.start(1)) + 1
            column = match.start(1) - code.rfind("\n", 0, match.start(1))
            raise BuildError(at_line(origin, source, line, column, str(error))) from None
    if not launchers:
        raise BuildError(
            f"{origin}: expected at least one launcher, `EXPORT void name(float* y, const float* x, int64_t n)`"
        )
    return launchers


def _parse_launcher(match: re.Match) -> Launcher:
    name, texts = match[1], [" ".join(text.split()) for text in match[2].split(",")]
    stream = texts[-1].startswith("cudaStream_t ")
    parameters = tuple(_parse_parameter(text) for text in (texts[:-1] if stream else texts))
    if not any(parameter.pointer for parameter in parameters):
        raise ValueError(
            f"{name}: expected at least one tensor (pointer) parameter, got ({match[2].strip()})"
        )
    return Launcher(name, " ".join(match[0].split()), parameters, stream)


def _parse_parameter(text: str) -> Parameter:
    match = re.fullmatch(r"(const )?(\w+) ?(\*)? ?(?:__restrict__ )?(\w+)", text)
    if not match or not (match[3] or match[2] in ("int64_t", "double", "bool")):
        raise ValueError(
            "expected parameters like `float* y`, `const float* x`, `int64_t n`, `double a`, `bool b` "
            f"and a last `cudaStream_t stream`, got `{text}`"
        )
    return Parameter(match[2], match[4], bool(match[3]), bool(match[1]))


def host_source(launchers: Iterable[Launcher], namespace: str, device: str) -> str:
    """The C++ that registers `launchers` as operators `namespace::name` for `device` ("cpu" or "cuda")."""
    parts = []
    for launcher in launchers:
        names = [parameter.name for parameter in launcher.parameters]
        reads = [f"  auto {p.name} = {p.read(i)};" for i, p in enumerate(launcher.parameters)]
        arguments = ", ".join(names + ["call.stream()"] * launcher.stream)
        body = [*reads, f"  ::{launcher.name}({arguments});"]  # a parameter may bear the same name
        if device == "cuda":
            body.insert(len(reads), "  host::DeviceGuard guard(call.device());")
            body.append("  call.check_launch();")
        parts += [
            f"{launcher.declaration};",
            f"static void {launcher.name}_call(host::Call& call) {{",
            *body,
            "}",
        ]
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
    """One library to build. `parts` are digests of all that its code depends on, `key` is the digest of those."""

    name: str
    device: str
    origin: str
    source: str
    first_line: int
    headers: Mapping[str, tuple[str, str]]  # name in an #include: the file's path, its text
    defines: Mapping[str, object]
    cflags: tuple[str, ...]
    cuda_cflags: tuple[str, ...]
    launchers: tuple[Launcher, ...]
    parts: Mapping[str, str] = field(default_factory=dict)

    @property
    def key(self) -> str:
        return _digest(self.parts)

    @property
    def namespace(self) -> str:
        return f"{self.name}_{self.key}"

    def files(self) -> dict[str, str]:
        """The files to compile, by their name in the build folder: what load_inline gets includes them."""
        files = {name: _line(1, path) + text for name, (path, text) in self.headers.items()}
        defines = "".join(f"#define {name} {value}\n" for name, value in self.defines.items())
        kernels = _line(self.first_line, self.origin) + self.source + "\n"
        host = _line(1, HOST_SIDE) + host_source(self.launchers, self.namespace, self.device)
        if self.device == "cuda":
            files["kernels.cu"] = f'{defines}#include <stdint.h>\n#define EXPORT extern "C"\n{kernels}'
            files["host.cpp"] = f'{defines}#include "host.h"\n{host}'
        else:
            files["host.cpp"] = f'{defines}#include "host.h"\n{kernels}{host}'
        return files

    def text_of(self, origin: str) -> str | None:
        """The text whose lines a compiler's message about `origin` counts."""
        if origin == self.origin:
            return "\n" * (self.first_line - 1) + self.source
        if origin == HOST_SIDE:
            return host_source(self.launchers, self.namespace, self.device)
        return dict(self.headers.values()).get(origin)


HOST_SIDE = "generated host side"


def _line(number: int, origin: object) -> str:
    """Makes the compiler count lines from `number` and name `origin` in its messages."""
    return '#line {} "{}"\n'.format(number, str(origin).replace("\\", "\\\\").replace('"', '\\"'))


def _digest(value: object) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()[:16]


def _unit(
    name: str,
    source: str | None,
    device: str,
    defines: Mapping[str, object],
    *,
    folder: Path | None = None,
    first_line: int = 1,
) -> Unit:
    if device not in ("cpu", "cuda"):
        raise ValueError(f'expected device "cpu" or "cuda", got {device!r}')
    if not re.fullmatch(r"[A-Za-z]\w*", name, flags=re.A):
        raise ValueError(f"expected a name of ASCII letters, digits and underscores, got {name!r}")
    origin, folder = f"<{name}>", Path(folder or KERNELS)
    if source is None:
        path = folder / (f"{name}.cu" if device == "cuda" else f"{name}.cpp")
        if not path.is_file():
            raise FileNotFoundError(f"no {device} kernel named {name!r}: expected {path}")
        origin, source = str(path), path.read_text(encoding="utf-8")
    launchers = tuple(parse_launchers(source, origin))
    headers = _headers('#include "host.h"\n' + source, dict.fromkeys((folder, KERNELS)))
    parts: dict[str, object] = {
        "source": [source, first_line],
        "headers": {header: text for header, (_, text) in headers.items()},
        "defines": dict(defines),
    }
    defines = {**defines, "STABLE_ABI": int(STABLE_ABI)}
    if device == "cuda":
        compilers = [toolchain.version_of(toolchain.host_compiler()), toolchain.version_of(toolchain.nvcc())]
        parts["GPU architecture"] = architectures = toolchain.cuda_architectures()
        cflags = ["-O1", "-fvisibility=hidden"]
        flags = [f"-gencode=arch=compute_{number},code=sm_{number}" for number in architectures]
        flags += [f"-U__CUDA_NO_{what}__" for what in RESTORED]
        flags += [
            "-Xcompiler=-fvisibility=hidden",
            "--threads=2",
        ]  # the host's and the device's half side by side
        defines["WITH_CUDA"] = ""
    else:
        compilers = [toolchain.version_of(toolchain.host_compiler())]
        parts["processor"] = toolchain.processor()
        native = "-march=native" if platform.machine() in ("x86_64", "AMD64") else "-mcpu=native"
        cflags = ["-O3", "-fvisibility=hidden", "-fno-math-errno", "-fno-trapping-math", native]
        flags = []
    parts["flags"] = [device, cflags, flags, STABLE_ABI]
    parts["environment"] = {variable: os.environ.get(variable) for variable in COMPILER_VARIABLES}
    parts["torch"] = [
        torch.__version__,
        torch.version.git_version,
        torch.version.cuda,
        torch._C._GLIBCXX_USE_CXX11_ABI,
    ]
    parts["compiler"] = compilers
    parts["loader"] = [sys.implementation.cache_tag, hashlib.sha256(Path(__file__).read_bytes()).hexdigest()]
    digests = {part: _digest(value) for part, value in parts.items()}
    return Unit(
        name,
        device,
        origin,
        source,
        first_line,
        headers,
        defines,
        tuple(cflags),
        tuple(flags),
        launchers,
        digests,
    )


# Operators of the halves that load_inline switches off.
RESTORED = ("HALF_OPERATORS", "HALF_CONVERSIONS", "HALF2_OPERATORS", "BFLOAT16_CONVERSIONS")
# What compilers read beyond their command line.
COMPILER_VARIABLES = (
    "CC",
    "CXX",
    "CPATH",
    "CPLUS_INCLUDE_PATH",
    "NVCC_PREPEND_FLAGS",
    "NVCC_APPEND_FLAGS",
    "NVCC_CCBIN",
)


def _headers(source: str, folders: Iterable[Path]) -> dict[str, tuple[str, str]]:
    """The headers that `source` includes, directly or not, each from the first of `folders` that has it: where it is, and its text.
    Only these are there when it is compiled."""
    found: dict[str, tuple[str, str]] = {}
    pending = [source]
    while pending:
        for name in re.findall(r'^[ \t]*#[ \t]*include[ \t]*["<]([\w./-]+)[">]', pending.pop(), flags=re.M):
            header = next((folder / name for folder in folders if (folder / name).is_file()), None)
            if name not in found and ".." not in name and header is not None:
                found[name] = str(header), header.read_text(encoding="utf-8")
                pending.append(found[name][1])
    return found


# ------------------------------------------------------------------------------------------------------------ building


def _build_once(unit: Unit, folder: Path, place: str) -> None:
    """Builds and loads `unit` unless another process does so first; what fails there fails here with the same text."""
    reason, estimate = cache.why_missing(folder, unit.name, unit.device, unit.parts)
    with Status(f"{unit.name} ({unit.device}){place}, {reason}", estimate) as status:
        failure = cache.Failure(folder)
        with cache.lock(folder, status.say):
            if _load_cached(folder):
                status.say("built by another process")
                return
            failure.raise_if_new()
            cache.sweep(folder.parent, held=folder)
            with cache.place_to_build(folder.parent, status.say):
                status.say("compiling")
                try:
                    _build(unit, folder)
                except BuildError as error:
                    failure.pass_on(error)
                    raise
    cache.trim(folder.parent, keep=folder)


def _build(unit: Unit, folder: Path) -> None:
    """Builds and loads `unit` in a temporary folder, then makes that `folder`."""
    toolchain.find_ninja()
    start = time.monotonic()
    work = cache.new_build(folder)
    try:
        sources = work / "sources"
        for name, text in unit.files().items():
            (sources / name).parent.mkdir(parents=True, exist_ok=True)
            (sources / name).write_text(text, encoding="utf-8", errors="surrogateescape")
        _compile(unit, sources, folder)
        (sources / f"{work.name}.so").rename(work / "kernels.so")
        shutil.rmtree(sources)
        record = {
            "name": unit.name,
            "device": unit.device,
            "parts": unit.parts,
            "seconds": time.monotonic() - start,
        }
        cache.publish(work, folder, record)
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _compile(unit: Unit, sources: Path, folder: Path) -> None:
    """Compiles `sources` and loads the library. Raises BuildError, with the log beside `folder`."""
    from torch.utils import cpp_extension  # imports setuptools, which what is cached can do without

    cpp_extension._TORCH_PATH = _plain(cpp_extension._TORCH_PATH)
    cpp_extension.TORCH_LIB_PATH = _plain(cpp_extension.TORCH_LIB_PATH)
    directory = _plain(str(sources))
    try:
        cpp_extension.load_inline(
            name=sources.parent.name,  # never used before: load_inline numbers the builds of one name
            cpp_sources=['#include "host.cpp"'],
            cuda_sources=['#include "kernels.cu"'] if unit.device == "cuda" else None,
            extra_cflags=list(unit.cflags),
            extra_cuda_cflags=list(unit.cuda_cflags),
            extra_include_paths=[directory],
            build_directory=directory,
            is_python_module=False,
            no_implicit_headers=True,
        )
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


def _compile_error(unit: Unit, log: str, log_path: Path) -> BuildError:
    if "interrupted by user" in log:  # Ctrl-C reached ninja alone
        raise KeyboardInterrupt
    with contextlib.suppress(OSError):
        log_path.write_text(log, encoding="utf-8", errors="replace")
    full = re.search("No space left on device|Disk quota exceeded", log)
    first = cache.folder_problem(log_path.parent, log) if full else first_error(log, unit.text_of)
    return BuildError(
        f"{first}\nwhile compiling {unit.name} ({unit.device}); the whole log: {log_path}", log, str(log_path)
    )


@functools.lru_cache(None)
def _plain(path: str) -> str:
    """A name for `path` that a ninja file can hold ($, :, blanks and é can't stand there): itself, or a link to it."""
    plain = re.compile(r"[\w./+@=,-]+", flags=re.A)
    if plain.fullmatch(path):
        return path
    base = tempfile.gettempdir()
    alias = tempfile.mkdtemp(prefix="inline_loader-", dir=base if plain.fullmatch(base) else "/tmp")
    atexit.register(shutil.rmtree, alias, ignore_errors=True)
    os.symlink(path, f"{alias}/link")
    return f"{alias}/link"


# ------------------------------------------------------------------------------------------------------------- loading

_loaded: dict[tuple, Operators] = {}
_loading: dict[str, threading.Lock] = {}
generation = (
    0  # rises whenever what is loaded is forgotten, for whoever remembers something that depends on it
)


def forget() -> None:
    """The next `load` looks at the sources again; what is loaded keeps running."""
    global generation
    generation += 1
    _loaded.clear()


class Operators:
    """The operators of one loaded library, as attributes: `kernels.forward(y, v, ...)`. A single one can be called directly.

    They write to their arguments and return nothing, which is all that torch.compile needs to know of them.
    """

    def __init__(self, unit: Unit):
        self.unit = unit
        for launcher in unit.launchers:
            setattr(self, launcher.name, getattr(getattr(torch.ops, unit.namespace), launcher.name).default)
        self._single = getattr(self, unit.launchers[0].name) if len(unit.launchers) == 1 else None

    def __call__(self, *arguments):
        if self._single is None:
            names = ", ".join(f"{self.unit.name}.{launcher.name}" for launcher in self.unit.launchers)
            raise TypeError(f"{self.unit.name} has several operators, call one of {names}")
        return self._single(*arguments)

    def __repr__(self) -> str:
        calls = [
            f"{each.name}({', '.join(p.schema for p in each.parameters)})" for each in self.unit.launchers
        ]
        return f"<{self.unit.name} for {self.unit.device}: {', '.join(calls)}>"


def load(
    name: str,
    *,
    source: str | None = None,
    folder: Path | None = None,
    device: str = "cpu",
    defines: Mapping[str, object] | None = None,
) -> Operators:
    """The operators of `source`, or of <name>.cu (device "cuda") or <name>.cpp ("cpu") in `folder`, by default kernels/; compiled
    if need be. Headers are found there and in kernels/.

    Each combination of `defines` (macros) is a build of its own.
    Raises BuildError if it can't be built, FileNotFoundError if there is no such source, ValueError for a bad name or device,
    PermissionError where the cache folder is not safe to load code from.
    """
    return _load(name, source, folder, device, defines or {})


def load_all(requests: Iterable[Mapping[str, object]]) -> list[Operators]:
    """`load(**request)` for each of `requests`, side by side as far as processors and memory go. Raises as `load` does."""
    requests = list(requests)
    with ThreadPoolExecutor(min(toolchain.builds_at_once(), max(1, len(requests)))) as pool:
        futures = []
        for index, request in enumerate(requests, 1):
            arguments = {"source": None, "folder": None, "device": "cpu", "defines": {}, **request}
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
    place: str = "",
) -> Operators:
    slot = (name, source, folder, device, tuple(sorted(defines.items())))
    operators = _loaded.get(slot)
    if operators is None:
        operators = _loaded[slot] = _load_unit(_unit(name, source, device, defines, folder=folder), place)
    return operators


def _load_unit(unit: Unit, place: str = "") -> Operators:
    with _loading.setdefault(unit.namespace, threading.Lock()):
        # Registering a namespace a second time would abort the process.
        if not hasattr(getattr(torch.ops, unit.namespace), unit.launchers[0].name):
            if (
                unit.device == "cuda"
                and torch.cuda.is_available()
                and torch.cuda.is_current_stream_capturing()
            ):
                raise BuildError(
                    f"{unit.name} (cuda) is not loaded yet, and no kernel can be loaded while a CUDA graph is captured: "
                    "call what you capture once before, forward and backward"
                )
            folder = cache.cache_folder() / unit.namespace
            if _load_cached(folder):
                print(f"inline_loader: {unit.name} ({unit.device}){place}: cached", file=sys.stderr)
            else:
                with cache.naming(folder.parent):
                    _build_once(unit, folder, place)
    return Operators(unit)


def _load_cached(folder: Path) -> bool:
    """Loads the build `folder` if it is whole."""
    library = cache.verified(folder)
    try:
        if library:
            torch.ops.load_library(str(library))
    except OSError:  # made for another machine, or on a noexec mount: the build says which
        return False
    return library is not None


def clear_cache() -> int:
    """Removes every build that no process is making right now; what is loaded keeps running. Returns the bytes freed."""
    forget()
    return cache.clear(cache.cache_folder())


# ----------------------------------------------------------------------------------------------- notebooks and machines


def load_ipython_extension(shell) -> None:
    """`%load_ext inline_loader`: the cell magics %%cuda NAME and %%cpp NAME, optionally with macros (NAME A=1 B=float).

    The cell becomes NAME, to be called as NAME(y, x, ...), or as NAME.launcher(...) where it exports several. Run again
    after an edit, it is the new code at once, also for who holds the old NAME; edited files of kernels/ are seen as well.
    """

    def compile_cell(device: str, line: str, cell: str) -> None:
        name, *macros = line.split() or [""]
        defines = dict(macro.partition("=")[::2] for macro in macros)
        operators = _load_unit(
            _unit(name, cell, device, defines, first_line=2)
        )  # the magic is the cell's first line
        known = shell.user_ns.get(name)
        if isinstance(known, Operators):
            known.__dict__ = operators.__dict__
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
        print(f"removed {clear_cache() >> 10} kB from {cache.cache_folder()}")
        return 0
    print("usage: python inline_loader.py doctor | clear", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.stdout.reconfigure(errors="backslashreplace")
    sys.exit(main(sys.argv[1:]))
