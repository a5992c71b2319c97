"""In which layout the library convolves on a GPU, and what turns its operands: decided once for tensors of one kind.

There it is fastest channels last where it runs on tensor cores, and so does what is between convolutions (between.py). `convolving` and
`differentiating` give functions of tensors that lie as those that they were made for; what they decide is not asked again.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

import inline_loader

from . import between, costs, depthwise, library, precision
from .cases import CTYPES

PLANES, TURNED, FOR_TF32, UNITS = range(4)  # kernels/load/turned.cuh's


def fastest(segment, x: Tensor, weight: Tensor, of: str) -> int:
    """In which layout the library is fastest in "forward", for "dx" or for "dw", and as exact as in eager's."""
    served = library.device_type(x) == "cuda" and x.dtype != torch.float64
    if served and depthwise.obstacle(segment, x, weight) is None:
        return TURNED
    if not served or segment.conv.groups > 1 or segment.conv.is_nothing:
        return PLANES
    if library.is_channels_last(x, weight):
        if not between.rounds(segment, x):
            return TURNED
        last = between.convolves_last if of == "forward" else between.differentiates_last
        return FOR_TF32 if last(segment, x, weight) else PLANES
    if weight.dim() == 5 and x.dtype == torch.float32 and of != "forward":
        return PLANES
    around = library.padding(segment.conv, weight)
    if segment.conv.padding_mode != "zeros" or any(before != after for before, after in around):
        return PLANES
    if not costs.library_turns(weight.shape, x.element_size(), of == "forward"):
        return PLANES
    conv, padding = segment.conv, [before for before, _ in around]
    settings = precision.Settings(conv.stride, padding, conv.dilation)
    in_tf32 = x.dtype == torch.float32 and precision.runs_tf32(x, weight, of, settings)
    return FOR_TF32 if in_tf32 else TURNED if x.dtype != torch.float32 else PLANES


class _Turn(NamedTuple):
    """From planes or channels last to one of these: a tensor like the result, without memory; the source's layout; the launcher's numbers (N, rows,
    columns); which of (result, source) lie channels last."""

    like: Tensor
    layout: torch.memory_format
    numbers: tuple[int, int, int]
    last: Sequence[bool]

    @classmethod
    def of(cls, like: Tensor, to_last: bool) -> _Turn:
        """From the one to the other."""
        N, C, *size = like.shape
        to, of = [library.channels_last(like), torch.contiguous_format][:: 1 if to_last else -1]
        numbers = (N, C, math.prod(size)) if to_last else (N, math.prod(size), C)
        return cls(
            library.without_memory(like, like.shape, like.dtype, to), of, numbers, (to_last, not to_last)
        )

    @property
    def moves(self) -> bool:
        return 1 not in self.numbers[1:]

    def source(self, t: Tensor) -> Tensor:
        return t if t.is_contiguous(memory_format=self.layout) else t.contiguous(memory_format=self.layout)

    def view(self, t: Tensor) -> Tensor:
        """Where no element moves."""
        N, C, *size = self.like.shape
        if self.last[0]:
            return t.contiguous().view(N, *size, C).movedim(-1, 1)
        return t.movedim(1, -1).contiguous().view(self.like.shape)


class Turns:
    """Functions that turn tensors by a loaded source's launchers: PyTorch's take twice as long. Each is of tensors like those given here, which
    it gives back where no element moves or is rounded. What is turned for TF32 is rounded: channels last the library cuts off what it
    rounds in planes."""

    def __init__(self, kernels: object):
        self.kernels = kernels
        self.launches: dict[tuple, Callable] = {}  # by launcher, numbers, and which tensors lie channels last

    def channels_last(self, like: Tensor, rounds: bool) -> Callable[[Tensor], Tensor]:
        """What lies so already comes as it is."""
        return itself if library.is_channels_last(like) else self._one(_Turn.of(like, True), rounds)

    def lying(self, like: Tensor, last: bool) -> Callable[[Tensor], Tensor] | None:
        """Of what lies in the other of the two layouts, or None: then it is PyTorch's to copy."""
        if like.dim() not in library.CHANNELS_LAST or not hasattr(self.kernels, "transpose"):
            return None
        turn = _Turn.of(like, last)
        lies_so = turn.moves and like.is_contiguous(memory_format=turn.layout)
        return self._launched(turn, False) if lies_so else None

    def planes(self, like: Tensor) -> Callable[[Tensor], Tensor]:
        """Of what lies channels last."""
        return self._one(_Turn.of(like, False), False)

    def both_channels_last(self, one: Tensor, other: Tensor, rounds: bool) -> Callable:
        """`channels_last` of two tensors."""
        if library.is_channels_last(one) or library.is_channels_last(other):
            return _of_each(self.channels_last(one, rounds), self.channels_last(other, rounds))
        return self._both(_Turn.of(one, True), _Turn.of(other, True), rounds)

    def both_planes(self, one: Tensor, other: Tensor) -> Callable:
        return self._both(_Turn.of(one, False), _Turn.of(other, False), False)

    def rounded(self, like: Tensor) -> Callable[[Tensor], Tensor]:
        """To TF32, of what lies channels last."""
        layout, numbers = library.channels_last(like), (1, 1, like.numel())
        return self._launched(_Turn(_Turn.of(like, True).like, layout, numbers, (True, True)), True)

    def met(self, like: Tensor, strides: Sequence[int], rounds: bool) -> Callable[[Tensor], Tensor]:
        """Of an x (N, C, height, width) in planes, every so many rows and columns, channels last."""
        (N, C, height, width), (down, across) = like.shape, strides
        size = (height - 1) // down + 1, (width - 1) // across + 1
        numbers = N, C, height, width, down, across, rounds
        launch = self._launch("transpose_picked", numbers, (0,))
        met = library.without_memory(like, (N, C, *size), like.dtype, torch.channels_last)
        return _by(launch, met, Tensor.contiguous)

    def _one(self, turn: _Turn, rounds: bool) -> Callable[[Tensor], Tensor]:
        return self._launched(turn, rounds) if rounds or turn.moves else turn.view

    def _launched(self, turn: _Turn, rounds: bool) -> Callable[[Tensor], Tensor]:
        launch = self._launch("transpose", (*turn.numbers, rounds), [i for i in (0, 1) if turn.last[i]])
        return _by(launch, turn.like, turn.source)

    def _both(self, one: _Turn, other: _Turn, rounds: bool) -> Callable:
        """By one launch, where both need one."""
        if not (rounds or one.moves and other.moves):
            return _of_each(self._one(one, rounds), self._one(other, rounds))
        are_last = one.last[0], other.last[0], one.last[1], other.last[1]
        last = [i for i, is_last in enumerate(are_last) if is_last]
        launch = self._launch("transpose_both", (*one.numbers, *other.numbers, rounds), last)
        make, make_other = library.making(one.like), library.making(other.like)

        def turned(t: Tensor, other_t: Tensor) -> tuple[Tensor, Tensor]:
            out, other_out = make(), make_other()
            launch(out, other_out, one.source(t), other.source(other_t))
            return out, other_out

        return turned

    def _launch(self, launcher: str, numbers: tuple, last: Sequence[int]) -> Callable:
        key = launcher, numbers, tuple(last)
        if key not in self.launches:
            bind = getattr(self.kernels, launcher).bound
            new = 2 if launcher == "transpose_both" else 1
            self.launches[key] = bind(*numbers, trusting=True, new=new, last=last)
        return self.launches[key]


class Turning(NamedTuple):
    """How a weight, or its gradient, is turned. rounds: to TF32."""

    turn: _Turn
    rounds: bool

    @classmethod
    def of(cls, like: Tensor, to_last: bool, rounds: bool = False) -> Turning | None:
        """None: it stays where it is."""
        if library.is_channels_last(like):
            return None
        turn = _Turn.of(like, to_last)
        return cls(turn, rounds) if rounds or turn.moves else None

    def comes(self, t: Tensor) -> bool:
        """Does it lie as what is turned does?"""
        return t.is_contiguous(memory_format=self.turn.layout)

    def back(self) -> Turning | None:
        """Of what lies so into planes."""
        turn = _Turn.of(self.turn.like, False)
        return Turning(turn, False) if turn.moves else None


_AT_ONCE = 8, 4, 2, 1  # by one launch: kernels/load/turned.cuh's kTurns, and fewer


def _turning_text() -> str:
    """The source that turns many tensors."""
    text = [
        "// Tensors of many segments, turned by one launch",
        '#include "load/load.h"',
        '#include "load/turned.cuh"\n',
    ]
    for count in _AT_ONCE:
        each = range(count)
        tensors = [f"value_t* out{i}" for i in each] + [f"const value_t* source{i}" for i in each]
        numbers = [f"int64_t N{i}, int64_t rows{i}, int64_t columns{i}" for i in each]
        turns = [f"load::turn_of(out{i}, source{i}, N{i}, rows{i}, columns{i})" for i in each]
        text += [
            f"EXPORT void turn_{count}({', '.join([*tensors, *numbers])}, bool for_tf32, cudaStream_t stream) {{",
            f"  load::turn({{{', '.join(turns)}}}, for_tf32, stream);",
            "}",
        ]
    return "\n".join(text) + "\n"


def turning_request(dtype: torch.dtype) -> dict:
    """What is built for `turning_all`."""
    defines = dict.fromkeys(("VALUE_T", "OUTPUT_T", "PARAMETER_T"), CTYPES[dtype])
    return {"name": "turn", "source": _turning_text(), "device": "cuda", "defines": defines}


def turning_all(turnings: Sequence[Turning | None]) -> dict[int, Callable[[Sequence[Tensor], list], None]]:
    """By few launches, for tensors of which some are turned: at the first of each launch's what turns its own, run(tensors, found). All are on one
    device."""
    jobs = {}
    kinds = dict.fromkeys((each.turn.like.dtype, each.rounds) for each in turnings if each)
    for dtype, rounds in kinds:
        own = [
            i
            for i, each in enumerate(turnings)
            if each and (each.turn.like.dtype, each.rounds) == (dtype, rounds)
        ]
        kernels = inline_loader.load(**turning_request(dtype))
        for count in _AT_ONCE:
            while len(own) >= count:
                some, own = own[:count], own[count:]
                jobs[some[0]] = _job(kernels, some, [turnings[i].turn for i in some], rounds)
    return jobs


def turning_one(like: Tensor) -> Callable[[Tensor], Tensor]:
    """What turns tensors like this one on a GPU, which lies in planes and can lie otherwise, channels last."""
    (run,) = turning_all([Turning.of(like, True)]).values()

    def turned(t: Tensor) -> Tensor:
        found: list = [None]
        run([t], found)
        return found[0]

    return turned


def _job(kernels, some: Sequence[int], turns: Sequence[_Turn], rounds: bool) -> Callable:
    count, makes = len(some), [library.making(turn.like) for turn in turns]
    numbers = [number for turn in turns for number in turn.numbers]
    last = [i + k * count for k in (0, 1) for i, turn in enumerate(turns) if turn.last[k]]
    bind = getattr(kernels, f"turn_{count}").bound
    launch = bind(*numbers, rounds, trusting=True, new=count, last=last)

    def run(tensors: Sequence[Tensor], found: list) -> None:
        made = [make() for make in makes]
        launch(*made, *[turn.source(tensors[i]) for i, turn in zip(some, turns)])
        for i, t in zip(some, made):
            found[i] = t

    return run


class Operands:
    """Of x and a weight what the library takes channels last: both by one launch where one can do it; or x alone, beside filters that are turned
    already. filters: how they are; None: they come as they are."""

    def __init__(self, of_x: Callable, of_weight: Callable, filters: Turning | None = None, of_both=None):
        self.of_x, self.filters = of_x, filters
        self.of_both = of_both or _of_each(of_x, of_weight)

    def __call__(self, x: Tensor, weight: Tensor, turned: Tensor | None = None) -> tuple[Tensor, Tensor]:
        return self.of_both(x, weight) if turned is None else (self.of_x(x), turned)


def _by(launch: Callable, like: Tensor, source: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    make = library.making(like)

    def turned(t: Tensor) -> Tensor:
        out = make()
        launch(out, source(t))
        return out

    return turned


def _of_each(of_one: Callable, of_other: Callable) -> Callable:
    return lambda one, other: (of_one(one), of_other(other))


def itself(t: Tensor) -> Tensor:
    return t


# ------------------------------------------------------------------------------------------------------ forward and backward


def image_of(plan, x: Tensor, layout: int) -> Callable[[Tensor], Tensor]:
    """What makes of an x between convolutions what the library takes in that layout."""
    segment = plan.segment
    if not between.rounds(segment, x) or not library.is_channels_last(x) or segment.conv.is_nothing:
        return itself
    if layout == PLANES:
        return plan.turns.planes(x)
    return itself if segment.of_operand or layout == TURNED else plan.turns.rounded(x)


def convolving(plan, x: Tensor, weight: Tensor) -> tuple[Callable[..., Tensor], Turning | None]:
    """What gives v of an x and a weight like these, as forward's passes read it: channels last where `plan.last` or `plan.layout`. And how it
    turns the filters; it takes turned ones, or None, as its third argument."""
    if plan.own:
        return plan.own, None
    how, image = plan.convolution, image_of(plan, x, plan.runs)
    if not plan.runs:
        if how.is_nothing:
            return lambda x, weight, _: library.aligned(library.convolve(how, x, weight)), None
        behind = plan.turns.channels_last(_like_v(plan, x), False) if plan.last else itself
        return lambda x, weight, _: behind(library.convolve(how, image(x), weight)), None
    how, operands = operands_of(plan, x, weight, plan.runs)
    if not (plan.last or plan.layout):
        in_planes = plan.turns.planes(_like_v(plan, x))

        def run(x: Tensor, weight: Tensor, turned: Tensor | None) -> Tensor:
            return in_planes(library.convolve(how, image(x), weight, operands, turned))

        return run, operands.filters
    layout = library.channels_last(x)

    def last(x: Tensor, weight: Tensor, turned: Tensor | None) -> Tensor:
        v = library.convolve(how, image(x), weight, operands, turned)
        return library.aligned(v, layout) if v is x else v.contiguous(memory_format=layout)

    return last, operands.filters


def differentiating(
    plan, x: Tensor, weight: Tensor, wanted: Sequence[bool], layout: int, turned: bool
) -> tuple[Callable[..., tuple[Tensor | None, Tensor | None]], Turning | None]:
    """What gives of dz, x and the weight the gradients of x and the weight that are wanted, by the library in that layout; and how it turns the
    filters. Given turned ones as its fourth argument, not None, it leaves the weight's gradient as the library gives it. turned: does dz come channels last?"""
    how, image = plan.convolution, image_of(plan, x, layout) if wanted[1] else _standing(plan, x, layout)
    in_planes = not plan.last or between.rounds(plan.segment, x) and not how.is_nothing
    if layout == PLANES and in_planes:
        of_dz = plan.turns.planes(_like_v(plan, x)) if turned else itself

        def in_planes_alone(dz: Tensor, x: Tensor, weight: Tensor, _: None) -> tuple:
            return library.convolve_backward(how, of_dz(dz), image(x), weight, wanted)

        return in_planes_alone, None
    how, operands = operands_of(plan, x, weight, layout or plan.runs, wanted[1], wanted[0])
    of_dz, results = _of_gradient(plan, x, layout, turned), _results(plan, how, x, weight)

    def run(dz: Tensor, x: Tensor, weight: Tensor, turned: Tensor | None) -> tuple:
        found = library.convolve_backward(how, of_dz(dz), image(x), weight, wanted, operands, turned)
        return results(*found, turned is not None)

    return run, operands.filters


def _standing(plan, x: Tensor, layout: int) -> Callable[[Tensor], Tensor]:
    """In the place of `image_of` where only x's gradient is wanted, for which its values are never read: no pass makes what would lie so."""
    turns = layout == PLANES and image_of(plan, x, layout) is not itself
    return _standing_in(x, torch.contiguous_format) if turns else itself


def _standing_in(x: Tensor, layout: torch.memory_format) -> Callable[[Tensor], Tensor]:
    make = library.making(library.without_memory(x, x.shape, x.dtype, layout))
    return lambda x: make()


def _of_gradient(plan, x: Tensor, layout: int, turned: bool) -> Callable[[Tensor], Tensor]:
    """dz as the library takes it channels last."""
    if not turned:
        return plan.turns.channels_last(_like_v(plan, x), layout == FOR_TF32)
    rounds = (
        plan.last and layout == FOR_TF32 and not plan.composed.backward.turns
    )  # it is another gradient, too
    return plan.turns.rounded(_like_v(plan, x)) if rounds else itself


def _results(plan, how: library.Convolution, x: Tensor, weight: Tensor) -> Callable:
    """Makes eager's gradients of those that the library gives channels last, or None."""
    x_shape, turns, lies = x.shape, plan.turns, library.weight_format(weight)
    turns_dx = how is plan.convolution and not library.is_channels_last(x, weight)
    turns_dw = not library.is_channels_last(weight)
    of_dx = turns.planes(x) if turns_dx else itself
    of_dw = turns.planes(weight) if turns_dw else itself
    of_both = turns.both_planes(x, weight) if turns_dx and turns_dw else None
    if how is not plan.convolution:
        down, across = plan.convolution.settings[0]

        def of_dx(met: Tensor) -> Tensor:
            dx = met.new_zeros(x_shape)
            dx[:, :, ::down, ::across] = met
            return dx

    def results(dx: Tensor | None, dw: Tensor | None, leaves_dw: bool) -> tuple[Tensor | None, Tensor | None]:
        is_last = dw is not None and library.is_channels_last(dw)
        if dx is not None and is_last and of_both and not leaves_dw:
            return of_both(dx, dw)
        dx = dx if dx is None else of_dx(dx)
        if dw is None or is_last and leaves_dw:
            return dx, dw
        return dx, (of_dw(dw) if is_last else dw).contiguous(memory_format=lies)

    return results


def _like_v(plan, x: Tensor) -> Tensor:
    shape = plan.sizes.N, plan.sizes.C, *plan.sizes.levels["e"][5 - x.dim() :]
    return library.without_memory(x, shape, plan.value_dtype)


def operands_of(
    plan, x: Tensor, weight: Tensor, layout: int, reads_x: bool = True, reads_weight: bool = True
) -> tuple[library.Convolution, Operands]:
    """The library's convolution, and its operands channels last. Filters of one place that meet only some of x's positions are given these
    alone. Where eager's are channels last, all is as it is. reads_x, reads_weight: else any values do, and nothing is turned."""
    how, turns, rounds = plan.convolution, plan.turns, layout == FOR_TF32
    if plan.last and not plan.segment.result and library.is_channels_last(x, weight):
        return how, Operands(itself, itself)
    filters, of_weight = Turning.of(weight, True, rounds), turns.channels_last(weight, rounds)
    if not reads_weight and filters:
        filters, of_weight = None, _standing_in(weight, library.channels_last(weight))
    if how.around:  # then the library's x is a larger one
        of_x = lambda image: turns.channels_last(image, rounds)(image)  # noqa: E731
        return how, Operands(of_x, of_weight, filters)
    stride, padding, *rest = how.settings
    meets_all = math.prod(stride) == 1 or any(padding) or bool(plan.last and plan.segment.result)
    if x.dim() != 4 or math.prod(weight.shape[2:]) > 1 or meets_all or library.is_channels_last(x):
        if not (reads_x or library.is_channels_last(x)):
            return how, Operands(_standing_in(x, library.channels_last(x)), of_weight, filters)
        of_both = turns.both_channels_last(x, weight, rounds) if reads_weight else None
        return how, Operands(turns.channels_last(x, rounds), of_weight, filters, of_both)
    once = (1, 1)
    how = how._replace(settings=(once, padding, *rest), behind=(how.behind[0], once, *how.behind[2:]))
    return how, Operands(turns.met(x, stride, rounds), of_weight, filters)
