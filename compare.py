"""The command that checks, times and plots the problems, and the face of inline_kernels.bench.

    python compare.py --device auto --phase forward_grad,train --json times.json --plots folder
    rows = compare_pair(model, my_faster_model, lambda: [torch.rand(8, 64)])  # from compare import compare_pair, plot, table

What is right is said in inline_kernels/bench/checks.py, what is honest in honesty.py, how times are taken in compare.py, there.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch
from tqdm import tqdm

import models
from benchmarks.peers import PEERS as PROBLEM_PEERS
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
    """The command. Returns 1 if a check of one of our variants fails, else 0; a peer's failure is shown, not
    judged."""
    problems = models.PROBLEMS
    parser = argparse.ArgumentParser(
        description="Check, time and plot eager PyTorch, torch.compile and our kernels."
    )
    parser.add_argument(
        "names", nargs="*", metavar="NAME", help=f"problems, default all: {', '.join(problems)}"
    )
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument(
        "--batch", type=int, metavar="N", help="batch size; default: the problem's own, on a CPU a small one"
    )
    parser.add_argument(
        "--phase", default="forward_grad", help=f"one or more of {','.join(PHASES)}; default forward_grad"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows and the machine to FILE")
    parser.add_argument("--plots", type=Path, metavar="FOLDER", help="write a plot per phase into FOLDER")
    options = parser.parse_args(arguments)
    names, phases = options.names or list(problems), options.phase.split(",")
    for given, known in ((names, problems), (phases, PHASES)):
        if unknown := [name for name in given if name not in known]:
            parser.error(f"expected some of {', '.join(known)}, got {', '.join(unknown)}")

    device, reason = pick_device(options.device)
    print(f"{reason}; torch {torch.__version__}")
    rows = []
    with tqdm(
        total=len(names) * len(phases), bar_format="{l_bar}{bar:20}| {n}/{total} {elapsed} {desc}"
    ) as bar:
        for name in names:
            others = PROBLEM_PEERS.get(name) if device == "cuda" else None
            for phase in phases:
                rows += compare(
                    name,
                    device=device,
                    phase=phase,
                    batch_size=options.batch,
                    peers=others,
                    tell=bar.set_description_str,
                )
                if options.json:  # what has been measured outlasts an interruption
                    write(options.json, rows)
                bar.update()
        bar.set_description_str("done")
    print(table(rows))
    if options.json:
        print(f"\nrecord: {options.json}")
    if options.plots:
        options.plots.mkdir(parents=True, exist_ok=True)
        for phase in phases:
            path = options.plots / f"{phase}.png"
            plot([row for row in rows if row["phase"] == phase]).savefig(path, dpi=110)
            print(f"plot: {path}")
    return int(any(row["ok"] is False for row in rows if not row["peer"]))


if __name__ == "__main__":
    sys.exit(main())
