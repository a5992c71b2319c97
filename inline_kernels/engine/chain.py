"""Segments that follow one another as one operator: a chain.

Called one by one, each segment costs the host a look at its situation, a node of autograd's graph, and on a GPU launches that turn its filters and
their gradient for a library that convolves channels last. A chain costs one look and one node, and turns those of all its segments by a few
launches. It decides nothing: it runs what its parts decide. Where one of them doesn't run by a plan alone (eager runs, or is to be timed; autocast
converts), they are called one by one, and so they are in training with torch.distributed, where gradients shall be on their way as soon as
they are there.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Container, Mapping, Sequence
from operator import itemgetter
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, fx, is_grad_enabled, nn
from torch._C import _is_any_autocast_enabled
from torch._C._functorch import is_legacy_batchedtensor

import inline_loader
from inline_kernels.loader.operators import are_nobody_elses, backward_seldom, is_watched, precision

from . import layouts, library, load_plan, schedule
from .part import Part, Step
from .support import Keeping, Situation, altered, convolved_dtype

# Functions of their operands: what runs before or behind them makes no difference.
_MODULES = nn.Linear, nn.LayerNorm, nn.ReLU, nn.SiLU, nn.GELU, nn.Sigmoid, nn.Tanh, nn.Flatten, nn.Unflatten, nn.Identity  # fmt: skip
_FUNCTIONS = {
    F.linear, F.layer_norm, F.relu, F.silu, F.gelu, torch.relu, torch.sigmoid, torch.tanh, torch.exp, torch.sin, torch.cos, torch.cat,
    torch.chunk, torch.split, torch.flatten, torch.reshape, torch.unsqueeze, torch.add, torch.sub, torch.mul, torch.div, operator.getitem,
    operator.add, operator.sub, operator.mul, operator.truediv, operator.neg, convolved_dtype
}  # fmt: skip
_METHODS = {
    *"view reshape flatten unflatten unsqueeze squeeze chunk split expand permute transpose float type to".split()
}

_is_distributed = torch.distributed.is_initialized if torch.distributed.is_available() else bool


class Place:
    """Stands in a graph for what is called there: graphs die late, and have no way to what they run."""

    __name__ = "place"

    def __call__(self, *given: Tensor):
        raise TypeError("nothing runs in a graph")


def chained(
    graph: fx.Graph, parts: Mapping[Callable, Part], model: nn.Module, few: Container[str]
) -> tuple[fx.Graph, list[Place], list[Chain | Part]]:
    """graph with places for what it calls: chains of segments that follow one another, and parts that are alone. parts: by the segments that
    the graph calls. few: the arguments of at most two axes."""
    nodes = _ordered(graph, parts, model, few)
    runs = [run for run in _runs(nodes, parts) if len(run) > 1 and any(_leaves(one, run) for one in run)]
    inside, ends = {node for run in runs for node in run}, {run[-1]: run for run in runs}
    made, values, places, called = fx.Graph(), {}, [], []
    for node in nodes:
        if node in ends:
            run = ends[node]
            given = [*dict.fromkeys(a for one in run for a in one.args if a not in run)]
            results = [one for one in run if _leaves(one, run)]
            called.append(Chain([parts[one.target] for one in run], run, given, results))
            call = made.call_function(Place(), tuple(values[a] for a in given))
            places.append(call.target)
            if len(results) == 1:
                values[results[0]] = call
            else:
                for i, one in enumerate(results):
                    values[one] = made.call_function(operator.getitem, (call, i))
        elif node not in inside:
            values[node] = made.node_copy(node, values.__getitem__)
            if node.target in parts:
                called.append(parts[node.target])
                values[node].target = Place()
                places.append(values[node].target)
    return made, places, called


def _leaves(one: fx.Node, run: Sequence[fx.Node]) -> bool:
    """Does anything else read that result?"""
    return any(user not in run for user in one.users)


def _ordered(
    graph: fx.Graph, parts: Mapping[Callable, Part], model: nn.Module, few: Container[str]
) -> list[fx.Node]:
    """The nodes; what stands between calls of segments and is a function of small values goes before these, as layers for a time or a label do.
    few: the arguments of at most two axes. Large are images, and what hangs on them; nothing that they hang on waits for a segment."""
    found: list[fx.Node] = []
    run: list[fx.Node] = []  # of segments' calls, between which nothing has to stay
    stays: set[fx.Node] = set()  # large, or of a tensor that a call may write, as a norm its statistics
    parameters = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    for node in graph.nodes:
        follows = _may_follow(node, parts)
        allowed = {"get_attr": parameters, "placeholder": few}.get(node.op)
        hangs = allowed is not None and node.target not in allowed
        if follows or hangs or not stays.isdisjoint(node.all_input_nodes):
            stays.add(node)
        if follows:
            run.append(node)
            continue
        if allowed is None and (node in stays or not _is_a_function(node, model)):
            found += run
            run = []
        found.append(node)
    return found


def may_become_in_place(graph: fx.Graph, model: nn.Module) -> set[str]:
    """The modules between segments that are functions of their operands as long as nobody says otherwise."""
    calls = [node for node in graph.nodes if node.op == "call_module" and _is_a_function(node, model)]
    return {node.target for node in calls if hasattr(model.get_submodule(node.target), "inplace")}


def _is_a_function(node: fx.Node, model: nn.Module) -> bool:
    """Of its operands, which writes none of them, and is seen by nobody?"""
    if node.op == "call_module":
        module = model.get_submodule(node.target)
        return (
            type(module) in _MODULES and not altered(node.target, module) and not vars(module).get("inplace")
        )
    known = _METHODS if node.op == "call_method" else _FUNCTIONS if node.op == "call_function" else ()
    return node.target in known and not {"out", "inplace"} & node.kwargs.keys()


def _may_follow(node: fx.Node, parts: Mapping[Callable, Part]) -> bool:
    """Is it a segment's call, and draws no random numbers?"""
    return node.target in parts and not node.target.random


def _runs(nodes: Sequence[fx.Node], parts: Mapping[Callable, Part]) -> list[list[fx.Node]]:
    """Calls of segments between which nothing else is computed. What draws random numbers is in none."""
    found: list[list[fx.Node]] = [[]]
    for node in nodes:
        if _may_follow(node, parts):
            found[-1].append(node)
        elif node.op not in ("placeholder", "get_attr"):
            found.append([])
    return found


class Chain(Keeping):
    """Called with its inputs it gives its result, or a tuple of them. Values have places: inputs first, then the parts' own tensors, each once,
    then a result of each part."""

    def __init__(
        self,
        parts: Sequence[Part],
        run: Sequence[fx.Node],
        given: Sequence[fx.Node],
        results: Sequence[fx.Node],
    ):
        super().__init__()
        self.parts = parts
        own: dict[tuple[int, str], int] = {}  # by table and name: a tensor that two parts have
        for part in parts:
            for table, last in part.sources:
                if (id(table), last) not in own:
                    own[id(table), last] = len(given) + len(own)
                    self.sources.append((table, last))
        self.count = len(given) + len(self.sources)
        place = {node: i for i, node in enumerate(given)} | {
            node: self.count + i for i, node in enumerate(run)
        }
        self.of = [  # the places of each part's tensors
            [*[place[a] for a in node.args], *[own[id(table), last] for table, last in part.sources]]
            for part, node in zip(parts, run)
        ]
        self.results = [place[node] for node in results]
        self.found = _finding(self.results)
        # Those that backward reads, for each part: what is written, running statistics, stands behind them.
        self.read = [places[: part.updated.start] for part, places in zip(parts, self.of)]
        self.drops: list[list[int]] = [[] for _ in parts]  # by part, results that nothing needs behind it
        last = {self.count + number: number for number in range(len(parts))}  # one that nobody reads
        last |= {place: number for number, places in enumerate(self.of) for place in places}
        for at, number in last.items():
            if at >= self.count and at not in self.results:
                self.drops[number].append(at)
        self.counters = [table for part in parts for table in part.counters]
        self.counts = parts[0].counts

    def __call__(self, *given: Tensor):
        if _is_any_autocast_enabled() or _is_distributed() and is_grad_enabled():
            return self._one_by_one(given)
        try:
            tensors = (*given, *[table[last] for table, last in self.sources])
        except KeyError:  # a parameter is gone
            return self._one_by_one(given)
        situation = self.situation(tensors)
        if situation is None:
            return self._one_by_one(given)
        if not situation.decided:
            return self._decide(given, tensors, situation)
        return self._run(situation, given, tensors)

    def _one_by_one(self, given: Sequence[Tensor]):
        values = [*given, *[None] * (self.count - len(given) + len(self.parts))]
        for number, (part, places, drops) in enumerate(zip(self.parts, self.of, self.drops)):
            values[self.count + number] = part(*[values[i] for i in places[: part.inputs]])
            for i in drops:
                values[i] = None
        return self.found(values)

    def _decide(self, given: tuple, tensors: tuple, situation: Situation):
        """The first call in a situation. From it on all calls save the same for backward, as who runs them again (checkpoints) expects."""
        if any([isinstance(t, Tensor) and t.is_meta for t in given]):  # which a plan may be asked for
            return self._one_by_one(given)
        epoch, values, steps = self.epoch, [*tensors], []
        for part, places, drops in zip(self.parts, self.of, self.drops):
            step, like, for_good = part.foreseen([values[i] for i in places[: part.inputs]])
            if step is None:
                break
            steps.append(step)
            values.append(torch.empty_like(like, device=tensors[0].device).requires_grad_(step.saving))
            for i in drops:  # so that no more memory is taken than by what will run
                values[i] = None
        else:
            situation.run, for_good = _Run(self, steps).bound(), True
        del values
        situation.decided = True
        if for_good and epoch == self.epoch:
            self.keep(situation)
        return self._run(situation, given, tensors)

    def _run(self, situation: Situation, given: tuple, tensors: tuple):
        if situation.run is None:
            return self._one_by_one(given)
        if self.counters:
            self.counts.raise_all(self.counters)
        return situation.run(*tensors)


class _Run:
    """What a chain runs in a situation. It has no way to the chain."""

    def __init__(self, chain: Chain, steps: Sequence[Step]):
        self.steps, self.of, self.count = steps, chain.of, chain.count
        self.results, self.found, self.read = chain.results, chain.found, chain.read
        self.weights = [places[part.inputs] for part, places in zip(chain.parts, chain.of)]
        filters = [step.plan.inner.filters if _by_library(step) else None for step in steps]
        self.turns = layouts.turning_all(filters)
        # Places of the values that backward reads, and of results without gradients.
        kept = {i for step, places in zip(steps, chain.read) if step.saving for i in places}
        kept |= {chain.count + i for i, step in enumerate(steps) if step.saving and step.plan.keeps_result}
        self.kept, self.drops = sorted(kept), [[i for i in own if i not in kept] for own in chain.drops]
        self.constant = [i for i in chain.results if not steps[i - chain.count].saving]
        # By part: what it runs, what picks its tensors, what turns filters first (not all at once: until then there is memory for others), and drops.
        turns = map(self.turns.get, range(len(steps)))
        self.walk = [*zip(steps, map(_picking, chain.of), turns, self.drops)]
        self.saved = [0] * len(steps)  # how many tensors each part saves
        self.unread: list[list] | None = (
            None  # by part, of its last tensors, which backward doesn't read: shapes and dtypes
        )
        self.backs: dict[tuple, _Back] = {}  # by what is asked for, and the library's settings

    def bound(self) -> Callable:
        if any([step.saving for step in self.steps]):
            return functools.partial(super(torch.autograd.Function, _Function).apply, self)
        return self

    def __call__(self, *tensors: Tensor):
        """Without gradients."""
        return self.found(self._computed(tensors)[0])

    def forward(self, ctx, tensors: Sequence[Tensor]):
        if self.unread is None:
            unread = [places[len(read) :] for places, read in zip(self.of, self.read)]
            self.unread = [[(tensors[i].shape, tensors[i].dtype) for i in places] for places in unread]
        values, saved = self._computed(tensors)
        ctx.to_save, ctx.materialize_grads = (*[values[i] for i in self.kept], *saved), False
        if self.constant:
            ctx.mark_non_differentiable(*[values[i] for i in self.constant])
        return self.found(values)

    def _computed(self, tensors: Sequence[Tensor]) -> tuple[list, list[Tensor]]:
        """All values, but for those that nothing needs behind the parts that read them, and what parts save for backward."""
        values, saved = [*tensors, *[None] * len(self.steps)], []
        turned, weights = [None] * len(self.steps), [values[i] for i in self.weights]
        for number, (step, pick, turn, drops) in enumerate(self.walk):
            if turn:
                turn(weights, turned)
            a, filters = pick(values) + step.constants, turned[number]
            found = step.shared.forward(a, plan=step.plan, saving=step.saving, turned=filters)
            values[self.count + number], self.saved[number] = found[0], len(found) - 1
            saved += found[1:]
            turned[number] = a = filters = found = None
            for i in drops:
                values[i] = None
        return values, saved

    def backward(self, dys: Sequence[Tensor | None], given: list, needs: tuple[bool, ...]) -> list:
        """The gradients of the chain's tensors. given: what forward saved, which is dropped as soon as it was read."""
        settings = precision(given[0])  # which may be others than forward's
        if (back := self.backs.get((needs, settings))) is None:
            back = self.backs[needs, settings] = _Back(self, needs, settings)
        return back(dys, given)


class _BackStep(NamedTuple):
    """Backward of a part. wanted: of its tensors that need gradients the numbers, and their places; pick: gives its tensors of what forward saved;
    kept: what it saved itself there; spent: what of that it uses up; frees: what nobody reads behind it there; result: its place; filters: where
    those are of what forward saved; weight: their place, if no other part has them; unread: of its last tensors, which are not among those, shapes and
    dtypes; own_result: where the result is of what forward saved, if backward reads it."""

    step: Step
    wanted: Sequence[tuple[int, int]]
    needs: Sequence[bool]
    pick: Callable
    kept: slice
    spent: Sequence[int]
    frees: Sequence[int]
    result: int
    filters: int
    weight: int | None
    unread: Sequence[tuple]
    own_result: int | None


class _Back:
    """A chain's backward for what is asked for, from the last part to the first."""

    def __init__(self, run: _Run, needs: tuple[bool, ...], settings: object):
        self.needs, self.settings, self.results = needs, settings, run.results
        asked = dict(enumerate(needs))
        at = {place: i for i, place in enumerate(run.kept)}
        first, steps, free = len(at), [], set(at.values())
        for number, (step, places, read) in enumerate(zip(run.steps, run.of, run.read)):
            result, own = run.count + number, [asked[i] for i in places]
            asked[result] = step.saving and any(own)
            kept = slice(first, first + run.saved[number])
            first = kept.stop
            if asked[result]:
                reads = [at[i] for i in read]
                reads += [reads[0]] * (
                    len(places) - len(read)
                )  # x stands for what isn't read, but where that is watched
                own_result = at[result] if step.plan.keeps_result else None
                frees = [*free.intersection((*reads, own_result)), *range(kept.start, kept.stop)]
                free.difference_update(frees)
                weight = run.weights[number] if run.weights.count(run.weights[number]) == 1 else None
                wanted = [(i, place) for i, place in enumerate(places) if asked[place]]
                spent = [kept.start + i for i in step.plan.spends]
                pick, filters = _picking(reads), at[run.weights[number]]
                unread = run.unread[number]
                about = step, wanted, own, pick, kept, spent, frees, result, filters, weight, unread
                steps.append(_BackStep(*about, own_result))
        self.steps, self.size = steps[::-1], run.count + len(run.steps)
        self.laid: dict[tuple, Callable] = {}  # by shape and dtype, what turns a gradient for a sum
        self.turns = self.turns_back = None  # once backward has run

    def __call__(self, dys: Sequence[Tensor | None], given: list) -> list:
        gradients: list = [None] * self.size
        for place, dy in zip(self.results, dys):
            gradients[place] = dy
        watched = is_watched()
        if self.turns is None and not watched:
            self._build(given)
        turned, turns = [None] * len(self.steps), {} if watched else self.turns or {}
        weights = [given[each.filters] for each in self.steps] if turns else ()
        for i, each in enumerate(self.steps):
            if i in turns:
                turns[i](weights, turned)
            dy, gradients[each.result] = gradients[each.result], None
            if dy is None:
                continue
            spent = each.spent and not watched and are_nobody_elses(given, each.spent)
            a, saved, shared = each.pick(given) + each.step.constants, given[each.kept], each.step.shared
            if each.own_result is not None:
                saved.append(given[each.own_result])
            if watched:
                made = [a[0].new_zeros(shape, dtype=dtype) for shape, dtype in each.unread]
                behind = len(a) - len(each.step.constants)
                a = (*a[: behind - len(made)], *made, *a[behind:])
                found = shared.operator.backward_registered(dy, a, saved, each.needs)
            else:
                found = shared.backward(
                    dy, a, *saved, plan=each.step.plan, needs=each.needs, turned=turned[i], spent=bool(spent),
                    settings=self.settings,
                )  # fmt: skip
            for number, place in each.wanted:
                if (gradient := found[number]) is not None:
                    known = gradients[place]
                    gradients[place] = gradient if known is None else self._sum(known, gradient, watched)
            turned[i] = a = saved = found = gradient = dy = None
            for at in each.frees:
                given[at] = None
        if self.turns is None and not watched:
            self._plan_turns()
        elif not watched:
            self._turn_back(gradients)
        return gradients[: len(self.needs)]

    def _build(self, given: Sequence[Tensor]) -> None:
        """What parts would build for their gradients one after the other, side by side."""
        requests = []
        for each in self.steps:
            plan = getattr(each.step.plan.inner, "back", each.step.plan.inner)
            if type(plan) is load_plan.Plan:
                a = each.pick(given) + each.step.constants
                requests += schedule.gradient_requests(plan, a, each.needs)
        if len(requests) > 1:
            inline_loader.load_all(requests)

    def _plan_turns(self) -> None:
        """What parts turned by themselves is turned together from now on: filters, and their gradients back."""
        filters, back = [], []
        for each in self.steps:
            turning, both = _filters_of(each, self.settings)
            filters.append(turning)
            back.append(turning.back() if turning and both and self.needs[each.weight] else None)
        self.back, self.turns_back = back, layouts.turning_all(back)
        self.turns = layouts.turning_all(filters)

    def _sum(self, one: Tensor, other: Tensor, watched: bool) -> Tensor:
        """Of two gradients, channels last if one of them is: so reads it the part that it is of. Then the other is turned first on a GPU, where
        PyTorch's sum of two that lie in different layouts takes four times as long."""
        if one.dim() in library.CHANNELS_LAST:
            if library.is_channels_last(one):
                one, other = other, one
            is_mixed = library.is_channels_last(other) and one.is_contiguous()
            if is_mixed and not watched and library.device_type(one) == "cuda":
                key = one.shape, one.dtype
                if key not in self.laid:
                    self.laid[key] = layouts.turning_one(one)
                return self.laid[key](one).add_(other)
        return other + one

    def _turn_back(self, gradients: list) -> None:
        """Those of filters that the library gave channels last."""
        found = [gradients[each.weight] if turning else None for each, turning in zip(self.steps, self.back)]
        made: list[Tensor | None] = [*found]
        if all([each is None or t is not None and each.comes(t) for t, each in zip(found, self.back)]):
            for run in self.turns_back.values():
                run(found, made)
        for t, each, turning in zip(made, self.steps, self.back):
            if turning and t is not None:
                gradients[each.weight] = t.contiguous()


def _filters_of(each: _BackStep, settings: object) -> tuple[layouts.Turning | None, bool]:
    """As schedule.turns_filters, of those that no other part has."""
    if each.weight is None or not _by_library(each.step):
        return None, False
    return schedule.turns_filters(each.step.plan.inner, each.needs, settings)


def _by_library(step: Step) -> bool:
    """Does its plan turn filters for a library's convolution, or its gradients?"""
    return type(step.plan.inner) is load_plan.Plan


def _finding(results: Sequence[int]) -> Callable:
    """Gives of all values the result, or a tuple of them."""
    return itemgetter(*results)


def _picking(places: Sequence[int]) -> Callable:
    return itemgetter(*places)  # of two at least: x and the weight


class _Function(torch.autograd.Function):
    """A chain in autograd's graph."""

    @staticmethod
    def forward(ctx, run: _Run, *tensors: Tensor):
        ctx.run = run
        return run.forward(ctx, tensors)

    @staticmethod
    def backward(ctx, *dys: Tensor | None):
        if is_grad_enabled() or any([dy is not None and is_legacy_batchedtensor(dy) for dy in dys]):
            return backward_seldom(_gradients, ctx, dys, "a chain of segments")
        return _gradients(ctx, *dys, clears=True)


def _gradients(ctx, *dys: Tensor | None, clears: bool = False) -> tuple:
    """clears: memory that was saved is free as soon as it was read, but where the graph is retained."""
    given = [*ctx.saved_tensors]
    if clears:
        ctx.maybe_clear_saved_tensors()
    return None, *ctx.run.backward(dys, given, ctx.needs_input_grad[1:])
