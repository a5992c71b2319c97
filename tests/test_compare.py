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
    assert rows[1]["ok"] is None and rows[1]["reason"] == "raised RuntimeError: no compiler" and rows[1]["median_ms"] is None


def test_folded_is_no_kernel_speedup():
    problem = small(DROPOUT)
    problem.ModelNew.variants = ("eager", "epilogue", "folded")
    row = compare.compare(problem, device="cpu", variants=["eager", "folded"], seed=1)[1]
    assert row["median_ms"] > 0 and row["speedup_vs_eager"] is None


def test_command(tmp_path, monkeypatch, capsys):
    """The command writes a record that is valid JSON with every promised field, plots, and says by its status what failed."""
    monkeypatch.setattr(compare, "variants_of", lambda problem, device: ("eager", "epilogue"))
    monkeypatch.setattr(models, "PROBLEMS", {MIN_ADD: small(MIN_ADD), DROPOUT: small(DROPOUT)})
    path = tmp_path / "new" / "times.json"
    arguments = ["--device", "cpu", "--batch", "3", "--phase", "forward,train", "--json", str(path), "--plots", str(tmp_path)]
    assert compare.main(arguments) == 0
    item = json.loads(path.read_text(), parse_constant=pytest.fail)
    assert {"gpu", "cpu", "driver", "torch", "cuda", "commit", "dirty", "date", "command", "threads"} <= set(item)
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
    gpu = {**base, "date": "2025-01-01", "gpu": "NVIDIA H200", "rows": [{**row, "device": "cuda", "median_ms": 3.0}]}
    (tmp_path / "gpu.json").write_text(json.dumps(gpu))
    (tmp_path / "other.json").write_text(json.dumps({"rows": [{"kernel": "another benchmark's"}]}))
    text = compare.with_table("before\n<!-- table -->\nold\n<!-- end of table -->\nafter\n", compare.load_records(tmp_path))
    assert text.startswith("before\n<!-- table -->\nNVIDIA H200") and text.endswith("<!-- end of table -->\nafter\n")
    assert "| 7 ms |" in text and "5 ms" not in text and "old" not in text
    with pytest.raises(ValueError, match="markers"):
        compare.with_table("no markers", [])


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
