"""The cells %%cuda and %%cpp: what their first line asks for, and the pieces of source that several of them share.

    %%cuda NAME A=1            the cell is compiled with the macro A, and NAME calls it
    %%cuda NAME --part         nothing is compiled: NAME is the cell's text, which a later cell takes with `#include "NAME"`
    %%cuda NAME --needs 8.0    compiled where there is nvcc, and a GPU of this compute capability or a later one
    %%cuda NAME --only 9.0     the same, for exactly this one

Where a cell with --needs or --only can't be compiled, it says why, and NAME is None.
"""

from __future__ import annotations

import builtins
import dataclasses
import keyword
import re
import types
from collections.abc import Mapping

import torch

from inline_kernels.loader import toolchain
from inline_kernels.loader.messages import BuildError
from inline_kernels.loader.source import macros

FIRST_LINE = 2  # of a cell's text: the magic is the first


class Part(str):
    """The text of a cell that is a piece of others."""


@dataclasses.dataclass(frozen=True)
class Request:
    """A cell's first line. least, only: a compute capability."""

    name: str
    defines: Mapping[str, str]
    part: bool = False
    least: tuple[int, int] | None = None
    only: tuple[int, int] | None = None

    @classmethod
    def of(cls, line: str) -> Request:
        """Raises ValueError for an option that there is not, or that means nothing there."""
        name, *words = line.split() or [""]
        defines, options = {}, {}
        while words:
            word = words.pop(0)
            if word == "--part":
                options["part"] = True
            elif word in ("--needs", "--only"):
                options["least" if word == "--needs" else "only"] = _capability(
                    word, words.pop(0) if words else ""
                )
            elif word.startswith("-"):
                raise ValueError(f"expected --part, --needs or --only, got {word}")
            else:
                key, _, defines[key] = word.partition("=")
        if "part" in options and (defines or len(options) > 1):
            raise ValueError(
                "expected nothing beside --part: its text is compiled with the cells that include it"
            )
        return cls(name, macros(defines), **options)

    @property
    def lacking(self) -> str:
        """What this machine lacks for a cell that names a compute capability, in a sentence, or ""."""
        asked = self.only or self.least
        if asked is None:
            return ""
        has = torch.cuda.get_device_capability() if torch.cuda.is_available() else None
        if has and (has == asked if self.only else has >= asked):
            try:
                return toolchain.nvcc() and ""
            except BuildError as error:
                return f"{self.name} is not compiled: {error}"
        wanted = f"{asked[0]}.{asked[1]}" + ("" if self.only else " or later")
        got = f"this one has {has[0]}.{has[1]}" if has else "there is none here"
        return f"{self.name} is not compiled: it needs a GPU of compute capability {wanted}, and {got}"


def _capability(option: str, text: str) -> tuple[int, int]:
    found = re.fullmatch(r"(\d+)\.(\d)", text)
    if not found:
        raise ValueError(f"expected a compute capability like 8.0 behind {option}, got {text!r}")
    return int(found[1]), int(found[2])


def check_free(name: str, known: object) -> None:
    """known: what has this name. Raises ValueError for a name that a cell must not take."""
    if hasattr(builtins, name) or keyword.iskeyword(name) or isinstance(known, types.ModuleType):
        what = "an imported module" if isinstance(known, types.ModuleType) else "Python's own"
        raise ValueError(f"expected a name for the cell that is free, but {name} is {what}")


def parts_in(names: Mapping[str, object]) -> dict[str, str]:
    """The texts that cells may include, by their names; their lines are counted as in their cells."""
    return {name: "\n" * (FIRST_LINE - 1) + part for name, part in names.items() if isinstance(part, Part)}


def source_of(kernels) -> str:
    """The text that `kernels` were built of, as inline_loader.load or a cell was given it, with the parts that it includes: `load` takes it.

    Raises TypeError for other objects.
    """
    unit = getattr(kernels, "_Operators__unit", None)  # Operators leaves all plain names to launchers
    if unit is None:
        raise TypeError(f"expected what load, %%cuda or %%cpp gave, got a {type(kernels).__name__}")
    return unit.given
