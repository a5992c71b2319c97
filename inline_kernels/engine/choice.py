"""What "auto" runs on a GPU where more than one variant can: what was fastest at such sizes in a recorded grid of them.

A rule is a variant, or a question and two rules: (a property of the convolution, most, the rule where it is at most `most`, the rule
where it is more). RULES has one for an epilogue's operator, by its name, in a pass that backward will follow ("train") and in any other
("forward"). They are fitted to RECORD, by `python benchmarks/grid.py --fit RECORD`, which prints them: so that nothing in it takes a GPU
longer than eager does. Other GPUs than the record's are taken to be like it. Where there is no rule, the most fused variant runs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

Rule = str | tuple[str, int, "Rule", "Rule"]

# image (N, C_in, extents) and filters (C_out, C_in, extents) are the shapes, itemsize the bytes in which eager convolves a value.
PROPERTIES: dict[str, Callable[[Sequence[int], Sequence[int], int], int]] = {
    "channels in": lambda image, filters, itemsize: filters[1],
    "channels out": lambda image, filters, itemsize: filters[0],
    "taps": lambda image, filters, itemsize: math.prod(filters[2:]),
    "bytes a value": lambda image, filters, itemsize: itemsize,
    "columns": lambda image, filters, itemsize: image[-1] - filters[-1] + 1,  # of the result
    "positions": lambda image, filters, itemsize: _positions(image, filters),  # of all results
    "results": lambda image, filters, itemsize: _positions(image, filters) * filters[0],
    "products": lambda image, filters, itemsize: _positions(image, filters) * math.prod(filters),
}

RECORD = "benchmarks/results/grid/2026-11-24-h200.json"
# A 2-D convolution and a pointwise tail: in one kernel (kernels/conv/wide.cuh), or a pass behind the library's convolution. It holds for any
# such tail: what differs between two of them is much less than the convolution.
WIDE_POINTWISE: Rule = (
    "products",
    7700000000,
    (
        "products",
        250000000,
        ("channels in", 360, "fused", "epilogue"),
        (
            "products",
            740000000,
            ("results", 260000, "epilogue", "fused"),
            ("channels in", 78, "fused", "epilogue"),
        ),
    ),
    ("columns", 90, "epilogue", "fused"),
)
RULES: dict[tuple[str, str], Rule] = {
    ("conv2d_min_add_multiply", "forward"): WIDE_POINTWISE,
    ("conv2d_min_add_multiply", "train"): (
        "columns",
        23,
        (
            "products",
            1600000000,
            "fused",
            ("positions", 2700, "epilogue", ("bytes a value", 3, "fused", "epilogue")),
        ),
        ("columns", 122, ("products", 11000000000, "fused", "epilogue"), ("taps", 21, "fused", "epilogue")),
    ),
    ("conv3d_multiply_instancenorm_clamp_multiply_max", "forward"): (
        "results",
        180000,
        ("channels in", 180, "fused", "eager"),
        ("products", 120000000, "epilogue", "fused"),
    ),
    ("conv3d_multiply_instancenorm_clamp_multiply_max", "train"): (
        "channels in",
        23,
        ("products", 2600000, "eager", "fused"),
        ("results", 2900000, ("bytes a value", 3, "eager", "fused"), "fused"),
    ),
    ("conv3d_groupnorm_min_clamp_dropout", "forward"): "fused",
    ("conv3d_groupnorm_min_clamp_dropout", "train"): "fused",
    ("conv2d_groupnorm_scale_maxpool_clamp", "forward"): (
        "columns",
        23,
        ("products", 240000000, "fused", "eager"),
        (
            "bytes a value",
            3,
            ("positions", 45000, ("products", 51000000, "fused", "eager"), "fused"),
            "fused",
        ),
    ),
    ("conv2d_groupnorm_scale_maxpool_clamp", "train"): (
        "bytes a value",
        3,
        (
            "products",
            370000000,
            ("channels in", 23, "fused", "eager"),
            ("results", 9000000, "eager", "fused"),
        ),
        ("columns", 9, ("products", 110000000, "fused", "eager"), "fused"),
    ),
}


# kernels/conv/stream.cuh, fitted to benchmarks/results/trials/stream.json, on an H200. By the bytes of a value, then a tile's columns, in
# microseconds: of all launches, of each tile that a block computes one after the other, and of each step of it, 64 channels in of one tap.
STREAM_TILES = {
    2: {256: (5.3, 3.7, 0.628), 192: (4.8, 2.6, 0.494), 128: (5.5, 1.9, 0.336)},
    4: {256: (12.6, 5.6, 0.618), 192: (10.1, 4.0, 0.500), 128: (10.2, 3.0, 0.340)},
}
# The library's convolution in the same record: microseconds that any takes, and multiplications and additions a microsecond, by the bytes.
LIBRARY_STARTS = {2: 10, 4: 12}
LIBRARY_OPERATIONS = {2: 780e6, 4: 420e6}
PACKING_START = 3  # microseconds, of each launch that packs, or looks for what must be computed again
PASS_BYTES = 3.8e6  # a microsecond, of what is read and written once: packing, and a pass over v


def stream_columns(
    image: Sequence[int], filters: Sequence[int], positions: int, itemsize: int, multiprocessors: int
) -> tuple[int, float]:
    """The fastest tile's columns, and the microseconds of stream's products with it. positions: of all results."""
    outputs, channels, *kernel = filters
    block = 128 if outputs > 64 else 64
    blocks, steps = -(-outputs // block), -(-channels // 64) * math.prod(kernel)
    found = {}
    for columns, (start, tile, step) in STREAM_TILES[itemsize].items():
        of_tile = min(columns, 192 if block == 64 else columns) * 128 // block
        # Two blocks are a cluster, side by side in channels or else in positions.
        units = (
            blocks // 2 * -(-positions // of_tile)
            if blocks % 2 == 0
            else blocks * -(-positions // (2 * of_tile))
        )
        found[columns] = start + -(-units // max(multiprocessors // 2, 1)) * (
            tile + steps * step * (128 // block)
        )
    fastest = min(found, key=found.get)
    return fastest, found[fastest]


def stream_loses(
    image: Sequence[int],
    filters: Sequence[int],
    positions: int,
    itemsize: int,
    multiprocessors: int,
    packs: bool,
) -> str | None:
    """Why not stream, where the library's convolution and a pass over v behind it take no longer; or None. packs: is x packed first?"""
    x, weights, v = math.prod(image), math.prod(filters), positions * filters[0]
    ours = stream_columns(image, filters, positions, itemsize, multiprocessors)[1]
    launches = 1 + packs + 2 * (itemsize == 4)
    ours += launches * PACKING_START + (weights + packs * x) * (itemsize + 2) / PASS_BYTES
    moved = (x + weights + v) * itemsize / PASS_BYTES
    products = 2 * v * math.prod(filters[1:]) / LIBRARY_OPERATIONS[itemsize]
    theirs = LIBRARY_STARTS[itemsize] + max(products, moved) + 2 * v * itemsize / PASS_BYTES
    return (
        None if ours < theirs else "the library's convolution and a pass behind it are faster at such sizes"
    )


def _positions(image: Sequence[int], filters: Sequence[int]) -> int:
    return image[0] * math.prod([extent - taps + 1 for extent, taps in zip(image[2:], filters[2:])])


def fastest(rule: Rule, image: Sequence[int], filters: Sequence[int], itemsize: int) -> tuple[str, str]:
    """The variant that `rule` names, and what leads there. torch.compile traces it, with sizes that may be symbolic, so it asks for no
    more than it needs, and its words have the bounds."""
    bounds = {}
    while not isinstance(rule, str):
        name, most, low, high = rule
        within = PROPERTIES[name](image, filters, itemsize) <= most
        bounds[name, "at most" if within else "more than"] = most
        rule = low if within else high
    return rule, ", ".join([f"{side} {most} {name}" for (name, side), most in bounds.items()])
