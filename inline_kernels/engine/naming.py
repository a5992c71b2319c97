"""What sources call things: the arrays and numbers of a launcher, the types of their elements, a user's names and numbers as C++ has them."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field

from .graph import ELEMENTS, Node, Space
from .passes import Array, Key

TYPES = {
    "value": "value_t",
    "output": "output_t",
    "real": "real",
    "parameter": "parameter_t",
    "double": "double",
    "index": "int32_t",
    "byte": "uint8_t",
    "mask": "uint8_t",
    "moments": "Moments<double>",
    "largest": "load::Largest<false>",
    "pool_largest": "load::Largest<true>",
    "seed": "int64_t",
}
SCRATCH, KEPT = (Array(name, "double", Space(False, False, "")) for name in ("scratch", "kept"))
RESULT = Array("y", "output", ELEMENTS)  # of forward, where backward reads it
PASSES = Array(
    "passes", "mask", Space(False, False, "")
)  # 1: a gradient passes; 2: and that of the filters isn't finite
IMAGE, FILTERS, DWEIGHT = (Array(name, "value", ELEMENTS) for name in ("image", "filters", "dweight"))
EXPORTED = {**TYPES, "real": "accumulate_t"}
STRIPS = ("strip_planes", "strip_rows", "strip_columns", "samples", "shares")
CONVOLUTION = ("image_C", "image_D", "image_H", "image_W", "kernel_D", "before", "above", "left")
_TAKEN = set("n c N C at e w i lanes plane block real math load stream scratch kept number parts".split())
_TAKEN |= {
    *STRIPS,
    *CONVOLUTION,
    *"image filters dweight convolution strips strip some first passes any".split(),
}


def identifier(name: str) -> str:
    """A user's name as C++ has it."""
    name = re.sub(r"\W", "_", name)
    name = f"p{name}" if re.match(r"\d|_", name) else name  # as nn.Sequential's modules
    return f"{name}_" if name in _TAKEN else name


def local(node: Node) -> str:
    """The name of a node's value where it has a line."""
    return f"{identifier(node.attr[0])}_{node.id}" if node.op == "leaf" else f"{node.op}{node.id}"


def literal(value: float, real: str = "real") -> str:
    """A number as C++ has it."""
    if math.isfinite(value):
        return repr(value) if real == "double" else f"real({value!r})"
    return f"{real}({'NAN' if value != value else '-INFINITY' if value < 0 else 'INFINITY'})"


def index_of(space: Space, n: str, c: str, channels: str) -> str:
    """Where a small array has its value for sample n and channel c, of so many."""
    return f"{n} * {channels} + {c}" if space.n and space.c else n if space.n else c if space.c else "0"


def total_of(key: Key) -> str:
    """The name of a sum, of moments or of a plane's maximum."""
    return f"{key.what if key.what in ('moments', 'largest') else 'sum'}{key.node.id}"


@dataclass
class Names:
    """What comes into a launcher: arrays by leaf ("v" by that of the convolution), the names of scalars, and of dropouts, by leaf, the number and
    the probability."""

    incoming: dict[Node, Array]
    scalars: Sequence[str] = ()
    random: dict[str, tuple[int, float]] = field(default_factory=dict)
