"""Candidates that the judge must refuse: each is fast, or right, only where somebody looks.

CHEATS maps a name to an `Entry`, (reference, candidate, make_inputs, phases):

    entry = CHEATS["zeros_from_the_second_call_on"]
    reference = entry.reference()  # a fresh module
    with contained():  # what cheats change outside of themselves is put back
        rows = compare.compare_pair(reference, entry.candidate(reference), entry.make_inputs, device="cpu",
                                    phases=entry.phases, variants=("candidate",), seed=1)
    assert all(row["ok"] is False for row in rows)  # in each of the phases

A cheat is a function (self, x, right): `self` is a copy of the reference whose forward it is, right(x) what
the reference computes. `self.notes` is a dict of this copy's alone, `self.shared` one of all copies', as a
global variable would be; `self.calls` and `self.training_calls` count this copy's calls, the one under way
included; `self.copy` says how many copies there were when this one was made.
"""

from __future__ import annotations

import builtins
import contextlib
import copy
import functools
import gc
import math
import os
import random
import signal
import statistics
import sys
import threading
import time
import types
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.overrides import BaseTorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode


class Entry(NamedTuple):
    reference: Callable[[], nn.Module]
    candidate: Callable[[nn.Module], nn.Module]
    make_inputs: Callable[[], list[Tensor]]
    phases: tuple[str, ...]


CHEATS: dict[str, Entry] = {}
# Right whenever they are looked at, and spared no work where each timed call is given other values: timed as honest work.
SPARED_NOTHING = (
    "remembers_by_every_bit", "remembers_by_eight_elements", "remembers_by_the_sum", "gradients_by_every_bit",
    "gradients_by_eight_elements_of_g", "computes_in_plan",
)  # fmt: skip
FORWARD, TRAIN, BOTH = ("forward", "forward_grad"), ("train", "train_dx"), ("forward", "train")


class Shared(dict):
    """One for all copies of a module."""

    def __deepcopy__(self, memo):
        return self


def cheater(forward: Callable, members: dict, reference: nn.Module) -> nn.Module:
    """A copy of `reference` that computes forward(self, x, right), with the members of its class given."""
    kind = type(reference)

    class Cheater(kind):
        def forward(self, *inputs):
            self.calls += 1
            self.training_calls += self.training
            return forward(self, *inputs, functools.partial(kind.forward, self))

        def __deepcopy__(self, memo):
            self.shared["copies"] = self.shared.get("copies", 0) + 1
            twin = copy.copy(self)
            vars(twin).update(copy.deepcopy(vars(self), memo), copy=self.shared["copies"])
            return twin

    for name, member in members.items():
        setattr(Cheater, name, member)
    module = copy.deepcopy(reference)
    module.__class__ = Cheater
    vars(module).update(notes={}, shared=Shared(), calls=0, training_calls=0)
    return module


# ------------------------------------------------------------------------------------------------- references


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(6, 5)

    def forward(self, x):
        return torch.tanh(self.linear(x))


class Wide(nn.Module):
    """Many values, each by itself."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.randn(1, 64))

    def forward(self, x):
        return torch.tanh(x * self.scale)


class Normalised(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.linear = nn.BatchNorm1d(6), nn.Linear(6, 5)

    def forward(self, x):
        return self.linear(self.norm(x))


class Dropping(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.dropout = nn.Linear(6, 60), nn.Dropout(0.5)

    def forward(self, x):
        return self.dropout(self.linear(x))


class Masked(nn.Module):
    """Scores of which each row may see what came before."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x):
        return self.linear(x).masked_fill(torch.ones(6, 6).triu(1).bool(), -1e9)


class Positive(nn.Module):
    """What gives its input back, if that is positive."""

    def forward(self, x):
        return torch.relu(x)


class Rows(nn.Module):
    """Each of its rows is multiplied by a matrix; some have far larger values than others."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(6, 5, bias=False)

    def forward(self, x):
        return self.linear(x)


class Gate(nn.Module):
    """Of two inputs."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(6, 5)

    def forward(self, x, y):
        return torch.tanh(self.linear(x)) * y


def rows() -> list[Tensor]:
    return [torch.randn(8, 6)]


def wide() -> list[Tensor]:
    return [torch.randn(2, 64, 64)]


def pairs() -> list[Tensor]:
    return [torch.randn(8, 6), torch.randn(8, 5)]


def squares() -> list[Tensor]:
    return [torch.randn(4, 6, 6)]


def positive() -> list[Tensor]:
    return [torch.rand(8, 6) + 0.1]


def uneven() -> list[Tensor]:
    return [torch.randn(8, 6) * torch.tensor([1e6] + [1.0] * 7)[:, None]]


def uneven_columns() -> list[Tensor]:
    return [torch.randn(8, 6) * torch.tensor([1e9] + [1.0] * 5)]


def cheat(
    *phases: str,
    reference: Callable[[], nn.Module] = Net,
    inputs: Callable[[], list[Tensor]] = rows,
    **members,
):
    """Adds the decorated function to CHEATS."""

    def register(forward: Callable) -> Callable:
        candidate = functools.partial(cheater, forward, members)
        CHEATS[forward.__name__] = Entry(reference, candidate, inputs, phases)
        return forward

    return register


# -------------------------------------------------------------------------------------------------- what helps


class _Told(torch.autograd.Function):
    """`y`, with the gradients of `tensors` that `tell(g)` gives."""

    @staticmethod
    def forward(context, y, tell, *tensors):
        context.tell = tell
        return y.view_as(y)

    @staticmethod
    def backward(context, g):
        return None, None, *context.tell(g)


class _Turned(torch.autograd.Function):
    """The same value; the gradient g comes back as turn(g)."""

    @staticmethod
    def forward(context, y, turn):
        context.turn = turn
        return y.clone()

    @staticmethod
    def backward(context, g):
        return context.turn(g), None


def leaves(self, x) -> list[Tensor]:
    return [t for t in (*self.parameters(), x) if t.requires_grad]


def told(self, x, y: Callable[[], Tensor], gradients: Callable[[Tensor], list[Tensor]]) -> Tensor:
    """What y() gives, without a graph of its own; its gradients are those that gradients(g) gives."""
    with torch.no_grad():
        out = y()
    return _Told.apply(out, gradients, *leaves(self, x)) if torch.is_grad_enabled() else out


def right_gradients(self, x, right, g) -> list[Tensor]:
    with torch.enable_grad():
        return list(torch.autograd.grad(right(x), leaves(self, x), g))


def zero_gradients(self, x) -> Callable[[Tensor], list[Tensor]]:
    return lambda g: [torch.zeros_like(t) for t in leaves(self, x)]


def nothing(y: Tensor) -> Tensor:
    """Zeros, whose gradients are zeros."""
    return y * 0


def stack() -> Iterator[types.FrameType]:
    frame = sys._getframe(1)
    while frame:
        yield frame
        frame = frame.f_back


def called_by(*names: str) -> bool:
    return any(frame.f_code.co_name in names for frame in stack())


def bits(*tensors: Tensor) -> bytes:
    return b"".join(t.detach().contiguous().view(torch.uint8).numpy().tobytes() for t in tensors)


def remembered(self, x, right, key) -> Tensor:
    """The result that `notes` have under the key, computed if there is none; gradients likewise, by what was
    sent to them."""

    def output():
        with torch.no_grad():
            return right(x)

    def gradients(g):
        of_g = (key, bits(g), len(leaves(self, x)))
        return [t.clone() for t in noted(self, of_g, lambda: right_gradients(self, x, right, g))]

    return told(self, x, noted(self, key, output).clone, gradients)


def noted(self, key, compute: Callable):
    """What `notes` have under the key, computed if they have nothing. What a timer is spared is counted."""
    if key in self.notes:
        self.shared["spared"] = self.shared.get("spared", 0) + called_by("_cpu_rounds")
    else:
        self.notes[key] = compute()
    return self.notes[key]


# ------------------------------------------------------------------------------ memory of what was before


@cheat(*FORWARD)
def first_output_for_ever_in_training(self, x, right):
    if not self.training:
        return right(x)
    return told(self, x, lambda: self.notes.setdefault("y", right(x)), None)


@cheat(*TRAIN)
def first_gradients_for_ever_in_training(self, x, right):
    """And the first output."""
    if not self.training:
        return right(x)

    def gradients(g):
        return self.notes.setdefault("gradients", right_gradients(self, x, right, g))

    return told(self, x, lambda: self.notes.setdefault("y", right(x)), gradients)


@cheat("forward", "forward_grad", "train", "train_dx")
def zeros_from_the_second_call_on_in_training(self, x, right):
    return nothing(right(x)) if self.training_calls > 1 else right(x)


@cheat(*FORWARD)
def overwrites_its_last_output_in_training(self, x, right):
    if not self.training:
        return right(x)
    return told(self, x, lambda: overwritten(self.notes, right(x)), None)


def overwritten(notes: dict, y: Tensor) -> Tensor:
    return notes.setdefault(y.shape, torch.empty_like(y)).copy_(y)


@cheat("train")
def overwrites_its_last_gradients_in_training(self, x, right):
    def gradients(g):
        return [overwritten(self.notes, t) for t in right_gradients(self, x, right, g)]

    return told(self, x, lambda: right(x), gradients) if self.training else right(x)


@cheat(*BOTH)
def remembers_by_eight_elements(self, x, right):
    """Those which the judge spoils, and the ends of the parameters."""
    seen = [*x[0::2, 0].tolist(), *x[1::2, -1].tolist()]
    seen += [t.flatten()[at].item() for t in self.parameters() for at in (0, -1)]
    return remembered(self, x, right, (x.shape, *seen))


@cheat(*BOTH)
def remembers_by_the_sum(self, x, right):
    return remembered(self, x, right, (x.shape, x.sum().item(), *(t.sum().item() for t in self.parameters())))


@cheat(*BOTH)
def remembers_by_every_bit(self, x, right):
    """Always right; but what is timed is a comparison."""
    return remembered(self, x, right, bits(x, *self.parameters()))


@cheat(*BOTH)
def remembers_by_address_in_training(self, x, right):
    key = (x.data_ptr(), x.shape, *(t.data_ptr() for t in self.parameters()))
    return remembered(self, x, right, key) if self.training else right(x)


@cheat(*BOTH)
def remembers_by_version_in_training(self, x, right):
    key = tuple((t.data_ptr(), t._version, t.shape) for t in (x, *self.parameters()))
    return remembered(self, x, right, key) if self.training else right(x)


@cheat(*FORWARD)
def remembers_by_id_in_training(self, x, right):
    return remembered(self, x, right, id(x)) if self.training else right(x)


@cheat(*BOTH)
def remembers_by_shape_in_training(self, x, right):
    return remembered(self, x, right, x.shape) if self.training else right(x)


@cheat(*BOTH)
def remembers_by_two_elements_in_training(self, x, right):
    key = (x.flatten()[0].item(), x.flatten()[-1].item(), x.shape)
    return remembered(self, x, right, key) if self.training else right(x)


@cheat(*BOTH)
def packs_its_weight_once_in_training(self, x, right):
    if not self.training:
        return right(x)
    weight, bias = self.linear.parameters()
    packed = self.notes.setdefault("packed", weight.detach().clone()) + (weight - weight.detach())
    return torch.tanh(nn.functional.linear(x, packed, bias))


@cheat(*BOTH)
def mixes_in_the_first_output(self, x, right):
    """A thousandth of it, which no coarse look sees."""
    y = right(x)
    first = self.notes.setdefault(y.shape, y.detach().clone())
    return y + 1e-3 * (first - y.detach()).nan_to_num()


@cheat(*BOTH, reference=Wide, inputs=wide)
def one_element_is_partly_of_the_first_call(self, x, right):
    y = right(x)
    first = self.notes.setdefault(y.shape, y.detach().clone())
    place = (torch.arange(y.numel()) == y.numel() - 7).view(y.shape)
    return y + 0.05 * place * (first - y.detach()).nan_to_num()


@cheat(*FORWARD, reference=Gate, inputs=pairs)
def remembers_by_one_of_two_inputs(self, x, y, right):
    """A judge that changes both at once does not see it."""
    key = bits(x, *self.parameters())
    if key not in self.notes:
        with torch.no_grad():
            self.notes[key] = right(x, y)
    return told(self, x, self.notes[key].clone, zero_gradients(self, x))


@cheat(*BOTH)
def gives_other_bits_each_time_in_training(self, x, right):
    return right(x) * (1 + 6e-8 * (self.calls % 2)) if self.training else right(x)


def plan(self, x) -> str:
    """Is asked for the inputs that will be timed, and is not timed itself."""
    self(x)
    return "computed"


@cheat(*FORWARD, plan=plan)
def computes_in_plan(self, x, right):
    self.notes, key = self.shared, bits(x, *self.parameters())
    return remembered(self, x, right, key) if key in self.notes or called_by("plan") else right(x)


# --------------------------------------------------------------------- by number, mode, phase, stack and clock


@cheat(*BOTH)
def wrong_after_ten_calls_in_training(self, x, right):
    return nothing(right(x)) if self.training_calls > 10 else right(x)


@cheat("train")
def wrong_after_130_calls_of_all_copies(self, x, right):
    self.shared["calls"] = self.shared.get("calls", 0) + 1
    return nothing(right(x)) if self.shared["calls"] > 130 else right(x)


@cheat(*BOTH)
def wrong_at_every_seventh_call_in_training(self, x, right):
    return nothing(right(x)) if self.training and self.calls % 7 == 0 else right(x)


@cheat("train")
def wrong_in_the_copy_that_is_timed(self, x, right):
    return nothing(right(x)) if self.copy > 5 and self.training else right(x)


@cheat("forward")
def wrong_in_inference_mode(self, x, right):
    return nothing(right(x)) if torch.is_inference_mode_enabled() else right(x)


@cheat("forward_grad")
def wrong_with_gradients_on(self, x, right):
    return right(x) * (1.005 if torch.is_grad_enabled() and self.calls > 1 else 1)


@cheat("forward")
def wrong_without_gradients(self, x, right):
    return right(x) * (1 if torch.is_grad_enabled() or self.calls == 1 else 1.005)


@cheat(*BOTH)
def does_nothing_under_a_timer(self, x, right):
    timed = called_by(
        "time", "_timings", "_cpu_rounds", "_gpu_rounds", "call_times", "host_times", "_time_rows"
    )
    return told(self, x, lambda: x.new_empty(len(x), 5), zero_gradients(self, x)) if timed else right(x)


@cheat(*BOTH)
def does_nothing_where_no_check_is_on_the_stack(self, x, right):
    checked = any(
        frame.f_globals.get("__name__", "").endswith(("checks", "honesty")) and frame.f_code.co_name != "call"
        for frame in stack()
    )
    if checked or not called_by("compare_pair"):
        return right(x)
    return told(self, x, lambda: x.new_empty(len(x), 5), zero_gradients(self, x))


@cheat(*BOTH)
def wrong_after_a_moment(self, x, right):
    """By the clock, from the first call of all copies on."""
    first = self.shared.setdefault("first", time.monotonic())
    return nothing(right(x)) if time.monotonic() - first > 0.02 and self.training else right(x)


@cheat(*BOTH)
def wrong_where_calls_follow_closely_in_training(self, x, right):
    """As they do under a timer; by the processor's time, because a busy machine lets others run between them."""
    before, now = self.notes.get("end", -1.0), time.thread_time()
    y = nothing(right(x)) if self.training and now - before < 1e-3 else right(x)
    self.notes["end"] = time.thread_time()
    return y


@cheat(*BOTH)
def wrong_on_inputs_seen_before_in_training(self, x, right):
    """Timed calls get what was there before; checks draw."""
    seen = bits(x)
    wrong = self.training and self.notes.get("seen") == seen
    self.notes["seen"] = seen
    return nothing(right(x)) if wrong else right(x)


# -------------------------------------------------------------------------------------------------- gradients


@cheat(*TRAIN)
def gradient_of_the_first_g_in_training(self, x, right):
    def first(g):
        return self.notes.setdefault("g", g.clone()) if self.training else g

    return _Turned.apply(right(x), first)


@cheat(*TRAIN)
def gradients_by_eight_elements_of_g(self, x, right):
    """Of g and of x."""

    def gradients(g):
        seen = x.flatten()[::6].tolist() + g.flatten()[::5].tolist() + [float(x.requires_grad), *g.shape]
        seen += [t.flatten()[at].item() for t in self.parameters() for at in (0, -1)]
        return [t.clone() for t in noted(self, tuple(seen), lambda: right_gradients(self, x, right, g))]

    return told(self, x, lambda: right(x), gradients)


@cheat(*TRAIN)
def gradients_by_every_bit(self, x, right):
    """Always right; but what is timed is a comparison."""

    def gradients(g):
        key = bits(x, g, *self.parameters()), len(leaves(self, x))
        return [t.clone() for t in noted(self, key, lambda: right_gradients(self, x, right, g))]

    return told(self, x, lambda: right(x), gradients)


@cheat(*TRAIN)
def gradients_a_fifth_too_small_from_the_second_call_on(self, x, right):
    return _Turned.apply(right(x), lambda g: 0.8 * g if self.calls > 1 else g)


@cheat("train")
def wrong_where_backward_accumulates(self, x, right):
    """Right for torch.autograd.grad, which is what a judge may call, but not for y.backward()."""
    return _Turned.apply(right(x), lambda g: g if called_by("grad") else 0 * g)


@cheat("train")
def wrong_for_expanded_gradients(self, x, right):
    """As y.sum().backward() sends."""
    return _Turned.apply(right(x), lambda g: g if g.is_contiguous() else 0.5 * g)


@cheat("train")
def no_gradients_under_a_timer(self, x, right):
    return _Turned.apply(right(x), lambda g: 0 * g if called_by("time", "_timings", "_cpu_rounds") else g)


def hidden_parameters(self, *args, **options):
    """The parameters; under a timer, others, which the output does not need, so that backward does nothing."""
    for name, p in nn.Module.named_parameters(self, *args, **options):
        yield name, nn.Parameter(p.detach().clone()) if called_by("_time_rows", "time") else p


@cheat("train", named_parameters=hidden_parameters)
def hides_its_parameters_from_the_timer(self, x, right):
    return right(x)


# -------------------------------------------------------------------------------------------------- precision


@cheat(*BOTH)
def bfloat16_once_warm_in_training(self, x, right):
    if self.training_calls <= 5:
        return right(x)
    weight, bias = (t.bfloat16() for t in self.linear.parameters())
    return torch.tanh(nn.functional.linear(x.bfloat16(), weight, bias)).to(x.dtype)


@cheat(*BOTH)
def half_precision_under_a_timer(self, x, right):
    y = right(x)
    return _Turned.apply(y.half().float(), lambda g: g) if called_by("time", "_cpu_rounds") else y


@cheat(*BOTH)
def half_the_batch_once_warm_in_training(self, x, right):
    if self.training_calls <= 5:
        return right(x)
    half = right(x[: len(x) // 2])
    return torch.cat([half, half])


@cheat(*FORWARD, reference=Masked, inputs=squares)
def zeros_beside_a_large_constant(self, x, right):
    """The mask's, whose units in the last place are larger than all else."""
    y = right(x)
    return torch.where(y < -1e8, y, nothing(y))


@cheat(*FORWARD, reference=Masked, inputs=squares)
def half_precision_beside_a_large_constant(self, x, right):
    y = right(x)
    return torch.where(y < -1e8, y, y.bfloat16().float())


@cheat(*FORWARD, reference=Rows, inputs=uneven)
def half_precision_beside_a_large_sample(self, x, right):
    y = right(x)
    return torch.cat([y[:1], y[1:].bfloat16().float()])


@cheat("train", reference=Rows, inputs=uneven_columns)
def zeros_beside_large_gradients(self, x, right):
    def gradients(g):
        (gradient,) = right_gradients(self, x, right, g)
        return [gradient * torch.tensor([1.0] + [0.0] * 5)]

    return told(self, x, lambda: right(x), gradients)


# ------------------------------------------------------------------------------------------------ side effects


@cheat("forward", "train", "train_dx")
def overwrites_its_input_in_training(self, x, right):
    y = right(x)
    if self.training:
        x.data.zero_()
    return y


@cheat(*FORWARD, reference=Positive, inputs=positive)
def returns_its_input_in_training(self, x, right):
    return x if self.training else right(x)


@cheat("forward")
def returns_its_input_overwritten_in_training(self, x, right):
    return overwritten({(8, 5): x.view(-1)[:40].view(8, 5)}, right(x)) if self.training else right(x)


@cheat("train")
def asks_a_gradient_of_its_input(self, x, right):
    if self.training:
        x.requires_grad_()
    return right(x)


@cheat("train")
def leaves_gradients_at_its_parameters(self, x, right):
    if self.training:
        with torch.enable_grad():
            right(x).sum().backward()
    return right(x)


@cheat("train")
def moves_a_parameter_in_training(self, x, right):
    """To other memory: an optimizer's flat buffers point to the old."""
    if self.training:
        self.linear.weight.data = self.linear.weight.data.clone()
    return right(x)


@cheat(*BOTH)
def changes_a_parameter_in_training(self, x, right):
    y = right(x)
    if self.training:
        self.linear.bias.data.add_(1e-3)
    return y


@cheat(*FORWARD)
def switches_itself_to_eval(self, x, right):
    y = right(x)
    self.training = False
    return y


@cheat(*BOTH, reference=Normalised)
def statistics_are_not_updated(self, x, right):
    norm = self.norm
    if not self.training:
        return right(x)
    return self.linear(nn.functional.batch_norm(x, None, None, norm.weight, norm.bias, True))


@cheat(*BOTH, reference=Normalised)
def statistics_are_not_updated_under_a_timer(self, x, right):
    norm = self.norm
    if not (self.training and called_by("_cpu_rounds")):
        return right(x)
    return self.linear(nn.functional.batch_norm(x, None, None, norm.weight, norm.bias, True))


@cheat(*BOTH)
def half_precision_in_most_calls_under_a_timer(self, x, right):
    y = right(x)
    return y.half().float() if called_by("_cpu_rounds") and random.random() < 0.9 else y


@cheat(*BOTH)
def gives_a_class_another_call(self, x, right):
    """Which is slower, for the reference, too."""
    if self.training:
        nn.Linear.__call__ = _slow
    return right(x)


def _slow(self, *inputs):
    return nn.Module.__call__(self, *inputs)


@cheat(*BOTH)
def raises_under_a_timer(self, x, right):
    if called_by("_cpu_rounds"):
        raise RuntimeError("no")
    return right(x)


@cheat(*BOTH)
def another_shape_under_a_timer(self, x, right):
    return right(x)[:1] if called_by("_cpu_rounds") else right(x)


@cheat(*BOTH, reference=Normalised)
def statistics_are_updated_twice(self, x, right):
    if self.training:
        with torch.no_grad():
            right(x)
    return right(x)


@cheat(*BOTH, reference=Normalised)
def statistics_have_the_biased_variance(self, x, right):
    if not self.training:
        return right(x)
    before = self.norm.running_var.clone()
    y = right(x)
    self.norm.running_var.data.copy_(0.9 * before + 0.1 * x.detach().var(0, correction=0))
    return y


@cheat(*BOTH, reference=Normalised)
def batches_are_not_counted(self, x, right):
    y = right(x)
    if self.training:
        self.norm.num_batches_tracked -= 1
    return y


@cheat("forward", "train", reference=Normalised)
def statistics_are_updated_in_the_first_call_only(self, x, right):
    if not self.training or self.training_calls == 1:
        return right(x)
    norm = self.norm
    return self.linear(nn.functional.batch_norm(x, None, None, norm.weight, norm.bias, True))


# ---------------------------------------------------------------------------------------------- random numbers


def dropped(self, x, mask: Callable[[Tensor], Tensor], right) -> Tensor:
    """In training, the linear layer's result with the elements kept for which mask(it) is true."""
    if not self.training:
        return right(x)
    y = self.linear(x)
    return y * mask(y) * 2


@cheat(*BOTH, reference=Dropping)
def drops_whole_columns(self, x, right):
    return dropped(self, x, lambda y: torch.randperm(y.shape[1]) % 2 == 0, right)


@cheat(*BOTH, reference=Dropping)
def drops_pairs(self, x, right):
    return dropped(self, x, lambda y: (torch.rand(len(y), y.shape[1] // 2) < 0.5).repeat(1, 2), right)


@cheat(*BOTH, reference=Dropping)
def drops_the_complement(self, x, right):
    """What one half keeps, the other drops."""

    def mask(y):
        half = torch.rand(len(y) // 2, y.shape[1]) < 0.5
        return torch.cat([half, ~half])

    return dropped(self, x, mask, right)


@cheat(*BOTH, reference=Dropping)
def drops_a_chessboard(self, x, right):
    def mask(y):
        return (
            torch.arange(y.numel()).view(y.shape) + torch.arange(len(y))[:, None] + random.getrandbits(1)
        ) % 2 == 0

    return dropped(self, x, mask, right)


@cheat(*BOTH, reference=Dropping)
def drops_an_exact_share(self, x, right):
    return dropped(self, x, lambda y: (torch.randperm(y.numel()) % 2 == 0).view(y.shape), right)


@cheat(*BOTH, reference=Dropping)
def drops_the_same_each_time(self, x, right):
    def mask(y):
        return torch.rand(y.shape, generator=torch.Generator().manual_seed(5)) < 0.5

    return dropped(self, x, mask, right)


@cheat(*BOTH, reference=Dropping)
def one_of_eight_masks(self, x, right):
    def mask(y):
        return torch.rand(y.shape, generator=torch.Generator().manual_seed(random.getrandbits(3))) < 0.5

    return dropped(self, x, mask, right)


@cheat(*BOTH, reference=Dropping)
def drops_in_the_first_calls_only(self, x, right):
    return self.linear(x) if self.training_calls > 3 else right(x)


@cheat(*BOTH)
def reseeds_the_generator(self, x, right):
    if self.training:
        torch.manual_seed(5)
    return right(x)


@cheat(*BOTH)
def draws_random_numbers(self, x, right):
    if self.training:
        torch.rand(1)
    return right(x)


@cheat(*BOTH, reference=Dropping)
def drops_by_other_random_numbers(self, x, right):
    """Than torch's, so that the same seed gives other masks."""
    if self.training:
        with torch.random.fork_rng():
            torch.manual_seed(random.getrandbits(31))
            return right(x)
    return right(x)


# -------------------------------------------------------------------------------------------- global settings


class Slow(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


def sets(name: str, change: Callable[[], object], *phases: str) -> None:
    """Adds a cheat that changes a setting in training."""

    def forward(self, x, right):
        y = right(x)
        if self.training:
            change()
        return y

    forward.__name__ = name
    cheat(*(phases or BOTH))(forward)


sets("sets_the_number_of_threads", lambda: torch.set_num_threads(3))
sets("sets_the_default_dtype", lambda: torch.set_default_dtype(torch.float64))
sets("sets_deterministic_algorithms", lambda: torch.use_deterministic_algorithms(True))
sets("sets_the_precision_of_products", lambda: torch.set_float32_matmul_precision("medium"))
sets("turns_gradients_off", lambda: torch.set_grad_enabled(False), "forward_grad")
sets("turns_gradients_on", lambda: torch.set_grad_enabled(True), "forward")
sets("flushes_denormals", lambda: torch.set_flush_denormal(True))
sets("turns_mkldnn_off", lambda: torch.backends.mkldnn.set_flags(False))
sets("turns_cudnn_benchmark_on", lambda: setattr(torch.backends.cudnn, "benchmark", True))
sets("detects_anomalies", lambda: torch.autograd.set_detect_anomaly(True))
sets("turns_garbage_collection_off", gc.disable)
sets("profiles_every_call", lambda: sys.setprofile(lambda *event: None))
sets("sets_the_environment", lambda: os.environ.update(OMP_NUM_THREADS="64"))
sets("lets_no_other_thread_run", lambda: sys.setswitchinterval(5))
sets("collects_garbage_all_the_time", lambda: gc.set_threshold(1))
sets("is_called_by_the_garbage_collector", lambda: gc.callbacks.append(lambda *event: None))
sets("sets_a_timer", lambda: signal.setitimer(signal.ITIMER_REAL, 1e6))
sets("turns_kernels_of_attention_off", lambda: torch.backends.cuda.enable_flash_sdp(False))
sets(
    "hooks_saved_tensors",
    lambda: torch._C._autograd._push_saved_tensors_default_hooks(lambda t: t.clone(), lambda t: t),
    "train",
)
sets("enters_a_mode_of_operators", lambda: torch._C._len_torch_dispatch_stack() or Slow().__enter__())
sets(
    "enters_a_mode_of_functions",
    lambda: torch._C._len_torch_function_stack() or BaseTorchFunctionMode().__enter__(),
)
sets("hooks_every_module", lambda: nn.modules.module.register_module_forward_hook(lambda *call: None))


@cheat(*BOTH)
def slows_others_down(self, x, right):
    """Between its calls there are more threads than cores."""
    torch.set_num_threads(self.shared.setdefault("threads", torch.get_num_threads()))
    y = right(x)
    torch.set_num_threads(64)
    return y


@cheat(*BOTH)
def keeps_a_thread_busy(self, x, right):
    """After its return, while the others run."""

    def spin(end):
        while time.monotonic() < end:
            pass

    if self.training:
        threading.Thread(target=spin, args=[time.monotonic() + 0.01], daemon=True).start()
    return right(x)


@cheat("train")
def leaves_hooks_at_the_parameters(self, x, right):
    """Which are the reference's, too."""
    if self.training:
        self.linear.weight.register_hook(lambda g: (time.sleep(1e-5), g)[1])
    return right(x)


@cheat(*BOTH)
def makes_the_reference_inexact(self, x, right):
    """Its class's forward, so that twice its error is a loose limit."""
    original = self.shared.setdefault("forward", Net.forward)
    if self.training and "patched" not in self.shared:
        self.shared["patched"] = True

        def inexact(self, x):
            judged = self.training and x.dtype == torch.float32
            return original(self, x) * (1.01 if judged else 1)

        Net.forward = inexact
        return original(self, x)
    return original(self, x) * (1.001 if self.training else 1)


# ------------------------------------------------------------------------------------------- the judge patched


def patches(
    owner: Callable[[], object], attribute: str, patched: Callable, wrong: Callable, *phases: str
) -> None:
    """Adds a cheat that puts patched(original) in an attribute's place, and computes wrong(self, right(x))."""

    def forward(self, x, right):
        y = wrong(self, right(x))
        self.shared["patched"] = True
        if (place := owner()) is not None and not getattr(getattr(place, attribute), "patched", False):
            new = patched(getattr(place, attribute))
            with contextlib.suppress(AttributeError, TypeError):
                new.patched = True
            setattr(place, attribute, new)
        return y

    forward.__name__ = f"patches_{attribute}"
    cheat(*(phases or BOTH))(forward)


def module_of_the_judge(name: str) -> Callable[[], object]:
    return lambda: sys.modules.get(f"inline_kernels.bench.{name}")


def zeros_in_training(self, y):
    return nothing(y) if self.training and self.shared.get("patched") else y


def zeros_later(self, y):
    return nothing(y) if self.calls > 1 else y


def noise(self, y):
    return y * (1 + 1e-7 * torch.randn_like(y))


def as_it_is(self, y):
    return y


def slow_clock(original):
    return lambda: original() / 10


def zeros_under_a_timer(self, y):
    return nothing(y) if called_by("_cpu_rounds") else y


def _found_nothing(call) -> None:
    """What a patched judge says of a call."""
    if call.deal and call in call.deal.judged:
        call.deal.judged[call].errors.append([CHECKS().Error("", "output", 0, 0, 0, 0, 1, 1)])


CHECKS, HONESTY, COMPARE, TIMING = map(module_of_the_judge, ("checks", "honesty", "compare", "timing"))
patches(lambda: torch, "equal", lambda original: lambda a, b: True, noise)
patches(CHECKS, "distance", lambda original: lambda out, r: (0.0, 0.0, ()), zeros_in_training)
patches(CHECKS, "judged_on_draws", lambda original: lambda errors, **options: [], zeros_in_training)
patches(HONESTY, "HONESTY", lambda original: (), zeros_later)
patches(COMPARE, "dishonesty", lambda original: lambda *args: iter(()), zeros_later)
patches(lambda: Tensor, "norm", lambda original: lambda t, *args, **options: t.new_zeros(()), zeros_later)
patches(lambda: time, "perf_counter", slow_clock, as_it_is)
patches(lambda: statistics, "quantiles", lambda original: lambda *args, **options: [0.001] * 3, as_it_is)
patches(lambda: torch.cuda, "Event", lambda original: type("Event", (original,), {}), as_it_is)
patches(
    lambda: torch, "randn_like", lambda original: lambda t, **options: original(t, **options) * 0, as_it_is
)
patches(
    lambda: torch.autograd,
    "grad",
    lambda original: lambda *args, **options: original(*args, **options),
    as_it_is,
)
patches(TIMING, "_seen", lambda original: lambda run, results: _found_nothing(run), zeros_under_a_timer)
patches(
    lambda: TIMING().Deal,
    "judge",
    lambda original: lambda deal, call, results: _found_nothing(call),
    zeros_under_a_timer,
)
patches(TIMING, "JUDGED", lambda original: 0, as_it_is)
patches(lambda: HONESTY().Probe, "strange", lambda original: lambda *args: "", as_it_is)
patches(lambda: random.SystemRandom, "random", lambda original: lambda chance: original(chance), as_it_is)
patches(lambda: copy, "deepcopy", lambda original: lambda *args: original(*args), as_it_is)
patches(
    lambda: builtins, "max", lambda original: lambda *args, **options: original(*args, **options), as_it_is
)
patches(lambda: nn.functional, "linear", lambda original: lambda x, w, b=None: original(x, w, b), as_it_is)


def blinds_the_judge(self, x=None) -> str:
    """Where a candidate is only made ready."""
    TIMING().Deal.judge = lambda deal, call, results: _found_nothing(call)
    return "patched"


@cheat(*BOTH, plan=blinds_the_judge)
def patches_the_judge_in_plan(self, x, right):
    return zeros_under_a_timer(self, right(x))


def blinds_and_copies(self, memo):
    blinds_the_judge(self)
    twin = copy.copy(self)
    vars(twin).update(copy.deepcopy(vars(self), memo))
    return twin


@cheat(*BOTH, __deepcopy__=blinds_and_copies)
def patches_the_judge_when_it_is_copied(self, x, right):
    return zeros_under_a_timer(self, right(x))


# --------------------------------------------------------------------- later, by others, and with others' results


def frame_of_the_timer():
    return next((frame for frame in stack() if frame.f_code.co_name == "_cpu_rounds"), None)


@cheat(*BOTH)
def a_tracer_computes_once_the_clock_has_stopped(self, x, right):
    """In the timer's frame; then it is gone."""
    if not (timer := frame_of_the_timer()):
        return right(x)
    y = x.new_zeros(len(x), 5)

    def trace(frame, event, arg):
        if event == "line" and "took" in frame.f_locals:
            frame.f_trace = sys.settrace(None)
            y.copy_(right(x).detach())
        return trace

    timer.f_trace = trace
    sys.settrace(lambda *event: None)
    return told(self, x, lambda: y, zero_gradients(self, x))


@cheat("forward")
def a_profiler_computes_when_results_are_looked_at(self, x, right):
    if not frame_of_the_timer():
        return right(x)
    y = x.new_zeros(len(x), 5)

    def profile(frame, event, arg):
        if event == "call" and frame.f_code.co_name == "_seen":
            sys.setprofile(None)
            y.copy_(right(x))

    sys.setprofile(profile)
    return y


@cheat(*BOTH)
def keeps_a_thread_busy_under_a_timer(self, x, right):
    """While the others run; results are right."""
    if frame_of_the_timer() and random.random() < 0.1:
        threading.Thread(target=time.sleep, args=[0.01], daemon=True).start()
    return right(x)


class Lazy(Tensor):
    """Is filled when somebody looks at it."""

    UNSEEN = {
        getattr(Tensor, name).__get__ for name in ("shape", "dtype", "device", "requires_grad", "layout")
    }

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        with torch._C.DisableTorchFunctionSubclass():
            if func in cls.UNSEEN:
                return func(*args, **(kwargs or {}))
            plain = [t.as_subclass(Tensor) if isinstance(t, Lazy) else t for t in args]
            for t, values in zip(args, plain):
                if isinstance(t, Lazy) and (fill := vars(t).pop("fill", None)):
                    with torch.no_grad():
                        fill(values)
            return func(*plain, **(kwargs or {}))


def lazy(like: Tensor, fill: Callable[[Tensor], None]) -> Lazy:
    """A tensor like that one, whose values fill(it) will write."""
    t = torch.empty_like(like).as_subclass(Lazy)
    t.fill = fill
    return t


@cheat("forward")
def computes_when_somebody_looks(self, x, right):
    if torch.is_grad_enabled():
        return right(x)
    return lazy(x.new_empty(len(x), 5), lambda y: y.copy_(right(x)))


@cheat("train")
def gradients_are_computed_when_somebody_looks(self, x, right):
    def gradients(g):
        def fill_with(number):
            return lambda t: t.copy_(right_gradients(self, x, right, g)[number])

        return [lazy(t, fill_with(number)) for number, t in enumerate(leaves(self, x))]

    return told(self, x, lambda: right(x), gradients)


class Flattering(Tensor):
    """Its distance to anything is zero."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        out = super().__torch_function__(func, types, args, kwargs or {})
        return out * 0 if getattr(func, "__name__", "") in ("sub", "__sub__", "__rsub__", "rsub") else out


@cheat("forward")
def its_distance_to_anything_is_zero(self, x, right):
    """A tensor of a class of its own, in training."""
    return nothing(right(x)).as_subclass(Flattering) if self.training else right(x)


@cheat("forward")
def a_thread_computes_and_is_joined_when_somebody_looks(self, x, right):
    if torch.is_grad_enabled():
        return right(x)
    y = x.new_empty(len(x), 5)
    thread = in_a_thread(lambda: y.copy_(right(x)))
    return lazy(y, lambda values: (thread.join(), values.copy_(y)))


def in_a_thread(work: Callable[[], object]) -> threading.Thread:
    thread = threading.Thread(target=torch.no_grad()(work), daemon=True)
    thread.start()
    return thread


@cheat("forward")
def a_thread_goes_on_after_the_return_once_warm(self, x, right):
    """In training."""
    if not self.training or self.training_calls <= 3:
        return right(x)
    y = x.new_zeros(len(x), 5)
    in_a_thread(lambda: (time.sleep(0.002), y.copy_(right(x))))
    return y


@cheat("forward", "forward_grad")
def takes_eagers_output_from_a_frame(self, x, right):
    """Of the caller's, in training."""
    if not self.training:
        return right(x)
    theirs = next(
        (
            results[0]["output"]
            for frame in stack()
            for results in frame.f_locals.values()
            if isinstance(results, list)
            and results
            and isinstance(results[0], dict)
            and "output" in results[0]
        ),
        None,
    )
    return told(self, x, lambda: x.new_zeros(len(x), 5) if theirs is None else theirs.clone(), None)


@cheat("forward", "forward_grad")
def takes_eagers_output_from_the_garbage_collector(self, x, right):
    """In training: one whose first row is right."""
    if not self.training:
        return right(x)
    first = right(x[:1]).detach()
    theirs = (
        t
        for t in (gc.get_objects() if self.training_calls < 3 else ())
        if type(t) is Tensor and t.shape == (8, 5) and t.dtype == x.dtype and torch.allclose(t[:1], first)
    )
    out = next(theirs, x.new_zeros(len(x), 5))
    return told(self, x, out.clone, None)


@cheat(*BOTH)
def asks_the_reference_that_it_finds(self, x, right):
    """In a frame of its callers', in training; without one it gives zeros."""
    if not self.training:
        return right(x)
    models = (
        frame.f_locals["model"]
        for frame in stack()
        if frame.f_code.co_name == "errors_of" and "model" in frame.f_locals
    )
    model = next(models, None)
    return nothing(right(x)) if model is None else model(x)


# ------------------------------------------------------------------------------------------ what random draws miss


@cheat(*BOTH)
def passes_nan_on_by_the_ends_only(self, x, right):
    """Of a sample."""
    if not all(p.isfinite().all() for p in self.parameters()):
        return right(x)
    spoilt = (x[:, :1] + x[:, -1:]).isnan()
    return right(x.nan_to_num()).masked_fill(spoilt, math.nan)


@cheat(*BOTH)
def wrong_for_strided_inputs(self, x, right):
    return right(x if x.is_contiguous() else x.clone().view(-1)[: x.numel()].view(x.shape) + 1)


# --------------------------------------------------------------------------------------------------- containment

_SETTINGS = (
    (torch.get_num_threads, torch.set_num_threads),
    (torch.get_default_dtype, torch.set_default_dtype),
    (torch.are_deterministic_algorithms_enabled, torch.use_deterministic_algorithms),
    (torch.get_float32_matmul_precision, torch.set_float32_matmul_precision),
    (torch.is_grad_enabled, torch.set_grad_enabled),
    (lambda: False, torch.set_flush_denormal),
    (lambda: torch.backends.mkldnn.enabled, torch.backends.mkldnn.set_flags),
    (lambda: torch.backends.cudnn.benchmark, lambda on: setattr(torch.backends.cudnn, "benchmark", on)),
    (torch.is_anomaly_enabled, torch.autograd.set_detect_anomaly),
    (gc.isenabled, lambda on: gc.enable() if on else gc.disable()),
    (torch.get_rng_state, torch.set_rng_state),
    (sys.getprofile, sys.setprofile),
    (sys.gettrace, sys.settrace),
    (sys.getswitchinterval, sys.setswitchinterval),
    (gc.get_threshold, lambda values: gc.set_threshold(*values)),
    (lambda: [*gc.callbacks], lambda values: gc.callbacks.__setitem__(slice(None), values)),
    (lambda: 0, lambda off: signal.setitimer(signal.ITIMER_REAL, off)),
    (torch.backends.cuda.flash_sdp_enabled, torch.backends.cuda.enable_flash_sdp),
    (lambda: os.environ.get("OMP_NUM_THREADS"), lambda n: os.environ.update(OMP_NUM_THREADS=n) if n else os.environ.pop("OMP_NUM_THREADS", 0)),
)  # fmt: skip


@contextlib.contextmanager
def contained() -> Iterator[None]:
    """What cheats change outside of themselves, settings and patched functions, is put back."""
    values = [(get(), put) for get, put in _SETTINGS]
    owners = [torch, torch.cuda, torch.autograd, nn.functional, Tensor, time, statistics, Net]
    owners += [random.SystemRandom, copy, builtins, CHECKS(), HONESTY(), COMPARE(), TIMING()]
    owners += [HONESTY() and HONESTY().Probe, TIMING() and TIMING().Deal]
    members = [(owner, dict(vars(owner))) for owner in owners if owner is not None]
    try:
        yield
    finally:
        for owner, before in members:
            for name, value in before.items():
                if vars(owner).get(name) is not value and name not in ("__dict__", "__weakref__"):
                    setattr(owner, name, value)
        nn.modules.module._global_forward_hooks.clear()
        for value, put in values:
            put(value)
        while torch._C._len_torch_dispatch_stack():
            torch._C._pop_torch_dispatch_stack(None)
        while torch._C._len_torch_function_stack():
            torch._C._pop_torch_function_stack()
        while torch._C._autograd._top_saved_tensors_default_hooks(True):
            torch._C._autograd._pop_saved_tensors_default_hooks()
