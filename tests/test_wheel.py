"""The wheel, installed into an environment without this repository: the loader works in any notebook, and a pair of models is compared."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

from loading import ROOT, SCALE

PROGRAM = """
from IPython.core.interactiveshell import InteractiveShell
import sys, torch
shell = InteractiveShell.instance()

def run(cell):
    shell.run_cell(cell).raise_error()

run("%load_ext inline_loader")
run(CELL)
run("import torch; x = torch.tensor([1.0, -3.0]); y = torch.empty(2); scale(y, x, 2.0, 2); print(y.tolist())")

import inline_kernels, inline_loader
def forward(x: torch.Tensor) -> torch.Tensor:
    y = torch.empty_like(x)
    shell.user_ns["scale"](y, x, 2.0, x.numel())
    return y
double = inline_kernels.declare("double", forward, shapes=torch.empty_like, backward=lambda dy, x, *, needs: [2 * dy])
x = torch.ones(2, requires_grad=True)
double(x).sum().backward()
print(x.grad.tolist())
print(inline_loader.__file__)

import importlib.util, torch
from inline_kernels import compare_pair, table

assert not any(importlib.util.find_spec(name) for name in ("compare", "checks", "honesty", "charts", "models", "problems"))
class Twice(torch.nn.Module):
    def __init__(self, factor):
        super().__init__()
        self.weight, self.factor = torch.nn.Parameter(torch.rand(8)), factor
    def forward(self, x):
        return x * self.weight * self.factor
inputs = lambda: [torch.rand(4, 8)]
for factor in (2.0, 2.01):
    rows = compare_pair(Twice(2.0), Twice(factor), inputs, phases=["train_dx"], variants=["candidate"], name="twice")
    print([row["ok"] for row in rows], "twice" in table(rows))
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    source.mkdir()
    for path in [*ROOT.glob("*.py"), ROOT / "pyproject.toml", ROOT / "LICENSE"]:
        shutil.copy(path, source)
    for folder_of in ("kernels", "inline_kernels"):
        shutil.copytree(ROOT / folder_of, source / folder_of, ignore=shutil.ignore_patterns("__pycache__"))
    command = [
        "wheel",
        "--quiet",
        "--no-index",
        "--no-deps",
        "--no-build-isolation",
        "--wheel-dir",
        str(folder),
    ]
    subprocess.run([sys.executable, "-m", "pip", *command, str(source)], check=True)
    (found,) = folder.glob("*.whl")
    return found


def test_the_wheel_holds_the_package_with_its_kernels_and_no_model(wheel):
    names = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    package = ROOT / "inline_kernels"
    modules = {str(path.relative_to(ROOT)) for path in package.rglob("*.py")} | {"inline_loader.py"}
    modules = {name for name in modules if not name.startswith("inline_kernels/export/")}
    assert names == modules | {
        f"inline_kernels/kernels/{path.relative_to(ROOT / 'kernels')}"
        for path in (ROOT / "kernels").rglob("[!.]*.*")
    }


def test_installed_alone_it_works(wheel, tmp_path):
    """In a notebook and as a command, in an environment with this one's packages, but with nothing of the repository."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(tmp_path / "venv")], check=True)
    python = tmp_path / "venv" / "bin" / "python"
    site = Path(sysconfig.get_path("purelib", vars={"base": str(tmp_path / "venv")}))
    (site / "torch.pth").write_text(sysconfig.get_path("purelib") + "\n")
    install = ["--python", str(python), "install", "--quiet", "--no-index", "--no-deps", str(wheel)]
    subprocess.run([sys.executable, "-m", "pip", *install], check=True)
    environment = {
        key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "VIRTUAL_ENV")
    }
    environment |= {
        "HOME": str(tmp_path),
        "INLINE_LOADER_CACHE": str(tmp_path / "cache"),
        "IPYTHONDIR": str(tmp_path),
    }
    program = f"CELL = {'%%cpp scale A=1' + chr(10) + SCALE.format(0, '')!r}\n{PROGRAM}"
    options = {"capture_output": True, "text": True, "env": environment, "cwd": tmp_path}
    result = subprocess.run([python, "-c", program], **options)
    told = ["[2.0, -6.0]", "[2.0, 2.0]", str(site / "inline_loader.py"), "[True] True", "[False] True"]
    assert result.stdout.splitlines() == told, result.stderr
    result = subprocess.run([python, "-m", "inline_loader", "doctor"], **options)
    assert result.returncode == 0 and "FAIL" not in result.stdout, result
