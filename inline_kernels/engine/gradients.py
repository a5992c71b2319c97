"""The gradients of a convolution's weight and input by kernels of our own, for any tail, in the library's place behind the pass that writes dz.

- PACKED: kernels/grad/packed_weight.cuh, of images and volumes, padded or not; and packed_input.cuh, of plain images. That pass then writes dz in
  16 bits, as tensor cores take it (kernels/load/units.cuh). A float32 is one float16 under a scale for each sample: as exact as TF32, which eager
  runs for that gradient, or else the library serves.
- PACKS: the weight's of those, of dz and x as they lie, in planes or channels last, which it packs itself: where dz gives x's gradient, too, or lies
  channels last; and where eager runs float32, of two float16 an operand.
- FEW: kernels/grad/few_weight.cuh, for few channels in, of images and volumes, padded or not, of dz in planes; in TF32 where eager runs it for
  that gradient, else in float32's accuracy.
- STREAM: kernels/grad/stream_input.cuh, for x, of dz in planes: a convolution of few channels in or of volumes, for which the library's gradient
  computes many more.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

import inline_loader

from . import between, costs, jobs, layouts, library, precision, tiling
from .cases import CTYPES

PACKED, PACKS, FEW, STREAM = "packed", "packs", "few", "stream"
MOST_CHANNELS = 16  # in, that are few


class Ways(NamedTuple):
    """What gives the gradients of x and of the weight; None: the library, or nobody."""

    x: str | None = None
    weight: str | None = None


_TEXT = """// The gradient of {of}
#include "grad/packed_{name}.cuh"

using Filter = conv::Filter<CHANNELS_IN, CHANNELS_OUT, {kernels}>;
using Target = conv::Target<CAPABILITY, SHARED_LIMIT, 1, COUNTS_IN_INT>;
using Build = conv::Build<Filter, conv::Operands<value_t, SPLIT>, Target>;

EXPORT void backward(Out<value_t> gradient, In<value_t> dz, In<value_t> other, cudaStream_t stream) {{
  grad::packed_{name}<BUILD>(gradient, dz, other, stream);
}}
"""
_OF_WEIGHT = "Build, conv::Around<PADDED, {befores}>, grad::Lying<{lying}>, {cut}"
_FEW_TEXT = """// The gradient of {of}
#include "grad/few_weight.cuh"

using Filter = conv::Filter<CHANNELS_IN, CHANNELS_OUT, {kernels}>;
using Around = conv::Around<PADDED, {befores}>;
using Tile = grad::few::Tile<Filter, Around, SHARED_LIMIT, DZ_ALIGNED, LINE, SPLIT>;

EXPORT void backward(Out<value_t> gradient, In<value_t> dz, In<value_t> x, cudaStream_t stream) {{
  grad::few::weight<Tile>(gradient, dz, x, stream);
}}
"""

_STREAM_TEXT = """// The gradient of {of}
#include "grad/stream_input.cuh"

using Filter = conv::Filter<CHANNELS_IN, CHANNELS_OUT, {kernels}>;

EXPORT void backward(Out<value_t> gradient, In<value_t> dz, In<value_t> weight, cudaStream_t stream) {{
  {walk}
  grad::stream_input<Filter, conv::Operands<value_t, SPLIT>, COLUMNS, CLUSTER, LEAD, SHARED_LIMIT, FOLDED>(gradient, dz, weight, walk, stream);
}}
"""


def fastest(
    segment, x: Tensor, weight: Tensor, dx: bool, dw: bool, in_units: bool, last: bool = False
) -> Ways:
    """What gives those that are asked for. in_units: can dz be written in 16 bits? last: is it channels last, whoever reads it?"""
    if last:
        return Ways(None, PACKS if dw and packs_obstacle(segment, x, weight) is None else None)
    of_x = STREAM if dx and stream_obstacle(segment, x, weight) is None else None
    of_weight = FEW if dw and few_obstacle(segment, x, weight) is None else None
    if not dw:
        return Ways(of_x)
    of_few = few_expected(segment, x, weight)[0] if of_weight else math.inf
    if in_units and obstacle(segment, x, weight, dx) is None:
        ours, (_, by_library) = expected(segment, x, weight, dx), weight_expected(segment, x, weight)
        others = of_few if of_weight else by_library
        if dx:
            others += stream_expected(segment, x, weight)[0] if of_x else ours[1] - by_library
        if ours[0] <= others:
            return Ways(PACKED if dx else None, PACKED)
    if packs_obstacle(segment, x, weight) is None and packs_expected(segment, x, weight)[0] <= of_few:
        # For the library's gradient of x in TF32 dz may be rounded.
        by_library = dx and not of_x and layouts.fastest(segment, x, weight, "dx") == layouts.FOR_TF32
        if not (by_library and _splits(segment, x, weight)):
            return Ways(of_x, PACKS)
    return Ways(of_x, of_weight)


def _plain_obstacle(
    segment, x: Tensor, weight: Tensor, dimensions=(4,), padded: bool = False, last: bool = False
) -> str | None:
    """padded: may zeros be around x? last: may it, and the weight, lie channels last?"""
    if library.device_type(x) != "cuda" or weight.dim() not in dimensions:
        return "they convolve images on a GPU"
    if not all(type(size) is int for size in (*x.shape, *weight.shape)):
        return "sizes are not known"
    walk = jobs.walk_of(segment, weight)
    plain = (
        walk.is_plain
        or padded
        and {*walk.stride, *walk.dilation} == {1}
        and segment.conv.padding_mode == "zeros"
    )
    if segment.conv.groups != 1 or not plain:
        return "the convolution has groups, a stride, padding or dilation"
    if library.is_channels_last(x, weight) and not last:
        return "x or the weight lies channels last"
    return None


def few_obstacle(segment, x: Tensor, weight: Tensor) -> str | None:
    """Why FEW can't give the weight's gradient, or is not faster than the library; or None."""
    if reason := _plain_obstacle(segment, x, weight, (4, 5), padded=True):
        return reason
    if weight.shape[1] > MOST_CHANNELS:
        return "there are many channels in"
    size = _result_size(segment, x, weight)
    if reason := tiling.few_weights_obstacle(x, weight, size, _splits(segment, x, weight)):
        return reason
    ours, theirs = few_expected(segment, x, weight)
    return "the library is faster at such sizes" if theirs <= ours else None


def few_expected(segment, x: Tensor, weight: Tensor) -> tuple[float, float]:
    """Microseconds, by ours and by the library."""
    device, split = tiling.device_properties(x.device.index), _splits(segment, x, weight)
    size = _result_size(segment, x, weight)
    tile = tiling.few_weights(weight, size, split, device.shared)
    return costs.few_weights_gradient(x.shape, weight.shape, size, tile, split, device)


def _result_size(segment, x: Tensor, weight: Tensor) -> list[int]:
    """The extents of dz."""
    walk = jobs.walk_of(segment, weight)
    return [sum(each) + 1 - k for *each, k in zip(x.shape[2:], walk.before, walk.behind, weight.shape[2:])]


def _splits(segment, x: Tensor, weight: Tensor) -> bool:
    """Are FEW's operands two TF32, or PACKS' two float16? Not where eager's are one TF32."""
    walk = jobs.walk_of(segment, weight)
    if walk.before != walk.behind:  # the library then pads x first
        return True
    return x.dtype == torch.float32 and not _runs_tf32(segment, x, weight, "dw")


class _Turned(NamedTuple):
    """x's gradient as a convolution of dz with the filters turned round: that one's image and filters, and how they go over it. settings: of the
    convolution itself, or None where it pads by more behind than before."""

    image: tuple[int, ...]
    filters: tuple[int, ...]
    walk: jobs.Walk
    settings: precision.Settings | None

    @classmethod
    def of(cls, segment, x: Tensor, weight: Tensor) -> _Turned:
        walk, (C, channels, *taps) = jobs.walk_of(segment, weight), weight.shape
        reach = [(k - 1) * dilation for k, dilation in zip(taps, walk.dilation)]
        padded = [sum(each) for each in zip(x.shape[2:], walk.before, walk.behind)]
        image = x.shape[0], C, *[size - each for size, each in zip(padded, reach)]
        before, behind = ([a - b for a, b in zip(reach, each)] for each in (walk.before, walk.behind))
        same = walk.before == walk.behind
        settings = precision.Settings(walk.stride, walk.before, walk.dilation) if same else None
        walk = jobs.Walk((1,) * len(taps), before, behind, walk.dilation)
        return cls(image, (channels, C, *taps), walk, settings)

    def runs_tf32(self, x: Tensor, weight: Tensor) -> bool:
        """Does eager, for that gradient?"""
        return bool(self.settings and precision.runs_tf32(x, weight, "dx", self.settings))

    def streamed(self, x: Tensor, weight: Tensor) -> costs.Streamed:
        return self._streamed(x, x.dtype == torch.float32 and not self.runs_tf32(x, weight))

    def loses_anyhow(self, x: Tensor, weight: Tensor) -> bool:
        """Is the library faster, where it takes the longer of its ways, and ours its shorter one?"""
        return costs.stream_microseconds(self.shapes(x), self._streamed(x, False)) >= max(
            self.librarys(x, weight, tf32) for tf32 in (False, True)
        )

    def shapes(self, x: Tensor) -> costs.Shapes:
        device = tiling.device_properties(x.device.index)
        return costs.Shapes(self.image, self.filters, _positions(x), x.element_size(), device)

    def librarys(self, x: Tensor, weight: Tensor, tf32: bool) -> float:
        device, dz = tiling.device_properties(x.device.index), math.prod(self.image)
        return costs.library_input_gradient(x.shape, weight.shape, x.element_size(), device, dz, tf32)

    def _streamed(self, x: Tensor, split: bool) -> costs.Streamed:
        return tiling.streamed(
            self.shapes(x), self.walk, costs.Streamed(split=split, alone=True), stores=True
        )


def _positions(x: Tensor) -> int:
    return x.shape[0] * math.prod(x.shape[2:])


def stream_obstacle(segment, x: Tensor, weight: Tensor) -> str | None:
    """Why STREAM can't give x's gradient, or is not faster than the library; or None."""
    conv = segment.conv
    if library.device_type(x) != "cuda" or weight.dim() < 4 or conv.is_nothing:
        return "it convolves on a GPU, in two dimensions or three"
    if not all(type(size) is int for size in (*x.shape, *weight.shape)):
        return "sizes are not known"
    if conv.groups != 1 or {*conv.stride} != {1} or conv.padding_mode != "zeros":
        return "the convolution has groups, a stride or no zeros around its image"
    if reason := tiling.stream_obstacle(x, x.dtype):
        return reason
    if tiling.capability(x) != (9, 0):
        return "it needs a GPU of compute capability 9.0"
    turned = _Turned.of(segment, x, weight)
    if min(*turned.walk.before, *turned.walk.behind) < 0:
        return "the image has more around it than the filter"
    if min(turned.image) < 1 or _positions(x) >= 2**31 - 1024:
        return "there is nothing to convolve, or more than is counted in int"
    if turned.loses_anyhow(x, weight):  # what eager runs need not be asked then
        return "the library is faster at such sizes"
    if library.is_channels_last(x, weight) or layouts.fastest(segment, x, weight, "dx") != layouts.PLANES:
        return "the library takes its operands channels last"
    taps, by_views = weight.shape[2:], turned.streamed(x, weight).folded == costs.VIEWS
    if not by_views and jobs.copies_obstacle(turned.walk, taps, (1,) * len(taps)):
        return "the filter reaches too far"
    ours, theirs = stream_expected(segment, x, weight)
    return "the library is faster at such sizes" if theirs <= ours else None


def stream_expected(segment, x: Tensor, weight: Tensor) -> tuple[float, float]:
    """Microseconds, by ours and by the library."""
    turned = _Turned.of(segment, x, weight)
    ours = costs.stream_microseconds(turned.shapes(x), turned.streamed(x, weight))
    return ours, turned.librarys(x, weight, turned.runs_tf32(x, weight))


def obstacle(segment, x: Tensor, weight: Tensor, dx: bool) -> str | None:
    """Why PACKED can't give the weight's gradient, and with dx that of x, or is not as exact as eager, or not faster than the library; or None."""
    if reason := _packed_obstacle(segment, x, weight, dx):
        return reason
    if dx and (reason := tiling.packed_input_obstacle(x, weight)):
        return reason
    ours, theirs = expected(segment, x, weight, dx)
    if theirs <= ours:
        return "the library is faster at such sizes"
    asked = ("dw", "dx") if dx else ("dw",)
    if x.dtype == torch.float32 and not all(_runs_tf32(segment, x, weight, of) for of in asked):
        return "eager runs float32"
    return None


def packs_obstacle(segment, x: Tensor, weight: Tensor) -> str | None:
    """Why PACKS can't give the weight's gradient, or is not faster than the library; or None."""
    if reason := _packed_obstacle(segment, x, weight, False, last=True):
        return reason
    if x.dtype == torch.float32:  # what eager runs need not be asked where the library is faster anyhow
        ours, _ = weight_expected(segment, x, weight, packs=True)
        if ours >= max(weight_expected(segment, x, weight, True, split)[1] for split in (False, True)):
            return "the library is faster at such sizes"
    ours, theirs = packs_expected(segment, x, weight)
    return "the library is faster at such sizes" if theirs <= ours else None


def _packed_obstacle(segment, x: Tensor, weight: Tensor, dx: bool, last: bool = False) -> str | None:
    if reason := _plain_obstacle(segment, x, weight, (4,) if dx else (4, 5), not dx, last):
        return reason
    if weight.shape[0] % 8:
        return "channels out are no multiple of 8"
    walk = jobs.walk_of(segment, weight)
    if walk.before != walk.behind:
        return "there are more zeros behind the image than before it"
    size, units = _result_size(segment, x, weight), -(-max(weight.shape[:2]) // 8)
    padded = [extent + taps - 1 for extent, taps in zip(size, weight.shape[2:])]
    if min(size) < 1 or math.prod(padded) * units > 2**30:
        return "there is nothing to convolve, or more than is counted in int"
    return tiling.wide_obstacle(x, weight, x.dtype)


def _runs_tf32(segment, x: Tensor, weight: Tensor, of: str) -> bool:
    """Does eager? Of as many zeros before x as behind it."""
    if between.rounds(segment, x):  # whose x lies otherwise there
        return between.runs_tf32(segment, x, weight, of)
    settings = precision.Settings(padding=jobs.walk_of(segment, weight).before)
    return precision.runs_tf32(x, weight, of, settings)


def expected(segment, x: Tensor, weight: Tensor, dx: bool) -> tuple[float, float]:
    """Microseconds, by PACKED and by the library."""
    ours, theirs = weight_expected(segment, x, weight)
    if dx:
        device = tiling.device_properties(x.device.index)
        of_x = costs.input_gradient(x.shape, weight.shape, x.element_size(), device)
        ours, theirs = ours + of_x[0], theirs + of_x[1]
    return ours, theirs


def weight_expected(
    segment, x: Tensor, weight: Tensor, packs: bool = False, split: bool = False
) -> tuple[float, float]:
    """The same of the weight's gradient. packs: by PACKS. split: are operands two float16, and the library's float32?"""
    device, size = tiling.device_properties(x.device.index), _result_size(segment, x, weight)
    later = tiling.later_lines(weight, size, split, x.device.index)
    last = library.is_channels_last(x)
    rounds = (
        last and not split and between.rounds(segment, x) and not segment.of_operand
    )  # (layouts.image_of)
    how = costs.Differentiated(packs, split, last, rounds, later)
    return costs.weight_gradient(x.shape, weight.shape, size, x.element_size(), how, device)


def packs_expected(segment, x: Tensor, weight: Tensor) -> tuple[float, float]:
    return weight_expected(segment, x, weight, True, _splits(segment, x, weight))


def size(N: int, C: int, positions: int, dtype: torch.dtype) -> int:
    """Of dz in 16 bits, in elements of that dtype: kernels/grad/packed.cuh's packed_size."""
    return N * C * positions // 2 + 2 * N if dtype == torch.float32 else N * C * positions


def _lies(last: bool) -> str:
    return "grad::Lies::kLast" if last else "grad::Lies::kPlanes"


def requests(ways: Ways, segment, x: Tensor, weight: Tensor, last: bool = False) -> dict[str, dict]:
    """What is built, for the gradients of "input" and "weight". last: does dz lie channels last?"""
    capability, shared, *_ = tiling.device_properties(x.device.index)
    known = {"VALUE_T": CTYPES[x.dtype], "OUTPUT_T": CTYPES[x.dtype], "SHARED_LIMIT": shared}
    walk, axes, texts = jobs.walk_of(segment, weight), "DHW"[5 - weight.dim() :], {}
    words = {f"{what.lower()}s": ", ".join(f"{what}_{a}" for a in axes) for what in ("KERNEL", "BEFORE")}
    words["walk"] = jobs.walk_text(len(axes))
    spatial = tiling.spatial_defines(weight.shape)
    around = (
        spatial | {"PADDED": int(not walk.is_plain)} | {f"BEFORE_{a}": n for a, n in zip(axes, walk.before)}
    )
    gpu = {"CAPABILITY": 90 if capability == (9, 0) else 80}
    if ways.weight == FEW:
        size, split = _result_size(segment, x, weight), _splits(segment, x, weight)
        defines = {"DZ_ALIGNED": math.gcd(size[-1], 4), "LINE": tiling.few_line(size), "SPLIT": int(split)}
        texts["weight"] = _FEW_TEXT, around | defines
    elif ways.weight:
        packs = ways.weight == PACKS
        of_dz = _lies(last) if packs else "grad::Lies::kUnits"
        words["lying"] = ", ".join([of_dz, *map(_lies, map(library.is_channels_last, (x, weight)))])
        split = packs and _splits(segment, x, weight)
        later = tiling.later_lines(weight, _result_size(segment, x, weight), split, x.device.index)
        words["cut"] = "grad::Rows" if later is None else f"grad::Lines<{later}>"
        defines = {"SPLIT": int(split), "COUNTS_IN_INT": 0}
        texts["weight"] = _TEXT.replace("BUILD", _OF_WEIGHT), around | gpu | defines
    if ways.x == PACKED:
        planned = tiling.wide_defines(x, weight, False, aligned=False, gradients=True)
        defines = {"SPLIT": 0, "COUNTS_IN_INT": planned["COUNTS_IN_INT"]}
        texts["input"] = _TEXT.replace("BUILD", "Build"), spatial | gpu | defines
    elif ways.x == STREAM:
        turned = _Turned.of(segment, x, weight)
        defines = tiling.stream_defines(turned.shapes(x), turned.streamed(x, weight))
        texts["input"] = _STREAM_TEXT, defines | jobs.walk_defines(turned.walk)
    own = segment.conv.name or "the convolution"
    return {
        name: {
            "name": f"gradient_of_{name}",
            "source": text.format(of=f"the {name} of {own}", name=name, **words),
            "device": "cuda",
            "defines": known | defines,
        }
        for name, (text, defines) in texts.items()
    }


def planned(
    ways: Ways, segment, x: Tensor, weight: Tensor, last: bool = False
) -> Callable[..., tuple[Tensor | None, Tensor | None]]:
    """The gradients of x and the weight that are ours, of (dz, x, weight), for such arguments; None for others. last: does dz lie channels
    last? So may x, and the weight, and then its gradient does."""
    lie = [library.is_channels_last(weight), last, library.is_channels_last(x)]
    lying = {"weight": [i for i, each in enumerate(lie) if each]}
    launches = {
        name: inline_loader.load(**request).backward.bound(last=lying.get(name, ()))
        for name, request in requests(ways, segment, x, weight, last).items()
    }
    of_input, of_weight = launches.get("input"), launches.get("weight")
    layout, make_dx = _layout(x), library.making(library.without_memory(x, x.shape, x.dtype))
    make_dweight = library.making(library.without_memory(x, weight.shape, x.dtype, _layout(weight)))

    def run(dz: Tensor, x: Tensor, weight: Tensor) -> tuple[Tensor | None, Tensor | None]:
        dx = dweight = None
        if of_weight:
            dweight = make_dweight()
            x = library.contiguous(x, layout)
            of_weight(dweight, dz, library.aligned(x, layout) if lie[2] else x)
        if of_input:
            dx = make_dx()
            of_input(dx, dz, library.contiguous(weight))
        return dx, dweight

    return run


def _layout(t: Tensor) -> torch.memory_format:
    return library.channels_last(t) if library.is_channels_last(t) else torch.contiguous_format


def in_words(segment, x: Tensor, weight: Tensor, in_units: bool, last: bool = False) -> list[str]:
    """What ours give."""

    def given(what: str, times: tuple[float, float]) -> str:
        ours, theirs = map(round, times)
        return f"{what} of our own ({ours} µs expected, {theirs} by the library)"

    alone = fastest(segment, x, weight, False, True, in_units, last).weight
    both = fastest(segment, x, weight, True, True, in_units, last)
    words = []
    if both.x == PACKED:
        return [given("the gradients of weight and x by kernels", expected(segment, x, weight, True))]
    if alone:
        where = ", where x has none," * (both.weight is None)
        of_weight = {FEW: few_expected, PACKED: weight_expected, PACKS: packs_expected}[alone]
        times = of_weight(segment, x, weight)
        words.append(given(f"the weight's gradient{where} by a kernel", times))
    if both.x:
        words.append(given("x's gradient by a kernel", stream_expected(segment, x, weight)))
    return words
