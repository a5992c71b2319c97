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
import itertools
import operator
import re
import sys
from pathlib import Path

import torch

import export_folding
import export_kernels
import export_plumbing
import export_python
import inline_loader
import library
import loader_operators
import models
import operators
import tiling
import twin
import volumes
from problems import Problem

VARIANTS = "epilogue", "fused"
LINES = 250  # beside the kernels
_HERE = export_plumbing.__name__
_MODULES = (
    export_plumbing,
    export_kernels,
    inline_loader,
    library,
    loader_operators,
    operators,
    tiling,
    twin,
    volumes,
)


def cell(
    name: str, *, device: str = "cuda", variant: str | None = None, dtype: torch.dtype = torch.float32
) -> str:
    """The text of the file. Raises KeyError for an unknown name, ValueError where there is no such variant on such a device."""
    if name not in models.PROBLEMS:
        raise KeyError(f"expected one of {', '.join(models.PROBLEMS)}, got {name}")
    problem, variant = models.PROBLEMS[name], variant or ("fused" if device == "cuda" else "epilogue")
    if variant not in VARIANTS or variant not in problem.variants_on(device):
        raise ValueError(f"there is no {variant} variant of {name} on a {device} device")
    text = _text(problem, device, variant, dtype)
    forward = _forward(problem, text)
    _check_names(text.definitions)
    program = export_folding.Program(
        text.definitions, _facts(problem, device, dtype), _names(forward), ("_constants",)
    )
    plumbing = program.fold()
    kernels = _kernels(problem, device, variant, plumbing)
    plumbing = {name: export_python.as_namedtuple(node) for name, node in plumbing.items()}
    top = [
        _head(problem, device, variant, dtype, text.imports, plumbing),
        _model(problem),
        _model_new(forward),
        _inputs(problem),
    ]
    for docstrings, apart, gap in (
        (True, 2, 3),
        (False, 2, 3),
        (False, 1, 3),
        (False, 1, 2),
    ):  # as there is room
        parts = [*top, *kernels, _plumbing(plumbing, docstrings, "\n" * apart)]
        found = re.sub(r"\n{3}", "\n" * gap, "\n\n\n".join(part.strip("\n") for part in parts)) + "\n"
        if re.sub(r'r"""\n.*?"""', "", found, flags=re.S).count("\n") <= LINES:
            break
    return found


# ------------------------------------------------------------------------------------------------------- the problem's part


def _declared(module, variant: str) -> dict[str, object]:
    """What the module declares as the operator of a variant, in plumbing's words: which of its functions does what."""
    tree = ast.walk(ast.parse(inspect.getsource(module)))
    calls = [node for node in tree if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call)]
    call = {ast.unparse(node.targets[0]): node.value for node in calls}[variant]
    given = {
        each.arg: (module.__name__, each.value.id)
        for each in call.keywords
        if isinstance(each.value, ast.Name)
    }
    own = {"make_plan": given["plan"], "backward": given["backward"]}
    if ast.unparse(call.func) == "operators.declare_fused":
        return {**own, "forward": ("operators", "forward_fused"), "SAVES": True}
    forward = ast.unparse(call.args[1])
    saves = "saving" in inspect.signature(getattr(module, forward)).parameters
    return {**own, "forward": (module.__name__, forward), "SAVES": saves}


def _text(problem: Problem, device: str, variant: str, dtype: torch.dtype) -> export_python.Text:
    """All that may be needed, from plumbing's `run` on."""
    cls, module = problem.ModelNew, sys.modules[problem.ModelNew.__module__]
    declared, filters = _declared(module, variant), _filters(problem)
    size = [extent - taps + 1 for extent, taps in zip(problem.input_shape[2:], filters[2:])]
    tensors = [name for name, kind in module.Arguments.__annotations__.items() if "Tensor" in str(kind)]
    known = {key: value for key, value in declared.items() if isinstance(value, bool)}
    known |= {"DTYPE": dtype, "CTYPE": operators._CTYPES[dtype], "SUMS": operators.accumulate_dtype(dtype)}
    known |= {"DEVICE": device, "TENSORS": len(tensors), "FILTERS": filters}
    known["OWN"] = next((name for name in cls.operands if "." not in name), "")
    known |= {"GIVEN": (*filters, *problem.input_shape[1:], *_whole(problem).values()), "SIZE": size}
    places = {key: value for key, value in declared.items() if isinstance(value, tuple)}
    places |= {each: _method(cls, f"_{each}") for each in ("tail_raises", "tail_obstacle", "fused_obstacle")}
    if variant != "fused":
        places["fused_obstacle"] = (twin.__name__, "Twin._fused_obstacle")  # there is none
    elif _fits_everywhere(problem, dtype):
        places["fused_obstacle"] = (_HERE, "too_old")
    places["Arguments"] = (module.__name__, "Arguments")
    bound = {(_HERE, key): place for key, place in places.items()} | {("operators", "Plan"): (_HERE, "Plan")}
    bound[("operators", "load")] = (_HERE, "load")
    bound |= {("library", "pieces"): (_HERE, "whole")} if device == "cuda" else {}
    methods = {name: place for name in dir(cls) if (place := _method(cls, name))}
    replaced = {"super()._constants()": _constants(problem)}
    folders = {(module.__name__, key): None for key, value in vars(module).items() if isinstance(value, Path)}
    known = {
        (_HERE, key): value for key, value in known.items()
    } | folders  # the file has its kernels in itself
    text = export_python.Text([module, *_MODULES], bound, known, methods, replaced)
    text.names[_HERE, "BUILDS"] = "_BUILDS"
    text.names[module.__name__, "epilogue"] = export_folding.MISSING  # the operator
    text.name_of((_HERE, "run"))
    for name, value in {"device_type": device, "is_channels_last": False}.items():  # results are contiguous
        if function := text.definitions.get(f"_{name}"):
            function.body = [ast.Return(ast.Constant(value))]
    return text


def _fits_everywhere(problem: Problem, dtype: torch.dtype) -> bool:
    """Do the fused kernels run on the smallest GPU of capability 8.0? What has room there has room on the others."""
    smallest, known = tiling.Device((8, 0), 99 << 10, 1, 1 << 20), tiling.device_properties
    tiling.device_properties = lambda index: smallest
    try:
        with torch.random.fork_rng():
            model = problem.ModelNew(*problem.get_init_inputs())
        return (
            model._fused_obstacle(torch.empty(problem.input_shape, dtype=dtype, device="meta"), dtype) is None
        )
    finally:
        tiling.device_properties = known


def _method(cls: type, name: str) -> tuple[str, str] | None:
    """Where a method of a problem's ModelNew is defined, if it is one of ours."""
    owner = next((each for each in cls.__mro__ if name in vars(each)), object)
    ours = issubclass(owner, twin.Twin) and inspect.isfunction(vars(owner)[name])
    return (owner.__module__, f"{owner.__name__}.{name}") if ours else None


def _constants(problem: Problem) -> str:
    """The numbers that the operators take, from a model `self`."""
    of = {operators.__name__: "operators."}  # whose functions are known by their module
    converts = problem.ModelNew.constants.items()
    numbers = [f"{of.get(each.__module__, '')}{each.__name__}(self.{name})," for name, each in converts]
    return f"({' '.join(numbers)})"


def _filters(problem: Problem) -> tuple[int, ...]:
    with torch.random.fork_rng():
        return tuple(problem.Model(*problem.get_init_inputs()).conv.weight.shape)


def _whole(problem: Problem) -> dict[str, object]:
    """The numbers that are not real ones, by their names in a model: groups, a window."""
    with torch.random.fork_rng():
        model, converts = problem.Model(*problem.get_init_inputs()), problem.ModelNew.constants
    numbers = {
        name: convert(operator.attrgetter(name)(model))
        for name, convert in converts.items()
        if convert is not float
    }
    return {name: number for name, number in numbers.items() if type(number) is not float}


def _facts(problem: Problem, device: str, dtype: torch.dtype) -> dict[str, str]:
    """What expressions of the sources are, here: `weight` is the convolution's wherever it is a tensor, `x` its input."""
    filters, facts = (
        _filters(problem),
        {"torch.compiler.is_compiling()": "False", "plan.y_format": "torch.contiguous_format"},
    )
    facts["plan.y_dtype"] = str(dtype)
    for owner in ("", "a.", "self."):
        weight, x = f"{owner}weight", f"{owner}x"
        sizes = ", ".join(map(str, problem.input_shape[1:]))
        facts |= {
            f"{weight}.shape": repr(filters),
            f"len({weight})": repr(filters[0]),
            f"{x}.shape": f"(len({x}), {sizes})",
        }
        facts |= {f"{each}.dim()": repr(len(filters)) for each in (weight, x)}
        facts |= {f"{x}.is_cuda": repr(device == "cuda"), f"{x}.element_size()": repr(dtype.itemsize)}
        facts |= {f"{owner}{name}.dtype": str(dtype) for name in _operands(problem)}
    fields = sys.modules[problem.ModelNew.__module__].Arguments._fields[-len(problem.ModelNew.constants) :]
    for field, (name, number) in zip(fields, {**problem.ModelNew.constants, **_whole(problem)}.items()):
        if name in _whole(problem):
            path = name.split(".")
            facts |= {
                text: repr(number)
                for text in (f"a.{field}", f"model.{name}", ".".join(path[-2:]), f"norm.{path[-1]}")
            }
    return facts


def _check_names(definitions: dict[str, ast.stmt]) -> None:
    """Raises ValueError where a function that calls its parameters x or weight is given something else, of which the facts are wrong."""
    functions = {name: node for name, node in definitions.items() if isinstance(node, ast.FunctionDef)}
    calls = [(name, each) for name, node in definitions.items() for each in ast.walk(node)]
    for caller, call in calls:
        called = functions.get(ast.unparse(call.func)) if isinstance(call, ast.Call) else None
        given = itertools.takewhile(
            lambda each: not isinstance(each, ast.Starred), call.args if called else ()
        )
        for parameter, text in zip(called.args.args if called else (), map(ast.unparse, given)):
            alike = {"x": r"(\w+\.)*(x|batch|tensors)", "weight": r"(\w+\.)*weight"}.get(parameter.arg, ".*")
            if not re.fullmatch(rf"{alike}(\.contiguous\(.*\)|\[.*\]|\.new_empty\(0\))?", text):
                expected = f"expected the model's {parameter.arg}, or another name there"
                raise ValueError(f"{caller} gives {text} to {called.name} as its {parameter.arg}: {expected}")


def _operands(problem: Problem) -> list[str]:
    """The floating-point tensors among the operators' arguments, x first."""
    return sys.modules[problem.ModelNew.__module__].Arguments._fields[: 1 + len(problem.ModelNew.operands)]


def _names(node: ast.AST) -> set[str]:
    return {
        each.id for each in ast.walk(node) if isinstance(each, ast.Name) and isinstance(each.ctx, ast.Load)
    }


# ----------------------------------------------------------------------------------------------------------- the file's parts


def _head(
    problem: Problem,
    device: str,
    variant: str,
    dtype: torch.dtype,
    imports: dict[str, str],
    plumbing: dict[str, ast.stmt],
) -> str:
    formula = inspect.getdoc(sys.modules[problem.ModelNew.__module__]).splitlines()[0]
    how = {
        "fused": "the convolution inside its kernels",
        "epilogue": "PyTorch's convolution, and kernels for the rest",
    }[variant]
    imports["_namedtuple"] = "from collections import namedtuple as _namedtuple"
    used = {name for node in plumbing.values() for name in _names(node)}
    lines = {line for name, line in imports.items() if name in used} | {"import sys as _sys"}
    modules = ", ".join(sorted(line.removeprefix("import ") for line in lines if line.startswith("import ")))
    lines = [*sorted(line for line in lines if line.startswith("from ")), f"import {modules}"]
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


def _forward(problem: Problem, text: export_python.Text) -> ast.FunctionDef:
    """ModelNew's forward."""
    cls, operands = problem.ModelNew, [f"self.{name}" for name in problem.ModelNew.operands]
    own = {name: _method(cls, name)[0] != twin.__name__ for name in ("_constants", "_drawn")}
    drawn = ["*self._drawn(x, constants)"] if own["_drawn"] else []
    constants = "self._constants()" if own["_constants"] else _constants(problem)
    given = ", ".join(["x", *operands, *drawn])
    source = f"def forward(self, x):\n    constants = {constants}\n    return run(self, ({given}), constants)"
    module = cls.__module__
    text.bound[module, "run"] = (_HERE, "run")
    return text.rewritten(ast.parse(source).body[0], module)


def _model_new(forward: ast.FunctionDef) -> str:
    source = re.sub(r"\bmodel\b", "self", ast.unparse(forward))
    body = "\n".join(export_python.wrapped(f"    {line}") for line in source.splitlines())
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


def _kernels(problem: Problem, device: str, variant: str, plumbing: dict[str, ast.stmt]) -> list[str]:
    """The strings of kernels, each with its first line, and of which each build consists."""
    suffix, first = (
        ".cu" if device == "cuda" else ".cpp",
        problem.name + ("_fused" if variant == "fused" else ""),
    )
    strings = {
        node.value for each in plumbing.values() for node in ast.walk(each) if isinstance(node, ast.Constant)
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
        [export_python.source_of(node, docstrings) for node in nodes] for nodes in (constants, others)
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
