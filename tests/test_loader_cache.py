"""The loader's cache under faults: damaged and planted libraries, foreign files, full disks, odd paths, unsafe folders."""

from __future__ import annotations

import errno
import fcntl
import os
import pwd
import shutil
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

import inline_loader
from inline_kernels.loader import cache as loader_cache
from inline_kernels.loader import toolchain as loader_toolchain
from inline_kernels.loader import units
from inline_loader import BuildError
from loading import (
    ROOT,
    builds,
    finish,
    loading,
    mounted,
    only_build,
    program,
    run,
    scale,
    start,
    start_python,
    wait_until,
)

pytestmark = pytest.mark.usefixtures("cache")


# --------------------------------------------------------------------------------------------------- the cache's content


@pytest.mark.parametrize("damage", ["truncated", "empty", "foreign", "no record"])
def test_damaged_library_is_rebuilt(cache, damage, compiler):
    source, other = scale(), scale(" + 1")
    assert finish(start(source))[0] == "[2.0, -6.0]"
    library = only_build(cache) / "kernels.so"
    if damage == "truncated":
        os.truncate(library, library.stat().st_size // 2)
    elif damage == "empty":
        os.truncate(library, 0)
    elif damage == "foreign":
        inline_loader.load("other", source=other)
        library.write_bytes(next(cache.glob("other_*/kernels.so")).read_bytes())
    else:
        (library.parent / "build.json").unlink()
    before = compiler.count()
    out, err = finish(start(source))
    assert out == "[2.0, -6.0]" and "the cached library is damaged" in err
    assert compiler.count() == before + 1
    assert "scale (cpu): cached" in finish(start(source))[1] and compiler.count() == before + 1


@pytest.mark.parametrize("mode", [0o777, 0o770, 0o755])
def test_shared_cache_folder_is_refused(cache, mode):
    cache.mkdir()
    cache.chmod(mode)
    with pytest.raises(PermissionError, match=f"nobody else can enter.*chmod 700 {cache}"):
        inline_loader.load("scale", source=scale())


def test_linked_cache_folder_is_refused(cache, tmp_path):
    (tmp_path / "real").mkdir(mode=0o700)
    cache.symlink_to(tmp_path / "real")
    with pytest.raises(PermissionError, match="no link"):
        inline_loader.load("scale", source=scale())


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give a folder away")
def test_foreign_cache_folder_is_refused(cache):
    cache.mkdir(mode=0o700)
    os.chown(cache, 12345, 12345)
    with pytest.raises(PermissionError, match="folder of your own"):
        inline_loader.load("scale", source=scale())


def test_cache_in_a_replaceable_place_is_refused(tmp_path, monkeypatch):
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o777)
    monkeypatch.setenv("INLINE_LOADER_CACHE", str(shared / "cache"))
    with pytest.raises(PermissionError, match=f"chmod o-w {shared}"):
        inline_loader.load("scale", source=scale())


@pytest.mark.skipif(os.getuid() != 0, reason="only root owns all of these")
@pytest.mark.parametrize("folder", ["/", "/tmp", "/usr", "/dev/shm"])
def test_nobody_is_told_to_close_a_folder_of_all(folder, monkeypatch, capsys):
    monkeypatch.setenv("INLINE_LOADER_CACHE", folder)
    assert inline_loader.main(["doctor"]) == 1
    out = capsys.readouterr().out
    assert f"FAIL  cache folder: {folder}: expected" in out and "chmod" not in out
    assert f"set INLINE_LOADER_CACHE to a folder in it, {folder.rstrip('/')}/inline_kernels" in out
    assert inline_loader.main(["clear"]) == 1 and "Traceback" not in capsys.readouterr().err


def test_advice_fits_the_fault(cache, tmp_path, monkeypatch):
    (tmp_path / "tmp").mkdir()
    (tmp_path / "tmp").chmod(0o777)  # as in a container
    monkeypatch.setenv("INLINE_LOADER_CACHE", str(tmp_path / "tmp" / "cache"))
    with pytest.raises(PermissionError, match="everybody may replace .* to a folder elsewhere") as caught:
        loader_cache.cache_folder()
    assert "chmod" not in str(caught.value)
    monkeypatch.setenv("INLINE_LOADER_CACHE", str(cache))
    cache.mkdir(mode=0o700)
    monkeypatch.setattr(os, "getuid", lambda: 12345)
    with pytest.raises(
        PermissionError, match=r"belongs to user \d+; set INLINE_LOADER_CACHE to another"
    ) as caught:
        loader_cache.cache_folder()
    assert "chmod" not in str(caught.value)


def test_no_home(monkeypatch, capsys):
    def getpwuid(number):
        raise KeyError(f"getpwuid(): uid not found: {number}")

    for variable in ("INLINE_LOADER_CACHE", "XDG_CACHE_HOME", "HOME"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setattr(pwd, "getpwuid", getpwuid)
    with pytest.raises(BuildError, match="home directory.* Set INLINE_LOADER_CACHE to a folder of your own"):
        inline_loader.load("scale", source=scale())
    assert inline_loader.main(["doctor"]) == 1
    assert "FAIL  cache folder" in capsys.readouterr().out


def test_tilde_is_the_home_folder(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("INLINE_LOADER_CACHE", "~/kernels")
    assert loader_cache.cache_folder() == tmp_path / "kernels"
    monkeypatch.setenv("INLINE_LOADER_CACHE", "~nobody-of-this-name/kernels")
    with pytest.raises(BuildError, match="Set INLINE_LOADER_CACHE"):
        loader_cache.cache_folder()


def test_a_fresh_home_without_a_umask(monkeypatch, tmp_path):
    monkeypatch.delenv("INLINE_LOADER_CACHE")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    before = os.umask(0)
    try:
        assert (
            loader_cache.cache_folder()
            == loader_cache.cache_folder()
            == tmp_path / "home/.cache/inline_kernels"
        )
    finally:
        os.umask(before)


@pytest.mark.parametrize("place", ["the cache", "above the cache", "a build", "a build, as a link"])
def test_a_file_in_the_place_of_a_folder(cache, tmp_path, monkeypatch, place):
    source = scale()
    file = cache if place == "the cache" else tmp_path / "file"
    if place == "above the cache":
        monkeypatch.setenv("INLINE_LOADER_CACHE", str(file / "cache"))
    elif place != "the cache":
        file = loader_cache.cache_folder() / units.unit_of("scale", source, "cpu", {}).namespace
    if place.endswith("link"):
        file.symlink_to(tmp_path / "nowhere")
    else:
        file.write_text("mine")
    with pytest.raises(BuildError, match="a file stands where a folder belongs: remove it") as caught:
        inline_loader.load("scale", source=source)
    assert str(file) in str(caught.value) and (place.endswith("link") or file.read_text() == "mine")


@pytest.mark.parametrize("error", [errno.ENOLCK, errno.EOPNOTSUPP])
def test_no_locks(monkeypatch, cache, error):
    def flock(*_):
        raise OSError(error, os.strerror(error))

    monkeypatch.setattr(fcntl, "flock", flock)
    with pytest.raises(BuildError, match=f"{cache}: its file system has no locks: .*INLINE_LOADER_CACHE"):
        inline_loader.load("scale", source=scale())
    assert inline_loader.clear_cache() == 0 and inline_loader.main(["doctor"]) in (0, 1)


def test_new_cache_folder_is_private(cache):
    loader_cache.cache_folder()
    assert cache.stat().st_mode & 0o777 == 0o700


def test_least_recently_used_build_goes_first(cache, monkeypatch):
    folders = {}
    for name in ("a", "b", "c"):
        if name == "c":
            os.utime(folders["a"] / "build.json", (3, 3))
            os.utime(folders["b"] / "build.json", (2, 2))
            monkeypatch.setattr(loader_cache, "LIMIT", loader_cache.size(cache) + 1000)
        inline_loader.load(name, source=scale().replace("scale", name))
        folders[name] = next(cache.glob(f"{name}_*/build.json")).parent
    assert [name for name, folder in folders.items() if folder.exists()] == ["a", "c"]
    monkeypatch.setattr(loader_cache, "LIMIT", 1)
    loader_cache.trim(cache, keep=folders["c"])
    assert [name for name, folder in folders.items() if folder.exists()] == ["c"]


def test_a_cached_load_counts_as_use(warm):
    source = scale()
    finish(start(source))
    record = only_build(warm) / "build.json"
    os.utime(record, (1, 1))
    finish(start(source))
    assert record.stat().st_mtime > 1


@pytest.fixture
def foreign(cache) -> list[Path]:
    """Files and folders of the user's in the cache folder, all with names like ours."""
    loader_cache.cache_folder()
    hexadecimal = "0123456789abcdef"
    names = [
        "run/build.json",
        f"run_{hexadecimal}/build.json",
        f"run_{hexadecimal}/big",
        "my.building-site/plan",
        "train.log",
    ]
    names += [
        f"run_{hexadecimal}.log",
        "model.failure",
        "model.owner",
        "sub/scale_" + hexadecimal + "/build.json",
    ]
    for name in names:
        (cache / name).parent.mkdir(parents=True, exist_ok=True)
        (cache / name).write_bytes(b"{}" * 50_000)
    return [cache / name for name in names]


def test_what_is_not_ours_is_neither_touched_nor_counted(warm, cache, foreign, monkeypatch):
    finish(start(scale()))
    with pytest.raises(BuildError):
        inline_loader.load("wrong", source=scale(" + nonsense"))
    size = loader_cache.size(cache)
    for path in foreign:
        path.write_bytes(b"{}" * 5_000_000)
    assert loader_cache.size(cache) == size
    monkeypatch.setattr(loader_cache, "LIMIT", size + (1 << 20))
    inline_loader.load("other", source=scale().replace("scale", "other"))
    assert len(builds(cache)) == 2  # the limit is for ours
    monkeypatch.setattr(loader_cache, "LIMIT", 0)
    inline_loader.load("another", source=scale().replace("scale", "another"))
    assert only_build(cache).name.startswith("another_")
    assert inline_loader.clear_cache() > 0
    assert all(path.stat().st_size == 10_000_000 for path in foreign)
    left = {path for path in cache.iterdir() if path.suffix != ".lock"}
    assert left == {cache / path.relative_to(cache).parts[0] for path in foreign}


def test_clear_cache_spares_what_is_being_built(cache, compiler):
    finish(start(scale()))
    killed = cache / ("gone_0123456789abcdef" + loader_cache.BUILDING + "x")
    killed.mkdir()
    (cache / "gone_0123456789abcdef.lock").touch()  # as the builder left it
    compiler.hold.touch()
    builder = start(scale())
    wait_until(lambda: compiler.count() == 2)
    assert inline_loader.clear_cache() > 0
    assert not list(cache.glob("*/build.json")) and not killed.exists()
    compiler.hold.unlink()
    assert finish(builder)[0] == "[2.0, -6.0]" and only_build(cache)


def test_clear_spares_what_is_being_published(cache, monkeypatch):
    folder = loader_cache.cache_folder() / "scale_0123456789abcdef"
    rename, cleared = Path.rename, []

    def clear_and_rename(path, target):
        if path.name.startswith(folder.name):
            cleared.append(loader_cache.clear(cache))  # the build's record is there already
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", clear_and_rename)
    with loader_cache.lock(folder, print):
        work = loader_cache.new_build(folder)
        (work / "library").write_bytes(b"library")
        record = dict(name="scale", device="cpu", parts={}, dependencies={}, seconds=1.0)
        loader_cache.publish(work, folder, work / "library", record)
        assert len(cleared) == 1
        loader_cache.clear(cache)
        assert loader_cache.verified(folder)
    assert loader_cache.clear(cache) > 0 and not folder.exists()


def test_scanning_bears_folders_that_vanish(cache):
    """Threads make, publish and remove builds, while all that scans the cache folder does so."""
    loader_cache.cache_folder()
    stop = threading.Event()

    def build(number: int) -> None:
        while not stop.is_set():
            folder = cache / f"k{number}_0123456789abcdef"
            with loader_cache.lock(folder, print):
                work = loader_cache.new_build(folder)
                for name in ("library", *map(str, range(20))):
                    (work / name).write_bytes(b"library")
                record = dict(name=f"k{number}", device="cpu", parts={}, dependencies={}, seconds=1.0)
                loader_cache.publish(work, folder, work / "library", record)
                assert loader_cache.verified(folder)
            shutil.rmtree(folder, ignore_errors=True)

    with ThreadPoolExecutor(3) as pool:
        builders = [pool.submit(build, number) for number in range(3)]
        deadline = time.monotonic() + 4
        try:
            while time.monotonic() < deadline and not any(builder.done() for builder in builders):
                loader_cache.size(cache)
                loader_cache.why_missing(cache / "k0_0000000000000000", "k0", "cpu", {})
                loader_cache.trim(cache, cache)
                loader_cache.check()
                loader_cache.clear(cache)
        finally:
            stop.set()
        assert [builder.result() for builder in builders] == [None] * 3


@pytest.mark.parametrize(
    "content", ["[]", "null", "{}", '{"device": "cpu", "parts": null}', "\ufeff{}", "[" * 100_000, ""]
)
def test_records_of_any_content(cache, content):
    other = loader_cache.cache_folder() / "scale_0123456789abcdef"
    source = scale()
    unit = units.unit_of("scale", source, "cpu", {})
    for folder in (other, cache / unit.namespace):
        folder.mkdir()
        Path(f"{folder}.lock").touch()
        (folder / "build.json").write_text(content, encoding="utf-8")
        (folder / "kernels.so").touch()
    missing = cache / "scale_0000000000000000"
    assert loader_cache.why_missing(missing, "scale", "cpu", unit.parts) == ("first build", None)
    failure = loader_cache.Failure(missing)
    Path(f"{missing}.failure").write_text(content, encoding="utf-8")
    failure.raise_if_new()
    if content == "[]":
        assert run(inline_loader.load("scale", source=source)) == [2.0, -6.0]


# --------------------------------------------------------------------------------------------- PyTorch's side of all builds


@pytest.fixture
def shared_compiler(tmp_path, monkeypatch):
    """A compiler that notes whether it compiles PyTorch's side or a kernel, and waits with that side while `hold` exists."""
    calls, hold, script = tmp_path / "calls", tmp_path / "hold", tmp_path / "g++-of-two"
    script.write_text(f"""#!/bin/sh
case " $* " in
*" -c "*host_side_*|*host_side_*" -c "*) echo shared >> {calls}; while [ -e {hold} ]; do sleep 0.05; done;;
*" -c "*) echo kernel >> {calls};;
esac
exec c++ "$@"
""")
    script.chmod(0o755)
    monkeypatch.setenv("CXX", str(script))
    calls.touch()
    return calls, hold


def test_what_all_builds_share_is_compiled_once(shared_compiler):
    calls, _ = shared_compiler
    processes = [start(scale()) for _ in range(3)]
    assert [finish(process)[0] for process in processes] == ["[2.0, -6.0]"] * 3
    assert sorted(calls.read_text().split()) == ["kernel"] * 3 + ["shared"]


@pytest.mark.parametrize("damage", ["truncated", "killed"])
def test_what_all_builds_share_is_made_again_where_it_is_not_whole(cache, damage, shared_compiler):
    calls, hold = shared_compiler
    source = scale()
    if damage == "killed":
        hold.touch()
        builder = start(source)
        wait_until(lambda: "shared" in calls.read_text())
        builder.kill()
        finish(builder)
        hold.unlink()
        calls.write_text("")
    else:
        assert finish(start(source))[0] == "[2.0, -6.0]"
        calls.write_text("")
        (library,) = cache.glob("host_side_*/kernels.so")
        os.truncate(library, library.stat().st_size // 2)
    out, err = finish(start(source))
    assert out == "[2.0, -6.0]", err
    assert ("host_side (cpu), the cached library is damaged" in err) == (damage == "truncated")
    assert calls.read_text().split().count("shared") == 1
    assert len(list(cache.glob("host_side_*/kernels.so"))) == 1 and not list(cache.glob("*.building-*"))


def test_what_all_builds_share_has_a_key_of_its_own(kernels_folder, monkeypatch, tmp_path):
    def keys() -> tuple[str, str]:
        return units.host_unit("cpu").key, units.unit_of("scale", source, "cpu", {}).key

    source = scale()
    before = keys()
    assert keys() == before
    for target, name, value in [
        (torch, "__version__", "9.9.9"),
        (torch.version, "git_version", "other"),
        (units, "STABLE_ABI", not units.STABLE_ABI),
        (loader_toolchain, "version_of", lambda compiler: "c++ 99.0.0"),
    ]:
        with monkeypatch.context() as patch:
            patch.setattr(target, name, value)
            assert all(now != then for now, then in zip(keys(), before)), name
    with monkeypatch.context() as patch:
        patch.setenv("CPATH", str(tmp_path))
        assert all(now != then for now, then in zip(keys(), before))
    with open(kernels_folder / "host/pytorch.h", "a") as header:
        header.write("// edited\n")
    assert keys()[0] != before[0] and keys()[1] == before[1]
    with open(kernels_folder / "host/host.h", "a") as header:
        header.write("// edited\n")
    assert keys()[1] != before[1]


def test_what_all_builds_share_is_seen_when_edited_and_its_errors_have_a_line(kernels_folder):
    header = kernels_folder / "host/pytorch.h"
    header.write_text(header.read_text().replace("expected a contiguous", "wanted a contiguous"))
    kernels = inline_loader.load("scale", source=scale())
    with pytest.raises(RuntimeError, match="scale: y: wanted a contiguous tensor"):
        kernels(torch.empty(2, 2).t(), torch.ones(2), 2.0, 2)
    header.write_text("#pragma once\nint broken = ;\n")
    inline_loader.forget()
    with pytest.raises(BuildError, match=f"^{header}:2:14: error: .*\n *2 \\| int broken = ;\n"):
        inline_loader.load("scale", source=scale())


# ------------------------------------------------------------------------------------------------------ disks and paths


def test_full_disk_names_the_folder(cache):
    result = mounted("size=48k", cache, loading(scale()))
    assert f"{cache}: the disk is full" in result.stdout and "INLINE_LOADER_CACHE" in result.stdout, result


def test_full_temporary_folder_is_named(tmp_path, monkeypatch):
    (tmp_path / "tmp").mkdir()
    monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))
    result = mounted("size=48k", tmp_path / "tmp", loading(scale()))
    assert (
        f"{tmp_path}/tmp: the folder for temporary files is full" in result.stdout
        and "TMPDIR" in result.stdout
    ), result


def test_noexec_cache_names_the_folder(cache):
    result = mounted("noexec", cache, loading(scale()))
    assert f"{cache}: no code may run from here" in result.stdout, result


def test_read_only_cache_loads_what_it_has_and_says_so_where_it_has_not(warm, cache, tmp_path):
    built, new = scale(), scale()
    assert finish(start(built))[0] == "[2.0, -6.0]"
    shutil.copytree(cache, tmp_path / "copy")
    fill = f"cp -r {tmp_path}/copy/. {cache} && chmod 700 {cache} && mount -o remount,ro {cache}"
    assert mounted("size=10m", cache, loading(built), fill).stdout.strip() == "[2.0, -6.0]"
    result = mounted("size=10m", cache, loading(new), fill)
    assert f"{cache}: can't be written to" in result.stdout, result


ODD = """odd $HOME ${x} 'q' "Q" é: #&;(1)%"""


@pytest.fixture(scope="module")
def odd_project(tmp_path_factory) -> Path:
    """The project and torch itself in a folder with every character that has broken a build somewhere."""
    folder = tmp_path_factory.mktemp("odd") / ODD
    folder.mkdir()
    shutil.copy(ROOT / "inline_loader.py", folder)
    shutil.copytree(ROOT / "inline_kernels", folder / "inline_kernels")
    shutil.copytree(ROOT / "kernels", folder / "kernels")
    (folder / "site").mkdir()
    (folder / "site" / "torch").symlink_to(Path(torch.__file__).parent)
    (folder / "tmp").mkdir()
    (folder / "cache").mkdir(mode=0o700)
    return folder


@pytest.mark.parametrize(
    "locale",
    [
        {"LC_ALL": "POSIX"},
        {
            "LC_ALL": "POSIX",
            "PYTHONUTF8": "0",
            "PYTHONCOERCECLOCALE": "0",
        },  # torch can't be imported from an é here
    ],
    ids=["posix", "ascii"],
)
def test_odd_paths_work(odd_project, locale):
    source = scale().replace("// build", "// bâtiment")
    environment = {
        "INLINE_LOADER_CACHE": str(odd_project / "cache"),
        "TMPDIR": str(odd_project / "tmp"),
        **locale,
    }
    paths = [odd_project] if "PYTHONUTF8" in locale else [odd_project, odd_project / "site"]
    # The program's text is ASCII: under these locales Python takes no other.
    before = "\n".join(f"import os; sys.path.insert(0, os.fsdecode({os.fsencode(path)!r}))" for path in paths)
    out, err = finish(start_python(source, before, **environment))
    assert out == "[2.0, -6.0]", err
    wrong = program(source.replace("x[i]", "q[i]"))
    out, err = finish(start_python(source, before, wrong, **environment))
    assert out.startswith("[2.0, -6.0]\n<scale>:4:") and "cached" in err, (out, err)
