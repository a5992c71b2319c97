"""The gradients of a convolution's weight and input by kernels of our own, for any tail, in the library's place behind the pass that writes dz.

- PACKED: kernels/grad/packed_weight.cuh and packed_input.cuh. That pass then writes dz in 16 bits, as tensor cores take it
  (kernels/load/units.cuh). A float32 is one float16 under a scale for each sample: as exact as TF32, which eager runs for that gradient, or else
  the library serves.
- FEW: kernels/grad/few_weight.cuh, for few channels in, of images and volumes, padded or not, of dz in planes; in TF32 where eager runs it for
  that gradient, else in float32's accuracy. That of x is the library's.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

import inline_loader

from . import choice, library, mainloops, precision, tiling
from .cases import CTYPES

PACKED, FEW = "packed", "few"
MOST_CHANNELS = 16  # in, that are few

_TEXT = """// The gradient of {of}
#include "grad/packed_{name}.cuh"

using Filter = conv::Filter<CHANNELS_IN, CHANNELS_OUT, KERNEL_H, KERNEL_W>;
using Target = conv::Target<CAPABILITY, SHARED_LIMIT, 1, 1, ONE_TILE, COUNTS_IN_INT>;
using Build = conv::Build<Filter, conv::Operands<value_t, false>, Target>;

EXPORT void backward(Out<value_t> gradient, In<value_t> dz, In<value_t> other, cudaStream_t stream) {{
  grad::packed_{name}<Build>(gradient, dz, other, stream);
}}
"""
_FEW_TEXT = """// The gradient of {of}
#include "grad/few_weight.cuh"

using Filter = conv::Filter<CHANNELS_IN, CHANNELS_OUT, {kernels}>;
using Around = grad::few::Around<PADDED, {befores}>;
using Tile = grad::few::Tile<Filter, Around, SHARED_LIMIT, DZ_ALIGNED, LINE, SPLIT>;

EXPORT void backward(Out<value_t> gradient, In<value_t> dz, In<value_t> x, cudaStream_t stream) {{
  grad::few::weight<Tile>(gradient, dz, x, stream);
}}
"""


def fastest(segment, x: Tensor, weight: Tensor, dx: bool, in_units: bool) -> str | None:
    """What gives the weight's gradient, where x has one as `dx` says; None: the library. in_units: can dz be written in 16 bits?"""
    times = {}
    if few_obstacle(segment, x, weight, dx) is None:
        times[FEW] = few_expected(segment, x, weight, dx)[0]
    if in_units and obstacle(segment, x, weight, dx) is None:
        times[PACKED] = expected(x, weight, dx)[0]
    return min(times, key=lambda way: times[way], default=None)


def _plain_obstacle(segment, x: Tensor, weight: Tensor, dimensions=(4,), padded: bool = False) -> str | None:
    """padded: may zeros be around x?"""
    if library.device_type(x) != "cuda" or weight.dim() not in dimensions:
        return "they convolve images on a GPU"
    if not all(type(size) is int for size in (*x.shape, *weight.shape)):
        return "sizes are not known"
    walk = mainloops.walk_of(segment, weight)
    plain = (
        walk.is_plain
        or padded
        and {*walk.stride, *walk.dilation} == {1}
        and segment.conv.padding_mode == "zeros"
    )
    if segment.conv.groups != 1 or not plain:
        return "the convolution has groups, a stride, padding or dilation"
    if library.is_channels_last(x, weight):
        return "x or the weight lies channels last"
    return None


def few_obstacle(segment, x: Tensor, weight: Tensor, dx: bool) -> str | None:
    """Why FEW can't give the weight's gradient, or is not faster than the library; or None."""
    if reason := _plain_obstacle(segment, x, weight, (4, 5), padded=True):
        return reason
    if weight.shape[1] > MOST_CHANNELS:
        return "there are many channels in"
    size = _few_result(segment, x, weight)
    if reason := tiling.few_weights_obstacle(x, weight, size, _splits(segment, x, weight)):
        return reason
    ours, theirs = few_expected(segment, x, weight, dx)
    return "the library is faster at such sizes" if theirs <= ours else None


def few_expected(segment, x: Tensor, weight: Tensor, dx: bool) -> tuple[float, float]:
    """Microseconds, by ours and by the library, which gives that of x in either case; of a volume's x not counted."""
    device, split = tiling.device_properties(x.device.index), _splits(segment, x, weight)
    size = _few_result(segment, x, weight)
    tile = tiling.few_weights(weight, size, split, device.shared)
    ours, theirs = choice.few_weights_gradient(x.shape, weight.shape, size, tile, split, device)
    of_x = 0.0
    if dx and weight.dim() == 4:
        of_x = choice.input_gradient(x.shape, weight.shape, x.element_size(), device)[1]
    return ours + of_x, theirs + of_x


def _few_result(segment, x: Tensor, weight: Tensor) -> list[int]:
    """The extents of dz."""
    walk = mainloops.walk_of(segment, weight)
    return [sum(each) + 1 - k for *each, k in zip(x.shape[2:], walk.before, walk.behind, weight.shape[2:])]


def _splits(segment, x: Tensor, weight: Tensor) -> bool:
    """Are FEW's operands two TF32? Not where eager's are one."""
    walk = mainloops.walk_of(segment, weight)
    if walk.before != walk.behind:  # the library then pads x first
        return True
    settings = precision.PLAIN_SETTINGS if walk.is_plain else precision.Settings(padding=walk.before)
    return not precision.runs_tf32(x, weight, "dw", settings)


def obstacle(segment, x: Tensor, weight: Tensor, dx: bool) -> str | None:
    """Why PACKED can't give the weight's gradient, and with dx that of x, or is not as exact as eager, or not faster than the library; or None."""
    if reason := _plain_obstacle(segment, x, weight):
        return reason
    if weight.shape[0] % 8:
        return "channels out are no multiple of 8"
    if reason := tiling.wide_obstacle(x, weight, x.dtype):
        return reason
    if dx and (reason := tiling.packed_input_obstacle(x, weight)):
        return reason
    ours, theirs = expected(x, weight, dx)
    if theirs <= ours:
        return "the library is faster at such sizes"
    if x.dtype == torch.float32:
        asked = ("dw", "dx") if dx else ("dw",)
        if not all(precision.runs_tf32(x, weight, of, precision.PLAIN_SETTINGS) for of in asked):
            return "eager runs float32"
    return None


def expected(x: Tensor, weight: Tensor, dx: bool) -> tuple[float, float]:
    """Microseconds, by PACKED and by the library."""
    device = tiling.device_properties(x.device.index)
    given = x.shape, weight.shape, x.element_size(), device
    each = [choice.weight_gradient(*given), *([choice.input_gradient(*given)] if dx else [])]
    return sum(ours for ours, _ in each), sum(theirs for _, theirs in each)


def size(N: int, C: int, positions: int, dtype: torch.dtype) -> int:
    """Of dz in 16 bits, in elements of that dtype: kernels/grad/packed.cuh's packed_size."""
    return N * C * positions // 2 + 2 * N if dtype == torch.float32 else N * C * positions


def requests(way: str, segment, x: Tensor, weight: Tensor, dx: bool) -> list[dict]:
    """What is built: for the weight, and by PACKED with dx for x, whose row may be one tile."""
    capability, shared, *_ = tiling.device_properties(x.device.index)
    defines = tiling.spatial_defines(weight.shape) | {"VALUE_T": CTYPES[x.dtype], "OUTPUT_T": CTYPES[x.dtype]}
    defines["SHARED_LIMIT"], by_axis = shared, {}
    if way == FEW:
        walk, size = mainloops.walk_of(segment, weight), _few_result(segment, x, weight)
        line, split = tiling.few_line(size), _splits(segment, x, weight)
        sizes = {"DZ_ALIGNED": math.gcd(size[-1], 4), "LINE": line, "SPLIT": int(split)}
        axes = "DHW"[-len(size) :]
        sizes |= {"PADDED": int(not walk.is_plain)} | {f"BEFORE_{a}": n for a, n in zip(axes, walk.before)}
        by_axis = {
            f"{what.lower()}s": ", ".join(f"{what}_{a}" for a in axes) for what in ("KERNEL", "BEFORE")
        }
        known = {"weight": (_FEW_TEXT, sizes)}
    else:
        defines["CAPABILITY"] = 90 if capability == (9, 0) else 80
        planned = tiling.wide_defines(x, weight, False, aligned=False, gradients=True)
        by_size = {name: planned[name] for name in ("ONE_TILE", "COUNTS_IN_INT")}
        known = {"weight": (_TEXT, dict.fromkeys(by_size, 0))} | ({"input": (_TEXT, by_size)} if dx else {})
    own = segment.conv.name or "the convolution"
    return [
        {
            "name": f"gradient_of_{name}",
            "source": text.format(of=f"the {name} of {own}", name=name, **by_axis),
            "device": "cuda",
            "defines": defines | sizes,
        }
        for name, (text, sizes) in known.items()
    ]


def gives_both(way: str | None) -> bool:
    """Is the gradient of x ours, too?"""
    return way == PACKED


def planned(
    way: str, segment, x: Tensor, weight: Tensor, dx: bool
) -> Callable[..., tuple[Tensor | None, Tensor]]:
    """(dx or None, dweight) of (dz, x, weight), for such arguments."""
    of_weight, *of_input = [
        inline_loader.load(**request).backward.bound() for request in requests(way, segment, x, weight, dx)
    ]
    sizes = tuple(x.shape), tuple(weight.shape)

    def run(dz: Tensor, x: Tensor, weight: Tensor) -> tuple[Tensor | None, Tensor]:
        dx, dweight = x.new_empty(sizes[0]) if of_input else None, x.new_empty(sizes[1])
        of_weight(dweight, dz, library.contiguous(x))
        for launch in of_input:
            launch(dx, dz, library.contiguous(weight))
        return dx, dweight

    return run


def in_words(way: str, segment, x: Tensor, weight: Tensor) -> str:
    """Where ours gives the weight's."""
    dx = way == PACKED and obstacle(segment, x, weight, True) is None
    ours, theirs = map(
        round, few_expected(segment, x, weight, False) if way == FEW else expected(x, weight, dx)
    )
    what = (
        "the gradients of weight and x by kernels"
        if dx
        else "the weight's gradient by a kernel"
        if way == FEW
        else "the weight's gradient, where x has none, by a kernel"
    )
    return f"{what} of our own ({ours} µs expected, {theirs} by the library)"
