"""What is right: the error rule, by which a module is held to its reference, output and gradients.

    errors, complaints = errors_of("random parameters", twin, model, x, "train")

Let r be the reference in float64 on the same inputs and weights. A module is right if its output and every
gradient is at most twice as far from r as eager PyTorch is in the dtype at hand, both as ‖out − r‖/‖r‖ and as
max |out − r|, plus 4 units in the last place of the largest value.

A single draw can be lucky for eager, so a limit that is missed is judged again on the mean of several draws
(see `judged_on_draws`). Where the terms of a gradient cancel, there is little left to measure errors by: then
the 4 units are those of what was summed, or more exactly 4 times what is lost if the gradient of each
intermediate result, all of which eager stores, is rounded once to the dtype at hand and all else is done in
float64. Where nothing cancels, that is less than 4 units of the largest value, and changes nothing.

Where magnitudes leave a gap (a mask of -1e9 beside logits), what lies below it is judged by itself. What is
not finite in float64 or in eager must be there, too, as it is in one of them.

Which branch a comparison takes (relu, min, clamp, a max pool, …) may hang on rounding, and either is right:
there the check sends no gradient (see `Edges`). Dropout is judged as a model's last step, by which of its
results are zero.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from statistics import fmean
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.overrides import TorchFunctionMode

# no_grad; training mode as a fresh model is, no backward; forward and backward without the inputs' gradients;
# with them
PHASES = ("forward", "forward_grad", "train", "train_dx")
PIECE = 16  # samples that the reference takes at a time, where it treats each on its own
DRAWS, MANY_DRAWS, NEAR = 4, 16, 4.0  # see `judged_on_draws`
GAP = 2.0**10  # between magnitudes that are judged apart
ENOUGH = 1000  # pairs, for what they say of chance

# ---------------------------------------------------------------------------------------------------- calling


def has_backward(phase: str) -> bool:
    return phase in ("train", "train_dx")


def inputs_of(x: Tensor | Sequence[Tensor]) -> list[Tensor]:
    """A model's inputs as a list; a single tensor is one."""
    return [x] if isinstance(x, Tensor) else list(x)


def leaves_of(module: Callable, model: nn.Module) -> dict[str, Tensor]:
    """The trainable parameters of `module` by the names that they have in `model`; the model's own where it
    shares them unseen."""
    wanted = [name for name, p in model.named_parameters() if p.requires_grad]
    if not isinstance(module, nn.Module):
        return {name: model.get_parameter(name) for name in wanted}
    found = {
        name.replace("_orig_mod.", ""): p for name, p in module.named_parameters()
    }  # torch.compile's prefix
    return {name: found.get(name, model.get_parameter(name)) for name in wanted}


def call(
    module: Callable, leaves: dict[str, Tensor], x: Tensor | Sequence[Tensor], phase: str, g: Tensor | None, *,
    backward: bool = False,
) -> tuple[Tensor, dict[str, Tensor]]:  # fmt: skip
    """The output, and for the incoming gradient g the gradients of `leaves` (in the phase train_dx also of
    the inputs), by name; backward: as out.backward(g) adds them up.

    x is one input or a list. Raises RuntimeError if the output needs no gradient where a leaf does.
    """
    inputs = inputs_of(x)
    if phase == "forward":
        with torch.no_grad():
            return module(*inputs), {}
    if phase == "train_dx":
        inputs = [t.detach().requires_grad_() if t.is_floating_point() else t for t in inputs]
        names = ["x"] if len(inputs) == 1 else [f"x{i}" for i in range(len(inputs))]
        leaves = leaves | {name: t for name, t in zip(names, inputs) if t.requires_grad}
    out = module(*inputs)
    if leaves and not out.requires_grad:
        raise RuntimeError("the output needs no gradient")
    if not has_backward(phase):
        return out.detach(), {}
    if backward:
        return out.detach(), _added_up(out, leaves, g)
    gradients = torch.autograd.grad(out, list(leaves.values()), g, allow_unused=True, materialize_grads=True)
    return out.detach(), dict(zip(leaves, gradients))


def _added_up(out: Tensor, leaves: dict[str, Tensor], g: Tensor) -> dict[str, Tensor]:
    """The gradients of `leaves` as out.backward(g) leaves them there, from where they are taken again."""
    before = [t.grad for t in leaves.values()]
    for t in leaves.values():
        t.grad = None
    try:
        out.backward(g)
        return {name: torch.zeros_like(t) if t.grad is None else t.grad for name, t in leaves.items()}
    finally:
        for t, grad in zip(leaves.values(), before):
            t.grad = grad


@dataclasses.dataclass(frozen=True)
class Contestant:
    """A module as it is judged and timed: its trainable parameters by the reference's names; the layout of
    what it is given; may the GPU's library round its operands to TF32 where PyTorch's settings let it?"""

    module: Callable
    leaves: dict[str, Tensor]
    channels_last: bool = False
    tf32: bool = True

    def given(self, inputs: Sequence[Tensor]) -> list[Tensor]:
        return [channels_last(t) for t in inputs] if self.channels_last else list(inputs)

    def settings(self) -> contextlib.AbstractContextManager:
        return contextlib.nullcontext() if self.tf32 else without_tf32()

    def call(
        self, inputs: Sequence[Tensor], phase: str, g: Tensor | None
    ) -> tuple[Tensor, dict[str, Tensor]]:
        with self.settings():
            return call(self.module, self.leaves, self.given(inputs), phase, g)


def as_contestant(module: Callable, model: nn.Module) -> Contestant:
    return module if isinstance(module, Contestant) else Contestant(module, leaves_of(module, model))


def channels_last(t: Tensor) -> Tensor:
    """A batch of images or volumes with the channels' values of a place side by side; anything else as it
    is."""
    formats = {4: torch.channels_last, 5: torch.channels_last_3d}
    return t.contiguous(memory_format=formats[t.dim()]) if t.dim() in formats else t


@contextlib.contextmanager
def without_tf32() -> Iterator[None]:
    """Convolutions and products in full float32, by PyTorch's older settings, or by the newer where the older
    can't be read."""
    library, products = torch.backends.cudnn, torch.backends.cuda.matmul
    settings = [(library, "allow_tf32", False), (products, "allow_tf32", False)]
    try:
        before = [getattr(part, name) for part, name, _ in settings]
    except RuntimeError:
        settings = [(part, "fp32_precision", "ieee") for part in (library.conv, library.rnn, products)]
        before = [getattr(part, name) for part, name, _ in settings]
    for part, name, value in settings:
        setattr(part, name, value)
    try:
        yield
    finally:
        for (part, name, _), value in zip(settings, before):
            setattr(part, name, value)


def named(out: Tensor, gradients: dict[str, Tensor]) -> dict[str, Tensor]:
    """What `call` gives, under the names that errors go by."""
    return {"output": out, **{f"gradient of {name}": t for name, t in gradients.items()}}


# --------------------------------------------------------------------------------------------------- the rule


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
        known = all(math.isfinite(value) for pair in pairs for value in pair)
        return max(0.0 if e == 0 else e / limit if limit and known else math.inf for e, limit in pairs)

    def __str__(self):
        return (
            f"{self.case}, {self.quantity}: error {self.norm:.2g} (limit {self.limit_norm:.2g}, eager {self.eager_norm:.2g}), "
            f"max {self.max:.2g}{f' at {list(self.place)}' if self.place else ''} "
            f"(limit {self.limit_max:.2g}, eager {self.eager_max:.2g})"
        )


def judged_on_draws(errors: Callable[[int, bool], list[Error]], *, lucky: bool = True) -> list[Error]:
    """The errors by which a case is judged: errors(number, cancelling) gives those of one draw of everything
    random.

    Of the first draw; where that misses a limit, of the mean of `DRAWS`, because rounding errors of one can
    be lucky for eager; and where that misses by less than `NEAR` times, of `MANY_DRAWS` that count alike,
    because a mean is that of the worst conditioned. What is worse than twice in all of them stays worse. Not
    lucky: a first draw is not enough to pass, either.
    """
    found = errors(0, False) if lucky else []
    for count in (DRAWS, MANY_DRAWS):
        worst = max((error.share for error in found), default=0.0)
        if (found or lucky) and worst <= 1 or count == MANY_DRAWS and worst > NEAR:
            break
        draws = list(zip(*(errors(number, True) for number in range(count))))
        found = [mean_of(same) for same in draws]
        if count == MANY_DRAWS and all(error.share <= NEAR for error in found):
            found = [mean_of(same, alike=True) for same in draws]
    return found


def mean_of(draws: Iterable[Error], alike: bool = False) -> Error:
    """The mean of several draws' errors and limits, and the place in the first. alike: weighted so that no
    draw is larger than another, error and limit together."""
    draws = list(draws)
    weights = [[1.0, 1.0] for _ in draws]
    if alike:
        sums = [(draw.norm + draw.limit_norm, draw.max + draw.limit_max) for draw in draws]
        weights = [[1 / size if size else 1.0 for size in row] for row in sums]

    def mean(name: str) -> float:
        column = [row[name.endswith("max")] for row in weights]
        return sum(weight * getattr(draw, name) for weight, draw in zip(column, draws)) / sum(column)

    label = f"{draws[0].case}, mean of {len(draws)}"
    return Error(label, draws[0].quantity, *map(mean, Error._fields[2:-1]), draws[0].place)


def distance(out: Tensor, r: Tensor) -> tuple[float, float, tuple[int, ...]]:
    """`norm`, `max` and `place` of an Error."""
    if not r.numel():
        return 0.0, 0.0, ()
    difference = _in(torch.float64, out) - r
    difference = difference.abs() if r.is_complex() else difference.abs_()
    place = tuple(int(index) for index in torch.unravel_index(difference.argmax(), r.shape))
    return (difference.norm() / (r.norm().item() or 1.0)).item(), difference[place].item(), place


def judged(
    label: str, quantity: str, r: Tensor, eager: Tensor, ours: Tensor, dtype: torch.dtype, lost: Sequence[Tensor] = ()
) -> Error:  # fmt: skip
    """The Error of our result beside eager's, both of `dtype`, r being the reference: of the magnitudes that are
    judged apart, those nearest to their limit.

    lost: what rounding loses where terms cancel (see `lost_to_rounding`). Raises ValueError if shapes differ.
    """
    for t in (eager, ours):
        if t.shape != r.shape:
            raise ValueError(f"expected the shape {tuple(r.shape)}, got {tuple(t.shape)}")
    r, eager, ours = _finite(r, eager, ours)
    found = []
    for chosen in magnitudes(r):
        tensors = r, eager, ours, *lost
        if chosen is not None:
            tensors = [t.masked_fill(~chosen, 0) for t in tensors]
        found.append(_judged_alike(label, quantity, *tensors[:3], dtype, tensors[3:]))
    return max(found, key=lambda error: error.share)


def _judged_alike(label, quantity, r, eager, ours, dtype, lost) -> Error:
    theirs, of_ours, ulp = distance(eager, r), distance(ours, r), torch.finfo(dtype).eps
    norm, size = (r.norm().item(), r.abs().max().item()) if r.numel() else (0.0, 0.0)
    lost_norm = fmean(t.norm().item() for t in lost) if lost else 0.0
    lost_max = fmean(t.abs().max().item() for t in lost) if lost else 0.0
    summed = max(norm, lost_norm / ulp)
    share = (norm or 1.0) / (summed or 1.0)  # errors in norm are shares of what was summed
    limits = 2 * share * theirs[0] + 4 * ulp * bool(summed), 2 * theirs[1] + 4 * max(ulp * size, lost_max)
    figures = share * of_ours[0], of_ours[1], share * theirs[0], theirs[1]
    return Error(label, quantity, *figures, *limits, of_ours[2])


def _finite(r: Tensor, eager: Tensor, ours: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The three, with zeros where one is not finite and ours is as eager's or as r. Where only eager's is not, it says
    nothing of how near ours must be: r stands for it."""
    odd = ~(r.isfinite() & eager.isfinite() & ours.isfinite())
    if odd.any():
        settled = odd & (equal(ours, eager) | equal(ours, r))
        r, eager, ours = (t.masked_fill(settled, 0) for t in (r, eager, ours))
        eager = torch.where(eager.isfinite(), eager, r)
    return r, eager, ours


def equal(a: Tensor, b: Tensor) -> Tensor:
    """Where a and b hold the same number, or both none."""
    return (a == b) | (a.isnan() & b.isnan())


def magnitudes(r: Tensor) -> list[Tensor | None]:
    """The elements of r that are judged together, as masks: all (None), or those above and below each gap between
    their magnitudes, below which lie two at least, and not only a few. Zeros belong to the smallest."""
    sample = r.flatten()[:: max(1, r.numel() >> 20)].abs()
    sample = sample[(sample > 0) & sample.isfinite()].double()
    if len(sample) < 3:
        return [None]
    # Where a few with the smallest and the largest have no gap, all have none; to sort all takes longer than the rest of a check.
    few = torch.cat([sample[::16], *(t.view(1) for t in sample.aminmax())]).sort().values
    if (few[1:] <= GAP * few[:-1]).all():
        return [None]
    sample = sample.sort().values
    gaps = (sample[1:] > GAP * sample[:-1]).nonzero().flatten().tolist()
    cuts, below = [], 0
    for gap in gaps:
        if gap + 1 - below >= max(2, len(sample) / 64):
            cuts.append((sample[gap] * sample[gap + 1]).sqrt().item())
            below = gap + 1
    if not cuts:
        return [None]
    size, edges = r.abs(), [-1.0, *cuts, math.inf]
    return [(size > low) & (size <= high) for low, high in zip(edges, edges[1:])]


def errors_of(
    label: str,
    module: Callable,
    model: nn.Module,
    x: Tensor | Sequence[Tensor],
    phase: str,
    *,
    cancelling: bool = False,
) -> tuple[list[Error], list[str]]:
    """The errors of `module` on x beside those of `model`, the reference being `model` in float64, and
    complaints.

    `module` has the parameters of `model`, a reference; x is one input or a list; label names the case;
    cancelling: gradients are judged by the size of what is summed. Uses torch's random numbers.
    """
    inputs, g = inputs_of(x), gradient_for(model, x, phase)
    contestant, results = as_contestant(module, model), []
    # Ours first: eager's result is not there to be found.
    for run in (contestant, as_contestant(model, model)):
        with kept_buffers(model, run.module):
            results.append(named(*run.call(inputs, phase, g)))
    found, complaints = errors_between(label, *results, model, inputs, phase, g, cancelling=cancelling)
    if p := dropout_of(model):
        plain, keep = reference_of(model, inputs, "forward", None, None)[0], results[0]["output"] != 0
        with kept_buffers(model, contestant.module):
            again = contestant.call(inputs, "forward", None)[0] != 0
        bad = [*bad_mask(keep, plain != 0, p), *_same_mask(keep, again, plain != 0, p)]
        complaints += [f"{label}: {text}" for text in bad]
    return found, complaints


def gradient_for(model: nn.Module, x: Tensor | Sequence[Tensor], phase: str) -> Tensor | None:
    """A random incoming gradient, zero where rounding decides what it meets (see `Edges`); None in a phase without
    backward."""
    if not has_backward(phase):
        return None
    inputs = inputs_of(x)
    dtype = dtype_of(model, inputs)
    out, _, edges = reference_of(model, inputs, "forward", None, None)
    lost = 4 * _share_lost(model, inputs, out, dtype)
    if lost > _near(dtype):  # a large mean, say, behind a normalisation
        edges = _reference_in(torch.float64, model, inputs, "forward", None, None, min(lost, _FARTHEST))[2]
    return torch.randn_like(out, dtype=dtype).masked_fill_(edges, 0)


def _share_lost(model: nn.Module, inputs: list[Tensor], r: Tensor, dtype: torch.dtype) -> float:
    """The largest error of `model` in `dtype`, r being its output in float64, as a share of the largest value."""
    rounded = _reference_in(dtype, model, [t.clone() for t in inputs], "forward", None, None)[0]
    error, size = (t.abs().nan_to_num(0.0, posinf=0.0) for t in (rounded.to(r.dtype) - r, r))
    rounded.untyped_storage().fill_(255)  # NaN: nothing to be found in freed memory
    return (error.max() / size.max()).item() if r.numel() and size.any() else 0.0


def errors_between(
    label: str, ours: dict, eager: dict, model: nn.Module, inputs: list[Tensor], phase: str, g: Tensor | None, *,
    cancelling: bool = False,
) -> tuple[list[Error], list[str]]:  # fmt: skip
    """What `errors_of` gives, of results that are there: ours, or some of them, and eager's, as `named` gives them, of
    `model` on `inputs`."""
    dtype, references = dtype_of(model, inputs), []
    for results in (ours, eager):  # with dropout each drops elements of its own choice
        keep = (results["output"] != 0) if dropout_of(model) else None
        if keep is not None or not references:
            references.append(named(*reference_of(model, inputs, phase, g, keep)[:2]))
    r, r_eager, keep = references[0], references[-1], (ours["output"] != 0) if dropout_of(model) else None
    lost = lost_to_rounding(model, inputs, phase, g, keep, r, dtype) if cancelling and g is not None else {}
    found, complaints = [], []
    for name, exact in r.items():
        if name not in ours:
            continue
        theirs = eager[name]
        if keep is not None:  # as far from its own reference as it is
            theirs = exact + (theirs - r_eager[name])
        found.append(judged(label, name, exact, theirs, ours[name], dtype, lost.get(name, ())))
        for kind in (type, lambda t: t.dtype):
            if kind(ours[name]) != kind(eager[name]):
                complaints.append(f"{label}: {name} is {kind(ours[name])}, expected {kind(eager[name])}")
    return found, complaints


@contextlib.contextmanager
def kept_buffers(*modules: Callable) -> Iterator[None]:
    """The modules' buffers are afterwards what they were before."""
    owners = [each for module in modules if isinstance(module, nn.Module) for each in module.modules()]
    before = [(m._buffers, key, t, t.detach().clone()) for m in owners for key, t in m._buffers.items() if t is not None]  # fmt: skip
    try:
        yield
    finally:
        for buffers, key, t, values in before:
            buffers[key] = t
            if not equal(t, values).all():
                t.data.copy_(values)


def dropout_of(model: nn.Module) -> float:
    """The probability with which `model` drops elements of its output, as its last step; 0 in eval."""
    drops = [module.p for module in model.modules() if isinstance(module, nn.Dropout) and module.training]
    return drops[0] if drops else 0.0


def bad_mask(keep: Tensor, visible: Tensor, p: float) -> Iterator[str]:
    """What is wrong with a dropout mask, where `visible` says that what it met was not zero: it keeps a share of
    1 - p of all, and of each sample and channel, and elements independently of each other."""
    for kept, total, where in _shares(keep & visible, visible):
        if abs(kept - total * (1 - p)) > 6 * math.sqrt(total * p * (1 - p)) + 6:
            yield f"kept {kept} of {total} elements{where}, expected a share of {1 - p:g}"
            return
    first, seen = (t.flatten()[: 1 << 22] for t in (keep, visible))
    if seen.sum() >= ENOUGH:
        # How often two elements at each distance are kept or dropped alike, as a sum of products of mean 0.
        m = torch.where(seen, first.float() - (1 - p), 0.0)
        pairs, both = (_correlations(t)[1:] for t in (m, seen.float()))
        unlikely = 8 * p * (1 - p) * both.clamp(min=0).sqrt() + 20 * max(p, 1 - p) ** 2  # Bernstein's
        far = (both >= ENOUGH) & (pairs.abs() > unlikely)
        if far.any():
            distance = int(far.nonzero()[0]) + 1
            yield f"elements at a distance of {distance} are not dropped independently of each other"


def _shares(kept: Tensor, visible: Tensor) -> Iterator[tuple[int, int, str]]:
    """How many of all, of each sample and of each channel were kept, the most unlikely one of each kind."""
    yield int(kept.sum()), int(visible.sum()), ""
    for dim, where in ((0, "of sample"), (1, "of channel"))[: kept.dim()]:
        of, total = (t.movedim(dim, 0).reshape(t.shape[dim], -1).sum(1) for t in (kept, visible))
        share = of.sum() / total.sum().clamp(min=1)
        index = int(((of - share * total).abs() / total.clamp(min=1).sqrt()).argmax()) if len(of) else 0
        if len(of):
            yield int(of[index]), int(total[index]), f" {where} {index}"


def _correlations(t: Tensor) -> Tensor:
    """The sum of products of elements of t at each distance."""
    return torch.fft.irfft(torch.fft.rfft(t, 2 * len(t)).abs().square(), 2 * len(t))[: len(t)]


def _same_mask(keep: Tensor, again: Tensor, visible: Tensor, p: float) -> Iterator[str]:
    if int(visible.sum()) * p * (1 - p) > 20 and torch.equal(keep, again):
        yield "two calls dropped the same elements"


# ---------------------------------------------------------------------------------------------- the reference


def dtype_of(model: nn.Module, inputs: list[Tensor]) -> torch.dtype:
    """The floating-point type at hand: the first input's that has one, else the first parameter's."""
    return next((t.dtype for t in (*inputs, *model.parameters()) if t.is_floating_point()), torch.float32)


def reference_of(
    model: nn.Module, x: Tensor | Sequence[Tensor], phase: str, g: Tensor | None, keep: Tensor | None
) -> tuple[Tensor, dict[str, Tensor], Tensor]:
    """Output, gradients and, in the phase forward, edges (see `Edges`) of `model` in float64 on the same
    inputs and weights.

    keep is the dropout mask; there is none in eval mode.
    """
    return _reference_in(torch.float64, model, inputs_of(x), phase, g, keep)


def edges_of(model: nn.Module, inputs: list[Tensor]) -> Tensor:
    """The edges alone, found in float32 at least, without TF32: their bounds are far wider than its rounding."""
    precise = torch.promote_types(dtype_of(model, inputs), torch.float32)
    with without_tf32():
        return _reference_in(precise, model, inputs, "forward", None, None)[2]


_FARTHEST = 2**-6


def _near(dtype: torch.dtype) -> float:
    """What `Edges` takes for close, as a share, where nothing is known of the model's own rounding."""
    return min(1024 * torch.finfo(dtype).eps, _FARTHEST)


def _reference_in(
    precise, model, inputs, phase, g, keep, near: float | None = None
) -> tuple[Tensor, dict[str, Tensor], Tensor]:
    """`reference_of` in the floating-point type `precise`; near: see `Edges`."""
    edges, near = [], near or _near(dtype_of(model, inputs))

    def run(double, *inputs):
        if phase != "forward":
            return double(*inputs)
        with Edges(near) as marks:
            out = double(*inputs)
            edges.append(marks.of(out))
        return forward_ad.unpack_dual(out).primal

    out, gradients = _computed_in(precise, model, inputs, phase, g, keep, run)
    return out, gradients, _joined(edges) if edges else torch.zeros_like(out, dtype=torch.bool)


def lost_to_rounding(
    model: nn.Module,
    inputs: list[Tensor],
    phase: str,
    g: Tensor,
    keep: Tensor | None,
    r: dict,
    dtype: torch.dtype,
) -> dict[str, list[Tensor]]:
    """By how much each gradient of the results r moves, in one or several draws, if those of intermediate results
    are rounded to dtype."""

    def run(double, *inputs):
        with _RoundedGradients(dtype):
            return double(*inputs)

    runs = (
        4 if r["output"].numel() < 10**5 else 1
    )  # of few elements the mean of several, because one may have lost little
    moved = [named(*_computed_in(torch.float64, model, inputs, phase, g, keep, run)) for _ in range(runs)]
    return {name: [each[name] - exact for each in moved] for name, exact in r.items() if exact.numel()}


def _computed_in(precise, model, inputs, phase, g, keep, run) -> tuple[Tensor, dict[str, Tensor]]:
    """`call` of run(model, *inputs), all in the type `precise`, a few samples at a time where the model treats
    each on its own."""
    double = copy.deepcopy(model)._apply(lambda t: _in(precise, t))
    for module in double.modules():
        if isinstance(module, nn.modules.dropout._DropoutNd):
            module.eval()
    inputs = [_in(precise, t) for t in inputs]
    apart, leaves = _treats_samples_alone(double, inputs), leaves_of(double, double)
    outs, of_inputs, of_leaves = [], [], {}
    for part in _pieces(len(inputs[0])) if apart else (...,):

        def piece(*inputs, part=part):
            out = run(double, *inputs)
            return out if keep is None else out * keep[part] / ((1 - dropout_of(model)) or 1)

        g_part = None if g is None else _in(precise, g[part])
        with _Precise(precise):
            out, gradients = call(piece, leaves, [t[part] for t in inputs], phase, g_part)
        outs.append(out)
        of_inputs.append({name: t for name, t in gradients.items() if name not in leaves})
        of_leaves = {name: gradients[name] + of_leaves.get(name, 0) for name in leaves if name in gradients}
    joined = {name: _joined([each[name] for each in of_inputs]) for name in of_inputs[0]}
    return _joined(outs), of_leaves | joined


def _in(precise: torch.dtype, t: Tensor) -> Tensor:
    """t in the type `precise`, or in the complex one made of it; as it is, if it holds no such numbers."""
    return t.to(precise.to_complex() if t.is_complex() else precise) if (t.is_complex() or t.is_floating_point()) else t  # fmt: skip


class _Precise(TorchFunctionMode):
    """What a model makes of another type than `precise` meanwhile, a constant or x.float(), gets that type: its values
    are rounded, but what follows is not."""

    def __init__(self, precise: torch.dtype):
        super().__init__()
        self.precise = precise

    def __torch_function__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        return _in(self.precise, out) if isinstance(out, Tensor) else out


def _pieces(count: int) -> list[slice]:
    return [slice(start, start + PIECE) for start in range(0, count, PIECE)]


def _joined(parts: list[Tensor]) -> Tensor:
    return torch.cat(parts) if len(parts) > 1 else parts[0]


def _treats_samples_alone(double: nn.Module, inputs: list[Tensor]) -> bool:
    """Is a sample's result the same without the others, and is nothing else changed by it?"""
    counts = {len(t) if t.dim() else 0 for t in inputs}
    if len(counts) > 1 or not counts or max(counts) <= PIECE:
        return False
    before = [t.clone() for t in double.buffers()]
    try:
        with torch.no_grad(), kept_buffers(double):
            alone, among = (double(*(t[:size] for t in inputs)) for size in (1, PIECE))
            if len(among) != PIECE or not all(map(torch.equal, before, double.buffers())):
                return False
    except Exception:  # its batch is fixed, or has to have more samples than one
        return False
    alone, among = (t[:1].nan_to_num() for t in (alone, among))
    return bool((alone - among).abs().max() <= 1e-9 * alone.abs().max()) if alone.numel() else False


class _RoundedGradients(TorchFunctionMode):
    """The gradient of each result is rounded to dtype, at a random place of its mantissa's range, on its way
    back."""

    def __init__(self, dtype: torch.dtype):
        super().__init__()
        self.dtype = dtype

    def __torch_function__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for t in out if isinstance(out, (tuple, list)) else [out]:
            if isinstance(t, Tensor) and t.requires_grad and t.grad_fn is not None:
                scale = 1 + torch.rand(()).item()
                t.register_hook(lambda g, scale=scale: self.rounded(g * scale) / scale)
        return out

    def rounded(self, g: Tensor) -> Tensor:
        if g.is_complex():
            return torch.complex(self.rounded(g.real), self.rounded(g.imag))
        return g.to(self.dtype).to(g.dtype)


# ------------------------------------------------------------------------------------------------ close calls


# Where the slope of a function of one value jumps.
_KINKS = {
    "relu": (0.0,), "leaky_relu": (0.0,), "prelu": (0.0,), "abs": (0.0,), "relu6": (0.0, 6.0),
    "hardsigmoid": (-3.0, 3.0), "hardswish": (-3.0, 3.0),
}  # fmt: skip
_BOUNDED = ("clamp", "clip", "clamp_min", "clamp_max", "hardtanh", "threshold")  # by its arguments
_BOUNDS = ("min", "max", "min_val", "max_val", "threshold")
_OF_TWO = ("min", "max", "minimum", "maximum")
_OF_MANY = {"max": 1, "amax": 1, "min": -1, "amin": -1}
_POOLS = ("max_pool", "adaptive_max_pool")


class Edges(TorchFunctionMode):
    """Marks the outputs whose gradient hangs on a comparison too close to call in the dtype at hand:
    `of(output)`, in its context.

    Where a comparison meets two values that differ, but by less than `near` of the sample's largest finite
    one, rounding decides which one gets the gradient, for eager as for us. Either is right, so the check
    sends no gradient there. Exact ties are not marked: those follow a rule.

    A mark is a tangent of forward-mode differentiation, so it reaches exactly the outputs that send a
    gradient back to it. If that is nearly all of them, as behind a normalisation, none is marked: without
    gradients there would be nothing to check.
    """

    def __init__(self, near: float):
        super().__init__()
        self.near = near
        self.level = forward_ad.dual_level()

    def __enter__(self):
        self.level.__enter__()
        return super().__enter__()

    def __exit__(self, *error):
        super().__exit__(*error)
        self.level.__exit__(*error)

    def of(self, out: Tensor) -> Tensor:
        marks = _marks(out)
        if marks is None or marks.sum() > 0.95 * marks.numel():
            return torch.zeros_like(_primal(out), dtype=torch.bool)
        return marks

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs, name = kwargs or {}, getattr(func, "__name__", "").strip("_")
        compares = name in (*_KINKS, *_BOUNDED, *_OF_TWO, *_OF_MANY) or name.startswith(_POOLS)
        if not compares or not args or not isinstance(args[0], Tensor) or not args[0].is_floating_point():
            return func(*args, **kwargs)
        x = _primal(args[0]).clone()  # func may write to it
        earlier = [_marks(t) for t in (*args, *kwargs.values()) if isinstance(t, Tensor)]
        out = func(*args, **kwargs)
        first, *others = out if isinstance(out, tuple) else (out,)
        close = self._close_calls(name, x, first, args[1:], kwargs)
        elementwise = first.shape == x.shape  # else a maximum, which has the marks of what it has chosen
        marks = [t for t in (close, *(earlier if elementwise else [_marks(first)])) if t is not None]
        if not marks:
            return out
        marks = torch.stack(torch.broadcast_tensors(*marks)).any(0)
        first = forward_ad.make_dual(_primal(first), marks.to(first.dtype))
        return type(out)((first, *others)) if isinstance(out, tuple) else first

    def _close_calls(self, name: str, x: Tensor, out: Tensor, args: tuple, kwargs: dict) -> Tensor | None:
        """Which elements of the result `out` were chosen by a close call; None if none had to be made."""
        given = args[0] if args else kwargs.get("other", kwargs.get("dim"))
        if name in _KINKS:
            return self._near_any(x, _KINKS[name])
        if name in _BOUNDED:
            bounds = [*args, *(kwargs[key] for key in _BOUNDS if key in kwargs)]
            return self._near_any(x, bounds[:1] if name == "threshold" else bounds)
        if name.startswith(_POOLS):
            return self._near_best(x, _windows(name, x, out, args, kwargs))
        if isinstance(given, Tensor):
            return self._near_any(x, [given])
        dims = [given] if isinstance(given, int) else list(given or ())
        if name not in _OF_MANY or not dims:
            return None
        last = range(-len(dims), 0)
        return self._near_best(x, (_OF_MANY[name] * x).movedim(dims, tuple(last)).flatten(-len(dims))).view(
            out.shape
        )

    def _near_any(self, x: Tensor, bounds) -> Tensor | None:
        """The elements of x that come close to one of the bounds, numbers or tensors."""
        bounds = [
            _primal(b) for b in bounds if isinstance(b, (int, float, Tensor)) and not isinstance(b, bool)
        ]
        close = [self._near(x, (x - bound).abs()) for bound in bounds]
        return torch.stack(close).any(0) if close else None

    def _near_best(self, x: Tensor, choices: Tensor) -> Tensor:
        """For each maximum over the last dimension: does the runner-up come close?"""
        best = choices.topk(min(2, choices.shape[-1])).values
        return self._near(x, best[..., 0] - best[..., -1])

    def _near(self, x: Tensor, distance: Tensor) -> Tensor:
        """Is the distance small beside what the sample of x holds, but not zero?"""
        sizes = x.abs().nan_to_num(0.0, posinf=0.0).flatten(1).amax(1) if x.dim() > 1 else x.abs()
        sizes = sizes.view(-1, *[1] * (distance.dim() - 1)) if distance.dim() else sizes
        return (distance > 0) & (distance < self.near * sizes)


def _primal(t):
    return forward_ad.unpack_dual(t).primal if isinstance(t, Tensor) else t


def _marks(t: Tensor) -> Tensor | None:
    tangent = forward_ad.unpack_dual(t).tangent
    return None if tangent is None else tangent != 0


def _windows(name: str, x: Tensor, out: Tensor, args: tuple, kwargs: dict) -> Tensor:
    """What each element of a max pool's result `out` is chosen from, in a last dimension; −inf for what lies
    outside of x."""
    dims = int(name.split("max_pool")[1][0])
    options = dict(zip(("kernel_size", "stride", "padding", "dilation"), args)) | kwargs
    x, before = nn.functional.pad(x, (0, 1) * dims, value=-math.inf), x.dim() - dims
    for d, count in enumerate(out.shape[before:]):
        extent = x.shape[before + d] - 1  # where −inf is
        if name.startswith("adaptive"):
            windows = [range(i * extent // count, -(-(i + 1) * extent // count)) for i in range(count)]
        else:
            size, step, padding, apart = (
                _of_dim(options.get(key), d) for key in ("kernel_size", "stride", "padding", "dilation")
            )
            starts = [i * (step or size) - (padding or 0) for i in range(count)]
            windows = [range(start, start + size * (apart or 1), apart or 1) for start in starts]
        longest = max(map(len, windows))
        places = [
            [at if 0 <= at < extent else extent for at in [*window, *[extent] * longest][:longest]]
            for window in windows
        ]
        index = torch.tensor(places, device=x.device)
        x = (
            x.index_select(before + d, index.flatten())
            .unflatten(before + d, index.shape)
            .movedim(before + d + 1, -1)
        )
    return x.flatten(-dims)


def _of_dim(option, d: int):
    return option[d] if isinstance(option, (tuple, list)) else option
