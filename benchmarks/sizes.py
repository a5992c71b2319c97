"""Do the fused kernels' speed-ups hold at other sizes and in other dtypes? Forward, on a GPU. One run, one table, one JSON file.

    python benchmarks/sizes.py [NAME ...] [--json FILE]

Rows are compare.py's, checked as there, of eager, torch.compile and what "auto" runs, at: a quarter of the default batch, the
default, four times the batch, twice the width; and the default in float16 and bfloat16. Each says further
what was changed (`size`).
The default also stands there under autocast (`autocast`: its dtype), timed alone: its results are the tests' business.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402

import models  # noqa: E402
from inline_kernels.bench import compare, records, timing  # noqa: E402

VARIANTS = ("eager", "compile", "auto")


def sizes(problem: models.Problem) -> dict[str, tuple[models.Problem, torch.dtype]]:
    batch, *rest = problem.input_shape
    shapes = {
        "quarter batch": (batch // 4, *rest),
        "default": problem.input_shape,
        "four times the batch": (batch * 4, *rest),
        "twice the width": (batch, *rest[:-1], rest[-1] * 2),
    }
    cases = {
        size: (dataclasses.replace(problem, input_shape=shape), torch.float32)
        for size, shape in shapes.items()
    }
    return cases | {
        str(dtype).removeprefix("torch."): (problem, dtype) for dtype in (torch.float16, torch.bfloat16)
    }


def autocast_ms(problem: models.Problem, dtype: torch.dtype) -> float:
    model, (x,) = problem.get_model(device="cuda"), problem.get_inputs(device="cuda")

    def run():
        with torch.no_grad(), torch.autocast("cuda", dtype=dtype):
            return model(x)

    return timing.time({"auto": run}, "cuda", seconds=1)["auto"].median


def measure(problem: models.Problem) -> list[dict]:
    rows = []
    for size, (sized, dtype) in sizes(problem).items():
        found = compare.compare(sized, device="cuda", dtype=dtype, variants=VARIANTS)
        rows += [row | {"size": size} for row in found]
    plain = next(row for row in rows if row["size"] == "default" and row["variant"] == "auto")
    for dtype in (torch.float16, torch.bfloat16):
        name, ms = str(dtype).removeprefix("torch."), autocast_ms(problem, dtype)
        changed = {
            "size": f"autocast {name}",
            "autocast": name,
            "median_ms": ms,
            "call_ms": None,
            "host_us": None,
            "memory_mb": None,
        }
        rows.append(plain | changed)
    return rows


def table(rows: list[dict]) -> str:
    head = f"{'eager':>9}{'compile':>9}{'ours':>9}{'over the best':>15}{'MB more':>10}"
    lines = [f"{'':3}{'size':22}{'variant':10}{head}"]
    for number, size in dict.fromkeys((row["number"], row["size"]) for row in rows):
        group = {row["variant"]: row for row in rows if (row["number"], row["size"]) == (number, size)}
        ours, exact = (
            group["auto"],
            [row["median_ms"] for row in group.values() if row["peer"] and row["ok"] and row["median_ms"]],
        )
        ratio = f"{min(exact) / ours['median_ms']:.2f}" if exact and ours["median_ms"] else "–"
        times = [group[name]["median_ms"] if name in group else None for name in VARIANTS]
        cells = "".join(f"{ms:9.3f}" if ms else f"{'–':>9}" for ms in times)
        extra = "–" if ours["memory_mb"] is None else f"{ours['memory_mb']:.1f}"
        variant = (ours["plan"] or ours["reason"] or "–").split(":")[0][:9]
        lines.append(f"{number:<3}{size:22}{variant:10}{cells}{ratio:>15}{extra:>10}")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help="default: all")
    parser.add_argument("--json", metavar="FILE")
    options = parser.parse_args()
    rows = []
    for name in options.names or models.PROBLEMS:
        rows += measure(models.PROBLEMS[name])
        if options.json:
            records.write(Path(options.json), rows)
    print(table(rows))


if __name__ == "__main__":
    main()
