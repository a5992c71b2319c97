"""The loader under every fault that it promises to survive: killed builders, planted libraries, full disks, odd paths.

Each test uses a cache of its own. Where the moment matters, the compiler is a wrapper (fixture `compiler`) that counts its
calls and waits while a file exists, so that no test depends on how long anything takes.
"""

from __future__ import annotations

import dataclasses
import os
import pickle
import re
import shutil
import signal
import subprocess
import sys
import textwrap
import warnings
from pathlib import Path

import pytest
import torch

import inline_loader
from inline_kernels.loader import cache as loader_cache
from inline_kernels.loader import cells, units
from inline_kernels.loader import messages as loader_report
from inline_kernels.loader import source as loader_source
from inline_kernels.loader import toolchain as loader_toolchain
from inline_loader import BuildError
from loading import (
    PATIENCE,
    ROOT,
    finish,
    loading,
    numbers,
    only_build,
    run,
    scale,
    start,
    wait_for_line,
    wait_until,
)

pytestmark = pytest.mark.usefixtures("cache")


# ---------------------------------------------------------------------------------------------- launchers and host side


def test_launchers_become_operators(cache):
    kernels = inline_loader.load(
        "pair",
        source=scale()
        + """
// a comment with an EXPORT void nothing(float* y) in it
EXPORT void flags(double* y, const int64_t* x, bool negate, int64_t n) {
  for (int64_t i = 0; i < n; i++) y[i] = negate ? -x[i] : x[i];
}
""",
    )
    assert run(kernels) == [2.0, -6.0]
    y = torch.empty(2, dtype=torch.float64)
    kernels.flags(y, torch.tensor([1, 2]), True, 2)
    assert y.tolist() == [-1.0, -2.0]
    assert "flags(Tensor(y!) y, Tensor x, bool negate, int n)" in repr(kernels)
    with pytest.raises(TypeError, match=r"several operators, call one of pair\.scale, pair\.flags"):
        kernels(y)


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda x: (x.double(), x), r"scale: y: expected a float32 tensor, got float64"),
        (lambda x: (torch.empty(2, 2).t(), x), r"scale: y: expected a contiguous tensor"),
    ],
)
def test_host_side_checks_tensors(change, message):
    kernels = inline_loader.load("scale", source=scale(number=-1))
    with pytest.raises(RuntimeError, match=message):
        kernels(*change(torch.ones(2)), 2.0, 2)


@pytest.mark.parametrize(
    "declaration, message",
    [
        (
            "EXPORT void f(float* y, int n)",
            r"<f>:2:13: error: expected parameters like .* got `int n`: write `int64_t n`\n *2 \| EXPORT.*\n *\| {13}\^",
        ),
        ("EXPORT void f(int64_t n)", r"<f>:2:13: error: f: expected at least one tensor"),
        ("void f(float* y)", r"<f>: expected at least one launcher"),
    ],
)
def test_bad_launchers_are_named(declaration, message):
    with pytest.raises(BuildError, match=message):
        inline_loader.load("f", source=f"// one\n{declaration} {{}}\n")


@pytest.mark.parametrize(
    "arguments, error",
    [
        ({"name": "no_such_kernel"}, FileNotFoundError),
        ({"name": "a-b", "source": ""}, ValueError),
        ({"name": "f", "source": "", "device": "mps"}, ValueError),
    ],
)
def test_bad_requests(arguments, error):
    with pytest.raises(error, match="expected"):
        inline_loader.load(**arguments)


def test_operators_work_under_torch_compile():
    kernels = inline_loader.load("scale", source=scale())

    @torch.compile(fullgraph=True, backend="aot_eager")
    def twice(x):
        y = torch.empty_like(x)
        kernels(y, x, 2.0, x.numel())
        return y + 1

    assert twice(torch.tensor([1.0, -3.0])).tolist() == [3.0, -5.0]


@pytest.mark.parametrize("name, source, message", [
    (3, "", "expected a name, got 3"),
    ("paths", Path("kernel.cpp"), "expected the text of a source, got PosixPath"),
    ("paths", b"EXPORT void f() {}", "expected the text of a source, got b'EXPORT"),
], ids=str)  # fmt: skip
def test_what_is_no_text(name, source, message):
    with pytest.raises(TypeError, match=message):
        inline_loader.load(name, source=source)


# ------------------------------------------------------------------------------------------------------- the right code


def test_same_name_two_sources():
    first, second = scale(), scale(" + 1")
    assert run(inline_loader.load("same", source=first)) == [2.0, -6.0]
    assert run(inline_loader.load("same", source=second)) == [3.0, -5.0]
    assert run(inline_loader.load("same", source=first)) == [2.0, -6.0]


def test_defines_are_builds_of_their_own():
    source = scale(" + EXTRA")
    assert run(inline_loader.load("scale", source=source, defines={"EXTRA": 1})) == [3.0, -5.0]
    assert run(inline_loader.load("scale", source=source, defines={"EXTRA": 2})) == [4.0, -4.0]


def test_loaded_once_stays_loaded(cache):
    source = scale()
    kernels = inline_loader.load("scale", source=source)
    assert inline_loader.load("scale", source=source) is kernels
    inline_loader.clear_cache()
    assert run(inline_loader.load("scale", source=source)) == [
        2.0,
        -6.0,
    ]  # the namespace lives on: no second registration
    assert not list(cache.glob("*/build.json"))


def test_everything_that_matters_is_in_the_key(kernels_folder, monkeypatch, tmp_path):
    (kernels_folder / "outer.h").write_text('#include "inner.h"\n')
    (kernels_folder / "inner.h").write_text("// 1\n")
    (kernels_folder / "k.cpp").write_text('#include "outer.h"\n' + scale())

    def parts(**defines):
        return dict(units.unit_of("k", None, "cpu", defines).parts)

    def changed(now) -> list[str]:
        return [part for part in before if before[part] != now[part]]

    before = parts()
    assert changed(parts()) == []
    assert changed(parts(A=1)) == ["defines"]
    (kernels_folder / "inner.h").write_text("// 2\n")
    assert changed(parts()) == ["headers"]
    before = parts()
    (kernels_folder / "k.cpp").write_text('#include "outer.h"\n' + scale())
    assert changed(parts()) == ["source"]
    before = parts()
    for target, name, value, part in [
        (torch, "__version__", "9.9.9", "torch"),
        (torch.version, "git_version", "other", "torch"),
        (torch.version, "cuda", "99.0", "torch"),
        (units, "STABLE_ABI", not units.STABLE_ABI, "flags"),
        (loader_toolchain, "version_of", lambda compiler: "c++ 99.0.0", "compiler"),
        (loader_toolchain, "processor", lambda: "another", "processor"),
    ]:
        with monkeypatch.context() as patch:
            patch.setattr(target, name, value)
            assert part in changed(parts()), name
    monkeypatch.setenv("CPATH", str(tmp_path))
    assert changed(parts()) == ["environment"]


def test_what_is_compiled_is_what_was_hashed(kernels_folder):
    """A header that the key does not know can't be found by the compiler either."""
    (kernels_folder / "hidden.h").write_text("#define EXTRA + 1\n")
    source = '#define HEADER "hidden.h"\n#include HEADER\n' + scale(" EXTRA")
    with pytest.raises(BuildError, match="hidden.h"):
        inline_loader.load("scale", source=source)


def test_edited_header_is_seen_and_told(kernels_folder, capfd):
    (kernels_folder / "extra.h").write_text("#define EXTRA + 1\n")
    (kernels_folder / "k.cpp").write_text('#include "extra.h"\n' + scale(" EXTRA"))
    assert run(inline_loader.load("k")) == [3.0, -5.0]
    assert "k (cpu), first build: compiling" in capfd.readouterr().err
    (kernels_folder / "extra.h").write_text("#define EXTRA + 2\n")
    inline_loader._loaded.clear()  # as before each notebook cell
    assert run(inline_loader.load("k")) == [4.0, -4.0]
    err = capfd.readouterr().err
    assert re.search(r"k \(cpu\), headers changed: compiling, about \d+ s", err), err
    assert re.search(r"k \(cpu\), headers changed: built, [\d.]+ s", err), err


# ------------------------------------------------------------------------------------------------- processes that meet


def test_eight_cold_processes_build_once(compiler):
    source = scale()
    compiler.hold.touch()
    processes = [start(source) for _ in range(8)]
    compiler.wait_for_call()
    compiler.hold.unlink()
    assert [finish(process)[0] for process in processes] == ["[2.0, -6.0]"] * 8
    assert compiler.count() == 1


def test_who_waits_is_told_for_whom(compiler):
    source = scale()
    compiler.hold.touch()
    builder = start(source)
    compiler.wait_for_call()
    waiter = start(source)
    wait_for_line(waiter, f"waiting for process {builder.pid} on ")
    compiler.hold.unlink()
    assert finish(builder)[0] == finish(waiter)[0] == "[2.0, -6.0]"


def test_waiting_ends_with_the_lock_named(compiler, monkeypatch, cache):
    source = scale()
    compiler.hold.touch()
    builder = start(source)
    compiler.wait_for_call()
    monkeypatch.setattr(loader_cache, "LOCK_TIMEOUT", 0.3)
    with pytest.raises(BuildError, match=rf"waiting for process {builder.pid} on .*{cache}/scale_\w+\.lock"):
        inline_loader.load("scale", source=source)
    compiler.hold.unlink()
    assert finish(builder)[0] == "[2.0, -6.0]"


def test_all_who_waited_get_the_same_compiler_text(compiler):
    source = scale(" + nonsense")
    compiler.hold.touch()
    builder = start(source)
    compiler.wait_for_call()
    waiters = [start(source) for _ in range(2)]
    for waiter in waiters:
        wait_for_line(waiter, "waiting for process")
    compiler.hold.unlink()
    texts = {finish(process)[0] for process in [builder, *waiters]}
    assert len(texts) == 1 and "nonsense" in texts.pop()
    assert compiler.count() == 1
    assert "nonsense" in finish(start(source))[0] and compiler.count() == 2  # later calls try again


@pytest.mark.parametrize("kill", [signal.SIGKILL, signal.SIGINT])
def test_killed_builder_leaves_nothing_that_hurts(compiler, cache, kill):
    source = scale()
    compiler.hold.touch()
    builder = start(source)
    compiler.wait_for_call()
    waiter = start(source)
    wait_for_line(waiter, "waiting for process")
    builder.send_signal(kill)
    _, err = finish(builder)
    assert ("KeyboardInterrupt" in err) == (kill == signal.SIGINT)
    wait_until(lambda: compiler.count() == 2)  # the waiter builds
    compiler.hold.unlink()
    assert finish(waiter)[0] == "[2.0, -6.0]"
    assert only_build(cache) and not list(cache.glob("*.building-*"))


def test_locks_that_torch_left_do_not_matter(warm, cache, tmp_path):
    source = scale()
    unit = units.unit_of("scale", source, "cpu", {})
    for folder in (
        cache / unit.namespace,
        tmp_path / "extensions" / "scale",
        tmp_path / "extensions" / unit.namespace,
    ):
        folder.mkdir(parents=True)
        (folder / "lock").touch()
    assert finish(start(source, TORCH_EXTENSIONS_DIR=str(tmp_path / "extensions")))[0] == "[2.0, -6.0]"


def test_little_memory_builds_one_at_a_time(compiler, monkeypatch, capfd):
    monkeypatch.setattr(loader_toolchain, "free_memory", lambda: loader_toolchain.MEMORY_PER_BUILD // 2)
    loaded = inline_loader.load_all([{"name": "scale", "source": scale(f" + {i}")} for i in range(2)])
    assert [run(kernels) for kernels in loaded] == [[2.0, -6.0], [3.0, -5.0]]
    assert compiler.calls.read_text().split() == ["begin", "end"] * 2
    assert "scale (cpu), 2 of 2, " in capfd.readouterr().err


def test_processes_share_the_places_to_build(compiler):
    compiler.hold.touch()
    builder = start(scale(), MAX_JOBS="1")
    compiler.wait_for_call()
    other = start(scale(" + 1"), MAX_JOBS="1")
    wait_for_line(other, "waiting for memory or a processor")
    compiler.hold.unlink()
    assert (finish(builder)[0], finish(other)[0]) == ("[2.0, -6.0]", "[3.0, -5.0]")
    assert compiler.calls.read_text().split() == ["begin", "end"] * 2


def test_independent_builds_run_side_by_side(compiler, monkeypatch):
    monkeypatch.setattr(loader_toolchain, "builds_at_once", lambda: 2)
    compiler.hold.touch()
    requests = [{"name": "scale", "source": scale(f" + {i}")} for i in range(2)]
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(1) as pool:
        loading = pool.submit(inline_loader.load_all, requests)
        wait_until(lambda: compiler.count() == 2)  # both compile before either may end
        compiler.hold.unlink()
        assert [run(kernels) for kernels in loading.result()] == [[2.0, -6.0], [3.0, -5.0]]


def test_load_all_raises_the_error():
    with pytest.raises(BuildError, match="nonsense"):
        inline_loader.load_all([{"name": "scale", "source": scale(" + nonsense")}])


def test_jobs_follow_memory_processors_and_max_jobs(monkeypatch):
    monkeypatch.setattr(loader_toolchain, "free_memory", lambda: 5 * loader_toolchain.MEMORY_PER_BUILD)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: range(64))
    assert loader_toolchain.builds_at_once() == 5
    monkeypatch.setenv("MAX_JOBS", "3")
    assert loader_toolchain.builds_at_once() == 3
    assert loader_toolchain.free_memory() > 0


# -------------------------------------------------------------------------------------------------------------- errors


def test_error_at_the_line_of_a_file(kernels_folder):
    path = kernels_folder / "wrong.cpp"
    path.write_text(scale().replace("float(a)", "flaot(a)"))
    with pytest.raises(BuildError) as caught:
        inline_loader.load("wrong")
    error, source = caught.value, path.read_text().splitlines()[3]
    first, line, caret, *rest = str(error).splitlines()
    assert first.startswith(f"{path}:4:{source.index('flaot') + 1}: error: ") and "flaot" in first
    assert line.endswith(source) and line[caret.index("^") :].startswith("flaot")
    assert (
        error.log_path in rest[-1] and Path(error.log_path).read_text() == error.log and "flaot" in error.log
    )
    copy = pickle.loads(pickle.dumps(error))
    assert (str(copy), copy.log, copy.log_path) == (str(error), error.log, error.log_path)


def test_error_in_a_header_and_in_a_library(kernels_folder):
    (kernels_folder / "extra.h").write_text("\n#define EXTRA 1\nint broken = ;\n")
    with pytest.raises(
        BuildError, match=rf"^{kernels_folder}/extra.h:3:14: error: .*\n *3 \| int broken = ;\n"
    ):
        inline_loader.load("scale", source='#include "extra.h"\n' + scale())
    source = "#include <vector>\n#include <mutex>\nstd::vector<std::mutex> v(2, std::mutex());\n" + scale()
    with pytest.raises(BuildError, match=r"^<scale>:3:\d+: error: .*\n *3 \| std::vector"):
        inline_loader.load("scale", source=source)


def test_undefined_symbol_is_named():
    with pytest.raises(BuildError, match="scale .*does not load: .*undefined symbol: .*missing"):
        inline_loader.load("scale", source="float missing(float);\n" + scale(" + missing(1)"))


def first_error_of_nvcc(unit: units.Unit, folder: Path) -> list[str]:
    """Of its CUDA build, where the folder's headers are a library's."""
    unit = dataclasses.replace(unit, device="cuda")
    for name, text in unit.files().items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    command = ["nvcc", "-I.", "-isystem", str(folder), "-c", "kernels.cu", "-o", "k.o"]
    log = subprocess.run(command, cwd=folder, capture_output=True, text=True).stderr
    return loader_report.first_error(log, unit.text_of).splitlines()


@pytest.mark.skipif(not shutil.which("nvcc"), reason="needs nvcc")
def test_error_of_nvcc(tmp_path):
    source = "\n".join(
        ["__global__ void k(float* y) {", "\t y[0] = nonsense;", "}", "EXPORT void f(float* y) {}"]
    )
    text = first_error_of_nvcc(units.unit_of("k", source, "cpu", {}, first_line=2), tmp_path)
    assert text[0].startswith("<k>:3:") and "nonsense" in text[0]
    assert text[1][text[2].index("^") :].startswith("nonsense"), text


@pytest.mark.skipif(not shutil.which("nvcc"), reason="needs nvcc")
def test_error_of_nvcc_in_a_librarys_header_shows_the_line(tmp_path):
    """There it is a macro of the build that does not fit, and is to be seen."""
    (tmp_path / "library.h").write_text("template <int COUNT> struct Vector {};\n")
    source = "#include <library.h>\n__global__ void k(float* y) {}\nEXPORT void f(float* y) {}\n"
    text = first_error_of_nvcc(units.unit_of("k", source, "cpu", {"COUNT": "4"}), tmp_path)
    assert text[0].startswith(f"{tmp_path}/library.h:1: error: ") and "template <int COUNT>" in text[1], text


def test_html_of_an_error():
    error = BuildError("a.cu:1:2: error: expected <int>", "log & more", "/a.log")
    assert "expected &lt;int&gt;" in error._repr_html_() and "log &amp; more" in error._repr_html_()
    assert error._render_traceback_() == ["BuildError: a.cu:1:2: error: expected <int>"]


# ----------------------------------------------------------------------------------------------------------- notebooks

CELL = """%%cpp plus EXTRA={0}
EXPORT void plus(float* y, const float* x, int64_t n) {{
  for (int64_t i = 0; i < n; i++) y[i] = x[i] + EXTRA{1};
}}
"""


def test_notebook_cells():
    """Edited cell: new code without a restart, also under torch.compile and for who holds the old name. Then an error."""
    nbformat, nbclient = pytest.importorskip("nbformat"), pytest.importorskip("nbclient")
    use = "y = torch.empty(2); plus(y, torch.ones(2), 2); z = f(torch.ones(2)); held(y, y, 2); print(y.tolist(), z.tolist())"
    cells = [
        f"import sys; sys.path.insert(0, {str(ROOT)!r}); import torch\n%load_ext inline_loader",
        CELL.format(1, ""),
        textwrap.dedent("""
            held = plus
            @torch.compile(fullgraph=True, backend="aot_eager")
            def f(x):
                y = torch.empty_like(x)
                plus(y, x, 2)
                return y
        """)
        + use,
        CELL.format(10, ""),
        use,
        CELL.format(10, " + nonsense"),
        "%%cpp plus\n\nEXPORT void f(strange y) {}",
    ]
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        nbclient.NotebookClient(notebook, timeout=PATIENCE, allow_errors=True).execute()
    printed = [[out.text for out in cell.outputs if out.get("name") == "stdout"] for cell in notebook.cells]
    texts = ["".join(of_cell) for of_cell in printed]  # and not what PyTorch warns of on some Pythons
    assert texts[2] == "[3.0, 3.0] [2.0, 2.0]\n", notebook.cells[2].outputs
    assert texts[4] == "[21.0, 21.0] [11.0, 11.0]\n", notebook.cells[4].outputs
    progress = notebook.cells[3].outputs[0].data["text/plain"]
    assert re.fullmatch(r"inline_loader: plus \(cpu\), defines changed: built, [\d.]+ s", progress)
    progress, log, error = notebook.cells[5].outputs  # each once
    assert progress.data["text/plain"].endswith(" s") and "nonsense" in log.data["text/html"]
    assert error.ename == "BuildError" and "<plus>:3:" in error.traceback[0]
    (error,) = notebook.cells[6].outputs  # no compiler ran, and the lines are counted as compilers do
    assert "<plus>:3:13: error: expected parameters" in error.traceback[0]


def test_cells_share_parts():
    """A part is a text, and what other cells include, launchers too. Its errors are at its own lines; a cell that is compiled anew has its new
    text."""
    nbformat, nbclient = pytest.importorskip("nbformat"), pytest.importorskip("nbclient")
    part = """%%cpp step --part
static float step(float x) {{ return x + {}; }}
EXPORT void run(float* y, int64_t n) {{ for (int64_t i = 0; i < n; i++) y[i] = step(y[i]); }}"""
    use = '%%cpp steps\n#include "step"\n'
    run = "y = torch.zeros(2); steps(y, 2); print(y.tolist())"
    texts = [
        f"import sys; sys.path.insert(0, {str(ROOT)!r}); import torch\n%load_ext inline_loader",
        part.format(1),
        use,
        f"{run}; print(type(step).__mro__[1], 'x + 1' in step)",
        part.format(2),
        use,
        run,
        part.format("nonsense"),
        use,
        use + "EXPORT void run(float* y) {}",
        "import inline_loader; print(inline_loader.source_of(steps) == step.replace('nonsense', '2'))",
        "%%cuda of_a_gpu --only 99.0\nno source",
        "print(of_a_gpu)",
        "%%cpp steps --parts\nno source",
    ]
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(text) for text in texts])
    nbclient.NotebookClient(notebook, timeout=PATIENCE, allow_errors=True).execute()
    printed = ["".join(out.get("text", "") for out in cell.outputs) for cell in notebook.cells]
    assert printed[3] == "[1.0, 1.0]\n<class 'str'> True\n" and printed[6] == "[2.0, 2.0]\n"
    error = notebook.cells[8].outputs[-1]
    assert error.ename == "BuildError" and "<step>:2:41: error: " in error.traceback[0]
    assert "run is exported a second time" in notebook.cells[9].outputs[-1].traceback[0]
    assert printed[10] == "True\n"
    assert "of_a_gpu is not compiled: it needs a GPU of compute capability 99.0, and " in printed[11]
    assert printed[12] == "None\n"
    assert notebook.cells[13].outputs[-1].evalue == "expected --part, --needs or --only, got --parts"


def test_parts_that_include_one_another():
    parts = {"a": '#pragma once\n#include "b"\nA', "b": '#include "a"\nB'}
    found = loader_source.with_cells('#include "b"\n#include "a"\n#include <c>\n', parts)
    assert [line for line in found.splitlines() if line] == ["A", "B", "#include <c>"]
    with pytest.raises(ValueError, match="expected nothing beside --part"):
        cells.Request.of("f --part A=1")


@pytest.mark.parametrize("has", [None, (7, 5), (8, 0), (9, 0), (12, 0)])
def test_what_a_cell_needs(has, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: has is not None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: has)
    monkeypatch.setattr(loader_toolchain, "nvcc", lambda: "/nvcc")
    lacks = {
        option: cells.Request.of(f"f A=1 {option}").lacking for option in ("", "--needs 8.0", "--only 9.0")
    }
    assert not lacks[""] and bool(lacks["--needs 8.0"]) == (has is None or has < (8, 0))
    assert bool(lacks["--only 9.0"]) == (has != (9, 0))
    got = "there is none here" if has is None else "this one has 7.5"
    assert has not in (None, (7, 5)) or lacks["--needs 8.0"].endswith(f"capability 8.0 or later, and {got}")
    assert cells.Request.of("f A=1 --needs 8.0").defines == {"A": "1"}

    def no_nvcc():
        raise BuildError("there is no nvcc")

    monkeypatch.setattr(loader_toolchain, "nvcc", no_nvcc)
    assert ("there is no nvcc" in cells.Request.of("f --needs 8.0").lacking) == (
        has is not None and has >= (8, 0)
    )


def test_terminal_shows_one_line_that_moves(cache, compiler):
    pty = pytest.importorskip("pty")
    moved, shown = "scale (cpu), first build: compiling, ", bytearray()
    compiler.hold.touch()

    def read(descriptor: int) -> bytes:
        shown.extend(data := os.read(descriptor, 1024))
        if shown.decode().count(moved) >= 2:
            compiler.hold.unlink(missing_ok=True)
        return data

    devnull = os.open(os.devnull, os.O_WRONLY)
    saved = os.dup(1)
    try:
        os.dup2(devnull, 1)
        pty.spawn(loading(scale()), read, lambda descriptor: b"")
    finally:
        os.dup2(saved, 1)
        os.close(devnull)
        os.close(saved)
    text = shown.decode()
    assert text.count(moved) >= 2 and "\r\x1b[K" in text
    assert re.search(r"scale \(cpu\), first build: built, [\d.]+ s\r\n", text)


# ------------------------------------------------------------------------------------------------------------- on a GPU

no_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")


def needs_gpu(test):
    return pytest.mark.gpu(no_gpu(test))


CUDA_SCALE = """// build {}
__global__ void scale_kernel(float* y, const float* x, float a, int64_t n) {{
  int64_t i = blockIdx.x * int64_t(blockDim.x) + threadIdx.x;
  if (i < n) y[i] = x[i] * a{};
}}
EXPORT void scale(float* y, const float* x, double a, int64_t n, cudaStream_t stream) {{
  scale_kernel<<<(n + 255) / 256, {}, 0, stream>>>(y, x, a, n);
}}
"""


def cuda_scale(extra: str = "", threads: int = 256) -> str:
    return CUDA_SCALE.format(next(numbers), extra, threads)


@needs_gpu
@pytest.mark.parametrize("stable", sorted({False, units.STABLE_ABI}))
def test_cuda_builds_and_runs(monkeypatch, stable):
    monkeypatch.setattr(units, "STABLE_ABI", stable)
    kernels = inline_loader.load("scale", source=cuda_scale(), device="cuda")
    x = torch.randn(1000, device="cuda")
    y = torch.empty_like(x)
    kernels(y, x, 2.0, 1000)
    assert torch.equal(y, 2 * x)
    with pytest.raises(RuntimeError, match="scale: x: expected a CUDA tensor"):
        kernels(y, x.cpu(), 2.0, 1000)

    @torch.compile(fullgraph=True, backend="aot_eager")
    def thrice(x):
        y = torch.empty_like(x)
        kernels(y, x, 3.0, 1000)
        return y

    assert torch.equal(thrice(x), 3 * x)


@needs_gpu
def test_cuda_errors():
    with pytest.raises(BuildError, match=r"^<scale>:4:\d+: error: .*nonsense.*\n *4 \|   if .*\n *\| +\^"):
        inline_loader.load("scale", source=cuda_scale(" + nonsense"), device="cuda")
    kernels = inline_loader.load("scale", source=cuda_scale(threads=2048), device="cuda")
    x = torch.ones(10, device="cuda")
    with pytest.raises(RuntimeError, match="scale: the launch failed"):
        kernels(torch.empty_like(x), x, 2.0, 10)
    assert (x + 1).sum().item() == 20  # the next call works


# ------------------------------------------------------------------------------------------------- old and new releases


@pytest.mark.skipif(
    not os.environ.get("TEST_TORCH_RELEASES"), reason="opt in: TEST_TORCH_RELEASES='torch==2.8.0 torch' (GBs)"
)
def test_oldest_and_newest_torch(tmp_path):
    for index, release in enumerate(os.environ["TEST_TORCH_RELEASES"].split()):
        folder = tmp_path / str(index)
        subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
        python = str(folder / "bin" / "python")
        packages = [release, "ninja", "filelock", "setuptools", "numpy", "pytest", "hypothesis"]
        subprocess.run([python, "-m", "pip", "install", "--quiet", *packages], check=True)
        environment = {key: value for key, value in os.environ.items() if key != "TEST_TORCH_RELEASES"}
        environment["PYTHONPATH"] = str(ROOT)
        subprocess.run([python, "-m", "pytest", "-q", "-x", __file__], check=True, env=environment)
