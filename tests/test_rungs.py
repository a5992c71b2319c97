"""The CUDA kernels that lessons have in their cells, run by tests/emulation on the CPU, against float64; and nvcc compiles them.

They are the %%cuda cells, and what the cell to paste has as CUDA.
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
from inline_kernels.loader.cells import Request
from inline_kernels.loader.source import with_cells
from test_emulated import folder  # noqa: F401

ROOT = Path(__file__).resolve().parent.parent
MIN_ADD, POOL = "31_conv2d_min_add_multiply", "85_conv2d_groupnorm_scale_maxpool_clamp"
PROLOGUE = '#include <stdint.h>\n#include <math.h>\n#define EXPORT extern "C"\n'

pytestmark = test_emulated.pytestmark


def cells_of(lesson: str) -> dict[str, str]:
    """The code cells of a lesson by their ids."""
    cells = json.loads((ROOT / "notebooks" / f"{lesson}.ipynb").read_text(encoding="utf-8"))["cells"]
    return {cell["id"]: "".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"}


def compiled_cells(lesson: str) -> dict[str, tuple[str, Request]]:
    """The sources of a lesson's %%cuda cells by these cells' ids, with the parts that they include, and what their first lines ask for."""
    found, parts = {}, {}
    for cell, source in cells_of(lesson).items():
        first, _, text = source.partition("\n")
        magic, _, line = first.partition(" ")
        if magic not in ("%%cuda", "%%cpp"):
            continue
        request = Request.of(line)
        if request.part:
            parts[request.name] = text
        elif magic == "%%cuda":
            found[cell] = with_cells(text, parts), request
    return found


def pasted(lesson: str) -> str:
    """What the cell to paste has as CUDA."""
    for node in ast.parse(cells_of(lesson)["paste"]).body:
        if isinstance(node, ast.Assign) and node.targets[0].id == "CUDA":
            return node.value.value
    raise AssertionError("no CUDA in the cell to paste")


def rungs(lesson: str) -> dict[str, str]:
    """The CUDA sources of a lesson by their cells' ids."""
    return {"paste": pasted(lesson)} | {cell: text for cell, (text, _) in compiled_cells(lesson).items()}


BY_ROWS = [
    "background-kernel",
    "wgmma-kernel",
    "sectors-kernel",
    "between-kernel",
]  # of compute capability 9.0
RUNGS = [(lesson, cell, source) for lesson in (MIN_ADD, POOL) for cell, source in rungs(lesson).items()]
every_rung = pytest.mark.parametrize("lesson, cell, source", RUNGS, ids=[f"{r[0][:2]}-{r[1]}" for r in RUNGS])


def test_there_are_rungs():
    assert [cell for lesson, cell, _ in RUNGS if lesson == MIN_ADD] == [
        "paste",
        "reuse-kernel",
        "shared-kernel",
        "tensor-kernel",
        *BY_ROWS[:3],
    ]
    assert [cell for lesson, cell, _ in RUNGS if lesson == POOL] == [
        "paste",
        "reuse-kernel",
        "sign-kernel",
        "shared-kernel",
        "tensor-kernel",
        *BY_ROWS[:2],
        BY_ROWS[3],
    ]
    assert len({source for _, _, source in RUNGS}) == len(RUNGS), "each is another kernel"


# Channels, filters and extents that fill no tile, and the last row and column of tiles. What goes by rows has several strips and ranges of
# columns only in the last; and of the pool's there are up to 8 channels.
SIZES = [(2, 8, 24, 13, 41, 8), (1, 3, 10, 7, 20, 5), (1, 17, 72, 12, 70, 8), (1, 7, 72, 31, 140, 8)]


@every_rung
@pytest.mark.parametrize("N, C_in, C, H, W, G", SIZES)
def test_a_rung_is_right(lesson, cell, source, N, C_in, C, H, W, G, folder):
    if (lesson == POOL and cell in BY_ROWS and C_in > 8) or (cell not in BY_ROWS and W > 128):
        pytest.skip("not of this one")
    library = test_emulated.library_of(source, 900, {}, (), folder)
    library.emulation_device(3, 227 << 10)
    kernel = test_emulated.Emulated(source, library).forward
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
    one_product = lesson == MIN_ADD and cell in ("tensor-kernel", *BY_ROWS)  # of float16, as exact as TF32
    assert (y - exact).norm() < (4e-4 if one_product else 4e-7) * exact.norm()


FIRST, OWN, LEAKY = [
    compiled_cells(lesson)[cell][0]
    for lesson, cell in (
        ("01_first_kernel", "kernel-gpu"),
        ("own_kernel", "kernel-gpu"),
        ("own_kernel", "leaky-gpu"),
    )
]


def emulated(source: str, folder: Path):
    return test_emulated.Emulated(source, test_emulated.library_of(source, 900, {}, (), folder))


def empty(*shape: int) -> torch.Tensor:
    return torch.full(shape, torch.nan)


@pytest.mark.parametrize("rows, n, pieces", [(5, 4, 3), (3, 1028, 8), (9, 4096, 2)])
def test_the_first_kernel(rows, n, pieces, folder):
    """Rows that fill a block and that do not, more rows than blocks and fewer."""
    kernel, (x, r, dy), w = emulated(FIRST, folder), torch.randn(3, rows, n), torch.randn(n)
    exact = [t.double().requires_grad_() for t in (x, r, w)]
    h = exact[0] + exact[1]
    exact_y = h * torch.rsqrt((h * h).mean(-1, keepdim=True) + 1e-6) * exact[2]
    y, scales = empty(rows, n), empty(rows)
    kernel.forward(y, scales, x, r, w, 1e-6, rows, n)
    torch.testing.assert_close(y.double(), exact_y, rtol=1e-5, atol=1e-5)
    gradients = empty(rows, n), empty(rows, n), empty(n)
    kernel.backward(*gradients, empty(pieces, n), dy, x, r, w, scales, rows, n, pieces)
    for ours, theirs in zip(gradients, torch.autograd.grad(exact_y, exact, dy.double())):
        torch.testing.assert_close(ours.double(), theirs, rtol=1e-5, atol=2e-5)


@pytest.mark.parametrize("n", [1, 4, 1030])
def test_the_first_operator(n, folder):
    kernel, (x, dy) = emulated(OWN, folder), torch.randn(2, n)
    exact = x.double().requires_grad_()
    exact_y = exact + 0.5 * exact.relu() ** 2
    y, dx = empty(n), empty(n)
    kernel.forward(y, x, 0.5, n)
    kernel.backward(dx, dy, x, 0.5, n)
    torch.testing.assert_close(y.double(), exact_y, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(dx.double(), *torch.autograd.grad(exact_y, exact, dy.double()), rtol=1e-6, atol=1e-6)  # fmt: skip


@pytest.mark.parametrize("backwards", [False, True])
def test_the_leaky_sum(backwards, folder):
    x, h = torch.randn(19, 130), empty(19, 130)
    emulated(LEAKY, folder).run(h, x, 0.9, 19, 130, backwards)
    exact = [torch.zeros(130, dtype=torch.float64)]
    for row in x.double().flip(0) if backwards else x.double():
        exact.append(0.9 * exact[-1] + row)
    exact = torch.stack(exact[1:])
    torch.testing.assert_close(h.double(), exact.flip(0) if backwards else exact, rtol=1e-5, atol=1e-5)


ALL = [(lesson, cell, *found) for lesson in (MIN_ADD, POOL, "01_first_kernel", "own_kernel") for cell, found in compiled_cells(lesson).items()]  # fmt: skip
ALL += [(lesson, "paste", pasted(lesson), Request("paste", {}, least=(7, 5))) for lesson in (MIN_ADD, POOL)]


@pytest.mark.parametrize("lesson, cell, source, request_", ALL, ids=[f"{r[0][:2]}-{r[1]}" for r in ALL])
def test_a_rung_compiles(lesson, cell, source, request_, tmp_path):
    """For the compute capability that its cell asks for."""
    nvcc = shutil.which("nvcc")
    if not nvcc:
        pytest.skip("there is no nvcc")
    architecture = "{}{}".format(*request_.only or request_.least) + "a" * bool(request_.only)
    assert (cell in BY_ROWS) == bool(request_.only)
    (tmp_path / "rung.cu").write_text(PROLOGUE + source)
    command = [
        nvcc,
        "-std=c++17",
        f"-arch=sm_{architecture}",
        "-I",
        str(inline_loader.KERNELS),
        "-cubin",  # its host side is compiled for the emulation
        "-o",
        "rung.o",
        "rung.cu",
    ]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
