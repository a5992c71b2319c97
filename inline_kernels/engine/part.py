"""A segment of one model: it decides what runs, keeps the decision for each situation, and runs it."""

from __future__ import annotations

import functools
import threading
import types
import warnings
import weakref
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from inline_kernels.loader.operators import check_memory, is_watched
from inline_loader import BuildError

from . import cases, choice, composed, costs, drawing, library, support, tiling, timed
from .code import Code, copy_of
from .composed import NO_SOURCE
from .edited import edited
from .guards import Guards
from .operator import SCHEDULES, Decision, Names, Reference, SegmentOperator, first, operator_of
from .passes import Unsupported
from .support import NOT_THE_MODEL, Keeping, Situation

_said: set[tuple[str, str]] = set()  # of a device, why kernels can't be built


# By a variant of `fused(Model)`, the schedules that run it; more of them serve what nobody asked for.
SCHEDULES_OF = {"fused": ("fused",), "epilogue": ("load",)}


class Options(NamedTuple):
    """What fuse was asked for."""

    exact_order: bool = False
    tune: bool = False


def options_of(model: nn.Module) -> Options:
    return getattr(model, "_options", Options())


class Step(NamedTuple):
    """What a segment runs in a situation, for a chain: `shared`'s forward and backward by that plan, the numbers behind its tensors, and is
    there a backward?"""

    shared: SegmentOperator
    plan: types.SimpleNamespace
    constants: tuple
    saving: bool


class Asked:
    """The variant that a module of `fused(Model)` is asked for, and the schedules that may run it; None: all."""

    def __init__(self, model: nn.Module):
        self.ever = hasattr(type(model), "variants")
        self.changes(model)

    def changes(self, model: nn.Module) -> bool:
        before, self.variant = getattr(self, "variant", None), model.variant if self.ever else None
        self.schedules = SCHEDULES_OF.get(self.variant)
        return before != self.variant

    def allows(self, schedule: str) -> bool:
        return self.schedules is None or schedule in self.schedules


class Counts(threading.local):
    """Counters of batches that a model's call has yet to raise, all at once behind it: `due`; None: each segment raises its own."""

    due: list[Tensor] | None = None

    def around(self, run: Callable) -> Callable:
        """run, which raises them at its end."""

        def counted(*given):
            self.due = due = []
            try:
                return run(*given)
            finally:
                self.due = None
                count_batches(due)

        return counted

    def raise_all(self, tables: Sequence[dict]) -> None:
        """Those of batch norms, of their buffers."""
        raised = [count for buffers in tables if (count := buffers["num_batches_tracked"]) is not None]
        if self.due is None:
            count_batches(raised)
        else:
            self.due += raised


def count_batches(counters: Sequence[Tensor]) -> None:
    if len({*map(id, counters)}) == len(counters) > 1:
        torch._foreach_add_(counters, 1)  # one launch
    else:
        for count in counters:
            count.add_(1)


class Part(Keeping):
    """A segment of one model: called with its inputs, it gives its result. What it decided in a situation it keeps."""

    def __init__(
        self,
        segment,
        model: nn.Module,
        constants: dict[str, Tensor],
        guards: Guards,
        stale: types.SimpleNamespace,
        asked: Asked,
        counts: Counts,
    ):
        super().__init__()
        self.segment, self.guards, self.stale, self.asked, self.counts = segment, guards, stale, asked, counts
        self.name, self.model = segment.conv.name or segment.parameters[0], weakref.ref(model)
        self.modules = {name: model.get_submodule(name) for name in sorted(called(segment))}
        self.altered = next(filter(None, [support.altered(*each) for each in self.modules.items()]), None)
        known = {*segment.parameters, *segment.buffers, *segment.scalars}
        read = {node.target for node in segment.eager.nodes if node.op == "get_attr"} - known
        self.others = {
            name: constants[name] if name in constants else attribute(model, name) for name in read
        }
        options, schedules = options_of(model), dict(SCHEDULES)
        self.exact_order = options.exact_order
        if edit := getattr(model, "_edits", {}).get(self.name):
            schedules = {edit.schedule: edited(schedules[edit.schedule], edit)}
            options = options._replace(tune=False)
        elif composed.written_for(segment) is None:
            del schedules["fused"]
        self.by_schedule = {name: self._operator_of(name, schedule) for name, schedule in schedules.items()}
        # What may be timed, by name; nothing: nobody wants that.
        to_time = schedules if options.tune else ()
        self.able = {name: self._operator_of(name, choice.able(schedules[name])) for name in to_time}
        self.shared = next(iter(self.by_schedule.values()))  # all have the same arguments
        self.own = Names(segment)
        self.names, self.inputs = self.own.tensors, self.own.inputs
        self.sources = [_source(model, constants, name) for name in self.names[self.inputs :]]
        self.shapes = [table[last].shape for table, last in self.sources]
        self.eager_code = Code(segment.eager, constants).function()
        counters = [update.mean_buffer.rpartition(".")[0] for update in segment.updates]
        self.counters = [model.get_submodule(name)._buffers for name in counters]

    @property
    def updated(self) -> range:
        """The places of the tensors that are written."""
        return range(len(self.names) - len(self.own.updated), len(self.names))

    def _operator_of(self, name: str, schedule: object) -> SegmentOperator:
        return operator_of(self.segment, self.modules, self.others, self.exact_order, name, schedule)

    def for_all(self) -> SegmentOperator:
        """What serves whatever the sizes, in inference and training: by the first schedule that can, of those that may."""
        able = {k: each.schedule for k, each in self.by_schedule.items() if self.asked.allows(k)}
        able = {k: each for k, each in able.items() if not getattr(each, "BY_SIZES", False)}
        if not able:
            raise RuntimeError(f"variant {self.asked.variant!r} can't run: {NO_SOURCE}")
        return self._operator_of("_".join(able), first(*able.values()))

    def operator_of(self, decision: Decision):
        """loader_operators' operator; None: eager."""
        return None if decision.runs == "eager" else self._shared(decision).operator

    def _shared(self, decision: Decision) -> SegmentOperator:
        return (self.able if decision.able else self.by_schedule)[decision.runs]

    def _refuse(self, decision: Decision, given: tuple) -> None:
        """Where one schedule was asked for and can't run, that is an error; but not where eager has one of its own to raise."""
        if self.asked.schedules and decision.runs == "eager" and decision.reason != NOT_THE_MODEL:
            self.eager(*given)  # whose own error, where it has one, says more
            raise RuntimeError(f"variant {self.asked.variant!r} can't run: {decision.reason}")

    def eager(self, *given):
        return self.eager_code(self.model(), *given)

    # ----------------------------------------------------------------------------------------------------- what is called

    def __call__(self, *given):
        try:
            tensors = (*given, *[table[last] for table, last in self.sources])
        except KeyError:  # a parameter is gone
            return self._decide(given, None)
        situation = self.situation(tensors)
        if situation is None or not situation.decided:
            return self._decide(given, situation)
        if situation.run is None:
            return self.eager(*given)
        if situation.drawn is None:
            return situation.run(*tensors)
        return situation.run(*tensors, *drawing.drawn(tensors[0], situation.drawn, False))

    def foreseen(self, given: Sequence[Tensor]) -> tuple[Step | None, Tensor | None, bool]:
        """For a chain: what runs, and what its result is like, without memory; or None, and whether that is for good. Nothing is computed, but what
        is to be timed is."""
        tensors, decision = (*given, *self.tensors()), self.decision(tuple(given))
        if decision.timing:
            check_memory(*tensors)
            if not timed.time_candidates(self, tensors, *decision.timing):
                return None, None, False
            decision = self.decision(tuple(given))
        if decision.runs == "eager":
            return None, None, True
        check_memory(*tensors)
        return self._bound(tensors, None, decision)[1], decision.like, True

    def watched(self, *given):
        """The same where something sees operators by themselves, or a derivative goes forward: nothing is kept."""
        decision = self.decision(given)
        operator = self.operator_of(decision)
        if operator is None or self.counters:  # what is written to running statistics shall be seen
            return self.eager(*given)
        tensors, constants = (*given, *self.tensors()), self._constants(decision)
        drawn = drawing.drawn(given[0], self._draws(), True) if self.segment.random else ()
        autocast = self._autocast(decision, tensors)
        if autocast is None:
            return operator(*tensors, *drawn, *constants)
        return _run_autocast(operator, autocast, self.inputs, *tensors, *drawn, *constants)

    def _decide(self, given: tuple, situation: Situation | None) -> Tensor:
        """The first call in a situation, and what keeps the decision."""
        if any([isinstance(t, Tensor) and t.is_meta for t in given]):  # which a plan may be asked for
            return self.eager(*given)
        epoch, decision, run, drawn = self.epoch, self.decision(given), None, None
        self._refuse(decision, given)
        if decision.timing:
            tensors = (*given, *self.tensors())
            check_memory(*tensors)
            if timed.time_candidates(self, tensors, *decision.timing):
                decision = self.decision(given)
            else:
                situation = None  # the next call may
        if decision.runs != "eager":
            tensors = (*given, *self.tensors())
            check_memory(*tensors)  # which what is kept looks at in passing
            drawn = self._draws() if self.segment.random else None
            run = self._counted(self._bound(tensors, drawn, decision)[0])
        elif self.able:  # eager's by choice: no longer where TF32 is another
            run = functools.partial(_run_eager, self.eager_code, self.model, self.inputs)
        if situation is not None and epoch == self.epoch:
            situation.decided, situation.run, situation.drawn = True, run, drawn
            self.keep(situation)
        if run is None or decision.runs == "eager":
            return self.eager(*given)
        return run(*tensors, *(() if drawn is None else drawing.drawn(tensors[0], drawn, False)))

    def _bound(
        self, tensors: tuple, drawn: bool | None, decision: Decision
    ) -> tuple[Callable | None, Step | None]:
        """run(*tensors, *drawn), as short as can be; None where its kernels can't be built. It counts no batches. And the same for a chain, where
        nothing is drawn or converted first."""
        shared, x = self._shared(decision), tensors[0]
        constants, autocast = self._constants(decision), self._autocast(decision, tensors)
        needs_gradient = torch.is_grad_enabled() and any([t.requires_grad for t in tensors])
        cast = tensors if autocast is None else _cast(tensors, autocast, self.inputs)
        arguments = *cast, *_undrawn(x, drawn), *constants
        with building(x.device.type) as built:
            plan = shared.operator.plan(arguments, saving=needs_gradient)
        if not built:
            shared.failed(arguments, needs_gradient, built.reason)
            return None, None
        run = shared.bound(plan if autocast is None else None, constants, needs_gradient)
        if autocast is not None:
            return functools.partial(_run_autocast, run, autocast, self.inputs), None
        return run, Step(shared, plan, constants, needs_gradient) if drawn is None else None

    def _counted(self, run: Callable | None) -> Callable | None:
        if run is None or not self.counters:
            return run
        first, last = self.updated.start, self.updated.stop
        return functools.partial(_run_counted, run, self.counters, self.counts, first, last)

    def trial(
        self, decision: Decision, tensors: Sequence[Tensor], gradients: Sequence[bool]
    ) -> Callable | None:
        """What a decision runs, to be timed: forward, and backward where there are gradients. No tensor of it is the model's, and what is written
        to is a copy. None where its kernels can't be built."""
        known = {id(t): t.detach() for t in tensors}
        written = [t for name, t in zip(self.names, tensors) if name in self.own.updated]
        written += [n for each in self.counters if (n := each["num_batches_tracked"]) is not None]
        known |= {id(t): t.detach().clone() for t in written}
        copies = [known[id(t)].requires_grad_(needs) for t, needs in zip(tensors, gradients)]
        leaves = [t for t in dict.fromkeys(copies) if t.requires_grad]
        if decision.runs == "eager":
            run = functools.partial(self.eager_code, copy_of(self.model(), lambda t: known.get(id(t), t)))
            given = copies[: self.inputs]
        else:
            drawn = self._draws() if self.segment.random else None
            run, given = self._bound(copies, drawn, decision)[0], (*copies, *_undrawn(copies[0], drawn))

        def step() -> None:
            y = run(*given)
            if leaves and y.requires_grad:
                torch.autograd.grad(y, leaves, torch.ones_like(y), allow_unused=True)

        return run and step

    # ---------------------------------------------------------------------------------------------------- what is decided

    def tensors(self) -> list[Tensor]:
        return [table[last] for table, last in self.sources]

    def numbers(self) -> list[float]:
        """The model's numbers that the operator takes, as they are now."""
        known = self.guards.numbers
        return [known[name] if name in known else attribute(self.model(), name) for name in self.own.numbers]

    def _constants(self, decision: Decision) -> tuple:
        return *map(float, self.numbers()), support.DTYPES.index(decision.dtype)

    def _autocast(self, decision: Decision, tensors: Sequence[Tensor]) -> torch.dtype | None:
        """To what the convolution's operands are converted; None: they stay. Where kernels can take them as they are, that is more exact,
        and no pass converts x."""
        whole = getattr(self._shared(decision).schedule, "AS_THEY_ARE", False)
        if whole and tensors[0].dtype == tensors[self.inputs].dtype:
            return None
        return support.autocast_dtype(tensors[0])

    def _draws(self) -> bool:
        """Is anything dropped?"""
        return any([each.p > 0 for each in self.segment.random])

    def decision(self, given: tuple, saving: bool | None = None) -> Decision:
        """What runs for those inputs. They may be without memory and stand for some on the parameters' device. Nothing is built.

        saving: for a pass that backward will follow? By default where the tensors say so."""

        def eager(reason: str) -> Decision:
            return Decision(self.name, "eager", reason)

        if self.altered:
            return eager(self.altered)
        try:
            tensors = (*given, *self.tensors())
        except KeyError as error:
            return eager(f"the parameter {error} is gone")
        standing = self.inputs if any([isinstance(t, Tensor) and t.is_meta for t in given]) else 0
        if reason := support.obstacle(tensors, self.names, self.inputs, standing):
            return eager(reason)
        if [t.shape for t in tensors[self.inputs :]] != self.shapes:
            self.stale.is_so = True  # another capture's
            return eager("a parameter has got another shape")
        if self.segment.result and library.is_channels_last(tensors[self.inputs]):
            self.stale.is_so = True  # as eager's results then are, the model's, too
            return eager("the filters have got another layout")
        numbers = self.numbers()
        if any([number != number for number in numbers]):
            return eager("a number is NaN")
        device = tensors[self.inputs].device
        autocast = support.autocast_dtype(given[0], device.type)
        if autocast is not None and self.segment.conv.is_nothing:
            return eager("autocast runs a norm without a convolution in its own type")
        if reason := self._misfit(tensors, device.type):
            return eager(reason)
        reference = Reference(self.shared, self.segment, self.modules, self.others)
        arguments = self.shared.arguments(
            *tensors, *_undrawn(given[0], False, bool(self.segment.random)), *numbers, 0
        )
        try:
            like = reference.like(arguments, device, autocast)
        except Exception:  # whatever torch's functions say of it
            return eager(NOT_THE_MODEL)
        if like.dtype not in support.DTYPES:
            return eager(f"there are no kernels for results of {like.dtype}")
        foreseen = saving is not None
        if not foreseen:
            saving = torch.is_grad_enabled() and any([t.requires_grad for t in tensors])
        given = arguments._replace(dtype=support.DTYPES.index(like.dtype)), like, saving
        found = self._chosen(*given)
        if library.device_type(tensors[self.inputs]) == "cuda" and not self.asked.schedules:
            if tiling.device_properties(device.index).scale != costs.H200:
                found = found._replace(reason=f"{found.reason}; {choice.SCALED}")
        return timed.chosen(self, found, *given, foreseen) if self.able else found

    def _chosen(self, arguments: tuple, like: Tensor, saving: bool) -> Decision:
        """The first schedule that can run them, of those that may; else eager, with the reasons of all."""
        asked = [each for each in self.by_schedule.items() if self.asked.allows(each[0])]
        refused: list[str] = []
        faster = self._faster(arguments, saving)
        if faster and faster[0] == "eager":
            return Decision(self.name, *faster)
        for name, shared in asked:
            if faster and name != "load":
                refused.append(faster[1])
                continue
            decision = shared.decide(self.name, arguments, like, saving)
            if decision.runs != "eager":
                instead = refused[:1] if "fused" in self.by_schedule else []
                return decision._replace(reason="; ".join([*instead, decision.reason]))
            refused.append(decision.reason)
        return Decision(self.name, "eager", "; ".join(dict.fromkeys(refused)) or NO_SOURCE)

    def _faster(self, arguments: tuple, saving: bool) -> tuple[str, str] | None:
        """The variant that a record says is faster at such sizes than fused kernels, and the reason; or None."""
        x, weight = arguments[0], arguments[self.inputs]
        written = None if self.asked.schedules else composed.written_for(self.segment)
        if written is None or library.device_type(weight) != "cuda":
            return None
        rule = choice.rule(written.name, "train" if saving else "forward")
        return choice.instead(rule, x, weight, tiling.device_properties(weight.device.index).scale)

    def _misfit(self, tensors: tuple, device: str) -> str | None:
        """Why the inputs aren't what the segment was captured for; or None."""
        x, weight = tensors[0], tensors[self.inputs]
        own = f"{self.name}."
        convolved = [
            t for name, t in zip(self.names, tensors) if t is x or t is weight or name.startswith(own)
        ]
        if len({support.autocast_dtype(t, device) or t.dtype for t in convolved}) > 1:
            return NOT_THE_MODEL
        if x.dim() != weight.dim() or x.shape[1] != weight.shape[1] * self.segment.conv.groups:
            return NOT_THE_MODEL if x.dim() != weight.dim() - 1 else "the input is no batch"
        sizes = cases.levels_of(self.segment, x, weight)
        spaces = {node.attr[0]: node.space for node in self.segment.graph.nodes if node.op == "leaf"}
        for name, t in zip(self.names[1:], tensors[1 : self.inputs]):
            space = spaces[name]
            spatial = sizes[space.level] if space.level else (1,) * (x.dim() - 2)
            expected = (x.shape[0] if space.n else 1, weight.shape[0] if space.c else 1, *spatial)
            if [size for size in t.shape if size != 1] != [size for size in expected if size != 1]:
                return f"a second input is of shape {list(t.shape)}, and {list(expected)} was expected"
        return None


# ------------------------------------------------------------------------------------------------------------------- helpers


def _source(model: nn.Module, constants: dict[str, Tensor], name: str) -> tuple[dict, str]:
    """Where the tensor `name` is to be found at each call."""
    if name in constants:
        return constants, name
    path, _, last = name.rpartition(".")
    owner = model.get_submodule(path)
    return next(table for table in (owner._parameters, owner._buffers, vars(owner)) if last in table), last


def attribute(model: nn.Module, name: str):
    return functools.reduce(getattr, name.split("."), model)


def called(segment) -> set[str]:
    return {node.target for node in segment.eager.nodes if node.op == "call_module"}


def _undrawn(x: Tensor, wanted: bool | None, random: bool = True) -> tuple:
    """What `drawing.drawn` would give, before anything is drawn."""
    if wanted is None or not random:
        return ()
    on_host = library.device_type(x) == "cuda" and not torch.cuda.is_current_stream_capturing()
    return x.new_empty(0 if on_host else int(wanted), dtype=torch.int64), 0


def _cast(tensors: Sequence[Tensor], dtype: torch.dtype, weight: int) -> list[Tensor]:
    """As autocast gives them to the convolution; the rest stays, which is more exact than what eager does."""
    return [t.to(dtype) if i in (0, weight) else t for i, t in enumerate(tensors)]


def _run_autocast(run: Callable, dtype: torch.dtype, weight: int, *varying) -> Tensor:
    if not is_watched():
        check_memory(varying[0], varying[weight])  # before they are converted
    return run(*_cast(varying, dtype, weight))


def _run_eager(code: Callable, model: weakref.ref, inputs: int, *tensors) -> Tensor:
    return code(model(), *tensors[:inputs])


def _run_counted(
    run: Callable, counters: Sequence[dict], counts: Counts, first: int, last: int, *varying
) -> Tensor:
    """run, which writes to the running statistics, as eager's kernels do: autograd isn't told. And counts the batches."""
    counts.raise_all(counters)
    return run(*varying[:first], *[t.data for t in varying[first:last]], *varying[last:])


class building:
    """A region in which kernels are built. Where they can't be, it ends early and is False: eager runs, and a warning says why, once."""

    def __init__(self, device: str):
        self.device, self.reason = device, None

    def __bool__(self) -> bool:
        return self.reason is None

    def __enter__(self) -> building:
        return self

    def __exit__(self, kind, error, traceback) -> bool:
        if not isinstance(error, (BuildError, Unsupported)):
            return False
        if self.device == "cuda" and support.capturing():
            return False  # the graph would hold eager's for ever
        self.reason = str(error)
        if isinstance(error, BuildError) and (self.device, self.reason) not in _said:
            _said.add((self.device, self.reason))
            warnings.warn(
                f"fused modules run eager on {self.device}: {self.reason}", RuntimeWarning, stacklevel=6
            )
        return True
