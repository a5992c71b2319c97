"""The mainloops: what each takes, its tiles, its text with a tail inside (direct.py) and with sinks (sinks.py): `MAINLOOPS`, for generated kernels, and `SOURCES`, around which composed sources are made. Nobody else asks for a mainloop by its name."""

from __future__ import annotations

import contextlib
import math
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from inline_kernels.loader.operators import PLAIN

from . import choice, costs, library, precision, sink_calls, tiling
from .jobs import Job, copies_obstacle, padded_text, walk_defines, walk_of, walk_text
from .passes import Unsupported

# Bytes that narrow3d's staging takes (store/runs.cuh); that sinks take with what the mainloop has itself: those that store, beside some that
# reduce (`pinned_sums`); those that only reduce.
_RUNS_SHARED, _STORES_SHARED, _REDUCES_SHARED = 34 << 10, 42 << 10, 14 << 10
MOST_TAPS = 128  # channels of a block
MOST_TERMS = 1 << 30  # bytes
MOST_PLACES = 64  # a bit for each (kernels/conv/stream_sm80.cuh)
STAYS_LAST = "its result stays channels last for the next convolution"
SLOWER_INSIDE = "v, and a pass over it, take less time than such a tail"


# --------------------------------------------------------------------------------------------------------------- what they are


class Sinks(NamedTuple):
    """A mainloop with sinks. rate: products and sums a second; splits: is an operand two float16?; most: sinks at once; channels: of which a block
    makes one value by position; all: are there no more, is that the result? prepared: lines of the launcher; launch: (number of the pass, sinks)
    to lines that say in how many parts a channel is computed, and lines that launch."""

    headers: Sequence[str]
    declared: str
    rate: float
    splits: Callable[[Job], bool]
    most: int
    channels: int
    all: bool
    prepared: Sequence[str]
    launch: Callable[[int, Sequence], tuple[list[str], list[str]]]
    pinned: Mapping[str, int] | None = None  # macros by which passes with others' sinks have its tiles
    pinned_sums: int = 9  # of one pass, moments as three, that then have room
    beside: float = 1.0  # of sinks.MOST_BESIDE, as many take no longer beside what is stored than behind it
    sums: int = 0  # beside what is stored sums themselves take so many instructions
    packing: Callable[[Job], float] = lambda job: 0.0  # microseconds of what each pass does first


_limit = threading.local()


@contextlib.contextmanager
def no_more_exact_than_eager() -> Iterator[None]:
    """Where eager runs TF32 an exact result is as far from eager's as that is from the exact one: too far for who takes eager's as the measure."""
    before, _limit.is_eager = getattr(_limit, "is_eager", False), True
    try:
        yield
    finally:
        _limit.is_eager = before


def _limits(job: Job) -> bool:
    return getattr(_limit, "is_eager", False) and job.runs_tf32


class Mainloop(NamedTuple):
    """A kernel that convolves, for fronts that it `takes`. obstacle: why it can't run, or is not faster than the schedule `load`, for an x in planes, or
    where it `walks` in any layout; or None. defines: a build's. most: results that it can store. has_places: do its tails know which element of y they compute? walks: does it take a stride,
    padding and dilation (`Walk`)? pads: if not, may there be zeros around x, which is then a copy with them? lies_last: x and results lie channels last, in any type.
    is_exact: in float32, whatever eager runs. gathers: does the copy engine, or what has its limits, where it walks?"""

    name: str
    takes: str
    dimensions: int
    headers: Sequence[str]
    declared: str
    launch: Sequence[str]
    obstacle: Callable[[Job], str | None]
    defines: Callable[[Job], dict]
    has_places: bool = True
    most: int = 1
    walks: bool = False
    pads: bool = False
    sinks: Sinks | None = None
    lies_last: bool = False
    is_exact: bool = False
    gathers: bool = True

    def refuses(self, job: Job) -> str | None:
        """Why it can't run, or is not faster than the schedule `load`; or None. Channels last the library's tensor cores take operands as they lie,
        and ours would turn x, and y again."""
        x, own = job.x, self.takes_last(job.x)
        if job.inside and not own:
            return "the library runs the tail inside its convolution"
        if self.is_exact and _limits(job):
            return "it is more exact than eager"
        if not own and library.is_channels_last(x):
            if x.element_size() == 2 or library.may_run_tf32(x):
                return "x lies channels last, and the library takes it so"
        if job.last and not own and (not self.walks or job.window > 1):
            return STAYS_LAST
        if (reason := self.obstacle(job)) is None and len(job.dtypes) > 1 and not choice.is_silent():
            moved = 4 if torch.float32 in job.dtypes[1:] and job.window == 1 else 8  # is v stored anyway?
            scale = tiling.device_properties(x.device.index).scale
            if choice.inside_loses(costs.SECOND, job.instructions, moved, scale):
                return SLOWER_INSIDE
        return reason

    def takes_last(self, x: Tensor) -> bool:
        """Does it read x channels last, without a copy in planes?"""
        return self.walks and library.is_channels_last(x)

    def check_walk(self, segment, weight: Tensor, window: Sequence[int | None] | None = None) -> None:
        """window: what is pooled in it. Raises Unsupported."""
        walk = walk_of(segment, weight)
        if segment.conv.padding_mode != "zeros" and segment.conv.pads:
            raise Unsupported("the convolution pads with other values than zeros")
        if not self.walks:
            if not (walk.is_dense if self.pads else walk.is_plain):
                raise Unsupported(f"the convolution has a stride{', padding' * (not self.pads)} or dilation")
            return
        window = window or (1,) * self.dimensions
        if None in window:
            raise Unsupported("its windows have a size of their own")
        if self.gathers and (reason := copies_obstacle(walk, weight.shape[2:], window)):
            raise Unsupported(reason)

    def padding(self, segment) -> tuple[Sequence[str], Sequence[str]]:
        """Headers and lines of a launcher for the zeros around x, where it is a copy with them that this convolves."""
        if not (self.pads and segment.conv.pads):
            return (), ()
        return ("conv/padded.cuh",), padded_text(self.dimensions)

    def in_words(self, job: Job) -> str:
        """Its name, and how it goes about it, for `plan`."""
        if self.pads and job.pads:
            return f"{self.name} of a padded copy"
        folded = self.defines(job).get("FOLDED", 1) if self.walks else 1
        if folded == costs.PLANES:
            return f"{self.name} of planes as they lie"
        return self.name + " by views of patches" * (folded == costs.VIEWS)

    def all_defines(self, job: Job) -> dict:
        return self.defines(job) | (walk_defines(job.walk) if self.walks or (self.pads and job.pads) else {})


# ------------------------------------------------------------------------------------------- where they run, and their tiles


def _rows_shared(job: Job, tiles: int) -> int:
    """Bytes of dynamic shared memory, with sinks at most. tiles: of a row."""
    weight, itemsizes = job.weight, [each.itemsize for each in job.dtypes]
    if not job.sinks:
        return tiling.rows_shared(weight, tiles, *itemsizes)
    largest = max(job.x.element_size(), *itemsizes)

    def of_pass(sinks: Sequence) -> int:
        words = sum(sink.words for sink in sinks if sink.kind == "channels")
        return tiling.sinks_shared(weight, tiles, words, [largest for sink in sinks if sink.kind == "store"])

    return max(of_pass(sinks) for sinks in job.sinks)


def _row_tiles(job: Job) -> int:
    """Of a row that is one block's; 0: rows are cut among blocks, because memory has no room for them."""
    tiles = tiling.row_tiles(job.image, job.weight)
    fits = tiles and tiling.rows_obstacle(job.image, job.weight, _rows_shared(job, tiles)) is None
    return tiles if fits else 0


def _rows_fit(job: Job) -> str | None:
    return tiling.rows_obstacle(job.image, job.weight, _rows_shared(job, _row_tiles(job) or 1))


def _rows_obstacle(job: Job) -> str | None:
    return _rows_fit(job) or _rows_lose(job)


def _rows_lose(job: Job) -> str | None:
    return _narrow_loses(job, costs.rows_microseconds)


def _narrow_loses(job: Job, microseconds: Callable, **margin: float) -> str | None:
    """Would a mainloop of few channels in take longer than the library, or than stream?"""
    shapes, how = job.shapes, _streamed(job, job.window > 1)
    products = microseconds(job.image.shape, shapes.filters, shapes.itemsize, shapes.device)
    inside, of_v = _by_stream(job, how)
    others = min(inside, of_v + how.passes * costs.pass_microseconds(shapes))
    copied = costs.PACKING_START + shapes.moving(2 * math.prod(shapes.image)) if job.pads else 0.0
    # PyTorch copies x to planes, and y back, and takes twice as long as a pass.
    if library.is_channels_last(job.x):
        stored = not job.sinks or any(sink.kind == "store" for own in job.sinks for sink in own)
        of_y = shapes.positions * shapes.filters[0] // job.window * stored
        copied += (1 + stored) * costs.PACKING_START + shapes.moving(4 * (math.prod(shapes.image) + of_y))
    return choice.narrow_loses(products, shapes, how._replace(beside_wide=False), copied, others, **margin)


def _by_stream(job: Job, how: costs.Streamed) -> tuple[float, float]:
    """Microseconds by stream, with the tail inside, and of v alone, which passes read; infinite where it can't run, or loses to the
    library, and the second where what can run is timed: `stored` is another candidate then."""
    shapes, single = job.shapes, (1,) * len(job.walk.stride)
    alone, inside, of_v = job._replace(front=None, sinks=(), dtypes=job.dtypes[:1]), math.inf, math.inf
    if shapes.device.capability != (9, 0):  # by mma.sync it isn't known to be faster than others
        return inside, of_v
    if copies_obstacle(job.walk, job.weight.shape[2:], single) is None:
        if job.front and len(job.dtypes) <= 2 and _stream_obstacle(job) is None:
            inside = costs.stream_microseconds(shapes, how)
        if not job.is_alone and not choice.is_silent() and _stream_obstacle(alone) is None:
            of_v = costs.stream_microseconds(shapes, _streamed(alone, False))
    return inside, of_v


def _rows_defines(job: Job) -> dict:
    tiles = _row_tiles(job)
    planned = {"SINKS_SHARED" if job.sinks else "ROWS_SHARED": _rows_shared(job, tiles or 1)}
    reads_on = not tiles or job.image.shape[3] > tiles * tiling.COLUMNS
    return (
        tiling.spatial_defines(job.weight.shape) | {"ROW_TILES": tiles, "READS_ON": int(reads_on)} | planned
    )


def _windows_obstacle(job: Job) -> str | None:
    window = job.front.window
    if None in window or min(window) < 2 or max(window) > 8:
        return "windows have 2 to 8 rows and columns"
    shared = tiling.windows_shared(job.weight, window[1], len(job.dtypes))
    return tiling.rows_obstacle(job.image, job.weight, shared) or _rows_lose(job)


def _windows_defines(job: Job) -> dict:
    planned = {"ROWS_SHARED": tiling.windows_shared(job.weight, job.front.window[1], len(job.dtypes))}
    long_rows = {"LONG_ROWS": int(job.image.shape[3] > tiling.COLUMNS)}
    return tiling.spatial_defines(job.weight.shape) | long_rows | planned


def _narrow3d_obstacle(job: Job) -> str | None:
    own = _STORES_SHARED if job.is_stored else _REDUCES_SHARED if job.sinks else _RUNS_SHARED
    reason = tiling.volume_obstacle(job.image, job.weight, job.x.dtype, own, True)
    return reason or _narrow_loses(job, costs.volume_microseconds)


def _one_tap_obstacle(job: Job) -> str | None:
    x, weight = job.x, job.weight
    if reason := tiling.one_tap_obstacle(x, weight, x.dtype):
        return reason
    image, filters, _, itemsize, device = job.shapes
    ours = costs.one_tap_microseconds(image, filters, itemsize, device)
    split = stream_splits(job)
    if _wide_stores(job) and costs.wide_microseconds(image, filters, itemsize, split, device) < ours:
        return "wide is faster at such sizes"
    return _narrow_loses(job, costs.one_tap_microseconds, margin=1)


def _wide_obstacle(job: Job) -> str | None:
    """Where it can run, a record says where it is no slower than the library's convolution and a pass behind that."""
    x, weight = job.x, job.weight
    if reason := tiling.wide_obstacle(x, weight, x.dtype):
        return reason
    few = weight.shape[1] <= costs.FEW_CHANNELS and not _limits(job)
    if few and not choice.is_silent() and _rows_fit(job) is None:
        return "there are few channels in"
    outputs, channels, *_ = weight.shape
    fills = outputs > 2 * costs.FEW_OUT and channels > (128 if stream_splits(job) else 64)  # stream's tiles
    if tiling.capability(x) == (9, 0) and job.front and fills:
        alone = job._replace(front=None, sinks=(), dtypes=job.dtypes[:1])
        if _stream_obstacle(job if len(job.dtypes) == 1 else alone) is None:
            return "stream is faster from 64 channels in on, from 128 in float32"
    rule, scale = choice.rule("wide", "forward"), tiling.device_properties(x.device.index).scale
    faster, why = choice.fastest(rule, x.shape, weight.shape, x.element_size(), scale)
    if faster != "fused" and not choice.is_silent():
        return f"the library's convolution is faster at such sizes: {why}"
    # Without front and sinks the question is whether wide could write v (`_wide_stores`), which `_wide_loses` asks itself.
    if (job.front or job.sinks) and _wide_loses(job):
        return "stream or the library is faster, whose tiles are no rows"
    if choice.is_silent():
        return None
    lone = job.front or [[sink.kind for sink in own] for own in job.sinks] == [["store"]]
    measured = lone and len(job.dtypes) == 1 and x.dtype == torch.float32 and not stream_splits(job)
    if measured and not job.is_alone and choice.inside_loses(costs.WIDE_TAIL, job.instructions, 8, scale):
        return SLOWER_INSIDE
    return None


def _wide_loses(job: Job) -> bool:
    """Would stream take less, or, of few channels out or of one tap in 16 bits, the library? Where v is written, stream runs if it takes less for that, too."""
    shapes, how = job.shapes, _streamed(job, job.window > 1)
    image, filters, _, itemsize, device = shapes
    ours = costs.wide_microseconds(image, filters, itemsize, stream_splits(job), device)
    inside, of_v = _by_stream(job, how)
    read = costs.pass_microseconds(shapes)
    one_tap = shapes.taps == 1 and itemsize == 2  # of which it waits for memory
    if not choice.is_silent() and (filters[0] <= costs.FEW_OUT or one_tap):  # few of a block of 64
        theirs = costs.by_library(shapes, how._replace(beside_wide=False))
        sure = one_tap or costs.turns_for_library(shapes, how)
        if (1 if sure else costs.WIDE_LIBRARY) * theirs < how.passes * ours:
            return True
    if choice.wide_loses(how.passes * ours, inside):
        return True
    return choice.wide_loses(ours, of_v) and choice.wide_loses(how.passes * ours, of_v + how.passes * read)


def _wide_defines(job: Job) -> dict:
    # A single float16 is as exact as TF32, which is what eager then runs.
    split = job.x.dtype == torch.float32 and not precision.runs_tf32(job.x, job.weight)
    known = tiling.wide_defines(job.x, job.weight, split, aligned=True, gradients=False)
    return known | {"JOINED": int(tiling.joins_tiles(job.x, job.weight))}


def _stream_obstacle(job: Job) -> str | None:
    x, weight = job.x, job.weight
    last = library.is_channels_last(x)
    if last and any(sink.kind != "channels" for own in job.sinks for sink in own):
        return "x lies channels last"
    # What is kept for backward must not hang on sizes that a trace leaves open, nor on what eager's library answers.
    if len(job.dtypes) > 1 and x.dim() == 4:
        return "where backward follows, the library convolves images"
    if reason := tiling.stream_obstacle(x, x.dtype):
        return reason
    window = job.front.window if job.front and job.front.pooled else (1,) * (x.dim() - 2)
    places = sum(a * b for a, b in zip(window, weight.shape[2:])) + (x.dim() == 4)  # an image has a plane
    if tiling.capability(x) != (9, 0) and places > MOST_PLACES:
        return f"filters and windows meet {places} places along axes, of at most {MOST_PLACES}"
    if len(job.dtypes) > 1:
        return "x lies channels last" if last else None
    if choice.is_silent():
        return None
    shapes, how = job.shapes, _streamed(job, job.window > 1)
    reason = choice.stream_loses(shapes, how)
    few = how.folded == costs.VIEWS and weight.shape[0] <= costs.VIEWS_SPREAD  # for half of the lanes
    if reason is None and few and x.element_size() == 2:
        return SLOWER_INSIDE if choice.inside_loses(0, 2 * job.instructions, 4, shapes.device.scale) else None
    return reason


def is_operand(x: Tensor) -> bool:
    """As it lies, channels last?"""
    return library.is_channels_last(x) and x.element_size() == 2 and x.shape[1] % 8 == 0


def _streamed(job: Job, reduces: bool) -> costs.Streamed:
    """passes: of products, each in place of one over v."""
    x, passes, stores = job.x, max(1, len(job.sinks)), not (reduces or job.sinks)
    how = costs.Streamed(
        not is_operand(x),
        stream_splits(job),
        1,
        reduces,
        job.gathered,
        passes,
        alone=job.is_alone,
        beside_wide=not job.is_alone and _wide_stores(job),
        dilation=max(job.walk.dilation),
        last=library.is_channels_last(x),
        inside=job.inside,
        shared=stores and len(job.dtypes) == 1,
    )
    return tiling.streamed(job.shapes, job.walk, how, stores)


def _wide_stores(job: Job) -> bool:
    """Could `wide` write v?"""
    plain = (
        job.settings
        and {*job.settings.stride, *job.settings.dilation} == {1}
        and not any(job.settings.padding)
    )
    return bool(plain and job.x.dim() == 4 and _wide_obstacle(job._replace(front=None, sinks=())) is None)


def stream_splits(job: Job) -> bool:
    """Is an operand two float16? One is as exact as TF32, if eager runs that."""
    return job.x.dtype == torch.float32 and not job.runs_tf32


def _stream_defines(job: Job) -> dict:
    how = _streamed(job, bool(job.sinks or job.front.pooled))
    return tiling.stream_defines(job.shapes, how) | _stream_layouts(job)


def _stream_layouts(job: Job) -> dict:
    last = library.is_channels_last(job.x)
    known = {"LAST": int(last), "WEIGHT_LAST": int(last and library.is_channels_last(job.weight))}
    lies_last = job.last or last and job.follows_x
    return known | {"RESULTS_LAST": int(lies_last), "ROUNDS_RESULT": int(job.rounds)}


def _taps_obstacle(job: Job) -> str | None:
    """Of a channel for each tap (kernels/conv/taps.cuh)."""
    x, filters = job.x, job.weight.shape
    taps = math.prod(filters[2:])
    if taps == 1 or filters[0] * taps > MOST_TAPS:
        return f"it takes more than one tap, and up to {MOST_TAPS} of all channels out"
    if len(job.dtypes) > 1:
        return "backward follows"
    if reason := tiling.stream_obstacle(x, x.dtype):
        return reason
    if 4 * filters[0] * taps * math.prod(x.shape) // x.shape[1] > MOST_TERMS:
        return "its products take more memory than 1 GB"
    return choice.taps_lose(job.shapes, _streamed(job, False))


def _taps_defines(job: Job) -> dict:
    outputs, channels, *kernel = job.weight.shape
    spread, pixels = (
        (outputs * math.prod(kernel), channels, *[1] * len(kernel)),
        math.prod(job.x.shape) // channels,
    )
    how = _streamed(job, False)._replace(folded=1, shared=False)
    shapes = job.shapes._replace(filters=spread, positions=pixels)
    known = tiling.stream_defines(shapes, how) | _stream_layouts(job)
    return known | tiling.spatial_defines(job.weight.shape)


def _depthwise_obstacle(job: Job) -> str | None:
    """Of a depthwise convolution of our own (depthwise.py)."""
    if not library.is_channels_last(job.x):
        return "x lies in planes, and is turned for v"
    return "there is nothing but v" if job.is_alone else None


def _depthwise_defines(job: Job) -> dict:
    taps = dict(zip(("KERNEL_H", "KERNEL_W"), job.weight.shape[2:]))
    return taps | {"LAST": 1, "RESULTS_LAST": 1, "ROUNDS_RESULT": int(job.rounds)}


# ------------------------------------------------------------------------------------------------------------------ the table

_FILTER = "using Filter = conv::Filter<CHANNELS_IN, CHANNELS_OUT, KERNEL_H, KERNEL_W>;"
_ROWS = (
    "using Tile = conv::narrow2d::Tile<Filter, ROW_TILES ? 0 : 128, 1, ROW_TILES ? ROW_TILES : 1, READS_ON>;"
)
_VALUES = "using Values = conv::Exact<CHANNELS_IN, CHANNELS_OUT, 1, KERNEL_H, KERNEL_W>;"


def _is_float32(job: Job) -> bool:
    return job.x.dtype == torch.float32


_STREAM_SINKS = Sinks(
    headers=("reduce/stream.cuh",),
    declared="using Operands = conv::Operands<value_t, SPLIT>;\nusing Values = conv::Walked<Filter, value_t, LAST>;",
    rate=400e12,
    splits=stream_splits,
    most=2,
    channels=16,
    all=False,
    prepared=("const Scratch<uint32_t> largest(N, stream);",),
    launch=sink_calls.stream,
    sums=80,  # 3.5 and 4.4 ps an element (trials/rows.json: 44, 51); to read v again takes 1.1
    packing=lambda job: costs.packing_microseconds(job.shapes, _streamed(job, True)),
)


def _stream_of(dimensions: int, takes: str) -> Mainloop:
    pool = ", Pool" if takes == "windows" else ""
    kind = "Filter, conv::Operands<value_t, SPLIT>, COLUMNS, CLUSTER, LEAD, SHARED_LIMIT, LAST, FOLDED, RESULTS_LAST, ROUNDS_RESULT"
    shares = pool or ", conv::Unpooled, SHARES"
    return Mainloop(
        "stream",
        takes,
        dimensions,
        headers=("conv/stream.cuh",),
        declared=_filter_of(dimensions),
        launch=[
            walk_text(dimensions),
            f"conv::streamed<{kind}{shares}>(x, weight, walk, stream, {{stored}});",
        ],
        obstacle=_stream_obstacle,
        defines=_stream_defines,
        most=1 if pool else 2,
        walks=True,
        sinks=None if pool else _STREAM_SINKS,
    )


def _filter_of(dimensions: int) -> str:
    axes = ", ".join(f"KERNEL_{axis}" for axis in "DHW"[3 - dimensions :])
    return f"using Filter = conv::Filter<CHANNELS_IN, CHANNELS_OUT, {axes}>;"


def _taps_of(dimensions: int) -> Mainloop:
    kind = "Filter, conv::Operands<value_t, SPLIT>, COLUMNS, CLUSTER, LEAD, SHARED_LIMIT, LAST, RESULTS_LAST, ROUNDS_RESULT"
    return Mainloop(
        "taps",
        "elements",
        dimensions,
        headers=("conv/taps.cuh",),
        declared=_filter_of(dimensions),
        launch=[walk_text(dimensions), f"conv::by_taps<{kind}>(x, weight, walk, stream, {{stored}});"],
        obstacle=_taps_obstacle,
        defines=_taps_defines,
        walks=True,
        gathers=False,
    )


def _one_tap_of(dimensions: int) -> Mainloop:
    return Mainloop(
        "one_tap",
        "elements",
        dimensions,
        headers=("conv/one_tap.cuh",),
        declared=_filter_of(dimensions),
        launch=["conv::one_tap<Filter>(x, weight, stream, {stored});"],
        obstacle=_one_tap_obstacle,
        defines=lambda job: tiling.spatial_defines(job.weight.shape),
        most=9,
        is_exact=True,
    )


# Of those that can run the first one does that is not slower than others. With few channels in the library's convolution mostly takes several
# times as long as narrow2d and narrow3d.
MAINLOOPS = (
    *[_one_tap_of(dimensions) for dimensions in (2, 3)],
    Mainloop(
        "narrow2d",
        "elements",
        2,
        headers=("store/strips.cuh",),
        declared=_FILTER,
        launch=[
            _ROWS,
            'static_assert(conv::narrow2d::kShared<Tile, {sinks}> == ROWS_SHARED, "as it is planned");',
            "store::pointwise<Tile>(x, weight, stream, {stored});",
        ],
        obstacle=_rows_obstacle,
        defines=_rows_defines,
        most=9,
        pads=True,
        is_exact=True,
        sinks=Sinks(
            pinned={},
            headers=("reduce/narrow2d.cuh", "store/strips.cuh"),
            declared=f"{_ROWS}\n{_VALUES}",
            rate=600e12,
            splits=_is_float32,
            most=9,
            channels=64,
            all=True,
            prepared=("const auto geometry = Tile::Geometry::of(x);",),
            launch=sink_calls.narrow2d,
        ),
    ),
    Mainloop(
        "narrow2d",
        "windows",
        2,
        headers=("pool/windows.cuh",),
        declared=_FILTER,
        launch=[
            "using Tile = pool::PooledTile<Filter, Pool, LONG_ROWS>;",
            "const auto winners = pool::winners({winners});",
            'static_assert(conv::narrow2d::kShared<Tile, pool::Pooled<output_t, Pool, Tail, std::decay_t<decltype(winners)>>> == ROWS_SHARED, "as it is planned");',
            "pool::pooled<Filter, Pool, LONG_ROWS>(y, x, weight, tail, stream, winners);",
        ],
        obstacle=_windows_obstacle,
        defines=_windows_defines,
        has_places=False,
        most=3,
        pads=True,
        is_exact=True,
    ),
    Mainloop(
        "narrow3d",
        "elements",
        3,
        headers=("store/runs.cuh",),
        declared="using Conv = conv::narrow3d::Shape<value_t, CHANNELS_IN, CHANNELS_OUT, KERNEL_D, KERNEL_H, KERNEL_W>;",
        launch=["store::pointwise<Conv>(x, weight, stream, {stored});"],
        obstacle=_narrow3d_obstacle,
        defines=lambda job: tiling.spatial_defines(job.weight.shape),
        most=9,
        pads=True,
        is_exact=True,
        sinks=Sinks(
            pinned={"LEAST_SHARED": _STORES_SHARED},
            pinned_sums=(_STORES_SHARED - _RUNS_SHARED)
            // 1600,  # a double of 16 channels for each of 12 warps, and levels
            headers=("reduce/narrow3d.cuh", "store/runs.cuh"),
            declared="using Values = conv::Exact<CHANNELS_IN, CHANNELS_OUT, KERNEL_D, KERNEL_H, KERNEL_W>;",
            rate=180e12,
            splits=_is_float32,
            most=9,
            channels=16,
            all=True,
            prepared=(),
            launch=sink_calls.narrow3d,
        ),
    ),
    Mainloop(
        "wide",
        "elements",
        2,
        headers=("conv/wide.cuh",),
        declared=f"{_FILTER}\n"
        "using Target = conv::Target<CAPABILITY, SHARED_LIMIT, X_ALIGNED, COUNTS_IN_INT, JOINED>;\n"
        "using Build = conv::Build<Filter, conv::Operands<value_t, SPLIT>, Target>;",
        launch=["conv::pointwise<Build>(x, weight, stream, {stored});"],
        obstacle=_wide_obstacle,
        defines=_wide_defines,
        has_places=False,
        most=2,
        sinks=Sinks(
            headers=("conv/wide.cuh", "reduce/wide.cuh"),
            declared=_VALUES,
            rate=650e12,
            splits=lambda job: False,
            most=2,
            channels=16,
            all=False,
            prepared=("const Scratch<int32_t> largest(N, stream);",),
            launch=sink_calls.wide,
            beside=0.5,  # about what choice.inside_loses says; measured were 0 instructions (17), which are faster there
        ),
    ),
    *[_taps_of(dimensions) for dimensions in (2, 3)],
    *[_stream_of(dimensions, takes) for dimensions in (2, 3) for takes in ("elements", "windows")],
)


# Of depthwise convolutions, that no other takes.
DEPTHWISE = Mainloop(
    "depthwise",
    "elements",
    2,
    headers=("conv/depthwise.cuh",),
    declared="using Filter = conv::depthwise::Filter<KERNEL_H, KERNEL_W, STRIDE_H>;",
    launch=[
        "conv::depthwise::pointwise<Filter, ROUNDS_RESULT>(y, x, weight, BEFORE_H, BEFORE_W, tail, stream);"
    ],
    obstacle=_depthwise_obstacle,
    defines=_depthwise_defines,
    has_places=False,
    walks=True,
    lies_last=True,
)


# ------------------------------------------------------------------------------------------------- around which sources are made


class Around(NamedTuple):
    """A mainloop around which composed sources are made, forward and backward. `obstacle(x, weight, saving, source)`: why they can't run, or None;
    saving: does backward follow? `defines(x, weight, phase, source)`: macros of a build of forward, forward_saving or backward, or of all
    (cell). Of the source its `macros` count, and `shared`, the bytes of shared memory that its kernels have for their own arrays, at most."""

    obstacle: Callable[..., str | None]
    defines: Callable[..., dict[str, int]]


def _source_wide_defines(x: Tensor, weight: Tensor, phase: str, source) -> dict[str, int]:
    gradients = phase in ("backward", "cell")  # which suits forward, too
    # A single float16 is as exact as TF32, which is what eager then runs.
    tf32 = library.surely_runs_tf32 if gradients else library.eager_runs_tf32
    split = x.dtype == torch.float32 and not tf32(x, weight)
    unknown = type(x) not in PLAIN or x.is_meta or gradients
    found = tiling.wide_defines(
        x, weight, split, aligned=unknown or x.data_ptr() % 4 == 0, gradients=gradients
    )
    if phase == "cell" and x.dtype == torch.float32:
        found["SPLIT"] = "!TF32" if library.suits_tf32(weight) else 1
    return found


def _pool(source) -> tuple[int, int]:
    return source.macros["POOL_H"], source.macros["POOL_W"]


def _pooled_obstacle(x: Tensor, weight: Tensor, saving: bool, source) -> str | None:
    reason = tiling.strips_obstacle(x, weight, x.dtype, _pool(source))
    if reason or not saving:
        return reason
    pool = _pool(source)
    fits = tiling.strips_fit(x, weight, pool, True) and tiling.input_columns(x, weight, pool)
    fits = fits and tiling.sums_fit(x, weight, pool)
    return None if fits else "backward's windows or filters do not fit in shared memory"


def _pooled_defines(x: Tensor, weight: Tensor, phase: str, source) -> dict[str, int]:
    if phase == "cell":
        return _pooled_defines(x, weight, "forward_saving", source) | _pooled_defines(
            x, weight, "backward", source
        )
    if phase == "backward":
        return tiling.strips_backward_defines(x, weight, _pool(source))
    return tiling.strips_defines(x, weight, _pool(source), phase == "forward_saving")


SOURCES = {
    "wide": Around(
        lambda x, weight, saving, source: tiling.wide_obstacle(x, weight, x.dtype), _source_wide_defines
    ),
    "narrow3d": Around(
        lambda x, weight, saving, source: tiling.volume_obstacle(x, weight, x.dtype, source.shared),
        lambda x, weight, phase, source: tiling.spatial_defines(weight.shape),
    ),
    "pooled": Around(_pooled_obstacle, _pooled_defines),
}
