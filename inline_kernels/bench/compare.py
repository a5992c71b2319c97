"""Checks, times and plots a model and its faster twins: what the notebooks call and what the benchmark is
made of.

    rows = compare("conv2d_min_add_multiply")                       # one of the problems: all its variants and its peers
    rows = compare_pair(model, my_faster_model, lambda: [torch.rand(8, 64)])   # a model of yours, and its twin
    print(table(rows)); plot(rows)

compare.py at the repository's root is the command. This module knows no model but through `registry`.

What is right is said in checks.py, what is honest in honesty.py. What of ours fails its check gets no time,
no bar and no speed-up. A peer is somebody else's way to run the reference: it is judged by the same rule, on
the mean of several draws, and its time is shown even if it misses, with its error as a multiple of eager's.

Phases: `forward` (no_grad), `forward_grad` (gradients on, no backward: what `model(x)` in a fresh notebook
is), `train` (forward and backward), `train_dx` (with the inputs' gradients, too).

Times are taken as timing.py says.

A row is a dict: problem, number, variant, peer (is it one?), auto (is it what runs by default?), device
("cuda" or "cpu"), dtype, phase, inputs ("default", or the label of a special case), shape (of the first
input), ok (None: it did not run), reason (of a failure), median_ms, low_ms and high_ms (quartiles), runs,
call_ms, host_us, memory_mb (the peak beyond inputs, output, incoming gradient and gradients; None on a CPU),
speedup_vs_eager (by median_ms), error_norm, error_max, eager_error_norm, eager_error_max (of `quantity` in
`case`, the result nearest to or furthest past its limit), error_vs_eager (there, the error as a multiple of
what eager's is allowed to be; 2 is the limit), bytes (inputs and output, once each), floor_ms (what the GPU
needs at least; None where unknown), plan, seed.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import math
import os
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from inline_kernels.bench import checks
from inline_kernels.bench.charts import cpu_name
from inline_kernels.bench.checks import PHASES, Contestant, Error, has_backward
from inline_kernels.bench.honesty import Probe, dishonesty
from inline_kernels.bench.records import output_of
from inline_kernels.bench.surroundings import changes, put_back, surroundings
from inline_kernels.bench.timing import Call, Deal, _settings, call_times, extra_memory, host_times, time
from inline_kernels.loader import guarded

# Bytes per second of a copy, measured; operations per second of the tensor cores (float64: all) from the
# datasheet. For float32 that is float16's rate, the fastest that can be as exact as eager (TF32 there): a
# floor that needs more products is higher.
GPUS = {
    "NVIDIA H200": (4.28e12, {"float32": 989e12, "float16": 989e12, "bfloat16": 989e12, "float64": 67e12}),
}

# -------------------------------------------------------------------------------------------- the contestants


class Peer(NamedTuple):
    """Another way to run a reference: make(model) gives a module with its parameters, and may raise to say
    why it can't.

    channels_last: model, inputs and incoming gradient lie in memory so. tf32: False forbids it.
    """

    make: Callable[[nn.Module], Callable]
    channels_last: bool = False
    tf32: bool = True

    def contestant(self, model: nn.Module) -> Contestant:
        if self.channels_last:
            model = copy.deepcopy(model)
            for p in model.parameters():
                p.data = checks.channels_last(p.data)
        module = self.make(model)
        return Contestant(module, checks.leaves_of(module, model), self.channels_last, self.tf32)


def _compiled(mode: str) -> Callable[[nn.Module], Callable]:
    return lambda model: torch.compile(model, mode=mode, dynamic=False)


PEERS = {
    "eager": Peer(lambda model: model),
    "compile": Peer(_compiled("default")),
    "max-autotune": Peer(_compiled("max-autotune-no-cudagraphs")),
    "compile-cl": Peer(_compiled("default"), channels_last=True),
    "compile-fp32": Peer(_compiled("default"), tf32=False),
}
EXACT = "compile-fp32"  # runs where another peer misses the rule


class Contest(NamedTuple):
    """What is compared, on one device and in one dtype.

    model() gives a reference, inputs() fresh inputs, both to be changed at will; twin(variant, model) ours,
    which shares the model's parameters, for each of `variants` and for "auto"; cases are (label,
    prepare(model, *inputs)) to be checked beside random parameters, timed_cases to be timed;
    operations(model, *inputs) the floating-point operations that can't be avoided.
    """

    name: str
    number: int | None
    device: str
    dtype: torch.dtype
    model: Callable[[], nn.Module]
    inputs: Callable[[], list[Tensor]]
    twin: Callable[[str, nn.Module], Callable]
    variants: tuple[str, ...]
    cases: Sequence[tuple[str, Callable]] = ()
    timed_cases: Sequence[tuple[str, Callable]] = ()
    operations: Callable[..., int] = lambda model, *inputs: 0
    peers: dict[str, Peer] = {}

    def contestant(self, variant: str, model: nn.Module) -> Contestant:
        """`model` as `variant` runs it: a peer, or ours."""
        if variant in self.peers:
            return self.peers[variant].contestant(model)
        return checks.as_contestant(self.twin(variant, model), model)

    def drawn(
        self, seed: int, prepare: Callable = lambda model, *inputs: None
    ) -> tuple[nn.Module, list[Tensor]]:
        """A reference with random parameters, and random inputs."""
        torch.manual_seed(seed)
        model, inputs = self.model(), self.inputs()
        randomize(model)
        prepare(model, *inputs)
        return model, inputs


def registry() -> dict:
    """The problems by name: the one place where this file asks for them."""
    import models

    return models.PROBLEMS


def contest_of(problem, *, device="cpu", batch_size=None, dtype=torch.float32, peers=None) -> Contest:
    """A problem, or the name of one, as a contest. peers: others than `PEERS`, name to `Peer` or to a
    function of the model."""
    problem = registry()[problem] if isinstance(problem, str) else problem

    def twin(variant, model):
        new = problem.ModelNew.from_eager(model)
        new.variant = variant
        return new

    return Contest(
        problem.name,
        problem.number,
        device,
        dtype,
        lambda: problem.Model(*problem.get_init_inputs()).to(device=device, dtype=dtype).train(),
        lambda: [
            problem.draw(batch_size or problem.input_shape[0], *problem.input_shape[1:], device=device).to(
                dtype
            )
        ],
        twin,
        tuple(name for name in problem.variants_on(device) if name != "eager"),
        problem.cases,
        problem.timed_cases,
        problem.operations,
        _peers(peers),
    )


def _peers(others) -> dict[str, Peer]:
    return PEERS | {
        name: peer if isinstance(peer, Peer) else Peer(peer) for name, peer in (others or {}).items()
    }


def randomize(model: nn.Module) -> None:
    """Parameters at random: what scales and shifts, from a normal distribution, because ones and zeros hide
    what is left out; what has several extents keeps its values' distribution, in another order."""
    with torch.no_grad():
        for p in model.parameters():
            if sum(extent > 1 for extent in p.shape) < 2 or bool((p == p.flatten()[0]).all()):
                nn.init.normal_(p)
            else:
                p.copy_(p.flatten()[torch.randperm(p.numel(), device=p.device)].view(p.shape))


def with_parameters_of(module: Callable, model: nn.Module) -> Callable:
    """`module`, its parameters and buffers replaced by those of `model`, by name.

    Raises ValueError if names or shapes differ.
    """
    theirs = dict(model.named_parameters(remove_duplicate=False)) | dict(
        model.named_buffers(remove_duplicate=False)
    )
    if not isinstance(module, nn.Module):
        if theirs:
            raise ValueError(
                f"expected a torch.nn.Module with the parameters {', '.join(theirs)}, got {module!r}"
            )
        return module
    ours = {
        name.replace("_orig_mod.", ""): (name, t)
        for tensors in (
            module.named_parameters(remove_duplicate=False),
            module.named_buffers(remove_duplicate=False),
        )
        for name, t in tensors
    }
    wrong = [f"{name} is missing" for name in theirs if name not in ours]
    wrong += [f"{name} is no parameter of the reference" for name in ours if name not in theirs]
    wrong += [
        f"{name} has the shape {tuple(ours[name][1].shape)}, expected {tuple(t.shape)}"
        for name, t in theirs.items()
        if name in ours and ours[name][1].shape != t.shape
    ]
    if wrong:
        raise ValueError(
            f"the parameters of {type(module).__name__} are not those of {type(model).__name__}: {'; '.join(wrong)}"
        )
    for name, t in theirs.items():
        *path, key = ours[name][0].split(".")
        owner = functools.reduce(getattr, path, module)  # what torch.jit.script makes has no get_submodule
        (owner._parameters if key in owner._parameters else owner._buffers)[key] = t
    return module


# --------------------------------------------------------------------------------------------------- checking


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


_AS_DRAWN = "random parameters", lambda model, *inputs: None
_LARGE_MEAN = "large mean", lambda model, *inputs: [t.add_(100) for t in inputs if t.is_floating_point()]


def check(
    problem, variant: str = "auto", *, device="auto", phase="train_dx", batch_size=None, dtype=torch.float32, seed=None
) -> Check:  # fmt: skip
    """Is `variant` of `problem` (a name, a `Problem` or a `Contest`) right, to the tolerance of eager
    PyTorch, and honest? By default what runs by default, with every gradient, on a GPU where there is one.

    A problem that is given by its name has a batch that suits a small machine on a CPU; where there is no GPU, a line
    says how its CUDA kernels are checked all the same. Inputs and parameters are random, from `seed` (a new one if None). Ours is checked on them, on an input
    with a large mean and on the problem's cases, once between guard zones, where a launcher that writes past its
    tensors is found (loader/guarded.py); a peer on the mean of several draws, and, where an output of
    one value proves nothing, on the first of the cases, too, with gradients. Raises ValueError for an unknown
    phase; what the variant raises becomes a complaint.
    """
    if phase not in PHASES:
        raise ValueError(f"expected a phase out of {PHASES}, got {phase!r}")
    if not isinstance(problem, Contest):
        device = pick_device(device)[0]
        if isinstance(problem, str):
            problem = registry()[problem]
            if device == "cpu":
                batch_size = batch_size or problem.cpu_batch_size
                if not torch.cuda.is_available():
                    print(_without_a_gpu(problem))
        problem = contest_of(problem, device=device, batch_size=batch_size, dtype=dtype)
    contest, seed = problem, new_seed() if seed is None else seed
    result, before = Check(variant, seed, [], []), surroundings(contest.model())

    def errors(case: tuple[str, Callable], phase: str, number: int, cancelling: bool) -> list[Error]:
        label, prepare = case
        model, inputs = contest.drawn(seed + number, prepare)
        module = contest.contestant(variant, model)
        found, complaints = checks.errors_of(label, module, model, inputs, phase, cancelling=cancelling)
        result.complaints.extend(text for text in complaints if text not in result.complaints)
        return found

    try:
        telling = _AS_DRAWN if not contest.cases or tells(contest, seed) else contest.cases[0]
        if variant in contest.peers:
            cases = [(_AS_DRAWN, phase)]
            if telling is not _AS_DRAWN:
                cases.append((telling, phase if has_backward(phase) else "train"))
            for case, of_phase in cases:
                drawn = functools.partial(errors, case, of_phase)
                result.errors.extend(checks.judged_on_draws(drawn, lucky=False))
            put_back(before)
            return result
        for case in (_AS_DRAWN, _LARGE_MEAN, *contest.cases):
            drawn = functools.partial(errors, case, phase)
            with guarded.zones() if case in (_AS_DRAWN, telling) else contextlib.nullcontext([]) as written:
                result.errors.extend(checks.judged_on_draws(drawn))
            result.complaints.extend(text for text in written if text not in result.complaints)
        model, inputs = contest.drawn(seed, telling[1])
        twin = contest.twin(variant, model)
        result.complaints.extend(dishonesty(twin, model, inputs, phase, contest.inputs))
    except Exception as error:  # whatever a variant raises is the finding
        message = (str(error).strip() or "no message").splitlines()[0]
        result.complaints.append(f"raised {type(error).__name__}: {message}")
    result.complaints.extend(changes(before))
    put_back(before)
    return result


def _without_a_gpu(problem) -> str:
    """How the CUDA kernels of a problem are checked on a CPU."""
    adopted = f"ADOPT={problem.file} ", "test_adopt.py -k without_a_gpu"
    setting, test = adopted if problem.file else ("", f"test_emulated.py -k {problem.name}")
    return f"no GPU: the CPU's kernels are checked; the CUDA kernels, emulated, by: {setting}python -m pytest -s tests/{test}"


@torch.no_grad()
def tells(contest: Contest, seed: int) -> bool:
    """Does an output on random parameters prove anything? A single value, which one of the problems gives,
    doesn't."""
    model, inputs = contest.drawn(seed)
    out = model.eval()(*inputs)
    return bool((out != out.flatten()[0]).any())


def new_seed() -> int:
    return int.from_bytes(os.urandom(3), "big")


# -------------------------------------------------------------------------------------------------- comparing


def pick_device(device: str = "auto") -> tuple[str, str]:
    """Gives "cuda" where this torch sees a GPU and there is a compiler for it, else "cpu"; and a line that
    says why."""
    from torch.utils.cpp_extension import CUDA_HOME

    if device != "auto":
        return device, f"{device}, as asked for"
    if torch.cuda.is_available():
        name = torch.cuda.get_device_name()
        if CUDA_HOME:
            return "cuda", name
        return "cpu", f"CPU: there is a GPU ({name}), but no nvcc to build its kernels with"
    if output_of("nvidia-smi", "-L"):
        return (
            "cpu",
            f"CPU: there is a GPU, but torch {torch.__version__} (CUDA {torch.version.cuda}) can't use it",
        )
    return "cpu", f"CPU: {cpu_name()}, {torch.get_num_threads()} threads"


def variants_of(problem, device: str, peers=()) -> tuple[str, ...]:
    """What a comparison shows by default: the peers and ours. On a CPU without max-autotune, which takes
    minutes, and TF32's."""
    skipped = () if device == "cuda" else ("max-autotune", EXACT)
    names = (*PEERS, *peers, *problem.variants_on(device))
    return tuple(name for name in dict.fromkeys(names) if name not in skipped)


def compare(
    problem, *, device="auto", phase="forward", batch_size=None, variants=None, peers=None, dtype=torch.float32, seed=None,
    tell=None, quick=False,
) -> list[dict]:  # fmt: skip
    """Checks the variants of `problem` (a name or a `Problem`) and its peers and times them: a row each, as
    described above.

    batch_size defaults to the problem's own on a GPU, and to one that suits a small machine on a CPU. peers:
    others than `PEERS`, name to `Peer` or to a function of the model. tell(text) is called once before each
    check, and once before the timing. quick: checks are made on one sample of half the extents, and timing is short; what
    timed calls give is judged all the same. Forgets what torch.compile compiled before.
    """
    problem = registry()[problem] if isinstance(problem, str) else problem
    device = pick_device(device)[0]
    batch_size = batch_size or (problem.cpu_batch_size if device == "cpu" else None)
    contest = contest_of(problem, device=device, batch_size=batch_size, dtype=dtype, peers=peers)
    names, checked = variants or variants_of(problem, device, peers or ()), contest
    if quick:
        _, channels, *extents = problem.input_shape
        small = dataclasses.replace(problem, input_shape=(1, channels, *(n // 2 if n >= 32 else n for n in extents)))  # fmt: skip
        checked = contest_of(small, device=device, dtype=dtype, peers=peers)
    return _rows(contest, phase, names, bool(variants), seed, tell, checked, 2.0 if quick else 6.0)


def compare_pair(
    reference: nn.Module, candidate: Callable, make_inputs: Callable[[], Sequence[Tensor]], *, device="auto",
    phases=("forward_grad", "train"), name=None, variants=None, peers=None, cases=(), seed=None, tell=None,
) -> list[dict]:  # fmt: skip
    """Checks and times `candidate`, the faster twin of `reference`, beside `PEERS`: a row for each phase and
    contestant, as `compare` gives.

    make_inputs() draws fresh inputs, a tensor or a list; the two are called with them. Parameters are matched by
    name; both are copied, and checked with random parameters, in the mode the reference is in. Dropout is judged as
    a model's last step; a pair that drops elsewhere is compared in eval mode. peers, variants (out of "candidate" and
    the peers' names), seed and tell are as in `compare`; cases: (label, prepare(model, *inputs)), situations that
    random parameters don't reach.

    Raises ValueError where the parameters don't match, or where the reference can't be judged by: it fails in one of the
    phases, changes its inputs, or is random but for a dropout at its end; TypeError if it is no module, can't be
    copied, or returns something else than one tensor of real floating-point numbers.
    """
    if not isinstance(reference, nn.Module):
        raise TypeError(f"expected a module as the reference, got {reference!r}")
    if not callable(make_inputs):
        raise TypeError(f"expected make_inputs to be a function, got a {type(make_inputs).__name__}")
    device = pick_device(device)[0]

    def inputs():
        made = checks.inputs_of(make_inputs())
        if not made or not all(isinstance(t, Tensor) for t in made):
            raise TypeError(f"expected make_inputs to give a tensor, or a list of them, got {made!r}")
        return [t.to(device, copy=True) for t in made]

    dtype = next((t.dtype for t in inputs() if t.is_floating_point()), torch.float32)

    def twin(variant, model):
        module = copy.deepcopy(candidate)
        if isinstance(module, nn.Module):
            module.to(device).train(model.training)
        return with_parameters_of(module, model)

    contest = Contest(
        name or type(candidate).__name__, None, device, dtype, lambda: copy.deepcopy(reference).to(device), inputs, twin,
        ("candidate",), cases, peers=_peers(peers),
    )  # fmt: skip
    for phase in phases:
        _judge_reference(contest, phase)
    with _put_back(reference):
        twin("candidate", contest.model())  # raises what does not match
    skipped = () if device == "cuda" else ("max-autotune", EXACT)
    names = variants or [name for name in (*contest.peers, "candidate") if name not in skipped]
    return [row for phase in phases for row in _rows(contest, phase, names, bool(variants), seed, tell)]


def _judge_reference(contest: Contest, phase: str) -> None:
    """Raises what `compare_pair` promises where the reference can't be judged by in this phase."""
    try:
        model, inputs = contest.model(), contest.inputs()
        before = [t.clone() for t in inputs]
        out = model(*inputs)
        if not isinstance(out, Tensor):
            raise TypeError(f"expected the reference to return one tensor, got a {type(out).__name__}")
        if not out.is_floating_point():
            raise TypeError(f"expected the reference to return floating-point numbers, got {out.dtype}")
        if any(not torch.equal(t, was) for t, was in zip(inputs, before) if not t.isnan().any()):
            raise ValueError("expected a reference that leaves its inputs as they are")
        copy.deepcopy(model)
    except (RuntimeError, IndexError) as error:
        raise TypeError(f"expected a reference that runs and can be copied: {error}") from error
    eager, g = checks.as_contestant(model, model), torch.ones_like(out) if has_backward(phase) else None
    if g is not None and not (
        eager.leaves or phase == "train_dx" and any(t.is_floating_point() for t in inputs)
    ):
        raise ValueError(
            f"expected floating-point numbers that have a gradient in the phase {phase}: parameters, or in train_dx inputs"
        )
    outs = []
    try:
        for _ in range(2):
            with checks.kept_buffers(model):
                outs.append(eager.call(inputs, phase, g)[0])
    except RuntimeError as error:
        raise ValueError(f"expected a reference that runs in the phase {phase}: {error}") from error
    try:
        checks.reference_of(model, inputs, phase, g, None)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        raise ValueError(f"expected a reference that runs in float64, too: {error}") from error
    whole = outs[0]
    if p := checks.dropout_of(model):  # but for what each dropped
        whole = Probe(model, model, inputs, "forward").without_dropout()(*inputs)
        outs = [torch.where(each != 0, each, whole / ((1 - p) or 1)) for each in outs]
    one, other = (t.nan_to_num() for t in outs)
    near = max(1e-3, 4 * torch.finfo(out.dtype).eps) * whole.nan_to_num().abs()
    if out.numel() and bool(((one - other).abs() > near.max()).any()):
        raise ValueError(
            "expected a reference whose only random step is an nn.Dropout at its end; compare others in eval mode"
        )


@contextlib.contextmanager
def _put_back(model: nn.Module):
    """What changes in its context of the judge's surroundings is as before."""
    before = surroundings(model)
    try:
        yield
    finally:
        put_back(before)


@contextlib.contextmanager
def _quiet_compiler():
    """Without the tables of what torch.compile's max-autotune tried."""
    from torch._inductor import config

    tables = {"autotune_num_choices_displayed": 0, "max_autotune_report_choices_stats": False}
    with config.patch({name: value for name, value in tables.items() if hasattr(config, name)}):
        yield


@_quiet_compiler()
def _rows(
    contest: Contest, phase: str, names: Iterable[str], asked: bool, seed, tell, checked: Contest | None = None, seconds=6.0
) -> list[dict]:  # fmt: skip
    """A row for each of the contestants `names`, for each kind of input. asked: all are wanted, even those
    that add nothing. checked: the contest to be checked, if it is another than the one to be timed."""
    seed, tell = new_seed() if seed is None else seed, tell or (lambda text: None)
    torch._dynamo.reset()  # else old shapes count towards the limit past which it runs eager in silence
    torch.manual_seed(seed)
    model, inputs = contest.model(), contest.inputs()
    rows = []
    for variant in names:
        if variant == EXACT and not asked and not any(row["peer"] and row["ok"] is False for row in rows):
            continue
        tell(f"{contest.name} {phase}: checking {variant}")
        obstacle, plan = _plan(contest, variant, model, inputs, phase)
        if obstacle:
            result = Check(variant, seed, [], [obstacle])
        else:
            result = check(checked or contest, variant, phase=phase, seed=seed)
        rows.append(_row(contest, variant, result, model, inputs, phase) | {"plan": plan})
        if obstacle:
            rows[-1]["ok"] = None
    _, plan = _plan(contest, "auto", model, inputs, phase)
    default = contest.variants[0] if len(contest.variants) == 1 else (plan or "").split(":")[0]
    for row in rows:
        row["auto"] = row["variant"] in (default, "auto")
    tell(f"{contest.name} {phase}: timing")
    timed = [row for row in rows if (row["peer"] and row["ok"] is not None) or row["ok"]]
    _time_rows(contest, phase, timed, model, contest.inputs, seconds)
    for label, prepare in contest.timed_cases if has_backward(phase) else ():
        model = contest.model()

        def prepared(model=model, prepare=prepare):
            inputs = contest.inputs()
            prepare(model, *inputs)
            return inputs

        copies = [row | {"inputs": label} for row in timed if row["ok"] or row["peer"]]
        _time_rows(contest, phase, copies, model, prepared, seconds)
        rows += copies
    return rows


def _plan(contest: Contest, variant: str, model, inputs, phase: str) -> tuple[str | None, str | None]:
    """Why a variant of ours can't run, or None; and what it runs in words, if it says so."""
    if variant in contest.peers:
        return None, None
    try:
        with _put_back(model), torch.set_grad_enabled(phase != "forward"):
            twin = contest.twin(variant, model)
            return None, str(twin.plan(*inputs)) if hasattr(twin, "plan") else None
    except (RuntimeError, ValueError) as error:
        return str(error), None


def _time_rows(
    contest: Contest, phase: str, rows: list[dict], model: nn.Module, draw: Callable[[], list[Tensor]], seconds: float
) -> None:  # fmt: skip
    """Puts the times of the rows' variants into them, and what is wrong with what timed calls of ours gave: then they
    have none."""
    if not rows:
        return
    device, deal, inputs = contest.device, Deal(model, draw), draw()
    with torch.no_grad():
        g = torch.randn_like(model(*inputs)) if has_backward(phase) else None
    deal.restore()
    calls: dict[str, Call] = dict.fromkeys(row["variant"] for row in rows)
    ours, failed = {row["variant"] for row in rows if not row["peer"]}, {}

    def made(name: str) -> Call:
        contestant = contest.contestant(name, model)
        if name in ours:
            deal.keep(contestant.module)
        return Call.of(contestant, inputs, phase, g, deal)

    for name in calls:
        if name not in ours:  # who compiles may change its surroundings
            calls[name] = made(name)
            with _settings(calls[name]):
                calls[name]()
    before = surroundings(model)
    for name in ours:
        calls[name] = made(name)
        deal.watch(calls[name])
    deal.restore()
    timings, called, host, memory = {}, {}, {}, {}
    while calls:
        try:
            timings = time(calls, device, seconds)
            if device == "cuda":
                called, host = call_times(calls, device), host_times(calls, device)
                memory = {name: extra_memory(call) for name, call in calls.items()}
            break
        except Exception as error:  # of ours it is the finding; without it again
            name = next((name for name, call in calls.items() if call is deal.current), None)
            if name not in ours:
                raise
            failed[name] = [f"a timed call raised {type(error).__name__}: {error}"]
            del calls[name], deal.judged[deal.current]
        finally:
            changed = changes(before)
            put_back(before)
    for row in rows:
        name = row["variant"]
        wrong = failed.get(name) or (deal.verdict(calls[name]) + changed if name in ours else [])
        if wrong:
            row.update(dict.fromkeys(_TIMES), ok=False, reason="; ".join(wrong))
            continue
        timing, eager = timings[name], timings.get("eager")
        row.update(median_ms=timing.median, low_ms=timing.low, high_ms=timing.high, runs=timing.runs)
        row["call_ms"] = called[name].median if device == "cuda" else timing.median
        row["host_us"] = host[name] if device == "cuda" else timing.median * 1e3
        row["memory_mb"] = memory.get(name)
        row["speedup_vs_eager"] = eager.median / timing.median if eager else None


_TIMES = "median_ms", "low_ms", "high_ms", "runs", "call_ms", "host_us", "memory_mb", "speedup_vs_eager"


def _row(contest: Contest, variant: str, result: Check, model, inputs: list[Tensor], phase: str) -> dict:
    worst, peer = result.worst, variant in contest.peers
    figures = (
        (worst.norm, worst.max, worst.eager_norm, worst.eager_max, 2 * worst.share) if worst else (None,) * 5
    )
    names = ("error_norm", "error_max", "eager_error_norm", "eager_error_max", "error_vs_eager")
    with torch.no_grad():
        tensors = [*inputs, model(*inputs)]
    moved = sum(t.numel() * t.element_size() for t in tensors)
    return {
        "problem": contest.name,
        "number": contest.number,
        "variant": variant,
        "peer": peer,
        "auto": False,
        "device": contest.device,
        "dtype": str(contest.dtype).removeprefix("torch."),
        "phase": phase,
        "inputs": "default",
        "shape": list(inputs[0].shape),
        "ok": None
        if peer and result.complaints
        else result.ok or variant == "eager",  # the rule's own measure
        "reason": "; ".join(result.failures) or None,
        **dict.fromkeys(_TIMES),
        "quantity": worst and worst.quantity,
        "case": worst and worst.case,
        **{
            name: value if value is not None and math.isfinite(value) else None
            for name, value in zip(names, figures)
        },
        "bytes": moved,
        "floor_ms": floor_of(contest, moved, contest.operations(model, *inputs))
        if contest.device == "cuda" and not has_backward(phase)
        else None,
        "plan": None,
        "seed": result.seed,
    }


def floor_of(contest: Contest, moved: int, operations: int) -> float | None:
    """Milliseconds that the GPU needs at least to move so many bytes and do so many operations; None for one
    that isn't known."""
    if contest.device != "cuda" or torch.cuda.get_device_name() not in GPUS:
        return None
    bandwidth, rates = GPUS[torch.cuda.get_device_name()]
    return max(moved / bandwidth, operations / rates[str(contest.dtype).removeprefix("torch.")]) * 1e3
