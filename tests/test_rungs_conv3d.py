"""The CUDA kernels in the cells of the lessons on 3-D convolutions, run by tests/emulation on the CPU, against float64; nvcc compiles them.

Cells are parts of a source, of which others build classes; here `build` only puts the parts together, beside the folders that headers are in.
"""

import copy
import ctypes
import json
import math
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from torch.nn.functional import group_norm, instance_norm

import test_emulated
from inline_kernels.loader.cells import Request
from test_emulated import folder  # noqa: F401

ROOT = Path(__file__).resolve().parent.parent
NORM, DROPOUT = "79_conv3d_multiply_instancenorm_clamp_multiply_max", "83_conv3d_groupnorm_min_clamp_dropout"
KINDS = {
    NORM: ["ModelNew", "Sums", "Tile", "Tensor", "Staged", "Walked"],
    DROPOUT: ["ModelNew", "Sums", "Inside", "Tensor", "Walked", "Again"],
}
CELLS = ["paste", "paste-model", "sums", "tile", "inside", "halves", "tensor", "staged", "lanes", "again"]
FORMULA = "    z = z > low ? low : z;\n"  # of dropout, which hides z
TENSOR_CORES = re.compile(r"DEVICE void multiply_add\(.*?\n}\n", re.S)
EMULATED = """DEVICE void multiply_add(float (&d)[4], const uint4& a, uint32_t b0, uint32_t b1) {
  tensor_core::multiply_add<__half>(d, {a.x, a.y, a.z, a.w}, b0, b1);
}
"""

pytestmark = test_emulated.pytestmark


def classes(lesson: str) -> dict[str, type]:
    """The classes that run kernels; `kernels` is a source and its folders of headers."""
    cells = json.loads((ROOT / "notebooks" / f"{lesson}.ipynb").read_text(encoding="utf-8"))["cells"]
    space = {"root": ROOT, "by_hand": lambda kind: None, "prod": math.prod}
    for cell in cells:
        text = "".join(cell["source"])
        if text.startswith("%%"):  # a part of a kernel
            first, _, text = text.partition("\n")
            request = Request.of(first.partition(" ")[2])
            assert request.part
            space[request.name] = text
            continue
        if cell["id"] not in CELLS:
            continue
        text = text.replace("class ModelNew(", "build = joined\nclass ModelNew(")
        space["joined"] = lambda *parts, include=(): ("\n".join([space["start"]["cuda"], *parts]), include)
        text = text.replace('device = "cuda" if torch.cuda.is_available() else "cpu"', 'device = "cuda"')
        text = text.replace("torch.cuda.get_device_capability()", "(9, 0)").replace(
            "print(by_hand", "(by_hand"
        )
        exec(text, space)
        space.setdefault("frame", space["cuda"])
    return {kind: space[kind] for kind in KINDS[lesson]}


def test_both_lessons_walk_alike():
    texts = {
        "".join(cell["source"])
        for lesson in KINDS
        for cell in json.loads((ROOT / "notebooks" / f"{lesson}.ipynb").read_text(encoding="utf-8"))["cells"]
        if cell["id"] == "walk"
    }
    assert len(texts) == 1


RUNGS = [(lesson, kind) for lesson in KINDS for kind in classes(lesson).values()]
every_rung = pytest.mark.parametrize(
    "lesson, kind", RUNGS, ids=[f"{lesson[:2]}-{kind.__name__}" for lesson, kind in RUNGS]
)


def emulated(source: str, folder: Path) -> ctypes.CDLL:
    """The library of a source, which may include what kernels/ has."""
    source = source.replace('extern "C"', "EXPORT")
    source = TENSOR_CORES.sub(EMULATED, source).replace("__device__ __forceinline__", "inline")
    source = '#include "core/numerics.h"\n#include "core/tensor_core.cuh"\n' + source
    return test_emulated.library_of(source, 900, {}, (), folder, alone=True)


def call(library, name: str, *arguments) -> None:
    kinds = {float: ctypes.c_double, int: ctypes.c_int64}
    values = [kinds[type(a)](a) if type(a) in kinds else ctypes.c_void_p(a.data_ptr()) for a in arguments]
    getattr(library, name)(*values, None)
    failure = library.emulation_failure()
    assert not failure, failure.decode()


# Channels are multiples of four elements, as dropout's vectors ask. The second fills more than one tile, and the last has
# rows that are wider than a tile of what walks along depth.
@every_rung
@pytest.mark.parametrize("N, D, H, W", [(2, 4, 8, 10), (1, 8, 20, 22), (2, 4, 5, 142)])
def test_a_rung_is_right(lesson, kind, N, D, H, W, folder):
    source, _ = kind.kernels
    if W > 64 and "kRoom = kStride" in source:
        pytest.skip("stages rows of at most 64")
    library = emulated(source.replace(FORMULA, "    return z;\n"), folder)
    torch.manual_seed(0)
    x, gamma, beta = torch.rand(N, 3, D, H, W), torch.randn(16), torch.randn(16)
    conv = torch.nn.Conv3d(3, 16, 3).requires_grad_(False)
    exact, weight = copy.deepcopy(conv).double()(x.double()), conv.weight
    if "struct alignas(16) Tap" in source:
        weight = weight.flatten(1).t().contiguous()
    if "prepare_kernel" in source:
        weight = torch.full((7 * 2 * 32 * 4,), torch.nan)
        call(library, "prepare", weight, conv.weight)
    sums = torch.full((N, kind.tiles(None, D, H, W), 16, 2), torch.nan)
    if lesson == NORM:
        m = gamma.double().reshape(16, 1, 1, 1)
        exact = (instance_norm(exact * m).clamp(-1, 1) * m).amax(1)
        y = torch.full(exact.shape, torch.nan)
        call(library, "forward", y, sums, x, weight, gamma, -1.0, 1.0, 1e-5, N, D, H, W)
    else:
        exact = group_norm(exact, 8, gamma.double(), beta.double())
        y = torch.full(exact.shape, torch.nan)
        given = torch.tensor([0.25, 1.0, 0.0, 7.0], dtype=torch.float64)
        call(library, "forward", y, sums, x, weight, conv.bias, gamma, beta, given, 1e-5, N, D, H, W)
    assert (y - exact).norm() < 4e-7 * exact.norm()


@every_rung
def test_a_rung_compiles(lesson, kind, tmp_path):
    nvcc = shutil.which("nvcc")
    if not nvcc:
        pytest.skip("there is no nvcc")
    source, include = kind.kernels
    architecture = "80" if include else "75"  # the repository's headers ask for it
    (tmp_path / "rung.cu").write_text(source)
    command = [
        nvcc,
        "-std=c++17",
        f"-arch=sm_{architecture}",
        *[f"-I{folder}" for folder in include],
        "-cubin",  # its host side is compiled for the emulation
        "-o",
        "rung.o",
        "rung.cu",
    ]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
