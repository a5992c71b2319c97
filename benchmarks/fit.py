"""The rules of kernels/composed.json, fitted to a record of grid.py: `python benchmarks/grid.py --fit FILE` prints them, and what they would give.

The promise is on the GPU's time: what is SLOW there, slower than eager, or, where all that may run are, than the fastest, is to run
nowhere. A row's other loss at a variant is how much slower than the fastest it is, on the GPU or as called, whichever is slower (a
logarithm). A tree is grown from its root; each node takes the first of two questions that together lose least, or becomes a leaf, of
which each costs LEAF.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence

import numpy as np

from inline_kernels.engine import choice

ENOUGH = 0.97  # times eager's speed
SLOW, LEAF, NEVER = 10.0, 0.6, 1e6
LADDER = ("fused", "epilogue", "eager")  # of equal ones, the first is taken
# The problems that a rule may leave to eager. The others' makes a tensor of a number at each call, which no CUDA graph captures: what works
# in one with small sizes must. And what 83's draws is another mask than ours.
LEFT = 79, 85
FOLDS = 5
GPU, BOTH = ("_us",), ("_us", "_call_us")  # which times


def speed(row: dict, way: str, kinds: Sequence[str] = BOTH) -> float:
    """Times eager's, on the GPU or as called, the less of `kinds`; 0 for what has no times."""
    pairs = [(row[f"eager{kind}"], row[f"{way}{kind}"]) for kind in kinds]
    return min([eager / ours for eager, ours in pairs if eager and ours], default=0.0)


def speeds(row: dict, kinds: Sequence[str] = BOTH) -> dict[str, float]:
    """Of each variant that a rule may name there. Where the fused kernels can't run, their name stands for the epilogue's."""
    epilogue = speed(row, "epilogue", kinds)
    found = {"fused": speed(row, "fused", kinds) or epilogue, "epilogue": epilogue}
    return found | {"eager": speed(row, "left", kinds)} if row["number"] in LEFT else found


def on_gpu(row: dict) -> dict[str, float]:
    return speeds(row, GPU)


def least(row: dict) -> float:
    """How fast what runs there is to be on the GPU: as eager, or as the fastest that may run, but for noise."""
    return ENOUGH * min(1.0, max(on_gpu(row).values()))


def sizes(row: dict) -> tuple[tuple[int, ...], tuple[int, ...], int]:
    """As choice.fastest takes them."""
    image, itemsize = row["image"], {"float32": 4, "bfloat16": 2}[row["dtype"]]
    filters = (row["channels_out"], row["channels_in"], *[row["filter"]] * len(image))
    return (row["N"], row["channels_in"], *image), filters, itemsize


def losses(row: dict) -> list[float]:
    found, gpu, enough = speeds(row), on_gpu(row), least(row)
    most, slow = max(found.values()), {way: SLOW * (each < enough) for way, each in gpu.items()}
    return [math.log(most / found[way]) + slow[way] if found.get(way) else NEVER for way in LADDER]


class Tree:
    """Rows as numbers: what is asked, and the losses."""

    def __init__(self, rows: Sequence[dict]):
        self.names = list(choice.PROPERTIES)
        given = [sizes(row) for row in rows]
        self.values = np.array([[of(*each) for of in choice.PROPERTIES.values()] for each in given], float)
        self.losses = np.array([losses(row) for row in rows])

    def rule(self, rows: np.ndarray) -> choice.Rule:
        question = self._best(rows, 2)[1]
        if question is None:
            return LADDER[self.losses[rows].sum(0).argmin()]
        column, most = question
        within = self.values[rows, column] <= most
        low, high = self.rule(rows[within]), self.rule(rows[~within])
        return low if low == high else (self.names[column], most, low, high)

    def _best(self, rows: np.ndarray, questions: int) -> tuple[float, tuple[int, int] | None]:
        """What the rows lose by so many questions, one after the other, and the first of them; None if none is worth a leaf."""
        best, question = self.losses[rows].sum(0).min() + LEAF, None
        for column in range(len(self.names)) if questions else ():
            order = rows[self.values[rows, column].argsort(kind="stable")]
            values = self.values[order, column]
            ends = np.flatnonzero(values[1:] > values[:-1]) + 1
            sums = self.losses[order].cumsum(0)
            for end in ends:
                if questions == 1:
                    lost = sums[end - 1].min() + (sums[-1] - sums[end - 1]).min() + 2 * LEAF
                else:
                    lost = (
                        self._best(order[:end], questions - 1)[0] + self._best(order[end:], questions - 1)[0]
                    )
                lost -= 1e-3 * math.log(values[end] / values[end - 1])  # of equal ones, the widest gap
                if lost < best:
                    best, question = lost, (column, between(values[end - 1], values[end]))
        return best, question


def between(low: float, high: float) -> int:
    """A number in the middle, of two digits if that is at least `low` and below `high`."""
    middle = math.sqrt(low * high)
    unit = 10 ** max(0, math.floor(math.log10(middle)) - 1)
    rounded = round(middle / unit) * unit
    return int(rounded if low <= rounded < high else low)


def kinds(rows: Sequence[dict]) -> dict[tuple[str, str], list[dict]]:
    """The rows by what has a rule of its own."""
    found: dict[tuple[str, str], list[dict]] = {}
    for row in rows:
        found.setdefault((row["problem"], row["phase"]), []).append(row)
    return found


def between_batches(rows: Sequence[dict]) -> list[dict]:
    """What is to be expected of the batches between two rows that are alike in all else, each twice the last: there no rule is to do
    what neither row would. Times go with a power of N."""
    alike, found = {}, []
    for row in sorted(rows, key=lambda row: row["N"]):
        alike.setdefault((sizes(row | {"N": 1}), row["dtype"], row["phase"]), []).append(row)
    for first, last in [pair for each in alike.values() for pair in zip(each, each[1:])]:
        N, both = (
            2 * first["N"],
            [name for name in first if name.endswith("_us") and first[name] and last[name]],
        )
        while N < last["N"]:
            part = math.log(N / first["N"]) / math.log(last["N"] / first["N"])
            times = {name: first[name] ** (1 - part) * last[name] ** part for name in both}
            found.append(first | dict.fromkeys([n for n in first if n.endswith("_us")]) | times | {"N": N})
            N *= 2
    return found


def fitted(rows: Sequence[dict]) -> dict[tuple[str, str], choice.Rule]:
    found = {}
    for kind, each in kinds(rows).items():
        all_of = [*each, *between_batches(each)]
        found[kind] = Tree(all_of).rule(np.arange(len(all_of)))
    return found


def chosen(rules: dict[tuple[str, str], choice.Rule], row: dict) -> str:
    """What the rules name."""
    return choice.fastest(rules[row["problem"], row["phase"]], *sizes(row))[0]


def too_slow(rules: dict[tuple[str, str], choice.Rule], row: dict) -> bool:
    return on_gpu(row)[chosen(rules, row)] < least(row)


def held_out(rows: Sequence[dict]) -> int:
    """Of how many rows rules choose what is too slow, that were fitted without a row's size and what else is in its fold."""
    found = 0
    shapes = list(dict.fromkeys(sizes(row)[:2] for row in rows))
    fold = {shape: (index * 7) % FOLDS for index, shape in enumerate(shapes)}
    for each in range(FOLDS):
        rules = fitted([row for row in rows if fold[sizes(row)[:2]] != each])
        left = [row for row in rows if fold[sizes(row)[:2]] == each]
        found += sum(too_slow(rules, row) for row in left)
    return found


def shown(rule: choice.Rule) -> str:
    """As kernels/composed.json has it."""
    return json.dumps(rule)


def report(rows: Sequence[dict]) -> str:
    rules = fitted(rows)
    lines = [f"{name}, {phase}: {shown(rule)}" for (name, phase), rule in rules.items()]
    for what, times in ("on the GPU", GPU), ("on the GPU or as called, whichever is slower", BOTH):
        lines += ["", f"below {ENOUGH} × eager, {what}:"]
        lines.append(
            f"{'':50}{'phase':9}{'sizes':>7}{'leaves':>8}{'auto':>7}{'rules':>7}{'fastest':>9}{'least':>14}"
        )
        for (problem, phase), each in kinds(rows).items():
            own = [speeds(row, times)[chosen(rules, row)] for row in each]
            auto = [speed(row, "auto", times) for row in each if row["auto_us"]]
            fastest = [max(speeds(row, times).values()) for row in each]
            below = [sum(s < ENOUGH for s in each_of) for each_of in (auto, own, fastest)]
            leaves = sum(shown(rules[problem, phase]).count(f'"{way}"') for way in LADDER)
            figures = f"{below[0]:7}{below[1]:7}{below[2]:9}{min(auto):7.2f} ->{min(own):5.2f}"
            lines.append(f"{problem:50}{phase:9}{len(each):7}{leaves:8}{figures}")
    lines += ["", "too slow on the GPU by rules that were fitted without them:"]
    lines += [f"{problem:50}{phase:9}{held_out(each):4}" for (problem, phase), each in kinds(rows).items()]
    lines += ["", "lost most, times the speed of the best:"]
    order = sorted(rows, key=lambda row: speeds(row)[chosen(rules, row)] / max(speeds(row).values()))
    for row in order[:10]:
        found = ", ".join(f"{way} {each:.2f}" for way, each in speeds(row).items())
        size = f"{row['N']} × {row['channels_in']} -> {row['channels_out']}, {row['filter']}, {row['image']}"
        lines.append(
            f"  {row['number']} {size}, {row['dtype']}, {row['phase']}: {chosen(rules, row)}; × eager: {found}"
        )
    return "\n".join(lines)
