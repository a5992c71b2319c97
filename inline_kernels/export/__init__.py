"""One model for one device as one file, which runs by itself: `cell_of`."""

from inline_kernels.export.export import cell_of, notebook

__all__ = ["cell_of", "notebook"]
