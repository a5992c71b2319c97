"""Records, README's table, RESULTS.md and the summary: they show the newest records, older ones are still read.

What is in a record is tested in test_compare.py.
"""

from __future__ import annotations

import itertools
import json
import re
import subprocess
import sys

import pytest

from benchmarks import report
from inline_kernels.bench import charts, compare, records
from test_checks import MIN_ADD, small

GPU = "NVIDIA H200"


@pytest.fixture(scope="module")
def row() -> dict:
    return compare.compare(small(MIN_ADD), device="cpu", phase="forward_grad", variants=["eager"], seed=1)[0]


def rows_of(row, misses=(), **times) -> list[dict]:
    """A row for each variant: its time as called, twice the GPU's; None for one that has none."""
    return [
        {
            **row,
            "device": "cuda",
            "variant": variant.replace("_", "-"),
            "peer": variant in ("eager", "compile", "compile_cl"),
            "median_ms": ms and ms / 2,
            "call_ms": ms,
            "ok": variant not in misses,
            "error_vs_eager": 900.0 if variant in misses else 1.0,
        }
        for variant, ms in times.items()
    ]


def record(rows, **others) -> dict:
    return {**records.record(rows), "commit": "a" * 40, "dirty": False, **others}


def write(folder, name, rows, **others):
    (folder / f"{name}.json").write_text(json.dumps(record(rows, **others)))


def test_pages_show_the_recorded_runs():
    text, records = report.README.read_text(encoding="utf-8"), report.newest_records()
    told = "run: python benchmarks/report.py --readme"
    assert report.with_table(text, records[0]) == text, told
    assert report.PAGE.read_text(encoding="utf-8") == report.page(records), told
    assert text.count("\n") <= 130


def test_the_newest_record_of_each_machine_is_shown(tmp_path, row):
    for name, date, ms in (("a", "2026-02-01", 7.0), ("b", "2026-01-01", 5.0)):
        write(tmp_path, name, [{**row, "median_ms": ms, "call_ms": ms}], date=date)
    write(tmp_path, "gpu", rows_of(row, eager=3.0, fused=1.0), date="2025-01-01", gpu=GPU)
    (tmp_path / "other.json").write_text(json.dumps({"rows": [{"kernel": "another benchmark's"}]}))
    records = report.newest_records(tmp_path)
    text = report.page(records)
    assert text.index(GPU) < text.index("| 7 ms |") and "| 5 ms |" not in text
    before = "before\n<!-- table -->\nold\n<!-- end of table -->\nafter\n"
    text = report.with_table(before, records[0])
    assert text.startswith("before\n<!-- table -->\n![") and text.endswith("<!-- end of table -->\nafter\n")
    assert "| 3 | eager 3 | 1 | 3.00× | 3.00× |" in text and GPU in text and "old" not in text
    with pytest.raises(ValueError, match="markers"):
        report.with_table("no markers", records[0])


@pytest.mark.parametrize(
    "ours, factors", [("fused", "4.00× | 2.00× | 1.50×"), ("epilogue", "3.20× | 1.60× | 1.20×")]
)
def test_the_page_quotes_the_best_exact_peer_and_the_fastest(ours, factors, row):
    """Under what runs by default, be it the fastest or not."""
    rows = rows_of(row, ["compile_cl"], eager=8.0, compile=4.0, compile_cl=3.0, epilogue=2.5, fused=2.0)
    for each in rows:
        each["auto"] = each["variant"] == ours
    text = report.page([record(rows, gpu=GPU)])
    assert f"| forward_grad | {ours} " in text and f"| {factors} |" in text
    assert "| 8 ms (GPU 4) | compile 4 ms (GPU 2) | compile-cl 3 ms (GPU 1.5), error 900 × eager’s |" in text


def test_peers_that_are_not_installed_are_not_drawn(row):
    rows = rows_of(row, eager=3.0, compile=None, compile_cl=None, fused=None)
    failed = {"ok": None, "reason": "raised ImportError: no such package"}
    rows[1] |= failed
    rows[2] |= failed | {"reason": "raised RuntimeError: no such kernel"}
    rows[3] |= failed
    drawn = [row["variant"] for row in report._drawn(record(rows), "forward_grad")]
    assert drawn == ["eager", "compile-cl", "fused"] and not report._drawn(record(rows), "train")


def test_the_page_says_what_fails(row):
    rows = rows_of(row, ["fused"], eager=8.0, fused=None)
    assert "| fails its check | – | – | – | 8 ms (GPU 4) |" in report.page([record(rows, gpu=GPU)])


def test_older_records_are_read(row):
    """Without times as called; what missed the rule has no time, what gets no factor no speed-up."""
    rows = rows_of(row, ["compile_cl"], eager=8.0, compile=6.0, compile_cl=None, fused=2.0, folded=1.0)
    rows[-1]["speedup_vs_eager"] = None
    later = "peer auto inputs call_ms host_us memory_mb error_vs_eager".split()
    rows = [
        {key: value for key, value in each.items() if key not in later} | {"phase": "forward"}
        for each in rows
    ]
    rows[2]["variant"] = "max-autotune"
    text = report.page([record(rows, gpu=GPU)])
    assert "| forward | fused 1 ms | 4.00× | 3.00× | – | 4 ms | compile 3 ms | – |" in text
    assert charts.plot(rows, GPU)


def test_summary(tmp_path, row):
    """Each log's last line; of the newest record of a GPU who counts and what failed; and a log or record
    that is missing."""
    one = rows_of(row, ["compile_cl"], eager=8.0, compile=4.0, compile_cl=3.0, epilogue=3.0, fused=2.0)
    one.append({**row, "phase": "train", "median_ms": 99.0})
    other = rows_of(row, ["fused"], eager=9.0, epilogue=6.0, fused=None)
    nothing = rows_of(row, ["epilogue"], eager=9.0, epilogue=None)
    rows = (
        one
        + [{**each, "problem": "other"} for each in other]
        + [{**each, "problem": "nothing"} for each in nothing]
    )
    write(tmp_path, "new", rows, date="2026-02-02", gpu=GPU)
    write(tmp_path, "old", one, date="2026-02-01", gpu=GPU)
    write(tmp_path, "cpu", [row], date="2026-02-03")
    (tmp_path / "tests.log").write_text("FAILED test_a\n=== 1 failed, 411 passed in 3.21s ===\n\n")
    lines = report.summary([tmp_path / "tests.log", tmp_path / "no.log"], tmp_path).splitlines()
    assert [line.split(maxsplit=1) for line in lines[:3]] == [
        ["tests", "1 failed, 411 passed in 3.21s"], ["no", "no log"],
        ["benchmark", "fails its check: 7 other fused forward_grad, 7 nothing epilogue forward_grad"],
    ]  # fmt: skip
    assert [line.split("  ", 1)[1].split() for line in lines[5:8]] == [
        ["8", "compile", "4", "compile-cl", "3", "fused", "2", "2.00×", "1.50×"],
        ["9", "eager", "9", "eager", "9", "epilogue", "6", "1.50×", "1.50×"],
        ["9", "eager", "9", "eager", "9", "–", "–", "–"],
    ]  # fmt: skip
    assert f"{tmp_path / 'new.json'}: {GPU}, 2026-02-02" in lines[9] and len(lines) < 20
    (tmp_path / "empty").mkdir()
    assert report.summary([], tmp_path / "empty") == f"benchmark   no record in {tmp_path / 'empty'}"


def test_commands(tmp_path, capsys, monkeypatch):
    (tmp_path / "tests.log").write_text("5 passed\n")
    report.main(["--summary", str(tmp_path / "tests.log")])
    assert capsys.readouterr().out.startswith("tests       5 passed\nbenchmark")
    monkeypatch.setattr(report, "README", tmp_path / "README.md")
    monkeypatch.setattr(report, "PAGE", tmp_path / "RESULTS.md")
    report.README.write_text("<!-- table -->\n<!-- end of table -->\n")
    report.main(["--readme"])
    assert "ms a call | eager |" in report.README.read_text()
    assert "| problem, input | phase |" in report.PAGE.read_text()
    assert all((tmp_path / name).stat().st_size for name in (report.PICTURE, report.PLOT, report.RANKING))
    with pytest.raises(SystemExit):
        report.main([])


def test_readme_code():
    """README's code, each block run as it stands, prints what README says."""
    text = report.README.read_text(encoding="utf-8")
    blocks = re.findall(r"^```(?:python)?\n(.*?)^```$", text, re.S | re.M)[:4]
    program = "\n".join(f'exec({code!r}, {{"__name__": "__main__"}})' for code in blocks[::2])
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, cwd=report.ROOT, capture_output=True, text=True, timeout=300)
    assert done.stdout == "".join(blocks[1::2]), done.stderr


# ---------------------------------------------------------------------------------------------- the lessons' pictures


def texts_of(figure) -> list[str]:
    return [text.get_text() for axis in figure.axes for text in axis.texts]


def hatches_of(figure) -> list[bool]:
    return [bool(bar.get_hatch()) for axis in figure.axes for bar in axis.patches]


def test_a_ladder_shows_prediction_and_error():
    right = {"name": "a", "ms": 2.0, "eager_ms": 8.0, "predicted_ms": 1.0, "ok": True, "error": 0.5}
    wrong = right | {"name": "b", "ms": 16.0, "predicted_ms": None, "ok": False, "error": 900.0}
    figure = charts.ladder([("here", [right, wrong], {"compile": 3.0}), ("there", [right], {})])
    assert texts_of(figure) == [
        "4.00× · 2 ms · predicted 1",
        "0.50× · 16 ms · error 900 × eager’s",
        " compile 3.00×",
        "4.00× · 2 ms · predicted 1",
    ]
    assert hatches_of(figure) == [False, True, False]
    assert "predicted" in figure.axes[0].get_xlabel() and "hatched" in figure.axes[0].get_xlabel()
    figure = charts.ladder([("here", [right | {"predicted_ms": None}], {})])
    assert figure.axes[0].get_xlabel() == "speed-up over eager; eager = 1", "no legend of what is not there"


@pytest.mark.parametrize("slow, scale", [(0.5, "linear"), (0.01, "log")])
def test_the_slowest_has_the_shortest_bar(slow, scale, row):
    """In every picture of factors, whether they are close or far apart; an axis that is logarithmic says so."""
    factors = {"eager": 1.0, "compile": slow, "fused": 4.0}
    rows = rows_of(row, **{name: 8 / factor for name, factor in factors.items()})
    rungs = [{"name": name, "ms": 8 / factor, "eager_ms": 8.0, "predicted_ms": None, "ok": True} for name, factor in factors.items()]  # fmt: skip
    errors = [{"variant": name, "number": 1, "error_vs_eager": factor} for name, factor in factors.items()]
    for figure in charts.plot(rows, GPU), charts.ladder([("here", rungs, {})]), charts.errors(errors, "here"):
        [axis] = figure.axes
        widths = [bar.get_window_extent().width for bar in axis.patches]
        assert 0 < widths[1] < widths[0] < widths[2] and axis.get_xscale() == scale
        assert ("logarithmic" in axis.get_xlabel()) == (scale == "log")


@pytest.mark.parametrize(
    "high, ticks",
    [(1.3, "0.5 1 1.5"), (2.0, "1 2"), (7.0, "1 4 6 8"), (11.0, "1 4 6 8 10 12 14"), (16.0, "1 5 10 15 20")],
)
def test_ticks_of_factors_do_not_meet(high, ticks):
    """1 is always there, none is too near to it, and never is it alone."""
    rungs = [{"name": "a", "ms": 1.0, "eager_ms": high, "predicted_ms": None, "ok": True}]
    [axis] = charts.ladder([("here", rungs, {})]).axes
    assert [label.get_text() for label in axis.get_xticklabels()] == [f"{tick}×" for tick in ticks.split()]


def test_a_pair_has_the_name_that_its_model_has(row):
    """In tables and pictures."""
    rows = [each | {"memory_mb": 0.0} for each in rows_of(row, eager=8.0, candidate=2.0)]
    assert [label.get_text() for label in charts.plot(rows, GPU).axes[0].get_yticklabels()] == [
        "eager",
        "fused",
    ]
    assert "\n  fused: 4.00 × as fast as eager" in charts.table(rows) and "candidate" not in charts.table(
        rows
    )


def test_the_overview_says_what_its_bars_are_without_colours(row):
    exact, missed = (
        rows_of(row, eager=8.0, fused=1.0),
        rows_of(row, ("compile",), eager=8.0, compile=2.0, fused=1.0),
    )
    for rows, hatched in ((exact, False), (missed, True)):
        legend = charts.overview(rows, ["forward_grad"], GPU).get_supxlabel()
        assert (
            ("hatched" in legend) == hatched
            and "above: the best peer" in legend
            and "in bold: fused" in legend
        )


def test_the_overview_draws_the_inputs_that_leave_no_work_out(row):
    rows = [each | {"phase": "train"} for each in rows_of(row, eager=8.0, fused=1.0)]
    rows += [each | {"inputs": "all ties"} for each in rows]
    rows[-1]["call_ms"] = 2.0
    figure = charts.overview(rows, ["train"], GPU)
    assert texts_of(figure) == ["1× · eager 8 ms", "4× · fused 2 ms (all ties)"]
    assert [round(bar.get_width(), 6) for bar in figure.axes[0].patches] == [1.0, 4.0]


def test_a_roofline_puts_work_over_bytes():
    point = {"name": "a", "ms": 2.0, "bytes": 10.0, "operations": 40.0}
    figure = charts.roofline([point], {"memory": 1e9, "float32": 2e9}, "here")
    [axis] = figure.axes
    assert [line.get_xydata().tolist() for line in axis.lines][1:] == [[[4.0, 20e-9]]]
    assert "float32: 2 TFLOP/s" in texts_of(figure) and "memory: 1 TB/s" in texts_of(figure)


def test_labels_of_a_roofline_cover_none_another():
    points = [
        {"name": name, "ms": ms, "bytes": 10.0, "operations": 40.0}
        for name, ms in (("a", 2.0), ("b", 2.0), ("c", 2.1), ("just below the roof", 0.000021))
    ]
    figure = charts.roofline(points, {"memory": 1e9, "float32": 2e6}, "here")
    figure.canvas.draw()
    boxes = [text.get_window_extent() for text in figure.axes[0].texts if text.get_text()]
    assert not any(a.overlaps(b) for a, b in itertools.combinations(boxes, 2))
    [axis] = figure.axes
    assert axis.get_ylabel() == "GFLOP/s (logarithmic)" and "float32: 2 GFLOP/s" in texts_of(figure)
    labels = [text.get_text() for text in axis.get_yticklabels()]
    assert {"0.01", "1"} <= {*labels} and not any("10^" in label for label in labels), "plain numbers"


def test_a_title_breaks_between_its_parts():
    assert (
        charts._broken("NVIDIA H100, forward, batch 128, eager 5.32 ms", 32)
        == "NVIDIA H100, forward, batch 128,\neager 5.32 ms"
    )


def test_errors_are_hatched_past_the_limit():
    rows = [
        {"variant": name, "number": 1, "error_vs_eager": error} for name, error in (("a", 1.9), ("b", 513.0))
    ]
    figure = charts.errors(rows, "here")
    assert hatches_of(figure) == [False, True] and texts_of(figure) == ["1.90×", "513×"]


def test_the_lessons_other_pictures():
    figure = charts.passes({"eager": {"a": (2e6, 1e6), "b": (1e6, 1e6)}, "fused": {"all": (2e6, 1e6)}})
    assert [text for text in texts_of(figure) if "MB" in text] == ["5 MB", "3 MB"]
    row = {"name": "a_b", "usual_s": 30.0, "first_s": 3.0, "warm_s": 0.1}
    assert texts_of(charts.builds([row], "here")) == [
        "load_inline 30 s",
        "inline_loader 3 s",
        "inline_loader, from the cache 0.1 s",
    ]
    figure = charts.against({"eager": {1: 2.0, 2: 4.0}, "fused": {1: 1.0, 2: 1.0}}, "batch", "ms", "here")
    assert sorted(texts_of(figure)) == ["eager", "fused"]
    figure = charts.against({"eager": {0.1: 2.0, 20.0: 1.0}}, "seconds", "loss", "here", log=False)
    [axis] = figure.axes
    assert (axis.get_xscale(), axis.get_xlabel()) == ("log", "seconds (logarithmic)")
    assert (axis.get_yscale(), axis.get_ylabel()) == ("linear", "loss")


def test_curves_that_end_at_one_place_are_named_one_above_another():
    curves = {name: {1: 1.0, 2: end} for name, end in (("a", 4.0), ("b", 4.01), ("c", 4.0), ("d", 1.0))}
    for log in (True, False):
        figure = charts.against(curves, "batch", "ms", "here", log=log)
        figure.draw_without_rendering()
        boxes = [text.get_window_extent() for text in figure.axes[0].texts]
        assert len(boxes) == 4
        assert not any(one.overlaps(other) for one, other in itertools.combinations(boxes, 2))


def test_narrow_pieces_are_named_beside_their_bar():
    figure = charts.passes({"eager": {"wide": (90e6, 9e6), "thin": (1e5, 1e5)}})
    assert "narrow: thin" in texts_of(figure)
