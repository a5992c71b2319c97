"""The command that checks, times and plots the problems, and the face of inline_kernels.bench.

    python compare.py --device auto --phase forward_grad,train --json times.json --plots folder
    python compare.py --candidate my_model.py        # a file with Model, get_inputs, get_init_inputs; ModelNew, or it is fused
    rows = compare_pair(model, my_faster_model, lambda: [torch.rand(8, 64)])  # from compare import compare_pair, plot, table

What is right is said in inline_kernels/bench/checks.py, what is honest in honesty.py, how times are taken in compare.py, there.
"""

from __future__ import annotations

import argparse
import signal
import subprocess
import sys
from pathlib import Path

import torch
from tqdm import tqdm

import models
from benchmarks.peers import PEERS as PROBLEM_PEERS
from inline_kernels.bench import files
from inline_kernels.bench.charts import plot, table
from inline_kernels.bench.checks import PHASES
from inline_kernels.bench.compare import (  # noqa: F401  the public names
    PEERS,
    Peer,
    check,
    compare,
    compare_pair,
    contest_of,
    pick_device,
)
from inline_kernels.bench.records import write
from inline_kernels.bench.timing import Call, host_times, time  # noqa: F401


def main(arguments: list[str] | None = None) -> int:
    """The command. Returns 1 if a check of ours, or of a candidate, fails, else 0; a peer's failure is shown, not judged."""
    options = _parser().parse_args(arguments)
    phases = options.phase.split(",")
    if unknown := [phase for phase in phases if phase not in PHASES]:
        _parser().error(f"expected some of {', '.join(PHASES)}, got {', '.join(unknown)}")
    if options.candidate and not options.here:
        return _in_a_child(sys.argv[1:] if arguments is None else arguments)
    device, reason = pick_device(options.device)
    print(f"{reason}; torch {torch.__version__}", flush=True)
    rows = (
        _of_candidate(options, phases, device) if options.candidate else _of_problems(options, phases, device)
    )
    print(table(rows))
    if options.candidate:
        print(verdict(rows))
    if options.json:
        write(options.json, rows)
        print(f"\nrecord: {options.json}")
    if options.plots:
        options.plots.mkdir(parents=True, exist_ok=True)
        for phase in phases:
            path = options.plots / f"{phase}.png"
            plot([row for row in rows if row["phase"] == phase]).savefig(path, dpi=110)
            print(f"plot: {path}")
    return int(any(row["ok"] is False for row in rows if not row["peer"]))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description="Check, time and plot eager PyTorch, torch.compile and our kernels."
    )
    add, problems = parser.add_argument, ", ".join(models.PROBLEMS)
    add(
        "names",
        nargs="*",
        metavar="NAME",
        help=f"problems, default all: {problems}; with --candidate one, whose Model is the reference",
    )
    add("--candidate", type=Path, metavar="FILE", help="a Python file with Model, get_inputs and get_init_inputs, and ModelNew, or "
        "it is fused; it is executed, in a child process")  # fmt: skip
    add("--device", choices=("auto", "cpu", "cuda"), default="auto")
    add(
        "--batch",
        type=int,
        metavar="N",
        help="batch size; default: the problem's own, on a CPU a small one; with --candidate the file's",
    )
    add("--phase", default="forward_grad", help=f"one or more of {','.join(PHASES)}; default forward_grad")
    add("--json", type=Path, metavar="FILE", help="write the rows and the machine to FILE")
    add("--plots", type=Path, metavar="FOLDER", help="write a plot per phase into FOLDER")
    add("--here", action="store_true", help=argparse.SUPPRESS)  # of a candidate's child process
    return parser


def _of_problems(options: argparse.Namespace, phases: list[str], device: str) -> list[dict]:
    """Rows of the problems by name; what has been measured is recorded, and outlasts an interruption."""
    names, rows = options.names or list(models.PROBLEMS), []
    if unknown := [name for name in names if name not in models.PROBLEMS]:
        _parser().error(f"expected some of {', '.join(models.PROBLEMS)}, got {', '.join(unknown)}")
    with tqdm(
        total=len(names) * len(phases), bar_format="{l_bar}{bar:20}| {n}/{total} {elapsed} {desc}"
    ) as bar:
        for name in names:
            others, tell = PROBLEM_PEERS.get(name) if device == "cuda" else None, bar.set_description_str
            for phase in phases:
                rows += compare(
                    name, device=device, phase=phase, batch_size=options.batch, peers=others, tell=tell
                )
                if options.json:
                    write(options.json, rows)
                bar.update()
        bar.set_description_str("done")
    return rows


def _in_a_child(arguments: list[str]) -> int:
    """Runs the command with a candidate in a process of its own, whatever becomes of that. Returns its status."""
    status = subprocess.run([sys.executable, str(Path(__file__).resolve()), *arguments, "--here"]).returncode
    if status < 0:
        print(f"the candidate's process was ended by {signal.Signals(-status).name}", file=sys.stderr)
    return abs(status)


def _of_candidate(options: argparse.Namespace, phases: list[str], device: str) -> list[dict]:
    """Rows of a file's ModelNew beside its Model, or beside the Model of the problem that is named."""
    if len(options.names) > 1 or not set(options.names) <= {*models.PROBLEMS}:
        _parser().error(
            f"expected at most one of {', '.join(models.PROBLEMS)}, got {', '.join(options.names)}"
        )
    file = files.read(options.candidate)
    if options.names:
        problem = models.PROBLEMS[options.names[0]]
        file = file._replace(
            Model=problem.Model, get_inputs=problem.get_inputs, get_init_inputs=problem.get_init_inputs
        )
    reference, candidate = file.pair()

    def inputs():
        return [t[: options.batch] if options.batch else t for t in file.get_inputs()]

    return compare_pair(reference, candidate, inputs, device=device, phases=phases, name=file.name)


def verdict(rows: list[dict]) -> str:
    """A line for each phase of a candidate: is it right and honest, its factor over eager, and fast_p at three p: is it right and
    more than p times as fast as eager?"""
    lines = []
    for row in rows:
        if row["variant"] == "candidate":
            factor = row["speedup_vs_eager"] or 0.0
            fast = ", ".join(f"fast_{p:g} {int(bool(row['ok']) and factor > p)}" for p in (1, 1.5, 2))
            what = "right and honest" if row["ok"] else f"fails: {row['reason']}"
            lines.append(f"{row['phase']}: {what}; {factor:.2f} x eager; {fast}")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
