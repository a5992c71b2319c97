"""Records of compare.py's rows: what they were measured on, README's table and picture and RESULTS.md, and how `make gpu` went in a few
lines.

    python benchmarks/report.py --readme                 # brings README.md, RESULTS.md and their pictures up to the newest records
    python benchmarks/report.py --summary LOG [LOG ...]  # the verdict of each log, the newest record's factors

A record is a JSON file in results/: the machine (GPU, driver, CPU, threads, torch, CUDA), the commit and
whether the tree had changes, a hash of the sources, the command, and `rows`, described at the top of
compare.py. Older records lack some of a row's fields: without `call_ms` the GPU's time stands for it.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.level2 import PROBLEMS  # noqa: E402
from inline_kernels.bench import charts  # noqa: E402
from inline_kernels.bench.checks import PHASES  # noqa: E402

RESULTS = ROOT / "benchmarks" / "results"
README = ROOT / "README.md"
PAGE = ROOT / "benchmarks" / "RESULTS.md"
PICTURE, PLOT, RANKING = (
    "overview.png",
    "speedup.png",
    "fuse.png",
)  # in benchmarks/; README shows the first and the last, the page the second
PHASES_SHOWN = ("forward_grad", "train")  # as users meet them

# ---------------------------------------------------------------------------------------------------- records


def records_in(folder: Path = RESULTS) -> list[tuple[Path, dict]]:
    """Every record in `folder` and where it is, the newest last. Other JSON files there are left alone."""
    items = [(path, json.loads(path.read_text(encoding="utf-8"))) for path in folder.glob("*.json")]
    items = [(path, item) for path, item in items if "variant" in (item.get("rows") or [{}])[0]]
    return sorted(items, key=lambda pair: pair[1]["date"])


def newest_records(folder: Path = RESULTS) -> list[dict]:
    """The newest record of each machine in `folder`, GPUs first."""
    newest = {machine_of(item): item for _, item in records_in(folder)}
    return sorted(newest.values(), key=_is_gpu, reverse=True)


def machine_of(item: dict) -> str:
    return item["gpu"] if _is_gpu(item) else f"{item['cpu']}, {item['threads']} threads"


def _is_gpu(item: dict) -> bool:
    return item["rows"][0]["device"] == "cuda"


# ---------------------------------------------------------------------------------------------------- summary


def summary(logs: list[Path], folder: Path = RESULTS) -> str:
    """How `make gpu` went: the last line of each log, which is its verdict; of the newest record, a GPU's if
    there is one, what failed, and the time of a forward pass; and where all that is."""
    lines = [f"{log.stem:12}{_last_line(log)}" for log in logs]
    if not (found := records_in(folder)):
        return "\n".join([*lines, f"{'benchmark':12}no record in {folder}"])
    path, item = max(found, key=lambda pair: (_is_gpu(pair[1]), pair[1]["date"]))
    failed = [
        f"{charts.title_of(row)} {row['variant']} {row['phase']}"
        for row in item["rows"]
        if row["ok"] is False and not charts.is_peer(row)
    ]
    verdict = f"fails its check: {', '.join(failed)}" if failed else "all of ours pass their checks"
    phase = _phases_shown(item)[0]
    columns = (
        f"{'eager':>9}{'best exact peer':>22}{'fastest peer':>22}{'ours':>16}{'× exact':>9}{'× fastest':>11}"
    )
    lines += [f"{'benchmark':12}{verdict}", "", f"{phase + ', ms':52}{columns}"]
    lines += [_summary_line(rows) for (_, of, _), rows in charts.groups(item["rows"]).items() if of == phase]
    lines += [
        "",
        f"record      {path}: {machine_of(item)}, {item['date']}",
        f"logs        {' '.join(map(str, logs))}",
    ]
    return "\n".join(lines)


def _last_line(log: Path) -> str:
    text = log.read_text(encoding="utf-8", errors="replace").strip() if log.is_file() else ""
    return text.splitlines()[-1].strip("= ") if text else "no log"


def _summary_line(rows: list[dict]) -> str:
    eager, exact, fastest, ours = charts.standing(rows)
    factors = (_factor(exact, ours), _factor(fastest, ours))
    times = f"{_ms(eager):>9}{_named_ms(exact):>22}{_named_ms(fastest):>22}{_named_ms(ours):>16}"
    return f"{charts.title_of(rows[0])[:51]:52}{times}{factors[0]:>9}{factors[1]:>11}"


def _ms(row: dict | None) -> str:
    return f"{charts.ms_of(row):.3g}" if row else "–"


def _named_ms(row: dict | None) -> str:
    return f"{row['variant']} {_ms(row)}" if row else "–"


def _factor(peer: dict | None, ours: dict | None) -> str:
    return f"{charts.ms_of(peer) / charts.ms_of(ours):.2f}×" if peer and ours else "–"


# ----------------------------------------------------------------------------------------------------- README


def _phases_shown(item: dict) -> list[str]:
    """Of a record's phases those that README shows; where an older record lacks them, forward."""
    there = {row["phase"] for row in item["rows"]}
    shown = [phase for phase in PHASES_SHOWN if phase in there]
    first = [] if "forward_grad" in there or "forward" not in there else ["forward"]
    return first + shown or sorted(there, key=PHASES.index)


def front_table(item: dict) -> str:
    """What stands between README's markers: the picture of a record, and a row per problem, as called."""
    phase, found = _phases_shown(item)[0], charts.groups(item["rows"])
    lines = [
        f"![Speed-up over eager on {machine_of(item)}: the best peer beside ours](benchmarks/{PICTURE})",
        "",
        f"| `{phase}`, ms a call | eager | fastest peer as exact as eager | fused | × eager | × that peer | error of fused (eager’s) | MB to train, eager → fused |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for (problem, of, inputs), rows in found.items():
        if of == phase and inputs == "default":
            eager, exact, _, ours = charts.standing(rows)
            error = f"{ours['error_norm']:.2g} ({ours['eager_error_norm']:.2g})" if ours else "–"
            training = charts.standing(found.get((problem, "train", "default"), []))
            memory = [f"{row['memory_mb']:,.0f}" for row in (training.eager, training.ours) if row and row["memory_mb"] is not None]  # fmt: skip
            cells = _ms(eager), _named_ms(exact), _ms(ours), _factor(eager, ours), _factor(exact, ours), error, " → ".join(memory) or "–"  # fmt: skip
            lines.append(f"| {charts.title_of(rows[0])} | {' | '.join(cells)} |")
    return "\n".join([*lines, "", f"{_origin(item)}{_note(item)}.", ""])


def page(records: list[dict]) -> str:
    """benchmarks/RESULTS.md: a table for each record, a row per problem and phase, phase by phase."""
    heading = "# Recorded runs\n\nWritten by `python benchmarks/report.py --readme`.\n"
    parts = [heading, *map(_markdown, records)]
    if records:
        parts.insert(2, f"![Speed-up over eager of every variant on {machine_of(records[0])}]({PLOT})\n")
    return "\n".join([*parts, LEGEND])


LEGEND = """How to read the tables:

- A time is the median of a call as a user makes it: synchronize, clear the cache, call, synchronize. The GPU's time alone stands beside it.
- `forward_grad` is a call of a fresh model with gradients on, without backward; `train` is forward and backward.
- *Ours* is what runs by default. `fused` has the convolution inside our kernels; `epilogue` runs the library's convolution, or on a CPU our own,
  and then our kernels for what follows it.
- The *best exact peer* is the fastest one that is as exact as eager: eager itself, torch.compile (`compile`; `max-autotune`; `compile-cl`, with all
  tensors channels last; `compile-fp32`, TF32 forbidden), or cuDNN's own fused graph (`cudnn`, where nvidia-cudnn-frontend is installed). The
  *fastest peer* may be less exact; the table then says by how much.
- We report no time for a kernel that fails its check. inline_kernels/bench says what a check asks (checks.py, honesty.py) and how times are taken
  (timing.py).
- Number 83's training says little about kernels with default inputs: no element ties, so every gradient is zero, and backward ends at a flag that forward
  sets. With *all ties* the norm's gradients have to be computed, the convolution's are still zero. Where elements tie and slopes are not zero, a
  step takes 1.95 ms (results/trials/backward_steps.json).

The records in results/ have all phases and variants.
"""


def _origin(item: dict) -> str:
    """What a record was measured on, in a line."""
    driver = f", driver {item['driver']}" if _is_gpu(item) else ""
    commit = item["sources"]
    if item["commit"]:
        commit = f"commit {item['commit'][:10]}{' with changes' if item['dirty'] else ''}"
    dtype, date = item["rows"][0]["dtype"], item["date"][:10]
    return f"{machine_of(item)}{driver}, torch {item['torch']}, {dtype}, {commit}, {date}"


def _note(item: dict) -> str:
    return f" ({item['note']})" if item.get("note") else ""


def _markdown(item: dict) -> str:
    lines = [
        f"{_origin(item)}{_note(item)}:",
        "",
        "| problem, input | phase | ours | × eager | × best exact peer | × fastest peer | eager | best exact peer | fastest peer |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for phase in _phases_shown(item):
        for (_, of, _), group in charts.groups(item["rows"]).items():
            if of == phase:
                lines.append(_markdown_row(group))
    return "\n".join(lines) + "\n"


def _markdown_row(rows: list[dict]) -> str:
    eager, exact, fastest, ours = charts.standing(rows)
    if any(charts.is_peer(row) and row["ok"] is False and row["median_ms"] is None for row in rows):
        fastest = None  # an older record: what missed the rule was not timed
    failing = next((row for row in rows if not charts.is_peer(row) and row["ok"] is False), None)
    cells = [
        f"{charts.title_of(rows[0])}, {'×'.join(map(str, rows[0]['shape']))}",
        charts.situation_of(rows[0]),
        _cell(ours) if ours or not failing else charts.status_of(failing),
        *(_factor(peer, ours) for peer in (eager, exact, fastest)),
        _cell(eager, name=False),
        _cell(exact),
        "the same" if fastest and fastest is exact else _cell(fastest),
    ]
    return f"| {' | '.join(cells)} |"


def _cell(row: dict | None, name: bool = True) -> str:
    """A time as called, the GPU's beside it, and by how much a peer misses the rule."""
    if row is None:
        return "–"
    apart = row.get("call_ms") not in (None, row["median_ms"])
    text = f"{row['variant']} " * name + f"{_ms(row)} ms" + f" (GPU {row['median_ms']:.3g})" * apart
    return text + (f", {miss}" if (miss := charts.inexact(row)) else "")


def with_table(text: str, item: dict) -> str:
    """README's text with the table of a record between its markers. Raises ValueError if a marker is missing."""
    before, _, rest = text.partition("<!-- table -->\n")
    _, marker, after = rest.partition("<!-- end of table -->")
    if not marker:
        raise ValueError(
            "expected the markers <!-- table --> and <!-- end of table -->, each on a line of its own"
        )
    return f"{before}<!-- table -->\n{front_table(item)}{marker}{after}"


def _drawn(item: dict, phase: str) -> list[dict]:
    """The rows of a phase, but for peers whose package was not installed."""
    missing = [row["peer"] and (row["reason"] or "").startswith("raised ImportError") for row in item["rows"]]
    return [row for row, absent in zip(item["rows"], missing) if row["phase"] == phase and not absent]


def write_readme() -> None:
    """Brings README.md, RESULTS.md and their pictures up to the newest records."""
    records, folder = newest_records(), PAGE.parent
    newest, phases = records[0], _phases_shown(records[0])
    title = f"{machine_of(newest)}, {newest['date'][:10]}"
    README.write_text(with_table(README.read_text(encoding="utf-8"), newest), encoding="utf-8")
    PAGE.write_text(page(records), encoding="utf-8")
    charts.overview(newest["rows"], phases, title).savefig(folder / PICTURE, dpi=110)
    charts.plot(_drawn(newest, phases[0]), title).savefig(folder / PLOT, dpi=110)
    ranking().savefig(folder / RANKING, dpi=110)


def ranking():
    """The picture of `fuse` on KernelBench's problems, by the newest record of all of them forward."""
    found = {}
    for path in (RESULTS / "fuse").glob("*.json"):
        item, times = json.loads(path.read_text(encoding="utf-8")), {}
        for row in item["rows"]:
            if row["phase"] == "forward" and row["problem"] in PROBLEMS:
                times.setdefault(row["problem"], {})[row["variant"]] = row["median_ms"]
        if times.keys() == PROBLEMS.keys():
            found[item["date"]] = item, times
    item, times = found[max(found)]
    factors = {str(problem): each["eager"] / each["fuse"] for problem, each in times.items()}
    title = f"fuse: speed-up over eager, forward, the GPU’s time · {item['gpu']}, {item['date'][:10]}"
    return charts.ranking(factors, title, "problem of KernelBench level 2")


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Show recorded runs.")
    parser.add_argument("--readme", action="store_true", help="write README's table and plot")
    parser.add_argument(
        "--summary",
        nargs="+",
        type=Path,
        metavar="LOG",
        help="how each LOG ends, and the newest record's factors",
    )
    options = parser.parse_args(arguments)
    if options.readme:
        write_readme()
    if options.summary:
        print(summary(options.summary))
    if not options.readme and not options.summary:
        parser.error("expected --readme or --summary")


if __name__ == "__main__":
    main()
