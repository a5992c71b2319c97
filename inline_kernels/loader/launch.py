"""The launchers of a loaded library as Python functions: PyTorch's operators, which check what they are given, and what launches again.

    kernels.forward(y, x, 0.5, 1024)            # checks, launches
    launch = kernels.forward.bound(0.5, 1024)   # the last arguments are known
    launch(y, x)                                # checks as the operator does, launches
    launch(y, x)                                # launches: its tensors are like those before

An operator with 24 arguments takes 5.8 µs of a CPU, a launch past it half of that (benchmarks/NOTES.md, "The call").
"""

from __future__ import annotations

import contextlib
import functools
import struct
import types
import weakref
from collections.abc import Callable, Iterator, Sequence
from ctypes import create_string_buffer

import torch
from torch import Tensor
from torch._C._autograd import _profiler_enabled
from torch._C._dynamo.guards import TensorGuards

from inline_kernels.loader.source import Launcher


class Operators:
    """The operators of one loaded library, as attributes: `kernels.forward(y, v, ...)`. A single one can be called directly.

    They write to their arguments and return nothing, which is all that torch.compile needs to know of them. They have no
    gradient: an argument that requires one is refused where PyTorch would record it.

    `kernels.forward.bound(*last)` is a function of the arguments before those, which come first tensors, then numbers; the last are
    numbers. It does what `kernels.forward` does, for who calls it again and again: tensors like those of the call before (PyTorch's
    guards compare classes, shapes, strides, dtypes, devices) are not checked another time. A profiler sees the operator all the same.
    """

    def __init__(self, unit, launch: Callable | None = None, addresses: Sequence[int] = ()):
        """unit: as in inline_loader. launch(bound, first): as in kernels/host/bound.h. addresses: of the launchers. Without them, as where
        another copy of the loader has loaded the library, what is bound checks each time."""
        self.__unit = unit  # no launcher has such a name
        operators = getattr(torch.ops, unit.namespace)
        calls = [_call(each, getattr(operators, each.operator).default) for each in unit.launchers]
        for launcher, call, address in zip(unit.launchers, calls, addresses or [None] * len(calls)):
            setattr(self, launcher.name, call)
            if launcher.asked:
                continue
            call.launched = launcher, launch, address
            call.all_bound = weakref.WeakSet()
            call.bound = functools.partial(_bound, call)
            call.who = f"{unit.name}.{launcher.name}"
            _connect(call)
            _calls.add(call)
        self.__single = calls[0] if len(calls) == 1 else None
        self.__given = {launcher.name: call for launcher, call in zip(unit.launchers, calls)}  # to somebody

    def __call__(self, *arguments, **keywords):
        if self.__single is None:
            names = ", ".join(f"{self.__unit.name}.{launcher.name}" for launcher in self.__unit.launchers)
            raise TypeError(f"{self.__unit.name} has several operators, call one of {names}")
        return self.__single(*arguments, **keywords)

    def __repr__(self) -> str:
        calls = ", ".join(launcher.schema for launcher in self.__unit.launchers)
        return f"<{self.__unit.name} for {self.__unit.device}: {calls}>"

    @staticmethod
    def _renew(known: Operators, fresh: Operators) -> None:
        """Makes `known` run what `fresh` does, and so the launchers that somebody took of it, and what was bound of those."""
        given, names = {**fresh.__given, **known.__given}, list(fresh.__given)
        for name, call in given.items():
            new = fresh.__given.get(name) or _gone(f"{fresh.__unit.name} has no launcher {name} any more")
            call.__globals__.update(new.__globals__)  # a function of its own, not of this module
            call.__code__ = new.__code__
            call.launched = getattr(new, "launched", None)
            for bound in call.all_bound:
                bound.renew()
        known.__dict__ = {**vars(fresh), **{name: given[name] for name in names}}
        known.__given, known.__single = given, given[names[0]] if len(names) == 1 else None


_calls = weakref.WeakSet()  # of all launchers that are loaded
_wrap = None  # of `through`


@contextlib.contextmanager
def through(wrap: Callable[[str, Launcher, Callable], Callable]) -> Iterator[None]:
    """In its context all launches, also of what is loaded there, go through wrap(name, launcher, run), which stands for run: both take the
    launcher's arguments. In a context in another it alone counts."""
    global _wrap
    before, _wrap = _wrap, wrap
    try:
        for call in list(_calls):
            _connect(call)
        yield
    finally:
        _wrap = before
        for call in list(_calls):
            _connect(call)


def _connect(call: Callable) -> None:
    """A launcher's call runs its operator, or what `through` puts in the place of that; what is bound checks once more."""
    if call.launched is None:  # it is gone
        return
    run = call.__globals__["_operator"]._op
    call.__globals__["_run"] = _wrap(call.who, call.launched[0], run) if _wrap else run
    for bound in list(call.all_bound):
        bound.renew()


# Written out for its parameters, because it is called often: a loop over them would cost more than all else here.
CALL = """
def {name}({all}, /):
    if _is_compiling():
        return _operator({all})
    try:
        if _is_grad_enabled() and ({requires_grad}):
            raise RuntimeError(_NO_GRADIENT)
        _run({all})
    except Exception:
        _check_tensors({tensors})
        raise
    _increment_version(({written}))
"""


ASKED = """
def {name}({all}{end}):
    try:
        return _run({all})
    except Exception:
        _check_tensors({tensors})
        raise
"""


def _call(launcher: Launcher, operator: Callable) -> Callable:
    """`operator` as autograd has to know it: what it writes to gets a new version, what requires a gradient is refused. What answers from
    sizes alone has nothing of either."""
    tensors = [p.registered for p in launcher.parameters if p.tensor]

    def check_tensors(*arguments) -> None:
        for name, argument in zip(tensors, arguments):
            if not isinstance(argument, Tensor):
                raise TypeError(f"{launcher.name}: {name}: expected a tensor, got {argument!r}") from None

    code = (ASKED if launcher.asked else CALL).format(
        name=launcher.operator,
        all=", ".join(p.registered for p in launcher.parameters),
        end=", /" if launcher.parameters else "",
        tensors=", ".join(tensors),
        requires_grad=" or ".join(f"{name}.requires_grad" for name in tensors),
        written="".join(f"{p.registered}, " for p in launcher.parameters if p.written),
    )
    names = {
        "_is_compiling": torch.compiler.is_compiling,
        "_is_grad_enabled": torch.is_grad_enabled,
        "_operator": operator,
        "_run": operator._op,  # what it calls, without a detour through Python
        "_check_tensors": check_tensors,
        "_increment_version": torch._C._increment_version,
        "_NO_GRADIENT": f"{launcher.name}: an argument requires a gradient, and a launcher has none: give it one with "
        "inline_kernels.declare(..., backward=...), or call it under torch.no_grad()",
    }
    exec(code, names)
    return names[launcher.operator]


def _gone(problem: str) -> Callable:
    """Stands for a launcher that is no more."""
    names = {"_problem": problem}
    exec("def gone(*_, **__):\n    raise AttributeError(_problem)", names)
    return names["gone"]


# An Argument (kernels/host/host.h) as bytes, by its C type; of a tensor it is the address, "Q".
_FORMATS = {"int64_t": "q", "double": "d", "bool": "?7x"}
_MOST_DIMS = 8


def _sizes(tensors: Sequence[Tensor]) -> bytes:
    """Their Sizes (kernels/host/host.h)."""
    padded = [[t.dim(), *t.shape, *[0] * (_MOST_DIMS - t.dim())] for t in tensors]
    return struct.pack(f"={len(padded) * (1 + _MOST_DIMS)}q", *[size for each in padded for size in each])


def _bound(
    call: Callable, *numbers, trusting: bool = False, new: int = 0, last: Sequence[int] = ()
) -> Callable:
    """What `Operators` says of `bound`. Raises TypeError where a tensor comes after a number, or is among the numbers. trusting: the caller knows
    that all calls' tensors are like the first's, that none requires a gradient, and that autograd isn't to be told of what is written. new: the
    first so many tensors were made for this call, and nobody else has them; at least one other follows. last: of the tensors, those (N, C, …) that lie channels last, where the
    launcher has an array (N, …, C)."""
    # Of the launcher as `read` finds it: once, and again after an edited cell.
    launched = launch = again = None
    count, split, formats, sized, untold = 0, 0, [], False, []
    # Of the call before: are tensors, but for the new ones, like its own? does one of those require a gradient? a Bound (kernels/host/bound.h),
    # in which launches write.
    nothing = (lambda *tensors: False), False, b""
    known = [nothing]

    def read() -> None:
        nonlocal launched, launch, again, count, split, formats, sized, untold
        launcher, *_ = call.launched
        kinds = ["Q" if p.tensor else _FORMATS[p.ctype] for p in launcher.parameters]
        tensors, sized = kinds.count("Q"), any(p.sized for p in launcher.parameters)
        if "Q" in kinds[tensors:] or len(kinds) - len(numbers) < tensors:
            raise TypeError(
                f"{launcher.name}: expected its tensors first, and only numbers to bind, got {numbers}"
            )
        launched, launch = call.launched, call.launched[1]
        formats, count, split = kinds, tensors, len(kinds) - len(numbers)
        first = [f"a{i}" for i in range(split)]
        seen = [i for i, p in enumerate(launcher.parameters[:split]) if p.written and i >= new]
        written, untold = ([], seen) if trusting else ([f"{first[i]}, " for i in seen], [])
        text = (TRUSTED if trusting else AGAIN) + LAUNCHED + INCREMENTS * bool(written)
        code = compiled(text.format(
            all=", ".join(first), others=", ".join(first[new:count]), written="".join(written),
            packed=", ".join([f"_data_ptr({a})" for a in first[:count]] + first[count:]),
        ))  # fmt: skip
        names["_launch"], names["_pack"] = launch, struct.Struct("=" + "".join(formats[:split])).pack
        exec(code, names)
        if again is None:
            again = names["again"]
        else:
            again.__code__ = names["again"].__code__

    def check(*first) -> None:
        arrays = [a.movedim(1, -1) if i in last else a for i, a in enumerate(first)]
        for i in untold:  # the operator tells
            arrays[i] = arrays[i].data
        call(*arrays, *numbers)
        if launched is not call.launched:
            read()
        if launch is None or _wrap:
            return
        tensors, others = first[:count], first[new:count]
        alike = None
        if not trusting:
            alike = TensorGuards(*others, dynamic_dims_sizes=None, dynamic_dims_strides=None).check
        empty = sum([t.numel() == 0 for t in tensors])
        head = launched[-1], tensors[0].get_device(), empty, split, 0
        bound = struct.pack("=Qqqqq" + "".join(formats[split:]), *head, *numbers)
        if sized:
            bound += _sizes(arrays[:count])
        known[0] = alike, any([t.requires_grad for t in others]), create_string_buffer(bound, len(bound))

    def report(problem: bytes, *first) -> None:
        if problem:
            raise RuntimeError(problem.decode())
        check(*first)  # a tensor may have lost its memory

    def renew() -> None:
        nonlocal launched
        launched, known[0], again.__code__ = None, nothing, _anew.__code__

    names = {"torch": torch, "_data_ptr": Tensor.data_ptr, "_profiler_enabled": _profiler_enabled}
    names |= {"_known": known, "_check": check, "_report": report}
    read()
    again.renew = renew
    call.all_bound.add(again)
    return again


def _anew(*all):
    """What is bound of a launcher that may have other parameters now."""
    return _check(*all)  # noqa: F821, a global of the function whose code this becomes


# What is bound, written out for its first arguments as CALL is. others: tensors that aren't new. written: of those.
AGAIN = """
def again({all}, /):
    alike, requires_grad, bound = _known[0]
    if not alike({others}):
        return _check({all})
    if (requires_grad and torch.is_grad_enabled()) or _profiler_enabled():
        return _check({all})
"""

TRUSTED = """
def again({all}, /):
    bound = _known[0][2]
    if not bound or _profiler_enabled():
        return _check({all})
"""

LAUNCHED = """
    problem = _launch(bound, _pack({packed}))
    if problem is not None:
        return _report(problem, {all})
"""

INCREMENTS = """
    torch._C._increment_version(({written}))
"""


@functools.lru_cache(1024)
def compiled(text: str) -> types.CodeType:
    """Of a function that is written out for its parameters."""
    return compile(text, "<a bound launcher>", "exec")
