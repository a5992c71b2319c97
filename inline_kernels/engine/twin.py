"""What every `ModelNew` shares: which variant runs for an input, said by `plan`, and kept from call to call.

A problem's ModelNew inherits from `Twin` and from its reference model, and says what its operators take. Here is decided which of
them runs. Where eager would raise an error, eager runs, so that the error is the right one. Where only eager can compute the
result (a submodule of another class, a hook, a stride, …) "auto" runs eager, `plan` says so, and any other variant raises
RuntimeError. A decision is kept for as long as nothing that it depends on has changed; parameters are read afresh at each call.
"""

from __future__ import annotations

import copy
import functools
import sys
from collections.abc import Callable
from operator import attrgetter, is_, or_
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._C._dynamo.guards import TensorGuards, dict_version
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.autograd import forward_ad

import inline_loader
from inline_kernels.engine import choice, library, tiling
from inline_kernels.engine.operators import DTYPES
from inline_kernels.loader.operators import PLAIN, Operator, check_memory, is_watched, precision

_TRACED = (*PLAIN, FakeTensor, FunctionalTensor)  # and what stands for a plain tensor while PyTorch traces
_GLOBAL_HOOKS = [
    table
    for name, table in vars(nn.modules.module).items()
    if name.startswith(("_global_forward", "_global_backward")) and isinstance(table, dict)
]


def _calls() -> tuple[Callable, ...]:
    """What a call of a submodule runs beside its class's forward."""
    methods = nn.Module.__call__, nn.Conv2d._conv_forward, nn.Conv3d._conv_forward
    return *methods, F.conv2d, F.conv3d, F.group_norm, F.instance_norm, F.dropout, F.max_pool2d


_CALLS = _calls()
_FUNCTIONS = vars(F)
_KEPT_SITUATIONS = 16  # situations of one module, the last met
# Does a dictionary's version rise with whatever is assigned? From Python 3.13 on not with an object's attribute.
_HAS_VERSIONS = sys.version_info < (3, 13)


class Plan(NamedTuple):
    """What runs for an input: the variant's name, and the reason."""

    variant: str
    reason: str

    def __str__(self):
        return f"{self.variant}: {self.reason}"


class Twin:
    """A mixin in front of the reference model. A problem's ModelNew says, as class attributes:

    submodules: the exact class of each submodule; anything else in its place is left to eager.
    operands: the parameters that the operators take after x, in order; the convolution's weight and bias come first.
    constants: the numbers that they take after those, in order, each with what converts it.
    epilogue, fused: the operators, called as operator(x, *operands, *constants); fused is None where there is none.
    autocast_tail: under autocast, the dtype of what eager computes from a parameter that comes after the convolution; None where
        that is its own, or autocast's if that is wider.
    """

    __slots__ = ("_kept",)  # not in vars(module): copies and pickles go without

    submodules: dict[str, type[nn.Module]]
    operands: tuple[str, ...]
    constants: dict[str, Callable]
    epilogue: Operator
    fused: Operator | None = None
    autocast_tail: torch.dtype | None = None
    variant = "auto"

    # -------------------------------------------------------------------------------- what else a problem may have to say

    def _tail_raises(self, x: Tensor, size: list[int]) -> bool:
        """Does what follows the convolution, of spatial size `size`, raise an error in the reference?"""
        return False

    def _tail_obstacle(self) -> str | None:
        """Why only eager can compute what follows the convolution, or None."""
        return None

    def _fused_obstacle(self, x: Tensor, dtype: torch.dtype) -> str | None:
        """Why the fused kernels can't run for x, which they see in `dtype`, or None."""
        return None

    def _training_obstacle(self, x: Tensor) -> str | None:
        """Why "auto" leaves a pass that backward will follow to the epilogue, though the fused kernels run; or None."""
        return None if self.fused.saves else "backward will follow, and needs the convolution's output"

    def _drawn(self, x: Tensor, constants: tuple, watched: bool) -> tuple:
        """What the operators take between operands and constants, drawn anew at each call: tensors, then numbers. watched: as of
        is_watched(x)."""
        return ()

    @staticmethod
    def _autocast_result(y: Tensor, dtype: torch.dtype) -> Tensor:
        """y in the dtype that eager gives under autocast to `dtype`."""
        return y

    def __init_subclass__(cls):
        cls.__doc__ = cls.__doc__ or cls.reference().__doc__
        cls._forwards = {name: module.forward for name, module in getattr(cls, "submodules", {}).items()}

    # ----------------------------------------------------------------------------------------------- what a user calls

    @classmethod
    def variants(cls) -> tuple[str, ...]:
        """The ladder of variants, on a GPU."""
        return ("eager", "epilogue", "fused") if cls.fused else ("eager", "epilogue")

    @classmethod
    def reference(cls) -> type[nn.Module]:
        """The class of the reference model."""
        return cls.__mro__[cls.__mro__.index(Twin) + 1]

    @classmethod
    def from_eager(cls, model: nn.Module) -> nn.Module:
        """The fused twin of `model`: the same parameters and submodules (shared, not copied), mode and constants.

        Raises TypeError if `model` is not of this class's reference, or has a forward of its own, which a twin would drop.
        """
        reference = cls.reference()
        if not isinstance(model, reference):
            raise TypeError(f"expected a {reference.__name__}, got a {type(model).__name__}")
        if type(model).forward not in (reference.forward, cls.forward) or "forward" in vars(model):
            got = f"a {type(model).__name__} with its own"
            raise TypeError(f"expected {reference.__name__}'s forward, got {got}")
        if "parametrizations" in model._modules:
            raise TypeError("expected plain parameters, got parametrized ones: parametrize its twin")
        twin = cls.__new__(cls)
        attributes = vars(model).items()
        twin.__dict__.update({k: copy.copy(v) if isinstance(v, dict) else v for k, v in attributes})
        return twin

    def forward(self, x):
        plain = type(x) is Tensor and x.layout is torch.strided
        if not plain or is_watched() or forward_ad._current_level >= 0:
            return self._compute(x, self.plan(x).variant)
        if _may_be_foreign():
            return self._compute(x, self.plan(x).variant)
        kept = getattr(self, "_kept", None)
        if kept is None or not kept.holds(self):
            kept = Kept(self)
            object.__setattr__(self, "_kept", kept)
        return kept.run(self, x)

    def __getstate__(self):
        return vars(self).copy()

    # -------------------------------------------------------------------------------------------------------- computing

    def _compute(self, x: Tensor, variant: str) -> Tensor:
        if variant == "eager":
            return super().forward(x)
        operator, constants, autocast = getattr(self, variant), self._constants(), _autocast_dtype(x)
        arguments = *self._operands(), *self._drawn(x, constants, is_watched(x)), *constants
        if autocast is None:
            return operator(x, *arguments)
        return self.run_autocast(operator, autocast, variant == "fused", x, *arguments)

    @classmethod
    def run_autocast(cls, run: Callable, dtype, as_they_are: bool, x, weight, conv_bias, *others) -> Tensor:
        """run's result under autocast to `dtype`. as_they_are: is the convolution given operands of one dtype as they are? That is
        more exact, and no pass converts x."""
        count = len(cls.operands) - 2
        if not is_watched(x):
            check_memory(x, weight, conv_bias, *others[:count])  # before they are converted
        tail = [p.to(cls.autocast_tail or torch.promote_types(dtype, p.dtype)) for p in others[:count]]
        if not as_they_are or x.dtype != weight.dtype:
            x, weight = x.to(dtype), weight.to(dtype)
        return cls._autocast_result(run(x, weight, conv_bias, *tail, *others[count:]), dtype)

    def _constants(self) -> tuple:
        return tuple([convert(attrgetter(name)(self)) for name, convert in self.constants.items()])

    def _operands(self) -> list[Tensor | None]:
        return [attrgetter(name)(self) for name in self.operands]

    # ------------------------------------------------------------------------------------------------------- the decision

    def plan(self, x: Tensor) -> Plan:
        """The variant that forward(x) runs, and why.

        Raises ValueError if `self.variant` is no variant's name, RuntimeError if it can't run for x.
        """
        plan = self.most_fused(x)
        if self.variant != "auto" or plan.variant == "eager" or library.device_type(x) != "cuda":
            return plan
        return self._fastest(x, plan)

    def most_fused(self, x: Tensor) -> Plan:
        """What `plan` gives, were "auto" the most fused variant that can run."""
        if self.variant not in ("auto", *self.variants()):
            known = ", ".join(self.variants())
            raise ValueError(f"expected variant to be 'auto' or one of {known}, got {self.variant!r}")
        if self.variant == "eager":
            return Plan("eager", "asked for")
        obstacle, instead = self._altered(), "eager"  # first: to read a parametrized weight may change it
        if obstacle is None and self._eager_raises(x):
            return Plan("eager", "the input does not fit the model, and eager's error says why")
        obstacle = obstacle or self._obstacle(x)
        if obstacle is None and self.variant != "epilogue":
            obstacle, instead = self._not_fused(x), "epilogue"
        if self.variant != "auto" and obstacle is not None:
            raise RuntimeError(f"variant {self.variant!r} can't run: {obstacle}")
        if self.variant != "auto":
            return Plan(self.variant, "asked for")
        if obstacle is None and self.training and _needs_gradient(x, *self._operands()):
            obstacle = self._training_obstacle(x)
        if obstacle is not None:
            return Plan(instead, obstacle)
        return Plan("fused", "the convolution runs inside our kernels")

    def _fastest(self, x: Tensor, plan: Plan) -> Plan:
        """`plan`, or what a record of sizes says is faster."""
        phase = "train" if _needs_gradient(x, *self._operands()) else "forward"
        rule, weight = choice.RULES.get((self.epilogue.name, phase), plan.variant), self.conv.weight
        variant, sizes = choice.fastest(rule, x.shape, weight.shape, _convolved_dtype(x).itemsize)
        ladder = self.variants()
        if ladder.index(variant) >= ladder.index(plan.variant):
            return plan
        slower = "the fused kernels" if plan.variant == "fused" else "our kernels"
        return Plan(variant, f"it was faster than {slower} with {sizes or 'any sizes'} ({choice.RECORD})")

    @tiling.first_obstacle
    def _altered(self):
        """What somebody has put in the place of a submodule or a number, or added to it, so that eager must run; or None."""
        yield any(_GLOBAL_HOOKS), "there are hooks on all modules"
        yield _has_foreign_mode(), "a TorchFunctionMode gives functions a meaning of its own"
        yield _has_foreign_call(), "a function that torch.nn's modules call has been replaced"
        yield "parametrizations" in self._modules, "the model has parametrizations"
        for name, expected in self.submodules.items():
            module, kind = vars(self).get(name, self._modules.get(name)), expected.__name__
            replaced = type(module) is not expected or module is not self._modules.get(name)
            yield replaced, f"{name} is a {type(module).__name__}, and the kernels replace a {kind}"
            yield any(_hooks(module)), f"{name} has hooks"
            # torch.compile looks into no more than whether a name is there.
            names = vars(module) if not torch.compiler.is_compiling() else ("forward",)
            own = [each for each in names if each in vars(module) and hasattr(expected, each)]
            yield own, f"{name} has a {', '.join(own)} of its own"
            yield expected.forward is not self._forwards[name], f"{kind}.forward has been replaced"
        for name, convert in self.constants.items():
            value = attrgetter(name)(self)
            odd = convert in (float, int) and not isinstance(value, (int, convert))
            yield odd, f"{name} is not a number"
            yield isinstance(value, float) and value != value, f"{name} is NaN"

    def _eager_raises(self, x: Tensor) -> bool:
        """Does the reference raise an error for x?"""
        weight = self.conv.weight
        if not isinstance(x, Tensor) or _convolved_dtype(x) != _convolved_dtype(weight):
            return True
        if x.dim() not in (weight.dim(), weight.dim() - 1) or 0 in weight.shape:
            return True
        if x.shape[-weight.dim() + 1] != weight.shape[1] or x.device != weight.device:
            return True
        own = [attrgetter(name)(self) for name in self.operands[1:] if "." in name]  # of submodules
        if any(p is not None and p.shape != weight.shape[:1] for p in own):
            return True
        spatial = x.shape[-weight.dim() + 2 :]
        size = [extent - kernel + 1 for extent, kernel in zip(spatial, weight.shape[2:])]
        return min(size) < 1 or self._tail_raises(x, size)

    @tiling.first_obstacle
    def _obstacle(self, x: Tensor):
        """Why only eager can run, or None."""
        conv, operands, compiling = self.conv, self._operands(), torch.compiler.is_compiling()
        yield library.device_type(x) not in ("cpu", "cuda"), "there are kernels for the CPU and for CUDA only"
        transformed = torch._C._are_functorch_transforms_active()
        yield transformed, "a transformation of torch.func needs operators that it can look into"
        missing = any(p is None for p in operands)
        yield missing, "the convolution or the normalisation has no bias, or no affine"
        subclass = not compiling and any(type(t) not in _TRACED for t in (x, *operands))
        yield subclass, "a subclass of Tensor gives operators a meaning of its own"
        dual = not compiling and forward_ad._current_level >= 0 and any(map(_has_tangent, (x, *operands)))
        yield dual, "forward-mode AD needs operators that it can look into"
        yield x.layout is not torch.strided, "the input is not laid out by strides"
        yield x.dtype not in DTYPES, "there are kernels for float32, float64, float16 and bfloat16 only"
        mixed = _autocast_dtype(x) is None and any(p.dtype != x.dtype for p in operands)
        yield mixed, "the input and the parameters have different dtypes"
        yield any(p.dtype not in DTYPES for p in operands), "a parameter is not floating point"
        yield x.dim() != conv.weight.dim(), "the input has no batch dimension"
        yield x.numel() == 0, "the input is empty"
        plain = all(map(_all_are, (conv.stride, conv.dilation, conv.groups, conv.padding), (1, 1, 1, 0)))
        strided = not plain or conv.padding_mode != "zeros"
        yield strided, "the convolution has a stride, padding, dilation or groups"
        tail = self._tail_obstacle()
        yield tail, tail
        for name in [name for name in self.operands if "." not in name]:  # what is the model's own
            fits = _is_by_channel(getattr(self, name), conv.weight)
            yield not fits, f"{name} holds neither one value per channel nor one in all"

    def _not_fused(self, x: Tensor) -> str | None:
        """Why the fused kernels can't run, where the epilogue's can; or None."""
        if not self.fused:
            return "there are no fused kernels for this problem"
        if library.device_type(x) == "cpu":
            return (
                "on a CPU the convolution is Winograd's or the library's, and the rest is one pass, in cache"
            )
        weight = self.conv.weight
        # They see x in its own dtype, also under autocast, unless that must reconcile it with weight's.
        return self._fused_obstacle(x, x.dtype if x.dtype == weight.dtype else _convolved_dtype(x))


def _may_be_foreign() -> bool:
    """Has a call been replaced, or is there a foreign mode? In a hurry: where dictionaries have versions, one says that nothing in
    torch.nn.functional was assigned."""
    global _functions_version
    if _functions_version is None or dict_version(_FUNCTIONS) != _functions_version:
        if _calls() != _CALLS:
            return True
        _functions_version = dict_version(_FUNCTIONS) if _HAS_VERSIONS else None
    elif (_Module.__call__, _Conv2d._conv_forward, _Conv3d._conv_forward) != _METHODS:
        return True
    return _len_torch_function_stack() > 0 and _has_foreign_mode()


_functions_version = None  # none yet, or nowhere
_Module, _Conv2d, _Conv3d, _METHODS = nn.Module, nn.Conv2d, nn.Conv3d, _CALLS[:3]
_len_torch_function_stack, _forward = torch._C._len_torch_function_stack, attrgetter("forward")


def _is_foreign(module: str) -> bool:
    return module.partition(".")[0] != "torch"


def _has_foreign_mode() -> bool:
    """Is there a TorchFunctionMode that is not torch's own, as that of torch.device is?"""
    modes = map(torch._C._get_function_stack_at, range(torch._C._len_torch_function_stack()))
    return any([_is_foreign(type(mode).__module__) for mode in modes])


def _has_foreign_call() -> bool:
    """Is there another in the place of one of those functions, and not torch's own, as its tracers put there?"""
    others = [now for now, was in zip(_calls(), _CALLS) if now is not was]
    return any([_is_foreign(getattr(now, "__globals__", {}).get("__name__", "")) for now in others])


def _is_by_channel(parameter: Tensor, weight: Tensor) -> bool:
    """Does it hold one value per channel of the convolution's result, or one in all?"""
    C, spatial = weight.shape[0], weight.dim() - 2
    by_channel = tuple(parameter.shape[-spatial - 1 :]) == (C,) + (1,) * spatial and parameter.numel() == C
    return parameter.dim() <= spatial + 2 and (parameter.numel() == 1 or by_channel)


def _all_are(sizes, size: int) -> bool:
    """Is `sizes`, a number or one for each dimension, `size` throughout?"""
    return all(each == size for each in (sizes if isinstance(sizes, (tuple, list)) else [sizes]))


def _hooks(module: nn.Module) -> tuple[dict, ...]:
    backward = module._backward_hooks, module._backward_pre_hooks
    return module._forward_hooks, module._forward_pre_hooks, *backward


def _has_tangent(tensor: Tensor) -> bool:
    return forward_ad.unpack_dual(tensor).tangent is not None


def _needs_gradient(*tensors: Tensor) -> bool:
    return torch.is_grad_enabled() and any([t.requires_grad for t in tensors])


def _autocast_dtype(x: Tensor) -> torch.dtype | None:
    """The dtype in which autocast convolves x; None where it leaves x alone."""
    device = library.device_type(x)
    if device not in ("cpu", "cuda") or not torch.is_autocast_enabled(device) or x.dtype == torch.float64:
        return None
    return torch.get_autocast_dtype(device) if x.is_floating_point() else None


def _convolved_dtype(tensor: Tensor) -> torch.dtype:
    """The dtype in which the convolution sees `tensor`."""
    return _autocast_dtype(tensor) or tensor.dtype


# ---------------------------------------------------------------------------------------------------------- kept plans


class Kept:
    """What a twin's decisions depend on, as it was, and the decisions: one for each situation met.

    Attributes of the twin and of its submodules are compared by identity, so that whatever is assigned anew is seen, if a
    version says that something has been; hooks by whether there are any. A list among those that count can be changed in place, and
    a constant of the class's, as a property, be another each time, so nothing is kept then. There is no way from here to the twin,
    whose memory is therefore free as soon as nobody else holds it.
    """

    def __init__(self, twin: Twin):
        modules = [module for module in twin._modules.values() if module is not None]
        self.cls, self.variant = type(twin), twin.variant
        self.modules, self.classes = modules, [*map(type, modules)]
        self.forwards = [cls.forward for cls in self.classes]
        owners, paths = {"": twin, **twin._modules}, [name.rpartition(".") for name in twin.operands]
        # Where the parameters are to be found at each call.
        self.sources = [(getattr(owners.get(path), "_parameters", {}), last) for path, _, last in paths]
        read = [id(parameters) for parameters, _ in self.sources]
        others = [table for m in modules for table in (m._parameters, m._buffers) if table]
        self.others = [twin._modules, *[table for table in others if id(table) not in read]]
        tables = [vars(twin), *map(vars, modules), *self.others]
        self.versions = _HAS_VERSIONS and [*map(dict_version, tables)]
        self.values = [[*table.values()] for table in tables]
        self.hooks = [*_GLOBAL_HOOKS, *[table for module in modules for table in _hooks(module)]]
        counted = [*map(vars(twin).get, twin.constants), *[v for m in modules for v in vars(m).values()]]
        own = [key for key in twin.constants if "." not in key]
        fixed = all(key in vars(twin) and not hasattr(self.cls, key) for key in own)
        self.steady = fixed and not any(isinstance(value, list) for value in counted)
        self.generation = inline_loader.generation
        self.situations: list[Situation] = []

    def holds(self, twin: Twin) -> bool:
        """Is the module what it was?"""
        if type(twin) is not self.cls or twin.variant is not self.variant or any(self.hooks):
            return False
        if [*map(type, self.modules)] != self.classes or [*map(_forward, self.classes)] != self.forwards:
            return False
        tables = [vars(twin), *map(vars, self.modules), *self.others]  # a module may have got other ones
        versions = _HAS_VERSIONS and [*map(dict_version, tables)]
        if not versions or versions != self.versions:  # something was assigned, the same perhaps
            for table, values in zip(tables, self.values):
                if len(table) != len(values) or not all(map(is_, table.values(), values)):
                    return False
            self.versions = versions
        return self.steady and self.generation == inline_loader.generation

    def run(self, twin: Twin, x: Tensor) -> Tensor:
        """forward(x) of a plain tensor which nothing watches."""
        try:
            tensors = x, *[parameters[name] for parameters, name in self.sources]
            for situation in self.situations:
                if situation.holds(tensors):
                    break
            else:
                situation = Situation(tensors)
        except (AttributeError, KeyError, RuntimeError, TypeError, ValueError):
            # A parameter is missing, none, or without data: the decision says what follows.
            return twin._compute(x, twin.plan(x).variant)
        if not situation.decided:
            return self._decide(twin, tensors, situation)
        if situation is not self.situations[0]:
            self._put_first(situation)
        if situation.run is None:
            return twin._compute(x, "eager")
        return situation.run(*tensors, *twin._drawn(x, situation.constants, False))

    def _decide(self, twin: Twin, tensors: tuple[Tensor, ...], situation: Situation) -> Tensor:
        """The first call in a situation: forward(x), and what keeps the decision."""
        x, run, constants = tensors[0], None, ()
        variant = twin.plan(x).variant
        if variant == "eager":
            y = twin._compute(x, variant)
        else:
            operator, constants, autocast = getattr(twin, variant), twin._constants(), _autocast_dtype(x)
            drawn, plan, needs_gradient = twin._drawn(x, constants, False), None, _needs_gradient(*tensors)
            if autocast is None:
                plan = operator.plan((*tensors, *drawn, *constants), saving=needs_gradient)
            run = operator.bound(plan, constants, needs_gradient)
            if autocast is not None:
                run = functools.partial(twin.run_autocast, run, autocast, variant == "fused")
            y = run(*tensors, *drawn)
        situation.decided, situation.run, situation.constants = True, run, constants
        if situation.holds(tensors):  # not, where a parameter stands for two
            self._put_first(situation)
        return y

    def _put_first(self, situation: Situation) -> None:
        others = [other for other in self.situations if other is not situation]
        self.situations = [situation, *others[: _KEPT_SITUATIONS - 1]]


class Situation:
    """What a decision depends on beside the module, as it was: tensors but for their values, gradients, autocast and TF32. And,
    once there is one, the decision: run(*tensors, *drawn) gives y; None: eager does."""

    def __init__(self, tensors: tuple[Tensor, ...]):
        # PyTorch's own comparison of classes, shapes, strides, dtypes, devices and requires_grad: a sixth of the time of one here.
        guards = TensorGuards(*tensors, dynamic_dims_sizes=None, dynamic_dims_strides=None)
        self.alike, self.modes, self.others = guards.check, _modes(tensors[0]), _others(tensors)
        self.decided, self.run, self.constants = False, None, ()

    def holds(self, tensors: tuple[Tensor, ...]) -> bool:
        """Is all as it was, on which the decision depends? That for eager depends on no `_others`."""
        if not self.alike(*tensors) or self.modes != _modes(tensors[0]):
            return False
        return (self.run is None and self.decided) or self.others == _others(tensors)


def _modes(x: Tensor) -> tuple:
    """What of a situation those guards don't look at."""
    autocast = _autocast_dtype(x) if torch._C._is_any_autocast_enabled() else None
    return torch.is_grad_enabled(), autocast


def _others(tensors: tuple[Tensor, ...]) -> tuple:
    """And what only our operators' plans depend on."""
    alignment = functools.reduce(or_, map(Tensor.data_ptr, tensors)) % 16  # 0: of all
    return precision(tensors[0]), alignment and [t.data_ptr() % 16 for t in tensors]
