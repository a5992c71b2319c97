"""How long each way of a convolution, and of its gradients, is expected to take: in microseconds of an H200, by what was measured there, scaled to
another GPU (`Scale`) by its clock, its multiprocessors and its memory."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple


class Scale(NamedTuple):
    """What a GPU has of an H200's: clock rate, multiprocessors times that, memory bandwidth. What a launch takes is the same everywhere."""

    clock: float = 1.0
    compute: float = 1.0
    memory: float = 1.0


H200 = Scale()
# kernels/conv/stream.cuh, fitted to benchmarks/results/sizes/2026-11-30-h200-alone-units.json, on an H200. By the bytes of a value, then a tile's columns (beside
# one another in trials/stream.json), in microseconds: of all launches, of each tile that a block computes one after the other, and of each step of it, 64
# channels in of one tap.
STREAM_TILES = {
    2: {256: (3.0, 2.9, 0.628), 192: (3.0, 2.1, 0.496), 128: (3.0, 1.5, 0.339)},
    4: {256: (3.0, 5.6, 0.628), 192: (3.0, 4.0, 0.500), 128: (3.0, 3.0, 0.340)},
}
# What the copy engine takes at most for a row of operands of a position, few or many; a tile takes that where it is more. Fitted to sizes of
# 64 channels out in trials/stream.json, and to 47 in benchmarks/results/fuse/2026-11-25-h200-stream.json, before rows were folded.
STREAM_ROW = 0.003
# In how many shares a tile's products may be, of so many steps at least, and what adds them (kernels/conv/terms.cuh).
STREAM_SHARES, LEAST_SHARE, SUMMING_START = (1, 2, 3, 4, 6, 8), 4, 1
# By mma.sync: µs of all, of any tile, of each of its steps, of 32 operands, 128 channels and positions; of an H200 (trials/gathered.json), by mma.sync about
# as fast as an 8.0 is. By wgmma it is twice as fast as that, and later GPUs are half as fast (NVIDIA's tables).
GATHERED_TILES, GATHERED_BLOCKS = (4.0, 6.9, 0.26), 2
TENSOR_CORES = {(9, 0): 1.0, (8, 0): 0.5}
# Of 128 columns alone where an operand is two float16; the step predicted, from half as many products again, and its sums added once more.
SPLIT_TILES = {128: (10.2, 3.0, 0.65)}
# By views of patches (kernels/conv/stream_views.cuh), in microseconds: of all launches beside what packs, and how much longer a tile takes where operands
# are split; of any tile, of each of its products, of each of its channels out in float32, of each kilobyte of its patches (trials/views.json,
# few_channels.json: within a tenth on average, 0.28 at most).
VIEWS_START, VIEWS_SPLIT = 1, 1.25
VIEWS_TILE, VIEWS_PRODUCT, VIEWS_CHANNEL, VIEWS_KILOBYTE = 0.41, 0.031, 0.014, 0.0075
# The library's convolution in the same record: microseconds that any takes, and multiplications and additions a microsecond, by the bytes.
LIBRARY_STARTS = {2: 10, 4: 12}
# Channels, from which on x in planes is turned for it (layouts.py). Of images in 16 bits and more than one tap, forward, from so many of x on where so many
# come out (384 to 24: `others` in sizes/2026-11-30-h200-drawn-later.json; 192 to 24: 0.76 ms in planes, 0.56 turned, trials/units.json).
LIBRARY_TURNS, LIBRARY_TURNS_MANY, LIBRARY_TURNS_OUT = 32, 128, 8
LIBRARY_OPERATIONS = {2: 780e6, 4: 420e6}
# Of images with so many channels out at most it computes as many, or twice as many (64 to 64: sizes/2026-11-30-h200-alone-units.json); of filters with more than
# nine taps in 16 bits (channels are computed 64 at once); in TF32 where a dilation is more than 2; and where channels are no multiple of four, of which it has no
# operands as they lie, a multiprocessor's of tiles of so many positions and channels out (trials/library_rates.json).
LIBRARY_FEW_OUT, LIBRARY_HALF_OUT, FEW_OUT = {2: 220e6, 4: 107e6}, {2: 445e6, 4: 250e6}, 32
LIBRARY_TAPS, LIBRARY_DILATED = 450e6, 110e6
LIBRARY_UNALIGNED = 0.97e6
# Of so many positions and channels out. In TF32, of images, where no more than half of the multiprocessors have one, it takes as long as theirs, and where
# a quarter have, a part of that, because they have shares of its products.
LIBRARY_TILE, LIBRARY_SHARES = 128, 2.5
# Of volumes in 16 bits, of channels and from so many on; of fewer channels out than 64, or in than 32, as of those (the same record).
LIBRARY_VOLUMES_16, LIBRARY_VOLUMES_16_MOST, VOLUMES_MANY = 440e6, 700e6, 128
# Of volumes in TF32, for each channel in, of few at least, and at most (benchmarks/results/fuse/2026-11-24-h200-forward.json: 31e6 and 43e6 with 8, 130e6
# with 32); of channels out it computes 32 at once (trials/views.json: 41e6 from 16 to 16), of channels and taps, too (trials/random_speed.json).
LIBRARY_VOLUMES, LIBRARY_VOLUMES_LEAST, LIBRARY_VOLUMES_MOST = 4e6, 15e6, 200e6
# Where TF32 isn't run: of any filter, and of 3 x 3 from 64 channels on in images of so many rows and columns, at most (28e6 to 78e6; of smaller
# images 22e6 and 29e6: trials/float32.json). Of channels in it computes 8 at once, of channels out 32 at least (trials/views.json: 16e6 with 3 in, 10e6 with 16 out).
# Of one channel in, in images, at least 1.5e6 (trials/random_speed.json).
LIBRARY_FLOAT32, LIBRARY_WINOGRAD, WINOGRAD_ROWS, LIBRARY_ONE_CHANNEL = 41e6, 80e6, 28, 1.5e6
# … of images with few channels in, but of filters of one tap, for each term of a sum, of 16 channels out and more (trials/few_channels.json: 0.3e6
# to 0.5e6 of 3 to 16 channels, in TF32, in 16 bits, and from 8 channels on in float32).
LIBRARY_FEW, FEW_CHANNELS = 0.45e6, 16
# Of volumes in 16 bits, of fewer than 8 channels in (the same: 7e6 to 11e6); channels last (sizes drawn by seed 1131: 27e6).
LIBRARY_VOLUMES_FEW = {False: 10e6, True: 27e6}
# kernels/conv/narrow2d.cuh, by the bytes of a value: microseconds of any tile of 128 columns of a row, of 64 channels out, for each tap and 8
# channels in, and for each channel out (the same record, within a sixth).
ROW_TILES = {2: (0.85, 0.03, 0.0065), 4: (0.93, 0.07, 0.013)}
ROWS_START = 6
# … narrow3d.cuh: picoseconds of any position and block of 16 channels out, for each term of a sum, and each channel out (the same, within a third).
VOLUME_POSITION = {2: (10, 0.22, 0.6), 4: (2, 0.48, 0.6)}
VOLUME_START = 12
# How much faster the library's convolution must be expected to be for a mainloop of few channels to give way: of 5 x 1 and 1 x 1 filters it took three
# times as long as expected (trials/random_speed.json: 6006, 6053).
FEW_LIBRARY = 1.4
# Where the library runs the tail inside, what is launched behind it can't be why it takes longer: only where stream is expected to take so much of its
# time it runs.
SURE_INSIDE = 0.85
# In 16 bits, of planes of an odd size, how much longer takes what turns x for the library; a pass from v, which it gives turned, to planes, element by element
# (2 images of 128 channels, 155 x 263, to 192 by 3 x 3: 141 us in all, sizes/2026-11-30-h200-drawn-turned.json); and, of filters of one tap, what stores ours.
ODD_TURNED, ODD_PASSED, ODD_STORED = 1.1, 3.5, 1.1
# kernels/conv/one_tap.cuh: products a microsecond, of an H200's 30e6; positions of a sample that a block computes.
ONE_TAP_START, ONE_TAP_PRODUCTS, ONE_TAP_POSITIONS = 3, 9e6, 512
# kernels/conv/wide.cuh, that only writes v, by the bytes of a value, or where operands are split: microseconds of all, of any tile, 128 columns of a row and
# 64 or 128 channels out, and of each of its products, of 16 terms for 64 channels; of how many of those weights are in registers, and how much longer it
# takes of more. Where stream is expected to take less than so much of that it runs (trials/short_rows.json: within a ninth on average, 0.41 at most).
WIDE_TILES = {2: (12.6, 0.25, 0.0545), 4: (13, 0.91, 0.0515), "split": (10, 1.39, 0.27)}
WIDE_PRODUCTS, WIDE_LATER, WIDE_LOSES = 36, 1.4, 0.9
WIDE_LIBRARY = 1.2  # … and the library where it is expected to take less though it took so much longer
# Bytes a microsecond, by those of a value (2 images of 512 channels, 287 x 174, to 384 by 1 x 1: 0.417 ms, where stream takes 0.251; 16 of 256, 215 x 220, to
# 48 in float16: 0.394, where the library takes 0.302).
WIDE_BYTES = {2: 1.0e6, 4: 2.0e6}
VIEWS, PLANES = 0, -1  # as `folded`
VIEWS_POSITIONS = 128  # of a tile
VIEWS_SPREAD = 32  # channels out at most, of which each warp has eight
PACKING_START = 3  # microseconds, of each launch that packs, or looks for what must be computed again
PASS_BYTES = 3.8e6  # a microsecond, of what is read and written once: packing, and a pass over v
# The library's gradients of weights and of x, channels last (trials/convolution_layouts.json; of 16 bits not measured: nearly forward's, so
# that nothing is taken from it that it may do as fast); and those of
# kernels/grad/packed_weight.cuh and packed_input.cuh by wgmma (trials/packed_gradients.json: 0.48 and 0.42 ms for 304 GFLOP), and by mma.sync
# (trials/min_add_by_wgmma.json).
LIBRARY_WEIGHT_OPERATIONS = {2: 700e6, 4: 143e6}
# Where TF32 isn't run; and of volumes, for each channel in and at most, then and else. From steps of benchmarks/results/sizes/2026-11-27-h100-last.json
# and of 43 and 47, less what else they do: 48e6; of volumes 2e6 to 6e6 with 32 channels, else 80e6 with 32, 145e6 with 64, 200e6 with 256.
# Of images' filters with more than nine taps about 9e6 (5 x 5, 48 to 128 channels, in 2026-11-30-h200-drawn-early.json: most of a step of 3.2 ms).
# Of 16 bits twice that, and as much as of images: with 64 channels alone it was measured.
LIBRARY_WEIGHT_FLOAT32 = {False: 60e6, True: 9e6}
LIBRARY_VOLUMES_WEIGHT = {(4, True): (0.3e6, 41e6), (4, False): (2.5e6, 200e6), (2, False): (5e6, 700e6)}
WEIGHT_OPERATIONS = {True: 560e6, False: 300e6}
LIBRARY_INPUT_OPERATIONS = {2: 700e6, 4: 223e6}
# By lines (kernels/grad/packed_lines.cuh): of each 64 positions twice as many bytes come to shared memory, whose bandwidth products take
# whole; and of a plane's x alone, positions that take as long as so many with products.
LINES_OPERATIONS, LINES_AHEAD = 450e6, 24
LINES_START, LINES_MERGED = 10, 2.5  # µs, and of each MB of filters (trials/weight_gradient_last.json)
INPUT_OPERATIONS = {True: 560e6, False: 320e6}
# The library's of x, of volumes in TF32, of which it computes 128 channels in at once below 32, and 32 channels out (fitted to its kernels in
# trials/input_gradients.json: 46e6 to 122e6; with 3 channels in half of that); of images with few channels, for each, at least as of 8 (24e6 of 8, in float32 7e6 of 8, 18e6 of 16).
LIBRARY_VOLUMES_INPUT = 110e6
LIBRARY_FEW_INPUT, LIBRARY_FEW_INPUT_FLOAT32 = {2: 7e6, 4: 3.5e6}, 1.1e6
# Of few channels in: the library's of images for each channel, at least as of 8, and at most (steps of benchmarks/results/fuse/2026-11-26-h100-train.json
# less what their passes' bytes take: 19e6 to 21e6 with 8 channels to 64, 12e6 to 32, 32e6 with 16 to 64); its of volumes at most (trials/few_weights.json:
# 4e6 to 23e6). Those of kernels/grad/few_weight.cuh in the same record, one for each TF32 product, within a fifth: what launches take, the
# longer one of products and bytes, and a part of the shorter one, which isn't hidden.
LIBRARY_FEW_WEIGHTS, LIBRARY_FEW_WEIGHTS_MOST, LIBRARY_FEW_VOLUMES = 2.6e6, 32e6, 23e6
FEW_WEIGHTS_OPERATIONS, FEW_WEIGHTS_START, FEW_WEIGHTS_BESIDE = 200e6, 15, 0.6
# Of ours, with the two more that packs dz; where x and dz lie channels last, by launches for both.
WEIGHT_LAUNCHES = {False: {2: 5, 4: 7}, True: {2: 3, 4: 5}}
# A tail inside a mainloop, in float32, picoseconds of an element that are not hidden: of wide's tails at least, of a second result, and of each
# instruction (trials/second_results.json: within 0.2 of what wide's problems took more or less than by a pass behind v, 0.6 of the others').
WIDE_TAIL, SECOND, INSTRUCTION = 0.3, 0.45, 0.042


class Streamed(NamedTuple):
    """How kernels/conv/stream.cuh convolves. packs: is x packed first, but for views, of which it always is? split: are operands two float16? folded:
    taps of which a row of operands has the pixels, VIEWS, or PLANES, which are read as they lie; plane: then positions of one; reduces: does a tile have room for what becomes of v beside its sums? window:
    elements of v of which the result has one (jobs.py's `gathered`); passes: of products, each in place of one over v; alone: v itself is the result, and no pass is saved;
    beside_wide: could kernels/conv/wide.cuh write v? dilation: the filter's; views: the microseconds of those, of a result that is stored, if they could
    be; last: does x lie channels last? inside: would the library run the tail inside its convolution? shared: may a tile's products be shares, which are
    added behind?"""

    packs: bool = True
    split: bool = False
    folded: int = 1
    reduces: bool = False
    window: int = 1
    passes: int = 1
    alone: bool = False
    beside_wide: bool = False
    dilation: int = 1
    views: float | None = None
    last: bool = False
    inside: bool = False
    shared: bool = False
    plane: int = 0


class Shapes(NamedTuple):
    """Of a convolution: shapes of x and of the filters; positions of all of v; bytes of a value; the GPU, a tiling.Device."""

    image: Sequence[int]
    filters: Sequence[int]
    positions: int
    itemsize: int
    device: object

    @property
    def taps(self) -> int:
        return math.prod(self.filters[2:])

    def moving(self, values: float) -> float:
        """Microseconds of so many values, read or written once."""
        return values * self.itemsize / (PASS_BYTES * self.device.scale.memory)


class StreamTile(NamedTuple):
    """The fastest: its columns, in how many shares its products are computed, and the microseconds of all products."""

    columns: int
    shares: int
    microseconds: float


def stream_folded(filters: Sequence[int], dilation: int, packs: bool, split: bool) -> int:
    """Taps of a row whose pixels, of few channels, fit into one row of 64 operands. dilation: of columns."""
    columns, channels = filters[-1], filters[1]
    fits = dilation == 1 and columns * _pixel(channels, split) <= 64 and (channels <= 8 or not split)
    return columns if packs and fits else 1


def stream_views(views, outputs: int, samples: int, itemsize: int, split: bool, device) -> float:
    """Microseconds of stream's products by views of patches. views: a tiling.Views. itemsize: of results."""
    blocks = -(-outputs // 64)
    turns = -(-samples * -(-views.positions // VIEWS_POSITIONS) // max(device.multiprocessors // blocks, 1))
    tile = VIEWS_TILE + VIEWS_PRODUCT * views.products + VIEWS_CHANNEL * min(outputs, 64) * itemsize / 4
    tile += VIEWS_KILOBYTE * views.bytes / 1024
    alone = 1 if views.teams > 1 else 2  # nothing hides what a single team waits for
    return VIEWS_START + turns * tile * alone * (VIEWS_SPLIT if split else 1) / device.scale.clock


def _pixel(channels: int, split: bool) -> int:
    """Its operands."""
    return -(-channels // 8) * 8 * (1 + split)


def stream_tile(shapes: Shapes, how: Streamed) -> StreamTile:
    if how.folded == VIEWS:
        return StreamTile(VIEWS_POSITIONS, 1, how.views)
    if shapes.device.capability != (9, 0):
        return _gathered_tile(shapes, how)
    (outputs, channels, *kernel), positions, device = shapes.filters, shapes.positions, shapes.device
    block = 128 if outputs > 64 else 64
    folded = max(how.folded, 1)
    row, copies = _pixel(channels, how.split) * folded, math.prod(kernel) // folded
    blocks, group = -(-outputs // block), 64 if row > 32 or how.plane else 32 if row > 16 else 16
    copies *= -(-row // group)
    steps, results = -(-copies // (64 // group)), positions * outputs
    found = []
    for columns, (start, tile, step) in (SPLIT_TILES if how.split else STREAM_TILES[shapes.itemsize]).items():
        if columns > (128 if how.reduces else 192 if block == 64 else 256):
            continue
        of_tile = columns * 128 // block
        # Two blocks are a cluster, side by side in channels, and each fetches half of the positions, or else in positions.
        shared = 2 if blocks % 2 == 0 else 1
        tiles = positions // how.plane * -(-how.plane // of_tile) if how.plane else -(-positions // of_tile)
        units = blocks // shared * -(-tiles // (2 // shared))
        for shares in _shares(steps, how):
            turns = -(-units * shares // max(device.multiprocessors // 2, 1))
            of_steps = max(
                -(-steps // shares) * step, copies * of_tile // shared * STREAM_ROW / shares - tile
            )
            time = start + turns * (tile + of_steps) / device.scale.clock
            found.append(StreamTile(columns, shares, time + _summing(shares, results, device)))
    return min(found, key=lambda each: each.microseconds)


def _shares(steps: int, how: Streamed) -> Sequence[int]:
    """In how many a tile's steps may be."""
    return [n for n in STREAM_SHARES if n == 1 or how.shared and n * LEAST_SHARE <= steps]


def _summing(shares: int, results: int, device) -> float:
    """Microseconds of what adds them."""
    if shares == 1:
        return 0.0
    return SUMMING_START + 4 * shares * results / (PASS_BYTES * device.scale.memory)


def _gathered_tile(shapes: Shapes, how: Streamed) -> StreamTile:
    """Of kernels/conv/stream_sm80.cuh: GATHERED_BLOCKS tiles of a multiprocessor at a time."""
    (outputs, channels, *kernel), positions, device = shapes.filters, shapes.positions, shapes.device
    block, row = 128 if outputs > 64 else 64, _pixel(channels, how.split) * how.folded
    group = 32 if row > 16 else 16
    steps = -(-(-(-row // group) * math.prod(kernel) // how.folded) // (32 // group))
    start, tile, step = GATHERED_TILES
    tile *= block / 128
    step *= block / 128 * TENSOR_CORES[8, 0] / _tensor_cores(device) * (1.5 if how.split else 1)
    found = []
    for shares in _shares(steps, how):
        tiles = -(-outputs // block) * -(-positions // 128) * shares
        turns = -(-tiles // (GATHERED_BLOCKS * device.multiprocessors))
        time = start + turns * GATHERED_BLOCKS * (tile + -(-steps // shares) * step) / device.scale.clock
        found.append(StreamTile(64, shares, time + _summing(shares, positions * outputs, device)))
    return min(found, key=lambda each: each.microseconds)


def _tensor_cores(device) -> float:
    """Products a cycle of a multiprocessor's, as a part of an H200's."""
    return TENSOR_CORES.get(device.capability, 0.25)


def stream_microseconds(shapes: Shapes, how: Streamed) -> float:
    """Of stream's products and of what packs for them."""
    return _streaming(shapes, how, shapes.taps == 1 and shapes.itemsize == 2 and not how.last)


def _streaming(shapes: Shapes, how: Streamed, in_planes: bool) -> float:
    """The same. in_planes: does a filter of one tap store values of 16 bits as x lies, in planes?"""
    products = stream_tile(shapes, how).microseconds
    if in_planes:
        moved = shapes.moving(_met(shapes) + shapes.positions * shapes.filters[0])
        products = max(products, moved) * (ODD_STORED if shapes.positions // shapes.image[0] % 2 else 1)
    return (products + packing_microseconds(shapes, how)) * how.passes  # each packs anew


def _met(shapes: Shapes) -> int:
    """Values of x that are packed; a filter of one tap meets those of its positions, but neighbours are read."""
    of_x = math.prod(shapes.image)
    return min(of_x, 2 * shapes.positions * shapes.filters[1]) if shapes.taps == 1 else of_x


def packing_microseconds(shapes: Shapes, how: Streamed) -> float:
    """Of what packs for stream."""
    packs_x = (how.packs or how.folded == VIEWS) and not how.plane
    # Filters take about twice as long.
    packed = 2 * math.prod(shapes.filters) + packs_x * _met(shapes)
    launches = 1 + packs_x + 2 * (shapes.itemsize == 4)
    moved = packed * (shapes.itemsize + 2 + 2 * how.split)
    return launches * PACKING_START + moved / (PASS_BYTES * shapes.device.scale.memory)


def taps_microseconds(shapes: Shapes, how: Streamed) -> float:
    """Of kernels/conv/taps.cuh, with what packs for it and what adds its products."""
    image, (outputs, channels, *kernel), positions, itemsize, device = shapes
    terms, pixels = outputs * math.prod(kernel), image[0] * math.prod(image[2:])
    spread, how = (terms, channels, *[1] * len(kernel)), how._replace(folded=1, shared=False)
    moved = 8 * terms * pixels + itemsize * outputs * positions
    ours = _streaming(shapes._replace(filters=spread, positions=pixels), how, False)
    return ours + SUMMING_START + moved / (PASS_BYTES * device.scale.memory)


def _librarys_rate(shapes: Shapes, how: Streamed) -> float:
    """Multiplications and additions a microsecond of the library's convolution; how.split: where it runs no TF32."""
    image, filters, itemsize, split = shapes.image, shapes.filters, shapes.itemsize, how.split

    def computed(count: int, at_once: int) -> float:
        return -(-count // at_once) * at_once / count

    outputs, channels, *kernel = filters
    taps = computed(channels * math.prod(kernel), 32) if len(kernel) == 3 else 1
    is_few = len(kernel) == 2 and channels <= FEW_CHANNELS and math.prod(kernel) > 1
    few = LIBRARY_FEW * channels * math.prod(kernel) / computed(outputs, 16) if is_few else math.inf
    if len(kernel) == 3 and itemsize == 2 and channels < 8:
        return LIBRARY_VOLUMES_FEW[how.last] / computed(outputs, 16)
    if len(kernel) == 3 and itemsize == 2:
        many = min(channels, outputs) >= VOLUMES_MANY
        rate = LIBRARY_VOLUMES_16_MOST if many else LIBRARY_VOLUMES_16
        return rate * min(outputs / 64, 1) * min(channels / 32, 1)
    if not split and len(kernel) == 2:
        rate = LIBRARY_OPERATIONS[itemsize]
        if outputs <= FEW_OUT:
            rate = LIBRARY_FEW_OUT[itemsize] / computed(outputs, FEW_OUT)
        elif outputs <= 2 * FEW_OUT and not (itemsize == 2 and math.prod(kernel) > 9):
            rate = LIBRARY_HALF_OUT[itemsize] / computed(outputs, 2 * FEW_OUT)
        elif itemsize == 2 and math.prod(kernel) > 9:
            rate = LIBRARY_TAPS / computed(outputs, 64) / computed(channels, 64)
        elif itemsize == 4 and how.dilation > 2:
            rate = LIBRARY_DILATED
        return min(rate, few)
    if not split:
        rate = min(max(LIBRARY_VOLUMES * channels, LIBRARY_VOLUMES_LEAST), LIBRARY_VOLUMES_MOST)
        return rate * min(outputs / 32, 1) / taps
    if kernel == [3, 3] and channels >= 64 and min(image[2:]) >= WINOGRAD_ROWS:
        return LIBRARY_WINOGRAD
    eights = computed(channels, 8) if taps == 1 else min(computed(channels, 8), computed(3, 8))
    rate = LIBRARY_FLOAT32 / (computed(outputs, 32) * eights * taps)
    if channels >= 8:
        return min(rate, few)
    return max(rate, LIBRARY_ONE_CHANNEL) if channels == 1 and len(kernel) == 2 else rate


def _librarys_products(shapes: Shapes, how: Streamed) -> float:
    """Their microseconds."""
    _, (outputs, channels, *kernel), positions, itemsize, device = shapes
    sums = 2 * channels * math.prod(kernel)
    tiles = -(-positions // LIBRARY_TILE) * -(-outputs // LIBRARY_TILE)
    if len(kernel) == 2 and itemsize == 4 and not how.split and (outputs % 4 or channels % 4):
        turns = -(-tiles // device.multiprocessors)
        rate = LIBRARY_UNALIGNED * device.scale.clock * _tensor_cores(device)
        return turns * LIBRARY_TILE**2 * sums / rate
    rate = _librarys_rate(shapes, how) * device.scale.compute
    rate *= 1 if how.split else _tensor_cores(device)
    products = positions * outputs * sums / rate
    if len(kernel) == 3 or itemsize == 2 or how.split or 2 * tiles > device.multiprocessors:
        return products
    shares = LIBRARY_SHARES if 4 * tiles <= device.multiprocessors else 1
    return max(products, LIBRARY_TILE**2 * sums * device.multiprocessors / (shares * rate))


def library_turns(filters: Sequence[int], itemsize: int, forward: bool) -> bool:
    """Is x, in planes, turned for the library's tensor cores? forward: no gradient?"""
    outputs, channels, *kernel = filters
    many = outputs >= LIBRARY_TURNS_OUT and channels >= LIBRARY_TURNS_MANY
    images = len(kernel) == 2 and math.prod(kernel) > 1 and itemsize == 2
    return min(outputs, channels) >= LIBRARY_TURNS or (forward and images and many)


def turns_for_library(shapes: Shapes, how: Streamed) -> bool:
    """`library_turns` of a convolution that goes forward."""
    return not (how.last or how.split) and library_turns(shapes.filters, shapes.itemsize, forward=True)


def by_library(shapes: Shapes, how: Streamed) -> float:
    """Microseconds of the library's convolution, and of passes over v behind it that ours saves."""
    image, filters, positions, itemsize, device = shapes
    x, v = math.prod(image), positions * filters[0]
    moved = shapes.moving(x + math.prod(filters) + v)
    products = _librarys_products(shapes, how)
    found = LIBRARY_STARTS[itemsize] + max(products, moved)
    behind = how.passes * PACKING_START + shapes.moving(how.passes * v + v / how.window)
    if turns_for_library(shapes, how):
        odd_x, odd_v = (itemsize == 2 and each // image[0] % 2 for each in (x // image[1], positions))
        found += PACKING_START + shapes.moving(2 * x) * (ODD_TURNED if odd_x else 1)
        if odd_v and how.window == 1:  # then the result is of v's size, in planes
            behind += (ODD_PASSED - 1) * shapes.moving(2 * v)
    if how.beside_wide:
        by_wide = wide_microseconds(image, filters, itemsize, how.split, device)
        found = min(found, max(by_wide, LIBRARY_STARTS[itemsize] + moved))
    if how.alone or how.inside:
        return found
    return found + behind


def pass_microseconds(shapes: Shapes) -> float:
    """Of a pass that reads v."""
    return PACKING_START + shapes.moving(shapes.positions * shapes.filters[0])


def rows_microseconds(image: Sequence[int], filters: Sequence[int], itemsize: int, device) -> float:
    """Of kernels/conv/narrow2d.cuh's products. image: with zeros around it."""
    outputs, channels, *kernel = filters
    rows, columns = (size - taps + 1 for size, taps in zip(image[2:], kernel))
    tiles = image[0] * rows * -(-columns // 128) * -(-outputs // 64)
    start, of_slice, of_output = ROW_TILES[itemsize]
    tile = start + of_slice * math.prod(kernel) * -(-channels // 8) + of_output * min(outputs, 64)
    return ROWS_START + -(-tiles // device.multiprocessors) * tile / device.scale.clock


def volume_microseconds(image: Sequence[int], filters: Sequence[int], itemsize: int, device) -> float:
    """Of kernels/conv/narrow3d.cuh's products. image: with zeros around it."""
    outputs, *terms = filters
    positions = image[0] * math.prod(size - taps + 1 for size, taps in zip(image[2:], filters[2:]))
    start, of_term, of_output = VOLUME_POSITION[itemsize]
    position = start + of_term * math.prod(terms) + of_output * min(outputs, 16)
    return VOLUME_START + positions * -(-outputs // 16) * position * 1e-6 / device.scale.compute


def one_tap_microseconds(image: Sequence[int], filters: Sequence[int], itemsize: int, device) -> float:
    """Of kernels/conv/one_tap.cuh: what its bytes take, or its products."""
    outputs, channels, *_ = filters
    plane = math.prod(image[2:])
    computed = image[0] * -(-plane // ONE_TAP_POSITIONS) * ONE_TAP_POSITIONS
    moved = image[0] * plane * (channels + outputs) * itemsize / (PASS_BYTES * device.scale.memory)
    products = computed * channels * outputs / (ONE_TAP_PRODUCTS * device.scale.compute)
    return ONE_TAP_START + max(moved, products)


def wide_microseconds(
    image: Sequence[int], filters: Sequence[int], itemsize: int, split: bool, device
) -> float:
    """Of kernels/conv/wide.cuh's products, of images without zeros around them; or of its bytes: each block of channels out reads x."""
    outputs, channels, *kernel = filters
    rows, columns = (size - taps + 1 for size, taps in zip(image[2:], kernel))
    block = 128 if outputs > 64 else 64
    tiles = image[0] * rows * -(-columns // 128) * -(-outputs // block)
    products = math.prod(kernel) * -(-channels // 16)
    start, tile, product = WIDE_TILES["split" if split else itemsize]
    tile += product * products * block / 64
    tile *= WIDE_LATER if products > WIDE_PRODUCTS else 1
    read = math.prod(image) * -(-outputs // block)
    if math.prod(kernel) == 1:
        read += image[0] * rows * columns * outputs  # written as slowly
    moved = read * itemsize / (WIDE_BYTES[itemsize] * device.scale.memory)
    return start + max(moved, -(-tiles // device.multiprocessors) * tile / device.scale.clock)


class Differentiated(NamedTuple):
    """How kernels/grad/packed_weight.cuh gives a weight's gradient. packs: of a dz that it packs. split: of two float16 an operand, where the
    library runs float32. last: does x lie channels last, as dz then does? rounds: is it rounded for the library first? later:
    tiling.later_lines."""

    packs: bool = False
    split: bool = False
    last: bool = False
    rounds: bool = False
    later: int | None = None


def weight_gradient(
    image: Sequence[int],
    filters: Sequence[int],
    size: Sequence[int],
    itemsize: int,
    how: Differentiated,
    device,
) -> tuple[float, float]:
    """Microseconds of the weight's gradient by our own kernel, and by the library, of a dz of those extents that is written before: in 16 bits, or
    channels last as x then is, too, which the library's is turned to; of volumes, and in float32, in planes."""
    ours = _own_weight_gradient(image, filters, size, itemsize, how, device)
    return ours, _librarys_weight_gradient(image, filters, size, itemsize, how, device)


def _own_weight_gradient(image, filters, size, itemsize: int, how: Differentiated, device) -> float:
    (outputs, channels, *kernel), split = filters, how.split
    x, dz, bytes_a_time = (
        math.prod(image),
        image[0] * math.prod(size) * outputs,
        PASS_BYTES * device.scale.memory,
    )
    # Blocks have 64 channels of either kind. Of few channels several planes of the filter lie side by side.
    planes, taps = math.prod(kernel[:-2]), math.prod(kernel[-2:])
    beside = max(1, min(64 // (-(-channels // 8) * 8), planes))
    blocks = -(-outputs // 64), -(-channels // 64) * -(-planes // beside)  # of channels out; in, and planes
    # Each has a multiprocessor, and its part of the filters; as many as there are multiprocessors share positions.
    count, sums = math.prod(blocks), taps * 64**2
    splits = max(device.multiprocessors // count, 1)
    turns = -(-count * splits // device.multiprocessors)
    products = 2 * image[0] * _positions_of_steps(size, how) * sums * (3 if split else 1)
    products *= turns * device.multiprocessors / splits
    by_wgmma = device.capability == (9, 0) and not split
    products /= (
        WEIGHT_OPERATIONS[by_wgmma] if how.later is None else LINES_OPERATIONS
    ) * device.scale.compute
    again = 1 if how.later is None else kernel[-1]  # by lines x is staged for each column of taps
    read = 2 * (dz * blocks[1] + x * beside * blocks[0] * again)
    packed = (itemsize + 2) * x + (itemsize + 4 if how.packs else 2) * dz
    moved = packed * (1 + split) + 4 * sums * count * splits  # sums are merged
    found = WEIGHT_LAUNCHES[how.last][itemsize] * PACKING_START + moved / bytes_a_time
    if how.later is not None:
        found += (LINES_START + LINES_MERGED * 4e-6 * math.prod(filters)) / device.scale.compute
    return found + max(products, read * (1 + split) / bytes_a_time)


def _positions_of_steps(size: Sequence[int], how: Differentiated) -> int:
    """Positions of a sample, as many as take products: strips have 64 columns; lines end where planes do, with 16."""
    *depth, height, columns = size
    if how.later is None:
        return math.prod(depth) * height * -(-columns // 64) * 64
    return math.prod(depth) * (-(-height * columns // 16) * 16 + how.later * LINES_AHEAD)


def _librarys_weight_gradient(image, filters, size, itemsize: int, how: Differentiated, device) -> float:
    (outputs, channels, *kernel), x = filters, math.prod(image)
    dz, rate = image[0] * math.prod(size) * outputs, LIBRARY_WEIGHT_OPERATIONS[itemsize]
    turned = 2 * itemsize * x * how.rounds if how.last else 2 * itemsize * x + itemsize * dz
    if how.split:
        rate, turned = LIBRARY_WEIGHT_FLOAT32[math.prod(kernel) > 9], 0
    if len(kernel) == 3:
        each, most = LIBRARY_VOLUMES_WEIGHT[itemsize, how.split]
        rate, turned = min(each * channels, most), 0
    products = 2 * dz * channels * math.prod(kernel) / (rate * device.scale.compute)
    return LIBRARY_STARTS[itemsize] + turned / (PASS_BYTES * device.scale.memory) + products


def few_weights_gradient(
    image: Sequence[int], filters: Sequence[int], size: Sequence[int], tile, split: bool, device
) -> tuple[float, float]:
    """The same of few channels in: of a dz in planes, of those extents. tile: a tiling.FewWeights. split: are operands two TF32?"""
    outputs, channels, *kernel = filters
    taps, x, pixels = math.prod(kernel), math.prod(image), image[0] * math.prod(size)
    dz, bytes_a_time, rates = pixels * outputs, PASS_BYTES * device.scale.memory, device.scale.compute
    padded = pixels // size[-1] * (-(-size[-1] // 16) * 16) * tile.outputs * tile.columns
    products = (3 if split else 1) * 2 * padded / (FEW_WEIGHTS_OPERATIONS * rates)
    again = (tile.lines + kernel[1] - 1) / tile.lines if len(kernel) == 3 else 1  # x is read
    less, more = sorted((products, 4 * tile.blocks * (dz + again * x) / bytes_a_time))
    ours, volumes = FEW_WEIGHTS_START + more + FEW_WEIGHTS_BESIDE * less, len(kernel) == 3
    rate = min(LIBRARY_FEW_WEIGHTS * max(channels, 8), LIBRARY_FEW_WEIGHTS_MOST)
    rate = LIBRARY_FEW_VOLUMES if volumes else rate
    theirs = max(2 * dz * channels * taps / (rate * rates), 4 * (dz + x) / bytes_a_time)
    theirs += 2 * 4 * (dz + x) / bytes_a_time if volumes else 0  # they are turned to channels last first
    return ours, LIBRARY_STARTS[4] + theirs


def input_gradient(
    image: Sequence[int], filters: Sequence[int], itemsize: int, device
) -> tuple[float, float]:
    """The same of x's gradient."""
    outputs, channels, height, width = filters
    x, bytes_a_time, rates = math.prod(image), PASS_BYTES * device.scale.memory, device.scale.compute
    dz = positions_of(image, filters) * outputs
    # Rows of operands, and the weights for which registers have no room, are all in shared memory (kernels/conv/wide_sm90_pipeline.cuh).
    groups, steps = -(-outputs // 16) * 2, -(-outputs // 16) * height * width
    room = (height + 1) * groups * (127 + width) * 16 + max(0, steps - 28) * 2048
    by_wgmma = device.capability == (9, 0) and channels <= 64 and room <= device.shared
    columns, padded = -(-image[3] // 128) * 128, -(-channels // 64) * 64
    products = 2 * image[0] * image[2] * columns * padded * outputs * height * width
    products /= INPUT_OPERATIONS[by_wgmma] * rates
    ours = 3 * PACKING_START + max(products, (2 * dz + itemsize * x) / bytes_a_time)
    return ours, library_input_gradient(image, filters, itemsize, device, dz)


def library_input_gradient(
    image: Sequence[int], filters: Sequence[int], itemsize: int, device, dz: int, tf32: bool = True
) -> float:
    """Microseconds of x's gradient by the library; channels last first but for volumes in float32. dz: its elements. tf32: does it run that
    where values are float32?"""
    outputs, channels, *kernel = filters
    bytes_a_time, products = PASS_BYTES * device.scale.memory, 2 * dz * channels * math.prod(kernel)
    rate, turned = LIBRARY_INPUT_OPERATIONS[itemsize], math.prod(image)
    if itemsize == 4 and len(kernel) == 3:
        products *= -(-outputs // 32) * 32 / outputs * (max(channels, 128) / channels if channels < 32 else 1)
        rate = LIBRARY_VOLUMES_INPUT
    elif channels < 64:
        few = LIBRARY_FEW_INPUT[itemsize] if tf32 else LIBRARY_FEW_INPUT_FLOAT32
        rate, turned = min(rate, few * max(channels, 8)), turned + dz
    if itemsize == 4 and not tf32:
        rate = min(rate, LIBRARY_FLOAT32)
    moved = 2 * itemsize * turned / bytes_a_time
    return LIBRARY_STARTS[itemsize] + products / (rate * device.scale.compute) + moved


def positions_of(image: Sequence[int], filters: Sequence[int]) -> int:
    return image[0] * math.prod([extent - taps + 1 for extent, taps in zip(image[2:], filters[2:])])
