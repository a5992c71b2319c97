"""Do the fused kernels' speed-ups hold at other sizes and in other dtypes? Forward, on a GPU. One run, one table, one JSON file.

    python benchmarks/sizes.py [NAME ...] [--json FILE]

Rows are compare.py's, checked as there, of eager, torch.compile and what "auto" runs, at: a quarter of the default batch, the
default, four times the batch, twice the width; and the default in float16 and bfloat16. Each says further
what was changed (`size`), and for ours `extra_mb`: the largest memory in use in a call beyond input and output.
The default also stands there under autocast (`autocast`: its dtype), timed alone: its results are the tests' business.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402

import compare  # noqa: E402
import models  # noqa: E402

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


@torch.no_grad()
def extra_mb(problem: models.Problem, dtype: torch.dtype) -> float:
    model, (x,) = problem.get_model(device="cuda").to(dtype), problem.get_inputs(device="cuda")
    x = x.to(dtype)
    for _ in range(2):  # the first builds and loads
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        y = model(x)
        torch.cuda.synchronize()
        extra = torch.cuda.max_memory_allocated() - before - y.nbytes
        del y
    return extra / 1e6


def autocast_ms(problem: models.Problem, dtype: torch.dtype) -> float:
    model, (x,) = problem.get_model(device="cuda"), problem.get_inputs(device="cuda")

    def run():
        with torch.no_grad(), torch.autocast("cuda", dtype=dtype):
            return model(x)

    return compare.time({"auto": run}, "cuda", seconds=1)["auto"].median


def measure(problem: models.Problem) -> list[dict]:
    rows = []
    for size, (sized, dtype) in sizes(problem).items():
        for row in compare.compare(sized, device="cuda", dtype=dtype, variants=VARIANTS):
            rows.append(
                {
                    **row,
                    "size": size,
                    "extra_mb": extra_mb(sized, dtype) if row["variant"] == "auto" else None,
                }
            )
    plain = next(row for row in rows if row["size"] == "default" and row["variant"] == "auto")
    for dtype in (torch.float16, torch.bfloat16):
        name = str(dtype).removeprefix("torch.")
        rows.append(
            {
                **plain,
                "size": f"autocast {name}",
                "autocast": name,
                "median_ms": autocast_ms(problem, dtype),
                "extra_mb": None,
            }
        )
    return rows


def table(rows: list[dict]) -> str:
    lines = [
        f"{'':3}{'size':22}{'variant':10}{'eager':>9}{'compile':>9}{'ours':>9}{'over the best':>15}{'extra MB':>10}"
    ]
    for number, size in dict.fromkeys((row["number"], row["size"]) for row in rows):
        ms = {
            row["variant"]: row["median_ms"] for row in rows if (row["number"], row["size"]) == (number, size)
        }
        ours = next(
            row for row in rows if (row["number"], row["size"], row["variant"]) == (number, size, "auto")
        )
        peers = [ms[name] for name in VARIANTS[:-1] if ms.get(name)]
        ratio = f"{min(peers) / ms['auto']:.2f}" if peers and ms["auto"] else "–"
        cells = "".join(f"{ms[name]:9.3f}" if ms.get(name) else f"{'–':>9}" for name in VARIANTS)
        extra = "–" if ours["extra_mb"] is None else f"{ours['extra_mb']:.1f}"
        lines.append(
            f"{number:<3}{size:22}{(ours['plan'] or ours['reason'] or '–').split(':')[0][:9]:10}{cells}{ratio:>15}{extra:>10}"
        )
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
            Path(options.json).parent.mkdir(parents=True, exist_ok=True)
            text = json.dumps(compare.record(rows), indent=1, ensure_ascii=False) + "\n"
            Path(options.json).write_text(text, encoding="utf-8")
    print(table(rows))


if __name__ == "__main__":
    main()
