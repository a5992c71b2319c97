"""The gradient of a convolution's weight by a kernel of our own, kernels/grad/packed_weight.cuh, for any tail: in the library's place behind the pass
that writes dz, which then writes it in 16 bits, as tensor cores take it (kernels/load/units.cuh).

A float32 is one float16 under a scale for each sample: as exact as TF32, which eager runs for that gradient, or else the library serves.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

import inline_loader

from . import choice, library, mainloops, precision, tiling
from .cases import CTYPES

_TEXT = """// The gradient of the weight of {name}
#include "grad/packed_weight.cuh"

using Filter = conv::Filter<CHANNELS_IN, CHANNELS_OUT, KERNEL_H, KERNEL_W>;
using Build = conv::Build<Filter, conv::Operands<value_t, false>, conv::Target<CAPABILITY, SHARED_LIMIT, 1, 1, false, true>>;

EXPORT void weight(Out<value_t> dweight, In<value_t> dz, In<value_t> x, cudaStream_t stream) {{
  grad::packed_weight<Build>(dweight, dz, x, stream);
}}
"""


def obstacle(segment, x: Tensor, weight: Tensor) -> str | None:
    """Why it can't give the weight's gradient where that of x isn't asked for, or isn't as exact as eager, or not faster than the library; or None."""
    if library.device_type(x) != "cuda" or weight.dim() != 4:
        return "it convolves images on a GPU"
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
    ours, theirs = expected(x, weight)
    if theirs <= ours:
        return "the library is faster at such sizes"
    if x.dtype == torch.float32 and not precision.runs_tf32(x, weight, "dw", precision.PLAIN_SETTINGS):
        return "eager runs float32"
    return None


def expected(x: Tensor, weight: Tensor) -> tuple[float, float]:
    return choice.weight_gradient(x.shape, weight.shape, x.element_size(), tiling.device_properties(x.device.index))


def size(N: int, C: int, positions: int, dtype: torch.dtype) -> int:
    """Of dz in 16 bits, in elements of that dtype: kernels/grad/packed.cuh's packed_size."""
    return N * C * positions // 2 + 2 * N if dtype == torch.float32 else N * C * positions


def request(segment, x: Tensor, weight: Tensor) -> dict:
    capability, shared, *_ = tiling.device_properties(x.device.index)
    defines = tiling.spatial_defines(weight.shape) | {"VALUE_T": CTYPES[x.dtype], "OUTPUT_T": CTYPES[x.dtype]}
    defines |= {"CAPABILITY": 90 if capability == (9, 0) else 80, "SHARED_LIMIT": shared}
    text = _TEXT.format(name=segment.conv.name or "the convolution")
    return {"name": "weight_gradient", "source": text, "device": "cuda", "defines": defines}


def planned(segment, x: Tensor, weight: Tensor) -> Callable[[Tensor, Tensor], Tensor]:
    """dweight of (dz, x), for such arguments."""
    launch = inline_loader.load(**request(segment, x, weight)).weight.bound()
    shape = tuple(weight.shape)

    def run(dz: Tensor, x: Tensor) -> Tensor:
        dweight = x.new_empty(shape)
        launch(dweight, dz, library.contiguous(x))
        return dweight

    return run


def in_words(x: Tensor, weight: Tensor) -> str:
    ours, theirs = map(round, expected(x, weight))
    return f"the weight's gradient by a kernel of our own where x has none ({ours} µs expected, {theirs} by the library)"
