"""What the walkthroughs share: the machine in a line, a batch that fits it, a kernel on show, and counting bytes.

A *pass* is a pair (bytes read, bytes written). A walkthrough lists the passes of each line of code, predicts times from
them and from two rates that it measures on the machine at hand, and puts the prediction beside the measurement.
"""

from __future__ import annotations

import inspect
import textwrap
from pathlib import Path

import pygments
import torch
from IPython.display import HTML, Markdown, display
from pygments.formatters import HtmlFormatter
from pygments.lexers import get_lexer_by_name

import compare
import inline_loader
import loader_toolchain as toolchain


def environment() -> str:
    """Prints what this notebook runs on, in a line; returns the device, "cuda" or "cpu"."""
    device, why = compare.pick_device()
    compilers = [toolchain.host_compiler()] + ([toolchain.nvcc()] if device == "cuda" else [])
    versions = [toolchain.version_of(compiler).strip().splitlines() for compiler in compilers]
    lines = [next((line for line in version if "release" in line), version[0]) for version in versions]
    print(" · ".join([why, f"torch {torch.__version__}", *lines]))
    return device


def batch_size(problem, device: str) -> int:
    """On a CPU the problem's batch for small machines; on a GPU its own, halved until training fits into free memory."""
    if device == "cpu":
        return problem.cpu_batch_size
    batch, weight = problem.input_shape[0], problem.get_model().conv.weight
    sample = (
        weight.shape[0] * 4 * torch.Size(problem.input_shape[2:]).numel()
    )  # of the convolution's output, about
    while batch > 1 and 16 * batch * sample > torch.cuda.mem_get_info()[0]:
        batch //= 2
    return batch


def ours(problem, device: str) -> list[str]:
    """The variants of ours that a comparison on `device` shows."""
    return [name for name in compare.variants_of(problem, device) if name not in compare.PEERS]


def show(kernel: str, device: str, *, cpp: str, cuda: str) -> HTML:
    """The function of the kernel's source for `device` whose first line contains `cpp` or `cuda`, and the comment above it.

    Raises ValueError if there is none.
    """
    suffix, language, start = (".cu", "cuda", cuda) if device == "cuda" else (".cpp", "cpp", cpp)
    path = inline_loader.KERNELS / f"{kernel}{suffix}"
    lines = path.read_text(encoding="utf-8").splitlines()
    first = next((i for i, line in enumerate(lines) if start in line), None)
    if first is None:
        raise ValueError(f"expected a line with {start!r} in {path}")
    last = next(i for i in range(first, len(lines)) if lines[i] in ("}", "};"))
    while first and lines[first - 1].startswith(("//", "template", "__global__")):
        first -= 1
    return _highlighted("\n".join(lines[first : last + 1]), language, f"kernels/{path.name}")


def python(function) -> HTML:
    """A Python function's source."""
    path = Path(inspect.getsourcefile(function))
    title = f"{path.parent.name}/{path.name}"
    return _highlighted(textwrap.dedent(inspect.getsource(function)), "python", title)


def _highlighted(code: str, language: str, title: str) -> HTML:
    """Code in colours that read on a light and on a dark page, because they bring their own background."""
    box = "background: #f8f8f8; padding: 0.5em 1em; overflow-x: auto"
    text = "background: #f8f8f8; color: #222222; font-family: monospace; line-height: 1.3; margin: 0; white-space: pre"
    formatter = HtmlFormatter(noclasses=True, cssstyles=box, prestyles=text)
    return HTML(f"<p>{title}</p>" + pygments.highlight(code, get_lexer_by_name(language), formatter))


def status():
    """A function that shows a text in a line of its own, in place of the text before."""
    handle = display({"text/plain": ""}, raw=True, display_id=True)
    return lambda text: handle.update({"text/plain": text}, raw=True)


def verdict(phase: str, result: compare.Check) -> str:
    """What a check found, in short: what failed, or what came nearest to its limit."""
    lines = result.failures or [f"nearest to its limit is {result.worst}"]
    head = f"{result.variant}, {phase}: {'passes' if result.ok else 'FAILS'} ({len(result.errors)} results compared)"
    return "\n   ".join([head, *lines])


def megabytes(passes: dict[str, tuple[float, float]]) -> Markdown:
    """The passes as a table, with their sum."""
    rows = {**passes, "**in all**": total(passes)}
    lines = [f"| {name} | {read / 1e6:.1f} | {written / 1e6:.1f} |" for name, (read, written) in rows.items()]
    return Markdown("\n".join(["| | MB read | MB written |", "|:--|--:|--:|", *lines]))


def total(passes: dict[str, tuple[float, float]]) -> tuple[float, float]:
    """Bytes read and written by all passes."""
    return tuple(map(sum, zip(*passes.values())))


def rate(device: str, size: float) -> float:
    """Bytes per millisecond of simple passes over `size` bytes, three in a row as eager PyTorch runs them."""
    tensor = torch.rand(int(size) // 4, device=device)
    passes = {"three additions": lambda: tensor.add(1).add(1).add(1)}
    return 3 * 2 * size / compare.time(passes, device, seconds=1)["three additions"].median


def products(device: str) -> float:
    """Operations per millisecond of the tensor cores: a large product of float16 matrices."""
    size = 8192
    a, b = (torch.randn(size, size, device=device).half() for _ in range(2))
    return 2 * size**3 / compare.time({"product": lambda: a @ b}, device, seconds=1)["product"].median


def beside(predicted: dict[str, float], rows: list[dict], floor: float) -> Markdown:
    """Predicted and measured milliseconds and speed-ups of every variant, and the share of `floor`, in milliseconds."""
    lines = [
        "| variant | predicted ms | measured ms | predicted speed-up | measured speed-up | share of the floor |"
    ]
    lines.append("|:--|--:|--:|--:|--:|--:|")
    for row in rows:
        guess, measured = predicted.get(row["variant"]), row["median_ms"]
        if measured is None:
            lines.append(f"| {row['variant']} | | failed its check or did not run | | | |")
            continue
        guesses = ("", "") if guess is None else (f"{guess:.2f}", f"{predicted['eager'] / guess:.2f} ×")
        speedup = row["speedup_vs_eager"]
        speedup = "" if speedup is None else f"{speedup:.2f} ×"
        lines.append(
            f"| {row['variant']} | {guesses[0]} | {measured:.2f} | {guesses[1]} | {speedup} | {floor / measured:.1%} |"
        )
    return Markdown("\n".join(lines))
