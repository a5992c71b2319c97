"""`fuse` on KernelBench level 2's 33 convolution problems, or on whole networks: is it right, and how fast beside eager and torch.compile?

    python benchmarks/fuse.py [NUMBER or NAME ...] --phases forward,train --peers eager,compile-cl --json FILE

First all problems are built, side by side. Then each is judged in turn (bench/checks.py's rule, random parameters, a share of the batch)
and timed with its peers in one process (bench/timing.py, the benchmark's sizes, on a CPU a small batch). A row is a contestant in a phase;
what misses the rule keeps its time, and its row says by how much.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time as clock
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402

from benchmarks.level2 import PROBLEMS  # noqa: E402
from benchmarks.networks import NETWORKS  # noqa: E402
from inline_kernels import fuse  # noqa: E402
from inline_kernels.bench import checks, compare, records, timing  # noqa: E402

JUDGED_SHARE = 16  # the batch is divided by it where errors are judged
CPU_SHARE = 16


def built(problem, device: str) -> str | None:
    """Builds a problem's kernels, for inference and training, in both modes; what went wrong, or None."""
    try:
        for training in (True, False):
            model, x = problem.model().to(device).train(training), inputs(problem, device, 2)
            fused = fuse(model)
            with torch.no_grad():
                fused(x)
            if training:
                fused(x.requires_grad_()).sum().backward()
        return None
    except Exception as error:  # whatever it is, it is the finding
        return f"{type(error).__name__}: {error}".splitlines()[0]


def inputs(problem, device: str, batch: int | None = None):
    """x, on the device: all of the benchmark's batch, or some of it."""
    shape = (batch or problem.batch, *problem.input_shape[1:])
    return torch.rand(shape, device=device)


def judged(problem, phase: str, device: str, batch: int, training: bool) -> tuple[float, str]:
    """The worst error as a multiple of eager's (2 is the limit), and its name or complaints."""

    def errors(number: int, cancelling: bool):
        torch.manual_seed(number)
        model = problem.model().to(device).train(training)
        compare.randomize(model)
        x = inputs(problem, device, batch)
        found, complaints = checks.errors_of("", fuse(model), model, x, phase, cancelling=cancelling)
        if complaints:
            raise RuntimeError("; ".join(complaints))
        return found

    try:
        worst = max(checks.judged_on_draws(errors), key=lambda error: error.share)
        return 2 * worst.share, str(worst)
    except Exception as error:
        return float("inf"), f"{type(error).__name__}: {error}".splitlines()[0]


def measured(
    problem, phase: str, device: str, training: bool, peers: list[str], seconds: float
) -> list[dict]:
    """Rows of one problem and phase: ours and its peers, timed in turn."""
    torch.manual_seed(0)
    model = problem.model().to(device).train(training)
    x = inputs(problem, device, problem.batch if device == "cuda" else max(1, problem.batch // CPU_SHARE))
    with torch.no_grad():
        g = torch.randn_like(model(x)) if checks.has_backward(phase) else None
    fused = fuse(model)
    contestants = {"fuse": checks.as_contestant(fused, model)}
    contestants |= {name: compare.PEERS[name].contestant(model) for name in peers}
    calls, rows = {}, []
    for name, contestant in contestants.items():
        calls[name] = timing.Call.of(contestant, [x], phase, g)
        calls[name]()
    times = timing.time(calls, device, seconds=seconds)
    with torch.set_grad_enabled(phase != "forward"):
        plan = str(fused.plan(x))
    for name, found in times.items():
        row = {"problem": problem.number, "phase": phase, "training": training, "variant": name}
        row |= {"median_ms": found.median}
        row |= {"low_ms": found.low, "high_ms": found.high, "runs": found.runs}
        row["memory_mb"] = timing.extra_memory(calls[name]) if device == "cuda" else None
        rows.append(row | ({"plan": plan} if name == "fuse" else {}))
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    known = {str(number): problem for number, problem in PROBLEMS.items()} | NETWORKS
    parser.add_argument("which", nargs="*", choices=[*known, []], help="by default the 33")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--phases", default="forward,train")
    parser.add_argument(
        "--eval", action="store_true", help="modules in evaluation mode, not in training mode"
    )
    parser.add_argument("--peers", default="eager", help="out of " + ", ".join(compare.PEERS))
    parser.add_argument("--seconds", type=float, default=0.3, help="of timing, a problem and phase")
    parser.add_argument("--limit", type=float, default=1e9, help="seconds after which no problem is begun")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    start, device, phases = clock.monotonic(), options.device, options.phases.split(",")
    problems = [known[each] for each in options.which] or [*PROBLEMS.values()]
    with ThreadPoolExecutor(8 if device == "cuda" else 2) as pool:
        failures = dict(zip(problems, pool.map(lambda p: built(p, device), problems)))
    build_seconds = clock.monotonic() - start
    print(f"built in {build_seconds:.0f} s", flush=True)
    rows = []
    for problem in problems:
        if clock.monotonic() - start > options.limit:
            print(f"{problem.number}: no time left")
            continue
        if failures[problem]:
            print(f"{problem.number}: {failures[problem]}", flush=True)
        for phase in phases:
            batch = max(2, problem.batch // JUDGED_SHARE)
            error, worst = judged(problem, phase, device, batch if device == "cuda" else 2, not options.eval)
            try:
                found = measured(
                    problem, phase, device, not options.eval, options.peers.split(","), options.seconds
                )
            except Exception as problem_of_time:
                print(
                    f"{problem.number} {phase}: {type(problem_of_time).__name__}: {problem_of_time}"[:300],
                    flush=True,
                )
                continue
            times = {row["variant"]: row["median_ms"] for row in found}
            for row in found:
                if row["variant"] == "fuse":
                    row.update(error_vs_eager=error, worst=worst)
            rows += found
            best = min((ms for name, ms in times.items() if name != "fuse"), default=float("nan"))
            line = " ".join(f"{name} {ms:.3f}" for name, ms in times.items())
            flag = "ok " if error <= 2 else "BAD"
            print(f"{problem.number!s:3} {phase:13} {flag} {error:5.2f} {best / times['fuse']:6.2f}x {line}"
                  + (f"  {worst[:160]}" if error > 2 else ""), flush=True)  # fmt: skip
        if options.json:
            records.write(options.json, rows, build_seconds=round(build_seconds, 1))
        torch.cuda.empty_cache() if device == "cuda" else None
    for phase in phases:
        factors = []
        for problem in problems:
            of = {
                row["variant"]: row["median_ms"]
                for row in rows
                if (row["problem"], row["phase"]) == (problem.number, phase)
            }
            if len(of) > 1:
                factors.append(min(ms for name, ms in of.items() if name != "fuse") / of["fuse"])
        if factors:
            print(
                f"{phase}: geometric mean over the best peer {statistics.geometric_mean(factors):.2f}, least {min(factors):.2f}"
            )
    print(f"{clock.monotonic() - start:.0f} s in all")


if __name__ == "__main__":
    main()
