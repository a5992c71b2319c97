"""What the problems' operators share: which kernels an input asks for, and parameters by channel.

Parameters by channel (biases, affine, multiplier, scale) hold C elements, in the dtype of the result; the problems' own (bias,
multiplier, scale) may hold one element for all channels. Kernels read them in the dtype in which sums are accumulated.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

import torch
from torch import Tensor

import inline_loader
import library
from loader_operators import Operator, declare

DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
_CTYPES = {
    torch.float32: "float",
    torch.float64: "double",
    torch.float16: "half_t",
    torch.bfloat16: "bfloat16_t",
}


def load(name: str, x: Tensor, out_dtype: torch.dtype, folder=None, **defines) -> inline_loader.Operators:
    """The kernels of kernels/<name>.* (or of `folder`) for x's device and dtype, results in `out_dtype` (kernels/scalar.h)."""
    defines = {"VALUE_T": _CTYPES[x.dtype], "OUTPUT_T": _CTYPES[out_dtype], **defines}
    return inline_loader.load(name, folder=folder, device=library.device_type(x), defines=defines)


def accumulate_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def index_type(count: int) -> tuple[str, torch.dtype]:
    """The smallest index type for numbers below `count`: its C type and its dtype."""
    return ("uint8_t", torch.uint8) if count <= 256 else ("int32_t", torch.int32)


@functools.lru_cache(None)
def rounded(value: float, dtype: torch.dtype) -> float:
    """A bound as eager compares with it: a tensor of the dtype at hand."""
    return torch.tensor(value, dtype=dtype, device="cpu").item()


def no_statistics(x: Tensor) -> Tensor | None:
    """In the place of statistics that nobody keeps: a tensor without elements, where the kernels need no room for them."""
    return x.new_empty(0, dtype=accumulate_dtype(x.dtype)) if library.device_type(x) == "cpu" else None


def group_norm_raises(x: Tensor, weight: Tensor, norm: torch.nn.GroupNorm, size: list[int]) -> bool:
    """Does `norm` raise an error for the convolution of x, of spatial size `size`?"""
    (C, *_), groups = weight.shape, norm.num_groups
    if groups < 1 or C % groups:
        return True
    return x.dim() == weight.dim() and x.shape[0] * C // groups * math.prod(size) == 1


# ------------------------------------------------------------------------------------------------- parameters by channel


def are_ready(x: Tensor, weight: Tensor, *parameters: Tensor) -> bool:
    """Are parameters by channel as the kernels read them?"""
    C, dtype = weight.shape[0], accumulate_dtype(x.dtype)
    return all(p.numel() == C and p.dtype == dtype and p.is_contiguous() for p in parameters)


def by_channel(x: Tensor, weight: Tensor, names: tuple[str, ...], *parameters: Tensor) -> tuple[Tensor, ...]:
    """Parameters by channel as the kernels read them: contiguous, an element for each channel, of the dtype of sums.

    Raises RuntimeError where one has another number of elements; one whose name ends in "?" may have 1 for all channels.
    """
    C, dtype = weight.shape[0], accumulate_dtype(x.dtype)
    if are_ready(x, weight, *parameters):
        return parameters
    for name, parameter in zip(names, parameters):
        if parameter.numel() != C and not (name.endswith("?") and parameter.numel() == 1):
            elements = f"{C} elements, one per channel" + (", or 1" if name.endswith("?") else "")
            raise RuntimeError(
                f"expected {name.rstrip('?')} of {elements}, got the shape {list(parameter.shape)}"
            )
    return tuple([p.to(dtype).reshape(-1).expand(C).contiguous() for p in parameters])


def gradients_of(x: Tensor, *parameters: Tensor) -> list[Tensor]:
    """Where the kernels write the gradients of parameters by channel: in the dtype of sums, in the shape of each."""
    layout = dict(dtype=accumulate_dtype(x.dtype), memory_format=torch.contiguous_format)
    return [torch.empty_like(p, **layout) for p in parameters]


def as_parameters(gradients: list[Tensor], *parameters: Tensor) -> list[Tensor]:
    """The gradients in the dtypes of the parameters."""
    return [g if g.dtype == p.dtype else g.to(p.dtype) for g, p in zip(gradients, parameters)]


# ----------------------------------------------------------------------------------------------------------------- fused


def declare_fused(epilogue: Operator, forward: Callable, plan: Callable) -> Operator:
    """The operator <name>_fused: forward(a), which computes what `epilogue` does. Backward runs that once more, for what it saves."""

    def backward(dy: Tensor, a: tuple, *, needs: list[bool], plan: object) -> list[Tensor | None]:
        # Forward chose the dtypes; a region of autocast around backward may not.
        with torch.autocast(dy.device.type, enabled=False):
            _, *saved = epilogue.save(*a)
            return epilogue.backward(dy, a, saved, needs)

    def shapes(a: tuple) -> Tensor:
        return epilogue.shapes(*a, saving=False)[0]

    name, gradients = f"{epilogue.name}_fused", lambda a: epilogue.gradients(*a)
    return declare(name, forward, shapes=shapes, backward=backward, gradients=gradients, plan=plan)
