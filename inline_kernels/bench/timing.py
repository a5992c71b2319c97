"""Times calls in turn, and judges what they give while they are timed.

Times: contestants alternate (A B A B) in one process, after a warm-up. `median_ms` is the GPU's time, by
events, its cache overwritten before; `call_ms` the time as called: synchronize, write 256 MB, event, call,
event, synchronize; both are medians. On a CPU both are the wall time, caches as the runs before leave them.
`host_us` is how long the host takes to launch a call. The time of allocating results, of reordering weights
and of launching counts, not that of freeing them. Each call is given new inputs, some of the parameters' elements have
changed, and of what it gives chance decides afterwards whether it is judged (see `Deal`): what is timed is what is right.

That holds against candidates that look at how they are called, and that change functions, settings or constants. One that
finds the `Deal` in a frame and writes to it can't be stopped in its own process.
"""

from __future__ import annotations

import _thread
import contextlib
import math
import random
import statistics
import time as clock
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor, nn

from inline_kernels.bench import checks
from inline_kernels.bench.checks import Contestant, Error
from inline_kernels.bench.honesty import Probe, state_of, unlike
from inline_kernels.bench.surroundings import tracers


class Timing(NamedTuple):
    """Milliseconds: the median and the quartiles of `runs` runs."""

    median: float
    low: float
    high: float
    runs: int


class Call:
    """One call of a contestant, to be timed; its settings are made before. Where there is a `deal`, it gives each call
    other inputs, and judges results."""

    __slots__ = ("contestant", "inputs", "phase", "g", "deal")

    def __init__(self, contestant: Contestant, inputs: list[Tensor], phase: str, g: Tensor | None, deal=None):
        self.contestant, self.inputs, self.phase, self.g, self.deal = contestant, inputs, phase, g, deal

    def __call__(self):
        results = checks.call(self.contestant.module, self.contestant.leaves, self.inputs, self.phase, self.g)
        # Before the clock stops: they would compute what is still to be seen, and be gone.
        if self.deal and tracers() != self.deal.tracers:
            self.deal.complain(self, "a timed call leaves a profiler or a tracer")
        return results

    @classmethod
    def of(
        cls,
        contestant: Contestant,
        inputs: list[Tensor],
        phase: str,
        g: Tensor | None,
        deal: Deal | None = None,
    ) -> Call:
        """With the inputs in the contestant's layout, and an incoming gradient, given in any, in that of its
        output."""
        inputs = contestant.given(inputs)
        if g is not None:
            out, _ = contestant.call(inputs, phase, g)
            g = torch.empty_like(out).copy_(g)
        return cls(contestant, inputs, phase, g, deal)


# Calls whose results are judged, as chance has it: of each kind of timing so many on average, and so many at least.
JUDGED, JUDGED_AT_LEAST = 6, 3
POKED = 4  # parameters at most, of which an element changes from row to row
ROOM = {"cpu": 64 << 20, "cuda": 1 << 30}  # bytes of inputs and gradients that are there before a row


class Judged(NamedTuple):
    """What was found of the calls of ours that were judged: their errors, a list for each, and complaints."""

    errors: list[list[Error]]
    complaints: list[str]


class Deal:
    """What the calls that are timed are given, and whether they gave what is right.

    Calls come in rows. Before a row elements of the reference's parameters change, and for each of its calls all values of
    the inputs are drawn, now in other memory, now in the same; so is the incoming gradient, which is zero where rounding
    decides what it meets. When a call's clock has stopped, chance decides whether its results and what it leaves behind
    are judged. Half of the changes are made behind autograd's back, which counts none of them. Buffers are before each
    call what they were at first.
    """

    def __init__(self, model: nn.Module, draw: Callable[[], list[Tensor]]):
        self.model, self.draw, self.current = model, draw, None
        self.eager = checks.as_contestant(model, model)
        self.chance, self.share = random.SystemRandom(), 0.0  # of which no seed is known
        self.parameters = [(p, p.detach().clone()) for p in model.parameters() if p.numel()]
        self.buffers = []
        self.tracers, self.threads = tracers(), _thread._count()
        self.judged: dict[Call, Judged] = {}
        self.keep(model)

    def keep(self, module: Callable) -> None:
        """The buffers of `module` are to be restored."""
        owners = module.modules() if isinstance(module, nn.Module) else ()
        tables = [
            (each._buffers, key, t) for each in owners for key, t in each._buffers.items() if t is not None
        ]
        self.buffers += [(table, key, t, t.detach().clone()) for table, key, t in tables]

    def watch(self, call: Call) -> None:
        """The results of `call` are ours, to be judged."""
        self.judged[call] = Judged([], [])

    def row(self, call: Call, count: int) -> Iterator[None]:
        """Makes so many calls ready, one at each step. What takes time is done before, as far as there is room."""
        self.current = call
        given = [*call.inputs, *([] if call.g is None else [call.g])]
        at_once = max(1, ROOM[given[0].device.type] // max(1, sum(t.nbytes for t in given)))
        for start in range(0, count, at_once):
            self._change_parameters()
            drawn = [self._drawn(call, at_once > 1) for _ in range(min(at_once, count - start))]
            if given[0].is_cuda:
                torch.cuda.synchronize()
            for call.inputs, call.g in drawn:
                self.restore()
                self.threads = _thread._count()
                yield

    @torch.no_grad()
    def _change_parameters(self) -> None:
        for p, first in self.chance.sample(self.parameters, min(POKED, len(self.parameters))):
            p = p.data if self.chance.random() < 0.5 else p
            to, of = ([self.chance.randrange(extent) for extent in p.shape] for _ in range(2))
            p[tuple(to)] = first[tuple(of)] * self.chance.uniform(0.75, 1.25)

    @torch.no_grad()
    def _drawn(self, call: Call, apart: bool) -> tuple[list[Tensor], Tensor | None]:
        """Inputs and an incoming gradient. apart: more of them will be there at once."""
        inputs, g = call.contestant.given(self.draw()), call.g
        for i, (old, t) in enumerate(zip(call.inputs, inputs)):
            alike = old.shape == t.shape and old.stride() == t.stride()
            if alike and not apart and self.chance.random() < 0.5:
                old.data.copy_(t)
                inputs[i] = old
        if g is not None:
            g = torch.empty_like(g) if apart else g
            g.normal_().masked_fill_(checks.edges_of(self.model, inputs), 0)
        return inputs, g

    def restore(self) -> None:
        for table, key, t, values in self.buffers:
            table[key] = t
            t.data.copy_(values)

    def seen(self, call: Call, results: tuple[Tensor, dict[str, Tensor]]) -> None:
        """What a call gave: judged, if chance has it."""
        if _thread._count() > self.threads:
            self.complain(call, "a timed call leaves threads behind")
        if call in self.judged and self.chance.random() < self.share:
            self.judge(call, results)

    def complain(self, call: Call, text: str) -> None:
        if call in self.judged and text not in self.judged[call].complaints:
            self.judged[call].complaints.append(text)

    def judge(self, call: Call, results: tuple[Tensor, dict[str, Tensor]]) -> None:
        module, inputs, (found, complaints) = call.contestant.module, call.inputs, self.judged[call]
        ours, left = (
            {name: t.clone() for name, t in checks.named(*results).items()},
            state_of(module, self.model),
        )
        self.restore()
        try:
            with checks.kept_buffers(self.model):
                eager = checks.named(*self.eager.call(inputs, call.phase, call.g))
                others = unlike(left, state_of(self.model, self.model))
            probe = Probe(module, self.model, inputs, call.phase, call.g)
            ours = probe.visible(ours)
            errors, wrong = checks.errors_between(
                "a timed call", ours, eager, self.model, inputs, call.phase, call.g, cancelling=True
            )
            wrong += [f"a timed call leaves {name} not as eager does" for name in others]
            if checks.dropout_of(self.model) and (strange := probe.strange(ours)):
                wrong.append(f"a timed call gave something else: {strange}")
        except ValueError as error:
            errors, wrong = [], [f"a timed call: {error}"]
        found.append(errors)
        complaints += [text for text in wrong if text not in complaints]

    def verdict(self, call: Call) -> list[str]:
        """What is wrong with timed calls. As in a check, a mean that misses its limit is judged again on more."""
        found, complaints = self.judged[call]
        for count in (checks.DRAWS, checks.MANY_DRAWS):
            if complaints:
                return complaints
            worst = _worst(found)
            if worst.share <= 1 or count == checks.MANY_DRAWS and worst.share > checks.NEAR:
                break
            for _ in self.row(call, max(0, count - len(found))):
                with _settings(call):
                    results = call()
                self.judge(call, results)
            worst = _worst(found)
            if count == checks.MANY_DRAWS and worst.share <= checks.NEAR:
                worst = _worst(found, alike=True)
        return complaints or ([] if worst.share <= 1 else [str(worst)])


def _worst(draws: list[list[Error]], alike: bool = False) -> Error:
    return max((checks.mean_of(same, alike) for same in zip(*draws)), key=lambda error: error.share)


def _turns(run: Callable, count: int) -> Iterable:
    """The steps of a row of calls."""
    return run.deal.row(run, count) if isinstance(run, Call) and run.deal else range(count)


def _seen(run: Callable, results) -> None:
    if isinstance(run, Call) and run.deal:
        run.deal.seen(run, results)


def _settings(run: Callable) -> contextlib.AbstractContextManager:
    return run.contestant.settings() if isinstance(run, Call) else contextlib.nullcontext()


def time(
    calls: dict[str, Callable[[], object]], device: str = "cpu", seconds: float = 6.0
) -> dict[str, Timing]:
    """How long each of `calls` takes, in turn (A B A B), for about `seconds` in all, but 7 rounds at least
    and 30 at most: the GPU's time, or on a CPU the wall time."""
    for run in [*calls.values()] * 2:
        with _settings(run):
            run()
    return _timings(calls, _gpu_rounds if device == "cuda" else _cpu_rounds, seconds)


def call_times(
    calls: dict[str, Callable[[], object]], device: str = "cpu", seconds: float = 3.0
) -> dict[str, Timing]:
    """The same as called: nothing is under way on the GPU but a write of 256 MB when a call begins. The calls
    have run before."""
    return _timings(calls, _called_rounds if device == "cuda" else _cpu_rounds, seconds)


def _timings(calls, measure, seconds: float) -> dict[str, Timing]:
    start = clock.perf_counter()
    first = measure(calls, 1)
    rounds = min(30, max(7, int(seconds / (clock.perf_counter() - start))))
    with _judging(calls, rounds * min(map(len, first.values()))) as enough:
        times = measure(calls, rounds)
        while not enough():
            for name, values in measure(calls, 1).items():
                times[name] += values
    timings = {}
    for name, values in times.items():
        low, median, high = statistics.quantiles(values, n=4, method="inclusive")
        timings[name] = Timing(median, low, high, rounds)
    return timings


@contextlib.contextmanager
def _judging(calls: dict[str, Callable], expected: int) -> Iterator[Callable[[], bool]]:
    """Results are judged, `JUDGED` of so many calls on average; gives what says whether they were enough."""
    deals = {run.deal for run in calls.values() if isinstance(run, Call) and run.deal}
    least = [(each, len(each.errors) + JUDGED_AT_LEAST) for deal in deals for each in deal.judged.values()]
    for deal in deals:
        deal.share = JUDGED / expected
    try:
        yield lambda: all(len(each.errors) >= n for each, n in least)
    finally:
        for deal in deals:
            deal.share = 0.0


# Seconds of short calls: a single one would pay for what the contestant before left in the caches.
IN_A_ROW = 1e-3


def _cpu_rounds(calls, rounds) -> dict[str, list[float]]:
    times = {name: [] for name in calls}
    for _ in range(rounds):
        for name, run in calls.items():
            spent, count = 0.0, 1
            while spent < IN_A_ROW:
                for _ in _turns(run, count):
                    start = clock.perf_counter()
                    results = run()
                    took = clock.perf_counter() - start
                    _seen(run, results)
                    del results  # before another's clock runs
                    times[name].append(took * 1e3)
                    spent += took
                count = min(BURST, math.ceil((IN_A_ROW - spent) / took)) if took else 1
    return times


def _gpu_rounds(calls, rounds) -> dict[str, list[float]]:
    # Far more than the cache, because the host must have launched what is timed before the GPU is done with
    # clearing it.
    memory = torch.cuda.get_device_properties("cuda").total_memory
    cache = torch.empty(min(2 << 30, memory // 8), dtype=torch.int8, device="cuda")
    events = {name: [] for name in calls}
    for _ in range(rounds):
        for name, run in calls.items():
            for _ in _turns(run, 1):
                events[name].append(_between_events(run, cache))
        torch.cuda.synchronize()
    return {name: [start.elapsed_time(end) for start, end in pairs] for name, pairs in events.items()}


CALLS = 6  # of one in a row, as in anybody's loop: the host has its code at hand after the first


def _called_rounds(calls, rounds) -> dict[str, list[float]]:
    cache = torch.empty(256 << 20, dtype=torch.int8, device="cuda")
    times = {name: [] for name in calls}
    for _ in range(rounds):
        for name, run in calls.items():
            for _ in _turns(run, CALLS):
                start, end = _between_events(run, cache, idle=True)
                times[name].append(start.elapsed_time(end))
    return times


CLEARED = 3  # times: a training step of small tensors takes the host longer than the GPU takes for one


def _between_events(run, cache: Tensor, idle=False) -> tuple[torch.cuda.Event, torch.cuda.Event]:
    """The events before and after a call. idle: the GPU has nothing else to do, and the call is over."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    with _settings(run):
        if idle:
            torch.cuda.synchronize()
        for _ in range(1 if idle else CLEARED):
            cache.zero_()
        start.record()
        results = run()
        end.record()
        if idle:
            torch.cuda.synchronize()
    _seen(run, results)
    return start, end


BURST = 16  # calls: with backward some 30 launches each, of 1,024 that a GPU's queue holds


def host_times(
    calls: dict[str, Callable[[], object]],
    device: str = "cpu",
    seconds: float = 1.0,
    now: Callable[[], int] = clock.perf_counter_ns,
) -> dict[str, float]:
    """Microseconds until each of `calls` returns: the median, in turn, in bursts that fit into the GPU's
    queue, so that none waits for the GPU. The calls have run before; now() gives nanoseconds."""

    def bursts():
        for name, run in calls.items():
            for _ in _turns(run, BURST):
                with _settings(run):
                    before = now()
                    results = run()
                    times[name].append(now() - before)
                _seen(run, results)
                del results
            if device == "cuda":
                torch.cuda.synchronize()

    times = {name: [] for name in calls}
    start = clock.perf_counter()
    bursts()
    expected = seconds / (clock.perf_counter() - start)
    with _judging(calls, int(max(expected, 1) * BURST)) as enough:
        while clock.perf_counter() - start < seconds or not enough():
            bursts()
    return {name: statistics.median(values) / 1e3 for name, values in times.items()}


def extra_memory(run: Callable[[], tuple[Tensor, dict[str, Tensor]]]) -> float:
    """MB on the GPU: the largest memory in use in a call, beyond what it is given and gives; what it gives is judged. It has
    run before."""
    for _ in _turns(run, 1):
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        with _settings(run):
            out, gradients = run()
        torch.cuda.synchronize()
        peak = torch.cuda.max_memory_allocated()
        if isinstance(run, Call) and run.deal and run in run.deal.judged:
            run.deal.judge(run, (out, gradients))
    given = sum(t.nbytes for t in (out, *gradients.values()))
    return max(0, peak - before - given) / 1e6
