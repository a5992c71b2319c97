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
import threading
import time as clock
from pathlib import Path

import torch
from tqdm import tqdm

import models
from benchmarks.peers import PEERS as PROBLEM_PEERS
from inline_kernels import problem as problems
from inline_kernels.bench import compare as bench
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
    if options.candidate:
        print(table(rows))
        print(verdict(rows))
        for path in _drawn(options.plots, phases, rows):
            print(f"plot: {path}")
    if options.json:
        write(options.json, rows)
        print(f"record: {options.json}")
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
    add(
        "--quick",
        action="store_true",
        help="eager and ours alone, checked on one sample, and timed for a shorter time",
    )
    add("--json", type=Path, metavar="FILE", help="write the rows and the machine to FILE")
    add("--plots", type=Path, metavar="FOLDER", help="write a plot per phase into FOLDER")
    add("--here", action="store_true", help=argparse.SUPPRESS)  # of a candidate's child process
    return parser


# Seconds that a check takes on two cores, about, of ours with few samples, of ours, of a peer: what the time to the end is reckoned from, together
# with what was seen of steps that are over; so many seconds of steps that went as expected count beside those.
QUICK, OURS, PEER, GUESSED = 6.0, 20.0, 30.0, 20.0


def _of_problems(options: argparse.Namespace, phases: list[str], device: str) -> list[dict]:
    """Rows of the problems by name: first of eager and ours, in short; then, unless `quick`, of all that they are compared with. What has been measured is shown,
    recorded and drawn at once, and outlasts an interruption."""
    names = options.names or list(models.PROBLEMS)
    if unknown := [name for name in names if name not in models.PROBLEMS]:
        _parser().error(f"expected some of {', '.join(models.PROBLEMS)}, got {', '.join(unknown)}")
    turns = [
        (name, phase, whole)
        for whole in (False, True)[: 2 - options.quick]
        for name in names
        for phase in phases
    ]
    rows: dict[tuple[str, str], list[dict]] = {(name, phase): [] for name in names for phase in phases}
    with Countdown([_expected(name, whole, device) for name, _, whole in turns]) as countdown:
        for name, phase, whole in turns:
            rows[name, phase] = found = compare(
                name, device=device, phase=phase, batch_size=options.batch, peers=_others(name, device), tell=countdown.step,
                variants=None if whole else _first(name, device), quick=not whole,
            )  # fmt: skip
            countdown.turn()
            countdown.write(f"{table(found)}\n")
            every = sum(rows.values(), [])
            if options.json:
                write(options.json, every)
            for path in _drawn(options.plots, [phase], every):
                countdown.write(f"plot: {path}")
    return every


def _others(name: str, device: str) -> dict | None:
    return PROBLEM_PEERS.get(name) if device == "cuda" else None


def _first(name: str, device: str) -> list[str]:
    """What a comparison shows first: eager and ours."""
    return ["eager", *(each for each in models.PROBLEMS[name].variants_on(device) if each != "eager")]


def _expected(name: str, whole: bool, device: str) -> list[float]:
    """Seconds of the steps of a comparison: the checks, and the timing."""
    first, others = _first(name, device), _others(name, device) or {}
    if not whole:
        return [0.5, *[QUICK] * (len(first) - 1), 3.0]
    peers = {*bench.variants_of(models.PROBLEMS[name], device, others)} - {*first}
    return [1.0, *[PEER] * len(peers), *[OURS] * (len(first) - 1), 9.0]


def _drawn(folder: Path | None, phases: list[str], rows: list[dict]) -> list[Path]:
    """Draws a picture a phase of the rows so far; their paths."""
    paths = [folder / f"{phase}.png" for phase in phases] if folder else []
    for path, phase in zip(paths, phases):
        path.parent.mkdir(parents=True, exist_ok=True)
        plot([row for row in rows if row["phase"] == phase]).savefig(path, dpi=110)
    return paths


class Countdown:
    """Shows in a line, each second, what is under way and about how long all of it takes still: what was expected of the steps to
    come, times what the steps before took for what was expected of them.

    turns: the seconds expected of the steps of each turn; a turn may leave out steps at its end.
    """

    def __init__(self, turns: list[list[float]]):
        self.turns, self.over, self.text = [list(turn) for turn in turns], 0.0, ""
        self.start = self.since = clock.monotonic()
        self.now, self.lock, self.ended = 0.0, threading.RLock(), threading.Event()
        self.bar = tqdm(total=sum(map(sum, turns)), bar_format="{bar:20}{desc}", mininterval=0)
        self.thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Countdown:
        if sys.stderr.isatty():  # a file is told of each step, not of each second
            self.thread.start()
        return self

    def __exit__(self, *_) -> None:
        self.ended.set()
        self.bar.close()

    def step(self, text: str) -> None:
        """The next step of the turn begins."""
        with self.lock:
            self._over(self.now)
            self.now, self.text = self.turns[0].pop(0) if self.turns and self.turns[0] else 0.0, text
            self.show()

    def turn(self) -> None:
        """A turn has ended."""
        with self.lock:
            self._over(self.now + sum(self.turns.pop(0)))
            self.now = 0.0

    def _over(self, seconds: float) -> None:
        self.over, self.since = self.over + seconds, clock.monotonic()

    def left(self, now: float) -> float:
        """Seconds to the end, about."""
        scale = (self.since - self.start + GUESSED) / (self.over + GUESSED)
        return max(
            0.0, scale * (self.now + sum(map(sum, self.turns))) - min(now - self.since, scale * self.now)
        )

    def show(self) -> None:
        with self.lock:
            left = round(self.left(clock.monotonic()))
            self.bar.n = self.over
            self.bar.set_description_str(f" about {left // 60}:{left % 60:02} left · {self.text}")

    def write(self, text: str) -> None:
        with self.lock:
            self.bar.write(text)

    def _run(self) -> None:
        while not self.ended.wait(1.0):
            self.show()


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
    file = problems.read(options.candidate)
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
