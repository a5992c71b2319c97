"""A ladder of a lesson refuses what computes nothing, also where the right result is known beforehand."""

import dataclasses
import sys
from pathlib import Path

import pytest
import torch

import models
import numerics

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "notebooks"))
import walkthrough  # noqa: E402

AS_IN_ITS_LESSON = 0.25  # of the problem whose result is known beforehand: what it then is, by its lesson
CASES = [(name, None) for name in models.PROBLEMS] + [(numerics.DROPOUT, AS_IN_ITS_LESSON)]


@pytest.mark.parametrize("name, least", CASES)
def test_a_constant_is_no_rung(name, least, monkeypatch):
    problem = models.PROBLEMS[name]
    if least:
        arguments = (*problem.init_inputs[:4], least, *problem.init_inputs[5:])
        problem = dataclasses.replace(problem, init_inputs=arguments, cases=())
    monkeypatch.setattr(walkthrough, "status", lambda *_: print)
    monkeypatch.setattr(walkthrough.Ladder, "draw", lambda self: None)
    ladder = walkthrough.Ladder(problem, "cpu", batch=1)
    with torch.no_grad():
        size = ladder.model(ladder.x).shape

    class Cheat(problem.Model):
        """Looks at the sizes of x alone."""

        def forward(self, x):
            y = x.new_full(size, least or 0.0)
            return self.dropout(y) if least else y

    with pytest.raises(AssertionError, match="NaN" if least else "error|kept"):
        ladder.rung("Cheat", Cheat)
