"""By what random numbers are drawn: what a segment's operator takes behind its tensors."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from . import library

_GOLDEN = 0x4F1BBCDCBFA53E0B  # 2⁶³ by the golden ratio: modulo 2⁶³ its multiples stay as far apart as can be


def drawn(x: Tensor, wanted: bool, watched: bool) -> tuple[Tensor, int]:
    """By what x's kernels draw random numbers, where those are `wanted`: a seed, or, where that has no elements, a number. On a GPU it
    is the number, a function of the state of PyTorch's generator, which lies on the host: nothing is launched. That state moves on, and
    whoever restores it (fork_rng, activation checkpointing) gets the same again. What may run more often than it is called, a graph
    under capture or what something watches, draws a seed on the device at each run."""
    if library.device_type(x) == "cuda" and not watched and not torch.cuda.is_current_stream_capturing():
        device = x.device
        generator = torch.cuda.default_generators[device.index]
        return _no_seed(device), _number(generator) if wanted else 0
    if wanted and torch.compiler.is_compiling():  # inductor knows no larger bounds on a GPU
        return torch.randint(2**31 - 1, (2,), dtype=torch.int32, device=x.device).view(torch.int64), 0
    seed = x.new_empty(int(wanted), dtype=torch.int64)
    return seed.random_() if wanted else seed, 0


def _number(generator: torch.Generator) -> int:
    """One of 63 bits. Seeds less than 2³⁰ apart have none in common within 2³² draws, and none is the seed, by which PyTorch's own
    random numbers are drawn."""
    offset = generator.get_offset()
    generator.set_offset(offset + 4)  # the least that it takes
    return (generator.initial_seed() + (offset // 4 + 1) * _GOLDEN) % 2**63


@functools.cache
@torch.inference_mode(False)  # in which it could not be saved for backward
def _no_seed(device: torch.device) -> Tensor:
    return torch.empty(0, dtype=torch.int64, device=device)
