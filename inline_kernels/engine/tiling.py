"""How large the tiles of the fused kernels are: what a block computes, what it keeps in shared memory, and what fits nowhere.

One truth for the kernels (kernels/*_fused.cu) and for whoever launches them. What is compiled for, or allocated, is planned here
alone; a kernel takes it by its launcher's arguments and its build's definitions, and asserts at compile time, in the words of these,
all that it relies on. What only a launch depends on, its launcher plans.

- volumes: a 3-D convolution with few channels in. A block walks along depth, with a ring of input planes in shared memory.
  Backward: likewise, for its gradient and the weight's. (Tiles of the gradient of x are its launcher's.)
- strips: a 2-D convolution that a pool follows. Only what can run: a launcher plans its strips of rows itself.
- gemm: a 2-D convolution with many channels, as a product of the weights with shifted rows of x.

An `…_obstacle(x, weight, …)` says why such kernels can't run, or None. torch.compile traces it, with sizes that may be symbolic, so
it asks for as few of them as it can. A plan exists wherever there is no obstacle; it is made of ints, and kept.

Words. x (N, C_in, [D,] H, W) and weight (C_out, C_in, [kd,] kh, kw) are the convolution's; its result has the extents D', H', W' =
D - kd + 1, …. A `pixel` is all input channels at one position; in shared memory it is some words of 4 bytes.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor


class Device(NamedTuple):
    capability: tuple[int, int]
    shared: int  # bytes of shared memory that a block may ask for
    multiprocessors: int
    l2_cache: int  # bytes


@torch.compiler.assume_constant_result
def device_properties(index: int) -> Device:
    properties = torch.cuda.get_device_properties(index)
    capability = (properties.major, properties.minor)
    # torch 2.8 does not say what a block may ask for; CUDA's programming guide does, by architecture
    by_architecture = (163 if capability in ((8, 0), (8, 7)) else 99) << 10
    shared = getattr(properties, "shared_memory_per_block_optin", by_architecture)
    return Device(capability, shared, properties.multi_processor_count, properties.L2_cache_size)


def capability(x: Tensor) -> tuple[int, int]:
    return device_properties(x.device.index).capability


def ceil_div(a: int, b: int) -> int:
    return -(-a // b)


def spatial_defines(filters: Sequence[int]) -> dict[str, int]:
    """What tells a build of any kernels the convolution's channels and kernel size."""
    names = ("CHANNELS_OUT", "CHANNELS_IN", *("KERNEL_D", "KERNEL_H", "KERNEL_W")[5 - len(filters) :])
    return dict(zip(names, filters))


def first_obstacle(obstacles: Callable[..., Iterable[tuple[object, str]]]) -> Callable[..., str | None]:
    """Of a function that yields pairs (is an obstacle there?, what it is), one that returns the first that is there, or None; it looks
    at nothing that comes after that."""

    @functools.wraps(obstacles)
    def first(*arguments):
        return next((obstacle for is_there, obstacle in obstacles(*arguments) if is_there), None)

    return first


def _fused_obstacles(x: Tensor, dtype: torch.dtype) -> Iterable[tuple[object, str]]:
    """What stands in the way of any fused kernel, if it sees x in `dtype`."""
    taken = torch.float32, torch.float16, torch.bfloat16
    yield dtype not in taken, "the fused kernels are not written for this dtype"
    yield capability(x) < (8, 0), "the fused kernels need a GPU of compute capability 8.0 or later"


# ---------------------------------------------------------------------------------------------------- volumes

_PLANES_AHEAD = 3  # of input, in the ring beside the kd that an output plane needs
_RAW_PLANES = 3  # of input, on their way from global memory
_TURN = 32  # output positions that a warp computes side by side
_WEIGHT_REGISTERS = 90  # of a thread; more leave no room for the rest
_HELD_SHARE = 0.25  # of the L2 cache, for sums that are then not computed again; the rest is for x


class VolumeTiling(NamedTuple):
    """One launch's plan; a block fills a multiprocessor."""

    rows: int  # output rows that a block computes …
    depth: int  # … of so many output planes
    slots: int  # blocks of a sample
    pitch: int  # pixels from one row to the next in the ring
    stage: int  # pixels that the ring has room for
    raw: int  # elements that a channel of a raw plane has room for
    shared: int  # bytes of dynamic shared memory

    @property
    def launch(self) -> tuple[int, int, int, int, int]:
        """The launchers' last arguments."""
        return self.rows, self.depth, self.pitch, self.raw, self.shared


@first_obstacle
def volume_obstacle(x: Tensor, weight: Tensor, dtype: torch.dtype, static_shared: int):
    """`static_shared`: bytes of shared memory that the kernel's own arrays may take, which it asserts."""
    yield from _fused_obstacles(x, dtype)
    (C, channels, *kernel), size = weight.shape, x.shape[2:]
    few = channels <= 4 and C % 16 == 0 and C <= 960
    yield not few, "the fused kernels take up to 4 channels in, and 16, 32, … 960 out"
    pairs = (channels + 1) // 2
    # Per step of 4 taps and word of a pixel: 2 of highs; where the word has a high, 2 of lows, too.
    registers = ceil_div(math.prod(kernel), 4) * (4 * pairs + 2 * (channels - pairs))
    yield registers > _WEIGHT_REGISTERS, "the filter does not fit in registers"
    room = device_properties(x.device.index).shared - static_shared
    yield _input_strip_shared(weight) > room, "the filter does not fit in shared memory"
    positions = math.prod([extent - taps + 1 for extent, taps in zip(size, kernel)])
    yield positions < 64, "the fused kernels' statistics are exact enough from 64 positions on"
    too_large = size[1] * size[2] >= 2**24 or size[0] >= 2**15 or not volume_fits(x, weight, static_shared)
    yield too_large, "the planes are too large for shared memory"


def volume_fits(x: Tensor, weight: Tensor, static_shared: int) -> bool:
    """Is there a plan, for stores of 16 bytes too? The fewest rows decide. A trace with dynamic shapes asks this, so it asks for
    four rows first: where they fit, as they mostly do, one bound on W is its only guard."""
    room = device_properties(x.device.index).shared - static_shared
    OH, OW = x.shape[3] - weight.shape[3] + 1, x.shape[4] - weight.shape[4] + 1
    for rows in (4, 2, 1):
        whole_vectors = rows * OW % 4 == 0 or OH * OW % 4 > 0
        if whole_vectors and volume_layout(rows, x, weight)[-1] <= room:
            return True
    return False


def plan_volume(
    N: int, x: Tensor, weight: Tensor, static_shared: int, *, vectors: bool, staged: int = 0
) -> tuple[dict[str, int], VolumeTiling]:
    """A build's definitions, and what keeps all multiprocessors busy with the fewest rows and planes read twice, for N samples of sizes
    without an obstacle. `vectors`: a block's positions in a plane are a multiple of 4 wherever H'·W' is, for stores of 16 bytes.
    `staged`: bytes of shared memory that a block needs beside its tile's and its own arrays."""
    (_, _, *size), (_, _, kd, kh, kw), device = x.shape, weight.shape, device_properties(x.device.index)
    OD, OH, OW = size[0] - kd + 1, size[1] - kh + 1, size[2] - kw + 1
    unit, best = 4 // math.gcd(OW, 4) if vectors and OH * OW % 4 == 0 else 1, None
    for slabs in range(1, OH + 1):
        rows = ceil_div(ceil_div(OH, slabs), unit) * unit
        pitch, stage, raw, shared = volume_layout(rows, x, weight)
        if shared > device.shared - static_shared - staged:
            continue
        for chunks in (1, 2, 4, 8):
            depth = ceil_div(OD, chunks)
            slots = ceil_div(OH, rows) * ceil_div(OD, depth)
            work = ceil_div(N * slots, device.multiprocessors) * (rows + kh - 1) * (depth + kd + 1)
            if best is None or work < best[0]:
                best = work, VolumeTiling(rows, depth, slots, pitch, stage, raw, shared)
    _, plan = best
    # What a build takes from the plan, and what the plan assumes of the kernel.
    planes = {"RING_PLANES": kd + _PLANES_AHEAD, "RAW_PLANES": _RAW_PLANES, "STATIC_SHARED": static_shared}
    pixels = {"STAGE_PIXELS": plan.stage, "PIXEL_WORDS": _pixel_words(x), "TURN_POSITIONS": _TURN}
    return {**spatial_defines(weight.shape), **planes, **pixels}, plan


def held_values(plan: VolumeTiling, x: Tensor, weight: Tensor) -> int:
    """How many float32 of scratch a kernel that needs its sums twice should have, so that they stay in the L2 cache: none where its
    blocks can't wait for one another, or come to more than 16 channels."""
    device, blocks = device_properties(x.device.index), x.shape[0] * plan.slots
    if weight.shape[0] != 16 or (plan.slots > 1 and blocks > device.multiprocessors):
        return 0
    return min(int(_HELD_SHARE * device.l2_cache) // 4, 16 * x.shape[0] * math.prod(x.shape[2:]))


def _pixel_words(x: Tensor) -> int:
    """Of 4 bytes, in the ring: two halves each; a float32 is two halves."""
    return x.shape[1] if x.element_size() == 4 else ceil_div(x.shape[1], 2)


def ring_pitch(width: int) -> int:
    """Pixels from row to row in the ring for rows of `width`: 12 or 24 modulo 32, so that the rows of a group of taps start in
    different banks; in terms that stay symbolic."""
    padded = ceil_div(width, 4) * 4
    return padded + min((12 - padded) % 32, (24 - padded) % 32)


def volume_layout(rows: int, x: Tensor, weight: Tensor) -> tuple[int, int, int, int]:
    """A block of `rows` output rows: pitch, stage, raw and shared of its VolumeTiling.

    Dynamic shared memory is the ring, of `stage` pixels; _RAW_PLANES raw planes; where each output position's pixel lies in a plane
    of the ring, and where each raw element's, in 2 bytes each. The stage is rounded up, because it is compiled for; through the
    ring pass the filters of 16 output channels, too, in float32, and their gradients, taps in eights.
    """
    (_, channels, _, _, W), (_, _, kd, kh, kw), words = x.shape, weight.shape, _pixel_words(x)
    pitch = ring_pitch(W)
    filters = ceil_div(16 * channels * ceil_div(kd * kh * kw, 8) * 8, words)  # in pixels
    stage = ceil_div(max((kd + _PLANES_AHEAD) * (rows + kh - 1) * pitch, filters), 256) * 256
    raw = (rows + kh - 1) * ceil_div(W, 8) * 8
    positions = ceil_div(rows * (W - kw + 1), _TURN) * _TURN
    shared = 4 * words * stage + _RAW_PLANES * channels * raw * x.element_size() + 2 * (positions + raw)
    return pitch, stage, raw, shared


# The backward pass: the same tiles, of which each leaves its convolution's gradient dv in scratch where x needs a gradient
# (kernels/grad/narrow3d_weight.cuh), and tiles of dx, which its launcher plans (kernels/grad/narrow3d_input.cuh).

BACKWARD_SHARED = 18 << 10  # bytes of those kernels' own arrays
_SAMPLES_BYTES = 114_000_000  # of dv of whole samples


class VolumeBackward(NamedTuple):
    tiles: VolumeTiling
    dv_slots: int  # of scratch, each for dv of a tile and 16 channels; none where x needs no gradient
    input_room: int  # bytes of dynamic shared memory that a block of dx may take

    @property
    def launch(self) -> tuple[int, ...]:
        """The launchers' last arguments."""
        return *self.tiles.launch, self.dv_slots, self.input_room


def plan_volume_backward(x: Tensor, weight: Tensor, *, dx: bool) -> tuple[dict[str, int], VolumeBackward]:
    """A build's definitions, and the plan where volume_obstacle finds nothing. dx: is the gradient of x wanted, too?"""
    N, C, OW = x.shape[0], weight.shape[0], x.shape[4] - weight.shape[4] + 1
    results = C * math.prod([extent - taps + 1 for extent, taps in zip(x.shape[2:], weight.shape[2:])])
    # As many samples as a launch has if x needs a gradient; the others' must not depend on that.
    samples = min(N, max(1, _SAMPLES_BYTES // (4 * results)))
    defines, tiles = plan_volume(samples, x, weight, BACKWARD_SHARED, vectors=False)
    defines["BACKWARD_SHARED"] = defines.pop("STATIC_SHARED")
    of_job, of_sample = 16 * _TURN * tiles.depth * ceil_div(tiles.rows * OW, _TURN), tiles.slots * C // 16
    dv_slots = of_sample * min(N, max(1, _SAMPLES_BYTES // (4 * of_job * of_sample))) if dx else 0
    room = device_properties(x.device.index).shared - BACKWARD_SHARED
    return defines, VolumeBackward(tiles, dv_slots, room)


def _input_strip_shared(weight: Tensor) -> int:
    """Bytes of dynamic shared memory of the smallest block of dx, of the rows that a warp computes and 8 columns: two stages of dv, the
    weights, scales, and where dv's fragments go."""
    C, channels, kd, kh, kw = weight.shape
    of_rows = ceil_div(ceil_div(channels, 2) * kd, 8)  # products with 16 rows, two of them a pair of channels
    pitch, stage_rows = ceil_div(kw + 7, 8) * 8, max(1, 8 // of_rows) + kh - 1
    fragments = stage_rows * (pitch // 8 + 2)
    return 2 * stage_rows * pitch * 64 + kh * kw * of_rows * 1024 + 8 * C + 40 * fragments


# ----------------------------------------------------------------------------------------------------- strips

_COLUMNS = 128  # of the result, that a team computes at a time: a tile
_CHANNELS = 64  # of the result, that a block computes
_TEAMS = 2  # of a block, each with a strip of its own
_STRIPS_STATIC_SHARED = 1 << 10  # bytes of the kernel's own arrays


@first_obstacle
def strips_obstacle(x: Tensor, weight: Tensor, dtype: torch.dtype, pool: tuple[int, int]):
    yield from _fused_obstacles(x, dtype)
    C, channels, kh, kw = weight.shape
    few = channels <= 16 and C <= 128 and C % 16 == 0
    yield not few, "the fused kernels take up to 16 channels in, and 16, 32, … 128 out"
    yield min(pool) < 2 or max(pool) > 8, "the fused kernels pool windows of 2 to 8 rows and columns"
    yield kw > 9 or kh * kw * ceil_div(channels, 8) > 25, "the filter does not fit in registers"
    yield not strips_fit(x, weight, pool, False), "the kernel's window does not fit in shared memory"


def strips_fit(x: Tensor, weight: Tensor, pool: tuple[int, int], saving: bool) -> bool:
    """Is there room for what the kernels keep in shared memory, and, where `saving`, for what they then keep for backward?"""
    room = device_properties(x.device.index).shared - _STRIPS_STATIC_SHARED
    return strips_shared(weight.shape[1], weight.shape[2], pool[1], saving) <= room


def strips_training_obstacle(x: Tensor, weight: Tensor, pool: tuple[int, int]) -> str | None:
    """Why the kernels can't compute all gradients that are asked for, where there is no obstacle to forward; or None."""
    fits = strips_fit(x, weight, pool, True) and (input_columns(x, weight, pool) or not x.requires_grad)
    return None if fits else "backward's windows or filters do not fit in shared memory"


def input_columns(x: Tensor, weight: Tensor, pool: tuple[int, int]) -> int:
    """Of v, that the kernel for x's gradient has in a tile; 0 where its filters leave no room."""
    room = device_properties(x.device.index).shared - (6 << 10)  # the kernel's own arrays
    columns = _COLUMNS // 2, _COLUMNS // 4, _COLUMNS // 8
    return next((each for each in columns if input_gradient_shared(weight, pool, each) <= room), 0)


def strips_defines(x: Tensor, weight: Tensor, pool: tuple[int, int], saving: bool) -> dict[str, int]:
    """A forward build's, for sizes without an obstacle; and what was assumed of the kernel's shared memory, which it asserts."""
    defines = {
        **_pooled_defines(weight, pool),
        "LONG_ROWS": int(x.shape[3] > _COLUMNS),
        "SAVING": int(saving),
    }
    dynamic = strips_shared(weight.shape[1], weight.shape[2], pool[1], saving)
    return defines | {"STATIC_SHARED": _STRIPS_STATIC_SHARED, "STRIPS_SHARED": dynamic}


def strips_backward_defines(x: Tensor, weight: Tensor, pool: tuple[int, int]) -> dict[str, int]:
    """A backward build's, likewise."""
    columns = input_columns(x, weight, pool) or _COLUMNS // 8
    shared = {"INPUT_COLUMNS": columns, "INPUT_SHARED": input_gradient_shared(weight, pool, columns)}
    return _pooled_defines(weight, pool) | shared


def _pooled_defines(weight: Tensor, pool: tuple[int, int]) -> dict[str, int]:
    return spatial_defines(weight.shape) | {"POOL_H": pool[0], "POOL_W": pool[1]}


def strips_shared(channels: int, kh: int, pool_width: int, saving: bool) -> int:
    """Bytes of dynamic shared memory. Of each team: kh + 1 rows of x, in pixels of 8 channels and two float16 per value, 8 pixels
    of them behind the tile; and the maxima that wait for their windows, of two neighbours where no window parts them, in float32,
    with a byte that says where each is from."""
    row = 2 * ceil_div(channels, 8) * (_COLUMNS + 8) * 16
    kept = 1 if pool_width % 2 == 0 else 2
    return _TEAMS * ((kh + 1) * row + _CHANNELS * (_COLUMNS // 2 + 4) * kept * (5 if saving else 4))


def input_gradient_shared(weight: Tensor, pool: tuple[int, int], columns: int) -> int:
    """Bytes of dynamic shared memory: filters and the composed one, and pixels of x, as two float16 per value; the selected positions'
    gradients and places; what columns give to those beside them, in float32."""
    C, channels, kh, kw = weight.shape
    planes, width, windows = ceil_div(channels, 8), columns + 2 * (kw - 1), columns // pool[1] + 2
    filters = 512 * (C // 16 * planes * kh * kw + planes**2 * kw * (2 * kh - 1))
    pixels, held = 32 * planes * (pool[0] + 2 * (kh - 1)) * width, windows * (C // 4 + 1) * 24
    return filters + pixels + held + 32 * planes * kw * (pool[0] + kh - 1) * width


# ------------------------------------------------------------------------------------------------------------------- gemm

_REGISTER_STEPS = 30  # by wgmma: products of depth 16 whose weights are in registers
_REGISTER_STEPS_OF_GRADIENT = 28  # where the consumers have 8 registers less


class GemmTiling(NamedTuple):
    """A build's plan, by wgmma or by mma.sync."""

    wgmma: bool
    split: bool  # is an operand the sum of two float16?
    group: int  # input channels that are in shared memory at a time
    block_channels: int  # output channels of a block
    stages: int  # of the pipeline through shared memory: a tap's weights by mma.sync, rows of input by wgmma
    shared_bytes: int  # dynamic; the convolution has no static
    tile_rows: int = 1  # output rows of a tile; more by mma.sync alone
    tile_width: int = _COLUMNS  # output pixels of a tile, part of a row
    register_steps: int = _REGISTER_STEPS


@first_obstacle
def gemm_obstacle(x: Tensor, weight: Tensor, dtype: torch.dtype):
    yield from _fused_obstacles(x, dtype)
    room = device_properties(x.device.index).shared
    needed = gemm_by_mma(weight.shape, dtype == torch.float32, room).shared_bytes
    yield needed > room, "the kernel's window does not fit in shared memory"


def plan_gemm(x: Tensor, weight: Tensor, out_dtype: torch.dtype, *, split: bool, aligned: bool) -> GemmTiling:
    """The plan for sizes without an obstacle. aligned: does x start at a multiple of 4 bytes?"""
    (N, channels, H, W), (_, _, kh, kw), itemsize = x.shape, weight.shape, x.element_size()
    one_group = channels <= 64 and kh * kw * ceil_div(channels, 16) <= 36
    counted_in_int = N * (H - kh + 1) * ceil_div(W - kw + 1, _COLUMNS) < 2**31 and H * W < 2**31
    whole_words = aligned and W * itemsize % 4 == 0
    plan = gemm_by_wgmma(weight.shape, itemsize, out_dtype.itemsize)
    if one_group and counted_in_int and whole_words and _runs_wgmma(x, split, plan.shared_bytes):
        return plan
    return gemm_by_mma(weight.shape, split, device_properties(x.device.index).shared)


def _runs_wgmma(x: Tensor, split: bool, shared_bytes: int) -> bool:
    """Has x's GPU wgmma and so much shared memory? Of split operands there are no such kernels."""
    capability, shared, *_ = device_properties(x.device.index)
    return not split and capability == (9, 0) and shared_bytes <= shared


def gemm_defines(plan: GemmTiling, filters: Sequence[int]) -> dict[str, int]:
    """What a build takes from the plan, and what the plan assumes of the kernel."""
    return spatial_defines(filters) | {name.upper(): int(value) for name, value in plan._asdict().items()}


def gemm_workspace(plan: GemmTiling, image: Sequence[int], filters: Sequence[int], saving: bool) -> int:
    """Bytes: exponents, largest magnitudes unless they are saved, packed weights; and packed x, unless wgmma reads x itself."""
    (N, channels, H, W), (outputs, _, kh, kw), operand_bytes = image, filters, 4 if plan.split else 2
    channels, outputs = _round_up(channels, plan.group), _round_up(outputs, plan.block_channels)
    sizes = 4 * outputs, 0 if saving else 4 * N, outputs * channels * kh * kw * operand_bytes
    packed_x = 0 if plan.wgmma else N * channels * H * W * operand_bytes
    return sum(_round_up(size, 256) for size in sizes) + packed_x


def gemm_saved(image: Sequence[int], filters: Sequence[int]) -> int:
    """Numbers of 32 bits that forward saves: largest magnitudes, and the gates of each strip and channel."""
    return _round_up(image[0], 32) + _strips(image, filters) * filters[0] * 4


def _strips(image: Sequence[int], filters: Sequence[int]) -> int:
    """Of 64 pixels of an output row."""
    (N, _, H, W), (_, _, kh, kw) = image, filters
    return N * (H - kh + 1) * ceil_div(W - kw + 1, 64)


_PIECE_BYTES = 64 << 20  # of packed gradients: what the L2 cache of a large GPU holds, or little more


def plan_weight_gradient(x: Tensor, weight: Tensor, split: bool) -> tuple[dict[str, int], int, int, int]:
    """A build's definitions, shares of the sums over positions, shares of the products, and the sums of each."""
    (C, channels, kh, kw), W = weight.shape, x.shape[3]
    multiprocessors = device_properties(x.device.index).multiprocessors
    # Values of 16 bits can't be copied in the background, which is what it wins by.
    wgmma = x.element_size() == 4 and _runs_wgmma(x, split, 227 << 10)
    # A block has 64 channels of either kind and some taps, of 3 rows at most; a filter's rows and columns are shared out evenly.
    taps = 3 if split else 9
    columns = ceil_div(kw, ceil_div(kw, taps))
    rows = ceil_div(kh, ceil_div(kh, min(taps // columns, 3)))
    blocks_out, strips = ceil_div(C, 64), _strips(x.shape, weight.shape)
    blocks = blocks_out * ceil_div(channels, 64) * ceil_div(kh, rows) * ceil_div(kw, columns)
    sums, shares = [
        max(1, min(n, strips)) for n in (8 * multiprocessors // blocks_out, multiprocessors // blocks)
    ]
    # By wgmma two warpgroups have as many taps each, and 64 channels of either kind.
    of_block = _round_up(rows * columns, 2) * 64 if wgmma else rows * columns * min(64, _round_up(C, 16))
    # Pixels that wgmma copies at a time: all strips begin at a multiple of so many, if x and dy begin at one of 16 bytes.
    of_x = 4 if wgmma and columns == kw and W % 4 == 0 else 1
    of_dy = 2 if wgmma and (W - kw + 1) % 2 == 0 else 1
    own = {"SPLIT": int(split), "WGMMA": int(wgmma), "COPIED_X": of_x, "COPIED_DY": of_dy}
    return spatial_defines(weight.shape) | own, sums, shares, blocks * of_block * 64


def plan_input_gradient(x: Tensor, weight: Tensor, split: bool) -> tuple[dict[str, int], int, int]:
    """A build's definitions, the samples of a piece, and bytes of workspace. By wgmma all samples are one piece: nothing is packed."""
    (N, _, H, W), (outputs, channels, kh, kw) = x.shape, weight.shape
    filters, height, width = (channels, outputs, kh, kw), H - kh + 1, W - kw + 1
    tiles, piece = input_gradient_by_wgmma(filters), N
    one_tile = channels <= 64 and W <= _COLUMNS
    counted_in_int = height * width < 2**31 and N * H < 2**31
    if not (one_tile and counted_in_int and _runs_wgmma(x, split, tiles.shared_bytes)):
        tiles = gemm_by_mma(filters, split, device_properties(x.device.index).shared)
        sample = _round_up(outputs, tiles.group) * height * width * (4 if split else 2)
        piece = max(1, min(N, _PIECE_BYTES // sample, 2**16 - 1))
    workspace = gemm_workspace(tiles, (piece, outputs, height, width), filters, True)
    return gemm_defines(tiles, filters) | {"TRANSPOSED": 1}, piece, workspace


def gemm_by_mma(filters: Sequence[int], split: bool, room: float = math.inf) -> GemmTiling:
    """room: bytes of shared memory. Where they are too few, a tile has fewer rows, or there are fewer input channels at a time."""
    (outputs, channels, kh, kw), operand_bytes, stages = filters, 4 if split else 2, 3
    group, block = min(_round_up(channels, 16), 128 // operand_bytes), 128 if outputs > 64 else 64
    rows = 128 // block  # four warps

    def operands() -> int:
        return ((kh + rows - 1) * (_COLUMNS + kw - 1) + stages * block) * group * operand_bytes

    while operands() > room and (rows > 1 or group > 16):
        rows, group = (1, group) if rows > 1 else (rows, group - 16)
    # Results replace operands: 16 channels of each warp, 64 floats and a gap.
    results = block // 64 * rows * 2 * 16 * 72 * 4
    return GemmTiling(False, split, group, block, stages, max(operands(), results), rows)


def gemm_by_wgmma(filters: tuple[int, ...], value_bytes: int, out_bytes: int) -> GemmTiling:
    (outputs, channels, kh, kw), stages = filters, filters[2] + 1
    group, block, pitch = _round_up(channels, 16), 128 if outputs > 64 else 64, _COLUMNS + kw - 1
    # Rows of operands, each with two barriers; two consumers' other weights, 64 channels each; 8 warps' results,
    # a gap and constants, 16 channels each; two rows of x as they are.
    rows = stages * (pitch * group * 2 + 16)
    weights = 2 * 64 * 16 * 2 * max(0, kh * kw * group // 16 - _REGISTER_STEPS)
    results = 8 * 16 * (_COLUMNS * out_bytes + 32 + 16)
    raw = 2 * _round_up(channels * ceil_div(pitch * value_bytes, 4) * 4, 16)
    return GemmTiling(True, False, group, block, stages, rows + weights + results + raw)


def input_gradient_by_wgmma(filters: Sequence[int]) -> GemmTiling:
    """The transposed convolution: rows of g, one copy of the weights that are not in registers, and for each of four producers 8 channels
    of a row's last strip of g, as it is."""
    (_, channels, kh, kw), stages = filters, filters[2] + 1
    group, pitch, in_registers = _round_up(channels, 16), _COLUMNS + kw - 1, _REGISTER_STEPS_OF_GRADIENT
    rows = stages * (pitch * group * 2 + 16)
    weights = 64 * 16 * 2 * max(0, kh * kw * group // 16 - in_registers)
    shared = rows + weights + 4 * 8 * 4 * ((_COLUMNS - kw) % 64 + 1)
    return GemmTiling(True, False, group, 64, stages, shared, register_steps=in_registers)


def _round_up(size: int, unit: int) -> int:
    return ceil_div(size, unit) * unit
