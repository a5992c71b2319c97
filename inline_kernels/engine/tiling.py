"""How large the tiles of the fused kernels are: what a block computes, what it keeps in shared memory, and what fits nowhere.

One truth for the kernels (composed sources, and generated ones) and for whoever launches them. What is compiled for, or allocated, is planned here
alone; a kernel takes it by its launcher's arguments and its build's definitions, and asserts at compile time, in the words of these,
all that it relies on. What only a launch depends on, its launcher plans.

- volumes: a 3-D convolution with few channels in. A block walks along depth, with a ring of input planes in shared memory. Here is
  only what can't run: launchers plan their tiles (kernels/conv/narrow3d_tile.cuh), and throw where there is no room.
- strips: a 2-D convolution that a pool follows. Here is only what can run: launchers plan their strips of rows
  (kernels/conv/narrow2d_tile.cuh, kernels/grad/selected/units.cuh).
- wide: a 2-D convolution with many channels, as a product of the weights with shifted rows of x. Here are the rules of where it runs
  alone: its tiles, scratch and launches are planned beside the kernels (kernels/conv/wide.cuh).
- stream: any convolution. Here is what its views of patches have room for, on capability 9.0 (kernels/conv/stream_views.cuh).

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

from inline_kernels.loader.operators import constant_to_tracers

from . import costs


class Device(NamedTuple):
    capability: tuple[int, int]
    shared: int  # bytes of shared memory that a block may ask for
    multiprocessors: int
    scale: costs.Scale = costs.H200


@constant_to_tracers
def device_properties(index: int | None) -> Device:
    """None, of a tensor that is on no GPU: the smallest that the fused kernels run on. What it has room for, the others have, too."""
    if index is None:
        return Device((8, 0), 99 << 10, 1)
    properties = torch.cuda.get_device_properties(index)
    capability = (properties.major, properties.minor)
    # torch 2.8 does not say what a block may ask for; CUDA's programming guide does, by architecture
    by_architecture = (163 if capability in ((8, 0), (8, 7)) else 99) << 10
    shared = getattr(properties, "shared_memory_per_block_optin", by_architecture)
    multiprocessors, scale = properties.multi_processor_count, _scale(properties, capability)
    return Device(capability, shared, multiprocessors, scale)


# Clock rate and bytes a second of memory, where torch doesn't say: usual ones, from that capability on.
_USUAL = {(8, 0): (1.41e9, 1.9e12), (8, 6): (1.7e9, 0.7e12), (8, 9): (2.5e9, 0.9e12)}
_USUAL |= {(9, 0): (1.98e9, 3.4e12), (10, 0): (1.97e9, 8e12), (12, 0): (2.6e9, 1.5e12)}


def _scale(properties, capability: tuple[int, int]) -> costs.Scale:
    """Of a GPU to an H200: 132 multiprocessors at 1.98 GHz, a bus of 6,016 bits at twice 3.2 GHz. Within 5 % it is one."""
    usual = _USUAL[max([each for each in _USUAL if each <= capability], default=(8, 0))]
    clock, memory_clock, width = (
        getattr(properties, name, 0) for name in ("clock_rate", "memory_clock_rate", "memory_bus_width")
    )
    clock = (clock * 1e3 or usual[0]) / 1.98e9
    memory = (2 * memory_clock * 1e3 * width / 8 or usual[1]) / (2 * 3.2e9 * 6016 / 8)
    found = costs.Scale(clock, clock * properties.multi_processor_count / 132, memory)
    return costs.H200 if all(abs(each - 1) < 0.05 for each in found) else found


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


@first_obstacle
def volume_obstacle(
    x: Tensor, weight: Tensor, dtype: torch.dtype, static_shared: int, forward_alone: bool = False
):
    """`static_shared`: bytes of shared memory that the kernel's own arrays may take, at least as many as they do. forward_alone: in generated
    kernels, which take any number of channels; filters that find no place in registers may then be there, too."""
    yield from _fused_obstacles(x, dtype)
    (C, channels, *kernel), size = weight.shape, x.shape[2:]
    few = channels <= 4 and (forward_alone or C % 16 == 0) and C <= 960
    yield not few, "the fused kernels take up to 4 channels in, and 16, 32, … 960 out"
    pairs = (channels + 1) // 2
    # Per step of 4 taps and word of a pixel: 2 of highs; where the word has a high, 2 of lows, too.
    registers = ceil_div(math.prod(kernel), 4) * (4 * pairs + 2 * (channels - pairs))
    if forward_alone and registers > _WEIGHT_REGISTERS:
        static_shared += 128 * registers + 4 * math.prod(kernel)
    else:
        yield registers > _WEIGHT_REGISTERS, "the filter does not fit in registers"
    room = device_properties(x.device.index).shared - static_shared
    backward = 0 if forward_alone else _input_strip_shared(weight)
    yield backward > room, "the filter does not fit in shared memory"
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
        if whole_vectors and volume_bytes(rows, x, weight) <= room:
            return True
    return False


def _pixel_words(x: Tensor) -> int:
    """Of 4 bytes, in the ring: two halves each; a float32 is two halves."""
    return x.shape[1] if x.element_size() == 4 else ceil_div(x.shape[1], 2)


def ring_pitch(width: int) -> int:
    """Pixels from row to row in the ring for rows of `width`: 12 or 24 modulo 32, so that the rows of a group of taps start in
    different banks; in terms that stay symbolic."""
    padded = ceil_div(width, 4) * 4
    return padded + min((12 - padded) % 32, (24 - padded) % 32)


def volume_bytes(rows: int, x: Tensor, weight: Tensor) -> int:
    """Of dynamic shared memory that a block of `rows` output rows needs, as kernels/conv/narrow3d_tile.cuh lays it out: the ring;
    _RAW_PLANES raw planes; where each output position's pixel lies in a plane of the ring, and where each raw element's, in 2 bytes each.
    Through the ring pass the filters of 16 output channels, too, in float32, and their gradients, taps in eights."""
    (_, channels, _, _, W), (_, _, kd, kh, kw), words = x.shape, weight.shape, _pixel_words(x)
    filters = ceil_div(16 * channels * ceil_div(kd * kh * kw, 8) * 8, words)  # in pixels
    ring = ceil_div(max((kd + _PLANES_AHEAD) * (rows + kh - 1) * ring_pitch(W), filters), 256) * 256
    raw = (rows + kh - 1) * ceil_div(W, 8) * 8
    positions = ceil_div(rows * (W - kw + 1), _TURN) * _TURN
    return 4 * words * ring + _RAW_PLANES * channels * raw * x.element_size() + 2 * (positions + raw)


def _input_strip_shared(weight: Tensor) -> int:
    """Bytes of dynamic shared memory of the smallest block of dx, of the rows that a warp computes and 8 columns: two stages of dv, the
    weights, scales, and where dv's fragments go."""
    C, channels, kd, kh, kw = weight.shape
    of_rows = ceil_div(ceil_div(channels, 2) * kd, 8)  # products with 16 rows, two of them a pair of channels
    pitch, stage_rows = ceil_div(kw + 7, 8) * 8, max(1, 8 // of_rows) + kh - 1
    fragments = stage_rows * (pitch // 8 + 2)
    return 2 * stage_rows * pitch * 64 + kh * kw * of_rows * 1024 + 8 * C + 40 * fragments


# ----------------------------------------------------------------------------------------------------- strips

COLUMNS = 128  # of the result, that a team computes at a time: a tile
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


@first_obstacle
def rows_obstacle(x: Tensor, weight: Tensor, shared: int):
    """Of a convolution whose results go through a generated tail to a sink, for any number of channels out; with so many bytes of shared
    memory."""
    yield from _fused_obstacles(x, x.dtype)
    _, channels, kh, kw = weight.shape
    yield channels > 16, "the fused kernels take up to 16 channels in"
    yield kw > 9 or kh * kw * ceil_div(channels, 8) > 25, "the filter does not fit in registers"
    room = device_properties(x.device.index).shared - _STRIPS_STATIC_SHARED
    yield shared > room, "the rows do not fit in shared memory"


def row_tiles(x: Tensor, weight: Tensor) -> int:
    """Of a row that is one block's; 0: of more memory has no room for any."""
    columns = x.shape[3] - weight.shape[3] + 1
    return next((tiles for tiles in (1, 2, 3, 4) if columns <= tiles * COLUMNS), 0)


_MOST_ONE_TAP = 4096


@first_obstacle
def one_tap_obstacle(x: Tensor, weight: Tensor, dtype: torch.dtype):
    """Of a convolution by kernels/conv/one_tap.cuh, whose static shared memory has the weights, of fours of channels out."""
    yield from _fused_obstacles(x, dtype)
    outputs, channels, *kernel = weight.shape
    yield {*kernel} != {1}, "its filter has one tap"
    times = ceil_div(outputs, 16)
    products = channels * times * ceil_div(ceil_div(outputs, times), 4) * 4
    yield products > _MOST_ONE_TAP, f"it takes up to {_MOST_ONE_TAP} products of a position"


def rows_shared(weight: Tensor, tiles: int, *itemsizes: int) -> int:
    """Bytes of dynamic shared memory where results of these sizes are stored. Of each team: kh + 1 rows of x, of so many tiles, and for each
    channel a tile of each result, which begins anywhere in a sector of 32 bytes."""
    _, channels, kh, _ = weight.shape
    of_rows = sum(COLUMNS * each + 32 for each in itemsizes)
    return _TEAMS * ((kh + 1) * _row_bytes(channels, tiles) + _CHANNELS * of_rows)


def sinks_shared(weight: Tensor, tiles: int, words: int, itemsizes: Sequence[int]) -> int:
    """The same, at most, of the sinks of one pass: of each team and word of what is reduced over channels a row for eight lanes of a warp; of
    each result that is stored, of `itemsizes`, its rows."""
    reduced = words * _CHANNELS // 2 * (COLUMNS + 8) * 4
    return rows_shared(weight, tiles, 0, *itemsizes) + _TEAMS * reduced


def windows_shared(weight: Tensor, width: int, results: int) -> int:
    """The same where windows so wide are pooled: in place of results what waits for its windows, in float32; of three results, or two, the winner's v
    and its place, too, or that alone."""
    return strips_shared(weight.shape[1], weight.shape[2], width, (4, 5, 9)[results - 1])


def _row_bytes(channels: int, tiles: int = 1) -> int:
    """Of a row of x in shared memory: pixels of 8 channels and two float16 per value, 8 pixels of them behind the tiles."""
    return 2 * ceil_div(channels, 8) * (tiles * COLUMNS + 8) * 16


def strips_fit(x: Tensor, weight: Tensor, pool: tuple[int, int], saving: bool) -> bool:
    """Is there room for what the kernels keep in shared memory, and, where `saving`, for what they then keep for backward?"""
    room = device_properties(x.device.index).shared - _STRIPS_STATIC_SHARED
    return strips_shared(weight.shape[1], weight.shape[2], pool[1], 5 if saving else 4) <= room


def input_columns(x: Tensor, weight: Tensor, pool: tuple[int, int]) -> int:
    """Of v, that the kernel for x's gradient has in a tile; 0 where its filters leave no room."""
    room = device_properties(x.device.index).shared - (6 << 10)  # the kernel's own arrays
    columns = COLUMNS // 2, COLUMNS // 4, COLUMNS // 8
    return next((each for each in columns if input_gradient_shared(weight, pool, each) <= room), 0)


def sums_fit(x: Tensor, weight: Tensor, pool: tuple[int, int]) -> bool:
    """Is there room for what the weight's gradient keeps in shared memory?"""
    room = device_properties(x.device.index).shared - (6 << 10)  # the kernel's own arrays
    return selected_sums_shared(weight, pool) <= room


def strips_defines(x: Tensor, weight: Tensor, pool: tuple[int, int], saving: bool) -> dict[str, int]:
    """A forward build's, for sizes without an obstacle; and what was assumed of the kernel's shared memory, which it asserts."""
    defines = {
        **_pooled_defines(weight, pool),
        "LONG_ROWS": int(x.shape[3] > COLUMNS),
        "SAVING": int(saving),
    }
    dynamic = strips_shared(weight.shape[1], weight.shape[2], pool[1], 5 if saving else 4)
    return defines | {"STATIC_SHARED": _STRIPS_STATIC_SHARED, "STRIPS_SHARED": dynamic}


def strips_backward_defines(x: Tensor, weight: Tensor, pool: tuple[int, int]) -> dict[str, int]:
    """A backward build's, likewise."""
    columns = input_columns(x, weight, pool) or COLUMNS // 8
    shared = {"INPUT_COLUMNS": columns, "INPUT_SHARED": input_gradient_shared(weight, pool, columns)}
    return _pooled_defines(weight, pool) | shared | {"SUMS_SHARED": selected_sums_shared(weight, pool)}


def _pooled_defines(weight: Tensor, pool: tuple[int, int]) -> dict[str, int]:
    return spatial_defines(weight.shape) | {"POOL_H": pool[0], "POOL_W": pool[1]}


def strips_shared(channels: int, kh: int, pool_width: int, size: int) -> int:
    """Bytes of dynamic shared memory. Of each team: kh + 1 rows of x; and the maxima that wait for their windows, of two neighbours where no window parts them, of so many
    bytes: in float32, and where it is from."""
    row = _row_bytes(channels)
    kept = 1 if pool_width % 2 == 0 else 2
    return _TEAMS * ((kh + 1) * row + _CHANNELS * (COLUMNS // 2 + 4) * kept * size)


def selected_sums_shared(weight: Tensor, pool: tuple[int, int]) -> int:
    """Bytes of dynamic shared memory, as kernels/grad/selected/weight.cuh lays it out: a tile's pixels, as two float16 per value; the selected gradients,
    and where they are; the Gram matrix of the block's roles, by group of warps."""
    C, channels, kh, kw = weight.shape
    planes = ceil_div(channels, 8)
    units, columns, rows = planes * kh * kw, planes * kw, pool[0] + kh - 1
    pixels = 128 if 2 * planes * rows * (128 + kw + 7) * 16 <= 80 << 10 else 64
    stage = 2 * planes * rows * (pixels + 4) * 16 + 16
    windows = ceil_div((pixels - kw + 1) // pool[1], 32) * 32
    held = windows * (_CHANNELS + 1)
    if kw == 3 and units <= 9 and pool[1] % 4 == 0:
        held = max(held, _CHANNELS * (windows + 4))
    held = ceil_div(12 * held + 4 * (pool[0] * pool[1] + _CHANNELS), 16) * 16
    role = 9 // columns * columns if columns <= 9 else columns // 2  # tiles
    passes = ceil_div(ceil_div(units, 5), 2)
    roles = ceil_div(ceil_div((units // 2 + 1) * columns, role), ceil_div(C, _CHANNELS) * passes)
    warps = 8 if roles > 4 else 4 if roles > 2 else roles
    return stage + held + 8 // warps * roles * role * 512 + 16


def input_gradient_shared(weight: Tensor, pool: tuple[int, int], columns: int) -> int:
    """Bytes of dynamic shared memory: filters and the composed one, and pixels of x, as two float16 per value; the selected positions'
    gradients and places; what columns give to those beside them, in float32."""
    C, channels, kh, kw = weight.shape
    planes, width, windows = ceil_div(channels, 8), columns + 2 * (kw - 1), columns // pool[1] + 2
    filters = 512 * (C // 16 * planes * kh * kw + planes**2 * kw * (2 * kh - 1))
    pixels, held = 32 * planes * (pool[0] + 2 * (kh - 1)) * width, windows * (C // 4 + 1) * 24
    return filters + pixels + held + 32 * planes * kw * (pool[0] + kh - 1) * width


# ------------------------------------------------------------------------------------------------------------------- wide


@first_obstacle
def wide_obstacle(x: Tensor, weight: Tensor, dtype: torch.dtype):
    yield from _fused_obstacles(x, dtype)
    (outputs, channels, *_, kh, kw), parts = weight.shape, 2 if dtype == torch.float32 else 1
    # The smallest tile, 16 channels in at a time: kh rows of pixels, and three taps of weights.
    block = 128 if max(outputs, channels) > 64 else 64
    needed = (kh * (COLUMNS + kw - 1) + 3 * block) * 16 * 2 * parts
    yield (
        needed > device_properties(x.device.index).shared,
        "the kernel's window does not fit in shared memory",
    )


def wide_defines(x: Tensor, weight: Tensor, split: bool, *, aligned: bool, gradients: bool) -> dict[str, int]:
    """What a build of forward or of the gradients knows of the GPU and of x. Tiles and scratch are the kernels' own affair.
    split: is an operand the sum of two float16? aligned: does x begin at a multiple of 16 bytes, in forward of 4?"""
    (N, _, H, W), (capability, shared, *_) = x.shape, device_properties(x.device.index)
    counts_in_int = N * H * ceil_div(W, COLUMNS) < 2**31 and H * W < 2**31
    words = 1 if x.element_size() == 4 or W % 2 or not aligned else 2  # of 4 bytes, in forward
    known = {"SPLIT": int(split), "CAPABILITY": 90 if capability == (9, 0) else 80, "SHARED_LIMIT": shared}
    known["X_ALIGNED"] = words if not gradients else 4 if W % 4 == 0 and aligned else 1
    known["COUNTS_IN_INT"] = int(counts_in_int)
    return spatial_defines(weight.shape) | known


def joins_tiles(x: Tensor, weight: Tensor) -> bool:
    """Are tiles of a row of v joined where they share a sector of 32 bytes, of 8 elements or 16? Not where the last one is less than that."""
    width = x.shape[3] - weight.shape[3] + 1
    return width > COLUMNS and width % 16 != 0 and (width - 1) % COLUMNS + 1 >= 16


@first_obstacle
def packed_input_obstacle(x: Tensor, weight: Tensor):
    """Of x's gradient from packed dz (kernels/grad/packed_input.cuh), whose channels K blocks divide."""
    C, _, kh, kw = weight.shape
    yield C % 64 and C not in (16, 32, 48), "channels out are neither 16, 32 or 48 nor a multiple of 64"
    # A K block of 64 channels: pixels of a row of tiles, and three taps of weights.
    needed = (8 * kh * (COLUMNS + kw - 1) + 3 * 4 * 8 * 32) * 16
    too_large = needed > device_properties(x.device.index).shared
    yield too_large, "the filter's window does not fit in shared memory"


class FewWeights(NamedTuple):
    """kernels/grad/few_weight.cuh's: blocks that share the weight's gradient, each of which reads dz; channels out and columns that they multiply;
    shared memory of the smallest slab of dz, and lines of the one that it takes."""

    blocks: int
    outputs: int
    columns: int
    shared: int
    lines: int


def few_line(size: Sequence[int]) -> int:
    """Pixels of a line of a slab of dz of such extents, at most: a power of two that has room for its rows, if they aren't long."""
    least, most = (16, 128) if len(size) == 3 else (128, 256)  # an image's slab is one line
    return min(most, max(least, _power_of_two_from(size[-1])))


def few_weights(weight: Tensor, size: Sequence[int], split: bool, shared: int) -> FewWeights:
    """size: of dz. split: are operands two TF32?"""
    (C, channels, *kernel), volumes, parts = weight.shape, len(size) == 3, 2 if split else 1
    row_groups = min(4, _power_of_two_from(ceil_div(C, 16)))
    chunk = kernel[-1] if kernel[-1] <= 5 else 4  # taps in a line
    items = ceil_div(channels * math.prod(kernel[:-1]), 8) * ceil_div(kernel[-1], chunk)
    groups = ceil_div(items, max(1, 15 // chunk))  # of columns, a warp's
    column_groups = min(8 // row_groups, _power_of_two_from(groups))
    column_blocks, row_blocks = ceil_div(groups, column_groups), ceil_div(C, 16 * row_groups)
    fewest = 64 if volumes else max(64, 16 * (8 // row_groups // column_groups))
    taps = kernel[1] if volumes else 1  # of lines

    def pitch(words: int) -> int:
        return ceil_div(words - 16, 32) * 32 + 16

    def needed(pixels: int) -> int:
        line = min(few_line(size), pixels)
        input_lines, row = pixels // line + taps - 1, ceil_div(line + kernel[-1] + 2, 4) * 4
        row = pitch(row) if channels % 2 and taps > 1 else row
        ring = (kernel[0] + 1) * parts * channels * pitch(input_lines * row)
        return 16 + 4 * (ring + 3 * (16 * row_groups * (pixels + 16) + channels * input_lines * row))

    pixels = 512 if volumes else few_line(size)
    while pixels > fewest and needed(pixels) > shared:
        pixels //= 2
    lines = pixels // min(few_line(size), pixels) if volumes else 1
    columns = column_blocks * column_groups * ceil_div(items, column_blocks * column_groups) * chunk * 8
    return FewWeights(
        column_blocks * row_blocks, row_blocks * row_groups * 16, columns, needed(pixels), lines
    )


def _power_of_two_from(n: int) -> int:
    return 1 << (n - 1).bit_length()


LINE_COLUMNS = 48  # of g, at most: of more, strips are filled as well


def later_lines(weight: Tensor, size: Sequence[int], split: bool, device: int | None) -> int | None:
    """kernels/grad/packed_lines.cuh's kLater, of a g of those extents; None: by strips of rows."""
    *_, height, width = weight.shape
    if (
        split
        or device_properties(device).capability != (9, 0)
        or max(height, width) > 3
        or size[-1] > LINE_COLUMNS
    ):
        return None
    return ceil_div((height - 1) * size[-1], 64)


@first_obstacle
def few_weights_obstacle(x: Tensor, weight: Tensor, size: Sequence[int], split: bool):
    """Of the weight's gradient by kernels/grad/few_weight.cuh."""
    yield x.dtype != torch.float32, "the kernel is written for float32"
    yield from _fused_obstacles(x, x.dtype)
    shared = device_properties(x.device.index).shared
    yield few_weights(weight, size, split, shared).shared > shared, "the rows do not fit in shared memory"


# ----------------------------------------------------------------------------------------------------------------- stream

STREAM_CLUSTER = 2  # blocks that share what both need
STREAM_LEAD = 0  # steps that a block's first consumer is ahead of its second one


@first_obstacle
def stream_obstacle(x: Tensor, dtype: torch.dtype):
    """Of a convolution by kernels/conv/stream.cuh."""
    yield from _fused_obstacles(x, dtype)


class Views(NamedTuple):
    """Of stream by views of patches: positions of a sample, from the first result to the last, with what lies between rows; products of a
    tile, and bytes of its patches; teams, as many as shared memory has a stage for."""

    positions: int
    products: int
    bytes: int
    teams: int


def views(image: Sequence[int], filters: Sequence[int], walk, split: bool, device: Device) -> Views | None:
    """None where it can't run. walk: a jobs.Walk. split: are operands two float16?"""
    if {*walk.stride} != {1}:
        return None
    _, channels, *kernel = filters
    taps = [(k - 1) * d for k, d in zip(kernel, walk.dilation)]
    padded = [size + a + b for size, a, b in zip(image[2:], walk.before, walk.behind)]
    lines, row = padded[-2:]
    sample = math.prod(padded)
    first = sum(each * pitch for each, pitch in zip(taps, (lines * row, row, 1)[-len(taps) :]))
    patch = costs.VIEWS_POSITIONS + taps[-2] * row + taps[-1]
    eights, of_plane = ceil_div(channels, 8), math.prod(kernel[-2:])
    pairs, left = (eights, eights) if split else (eights // 2, eights % 2)
    products, units = pairs * of_plane + left * ceil_div(of_plane, 2), eights * (1 + split)
    products *= math.prod(kernel[:-2])
    stage, staging = ceil_div(units * patch * 16, 128) * 128, 4 * 2560  # of a team
    room = device.shared - 512 - products * 2 * 64 * 16
    teams = min(2 if split else 4, room // (staging + stage))
    counted = sample * units < 1 << 30 and image[0] * (sample + costs.VIEWS_POSITIONS) < 1 << 31
    if teams < 1 or not counted or (sample + costs.VIEWS_POSITIONS) * max(row, lines) >= 1 << 32:
        return None
    return Views(sample - first, products, units * patch * 16 * math.prod(kernel[:-2]), teams)


def _reads_planes(shapes: costs.Shapes, walk, how: costs.Streamed) -> bool:
    """Might kernels/conv/stream.cuh read x in planes as it lies?"""
    meets_all = {shapes.taps, *walk.stride} == {1} and not any((*walk.before, *walk.behind))
    lies = shapes.itemsize == 2 and not how.last and math.prod(shapes.image[2:]) % 8 == 0
    return lies and meets_all and how.window == 1


def streamed(shapes: costs.Shapes, walk, how: costs.Streamed, stores: bool) -> costs.Streamed:
    """`how`, with the rows, views or planes that it multiplies. stores: are results only stored?"""
    image, filters, _, itemsize, device = shapes
    how = how._replace(folded=costs.stream_folded(filters, walk.dilation[-1], how.packs, how.split))
    if device.capability != (9, 0):
        return how
    if stores and _reads_planes(shapes, walk, how):
        lies = how._replace(folded=costs.PLANES, plane=math.prod(image[2:]))
        how = min(how, lies, key=functools.partial(costs.stream_microseconds, shapes))
    planned = views(image, filters, walk, how.split, device) if how.packs or stores else None
    if planned is None:
        return how
    by_views = costs.stream_views(planned, filters[0], image[0], itemsize, how.split, device)
    viewed = how._replace(views=by_views, folded=costs.VIEWS, shared=False, plane=0)
    times = [costs.stream_microseconds(shapes, each) for each in (how, viewed)]
    return viewed if stores and times[1] < times[0] else how._replace(views=by_views if how.packs else None)


def stream_defines(shapes: costs.Shapes, how: costs.Streamed) -> dict[str, int]:
    device, tile = shapes.device, costs.stream_tile(shapes, how)
    known = {"CAPABILITY": 90 if device.capability == (9, 0) else 80, "SHARED_LIMIT": device.shared}
    known |= {"COLUMNS": tile.columns, "CLUSTER": STREAM_CLUSTER, "LEAD": STREAM_LEAD}
    known |= {"SPLIT": int(how.split), "SHARES": tile.shares, "FOLDED": how.folded}
    return spatial_defines(shapes.filters) | known
