"""Fused PyTorch kernels, compiled at run time.

    from inline_kernels import fuse                       # fast = fuse(model): a model's convolutions with what follows them, as kernels
    from inline_kernels import graphed                    # run = graphed(step, (x, target)): a training step as one CUDA graph
    from inline_kernels import compare_pair, plot, table  # checks, times and shows a model beside a faster version of it
    from inline_kernels import declare                    # makes a kernel an operator with a gradient

inline_loader.load compiles a source; its cell magics are %%cuda and %%cpp. `%load_ext inline_kernels` adds `%tail fast x`: the next cell
has the formula of the fused model `fast` for the input x; run, that cell binds what it has become. Nothing heavy is imported before it
is asked for.
"""

from __future__ import annotations

import importlib

_PLACES = {
    "fuse": "inline_kernels.engine.fuse",
    "graphed": "inline_kernels.engine.graphed",
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


def load_ipython_extension(shell) -> None:
    """The magic `%tail MODEL INPUT... [--segment N]`: MODEL.source for those inputs, as a cell `%%tail MODEL INPUT...`, which hands its text to
    MODEL.edit. `%tail --own MODEL INPUT...` brings the model's own formula back."""

    def tail(line: str, cell: str | None = None) -> None:
        words = line.split()
        own = "--own" in words
        at = words.index("--segment") if "--segment" in words else len(words)
        segment = int(words[at + 1]) if at < len(words) else 0
        names = [word for word in words[:at] + words[at + 2 :] if word != "--own"]
        if missing := [name for name in names if name not in shell.user_ns] or not names:
            raise NameError(f"expected names of a fused model and its inputs, got {missing or 'none'}")
        model, *inputs = (shell.user_ns[name] for name in names)
        if not hasattr(model, "edit"):
            raise TypeError(f"expected a fused module, got a {type(model).__name__}")
        if own or cell is not None:
            model.edit(*inputs, None if own else cell, segment=segment)
        else:
            shell.set_next_input(f"%%tail {line}\n{model.source(*inputs, segment=segment)}")

    shell.register_magic_function(tail, "line_cell", "tail")
