"""Fused PyTorch kernels, compiled at run time.

    from inline_kernels import fuse                       # fast = fuse(model): a model's convolutions with what follows them, as kernels
    from inline_kernels import compare_pair, plot, table  # checks, times and shows a model beside a faster version of it
    from inline_kernels import declare                    # makes a kernel an operator with a gradient

inline_loader.load compiles a source; its cell magics are %%cuda and %%cpp. Nothing heavy is imported before it is asked for.
"""

from __future__ import annotations

import importlib

_PLACES = {
    "fuse": "inline_kernels.engine.fuse",
    "compare_pair": "inline_kernels.bench.compare",
    "plot": "inline_kernels.bench.charts",
    "table": "inline_kernels.bench.charts",
    "declare": "inline_kernels.loader.operators",
}
__all__ = list(_PLACES)


def __getattr__(name: str):
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_PLACES[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_PLACES])
