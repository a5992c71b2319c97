"""A problem: a reference model in plain PyTorch, its faster version, and its sizes; and one in a Python file, as KernelBench has them:
`Model`, get_inputs() and get_init_inputs(), and maybe `ModelNew`. To read a file is to run it: only what one trusts, or in a process of
its own."""

from __future__ import annotations

import copy
import hashlib
import importlib.util
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from inline_kernels.engine import choice
from inline_kernels.engine.variants import fused
from inline_loader import KERNELS

CPU_SHARE = 16  # of a batch that a file gives, on a CPU


@dataclass(frozen=True)
class Problem:
    """One problem: its number in KernelBench level 2 (0 if it has none), its classes, its sizes and what else to check it in.

    cases: (label, prepare) of situations beside random parameters and a large mean; prepare(model, x) changes a reference model
    and its input in place. timed_cases: those of them that are timed, too. kernels: the folder of its sources. draw(*extents, device=…)
    gives a fresh input. file: the one that it was adopted from.
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
    draw: Callable[..., torch.Tensor] = torch.rand
    file: Path | None = None

    @property
    def variants(self) -> tuple[str, ...]:
        """The ladder of variants, on a GPU."""
        whole = self.name in choice.known()
        return tuple(name for name in self.ModelNew.variants() if whole or name != "fused")

    def variants_on(self, device_type: str) -> tuple[str, ...]:
        """Those that run on "cpu" or "cuda"; on a CPU nothing is fused into the convolution."""
        return tuple(name for name in self.variants if device_type != "cpu" or name != "fused")

    def get_init_inputs(self) -> list:
        """The positional constructor arguments."""
        return list(self.init_inputs)

    def get_inputs(self, *, device=None, batch_size: int | None = None) -> list[torch.Tensor]:
        """[x], drawn on the CPU, of `input_shape` or with another batch size, moved to `device`."""
        batch_size = self.input_shape[0] if batch_size is None else batch_size
        return [self.draw(batch_size, *self.input_shape[1:]).to(device or "cpu")]

    def get_model(self, *, device=None) -> nn.Module:
        """A fresh ModelNew on `device`."""
        return self.ModelNew(*self.get_init_inputs()).to(device or "cpu")

    def bytes(self, x: torch.Tensor, y: torch.Tensor) -> int:
        """The fewest bytes forward moves: x read once, y written once."""
        return x.numel() * x.element_size() + y.numel() * y.element_size()

    def operations(self, model: nn.Module, x: torch.Tensor) -> int:
        """The convolutions' and products' floating-point operations of a reference model for x, a multiply-add counted as two: of a call."""
        with torch.random.fork_rng(), torch.no_grad(), FlopCounterMode(display=False) as counter:
            copy.deepcopy(model)(x)
        return counter.get_total_flops()


class ProblemFile(NamedTuple):
    """What stands in a file. get_inputs() gives a list of fresh tensors, get_init_inputs() the constructor's positional arguments."""

    path: Path
    Model: type[nn.Module]
    ModelNew: type[nn.Module] | None
    get_inputs: Callable[[], list]
    get_init_inputs: Callable[[], list]

    def pair(self, seed: int = 0) -> tuple[nn.Module, nn.Module]:
        """A Model, and a ModelNew of the same parameters; without a ModelNew, `fuse(model)`."""
        torch.manual_seed(seed)
        model = self.Model(*self.get_init_inputs())
        if self.ModelNew is None:
            from inline_kernels import fuse

            return model, fuse(model)
        torch.manual_seed(seed)
        return model, self.ModelNew(*self.get_init_inputs())

    def x(self) -> torch.Tensor:
        """A fresh input. Raises ValueError where get_inputs gives another thing than a list of one tensor."""
        inputs = self.get_inputs()
        if not isinstance(inputs, (list, tuple)):
            kind = type(inputs).__name__
            raise ValueError(f"{self.path}: expected get_inputs to give one tensor in a list, got a {kind}")
        if len(inputs) != 1 or not isinstance(inputs[0], torch.Tensor):
            kinds = ", ".join(type(each).__name__ for each in inputs)
            raise ValueError(f"{self.path}: expected get_inputs to give one tensor, got {kinds or 'nothing'}")
        return inputs[0]

    def draw(self, *size: int, device=None) -> torch.Tensor:
        """A fresh input, or as much of one as `size` says."""
        x = self.x()
        if x.dim() != len(size) or any(part > whole for part, whole in zip(size, x.shape)):
            raise ValueError(f"{self.path}: expected at most the {tuple(x.shape)} of get_inputs, got {size}")
        return x[tuple(map(slice, size))].contiguous().to(device or "cpu")

    def problem(self) -> Problem:
        """The same with `fused(Model)`, under the file's name. Raises ValueError where the file's names are other things than said."""
        if not (isinstance(self.Model, type) and issubclass(self.Model, nn.Module)):
            raise ValueError(f"{self.path}: expected Model to be a class of modules, got {self.Model!r}")
        given = self.get_init_inputs()
        if not isinstance(given, (list, tuple)):
            kind = type(given).__name__
            raise ValueError(
                f"{self.path}: expected get_init_inputs to give a list of the constructor's arguments, got a {kind}"
            )
        new, x = fused(self.Model), self.x()
        setattr(sys.modules[new.__module__], new.__name__, new)  # where pickle looks for it
        number = int(re.match(r"\d*", self.name)[0] or 0)
        sizes = tuple(x.shape), max(1, len(x) // CPU_SHARE)
        return Problem(
            self.name, number, self.Model, new, tuple(given), *sizes, draw=self.draw, file=self.path
        )

    @property
    def name(self) -> str:
        return self.path.stem


def read(path: Path | str) -> ProblemFile:
    """The problem in the file at `path`, which is executed.

    Raises FileNotFoundError where there is none, ValueError where it lacks a name; what the file itself raises passes.
    """
    path = Path(path).absolute()
    if not path.is_file():
        raise FileNotFoundError(
            f"expected a Python file with Model, get_inputs and get_init_inputs at {path}"
        )
    # No other module has this name: inspect and pickle find by it what the file defines.
    name = f"{re.sub('[^a-zA-Z0-9]', '_', path.stem)}_{hashlib.sha256(bytes(path)).hexdigest()[:8]}"
    spec = importlib.util.spec_from_file_location(name, path)
    sys.modules[name] = module = importlib.util.module_from_spec(spec)
    beside = str(path.parent)  # as for a script: the file may import what stands there
    sys.path.insert(0, beside)
    try:
        spec.loader.exec_module(module)
    finally:
        sys.path.remove(beside)
    if missing := [each for each in ("Model", "get_inputs", "get_init_inputs") if not hasattr(module, each)]:
        raise ValueError(
            f"{path}: expected Model, get_inputs and get_init_inputs, found no {', '.join(missing)}"
        )
    new = getattr(module, "ModelNew", None)
    return ProblemFile(path, module.Model, new, module.get_inputs, module.get_init_inputs)
