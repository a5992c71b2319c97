"""Where the time of a variant goes: its GPU kernels one by one, at the default sizes. One run, one table, one JSON file.

    python benchmarks/explain.py [NAME ...] [--variants eager,epilogue,fused] [--phase forward,train_dx] [--json FILE]

Per variant and phase: ms, and of forward the share of the floor that compare.py counts (bytes in and out once, operations once).
Per kernel: µs (median; each call begins with a cold L2 cache), registers of a thread, KB of shared memory of a block, as the driver launched it;
and of ours the bytes of stack of a thread, which is where spilled registers go, from the machine code.
Where Nsight Compute (`ncu`) may read the GPU's counters: MB read from and written to memory, TB/s, and how much of the time
the tensor cores were active.
"""

from __future__ import annotations

import argparse
import csv
import io
import itertools
import json
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402
from torch.utils.cpp_extension import CUDA_HOME  # noqa: E402

import models  # noqa: E402
from inline_kernels.bench import compare, records, timing  # noqa: E402

CALLS = 9
VARIANTS = "eager,epilogue,fused"
PHASES = "forward,train_dx"
COUNTERS = {
    "read_mb": "dram__bytes_read.sum",
    "written_mb": "dram__bytes_write.sum",
    "tensor_percent": "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_elapsed",
    "counted_us": "gpu__time_duration.sum",
}
UNITS = {
    "byte": 1e-6,
    "Kbyte": 1e-3,
    "Mbyte": 1.0,
    "Gbyte": 1e3,
    "ns": 1e-3,
    "us": 1.0,
    "ms": 1e3,
    "nsecond": 1e-3,
    "usecond": 1.0,
    "%": 1.0,
}


def call_of(name: str, variant: str, phase: str) -> timing.Call:
    """A call of `variant`, with a random input and, for a training step, a random gradient of its output, on the GPU."""
    contest = compare.contest_of(name, device="cuda")
    model, inputs = contest.model(), contest.inputs()
    with torch.no_grad():
        y = model(*inputs)
    g = torch.randn_like(y) if compare.has_backward(phase) else None
    return timing.Call.of(contest.contestant(variant, model), inputs, phase, g)


def short(kernel: str) -> str:
    """A kernel's name without its namespaces, return type and arguments."""
    name = re.sub(r"\(anonymous namespace\)::|<unnamed>::|^void ", "", kernel)
    name = re.split(r"[<(]", name)[0].split("::")[-1]
    return name.split(" ")[-1][:60]


def profile(call) -> list[dict]:
    """The kernels of one call, in order, from torch's profiler: name, us, registers, shared_kb, blocks, threads."""
    cache = torch.empty(1 << 30, dtype=torch.int8, device="cuda")
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    ) as record:
        for _ in range(CALLS):
            cache.zero_()
            torch.cuda.synchronize()
            with torch.profiler.record_function(
                "one call"
            ):  # a backward pass has a thread of its own: by time
                call()
                torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        record.export_chrome_trace(f"{folder}/trace.json")
        events = json.loads(Path(f"{folder}/trace.json").read_text())["traceEvents"]
    spans = [
        (e["ts"], e["ts"] + e["dur"])
        for e in events
        if e.get("cat") == "user_annotation" and e["name"] == "one call"
    ]
    kernels = sorted(
        (e for e in events if e.get("cat") in ("kernel", "gpu_memset", "gpu_memcpy")), key=lambda e: e["ts"]
    )
    calls = [[e for e in kernels if start <= e["ts"] < end] for start, end in sorted(spans)]
    calls = [each for each in calls if len(each) == len(calls[-1])]
    rows = []
    for same in zip(*calls):
        arguments = same[-1]["args"]
        rows.append({
            "kernel": short(same[-1]["name"]),
            "us": statistics.median(e["dur"] for e in same),
            "registers": arguments.get("registers per thread"),
            "shared_kb": round(arguments.get("shared memory", 0) / 1024, 1),
            "blocks": _product(arguments.get("grid")),
            "threads": _product(arguments.get("block")),
        })  # fmt: skip
    return rows


def _product(extents: list[int] | None) -> int | None:
    return extents and extents[0] * extents[1] * extents[2]


def stacks(cache: Path) -> dict[str, int]:
    """Bytes of stack of each of our kernels that were built in `cache`, the largest of its instances. None are known without cuobjdump."""
    path = os.pathsep.join([os.environ["PATH"], f"{CUDA_HOME}/bin"])
    tools = [shutil.which(tool, path=path) for tool in ("cuobjdump", "c++filt")]
    found: dict[str, int] = {}
    for library in cache.rglob("*.so") if all(tools) else ():
        dump = subprocess.run(
            [tools[0], "--dump-resource-usage", library], capture_output=True, text=True
        ).stdout
        plain = subprocess.run(tools[1], input=dump, capture_output=True, text=True).stdout
        for kernel, stack in re.findall(r"Function ([^\n]+):\n.*?STACK:(\d+)", plain):
            found[short(kernel)] = max(int(stack), found.get(short(kernel), 0))
    return found


def counters(name: str, variant: str, phase: str) -> list[dict] | str:
    """What Nsight Compute counts in one call, kernel by kernel in order; or why it can't."""
    tool = shutil.which("ncu")
    if tool is None:
        return "ncu is not on the PATH"
    metrics = ",".join(COUNTERS.values())
    command = [
        tool,
        "--csv",
        "--page",
        "raw",
        "--profile-from-start",
        "off",
        "--clock-control",
        "none",
        "--cache-control",
        "none",
    ]
    command += ["--metrics", metrics, sys.executable, __file__, name, "--variants", variant]
    command += ["--phase", phase, "--once"]
    run = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    start = run.stdout.find('"ID"')
    if run.returncode or start < 0:
        return (run.stdout + run.stderr).strip()[-300:]
    units, *lines = csv.DictReader(io.StringIO(run.stdout[start:]))
    return [
        {
            "kernel": short(line["Kernel Name"]),
            **{
                key: float(line[metric].replace(",", "")) * UNITS[units[metric]]
                for key, metric in COUNTERS.items()
            },
        }
        for line in lines
    ]


def once(name: str, variant: str, phase: str) -> None:
    """One call for Nsight Compute to look at, after the ones that build, choose algorithms and fill caches."""
    call = call_of(name, variant, phase)
    with call.contestant.settings():
        for _ in range(3):
            call()
        torch.empty(1 << 30, dtype=torch.int8, device="cuda").zero_()
        torch.cuda.synchronize()
        torch.cuda.cudart().cudaProfilerStart()
        call()
        torch.cuda.synchronize()
        torch.cuda.cudart().cudaProfilerStop()


def explain(name: str, variant: str, phase: str, cache: Path) -> dict:
    """A row for `variant` of the problem `name` in a phase, with a row for each of its kernels."""
    problem, contest = models.PROBLEMS[name], compare.contest_of(name, device="cuda")
    call = call_of(name, variant, phase)
    (x,) = call.inputs
    with call.contestant.settings():
        y, _ = call()
        kernels = profile(call)
    row = {
        "problem": name, "number": problem.number, "variant": variant, "phase": phase, "shape": list(x.shape),
        "ms": timing.time({variant: call}, "cuda", seconds=1)[variant].median,
        "bytes": problem.bytes(x, y), "operations": problem.operations(contest.model(), x), "floor_ms": None,
        "kernels": kernels,
    }  # fmt: skip
    if not compare.has_backward(phase):
        row["floor_ms"] = compare.floor_of(contest, row["bytes"], row["operations"])
    counted, ours = counters(name, variant, phase), stacks(cache)
    row["counters"] = counted if isinstance(counted, str) else "ncu"
    for kernel in row["kernels"]:
        kernel["stack_bytes"] = ours.get(kernel["kernel"])
        match = (
            next((each for each in counted if each["kernel"] == kernel["kernel"]), None)
            if isinstance(counted, list)
            else None
        )
        if match:
            counted.remove(match)
            kernel.update({key: round(match[key], 2) for key in COUNTERS if key != "counted_us"})
            kernel["tb_per_s"] = round((match["read_mb"] + match["written_mb"]) / match["counted_us"], 2)
    return row


def table(rows: list[dict]) -> str:
    columns = (
        "us",
        "registers",
        "shared_kb",
        "stack_bytes",
        "read_mb",
        "written_mb",
        "tb_per_s",
        "tensor_percent",
    )
    lines = []
    for row in rows:
        floor = (
            f", floor {row['floor_ms']:.3f} ms: {row['floor_ms'] / row['ms']:.0%}" if row["floor_ms"] else ""
        )
        lines += [
            "",
            f"{row['number']} {row['problem']}, {row['variant']}, {row['phase']}: {row['ms']:.3f} ms{floor} (counters: {row['counters']})",
        ]
        lines.append(f"  {'kernel':60}" + "".join(f"{column:>15}" for column in columns))
        for kernel in row["kernels"]:
            values = ("–" if kernel.get(column) is None else f"{kernel[column]:g}" for column in columns)
            lines.append(f"  {kernel['kernel']:60}" + "".join(f"{value:>15}" for value in values))
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "names", nargs="*", metavar="NAME", choices=[*models.PROBLEMS, []], help="default: all"
    )
    parser.add_argument("--variants", default=VARIANTS)
    parser.add_argument("--phase", default=PHASES)
    parser.add_argument("--json", metavar="FILE")
    parser.add_argument("--once", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    names, variants = options.names or list(models.PROBLEMS), options.variants.split(",")
    phases = options.phase.split(",")
    if not torch.cuda.is_available():
        sys.exit("a CUDA GPU is needed: what is explained here are its kernels")
    if options.once:
        return once(names[0], variants[0], phases[0])
    with tempfile.TemporaryDirectory() as folder:
        os.environ["INLINE_LOADER_CACHE"] = folder  # holds these kernels and no others
        cases = itertools.product(names, variants, phases)
        rows = [explain(*case, Path(folder)) for case in cases]
    print(table(rows))
    if options.json:
        records.write(Path(options.json), rows)


if __name__ == "__main__":
    main()
