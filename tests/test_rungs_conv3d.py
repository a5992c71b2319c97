"""The CUDA kernels in the cells of the lessons on 3-D convolutions, run by tests/emulation on the CPU, against float64; nvcc compiles them.

A cell builds a class from parts of a source; here `build` only puts the parts together.
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
from test_emulated import folder  # noqa: F401

ROOT = Path(__file__).resolve().parent.parent
NORM, DROPOUT = "79_conv3d_multiply_instancenorm_clamp_multiply_max", "83_conv3d_groupnorm_min_clamp_dropout"
KINDS = {
    NORM: ["ModelNew", "Sums", "Tile", "Tensor", "Staged"],
    DROPOUT: ["ModelNew", "Sums", "Inside", "Tensor", "Again"],
}
CELLS = [
    "paste",
    "paste-model",
    "sums",
    "tile",
    "instruction",
    "prepare",
    "inside",
    "halves",
    "tensor",
    "staged",
    "again",
]
FORMULA = "    z = z > low ? low : z;\n"  # of dropout, which hides z
TENSOR_CORES = re.compile(r"DEVICE void multiply_add\(.*?\n}\n", re.S)
EMULATED = """DEVICE void multiply_add(float (&d)[4], const uint4& a, uint32_t b0, uint32_t b1) {
  tensor_core::multiply_add<__half>(d, {a.x, a.y, a.z, a.w}, b0, b1);
}
"""

pytestmark = test_emulated.pytestmark


def sources(lesson: str) -> dict[str, str]:
    """The CUDA sources by the classes that run them."""
    cells = json.loads((ROOT / "notebooks" / f"{lesson}.ipynb").read_text(encoding="utf-8"))["cells"]
    cells = {cell["id"]: "".join(cell["source"]) for cell in cells}
    space = {"root": ROOT, "by_hand": lambda kind: None, "prod": math.prod}
    for name in CELLS:
        text = cells.get(name, "").replace("class ModelNew(", "build = joined\nclass ModelNew(")
        space["joined"] = lambda *parts: "\n".join([space["start"]["cuda"], *parts])
        text = text.replace('device = "cuda" if torch.cuda.is_available() else "cpu"', 'device = "cuda"')
        text = text.replace("torch.cuda.get_device_capability()", "(9, 0)").replace(
            "print(by_hand", "(by_hand"
        )
        exec(text.split("if device ==")[0] if name == "instruction" else text, space)
        space.setdefault("frame", space["cuda"])
    return {kind: space[kind].kernels for kind in KINDS[lesson]}


RUNGS = [(lesson, kind, source) for lesson in KINDS for kind, source in sources(lesson).items()]
every_rung = pytest.mark.parametrize("lesson, kind, source", RUNGS, ids=[f"{r[0][:2]}-{r[1]}" for r in RUNGS])


def emulated(source: str, folder: Path) -> ctypes.CDLL:
    """The library of a source, which may include what kernels/ has."""
    source = re.sub(r'#include "/.*/kernels/', '#include "', source).replace('extern "C"', "EXPORT")
    source = TENSOR_CORES.sub(EMULATED, source).replace("__device__ __forceinline__", "inline")
    source = '#include "core/numerics.h"\n#include "core/tensor_core.cuh"\n' + source
    return test_emulated.library_of(source, 900, {}, (), folder, alone=True)


def call(library, name: str, *arguments) -> None:
    kinds = {float: ctypes.c_double, int: ctypes.c_int64}
    values = [kinds[type(a)](a) if type(a) in kinds else ctypes.c_void_p(a.data_ptr()) for a in arguments]
    getattr(library, name)(*values, None)
    failure = library.emulation_failure()
    assert not failure, failure.decode()


# The last fills more than one tile, and its channels are multiples of four elements as dropout's vectors ask.
@every_rung
@pytest.mark.parametrize("N, D, H, W", [(2, 4, 8, 10), (1, 8, 20, 22)])
def test_a_rung_is_right(lesson, kind, source, N, D, H, W, folder):
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
    sums = torch.full((N, (D - 2) * H * W // 2048 + 1, 16, 2), torch.nan)
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
def test_a_rung_compiles(lesson, kind, source, tmp_path):
    nvcc = shutil.which("nvcc")
    if not nvcc:
        pytest.skip("there is no nvcc")
    architecture = "80" if "/kernels/" in source else "75"  # the repository's headers ask for it
    (tmp_path / "rung.cu").write_text(source)
    include = ["-I", str(ROOT / "kernels")]  # as the loader says to its compilers
    command = [
        nvcc,
        "-std=c++17",
        f"-arch=sm_{architecture}",
        *include,
        "-cubin",  # its host side is compiled for the emulation
        "-o",
        "rung.o",
        "rung.cu",
    ]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
