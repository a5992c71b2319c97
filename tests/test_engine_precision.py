"""Asking the library in which precision it convolves: what is found, what is kept, and when nobody asks."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch

from inline_kernels.engine import library, precision
from inline_kernels.engine.operator import Standing
from inline_kernels.engine.precision import Settings


def rounded(t: torch.Tensor) -> torch.Tensor:
    """To TF32."""
    return ((t.view(torch.int32) + 0x1000) & ~0x1FFF).view(torch.float32) if t.dtype == torch.float32 else t


@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("of", ["forward", "dx", "dw"])
@pytest.mark.parametrize(
    "x, weight, settings",
    [
        ((3, 8, 9, 12), (16, 8, 3, 3), Settings()),
        ((2, 8, 9, 7), (8, 4, 3, 1), Settings((2, 1), (1, 0), (1, 2), 2)),
        ((2, 3, 5, 6, 7), (8, 3, 2, 2, 3), Settings()),
    ],
    ids=["plain", "settings", "volumes"],
)
def test_the_answer_is_that_of_the_results(x, weight, settings, of, channels_last, monkeypatch):
    given = torch.empty(x), torch.empty(weight), of, settings, channels_last
    assert not precision._asked(*given)
    forward, backward = torch.convolution, torch.ops.aten.convolution_backward

    class Rounding(NamedTuple("Rounding", [("function", Callable)])):
        """Its function, of operands that are rounded; all else is the function's: torch may import what looks for that meanwhile."""

        __getattr__ = lambda self, name: getattr(self.function, name)  # noqa: E731

        def __call__(self, *a):
            return self.function(*(rounded(t) if torch.is_tensor(t) else t for t in a))

    monkeypatch.setattr(torch, "convolution", Rounding(forward))
    monkeypatch.setattr(torch.ops.aten, "convolution_backward", Rounding(backward))
    assert precision._asked(*given)


@pytest.fixture
def asked(monkeypatch):
    """What is asked, of tensors that are said to be on a GPU; the answer is yes."""
    found = []
    monkeypatch.setattr(precision, "_answers", {})
    monkeypatch.setattr(precision, "_asked", lambda *given: found.append(given) or True)
    monkeypatch.setattr(library, "may_run_tf32", lambda x: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    return found


def on_gpu(*shape: int, layout=torch.contiguous_format) -> Standing:
    return Standing(
        torch.empty(shape, device="meta").contiguous(memory_format=layout), torch.device("cuda", 0)
    )


def test_an_answer_is_kept_for_all_that_it_hangs_on(asked, monkeypatch):
    x, weight = on_gpu(2, 8, 9, 9), torch.empty(16, 8, 3, 3, device="meta")
    last = on_gpu(2, 8, 9, 9, layout=torch.channels_last)
    calls = [(x, weight), (on_gpu(3, 8, 9, 9), weight), (last, weight), (x, weight, "dx")]
    calls += [(x, weight, "forward", Settings((2, 2))), (x, weight, "forward", Settings(padding=[1, 1]))]
    for number, each in enumerate(calls, 1):
        assert precision.runs_tf32(*each) and precision.runs_tf32(*each)
        assert len(asked) == number
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", True)
    assert precision.runs_tf32(x, weight) and len(asked) == len(calls) + 1


def test_settings_that_are_the_same_are_asked_for_once(asked):
    x, weight = on_gpu(2, 3, 8, 8), torch.empty(4, 3, 3, 3, device="meta")
    for settings in (Settings(), Settings((1, 1), [0, 0], (1, 1)), Settings(padding=(0, 0))):
        assert precision.runs_tf32(x, weight, "dw", settings)
    assert len(asked) == 1
    assert precision.runs_tf32(x, weight, "dw", Settings(padding=(1, 0))) and len(asked) == 2


def test_nobody_asks_while_a_graph_is_captured_or_code_traced(asked, monkeypatch):
    x, weight = on_gpu(2, 8, 9, 9), torch.empty(16, 8, 3, 3, device="meta")
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert not precision.runs_tf32(x, weight)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(precision, "is_watched", lambda: True)
    assert not precision.runs_tf32(x, weight) and not asked
    monkeypatch.setattr(precision, "is_watched", lambda: False)
    assert precision.runs_tf32(x, weight)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert precision.runs_tf32(x, weight) and len(asked) == 1


def test_random_numbers_are_the_users(monkeypatch):
    state = torch.get_rng_state()
    precision._asked(torch.empty(2, 3, 8, 8), torch.empty(4, 3, 3, 3), "dw", Settings(), False)
    assert torch.equal(state, torch.get_rng_state())
