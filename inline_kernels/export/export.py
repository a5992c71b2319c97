"""One problem for one device as one file, as KernelBench writes them: to be pasted into a notebook, run, or
given to KernelBench's evaluation.

    python export.py conv2d_min_add_multiply > cell.py                         # the fused kernels, for a GPU
    python export.py conv2d_min_add_multiply --device cpu -o cell.py           # those of the CPU

It takes any batch of the sizes of get_inputs. The fused kernels are composed sources: composed.py writes their
file. The others' file is written from the repository's sources: the reference Model as it is, the kernels with all
their headers (kernels.py), and the functions of the problem's module and of plumbing.py with all of ours that they
need, specialised for this device and these sizes (python.py), without what is then not read any more (layout.py).
"""

from __future__ import annotations

import ast
import inspect
import math
import re
import sys
from collections.abc import Callable
from operator import attrgetter

import torch

import models
from inline_kernels.engine import library, operators, twin
from inline_kernels.export import composed, plumbing
from inline_kernels.export import kernels as export_kernels
from inline_kernels.export import layout as export_layout
from inline_kernels.export import python as export_python
from inline_kernels.export.python import Value
from inline_kernels.loader import operators as loader_operators
from inline_kernels.loader.source import parse_launchers, read
from inline_kernels.problems import Problem

VARIANTS = "epilogue", "fused"
LINES = 350  # beside the kernels
# With docstrings? Line ends between definitions of the plumbing, and at most anywhere. The first that fits.
SPACINGS = (True, 2, 3), (False, 2, 3), (False, 1, 3), (False, 1, 2)


def cell(
    name: str, *, device: str = "cuda", variant: str | None = None, dtype: torch.dtype = torch.float32
) -> str:
    """The text of the file. Raises KeyError for an unknown name, ValueError where there is no such variant on
    such a device, or it can't run such sizes."""
    if name not in models.PROBLEMS:
        raise KeyError(f"expected one of {', '.join(models.PROBLEMS)}, got {name}")
    problem = models.PROBLEMS[name]
    variant = variant or problem.variants_on(device)[-1]
    if variant not in VARIANTS or variant not in problem.variants_on(device):
        raise ValueError(f"there is no {variant} variant of {name} on a {device} device")
    if variant == "fused":
        return _fused(problem, device, dtype)
    program, forward = _program(problem, device, variant, dtype)
    definitions = export_layout.tidied(program.build(forward), "_forward")
    kernels = _kernels(problem, device, definitions)
    head, model_new = _head(problem, device, dtype, program.modules), definitions.pop("_forward")
    top = [head, _model(problem), _model_new(model_new), _inputs(problem), kernels]
    for docstrings, apart, gap in SPACINGS:
        parts = [*top, _plumbing(problem, definitions, docstrings, "\n" * apart)]
        found = re.sub(r"\n{3}", "\n" * gap, "\n\n\n".join(part.strip("\n") for part in parts)) + "\n"
        if re.sub(r'r"""\n.*?"""', "", found, flags=re.S).count("\n") <= LINES:
            break
    return found


# ------------------------------------------------------------------------------------------- the fused kernels


def _fused(problem: Problem, device: str, dtype: torch.dtype) -> str:
    """The file of a problem's composed source."""
    cls = problem.ModelNew
    with torch.random.fork_rng():
        model = cls(*problem.get_init_inputs())
    x = torch.empty(problem.input_shape, dtype=dtype, device="meta", requires_grad=True)
    if obstacle := model._fused_obstacle(x, dtype) or model._training_obstacle(x):
        raise ValueError(
            f"expected sizes of {problem.name} that its fused kernels run, got others: {obstacle}"
        )
    texts = [problem.kernels / f"{problem.name}{kind}.cu" for kind in ("_fused", "")]
    source = next(path for path in texts if path.is_file())
    arguments = _arguments_of(model, read(source))
    return composed.cell(
        problem.Model, source, arguments, problem.init_inputs, problem.input_shape, device=device, dtype=dtype, defines=model._fused_defines(x),
    )  # fmt: skip


def _arguments_of(model: torch.nn.Module, source: str) -> dict[str, str]:
    """`arguments` of `composed.cell`: the launchers' parameters are called by the attributes that they are, with underscores in the place of dots;
    `weight` is the convolution's."""
    paths = {}
    for path, module in model.named_modules():
        inner = f"{path}." if path else ""
        names = *vars(module), *module._parameters
        paths |= {f"{inner}{name}".replace(".", "_"): f"{inner}{name}" for name in names if name[0] != "_"}
        if isinstance(module, torch.nn.modules.conv._ConvNd):
            paths["weight"] = f"{inner}weight"
    named = {p.name for launcher in parse_launchers(source) for p in launcher.parameters}
    return {name: path for name, path in paths.items() if name in named}


# ----------------------------------------------------------------------------------------- the problem's part


def _program(
    problem: Problem, device: str, variant: str, dtype: torch.dtype
) -> tuple[export_python.Program, Callable]:
    """The cell's functions beside the kernels, and ModelNew's forward, which reaches them all."""
    cls, operator = problem.ModelNew, getattr(problem.ModelNew, variant)
    if not operator.saves:
        raise ValueError(f"expected a forward of {operator.name} that takes the keyword saving")
    with torch.random.fork_rng():
        model = cls(*problem.get_init_inputs())
    filters, sizes = tuple(model.conv.weight.shape), problem.input_shape[1:]
    numbers = dict(zip(cls.constants, model._constants()))
    whole = {name: number for name, number in numbers.items() if type(number) is not float}
    arguments, spatial = sys.modules[cls.__module__].Arguments, len(filters) - 2
    values = {
        "DEVICE": device,
        "DTYPE": dtype,
        "CTYPE": operators._CTYPES[dtype],
        "SUMS": operators.accumulate_dtype(dtype),
        "FILTERS": filters,
        "GIVEN": (*filters, *sizes, *whole.values()),
        "SIZE": tuple([extent - taps + 1 for extent, taps in zip(sizes[1:], filters[2:])]),
        "PLAIN": ((1,) * spatial, (0,) * spatial, (1,) * spatial, 1, "zeros"),
        "OWN": next((name for name in cls.operands if "." not in name), ""),
        "TENSORS": operator.tensors,
        "VARYING": operator.varying,
        "SUBMODULES": export_python.Name("_SUBMODULES"),
        "BUILDS": export_python.Name("_BUILDS"),
        "OF_FORMULA": export_python.Name("_OF_FORMULA"),
        "OF_GRADIENT": export_python.Name("_OF_GRADIENT"),
        "Arguments": arguments,
        "make_plan": operator._make_plan,
        "forward": operator.forward,
        "backward": operator._backward,
        "tail_raises": cls._tail_raises,
        "tail_obstacle": cls._tail_obstacle,
        "fused_obstacle": twin.Twin._fused_obstacle,  # there is none
    }
    forward, constants = _forward(problem)
    bound = {(plumbing.__name__, key): value for key, value in values.items()}
    bound |= {getattr(operators, name): getattr(plumbing, name) for name in ("Plan", "load")}
    bound |= dict.fromkeys((library.is_channels_last, torch.compiler.is_compiling), plumbing.never)
    bound |= {library.pieces: plumbing.whole} if device == "cuda" else {}
    bound[twin.Twin._constants] = constants

    x, weight = _tensor((None, *sizes), dtype, device), _tensor(filters, dtype, device)
    known = _known_of_arguments(arguments, x, weight, len(cls.operands), numbers)
    plan = {"set": True, ".y_format": Value(torch.contiguous_format), ".y_dtype": Value(dtype)}
    known |= {plumbing.Plan: plan, operator.forward: {"plan": plan}, operator._backward: {"plan": plan}}
    known |= _known_of_models(model, x, weight, whole)
    known |= dict.fromkeys((forward, constants, cls._constants, cls._drawn), {"self": {"class": cls}})
    known[loader_operators.precision] = {"x": {".is_cuda": x[".is_cuda"]}}
    ours = {
        name
        for name in sys.modules
        if name.partition(".")[0] in ("inline_kernels", "inline_loader", "models")
    }
    return export_python.Program({*ours, cls.__module__}.__contains__, bound, known), forward


def _known_of_arguments(cls: type, x: dict, weight: dict, operands: int, numbers: dict[str, object]) -> dict:
    """What is known of a problem's Arguments: x, weight, the dtype of other parameters, and the numbers that
    are no real ones."""
    known = {"fields": cls._fields, ".x": x, ".weight": weight}
    known |= {f".{name}": {".dtype": x[".dtype"]} for name in cls._fields[2 : 1 + operands]}
    fields = zip(cls._fields[len(cls._fields) - len(numbers) :], numbers.values())
    known |= {f".{name}": Value(number) for name, number in fields if type(number) is not float}
    methods = [each for each in vars(cls).values() if inspect.isfunction(each)]
    return {cls: known, **{each: {"self": known} for each in methods}}


def _known_of_models(model: torch.nn.Module, x: dict, weight: dict, whole: dict[str, object]) -> dict:
    """What is known in the methods of a model when its sizes have been looked at."""
    cls = type(model)
    known = {"class": cls, ".conv": {".weight": weight}}
    for name in whole:
        owner, _, last = name.rpartition(".")
        attributes = known.setdefault(f".{owner}", {}) if owner else known
        attributes[f".{last}"] = Value(attrgetter(name)(model))
    methods = [getattr(cls, name) for name in dir(cls) if name not in dir(torch.nn.Module)]
    return {each: {"self": known, "x": x} for each in methods if inspect.isfunction(each)}


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
    numbers = " ".join(
        f"checked(self.{name}, {kind.__name__}),"
        if kind in (float, int)
        else f"{kind.__name__}(self.{name}),"
        for name, kind in cls.constants.items()
    )
    constants = f"({numbers})" if cls._constants is twin.Twin._constants else "self._constants()"
    operands, drawn, given = "".join(f", self.{name}" for name in cls.operands), "", "constants"
    if cls._drawn is not twin.Twin._drawn:
        drawn = "    *seeds, number = self._drawn(x, constants, False)\n"
        operands, given = operands + ", *seeds", given + ", (number,)"
    call = f"    constants = {constants}\n{drawn}    return run(self, (x{operands}), {given})"
    call = re.sub(
        rf"\bself\.({'|'.join(cls.submodules)})\.", r"\1.", call
    )  # a look-up in a module takes a microsecond
    layers = [name if f"{name}." in call else "_" for name in cls.submodules]
    call = f"    {', '.join(layers)}, = layers(self)\n{call}"
    ours = plumbing.layers, plumbing.checked, plumbing.run
    names = {each.__name__: each for each in (*ours, *cls.constants.values())}
    for text in (f"def forward(self, x):\n{call}", f"def numbers(self):\n    return ({numbers})"):
        exec(text, scope := {**names, "__name__": cls.__module__})
        found.append([*scope.values()][-1])
        found[-1].source = text
    return found


# ------------------------------------------------------------------------------------------- the file's parts


def _head(problem: Problem, device: str, dtype: torch.dtype, modules: set[str]) -> str:
    formula = inspect.getdoc(sys.modules[problem.ModelNew.__module__]).splitlines()[0]
    imports = ", ".join(f"{name} as _{name}" for name in sorted({"sys", *modules}))
    lines = [f"import {line.strip(', ')}" for line in re.findall(r".{1,100}(?:, |$)", imports)]
    return f'''"""{formula}

Model is the reference; ModelNew the same on {"a GPU" if device == "cuda" else "the CPU"}, forward and backward:
PyTorch's convolution, and kernels for the rest; for {dtype} and the sizes of get_inputs.
To change what it computes, search for THE FORMULA, edit the line below it, and run this again; to train that,
edit what follows THE GRADIENT, too.
"""

import torch
from torch import nn
{chr(10).join(lines)}'''


def _model(problem: Problem) -> str:
    source = re.sub(rf"\b{problem.Model.__name__}\b", "Model", inspect.getsource(problem.Model))
    return re.sub(r'"""(.*?)\n.*?"""', r'"""\1"""', source, count=1, flags=re.S)


def _model_new(forward: ast.FunctionDef) -> str:
    forward.name = "forward"
    body = "\n".join(export_layout.wrapped(f"    {line}") for line in ast.unparse(forward).splitlines())
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


def _kernels(problem: Problem, device: str, definitions: dict[str, ast.stmt]) -> str:
    """The strings of kernels, each with its first line, and of which each build consists."""
    suffix = ".cu" if device == "cuda" else ".cpp"
    nodes = [each for node in definitions.values() for each in ast.walk(node)]
    values = {each.value for each in nodes if isinstance(each, ast.Constant) and type(each.value) is str}
    used = [each for each in sorted(values) if each.startswith(problem.name)]
    stems = [each for each in used if (problem.kernels / f"{each}{suffix}").is_file()]
    texts = export_kernels.kernels(stems, device, problem.kernels)
    names = {stem: f"_KERNELS{stem.removeprefix(problem.name).upper()}" for stem in texts} | {"": "_HEADERS"}
    strings = [f"{names[stem]} = _sys._getframe().f_lineno, {_literal(text)}" for stem, text in texts.items()]
    shared = [names[""]] if "" in texts else []
    builds = ",\n    ".join(f"'{stem}': [{', '.join([*shared, names[stem]])}]" for stem in stems)
    parts = {"": [(0, text) for text in texts.values()]}
    digests = [
        f"_OF_{mark} = {plumbing.marked(parts, mark)[0]!r}  # a digest of its code, as it was"
        for mark in ("FORMULA", "GRADIENT")
    ]
    lines = [f"_BUILDS = {{{builds}}}  # the texts, with their first lines", *digests]
    return "\n".join([*strings, *lines])


def _literal(text: str) -> str:
    literal = f'r"""\n{text}"""'
    if ast.literal_eval(literal) != f"\n{text}":
        raise ValueError("the kernels hold what a raw string can't")
    return literal


def _plumbing(problem: Problem, definitions: dict[str, ast.stmt], docstrings: bool, apart: str) -> str:
    """The definitions, constants first."""
    constants = [node for node in definitions.values() if isinstance(node, ast.Assign)]
    others = [node for node in definitions.values() if not isinstance(node, ast.Assign)]
    title = "# Plumbing: plans for what is given, autograd, the build."
    classes = [f"'{name}': nn.{kind.__name__}" for name, kind in problem.ModelNew.submodules.items()]
    each = (
        f"{{name: (kind, kind.forward, {{*dir(kind)}}) for name, kind in {{{', '.join(classes)}}}.items()}}"
    )
    lines = [title, export_layout.wrapped(f"_SUBMODULES = {each}"), *map(export_layout.source_of, constants)]
    return apart.join(["\n".join(lines), *[export_layout.source_of(node, docstrings) for node in others]])
