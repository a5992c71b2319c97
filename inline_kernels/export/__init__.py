"""One problem for one device as one file, which runs by itself: `cell`."""

from inline_kernels.export.export import VARIANTS, cell

__all__ = ["VARIANTS", "cell"]
