"""The comparison: what fails its check gets no time, a record holds what it promises, README shows the newest records.

Sizes are small; times are never asserted. What the checks find is tested in test_checks.py.
"""

from __future__ import annotations

import json

import pytest
import torch

import compare
import models
from test_checks import DROPOUT, MIN_ADD, POOL, small


def test_what_fails_gets_no_time():
    wrong = small(MIN_ADD, lambda self, x, right: right(x) + 1)
    eager, ours = compare.compare(wrong, device="cpu", variants=["eager", "epilogue"], seed=1)
    assert eager["ok"] and eager["median_ms"] > 0 and eager["speedup_vs_eager"] == 1
    assert ours["ok"] is False and "output" in ours["reason"]
    assert ours["median_ms"] is None and ours["speedup_vs_eager"] is None
    assert "fails its check" in compare.table([eager, ours])


def test_a_peer_that_cannot_run_is_a_row(monkeypatch):
    def broken(*_, **__):
        raise RuntimeError("no compiler\nand so on")

    monkeypatch.setattr(torch, "compile", broken)
    rows = compare.compare(small(POOL), device="cpu", variants=["eager", "compile"], seed=1)
    assert (
        rows[1]["ok"] is None
        and rows[1]["reason"] == "raised RuntimeError: no compiler"
        and rows[1]["median_ms"] is None
    )


def test_folded_is_no_kernel_speedup():
    problem = small(DROPOUT)
    problem.ModelNew.variants = ("eager", "epilogue", "folded")
    row = compare.compare(problem, device="cpu", variants=["eager", "folded"], seed=1)[1]
    assert row["median_ms"] > 0 and row["speedup_vs_eager"] is None


def test_command(tmp_path, monkeypatch, capsys):
    """The command writes a record that is valid JSON with every promised field, plots, and says by its status what failed."""
    monkeypatch.setattr(compare, "variants_of", lambda problem, device: ("eager", "epilogue"))
    monkeypatch.setattr(models, "PROBLEMS", {MIN_ADD: small(MIN_ADD), DROPOUT: small(DROPOUT)})
    monkeypatch.setattr(
        compare, "new_seed", lambda: 1
    )  # at this size one in ten leaves eager, dropping other elements, beyond its own limit
    path = tmp_path / "new" / "times.json"
    arguments = [
        "--device",
        "cpu",
        "--batch",
        "3",
        "--phase",
        "forward,train",
        "--json",
        str(path),
        "--plots",
        str(tmp_path),
    ]
    assert compare.main(arguments) == 0
    item = json.loads(path.read_text(), parse_constant=pytest.fail)
    assert {"gpu", "cpu", "driver", "torch", "cuda", "commit", "dirty", "date", "command", "threads"} <= set(
        item
    )
    assert [row["shape"][0] for row in item["rows"]] == [3] * 8
    promised = "problem variant device dtype phase shape ok median_ms speedup_vs_eager error_norm error_max eager_error_norm"
    assert set(promised.split()) | {"eager_error_max", "bytes", "floor_ms"} <= set(item["rows"][0])
    assert (tmp_path / "forward.png").stat().st_size and (tmp_path / "train.png").stat().st_size
    assert "epilogue" in capsys.readouterr().out

    monkeypatch.setitem(models.PROBLEMS, MIN_ADD, small(MIN_ADD, lambda self, x, right: right(x) + 1))
    assert compare.main([MIN_ADD, "--device", "cpu"]) == 1
    with pytest.raises(SystemExit, match="2"):
        compare.main(["nothing"])


def test_readme_shows_the_recorded_runs():
    text = (compare.FOLDER / "README.md").read_text(encoding="utf-8")
    assert compare.with_table(text, compare.load_records()) == text, "run: python compare.py --readme"
    assert text.count("\n") < 150


def test_readme_table_is_the_newest_record_of_each_machine(tmp_path):
    (row,) = compare.compare(small(MIN_ADD), device="cpu", variants=["eager"], seed=1)
    base = {**compare.record([]), "commit": "a" * 40, "dirty": False}
    for name, date, milliseconds in (("a", "2026-02-01", 7.0), ("b", "2026-01-01", 5.0)):
        item = {**base, "date": date, "rows": [{**row, "median_ms": milliseconds}]}
        (tmp_path / f"{name}.json").write_text(json.dumps(item))
    gpu = {
        **base,
        "date": "2025-01-01",
        "gpu": "NVIDIA H200",
        "rows": [{**row, "device": "cuda", "median_ms": 3.0}],
    }
    (tmp_path / "gpu.json").write_text(json.dumps(gpu))
    (tmp_path / "other.json").write_text(json.dumps({"rows": [{"kernel": "another benchmark's"}]}))
    text = compare.with_table(
        "before\n<!-- table -->\nold\n<!-- end of table -->\nafter\n", compare.load_records(tmp_path)
    )
    assert text.startswith("before\n<!-- table -->\nNVIDIA H200") and text.endswith(
        "<!-- end of table -->\nafter\n"
    )
    assert "| 7 ms |" in text and "5 ms" not in text and "old" not in text
    with pytest.raises(ValueError, match="markers"):
        compare.with_table("no markers", [])


def test_summary(tmp_path):
    """Each log's last line; the newest record of a GPU; the fastest that passed, beside it what failed; and a log or record that is missing."""
    (row,) = compare.compare(small(MIN_ADD), device="cpu", variants=["eager"], seed=1)

    def rows(failing=(), **times):
        for variant, milliseconds in times.items():
            yield {
                **row,
                "device": "cuda",
                "variant": variant,
                "median_ms": milliseconds,
                "ok": variant not in failing,
            }

    of_one = [
        *rows(eager=8.0, compile=4.0, epilogue=3.0, fused=2.0, folded=1.0),
        {**row, "phase": "train", "median_ms": 99.0},
    ]
    other = [
        {**each, "problem": "other", "number": 7}
        for each in rows(["compile", "fused"], eager=9.0, compile=None, epilogue=6.0, fused=None)
    ]
    nothing = [{**each, "problem": "nothing"} for each in rows(["epilogue"], eager=9.0, epilogue=None)]
    base = {**compare.record([]), "gpu": "NVIDIA H200"}
    for name, date, of_run in (
        ("new", "2026-02-02", of_one + other + nothing),
        ("old", "2026-02-01", of_one),
        ("cpu", "2026-02-03", [row]),
    ):
        (tmp_path / f"{name}.json").write_text(json.dumps({**base, "date": date, "rows": of_run}))
    (tmp_path / "tests.log").write_text("FAILED test_a\n=== 1 failed, 411 passed in 3.21s ===\n\n")
    lines = compare.summary([tmp_path / "tests.log", tmp_path / "no.log"], tmp_path).splitlines()
    assert [line.split(maxsplit=1) for line in lines[:3]] == [
        ["tests", "1 failed, 411 passed in 3.21s"], ["no", "no log"],
        ["benchmark", f"fails its check: 7 fused forward, {row['number']} epilogue forward"],
    ]  # fmt: skip
    assert [line.split()[-6:] for line in lines[5:8]] == [
        ["8", "compile", "4", "fused", "2", "2.00×"], ["9", "eager", "9", "epilogue", "6", "1.50×"], ["nothing", "9", "eager", "9", "–", "–"],
    ]  # fmt: skip
    assert (
        f"{tmp_path / 'new.json'}: NVIDIA H200, 2026-02-02" in lines[9]
        and len(lines) < 20
        and max(map(len, lines[3:9])) < 120
    )
    (tmp_path / "empty").mkdir()
    assert compare.summary([], tmp_path / "empty") == f"benchmark   no record in {tmp_path / 'empty'}"


def test_summary_is_printed(tmp_path, capsys):
    (tmp_path / "tests.log").write_text("5 passed\n")
    assert compare.main(["--summary", str(tmp_path / "tests.log")]) == 0
    assert capsys.readouterr().out.startswith("tests       5 passed\nbenchmark")


@pytest.mark.gpu
def test_floor_of_a_known_gpu():
    problem = models.PROBLEMS[POOL]
    model, (x,) = problem.get_model(device="cuda"), problem.get_inputs(device="cuda", batch_size=2)
    floor = compare._floor(problem, model, x, model(x))
    assert (floor is None) == (torch.cuda.get_device_name() not in compare.GPUS)


@pytest.mark.gpu
@pytest.mark.parametrize("phase", compare.PHASES)
@pytest.mark.parametrize("name", models.PROBLEMS)
def test_variants_pass_on_a_gpu(name, phase):
    for variant in models.PROBLEMS[name].variants:
        result = compare.check(name, variant, device="cuda", phase=phase, batch_size=4)
        assert result.ok, str(result)
