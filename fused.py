"""The `fused` variants on a GPU: when they apply, and how their kernels (kernels/<name>_fused.cu) are called.

Each problem has a pair of functions: `<name>_obstacle(x, weight, dtype, …)` says why the fused kernels can't run in that dtype, or None; and
`<name>(x, weight, …)` runs them. A build serves one set of channels, kernel size and pool. The kernels compute forward only and
keep nothing for backward. What they do, and how exactly, stands at the head of each .cu file.
"""

from __future__ import annotations

import functools
import math
import os

import torch
from torch import Tensor

import inline_loader
import planning_min_add

_CTYPES = {
    torch.float32: "float",
    torch.float64: "double",
    torch.float16: "half_t",
    torch.bfloat16: "bfloat16_t",
}


@torch.compiler.assume_constant_result
def _device(index: int) -> tuple[tuple[int, int], int, int, int]:
    """Compute capability, shared memory that a block may ask for (bytes), multiprocessors, L2 cache (bytes)."""
    properties = torch.cuda.get_device_properties(index)
    capability = (properties.major, properties.minor)
    # shared_memory_per_block_optin is missing from torch 2.8's properties; by architecture as in CUDA's programming guide
    optin = getattr(
        properties, "shared_memory_per_block_optin", (163 if capability in ((8, 0), (8, 7)) else 99) << 10
    )
    return capability, optin, properties.multi_processor_count, properties.L2_cache_size


def _ceil_div(a: int, b: int) -> int:
    return -(-a // b)


def element_types(value: torch.dtype, out: torch.dtype) -> dict[str, str]:
    """What tells a build of any kernels the dtypes of the convolution and of the result (kernels/scalar.h)."""
    return {"VALUE_T": _CTYPES[value], "OUTPUT_T": _CTYPES[out]}


def _spatial_defines(weight: Tensor) -> dict[str, int]:
    names = ("KERNEL_D", "KERNEL_H", "KERNEL_W")[5 - weight.dim() :]
    return {
        "CHANNELS_IN": weight.shape[1],
        "CHANNELS_OUT": weight.shape[0],
        **dict(zip(names, weight.shape[2:])),
    }


def _load(name: str, **defines) -> inline_loader.Operators:
    return inline_loader.load(f"{name}_fused", device="cuda", defines=defines)


def _common_obstacle(x: Tensor, dtype: torch.dtype, dtypes: tuple[torch.dtype, ...]) -> str | None:
    if dtype not in dtypes:
        return "the fused kernels are not written for this dtype"
    if _device(x.device.index)[0] < (8, 0):
        return "the fused kernels need a GPU of compute capability 8.0 or later"
    return None


# ------------------------------------------------------------------------------------- 31: conv2d_min_add_multiply


def allows_tf32() -> bool:
    """May a GPU's convolutions run TF32? By torch's newer setting where there is one: once it is set, reading the older may raise."""
    library = torch.backends.cudnn
    allowed = library.conv.fp32_precision == "tf32" if hasattr(library, "conv") else library.allow_tf32
    return allowed and library.enabled and os.environ.get("NVIDIA_TF32_OVERRIDE") != "0"


def may_run_tf32(x: Tensor) -> bool:
    """May the library's convolution of x, on a GPU, run TF32?"""
    return x.dtype == torch.float32 and allows_tf32() and _device(x.device.index)[0] >= (8, 0)


def _is_split(x: Tensor, weight: Tensor) -> bool:
    """Do float32 operands need two float16 parts? One is as exact as TF32, which is what eager runs where it is allowed and
    where there are channels enough (observed with cuDNN: always from 64 to 128 channels on, but for filters one column wide;
    benchmarks/results/trials/tf32.json)."""
    C, channels, _, width = weight.shape
    eager_runs_tf32 = may_run_tf32(x) and channels >= 64 and C >= 128 and width > 1
    return x.dtype == torch.float32 and not eager_runs_tf32


def conv2d_min_add_multiply_obstacle(x: Tensor, weight: Tensor, dtype: torch.dtype) -> str | None:
    obstacle = _common_obstacle(x, dtype, (torch.float32, torch.float16, torch.bfloat16))
    shared = planning_min_add.plan_mma(weight.shape, dtype == torch.float32).shared_bytes
    if obstacle is None and shared > _device(x.device.index)[1]:
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
    x, weight = x.contiguous(), weight.contiguous()
    (N, _, H, W), (C, _, kh, kw) = x.shape, weight.shape
    capability, optin, *_ = _device(x.device.index)
    device = {"aligned": x.data_ptr() % 4 == 0, "capability": capability, "optin": optin}
    sizes = x.shape, weight.shape, x.element_size(), out_dtype.itemsize
    plan = planning_min_add.plan(*sizes, split=_is_split(x, weight), **device)
    defines = {**element_types(x.dtype, out_dtype), **_spatial_defines(weight), **plan.defines}
    kernels = _load("conv2d_min_add_multiply", **defines)
    y = x.new_empty(N, C, H - kh + 1, W - kw + 1, dtype=out_dtype)
    workspace = planning_min_add.workspace_bytes(plan, x.shape, weight.shape)
    scratch = torch.empty(workspace, dtype=torch.uint8, device=x.device)
    kernels.forward(y, scratch, x, weight, conv_bias, bias, constant, scale, workspace, N, H, W)
    return y


# ----------------------------------------------------- 79 and 83, whose kernels share the convolution of convolution3d.cuh

_WEIGHT_REGISTERS = 90  # leave room for the rest
_HELD_SHARE = (
    0.25  # of the L2 cache, for sums that 79's kernel then need not compute again; the rest is for x
)


def _pitch(width: int) -> int:
    """Pixels from row to row in shared memory: rows start in different banks. As in convolution3d.cuh, in terms that stay symbolic."""
    padded = _ceil_div(width, 4) * 4
    return padded + min((12 - padded) % 32, (24 - padded) % 32)


def _block(rows: int, W: int, channels: int, itemsize: int, kd: int, kh: int, kw: int) -> tuple[int, int]:
    """What a block of `rows` output rows takes: pixels of input in its ring, and bytes of shared memory."""
    words = channels if itemsize == 4 else _ceil_div(channels, 2)  # of 4 bytes, of a pixel in the ring
    filters = _ceil_div(16 * channels * kd * kh * kw, words)  # they pass through the ring
    stage = _ceil_div(max((kd + 3) * (rows + kh - 1) * _pitch(W), filters), 256) * 256
    pixels = (rows + kh - 1) * _ceil_div(W, 8) * 8
    static = 36 << 10  # the kernels' own arrays
    return stage, 4 * words * stage + 3 * channels * pixels * itemsize + 2 * (
        rows * (W - kw + 1) + 32 + pixels
    ) + static


def _fits(x: Tensor, weight: Tensor) -> bool:
    """Is there a tiling, for stores of 16 bytes too? The fewest rows decide. A trace with dynamic shapes asks this, so it asks for
    four rows first: where they fit, as they mostly do, one bound on W is its only guard."""
    (_, channels, _, H, W), kernel, optin = x.shape, weight.shape[2:], _device(x.device.index)[1]
    OH, OW = H - kernel[1] + 1, W - kernel[2] + 1
    for rows in (4, 2, 1):
        if (rows * OW % 4 == 0 or OH * OW % 4 > 0) and _block(rows, W, channels, x.element_size(), *kernel)[
            1
        ] <= optin:
            return True
    return False


def _tiling(x: Tensor, weight: Tensor, fours: bool) -> tuple[int, int, int, int]:
    """How many output rows and planes a block computes, how many blocks a sample has, and pixels of input that a block holds;
    for sizes that fit. `fours`: rows · W' is a multiple of 4 if H' · W' is, for stores of 16 bytes."""
    _, optin, multiprocessors, _ = _device(x.device.index)
    return _conv3d_tiling(*x.shape, x.element_size(), *weight.shape[2:], fours, optin, multiprocessors)


@functools.lru_cache(None)
def _conv3d_tiling(
    N: int,
    channels: int,
    D: int,
    H: int,
    W: int,
    itemsize: int,
    kd: int,
    kh: int,
    kw: int,
    fours: bool,
    optin: int,
    multiprocessors: int,
) -> tuple[int, int, int, int]:
    """What keeps all multiprocessors busy with the fewest rows and planes read twice; a block fills one."""
    OD, OH, OW = D - kd + 1, H - kh + 1, W - kw + 1
    unit = 4 // math.gcd(OW, 4) if fours and OH * OW % 4 == 0 else 1
    best = None
    for slabs in range(1, OH + 1):
        rows = _ceil_div(_ceil_div(OH, slabs), unit) * unit
        stage, shared = _block(rows, W, channels, itemsize, kd, kh, kw)
        if shared > optin:
            continue
        for chunks in (1, 2, 4, 8):
            depth = _ceil_div(OD, chunks)
            slots = _ceil_div(OH, rows) * _ceil_div(OD, depth)
            work = _ceil_div(N * slots, multiprocessors) * (rows + kh - 1) * (depth + kd + 1)
            if best is None or work < best[0]:
                best = work, (rows, depth, slots, stage)
    return best[1]


def conv3d_obstacle(x: Tensor, weight: Tensor, dtype: torch.dtype) -> str | None:
    """For 79 and 83 alike."""
    obstacle = _common_obstacle(x, dtype, (torch.float32, torch.float16, torch.bfloat16))
    C, channels, *kernel = weight.shape
    half = (
        channels + 1
    ) // 2  # registers of weights per step of 4 taps: 4 for each pair of channels, 2 for a single one
    registers = _ceil_div(math.prod(kernel), 4) * (4 * half + 2 * (channels - half))
    positions = math.prod([size - extent + 1 for size, extent in zip(x.shape[2:], kernel)])
    if obstacle is None and (channels > 4 or C % 16 or C > 960):
        obstacle = "the fused kernels take up to 4 channels in, and 16, 32, … 960 out"
    if obstacle is None and registers > _WEIGHT_REGISTERS:
        obstacle = "the filter does not fit in registers"
    if obstacle is None and positions < 64:
        obstacle = "the fused kernels' statistics are exact enough from 64 positions on"
    if obstacle is None and (math.prod(x.shape[3:]) >= 2**24 or x.shape[2] >= 2**15 or not _fits(x, weight)):
        obstacle = "the planes are too large for shared memory"
    return obstacle


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
    rows, depth, slots, stage = _tiling(x, weight, fours=False)
    y = x.new_empty(
        N, *(size - extent + 1 for size, extent in zip(x.shape[2:], weight.shape[2:])), dtype=out_dtype
    )
    _, _, multiprocessors, l2_cache = _device(x.device.index)
    holds = (slots == 1 or N * slots <= multiprocessors) and weight.shape[0] == 16  # as the kernel does
    held = min(int(_HELD_SHARE * l2_cache) // 4, N * 16 * math.prod(x.shape[2:])) if holds else 0
    outputs = y, conv_bias.new_empty(N, slots, weight.shape[0], 2), conv_bias.new_empty(held)
    defines = {**element_types(x.dtype, out_dtype), **_spatial_defines(weight), "STAGE_PIXELS": stage}
    kernels = _load("conv3d_multiply_instancenorm_clamp_multiply_max", **defines)
    kernels.forward(
        *outputs,
        x.contiguous(),
        weight.contiguous(),
        conv_bias,
        multiplier,
        low,
        high,
        eps,
        held,
        N,
        D,
        H,
        W,
        rows,
        depth,
    )
    return y


def conv3d_groupnorm_min_clamp_dropout(
    x: Tensor, weight: Tensor, parameters: list[Tensor], out_dtype: torch.dtype, seed: Tensor, groups: int, low: float, high: float,
    p: float, eps: float,
) -> Tensor:  # fmt: skip
    """y (N, C, D', H', W'); parameters: conv_bias, norm_weight, norm_bias, as the kernels read them."""
    (N, _, D, H, W), (C, _, kd, kh, kw) = x.shape, weight.shape
    rows, depth, slots, stage = _tiling(x, weight, fours=True)
    y = x.new_empty(N, C, D - kd + 1, H - kh + 1, W - kw + 1, dtype=out_dtype)
    scratch = (
        *(parameters[0].new_empty(N, *size) for size in ((slots, C, 2), (C, 4))),
        x.new_empty(N, dtype=torch.int32),
    )
    defines = {**element_types(x.dtype, out_dtype), **_spatial_defines(weight), "STAGE_PIXELS": stage}
    kernels = _load("conv3d_groupnorm_min_clamp_dropout", **defines)
    constants, sizes = (low, high, p, eps, 0, groups), (N, D, H, W, rows, depth)
    kernels.forward(y, *scratch, x.contiguous(), weight.contiguous(), *parameters, seed, *constants, *sizes)
    return y


# ----------------------------------------------------------------- 85: conv2d_groupnorm_scale_maxpool_clamp


def conv2d_groupnorm_scale_maxpool_clamp_obstacle(
    x: Tensor, weight: Tensor, dtype: torch.dtype, pool: tuple[int, int]
) -> str | None:
    obstacle = _common_obstacle(x, dtype, (torch.float32, torch.float16, torch.bfloat16))
    (C, channels, kh, kw), units = weight.shape, weight.shape[3] * _ceil_div(weight.shape[1], 8)
    if obstacle is None and (channels > 16 or C > 128 or C % 16):
        obstacle = "the fused kernels take up to 16 channels in, and 16, 32, … 128 out"
    if obstacle is None and (min(pool) < 2 or max(pool) > 8):
        obstacle = "the fused kernels pool windows of 2 to 8 rows and columns"
    if obstacle is None and (kw > 9 or kh * (units // 2 * 2 + units % 2) > 25):
        obstacle = "the filter does not fit in registers"
    return obstacle


def conv2d_groupnorm_scale_maxpool_clamp(
    x: Tensor, weight: Tensor, parameters: list[Tensor], out_dtype: torch.dtype, groups: int, pool: list[int], low: float,
    high: float, eps: float,
) -> Tensor:  # fmt: skip
    """y (N, C, PH, PW); parameters: conv_bias, norm_weight, norm_bias, scale, as the kernels read them."""
    (N, _, H, W), (C, _, kh, kw) = x.shape, weight.shape
    width, pooled = W - kw + 1, ((H - kh + 1) // pool[0], (W - kw + 1) // pool[1])
    multiprocessors = _device(x.device.index)[2]
    tiles = (
        1 if width <= 129 - kw else _ceil_div(width, 128 // pool[1] * pool[1])
    )  # of 128 columns, of whole windows
    strips = _strips(N * _ceil_div(C, 64) * tiles, pooled[0], pool[0], kh, multiprocessors)
    y = x.new_empty(N, C, *pooled, dtype=out_dtype)
    extreme, (mean, m2) = parameters[0].new_empty(y.shape), parameters[0].new_empty(2, N, C)
    group_mean, group_rstd = parameters[0].new_empty(2, N, groups)
    partial = parameters[0].new_empty(N, C, tiles * strips, 3)
    defines = {
        **element_types(x.dtype, out_dtype),
        **_spatial_defines(weight),
        "POOL_H": pool[0],
        "POOL_W": pool[1],
        "SEVERAL_TILES": int(tiles > 1),
    }
    kernels = _load("conv2d_groupnorm_scale_maxpool_clamp", **defines)
    outputs = y, extreme, mean, m2, group_mean, group_rstd, partial
    kernels.forward(
        *outputs, x.contiguous(), weight.contiguous(), *parameters, low, high, eps, N, groups, H, W, strips
    )
    return y


@functools.lru_cache(None)
def _strips(work: int, pooled_rows: int, pool_height: int, kernel_height: int, multiprocessors: int) -> int:
    """Into how many strips of rows an image is cut: what keeps all multiprocessors busy with the fewest rows read twice."""

    def rows(
        pairs: int,
    ) -> (
        int
    ):  # that the busiest multiprocessor reads, if each of a block's two teams takes 1 of `pairs` strips
        return _ceil_div(work * pairs, multiprocessors) * (
            _ceil_div(pooled_rows, 2 * pairs) * pool_height + kernel_height + 3
        )

    pairs = min(range(1, max(2, _ceil_div(2 * multiprocessors, work) + 1)), key=rows)
    return _ceil_div(pooled_rows, _ceil_div(pooled_rows, min(pooled_rows, 2 * pairs)))
