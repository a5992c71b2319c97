"""Every notebook runs from top to bottom on a CPU and shows what it promises; what is committed keeps the rules; a copy runs alone."""

import ast
import importlib
import io
import json
import os
import re
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

import models

nbformat, nbclient = pytest.importorskip("nbformat"), pytest.importorskip("nbclient")
local_provisioner = pytest.importorskip("jupyter_client.provisioning.local_provisioner")

FOLDER = Path(models.__file__).resolve().parent / "notebooks"
sys.path.append(str(FOLDER))

import alone  # noqa: E402
import execute  # noqa: E402

NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))
OURS = [each for each in models.PROBLEMS.values() if each.Model.__module__ == "models"]
LESSONS = [FOLDER / f"{problem.number}_{problem.name}.ipynb" for problem in OURS]
LINES = 120  # of a cell
each_notebook = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
ALONE = FOLDER / "own_kernel.ipynb"  # runs as a copy without the repository
each_lesson = pytest.mark.parametrize("path", LESSONS, ids=lambda path: path.stem)


def cells_of(path: Path) -> list:
    return nbformat.read(path, as_version=4).cells


# Behind the cell that finds the sources: as few rounds, repeats and bytes as can be, and images of half the sides. No time is looked at here, and
# what the judge finds in many is looked at in test_checks.py and test_judge.py.
FEW_ROUNDS = """import dataclasses, models, walkthrough
walkthrough.rate = lambda device, size, rate=walkthrough.rate: rate(device, size / 64)
for name, each in models.PROBLEMS.items():
    shape = (*each.input_shape[:-2], *(extent // 2 for extent in each.input_shape[-2:]))
    models.PROBLEMS[name] = dataclasses.replace(each, input_shape=shape)
from inline_kernels.bench import honesty, timing
timing._timings = lambda calls, measure, seconds, timings=timing._timings: timings(calls, measure, 0.0)
timing.IN_A_ROW, timing.JUDGED, timing.JUDGED_AT_LEAST, honesty.REPEATS = 1e-9, 1, 1, 2
"""
# Sizes that a notebook says itself, for a CPU, and smaller ones.
SMALLER = {
    "else (1024, 1024)": "else (64, 1024)",
    "else 4, 8, 128, 128)": "else 1, 8, 128, 128)",
    "else (4, 32, 32)": "else (2, 32, 32)",
    "else 2**24 * 4": "else 2**20 * 4",
}

# Kernels are forks of a process that has imported what every notebook does, which takes longer than half of their cells.
KERNELS = """
import json, os, sys
root, command = sys.path[:], sys.stdin
sys.path[:0] = sys.argv[1:]
os.environ["MPLBACKEND"] = "module://matplotlib_inline.backend_inline"  # as a kernel has it
from ipykernel import kernelapp
import matplotlib.figure, compare, walkthrough
import torch.utils.cpp_extension, torch._decomp.decompositions_for_jvp
sys.path[:] = root
for line in command:
    arguments, folder, environment = json.loads(line)
    if child := os.fork():
        os.setpgid(child, child)
        print(child, flush=True)
        continue
    os.setpgid(0, 0)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0), os.dup2(2, 1)
    os.chdir(folder)
    os.environ.clear(), os.environ.update(environment, JPY_PARENT_PID=str(os.getppid()))
    kernelapp.launch_new_instance(arguments)
    os._exit(0)
"""


class Kernel:
    """A fork, as what starts a kernel knows a process."""

    stdin = stdout = stderr = None

    def __init__(self, server: subprocess.Popen, arguments: list[str], folder: str):
        server.stdin.write(json.dumps([arguments, folder, dict(os.environ)]) + "\n")
        server.stdin.flush()
        self.pid = int(server.stdout.readline())

    def poll(self) -> int | None:
        status = Path(f"/proc/{self.pid}/stat")
        return None if status.exists() and status.read_text().rpartition(")")[2].split()[0] != "Z" else 0

    wait = poll


@pytest.fixture(scope="module")
def server(on_a_cpu):
    command = [sys.executable, "-c", KERNELS, str(FOLDER.parent), str(FOLDER)]
    pipes = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True)
    with subprocess.Popen(command, **pipes) as server:
        yield server
        server.stdin.close()


@pytest.fixture
def forked(server, monkeypatch):
    """Kernels are forks."""
    launch = lambda command, cwd, **_: Kernel(server, command[3:], cwd)  # noqa: E731
    monkeypatch.setattr(local_provisioner, "launch_kernel", launch)


def run(path: Path, folder: Path) -> list:
    """The notebook's code cells after a run in `folder`."""
    notebook = nbformat.read(path, as_version=4)
    for cell in notebook.cells:
        for size, smaller in SMALLER.items():
            cell.source = cell.source.replace(size, smaller)
    notebook.cells.insert(2, nbformat.v4.new_code_cell(FEW_ROUNDS))
    resources = {"metadata": {"path": str(folder)}}
    nbclient.NotebookClient(notebook, timeout=600, kernel_name="python3", resources=resources).execute()
    del notebook.cells[2]
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def text_of(cells) -> str:
    """All text that the cells printed or displayed."""
    outputs = [output for cell in cells for output in cell.outputs]
    return "\n".join(
        [output.get("text", "") + output.get("data", {}).get("text/plain", "") for output in outputs]
    )


def pictures(cells) -> int:
    return sum("image/png" in output.get("data", {}) for cell in cells for output in cell.outputs)


@pytest.fixture(scope="module", autouse=True)
def on_a_cpu():
    """Few samples, and no repository but what a notebook finds. torch.compile, a peer here, compiles in test_compare.py."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {
            "CUDA_VISIBLE_DEVICES": "",
            "TORCHDYNAMO_DISABLE": "1",
            "LESSON_BATCH": "1",
        }.items():
            patch.setenv(name, value)
        patch.delenv("PYTHONPATH", raising=False)
        yield


# ------------------------------------------------------------------------------------------------------------ they run


def optimise(monkeypatch) -> None:
    """Kernels are compiled as users have them."""
    if os.environ["CXX"].endswith("quick_g++"):
        monkeypatch.delenv("CXX")


PROMISES = {  # what must be in the text of a run, and how many pictures there are at least
    "00_quickstart": (
        ["conv: load: ", "epilogue: ", "✓ epilogue: ", "step 3: loss", "[3.0, 3.0, 4.0, 4.0, 5.0]"],
        5,
    ),
    "01_first_kernel": (["residual and RMSNorm: train_dx", "fused: ", "no time: gradient of"], 2),
    "fuse": (["second: load: ", "edited, with the gradient of its lines", "fused: ", "second has hooks"], 2),
    "own_kernel": (["✓ (65, 33)", "SUCCESS", "[-1.0, 0.0, 6.0]", "nonsense", "✓ (64, 3, 11)"], 3),
    "sizes": (["op/byte", "32 channels, 64×64: conv: load: "], 2),
    "training": (["times as fast", "✓ epilogue: ", "bit for bit the same"], 3),
    "the_constant_output": (["allclose: True", "5 of 5 draws", "samples with NaN: ", "✓ epilogue: "], 3),
}


def assert_shows_what_it_promises(path, cells):
    text, (promises, count) = text_of(cells), PROMISES.get(path.stem, (["✓ epilogue: ", " × eager; "], 4))
    assert "CPU: " in text, "the environment in a line"
    assert [promise for promise in promises if promise not in text] == []
    assert pictures(cells) >= count and pictures(cells[:3]) >= 1, "the first on the first screen"


@pytest.mark.parametrize("path", [each for each in NOTEBOOKS if each != ALONE], ids=lambda path: path.stem)
def test_runs(path, forked, monkeypatch):
    if path == LESSONS[0]:  # the others' kernels are hardly optimised: that takes half of their time
        optimise(monkeypatch)
    before = sorted(FOLDER.iterdir())
    assert_shows_what_it_promises(path, run(path, FOLDER))
    assert [each for each in sorted(FOLDER.iterdir()) if each not in before and each.suffix] == []


def test_a_copy_runs_alone(tmp_path, monkeypatch):
    """In an empty folder; its first cell holds the sources, and opens with what Colab needs."""
    optimise(monkeypatch)
    monkeypatch.setenv("INLINE_LOADER_CACHE", str(tmp_path / "cache"))
    copy = tmp_path / "empty" / ALONE.name
    copy.parent.mkdir()
    copy.write_text(alone.copy(FOLDER / copy.name, alone.cell(alone.archive())), encoding="utf-8")
    first = cells_of(copy)[0]
    assert first.id == alone.CELL_ID and "Colab" in first.source.splitlines()[1] and "T4" in first.source
    [packages] = re.findall(r"pip install ((?:\"[^\"]+\" ?)+)$", first.source, flags=re.M)
    assert '"torch>=2.8"' in packages and "#" not in packages
    cells = run(copy, copy.parent)
    assert_shows_what_it_promises(copy, cells)
    assert list(copy.parent.iterdir()) == [copy]


def test_copies_hold_what_they_need():
    """Every module and kernel of the repository, each record that a cell reads, and the same each time; nothing of the repository is searched
    for."""
    archive = alone.archive()
    assert archive == alone.archive()
    held = set(tarfile.open(fileobj=io.BytesIO(archive)).getnames())
    files = {
        str(each.relative_to(alone.ROOT)) for pattern in alone.PARTS for each in alone.ROOT.glob(pattern)
    }
    assert (
        {
            "compare.py",
            "kernels/host/host.h",
            "kernels/grad/selected/merge.cuh",
            "kernels/composed.json",
            "notebooks/walkthrough.py",
        }
        <= files
        <= held
    )
    for path in NOTEBOOKS:
        assert "make notebooks-alone" not in alone.copy(path, "x")
        read = re.findall(
            r'root / "([\w./-]+\.json)"',
            "\n".join(cell.source for cell in cells_of(path) if cell.cell_type == "code"),
        )
        assert {*read} <= held, "what a cell reads"


# ---------------------------------------------------------------------------------------------------- what is committed


def test_there_is_a_lesson_for_every_problem_of_this_repository():
    assert set(LESSONS) <= set(NOTEBOOKS) and len(NOTEBOOKS) == len(OURS) + len(PROMISES)


@each_notebook
def test_names_of_modules_exist(path):
    """Also in cells, or lines, that run on a GPU alone."""
    for cell in cells_of(path):
        for name, attribute in re.findall(
            r"\b(compare|inline_loader|models|walkthrough)\.([a-z]\w*)\b(?!/)", cell.source
        ):
            if cell.cell_type == "code" and attribute != "py":
                assert hasattr(importlib.import_module(name), attribute), f"{name}.{attribute} in {cell.id}"


@each_notebook
def test_rules(path):
    content, cells = json.loads(path.read_text(encoding="utf-8")), cells_of(path)
    ids = [cell["id"] for cell in content["cells"]]
    assert len(set(ids)) == len(ids) and ids[0] == "title"
    assert path.stat().st_size <= execute.LARGEST
    code = [cell for cell in cells if cell.cell_type == "code"]
    assert code[0].id == alone.CELL_ID and code[0].source == SOURCES, "imports from the repository, no copies"
    assert [cell.id for cell in code if len(cell.source.splitlines()) > LINES] == []
    assert not any(execute.RUNGS in output.get("data", {}) for cell in code for output in cell.outputs)


SOURCES = nbformat.read(FOLDER / "00_quickstart.ipynb", as_version=4).cells[1].source


@each_notebook
def test_outputs_are_those_of_a_gpu(path):
    notebook = nbformat.read(path, as_version=4)
    stamp = notebook.metadata["stamp"]
    assert stamp["gpu"] and stamp["driver"] and stamp["torch"] and stamp["commit"]
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert [cell.id for cell in code if cell.execution_count is None] == [], "it ran to the end"
    outputs = [output for cell in code for output in cell.outputs]
    assert stamp["gpu"] in text_of(code)
    assert outputs and not [output for output in outputs if output.output_type == "error"]


# ----------------------------------------------------------------------------------------------------- the first rung


PASTED = """
import torch
torch.manual_seed(0)
reference, model = Model(*get_init_inputs()).eval(), ModelNew(*get_init_inputs()).eval()
model.load_state_dict(reference.state_dict())
x = [t[:2] for t in get_inputs()]
torch.testing.assert_close(model(*x), reference(*x), rtol=1e-4, atol=1e-4)
print("as the reference")
"""


@each_lesson
def test_first_rung_can_be_pasted(path, tmp_path):
    """The cell `paste`, and `paste-model` where there are two, need nothing of ours: Model, a plain kernel, ModelNew, and KernelBench's two
    functions. test_runs runs each in its notebook; here one runs by itself, in an empty folder."""
    source = "\n\n".join(cell.source for cell in cells_of(path) if cell.id in ("paste", "paste-model"))
    nodes = [*ast.walk(ast.parse(source))]
    kernels = [node.value for node in nodes if isinstance(node, ast.Constant)]
    kernels = [text for text in kernels if isinstance(text, str) and text.count("\n") > 10]
    assert kernels and max(text.count("\n") for text in kernels) <= 120
    imported = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    imported |= {node.module for node in nodes if isinstance(node, ast.ImportFrom)}
    assert {name.split(".")[0] for name in imported} <= {"torch", *sys.stdlib_module_names}
    if path != LESSONS[0]:
        return
    (tmp_path / "cell.py").write_text(source + PASTED, encoding="utf-8")
    done = subprocess.run([sys.executable, "cell.py"], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout.endswith("as the reference\n"), done.stderr
