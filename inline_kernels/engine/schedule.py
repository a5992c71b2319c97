"""The schedule `load`: the library's convolution gives v, generated kernels do the rest of a segment, forward and backward.

    plan = schedule.plan(Case(segment, arguments, saving=True, dtype=torch.float32))
    y, *saved = schedule.forward(plan, arguments)
    gradients = schedule.backward(plan, dy, arguments, saved, needs)

`arguments`: as in cases.py. y and dy are contiguous; their shape is the caller's, what counts is the order of their elements. Running
statistics are written in place. What is computed, and what forward saves, programs.py says; here is which arrays there are at given sizes, and
who runs.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch
from torch import Tensor

import inline_loader
from inline_kernels.engine import library
from inline_kernels.loader.operators import precision

from . import between, depthwise, gradients, inside, layouts, naming, source, strips
from .cases import CTYPES, Case, Sizes, first_number, places
from .graph import ELEMENTS, Space
from .launching import Entry, Launch, new_of, picking
from .layouts import FOR_TF32, PLANES, TURNED, UNITS
from .passes import Array, Planes, Program, Unsupported
from .programs import Composed, composed_of, kind_for

__all__ = ["Unsupported", "backward", "describe", "forward", "plan", "requests", "saved"]

_FEW_PARTS = 32  # reduce.cuh's kFewParts: more are merged by a launch of their own, which takes 3 µs
_BLOCKS = 384  # that keep a GPU busy


@dataclass
class Plan:
    """What is decided for arguments with the same shapes, dtypes and numbers."""

    segment: object
    composed: Composed
    sizes: Sizes
    value_dtype: torch.dtype
    parameter_dtype: torch.dtype
    dtype: torch.dtype
    saving: bool
    device: str
    kernels: object = None
    convolution: library.Convolution | None = None
    convolve: Callable | None = None  # gives v of x and the weight, as forward's passes read it
    filters: layouts.Turning | None = None  # how it turns the latter first, which a chain does for it
    own: Callable | None = None  # the same, contiguous, in the library's place
    # Gives what forward does, of the arguments, in the place of all that (inside.py, stored.py).
    instead: Callable | None = None
    layout: int = 0  # of what forward's passes turn, or backward's (`Program.turns`): kernels/load/turned.cuh
    runs: int = 0  # in what layout v is convolved
    last: bool = False  # are all arrays of positions and channels channels last? Then so is y
    turns_y: int = 0  # … or it alone, and its gradient, while x is in planes: in which layout
    launch: Launch | None = None
    in_place: bool = False
    without_dz: bool = False  # does backward's pass for the gradient of v alone not run?
    results: Callable | None = None  # gives what forward returns, of what launch is given and makes
    # By what is asked for, and the library's settings, which may be others than forward's; those of the last one.
    backward: dict[tuple, Back] = field(default_factory=dict)
    settings: object = None
    turned: tuple | None = None  # of `_input_gradient`: the size of dx, and what is launched
    pieces: Sequence[
        tuple[int, int, Plan]
    ] = ()  # samples (first, behind the last), and their plan; none: all at once
    strips: Mapping[str, strips.Strips] = field(default_factory=dict)  # by launcher

    @classmethod
    def of(cls, case: Case, composed: Composed | None = None) -> Plan:
        """With its sizes alone; it keeps no argument. composed: in place of the case's own. Raises Unsupported."""
        sizes, composed = case.sizes, composed or composed_of(case.segment, kind_for(case))
        dtypes = case.x.dtype, case.parameter_dtype, case.dtype
        return cls(case.segment, composed, sizes, *dtypes, case.saving, case.device)

    @functools.cached_property
    def turns(self) -> layouts.Turns:
        return layouts.Turns(self.kernels)

    @functools.cached_property
    def given_lie(self) -> list[torch.memory_format]:
        """dy, and what forward saves."""
        last = library.CHANNELS_LAST[2 + self.segment.graph.dimensions]
        of_y = _has_channels(self.segment.outputs[0].space)
        are_last = [
            bool(self.turns_y) or self.last and of_y,
            *[self.last and a.name == "v" for a in self.composed.saved],
        ]
        return [last if each else torch.contiguous_format for each in are_last]

    @functools.cached_property
    def shape(self) -> list[int]:
        """Eager's, of y."""
        segment, sizes = self.segment, self.sizes
        level = segment.outputs[0].space.level
        positions = sizes.levels[level][3 - segment.graph.dimensions :] if level else ()
        of_axis = {"n": sizes.N, "c": sizes.C, "s": math.prod(positions), "": 1}
        of_axis |= {str(i): s for i, s in enumerate(positions)}
        return [of_axis[axis] for axis in segment.axes]


def _build(case: Case) -> dict:
    name = "tail_" + naming.identifier(case.segment.conv.name)
    composed = composed_of(case.segment, kind_for(case))
    layout = {"CHANNELS_LAST": "1"} if is_last(case, composed) else {}
    if layout and between.rounds(case.segment, case.x):
        layout["ROUNDS_Y"] = "1"
        if case.saving and not case.segment.conv.is_nothing:
            layout["ROUNDS_DZ"] = str(int(between.differentiates_last(case.segment, case.x, case.weight)))
    return {"name": name, "source": composed.text, "device": case.device, "defines": case.defines | layout}


def is_last(case: Case, composed: Composed) -> bool:
    """Are all arrays of positions and channels channels last, as eager's v, and its y, if that has both?"""
    y = case.segment.outputs[0].space
    if not (case.last if _has_channels(y) else case.convolves_last) or _turns_y(case, composed):
        return False
    return all(map(_can_lie_last, _programs(composed)))


def _turns_y(case: Case, composed: Composed) -> bool:
    """Is it y alone, and its gradient?"""
    return case.turns_y and all(each.turned and _can_lie_last(each) for each in _programs(composed))


def _programs(composed: Composed) -> list[Program]:
    return [program for program in (composed.forward, composed.backward) if program]


def _can_lie_last(program: Program) -> bool:
    """Does all that has positions and channels come for each sample?"""
    return not any(_has_channels(leaf.space) and not leaf.space.n for leaf in program.leaves())


def _has_channels(space: Space) -> bool:
    """At positions."""
    return bool(space.level) and space.c


def requests(case: Case) -> list[dict]:
    """What inline_loader builds for it."""
    return [_build(case), *depthwise.requests(case)]


def plan(case: Case, edited: str | None = None, piece: bool = False, own: Callable | None = None) -> Plan:
    """edited: in place of its own text. piece: only some samples of a batch, whose result is there. own: `Plan.own`. Raises Unsupported with
    the reason where the schedule can't do it."""
    if case.x.dtype not in CTYPES or case.dtype not in CTYPES:
        raise Unsupported(f"there are kernels for {', '.join(CTYPES.values())}")
    found, request = Plan.of(case), _build(case)
    found.kernels = inline_loader.load(**request | ({"source": edited} if edited else {}))
    found.convolution = depthwise.convolution(case) or library.Convolution.of(case.segment.conv, case.weight)
    _set_layout(found, case, own is not None)
    found.own = own
    found.layout = _turned(found, found.composed.forward, found.runs)
    _divide(found, case.arguments)
    found.pieces = () if piece else _pieces(found, case, edited)
    _set_launch(found, case.arguments, piece)
    found.convolve, found.filters = layouts.convolving(found, case.x, case.weight)
    if edited is None and own is None and inside.runs(case):
        found.instead = inside.planned(found, case)
    return found


def _lay_out(plan: Plan, case: Case) -> None:
    plan.last = is_last(case, plan.composed)
    if _turns_y(case, plan.composed):
        rounds = between.rounds(case.segment, case.x) and case.segment.result == between.OPERAND
        plan.layout = plan.turns_y = FOR_TF32 if rounds else TURNED


def _set_layout(plan: Plan, case: Case, own: bool) -> None:
    _lay_out(plan, case)
    plan.runs = PLANES if own else layouts.fastest(case.segment, case.x, case.weight, "forward")
    if plan.last:
        plan.runs = TURNED
        if _rounds(case.segment, case.x, case.weight):
            in_tf32 = between.convolves_last(case.segment, case.x, case.weight)
            plan.runs = FOR_TF32 if in_tf32 else PLANES


def _rounds(segment, x: Tensor, weight: Tensor) -> bool:
    """Does the library round operands channels last that in eager are in planes?"""
    by_library = not segment.conv.is_nothing and depthwise.obstacle(segment, x, weight) is not None
    return by_library and between.rounds(segment, x)


def _turned(plan: Plan, program: Program, layout: int) -> int:
    """The layout in which a program's passes have what they turn, where the library has the convolution's side in that."""
    if plan.last or plan.turns_y:
        return plan.turns_y or TURNED
    return layout if program.turned and plan.sizes.C % 8 == 0 else PLANES


def _set_launch(plan: Plan, arguments: Sequence, piece: bool) -> None:
    """Forward's, and what it returns. piece: y is there."""
    composed, divided = plan.composed, plan.strips.get("forward")
    keeps_v = any(array.name == "v" for array in composed.saved)
    turned = plan.layout and not plan.last
    over = not (keeps_v or turned or composed.own.convolution) and plan.value_dtype == plan.dtype
    over = over and not plan.segment.conv.is_nothing  # v is x
    plan.in_place = over and not piece and _may_write_over_v(composed.forward, "y")
    given, shapes = ("v", "y") if piece or plan.in_place else ("v",), {"y": plan.shape}
    if divided:
        given = "image", "filters"
        kept = keeps_v or source.keeps_v(composed.forward)
        of_v = _shape(plan, composed.forward, Array("v", "value", ELEMENTS))
        shapes["v"] = (divided.samples, *of_v[1:]) if kept else (0,)
    plan.launch = launch_of(
        plan, plan.kernels.forward, composed.forward, composed.forward_names, arguments, given, shapes, True
    )
    names = [*given, *plan.launch.made]
    plan.results = picking([names.index(name) for name in ("y", *[array.name for array in composed.saved])])


def _divide(plan: Plan, arguments: Sequence) -> None:
    """Sets the strips of the launchers that have some."""
    composed, segment, saved = plan.composed, plan.segment, {array.name for array in plan.composed.saved}
    image = strips.Image(segment.conv, arguments[0], arguments[len(segment.inputs)])
    ahead, back = composed.forward, composed.backward
    if ahead.convolves:
        windows = [source.window_of_v(segment.graph, ahead.passes[i].level) for i in ahead.in_strips]
        whole = "v" in saved or ahead.mixes_samples or not source.keeps_v(ahead)
        plan.strips["forward"] = strips.of_convolution(image, plan.sizes, windows, whole)
    if back and back.differentiated_by:
        by = back.differentiated_by
        image = strips.Image(segment.conv, arguments[0], arguments[len(segment.inputs)], by == "winograd")
        plan.strips["backward"] = strips.of_gradient(image, plan.sizes, by)


def _pieces(plan: Plan, case: Case, edited: str | None) -> Sequence[tuple[int, int, Plan]]:
    """On a CPU a few samples are convolved at a time, as many as stay in its caches until their result is there; where nothing is kept
    and no sample's result hangs on another's."""
    segment, x, N = plan.segment, case.x, plan.sizes.N
    mixed = plan.composed.forward.mixes_samples or segment.random or not segment.outputs[0].space.n
    if plan.device != "cpu" or plan.saving or mixed or plan.strips:
        return ()
    positions = math.prod(plan.sizes.levels["e"])
    sample = plan.sizes.C * positions * x.element_size()
    samples = max(1, library.CPU_PIECE_BYTES // sample)
    if N <= samples:
        return ()
    plans: dict[int, Plan] = {}
    found = []
    for first in range(0, N, samples):
        last = min(first + samples, N)
        if last - first not in plans:
            some = case._replace(arguments=_of_samples(plan, case.arguments, first, last))
            plans[last - first] = globals()["plan"](some, edited, True)
        found.append((first, last, plans[last - first]))
    return found


def _of_samples(plan: Plan, arguments: Sequence, first: int, last: int) -> list:
    inputs = plan.segment.inputs
    own = [t[first:last] if each.space.n else t for each, t in zip(inputs, arguments)]
    return [*own, *arguments[len(inputs) :]]


def _may_write_over_v(program: Program, name: str) -> bool:
    """Does the pass of that result, an element's, read v at its own place alone, before it writes there, and no later one v?"""
    own = {
        (i, program.arrays[key].space)
        for i, each in enumerate(program.passes)
        for key in each.targets
        if program.arrays[key].name == name
    }
    if len(own) != 1:
        return False
    ((at, space),) = own
    reads = [each.reads_v for each in program.texts]
    before = program.texts[at].scalar or name in program.texts[at].before_v
    return space == ELEMENTS and not before and not any(reads[at + 1 :])


def _numbers(plan: Plan, program: Program, names: naming.Names, arguments: Sequence) -> list:
    segment, sizes = plan.segment, plan.sizes
    values = dict(zip(segment.scalars, arguments[first_number(segment) :]))
    found: list = [float(values[name]) for name in names.scalars]
    found += [sizes.N, sizes.C]
    for level in ["e", *segment.graph.levels]:
        found += sizes.levels[level]
    passes = enumerate(program.passes)
    found += [_parts(plan, program, i) for i, each in passes if isinstance(each, Planes)]
    divided = plan.strips.get(_launcher(plan, program))
    return found + [plan.layout] * bool(program.turned) + ([*divided.numbers] if divided else [])


def _launcher(plan: Plan, program: Program) -> str:
    return "backward" if program is plan.composed.backward else "forward"


def _parts(plan: Plan, program: Program, number: int) -> int:
    """Blocks that share a plane: of a few packs a thread on a GPU, or of a tile; strips that fill a core's cache on a CPU."""
    each, divided = program.passes[number], plan.strips.get(_launcher(plan, program))
    if plan.without_dz and _makes_dz_alone(program, number):
        return 0
    if divided and (number in program.in_strips or number == program.differentiated):
        return divided.parts
    positions = plan.sizes.positions(each.level)
    pack = 8 if plan.value_dtype.itemsize == 2 else 4  # planes.cuh's kPack
    turned = plan.layout and number in program.turned
    sums = any(key.what != "value" for key in each.targets)
    if plan.last or turned and source.sums_alone(program, number):  # LastPlane's, or LastRows'
        packs = -(-plan.sizes.C // (4 if sums else pack))
        lanes = _lanes_across(packs)
        most, side_by_side = -(-positions * lanes // 256), 1 if each.by_sample else -(-packs // lanes)
        if sums:  # a lane has eight positions, of which it reads four at once
            planes = plan.sizes.N * side_by_side
            return _few(_shares(-(-most // 8), planes), planes)
        return max(_shares(most, plan.sizes.N * side_by_side), most // 4)
    if turned:  # turned.cuh's tiles
        most = -(-positions // (32 * pack))
        side_by_side = plan.sizes.N * -(-plan.sizes.C * plan.value_dtype.itemsize // 128)
        parts = most if plan.layout == UNITS else _shares(most, side_by_side)
        return _few(parts, side_by_side) if sums and plan.turns_y else parts
    if plan.device == "cpu":
        return positions // (1 << 16 if not each.by_sample else 1 << 12) + 1
    return positions // (1024 if each.by_sample else 4096) + 1


def _makes_dz_alone(program: Program, number: int) -> bool:
    return [program.arrays[key].name for key in program.passes[number].targets] == ["dz"]


def _needs_no_dz(plan: Plan) -> bool:
    """Where x, which is v, has no gradient: does a pass make that alone, and for nobody else?"""
    program, roots = plan.composed.backward, [root for root in plan.composed.gradients.values() if root]
    if plan.device != "cuda" or not plan.segment.conv.is_nothing:
        return False
    touching = [i for i, text in enumerate(program.texts) if "dz" in text.pointers]
    own = [_makes_dz_alone(program, i) for i in touching]
    return own == [True] and [root.name for root in roots].count("dz") == 1


def _lanes_across(packs: int) -> int:
    """As planes.cuh has it. Nothing that is computed hangs on it here, only how many blocks share a plane."""
    most = min(32, 1 << (packs - 1).bit_length())
    few = [lanes for lanes in (most, most // 2, most // 4, most // 8) if lanes >= min(4, most)]
    return min(few, key=lambda lanes: -(-packs // lanes) * lanes)


def _shares(most: int, planes: int) -> int:
    """Blocks that share planes, of which they take some side by side: so many that a GPU has work for each of its blocks a few times."""
    return max(1, min(most, -(-2048 // planes)))


def _few(parts: int, planes: int) -> int:
    """As many as need no merging, where those are blocks enough."""
    suffice = planes * _FEW_PARTS >= _BLOCKS or parts <= 2 * _FEW_PARTS
    return min(parts, _FEW_PARTS) if suffice else parts


# ---------------------------------------------------------------------------------------------------- arrays and launches


def _dtype(plan: Plan, array: Array) -> torch.dtype:
    accumulated = torch.float64 if plan.value_dtype == torch.float64 else torch.float32
    return {
        "value": plan.value_dtype,
        "output": plan.dtype,
        "real": accumulated,
        "parameter": plan.parameter_dtype,
        "double": torch.float64,
        "moments": torch.float64,
        "index": torch.int32,
        "byte": torch.uint8,
        "mask": torch.uint8,
        "seed": torch.int64,
    }[array.kind]


def _shape(plan: Plan, program: Program, array: Array) -> list[int]:
    shape = plan.sizes.shape(array.space)
    if array in (naming.SCRATCH, naming.KEPT):
        return [sum((_bytes(plan, program, a) + 15) // 16 * 2 for a in source.rooms(program)[array])]
    if array is naming.PASSES:
        return [1]
    if array.name == "dz" and plan.layout == UNITS:
        return [gradients.size(plan.sizes.N, plan.sizes.C, plan.sizes.positions("e"), plan.value_dtype)]
    if array.name in ("v", "dz"):  # as the library gives it
        return [*shape[:2], *shape[5 - plan.segment.graph.dimensions :]]
    if array.parts is not None:
        shape = [*shape, _parts(plan, program, array.parts)]
    return [*shape, 3] if array.kind == "moments" else shape


def _bytes(plan: Plan, program: Program, array: Array) -> int:
    return math.prod(_shape(plan, program, array)) * _dtype(plan, array).itemsize


def launch_of(
    plan: Plan,
    launcher,
    program: Program,
    names: naming.Names,
    arguments: Sequence,
    given: Sequence[str] = (),
    shapes: Mapping = {},
    trusting: bool = False,
) -> Launch:
    """given: what is there by name. shapes: of what isn't of its own. trusting: as in loader/launch.py; what backward is given may have been
    in others' hands."""
    at = places(plan.segment)
    made, table = {*program.arrays.values()}, []
    for array in source.parameters(program, names):
        place = None if array.name in given else at.get(array.name)
        shape = None
        if place is None and array.name not in given:
            shape = shapes[array.name] if array.name in shapes else _shape(plan, program, array)
        last = _lies_last(plan, program, array, place is not None)
        table.append(Entry(array.name, _dtype(plan, array), place, shape, array in made, last=last))
    numbers = _numbers(plan, program, names, arguments)
    bind = functools.partial(launcher.bound, *numbers, trusting=trusting, new=new_of(table))
    number = at["seed"] + 1 if names.random else None

    def turning(like: Tensor, last: bool) -> Callable | None:
        return plan.turns.lying(like, last) if like.dtype == plan.value_dtype else None

    return Launch(bind, table, arguments, given, number, turning)


def entry_of(plan: Plan, array: Array, place: int | None) -> Entry:
    """Of a result of forward in a launcher of others, written over that argument if there is one."""
    shape = None
    if place is None:
        shape = plan.shape if array.name == "y" else _shape(plan, plan.composed.forward, array)
    return Entry(array.name, _dtype(plan, array), place, shape, True)


def _lies_last(plan: Plan, program: Program, array: Array, comes_in: bool) -> bool:
    """Is it a tensor that lies channels last? What is kept for backward, which nobody else sees, is none."""
    if array.name == program.turns and plan.layout in (TURNED, FOR_TF32):
        return True
    if array.name in ("v", "dz"):
        return plan.last
    known = comes_in or array.name in ("y", "dy") or array.name.startswith("d_")
    return known and plan.last and _has_channels(array.space)


# -------------------------------------------------------------------------------------------------------------- execution


def forward(plan: Plan, arguments: Sequence, turned: Tensor | None = None) -> Sequence[Tensor]:
    """y, and what backward needs. turned: the filters as `plan.filters` turns them."""
    if plan.instead:
        return plan.instead(arguments, turned)
    if plan.pieces:
        return [_forward_in_pieces(plan, arguments)]
    x, weight = arguments[0], arguments[len(plan.segment.inputs)]
    if divided := plan.strips.get("forward"):
        given = divided.image.of(x), weight.contiguous()
    else:
        v = plan.convolve(x, weight) if turned is None else plan.convolve(x, weight, turned)
        given = (v, v) if plan.in_place else (v,)
    return plan.results([*given, *plan.launch.run(arguments, *given)])


def _forward_in_pieces(plan: Plan, arguments: Sequence) -> Tensor:
    y = arguments[0].new_empty(plan.shape, dtype=plan.dtype)
    for first, last, piece in plan.pieces:
        some = _of_samples(plan, arguments, first, last)
        piece.launch.run(
            some, library.convolve(plan.convolution, some[0], some[len(plan.segment.inputs)]), y[first:last]
        )
    return y


class Back(NamedTuple):
    """Backward for what is asked for. Of what launch makes the places: gradients, of each input and parameter (None: there is none, or it is
    the convolution's), those that are `converted` then; dz, but where it is written over what launch is given (its place: `over`);
    dweight, where it is our own; passes. `library` gives of dz, x and the weight
    the gradients of the latter, None where it isn't asked, and turns the `filters` first; `ours` those that the library isn't asked
    for, and None; input_gradient: so does, of x, a launcher of the source."""

    launch: Launch | None
    gradients: Sequence[int | None]
    converted: Sequence[tuple[int, torch.Size, torch.dtype]] = ()
    dz: int | None = None
    dweight: int | None = None
    passes: int | None = None
    library: Callable | None = None
    filters: layouts.Turning | None = None
    ours: Callable | None = None
    input_gradient: bool = False
    over: int | None = None
    frees: Sequence[int] = ()  # of what forward saved, behind the launch


def backward(
    plan: Plan,
    dy: Tensor,
    arguments: Sequence,
    saved: Sequence[Tensor],
    needs: Sequence[bool],
    turned: Tensor | None = None,
    spent: bool = False,
) -> list[Tensor | None]:
    """The gradients of inputs, parameters and buffers (None), contiguous but for that of x. turned: the filters as `Back.filters` turns them; their
    gradient then lies as those do. spent: nobody needs what was saved any more, so that its memory is used, or freed."""
    weight_at = len(plan.segment.inputs)
    x, weight, asked = arguments[0], arguments[weight_at], (needs[0], needs[weight_at])
    plan.settings = precision(x)
    spent = spent and not plan.strips  # which may read it twice
    back, made, passes, dz = _back(plan, *asked, True, arguments, spent), (), 1, None
    if back.launch:
        # A user's hooks may give what was saved back in other strides; the library takes its operands as they come.
        given = [_lying(t, layout) for t, layout in zip((dy, *saved), plan.given_lie)]
        if back.passes is not None:
            given.append(plan.strips["backward"].image.of(x))
        if back.over is not None:
            given.append(dz := given[back.over])
        made = back.launch.run(arguments, *given)
        passes = 1 if back.passes is None else made[back.passes].item()
        if passes & 2:  # the library says what is infinite
            back = _back(plan, *asked, False, arguments)
            made = back.launch.run(arguments, *given)
        for i in back.frees:
            saved[i].untyped_storage().resize_(0)
    found = [None if place is None else made[place] for place in back.gradients]
    for i, shape, dtype in back.converted:
        found[i] = found[i].view(shape).to(dtype)
    if not passes:
        found[0], found[weight_at] = (
            t.new_zeros(t.shape) if need else None for t, need in zip((x, weight), asked)
        )
    elif dz is not None or back.dz is not None:
        dz = made[back.dz] if dz is None else dz
        if back.library:
            given = (dz, x, weight) if turned is None else (dz, x, weight, turned)
            found[0], found[weight_at] = back.library(*given)
        if back.ours:
            for i, own in zip((0, weight_at), back.ours(dz, x, weight)):
                found[i] = own if own is not None else found[i]
        if back.input_gradient:
            found[0] = _input_gradient(plan, dz, weight)
        if back.dweight is not None:
            found[weight_at] = made[back.dweight]
    return found + [None] * len(plan.segment.buffers)


def _lying(t: Tensor, layout: torch.memory_format) -> Tensor:
    return library.aligned(t, layout) if t.data_ptr() % 16 or not t.is_contiguous(memory_format=layout) else t


def turns_filters(plan: Plan, needs: Sequence[bool]) -> layouts.Turning | None:
    """How backward for that turns the filters, once it has run."""
    asked = needs[0], needs[len(plan.segment.inputs)], True, plan.settings
    back = plan.backward.get((*asked, False)) or plan.backward.get((*asked, True))
    return back and back.filters


def _back(plan: Plan, dx: bool, dw: bool, own: bool, arguments: Sequence, spent: bool = False) -> Back:
    """own: the filters' gradient may be one of our own. spent: dz may be written over v."""
    key = dx, dw, own, plan.settings, spent
    if (found := plan.backward.get(key)) is None:
        found = plan.backward[key] = _planned_back(plan, dx, dw, own, arguments, spent)
    return found


def spends(plan: Plan) -> bool:
    """Does what forward saved take memory that backward would rather use, or free?"""
    return any(array.space.level for array in plan.composed.saved) and not plan.strips


def _planned_back(plan: Plan, dx: bool, dw: bool, own: bool, arguments: Sequence, spent: bool) -> Back:
    segment, composed, divided = plan.segment, plan.composed, plan.strips.get("backward")
    x, weight = arguments[0], arguments[len(segment.inputs)]
    ways = _of_our_own(plan, x, weight, dx, dw)
    of_library = (
        dx and not (composed.own.input_gradient or ways.x),
        dw and not (divided and own or ways.weight),
    )
    asked = [of for of, need in zip(("dx", "dw"), of_library) if need]
    layout = min([layouts.fastest(segment, x, weight, of) for of in asked], default=PLANES)
    layout = UNITS if ways.weight == gradients.PACKED else PLANES if any(ways) else layout
    if plan.last and _rounds(segment, x, weight):
        layout = FOR_TF32 if between.differentiates_last(segment, x, weight) else PLANES
    program, roots = composed.backward, {leaf.attr[0]: root for leaf, root in composed.gradients.items()}
    if not (program and program.roots):
        return Back(None, [None] * (len(segment.inputs) + len(segment.parameters)))
    own, given, shapes = bool(own and dw and divided), ["dy", *[array.name for array in composed.saved]], {}
    names, converted = [*[leaf.attr[0] for leaf in segment.inputs], *segment.parameters], []
    for i, (root, t) in enumerate(zip(map(roots.get, names), arguments)):
        if root and (shapes.setdefault(root.name, t.shape), _dtype(plan, root)) != (t.shape, t.dtype):
            converted.append((i, t.shape, t.dtype))
    if divided:
        given.append("image")
        shapes["dweight"] = weight.shape if own else (0,)
        if not any(of_library) and not dx:
            shapes.setdefault("dz", (0,))
    without_dz = not dx and _needs_no_dz(plan)
    if without_dz:
        shapes["dz"] = (0,)
    side = replace(plan, layout=_turned(plan, program, layout), without_dz=without_dz)
    over = spent and not without_dz and (plan.last or not side.layout) and _may_write_over_v(program, "dz")
    over = over and "v" in given and not plan.segment.conv.is_nothing  # where v is x
    given += ["dz"] * bool(over)
    launch = launch_of(
        side, plan.kernels.backward, program, composed.backward_names, arguments, given, shapes
    )
    given_by_library, filters = None, None
    if any(of_library):
        last = side.last or bool(side.layout) and program.turns == "dz"
        given_by_library, filters = layouts.differentiating(plan, x, weight, of_library, layout, last)
    place = {name: i for i, name in enumerate(launch.made)}
    found = [place[root.name] if root else None for root in map(roots.get, names)]
    return Back(
        launch,
        found,
        converted,
        place["dz"] if roots["z"] and not without_dz and not over else None,
        place["dweight"] if own else None,
        place.get("passes"),
        given_by_library,
        filters,
        gradients.planned(ways, segment, x, weight) if any(ways) else None,
        dx and not (of_library[0] or ways.x),
        given.index("v") if over else None,
        [i for i, a in enumerate(composed.saved) if a.space.level and not (over and a.name == "v")] * spent,
    )


def _of_our_own(plan: Plan, x: Tensor, weight: Tensor, dx: bool, dw: bool) -> gradients.Ways:
    """Which of our kernels give the gradients of x and the weight that are asked for."""
    if not _gives_dz(plan):
        return gradients.Ways()
    return gradients.fastest(plan.segment, x, weight, dx, dw, _in_units(plan))


def _gives_dz(plan: Plan, last: bool = False) -> bool:
    """In planes, or, where that does, too, channels last?"""
    program, roots = plan.composed.backward, plan.composed.gradients
    has_dz = program and any(root and leaf.attr[0] == "z" for leaf, root in roots.items())
    return bool(has_dz and (last or not plan.last))


def _in_units(plan: Plan) -> bool:
    """Does a pass of positions alone write dz?"""
    program = plan.composed.backward
    return program.turns == "dz" and bool(program.turned)


def _input_gradient(plan: Plan, dz: Tensor, weight: Tensor) -> Tensor:
    """That of x: dz, with so many zeros around it, convolved with the filters turned round."""
    turned = weight.flip(*range(2, weight.dim())).transpose(0, 1).contiguous()
    if plan.turned is None:
        image, numbers = strips.turned(plan.segment.conv, dz, turned)
        plan.turned = image.result, plan.kernels.convolve.bound(*numbers, trusting=True)
    size, launch = plan.turned
    dx = dz.new_empty(len(dz), len(turned), *size)
    launch(dx, dz, turned)
    return dx


# ------------------------------------------------------------------------------------------------------------ in words


def saved(case: Case) -> list[tuple[list[int], torch.dtype, torch.memory_format]]:
    """Shapes and dtypes of what forward saves, and how it lies."""
    found = Plan.of(case)
    _lay_out(found, case)
    arrays = found.composed.saved
    if any(a.parts is not None for a in arrays):
        _divide(found, case.arguments)
    shapes = [_shape(found, found.composed.forward, a) for a in arrays]
    return [*zip(shapes, [_dtype(found, a) for a in arrays], found.given_lie[1:])]


def describe(case: Case, own: str | None = None, done: int | None = None) -> str:
    """What a plan for it runs, in words; nothing is built. own: what convolves in the library's place; done: the pass that it does, too. Raises
    Unsupported."""
    if own is None and inside.runs(case):
        return inside.WORDS
    found = Plan.of(case)
    _set_layout(found, case, own is not None)
    _divide(found, case.arguments)
    by = f"{own} writes v" if own else depthwise.in_words(case.segment, case.x, case.weight)
    behind = backward_in_words(found, case.x, case.weight) if case.saving else ""
    return _words(found, by, own, done, behind)


def backward_in_words(plan: Plan, x: Tensor, weight: Tensor) -> str:
    """The passes of backward where x has no gradient, and what our own kernels do then, and for x."""
    composed, way = plan.composed, _of_our_own(plan, x, weight, False, True).weight
    layout = UNITS if way == gradients.PACKED else plan.turns_y
    plan = replace(plan, layout=layout, without_dz=_needs_no_dz(plan))
    words = f"; backward: {passes_in_words(plan, composed.backward, composed.backward_names)}"
    ours = gradients.in_words(plan.segment, x, weight, _in_units(plan)) if _gives_dz(plan) else []
    ours += depthwise.gradients_in_words(plan.segment, x, weight) if _gives_dz(plan, True) else []
    return ", ".join([words, *ours])


def _words(plan: Plan, by: str, own: str | None, done: int | None, backward: str) -> str:
    """Each pass over positions, with the bytes that it reads and writes, behind what convolves."""
    composed, words = plan.composed, [by]
    if done is not None:
        words = [f"{own} writes v and {_made_words(composed.forward, done)}"]
    words = ["Winograd's convolution"] if plan.strips.get("forward") else words
    words = ["x as it is"] if plan.segment.conv.is_nothing else words
    words += [", channels last"] * bool(plan.runs)
    words += [" as y for what follows"] * bool(plan.last and plan.segment.result)
    words += [", y channels last for what follows"] * bool(plan.turns_y)
    words += [", then ", passes_in_words(plan, composed.forward, composed.forward_names, done), backward]
    return "".join(words)


def passes_in_words(plan: Plan, program: Program, names: naming.Names, but: int | None = None) -> str:
    passes = [
        i
        for i, one in enumerate(program.passes)
        if i != but and isinstance(one, Planes) and _parts(plan, program, i)
    ]
    return ", ".join(_pass_words(plan, program, names, i) for i in passes) or "small values"


def _made_words(program: Program, number: int) -> str:
    """What a pass makes."""
    results = {root.name for root in program.roots}
    own = [program.arrays[key] for key in program.passes[number].targets]
    made = dict.fromkeys(
        a.name if a.name in results else "sums" if a.parts is not None else "reductions" for a in own
    )
    return " and ".join([name for name in made if not name.startswith("kept_")] or ["what is kept"])


def _pass_words(plan: Plan, program: Program, names: naming.Names, number: int) -> str:
    text, own = program.texts[number], [program.arrays[key] for key in program.passes[number].targets]
    known = {a.name: a for a in (*program.arrays.values(), *program.given.values(), *names.incoming.values())}
    read = [known[name] for name, ctype in text.pointers.items() if ctype.startswith("const")]
    read += [known["v"]] if text.reads_v else []
    reads, writes = [_size(sum(_bytes(plan, program, a) for a in arrays)) for arrays in (read, own)]
    return f"{_made_words(program, number)} (reads {reads}, writes {writes})"


def _size(count: int) -> str:
    return f"{count / 1e6:.1f} MB" if count >= 50_000 else f"{count / 1e3:.1f} KB"
