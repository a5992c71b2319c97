"""The schedule `direct`: a GPU's tensor cores convolve in kernels of our own, the tail is applied to v in registers, and v is never written.

It has schedule.py's functions and signatures, and runs a segment in inference where

- the tail is pointwise: scalar operations on v, parameters by channel or single ones, and the model's numbers. What doesn't
  vary along positions is computed once a channel (`Tail::channel`); the rest, a line an operation, once an element (`Tail::operator()`);
- the convolution has one group, and one of the `MAINLOOPS` can run it: with a stride, padding or dilation `stream` alone.

For all else, Unsupported says why; backward is never asked for. A float32 operand is two float16 (float32's accuracy), but in `wide` one,
where eager runs TF32; `stream` runs nowhere else. An infinite value of x reaches v as in eager by these two; by `narrow2d` and `narrow3d` v is NaN wherever eager's is not
finite (its halves are infinity and NaN).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

import inline_loader

from . import choice, library, schedule, source, tiling
from .algebra import reordered
from .graph import ELEMENTS, Node, order
from .passes import Unsupported
from .scalars import SCALARS
from .schedule import count

__all__ = ["Unsupported", "backward", "count", "describe", "forward", "plan", "requests", "saved"]

# Fewer results are left to the library: in them any kernel's start takes longest, and ours have some work more before their first product.
FEWEST_RESULTS = 1 << 18
INFERENCE_ONLY = True
_OWN_SHARED = 33 << 10  # bytes that narrow3d's staging takes: store/runs.cuh


# ------------------------------------------------------------------------------------------------------------- the tail's text


class Member(NamedTuple):
    """Of struct Tail: an argument of the segment (by its number), a tensor or a number, under this name."""

    name: str
    ctype: str  # as a launcher declares it: accumulate_t and value_t of tensors, double of numbers
    argument: int
    is_tensor: bool


class Text(NamedTuple):
    """A tail as it is written. `members` in the launcher's order."""

    lines: list[str]
    members: list[Member]


# Names that the text around the tail has, and words of the language that an attribute of a model may be called by.
_TAKEN = set(
    "v x y weight channel tail Tail Channel Filter Build Conv Target largest_x auto bool case char class const default delete do double else "
    "enum explicit export extern float for goto if inline int long namespace new operator private public register short signed sizeof static "
    "struct switch template this throw try typename union unsigned using virtual void volatile while and or not xor".split()
)


class _Writer:
    """Writes one tail: y as a function of v."""

    def __init__(self, segment, y: Node, has_places: bool):
        self.segment, self.y, self.has_places = segment, y, has_places
        self.members: dict[str, Member] = {}
        self.names = set(_TAKEN)
        inputs = [leaf.attr[0] for leaf in segment.inputs]
        self.tensors = [*inputs, *segment.parameters, *segment.buffers]
        self.first_number = len(self.tensors)  # no seed, and no statistics that are written

    def text(self) -> Text:
        nodes = self._checked()
        kept = self._kept(nodes)
        behind = {*order(kept)}
        by_channel: dict[Node, str] = {}
        channel_lines: list[str] = []
        for node in nodes:
            if node in behind:
                self._write(node, by_channel, channel_lines)
        fields = {node: f"k.{self._field(node)}" for node in kept}
        known, element_lines = dict(fields), []
        for node in nodes:
            if not node.space.small:
                self._write(node, known, element_lines)
        declared = [f"{'bool' if node.is_boolean else 'real'} {self._field(node)};" for node in kept]
        place = ", int64_t at" * self.has_places
        lines = [
            "struct Tail {",
            *[f"  {_declared(member)};" for member in self.members.values()],
            "",
            f"  struct Channel {{ {' '.join(declared)} }};",
            "  __device__ __forceinline__ Channel channel(int64_t n, int c) const {",
            *[f"    {line}" for line in channel_lines],
            f"    return {{{', '.join(by_channel[node] for node in kept)}}};",
            "  }",
            f"  __device__ __forceinline__ float operator()(float v, const Channel& k{place}) const {{",
            *[f"    {line}" for line in element_lines],
            f"    return {known[self.y]};",
            "  }",
            "};",
        ]
        return Text(lines, [*self.members.values()])

    # ---- what it is made of
    def _checked(self) -> list[Node]:
        """All nodes, operands first."""
        if self.y.space != ELEMENTS:
            raise Unsupported("the tail's result isn't of v's shape")
        nodes = order([self.y])
        for node in nodes:
            if node.op in ("spread", "detach", "const") or node.is_scalar_op:
                continue
            if node.op != "leaf" or node.attr[1] == "drawn":
                name = "dropout" if node.op == "leaf" else node.op
                raise Unsupported(f"the tail isn't pointwise: it has {name}")
            if node.attr[1] == "input":
                raise Unsupported("the tail reads a second input")
        if not any(node.op == "leaf" and node.attr[1] == "z" for node in nodes):
            raise Unsupported("the tail doesn't read v")
        return nodes

    def _kept(self, nodes: Sequence[Node]) -> list[Node]:
        """What a channel keeps: operands of elements' operations that don't vary along positions, and are no plain numbers."""
        found = dict.fromkeys(a for node in nodes if not node.space.small for a in node.args if a.space.small)
        return [node for node in found if not _is_number(node)]

    # ---- how it is written
    def _write(self, node: Node, known: dict[Node, str], lines: list[str]) -> None:
        if node in known or _is_number(node):
            return
        if node.op in ("spread", "detach"):
            known[node] = self._value(node.args[0], known)
            return
        if node.op == "leaf":
            known[node] = self._leaf(node)
            return
        operands = [self._value(a, known) for a in node.args]
        operands = [f"({text})" if text.startswith("-") else text for text in operands]
        name = known[node] = f"{node.op}{node.id}"
        lines.append(f"const auto {name} = {SCALARS[node.op].text.format(*operands)};")

    def _value(self, node: Node, known: dict[Node, str]) -> str:
        if node.op == "const":
            if math.isfinite(node.attr):
                return f"real({node.attr!r})"
            return (
                f"real({'NAN' if node.attr != node.attr else '-INFINITY' if node.attr < 0 else 'INFINITY'})"
            )
        return self._member(node).name if _is_number(node) else known[node]

    def _leaf(self, node: Node) -> str:
        if node.attr[1] == "z":
            return "v"
        member, space = self._member(node), node.space
        if space == ELEMENTS:
            return f"real({member.name}[at])"
        index = "n * CHANNELS_OUT + c" if space.n and space.c else "n" if space.n else "c" if space.c else "0"
        return f"real({member.name}[{index}])"

    def _member(self, node: Node) -> Member:
        name, kind = node.attr
        if name not in self.members:
            own = source.identifier(name)
            while own in self.names:
                own += "_"
            self.names.add(own)
            if kind == "scalar":
                at = self.first_number + list(self.segment.scalars).index(name)
                self.members[name] = Member(own, "double", at, False)
            else:
                ctype = "value_t" if kind == "input" else "accumulate_t"
                self.members[name] = Member(own, ctype, self.tensors.index(name), True)
        return self.members[name]

    def _field(self, node: Node) -> str:
        return self._member(node).name if node.op == "leaf" else f"{node.op}{node.id}"


def _is_number(node: Node) -> bool:
    return node.op == "const" or (node.op == "leaf" and node.attr[1] == "scalar")


def _declared(member: Member) -> str:
    return f"const {member.ctype}* {member.name}" if member.is_tensor else f"real {member.name}"


# ------------------------------------------------------------------------------------------------------------------ mainloops


class Mainloop(NamedTuple):
    """A kernel that convolves. `obstacle(x, weight, dtype of y)`: why it can't run, or is not faster than the schedule `load`; or None.
    `has_places`: do its tails know which element of y they compute? `keeps_infinities`: is v infinite where the library's is? An operand
    that is a sum of two float16 makes NaN of it. `walks`: does it take a stride, padding and dilation (`Walk`)?"""

    name: str
    dimensions: int
    headers: Sequence[str]
    declared: str
    launch: Sequence[str]
    has_places: bool
    keeps_infinities: bool
    obstacle: Callable[[Tensor, Tensor, torch.dtype], str | None]
    defines: Callable[[Tensor, Tensor, torch.dtype], dict]
    walks: bool = False


def _narrow2d_defines(x: Tensor, weight: Tensor, dtype: torch.dtype) -> dict:
    planned = {"ROWS_SHARED": tiling.rows_shared(weight, dtype.itemsize)}
    return tiling.spatial_defines(weight.shape) | {"LONG_ROWS": int(x.shape[3] > tiling.COLUMNS)} | planned


def _narrow3d_obstacle(x: Tensor, weight: Tensor, dtype: torch.dtype) -> str | None:
    return tiling.volume_obstacle(x, weight, x.dtype, _OWN_SHARED)


def _wide_obstacle(x: Tensor, weight: Tensor, dtype: torch.dtype) -> str | None:
    """Where it can run, a record says where it is no slower than the library's convolution and a pass behind that."""
    if reason := tiling.wide_obstacle(x, weight, x.dtype):
        return reason
    faster, why = choice.fastest(choice.WIDE_POINTWISE, x.shape, weight.shape, x.element_size())
    return None if faster == "fused" else f"the library's convolution is faster at such sizes: {why}"


def _wide_defines(x: Tensor, weight: Tensor, dtype: torch.dtype) -> dict:
    # A single float16 is as exact as TF32, which is what eager then runs.
    split = x.dtype == torch.float32 and not library.eager_runs_tf32(x, weight)
    return tiling.wide_defines(x, weight, split, aligned=True, gradients=False)


def _stream_obstacle(x: Tensor, weight: Tensor, dtype: torch.dtype) -> str | None:
    """Likewise; float32 is a single float16 here."""
    if reason := tiling.stream_obstacle(x, weight, x.dtype):
        return reason
    if x.dtype == torch.float32 and not library.eager_runs_tf32(x, weight):
        return "its operands have 11 digits, and eager runs float32"
    faster, why = choice.fastest(choice.STREAM_POINTWISE, x.shape, weight.shape, x.element_size())
    return None if faster == "fused" else f"the library's convolution is faster at such sizes: {why}"


# Of those that can run the first one does. narrow2d and narrow3d are always taken where they can: with few channels in the library's
# convolution in float32 takes several times as long.
MAINLOOPS = (
    Mainloop(
        "narrow2d",
        2,
        ("conv/narrow2d.cuh", "store/strips.cuh"),
        "using Filter = conv::Filter<CHANNELS_IN, CHANNELS_OUT, KERNEL_H, KERNEL_W>;",
        [
            "using Strips = store::Strips<output_t, Tail>;",
            "using Tile = conv::narrow2d::Tile<Filter, LONG_ROWS ? 128 : 0, 1>;",
            'static_assert(conv::narrow2d::kShared<Tile, Strips> == ROWS_SHARED, "as it is planned");',
            "conv::narrow2d::pointwise<Filter, LONG_ROWS>(x, weight, stream, Strips{y, tail});",
        ],
        True,
        False,
        tiling.rows_obstacle,
        _narrow2d_defines,
    ),
    Mainloop(
        "narrow3d",
        3,
        ("store/runs.cuh",),
        "using Conv = conv::narrow3d::Shape<value_t, CHANNELS_IN, CHANNELS_OUT, KERNEL_D, KERNEL_H, KERNEL_W>;",
        ["store::pointwise<Conv>(y, x, weight, tail, stream);"],
        True,
        False,
        _narrow3d_obstacle,
        lambda x, weight, dtype: tiling.spatial_defines(weight.shape),
    ),
    Mainloop(
        "wide",
        2,
        ("conv/wide.cuh",),
        "using Filter = conv::Filter<CHANNELS_IN, CHANNELS_OUT, KERNEL_H, KERNEL_W>;\n"
        "using Target = conv::Target<CAPABILITY, SHARED_LIMIT, X_ALIGNED, DY_ALIGNED, ONE_TILE, COUNTS_IN_INT>;\n"
        "using Build = conv::Build<Filter, conv::Operands<value_t, SPLIT>, Target>;",
        [
            "const Scratch<int32_t> largest_x(x.size(0), stream);",
            "conv::wide<Build>(x, weight, tail, store::Nothing{}, store::Rows<output_t>{y}, largest_x, stream);",
        ],
        False,
        True,
        _wide_obstacle,
        _wide_defines,
    ),
    Mainloop(
        "stream",
        2,
        ("conv/stream.cuh",),
        "using Filter = conv::Filter<CHANNELS_IN, CHANNELS_OUT, KERNEL_H, KERNEL_W>;",
        [
            "const Scratch<uint32_t> largest_x(x.size(0), stream);",
            "const conv::Walk walk{{STRIDE_H, STRIDE_W}, {BEFORE_H, BEFORE_W}, {BEHIND_H, BEHIND_W}, {DILATION_H, DILATION_W}};",
            "conv::stream<Filter, conv::Operands<value_t, false>, COLUMNS, CLUSTER, SHARED_LIMIT, false>(",
            "    x, weight, walk, tail, store::Positions<output_t, false>{y}, largest_x, stream);",
        ],
        False,
        True,
        _stream_obstacle,
        lambda x, weight, dtype: tiling.stream_defines(x, weight),
        walks=True,
    ),
)


def _source(segment, mainloop: Mainloop, text: Text) -> str:
    tensors = [f"In<{m.ctype}> {m.name}" for m in text.members if m.is_tensor]
    numbers = [f"double {m.name}" for m in text.members if not m.is_tensor]
    given = ", ".join(m.name if m.is_tensor else f"real({m.name})" for m in text.members)
    parameters = ["Out<output_t> y", "In<value_t> x", "In<value_t> weight", *tensors, *numbers]
    return "\n".join(
        [
            f"// {segment.conv.name}",
            *[f'#include "{header}"' for header in (*mainloop.headers, "core/math.h")],
            "",
            "using real = accumulate_t;",
            mainloop.declared,
            "",
            *text.lines,
            "",
            f"EXPORT void forward({', '.join(parameters)}, cudaStream_t stream) {{",
            f"  const Tail tail{{{given}}};",
            *[f"  {line}" for line in mainloop.launch],
            "}",
            "",
        ]
    )


# ------------------------------------------------------------------------------------------------------------------- deciding


class Written(NamedTuple):
    """A segment's source for a mainloop, and what its launcher takes behind y, x and weight."""

    mainloop: Mainloop
    source: str
    members: list[Member]


def _written(segment, mainloop: Mainloop, exact_order: bool) -> Written:
    """Made once; kept with the segment's graph. Raises Unsupported."""
    with schedule._lock:  # one at a time for a graph, whoever rewrites it
        known = vars(segment.graph).setdefault("direct", {})
        key = mainloop.name, exact_order
        if key not in known:
            (y,) = segment.outputs
            text = _Writer(segment, y if exact_order else reordered([y])[0], mainloop.has_places).text()
            known[key] = Written(mainloop, _source(segment, mainloop, text), text.members)
        return known[key]


def _chosen(segment, arguments: Sequence, saving: bool, dtype: torch.dtype, exact_order: bool) -> Written:
    """The first mainloop that can run it. Raises Unsupported."""
    x, weight = arguments[0], arguments[len(segment.inputs)]
    if library.device_type(x) != "cuda":
        raise Unsupported("convolutions of our own run on GPUs")
    if saving:
        raise Unsupported("backward needs v, which is never written")
    if dtype not in (torch.float32, torch.float16, torch.bfloat16):
        raise Unsupported(f"there are no kernels for results of {dtype}")
    if segment.updates or segment.random:
        raise Unsupported("the tail has statistics or dropout")
    _check_convolution(segment, x, weight)
    refused = []
    for mainloop in MAINLOOPS:
        if mainloop.dimensions != weight.dim() - 2:
            continue
        try:
            _check_walk(segment, weight, mainloop)
            written = _written(segment, mainloop, exact_order)
            reason = (
                None
                if mainloop.keeps_infinities
                else "it makes NaN of infinities, which a tail may tell apart"
            )
            if (reason := reason or mainloop.obstacle(x, weight, dtype)) is None:
                return written
            refused.append(f"{mainloop.name}: {reason}")
        except Unsupported as error:
            refused.append(f"{mainloop.name}: {error}")
    raise Unsupported("; ".join(refused))


def _check_convolution(segment, x: Tensor, weight: Tensor) -> None:
    if segment.conv.groups != 1:
        raise Unsupported("the convolution has groups")
    sizes = schedule.sizes_of(segment, x, weight)
    if (results := sizes.N * sizes.C * sizes.positions("e")) < FEWEST_RESULTS:
        raise Unsupported(f"there are {results} results, and it pays from {FEWEST_RESULTS} on")


class Walk(NamedTuple):
    """How a filter goes over an image, axis by axis; `before` and `behind` it, its padding."""

    stride: Sequence[int]
    before: Sequence[int]
    behind: Sequence[int]
    dilation: Sequence[int]


def _walk(segment, weight: Tensor) -> Walk:
    conv, nd = segment.conv, weight.dim() - 2
    before, behind = zip(*schedule._padding(segment, weight))
    return Walk(schedule._pair(conv.stride, nd), before, behind, schedule._pair(conv.dilation, nd))


def _check_walk(segment, weight: Tensor, mainloop: Mainloop) -> None:
    walk, nd = _walk(segment, weight), weight.dim() - 2
    if not mainloop.walks:
        if walk != Walk((1,) * nd, (0,) * nd, (0,) * nd, (1,) * nd):
            raise Unsupported("the convolution has a stride, padding or dilation")
        return
    reach = [(taps - 1) * dilation for taps, dilation in zip(weight.shape[2:], walk.dilation)]
    if max(walk.stride) > 8 or max(*walk.before, *walk.behind, *reach) > 127:
        raise Unsupported("the copy engine's strides go to 8, its offsets to 127")


def _build(written: Written, segment, arguments: Sequence, dtype: torch.dtype) -> dict:
    x, weight = arguments[0], arguments[len(segment.inputs)]
    defines = schedule._defines(segment, x, dtype) | written.mainloop.defines(x, weight, dtype)
    if written.mainloop.walks:
        for name, values in _walk(segment, weight)._asdict().items():
            defines |= {f"{name.upper()}_{axis}": value for axis, value in zip("HW", values)}
    return {
        "name": f"direct_{source.identifier(segment.conv.name)}",
        "source": written.source,
        "device": "cuda",
        "defines": defines,
    }


def requests(
    segment, arguments: Sequence, saving: bool, dtype: torch.dtype, exact_order: bool = False
) -> list[dict]:
    written = _chosen(segment, arguments, saving, dtype, exact_order)
    return [_build(written, segment, arguments, dtype)]


def describe(
    segment, arguments: Sequence, saving: bool, dtype: torch.dtype, exact_order: bool = False
) -> str:
    written = _chosen(segment, arguments, saving, dtype, exact_order)
    return f"{written.mainloop.name}, the tail inside, v is never written"


# ------------------------------------------------------------------------------------------------------------------ running


@dataclass
class Plan:
    """`tensors`: the launcher's arguments behind y, x and weight, by their numbers, and the dtypes that it reads. No `statistics`."""

    launch: Callable
    tensors: Sequence[tuple[int, torch.dtype]]
    shape: Sequence[int]
    dtype: torch.dtype
    line: str
    statistics: Sequence = ()


def plan(
    segment,
    arguments: Sequence,
    saving: bool,
    dtype: torch.dtype,
    exact_order: bool = False,
    edited: str | None = None,
) -> Plan:
    """edited: in place of its own text. Raises Unsupported with the reason where the schedule can't do it, or has no cause to."""
    written = _chosen(segment, arguments, saving, dtype, exact_order)
    request = _build(written, segment, arguments, dtype)
    kernels = inline_loader.load(**request | ({"source": edited} if edited else {}))
    x, weight_at = arguments[0], len(segment.inputs)
    dtypes = {"value_t": x.dtype, "accumulate_t": torch.float32}
    behind = [(m.argument, dtypes[m.ctype]) for m in written.members if m.is_tensor]
    numbers = [float(arguments[m.argument]) for m in written.members if not m.is_tensor]
    weight = arguments[weight_at]
    return Plan(
        kernels.forward.bound(*numbers),
        [(0, x.dtype), (weight_at, x.dtype), *behind],
        [x.shape[0], weight.shape[0], *schedule.sizes_of(segment, x, weight).levels["e"][5 - weight.dim() :]],
        dtype,
        describe(segment, arguments, saving, dtype, exact_order),
    )


def forward(plan: Plan, arguments: Sequence) -> list[Tensor]:
    """y."""
    y = arguments[0].new_empty(plan.shape, dtype=plan.dtype)
    plan.launch(y, *[schedule._as_read(arguments[i], dtype) for i, dtype in plan.tensors])
    return [y]


def saved(*given) -> list:
    raise Unsupported("nothing is kept for backward")


backward = saved
