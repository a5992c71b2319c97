"""Does a module compute what it claims? What no error shows, because the results may be right all the same.

    complaints = list(dishonesty(twin, model.eval(), x, "train"))

A module is honest if its results are those of the input, of the parameters and of the shape at hand, whatever
it was called with before; if NaN reaches what it reaches in eager; if it leaves input and parameters alone,
returns memory of its own and writes all of it, and reads none that it has not written; if repeats are equal
to the bit (`REPEATS` of them); and if on a GPU it waits for what its stream does. Each of these is a function
of a `Probe`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import re
import warnings
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor, nn

import inline_loader

if __package__:  # as pip installs it
    from .checks import call, dtype_of, has_backward, inputs_of, leaves_of, named, reference_of
else:
    from checks import call, dtype_of, has_backward, inputs_of, leaves_of, named, reference_of

REPEATS = 100
SLEEPS = 10**8, 10**9  # cycles of a GPU: each far longer than the host takes to launch everything


@dataclasses.dataclass(frozen=True)
class Probe:
    """What honesty is tried on: `module`, which shares the parameters of `model` (a reference in eval mode),
    random inputs x (one or a list) and an incoming gradient g (None in a phase without backward). draw()
    gives other inputs like x."""

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
        if not has_backward(phase):
            return probe
        out, _, edges = reference_of(self.model, x, "forward", None, None)
        g = torch.randn_like(out, dtype=dtype_of(self.model, probe.inputs)).masked_fill_(edges, 0)
        return dataclasses.replace(probe, g=g)

    def others(self) -> list[Tensor]:
        """Other inputs of the same shapes."""
        if self.draw is None:
            return [torch.rand_like(t) if t.is_floating_point() else t.clone() for t in self.inputs]
        return [t.to(like.device) for t, like in zip(inputs_of(self.draw()), self.inputs)]

    def results(self, run: Callable | None = None) -> dict[str, Tensor]:
        """Output and gradients of `module`, or of `run`, by name."""
        run = run or self.module
        return named(*call(run, leaves_of(run, self.model), self.x, self.phase, self.g))

    def strange(self, ours: dict[str, Tensor] | None = None) -> str:
        """Which of our results are nothing like eager's, in words; empty if none is. A coarse look, where
        `errors_of` is exact."""
        ours, theirs = ours or self.results(), self.results(self.model)
        gradients = [t.norm().item() for name, t in theirs.items() if name != "output"]
        precision = torch.finfo(dtype_of(self.model, self.inputs)).eps
        found = []
        for name, expected in theirs.items():
            if ours[name].shape != expected.shape:
                found.append(f"{name} of shape {list(ours[name].shape)}, expected {list(expected.shape)}")
                continue
            # A gradient jumps where rounding decides a comparison, and one much smaller than the largest is
            # all rounding.
            near, floor = (max(1e-2, 16 * precision), 0) if name == "output" else (0.3, 1e-3 * max(gradients))
            by_sample = name == "output" or re.fullmatch(r"gradient of x\d*", name) is not None
            pair = (t if by_sample else t[None] for t in (ours[name], expected))
            rows = _far(*pair, near, floor).nonzero().flatten().tolist()
            if rows:
                found.append(name + (f" of sample {_listed(rows)}" if by_sample else ""))
        return "; ".join(found)


def _listed(rows: list[int]) -> str:
    return ", ".join(map(str, rows[:8])) + f" and {len(rows) - 8} more" * (len(rows) > 8)


def _far(ours: Tensor, theirs: Tensor, near: float, floor: float) -> Tensor:
    """For each row, is only one of the two NaN somewhere, or are they further apart than `near` of theirs
    plus `floor`?"""
    ours, theirs = (
        t.to(torch.promote_types(t.dtype, torch.float32))[:, None].flatten(1) for t in (ours, theirs)
    )
    wrong = ours.isnan().any(1) != theirs.isnan().any(1)
    distance, size = (t.masked_fill(t.isnan(), 0).norm(dim=1) for t in (ours - theirs, theirs))
    return wrong | (distance > near * size + floor)


def dishonesty(
    module: Callable,
    model: nn.Module,
    x: Tensor | Sequence[Tensor],
    phase: str = "forward",
    draw: Callable[[], Sequence[Tensor]] | None = None,
) -> Iterator[str]:
    """What is wrong with how `module` computes, beyond its errors, one complaint at a time.

    `module` is any callable that shares the parameters of `model`, a reference model in eval mode; x, one
    input or a list, is random, and draw() gives others like it (if None, even random numbers are). Uses
    torch's random numbers. The parameters are changed meanwhile and put back.
    """
    probe = Probe(module, model, x, phase, draw=draw).on(x)
    inputs = {"its input" if len(probe.inputs) == 1 else f"input {i}": t for i, t in enumerate(probe.inputs)}
    given = {**inputs, **dict(model.named_parameters()), **dict(model.named_buffers())}
    before = {name: t.detach().clone() for name, t in given.items()}
    for judge in HONESTY:
        yield from judge(probe)
    yield from (f"changed {name}" for name, t in given.items() if not _same(t, before[name]))


def _same(a: Tensor, b: Tensor) -> bool:
    """Bitwise equal, but that any NaN equals any other."""
    return torch.equal(a, b) or (a.shape == b.shape and bool(((a == b) | (a.isnan() & b.isnan())).all()))


def _follows_input(probe: Probe) -> Iterator[str]:
    """Other inputs, in other memory and in the same."""
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
    """Other values for each parameter in turn, in other memory and, with a NaN at the end, in the same."""
    spoilt = probe.on(probe.x, backward=False)
    for name, parameter in probe.model.named_parameters():
        kept = parameter.data
        parameter.data = torch.randn_like(kept)
        found = probe.on(probe.x).strange()
        parameter.data.normal_().view(-1)[-1] = math.nan
        found = found or spoilt.strange()
        parameter.data = kept
        if found:
            yield f"does not follow a change of {name}: {found}"


def _follows_shape(probe: Probe) -> Iterator[str]:
    """Fewer samples (of one, twice as many) and, where the model takes that, fewer rows; then the first shape
    again."""
    fewer = [t[: (len(t) + 1) // 2] if len(t) > 1 else torch.cat([t, t]) for t in probe.inputs]
    shorter = [t[..., 1:, :] if t.dim() > 2 else t for t in fewer]
    try:
        with torch.no_grad():
            probe.model(*shorter)
        fewer = shorter
    except (RuntimeError, ValueError):  # its size is fixed, or as small as can be
        pass
    if found := probe.on([t.contiguous() for t in fewer]).strange():
        yield f"does not follow a change of shape: {found}"
    if found := probe.strange():
        yield f"does not recover from a change of shape: {found}"


def _passes_nan(probe: Probe) -> Iterator[str]:
    """NaN in every other sample spoils the samples that it spoils in eager."""
    for first, place in ((0, 0), (1, -1)):
        inputs = [t.clone() for t in probe.inputs]
        for t in inputs:
            if t.is_floating_point():
                t.view(len(t), -1)[first::2, place] = math.nan
        if found := probe.on(inputs, backward=False).strange():
            yield f"does not pass NaN on as eager does: {found}"


def _owns_results(probe: Probe) -> Iterator[str]:
    """Results share memory neither with each other, nor with an earlier call's, nor with what was given."""
    first = probe.results()
    kept = {name: t.clone() for name, t in first.items()}
    second = dataclasses.replace(probe, x=probe.others()).results()
    tensors = [("its input", t) for t in probe.inputs] + [*probe.model.named_parameters(), *first.items()]
    tensors += [(f"{name} of the next call", t) for name, t in second.items()]
    owners = {}
    for name, t in tensors:
        address = t.untyped_storage().data_ptr()
        if t.numel() and (owner := owners.setdefault(address, name)) is not name:
            yield f"{name} shares memory with {owner}"
    yield from (f"the next call changed {name}" for name, t in first.items() if not _same(t, kept[name]))


def _writes_all(probe: Probe) -> Iterator[str]:
    """Nothing is left of what new memory held: NaN, once in all that torch.empty returns, and once in a GPU's
    free memory and in its shared memory."""
    if probe.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(
            probe.device
        )  # from which _free_memory_is_nan knows what a call takes
    for spoilt in (_new_tensors_are_nan(), _free_memory_is_nan(probe.device)):
        with spoilt:
            results = probe.results()
        for name, t in results.items():
            if not t.isfinite().all():
                yield f"left parts of {name} unwritten, first {(~t.isfinite()).nonzero()[0].tolist()}"
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
    """The same bits each time, the library's algorithm being the same."""
    with _one_algorithm():
        first = probe.results()
        for number in range(2, REPEATS + 1):
            again = probe.results()
            if changed := [name for name, t in first.items() if not _same(t, again[name])]:
                yield f"run {number} of {REPEATS} on the same input gave other bits: {', '.join(changed)}"
                return


def _waits_for_its_stream(probe: Probe) -> Iterator[str]:
    """On a side stream the input and the gradient are written late; what does not wait for them finds zeros.

    That shows only while the stream is busy: if it no longer is when our call returns, then again with a
    longer sleep. A call that outlasts the longest waits for the GPU itself, before it knows what to launch.
    """
    if probe.device.type != "cuda":
        return
    spoilt = [t.clone() for t in probe.inputs]
    for t in spoilt:
        if t.is_floating_point():
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
    _follows_input, _follows_parameters, _follows_shape, _passes_nan, _owns_results, _writes_all, _repeats, _waits_for_its_stream,
)  # fmt: skip
