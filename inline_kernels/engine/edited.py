"""A segment whose text somebody edited: its schedule with that text in place of the generated one.

Its gradient is that of the edited lines, where they can be followed (followed.py): backward is then generated from what they say, and starts from v,
which the library convolves again, and copies of parameters. Where they can't, backward raises, with the lines.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import NamedTuple

import torch
from torch import Tensor

import inline_loader
from inline_kernels.loader.source import Launcher, parse_launchers

from . import depthwise, library, load_plan, naming, programs, schedule
from .cases import Case
from .followed import NotFollowed, followed


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

    def _original(self, case: Case) -> Case:
        return case._replace(saving=self.edit.saving)

    def requests(self, case: Case) -> list[Mapping]:
        request, *others = self.schedule.requests(self._original(case))
        if request["source"] != self.edit.original:
            raise RuntimeError(
                f"the formula of {case.segment.conv.name} was edited for other inputs, or another model than this is now: "
                "edit() it for these, or edit(..., None) to have the model's own again"
            )
        return [request | {"source": self.edit.text}, *others]

    def describe(self, case: Case) -> str:
        self.requests(case)
        gradient, lines = self._gradient(case), self.schedule.describe(self._original(case))
        known = "without a gradient" if isinstance(gradient, str) else "with the gradient of its lines"
        return f"edited, {known}: {lines}"

    def _gradient(self, case: Case) -> programs.Composed | str:
        """Backward, or why there is none."""
        kinds = [programs.kind_for(case._replace(saving=saving)) for saving in (self.edit.saving, True)]
        known = vars(case.segment.graph).setdefault("edited", {})
        if (key := (self.digest, *kinds)) not in known:
            known[key] = self._derived(case.segment, *kinds)
        return known[key]

    def _derived(self, segment, kind: programs.Kind, saving: programs.Kind) -> programs.Composed | str:
        if self.schedule is not schedule:
            return f"the schedule {self.edit.schedule} has none: edit what source() gives where gradients are enabled"
        y = programs.composed_of(segment, kind).forward.roots[0].node
        try:
            with programs.lock:
                y = followed(y, self.edit.original, self.edit.text)
            return programs.differentiated(segment, y, saving)
        except NotFollowed as error:
            return (
                f"expected lines of names, numbers, operators and functions of engine/scalars.py, got {error}"
            )
        except schedule.Unsupported as error:
            return str(error)

    def plan(self, case: Case) -> SimpleNamespace:
        request, *_ = self.requests(case)
        inner = self.schedule.plan(self._original(case), edited=request["source"])
        found = SimpleNamespace(inner=inner, gradient=None, copies=[], back=None)
        if not case.saving:
            return found
        found.gradient = composed = self._gradient(case)
        if isinstance(composed, str):
            return found
        found.back = load_plan.Plan.of(case, composed)
        found.back.kernels = inline_loader.load(**request | {"source": composed.text})
        of_library = library.Convolution.of(case.segment.conv, case.weight)
        found.back.convolution = depthwise.convolution(case) or of_library
        found.copies = self._copies(case.segment, found.back)
        return found

    @staticmethod
    def _copies(segment, back: load_plan.Plan) -> list[tuple[int, list[int], torch.dtype]]:
        """What is kept of parameters: of which argument, in what shape and dtype."""
        names = [leaf.attr[0] for leaf in segment.inputs] + [*segment.parameters]
        at = {f"kept_{naming.identifier(name)}": i for i, name in enumerate(names)}
        arrays = [array for array in back.composed.saved if array.name != "v"]
        return [(at[a.name], back.sizes.shape(a.space), load_plan.dtype_of(back, a)) for a in arrays]

    def forward(self, plan: SimpleNamespace, arguments: Sequence) -> list[Tensor]:
        y, *rest = self.schedule.forward(plan.inner, arguments)
        copies = [arguments[i].detach().to(to, copy=True).view(shape) for i, shape, to in plan.copies]
        return [y, *copies, *rest]

    def saved(self, case: Case) -> list:
        own = self.schedule.saved(case) if self.edit.saving else []
        if isinstance(composed := self._gradient(case), str):
            return own
        copies = self._copies(case.segment, load_plan.Plan.of(case, composed))
        return [(shape, to, torch.contiguous_format) for _, shape, to in copies] + own

    def backward(
        self,
        plan: SimpleNamespace,
        dy: Tensor,
        arguments: Sequence,
        saved: Sequence[Tensor],
        needs: Sequence[bool],
    ) -> list[Tensor | None]:
        if plan.back is None:
            raise RuntimeError(
                f"the formula was edited, and its gradient is not known: {plan.gradient}. edit(..., None) brings the model's own back"
            )
        weight, copies = arguments[len(plan.back.segment.inputs)], iter(saved)
        v = functools.partial(library.convolve, plan.back.convolution, arguments[0], weight)
        kept = [v() if array.name == "v" else next(copies) for array in plan.back.composed.saved]
        return schedule.backward(plan.back, dy, arguments, kept, needs)


@functools.lru_cache(64)
def edited(schedule: object, edit: Edit) -> Edited:
    """One for equal edits: an operator hangs on it."""
    return Edited(schedule, edit)


def the_same_launcher(text: str, original: str) -> bool:
    """Has `text` a launcher `forward` with the parameters of that in `original`?"""

    def parameters(launchers: list[Launcher]) -> list:
        return [(p.declared, p.name) for each in launchers if each.name == "forward" for p in each.parameters]

    return parameters(parse_launchers(text)) == parameters(parse_launchers(original))
