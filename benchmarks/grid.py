"""Is what "auto" runs anywhere slower than eager? Sizes from 7² to 256², on a GPU. One run, one table, one JSON file.

    python benchmarks/grid.py [--problems 31,79] [--seconds 420] [--json FILE]
    python benchmarks/grid.py --table FILE      # the table of a record
    python benchmarks/grid.py --fit FILE        # the rules of choice.py that fit it (fit.py)

Each size in float32 and in bfloat16, `forward` (no_grad) and `train` (forward, and backward to the parameters, in the first of the
problem's timed cases where it has any, because by default no gradient passes there). First all kernels are built, side by side. Results are
compared with eager's, coarsely. Then all take turns:

us        the GPU's time, by events, behind a write of 2 GB, which the host needs to launch what is timed
call_us   as called: synchronize, write 256 MB, event, call, event, synchronize
host_us   until a call returns, in bursts that fit into the GPU's queue

Medians, of `eager`, `epilogue`, `fused` (None where "auto" could not run it), and `left`: eager as the twin runs it, which decides first. The
GPU's time of that is eager's. Where a call takes the GPU long (LONG), the other two are not measured (None): they say nothing else.

A row: problem, number, N, channels_in, channels_out, filter (its side), image (its extents), dtype, phase, <way>_us, <way>_call_us and
<way>_host_us, auto (what runs by default) and auto_us, auto_call_us, wrong (why a way has no times: its results, or what it raised). `skipped` names the
sizes for which there was no time or memory. A FILE that is there is gone on with, if it is of the same sources and GPU.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import json
import math
import random
import statistics
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402

import models  # noqa: E402
from benchmarks import fit  # noqa: E402
from benchmarks.fit import ENOUGH, speed  # noqa: E402
from inline_kernels.bench import records, timing  # noqa: E402
from inline_kernels.loader import toolchain as loader_toolchain  # noqa: E402

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
PHASES = ("forward", "train")
WAYS = ("eager", "epilogue", "fused")
MOST_BYTES, MOST_US, LONG = (
    40e9,
    300e3,
    5e3,
)  # of a size: memory; eager's time; µs from which the host has no say
ROUNDS, CALLS, SECONDS = 9, 5, 0.2  # of a measurement, at most

# (channels in, channels out, side of the filter): [(N, side of the image)] or, in 3-D, [(N, depth, side of a plane)]
MIN_ADD = {
    (3, 64, 7): [(64, 224), (1, 256), (16, 64)],
    (3, 64, 3): [(64, 224), (1, 256), (16, 32)],
    (3, 32, 1): [(16, 256), (1, 7)],
    (16, 32, 3): [(64, 128), (1, 64), (8, 14)],
    (32, 64, 5): [(64, 56), (4, 28)],
    (64, 64, 3): [(64, 56), (8, 56), (1, 56), (64, 7)],
    (64, 128, 3): [(64, 128), (1, 128), (8, 32)],
    (64, 128, 5): [(64, 64), (4, 32)],
    (64, 64, 7): [(32, 64), (1, 128)],
    (64, 256, 1): [(64, 56), (1, 56)],
    (96, 96, 5): [(64, 56), (8, 28), (1, 28)],
    (128, 128, 3): [(64, 128), (64, 28), (1, 28), (8, 14)],
    (128, 128, 7): [(16, 28)],
    (128, 256, 3): [(64, 64)],
    (256, 256, 3): [(64, 64), (1, 256), (64, 14), (8, 14)],
    (256, 256, 1): [(64, 64), (1, 64), (64, 14), (8, 7)],
    (512, 512, 3): [(64, 32), (1, 64), (64, 7), (1, 7)],
    (512, 512, 1): [(64, 28), (64, 7)],
    (512, 512, 5): [(8, 14)],
    (512, 512, 7): [(4, 14)],
    (512, 64, 3): [(16, 28)],
}
POOL = {
    (3, 64, 3): [(64, 224), (1, 224), (16, 32), (64, 7)],
    (3, 64, 5): [(16, 224), (64, 56)],
    (8, 64, 3): [(64, 128), (1, 256), (8, 28)],
    (16, 32, 3): [(64, 112), (1, 56), (64, 14)],
    (16, 128, 3): [(64, 56), (4, 28), (16, 128)],
    (3, 16, 1): [(16, 256), (1, 7)],
    (3, 64, 7): [(64, 224), (1, 224), (16, 64)],
    (16, 64, 7): [(8, 64)],
    (3, 256, 3): [(16, 64)],
    (32, 64, 3): [(64, 56), (1, 56), (8, 14)],
    (64, 64, 3): [(64, 56), (1, 56), (64, 14)],
    (96, 96, 5): [(16, 28)],
    (64, 128, 5): [(16, 64)],
    (64, 256, 1): [(64, 56), (1, 56)],
    (128, 128, 3): [(64, 64), (64, 28), (1, 28), (8, 14)],
    (128, 128, 7): [(4, 28)],
    (256, 256, 3): [(64, 14), (1, 64), (16, 28), (1, 7)],
    (256, 256, 1): [(64, 14), (16, 56)],
    (512, 512, 3): [(64, 7), (16, 14), (1, 32)],
    (512, 512, 1): [(64, 7), (16, 28)],
}
VOLUMES = {
    (3, 16, 3): [(64, 16, 32), (64, 16, 64), (1, 16, 64), (8, 8, 16), (1, 8, 256), (16, 4, 7)],
    (1, 16, 3): [(16, 32, 32)],
    (3, 32, 3): [(16, 16, 32), (1, 16, 56)],
    (3, 64, 3): [(64, 8, 28), (2, 16, 112)],
    (4, 64, 1): [(16, 8, 28), (1, 8, 56)],
    (3, 256, 3): [(4, 8, 14)],
    (3, 16, 5): [(8, 16, 32), (1, 16, 64)],
    (3, 64, 7): [(1, 16, 56), (8, 8, 28)],
    (16, 32, 3): [(16, 16, 32), (1, 16, 32), (64, 8, 28)],
    (16, 16, 7): [(4, 14, 14)],
    (32, 64, 3): [(16, 8, 28), (1, 16, 56)],
    (64, 64, 3): [(64, 8, 14), (1, 16, 28), (8, 8, 56)],
    (64, 64, 1): [(64, 8, 28), (1, 8, 28)],
    (64, 64, 5): [(4, 8, 14)],
    (64, 128, 3): [(8, 8, 28)],
    (128, 128, 3): [(16, 8, 14), (1, 8, 14)],
    (256, 256, 3): [(64, 4, 7), (4, 8, 14), (1, 4, 7)],
    (256, 256, 1): [(16, 8, 14), (1, 4, 7)],
    (512, 512, 3): [(16, 4, 7), (1, 4, 7)],
    (512, 512, 1): [(64, 4, 7)],
}
SIZES = {31: MIN_ADD, 79: VOLUMES, 83: VOLUMES, 85: POOL}


@dataclasses.dataclass(frozen=True)
class Point:
    """A size, a dtype and a phase."""

    number: int
    filters: tuple[int, int, int]
    image: tuple[int, ...]  # N, and the extents
    dtype: str
    phase: str

    @property
    def name(self) -> str:
        return next(name for name, problem in models.PROBLEMS.items() if problem.number == self.number)

    @property
    def row(self) -> dict:
        """How its row begins."""
        (channels_in, channels_out, side), (N, *extents) = self.filters, self.image
        return {
            "problem": self.name, "number": self.number, "N": N, "channels_in": channels_in, "channels_out": channels_out,
            "filter": side, "image": extents, "dtype": self.dtype, "phase": self.phase,
        }  # fmt: skip

    def __str__(self):
        (channels_in, channels_out, side), (N, *extents) = self.filters, self.image
        image = "×".join(map(str, extents))
        return f"{self.number} {N} × {channels_in} -> {channels_out}, {side}, {image}, {self.dtype}, {self.phase}"

    @property
    def bytes(self) -> float:
        """About what eager takes of memory."""
        channels_in, channels_out, side = self.filters
        positions = self.image[0] * math.prod(extent - side + 1 for extent in self.image[1:])
        results = (6 if self.phase == "train" else 3) * channels_out * positions
        return DTYPES[self.dtype].itemsize * (results + 3 * channels_in * math.prod(self.image))

    def model(self) -> torch.nn.Module:
        problem, (channels_in, channels_out, side) = models.PROBLEMS[self.name], self.filters
        _, before, _, *tail = problem.init_inputs
        by_channel = [(channels_out, *a[1:]) if isinstance(a, tuple) and a[0] == before else a for a in tail]
        model = problem.Model(channels_in, channels_out, side, *by_channel)
        return model.to("cuda", DTYPES[self.dtype]).train()

    def contest(self) -> tuple[dict[str, torch.nn.Module], torch.Tensor]:
        """Eager and our ways to run its model, and an input."""
        problem, (N, *extents) = models.PROBLEMS[self.name], self.image
        model = self.model()
        x = torch.rand(N, self.filters[0], *extents, device="cuda").to(DTYPES[self.dtype])
        if self.phase == "train" and problem.timed_cases:
            problem.timed_cases[0][1](model, x)
        ways = {"eager": model}
        for way, variant in {
            "epilogue": "epilogue",
            "fused": "fused",
            "left": "eager",
            "auto": "auto",
        }.items():
            ways[way] = problem.ModelNew.from_eager(model)
            ways[way].variant = variant
        try:
            ways["fused"].plan(x)
        except RuntimeError:
            del ways["fused"]
        return ways, x

    def call(self, module: torch.nn.Module, x: torch.Tensor, g: torch.Tensor | None = None) -> Callable:
        """One call, which returns the result, or the gradients."""
        if self.phase == "forward":
            return lambda: [module(x)]
        parameters = list(module.parameters())
        g = torch.ones_like(module(x)) if g is None else g
        return lambda: torch.autograd.grad(module(x), parameters, g, allow_unused=True)


def points_of(number: int) -> list[Point]:
    """All of a problem's, in an order such that the first ones are of all kinds."""
    extents = [
        (filters, (N, *size) if len(size) == 1 else (N, size[0], size[1]))
        for filters, images in SIZES[number].items()
        for N, *size in images
    ]
    points = [
        Point(number, filters, (*image, image[-1]), dtype, phase)
        for filters, image in extents
        for dtype in DTYPES
        for phase in PHASES
    ]
    return random.Random(0).sample(points, len(points))


# -------------------------------------------------------------------------------------------------------------- building


class Room:
    """Lets threads in as long as what they say they take, together, fits."""

    def __init__(self, size: float):
        self.size, self.left, self.changed = size, size, threading.Condition()

    def take(self, size: float) -> float:
        size = min(size, self.size)
        with self.changed:
            self.changed.wait_for(lambda: self.left >= size)
            self.left -= size
        return size

    def give(self, size: float) -> None:
        with self.changed:
            self.left += size
            self.changed.notify_all()


def build(points: list[Point]) -> None:
    """Calls all of ours once, side by side, which builds what they need."""
    room = Room(0.6 * torch.cuda.mem_get_info()[0])

    def run(point: Point) -> None:
        taken = room.take(1.5 * point.bytes)
        try:
            # Else backward, and all that it builds, would run in one thread for all.
            with (
                torch.set_grad_enabled(point.phase == "train"),
                torch.autograd.set_multithreading_enabled(False),
            ):
                ways, x = point.contest()
                for way in ("epilogue", "fused"):
                    if way in ways:
                        point.call(ways[way], x)()
        except RuntimeError as error:  # is met again where it is measured
            print(f"{point}: {error}", file=sys.stderr)
        finally:
            room.give(taken)

    with ThreadPoolExecutor(loader_toolchain.builds_at_once()) as pool:
        list(pool.map(run, points))
    torch.cuda.synchronize()
    torch.cuda.empty_cache()


# ------------------------------------------------------------------------------------------------------------- measuring


def far(ours, theirs, bound: float) -> float | None:
    """How far the tensors `ours` are from `theirs`, in norm, if that is more than `bound`."""
    pairs = [(a.double(), b.double()) for a, b in zip(ours, theirs) if a is not None and b is not None]
    apart = math.sqrt(sum((a - b).square().sum().item() for a, b in pairs))
    norm = math.sqrt(sum(b.square().sum().item() for _, b in pairs))
    return None if apart <= bound * norm else apart / max(norm, 1e-30)


def wrong(point: Point, ways: dict[str, torch.nn.Module], x: torch.Tensor) -> dict[str, str]:
    """Of our ways those whose results are far from eager's, or that raise an error, and that. Coarsely: tests do it well."""
    drops = [(m, m.p) for m in ways["eager"].modules() if isinstance(m, torch.nn.Dropout)]  # shared by all
    for module, _ in drops:
        module.p = 0.0
    bound = {"forward": 0.05, "train": 0.3}[point.phase]
    with torch.no_grad():
        g = torch.rand_like(ways["eager"](x)) - 0.25
    right, found = point.call(ways["eager"], x, g)(), {}
    for way in ("epilogue", "fused"):
        if way in ways:
            try:
                apart = far(point.call(ways[way], x, g)(), right, bound)
                if apart is not None:
                    found[way] = f"{apart:.2g} from eager's results"
            except RuntimeError as error:
                found[way] = (str(error) or "no message").splitlines()[0]
    for module, p in drops:
        module.p = p
    return found


def gpu_us(
    calls: dict[str, Callable], rounds: int, each: int, cleared: torch.Tensor, wait: bool
) -> dict[str, float]:
    """Between events; the median. Each call comes behind a write of `cleared`; wait: and with nothing else under way."""
    events = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            for _ in range(each):
                start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                if wait:
                    torch.cuda.synchronize()
                cleared.zero_()
                start.record()
                call()
                end.record()
                events[name].append((start, end))
        torch.cuda.synchronize()
    return {
        name: statistics.median(start.elapsed_time(end) for start, end in pairs) * 1e3
        for name, pairs in events.items()
    }


def measure(point: Point, large: torch.Tensor) -> dict | None:
    """A row; None where eager takes too long. large: memory to write to."""
    with torch.set_grad_enabled(point.phase == "train"):
        ways, x = point.contest()
        row = point.row | {"auto": ways["auto"].plan(x).variant}
        calls = {"eager": point.call(ways["eager"], x)}
        calls["eager"]()
        first = gpu_us(calls, 1, 1, large, False)
        if first["eager"] > MOST_US:
            return None
        row["wrong"] = wrong(point, ways, x)
        calls |= {
            w: point.call(ways[w], x) for w in ("epilogue", "fused") if w in ways and w not in row["wrong"]
        }
        for call in calls.values():
            call()
        first = gpu_us(calls, 1, 1, large, False)
        total = sum(first.values()) / 1e6 + 5e-4 * len(calls)
        us = gpu_us(calls, max(1, min(ROUNDS, int(SECONDS / total))), 1, large, False)
        called, host = {}, {}
        if us["eager"] < LONG:
            calls["left"] = point.call(ways["left"], x)
            calls["left"]()
            rounds = max(2, min(ROUNDS, int(SECONDS / total / CALLS)))
            called = gpu_us(calls, rounds, CALLS, large[: 256 << 20], True)
            host = timing.host_times(calls, "cuda", min(SECONDS, 50 * total) / 4)
    for way in (*WAYS, "left"):
        row |= {f"{way}_us": us.get(way), f"{way}_call_us": called.get(way), f"{way}_host_us": host.get(way)}
    row["left_us"] = row["eager_us"]
    way = "left" if row["auto"] == "eager" else row["auto"]
    return row | {f"auto{kind}": row[f"{way}{kind}"] for kind in ("_us", "_call_us")}


def key(row: dict) -> str:
    """What tells a row from others."""
    names = "number", "N", "channels_in", "channels_out", "filter", "image", "dtype", "phase"
    return json.dumps([row[name] for name in names])


def run(numbers: list[int], seconds: float, path: Path) -> dict:
    """Measures what the record at `path` lacks, and writes it after each problem."""
    start, record = time.monotonic(), read_or_begin(path)
    done = {key(row) for row in record["rows"]}
    record["skipped"] = [name for name in record["skipped"] if int(name.split()[0]) not in numbers]
    todo = {n: [point for point in points_of(n) if key(point.row) not in done] for n in numbers}
    todo = {n: fitting(points, record) for n, points in todo.items()}
    build([point for points in todo.values() for point in points])
    record["build_seconds"] = round(time.monotonic() - start)
    print(f"built in {record['build_seconds']} s", file=sys.stderr)
    large = torch.empty(
        min(2 << 30, torch.cuda.get_device_properties(0).total_memory // 8), dtype=torch.int8, device="cuda"
    )
    for index, (number, points) in enumerate(todo.items()):
        now = time.monotonic()
        until = now + (start + seconds - now) / (len(todo) - index)
        for point in points:
            if time.monotonic() > until:
                record["skipped"].append(f"{point}: no time")
                continue
            try:
                row = measure(point, large)
            except torch.cuda.OutOfMemoryError:
                row = None
                torch.cuda.empty_cache()
            if row is None:
                record["skipped"].append(f"{point}: too large")
            else:
                record["rows"].append(row)
        record["seconds"] = round(time.monotonic() - start)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(record, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
        print(f"{number}: {len(points)} measured, {record['seconds']} s in all", file=sys.stderr)
    return record


def fitting(points: list[Point], record: dict) -> list[Point]:
    """Those that find memory; names the others."""
    record["skipped"] += [f"{point}: too large" for point in points if point.bytes > MOST_BYTES]
    return [point for point in points if point.bytes <= MOST_BYTES]


def read_or_begin(path: Path) -> dict:
    fresh = records.record([]) | {"skipped": []}
    if path.exists():
        known = json.loads(path.read_text(encoding="utf-8"))
        if all(known[name] == fresh[name] for name in ("gpu", "sources")):
            return known
    return fresh


# --------------------------------------------------------------------------------------------------------------- showing


def described(row: dict) -> str:
    image = "×".join(map(str, row["image"]))
    size = f"{row['N']} × {row['channels_in']} -> {row['channels_out']}, {row['filter']}, {image}"
    return f"{row['number']} {size:34}{row['dtype']:9}{row['phase']:8}"


def table(record: dict) -> str:
    rows, lines = record["rows"], []
    lines.append(f"{'':4}{'points':>8}{'below':>8}{'median':>8}{'least':>8}   × eager, of what auto runs")
    for number in dict.fromkeys(row["number"] for row in rows):
        speeds = [speed(row, "auto") for row in rows if row["number"] == number]
        below, median = sum(s < ENOUGH for s in speeds), statistics.median(speeds)
        lines.append(f"{number:<4}{len(speeds):8}{below:8}{median:8.2f}{min(speeds):8.2f}")
    lines.append(
        f"{'':54}{'auto':10}{'× GPU':>7}{'called':>7}   µs: eager, epilogue, fused; called: the same, left"
    )
    for row in sorted(rows, key=lambda row: speed(row, "auto"))[:10]:
        figures = [row[f"{way}_us"] for way in WAYS], [row[f"{way}_call_us"] for way in (*WAYS, "left")]
        shown = "; ".join(", ".join(f"{us:.0f}" if us else "–" for us in each) for each in figures)
        gpu = row["eager_us"] / row["auto_us"] if row["auto_us"] else 0
        called = row["eager_call_us"] / row["auto_call_us"] if row["auto_call_us"] else math.nan
        lines.append(f"{described(row)}{row['auto']:10}{gpu:7.2f}{called:7.2f}   {shown}")
    found = [f"{described(row)} {way}: {text}" for row in rows for way, text in row["wrong"].items()]
    lines += [f"wrong: {text}" for text in found]
    skipped = [text.rpartition(": ")[2] for text in record["skipped"]]
    lines.append(
        f"skipped: {', '.join(f'{skipped.count(why)} {why}' for why in sorted({*skipped})) or 'none'}"
    )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--problems", default="31,79,83,85", help="their numbers; default all")
    parser.add_argument("--seconds", type=float, default=420, help="for all of it; default 420")
    today = datetime.datetime.now(datetime.timezone.utc).date()
    default = ROOT / "benchmarks" / "results" / "grid" / f"{today}.json"
    parser.add_argument("--json", type=Path, default=default, metavar="FILE")
    parser.add_argument("--table", type=Path, metavar="FILE", help="show the table of a record")
    parser.add_argument("--fit", type=Path, metavar="FILE", help="show the rules that fit a record")
    options = parser.parse_args()
    if options.fit:
        print(fit.report(json.loads(options.fit.read_text(encoding="utf-8"))["rows"]))
        return
    if options.table:
        record = json.loads(options.table.read_text(encoding="utf-8"))
    else:
        record = run([int(number) for number in options.problems.split(",")], options.seconds, options.json)
        print(f"{record['gpu']}, torch {record['torch']}, {record['seconds']} s: {options.json}")
    print(table(record))


if __name__ == "__main__":
    main()
