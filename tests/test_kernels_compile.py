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
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from inline_kernels.engine import tiling
from inline_kernels.loader import source as loader_source

KERNELS = Path(__file__).resolve().parent.parent / "kernels"
SOURCES = sorted(KERNELS.glob("*.cu"))
FUSED_ARCHITECTURES = ["80", "90a"]  # tiling.py asks for 8.0 or later; on Hopper the loader builds for 90a
TYPES = ["VALUE_T=float", "VALUE_T=half_t", "VALUE_T=bfloat16_t", "VALUE_T=double"]
NVCC = shutil.which("nvcc") or shutil.which("nvcc", path="/usr/local/cuda/bin")

FLAGS = ["-std=c++17", "--expt-relaxed-constexpr", f"-I{KERNELS}"]

needs_nvcc = pytest.mark.skipif(NVCC is None, reason="there is no nvcc")


def nvcc(source: Path, architecture: str, defines: list[str], out: Path) -> subprocess.CompletedProcess:
    command = [NVCC, "-cubin", f"-arch=sm_{architecture}", *(f"-D{define}" for define in defines), *FLAGS]
    command += ["-Xptxas", "-v", "-o", str(out), str(source)]
    return subprocess.run(command, capture_output=True, text=True)


def compile(job: tuple[Path, str, str], folder: Path) -> str:
    """The compiler's complaints about a source for an architecture and a definition; empty if there are
    none."""
    source, architecture, define = job
    done = nvcc(source, architecture, [define], folder / f"{source.stem}_{architecture}_{define}.cubin")
    return (
        ""
        if done.returncode == 0
        else f"{source.name}, sm_{architecture}, {define}:\n{done.stdout}{done.stderr}"
    )


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
def test_compiles_for_every_architecture(source, tmp_path):
    """float for all architectures, the other element types for one. (By wgmma, and in what sizes: tests/test_planning_min_add.py,
    and below.)"""
    architectures, types = FUSED_ARCHITECTURES, TYPES[:3]  # composed sources are for 8.0 and later
    jobs = [(source, architecture, types[0]) for architecture in architectures]
    jobs += [(source, architectures[0], define) for define in types[1:]]
    with ThreadPoolExecutor(2) as pool:
        complaints = [text for text in pool.map(lambda job: compile(job, tmp_path), jobs) if text]
    assert not complaints, "\n".join(complaints)


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


H200 = tiling.Device((9, 0), 232448, 132, 62914560)
# Source, kernel, and bytes of static shared memory that it may take.
INSTANCE_NORM = (
    "conv3d_multiply_instancenorm_clamp_multiply_max",
    "fused_kernel",
    3584,
)
DROPOUT = "conv3d_groupnorm_min_clamp_dropout", "convolve_kernel", 33 << 10
POOL = "conv2d_groupnorm_scale_maxpool_clamp", "convolve_kernel", 1 << 10
SLACK = 640  # of those bytes: some arrays depend on the kernel size


def source_of(name: str, folder: Path, launchers: tuple[str, ...]) -> Path:
    """The source `name`, of which only `launchers` are built, and what they instantiate."""
    text, path = (KERNELS / f"{name}.cu").read_text(), folder / f"{name}.cu"
    others = {launcher.name for launcher in loader_source.parse_launchers(text)}.difference(launchers)
    path.write_text(loader_source.without(text, others))
    return path


def built(
    kernel: tuple[str, str, int],
    value: str,
    defines: dict[str, int],
    folder: Path,
    launcher: str = "forward",
) -> list[Entry]:
    """What ptxas reports for each architecture. The kernel has the static shared memory that is planned
    for."""
    source, name, static_shared = kernel
    source = source_of(source, folder, (launcher,))
    own = [f"VALUE_T={value}", *(f"{key}={number}" for key, number in defines.items())]

    def build(architecture: str) -> Entry:
        done = nvcc(source, architecture, own, folder / architecture)
        assert done.returncode == 0, done.stdout + done.stderr
        all_of_it = entries(done.stderr)
        if saving := all_of_it.get(name + SAVING):  # what it keeps takes registers, too
            assert saving.spilled <= all_of_it[name].spilled + 192 and saving.shared <= static_shared, saving
        return all_of_it[name]

    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(build, FUSED_ARCHITECTURES))
    assert all(static_shared - SLACK <= entry.shared <= static_shared for entry in found), found
    return found


@needs_nvcc
@pytest.mark.parametrize("kernel", [INSTANCE_NORM, DROPOUT], ids=["instance norm", "dropout"])
@pytest.mark.parametrize(
    "value, shape, spilled",
    [  # shape: channels out and in, kernel size
        ("float", (16, 3, 3, 3, 3), 0),
        ("half_t", (16, 3, 3, 3, 3), 0),
        # Nearly as many registers of weights as are planned for: a thread may spill some bytes outside its
        # innermost loop.
        ("float", (32, 1, 3, 5, 5), 256),
        ("float", (960, 2, 3, 4, 5), 256),
        ("float", (48, 3, 1, 6, 6), 256),
        ("float", (16, 4, 7, 2, 2), 0),
    ],
    ids=str,
)
def test_volumes_take_what_is_planned(kernel, value, shape, spilled, tmp_path, monkeypatch):
    monkeypatch.setattr(tiling, "device_properties", lambda index: H200)
    weight, dtype, static_shared = (
        torch.empty(shape),
        {"float": torch.float32}.get(value, torch.half),
        kernel[2],
    )
    x = torch.empty((), dtype=dtype).expand(2, shape[1], *(extent + 12 for extent in shape[2:]))
    assert tiling.volume_obstacle(x, weight, dtype, static_shared) is None
    defines = tiling.spatial_defines(shape)
    found = built(kernel, value, defines, tmp_path)
    assert all(entry.spilled <= spilled for entry in found), found


@needs_nvcc
@pytest.mark.parametrize("name", [INSTANCE_NORM[0], DROPOUT[0]], ids=["instance norm", "dropout"])
@pytest.mark.parametrize(
    "value, shape, spilled",  # shape as above; a thread spills some bytes outside its loops
    [("float", (16, 3, 3, 3, 3), 64), ("half_t", (16, 3, 3, 3, 3), 64), ("float", (960, 2, 3, 4, 5), 512)],
    ids=str,
)
def test_backward_of_volumes_takes_what_is_planned(name, value, shape, spilled, tmp_path):
    defines = tiling.spatial_defines(shape)
    own = [f"VALUE_T={value}", *(f"{key}={number}" for key, number in defines.items())]
    for architecture in FUSED_ARCHITECTURES:
        done = nvcc(KERNELS / f"{name}.cu", architecture, own, tmp_path / architecture)
        assert done.returncode == 0, done.stdout + done.stderr
        assert all(entry.spilled <= spilled for entry in entries(done.stderr).values()), done.stderr


@needs_nvcc
@pytest.mark.parametrize(
    "shape, pool, width, saving, spilled",
    [  # shape: channels out and in, kernel size
        ((64, 8, 3, 3), (4, 4), 128, False, 64),
        ((64, 8, 3, 3), (4, 4), 128, True, 64),
        ((48, 5, 2, 3), (2, 3), 300, False, 64),
        ((48, 5, 2, 3), (2, 3), 300, True, 512),
        ((128, 16, 8, 1), (2, 7), 40, False, 1024),  # there is no room for what backward needs
    ],
    ids=str,
)
def test_strips_take_what_is_planned(shape, pool, width, saving, spilled, tmp_path, monkeypatch):
    monkeypatch.setattr(tiling, "device_properties", lambda index: H200)
    weight, x = torch.empty(shape), torch.empty(()).expand(2, shape[1], 40, width)
    assert tiling.strips_obstacle(x, weight, x.dtype, pool) is None
    assert tiling.strips_fit(x, weight, pool, True) == (shape != (128, 16, 8, 1))
    defines = tiling.strips_defines(x, weight, pool, saving)
    found = built(POOL, "float", defines, tmp_path, "forward_saving" if saving else "forward")
    assert all(entry.spilled <= spilled for entry in found), found


@needs_nvcc
@pytest.mark.parametrize(
    "shape, pool, width",
    [  # shape: channels out and in, kernel size
        ((64, 8, 3, 3), (4, 4), 128),
        ((48, 5, 2, 3), (2, 3), 300),
        ((128, 16, 4, 3), (3, 5), 60),
        ((16, 1, 25, 1), (8, 8), 60),
    ],
    ids=str,
)
def test_backward_takes_what_is_planned(shape, pool, width, tmp_path, monkeypatch):
    """Its kernels' shared memory, and registers but for some bytes outside their innermost loops, at two blocks a multiprocessor."""
    monkeypatch.setattr(tiling, "device_properties", lambda index: H200)
    weight, x = torch.empty(shape), torch.empty(()).expand(2, shape[1], 40, width)
    defines, columns = tiling.strips_backward_defines(x, weight, pool), tiling.input_columns(x, weight, pool)
    source = source_of(POOL[0], tmp_path, ("backward", "backward_input"))
    defines = [f"{k}={v}" for k, v in defines.items()]
    own, default = (
        H200.shared - tiling.input_gradient_shared(weight, pool, columns),
        shape[0] == 64,
    )
    for architecture in FUSED_ARCHITECTURES:
        done = nvcc(source, architecture, defines, tmp_path / architecture)
        assert done.returncode == 0, done.stdout + done.stderr
        found = entries(done.stderr)
        assert found["input_gradient_kernel"].shared <= own and columns
        assert all(entry.spilled <= 16 for entry in found.values()) or not default, found


@needs_nvcc
@pytest.mark.parametrize(
    "kernel, wrong",
    [
        (POOL, {"STRIPS_SHARED": 69632 - 16}),
        (POOL, {"STATIC_SHARED": 800}),
        (POOL, {"INPUT_SHARED": 1 << 10}),
        (POOL, {"INPUT_COLUMNS": 32}),
    ],
    ids=str,
)
def test_another_plan_does_not_compile(kernel, wrong, tmp_path, monkeypatch):
    monkeypatch.setattr(tiling, "device_properties", lambda index: H200)
    weight, x, pool = torch.empty(64, 8, 3, 3), torch.empty(2, 8, 40, 128), (4, 4)
    defines = tiling.strips_defines(x, weight, pool, False) | tiling.strips_backward_defines(x, weight, pool)
    assert defines.keys() >= wrong.keys()
    own = [f"{key}={number}" for key, number in {**defines, **wrong}.items()]
    done = nvcc(KERNELS / f"{kernel[0]}.cu", "80", own, tmp_path / "out")
    assert done.returncode and "static assertion failed" in done.stderr, done.stderr
