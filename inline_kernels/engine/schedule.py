"""The schedule `load`: the library's convolution gives v, generated kernels do the rest of a segment, forward and backward.

    plan = schedule.plan(Case(segment, arguments, saving=True, dtype=torch.float32))
    y, *saved = schedule.forward(plan, arguments)
    gradients = schedule.backward(plan, dy, arguments, saved, needs)  # of saved, and y behind it where `reads_y` says so

`arguments`: as in cases.py. y and dy are contiguous; their shape is the caller's, what counts is the order of their elements. Running
statistics are written in place. What is computed, and what forward saves, programs.py says; which arrays there are at given sizes, load_plan.py;
here is who runs.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

import inline_loader
from inline_kernels.engine import library
from inline_kernels.loader.operators import precision

from . import between, depthwise, gradients, halves, inside, layouts, naming, source, strips
from .cases import CTYPES, Case
from .graph import ELEMENTS
from .launching import Launch
from .layouts import FOR_TF32, PLANES, TURNED, UNITS
from .load_plan import (
    Plan,
    dtype_of,
    is_last,
    launch_of,
    needs_no_dz,
    of_our_own,
    of_samples,
    shape_of,
    turns_y_alone,
)
from .load_words import backward_in_words, in_words
from .passes import Array, Program, Unsupported
from .programs import composed_of, kind_for

__all__ = ["Unsupported", "backward", "describe", "forward", "plan", "reads_y", "requests", "saved", "spends"]


def _build(case: Case) -> dict:
    name = "tail_" + naming.identifier(case.segment.conv.name)
    composed = composed_of(case.segment, kind_for(case))
    layout = {"CHANNELS_LAST": "1"} if is_last(case, composed) else {}
    if layout and between.rounds(case.segment, case.x):
        layout["ROUNDS_Y"] = "1"
        if case.saving and not case.segment.conv.is_nothing:
            layout["ROUNDS_DZ"] = str(int(between.differentiates_last(case.segment, case.x, case.weight)))
    return {"name": name, "source": composed.text, "device": case.device, "defines": case.defines | layout}


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
    elif found.pieces:
        found.instead = functools.partial(_forward_in_pieces, found)
    elif "forward" in found.strips:
        found.instead = functools.partial(_forward_in_strips, found)
    return found


def _lay_out(plan: Plan, case: Case) -> None:
    plan.last = is_last(case, plan.composed)
    if turns_y_alone(case, plan.composed):
        rounds = between.rounds(case.segment, case.x) and case.segment.result == between.OPERAND
        plan.layout = plan.turns_y = FOR_TF32 if rounds else TURNED


def _set_layout(plan: Plan, case: Case, own: bool) -> None:
    _lay_out(plan, case)
    plan.runs = PLANES if own else layouts.fastest(case.segment, case.x, case.weight, "forward")
    if plan.turns_y:
        plan.runs = PLANES
    elif plan.last and (
        library.is_channels_last(case.x) or not plan.runs
    ):  # else x is turned, and rounded, anyway
        plan.runs = TURNED
    if (plan.last or plan.turns_y) and between.rounds_for_library(case.segment, case.x, case.weight):
        in_tf32 = between.convolves_last(case.segment, case.x, case.weight)
        plan.runs = FOR_TF32 if in_tf32 else PLANES


def _turned(plan: Plan, program: Program, layout: int) -> int:
    """The layout in which a program's passes have what they turn, where the library has the convolution's side in that."""
    if plan.last or plan.turns_y:
        return plan.turns_y or TURNED
    return layout if program.turned and plan.sizes.C % 8 == 0 and not plan.again else PLANES


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
        of_v = shape_of(plan, composed.forward, Array("v", "value", ELEMENTS))
        shapes["v"] = (divided.samples, *of_v[1:]) if kept else (0,)
    names, returned = composed.forward_names, ("y", *[array.name for array in composed.saved])
    launcher = plan.kernels.forward
    plan.launch = launch_of(plan, launcher, composed.forward, names, arguments, given, shapes, True, returned)


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
            some = case._replace(arguments=of_samples(plan.segment, case.arguments, first, last))
            plans[last - first] = globals()["plan"](some, edited, True)
        found.append((first, last, plans[last - first]))
    return found


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


# -------------------------------------------------------------------------------------------------------------- execution


def forward(plan: Plan, arguments: Sequence, turned: Tensor | None = None) -> Sequence[Tensor]:
    """y, and what backward needs. turned: the filters as `plan.filters` turns them."""
    if plan.instead:
        return plan.instead(arguments, turned)
    v = plan.convolve(arguments[0], arguments[plan.weight_at], turned)
    return plan.launch.run(arguments, v, v) if plan.in_place else plan.launch.run(arguments, v)


def _forward_in_strips(plan: Plan, arguments: Sequence, _: None) -> list[Tensor]:
    image, weight = plan.strips["forward"].image.of(arguments[0]), arguments[plan.weight_at]
    return plan.launch.run(arguments, image, weight.contiguous())


def _forward_in_pieces(plan: Plan, arguments: Sequence, _: None) -> list[Tensor]:
    y = arguments[0].new_empty(plan.shape, dtype=plan.dtype)
    for first, last, piece in plan.pieces:
        some = of_samples(plan.segment, arguments, first, last)
        piece.launch.run(
            some, library.convolve(plan.convolution, some[0], some[plan.weight_at]), y[first:last]
        )
    return [y]


class Back(NamedTuple):
    """Backward for what is asked for. launch returns the gradients of `count` inputs and parameters (None: there is none, or it is
    the convolution's), of which some are `converted` then; and behind them dz or None, dweight or None, where it is our own, and `passes`, if there
    are any. over: dz is written over what launch is given. `library` gives of dz, x and the weight
    the gradients of the latter, None where it isn't asked, and turns the `filters` first; `ours` those that the library isn't asked
    for, and None; input_gradient: so does, of x, a launcher of the source."""

    launch: Launch | None
    count: int
    converted: Sequence[tuple[int, torch.Size, torch.dtype]] = ()
    passes: bool = False
    library: Callable | None = None
    filters: layouts.Turning | None = None
    ours: Callable | None = None
    input_gradient: bool = False
    over: int | None = None
    frees: Sequence[int] = ()  # of what forward saved, behind the launch
    librarys_weight: bool = False  # does the library give its gradient?
    halves: Sequence[halves.Half] = ()  # of the batch, which run in launch's place
    passes_dy: bool = False  # that is dz


def backward(
    plan: Plan,
    dy: Tensor,
    arguments: Sequence,
    saved: Sequence[Tensor],
    needs: Sequence[bool],
    turned: Tensor | None = None,
    spent: bool = False,
    settings: object = None,
) -> list[Tensor | None]:
    """The gradients of inputs, parameters and, if that, buffers (None), contiguous but for that of x. turned: the filters as `Back.filters` turns them;
    their gradient then lies as those do. spent: nobody needs what was saved any more, so that its memory is used, or freed. settings: `precision`,
    for who knows it."""
    if plan.again:  # whose launch takes those, too, and hooks may give them back in other strides
        arguments = [_in_planes(t) if i <= plan.weight_at else t for i, t in enumerate(arguments)]
    x, weight, dx, dw = arguments[0], arguments[plan.weight_at], needs[0], needs[plan.weight_at]
    settings = precision(x) if settings is None else settings
    back = _back(plan, dx, dw, True, arguments, spent, settings)
    if not (back.launch or back.passes_dy):
        return [None] * back.count
    # A user's hooks may give what was saved back in other strides; the library takes its operands as they come.
    given = [dy, *saved]
    for i, layout in plan.given_lie:
        if (t := given[i]).data_ptr() % 16 or not t.is_contiguous(memory_format=layout):
            given[i] = library.aligned(t, layout)
    if back.passes:
        image_of = plan.strips["backward"].image.of if dw else library.contiguous  # nobody reads it then
        given.append(image_of(x))
    if back.over is not None:
        given.append(given[back.over])
    if back.halves:
        found = halves.run(back.halves, plan, back.ours, arguments, *given)
        _free(saved, back.frees)
        return _converted(found, back)
    found = back.launch.run(arguments, *given) if back.launch else [None] * (back.count + 2)
    passes = found.pop().item() if back.passes else 1
    if passes & 2:  # the library says what is infinite
        back = _back(plan, dx, dw, False, arguments, False, settings)
        *found, _ = back.launch.run(arguments, *given)
    _free(saved, back.frees)
    dweight, dz = found.pop(), found.pop()
    dz = given[0] if back.passes_dy else dz
    found = _converted(found, back)
    if not passes:
        dz, found[0] = None, x.new_zeros(x.shape) if dx else None
        dweight = weight.new_zeros(weight.shape) if dw else None
    if dz is not None:
        if back.library:
            found[0], found[plan.weight_at] = back.library(dz, x, weight, turned)
        if back.ours:
            for i, own in zip((0, plan.weight_at), back.ours(dz, x, weight)):
                found[i] = own if own is not None else found[i]
        if back.input_gradient:
            found[0] = _input_gradient(plan, dz, weight)
    if dweight is not None:
        found[plan.weight_at] = dweight
    return found


def _converted(found: list[Tensor | None], back: Back) -> list[Tensor | None]:
    for i, shape, dtype in back.converted:
        found[i] = found[i].view(shape).to(dtype)
    return found


def _free(saved: Sequence[Tensor], places: Sequence[int]) -> None:
    for i in places:
        saved[i].untyped_storage().resize_(0)


def turns_filters(plan: Plan, needs: Sequence[bool], settings: object) -> tuple[layouts.Turning | None, bool]:
    """How backward for that turns the filters, once it has run; and does their gradient then lie as they do?"""
    asked = needs[0], needs[plan.weight_at], True, settings
    back = plan.backward.get((*asked, False)) or plan.backward.get((*asked, True))
    return (back.filters, back.librarys_weight) if back else (None, False)


def _back(
    plan: Plan,
    dx: bool,
    dw: bool,
    own: bool,
    arguments: Sequence,
    spent: bool = False,
    settings: object = None,
) -> Back:
    """own: the filters' gradient may be one of our own. spent: dz may be written over v."""
    key = dx, dw, own, settings, spent
    if (found := plan.backward.get(key)) is None:
        found = plan.backward[key] = _planned_back(plan, dx, dw, own, arguments, spent)
    return found


def _in_planes(t: Tensor) -> Tensor:
    lies = t.data_ptr() % 16 == 0 and t.is_contiguous()
    return t if lies else library.aligned(t, torch.contiguous_format)


def spends(plan: Plan) -> Sequence[int]:
    """Places, in what forward saved, of what takes memory that backward would rather use, or free. Strips may read it twice."""
    return () if plan.strips else [i for i, a in enumerate(plan.composed.saved) if a.space.level]


def reads_y(case: Case) -> bool:
    """Does backward read y, behind what forward saved?"""
    return case.saving and composed_of(case.segment, kind_for(case)).reads_y


def gradient_requests(plan: Plan, arguments: Sequence, needs: Sequence[bool]) -> list[dict]:
    """What backward for that builds once it runs: kernels of our own for the gradients of x and the weight."""
    x, weight, program = arguments[0], arguments[plan.weight_at], plan.composed.backward
    if not (program and (program.roots or plan.composed.passes_dy)):
        return []
    ways, _, layout = _ways_back(plan, needs[0], needs[plan.weight_at], True, x, weight)
    last = _comes_last(plan, program, _turned(plan, program, layout))
    return [*gradients.requests(ways, plan.segment, x, weight, last).values()]


def _comes_last(plan: Plan, program: Program, layout: int) -> bool:
    """Does dz come channels last? layout: of what backward's passes turn."""
    return plan.last or layout in (TURNED, FOR_TF32) and program.turns == "dz"


def _ways_back(plan: Plan, dx: bool, dw: bool, own: bool, x: Tensor, weight: Tensor) -> tuple:
    """Which kernels of our own give gradients, which of x and the weight the library gives, and the layout of dz."""
    segment, divided = plan.segment, plan.strips.get("backward")
    ways = of_our_own(plan, x, weight, dx, dw)
    of_library = (
        dx and not (plan.composed.own.input_gradient or ways.x),
        dw and not (divided and own or ways.weight),
    )
    asked = [of for of, need in zip(("dx", "dw"), of_library) if need]
    layout = min([layouts.fastest(segment, x, weight, of) for of in asked], default=PLANES)
    if ways.weight == gradients.PACKED:
        layout = UNITS
    elif ways.x or ways.weight == gradients.FEW:  # which take dz in planes
        layout = PLANES
    if (plan.last or plan.turns_y) and between.rounds_for_library(segment, x, weight):
        layout = FOR_TF32 if between.differentiates_last(segment, x, weight) else PLANES
    return ways, of_library, layout


def _planned_back(plan: Plan, dx: bool, dw: bool, own: bool, arguments: Sequence, spent: bool) -> Back:
    segment, composed, divided = plan.segment, plan.composed, plan.strips.get("backward")
    x, weight = arguments[0], arguments[plan.weight_at]
    ways, of_library, layout = _ways_back(plan, dx, dw, own, x, weight)
    program, roots = composed.backward, {leaf.attr[0]: root for leaf, root in composed.gradients.items()}
    if not (program and (program.roots or composed.passes_dy)):
        return Back(None, plan.weight_at + len(segment.parameters))
    own, given, shapes = bool(own and dw and divided), ["dy", *[array.name for array in composed.given]], {}
    names, converted = [*[leaf.attr[0] for leaf in segment.inputs], *segment.parameters], []
    for i, (root, t) in enumerate(zip(map(roots.get, names), arguments)):
        if root and (shapes.setdefault(root.name, t.shape), dtype_of(plan, root)) != (t.shape, t.dtype):
            converted.append((i, t.shape, t.dtype))
    if divided:
        given.append("image")
        shapes["dweight"] = weight.shape if own else (0,)
        if not any(of_library) and not dx:
            shapes.setdefault("dz", (0,))
    without_dz = not dx and needs_no_dz(plan)
    if without_dz:
        shapes["dz"] = (0,)
    side = replace(plan, layout=_turned(plan, program, layout), without_dz=without_dz)
    lies_as_v = plan.last or not side.layout or program.turns == "dy"
    over = spent and not without_dz and lies_as_v and _may_write_over_v(program, "dz")
    over = over and "v" in given and not plan.segment.conv.is_nothing  # where v is x
    over = (
        over and [root.name for root in roots.values() if root].count("dz") == 1
    )  # else it is an input's gradient, too
    given += ["dz"] * bool(over)
    found = [root and root.name for root in map(roots.get, names)]
    has_dz = roots["z"] and not (without_dz or composed.passes_dy)
    passes = ["passes"] * bool(divided)
    returned = *found, "dz" if has_dz else None, "dweight" if own else None, *passes
    launching = functools.partial(_launch_back, given=given, shapes=shapes, returned=returned)
    launch = launching(side, arguments) if program.roots else None
    parts = halves.planned(side, arguments, launching) if dw and not dx and ways.weight else ()
    given_by_library, filters = None, None
    last = _comes_last(plan, program, side.layout)
    if any(of_library):
        given_by_library, filters = layouts.differentiating(plan, x, weight, of_library, layout, last)
    return Back(
        launch,
        len(found),
        converted,
        bool(passes),
        given_by_library,
        filters,
        gradients.planned(ways, segment, x, weight, last) if any(ways) else None,
        dx and not (of_library[0] or ways.x),
        given.index("v") if over else None,
        [i for i, a in enumerate(composed.saved) if a.space.level and not (over and a.name == "v")] * spent,
        of_library[1],
        parts,
        composed.passes_dy,
    )


def _launch_back(
    plan: Plan, arguments: Sequence, given: Sequence[str], shapes: Mapping, returned: Sequence
) -> Launch:
    """Of backward's passes; given, shapes and returned: as `launch_of` has them."""
    if plan.again:
        return plan.again(plan, arguments, given, shapes, returned)
    kernel, composed = plan.kernels.backward, plan.composed
    own = composed.backward, composed.backward_names
    return launch_of(plan, kernel, *own, arguments, given, shapes, returned=returned)


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
    shapes = [shape_of(found, found.composed.forward, a) for a in arrays]
    lies = [layout for _, layout in found.given_lie[1:]]
    return [*zip(shapes, [dtype_of(found, a) for a in arrays], lies)]


def describe(case: Case, own: str | None = None, done: int | None = None) -> str:
    """What a plan for it runs, in words; nothing is built. own: what convolves in the library's place; done: the pass that it does, too. Raises
    Unsupported."""
    is_inside, found = own is None and inside.runs(case), Plan.of(case)
    if is_inside and not case.saving:
        return inside.WORDS
    _set_layout(found, case, own is not None)
    _divide(found, case.arguments)
    by = f"{own} writes v" if own else depthwise.in_words(case.segment, case.x, case.weight)
    behind = backward_in_words(found, case.x, case.weight) if case.saving else ""
    return inside.WORDS + behind if is_inside else in_words(found, by, own, done, behind)
