"""What torch.cat joins channels last (between.py's `Join`), by one operator: each part is read once, and what is an OPERAND then is rounded on the way.

The operator runs transposed convolutions that nothing else reads, too: by the library, without their bias, which is added as they are joined.
Backward splits dy into gradients that lie channels last, and sums that of the bias in the same pass. A transposed convolution runs channels
last only where eager's is in TF32, its gradients only where both of eager's are. Where anything doesn't fit, PyTorch's own calls run; in
float32 in planes, since what reads an OPERAND takes a result channels last for a rounded one.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, fx, nn

import inline_loader
from inline_kernels.loader import operators as loader_operators
from inline_kernels.loader.operators import check_memory

from . import between, library, precision, support
from .between import OPERAND, Join, Transposed
from .cases import CTYPES
from .launching import ANYWHERE, Entry, Launch, new_of
from .layouts import Turns
from .replacing import Replacement, are_plain, lie_last
from .source import TRANSPOSE

_convolution_backward = torch.ops.aten.convolution_backward.default._op
_OF_CONVOLUTION = {"forward": "dx", "dx": "forward", "dw": "dw"}  # what a transposed one's is


def joiners(captured, model: nn.Module, segments: Sequence) -> dict[fx.Node, tuple[Joiner, list[fx.Node]]]:
    """By the calls that they replace, with what they are given. segments: those that run."""

    def given(node: fx.Node, join: Join) -> list[fx.Node]:
        return [value.args[0] if t else value for t, value in zip(join.parts, node.args[0])]

    found = between.joins(captured, model, segments)
    return {node: (Joiner(join, model), given(node, join)) for node, join in found.items()}


class Joiner(Replacement):
    """A Join of one model: called with its parts, the x of a transposed convolution in the place of its result."""

    def __init__(self, join: Join, model: nn.Module):
        super().__init__()
        self.join = join
        self.modules = [t and model.get_submodule(t.name) for t in join.parts]
        own = [(module._parameters, t.has_bias) for module, t in zip(self.modules, join.parts) if t]
        self.sources = [(table, "weight") for table, _ in own] + [
            (table, "bias") for table, has in own if has
        ]

    def source(self, dtype: torch.dtype) -> dict:
        return _request(self.join, dtype)

    def fits(self, tensors: tuple[Tensor, ...]) -> bool:
        return _fits(self.join, tensors)

    def operator(self) -> loader_operators.Operator:
        return _operator(_nameless(self.join))

    def eager(self, *tensors: Tensor) -> Tensor:
        given = tensors[: len(self.modules)]
        if given[0].dtype != torch.float32:
            return torch.cat([t if m is None else m(t) for m, t in zip(self.modules, given)], 1)
        y = torch.cat([t if m is None else m(t.contiguous()) for m, t in zip(self.modules, given)], 1)
        return y.contiguous() if self.join.result == OPERAND else y


# ------------------------------------------------------------------------------------------------------------- what fits


def _own(join: Join, a: Sequence) -> list[tuple[int, Transposed, Tensor, Tensor | None]]:
    """Of the operator's arguments: the number of each transposed convolution's part, itself, its weight and bias."""
    at, count = [i for i, t in enumerate(join.parts) if t], len(join.parts)
    biases = iter(a[count + len(at) :])
    return [
        (i, join.parts[i], weight, next(biases) if join.parts[i].has_bias else None)
        for i, weight in zip(at, a[count:])
    ]


def _shapes(join: Join, a: Sequence) -> list[torch.Size]:
    """Of the parts. Raises RuntimeError where a transposed convolution does."""
    found = [t.shape for t in a[: len(join.parts)]]
    for i, t, weight, _ in _own(join, a):
        x, weight = (torch.empty(each.shape, device="meta") for each in (a[i], weight))
        found[i] = torch.conv_transpose2d(x, weight, None, *_settings(t)).shape
    return found


def _settings(t: Transposed) -> tuple:
    return t.stride, t.padding, t.output_padding, 1, t.dilation


def _fits(join: Join, a: Sequence[Tensor]) -> bool:
    x, *parts = a[: len(join.parts)]
    if support.autocast_dtype(x) or not are_plain(a) or not lie_last((x, *parts)):
        return False
    if not all(weight.dim() == 4 and weight.is_contiguous() for _, _, weight, _ in _own(join, a)):
        return False
    try:
        shapes = _shapes(join, a)
    except RuntimeError:  # eager's, too
        return False
    if len({(shape[0], *shape[2:]) for shape in shapes}) > 1:
        return False
    return x.dtype != torch.float32 or library.may_run_tf32(x) and _are_in_tf32(join, a, shapes)


def _are_in_tf32(join: Join, a: Sequence[Tensor], shapes: Sequence[torch.Size]) -> bool:
    """Are transposed convolutions in eager? And where these are rounded, gradients of filters that read them?"""
    own = _own(join, a)
    if not all(_runs_tf32(t, a[0], shapes[i], weight, "forward") for i, t, weight, _ in own):
        return False
    if not own or join.result != OPERAND:
        return True
    y = library.without_memory(a[0], _shape_of(shapes), a[0].dtype)
    return all(between.runs_tf32_behind(y, "dw", *reader) for reader in join.read_by)


def _runs_tf32(t: Transposed, x: Tensor, shape: torch.Size, weight: Tensor, of: str) -> bool:
    """Does eager's transposed convolution, or its gradient? It is a convolution's gradient, and the other way round."""
    settings = precision.Settings(t.stride, t.padding, t.dilation)
    y = library.without_memory(x, shape, x.dtype)
    return precision.runs_tf32(y, weight, _OF_CONVOLUTION[of], settings, channels_last=False)


def _shape_of(shapes: Sequence[torch.Size]) -> list[int]:
    N, _, *size = shapes[0]
    return [N, sum(shape[1] for shape in shapes), *size]


# ---------------------------------------------------------------------------------------------------------- the operator


def _nameless(join: Join) -> Join:
    return join._replace(parts=tuple(t and t._replace(name="") for t in join.parts))


@functools.cache
def _operator(join: Join) -> loader_operators.Operator:
    """Its arguments: parts, weights, biases."""
    at = [i for i, t in enumerate(join.parts) if t]
    names = [f"part_{i}" for i in range(len(join.parts))] + [f"weight_{i}" for i in at]
    names += [f"bias_{i}" for i in at if join.parts[i].has_bias]
    arguments = NamedTuple("Arguments", [(name, Tensor) for name in names])

    def forward(a, *, plan):
        return plan.forward(a)

    def shapes(a):
        shape = _shape_of(_shapes(join, a))
        return a[0].new_empty(shape).contiguous(memory_format=torch.channels_last)

    def backward(dy, a, *, plan, needs):
        return plan.backward(dy, a, tuple(needs))

    forward.__annotations__["a"] = arguments
    digest = hashlib.sha256(repr(join).encode()).hexdigest()[:16]
    return loader_operators.declare(
        f"join_{digest}", forward, shapes=shapes, backward=backward, plan=lambda a, *, saving: Plan(join, a)
    )


class Plan:
    """Of a Join's arguments of one kind: its launches, `forward(a)` and `backward(dy, a, needs)`."""

    def __init__(self, join: Join, a: Sequence[Tensor]):
        x = a[0]
        self.join, self.shapes = join, _shapes(join, a)
        self.kernels = inline_loader.load(**_request(join, x.dtype))
        turns, self.rounds = Turns(self.kernels), between.rounds(join, x)
        self.own = [
            (i, Grown(t, a[i], weight, self.shapes[i], turns, self.rounds))
            for i, t, weight, _ in _own(join, a)
        ]
        self.biased = [i for i, t in enumerate(join.parts) if t and t.has_bias]
        self.first_bias = len(join.parts) + len(self.own)
        self.splits: dict[tuple, tuple] = {}

        # Launchers see for themselves how many bytes they can move at a time.
        self.entry = entry = functools.partial(Entry, dtype=x.dtype, aligned=ANYWHERE, last=True)
        table = [entry("out", shape=_shape_of(self.shapes))]
        table += [entry(f"part_{i}", argument=None if t else i) for i, t in enumerate(join.parts)]
        table += [
            entry(f"bias_{i}", argument=self.first_bias + k, last=False) for k, i in enumerate(self.biased)
        ]
        # One channel lies in both layouts alike, and is written without rounding.
        rounded = [not t and library.is_channels_last(x) for t, x in zip(join.parts, a)]
        rounds = [self.rounds and join.result == OPERAND and not known for known in rounded]
        bind = functools.partial(
            self.kernels.join.bound, *self._numbers(rounds), trusting=True, new=new_of(table)
        )
        self.launch = Launch(bind, table, a, [f"part_{i}" for i, _ in self.own])

    def _numbers(self, rounds: Sequence[bool]) -> list[int]:
        N, _, *size = self.shapes[0]
        return [N * size[0] * size[1], *[shape[1] for shape in self.shapes], *rounds]

    def forward(self, a: Sequence[Tensor]) -> Tensor:
        count = len(self.join.parts)
        return self.launch.run(a, *[grown(a[i], a[count + k]) for k, (i, grown) in enumerate(self.own)])[0]

    def backward(self, dy: Tensor, a: Sequence[Tensor], needs: tuple[bool, ...]) -> list[Tensor | None]:
        check_memory(*a)  # which the library reads without a look
        dy = dy.contiguous(memory_format=torch.channels_last)
        if needs not in self.splits:
            self.splits[needs] = self._split(dy, needs)
        launch, places, biases = self.splits[needs]
        made = launch.run((dy,)) if launch else ()
        count, found = len(self.join.parts), [None] * len(a)
        for i, at in places.items():
            found[i] = made[at]
        for i, at in biases.items():
            found[i] = made[at]
        for k, (i, grown) in enumerate(self.own):
            if found[i] is not None:
                wanted = needs[i], needs[count + k]
                found[i], found[count + k] = grown.backward(found[i], a[i], a[count + k], wanted)
        return found

    def _split(self, dy: Tensor, needs: tuple[bool, ...]) -> tuple[Launch | None, dict, dict]:
        """Its launch; and what of the made are the parts' gradients, and the biases', by arguments."""
        count, own = len(self.join.parts), dict(self.own)
        of = {i: needs[i] for i in range(count)}
        of |= {i: needs[i] or needs[count + k] for k, i in enumerate(own)}
        summed = {i: needs[self.first_bias + k] for k, i in enumerate(self.biased)}
        if not any((*of.values(), *summed.values())):
            return None, {}, {}
        table = [
            self.entry(f"part_{i}", shape=shape if of[i] else (0,)) for i, shape in enumerate(self.shapes)
        ]
        table = [each if of[i] else each._replace(last=False) for i, each in enumerate(table)]
        table += [
            self.entry(f"bias_{i}", shape=(self.shapes[i][1],) if summed[i] else (0,), last=False)
            for i in self.biased
        ]
        table.append(self.entry("from", argument=0))
        rounds = [i in own and self.rounds and own[i].differentiates_last for i in range(count)]
        bind = functools.partial(self.kernels.split.bound, *self._numbers(rounds), new=new_of(table))
        launch = Launch(bind, table, (dy,))
        places = {i: launch.made.index(f"part_{i}") for i in of if of[i]}
        biases = {
            self.first_bias + k: launch.made.index(f"bias_{i}")
            for k, i in enumerate(self.biased)
            if summed[i]
        }
        return launch, places, biases


class Grown:
    """A transposed convolution, without its bias, and its gradients, of an x (N, channels in, …) channels last and filters in planes."""

    def __init__(
        self, t: Transposed, x: Tensor, weight: Tensor, shape: torch.Size, turns: Turns, rounds: bool
    ):
        self.t, self.settings, self.turns = t, _settings(t), turns
        self.like_y = library.without_memory(x, shape, x.dtype)
        self.like_weight = library.without_memory(weight, weight.shape, x.dtype)
        self.image = turns.rounded(x) if rounds and not t.of_operand else None
        self.filters = turns.channels_last(weight, rounds)

        def in_tf32(of: str) -> bool:
            return _runs_tf32(t, x, shape, weight, of)

        self.differentiates_last = x.dtype != torch.float32 or in_tf32("dx") and in_tf32("dw")

    def __call__(self, x: Tensor, weight: Tensor) -> Tensor:
        x = self.image(x) if self.image else x
        y = torch.conv_transpose2d(x, self.filters(weight), None, *self.settings)
        return y.contiguous(memory_format=torch.channels_last)

    def backward(
        self, dy: Tensor, x: Tensor, weight: Tensor, wanted: tuple[bool, bool]
    ) -> tuple[Tensor | None, Tensor | None]:
        """dy: channels last, rounded where `differentiates_last`."""
        turns = self.turns
        if self.differentiates_last:
            x = self.image(x) if self.image else x.contiguous(memory_format=torch.channels_last)
            filters = self.filters(weight)
        else:
            dy, x, filters = turns.planes(self.like_y)(dy), x.contiguous(), weight
        stride, padding, output_padding, groups, dilation = self.settings
        settings = None, stride, padding, dilation, True, output_padding, groups
        dx, dw, _ = _convolution_backward(dy, x, filters, *settings, (*wanted, False))
        if dx is not None:
            dx = dx.contiguous(memory_format=torch.channels_last)
        if dw is not None and library.is_channels_last(dw):
            dw = turns.planes(self.like_weight)(dw)
        return dx, dw if dw is None else dw.contiguous()


# ------------------------------------------------------------------------------------------------------------ its source


def _request(join: Join, dtype: torch.dtype) -> dict:
    biased = tuple(bool(t and t.has_bias) for t in join.parts)
    return {"name": "join", "source": text(biased), "device": "cuda", "defines": {"VALUE_T": CTYPES[dtype]}}


@functools.cache
def text(biased: tuple[bool, ...]) -> str:
    """The source for so many parts, of which some get a bias."""
    parts, biases = range(len(biased)), [i for i, is_biased in enumerate(biased) if is_biased]

    def launcher(
        name: str, whole: str, constant: str, part_of: Callable[[int], str], whole_is_first: bool
    ) -> str:
        tensors = [f"{constant}value_t* part_{i}" for i in parts] + [
            f"{constant}value_t* bias_{i}" for i in biases
        ]
        tensors = [whole, *tensors] if whole_is_first else [*tensors, whole]
        numbers = [f"int64_t channels_{i}" for i in parts] + [f"bool rounds_{i}" for i in parts]
        declared = ", ".join([*tensors, "int64_t positions", *numbers, "cudaStream_t stream"])
        given = ", ".join(f"{{{part_of(i)}, channels_{i}, rounds_{i}}}" for i in parts)
        array = whole.rpartition(" ")[2]
        return f"EXPORT void {name}({declared}) {{\n  load::{name}<{len(biased)}>({array}, positions, {{{given}}}, stream);\n}}\n"

    def bias(i: int) -> str:
        return f"bias_{i}" if biased[i] else "nullptr"

    join = launcher(
        "join",
        "value_t* out",
        "const ",
        lambda i: f"const_cast<value_t*>(part_{i}), {bias(i)}, nullptr",
        True,
    )
    split = launcher("split", "const value_t* from", "", lambda i: f"part_{i}, nullptr, {bias(i)}", False)
    included = "".join(f'#include "load/{name}"\n' for name in ("load.h", "turned.cuh", "join.cuh"))
    return f"// Joins {len(biased)} arrays channels last, and splits their gradient.\n{included}\n{TRANSPOSE}{join}{split}"
