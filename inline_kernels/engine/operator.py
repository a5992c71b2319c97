"""A segment's operator: one for all segments that are the same but for names, declared with all of its faces by loader_operators.

Its arguments are a NamedTuple made from the segment. Tensors come first: inputs, parameters, buffers that are read, running statistics
that are written, a seed; then a drawn number, the model's numbers, and the dtype of y. What forward and backward compute is schedule's.
y's shape, strides and dtype, and eager's errors, are had from the torch operations that the segment stands for, run on tensors without
memory (`Reference`).
"""

from __future__ import annotations

import copy
import functools
import keyword
import re
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import SimpleNamespace
from typing import NamedTuple

import torch
from torch import Tensor, fx, nn
from torch._C import _is_any_autocast_enabled
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.node import map_aggregate
from torch.utils._python_dispatch import _disable_current_modes

import inline_loader
from inline_kernels.engine import library
from inline_kernels.loader import operators as loader_operators
from inline_kernels.loader.operators import LOW, Drawn, check_memory

from . import again, between, composed, direct, schedule, sinks, stored
from .cases import Case
from .support import DTYPES
from .tracing import Named

_known: dict[tuple, SegmentOperator] = {}
_first: dict[tuple, tuple] = {}  # of equal segments, whose names stand in all that is made of them
_lock = threading.Lock()


class Decision(NamedTuple):
    """What a segment does: it `runs` a schedule's name, or "eager"; and how, or why. dtype: of its result; like: its result, without memory.
    requests: what inline_loader has to build. timing: what is to be timed first, where the user wants that (timed.py); able: the schedule runs
    whatever rules say."""

    segment: str
    runs: str
    reason: str
    dtype: torch.dtype | None = None
    like: Tensor | None = None
    requests: Sequence[Mapping] = ()
    timing: object = None
    able: bool = False

    def because(self, reason: str) -> Decision:
        """With that reason first."""
        return self._replace(reason="; ".join(filter(None, [reason, self.reason])))


# By name, the most fused first: what runs a segment. A schedule has requests, describe, plan, forward, backward and saved, as
# schedule.py says, and spends, where backward uses up what was saved, and reads_y, where it reads y, too; requests and plan raise Unsupported with the
# reason where it can't.
# BY_SIZES: it runs where sizes suit it, and is left out where one operator serves all sizes.
SCHEDULES: dict[str, object] = {
    "fused": composed,
    "again": again,
    "direct": direct,
    "sinks": sinks,
    "stored": stored,
    "load": schedule,
}
EDITED = {"again": "load", "stored": "load"}  # by which schedule another one's text runs once it is edited


class First:
    """A schedule that is the first of `schedules` that can."""

    def __init__(self, *schedules: object):
        self.schedules = schedules

    def _of(self, case: Case) -> object:
        for each in self.schedules[:-1]:
            try:
                each.describe(case)
                return each
            except schedule.Unsupported:
                pass
        return self.schedules[-1]

    def requests(self, case: Case) -> list:
        return self._of(case).requests(case)

    def describe(self, case: Case) -> str:
        return self._of(case).describe(case)

    def plan(self, case: Case) -> SimpleNamespace:
        chosen = self._of(case)
        inner = chosen.plan(case)
        return SimpleNamespace(schedule=chosen, inner=inner, last=_gives_last(inner))

    def forward(self, plan: SimpleNamespace, arguments: Sequence) -> list[Tensor]:
        return plan.schedule.forward(plan.inner, arguments)

    def backward(self, plan: SimpleNamespace, *given) -> list:
        return plan.schedule.backward(plan.inner, *given)

    def saved(self, case: Case) -> list:
        return self._of(case).saved(case)

    def reads_y(self, case: Case) -> bool:
        return _reads_y(self._of(case), case)


def _reads_y(schedule: object, case: Case) -> bool:
    return case.saving and hasattr(schedule, "reads_y") and schedule.reads_y(case)


def _gives_last(plan: object) -> bool:
    """Does a schedule's plan give y channels last?"""
    return bool(getattr(plan, "last", False) or getattr(plan, "turns_y", False))


@functools.cache
def first(*schedules: object) -> object:
    return First(*schedules) if schedules[1:] else schedules[0]


def operator_of(
    segment,
    modules: Mapping[str, nn.Module],
    others: Mapping[str, object],
    exact_order: bool,
    name: str,
    schedule: object,
) -> SegmentOperator:
    """The segment's operator by the schedule of that name, a new one where there is none of an equal segment. modules, others: those that
    segment.eager calls, and the attributes that it reads beside the operator's arguments."""
    key = segment.digest, exact_order, name + getattr(schedule, "digest", "")
    with _lock:
        if key[:2] not in _first:
            _first[key[:2]] = segment, {path: _shell(module) for path, module in modules.items()}, others
        segment, modules, others = _first[key[:2]]
        found = _known.get(key)
        if found is None or found.schedule is not schedule:
            found = _known[key] = SegmentOperator(segment, modules, others, exact_order, name, schedule)
    return found


class SegmentOperator:
    """`operator` is loader_operators'; `arguments` the NamedTuple's class; `names` are those of the segment that it was made of. is_told: its schedule's
    backward takes `turned`, `spent` and `settings`, which a chain knows."""

    def __init__(self, segment, modules, others, exact_order: bool, name: str, schedule: object):
        self.segment, self.exact_order, self.names = segment, exact_order, Names(segment)
        self.name, self.schedule = name, schedule
        self.inputs, fields = self.names.inputs, field_names([*self.names.tensors, *self.names.numbers])
        kinds = {fields[name]: Tensor for name in self.names.tensors}
        if segment.random:
            kinds |= {"seed": Tensor, "number": Drawn}
        kinds |= {fields[name]: float for name in self.names.numbers} | {"dtype": int}
        self.arguments = NamedTuple("Arguments", [*kinds.items()])
        self._fields, self.count = [*fields.values()], len(self.names.tensors)
        self.is_told = hasattr(schedule, "spends")
        self._failed: dict[tuple, str] = {}  # for what its kernels can't be built, and why
        self.reference = Reference(self, segment, modules, others)

        def forward(a, *, plan, saving, turned=None):
            found = (
                schedule.forward(plan.inner, a) if turned is None else schedule.forward(plan.inner, a, turned)
            )
            layout = plan.layout
            if not layout.is_there:
                found = [layout.laid_out(found[0]), *found[1:]]
            return found if saving else found[:1]

        forward.__annotations__["a"] = self.arguments
        self.forward = forward
        self.operator = loader_operators.declare(
            f"fused_{name}_{segment.digest}{'_exact' * exact_order}{getattr(schedule, 'digest', '')}",
            forward,
            shapes=self._shapes,
            backward=self.backward,
            gradients=self._gradients,
            plan=self._plan,
            keeps_result=self._keeps_result,
        )

    def fields_of(self, names: Names) -> dict[str, str]:
        """The NamedTuple's fields by the names of an equal segment."""
        return dict(zip((*names.tensors, *names.numbers), self._fields))

    def decide(self, name: str, a: tuple, like: Tensor, saving: bool) -> Decision:
        """What the segment `name` runs for such arguments, whose inputs may have no memory and stand for some on the weight's device."""
        dtype, device = DTYPES[a.dtype], a[self.inputs].device
        standing = [Standing(t, device) if isinstance(t, Tensor) and t.is_meta else t for t in a]
        if reason := self._failed.get(self._build_of(device, a, saving)):
            return Decision(name, "eager", reason)
        case = self._case(tuple.__new__(self.arguments, standing), saving, dtype, like)
        try:
            requests, line = self.schedule.requests(case), self.schedule.describe(case)
        except schedule.Unsupported as error:
            return Decision(name, "eager", str(error))
        return Decision(name, self.name, line, dtype, like, requests)

    def bound(self, plan: SimpleNamespace | None, constants: tuple, needs_gradient: bool) -> Callable:
        """The operator as a function of what varies from call to call, as short as can be; as loader_operators.Operator.bound, of tensors
        whose memory was looked at."""
        if needs_gradient or plan is None or plan.layout.order is not None:
            return self.operator.bound(plan, constants, needs_gradient)
        forward, inner, layout = self.schedule.forward, plan.inner, plan.layout

        def run(*varying):
            y = forward(inner, varying + constants)[0]
            return y if layout.is_there else layout.laid_out(y)

        return run

    def _case(self, a: tuple, saving: bool, dtype: torch.dtype, like: Tensor | None = None) -> Case:
        """like: y, in its layout."""
        x, weight, last = a[0], a[self.inputs], False
        may_be = self.segment.result or library.is_channels_last(x, weight)
        if like is not None and may_be and library.device_type(x) == "cuda":
            last = like.dim() == weight.dim() and library.is_channels_last(like)
        return Case(self.segment, a, saving, dtype, self.exact_order, last)

    def failed(self, a: tuple, saving: bool, reason: str) -> None:
        """Its kernels for such arguments can't be built, for that reason: until kernels are reloaded nobody tries again."""
        self._failed[self._build_of(a[self.inputs].device, a, saving)] = reason

    def _build_of(self, device: torch.device, a: tuple, saving: bool) -> tuple:
        return inline_loader.generation, device.type, a[0].dtype, a[-1], saving

    # ----------------------------------------------------------------------------------------------- for loader_operators

    def _plan(self, a: tuple, *, saving: bool) -> SimpleNamespace:
        """Raises schedule.Unsupported."""
        like = self.reference.like(a)
        case = self._case(a, saving, DTYPES[a.dtype], like)
        inner = self.schedule.plan(case)
        dx_format = library.result_format(a[0], a[self.inputs], True)
        layout = Layout(like, case.last and _gives_last(inner))
        spends = self.schedule.spends(inner) if saving and self.is_told else ()
        keeps, known = _reads_y(self.schedule, case), {"layout": layout, "dx_format": dx_format}
        return SimpleNamespace(inner=inner, spends=spends, keeps_result=keeps, **known)

    def _keeps_result(self, a: tuple) -> bool:
        return _reads_y(self.schedule, self._case(a, True, DTYPES[a.dtype], self.reference.like(a)))

    def backward(
        self,
        dy: Tensor,
        a: tuple,
        *saved: Tensor,
        plan: SimpleNamespace,
        needs: Sequence[bool],
        turned: Tensor | None = None,
        spent: bool = False,
        settings: object = None,
    ) -> list:
        """turned: the filters, as schedule.turns_filters says; where it is given, their gradient lies as those do. spent: nobody else has what
        `plan.spends` of what was saved, or will ask for it. settings: as schedule.backward has them."""
        x, weight = a[0], a[self.inputs]
        if x.data_ptr() < LOW or weight.data_ptr() < LOW:
            check_memory(x, weight)  # what copies and convolves reads without a look
        given = (dy, a, saved, needs, turned, spent, settings) if self.is_told else (dy, a, saved, needs)
        if _is_any_autocast_enabled():  # forward chose the dtypes; a region around backward may not
            with torch.autocast(dy.device.type, enabled=False):
                found = self.schedule.backward(plan.inner, *given)
        else:
            found = self.schedule.backward(plan.inner, *given)
        if found[0] is not None:
            found[0] = found[0].contiguous(memory_format=plan.dx_format)
        return found + [None] * (len(needs) - len(found))

    def _shapes(self, a: tuple, *, saving: bool) -> list[Tensor]:
        dtype, x, weight = DTYPES[a.dtype], a[0], a[self.inputs]
        if x.dtype != weight.dtype:
            raise RuntimeError(f"expected x of the weight's dtype {weight.dtype}, got {x.dtype}")
        y = torch.empty_like(self.reference(a), dtype=dtype)
        if not saving:
            return [y]
        saved = self.schedule.saved(self._case(a, True, dtype, y))
        return [
            y,
            *[
                torch.empty(shape, dtype=kind, device=x.device, memory_format=lies)
                for shape, kind, lies in saved
            ],
        ]

    def _gradients(self, a: tuple) -> list[Tensor]:
        x, weight = a[0], a[self.inputs]
        tensors = [t for t in a if isinstance(t, Tensor)]
        others = [torch.empty_like(t, memory_format=torch.contiguous_format) for t in tensors]
        others[0] = others[0].contiguous(memory_format=library.result_format(x, weight, True))
        at = self.inputs
        others[at] = others[at].contiguous(memory_format=library.weight_format(weight))
        return others


class Names:
    """A segment's own names: of all tensors that its operator takes, in order, the last those that are `updated`, and of its `numbers`. The
    first `inputs` are inputs; the convolution's weight comes next."""

    def __init__(self, segment):
        self.tensors, self.inputs, self.numbers = segment.tensors, len(segment.inputs), [*segment.scalars]
        self.updated = segment.updated


def field_names(names: Iterable[str]) -> dict[str, str]:
    """Fields of a NamedTuple by qualified names: dots become underscores; what is no name, or taken, gets a letter, or a number."""
    found, taken = {}, {"seed", "number", "dtype", "count", "index", "self", *keyword.kwlist}
    for name in names:
        base = re.sub(r"\W", "_", name, flags=re.A).lstrip("_") or "t"
        field = base = f"t{base}" if base[0].isdigit() else base
        for number in range(2, 1 << 20):
            if field not in taken:
                break
            field = f"{base}_{number}"
        taken.add(field)
        found[name] = field
    return found


class Standing(NamedTuple("Standing", [("tensor", Tensor), ("device", torch.device)])):
    """What a tensor is, on another device, without its memory."""

    shape = property(lambda self: self.tensor.shape)
    dtype = property(lambda self: self.tensor.dtype)

    def dim(self) -> int:
        return self.tensor.dim()

    def element_size(self) -> int:
        return self.tensor.element_size()

    def is_contiguous(self, memory_format: torch.memory_format = torch.contiguous_format) -> bool:
        return self.tensor.is_contiguous(memory_format=memory_format)


class Layout:
    """The shape and the order in memory of a plan's results. `is_there`: the last one came so, and all are alike. last: they come channels last,
    as they are to be."""

    def __init__(self, like: Tensor, last: bool = False):
        self.shape, self.is_there = like.shape, last
        self.order = None  # contiguous, or as they come
        if not (last or like.is_contiguous()):
            self.order = sorted(range(like.dim()), key=lambda i: (-like.stride(i), i))
            self.back = [self.order.index(i) for i in range(like.dim())]

    def laid_out(self, y: Tensor) -> Tensor:
        """y, contiguous and of any shape with the same elements, so."""
        self.is_there = self.order is None and y.shape == self.shape
        y = y if y.shape == self.shape else y.view(self.shape)
        return y if self.order is None else y.permute(self.order).contiguous().permute(self.back)


# ----------------------------------------------------------------------------------------------------------------- reference


class Reference:
    """The torch operations that a segment stands for, as a function of its operator's arguments: for shapes, strides, dtypes, errors.

    modules: torch.nn's, whose settings are read now. others: attributes of the model that are no arguments. Nothing keeps a tensor of a
    module, and running statistics are nobody's.
    """

    def __init__(
        self, shared: SegmentOperator, segment, modules: Mapping[str, nn.Module], others: Mapping[str, object]
    ):
        names = Names(segment)
        self.segment, self.eager, self.others, self.fields = (
            segment,
            segment.eager,
            others,
            shared.fields_of(names),
        )
        self.inputs, self.names = names.inputs, names.tensors
        self.shells = {name: _shell(module) for name, module in modules.items()}

    def like(
        self, a: tuple, device: torch.device | None = None, autocast: torch.dtype | None = None
    ) -> Tensor:
        """y, without memory, in eager's layout, or as between.py says. device: in eager's dtype, too, raising what eager raises, as on that device
        and under autocast to that dtype if it isn't None. Without it a's tensors may be of different dtypes, and y's says nothing."""
        y = self._as_eagers(a, device, autocast)
        if self.segment.result is None:
            return y
        x = a[0] if device is None else Standing(a[0], device)
        kept = between.is_kept(self.segment, x, a[self.inputs], Standing(y, x.device))
        return y.contiguous(memory_format=torch.channels_last if kept else torch.contiguous_format)

    def _as_eagers(self, a: tuple, device: torch.device | None, autocast: torch.dtype | None) -> Tensor:
        layout = library.result_format(a[0], a[self.inputs], True)
        with _disable_current_modes(), torch.no_grad():
            if autocast is None:
                alike = [weightless(t) if isinstance(t, Tensor) else t for t in a]
                return self(
                    tuple.__new__(type(a), alike), device is not None, layout, a[self.inputs].device.type
                )
            with FakeTensorMode():  # which knows what autocast does on that device
                alike = [weightless(t, device) if isinstance(t, Tensor) else t for t in a]
                y = self(tuple.__new__(type(a), alike), as_they_are=True)
            return weightless(y)

    def __call__(
        self,
        a: tuple,
        as_they_are: bool = False,
        layout: torch.memory_format | None = None,
        device: str | None = None,
    ) -> Tensor:
        """as_they_are: in the tensors' own dtypes, else all in x's. layout: of the convolution's result. device: for which tensors stand."""
        values: dict[fx.Node, object] = {}
        names, dtype, device = iter(self.names), a[0].dtype, device or a[0].device.type

        def argument(name: str):
            t = getattr(a, self.fields[name])
            return t.to(dtype) if isinstance(t, Tensor) and t.is_floating_point() and not as_they_are else t

        def number(value):
            named = type(value) is Named and value.name in self.fields
            return getattr(a, self.fields[value.name]) if named else value

        for node in self.eager.nodes:
            # Numbers first: map_aggregate makes plain tuples of values such as torch.return_types.min.
            args, kwargs = fx.map_arg(map_aggregate((node.args, node.kwargs), number), values.__getitem__)
            if node.op == "placeholder":
                found = argument(next(names))
            elif node.op == "get_attr":
                found = argument(node.target) if node.target in self.fields else self._other(node.target, a)
            elif node.op == "call_module":
                found = self._module(node.target, a, argument)(*args, **kwargs)
            elif node.op == "call_method":
                found = getattr(args[0], node.target)(*args[1:], **kwargs)
            elif node.op == "call_function":
                found = node.target(*args, **kwargs)
            else:
                return args[0]
            if node.op in ("call_module", "call_function") and self._is_group_norm(node) and device == "cpu":
                found = found.contiguous(
                    memory_format=suggested(args[0])
                )  # which tensors without memory don't know
            if layout is not None and node.op != "placeholder":  # the convolution is what comes first
                if isinstance(found, Tensor) and node.op != "get_attr":
                    found, layout = found.contiguous(memory_format=layout), None
            values[node] = found
        raise RuntimeError("a segment without an output")

    def _is_group_norm(self, node: fx.Node) -> bool:
        if node.op == "call_module":
            return type(self.shells[node.target]) is nn.GroupNorm
        return node.target in (nn.functional.group_norm, torch.group_norm)

    def _other(self, name: str, a: tuple):
        found = self.others[name]
        return torch.empty_like(found, device=a[0].device) if isinstance(found, Tensor) else found

    def _module(self, name: str, a: tuple, argument: Callable[[str], Tensor]) -> nn.Module:
        """That module, with the arguments' tensors, and buffers that are nobody's."""
        module = copy.copy(self.shells[name])
        paths = {key: f"{name}.{key}" for key in module._parameters}
        vars(module)["_parameters"] = {
            key: argument(path) if path in self.fields else None for key, path in paths.items()
        }
        buffers = {key: of and (f"{name}.{key}", *of) for key, of in module._buffers.items()}
        vars(module)["_buffers"] = {key: of and self._buffer(a, *of) for key, of in buffers.items()}
        return module

    def _buffer(self, a: tuple, path: str, shape: torch.Size, dtype: torch.dtype) -> Tensor:
        """Like that of the model whose arguments these are: the shells may be those of an equal segment with other channels."""
        own = getattr(a, self.fields[path]) if path in self.fields else None
        return a[0].new_empty(shape if own is None else own.shape, dtype=dtype)


def _shell(module: nn.Module) -> nn.Module:
    """`module`, or a shell, without tensors and hooks; its buffers are described by shape and dtype."""
    shell = object.__new__(type(module))
    nn.Module.__init__(shell)
    vars(shell).update({k: v for k, v in vars(module).items() if "_hooks" not in k and k != "forward"})
    vars(shell)["_parameters"] = dict.fromkeys(module._parameters)
    vars(shell)["_buffers"] = {
        k: (t.shape, t.dtype) if isinstance(t, Tensor) else t for k, t in module._buffers.items()
    }
    return shell


def weightless(t: Tensor, device: torch.device | str = "meta") -> Tensor:
    """Like t, without its values: where PyTorch doesn't know sizes yet, with those that it expects."""
    sizes, strides = ([_expected(each) for each in given] for given in (t.shape, t.stride()))
    return torch.empty_strided(sizes, strides, dtype=t.dtype, device=device)


def suggested(t: Tensor) -> torch.memory_format:
    """The memory format that operations on t keep."""
    for layout in (torch.channels_last, torch.channels_last_3d):
        if t.dim() == (4 if layout is torch.channels_last else 5) and t.is_contiguous(memory_format=layout):
            return torch.contiguous_format if t.is_contiguous() else layout
    return torch.contiguous_format


def _expected(size) -> int:
    return size if isinstance(size, int) else size.node.hint
