"""A fifth problem is new files and one registration: tests/fifth/ holds it, and nothing else knows of it.

It is held to what the others are: the error rule and honesty, every test that goes by the problems' names, a comparison, an export.
"""

from __future__ import annotations

import dataclasses
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import models
from fifth.conv2d_relu_hardswish import PROBLEM
from inline_kernels.bench import charts, checks, compare
from inline_kernels.export import cell_of

HERE = Path(__file__).resolve().parent
NAME = PROBLEM.name
# Of the whole suite: what goes by its name, but for what the engine alone decides, and what has a table of all problems; and the files that
# may have such.
OF_THE_ENGINE = "compile or export or checkpoint or repeats or dynamic or opcheck or random or autocast"
SELECTED = f"({NAME} or lesson_for_every_problem) and not ({OF_THE_ENGINE})"
GOES_BY_NAMES = re.compile(r"\b(every_name|in NAMES|PROBLEMS)\b|lesson_for_every_problem")


@pytest.fixture(autouse=True)
def registered():
    before = dict(models.PROBLEMS)
    yield models.register(PROBLEM)
    models.PROBLEMS.clear()
    models.PROBLEMS.update(before)


@pytest.fixture
def small(registered):
    """Its row with an input of few and unlike extents."""
    return dataclasses.replace(registered, input_shape=(3, 8, 21, 18))


def pair(variant="epilogue", device="cpu") -> tuple[nn.Module, nn.Module, torch.Tensor]:
    """A reference model, its twin, and an input."""
    model = PROBLEM.Model(5, 20, 3).to(device)
    twin = PROBLEM.ModelNew.from_eager(model)
    twin.variant = variant
    return model, twin, torch.randn(3, 5, 11, 13, device=device)


def results(module, x) -> list[torch.Tensor]:
    """The output, and the gradients of x and of all parameters."""
    x = x.detach().requires_grad_()
    y = module(x)
    return [y, *torch.autograd.grad(y.sum(), (x, *module.parameters()))]


# --------------------------------------------------------------------------------------------------------------- right


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("phase", checks.PHASES)
def test_rule_and_honesty(small, phase, device):
    result = compare.check(small, "epilogue", device=device, phase=phase, seed=1)
    assert result.ok and result.errors, result


@pytest.mark.parametrize("phase", ["forward", "train"])
def test_the_check_bites(small, phase):
    class Forgetful(small.ModelNew):
        """Leaves out the second operation."""

        def forward(self, x):
            return torch.relu(self.conv(x))

    wrong = dataclasses.replace(small, ModelNew=Forgetful)
    assert not compare.check(wrong, "epilogue", phase=phase, seed=1, device="cpu").ok


@pytest.mark.parametrize("value", [-0.0, 0.0, 3.0, -3.0, 1e30, torch.inf, -torch.inf, torch.nan])
def test_special_values_as_eager(value):
    """At the bounds, where gradients jump, and where numbers end."""
    model, twin, x = pair()
    with torch.no_grad():
        model.conv.weight.zero_(), model.conv.bias.fill_(value)
    torch.testing.assert_close(results(twin, x), results(model, x), equal_nan=True)


def test_gradient_by_finite_differences():
    x = torch.randn(2, 2, 4, 3, dtype=torch.float64, requires_grad=True)
    twin = PROBLEM.ModelNew(2, 3, 2).double()
    assert torch.autograd.gradcheck(twin, (x,))


def test_plan():
    model, twin, x = pair("auto")
    assert PROBLEM.variants == ("eager", "epilogue")
    assert str(twin.plan(x)).startswith("epilogue: the library's convolution, then y")
    twin.variant = "fused"
    with pytest.raises(
        RuntimeError, match="variant 'fused' can't run: there are no fused kernels for this formula"
    ):
        twin(x)
    twin.variant = "auto"
    twin.conv = model.conv = nn.Conv2d(5, 20, 3, stride=2)
    assert twin.plan(x).variant == "epilogue"
    torch.testing.assert_close(twin(x), model(x), rtol=1e-4, atol=1e-4)


# --------------------------------------------------------------------------------------------------- what goes by names


def test_the_tests_of_all_problems():
    """Each once, in a process of their own, where it is registered before they are collected."""
    command = [sys.executable, "-m", "pytest", "-p", "fifth.registered", "-k", SELECTED]
    others = [path for path in HERE.glob("test_*.py") if path.name != Path(__file__).name]
    command += [path.name for path in others if GOES_BY_NAMES.search(path.read_text(encoding="utf-8"))]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(HERE.parent), str(HERE)])}
    done = subprocess.run(command, cwd=HERE, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
    assert int(re.search(r"(\d+) passed", done.stdout)[1]) > 25, done.stdout


def test_registry():
    [x] = models.get_inputs(NAME, batch_size=1)
    assert models.get_model(NAME)(x).shape == (1, 64, 126, 126)
    assert models.Conv2dReluHardswishNew is PROBLEM.ModelNew


def test_comparison(few_rounds):
    rows = compare.compare(NAME, device="cpu", batch_size=1, variants=["eager", "epilogue"], seed=1)
    assert [row["variant"] for row in rows] == ["eager", "epilogue"]
    assert all(row["ok"] and row["median_ms"] > 0 for row in rows), rows
    assert "57 conv2d relu hardswish" in charts.table(rows)


def test_export(tmp_path):
    """As one file, in an empty folder where nothing of ours can be imported."""
    use = """
model, reference = ModelNew(*get_init_inputs()), Model(*get_init_inputs())
reference.load_state_dict(model.state_dict())
[x] = get_inputs(batch_size=2)
model(x).sum().backward()
print(tuple(x.shape), (model(x) - reference(x)).abs().max().item() < 1e-5)
"""
    (tmp_path / "cell.py").write_text(cell_of(NAME, "cpu") + use, encoding="utf-8")
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    done = subprocess.run(
        [sys.executable, "cell.py"], cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    assert done.stdout.endswith("(2, 8, 128, 128) True\n"), done.stderr
    assert "__global__" in cell_of(NAME, "cuda", "epilogue")


# -------------------------------------------------------------------------------------------------------- what it takes


def test_it_is_short():
    assert len((HERE / "fifth" / f"{NAME}.py").read_text(encoding="utf-8").splitlines()) < 50


def test_nothing_else_knows_of_it():
    others = [
        path
        for pattern in ("*.py", "[!.]*/*.py", "inline_kernels/*/*.py")
        for path in HERE.parent.glob(pattern)
    ]
    assert Path(__file__) in others and HERE.parent / "models.py" in others
    assert [path for path in others if NAME in path.read_text(encoding="utf-8")] == [Path(__file__)]
