"""When eager must run, and why: the one place that knows what kernels can't see, or can't be given.

Three kinds of reasons. `foreign` and `altered`: somebody gives functions or modules a meaning that kernels would miss. `obstacle`:
tensors that only eager can take. `Situation`: all that a decision for tensors depends on but their values, so that it can be kept.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Sequence
from operator import itemgetter, or_

import torch
import torch.nn.functional as F
from torch import Tensor, is_grad_enabled, nn
from torch._C import _is_any_autocast_enabled
from torch._C._dynamo.guards import TensorGuards, dict_version
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.autograd import forward_ad

from inline_kernels.loader.operators import LOW, PLAIN, check_memory, precision

data_ptr = Tensor.data_ptr
DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
TRACED = (*PLAIN, FakeTensor, FunctionalTensor)  # and what stands for a plain tensor while PyTorch traces
# Does a dictionary's version rise with whatever is assigned? From Python 3.13 on not with an object's attribute.
HAS_VERSIONS = sys.version_info < (3, 13)

_GLOBAL_HOOKS = [
    table
    for name, table in vars(nn.modules.module).items()
    if name.startswith(("_global_forward", "_global_backward")) and isinstance(table, dict)
]
_FUNCTIONS = vars(F)
_GIVEN_FUNCTIONS = {name: value for name, value in _FUNCTIONS.items() if callable(value)}
_METHODS = nn.Module.__call__, nn.Conv2d._conv_forward, nn.Conv3d._conv_forward
_FORWARDS = {cls: cls.forward for cls in vars(nn.modules).values() if hasattr(cls, "forward")}
_functions_version = None  # of the last look at which all were PyTorch's; none yet, or nowhere

_KEPT_SITUATIONS = 16  # of each that keeps some
NOT_THE_MODEL = "the input does not fit the model, and eager's error says why"


def hooks_of(module: nn.Module) -> tuple[dict, ...]:
    backward = module._backward_hooks, module._backward_pre_hooks
    return module._forward_hooks, module._forward_pre_hooks, *backward


# -------------------------------------------------------------------------------------------------- foreign functions, modules


def may_be_foreign() -> bool:
    """Is there anything that `foreign` has to look at? In a hurry: where dictionaries have versions, one says that nothing in
    torch.nn.functional was assigned."""
    global _functions_version
    if _functions_version is None or dict_version(_FUNCTIONS) != _functions_version:
        if _replaced_functions():
            return True
        _functions_version = dict_version(_FUNCTIONS) if HAS_VERSIONS else None
    if (nn.Module.__call__, nn.Conv2d._conv_forward, nn.Conv3d._conv_forward) != _METHODS:
        return True
    return any(_GLOBAL_HOOKS) or (torch._C._len_torch_function_stack() > 0 and _has_foreign_mode())


def foreign() -> str | None:
    """Why what torch.nn's modules and functions do isn't what their names say, everywhere and now; or None."""
    if any(_GLOBAL_HOOKS):
        return "there are hooks on all modules"
    if _has_foreign_mode():
        return "a TorchFunctionMode gives functions a meaning of its own"
    methods = nn.Module.__call__, nn.Conv2d._conv_forward, nn.Conv3d._conv_forward
    others = [now for now, was in zip(methods, _METHODS) if now is not was] + _replaced_functions()
    if any([_is_foreign(getattr(now, "__globals__", {}).get("__name__", "")) for now in others]):
        return "a function that torch.nn's modules call has been replaced"
    return None


def _replaced_functions() -> list:
    """What stands in torch.nn.functional in the place of a function that was there."""
    return [now for name, was in _GIVEN_FUNCTIONS.items() if (now := _FUNCTIONS.get(name)) is not was]


def _is_foreign(module: str) -> bool:
    return module.partition(".")[0] != "torch"  # torch's own tracers put theirs there


def _has_foreign_mode() -> bool:
    """Is there a TorchFunctionMode that is not torch's own, as that of torch.device is?"""
    modes = map(torch._C._get_function_stack_at, range(torch._C._len_torch_function_stack()))
    return any([_is_foreign(type(mode).__module__) for mode in modes])


def altered(name: str, module: nn.Module) -> str | None:
    """Why a module of torch.nn doesn't do what its class does; or None."""
    kind = type(module)
    if any(hooks_of(module)):
        return f"{name} has hooks"
    if kind.forward is not _FORWARDS.get(kind):
        return f"{kind.__name__}.forward has been replaced"
    own = [each for each in vars(module) if hasattr(kind, each)]
    return f"{name} has a {', '.join(own)} of its own" if own else None


# --------------------------------------------------------------------------------------------------------------- tensors


def capturing() -> bool:
    """Is a CUDA graph captured here and now?"""
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


def autocast_dtype(x: Tensor, device: str | None = None) -> torch.dtype | None:
    """The dtype in which autocast convolves x, as on `device`, by default its own; None where it leaves x alone."""
    device = device or x.device.type
    if device not in ("cpu", "cuda") or not torch.is_autocast_enabled(device) or x.dtype == torch.float64:
        return None
    return torch.get_autocast_dtype(device) if x.is_floating_point() else None


def convolved_dtype(weight: Tensor) -> torch.dtype:
    """Of a convolution by these filters, as eager has it here and now."""
    return autocast_dtype(weight) or weight.dtype


def odd(name: str, t) -> str | None:
    """Why kernels can't read a tensor for what it says of itself; or None."""
    if not isinstance(t, Tensor):
        return None
    if type(t) not in TRACED:
        return f"{name} is a {type(t).__name__}, a subclass of Tensor, which may give operators a meaning of its own"
    if t.layout is not torch.strided or t.is_nested or t.is_quantized:
        return f"{name} is {'nested' if t.is_nested else 'quantized' if t.is_quantized else 'not strided'}"
    return f"{name} is a view whose sign is a flag" if t.is_conj() or t.is_neg() else None


def obstacle(tensors: Sequence[Tensor], names: Sequence[str], weight: int, weightless: int) -> str | None:
    """Why only eager can run for these; or None. tensors[weight] is the convolution's weight; the first `weightless` stand for some on
    its device."""
    if torch._C._are_functorch_transforms_active():
        return "a transformation of torch.func needs operators that it can look into"
    if not all(isinstance(t, Tensor) for t in tensors):
        return f"{names[[isinstance(t, Tensor) for t in tensors].index(False)]} is no tensor"
    device = tensors[weight].device
    for i, (name, t) in enumerate(zip(names, tensors)):
        if reason := odd(name, t):
            return reason
        if t.device != device and i >= weightless:
            return NOT_THE_MODEL
        if t.dtype not in DTYPES:
            return f"there are no kernels for {t.dtype}, which {name} is of"
        if forward_ad._current_level >= 0 and forward_ad.unpack_dual(t).tangent is not None:
            return "there is no derivative for forward-mode AD"
    if device.type not in ("cpu", "cuda"):
        return "there are kernels for the CPU and for CUDA only"
    return None if all(t.numel() for t in tensors) else "there is nothing to compute"


class Situation:
    """What a decision for tensors depends on, as it was: classes, shapes, strides, dtypes, devices, alignment, requires_grad, the modes of
    gradients and autocast, TF32. And, once there is one, the decision: `run(*tensors)` gives the result; None: eager does. `drawn`:
    None, or run takes random numbers, too, and this says whether they are wanted.

    Raises TypeError, RuntimeError or ValueError for what PyTorch's guards know no situation of: no tensor, or one that stands for two;
    and RuntimeError, as `holds` does, where the memory of one was freed.
    """

    __slots__ = (
        "alike",
        "gradients",
        "autocast",
        "tf32",
        "alignment",
        "addresses",
        "decided",
        "run",
        "drawn",
    )

    def __init__(self, tensors: tuple[Tensor, ...]):
        # PyTorch's own comparison: a sixth of the time of one here.
        guards, x = TensorGuards(*tensors, dynamic_dims_sizes=None, dynamic_dims_strides=None), tensors[0]
        self.alike, self.gradients, self.autocast = guards.check, is_grad_enabled(), autocast_dtype(x)
        self.addresses = [*map(data_ptr, tensors)]  # the last that were looked at
        self.tf32, self.alignment = precision(x), _alignment(self.addresses, tensors)
        self.decided, self.run, self.drawn = False, None, None

    def holds(self, tensors: tuple[Tensor, ...]) -> bool:
        """Is all as it was? What is eager's whatever the alignment and TF32 isn't asked for those."""
        if not self.alike(*tensors) or is_grad_enabled() is not self.gradients:
            return False
        x = tensors[0]
        if (autocast_dtype(x) if _is_any_autocast_enabled() else None) is not self.autocast:
            return False
        if self.run is None and self.decided:
            return True
        if self.tf32 is not None and precision(x) != self.tf32:  # None: x is on no GPU
            return False
        addresses = [*map(data_ptr, tensors)]
        if addresses != self.addresses:
            if _alignment(addresses, tensors) != self.alignment:
                return False
            self.addresses = addresses if min(addresses) >= LOW else []
        return True


class Keeping:
    """What keeps what it decided in a situation, of the last it met. Called with inputs, it has tensors of its own behind them, at `sources`. epoch:
    rises where situations are forgotten."""

    def __init__(self):
        self.situations: list[Situation] = []
        self.epoch, self.sources = 0, []
        self.once = None  # gives of the tensors those that differ; None: all

    def guard_once(self, given: Sequence) -> None:
        """given: what tells the inputs apart. Guards take no tensor that stands for two."""
        if len(set(given)) < len(given):
            first = [i for i, each in enumerate(given) if each not in given[:i]]
            self.once = itemgetter(*first, *range(len(given), len(given) + len(self.sources)))

    def forget(self) -> None:
        """What is kept: a number has changed, or kernels."""
        self.epoch += 1
        self.situations = []

    def situation(self, tensors: tuple[Tensor, ...]) -> Situation | None:
        """That which is kept, or a new one. None: those guards know none, as where one tensor stands for two, or the memory of one was freed."""
        known = self.situations
        try:
            guarded = tensors if self.once is None else self.once(tensors)
            for found in known:
                if found.holds(guarded):
                    break
            else:
                return Situation(guarded)
        except (AttributeError, RuntimeError, TypeError, ValueError):
            return None
        if found is not known[0]:
            self.keep(found)
        return found

    def keep(self, situation: Situation) -> None:
        """The first of those that are."""
        others = [other for other in self.situations if other is not situation]
        self.situations = [situation, *others[: _KEPT_SITUATIONS - 1]]


def _alignment(addresses: Sequence[int], tensors: tuple[Tensor, ...]) -> list[int] | None:
    """None: of all. Raises RuntimeError where the memory of one was freed."""
    if min(addresses) < LOW:
        check_memory(*tensors)
    return [address % 16 for address in addresses] if functools.reduce(or_, addresses) % 16 else None
