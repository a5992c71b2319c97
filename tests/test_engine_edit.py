"""fuse(model).edit: a segment's text in a reader's words; `%tail` and `%%tail` put it into a cell, and bind the cell."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import nn

import inline_kernels
from inline_kernels import fuse
from inline_loader import BuildError


class Scaled(nn.Module):
    """relu(conv(x)) * factor."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3)
        self.factor = 0.5

    def forward(self, x):
        return torch.relu(self.conv(x)) * self.factor


def negated(text: str) -> str:
    assert "math::relu(add2)" in text
    return text.replace("math::relu(add2)", "-math::relu(add2)")


@pytest.fixture
def x():
    return torch.randn(2, 3, 9, 9)


@pytest.fixture
def fast(x):
    """With its formula edited: the negative."""
    fast = fuse(Scaled())
    with torch.no_grad():
        fast.edit(x, negated(fast.source(x)))
    return fast


def expected(fast, x):
    return torch.relu(fast.conv(x)) * fast.factor


@pytest.mark.parametrize("saving", [False, True])
def test_what_was_edited_runs(x, saving):
    fast = fuse(Scaled())
    with torch.set_grad_enabled(saving):
        fast.edit(x, negated(fast.source(x)))
    for enabled in (False, True):
        with torch.set_grad_enabled(enabled):
            torch.testing.assert_close(fast(x), -expected(fast, x))
            assert "edited" in str(fast.plan(x))
    fast.factor = 3.0  # numbers are read at each call
    torch.testing.assert_close(fast(x[:1]), -expected(fast, x[:1]))


def test_its_gradient_is_refused(fast, x):
    y = fast(x.requires_grad_())
    assert y.requires_grad
    with pytest.raises(RuntimeError, match="edited, and its gradient is not known"):
        y.sum().backward()


def test_the_models_own_comes_back(fast, x):
    fast.edit(x, None)
    torch.testing.assert_close(fast(x), expected(fast, x))
    fast(x).sum().backward()
    assert "edited" not in str(fast.plan(x))


def test_compiled_code_follows(x):
    fast = fuse(Scaled())
    compiled = torch.compile(fast, backend="aot_eager")
    with torch.no_grad():
        torch.testing.assert_close(compiled(x), expected(fast, x))
        fast.edit(x, negated(fast.source(x)))
        torch.testing.assert_close(compiled(x), -expected(fast, x))


def test_copies_and_pickles_are_without_it(fast, x):
    for other in (copy.deepcopy(fast), pickle.loads(pickle.dumps(fast))):
        torch.testing.assert_close(other(x), expected(fast, x))
    torch.testing.assert_close(fast(x), -expected(fast, x))


def test_another_formula_than_the_one_that_was_edited_is_refused(fast, x):
    fast.conv = nn.Conv2d(3, 8, 3, bias=False)
    with pytest.raises(RuntimeError, match="was edited for other inputs, or another model"):
        fast(x)


def test_a_text_that_does_not_compile_changes_nothing(fast, x):
    with torch.no_grad():
        text = fast.source(x)
        with pytest.raises(BuildError, match="'?mth'?"):
            fast.edit(x, text.replace("math::relu", "mth::relu"))
    torch.testing.assert_close(fast(x), -expected(fast, x))


def test_another_launcher_is_refused(fast, x):
    with pytest.raises(ValueError, match="expected the launcher `forward` as source"):
        fast.edit(x, "EXPORT void forward(float* y, int64_t n) { y[n] = 0; }")
    with pytest.raises(IndexError, match="expected a segment below 1, got 1"):
        fast.edit(x, None, segment=1)
    with pytest.raises(RuntimeError, match="eager runs"):
        fuse(nn.Linear(3, 3)).edit(x, "")


def test_cells(x):
    testing = pytest.importorskip("IPython.testing.globalipapp")
    shell = testing.get_ipython() or testing.start_ipython()
    shell.push({"fast": fuse(Scaled()), "x": x})
    inline_kernels.load_ipython_extension(shell)
    shell.run_line_magic("tail", "fast x")
    head, text = shell.rl_next_input.split("\n", 1) if getattr(shell, "rl_next_input", None) else (None, None)
    if head is None:
        head, text = shell.payload_manager.read_payload()[-1]["text"].split("\n", 1)
    assert head == "%%tail fast x"
    shell.run_cell_magic("tail", "fast x", negated(text))
    fast = shell.user_ns["fast"]
    torch.testing.assert_close(fast(x), -expected(fast, x))
    shell.run_line_magic("tail", "--own fast x")
    torch.testing.assert_close(fast(x), expected(fast, x))
    with pytest.raises(TypeError, match="expected a fused module"):
        shell.run_line_magic("tail", "x x")
