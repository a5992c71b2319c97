"""Runs every kernel at small sizes under the sanitizers, and shows that each of them bites.

    python tests/sanitize.py cpu      AddressSanitizer and UndefinedBehaviorSanitizer, built into the CPU kernels
    python tests/sanitize.py cuda     compute-sanitizer: memcheck, racecheck, initcheck, synccheck
    python tests/sanitize.py          both, as far as this machine has what they need

Each sanitizer first gets a program with one fault planted for it, which it must report, then the kernels, about which it must
say nothing. The status is 1 if one of them fails. On a GPU PyTorch's memory cache is off, so that tensors don't share a block;
and the library's kernels are left out, except that initcheck must see what they write, and only reports about ours count.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

FOLDER = Path(__file__).resolve().parent
sys.path[:0] = [str(FOLDER.parent), str(FOLDER)]
import inline_loader  # noqa: E402
import numerics  # noqa: E402

# ----------------------------------------------------------------------------------------------------- what is sanitized


def cases(device: str):
    """A model and an input for each problem, variant and kind of arithmetic."""
    for name in numerics.SMALL:
        for variant in ("epilogue", "fused", "folded") if device == "cuda" else ("epilogue", "folded"):
            for dtype in (torch.float32, torch.float16):
                model, x = numerics.small(name, variant, device=device, dtype=dtype)
                module = numerics.models.PROBLEMS[name].ModelNew.from_eager(model.train())
                module.variant = variant
                try:
                    module.plan(x)
                except (ValueError, RuntimeError):
                    continue  # the problem has no such variant, or not in this dtype
                yield module, x


def run_kernels(device: str) -> None:
    """Forward without gradients, then with all gradients. The first calls build, side by side."""

    def run(case):
        module, x = case
        with torch.no_grad():
            module(x)
        numerics.results(module, x)

    if os.environ.get("SANITIZE_BUILD"):
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            list(pool.map(run, cases(device)))
    else:
        for case in cases(device):
            run(case)


# The faults: a launcher f(y, n) each, called with 1000 floats.
CUDA_FAULTS = {
    "memcheck": "__global__ void fault_kernel(float* y, int64_t n) { y[n + threadIdx.x] = 1; }",
    "racecheck": "__global__ void fault_kernel(float* y, int64_t n) { __shared__ float s[256]; s[threadIdx.x] = 1; y[threadIdx.x] = s[255 - threadIdx.x]; }",
    "initcheck": "__global__ void fault_kernel(float* y, int64_t n) { y[threadIdx.x] += 1; }",
    "synccheck": "__global__ void fault_kernel(float* y, int64_t n) { if (threadIdx.x % 2) __syncthreads(); y[threadIdx.x] = 1; }",
}
CPU_FAULTS = {
    "AddressSanitizer": "EXPORT void f(float* y, int64_t n) { y[n] = 1; }",
    "runtime error": "EXPORT void f(float* y, int64_t n) { y[0] = int32_t(n) << (n / 10); }",
}


def run_fault(device: str, name: str) -> None:
    source = CPU_FAULTS.get(name)
    if device == "cuda":
        source = CUDA_FAULTS[name] + "\nEXPORT void f(float* y, int64_t n, cudaStream_t stream) { fault_kernel<<<1, 256, 0, stream>>>(y, n); }"
    inline_loader.load("fault", source=source, device=device)(torch.empty(1000, device=device), 1000)
    torch.cuda.synchronize() if device == "cuda" else None


# ---------------------------------------------------------------------------------------------------------- the sanitizers

TIME_LIMIT = 300  # seconds


def script(*arguments: str, under: list[str] = (), environment: dict[str, str] | None = None) -> subprocess.CompletedProcess:
    """This script with `arguments`, in a process of its own. The status is 124 if it does not end."""
    command = ["timeout", "-k", "5", str(TIME_LIMIT), *under, sys.executable, str(Path(__file__).resolve()), *arguments]
    environment = {**os.environ, **(environment or {})}
    return subprocess.run(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace")


def judge(what: str, done: subprocess.CompletedProcess, expected: str | None, reports: list[str], start: float) -> bool:
    """Prints the verdict. `expected`: the planted fault's report; `reports`: those about our kernels."""
    good = any(expected in line for line in reports) if expected else done.returncode == 0 and not reports
    verdict = ("found" if good else "MISSED") if expected else "clean" if good else f"FAILS: status {done.returncode}, {len(reports)} reports"
    print(f"{what:45}{verdict}, {time.monotonic() - start:.0f} s", flush=True)
    if not good:
        print("\n".join(reports[:20]) or done.stdout[-4000:])
    return good


def sanitize_cpu() -> bool:
    """The kernels are built once more by a compiler that adds the checks, into a cache that goes afterwards."""
    with tempfile.TemporaryDirectory() as folder:
        compiler = Path(folder) / "c++"
        flags = "-fsanitize=address,undefined -fno-sanitize-recover=all -fno-omit-frame-pointer -g1"
        compiler.write_text(f'#!/bin/sh\nexec env -u LD_PRELOAD {os.environ.get("CXX", "c++")} {flags} "$@"\n')
        compiler.chmod(0o700)
        libraries = [_output("c++", f"-print-file-name={name}") for name in ("libasan.so", "libstdc++.so.6")]
        environment = {
            "CXX": str(compiler), "INLINE_LOADER_CACHE": f"{folder}/cache", "TORCH_DONT_CHECK_COMPILER_ABI": "1",
            "LD_PRELOAD": " ".join(libraries), "ASAN_OPTIONS": "detect_leaks=0", "CUDA_VISIBLE_DEVICES": "",
        }  # fmt: skip
        good, start = True, time.monotonic()
        for fault in CPU_FAULTS:
            done = script("run", "cpu", fault, environment=environment)
            good &= judge(f"{fault}, planted fault", done, fault, cpu_reports(done.stdout), start)
        done = script("run", "cpu", environment={**environment, "SANITIZE_BUILD": "1"})
        return judge("AddressSanitizer and UBSan: CPU kernels", done, None, cpu_reports(done.stdout), start) and good


def cpu_reports(log: str) -> list[str]:
    return re.findall(r".*(?:ERROR: |: runtime error: ).*", log)


TOOL = shutil.which("compute-sanitizer") or shutil.which("compute-sanitizer", path="/usr/local/cuda/bin")


def sanitize_cuda() -> bool:
    """Everything is built first, without a sanitizer; then all programs run at the same time."""
    start = time.monotonic()
    programs = ["", *CUDA_FAULTS]
    with ThreadPoolExecutor(len(programs)) as pool:
        built = list(pool.map(lambda fault: script("run", "cuda", *[fault][: len(fault)], environment={"SANITIZE_BUILD": "1"}), programs))
    good = judge("CUDA kernels without a sanitizer", built[0], None, [], start)
    texts = [path.read_text(encoding="utf-8") for path in inline_loader.KERNELS.glob("*.cu*")]
    kernels = sorted({kernel for text in texts for kernel in re.findall(r"\b(\w+_kernel)\(", text)} | {"fault_kernel"})

    def run(job):
        tool, fault = job
        under = [TOOL, "--tool", tool, "--print-limit", "100000"]
        under += ["--kernel-name", ",".join(f"kns={kernel}" for kernel in kernels)] if tool != "initcheck" else []
        return script("run", "cuda", *fault, under=under, environment={"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}), time.monotonic()

    jobs = [(tool, fault) for tool in CUDA_FAULTS for fault in ([tool], [])]
    with ThreadPoolExecutor(len(jobs)) as pool:
        results = list(pool.map(run, jobs))
    for (tool, fault), (done, end) in zip(jobs, results):
        what = f"{tool}, planted fault" if fault else f"{tool}: CUDA kernels"
        ran = "SUMMARY: " in done.stdout
        reports = cuda_reports(done.stdout, kernels) if ran else [f"{tool} did not run"]
        good &= judge(what, done, "fault_kernel" if fault else None, reports, start + time.monotonic() - end)
    return good


def cuda_reports(log: str, kernels: list[str]) -> list[str]:
    """compute-sanitizer's reports about our kernels: what happened, and where."""
    reports = re.split(r"\n=+ *\n", re.sub(r"^(?!=====).*\n", "", log, flags=re.M))
    lines = [" ".join(line.lstrip("= ").strip() for line in report.splitlines()[:3]) for report in reports]
    return [line for line in lines if re.search(rf"\b({'|'.join(kernels)})\b", line)]


def _output(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def main(arguments: list[str]) -> int:
    if arguments[:1] == ["run"]:
        run_fault(*arguments[1:]) if len(arguments) == 3 else run_kernels(arguments[1])
        return 0
    good = True
    if arguments in ([], ["cpu"]):
        good &= sanitize_cpu()
    if arguments == ["cuda"] or not arguments and torch.cuda.is_available() and TOOL:
        good &= sanitize_cuda()
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
