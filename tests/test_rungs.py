"""The CUDA kernels that lessons have in their cells, run by tests/emulation on the CPU, against float64; and nvcc compiles them.

A cell's kernels are what it gives to `compiled`, or the cell to paste has as CUDA: lessons whose kernels have one launcher, `forward`.
"""

import ast
import json
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from torch.nn.functional import conv2d, group_norm, max_pool2d

import inline_loader
import test_emulated
from test_emulated import folder  # noqa: F401

ROOT = Path(__file__).resolve().parent.parent
MIN_ADD, POOL = "31_conv2d_min_add_multiply", "85_conv2d_groupnorm_scale_maxpool_clamp"
PROLOGUE = '#include <stdint.h>\n#include <math.h>\n#define EXPORT extern "C"\n'

pytestmark = test_emulated.pytestmark


def texts(cell: str, known: dict[str, str]) -> None:
    """Adds the strings that a cell assigns to capitals."""
    for node in ast.parse(cell).body:
        if (
            isinstance(node, ast.Assign)
            and isinstance(name := node.targets[0], ast.Name)
            and name.id.isupper()
        ):
            known[name.id] = eval(ast.unparse(node.value), dict(known))


def rungs(lesson: str) -> dict[str, str]:
    """The CUDA sources of a lesson by their cells' ids."""
    cells = json.loads((ROOT / "notebooks" / f"{lesson}.ipynb").read_text(encoding="utf-8"))["cells"]
    found, known = {}, {}
    for cell in cells:
        source = "".join(cell["source"])
        if cell["cell_type"] == "code" and "CUDA = r" in source:
            texts(source, known)
            found[cell["id"]] = known["CUDA"]
    return found


RUNGS = [(lesson, cell, source) for lesson in (MIN_ADD, POOL) for cell, source in rungs(lesson).items()]
every_rung = pytest.mark.parametrize("lesson, cell, source", RUNGS, ids=[f"{r[0][:2]}-{r[1]}" for r in RUNGS])


def test_there_are_rungs():
    assert [cell for lesson, cell, _ in RUNGS if lesson == MIN_ADD] == [
        "paste",
        "reuse-kernel",
        "shared-kernel",
        "tensor-kernel",
    ]
    assert [cell for lesson, cell, _ in RUNGS if lesson == POOL] == [
        "paste",
        "reuse-kernel",
        "sign-kernel",
        "shared-kernel",
        "tensor-kernel",
    ]


# Channels, filters and extents that fill no tile, and the last row and column of tiles.
SIZES = [(2, 8, 24, 13, 41, 8), (1, 3, 10, 7, 20, 5), (1, 17, 72, 12, 70, 8)]


@every_rung
@pytest.mark.parametrize("N, C_in, C, H, W, G", SIZES)
def test_a_rung_is_right(lesson, cell, source, N, C_in, C, H, W, G, folder):
    kernel = test_emulated.Emulated(source, test_emulated.library_of(source, 900, {}, (), folder)).forward
    torch.manual_seed(0)
    x, w, b = torch.randn(N, C_in, H, W), 0.1 * torch.randn(C, C_in, 3, 3), torch.randn(C)
    bias, gamma, beta, scale = torch.randn(4, C)
    v = conv2d(x.double(), w.double(), b.double())
    if lesson == MIN_ADD:
        y = torch.full(v.shape, torch.nan)
        kernel(y, x, w, b, bias, 0.5, 2.0, N, C_in, C, H, W)
        exact = (v.clamp(max=0.5) + bias.double()[:, None, None]) * 2
    else:
        exact = max_pool2d(
            group_norm(v, G, gamma.double(), beta.double()) * scale.double()[:, None, None], 4
        ).clamp(-1, 1)
        y, between = torch.full(exact.shape, torch.nan), torch.full((v.numel() + 2048 * N * C,), torch.nan)
        kernel(y, between, x, w, b, gamma, beta, scale, 1e-5, -1.0, 1.0, N, C_in, C, G, H, W)
    one_product = lesson == MIN_ADD and cell == "tensor-kernel"  # of float16, as exact as TF32
    assert (y - exact).norm() < (4e-4 if one_product else 4e-7) * exact.norm()


@every_rung
def test_a_rung_compiles(lesson, cell, source, tmp_path):
    nvcc = shutil.which("nvcc")
    if not nvcc:
        pytest.skip("there is no nvcc")
    architecture = "80" if cell == "tensor-kernel" else "75"
    (tmp_path / "rung.cu").write_text(PROLOGUE + source)
    command = [
        nvcc,
        "-std=c++17",
        f"-arch=sm_{architecture}",
        "-I",
        str(inline_loader.KERNELS),
        "-cubin",
        "-o",
        "rung.cubin",
        "rung.cu",
    ]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
