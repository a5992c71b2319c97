"""A problem from a file: models.adopt, and what then goes by its name."""

import copy
import dataclasses
import inspect
import os
import pickle
import re
import sys

import pytest
import torch

import compare
import models
from inline_kernels.bench import honesty
from inline_kernels.export import cell_of
from test_emulated import folder, gpu, guarded, remembers_nothing  # noqa: F401
from test_emulated import pytestmark as needs_headers

FILE = """
import torch
from torch import nn

class Model(nn.Module):
    def __init__(self, channels, least):
        super().__init__()
        self.conv, self.norm, self.least = nn.Conv2d(3, channels, 3, padding=1), nn.GroupNorm(2, channels), least

    def forward(self, x):
        return torch.clamp(self.norm(self.conv(x)), min=self.least).square()

def get_inputs():
    return [torch.randn(4, 3, 9, 11) + 100]

def get_init_inputs():
    return [6, -0.5]
"""


@pytest.fixture(autouse=True)
def as_before():
    before = dict(models.PROBLEMS)
    yield
    models.PROBLEMS.clear()
    models.PROBLEMS.update(before)


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "7_norm_and_square.py"
    path.write_text(FILE)
    return path


def test_what_goes_by_names_takes_it(file):
    problem = models.adopt(file)
    assert (problem.number, problem.name, problem.input_shape) == (7, file.stem, (4, 3, 9, 11))
    assert models.PROBLEMS[file.stem] is problem and problem.variants == ("eager", "epilogue")
    for size in (None, 2):
        (x,) = models.get_inputs(file.stem, batch_size=size)
        assert x.shape == (size or 4, 3, 9, 11) and x.mean() > 90, "the file's own distribution"
    report = compare.check(file.stem, "epilogue", phase="train_dx", device="cpu")
    assert report.ok, report
    assert "gradient of norm.weight" in str(report)
    assert models.get_model(file.stem).plan(x).variant == "epilogue"
    # Without the padding it would be 7 x 9; two operations a product, 27 products a value.
    assert problem.operations(problem.Model(*problem.get_init_inputs()), x) == 2 * 2 * 6 * 9 * 11 * 27
    assert cell_of(file.stem, "cpu") == cell_of(str(file), "cpu"), "constants and imports of the file's own"


@needs_headers
def test_its_cuda_kernels_without_a_gpu(file, gpu, monkeypatch):  # noqa: F811
    """Of the file in $ADOPT, too: of a few of its samples a corner, because tests/emulation takes its time."""
    gpu()
    monkeypatch.setattr(honesty, "REPEATS", 2)
    path = os.environ.get("ADOPT", file)
    problem = models.adopt(path)
    samples, channels, *extents = problem.input_shape
    shape = min(samples, 2), channels, *(min(extent, 18) for extent in extents)
    report = compare.check(
        dataclasses.replace(problem, input_shape=shape), "epilogue", phase="train_dx", seed=1, device="cpu"
    )
    print(report)
    assert report.ok, report


def test_a_check_by_name_needs_nothing_else(file, monkeypatch, capsys):
    """What runs by default, with every gradient; where there is no GPU, a line says how the CUDA kernels are checked."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    problem = models.adopt(file)
    report = compare.check(file.stem)
    assert report.ok and report.variant == "auto", report
    names = {error.quantity for error in report.errors}
    assert {"output", "gradient of x", "gradient of conv.weight", "gradient of norm.bias"} <= names
    [line] = capsys.readouterr().out.splitlines()
    assert line.endswith(f"ADOPT={problem.file} python -m pytest -s tests/test_adopt.py -k without_a_gpu")

    class Wrong(problem.ModelNew):
        def forward(self, x):
            y = super().forward(x)
            return y.detach() + 0.5 * (y - y.detach())  # right but for its gradients

    models.PROBLEMS[file.stem] = dataclasses.replace(problem, ModelNew=Wrong)
    assert any("gradient" in text for text in compare.check(file.stem).failures)


def test_a_file_that_changed_is_adopted_again(file, tmp_path):
    first = models.adopt(file)
    file.write_text(FILE.replace("square()", "abs()"))
    second = models.adopt(str(file))
    assert second.Model is not first.Model and models.PROBLEMS[file.stem] is second
    other = tmp_path / "other" / file.name
    other.parent.mkdir()
    other.write_text(FILE)
    with pytest.raises(ValueError, match=f"there is a problem named {file.stem} already"):
        models.adopt(other)
    assert models.PROBLEMS[file.stem] is second


def test_its_names_are_its_own(file, tmp_path):
    """Whatever modules are named: what inspect and pickle find is what the file defines; and it imports what stands beside it."""
    other = tmp_path / "other" / "json.py"
    other.parent.mkdir()
    (tmp_path / "json.py").write_text(FILE)
    (other.parent / "beside_it.py").write_text("LEAST = -0.25")
    other.write_text(
        FILE.replace("square()", "abs()").replace("-0.5", "LEAST") + "\nfrom beside_it import LEAST\n"
    )
    path, json = [*sys.path], sys.modules.get("json")
    try:
        for each, word in ((tmp_path / "json.py", "square()"), (other, "abs()")):
            problem = models.adopt(each)
            assert word in inspect.getsource(problem.Model)
            model = problem.get_model()
            again, x = pickle.loads(pickle.dumps(model)), problem.get_inputs()[0]
            assert type(again) is type(copy.deepcopy(model)) is problem.ModelNew
            assert torch.equal(again(x), model(x))
            del models.PROBLEMS[problem.name]
        assert problem.init_inputs == (6, -0.25) and sys.path == path and sys.modules.get("json") is json
    finally:
        sys.modules.pop("beside_it", None)


@pytest.mark.parametrize(
    "text, what",
    [
        (FILE.replace("def get_inputs", "def inputs"), "found no get_inputs"),
        (FILE.replace("9, 11) + 100]", "9, 11), 2.0]"), "one tensor, got Tensor, float"),
        (FILE.replace("return [torch.randn(4, 3, 9, 11) + 100]", "return []"), "one tensor, got nothing"),
        (
            FILE.replace("[torch.randn(4, 3, 9, 11) + 100]", "torch.randn(4, 3, 9, 11)"),
            "one tensor in a list, got a Tensor",
        ),
        (
            FILE.replace("return [6, -0.5]", "return None"),
            "a list of the constructor's arguments, got a NoneType",
        ),
        (FILE + "\ndef Model(): pass", "expected Model to be a class of modules, got <function Model"),
    ],
)
def test_what_is_expected_of_it(file, text, what):
    file.write_text(text)
    with pytest.raises(ValueError, match=re.escape(what)):
        models.adopt(file)
    assert file.stem not in models.PROBLEMS


def test_there_is_none(tmp_path):
    with pytest.raises(FileNotFoundError, match="expected a Python file with Model"):
        models.adopt(tmp_path / "none.py")


def test_no_more_than_it_draws(file):
    models.adopt(file)
    with pytest.raises(ValueError, match=r"at most the \(4, 3, 9, 11\) of get_inputs"):
        models.get_inputs(file.stem, batch_size=5)
