"""The library of a unit: from the cache, or built once, by one process while the others wait.

`library_of` is given what compiles: compile(unit, sources, folder) loads the library that it makes in the folder `sources`, which holds
unit.files(); it raises BuildError, with the log beside `folder`.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import functools
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

from inline_kernels.loader import cache, toolchain
from inline_kernels.loader.messages import BuildError, Status, first_error, in_notebook
from inline_kernels.loader.source import assembled, macros, read
from inline_kernels.loader.units import Unit, unit_of

Compile = Callable[[Unit, Path, Path], ctypes.CDLL]


class Library(NamedTuple):
    """A build that is loaded, and the fingerprints of its files that the key does not cover (cache.fingerprint)."""

    code: ctypes.CDLL
    dependencies: Mapping[str, list]


@functools.lru_cache(256)
def key_of(
    generation: int, name: str, source: str, device: str, folder: Path | None, *defines: tuple[str, object]
) -> str | None:
    """The digest of all that a build with all launchers depends on, for as long as that is inline_loader's `generation`; None: it can't be built."""
    try:
        return unit_of(name, source, device, macros(dict(defines)), folder=folder).key
    except BuildError:
        return None


def library_of(unit: Unit, compile: Compile, place: str = "") -> Library:
    """The library of `unit`, from the cache or built. PyTorch does not know of its launchers yet."""
    folder = cache.cache_folder() / unit.namespace
    if library := _load_cached(folder):
        if unit.launchers:
            out = sys.stdout if in_notebook() else sys.stderr  # which a notebook shows as an error
            print(f"inline_loader: {unit.label} ({unit.device}){place}: cached", file=out)
        return library
    with cache.naming(folder.parent):
        return _build_once(unit, compile, folder, place)


def _load_cached(folder: Path) -> Library | None:
    """The library of the build `folder` if it is whole and of today's files."""
    found = cache.verified(folder)
    try:
        return Library(ctypes.CDLL(str(found[0])), found[1]) if found else None
    except OSError:  # made for another machine, or on a noexec mount: the build says which
        return None


def _build_once(unit: Unit, compile: Compile, folder: Path, place: str) -> Library:
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
                    library = _build(unit, compile, folder)
                except BuildError as error:
                    failure.pass_on(error)
                    raise
    cache.trim(folder.parent, keep=folder)
    return library


def _build(unit: Unit, compile: Compile, folder: Path) -> Library:
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
        code = compile(unit, sources, folder)
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


# ----------------------------------------------------------------------------------------------- what compilers say and read


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


def compile_error(unit: Unit, log: str, log_path: Path) -> BuildError:
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
def plain(path: str) -> str:
    """A name for `path` that a ninja file can hold ($, :, blanks and é can't stand there): itself, or a link to it."""
    if PLAIN.fullmatch(path):
        return path
    alias = _temporary()
    os.symlink(path, f"{alias}/link")
    return f"{alias}/link"


@functools.lru_cache(None)
def program(command: str) -> str:
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
