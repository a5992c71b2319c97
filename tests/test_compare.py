"""The judge is judged: mutants must fail their check, each for its reason, and what is right must pass.

Mutants are problems whose `ModelNew` does one thing wrong. Sizes are small; times are never asserted.
"""

from __future__ import annotations

import dataclasses
import json
import math

import pytest
import torch
from torch import nn

import checks
import compare
import models

MIN_ADD, INSTANCE_NORM, DROPOUT, POOL = models.PROBLEMS
SIZES = {
    MIN_ADD: ((4, 8, 3, 0.5, (8, 1, 1), 2.0), (2, 4, 12, 12)),
    INSTANCE_NORM: ((3, 8, 3, (8, 1, 1, 1), -1.0, 1.0), (2, 3, 5, 9, 9)),
    DROPOUT: ((3, 8, 3, 4, 0.0, 1.0, 0.2), (2, 3, 6, 12, 12)),
    POOL: ((4, 8, 3, 4, (8, 1, 1), 4, 0.0, 1.0), (2, 4, 17, 17)),
}


def small(name: str, forward=None):
    """The problem `name` at a small size; its ModelNew computes `forward(self, x, reference)`, or what eager does."""
    problem = models.PROBLEMS[name]
    reference = problem.Model

    class Mutant(models.Fused, reference):
        variants = ("eager", "epilogue")

        def plan(self, x):
            return models.Plan(self.variant, "a mutant")

        def forward(self, x):
            right = lambda x: reference.forward(self, x)  # noqa: E731
            return forward(self, x, right) if forward else right(x)

    arguments, shape = SIZES[name]
    return dataclasses.replace(problem, ModelNew=Mutant, init_inputs=arguments, input_shape=shape, cpu_batch_size=2)


@pytest.mark.parametrize("phase", compare.PHASES)
@pytest.mark.parametrize("name", models.PROBLEMS)
def test_eager_itself_passes(name, phase):
    result = compare.check(small(name), "epilogue", phase=phase, seed=1)
    assert result.ok, str(result)
    assert "gradient of x" in [error.quantity for error in result.errors] or phase != "train_dx"


class _Off(torch.autograd.Function):
    """The same value; the gradient is multiplied by `factor`."""

    @staticmethod
    def forward(context, x, factor):
        context.factor = factor
        return x.clone()

    @staticmethod
    def backward(context, g):
        return g * context.factor, None


stale = {}


def keep_first(self, x, right):
    return stale.setdefault(x.shape, right(x))


def write_to_input(self, x, right):
    with torch.no_grad():
        x.mul_(1.0000001)
    return right(x)


def constant_only(self, x, right):
    """The algebraic shortcut that public kernels for this problem have taken, unproved."""
    shape = (len(x), self.conv.out_channels, *(size - 2 for size in x.shape[2:]))
    return self.dropout(torch.full(shape, float(self.min_value))) + 0 * sum(p.sum() for p in self.parameters()) + 0 * x.sum() * 0


def no_nan(self, x, right):
    return right(x.nan_to_num())


def fixed_mask(self, x, right):
    with torch.random.fork_rng():
        torch.manual_seed(5)
        return right(x)


def wrong_share(self, x, right):
    self.dropout.p = 0.3
    try:
        return right(x) * (0.7 / 0.8)
    finally:
        self.dropout.p = 0.2


def not_rescaled(self, x, right):
    return right(x) * 0.8 if self.dropout.training else right(x)


@pytest.mark.parametrize(
    "name, phase, forward, complaint",
    [
        (MIN_ADD, "forward", lambda self, x, right: torch.zeros_like(right(x)), "output"),
        (MIN_ADD, "forward", lambda self, x, right: right(x) * (1 + 1e-5), "output"),
        (POOL, "forward", lambda self, x, right: right(x.half().float()), "output"),
        (POOL, "train", lambda self, x, right: _Off.apply(right(x), 1.001), "gradient of scale"),
        (INSTANCE_NORM, "train_dx", lambda self, x, right: right(_Off.apply(x, 1.001)), "gradient of x"),
        (MIN_ADD, "forward", lambda self, x, right: right(x)[..., :-1], "expected the shape"),
        (MIN_ADD, "forward", keep_first, "same result for another input"),
        (MIN_ADD, "forward", keep_first, "share memory"),
        (MIN_ADD, "forward", write_to_input, "changed its input"),
        (POOL, "forward", no_nan, "NaN"),
        (DROPOUT, "forward", no_nan, "NaN"),
        (DROPOUT, "train", constant_only, "ties, eval"),
        (DROPOUT, "forward", fixed_mask, "same elements"),
        (DROPOUT, "forward", wrong_share, "expected a share of 0.8"),
        (DROPOUT, "forward", not_rescaled, "ties, training"),
    ],
)
def test_mutants_fail(name, phase, forward, complaint):
    stale.clear()
    result = compare.check(small(name, forward), "epilogue", phase=phase, seed=1)
    assert any(complaint in failure for failure in result.failures), str(result)


def test_unwritten_memory_is_found():
    def forward(self, x, right):
        y = right(x)
        if not torch.are_deterministic_algorithms_enabled():  # a lucky kernel: what it leaves out was there before
            return y
        out = torch.empty_like(y)
        out[..., 1:] = y[..., 1:]
        return out

    result = compare.check(small(MIN_ADD, forward), "epilogue", seed=1)
    assert result.failures == ["left parts of output unwritten"]
    assert not torch.are_deterministic_algorithms_enabled()


def test_zero_norms_follow_the_rule():
    """Where the reference and eager are exactly zero, nothing but zero passes."""
    assert checks.Error("", "", 0.0, 0.0, 0.0, 0.0, 0.0, 0.0).share == 0
    assert checks.Error("", "", 1e-30, 1e-30, 0.0, 0.0, 0.0, 0.0).share == math.inf
    assert checks.Error("", "", math.nan, 0.0, 1.0, 1.0, 1.0, 1.0).share == math.inf


def test_edges_mark_close_calls_but_not_ties():
    with checks._Edges(1e-3) as edges:
        x = torch.tensor([[0.5, 0.50001, 0.9]], dtype=torch.float64)
        torch.min(x, torch.tensor(0.5, dtype=torch.float64))
    assert edges.found.tolist() == [[False, True, False]]
    with checks._Edges(1e-3) as edges:
        x = torch.tensor([[[[1.0, 1.0, 3.0, 3.00001, 9.0], [0.0, 0.5, 1.0, 2.0, 9.0]]]], dtype=torch.float64)
        nn.functional.max_pool2d(x, 2)
    assert edges.found.tolist() == [[[[False, True]]]]
    with checks._Edges(1e-3) as edges:
        torch.clamp(x, 0.5, 9.00001).max(dim=2)
    assert edges.found.tolist() == [[[False, False, False, False, True]]]


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
