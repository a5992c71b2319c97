"""y = clamp(max_pool2d(group_norm(conv2d(x)) * scale, maxpool_kernel_size), clamp_min, clamp_max)."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor, nn

from inline_kernels.engine import library, operators, tiling
from inline_kernels.engine.twin import Twin
from inline_kernels.problems import Problem

NAME = "conv2d_groupnorm_scale_maxpool_clamp"
PARAMETERS = "conv_bias", "norm_weight", "norm_bias", "scale?"  # by channel; "?": or one for all channels


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


class Arguments(NamedTuple):
    """What the operators take. They return y (N, C, H' // pool height, W' // pool width) in scale's dtype."""

    x: Tensor  # (N, Cin, H, W)
    weight: Tensor  # (C, Cin, kh, kw)
    conv_bias: Tensor  # C elements
    norm_weight: Tensor
    norm_bias: Tensor
    scale: Tensor  # C elements or 1
    groups: int
    pool: list[int]  # height, width
    low: float
    high: float
    eps: float


# ----------------------------------------------------------------- epilogue: the library's convolution, then our tail
def _by_winograd(a: Arguments) -> bool:
    """Does Winograd's convolution run, and a row of windows from pixels to selected values in cache?"""
    return len(a.weight) % 32 == 0 and a.pool[0] % 2 == 0 and library.winograd_applies(a.x, a.weight)


def _by_gram(a: Arguments) -> bool:
    """Does backward go without v (kernels/cpu/gram.h)? Where few pixels are selected, and few channels come in, that is faster."""
    return _by_winograd(a) and len(a.weight) >= 2 * a.weight.shape[1] and math.prod(a.pool) >= 4


def _outputs(a: Arguments, saving: bool) -> list[operators.Output]:
    """y; the v that each window selects; for backward its index there, v's statistics by channel and group, with the biases, and v where it is needed."""
    (N, *_), (C, *_), on_cpu = a.x.shape, a.weight.shape, library.device_type(a.x) == "cpu"
    (H, W), dtype = library.output_size(a.x, a.weight), a.scale.dtype
    y = N, C, H // a.pool[0], W // a.pool[1]
    selected = 0 if on_cpu and not saving and dtype == a.x.dtype else y  # 0: they become results in place
    return [
        (y, dtype, library.result_format(a.x, a.weight, False)),
        (selected, a.x.dtype),
        (y if saving else 0, operators.index_type(a.pool[0] * a.pool[1])[1]),
        operators.statistics(a, 2 * (C + a.groups), 2 * C, saving),
        (0 if _by_gram(a) else (N, H, W, C) if on_cpu else (N, C, H, W), a.x.dtype),
    ]


def _plan(a: Arguments, *, saving: bool) -> operators.Plan:
    """How such an input is convolved, and by what the rest is computed."""
    index_type, _ = operators.index_type(math.prod(a.pool))
    defines = {"POOL_H": a.pool[0], "POOL_W": a.pool[1], "INDEX_T": index_type}
    plan = operators.Plan(NAME, a, PARAMETERS, _outputs(a, saving)[:-1], defines)
    plan.winograd, plan.gram = _by_winograd(a), _by_gram(a)
    plan.by_pixel = library.device_type(a.x) == "cpu"  # is v (N, H', W', C), or (N, C, H', W')? As is faster
    plan.v_format = torch.channels_last if plan.by_pixel else torch.contiguous_format
    # The library convolves in v's layout, too, but for an input that its weight dwarfs.
    plan.layout = plan.v_format if a.x.numel() >= a.weight.numel() else torch.contiguous_format
    plan.sizes = len(a.weight), a.groups, *library.output_size(a.x, a.weight)
    plan.samples = library.samples_per_piece(a.x, a.weight, saving)
    return plan


def _epilogue(a: Arguments, *, plan: operators.Plan, saving: bool) -> tuple[Tensor, ...]:
    parameters, (y, extreme, *others) = (*plan.parameters(a), a.low, a.high, a.eps), plan.outputs(a)
    others = [extreme if extreme.numel() else y, *others]
    if plan.winograd:
        (N, Cin, *of_x), (C, groups, *size) = a.x.shape, plan.sizes
        v = a.x.new_empty((N, *size, C) if saving and not plan.gram else 0)
        inputs = v, library.contiguous(a.x), library.contiguous(a.weight), *parameters
        plan.kernels.convolve_forward(y, *others, *inputs, N, Cin, C, groups, *of_x)
    else:
        for x, *outputs in library.pieces(plan.samples, a.x, y, *others):
            v = library.convolve(x, a.weight, plan.layout).contiguous(memory_format=plan.v_format)
            v = v.permute(0, 2, 3, 1) if plan.by_pixel else v
            plan.kernels.forward(*outputs, v, *parameters, x.shape[0], *plan.sizes)
    y = y.contiguous(memory_format=plan.y_format)
    return (y, *others, v) if saving else (y,)


def _backward(dy: Tensor, a: Arguments, extreme, index, statistics, v, *, plan, needs) -> tuple:
    (N, Cin, *of_x), (C, groups, *size), gradients = a.x.shape, plan.sizes, plan.gradients(a)
    scratch = statistics.new_empty(N * (6 * C + 2 * groups))
    _, weight, _, scale = plan.parameters(a)
    saved = extreme, index, statistics, weight, scale, a.low, a.high, a.scale.numel(), N
    if plan.gram:
        dv = a.x.new_empty((N, *size, C) if needs[0] else 0)
        dw = a.weight.new_empty(a.weight.shape if needs[1] else 0)
        inputs = dy.contiguous(), library.contiguous(a.x), library.contiguous(a.weight), *saved
        plan.kernels.convolve_backward(dv, dw, *gradients, scratch, *inputs, Cin, C, groups, *of_x)
    else:
        dv = torch.empty_like(v)
        plan.kernels.backward(dv, *gradients, scratch, dy.contiguous(), v, *saved, *plan.sizes)
    dv = dv.permute(0, 3, 1, 2) if plan.by_pixel and dv.numel() else dv
    needs = [needs[0], needs[1] and not plan.gram]
    dx, dense_dw = library.convolve_backward(dv, a.x, a.weight, plan.layout, needs)
    return dx, dw if plan.gram else dense_dw, *plan.as_parameters(a, gradients)


epilogue = operators.declare(NAME, _epilogue, outputs=_outputs, backward=_backward, plan=_plan)


# ------------------------------------------------------------------------------ fused: the convolution inside our kernels
def _fused_outputs(a: Arguments, saving: bool) -> list[operators.Output]:
    """y; for backward, in one, what kernels/pool/kept.cuh has: as float32 the v that each window selects, the biases and the statistics,
    and, a byte each, its index in the window and which channels are flat."""
    y, *_ = _outputs(a, False)
    selected, channels, groups = math.prod(y[0]), a.x.shape[0] * len(a.weight), a.x.shape[0] * a.groups
    kept = selected + 2 * (channels + groups) + tiling.ceil_div(selected + channels, 4)
    return [y, (kept if saving else 0, torch.float32)]


def _plan_fused(a: Arguments, *, saving: bool) -> operators.Plan:
    saves = saving and tiling.strips_fit(a.x, a.weight, a.pool, True)
    numbers, launcher = (a.low, a.high), "forward_saving" if saves else "forward"
    given = (
        f"{NAME}_fused",
        a,
        PARAMETERS,
        _fused_outputs(a, saving),
        tiling.strips_defines(a.x, a.weight, a.pool, saves),
    )
    plan = operators.Plan(*given, numbers=(*numbers, a.eps, a.groups), launchers=(launcher,), saves=saves)
    if saves:
        build = given[0], tiling.strips_backward_defines(a.x, a.weight, a.pool)
        plan.backward, plan.backward_input = (
            plan.when_needed(*build, name, *numbers, a.groups, launchers=(name,))
            for name in ("backward", "backward_input")
        )
    return plan


def _fused_backward(dy: Tensor, a: Arguments, kept, *, plan, needs) -> tuple:
    if not plan.saves:
        return operators.backward_of(epilogue, dy, a, needs)
    gradients, dx, dw = plan.gradients(a), None, a.weight.new_empty(*a.weight.shape)
    _, weight, _, scale = plan.parameters(a)
    inputs = dw, *gradients, dy.contiguous(), a.x.contiguous(), a.weight.contiguous(), kept, weight, scale
    if needs[0] and tiling.input_columns(a.x, a.weight, a.pool):
        dx = torch.empty_like(a.x, memory_format=torch.contiguous_format)
        plan.backward_input()(dx, *inputs)
        dx = dx.contiguous(memory_format=library.result_format(a.x, a.weight, True))
    else:
        plan.backward()(*inputs)
    if needs[0] and dx is None:
        dx, *_ = operators.backward_of(epilogue, dy, a, [True, *[False] * (len(needs) - 1)])
    return dx, dw, *plan.as_parameters(a, gradients)


fused = operators.declare_fused(
    NAME, outputs=_fused_outputs, backward=_fused_backward, plan=_plan_fused, scratch=False
)


class Conv2dGroupNormScaleMaxPoolClampNew(Twin, Conv2dGroupNormScaleMaxPoolClamp):
    submodules = {"conv": nn.Conv2d, "group_norm": nn.GroupNorm, "maxpool": nn.MaxPool2d}
    operands = ("conv.weight", "conv.bias", "group_norm.weight", "group_norm.bias", "scale")
    constants = {"group_norm.num_groups": int, "maxpool.kernel_size": operators.window_sides}
    constants |= dict.fromkeys(("clamp_min", "clamp_max", "group_norm.eps"), float)
    epilogue, fused, autocast_tail = epilogue, fused, torch.float32

    def _pool(self):
        return operators.window_sides(self.maxpool.kernel_size)

    def _tail_raises(self, x, size):
        fits = all(0 < window <= extent for window, extent in zip(self._pool(), size))
        return not fits or operators.group_norm_raises(x, self.conv.weight, self.group_norm, size)

    def _tail_obstacle(self):
        pool = self.maxpool
        plain = not (pool.padding or pool.ceil_mode or pool.return_indices) and pool.dilation == 1
        if not plain or pool.stride != pool.kernel_size:
            return "maxpool has another stride than its size, padding, dilation, ceil_mode or return_indices"

    def _fused_obstacle(self, x, dtype):
        return tiling.strips_obstacle(x, self.conv.weight, dtype, self._pool())

    def _fused_defines(self, x):
        sizes = x, self.conv.weight, self._pool()
        return tiling.strips_defines(*sizes, True) | tiling.strips_backward_defines(*sizes)

    def _training_obstacle(self, x):
        return tiling.strips_training_obstacle(x, self.conv.weight, self._pool())


PROBLEM = Problem(
    NAME,
    number=85,
    Model=Conv2dGroupNormScaleMaxPoolClamp,
    ModelNew=Conv2dGroupNormScaleMaxPoolClampNew,
    init_inputs=(8, 64, 3, 16, (64, 1, 1), 4, 0.0, 1.0),
    input_shape=(128, 8, 128, 128),
    cpu_batch_size=8,
)
