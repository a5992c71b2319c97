"""y = clamp(max_pool2d(group_norm(conv2d(x)) * scale, maxpool_kernel_size), clamp_min, clamp_max)."""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import torch
from torch import Tensor, nn

import library
import operators
import tiling
from problems import Problem
from twin import Twin

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
    """Does backward go without v (kernels/gram.h)? Where few pixels are selected, and few channels come in, that is faster."""
    return _by_winograd(a) and len(a.weight) >= 2 * a.weight.shape[1] and math.prod(a.pool) >= 4


def _outputs(a: Arguments, saving: bool) -> list[operators.Output]:
    """y; the v that each window selects; for backward its index there, v's statistics by channel and group, and v where it is needed."""
    (N, *_), (C, *_), on_cpu = a.x.shape, a.weight.shape, library.device_type(a.x) == "cpu"
    (H, W), dtype = library.output_size(a.x, a.weight), a.scale.dtype
    y = N, C, H // a.pool[0], W // a.pool[1]
    in_place = (
        on_cpu and not saving and dtype == a.x.dtype
    )  # the selected values become results where they are
    return [
        (y, dtype, library.result_format(a.x, a.weight, False)),
        (0 if in_place else y, a.x.dtype),
        (y if saving else 0, operators.index_type(a.pool[0] * a.pool[1])[1]),
        operators.statistics(a, 2 * (C + a.groups), saving),
        (0 if _by_gram(a) else (N, H, W, C) if on_cpu else (N, C, H, W), a.x.dtype),
    ]


def _plan(a: Arguments, *, saving: bool) -> operators.Plan:
    """How such an input is convolved, and by what the rest is computed."""
    x, weight, by_pixel, size = (
        a.x,
        a.weight,
        library.device_type(a.x) == "cpu",
        library.output_size(a.x, a.weight),
    )
    v_format = torch.channels_last if by_pixel else torch.contiguous_format
    ctype, _ = operators.index_type(math.prod(a.pool))
    return operators.Plan(
        NAME,
        a,
        PARAMETERS,
        _outputs(a, saving)[:-1],
        {"POOL_H": a.pool[0], "POOL_W": a.pool[1], "INDEX_T": ctype},
        winograd=_by_winograd(a),
        gram=_by_gram(a),
        by_pixel=by_pixel,  # is v (N, H', W', C), or (N, C, H', W')? Each where the library is fastest
        v_format=v_format,
        # The library convolves in v's layout, too, but for an input that its weight dwarfs.
        layout=v_format if x.numel() >= weight.numel() else torch.contiguous_format,
        sizes=(len(weight), a.groups, *size),
        samples=library.samples_per_piece(x, weight, saving),
    )


def _epilogue(a: Arguments, *, plan: operators.Plan, saving: bool) -> tuple[Tensor, ...]:
    parameters, (y, extreme, *others) = plan.parameters(a), plan.outputs(a)
    others = [extreme if extreme.numel() else y, *others]
    if plan.winograd:
        (N, Cin, *of_x), (C, groups, *size) = a.x.shape, plan.sizes
        v = a.x.new_empty((N, *size, C) if saving and not plan.gram else 0)
        inputs = v, a.x.contiguous(), a.weight.contiguous(), *parameters
        plan.kernels.convolve_forward(y, *others, *inputs, *a[8:], N, Cin, C, groups, *of_x)
    else:
        for x, *outputs in library.pieces(plan.samples, a.x, y, *others):
            v = library.convolve(x, a.weight, plan.layout).contiguous(memory_format=plan.v_format)
            v = v.permute(0, 2, 3, 1) if plan.by_pixel else v
            plan.kernels.forward(*outputs, v, *parameters, *a[8:], x.shape[0], *plan.sizes)
    y = y.contiguous(memory_format=plan.y_format)
    return (y, *others, v) if saving else (y,)


def _backward(dy: Tensor, a: Arguments, extreme, index, statistics, v, *, plan, needs) -> tuple:
    (N, Cin, *of_x), (C, groups, *size), gradients, dw = a.x.shape, plan.sizes, plan.gradients(a), None
    scratch = statistics.new_empty(N * (6 * C + 2 * groups))
    saved, rest = (extreme, index, statistics, *plan.parameters(a)), (*a[8:10], a.scale.numel(), N)
    if plan.gram:
        dv = a.x.new_empty((N, *size, C) if needs[0] else 0)
        dw = a.weight.new_empty(a.weight.shape if needs[1] else 0)
        inputs = dy.contiguous(), a.x.contiguous(), a.weight.contiguous(), *saved
        plan.kernels.convolve_backward(dv, dw, *gradients, scratch, *inputs, *rest, Cin, C, groups, *of_x)
        needs = [needs[0], False]
    else:
        dv = torch.empty_like(v)
        plan.kernels.backward(dv, *gradients, scratch, dy.contiguous(), v, *saved, *rest, *plan.sizes)
    dv = dv.permute(0, 3, 1, 2) if plan.by_pixel and dv.numel() else dv
    dx, dense_dw = library.convolve_backward(dv, a.x, a.weight, plan.layout, needs)
    return dx, dense_dw if dw is None else dw, *plan.as_parameters(a, gradients)


epilogue = operators.declare(NAME, _epilogue, outputs=_outputs, backward=_backward, plan=_plan)


# ------------------------------------------------------------------------------ fused: the convolution inside our kernels


def _fused_outputs(a: Arguments, saving: bool) -> list[operators.Output]:
    """y; the v that each window selects and the statistics, one after the other, which forward needs, too; for backward its index there,
    if there is room for it."""
    y, *_ = _outputs(a, saving)
    kept = math.prod(y[0]) + 2 * a.x.shape[0] * (len(a.weight) + a.groups)
    saving = saving and tiling.strips_save(a.x, a.weight, tuple(a.pool))
    return [y, ((kept,), torch.float32), (y[0] if saving else 0, torch.uint8)]


def _plan_fused(a: Arguments, *, saving: bool) -> operators.Plan:
    (N, _, *size), C, pool = a.x.shape, len(a.weight), tuple(a.pool)
    tiles = tiling.plan_strips(a.x, a.weight, pool)
    saving = saving and tiling.strips_save(a.x, a.weight, pool)
    scratch = (N, C, tiles.tiles * tiles.strips, 3), torch.float32  # statistics of each strip
    outputs = [*_fused_outputs(a, saving), scratch]
    defines = tiling.strip_defines(tiles, a.weight, pool, saving)
    sizes = N, a.groups, *size, *tiles.launch
    plan = operators.Plan(f"{NAME}_fused", a, PARAMETERS, outputs, defines, sizes=sizes)
    if saving:
        plan.tiles = tiles = tiling.plan_strips_backward(a.x, a.weight, pool, a.groups)
        defines = tiling.strips_backward_defines(tiles, a.weight, pool)
        # Built when backward runs, which may never be.
        source, x, dtype = f"{NAME}_backward_fused", a.x.new_empty(0), a.scale.dtype
        plan.load_backward = functools.cache(lambda: operators.load(source, x, dtype, **defines))
    return plan


def _fused(a: Arguments, *, plan: operators.Plan, saving: bool) -> tuple[Tensor, ...]:
    y, kept, index, scratch = plan.outputs(a)
    inputs = a.x.contiguous(), a.weight.contiguous(), *plan.parameters(a)
    plan.kernels.forward(y, kept, index, scratch, *inputs, *a[8:], *plan.sizes)
    y = y.contiguous(memory_format=plan.y_format)
    return (y, kept, index) if saving else (y,)


def _fused_backward(dy: Tensor, a: Arguments, kept, index, *, plan, needs) -> tuple:
    if index.numel() == 0:
        return _epilogue_backward(dy, a, needs)
    kernels, tiles, gradients, dx = plan.load_backward(), plan.tiles, plan.gradients(a), None
    dw = torch.empty_like(a.weight, memory_format=torch.contiguous_format)
    scratch = kept.new_empty(tiles.merged, dtype=torch.float64), kept.new_empty(tiles.partial)
    inputs = dy.contiguous(), a.x.contiguous(), a.weight.contiguous(), kept, index, *plan.parameters(a)
    sizes = plan.sizes[:4]
    kernels.backward(dw, *gradients, *scratch, *inputs, *a[8:10], a.scale.numel(), *sizes, *tiles[:2])
    if needs[0] and tiles.input_columns:
        dx = torch.empty_like(a.x, memory_format=torch.contiguous_format)
        kernels.backward_input(dx, *scratch, *inputs, *a[8:10], *sizes, *tiles.input_launch)
        dx = dx.contiguous(memory_format=library.result_format(a.x, a.weight, True))
    elif needs[0]:
        dx, *_ = _epilogue_backward(dy, a, [True, *[False] * (len(needs) - 1)])
    return dx, dw, *plan.as_parameters(a, gradients)


def _epilogue_backward(dy: Tensor, a: Arguments, needs: list[bool]) -> list[Tensor | None]:
    """Where kernels find no room in shared memory: all that the other variant does, once more."""
    # Forward chose the dtypes; a region of autocast around backward may not.
    with torch.autocast(dy.device.type, enabled=False):
        _, *saved = epilogue.save(*a)
        return epilogue.backward(dy, a, saved, needs)


fused = operators.declare(
    f"{NAME}_fused", _fused, outputs=_fused_outputs, backward=_fused_backward, plan=_plan_fused
)


# ------------------------------------------------------------------------------------------------------------- the model


def _pair(size) -> tuple[int, int]:
    """A window's rows and columns, as max_pool2d reads them; zeros where it refuses."""
    sizes = tuple(size) if isinstance(size, (tuple, list)) else (size,)
    if len(sizes) not in (1, 2) or any(type(each) is not int for each in sizes):
        return 0, 0
    return sizes[0], sizes[-1]


class Conv2dGroupNormScaleMaxPoolClampNew(Twin, Conv2dGroupNormScaleMaxPoolClamp):
    __doc__ = Conv2dGroupNormScaleMaxPoolClamp.__doc__
    submodules = {"conv": nn.Conv2d, "group_norm": nn.GroupNorm, "maxpool": nn.MaxPool2d}
    operands = ("conv.weight", "conv.bias", "group_norm.weight", "group_norm.bias", "scale")
    constants = {
        "group_norm.num_groups": int,
        "maxpool.kernel_size": _pair,
        "clamp_min": float,
        "clamp_max": float,
        "group_norm.eps": float,
    }
    epilogue, fused = epilogue, fused

    def _tail_raises(self, x, size):
        fits = all(0 < window <= extent for window, extent in zip(_pair(self.maxpool.kernel_size), size))
        return not fits or operators.group_norm_raises(x, self.conv.weight, self.group_norm, size)

    def _tail_obstacle(self):
        pool = self.maxpool
        plain = not (pool.padding or pool.ceil_mode or pool.return_indices) and pool.dilation == 1
        if not plain or pool.stride != pool.kernel_size:
            return "maxpool has another stride than its size, padding, dilation, ceil_mode or return_indices"
        return self._not_by_channel("scale")

    def _fused_obstacle(self, x, dtype):
        return tiling.strips_obstacle(x, self.conv.weight, dtype, _pair(self.maxpool.kernel_size))

    def _training_obstacle(self, x):
        return tiling.strips_training_obstacle(x, self.conv.weight, _pair(self.maxpool.kernel_size))

    @staticmethod
    def _autocast_tail(parameter, dtype):
        return torch.float32


PROBLEM = Problem(
    NAME,
    number=85,
    Model=Conv2dGroupNormScaleMaxPoolClamp,
    ModelNew=Conv2dGroupNormScaleMaxPoolClampNew,
    init_inputs=(8, 64, 3, 16, (64, 1, 1), 4, 0.0, 1.0),
    input_shape=(128, 8, 128, 128),
    cpu_batch_size=8,
)
