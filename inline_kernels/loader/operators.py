"""Declares a PyTorch operator once, from Python functions that launch kernels: autograd and torch.compile follow.

    def forward(x: Tensor, slope: float) -> Tensor: ...            # allocates the result, launches the kernel
    def backward(dy, x, slope, *, needs): ...                       # the gradient of each tensor argument
    leaky_relu = declare("leaky_relu", forward, shapes=lambda x, slope: torch.empty_like(x), backward=backward)
    y = leaky_relu(x, 0.1)

A call that nothing watches goes straight to `forward`: through an autograd.Function where a gradient may follow, else without
any detour. Where something does watch (torch.compile, torch.export, a dispatch mode, fake tensors) it is a registered
operator, `torch.ops.inline_kernels.<name>`, with its shape function and its gradient. This module knows no model.
"""

from __future__ import annotations

import functools
import inspect
import itertools
from collections.abc import Callable, Iterable, Sequence
from sys import getrefcount
from typing import NewType, get_type_hints

import torch
from torch import Tensor, is_grad_enabled
from torch._C import _are_functorch_transforms_active, _get_tracing_state, _len_torch_dispatch_stack
from torch._C._functorch import is_legacy_batchedtensor
from torch.autograd import forward_ad
from torch.compiler import is_compiling

import inline_loader

NAMESPACE = "inline_kernels"
Drawn = NewType("Drawn", int)  # a random number, another one at each call: no plan may look at it
_SCHEMA_TYPES = {Tensor: "Tensor", float: "float", int: "SymInt", bool: "bool", list[int]: "SymInt[]"}
_SCHEMA_TYPES |= {Drawn: "SymInt"}
PLAIN = (Tensor, torch.nn.Parameter)
LOW = 2**32  # a tensor whose storage was freed lies lower, at 0, as a view of it at its offset
# Behind torch.backends.cudnn.conv.fp32_precision, where there is one: a property in Python, which takes a microsecond.
_precision = getattr(torch._C, "_get_fp32_precision_getter", None)
_LIBRARYS = (
    torch._C._get_cudnn_enabled, torch._C._get_cudnn_benchmark, torch._C._get_cudnn_deterministic, torch._C._get_deterministic_algorithms
)  # fmt: skip
_KEPT_PLANS = 256  # of an operator; past them it starts anew
# By operator, for all copies of this module in a process: an exported cell that is edited and run again makes another.
_libraries: dict[str, torch.library.Library] = vars(torch.library).setdefault("_inline_kernels", {})


def declare(
    name: str,
    forward: Callable,
    *,
    shapes: Callable,
    backward: Callable | None = None,
    gradients: Callable | None = None,
    plan: Callable | None = None,
    keeps_result: Callable | None = None,
) -> Operator:
    """The operator `inline_kernels::<name>`. Declared again (an edited cell), it is the new one.

    forward(*arguments) -> Tensor: its parameters are annotated with Tensor, Drawn, float, int, bool or list[int], which makes the
        operator's schema, tensors first, then numbers drawn; what has a default may be left out. Where they are many: forward(a), annotated with a NamedTuple of such fields; all functions here then
        take that. What it returns shares no memory with what it is given. If it takes a keyword `saving`, it returns
        (result, *saved), tensors for backward, where that is True, and (result,) where it is False.
    shapes(*arguments): what forward returns, with the same shapes, dtypes and strides, but any values; `saving` likewise.
    backward(dy, *arguments, *saved, needs) -> the gradient of each tensor argument, in order, or None. needs: a list of bools,
        is that gradient asked for? None is no gradient; torch.compile then sees zeros. Without it the operator has no gradient. It can't be differentiated twice.
    gradients(*arguments): tensors with the shapes, dtypes and strides of the gradients; by default those of the arguments.

    plan(*arguments, saving): what need not be decided anew for arguments with the same shapes, strides, dtypes, devices, alignment and
        numbers: sizes, a tiling, which build of the kernels. It looks at no tensor's values, and at nothing Drawn. forward and backward are given what
        it returns as the keyword `plan`. It is remembered until kernels are reloaded, as after an edit.
    keeps_result(*arguments) -> bool: does backward take the result, too, as the last of what is saved? A plan says the same by its attribute of that name.

    Raises TypeError if a parameter of forward is annotated otherwise, or a tensor or what is Drawn comes after a number.
    """
    return Operator(name, forward, shapes, backward, gradients, plan, keeps_result)


def constant_to_tracers(function: Callable) -> Callable:
    """As torch.compiler.assume_constant_result: tracers call the function, and take what it returns for a constant. That function imports
    torch._dynamo, which takes as long as all of torch; the mark that it sets is all that the tracer looks for."""
    function._dynamo_marked_constant = True
    return function


def check_memory(*tensors: Tensor) -> None:
    """Raises RuntimeError where the storage of a plain tensor was freed, by resize_(0): not all of PyTorch's functions look before
    they read."""
    for t in tensors:
        if t.data_ptr() < LOW and t.numel() and not t.untyped_storage().nbytes():
            raise RuntimeError(
                f"expected a tensor with memory, got one of shape {list(t.shape)} whose storage was freed"
            )


def described(*tensors: Tensor) -> tuple:
    """All of plain tensors that a plan may depend on: shapes, strides, dtypes, devices and alignment; and whether TF32 is allowed."""
    seen = [(t.shape, t.stride(), t.dtype, t.device, t.data_ptr() % 16) for t in tensors]
    return *seen, precision(tensors[0])


def precision(x: Tensor) -> object:
    """PyTorch's settings by which a GPU's library chooses what convolves. Of TF32 the newer one where there is one, for reading the older may then
    raise."""
    if not x.is_cuda:
        return None
    setting = _precision("cuda", "conv") if _precision else torch.backends.cudnn.allow_tf32
    return setting, *[read() for read in _LIBRARYS]


def is_watched(*tensors: Tensor) -> bool:
    """Does anything see operators by themselves, and not the work that they do? A compiler, a tracer, a dispatch mode, torch.func; one of
    the tensors, which is no plain one."""
    return bool(
        is_compiling()
        or _get_tracing_state()
        or _len_torch_dispatch_stack()
        or _are_functorch_transforms_active()
        or (tensors and any([type(t) not in PLAIN for t in tensors]))
    )


class Operator:
    """What `declare` returns, to be called like `forward`.

    For who knows already that nothing watches there are its two ways: `run`, without a gradient, and `differentiable`.
    `registered` is the operator that PyTorch knows. `saves`: does forward save something for backward?
    """

    def __init__(self, name: str, forward, shapes, backward, gradients, plan, keeps_result=None):
        parameters = inspect.signature(forward, eval_str=True).parameters
        types = {p.name: p.annotation for p in parameters.values() if p.kind is not p.KEYWORD_ONLY}
        together = next(iter(types.values()), None)
        together = together if isinstance(together, type) and hasattr(together, "_fields") else None
        types = get_type_hints(together) if together else types
        defaults = [p.default for p in parameters.values() if p.name in types and p.default is not p.empty]
        self._defaults = tuple(together._field_defaults.values() if together else defaults)  # of the last
        kinds = list(types.values())
        for parameter, kind in types.items():
            if kind not in _SCHEMA_TYPES:
                known = ", ".join(getattr(each, "__name__", str(each)) for each in _SCHEMA_TYPES)
                raise TypeError(f"{name}: expected {parameter} annotated with one of {known}, got {kind!r}")
        self.name, self.forward = name, forward
        self.parameters = ", ".join(f"{_SCHEMA_TYPES[kind]} {parameter}" for parameter, kind in types.items())
        self.count, self.tensors = len(kinds), kinds.count(Tensor)  # of arguments; tensors are the first
        self.varying = self.tensors + kinds.count(Drawn)  # from call to call
        if Tensor in kinds[self.tensors :] or Drawn in kinds[self.varying :]:
            raise TypeError(
                f"{name}: expected its tensors before all other parameters, then what is drawn, got ({self.parameters})"
            )
        # What every function here takes. _make would count the arguments, as `__call__` and the schema do.
        self._arguments = functools.partial(tuple.__new__, together or tuple)
        if not together:
            own = forward, shapes, gradients, plan, keeps_result
            forward, shapes, gradients, plan, keeps_result = map(_taking_one, own)
        self.saves, self._make_plan, self._plans = "saving" in parameters, plan, {}
        call = _forward_of(forward, bool(plan), self.saves)
        # Launchers refuse what would lose its gradient.
        self._call = call if backward else torch.no_grad()(call)
        self._backward = backward and _backward_of(backward, bool(plan), bool(together))
        self._shapes, self._gradients, self._keeps_result = shapes, gradients, keeps_result
        function = _differentiable(self) if backward else None
        self._differentiable = function and function.apply
        # The same without its look for torch.func, 4 µs of a call: for who knows that nothing watches.
        self._apply = function and super(torch.autograd.Function, function).apply
        self.registered = self._register()

    def __call__(self, *arguments) -> Tensor:
        if missing := self.count - len(arguments):
            if not 0 < missing <= len(self._defaults):
                raise TypeError(f"{self.name}: expected ({self.parameters}), got {len(arguments)} arguments")
            arguments += self._defaults[-missing:]
        tensors = arguments[: self.tensors]
        if forward_ad._current_level >= 0 and any(
            [forward_ad.unpack_dual(t).tangent is not None for t in tensors]
        ):
            raise RuntimeError(f"{self.name} has no derivative in forward mode")
        if is_watched(*tensors):
            return self.registered(*arguments)
        if torch.is_grad_enabled() and any([t.requires_grad for t in tensors]):
            return self.differentiable(*arguments)
        return self.run(*arguments)

    def __repr__(self) -> str:
        return f"<operator {NAMESPACE}::{self.name}({self.parameters}) -> Tensor>"

    def plan(self, arguments: Sequence, saving: bool) -> object:
        """What need not be decided anew for such arguments; None for an operator without plans. Raises RuntimeError where the memory of one
        was freed."""
        if self._make_plan is None:
            return None
        check_memory(*arguments[: self.tensors])
        constants = [tuple(a) if isinstance(a, list) else a for a in arguments[self.varying :]]
        key = inline_loader.generation, saving, *described(*arguments[: self.tensors]), *constants
        if (plan := self._plans.get(key)) is None:
            if len(self._plans) >= _KEPT_PLANS:
                self._plans.clear()
            with torch.inference_mode(False):  # else nothing outside of it could write to tensors of the plan
                plan = self._plans[key] = self._make_plan(self._arguments(arguments), saving=saving)
        return plan

    def run(self, *arguments) -> Tensor:
        """The result, without a gradient, of plain tensors that nothing watches."""
        return self._run(arguments, None, saving=False)[0]

    def differentiable(self, *arguments) -> Tensor:
        """The result, through which gradients flow, of plain tensors that nothing watches."""
        if not self._differentiable:
            return self.run(*arguments)
        return self._differentiable((None, arguments[self.varying :]), *arguments[: self.varying])

    def bound(self, plan: object, constants: tuple, needs_gradient: bool) -> Callable:
        """`differentiable` or `run` as a function of what varies from call to call, as short as can be. plan: of such arguments, or
        None, if each call is to find its own."""
        if needs_gradient and self._apply:
            return functools.partial(self._apply, (plan, constants))
        if plan is None:
            return lambda *varying: self.run(*varying, *constants)
        call, arguments = self._call, self._arguments
        return lambda *varying: call(arguments(varying + constants), plan=plan, saving=False)[0]

    def keeps_result(self, arguments: Sequence, plan: object) -> bool:
        """plan: None, if it isn't known."""
        if plan is not None:
            return getattr(plan, "keeps_result", False)
        return bool(self._keeps_result and self._keeps_result(self._arguments(arguments)))

    def save(self, *arguments, plan: object = None) -> list[Tensor]:
        """The result, and what backward needs beside the arguments."""
        return list(self._run(arguments, plan, saving=True))

    def _run(self, arguments: Sequence, plan: object, saving: bool) -> Sequence[Tensor]:
        if plan is None and self._make_plan:
            plan = self.plan(arguments, saving)
        return self._call(self._arguments(arguments), plan=plan, saving=saving)

    def _refuse(self, found: Sequence) -> None:
        expected = f"expected backward to give {self.tensors} gradients"
        raise RuntimeError(f"{self.name}: {expected}, got {len(found)}")

    def backward(
        self,
        dy: Tensor,
        arguments: Sequence,
        saved: Sequence[Tensor],
        needs: Sequence[bool],
        plan: object = None,
    ) -> list[Tensor | None]:
        """The gradient of each tensor argument that needs one, else None. plan: of `save`, for the same arguments."""
        plan = self.plan(arguments, True) if plan is None else plan
        found = self._backward(dy, self._arguments(arguments), *saved, plan=plan, needs=needs)
        if len(found) != self.tensors:
            self._refuse(found)
        return [gradient if need else None for gradient, need in zip(found, needs)]

    def shapes(self, *arguments, saving: bool) -> list[Tensor]:
        """What `save` returns, or the result alone, with any values."""
        if self.saves:
            return list(self._shapes(self._arguments(arguments), saving=saving))
        return [self._shapes(self._arguments(arguments))]

    def gradients(self, *arguments) -> list[Tensor]:
        """What `backward` returns, with any values."""
        if self._gradients:
            return list(self._gradients(self._arguments(arguments)))
        return [torch.empty_like(t) for t in arguments[: self.tensors]]

    def _register(self) -> Callable:
        """Registers <name>, and with a gradient <name>_saving and <name>_backward, with their shapes."""
        if self.name in _libraries:
            _libraries.pop(self.name)._destroy()
        library = _libraries[self.name] = torch.library.Library(NAMESPACE, "FRAGMENT")

        def define(name: str, schema: str, function: Callable, fake: Callable) -> Callable:
            library.define(f"{name}{schema}", tags=(torch.Tag.pt2_compliant_tag,))
            library.impl(name, function, "CompositeExplicitAutograd")
            torch.library.register_fake(f"{NAMESPACE}::{name}", fake, lib=library)
            return getattr(getattr(torch.ops, NAMESPACE), name).default

        def shape(*arguments):
            return self.shapes(*arguments, saving=False)[0]

        operator = define(self.name, f"({self.parameters}) -> Tensor", self.run, shape)
        if self._backward is None:
            return operator

        def shapes_saved(*arguments):
            return self.shapes(*arguments, saving=True)

        # An operator returns tensors and nothing else: what is not needed is one without elements, and a needed None, of which its
        # shapes know nothing, is zeros.
        def gradients(dy, *rest):
            *arguments, saved, needs = rest
            found = self.backward(dy, arguments, saved, needs)
            if any([need and gradient is None for need, gradient in zip(needs, found)]):
                like = self.gradients(*arguments)
                found = [torch.zeros_like(t) if g is None else g for t, g in zip(like, found)]
            return [g if need else dy.new_empty(0) for g, need in zip(found, needs)]

        def gradient_shapes(dy, *rest):
            *arguments, _, needs = rest
            return [t if need else dy.new_empty(0) for t, need in zip(self.gradients(*arguments), needs)]

        saving = define(f"{self.name}_saving", f"({self.parameters}) -> Tensor[]", self.save, shapes_saved)
        schema = f"(Tensor dy, {self.parameters}, Tensor[] saved, bool[] needs) -> Tensor[]"
        backward = define(f"{self.name}_backward", schema, gradients, gradient_shapes)

        def save_registered(*arguments):
            with torch._C._AutoDispatchBelowAutograd():
                return saving(*arguments)

        def with_autograd(keyset, *arguments):
            if torch.is_grad_enabled() and any([t.requires_grad for t in arguments[: self.tensors]]):
                return self.differentiable(*arguments)
            with torch._C._AutoDispatchBelowAutograd():
                return operator.redispatch(keyset & torch._C._after_autograd_keyset, *arguments)

        library.impl(self.name, with_autograd, "Autograd", with_keyset=True)
        self.save_registered = save_registered
        self.backward_registered = lambda dy, arguments, *rest: backward(dy, *arguments, *map(list, rest))
        return operator


def _taking_one(function: Callable | None) -> Callable | None:
    """A function of many arguments as one that takes them as one tuple."""
    return function and (lambda a, **keywords: function(*a, **keywords))


def _forward_of(forward: Callable, plans: bool, saves: bool) -> Callable:
    """forward(a, *, plan, saving) -> (result, *saved), whichever of the keywords the given one takes."""
    if plans and saves:
        return forward
    if plans:
        return lambda a, *, plan, saving: (forward(a, plan=plan),)
    if saves:
        return lambda a, *, plan, saving: forward(a, saving=saving)
    return lambda a, *, plan, saving: (forward(a),)


def _backward_of(backward: Callable, plans: bool, together: bool) -> Callable:
    """backward(dy, a, *saved, plan, needs), likewise."""
    if plans and together:
        return backward

    def called(dy, a, *saved, plan, needs):
        planned = {"plan": plan} if plans else {}
        return backward(dy, *((a,) if together else a), *saved, needs=needs, **planned)

    return called


def are_nobody_elses(tensors: list[Tensor], places: Iterable[int]) -> bool:
    """Does nothing but that list hold these of its tensors, or their memory? A graph that is retained holds them, a user who has read them, or
    hooks that kept them."""
    for i in places:
        t = tensors[i]
        if getrefcount(t) != _alone or _holders(t) != _own:
            return False
    return True


def _holders(t: Tensor) -> tuple[int, int, bool]:
    """Of what is behind the Python object, and of its storage; may that be resized?"""
    storage = t.untyped_storage()
    return t._use_count(), _storage_uses(storage._cdata), storage.resizable()


# References to an object in a list that such a loop looks at, and holders of a tensor that nobody else has: versions of Python and PyTorch differ.
_storage_uses = torch._C._storage_Use_Count
_alone = next(getrefcount(each) for each in [object()])
_own = _holders(torch.empty(1))


def backward_seldom(
    backward: Callable, ctx, dys: Sequence[Tensor | None], who: str
) -> tuple[Tensor | None, ...]:
    """backward(ctx, *dys) of an autograd.Function, where somebody asked for the graph of its gradients, or
    torch.autograd.grad(..., is_grads_batched=True) shows a batch of dys as one."""
    if torch.is_grad_enabled():
        return _Once.apply(who, functools.partial(backward, ctx, *dys), *dys, *ctx.saved_tensors)
    level = torch._C._vmapmode_increment_nesting() - 1
    torch._C._vmapmode_decrement_nesting()
    batches = [
        torch._remove_batch_dim(dy, level, 0, 0)
        if dy is not None and is_legacy_batchedtensor(dy)
        else itertools.repeat(dy)
        for dy in dys
    ]
    found = zip(*[backward(ctx, *each) for each in zip(*batches)])
    return tuple([f[0] if f[0] is None else torch._add_batch_dim(torch.stack(f), 0, level) for f in found])


class _Once(torch.autograd.Function):
    """Gradients: whoever goes back through them meets an error on every way."""

    @staticmethod
    def forward(ctx, who: str, gradients: Callable, *given: Tensor | None):
        ctx.who = who
        return gradients()

    @staticmethod
    def backward(ctx, *ddy):
        raise RuntimeError(f"{ctx.who} can't be differentiated twice")


def _differentiable(operator: Operator) -> type[torch.autograd.Function]:
    """The autograd.Function around `operator`: its registered halves where something watches, else its own functions."""
    count, others = operator.tensors, (None,) * (operator.varying - operator.tensors)
    call, back, arguments_of = operator._call, operator._backward, operator._arguments

    def forward(ctx, bound, *varying):
        plan, constants = bound
        arguments = varying + constants
        if plan is not None:
            result, *saved = call(arguments_of(arguments), plan=plan, saving=True)
        elif is_watched():
            result, *saved = operator.save_registered(*arguments)
        else:
            plan = operator.plan(arguments, True)
            result, *saved = call(arguments_of(arguments), plan=plan, saving=True)
        if operator.keeps_result(arguments, plan):
            saved.append(result)
        # What ctx.save_for_backward and ctx.set_materialize_grads do, without two calls.
        ctx.to_save, ctx.materialize_grads = (*varying[:count], *saved), False
        ctx.plan, ctx.numbers = plan, arguments[count:]
        return result

    def backward(ctx, dy):
        if dy is None:  # whoever used the result has no gradient for it
            return None, *(None,) * count, *others
        if is_grad_enabled() or is_legacy_batchedtensor(dy):
            return backward_seldom(gradients, ctx, (dy,), operator.name)
        return gradients(ctx, dy, True)

    def gradients(ctx, dy, spends=False):
        """spends: nobody will ask again, unless the graph is retained."""
        given, needs, plan = [*ctx.saved_tensors], ctx.needs_input_grad[1 : count + 1], ctx.plan
        arguments = (*given[:count], *ctx.numbers)
        if is_watched():
            found = operator.backward_registered(dy, arguments, given[count:], needs)
        elif plan is None:
            found = operator.backward(dy, arguments, given[count:], needs)
        elif spends and getattr(plan, "spends", ()):
            ctx.maybe_clear_saved_tensors()
            spent = are_nobody_elses(given, [count + i for i in plan.spends])
            found = back(dy, arguments_of(arguments), *given[count:], plan=plan, needs=needs, spent=spent)
        else:
            found = back(dy, arguments_of(arguments), *given[count:], plan=plan, needs=needs)
        if len(found) != count:
            operator._refuse(found)
        if False in needs:
            found = [gradient if need else None for gradient, need in zip(found, needs)]
        return None, *found, *others

    methods = {"forward": staticmethod(forward), "backward": staticmethod(backward)}
    return type(operator.name, (torch.autograd.Function,), methods)  # profilers show <name>Backward
