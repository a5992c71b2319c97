"""The gradients of a convolution's weight and input by kernels of our own, kernels/grad/packed_weight.cuh and packed_input.cuh, for any tail: in the
library's place behind the pass that writes dz, which then writes it in 16 bits, as tensor cores take it (kernels/load/units.cuh).

A float32 is one float16 under a scale for each sample: as exact as TF32, which eager runs for that gradient, or else the library serves.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

import inline_loader

from . import choice, library, mainloops, precision, tiling
from .cases import CTYPES

_TEXT = """// The gradient of {of}
#include "grad/packed_{name}.cuh"

using Filter = conv::Filter<CHANNELS_IN, CHANNELS_OUT, KERNEL_H, KERNEL_W>;
using Target = conv::Target<CAPABILITY, SHARED_LIMIT, 1, 1, ONE_TILE, COUNTS_IN_INT>;
using Build = conv::Build<Filter, conv::Operands<value_t, false>, Target>;

EXPORT void backward(Out<value_t> gradient, In<value_t> dz, In<value_t> other, cudaStream_t stream) {{
  grad::packed_{name}<Build>(gradient, dz, other, stream);
}}
"""


def obstacle(segment, x: Tensor, weight: Tensor, dx: bool) -> str | None:
    """Why they can't give the weight's gradient, and with dx that of x, or are not as exact as eager, or not faster than the library; or None."""
    if library.device_type(x) != "cuda" or weight.dim() != 4:
        return "they convolve images on a GPU"
    if not all(type(size) is int for size in (*x.shape, *weight.shape)):
        return "sizes are not known"
    if segment.conv.groups != 1 or not mainloops.walk_of(segment, weight).is_plain:
        return "the convolution has groups, a stride, padding or dilation"
    if weight.shape[0] % 8:
        return "channels out are no multiple of 8"
    if library.is_channels_last(x, weight):
        return "x or the weight lies channels last"
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
    """Microseconds, by ours and by the library."""
    device = tiling.device_properties(x.device.index)
    given = x.shape, weight.shape, x.element_size(), device
    each = [choice.weight_gradient(*given), *([choice.input_gradient(*given)] if dx else [])]
    return sum(ours for ours, _ in each), sum(theirs for _, theirs in each)


def size(N: int, C: int, positions: int, dtype: torch.dtype) -> int:
    """Of dz in 16 bits, in elements of that dtype: kernels/grad/packed.cuh's packed_size."""
    return N * C * positions // 2 + 2 * N if dtype == torch.float32 else N * C * positions


def requests(segment, x: Tensor, weight: Tensor, dx: bool) -> list[dict]:
    """What is built: for the weight, and with dx for x, whose row may be one tile."""
    capability, shared, *_ = tiling.device_properties(x.device.index)
    defines = tiling.spatial_defines(weight.shape) | {"VALUE_T": CTYPES[x.dtype], "OUTPUT_T": CTYPES[x.dtype]}
    defines |= {"CAPABILITY": 90 if capability == (9, 0) else 80, "SHARED_LIMIT": shared}
    planned = tiling.wide_defines(x, weight, False, aligned=False, gradients=True)
    by_size = {name: planned[name] for name in ("ONE_TILE", "COUNTS_IN_INT")}
    own = segment.conv.name or "the convolution"
    known = {"weight": dict.fromkeys(by_size, 0), **({"input": by_size} if dx else {})}
    return [
        {
            "name": f"gradient_of_{name}",
            "source": _TEXT.format(of=f"the {name} of {own}", name=name),
            "device": "cuda",
            "defines": defines | sizes,
        }
        for name, sizes in known.items()
    ]


def planned(segment, x: Tensor, weight: Tensor, dx: bool) -> Callable[..., tuple[Tensor | None, Tensor]]:
    """(dx or None, dweight) of (dz, x, weight), for such arguments."""
    of_weight, *of_input = [
        inline_loader.load(**request).backward.bound() for request in requests(segment, x, weight, dx)
    ]
    sizes = tuple(x.shape), tuple(weight.shape)

    def run(dz: Tensor, x: Tensor, weight: Tensor) -> tuple[Tensor | None, Tensor]:
        dx, dweight = x.new_empty(sizes[0]) if of_input else None, x.new_empty(sizes[1])
        of_weight(dweight, dz, library.contiguous(x))
        for launch in of_input:
            launch(dx, dz, library.contiguous(weight))
        return dx, dweight

    return run


def in_words(segment, x: Tensor, weight: Tensor) -> str:
    """Where ours gives the weight's."""
    dx = obstacle(segment, x, weight, True) is None
    ours, theirs = map(round, expected(x, weight, dx))
    what = (
        "the gradients of weight and x by kernels"
        if dx
        else "the weight's gradient, where x has none, by a kernel"
    )
    return f"{what} of our own ({ours} µs expected, {theirs} by the library)"
