"""In which precision does eager's convolution run on a GPU? Which kernel its library takes hangs on sizes, layout, settings and version; no rule says
it. So the library is asked: it convolves operands of the very sizes, layout and settings once, and its result is held to float64's.

An answer is kept for the life of the process. Asking disturbs nobody: operands come from a generator of their own, no setting is changed,
and no result is seen. It costs memory for an input and a result, once.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from inline_kernels.loader.operators import PLAIN, is_watched

from . import library


class Settings(NamedTuple):
    """Of a convolution, an entry an axis; None: 1, and no padding."""

    stride: Sequence[int] | None = None
    padding: Sequence[int] | None = None
    dilation: Sequence[int] | None = None
    groups: int = 1

    def written_out(self, axes: int) -> Settings:
        """The same without None."""
        ones, zeros = (1,) * axes, (0,) * axes
        of_axes = self.stride or ones, self.padding or zeros, self.dilation or ones
        return Settings(*map(tuple, of_axes), self.groups)


PLAIN_SETTINGS = Settings()
_LIMIT = 1e-4  # of the error over the result, both as norms: TF32's is 3e-4, whatever the sizes; float32's below 1e-5
_answers: dict[tuple, bool] = {}
_lock = threading.Lock()


def runs_tf32(
    x: Tensor,
    weight: Tensor,
    of: str = "forward",
    settings: Settings = PLAIN_SETTINGS,
    channels_last: bool | None = None,
) -> bool:
    """Does eager run TF32 in convolving x, or in the gradient "dx" or "dw"? False, too, where it can't be asked and hasn't been: while a graph is
    captured or code is traced, or where there is no memory for it. channels_last: are they so in eager? None: as they are."""
    if x.device.type != "cuda" or not library.may_run_tf32(x):
        return False
    if not all(type(size) is int for size in x.shape):
        return False
    cudnn = torch.backends.cudnn
    if channels_last is None:
        channels_last = library.is_channels_last(x, weight)
    flags = (
        cudnn.version(),
        cudnn.benchmark,
        cudnn.deterministic,
        torch.are_deterministic_algorithms_enabled(),
    )
    settings = settings.written_out(len(x.shape) - 2)
    key = x.device, tuple(x.shape), tuple(weight.shape), channels_last, of, *settings, *flags
    with _lock:
        if key not in _answers:
            if not _may_ask(x):
                return False
            if (found := _asked(x, weight, of, settings, channels_last)) is None:
                return False
            _answers[key] = found
        return _answers[key]


def _may_ask(x: Tensor) -> bool:
    plain = type(x) in PLAIN or not isinstance(x, Tensor)  # a tensor, or what stands for one
    return plain and not is_watched() and not torch.cuda.is_current_stream_capturing()


def _asked(x: Tensor, weight: Tensor, of: str, settings: Settings, channels_last: bool) -> bool | None:
    """None where there is no memory for it. Only the first sample has values: a kernel isn't chosen by them."""
    device, zeros = x.device, [0] * (len(x.shape) - 2)
    stride, padding, dilation, groups = settings.written_out(len(zeros))
    generator = torch.Generator(device).manual_seed(0)

    def convolved(x: Tensor, weight: Tensor) -> Tensor:
        return torch.convolution(x, weight, None, stride, padding, dilation, False, zeros, groups)

    def gradient(dv: Tensor, x: Tensor, weight: Tensor) -> Tensor:
        mask = [of == "dx", of == "dw", False]
        found = torch.ops.aten.convolution_backward(
            dv, x, weight, None, stride, padding, dilation, False, zeros, groups, mask
        )
        return found[mask.index(True)]

    def operand(shape: Sequence[int], samples: int) -> Tensor:
        t = torch.zeros(shape, dtype=torch.float32, device=device)
        t[:samples].normal_(generator=generator)
        return t.contiguous(memory_format=library.channels_last(t)) if channels_last else t

    try:
        with torch.no_grad(), torch.autocast("cuda", enabled=False):
            operands = [operand(x.shape, 1), operand(weight.shape, weight.shape[0])]
            run = convolved
            if of != "forward":
                on_meta = [torch.empty(t.shape, device="meta") for t in operands]
                operands.insert(0, operand(convolved(*on_meta).shape, 1))
                run = gradient
            exact = run(*[t.double() if t is operands[-1] else t[:1].double() for t in operands])
            found = run(*operands)
            found = found if of == "dw" else found[:1]
            return bool((found - exact).norm() > _LIMIT * exact.norm())
    except RuntimeError:
        return None
