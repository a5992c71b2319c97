"""KernelBench level 2's 33 problems with one convolution, as modules of our own: the benchmark's sizes, constructor order, initial values
and operations are kept as facts, so that equal seeds give equal models.

    problem = PROBLEMS[57]
    model, x = problem.model(), problem.inputs()            # the benchmark's sizes
    model, x = problem.small_model(), problem.small_inputs()  # for tests: few channels, odd images
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn


class Convolution(nn.Module):
    """The convolution `conv`; `dimensions` is a class's own."""

    dimensions = 2

    def __init__(self, in_channels, out_channels, kernel_size, **settings):
        super().__init__()
        convolution = nn.Conv2d if self.dimensions == 2 else nn.Conv3d
        self.conv = convolution(in_channels, out_channels, kernel_size, **settings)


class ReluBias(Convolution):
    def __init__(self, in_channels, out_channels, kernel_size, bias_shape):
        super().__init__(in_channels, out_channels, kernel_size)
        self.bias = nn.Parameter(torch.randn(bias_shape))

    def forward(self, x):
        return torch.relu(self.conv(x)) + self.bias


class MishMish(Convolution):
    def forward(self, x):
        return F.mish(F.mish(self.conv(x)))


class SoftmaxPoolPool(Convolution):
    dimensions = 3

    def __init__(self, in_channels, out_channels, kernel_size, pool_kernel_size):
        super().__init__(in_channels, out_channels, kernel_size)
        self.pool1 = nn.MaxPool3d(pool_kernel_size)
        self.pool2 = nn.MaxPool3d(pool_kernel_size)

    def forward(self, x):
        return self.pool2(self.pool1(torch.softmax(self.conv(x), dim=1)))


class ReluLeakyGeluSigmoidBias(Convolution):
    dimensions = 3

    def __init__(self, in_channels, out_channels, kernel_size, bias_shape):
        super().__init__(in_channels, out_channels, kernel_size)
        self.bias = nn.Parameter(torch.randn(bias_shape))

    def forward(self, x):
        x = F.leaky_relu(torch.relu(self.conv(x)), negative_slope=0.01)
        return torch.sigmoid(F.gelu(x)) + self.bias


class DividePoolMeanBiasSum(Convolution):
    dimensions = 3

    def __init__(self, in_channels, out_channels, kernel_size, divisor, pool_size, bias_shape, sum_dim):
        super().__init__(in_channels, out_channels, kernel_size)
        self.divisor = divisor
        self.max_pool = nn.MaxPool3d(pool_size)
        self.global_avg_pool = nn.AdaptiveAvgPool3d((1, 1, 1))
        self.bias = nn.Parameter(torch.randn(bias_shape))
        self.sum_dim = sum_dim

    def forward(self, x):
        x = self.max_pool(self.conv(x) / self.divisor)
        return torch.sum(self.global_avg_pool(x) + self.bias, dim=self.sum_dim)


class InstanceNormDivide(Convolution):
    def __init__(self, in_channels, out_channels, kernel_size, divide_by):
        super().__init__(in_channels, out_channels, kernel_size)
        self.instance_norm = nn.InstanceNorm2d(out_channels)
        self.divide_by = divide_by

    def forward(self, x):
        return self.instance_norm(self.conv(x)) / self.divide_by


class BiasScaleSigmoidGroupNorm(Convolution):
    def __init__(self, in_channels, out_channels, kernel_size, num_groups, bias_shape, scale_shape):
        super().__init__(in_channels, out_channels, kernel_size)
        self.bias = nn.Parameter(torch.randn(bias_shape))
        self.scale = nn.Parameter(torch.randn(scale_shape))
        self.group_norm = nn.GroupNorm(num_groups, out_channels)

    def forward(self, x):
        x = (self.conv(x) + self.bias) * self.scale
        return self.group_norm(torch.sigmoid(x))


class GroupNormMean(Convolution):
    dimensions = 3

    def __init__(self, in_channels, out_channels, kernel_size, num_groups):
        super().__init__(in_channels, out_channels, kernel_size)
        self.group_norm = nn.GroupNorm(num_groups, out_channels)

    def forward(self, x):
        return self.group_norm(self.conv(x)).mean(dim=[1, 2, 3, 4])


class MinSoftmax(Convolution):
    dimensions = 3

    def __init__(self, in_channels, out_channels, kernel_size, dim):
        super().__init__(in_channels, out_channels, kernel_size)
        self.dim = dim

    def forward(self, x):
        return torch.softmax(torch.min(self.conv(x), dim=self.dim)[0], dim=1)


class MinTanhTanh(Convolution):
    def forward(self, x):
        x = torch.min(self.conv(x), dim=1, keepdim=True)[0]
        return torch.tanh(torch.tanh(x))


class HardswishGroupNormMean(Convolution):
    dimensions = 3

    def __init__(self, in_channels, out_channels, kernel_size, num_groups=4, bias=True):
        super().__init__(in_channels, out_channels, kernel_size, bias=bias)
        self.group_norm = nn.GroupNorm(num_groups, out_channels)

    def forward(self, x):
        return torch.mean(self.group_norm(F.hardswish(self.conv(x))), dim=[2, 3, 4])


class MinimumBiasScale(Convolution):
    def __init__(self, in_channels, out_channels, kernel_size, constant_value, bias_shape, scaling_factor):
        super().__init__(in_channels, out_channels, kernel_size)
        self.constant_value = constant_value
        self.bias = nn.Parameter(torch.randn(bias_shape))
        self.scaling_factor = scaling_factor

    def forward(self, x):
        x = torch.min(self.conv(x), torch.tensor(self.constant_value))
        return (x + self.bias) * self.scaling_factor


class ScaleMin(Convolution):
    def __init__(self, in_channels, out_channels, kernel_size, scale_factor):
        super().__init__(in_channels, out_channels, kernel_size)
        self.scale_factor = scale_factor

    def forward(self, x):
        return torch.min(self.conv(x) * self.scale_factor, dim=1, keepdim=True)[0]


class SubtractHardswishPoolMish(Convolution):
    def __init__(self, in_channels, out_channels, kernel_size, subtract_value, pool_kernel_size):
        super().__init__(in_channels, out_channels, kernel_size)
        self.subtract_value = subtract_value
        self.pool = nn.MaxPool2d(pool_kernel_size)

    def forward(self, x):
        return F.mish(self.pool(F.hardswish(self.conv(x) - self.subtract_value)))


class PoolLogsumexpRelu(Convolution):
    dimensions = 3

    def __init__(self, in_channels, out_channels, kernel_size, stride, padding):
        super().__init__(in_channels, out_channels, kernel_size, stride=stride, padding=padding)
        self.max_pool = nn.MaxPool3d(kernel_size=2, stride=2)

    def forward(self, x):
        return torch.relu(torch.logsumexp(self.max_pool(self.conv(x)), dim=1, keepdim=True))


class SubtractTanhSubtractPool(Convolution):
    def __init__(
        self, in_channels, out_channels, kernel_size, subtract1_value, subtract2_value, kernel_size_pool
    ):
        super().__init__(in_channels, out_channels, kernel_size)
        self.subtract1_value = subtract1_value
        self.subtract2_value = subtract2_value
        self.avgpool = nn.AvgPool2d(kernel_size_pool)

    def forward(self, x):
        return self.avgpool(torch.tanh(self.conv(x) - self.subtract1_value) - self.subtract2_value)


class MishTanh(Convolution):
    dimensions = 3

    def __init__(self, in_channels, out_channels, kernel_size, stride=1, padding=0):
        super().__init__(in_channels, out_channels, kernel_size, stride=stride, padding=padding)

    def forward(self, x):
        return torch.tanh(F.mish(self.conv(x)))


class ScaleTanhScaleSigmoid(Convolution):
    """The number `scaling_factor` is given and not used, as in the benchmark."""

    dimensions = 3

    def __init__(self, in_channels, out_channels, kernel_size, scaling_factor, bias_shape):
        super().__init__(in_channels, out_channels, kernel_size)
        self.scaling_factor = nn.Parameter(torch.randn(bias_shape))
        self.bias = nn.Parameter(torch.randn(bias_shape))

    def forward(self, x):
        x = torch.tanh(self.conv(x) * self.scaling_factor)
        return torch.sigmoid(x * self.bias)


class MishByHandBatchNorm(Convolution):
    def __init__(self, in_channels, out_channels, kernel_size, eps=1e-5, momentum=0.1):
        super().__init__(in_channels, out_channels, kernel_size)
        self.bn = nn.BatchNorm2d(out_channels, eps=eps, momentum=momentum)

    def forward(self, x):
        x = self.conv(x)
        return self.bn(torch.multiply(torch.tanh(F.softplus(x)), x))


class ScaleLeakyGelu(Convolution):
    def __init__(self, in_channels, out_channels, kernel_size, multiplier_shape):
        super().__init__(in_channels, out_channels, kernel_size)
        self.multiplier = nn.Parameter(torch.randn(multiplier_shape))
        self.leaky_relu = nn.LeakyReLU()

    def forward(self, x):
        return F.gelu(self.leaky_relu(self.conv(x) * self.multiplier))


class ReluHardswishByHand(Convolution):
    def forward(self, x):
        x = torch.relu(self.conv(x))
        return x * torch.clamp((x + 3) / 6, 0, 1)


class PoolSigmoidSum(Convolution):
    def __init__(self, in_channels, out_channels, kernel_size, pool_kernel_size):
        super().__init__(in_channels, out_channels, kernel_size)
        self.avg_pool = nn.AvgPool2d(pool_kernel_size)

    def forward(self, x):
        return torch.sum(torch.sigmoid(self.avg_pool(self.conv(x))), dim=[1, 2, 3])


class GeluMean(Convolution):
    def forward(self, x):
        return F.adaptive_avg_pool2d(F.gelu(self.conv(x)), 1).squeeze(-1).squeeze(-1)


class HardswishRelu(Convolution):
    def forward(self, x):
        return torch.relu(F.hardswish(self.conv(x)))


class DivideLeaky(Convolution):
    def __init__(self, in_channels, out_channels, kernel_size, divisor):
        super().__init__(in_channels, out_channels, kernel_size)
        self.divisor = divisor

    def forward(self, x):
        return F.leaky_relu(self.conv(x) / self.divisor, negative_slope=0.01)


class BatchNormScale(Convolution):
    def __init__(self, in_channels, out_channels, kernel_size, scaling_factor):
        super().__init__(in_channels, out_channels, kernel_size)
        self.bn = nn.BatchNorm2d(out_channels)
        self.scaling_factor = scaling_factor

    def forward(self, x):
        return self.bn(self.conv(x)) * self.scaling_factor


class ScaleInstanceNormClampScaleMax(Convolution):
    dimensions = 3

    def __init__(self, in_channels, out_channels, kernel_size, multiplier_shape, clamp_min, clamp_max):
        super().__init__(in_channels, out_channels, kernel_size)
        self.multiplier = nn.Parameter(torch.randn(multiplier_shape))
        self.instance_norm = nn.InstanceNorm3d(out_channels)
        self.clamp_min = clamp_min
        self.clamp_max = clamp_max

    def forward(self, x):
        x = self.instance_norm(self.conv(x) * self.multiplier)
        x = torch.clamp(x, self.clamp_min, self.clamp_max)
        return torch.max(x * self.multiplier, dim=1)[0]


class TanhScaleBiasPool(Convolution):
    def __init__(self, in_channels, out_channels, kernel_size, scaling_factor, bias_shape, pool_kernel_size):
        super().__init__(in_channels, out_channels, kernel_size)
        self.scaling_factor = scaling_factor
        self.bias = nn.Parameter(torch.randn(bias_shape))
        self.max_pool = nn.MaxPool2d(pool_kernel_size)

    def forward(self, x):
        return self.max_pool(torch.tanh(self.conv(x)) * self.scaling_factor + self.bias)


class GroupNormMinimumClampDropout(Convolution):
    dimensions = 3

    def __init__(self, in_channels, out_channels, kernel_size, groups, min_value, max_value, dropout_p):
        super().__init__(in_channels, out_channels, kernel_size)
        self.norm = nn.GroupNorm(groups, out_channels)
        self.dropout = nn.Dropout(dropout_p)
        self.min_value = min_value
        self.max_value = max_value

    def forward(self, x):
        x = self.norm(self.conv(x))
        x = torch.min(x, torch.tensor(self.min_value, device=x.device))
        return self.dropout(torch.clamp(x, min=self.min_value, max=self.max_value))


class GroupNormScalePoolClamp(Convolution):
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
        super().__init__(in_channels, out_channels, kernel_size)
        self.group_norm = nn.GroupNorm(num_groups, out_channels)
        self.scale = nn.Parameter(torch.ones(scale_shape))
        self.maxpool = nn.MaxPool2d(kernel_size=maxpool_kernel_size)
        self.clamp_min = clamp_min
        self.clamp_max = clamp_max

    def forward(self, x):
        x = self.maxpool(self.group_norm(self.conv(x)) * self.scale)
        return torch.clamp(x, self.clamp_min, self.clamp_max)


class SubtractSubtractMish(Convolution):
    def __init__(self, in_channels, out_channels, kernel_size, subtract_value_1, subtract_value_2):
        super().__init__(in_channels, out_channels, kernel_size)
        self.subtract_value_1 = subtract_value_1
        self.subtract_value_2 = subtract_value_2

    def forward(self, x):
        return F.mish(self.conv(x) - self.subtract_value_1 - self.subtract_value_2)


class LeakyBiasClampGelu(Convolution):
    dimensions = 3

    def __init__(self, in_channels, out_channels, kernel_size, sum_tensor_shape):
        super().__init__(in_channels, out_channels, kernel_size)
        self.sum_tensor = nn.Parameter(torch.randn(sum_tensor_shape))

    def forward(self, x):
        x = F.leaky_relu(self.conv(x), negative_slope=0.2) + self.sum_tensor
        return F.gelu(torch.clamp(x, min=-1.0, max=1.0))


class GroupNormTanhHardswishResidualLogsumexp(Convolution):
    def __init__(self, in_channels, out_channels, kernel_size, groups, eps=1e-5):
        super().__init__(in_channels, out_channels, kernel_size)
        self.group_norm = nn.GroupNorm(groups, out_channels, eps=eps)
        self.tanh = nn.Tanh()
        self.hard_swish = nn.Hardswish()

    def forward(self, x):
        v = self.conv(x)
        return torch.logsumexp(v + self.hard_swish(self.tanh(self.group_norm(v))), dim=1, keepdim=True)


class Level2Problem(NamedTuple):
    """`image`: the input's positions. `rest(shape)`: the constructor's arguments after in_channels, out_channels,
    kernel_size; `shape` is a parameter's by channel. A small model has at most 3 and 32 channels."""

    number: int
    Model: type[Convolution]
    batch: int
    in_channels: int
    out_channels: int
    image: tuple[int, ...]
    rest: Callable[[tuple[int, ...]], list[Any]]
    kernel_size: int | tuple[int, ...] = 3

    @property
    def input_shape(self) -> tuple[int, ...]:
        return self.batch, self.in_channels, *self.image

    @property
    def init_inputs(self) -> list[Any]:
        return self._init(self.in_channels, self.out_channels)

    @property
    def small_input_shape(self) -> tuple[int, ...]:
        return 3, min(3, self.in_channels), *((17, 15) if len(self.image) == 2 else (12, 13, 11))

    @property
    def small_init_inputs(self) -> list[Any]:
        return self._init(min(3, self.in_channels), min(32, self.out_channels))

    def _init(self, in_channels: int, out_channels: int) -> list[Any]:
        rest = self.rest((out_channels, *[1] * len(self.image)))
        return [in_channels, out_channels, self.kernel_size, *rest]

    def model(self) -> Convolution:
        return self.Model(*self.init_inputs)

    def inputs(self, device=None) -> list[torch.Tensor]:
        return [torch.rand(self.input_shape, device=device)]

    def small_model(self) -> Convolution:
        return self.Model(*self.small_init_inputs)

    def small_inputs(self) -> list[torch.Tensor]:
        return [torch.rand(self.small_input_shape)]


def _nothing(shape):
    return []


def _by_channel(shape):
    return [shape]


_ALL = [
    Level2Problem(1, ReluBias, 128, 64, 128, (128, 128), _by_channel),
    Level2Problem(4, MishMish, 64, 64, 128, (256, 256), _nothing),
    Level2Problem(6, SoftmaxPoolPool, 128, 3, 16, (16, 32, 32), lambda shape: [2]),
    Level2Problem(7, ReluLeakyGeluSigmoidBias, 64, 8, 32, (32, 64, 64), _by_channel),
    Level2Problem(
        8,
        DividePoolMeanBiasSum,
        128,
        8,
        16,
        (16, 64, 64),
        lambda shape: [2.0, (2, 2, 2), shape, 1],
        (3, 3, 3),
    ),
    Level2Problem(17, InstanceNormDivide, 128, 64, 128, (128, 128), lambda shape: [2.0]),
    Level2Problem(21, BiasScaleSigmoidGroupNorm, 128, 8, 32, (256, 256), lambda shape: [8, shape, shape]),
    Level2Problem(23, GroupNormMean, 128, 3, 24, (24, 32, 32), lambda shape: [8]),
    Level2Problem(24, MinSoftmax, 128, 3, 24, (24, 32, 32), lambda shape: [2]),
    Level2Problem(25, MinTanhTanh, 128, 16, 64, (256, 256), _nothing),
    Level2Problem(27, HardswishGroupNormMean, 1024, 3, 16, (16, 32, 32), _nothing, 4),
    Level2Problem(31, MinimumBiasScale, 128, 64, 128, (128, 128), lambda shape: [0.5, shape, 2.0]),
    Level2Problem(32, ScaleMin, 64, 64, 128, (256, 256), lambda shape: [2.0]),
    Level2Problem(35, SubtractHardswishPoolMish, 128, 64, 128, (128, 128), lambda shape: [0.5, 2]),
    Level2Problem(43, PoolLogsumexpRelu, 4, 32, 64, (32, 128, 128), lambda shape: [1, 1]),
    Level2Problem(46, SubtractTanhSubtractPool, 128, 64, 128, (128, 128), lambda shape: [0.5, 0.2, 2]),
    Level2Problem(47, MishTanh, 16, 32, 64, (32, 64, 64), _nothing),
    Level2Problem(48, ScaleTanhScaleSigmoid, 128, 3, 16, (16, 64, 64), lambda shape: [2, shape]),
    Level2Problem(52, MishByHandBatchNorm, 64, 64, 128, (128, 128), _nothing),
    Level2Problem(54, ScaleLeakyGelu, 64, 64, 64, (256, 256), _by_channel),
    Level2Problem(57, ReluHardswishByHand, 128, 8, 64, (128, 128), _nothing),
    Level2Problem(65, PoolSigmoidSum, 128, 8, 64, (384, 384), lambda shape: [4]),
    Level2Problem(67, GeluMean, 128, 8, 64, (256, 256), _nothing),
    Level2Problem(69, HardswishRelu, 128, 8, 64, (128, 128), _nothing),
    Level2Problem(71, DivideLeaky, 128, 8, 64, (128, 128), lambda shape: [2]),
    Level2Problem(73, BatchNormScale, 128, 8, 64, (128, 128), lambda shape: [2.0]),
    Level2Problem(
        79, ScaleInstanceNormClampScaleMax, 128, 3, 16, (16, 32, 32), lambda shape: [shape, -1.0, 1.0]
    ),
    Level2Problem(82, TanhScaleBiasPool, 128, 8, 64, (256, 256), lambda shape: [2.0, shape, 4]),
    Level2Problem(
        83, GroupNormMinimumClampDropout, 128, 3, 16, (16, 64, 64), lambda shape: [8, 0.0, 1.0, 0.2]
    ),
    Level2Problem(
        85, GroupNormScalePoolClamp, 128, 8, 64, (128, 128), lambda shape: [16, shape, 4, 0.0, 1.0]
    ),
    Level2Problem(87, SubtractSubtractMish, 128, 8, 64, (256, 256), lambda shape: [0.5, 0.2]),
    Level2Problem(90, LeakyBiasClampGelu, 128, 8, 64, (16, 64, 64), _by_channel),
    Level2Problem(92, GroupNormTanhHardswishResidualLogsumexp, 128, 8, 64, (128, 128), lambda shape: [16]),
]
PROBLEMS: dict[int, Level2Problem] = {problem.number: problem for problem in _ALL}
