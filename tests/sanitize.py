"""Runs every kernel at small sizes under the sanitizers, and shows that each of them bites.

    python tests/sanitize.py cpu      AddressSanitizer and UndefinedBehaviorSanitizer, built into the CPU kernels
    python tests/sanitize.py cuda     compute-sanitizer: memcheck, racecheck, initcheck, synccheck
    python tests/sanitize.py          both, as far as this machine has what they need

Each sanitizer gets a program with one fault planted for it, which it must report, and the kernels, problem by problem, about
which it must say nothing. The status is 1 if one of them fails; its log is then in build/sanitize/. On a GPU PyTorch's memory
cache is off, so that tensors don't share a block; and the library's kernels are left out, except that initcheck must see what
they write: there only reports about ours count.
"""

from __future__ import annotations

import itertools
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import torch

FOLDER = Path(__file__).resolve().parent
sys.path[:0] = [str(FOLDER.parent), str(FOLDER)]
import inline_loader  # noqa: E402
import models  # noqa: E402
import numerics  # noqa: E402

LOGS = FOLDER.parent / "build" / "sanitize"
TIME_LIMIT = 300  # seconds, for each program

# ------------------------------------------------------------------------------------------- the programs: `run DEVICE NAME`

# The faults: a launcher f(y, n) each, called with 1000 floats.
FAULTS = {
    "cpu": {
        "AddressSanitizer": "EXPORT void f(float* y, int64_t n) { y[n] = 1; }",
        "UndefinedBehaviorSanitizer": "EXPORT void f(float* y, int64_t n) { y[0] = int32_t(n) << (n / 10); }",
    },
    "cuda": {
        "memcheck": "y[n + threadIdx.x] = 1;",
        "racecheck": "__shared__ float s[256]; s[threadIdx.x] = 1; y[threadIdx.x] = s[255 - threadIdx.x];",
        "initcheck": "y[threadIdx.x] += 1;",
        "synccheck": "if (threadIdx.x % 2) __syncthreads(); y[threadIdx.x] = 1;",
    },
}
CUDA_FAULT = """__global__ void fault_kernel(float* y, int64_t n) {{ {} }}
EXPORT void f(float* y, int64_t n, cudaStream_t stream) {{ fault_kernel<<<1, 256, 0, stream>>>(y, n); }}"""


def run_fault(device: str, name: str) -> None:
    source = FAULTS[device][name] if device == "cpu" else CUDA_FAULT.format(FAULTS[device][name])
    inline_loader.load("fault", source=source, device=device)(torch.empty(1000, device=device), 1000)
    torch.cuda.synchronize() if device == "cuda" else None


def run_kernels(device: str, name: str) -> None:
    """Every variant of a problem, in float32 and float16: forward without gradients, then with all of them."""
    for variant in models.PROBLEMS[name].variants[1:]:
        sizes = [(*numerics.sizes_for(variant)[name], True)]  # the last: with gradients?
        sizes += [(*numerics.WINOGRAD[name], True)] if device == "cpu" and name in numerics.WINOGRAD else []
        if variant == "fused" and name == numerics.INSTANCE_NORM and device == "cuda":
            sizes.append((*numerics.HELD, False))  # of so many samples the library's take minutes under initcheck
        for (arguments, shape, trains), dtype in itertools.product(sizes, (torch.float32, torch.float16)):
            model, x = numerics.build(name, arguments, device=device, dtype=dtype), numerics.random_input(shape, device=device, dtype=dtype)
            module = models.PROBLEMS[name].ModelNew.from_eager(model.train())
            module.variant = variant
            try:
                module.plan(x)
            except RuntimeError:
                continue  # not in this dtype
            print(variant, dtype, flush=True)
            for part in (x, x[..., 1:].contiguous()):  # odd and even rows, of which the second may go another way
                with torch.no_grad():
                    module(part)
                if trains:
                    numerics.results(module, part)
    torch.cuda.synchronize() if device == "cuda" else None


# ---------------------------------------------------------------------------------------------------------- the sanitizers


class Job(NamedTuple):
    """A program under a sanitizer. `expected` stands in the report of its planted fault; None: nothing may be reported."""

    title: str
    device: str
    program: str
    expected: str | None = None
    under: tuple[str, ...] = ()
    environment: dict[str, str] = {}
    summary: str = ""  # stands in the log if the sanitizer ran


def run_jobs(jobs: list[Job], reports_in) -> bool:
    """Runs all side by side and prints a line for each. `reports_in(log)` gives the reports that count."""

    def run(job):
        start = time.monotonic()
        script = (sys.executable, str(Path(__file__).resolve()), "run", job.device, job.program)
        command = ["timeout", "-k", "5", str(TIME_LIMIT), *job.under, *script]
        environment = {**os.environ, **job.environment}
        done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace")
        return done, time.monotonic() - start

    good = True
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for job, (done, seconds) in zip(jobs, pool.map(run, jobs)):
            reports, ran = reports_in(done.stdout), job.summary in done.stdout
            if job.expected:
                verdict = "found" if ran and any(job.expected in report for report in reports) else "MISSED"
            else:
                verdict = "clean" if ran and done.returncode == 0 and not reports else f"FAILS, status {done.returncode}"
            print(f"{job.title:65}{verdict}, {seconds:.0f} s", flush=True)
            if verdict not in ("clean", "found"):
                good = False
                LOGS.mkdir(parents=True, exist_ok=True)
                (LOGS / f"{job.title.replace(', ', '-').replace(' ', '_')}.log").write_text(done.stdout)
                lines = [line for line in done.stdout.splitlines() if not line.startswith("frame #")]
                print("\n".join(reports[:10] or lines[-20:]))
    return good


def sanitize_cpu() -> bool:
    """The kernels are built once more by a compiler that adds the checks, into a cache that goes afterwards."""
    with tempfile.TemporaryDirectory() as folder:
        compiler = Path(folder) / "c++"
        flags = "-fsanitize=address,undefined -fno-sanitize-recover=all -fno-omit-frame-pointer -g1"
        compiler.write_text(f'#!/bin/sh\nexec env -u LD_PRELOAD {os.environ.get("CXX", "c++")} {flags} "$@"\n')
        compiler.chmod(0o700)
        find = ("c++", "-print-file-name=libasan.so"), ("c++", "-print-file-name=libstdc++.so.6")
        libraries = [subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip() for command in find]
        environment = {
            "CXX": str(compiler), "INLINE_LOADER_CACHE": f"{folder}/cache", "TORCH_DONT_CHECK_COMPILER_ABI": "1",
            "LD_PRELOAD": " ".join(libraries), "ASAN_OPTIONS": "detect_leaks=0", "CUDA_VISIBLE_DEVICES": "",
        }  # fmt: skip
        expected = {"AddressSanitizer": "heap-buffer-overflow", "UndefinedBehaviorSanitizer": "shift exponent 100 is too large"}
        jobs = [Job(f"{tool}, planted fault", "cpu", tool, expected[tool], (), environment) for tool in FAULTS["cpu"]]
        jobs += [Job(f"CPU sanitizers, {name}", "cpu", name, None, (), environment) for name in models.PROBLEMS]
        return run_jobs(jobs, lambda log: re.findall(r".*(?:ERROR: |: runtime error: ).*", log))


TOOL = shutil.which("compute-sanitizer") or shutil.which("compute-sanitizer", path="/usr/local/cuda/bin")


def sanitize_cuda() -> bool:
    """Everything is built first, without a sanitizer. racecheck runs without cuDNN, because it fails in that library's backward
    convolution in 3D, also where it is told to look at no kernel at all (CUDA 13.0)."""
    good = run_jobs([Job(f"no sanitizer, {name}", "cuda", name) for name in [*FAULTS["cuda"], *models.PROBLEMS]], lambda log: [])
    texts = [path.read_text(encoding="utf-8") for path in inline_loader.KERNELS.glob("*.cu*")]
    kernels = sorted({kernel for text in texts for kernel in re.findall(r"\b(\w+_kernel)\(", text)} | {"fault_kernel"})
    chosen = "--kernel-name", ",".join(f"kns={kernel}" for kernel in kernels)
    jobs = []
    for tool in FAULTS["cuda"]:
        environment = {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1", **({"SANITIZE_WITHOUT_CUDNN": "1"} if tool == "racecheck" else {})}
        under = (TOOL, "--tool", tool, "--print-limit", "100000", *(chosen if tool != "initcheck" else ()))
        for name in (tool, *models.PROBLEMS):
            title, expected = (f"{tool}, planted fault", "fault_kernel") if name == tool else (f"{tool}, {name}", None)
            jobs.append(Job(title, "cuda", name, expected, under, environment, "SUMMARY: "))
    return run_jobs(jobs, lambda log: cuda_reports(log, kernels)) and good


def cuda_reports(log: str, kernels: list[str]) -> list[str]:
    """compute-sanitizer's reports about our kernels: what happened, and where."""
    reports = re.split(r"\n=+ *\n", re.sub(r"^(?!=====).*\n", "", log, flags=re.M))
    lines = [" ".join(line.lstrip("= ").strip() for line in report.splitlines()[:4]) for report in reports]
    return [line for line in lines if re.search(rf"\b({'|'.join(kernels)})\b", line)]


def main(arguments: list[str]) -> int:
    if arguments[:1] == ["run"]:
        device, name = arguments[1:]
        torch.backends.cudnn.enabled = "SANITIZE_WITHOUT_CUDNN" not in os.environ
        run_fault(device, name) if name in FAULTS[device] else run_kernels(device, name)
        return 0
    good = True
    if arguments in ([], ["cpu"]):
        good &= sanitize_cpu()
    if arguments == ["cuda"] or not arguments and torch.cuda.is_available() and TOOL:
        good &= sanitize_cuda()
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
