"""A model as it was captured: the captured code, and its segments, each of which decides for itself what runs (`Part`)."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Sequence
from operator import is_

import torch
from torch import Tensor, fx, nn
from torch.nn.modules.lazy import LazyModuleMixin
from torch.utils._python_dispatch import _disable_current_modes

import inline_loader

from . import between, capture, chain, joining, layouts, pooling, replacing, support, timed
from .code import Code, without_memory
from .edited import Edit, the_same_launcher
from .guards import Guards, SideEffects, recorded
from .operator import EDITED, Decision, weightless
from .part import Asked, Counts, Part, building, called, options_of
from .support import NOT_THE_MODEL
from .tracing import has_hooks, watched


class Structure:
    """The model as it was captured for inputs of a `kind`, or None: the first tensor's dimensions, device and dtype; is it on a GPU and not in planes?; its
    type, or where there are others all arguments, `described`. examples: of the call (examples.py).

    `run(model, *inputs)` is the captured code, None where there is none, for the `reason`; `watched` is the same where something sees
    operators by themselves: its segments, `plain`, give results as eager's do. `built`: have the kernels of the first call been built?
    """

    def __init__(self, model: nn.Module, base: type, kind: tuple | None, examples: tuple | None = None):
        self.kind, self.generation = kind, inline_loader.generation
        self.run = self.code = None
        self.parts: list[Part] = []
        self.chains: list[chain.Chain] = []
        self.replacements: list[replacing.Replacement] = []
        self.segments: Sequence = ()
        # Shared with the parts, from which there is no way here.
        self.asked, self.stale, self.counts = Asked(model), types.SimpleNamespace(is_so=False), Counts()
        self.settings = timed.settings() if options_of(model).tune else None
        self.reason, reads = watched() or _unfit(model, kind), {}
        self.stale.is_so = bool(watched())  # the next call asks again
        captured = None
        if not self.reason:
            captured, self.reason, reads = _capture(model, base, *kind[:2], examples)
        segments = captured.segments if captured else []
        if captured and not segments:
            known = {**_altered(captured.module.graph, model), **captured.opaque, **captured.remarks}
            why = [f"{name}: {reason}" for name, reason in known.items()]
            self.reason = "; ".join(["there is no Conv2d or Conv3d with a tail that kernels take", *why])
        by_value = captured.values if captured else frozenset()
        numbers = {name for segment in segments for name in segment.scalars} - by_value
        replaced = {name for segment in segments for name in called(segment)}
        replaced |= captured.passed_by if captured else set()
        if segments:
            replaced |= replacing.replaced(captured, model) | chain.may_become_in_place(
                captured.module.graph, model
            )
        self.guards = Guards(model, base, reads, replaced, numbers)
        self.built, self.arguments = not segments, []
        if segments:
            self._bind(model, captured)

    def _bind(self, model: nn.Module, captured) -> None:
        self.segments, self.constants = captured.segments, captured.constants
        laid_out = self._laid_out(model, captured)
        self.parts = self._parts(model, laid_out)
        self._are_plain = laid_out == self.segments
        graph = captured.module.graph
        for node in graph.nodes:
            if node.target in self.segments:
                self.parts[self.segments.index(node.target)].guard_once(node.args)
        self.arguments = [node.target for node in graph.nodes if node.op == "placeholder"]
        self.remarks = {**_altered(graph, model), **captured.opaque, **captured.remarks}
        self.code = Code(graph, captured.constants, captured.segments)
        self.graph = fx.Graph()  # which has no way to modules, as the captured one has
        self.graph.output(self.graph.graph_copy(graph, {}))
        by_segment = dict(zip(self.segments, self.parts))
        found = joining.joiners(captured, model, laid_out) | pooling.poolers(captured, model, laid_out)
        self.replacements = [replacement for replacement, _ in found.values()]
        placed, others = replacing.placed(graph, found)
        chained, places, calls = chain.chained(placed, by_segment, model, self._few())
        self.chains = [call for call in calls if isinstance(call, chain.Chain)]
        code = Code(chained, captured.constants, [*places, *others])
        self.run = code.function([*calls, *self.replacements])
        if sum(bool(part.counters) for part in self.parts) > 1 and not _may_look(graph, model):
            self.run = self.counts.around(self.run)

    def _laid_out(self, model: nn.Module, captured) -> Sequence:
        """The segments that run (between.py)."""
        _, device, _, last, _ = self.kind
        return between.laid_out(captured, model) if device.type == "cuda" and not last else captured.segments

    def _few(self) -> set[str]:
        """The arguments of at most two axes."""
        given = self.kind[-1] if isinstance(self.kind[-1], tuple) else ()
        axes = {key: len(of[2]) if len(of) > 2 else 3 for key, *of in given}  # as `described` says it
        return {name for i, name in enumerate(self.arguments) if axes.get(i, axes.get(name, 3)) <= 2}

    def _parts(self, model: nn.Module, segments: Sequence) -> list[Part]:
        shared = self.constants, self.guards, self.stale, self.asked, self.counts
        return [Part(each, model, *shared) for each in segments]

    @functools.cached_property
    def plain(self) -> list[Part]:
        return self.parts if self._are_plain else self._parts(self.parts[0].model(), self.segments)

    @functools.cached_property
    def watched(self) -> Callable:
        return self.code.function([part.watched for part in self.plain])

    def holds(self, model: nn.Module) -> bool:
        """Is the model what it was, but for numbers that only kernels read?"""
        if self.stale.is_so or not self.guards.holds(model, self._forget):
            return False
        if self.generation != inline_loader.generation:  # edited kernels
            self._forget()
            self.generation = inline_loader.generation
        if self.settings is not None and self.settings != (now := timed.settings()):
            self.settings = now
            self._forget()
        if self.asked.ever and self.asked.variant is not model.variant and self.asked.changes(model):
            self._forget()
        return True

    def _forget(self) -> None:
        for each in {*self.parts, *vars(self).get("plain", ()), *self.chains, *self.replacements}:
            each.forget()

    def is_of(self, other: Structure) -> bool:
        """May it serve a model again that `other` serves? Not if it is of other modules, whose memory it would keep."""
        own, theirs = self.guards, other.guards
        alike = own.modules == theirs.modules and all(map(is_, own.fields, theirs.fields))
        return alike and not self.stale.is_so

    def given(self, inputs: tuple, keywords: dict) -> tuple | None:
        """The captured code's arguments; None: it was captured for others."""
        if not keywords:
            return inputs if len(inputs) == len(self.arguments) else None
        names = self.arguments[len(inputs) :]
        return (*inputs, *[keywords[name] for name in names]) if keywords.keys() == {*names} else None

    # ------------------------------------------------------------------------------------------------- before anything runs

    def decisions(
        self, model: nn.Module, inputs: tuple, keywords: dict, saving: bool | None = None
    ) -> list[Decision]:
        """What each segment would do for such inputs. Nothing is computed: the code runs on tensors without memory.

        What lies between segments and can't run so leaves the rest undecided."""
        found: list[Decision] = []
        failed: list[Exception] = []  # here, and not in the user's code
        if saving is None:
            own = (
                *model.parameters(),
                *(each for each in self.given(inputs, keywords) if isinstance(each, Tensor)),
            )
            saving = torch.is_grad_enabled() and any([t.requires_grad for t in own])

        def of(part: Part) -> Callable:
            def decide(*given):
                try:
                    decision = part.decision(given, saving)
                except Exception as error:
                    failed.append(error)
                    raise
                found.append(decision)
                return decision.like if decision.like is not None else part.eager_code(empty, *given)

            return decide

        empty = without_memory(model)
        given = self.given(inputs, keywords)
        if reason := next(filter(None, [support.odd("the input", each) for each in given]), None):
            return [Decision(part.name, "eager", reason) for part in self.parts]
        meta = [_foreseen(each) if isinstance(each, Tensor) else each for each in given]
        rest = "what precedes it is not to be foreseen"
        try:
            with torch.no_grad():
                self.code.function([of(part) for part in self.parts])(empty, *meta)
        except Exception:  # whatever a user's code does with such tensors, or raises for the input
            if failed:
                raise
            rest = NOT_THE_MODEL if found and found[-1].reason == NOT_THE_MODEL else rest
        found += [Decision(part.name, "eager", rest) for part in self.parts[len(found) :]]
        return found

    def build(self, model: nn.Module, inputs: tuple, keywords: dict, saving: Sequence[bool]) -> None:
        """Builds the kernels of all segments side by side. What fails is left to the segments' own first calls."""
        self.built = True
        if not self.parts or self.given(inputs, keywords) is None:
            return
        requests = []
        for each in saving:
            decided = self.decisions(model, inputs, keywords, each)
            to_time = [one for decision in decided if decision.timing for one in decision.timing[1].values()]
            for decision in [*decided, *to_time]:
                requests += [request for request in decision.requests if request not in requests]
        if requests and self.chains and self.kind[1].type == "cuda":
            requests.append(layouts.turning_request(self.kind[2]))
        for each in self.replacements:
            requests += [request for request in each.request(self.kind[2]) if request not in requests]
        if requests:
            with building(self.kind[1].type):
                inline_loader.load_all(requests)

    def source(self, model: nn.Module, inputs: tuple, keywords: dict, number: int) -> str:
        decision = self._built(model, inputs, keywords, number)
        return decision.requests[0]["source"]

    def edit(
        self, model: nn.Module, inputs: tuple, keywords: dict, number: int, text: str | None
    ) -> tuple[str, tuple[Edit, dict] | None]:
        """The segment's name, and what stands in place of its text where `text` does, with what inline_loader has to build for that."""
        decision = self._built(model, inputs, keywords, number)
        if text is None:
            return decision.segment, None
        known = torch.is_grad_enabled()
        for saving in (known, not known):
            decision = self._built(model, inputs, keywords, number, saving)
            request = decision.requests[0]
            if the_same_launcher(text, request["source"]):
                edit = Edit(EDITED.get(decision.runs, decision.runs), saving, request["source"], text)
                return decision.segment, (edit, {**request, "source": text})
        raise ValueError(
            f"expected the launcher `forward` as source() has it, with its parameters, for {decision.segment}"
        )

    def _built(
        self, model: nn.Module, inputs: tuple, keywords: dict, number: int, saving: bool | None = None
    ) -> Decision:
        """The segment's decision, which is not eager."""
        decisions = self.decisions(model, inputs, keywords, saving)
        if not -len(decisions) <= number < len(decisions):
            raise IndexError(f"expected a segment below {len(decisions)}, got {number}")
        decision = decisions[number]
        if decision.runs == "eager":
            raise RuntimeError(f"segment {number} runs eager: {decision.reason}")
        return decision


# ------------------------------------------------------------------------------------------------------------------ capturing


def _foreseen(t: Tensor) -> Tensor:
    found = weightless(t)
    if (
        t.requires_grad and not torch._C._are_functorch_transforms_active()
    ):  # which allow none to be asked for
        found.requires_grad_()
    return found


def _unfit(model: nn.Module, kind: tuple | None) -> str:
    """Why a forward isn't even traced, or nothing."""
    if kind is None:
        return "forward is given no tensor"
    if getattr(model, "_is_replica", False):
        return "it is a replica of nn.DataParallel: its parameters are no Parameters"
    for name, module in model.named_modules():
        if "parametrizations" in module._modules and (
            not name or not type(module).__module__.startswith("torch.")
        ):
            return f"{name or 'the model'} has parametrizations"
        if isinstance(module, LazyModuleMixin):
            return f"{name or 'the model'} gets its parameters in its first call"
    return ""


def _capture(
    model: nn.Module, base: type, dimensions: int, device: torch.device, examples: tuple | None
) -> tuple[object, str, dict[str, set[str]]]:
    """What capture.py makes of the model's forward, or None and the reason; and which attributes were read."""
    with _disable_current_modes():
        try:
            shadow, reads = recorded(model, base)
            effects = SideEffects(shadow, reads)
        except Exception as error:  # what a user's class does when it is derived from or copied
            return None, f"the model can't be copied: {type(error).__name__}: {error}", {}
        try:
            bare = device.type == "cuda"
            captured = capture.capture(shadow, model.training, dimensions, bare=bare, examples=examples)
        except capture.NotCaptured as error:
            return None, str(error), reads
        reason = effects.found()
        return (None, reason, reads) if reason else (captured, "", reads)


def _may_look(graph: fx.Graph, model: nn.Module) -> bool:
    """Does anything between segments see more than its tensors, so perhaps a counter of batches? Modules of the user's, and hooks."""
    modules = [model.get_submodule(node.target) for node in graph.nodes if node.op == "call_module"]
    reads = any(node.op == "get_attr" and "num_batches_tracked" in node.target for node in graph.nodes)
    return reads or any(
        has_hooks(each) or not type(each).__module__.startswith("torch.nn.") for each in modules
    )


def _altered(graph: fx.Graph, model: nn.Module) -> dict[str, str]:
    """Of the convolutions that are left to eager because somebody changed them: why."""
    found = {}
    for node in graph.nodes:
        module = model.get_submodule(node.target) if node.op == "call_module" else None
        if isinstance(module, (nn.Conv2d, nn.Conv3d)):
            replaced = f"{node.target} is a {type(module).__name__}, and kernels follow torch.nn's own"
            found[node.target] = support.altered(node.target, module) or replaced
    return found
