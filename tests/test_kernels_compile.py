"""Every CUDA source compiles for the oldest, a middle and the newest architecture, without a GPU and without
torch.

Only ptxas says whether registers and shared memory suffice, so machine code is made for each. Skipped where
there is no nvcc. Fused kernels take what tiling.py plans, and what it assumes of them is what ptxas finds.
And what nvcc is known to compile wrongly does not occur.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from inline_kernels.engine import tiling
from inline_kernels.loader import source as loader_source

KERNELS = Path(__file__).resolve().parent.parent / "kernels"
SOURCES = sorted(KERNELS.glob("*.cu"))
FUSED_ARCHITECTURES = ["80", "90a"]  # tiling.py asks for 8.0 or later; on Hopper the loader builds for 90a
NVCC = shutil.which("nvcc") or shutil.which("nvcc", path="/usr/local/cuda/bin")

FLAGS = ["-std=c++17", "--expt-relaxed-constexpr", f"-I{KERNELS}"]

needs_nvcc = pytest.mark.skipif(NVCC is None, reason="there is no nvcc")


def nvcc(
    source: Path, architecture: str, defines: list[str], out: Path, *how: str
) -> subprocess.CompletedProcess:
    """how: by default to machine code, with what ptxas says of it."""
    how = how or ("-cubin", "-Xptxas", "-v")
    command = [NVCC, *how, f"-arch=sm_{architecture}", *(f"-D{define}" for define in defines), *FLAGS]
    command += ["-o", str(out), str(source)]
    return subprocess.run(command, capture_output=True, text=True)


def test_there_is_something_to_compile():
    assert len(SOURCES) >= 4


@pytest.mark.parametrize("source", sorted(KERNELS.rglob("*.cu*")), ids=lambda path: path.name)
def test_no_loop_stands_bare_behind_if_constexpr(source):
    """nvcc 13.0 drops a loop that follows with `#pragma unroll`, if the condition is false, in a template;
    not where braces are."""
    bare = re.compile(r"\bif constexpr \([^;{}]*\)[^;{}]*\n(?:\s*#pragma[^\n]*\n)?\s*(?:for|while)\b[^\n]*")
    assert not bare.findall(source.read_text())


@needs_nvcc
@pytest.mark.parametrize("source", SOURCES, ids=lambda path: path.stem)
def test_compiles_alone(source, tmp_path):
    """With the sizes that stand in it, in bfloat16, by the compiler's front end alone: ptxas has its say below, and in
    test_planning_min_add.py."""
    done = nvcc(source, "80", ["VALUE_T=bfloat16_t"], tmp_path / "out", "-ptx", "-Xcicc", "-O0")
    assert done.returncode == 0, done.stdout + done.stderr


class Entry(NamedTuple):
    """What ptxas reports of a kernel."""

    registers: int
    spilled: int  # bytes
    shared: int  # bytes, static


SAVING = ", saving"  # after the name of instance norm's kernel that keeps what backward needs


def entries(log: str) -> dict[str, Entry]:
    """By the kernel's name, of all its instances the largest of each figure."""
    found = {}
    for text in log.split("Compiling entry function ")[1:]:
        name = re.search(r"\d([a-z_]+_kernel)", text)[1] + SAVING * bool(
            re.search(r"fused_kernel\w*Lb1E", text)
        )
        figures = [
            re.search(rf"{form}", text) for form in (r"Used (\d+)", r"(\d+) bytes spill", r"(\d+) bytes smem")
        ]
        own = Entry(*(int(figure[1]) if figure else 0 for figure in figures))
        found[name] = Entry(*map(max, own, found.get(name, own)))
    return found


H200 = tiling.Device((9, 0), 232448, 132)
# Source, kernel, and bytes of static shared memory that it may take.
INSTANCE_NORM = (
    "conv3d_multiply_instancenorm_clamp_multiply_max",
    "fused_kernel",
    3584,
)
DROPOUT = "conv3d_groupnorm_min_clamp_dropout", "convolve_kernel", 33 << 10
POOL = "conv2d_groupnorm_scale_maxpool_clamp", "convolve_kernel", 1 << 10
SLACK = 640  # of those bytes: some arrays depend on the kernel size


def built(source: str, value: str, defines: dict, architecture: str, folder: Path, launchers=()) -> dict:
    """What ptxas reports of a source's kernels, by name; launchers: of those alone."""
    text, path = (KERNELS / f"{source}.cu").read_text(), folder / f"{source}.cu"
    others = {launcher.name for launcher in loader_source.parse_launchers(text)}.difference(launchers)
    path.write_text(loader_source.without(text, others if launchers else set()))
    own = [f"VALUE_T={value}", *(f"{key}={number}" for key, number in defines.items())]
    done = nvcc(path, architecture, own, folder / "out")
    assert done.returncode == 0, done.stdout + done.stderr
    return entries(done.stderr)


def assert_planned(found: dict[str, Entry], kernel: tuple[str, str, int], spilled: int) -> None:
    """The kernel has the static shared memory that is planned for."""
    _, name, static_shared = kernel
    assert static_shared - SLACK <= found[name].shared <= static_shared, found
    assert found[name].spilled <= spilled, found
    if saving := found.get(name + SAVING):  # what it keeps takes registers, too
        assert saving.spilled <= found[name].spilled + 192 and saving.shared <= static_shared, saving


@needs_nvcc
@pytest.mark.parametrize(
    "kernel, value, shape, architecture, spilled, spilled_backward",
    [  # shape: channels out and in, kernel size; backward spills some bytes outside its loops
        (INSTANCE_NORM, "float", (16, 3, 3, 3, 3), "80", 0, 64),
        (DROPOUT, "float", (16, 3, 3, 3, 3), "90a", 0, 64),
        (DROPOUT, "float", (960, 2, 3, 4, 5), "90a", 256, 512),
        # Nearly as many registers of weights as are planned for: a thread may spill some bytes outside its
        # innermost loop. Forward alone.
        (INSTANCE_NORM, "float", (32, 1, 3, 5, 5), "80", 256, None),
        (DROPOUT, "float", (16, 4, 7, 2, 2), "90a", 0, None),
    ],
    ids=lambda value: value[0] if isinstance(value, tuple) and isinstance(value[0], str) else str(value),
)
def test_volumes_take_what_is_planned(
    kernel, value, shape, architecture, spilled, spilled_backward, tmp_path, monkeypatch
):
    monkeypatch.setattr(tiling, "device_properties", lambda index: H200)
    dtype = {"float": torch.float32}.get(value, torch.bfloat16)
    x = torch.empty((), dtype=dtype).expand(2, shape[1], *(extent + 12 for extent in shape[2:]))
    assert tiling.volume_obstacle(x, torch.empty(shape), dtype, kernel[2]) is None
    launchers = ("forward",) if spilled_backward is None else ()
    found = built(kernel[0], value, tiling.spatial_defines(shape), architecture, tmp_path, launchers)
    assert_planned(found, kernel, spilled)
    if spilled_backward is not None:
        assert all(entry.spilled <= spilled_backward for entry in found.values()), found


FORWARD, BACKWARD = ("forward", "forward_saving"), ("backward", "backward_input")


@needs_nvcc
@pytest.mark.parametrize(
    "value, shape, pool, width, launchers, architecture, spilled",
    [  # shape: channels out and in, kernel size
        ("float", (64, 8, 3, 3), (4, 4), 128, FORWARD + BACKWARD, "80", 64),
        ("float", (48, 5, 2, 3), (2, 3), 300, FORWARD, "90a", 512),
        ("float", (128, 16, 8, 1), (2, 7), 40, ("forward",), "80", 1024),  # there is no room to keep
        ("float", (16, 1, 25, 1), (8, 8), 60, BACKWARD, "80", None),
    ],
    ids=str,
)
def test_strips_take_what_is_planned(
    value, shape, pool, width, launchers, architecture, spilled, tmp_path, monkeypatch
):
    """Shared memory of all kernels, and registers but for some bytes outside their innermost loops; backward at two blocks a
    multiprocessor."""
    monkeypatch.setattr(tiling, "device_properties", lambda index: H200)
    weight, x = torch.empty(shape), torch.empty(()).expand(2, shape[1], 40, width)
    defines, saving = {}, "forward_saving" in launchers
    if "forward" in launchers:
        assert tiling.strips_obstacle(x, weight, x.dtype, pool) is None
        assert tiling.strips_fit(x, weight, pool, True) == saving
        defines = tiling.strips_defines(x, weight, pool, saving)
    if BACKWARD[0] in launchers:
        defines |= tiling.strips_backward_defines(x, weight, pool)
    columns = tiling.input_columns(x, weight, pool)
    found = built(POOL[0], value, defines, architecture, tmp_path, launchers)
    if "forward" in launchers:
        assert_planned(found, POOL, spilled)
    if backward := found.get("input_gradient_kernel"):
        planned = H200.shared - tiling.input_gradient_shared(weight, pool, columns)
        assert backward.shared <= planned and columns
        others = [found[name].spilled for name in found.keys() - {POOL[1], "finish_kernel"}]  # forward's
        assert max(others) <= 16 or shape[0] != 64, found


@needs_nvcc
@pytest.mark.parametrize(
    "wrong", [{"STRIPS_SHARED": 69632 - 16}, {"STATIC_SHARED": 800}, {"INPUT_COLUMNS": 32}], ids=str
)
def test_another_plan_does_not_compile(wrong, tmp_path, monkeypatch):
    """(INPUT_SHARED: test_backward_pool.py.)"""
    monkeypatch.setattr(tiling, "device_properties", lambda index: H200)
    weight, x, pool = torch.empty(64, 8, 3, 3), torch.empty(2, 8, 40, 128), (4, 4)
    defines = tiling.strips_defines(x, weight, pool, False) | tiling.strips_backward_defines(x, weight, pool)
    assert defines.keys() >= wrong.keys()
    own = [f"{key}={number}" for key, number in {**defines, **wrong}.items()]
    done = nvcc(KERNELS / f"{POOL[0]}.cu", "80", own, tmp_path / "out")
    assert done.returncode and "static assertion failed" in done.stderr, done.stderr


def test_what_is_launched_early_waits_first():
    """Else it would read what the kernel before it has not written yet."""
    text = "\n".join(path.read_text() for path in sorted(KERNELS.rglob("*.cuh")))
    launched = set(re.findall(r"launch_early\((\w+)", text)) - {"void"}
    assert {"planes_kernel", "small_kernel", "transpose_kernel", "finish_kernel"} <= launched
    for name in launched:
        body = re.search(rf"__global__ [^;{{]*\b{name}\([^{{;]*\) {{\n(?:#if .*\n)?(.*)", text)
        assert body and body[1].strip() == "await_previous_kernel();", name
