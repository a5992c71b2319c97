"""The judge is judged by two collections: of cheats, none of which may pass, and of honest modules, which all must."""

from __future__ import annotations

import re

import pytest
import torch

from cheats import CHEATS, SPARED_NOTHING, contained
from honest_modules import HONEST
from inline_kernels.bench import compare, timing


@pytest.fixture(autouse=True)
def one_thread():
    """Because two wait for each other longer than such small tensors take."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def judged(entry, candidate=None) -> list[dict]:
    reference = entry.reference()
    options = dict(device="cpu", phases=entry.phases, variants=("candidate",), seed=1)
    return compare.compare_pair(
        reference, candidate or entry.candidate(reference), entry.make_inputs, **options
    )


@pytest.mark.parametrize("name", [name for name in CHEATS if name not in SPARED_NOTHING])
def test_a_cheat_is_refused(name):
    with contained():
        rows = judged(CHEATS[name])
    assert [row["phase"] for row in rows if row["ok"] is not False] == []
    assert all(row["reason"] and row["median_ms"] is None for row in rows)


@pytest.mark.parametrize("name", SPARED_NOTHING)
def test_what_is_remembered_spares_no_timed_call(name):
    entry = CHEATS[name]
    reference = entry.reference()
    candidate = entry.candidate(reference)
    rows = judged(entry, candidate)
    assert not any(row["ok"] for row in rows) or candidate.shared.get("spared", 0) == 0


@pytest.mark.parametrize("name", HONEST)
def test_an_honest_module_is_accepted(name, few_rounds, monkeypatch):
    monkeypatch.setattr(timing, "IN_A_ROW", 1e-9)  # a call at a time
    entry = HONEST[name]
    try:
        rows = judged(entry)
    except (TypeError, ValueError) as error:
        if not entry.refusal:
            raise
        assert re.search(entry.refusal, str(error))
        return
    assert [row["reason"] for row in rows if not row["ok"]] == []
    assert all(row["median_ms"] > 0 for row in rows)
