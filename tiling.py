"""How large the tiles of the fused kernels are: what a block computes, what it keeps in shared memory, and what fits nowhere.

One truth for the kernels (kernels/*_fused.cu) and for whoever launches them. What is compiled for, or allocated, is planned here
alone; a kernel takes it by its launcher's arguments and its build's definitions, and asserts at compile time, in the words of these,
all that it relies on. What only a launch depends on, its launcher plans.

- volumes: a 3-D convolution with few channels in. A block walks along depth, with a ring of input planes in shared memory.
  Backward: likewise, for its gradient and the weight's. (Tiles of the gradient of x are its launcher's.)
- strips: a 2-D convolution that a pool follows. A block walks down strips of rows, with a ring of input rows in shared memory.
  Backward: likewise strips, for sums over positions and over windows, and for the gradient of x.
- wide: a 2-D convolution with many channels, as a product of the weights with shifted rows of x. Here are the rules of where it runs
  alone: its tiles, scratch and launches are planned beside the kernels (kernels/conv/wide.cuh).

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
    dv_slots: int  # of scratch, each for dv of a tile and 16 channels; none where x needs no gradient …
    dv: int  # … with so many float32 in all
    jobs: int  # tiles and 16 channels
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
    of_job, of_sample = 16 * _TURN * tiles.depth * ceil_div(tiles.rows * OW, _TURN), tiles.slots * C // 16
    dv_slots = of_sample * min(N, max(1, _SAMPLES_BYTES // (4 * of_job * of_sample))) if dx else 0
    room = device_properties(x.device.index).shared - BACKWARD_SHARED
    return defines, VolumeBackward(tiles, dv_slots, dv_slots * of_job, N * of_sample, room)


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


class StripTiling(NamedTuple):
    """One launch's plan: the result's rows are cut into strips of whole windows, and its columns into tiles."""

    tiles: int  # of a row
    stride: int  # columns from one tile to the next; 0 where there is only one
    strips: int  # none of them empty
    rows: int  # pooled rows of a strip; the last has what is left
    saves: bool  # for backward, the places of what windows select

    @property
    def launch(self) -> tuple[int, int, int]:
        """The launcher's last arguments."""
        return self.tiles, self.strips, self.rows


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
    fits = strips_fit(x, weight, pool, True) and (_input_columns(x, weight, pool) or not x.requires_grad)
    return None if fits else "backward's windows or filters do not fit in shared memory"


def _input_columns(x: Tensor, weight: Tensor, pool: tuple[int, int]) -> int:
    """Of v, that the kernel for x's gradient has in a tile; 0 where its filters leave no room."""
    room = device_properties(x.device.index).shared - (6 << 10)  # the kernel's own arrays
    columns = _COLUMNS // 2, _COLUMNS // 4, _COLUMNS // 8
    return next((each for each in columns if input_gradient_shared(weight, pool, each) <= room), 0)


def plan_strips(x: Tensor, weight: Tensor, pool, saving: bool) -> tuple[dict[str, int], StripTiling]:
    """A build's definitions, and what keeps all multiprocessors busy with the fewest rows read twice, for sizes without an obstacle.
    saving: for backward, if there is room."""
    (N, _, H, W), (C, _, kh, kw) = x.shape, weight.shape
    multiprocessors = device_properties(x.device.index).multiprocessors
    # The only tile of a row has all columns of x that it needs. Others begin with a whole window.
    stride = 0 if W <= _COLUMNS else _COLUMNS // pool[1] * pool[1]
    tiles, pooled_rows = ceil_div(W - kw + 1, stride or _COLUMNS), (H - kh + 1) // pool[0]
    row = N * ceil_div(C, _CHANNELS) * tiles  # blocks, if a block had all rows

    def rows_read(pairs: int) -> int:  # by the busiest multiprocessor, of `pairs` strips for each team
        strip = ceil_div(pooled_rows, _TEAMS * pairs)
        return ceil_div(row * pairs, multiprocessors) * (strip * pool[0] + kh + 3)

    pairs = min(range(1, max(1, ceil_div(_TEAMS * multiprocessors, row)) + 1), key=rows_read)
    rows = ceil_div(pooled_rows, min(pooled_rows, _TEAMS * pairs))
    saves = saving and strips_fit(x, weight, pool, True)
    plan = StripTiling(tiles, stride, ceil_div(pooled_rows, rows), rows, saves)
    # What a build takes from the plan, and what the plan assumes of the kernel.
    tile = {"TILE_COLUMNS": _COLUMNS, "TILE_STRIDE": stride, "BLOCK_CHANNELS": _CHANNELS, "TEAMS": _TEAMS}
    dynamic = strips_shared(weight.shape[1], kh, pool[1], saves)
    shared = {"STATIC_SHARED": _STRIPS_STATIC_SHARED, "DYNAMIC_SHARED": dynamic, "SAVING": int(saves)}
    return {**spatial_defines(weight.shape), "POOL_H": pool[0], "POOL_W": pool[1], **tile, **shared}, plan


def strips_shared(channels: int, kh: int, pool_width: int, saving: bool) -> int:
    """Bytes of dynamic shared memory. Of each team: kh + 1 rows of x, in pixels of 8 channels and two float16 per value, 8 pixels
    of them behind the tile; and the maxima that wait for their windows, of two neighbours where no window parts them, in float32,
    with a byte that says where each is from."""
    row = 2 * ceil_div(channels, 8) * (_COLUMNS + 8) * 16
    kept = 1 if pool_width % 2 == 0 else 2
    return _TEAMS * ((kh + 1) * row + _CHANNELS * (_COLUMNS // 2 + 4) * kept * (5 if saving else 4))


class StripsBackward(NamedTuple):
    """One launch's plan of the backward kernels: rows of x, by as many as a window has, are cut into strips, a block each."""

    strips: int
    rows: int  # of as many rows of x as a window has
    scratch: int  # float64, for what is summed up in it and for the strips' parts, in float32
    input_columns: int  # of v, in a tile of the kernel for x's gradient; 0 where its filters leave no room
    input_launch: tuple[int, ...]  # its tiles and columns from one to the next, strips and rows of x


def input_gradient_shared(weight: Tensor, pool: tuple[int, int], columns: int) -> int:
    """Bytes of dynamic shared memory: filters and the composed one, and pixels of x, as two float16 per value; the selected positions'
    gradients and places; what columns give to those beside them, in float32."""
    C, channels, kh, kw = weight.shape
    planes, width, windows = ceil_div(channels, 8), columns + 2 * (kw - 1), columns // pool[1] + 2
    filters = 512 * (C // 16 * planes * kh * kw + planes**2 * kw * (2 * kh - 1))
    pixels, held = 32 * planes * (pool[0] + 2 * (kh - 1)) * width, windows * (C // 4 + 1) * 24
    return filters + pixels + held + 32 * planes * kw * (pool[0] + kh - 1) * width


def _composed_size(weight: Tensor, images: int) -> int:
    """Words that the kernels for x's gradient share: filters, composed ones and what they are made of."""
    C, channels, kh, kw = weight.shape
    planes, depth = ceil_div(channels, 8), 8 * ceil_div(channels, 8) * kh * kw
    of_image = 128 * planes**2 * kw * (2 * kh - 1) + depth * (depth + 1) + 8 * planes + 1
    return C * depth + C + images * of_image


def plan_strips_backward(x, weight, pool, groups: int) -> tuple[dict[str, int], StripsBackward]:
    """A build's definitions, and the plan."""
    (N, channels, H, W), (C, _, kh, kw) = x.shape, weight.shape
    blocks = 2 * device_properties(x.device.index).multiprocessors  # at the same time
    units = ceil_div(channels, 8) * kh * kw  # 8 channels at a tap
    gram = 128 * (units // 2 + 1) * ceil_div(channels, 8) * kw  # values of a Gram matrix, in tiles

    def share(rows: int, images: int) -> tuple[int, int]:  # strips, and rows of each
        most = min(rows, max(1, blocks // max(1, images)))
        count = min(range(1, most + 1), key=lambda n: ceil_div(images * n, blocks) * ceil_div(rows, n))
        each = ceil_div(rows, count)
        return ceil_div(rows, each), each

    strips, rows = share(ceil_div(H, pool[0]), N * ceil_div(C, _CHANNELS) * ceil_div(ceil_div(units, 5), 2))
    merged = _round_up(N * (C * (8 * units + 5) + groups), 2)
    parts = N * (strips + 2 * (kh - 1)) * gram + N * strips * C * (8 * units + 2)
    partial = ceil_div(N * channels, 4) * 4 + max(parts, _composed_size(weight, N))
    columns = _input_columns(x, weight, pool)
    # The first tile and the last have all columns of v that they need; those between need kw - 1 more than they write.
    stride = columns if W <= 2 * columns else columns - 8
    tiles = ceil_div(W, max(stride, 1))
    _, input_rows = share(ceil_div(H, pool[0]), N * tiles)
    launch = tiles, stride, ceil_div(H, input_rows * pool[0]), input_rows * pool[0]
    of_tile = columns or _COLUMNS // 8
    shared = {"INPUT_COLUMNS": of_tile, "INPUT_SHARED": input_gradient_shared(weight, pool, of_tile)}
    defines = {**spatial_defines(weight.shape), "POOL_H": pool[0], "POOL_W": pool[1], **shared}
    return defines, StripsBackward(strips, rows, merged + ceil_div(partial, 2), columns, launch)


# ------------------------------------------------------------------------------------------------------------------- wide


@first_obstacle
def wide_obstacle(x: Tensor, weight: Tensor, dtype: torch.dtype):
    yield from _fused_obstacles(x, dtype)
    (outputs, channels, kh, kw), parts = weight.shape, 2 if dtype == torch.float32 else 1
    # The smallest tile, 16 channels in at a time: kh rows of pixels, and three taps of weights.
    block = 128 if max(outputs, channels) > 64 else 64
    needed = (kh * (_COLUMNS + kw - 1) + 3 * block) * 16 * 2 * parts
    yield (
        needed > device_properties(x.device.index).shared,
        "the kernel's window does not fit in shared memory",
    )


def wide_defines(x: Tensor, weight: Tensor, split: bool, *, aligned: bool, gradients: bool) -> dict[str, int]:
    """What a build of forward or of the gradients knows of the GPU and of x. Tiles and scratch are the kernels' own affair.
    split: is an operand the sum of two float16? aligned: does x begin at a multiple of 16 bytes, in forward of 4?"""
    (N, _, H, W), kw, (capability, shared, *_) = x.shape, weight.shape[3], device_properties(x.device.index)
    counts_in_int = N * H * ceil_div(W, _COLUMNS) < 2**31 and H * W < 2**31
    words = 1 if x.element_size() == 4 or W % 2 or not aligned else 2  # of 4 bytes, in forward
    # Forward reads no dy, and has tiles for rows of any length.
    x_aligned, dy_aligned = (
        (4 if W % 4 == 0 and aligned else 1, 1 + (W - kw) % 2) if gradients else (words, 1)
    )
    known = {"SPLIT": int(split), "CAPABILITY": 90 if capability == (9, 0) else 80, "SHARED_LIMIT": shared}
    known |= {"X_ALIGNED": x_aligned, "DY_ALIGNED": dy_aligned, "ONE_TILE": int(gradients and W <= _COLUMNS)}
    known["COUNTS_IN_INT"] = int(counts_in_int)
    return spatial_defines(weight.shape) | known


def mask_shape(image: Sequence[int], filters: Sequence[int]) -> tuple[int, ...]:
    """Of the masks that forward keeps for backward, in words of 32 bits: kernels/store/grad_mask.cuh."""
    (N, _, H, W), (outputs, _, kh, kw) = image, filters
    return N, H - kh + 1, ceil_div(W - kw + 1, 64), outputs, 4


def _round_up(size: int, unit: int) -> int:
    return ceil_div(size, unit) * unit
