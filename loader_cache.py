"""The folder that holds the builds: private, locked, checked before anything in it is loaded, and limited in size.

<cache>/<name>_<key>/kernels.so     a build; build.json beside it says of what, and its checksum
<cache>/<name>_<key>.building-*/    a build that is being made; left behind only by a killed builder, until the next build
<cache>/<name>_<key>.lock           held by the process that builds; the operating system frees it when that process dies
<cache>/<name>_<key>.owner          that process, for those who wait
<cache>/<name>_<key>.failure, .log  how its last build failed, for those who waited, and all that the compiler said
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import platform
import re
import shlex
import shutil
import stat
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import filelock

import loader_toolchain as toolchain
from loader_report import BuildError

LIMIT = 1 << 30  # bytes; the least recently used builds go first
LOCK_TIMEOUT = 1800.0  # seconds
BUILDING = ".building-"


def cache_folder() -> Path:
    """Where builds are kept: $INLINE_LOADER_CACHE, else inline_kernels under the user's cache folder. Made if missing.

    Raises PermissionError where somebody else could write to it, BuildError where it can't be made.
    """
    chosen = os.environ.get("INLINE_LOADER_CACHE")
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    folder = (Path(chosen) if chosen else base / "inline_kernels").absolute()
    with naming(folder):
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = folder.lstat()
    elsewhere = "or set INLINE_LOADER_CACHE to another folder"
    if stat.S_ISLNK(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & 0o077:
        raise PermissionError(
            f"{folder}: expected a folder of your own, no link, that nobody else can enter, because code is loaded from it; "
            f"fix it with: chmod 700 {shlex.quote(str(folder))}, {elsewhere}"
        )
    for parent in folder.resolve().parents:
        mode = parent.stat().st_mode
        if mode & stat.S_IWOTH and not mode & stat.S_ISVTX:
            raise PermissionError(
                f"{parent}: everybody may replace what it holds, the cache {folder} among it; "
                f"fix it with: chmod o-w {shlex.quote(str(parent))}, {elsewhere}"
            )
    return folder


@contextlib.contextmanager
def naming(folder: Path) -> Iterator[None]:
    """Turns the system's errors about `folder` into a BuildError that names it and the way out."""
    try:
        yield
    except OSError as error:
        raise BuildError(folder_problem(folder, str(error)) or f"{folder}: {error}") from error


def folder_problem(folder: Path, text: str) -> str | None:
    """What `text`, an error of the system, of a compiler or of the dynamic linker, says about the cache folder."""
    problems = {
        "No space left on device|Disk quota exceeded": "the disk is full: free some space (python inline_loader.py clear)",
        "Read-only file system|Permission denied": "can't be written to and does not hold this build yet: make it writable",
        "failed to map segment|Operation not permitted": "no code may run from here (is it mounted noexec?): remount it",
    }
    for pattern, sentence in problems.items():
        if found := re.search(rf"^.*({pattern}).*$", text, flags=re.MULTILINE):
            return f"{folder}: {sentence}, or set INLINE_LOADER_CACHE to another folder\n{found[0]}"
    return None


# ------------------------------------------------------------------------------------------------------------- builds


def new_build(folder: Path) -> Path:
    """An empty folder to make the build `folder` in."""
    return Path(tempfile.mkdtemp(prefix=folder.name + BUILDING, dir=folder.parent))


def publish(work: Path, folder: Path, record: Mapping[str, object]) -> None:
    """Makes `work`, which holds kernels.so, the build `folder` in one step."""
    checksum = hashlib.sha256((work / "kernels.so").read_bytes()).hexdigest()
    record = {**record, "sha256": checksum, "built": time.time()}
    (work / "build.json").write_text(json.dumps(record), encoding="utf-8")
    shutil.rmtree(folder, ignore_errors=True)
    work.rename(folder)


def verified(folder: Path) -> Path | None:
    """The library of the build `folder` if it is whole, else None. Marks the build as used."""
    library = folder / "kernels.so"
    try:
        if hashlib.sha256(library.read_bytes()).hexdigest() != _record(folder).get("sha256"):
            return None
    except OSError:
        return None
    with contextlib.suppress(OSError):  # a read-only cache
        os.utime(folder / "build.json")
    return library


def _record(folder: Path) -> dict:
    try:
        return json.loads((folder / "build.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}


def why_missing(folder: Path, name: str, device: str, parts: Mapping[str, str]) -> tuple[str, float | None]:
    """Why the build `folder` is not (whole) in the cache, and the seconds that its last build took (None: never built)."""
    if folder.exists():
        return "the cached library is damaged", _record(folder).get("seconds")
    records = [_record(path.parent) for path in folder.parent.glob(f"{name}_*/build.json")]
    records = [record for record in records if record.get("device") == device]
    if not records:
        return "first build", None
    changes = [[part for part in parts if record["parts"].get(part) != parts[part]] for record in records]
    fewest, record = min(
        zip(changes, records, strict=True), key=lambda pair: (len(pair[0]), -pair[1]["built"])
    )
    return " and ".join(fewest) + " changed", record["seconds"]


# --------------------------------------------------------------------------------------------------- who builds, who waits


@contextlib.contextmanager
def lock(folder: Path, say: Callable[[str], None]) -> Iterator[None]:
    """The right to make the build `folder`; says for whom it waits. Raises BuildError after LOCK_TIMEOUT."""
    held, owner = filelock.FileLock(f"{folder}.lock"), Path(f"{folder}.owner")
    deadline = time.monotonic() + LOCK_TIMEOUT
    while True:
        try:
            held.acquire(timeout=0.2, poll_interval=0.02)
            break
        except filelock.Timeout:
            holder = owner.read_text() if owner.exists() else "another process"
            say(f"waiting for {holder}, which builds it")
            if time.monotonic() > deadline:
                raise BuildError(
                    f"gave up after {LOCK_TIMEOUT:.0f} s of waiting for {holder}, which holds {held.lock_file}: "
                    "end that process if it hangs; the lock goes with it"
                ) from None
    try:
        owner.write_text(f"process {os.getpid()} on {platform.node()}")
        yield
    finally:
        held.release()


@contextlib.contextmanager
def place_to_build(cache: Path, say: Callable[[str], None]) -> Iterator[None]:
    """One of the builds that this machine carries at once, over all processes and threads; waits for one to end."""
    while not (place := _free_place(cache)):
        say("waiting for memory or a processor")
        time.sleep(0.05)
    try:
        yield
    finally:
        place.release()


def _free_place(cache: Path) -> filelock.BaseFileLock | None:
    for index in range(toolchain.builds_at_once()):
        place = filelock.FileLock(cache / f"build-{index}.lock")
        with contextlib.suppress(filelock.Timeout):
            place.acquire(timeout=0)
            return place
    return None


class Failure:
    """How the build `folder` failed last, passed on to those who waited for it meanwhile, and to nobody later."""

    def __init__(self, folder: Path):
        self.path = Path(f"{folder}.failure")
        self.known = self._stamp()

    def _stamp(self) -> tuple[int, int] | None:
        with contextlib.suppress(OSError):
            return self.path.stat().st_mtime_ns, self.path.stat().st_ino
        return None

    def raise_if_new(self) -> None:
        """Raises the BuildError that another process met since this object was made."""
        if self._stamp() != self.known:
            raise BuildError(**json.loads(self.path.read_text(encoding="utf-8")))

    def pass_on(self, error: BuildError) -> None:
        text = {"message": str(error), "log": error.log, "log_path": error.log_path}
        with contextlib.suppress(OSError):  # a full disk: those who wait will meet it themselves
            fresh = self.path.with_suffix(f".{os.getpid()}")
            fresh.write_text(json.dumps(text), encoding="utf-8")
            fresh.replace(self.path)


# ------------------------------------------------------------------------------------------------------------ cleaning up


def sweep(cache: Path, held: Path | None = None) -> None:
    """Removes what killed builders left: folders whose build is not being made, or is ours to make (`held`)."""
    for work in cache.glob(f"*{BUILDING}*"):
        folder = cache / work.name.split(BUILDING)[0]
        with contextlib.suppress(filelock.Timeout, OSError):
            with (
                contextlib.nullcontext() if folder == held else filelock.FileLock(f"{folder}.lock", timeout=0)
            ):
                shutil.rmtree(work, ignore_errors=True)


def trim(cache: Path, keep: Path) -> None:
    """Brings the cache under LIMIT: the least recently used builds go, `keep` stays."""
    builds = sorted((_used(record), record.parent) for record in cache.glob("*/build.json"))
    total = size(cache)
    for _, folder in builds:
        if total > LIMIT and folder != keep:
            total -= size(folder)
            _discard(folder)


def clear(cache: Path) -> int:
    """Removes every build that no process is making right now. Returns the bytes freed."""
    before = size(cache)
    sweep(cache)
    for record in cache.glob("*/build.json"):
        _discard(record.parent)
    for path in [*cache.glob("*.log"), *cache.glob("*.failure"), *cache.glob("*.owner")]:
        path.unlink(missing_ok=True)
    return before - size(cache)


def _discard(folder: Path) -> None:
    """Removes a build. Without its record nobody takes the rest for whole while it goes."""
    (folder / "build.json").unlink(missing_ok=True)
    shutil.rmtree(folder, ignore_errors=True)


def _used(record: Path) -> float:
    with contextlib.suppress(OSError):
        return record.stat().st_mtime
    return 0.0


def size(folder: Path) -> int:
    """Bytes in the files under `folder`."""
    total = 0
    for path in folder.rglob("*"):
        with contextlib.suppress(OSError):
            total += 0 if path.is_dir() else path.lstat().st_size
    return total


def check() -> str:
    """What the cache folder holds, for doctor()."""
    cache = cache_folder()
    unfinished = sum(1 for _ in cache.glob(f"*{BUILDING}*"))
    left = f"; {unfinished} unfinished builds, which the next build removes" if unfinished else ""
    return f"{cache}, {size(cache) >> 20} of at most {LIMIT >> 20} MB{left}"
