"""What the schedule `load` decides for arguments of one kind (`Plan`): which arrays there are at given sizes, how they lie, and in how many parts
blocks share a plane; and its launchers for them."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from . import gradients, layouts, library, naming, source, strips, tiling
from .cases import Case, Sizes, first_number, places
from .launching import Entry, Launch, new_of
from .layouts import FOR_TF32, TURNED, UNITS
from .passes import Array, Planes, Program
from .plane_text import Last
from .programs import Composed, can_lie_last, composed_of, has_channels, kind_for

_FEW_PARTS = 32  # reduce.cuh's kFewParts: more are merged by a launch of their own, which takes 3 µs
_BLOCKS = 384  # that keep a GPU busy
_WAVES = 2048  # blocks that leave a GPU no idle end
# Times in positions of a lane (trials/batch_norms.json). What a block reads first takes as long as so many:
_READ_FIRST = 2
# What a block sums up last does; so a lane has as many at least, where there are so many.
_OF_A_LANE = 8
# A wait for memory does.
_OF_A_WAIT = 2.2


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
    multiprocessors: int = 1
    kernels: object = None
    convolution: library.Convolution | None = None
    convolve: Callable | None = None  # gives v of x and the weight, as forward's passes read it
    filters: layouts.Turning | None = None  # how it turns the latter first, which a chain does for it
    own: Callable | None = None  # the same, contiguous, in the library's place
    # Gives what forward does, of the arguments and the turned filters, or None, in the place of all that (inside.py, sinks.py; pieces, strips).
    instead: Callable | None = None
    # Gives backward's launch of a plan, arguments, the names of what it is given, shapes, and the names of what it returns, where its passes form v again
    # (again.py).
    again: Callable[[Plan, Sequence, Sequence[str], Mapping, Sequence], Launch] | None = None
    layout: int = 0  # of what forward's passes turn, or backward's (`Program.turns`): kernels/load/turned.cuh
    runs: int = 0  # in what layout v is convolved
    last: bool = False  # are all arrays of positions and channels channels last? Then so is y, if it has both
    turns_y: int = 0  # … or it alone, and its gradient, while x is in planes: in which layout
    launch: Launch | None = None
    in_place: bool = False
    without_dz: bool = False  # does backward's pass for the gradient of v alone not run?
    # By what is asked for, and the library's settings, which may be others than forward's (schedule.Back).
    backward: dict[tuple, object] = field(default_factory=dict)
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
        is_gpu = case.device == "cuda"
        count = tiling.device_properties(case.x.device.index).multiprocessors if is_gpu else 1
        return cls(case.segment, composed, sizes, *dtypes, case.saving, case.device, count)

    @functools.cached_property
    def weight_at(self) -> int:
        """The filters' place among the arguments."""
        return len(self.segment.inputs)

    @functools.cached_property
    def turns(self) -> layouts.Turns:
        return layouts.Turns(self.kernels)

    @functools.cached_property
    def given_lie(self) -> Sequence[tuple[int, torch.memory_format]]:
        """dy, and what backward finds behind it, counted."""
        last = library.CHANNELS_LAST[2 + self.segment.graph.dimensions]
        of_y = has_channels(self.segment.outputs[0].space)
        are_last = [
            bool(self.turns_y) or self.last and of_y,
            *[self.last and a.name in ("v", "y") for a in self.composed.given],
        ]
        return [*enumerate([last if each else torch.contiguous_format for each in are_last])]

    @functools.cached_property
    def shape(self) -> list[int]:
        """Eager's, of y."""
        segment, sizes = self.segment, self.sizes
        level = segment.outputs[0].space.level
        positions = sizes.levels[level][3 - segment.graph.dimensions :] if level else ()
        of_axis = {"n": sizes.N, "c": sizes.C, "s": math.prod(positions), "": 1}
        of_axis |= {str(i): s for i, s in enumerate(positions)}
        return [of_axis[axis] for axis in segment.axes]


# ------------------------------------------------------------------------------------------------------------- how arrays lie


def is_last(case: Case, composed: Composed) -> bool:
    """Are all arrays of positions and channels channels last, as y, if that has both? Else as eager's v, or as x is turned for the library."""
    if has_channels(case.segment.outputs[0].space):
        lies_so = case.last and not turns_y_alone(case, composed)
    else:
        lies_so = case.convolves_last or _is_turned_once(case)
    return lies_so and all(map(can_lie_last, composed.programs))


def _is_turned_once(case: Case) -> bool:
    """Does the library convolve channels last, of an x in planes that is turned for it, and does nobody else bring or see what has positions and
    channels?"""
    others = any(has_channels(leaf.space) for leaf in case.segment.inputs[1:])
    if case.saving or case.in_planes or others:
        return False
    return layouts.fastest(case.segment, case.x, case.weight, "forward") != layouts.PLANES


def turns_y_alone(case: Case, composed: Composed) -> bool:
    """Is it y alone, and its gradient?"""
    return case.turns_y and composed.forward.turns == "y"


# -------------------------------------------------------------------------------------------------------- gradients of our own


def of_our_own(plan: Plan, x: Tensor, weight: Tensor, dx: bool, dw: bool) -> gradients.Ways:
    """Which of our kernels give the gradients of x and the weight that are asked for."""
    if not gives_dz(plan):
        return gradients.Ways()
    return gradients.fastest(plan.segment, x, weight, dx, dw, in_units(plan), plan.last)


def gives_dz(plan: Plan) -> bool:
    program, roots = plan.composed.backward, plan.composed.gradients
    return bool(program and any(root and leaf.attr[0] == "z" for leaf, root in roots.items()))


def in_units(plan: Plan) -> bool:
    """Does a pass of positions alone write dz, and can it do so in 16 bits? A mainloop can't."""
    program = plan.composed.backward
    return program.turns == "dz" and bool(program.turned) and plan.again is None


# ---------------------------------------------------------------------------------------------------------------- arrays


def of_samples(segment, arguments: Sequence, first: int, last: int) -> list:
    """The arguments for these samples alone; last: the one behind them."""
    own = [t[first:last] if each.space.n else t for each, t in zip(segment.inputs, arguments)]
    return [*own, *arguments[len(own) :]]


def numbers_of(plan: Plan, program: Program, names: naming.Names, arguments: Sequence) -> list:
    segment, sizes = plan.segment, plan.sizes
    values = dict(zip(segment.scalars, arguments[first_number(segment) :]))
    found: list = [float(values[name]) for name in names.scalars]
    found += [sizes.N, sizes.C]
    for level in ["e", *segment.graph.levels]:
        found += sizes.levels[level]
    passes = enumerate(program.passes)
    found += [parts_of(plan, program, i) for i, each in passes if isinstance(each, Planes)]
    divided = plan.strips.get(launcher_of(plan, program))
    return found + [plan.layout] * bool(program.turned) + ([*divided.numbers] if divided else [])


def launcher_of(plan: Plan, program: Program) -> str:
    return "backward" if program is plan.composed.backward else "forward"


def parts_of(plan: Plan, program: Program, number: int) -> int:
    """Blocks that share a plane: of a few packs a thread on a GPU, or of a tile; strips that fill a core's cache on a CPU."""
    each, divided = program.passes[number], plan.strips.get(launcher_of(plan, program))
    if plan.without_dz and _makes_dz_alone(program, number):
        return 0
    if divided and (number in program.in_strips or number == program.differentiated):
        return divided.parts
    positions = plan.sizes.positions(each.level)
    pack = 8 if plan.value_dtype.itemsize == 2 else 4  # points.cuh's kPack
    turned = plan.layout and number in program.turned
    sums = any(key.what != "value" for key in each.targets)
    if plan.last or turned and source.sums_alone(program, number):  # LastPlane's, or LastRows'
        sizes = plan.sizes.N, plan.sizes.C, positions, pack
        if (last := program.texts[number].last) is None:
            return _parts_by_sample(*sizes, sums)
        return parts_across(last, *sizes, plan.multiprocessors)
    if turned:  # turned.cuh's tiles
        most = -(-positions // (32 * pack))
        side_by_side = plan.sizes.N * -(-plan.sizes.C * plan.value_dtype.itemsize // 128)
        parts = most if plan.layout == UNITS else _shares(most, side_by_side, _WAVES)
        return _few(parts, side_by_side) if sums and plan.turns_y else parts
    if plan.device == "cpu":
        return positions // (1 << 16 if not each.by_sample else 1 << 12) + 1
    parts = positions // (1024 if each.by_sample else 4096) + 1
    alone = sums and not each.by_sample and all(key.what != "value" for key in each.targets)
    return _shares(parts, plan.sizes.N * plan.sizes.C, _WAVES) if alone else parts


def _makes_dz_alone(program: Program, number: int) -> bool:
    return [program.arrays[key].name for key in program.passes[number].targets] == ["dz"]


def needs_no_dz(plan: Plan) -> bool:
    """Where x, which is v, has no gradient: does a pass make that alone, and for nobody else?"""
    program, roots = plan.composed.backward, [root for root in plan.composed.gradients.values() if root]
    if plan.device != "cuda" or not plan.segment.conv.is_nothing:
        return False
    touching = [i for i, text in enumerate(program.texts) if "dz" in text.pointers]
    own = [_makes_dz_alone(program, i) for i in touching]
    return own == [True] and [root.name for root in roots].count("dz") == 1


def _parts_by_sample(N: int, C: int, positions: int, pack: int, sums: bool) -> int:
    """Where arrays lie channels last, of a pass by sample."""
    channels = 4 if sums else pack
    packs = C // channels if C % channels == 0 else C
    most = -(-positions * (_lanes_across if sums else _lanes_of_points)(packs) // 256)
    if sums:
        return _few(_shares(-(-most // _OF_A_LANE), N, _WAVES), N)
    return max(_shares(most, N, _WAVES), most // 4)


def parts_across(last: Last, N: int, C: int, positions: int, pack: int, multiprocessors: int) -> int:
    """Where arrays lie channels last, of a pass by channel."""
    channels, blocks = last.channels(pack), last.blocks(pack)
    packs = C // channels if C % channels == 0 else C
    lanes = _lanes_across(packs) if last.sums else _lanes_of_points(packs)
    most, planes = -(-positions * lanes // 256), N * -(-packs // lanes)
    if not last.sums:
        return _in_few_waves(most, planes, blocks * multiprocessors, last.at_once, _READ_FIRST, most)
    blocks += blocks == 3  # which then have registers for one more
    of_lanes = -(-most // _OF_A_LANE)
    parts = _in_few_waves(most, planes, blocks * multiprocessors, last.at_once, _OF_A_LANE, of_lanes)
    return _few(parts, planes)


def _lanes_across(packs: int) -> int:
    """As last.cuh has it. Nothing that is computed hangs on it here, only how many blocks share a plane."""
    most = min(32, 1 << (packs - 1).bit_length())
    few = [lanes for lanes in (most, most // 2, most // 4, most // 8) if lanes >= min(4, most)]
    return min(few, key=lambda lanes: -(-packs // lanes) * lanes)


def _lanes_of_points(packs: int) -> int:
    """The same, where nothing is summed."""
    tiles = range(-(-packs // 256), max(-(-packs // 256), packs // 32) + 1)
    best = most = 0
    for lanes in [-(-packs // each) for each in tiles]:
        busy = packs / -(-packs // lanes) * (256 // lanes)
        if busy > 1.05 * most:
            best, most = lanes, busy
    return best


def _shares(most: int, planes: int, blocks: int) -> int:
    """Blocks that share planes, of which they take some side by side: so many that there are `blocks`."""
    return max(1, min(most, -(-blocks // planes)))


@functools.lru_cache(1 << 12)
def _in_few_waves(positions: int, planes: int, at_once: int, reads: int, besides: int, most: int) -> int:
    """Into how many parts a plane is cut, at most `most`, so that the waves in which a GPU runs all blocks, `at_once` of them, are few and short. A
    wave takes as long as the positions of a lane (`positions` of them if there is one part), or as its waits for memory: for each `reads` that
    it reads together, and for each that is left over; and as what a block does besides."""

    def taken(parts: int) -> tuple[float, int]:
        fewest, own = positions // parts, -(-positions // parts)
        waits = max(some // reads + some % reads for some in (fewest, own))
        return -(-planes * parts // at_once) * (max(own, _OF_A_WAIT * waits) + besides), -parts

    return min(range(1, min(most, 1 + 4 * at_once // planes) + 1), key=taken)


def _few(parts: int, planes: int) -> int:
    """As many as need no merging, where those are blocks enough."""
    suffice = planes * _FEW_PARTS >= _BLOCKS or parts <= 2 * _FEW_PARTS
    return min(parts, _FEW_PARTS) if suffice else parts


def dtype_of(plan: Plan, array: Array) -> torch.dtype:
    accumulated = torch.float64 if plan.value_dtype == torch.float64 else torch.float32
    return {
        "value": plan.value_dtype,
        "output": plan.dtype,
        "real": accumulated,
        "parameter": plan.parameter_dtype,
        "double": torch.float64,
        "moments": torch.float64,
        "largest": torch.float64,
        "pool_largest": torch.float64,
        "index": torch.int32,
        "byte": torch.uint8,
        "mask": torch.uint8,
        "seed": torch.int64,
    }[array.kind]


def shape_of(plan: Plan, program: Program, array: Array) -> list[int]:
    shape = plan.sizes.shape(array.space)
    if array in (naming.SCRATCH, naming.KEPT):
        return [sum((bytes_of(plan, program, a) + 15) // 16 * 2 for a in source.rooms(program)[array])]
    if array is naming.PASSES:
        return [1]
    if array.name == "dz" and plan.layout == UNITS:
        return [gradients.size(plan.sizes.N, plan.sizes.C, plan.sizes.positions("e"), plan.value_dtype)]
    if array.name in ("v", "dz"):  # as the library gives it
        return [*shape[:2], *shape[5 - plan.segment.graph.dimensions :]]
    if array.parts is not None:
        shape = [*shape, parts_of(plan, program, array.parts)]
    several = {"moments": 3, "largest": 2, "pool_largest": 2}
    return [*shape, several[array.kind]] if array.kind in several else shape


def bytes_of(plan: Plan, program: Program, array: Array) -> int:
    return math.prod(shape_of(plan, program, array)) * dtype_of(plan, array).itemsize


def launch_of(
    plan: Plan,
    launcher,
    program: Program,
    names: naming.Names,
    arguments: Sequence,
    given: Sequence[str] = (),
    shapes: Mapping = {},
    trusting: bool = False,
    returned: Sequence[str | None] | None = None,
) -> Launch:
    """given: what is there by name. shapes: of what isn't of its own. trusting: as in loader/launch.py; what backward is given may have been
    in others' hands. returned: as a Launch has it."""
    at = places(plan.segment)
    made, table = {*program.arrays.values()}, []
    for array in source.parameters(program, names):
        place = None if array.name in given else at.get(array.name)
        shape = None
        if place is None and array.name not in given:
            shape = shapes[array.name] if array.name in shapes else shape_of(plan, program, array)
        last = _lies_last(plan, program, array, place is not None)
        table.append(Entry(array.name, dtype_of(plan, array), place, shape, array in made, last=last))
    numbers = numbers_of(plan, program, names, arguments)
    new = new_of(table, "dz" if "dz" in given else "")  # which is written over v, as new as any
    bind = functools.partial(launcher.bound, *numbers, trusting=trusting, new=new)
    number = at["seed"] + 1 if names.random else None

    def turning(like: Tensor, last: bool) -> Callable | None:
        return plan.turns.lying(like, last) if like.dtype == plan.value_dtype else None

    return Launch(bind, table, arguments, given, number, turning, returned)


def entry_of(plan: Plan, array: Array, place: int | None) -> Entry:
    """Of a result of forward in a launcher of others, written over that argument if there is one."""
    shape = None
    if place is None:
        shape = plan.shape if array.name == "y" else shape_of(plan, plan.composed.forward, array)
    return Entry(array.name, dtype_of(plan, array), place, shape, True)


def _lies_last(plan: Plan, program: Program, array: Array, comes_in: bool) -> bool:
    """Is it a tensor that lies channels last? What is kept for backward, which nobody else sees, is none."""
    if array.name == program.turns and plan.layout in (TURNED, FOR_TF32):
        return True
    if array.name in ("v", "dz"):
        return plan.last
    known = comes_in or array.name in ("y", "dy") or array.name.startswith("d_")
    return known and plan.last and has_channels(array.space)
