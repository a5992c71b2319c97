"""A model as it was captured: the captured code, and its segments, each of which decides for itself what runs (`Part`)."""

from __future__ import annotations

import builtins
import functools
import itertools
import linecache
import types
import warnings
import weakref
from collections.abc import Callable, Sequence
from operator import itemgetter

import torch
from torch import Tensor, fx, nn
from torch.fx.node import map_aggregate

import inline_loader
import operators
from inline_loader import BuildError
from loader_operators import check_memory, is_watched

from . import capture, schedule, support
from .guards import Guards, SideEffects, recorded
from .operator import SCHEDULES, Decision, Names, Reference, operator_of, weightless
from .support import NOT_THE_MODEL, Situation
from .tracing import Named

_KEPT_SITUATIONS = 16  # of one segment, the last met


class Structure:
    """The model as it was captured for inputs of a `kind`: (dimensions, device, dtype), or None.

    `run(model, *inputs)` is the captured code, None where there is none, for the `reason`; `watched` is the same where something sees
    operators by themselves. `built`: have the kernels of the first call been built?
    """

    def __init__(self, model: nn.Module, base: type, kind: tuple | None):
        self.kind, self.generation = kind, inline_loader.generation
        self.run = self.watched = self.code = None
        self.parts: list[Part] = []
        self.asked = Asked(model)  # likewise
        self.stale = types.SimpleNamespace(is_so=False)  # shared with parts, from which there is no way here
        self.reason, reads = _unfit(model, base, kind), {}
        captured = None
        if not self.reason:
            captured, self.reason, reads = _capture(model, base, kind[0])
        segments = captured.segments if captured else []
        if captured and not segments:
            why = [f"{name}: {reason}" for name, reason in {**captured.opaque, **captured.remarks}.items()]
            self.reason = "; ".join(["there is no convolution with a tail that kernels take", *why])
        numbers = {name for segment in segments for name in segment.scalars} - set(
            captured.values if captured else ()
        )
        replaced = {name for segment in segments for name in _called(segment)}
        self.guards = Guards(model, base, reads, replaced, numbers)
        self.built, self.arguments = not segments, []
        if segments:
            self._bind(model, captured)

    def _bind(self, model: nn.Module, captured) -> None:
        self.parts = [
            Part(segment, model, captured, self.guards, self.stale, self.asked)
            for segment in captured.segments
        ]
        for node in captured.module.graph.nodes:
            if node.target in captured.segments:
                self.parts[captured.segments.index(node.target)].guard_once(node.args)
        graph = captured.module.graph
        self.arguments = [node.target for node in graph.nodes if node.op == "placeholder"]
        self.remarks = {**_altered(graph, model), **captured.opaque, **captured.remarks}
        self.code = Code(graph, captured.constants, captured.segments)
        self.graph, self.constants = (
            fx.Graph(),
            captured.constants,
        )  # without the way to modules that the captured one has
        self.graph.output(self.graph.graph_copy(graph, {}))
        self.run = self.code.function(self.parts)
        self.watched = self.code.function([part.watched for part in self.parts])

    def holds(self, model: nn.Module) -> bool:
        """Is the model what it was, but for numbers that only kernels read?"""
        if self.stale.is_so or not self.guards.holds(model, self._forget):
            return False
        if self.generation != inline_loader.generation:  # edited kernels
            self._forget()
            self.generation = inline_loader.generation
        if self.asked.ever and self.asked.variant is not model.variant and self.asked.changes(model):
            self._forget()
        return True

    def _forget(self, numbers: dict | None = None) -> None:
        for part in self.parts:
            part.situations = []

    def is_of(self, other: Structure) -> bool:
        """May it serve a model again that `other` serves? Not if it is of other modules, whose memory it would keep."""
        return self.guards.modules == other.guards.modules and not self.stale.is_so

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
        saving = torch.is_grad_enabled() if saving is None else saving

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

        empty = _weightless(model)
        odd = [
            type(each).__name__
            for each in (*inputs, *keywords.values())
            if isinstance(each, Tensor) and type(each) not in support.TRACED
        ]
        if odd:
            reason = f"the input is a {odd[0]}, a subclass of Tensor, which may give operators a meaning of its own"
            return [Decision(part.name, "eager", reason) for part in self.parts]
        given = self.given(inputs, keywords)
        meta = [weightless(each) if isinstance(each, Tensor) else each for each in given]
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
            for decision in self.decisions(model, inputs, keywords, each):
                requests += [request for request in decision.requests if request not in requests]
        if requests:
            with _building(self.kind[1].type):
                inline_loader.load_all(requests)

    def source(self, model: nn.Module, inputs: tuple, keywords: dict, number: int) -> str:
        decisions = self.decisions(model, inputs, keywords)
        if not -len(decisions) <= number < len(decisions):
            raise IndexError(f"expected a segment below {len(decisions)}, got {number}")
        decision = decisions[number]
        if decision.runs == "eager":
            raise RuntimeError(f"segment {number} runs eager: {decision.reason}")
        return "\n".join(request["source"] for request in decision.requests)


class Asked:
    """The variant that a module of `fused(Model)` is asked for, and the schedule's name that runs it; None: whatever is best."""

    def __init__(self, model: nn.Module):
        self.ever = hasattr(type(model), "_schedule_of")
        self.changes(model)

    def changes(self, model: nn.Module) -> bool:
        before, self.variant = getattr(self, "variant", None), model.variant if self.ever else None
        self.schedule = model._schedule_of.get(self.variant) if self.ever else None
        return before != self.variant


def schedules_of(model: nn.Module) -> dict[str, object]:
    """By name, the most fused first: those of the model's class, and those that serve all."""
    return {**getattr(type(model), "_schedules", {}), **SCHEDULES}


# ------------------------------------------------------------------------------------------------------------------ capturing


def _unfit(model: nn.Module, base: type, kind: tuple | None) -> str:
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
    return ""


def _capture(model: nn.Module, base: type, dimensions: int) -> tuple[object, str, dict[str, set[str]]]:
    """What capture.py makes of the model's forward, or None and the reason; and which attributes were read."""
    from torch.utils._python_dispatch import _disable_current_modes

    with _disable_current_modes(), torch.random.fork_rng(devices=[]):
        try:
            shadow, reads = recorded(model, base)
            effects = SideEffects(shadow, reads)
        except Exception as error:  # what a user's class does when it is derived from or copied
            return None, f"the model can't be copied: {type(error).__name__}: {error}", {}
        try:
            captured = capture.capture(shadow, model.training, dimensions)
        except capture.NotCaptured as error:
            return None, str(error), reads
        reason = effects.found()
        return (None, reason, reads) if reason else (captured, "", reads)


class Code:
    """A captured graph as Python code that takes the live model as `self`: `function(calls)` runs it with calls[i] in segment i's place."""

    def __init__(self, graph: fx.Graph, constants: dict[str, Tensor], segments: Sequence = ()):
        places = [_place(i) for i in range(len(segments))]
        live = _live(graph, constants, segments, places)
        made = live.python_code("self")
        self._globals = dict(made.globals)
        self._places = {name: places.index(value) for name, value in made.globals.items() if value in places}
        name = f"<fused forward {next(_numbers)}>"
        linecache.cache[name] = (len(made.src), None, made.src.splitlines(True), name)  # for tracebacks
        space = dict(self._globals)
        exec(compile(made.src, name, "exec"), space)
        self._function, self.text = space["forward"], made.src

    def function(self, calls: Sequence[Callable] = ()) -> Callable:
        space = {
            "__builtins__": builtins,
            **self._globals,
            **{name: calls[i] for name, i in self._places.items()},
        }
        made = types.FunctionType(self._function.__code__, space, "forward", self._function.__defaults__)
        made.__kwdefaults__ = self._function.__kwdefaults__
        return made


_numbers = itertools.count()


def _place(number: int) -> Callable:
    def place(*inputs):
        raise RuntimeError("a segment's place is empty")

    return _named(place, f"segment_{number}")


def _named(function: Callable, name: str) -> Callable:
    """As torch.fx wants what it writes calls of."""
    function.__name__ = function.__qualname__ = name
    function.__module__ = "inline_kernels"
    return function


def _live(
    graph: fx.Graph, constants: dict[str, Tensor], segments: Sequence, places: Sequence[Callable]
) -> fx.Graph:
    """A copy of `graph` with places instead of segments, the model's attributes instead of its numbers, and tensors that tracing made instead
    of their names."""
    live, values, numbers = fx.Graph(), {}, {}

    def read(value):
        if type(value) is not Named:
            return value
        if value.name not in numbers:
            numbers[value.name] = live.create_node("get_attr", value.name)
        return numbers[value.name]

    place_of = {id(segment): place for segment, place in zip(segments, places)}
    for node in graph.nodes:
        op, target = node.op, node.target
        args, kwargs = fx.map_arg((node.args, node.kwargs), values.__getitem__)
        args, kwargs = map_aggregate((args, kwargs), read)
        if op == "call_function":
            target = place_of.get(id(target), target)
        if op == "get_attr" and target in constants:
            op, target = (
                "call_function",
                _named(functools.partial(_constant, constants[target]), f"constant_{target}"),
            )
        values[node] = live.create_node(op, target, args, kwargs, node.name, node.type)
    return live


def _constant(t: Tensor) -> Tensor:
    return t


def _weightless(model: nn.Module) -> nn.Module:
    """A copy of `model` whose tensors have no memory, and on which nobody's hooks hang."""
    known: dict[int, nn.Module] = {}

    def copied(module: nn.Module | None) -> nn.Module | None:
        if module is None or id(module) in known:
            return known.get(id(module))
        made = known[id(module)] = object.__new__(type(module))
        fields = vars(module).copy()
        fields |= {
            key: type(value)() for key, value in fields.items() if "_hooks" in key and isinstance(value, dict)
        }
        fields["_modules"] = {key: copied(child) for key, child in module._modules.items()}
        for table in ("_parameters", "_buffers"):
            fields[table] = {key: t if t is None else weightless(t) for key, t in fields[table].items()}
        vars(made).update(fields)
        return made

    return copied(model)


# ------------------------------------------------------------------------------------------------------------------- segments


class Part:
    """A segment of one model: called with its inputs, it gives its result. What it decided in a situation it keeps."""

    def __init__(
        self, segment, model: nn.Module, captured, guards: Guards, stale: types.SimpleNamespace, asked: Asked
    ):
        self.segment, self.guards, self.stale, self.asked, self.model = (
            segment,
            guards,
            stale,
            asked,
            weakref.ref(model),
        )
        self.name, self.situations = segment.conv.name or segment.parameters[0], []
        called = sorted(_called(segment))
        self.modules = {name: model.get_submodule(name) for name in called}
        self.hooks = [table for module in self.modules.values() for table in support.hooks_of(module)]
        self.altered = next(filter(None, [support.altered(*each) for each in self.modules.items()]), None)
        known = {*segment.parameters, *segment.buffers, *segment.scalars}
        read = {node.target for node in segment.eager.nodes if node.op == "get_attr"} - known
        self.others = {
            name: captured.constants[name] if name in captured.constants else _attribute(model, name)
            for name in read
        }
        exact_order, schedules = getattr(model, "_exact_order", False), schedules_of(model)
        self.by_schedule = {
            name: operator_of(segment, self.modules, self.others, exact_order, name, schedule)
            for name, schedule in schedules.items()
        }
        self.shared = next(iter(self.by_schedule.values()))  # all have the same arguments
        self.own = Names(segment)
        self.names, self.inputs = self.own.tensors, self.own.inputs
        self.sources = [_source(model, name) for name in self.names[self.inputs :]]
        self.once = None  # gives of the tensors those that differ; None: all
        self.shapes = [table[last].shape for table, last in self.sources]
        self.eager_code = Code(segment.eager, captured.constants).function()
        counters = {update.mean_buffer.rpartition(".")[0] for update in segment.updates}
        self.counters = [model.get_submodule(name)._buffers for name in sorted(counters)]

    def guard_once(self, given: Sequence) -> None:
        """given: what tells the inputs apart. Guards take no tensor that stands for two."""
        if len(set(given)) < len(given):
            first = [i for i, each in enumerate(given) if each not in given[:i]]
            self.once = itemgetter(*first, *range(len(given), len(self.names)))

    def operator_of(self, decision: Decision):
        """loader_operators' operator; None: eager."""
        return None if decision.runs == "eager" else self.by_schedule[decision.runs].operator

    def _refuse(self, decision: Decision) -> None:
        """Where one schedule was asked for and can't run, that is an error; but not where eager has one of its own to raise."""
        if self.asked.schedule and decision.runs == "eager" and decision.reason != NOT_THE_MODEL:
            raise RuntimeError(f"variant {self.asked.variant!r} can't run: {decision.reason}")

    def eager(self, *given):
        return self.eager_code(self.model(), *given)

    # ----------------------------------------------------------------------------------------------------- what is called

    def __call__(self, *given):
        if any(self.hooks):
            return self.eager(*given)
        try:
            tensors = (*given, *[table[last] for table, last in self.sources])
            guarded = tensors if self.once is None else self.once(tensors)
            for situation in self.situations:
                if situation.holds(guarded):
                    break
            else:
                situation = Situation(guarded)
        except (AttributeError, KeyError, RuntimeError, TypeError, ValueError):
            # What those guards know no situation of, as one tensor that stands for two: decided each time.
            return self._decide(given, None)
        if not situation.decided:
            return self._decide(given, situation)
        if situation is not self.situations[0]:
            self._put_first(situation)
        if situation.run is None:
            return self.eager(*given)
        if situation.drawn is None:
            return situation.run(*tensors)
        return situation.run(*tensors, *operators.drawn(tensors[0], situation.drawn, False))

    def watched(self, *given):
        """The same where something sees operators by themselves, or a derivative goes forward: nothing is kept."""
        decision = self.decision(given)
        operator = self.operator_of(decision)
        if (
            operator is None or self.counters
        ):  # whoever watches shall see what is written to running statistics
            return self.eager(*given)
        tensors, constants = (*given, *self.tensors()), self._constants(decision)
        drawn = operators.drawn(given[0], self._draws(), True) if self.segment.random else ()
        autocast = support.autocast_dtype(given[0])
        if autocast is None:
            return operator(*tensors, *drawn, *constants)
        return _run_autocast(operator, autocast, self.inputs, *tensors, *drawn, *constants)

    def _decide(self, given: tuple, situation: Situation | None) -> Tensor:
        """The first call in a situation, and what keeps the decision."""
        decision, run, drawn = self.decision(given), None, None
        self._refuse(decision)
        if decision.runs != "eager":
            tensors = (*given, *self.tensors())
            drawn = self._draws() if self.segment.random else None
            run = self._bound(tensors, drawn, decision)
        if situation is not None:
            situation.decided, situation.run, situation.drawn = True, run, drawn
            self._put_first(situation)
        if run is None:
            return self.eager(*given)
        return run(*tensors, *(() if drawn is None else operators.drawn(tensors[0], drawn, False)))

    def _put_first(self, situation: Situation) -> None:
        others = [other for other in self.situations if other is not situation]
        self.situations = [situation, *others[: _KEPT_SITUATIONS - 1]]

    def _bound(self, tensors: tuple, drawn: bool | None, decision: Decision) -> Callable | None:
        """run(*tensors, *drawn), as short as can be; None where its kernels can't be built."""
        operator = self.operator_of(decision)
        x, constants, autocast = tensors[0], self._constants(decision), support.autocast_dtype(tensors[0])
        needs_gradient = torch.is_grad_enabled() and any([t.requires_grad for t in tensors])
        cast = tensors if autocast is None else _cast(tensors, autocast, self.inputs)
        arguments = *cast, *_undrawn(x, drawn), *constants
        with _building(x.device.type) as built:
            plan = operator.plan(arguments, saving=needs_gradient)
        if not built:
            self.by_schedule[decision.runs].failed(arguments, needs_gradient, built.reason)
            return None
        run = self.by_schedule[decision.runs].bound(
            plan if autocast is None else None, constants, needs_gradient
        )
        if autocast is not None:
            run = functools.partial(_run_autocast, run, autocast, self.inputs)
        if self.counters:
            first = len(self.names) - len(self.own.updated)
            run = functools.partial(_run_counted, run, self.counters, first, len(self.names))
        return run

    # ---------------------------------------------------------------------------------------------------- what is decided

    def tensors(self) -> list[Tensor]:
        return [table[last] for table, last in self.sources]

    def numbers(self) -> list[float]:
        """The model's numbers that the operator takes, as they are now."""
        known = self.guards.numbers
        return [known[name] if name in known else _attribute(self.model(), name) for name in self.own.numbers]

    def _constants(self, decision: Decision) -> tuple:
        return *map(float, self.numbers()), support.DTYPES.index(decision.dtype)

    def _draws(self) -> bool:
        """Is anything dropped?"""
        return any([each.p > 0 for each in self.segment.random])

    def decision(self, given: tuple, saving: bool | None = None) -> Decision:
        """What runs for those inputs. They may be without memory and stand for some on the parameters' device. Nothing is built.

        saving: for a pass that backward will follow? By default where the tensors say so."""

        def eager(reason: str) -> Decision:
            return Decision(self.name, "eager", reason)

        if self.altered or any(self.hooks):
            name = next((name for name, module in self.modules.items() if any(support.hooks_of(module))), "")
            return eager(self.altered or f"{name} has hooks")
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
        numbers = self.numbers()
        if any([number != number for number in numbers]):
            return eager("a number is NaN")
        device = tensors[self.inputs].device
        autocast = support.autocast_dtype(given[0], device.type)
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
        saving = (
            torch.is_grad_enabled() and any([t.requires_grad for t in tensors]) if saving is None else saving
        )
        arguments = arguments._replace(dtype=support.DTYPES.index(like.dtype))
        reasons = []
        for name, shared in self.by_schedule.items():
            if self.asked.schedule in (None, name):
                decision = shared.decide(self.name, arguments, like, saving)
                if decision.runs != "eager":
                    return decision
                reasons.append(decision.reason)
        return eager("; ".join(reasons))

    def _misfit(self, tensors: tuple, device: str) -> str | None:
        """Why the inputs aren't what the segment was captured for; or None."""
        x, weight = tensors[0], tensors[self.inputs]
        convolved = [
            t
            for name, t in zip(self.names, tensors)
            if t is x or t is weight or name.startswith(f"{self.name}.")
        ]
        if len({support.autocast_dtype(t, device) or t.dtype for t in convolved}) > 1:
            return NOT_THE_MODEL
        if x.dim() != weight.dim() or x.shape[1] != weight.shape[1] * self.segment.conv.groups:
            return NOT_THE_MODEL if x.dim() != weight.dim() - 1 else "the input is no batch"
        sizes = capture.sizes(self.segment, tuple(x.shape), tuple(weight.shape))
        spaces = {node.attr[0]: node.space for node in self.segment.graph.nodes if node.op == "leaf"}
        for name, t in zip(self.names[1:], tensors[1 : self.inputs]):
            space = spaces[name]
            spatial = sizes[space.level] if space.level else (1,) * (x.dim() - 2)
            expected = (x.shape[0] if space.n else 1, weight.shape[0] if space.c else 1, *spatial)
            if [size for size in t.shape if size != 1] != [size for size in expected if size != 1]:
                return f"a second input is of shape {list(t.shape)}, and {list(expected)} was expected"
        return None


# ------------------------------------------------------------------------------------------------------------------- helpers


def _source(model: nn.Module, name: str) -> tuple[dict, str]:
    """Where the tensor `name` is to be found at each call."""
    path, _, last = name.rpartition(".")
    owner = model.get_submodule(path)
    return next(table for table in (owner._parameters, owner._buffers, vars(owner)) if last in table), last


def _attribute(model: nn.Module, name: str):
    return functools.reduce(getattr, name.split("."), model)


def _altered(graph: fx.Graph, model: nn.Module) -> dict[str, str]:
    """Of the convolutions that are left to eager because somebody changed them: why."""
    found = {}
    for node in graph.nodes:
        module = model.get_submodule(node.target) if node.op == "call_module" else None
        if isinstance(module, (nn.Conv2d, nn.Conv3d)):
            replaced = f"{node.target} is a {type(module).__name__}, and kernels follow torch.nn's own"
            found[node.target] = support.altered(node.target, module) or replaced
    return found


def _called(segment) -> set[str]:
    return {node.target for node in segment.eager.nodes if node.op == "call_module"}


def _undrawn(x: Tensor, wanted: bool | None, random: bool = True) -> tuple:
    """What `operators.drawn` would give, before anything is drawn."""
    if wanted is None or not random:
        return ()
    on_host = x.device.type == "cuda" and not torch.cuda.is_current_stream_capturing()
    return x.new_empty(0 if on_host else int(wanted), dtype=torch.int64), 0


def _cast(tensors: Sequence[Tensor], dtype: torch.dtype, weight: int) -> list[Tensor]:
    """As autocast gives them to the convolution; the rest stays, which is more exact than what eager does."""
    return [t.to(dtype) if i in (0, weight) else t for i, t in enumerate(tensors)]


def _run_autocast(run: Callable, dtype: torch.dtype, weight: int, *varying) -> Tensor:
    if not is_watched():
        check_memory(varying[0], varying[weight])  # before they are converted
    return run(*_cast(varying, dtype, weight))


def _run_counted(run: Callable, counters: Sequence[dict], first: int, last: int, *varying) -> Tensor:
    """run, which writes to the running statistics, as eager's kernels do: autograd isn't told. And counts the batches."""
    for buffers in counters:
        buffers["num_batches_tracked"].add_(1)
    return run(*varying[:first], *[t.data for t in varying[first:last]], *varying[last:])


class _building:
    """A region in which kernels are built. Where they can't be, it ends early and is False: eager runs, and a warning says why, once."""

    def __init__(self, device: str):
        self.device, self.reason = device, None

    def __bool__(self) -> bool:
        return self.reason is None

    def __enter__(self) -> _building:
        return self

    def __exit__(self, kind, error, traceback) -> bool:
        if not isinstance(error, (BuildError, schedule.Unsupported)):
            return False
        if self.device == "cuda" and torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            return False  # the graph would hold eager's for ever
        self.reason = str(error)
        if isinstance(error, BuildError) and (self.device, self.reason) not in _said:
            _said.add((self.device, self.reason))
            warnings.warn(
                f"fused modules run eager on {self.device}: {self.reason}", RuntimeWarning, stacklevel=6
            )
        return True


_said: set[tuple[str, str]] = set()  # of a device, why kernels can't be built
