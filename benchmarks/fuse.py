"""`fuse` on KernelBench level 2's 33 convolution problems, or on whole networks: is it right, and how fast beside eager and torch.compile?

    python benchmarks/fuse.py [NUMBER or NAME ...] --phases forward,train --peers eager,compile-cl --json FILE

First all problems are built, side by side. Then each is judged in turn, and so are its peers (bench/checks.py's rule, random parameters, a share
of the batch), and all are timed in one process (bench/timing.py, the benchmark's sizes, on a CPU a small batch). A row is a contestant in a
phase; what misses the rule keeps its time, and its row says by how much. At the end our factors over the fastest peer that keeps the rule, and
over the fastest of all. torch.compile takes most of the time: several runs of a few problems each, side by side, may judge (and fill its caches),
and one more with --judged times all.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time as clock
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402

from benchmarks.level2 import PROBLEMS  # noqa: E402
from benchmarks.networks import NETWORKS  # noqa: E402
from benchmarks.peers import CUDNN  # noqa: E402
from inline_kernels import fuse  # noqa: E402
from inline_kernels.bench import checks, compare, records, timing  # noqa: E402

PEERS = compare.PEERS | {"cudnn": CUDNN}
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


def judged(problem, phase: str, device: str, training: bool, peer: str = "") -> tuple[float, str]:
    """The worst error, of ours or of a peer, as a multiple of eager's (2 is the limit), and its name or complaints."""
    if peer == "eager":
        return 1.0, "eager itself"
    batch = max(2, problem.batch // JUDGED_SHARE) if device == "cuda" else 2
    torch._dynamo.reset()  # else older shapes count towards the limit past which it runs eager in silence

    def errors(number: int, cancelling: bool):
        torch.manual_seed(number)
        model = problem.model().to(device).train(training)
        compare.randomize(model)
        x = inputs(problem, device, batch)
        contestant = PEERS[peer].contestant(model) if peer else fuse(model)
        found, complaints = checks.errors_of("", contestant, model, x, phase, cancelling=cancelling)
        if complaints:
            raise RuntimeError("; ".join(complaints))
        return found

    try:
        worst = max(checks.judged_on_draws(errors), key=lambda error: error.share)
        return 2 * worst.share, str(worst)
    except Exception as error:
        return float("inf"), f"{type(error).__name__}: {error}".splitlines()[0]


def measured(
    problem, phases: list[str], device: str, training: bool, peers: list[str], seconds: float, judge
) -> Iterator[list[dict]]:
    """Rows of one problem, by phase: ours and its peers, judged, then timed in turn."""
    found = {(phase, name): judge(problem, phase, name) for phase in phases for name in ("fuse", *peers)}
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = problem.model().to(device).train(training)
    x = inputs(problem, device, problem.batch if device == "cuda" else max(1, problem.batch // CPU_SHARE))
    fused = fuse(model)
    contestants = {"fuse": checks.as_contestant(fused, model)}
    for name in peers:
        errors, words = zip(*(found[phase, name] for phase in phases))
        if min(errors) < float("inf"):
            contestants[name] = PEERS[name].contestant(model)
        else:
            print(f"{problem.number}: {name} isn't there: {words[0]}", flush=True)
    for phase in phases:
        with torch.no_grad():
            g = torch.randn_like(model(x)) if checks.has_backward(phase) else None
        calls, rows = {}, []
        for name, contestant in contestants.items():
            calls[name] = timing.Call.of(contestant, [x], phase, g)
            calls[name]()
        times = timing.time(calls, device, seconds=seconds)
        with torch.set_grad_enabled(phase != "forward"):
            plan = str(fused.plan(x))
        for name, time in times.items():
            row = {"problem": problem.number, "phase": phase, "training": training, "variant": name}
            row |= {"median_ms": time.median, "low_ms": time.low, "high_ms": time.high, "runs": time.runs}
            row["memory_mb"] = timing.extra_memory(calls[name]) if device == "cuda" else None
            row |= dict(zip(("error_vs_eager", "worst"), found[phase, name]))
            rows.append(row | ({"plan": plan} if name == "fuse" else {}))
        yield rows


def known_errors(files: list[Path]) -> dict[tuple, tuple[float, str]]:
    """What earlier runs have judged, by problem, phase and contestant."""
    rows = [row for file in files for row in json.loads(file.read_text(encoding="utf-8"))["rows"]]
    return {
        (str(row["problem"]), row["phase"], row["variant"]): (row["error_vs_eager"], row["worst"])
        for row in rows
    }


def factors(rows: list[dict], phase: str, exact: bool) -> list[float]:
    """Of each problem of which ours keeps the rule, and a peer is there: the time of the fastest peer, or of those that keep it, too, over ours."""
    of: dict = {}
    for row in rows:
        if row["phase"] == phase and (row["error_vs_eager"] <= 2 or not exact and row["variant"] != "fuse"):
            of.setdefault(row["problem"], {})[row["variant"]] = row["median_ms"]
    found = []
    for each in of.values():
        ours = each.pop("fuse", None)
        if ours and each:
            found.append(min(each.values()) / ours)
    return found


def line(rows: list[dict]) -> str:
    """A problem's rows of a phase, in words."""
    ours, *others = rows
    times = " ".join(
        f"{row['variant']} {row['median_ms']:.3f}" + " inexact" * (row["error_vs_eager"] > 2) for row in rows
    )
    error, best = ours["error_vs_eager"], min((row["median_ms"] for row in others), default=float("nan"))
    words = f"{ours['problem']!s:3} {ours['phase']:13} {'ok ' if error <= 2 else 'BAD'} {error:5.2f} {best / ours['median_ms']:6.2f}x {times}"
    return words + (f"  {ours['worst'][:160]}" if error > 2 else "")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    known = {str(number): problem for number, problem in PROBLEMS.items()} | NETWORKS
    parser.add_argument("which", nargs="*", choices=[*known, []], help="by default the 33")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--phases", default="forward,train")
    parser.add_argument(
        "--eval", action="store_true", help="modules in evaluation mode, not in training mode"
    )
    parser.add_argument("--peers", default="eager", help="out of " + ", ".join(PEERS))
    parser.add_argument("--seconds", type=float, default=0.3, help="of timing, a problem and phase")
    parser.add_argument(
        "--judged", type=Path, nargs="*", default=[], help="records of runs whose judgement holds"
    )
    parser.add_argument("--limit", type=float, default=1e9, help="seconds after which no problem is begun")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    start, device, phases = clock.monotonic(), options.device, options.phases.split(",")
    problems = [known[each] for each in options.which] or [*PROBLEMS.values()]
    with ThreadPoolExecutor(os.cpu_count() if device == "cuda" else 2) as pool:
        failures = dict(zip(problems, pool.map(lambda p: built(p, device), problems)))
    build_seconds = clock.monotonic() - start
    print(f"built in {build_seconds:.0f} s", flush=True)
    rows: list[dict] = []
    known_to_be = known_errors(options.judged)

    def judge(problem, phase: str, name: str) -> tuple[float, str]:
        key = str(problem.number), phase, name
        given = problem, phase, device, not options.eval, name * (name != "fuse")
        return known_to_be[key] if key in known_to_be else judged(*given)

    for problem in problems:
        if clock.monotonic() - start > options.limit:
            print(f"{problem.number}: no time left")
            continue
        if failures[problem]:
            print(f"{problem.number}: {failures[problem]}", flush=True)
        try:
            peers = options.peers.split(",")
            for found in measured(problem, phases, device, not options.eval, peers, options.seconds, judge):
                rows += found
                print(line(found), flush=True)
        except Exception as error:  # whatever it is, it is the finding
            print(f"{problem.number}: {type(error).__name__}: {error}"[:300], flush=True)
        if options.json:
            records.write(options.json, rows, build_seconds=round(build_seconds, 1))
        torch.cuda.empty_cache() if device == "cuda" else None
    for phase in phases:
        for exact, words in ((True, "the fastest peer that keeps the rule"), (False, "the fastest peer")):
            if of := factors(rows, phase, exact):
                print(
                    f"{phase}: geometric mean over {words} {statistics.geometric_mean(of):.2f}, least {min(of):.2f}, of {len(of)}"
                )
    print(f"{clock.monotonic() - start:.0f} s in all")


if __name__ == "__main__":
    main()
