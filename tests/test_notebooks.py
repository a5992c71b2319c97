"""Every notebook runs from top to bottom on a CPU, its file alone in an empty folder, and shows what it promises."""

import re
import shutil

import pytest

import export_sources as export

nbformat, nbclient = pytest.importorskip("nbformat"), pytest.importorskip("nbclient")

NOTEBOOKS = sorted(export.NOTEBOOKS.glob("*.ipynb"))
PROBLEMS = export.models.PROBLEMS.values()
WALKTHROUGHS = [export.NOTEBOOKS / f"{problem.number}_{problem.name}.ipynb" for problem in PROBLEMS]


@pytest.fixture
def run(tmp_path, monkeypatch):
    """run(path) gives the notebook's code cells after a run in an empty folder, without the repository on the path."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.delenv("PYTHONPATH", raising=False)

    def run(path):
        alone = tmp_path / "alone"
        alone.mkdir()
        shutil.copy(path, alone)
        notebook = nbformat.read(alone / path.name, as_version=4)
        nbclient.NotebookClient(
            notebook, timeout=600, kernel_name="python3", resources={"metadata": {"path": str(alone)}}
        ).execute()
        assert [entry.name for entry in alone.iterdir()] == [path.name], (
            "a notebook leaves no files beside it"
        )
        return [cell for cell in notebook.cells if cell.cell_type == "code"]

    return run


def shown(cells) -> str:
    """All text that the cells printed or displayed."""
    outputs = [output for cell in cells for output in cell.outputs]
    assert not [output for output in outputs if output.output_type == "error"]
    texts = [output.get("text", "") for output in outputs]
    texts += [
        output.data.get(kind, "")
        for output in outputs
        if "data" in output
        for kind in ("text/markdown", "text/html")
    ]
    return "\n".join(texts)


def tables(text: str) -> int:
    """How many of compare.py's tables there are, by their heads."""
    return len(re.findall(r"^  variant +ms +× eager", text, re.M))


def plots(cells) -> int:
    return sum("image/png" in output.get("data", {}) for cell in cells for output in cell.outputs)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_runs_alone(path, run):
    cells = run(path)
    text = shown(cells)
    assert "CPU: " in text, "the environment in a line"
    if path.stem == "00_quickstart":
        assert text.count(", train: passes") >= 4 and tables(text) == 4 and plots(cells) == 1
    if path in WALKTHROUGHS:
        problem = export.models.PROBLEMS[export.problems_of(nbformat.read(path, as_version=4).cells)[0]]
        assert f"<p>kernels/{problem.name}.cpp</p>" in text, "the kernel's source"
        assert "predicted speed-up: " in text and "| measured speed-up |" in text
        assert "epilogue, forward: passes" in text and "epilogue, train_dx: passes" in text
        assert tables(text) == 2 + len(problem.timed_cases), (
            "forward, training, and training where it matters"
        )
        assert plots(cells) == 2, "forward and training"


@pytest.mark.parametrize("path", WALKTHROUGHS, ids=lambda path: path.stem)
def test_what_it_shows_of_a_kernel_exists_for_cpu_and_gpu(path):
    cells = nbformat.read(path, as_version=4).cells
    source, [name] = "\n".join(cell.source for cell in cells), export.problems_of(cells)
    [call] = re.findall(r'walkthrough\.show\(problem\.name, device, cpp="(.+?)", cuda="(.+?)"\)', source)
    fused = re.findall(r'walkthrough\.show\(f"{problem\.name}_fused", "cuda", cpp="", cuda="(.+?)"\)', source)
    for suffix, start in [*zip((".cpp", ".cu"), call), *(("_fused.cu", start) for start in fused)]:
        assert start in (export.FOLDER / "kernels" / f"{name}{suffix}").read_text(encoding="utf-8")


def test_there_is_a_walkthrough_for_every_problem():
    assert set(WALKTHROUGHS) <= set(NOTEBOOKS)
