"""`fused(Model)`: a class whose modules are fused from the start, and can be asked for one of their variants.

    ModelNew = fused(Model)

A `variant` is "auto", or one of `variants()`: "eager"; "epilogue", the library's convolution (on a CPU our own, where it is faster), then our
kernels; "fused", on a GPU kernels with the convolution inside, where there are some for the model's formula. What can't run raises RuntimeError
with the reason.
"""

from __future__ import annotations

import types
from typing import NamedTuple

from torch import nn

from . import compiled
from .fuse import Fused, sharing, signed, structure_of
from .part import SCHEDULES_OF
from .support import NOT_THE_MODEL

_VARIANT_OF = {schedule: variant for variant, schedules in SCHEDULES_OF.items() for schedule in schedules}
_RUN = frozenset(("auto", *SCHEDULES_OF))


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

    @classmethod
    def variants(cls) -> tuple[str, ...]:
        """The ladder of variants."""
        return "eager", *reversed(SCHEDULES_OF)

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
        return sharing(model, cls.__new__(cls))

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
        if eager is not None and eager.reason == NOT_THE_MODEL:
            return Plan("eager", NOT_THE_MODEL)
        if self.variant == "auto":
            found = eager or plans[0]
            return Plan(_VARIANT_OF.get(found.runs, found.runs), found.reason)
        if eager is not None:
            raise RuntimeError(f"variant {self.variant!r} can't run: {eager.reason}")
        return Plan(self.variant, "asked for")

    def forward(self, *inputs, **keywords):
        if self.variant in _RUN:
            return Fused.forward(self, *inputs, **keywords)
        return self._eager(*inputs, **keywords)

    def _eager(self, *inputs, **keywords):
        if self.variant not in ("auto", "eager"):
            try:
                self.plan(*inputs, **keywords)
            except RuntimeError:
                super()._eager(*inputs, **keywords)  # whose own error, where it has one, says more
                raise
        return super()._eager(*inputs, **keywords)


def fused(Model: type[nn.Module]) -> type[nn.Module]:
    """The class of fused `Model`s: a subclass with the same constructor, named <Model>New."""
    body = {
        "__module__": Model.__module__,
        "__doc__": Model.__doc__,
        "_unfused": Model,
        "__slots__": ("_kept", "_options", "_number", "_edits"),
        "forward": signed(Variants.forward, Model.forward),
    }
    return types.new_class(f"{Model.__name__}New", (Variants, Model), {}, lambda names: names.update(body))
