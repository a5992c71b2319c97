"""One file per problem: the reference Model, its fused twin ModelNew, and the operators between them and the kernels.

problems/<name>.py, kernels/<name>.cu and .cpp and <name>_fused.cu, notebooks/<number>_<name>.ipynb; models.py has the registry.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from inline_loader import KERNELS


@dataclass(frozen=True)
class Problem:
    """One problem: its number in KernelBench level 2 (0 if it has none), its classes, its sizes and what else to check it in.

    cases: (label, prepare) of situations beside random parameters and a large mean; prepare(model, x) changes a reference model
    and its input in place. timed_cases: those of them that are timed, too. kernels: the folder of its sources.
    """

    name: str
    number: int
    Model: type[nn.Module]
    ModelNew: type[nn.Module]
    init_inputs: tuple
    input_shape: tuple[int, ...]
    cpu_batch_size: int  # a batch that suits a laptop's CPU
    cases: tuple[tuple[str, Callable], ...] = ()
    timed_cases: tuple[tuple[str, Callable], ...] = ()
    kernels: Path = KERNELS

    @property
    def variants(self) -> tuple[str, ...]:
        """The ladder of variants, on a GPU."""
        return self.ModelNew.variants()

    def variants_on(self, device_type: str) -> tuple[str, ...]:
        """Those that run on "cpu" or "cuda"; on a CPU nothing is fused into the convolution."""
        return tuple(name for name in self.variants if device_type != "cpu" or name != "fused")

    def get_init_inputs(self) -> list:
        """The positional constructor arguments."""
        return list(self.init_inputs)

    def get_inputs(self, *, device=None, batch_size: int | None = None) -> list[torch.Tensor]:
        """[x], from torch.rand on the CPU, of `input_shape` or with another batch size, moved to `device`."""
        batch_size = self.input_shape[0] if batch_size is None else batch_size
        return [torch.rand(batch_size, *self.input_shape[1:]).to(device or "cpu")]

    def get_model(self, *, device=None) -> nn.Module:
        """A fresh ModelNew on `device`."""
        return self.ModelNew(*self.get_init_inputs()).to(device or "cpu")

    def bytes(self, x: torch.Tensor, y: torch.Tensor) -> int:
        """The fewest bytes forward moves: x read once, y written once."""
        return x.numel() * x.element_size() + y.numel() * y.element_size()

    def operations(self, model: nn.Module, x: torch.Tensor) -> int:
        """The convolution's floating-point operations for x, a multiply-add counted as two."""
        size = [extent - kernel + 1 for extent, kernel in zip(x.shape[2:], model.conv.weight.shape[2:])]
        return 2 * x.shape[0] * math.prod(size) * model.conv.weight.numel()
