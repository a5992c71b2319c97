"""Runs every kernel at small sizes under the sanitizers, and shows that each of them bites.

    python tests/sanitize.py cpu      AddressSanitizer and UndefinedBehaviorSanitizer, built into the CPU kernels
    python tests/sanitize.py cuda     compute-sanitizer: memcheck, racecheck, initcheck, synccheck
    python tests/sanitize.py          both, as far as this machine has what they need

Each sanitizer gets a program with one fault planted for it, which it must report, and the kernels, problem by problem, about
which it must say nothing; a line says how often each variant ran. The closing line counts the verdicts. The status is 1 if one of
them is a failure; its log is then in build/sanitize/. On a GPU PyTorch's memory cache is off, so that tensors don't share a block;
and the library's kernels are left out, except that initcheck must see what they write: there only reports about ours count.
"""

from __future__ import annotations

import itertools
import os
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
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


class Call(NamedTuple):
    """A way to call a variant: the model's arguments, x's shape and dtype, and what is special about it. alone: forward without gradients,
    too, which is a build of its own on a CPU."""

    arguments: tuple
    shape: tuple
    dtype: torch.dtype = torch.float32
    gradients: str = (
        "ours"  # "all"; "ours": but for the convolution's, which the library takes its time for; "none"
    )
    lay_out: Callable[[torch.Tensor], torch.Tensor] = torch.Tensor.contiguous
    autocast: bool = False
    alone: bool = True


# The pool problem's rows past one tile of its fused kernel, which has 128 columns of the convolution and of what its filter sees beside them.
TWO_TILES = numerics.size_of(numerics.POOL, "fused")._replace(shape=(2, 5, 7, 140))

# What only one device has: on a CPU in float32; fused in all DTYPES, and without gradients, because of so much the library's take minutes.
ONLY_CPU = {name: [known.winograd] for name, known in numerics.KNOWN.items() if known.winograd}
ONLY_CPU[numerics.MIN_ADD] += [numerics.WINOGRAD_DX]
ONLY_FUSED = {
    numerics.INSTANCE_NORM: numerics.HELD,
    numerics.MIN_ADD: numerics.WGMMA,
    numerics.POOL: TWO_TILES,
}
DTYPES = (torch.float32, torch.float16)  # that every variant must have run in


def calls(device: str, name: str, variant: str) -> Iterator[Call]:
    """All that a variant is run on. Rows are odd and even, because vectors may fit into one and not into the other. A CPU, which builds
    for each dtype and each phase, has forward alone in float32, and bfloat16 under autocast."""
    arguments, shape, _ = numerics.size_of(name, variant)
    on_cpu = device == "cpu"
    for dtype in DTYPES:
        odd, even = both_rows(arguments, shape, dtype)
        for call in (odd._replace(gradients="all"), even, even._replace(lay_out=one_element_on)):
            yield call._replace(alone=not on_cpu or dtype == torch.float32)
    if not on_cpu:
        yield Call(arguments, shape, torch.bfloat16)
    yield Call(arguments, shape, lay_out=channels_last)
    yield Call(arguments, shape, autocast=True, alone=not on_cpu)
    for arguments, shape, _ in ONLY_CPU.get(name, []) if on_cpu else []:
        for call in both_rows(arguments, shape, torch.float32, "all"):
            yield call._replace(alone=name == numerics.POOL)  # by rows of windows, which others don't have
    if variant == "fused" and name in ONLY_FUSED:
        for dtype in DTYPES:
            yield from both_rows(*ONLY_FUSED[name][:2], dtype, "none")


def both_rows(arguments: tuple, shape: tuple, *options) -> Iterator[Call]:
    for columns in (shape[-1], shape[-1] - 1):
        yield Call(arguments, (*shape[:-1], columns), *options)


def one_element_on(x: torch.Tensor) -> torch.Tensor:
    """x behind one element of its storage, so that no vector is aligned."""
    return x.new_empty(x.numel() + 1)[1:].view(x.shape).copy_(x)


def channels_last(x: torch.Tensor) -> torch.Tensor:
    return x.contiguous(memory_format=torch.channels_last if x.dim() == 4 else torch.channels_last_3d)


def tie(model: torch.nn.Module) -> None:
    """Whole channels of the dropout problem at min_value, where alone it has gradients: in the first group, but for its first channel, because the
    convolution is zero; and the next group's first because its slope is zero."""
    model.min_value = -0.3
    channels = model.norm.num_channels // model.norm.num_groups
    with torch.no_grad():
        model.conv.weight[:channels], model.conv.bias[:channels], model.norm.weight[channels] = 0, 0, 0
        model.norm.bias[1 : channels + 1] = model.min_value


def run_call(device: str, name: str, variant: str, call: Call) -> None:
    """Forward on random parameters, where it is to run alone, then with gradients, of which some must not be zero."""
    options = dict(device=device, dtype=call.dtype)
    model, x = (
        numerics.build(name, call.arguments, **options),
        call.lay_out(numerics.random_input(call.shape, **options)),
    )
    module = models.PROBLEMS[name].ModelNew.from_eager(model.train())
    module.variant = variant
    with torch.autocast(device, enabled=call.autocast):
        with torch.no_grad():
            if call.alone:
                module(x)
                assert_runs(variant, module.plan(x))
        if call.gradients == "none":
            return
        tie(module) if name == numerics.DROPOUT else None
        for leaf in (x, model.conv.weight):
            leaf.requires_grad_(call.gradients == "all")
        y = module(x)
        assert_runs(variant, module.plan(x))
        y.backward(torch.ones_like(y))
    if not any(p.grad.any() for p in model.parameters() if p.requires_grad):
        raise RuntimeError("all gradients are zero, so their kernels may have had nothing to do")


def assert_runs(variant: str, plan) -> None:
    if plan.variant != variant:
        raise RuntimeError(f"expected {variant} to run, not {plan}")


def run_kernels(device: str, name: str) -> None:
    """Every variant of a problem in all `calls`. None may be refused; what ran is counted in the closing line."""
    variants = [
        variant for variant in models.PROBLEMS[name].variants[1:] if variant != "fused" or runs_fused(device)
    ]
    ran = Counter()
    for variant in variants:
        for call in calls(device, name, variant):
            print(variant, call, flush=True)
            run_call(device, name, variant, call)
            ran[variant, call.dtype] += 1
    torch.cuda.synchronize() if device == "cuda" else None
    if missing := [pair for pair in itertools.product(variants, DTYPES) if not ran[pair]]:
        raise RuntimeError(f"did not run: {missing}")
    print(
        "ran",
        ", ".join(
            f"{variant} {sum(ran[pair] for pair in ran if pair[0] == variant)}" for variant in variants
        ),
    )


def runs_fused(device: str) -> bool:
    """On a CPU it is epilogue once more."""
    return device == "cuda" and torch.cuda.get_device_capability() >= (8, 0)


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

    @property
    def verdict_of_silence(self) -> str:
        return "clean" if self.under or self.environment else "runs"


def run_jobs(jobs: list[Job], reports_in) -> Counter:
    """Runs all side by side, prints a line for each, and counts "clean", "runs", "found" and "failed". `reports_in(log)` gives the
    reports that matter. A program's first job builds what it runs: the others of that program wait for it."""
    places, built = threading.Semaphore(os.cpu_count()), {job.program: threading.Event() for job in jobs}
    first = {job.program: job for job in reversed(jobs)}

    def run(job):
        if job is not first[job.program]:
            built[job.program].wait()
        try:
            with places:
                return run_alone(job)
        finally:
            built[job.program].set()

    def run_alone(job):
        start = time.monotonic()
        script = (sys.executable, str(Path(__file__).resolve()), "run", job.device, job.program)
        command = ["timeout", "-k", "5", str(TIME_LIMIT), *job.under, *script]
        environment = {**os.environ, **job.environment}
        done = subprocess.run(
            command,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
        )
        return done, time.monotonic() - start

    count = Counter()
    with ThreadPoolExecutor(len(jobs)) as pool:
        for job, (done, seconds) in zip(jobs, pool.map(run, jobs)):
            reports, ran = reports_in(done.stdout), job.summary in done.stdout
            if job.expected:
                verdict = "found" if ran and any(job.expected in report for report in reports) else "MISSED"
            else:
                verdict = (
                    job.verdict_of_silence
                    if ran and done.returncode == 0 and not reports
                    else f"FAILS, status {done.returncode}"
                )
            what = re.findall(r"^ran .*", done.stdout, re.M)
            print(f"{job.title:65}{', '.join([verdict, f'{seconds:.0f} s', *what])}", flush=True)
            good = verdict in ("clean", "runs", "found")
            count[verdict if good else "failed"] += 1
            if not good:
                LOGS.mkdir(parents=True, exist_ok=True)
                (LOGS / f"{job.title.replace(', ', '-').replace(' ', '_')}.log").write_text(done.stdout)
                lines = [line for line in done.stdout.splitlines() if not line.startswith("frame #")]
                print("\n".join(reports[:10] or lines[-20:]))
    return count


def sanitize_cpu() -> Counter:
    """The kernels are built once more by a compiler that adds the checks, into a cache that goes afterwards. It optimises little, which
    takes less than half the time, and leaves more accesses to be checked."""
    with tempfile.TemporaryDirectory() as folder:
        compiler = Path(folder) / "c++"
        flags = "-fsanitize=address,undefined -fno-sanitize-recover=all -fno-omit-frame-pointer -g1"
        compiler.write_text(
            f'#!/bin/sh\nexec env -u LD_PRELOAD {os.environ.get("CXX", "c++")} {flags} "$@" -O1\n'
        )
        compiler.chmod(0o700)
        find = ("c++", "-print-file-name=libasan.so"), ("c++", "-print-file-name=libstdc++.so.6")
        libraries = [
            subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
            for command in find
        ]
        environment = {
            "CXX": str(compiler), "INLINE_LOADER_CACHE": f"{folder}/cache", "TORCH_DONT_CHECK_COMPILER_ABI": "1",
            "LD_PRELOAD": " ".join(libraries), "ASAN_OPTIONS": "detect_leaks=0", "CUDA_VISIBLE_DEVICES": "",
        }  # fmt: skip
        expected = {
            "AddressSanitizer": "heap-buffer-overflow",
            "UndefinedBehaviorSanitizer": "shift exponent 100 is too large",
        }
        jobs = [
            Job(f"{tool}, planted fault", "cpu", tool, expected[tool], (), environment)
            for tool in FAULTS["cpu"]
        ]
        jobs += [
            Job(f"CPU sanitizers, {name}", "cpu", name, None, (), environment) for name in models.PROBLEMS
        ]
        return run_jobs(jobs, lambda log: re.findall(r".*(?:ERROR: |: runtime error: ).*", log))


TOOL = shutil.which("compute-sanitizer") or shutil.which("compute-sanitizer", path="/usr/local/cuda/bin")


def sanitize_cuda() -> Counter:
    """Every program runs without a sanitizer first. racecheck runs without cuDNN, because it fails in that library's backward
    convolution in 3D, also where it is told to look at no kernel at all (CUDA 13.0)."""
    jobs = [Job(f"no sanitizer, {name}", "cuda", name) for name in [*models.PROBLEMS, *FAULTS["cuda"]]]
    texts = [path.read_text(encoding="utf-8") for path in inline_loader.KERNELS.rglob("*.cu*")]
    kernels = sorted(
        {kernel for text in texts for kernel in re.findall(r"\b(\w+_kernel)\(", text)} | {"fault_kernel"}
    )
    chosen = "--kernel-name", ",".join(f"kns={kernel}" for kernel in kernels)
    for tool in FAULTS["cuda"]:
        environment = {
            "PYTORCH_NO_CUDA_MEMORY_CACHING": "1",
            **({"SANITIZE_WITHOUT_CUDNN": "1"} if tool == "racecheck" else {}),
        }
        under = (TOOL, "--tool", tool, "--print-limit", "100000", *(chosen if tool != "initcheck" else ()))
        for name in (tool, *models.PROBLEMS):
            title, expected = (
                (f"{tool}, planted fault", "fault_kernel") if name == tool else (f"{tool}, {name}", None)
            )
            jobs.append(Job(title, "cuda", name, expected, under, environment, "SUMMARY: "))
    return run_jobs(jobs, lambda log: cuda_reports(log, kernels))


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
    count = Counter()
    if arguments in ([], ["cpu"]):
        count += sanitize_cpu()
    if arguments == ["cuda"] or not arguments and torch.cuda.is_available() and TOOL:
        count += sanitize_cuda()
    print(", ".join(f"{count[verdict]} {verdict}" for verdict in ("clean", "found", "failed")))
    return 1 if count["failed"] else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
