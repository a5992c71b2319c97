"""Turns kernel sources into PyTorch operators at run time, in seconds.

    kernels = load("conv2d_min_add_multiply", device="cuda", defines={"VALUE_T": "float"})
    kernels.forward(y, v, conv_bias, bias, 0.5, 2.0, ...)

A source marks its launchers: `EXPORT void name(float* out, const float* x, double a, int64_t n)`. For each one the loader
adds an operator (kernels/host/host.h) that checks its tensors, sets the device, takes PyTorch's current stream, calls the launcher and
checks the launch. What that takes of PyTorch (kernels/host/pytorch.h) is compiled once on a machine, beside the first build. Pointers become tensors (those without const are written to), int64_t becomes
int, double becomes float; a last `cudaStream_t stream` is filled in. `Out<float> y` and `In<float> x` (kernels/host/tensor.h) are tensors
with their sizes, `Scratch<float>` is memory for as long as a launcher runs. What is launched again and again binds its last arguments:
`kernels.forward.bound(0.5, 2.0, ...)` (inline_kernels/loader/launch.py). `EXPORT int64_t fits(In<float> x, int64_t n)` launches nothing: it answers,
as `kernels.fits(x, 3)`, what depends on numbers and on tensors' sizes, which is all that it sees of tensors on any device. It is to be
asked before what torch.compile compiles.

kernels/<name>.cu holds the CUDA launchers and includes no torch header, kernels/<name>.cpp the CPU launchers; `source=`
takes a string instead, and `%load_ext inline_loader` adds the cell magics %%cuda NAME and %%cpp NAME,
and the pieces of source that cells share (inline_kernels/loader/cells.py).

`torch.utils.cpp_extension.load_inline` compiles in a temporary folder that holds a copy of every file that was hashed, so
what is compiled is what the hash names. What the compilers find beyond that (by CPATH, by a macro's name), but for headers of the
system, CUDA and torch, is looked at before each use of a build: cache.fingerprint. The result is moved in one step to a folder of the cache named by that hash, under
a lock that dies with its holder: one process builds, every other one waits and loads. This module knows no model.

`python inline_loader.py doctor` says what is wrong with a machine, `python inline_loader.py clear` empties the cache.
"""

from __future__ import annotations

import ctypes
import functools
import os
import sys
import threading
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from inline_kernels.loader import cache, cells, toolchain
from inline_kernels.loader import library as libraries
from inline_kernels.loader.cells import source_of  # noqa: F401, for whoever edits what a cell has
from inline_kernels.loader.launch import Operators
from inline_kernels.loader.library import Library
from inline_kernels.loader.machine_code import report  # noqa: F401, for whoever asks what a kernel is made of
from inline_kernels.loader.messages import BuildError
from inline_kernels.loader.source import REGISTER, macros
from inline_kernels.loader.units import HOST, KERNELS, LAUNCH, Unit, check_name, host_unit, unit_of  # noqa: F401

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
        unit = unit_of(name, source, device, defines, folder=folder, only=only)
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
                library, host = libraries.library_of(unit, _compile, place), host.result()
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


_host_sides: dict[str, Library] = {}


def _host_side(device: str) -> ctypes.CDLL:
    """PyTorch's side of the launchers for `device`. It is compiled if need be, once for all builds."""
    unit = host_unit(device)
    with _loading.setdefault(unit.namespace, threading.Lock()):
        if unit.key not in _host_sides or cache.changed(_host_sides[unit.key].dependencies):
            _host_sides[unit.key] = libraries.library_of(unit, _compile)
    return _host_sides[unit.key].code


def clear_cache() -> int:
    """Removes every build that no process is making right now; what is loaded keeps running. Returns the bytes freed."""
    forget()
    return cache.clear(cache.cache_folder())


def _compile(unit: Unit, sources: Path, folder: Path) -> ctypes.CDLL:
    """Compiles `sources` and loads the library. Raises BuildError, with the log beside `folder`."""
    from torch.utils import cpp_extension  # imports setuptools, which what is cached can do without

    cpp_extension._TORCH_PATH = libraries.plain(cpp_extension._TORCH_PATH)
    cpp_extension.TORCH_LIB_PATH = libraries.plain(cpp_extension.TORCH_LIB_PATH)
    cpp_extension.get_cxx_compiler = lambda: libraries.program(toolchain.host_compiler())
    directory, include = libraries.plain(str(sources)), f'#include "{unit.compiled}"'
    os.environ["TORCH_EXTENSION_SKIP_NVCC_GEN_DEPENDENCIES"] = (
        "0"  # the library's dependencies are read from them
    )
    if unit.device == "cuda":
        home = Path(toolchain.nvcc()).parent.parent
        cpp_extension.CUDA_HOME = libraries.plain(str(home))
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
        raise libraries.compile_error(
            unit, error.object.decode(errors="replace"), Path(f"{folder}.log")
        ) from None
    except RuntimeError as error:
        raise libraries.compile_error(unit, str(error), Path(f"{folder}.log")) from None


# ----------------------------------------------------------------------------------------------- notebooks and machines


def load_ipython_extension(shell) -> None:
    """`%load_ext inline_loader`: the cell magics %%cuda NAME and %%cpp NAME, with the options of inline_kernels/loader/cells.py.

    The cell becomes NAME, to be called as NAME(y, x, ...), or as NAME.launcher(...) where it exports several. Run again
    after an edit, it is the new code at once, also for who holds the old NAME, a launcher of it, or what was bound of one; edited files
    of kernels/ are seen as well.
    """

    def run_cell(device: str, line: str, cell: str) -> None:
        request = cells.Request.of(line)
        name, known = request.name, shell.user_ns.get(request.name)
        check_name(name)
        cells.check_free(name, known)
        if request.part:
            return shell.push({name: cells.Part(cell)})
        if request.lacking:
            print(request.lacking)
            return shell.push({name: None})
        texts = cells.parts_in(shell.user_ns)
        unit = unit_of(name, cell, device, request.defines, first_line=cells.FIRST_LINE, cells=texts)
        operators = _load_unit(unit)
        if isinstance(known, Operators):
            Operators._renew(known, operators)
        else:
            shell.push({name: operators})

    shell.register_magic_function(functools.partial(run_cell, "cuda"), "cell", "cuda")
    shell.register_magic_function(functools.partial(run_cell, "cpu"), "cell", "cpp")
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
