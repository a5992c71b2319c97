"""Every CUDA source compiles for the oldest, a middle and the newest architecture, without a GPU and without torch.

Only ptxas says whether registers and shared memory suffice, so machine code is made for each. Skipped where there is no nvcc.
And what nvcc is known to compile wrongly does not occur.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

KERNELS = Path(__file__).resolve().parent.parent / "kernels"
SOURCES = sorted(KERNELS.glob("*.cu"))
ARCHITECTURES = ["75", "80", "90"]
FUSED_ARCHITECTURES = ["80", "90a"]  # fused.py asks for 8.0 or later; on Hopper the loader builds for 90a
TYPES = ["VALUE_T=float", "VALUE_T=half_t", "VALUE_T=bfloat16_t", "VALUE_T=double"]
NVCC = shutil.which("nvcc") or shutil.which("nvcc", path="/usr/local/cuda/bin")

FLAGS = ["-std=c++17", "--expt-relaxed-constexpr", f"-I{KERNELS}"]

needs_nvcc = pytest.mark.skipif(NVCC is None, reason="there is no nvcc")


def compile(job: tuple[Path, str, str], folder: Path) -> str:
    """The compiler's complaints about a source for an architecture and a definition; empty if there are none."""
    source, architecture, define = job
    out = folder / f"{source.stem}_{architecture}_{define}.cubin"
    command = [NVCC, "-cubin", f"-arch=sm_{architecture}", f"-D{define}", *FLAGS, "-o", str(out), str(source)]
    done = subprocess.run(command, capture_output=True, text=True)
    return (
        ""
        if done.returncode == 0
        else f"{source.name}, sm_{architecture}, {define}:\n{done.stdout}{done.stderr}"
    )


def test_there_is_something_to_compile():
    assert len(SOURCES) >= 4


@pytest.mark.parametrize("source", sorted(KERNELS.glob("*.cu*")), ids=lambda path: path.name)
def test_no_loop_stands_bare_behind_if_constexpr(source):
    """nvcc 13.0 drops a loop that follows with `#pragma unroll`, if the condition is false, in a template; not where braces are."""
    bare = re.compile(r"\bif constexpr \([^;{}]*\)[^;{}]*\n(?:\s*#pragma[^\n]*\n)?\s*(?:for|while)\b[^\n]*")
    assert not bare.findall(source.read_text())


@needs_nvcc
@pytest.mark.parametrize("source", SOURCES, ids=lambda path: path.stem)
def test_compiles_for_every_architecture(source, tmp_path):
    """float for all architectures, the other element types for one; the fused kernels in all their types, and by wgmma."""
    if source.stem.endswith("_fused"):
        jobs = [
            (source, architecture, define) for architecture in FUSED_ARCHITECTURES for define in TYPES[:3]
        ]
        jobs += [(source, "90a", "WGMMA=1")] if "#if WGMMA" in source.read_text() else []
    else:
        jobs = [(source, architecture, TYPES[0]) for architecture in ARCHITECTURES]
        jobs += [(source, "75", define) for define in TYPES[1:]]
    with ThreadPoolExecutor(2) as pool:
        complaints = [text for text in pool.map(lambda job: compile(job, tmp_path), jobs) if text]
    assert not complaints, "\n".join(complaints)
