"""A problem as one Python file, as KernelBench has them: `Model`, get_inputs() and get_init_inputs(), and maybe `ModelNew`, its faster
version. To read it is to run it: only what one trusts, or in a process of its own."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
from torch import nn


class ProblemFile(NamedTuple):
    """What stands in a file. get_inputs() gives a list of fresh tensors, get_init_inputs() the constructor's positional arguments."""

    name: str
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


def read(path: Path | str) -> ProblemFile:
    """The problem in the file at `path`, which is executed.

    Raises FileNotFoundError where there is none, ValueError where it lacks a name; what the file itself raises passes.
    """
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(
            f"expected a Python file with Model, get_inputs and get_init_inputs at {path}"
        )
    name = path.stem if path.stem.isidentifier() else f"problem_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules.setdefault(name, module)  # so that inspect finds what it defines
    spec.loader.exec_module(module)
    if missing := [each for each in ("Model", "get_inputs", "get_init_inputs") if not hasattr(module, each)]:
        raise ValueError(
            f"{path}: expected Model, get_inputs and get_init_inputs, found no {', '.join(missing)}"
        )
    new = getattr(module, "ModelNew", None)
    return ProblemFile(path.stem, module.Model, new, module.get_inputs, module.get_init_inputs)
