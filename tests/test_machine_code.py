"""report(): what nvcc and nvdisasm say of a kernel, under the right lines of its source."""

from __future__ import annotations

import shutil

import pytest

import inline_loader
import loading
from inline_kernels.loader import machine_code
from inline_kernels.loader.messages import BuildError

NVCC = shutil.which("nvcc") or shutil.which("nvcc", path="/usr/local/cuda/bin")
needs_nvcc = pytest.mark.skipif(NVCC is None, reason="there is no nvcc")
HEADER = """template <class T> __device__ T scaled(T x, T a) {
  return x * a;
}
"""
SOURCE = """#include "scaled.cuh"
__global__ void scale_kernel(float* y, const float* x, float a, int64_t n) {
  __shared__ float kept[32];
  int64_t i = blockIdx.x * int64_t(blockDim.x) + threadIdx.x;
  kept[threadIdx.x % 32] = a;
  __syncthreads();
  if (i < n) y[i] = scaled(x[i], kept[threadIdx.x % 7]);
}
"""


def examined(source: str = SOURCE, architecture: str = "80") -> machine_code.Report:
    files = {"scaled.cuh": '#line 1 "scaled.cuh"\n' + HEADER}
    files["kernels.cu"] = '#include <stdint.h>\n#line 1 "<scale>"\n' + source
    texts = {"<scale>": source, "scaled.cuh": HEADER}
    return machine_code.examine(files, texts, [], architecture, NVCC, 256, 0)


@needs_nvcc
@pytest.mark.parametrize("architecture", ["75", "80", "90a"])
def test_report(architecture):
    report = examined(architecture=architecture)
    (kernel,) = report.kernels
    assert kernel.name == "scale_kernel" and 8 <= kernel.registers <= 40
    assert kernel.shared == 128 and kernel.stack == kernel.spilled == 0
    assert "scale_kernel" in str(report) and "100 %" in str(report)
    if report.missing:
        pytest.skip(report.missing)
    code = {place: " ".join(lines) for place, lines in kernel.lines.items()}
    assert "STS" in code["<scale>", 5] and "BAR" in code["<scale>", 6] and "FMUL" in code["scaled.cuh", 2]
    text = str(report)
    assert "<scale>:5: kept[threadIdx.x % 32] = a;\n    " in text and "scaled.cuh:2: return x * a;" in text
    page = report._repr_html_()
    assert "&lt;scale&gt;:6: __syncthreads();" in page and "<details>" in page


@needs_nvcc
def test_spills_are_seen():
    values = "\n".join(f"  float v{i} = x[i + {i}];" for i in range(200))
    uses = "\n".join(f"  y[i + {i}] = v{i} * v{(i + 100) % 200};" for i in range(200))
    source = f"""__global__ void __launch_bounds__(1024) wide(float* y, const volatile float* x, int64_t n) {{
  int64_t i = threadIdx.x * n;
{values}
  __syncthreads();
{uses}
}}
"""
    (kernel,) = examined(source).kernels
    assert kernel.registers <= 64 and kernel.spilled > 400 and kernel.stack > 0


def test_occupancy():
    """By hand, of CUDA's rules."""
    of = machine_code.Kernel("k", registers=32).occupancy
    assert (
        of("90a", 256) == (8, "threads")
        and of("75", 256) == (4, "threads")
        and of("86", 32) == (16, "blocks")
    )
    assert machine_code.Kernel("k", registers=168).occupancy("90a", 384) == (1, "registers")
    assert machine_code.Kernel("k", registers=33).occupancy("80", 1024) == (1, "registers")  # 40 are given
    assert machine_code.Kernel("k", 32, shared=1 << 10).occupancy("90a", 128, 110 << 10) == (
        2,
        "shared memory",
    )
    with pytest.raises(ValueError, match="sm_99"):
        of("99", 256)


@needs_nvcc
def test_errors():
    with pytest.raises(TypeError, match="expected what load or %%cuda gave, got a str"):
        machine_code.report("scale")
    kernels = inline_loader.load("scale", source=loading.scale())
    with pytest.raises(ValueError, match="expected CUDA kernels"):
        machine_code.report(kernels)
    with pytest.raises(BuildError, match="nonsense"):
        examined("__global__ void kernel() { nonsense(); }\n")
