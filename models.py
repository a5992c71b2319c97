"""Four convolution models: each a reference `Model` in plain PyTorch and its fused, drop-in twin `ModelNew`.

    model = get_model("conv2d_min_add_multiply", device="cuda")
    y = model(*get_inputs("conv2d_min_add_multiply", device="cuda"))

A `ModelNew` has its `Model`'s constructor, parameters, results and gradients. Its attribute `variant` is "auto", or one of
the problem's variants by name; `plan(x)` says in a line which one runs for x and why. `PROBLEMS` lists everything by name;
the classes are here by their names, too: `models.Conv2dMinAddMultiplyNew`.
"""

from __future__ import annotations

import importlib

import torch
from torch import nn

from inline_kernels.problems import Problem

PROBLEMS: dict[str, Problem] = {}


def register(problem: Problem) -> Problem:
    """Adds `problem` under its name, for everything that goes by names. Raises ValueError if the name is taken."""
    if PROBLEMS.get(problem.name, problem) != problem:
        raise ValueError(f"there is a problem named {problem.name} already")
    PROBLEMS[problem.name] = problem
    return problem


_NAMES = (
    "conv2d_min_add_multiply",
    "conv3d_multiply_instancenorm_clamp_multiply_max",
    "conv3d_groupnorm_min_clamp_dropout",
    "conv2d_groupnorm_scale_maxpool_clamp",
)
for _name in _NAMES:
    register(importlib.import_module(f"inline_kernels.problems.{_name}").PROBLEM)


def __getattr__(name: str) -> type[nn.Module]:
    for problem in PROBLEMS.values():
        for each in (problem.Model, problem.ModelNew):
            if each.__name__ == name:
                return each
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def _problem(name: str) -> Problem:
    if name not in PROBLEMS:
        raise KeyError(f"expected one of {', '.join(PROBLEMS)}, got {name!r}")
    return PROBLEMS[name]


def get_model(name: str = _NAMES[0], *, device=None) -> nn.Module:
    """A fresh ModelNew of the problem `name` on `device`. Raises KeyError for an unknown name."""
    return _problem(name).get_model(device=device)


def get_inputs(name: str = _NAMES[0], *, device=None, batch_size: int | None = None) -> list[torch.Tensor]:
    """[x] for the problem `name`. Raises KeyError for an unknown name."""
    return _problem(name).get_inputs(device=device, batch_size=batch_size)


def get_init_inputs(name: str = _NAMES[0]) -> list:
    """The positional constructor arguments of the problem `name`. Raises KeyError for an unknown name."""
    return _problem(name).get_init_inputs()
