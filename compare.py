"""Checks, times and plots the variants of a problem: what the notebooks call and what the benchmark is made of.

    rows = compare("conv2d_min_add_multiply")          # a check of every variant, then the times of those that passed
    print(table(rows)); plot(rows)

or, with a record on disk:  python compare.py --device auto --phase forward,train --json times.json --plots folder

What is right is said in checks.py. What fails its check gets no time, no bar and no speed-up.

Times: variants alternate (A B A B) in one process, after a warm-up; median and quartiles. On a GPU by CUDA events, the L2
cache overwritten before every run; on a CPU by perf_counter, caches as the runs before leave them. The time of allocating
results, of reordering weights and of launching counts.

A row is a dict: problem, number, variant, device ("cuda" or "cpu"), dtype, phase, shape (of the input), ok (None: a peer did
not run), reason (of a failure), median_ms, low_ms and high_ms (quartiles), runs, speedup_vs_eager, error_norm, error_max,
eager_error_norm, eager_error_max (of `quantity` in `case`, the result nearest to or furthest past its limit), bytes (input and
output, once each), floor_ms (what the GPU needs at least; None where unknown), plan, seed. A record adds the machine.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import hashlib
import json
import math
import platform
import shlex
import statistics
import subprocess
import sys
import textwrap
import time as clock
from pathlib import Path
from typing import Callable, Iterator, NamedTuple

import torch

import library
import models
from checks import PEERS, PHASES, Check, call, check, contestant, new_seed

NOT_A_KERNEL = ()  # proves that nothing needs computing; timed, but never called a kernel's speed-up

FOLDER = Path(__file__).resolve().parent
RESULTS = FOLDER / "benchmarks" / "results"
README_PLOT = "benchmarks/forward.png"

# Bytes per second of a copy, measured; operations per second of the tensor cores (float64: all) from the datasheet. For float32
# that is float16's rate, the fastest that can be as exact as eager (TF32 there): a floor that needs more products is higher.
GPUS = {
    "NVIDIA H200": (4.28e12, {"float32": 989e12, "float16": 989e12, "bfloat16": 989e12, "float64": 67e12}),
}

# --------------------------------------------------------------------------------------------------------------- timing


class Timing(NamedTuple):
    """Milliseconds: the median and the quartiles of `runs` runs."""

    median: float
    low: float
    high: float
    runs: int


def time(
    calls: dict[str, Callable[[], object]], device: str = "cpu", seconds: float = 6.0
) -> dict[str, Timing]:
    """How long each of `calls` takes, in turn (A B A B), for about `seconds` in all, but 7 rounds at least and 30 at most."""
    for run in [*calls.values()] * 2:
        run()
    measure = _cuda_rounds if device == "cuda" else _cpu_rounds
    start = clock.perf_counter()
    measure(calls, 1)
    rounds = min(30, max(7, int(seconds / (clock.perf_counter() - start))))
    timings = {}
    for name, values in measure(calls, rounds).items():
        low, median, high = statistics.quantiles(values, n=4, method="inclusive")
        timings[name] = Timing(median, low, high, rounds)
    return timings


def _cpu_rounds(calls, rounds) -> dict[str, list[float]]:
    times = {name: [] for name in calls}
    for _ in range(rounds):
        for name, run in calls.items():
            start = clock.perf_counter()
            run()
            times[name].append((clock.perf_counter() - start) * 1e3)
    return times


def _cuda_rounds(calls, rounds) -> dict[str, list[float]]:
    # Far more than the cache, because the host must have launched what is timed before the GPU is done with clearing it.
    memory = torch.cuda.get_device_properties("cuda").total_memory
    cache = torch.empty(min(2 << 30, memory // 8), dtype=torch.int8, device="cuda")
    events = {name: [] for name in calls}
    for _ in range(rounds):
        for name, run in calls.items():
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            cache.zero_()
            start.record()
            run()
            end.record()
            events[name].append((start, end))
        torch.cuda.synchronize()
    return {name: [start.elapsed_time(end) for start, end in pairs] for name, pairs in events.items()}


# ------------------------------------------------------------------------------------------------------------ comparing


def pick_device(device: str = "auto") -> tuple[str, str]:
    """Gives "cuda" where this torch sees a GPU and there is a compiler for it, else "cpu"; and a line that says why."""
    from torch.utils.cpp_extension import CUDA_HOME

    if device != "auto":
        return device, f"{device}, as asked for"
    if torch.cuda.is_available():
        name = torch.cuda.get_device_name()
        return (
            ("cuda", name)
            if CUDA_HOME
            else ("cpu", f"CPU: there is a GPU ({name}), but no nvcc to build its kernels with")
        )
    if _output("nvidia-smi", "-L"):
        return (
            "cpu",
            f"CPU: there is a GPU, but torch {torch.__version__} (CUDA {torch.version.cuda}) can't use it",
        )
    return "cpu", f"CPU: {_cpu_name()}, {torch.get_num_threads()} threads"


def variants_of(problem, device: str) -> tuple[str, ...]:
    """What a comparison shows by default. On a CPU without max-autotune, which takes minutes, and fused, which is epilogue."""
    skipped = () if device == "cuda" else ("max-autotune", "fused")
    return tuple(name for name in dict.fromkeys((*PEERS, *problem.variants)) if name not in skipped)


@contextlib.contextmanager
def _quiet_compiler():
    """Without the tables of what torch.compile's max-autotune tried."""
    from torch._inductor import config

    tables = {"autotune_num_choices_displayed": 0, "max_autotune_report_choices_stats": False}
    with config.patch({name: value for name, value in tables.items() if hasattr(config, name)}):
        yield


@_quiet_compiler()
def compare(
    problem,
    *,
    device="auto",
    phase="forward",
    batch_size=None,
    variants=None,
    dtype=torch.float32,
    seed=None,
    tell=None,
) -> list[dict]:
    """Checks the variants of `problem` (a name or a `Problem`) and times those that pass: a row each, as described above.

    batch_size defaults to the problem's own on a GPU, and to one that suits a small machine on a CPU. tell(text) is called
    once before each variant's check, and once before the timing. Forgets what torch.compile compiled before.
    """
    problem = models.PROBLEMS[problem] if isinstance(problem, str) else problem
    device = pick_device(device)[0]
    batch_size = batch_size or (problem.cpu_batch_size if device == "cpu" else None)
    seed = new_seed() if seed is None else seed
    tell = tell or (lambda text: None)
    torch._dynamo.reset()  # else old shapes count towards the limit past which it runs eager in silence
    options = dict(device=device, phase=phase, batch_size=batch_size, dtype=dtype, seed=seed)

    torch.manual_seed(seed)
    model = problem.Model(*problem.get_init_inputs()).to(device=device, dtype=dtype)
    x = problem.get_inputs(device=device, batch_size=batch_size)[0].to(dtype)
    with torch.no_grad():
        g = torch.randn_like(model(x))
    rows, calls = [], {}
    for variant in variants or variants_of(problem, device):
        tell(f"{problem.name} {phase}: checking {variant}")
        obstacle = _obstacle(problem, variant, model, x)
        result = Check(variant, seed, [], [obstacle]) if obstacle else check(problem, variant, **options)
        row = _row(problem, variant, result, model, x, g, phase)
        if obstacle:
            row["ok"] = None
        rows.append(row)
        if row["ok"]:
            module = contestant(problem, variant, model)
            with torch.set_grad_enabled(phase != "forward"):
                row["plan"] = str(module.plan(x)) if variant not in PEERS else None
            calls[variant] = _timed(module, model, x, phase, g)
    tell(f"{problem.name} {phase}: timing")
    timings = time(calls, device) if calls else {}
    for row in rows:
        timing, eager = timings.get(row["variant"]), timings.get("eager")
        if timing:
            row.update(median_ms=timing.median, low_ms=timing.low, high_ms=timing.high, runs=timing.runs)
            if eager and row["variant"] not in NOT_A_KERNEL:
                row["speedup_vs_eager"] = eager.median / timing.median
    return rows


def _obstacle(problem, variant: str, model, x) -> str | None:
    """Why a variant of ours can't run for x, or None."""
    if variant in PEERS:
        return None
    try:
        contestant(problem, variant, model).plan(x)
    except RuntimeError as error:
        return str(error)


def _timed(module, model, x, phase, g) -> Callable[[], object]:
    leaves = dict(model.named_parameters())
    return lambda: call(module, leaves, x, phase, g)


def _row(problem, variant, result: Check, model, x, y, phase) -> dict:
    worst = result.worst
    figures = (worst.norm, worst.max, worst.eager_norm, worst.eager_max) if worst else (None,) * 4
    names = ("error_norm", "error_max", "eager_error_norm", "eager_error_max")
    did_not_run = variant in PEERS and bool(result.complaints)
    return {
        "problem": problem.name,
        "number": problem.number,
        "variant": variant,
        "device": x.device.type,
        "dtype": str(x.dtype).removeprefix("torch."),
        "phase": phase,
        "shape": list(x.shape),
        "ok": None if did_not_run else result.ok,
        "reason": "; ".join(result.failures) or None,
        **dict.fromkeys(("median_ms", "low_ms", "high_ms", "runs", "speedup_vs_eager")),
        "quantity": worst and worst.quantity,
        "case": worst and worst.case,
        **{
            name: value if value is not None and math.isfinite(value) else None
            for name, value in zip(names, figures)
        },
        "bytes": problem.bytes(x, y),
        "floor_ms": _floor(problem, model, x, y) if phase == "forward" else None,
        "plan": None,
        "seed": result.seed,
    }


def _floor(problem, model, x, y) -> float | None:
    if x.device.type != "cuda" or torch.cuda.get_device_name(x.device) not in GPUS:
        return None
    bandwidth, rates = GPUS[torch.cuda.get_device_name(x.device)]
    rate = rates[str(x.dtype).removeprefix("torch.")]
    return max(problem.bytes(x, y) / bandwidth, problem.operations(model, x) / rate) * 1e3


# -------------------------------------------------------------------------------------------------------------- records


def record(rows: list[dict]) -> dict:
    """The rows of one run together with what they were measured on."""
    gpu = torch.cuda.is_available()
    commit = _output("git", "rev-parse", "HEAD") or None
    return {
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "command": shlex.join(["python", *sys.argv]),
        "gpu": torch.cuda.get_device_name() if gpu else None,
        "driver": _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader").split("\n")[0]
        or None,
        "cpu": _cpu_name(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "python": platform.python_version(),
        "allow_tf32": library.allows_tf32(),
        "commit": commit,
        "dirty": bool(_output("git", "status", "--porcelain")) if commit else None,
        "sources": sources(),
        "rows": rows,
    }


def sources() -> str:
    """A hash of the code that a record depends on, to tell it where there is no git."""
    paths = sorted([*FOLDER.glob("*.py"), *(FOLDER / "kernels").glob("*")])
    return hashlib.sha256(b"".join(path.name.encode() + path.read_bytes() for path in paths)).hexdigest()[:16]


def _output(*command: str) -> str:
    try:
        return subprocess.run(
            command, cwd=FOLDER, capture_output=True, text=True, check=True, timeout=30
        ).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return ""


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.split(":")[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def table(rows: list[dict]) -> str:
    """The rows as plain text: one line each, under a line per problem and phase."""
    lines, group = [], None
    for row in rows:
        if (row["problem"], row["phase"]) != group:
            group = row["problem"], row["phase"]
            shape = "×".join(map(str, row["shape"]))
            floor = f", floor {row['floor_ms']:.3g} ms" if row["floor_ms"] else ""
            lines += [
                "",
                f"{row['number']} {row['problem']}: {row['phase']}, {row['dtype']}, {shape}, {row['device']}{floor}",
            ]
            lines.append(
                f"  {'variant':13}{'ms':>9}{'quartiles':>17}{'× eager':>9}{'error':>10}{'eager’s':>10}"
            )
        lines.append("  " + _line(row))
    return "\n".join(lines[1:])


def _line(row: dict) -> str:
    if row["median_ms"] is None:
        return f"{row['variant']:13}{_status(row)}: {row['reason']}"
    quartiles = f"{row['low_ms']:.3g}–{row['high_ms']:.3g}"
    speedup = f"{row['speedup_vs_eager']:.2f}" if row["speedup_vs_eager"] else "–"
    errors = f"{row['error_norm']:>10.1e}{row['eager_error_norm']:>10.1e}"
    return f"{row['variant']:13}{row['median_ms']:9.3f}{quartiles:>17}{speedup:>9}{errors}"


def _status(row: dict) -> str:
    return "did not run" if row["ok"] is None else "fails its check"


# -------------------------------------------------------------------------------------------------------------- summary


def summary(logs: list[Path], folder: Path = RESULTS) -> str:
    """How `make gpu` went: the last line of each log, which is its verdict; the newest record's, a GPU's if there is one, with
    forward's times; and where all that is."""
    lines = [f"{log.stem:12}{_last_line(log)}" for log in logs]
    if not (records := _records(folder)):
        return "\n".join([*lines, f"{'benchmark':12}no record in {folder}"])
    path, item = max(records, key=lambda pair: (_is_gpu(pair[1]), pair[1]["date"]))
    failed = [
        f"{row['number']} {row['variant']} {row['phase']}"
        for row in item["rows"]
        if row["ok"] is False and row["variant"] not in PEERS
    ]
    lines += [
        f"{'benchmark':12}{'fails its check: ' + ', '.join(failed) if failed else 'all of ours pass their checks'}"
    ]
    lines += ["", f"{'forward, ms':54}{'eager':>9}{'best peer':>23}{'ours':>18}{'× best peer':>13}"]
    rows = [row for row in item["rows"] if row["phase"] == "forward"]
    lines += [
        _summary_line([row for row in rows if row["problem"] == name])
        for name in dict.fromkeys(row["problem"] for row in rows)
    ]
    return "\n".join(
        [
            *lines,
            "",
            f"record      {path}: {_machine(item)}, {item['date']}",
            f"logs        {' '.join(map(str, logs))}",
        ]
    )


def _last_line(log: Path) -> str:
    text = log.read_text(encoding="utf-8", errors="replace").strip() if log.is_file() else ""
    return text.splitlines()[-1].strip("= ") if text else "no log"


def _summary_line(rows: list[dict]) -> str:
    """A problem in a line. Peer and ours are the fastest that passed; "–" where none did."""
    timed = [row for row in rows if row["median_ms"] is not None and row["variant"] not in NOT_A_KERNEL]
    fastest = {row["variant"] in PEERS: row for row in sorted(timed, key=lambda row: -row["median_ms"])}
    peer, ours = fastest.get(True), fastest.get(False)
    eager = next((row for row in timed if row["variant"] == "eager"), None)
    ratio = f"{peer['median_ms'] / ours['median_ms']:.2f}×" if peer and ours else "–"
    title = f"{rows[0]['number']} {rows[0]['problem'].replace('_', ' ')}"
    return f"{title:54}{_milliseconds(eager):>9}{_named_time(peer):>23}{_named_time(ours):>18}{ratio:>13}"


def _milliseconds(row: dict | None) -> str:
    return f"{row['median_ms']:.3g}" if row else "–"


def _named_time(row: dict | None) -> str:
    return f"{row['variant']} {_milliseconds(row)}" if row else "–"


# --------------------------------------------------------------------------------------------------------------- README


def load_records(folder: Path = RESULTS) -> list[dict]:
    """The newest record of each machine in `folder`, GPUs first. Other JSON files there are left alone."""
    newest = {_machine(item): item for _, item in _records(folder)}
    return sorted(newest.values(), key=_is_gpu, reverse=True)


def _records(folder: Path) -> list[tuple[Path, dict]]:
    """Every record in `folder` and where it is, the newest last."""
    items = [(path, json.loads(path.read_text(encoding="utf-8"))) for path in folder.glob("*.json")]
    items = [(path, item) for path, item in items if "variant" in (item.get("rows") or [{}])[0]]
    return sorted(items, key=lambda pair: pair[1]["date"])


def _machine(item: dict) -> str:
    return item["gpu"] if _is_gpu(item) else f"{item['cpu']}, {item['threads']} threads"


def _is_gpu(item: dict) -> bool:
    return item["rows"][0]["device"] == "cuda"


def readme_table(records: list[dict]) -> str:
    """What stands between README's markers: a table for each record, a row per problem and phase, phase by phase."""
    parts = [_markdown(item) for item in records]
    if records:
        machine = _machine(records[0])
        parts.insert(1, f"![Forward time of every variant on {machine}]({README_PLOT})\n")
    return "\n".join(parts) or "(no recorded runs)\n"


def _markdown(item: dict) -> str:
    rows = item["rows"]
    variants = list(dict.fromkeys(row["variant"] for row in rows))
    driver = f", driver {item['driver']}" if rows[0]["device"] == "cuda" else ""
    commit = (
        f"commit {item['commit'][:10]}{' with changes' if item['dirty'] else ''}"
        if item["commit"]
        else item["sources"]
    )
    lines = [
        f"{_machine(item)}{driver}, torch {item['torch']}, {rows[0]['dtype']}, {commit}, {item['date'][:10]}:",
        "",
    ]
    lines += [
        f"| problem | phase | input | {' | '.join(variants)} |",
        "|---|---|---|" + "---|" * len(variants),
    ]
    pairs = dict.fromkeys((row["problem"], row["phase"]) for row in rows)
    for problem, phase in sorted(pairs, key=lambda pair: PHASES.index(pair[1])):
        group = {row["variant"]: row for row in rows if (row["problem"], row["phase"]) == (problem, phase)}
        first = next(iter(group.values()))
        cells = [_cell(group[variant]) if variant in group else "" for variant in variants]
        shape = "×".join(map(str, first["shape"]))
        lines.append(
            f"| {first['number']} {problem.replace('_', ' ')} | {phase} | {shape} | {' | '.join(cells)} |"
        )
    return "\n".join(lines) + "\n"


def _cell(row: dict) -> str:
    if row["median_ms"] is None:
        return _status(row)
    faster = row["speedup_vs_eager"] and row["variant"] != "eager"
    return f"{row['median_ms']:.3g} ms" + (f", {row['speedup_vs_eager']:.2f}×" if faster else "")


def with_table(text: str, records: list[dict]) -> str:
    """README's text with the table of `records` between its markers. Raises ValueError if a marker is missing."""
    before, _, rest = text.partition("<!-- table -->\n")
    _, marker, after = rest.partition("<!-- end of table -->")
    if not marker:
        raise ValueError(
            "expected the markers <!-- table --> and <!-- end of table -->, each on a line of its own"
        )
    return f"{before}<!-- table -->\n{readme_table(records)}{marker}{after}"


def write_readme() -> None:
    """Brings README.md's table and plot up to the newest records."""
    records, path = load_records(), FOLDER / "README.md"
    path.write_text(with_table(path.read_text(encoding="utf-8"), records), encoding="utf-8")
    if records:
        plot([row for row in records[0]["rows"] if row["phase"] == "forward"]).savefig(
            FOLDER / README_PLOT, dpi=110
        )


# ------------------------------------------------------------------------------------------------------------- plotting

COLOURS = {
    "eager": "#8c8c8c",
    "compile": "#9ecae1",
    "max-autotune": "#4292c6",
    "epilogue": "#fd8d3c",
    "fused": "#d94801",
}


def plot(rows: list[dict]):
    """A matplotlib figure: a panel per problem and phase, in it a bar per variant with its median time, from zero.

    Whiskers are quartiles, the dashed line is the floor, the figure behind a bar is its speed-up over eager. What failed its
    check has no bar. The background is opaque, so that it reads on a light and on a dark page.
    """
    from matplotlib import pyplot

    phases = list(dict.fromkeys(row["phase"] for row in rows))
    problems = list(dict.fromkeys(row["problem"] for row in rows))
    columns = min(2, len(problems))
    lines = math.ceil(len(problems) / columns) * len(phases)
    height = 0.95 + 0.33 * max(len({row["variant"] for row in rows}), 2)
    style = {"font.size": 9, "axes.spines.top": False, "axes.spines.right": False, "text.color": "#222222"}
    with pyplot.rc_context(style):
        figure, axes = pyplot.subplots(
            lines,
            columns,
            figsize=(5.2 * columns, height * lines),
            squeeze=False,
            layout="constrained",
            facecolor="#ffffff",
        )
        panels = [(problem, phase) for phase in phases for problem in problems]
        per_phase = lines // len(phases) * columns
        for axis in axes.flat:
            axis.set_visible(False)
        for i, (problem, phase) in enumerate(panels):
            axis = axes.flat[i // len(problems) * per_phase + i % len(problems)]
            axis.set_visible(True)
            _panel(axis, [row for row in rows if (row["problem"], row["phase"]) == (problem, phase)])
        pyplot.close(figure)  # else a notebook shows it twice
    return figure


def _panel(axis, rows: list[dict]) -> None:
    first, longest = rows[0], max((row["high_ms"] or 0 for row in rows), default=0) or 1.0
    title = textwrap.shorten(first["problem"].replace("_", " "), 60)
    shape = "×".join(map(str, first["shape"]))
    axis.set_title(
        f"{first['number']} · {title}\n{first['phase']}, {first['dtype']}, {shape}", loc="left", fontsize=9
    )
    for y, row in enumerate(rows):
        if row["median_ms"] is None:
            axis.text(longest * 0.01, y, _status(row), va="center", color="#a00000", style="italic")
            continue
        median, low, high = row["median_ms"], row["low_ms"], row["high_ms"]
        axis.barh(y, median, color=COLOURS.get(row["variant"], "#74c476"), height=0.7)
        axis.errorbar(
            median, y, xerr=[[median - low], [high - median]], color="#222222", capsize=2, linewidth=0.8
        )
        speedup = (
            f"  {row['speedup_vs_eager']:.2f}×"
            if row["speedup_vs_eager"] and row["variant"] != "eager"
            else ""
        )
        axis.text(high + longest * 0.02, y, f"{median:.3g} ms{speedup}", va="center")
    if first["floor_ms"]:
        axis.axvline(first["floor_ms"], color="#222222", linestyle="--", linewidth=1)
        axis.text(first["floor_ms"], -0.55, " floor", fontsize=8, va="bottom")
    axis.set_yticks(range(len(rows)), [row["variant"] for row in rows])
    axis.set_ylim(len(rows) - 0.4, -0.75)
    axis.set_xlim(0, longest * 1.35)
    axis.set_xlabel("ms (median, quartiles)")


# -------------------------------------------------------------------------------------------------------------- command


def main(arguments: list[str] | None = None) -> int:
    """The command. Returns 1 if a check of one of our variants fails, else 0; a peer's failure is shown, not judged."""
    parser = argparse.ArgumentParser(
        description="Check, time and plot eager PyTorch, torch.compile and our kernels."
    )
    parser.add_argument(
        "names", nargs="*", metavar="NAME", help=f"problems, default all: {', '.join(models.PROBLEMS)}"
    )
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument(
        "--batch", type=int, metavar="N", help="batch size; default: the problem's own, on a CPU a small one"
    )
    parser.add_argument(
        "--phase", default="forward", help=f"one or more of {','.join(PHASES)}; default forward"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows and the machine to FILE")
    parser.add_argument("--plots", type=Path, metavar="FOLDER", help="write a plot per phase into FOLDER")
    parser.add_argument(
        "--readme", action="store_true", help="only write README's table and plot from the recorded runs"
    )
    parser.add_argument(
        "--summary",
        nargs="+",
        type=Path,
        metavar="LOG",
        help="only print how each LOG ends and the newest record's forward times",
    )
    options = parser.parse_args(arguments)
    if options.summary:
        print(summary(options.summary))
        return 0
    if options.readme:
        write_readme()
        return 0
    names, phases = options.names or list(models.PROBLEMS), options.phase.split(",")
    for given, known in ((names, models.PROBLEMS), (phases, PHASES)):
        if unknown := [name for name in given if name not in known]:
            parser.error(f"expected some of {', '.join(known)}, got {', '.join(unknown)}")

    device, reason = pick_device(options.device)
    print(f"{reason}; torch {torch.__version__}")
    rows = []
    for of_one in _run_all(names, phases, device, options.batch):
        rows += of_one
        if options.json:  # what has been measured outlasts an interruption
            options.json.parent.mkdir(parents=True, exist_ok=True)
            options.json.write_text(json.dumps(record(rows), indent=1) + "\n")
    print(table(rows))
    if options.json:
        print(f"\nrecord: {options.json}")
    if options.plots:
        options.plots.mkdir(parents=True, exist_ok=True)
        for phase in phases:
            path = options.plots / f"{phase}.png"
            plot([row for row in rows if row["phase"] == phase]).savefig(path, dpi=110)
            print(f"plot: {path}")
    return int(any(row["ok"] is False for row in rows if row["variant"] not in PEERS))


def _run_all(names: list[str], phases: list[str], device: str, batch: int | None) -> Iterator[list[dict]]:
    """The rows of each problem and phase."""
    from tqdm import tqdm

    steps = sum(len(variants_of(models.PROBLEMS[name], device)) + 1 for name in names) * len(phases)
    with tqdm(total=steps, bar_format="{l_bar}{bar:20}| {n}/{total} {elapsed} {desc}") as bar:

        def tell(text):
            bar.set_description_str(text)
            bar.update()

        for name in names:
            for phase in phases:
                yield compare(name, device=device, phase=phase, batch_size=batch, tell=tell)
        bar.set_description_str("done")


if __name__ == "__main__":
    sys.exit(main())
