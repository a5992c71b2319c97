"""How large the tiles of the fused kernels are: what a block computes, what it keeps in shared memory, and what fits nowhere.

One truth for the kernels (kernels/*_fused.cu) and for whoever launches them. A plan is made here alone; a kernel takes it by its
launcher's arguments and its build's `defines`, and asserts at compile time, in the words of these, all that it relies on.

- volumes: a 3-D convolution with few channels in. A block walks along depth, with a ring of input planes in shared memory.
  Backward: likewise, for its gradient and the weight's; and tiles of rows and columns, for the gradient of x.
- strips: a 2-D convolution that a pool follows. A block walks down strips of rows, with a ring of input rows in shared memory.
  Backward: likewise strips, for sums over positions and over windows, and for the gradient of x.
- gemm: a 2-D convolution with many channels, as a product of the weights with shifted rows of x.

An `…_obstacle(x, weight, …)` says why such kernels can't run, or None. torch.compile traces it, with sizes that may be symbolic, so
it asks for as few of them as it can. A plan exists wherever there is no obstacle; it is made of ints, and kept.

Words. x (N, C_in, [D,] H, W) and weight (C_out, C_in, [kd,] kh, kw) are the convolution's; its result has the extents D', H', W' =
D - kd + 1, …. A `pixel` is all input channels at one position; in shared memory it is some words of 4 bytes.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Sequence
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


def ceil_div(a: int, b: int) -> int:
    return -(-a // b)


def spatial_defines(filters: Sequence[int]) -> dict[str, int]:
    """What tells a build of any kernels the convolution's channels and kernel size."""
    names = ("CHANNELS_OUT", "CHANNELS_IN", *("KERNEL_D", "KERNEL_H", "KERNEL_W")[5 - len(filters) :])
    return dict(zip(names, filters))


def first_of(obstacles: Iterable[tuple[object, str]]) -> str | None:
    """The first obstacle that is there, of pairs (is it there?, what it is); what comes after it is not looked at."""
    return next((obstacle for is_there, obstacle in obstacles if is_there), None)


def _fused_obstacles(x: Tensor, dtype: torch.dtype) -> Iterable[tuple[object, str]]:
    """What stands in the way of any fused kernel, if it sees x in `dtype`."""
    taken = torch.float32, torch.float16, torch.bfloat16
    yield dtype not in taken, "the fused kernels are not written for this dtype"
    too_old = device_properties(x.device.index).capability < (8, 0)
    yield too_old, "the fused kernels need a GPU of compute capability 8.0 or later"


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


def volume_obstacle(x: Tensor, weight: Tensor, dtype: torch.dtype, static_shared: int) -> str | None:
    """`static_shared`: bytes of shared memory that the kernel's own arrays may take, which it asserts."""
    return first_of(_volume_obstacles(x, weight, dtype, static_shared))


def _volume_obstacles(x: Tensor, weight: Tensor, dtype: torch.dtype, static_shared: int):
    yield from _fused_obstacles(x, dtype)
    (C, channels, *kernel), size = weight.shape, x.shape[2:]
    yield (
        channels > 4 or C % 16 or C > 960,
        "the fused kernels take up to 4 channels in, and 16, 32, … 960 out",
    )
    pairs = (channels + 1) // 2
    # Per step of 4 taps and word of a pixel: 2 of highs; where the word has a high, 2 of lows, too.
    registers = ceil_div(math.prod(kernel), 4) * (4 * pairs + 2 * (channels - pairs))
    yield registers > _WEIGHT_REGISTERS, "the filter does not fit in registers"
    of_strip = _input_shared(_input_strip(channels, kernel[0]), 8, 2**15, C, channels, *kernel)
    room = device_properties(x.device.index).shared - static_shared
    yield of_strip > room, "the filter does not fit in shared memory"
    positions = math.prod([extent - taps + 1 for extent, taps in zip(size, kernel)])
    yield positions < 64, "the fused kernels' statistics are exact enough from 64 positions on"
    too_large = size[1] * size[2] >= 2**24 or size[0] >= 2**15 or not volume_fits(x, weight, static_shared)
    yield too_large, "the planes are too large for shared memory"


def volume_fits(x: Tensor, weight: Tensor, static_shared: int) -> bool:
    """Is there a plan, for stores of 16 bytes too? The fewest rows decide. A trace with dynamic shapes asks this, so it asks for
    four rows first: where they fit, as they mostly do, one bound on W is its only guard."""
    (_, channels, _, H, W), kernel = x.shape, weight.shape[2:]
    room = device_properties(x.device.index).shared - static_shared
    OH, OW = H - kernel[1] + 1, W - kernel[2] + 1
    for rows in (4, 2, 1):
        whole_vectors = rows * OW % 4 == 0 or OH * OW % 4 > 0
        if whole_vectors and volume_layout(rows, W, channels, x.element_size(), *kernel)[-1] <= room:
            return True
    return False


def plan_volume(x: Tensor, weight: Tensor, static_shared: int, *, vectors: bool) -> VolumeTiling:
    """The plan for sizes without an obstacle. `vectors`: a block's positions in a plane are a multiple of 4 wherever H'·W' is, for
    stores of 16 bytes."""
    return _plan_volume(*_volume_sizes(x, weight), vectors, *_volume_device(x, static_shared))


def _volume_sizes(x: Tensor, weight: Tensor) -> tuple:
    return x.shape[0], tuple(x.shape[1:]), tuple(weight.shape[2:]), x.element_size()


def _volume_device(x: Tensor, static_shared: int) -> tuple[int, int]:
    """Bytes of dynamic shared memory, and multiprocessors."""
    device = device_properties(x.device.index)
    return device.shared - static_shared, device.multiprocessors


def volume_defines(plan: VolumeTiling, weight: Tensor, itemsize: int, static_shared: int) -> dict[str, int]:
    """What a build takes from the plan, and what the plan assumes of the kernel."""
    return {
        **spatial_defines(weight.shape),
        "STAGE_PIXELS": plan.stage,
        "PIXEL_WORDS": _pixel_words(weight.shape[1], itemsize),
        "RING_PLANES": weight.shape[2] + _PLANES_AHEAD,
        "RAW_PLANES": _RAW_PLANES,
        "TURN_POSITIONS": _TURN,
        "STATIC_SHARED": static_shared,
    }


def held_values(plan: VolumeTiling, x: Tensor, weight: Tensor) -> int:
    """How many float32 of scratch a kernel that needs its sums twice should have, so that they stay in the L2 cache: none where its
    blocks can't wait for one another, or come to more than 16 channels."""
    device, blocks = device_properties(x.device.index), x.shape[0] * plan.slots
    if weight.shape[0] != 16 or (plan.slots > 1 and blocks > device.multiprocessors):
        return 0
    return min(int(_HELD_SHARE * device.l2_cache) // 4, 16 * x.shape[0] * math.prod(x.shape[2:]))


def _pixel_words(channels: int, itemsize: int) -> int:
    """Of 4 bytes, in the ring: two halves each; a float32 is two halves."""
    return channels if itemsize == 4 else ceil_div(channels, 2)


def ring_pitch(width: int) -> int:
    """Pixels from row to row in the ring for rows of `width`: 12 or 24 modulo 32, so that the rows of a group of taps start in
    different banks; in terms that stay symbolic."""
    padded = ceil_div(width, 4) * 4
    return padded + min((12 - padded) % 32, (24 - padded) % 32)


def volume_layout(
    rows: int, W: int, channels: int, itemsize: int, kd: int, kh: int, kw: int
) -> tuple[int, ...]:
    """A block of `rows` output rows: pitch, stage, raw and shared of its VolumeTiling.

    Dynamic shared memory is the ring, of `stage` pixels; _RAW_PLANES raw planes; where each output position's pixel lies in a plane
    of the ring, and where each raw element's, in 2 bytes each. The stage is rounded up, because it is compiled for; through the
    ring pass the filters of 16 output channels, too, in float32, and their gradients, taps in eights.
    """
    words, pitch = _pixel_words(channels, itemsize), ring_pitch(W)
    filters = ceil_div(16 * channels * ceil_div(kd * kh * kw, 8) * 8, words)  # in pixels
    stage = ceil_div(max((kd + _PLANES_AHEAD) * (rows + kh - 1) * pitch, filters), 256) * 256
    raw = (rows + kh - 1) * ceil_div(W, 8) * 8
    positions = ceil_div(rows * (W - kw + 1), _TURN) * _TURN
    shared = 4 * words * stage + _RAW_PLANES * channels * raw * itemsize + 2 * (positions + raw)
    return pitch, stage, raw, shared


@functools.lru_cache(None)
def _plan_volume(
    N: int,
    sizes: tuple[int, ...],
    kernel: tuple[int, ...],
    itemsize: int,
    vectors: bool,
    room: int,
    multiprocessors: int,
) -> VolumeTiling:
    """What keeps all multiprocessors busy with the fewest rows and planes read twice. room: bytes of dynamic shared memory."""
    (channels, D, H, W), (kd, kh, kw) = sizes, kernel
    OD, OH, OW = D - kd + 1, H - kh + 1, W - kw + 1
    unit = 4 // math.gcd(OW, 4) if vectors and OH * OW % 4 == 0 else 1
    best = None
    for slabs in range(1, OH + 1):
        rows = ceil_div(ceil_div(OH, slabs), unit) * unit
        pitch, stage, raw, shared = volume_layout(rows, W, channels, itemsize, kd, kh, kw)
        if shared > room:
            continue
        for chunks in (1, 2, 4, 8):
            depth = ceil_div(OD, chunks)
            slots = ceil_div(OH, rows) * ceil_div(OD, depth)
            work = ceil_div(N * slots, multiprocessors) * (rows + kh - 1) * (depth + kd + 1)
            if best is None or work < best[0]:
                best = work, VolumeTiling(rows, depth, slots, pitch, stage, raw, shared)
    return best[1]


# The backward pass: the same tiles, of which each leaves its convolution's gradient dv in scratch where x needs a gradient
# (kernels/conv3d_weight_gradient.cuh), and tiles of dx (kernels/conv3d_input_gradient.cuh).

_SAMPLES_BYTES = 114_000_000  # of dv of whole samples
_INPUT_WARPS = 16


class VolumeBackward(NamedTuple):
    tiles: VolumeTiling
    dv_slots: int  # of scratch, each for dv of a tile and 16 channels; none where x needs no gradient …
    dv: int  # … with so many float32 in all
    jobs: int  # tiles and 16 channels
    input_rows: int  # of dx, that a block computes …
    input_columns: int  # … of so many columns

    @property
    def launch(self) -> tuple[int, ...]:
        """The launchers' last arguments."""
        return *self.tiles.launch, self.dv_slots, self.input_rows, self.input_columns


def plan_volume_backward(x: Tensor, weight: Tensor, static_shared: int, *, dx: bool) -> VolumeBackward:
    """The plan where volume_obstacle finds nothing. dx: is the gradient of x wanted, too?"""
    (N, channels, *_, W), (C, *_, kw) = x.shape, weight.shape
    room, multiprocessors = _volume_device(x, static_shared)
    _, sizes, kernel, itemsize = _volume_sizes(x, weight)
    results = C * math.prod([extent - taps + 1 for extent, taps in zip(sizes[1:], kernel)])  # of a sample
    # As many as a launch has if x needs a gradient; the others' must not depend on that.
    samples = min(N, max(1, _SAMPLES_BYTES // (4 * results)))
    tiles = _plan_volume(samples, sizes, kernel, itemsize, False, room, multiprocessors)
    of_job = 16 * _TURN * tiles.depth * ceil_div(tiles.rows * (W - kw + 1), _TURN)
    of_sample, dv_slots = tiles.slots * C // 16, 0
    if dx:
        dv_slots = of_sample * min(N, max(1, _SAMPLES_BYTES // (4 * of_job * of_sample)))
    rows, columns = _input_tiling(*sizes[2:], C, channels, kernel, room)
    return VolumeBackward(tiles, dv_slots, dv_slots * of_job, N * of_sample, rows, columns)


def input_positions(channels: int, kd: int) -> int:
    """Positions of a plane of dx that a block computes, at most."""
    return _INPUT_WARPS * _input_strip(channels, kd) * 8


def _input_strip(channels: int, kd: int) -> int:
    """Rows of dx that a warp computes, of 8 columns."""
    return max(1, 8 // _input_tiles(channels, kd))


def _input_tiles(channels: int, kd: int) -> int:
    """Of 16 rows, two of them a pair of channels."""
    return ceil_div(ceil_div(channels, 2) * kd, 8)


@functools.lru_cache(None)
def _input_tiling(
    H: int, W: int, C: int, channels: int, kernel: tuple[int, ...], room: int
) -> tuple[int, int]:
    """Rows and columns of dx: whole rows where they fit, and as many as they can be, a strip per warp."""
    strip = _input_strip(channels, kernel[0])
    for blocks in range(1, W + 1):
        strips = ceil_div(ceil_div(W, blocks), 8)
        for high in range(min(_INPUT_WARPS // strips, ceil_div(H, strip)), 0, -1):
            rows = high * strip
            if _input_shared(rows, 8 * strips, W, C, channels, *kernel) <= room:
                return rows, 8 * strips
    raise AssertionError("no room for a strip of dx")


def _input_shared(rows: int, columns: int, W: int, C: int, channels: int, kd: int, kh: int, kw: int) -> int:
    """Bytes of dynamic shared memory of a block of dx: two stages of dv, the weights, scales, and where dv's fragments go."""
    pitch, stage_rows = ceil_div(columns + kw - 1, 8) * 8, rows + kh - 1
    weights = kh * kw * _input_tiles(channels, kd) * 1024
    fragments = stage_rows * min(pitch, W - kw + 1) // 8 + 2 * stage_rows
    return 2 * stage_rows * pitch * 64 + weights + 8 * C + 40 * fragments


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

    @property
    def launch(self) -> tuple[int, int, int]:
        """The launcher's last arguments."""
        return self.tiles, self.strips, self.rows


def strips_obstacle(x: Tensor, weight: Tensor, dtype: torch.dtype, pool: tuple[int, int]) -> str | None:
    return first_of(_strips_obstacles(x, weight, dtype, pool))


def _strips_obstacles(x: Tensor, weight: Tensor, dtype: torch.dtype, pool: tuple[int, int]):
    yield from _fused_obstacles(x, dtype)
    C, channels, kh, kw = weight.shape
    few = channels <= 16 and C <= 128 and C % 16 == 0
    yield not few, "the fused kernels take up to 16 channels in, and 16, 32, … 128 out"
    yield min(pool) < 2 or max(pool) > 8, "the fused kernels pool windows of 2 to 8 rows and columns"
    yield kw > 9 or kh * kw * ceil_div(channels, 8) > 25, "the filter does not fit in registers"
    yield not _strips_fit(x, weight, pool, False), "the kernel's window does not fit in shared memory"


def _strips_fit(x: Tensor, weight: Tensor, pool: tuple[int, int], saving: bool) -> bool:
    room = device_properties(x.device.index).shared - _STRIPS_STATIC_SHARED
    return strips_shared(weight.shape[1], weight.shape[2], pool[1], saving) <= room


def strips_save(x: Tensor, weight: Tensor, pool: tuple[int, int]) -> bool:
    """Is there room for what the kernels keep for backward, where there is no obstacle?"""
    return _strips_fit(x, weight, pool, True)


def strips_training_obstacle(x: Tensor, weight: Tensor, pool: tuple[int, int]) -> str | None:
    """Why the kernels can't compute all gradients that are asked for, where there is no obstacle to forward; or None."""
    fits = strips_save(x, weight, pool) and (_input_columns(x, weight, pool) or not x.requires_grad)
    return None if fits else "backward's windows or filters do not fit in shared memory"


def _input_columns(x: Tensor, weight: Tensor, pool: tuple[int, int]) -> int:
    """Of v, that the kernel for x's gradient has in a tile; 0 where its filters leave no room."""
    room = device_properties(x.device.index).shared - (6 << 10)  # the kernel's own arrays
    columns = _COLUMNS // 2, _COLUMNS // 4, _COLUMNS // 8
    return next((each for each in columns if input_gradient_shared(weight, pool, each) <= room), 0)


def plan_strips(x: Tensor, weight: Tensor, pool: tuple[int, int]) -> StripTiling:
    """The plan for sizes without an obstacle."""
    (N, _, H, W), (C, _, kh, kw) = x.shape, weight.shape
    multiprocessors = device_properties(x.device.index).multiprocessors
    return _plan_strips(N * ceil_div(C, _CHANNELS), H, W, kh, kw, *pool, multiprocessors)


def strip_defines(
    plan: StripTiling, weight: Tensor, pool: tuple[int, int], saving: bool = False
) -> dict[str, int]:
    """What a build takes from the plan, and what the plan assumes of the kernel. saving: for backward, the selected places."""
    return {
        **spatial_defines(weight.shape),
        "POOL_H": pool[0],
        "POOL_W": pool[1],
        "TILE_COLUMNS": _COLUMNS,
        "TILE_STRIDE": plan.stride,
        "BLOCK_CHANNELS": _CHANNELS,
        "TEAMS": _TEAMS,
        "STATIC_SHARED": _STRIPS_STATIC_SHARED,
        "DYNAMIC_SHARED": strips_shared(weight.shape[1], weight.shape[2], pool[1], saving),
        "SAVING": int(saving),
    }


def strips_shared(channels: int, kh: int, pool_width: int, saving: bool) -> int:
    """Bytes of dynamic shared memory. Of each team: kh + 1 rows of x, in pixels of 8 channels and two float16 per value, 8 pixels
    of them behind the tile; and the maxima that wait for their windows, of two neighbours where no window parts them, in float32,
    with a byte that says where each is from."""
    row = 2 * ceil_div(channels, 8) * (_COLUMNS + 8) * 16
    kept = 1 if pool_width % 2 == 0 else 2
    return _TEAMS * ((kh + 1) * row + _CHANNELS * (_COLUMNS // 2 + 4) * kept * (5 if saving else 4))


@functools.lru_cache(None)
def _plan_strips(
    images: int, H: int, W: int, kh: int, kw: int, pool_height: int, pool_width: int, multiprocessors: int
) -> StripTiling:
    """What keeps all multiprocessors busy with the fewest rows read twice. `images`: of as many channels as a block has."""
    # The only tile of a row has all columns of x that it needs. Others begin with a whole window.
    stride = 0 if W <= _COLUMNS else _COLUMNS // pool_width * pool_width
    tiles, pooled_rows = ceil_div(W - kw + 1, stride or _COLUMNS), (H - kh + 1) // pool_height

    def rows_read(pairs: int) -> int:  # by the busiest multiprocessor, of `pairs` strips for each team
        strip = ceil_div(pooled_rows, _TEAMS * pairs)
        return ceil_div(images * tiles * pairs, multiprocessors) * (strip * pool_height + kh + 3)

    most = max(1, ceil_div(_TEAMS * multiprocessors, images * tiles))
    pairs = min(range(1, most + 1), key=rows_read)
    rows = ceil_div(pooled_rows, min(pooled_rows, _TEAMS * pairs))
    return StripTiling(tiles, stride, ceil_div(pooled_rows, rows), rows)


class StripsBackward(NamedTuple):
    """One launch's plan of the backward kernels: rows of x, by as many as a window has, are cut into strips, a block each."""

    strips: int
    rows: int  # of as many rows of x as a window has
    merged: int  # elements of what is summed up in float64, and of the strips' parts in float32
    partial: int
    input_columns: (
        int  # of v, that the kernel for x's gradient has in a tile; 0 where its filters leave no room
    )
    input_launch: tuple[
        int, int, int, int
    ]  # tiles and columns from one to the next, strips and rows of x of each


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


def plan_strips_backward(x: Tensor, weight: Tensor, pool: tuple[int, int], groups: int) -> StripsBackward:
    """The plan for sizes without an obstacle."""
    (N, channels, H, W), (C, _, kh, kw) = x.shape, weight.shape
    blocks = 2 * device_properties(x.device.index).multiprocessors  # at the same time
    units = ceil_div(channels, 8) * kh * kw  # 8 channels at a tap
    gram = 128 * (units // 2 + 1) * ceil_div(channels, 8) * kw  # values of a Gram matrix, in tiles

    def share(rows: int, images: int) -> tuple[int, int]:  # strips, and rows of each
        most = min(rows, max(1, blocks // max(1, images)))
        each = ceil_div(
            rows, min(range(1, most + 1), key=lambda n: ceil_div(images * n, blocks) * ceil_div(rows, n))
        )
        return ceil_div(rows, each), each

    strips, rows = share(ceil_div(H, pool[0]), N * ceil_div(C, _CHANNELS) * ceil_div(ceil_div(units, 5), 2))
    merged = N * (C * (8 * units + 5) + groups)
    parts = N * (strips + 2 * (kh - 1)) * gram + N * strips * C * (8 * units + 2)
    partial = ceil_div(N * channels, 4) * 4 + max(parts, _composed_size(weight, N))
    columns = _input_columns(x, weight, pool)
    # The first tile and the last have all columns of v that they need; those between need kw - 1 more than they write.
    stride = columns if W <= 2 * columns else columns - 8
    tiles = ceil_div(W, max(stride, 1))
    _, input_rows = share(ceil_div(H, pool[0]), N * tiles)
    launch = tiles, stride, ceil_div(H, input_rows * pool[0]), input_rows * pool[0]
    return StripsBackward(strips, rows, merged, partial, columns, launch)


def strips_backward_defines(plan: StripsBackward, weight: Tensor, pool: tuple[int, int]) -> dict[str, int]:
    """What a build takes from the plan, and what the plan assumes of the kernels."""
    columns = plan.input_columns or _COLUMNS // 8
    shared = input_gradient_shared(weight, pool, columns)
    own = {"POOL_H": pool[0], "POOL_W": pool[1], "INPUT_COLUMNS": columns, "INPUT_SHARED": shared}
    return {**spatial_defines(weight.shape), **own}


# ------------------------------------------------------------------------------------------------------------------- gemm

_REGISTER_STEPS = 30  # by wgmma: products of depth 16 whose weights are in registers


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


def gemm_obstacle(x: Tensor, weight: Tensor, dtype: torch.dtype) -> str | None:
    return first_of(_gemm_obstacles(x, weight, dtype))


def _gemm_obstacles(x: Tensor, weight: Tensor, dtype: torch.dtype):
    yield from _fused_obstacles(x, dtype)
    room = device_properties(x.device.index).shared
    needed = gemm_by_mma(weight.shape, dtype == torch.float32, room).shared_bytes
    yield needed > room, "the kernel's window does not fit in shared memory"


def plan_gemm(x: Tensor, weight: Tensor, out_dtype: torch.dtype, *, split: bool, aligned: bool) -> GemmTiling:
    """The plan for sizes without an obstacle. aligned: does x start at a multiple of 4 bytes?"""
    (N, channels, H, W), (_, _, kh, kw), itemsize = x.shape, weight.shape, x.element_size()
    capability, shared, *_ = device_properties(x.device.index)
    one_group = channels <= 64 and kh * kw * ceil_div(channels, 16) <= 36
    counted_in_int = N * (H - kh + 1) * ceil_div(W - kw + 1, _COLUMNS) < 2**31 and H * W < 2**31
    whole_words = aligned and W * itemsize % 4 == 0
    if not split and capability == (9, 0) and one_group and counted_in_int and whole_words:
        plan = gemm_by_wgmma(weight.shape, itemsize, out_dtype.itemsize)
        if plan.shared_bytes <= shared:
            return plan
    return gemm_by_mma(weight.shape, split, shared)


def gemm_defines(plan: GemmTiling, filters: Sequence[int]) -> dict[str, int]:
    """What a build takes from the plan, and what the plan assumes of the kernel."""
    own = {name.upper(): int(value) for name, value in plan._asdict().items()}
    return {**spatial_defines(filters), **own}


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


def plan_weight_gradient(x: Tensor, weight: Tensor, split: bool) -> tuple[int, int, int]:
    """How many shares the sums and the products have, and how many sums a share of products has."""
    (outputs, channels, kh, kw), multiprocessors = (
        weight.shape,
        device_properties(x.device.index).multiprocessors,
    )
    # A block has 64 channels of either kind and some taps, of 3 rows at most; a filter's rows and columns are shared out evenly.
    taps = 3 if split else 9
    columns = ceil_div(kw, ceil_div(kw, taps))
    rows = ceil_div(kh, ceil_div(kh, min(taps // columns, 3)))
    blocks_out = ceil_div(outputs, 64)
    blocks = blocks_out * ceil_div(channels, 64) * ceil_div(kh, rows) * ceil_div(kw, columns)
    strips = max(1, _strips(x.shape, weight.shape))
    of_sums, of_weight = 8 * multiprocessors // blocks_out, multiprocessors // blocks
    return (
        max(1, min(of_sums, strips)),
        max(1, min(of_weight, strips)),
        blocks * rows * columns * min(64, _round_up(outputs, 16)) * 64,
    )


def plan_input_gradient(x: Tensor, weight: Tensor, split: bool) -> tuple[dict[str, int], int, int]:
    """A build's definitions, the samples of a piece, and bytes of workspace."""
    (N, _, H, W), (outputs, _, kh, kw), transposed = x.shape, weight.shape, weight.transpose(0, 1)
    tiles = gemm_by_mma(transposed.shape, split, device_properties(x.device.index).shared)
    height, width = H - kh + 1, W - kw + 1
    sample = _round_up(outputs, tiles.group) * height * width * (4 if split else 2)
    piece = max(1, min(N, _PIECE_BYTES // sample, 2**16 - 1))
    workspace = gemm_workspace(tiles, (piece, outputs, height, width), transposed.shape, True)
    return gemm_defines(tiles, transposed.shape), piece, workspace


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


def _round_up(size: int, unit: int) -> int:
    return ceil_div(size, unit) * unit
