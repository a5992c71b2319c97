"""A segment whose text somebody edited: its schedule with that text in place of the generated one. Its gradient is nobody's: backward raises."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from torch import Tensor

from inline_kernels.loader.source import Launcher, parse_launchers


class Edit(NamedTuple):
    """What stands in place of `original`, the text that the schedule of that name writes where backward follows (`saving`), or where not."""

    schedule: str
    saving: bool
    original: str
    text: str


class Edited:
    """A schedule, as operator.py says. Where the schedule beneath would write another text than the one that was edited, what the model
    computes is not known: RuntimeError."""

    def __init__(self, schedule: object, edit: Edit):
        self.schedule, self.edit = schedule, edit
        self.digest = "_" + hashlib.sha256(edit.text.encode()).hexdigest()[:12]  # of the operator's name

    def requests(self, segment, arguments: Sequence, saving: bool, *how) -> list[Mapping]:
        (request,) = self.schedule.requests(segment, arguments, self.edit.saving, *how)
        if request["source"] != self.edit.original:
            raise RuntimeError(
                f"the formula of {segment.conv.name} was edited for other inputs, or another model than this is now: "
                "edit() it for these, or edit(..., None) to have the model's own again"
            )
        return [request | {"source": self.edit.text}]

    def describe(self, segment, arguments: Sequence, saving: bool, *how) -> str:
        self.requests(segment, arguments, saving, *how)
        return "edited, without a gradient: " + self.schedule.describe(
            segment, arguments, self.edit.saving, *how
        )

    def plan(self, segment, arguments: Sequence, saving: bool, *how):
        (request,) = self.requests(segment, arguments, saving, *how)
        return self.schedule.plan(segment, arguments, self.edit.saving, *how, edited=request["source"])

    def forward(self, plan, arguments: Sequence) -> list[Tensor]:
        return self.schedule.forward(plan, arguments)

    def saved(self, *given) -> list:
        return self.schedule.saved(*given) if self.edit.saving else []

    def backward(self, *given):
        raise RuntimeError(
            "the formula was edited, and its gradient is not known: edit(..., None) brings the model's own back"
        )


@functools.lru_cache(64)
def edited(schedule: object, edit: Edit) -> Edited:
    """One for equal edits: an operator hangs on it."""
    return Edited(schedule, edit)


def the_same_launcher(text: str, original: str) -> bool:
    """Has `text` a launcher `forward` with the parameters of that in `original`?"""

    def parameters(launchers: list[Launcher]) -> list:
        return [(p.declared, p.name) for each in launchers if each.name == "forward" for p in each.parameters]

    return parameters(parse_launchers(text)) == parameters(parse_launchers(original))
