"""The rules of choice.py, fitted to a record of grid.py: `python benchmarks/grid.py --fit FILE` prints them, and what they would give.

A row's loss at a variant: how much slower than the fastest (a logarithm), and SLOW more where it is slower than eager, or, where all are,
than the fastest. A tree is grown from its root; each node takes the first of two questions that together lose least, or becomes a leaf, of which each costs LEAF.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

import choice
import models

ENOUGH = 0.97  # times eager's speed
SLOW, LEAF, NEVER = 10.0, 0.5, 1e6
LADDER = ("fused", "epilogue", "eager")  # of equal ones, the first is taken
FOLDS = 5


def speed(row: dict, way: str) -> float:
    """Times eager's, on the GPU or as called, whichever is less; 0 for what has no times."""
    pairs = [(row[f"eager{kind}"], row[f"{way}{kind}"]) for kind in ("_us", "_call_us")]
    return min([eager / ours for eager, ours in pairs if eager and ours], default=0.0)


def speeds(row: dict) -> dict[str, float]:
    """Of each variant that a rule may name there. Where the fused kernels can't run, their name stands for the epilogue's; what draws
    random numbers is never left to eager, which draws others: a pass and its repetition by checkpointing may have other rules."""
    fused, operator = speed(row, "fused"), models.PROBLEMS[row["problem"]].ModelNew.epilogue
    epilogue = speed(row, "epilogue")
    found = {"fused": fused or epilogue, "epilogue": epilogue}
    return found if operator.varying > operator.tensors else found | {"eager": speed(row, "left")}


def best(row: dict) -> float:
    return max(speeds(row).values())


def least(row: dict) -> float:
    """How fast what runs there is to be: as eager, or as the fastest that can run, but for noise."""
    return ENOUGH * min(1.0, best(row))


def sizes(row: dict) -> tuple[tuple[int, ...], tuple[int, ...], int]:
    """As choice.fastest takes them."""
    image, itemsize = row["image"], {"float32": 4, "bfloat16": 2}[row["dtype"]]
    filters = (row["channels_out"], row["channels_in"], *[row["filter"]] * len(image))
    return (row["N"], row["channels_in"], *image), filters, itemsize


def losses(row: dict) -> list[float]:
    found, enough, most = speeds(row), least(row), best(row)
    slow = {way: SLOW * (each < enough) for way, each in found.items()}
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


def fitted(rows: Sequence[dict]) -> dict[tuple[str, str], choice.Rule]:
    return {kind: Tree(each).rule(np.arange(len(each))) for kind, each in kinds(rows).items()}


def chosen(rules: dict[tuple[str, str], choice.Rule], row: dict) -> float:
    """The speed of what the rules name."""
    return speeds(row)[choice.fastest(rules[row["problem"], row["phase"]], *sizes(row))[0]]


def held_out(rows: Sequence[dict]) -> int:
    """Of how many rows rules choose what is too slow, that were fitted without a row's size and what else is in its fold."""
    found = 0
    shapes = list(dict.fromkeys(sizes(row)[:2] for row in rows))
    fold = {shape: (index * 7) % FOLDS for index, shape in enumerate(shapes)}
    for each in range(FOLDS):
        rules = fitted([row for row in rows if fold[sizes(row)[:2]] != each])
        left = [row for row in rows if fold[sizes(row)[:2]] == each]
        found += sum(chosen(rules, row) < least(row) for row in left)
    return found


def shown(rule: choice.Rule, indent: int = 8) -> str:
    """As Python reads it."""
    if isinstance(rule, str):
        return f'"{rule}"'
    name, most, low, high = rule
    gap = "\n" + " " * indent
    return f'("{name}", {most},{gap}{shown(low, indent + 4)},{gap}{shown(high, indent + 4)})'


def report(rows: Sequence[dict]) -> str:
    rules = fitted(rows)
    lines = ["RULES: dict[tuple[str, str], Rule] = {"]
    lines += [f"    {kind!r}: {shown(rule)},".replace("'", '"') for kind, rule in rules.items()]
    columns = f"{'sizes':>7}{'leaves':>8}{'auto':>7}{'rules':>7}{'fastest':>9}{'least':>8}{'lost':>8}"
    lines += ["}", "", f"{f'below {ENOUGH} × eager:':>95}", f"{'':50}{'phase':9}{columns}{'held out':>10}"]
    for (problem, phase), each in kinds(rows).items():
        own, fastest = [chosen(rules, row) for row in each], [best(row) for row in each]
        auto = sum(speed(row, "auto") < ENOUGH for row in each)
        below = sum(s < ENOUGH for s in own), sum(s < ENOUGH for s in fastest)
        lost = math.exp(sum(map(math.log, np.divide(fastest, own))) / len(own)) - 1
        leaves = sum(shown(rules[problem, phase]).count(f'"{way}"') for way in LADDER)
        figures = f"{len(each):7}{leaves:8}{auto:7}{below[0]:7}{below[1]:9}{min(own):8.2f}{lost:8.1%}"
        lines.append(f"{problem:50}{phase:9}{figures}{held_out(each):10}")
    lines += ["", "lost most, times the speed of the best:"]
    order = sorted(rows, key=lambda row: chosen(rules, row) / best(row))
    for row in order[:10]:
        found = ", ".join(f"{way} {each:.2f}" for way, each in speeds(row).items())
        size = f"{row['N']} × {row['channels_in']} -> {row['channels_out']}, {row['filter']}, {row['image']}"
        mine = choice.fastest(rules[row["problem"], row["phase"]], *sizes(row))[0]
        lines.append(f"  {row['number']} {size}, {row['dtype']}, {row['phase']}: {mine}; × eager: {found}")
    return "\n".join(lines)
