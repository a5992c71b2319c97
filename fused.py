"""The `fused` variants on a GPU: when they apply, and how their kernels (kernels/<name>_fused.cu) are called.

`<name>(x, weight, …)` runs a problem's kernels, which tiling.py plans; its obstacles say why they can't run, or None. A build serves one set of channels, kernel size and pool. The kernels compute forward only and
keep nothing for backward. What they do, and how exactly, stands at the head of each .cu file.
"""

from __future__ import annotations

import os

import torch
from torch import Tensor

import inline_loader
import tiling

_CTYPES = {
    torch.float32: "float",
    torch.float64: "double",
    torch.float16: "half_t",
    torch.bfloat16: "bfloat16_t",
}


def element_types(value: torch.dtype, out: torch.dtype) -> dict[str, str]:
    """What tells a build of any kernels the dtypes of the convolution and of the result (kernels/scalar.h)."""
    return {"VALUE_T": _CTYPES[value], "OUTPUT_T": _CTYPES[out]}


def _load(name: str, **defines) -> inline_loader.Operators:
    return inline_loader.load(f"{name}_fused", device="cuda", defines=defines)


# ------------------------------------------------------------------------------------- 31: conv2d_min_add_multiply


def allows_tf32() -> bool:
    """May a GPU's convolutions run TF32? By torch's newer setting where there is one: once it is set, reading the older may raise."""
    library = torch.backends.cudnn
    allowed = library.conv.fp32_precision == "tf32" if hasattr(library, "conv") else library.allow_tf32
    return allowed and library.enabled and os.environ.get("NVIDIA_TF32_OVERRIDE") != "0"


def may_run_tf32(x: Tensor) -> bool:
    """May the library's convolution of x, on a GPU, run TF32?"""
    return (
        x.dtype == torch.float32 and allows_tf32() and tiling.device_properties(x.device.index)[0] >= (8, 0)
    )


def _is_split(x: Tensor, weight: Tensor) -> bool:
    """Do float32 operands need two float16 parts? One is as exact as TF32, which is what eager runs where it is allowed and
    where there are channels enough (observed with cuDNN: always from 64 to 128 channels on, but for filters one column wide;
    benchmarks/results/trials/tf32.json)."""
    C, channels, _, width = weight.shape
    eager_runs_tf32 = may_run_tf32(x) and channels >= 64 and C >= 128 and width > 1
    return x.dtype == torch.float32 and not eager_runs_tf32


def _conv2d_min_add_multiply_sizes(weight: Tensor, split: bool) -> tuple[int, int, int, int]:
    """Channels in and out as the kernels pad them, channels in per block, bytes of shared memory of the mma.sync way."""
    (C, channels, kh, kw), parts = weight.shape, 2 if split else 1
    group = min(tiling.ceil_div(channels, 16) * 16, 64 // parts)
    block = 128 if C > 64 else 64
    weights = 3 * (group // 16) * parts * (block // 16) * 32
    shared = max(16 * (group // 8 * parts * kh * (127 + kw) + weights), block // 64 * 2 * 4608)
    return tiling.ceil_div(channels, group) * group, tiling.ceil_div(C, block) * block, group, shared


def conv2d_min_add_multiply_obstacle(x: Tensor, weight: Tensor, dtype: torch.dtype) -> str | None:
    obstacle = tiling.fused_obstacle(x, dtype)
    if (
        obstacle is None
        and _conv2d_min_add_multiply_sizes(weight, dtype == torch.float32)[3]
        > tiling.device_properties(x.device.index)[1]
    ):
        obstacle = "the kernel's window does not fit in shared memory"
    return obstacle


def conv2d_min_add_multiply(
    x: Tensor,
    weight: Tensor,
    conv_bias: Tensor,
    bias: Tensor,
    out_dtype: torch.dtype,
    constant: float,
    scale: float,
) -> Tensor:
    """y (N, C, H', W'); conv_bias and bias as the kernels read them."""
    x, split = x.contiguous(), _is_split(x, weight)
    (N, _, H, W), (C, _, kh, kw), parts = x.shape, weight.shape, 2 if split else 1
    padded_in, padded_out, group, _ = _conv2d_min_add_multiply_sizes(weight, split)
    wgmma = not split and padded_in == group and _wgmma_takes(x, weight, out_dtype, group)
    # The workspace: scales, then packed weights, then x packed to float16 unless wgmma reads x itself.
    sizes = [4 * padded_out, 4 * N, 2 * parts * padded_out * padded_in * kh * kw]
    workspace = sum(tiling.ceil_div(size, 256) * 256 for size in sizes) + (
        0 if wgmma else 2 * parts * N * padded_in * H * W
    )
    defines = {
        "SPLIT": int(split),
        "WGMMA": int(wgmma),
        **element_types(x.dtype, out_dtype),
        **tiling.spatial_defines(weight),
    }
    kernels = _load("conv2d_min_add_multiply", **defines)
    y = x.new_empty(N, C, H - kh + 1, W - kw + 1, dtype=out_dtype)
    scratch = torch.empty(workspace, dtype=torch.uint8, device=x.device)
    kernels.forward(y, scratch, x, weight.contiguous(), conv_bias, bias, constant, scale, workspace, N, H, W)
    return y


def _wgmma_takes(x: Tensor, weight: Tensor, out_dtype: torch.dtype, group: int) -> bool:
    """Can x be convolved by wgmma, in one group of channels? The kernels rely on it, and don't compile where it doesn't fit."""
    (N, channels, H, W), (_, _, kh, kw) = x.shape, weight.shape
    capability, optin, *_ = tiling.device_properties(x.device.index)
    pitch, products = (
        127 + kw,
        kh * kw * group // 16,
    )  # pixels of a tile's row in shared memory; wgmma's of depth 16
    ring = (kh + 1) * (group // 8 * pitch * 16 + 16)  # rows, each with two barriers
    raw = 2 * 16 * tiling.ceil_div(channels * tiling.ceil_div(pitch * x.element_size(), 4), 4)
    staging = 8 * 16 * (128 * out_dtype.itemsize + 32 + 16)  # of a channel's results and its tail
    weights = 2 * 2048 * max(0, products - 30)  # that two warpgroups don't keep in registers
    fits = products <= 36 and ring + raw + staging + weights <= optin
    tiles = N * (H - kh + 1) * tiling.ceil_div(W - kw + 1, 128)
    counts = tiles < 2**31 and H * W < 2**31  # in int
    words = W * x.element_size() % 4 == 0 and x.data_ptr() % 4 == 0  # rows are copied by 4 bytes
    return capability == (9, 0) and fits and counts and words


# ----------------------------------------------------- 79 and 83, whose kernels share the convolution of convolution3d.cuh

# Bytes of shared memory that the kernels' own arrays may take, which they assert.
INSTANCE_NORM_STATIC_SHARED, DROPOUT_STATIC_SHARED = 3584, 33 << 10


def conv3d_multiply_instancenorm_clamp_multiply_max(
    x: Tensor,
    weight: Tensor,
    conv_bias: Tensor,
    multiplier: Tensor,
    out_dtype: torch.dtype,
    low: float,
    high: float,
    eps: float,
) -> Tensor:
    """y (N, D', H', W'); conv_bias and multiplier as the kernels read them."""
    N, _, D, H, W = x.shape
    plan = tiling.plan_volume(x, weight, INSTANCE_NORM_STATIC_SHARED, vectors=False)
    y = x.new_empty(
        N, *(size - extent + 1 for size, extent in zip(x.shape[2:], weight.shape[2:])), dtype=out_dtype
    )
    held = tiling.held_values(plan, x, weight)
    outputs = y, conv_bias.new_empty(N, plan.slots, weight.shape[0], 2), conv_bias.new_empty(held)
    defines = tiling.volume_defines(plan, weight, x.element_size(), INSTANCE_NORM_STATIC_SHARED)
    kernels = _load(
        "conv3d_multiply_instancenorm_clamp_multiply_max", **element_types(x.dtype, out_dtype), **defines
    )
    tensors, constants = (x.contiguous(), weight.contiguous(), conv_bias, multiplier), (low, high, eps)
    kernels.forward(*outputs, *tensors, *constants, held, N, D, H, W, *plan.launch)
    return y


def conv3d_groupnorm_min_clamp_dropout(
    x: Tensor, weight: Tensor, parameters: list[Tensor], out_dtype: torch.dtype, seed: Tensor, groups: int, low: float, high: float,
    p: float, eps: float,
) -> Tensor:  # fmt: skip
    """y (N, C, D', H', W'); parameters: conv_bias, norm_weight, norm_bias, as the kernels read them."""
    (N, _, D, H, W), (C, _, kd, kh, kw) = x.shape, weight.shape
    plan = tiling.plan_volume(x, weight, DROPOUT_STATIC_SHARED, vectors=True)
    y = x.new_empty(N, C, D - kd + 1, H - kh + 1, W - kw + 1, dtype=out_dtype)
    scratch = (
        *(parameters[0].new_empty(N, *size) for size in ((plan.slots, C, 2), (C, 4))),
        x.new_empty(N, dtype=torch.int32),
    )
    defines = tiling.volume_defines(plan, weight, x.element_size(), DROPOUT_STATIC_SHARED)
    kernels = _load("conv3d_groupnorm_min_clamp_dropout", **element_types(x.dtype, out_dtype), **defines)
    constants, sizes = (low, high, p, eps, 0, groups), (N, D, H, W, *plan.launch)
    kernels.forward(y, *scratch, x.contiguous(), weight.contiguous(), *parameters, seed, *constants, *sizes)
    return y


# ----------------------------------------------------------------- 85: conv2d_groupnorm_scale_maxpool_clamp


def conv2d_groupnorm_scale_maxpool_clamp(
    x: Tensor, weight: Tensor, parameters: list[Tensor], out_dtype: torch.dtype, groups: int, pool: list[int], low: float,
    high: float, eps: float,
) -> Tensor:  # fmt: skip
    """y (N, C, PH, PW); parameters: conv_bias, norm_weight, norm_bias, scale, as the kernels read them."""
    (N, _, H, W), (C, _, kh, kw) = x.shape, weight.shape
    plan = tiling.plan_strips(x, weight, pool)
    y = x.new_empty(N, C, (H - kh + 1) // pool[0], (W - kw + 1) // pool[1], dtype=out_dtype)
    extreme, (mean, m2) = parameters[0].new_empty(y.shape), parameters[0].new_empty(2, N, C)
    group_mean, group_rstd = parameters[0].new_empty(2, N, groups)
    partial = parameters[0].new_empty(N, C, plan.tiles * plan.strips, 3)
    defines = {**element_types(x.dtype, out_dtype), **tiling.strip_defines(plan, weight, pool)}
    kernels = _load("conv2d_groupnorm_scale_maxpool_clamp", **defines)
    outputs = y, extreme, mean, m2, group_mean, group_rstd, partial
    sizes = N, groups, H, W, *plan.launch
    kernels.forward(*outputs, x.contiguous(), weight.contiguous(), *parameters, low, high, eps, *sizes)
    return y
