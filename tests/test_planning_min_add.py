"""What Python assumes of min-add's fused kernels is what the compiler makes of them: neither needs a GPU.

Their dynamic shared memory stands in a static_assert; their registers and static shared memory ptxas reports.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

import tiling

KERNELS = Path(__file__).resolve().parent.parent / "kernels"
NVCC = shutil.which("nvcc") or shutil.which("nvcc", path="/usr/local/cuda/bin")
TYPES = {4: "float", 2: "half_t"}

needs_nvcc = pytest.mark.skipif(NVCC is None, reason="there is no nvcc")

# Filters (Cout, C, kh, kw); value_bytes; out_bytes; bytes of registers that are spilled, outside all inner
# loops; what they are here for. By mma.sync: `split` in place of the last two numbers.
BY_WGMMA = [
    ((128, 64, 3, 3), 4, 4, 0, "the default: 36 products, 6 of them with weights in shared memory"),
    ((130, 60, 3, 3), 4, 2, 0, "two blocks of channels; channels in that are padded; as under autocast"),
    ((64, 64, 3, 3), 2, 2, 12, "64 channels in a block; half operands"),
    ((128, 16, 5, 6), 2, 4, 0, "30 products, all with weights in registers; whole results of half operands"),
    ((20, 5, 1, 1), 4, 4, 0, "the smallest: one product, one row"),
]  # fmt: skip
BY_MMA = [
    ((128, 64, 3, 3), 4, False, "the default"),
    ((128, 64, 3, 3), 4, True, "two parts: two groups of channels"),
    ((20, 5, 3, 3), 4, True, "64 channels in a block, few in"),
    ((128, 200, 7, 2), 2, False, "several groups; half operands"),
    ((8, 3, 1, 1), 2, False, "results take more than operands"),
]  # fmt: skip


def compiled(plan: tiling.GemmTiling, weight, value_bytes: int, out_bytes: int, folder: Path, **changed):
    """The compiler's status and report for a build."""
    types = {"VALUE_T": TYPES[value_bytes], "OUTPUT_T": TYPES[out_bytes]}
    defines = {**types, **tiling.gemm_defines(plan, weight), **changed}
    command = [NVCC, "-cubin", "-Xptxas=-v", f"-arch=sm_{'90a' if plan.wgmma else '80'}", "-std=c++17"]
    command += [
        "--expt-relaxed-constexpr",
        f"-I{KERNELS}",
        *(f"-D{key}={value}" for key, value in defines.items()),
    ]
    command += ["-o", str(folder / "out.cubin"), str(KERNELS / "conv2d_min_add_multiply_fused.cu")]
    done = subprocess.run(command, capture_output=True, text=True)
    return done.returncode, done.stdout + done.stderr


def used(report: str) -> dict[str, dict[str, int]]:
    """By kernel: registers, bytes of static shared memory, bytes of registers that are spilled."""
    kernels = {}
    for part in report.split("Compiling entry function '")[1:]:
        name = re.search(r"\d([a-z_]+_kernel)[EI]", part)[1].replace("convolve_rows_kernel", "convolve_kernel")
        shared = re.search(r"(\d+) bytes smem", part)
        kernels[name] = {
            "registers": int(re.search(r"Used (\d+) registers", part)[1]),
            "shared": int(shared[1]) if shared else 0,
            "spilled": int(re.search(r"(\d+) bytes spill stores", part)[1]),
        }
    return kernels


def assert_as_planned(plan: tiling.GemmTiling, build: tuple, threads: int, spilled: int = 0) -> None:
    status, report = compiled(plan, *build)
    assert status == 0, report
    kernels = used(report)
    assert len(kernels) == (2 if plan.wgmma else 4), report
    assert all(kernel["spilled"] <= spilled for kernel in kernels.values()), report
    assert kernels["convolve_kernel"]["shared"] == 0, "all of a block's shared memory is planned"
    assert kernels["convolve_kernel"]["registers"] * threads <= 65536
    status, report = compiled(plan, *build, SHARED_BYTES=plan.shared_bytes + 16)
    assert status != 0 and "Python planned another layout" in report


@needs_nvcc
@pytest.mark.parametrize(
    "weight, value_bytes, out_bytes, spilled, reason", BY_WGMMA, ids=lambda value: str(value)[:20]
)
def test_wgmma_is_built_as_planned(weight, value_bytes, out_bytes, spilled, reason, tmp_path):
    plan = tiling.gemm_by_wgmma(weight, value_bytes, out_bytes)
    assert_as_planned(plan, (weight, value_bytes, out_bytes, tmp_path), 384, spilled)


@needs_nvcc
@pytest.mark.parametrize("weight, value_bytes, split, reason", BY_MMA, ids=lambda value: str(value)[:20])
def test_mma_is_built_as_planned(weight, value_bytes, split, reason, tmp_path):
    plan = tiling.gemm_by_mma(weight, split)
    assert_as_planned(
        plan, (weight, value_bytes, value_bytes, tmp_path), plan.block_channels * plan.tile_rows
    )


@needs_nvcc
@pytest.mark.parametrize("architecture", ["80", "90a"])
@pytest.mark.parametrize("value_bytes, split", [(4, False), (4, True), (2, False)])
def test_backward_hardly_spills(value_bytes, split, architecture, tmp_path, monkeypatch):
    capability, by_wgmma = ((9, 0), not split) if architecture == "90a" else ((8, 0), False)
    device = tiling.Device(capability, 227 << 10, 132, 60 << 20)
    monkeypatch.setattr(tiling, "device_properties", lambda index: device)
    dtype = torch.float32 if value_bytes == 4 else torch.float16
    x, weight = (torch.empty(s, dtype=dtype, device="meta") for s in ((128, 64, 128, 128), (128, 64, 3, 3)))
    of_weight, *_ = tiling.plan_weight_gradient(x, weight, split)
    of_input, piece, _ = tiling.plan_input_gradient(x, weight, split)
    assert of_input["WGMMA"] == by_wgmma and piece == (128 if by_wgmma else 8 if split else 16)
    spilled_by_inputs = 24 if split else 36 if by_wgmma and value_bytes == 2 else 0
    for source, defines in (("weight_gradient", of_weight), ("input_gradient", of_input)):
        defines = {"VALUE_T": TYPES[value_bytes], **defines}
        command = [NVCC, "-cubin", "-Xptxas=-v", f"-arch=sm_{architecture}", "-std=c++17", f"-I{KERNELS}"]
        command += ["--expt-relaxed-constexpr", *(f"-D{key}={value}" for key, value in defines.items())]
        command += ["-o", str(tmp_path / "out"), str(KERNELS / f"conv2d_min_add_multiply_{source}_fused.cu")]
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        spilled = max(map(int, re.findall(r"(\d+) bytes spill stores", done.stderr)))
        assert spilled <= (spilled_by_inputs if source == "input_gradient" else 0), done.stderr


def test_what_training_takes(monkeypatch):
    """Bytes beside inputs, results and gradients, at the default size: 66 MB of gates and 22 MB of sums; dx by mma.sync takes pieces of 65 MB more."""
    x, weight = (torch.empty(shape, device="meta") for shape in ((128, 64, 128, 128), (128, 64, 3, 3)))

    def planned(capability):
        device = tiling.Device(capability, 227 << 10, 132, 60 << 20)
        monkeypatch.setattr(tiling, "device_properties", lambda index: device)
        _, piece, workspace = tiling.plan_input_gradient(x, weight, False)
        return piece, workspace

    packed_weight = 256 + 2 * 64 * 128 * 9
    assert planned((8, 0)) == (16, 16 * 128 * 126 * 126 * 2 + packed_weight)
    assert planned((9, 0)) == (128, packed_weight)
    saved = 4 * tiling.gemm_saved(x.shape, weight.shape)
    _, _, shares, slot = tiling.plan_weight_gradient(x, weight, False)
    assert saved == 512 + 128 * 126 * 2 * 128 * 16 and (shares, slot) == (66, 2 * 64 * 64 * 10)
    assert saved + 4 * shares * slot < 90e6


@pytest.mark.parametrize("by_wgmma, changed", [
    (True, {}),
    (False, {"split": True}),
    (False, {"capability": (8, 0)}),
    (False, {"capability": (10, 0)}),
    (False, {"optin": 200 << 10}),
    (False, {"aligned": False}),
    (False, {"value_bytes": 2, "x": (2, 64, 9, 141)}),  # rows that are no whole words
    (False, {"weight": (128, 65, 1, 1), "x": (2, 65, 9, 140)}),  # a second group of channels
    (False, {"weight": (128, 64, 5, 2)}),  # 40 products
    (False, {"x": (2**20, 64, 2**11 + 2, 3)}),  # 2^31 tiles
], ids=str)  # fmt: skip
def test_where_wgmma_is_planned(by_wgmma, changed, monkeypatch):
    """On GPUs that are made up."""
    given = {
        "x": (2, 64, 9, 140),
        "weight": (128, 64, 3, 3),
        "value_bytes": 4,
        "split": False,
        "aligned": True,
        **changed,
    }
    device = tiling.Device(given.get("capability", (9, 0)), given.get("optin", 227 << 10), 132, 60 << 20)
    monkeypatch.setattr(tiling, "device_properties", lambda index: device)
    dtype = {4: torch.float32, 2: torch.float16}[given["value_bytes"]]
    x, weight = (torch.empty(given[name], dtype=dtype, device="meta") for name in ("x", "weight"))
    plan = tiling.plan_gemm(x, weight, torch.float32, split=given["split"], aligned=given["aligned"])
    assert plan.wgmma == by_wgmma and plan.split == given["split"]
    assert plan == tiling.gemm_by_mma(weight.shape, given["split"]) or by_wgmma


@pytest.mark.parametrize("copied, changed", [
    ((4, 2), {}),
    ((1, 2), {"x": (2, 64, 9, 138)}),
    ((1, 1), {"x": (2, 64, 9, 139)}),
    ((4, 1), {"weight": (128, 64, 3, 2)}),
    ((4, 2), {"weight": (128, 64, 1, 9)}),
    ((1, 2), {"weight": (128, 64, 1, 11)}),  # two blocks of columns: the second begins at column 6
    ((1, 1), {"split": True}),
    ((1, 1), {"capability": (8, 0)}),
    ((1, 1), {"dtype": torch.float16}),
], ids=str)  # fmt: skip
def test_how_many_pixels_are_copied_at_a_time(copied, changed, monkeypatch):
    """By wgmma as many as all strips of x and of dy begin at a multiple of."""
    given = {"x": (2, 64, 9, 140), "weight": (128, 64, 3, 3), "dtype": torch.float32, **changed}
    device = tiling.Device(given.get("capability", (9, 0)), 227 << 10, 132, 60 << 20)
    monkeypatch.setattr(tiling, "device_properties", lambda index: device)
    x = torch.empty(given["x"], dtype=given["dtype"], device="meta")
    weight = torch.empty(given["weight"], device="meta")
    defines, *_ = tiling.plan_weight_gradient(x, weight, given.get("split", False))
    assert (defines["COPIED_X"], defines["COPIED_DY"]) == copied


def test_workspace():
    """By hand, for the default problem: exponents, largest magnitudes, weights and, without wgmma, x in float16."""
    x, weight = (torch.empty(shape, device="meta") for shape in ((128, 64, 128, 128), (128, 64, 3, 3)))
    weights, packed_x = 2 * 128 * 64 * 9, 2 * 128 * 64 * 128 * 128
    for plan, bytes in (
        (tiling.gemm_by_wgmma(weight.shape, 4, 4), weights),
        (tiling.gemm_by_mma(weight.shape, False), weights + packed_x),
        (tiling.gemm_by_mma(weight.shape, True), 2 * (weights + packed_x)),
    ):
        assert tiling.gemm_workspace(plan, x.shape, weight.shape, False) == 512 + 512 + bytes
        assert tiling.gemm_workspace(plan, x.shape, weight.shape, True) == 512 + bytes
