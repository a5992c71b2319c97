"""Fused PyTorch kernels, compiled at run time.

from inline_kernels import declare      # a kernel of yours as an operator with a gradient: inline_kernels/loader/operators.py
"""

from __future__ import annotations

import importlib

_PLACES = {
    "compare_pair": "inline_kernels.bench.compare",
    "plot": "inline_kernels.bench.charts",
    "table": "inline_kernels.bench.charts",
    "declare": "inline_kernels.loader.operators",
}
__all__ = list(_PLACES)


def __getattr__(name: str):
    """The public names, imported when they are first asked for: importing the package costs nothing."""
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_PLACES[name]), name)
