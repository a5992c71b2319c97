"""How long the loader takes, against the usual load_inline way of the same kernels, a GPU's composed ones and those that the engine writes
for a CPU: one run, one table, one JSON file.

    python benchmarks/loader.py [NAME ...] [--device cpu|cuda] [--repeats 3] [--json FILE]

cold      empty build folder, compilers and headers in the page cache. `usual` is what most people write:
          `#include <torch/extension.h>` in both files, a C++ function of tensors per launcher, `functions=[...]`.
          `first` has an empty cache; `later` finds there what all builds share. They alternate, so that all meet the same machine.
warm      a fresh process that finds the build in the cache: `load` alone, beside `import torch` alone.
edit      a cell of 30 lines, %%cpp or %%cuda, in a process that has run it: from an edit to the result of a call.
in use    a later `load` in the same process, and one call of an operator through it, beside `x + 1`.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
import types
from datetime import datetime, timezone
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402

import inline_loader  # noqa: E402
import models  # noqa: E402
from inline_kernels.loader import units  # noqa: E402

SCALE = """
EXPORT void scale(float* y, const float* x, double a, int64_t n) {
  host::parallel_for(n, 1024, [=](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; i++) y[i] = x[i] * float(a);
  });
}
"""
CELL = {
    "cpu": """
// Softmax of each row: y[i] = exp(x[i] - max) / sum, times a factor that is edited.
#include <algorithm>
#include <cmath>

constexpr float kFactor = {};

static float largest(const float* x, int64_t columns) {{
  float value = x[0];
  for (int64_t i = 1; i < columns; i++) value = std::max(value, x[i]);
  return value;
}}

static float exponentials(float* y, const float* x, float shift, int64_t columns) {{
  float sum = 0;
  for (int64_t i = 0; i < columns; i++) {{
    y[i] = std::exp(x[i] - shift);
    sum += y[i];
  }}
  return sum;
}}

EXPORT void softmax(float* y, const float* x, int64_t rows, int64_t columns) {{
  host::parallel_for(rows, 1, [=](int64_t begin, int64_t end) {{
    for (int64_t row = begin; row < end; row++) {{
      const float* from = x + row * columns;
      float* to = y + row * columns;
      const float sum = exponentials(to, from, largest(from, columns), columns);
      for (int64_t i = 0; i < columns; i++) to[i] *= kFactor / sum;
    }}
  }});
}}
""",
    "cuda": """
// Softmax of each row, one block a row: y[i] = exp(x[i] - max) / sum, times a factor that is edited.
constexpr int kThreads = 256;
constexpr float kFactor = {};

template <class Merge> __device__ float merged(float value, Merge merge) {{
  __shared__ float of_warps[kThreads / 32];
  for (int offset = 16; offset > 0; offset /= 2) value = merge(value, __shfl_xor_sync(~0u, value, offset));
  __syncthreads();
  if (threadIdx.x % 32 == 0) of_warps[threadIdx.x / 32] = value;
  __syncthreads();
  value = of_warps[0];
  for (int i = 1; i < kThreads / 32; i++) value = merge(value, of_warps[i]);
  return value;
}}

__global__ void softmax_kernel(float* y, const float* x, int64_t columns) {{
  x += blockIdx.x * columns, y += blockIdx.x * columns;
  float largest = x[0], sum = 0;
  for (int64_t i = threadIdx.x; i < columns; i += kThreads) largest = fmaxf(largest, x[i]);
  largest = merged(largest, [](float a, float b) {{ return fmaxf(a, b); }});
  for (int64_t i = threadIdx.x; i < columns; i += kThreads) sum += expf(x[i] - largest);
  sum = merged(sum, [](float a, float b) {{ return a + b; }});
  for (int64_t i = threadIdx.x; i < columns; i += kThreads) y[i] = expf(x[i] - largest) * kFactor / sum;
}}

EXPORT void softmax(float* y, const float* x, int64_t rows, int64_t columns, cudaStream_t stream) {{
  softmax_kernel<<<rows, kThreads, 0, stream>>>(y, x, columns);
}}
""",
}
# For parallel_for alone.
HOST = """#include "host/pytorch.h"
#include "core/scalar.h"
static const bool ready = (inline_loader::host = &inline_loader::pytorch);
"""
PROGRAM = {
    "ours": """
import sys, time, torch
sys.path.insert(0, {root!r})
start = time.perf_counter()
import inline_loader
inline_loader.load(**{request!r})
print("seconds", time.perf_counter() - start)
""",
    "shared": """
import sys
sys.path.insert(0, {root!r})
import inline_loader
inline_loader._host_side({device!r})
print("seconds 0")
""",
    "usual": """
import sys, time, torch
sys.path[:0] = [{root!r}, {root!r} + "/benchmarks"]
import loader
arguments = loader.usual({request!r})
start = time.perf_counter()
from torch.utils.cpp_extension import load_inline
load_inline(build_directory={folder!r}, **arguments)
print("seconds", time.perf_counter() - start)
""",
}


def request_of(name: str, device: str) -> dict:
    """What inline_loader.load takes for a training step's kernels."""
    if device == "cuda":
        text = (inline_loader.KERNELS / f"{name}.cu").read_text(encoding="utf-8")
    else:
        problem = models.PROBLEMS[name]
        text = problem.get_model().source(*problem.get_inputs(batch_size=1))
    return {"name": name, "source": text, "device": device}


def usual(request: dict) -> dict:
    """load_inline's arguments for the same kernels, written the usual way."""
    name, device = request["name"], request["device"]
    unit = units.unit_of(name, request["source"], device, {})
    declarations, functions = [], []
    for launcher in unit.launchers:
        parameters = [f"{'torch::Tensor' if p.tensor else p.ctype} {p.name}" for p in launcher.parameters]
        arguments = [f"({p.ctype}*){p.name}.data_ptr()" if p.tensor else p.name for p in launcher.parameters]
        if launcher.stream:
            arguments.append("at::cuda::getCurrentCUDAStream()")
        signature = f"void {launcher.name}_usual({', '.join(parameters)})"
        declarations.append(f"{signature};")
        functions.append(f"{signature} {{ {launcher.name}({', '.join(arguments)}); }}")
    host = HOST if device == "cpu" else ""
    source = "\n".join([host, request["source"], *functions])
    names = [f"{launcher.name}_usual" for launcher in unit.launchers]
    common = {
        "name": f"usual_{name}",
        "functions": names,
        "extra_include_paths": [str(inline_loader.KERNELS)],
    }
    if device == "cpu":  # on ATen, as whoever includes torch/extension.h has it
        return {**common, "cpp_sources": [source], "extra_cflags": [*unit.cflags, "-DSTABLE_ABI=0"]}
    return {
        **common,
        "cpp_sources": ["\n".join(declarations)],
        "cuda_sources": ["#include <ATen/cuda/CUDAContext.h>\n" + source],
        "extra_cuda_cflags": [flag for flag in unit.cuda_cflags if not flag.startswith("--threads")],
    }


def in_fresh_process(program: str, **environment: str) -> float:
    """The seconds that `program` prints."""
    result = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, env={**os.environ, **environment}
    )
    if result.returncode:
        sys.exit(result.stderr)
    return float(result.stdout.split("seconds")[-1])


def cold(request: dict, *ways: str) -> float:
    """Seconds that the last of `ways` takes from an empty folder, after the others."""
    with tempfile.TemporaryDirectory() as folder:
        programs = [
            PROGRAM[way].format(root=str(ROOT), request=request, folder=folder, **request) for way in ways
        ]
        return [
            in_fresh_process(each, INLINE_LOADER_CACHE=os.path.join(folder, "cache")) for each in programs
        ][-1]


def warm(request: dict, repeats: int) -> dict[str, float]:
    program = PROGRAM["ours"].format(root=str(ROOT), request=request)
    importing = "import time\nstart = time.perf_counter()\nimport torch\nprint('seconds', time.perf_counter() - start)"
    with tempfile.TemporaryDirectory() as folder:
        cache = {"INLINE_LOADER_CACHE": os.path.join(folder, "cache")}
        in_fresh_process(program, **cache)
        return {
            "warm_s": statistics.median(in_fresh_process(program, **cache) for _ in range(repeats)),
            "import_torch_s": statistics.median(in_fresh_process(importing) for _ in range(repeats)),
        }


def microseconds(call, count: int = 20000) -> float:
    rounds = []
    for _ in range(5):
        start = time.perf_counter()
        for _ in range(count // 5):
            call()
        rounds.append((time.perf_counter() - start) / (count // 5) * 1e6)
    return min(rounds)


def in_use() -> dict[str, float]:
    with tempfile.TemporaryDirectory() as folder:
        os.environ["INLINE_LOADER_CACHE"] = os.path.join(folder, "cache")
        kernels = inline_loader.load("scale", source=SCALE)
        x = torch.ones(8)
        y = torch.empty_like(x)
        return {
            "load_us": microseconds(lambda: inline_loader.load("scale", source=SCALE)),
            "call_us": microseconds(lambda: kernels.scale(y, x, 2.0, 8)),
            "x_plus_1_us": microseconds(lambda: x + 1),
        }


def edit_to_run(device: str, repeats: int) -> list[float]:
    """Seconds from each edit of a cell to what it computes."""

    magics, shell = {}, types.SimpleNamespace(user_ns={})
    shell.register_magic_function = lambda function, kind, name: magics.update({name: function})
    shell.events = types.SimpleNamespace(register=lambda *_: None)
    shell.push = shell.user_ns.update
    inline_loader.load_ipython_extension(shell)
    x = torch.randn(64, 1000, device=device)
    y, seconds = torch.empty_like(x), []
    with tempfile.TemporaryDirectory() as folder:
        os.environ["INLINE_LOADER_CACHE"] = os.path.join(folder, "cache")
        for factor in range(repeats + 1):
            start = time.perf_counter()
            magics["cpp" if device == "cpu" else "cuda"]("softmax", CELL[device].format(f"{factor}.0f"))
            shell.user_ns["softmax"](y, x, *x.shape)
            total = y.sum().item()
            seconds.append(time.perf_counter() - start)
            assert abs(total - factor * len(x)) < 1e-2, total
    return seconds[1:]


def commit() -> str:
    result = subprocess.run(
        ["git", "-C", str(ROOT), "describe", "--always", "--dirty"], capture_output=True, text=True
    )
    return result.stdout.strip() or "unknown"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*")
    parser.add_argument(
        "--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu"
    )
    parser.add_argument("--repeats", type=int, default=3, help="of each cold build; the median counts")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    report = {
        "device": torch.cuda.get_device_name()
        if arguments.device == "cuda"
        else platform.processor() or platform.machine(),
        "processors": os.cpu_count(),
        "torch": torch.__version__,
        "commit": commit(),
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "rows": [],
        **in_use(),
        "all_edit_s": edit_to_run(arguments.device, 2 * arguments.repeats),
    }
    report["edit_s"] = statistics.median(report["all_edit_s"])
    print(
        f"{'':50} {'usual':>8} {'first':>8} {'ratio':>7} {'later':>8} {'ratio':>7} {'warm':>8}   (import torch)"
    )
    for name in arguments.names or models.PROBLEMS:
        request = request_of(name, arguments.device)
        ways = {"usual": ["usual"], "first": ["ours"], "later": ["shared", "ours"]}
        seconds: dict[str, list[float]] = {way: [] for way in ways}
        for _ in range(arguments.repeats):
            for way, programs in ways.items():
                seconds[way].append(cold(request, *programs))
        row = {"name": name, "device": arguments.device}
        for way, times in seconds.items():
            row |= {f"{way}_s": statistics.median(times), f"all_{way}_s": times}
        row |= {f"{way}_ratio": row["usual_s"] / row[f"{way}_s"] for way in ("first", "later")}
        row.update(warm(request, arguments.repeats))
        report["rows"].append(row)
        print(
            "{name:50} {usual_s:7.1f}s {first_s:7.2f}s {first_ratio:6.1f}x {later_s:7.2f}s {later_ratio:6.1f}x {warm_s:7.3f}s   "
            "({import_torch_s:.2f}s)".format(**row),
            flush=True,
        )
    print("edit to run: {edit_s:.2f} s".format(**report))
    print(
        "in use: load {load_us:.2f} us, a call {call_us:.1f} us, x + 1 {x_plus_1_us:.1f} us".format(**report)
    )
    if arguments.json:
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
