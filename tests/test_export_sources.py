"""The exported cell holds the sources as they are, runs anywhere, and is what the notebooks hold."""

import ast
import json
import os
import subprocess
import sys

import pytest

import export_sources as export

TransformerManager = pytest.importorskip("IPython.core.inputtransformer2").TransformerManager

NAMES = list(export.models.PROBLEMS)


def files_of(cell: str) -> dict[str, str]:
    """What the assignments FILES[name] = text in a cell hold."""
    statements = [node for node in ast.parse(cell).body if isinstance(node, ast.Assign)]
    pairs = [node for node in statements if isinstance(node.targets[0], ast.Subscript)]
    return {node.targets[0].slice.value: ast.literal_eval(node.value) for node in pairs}


def run(folder, *texts: str) -> str:
    """What a fresh Python prints for `texts`, in `folder` and without the repository on its path."""
    folder.mkdir(exist_ok=True)
    script = folder / "cell.py"
    script.write_text("\n\n".join(texts), encoding="utf-8")
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    done = subprocess.run(
        [sys.executable, script.name], cwd=folder, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("names", [[name] for name in NAMES] + [NAMES], ids=lambda names: "+".join(names))
def test_cell_holds_the_sources(names):
    files = files_of(export.cell(names))
    for name, text in files.items():
        path = export.FOLDER / ("notebooks" if name == "walkthrough.py" else "") / name
        assert text == path.read_text(encoding="utf-8"), name
    assert {"inline_loader.py", "operators.py", "models.py", "compare.py", "kernels/host.h"} <= files.keys()
    assert {"problems/__init__.py", *[f"problems/{name}.py" for name in names]} <= files.keys()
    assert {f"kernels/{name}{suffix}" for name in names for suffix in (".cu", ".cpp")} <= files.keys()
    for other in set(NAMES) - set(names):
        assert not [name for name in files if other in name]


def test_cell_holds_every_header():
    files = files_of(export.cell(NAMES))
    for path in (export.FOLDER / "kernels").iterdir():
        assert f"kernels/{path.name}" in files, "a file that no kernel includes"


def test_cell_is_plain_python_for_ipython():
    cell = export.cell(NAMES) + "\n"
    assert TransformerManager().transform_cell(cell) == cell


@pytest.mark.parametrize(
    "text",
    [
        "",
        "x",
        "'''",
        '"""',
        "''' and \"\"\"",
        "ends with \\",
        "ends with '",
        '\\"""',
        "\\N{x} \\x \\u",
        "%%cpp\n!ls\n?x",
        "tab\t\r\n\0 ⅋",
    ],
)
def test_literal_takes_any_text(text):
    assert ast.literal_eval(export.literal(text)) == text


def test_unknown_name():
    with pytest.raises(KeyError, match="expected names out of .*, got nonsense"):
        export.cell(["nonsense"])
    command = [sys.executable, "export.py", "nonsense"]
    done = subprocess.run(command, cwd=export.FOLDER, capture_output=True, text=True)
    assert done.returncode == 1 and done.stderr.startswith("export.py: expected one of")


USE = """
model = models.get_model("{name}")
problem = models.PROBLEMS["{name}"]
[x] = problem.get_inputs(batch_size=2)
print(model.plan(x).variant, tuple(model(x[..., :20, :20]).shape))
assert models.__file__.startswith(str(SOURCES)) and str(inline_loader.KERNELS).startswith(str(SOURCES))
"""


def test_cells_run_in_a_fresh_process_again_and_side_by_side(tmp_path):
    """The same cell twice, then another problem's, then all, in one process, and the user's own modules of the same names."""
    first, second = NAMES[0], NAMES[3]
    mine = "import sys, types\nsys.modules['models'] = types.ModuleType('models')"
    uses = [export.cell([first]), USE.format(name=first)] * 2 + [
        export.cell([second]),
        USE.format(name=second),
        export.cell(NAMES),
        USE.format(name=first),
    ]
    one = "epilogue (2, 128, 18, 18)"
    lines = run(tmp_path / "empty", mine, *uses).splitlines()
    assert lines == [one, one, "epilogue (2, 64, 4, 4)", one]


def test_unpack(tmp_path, monkeypatch):
    monkeypatch.setenv("INLINE_LOADER_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(sys, "path", list(sys.path))
    files = {"a_module.py": "x = 1\n", "kernels/k.h": "// ⅋\r\n"}
    folder = export.unpack(files)
    assert {
        str(path.relative_to(folder)): path.read_bytes().decode() for path in folder.rglob("*.*")
    } == files
    assert (tmp_path / "cache").stat().st_mode & 0o077 == 0, "nobody else may write what is imported"
    assert sys.path[0] == str(folder)
    (folder / "a_module.py").write_text("spoilt")
    assert export.unpack(files) == folder
    assert (folder / "a_module.py").read_text() == "x = 1\n" and sys.path.count(str(folder)) == 1
    assert export.unpack({**files, "a_module.py": "x = 2\n"}) != folder


NOTEBOOKS = sorted(export.NOTEBOOKS.glob("*.ipynb"))


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_is_up_to_date_and_without_outputs(path):
    assert path.read_text(encoding="utf-8") == export.refreshed(path), "run: python export.py --refresh"
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    code = [cell for cell in cells if cell["cell_type"] == "code"]
    assert code[0]["id"] == export.CELL_ID and code[0]["metadata"]["jupyter"]["source_hidden"]
    assert all(cell["outputs"] == [] for cell in code)
