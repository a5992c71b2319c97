"""What compare.py's rows say: who stands where, as text and as pictures."""

from __future__ import annotations

import datetime
import math
import textwrap
from collections.abc import Iterable
from typing import NamedTuple

import torch

from inline_kernels.loader.toolchain import cpu_name


class Standing(NamedTuple):
    """Who counts among rows of one problem, phase and kind of input; None where nobody has a time."""

    eager: dict | None
    exact: dict | None  # the fastest peer that keeps the rule, eager among them
    fastest: dict | None  # the fastest peer of any accuracy
    ours: dict | None  # what runs by default, or the fastest of ours where that isn't known


def ms_of(row: dict) -> float | None:
    """The time as called, or, in records that don't have it, the GPU's."""
    return row["median_ms"] if row.get("call_ms") is None else row["call_ms"]


def is_peer(row: dict) -> bool:
    return row.get("peer", row["variant"] not in ("epilogue", "folded", "fused"))  # older records don't say


def standing(rows: list[dict]) -> Standing:
    timed = sorted((row for row in rows if row["median_ms"] is not None), key=ms_of)
    peers = [row for row in timed if is_peer(row)]
    ours = [row for row in timed if not is_peer(row) and row["speedup_vs_eager"]]
    first = lambda rows: next(iter(rows), None)  # noqa: E731
    return Standing(
        first(row for row in peers if row["variant"] == "eager"),
        first(row for row in peers if row["ok"]),
        first(peers),
        first(row for row in ours if row.get("auto")) or first(ours),
    )


def groups(rows: list[dict]) -> dict[tuple[str, str, str], list[dict]]:
    """Rows by problem, phase and kind of input."""
    found = {}
    for row in rows:
        found.setdefault((row["problem"], row["phase"], row.get("inputs", "default")), []).append(row)
    return found


def title_of(row: dict) -> str:
    number = f"{row['number'] or ''}"
    name = row["problem"].removeprefix(f"{number}_").replace("_", " ")
    return f"{number} {name}".strip()


def name_of(row: dict) -> str:
    """A contestant's name, in tables and pictures."""
    return "fused" if row["variant"] == "candidate" else row["variant"]


def situation_of(row: dict) -> str:
    label = row.get("inputs", "default")
    return row["phase"] + ("" if label == "default" else f" ({label})")


def status_of(row: dict) -> str:
    """Why a row has no time."""
    return "did not run" if row["ok"] is None else "fails its check"


def inexact(row: dict | None) -> str | None:
    """By how much a peer misses the rule, in words; None if it keeps it."""
    if row is None or row["ok"] or row["median_ms"] is None:
        return None
    times = row.get("error_vs_eager")
    if times is None:
        return "not finite"
    return f"error {times:.1f} × eager’s" if times < 10 else f"error {times:,.0f} × eager’s"


def table(rows: list[dict]) -> str:
    """The rows as plain text: one line each, under a line per problem, phase and kind of input, and the
    factors that follow."""
    lines = []
    for group in groups(rows).values():
        first, on_gpu = group[0], group[0]["device"] == "cuda"
        floor = f", floor {first['floor_ms']:.3g} ms" if first["floor_ms"] else ""
        shape = "×".join(map(str, first["shape"]))
        lines += [
            "",
            f"{title_of(first)}: {situation_of(first)}, {first['dtype']}, {shape}, {first['device']}{floor}",
        ]
        columns = (
            f"{'GPU ms':>9}{'quartiles':>17}{'host µs':>9}{'MB more':>9}" if on_gpu else f"{'quartiles':>17}"
        )
        error = "error / eager’s (limit 2), and of what"
        lines.append(f"  {'variant':13}{'ms':>9}{'× eager':>9}{columns}   {error}")
        eager = standing(group).eager
        lines += [f"  {_line(row, eager, on_gpu)}" for row in group]
        lines += [f"  {text}" for text in factors(group)]
    return "\n".join(lines[1:])


def _line(row: dict, eager: dict | None, on_gpu: bool) -> str:
    if row["median_ms"] is None:
        return f"{name_of(row):13}{status_of(row)}: {textwrap.shorten(row['reason'], 180, placeholder=' …')}"
    speedup = f"{ms_of(eager) / ms_of(row):.2f}" if eager else "–"
    columns = f"{row['low_ms']:.3g}–{row['high_ms']:.3g}".rjust(17)
    if on_gpu:
        columns = f"{row['median_ms']:9.3f}{columns}{row['host_us']:9.0f}{row['memory_mb']:9.1f}"
    times = row.get("error_vs_eager")
    error = "–" if times is None else f"{times:.2f}" if times < 10 else f"{times:,.0f}"
    text = f"{row['quantity']}, {row['case']}" if row.get("quantity") else ""
    text = f"less exact than the rule asks: {text}" if inexact(row) else text
    if row["variant"] == "eager":  # by whose error the others' are measured
        error = text = ""
    return f"{name_of(row):13}{ms_of(row):9.3f}{speedup:>9}{columns}{error:>10}  {text}".rstrip()


def factors(rows: list[dict]) -> list[str]:
    """What may be said of rows of one group: ours over the best peer that keeps the rule, and over the
    fastest of any accuracy."""
    _, exact, fastest, ours = standing(rows)
    if not ours or not exact:
        return []
    text = f"{name_of(ours)}: {ms_of(exact) / ms_of(ours):.2f} × as fast as {exact['variant']}, the best peer that keeps the rule"
    if fastest is not exact:
        text += f"; {ms_of(fastest) / ms_of(ours):.2f} × as fast as {fastest['variant']}, the fastest of any accuracy"
    return [text]


# Of Okabe and Ito's, which colour-blind people tell apart: greys and blues for peers, oranges for ours. No picture needs them: bars and curves
# are named beside what they show.
COLOURS = {
    "eager": "#999999", "compile": "#8fcff0", "max-autotune": "#56b4e9", "compile-cl": "#0072b2", "compile-fp32": "#b3d9ee",
    "epilogue": "#e69f00", "fused": "#d55e00",
}  # fmt: skip
OTHER_PEERS, OURS, INK = "#009e73", "#d55e00", "#222222"
# Behind what may lie over lines.
LABEL = {"facecolor": "#ffffff", "edgecolor": "none", "alpha": 0.85, "pad": 1.0}
# Pictures have a white background of their own, so that they read on a light and on a dark page.
STYLE = {
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "text.color": INK,
    "hatch.linewidth": 0.8,
}
LINEAR = 30  # factors further apart than this have a logarithmic axis


def _factor_axis(axis, factors: Iterable[float], name: str = "speed-up over eager") -> float:
    """An axis for bars of such factors, with room for labels on the right; returns where its bars begin: at its left end, so that the
    slowest has the shortest bar. It starts at 0, or is logarithmic where factors are far apart, and then says so."""
    low, high = min([1.0, *factors]), max([1.0, *factors])
    if linear := high / low <= LINEAR:
        begin, end = 0.0, 1.9 * max(high, 1.2)
        step = 0.5 if 1.3 * high < 2 else next(step for step in (1, 2, 5) if high <= 6 * step)
        multiples = [step * number for number in range(1, int(LINEAR / step) + 1)]
        ticks = sorted([1, *(tick for tick in multiples if abs(tick - 1) >= 0.8 * step)])  # labels don't meet
    else:
        begin = low / 2
        end, steps = high * (high / begin) ** 0.9, (1, 2, 5) if high / low < 60 else (1,)
        ticks = [step * 10.0**power for power in range(-5, 6) for step in steps]
        axis.set_xscale("log")
    axis.set_xlim(begin, end)
    ticks = [tick for tick in ticks if begin <= tick <= 1.3 * high]
    axis.set_xticks(ticks, [f"{tick:,g}×" for tick in ticks])
    axis.minorticks_off()
    axis.axvline(1, color=INK, linewidth=1, zorder=3)
    axis.set_xlabel(name if linear else f"{name} (logarithmic)", fontsize=8)
    return begin


def _bar(axis, y: float, begin: float, factor: float, colour: str, text: str, *, height=0.72, hatched=False, ours=False, after=0.0):  # fmt: skip
    """A bar from `begin` to its factor, and its label behind it, or behind `after`: bold for ours."""
    look = {"color": colour, "edgecolor": INK, "linewidth": 0.5, "hatch": "////" if hatched else None}
    axis.barh(y, factor - begin, left=begin, height=height, **look)
    weight = "bold" if ours else "normal"
    at = max(factor, after), y
    axis.annotate(text, at, xytext=(6, 0), textcoords="offset points", va="center", fontsize=8, weight=weight, bbox=LABEL)  # fmt: skip


def plot(rows: list[dict], title: str | None = None):
    """Every variant as a matplotlib figure: a panel per problem, phase and kind of input, in it a bar per variant with its
    speed-up over eager, as called; eager is the line at 1.

    A diamond is the speed-up of the GPU's time alone. A hatched bar belongs to a peer that is less exact than the rule asks.
    What of ours failed its check has no bar. title: by default this machine and today's date.
    """
    from matplotlib import pyplot

    panels = list(groups(rows).values())
    columns = min(2, len(panels))
    lines = math.ceil(len(panels) / columns)
    height = 1.1 + 0.27 * max(len(group) for group in panels)
    if title is None:
        machine = torch.cuda.get_device_name() if rows[0]["device"] == "cuda" else cpu_name()
        title = f"{machine}, {datetime.date.today().isoformat()}"
    with pyplot.rc_context(STYLE):
        figure, axes = pyplot.subplots(
            lines, columns, figsize=(5.6 * columns, height * lines + 0.4), squeeze=False, layout="constrained", facecolor="#ffffff"
        )  # fmt: skip
        head = textwrap.fill(f"Speed-up over eager PyTorch · {title}", 60 * columns)
        figure.suptitle(head, fontsize=10, fontweight="bold")
        if any(row.get("call_ms") not in (None, row["median_ms"]) for row in rows):
            figure.supxlabel(
                "bar: as called · diamond: the GPU’s time alone · hatched: less exact than the rule asks",
                fontsize=8,
            )
        for axis in axes.flat:
            axis.set_visible(False)
        for axis, group in zip(axes.flat, panels):
            axis.set_visible(True)
            _panel(axis, group)
        pyplot.close(figure)  # else a notebook shows it twice
    return figure


def overview(rows: list[dict], phases: Iterable[str], title: str):
    """Ours beside the best peer as a matplotlib figure: a panel per phase, in it a bar of each per problem with its speed-up over eager, as
    called; and the fastest peer, hatched, where that is less exact. Of a problem that is timed with other inputs than its default, those are
    shown: its default leaves work out.
    """
    from matplotlib import pyplot

    phases = list(phases)
    by_phase = [_telling(rows, phase) for phase in phases]
    size = (5.6 * len(by_phase), 0.9 + 0.95 * max(map(len, by_phase)))
    with pyplot.rc_context(STYLE):
        figure, axes = pyplot.subplots(
            1, len(by_phase), figsize=size, squeeze=False, layout="constrained", facecolor="#ffffff"
        )
        figure.suptitle(f"Speed-up over eager PyTorch, as called · {title}", fontsize=10, fontweight="bold")
        for axis, phase, panels in zip(axes.flat, phases, by_phase):
            names = {"forward_grad": "a call, gradients on", "train": "a call and its backward pass"}
            axis.set_title(names.get(phase, phase), loc="left", fontsize=9)
            _duels(axis, panels)
            names = [textwrap.fill(title_of(group[0]), 24) for group in panels]
            axis.set_yticks(range(len(names)), names if axis is axes.flat[0] else [""] * len(names))
        missed = any(inexact(standing(group).fastest) for panels in by_phase for group in panels)
        legend = (
            "above: the best peer that is as exact as eager"
            + " · hatched: the fastest peer, less exact" * missed
        )
        figure.supxlabel(f"{legend} · below, in bold: fused", fontsize=8)
        pyplot.close(figure)  # else a notebook shows it twice
    return figure


def _telling(rows: list[dict], phase: str) -> list[list[dict]]:
    """The rows of each problem in a phase: of its last kind of input, which is the default where there is no other."""
    return list({problem: group for (problem, of, _), group in groups(rows).items() if of == phase}.values())


def _duels(axis, panels: list[list[dict]]) -> None:
    contests = []
    for group in panels:
        eager, exact, fastest, ours = standing(group)
        shown = [exact, fastest] if inexact(fastest) else [exact]
        contests.append([(row, ms_of(eager) / ms_of(row)) for row in (*shown, ours) if row])
    begin = _factor_axis(axis, [factor for contest in contests for _, factor in contest])
    for y, contest in enumerate(contests):
        height = 0.8 / len(contest)
        for place, (row, factor) in enumerate(contest):
            ours, miss = not is_peer(row), inexact(row)
            colour = OURS if ours else COLOURS["compile-fp32" if miss else "max-autotune"]
            text = f"{factor:.2g}× · {name_of(row)} {ms_of(row):.3g} ms" + f" · {miss}" * bool(miss)
            text += f" ({row['inputs']})" * (ours and row.get("inputs", "default") != "default")
            at = y - 0.4 + height * (place + 0.5)
            _bar(axis, at, begin, factor, colour, text, height=0.9 * height, hatched=bool(miss), ours=ours)
    axis.set_ylim(len(panels) - 0.5, -0.6)


def _panel(axis, rows: list[dict]) -> None:
    first, eager = rows[0], standing(rows).eager
    shape = "×".join(map(str, first["shape"]))
    heading = textwrap.shorten(title_of(first), 70)
    axis.set_title(f"{heading}\n{situation_of(first)}, {first['dtype']}, {shape}", loc="left", fontsize=9)
    timed = [row for row in rows if row["median_ms"] and eager]
    factors = {id(row): (ms_of(eager) / ms_of(row), eager["median_ms"] / row["median_ms"]) for row in timed}
    begin = _factor_axis(axis, [factor for both in factors.values() for factor in both])
    for y, row in enumerate(rows):
        if not is_peer(row) and row["median_ms"] and not row["speedup_vs_eager"]:
            text = f"{row['median_ms']:.3g} ms"  # of an older record: no factor is claimed
            axis.annotate(text, (1, y), xytext=(6, 0), textcoords="offset points", va="center")
            continue
        if id(row) not in factors:
            style = {"va": "center", "color": "#a00000", "style": "italic"}
            axis.annotate(status_of(row), (1, y), xytext=(6, 0), textcoords="offset points", **style)
            continue
        factor, on_gpu = factors[id(row)]
        apart, miss = row.get("call_ms") not in (None, row["median_ms"]), inexact(row)
        text = f"{factor:.2f}× · " * (row is not eager) + f"{ms_of(row):.3g} ms"
        text += f" ({row['median_ms']:.3g} GPU)" * apart + f" · {miss}" * bool(miss)
        colour = COLOURS.get(row["variant"], OTHER_PEERS if is_peer(row) else OURS)
        _bar(axis, y, begin, factor, colour, text, hatched=bool(miss), ours=not is_peer(row), after=on_gpu if apart else 0.0)  # fmt: skip
        if apart and row is not eager:
            axis.plot(on_gpu, y, marker="D", color="#ffffff", markeredgecolor=INK, markersize=4.5, zorder=4)
    axis.set_yticks(range(len(rows)), [name_of(row) for row in rows])
    axis.set_ylim(len(rows) - 0.4, -0.6)


def ranking(factors: dict[str, float], title: str, name: str):
    """Many factors over eager as a matplotlib figure: a column each, the smallest first, with what it belongs to below and its value above."""
    from matplotlib import pyplot

    ranked = sorted(factors.items(), key=lambda each: each[1])
    with pyplot.rc_context(STYLE):
        figure, axis = pyplot.subplots(figsize=(11.2, 2.9), layout="constrained", facecolor="#ffffff")
        figure.suptitle(title, fontsize=10, fontweight="bold")
        axis.bar(
            range(len(ranked)), [factor for _, factor in ranked], color=OURS, edgecolor=INK, linewidth=0.5
        )
        for x, (_, factor) in enumerate(ranked):
            axis.annotate(f"{factor:.1f}", (x, factor), xytext=(0, 2), textcoords="offset points", ha="center", fontsize=8)  # fmt: skip
        axis.axhline(1, color=INK, linewidth=1)
        axis.annotate("eager", (len(ranked) - 0.4, 1), va="bottom", fontsize=8)
        axis.set_xticks(range(len(ranked)), [label for label, _ in ranked])
        axis.set_xlim(-0.6, len(ranked) + 0.4)
        axis.set(xlabel=name, ylabel="speed-up over eager")
        pyplot.close(figure)  # else a notebook shows it twice
    return figure


# ------------------------------------------------------------------------------------------------- the lessons' pictures


def _figure(columns: int, height: float, title: str, width: float = 7.6):
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(
        1, columns, figsize=(width, height), squeeze=False, layout="constrained", facecolor="#ffffff"
    )
    lines = title if len(title) < 90 else title.replace(" · ", "\n", 1)
    figure.suptitle(lines, fontsize=10, fontweight="bold")
    pyplot.close(figure)  # else a notebook shows it twice
    return figure, list(axes.flat)


def ladder(ladders: list[tuple[str, list[dict], dict[str, float]]]):
    """Ladders side by side as a matplotlib figure, each (title, rungs, peers): a bar per rung with its speed-up over eager, a diamond where
    it was predicted, hatched where it misses the rule, a line from one quartile to the other; a dashed line per peer's speed-up.

    A rung: name, ms, eager_ms, predicted_ms (or None), ok; low_ms and high_ms, its quartiles, if they are known; error, as a multiple of
    eager's, if it is a number.
    """
    from matplotlib import pyplot

    with pyplot.rc_context(STYLE):
        tallest = max(len(rungs) for _, rungs, _ in ladders)
        figure, axes = _figure(len(ladders), 1.1 + 0.36 * tallest, "Speed-up over eager PyTorch", 7.6 + 3 * (len(ladders) - 1))  # fmt: skip
        for axis, (title, rungs, peers) in zip(axes, ladders):
            axis.set_title(_broken(title, 80 if len(ladders) == 1 else 52), loc="left", fontsize=9)
            factors = [rung["eager_ms"] / rung["ms"] for rung in rungs]
            guesses = [rung["predicted_ms"] and rung["eager_ms"] / rung["predicted_ms"] for rung in rungs]
            begin = _factor_axis(axis, [*factors, *filter(None, guesses), *peers.values()])
            for y, (rung, factor, guess) in enumerate(zip(rungs, factors, guesses)):
                text = f"{factor:.2f}× · {rung['ms']:.3g} ms"
                text += f" · predicted {rung['predicted_ms']:.3g}" if guess else ""
                if not rung["ok"]:
                    error = rung.get("error")
                    text += f" · error {error:,.3g} × eager’s" if error else " · wrong"
                colour = COLOURS.get(rung["name"].split()[0], OURS)
                first, last = (
                    rung["eager_ms"] / (rung.get(key) or rung["ms"]) for key in ("high_ms", "low_ms")
                )
                after = max(guess or 0.0, last)
                _bar(axis, y, begin, factor, colour, text, hatched=not rung["ok"], after=after)
                if "low_ms" in rung:
                    between = [[factor - first], [last - factor]]
                    axis.errorbar(factor, y, xerr=between, fmt="none", ecolor=INK, capsize=3, linewidth=1, zorder=3)  # fmt: skip
                if guess:
                    axis.plot(guess, y, marker="D", color="#ffffff", markeredgecolor=INK, markersize=5, zorder=4)  # fmt: skip
            for name, speedup in peers.items():
                axis.axvline(speedup, color=COLOURS["compile-cl"], linestyle="--", linewidth=1.2, zorder=0)
                axis.annotate(f" {name} {speedup:.2f}×", (speedup, len(rungs) - 0.45), fontsize=7.5, color=COLOURS["compile-cl"], va="center")  # fmt: skip
            axis.set_yticks(range(len(rungs)), [rung["name"] for rung in rungs])
            axis.set_ylim(len(rungs) - 0.3, -0.6)
        every = [rung for _, rungs, _ in ladders for rung in rungs]
        legend = (
            axes[0].get_xlabel()
            + "; eager = 1"
            + " · diamond: predicted" * any(rung["predicted_ms"] for rung in every)
        )
        legend += " · line: quartiles" * any("low_ms" in rung for rung in every)
        legend += " · dashed: the best peer" * any(peers for *_, peers in ladders)
        legend += " · hatched: less exact than the rule asks" * any(not rung["ok"] for rung in every)
        axes[0].set_xlabel(legend, fontsize=8)
    return figure


def _broken(title: str, width: int) -> str:
    """The parts of a title in lines of at most so many characters, as far as its parts allow."""
    lines = [""]
    for part in title.split(", "):
        joined = f"{lines[-1]}, {part}" if lines[-1] else part
        lines = [*lines[:-1], joined] if len(joined) <= width or not lines[-1] else [*lines, part]
    return ",\n".join(lines)


def _per_second(per_ms: float, unit: str) -> str:
    return f"{per_ms / 1e9:.3g} T{unit}/s" if per_ms >= 1e9 else f"{per_ms / 1e6:.3g} G{unit}/s"


def roofline(points: list[dict], roofs: dict[str, float], title: str):
    """Operations per second against operations per byte as a matplotlib figure, on logarithmic axes, under the machine's roofs.

    A point: name, ms, bytes, operations; roofs: bytes per millisecond as "memory", operations per millisecond by their kinds.
    """
    from matplotlib import pyplot, ticker

    with pyplot.rc_context(STYLE):
        figure, [axis] = _figure(1, 4.2, f"Roofline, measured · {title}")
        memory, peaks = roofs["memory"], {name: peak for name, peak in roofs.items() if name != "memory"}
        unit, a_unit = (
            ("TFLOP/s", 1e9) if max(peaks.values()) >= 1e9 else ("GFLOP/s", 1e6)
        )  # operations a millisecond
        intensity = [point["operations"] / point["bytes"] for point in points]
        low, high = min([*intensity, min(peaks.values()) / memory]) / 3, max([*intensity, max(peaks.values()) / memory]) * 4  # fmt: skip
        for peak in peaks.values():
            axis.plot(
                [low, peak / memory, high],
                [low * memory / a_unit, peak / a_unit, peak / a_unit],
                color="#222222",
                linewidth=1,
            )
        of_roofs = [axis.annotate(f"{name}: {_per_second(peak, 'FLOP')}", (high, peak / a_unit), xytext=(0, 3), textcoords="offset points", ha="right", fontsize=8) for name, peak in peaks.items()]  # fmt: skip
        of_points = {}
        axis.annotate(f"memory: {_per_second(memory, 'B')}", (low, low * memory / a_unit), xytext=(8, -3), textcoords="offset points", va="top", fontsize=8)  # fmt: skip
        for number, (x, point) in enumerate(zip(intensity, points)):
            y = point["operations"] / point["ms"] / a_unit
            axis.plot(
                x,
                y,
                marker="os^Dv*PXph<"[number % 11],
                color=OURS,
                markeredgecolor="#222222",
                markersize=8,
                linestyle="",
            )
            of_points[axis.annotate(f"{point['name']}, {point['ms']:.3g} ms", (x, y), xytext=(8, -3), textcoords="offset points", fontsize=8, bbox=LABEL)] = y  # fmt: skip
        axis.set(
            xscale="log",
            yscale="log",
            xlim=(low, high),
            xlabel="operations per byte moved (logarithmic)",
            ylabel=f"{unit} (logarithmic)",
        )
        for each in (axis.xaxis, axis.yaxis):
            each.set_major_formatter(ticker.FuncFormatter(lambda value, _: f"{value:,.6g}"))
        axis.yaxis.set_major_locator(ticker.LogLocator(subs=(1, 2, 5), numticks=12))
        axis.minorticks_off()
        _move_apart(sorted(of_points, key=of_points.get, reverse=True), of_roofs)
    return figure


def _move_apart(texts: list, others: list) -> None:
    """Moves annotations down, the highest first, until none covers another or one of the `others`, which stay."""
    figure = others[0].figure
    figure.canvas.draw()
    taken = [each.get_window_extent() for each in others]
    for text in texts:
        for _ in range(100):  # steps of a point: more than a few labels are high
            if not any(text.get_window_extent().overlaps(box) for box in taken):
                break
            text.xyann = text.xyann[0], text.xyann[1] - 1
        taken.append(text.get_window_extent())


def passes(variants: dict[str, dict[str, tuple[float, float]]]):
    """Bytes over memory as a matplotlib figure: a bar per variant, in it a piece per line of code, what is read plain and what is written
    hatched. variants: name to {line: (bytes read, bytes written)}."""
    from matplotlib import pyplot

    with pyplot.rc_context(STYLE):
        figure, [axis] = _figure(1, 1.2 + 0.55 * len(variants), "Passes over memory")
        longest = max(sum(map(sum, lines.values())) for lines in variants.values()) / 1e6
        furthest = 1.15 * longest
        for y, lines in enumerate(variants.values()):
            left, unnamed = 0.0, []
            for number, (line, sizes) in enumerate(lines.items()):
                colour = (COLOURS["compile"], "#e3e3e3")[number % 2]
                for size, hatch in zip(sizes, (None, "....")):
                    axis.barh(
                        y,
                        size / 1e6,
                        left=left,
                        height=0.62,
                        color=colour,
                        hatch=hatch,
                        edgecolor="#222222",
                        linewidth=0.6,
                    )
                    left += size / 1e6
                middle = left - sum(sizes) / 2e6
                if sum(sizes) / 1e6 > 0.011 * longest * len(line):  # there is room for its name
                    axis.text(middle, y, line, ha="center", va="center", fontsize=7.5, bbox=LABEL)
                else:
                    unnamed.append(line)
            axis.annotate(f"{left:,.4g} MB", (left, y), xytext=(5, 0), textcoords="offset points", va="center", fontsize=8, weight="bold")  # fmt: skip
            if unnamed:
                axis.annotate("narrow: " + ", ".join(unnamed), (left, y), xytext=(5, -11), textcoords="offset points", va="center", fontsize=7.5)  # fmt: skip
                furthest = max(furthest, 1.35 * left)
        axis.set_xlim(0, furthest)
        axis.set_yticks(range(len(variants)), list(variants))
        axis.set_ylim(len(variants) - 0.5, -0.5)
        axis.set_xlabel("MB; plain: read, dotted: written", fontsize=8)
    return figure


def errors(rows: list[dict], title: str):
    """Errors against float64 as a matplotlib figure: of each row the multiple of eager's, on a logarithmic axis; 2 is the limit."""
    from matplotlib import pyplot

    with pyplot.rc_context(STYLE):
        figure, [axis] = _figure(
            1, 1.2 + 0.24 * len(rows), f"Error against float64, as a multiple of eager’s · {title}"
        )
        values = [row["error_vs_eager"] for row in rows]
        begin = _factor_axis(axis, [2.0, *values], "error, as a multiple of eager’s; dashed: the limit")
        for y, (row, value) in enumerate(zip(rows, values)):
            text = f"{value:,.2f}×" if value < 10 else f"{value:,.0f}×"
            colour = COLOURS.get(row["variant"], OTHER_PEERS)
            _bar(axis, y, begin, value, colour, text, hatched=value > 2, after=2.0)
        axis.axvline(2, color="#a00000", linestyle="--", linewidth=1.2)
        axis.set_yticks(range(len(rows)), [f"{row['number']} {row['variant']}" for row in rows])
        axis.set_ylim(len(rows) - 0.4, -0.6)
    return figure


def builds(rows: list[dict], title: str):
    """Seconds of a first build as a matplotlib figure: a row is what benchmarks/loader.py records."""
    from matplotlib import pyplot

    with pyplot.rc_context(STYLE):
        figure, [axis] = _figure(1, 1.2 + 0.5 * len(rows), f"The first build · {title}")
        ways = ("usual_s", "load_inline", COLOURS["max-autotune"]), ("first_s", "inline_loader", OURS), ("warm_s", "inline_loader, from the cache", COLOURS["epilogue"])  # fmt: skip
        for y, row in enumerate(rows):
            for place, (key, way, colour) in enumerate(ways):
                at = y + 0.27 * (place - 1)
                axis.barh(at, row[key], height=0.25, color=colour, edgecolor="#222222", linewidth=0.5)
                axis.annotate(f"{way} {row[key]:.3g} s", (row[key], at), xytext=(5, 0), textcoords="offset points", va="center", fontsize=7.5)  # fmt: skip
        axis.set_xlim(0, 1.3 * max(row["usual_s"] for row in rows))
        axis.set_yticks(range(len(rows)), [textwrap.fill(row["name"].replace("_", " "), 24) for row in rows])
        axis.set_ylim(len(rows) - 0.5, -0.5)
        axis.set_xlabel("seconds, less is better", fontsize=8)
    return figure


def against(series: dict[str, dict[float, float]], x: str, y: str, title: str, log: bool = True):
    """Curves as a matplotlib figure, each of its own mark and line, named at its end: series name to {x: y}. x is positive; its axis
    is logarithmic, and with `log` that of y, too."""
    from matplotlib import pyplot, ticker

    with pyplot.rc_context(STYLE):
        (figure, [axis]), ends = _figure(1, 3.6, title), []
        for number, (name, points) in enumerate(series.items()):
            colour = (
                OURS
                if name.startswith(("fused", "ours"))
                else COLOURS["compile-cl"]
                if name.startswith("eager")
                else OTHER_PEERS
            )
            style = ("-", "--", "-.", ":")[number % 4]
            marker = "os^D"[number % 4] if len(points) < 20 else None
            axis.plot(list(points), list(points.values()), style, marker=marker, color=colour, markersize=4.5)
            ends.append((list(points.items())[-1], name, colour))
        axes = [axis.xaxis, axis.yaxis] if log else [axis.xaxis]
        axis.set(xscale="log", yscale="log" if log else "linear")
        for each in axes:
            each.set_major_locator(ticker.LogLocator(subs=(1, 2, 5)))
            each.set_major_formatter("{x:g}")
        axis.minorticks_off()
        if log:
            ticks = sorted({tick for points in series.values() for tick in points})
            axis.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
        axis.set(xlabel=f"{x} (logarithmic)", ylabel=f"{y} (logarithmic)" if log else y)
        first, last = axis.get_xlim()
        axis.set_xlim(first, last * (last / first) ** 0.3)
        _name_at_ends(axis, ends)
    return figure


def _name_at_ends(axis, ends: list[tuple[tuple[float, float], str, str]]) -> None:
    """Names curves where they end, each (end, name, colour), in lines of their own where ends are close."""
    height, line = 190, 11  # points, of the axis and of a line of text
    low, high = map(axis.transScale.transform, zip([1, 1], axis.get_ylim()))
    place = lambda end: (axis.transScale.transform(end)[1] - low[1]) / (high[1] - low[1]) * height  # noqa: E731
    above = -math.inf
    for end, name, colour in sorted(ends, key=lambda each: each[0][1]):
        above = max(place(end), above + line)
        side = 6, above - place(end)
        axis.annotate(name, end, xytext=side, textcoords="offset points", va="center", fontsize=8, color=colour, bbox=LABEL)  # fmt: skip
