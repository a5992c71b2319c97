"""What torch's own convolution does, and when it serves: layouts, TF32, pieces of a batch, Winograd's way.

Convolutions here have no bias, and but for `Convolution`, which is as the model has it, stride 1 and no padding. x is (N, channels in, …), weight
(C, channels in, …), and the result (N, C, …), with spatial sizes size - kernel + 1.
"""

from __future__ import annotations

import functools
import math
import os
from collections.abc import Callable, Sequence
from operator import or_
from typing import NamedTuple

import torch
from torch import Tensor

from inline_kernels.engine import tiling
from inline_kernels.loader.operators import LOW, check_memory

# The convolution's output per piece of work on a CPU: a quarter of a usual last-level cache.
CPU_PIECE_BYTES = 8 << 20
_guards = torch._C._dynamo.guards
_convolution_backward = torch.ops.aten.convolution_backward.default._op  # without a detour through Python
WINOGRAD_SIDE = 18  # of an image, at least: smaller ones fill no chunk of tiles
DIRECT_CHANNELS = 7  # in, at most, where transforms save nothing


def device_type(tensor: Tensor) -> str:
    """Whose kernels take it: "cpu" or "cuda"; or another type, which has none."""
    return tensor.device.type


def output_size(x: Tensor, weight: Tensor) -> list[int]:
    """The convolution's spatial output size."""
    return [size - kernel + 1 for size, kernel in zip(x.shape[2:], weight.shape[2:])]


# -------------------------------------------------------------------------------------------------------------- layouts


CHANNELS_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}  # by the number of dimensions


def channels_last(x: Tensor) -> torch.memory_format:
    return CHANNELS_LAST[x.dim()]


def is_channels_last(*tensors: Tensor) -> bool:
    """Would the library's convolution of these give a channels-last result?"""
    for t in tensors:  # often called: `any` takes twice as long
        if t.is_contiguous(memory_format=CHANNELS_LAST[t.dim()]) and not t.is_contiguous():
            return True
    return False


def result_format(x: Tensor, weight: Tensor, follows_on_cuda: bool) -> torch.memory_format:
    """Eager's layout of a result with the convolution's number of dimensions: contiguous where its library has no other way.

    follows_on_cuda: do the operations after the convolution keep its layout on a GPU?
    """
    if not is_channels_last(x, weight):
        return torch.contiguous_format
    if device_type(x) == "cuda":
        follows = follows_on_cuda and x.dtype != torch.float64
    else:
        follows = x.dim() == 4 or not _is_slow_in_3d(x, weight)
    return channels_last(x) if follows else torch.contiguous_format


def weight_format(weight: Tensor) -> torch.memory_format:
    """Of its gradient: on a GPU its own, as in eager."""
    own = device_type(weight) == "cuda" and is_channels_last(weight)
    return channels_last(weight) if own else torch.contiguous_format


def _is_slow_in_3d(x: Tensor, weight: Tensor) -> bool:
    """Does a CPU's library leave the convolution to PyTorch's own, which has one layout? It does for single small volumes."""
    ones, zeros = [1] * 3, [0] * 3
    backend = torch._C._select_conv_backend(x, weight, None, ones, zeros, ones, False, zeros, 1)
    return backend == torch._C._ConvBackend.Slow3d


def contiguous(t: Tensor, layout: torch.memory_format = torch.contiguous_format) -> Tensor:
    """t in `layout`. Raises RuntimeError where its memory was freed: the library copies without a look."""
    if t.data_ptr() < LOW:
        check_memory(t)
    return t.contiguous(memory_format=layout)


def aligned(t: Tensor, layout: torch.memory_format = torch.contiguous_format) -> Tensor:
    """t as kernels read it that copy up to 16 bytes at a time: in that layout, and at a multiple of so many."""
    return t.clone(memory_format=layout) if t.data_ptr() % 16 else t.contiguous(memory_format=layout)


def without_memory(
    x: Tensor, shape: Sequence[int], dtype: torch.dtype, layout: torch.memory_format = torch.contiguous_format
) -> Tensor:
    """On x's device, to make others like it."""
    t = torch.empty(shape, dtype=dtype, device=x.device, memory_format=layout)
    t.untyped_storage().resize_(0)
    return t


def making(like: Tensor) -> Callable[[], Tensor]:
    """Gives new tensors like that one on its device, whatever they hold: what torch.empty_like gives, in half of the host's time, by what torch.compile
    calls. That knows no device but the current one."""
    kind = (*like.shape,), like.stride(), like.dtype
    if not like.is_cuda:
        return functools.partial(_guards._empty_strided_cpu, *kind)
    make, current, index = _guards._empty_strided_cuda, torch._C._cuda_getDevice, like.device.index
    return lambda: make(*kind) if current() == index else torch.empty_like(like)


def all_aligned(*tensors: Tensor) -> list[Tensor]:
    """`aligned`, of those that mostly are."""
    if functools.reduce(or_, map(Tensor.data_ptr, tensors)) % 16 or not all(
        map(Tensor.is_contiguous, tensors)
    ):
        return [*map(aligned, tensors)]
    return [*tensors]


# ----------------------------------------------------------------------------------------------------------------- TF32


def allows_tf32() -> bool:
    """May a GPU's convolutions run TF32? By torch's newer setting where there is one: once it is set, reading the older may raise."""
    library = torch.backends.cudnn
    allowed = library.conv.fp32_precision == "tf32" if hasattr(library, "conv") else library.allow_tf32
    return allowed and library.enabled and os.environ.get("NVIDIA_TF32_OVERRIDE") != "0"


def may_run_tf32(x: Tensor) -> bool:
    """May the library's convolution of x, on a GPU, run TF32?"""
    return x.dtype == torch.float32 and allows_tf32() and tiling.capability(x) >= (8, 0)


def eager_runs_tf32(x: Tensor, weight: Tensor) -> bool:
    """Does eager's convolution, on a GPU, run TF32? Observed with cuDNN where it is allowed: always from 64 to 128 channels on,
    but for filters one column wide (benchmarks/results/trials/tf32.json)."""
    return may_run_tf32(x) and suits_tf32(weight)


def suits_tf32(weight: Tensor) -> bool:
    """Does a GPU's library convolve in TF32 with such filters in 2-D, where it may?"""
    C, channels, _, width = weight.shape
    return channels >= 64 and C >= 128 and width > 1


def surely_runs_tf32(x: Tensor, weight: Tensor) -> bool:
    """Does a GPU's library run TF32 in forward and backward, in every layout? For filters of two or three columns and up to three rows
    it did from 14 thousand positions on, up to the 254 thousand that were tried (cuDNN on an H200, the same record). Eager's layout
    stays in float32 here and there with fewer positions, fewer channels and other filters.
    """
    (C, channels, height, width), size = weight.shape, output_size(x, weight)
    small = height <= 3 and 1 < width <= 3
    return may_run_tf32(x) and channels >= 64 and C >= 128 and small and len(x) * math.prod(size) >= 2**16


def milliseconds(run: Callable) -> float:
    """A GPU's own time: its clock begins when the host has launched all, or most."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda._sleep(1 << 20)  # half a millisecond
    begin.record(), run(), end.record(), end.synchronize()
    return begin.elapsed_time(end)


# ------------------------------------------------------------------------------------------------------ the convolution


def padding(conv, weight) -> list[tuple[int, int]]:
    """Before and after each axis."""
    taps = weight.shape[2:]
    if conv.padding == "valid":
        return [(0, 0)] * len(taps)
    if conv.padding == "same":
        around = [d * (k - 1) for d, k in zip(conv.dilation, taps)]
        return [(each // 2, each - each // 2) for each in around]
    return [(each, each) for each in conv.padding]


class Convolution(NamedTuple):
    """The library's, as the model has it. settings: stride, padding, dilation, groups. around: what F.pad adds, in `mode`, where the convolution
    can't. behind: of its gradients, what comes behind the tensors. lies: how the weight's gradient is laid out. is_nothing: v is x itself.
    differentiate: gives the gradients; as `run`, it may be one of our own (depthwise.py)."""

    run: Callable
    settings: tuple
    around: Sequence[int]
    mode: str
    behind: tuple
    lies: torch.memory_format
    is_nothing: bool = False
    differentiate: Callable = _convolution_backward

    @classmethod
    def of(cls, conv, weight: Tensor) -> Convolution:
        nd, around = weight.dim() - 2, padding(conv, weight)
        inside, mode, flat = tuple(before for before, _ in around), conv.padding_mode, []
        if mode != "zeros" or any(before != after for before, after in around):
            inside, flat = (0,) * nd, [each for pair in reversed(around) for each in pair]
        run, mode = torch.conv2d if nd == 2 else torch.conv3d, "constant" if mode == "zeros" else mode
        behind = None, conv.stride, inside, conv.dilation, False, (0,) * nd, conv.groups
        run = _itself if conv.is_nothing else run
        settings = conv.stride, inside, conv.dilation, conv.groups
        return cls(run, settings, flat, mode, behind, weight_format(weight), conv.is_nothing)

    def image(self, x: Tensor) -> Tensor:
        return torch.nn.functional.pad(x, self.around, mode=self.mode)


def _itself(x: Tensor, *_) -> Tensor:
    return x


def convolve(
    how: Convolution,
    x: Tensor,
    weight: Tensor,
    operands: Callable | None = None,
    turned: Tensor | None = None,
) -> Tensor:
    """v, contiguous; or, of the operands that are made of x and the weight, as the library gives it. turned: that of the weight, which is there."""
    x = how.image(x) if how.around else x
    if operands:
        return how.run(*operands(x, weight, turned), None, *how.settings)
    return how.run(x, weight, None, *how.settings).contiguous()


def convolve_backward(
    how: Convolution,
    dz: Tensor,
    x: Tensor,
    weight: Tensor,
    needs: Sequence[bool],
    operands: Callable | None = None,
    turned: Tensor | None = None,
) -> tuple[Tensor | None, Tensor | None]:
    """The gradients of x and weight that are needed; that of weight lies as the weight does, or, of the operands that are made of x and the weight,
    as the library gives it. turned: as `convolve` has it."""
    if how.is_nothing:
        return dz if needs[0] else None, None
    image = x
    if how.around:
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            padded = how.image(x)
        image = padded.detach()
    if operands:
        image, weight = operands(image, weight, turned)
    dx, dw, _ = how.differentiate(dz, image, weight, *how.behind, (*needs, False))
    if needs[0] and how.around:
        (dx,) = torch.autograd.grad(padded, x, dx)
    if needs[1] and not operands:
        dw = dw.contiguous(memory_format=how.lies)
    return dx if needs[0] else None, dw if needs[1] else None


def winograd_suits(terms: int, C: int) -> bool:
    """Is kernels/cpu/winograd.h faster than a CPU's library, and as exact, with 3×3 filters of so many terms a sum, to so many channels? Up to 128
    terms its error is 1.2 times the library's on average, 1.7 at most (benchmarks/NOTES.md)."""
    return 8 <= terms <= 128 and C % 8 == 0
