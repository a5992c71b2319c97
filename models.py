"""Four convolution models: each a reference `Model` in plain PyTorch and its fused, drop-in twin `ModelNew`, by the engine.

    model = get_model("conv2d_min_add_multiply", device="cuda")
    y = model(*get_inputs("conv2d_min_add_multiply", device="cuda"))

A `ModelNew` has its `Model`'s constructor, parameters, results and gradients. Its attribute `variant` is "auto", or one of
the problem's variants by name; `plan(x)` says in a line which one runs for x and why. `PROBLEMS` lists everything by name.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

from inline_kernels import problem as problems
from inline_kernels.engine import choice
from inline_kernels.engine.variants import fused
from inline_kernels.problem import Problem

# ------------------------------------------------------------------------------------------------------------ the models


class Conv2dMinAddMultiply(nn.Module):
    """y = (min(conv(x), constant_value) + bias) * scaling_factor.

    x (N, in_channels, H, W) gives y (N, out_channels, H', W'), where H' = H - kernel height + 1 and W' likewise.
    """

    def __init__(self, in_channels, out_channels, kernel_size, constant_value, bias_shape, scaling_factor):
        super().__init__()
        self.conv = nn.Conv2d(in_channels, out_channels, kernel_size)
        self.constant_value = constant_value
        self.bias = nn.Parameter(torch.randn(bias_shape))
        self.scaling_factor = scaling_factor

    def forward(self, x):
        x = self.conv(x)
        x = torch.min(x, torch.tensor(self.constant_value, dtype=x.dtype, device=x.device))
        x = x + self.bias
        return x * self.scaling_factor


Conv2dMinAddMultiplyNew = fused(Conv2dMinAddMultiply)


class Conv3dMultiplyInstanceNormClampMultiplyMax(nn.Module):
    """y = max over channels of multiplier * clamp(instance_norm(conv(x) * multiplier), clamp_min, clamp_max).

    x (N, in_channels, D, H, W) gives y (N, D', H', W').
    """

    def __init__(self, in_channels, out_channels, kernel_size, multiplier_shape, clamp_min, clamp_max):
        super().__init__()
        self.conv = nn.Conv3d(in_channels, out_channels, kernel_size)
        self.multiplier = nn.Parameter(torch.randn(multiplier_shape))
        self.instance_norm = nn.InstanceNorm3d(out_channels)
        self.clamp_min = clamp_min
        self.clamp_max = clamp_max

    def forward(self, x):
        x = self.conv(x)
        x = x * self.multiplier
        x = self.instance_norm(x)
        x = torch.clamp(x, self.clamp_min, self.clamp_max)
        x = x * self.multiplier
        return torch.max(x, dim=1)[0]


Conv3dMultiplyInstanceNormClampMultiplyMaxNew = fused(Conv3dMultiplyInstanceNormClampMultiplyMax)


class Conv3dGroupNormMinClampDropout(nn.Module):
    """y = dropout(clamp(min(group_norm(conv(x)), min_value), min_value, max_value), dropout_p).

    x (N, in_channels, D, H, W) gives y (N, out_channels, D', H', W').
    """

    def __init__(self, in_channels, out_channels, kernel_size, groups, min_value, max_value, dropout_p):
        super().__init__()
        self.conv = nn.Conv3d(in_channels, out_channels, kernel_size)
        self.norm = nn.GroupNorm(groups, out_channels)
        self.dropout = nn.Dropout(dropout_p)
        self.min_value = min_value
        self.max_value = max_value

    def forward(self, x):
        x = self.conv(x)
        x = self.norm(x)
        x = torch.min(x, torch.tensor(self.min_value, dtype=x.dtype, device=x.device))
        x = torch.clamp(x, min=self.min_value, max=self.max_value)
        return self.dropout(x)


Conv3dGroupNormMinClampDropoutNew = fused(Conv3dGroupNormMinClampDropout)

Conv3dGroupNormMinClampDropoutNew.__doc__ += """
    Its mask is not nn.Dropout's. It is a function of an element's place and of the state of PyTorch's generator alone: the same after the
    same torch.manual_seed, in every dtype, with every variant, with gradients or without. CUDA graphs and compiled code, which draw on the
    device, follow the seed to other masks.
    """


class Conv2dGroupNormScaleMaxPoolClamp(nn.Module):
    """y = clamp(max_pool2d(group_norm(conv(x)) * scale, maxpool_kernel_size), clamp_min, clamp_max).

    x (N, in_channels, H, W) gives y (N, out_channels, H' // pool height, W' // pool width).
    """

    def __init__(
        self, in_channels, out_channels, kernel_size, num_groups, scale_shape, maxpool_kernel_size, clamp_min, clamp_max
    ):  # fmt: skip
        super().__init__()
        self.conv = nn.Conv2d(in_channels, out_channels, kernel_size)
        self.group_norm = nn.GroupNorm(num_groups, out_channels)
        self.scale = nn.Parameter(torch.ones(scale_shape))
        self.maxpool = nn.MaxPool2d(kernel_size=maxpool_kernel_size)
        self.clamp_min = clamp_min
        self.clamp_max = clamp_max

    def forward(self, x):
        x = self.conv(x)
        x = self.group_norm(x)
        x = x * self.scale
        x = self.maxpool(x)
        return torch.clamp(x, self.clamp_min, self.clamp_max)


Conv2dGroupNormScaleMaxPoolClampNew = fused(Conv2dGroupNormScaleMaxPoolClamp)


# ---------------------------------------------------------------------------------------------------------- the registry


PROBLEMS: dict[str, Problem] = {}


def register(problem: Problem) -> Problem:
    """Adds `problem` under its name, for everything that goes by names. Raises ValueError if the name is taken."""
    if PROBLEMS.get(problem.name, problem) != problem:
        raise ValueError(f"there is a problem named {problem.name} already")
    PROBLEMS[problem.name] = problem
    choice.add(problem.kernels)
    return problem


def adopt(path: Path | str) -> Problem:
    """Registers the problem of a KernelBench-style Python file, under the file's name. The file is executed: only what one trusts.

    It must hold `Model`, get_inputs(), which gives one tensor, and get_init_inputs(); `ModelNew` becomes `fused(Model)` (for one in the
    file there is `compare.py --candidate`). From then on it is checked, compared and exported by name as the others are. A file that
    changed may be adopted again. Raises FileNotFoundError where there is none, ValueError where something is missing, other than said,
    or its name is another problem's; what the file itself raises passes.
    """
    found = problems.read(path).problem()
    if found.name in PROBLEMS and PROBLEMS[found.name].file == found.file:
        del PROBLEMS[found.name]
    return register(found)


def __getattr__(name: str) -> type[nn.Module]:
    """The classes of a problem from outside, by their names."""
    for problem in PROBLEMS.values():
        for each in (problem.Model, problem.ModelNew):
            if each.__name__ == name:
                return each
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def _every_value_ties(model, x):
    """Normalised values of exactly min_value, the one situation with gradients: all slopes are zero."""
    with torch.no_grad():
        model.norm.weight.zero_(), model.norm.bias.fill_(model.min_value)


def _ties(model, x):
    """In the first half of the groups because the convolution gives zero everywhere, in the rest because the slope is zero."""
    model.min_value = 0.25  # not 0, so that dropped elements can be told from kept ones
    half = (model.norm.num_groups + 1) // 2 * (model.norm.num_channels // model.norm.num_groups)
    with torch.no_grad():
        model.conv.weight[:half], model.conv.bias[:half], model.norm.weight[half:] = 0, 0, 0
        model.norm.bias.fill_(model.min_value)


register(
    Problem(
        "conv2d_min_add_multiply",
        number=31,
        Model=Conv2dMinAddMultiply,
        ModelNew=Conv2dMinAddMultiplyNew,
        init_inputs=(64, 128, 3, 0.5, (128, 1, 1), 2.0),
        input_shape=(128, 64, 128, 128),
        cpu_batch_size=2,
    )
)
register(
    Problem(
        "conv3d_multiply_instancenorm_clamp_multiply_max",
        number=79,
        Model=Conv3dMultiplyInstanceNormClampMultiplyMax,
        ModelNew=Conv3dMultiplyInstanceNormClampMultiplyMaxNew,
        init_inputs=(3, 16, 3, (16, 1, 1, 1), -1.0, 1.0),
        input_shape=(128, 3, 16, 32, 32),
        cpu_batch_size=8,
    )
)
register(
    Problem(
        "conv3d_groupnorm_min_clamp_dropout",
        number=83,
        Model=Conv3dGroupNormMinClampDropout,
        ModelNew=Conv3dGroupNormMinClampDropoutNew,
        init_inputs=(3, 16, 3, 8, 0.0, 1.0, 0.2),
        input_shape=(128, 3, 16, 64, 64),
        cpu_batch_size=2,
        cases=(
            ("ties, training", _ties),
            ("ties, eval", lambda model, x: _ties(model.eval(), x)),
            ("no ties, eval", lambda model, x: setattr(model.eval(), "min_value", 0.25)),
        ),
        timed_cases=(("all ties", _every_value_ties),),
    )
)
register(
    Problem(
        "conv2d_groupnorm_scale_maxpool_clamp",
        number=85,
        Model=Conv2dGroupNormScaleMaxPoolClamp,
        ModelNew=Conv2dGroupNormScaleMaxPoolClampNew,
        init_inputs=(8, 64, 3, 16, (64, 1, 1), 4, 0.0, 1.0),
        input_shape=(128, 8, 128, 128),
        cpu_batch_size=8,
    )
)
FIRST = next(iter(PROBLEMS))


def _problem(name: str) -> Problem:
    if name not in PROBLEMS:
        raise KeyError(f"expected one of {', '.join(PROBLEMS)}, got {name!r}")
    return PROBLEMS[name]


def get_model(name: str = FIRST, *, device=None) -> nn.Module:
    """A fresh ModelNew of the problem `name` on `device`. Raises KeyError for an unknown name."""
    return _problem(name).get_model(device=device)


def get_inputs(name: str = FIRST, *, device=None, batch_size: int | None = None) -> list[torch.Tensor]:
    """[x] for the problem `name`. Raises KeyError for an unknown name."""
    return _problem(name).get_inputs(device=device, batch_size=batch_size)


def get_init_inputs(name: str = FIRST) -> list:
    """The positional constructor arguments of the problem `name`. Raises KeyError for an unknown name."""
    return _problem(name).get_init_inputs()
