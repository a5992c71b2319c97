"""One model for one device as one file: to be pasted into a notebook, run, or given to KernelBench's evaluation.

The file is Model's own source; the composed source of its kernels, formula and gradient first; the headers that this includes, each once;
and cell_host.py, the same for all models. Edited, the formula is what runs, and trains once check() has compared it with Model.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from inline_kernels.loader.source import Header, gather, inlined, macros, parse_launchers, read
from inline_kernels.loader.units import KERNELS, RESTORED

CTYPES = {torch.float32: "float", torch.float64: "double", torch.float16: "half_t"}
CTYPES |= {torch.bfloat16: "bfloat16_t"}
TYPES = "value_t output_t accumulate_t float double bool uint8_t int32_t int64_t".split()
OF_GPU = "CAPABILITY", "SHARED_LIMIT", "TF32"  # macros of a build, as cell_host.py finds them
PART = "# %% "  # editors and `notebook` split a file here
_HOST = Path(__file__).with_name("cell_host.py").read_text(encoding="utf-8")


def cell(
    Model: type[torch.nn.Module],
    source: str | Path,
    arguments: Mapping[str, str],
    init_inputs: Sequence,
    input_shape: Sequence[int],
    *,
    device: str | None = None,
    defines: Mapping[str, object] | None = None,
    dtype: torch.dtype = torch.float32,
) -> str:
    """The text of the file.

    source: the composed source, or its path. forward(Out y, In x, In weight, …, numbers, stream) gives y; forward_saving, or where there
        is none forward, what else backward needs: Out tensors, each of as many elements as `EXPORT int64_t <name>_size(…)` says;
        without gradients they are empty. Functions backward… run in their order, but for those that have no more than another one has
        of what is wanted; they give dx and dweight, empty where nobody wants them, and a d<argument> or d_<argument> of each parameter, and
        may give more to those behind them. What takes `v` in x's place gets
        the library's convolution, without bias, and gives `dv`. `seed` and `number` are what random numbers are drawn by, where dropout's p is not
        0. A number may be asked of an int64_t function of its name. Macros CAPABILITY and SHARED_LIMIT are the GPU's; TF32 says whether
        the library may convolve float32 in it.
    arguments: of each other parameter, the attribute of Model that it is. device: by default what torch sees.

    Raises ValueError where a launcher has a parameter that is none of these, a pointer, or an Out tensor whose size nobody says.
    """
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    text, place = (read(source), source.parent) if isinstance(source, Path) else (source, KERNELS)
    headers, formula = _split(text, place, device, macros({"VALUE_T": CTYPES[dtype], **(defines or {})}))
    _check(formula, {*arguments, "x", "v", "dy", "seed", "number"})
    title = (inspect.getdoc(Model) or Model.__name__).partition("\n\n")[0].replace("\n", " ")
    model = re.sub(rf"\b{Model.__name__}\b", "Model", inspect.getsource(Model)).rstrip()
    imports = "\n".join(re.findall(r"^(?:import|from) [^#\n]*\w", _HOST, flags=re.M))
    code = re.sub(r"//.*|/\*(?s:.*?)\*/|\s", "", formula)  # as cell_host.py has it
    host = re.split(r"^# -{20,} ", _HOST, maxsplit=1, flags=re.M)[1]
    return f'''"""{title}

Model is the reference; ModelNew the same for {device}, {dtype} and the sizes of get_inputs, forward and backward, for any batch.
To change what it computes, edit the formula and its gradient below, and Model, run this again, and call check().
"""

{imports}


{model}


def get_inputs(batch_size={input_shape[0]}, device="cpu"):
    return [torch.rand(batch_size, {", ".join(map(str, input_shape[1:]))}, device=device)]


def get_init_inputs():
    return {[*init_inputs]}


_DEVICE, _DTYPE, _AS_WRITTEN = "{device}", {dtype}, "{hashlib.sha256(code.encode()).hexdigest()[:16]}"
_ARGUMENTS = {dict(arguments)}  # of a launcher's parameter: Model's attribute
_FORMULA = _sys._getframe().f_lineno, {_literal(formula)}

{PART}headers: what the formula includes
_HEADERS = _sys._getframe().f_lineno, {_literal(headers)}

{PART}{host}'''


def notebook(text: str) -> str:
    """The file as a notebook whose headers are folded."""
    cells = []
    for part in re.split(rf"^(?={PART})", text, flags=re.M):
        folded = {"jupyter": {"source_hidden": True}} if part.startswith(f"{PART}headers") else {}
        cell = {"cell_type": "code", "metadata": folded, "source": part.strip("\n").splitlines(keepends=True)}
        cells.append(cell | {"execution_count": None, "outputs": []})
    kernel = {"kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"}}
    content = {"cells": cells, "metadata": kernel, "nbformat": 4, "nbformat_minor": 4}
    return json.dumps(content, indent=1) + "\n"


def _split(text: str, place: Path, device: str, defines: Mapping[str, str]) -> tuple[str, str]:
    """What a source includes, with what stands between its includes; and the rest: the comment at its top, and what follows them. Of an
    #ifdef of a macro that is known here the live branch is left."""
    cuda, about = device == "cuda", re.match(r"(//.*\n)*\s*", text)[0]
    end = max(
        [found.end() for found in re.finditer(r'^#include ".*\n', text, flags=re.M)], default=len(about)
    )
    halves = cuda or bool(re.search("half_t|bfloat16_t", f"{text}{defines}"))
    lines = ["#define EXPORT static"] + ["#define WITHOUT_HALVES"] * (not halves)
    lines += [f"#undef __CUDA_NO_{what}__  // load_inline's" for what in RESTORED if cuda]
    defines = {name: value for name, value in defines.items() if not cuda or name not in OF_GPU}
    lines += [f"#define {name} {value}" for name, value in defines.items()]
    lines += ['#include "core/scalar.h"', '#include "host/tensor.h"', text[len(about) : end].strip("\n")]
    headers: dict[Path, Header] = {}
    gathered = gather("\n".join(lines), place, [place, KERNELS], headers)
    loaders, own = (KERNELS / "host" / name for name in ("host.h", "cell.h"))  # one is in the other's place
    headers[loaders] = Header(str(own), read(own), headers[loaders].copy)
    known = {"EXPORT": True, "WITHOUT_HALVES": not halves, "__CUDACC__": cuda} | dict.fromkeys(defines, True)
    known |= dict.fromkeys(OF_GPU, True) if cuda else {}
    whole, rest = inlined(gathered, headers.values(), known), inlined(text[end:], (), known)
    return whole.rstrip("\n") + "\n", about + rest.strip("\n") + "\n"


def _check(formula: str, given: set[str]) -> None:
    """Raises ValueError for launchers that cell_host.py doesn't understand."""
    launchers = parse_launchers(formula)
    asked = {each.name for each in launchers if each.asked}
    written = {p.name for each in launchers for p in each.parameters if p.written}
    of_given = {f"{d}{name}" for name in given for d in ("d", "d_")}
    for name, p in [(each.name, p) for each in launchers for p in each.parameters]:
        known = given | written if p.tensor else given | asked
        what = f"parameters out of {', '.join(sorted(known))}"
        if p.tensor and (not p.sized or p.ctype not in TYPES):
            what = f"In<T> and Out<T>, T out of {', '.join(TYPES)}"
        elif p.written and not (p.name == "y" or p.name in of_given or f"{p.name}_size" in asked):
            what = f"a function `EXPORT int64_t {p.name}_size(…)` of how many elements it has"
        elif p.name in known:
            continue
        raise ValueError(f"{name}: expected {what}, got `{p.declared} {p.name}`")


def _literal(text: str) -> str:
    """KernelBench's checker takes the word `pass` for Python's statement."""
    return 'r"""\n{}"""'.format(re.sub(r"\bpass\b", "sweep", text).replace('"""', '"" "'))
