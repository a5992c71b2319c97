"""Is a variant of a problem right, and does it compute what it claims? The rule by which a comparison judges.

    print(check("conv2d_min_add_multiply", "epilogue", phase="train", batch_size=2))

Let r be the reference in float64 on the same input and weights. A variant is right if its output and every gradient is at
most twice as far from r as eager PyTorch is in the dtype at hand, both as ‖out − r‖/‖r‖ and as max |out − r|, plus 4 units
in the last place of the largest value. A limit that is missed is judged again on the mean of `DRAWS` draws of input and
parameters, because a single draw of rounding errors can be lucky for eager; what is worse than twice stays worse.

A variant is honest (`dishonesty` finds nothing) if its results are those of the input, of the parameters and of the
shape at hand, whatever it was called with before; if NaN reaches what it reaches in eager; if it leaves input and
parameters alone, returns memory of its own and writes all of it, and reads none that it has not written; if repeats are
equal to the bit (`REPEATS` of them); and if on a GPU it waits for what its stream does. Each of these is a function of
a `Probe`.
"""

from __future__ import annotations

import contextlib
import copy
import math
import os
import statistics
import warnings
from typing import Callable, Iterable, Iterator, NamedTuple

import torch
from torch.overrides import TorchFunctionMode

import inline_loader
import models

PHASES = ("forward", "train", "train_dx")  # no gradients; all but that of x; all
PEERS = {"eager": None, "compile": "default", "max-autotune": "max-autotune-no-cudagraphs"}
DRAWS = 4
REPEATS = 100
SLEEPS = 10**8, 10**9  # cycles of a GPU: each far longer than the host takes to launch everything

# ---------------------------------------------------------------------------------------------------------- contestants


def contestant(problem, variant: str, model: torch.nn.Module) -> Callable:
    """`model` (a `problem.Model`) as `variant` runs it, sharing its parameters: a peer's name, or a variant of ours."""
    if variant == "eager":
        return model
    if variant in PEERS:
        return torch.compile(model, mode=PEERS[variant], dynamic=False)
    twin = problem.ModelNew.from_eager(model)
    twin.variant = variant
    return twin


def call(module: Callable, leaves: dict, x: torch.Tensor, phase: str, g: torch.Tensor | None) -> tuple:
    """The output and the gradients of `leaves` (and of "x"), by name, for the incoming gradient g."""
    if phase == "forward":
        with torch.no_grad():
            return module(x), {}
    if phase == "train_dx":
        x = x.detach().requires_grad_()
        leaves = {**leaves, "x": x}
    out = module(x)
    gradients = torch.autograd.grad(out, list(leaves.values()), g, allow_unused=True, materialize_grads=True)
    return out.detach(), dict(zip(leaves, gradients))


# ------------------------------------------------------------------------------------------------------------- checking


class Error(NamedTuple):
    """How far one result is from float64, beside eager's distance and the limits that follow.

    norm is ‖out − r‖/‖r‖ (‖out − r‖ where r is zero), max is max |out − r|, found at the index `place`.
    """

    case: str
    quantity: str
    norm: float
    max: float
    eager_norm: float
    eager_max: float
    limit_norm: float
    limit_max: float
    place: tuple[int, ...] = ()

    @property
    def share(self) -> float:
        """The larger error as a share of its limit; infinite if an error is not finite."""
        pairs = ((self.norm, self.limit_norm), (self.max, self.limit_max))
        return max(
            0.0 if e == 0 else e / limit if limit and math.isfinite(e) else math.inf for e, limit in pairs
        )

    def __str__(self):
        return (
            f"{self.case}, {self.quantity}: error {self.norm:.2g} (limit {self.limit_norm:.2g}, eager {self.eager_norm:.2g}), "
            f"max {self.max:.2g}{f' at {list(self.place)}' if self.place else ''} "
            f"(limit {self.limit_max:.2g}, eager {self.eager_max:.2g})"
        )


class Check(NamedTuple):
    """What a check found: the errors of every result, and complaints about everything else."""

    variant: str
    seed: int
    errors: list[Error]
    complaints: list[str]

    @property
    def worst(self) -> Error | None:
        return max(self.errors, key=lambda error: error.share, default=None)

    @property
    def failures(self) -> list[str]:
        return self.complaints + [str(error) for error in self.errors if not error.share <= 1]

    @property
    def ok(self) -> bool:
        return not self.failures

    def __str__(self):
        lines = [f"{self.variant} (seed {self.seed}): {'passes' if self.ok else 'FAILS'}"]
        return "\n  ".join(
            lines + self.complaints + [f"{'ok ' if e.share <= 1 else 'BAD'} {e}" for e in self.errors]
        )


def check(
    problem, variant: str, *, device="cpu", phase="forward", batch_size=None, dtype=torch.float32, seed=None
) -> Check:
    """Is `variant` of `problem` (a name or a `Problem`) right, to the tolerance of eager PyTorch, and honest?

    Inputs and parameters are random, from `seed` (a new one if None). A peer is checked as it is timed; ours also on
    an input with a large mean, and where the problem has them on the cases that catch a kernel that computes nothing.
    Raises ValueError for an unknown phase; what the variant raises becomes a complaint.
    """
    if phase not in PHASES:
        raise ValueError(f"expected a phase out of {PHASES}, got {phase!r}")
    problem = models.PROBLEMS[problem] if isinstance(problem, str) else problem
    seed = new_seed() if seed is None else seed
    result = Check(variant, seed, [], [])
    ours = variant not in PEERS

    def draw(number: int) -> tuple[torch.nn.Module, torch.Tensor]:
        torch.manual_seed(seed + number)
        return _random_problem(problem, device, batch_size, dtype)

    def errors(case: Case, number: int) -> list[Error]:
        model, x = draw(number)
        case.prepare(model, x)
        found, complaints = errors_of(case.label, contestant(problem, variant, model), model, x, phase)
        result.complaints.extend(complaints)
        return found

    try:
        for case in _cases(problem.name) if ours else _COMMON[:1]:
            found = errors(case, 0)
            if any(error.share > 1 for error in found):
                found = [
                    _mean(draws)
                    for draws in zip(found, *(errors(case, number) for number in range(1, DRAWS)))
                ]
            result.errors.extend(found)
        if ours:
            model, x = draw(0)
            if _dropout(model):
                _ties(model, x)  # else its results are constant
            result.complaints.extend(dishonesty(contestant(problem, variant, model.eval()), model, x, phase))
    except Exception as error:  # whatever a variant raises is the finding
        result.complaints.append(
            f"raised {type(error).__name__}: {(str(error).strip() or 'no message').splitlines()[0]}"
        )
    return result


def new_seed() -> int:
    return int.from_bytes(os.urandom(3), "big")


def _mean(draws: Iterable[Error]) -> Error:
    """The mean of several draws' errors and limits, and the place in the first."""
    draws = list(draws)
    case, quantity, *_, place = draws[0]
    means = [statistics.fmean(column) for column in list(zip(*draws))[2:-1]]
    return Error(f"{case}, mean of {len(draws)}", quantity, *means, place)


def _random_problem(problem, device, batch_size, dtype) -> tuple[torch.nn.Module, torch.Tensor]:
    """A reference model in training mode, what scales and shifts in it drawn from a normal distribution, and its input."""
    model = problem.Model(*problem.get_init_inputs()).to(device=device, dtype=dtype)
    for name, parameter in model.named_parameters():
        if name != "conv.weight":
            torch.nn.init.normal_(parameter)
    x = torch.rand(
        batch_size or problem.input_shape[0], *problem.input_shape[1:], device=device
    )  # get_inputs' are made on the CPU
    return model.train(), x.to(dtype)


class Case(NamedTuple):
    """A situation to check in: prepare(model, x) changes the random model and its input in place."""

    label: str
    prepare: Callable[[torch.nn.Module, torch.Tensor], object]


def _ties(model, x):
    """The one situation in which conv3d_groupnorm_min_clamp_dropout has gradients: normalised values of exactly min_value.

    In the first half of the groups because the convolution gives zero everywhere, in the rest because the slope is zero.
    """
    model.min_value = 0.25  # not 0, so that dropped elements can be told from kept ones
    half = (model.norm.num_groups + 1) // 2 * (model.norm.num_channels // model.norm.num_groups)
    with torch.no_grad():
        model.conv.weight[:half], model.conv.bias[:half], model.norm.weight[half:] = 0, 0, 0
        model.norm.bias.fill_(model.min_value)


# The first is what peers are checked in: the mode that is timed.
_COMMON = [Case("random parameters", lambda model, x: None), Case("large mean", lambda model, x: x.add_(100))]
_DROPOUT = [
    Case("ties, training", _ties),
    Case("ties, eval", lambda model, x: _ties(model.eval(), x)),
    Case("no ties, eval", lambda model, x: setattr(model.eval(), "min_value", 0.25)),
]


def _cases(name: str) -> list[Case]:
    return _COMMON + (_DROPOUT if name == "conv3d_groupnorm_min_clamp_dropout" else [])


def errors_of(label: str, module, model, x, phase: str) -> tuple[list[Error], list[str]]:
    """The errors of `module` on x beside those of `model`, the reference being `model` in float64, and complaints.

    `module` shares the parameters of `model`, a reference model; label names the case. Uses torch's random numbers.
    """
    leaves, p = dict(model.named_parameters()), _dropout(model)
    plain, _, edges = _float64(model, x, "forward", None, None)
    g = None if phase == "forward" else torch.randn_like(plain, dtype=x.dtype).masked_fill_(edges, 0)
    distances, dtypes, reference = [], [], None
    for run in (model, module):
        out, gradients = call(run, leaves, x, phase, g)
        keep = (out != 0) if p else None
        if reference is None or p:  # each run drops elements of its own choice
            reference = _named(*_float64(model, x, phase, g, keep)[:2])
        results = _named(out, gradients)
        distances.append([_distance(results[name], r) for name, r in reference.items()])
        dtypes.append({name: t.dtype for name, t in results.items()})
    named = zip(reference.items(), *distances)
    found = [_judged(label, name, r, eager, ours, x.dtype) for (name, r), eager, ours in named]
    complaints = [
        f"{name} is {dtypes[1][name]}, expected {dtype}"
        for name, dtype in dtypes[0].items()
        if dtypes[1][name] != dtype
    ]
    if p:
        again = call(module, leaves, x, "forward", None)[0] != 0
        complaints += _bad_mask(keep, again, plain != 0, p)
    return found, [f"{label}: {text}" for text in complaints]


def _judged(
    label: str, quantity: str, r: torch.Tensor, eager: tuple, ours: tuple, dtype: torch.dtype
) -> Error:
    """The Error of a result of `dtype`, r being the reference, from eager's and our `_distance` to it."""
    size, ulp = r.abs().max().item() if r.numel() else 0.0, torch.finfo(dtype).eps
    limits = 2 * eager[0] + 4 * ulp * bool(size), 2 * eager[1] + 4 * ulp * size
    return Error(label, quantity, *ours[:2], *eager[:2], *limits, ours[2])


def _named(out, gradients) -> dict[str, torch.Tensor]:
    return {"output": out, **{f"gradient of {name}": t for name, t in gradients.items()}}


def _distance(out: torch.Tensor, r: torch.Tensor) -> tuple[float, float, tuple[int, ...]]:
    """`norm`, `max` and `place` of an Error."""
    if out.shape != r.shape:
        raise ValueError(f"expected the shape {tuple(r.shape)}, got {tuple(out.shape)}")
    if not r.numel():
        return 0.0, 0.0, ()
    difference = out.double() - r
    place = tuple(int(index) for index in torch.unravel_index(difference.abs_().argmax(), r.shape))
    return (difference.norm() / (r.norm().item() or 1.0)).item(), difference[place].item(), place


def _dropout(model) -> float:
    """The probability with which `model` drops elements of its output, as its last step; 0 in eval."""
    drops = [
        module.p for module in model.modules() if isinstance(module, torch.nn.Dropout) and module.training
    ]
    return drops[0] if drops else 0.0


def _bad_mask(keep, again, visible, p) -> Iterable[str]:
    """What is wrong with a dropout mask, seen where the output before dropout is not zero."""
    total = int(visible.sum())
    kept = int((keep & visible).sum())
    if abs(kept - total * (1 - p)) > 6 * math.sqrt(total * p * (1 - p)):
        yield f"kept {kept} of {total} elements, expected a share of {1 - p:g}"
    if total > 1000 and torch.equal(keep, again):
        yield "two calls dropped the same elements"


def _float64(model, x, phase, g, keep) -> tuple:
    """Output, gradients and edges (see `_Edges`) of the reference in float64 on the same input and weights.

    A few samples at a time, because the models treat each on its own and float64 takes room. keep is the dropout mask.
    """
    double = copy.deepcopy(model).double().eval()
    leaves = dict(double.named_parameters())
    outs, edges, dxs, gradients = [], [], [], {}
    for piece in torch.arange(len(x), device="cpu").split(16):
        part = slice(int(piece[0]), int(piece[-1]) + 1)
        close = _Edges(min(1024 * torch.finfo(x.dtype).eps, 2**-6))

        def run(x, part=part, close=close):
            with close:
                out = double(x)
            return out if keep is None else out * keep[part] / (1 - _dropout(model))

        out, partial = call(run, leaves, x[part].double(), phase, None if g is None else g[part].double())
        outs.append(out)
        edges.append(close.found)
        dxs += [partial.pop("x")] if "x" in partial else []
        gradients = {name: partial[name] + gradients.get(name, 0) for name in partial}
    if dxs:
        gradients["x"] = torch.cat(dxs)
    return torch.cat(outs), gradients, torch.cat(edges)


class _Edges(TorchFunctionMode):
    """Marks, in `found`, the outputs whose gradient hangs on a comparison too close to call in the dtype at hand.

    Where min, max or clamp meet two values that differ, but by less than `near` of the sample's largest finite one, rounding
    decides which one gets the gradient, for eager as for us. Either is right, so the check sends no gradient there. Exact ties
    are not marked: those follow a rule.
    """

    def __init__(self, near: float):
        super().__init__()
        self.near = near
        self.found = None

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        name, x = getattr(func, "__name__", ""), args[0] if args else None
        if name in ("min", "clamp"):
            for bound in (*args[1:], *kwargs.values()):
                self._mark(x, (x - bound).detach().abs())
        elif name == "max":
            self._choose(x, kwargs.get("dim", args[-1]))
        elif name == "max_pool2d":
            height, width = (args[1],) * 2 if isinstance(args[1], int) else args[1]
            self.found = None if self.found is None else self._windows(self.found, out, height, width)
            self._choose(self._windows(x, out, height, width), -1)
        return out

    def _mark(self, x, distance):
        sizes = x.detach().abs().nan_to_num(0.0, posinf=0.0).flatten(1).amax(1)
        close = (distance > 0) & (distance < self.near * sizes.view(-1, *[1] * (distance.dim() - 1)))
        self.found = close if self.found is None else self.found | close

    def _choose(self, x, dim):
        """A maximum over dim: marked if its winner is, or if the runner-up comes close."""
        best = x.detach().topk(min(2, x.shape[dim]), dim)
        found = None if self.found is None else self.found.gather(dim, best.indices).select(dim, 0)
        self.found = None
        self._mark(x, best.values.select(dim, 0) - best.values.select(dim, -1))
        self.found = self.found if found is None else self.found | found

    @staticmethod
    def _windows(x, out, height, width):
        """x (N, C, H, W) as (N, C, H', W', height * width), the windows of a max pool that gives `out`."""
        (rows, columns) = out.shape[2:]
        x = (
            x[..., : rows * height, : columns * width]
            .unflatten(3, (columns, width))
            .unflatten(2, (rows, height))
        )
        return x.transpose(3, 4).flatten(4)


# -------------------------------------------------------------------------------------------------------------- honesty


class Probe(NamedTuple):
    """What honesty is tried on: `module`, which shares the parameters of `model` (a reference in eval mode), a random input x
    and an incoming gradient g (None in the phase "forward")."""

    module: Callable
    model: torch.nn.Module
    x: torch.Tensor
    phase: str
    g: torch.Tensor | None

    def on(self, x: torch.Tensor, phase: str | None = None) -> Probe:
        """The same on another input, with a gradient of its own: none where rounding decides what it meets (see `_Edges`)."""
        probe = self._replace(x=x, phase=phase or self.phase, g=None)
        if probe.phase == "forward":
            return probe
        out, _, edges = _float64(self.model, x, "forward", None, None)
        return probe._replace(g=torch.randn_like(out, dtype=x.dtype).masked_fill_(edges, 0))

    def results(self, run: Callable | None = None) -> dict[str, torch.Tensor]:
        """Output and gradients of `module`, or of `run`, by name."""
        return _named(
            *call(run or self.module, dict(self.model.named_parameters()), self.x, self.phase, self.g)
        )

    def strange(self, ours: dict[str, torch.Tensor] | None = None) -> str:
        """Which of our results are nothing like eager's, in words; empty if none is. A coarse look, where `errors_of` is exact."""
        ours, theirs = ours or self.results(), self.results(self.model)
        gradients = [t.norm().item() for name, t in theirs.items() if name != "output"]
        found = []
        for name, expected in theirs.items():
            if ours[name].shape != expected.shape:
                found.append(f"{name} of shape {list(ours[name].shape)}, expected {list(expected.shape)}")
                continue
            # A gradient jumps where rounding decides a comparison, and one much smaller than the largest is all rounding.
            near, floor = (
                (max(1e-2, 16 * torch.finfo(self.x.dtype).eps), 0)
                if name == "output"
                else (0.3, 1e-3 * max(gradients))
            )
            by_sample = name in ("output", "gradient of x")
            rows = (
                _far(*(t if by_sample else t[None] for t in (ours[name], expected)), near, floor)
                .nonzero()
                .flatten()
                .tolist()
            )
            if rows:
                found.append(name + (f" of sample {', '.join(map(str, rows))}" if by_sample else ""))
        return "; ".join(found)


def _far(ours: torch.Tensor, theirs: torch.Tensor, near: float, floor: float) -> torch.Tensor:
    """For each row, is only one of the two NaN somewhere, or are they further apart than `near` of theirs plus `floor`?"""
    ours, theirs = (t.to(torch.promote_types(t.dtype, torch.float32)).flatten(1) for t in (ours, theirs))
    wrong = ours.isnan().any(1) != theirs.isnan().any(1)
    distance, size = (t.masked_fill(t.isnan(), 0).norm(dim=1) for t in (ours - theirs, theirs))
    return wrong | (distance > near * size + floor)


def dishonesty(
    module: Callable, model: torch.nn.Module, x: torch.Tensor, phase: str = "forward"
) -> Iterator[str]:
    """What is wrong with how `module` computes, beyond its errors, one complaint at a time.

    `module` is any callable that shares the parameters of `model`, a reference model in eval mode; x is random. Uses torch's
    random numbers. The parameters are changed meanwhile and put back.
    """
    probe = Probe(module, model, x, phase, None).on(x)
    given = {"its input": x, **dict(model.named_parameters())}
    before = {name: t.detach().clone() for name, t in given.items()}
    for judge in HONESTY:
        yield from judge(probe)
    yield from (f"changed {name}" for name, t in given.items() if not _same(t, before[name]))


def _same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Bitwise equal, but that any NaN equals any other."""
    return torch.equal(a, b) or (a.shape == b.shape and bool(((a == b) | (a.isnan() & b.isnan())).all()))


def _follows_input(probe: Probe) -> Iterator[str]:
    """Another input, in other memory and in the same."""
    x = probe.x.clone()
    for how, values in (
        ("another input", torch.rand_like(x)),
        ("other values in its input's memory", torch.rand_like(x)),
    ):
        probe._replace(x=x).results()
        if how == "another input":
            x = values
        else:
            x.data.copy_(values)  # which autograd does not count as a change
        if found := probe.on(x).strange():
            yield f"does not follow {how}: {found}"


def _follows_parameters(probe: Probe) -> Iterator[str]:
    """Other values for each parameter in turn, in other memory and, with a NaN at the end, in the same."""
    spoilt = probe.on(probe.x, "forward")
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
    """Fewer samples and rows, then the first shape again."""
    x = probe.x
    if found := probe.on(x[: (len(x) + 1) // 2, ..., 1:, :].contiguous()).strange():
        yield f"does not follow a change of shape: {found}"
    if found := probe.strange():
        yield f"does not recover from a change of shape: {found}"


def _passes_nan(probe: Probe) -> Iterator[str]:
    """NaN in every other sample spoils the samples that it spoils in eager."""
    for first, place in ((0, 0), (1, -1)):
        x = probe.x.clone()
        x.view(len(x), -1)[first::2, place] = math.nan
        if found := probe.on(x, "forward").strange():
            yield f"does not pass NaN on as eager does: {found}"


def _owns_results(probe: Probe) -> Iterator[str]:
    """Results share memory neither with each other, nor with an earlier call's, nor with what was given."""
    first = probe.results()
    kept = {name: t.clone() for name, t in first.items()}
    second = probe._replace(x=torch.rand_like(probe.x)).results()
    tensors = [("its input", probe.x), *probe.model.named_parameters(), *first.items()]
    tensors += [(f"{name} of the next call", t) for name, t in second.items()]
    owners = {}
    for name, t in tensors:
        address = t.untyped_storage().data_ptr()
        if t.numel() and (owner := owners.setdefault(address, name)) is not name:
            yield f"{name} shares memory with {owner}"
    yield from (f"the next call changed {name}" for name, t in first.items() if not _same(t, kept[name]))


def _writes_all(probe: Probe) -> Iterator[str]:
    """Nothing is left of what new memory held: NaN, once in all that torch.empty returns, and once in a GPU's free memory and in its
    shared memory."""
    if probe.x.is_cuda:
        torch.cuda.reset_peak_memory_stats(
            probe.x.device
        )  # from which _free_memory_is_nan knows what a call takes
    for spoilt in (_new_tensors_are_nan(), _free_memory_is_nan(probe.x.device)):
        with spoilt:
            results = probe.results()
        for name, t in results.items():
            if not t.isfinite().all():
                yield f"left parts of {name} unwritten, first {(~t.isfinite()).nonzero()[0].tolist()}"
        if found := probe.strange(results):
            yield f"reads memory that it has not written: {found}"


@contextlib.contextmanager
def _free_memory_is_nan(device: torch.device) -> Iterator[None]:
    """What PyTorch's allocator for a GPU hands out next was full of NaN (in every floating-point type) and of −1; so is shared memory."""
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
    """What the next kernel finds in a GPU's shared memory is NaN, in every floating-point type. The GPU is kept busy until that kernel has
    been launched, else another process may have its turn in between."""
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
    """The library of a GPU takes the same one each time. (Its own context manager fails where torch's newer setting of TF32 is used.)"""
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

    That shows only while the stream is busy: if it no longer is when our call returns, then again with a longer sleep. A call that
    outlasts the longest waits for the GPU itself, before it knows what to launch.
    """
    if not probe.x.is_cuda:
        return
    spoilt = probe.x.clone()
    spoilt.view(-1)[-1] = math.nan
    for on_time in (probe.on(spoilt, "forward"), probe):
        for cycles in SLEEPS:
            results, busy_before, busy_after = _late_results(on_time, cycles)
            if busy_after:
                break
        if not busy_before:
            yield "was not seen on a busy stream: the input was there before the call"
        if found := on_time.strange(results):
            yield f"does not wait for its stream: {found}"


def _late_results(probe: Probe, cycles: int) -> tuple[dict[str, torch.Tensor], bool, bool]:
    """Results of what is written after so many cycles; and had it yet to be written when the call began, and when it returned?"""
    stream = torch.cuda.Stream(probe.x.device)
    torch.cuda.synchronize(probe.x.device)
    with torch.cuda.stream(stream):
        late = probe._replace(
            x=torch.zeros_like(probe.x), g=None if probe.g is None else torch.zeros_like(probe.g)
        )
        late.results()  # the first call on a stream may compile and allocate, which takes the host long
        torch.cuda._sleep(cycles)
        late.x.copy_(probe.x)
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
