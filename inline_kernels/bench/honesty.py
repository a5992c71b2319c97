"""Does a module compute what it claims? What no error shows, because the results may be right all the same.

    complaints = list(dishonesty(twin, model, x, "train"))

A module is honest if its results are those of the input, of the parameters, of the buffers and of the shape at
hand, whatever it was called with before; if NaN reaches what it reaches in eager; if it leaves input and
parameters alone and changes of everything else what eager changes; if it returns memory of its own and writes all
of it, and reads none that it has not written; if repeats are equal to the bit (`REPEATS` of them); and if on a GPU
it waits for what its stream does. Each of these is a function of a `Probe`.

All is tried in the mode that the reference is in, and beside it: what eager can't do is not asked for. With
dropout, eager drops what ours has dropped, if that is as random as it should be.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import random
import re
import sys
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor, nn

import inline_loader
from inline_kernels.bench import checks
from inline_kernels.bench.checks import (
    call,
    dtype_of,
    has_backward,
    inputs_of,
    kept_buffers,
    leaves_of,
    named,
)
from inline_kernels.bench.surroundings import changes, surroundings

REPEATS = 100
SLEEPS = 10**8, 10**9  # cycles of a GPU: each far longer than the host takes to launch everything


@dataclasses.dataclass(frozen=True)
class Probe:
    """What honesty is tried on: `module`, which shares the parameters and buffers of `model`, a reference, random
    inputs x (one or a list) and an incoming gradient g (None in a phase without backward). draw() gives other
    inputs like x."""

    module: Callable
    model: nn.Module
    x: Tensor | Sequence[Tensor]
    phase: str
    g: Tensor | None = None
    draw: Callable[[], Sequence[Tensor]] | None = None

    @property
    def inputs(self) -> list[Tensor]:
        return inputs_of(self.x)

    @property
    def device(self) -> torch.device:
        return self.inputs[0].device

    def on(self, x: Tensor | Sequence[Tensor], backward: bool = True) -> Probe:
        """The same on other inputs, with a gradient of their own: none where rounding decides what it meets
        (see `checks.Edges`). Without backward, the phase is one that has none."""
        phase = "forward" if has_backward(self.phase) and not backward else self.phase
        probe = dataclasses.replace(self, x=x, phase=phase, g=None)
        with contextlib.suppress(Exception):  # if eager can't compute this, `strange` asks for nothing
            probe = dataclasses.replace(probe, g=checks.gradient_for(self.model, x, phase))
        return probe

    def others(self) -> list[Tensor]:
        """Other inputs of the same shapes."""
        if self.draw is None:
            return [torch.rand_like(t) if t.is_floating_point() else t.clone() for t in self.inputs]
        return [t.to(like.device) for t, like in zip(inputs_of(self.draw()), self.inputs)]

    def results(self, run: Callable | None = None, backward: bool = False) -> dict[str, Tensor]:
        """Output and gradients of `module`, or of `run`, by name; backward: added up, as an optimizer finds them.
        Buffers are afterwards as before."""
        run = self.module if run is None else run
        with kept_buffers(self.model, run):
            return named(
                *call(run, leaves_of(run, self.model), self.x, self.phase, self.g, backward=backward)
            )

    def strange(self, ours: dict[str, Tensor] | None = None) -> str:
        """Which of our results are nothing like eager's, in words; empty if none is, or if eager can't compute
        this. A coarse look, where `errors_of` is exact."""
        try:
            theirs = self.results(self.model)
        except torch.OutOfMemoryError:
            raise
        except Exception:
            return ""
        ours = self.results() if ours is None else ours
        found, mask = [], []
        if p := checks.dropout_of(self.model):
            whole = dataclasses.replace(self, phase="forward").results(self.without_dropout())["output"]
            keep = ours["output"] != 0
            if keep.shape == whole.shape:
                mask += checks.bad_mask(keep, (whole != 0) & whole.isfinite(), p)
                theirs = self.results(self.without_dropout(keep / ((1 - p) or 1)))
        gradients = [t.nan_to_num(0, 0, 0).norm().item() for name, t in theirs.items() if name != "output"]
        precision = torch.finfo(dtype_of(self.model, self.inputs)).eps
        for name, expected in theirs.items():
            if name not in ours:
                continue
            if ours[name].shape != expected.shape:
                found.append(f"{name} of shape {list(ours[name].shape)}, expected {list(expected.shape)}")
                continue
            # A gradient jumps where rounding decides a comparison, and one much smaller than the largest is
            # all rounding.
            output = name == "output"
            near, floor = (max(1e-2, 16 * precision), 0) if output else (0.3, 1e-3 * max(gradients))
            by_sample = expected.dim() > 0 and (output or re.fullmatch(r"gradient of x\d*", name) is not None)
            pair = [t if by_sample else t[None] for t in (ours[name], expected)]
            wrong = torch.zeros(len(pair[0]), dtype=torch.bool, device=expected.device)
            for chosen in checks.magnitudes(pair[1]) if output else (None,):
                wrong |= _far(*pair, near, floor, chosen)
            if rows := wrong.nonzero().flatten().tolist():
                found.append(name + (f" of sample {_listed(rows)}" if by_sample else ""))
        return "; ".join(found + mask)

    def visible(self, ours: dict[str, Tensor]) -> dict[str, Tensor]:
        """Our results, without gradients that hang on whether zeros were dropped, which nobody sees."""
        if self.g is None or not checks.dropout_of(self.model):
            return ours
        keep = ours["output"] != 0
        none, all = (
            self.results(self.without_dropout(t)) for t in (keep.to(self.g.dtype), torch.ones_like(self.g))
        )
        hidden = any(
            _far(none[name][None], (all[name] * keep if name == "output" else all[name])[None], 1e-3, 0).any()
            for name in none
        )
        return {"output": ours["output"]} if hidden else ours

    def without_dropout(self, scale: Tensor | float = 1) -> Callable:
        """The reference with its dropout left out, its output times `scale`."""

        def run(*inputs):
            with evaluation(*[m for m in self.model.modules() if isinstance(m, nn.Dropout)]):
                return self.model(*inputs) * scale

        return run


def _listed(rows: list[int]) -> str:
    return ", ".join(map(str, rows[:8])) + f" and {len(rows) - 8} more" * (len(rows) > 8)


def _far(ours: Tensor, theirs: Tensor, near: float, floor: float, chosen: Tensor | None = None) -> Tensor:
    """For each row, is only one of the two NaN somewhere, is only one infinite in a place, or are they further
    apart than `near` of theirs plus `floor`, in the elements `chosen`?"""
    ours, theirs = (
        t.to(torch.promote_types(t.dtype, torch.float32))[:, None].flatten(1) for t in (ours, theirs)
    )
    nan = ours.isnan() | theirs.isnan()
    infinite = ours.isinf() | theirs.isinf()
    wrong = ours.isnan().any(1) != theirs.isnan().any(1)
    wrong |= (infinite & ~nan & (ours != theirs)).any(1)
    ignored = nan | infinite if chosen is None else nan | infinite | ~chosen[:, None].flatten(1)
    distance, size = (t.masked_fill(ignored, 0).norm(dim=1) for t in (ours - theirs, theirs))
    return wrong | (distance > near * size + floor)


def dishonesty(
    module: Callable,
    model: nn.Module,
    x: Tensor | Sequence[Tensor],
    phase: str = "forward",
    draw: Callable[[], Sequence[Tensor]] | None = None,
) -> Iterator[str]:
    """What is wrong with how `module` computes, beyond its errors, one complaint at a time.

    `module` is any callable that shares the parameters and buffers of `model`, a reference; x, one input or a list,
    is random, and draw() gives others like it (if None, even random numbers are). Uses torch's random numbers. The
    parameters and buffers are changed meanwhile and put back.
    """
    probe = Probe(module, model, x, phase, draw=draw).on(x)
    inputs = {"its input" if len(probe.inputs) == 1 else f"input {i}": t for i, t in enumerate(probe.inputs)}
    given = {**inputs, **dict(model.named_parameters())}
    before = {name: (t.detach().clone(), _ties(t)) for name, t in given.items()}
    for judge in HONESTY:
        yield from judge(probe)
    if found := probe.strange():
        yield f"is wrong in the end: {found}"
    for name, t in given.items():
        values, ties = before[name]
        if not _same(t, values):
            yield f"changed {name}"
        if _ties(t) != ties:
            yield f"asked a gradient of {name}, left one or a hook"


def _ties(t: Tensor) -> tuple:
    """What autograd knows of a tensor."""
    return t.requires_grad, t.grad is None, len(t._backward_hooks or ())


def _same(a: Tensor, b: Tensor) -> bool:
    """Bitwise equal, but that any NaN equals any other."""
    return a.shape == b.shape and bool(checks.equal(a, b).all())


def _follows_input(probe: Probe) -> Iterator[str]:
    """Other inputs, in other memory and in the same; of several one at a time."""
    for i, t in enumerate(probe.others() if len(probe.inputs) > 1 else ()):
        inputs = list(probe.inputs)
        inputs[i] = t
        if found := probe.on(inputs).strange():
            yield f"does not follow input {i}: {found}"
    inputs = [t.clone() for t in probe.inputs]
    for how in ("another input", "other values in its input's memory"):
        dataclasses.replace(probe, x=inputs).results()
        others = probe.others()
        if how == "another input":
            inputs = [t.clone() for t in others]
        else:
            for t, values in zip(inputs, others):
                t.data.copy_(values)  # which autograd does not count as a change
        if found := probe.on(inputs).strange():
            yield f"does not follow {how}: {found}"


def _follows_parameters(probe: Probe) -> Iterator[str]:
    """Other values for each parameter and buffer in turn, in other memory and, with a NaN at the end, in the
    same."""
    spoilt = probe.on(probe.x, backward=False)
    for name, t in [*probe.model.named_parameters(), *probe.model.named_buffers()]:
        if not (t.is_floating_point() and t.numel()):
            continue
        kept, parameter = t.data, isinstance(t, nn.Parameter)
        try:
            t.data = torch.randn_like(kept) if parameter else kept * 1.25  # a variance stays one
            found = probe.on(probe.x).strange()
            if parameter:
                t.data.normal_()[(-1,) * t.dim()] = math.nan
                found = found or spoilt.strange()
        finally:
            t.data = kept
        if found:
            yield f"does not follow a change of {name}: {found}"


def _follows_shape(probe: Probe) -> Iterator[str]:
    """Fewer samples (of one, twice as many) and, where the model takes that, fewer rows; then the first shape
    again."""
    fewer = [_fewer(t) for t in probe.inputs]
    shorter = [t[..., 1:, :] if t.dim() > 2 else t for t in fewer]
    for changed in (shorter, fewer):
        with contextlib.suppress(Exception), torch.no_grad(), kept_buffers(probe.model):
            probe.model(*changed)  # raises if its size is fixed, or as small as can be
            break
    else:
        return
    if found := probe.on([t.contiguous() for t in changed]).strange():
        yield f"does not follow a change of shape: {found}"
    if found := probe.strange():
        yield f"does not recover from a change of shape: {found}"


def _fewer(t: Tensor) -> Tensor:
    if not t.dim():
        return t
    return t[: (len(t) + 1) // 2] if len(t) > 1 else torch.cat([t, t])


def passes_nan(probe: Probe) -> Iterator[str]:
    """NaN in every other sample spoils the samples that it spoils in eager."""
    for first, end in ((0, 0), (1, -1), (0, None)):
        inputs = [t.clone() for t in probe.inputs]
        for t in inputs:
            if t.is_floating_point() and t.numel():
                place = [_inside(extent) if end is None else end for extent in t.shape[1:]]
                t[(slice(first, None, 2), *place)[: t.dim()]] = math.nan
        if found := probe.on(inputs, backward=False).strange():
            yield f"does not pass NaN on as eager does: {found}"


def _inside(extent: int) -> int:
    """A random place, which is no end if there are others."""
    return random.SystemRandom().randrange(extent > 2, max(extent - 1, 1))


def _serves_any_call(probe: Probe) -> Iterator[str]:
    """Inputs and gradients with gaps between their elements; evaluation, inference mode; gradients that are added
    up."""
    apart = dataclasses.replace(probe, x=[_with_gaps(t) for t in probe.inputs])
    if probe.g is not None:
        apart = dataclasses.replace(apart, g=_with_gaps(probe.g))
    if found := apart.strange():
        yield f"does not take what is not contiguous: {found}"
    with evaluation(probe.model, probe.module):
        found = probe.on(probe.x).strange()
    if found:
        yield f"is wrong in evaluation: {found}"
    with torch.inference_mode(probe.phase == "forward"):
        found = probe.strange() if probe.phase == "forward" else ""
    if found:
        yield f"is wrong in inference mode: {found}"
    if probe.g is not None and (found := probe.strange(probe.results(backward=True))):
        yield f"adds up something else than gradients: {found}"


def _with_gaps(t: Tensor) -> Tensor:
    return torch.stack([t, t], -1)[..., 0]


@contextlib.contextmanager
def evaluation(*modules: Callable) -> Iterator[None]:
    """Modules in evaluation, with all that is in them; then as before."""
    each = [m for module in modules if isinstance(module, nn.Module) for m in module.modules() if m.training]
    for m in each:
        m.training = False
    try:
        yield
    finally:
        for m in each:
            m.training = True


def _owns_results(probe: Probe) -> Iterator[str]:
    """Results share memory neither with each other, nor with an earlier call's, nor with what was given; but where
    eager's do."""
    others = probe.others()
    ours, theirs = ([*_sharing(probe, others, run)] for run in (probe.module, probe.model))
    yield from (text for text in ours if text not in theirs and _kinds(text) not in map(_kinds, theirs))


def _kinds(text: str) -> str:
    """Which gradient shares memory with which is autograd's affair; with what else it does is not."""
    return re.sub(r"(the incoming gradient|gradient of [\w.]+)(?! of the next)", "a gradient", text)


def _sharing(probe: Probe, others: list[Tensor], run: Callable) -> Iterator[str]:
    first = probe.results(run)
    kept = {name: t.clone() for name, t in first.items()}
    second = dataclasses.replace(probe, x=others).results(run)
    tensors = [("its input", t) for t in probe.inputs] + [*probe.model.named_parameters()]
    tensors += [("the incoming gradient", probe.g)] if probe.g is not None else []
    tensors += [*first.items(), *[(f"{name} of the next call", t) for name, t in second.items()]]
    owners = {}
    for name, t in tensors:
        address = t.untyped_storage().data_ptr()
        if t.numel() and (owner := owners.setdefault(address, name)) is not name:
            yield f"{name} shares memory with {owner}"
    yield from (f"the next call changed {name}" for name, t in first.items() if not _same(t, kept[name]))


def _writes_all(probe: Probe) -> Iterator[str]:
    """Nothing is left of what new memory held: NaN, once in all that torch.empty returns, and once in a GPU's
    free memory and in its shared memory."""
    plain = probe.results()
    if probe.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(
            probe.device
        )  # from which _free_memory_is_nan knows what a call takes
        probe.results()
    for spoilt in (_new_tensors_are_nan(), _free_memory_is_nan(probe.device)):
        with spoilt:
            results = probe.results()
        for name, t in results.items():
            left = ~t.isfinite() & plain[name].isfinite()
            if left.any():
                yield f"left parts of {name} unwritten, first {left.nonzero()[0].tolist()}"
        if found := probe.strange(results):
            yield f"reads memory that it has not written: {found}"


@contextlib.contextmanager
def _free_memory_is_nan(device: torch.device) -> Iterator[None]:
    """What PyTorch's allocator for a GPU hands out next was full of NaN (in every floating-point type) and of
    −1; so is shared memory."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()
        size = max(32 << 20, torch.cuda.max_memory_allocated(device) - torch.cuda.memory_allocated(device))
        size = min(size, torch.cuda.mem_get_info(device)[0] // 3)
        blocks = []
        while size >= 512:  # first new memory, then every hole beside what is in use
            reserved = torch.cuda.memory_reserved(device)
            while torch.cuda.memory_reserved(device) == reserved:
                blocks.append(torch.full((size,), 255, dtype=torch.uint8, device=device))
            size //= 2
        del blocks
        spoil_shared_memory(device)
    yield


def spoil_shared_memory(device: torch.device) -> None:
    """What the next kernel finds in a GPU's shared memory is NaN, in every floating-point type. The GPU is
    kept busy until that kernel has been launched, else another process may have its turn in between."""
    source = """// Leaves NaN in the shared memory of all multiprocessors.
    __global__ void spoil_kernel(int words) {
      extern __shared__ volatile unsigned shared[];
      for (int i = threadIdx.x; i < words; i += blockDim.x) shared[i] = ~0u;
    }
    EXPORT void spoil(float* on_this_device, cudaStream_t stream) {
      int device = 0, bytes = 0, multiprocessors = 0;
      cudaGetDevice(&device);
      cudaDeviceGetAttribute(&bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
      cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device);
      cudaFuncSetAttribute(spoil_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
      spoil_kernel<<<4 * multiprocessors, 1024, bytes, stream>>>(bytes / 4);  // one at a time has room on a multiprocessor
    }
    """
    spoil, anything = inline_loader.load("spoil", source=source, device="cuda"), torch.empty(1, device=device)
    with torch.cuda.device(device):
        torch.cuda._sleep(SLEEPS[0] // 5)
    spoil(anything)


@contextlib.contextmanager
def _new_tensors_are_nan() -> Iterator[None]:
    before = (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.use_deterministic_algorithms(True, warn_only=True)  # which fills what torch.empty returns
        try:
            yield
        finally:
            torch.use_deterministic_algorithms(before[0], warn_only=before[1])


@contextlib.contextmanager
def _one_algorithm() -> Iterator[None]:
    """The library of a GPU takes the same one each time. (Its own context manager fails where torch's newer
    setting of TF32 is used.)"""
    library = torch.backends.cudnn
    before = library.benchmark, library.deterministic
    library.benchmark, library.deterministic = False, True
    try:
        yield
    finally:
        library.benchmark, library.deterministic = before


def _repeats(probe: Probe) -> Iterator[str]:
    """The same bits each time, the library's algorithm and the generator's state being the same."""
    state = _generator(probe.device).get_state()

    def results(run=None):
        _generator(probe.device).set_state(state)
        return probe.results(run)

    with _one_algorithm():
        first, number, changed = results(), 1, []
        while number < REPEATS and not changed:
            again, number = results(), number + 1
            changed = [name for name, t in first.items() if not _same(t, again[name])]
        theirs = results(probe.model) if changed else {}
        for _ in range(REPEATS if changed else 0):  # what eager doesn't repeat, nobody has to
            again = results(probe.model)
            changed = [name for name in changed if _same(theirs[name], again[name])]
        if changed:
            yield f"run {number} of {REPEATS} on the same input gave other bits: {', '.join(changed)}"


def _generator(device: torch.device) -> torch.Generator:
    if device.type == "cuda":
        return torch.cuda.default_generators[device.index or 0]
    return torch.default_generator


def _leaves_the_rest_alone(probe: Probe) -> Iterator[str]:
    """A call changes of the module's state and of the world what eager's changes. Where eager draws random numbers, it
    may draw a seed instead, or once for each element of the output."""
    generator = _generator(probe.device)
    state = generator.get_state()
    found = []
    try:
        _seed(generator)
        for start in (
            state,
            generator.get_state(),
        ):  # two, because who sets a state leaves the same after both
            (ours, kept, changed), (theirs, expected, allowed) = (
                _after(probe, run, start) for run in (probe.module, probe.model)
            )
            if not any(torch.equal(ours, each) for each in [theirs, *_drawn_once(probe, start, theirs)]):
                found.append("leaves torch's generator neither as eager does nor after a single draw")
            found += [f"leaves {name} not as eager does" for name in unlike(kept, expected)]
            found += [text for text in changed if text not in allowed]
    finally:
        generator.set_state(state)
    yield from dict.fromkeys(found)


def _after(probe: Probe, run: Callable, start: Tensor) -> tuple[Tensor, dict[str, object], list[str]]:
    """The generator's state, the module's, and what else has changed, after a call that began in the state `start`; the last
    also before its backward pass."""

    def watched(*inputs):
        before = surroundings(probe.model)
        out = run(*inputs)
        changed.extend(changes(before))
        return out

    generator, before, changed = _generator(probe.device), surroundings(probe.model), []
    generator.set_state(start)
    with kept_buffers(probe.model, run):
        drawn, threads, places = _other_generators(), set(threading.enumerate()), _places(probe)
        call(watched, leaves_of(run, probe.model), probe.x, probe.phase, probe.g)
        started = [
            each
            for each in set(threading.enumerate()) - threads
            if not isinstance(each, threading._DummyThread)
        ]
        changed += ["leaves threads behind"] * bool(started) + changes(before)
        changed += ["draws from Python's or numpy's generator"] * (_other_generators() != drawn)
        changed += [f"moves {name}" for name, place in _places(probe).items() if place != places[name]]
        return generator.get_state(), state_of(run, probe.model), changed


def _places(probe: Probe) -> dict[str, tuple]:
    return {name: (p.data_ptr(), p.stride()) for name, p in probe.model.named_parameters()}


def _other_generators() -> list:
    found, numpy = [random.getstate()], sys.modules.get("numpy")
    if numpy:
        _, key, *rest = numpy.random.get_state()
        found += [key.tobytes(), rest]
    return found


def _drawn_once(probe: Probe, start: Tensor, theirs: Tensor) -> Iterator[Tensor]:
    """The generator's states after a seed, or after a number for each element of the output; where eager draws."""
    generator = _generator(probe.device)
    if torch.equal(theirs, start):
        return
    size = probe.results(probe.model)["output"].shape
    for draw in (_seed, lambda g: torch.rand(size, generator=g, device=g.device)):
        generator.set_state(start)
        draw(generator)
        yield generator.get_state()


def _seed(generator: torch.Generator) -> Tensor:
    return torch.empty(1, dtype=torch.int64, device=generator.device).random_(generator=generator)


def state_of(run: Callable, model: nn.Module) -> dict[str, object]:
    """What a call leaves in a module, by names that hold for every module with the parameters of `model`."""
    buffers = dict(run.named_buffers() if isinstance(run, nn.Module) else model.named_buffers())
    state = {name.replace("_orig_mod.", ""): t.clone() for name, t in buffers.items()}
    state["its mode"] = not isinstance(run, nn.Module) or run.training == model.training
    return state


def unlike(ours: dict[str, object], theirs: dict[str, object]) -> list[str]:
    """What of our state is not as eager's."""
    return [name for name, value in theirs.items() if name not in ours or _differs(ours[name], value)]


def _differs(ours: object, theirs: object) -> bool:
    if not isinstance(theirs, Tensor):
        return ours != theirs
    if ours.shape != theirs.shape or not theirs.is_floating_point():
        return not _same(ours, theirs)
    near = max(1e-3, 16 * torch.finfo(theirs.dtype).eps)
    return bool(_far(ours[None], theirs[None], near, 1e-6).any())


def _waits_for_its_stream(probe: Probe) -> Iterator[str]:
    """On a side stream the input and the gradient are written late; what does not wait for them finds zeros.

    That shows only while the stream is busy: if it no longer is when our call returns, then again with a
    longer sleep. A call that outlasts the longest waits for the GPU itself, before it knows what to launch.
    """
    if probe.device.type != "cuda":
        return
    spoilt = [t.clone() for t in probe.inputs]
    for t in spoilt:
        if t.is_floating_point() and t.numel():
            t.view(-1)[-1] = math.nan
    for on_time in (probe.on(spoilt, backward=False), probe):
        for cycles in SLEEPS:
            results, busy_before, busy_after = late_results(on_time, cycles)
            if busy_after:
                break
        if not busy_before:
            yield "was not seen on a busy stream: the input was there before the call"
        if found := on_time.strange(results):
            yield f"does not wait for its stream: {found}"


def late_results(probe: Probe, cycles: int) -> tuple[dict[str, Tensor], bool, bool]:
    """Results of what is written after so many cycles; and had it yet to be written when the call began, and
    when it returned?"""
    stream = torch.cuda.Stream(probe.device)
    torch.cuda.synchronize(probe.device)
    with torch.cuda.stream(stream):
        zeros = None if probe.g is None else torch.zeros_like(probe.g)
        late = dataclasses.replace(probe, x=[torch.zeros_like(t) for t in probe.inputs], g=zeros)
        late.results()  # the first call on a stream may compile and allocate, which takes the host long
        torch.cuda._sleep(cycles)
        for t, values in zip(late.inputs, probe.inputs):
            t.copy_(values)
        if late.g is not None:
            late.g.copy_(probe.g)
        written = torch.cuda.Event()
        written.record()
        busy_before = not written.query()
        results = late.results()
        busy_after = not written.query()
    stream.synchronize()
    return results, busy_before, busy_after


HONESTY = (
    _follows_input, _follows_parameters, _follows_shape, passes_nan, _serves_any_call, _owns_results, _writes_all,
    _repeats, _leaves_the_rest_alone, _waits_for_its_stream,
)  # fmt: skip
