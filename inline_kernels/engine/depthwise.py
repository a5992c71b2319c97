"""Depthwise convolutions of images on a GPU, forward and both gradients, by kernels of our own in the library's place: kernels/conv/depthwise.cuh
and kernels/grad/depthwise_weight.cuh, channels last. PyTorch's, in planes, take four times what memory needs; cuDNN's, channels last, no longer than
ours in 16 bits where the gradient is the weight's, which is left to it (benchmarks/results/trials/depthwise.json).

`convolution` gives what layouts.py runs as the library's; layouts.py turns operands that lie in planes. Sums are float32, as eager's: operands are
never rounded to TF32 (between.py).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

import inline_loader

from . import library, tiling

MOST_TAPS = 7  # rows, and columns
CHANNELS = 8  # are copied at a time, or four

_TEXT = """// A depthwise convolution, and its gradients
#include "core/scalar.h"
#include "conv/depthwise.cuh"
#include "grad/depthwise_weight.cuh"

using Filter = conv::depthwise::Filter<KERNEL_H, KERNEL_W, STRIDE>;

EXPORT void convolve(value_t* v, const value_t* x, const value_t* weight, NUMBERS) {
  conv::depthwise::convolve<Filter>(v, x, weight, GIVEN, stream);
}
EXPORT void input_gradient(value_t* dx, const value_t* dz, const value_t* weight, NUMBERS) {
  conv::depthwise::input_gradient<Filter>(dx, dz, weight, GIVEN, stream);
}
EXPORT void weight_gradient(value_t* dw, const value_t* dz, const value_t* x, NUMBERS) {
  grad::depthwise::weight_gradient<Filter>(dw, dz, x, GIVEN, stream);
}
"""
_NUMBERS = "N", "C", "H", "W", "rows", "columns", "above", "left"


def suits(conv, weight: Tensor) -> bool:
    """Is it a depthwise convolution that our kernels compute, by its settings and filters?"""
    return _form_obstacle(conv, weight) is None


def _form_obstacle(conv, weight: Tensor) -> str | None:
    if conv.is_nothing or weight.dim() != 4 or weight.shape[1] != 1 or conv.groups != weight.shape[0]:
        return "it is no depthwise convolution of images"
    if conv.groups == 1 or conv.groups % CHANNELS:
        return f"its channels are no multiple of {CHANNELS}"
    if conv.padding_mode != "zeros" or {*conv.dilation} != {1} or [*conv.stride] not in ([1, 1], [2, 2]):
        return "it pads with other values than zeros, is dilated or has another stride than 1 or 2"
    taps = weight.shape[2:]
    if max(taps) > MOST_TAPS or math.prod(taps) == 1:
        return f"its filters have one place, or more than {MOST_TAPS} rows or columns"
    return None


def obstacle(segment, x: Tensor, weight: Tensor) -> str | None:
    """Why our kernels can't compute it; or None."""
    if library.device_type(x) != "cuda":
        return "there is no GPU"
    if reason := _form_obstacle(segment.conv, weight):
        return reason
    if tiling.device_properties(x.device.index).capability < (8, 0):
        return "it copies as GPUs of compute capability 8.0 or later do"
    if x.dtype not in (torch.float32, torch.float16, torch.bfloat16) or weight.dtype != x.dtype:
        return f"there are no kernels for {x.dtype}"
    if not all(type(size) is int for size in (*x.shape, *weight.shape)):
        return "sizes are not known"
    size = _result(segment.conv, x, weight)
    if min(*x.shape, *size) < 1:
        return "there is nothing to compute"
    most = max(math.prod(x.shape[1:]), x.shape[1] * math.prod(size), len(x) * math.prod(x.shape[2:]))
    return None if max(most, len(x) * math.prod(size)) < 2**30 else "there is more than is counted in int"


def in_words(segment, x: Tensor, weight: Tensor) -> str:
    """What convolves on a GPU, for `plan`: our kernels, or the library."""
    reason = obstacle(segment, x, weight)
    if reason is None:
        return "a depthwise convolution of our own"
    is_one = segment.conv.groups == weight.shape[0] > 1 == weight.shape[1]
    return "the library's convolution" + f" ({reason})" * (is_one and library.device_type(x) == "cuda")


def gradients_in_words(segment, x: Tensor, weight: Tensor) -> list[str]:
    if obstacle(segment, x, weight):
        return []
    if _leaves_weight(segment.conv, x, weight):
        return ["x's gradient by a kernel of our own"]
    return ["the gradients of weight and x by kernels of our own"]


def _leaves_weight(conv, x: Tensor, weight: Tensor) -> bool:
    """Is its gradient the library's, which is faster?"""
    return x.element_size() == 2 and all(before == behind for before, behind in library.padding(conv, weight))


def _result(conv, x: Tensor, weight: Tensor) -> list[int]:
    """The extents of v."""
    padded = [extent + sum(each) for extent, each in zip(x.shape[2:], library.padding(conv, weight))]
    return [(each - taps) // step + 1 for each, taps, step in zip(padded, weight.shape[2:], conv.stride)]


def requests(case) -> list[dict]:
    """What is built for it, if it runs."""
    segment, weight = case.segment, case.weight
    if obstacle(segment, case.x, weight):
        return []
    taps = dict(zip(("KERNEL_H", "KERNEL_W"), weight.shape[2:]))
    defines = {"VALUE_T": case.defines["VALUE_T"], **taps, "STRIDE": segment.conv.stride[0]}
    numbers = ", ".join(f"int64_t {name}" for name in _NUMBERS) + ", cudaStream_t stream"
    text = _TEXT.replace("NUMBERS", numbers).replace("GIVEN", f"{{{', '.join(_NUMBERS)}}}")
    return [{"name": "depthwise", "source": text, "device": "cuda", "defines": defines}]


def convolution(case) -> library.Convolution | None:
    """By our kernels, for tensors like the case's; None where they can't."""
    segment, x, weight = case.segment, case.x, case.weight
    (request,) = requests(case) or [None]
    if request is None:
        return None
    kernels, size = inline_loader.load(**request), _result(segment.conv, x, weight)
    numbers = *x.shape, *size, *[before for before, _ in library.padding(segment.conv, weight)]
    like_x, like_v = (
        library.without_memory(x, (*x.shape[:2], *each), x.dtype, torch.channels_last)
        for each in (x.shape[2:], size)
    )
    launches = {
        name: getattr(kernels, name).bound(*numbers, trusting=True, new=1, last=last)
        for name, last in (("convolve", (0, 1)), ("input_gradient", (0, 1)), ("weight_gradient", (1, 2)))
    }
    of_library = library.Convolution.of(segment.conv, weight)
    librarys = of_library.differentiate if _leaves_weight(segment.conv, x, weight) else None
    return of_library._replace(
        run=_convolving(launches["convolve"], like_v),
        differentiate=_differentiating(launches, like_x, weight.shape, librarys),
        around=(),
    )


def _lying(t: Tensor) -> Tensor:
    return library.aligned(t, torch.channels_last)


def _convolving(launch: Callable, like: Tensor) -> Callable[..., Tensor]:
    make = library.making(like)

    def run(x: Tensor, weight: Tensor, *_) -> Tensor:
        v = make()
        launch(v, _lying(x), library.contiguous(weight))
        return v

    return run


def _differentiating(
    launches: dict[str, Callable], like: Tensor, shape: Sequence[int], librarys: Callable | None
) -> Callable:
    """As torch.ops.aten.convolution_backward. librarys: that, where it gives the weight's gradient."""
    of_input, of_weight, make = (
        launches["input_gradient"],
        launches["weight_gradient"],
        library.making(like),
    )

    def run(dz: Tensor, x: Tensor, weight: Tensor, *settings) -> tuple[Tensor | None, Tensor | None, None]:
        dx, dw, wanted, dz = None, None, settings[-1], _lying(dz)
        if wanted[0]:
            of_input(dx := make(), dz, library.contiguous(weight))
        if wanted[1] and librarys:
            dw = librarys(dz, _lying(x), weight, *settings[:-1], (False, True, False))[1]
        elif wanted[1]:
            of_weight(dw := weight.new_empty(shape), dz, _lying(x))
        return dx, dw, None

    return run
