"""`fuse(model)`: the same model, in which each convolution with what surrounds it runs as one operator.

    fast = fuse(model)          # an instance of type(model), with the same Parameters, buffers, submodules and mode
    y = fast(x)                 # right, or eager
    print(fast.plan(x))         # a line a segment: what runs, or why eager does

The model's forward is captured (capture.py) at the first call of a kind: dimensions, device, dtype. The captured code runs with the live
model: parameters are read at each call, and what lies between segments is the user's own modules. All that the capture hangs on is compared
at each call (guards.py), and so is all that a segment's decision depends on (support.Situation). Numbers that only kernels read are given
to them anew.
"""

from __future__ import annotations

import contextlib
import copy
import copyreg
import inspect
import json as jsons
import threading
import types
import weakref
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad

import inline_loader
from inline_kernels.loader.operators import is_watched

from . import compiled, support
from .examples import described, examples
from .guards import plain_class
from .part import Options, options_of
from .structure import Structure

_KEPT_STRUCTURES = 8  # of one module, the last met
_capturing = threading.RLock()
_classes: weakref.WeakValueDictionary[type, type] = weakref.WeakValueDictionary()


# ---------------------------------------------------------------------------------------------------------- what a user calls


def fuse(
    model: nn.Module,
    *,
    example_inputs: Sequence | None = None,
    exact_order: bool = False,
    tune: bool = False,
) -> nn.Module:
    """A module that computes what `model` does, convolutions with their tails by fused kernels: an instance of type(model) with the same
    Parameters, buffers and submodules (shared, not copied). `model` stays as it is.

    example_inputs: what forward will be given; the kernels for it are built now. exact_order: no rewriting that adds in another order
    than eager. tune: the first call of a kind times what can run, eager among it, and the fastest is kept, in the loader's folder; which that
    is, and so the last digits of results, may differ from machine to machine. The result has `plan(*inputs)` and `source(*inputs, segment=0)`.

    Raises TypeError for what is no eager module: one that torch.compile or torch.jit made; and for one of torch.nn's lazy ones, unless it is a part.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"expected a torch.nn.Module, got a {type(model).__name__}")
    if isinstance(model, torch.jit.ScriptModule) or type(model).__module__.startswith("torch._dynamo"):
        raise TypeError(
            f"expected an eager module, got a {type(model).__name__}: fuse the module that it was made of"
        )
    if getattr(model, "cls_to_become", None) is not None:
        raise TypeError(
            f"expected a module with parameters, got a {type(model).__name__}, which gets them in its first call"
        )
    fused = sharing(model, _new(plain_class(type(model)), Options(bool(exact_order), bool(tune))))
    if example_inputs is not None:
        given = tuple(example_inputs) if isinstance(example_inputs, (tuple, list)) else (example_inputs,)
        structure_of(fused, given, {}).build(fused, given, {}, (False, True))
    return fused


class SegmentPlan(NamedTuple):
    """What runs for a segment, named by its convolution, or the norm that it begins with: "direct" (one kernel, the convolution inside), "sinks"
    (the convolution inside kernels that reduce), "again" (as these two, and v formed again in backward), "stored" (a convolution of our own, then kernels), "load" (the library's convolution, then
    kernels), "fused" (kernels that were written for the formula), or "eager"; and why, or how."""

    segment: str
    runs: str
    reason: str

    def __str__(self) -> str:
        return ": ".join(filter(None, self))


class Plans(tuple):
    """A SegmentPlan for each segment, in the order in which they run, or one for the model; printed, a line each."""

    def __str__(self) -> str:
        return "\n".join(map(str, self))


class Fused:
    """What fused modules' classes share; the user's class comes after it."""

    __slots__ = ()

    def plan(self, *inputs, json: bool = False, **keywords) -> Plans | str:
        """What forward(*inputs, **keywords) runs, a line a segment. json: the same as JSON, a list of objects. Nothing is computed."""
        structure = structure_of(self, inputs, keywords)
        if reason := _eager_reason(self, structure, inputs, keywords):
            found = [SegmentPlan("", "eager", reason)]
        else:
            decisions = structure.decisions(self, inputs, keywords)
            if structure.stale.is_so:  # which they found out
                return self.plan(*inputs, json=json, **keywords)
            found = [SegmentPlan(*each[:3]) for each in decisions]
            found += [SegmentPlan(name, "eager", reason) for name, reason in structure.remarks.items()]
        return jsons.dumps([each._asdict() for each in found]) if json else Plans(found)

    def source(self, *inputs, segment: int = 0, **keywords) -> str:
        """The text of a segment's kernels for those inputs. Raises RuntimeError where it is eager's, IndexError where there is none."""
        structure = structure_of(self, inputs, keywords)
        if reason := _eager_reason(self, structure, inputs, keywords):
            raise RuntimeError(f"eager runs: {reason}")
        return structure.source(self, inputs, keywords, segment)

    def edit(self, *inputs_and_text, segment: int = 0, **keywords) -> None:
        """Binds an edited text to a segment: edit(*inputs, text), text being `source(*inputs, segment=segment)` with another formula, or
        None for the model's own. It runs for all inputs for which that source is the same; for others forward raises RuntimeError. Its
        gradient is derived from its lines, or else backward raises RuntimeError with those that can't be followed (followed.py). Copies
        and pickles of the model are without it.

        Raises BuildError where the text doesn't compile, ValueError where its launcher `forward` isn't the source's, RuntimeError and
        IndexError as `source` does.
        """
        *inputs, text = inputs_and_text
        before = dict(getattr(self, "_edits", {}))
        self._renew({})
        try:
            structure = structure_of(self, inputs, keywords)
            if reason := _eager_reason(self, structure, inputs, keywords):
                raise RuntimeError(f"eager runs: {reason}")
            name, edit = structure.edit(self, inputs, keywords, segment, text)
            if edit is not None:
                inline_loader.load(**edit[1])
            before = {key: each for key, each in before.items() if key != name}
            before |= {name: edit[0]} if edit is not None else {}
        finally:
            self._renew(before)

    def _renew(self, edits: dict) -> None:
        """With these edits; nothing that was kept, or traced, is used again."""
        object.__setattr__(self, "_edits", edits)
        object.__setattr__(self, "_kept", ())
        object.__setattr__(self, "_number", compiled.known(self, structure_of))

    def forward(self, *inputs, **keywords):
        watched = is_watched()
        if watched and torch.compiler.is_compiling():
            run = compiled.function_for(self, inputs, keywords)
            return self._eager(*inputs, **keywords) if run is None else run(self, *inputs)
        if watched and torch.jit.is_tracing():  # sizes are tensors there
            return self._eager(*inputs, **keywords)
        structure = structure_of(self, inputs, keywords)
        given = inputs  # structure.given(inputs, keywords), which are mostly all
        if structure.run is None or keywords or len(inputs) != len(structure.arguments):
            given = structure.run and structure.given(inputs, keywords)
        if given is None or (support.may_be_foreign() and support.foreign()):
            return self._eager(*inputs, **keywords)
        if watched or forward_ad._current_level >= 0:
            return structure.watched(self, *given)
        if not structure.built:
            leaves = [*(each for each in given if isinstance(each, Tensor)), *self.parameters()]
            saving = torch.is_grad_enabled() and any([t.requires_grad for t in leaves])
            structure.build(self, inputs, keywords, (saving,))
        return structure.run(self, *given)

    def _eager(self, *inputs, **keywords):
        return super().forward(*inputs, **keywords)

    def __prepare_scriptable__(self) -> nn.Module:
        """The user's module with the same parameters, in this one's place for torch.jit.script, which puts it there in what holds this one, too."""
        return sharing(self, self._unfused.__new__(self._unfused))

    def __getstate__(self):
        """As of the user's class: what is kept is made anew."""
        following = type(self).__mro__[type(self).__mro__.index(Fused) + 1 :]
        if any("__getstate__" in vars(cls) for cls in following if cls is not object):
            return super().__getstate__()
        return vars(self).copy()

    def __reduce_ex__(self, protocol):
        base, options = plain_class(type(self)), options_of(self)
        made, arguments, *rest = super().__reduce_ex__(protocol)
        if type(self) is not _class_of(base):  # somebody's subclass of it
            return made, arguments, *rest
        if made is copyreg.__newobj__:  # the class is found again by its base
            return _new, (base, options, *arguments[1:]), *rest
        return _fused_again, (made, arguments, options), *rest


# ------------------------------------------------------------------------------------------------------------------- classes


def _class_of(base: type) -> type:
    """The class of fused modules of the class `base`: one, as long as any of them lives."""
    with _capturing:
        found = _classes.get(base)
        if found is None:
            body = {
                "_unfused": base,
                "__slots__": ("_kept", "_options", "_number", "_edits"),
                "__module__": base.__module__,
                "__doc__": base.__doc__,
            }
            body["forward"] = signed(Fused.forward, base.forward)
            made = types.new_class(
                f"Fused{base.__name__}", (Fused, base), {}, lambda names: names.update(body)
            )
            found = _classes[base] = made
    return found


def sharing(model: nn.Module, made: nn.Module) -> nn.Module:
    """`made`, with the same Parameters, buffers, submodules and whatever else `model` has, in tables of its own."""
    vars(made).update({k: copy.copy(v) if isinstance(v, dict) else v for k, v in vars(model).items()})
    return made


def signed(function: types.FunctionType, like: Callable) -> types.FunctionType:
    """A copy of `function` with the signature and the docstring of `like`, which it wraps: torch.fx looks for arguments there."""
    made = types.FunctionType(function.__code__, function.__globals__, "forward", None, function.__closure__)
    made.__doc__, made.__wrapped__ = like.__doc__, like
    with contextlib.suppress(ValueError, TypeError):
        made.__signature__ = inspect.signature(like)
    return made


def _new(base: type, options: Options, *arguments) -> nn.Module:
    cls = _class_of(base)
    fused = cls.__new__(cls, *arguments)
    object.__setattr__(fused, "_options", options)
    object.__setattr__(fused, "_number", compiled.known(fused, structure_of))
    return fused


def _fused_again(make: Callable, arguments: tuple, options: Options) -> nn.Module:
    return fuse(make(*arguments), **options._asdict())


# ---------------------------------------------------------------------------------------------------------------- structures


def structure_of(fused: nn.Module, inputs: tuple, keywords: dict) -> Structure:
    """The capture that serves such inputs, as the model is now; captured where there is none."""
    x = inputs[0] if inputs and isinstance(inputs[0], Tensor) else _first_tensor(inputs, keywords)
    given = type(x) if len(inputs) == 1 and not keywords else described(inputs, keywords)
    kind = None if x is None else (x.dim(), x.device, x.dtype, x.is_cuda and not x.is_contiguous(), given)
    kept = getattr(fused, "_kept", ())
    for structure in kept:
        if structure.kind == kind and structure.holds(fused):
            break
    else:
        return _captured(fused, kind, x, inputs, keywords)
    if structure is not kept[0]:
        _put_first(fused, structure)
    return structure


def _first_tensor(inputs: tuple, keywords: dict) -> Tensor | None:
    return next((each for each in (*inputs, *keywords.values()) if isinstance(each, Tensor)), None)


def _captured(
    fused: nn.Module, kind: tuple | None, x: Tensor | None, inputs: tuple, keywords: dict
) -> Structure:
    with _capturing:
        for structure in getattr(fused, "_kept", ()):  # another thread's, meanwhile
            if structure.kind == kind and structure.holds(fused):
                return structure
        given = examples(x, inputs, keywords) if kind and any(x.shape) else None  # compiled.py has no sizes
        structure = Structure(fused, plain_class(type(fused)), kind, given)
        _put_first(fused, structure)
    return structure


def _put_first(fused: nn.Module, structure: Structure) -> None:
    """Of those that may serve again: with other modules than now, none will."""
    kept = [each for each in getattr(fused, "_kept", ()) if each is not structure and each.is_of(structure)]
    object.__setattr__(fused, "_kept", (structure, *kept[: _KEPT_STRUCTURES - 1]))


def _eager_reason(fused: nn.Module, structure: Structure, inputs: tuple, keywords: dict) -> str | None:
    """Why the whole model runs eager, or None."""
    if "forward" in vars(fused):
        return "the model has a forward of its own"
    if structure.reason or (reason := support.foreign()):
        return structure.reason or reason
    if structure.given(inputs, keywords) is None:
        return f"forward was captured with the arguments {', '.join(structure.arguments)} alone"
    return None
