"""Random programs (tests/fuzz_engine.py) by `fuse`, beside eager and torch.compile, as called. One run, one table, one JSON file.

    python benchmarks/programs.py [--first 6000] [--count 60] [--many] [--large] [--phase train] [--peers eager,compile] [--json FILE]

A program is its seed's: a convolution of few channels, or of up to 96 (--many), and two to eight operations. As it is drawn its image is small;
--large: in batches, with longer axes (SIZES). ms: the wall time of a call among CALLS in a row, the least of ROUNDS, contestants in turn; without
gradients, or with backward to all parameters. First all are built, side by side, torch.compile's kernels, too.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import statistics
import sys
import time
import warnings
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

import torch  # noqa: E402

from fuzz_engine import FEW, MANY, random_program  # noqa: E402
from inline_kernels import fuse  # noqa: E402
from inline_kernels.bench import records  # noqa: E402

CALLS, ROUNDS = 20, 7
PEERS = {"eager": lambda model: model, "compile": torch.compile}
# A large image's batch, and how many times longer its axes are: of images, of volumes.
SIZES = {FEW: ((16, 8), (8, 4)), MANY: ((16, 4), (4, 2))}


def program(seed: int, kind: str, large: bool, device: str) -> tuple[torch.nn.Module, torch.Tensor]:
    model, x = random_program(seed, kind)
    if large:
        batch, times = SIZES[kind][x.dim() - 4]
        torch.manual_seed(seed)
        x = torch.randn(batch, x.shape[1], *[times * size for size in x.shape[2:]])
    return model.to(device), x.to(device)


def calls(model, x: torch.Tensor, phase: str, peers: list[str]) -> dict[str, Callable[[], object]]:
    contestants = {"fuse": fuse(model)} | {name: PEERS[name](model) for name in peers}

    def call(contestant: Callable) -> object:
        with torch.set_grad_enabled(phase == "train"):
            y = contestant(x)
            return (
                torch.autograd.grad(y.sum(), [*model.parameters()], allow_unused=True)
                if phase == "train"
                else y
            )

    return {name: lambda contestant=contestant: call(contestant) for name, contestant in contestants.items()}


def build(seed: int, options: argparse.Namespace) -> None:
    warnings.simplefilter("ignore")
    model, x = program(seed, options.kind, options.large, options.device)
    for call in calls(model, x, options.phase, options.peers).values():
        call()


def measured(seed: int, options: argparse.Namespace) -> dict:
    def synchronize() -> None:
        if options.device == "cuda":
            torch.cuda.synchronize()

    torch._dynamo.reset()
    model, x = program(seed, options.kind, options.large, options.device)
    contestants = calls(model, x, options.phase, options.peers)
    least = dict.fromkeys(contestants, float("inf"))
    for turn in range(1 + ROUNDS):  # the first one warms up
        for name, call in contestants.items():
            synchronize()
            start = time.perf_counter()
            for _ in range(CALLS):
                call()
            synchronize()
            if turn:
                least[name] = min(least[name], (time.perf_counter() - start) / CALLS * 1e3)
    with torch.set_grad_enabled(options.phase == "train"):
        plan = str(fuse(model).plan(x))
    row = {"seed": seed, "kind": options.kind, "large": options.large, "phase": options.phase}
    row |= {"shape": [*x.shape], "filters": [*model.conv.weight.shape], "tail": model.names}
    return row | {"training": model.training, "ms": {k: round(v, 4) for k, v in least.items()}, "plan": plan}


def factor(row: dict) -> float:
    """The fastest peer's time over ours."""
    ours, *others = row["ms"].values()
    return min(others) / ours


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--first", type=int, default=6000)
    parser.add_argument("--count", type=int, default=60)
    parser.add_argument("--many", dest="kind", action="store_const", const=MANY, default=FEW)
    parser.add_argument("--large", action="store_true")
    parser.add_argument("--phase", choices=("forward", "train"), default="forward")
    parser.add_argument("--peers", type=lambda text: text.split(","), default=[*PEERS])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    seeds, rows = range(options.first, options.first + options.count), []
    workers = max(1, (os.cpu_count() or 2) - 2)
    with ProcessPoolExecutor(workers, multiprocessing.get_context("spawn")) as pool:
        for built in [pool.submit(build, seed, options) for seed in seeds]:
            built.result()
    for seed in seeds:
        rows.append(row := measured(seed, options))
        times = " ".join(f"{name} {ms:.4f}" for name, ms in row["ms"].items())
        print(f"{seed} {factor(row):5.2f}x {times}  {row['plan'][:90]}", flush=True)
        if options.json:
            records.write(options.json, rows)
    factors = [factor(row) for row in rows]
    slower = sum(each < 1 for each in factors)
    print(
        f"geometric mean {statistics.geometric_mean(factors):.2f}, {slower} of {len(factors)} slower than a peer"
    )


if __name__ == "__main__":
    main()
