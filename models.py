"""Four convolution models: each a reference `Model` in plain PyTorch and its fused, drop-in twin `ModelNew`.

    model = get_model("conv2d_min_add_multiply", device="cuda")
    y = model(*get_inputs("conv2d_min_add_multiply", device="cuda"))

A `ModelNew` has its `Model`'s constructor, parameters, results and gradients. Its attribute `variant` is "auto", or one of
the problem's variants by name; `plan(x)` says in a line which one runs for x and why. `PROBLEMS` lists everything by name.
"""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import nn

import fused
import operators

# ----------------------------------------------------------------------------------------------- the reference models


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


class Conv2dGroupNormScaleMaxPoolClamp(nn.Module):
    """y = clamp(max_pool2d(group_norm(conv(x)) * scale, maxpool_kernel_size), clamp_min, clamp_max).

    x (N, in_channels, H, W) gives y (N, out_channels, H' // pool height, W' // pool width).
    """

    def __init__(
        self,
        in_channels,
        out_channels,
        kernel_size,
        num_groups,
        scale_shape,
        maxpool_kernel_size,
        clamp_min,
        clamp_max,
    ):
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


# --------------------------------------------------------------------------------------------------- the fused models


class Plan(NamedTuple):
    """What runs for an input: the variant's name, and the reason."""

    variant: str
    reason: str

    def __str__(self):
        return f"{self.variant}: {self.reason}"


class Fused:
    """What the four `ModelNew` share: the choice of a variant. A mixin in front of the reference model.

    Where eager would raise an error, eager runs, so that the error is the right one. Where only eager can compute the
    result (a hook on a submodule, a stride, …) "auto" runs it and `plan` says so; any other variant raises RuntimeError.
    """

    variants: tuple[str, ...] = ("eager", "epilogue", "fused")
    variant = "auto"

    @classmethod
    def from_eager(cls, model: nn.Module) -> nn.Module:
        """The fused twin of `model`: the same parameters and submodules (shared, not copied), mode and constants.

        Raises TypeError if `model` is not this class's reference model.
        """
        reference = cls.__mro__[2]
        if not isinstance(model, reference):
            raise TypeError(f"expected a {reference.__name__}, got a {type(model).__name__}")
        twin = cls.__new__(cls)
        twin.__dict__.update(
            {
                key: copy.copy(value) if isinstance(value, dict) else value
                for key, value in vars(model).items()
            }
        )
        return twin

    def plan(self, x: torch.Tensor) -> Plan:
        """The variant that forward(x) runs, and why.

        Raises ValueError if `self.variant` is no variant's name, RuntimeError if it can't run for x.
        """
        return Plan(*self._choose(x))

    def forward(self, x):
        variant = self._choose(x)[0]
        return super().forward(x) if variant == "eager" else self._run(x, variant)

    def _choose(self, x: torch.Tensor) -> tuple[str, str]:
        if self.variant != "auto" and self.variant not in self.variants:
            raise ValueError(
                f"expected variant to be 'auto' or one of {', '.join(self.variants)}, got {self.variant!r}"
            )
        if self.variant == "eager":
            return "eager", "asked for"
        obstacle = self._altered()  # first, because reading a parametrized weight may change it
        if obstacle is None:
            if self._eager_raises(x):
                return "eager", "the input does not fit the model, and eager's error says why"
            obstacle = self._obstacle(x)
        if obstacle is not None:
            if self.variant == "auto":
                return "eager", obstacle
            raise RuntimeError(f"variant {self.variant!r} can't run: {obstacle}")
        if self.variant == "epilogue":
            return "epilogue", "asked for"
        if self.variant == "folded":
            return (
                "folded",
                "asked for; for an input that can reach NaN, and in backward, it computes as epilogue",
            )
        if x.device.type == "cpu":
            name = "epilogue" if self.variant == "auto" else "fused"
            return (
                name,
                "on the CPU epilogue and fused are one: a convolution, Winograd's or the library's, and our tail, in cache",
            )
        obstacle = self._fused_obstacle(x)
        if self.variant == "fused":
            if obstacle is not None:
                raise RuntimeError(f"variant 'fused' can't run: {obstacle}")
            return "fused", "asked for"
        if obstacle is None and self.training and operators.keeps(x, *self.parameters()):
            obstacle = "in training a backward pass will follow, which needs the convolution's output"
        return (
            ("fused", "the convolution runs inside our kernels")
            if obstacle is None
            else ("epilogue", obstacle)
        )

    def _fused_obstacle(self, x: torch.Tensor) -> str | None:
        """Why the fused kernels can't run on the GPU, or None."""
        raise NotImplementedError

    def _eager_raises(self, x: torch.Tensor) -> bool:
        """Does the reference raise an error for x?"""
        weight = self.conv.weight
        if not isinstance(x, torch.Tensor) or _convolved_dtype(x) != _convolved_dtype(weight):
            return True
        if x.dim() not in (weight.dim(), weight.dim() - 1):
            return True
        if x.shape[-weight.dim() + 1] != weight.shape[1] or x.device != weight.device:
            return True
        size = [extent - kernel + 1 for extent, kernel in zip(x.shape[-weight.dim() + 2 :], weight.shape[2:])]
        return min(size) < 1 or self._tail_raises(x, size)

    def _tail_raises(self, x: torch.Tensor, size: list[int]) -> bool:
        """Does what follows the convolution, of spatial size `size`, raise an error?"""
        return False

    def _altered(self) -> str | None:
        """What somebody has added to a submodule, which must therefore run itself; or None."""
        modules = self._modules.values()
        if nn.modules.module._has_any_global_hook() or any(_has_hooks(module) for module in modules):
            return "a submodule has hooks"
        if any(nn.utils.parametrize.is_parametrized(module) for module in modules):
            return "a submodule is parametrized"
        return None

    def _obstacle(self, x: torch.Tensor) -> str | None:
        """Why only eager can run, or None."""
        conv = self.conv
        if x.device.type not in ("cpu", "cuda"):
            return "there are kernels for the CPU and for CUDA only"
        if hasattr(x, "device_mesh"):
            return "a distributed tensor needs operators that say how they shard"
        if torch._C._are_functorch_transforms_active():
            return "a transformation of torch.func needs operators that it can look into"
        if x.dtype not in operators.DTYPES:
            return "there are kernels for float32, float64, float16 and bfloat16 only"
        parameters = conv.weight, conv.bias, *self._tail_parameters()
        if any(p is None for p in parameters):
            return "the convolution or the normalisation has no bias, or no affine"
        if not torch.is_autocast_enabled(x.device.type) and any(p.dtype != x.dtype for p in parameters):
            return "the input and the parameters have different dtypes"
        if any(p.dtype not in operators.DTYPES for p in parameters):
            return "a parameter is not floating point"
        if x.dim() != conv.weight.dim():
            return "the input has no batch dimension"
        if x.numel() == 0:
            return "the input is empty"
        plain = all(step == 1 for step in (*conv.stride, *conv.dilation, conv.groups))
        if not plain or conv.padding == "same" or any(conv.padding):
            return "the convolution has a stride, padding, dilation or groups"
        return self._tail_obstacle()

    def _tail_parameters(self) -> tuple[torch.Tensor | None, ...]:
        """The parameters that the tail reads."""
        raise NotImplementedError

    def _tail_obstacle(self) -> str | None:
        return None

    def _run(self, x: torch.Tensor, variant: str) -> torch.Tensor:
        raise NotImplementedError


def _has_hooks(module: nn.Module) -> bool:
    tables = (
        module._forward_hooks,
        module._forward_pre_hooks,
        module._backward_hooks,
        module._backward_pre_hooks,
    )
    return any(len(table) > 0 for table in tables)


def _convolved_dtype(tensor: torch.Tensor) -> torch.dtype:
    """The dtype in which the convolution sees `tensor`: autocast changes that of floating-point tensors but float64."""
    device = tensor.device.type
    casts = (
        device in ("cpu", "cuda")
        and torch.is_autocast_enabled(device)
        and tensor.is_floating_point()
        and tensor.dtype != torch.float64
    )
    return torch.get_autocast_dtype(device) if casts else tensor.dtype


def _fused_dtype(x: torch.Tensor, weight: torch.Tensor) -> torch.dtype:
    """The dtype in which the fused kernels see x: its own, also under autocast, unless that must reconcile it with weight's."""
    return x.dtype if x.dtype == weight.dtype else _convolved_dtype(x)


def _is_by_channel(parameter: torch.Tensor, conv: nn.Module) -> bool:
    """Does `parameter` hold one value per channel, or one in all?"""
    channels, spatial = conv.weight.shape[0], conv.weight.dim() - 2
    by_channel = tuple(parameter.shape[-spatial - 1 :]) == (channels,) + (1,) * spatial
    return parameter.dim() <= spatial + 2 and (
        parameter.numel() == 1 or (by_channel and parameter.numel() == channels)
    )


_SHAPE_OBSTACLE = "{} holds neither one value per channel nor one in all"


class Conv2dMinAddMultiplyNew(Fused, Conv2dMinAddMultiply):
    __doc__ = Conv2dMinAddMultiply.__doc__

    def _fused_obstacle(self, x):
        return fused.conv2d_min_add_multiply_obstacle(x, self.conv.weight, _fused_dtype(x, self.conv.weight))

    def _tail_parameters(self):
        return (self.bias,)

    def _tail_obstacle(self):
        return None if _is_by_channel(self.bias, self.conv) else _SHAPE_OBSTACLE.format("bias")

    def _run(self, x, variant):
        conv, bias = self.conv, self.bias.reshape(-1)
        return operators.conv2d_min_add_multiply(
            x, conv.weight, conv.bias, bias, self.constant_value, self.scaling_factor, variant
        )


class Conv3dMultiplyInstanceNormClampMultiplyMaxNew(Fused, Conv3dMultiplyInstanceNormClampMultiplyMax):
    __doc__ = Conv3dMultiplyInstanceNormClampMultiplyMax.__doc__

    def _fused_obstacle(self, x):
        return fused.conv3d_obstacle(x, self.conv.weight, _fused_dtype(x, self.conv.weight))

    def _tail_parameters(self):
        return (self.multiplier,)

    def _tail_raises(self, x, size):
        return math.prod(size) == 1

    def _tail_obstacle(self):
        if self.instance_norm.affine or self.instance_norm.track_running_stats:
            return "instance_norm has an affine or running statistics"
        return None if _is_by_channel(self.multiplier, self.conv) else _SHAPE_OBSTACLE.format("multiplier")

    def _run(self, x, variant):
        conv, multiplier = self.conv, self.multiplier.reshape(-1)
        return operators.conv3d_multiply_instancenorm_clamp_multiply_max(
            x,
            conv.weight,
            conv.bias,
            multiplier,
            self.clamp_min,
            self.clamp_max,
            self.instance_norm.eps,
            variant,
        )


class Conv3dGroupNormMinClampDropoutNew(Fused, Conv3dGroupNormMinClampDropout):
    __doc__ = Conv3dGroupNormMinClampDropout.__doc__
    variants = (*Fused.variants, "folded")

    def _fused_obstacle(self, x):
        return fused.conv3d_obstacle(x, self.conv.weight, _fused_dtype(x, self.conv.weight))

    def _tail_raises(self, x, size):
        return (
            x.dim() == 5
            and x.shape[0] * math.prod(size) * self.conv.out_channels // self.norm.num_groups == 1
        )

    def _tail_parameters(self):
        return self.norm.weight, self.norm.bias

    def _run(self, x, variant):
        conv, norm, p = self.conv, self.norm, self.dropout.p if self.dropout.training else 0.0
        return operators.conv3d_groupnorm_min_clamp_dropout(
            x,
            conv.weight,
            conv.bias,
            norm.weight,
            norm.bias,
            norm.num_groups,
            self.min_value,
            self.max_value,
            p,
            norm.eps,
            variant,
        )


class Conv2dGroupNormScaleMaxPoolClampNew(Fused, Conv2dGroupNormScaleMaxPoolClamp):
    __doc__ = Conv2dGroupNormScaleMaxPoolClamp.__doc__

    def _fused_obstacle(self, x):
        weight = self.conv.weight
        return fused.conv2d_groupnorm_scale_maxpool_clamp_obstacle(
            x, weight, _fused_dtype(x, weight), self._pool()
        )

    def _tail_parameters(self):
        return self.group_norm.weight, self.group_norm.bias, self.scale

    def _pool(self):
        size = self.maxpool.kernel_size
        return (size, size) if isinstance(size, int) else tuple(size)

    def _tail_raises(self, x, size):
        if (
            x.dim() == 4
            and x.shape[0] * math.prod(size) * self.conv.out_channels // self.group_norm.num_groups == 1
        ):
            return True
        return any(extent < window for extent, window in zip(size, self._pool()))

    def _tail_obstacle(self):
        pool = self.maxpool
        if (
            pool.stride != pool.kernel_size
            or pool.padding
            or pool.dilation != 1
            or pool.ceil_mode
            or pool.return_indices
        ):
            return "maxpool has another stride than its size, padding, dilation, ceil_mode or return_indices"
        return None if _is_by_channel(self.scale, self.conv) else _SHAPE_OBSTACLE.format("scale")

    def _run(self, x, variant):
        conv, norm, scale = self.conv, self.group_norm, self.scale.reshape(-1)
        return operators.conv2d_groupnorm_scale_maxpool_clamp(
            x, conv.weight, conv.bias, norm.weight, norm.bias, scale, norm.num_groups, self._pool(), self.clamp_min,
            self.clamp_max, norm.eps, variant,
        )  # fmt: skip


# ------------------------------------------------------------------------------------------------------- the registry


@dataclass(frozen=True)
class Problem:
    """One problem: its number in KernelBench level 2, its classes and its sizes."""

    name: str
    number: int
    Model: type[nn.Module]
    ModelNew: type[nn.Module]
    init_inputs: tuple
    input_shape: tuple[int, ...]
    cpu_batch_size: int  # a batch that suits a laptop's CPU
    cases: tuple = ()
    timed_cases: tuple = ()

    @property
    def variants(self) -> tuple[str, ...]:
        return self.ModelNew.variants

    def variants_on(self, device_type: str) -> tuple[str, ...]:
        return tuple(
            name for name in self.variants if name != "folded" and (device_type != "cpu" or name != "fused")
        )

    def get_init_inputs(self) -> list:
        """The positional constructor arguments."""
        return list(self.init_inputs)

    def get_inputs(self, *, device=None, batch_size: int | None = None) -> list[torch.Tensor]:
        """[x], from torch.rand on the CPU, of `input_shape` or with another batch size, moved to `device`."""
        return [torch.rand(batch_size or self.input_shape[0], *self.input_shape[1:]).to(device or "cpu")]

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


def _ties(model, x):
    """The one situation in which conv3d_groupnorm_min_clamp_dropout has gradients: normalised values of exactly min_value.

    In the first half of the groups because the convolution gives zero everywhere, in the rest because the slope is zero.
    """
    model.min_value = 0.25  # not 0, so that dropped elements can be told from kept ones
    half = (model.norm.num_groups + 1) // 2 * (model.norm.num_channels // model.norm.num_groups)
    with torch.no_grad():
        model.conv.weight[:half], model.conv.bias[:half], model.norm.weight[half:] = 0, 0, 0
        model.norm.bias.fill_(model.min_value)


def _all_ties(model, x):
    """Every normalised value is min_value, so all of them have a gradient."""
    with torch.no_grad():
        model.norm.weight.zero_()
        model.norm.bias.fill_(model.min_value)


_DEFAULT = "conv2d_min_add_multiply"

PROBLEMS: dict[str, Problem] = {
    problem.name: problem
    for problem in (
        Problem(
            "conv2d_min_add_multiply", 31, Conv2dMinAddMultiply, Conv2dMinAddMultiplyNew,
            (64, 128, 3, 0.5, (128, 1, 1), 2.0), (128, 64, 128, 128), 2,
        ),
        Problem(
            "conv3d_multiply_instancenorm_clamp_multiply_max", 79, Conv3dMultiplyInstanceNormClampMultiplyMax,
            Conv3dMultiplyInstanceNormClampMultiplyMaxNew, (3, 16, 3, (16, 1, 1, 1), -1.0, 1.0), (128, 3, 16, 32, 32), 8,
        ),
        Problem(
            "conv3d_groupnorm_min_clamp_dropout", 83, Conv3dGroupNormMinClampDropout, Conv3dGroupNormMinClampDropoutNew,
            (3, 16, 3, 8, 0.0, 1.0, 0.2), (128, 3, 16, 64, 64), 2,
            (
                ("ties, training", _ties), ("ties, eval", lambda model, x: _ties(model.eval(), x)),
                ("no ties, eval", lambda model, x: setattr(model.eval(), "min_value", 0.25)),
            ),
            (("all ties", _all_ties),),
        ),
        Problem(
            "conv2d_groupnorm_scale_maxpool_clamp", 85, Conv2dGroupNormScaleMaxPoolClamp,
            Conv2dGroupNormScaleMaxPoolClampNew, (8, 64, 3, 16, (64, 1, 1), 4, 0.0, 1.0), (128, 8, 128, 128), 8,
        ),
    )
}  # fmt: skip


def _problem(name: str) -> Problem:
    if name not in PROBLEMS:
        raise KeyError(f"expected one of {', '.join(PROBLEMS)}, got {name!r}")
    return PROBLEMS[name]


def get_model(name: str = _DEFAULT, *, device=None) -> nn.Module:
    """A fresh ModelNew of the problem `name` on `device`. Raises KeyError for an unknown name."""
    return _problem(name).get_model(device=device)


def get_inputs(name: str = _DEFAULT, *, device=None, batch_size: int | None = None) -> list[torch.Tensor]:
    """[x] for the problem `name`. Raises KeyError for an unknown name."""
    return _problem(name).get_inputs(device=device, batch_size=batch_size)


def get_init_inputs(name: str = _DEFAULT) -> list:
    """The positional constructor arguments of the problem `name`. Raises KeyError for an unknown name."""
    return _problem(name).get_init_inputs()
