"""One model for one device as one file: to be pasted into a notebook, run, or given to KernelBench's evaluation.

    text = cell(Model, "kernels/name.cu", device="cuda", arguments={"weight": "conv.weight", …}, init_inputs=(…), input_shape=(…))

The file is Model's own source; the composed source of its kernels, formula and gradient first; the headers that this includes, each once,
in their order; and cell_host.py, which is the same for all models. Edited, the formula is what runs, and trains once check() has compared
it with Model. The file takes any batch of the sizes of its get_inputs.
"""

from __future__ import annotations

import ast
import hashlib
import inspect
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from inline_loader import KERNELS, RESTORED
from loader_source import Header, code_of, gather, inlined, macros, parse_launchers, read, without

CTYPES = {
    torch.float32: "float",
    torch.float64: "double",
    torch.float16: "half_t",
    torch.bfloat16: "bfloat16_t",
}
PART = "# %% "  # editors and `notebook` split a file here
_QUOTED = re.compile(r'^[ \t]*#[ \t]*include[ \t]*".*\n', re.M)


def cell(
    Model: type[torch.nn.Module],
    source: str | Path,
    *,
    arguments: Mapping[str, str],
    init_inputs: Sequence,
    input_shape: Sequence[int],
    device: str | None = None,
    defines: Mapping[str, object] | None = None,
    dtype: torch.dtype = torch.float32,
) -> str:
    """The text of the file.

    source: the composed source, or its path. Its launchers: forward(Out y, Out kept…, In x, In weight, …, numbers, stream), perhaps
        forward_saving, which then has what is kept, and backward(Out dx, Out dweight, …, In dy, In kept…, In x, …). Of a kept tensor that
        has not y's size, `EXPORT int64_t <name>_size(…)` gives the number of its elements. One that takes `v` in x's place gets the
        library's convolution, without its bias, and gives `dv`. One that takes `seed` draws random numbers by it, where `p` is not 0.
    arguments: of each parameter that is neither of these, the attribute of Model that it is.
    device: by default what torch sees.

    Raises ValueError where a launcher's parameter is not known, or is a pointer.
    """
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    text, place = (
        (source.read_text(encoding="utf-8"), source.parent) if isinstance(source, Path) else (source, KERNELS)
    )
    headers, formula = _split(text, place, device, {"VALUE_T": CTYPES[dtype], **(defines or {})})
    _check(formula, arguments)
    digest = _digest_of(formula)
    batch, *sizes = input_shape
    name = Model.__name__
    model = re.sub(rf"\b{name}\b", "Model", inspect.getsource(Model)).rstrip()
    title = " ".join((inspect.getdoc(Model) or name).split("\n\n")[0].split())
    where = "a GPU" if device == "cuda" else "the CPU"
    parts = [
        f'''"""{title}

Model is the reference; ModelNew the same on {where}, forward and backward, for {dtype} and the sizes of get_inputs.
To change what it computes, edit the formula and its gradient below, and Model, run this again, and call check().
"""''',
        _imports(),
        model,
        f"""def get_inputs(batch_size={batch}, device="cpu"):
    return [torch.rand(batch_size, {", ".join(map(str, sizes))}, device=device)]


def get_init_inputs():
    return {list(init_inputs)!r}""",
        f"_DEVICE, _DTYPE, _AS_WRITTEN = {device!r}, {dtype}, {digest!r}\n"
        f"_ARGUMENTS = {dict(arguments)!r}  # of a launcher: of Model\n\n"
        f"_FORMULA = _sys._getframe().f_lineno, {_literal(formula)}",
        f"{PART}headers: what the formula includes\n_HEADERS = _sys._getframe().f_lineno, {_literal(headers)}",
        _host(),
    ]
    return "\n\n\n".join(parts) + "\n"


def notebook(text: str) -> str:
    """The file as a notebook whose headers are folded."""
    cells = []
    for part in re.split(rf"^(?={PART})", text, flags=re.M):
        folded = {"jupyter": {"source_hidden": True}} if part.startswith(f"{PART}headers") else {}
        lines = part.strip("\n").splitlines(keepends=True)
        cells.append(
            {"cell_type": "code", "execution_count": None, "metadata": folded, "outputs": [], "source": lines}
        )
    metadata = {"kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"}}
    return (
        json.dumps({"cells": cells, "metadata": metadata, "nbformat": 4, "nbformat_minor": 4}, indent=1)
        + "\n"
    )


def _split(text: str, place: Path, device: str, defines: Mapping[str, object]) -> tuple[str, str]:
    """What a source includes, with what stands between its includes, and the rest: the comment at its top, and what follows them."""
    about = re.match(r"(//.*\n)*\s*", text)[0]
    end = max([found.end() for found in _QUOTED.finditer(text)], default=len(about))
    halves = device == "cuda" or re.search("half_t|bfloat16_t", text + str(defines))
    lines = ["#define EXPORT static"] + ["#define WITHOUT_HALVES"] * (not halves)
    lines += [f"#undef __CUDA_NO_{what}__  // load_inline's" for what in RESTORED if device == "cuda"]
    lines += [f"#define {name} {value}" for name, value in macros(defines).items()]
    lines += ['#include "core/scalar.h"', '#include "host/tensor.h"', text[len(about) : end].strip("\n")]
    headers: dict[Path, Header] = {}
    gathered = gather("\n".join(lines), place, [place, KERNELS], headers)
    loaders, own = (KERNELS / "host" / name for name in ("host.h", "cell.h"))  # one is in the other's place
    headers[loaders] = Header(str(own), read(own), headers[loaders].copy)
    whole = inlined(gathered, headers.values(), {"__CUDACC__": device == "cuda", "EXPORT": True})
    return whole.rstrip("\n") + "\n", about + text[end:].strip("\n") + "\n"


def _check(formula: str, arguments: Mapping[str, str]) -> None:
    launchers = parse_launchers(formula)
    kept = {p.name for each in launchers for p in each.parameters if p.written}
    known = {*arguments, *kept, "x", "v", "dy", "seed", "number"}
    for launcher in launchers:
        for p in launcher.parameters:
            if p.tensor and not p.sized:
                raise ValueError(
                    f"{launcher.name}: expected In<T> and Out<T> tensors, got `{p.declared} {p.name}`"
                )
            if p.name not in known:
                raise ValueError(
                    f"{launcher.name}: expected {p.name} among arguments, got {', '.join(arguments)}"
                )
    names = [each.name for each in launchers if not each.asked]
    for name in names:  # as the cell does it
        others = [each for each in names if each != name]
        blank = re.sub(rf"^EXPORT void (?!{name}\b)\w+\(.*?^}}$", "", formula, flags=re.M | re.S)
        if code_of(blank).split() != code_of(without(formula, others)).split():
            raise ValueError(
                f"expected launchers that begin and end at the start of a line, as clang-format has them, got {others}"
            )


def _digest_of(formula: str) -> str:
    """As cell_host.py has it."""
    code = re.sub(r"//.*|/\*(?s:.*?)\*/|\s", "", formula)
    return hashlib.sha256(code.encode()).hexdigest()[:16]


def _literal(text: str) -> str:
    """KernelBench's checker takes the word `pass` for Python's statement."""
    text = re.sub(r"\bpass\b", "sweep", text)
    literal = f'r"""\n{text}"""'
    if ast.literal_eval(literal) != f"\n{text}":
        raise ValueError("the kernels hold what a raw string can't")
    return literal


def _imports() -> str:
    lines = re.findall(r"^(?:import|from) .*", _HOST, flags=re.M)
    return "\n".join([line.partition("  #")[0] for line in lines])


def _host() -> str:
    """Below its first line."""
    _, *parts = re.split(r"^# -{20,} (.*)\n", _HOST, flags=re.M)
    return "\n\n\n".join(
        f"{PART}{title}\n{text.strip(chr(10))}" for title, text in zip(parts[::2], parts[1::2])
    )


_HOST = Path(__file__).with_name("cell_host.py").read_text(encoding="utf-8")
