"""A fifth problem is new files and one registration: tests/fifth/ holds it, and nothing else knows of it.

It is held to what the others are: the error rule and honesty, a drop-in twin, torch's transformations, a comparison, an export.
"""

from __future__ import annotations

import copy
import dataclasses
import io
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from torch import nn

import checks
import compare
import export
import inline_loader
import models
from fifth.conv2d_relu_hardswish import FOLDER, NAME, PROBLEM
from test_export import run as run_alone

NVCC = shutil.which("nvcc") or shutil.which("nvcc", path="/usr/local/cuda/bin")
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
every_device = pytest.mark.parametrize("device", DEVICES)
every_phase = pytest.mark.parametrize("phase", checks.PHASES)


@pytest.fixture(autouse=True)
def registered():
    models.register(PROBLEM)
    yield PROBLEM
    del models.PROBLEMS[NAME]


@pytest.fixture
def small(registered):
    """Its row with an input of few and unlike extents."""
    return dataclasses.replace(registered, input_shape=(3, 8, 21, 18))


def pair(device="cpu", dtype=torch.float32) -> tuple[nn.Module, nn.Module, torch.Tensor]:
    """A reference model, its twin, which must not run eager, and an input on both sides of every bound."""
    model = PROBLEM.Model(5, 20, 3).to(device=device, dtype=dtype)
    twin = PROBLEM.ModelNew.from_eager(model)
    twin.variant = "epilogue"
    return model, twin, 8 * torch.randn(3, 5, 11, 13, device=device, dtype=dtype)


def results(module, x) -> list[torch.Tensor]:
    """The output, and the gradients of x and of all parameters."""
    x = x.detach().requires_grad_()
    y = module(x)
    return [y, *torch.autograd.grad(y.sin().sum(), (x, *module.parameters()))]


def assert_close(ours, theirs):
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


# ------------------------------------------------------------------------------------------------------- the same checks


@every_device
@every_phase
def test_rule_and_honesty(small, phase, device):
    result = compare.check(small, "epilogue", device=device, phase=phase, seed=1)
    assert result.ok and result.errors, result


@every_device
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_rule_in_halves(small, dtype, device):
    result = compare.check(small, "epilogue", device=device, phase="train_dx", dtype=dtype, seed=1)
    assert result.ok, result


@every_device
def test_float64_is_as_exact_as_eager(device):
    model, twin, x = pair(device, torch.float64)
    torch.testing.assert_close(results(twin, x), results(model, x), rtol=1e-13, atol=1e-12)


def test_the_check_bites(small):
    """What forgets the second operation passes neither forward nor backward."""

    class Forgetful(small.ModelNew):
        def forward(self, x):
            return torch.relu(self.conv(x))

    wrong = dataclasses.replace(small, ModelNew=Forgetful)
    for phase in ("forward", "train"):
        assert not compare.check(wrong, "epilogue", phase=phase, seed=1).ok


@pytest.mark.parametrize("value", [-0.0, 0.0, 3.0, -3.0, 1e30, torch.inf, -torch.inf, torch.nan])
def test_special_values_as_eager(value):
    """At the bounds, where gradients jump, and where numbers end."""
    model, twin, _ = pair()
    with torch.no_grad():
        model.conv.weight.zero_()[:, 0, 0, 0], model.conv.bias.fill_(value)
    x = torch.zeros(2, 5, 4, 4)
    torch.testing.assert_close(results(twin, x), results(model, x), equal_nan=True)


# ------------------------------------------------------------------------------------------------------------ a drop-in


def test_twin_stands_in_for_its_reference():
    model, twin, x = pair()
    assert_close(results(twin, x), results(model, x))
    fresh = PROBLEM.ModelNew(5, 20, 3)
    fresh.load_state_dict(model.state_dict())
    model.load_state_dict(fresh.state_dict())
    torch.testing.assert_close(fresh(x), twin(x))
    file = io.BytesIO()
    torch.save(twin, file)
    file.seek(0)
    for copied in (copy.deepcopy(twin), torch.load(file, weights_only=False)):
        assert type(copied) is PROBLEM.ModelNew
        torch.testing.assert_close(copied(x), twin(x))
    assert models.get_model(NAME)(models.get_inputs(NAME, batch_size=1)[0]).shape == (1, 64, 126, 126)
    assert models.Conv2dReluHardswishNew is PROBLEM.ModelNew


def test_plan():
    model, twin, x = pair()
    assert PROBLEM.variants == ("eager", "epilogue")
    assert str(twin.plan(x)) == "epilogue: asked for"
    twin.variant = "auto"
    assert str(twin.plan(x)) == "epilogue: there are no fused kernels for this problem"
    twin.variant = "fused"
    with pytest.raises(ValueError, match="'auto' or one of eager, epilogue, got 'fused'"):
        twin(x)
    twin.variant = "auto"
    twin.conv = model.conv = nn.Conv2d(5, 20, 3, stride=2)
    assert twin.plan(x).variant == "eager" and torch.equal(twin(x), model(x))


@every_device
def test_layouts_and_empty_batch(device):
    for layout in (torch.contiguous_format, torch.channels_last):
        model, twin, x = pair(device)
        x = x.contiguous(memory_format=layout)
        ours, theirs = results(twin, x), results(model, x)
        assert_close(ours, theirs)
        assert [t.stride() for t in ours[:2]] == [t.stride() for t in theirs[:2]]
        twin.variant = "auto"
        assert twin(x[:0]).shape == model(x[:0]).shape


@every_device
def test_torch_knows_the_operator(device):
    """Schema, shapes and gradients hold, in one graph of torch.compile, under autocast and by finite differences."""
    _, twin, x = pair(device)
    operator, operands = PROBLEM.ModelNew.epilogue, (twin.conv.weight, twin.conv.bias)
    torch.library.opcheck(operator.registered, (x, *operands))
    assert_close(results(torch.compile(twin, fullgraph=True), x), results(twin, x))
    with torch.autocast(device, torch.bfloat16):
        assert twin(x).dtype == torch.bfloat16
    model = PROBLEM.Model(2, 3, 2).to(device=device, dtype=torch.float64)
    leaves = torch.randn(2, 2, 4, 3, device=device, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(operator, (leaves, model.conv.weight, model.conv.bias))


# --------------------------------------------------------------------------------------------- the tools that take a name


def test_comparison():
    rows = compare.compare(NAME, device="cpu", batch_size=1, variants=["eager", "epilogue"], seed=1)
    assert [(row["problem"], row["number"], row["variant"]) for row in rows] == [
        (NAME, 57, "eager"),
        (NAME, 57, "epilogue"),
    ]
    assert all(row["ok"] and row["median_ms"] > 0 for row in rows), rows
    assert f"57 {NAME}" in compare.table(rows)


def test_export(tmp_path):
    cell = export.cell([NAME])
    for other in set(models.PROBLEMS) - {NAME}:
        assert f"{other}.cpp" not in cell
    use = f"""
model = models.get_model("{NAME}")
[x] = models.get_inputs("{NAME}", batch_size=2)
print(model.plan(x).variant, tuple(model(x).shape), list(models.PROBLEMS))
assert model.__init__.__code__.co_filename.startswith(str(SOURCES))
"""
    assert run_alone(tmp_path / "empty", cell, use) == f"epilogue (2, 64, 126, 126) ['{NAME}']\n"


def test_export_needs_a_module_to_hold(registered):
    inline = type("Inline", (registered.ModelNew,), {"__module__": "__main__"})
    models.PROBLEMS[NAME] = dataclasses.replace(registered, ModelNew=inline)
    with pytest.raises(ValueError, match=f"expected {NAME} in a module of its own, got one in __main__"):
        export.cell([NAME])


# ------------------------------------------------------------------------------------------------------- what it takes


def test_it_is_short():
    assert len((FOLDER / f"{NAME}.py").read_text().splitlines()) < 110


@pytest.mark.skipif(NVCC is None, reason="there is no nvcc")
@pytest.mark.parametrize("dtype", ["float", "half_t"])
def test_cuda_source_compiles(dtype, tmp_path):
    flags = f"-cubin -arch=sm_80 -std=c++17 --expt-relaxed-constexpr -DVALUE_T={dtype}".split()
    paths = ["-I", str(inline_loader.KERNELS), "-o", str(tmp_path / "out.cubin"), str(FOLDER / f"{NAME}.cu")]
    done = subprocess.run([NVCC, *flags, *paths], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_nothing_else_knows_of_it():
    here = Path(__file__).resolve().parent
    known = [path for path in here.parent.rglob("*.py") if NAME in path.read_text(encoding="utf-8")]
    assert {path.relative_to(here).as_posix() for path in known} <= {
        f"fifth/{NAME}.py",
        "test_fifth_problem.py",
    }
