"""One problem for one device as one file, as KernelBench writes them: to be pasted into a notebook, run, or given to KernelBench's evaluation.

    python export.py conv2d_min_add_multiply > cell.py                         # the fused kernels, for a GPU
    python export.py conv2d_min_add_multiply --device cpu -o cell.py           # those of the CPU

The file is written from the repository's sources: the reference Model as it is, the kernels with all their headers (export_kernels.py),
the functions of the problem's module and of export_plumbing.py with all of ours that they need (export_python.py), for this device
and the model's own filters (export_folding.py): those alone it takes, with any batch and size that the kernels take.
"""

from __future__ import annotations

import argparse
import ast
import inspect
import math
import re
import sys
from collections.abc import Callable
from operator import attrgetter
from pathlib import Path

import torch

import export_kernels
import export_layout
import export_plumbing as plumbing
import export_python
import library
import loader_operators
import models
import operators
import tiling
import twin
from export_python import Value
from problems import Problem

VARIANTS = "epilogue", "fused"
LINES = 250  # beside the kernels


def cell(
    name: str, *, device: str = "cuda", variant: str | None = None, dtype: torch.dtype = torch.float32
) -> str:
    """The text of the file. Raises KeyError for an unknown name, ValueError where there is no such variant on such a device."""
    if name not in models.PROBLEMS:
        raise KeyError(f"expected one of {', '.join(models.PROBLEMS)}, got {name}")
    problem, variant = models.PROBLEMS[name], variant or ("fused" if device == "cuda" else "epilogue")
    if variant not in VARIANTS or variant not in problem.variants_on(device):
        raise ValueError(f"there is no {variant} variant of {name} on a {device} device")
    program, forward = _program(problem, device, variant, dtype)
    definitions = export_layout.tidied(program.build(forward), "_forward")
    kernels = _kernels(problem, device, variant, definitions)
    top = [
        _head(problem, device, variant, dtype, program.modules),
        _model(problem),
        _model_new(definitions.pop("_forward")),
        _inputs(problem),
    ]
    for docstrings, apart, gap in (
        (True, 2, 3),
        (False, 2, 3),
        (False, 1, 3),
        (False, 1, 2),
    ):  # as there is room
        parts = [*top, *kernels, _plumbing(definitions, docstrings, "\n" * apart)]
        found = re.sub(r"\n{3}", "\n" * gap, "\n\n\n".join(part.strip("\n") for part in parts)) + "\n"
        if re.sub(r'r"""\n.*?"""', "", found, flags=re.S).count("\n") <= LINES:
            break
    return found


# ------------------------------------------------------------------------------------------------------- the problem's part


def _program(
    problem: Problem, device: str, variant: str, dtype: torch.dtype
) -> tuple[export_python.Program, Callable]:
    """The cell's functions beside the kernels, and ModelNew's forward, which reaches them all."""
    cls, operator = problem.ModelNew, getattr(problem.ModelNew, variant)
    with torch.random.fork_rng():
        model = cls(*problem.get_init_inputs())
    module, (filters, sizes) = (
        sys.modules[cls.__module__],
        (tuple(model.conv.weight.shape), problem.input_shape[1:]),
    )
    numbers = dict(zip(cls.constants, model._constants()))
    whole = {name: number for name, number in numbers.items() if type(number) is not float}
    fields, annotations = module.Arguments._fields, module.Arguments.__annotations__.values()
    tensors = sum("Tensor" in str(each) for each in annotations)

    values = {
        "DEVICE": device,
        "DTYPE": dtype,
        "CTYPE": operators._CTYPES[dtype],
        "SUMS": operators.accumulate_dtype(dtype),
        "FILTERS": filters,
        "GIVEN": (*filters, *sizes, *whole.values()),
        "SIZE": tuple([extent - taps + 1 for extent, taps in zip(sizes[1:], filters[2:])]),
        "OWN": next((name for name in cls.operands if "." not in name), ""),
        "TENSORS": tensors,
        "BUILDS": export_python.Name("_BUILDS"),
        "Arguments": module.Arguments,
        "make_plan": operator._make_plan,
        "forward": operator.forward,
        "backward": operator._backward,
        "tail_raises": cls._tail_raises,
        "tail_obstacle": cls._tail_obstacle,
        "fused_obstacle": _fused_obstacle(problem, model, variant, dtype),
    }
    forward, constants = _forward(problem)
    bound = {(plumbing.__name__, key): value for key, value in values.items()}
    bound |= {
        operators.Plan: plumbing.Plan,
        operators.load: plumbing.load,
        operators.when_needed: plumbing.when_needed,
        twin.Twin._constants: constants,
    }
    bound |= dict.fromkeys((library.is_channels_last, torch.compiler.is_compiling), plumbing.never)
    bound |= {library.pieces: plumbing.whole} if device == "cuda" else {}

    # What is known: of the arguments; of a model whose sizes have been looked at, unlike that of ModelNew's forward; of plans.
    x, weight = _tensor((None, *sizes), dtype, device), _tensor(filters, dtype, device)
    arguments = {"fields": fields, ".x": x, ".weight": weight}
    arguments |= {f".{name}": {".dtype": Value(dtype)} for name in fields[2 : 1 + len(cls.operands)]}
    constants_of = dict(zip(numbers, fields[len(fields) - len(numbers) :]))
    arguments |= {f".{constants_of[name]}": Value(number) for name, number in whole.items()}
    looked_at = {"class": cls, ".conv": {".weight": weight}}
    for name in whole:
        owner, _, last = name.rpartition(".")
        inner = looked_at.setdefault(f".{owner}", {}) if owner else looked_at
        inner[f".{last}"] = Value(attrgetter(name)(model))
    plan = {"set": True, ".y_format": Value(torch.contiguous_format), ".y_dtype": Value(dtype)}
    known = {module.Arguments: arguments, plumbing.Plan: plan}
    known |= {
        each: {"self": arguments} for each in vars(module.Arguments).values() if inspect.isfunction(each)
    }
    known[loader_operators._precision] = {"x": {".is_cuda": x[".is_cuda"]}}
    known |= dict.fromkeys((operator.forward, operator._backward), {"plan": plan})
    methods = [each for name in dir(cls) if inspect.isfunction(each := getattr(cls, name))]
    known |= {
        each: {"self": looked_at, "x": x} for each in methods if each not in vars(torch.nn.Module).values()
    }
    known |= dict.fromkeys((forward, constants, cls._constants, cls._drawn), {"self": {"class": cls}})

    folder, files = (
        Path(__file__).parent,
        {name: getattr(each, "__file__", None) for name, each in sys.modules.items()},
    )
    ours = {name for name, file in files.items() if file and Path(file).parent == folder} | {module.__name__}
    return export_python.Program(ours.__contains__, bound, known), forward


def _fused_obstacle(problem: Problem, model: torch.nn.Module, variant: str, dtype: torch.dtype) -> Callable:
    """What says why the fused kernels can't run: if they do on the smallest GPU of capability 8.0, only what is older can't. (What has room
    there has room on the others.)"""
    if variant != "fused":
        return twin.Twin._fused_obstacle  # there is none
    smallest, known = tiling.Device((8, 0), 99 << 10, 1, 1 << 20), tiling.device_properties
    tiling.device_properties = lambda index: smallest
    try:
        x = torch.empty(problem.input_shape, dtype=dtype, device="meta")
        return type(model)._fused_obstacle if model._fused_obstacle(x, dtype) else plumbing.too_old
    finally:
        tiling.device_properties = known


def _tensor(shape: tuple, dtype: torch.dtype, device: str) -> dict[str, object]:
    """What is known of a tensor."""
    sizes = [None if size is None else Value(size) for size in shape]
    count = {} if None in shape else {".numel()": Value(math.prod(shape))}
    return {
        ".shape": tuple(sizes) if None in shape else Value(shape),
        ".dtype": Value(dtype),
        ".is_cuda": Value(device == "cuda"),
        ".device": {".type": Value(device)},
        ".dim()": Value(len(shape)),
        ".element_size()": Value(dtype.itemsize),
        "len()": sizes[0],
        **count,
    }


def _forward(problem: Problem) -> list[Callable]:
    """ModelNew's forward, and what gives the numbers that the operators take."""
    cls, found = problem.ModelNew, []
    operands = "".join(f", self.{name}" for name in cls.operands)
    operands += "" if cls._drawn is twin.Twin._drawn else ", *self._drawn(x, constants)"
    numbers = " ".join(f"{convert.__name__}(self.{name})," for name, convert in cls.constants.items())
    call = f"    constants = self._constants()\n    return run(self, (x{operands}), constants)"
    names = {each.__name__: each for each in (plumbing.run, *cls.constants.values())}
    for text in (f"def forward(self, x):\n{call}", f"def numbers(self):\n    return ({numbers})"):
        exec(text, scope := {**names, "__name__": cls.__module__})
        found.append([*scope.values()][-1])
        found[-1].source = text
    return found


# ----------------------------------------------------------------------------------------------------------- the file's parts


def _head(problem: Problem, device: str, variant: str, dtype: torch.dtype, modules: set[str]) -> str:
    formula = inspect.getdoc(sys.modules[problem.ModelNew.__module__]).splitlines()[0]
    how = {
        "fused": "the convolution inside its kernels",
        "epilogue": "PyTorch's convolution, and kernels for the rest",
    }[variant]
    imports = ", ".join(f"{name} as _{name}" for name in sorted({"sys", *modules}))
    lines = [f"import {line.strip(', ')}" for line in re.findall(r".{1,100}(?:, |$)", imports)]
    return f'''"""{formula}

Model is the reference; ModelNew the same on {"a GPU" if device == "cuda" else "the CPU"}, forward and backward:
{how}; for {dtype} and the sizes of get_inputs.
To change what it computes, search for THE FORMULA, edit the line below it, and run this again.
"""

import torch
from torch import nn
{chr(10).join(lines)}'''


def _model(problem: Problem) -> str:
    source = re.sub(rf"\b{problem.Model.__name__}\b", "Model", inspect.getsource(problem.Model))
    return re.sub(r'"""(.*?)\n.*?"""', r'"""\1"""', source, count=1, flags=re.S)


def _model_new(forward: ast.FunctionDef) -> str:
    forward.name, source = "forward", ""
    source = ast.unparse(forward)
    body = "\n".join(export_layout.wrapped(f"    {line}") for line in source.splitlines())
    doc = "Model by the kernels below. Where they can't run, a call raises RuntimeError and says why."
    return f'class ModelNew(Model):\n    """{doc}"""\n\n{body}'


def _inputs(problem: Problem) -> str:
    batch, *rest = problem.input_shape
    return f"""def get_inputs(batch_size={batch}, device="cpu"):
    return [torch.rand(batch_size, {", ".join(map(str, rest))}).to(device)]


def get_init_inputs():
    return {problem.get_init_inputs()!r}


def get_model(device="cpu"):
    return ModelNew(*get_init_inputs()).to(device)"""


def _kernels(problem: Problem, device: str, variant: str, definitions: dict[str, ast.stmt]) -> list[str]:
    """The strings of kernels, each with its first line, and of which each build consists."""
    suffix, first = (
        ".cu" if device == "cuda" else ".cpp",
        problem.name + ("_fused" if variant == "fused" else ""),
    )
    strings = {
        node.value
        for each in definitions.values()
        for node in ast.walk(each)
        if isinstance(node, ast.Constant)
    }
    used = {name for name in strings if isinstance(name, str) and name.startswith(problem.name)}
    stems = [
        first,
        *sorted(name for name in used - {first} if (problem.kernels / f"{name}{suffix}").is_file()),
    ]
    texts = export_kernels.kernels(stems, device, problem.kernels)
    names = {
        stem: "_KERNELS" + stem.removeprefix(problem.name).upper() if stem else "_HEADERS" for stem in texts
    }
    strings = [f"{names[stem]} = _sys._getframe().f_lineno, {_literal(text)}" for stem, text in texts.items()]
    shared = [names[""]] if "" in texts else []
    builds = [f"'{stem}': [{', '.join([*shared, names[stem]])}]" for stem in stems]
    return [
        "\n".join(
            [
                *strings,
                f"_BUILDS = {{{(',' + chr(10) + '    ').join(builds)}}}  # the texts, with their first lines",
            ]
        )
    ]


def _literal(text: str) -> str:
    literal = f'r"""\n{text}"""'
    if ast.literal_eval(literal) != f"\n{text}":
        raise ValueError("the kernels hold what a raw string can't")
    return literal


def _plumbing(definitions: dict[str, ast.stmt], docstrings: bool, apart: str) -> str:
    """The definitions, constants first."""
    constants = [node for node in definitions.values() if isinstance(node, ast.Assign)]
    others = [node for node in definitions.values() if not isinstance(node, ast.Assign)]
    constants, others = [
        [export_layout.source_of(node, docstrings) for node in nodes] for nodes in (constants, others)
    ]
    return apart.join(
        ["\n".join(["# Plumbing: plans for what is given, autograd, the build.", *constants]), *others]
    )


def main() -> None:
    parser = argparse.ArgumentParser(description="Write a problem as one file.")
    parser.add_argument("name", metavar="NAME", help=f"out of {', '.join(models.PROBLEMS)}")
    parser.add_argument("--variant", choices=VARIANTS, help="default: fused on a GPU, epilogue on a CPU")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("-o", "--output", metavar="FILE", help="default: the standard output")
    arguments = parser.parse_args()
    try:
        text = cell(arguments.name, device=arguments.device, variant=arguments.variant)
    except (KeyError, ValueError) as error:
        sys.exit(f"export.py: {error.args[0]}")
    if arguments.output:
        Path(arguments.output).write_text(text, encoding="utf-8")
    else:
        sys.stdout.reconfigure(encoding="utf-8")
        print(text, end="")


if __name__ == "__main__":
    main()
