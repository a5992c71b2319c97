"""Fused kernels for PyTorch models, compiled at run time. Nothing heavy is imported before it is asked for."""

from importlib import import_module
from typing import Any

_EXPORTS = {"fuse": "inline_kernels.engine.fuse"}
__all__ = ["fuse"]


def __getattr__(name: str) -> Any:
    if name not in _EXPORTS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(_EXPORTS[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *_EXPORTS])
