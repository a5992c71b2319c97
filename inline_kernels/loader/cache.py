"""The folder that holds the builds: private, locked, checked before anything in it is loaded, and limited in size.

What else is in the folder is never touched or counted. Ours bears the name of a build, and the build's lock is beside it.

<cache>/<name>_<key>/kernels.so     a build; build.json beside it says of what, and its checksum. Where it depends on files that the key does
                                    not cover, it is kernels-<digest of those>.so
<cache>/host_side_<key>/            one as well: PyTorch's side of all builds
<cache>/<name>_<key>.building-*/    a build that is being made; left behind only by a killed builder, until the next build
<cache>/<name>_<key>.lock           held by the process that builds; the operating system frees it when that process dies
<cache>/<name>_<key>.owner          that process, for those who wait
<cache>/<name>_<key>.failure, .log  how its last build failed, for those who waited, and all that the compiler said
<cache>/timed_<key>.json            which way was fastest, as engine/timed.py says; small, and so not counted
"""

from __future__ import annotations

import contextlib
import errno
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
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path

import filelock

from inline_kernels.loader import toolchain
from inline_kernels.loader.messages import BuildError

LIMIT = 1 << 30  # bytes; the least recently used builds go first
LOCK_TIMEOUT = 1800.0  # seconds
BUILDING = ".building-"
_OURS = re.compile(
    rf"([A-Za-z]\w*_[0-9a-f]{{16}})({re.escape(BUILDING)}\w+|\.owner|\.failure|\.log|\.\d+|)", re.A
)
_TIMED = re.compile(r"timed_[0-9a-f]{16}\.(json|\d+)")
_RECORD = {
    "name": str,
    "device": str,
    "parts": dict,
    "dependencies": dict,
    "seconds": (int, float),
    "built": (int, float),
    "sha256": str,
}


def cache_folder() -> Path:
    """Where builds are kept: $INLINE_LOADER_CACHE, else inline_kernels under the user's cache folder. Made if missing.

    Raises PermissionError where somebody else could write to it, BuildError where it can't be made.
    """
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    try:
        folder = (
            Path(os.environ.get("INLINE_LOADER_CACHE") or f"{base}/inline_kernels").expanduser().absolute()
        )
    except RuntimeError as error:  # neither HOME nor an entry in passwd
        raise BuildError(f"{error} Set INLINE_LOADER_CACHE to a folder of your own") from None
    with naming(folder):
        for missing in [each for each in (folder, *folder.parents) if not each.exists()][::-1]:
            with contextlib.suppress(FileExistsError):  # another process was faster
                missing.mkdir(
                    mode=0o700
                )  # as is what is missing above: whoever may replace that, may replace this
        if not folder.is_dir():
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(folder))
    _refuse_unsafe(folder)
    return folder


def _refuse_unsafe(folder: Path) -> None:
    status, inside = folder.lstat(), folder / "inline_kernels"
    faults = {
        "it is a link": stat.S_ISLNK(status.st_mode),
        f"it belongs to user {status.st_uid}": status.st_uid != os.getuid(),
        f"its mode is {stat.S_IMODE(status.st_mode):o}": status.st_mode & 0o077,
    }
    if fault := next((fault for fault, there in faults.items() if there), None):
        fix = "set INLINE_LOADER_CACHE to another folder"
        if fault.startswith("its mode"):
            fix = f"{_chmod('700', folder, status)}set INLINE_LOADER_CACHE to a folder in it, {inside}"
        raise PermissionError(
            f"{folder}: expected a folder of your own, no link, that nobody else can enter, because code is loaded from it, "
            f"but {fault}; {fix}"
        )
    for parent in folder.resolve().parents:
        status = parent.stat()
        if status.st_mode & stat.S_IWOTH and not status.st_mode & stat.S_ISVTX:
            raise PermissionError(
                f"{parent}: everybody may replace what it holds, the cache {folder} among it; "
                f"{_chmod('o-w', parent, status)}set INLINE_LOADER_CACHE to a folder elsewhere"
            )


def _chmod(mode: str, folder: Path, status: os.stat_result) -> str:
    """The advice to close `folder`, unless that is another user's, or one of all users', like /, /home and /tmp."""
    of_all = len(folder.parts) < 3 or folder.name in ("tmp", "shm") or status.st_mode & stat.S_ISVTX
    mine = status.st_uid == os.getuid() and not of_all
    return f"fix it with: chmod {mode} {shlex.quote(str(folder))}, or " if mine else ""


@contextlib.contextmanager
def naming(folder: Path) -> Iterator[None]:
    """Turns the system's errors about `folder` into a BuildError that names it and the way out."""
    try:
        yield
    except (OSError, NotImplementedError) as error:
        raise BuildError(folder_problem(folder, str(error)) or f"{folder}: {error}") from error


def folder_problem(folder: Path, text: str) -> str | None:
    """What `text`, an error of the system, of a compiler or of the dynamic linker, says about the cache folder."""
    problems = {
        "No space left on device|Disk quota exceeded": "the disk is full: free some space (python inline_loader.py clear)",
        "Read-only file system|Permission denied": "can't be written to and does not hold this build yet: make it writable",
        "failed to map segment|Operation not permitted": "no code may run from here (is it mounted noexec?): remount it",
        "No locks available|Function not implemented|Operation not supported|support flock": "its file system has no locks: "
        "mount it with locks",
        "Not a directory|File exists": "a file stands where a folder belongs: remove it",
    }
    for pattern, sentence in problems.items():
        if found := re.search(rf"^.*({pattern}).*$", text, flags=re.MULTILINE):
            return f"{folder}: {sentence}, or set INLINE_LOADER_CACHE to another folder\n{found[0]}"
    return None


# ------------------------------------------------------------------------------------------------------------- builds


def new_build(folder: Path) -> Path:
    """An empty folder to make the build `folder` in."""
    if folder.is_symlink() or folder.exists() and not folder.is_dir():
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(folder))
    return Path(tempfile.mkdtemp(prefix=folder.name + BUILDING, dir=folder.parent))


def publish(work: Path, folder: Path, library: Path, record: Mapping[str, object]) -> None:
    """Makes `work`, with the built `library`, the build `folder` in one step."""
    # The dynamic linker takes a library of the same path for the one that it has loaded.
    library = library.rename(work / _library_name(record["dependencies"]))
    record = {**record, "sha256": _checksum(library), "built": time.time()}
    (work / "build.json").write_text(json.dumps(record), encoding="utf-8")
    shutil.rmtree(folder, ignore_errors=True)
    work.rename(folder)


def verified(folder: Path) -> tuple[Path, Mapping[str, list]] | None:
    """The library of the build `folder` and the fingerprints of its dependencies, if it is whole and they are as they were, else
    None. Marks the build as used."""
    record = _record(folder)
    try:
        library = folder / _library_name(record["dependencies"])
        if _checksum(library) != record["sha256"] or changed(record["dependencies"]):
            return None
    except (KeyError, OSError):
        return None
    with contextlib.suppress(OSError):  # a read-only cache
        os.utime(folder / "build.json")
    return library, record["dependencies"]


def _library_name(dependencies: Mapping[str, list]) -> str:
    return f"kernels-{content(dependencies)}.so" if dependencies else "kernels.so"


def fingerprint(path: str, since: int) -> list:
    """What shows at a glance whether the file `path` is what it was, then a digest of its content. Of a file that was written to later
    than `since`, in ns, nobody knows what the compiler read: it shows as changed."""
    status = _glance(path)
    return [*status, _checksum(Path(path))] if status[0] < since else [0, 0, 0, f"written to at {status[0]}"]


def changed(dependencies: Mapping[str, list]) -> str | None:
    """The first of the files `dependencies` that is not what its fingerprint says, or None."""
    for path, (*status, checksum) in dependencies.items():
        try:
            if _glance(path) != status and _checksum(Path(path)) != checksum:
                return path
        except OSError:
            return path
    return None


def content(dependencies: Mapping[str, list]) -> str:
    """A digest of what the files `dependencies` hold."""
    held = {path: checksum for path, (*_, checksum) in dependencies.items()}
    return hashlib.sha256(json.dumps(held, sort_keys=True).encode()).hexdigest()[:16]


def _glance(path: str) -> list[int]:
    status = os.stat(path)
    return [status.st_ctime_ns, status.st_size, status.st_ino]


def _checksum(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _record(folder: Path) -> dict:
    return whole(folder / "build.json", _RECORD)


def whole(path: Path, kinds: Mapping[str, type | tuple[type, ...]]) -> dict:
    """The JSON object in the file `path` if it has all `kinds`, else {}."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    whole = isinstance(found, dict) and all(isinstance(found.get(key), kind) for key, kind in kinds.items())
    return found if whole else {}


def replace(path: Path, text: object) -> None:
    """Writes it as JSON, in one step: nobody reads half of it."""
    fresh = path.with_suffix(f".{os.getpid()}")
    fresh.write_text(json.dumps(text), encoding="utf-8")
    fresh.replace(path)


def why_missing(folder: Path, name: str, device: str, parts: Mapping[str, str]) -> tuple[str, float | None]:
    """Why the build `folder` is not (whole) in the cache, and the seconds that its last build took (None: never built)."""
    if folder.exists():
        record = _record(folder)
        path = changed(record.get("dependencies", {}))
        return f"{path} changed" if path else "the cached library is damaged", record.get("seconds")
    records = [_record(folder.parent / build) for build in _ours(folder.parent) if build[:-17] == name]
    records = [
        record
        for record in records
        if record.get("device") == device and record["parts"].get("launchers") == parts.get("launchers")
    ]
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
            holder = "another process"
            with contextlib.suppress(OSError, ValueError):
                holder = owner.read_text()
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
    places = (_at_once(cache / f"build-{index}.lock") for index in range(toolchain.builds_at_once()))
    return next((place for place in places if place), None)


def _at_once(path: Path) -> filelock.BaseFileLock | None:
    """The lock `path`, taken, unless somebody holds it."""
    lock = filelock.FileLock(path)
    with contextlib.suppress(filelock.Timeout):
        lock.acquire(timeout=0)
        return lock
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
        told = whole(self.path, {"message": str, "log": str, "log_path": str})
        if told and self._stamp() != self.known:
            raise BuildError(**told)

    def pass_on(self, error: BuildError) -> None:
        text = {"message": str(error), "log": error.log, "log_path": error.log_path}
        with contextlib.suppress(OSError):  # a full disk: those who wait will meet it themselves
            replace(self.path, text)


# ------------------------------------------------------------------------------------------------------------ cleaning up


def _ours(cache: Path) -> dict[str, list[Path]]:
    """All in the cache folder that the loader made, by the name of the build: that, what it is made in, its log and notes."""
    found: dict[str, list[Path]] = {}
    with contextlib.suppress(OSError):
        names = set(os.listdir(cache))
        for match in filter(None, map(_OURS.fullmatch, names)):
            if f"{match[1]}.lock" in names:
                found.setdefault(match[1], []).append(cache / match[0])
    return found


def _remove(folder: Path, paths: Iterable[Path]) -> None:
    """Removes `paths`, which are of the build `folder`, unless a process is making that right now."""
    with contextlib.suppress(OSError):
        if lock := _at_once(Path(f"{folder}.lock")):
            try:
                for path in paths:
                    _discard(path)
            finally:
                lock.release()


def _discard(path: Path) -> None:
    with contextlib.suppress(OSError):
        (
            path / "build.json" if path.is_dir() else path
        ).unlink()  # without its record nobody takes the rest for whole
    shutil.rmtree(path, ignore_errors=True)


def sweep(cache: Path, held: Path | None = None) -> None:
    """Removes what killed builders left: folders whose build is not being made, or is ours to make (`held`)."""
    for build, paths in _ours(cache).items():
        left = [path for path in paths if BUILDING in path.name]
        if cache / build == held:
            for path in left:
                _discard(path)
        elif left:
            _remove(cache / build, left)


def trim(cache: Path, keep: Path) -> None:
    """Brings the cache under LIMIT: the least recently used builds go, `keep` stays."""
    total = size(cache)
    for folder in sorted([cache / build for build in _ours(cache)], key=_used):
        if total > LIMIT and folder != keep:
            total -= _bytes(folder)
            _remove(folder, [folder])


def clear(cache: Path) -> int:
    """Removes every build that no process is making right now, and what was timed. Returns the bytes that builds took."""
    before = size(cache)
    for path in [path for path in cache.iterdir() if _TIMED.fullmatch(path.name)]:
        path.unlink(missing_ok=True)
    for build, paths in _ours(cache).items():
        _remove(cache / build, paths)
    return before - size(cache)


def _used(folder: Path) -> float:
    with contextlib.suppress(OSError):
        return (folder / "build.json").stat().st_mtime
    return 0.0


def size(cache: Path) -> int:
    """Bytes in all that the loader made in the cache folder."""
    return sum(_bytes(path) for paths in _ours(cache).values() for path in paths)


def _bytes(path: Path) -> int:
    total = 0
    for file in [path, *[Path(folder, name) for folder, _, names in os.walk(path) for name in names]]:
        with contextlib.suppress(OSError):  # it may go meanwhile
            total += 0 if file.is_dir() else file.lstat().st_size
    return total


def check() -> str:
    """What the cache folder holds, for doctor()."""
    cache = cache_folder()
    unfinished = sum(BUILDING in path.name for paths in _ours(cache).values() for path in paths)
    left = f"; {unfinished} unfinished builds, which the next build removes" if unfinished else ""
    return f"{cache}, {size(cache) >> 20} of at most {LIMIT >> 20} MB{left}"
