"""One model as one file: to be pasted into a notebook, run, or given to KernelBench's evaluation.

    text = cell(read("my_model.py"), Path("my_model.py").read_text(), device="cuda")

The file is Model's own text; the source of its kernels, formula and gradient first; what of its headers this uses, each once; and
cell_host.py, the same for all models. Edited, the formula is what runs, and trains once check() has compared it with Model.

A source is one of the repository's, or the engine's for the only segment of Model. Its launchers:

  forward(Out y, In x, In weight, …, numbers, stream) gives y; forward_saving, or where there is none forward, what else backward needs:
      Out tensors, each of as many elements as `EXPORT int64_t <name>_size(…)` says; without gradients they are empty.
  backward… run in their order, but for those that have no more than another one has of what is wanted; they give d_x and d_weight, empty
      where nobody wants them, and a d_<parameter> of each parameter, and may give more to those behind them. (dx is d_x.)

  convolve(Out v, In x, In weight, stream), if it is there, convolves in the library's place.

Parameters are Model's attributes, dots as underscores: conv_bias is conv.bias; `weight` is the convolution's. What takes `v` in x's place
gets the library's convolution, or `convolve`'s, without bias, and gives `dv`. `seed` and `number` are what random numbers are drawn by: with a number below
0 nothing is dropped; so it is where `p` is 0. A number may be asked of an int64_t function of its name. Macros CAPABILITY and SHARED_LIMIT
are the GPU's; TF32 says whether the library may convolve float32 in it.
"""

from __future__ import annotations

import contextlib
import copy
import hashlib
import inspect
import json
import math
import operator
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import nn

import models
from inline_kernels import problem as problems
from inline_kernels.engine import (
    cases,
    direct,
    library,
    load_plan,
    mainloops,
    programs,
    schedule,
    sinks,
    stored,
    tiling,
)
from inline_kernels.engine.composed import written_for
from inline_kernels.engine.fuse import fuse, structure_of
from inline_kernels.engine.naming import identifier
from inline_kernels.engine.passes import MANY, Array, Planes, Program, bound_of
from inline_kernels.engine.segment import Segment
from inline_kernels.engine.source import Own, compose
from inline_kernels.export.used import used
from inline_kernels.loader.source import Header, gather, inlined, macros, parse_launchers, read
from inline_kernels.loader.units import KERNELS, RESTORED

TYPES = "value_t output_t accumulate_t parameter_t float double bool uint8_t int32_t int64_t".split()
OF_GPU = "CAPABILITY", "SHARED_LIMIT", "TF32"  # macros of a build, as cell_host.py finds them
OF_DTYPES = "VALUE_T", "OUTPUT_T", "PARAMETER_T"  # a cell has its own
PART = "# %% "  # editors and `notebook` split a file here
_HOST = Path(__file__).with_name("cell_host.py").read_text(encoding="utf-8")


class Kernels(NamedTuple):
    """A source as of the folder `place`. weight: the convolution's, an attribute of Model; convolution: its settings, as
    torch.ops.aten.convolution takes them. samples: so many at a time stay in a CPU's caches; 0: all at once. gradients: of parameters that share another one's, its name.
    chosen_for: of the GPU, as cell_host.py has it."""

    source: str
    weight: str
    convolution: Sequence
    place: Path = KERNELS
    defines: Mapping[str, object] = {}
    samples: int = 0
    gradients: Mapping[str, str] = {}
    chosen_for: str = ""


def cell(text: str, model: nn.Module, x: torch.Tensor, kernels: Kernels, device: str) -> str:
    """The file. text: of Model, get_inputs and get_init_inputs. x: of the sizes that it is for; the dtype is x's.

    Raises ValueError where a launcher has a parameter that is none of those above, a pointer, or an Out tensor whose size nobody says.
    """
    defines = macros({"VALUE_T": cases.CTYPES[x.dtype], **kernels.defines})
    headers, formula = _split(kernels.source, kernels.place, device, defines)
    arguments, gradients = _arguments(model, kernels, formula)
    imports = "\n".join(re.findall(r"^(?:import|from) [^#\n]*\w", _HOST, flags=re.M))
    code = re.sub(r"//.*|/\*(?s:.*?)\*/|\s", "", formula)  # as cell_host.py has it
    host = re.split(r"^# -{20,} ", _HOST, maxsplit=1, flags=re.M)[1]
    return f'''# Model is the reference; ModelNew, below, the same for {device}, {x.dtype} and the sizes of get_inputs, forward and backward, for any
# batch. To change what it computes, edit the formula and its gradient, and Model, run this again, and call check().
{text.strip()}


{imports}

_DEVICE, _DTYPE, _AS_WRITTEN = "{device}", {x.dtype}, "{hashlib.sha256(code.encode()).hexdigest()[:16]}"
_ARGUMENTS = {arguments}  # of a launcher's parameter: Model's attribute
_GRADIENTS = {gradients}
_SIZES, _SAMPLES, _CONVOLUTION = {[*x.shape[1:]]}, {kernels.samples}, {kernels.convolution}
_CHOSEN_FOR = "{kernels.chosen_for}"
_FORMULA = _sys._getframe().f_lineno, {_literal(formula)}

{PART}headers: what the formula includes
_HEADERS = _sys._getframe().f_lineno, {_literal(headers)}

{PART}{host}'''


def cell_of(
    name: str, device: str | None = None, variant: str | None = None, dtype: torch.dtype = torch.float32
) -> str:
    """The file of the problem of that name, or of the KernelBench-style file at that path, which is executed. device: by default what
    torch sees. Raises ValueError, or KeyError for an unknown name, where there is none."""
    device = device or _device()
    path = models.PROBLEMS[name].file if name in models.PROBLEMS else Path(name)
    if is_file := bool(path and path.is_file()):
        file, text = problems.read(path), path.read_text(encoding="utf-8")
        x, known = torch.empty_like(file.x(), dtype=dtype, device="meta"), ("epilogue",)
        known += ("fused",) if device == "cuda" and torch.cuda.is_available() else ()
    elif name in models.PROBLEMS:
        file = models.PROBLEMS[name]
        x, known = torch.empty(file.input_shape, dtype=dtype, device="meta"), file.variants_on(device)[1:]
        text = _text_of(file)
    else:
        raise KeyError(f"expected a Python file, or one of {', '.join(models.PROBLEMS)}, got {name}")
    if variant not in (None, *known):
        raise ValueError(f"there is no {variant} variant of {name} on a {device} device")
    with torch.random.fork_rng():
        model = file.Model(*file.get_init_inputs()).to(dtype)
    if (variant or known[-1]) == "epilogue":
        return cell(text, model, x, generated(model, x, device), device)
    try:
        return cell(text, model, x, composed(file, x, device), device)
    except ValueError:
        if not is_file:
            raise
    kernels = generated(model, x, device, by_our_own=True)
    if variant and not kernels.chosen_for:
        raise ValueError("no convolution of our own is expected to be faster than the library's here")
    return cell(text, model, x, kernels, device)


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


# --------------------------------------------------------------------------------------------------- the engine's sources


def generated(model: nn.Module, x: torch.Tensor, device: str, by_our_own: bool = False) -> Kernels:
    """What the engine writes for what follows the library's convolution. by_our_own: with convolutions of our own, where they are expected to be
    faster on the GPU that is here. Raises ValueError where more than that is to be computed."""
    segment = _only_segment(model, x)
    weight = model.get_parameter(segment.parameters[0])
    around = library.padding(segment.conv, weight)
    refused = {
        "a second input": len(segment.inputs) > 1,
        "more than one dropout": len(segment.random) > 1,
        "padding that isn't of zeros, the same on both sides": segment.conv.padding_mode != "zeros"
        or any(before != after for before, after in around),
    }
    if any(refused.values()):
        raise ValueError(f"a cell can't have {next(filter(refused.get, refused))}")
    plans = [_plan(segment, x, weight, device, saving) for saving in (False, True)]
    (ahead, saving), back = [plan.composed for plan in plans], plans[1].composed
    own = _of_our_own(model, segment, x, plans[1]) if by_our_own else {}
    programs = {} if "forward" in own else {"forward": (plans[0], ahead.forward, ahead.forward_names)}
    if "forward_saving" not in own and ("forward" in own or [a.name for a in saving.saved if a.name != "v"]):
        programs["forward_saving"] = plans[1], saving.forward, saving.forward_names
    if back.backward and back.backward.roots:
        programs["backward"] = plans[1], back.backward, back.backward_names
    programs = {key: (plan, copy.copy(each), names) for key, (plan, each, names) in programs.items()}
    for _, program, _ in programs.values():
        program.turns, program.kept = False, ()  # cells convolve in planes, and name what they keep
    of_programs, names = ({key: each[i] for key, each in programs.items()} for i in (1, 2))
    text = compose(of_programs, names, device, segment.conv.name)
    for name, (plan, program, _) in programs.items():
        text = _sized(text, name, plan, program, segment)
    drops = re.compile(r"(\.kept\(\w+, number, \d+, )([^,()]+)\), (\w+)\(1\)")  # not below a number of 0
    text = drops.sub(r"\1number < 0 ? 0 : \2), \3(number < 0 ? 1 - \2 : 1)", re.sub(r"\bdz\b", "dv", text))
    sizes, conv = plans[0].sizes, segment.conv
    sample = math.prod([sizes.C, *sizes.levels["e"]]) * x.element_size()
    mixed = ahead.forward.mixes_samples or segment.random or not segment.outputs[0].space.n
    samples = 0 if mixed or device != "cpu" else max(1, library.CPU_PIECE_BYTES // sample)
    settings = conv.stride, tuple(before for before, _ in around), conv.dilation, False, (0,) * conv.nd
    roots = {leaf.attr: root.name for leaf, root in back.gradients.items() if root}
    roots = {identifier(name): root for (name, kind), root in roots.items() if kind == "parameter"}
    shared = {name: root for name, root in roots.items() if root != f"d_{name}"}
    settings = (*settings, conv.groups)
    defines = {macro: value for each in own.values() for macro, value in each["defines"].items()}
    return Kernels(
        _joined([text, *[each["source"] for each in own.values()]]),
        segment.parameters[0],
        settings,
        defines={macro: value for macro, value in defines.items() if macro not in OF_DTYPES},
        samples=samples,
        gradients=shared,
        chosen_for=_chosen_for(x, defines) if own else "",
    )


def _only_segment(model: nn.Module, x: torch.Tensor) -> Segment:
    """What all that a model computes is. Raises ValueError where there is more, or nothing."""
    structure = structure_of(fuse(model), (x,), {})
    if structure.reason:
        raise ValueError(f"no kernels serve it: {structure.reason}")
    targets = [n.target for n in structure.graph.nodes if n.op not in ("placeholder", "output")]
    outside = [getattr(each, "__name__", str(each)) for each in targets if not isinstance(each, Segment)]
    if outside or len(structure.parts) > 1:
        segments = [f"the convolution {part.name}" for part in structure.parts[1:]]
        raise ValueError(f"its first convolution's kernels leave to PyTorch: {', '.join(segments + outside)}")
    return structure.parts[0].segment


def _of_our_own(model: nn.Module, segment: Segment, x: torch.Tensor, plan: load_plan.Plan) -> dict[str, dict]:
    """What is built for convolutions of our own that are expected to be faster on the GPU that is here, as launchers: `forward`, which computes
    y, where nothing is kept for backward; `forward_saving`, which keeps what backward needs, as `plan` has it; and for what is left `convolve`."""
    with mainloops.no_more_exact_than_eager():  # who compares results with eager's takes its error for ours
        found = _faster(fuse(copy.deepcopy(model).to(_device())), segment, x, plan)
    for launcher, request in [*found.items()]:
        names = [each.name for each in parse_launchers(request["source"]) if not each.asked]
        if names != [launcher]:
            del found[launcher]  # another pass follows
    together = _of_one_build(found)
    if {"forward", "forward_saving"} <= together.keys():
        together.pop("convolve", None)
    return together


def _faster(fast: nn.Module, segment: Segment, x: torch.Tensor, plan: load_plan.Plan) -> dict[str, dict]:
    """The same before what can't be in a cell is left out."""
    x = x.contiguous()  # as a cell makes it
    found, shape, weight = {}, x.shape, fast.get_parameter(segment.parameters[0])
    with torch.no_grad():
        (decision,) = structure_of(fast, (x,), {}).decisions(fast, (x,), {})
    if decision.runs in ("direct", "sinks") and not segment.random:  # whose launchers always drop
        found["forward"] = dict(decision.requests[0])
    case = cases.Case(segment, (library.without_memory(weight, shape, x.dtype), weight), True, x.dtype)
    for by in (direct, sinks):
        with contextlib.suppress(schedule.Unsupported):
            request, results = by.alone(case)
            found["forward_saving"] = request | {"source": _saving(request["source"], results, plan)}
            break
    with contextlib.suppress(schedule.Unsupported):
        (request,) = stored.of_convolution(case)
        found["convolve"] = request | {"source": _convolving(request["source"])}
    return found


def _device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


def _of_one_build(found: dict[str, dict]) -> dict[str, dict]:
    """Those that can stand in one text: what macros are to one of them alone is written out in its own."""
    values: dict[str, set] = {}
    for request in found.values():
        for macro, value in request["defines"].items():
            values.setdefault(macro, set()).add(str(value))
    shared, declared, together = {macro for macro, each in values.items() if len(each) == 1}, {}, {}
    for launcher, request in reversed(found.items()):
        text, defines = request["source"], request["defines"]
        for macro in defines.keys() - shared:
            text = re.sub(rf"\b{macro}\b", str(defines[macro]), text)
        own = dict(re.findall(r"^using (\w+) = (.*);$", text, flags=re.M))
        if all(declared.get(name, meaning) == meaning for name, meaning in own.items()):
            declared |= own
            defines = {macro: value for macro, value in defines.items() if macro in shared}
            together[launcher] = request | {"source": text, "defines": defines}
    return together


def _renamed(text: str, words: Mapping[str, str]) -> str:
    return re.sub(rf"\b({'|'.join(words)})\b", lambda found: words[found[0]], text)


def _convolving(text: str) -> str:
    """The source of a convolution alone, whose launcher gives v."""
    return _renamed(text, {"forward": "convolve", "y": "v", "Tail": "Whole"})


def _saving(text: str, results: Sequence[Array], plan: load_plan.Plan) -> str:
    """The source of a convolution that stores y and more, whose launcher makes the copies of parameters, too, that backward needs."""
    structs = re.findall(r"^struct (\w+)", text, flags=re.M)
    text = _renamed(text, {each: f"{each}_saving" for each in structs} | {"forward": "forward_saving"})
    sizes, name, program = plan.sizes, "forward_saving", plan.composed.forward
    for array in results:
        if array.name not in ("y", "v"):
            count = math.prod(load_plan.shape_of(plan, program, array)) // sizes.N
            text += f"\nEXPORT int64_t {array.name}_size(In<value_t> x) {{ return x.size(0) * {count}; }}\n"
    copied = [array.name for array in program.kept]
    if not copied:
        return text
    roots = [root for root in program.roots if root.name in copied]
    copies = Program(plan.segment.graph, roots, {}, MANY)
    names = programs.names_of(plan.segment, copies)
    more = _sized(compose({name: copies}, {name: names}, "cuda", ""), name, plan, copies, plan.segment)
    form = re.compile(rf"^EXPORT void {name}\((.*), cudaStream_t stream\) {{\n((?: .*\n)*)}}\n", flags=re.M)
    (given, body), (of_copies, copying) = (form.search(each).groups() for each in (text, more))
    given = ", ".join(dict.fromkeys([*given.split(", "), *of_copies.split(", ")]))
    launcher = f"EXPORT void {name}({given}, cudaStream_t stream) {{\n{body}{copying}}}\n"
    return "\n".join([form.sub("", text), form.sub("", more), launcher])


def _chosen_for(x: torch.Tensor, defines: Mapping[str, object]) -> str:
    """Kernels are built for a capability; where an operand is one float16, they are as exact as TF32."""
    index = torch.cuda.current_device() if torch.cuda.is_available() else None
    in_tf32 = x.dtype == torch.float32 and str(defines.get("SPLIT")) == "0"
    return "capability {}.{}".format(*tiling.device_properties(index).capability) + ", TF32" * in_tf32


def _joined(sources: Sequence[str]) -> str:
    """Sources as one: the first one's comment, what they include, what the others have, each declaration once, and what the first one has."""
    includes, bodies, known = {}, [], set()
    for source in [*sources[1:], sources[0]]:
        lines = []
        for line in source.splitlines()[1:]:
            declares = re.match(r"(using|template) .*[;}]$", line)
            if line.startswith("#include"):
                includes[line] = True
            elif not (declares and line in known):
                lines.append(line)
            known |= {line} if declares else set()
        bodies.append("\n".join(lines).strip("\n"))
    return "\n".join([sources[0].splitlines()[0], *includes, "", "\n\n".join(bodies), ""])


def _plan(segment, x: torch.Tensor, weight: torch.Tensor, device: str, saving: bool) -> load_plan.Plan:
    composed = programs.composed_of(
        segment, programs.Kind(device, saving, bound_of(len(weight)), False, Own())
    )
    sizes = cases.sizes_of(segment, x, weight)
    return load_plan.Plan(segment, composed, sizes, x.dtype, weight.dtype, x.dtype, saving, device)


def _sized(text: str, name: str, plan: load_plan.Plan, program, segment) -> str:
    """`text` with the launcher `name` as cells have it: of tensors with their sizes. Its other sizes are known, its scratch is its own."""
    launcher = re.search(rf"^EXPORT void {name}\((.*)\) {{\n((?: .*\n)*)}}", text, flags=re.M)
    given, body = [each.rpartition(" ")[::2] for each in launcher[1].split(", ")], launcher[2]
    tensors = [(kind[:-1], p) for kind, p in given if kind[-1] == "*" and p != "scratch"]
    own = [f"In<{kind[6:]}> {p}" if kind[:6] == "const " else f"Out<{kind}> {p}" for kind, p in tensors]
    reals = [p.removesuffix("_given") for kind, p in given if kind == "double"]
    own += [f"double {p}" for p in reals] + [f"{kind} {p}" for kind, p in given if p in ("number", "stream")]
    by_sample = {"In<value_t> v"} | ({"In<output_t> dy"} if segment.axes[:1] == ("n",) else set())
    of = next((each for each in own if each in by_sample), "In<value_t> x")
    own[:0] = [] if of in own else [of]
    first = of.split()[1]
    sizes = {"C": plan.sizes.C}
    for level in ["e", *segment.graph.levels]:
        sizes |= {f"{level}_{side}": size for side, size in zip("DHW", plan.sizes.levels[level])}
    planes = [(i, each) for i, each in enumerate(program.passes) if isinstance(each, Planes)]
    sizes |= {f"parts_{i}": load_plan.parts_of(plan, program, i) for i, _ in planes}
    known = [f"{size} = {value}" for size, value in sizes.items() if re.search(rf"\b{size}\b", body)]
    body = re.sub(r"^  const real \w+ = real\(\w+_given\);\n", "", body, flags=re.M)
    stream = ", stream" if plan.device == "cuda" else ""
    scratch = re.compile(r"^  (\S+)\* const (\w+) = load::next<.*>\(scratch, (.*)\);", flags=re.M)
    body = scratch.sub(rf"  const Scratch<\1> \2(\3{stream});", body)
    if reals:  # members of structs are real
        numbers = re.compile(rf"(?<=[{{ ])({'|'.join(reals)})(?=[,}}])")
        body = re.sub(r"^  load::.*", lambda call: numbers.sub(r"real(\1)", call[0]), body, flags=re.M)
    body = f"  constexpr int64_t {', '.join(known)};\n  const int64_t N = {first}.size(0);\n{body}"
    functions = ""
    for array in program.arrays.values() if name != "backward" else ():
        is_own = array.name in map(identifier, segment.updated)
        if array.name != "y" and not is_own and f"> {array.name}" in ",".join(own) + ",":
            count = math.prod(load_plan.shape_of(plan, program, array)) // (
                plan.sizes.N if array.space.n else 1
            )
            of_all = f"{first}.size(0) * {count}" if array.space.n else count
            functions += f"EXPORT int64_t {array.name}_size({of}) {{ return {of_all}; }}\n\n"
    return text.replace(launcher[0], f"{functions}EXPORT void {name}({', '.join(own)}) {{\n{body}}}")


# ----------------------------------------------------------------------------------------------------- the repository's own


def composed(problem, x: torch.Tensor, device: str) -> Kernels:
    """The composed source of a problem's formula. Raises ValueError where there is none, or for sizes that it isn't for."""
    with torch.random.fork_rng():
        model = problem.Model(*problem.get_init_inputs()).to(x.dtype)
    segment = _only_segment(model, x)
    written = written_for(segment)
    if written is None or not _is_named_so(written, segment, model):
        raise ValueError("there are no fused kernels for its formula")
    mainloop, weight = mainloops.SOURCES[written.mainloop], model.get_parameter(segment.parameters[0])
    if obstacle := mainloop.obstacle(x, weight, True, written):
        raise ValueError(f"expected sizes that its fused kernels run, got others: {obstacle}")
    conv, nothing = segment.conv, (0,) * segment.conv.nd
    settings = conv.stride, nothing, conv.dilation, False, nothing, conv.groups  # a formula has no padding
    defines = mainloop.defines(x, weight, "cell", written) | written.macros
    return Kernels(read(written.path(device)), segment.parameters[0], settings, written.folder, defines)


def _is_named_so(written, segment: Segment, model: nn.Module) -> bool:
    """Are a source's names those of the attributes that stand at their places in the formula? A cell finds them by these."""
    tensors = zip(written.tensors, map(identifier, [*segment.parameters, *segment.buffers]))
    if not all(own in ("weight", name) for own, name in tensors):
        return False
    paths = _paths(model)

    def is_so(own: str, hole) -> bool:
        if hole.name:
            return identifier(hole.name) == own
        return own in paths and operator.attrgetter(paths[own])(model) == hole.value

    return all(own.isupper() or is_so(own, hole) for own, hole in written.numbers.items())


def _text_of(problem) -> str:
    """As a KernelBench-style file."""
    Model, (batch, *sizes) = problem.Model, problem.input_shape
    title = (inspect.getdoc(Model) or Model.__name__).partition("\n\n")[0].replace("\n", " ")
    return f'''"""{title}"""

import torch
from torch import nn


{re.sub(rf"{chr(92)}b{Model.__name__}{chr(92)}b", "Model", inspect.getsource(Model)).rstrip()}


def get_inputs(batch_size={batch}, device="cpu"):
    return [torch.rand(batch_size, {", ".join(map(str, sizes))}, device=device)]


def get_init_inputs():
    return {problem.get_init_inputs()}
'''


# ------------------------------------------------------------------------------------------------------- the file's parts


def _paths(model: nn.Module) -> dict[str, str]:
    """Attributes by their names with underscores for dots."""
    paths = {}
    for owner, module in model.named_modules():
        for name in filter(
            re.compile("[^_]").match, {**vars(module), **module._parameters, **module._buffers}
        ):
            paths[identifier(f"{owner}.{name}".lstrip("."))] = f"{owner}.{name}".lstrip(".")
    return paths


def _arguments(model: nn.Module, kernels: Kernels, formula: str) -> tuple[dict[str, str], dict[str, str]]:
    """Of each parameter of the launchers that is Model's attribute, which; and by what names they give gradients. Raises ValueError for
    launchers that cell_host.py doesn't understand."""
    paths = _paths(model)
    paths |= {f"{name}_given": path for name, path in paths.items()}  # numbers of the engine's launchers
    paths["weight"], buffers = kernels.weight, {identifier(name) for name, _ in model.named_buffers()}
    launchers = parse_launchers(formula)
    asked = {each.name for each in launchers if each.asked}
    written = {p.name for each in launchers for p in each.parameters if p.written}
    given, found = {"x", "v", "dy", "seed", "number", *paths}, {"weight": kernels.weight}
    of_given = {f"{d}{name}" for name in given for d in ("d", "d_")}
    for name, p in [(each.name, p) for each in launchers for p in each.parameters]:
        known = given | written if p.tensor else given | asked
        named = [each for each in sorted(known - {"training"}) if not each.endswith("_given")]
        what = f"parameters out of {', '.join(named)}"
        if p.tensor and (not p.sized or p.ctype not in TYPES):
            what = f"In<T> and Out<T>, T out of {', '.join(TYPES)}"
        elif p.written and not (p.name in ("y", "v", *buffers, *of_given) or f"{p.name}_size" in asked):
            what = f"a function `EXPORT int64_t {p.name}_size(…)` of how many elements it has"
        elif p.name in known:
            own = p.name in paths and (not p.written or p.name in buffers)
            found |= {p.name: paths[p.name]} if own else {}
            continue
        raise ValueError(f"{name}: expected {what}, got `{p.declared} {p.name}`")
    found |= {name: paths[name] for name in kernels.gradients}
    names = {d: name for name in ("x", "v", *found) for d in (f"d{name}", f"d_{name}")}
    return found, {names[d]: d for d in sorted(written) if d in names} | kernels.gradients


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
    texts = "\n".join([gathered, text, *[header.text for header in headers.values()]])
    asked, defined = (
        set(re.findall(rf"^[ \t]*#[ \t]*{word} (\w+)", texts, flags=re.M)) for word in ("ifn?def", "define")
    )
    known = {name: False for name in asked - defined if name[0] != "_"} | known  # nobody defines those here
    whole, rest = inlined(gathered, headers.values(), known), inlined(text[end:], (), known)
    return used(whole, f"{rest} CELL Called").strip("\n") + "\n", about + rest.strip("\n") + "\n"


def _literal(text: str) -> str:
    """KernelBench's checker takes the word `pass` for Python's statement."""
    return 'r"""\n{}"""'.format(re.sub(r"\bpass\b", "sweep", text).replace('"""', '"" "'))
