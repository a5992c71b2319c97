"""What an exported cell holds beside its problem's own functions: building the kernels, choosing a plan,
autograd, reasons why not.

export.py copies these functions as text, their names made private, with what they reach. What is declared
here without a value stands for the problem's own: its plan, forward and backward, the checks of its ModelNew,
and what is known when the cell is written.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import os
import re
import tempfile
from collections.abc import Callable, Iterator
from types import SimpleNamespace

import torch

from inline_kernels.export.kernels import NAMESPACE
from inline_kernels.loader.operators import described

DEVICE: str  # "cpu" or "cuda"
DTYPE: torch.dtype  # of x, the parameters and the result
CTYPE: str  # that in C
SUMS: torch.dtype  # in which the kernels sum, and take parameters by channel
FILTERS: tuple[int, ...]  # the shape of the convolution's weight
GIVEN: tuple  # that, the shape of x but for the batch, and the whole numbers among the constants
SIZE: tuple[int, ...]  # the convolution's
PLAIN: tuple  # its stride, padding, dilation, groups and padding mode
OWN: str  # the parameter by channel that is the model's own, or ""
TENSORS: int  # how many of the operator's arguments are tensors
VARYING: int  # or numbers that are drawn at each call, which come next
SUBMODULES: dict[str, tuple]  # by name: the class, its forward, the names of all that it defines
BUILDS: dict[str, list[tuple[int, str]]]  # the texts that a build consists of, each with its first line here
OF_FORMULA: str  # a digest of its code, as it was
OF_GRADIENT: str  # likewise
Arguments: type
make_plan: Callable
forward: Callable
backward: Callable
tail_raises: Callable
tail_obstacle: Callable
fused_obstacle: Callable

plans = {}  # by all that a plan depends on


def run(model, tensors, constants, numbers=()):
    """Model's result by the kernels. Raises RuntimeError where they can't compute it, with the reason."""
    if any([t is None for t in tensors]):
        raise RuntimeError("ModelNew can't run: a weight or a bias of its layers is None")
    saving = torch.is_grad_enabled() and any([t.requires_grad for t in tensors])
    key = saving, torch.is_autocast_enabled(DEVICE), *constants, *described(*tensors)
    plan = plans.get(key)
    reason = plan is None and next(filter(None, obstacles(model, tensors[0], constants)), None)
    if reason or (reason := tail_raises(model, tensors[0], SIZE) and "x does not fit what follows"):
        raise RuntimeError(f"ModelNew can't run: {reason}")
    if plan is None:
        plan = plans[key] = make_plan(Arguments(*tensors, *numbers, *constants), saving=saving)
    if saving:
        return Function.apply(plan, *tensors, *numbers, *constants)
    return forward(Arguments(*tensors, *numbers, *constants), plan=plan, saving=False)[0]


def layers(model) -> list[torch.nn.Module]:
    """The model's layers. Raises RuntimeError where the kernels can't stand for them, with the reason."""
    found = [vars(model).get(name, model._modules.get(name)) for name in SUBMODULES]
    if reason := next(filter(None, altered(model, found)), None):
        raise RuntimeError(f"ModelNew can't run: {reason}")
    return found


def altered(model, found: list) -> Iterator[object]:
    """What stands in the kernels' way and is no argument of `run`, so that each call asks; or something
    false."""
    if torch.nn.modules.module._has_any_global_hook():
        yield "there are hooks on all modules"
    if torch._C._are_functorch_transforms_active() or torch.autograd.forward_ad._current_level >= 0:
        yield "torch.func and forward-mode AD need operators that they can look into"
    for layer, (name, (kind, forward, defined)) in zip(found, SUBMODULES.items()):
        if type(layer) is not kind:
            yield f"{name} is a {type(layer).__name__}, not a {kind.__name__}"
        if (
            layer._forward_hooks
            or layer._forward_pre_hooks
            or layer._backward_hooks
            or layer._backward_pre_hooks
        ):
            yield f"{name} has hooks"
        if kind.forward is not forward or not defined.isdisjoint(vars(layer)):
            yield f"{name} has another forward than its class had"
    conv = model._modules["conv"]
    if (conv.stride, conv.padding, conv.dilation, conv.groups, conv.padding_mode) != PLAIN:
        yield "the convolution has a stride, padding, dilation or groups"
    yield tail_obstacle(model)


def checked(value, kind: type):
    """A constant of the model as the kernels take it."""
    if not isinstance(value, (int, kind)) or value != value:
        raise RuntimeError(f"ModelNew can't run: {value} is in the place of a number")
    return kind(value)


def obstacles(model, batch: torch.Tensor, constants: tuple) -> Iterator[object]:
    """What of the arguments stands in the kernels' way, or something false for what does not; what comes
    after an obstacle is not looked at."""
    conv, given = model.conv, {(t.device, t.dtype) for t in [batch, *model.parameters()]}
    yield batch.device.type != DEVICE and f"x is on {batch.device}, its kernels are for {DEVICE}"
    yield given != {(batch.device, DTYPE)} and f"its kernels take {DTYPE}, not {given}"
    yield torch.is_autocast_enabled(DEVICE) and f"autocast is on, its kernels compute in {DTYPE}"
    sizes = *conv.weight.shape, *batch.shape[1:], *[each for each in constants if type(each) is not float]
    yield (sizes != GIVEN or not len(batch)) and f"its kernels are for get_inputs' sizes, not {sizes}"
    yield not_by_channel(model) or fused_obstacle(model, batch, DTYPE)


def too_old(model, batch: torch.Tensor, dtype: torch.dtype) -> str | bool:
    """The one obstacle for fused kernels that a block of any GPU from 8.0 on, of 99 kB of shared memory or
    more, has room for."""
    return (
        torch.cuda.get_device_capability(batch.device) < (8, 0)
        and "it needs a GPU of capability 8.0 or later"
    )


def not_by_channel(model) -> str | bool:
    """What is wrong with the shape of the parameter that is the model's own."""
    by_channel = (FILTERS[0], *[1] * (len(FILTERS) - 2))
    return OWN != "" and getattr(model, OWN).shape != by_channel and f"{OWN} is not one value per channel"


def marked(builds: dict, mark: str) -> tuple[str, str]:
    """A digest of the code below all lines with this mark, each to the end of its block, without spaces and
    comments; and where that code begins."""
    codes, lines = [], []
    for first, text in dict.fromkeys([each for build in builds.values() for each in build]):
        for found in re.finditer(rf"// THE {mark}:.*", text):
            code = text[found.end() :].partition("// THE ")[0]
            code = re.sub(r"//.*|/[*](?s:.*?)[*]/|\s", "", code)
            depths = itertools.accumulate((each == "{") - (each == "}") for each in code)
            codes.append(code[: next((i for i, depth in enumerate(depths) if depth < 0), None)])
            lines.append(str(first + text.count("\n", 0, found.end()) + 1))
    return hashlib.sha256("\n".join(codes).encode()).hexdigest()[:16], ", ".join(lines)


@functools.cache
def stale() -> str:
    """The lines of the gradient, where the formula has been edited and none of them has."""
    (formula, _), (gradient, lines) = marked(BUILDS, "FORMULA"), marked(BUILDS, "GRADIENT")
    return lines if formula != OF_FORMULA and gradient == OF_GRADIENT else ""


class Function(torch.autograd.Function):
    """The result, and its gradients."""

    @staticmethod
    def forward(ctx, plan, *arguments):
        y, *saved = forward(Arguments(*arguments), plan=plan, saving=True)
        ctx.save_for_backward(*arguments[:TENSORS], *saved)
        ctx.plan, ctx.constants = plan, arguments[TENSORS:]
        return y

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, dy):
        if lines := stale():
            raise RuntimeError(
                f"the formula has been edited, but not its gradient: edit the lines {lines}, too"
            )
        a, saved, plan = (
            Arguments(*ctx.saved_tensors[:TENSORS], *ctx.constants),
            ctx.saved_tensors[TENSORS:],
            ctx.plan,
        )
        needs = ctx.needs_input_grad[1 : TENSORS + 1]
        with torch.autocast(DEVICE, enabled=False):
            found = backward(dy, a, *saved, plan=plan, needs=needs)
        return None, *[g if need else None for g, need in zip(found, needs)], *[None] * len(ctx.constants)


class Plan(SimpleNamespace):
    """What need not be decided anew for such arguments, as operators.Plan; parameters by channel have an
    element for each, results are contiguous."""

    def __init__(self, name, a, parameters, outputs, defines=None, folder=None, numbers=(), **own):
        kernels = load(name, a.x, DTYPE, **defines or {})
        last, none = 2 + len(parameters), a.x.new_empty(0)
        super().__init__(
            kernels=kernels, _last=last, none=none, _outputs=[each[:2] for each in outputs], **own
        )
        self.launch = lambda *given: kernels.forward(*given, *numbers)

    def when_needed(self, name, defines: dict, launcher: str, *numbers, launchers=None) -> Callable:
        kernels = functools.cache(lambda: load(name, self.none, DTYPE, **defines))
        return lambda: lambda *given: getattr(kernels(), launcher)(*given, *numbers)

    def outputs(self, a):
        return [a.x.new_empty(shape, dtype=dtype) for shape, dtype in self._outputs]

    def parameters(self, a):
        return tuple([(p if SUMS == DTYPE else p.to(SUMS)).contiguous() for p in a[2 : self._last]])

    def operands(self, a):
        return a.x.contiguous(), a.weight.contiguous(), *self.parameters(a), *a[self._last : VARYING]

    def gradients(self, a):
        return [torch.empty(p.shape, dtype=SUMS, device=p.device) for p in a[2 : self._last]]

    def as_parameters(self, a, gradients):
        return gradients if SUMS == DTYPE else [gradient.to(DTYPE) for gradient in gradients]


def never(*anything) -> bool:
    """What is asked is not so here."""
    return False


def whole(count: int, *tensors: torch.Tensor) -> tuple[tuple[torch.Tensor, ...]]:
    """All at a time, as library.pieces has it on a GPU."""
    return (tensors,)


def load(name: str, x: torch.Tensor, out_dtype: torch.dtype, **defines) -> SimpleNamespace:
    """The launchers of a build with these macros, made if need be. Its folder's name says all that is
    compiled; what lies there is whole, and named like its operators."""
    from torch.utils.cpp_extension import _get_build_directory, load_inline

    if DEVICE == "cuda":
        major, minor = torch.cuda.get_device_capability(x.device)
        flags, arch = ["-O1", "-fvisibility=hidden"], f"{major}{minor}" + "a" * (major >= 9)
        cuda_flags = [f"-gencode=arch=compute_{arch},code=sm_{arch}", "-Xcompiler=-fvisibility=hidden"]
    else:
        native = "-mcpu=native" if os.uname().machine in ("aarch64", "arm64") else "-march=native"
        flags, cuda_flags = (
            ["-O3", "-fvisibility=hidden", "-fno-math-errno", "-fno-trapping-math", native],
            None,
        )
    file = os.path.basename(globals().get("__file__") or "cell")
    macros = [f"#define {key} {value}\n" for key, value in {"VALUE_T": CTYPE, **defines}.items()]
    text = "".join([*macros, *[f'#line {line} "{file}"\n{text}' for line, text in BUILDS[name]]])
    compiled = text, flags, cuda_flags, torch.__version__, torch.backends.cpu.get_cpu_capability()
    digest = hashlib.sha256(repr(compiled).encode()).hexdigest()[:16]
    folder = _get_build_directory(f"{name}_{digest}", False)
    if built := [file for file in os.listdir(folder) if file.endswith(".so")]:
        torch.ops.load_library(os.path.join(folder, built[0]))
    else:  # under a name never used before: PyTorch waits for, or relies on, what an interrupted build has left
        with tempfile.TemporaryDirectory("", "build_", folder, ignore_cleanup_errors=True) as place:
            build = os.path.basename(place)
            own = text.replace(NAMESPACE, build)
            options = {"extra_cflags": flags, "extra_cuda_cflags": cuda_flags, "build_directory": place}
            options |= {"is_python_module": False, "no_implicit_headers": True}
            made = load_inline(build, [own], [own] if DEVICE == "cuda" else None, **options)
            os.replace(made, os.path.join(folder, f"{build}.so"))
        built = [f"{build}.so"]
    operators = getattr(torch.ops, built[0].removesuffix(".so"))
    names = re.findall(r"^EXPORT void (\w+)", text, flags=re.M)
    return SimpleNamespace(**{name: getattr(operators, name).default for name in names})
