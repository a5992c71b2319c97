"""What a call costs the host, ours beside eager, for every problem, and for `TINY` models by fuse. One run, one table, one JSON file.

    python benchmarks/host.py [NAME ...] [--device auto] [--variant NAME] [--json FILE]

Phases: `forward` under no_grad; `forward_grad`, gradients on, no backward; `train`, forward + backward of the
parameters. The model is in training mode, as a fresh one is; x needs no gradient. `least`: the same of a module
whose autograd.Function launches nothing, but allocates a result and gradients: what PyTorch takes for itself.

On a GPU, at the problem's sizes and batch 1: `us`, the wall time until a call returns, in bursts short enough
to fit into the GPU's queue, with a synchronize between bursts, so that the host never waits for the GPU; and
`loop_us`, a call's share of a loop of 100 calls with a synchronize at its end. On a CPU, at batch 1 and the
smallest extents of at least 4 that the model takes, with one thread: `us`, the thread's own time. Medians;
all take turns, burst by burst. Of `train` on a GPU also with the engine in the calling thread, by
torch.autograd.set_multithreading_enabled(False), as `one thread`.
"""

from __future__ import annotations

import argparse
import functools
import math
import statistics
import sys
import time
from pathlib import Path
from typing import Callable, NamedTuple

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402

import models  # noqa: E402
from benchmarks.networks import ResNet18  # noqa: E402
from inline_kernels.bench import records, timing  # noqa: E402
from inline_kernels.engine.fuse import fuse  # noqa: E402

PHASES = ("forward", "forward_grad", "train")
LOOP = 100  # calls
WARM_UP = 1.0  # seconds of all calls together, the first of which compiles


class Nothing(torch.autograd.Function):
    """A result and gradients of the right shapes, with any values."""

    @staticmethod
    def forward(ctx, shape, x, *parameters):
        ctx.save_for_backward(*parameters)
        return x.new_empty(*shape)

    @staticmethod
    def backward(ctx, dy):
        return None, None, *[torch.empty_like(parameter) for parameter in ctx.saved_tensors]


class Least(torch.nn.Module):
    """Shares `model`'s parameters, and gives results of its shape for x, by nothing but allocating them."""

    def __init__(self, model: torch.nn.Module, x: torch.Tensor):
        super().__init__()
        with torch.no_grad():
            self.model, self.shape = model, tuple(model(x).shape)

    def forward(self, x):
        return Nothing.apply(self.shape, x, *self.model.parameters())


class Tiny(NamedTuple):
    """A model whose work is less than what it takes to ask for it."""

    name: str
    Model: Callable[[], torch.nn.Module]
    input_shape: tuple[int, ...]
    number: str = "tiny"


def _layers(*layers: torch.nn.Module) -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Conv2d(8, 8, 3), *layers, torch.nn.ReLU())


TINY = [
    Tiny("conv_relu", _layers, (1, 8, 6, 6)),
    Tiny("conv_bn_relu", lambda: _layers(torch.nn.BatchNorm2d(8)), (1, 8, 6, 6)),
    Tiny("resnet18", lambda: ResNet18(8, 10), (1, 3, 64, 64)),
]
TINY = {each.name: each for each in TINY}


def contestants(problem, device: str, variant: str) -> tuple[dict[str, torch.nn.Module], torch.Tensor]:
    """Eager, ours and the least, which share their parameters, and their input."""
    torch.manual_seed(0)
    if isinstance(problem, Tiny):
        model, x = problem.Model().to(device), torch.rand(problem.input_shape, device=device)
        return {"eager": model, "ours": fuse(model), "least": Least(model, x)}, x
    model = problem.Model(*problem.get_init_inputs()).to(device)
    ours = problem.ModelNew.from_eager(model)
    ours.variant = variant
    channels, *extents = problem.input_shape[1:]
    if device == "cuda":
        x = torch.rand(1, channels, *extents, device=device)
    else:
        x = smallest_input(model, channels, len(extents))
    return {"eager": model, "ours": ours, "least": Least(model, x)}, x


def smallest_input(model: torch.nn.Module, channels: int, dimensions: int) -> torch.Tensor:
    for extent in range(4, 65):
        x = torch.rand(1, channels, *[extent] * dimensions)
        try:
            if model(x).numel():
                return x
        except (RuntimeError, ValueError):  # too small for the model
            pass
    raise ValueError(f"expected {type(model).__name__} to take an input of some extent from 4 to 64")


def call_of(module: torch.nn.Module, x: torch.Tensor, phase: str) -> Callable[[], object]:
    """One call; its results are dropped when it returns, which is part of what a call costs."""
    if phase != "train":
        return functools.partial(module, x)
    parameters, g = list(module.parameters()), torch.ones_like(module(x))
    return lambda: torch.autograd.grad(module(x), parameters, g, allow_unused=True)


def warm_up(calls: dict[str, Callable], x: torch.Tensor) -> None:
    start, rounds = time.perf_counter(), 0
    while rounds < 3 or time.perf_counter() - start < WARM_UP:
        for call in calls.values():
            call()
        synchronize(x)
        rounds += 1


def synchronize(x: torch.Tensor) -> None:
    if x.is_cuda:
        torch.cuda.synchronize()


def loop_microseconds(calls: dict[str, Callable], x: torch.Tensor) -> dict[str, float]:
    """A call's share of a loop, synchronized at its end; the median of 9 loops, in turn."""
    times = {name: [] for name in calls}
    for _ in range(9):
        for name, call in calls.items():
            synchronize(x)
            before = time.perf_counter_ns()
            for _ in range(LOOP):
                call()
            synchronize(x)
            times[name].append((time.perf_counter_ns() - before) / LOOP)
    return {name: statistics.median(values) / 1e3 for name, values in times.items()}


def measure(problem, device: str, variant: str, seconds: float) -> list[dict]:
    """A row for each phase."""
    rows = []
    modules, x = contestants(problem, device, variant)
    now = time.perf_counter_ns if x.is_cuda else time.thread_time_ns
    for phase in PHASES:
        with torch.set_grad_enabled(phase != "forward"):
            calls = {name: call_of(module, x, phase) for name, module in modules.items()}
            warm_up(calls, x)
            us, one_thread = timing.host_times(calls, device, seconds, now), dict.fromkeys(calls)
            loop = loop_microseconds(calls, x) if x.is_cuda else dict.fromkeys(calls)
            if phase == "train" and x.is_cuda:
                with torch.autograd.set_multithreading_enabled(False):
                    one_thread = timing.host_times(calls, device, seconds, now)
            plan = modules["ours"].plan(x)
            segments = (
                [each for each in plan if each.runs != "eager"] if isinstance(problem, Tiny) else [plan]
            )
        rows.append({
            "problem": problem.name, "number": problem.number, "phase": phase, "device": device, "shape": list(x.shape),
            "eager_us": us["eager"], "us": us["ours"], "ratio": us["ours"] / us["eager"], "least_us": us["least"],
            "one_thread_us": one_thread["ours"], "least_one_thread_us": one_thread["least"],
            "eager_loop_us": loop["eager"], "loop_us": loop["ours"],
            "loop_ratio": loop["ours"] / loop["eager"] if x.is_cuda else None, "plan": str(plan),
            "segments": len(segments), "extra_us": (us["ours"] - us["eager"]) / max(1, len(segments)),
        })  # fmt: skip
    return rows


def table(rows: list[dict]) -> str:
    in_loop = rows[0]["loop_us"] is not None
    compared, threads = f"{'eager':>10}{'ours':>9}{'ratio':>8}", f"{'ours':>10}{'least':>9}"
    columns = f"{compared}{'least':>9}{'more':>8}" + (compared + threads) * in_loop
    lines = [
        f"{'':68}{'µs of a call; more: a segment':>44}" + f"{'in a loop':>27}{'one thread':>19}" * in_loop
    ]
    lines.append(f"{'problem':54}{'phase':14}{columns}  plan")
    for row in rows:
        figures = f"{row['eager_us']:10.1f}{row['us']:9.1f}{row['ratio']:8.2f}{row['least_us']:9.1f}{row['extra_us']:8.1f}"
        if in_loop:
            figures += f"{row['eager_loop_us']:10.1f}{row['loop_us']:9.1f}{row['loop_ratio']:8.2f}"
            one_thread = row["one_thread_us"], row["least_one_thread_us"]
            figures += "".join(
                f"{us:{width}.1f}" if us else " " * width for us, width in zip(one_thread, (10, 9))
            )
        title = f"{row['number']} {row['problem'].replace('_', ' ')}"
        lines.append(f"{title:54}{row['phase']:14}{figures}  {row['plan'].split(':')[0]}")
    for phase in PHASES:
        ratios = [row["ratio"] for row in rows if row["phase"] == phase]
        lines.append(
            f"{phase}: {min(ratios):.2f} to {max(ratios):.2f} × eager, geometric mean {geometric_mean(ratios):.2f}"
        )
    return "\n".join(lines)


def geometric_mean(values: list[float]) -> float:
    return math.exp(statistics.fmean(map(math.log, values)))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "names", nargs="*", metavar="NAME", help=f"default all: {', '.join([*models.PROBLEMS, *TINY])}"
    )
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument(
        "--variant", help="which of ours; default the most fused, which auto may leave to others"
    )
    parser.add_argument("--seconds", type=float, default=4.0, help="for each problem and phase; default 4")
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args()
    device = options.device
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    variant = options.variant or {"cuda": "fused", "cpu": "epilogue"}[device]
    torch.set_num_threads(1 if device == "cpu" else torch.get_num_threads())
    rows = []
    known = {**models.PROBLEMS, **TINY}
    for name in options.names or known:
        rows += measure(known[name], device, variant, options.seconds)
        print(f"{name}: measured", file=sys.stderr)
    print(
        f"{torch.cuda.get_device_name() if device == 'cuda' else 'CPU, thread time'}; torch {torch.__version__}"
    )
    print(table(rows))
    if options.json:
        records.write(options.json, rows)


if __name__ == "__main__":
    main()
