"""`fused(Model)`: a class whose modules are fused from the start, and can be asked for one of their variants.

    ModelNew = fused(Model)
    ModelNew = fused(Model, schedules={"fused": composed})

A `variant` is "auto", or one of `variants()`: "eager"; "epilogue", the schedule `load`; and by its name each schedule that is the model's
own. What can't run raises RuntimeError with the reason.
"""

from __future__ import annotations

import copy
import types
from collections.abc import Mapping
from typing import NamedTuple

from torch import nn

from . import compiled
from .fuse import Fused, signed, structure_of

_NAMES = {"load": "epilogue"}  # of variants, where schedules have others


class Plan(NamedTuple):
    """What runs for an input: the variant's name, and the reason."""

    variant: str
    reason: str

    def __str__(self):
        return f"{self.variant}: {self.reason}"


class Variants(Fused):
    """What the classes that `fused` makes share."""

    __slots__ = ()
    variant = "auto"
    _schedules: Mapping[str, object] = {}
    _schedule_of: Mapping[str, str] = {}

    @classmethod
    def variants(cls) -> tuple[str, ...]:
        """The ladder of variants."""
        return "eager", *reversed(cls._schedule_of)

    @classmethod
    def reference(cls) -> type[nn.Module]:
        return cls._unfused

    @classmethod
    def from_eager(cls, model: nn.Module) -> nn.Module:
        """`model` fused: the same parameters and submodules (shared, not copied), mode and constants.

        Raises TypeError if `model` is not of this class's reference, or has a forward of its own, which would be dropped.
        """
        reference = cls.reference()
        if not isinstance(model, reference):
            raise TypeError(f"expected a {reference.__name__}, got a {type(model).__name__}")
        if type(model).forward not in (reference.forward, cls.forward) or "forward" in vars(model):
            raise TypeError(
                f"expected {reference.__name__}'s forward, got a {type(model).__name__} with its own"
            )
        if "parametrizations" in model._modules:
            raise TypeError("expected plain parameters, got parametrized ones: parametrize what it becomes")
        fused = cls.__new__(cls)
        vars(fused).update({k: copy.copy(v) if isinstance(v, dict) else v for k, v in vars(model).items()})
        return fused

    def __new__(cls, *arguments, **keywords):
        fused = super().__new__(cls)
        object.__setattr__(fused, "_number", compiled.known(fused, structure_of))
        return fused

    def __reduce_ex__(self, protocol):
        return super(Fused, self).__reduce_ex__(protocol)

    def plan(self, *inputs, **keywords) -> Plan:
        """The variant that forward runs, and why. Raises ValueError if `self.variant` is no variant's name, RuntimeError if it can't run."""
        if self.variant not in ("auto", *self.variants()):
            known = ", ".join(self.variants())
            raise ValueError(f"expected variant to be 'auto' or one of {known}, got {self.variant!r}")
        if self.variant == "eager":
            return Plan("eager", "asked for")
        plans = super().plan(*inputs, **keywords)
        eager = next((each for each in plans if each.runs == "eager"), None)
        if (
            eager is not None
            and self.variant != "auto"
            and not eager.reason.startswith("the input does not fit")
        ):
            raise RuntimeError(f"variant {self.variant!r} can't run: {eager.reason}")
        if self.variant != "auto":
            return Plan(self.variant, "asked for")
        found = eager or plans[0]
        return Plan(_NAMES.get(found.runs, found.runs), found.reason)

    def forward(self, *inputs, **keywords):
        if self.variant != "auto":
            if self.plan(*inputs, **keywords).variant == "eager":
                return super(Fused, self).forward(*inputs, **keywords)
        return super().forward(*inputs, **keywords)


def fused(Model: type[nn.Module], *, schedules: Mapping[str, object] | None = None) -> type[nn.Module]:
    """The class of fused `Model`s: a subclass with the same constructor, named <Model>New. schedules: by the variant's name, the most fused
    first, such as serve this model alone (engine/operator.py, SCHEDULES, says what a schedule is)."""
    own = dict(schedules or {})
    body = {
        "__module__": Model.__module__,
        "__doc__": Model.__doc__,
        "_unfused": Model,
        "__slots__": ("_kept", "_exact_order", "_number", "_edits"),
        "forward": signed(Variants.forward, Model.forward),
        "_schedules": own,
        "_schedule_of": {**{name: name for name in own}, "epilogue": "load"},
    }
    return types.new_class(f"{Model.__name__}New", (Variants, Model), {}, lambda names: names.update(body))
