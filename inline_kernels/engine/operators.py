"""What the problems' operators share: which kernels an input asks for, and parameters by channel.

Parameters by channel (biases, affine, multiplier, scale) hold C elements, in the dtype of the result; the problems' own (bias,
multiplier, scale) may hold one element for all channels. Kernels read them in the dtype in which sums are accumulated.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import get_type_hints

import torch
from torch import Tensor

import inline_loader
from inline_kernels.engine import library
from inline_kernels.loader import operators as loader_operators
from inline_kernels.loader.operators import Drawn, Operator

DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
_GOLDEN = 0x4F1BBCDCBFA53E0B  # 2⁶³ by the golden ratio: modulo 2⁶³ its multiples stay as far apart as can be
_CTYPES = dict(zip(DTYPES, ("float", "double", "half_t", "bfloat16_t")))


def load(
    name: str, x: Tensor, out_dtype: torch.dtype, folder=None, launchers=None, **defines
) -> inline_loader.Operators:
    """The kernels of kernels/<name>.* (or of `folder`) for x's device and dtype, results in `out_dtype` (kernels/core/scalar.h): all, or
    those of these `launchers`."""
    defines = {"VALUE_T": _CTYPES[x.dtype], "OUTPUT_T": _CTYPES[out_dtype], **defines}
    chosen = {} if launchers is None else {"launchers": launchers}
    return inline_loader.load(name, folder=folder, device=library.device_type(x), defines=defines, **chosen)


def accumulate_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def index_type(count: int) -> tuple[str, torch.dtype]:
    """The smallest index type for numbers below `count`: its C type and its dtype."""
    return ("uint8_t", torch.uint8) if count <= 256 else ("int32_t", torch.int32)


@functools.lru_cache(None)
def rounded(value: float, dtype: torch.dtype) -> float:
    """A bound as eager compares with it: a tensor of the dtype at hand."""
    return torch.tensor(value, dtype=dtype, device="cpu").item()


def group_norm_raises(x: Tensor, weight: Tensor, norm: torch.nn.GroupNorm, size: list[int]) -> bool:
    """Does `norm` raise an error for the convolution of x, of spatial size `size`?"""
    (C, *_), groups = weight.shape, norm.num_groups
    if groups < 1 or C % groups:
        return True
    return x.dim() == weight.dim() and x.shape[0] * C // groups * math.prod(size) == 1


def window_sides(size) -> tuple[int, int]:
    """A pool's rows and columns, as max_pool2d reads its size; zeros where it refuses."""
    sizes = tuple(size) if isinstance(size, (tuple, list)) else (size,)
    if len(sizes) not in (1, 2) or any(type(each) is not int for each in sizes):
        return 0, 0
    return sizes[0], sizes[-1]


def drawn(x: Tensor, wanted: bool, watched: bool) -> tuple[Tensor, int]:
    """By what x's kernels draw random numbers, where those are `wanted`: a seed, or, where that has no elements, a number. On a GPU it
    is the number, a function of the state of PyTorch's generator, which lies on the host: nothing is launched. That state moves on, and
    whoever restores it (fork_rng, activation checkpointing) gets the same again. What may run more often than it is called, a graph
    under capture or what something watches, draws a seed on the device at each run."""
    if library.device_type(x) == "cuda" and not watched and not torch.cuda.is_current_stream_capturing():
        device = x.device
        generator = torch.cuda.default_generators[device.index]
        return _no_seed(device), _number(generator) if wanted else 0
    if wanted and torch.compiler.is_compiling():  # inductor knows no larger bounds on a GPU
        return torch.randint(2**31 - 1, (2,), dtype=torch.int32, device=x.device).view(torch.int64), 0
    seed = x.new_empty(int(wanted), dtype=torch.int64)
    return seed.random_() if wanted else seed, 0


def _number(generator: torch.Generator) -> int:
    """One of 63 bits. Seeds less than 2³⁰ apart have none in common within 2³² draws, and none is the seed, by which PyTorch's own
    random numbers are drawn."""
    offset = generator.get_offset()
    generator.set_offset(offset + 4)  # the least that it takes
    return (generator.initial_seed() + (offset // 4 + 1) * _GOLDEN) % 2**63


@functools.cache
@torch.inference_mode(False)  # in which it could not be saved for backward
def _no_seed(device: torch.device) -> Tensor:
    return torch.empty(0, dtype=torch.int64, device=device)


# ------------------------------------------------------------------------------------------------------- plans, operators

Output = tuple  # (shape, dtype), and for a result the memory format that eager's has; a shape of 0: nobody keeps it


class Plan(SimpleNamespace):
    """How an operator runs for arguments of one kind: its `kernels`, what it allocates, and whatever a problem adds.

    name: of the kernels. a: a problem's Arguments: x, weight, the parameters by channel, …. parameters: their names; one that ends in "?" may hold one
    element for all channels, the others C. outputs: an Output of each that forward writes; what nobody keeps has no elements. numbers: for `declare_fused`, all
    that the launcher, the first one, takes after what varies. launchers: which ones of the kernels, or all. `none`: like x without elements, in the place of what nobody wants.
    """

    def __init__(
        self,
        name,
        a: tuple,
        parameters,
        outputs,
        defines=None,
        folder=None,
        numbers=None,
        launchers=None,
        **own,
    ):
        (_, self.y_dtype, *y_format), self._names, C = outputs[0], parameters, len(a.weight)
        self._sums, self._last = accumulate_dtype(a.x.dtype), 2 + len(parameters)
        self._varying = sum(kind in (Tensor, Drawn) for kind in get_type_hints(type(a)).values())
        ready = [p.numel() == C and p.dtype == self._sums and p.is_contiguous() for p in a[2 : self._last]]
        self._ready = all(ready)
        self.kernels = load(name, a.x, self.y_dtype, folder, launchers, **defines or {})
        layout = {} if self._ready else dict(dtype=self._sums, memory_format=torch.contiguous_format)
        self._gradient = functools.partial(torch.empty_like, **layout)
        self._as_given = self._ready and a.x.is_contiguous() and a.weight.is_contiguous()
        self.y_format, new = (*y_format, torch.contiguous_format)[0], a.x.new_empty
        self.none = new(0)
        sizes = [((size,) if isinstance(size, int) else size, dtype) for size, dtype, *_ in outputs]
        self._outputs = [new(0, dtype=each[1]) if each[0] == (0,) else each for each in sizes]
        if numbers is not None:
            self.launch = getattr(self.kernels, (launchers or ("forward",))[0]).bound(*numbers)
        super().__init__(**own)

    def when_needed(
        self, name: str, defines: dict, launcher: str, *numbers, launchers=None
    ) -> Callable[[], Callable]:
        """Gives, when it is called, the `launcher` of other kernels, `name`, with `numbers` as its last arguments. They, or
        those of `launchers` alone, are built at the first call, which may never come."""
        x, dtype = self.none, self.y_dtype
        build = functools.partial(load, name, x, dtype, launchers=launchers, **defines)
        return functools.cache(lambda: getattr(build(), launcher).bound(*numbers))

    def outputs(self, a: tuple) -> list[Tensor]:
        """What forward writes, contiguous."""
        new = a.x.new_empty  # and sizes one by one: twice as fast as torch.empty
        return [each if type(each) is Tensor else new(*each[0], dtype=each[1]) for each in self._outputs]

    def parameters(self, a: tuple) -> tuple[Tensor, ...]:
        """The parameters by channel as the kernels read them: contiguous, an element for each channel, of the dtype of sums.

        Raises RuntimeError where one has another number of elements.
        """
        given = a[2 : self._last]
        if self._ready:
            return given
        loader_operators.check_memory(*given)  # before they are converted
        C = len(a.weight)
        for name, parameter in zip(self._names, given):
            if parameter.numel() != C and not (name.endswith("?") and parameter.numel() == 1):
                expected = f"{C} elements, one per channel" + (", or 1" if name.endswith("?") else "")
                got = f"got the shape {list(parameter.shape)}"
                raise RuntimeError(f"expected {name.rstrip('?')} of {expected}, {got}")
        return tuple([p.to(self._sums).reshape(-1).expand(C).contiguous() for p in given])

    def operands(self, a: tuple) -> tuple[Tensor, ...]:
        """All that varies from call to call, as the kernels take it: tensors, and numbers drawn."""
        if self._as_given:
            return a[: self._varying]
        return a.x.contiguous(), a.weight.contiguous(), *self.parameters(a), *a[self._last : self._varying]

    def gradients(self, a: tuple) -> list[Tensor]:
        """Where the kernels write the gradients of the parameters by channel: in the dtype of sums, in the shape of each."""
        return [*map(self._gradient, a[2 : self._last])]

    def as_parameters(self, a: tuple, gradients: list[Tensor]) -> list[Tensor]:
        """Those gradients in the dtypes of the parameters."""
        if self._ready:
            return gradients
        return [g if g.dtype == p.dtype else g.to(p.dtype) for g, p in zip(gradients, a[2 : self._last])]


def statistics(a: tuple, count: int, copied: int, saving: bool) -> Output:
    """`count` statistics of each sample, and copies of `copied` elements of parameters that eager's backward does not read. On a GPU the
    kernels need room for them also where nobody keeps them."""
    kept = saving or library.device_type(a.x) == "cuda"
    return a.x.shape[0] * count + copied if kept else 0, accumulate_dtype(a.x.dtype)


def declare(name: str, forward: Callable, *, outputs: Callable, **functions: Callable) -> Operator:
    """The operator of a problem's Arguments. outputs(a, saving): the result's Output, and those of what forward saves for backward; the
    rest, backward and plan, as in loader_operators.declare."""

    def shapes(a: tuple, *, saving: bool) -> list[Tensor]:
        (shape, dtype, *y_format), *saved = outputs(a, True)
        y = a.x.new_empty(shape, dtype=dtype)
        y = y.contiguous(memory_format=y_format[0]) if y_format else y
        return [y, *[a.x.new_empty(shape, dtype=dtype) for shape, dtype in saved]] if saving else [y]

    def gradients(a: tuple) -> list[Tensor]:
        return library.gradient_shapes(*[t for t in a if isinstance(t, Tensor)])

    return loader_operators.declare(name, forward, shapes=shapes, gradients=gradients, **functions)


def declare_fused(name: str, *, plan: Callable, scratch: bool = True, **functions: Callable) -> Operator:
    """Likewise <name>_fused, of whose forward the plan says all: one launcher takes the result, what is saved and scratch, which are the
    plan's outputs, all operands and the plan's numbers. scratch: is there any, or is that the launcher's?"""

    def forward_fused(a, *, plan, saving):
        y, *written = plan.outputs(a)
        plan.launch(y, *written, *plan.operands(a))
        y = y.contiguous(memory_format=plan.y_format)
        return (y, *(written[:-1] if scratch else written)) if saving else (y,)

    forward_fused.__annotations__["a"] = get_type_hints(plan)["a"]
    return declare(f"{name}_fused", forward_fused, plan=plan, **functions)


def backward_of(operator: Operator, dy: Tensor, a: tuple, needs: list[bool]) -> list[Tensor | None]:
    """The gradients by `operator`, forward and backward, where the kernels of another one find no room."""
    # Forward chose the dtypes; a region of autocast around backward may not.
    with torch.autocast(dy.device.type, enabled=False):
        _, *saved = operator.save(*a)
        return operator.backward(dy, a, saved, needs)
