"""The source of a segment's passes: their structs (plane_text.py, small_text.py), and a launcher a program, that runs them in their order.

A launcher takes tensors (`parameters`: what leaves, rooms that arrays inside share, what comes in), numbers (`numbers`: those of the model, all
sizes, the parts of each pass's sums, the layout of v where it may be channels last, and where v is convolved here the convolution's sizes and those
of its strips), and on a GPU the stream. schedule.py gives them by these lists, and by the names in `rooms`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from .gates import closing
from .graph import ELEMENTS, Graph, Node, walk
from .naming import (
    CONVOLUTION,
    DWEIGHT,
    EXPORTED,
    FILTERS,
    IMAGE,
    KEPT,
    PASSES,
    SCRATCH,
    STRIPS,
    TYPES,
    Names,
    identifier,
)
from .pass_text import PassText
from .passes import Array, Key, Planes, Program, Small
from .plane_text import MUCH, PlaneText
from .scalars import instructions
from .small_text import SmallText

# A whole array, turned: from (N, rows, columns) to (N, columns, rows); or of images the positions that strides meet.
TRANSPOSE = """EXPORT void transpose(value_t* out, const value_t* source, int64_t N, int64_t rows, int64_t columns, bool for_tf32, cudaStream_t stream) {
  load::turn({load::turn_of(out, source, N, rows, columns)}, for_tf32, stream);
}
EXPORT void transpose_both(value_t* out, value_t* other_out, const value_t* source, const value_t* other, int64_t N, int64_t rows, int64_t columns, int64_t other_N, int64_t other_rows, int64_t other_columns, bool for_tf32, cudaStream_t stream) {
  load::turn({load::turn_of(out, source, N, rows, columns), load::turn_of(other_out, other, other_N, other_rows, other_columns)}, for_tf32, stream);
}
EXPORT void transpose_picked(value_t* out, const value_t* source, int64_t N, int64_t rows, int64_t height, int64_t width, int64_t down, int64_t across, bool for_tf32, cudaStream_t stream) {
  load::transpose_picked(out, source, N, rows, height, width, down, across, for_tf32, stream);
}
"""


class Own(NamedTuple):
    """What is not the library's on a CPU (kernels/cpu/strips.h). gradient: of the filters, the namespace that has it, or ""; may_pick: it is "picked"
    where results' gradients are zero but at one of some places: of channels out so many, at most strips.PICKED; 0: its sums would take too much."""

    convolution: bool = False
    gradient: str = ""
    input_gradient: bool = False
    may_pick: int = 0


LIBRARYS = Own()


def compose(
    programs: dict[str, Program],
    names: dict[str, Names],
    device: str,
    title: str,
    turns: bool = False,
    own: Own = LIBRARYS,
) -> str:
    """The source: for each program its passes and the launcher of that name. turns: with what whole arrays need to be turned."""
    parts = [f"// {title}" if title else "", '#include "load/load.h"']
    parts += ['#include "load/turned.cuh"', "", TRANSPOSE] if turns else [""]
    if own.convolution or own.gradient or own.input_gradient:
        parts[2:] = ['#include "cpu/strips.h"', ""]
    for launcher, program in programs.items():
        parts += _launcher(launcher, program, names[launcher], device, own)
    return "\n".join([*parts, *(_CONVOLVE if own.input_gradient else ())])


_CONVOLVE = """
EXPORT void convolve(value_t* v, const value_t* image, const value_t* filters, int64_t N, int64_t C, int64_t image_C, int64_t image_D, int64_t image_H, int64_t image_W, int64_t kernel_D, int64_t before, int64_t above, int64_t left, int64_t strip_planes, int64_t strip_rows) {
  const winograd::Sizes sizes{N, image_C, C, image_D, image_H, image_W, kernel_D, before, above, left};
  load::convolve(v, load::Convolution(image, filters, sizes), strip_planes, strip_rows);
}
""".strip().split("\n")


def struct(name: str, program: Program, names: Names, number: int) -> tuple[list[str], PassText]:
    each = program.passes[number]
    text = (PlaneText if isinstance(each, Planes) else SmallText)(name, program, names, number)
    return text.lines(each), text


def _launcher(launcher: str, program: Program, names: Names, device: str, own: Own) -> list[str]:
    program.closes = closing(program) if own.gradient and launcher == "backward" else None
    lines, made = _structs(launcher.title(), program, names)
    program.turned = _turned(program)
    if device == "cpu":
        _find_strips(program, own.convolution and launcher == "forward")
        program.differentiated_by = own.gradient if program.differentiated is not None else ""
        if left := _left(program):
            program.left = left
            lines, made = _structs(launcher.title(), program, names)
    used_levels = {name for text in program.texts for name in text.numbers if name.startswith("extent_")}
    calls = (_on_gpu if device == "cuda" else _on_cpu)(program, made)
    tensors = parameters(program, names)
    reals = [(t, name) for t, name in numbers(program, names.scalars, bool(names.random))]
    written = {*program.arrays.values(), SCRATCH, DWEIGHT, PASSES}
    if not written.isdisjoint(program.kept):
        written.add(KEPT)
    if program.convolves or program.left:
        written |= {a for a in names.incoming.values() if a.name == "v"}
    declared = [f"{'' if a in written else 'const '}{EXPORTED[a.kind]}* {a.name}" for a in tensors]
    declared += [f"{t} {_scalar(t, name)}" for t, name in reals]
    if device == "cuda":
        declared.append("cudaStream_t stream")
    inside = [f"const real {name} = real({_scalar(t, name)});" for t, name in reals if t == "double"]
    for room, arrays in rooms(program).items():
        constant = "" if room in written else "const "
        types = [f"{constant}{TYPES[a.kind]}" for a in arrays]
        inside += [
            f"{t}* const {a.name} = load::next<{t}>({room.name}, {size(a)});" for t, a in zip(types, arrays)
        ]
    for name in sorted(used_levels):
        level = name.removeprefix("extent_")
        inside.append(f"const load::Extent {name}({_extent(level)});")
    head = f"EXPORT void {launcher}({', '.join(declared)}) {{"
    return [*lines, head, *[f"  {line}" for line in [*inside, *calls]], "}", ""]


def _structs(title: str, program: Program, names: Names) -> tuple[list[str], list[str]]:
    """The passes' structs, and how a launcher makes one of each; sets `texts`."""
    lines, made, program.texts = [], [], []
    for number in range(len(program.passes)):
        text_lines, text = struct(f"{title}{number}", program, names, number)
        lines += [*text_lines, ""]
        program.texts.append(text)
        given = given_few(program) if isinstance(program.passes[number], Small) else {}
        made.append(f"{title}{number}{{{', '.join(given.get(m, m) for m in text.members)}}}")
    return lines, made


# ---------------------------------------------------------------------------------------------- a launcher's arguments


def parameters(program: Program, names: Names) -> list[Array]:
    """The launcher's tensors: what leaves, rooms, what comes in."""
    shared = [array for room in rooms(program).values() for array in room]
    own = [*program.arrays.values(), *rooms(program), *names.incoming.values(), *program.given.values()]
    found = [array for array in own if array not in shared]
    if program.convolves:
        found += [IMAGE, FILTERS]
    elif program.differentiated_by:
        found += [DWEIGHT, IMAGE, PASSES]
    return list(dict.fromkeys(found))


def numbers(program: Program, scalars: Sequence[str], random: bool) -> list[tuple[str, str]]:
    """The launcher's numbers, (type, name)."""
    found = [("int64_t", "number")] if random else []
    found += [("double", identifier(name)) for name in scalars]
    found += [("int64_t", "N"), ("int64_t", "C")]
    levels = ["e", *program.graph.levels]
    found += [("int64_t", f"{level}_{side}") for level in levels for side in "DHW"]
    found += [("int64_t", f"parts_{i}") for i, each in enumerate(program.passes) if isinstance(each, Planes)]
    found += [("int64_t", "layout")] * bool(program.turned)
    if program.convolves or program.differentiated_by:
        found += [("int64_t", name) for name in (*CONVOLUTION, *STRIPS)]
    return found


def _scalar(ctype: str, name: str) -> str:
    return f"{name}_given" if ctype == "double" else name


def rooms(program: Program) -> dict[Array, list[Array]]:
    """The arrays that share one tensor: those that nobody outside sees (`SCRATCH`), and small ones from forward to backward (`KEPT`)."""
    results = {root.name for root in program.roots}
    hidden = [array for array in program.arrays.values() if array.name not in results]
    if not program.on_cpu:
        hidden += [few(array) for array in hidden if array.parts is not None]
    return {SCRATCH: hidden} | ({KEPT: list(program.kept)} if program.kept else {})


def few(array: Array) -> Array:
    """Of the parts of planes' sums, where they are many, the sums."""
    return Array(f"few_{array.name}", array.kind, array.space)


def size(array: Array) -> str:
    """The number of an array's elements."""
    factors = ["N"] * array.space.n + ["C"] * array.space.c
    factors += [f"{array.space.level}_{side}" for side in "DHW"] if array.space.level else []
    factors += [f"parts_{array.parts}"] if array.parts is not None else []
    return " * ".join(factors or ["1"])


# ---------------------------------------------------------------------------------------------------------- where v is


def _turned(program: Program) -> list[int]:
    """The passes that can take what it `turns` channels last: all that read it, or the one that writes it; or none."""
    found = [i for i, text in enumerate(program.texts) if text.turns]
    if len(found) > 1 and program.turns in {array.name for array in program.arrays.values()}:
        return []  # it is read again
    alone = [isinstance(each, Planes) and not each.by_sample and each.level == "e" for each in program.passes]
    return found if all(alone[i] and not program.texts[i].scalar for i in found) else []


def sums_alone(program: Program, number: int) -> bool:
    """Does a pass write nothing at positions, and read v alone there?"""
    reads = program.texts[number].pointers.keys()
    spaces = {array.name: array.space for array in (*program.arrays.values(), *program.given.values())}
    spaces |= {identifier(leaf.attr[0]): leaf.space for leaf in program.leaves() if leaf.attr[1] != "z"}
    others = any(spaces[name].level for name in reads if name in spaces)
    return not others and all(key.what != "value" for key in program.passes[number].targets)


def _find_strips(program: Program, own: bool) -> None:
    """Sets `in_strips`: the passes that are made of v as it is convolved, and of what such passes make at the same places; `convolves`; and
    `differentiated`: the pass that makes the gradient of v a plane at a time, or None."""
    program.in_strips, program.differentiated = [], None
    arrays, there = program.arrays, set()
    for i, (each, text) in enumerate(zip(program.passes, program.texts)):
        if not isinstance(each, Planes):
            continue
        waits = {
            array.name for key, array in arrays.items() if key not in each.targets
        } & text.pointers.keys()
        whole = _are_tiles(program.graph, each.level)
        if own and whole and (text.reads_v or waits) and waits <= there:
            program.in_strips.append(i)
            there |= {arrays[key].name for key in each.targets if arrays[key].parts is None}
        program.convolves = (
            program.convolves or i in program.in_strips or (own and not whole and text.reads_v)
        )
        names = [arrays[key].name for key in each.targets]
        if "dz" in names and each.level == "e" and not each.by_sample:
            program.differentiated = i


def _left(program: Program) -> tuple[int, Node] | None:
    """A pass, and what it has computed of each element where it last reads v: it leaves this in the place of v, if it took much, and those behind it
    read v for nothing else. Of strips, where each has its v to itself, or, of a whole v, where nobody else needs that."""
    if not program.spends_v or (program.convolves and keeps_v(program)):
        return None
    z = program.graph.leaf("z", ELEMENTS, "z")
    reading = [i for i, text in enumerate(program.texts) if text.reads_v]
    saved: dict[tuple[int, Node], int] = {}
    for i in program.in_strips if program.convolves else reading:
        behind = [program.passes[j] for j in reading if j > i]
        terms = [key.source for each in behind for key in each.targets]
        for node in set(program.texts[i].known_with_v).intersection(_computed(program, terms)):
            cost = instructions(_computed(program, [node]))
            if cost >= MUCH and z not in _computed(program, terms, node):
                saved[i, node] = cost * len(behind)
    return max(saved, key=lambda each: (saved[each], each[1].id), default=None)


def _computed(program: Program, terms: Sequence[Node], left: Node | None = None) -> list[Node]:
    """What passes compute for their terms: down to arrays, and to what is left for them."""

    def is_known(node: Node) -> bool:
        return node in program.given or Key("value", node) in program.arrays

    return walk(terms, lambda node: () if node is left else [a for a in node.args if not is_known(a)])


def _are_tiles(graph: Graph, level: str) -> bool:
    """Are no positions of v in two windows of the level? A strip then has whole ones."""
    return level == "e" or (graph.levels[level].is_apart and _are_tiles(graph, graph.levels[level].parent))


def window_of_v(graph: Graph, level: str) -> tuple[int, ...]:
    """The positions of v along each of three axes that a window of the level has; 0: all of them."""
    window = [1] * 3
    while level != "e":
        own = graph.levels[level].window
        window = [w * (k or 0) for w, k in zip(window, (1,) * (3 - len(own)) + own)]
        level = graph.levels[level].parent
    return tuple(window)


def keeps_v(program: Program) -> bool:
    """Does a pass read v when all of it is there?"""
    return any(text.reads_v for i, text in enumerate(program.texts) if i not in program.in_strips)


# ----------------------------------------------------------------------------------------------------------- its calls


_TURNED = {"v": "planes_of_v", "dz": "planes_to_v", "y": "planes_to_y", "dy": "planes_of_dy"}


def _on_gpu(program: Program, made: Sequence[str]) -> list[str]:
    calls = []
    for i, each in enumerate(program.passes):
        if isinstance(each, Planes):
            v, skeleton, layout = "v" if program.texts[i].reads_v else "nullptr", "planes", ""
            if i in program.turned:
                skeleton, layout = _TURNED[program.turns], ", layout"
                if program.turns != "v":
                    v = f"{v}, {program.turns}"
                elif sums_alone(program, i):
                    skeleton = "sums_of_v"
            calls.append(planes_call(program, i, made[i], v, skeleton, layout))
            calls += merging(program, i)
        else:
            calls.append(small_call(program, i, made[i]))
    return calls


def planes_call(
    program: Program,
    number: int,
    made: str,
    v: str,
    skeleton: str = "planes",
    layout: str = "",
    first: int = 0,
) -> str:
    """A GPU's; first: see `in_parts`."""
    each, terms = program.passes[number], program.texts[number].terms
    if each.by_sample:
        skeleton, v = "by_sample", f"C, {v}"
    if terms:
        is_row = str(program.graph.levels[each.level].window[-1] is None).lower()
        skeleton, v = "axes", f"{terms}, {is_row}, {v}"
    parts = in_parts(program, number, first)
    return f"load::{skeleton}({made}, {_extent_of(each)}, {v}, {parts}{layout}, stream);"


def in_parts(program: Program, number: int, first: int = 0) -> str:
    """How blocks share planes, and in which order those come: a GPU's pass goes over memory the other way than the one before, whose end the L2 cache
    still has, the pass `first` down."""
    before = sum(isinstance(each, Planes) for each in program.passes[first:number])
    return f"load::{'up' if before % 2 else 'down'}(parts_{number})"


def merging(program: Program, number: int) -> list[str]:
    """A GPU's calls behind a pass, or what stands for one, that makes parts of sums."""
    partial = [program.arrays[key] for key in program.passes[number].targets]
    partial = [array for array in partial if array.parts is not None]
    calls = [f"const int64_t few_{number} = load::few_parts(parts_{number});"] * bool(partial)
    for array in partial:
        sums = few(array)
        of = TYPES[array.kind]
        calls.append(
            f"load::merge_parts<{of}>({sums.name}, {array.name}, {size(sums)}, parts_{number}, stream);"
        )
    return calls


def small_call(program: Program, number: int, made: str) -> str:
    """A GPU's."""
    blocks = {"sample": "N", "channel": "C", "one": "1"}[program.passes[number].mode]
    slices = program.texts[number].slices
    return f"load::small({made}, {blocks}, stream{f', C, {slices}' * (slices > 1)});"


def given_few(program: Program) -> dict[str, str]:
    """What small passes are given in the place of planes' parts, and of how many there are."""
    found = {}
    for array in program.arrays.values():
        if array.parts is not None and not program.on_cpu:
            left, parts = f"few_{array.parts}", f"parts_{array.parts}"
            found |= {parts: left, array.name: f"{left} < {parts} ? {few(array).name} : {array.name}"}
    return found


def _on_cpu(program: Program, made: Sequence[str]) -> list[str]:
    """All samples at once; or where v is convolved, so many at a time as it is held for."""
    strips = "{e_D, e_H, e_W, strip_planes, strip_rows, strip_columns}"
    sizes = "{N, image_C, C, image_D, image_H, image_W, kernel_D, before, above, left}"
    calls = []
    if program.convolves:
        depths = [window_of_v(program.graph, program.passes[i].level)[0] for i in program.in_strips]
        deep = str(any(depth != 1 for depth in depths)).lower()
        calls += [
            f"load::convolved<{deep}>(convolution, v, strips, some, [&](const load::Convolved& strip) {{"
        ]
        for i in program.in_strips:
            each = program.passes[i]
            pool = ", ".join(map(str, window_of_v(program.graph, each.level)))
            written = {program.arrays[key].name for key in each.targets}
            again = any(written & program.texts[j].pointers.keys() for j in program.in_strips if j != i)
            calls.append(
                f"  strip.planes({made[i]}, {_extent_of(each)}, load::Pool<{pool}>(), {str(not again).lower()});"
            )
        calls.append("});")
    for i, each in enumerate(program.passes):
        if i in program.in_strips:
            continue
        if isinstance(each, Planes):
            values = "{v, some.first, C, int64_t(e_D) * e_H * e_W}" if program.texts[i].reads_v else "{}"
            if i == program.differentiated and program.differentiated_by:
                sums = f"{program.differentiated_by}::FilterSums"
                given = f"{_extent_of(each)}, {values}, dz, dweight, image, {sizes}, {strips}, shares, passes"
                run = f"load::differentiated<{sums}>({made[i]}, {given});"
                if program.closes:
                    own = ", ".join(program.arrays[key].name for key in each.targets if key.what == "sums")
                    run = f"*passes ? {run[:-1]} : load::nothing_passes({{{own}}}, N * C * parts_{i});"
                calls.append(run)
            else:
                calls.append(f"load::planes({made[i]}, {_extent_of(each)}, {values}, parts_{i}, some);")
        else:
            blocks = {"sample": "some.first, some.last", "channel": "0, C", "one": "0, 1"}[each.mode]
            calls.append(f"load::small({made[i]}, {blocks});")
    if program.differentiated_by:
        calls = [f"*passes = {int(not program.closes)};", *calls]
    if not program.convolves:
        return ["const load::Samples some{0, N};", *calls]
    return [
        f"const load::Convolution convolution(image, filters, {sizes});",
        f"const load::Division strips{strips};",
        "for (int64_t first = 0; first < N; first += samples) {",
        "  const load::Samples some{first, std::min(first + samples, N)};",
        *[f"  {line}" for line in calls],
        "}",
    ]


def _extent(level: str, channels: str = "C") -> str:
    return f"N, {channels}, {level}_D, {level}_H, {level}_W"


def _extent_of(each: Planes) -> str:
    return f"load::Extent({_extent(each.level, '1' if each.by_sample else 'C')})"
